"""The table of a pipeline: the tasks of each device, in their order.

A task is an action of a stage on a microbatch. Actions are a letter or a word:

  F  forward
  B  backward, of inputs and weights
  I  backward of inputs only; W, of weights, comes later
  W  backward of weights

Any other name is a user's action. It has a slot, and no task waits for it. Two
tasks of a device in the same slot are one block: a forward and a backward that
overlap (DualPipe).

Times are slots: they order the tasks, and each task takes one slot. Seconds are
not part of the table: see `analyze.costs`.

Index letters in shape comments, here and elsewhere in the package:
  T  tasks
  S  stages, numbered along the network
  M  microbatches
  D  devices
"""

import csv
import json
import operator
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import checks
from asgd.pipeline import by_slot

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
KNOWN = (FORWARD, BACKWARD, INPUT, WEIGHT)


class ScheduleError(ValueError):
  """A malformed table, or one that cannot be run; its text shows the cell."""


def check_positive(**numbers: int) -> None:
  """Raises ValueError, with the name, unless all are positive whole numbers."""
  for name, value in numbers.items():
    checks.integer(name, value)


class Task(NamedTuple):
  """One row."""

  time: int  # slot
  device: int
  stage: int  # -1 for a user's action
  microbatch: int  # -1 for a user's action
  action: str


class Schedule(NamedTuple):
  """A table. Rows are in the order of time, then device, then action."""

  name: str
  time: np.ndarray  # int32[T]
  device: np.ndarray  # int32[T]
  stage: np.ndarray  # int32[T]
  microbatch: np.ndarray  # int32[T]
  action: np.ndarray  # str[T]
  every: int  # microbatches of one update
  flush: bool  # whether the next batch waits for the update

  devices = property(lambda self: _count(self.device), doc="D.")
  stages = property(lambda self: _count(self.stage), doc="S.")
  microbatches = property(lambda self: _count(self.microbatch), doc="M.")
  slots = property(lambda self: _count(self.time), doc="Length of the table.")

  @property
  def tasks(self) -> list[Task]:
    """The rows, for reading by eye or loop."""
    columns = (column.tolist() for column in self[1:6])
    return [Task(*row) for row in zip(*columns, strict=True)]

  def rows_of_devices(
    self, order: np.ndarray | None = None
  ) -> list[np.ndarray]:
    """Returns the rows of each device, int[D][...]. `order` is an order of the
    rows that has each device's together; None is that of the table."""
    if order is None:
      order = np.argsort(self.device, kind="stable")
    ends = np.bincount(self.device).cumsum()
    return np.split(order, ends[:-1])

  def places(self) -> list[list[int]]:
    """Returns the devices of each stage; several, if it is replicated."""
    # Not those of a user's own actions, which may be anywhere.
    pairs = np.stack([self.stage, self.device], 1)
    pairs = np.unique(pairs[np.isin(self.action, KNOWN)], axis=0)
    devices_of = [[] for _ in range(self.stages)]
    for stage, device in pairs.tolist():
      devices_of[stage].append(device)
    return devices_of


def _count(column):
  return int(column.max()) + 1 if len(column) else 0


def make(
  name: str,
  tasks: Iterable[Task | tuple] | Sequence[np.ndarray],
  *,
  every: int,
  flush: bool,
) -> Schedule:
  """Returns a table of `tasks`, which may come in any order.

  Args:
    name: the name for people.
    tasks: rows (time, device, stage, microbatch, action).
    every: microbatches of one update.
    flush: whether the schedule is synchronous: the forwards of a batch wait
      until the batch before is updated.

  Raises:
    ScheduleError: for rows that are not tasks.
  """
  if not isinstance(every, int | np.integer) or every < 1:
    raise ScheduleError(
      f"every must be a positive whole number of microbatches, not {every!r}"
    )
  rows = [tuple(task) for task in tasks]
  for row in rows:
    if len(row) != 5:
      raise ScheduleError(f"task {row!r} must be ({', '.join(Task._fields)})")
    if not isinstance(row[4], str) or not NAME.fullmatch(row[4]):
      raise ScheduleError(
        f"action {row[4]!r} of {row!r} must be a name of letters and _"
      )
  *columns, actions = zip(*rows, strict=True) if rows else [()] * 5
  try:
    numbers = [
      np.array(list(map(operator.index, column)), np.int32)
      for column in columns
    ]
  except (TypeError, OverflowError):
    raise ScheduleError(
      "time, device, stage and microbatch must be whole numbers below 2**31"
    ) from None
  return from_columns(
    name, *numbers, np.array(actions, str), every=every, flush=flush
  )


def from_columns(
  name: str,
  time: np.ndarray,
  device: np.ndarray,
  stage: np.ndarray,
  microbatch: np.ndarray,
  action: np.ndarray,
  *,
  every: int,
  flush: bool,
) -> Schedule:
  """Does what `make` does, for columns that are NumPy arrays already."""
  if not isinstance(name, str) or not name.isprintable() or ";" in name:
    raise ScheduleError(
      f"a schedule's name must be one line without ;, not {name!r}"
    )
  if name != name.strip():  # it could not be read again
    raise ScheduleError("a schedule's name must not begin or end in a space")
  # Only a user's action may have stage and microbatch -1.
  lowest = np.isin(action, KNOWN) - 1
  columns = time, device, stage, microbatch
  lower_bounds = 0, 0, lowest, lowest

  def describe_task(i):
    return f"'{action[i]}' (slot {time[i]}, device {device[i]})"

  checked_columns = zip(Task._fields[:4], columns, lower_bounds, strict=True)
  for key, column, low in checked_columns:
    for i in np.flatnonzero(column < low):
      raise ScheduleError(
        f"{key} {column[i]} of {describe_task(i)} must not be negative"
      )
  for i in np.flatnonzero((stage < 0) != (microbatch < 0)):
    raise ScheduleError(
      f"{describe_task(i)} has stage {stage[i]} and microbatch"
      f" {microbatch[i]}: give both, or -1 for both"
    )
  # Tasks of a block are sorted by action: a forward comes first.
  rank = np.full(len(time), len(KNOWN), np.int8)
  for number, kind in enumerate(KNOWN):
    rank[action == kind] = number
  order = np.lexsort((rank, device, time))
  rows = (column[order] for column in (*columns, action))
  return Schedule(name, *rows, int(every), bool(flush))


Step = tuple[str, int, int]  # action, stage, microbatch


def lay_out(
  name: str,
  orders: Sequence[Sequence[Step | tuple[Step, Step]]],
  *,
  every: int,
  flush: bool,
) -> Schedule:
  """Returns the table in which every device does its tasks in their order, each
  task as soon as its inputs are ready.

  Args:
    name: as in `make`, and so are `every` and `flush`.
    orders: a list of (action, stage, microbatch) for each device. A pair of
      such tasks is one block: the two overlap.

  Raises:
    ScheduleError: for a deadlock, with the table up to the deadlock.
  """
  if isinstance(every, int) and every > 0:
    columns = by_slot.lay_out(orders, KNOWN, NAME, every=every, flush=flush)
    if columns is not None:
      return from_columns(name, *columns, every=every, flush=flush)
  return lay_out_by_task(name, orders, every=every, flush=flush)


def lay_out_by_task(
  name: str, orders: Sequence[Sequence[Any]], *, every: int, flush: bool
) -> Schedule:
  """Does what `lay_out` does, task by task. It is faster for few devices, and
  raises the errors of orders that lead to no table."""
  blocks = [
    [(b,) if isinstance(b[0], str) else tuple(b) for b in order]
    for order in orders
  ]
  clock, queues = _Clock(blocks, every, flush), list(map(deque, blocks))
  free_at, rows, has_progressed = [0] * len(blocks), [], True
  # Rounds over the devices, until no device can start its next block.
  while has_progressed:
    has_progressed = False
    for device, queue in enumerate(queues):
      while queue:
        times = [clock.ready_slot(*step) for step in queue[0]]
        if None in times:
          break
        start = max(free_at[device], *times)
        for action, stage, microbatch in queue.popleft():
          rows.append((start, device, stage, microbatch, action))
          clock.record_end(action, stage, microbatch, start + 1)
        free_at[device] = start + 1
        has_progressed = True
  table = make(name, rows, every=every, flush=flush)
  blocked_steps = [
    f"\n  device {device}: {' & '.join(_cell(*s, True) for s in queue[0])}"
    for device, queue in enumerate(queues)
    if queue
  ]
  if blocked_steps:
    raise ScheduleError(
      "deadlock: each device waits for a task of another.\n"
      f"{to_text(table)}waiting:{''.join(blocked_steps)}"
    )
  return table


class _Clock:
  """The slots at which steps and updates end, while a table is laid out."""

  def __init__(self, blocks, every, flush):
    self._every, self._flush = every, flush
    steps = [step for order in blocks for block in order for step in block]
    self._last_stage = max((stage for _, stage, _ in steps), default=-1)
    self._ends: dict[Step, int] = {}
    # (stage, batch) -> missing gradients, and slot of the last gradient.
    self._missing_gradients = Counter(
      (stage, microbatch // every)
      for action, stage, microbatch in steps
      if action in (BACKWARD, WEIGHT)
    )
    self._update_slots = Counter()

  def ready_slot(self, action, stage, microbatch):
    """Returns the slot at which a step may start; None if not known yet."""
    ends, inputs = self._ends, [0]
    if action == FORWARD:
      if stage:
        inputs.append(ends.get((FORWARD, stage - 1, microbatch)))
      if self._flush:
        update = stage, microbatch // self._every - 1
        is_done = not self._missing_gradients[update]
        inputs.append(self._update_slots[update] if is_done else None)
    elif action in (BACKWARD, INPUT):
      inputs.append(ends.get((FORWARD, stage, microbatch)))
      if stage < self._last_stage:
        inputs.append(ends.get((BACKWARD, stage + 1, microbatch)))
    elif action == WEIGHT:
      inputs.append(ends.get((BACKWARD, stage, microbatch)))
    return None if None in inputs else max(inputs)

  def record_end(self, action, stage, microbatch, end):
    # A backward of inputs frees the stage before it like a full backward.
    kind = BACKWARD if action == INPUT else action
    self._ends[kind, stage, microbatch] = end
    if action in (BACKWARD, WEIGHT):
      update = stage, microbatch // self._every
      self._missing_gradients[update] -= 1
      self._update_slots[update] = max(self._update_slots[update], end)


# Forms.

NAME = re.compile(r"[A-Za-z_]+")
_HEADING = ("name", "every", "flush")  # fields that are no columns
# A table has no number of more digits, and int() would refuse very long ones.
_CELL = re.compile(r"([A-Za-z_]+)(\d{1,20})?(?:@(\d{1,20}))?")
_IDLE = "."


def label(action: str, microbatch: int) -> str:
  """Returns the name of a task: `F3`, or `sync` of no microbatch."""
  return action if microbatch < 0 else f"{action}{microbatch}"


def _cell(action, stage, microbatch, stage_too):
  text = label(action, microbatch)
  return f"{text}@{stage}" if stage_too and stage >= 0 else text


def to_text(
  schedule: Schedule, marks: Mapping[tuple[int, int], str] | None = None
) -> str:
  """Returns the table as text: a line for each device, a column for each slot.

  A cell is the action and the microbatch, `F3`; with its stage, `F3@1`, where
  that is not the number of the device; `F3&B1` is a block of two.

  `marks` are (device, slot) -> a character put on either side of that cell.
  """
  is_same = schedule.stage == schedule.device
  hides_stage = bool(is_same[schedule.stage >= 0].all())
  rows = [[_IDLE] * schedule.slots for _ in range(schedule.devices)]
  for time, device, stage, microbatch, action in schedule.tasks:
    cell = _cell(action, stage, microbatch, not hides_stage)
    other_cell = rows[device][time]
    rows[device][time] = cell if other_cell == _IDLE else f"{other_cell}&{cell}"
  for (device, slot), mark in (marks or {}).items():
    if 0 <= slot < schedule.slots:
      rows[device][slot] = f"{mark}{rows[device][slot]}{mark}"
  width = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines, digits = [_title(schedule)], len(str(len(rows) - 1))
  for device, row in enumerate(rows):
    padded = " ".join(map(str.ljust, row, width))
    lines.append(f"{device:>{digits}} | {padded}".rstrip())
  return "\n".join(lines) + "\n"


def _title(schedule):
  flush = "; flush" if schedule.flush else ""
  return f"# {schedule.name}; every {schedule.every}{flush}"


_HEAD = re.compile(r"#\s*(.*?); every (\d{1,20})(; flush)?\s*")


def from_text(text: str) -> Schedule:
  """Reads what `to_text` writes; a ScheduleError names the line at fault."""
  numbered = enumerate(text.splitlines(), 1)
  lines = [(number, line) for number, line in numbered if line.strip()]
  if not lines:
    raise ScheduleError("there is no table: the text is empty")
  name, every, flush = _head(*lines[0])
  rows = []
  for number, line in lines[1:]:
    head, bar, body = line.partition("|")
    if not bar or not re.fullmatch(r"\d{1,20}", head.strip()):
      raise ScheduleError(
        f"line {number}: {line!r} must be a device, | and its cells"
      )
    device = int(head)
    for slot, cell in enumerate(body.split()):
      if cell == _IDLE:
        continue
      for part in cell.split("&"):
        if not (match := _CELL.fullmatch(part)):
          raise ScheduleError(
            f"line {number}, slot {slot}: {part!r} must be an action and a"
            " microbatch, such as F3 or, with its stage, F3@1"
          )
        action, microbatch, stage = match.groups()
        if stage is None:
          stage = -1 if microbatch is None else device
        microbatch = -1 if microbatch is None else int(microbatch)
        rows.append((slot, device, int(stage), microbatch, action))
  return make(name, rows, every=every, flush=flush)


def _head(number: int, line: str) -> tuple[str, int, bool]:
  """Returns name, every and flush of a title; `number` is that of its line."""
  if not (match := _HEAD.fullmatch(line.strip())):
    raise ScheduleError(
      f"line {number}: {line!r} must be '# NAME; every N', and '; flush' if the"
      " schedule is synchronous"
    )
  return match[1], int(match[2]), bool(match[3])


def to_csv(schedule: Schedule) -> str:
  """Returns the table as CSV, below a line that starts with #."""
  rows = (Task._fields, *schedule.tasks)  # names, which need no quotes
  lines = [_title(schedule), *(",".join(map(str, row)) for row in rows)]
  return "\n".join(lines) + "\n"


def from_csv(text: str) -> Schedule:
  """Reads what `to_csv` writes; a ScheduleError names the line at fault."""
  lines = text.splitlines() or [""]
  name, every, flush = _head(1, lines[0])
  try:
    rows = list(csv.reader(lines[1:]))
  except csv.Error as error:
    raise ScheduleError(f"not a schedule in CSV: {error}") from None
  if not rows or tuple(rows[0]) != Task._fields:
    raise ScheduleError(f"line 2 must be {','.join(Task._fields)}")
  tasks = []
  for number, row in enumerate(rows[1:], 3):
    if not row:
      continue
    try:
      tasks.append((*map(int, row[:4]), row[4]))
      if len(row) != 5:
        raise ValueError
    except (ValueError, IndexError):
      raise ScheduleError(
        f"line {number}: {','.join(row)!r} must be four whole numbers and an"
        " action"
      ) from None
  return make(name, tasks, every=every, flush=flush)


def to_json(schedule: Schedule) -> str:
  """Returns the table as a JSON object; `tasks` holds the rows."""
  document = {name: getattr(schedule, name) for name in _HEADING}
  rows = {"columns": Task._fields, "tasks": schedule.tasks}
  return json.dumps({**document, **rows})


def from_json(text: str) -> Schedule:
  """Reads what `to_json` writes; raises ScheduleError if it is not that."""
  try:
    document = json.loads(text)
    name, every, flush = (document[key] for key in _HEADING)
    tasks = [tuple(task) for task in document["tasks"]]
    if not isinstance(flush, bool):
      raise TypeError(f"flush must be true or false, not {flush!r}")
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ScheduleError(
      f"not a schedule in JSON ({type(error).__name__}: {error}); it must have"
      " name, every, flush and tasks"
    ) from None
  return make(name, tasks, every=every, flush=flush)


_FORMS = {".txt": from_text, ".csv": from_csv, ".json": from_json}


def is_file(name: object) -> bool:
  """Whether a schedule's name is that of a file."""
  return isinstance(name, str) and Path(name).suffix.lower() in _FORMS


def read(path: Path) -> Schedule:
  """Reads a table in the form of the file's suffix, by default text. Raises
  ValueError, naming the file, or OSError."""
  return read_as(_FORMS.get(path.suffix.lower(), from_text), path)


def read_as(parse: Callable[[str], Any], path: Path) -> Any:
  """Returns parse(text of a file).

  Raises:
    OSError: if the file cannot be read.
    ValueError: if it is not UTF-8, or if `parse` raises it; names the path.
  """
  try:
    return parse(path.read_text(encoding="utf-8-sig"))  # some editors add a BOM
  except UnicodeDecodeError:
    raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8") from None
  except ValueError as error:
    raise type(error)(f"{path}: {error}") from None
