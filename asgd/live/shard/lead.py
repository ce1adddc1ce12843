"""The lead (shard 0): decides which worker starts and which message is
received.

`protocol.Dispatcher` makes the decisions, in simulations too; it reports each
of them to `Lead._commit_decision`.
"""

import collections
import math
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from asgd import base, sharding
from asgd.live import frames
from asgd.live.deadlines import WorkerWatch
from asgd.live.frames import Frame
from asgd.live.shard.role import Role, SendFrame, row_frames, total_frames
from asgd.live.shard.state import Key
from asgd.orders import protocol
from asgd.orders.trace import ENDS, Event


class Lead(Role):
  """Passes the frames of workers to the dispatcher, and commits its
  decisions."""

  decides = True

  def __init__(self, *args: Any) -> None:
    super().__init__(*args)
    setup = self.setup
    self.dispatcher = protocol.Dispatcher(
      setup.rules, jobs=setup.jobs, owned=setup.owned, log=self._commit_decision
    )
    self.watch = WorkerWatch(setup.ladder, self.time)
    self._totals = LeadTotals(self, self.dispatcher) if setup.totals else None
    # Numbers of messages with NaN or infinity: consecutive ones, and by job.
    self._consecutive_refusals = 0
    self._job_refusals = collections.Counter[int]()
    # In a consistent run: message -> followers that have their part of it.
    self._prepared: dict[Key, set[int]] = {}

  @property
  def n_refused(self) -> int:
    """Number of messages with NaN or infinity: consecutive ones, or all of one
    job, whichever is larger."""
    return max(self._consecutive_refusals, *self._job_refusals.values(), 0)

  @property
  def late_workers(self) -> Collection[int]:
    """The workers that count as late, but not yet as dead; see `deadlines`."""
    return self.watch.late_workers

  @property
  def finished(self) -> bool:
    """Whether all jobs are received."""
    return self.dispatcher.finished

  def replay(self, events: list[Event]) -> None:
    """Restores the dispatcher's jobs and tickets."""
    self.dispatcher.replay(events)

  def learn_durations(self, events: Iterable[Event]) -> None:
    """See the base; the watch derives the workers' deadlines from `events`."""
    self.watch.add_journal(events)

  def is_outdated(self, worker: int, incarnation: int) -> bool:
    """Returns True: the lead ends the tickets of an incarnation before the next
    one joins, so an earlier incarnation has no ticket."""
    return True

  def join(self, worker: int, incarnation: int) -> None:
    """Registers a new incarnation of a worker and numbers it."""
    self.mark_alive(worker)
    self.incarnations[worker] = self.dispatcher.join(worker, self.time)

  def leave(self, worker: int) -> None:
    """Ends the tickets of a worker; other workers get its jobs."""
    super().leave(worker)
    self.dispatcher.leave(worker, self.time)

  def mark_alive(self, worker: int) -> None:
    """Stores the present time as the worker's last sign of life."""
    self.watch.last_alive[worker] = self.time

  def pause(self, worker: int) -> None:
    """Makes a worker start no further job."""
    self.dispatcher.pause(worker)

  def pause_all(self) -> None:
    """Makes all workers start no further job."""
    for worker in self.dispatcher.workers:
      self.pause(worker)

  def push(self, frame: Frame) -> None:
    """Handles a PUSH: the message of an open ticket lies in its slot."""
    key = frame.worker, frame.seq
    # The SEND or KEEP of the job.
    start_event = self.dispatcher.open(frame.worker)[frame.seq]
    if not frame.flag:
      self._refuse(key)
      return
    self._consecutive_refusals = 0
    self._job_refusals.pop(start_event.job, None)
    self.state.pushes[key] = frame
    self.watch.add_job(start_event.time, self.time)
    self._report_arrival(key)

  def _refuse(self, key: Key) -> None:
    """Drops a message and expels its worker: the worker's state may have NaN,
    too. The worker then joins as a new incarnation."""
    worker, seq = key
    self._consecutive_refusals += 1
    self._job_refusals[self.dispatcher.open(worker)[seq].job] += 1
    self.dispatcher.reject(*key, self.time)
    self.expel(worker)

  def handle_shard_frame(self, frame: Frame, send: SendFrame) -> None:
    """Handles a frame of a follower; ignores frames of earlier connections."""
    key = frame.worker, frame.seq
    if frame.kind == frames.FOLLOW:
      self.followers[frame.worker] = send
      # The follower has the rows before `version`; it lacks the others.
      events = self.journal.events()
      for row in range(frame.version, len(events)):
        for row_frame in row_frames(row, events[row]):
          send(row_frame)
      if self._totals:  # the follower may have lost the open ASK
        self._totals.ask(send)
    elif self.followers.get(frame.job) != send or key not in self.state.tickets:
      return  # from a replaced connection, or about a ticket that has ended
    elif frame.kind == frames.PREPARED and frame.flag:
      self._refuse(key)
    elif frame.kind == frames.PREPARED:
      self._prepared.setdefault(key, set()).add(frame.job)
      self._report_arrival(key)
    elif self._totals:
      self._totals.add_operand(frame)

  def _report_arrival(self, key: Key) -> None:
    """Reports a message to the dispatcher once every shard has its part."""
    # Independent shards acknowledge their parts to the worker, which then sends
    # the PUSH to the lead.
    followers = self.setup.shards - 1 if self.setup.consistent else 0
    is_prepared = len(self._prepared.get(key, ())) >= followers
    if not is_prepared or key not in self.state.pushes:
      return
    if self._totals:
      self._totals.add(key)
    else:
      self.dispatcher.arrive(*key, self.time)

  def advance(self) -> None:
    """Receives the messages that have arrived, and starts the jobs that the
    rules allow."""
    if self.stopped:
      return
    # After each message, the sum of its worker's next message may start.
    while self.dispatcher.deliver(self.time) and self._totals:
      self._totals.start_next_sum()
    if self._totals:
      self._totals.start_next_sum()
    if not self._waits_for_others():
      self.dispatcher.grants(self.time)
    if self.dispatcher.finished:
      self.stopped = True
      for worker in self.connections:
        self.send(worker, Frame(frames.STOP, worker))

  def _waits_for_others(self) -> bool:
    """Whether the first job must wait: workers are still missing, and
    `ladder.start` seconds have not passed."""
    setup = self.setup
    return (
      not self.state.started_jobs
      and len(self.dispatcher.workers) < setup.first_job_workers
      and self.time - self.watch.started_at < setup.ladder.start
    )

  def _commit_decision(self, event: Event) -> None:
    """Commits a decision of the dispatcher, with its slot, loss and totals."""
    state, key = self.state, event.key
    if event.action in ENDS:
      totals = self._totals.pop(key) if self._totals else ()
      self._prepared.pop(key, None)
      if event.action == base.RECEIVE:
        slot, loss = state.tickets[key].message_slot, state.pushes[key].value
        event = event._replace(message=slot, loss=loss, totals=totals)
      else:
        event = event._replace(message=state.lost_slot(key))
    self.commit(event)

  def find_dead(self, now: float) -> list[int]:
    """Returns the workers that count as dead."""
    if self.stopped:
      return []
    if not self.state.started_jobs or self.setup.rules.late < math.inf:
      self.time = max(now, self.time)
      self.advance()  # a timeout of the rules may allow new jobs
    # A message that waits for other shards does not make its worker late.
    start_times = {
      worker: [
        start.time
        for seq, start in self.dispatcher.open(worker).items()
        if (worker, seq) not in self.state.pushes
      ]
      for worker in self.dispatcher.workers
    }
    return self.watch.find_dead(start_times, self.connections, now)


class _PendingSum(NamedTuple):
  """A message, and the sums of its totals so far."""

  key: Key
  totals: list[float]  # the complete totals
  operands: dict[int, Any]  # shard -> its operand of the next total


class LeadTotals:
  """Sums over all shards that an algorithm needs before a message is received.

  The lead asks each follower for its operand, adds up the operands, and asks
  for the next total until the message can be received. It asks about one
  message at a time.
  """

  def __init__(self, lead: Role, dispatcher: protocol.Dispatcher):
    self._lead, self._dispatcher = lead, dispatcher
    self._queue: list[Key] = []  # messages with parts at all shards
    self._pending: _PendingSum | None = None
    # Message that can be received -> its totals, until its row is written.
    self._complete: dict[Key, tuple[float, ...]] = {}

  def add(self, key: Key) -> None:
    """Queues a message of which every shard has its part."""
    if key not in self._queue:
      self._queue.append(key)
      self.start_next_sum()

  def start_next_sum(self) -> None:
    """Starts the sums of the next message, unless a sum is under way."""
    pushes = self._lead.state.pushes
    if self._pending and self._pending.key not in pushes:
      self._pending = None  # the worker and its tickets were lost
    self._queue = [key for key in self._queue if key in pushes]
    if self._pending:
      return
    for worker, seq in self._queue:
      # Messages of one worker are received in the order of its jobs.
      first_seq = next(iter(self._dispatcher.open(worker)))
      if seq == first_seq:
        self._pending = _PendingSum((worker, seq), [], {})
        self._continue_sum(self._pending)
        return

  def _continue_sum(self, pending: _PendingSum) -> None:
    """Asks for the operands of the next total, or reports the message as
    arrived if it needs no further total."""
    key, totals, operands = pending
    state = self._lead.state
    stage = state.stage(key, state.pushes[key].value, totals)
    if isinstance(stage, sharding.Ask):
      operands[0] = stage.operand
      for send in self._lead.followers.values():
        self.ask(send)
      return
    self._pending = None
    self._queue.remove(key)
    self._complete[key] = tuple(totals)
    self._dispatcher.arrive(*key)

  def ask(self, send: SendFrame) -> None:
    """Asks a follower for its operand if a sum is under way."""
    if self._pending:
      key, totals, _ = self._pending
      # The follower may have lost the earlier totals in a kill: send them.
      for frame in total_frames(key, totals):
        send(frame)
      send(Frame(frames.ASK, *key, version=len(totals)))

  def add_operand(self, frame: Frame) -> None:
    """Adds a follower's operand (ASKED) to the sum."""
    pending, key = self._pending, (frame.worker, frame.seq)
    if not pending:
      return
    if (pending.key, len(pending.totals)) != (key, frame.version):
      return  # the second answer to a repeated ASK
    # A frame carries a double; the sum is computed in the operands' dtype.
    dtype = np.asarray(pending.operands[0]).dtype
    pending.operands[frame.job] = dtype.type(frame.value)
    if len(pending.operands) == self._lead.setup.shards:
      # In the order of shards: a sum of floats depends on the order.
      operands = [operand for _, operand in sorted(pending.operands.items())]
      pending.totals.append(float(sharding.add_up(operands)))
      pending.operands.clear()
      self._continue_sum(pending)

  def pop(self, key: Key) -> tuple[float, ...]:
    """Removes the totals of a message and returns them."""
    return self._complete.pop(key, ())
