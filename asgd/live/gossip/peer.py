"""A live peer: its job, its neighbours, and what the driver asks.

A peer is an object in a host (`asgd.live.hosts`). Whatever happens to it is a
call of one of its methods, and its host makes one call at a time. Jobs, and
calls of neighbours, run beside it (`Inside.later`), so that a peer takes
messages while it computes. `Rounds` and `Pairs` say what a peer does next.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from asgd.live import pace
from asgd.live.faults import Script
from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.outbox import Inbox, Neighbour, Outbox
from asgd.live.gossip.peer_rows import ComputedJob, PeerRows, View
from asgd.live.hosts import Gone, Inside
from asgd.live.hosts.base import PEER
from asgd.live.spans import Span

AGAIN = 0.05  # seconds until a call is made again whose connection broke
# How a peer ends by itself.
REJECTED = "rejected"
ALONE = "found no lender"


class PeerStatus(NamedTuple):
  """What a peer reports of itself."""

  quiet: bool  # it has stopped before its limit, and expects nothing
  rounds: int  # that it has ended; of pairs, jobs
  # Seconds since its job was started, by its own clock; None: it has no job.
  busy: float | None


@dataclasses.dataclass
class Loans:
  """What a peer adopts before it does anything else."""

  is_new: bool  # a newcomer, which has adopted nothing yet
  lenders: list[int]  # whose loans it adopts, in this order
  frames: dict[int, PeerFrame]  # loans that came, by lender


class LivePeer:
  """One incarnation of a peer; the base of `Rounds` and `Pairs`.

  Its host calls `run`, `ask`, `deliver`, and what a peer has asked for itself:
  `delivered` and `computed`. After each of them the peer does what it can
  (`_step`). What goes wrong ends the peer, and is raised by the call of `run`:
  a neighbour that delivers a frame has nothing to do with it.
  """

  def __init__(
    self,
    inside: Inside,
    rows: PeerRows,
    *,
    faults: Script,
    span: Callable[[Span], None] | None = None,
  ):
    """`inside` is of its host. `span` takes stretches of time: fetch lasts
    until a job starts, push until the peer has received its message."""
    self.rows, self.index, self.duty = rows, rows.index, rows.duty
    self._inside, self._faults = inside, faults
    self._span = span or (lambda span: None)
    self.rounds = 0  # ended
    self.limit = 0  # rounds or jobs that may be ended
    self._outboxes: dict[int, Outbox] = {}  # of the peers that are alive
    self._inbox = Inbox()
    self._loans = Loans(False, [], {})
    self._work: ComputedJob | None = None  # of the open job, once it is done
    self._began: float | None = None  # the open job
    self._free = inside.clock()  # since when it has waited
    self._ended: Future[str] = Future()  # how it ended

  @property
  def lives(self) -> dict[int, int]:
    """Incarnations before the present one, of the other peers alive."""
    return {peer: outbox.life for peer, outbox in self._outboxes.items()}

  # What the host calls.

  def run(self) -> Future[str]:
    """Returns how the peer ends: REJECTED after a message that was not finite,
    ALONE if all have exited who were to lend to a newcomer; or raises what went
    wrong in it."""
    return self._ended

  def ask(self, name: str, *args: Any, **options: Any) -> Any:
    """Calls one of the methods below. Raises Gone once the peer has ended."""
    return self._happens(lambda: getattr(self, name)(*args, **options))

  def deliver(
    self, sender: int, life: int, first: int, batch: Sequence[PeerFrame]
  ) -> int:
    """Takes frames of an incarnation of another peer, which numbers them from
    `first`; returns the number of the next. Raises Gone."""

    def take():
      for frame in self._inbox.new(sender, life, first, batch):
        self._hear(frame)
      return self._inbox.confirmed(sender, life)

    return self._happens(take)

  def delivered(self, outbox: Outbox, call: Future[int]) -> None:
    """A call of a neighbour has ended, which may have lost its connection."""

    def take():
      outbox.busy = False
      try:
        outbox.confirm(call.result())
      except Gone:  # the driver says so if the neighbour has exited
        self._flush(outbox, wait=AGAIN)
      else:
        self._flush(outbox)

    self._happens(take)

  def computed(self, work: Future[ComputedJob]) -> None:
    """The open job is done, or raises what went wrong."""

    def take():
      self._work = work.result()

    self._happens(take)

  def _happens(self, call):
    if self._ended.done():
      raise Gone(PEER, self.index)
    try:
      answer = call()
      self._advance()
    except Exception as error:
      error.add_note(f"in peer {self.index}")
      self._ended.set_exception(error)
      raise Gone(PEER, self.index) from error
    return answer

  # What the driver asks for.

  def meet(self, others: Mapping[int, Neighbour]) -> None:
    """Takes note of the peers that are alive, which all are before the same
    round."""
    self._outboxes = {peer: self._open(other) for peer, other in others.items()}
    self._outboxes.pop(self.index, None)

  def _open(self, other):
    return Outbox(other._replace(host=self._inside.link(other.host)))

  def join(
    self, others: Mapping[int, Neighbour], rounds: int, lenders: Iterable[int]
  ) -> None:
    """Begins as a newcomer before a round, with what neighbours lend."""
    self.meet(others)
    self.rounds = self.limit = rounds
    self.rows.join()
    self._loans.is_new, self._loans.lenders = True, list(lenders)

  def present(self, peer: int, newcomer: Neighbour, lend: bool) -> None:
    """Takes note of a newcomer before a round, and lends it something; what
    it lends in turn is adopted before anything else."""
    self._outboxes[peer] = self._open(newcomer)
    if lend:
      self._tell(peer, self.rows.lend(peer))
      if self._introduces:
        self._loans.lenders.append(peer)

  @property
  def _introduces(self):
    return self.duty.gossip.rule.introduces

  def gone(self, peer: int) -> None:
    """Takes note that a peer has exited."""
    self._outboxes.pop(peer, None)

  def allow(self, limit: int) -> None:
    """Sets how many rounds or jobs the peer may end."""
    self.limit = limit

  def status(self) -> PeerStatus:
    """Returns what it is doing."""
    busy = None
    if self._work is None and self._began is not None:
      busy = self._inside.clock() - self._began
    return PeerStatus(self.quiet, self.rounds, busy)

  @property
  def quiet(self) -> bool:
    """Whether nothing happens to it until its limit is raised."""
    return self._began is None and not self._loans.lenders

  def view(self) -> View:
    """Returns its parameters, as they are."""
    return self.rows.view()

  def image(self) -> Any:
    """Returns a tree of arrays and JSON, of a peer that is quiet."""
    tree, notes = self.rows.image()
    return {"peer": tree}, {**notes, "rounds": self.rounds}

  def restore(self, tree: Any, notes: dict[str, Any]) -> None:
    """Continues from an image."""
    self.rows.restore(tree["peer"], notes)
    self.rounds = notes["rounds"]

  # Frames.

  def _tell(self, peer: int, frame: PeerFrame) -> None:
    """Sends a frame to a peer, if that is alive."""
    if outbox := self._outboxes.get(peer):
      outbox.put(frame)
      self._flush(outbox)

  def _flush(self, outbox: Outbox, wait: float = 0.0) -> None:
    """Sends what a neighbour has not confirmed, unless a call is open."""
    alive = any(outbox is each for each in self._outboxes.values())
    first, batch = outbox.batch()
    if outbox.busy or not batch or not alive:
      return
    outbox.busy = True
    index, life = self.index, self.rows.journal.life

    def send():
      if wait:
        self._inside.wait(wait)
      call = outbox.host.call("deliver", index, life, first, batch)
      return call.result()

    self._inside.later(send, "delivered", outbox)

  def _hear(self, frame):
    if self.lives.get(frame.sender) != frame.life:  # it has exited
      return
    if frame.kind == frames.LOAN:
      self._loans.frames[frame.sender] = frame
    else:
      self._heard(frame)

  def _heard(self, frame: PeerFrame) -> None:
    raise NotImplementedError

  def _step(self) -> bool:
    """Does what can be done; returns whether it did something."""
    raise NotImplementedError

  def _advance(self):
    if self._loans.lenders:
      self._adopt()
    while not (self._loans.lenders or self._ended.done()):
      if not self._step():
        return

  def _adopt(self):
    """Adopts once all lenders that live have lent, in their order."""
    loans, lives = self._loans, self.lives
    lenders = [j for j in loans.lenders if j in lives or j in loans.frames]
    if any(j not in loans.frames for j in lenders):
      return
    if loans.is_new and not lenders:
      self._ended.set_result(ALONE)
    for k, j in enumerate(lenders):
      first = loans.is_new and not k
      self.rows.adopt(loans.frames.pop(j), first=first)
    if loans.is_new and self._introduces:
      for j in lenders:
        self._tell(j, self.rows.lend(j))
    loans.is_new, loans.lenders = False, []

  # Jobs.

  def _begin(self, number: int) -> None:
    """Starts a job; `_work` is its result."""
    self.rows.send(number)
    self._began = self._inside.clock()

  def _compute(self) -> None:
    """Computes the open job, in another thread."""
    assert self.rows.job is not None
    self._work = None
    seq, number, _ = self.rows.job
    faults, peer, inside = self._faults, self.index, self._inside

    def compute():
      faults.before_work(peer, seq)
      began = inside.clock()
      self._span(Span("fetch", self._free, began, seq, number))
      work = self.rows.work()
      message = faults.message(peer, seq, work.message)
      if message is not work.message:
        work = work._replace(message=message, finite=False)
      factor = pace.factor_of(self.duty.slowdown, peer)
      pace.slow_down(factor, began, clock=inside.clock, wait=inside.wait)
      self._free = inside.clock()
      self._span(Span("compute", began, self._free, seq, number))
      return work

    inside.later(compute, "computed")

  def _receive(self) -> bool:
    """Ends the open job; False, and the peer ends, if it is not finite."""
    assert self._work is not None and self.rows.job is not None
    work, self._work, self._began = self._work, None, None
    began, self._free = self._free, self._inside.clock()
    seq, number, _ = self.rows.job
    self._span(Span("push", began, self._free, seq, number))
    if not work.finite:
      self.rows.reject()
      self._ended.set_result(REJECTED)
      return False
    self.rows.receive(work)
    return True
