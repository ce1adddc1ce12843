"""Shards other than the lead: obeying its rows, or with an order of their own.
"""

import collections

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.shard.core import Core, Role, Say
from asgd.live.shard.totals import FollowerTotals
from asgd.orders.trace import NO_SEQ, Event


class Follower(Role):
  """A shard of a consistent run: obeys the rows of the lead's journal."""

  def __init__(self, core: Core):
    super().__init__(core)
    self._lead: Say | None = None
    self._ordered: collections.deque[Event] = collections.deque()
    self._totals = FollowerTotals(core)

  def follow(self, say: Say) -> None:
    """Asks the lead for the rows that are not here, and tells it of messages.
    """
    core = self._core
    self._lead = say
    self._ordered.clear()
    say(Frame(frames.FOLLOW, core.index, version=core.state.rows))
    for key in core.state.pushed:
      self._tell_prepared(key)

  def push(self, frame: Frame) -> None:
    """A message has come: the lead is told."""
    key = frame.worker, frame.seq
    self._core.state.pushed[key] = frame
    self._tell_prepared(key)
    self._obey_rows()

  def _tell_prepared(self, key):
    if self._lead:
      self._lead(Frame(frames.PREPARED, *key, job=self._core.index))

  def hear(self, frame: Frame, say: Say) -> None:
    """Takes a frame of the lead."""
    del say
    if frame.kind in (frames.TOTAL, frames.ASK):
      self._totals.hear(frame)
    # After FOLLOW was said twice, rows come twice.
    rows = self._core.state.rows + len(self._ordered)
    if frame.kind == frames.ROW and frame.version == rows:
      self._ordered.append(
        Event(
          *(frame.value, frame.worker, frame.seq, frame.job, frame.flag),
          loss=frame.loss,
        )
      )
    if frame.kind != frames.TOTAL:
      self._obey_rows()

  def _obey_rows(self):
    state = self._core.state
    while self._ordered:
      event = self._ordered[0]
      key = event.key
      if event.action in (base.LOST, base.REJECT):
        self._totals.take(key)
        event = event._replace(message=state.dead_slot(key))
      elif event.action == base.RECEIVE:
        # What the lead has received was prepared here. It lies in its slot even
        # if this shard was killed since, and does not know.
        event = event._replace(
          message=state.tickets[key].message, totals=self._totals.take(key)
        )
      self._ordered.popleft()
      self._core.commit(event)
    self._totals.answer(self._lead)


class Independent(Role):
  """With `consistent=False`, a shard other than the lead orders messages itself
  and sends its slice of a ticket on FETCH."""

  decides = True

  def join(self, worker: int, number: int) -> None:
    """A new holder takes a place; the lead gave it its number."""
    super().join(worker, number)
    self._commit(worker, NO_SEQ, number, base.JOIN)

  def leave(self, worker: int) -> None:
    """The holder of a place is gone: its tickets die."""
    state = self._core.state
    number = self._core.holders.pop(worker, None)
    keys = [key for key in state.tickets if key[0] == worker]
    for key in keys:
      job, slot = state.tickets[key].job, state.dead_slot(key)
      self._commit(*key, job, base.LOST, message=slot)
    if keys or number is not None:
      self._commit(worker, NO_SEQ, number or 0, base.LEAVE)

  def fetch(self, frame: Frame) -> None:
    """Opens its slice of a ticket; says it again if it is open."""
    key = frame.worker, frame.seq
    if key in self._core.state.tickets:
      self._core.say(frame.worker, self._core.state.ticket_frame(key))
    else:
      action = base.KEEP if frame.flag else base.SEND
      self._commit(*key, frame.job, action)

  def push(self, frame: Frame) -> None:
    """Receives a message at once."""
    core, key = self._core, (frame.worker, frame.seq)
    _, job, _, message = core.state.tickets[key]
    core.state.pushed[key] = frame
    if frame.flag:
      self._commit(
        *key, job, base.RECEIVE, message=message, loss=frame.value
      )
    else:
      self._commit(*key, job, base.REJECT, loss=frame.value)
      self.leave(frame.worker)
      core.expel(frame.worker)

  def _commit(self, *event, **fields):
    self._core.commit(Event(self._core.time, *event, **fields))
