"""The steps of a live peer: each is written to the journal, then applied. A new
incarnation continues after the last row.

The functions are those of `simulator.compile_peer`, called in the same way as
the simulator does when it replays the rows.
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
from asgd.orders.trace import NO_SEQ, PUTS, STARTS, Event


class PeerSpec(NamedTuple):
  """The specification of the peers of a run; the same in each process."""

  gossip: gossip.Gossip
  peer: gossip.Peer
  worker: base.Worker
  params: base.Params  # first parameters of all peers, NumPy arrays
  batch: Callable[[int, int], base.Batch]  # (peer, job number) -> its batch
  root: jax.Array  # key of the run, not consumed
  wire: Wire
  # Numbers of ended rounds after which a peer stores parameters for evaluation.
  keep_at: frozenset[int] = frozenset()
  slowdown: tuple[float, ...] = ()  # factors on the time of peers 0, 1, ...
  devices: simulator.WorkerDevices = simulator.ALONE  # of each peer

  @property
  def steps(self) -> simulator.PeerSteps:
    """The compiled functions; compiled once in each process."""
    return simulator.compile_peer(self.peer, self.worker, self.devices)

  @property
  def neighbour_counts(self) -> list[set[int]]:
    """The numbers of messages that each peer mixes at once."""
    topology = self.gossip.topology
    rounds, peers = range(topology.period), range(topology.workers)
    if self.gossip.order == gossip.PAIRS:
      return [{1} for _ in peers]
    if self.gossip.order == gossip.ARRIVALS:  # its own message, or another one
      return [{0, 1} for _ in peers]
    return [{len(topology.neighbours(i, k)) for k in rounds} for i in peers]

  def warm_up_all(self) -> None:
    """Compiles the functions of all peers, for peers that share a process."""
    # Programs depend on the numbers of senders and on the sizes of batches, so
    # peers with equal ones share all programs.
    peers: dict[Any, int] = {}
    for peer, counts in enumerate(self.neighbour_counts):
      sizes = (np.shape(leaf) for leaf in jax.tree.leaves(self.batch(peer, 0)))
      peers[frozenset(counts), *sizes] = peer
    for peer in peers.values():
      self.warm_up(peer)

  def warm_up(self, index: int) -> None:
    """Compiles the functions of a peer by calling them; drops the results."""
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
    # `mix` gets codes as the wire delivers them: NumPy arrays or JAX arrays.
    code = self.wire.unpack(self.wire.pack(code))
    for count in self.neighbour_counts[index]:
      weights, slots = np.zeros(count), np.zeros(count, np.int32)
      jax.block_until_ready(
        steps.mix(state, (code,) * count, weights, slots)
      )


class ComputedJob(NamedTuple):
  """The result of a job's computation."""

  state: Any  # of the worker, after the job
  message: Any
  loss: Any
  finite: bool  # whether message and loss are finite


class View(NamedTuple):
  """A peer's parameters for evaluation; NumPy arrays."""

  params: base.Params
  weight: float  # of the peer in the mean over peers
  version: int  # number of the peer's own updates

  @property
  def server(self) -> "View":
    """The view itself, so that it can be used like a `PeerState`."""
    return self


class PeerJournal(WorkerJournal):
  """Writes rows and records of a peer, and counts its rows."""

  def __init__(self, *args: Any):
    """Takes the arguments of `WorkerJournal`."""
    self.puts = 0  # messages that were put, over all incarnations
    self.incarnation = 0  # the present one: count of LEAVE rows
    self.begun = 0  # jobs of this incarnation
    super().__init__(*args)

  def _count_row(self, event: Event) -> None:
    """Counts a row, which was read from the file or written."""
    super()._count_row(event)
    self.puts += event.action in PUTS
    self.begun += event.action in STARTS
    # The rows that follow LEAVE are those of the next incarnation.
    if event.action == base.LEAVE:
      self.incarnation += 1
      self.begun = 0

  def record(self, row: simulator.PeerRow) -> None:
    """Appends the record of a received job."""
    message, observation, norms = row
    self._sink.append(simulator.peer_records([message], [observation], [norms]))


class PeerRows:
  """A peer's state, and the steps that change it."""

  def __init__(
    self,
    index: int,
    spec: PeerSpec,
    files: tuple[FileJournal, FileSink],
    clock: Callable[[], float],
  ):
    """Starts from the first parameters; `restore` then continues from an image.

    Args:
      index: the index of the peer.
      spec: the peer's specification.
      files: (journal, records), with the rows of earlier incarnations.
      clock: returns the run's time in seconds.
    """
    self.index, self.spec = index, spec
    self.journal = PeerJournal(index, files, clock)
    state = spec.peer.init(spec.params)
    first_states = state, spec.worker.init(state.server.params)
    self._peer = simulator.OnePeer(
      index, spec.gossip, spec.steps, spec.root, first_states
    )
    # (seq, number, job) of the open job.
    self.job: tuple[int, int, gossip.Job] | None = None

  # Jobs. Each method writes its row before it changes the state: after a kill
  # the journal has every step that another peer may have seen.

  def send(self, number: int) -> None:
    """Starts job `number`."""
    seq = self.journal.started_jobs
    self.journal.write(seq, number, base.SEND)
    self.job = seq, number, self._peer.send()

  def work(self) -> ComputedJob:
    """Computes the open job, without changing the state; may be called in
    another thread."""
    assert self.job is not None
    _, number, job = self.job
    batch = self.spec.batch(self.index, number)
    state, message, loss = self._peer.work(job, batch, number)
    finite = is_finite(*simulator.fetch((message, loss)))
    return ComputedJob(state, message, loss, finite)

  def receive(self, result: ComputedJob) -> None:
    """Ends the open job with its result."""
    assert self.job is not None
    seq, number, job = self.job
    loss = float(result.loss)
    event = self.journal.write(seq, number, base.RECEIVE, loss=loss)
    outcome = result.state, result.message, result.loss
    self.journal.record(self._peer.receive(event, job, outcome))
    self.job = None

  def reject(self) -> None:
    """Rejects the result of the open job; the peer then exits."""
    assert self.job is not None
    seq, number, _ = self.job
    self.journal.write(seq, number, base.REJECT)

  # Messages and loans.

  def _frame(self, kind: str, event: Event, content: Any) -> PeerFrame:
    """Returns a frame with the content of a row, and counts its bytes."""
    is_loan = kind == frames.LOAN
    # A loan is a tree of arrays; a code has the form that the wire gave it.
    measure = simulator.array_bytes if is_loan else self.spec.wire.measure
    size = measure(content)
    self._peer.bytes_up += size  # once, however many peers receive it

    sender = self.index, self.journal.incarnation
    round = 0 if is_loan else event.job
    return PeerFrame(kind, *sender, event.seq, round, content, size)

  def put(self, round: int, kind: str = frames.MESSAGE) -> PeerFrame:
    """Puts a message of a round; returns its frame."""
    event = self.journal.write(self.journal.puts, round, base.PUT)
    code = self._peer.put(round, event.seq)
    return self._frame(kind, event, self.spec.wire.pack(code))

  def mix(self, round: int, messages: Sequence[PeerFrame]) -> None:
    """Takes messages and mixes them, in the given order."""
    taken_messages = []
    for frame in messages:
      code = self.spec.wire.unpack(frame.content)
      self.journal.write(
        frame.seq, frame.sender, base.TAKE, message=frame.nbytes
      )
      taken_messages.append(simulator.Taken(frame.sender, frame.round, code))
      self._peer.bytes_down += frame.nbytes
    self.journal.write(NO_SEQ, round, base.MIX)
    self._peer.mix(taken_messages)

  def join(self) -> None:
    """Writes the JOIN row of a new incarnation."""
    self.journal.write(NO_SEQ, self.journal.incarnation, base.JOIN)

  def lend(self, other: int) -> PeerFrame:
    """Lends to another peer; returns the frame of the loan."""
    event = self.journal.write(self.journal.puts, other, base.LEND)
    loan = jax.device_get(self._peer.lend(other))
    return self._frame(frames.LOAN, event, loan)

  def adopt(self, loan: PeerFrame, *, is_first: bool) -> None:
    """Adopts a loan; `is_first` for the first loan of a newcomer."""
    self.journal.write(loan.seq, loan.sender, base.ADOPT, message=loan.nbytes)
    self._peer.bytes_down += loan.nbytes
    self._peer.adopt(loan.content, loan.sender, is_first=is_first)

  # State for the driver.

  def view(self) -> View:
    """Returns the parameters for evaluation."""
    state = self._peer.state
    server, weight = state.server, float(self.spec.peer.weight(state))
    return View(jax.device_get(server.params), weight, int(server.version))

  def image(self) -> tuple[Any, dict[str, Any]]:
    """Returns (tree of arrays, JSON) from which a peer can continue; no job may
    be open."""
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
    """Continues from an image."""
    peer = self._peer
    peer.begin(*jax.tree.map(jax.numpy.asarray, tree))
    peer.bytes_down, peer.bytes_up = notes["bytes"], notes["bytes_up"]
    peer.norms = [np.float32(norm) for norm in notes["norms"]]
