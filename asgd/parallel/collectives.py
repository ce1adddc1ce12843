"""All-reduce algorithms written out in messages, as `jax.lax.psum` may use.

A collective consists of rounds of `jax.lax.ppermute`, in which a device sends
at most one message and receives at most one. The module `asgd.parallel.costs`
has a formula for the time of each collective. The collectives are for teaching
and measuring; training uses XLA's own, "psum".

Call them inside `jax.shard_map` with (x, axis):
  axis  a name of the mesh, or a tuple of names that count as one axis.
  x     an array of any shape and of any dtype that can be added. For booleans
        the sum is "or", where `psum` counts. The array is padded with zeros and
        cut into equal chunks.

Unless its docstring says otherwise, a collective returns the sum over devices,
with the shape and dtype of x, equal on all devices to the bit. JAX cannot infer
that the sums are equal, so shard_map needs check_vma=False, or the axis in its
out_specs. Rounds are unrolled: XLA can overlap them, but the size of the
program grows with N.

Index letters in shape comments:
  N  devices of the axis
  C  elements of a chunk
  P  shards of a parameter server
  L  leaves of a tree

References:
  Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
  workstations", JPDC 2009: the ring.
  Thakur, Rabenseifner and Gropp, "Optimization of collective communication
  operations in MPICH", IJHPCA 2005: recursive doubling, and halving and
  doubling, for any number of devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from asgd import checks, names
from asgd.parallel import costs
from asgd.parallel.memory import bytes_of

Axis = str | tuple[str, ...]
Reduce = Callable[[jax.Array, Any], jax.Array]  # (x, axis) -> the sum
BUCKET_BYTES = 4 * 1024 * 1024  # default of all_reduce_tree
_MAX_BRANCHES = 16  # largest number of devices with one branch for each


def _cut(x: jax.Array, pieces: int) -> jax.Array:
  """Returns x as [pieces, C], padded with zeros at the end."""
  flat = x.reshape(-1)
  chunk = -(-flat.size // pieces)
  flat = jnp.pad(flat, (0, pieces * chunk - flat.size))
  return flat.reshape(pieces, chunk)


def _paste(chunks: jax.Array, like: jax.Array) -> jax.Array:
  """The inverse of `_cut`."""
  return chunks.reshape(-1)[: like.size].reshape(like.shape)


def _ring(devices: int, step: int) -> list[tuple[int, int]]:
  """Returns (sender, receiver) pairs: device d sends to device d + `step`."""
  return [(d, (d + step) % devices) for d in range(devices)]


def _in_device_order(
  arrays: Sequence[jax.Array], rank: jax.Array, rows: int, step: int
) -> jax.Array:
  """Reorders arrays from the order of a ring to the order of devices.

  `arrays[i]` is from the device i steps before this one, `rank`. Row j of the
  result, [rows, ...], is from device j."""
  devices = len(arrays)

  def stack(device):
    order = [(device - i) * step % devices for i in range(rows)]
    return lambda arrays: jnp.stack([arrays[i] for i in order])

  if devices <= _MAX_BRANCHES:
    # One branch for each device, which copies whole arrays. With a dynamic
    # index, XLA's CPU backend selects element by element, which is slow.
    return jax.lax.switch(rank, list(map(stack, range(devices))), arrays)
  order = (rank - jnp.arange(rows)) * step % devices
  return jnp.take(jnp.stack(arrays), order, axis=0)


def ring_reduce_scatter(x: jax.Array, axis: Axis, step: int = 1) -> jax.Array:
  """Returns this device's chunk of the sum, as `jax.lax.psum_scatter`: [C] of
  the flat sum padded to [N, C].

  In each of N - 1 rounds every device sends a chunk to the next device, or to
  the previous device if `step` is -1.
  """
  devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  chunks = _cut(jnp.asarray(x), devices)
  # A sum starts at its owner's neighbour and ends at its owner.
  total = chunks[(rank - step) % devices]
  for round_number in range(1, devices):
    total = jax.lax.ppermute(total, axis, _ring(devices, step))
    # This sum began at the device `round_number` steps back, with the chunk one
    # step before that device.
    total = total + chunks[(rank - (round_number + 1) * step) % devices]
  return total


def ring_all_gather(x: jax.Array, axis: Axis, step: int = 1) -> jax.Array:
  """Gathers all devices' arrays, [...] -> [N, ...], as `jax.lax.all_gather`. In
  each of N - 1 rounds every device forwards the last array to the next device,
  or to the previous device if `step` is -1."""
  devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  chunks = [jnp.asarray(x)]
  # After i rounds the last array is from the device i steps before this one.
  for _ in range(devices - 1):
    chunks.append(jax.lax.ppermute(chunks[-1], axis, _ring(devices, step)))
  return _in_device_order(chunks, rank, devices, step)


def ring_all_reduce(x: jax.Array, axis: Axis) -> jax.Array:
  """Reduce-scatter, then all-gather, around a ring: 2 (N - 1) rounds, each with
  an N-th of the array. For every N a device sends about twice the array."""
  x = jnp.asarray(x)
  return _paste(ring_all_gather(ring_reduce_scatter(x, axis), axis), x)


def bidirectional_ring(x: jax.Array, axis: Axis) -> jax.Array:
  """Two rings at once in opposite directions, each for half of the array.

  2 (N - 1) rounds, in each of which a device sends two messages of a 2 N-th of
  the array. This takes half the time of one ring if a device can send to both
  neighbours at once."""
  x = jnp.asarray(x)
  devices = jax.lax.axis_size(axis)
  chunks = _cut(x, 2 * devices)
  forward = ring_reduce_scatter(chunks[:devices], axis)
  backward = ring_reduce_scatter(chunks[devices:], axis, -1)
  halves = ring_all_gather(forward, axis), ring_all_gather(backward, axis, -1)
  return _paste(jnp.concatenate(halves), x)


def _on_power_of_two(
  x: jax.Array,
  axis: Axis,
  inner: Callable[[list[int], jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """Runs inner(members, x, index of this device in `members`) on 2^k of the N
  devices, the members.

  If N is no power of 2, the first 2 (N - 2^k) devices form pairs. The even
  device of a pair sends its array to the odd device, which is a member, and
  receives the sum at the end."""
  devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  n_members = 1 << (devices.bit_length() - 1)  # the largest 2^k up to N
  n_pairs = devices - n_members
  members = [
    2 * i + 1 if i < n_pairs else i + n_pairs for i in range(n_members)
  ]
  member_index = jnp.where(rank < 2 * n_pairs, rank // 2, rank - n_pairs)
  if not n_pairs:
    return inner(members, x, member_index)
  even_to_odd = [(2 * i, 2 * i + 1) for i in range(n_pairs)]
  # [1] Even devices of pairs hand in their arrays. A device that receives
  # nothing adds zeros.
  x = x + jax.lax.ppermute(x, axis, even_to_odd)
  # [2] The members add up. The other devices compute too, and drop the result.
  x = inner(members, x, member_index)
  # [3] The odd devices send the sum to the even devices of their pairs.
  odd_to_even = [(odd, even) for even, odd in even_to_odd]
  total = jax.lax.ppermute(x, axis, odd_to_even)
  return jnp.where((rank < 2 * n_pairs) & (rank % 2 == 0), total, x)


def _exchange(members: Sequence[int], bit: int) -> list[tuple[int, int]]:
  """Returns (sender, receiver) pairs: the member with index i sends to that
  with index i ^ bit; `bit` is 1, 2, 4, ..."""
  return [(device, members[i ^ bit]) for i, device in enumerate(members)]


def _powers(end: int) -> list[int]:
  """Returns 1, 2, 4, ... below `end`."""
  return [1 << i for i in range((end - 1).bit_length())]


def recursive_doubling(x: jax.Array, axis: Axis) -> jax.Array:
  """Partners at distance 1, 2, 4, ... exchange their sums.

  log2 N rounds of the whole array. No algorithm has fewer rounds, so this
  algorithm is the best for small arrays. If N is no power of 2, there are two
  more rounds (`_on_power_of_two`)."""

  def inner(members, x, member_index):
    del member_index
    for bit in _powers(len(members)):
      x = x + jax.lax.ppermute(x, axis, _exchange(members, bit))
    return x

  return _on_power_of_two(jnp.asarray(x), axis, inner)


def halving_doubling(x: jax.Array, axis: Axis) -> jax.Array:
  """Rabenseifner's algorithm: reduce-scatter by halves, all-gather by doubling.

  2 log2 N rounds, and as many bytes as a ring, if N is a power of 2. Otherwise
  there are two more rounds of the whole array (`_on_power_of_two`)."""

  def inner(members, x, member_index):
    bits = _powers(len(members))
    part = _cut(x, len(members))
    # [1] Reduce-scatter: `part` shrinks from 2^k chunks to this member's chunk.
    for bit in reversed(bits):
      # A member keeps the half with its own chunk, and sends the other half.
      halves = part.reshape(2, bit, part.shape[-1])
      side = (member_index // bit) % 2
      pairs = _exchange(members, bit)
      part = halves[side] + jax.lax.ppermute(halves[1 - side], axis, pairs)
    # [2] All-gather: `part` doubles, in the order of chunks.
    for bit in bits:
      received = jax.lax.ppermute(part, axis, _exchange(members, bit))
      is_low = (member_index // bit) % 2 == 0
      low_part = jnp.where(is_low, part, received)
      high_part = jnp.where(is_low, received, part)
      part = jnp.concatenate([low_part, high_part])
    return _paste(part, x)

  return _on_power_of_two(jnp.asarray(x), axis, inner)


def tree(x: jax.Array, axis: Axis) -> jax.Array:
  """A binomial tree: reduce to device 0, then broadcast from it, in
  2 ceil(log2 N) rounds of the whole array."""
  x = jnp.asarray(x)
  devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

  def edges(distance):
    """Returns the (child, parent) pairs of a level."""
    children = range(distance, devices, 2 * distance)
    return [(child, child - distance) for child in children]

  # [1] Reduce, from the leaves to device 0. A device that is no parent on a
  # level receives zeros.
  for distance in _powers(devices):
    x = x + jax.lax.ppermute(x, axis, edges(distance))
  # [2] Broadcast, from device 0 to the leaves.
  for distance in reversed(_powers(devices)):
    to_child = [(parent, child) for child, parent in edges(distance)]
    received = jax.lax.ppermute(x, axis, to_child)
    x = jnp.where(rank % (2 * distance) == distance, received, x)
  return x


def hierarchical(x: jax.Array, axis: tuple[str, str]) -> jax.Array:
  """Rings on two levels: reduce-scatter inside each node, all-reduce of each
  chunk between nodes, all-gather inside each node.

  The slow links between nodes carry one array for each node, not one for each
  device. `axis` has two names of axes of the mesh: inside a node, and between
  nodes. Raises ValueError for another axis."""
  x = jnp.asarray(x)
  if not isinstance(axis, tuple) or len(axis) != 2:
    raise ValueError(
      "hierarchical needs two axes, (inside of a node, between nodes), not"
      f" {axis!r}"
    )
  inside, between = axis
  chunk = ring_all_reduce(ring_reduce_scatter(x, inside), between)
  return _paste(ring_all_gather(chunk, inside), x)


def parameter_server(
  x: jax.Array, axis: Axis, *, shards: int | None = None
) -> jax.Array:
  """A sharded parameter server, in one step of all workers.

  Device j < P is a worker and also owns chunk j of P. Every other worker sends
  its chunk j to device j, and device j sends the sum back to each worker. A
  device has one link, so it receives and sends one message at a time. There are
  2 (N - 1) rounds, each with a P-th of the array: as long as a ring if P = N,
  else N / P times as long. `shards` is P, from 1 to N (None is N). Raises
  ValueError for another number.
  """
  x = jnp.asarray(x)
  devices, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
  shards = devices if shards is None else shards
  if type(shards) is not int or not 1 <= shards <= devices:
    raise ValueError(
      f"shards must be from 1 to the {devices} devices, not {shards!r}"
    )
  chunks = _cut(x, shards)

  def pairs(round_number):
    """Returns (worker, owner) pairs of a round, in which each owner receives
    from one worker."""
    return [pair for pair in _ring(devices, round_number) if pair[1] < shards]

  # [1] Push: owners add up their chunks. As all devices run one program, a
  # device without a chunk computes a sum, too, and drops it.
  total = chunks[jnp.minimum(rank, shards - 1)]
  for round_number in range(1, devices):
    part = chunks[jnp.minimum((rank + round_number) % devices, shards - 1)]
    total = total + jax.lax.ppermute(part, axis, pairs(round_number))
  # [2] Pull: in each round an owner sends its sum to another worker.
  sums = [total]
  for round_number in range(1, devices):
    to_worker = [(owner, worker) for worker, owner in pairs(round_number)]
    sums.append(jax.lax.ppermute(total, axis, to_worker))
  return _paste(_in_device_order(sums, rank, shards, -1), x)


COLLECTIVES: dict[str, Reduce] = {
  "psum": jax.lax.psum,  # XLA's own
  "ring": ring_all_reduce,
  "bidirectional_ring": bidirectional_ring,
  "recursive_doubling": recursive_doubling,
  "halving_doubling": halving_doubling,
  "tree": tree,
  "hierarchical": hierarchical,  # for two axes
  "parameter_server": parameter_server,
}


def lookup(reduce: str | Reduce) -> Reduce:
  """Returns the collective of a name; a function is returned unchanged."""
  if callable(reduce):
    return reduce
  return names.lookup("collective", reduce, COLLECTIVES)


def fastest(
  link: costs.LinkSpeed,
  among: Sequence[str] = (
    "ring", "halving_doubling", "recursive_doubling", "tree",
  ),
) -> Reduce:
  """Returns an all-reduce that uses, for each array, the collective of `among`
  that is fastest by the cost model (`costs.fastest`).

  `link` may be fitted to measured times. The default names have a cost model
  for one link. Raises ValueError for a name without a cost model."""
  for name in among:
    names.lookup("collective with a cost", name, costs.COSTS)

  def reduce(x: jax.Array, axis: Axis) -> jax.Array:
    x = jnp.asarray(x)
    devices, itemsize = jax.lax.axis_size(axis), x.dtype.itemsize
    name = costs.fastest(bytes_of(x), devices, link, among, grain=itemsize)
    return COLLECTIVES[name](x, axis)

  return reduce


def buckets(tree: Any, bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
  """Puts the leaves of a tree of gradients into buckets.

  A backward pass ends with the first layer, so leaves are taken from the last
  to the first. The leaves of a bucket have one dtype and together at most
  `bucket_bytes`; a larger leaf has a separate bucket.

  Returns:
    For each bucket the indices of its leaves in jax.tree.leaves(tree). The
    buckets are in the order in which a backward pass completes them.

  Example:
    >>> params = [jnp.zeros(3), jnp.zeros(2), jnp.zeros(1)]
    >>> buckets(params, 12)  # bytes, of 4 each
    ((2, 1), (0,))
  """
  checks.integer("bucket_bytes", bucket_bytes)
  leaves = jax.tree.leaves(tree)
  sizes = [bytes_of(leaf) for leaf in leaves]
  open_buckets: dict[Any, list[int]] = {}  # dtype -> leaves of its last bucket
  full_buckets = []
  for i in reversed(range(len(leaves))):
    bucket = open_buckets.setdefault(jnp.dtype(leaves[i].dtype), [])
    if bucket and sizes[i] + sum(sizes[j] for j in bucket) > bucket_bytes:
      full_buckets.append(tuple(bucket))
      bucket.clear()
    bucket.append(i)
  full_buckets += (tuple(bucket) for bucket in open_buckets.values())
  # The last leaf completes a bucket; it is the bucket's first in the forward.
  return tuple(sorted(full_buckets, key=lambda bucket: -bucket[-1]))


def all_reduce_tree(
  tree: Any,
  axis: Axis,
  *,
  bucket_bytes: int = BUCKET_BYTES,
  reduce: str | Reduce = "psum",
) -> Any:
  """Returns `jax.lax.psum(tree, axis)`, computed bucket by bucket.

  `reduce` is a name in COLLECTIVES, or a function (x, axis) -> the sum. The
  leaves are expected in the order of the forward pass."""
  reduce = lookup(reduce)
  leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
  sums = list(leaves)
  for bucket in buckets(leaves, bucket_bytes):
    # One message for all leaves of the bucket, as one flat array.
    flat, unravel = ravel_pytree([leaves[i] for i in bucket])
    bucket_sums = unravel(reduce(flat, axis))
    for i, leaf in zip(bucket, bucket_sums, strict=True):
      sums[i] = leaf
  return jax.tree.unflatten(structure, sums)
