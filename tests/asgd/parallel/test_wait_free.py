"""The wait-free gradient is the gradient, and each part of it is sent before
the rest is computed."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from asgd import base, models, problems
from asgd.models import transformer
from asgd.parallel import meshes, wait_free

DEVICES = 4


pytestmark = pytest.mark.usefixtures("float64")


def pieces_of(layers):
  """Cross-entropy of the last axis, with noise on what comes in."""

  def prepare(batch, key, dtype):
    x = batch[0]
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return x.astype(dtype) + 0.1 * jax.random.uniform(key, x.shape, dtype)

  def criterion(logits, batch):
    chosen = jax.nn.one_hot(batch[1], logits.shape[-1], dtype=logits.dtype)
    return -jnp.mean(jnp.sum(chosen * jax.nn.log_softmax(logits), -1))

  return problems.Pieces(layers, prepare, criterion)


def mlp():
  layers = models.build("mlp", 3, hidden=(7, 5))
  batch = kit.normal(DEVICES, 6), np.arange(DEVICES) % 3
  return pieces_of(layers), kit.parameters(layers, batch[0]), batch


class Block(nn.Module):
  """A GPT's MLP, beside what it is added to."""

  @nn.compact
  def __call__(self, x, train):
    h = nn.Dense(8, name="up")(x)
    return x + nn.Dense(x.shape[-1], name="down")(h * h)


class Noise(nn.Module):
  """Statistics and dropout, and no weights."""

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dropout(0.3, deterministic=not train)(x)
    return nn.BatchNorm(
      use_running_average=not train,
      momentum=0.0,
      use_bias=False,
      use_scale=False,
    )(x)


class Twice(nn.Module):
  """A dense layer that is called twice."""

  @nn.compact
  def __call__(self, x, train):
    dense = nn.Dense(x.shape[-1], name="dense")
    return dense(dense(x))


class Tied(nn.Module):
  """A kernel that is read beside its dense layer, too."""

  @nn.compact
  def __call__(self, x, train):
    dense = nn.Dense(x.shape[-1], use_bias=False, name="dense")
    y = dense(x)
    return y + x @ dense.variables["params"]["kernel"].T


class Again(nn.Module):
  """A block that is computed again in the backward."""

  @nn.compact
  def __call__(self, x, train):
    return nn.remat(Block, static_argnums=2)(name="block")(x, train)


def everything():
  """What is special about layers: tokens, positions, statistics, ..."""
  layers = transformer.Embed(7, 3, 4), Block(), Noise(), Twice(), Tied()
  layers = (*layers, Again(), models.Classifier(7))
  rng = np.random.default_rng(0)
  batch = tuple(rng.integers(0, 7, (2, DEVICES, 3)))
  params = kit.parameters(layers, batch[0])
  assert isinstance(params, base.Variables)
  return pieces_of(layers), params, batch


def sharded(pieces, axis="data", grid=None, **options):
  """(params, batch, key) -> what every device returns, of the whole batch."""
  spec = PartitionSpec(axis)
  return jax.shard_map(
    wait_free.gradient(pieces, axis, **options),
    mesh=grid or meshes.make({"data": DEVICES}),
    in_specs=(PartitionSpec(), spec, PartitionSpec()),
    out_specs=PartitionSpec(),
    check_vma=False,
  )


def one_by_one(pieces, params, batch, key):
  """The mean over parts of the batch of what one device computes."""
  gradient = jax.value_and_grad(problems.whole_loss(pieces), has_aux=True)

  def one(part):
    return gradient(params, part, key)

  parts = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
  return jax.tree.map(lambda x: x.mean(0), jax.vmap(one)(parts))


@functools.cache
def wanted(problem):
  pieces, params, batch = problem()
  run = jax.jit(functools.partial(one_by_one, pieces))
  return run(params, batch, jax.random.key(1))


def assert_gradient(problem, axis="data", grid=None, **options):
  pieces, params, batch = problem()
  run = jax.jit(sharded(pieces, axis, grid, **options))
  found = run(params, batch, jax.random.key(1))
  expected = wanted(problem)
  kit.close(found, expected, rtol=1e-12, atol=1e-13)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)


def test_it_is_the_gradient_of_the_mean_loss():
  # Two layers by their factors, and one dense.
  assert_gradient(mlp, factors="rule")
  sums = [x for x in trace(mlp, factors="rule") if x[0] == "all_gather"]
  assert len(sums) == 4


@pytest.mark.slow
def test_of_layers_that_are_special():
  assert_gradient(everything, factors="always")


def test_in_buckets_on_two_levels():
  grid, axes = meshes.make({"data": 2, "node": 2}), ("data", "node")
  assert_gradient(mlp, axes, grid, reduce="hierarchical", bucket_bytes=200)


# Which message waits for which products.


def equations(function, *args):
  """The program of one device, flat: (name, inputs, outputs) in its order."""
  out = []

  def walk(jaxpr, inputs):
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable):
      if isinstance(variable, jax.extend.core.Literal):
        return None
      return known.setdefault(variable, object())

    for eqn in jaxpr.eqns:
      inner = list(jax.extend.core.jaxprs_in_params(eqn.params))
      name = eqn.primitive.name
      if name in ("shard_map", "jit", "pjit", "closed_call"):
        (body,) = inner
        ends = walk(body, [of(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, ends, strict=True))
      else:
        inputs = [of(v) for v in eqn.invars]
        out.append((name, inputs, [of(v) for v in eqn.outvars]))
    return [of(v) for v in jaxpr.outvars]

  made = jax.make_jaxpr(function)(*args).jaxpr
  walk(made, [object() for _ in made.invars])
  return out


def products_before(program, name):
  """For each such message: (products it waits for, products before it)."""
  source = {
    id(end): number
    for number, (_, _, ends) in enumerate(program)
    for end in ends
  }

  def products(numbers):
    return sum(program[i][0] == "dot_general" for i in numbers)

  found = []
  for number, (kind, inputs, _) in enumerate(program):
    if kind != name:
      continue
    needed, todo = set(), list(inputs)
    while todo:
      at = source.get(id(todo.pop()))
      if at is not None and at not in needed:
        needed.add(at)
        todo += program[at][1]
    found.append((products(needed), products(range(number))))
  return found


def trace(problem, gradient=None, **options):
  pieces, params, batch = problem()
  run = gradient or sharded(pieces, **options)
  return equations(run, params, batch, jax.random.key(0))


def test_no_layer_waits_for_the_backward_of_those_before_it():
  # Forward: 3 products. Backward: x^T dy and dy W^T of each layer; of the first
  # only the former. All are 8.
  (top, middle, bottom, _) = products_before(trace(mlp), "psum")
  # The classifier waits for the forward and its x^T dy, and goes before the
  # others' backward; its dy W^T may be computed with it.
  assert top == (3 + 1, 3 + 2)
  # The next one waits for dy W^T of the classifier, and not for its x^T dy.
  assert middle == (3 + 2, 3 + 4)
  assert bottom == (3 + 3, 8)


def test_otherwise_all_of_them_are_computed_first():
  pieces, _, _ = mlp()

  def after_all(params, batch, key):
    gradient = jax.grad(problems.whole_loss(pieces), has_aux=True)
    grads, _ = gradient(params, batch, key)
    return jax.lax.psum(grads, "data")

  run = jax.shard_map(
    after_all,
    mesh=meshes.make({"data": DEVICES}),
    in_specs=(PartitionSpec(), PartitionSpec("data"), PartitionSpec()),
    out_specs=PartitionSpec(),
    check_vma=False,
  )
  found = products_before(trace(mlp, run), "psum")
  assert {before for _, before in found} == {8}


def test_a_bucket_waits_for_its_layers_only():
  # 5 x 3 + 3 numbers of 8 bytes, and one is missing.
  found = products_before(trace(mlp, bucket_bytes=8 * 19), "psum")
  # x^T dy of two layers and dy W^T between them; then the first.
  assert [needed for needed, _ in found[:-1]] == [3 + 3, 3 + 3]
  assert found[0][1] < 8


def test_factors_wait_for_no_product_of_their_own():
  found = products_before(trace(mlp, factors="always"), "all_gather")
  # x and dy of each layer: products of the forward before x, and of the
  # backward before dy.
  assert [needed for needed, _ in found] == [2, 3, 1, 3 + 1, 0, 3 + 2]


# Which layers send factors.


def test_the_rule_is_poseidons():
  pieces, params, _ = mlp()
  batch = np.zeros((1, 6)), np.zeros(1, int)
  chosen = wait_free.choose(pieces, params, batch, devices=4)
  # K <= 2 M N / (D (M + N)): 1.6, 1.5 and 0.9.
  assert [(c.layer, c.path) for c in chosen] == (
    [(number, ("dense",)) for number in (1, 2, 3)]
  )
  assert [c[2:5] for c in chosen] == [(1, 6, 7), (1, 7, 5), (1, 5, 3)]
  assert [c.factors for c in chosen] == [True, True, False]
  batch = np.zeros((2, 6)), np.zeros(2, int)
  chosen = wait_free.choose(pieces, params, batch, devices=4)
  assert [c.rows for c in chosen] == [2, 2, 2]
  assert not any(c.factors for c in chosen)
  chosen = wait_free.choose(pieces, params, batch, devices=1, factors="always")
  assert not any(c.factors for c in chosen)


def test_positions_are_rows_and_what_is_called_twice_goes_dense():
  pieces, params, batch = everything()
  chosen = wait_free.choose(pieces, params, batch, 2, factors="always")
  assert [(c.layer, c.path, c[2:5]) for c in chosen] == [
    (1, ("up",), (12, 4, 8)),
    (1, ("down",), (12, 8, 4)),
    (6, ("dense",), (12, 4, 7)),
  ]


MISTAKES = {
  "factors": (dict(factors="some"), "factors must be one of rule, always, nev"),
  "bytes": (dict(bucket_bytes=-1), "bucket_bytes must be a whole number, 0 or"),
  "reduce": (dict(reduce="trees"), "did you mean 'tree'"),
}


test_a_mistake_is_told = kit.refuses(
  MISTAKES, lambda options: wait_free.gradient(mlp()[0], "data", **options)
)
