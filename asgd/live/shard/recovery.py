"""Recovery of a shard: from its log, its journal or a checkpoint.

With a log, the messages since the last snapshot still lie in their slots: the
rows since then are applied again, and nothing is lost. Without it, or when the
memory is lost, the shard rolls back to the last snapshot or checkpoint; updates
since are lost, though they were acknowledged, and a ROLLBACK row says so in the
trace.
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
from asgd.live.slots import DamagedSnapshot, WrongSlot
from asgd.orders import trace
from asgd.orders.trace import NO_SEQ, Event, Ledger


def agree(setup: Setup, run: Path, memory: Path) -> bool:
  """Returns whether the shards of a run resume from their memory, as far as
  they have to agree on that. To be called before they are opened.

  All shards of a consistent run follow one order. If one has lost its memory,
  or the snapshot in it, all roll back to the images of one checkpoint, which
  are of the same row, and the followers take over the lead's journal.

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
  message: int  # how many had been received
  updates: int  # that were undone
  why: str = ""  # if it could have been otherwise


class _Start(NamedTuple):
  """The beginning of a recovery."""

  image: tuple[Any, Any] | None  # (state, meta); None: before the first row
  intact: bool  # the memory is that of the journal
  replaced: bool  # the image is not the memory's
  why: str = ""  # if it could have been otherwise


class _Unfit(Exception):
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
    ledger, lost_updates = _obey(role, events, start)
  except _Unfit as error:
    raise ValueError(str(error)) from error
  except WrongSlot as error:  # the next command then needs no memory
    memory.disown()
    raise ValueError(str(error)) from error
  except (LookupError, StopIteration, TypeError, ValueError) as error:
    raise ValueError(
      f"{name} cannot be obeyed (after row {state.rows},"
      f" {type(error).__name__}: {error}): it, or the shared memory in"
      f" {memory.name}, was changed. Put them back as they were; or remove"
      f" {memory.name} and {GO_ON} from the last checkpoint"
    ) from error
  rollback = None
  if lost_updates:
    meta = start.image[1] if start.image else {"rows": 0, "received": 0}
    rows, received = meta["rows"], meta["received"]
    now = events[-1].time
    if not state.setup.consistent:  # or all shards write the same row
      now = max(role.time, now)
    row = Event(now, 0, NO_SEQ, rows, base.ROLLBACK)
    before = ledger.undone
    ledger.obey(row)
    rollback = Rollback(rows, received, ledger.undone - before, start.why)
    role.commit(row)
  present = sorted(ledger.present)  # places whose holders may come back
  role.holders |= {w: ledger.holders[w] for w in present if w in ledger.holders}
  # Of some a kill came between the end of their tickets and their LEAVE.
  ended = [w for w in present if w in ledger.ended]
  alive = set(present).difference(ended)
  role.died = {w: n for w, n in ledger.holders.items() if w not in alive}
  for worker in ended if role.decides else ():
    role.leave(worker)
  if resumed:
    for worker in sorted(role.holders):
      role.leave(worker)
  elif not role.index:
    role.watch.learn(role.journal.events())
  if start.replaced:  # the memory's content is of no use any more
    images.snapshot(state)
  return rollback


def _obey(role, events, start):
  """Takes over image and rows; returns (Ledger, whether updates are lost)."""
  state, rows, ledger = role.state, 0, Ledger()
  if start.image:
    rows = start.image[1]["rows"]
    trace.follow(events[:rows], ledger)
    _check_fit(state, role.journal.name, ledger, start)
    images.restore(state, start.image, ledger, start.intact)
  trace.follow(events[rows:], ledger)
  if not role.index:
    role.dispatcher.obey(events)
  if state.setup.log and not start.replaced:
    before = start.image[1]["records"] if start.image else 0
    again = sum(event.action == base.RECEIVE for event in events[rows:])
    state.messages.sink.truncate(before + again)
    state.messages.recorded = state.messages.sink.count - before
    for event in events[rows:]:
      state.obey(event)
    return ledger, False
  lost_updates = images.reopen(state, events[rows:], ledger, start.intact)
  # If it is the trace that was cut.
  state.messages.sink.truncate(state.messages.count)
  return ledger, lost_updates


def _choose(state, name, events, image, resumed):
  """Takes the memory's snapshot if it can be used, otherwise `image`."""
  memory = state.slots.memory
  intact, why = not memory.fresh, ""
  if not intact and not resumed:  # workers still have the one before
    raise _Unfit(
      f"the shared memory {memory.name} is gone: it was removed while the run"
      f" used it; {GO_ON} from the last checkpoint"
    )
  if intact:
    try:
      saved = memory.load()
      rows = saved[1]["rows"] if saved else 0
      if rows <= len(events) and not _went_back(state, saved, events[rows:]):
        return _Start(saved, True, False)
      if rows > len(events):
        why = _too_short(name, events, "snapshot", rows)
        if not resumed:
          raise _Unfit(why)
        intact = False
    except DamagedSnapshot as error:  # what workers were sent lies elsewhere
      why = str(error)
  setup = state.setup
  if setup.consistent and setup.shards > 1 and not resumed:
    raise _Unfit(
      f"{why or f'{memory.name} has lost its snapshot'}; a shard of a"
      f" consistent run cannot go back alone: {GO_ON} from the last checkpoint"
    )
  memory.forget()
  if image and image[1]["rows"] > len(events):
    raise _Unfit(_too_short(name, events, "checkpoint", image[1]["rows"]))
  if image and _is_undone(events, image[1]["rows"]):
    image = None
  # Of a run that is resumed, open tickets die, and nobody needs their slots.
  return _Start(image, intact and not resumed, True, why)


def _went_back(state, saved, later):
  """Whether a shard was killed after a rollback, before it saved that. Without
  a log, it rolls back to the beginning as it did before."""
  rows = [event.job for event in later if event.action == base.ROLLBACK]
  if state.setup.log:
    return bool(rows)
  return not saved and bool(rows) and rows[-1] > 0


def _is_undone(events, rows):
  """Whether a shard at so many rows has since rolled back further."""
  later = events[rows:]
  return any(e.action == base.ROLLBACK and e.job < rows for e in later)


def _too_short(name, events, what, rows):
  return (
    f"{name} has {len(events)} rows, the {what} is of row {rows}: the trace"
    f" was cut short. Put it back as the run wrote it, {ANEW}"
  )


def _check_fit(state, name, ledger, start):
  """Checks that an image is of this journal, and that its records are there."""
  meta, memory, sink = start.image[1], state.slots.memory, state.messages.sink
  tickets = sorted(
    [*event.key, event.job]
    for tickets in ledger.open.values()
    for event in tickets.values()
  )
  counts = len(ledger.received) + ledger.undone, tickets
  if counts != (meta["received"], list(map(list, meta["tickets"]))):
    what = "checkpoint" if start.replaced else f"snapshot in {memory.name}"
    raise _Unfit(
      f"{name} is not the trace that the {what} was made of (at row"
      f" {meta['rows']}): one of the two was changed. Put it back as the run"
      f" wrote it, {ANEW}"
    )
  if sink.count < meta["records"]:
    raise _Unfit(
      f"{sink.name} has {sink.count} records where the run had written"
      f" {meta['records']}: it was removed or cut short. Put it back, {ANEW};"
      " the parameters so far can be made from the trace by a replay"
    )
