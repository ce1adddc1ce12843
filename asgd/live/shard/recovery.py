"""Recovery of a shard: from its log, its journal or a checkpoint.

With a log, the messages since the last snapshot still lie in their slots. The
shard applies the rows since the snapshot again, and no update is lost.

Without a log, or if the shared memory is lost, the shard rolls back to the last
snapshot or checkpoint. Later updates are lost, though they were acknowledged. A
ROLLBACK row in the trace records the loss; its `job` is the row that the shard
rolled back to.
"""

from pathlib import Path
from typing import Any, NamedTuple

from asgd import base, safe_files
from asgd.live import slots
from asgd.live.append_only import ANEW, GO_ON, writing
from asgd.live.journal import journal_path, read_journal
from asgd.live.setup import Setup
from asgd.live.shard import images
from asgd.live.shard.role import Role
from asgd.live.shard.state import ShardState
from asgd.live.slots import DamagedSnapshot, WrongSlot
from asgd.orders import trace
from asgd.orders.trace import NO_SEQ, Event, Ledger


def agree(setup: Setup, run: Path, memory: Path) -> bool:
  """Returns False if all shards of a run must roll back to a checkpoint.

  All shards of a consistent run follow one order. If one shard has lost its
  memory, or the snapshot in it, every shard rolls back to its image in one
  checkpoint; these images are of the same row. The followers' journals are
  overwritten with the lead's. Call this before any shard is opened.

  Raises:
    ValueError: for a journal that cannot be read, or written.
  """
  if not setup.consistent or setup.shards == 1:
    return True
  folders = [Path(memory) / f"shard-{i}" for i in range(setup.shards)]
  paths = [journal_path(run, index) for index in range(setup.shards)]
  counts = [len(read_journal(path)) for path in paths]
  if all(map(slots.is_usable, folders, counts)):
    return True
  for folder in folders:
    slots.disown(folder)
  content = paths[0].read_bytes() if paths[0].exists() else b""
  for path in paths[1:]:
    with writing(path):
      safe_files.write(path, content)
  return False


class Rollback(NamedTuple):
  """The position to which a shard rolled back."""

  row: int  # of its journal
  message: int  # count of the messages received up to that row
  updates: int  # count of the updates that were undone
  # Why the snapshot in shared memory was unusable; "" if it was used, or if
  # none is expected.
  why: str = ""


class _StartingPoint(NamedTuple):
  """The image that a recovery starts from."""

  image: tuple[Any, Any] | None  # (state, meta); None: before the first row
  memory_intact: bool  # the shared memory belongs to the journal
  from_checkpoint: bool  # the image is not the snapshot in shared memory
  why: str = ""  # see `Rollback.why`


class _MismatchedFiles(Exception):
  """The files of a shard do not fit together."""


def recover(
  role: Role, image: tuple[Any, Any] | None, *, resumed: bool
) -> Rollback | None:
  """Brings a shard from before the first row to the end of its journal; see
  `Shard`, also for the errors."""
  state, events = role.state, role.journal.events()
  if not events:
    return None
  name, memory = role.journal.name, state.slots.memory
  try:
    start = _choose(state, name, events, image, resumed)
    ledger, lost_updates = _replay(role, events, start)
  except _MismatchedFiles as error:
    raise ValueError(str(error)) from error
  except WrongSlot as error:
    memory.disown()  # so that the next command does not need the memory
    raise ValueError(str(error)) from error
  except (LookupError, StopIteration, TypeError, ValueError) as error:
    raise ValueError(
      f"{name} cannot be replayed (after row {state.rows},"
      f" {type(error).__name__}: {error}): it, or the shared memory in"
      f" {memory.name}, was changed. Put them back as they were; or remove"
      f" {memory.name} and {GO_ON} from the last checkpoint"
    ) from error
  rollback = None
  if lost_updates:
    meta = start.image[1] if start.image else {"rows": 0, "received": 0}
    rows, received = meta["rows"], meta["received"]
    # The shards of a consistent run all write the same row, so its time must
    # not depend on the clock of one shard.
    now = events[-1].time
    if not state.setup.consistent:
      now = max(role.time, now)
    row = Event(now, 0, NO_SEQ, rows, base.ROLLBACK)
    before = ledger.undone
    ledger.apply(row)
    rollback = Rollback(rows, received, ledger.undone - before, start.why)
    role.commit(row)
  # Workers that may connect again: the journal has a JOIN but no LEAVE of them.
  present = sorted(ledger.present)
  known = ledger.incarnations
  role.incarnations |= {w: known[w] for w in present if w in known}
  # The shard may have been killed after a worker's tickets ended, but before
  # the LEAVE was written: it is written now.
  ended = [w for w in present if w in ledger.ended]
  alive = set(present).difference(ended)
  role.died = {w: n for w, n in ledger.incarnations.items() if w not in alive}
  for worker in ended if role.decides else ():
    role.leave(worker)
  if resumed:
    for worker in sorted(role.incarnations):
      role.leave(worker)
  elif not role.index:
    role.watch.learn(role.journal.events())
  if start.from_checkpoint:  # the next recovery must not use the old snapshot
    images.snapshot(state)
  return rollback


def _replay(
  role: Role, events: list[Event], start: _StartingPoint
) -> tuple[Ledger, bool]:
  """Restores the image and replays the rows after it. Returns the ledger of all
  rows, and whether updates are lost."""
  state, rows, ledger = role.state, 0, Ledger()
  if start.image:
    rows = start.image[1]["rows"]
    trace.follow(events[:rows], ledger)
    _check_image(state, role.journal.name, ledger, start)
    images.restore(state, start.image, ledger, start.memory_intact)
  trace.follow(events[rows:], ledger)
  if not role.index:
    role.dispatcher.replay(events)
  if state.setup.log and not start.from_checkpoint:
    # The records may be ahead of the journal after a loss of power. The sink
    # skips the records that it has when the rows are applied again.
    before = start.image[1]["records"] if start.image else 0
    received = sum(event.action == base.RECEIVE for event in events[rows:])
    state.messages.sink.truncate(before + received)
    state.messages.recorded = state.messages.sink.count - before
    for event in events[rows:]:
      state.apply(event)
    return ledger, False
  later = events[rows:]
  lost_updates = images.reopen(state, later, ledger, start.memory_intact)
  # The records may be ahead of a trace that was cut short.
  state.messages.sink.truncate(state.messages.count)
  return ledger, lost_updates


def _choose(
  state: ShardState,
  name: str,
  events: list[Event],
  image: tuple[Any, Any] | None,
  resumed: bool,
) -> _StartingPoint:
  """Chooses the snapshot in shared memory if it is usable, otherwise `image`,
  which is a checkpoint's. Raises _MismatchedFiles if neither is usable."""
  memory = state.slots.memory
  intact, why = not memory.fresh, ""
  if not intact and not resumed:  # workers still map the removed memory
    raise _MismatchedFiles(
      f"the shared memory {memory.name} is missing: it was removed while the"
      f" run used it; {GO_ON} from the last checkpoint"
    )
  if intact:
    try:
      saved = memory.load()
      rows = saved[1]["rows"] if saved else 0
      unsaved = _has_unsaved_rollback(state, saved, events[rows:])
      if rows <= len(events) and not unsaved:
        return _StartingPoint(saved, True, False)
      if rows > len(events):
        why = _cut_trace_error(name, events, "snapshot", rows)
        if not resumed:
          raise _MismatchedFiles(why)
        intact = False
    except DamagedSnapshot as error:
      # The memory still counts as intact: the parameters of open tickets lie
      # in slots beside the snapshot.
      why = str(error)
  setup = state.setup
  if setup.consistent and setup.shards > 1 and not resumed:
    raise _MismatchedFiles(
      f"{why or f'{memory.name} has lost its snapshot'}; a shard of a"
      f" consistent run cannot roll back alone: {GO_ON} from the last"
      " checkpoint"
    )
  memory.forget()
  if image and image[1]["rows"] > len(events):
    raise _MismatchedFiles(
      _cut_trace_error(name, events, "checkpoint", image[1]["rows"])
    )
  if image and _is_undone(events, image[1]["rows"]):
    image = None
  # In a resumed run all open tickets end, so no worker reads their slots.
  return _StartingPoint(image, intact and not resumed, True, why)


def _has_unsaved_rollback(
  state: ShardState, saved: tuple[Any, Any] | None, later: list[Event]
) -> bool:
  """Returns whether the shard was killed after a rollback to a checkpoint, and
  before the snapshot that follows it. `later` are the rows since `saved`.

  Without a log, a rollback to row 0 saves no snapshot, so it does not count.
  """
  targets = [event.job for event in later if event.action == base.ROLLBACK]
  if state.setup.log:
    return bool(targets)
  return not saved and bool(targets) and targets[-1] > 0


def _is_undone(events: list[Event], rows: int) -> bool:
  """Returns whether the shard rolled back to before row `rows` later on."""
  later = events[rows:]
  return any(e.action == base.ROLLBACK and e.job < rows for e in later)


def _cut_trace_error(
  name: str, events: list[Event], image: str, rows: int
) -> str:
  """Returns the error about a journal that is shorter than an image's."""
  return (
    f"{name} has {len(events)} rows, the {image} is of row {rows}: the trace"
    f" was cut short. Put it back as the run wrote it, {ANEW}"
  )


def _check_image(
  state: ShardState, name: str, ledger: Ledger, start: _StartingPoint
) -> None:
  """Raises _MismatchedFiles unless the image was made of this journal, and the
  sink has all records before it."""
  meta, memory, sink = start.image[1], state.slots.memory, state.messages.sink
  tickets = sorted(
    [*event.key, event.job]
    for tickets in ledger.open.values()
    for event in tickets.values()
  )
  counts = len(ledger.received) + ledger.undone, tickets
  if counts != (meta["received"], list(map(list, meta["tickets"]))):
    image = (
      "checkpoint" if start.from_checkpoint else f"snapshot in {memory.name}"
    )
    raise _MismatchedFiles(
      f"{name} is not the trace that the {image} was made of (at row"
      f" {meta['rows']}): one of the two was changed. Put it back as the run"
      f" wrote it, {ANEW}"
    )
  if sink.count < meta["records"]:
    raise _MismatchedFiles(
      f"{sink.name} has {sink.count} records where the run had written"
      f" {meta['records']}: it was removed or cut short. Put it back, {ANEW};"
      " a replay of the trace recomputes the parameters up to now"
    )
