"""Every all-reduce that is written out adds up what XLA's own does, and moves
the bytes that its formula says."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from asgd.parallel import collectives, costs, meshes
from asgd.parallel.memory import bytes_of

pytestmark = pytest.mark.usefixtures("float64")


def on_devices(function, *shape):
  """Applies a function to each device's row: [N, ...] -> [N, ...]."""
  grid = meshes.make(dict(zip(("data", "node"), shape, strict=False)))
  spec = PartitionSpec(grid.axis_names)

  def one(tree):
    out = function(jax.tree.map(lambda x: x[0], tree))
    return jax.tree.map(lambda x: x[None], out)

  return jax.shard_map(
    one, mesh=grid, in_specs=spec, out_specs=spec, check_vma=False
  )


WRITTEN = sorted(set(collectives.COLLECTIVES) - {"psum"})
ONE_AXIS = sorted(set(WRITTEN) - {"hierarchical"})


def arrays(devices):
  """Less than a chunk, no whole chunks, whole numbers, nothing."""
  rng = np.random.default_rng(0)
  return {
    "scalar": rng.standard_normal(devices),
    "odd": rng.standard_normal((devices, 2, 3, 5)),
    "byte": rng.integers(-9, 9, (devices, 7)).astype(np.int8),
    "none": np.zeros((devices, 0, 4), np.float32),
  }


def assert_psum(name, axis, *shape):
  x = arrays(int(np.prod(shape)))
  reduce = collectives.lookup(name)

  def both(tree):
    return (
      jax.tree.map(lambda leaf: reduce(leaf, axis), tree),
      jax.lax.psum(tree, axis),
    )

  found, wanted = jax.device_get(jax.jit(on_devices(both, *shape))(x))
  for key in x:
    assert found[key].dtype == wanted[key].dtype == x[key].dtype
    assert found[key].shape == wanted[key].shape
    assert (found[key] == found[key][:1]).all()  # to the bit, on all devices
    if x[key].dtype == np.float64:
      np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=1e-14)
    else:
      assert (found[key] == wanted[key]).all()


@pytest.mark.parametrize(
  ("name", "devices"),
  [(name, 6) for name in ONE_AXIS]
  + [(name, 4) for name in ("recursive_doubling", "halving_doubling")],
)
def test_it_is_psum(name, devices):
  assert_psum(name, "data", devices)


@pytest.mark.parametrize(
  "name", ["ring", "bidirectional_ring", "parameter_server"]
)
def test_on_many_devices_it_is_psum(name, monkeypatch):
  """Where a program has no branch for each device."""
  monkeypatch.setattr(collectives, "_MAX_BRANCHES", 0)
  assert_psum(name, "data", 6)


def test_the_fastest_is_psum_and_depends_on_the_size():
  link = costs.link(1e6, 1e-3)  # a round takes as long as 1,000 bytes
  reduce = collectives.fastest(link)
  assert_psum(reduce, "data", 6)
  rounds = []
  for count in (10, 10_000):
    found = messages(
      lambda x: reduce(x, "data"), np.zeros((8, count), np.float32), 8
    )
    among = [
      costs.COSTS[name](4 * count, 8, grain=4)
      for name in ("ring", "halving_doubling", "recursive_doubling", "tree")
    ]
    least = min(costs.seconds(cost, link) for cost in among)
    rounds.append(len(found))
    moved = sum(bytes_ for _, bytes_, _ in found)
    assert costs.seconds(costs.Cost(len(found), moved, 0), link) == least
  assert rounds[0] < rounds[1]
  with pytest.raises(ValueError, match="'rings'"):
    collectives.fastest(link, ["rings"])


def test_alone_it_is_what_it_was_given():
  x = arrays(1)

  def one(name, tree):
    axis = ("data", "node") if name == "hierarchical" else "data"
    reduce = collectives.lookup(name)
    return jax.tree.map(lambda leaf: reduce(leaf, axis), tree)

  def all_of_them(tree):
    return [one(name, tree) for name in WRITTEN]

  for found in jax.jit(on_devices(all_of_them, 1, 1))(x):
    assert all((found[key] == x[key]).all() for key in x)


def test_hierarchical_is_psum_over_both_axes():
  assert_psum("hierarchical", ("data", "node"), 3, 2)


def test_two_axes_are_one_ring():
  assert_psum("ring", ("data", "node"), 2, 2)


def test_a_server_of_few_shards_is_psum():
  collective = functools.partial(collectives.parameter_server, shards=2)
  assert_psum(collective, "data", 3)


def test_reduce_scatter_and_all_gather_are_xlas():
  x = np.random.default_rng(0).standard_normal((4, 2, 5))

  def both(x):
    padded = jnp.pad(x.reshape(-1), (0, 2)).reshape(4, 3)
    return (
      collectives.ring_reduce_scatter(x, "data"),
      jax.lax.psum_scatter(padded, "data"),
      collectives.ring_all_gather(x, "data"),
      jax.lax.all_gather(x, "data"),
    )

  scattered, wanted, gathered, all_ = jax.jit(on_devices(both, 4))(x)
  np.testing.assert_allclose(scattered, wanted, rtol=0, atol=1e-14)
  assert (gathered == all_).all()
  assert (gathered[2] == x).all()


# What is sent, read off the program.


def messages(function, x, *shape):
  """(senders and receivers, bytes, axis) of each round's messages."""
  program = jax.make_jaxpr(on_devices(function, *shape))(x).jaxpr
  return [
    (eqn.params["perm"], bytes_of(eqn.invars[0].aval), eqn.params["axis_name"])
    for eqn in kit.equations(program)
    if eqn.primitive.name == "ppermute"
  ]


def sent_by_the_busiest(found, devices):
  sent = [0] * devices
  for pairs, bytes_, _ in found:
    for source, _ in pairs:
      sent[source] += bytes_
  return max(sent)


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("name", ONE_AXIS)
def test_it_moves_what_the_model_says(name, devices):
  for count in (1, 37, 240):
    x = np.zeros((devices, count), np.float32)
    reduce = functools.partial(collectives.lookup(name), axis="data")
    found = messages(reduce, x, devices)
    cost = costs.COSTS[name](count * 4, devices, grain=4)
    for pairs, _, _ in found:  # one link: a message out, and one in, a round
      ends = list(zip(*pairs, strict=True))
      assert all(len(set(end)) == len(end) for end in ends)
    together = 2 if name == "bidirectional_ring" else 1
    assert len(found) == together * cost.steps
    assert sum(bytes_ for _, bytes_, _ in found) == together * cost.bytes
    assert sent_by_the_busiest(found, devices) == cost.sent


@pytest.mark.parametrize(("devices", "shards"), [(4, 1), (6, 4), (5, 5)])
def test_a_server_moves_what_the_model_says(devices, shards):
  x = np.zeros((devices, 60))
  reduce = functools.partial(
    collectives.parameter_server, axis="data", shards=shards
  )
  found = messages(reduce, x, devices)
  cost = costs.parameter_server(480, devices, shards=shards, grain=8)
  assert len(found) == cost.steps == 2 * (devices - 1)
  assert sum(bytes_ for _, bytes_, _ in found) == cost.bytes
  assert sent_by_the_busiest(found, devices) == cost.sent
  received = sum(
    bytes_ for pairs, bytes_, _ in found for _, target in pairs if target == 0
  )
  # Poseidon's server and worker node, in elements there and back.
  table = 2 * 60 * (devices + shards - 2) / shards
  assert (cost.sent + received) / 8 == table


@pytest.mark.parametrize("shape", [(4, 2), (2, 3)])
def test_two_levels_move_what_the_model_says(shape):
  devices = int(np.prod(shape))
  x = np.zeros((devices, 50), np.float32)
  reduce = functools.partial(collectives.hierarchical, axis=("data", "node"))
  found = messages(reduce, x, *shape)
  levels = costs.hierarchical(200, *shape, grain=4)
  for name, level in zip(("data", "node"), levels, strict=True):
    mine = [bytes_ for _, bytes_, axis in found if name in axis]
    assert (len(mine), sum(mine)) == (level.steps, level.bytes)


# Buckets.


def test_buckets_go_backwards_and_have_one_dtype():
  tree = [
    *(np.zeros(3, np.float32), np.zeros(9, np.float32)),
    *(np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(1, np.float32)),
  ]
  assert collectives.buckets(tree, 12) == ((4, 3), (2,), (1,), (0,))
  # The bucket of int32 stays open while float32 ones are closed.
  assert collectives.buckets(tree, 48) == ((2,), (4, 3, 1), (0,))
  assert collectives.buckets(tree, 1) == ((4,), (3,), (2,), (1,), (0,))
  assert collectives.buckets((), 1) == ()


@pytest.mark.parametrize("reduce", ["psum", "ring"])
def test_a_tree_is_added_in_buckets(reduce):
  tree = ({"a": arrays(2)}, [arrays(2)["odd"]])

  def both(tree):
    found = collectives.all_reduce_tree(
      tree, "data", bucket_bytes=64, reduce=reduce
    )
    return found, jax.lax.psum(tree, "data")

  found, wanted = jax.jit(on_devices(both, 2))(tree)
  kit.close(found, wanted, atol=1e-14)
  for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    assert one.dtype == other.dtype


MISTAKES = {
  "name": (lambda x: collectives.all_reduce_tree(x, "data", reduce="rign"),
    "unknown collective 'rign'; did you mean 'ring'"),
  "axes": (lambda x: collectives.hierarchical(x, "data"),
    r"hierarchical needs two axes, \(inside of a node, between nodes\)"),
  "shards": (lambda x: collectives.parameter_server(x, "data", shards=3),
    "shards must be from 1 to the 2 devices, not 3"),
  "bytes": (lambda x: collectives.all_reduce_tree(x, "data", bucket_bytes=0),
    "bucket_bytes must be a positive whole number, not 0"),
}


test_a_mistake_is_told = kit.refuses(
  MISTAKES, lambda call: jax.make_jaxpr(on_devices(call, 2))(np.zeros((2, 3)))
)
