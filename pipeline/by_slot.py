"""Lays out and times wide tables slot by slot: all devices of a slot at once.

`table.lay_out` and `analyze.times` take 8 us for each task. Here a slot takes
some 50 us for any number of devices, so both call this module for tables of
`WIDE` devices or more. The functions return None for orders that lead to no
table: the caller then works task by task, and its error shows the cell.
"""

import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDE = 16  # from so many devices on a slot takes less time than its tasks

_NEVER = 2**30  # the end of a step that has not run
_MAX_CELLS = 2**30  # stages x microbatches of a table here


class _Blocks(NamedTuple):
  """The steps of all devices, one device after the other, in K blocks."""

  kind: np.ndarray  # int64[T], the index of an action in `names`
  stage: np.ndarray  # int64[T]
  microbatch: np.ndarray  # int64[T]
  first: np.ndarray  # int64[K + 1], where in T each block begins
  stop: np.ndarray  # int64[D], after the last of each device's blocks
  names: list[str]

  @property
  def in_blocks(self) -> np.ndarray:
    """Returns int64[K, most steps of a block]: steps, T for no step."""
    sizes = np.diff(self.first)
    step_index = self.first[:-1, None] + np.arange(sizes.max())
    # Blocks have different sizes: T fills the shorter ones.
    is_step = step_index < self.first[1:, None]
    return np.where(is_step, step_index, len(self.kind))


def _read_blocks(
  orders: Sequence[Sequence[Any]], known_actions: Sequence[str]
) -> _Blocks | None:
  """Returns the steps in columns; None if one is not (name, int, int)."""
  action_index = {name: index for index, name in enumerate(known_actions)}
  columns, sizes, block_counts = [], [], []
  for order in orders:
    if all(isinstance(block[0], str) for block in order):
      steps = order
      sizes.append(np.ones(len(order), np.int64))
    else:
      blocks = [(b,) if isinstance(b[0], str) else b for b in order]
      steps = [step for block in blocks for step in block]
      sizes.append(np.array([len(block) for block in blocks], np.int64))
    block_counts.append(len(order))
    if not steps:
      continue
    kinds = [action_index.setdefault(a, len(action_index)) for a, _, _ in steps]
    cells = [list(map(operator.itemgetter(i), steps)) for i in (1, 2)]
    columns.append(list(map(np.array, (kinds, *cells))))
  if any(c.dtype.kind != "i" for c in itertools.chain(*columns)) or not columns:
    return None
  columns = [np.concatenate(column) for column in zip(*columns, strict=True)]
  block_starts = np.concatenate([[0], *sizes]).cumsum()
  return _Blocks(
    *columns, block_starts, np.cumsum(block_counts), list(action_index)
  )


class _StepInputs(NamedTuple):
  """The ends that each step waits for, as indices of one array `ends`.

  `ends` has forwards, then backwards, then updates (gates). Its last two
  elements are dummies: steps that no step needs write to the first, and steps
  without inputs read the second, 0. Row T of the columns is "no step".
  """

  input_index: np.ndarray  # int64[T + 1, 2], indices that a step reads
  end_index: np.ndarray  # int64[T + 1], where a step's end is written
  gate: np.ndarray  # int64[T + 1], the update that a step counts for
  ends: np.ndarray  # int64[E], slots
  missing_steps: np.ndarray  # int64[gates + 1], missing steps of each update


def _inputs_of_steps(
  blocks: _Blocks, every: int, flush: bool
) -> _StepInputs | None:
  """Returns the ends that steps wait for. None if a step occurs twice, or if
  stages or microbatches are negative or too large."""
  kind, stage, microbatch = blocks[:3]
  is_known = kind < 4
  lowest = np.where(is_known, 0, -1)
  if (np.minimum(stage, microbatch) < lowest).any() or not is_known.any():
    return None
  stages, microbatches = int(1 + stage.max()), int(1 + microbatch.max())
  batches = microbatches // every + 1
  # A microbatch number far above the number of steps is a misprint: refuse it
  # before arrays of that size are allocated.
  if stages * microbatches > min(_MAX_CELLS, 8 * len(kind) + 1000):
    return None
  is_forward, is_weight = kind == 0, kind == 3
  is_backward = (kind == 1) | (kind == 2)
  cell = stage * microbatches + microbatch
  for is_kind in (is_forward, is_backward, is_weight | (kind == 1)):
    if np.bincount(cell[is_kind], minlength=1).max() > 1:
      return None
  # [1] Lay out `ends`: forwards, backwards, updates, and the two dummies.
  cells = stages * microbatches
  gates = 2 * cells
  no_reader = gates + stages * batches
  no_input = no_reader + 1
  # [2] Count the steps of each update; an update without steps is done.
  input_index = np.full((len(kind) + 1, 2), no_input)
  end_index = np.full(len(kind) + 1, no_reader)
  gate = np.full(len(kind) + 1, stages * batches)
  update = stage * batches + microbatch // every
  is_gradient = is_weight | (kind == 1)
  gate[:-1][is_gradient] = update[is_gradient]
  missing_steps = np.bincount(update[is_gradient], minlength=stages * batches)
  ends = np.full(no_input + 1, _NEVER)
  ends[gates:no_reader][missing_steps == 0] = 0
  ends[no_input] = 0
  # [3] Connect forwards and backwards along the stages.
  end_index[:-1][is_forward] = cell[is_forward]
  end_index[:-1][is_backward] = cells + cell[is_backward]
  is_reader = is_forward & (stage > 0)
  input_index[:-1, 0][is_reader] = cell[is_reader] - microbatches
  if flush:
    is_reader = is_forward & (microbatch >= every)
    input_index[:-1, 1][is_reader] = gates + update[is_reader] - 1
  input_index[:-1, 0][is_backward] = cell[is_backward]
  reads_gradient = is_backward & (stage < stages - 1)
  input_index[:-1, 1][reads_gradient] = (
    cells + cell[reads_gradient] + microbatches
  )
  input_index[:-1, 0][is_weight] = cells + cell[is_weight]
  return _StepInputs(
    input_index, end_index, gate, ends, np.append(missing_steps, _NEVER)
  )


def lay_out(
  orders: Sequence[Sequence[Any]],
  known: Sequence[str],
  name: re.Pattern,
  *,
  every: int,
  flush: bool,
) -> tuple[np.ndarray, ...] | None:
  """Returns the columns of a table in which every device does its steps in
  their order, each as soon as its inputs are ready.

  Args:
    orders: as in `table.lay_out`.
    known: the actions F, B, I and W.
    name: the pattern that names of actions match.
    every: microbatches of an update.
    flush: whether forwards of a batch wait for the previous batch's update.

  Returns:
    time, device, stage and microbatch, int[T], and action, str[T], in any
    order. None for orders that lead to no table, or of fewer than `WIDE`
    devices.
  """
  if len(orders) < WIDE or (blocks := _read_blocks(orders, known)) is None:
    return None
  inputs = _inputs_of_steps(blocks, every, flush)
  if inputs is None or not all(map(name.fullmatch, blocks.names)):
    return None
  steps = blocks.in_blocks
  block_slots = _block_slots(blocks, steps, inputs, counts_updates=flush)
  if block_slots is None:
    return None
  sizes = np.diff(blocks.first)
  devices = np.diff(blocks.stop, prepend=0)
  device = np.repeat(np.arange(len(devices)), devices)
  columns = (
    np.repeat(block_slots, sizes),
    np.repeat(device, sizes),
    blocks.stage,
    blocks.microbatch,
  )
  actions = np.array(blocks.names)[blocks.kind]
  return *(column.astype(np.int32) for column in columns), actions


def _block_slots(
  blocks: _Blocks,
  steps: np.ndarray,
  inputs: _StepInputs,
  *,
  counts_updates: bool,
) -> np.ndarray | None:
  """Returns int[K], the slot of each block; None for a deadlock."""
  width = steps.shape[1]
  input_index = inputs.input_index[steps].reshape(-1, 2 * width)
  end_index, gate = inputs.end_index[steps], inputs.gate[steps]
  ends, missing_steps = inputs.ends, inputs.missing_steps
  no_update = len(missing_steps) - 1
  gates = len(ends) - 2 - no_update
  block_slots = np.empty(len(steps), np.int64)
  stop = blocks.stop
  next_block = np.append(0, stop[:-1])  # the next block of each device
  next_block, stop = next_block[next_block < stop], stop[next_block < stop]
  slot = 0
  # Each pass does one slot: devices with a ready block begin it.
  while len(next_block):
    ready_slots = ends[input_index[next_block]].max(1)
    is_starting = ready_slots <= slot
    started_blocks = next_block[is_starting]
    if not len(started_blocks):  # skip the slots in which every device waits
      slot = ready_slots.min()
      if slot == _NEVER:
        return None
      continue
    block_slots[started_blocks] = slot
    slot += 1
    # Steps of this slot end at the beginning of the next.
    ends[end_index[started_blocks]] = slot
    if counts_updates:
      # A forward of the next batch is ready once its update misses no step.
      updates = gate[started_blocks].ravel()
      np.subtract.at(missing_steps, updates, 1)
      complete_updates = updates[
        (missing_steps[updates] == 0) & (updates < no_update)
      ]
      ends[gates + complete_updates] = slot
    next_block = next_block + is_starting
    if (next_block == stop).any():
      next_block, stop = next_block[next_block < stop], stop[next_block < stop]
  return block_slots


def times(
  table: Sequence[np.ndarray],
  durations: np.ndarray,
  overlap: float | None,
  needs: Sequence[np.ndarray],
  updates: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns when the tasks of a valid table begin and end, as soon as they can.

  Args:
    table: time and device, int[T], by time and then device.
    durations: float[T], of tasks that do not overlap.
    overlap: the duration of a block of two tasks; None is their sum.
    needs: two columns int[T] of rows that a row needs, -1 for none; and
      float[T], the time of the transfer from the second.
    updates: two columns int[T]: the update that a row waits for, and the update
      that the row is a part of; -1 for none. None if no row waits for an
      update.

  Returns:
    The starts and the ends, each float[T]. None for a table of fewer than
    `WIDE` devices, or with blocks of more than two tasks.
  """
  slot, device = table
  is_first = np.ones(len(slot), bool)  # whether a row is the first of its block
  is_first[1:] = (np.diff(slot) != 0) | (np.diff(device) != 0)
  first_rows = np.flatnonzero(is_first)
  block_sizes = np.diff(first_rows, append=len(slot))
  # [1] Group rows into blocks of one or two tasks.
  if len(slot) == 0 or device.max() + 1 < WIDE or block_sizes.max() > 2:
    return None
  width, block = int(block_sizes.max()), is_first.cumsum() - 1
  rows = np.minimum(first_rows[:, None] + np.arange(width), len(slot) - 1)
  rows = np.where(
    np.arange(width) < block_sizes[:, None], rows, first_rows[:, None]
  )
  block_seconds = durations[first_rows]
  if width == 2:
    overlapped = durations[rows].sum(1) if overlap is None else overlap
    block_seconds = np.where(block_sizes == 2, overlapped, block_seconds)
  # [2] Turn the rows that a block needs into indices of blocks.
  local_input, remote_input, transfer = needs
  # Row -1, no input, belongs to a last block that ends at -infinity.
  block = np.append(block, len(first_rows))
  input_rows = np.concatenate([local_input[rows], remote_input[rows]], 1)
  input_blocks = block[input_rows]
  delay = np.concatenate([np.zeros(rows.shape), transfer[rows]], 1)
  # [3] Time all blocks of a slot at once: they never depend on each other.
  block_start = np.empty(len(first_rows))
  block_end = np.full(len(first_rows) + 1, -np.inf)
  device = device[first_rows]
  free_at = np.zeros(device.max() + 1)
  if updates is not None:
    # A block has at most one forward, its first row, and one backward.
    awaited_update, own_update = (u[rows].max(1) for u in updates)
    # The last element is for rows without an update.
    update_times = np.zeros(max(awaited_update.max(), own_update.max()) + 2)
  cuts = np.flatnonzero(np.diff(slot[first_rows], prepend=-1))
  for low, high in zip(cuts, [*cuts[1:], len(first_rows)], strict=True):
    slot_blocks = slice(low, high)
    starts = (block_end[input_blocks[slot_blocks]] + delay[slot_blocks]).max(1)
    starts = np.maximum(starts, free_at[device[slot_blocks]])
    if updates is not None:
      starts = np.maximum(starts, update_times[awaited_update[slot_blocks]])
    ends = starts + block_seconds[slot_blocks]
    block_start[slot_blocks], block_end[slot_blocks] = starts, ends
    free_at[device[slot_blocks]] = ends
    if updates is not None:
      np.maximum.at(update_times, own_update[slot_blocks], ends)
      # Rows without an update write to the last element: reset it.
      update_times[-1] = 0.0
  block = block[:-1]
  return block_start[block], block_end[:-1][block]
