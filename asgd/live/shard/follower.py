"""Shards other than the lead: in its order, or in one of their own."""

import collections

from asgd import base
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.setup import slot_counts
from asgd.live.shard.role import MOST_AHEAD, Role, Say
from asgd.live.shard.state import Key
from asgd.orders.trace import NO_SEQ, Event


class Follower(Role):
  """A shard of a consistent run: applies the rows of the lead's journal."""

  def __init__(self, *args):
    super().__init__(*args)
    self._lead: Say | None = None
    self._ordered: collections.deque[Event] = collections.deque()
    # What the lead told of messages' totals, and its question that is open.
    self._totals: dict[Key, dict[int, float]] = collections.defaultdict(dict)
    self._question: Frame | None = None

  def follow(self, say: Say) -> None:
    """Asks the lead for missing rows, and reports messages to it."""
    self._lead = say
    self._ordered.clear()
    say(Frame(frames.FOLLOW, self.index, version=self.state.rows))
    for key in self.state.pushed:
      self._tell_prepared(key)

  def push(self, frame: Frame) -> None:
    """Reports a message to the lead, also one that cannot be read here."""
    key = frame.worker, frame.seq
    self.state.pushed[key] = frame
    self._tell_prepared(key)
    self._obey_rows()

  def _tell_prepared(self, key):
    if self._lead:
      refused = int(not self.state.pushed[key].flag)
      self._lead(Frame(frames.PREPARED, *key, job=self.index, flag=refused))

  def hear(self, frame: Frame, say: Say) -> None:
    """Takes a frame of the lead, by the connection that was opened last."""
    if say != self._lead:
      return
    key = frame.worker, frame.seq
    if frame.kind == frames.TOTAL:
      self._totals[key][frame.version] = frame.value
      return
    if frame.kind == frames.ASK:
      self._question = frame
    # After FOLLOW was said twice, rows come twice.
    rows = self.state.rows + len(self._ordered)
    if frame.kind == frames.ROW and frame.version == rows:
      event = Event(frame.value, *key, frame.job, frame.flag, loss=frame.loss)
      self._ordered.append(event)
    self._obey_rows()

  def _obey_rows(self):
    state = self.state
    while self._ordered:
      event = self._ordered.popleft()
      key = event.key
      if event.action in (base.LOST, base.REJECT, base.DROP):
        self._totals.pop(key, None)
        event = event._replace(message=state.dead_slot(key))
      elif event.action == base.RECEIVE:
        # What the lead has received was prepared here. It lies in its slot even
        # if this shard was killed since, and does not know.
        totals = tuple(x for _, x in sorted(self._totals.pop(key, {}).items()))
        slot = state.tickets[key].message
        event = event._replace(message=slot, totals=totals)
      self.commit(event)
    if self._question and self._lead:
      self._answer(self._question)

  def _answer(self, question):
    """Sends this shard's operand, once it is where the lead is."""
    state, key = self.state, (question.worker, question.seq)
    if key not in state.pushed:
      return
    totals = [self._totals[key][i] for i in range(question.version)]
    out = state.stage(key, state.pushed[key].value, totals)
    self._question = None
    asked = Frame(frames.ASKED, *key, self.index, question.version)
    self._lead(asked._replace(value=float(out.operand)))


class Independent(Role):
  """With `consistent=False`, a shard other than the lead orders messages itself
  and sends its slice of a ticket on FETCH."""

  decides = True

  def outdated(self, worker: int, number: int) -> bool:
    """Also a holder with lost tickets and no successor: its messages are
    lost."""
    dead = number <= self.died.get(worker, -1)
    return dead or super().outdated(worker, number)

  def join(self, worker: int, number: int) -> None:
    """Writes the JOIN of a new holder, whose number the lead gave."""
    super().join(worker, number)
    self._decide(worker, NO_SEQ, number, base.JOIN)

  def leave(self, worker: int) -> None:
    """Ends the tickets of a holder."""
    state = self.state
    number = self.holders.pop(worker, None)
    keys = [key for key in state.tickets if key[0] == worker]
    if number is not None and keys:
      self.died[worker] = number
    for key in keys:
      job, slot = state.tickets[key].job, state.dead_slot(key)
      self._decide(*key, job, base.LOST, message=slot)
    if keys or number is not None:
      self._decide(worker, NO_SEQ, number or 0, base.LEAVE)

  def fetch(self, frame: Frame) -> None:
    """Opens its slice of a ticket, or sends it again. A holder asks before it
    hands in: if a ticket was closed, or none is left to open, the frame is
    another's. Raises BadFrame if no holder could have that job."""
    key, state = (frame.worker, frame.seq), self.state
    worker = frame.worker
    if key in state.tickets:
      self.say(worker, state.ticket_frame(key))
    elif frame.seq < state.seqs.get(worker, 0):
      self.leave(worker)
      self.expel(worker)
    else:
      self._check_new(frame)
      # What it would keep may have died with this shard.
      keeps = frame.flag and worker in state.kept
      self._decide(*key, frame.job, base.KEEP if keeps else base.SEND)

  def _check_new(self, frame):
    """Checks a new ticket against those that can be open."""
    setup, state, slots = self.setup, self.state, self.state.slots
    rules, worker = setup.rules, frame.worker
    most = rules.depth + rules.round + rules.backup  # at one place
    # Messages that were received, of which a loss of power left no row here,
    # and those lost with holders that this shard did not hear of.
    ahead = frame.seq - state.seqs.get(worker, 0)
    jobs = [state.tickets[key].job for key in state.tickets if key[0] == worker]
    taken = len(state.tickets) + sum(map(len, slots.dead.values()))
    if (
      frame.job in jobs
      or len(jobs) >= most
      or taken >= slot_counts(setup).messages - setup.log
      or ahead > setup.jobs + most * MOST_AHEAD
    ):
      raise frames.BadFrame(
        f"worker {worker} asks shard {self.index} for job {frame.job} as its"
        f" {frame.seq}, after {state.seqs.get(worker, 0)}, and has {jobs} open"
      )

  def push(self, frame: Frame) -> None:
    """Receives a message once those before it of its worker have come."""
    key, state = (frame.worker, frame.seq), self.state
    state.pushed[key] = frame
    if not frame.flag:
      job = state.tickets[key].job
      self._decide(*key, job, base.REJECT, loss=frame.value)
      self.leave(frame.worker)
      self.expel(frame.worker)
      return
    for key in [key for key in state.tickets if key[0] == frame.worker]:
      if key not in state.pushed:
        break
      ticket, loss = state.tickets[key], state.pushed[key].value
      row = {"message": ticket.message, "loss": loss}
      self._decide(*key, ticket.job, base.RECEIVE, **row)

  def _decide(self, *event, **fields):
    self.commit(Event(self.time, *event, **fields))
