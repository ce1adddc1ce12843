"""Recovery of a shard: from its log, its journal or a checkpoint.

With a log, the messages since the last snapshot still lie in their slots. The
shard applies the rows since the snapshot again, and no update is lost.

Without a log, or if the shared memory is lost, the shard rolls back to the last
snapshot or checkpoint. Later updates are lost, though they were acknowledged. A
ROLLBACK row in the trace records the loss; its `job` is the row that the shard
rolled back to.

`recover` brings one shard to the end of its journal; begin reading there.
`align_journals` runs before it, for all shards of a consistent run.
"""

from pathlib import Path
from typing import Any, NamedTuple

from asgd import base, safe_files
from asgd.checks import RERUN
from asgd.live import slots
from asgd.live.append_only import START_ANEW, writing
from asgd.live.journal import journal_path, read_journal
from asgd.live.setup import Setup
from asgd.live.shard import images
from asgd.live.shard.images import Image
from asgd.live.shard.role import Role
from asgd.live.shard.state import ShardState
from asgd.live.slots import DamagedSnapshot, WrongSlot
from asgd.orders import trace
from asgd.orders.trace import NO_SEQ, Event, Ledger


def align_journals(setup: Setup, run: Path, memory: Path) -> bool:
  """Returns whether all shards of a consistent run can resume from memory. If
  not, prepares their journals and memories for a rollback to a checkpoint.

  All shards of a consistent run follow one order. If one shard has lost its
  memory, or the snapshot in the memory, every shard rolls back to its image in
  one checkpoint; these images are of the same row. The journal of the lead
  replaces the journals of the followers. Call this before any shard is opened.

  Raises:
    ValueError: if a journal cannot be read or written.
  """
  if not setup.consistent or setup.shards == 1:
    return True
  folders = [Path(memory) / f"shard-{i}" for i in range(setup.shards)]
  paths = [journal_path(run, index) for index in range(setup.shards)]
  counts = [len(read_journal(path)) for path in paths]
  if all(map(slots.is_usable, folders, counts)):
    return True
  # A kill between these writes is harmless: without the mark of `adopt`, the
  # next call overwrites the journals again.
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
  reason: str = ""


class _StartingPoint(NamedTuple):
  """The image that a recovery starts from."""

  image: Image | None  # None: before the first row
  memory_intact: bool  # the shared memory belongs to the journal
  from_checkpoint: bool  # the image is not the snapshot in shared memory
  reason: str = ""  # see `Rollback.reason`

  @property
  def rows(self) -> int:
    """Count of the journal's rows before the image."""
    return self.image[1]["rows"] if self.image else 0


class _MismatchedFiles(Exception):
  """The journal, records and image of a shard contradict each other."""


def recover(
  role: Role, image: Image | None, *, resumed: bool
) -> Rollback | None:
  """Brings a shard from before the first row to the end of its journal.

  [1] Choose an image: the snapshot in shared memory, or the checkpoint.
  [2] Restore the image. The ledger of the rows before it names open tickets.
  [3] With a log, apply the rows after the image again; else drop their updates.
  [4] If updates are dropped, write a ROLLBACK row.
  [5] Restore the incarnations that may connect again. In a resumed run all
      incarnations have exited, so their tickets end.

  Args:
    role: the role of a shard before its first row; it is changed.
    image: the image of a checkpoint, used if the shared memory is lost.
    resumed: whether the whole run starts again, so that no worker and no other
      shard is alive.

  Returns:
    The position that the shard rolled back to, or None if no update is lost.

  Raises:
    ValueError: if the journal, the image and the memory do not fit together.
  """
  events = role.journal.events()
  if not events:
    return None
  start, ledger, lost_updates = _replay(role, events, image, resumed)
  # [4] Write a ROLLBACK row if updates are lost.
  rollback = None
  if lost_updates:
    rollback = _commit_rollback(role, ledger, start, events[-1].time)
  # [5] Restore the incarnations.
  _restore_incarnations(role, ledger)
  if resumed:
    for worker in sorted(role.incarnations):
      role.leave(worker)
  else:
    role.learn_durations(role.journal.events())
  if start.from_checkpoint:  # the next recovery must not use the old snapshot
    images.save_snapshot(role.state)
  return rollback


def _replay(
  role: Role, events: list[Event], image: Image | None, resumed: bool
) -> tuple[_StartingPoint, Ledger[Event], bool]:
  """Performs steps [1] to [3], and turns their errors into ValueErrors. Returns
  the image used, the ledger of all rows, and whether updates are lost."""
  state, journal_name = role.state, role.journal.name
  memory = state.slots.memory
  try:
    start = _choose_image(state, journal_name, events, image, resumed)  # [1]
    ledger = _restore_image(role, events, start)  # [2]
    lost_updates = _replay_later_rows(role, events, ledger, start)  # [3]
  except _MismatchedFiles as error:
    raise ValueError(str(error)) from error
  except WrongSlot as error:
    memory.disown()  # the next driver then does not use the memory
    raise ValueError(str(error)) from error
  # A changed file may break any assumption of the replay.
  except (LookupError, StopIteration, TypeError, ValueError) as error:
    raise ValueError(
      f"{journal_name} cannot be replayed (after row {state.rows},"
      f" {type(error).__name__}: {error}): it, or the shared memory in"
      f" {memory.name}, was changed. Put them back as they were; or remove"
      f" {memory.name} and {RERUN} from the last checkpoint"
    ) from error
  return start, ledger, lost_updates


def _restore_image(
  role: Role, events: list[Event], start: _StartingPoint
) -> Ledger[Event]:
  """Restores the image. Returns the ledger of the rows before it."""
  ledger: Ledger[Event] = Ledger()
  if start.image:
    trace.follow(events[: start.rows], ledger)
    _check_image(role.state, role.journal.name, ledger, start, start.image[1])
    images.restore(role.state, start.image, ledger, start.memory_intact)
  return ledger


def _replay_later_rows(
  role: Role, events: list[Event], ledger: Ledger[Event], start: _StartingPoint
) -> bool:
  """Applies the rows after the image again if their messages still lie in the
  log, otherwise drops their updates. Returns whether updates are lost."""
  state, later_rows = role.state, events[start.rows :]
  sink = state.messages.sink
  trace.follow(later_rows, ledger)
  role.replay(events)
  if state.setup.log and not start.from_checkpoint:
    # The records may be ahead of the journal after a loss of power. The sink
    # skips the records that it has when the rows are applied again.
    records = start.image[1]["records"] if start.image else 0
    received = sum(event.action == base.RECEIVE for event in later_rows)
    sink.truncate(records + received)
    state.messages.n_recorded = sink.count - records
    for event in later_rows:
      state.apply(event)
    return False
  lost_updates = images.reopen(state, later_rows, ledger, start.memory_intact)
  # The records may be ahead of a trace that was cut short.
  sink.truncate(state.messages.count)
  return lost_updates


def _commit_rollback(
  role: Role, ledger: Ledger[Event], start: _StartingPoint, last_time: float
) -> Rollback:
  """Commits the ROLLBACK row; `last_time` is the time of the journal's last
  row."""
  received = start.image[1]["received"] if start.image else 0
  # The shards of a consistent run all write the same row, so its time must not
  # depend on the clock of one shard.
  consistent = role.state.setup.consistent
  time = last_time if consistent else max(role.time, last_time)
  row = Event(time, 0, NO_SEQ, start.rows, base.ROLLBACK)
  undone_before = ledger.undone
  ledger.apply(row)
  undone_updates = ledger.undone - undone_before
  role.commit(row)
  return Rollback(start.rows, received, undone_updates, start.reason)


def _restore_incarnations(role: Role, ledger: Ledger[Event]) -> None:
  """Sets the present incarnations, which may connect again, and the ended ones,
  which may not."""
  # The journal has a JOIN but no LEAVE of a present worker.
  present, incarnations = sorted(ledger.present), ledger.incarnations
  role.incarnations |= {
    worker: incarnations[worker] for worker in present if worker in incarnations
  }
  # A kill may have come after a worker's tickets ended, but before the LEAVE
  # row was written: write it now.
  without_leave = [worker for worker in present if worker in ledger.ended]
  alive = set(present).difference(without_leave)
  role.ended_incarnations = {
    worker: incarnation
    for worker, incarnation in incarnations.items()
    if worker not in alive
  }
  for worker in without_leave if role.decides else ():
    role.leave(worker)


def _choose_image(
  state: ShardState,
  journal_name: str,
  events: list[Event],
  checkpoint: Image | None,
  resumed: bool,
) -> _StartingPoint:
  """Chooses the snapshot in shared memory if it is usable, otherwise the
  checkpoint. Raises _MismatchedFiles if neither is usable."""
  memory = state.slots.memory
  memory_intact, reason = not memory.is_new, ""
  if not memory_intact and not resumed:  # workers still map the removed memory
    raise _MismatchedFiles(
      f"the shared memory {memory.name} is missing: it was removed while the"
      f" run used it; {RERUN} from the last checkpoint"
    )
  if memory_intact:
    try:
      snapshot = memory.load()
      rows = snapshot[1]["rows"] if snapshot else 0
      unsaved = _has_unsaved_rollback(state, snapshot, events[rows:])
      if rows <= len(events) and not unsaved:
        return _StartingPoint(snapshot, True, False)
      if rows > len(events):
        reason = _cut_trace_error(journal_name, events, "snapshot", rows)
        if not resumed:
          raise _MismatchedFiles(reason)
        # Slots that were written after the cut trace do not belong to it.
        memory_intact = False
    except DamagedSnapshot as error:
      # The memory still counts as intact: the parameters of open tickets lie
      # in slots beside the snapshot.
      reason = str(error)
  setup = state.setup
  if setup.consistent and setup.shards > 1 and not resumed:
    raise _MismatchedFiles(
      f"{reason or f'{memory.name} has lost its snapshot'}; a shard of a"
      f" consistent run cannot roll back alone: {RERUN} from the last"
      " checkpoint"
    )
  memory.forget()
  if checkpoint:
    rows = checkpoint[1]["rows"]
    if rows > len(events):
      reason = _cut_trace_error(journal_name, events, "checkpoint", rows)
      raise _MismatchedFiles(reason)
    if _is_undone(events, rows):
      checkpoint = None
  # In a resumed run all open tickets end, so no worker reads their slots.
  return _StartingPoint(checkpoint, memory_intact and not resumed, True, reason)


def _has_unsaved_rollback(
  state: ShardState, snapshot: Image | None, later_rows: list[Event]
) -> bool:
  """Returns whether the shard was killed after a rollback to a checkpoint, and
  before the snapshot that follows the rollback. Then the snapshot in memory is
  older than the rollback. `later_rows` are the rows since that snapshot."""
  rollback_targets = [
    row.job for row in later_rows if row.action == base.ROLLBACK
  ]
  if state.setup.log:
    return bool(rollback_targets)
  # Without a log, a rollback to row 0 saves no snapshot, so it does not count.
  return not snapshot and bool(rollback_targets) and rollback_targets[-1] > 0


def _is_undone(events: list[Event], rows: int) -> bool:
  """Returns whether a later rollback has undone an image after `rows` rows."""
  # The `job` of a ROLLBACK is the row that the shard rolled back to.
  return any(
    event.action == base.ROLLBACK and event.job < rows
    for event in events[rows:]
  )


def _cut_trace_error(
  journal_name: str, events: list[Event], image_name: str, rows: int
) -> str:
  """Returns the error of a journal that has fewer rows than an image covers."""
  return (
    f"{journal_name} has {len(events)} rows, the {image_name} is of row {rows}:"
    f" the trace was cut short. Put it back as the run wrote it, {START_ANEW}"
  )


def _check_image(
  state: ShardState,
  journal_name: str,
  ledger: Ledger[Event],
  start: _StartingPoint,
  meta: dict[str, Any],
) -> None:
  """Raises _MismatchedFiles unless the image was made of this journal, and the
  sink has all records before the image. `meta` is the image's description."""
  memory, sink = state.slots.memory, state.messages.sink
  tickets = sorted(
    [*event.key, event.job]
    for tickets in ledger.open.values()
    for event in tickets.values()
  )
  # JSON has lists where `describe` wrote tuples.
  image_tickets = list(map(list, meta["tickets"]))
  received = len(ledger.received) + ledger.undone
  if (received, tickets) != (meta["received"], image_tickets):
    image_name = (
      "checkpoint" if start.from_checkpoint else f"snapshot in {memory.name}"
    )
    raise _MismatchedFiles(
      f"{journal_name} is not the trace that the {image_name} was made of (at"
      f" row {meta['rows']}): one of the two was changed. Put it back as the"
      f" run wrote it, {START_ANEW}"
    )
  if sink.count < meta["records"]:
    raise _MismatchedFiles(
      f"{sink.name} has {sink.count} records where the run had written"
      f" {meta['records']}: it was removed or cut short. Put it back,"
      f" {START_ANEW};"
      " a replay of the trace recomputes the parameters up to now"
    )
