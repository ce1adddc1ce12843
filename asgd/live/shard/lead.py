"""The lead (shard 0): decides which worker starts and what is received."""

from collections.abc import Iterator

from asgd import base
from asgd.live import frames
from asgd.live.deadlines import WorkerWatch
from asgd.live.frames import Frame
from asgd.live.shard.core import Core, Role, Say, row_frames
from asgd.live.shard.state import Key
from asgd.live.shard.totals import LeadTotals
from asgd.orders import protocol
from asgd.orders.trace import ENDS


class Lead(Role):
  """Drives the dispatcher with what workers say; its rows become those
  of the journal."""

  decides = True

  def __init__(self, core: Core):
    super().__init__(core)
    setup = core.setup
    self.dispatcher = protocol.Dispatcher(
      setup.rules, jobs=setup.jobs, owned=setup.owned, log=self._decided
    )
    self.watch = WorkerWatch(setup.ladder, core.time)
    self._totals = LeadTotals(core, self.dispatcher) if setup.totals else None
    # Of a consistent run: followers that have their part of a message.
    self._prepared: dict[Key, set[int]] = {}

  def outdated(self, worker: int, number: int) -> bool:
    """A holder with a number is the present one, or its tickets died."""
    return True

  def join(self, worker: int, number: int) -> None:
    """A new holder takes a place."""
    core = self._core
    self.heard(worker)
    core.holders[worker] = self.dispatcher.join(worker, core.time)

  def leave(self, worker: int) -> None:
    """The holder of a place is gone: its jobs go to others."""
    super().leave(worker)
    self.dispatcher.leave(worker, self._core.time)

  def heard(self, worker: int) -> None:
    """The worker gave a sign of life."""
    self.watch.heard[worker] = self._core.time

  def pause(self, worker: int) -> None:
    """Starts nothing new at a worker."""
    self.dispatcher.pause(worker)

  def push(self, frame: Frame) -> None:
    """The message of an open ticket has come."""
    core, key = self._core, (frame.worker, frame.seq)
    if not frame.flag:
      self.refused += 1
      self.dispatcher.reject(*key, core.time)
      core.expel(frame.worker)
      return
    self.refused = 0
    core.state.pushed[key] = frame
    began = self.dispatcher.open(frame.worker)[frame.seq].time
    self.watch.ended(began, core.time)
    self._consider(key)

  def hear(self, frame: Frame, say: Say) -> None:
    """Takes a frame of a follower."""
    core, key = self._core, (frame.worker, frame.seq)
    if frame.kind == frames.PREPARED:
      self._prepared.setdefault(key, set()).add(frame.job)
      self._consider(key)
    elif frame.kind == frames.ASKED and self._totals:
      self._totals.answer(frame)
    elif frame.kind == frames.FOLLOW:
      core.followers[frame.worker] = say
      events = core.journal.events()
      for row in range(frame.version, len(events)):
        for row_frame in row_frames(row, events[row]):
          say(row_frame)
      if self._totals:
        self._totals.ask(say)

  def _consider(self, key):
    """Lets a message count as arrived when every shard has its part of it."""
    setup = self._core.setup
    if key not in self._core.state.pushed:
      return
    others = setup.shards - 1 if setup.consistent else 0
    if len(self._prepared.get(key, ())) < others:
      return
    if self._totals:
      self._totals.add(key)
    else:
      self.dispatcher.arrive(*key)

  def advance(self) -> None:
    """Receives what has arrived, and starts what may start."""
    if self.stopped:
      return
    core, dispatcher = self._core, self.dispatcher
    while dispatcher.deliver(core.time) and self._totals:
      self._totals.propose()
    if self._totals:
      self._totals.propose()
    if not self._waits_for_others():
      dispatcher.grants(core.time)
    if dispatcher.finished:
      self.stopped = True
      for worker, say in list(core.peers.items()):
        say(Frame(frames.STOP, worker))

  def _waits_for_others(self):
    """Whether the run has not begun because workers are still to come; not
    longer than the ladder gives them."""
    core, setup = self._core, self._core.setup
    return (
      setup.together
      and not core.state.seqs
      and len(self.dispatcher.workers) < setup.workers
      and core.time - self.watch.awake < setup.ladder.start
    )

  def _decided(self, event):
    """The dispatcher's log: commits what it has decided."""
    state, key = self._core.state, event.key
    if event.action in ENDS:
      totals = self._totals.take(key) if self._totals else ()
      self._prepared.pop(key, None)
      if event.action == base.RECEIVE:
        event = event._replace(
          message=state.tickets[key].message,
          loss=state.pushed[key].value,
          totals=totals,
        )
      else:
        event = event._replace(message=state.dead_slot(key))
    self._core.commit(event)

  def overdue(self, now: float) -> Iterator[int]:
    """Yields the workers that are to be taken for dead."""
    core = self._core
    if self.stopped:
      return
    if not core.state.seqs:
      core.set_time(now)
      self.advance()  # those that wait for others may have waited long enough

    def begun(worker):
      return [
        ticket.time
        for seq, ticket in self.dispatcher.open(worker).items()
        if (worker, seq) not in core.state.pushed
      ]

    yield from self.watch.overdue(
      self.dispatcher.workers, begun, core.peers, now
    )
