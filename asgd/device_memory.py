"""A device with room for only a part of the arrays of a computation.

The host's memory (a memory kind of JAX) keeps blocks of arrays. A device caches
as many blocks as fit. The order of the instructions that use blocks is known.
So the device evicts the block with the latest next use (Belady 1966), and
fetches the next instruction's blocks while the present one computes (Cui et
al., "GeePS: scalable deep learning on distributed GPUs with a GPU-specialized
parameter server", EuroSys 2016).

In this way `asgd.layer_worker` computes a gradient, and
`asgd.pipeline.residence` trains the stages of a pipeline.
"""

import bisect
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

HOST = "pinned_host"  # JAX's memory kind for the host's memory

Block = tuple[int, str]  # a stage or a group of layers, and a kind of arrays


class DeviceTraffic(NamedTuple):
  """Bytes that one device has moved, used and held."""

  fetched: int = 0  # bytes from the host
  written: int = 0  # bytes to the host
  used: int = 0  # bytes that instructions have needed
  peak: int = 0  # most bytes on the device at once


def add_up(parts: Sequence[DeviceTraffic]) -> DeviceTraffic:
  """Returns the traffic of several devices, and the largest of their peaks.

  Example:
    >>> parts = (2, 0, 0, 3), (1, 0, 0, 1)
    >>> add_up([DeviceTraffic(*part) for part in parts])
    DeviceTraffic(fetched=3, written=0, used=0, peak=3)
  """
  sums = map(sum, zip(*(part[:3] for part in parts), strict=True))
  return DeviceTraffic(*sums, max(part.peak for part in parts))


def nbytes(tree: Any) -> int:
  """Returns the bytes of arrays on a device; shapes and dtypes are enough.
  Unless JAX's 64-bit types are enabled, 64-bit arrays have 32 bits there."""

  def itemsize(x: Any) -> int:
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return int(dtype.itemsize)

  return sum(math.prod(x.shape) * itemsize(x) for x in jax.tree.leaves(tree))


class HostCopies(NamedTuple):
  """Functions that copy a pytree of arrays, and share no memory with it."""

  to_host: Callable[[Any], Any]
  to_device: Callable[[Any], Any]


def copies(device: jax.Device) -> HostCopies:
  """Returns the functions that copy between a device and the host. Raises
  ValueError if JAX has no host memory for the device."""
  kinds = [memory.kind for memory in device.addressable_memories()]
  if HOST not in kinds:
    raise ValueError(
      f"{device} has memories {', '.join(kinds)} and no {HOST}: leave"
      " device_megabytes out"
    )
  host = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST)
  on_device = jax.sharding.SingleDeviceSharding(device)
  return HostCopies(
    lambda tree: jax.device_put(tree, host, may_alias=False),
    lambda tree: jax.device_put(tree, on_device, may_alias=False),
  )


class BlockMemory:
  """Decides which blocks a device with `room` bytes holds, and moves nothing.

  `uses` has the blocks that each instruction needs. A device executes the
  instructions in this order, pass after pass.
  """

  def __init__(self, uses: Sequence[Sequence[Block]], room: int):
    self.uses, self._room = uses, room
    self._users: dict[Block, list[int]] = {}  # block -> its instructions
    for op_index, blocks in enumerate(uses):
      for block in blocks:
        self._users.setdefault(block, []).append(op_index)
    self.held: dict[Block, int] = {}  # block on the device -> its bytes

  def bytes(self) -> int:
    """Returns the bytes held."""
    return sum(self.held.values())

  def next_use(self, block: Block, op_index: int) -> int:
    """Returns the first instruction, `op_index` or later, that needs a block.

    An instruction of the next pass counts as its index + the number of
    instructions. A block without uses counts as later than any other.
    """
    # Indices are sorted: `__init__` went through the instructions in order.
    indices = self._users.get(block)
    if not indices:
      return 2 * len(self.uses)
    position = bisect.bisect_left(indices, op_index)
    is_next_pass = position == len(indices)
    return indices[0] + len(self.uses) if is_next_pass else indices[position]

  def admit(self, block: Block, size: int, op_index: int) -> list[Block]:
    """Adds a block of `size` bytes that instruction `op_index` needs.

    Returns:
      The blocks that it evicts.

    Raises:
      ValueError: if the blocks of the instruction do not fit.
    """
    evicted = []
    needed_blocks = {*self.uses[op_index], block}
    # Evict the block with the latest next use (Belady) until the new one fits.
    while self.bytes() + size > self._room:
      # A block without bytes frees nothing, and is in no instruction's uses.
      candidates = [
        b for b, n in self.held.items() if n and b not in needed_blocks
      ]
      if not candidates:
        raise ValueError(
          f"instruction {op_index} needs {self.bytes() + size} bytes at once,"
          f" and there is room for {self._room}"
        )
      next_uses = [(self.next_use(x, op_index + 1), x) for x in candidates]
      _, victim = max(next_uses)
      evicted.append(victim)
      del self.held[victim]
    self.held[block] = size
    return evicted

  def ahead(self, op_index: int, sizes: Callable[[Block], int]) -> list[Block]:
    """Returns the blocks to prefetch while instruction `op_index` runs.

    They belong to the next instruction that lacks a block. Blocks that earlier
    instructions use must stay; returns [] if there is no room beside them.
    """
    count = len(self.uses)
    resident = set(self.uses[op_index])
    # Blocks that are used before the prefetched ones must stay as well.
    for step in range(1, count):
      blocks = self.uses[(op_index + step) % count]
      resident.update(blocks)
      missing_blocks = [
        block for block in blocks if block not in self.held and sizes(block)
      ]
      if missing_blocks:
        size = sum(map(sizes, missing_blocks))
        size += sum(self.held.get(block, 0) for block in resident)
        return missing_blocks if size <= self._room else []
    return []


_NOTHING: Mapping[Block, int] = types.MappingProxyType({})


class DeviceMemory:
  """A device, and the host's memory from which it fetches blocks."""

  def __init__(
    self, uses: Sequence[Sequence[Block]], room: int, copies: HostCopies
  ):
    """Starts empty; see `BlockMemory` for `uses` and `room`."""
    self._memory, self._copies = BlockMemory(uses, room), copies
    self._host: dict[Block, Any] = {}  # None: the device has a newer value
    self._device: dict[Block, Any] = {}
    self._sizes: dict[Block, int] = {}
    self._op_index = 0
    self.traffic = DeviceTraffic()

  def to_host(self, tree: Any) -> Any:
    """Returns a copy of arrays in the host's memory."""
    return self._copies.to_host(tree)

  def adopt(self, block: Block, tree: Any) -> None:
    """Adds a block of arrays in the host's memory (see `to_host`). If the block
    has the same arrays already, a copy of them stays on the device."""
    before = jax.tree.leaves(self._host.get(block))
    leaves = jax.tree.leaves(tree)
    if len(before) == len(leaves) and all(map(operator.is_, before, leaves)):
      return
    self.drop(block)
    self._host[block], self._sizes[block] = tree, nbytes(tree)

  def begin(self, op_index: int, made: Mapping[Block, int] = _NOTHING) -> None:
    """Fetches the blocks of an instruction, and starts to prefetch the blocks
    of a later one. `made` has the bytes of the blocks that the instruction will
    make: room is reserved for them. They must be in the instruction's uses."""
    self._op_index = op_index
    for block in self._memory.uses[op_index]:
      if block in self._sizes:  # the sum of an update starts without a block
        self._fetch(block)
        self._count(used=self._sizes[block])
    for block, size in made.items():
      self._admit(block, size)
    # These copies run while the instruction computes.
    next_blocks = self._memory.ahead(
      self._op_index, lambda block: self._sizes.get(block, 0)
    )
    for block in next_blocks:
      self._fetch(block)

  def get(self, block: Block) -> Any:
    """Returns a block that the present instruction needs, on the device."""
    return self._device[block]

  def take(self, block: Block) -> Any:
    """Removes a block and returns it; the caller may donate its memory."""
    tree = self._device.pop(block)
    del self._memory.held[block], self._sizes[block]
    self._host.pop(block)
    return tree

  def keep(self, block: Block, tree: Any) -> None:
    """Stores the new value that the present instruction has computed for a
    block. The value is written to the host when the block is evicted, or by
    `host`."""
    self._memory.held.pop(block, None)
    self._host[block], self._sizes[block] = None, nbytes(tree)
    self._admit(block, self._sizes[block])
    self._device[block] = tree

  def host(self, block: Block) -> Any:
    """Returns a block in the host's memory; writes the device's newer value
    there first."""
    if self._host[block] is None:
      self._host[block] = self.to_host(self._device[block])
      self._count(written=self._sizes[block])
    return self._host[block]

  def drop(self, block: Block) -> None:
    """Forgets a block."""
    for table in (self._host, self._device, self._sizes, self._memory.held):
      table.pop(block, None)

  def _count(self, **counts):
    traffic = {k: getattr(self.traffic, k) + v for k, v in counts.items()}
    self.traffic = self.traffic._replace(**traffic)

  def _fetch(self, block: Block) -> None:
    """Copies a block to the device, unless the device holds it."""
    if block in self._memory.held:
      return
    self._admit(block, self._sizes[block])
    self._device[block] = self._copies.to_device(self._host[block])
    self._count(fetched=self._sizes[block])

  def _admit(self, block: Block, size: int) -> None:
    """Reserves `size` bytes of the device for a block; evicts others if needed.
    """
    for evicted in self._memory.admit(block, size, self._op_index):
      # The host's copy must be current before the device's is dropped.
      self.host(evicted)
      del self._device[evicted]
    peak = max(self.traffic.peak, self._memory.bytes())
    self.traffic = self.traffic._replace(peak=peak)
