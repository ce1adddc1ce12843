"""The lead (shard 0): decides which worker starts and which message is
received."""

import collections
import math
from typing import Any, NamedTuple

import numpy as np

from asgd import base, sharding
from asgd.live import frames
from asgd.live.deadlines import WorkerWatch
from asgd.live.frames import Frame
from asgd.live.shard.role import Role, Say, row_frames, total_frames
from asgd.live.shard.state import Key
from asgd.orders import protocol
from asgd.orders.trace import ENDS


class Lead(Role):
  """Passes the frames of workers to the dispatcher, and commits its
  decisions."""

  decides = True

  def __init__(self, *args):
    super().__init__(*args)
    setup = self.setup
    self.dispatcher = protocol.Dispatcher(
      setup.rules, jobs=setup.jobs, owned=setup.owned, log=self._decided
    )
    self.watch = WorkerWatch(setup.ladder, self.time)
    self._totals = LeadTotals(self, self.dispatcher) if setup.totals else None
    self._unfinite = 0  # messages that were not finite, in a row
    self._tries = collections.Counter[int]()  # those by job
    # Of a consistent run: followers that have their part of a message.
    self._prepared: dict[Key, set[int]] = {}

  @property
  def refused(self) -> int:
    """Messages that were not finite: in a row, or of one job."""
    return max(self._unfinite, *self._tries.values(), 0)

  def outdated(self, worker: int, number: int) -> bool:
    """A holder with a number is the present one, or its tickets died."""
    return True

  def join(self, worker: int, number: int) -> None:
    """Gives a new holder its number."""
    self.heard(worker)
    self.holders[worker] = self.dispatcher.join(worker, self.time)

  def leave(self, worker: int) -> None:
    """Gives the jobs of a holder to others."""
    super().leave(worker)
    self.dispatcher.leave(worker, self.time)

  def heard(self, worker: int) -> None:
    """The worker gave a sign of life."""
    self.watch.heard[worker] = self.time

  def pause(self, worker: int) -> None:
    """Starts nothing new at a worker."""
    self.dispatcher.pause(worker)

  def push(self, frame: Frame) -> None:
    """The message of an open ticket has come."""
    key = frame.worker, frame.seq
    started = self.dispatcher.open(frame.worker)[frame.seq]
    if not frame.flag:
      self._refuse(key)
      return
    self._unfinite = 0
    self._tries.pop(started.job, None)
    self.state.pushed[key] = frame
    self.watch.ended(started.time, self.time)
    self._consider(key)

  def _refuse(self, key):
    """Drops a message; its worker has to begin anew."""
    worker, seq = key
    self._unfinite += 1
    self._tries[self.dispatcher.open(worker)[seq].job] += 1
    self.dispatcher.reject(*key, self.time)
    self.expel(worker)

  def hear(self, frame: Frame, say: Say) -> None:
    """Takes a frame of a follower, by the way that was opened last."""
    key = frame.worker, frame.seq
    if frame.kind == frames.FOLLOW:
      self.followers[frame.worker] = say
      events = self.journal.events()
      for row in range(frame.version, len(events)):
        for row_frame in row_frames(row, events[row]):
          say(row_frame)
      if self._totals:
        self._totals.ask(say)
    elif self.followers.get(frame.job) != say or key not in self.state.tickets:
      return  # a stranger, or it is late
    elif frame.kind == frames.PREPARED and frame.flag:
      self._refuse(key)
    elif frame.kind == frames.PREPARED:
      self._prepared.setdefault(key, set()).add(frame.job)
      self._consider(key)
    elif self._totals:
      self._totals.answer(frame)

  def _consider(self, key):
    """Counts a message as arrived when every shard has its part."""
    others = self.setup.shards - 1 if self.setup.consistent else 0
    prepared = len(self._prepared.get(key, ())) >= others
    if not prepared or key not in self.state.pushed:
      return
    if self._totals:
      self._totals.add(key)
    else:
      self.dispatcher.arrive(*key, self.time)

  def advance(self) -> None:
    """Receives what has arrived, and starts what may start."""
    if self.stopped:
      return
    while self.dispatcher.deliver(self.time) and self._totals:
      self._totals.propose()
    if self._totals:
      self._totals.propose()
    if not self._waits_for_others():
      self.dispatcher.grants(self.time)
    if self.dispatcher.finished:
      self.stopped = True
      for worker in self.peers:
        self.say(worker, Frame(frames.STOP, worker))

  def _waits_for_others(self):
    """Whether workers are still to come, and the ladder gives them time."""
    setup = self.setup
    return (
      not self.state.seqs
      and len(self.dispatcher.workers) < setup.gathered
      and self.time - self.watch.awake < setup.ladder.start
    )

  def _decided(self, event):
    """Commits a decision of the dispatcher."""
    state, key = self.state, event.key
    if event.action in ENDS:
      totals = self._totals.take(key) if self._totals else ()
      self._prepared.pop(key, None)
      if event.action == base.RECEIVE:
        slot, loss = state.tickets[key].message, state.pushed[key].value
        event = event._replace(message=slot, loss=loss, totals=totals)
      else:
        event = event._replace(message=state.dead_slot(key))
    self.commit(event)

  def overdue(self, now: float) -> list[int]:
    """Returns the workers that count as dead."""
    if self.stopped:
      return []
    if not self.state.seqs or self.setup.rules.late < math.inf:
      self.time = max(now, self.time)
      self.advance()  # those that wait may have waited long enough
    begun = {
      worker: [
        ticket.time
        for seq, ticket in self.dispatcher.open(worker).items()
        if (worker, seq) not in self.state.pushed
      ]
      for worker in self.dispatcher.workers
    }
    return self.watch.overdue(begun, self.peers, now)


class _Asking(NamedTuple):
  """The message of which the totals are being added up."""

  key: Key
  totals: list[float]  # so far
  operands: dict[int, Any]  # of the next one, by shard


class LeadTotals:
  """Sums over all shards that an algorithm needs before a message is received.

  The lead asks each follower for its operand, adds up, and asks for the next
  total until the message can be received; one message at a time.
  """

  def __init__(self, lead: Role, dispatcher: protocol.Dispatcher):
    self._lead, self._dispatcher = lead, dispatcher
    self._queue: list[Key] = []  # messages that all shards have
    self._asking: _Asking | None = None
    self._complete: dict[Key, tuple[float, ...]] = {}

  def add(self, key: Key) -> None:
    """Every shard has its part of a message."""
    if key not in self._queue:
      self._queue.append(key)
      self.propose()

  def propose(self) -> None:
    """Begins with the next message, unless one is under way."""
    pushed = self._lead.state.pushed
    if self._asking and self._asking.key not in pushed:
      self._asking = None  # its worker died
    self._queue = [key for key in self._queue if key in pushed]
    for worker, seq in self._queue:
      first = next(iter(self._dispatcher.open(worker)))
      if self._asking is None and seq == first:
        self._asking = _Asking((worker, seq), [], {})
        self._next_stage()
        return

  def _next_stage(self):
    """Goes as far as the totals so far allow."""
    key, totals, operands = self._asking
    state = self._lead.state
    out = state.stage(key, state.pushed[key].value, totals)
    if isinstance(out, sharding.Ask):
      operands[0] = out.operand
      for say in self._lead.followers.values():
        self.ask(say)
      return
    self._asking = None
    self._queue.remove(key)
    self._complete[key] = tuple(totals)
    self._dispatcher.arrive(*key)

  def ask(self, say: Say) -> None:
    """Asks a follower for its operand, if one is needed."""
    if self._asking:
      key, totals, _ = self._asking
      for frame in total_frames(key, totals):
        say(frame)
      say(Frame(frames.ASK, *key, version=len(totals)))

  def answer(self, frame: Frame) -> None:
    """Takes a follower's operand (ASKED)."""
    asking, key = self._asking, (frame.worker, frame.seq)
    if not asking or (asking.key, len(asking.totals)) != (key, frame.version):
      return
    own = np.asarray(asking.operands[0])
    asking.operands[frame.job] = own.dtype.type(frame.value)
    if len(asking.operands) == self._lead.setup.shards:
      operands = [operand for _, operand in sorted(asking.operands.items())]
      asking.totals.append(float(sharding.add_up(operands)))
      asking.operands.clear()
      self._next_stage()

  def take(self, key: Key) -> tuple[float, ...]:
    """Returns a message's totals, and forgets them."""
    return self._complete.pop(key, ())
