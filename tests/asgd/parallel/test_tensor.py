"""Layers that several devices share compute what one device does."""

import math

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from asgd import models
from asgd.models import transformer
from asgd.parallel import meshes, tensor

# 11 tokens: no number of devices divides them, and the table is padded.
LAYERS = transformer.gpt(11, depth=1, width=8, heads=4, context=8, dropout=0.3)
WINDOWS = np.random.default_rng(0).integers(0, 11, (2, 9))
TOKENS, LABELS = WINDOWS[:, :-1], WINDOWS[:, 1:]
KEY = jax.random.key(5)


pytestmark = pytest.mark.usefixtures("float64")


def tensor_mesh(devices):
  return meshes.make({"tensor": devices})


def shard(function, devices, in_specs, out_specs, **options):
  return jax.jit(
    jax.shard_map(
      function,
      mesh=tensor_mesh(devices),
      in_specs=in_specs,
      out_specs=out_specs,
      **options,
    )
  )


def split(params, grid):
  """Parameters of the whole model, each device its part."""
  padded = tensor.pad(params, grid.size)
  return meshes.place(padded, grid, tensor.partition(padded))


def join(params, grid, vocabulary):
  return tensor.unpad(meshes.replicated(params, grid), vocabulary)


@jax.jit
@jax.value_and_grad
def whole_loss(params):
  logits, _ = models.apply(LAYERS, params, TOKENS, train=True, key=KEY)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
  return losses.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "sequence"), [(4, False), (2, True)])
def test_loss_and_gradients_are_those_of_the_whole_model(devices, sequence):
  """Dropout too: all masks are those that one device draws."""
  params = kit.parameters(LAYERS, TOKENS)
  layers = tensor.parallel_layers(
    LAYERS, tensor_mesh(devices), sequence=sequence
  )
  placed = split(params, tensor_mesh(devices))
  specs = tensor.partition(placed)

  def loss(params):
    logits, _ = models.apply(layers, params, TOKENS, train=True, key=KEY)
    return tensor.cross_entropy(logits, LABELS, vocabulary=11).mean()

  run = shard(jax.value_and_grad(loss), devices, (specs,), (P(), specs))
  value, grads = run(placed)
  padded = jax.tree.leaves(tensor.pad(jax.tree.map(jnp.ones_like, params), 4))
  assert {0.0, 1.0} == {float(x.min()) for x in padded}
  kit.close(
    (value, join(grads, tensor_mesh(devices), 11)),
    whole_loss(params),
    rtol=1e-12,
  )


def test_a_checkpoint_goes_there_and_back():
  params = kit.parameters(LAYERS, TOKENS)
  for devices in (1, 4):
    grid = tensor_mesh(devices)
    placed = split(params, grid)
    kernel = placed[1]["attention"]["query"]["kernel"]
    local = kernel.addressable_shards[-1]
    last = 4 // devices
    kit.close(
      local.data,
      params[1]["attention"]["query"]["kernel"][:, -last:],
      rtol=1e-12,
    )
    back = join(placed, grid, 11)
    kit.same(back, params)


SENT = ("psum", "psum_invariant", "all_gather", "reduce_scatter", "pmax")


def sent(run, *args):
  """Shapes of what collectives send, by name; numbers of no axis aside."""
  found = {}
  for eqn in kit.equations(jax.make_jaxpr(run)(*args).jaxpr):
    if eqn.primitive.name in SENT and eqn.invars[0].aval.ndim:
      name = eqn.primitive.name.removesuffix("_invariant")
      found.setdefault(name, []).append(eqn.invars[0].aval.shape)
  return found


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_sends_the_stream_twice_each_way(sequence):
  params, x = kit.parameters(LAYERS, TOKENS)[1], kit.normal(2, 8, 8)
  (block,) = tensor.parallel_layers(
    LAYERS[1:2], tensor_mesh(4), sequence=sequence
  )
  specs = tensor.partition(params)
  stream = P(None, "tensor") if sequence else P()

  def forward(params, x):
    return block.apply({"params": params}, x)

  def backward(params, x, dy):
    return jax.vjp(forward, params, x)[1](dy)

  there = shard(forward, 4, (specs, stream), stream)
  both = shard(backward, 4, (specs, stream, stream), (specs, stream))
  if not sequence:
    assert sent(there, params, x) == {"psum": [x.shape] * 2}
    assert sent(both, params, x, x) == {"psum": [x.shape] * 4}
    return
  part = (2, 2, 8)
  assert sent(there, params, x) == {
    "all_gather": [part] * 2,
    "reduce_scatter": [x.shape] * 2,
  }
  told = sent(both, params, x, x)
  # Norms and two biases see a part of the positions: their gradients are sums.
  assert {math.prod(shape) for shape in told.pop("psum")} == {8}
  assert told == {"all_gather": [part] * 4, "reduce_scatter": [x.shape] * 4}


def test_a_cross_entropy_sends_numbers_for_an_example_not_logits():
  logits = kit.normal(2, 8, 12)
  spec = P(None, None, "tensor")

  def gradient(logits):
    def loss(logits):
      return tensor.cross_entropy(logits, LABELS, vocabulary=11).sum()

    return jax.grad(loss)(logits)

  run = shard(gradient, 4, (spec,), spec)
  assert {x for shapes in sent(run, logits).values() for x in shapes} == {
    (2, 8)
  }

  def whole(logits):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits[..., :11], LABELS
    )
    return losses.sum()

  kit.close(run(logits), jax.grad(whole)(logits), rtol=1e-12)
  # Logits that no exponential holds.
  large = shard(
    lambda x: tensor.cross_entropy(x, LABELS, vocabulary=11),
    *(4, (spec,), P()),
  )(1000 * logits)
  assert np.isfinite(large).all()


def test_two_dense_layers():
  x = kit.normal(5, 2)
  first = {"kernel": kit.normal(2, 8, seed=1), "bias": kit.normal(8, seed=2)}
  second = {"kernel": kit.normal(8, 3, seed=3), "bias": kit.normal(3, seed=4)}

  def both(first, second, x):
    h = jnp.tanh(tensor.column_dense(8).apply({"params": first}, x))
    return tensor.row_dense(3).apply({"params": second}, h)

  specs = (
    {"kernel": P(None, "tensor"), "bias": P("tensor")},
    {"kernel": P("tensor"), "bias": P()},
    P(),
  )
  found = shard(both, 4, specs, P())(first, second, x)
  h = np.tanh(x @ first["kernel"] + first["bias"])
  kit.close(found, h @ second["kernel"] + second["bias"], rtol=1e-12)


def embed_of(length, sequence):
  (embed,) = tensor.parallel_layers(
    LAYERS[:1], tensor_mesh(4), sequence=sequence
  )
  params = split(kit.parameters(LAYERS, TOKENS)[:1], tensor_mesh(4))
  tokens = np.zeros((1, length), np.int32)

  def run(params):
    return embed.apply({"params": params[0]}, tokens)

  shard(run, 4, (tensor.partition(params),), P())(params)


MISTAKES = {
  "axis": (lambda: tensor.parallel_layers(LAYERS, meshes.make({"model": 2})),
    r"the mesh has axes \('model',\) and none named 'tensor'"),
  "heads": (lambda: tensor.parallel_layers(LAYERS, tensor_mesh(3)),
    "4 heads cannot be divided among the 3 devices of the axis 'tensor'"),
  "layer": (lambda: tensor.parallel_layers(models.mlp(3), tensor_mesh(2)),
    "a Flatten has no tensor parallel form"),
  "features": (
    lambda: shard(
      lambda: tensor.column_dense(6).init(KEY, jnp.ones((1, 2)))[1], 4, (), P()
    )(),
    "6 features cannot be divided among the 4 devices"),
  "context": (lambda: embed_of(9, False), "9 positions do not fit"),
  "positions": (lambda: embed_of(6, True),
    "6 positions cannot be divided among the 4 devices"),
  "no check": (
    lambda: shard(lambda x: tensor.enter(x), 2, (P(),), P(), check_vma=False)(
      kit.normal(2)
    ),
    "need shard_map with check_vma=True"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
