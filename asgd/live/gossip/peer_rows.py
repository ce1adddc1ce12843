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
from asgd.live.worker_files import WorkerJournal
from asgd.orders.trace import NO_SEQ, PUTS, STARTS


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


class PeerJournal(WorkerJournal):
  """Writes rows and records of a peer, and counts its rows."""

  def __init__(self, *args: Any):
    """See the base."""
    self.puts = 0  # messages that were put
    self.life = 0  # incarnations that have left
    self.begun = 0  # jobs of this incarnation
    super().__init__(*args)

  def _note(self, event):
    super()._note(event)
    self.puts += event.action in PUTS
    self.life += event.action == base.LEAVE
    self.begun += event.action in STARTS
    if event.action == base.LEAVE:
      self.begun = 0

  def record(self, row: simulator.PeerRow) -> None:
    """Appends the record of a job that was received."""
    self._sink.append(simulator.peer_records(*([each] for each in row)))


class PeerRows:
  """A peer's state, and the rows that change it."""

  def __init__(
    self,
    index: int,
    duty: PeerDuty,
    files: tuple[FileJournal, FileSink],
    clock: Callable[[], float],
  ):
    """Begins as all do, or where an image says (`restore`); the journal has
    what was done at the place before. The clock tells seconds of the run."""
    self.index, self.duty = index, duty
    self.journal = PeerJournal(index, files, clock)
    state = duty.peer.init(duty.params)
    start = state, duty.worker.init(state.server.params)
    self._peer = simulator.OnePeer(
      index, duty.gossip, duty.steps, duty.root, start
    )
    self.job: tuple[int, int, gossip.Job] | None = None  # seq, number, ticket

  # Jobs.

  def send(self, number: int) -> None:
    """Starts a job of that number."""
    seq = self.journal.seqs
    self.journal.write(seq, number, base.SEND)
    self.job = seq, number, self._peer.send()

  def work(self) -> ComputedJob:
    """Does the open job; changes nothing. For another thread, too."""
    assert self.job is not None
    _, number, job = self.job
    batch = self.duty.batch(self.index, number)
    done = self._peer.work(job, batch, number)
    return ComputedJob(*done, is_finite(*simulator.fetch(done[1:])))

  def receive(self, work: ComputedJob) -> None:
    """Ends the open job with what was made of it."""
    assert self.job is not None
    seq, number, job = self.job
    loss = float(work.loss)
    event = self.journal.write(seq, number, base.RECEIVE, loss=loss)
    self.journal.record(self._peer.receive(event, job, work[:-1]))
    self.job = None

  def reject(self) -> None:
    """Refuses what was made of the open job; the peer then leaves."""
    assert self.job is not None
    seq, number, _ = self.job
    self.journal.write(seq, number, base.REJECT)

  # What others are told, and tell.

  def _frame(self, kind, event, content):
    loan = kind == frames.LOAN
    measure = simulator.array_bytes if loan else self.duty.wire.measure
    size = measure(content)
    self._peer.bytes_up += size
    # Leaves of the place before are part of its number of lives.
    sender = self.index, self.journal.life
    round = 0 if loan else event.job
    return PeerFrame(kind, *sender, event.seq, round, content, size)

  def put(self, round: int, kind: str = frames.MESSAGE) -> PeerFrame:
    """Puts a message of a round; returns it as it is told."""
    event = self.journal.write(self.journal.puts, round, base.PUT)
    code = self._peer.put(round, event.seq)
    return self._frame(kind, event, self.duty.wire.pack(code))

  def mix(self, round: int, heard: Sequence[PeerFrame]) -> None:
    """Takes messages and mixes them, in this order."""
    taken = []
    for frame in heard:
      size, code = frame.nbytes, self.duty.wire.unpack(frame.content)
      self.journal.write(frame.seq, frame.sender, base.TAKE, message=size)
      taken.append(simulator.Taken(frame.sender, frame.round, code))
      self._peer.bytes_down += size
    self.journal.write(NO_SEQ, round, base.MIX)
    self._peer.mix(taken)

  def join(self) -> None:
    """Takes the place of one that left."""
    self.journal.write(NO_SEQ, self.journal.life, base.JOIN)

  def lend(self, other: int) -> PeerFrame:
    """Returns what a newcomer is lent, or lends."""
    event = self.journal.write(self.journal.puts, other, base.LEND)
    loan = jax.device_get(self._peer.lend(other))
    return self._frame(frames.LOAN, event, loan)

  def adopt(self, loan: PeerFrame, *, first: bool) -> None:
    """Takes what another lends; `first` of a newcomer."""
    self.journal.write(loan.seq, loan.sender, base.ADOPT, message=loan.nbytes)
    self._peer.bytes_down += loan.nbytes
    self._peer.adopt(loan.content, loan.sender, first=first)

  # What the driver asks for.

  def view(self) -> View:
    """Returns what is evaluated."""
    state = self._peer.state
    server, weight = state.server, float(self.duty.peer.weight(state))
    return View(jax.device_get(server.params), weight, int(server.version))

  def image(self) -> tuple[Any, dict[str, Any]]:
    """Returns a tree of arrays and JSON, to go on from; no job is open."""
    peer, (rows, records) = self._peer, self.journal.counts()
    notes = {
      "rows": rows,
      "records": records,
      "bytes": peer.bytes_down,
      "bytes_up": peer.bytes_up,
      "norms": list(map(float, simulator.fetch(peer.norms))),
    }
    return jax.device_get((peer.state, peer.worker)), notes

  def restore(self, tree: Any, notes: dict[str, Any]) -> None:
    """Goes on from an image."""
    peer = self._peer
    peer.begin(*jax.tree.map(jax.numpy.asarray, tree))
    peer.bytes_down, peer.bytes_up = notes["bytes"], notes["bytes_up"]
    peer.norms = [np.float32(x) for x in notes["norms"]]
