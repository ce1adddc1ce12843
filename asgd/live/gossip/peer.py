"""A live peer: its job, its neighbours, and the methods that the driver calls.

A peer is an object in a host (`asgd.live.hosts`). Every event is a call of one
of its methods, and the host makes one call at a time. Jobs, and calls of
neighbours, run in other threads (`Inside.run_later`), so a peer receives
messages while it computes. The subclasses `Rounds`, `Pairs` and `PeerArrivals`
decide the next step.
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
from asgd.live.hosts import HostExited, Inside
from asgd.live.hosts.base import PEER
from asgd.live.spans import Span

RETRY_SECONDS = 0.05  # from a failed connection to the retry of the call
# Results of `run`.
REJECTED = "rejected"
ALONE = "found no lender"


class PeerStatus(NamedTuple):
  """The status that a peer reports."""

  is_quiet: bool  # the peer has stopped at its limit, and waits for no message
  rounds: int  # ended by the peer; without rounds, jobs
  # Seconds since the start of its job, by the peer's clock; None: no job.
  busy_seconds: float | None


@dataclasses.dataclass
class Loans:
  """The loans that a peer must adopt before its next step.

  A newcomer adopts a loan of each lender. If the rule has newcomers lend, too
  (`rule.introduces`), each lender then adopts the newcomer's loan.
  """

  is_new: bool  # whether the peer is a newcomer without an adopted loan
  lenders: list[int]  # in the order of adoption
  frames: dict[int, PeerFrame]  # received loans, by lender


class LivePeer:
  """One incarnation of a peer: the base of `Rounds`, `Pairs`, `PeerArrivals`.

  The driver calls `run` and `ask`, neighbours call `deliver`. The peer's own
  threads report by `on_delivered` and `on_computed`. After each call the peer
  does all steps that it can (`_step`). An error ends the peer, and `run` raises
  it. If a neighbour's call led to the error, the neighbour only gets
  `HostExited`.
  """

  def __init__(
    self,
    inside: Inside,
    rows: PeerRows,
    *,
    faults: Script,
    span: Callable[[Span], None] | None = None,
  ):
    """Prepares a peer.

    Args:
      inside: the functions of the host.
      rows: the peer's state and journal.
      faults: the faults to inject.
      span: called with spans of time: fetch lasts until a job starts, push
        until the peer has received its message.
    """
    self.rows, self.index, self.spec = rows, rows.index, rows.spec
    self._inside, self._faults = inside, faults
    self._span = span or (lambda span: None)
    self.rounds = 0  # rounds or jobs that have ended
    self.limit = 0  # rounds or jobs after which the peer stops
    self._outboxes: dict[int, Outbox] = {}  # of the peers that are alive
    self._inbox = Inbox()
    self._loans = Loans(False, [], {})
    # A job is open from its SEND row to its RECEIVE or REJECT row.
    self._job_start: float | None = None  # time; None: no job is open
    self._result: ComputedJob | None = None  # of the open job, once computed
    self._span_end = inside.clock()  # time at which the last span ended
    self._end_result: Future[str] = Future()  # result of `run`

  @property
  def incarnations(self) -> dict[int, int]:
    """Peer -> incarnation, for the other live peers."""
    return {peer: outbox.incarnation for peer, outbox in self._outboxes.items()}

  # Remote calls, and reports of this peer's threads.

  def run(self) -> Future[str]:
    """Returns a Future, which is done when the peer ends.

    Its result is REJECTED after a message that was not finite, and ALONE if all
    lenders of a newcomer have exited. It raises the error that ended the peer.
    """
    return self._end_result

  def ask(self, name: str, *args: Any, **options: Any) -> Any:
    """Calls a method by name, for the driver. Raises `HostExited` if the peer
    has ended."""
    return self._handle(lambda: getattr(self, name)(*args, **options))

  def deliver(
    self, sender: int, incarnation: int, first: int, batch: Sequence[PeerFrame]
  ) -> int:
    """Receives frames of a peer.

    Args:
      sender: the peer.
      incarnation: the incarnation of the sender.
      first: number of the first frame.
      batch: the frames.

    Returns:
      The number of the next expected frame.

    Raises:
      HostExited: if this peer has ended.
    """

    def accept_new() -> int:
      for frame in self._inbox.take_new(sender, incarnation, first, batch):
        self._accept(frame)
      return self._inbox.expected(sender, incarnation)

    return self._handle(accept_new)

  def on_delivered(self, outbox: Outbox, call: Future[int]) -> None:
    """Handles the end of a call of `deliver`, which may have lost its
    connection."""

    def confirm_or_retry() -> None:
      outbox.has_open_call = False
      try:
        outbox.confirm(call.result())
      # The neighbour may be alive: only the driver knows. If the neighbour has
      # exited, the driver calls `peer_exited`, which ends the retries.
      except HostExited:
        self._flush(outbox, wait=RETRY_SECONDS)
      else:
        self._flush(outbox)

    self._handle(confirm_or_retry)

  def on_computed(self, result: Future[ComputedJob]) -> None:
    """Handles the end of a job's computation. An error of the computation ends
    the peer."""

    def store_result() -> None:
      self._result = result.result()

    self._handle(store_result)

  def _handle(self, call: Callable[[], Any]) -> Any:
    """Makes a call, then does all possible steps; an error ends the peer."""
    if self._end_result.done():
      raise HostExited(PEER, self.index)
    try:
      answer = call()
      self._advance()
    except Exception as error:
      error.add_note(f"in peer {self.index}")
      self._end_result.set_exception(error)
      # The caller may be a neighbour, which the error does not concern.
      raise HostExited(PEER, self.index) from error
    return answer

  def close(self) -> None:
    """Closes the peer's files."""
    self.rows.journal.close()

  # Methods that the driver calls by `ask`.

  def set_peers(self, others: Mapping[int, Neighbour]) -> None:
    """Sets the live peers, which all begin at the same round."""
    self._outboxes = {
      peer: self._make_outbox(other)
      for peer, other in others.items()
      if peer != self.index
    }

  def _make_outbox(self, other: Neighbour) -> Outbox:
    """Returns an outbox for another peer, with the delays of the network."""
    return Outbox(other._replace(host=self._inside.wrap_host(other.host)))

  def join(
    self, others: Mapping[int, Neighbour], rounds: int, lenders: Iterable[int]
  ) -> None:
    """Begins as a newcomer before round `rounds`, with loans of `lenders`."""
    self.set_peers(others)
    self.rounds = self.limit = rounds
    self.rows.join()
    self._loans.is_new, self._loans.lenders = True, list(lenders)

  def add_newcomer(self, peer: int, newcomer: Neighbour, lend: bool) -> None:
    """Adds a newcomer before a round.

    With `lend` this peer lends to the newcomer. If the rule makes newcomers
    lend, too, this peer adopts the newcomer's loan before its next step.
    """
    self._outboxes[peer] = self._make_outbox(newcomer)
    if lend:
      self._send(peer, self.rows.lend(peer))
      if self._newcomers_lend:
        self._loans.lenders.append(peer)

  @property
  def _newcomers_lend(self) -> bool:
    """Whether a newcomer lends to its lenders."""
    return self.spec.gossip.rule.introduces

  def peer_exited(self, peer: int) -> None:
    """Removes a peer that has exited."""
    self._outboxes.pop(peer, None)

  def set_limit(self, limit: int) -> None:
    """Sets the number of rounds or jobs after which the peer stops."""
    self.limit = limit

  def status(self) -> PeerStatus:
    """Returns the status of the peer."""
    busy_seconds = None
    # The time in which a computed job waits for neighbours does not count.
    if self._result is None and self._job_start is not None:
      busy_seconds = self._inside.clock() - self._job_start
    return PeerStatus(self.is_quiet, self.rounds, busy_seconds)

  @property
  def is_quiet(self) -> bool:
    """Whether the peer is idle, and stays so until its limit is raised."""
    return self._job_start is None and not self._loans.lenders

  def view(self) -> View:
    """Returns the peer's present parameters."""
    return self.rows.view()

  def image(self) -> Any:
    """Returns (tree of arrays, JSON) of a quiet peer."""
    tree, notes = self.rows.image()
    return {"peer": tree}, {**notes, "rounds": self.rounds}

  def restore(self, tree: Any, notes: dict[str, Any]) -> None:
    """Continues from an image."""
    self.rows.restore(tree["peer"], notes)
    self.rounds = notes["rounds"]

  # Frames.

  def _send(self, peer: int, frame: PeerFrame) -> None:
    """Sends a frame to a peer, if the peer is alive."""
    if outbox := self._outboxes.get(peer):
      outbox.put(frame)
      self._flush(outbox)

  def _flush(self, outbox: Outbox, wait: float = 0.0) -> None:
    """Sends the frames that a neighbour has not acknowledged, unless a call is
    open."""
    # The outbox of an incarnation that has exited is no longer in the dict.
    is_alive = any(outbox is other for other in self._outboxes.values())
    first, batch = outbox.batch()
    if outbox.has_open_call or not batch or not is_alive:
      return
    outbox.has_open_call = True
    sender = self.index, self.rows.journal.incarnation

    # Runs in another thread: it reads only the values captured above.
    def deliver() -> int:
      if wait:
        self._inside.wait(wait)
      return outbox.host.call("deliver", *sender, first, batch).result()

    self._inside.run_later(deliver, "on_delivered", outbox)

  def _accept(self, frame: PeerFrame) -> None:
    """Processes a frame, unless its sender's incarnation has exited."""
    if self.incarnations.get(frame.sender) != frame.incarnation:
      return
    if frame.kind == frames.LOAN:
      self._loans.frames[frame.sender] = frame
    else:
      self._receive_frame(frame)

  def _receive_frame(self, frame: PeerFrame) -> None:
    """Processes a frame other than a loan."""
    raise NotImplementedError

  def _step(self) -> bool:
    """Does one step if a step is possible. Returns whether it did."""
    raise NotImplementedError

  def _advance(self) -> None:
    """Does all steps that are possible, loans first."""
    if self._loans.lenders:
      self._adopt_loans()
    while not (self._loans.lenders or self._end_result.done()):
      if not self._step():
        return

  def _adopt_loans(self) -> None:
    """Adopts all loans, in the order of lenders, once the loans of all live
    lenders have arrived."""
    loans, incarnations = self._loans, self.incarnations
    # [1] Wait for all loans. A lender that has exited may have sent its loan
    # before.
    lenders = [
      peer
      for peer in loans.lenders
      if peer in incarnations or peer in loans.frames
    ]
    if any(peer not in loans.frames for peer in lenders):
      return
    if loans.is_new and not lenders:
      self._end_result.set_result(ALONE)
    # [2] Adopt the loans. A newcomer's first loan replaces its parameters.
    for index, peer in enumerate(lenders):
      is_first = loans.is_new and not index
      self.rows.adopt(loans.frames.pop(peer), is_first=is_first)
    # [3] A newcomer lends to its lenders, now that it has adopted parameters.
    if loans.is_new and self._newcomers_lend:
      for peer in lenders:
        self._send(peer, self.rows.lend(peer))
    loans.is_new, loans.lenders = False, []

  # Jobs.

  def _begin_job(self, number: int) -> None:
    """Begins job `number`, without computing it."""
    self.rows.send(number)
    self._job_start = self._inside.clock()

  def _compute_job(self) -> None:
    """Computes the open job in another thread; `on_computed` then stores the
    result."""
    assert self.rows.job is not None
    self._result = None
    seq, number, _ = self.rows.job
    faults, peer, inside = self._faults, self.index, self._inside

    def compute() -> ComputedJob:
      faults.apply_to_job(peer, seq)
      start = inside.clock()
      self._span(Span("fetch", self._span_end, start, seq, number))
      result = self.rows.work()
      message = faults.apply_to_message(peer, seq, result.message)
      if message is not result.message:  # a fault has put NaN into it
        result = result._replace(message=message, finite=False)
      factor = pace.factor_of(self.spec.slowdown, peer)
      pace.slow_down(factor, start, clock=inside.clock, wait=inside.wait)
      self._span_end = inside.clock()
      self._span(Span("compute", start, self._span_end, seq, number))
      return result

    inside.run_later(compute, "on_computed")

  def _end_job(self) -> bool:
    """Ends the open job. If the job's message is not finite, ends the peer and
    returns False."""
    assert self._result is not None and self.rows.job is not None
    result, self._result, self._job_start = self._result, None, None
    start, self._span_end = self._span_end, self._inside.clock()
    seq, number, _ = self.rows.job
    self._span(Span("push", start, self._span_end, seq, number))
    if not result.finite:
      self.rows.reject()
      self._end_result.set_result(REJECTED)
      return False
    self.rows.receive(result)
    return True
