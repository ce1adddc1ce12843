"""Rejects tables that cannot be run, and shows the cell at fault."""

import collections
import graphlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from asgd import checks
from asgd.pipeline import table as table_lib
from asgd.pipeline.table import (
  BACKWARD,
  FORWARD,
  INPUT,
  KNOWN,
  WEIGHT,
  Schedule,
)

_AROUND = 12  # slots that an error shows on either side of a mark
_MAX_DEVICES = 16  # that an error shows


class TableRows(NamedTuple):
  """Row numbers of a stage's work on a microbatch; -1: no such row."""

  forward: np.ndarray  # int[S, M]
  backward: np.ndarray  # int[S, M], of the inputs: B or I
  weight: np.ndarray  # int[S, M], of the weights: B or W


_ACTIONS = TableRows((FORWARD,), (BACKWARD, INPUT), (BACKWARD, WEIGHT))


def rows(schedule: Schedule) -> TableRows:
  """Returns the rows of each (stage, microbatch) of a table without doubles."""
  # -1 marks a task that the table lacks.
  shape = schedule.stages, schedule.microbatches
  out = TableRows(*(np.full(shape, -1, np.int64) for _ in TableRows._fields))
  for actions, table in zip(_ACTIONS, out, strict=True):
    task_rows = np.flatnonzero(np.isin(schedule.action, actions))
    table[schedule.stage[task_rows], schedule.microbatch[task_rows]] = task_rows
  return out


def validate(
  schedule: Schedule,
  *,
  max_in_flight: int | None = None,
  transfers: str = "buffered",
) -> Schedule:
  """Returns `schedule` if it can be run.

  A table can be run if

  - every stage does the forward and the backward of every microbatch once, on
    one device;
  - every task comes after the tasks that compute its inputs;
  - a device does one task at a time, or one block of a forward and a backward;
  - the schedule is asynchronous, or each forward of a batch comes after the
    stage's update of the previous batch.

  A table without any backward is for inference, and valid.

  Args:
    schedule: the table.
    max_in_flight: the most forwards of one device that still wait for their
      backward. None: no limit.
    transfers: "buffered" sends do not wait. "rendezvous" sends wait until the
      other side receives: right before the task that needs the data. The
      sender sends right after the task.

  Raises:
    ScheduleError: with the reason and the table around the cell.
    ValueError: for another value of max_in_flight or transfers.
  """
  checks.one_of("transfers", transfers, ("buffered", "rendezvous"))
  if max_in_flight is not None and max_in_flight < 1:
    raise ValueError(
      f"max_in_flight must be positive, or None, not {max_in_flight!r}"
    )
  if not np.isin(schedule.action, KNOWN).any():
    _fail(schedule, "the table has no task of a stage")
  # These need no array of stages by microbatches; the rest uses `rows`.
  _check_doubles(schedule)
  _check_blocks(schedule)
  _check_forwards(schedule)
  table_rows = rows(schedule)
  _, backward, weight = table_rows
  trains = bool((backward >= 0).any() or (weight >= 0).any())
  if trains:
    _check_complete(schedule, table_rows)
  _check_order(schedule, table_rows, trains)
  if trains:
    _check_batches(schedule, table_rows)
    if max_in_flight is not None:
      limit = f"{max_in_flight + 1} in flight on its device; {max_in_flight=}"
      for row in np.flatnonzero(in_flight(schedule) > max_in_flight):
        _fail(schedule, f"{{}} makes {limit}", row)
  if transfers == "rendezvous":
    _check_rendezvous(schedule, table_rows)
  return schedule


def _fail(
  schedule: Schedule, reason: str, *marked: int | np.integer[Any]
) -> NoReturn:
  """Raises `reason`, in which {0}, {1}, ... are the marked rows in words."""
  tasks = []
  for row in marked:
    slot, device, stage, microbatch, action = (c[row] for c in schedule[1:6])
    cell = f"(device {device}, slot {slot})"
    tasks.append(f"{action} of stage {stage}, microbatch {microbatch} {cell}")
  reason = reason.format(*tasks)
  table = f"\n{_window(schedule, marked)}" if marked else ""
  raise table_lib.ScheduleError(f"{schedule.name}: {reason}{table}")


def _window(schedule: Schedule, marked: Sequence[Any] | np.ndarray) -> str:
  """Returns the table around the marked rows, which stand between two !."""
  marked = np.asarray(marked, np.int64)
  first_slot = max(int(schedule.time[marked].min()) - _AROUND, 0)
  last_slot = int(schedule.time[marked].max()) + _AROUND
  if last_slot - first_slot > 4 * _AROUND:  # too wide: show the later marks
    first_slot = last_slot - 4 * _AROUND
  is_shown = (schedule.time >= first_slot) & (schedule.time <= last_slot)
  lowest = 0
  if schedule.devices > _MAX_DEVICES:
    devices = schedule.device[marked]
    lowest = max(int(devices.min()) - _MAX_DEVICES // 2, 0)
    is_shown &= schedule.device >= lowest
    is_shown &= schedule.device <= max(
      int(devices.max()), lowest + _MAX_DEVICES
    )
  fields = table_lib.Task._fields
  columns = {name: getattr(schedule, name)[is_shown] for name in fields}
  columns["time"] -= first_slot
  cells = np.stack([schedule.device, schedule.time - first_slot], 1)[marked]
  marks = dict.fromkeys(map(tuple, cells.tolist()), "!")
  heading = f"(slots from {first_slot})\n" if first_slot else ""
  text = table_lib.to_text(schedule._replace(**columns), marks)
  head, *lines = text.splitlines(keepends=True)
  return heading + "".join([head, *lines[lowest:]])


def _keys(schedule, selected):
  """Returns (stage, microbatch) of the selected rows, each as one int64."""
  stage = schedule.stage[selected].astype(np.int64)
  return stage * schedule.microbatches + schedule.microbatch[selected]


def _check_doubles(schedule: Schedule) -> None:
  """Checks that no action of a stage on a microbatch occurs twice."""
  for actions in _ACTIONS:
    task_rows = np.flatnonzero(np.isin(schedule.action, actions))
    _, first, inverse = np.unique(
      _keys(schedule, task_rows), return_index=True, return_inverse=True
    )
    for double in np.flatnonzero(first[inverse] != np.arange(len(task_rows))):
      row, earlier = task_rows[double], task_rows[first[inverse[double]]]
      _fail(schedule, "{} was done before, as {}", row, earlier)


def _check_blocks(schedule: Schedule) -> None:
  """Checks that a device does one task at a time, or a forward and a backward.
  """
  # Rows are sorted, so those of one device and slot are adjacent.
  shares_slot = (np.diff(schedule.time) == 0) & (np.diff(schedule.device) == 0)
  for row in np.flatnonzero(shares_slot).tolist():
    pair = schedule.action[row], schedule.action[row + 1]
    third = row and shares_slot[row - 1]
    if third or pair[0] != FORWARD or pair[1] not in (BACKWARD, INPUT):
      why = "{} while the device does {}: one task at a time, or one forward"
      _fail(schedule, f"{why} and one backward", row + 1, row)


def _check_forwards(schedule: Schedule) -> None:
  """Checks that no forward is missing.

  This runs before anything allocates an array of stages by microbatches: a
  misprinted microbatch would make a huge one.
  """
  count = schedule.microbatches
  keys = np.sort(_keys(schedule, schedule.action == FORWARD))
  if len(keys) == schedule.stages * count:
    return
  gaps = np.flatnonzero(keys != np.arange(len(keys)))
  stage, microbatch = divmod(int(gaps[0]) if len(gaps) else len(keys), count)
  is_cell = (schedule.stage == stage) & (schedule.microbatch == microbatch)
  same_cell = np.flatnonzero(is_cell & np.isin(schedule.action, KNOWN))
  why = f"{FORWARD} of stage {stage}, microbatch {microbatch} is missing"
  _fail(schedule, why, *same_cell)


def _check_complete(schedule: Schedule, table_rows: TableRows) -> None:
  """Checks that no backward is missing or on another device than its forward.
  """
  for name, table in zip(("B or I", "B or W"), table_rows[1:], strict=True):
    for stage, microbatch in np.argwhere(table < 0):
      present = [t[stage, microbatch] for t in table_rows]
      why = f"{name} of stage {stage}, microbatch {microbatch} is missing"
      _fail(schedule, why, *[row for row in present if row >= 0])
  device = schedule.device
  for table in (table_rows.backward, table_rows.weight):
    for index in np.argwhere(device[table] != device[table_rows.forward]):
      row, forward = table[tuple(index)], table_rows.forward[tuple(index)]
      why = f"{{}} is not on the device of its forward ({device[forward]})"
      _fail(schedule, why, row, forward)


def _check_order(
  schedule: Schedule, table_rows: TableRows, trains: bool
) -> None:
  """Checks that each task comes after the tasks that compute its inputs."""
  forward, backward, weight = table_rows
  dependencies = [(forward[1:], forward[:-1])]
  if trains:
    # A row B is both; only rows I and W are ordered between each other.
    split = weight != backward
    dependencies += [
      (backward, forward),
      (backward[:-1], backward[1:]),
      (weight[split], backward[split]),
    ]
  for later, earlier in dependencies:
    for index in np.argwhere(schedule.time[later] <= schedule.time[earlier]):
      row, earlier_row = later[tuple(index)], earlier[tuple(index)]
      _fail(schedule, "{} needs {}, which is not done before", row, earlier_row)


def _check_batches(schedule: Schedule, table_rows: TableRows) -> None:
  """Checks that the forwards of a batch come after the update before it."""
  count, every = schedule.microbatches, schedule.every
  if count % every:
    why = f"{count} microbatches are not a multiple of the {every} of one"
    _fail(schedule, f"{why} update: the last {count % every} would never count")
  if not schedule.flush or count == every:
    return
  # [stage, batch, microbatch of the batch].
  shape = schedule.stages, count // every, every
  forward = schedule.time[table_rows.forward].reshape(shape)
  update_slots = schedule.time[table_rows.weight].reshape(shape).max(2)
  too_early = np.argwhere(forward[:, 1:] <= update_slots[:, :-1, None])
  for stage, batch, offset in too_early:
    update_rows = table_rows.weight[stage, batch * every : (batch + 1) * every]
    last = update_rows[np.argmax(schedule.time[update_rows])]
    row = table_rows.forward[stage, (batch + 1) * every + offset]
    why = f"{{}} is of batch {batch + 1}, and the stage is updated only after"
    _fail(schedule, f"{why} {{}}: flush first", row, last)


def in_flight(schedule: Schedule) -> np.ndarray:
  """Returns int[T]: the forwards in flight on the row's device during the row.

  A forward is in flight until its backward of weights ends.
  """
  # +1 for a forward, -1 for a backward of weights.
  change = np.zeros(len(schedule.time), np.int64)
  change[schedule.action == FORWARD] = 1
  change[np.isin(schedule.action, _ACTIONS.weight)] = -1
  out = np.empty_like(change)
  for device_rows in schedule.rows_of_devices():
    # A backward frees its activations only when it ends.
    own_change = change[device_rows]
    out[device_rows] = np.cumsum(own_change) - np.minimum(own_change, 0)
  return out


def transfers(schedule: Schedule, where: TableRows) -> np.ndarray:
  """Returns int[N, 2]: (row that sends, row that receives) of each transfer
  between two devices."""
  row_pairs = [(where.forward[:-1], where.forward[1:])]
  if (where.backward >= 0).all():
    row_pairs.append((where.backward[1:], where.backward[:-1]))
  rows_of = [np.stack(pair, -1).reshape(-1, 2) for pair in row_pairs]
  all_pairs = np.concatenate(rows_of)
  devices = schedule.device[all_pairs]
  return all_pairs[devices[:, 0] != devices[:, 1]]


def _check_rendezvous(schedule: Schedule, table_rows: TableRows) -> None:
  """Raises ScheduleError for a deadlock of sends that wait for the receiver."""
  received, sent = collections.defaultdict(list), collections.defaultdict(list)
  for pair in map(tuple, transfers(schedule, table_rows).tolist()):
    sent[pair[0]].append(pair)
    received[pair[1]].append(pair)
  programs = [[] for _ in range(schedule.devices)]
  slots = zip(schedule.device.tolist(), schedule.time.tolist(), strict=True)
  blocks = itertools.groupby(enumerate(slots), key=lambda row: row[1])
  for (device, _), block in blocks:
    rows_ = [row for row, _ in block]  # one task, or two of one block
    for pairs in (received, sent):
      programs[device] += [pair for row in rows_ for pair in pairs[row]]
  # A transfer is one node of the graph, since both sides meet in it. It follows
  # the previous transfer of the sender and that of the receiver.
  sorter = graphlib.TopologicalSorter()
  for program in programs:
    for pair, later in itertools.pairwise(program):
      sorter.add(later, pair)
  try:
    sorter.prepare()
  except graphlib.CycleError:
    finished = set()
    while ready := sorter.get_ready():
      sorter.done(*ready)
      finished.update(ready)
    unfinished = (
      [pair for pair in program if pair not in finished] for program in programs
    )
    stuck = [pairs[0] for pairs in unfinished if pairs]
    source, target = stuck[0]
    other_rows = {row for pair in stuck for row in pair} - {source, target}
    why = (
      "deadlock, if sends wait for the other side: {} sends to {}, which first"
      " waits for something else. Use buffered transfers, or exchange in both"
      " directions at once"
    )
    _fail(schedule, why, source, target, *other_rows)
