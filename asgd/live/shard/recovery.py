"""How a shard comes back: from its log, its journal or a checkpoint.

With a log, the messages since the last snapshot still lie in their slots: the
rows since then are obeyed again, and nothing is lost. Without it, or when
the memory is lost, the shard goes back to the last snapshot or checkpoint;
updates since are lost, though they were acknowledged, and a ROLLBACK row says
so in the trace.
"""

from typing import Any, NamedTuple

from asgd import base
from asgd.live.journal import Journal
from asgd.live.shard import images
from asgd.live.shard.state import ShardState
from asgd.live.slots import DamagedSnapshot
from asgd.orders import protocol
from asgd.orders.trace import NO_SEQ, Event, Ledger, follow

_ANEW = "or start anew in another folder (--workdir)"


class Rollback(NamedTuple):
  """Where a shard went back to."""

  row: int  # of its journal
  message: int  # how many had been received
  updates: int  # that were undone
  why: str = ""  # if it could have been otherwise


class Recovery(NamedTuple):
  """What a recovery leaves to be done, beside the state."""

  replaced: bool = False  # the memory's content by a checkpoint, or nothing
  rollback: Rollback | None = None
  row: Event | None = None  # to be committed: the ROLLBACK
  holders: dict[int, int] = {}  # of places: they may come back
  lost: tuple[int, ...] = ()  # workers with dead tickets that have not left yet


class _Start(NamedTuple):
  """What a recovery begins with."""

  image: tuple[Any, Any] | None  # (state, meta); None: before the first row
  intact: bool  # the memory is that of the journal
  logged: bool  # and holds the messages since the image
  replaced: bool  # the image is not the memory's
  why: str = ""  # if it could have been otherwise


class _Unfit(Exception):
  """What a shard has written does not fit together."""


def recover(
  state: ShardState,
  journal: Journal,
  dispatcher: protocol.Dispatcher | None,
  image: tuple[Any, Any] | None,
  *,
  now: float,
  resumed: bool,
) -> Recovery:
  """Brings a state from before the first row to where the journal ends, and the
  lead's dispatcher with it. The image of a checkpoint is for when the memory is
  lost; of a run that is resumed no worker and no other shard is alive.

  Raises:
    ValueError: if what is there does not fit together.
  """
  events = journal.events()
  if not events:
    return Recovery()
  name, memory = journal.name, state.slots.memory
  try:
    start = _choose(state, name, events, image, resumed)
    ledger, lost_updates = _obey(state, name, dispatcher, events, start)
  except _Unfit as error:
    raise ValueError(str(error)) from error
  except (LookupError, StopIteration, TypeError, ValueError) as error:
    raise ValueError(
      f"{name} cannot be obeyed (after row {state.rows},"
      f" {type(error).__name__}: {error}): it, or the shared memory in"
      f" {memory.name}, was changed. Put them back as they were; or remove"
      f" {memory.name} and run the same command again to go on from the last"
      " checkpoint"
    ) from error
  present = sorted(ledger.present)
  holders = {w: ledger.holders[w] for w in present if w in ledger.holders}
  # A kill came between the end of their tickets and their LEAVE.
  lost = tuple(w for w in present if w in ledger.ended)
  if not lost_updates:
    return Recovery(start.replaced, holders=holders, lost=lost)
  meta = start.image[1] if start.image else {"rows": 0, "received": 0}
  rows, received = meta["rows"], meta["received"]
  row = Event(max(now, events[-1].time), 0, NO_SEQ, rows, base.ROLLBACK)
  before = ledger.undone
  ledger.obey(row)
  rollback = Rollback(rows, received, ledger.undone - before, start.why)
  return Recovery(start.replaced, rollback, row, holders, lost)


def _obey(state, name, dispatcher, events, start):
  """Takes over an image and the rows; returns their Ledger, and whether updates
  are lost."""
  rows, ledger = 0, Ledger()
  if start.image:
    rows = start.image[1]["rows"]
    follow(events[:rows], ledger)
    _check_fit(state, name, ledger, start)
    images.restore(state, start.image, ledger, start.intact)
  follow(events[rows:], ledger)
  if dispatcher:
    dispatcher.obey(events)
  if start.logged:
    state.sink.truncate(start.image[1]["records"] if start.image else 0)
    for event in events[rows:]:
      state.obey(event)
    return ledger, False
  lost_updates = images.reopen(state, events[rows:], ledger, start.intact)
  state.sink.truncate(state.received)  # if it is the trace that was cut
  return ledger, lost_updates


def _choose(state, name, events, image, resumed):
  """Chooses what to begin with: the memory's snapshot if it can be used,
  otherwise the checkpoint's image, if there is one."""
  memory = state.slots.memory
  intact, why = not memory.fresh, ""
  if intact:
    try:
      saved = memory.load()
      rows = saved[1]["rows"] if saved else 0
      # If it went back since, it was killed before it saved that.
      late = state.setup.log or not saved
      rolled_back = late and any(
        event.action == base.ROLLBACK for event in events[rows:]
      )
      if rows <= len(events) and not rolled_back:
        return _Start(saved, True, bool(state.setup.log), False)
      if rows > len(events):
        why = _too_short(name, events, "snapshot", rows)
        if not resumed:
          raise _Unfit(why)
        intact = False
    except DamagedSnapshot as error:  # what workers were sent lies elsewhere
      why = str(error)
  memory.forget()
  if image and image[1]["rows"] > len(events):
    raise _Unfit(_too_short(name, events, "checkpoint", image[1]["rows"]))
  return _Start(image, intact, False, True, why)


def _too_short(name, events, what, rows):
  return (
    f"{name} has {len(events)} rows, the {what} is of row {rows}: the trace"
    f" was cut short. Put it back as the run wrote it, {_ANEW}"
  )


def _check_fit(state, name, ledger, start):
  """Checks that an image is of this journal, and that its records are there."""
  meta, memory, sink = start.image[1], state.slots.memory, state.sink
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
      f" wrote it, {_ANEW}"
    )
  if sink.count < meta["records"]:
    raise _Unfit(
      f"{sink.name} has {sink.count} records where the run had written"
      f" {meta['records']}: it was removed or cut short. Put it back, {_ANEW};"
      " the parameters so far can be made from the trace by a replay"
    )
