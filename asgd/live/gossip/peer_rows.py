"""What a live peer does, row by row: each is journaled, and then done. Its
successor continues after the last row.

The functions are those of `simulator.compile_peer`, called as the simulator
calls them when it obeys the same rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, gossip, simulator
from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame, Wire
from asgd.live.journal import FileJournal
from asgd.live.records import FileSink
from asgd.live.worker import is_finite
from asgd.orders.trace import NO_SEQ, PUTS, STARTS, Event
from asgd.simulator.steps import Observation


class PeerDuty(NamedTuple):
  """What a peer is and does, wherever it runs; the same for all of a run."""

  gossip: gossip.Gossip
  peer: gossip.Peer
  worker: base.Worker
  params: base.Params  # NumPy arrays, that all begin with
  batch: Callable[[int, int], base.Batch]
  root: jax.Array  # key
  wire: Wire
  keep_at: frozenset[int] = frozenset()  # rounds of which parameters are kept
  slowdown: tuple[float, ...] = ()  # factors on the time of peers 0, 1, ...

  @property
  def steps(self) -> simulator.PeerSteps:
    """The compiled functions, once for each process."""
    return simulator.compile_peer(self.peer, self.worker)

  @property
  def hears(self) -> list[set[int]]:
    """How many neighbours each peer hears in its rounds."""
    topology = self.gossip.topology
    rounds, peers = range(topology.period), range(topology.workers)
    if self.gossip.order == gossip.PAIRS:
      return [{1} for _ in peers]
    return [{len(topology.neighbours(i, k)) for k in rounds} for i in peers]

  def warm_up_all(self) -> None:
    """Compiles what all peers call, for those that share a process."""
    alike = {frozenset(counts): peer for peer, counts in enumerate(self.hears)}
    for peer in alike.values():
      self.warm_up(peer)

  def warm_up(self, index: int) -> None:
    """Compiles what a peer calls; what it computes is dropped."""
    steps = self.steps
    number, zero = np.int32(index), np.int32(0)
    state = self.peer.init(self.params)
    job = steps.send(state, number)
    _, message, metrics = steps.work(
      self.worker.init(self.params),
      *(job.ticket, self.batch(index, 0), self.root, zero),
    )
    jax.block_until_ready(steps.residual(state))
    state, _ = steps.receive(state, job, message, metrics.loss)
    keep = np.float64(self.gossip.keep(0, index))
    state, code = steps.put(state, keep, self.root, number, zero)
    code = self.wire.unpack(self.wire.pack(code))
    for count in self.hears[index]:
      weights, slots = np.zeros(count), np.zeros(count, np.int32)
      jax.block_until_ready(
        steps.mix(state, (code,) * count, weights, slots)
      )


class ComputedJob(NamedTuple):
  """What a peer made of a job."""

  state: Any  # of its worker, after it
  message: Any
  loss: Any
  finite: bool


class View(NamedTuple):
  """A peer, as it is evaluated; NumPy arrays."""

  params: base.Params
  weight: float  # by which it counts in the mean over peers
  version: int  # its own updates

  @property
  def server(self) -> "View":
    """Itself: the parameters of a `PeerState` are those of its server."""
    return self


class PeerJournal:
  """Writes rows and records of a peer, and counts its rows.

  Bytes and norms are those since the last record, of which they become part.
  """

  def __init__(
    self,
    index: int,
    journal: FileJournal,
    sink: FileSink,
    clock: Callable[[], float],
  ):
    """Continues after the rows that the journal has, those of earlier
    incarnations of the peer too. The clock tells seconds of the run."""
    self.index = index
    self._journal, self._sink, self._clock = journal, sink, clock
    self._time = 0.0  # of the last row
    self.seqs = 0  # jobs that were started
    self.puts = 0  # messages that were put
    self.life = 0  # incarnations that have left
    self.begun = 0  # jobs of this incarnation
    self.bytes_down, self.bytes_up = 0, 0
    self.norms: list[Any] = []  # of changes by mixing
    for event in journal.events():
      self._note(event)

  def _note(self, event):
    self._time = max(self._time, event.time)
    self.seqs += event.action in STARTS
    self.puts += event.action in PUTS
    self.life += event.action == base.LEAVE
    self.begun += event.action in STARTS
    if event.action == base.LEAVE:
      self.begun = 0

  def write(self, seq: int, job: int, action: int, **more: Any) -> Event:
    """Appends a row; returns it. No time is less than the one before."""
    time = max(self._clock(), self._time)
    event = Event(time, self.index, seq, job, action, **more)
    self._journal.append(event)
    self._note(event)
    return event

  def record(
    self, event: Event, observation: Observation, kept: float
  ) -> None:
    """Appends the record of a job that was received, `event`; `kept` is the
    norm of the residual of its codec."""
    row = simulator.ReceivedMessage(
      event.time, self.index, event.job, self.bytes_up, self.bytes_down, kept
    )
    self._sink.append(
      simulator.peer_records([row], [observation], [self.norms])
    )
    self.bytes_down, self.bytes_up, self.norms = 0, 0, []

  def image(self) -> dict[str, Any]:
    """Returns counts of rows and records, bytes and norms, as JSON."""
    return {
      "rows": len(self._journal.events()),
      "records": self._sink.count,
      "bytes": self.bytes_down,
      "bytes_up": self.bytes_up,
      "norms": list(map(float, simulator.fetch(self.norms))),
    }

  def restore(self, image: dict[str, Any]) -> None:
    """Takes bytes and norms from an image."""
    self.bytes_down, self.bytes_up = image["bytes"], image["bytes_up"]
    self.norms = [np.float32(x) for x in image["norms"]]


class PeerRows:
  """A peer's state, and the rows that change it."""

  def __init__(
    self,
    index: int,
    duty: PeerDuty,
    journal: FileJournal,
    sink: FileSink,
    clock: Callable[[], float],
  ):
    """Begins as all do, or where an image says (`restore`); the journal has
    what was done at the place before. The clock tells seconds of the run."""
    self.index, self.duty = index, duty
    self.journal = PeerJournal(index, journal, sink, clock)
    self._number, self._steps = np.int32(index), duty.steps
    self.state = duty.peer.init(duty.params)
    self.worker = duty.worker.init(self.state.server.params)
    self.job: tuple[int, int, gossip.Job] | None = None  # seq, number, ticket

  # Jobs.

  def send(self, number: int) -> None:
    """Starts a job of that number."""
    seq = self.journal.seqs
    self.journal.write(seq, number, base.SEND)
    ticket = self._steps.send(self.state, self._number)
    self.job = seq, number, ticket

  def work(self) -> ComputedJob:
    """Does the open job; changes nothing. For another thread, too."""
    assert self.job is not None
    _, number, job = self.job
    state, message, metrics = self._steps.work(
      self.worker,
      job.ticket,
      self.duty.batch(self.index, number),
      self.duty.root,
      np.int32(number),
    )
    fetched = simulator.fetch((message, metrics.loss))
    return ComputedJob(state, message, metrics.loss, is_finite(*fetched))

  def receive(self, work: ComputedJob) -> None:
    """Ends the open job with what was made of it."""
    assert self.job is not None
    seq, number, job = self.job
    loss = float(work.loss)
    event = self.journal.write(seq, number, base.RECEIVE, loss=loss)
    self.worker = work.state
    kept = 0.0
    if self.duty.gossip.compressed:
      kept = float(self._steps.residual(self.state))
    self.state, observation = self._steps.receive(
      self.state, job, work.message, work.loss
    )
    self.journal.record(event, observation, kept)
    self.job = None

  def reject(self) -> None:
    """Refuses what was made of the open job; the peer then leaves."""
    assert self.job is not None
    seq, number, _ = self.job
    self.journal.write(seq, number, base.REJECT)

  # What others are told, and tell.

  def _frame(self, kind, event, content):
    content = self.duty.wire.pack(content)
    size = self.duty.wire.measure(content)
    # Leaves of the place before are part of its number of lives.
    sender = self.index, self.journal.life
    return PeerFrame(kind, *sender, event.seq, event.job, content, size)

  def put(self, round: int, kind: str = frames.MESSAGE) -> PeerFrame:
    """Puts a message of a round; returns it as it is told."""
    seq = self.journal.puts
    event = self.journal.write(seq, round, base.PUT)
    keep = np.float64(self.duty.gossip.keep(round, self.index))
    self.state, code = self._steps.put(
      self.state, keep, self.duty.root, self._number, np.int32(seq)
    )
    frame = self._frame(kind, event, code)
    self.journal.bytes_up += frame.nbytes
    return frame

  def mix(self, round: int, heard: Sequence[PeerFrame]) -> None:
    """Takes messages and mixes them, in this order."""
    how, codes, weights, slots = self.duty.gossip, [], [], []
    for frame in heard:
      size = frame.nbytes
      self.journal.write(frame.seq, frame.sender, base.TAKE, message=size)
      codes.append(self.duty.wire.unpack(frame.content))
      weights.append(how.weight(frame.round, self.index, frame.sender))
      slots.append(how.topology.slot(self.index, frame.sender))
      self.journal.bytes_down += size
    self.journal.write(NO_SEQ, round, base.MIX)
    self.state, norm = self._steps.mix(
      self.state,
      tuple(codes),
      np.array(weights, np.float64),
      np.array(slots, np.int32),
    )
    self.journal.norms.append(norm)

  def join(self) -> None:
    """Takes the place of one that left."""
    self.journal.write(NO_SEQ, self.journal.life, base.JOIN)

  def lend(self, other: int) -> PeerFrame:
    """Returns what a newcomer is lent, or lends."""
    event = self.journal.write(self.journal.puts, other, base.LEND)
    topology = self.duty.gossip.topology
    hears = topology.union[self.index, other]  # or it knows nothing of it
    slot = np.int32(topology.slot(self.index, other) if hears else 0)
    self.state, loan = self._steps.lend(self.state, slot)
    loan = jax.device_get(loan)
    size = simulator.array_bytes(loan)
    self.journal.bytes_up += size
    life = self.journal.life
    return PeerFrame(frames.LOAN, self.index, life, event.seq, 0, loan, size)

  def adopt(self, loan: PeerFrame, *, first: bool) -> None:
    """Takes what another lends; `first` of a newcomer."""
    self.journal.write(loan.seq, loan.sender, base.ADOPT, message=loan.nbytes)
    slot = self.duty.gossip.topology.slot(self.index, loan.sender)
    self.journal.bytes_down += loan.nbytes
    self.state = self._steps.adopt(
      self.state, loan.content, np.int32(slot), np.bool_(first)
    )

  # What the driver asks for.

  def view(self) -> View:
    """Returns what is evaluated."""
    server = self.state.server
    weight = float(self.duty.peer.weight(self.state))
    return View(jax.device_get(server.params), weight, int(server.version))

  def image(self) -> tuple[Any, dict[str, Any]]:
    """Returns a tree of arrays and JSON, to go on from; no job is open."""
    return jax.device_get((self.state, self.worker)), self.journal.image()

  def restore(self, tree: Any, notes: dict[str, Any]) -> None:
    """Goes on from an image."""
    self.state, self.worker = jax.tree.map(jax.numpy.asarray, tree)
    self.journal.restore(notes)
