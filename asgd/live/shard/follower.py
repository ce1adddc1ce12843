"""The shards other than the lead.

A `Follower` (consistent run) applies the lead's rows in the lead's order. An
`Independent` shard (`consistent=False`) orders the messages itself.
"""

import collections
from typing import Any

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.setup import slot_counts
from asgd.live.shard.role import MOST_AHEAD, Role, SendFrame
from asgd.live.shard.state import Key
from asgd.orders.trace import NO_SEQ, Event


class Follower(Role):
  """A shard of a consistent run: applies the rows of the lead's journal."""

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    self._lead: SendFrame | None = None
    # Rows received from the lead and not applied yet.
    self._rows: collections.deque[Event] = collections.deque()
    # Message -> index -> total, as received from the lead (TOTAL).
    self._totals: dict[Key, dict[int, float]] = collections.defaultdict(dict)
    self._open_ask: Frame | None = None  # the lead's ASK, not answered yet

  def follow(self, send: SendFrame) -> None:
    """Asks the lead for missing rows, and reports the messages that this shard
    has."""
    self._lead = send
    # The lead sends these rows again.
    self._rows.clear()
    send(Frame(frames.FOLLOW, self.index, version=self.state.rows))
    for key in self.state.pushes:
      self._report_prepared(key)

  def push(self, frame: Frame) -> None:
    """Stores a PUSH, and reports to the lead that its message is prepared or
    refused."""
    key = frame.worker, frame.seq
    self.state.pushes[key] = frame
    self._report_prepared(key)
    self._apply_rows()

  def _report_prepared(self, key: Key) -> None:
    """Reports to the lead that this shard has a message, or that it refuses
    the message."""
    if self._lead:
      refused = int(not self.state.pushes[key].flag)
      self._lead(Frame(frames.PREPARED, *key, job=self.index, flag=refused))

  def handle_shard_frame(self, frame: Frame, send: SendFrame) -> None:
    """Handles a frame of the lead; ignores frames of earlier connections."""
    if send != self._lead:
      return
    key = frame.worker, frame.seq
    if frame.kind == frames.TOTAL:  # its ROW or ASK follows
      self._totals[key][frame.version] = frame.value
      return
    if frame.kind == frames.ASK:
      self._open_ask = frame
    # The lead sends rows twice if it received FOLLOW twice.
    next_row = self.state.rows + len(self._rows)
    if frame.kind == frames.ROW and frame.version == next_row:
      event = Event(frame.value, *key, frame.job, frame.flag, loss=frame.loss)
      self._rows.append(event)
    self._apply_rows()

  def _apply_rows(self) -> None:
    """Commits the rows received from the lead, and answers its open ASK."""
    state = self.state
    while self._rows:
      event = self._rows.popleft()
      key = event.key
      if event.action in (base.LOST, base.REJECT, base.DROP):
        self._totals.pop(key, None)
        event = event._replace(message=state.lost_slot(key))
      elif event.action == base.RECEIVE:
        # The lead receives only messages that this shard has prepared. So the
        # message lies in its slot, even if this shard has lost the PUSH in a
        # kill since then.
        by_index = self._totals.pop(key, {})
        totals = tuple(total for _, total in sorted(by_index.items()))
        slot = state.tickets[key].message_slot
        event = event._replace(message=slot, totals=totals)
      self.commit(event)
    if self._open_ask and self._lead:
      self._answer(self._open_ask, self._lead)

  def _answer(self, ask: Frame, send: SendFrame) -> None:
    """Sends the lead this shard's operand of the total that `ask` requests,
    once this shard has the message.

    By then this shard has applied all rows before the ASK, so this shard and
    the lead compute with the same state.
    """
    state, key = self.state, (ask.worker, ask.seq)
    if key not in state.pushes:
      return
    totals = [self._totals[key][i] for i in range(ask.version)]
    stage = state.stage(key, state.pushes[key].value, totals)
    self._open_ask = None
    answer = Frame(frames.ASKED, *key, self.index, ask.version)
    send(answer._replace(value=float(stage.operand)))


class Independent(Role):
  """With `consistent=False`, a shard other than the lead orders messages itself
  and sends its slice of a ticket on FETCH."""

  decides = True

  def is_outdated(self, worker: int, incarnation: int) -> bool:
    """See the base. An incarnation is outdated, too, if this shard has ended
    its tickets, even if no later incarnation has joined."""
    is_ended = incarnation <= self.ended_incarnations.get(worker, -1)
    return is_ended or super().is_outdated(worker, incarnation)

  def join(self, worker: int, incarnation: int) -> None:
    """Writes the JOIN of a new incarnation; the lead assigned the number."""
    super().join(worker, incarnation)
    self._commit_row((worker, NO_SEQ), incarnation, base.JOIN)

  def leave(self, worker: int) -> None:
    """Ends the tickets of the present incarnation of a worker."""
    state = self.state
    incarnation = self.incarnations.pop(worker, None)
    keys = [key for key in state.tickets if key[0] == worker]
    if incarnation is not None and keys:
      self.ended_incarnations[worker] = incarnation
    for key in keys:
      job, slot = state.tickets[key].job, state.lost_slot(key)
      self._commit_row(key, job, base.LOST, message=slot)
    if keys or incarnation is not None:
      self._commit_row((worker, NO_SEQ), incarnation or 0, base.LEAVE)

  def fetch(self, frame: Frame) -> None:
    """Opens this shard's slice of a ticket, or sends an open one again.

    If the ticket has ended, no message ended it, because a worker sends PUSH
    only after FETCH. So this shard has ended the worker's tickets, and it
    expels the worker. Raises BadFrame if the rules do not allow the ticket.
    """
    key, state = (frame.worker, frame.seq), self.state
    worker = frame.worker
    if key in state.tickets:
      self.send(worker, state.ticket_frame(key))
    elif frame.seq < state.started_jobs.get(worker, 0):
      self.leave(worker)
      self.expel(worker)
    else:
      self._check_new(frame)
      # An earlier process of this shard may have lost the ticket that the
      # worker would reuse. Then the new ticket is sent in full.
      keeps = frame.flag and worker in state.reusable_tickets
      self._commit_row(key, frame.job, base.KEEP if keeps else base.SEND)

  def _check_new(self, frame: Frame) -> None:
    """Raises BadFrame for a ticket that the rules do not allow beside the open
    tickets. Such a FETCH must be rejected, because each one takes a slot."""
    setup, state, slots = self.setup, self.state, self.state.slots
    rules, worker = setup.rules, frame.worker
    max_open = rules.depth + rules.round + rules.backup  # tickets of a worker
    # The worker's seq may be ahead of this shard's count. A loss of power may
    # have removed rows of received messages, and some incarnations may never
    # have connected to this shard.
    ahead = frame.seq - state.started_jobs.get(worker, 0)
    open_jobs = [
      ticket.job for key, ticket in state.tickets.items() if key[0] == worker
    ]
    n_lost_slots = sum(map(len, slots.lost_slots.values()))
    n_taken_slots = len(state.tickets) + n_lost_slots
    if (
      frame.job in open_jobs
      or len(open_jobs) >= max_open
      # A snapshot frees the slots of the log; the tickets need the others.
      or n_taken_slots >= slot_counts(setup).messages - setup.log
      or ahead > setup.jobs + max_open * MOST_AHEAD
    ):
      n_started = state.started_jobs.get(worker, 0)
      raise frames.BadFrame(
        f"worker {worker} asks shard {self.index} for job {frame.job} as its"
        f" {frame.seq}, after {n_started}, and has {open_jobs} open"
      )

  def push(self, frame: Frame) -> None:
    """Receives a message once all earlier messages of its worker have
    arrived."""
    job_key, state = (frame.worker, frame.seq), self.state
    state.pushes[job_key] = frame
    if not frame.flag:
      job = state.tickets[job_key].job
      self._commit_row(job_key, job, base.REJECT, loss=frame.value)
      self.leave(frame.worker)
      self.expel(frame.worker)
      return
    # A worker fetches its tickets in the order of its jobs.
    open_keys = [key for key in state.tickets if key[0] == frame.worker]
    for key in open_keys:
      if key not in state.pushes:
        break
      ticket, loss = state.tickets[key], state.pushes[key].value
      slot = ticket.message_slot
      self._commit_row(key, ticket.job, base.RECEIVE, message=slot, loss=loss)

  def _commit_row(self, key: Key, job: int, action: int, **fields: Any) -> None:
    """Commits a row with the present time; `fields` are fields of an `Event`.
    """
    self.commit(Event(self.time, *key, job, action, **fields))
