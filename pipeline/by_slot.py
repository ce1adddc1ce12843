"""Lays out and times wide tables slot by slot: all devices of a slot at once.

`table.lay_out` and `analyze.times` take 8 us for each task. Here a slot takes
some 50 us for any number of devices, so they call this module for tables of
`WIDE` devices or more. The functions return None for orders that lead to no
table: the caller then works task by task, and raises an error with the cell.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDE = 16  # devices, from which a slot takes less time than its tasks

_NEVER = 2**30  # the end of a step that has not run
_MOST = 2**30  # stages x microbatches of a table here


class _Blocks(NamedTuple):
  """Steps of all devices, one device after the other, in K blocks."""

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
    at = self.first[:-1, None] + np.arange(sizes.max())
    return np.where(at < self.first[1:, None], at, len(self.kind))


def _read(orders, known) -> _Blocks | None:
  """Returns the steps in columns; None if one is not (name, int, int)."""
  numbers = {name: number for number, name in enumerate(known)}
  columns, sizes, stop = [], [], []
  for order in orders:
    if all(isinstance(block[0], str) for block in order):
      steps = order
      sizes.append(np.ones(len(order), np.int64))
    else:
      blocks = [(b,) if isinstance(b[0], str) else b for b in order]
      steps = [step for block in blocks for step in block]
      sizes.append(np.array([len(block) for block in blocks], np.int64))
    stop.append(len(order))
    if not steps:
      continue
    kinds = [numbers.setdefault(a, len(numbers)) for a, _, _ in steps]
    both = [list(map(operator.itemgetter(i), steps)) for i in (1, 2)]
    columns.append(list(map(np.array, (kinds, *both))))
  if not columns or any(c.dtype.kind != "i" for each in columns for c in each):
    return None
  columns = [np.concatenate(column) for column in zip(*columns, strict=True)]
  first = np.concatenate([[0], *sizes]).cumsum()
  return _Blocks(*columns, first, np.cumsum(stop), list(numbers))


class _Needs(NamedTuple):
  """The ends that each step waits for, as indices of one array `ends`.

  `ends` has forwards, then backwards, then updates (gates). Its last two
  elements are dummies: steps that no step needs write to the first, and steps
  without inputs read the second, 0. Row T of the columns is "no step".
  """

  needed: np.ndarray  # int64[T + 1, 2], indices that a step reads
  made: np.ndarray  # int64[T + 1], the index that a step's end is written to
  gate: np.ndarray  # int64[T + 1], the update that a step counts for
  ends: np.ndarray  # int64[E], slots
  left: np.ndarray  # int64[gates + 1], missing steps of each update


def _needs_of(blocks, every, flush) -> _Needs | None:
  """Returns the ends that steps wait for. None if a step occurs twice, or if
  stages or microbatches are negative or too large."""
  kind, stage, microbatch = blocks[:3]
  is_known = kind < 4
  lowest = np.where(is_known, 0, -1)
  if (np.minimum(stage, microbatch) < lowest).any() or not is_known.any():
    return None
  stages, count = int(1 + stage.max()), int(1 + microbatch.max())
  batches = count // every + 1
  if stages * count > min(_MOST, 8 * len(kind) + 1000):  # also a misprint
    return None
  forward, backward, weight = kind == 0, (kind == 1) | (kind == 2), kind == 3
  at = stage * count + microbatch
  for mine in (forward, backward, weight | (kind == 1)):
    if np.bincount(at[mine], minlength=1).max() > 1:
      return None
  # [1] Lay out `ends`: forwards, backwards, updates, and the two dummies.
  forwards = stages * count
  gates = 2 * forwards
  unused = gates + stages * batches
  nothing = unused + 1
  # [2] Count the steps of each update; an update without steps is done.
  needed = np.full((len(kind) + 1, 2), nothing)
  made = np.full(len(kind) + 1, unused)
  gate = np.full(len(kind) + 1, stages * batches)
  update = stage * batches + microbatch // every
  counted = weight | (kind == 1)
  gate[:-1][counted] = update[counted]
  left = np.bincount(update[counted], minlength=stages * batches)
  ends = np.full(nothing + 1, _NEVER)
  ends[gates:unused][left == 0] = 0
  ends[nothing] = 0
  # [3] Connect forwards and backwards along the stages.
  made[:-1][forward] = at[forward]
  made[:-1][backward] = forwards + at[backward]
  later = forward & (stage > 0)
  needed[:-1, 0][later] = at[later] - count
  if flush:
    later = forward & (microbatch >= every)
    needed[:-1, 1][later] = gates + update[later] - 1
  needed[:-1, 0][backward] = at[backward]
  earlier = backward & (stage < stages - 1)
  needed[:-1, 1][earlier] = forwards + at[earlier] + count
  needed[:-1, 0][weight] = forwards + at[weight]
  return _Needs(needed, made, gate, ends, np.append(left, _NEVER))


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
  if len(orders) < WIDE or (blocks := _read(orders, known)) is None:
    return None
  needs = _needs_of(blocks, every, flush)
  if needs is None or not all(map(name.fullmatch, blocks.names)):
    return None
  steps = blocks.in_blocks
  begun = _begins(blocks, steps, needs, counts_updates=flush)
  if begun is None:
    return None
  sizes = np.diff(blocks.first)
  devices = np.diff(blocks.stop, prepend=0)
  device = np.repeat(np.arange(len(devices)), devices)
  numbers = (
    np.repeat(begun, sizes),
    np.repeat(device, sizes),
    blocks.stage,
    blocks.microbatch,
  )
  actions = np.array(blocks.names)[blocks.kind]
  return *(column.astype(np.int32) for column in numbers), actions


def _begins(blocks, steps, needs, *, counts_updates):
  """Returns int[K], the slot of each block; None for a deadlock."""
  width = steps.shape[1]
  needed = needs.needed[steps].reshape(-1, 2 * width)
  made, gate = needs.made[steps], needs.gate[steps]
  ends, left, none = needs.ends, needs.left, len(needs.left) - 1
  gates = len(ends) - 2 - none
  begun = np.empty(len(steps), np.int64)
  stop = blocks.stop
  at = np.append(0, stop[:-1])  # the next block of each device
  at, stop = at[at < stop], stop[at < stop]
  slot = 0
  # Each pass does one slot: devices with a ready block begin it.
  while len(at):
    ready = ends[needed[at]].max(1)
    begins = ready <= slot
    done = at[begins]
    if not len(done):  # skip the slots in which every device waits
      slot = ready.min()
      if slot == _NEVER:
        return None
      continue
    begun[done] = slot
    slot += 1
    ends[made[done]] = slot
    if counts_updates:
      counted = gate[done].ravel()
      np.subtract.at(left, counted, 1)
      complete = counted[(left[counted] == 0) & (counted < none)]
      ends[gates + complete] = slot
    at = at + begins
    if (at == stop).any():
      at, stop = at[at < stop], stop[at < stop]
  return begun


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
      float[T], the transfer time of the second.
    updates: two columns int[T]: the update that a row waits for, and the update
      that the row is a part of; -1 for none. None if no row waits for an
      update.

  Returns:
    float[T] and float[T]. None for a table of fewer than `WIDE` devices, or
    with blocks of more than two tasks.
  """
  slot, device = table
  begins = np.ones(len(slot), bool)  # whether a row is the first of its block
  begins[1:] = (np.diff(slot) != 0) | (np.diff(device) != 0)
  first = np.flatnonzero(begins)
  size = np.diff(first, append=len(slot))
  if len(slot) == 0 or device.max() + 1 < WIDE or size.max() > 2:
    return None
  width, block = int(size.max()), begins.cumsum() - 1
  rows = np.minimum(first[:, None] + np.arange(width), len(slot) - 1)
  rows = np.where(np.arange(width) < size[:, None], rows, first[:, None])
  took = durations[first]
  if width == 2:
    both = durations[rows].sum(1) if overlap is None else overlap
    took = np.where(size == 2, both, took)
  one, two, wait = needs
  block = np.append(block, len(first))  # row -1, no need: ends at -infinity
  needed = block[np.concatenate([one[rows], two[rows]], 1)]
  delay = np.concatenate([np.zeros(rows.shape), wait[rows]], 1)
  begin, end = np.empty(len(first)), np.full(len(first) + 1, -np.inf)
  device = device[first]
  free = np.zeros(device.max() + 1)
  if updates is not None:
    # A block has at most one forward, its first row, and one backward.
    waits, counts = updates[0][rows].max(1), updates[1][rows].max(1)
    updated = np.zeros(max(waits.max(), counts.max()) + 2)  # last: none
  cuts = np.flatnonzero(np.diff(slot[first], prepend=-1))
  for low, high in zip(cuts, [*cuts[1:], len(first)], strict=True):
    here = slice(low, high)
    starts = (end[needed[here]] + delay[here]).max(1)
    starts = np.maximum(starts, free[device[here]])
    if updates is not None:
      starts = np.maximum(starts, updated[waits[here]])
    ends = starts + took[here]
    begin[here], end[here], free[device[here]] = starts, ends, ends
    if updates is not None:
      np.maximum.at(updated, counts[here], ends)
      updated[-1] = 0.0
  block = block[:-1]
  return begin[block], end[:-1][block]
