"""The probe: which algorithms may be split by rows."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, sharding, transforms
from asgd.sharding import probe
from asgd.sharding.probe import check

pytestmark = pytest.mark.usefixtures("float64")

RATE = 0.1
TREE = kit.VARIABLES
PARAMS = {
  "b": np.linspace(-1, 1, 4),
  "w": np.linspace(-1, 2, 130 * 140).reshape(130, 140),  # is factored
}
MORE = {
  **PARAMS,
  "k": np.linspace(-2, 1, 36).reshape(3, 3, 2, 2),
  "s": np.float64(0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(algorithms.RECIPES))
def test_all_recipes_may_run_on_shards(name):
  recipe = algorithms.build(name, RATE, 3)
  check(transforms.own_statistics(recipe.algorithm), TREE)
  for transform in (recipe.at_worker, recipe.at_server):
    if transform:
      check(transform, PARAMS)


KEEP = {
  "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 3, 9)),
  "adagrad": optax.adagrad(RATE),
  "lion": optax.lion(RATE),
  "clip": optax.clip(0.1),
  "inject": optax.inject_hyperparams(optax.rmsprop)(
    optax.piecewise_constant_schedule(RATE, {2: 0.1})
  ),
  "every_3": optax.MultiSteps(optax.adam(RATE), 3).gradient_transformation(),
  "masked": optax.masked(
    optax.add_decayed_weights(RATE),
    lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
  ),
  "partition": optax.multi_transform(
    {"a": optax.adam(RATE), "b": optax.sgd(RATE)},
    {"b": "a", "w": "b"},
  ),
  "schedule_free": optax.contrib.schedule_free_sgd(RATE),
  "per_worker": transforms.per_worker(optax.adam(RATE), 3),
  "lookahead": transforms.lookahead(optax.adam(RATE), lambda w: jnp.arange(3)),
  # It counts what it finds anywhere, but nothing depends on that.
  "zero_nans": optax.zero_nans(),
  # A mean over other axes than the leading one.
  "centralize": optax.centralize(),
  # One long leaf, of which every element is updated by itself.
  "flatten": optax.flatten(optax.sgd(RATE)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEP)
def test_what_keeps_rows_apart_is_accepted(name):
  params = MORE if name in ("centralize", "flatten", "masked") else PARAMS
  assert check(KEEP[name], params) is None


def test_shapes_are_enough():
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), MORE
  )
  assert check(KEEP["adamw"], structs) is None


MIX = {
  "global_norm": optax.clip_by_global_norm(1.0),
  "unit_norm": optax.adaptive_grad_clip(0.1),
  "lamb": optax.lamb(RATE),
  "novograd": optax.novograd(RATE),
  "normalize": optax.contrib.normalize(),
  "prodigy": optax.contrib.prodigy(RATE),
  "adafactor": optax.adafactor(RATE),
  "muon": optax.contrib.muon(RATE),
  "if_finite": optax.apply_if_finite(optax.sgd(RATE), 3),
  "noise": optax.add_noise(RATE, 0.5, key=0),
  "per_worker": transforms.per_worker(optax.lamb(RATE), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIX)
def test_what_reads_other_rows_is_refused(name):
  message = "not the same on shards: .*(rows|other number).*; use one shard$"
  with pytest.raises(ValueError, match=message):
    check(MIX[name], PARAMS)


def test_a_number_has_an_axis_on_a_shard():
  """A shard would decay it, although the mask leaves it out."""
  tx = optax.masked(
    optax.add_decayed_weights(RATE),
    lambda params: jax.tree.map(lambda x: x.ndim > 0, params),
  )
  message = r"the update of \['s'\] .*number of its axes, 1 on a shard; use one"
  with pytest.raises(ValueError, match=message):
    check(tx, MORE)
  assert check(tx, PARAMS) is None


def test_totals_count_only_where_they_are_carried():
  tx = sharding.clip_by_global_norm(RATE)
  check(tx, PARAMS, totals=True)
  with pytest.raises(ValueError, match="its own rows; use one shard$"):
    check(tx, PARAMS)
  remedy = "or transforms made for shards, such as asgd.sharding.clip"
  with pytest.raises(ValueError, match=remedy):
    check(optax.clip_by_global_norm(RATE), PARAMS, totals=True)


def test_the_leaf_is_named():
  masks = {"b": False, "w": True}
  tx = optax.masked(optax.contrib.normalize(), masks)
  with pytest.raises(ValueError, match=r"the update of \['w'\] reads"):
    check(tx, PARAMS)


def test_what_is_sent_counts():
  def send(opt_state, params, *, worker):
    return jax.tree.map(lambda x: x - jnp.max(x), params)

  algorithm = base.as_algorithm(optax.sgd(RATE), send)
  with pytest.raises(ValueError, match=r"the sent value of \['b'\] reads"):
    check(algorithm, PARAMS)


def test_what_is_remembered_counts_when_it_is_read():
  def build(read):
    def update(updates, state, params=None):
      out = jax.tree.map(lambda u: u * state, updates) if read else updates
      return out, state + jnp.sum(updates["b"])

    return optax.GradientTransformation(lambda params: jnp.zeros([]), update)

  check(build(read=False), PARAMS)
  with pytest.raises(ValueError, match=r"the update of \['b'\] reads"):
    check(build(read=True), PARAMS)


def test_an_algorithms_own_errors_stay_its_own():
  with pytest.raises(TypeError, match="value"):
    check(optax.polyak_sgd(), PARAMS)


# Single operations, as rules for one leaf of 4 rows. The numbers say whether
# parts give the same as the whole, which the probe has to agree with.

x44 = np.linspace(-1, 2, 16).reshape(4, 4)
x44 += 0.1 * np.sin(50 * x44)
x64 = np.concatenate([x44, -x44[2:]])  # two parts of one shape
table = np.arange(12.0).reshape(3, 4)


def index():
  """1, but the program does not know."""
  return jnp.argmax(jnp.array([0, 2, 1]))


def rows_of(table, i):
  return jnp.asarray(table)[i]


KEEPING = {
  "reverse columns": lambda x: x[:, ::-1],
  "shift columns": lambda x: jnp.roll(x, 1, axis=1),
  "pad columns": lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :4],
  "sort columns": lambda x: jnp.sort(x, axis=1),
  "sum columns": lambda x: x - x.sum(1, keepdims=True),
  "first of columns": lambda x: x * jnp.argmax(x, axis=1)[:, None],
  "cumulate columns": lambda x: jnp.cumsum(x, axis=1),
  "softmax columns": lambda x: jax.nn.softmax(x, axis=1),
  "ravel": lambda x: (2 * jnp.ravel(x)).reshape(x.shape),
  "there and back": lambda x: jnp.tanh(x.T).T,
  "split columns": lambda x: sum(jnp.split(x, 2, 1))[:, jnp.array([0, 1] * 2)],
  "stack": lambda x: jnp.stack([x, 2 * x])[index()],
  "write a column": lambda x: x.at[:, index()].set(0.0),
  "add a column": lambda x: x.at[:, 1].add(x[:, 0]),
  "update columns": lambda x: jax.lax.dynamic_update_slice(
    *(x, x[:, :2], (0, index()))
  ),
  "a row of a table": lambda x: x * rows_of(table, index()),
  "columns of a table": lambda x: x * jnp.arange(4.0),
  "number the columns": lambda x: x * jax.lax.broadcasted_iota(int, x.shape, 1),
  "noise for all": lambda x: x * jax.random.normal(jax.random.key(0), (4,)),
  "branch": lambda x: jax.lax.cond(index() > 0, lambda x: 2 * x, jnp.tanh, x),
  "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x + i, x),
  "scan": lambda x: jax.lax.scan(lambda c, t: (c + t * x, c), x, table[0])[0],
  "scan columns": lambda x: (
    jax.lax.scan(lambda c, t: (c + t, c * t), x[:, 0], x.T)[1].T
  ),
  "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
  "tile": lambda x: jnp.tile(x, (1, 2))[:, 2:6],
  "unstack": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], axis=1),
  "relu": jax.nn.relu,  # custom_jvp
  "vjp": lambda x: jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) * x[:, :1]))(x),
  "compiled": jax.jit(lambda x: jnp.where(x > 0, x, jnp.zeros_like(x))),
  "an unused sum": lambda x: jax.jit(lambda x: (2 * x, jnp.sum(x)))(x)[0],
}
MIXING = {
  "reverse rows": lambda x: x[::-1],
  "shift rows": lambda x: jnp.roll(x, 1, axis=0),
  "skip rows": lambda x: jnp.repeat(x[::2], 2, axis=0)[: len(x)],
  "sort rows": lambda x: jnp.sort(-x, axis=0),
  "sum rows": lambda x: x - x.sum(0),
  "max": lambda x: x / jnp.max(jnp.abs(x)),
  "gram": lambda x: x @ (x.T @ x),
  "a row": lambda x: x * x[index()],
  "write a row": lambda x: x.at[index()].set(0.0),
  "number the rows": lambda x: x + jnp.arange(len(x))[:, None],
  "rows of a table": lambda x: x * jnp.ones((9, 4)).at[1].set(2.0)[: len(x)],
  "size": lambda x: x / x.size,
  "extents as numbers": lambda x: x**1.5 if len(x) > 2 else x,
  "noise for each": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
  "branch of a sum": lambda x: jax.lax.cond(
    x.sum() > 1, lambda x: 2 * x, jnp.sin, x
  ),
  "loop of a sum": lambda x: jax.lax.while_loop(
    lambda c: jnp.sum(c * c) > 1, lambda c: c / 2, x
  ),
  "scan rows": lambda x: jax.lax.scan(lambda c, t: (c + t, c), x[0], x)[1],
  "callback": lambda x: jax.pure_callback(
    lambda x: np.sort(-x, axis=0), jax.ShapeDtypeStruct(x.shape, x.dtype), x
  ),
}


@functools.cache
def on_parts():
  """Which rules do the same on parts as on the whole, all in one program."""
  rules = {**KEEPING, **MIXING}
  compiled = jax.jit(lambda x: {name: rules[name](x) for name in rules})
  whole, first, rest = compiled(x64), compiled(x64[:3]), compiled(x64[3:])
  return {
    name: np.allclose([*first[name], *rest[name]], whole[name], rtol=1e-12)
    for name in rules
  }


def test_operations_that_keep_rows_apart():
  """All in one program, each for a leaf."""
  assert all(on_parts()[name] for name in KEEPING)
  check(*for_leaves(KEEPING.values()))


def for_leaves(rules):
  """A transform with a rule for each leaf, and its leaves.

  Of four leaves the last is not cut: there the rule is one that keeps rows.
  """
  threes = [list(rules)[i : i + 3] for i in range(0, len(rules), 3)]
  rules = [rule for three in threes for rule in (*three, jnp.tanh)]

  def update(updates, params):
    return [rule(u) for rule, u in zip(rules, updates, strict=True)]

  return optax.stateless(update), [x44] * len(rules)


@functools.cache
def differing():
  """The rules of MIXING whose leaf is told, all in one program."""
  tx, leaves = for_leaves(MIXING.values())
  told = set(probe.differences(base.as_algorithm(tx), leaves))
  places = [i for i in range(len(leaves)) if i % 4 < 3]
  return {
    name
    for name, i in zip(MIXING, places, strict=False)
    if f"the update of [{i}] reads more than its own rows" in told
  }


@pytest.mark.parametrize("name", MIXING)
def test_an_operation_that_mixes_rows(name):
  assert not on_parts()[name]
  assert name in differing()


def test_leaves_of_one_shape_are_told_apart():
  def swap(updates, params):
    return {"a": updates["b"], "b": updates["a"]}

  with pytest.raises(ValueError, match="other shapes than|fails on a part"):
    check(optax.stateless(swap), {"a": x44, "b": x44})

  def add(updates, params):
    return {"a": updates["a"] + updates["b"], "b": updates["b"]}

  with pytest.raises(ValueError, match="other shapes than|fails on a part"):
    check(optax.stateless(add), {"a": x44, "b": x44})


SHARED = {
  "sum": lambda x: x - sharding.total(jnp.sum(x)),
  "mean": lambda x: (
    x - sharding.total(x.sum()) / sharding.total(jnp.sum(jnp.ones_like(x)))
  ),
  "norm": lambda x: x / jnp.sqrt(sharding.total(jnp.vdot(x, x))),
  "columns": lambda x: x - 2 * sharding.total(-jnp.sum(x, 0) / 3),
  "tree": lambda x: x - sharding.total(sum([jnp.sum(x), jnp.sum(x**2)])),
}
NOT_SHARED = {
  "a norm": lambda x: x - sharding.total(jnp.linalg.norm(x)),
  "a maximum": lambda x: x - sharding.total(jnp.max(x)),
  "rows": lambda x: x - sharding.total(x),
  "a number": lambda x: x - sharding.total(jnp.float64(1.0)),
  "a sum and one": lambda x: x - sharding.total(jnp.sum(x) + 1),
  "a rounded sum": lambda x: x - sharding.total(jnp.round(jnp.sum(x))),
  "a ratio": lambda x: x - sharding.total(1 / jnp.sum(x)),
}


@pytest.mark.parametrize("name", SHARED)
def test_totals_of_sums_over_rows_are_everybodys(name):
  rule = SHARED[name]
  check(
    optax.stateless(lambda u, p: jax.tree.map(rule, u)), {"x": x44}, totals=True
  )
  parts = [(x44[:1],), (x44[1:],)]
  results = sharding.run_staged(sharding.staged(rule), parts)
  np.testing.assert_allclose(jnp.concatenate(results), rule(x44), rtol=1e-12)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_totals_of_anything_else_are_refused(name):
  rule = NOT_SHARED[name]
  with pytest.raises(ValueError, match="not the same on shards"):
    check(optax.stateless(lambda u, p: jax.tree.map(rule, u)), x44, totals=True)


def test_arrays_of_the_rules_own_are_refused_if_they_have_rows():
  mask = np.linspace(0, 1, 16).reshape(4, 4)
  rule = optax.stateless(lambda u, p: u * mask)
  with pytest.raises(ValueError, match="it fails on a part of the rows"):
    check(rule, x44)
  ones = optax.stateless(lambda u, p: u * np.ones(u.shape))
  check(ones, x44)
  rows = optax.stateless(lambda u, p: u * np.arange(len(u))[:, None])
  with pytest.raises(ValueError, match="reads more than its own rows"):
    check(rows, x44)
