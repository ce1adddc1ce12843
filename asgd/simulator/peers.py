"""The engine for peers without a server: replays their trace.

A Python loop calls the compiled functions of each peer in the order of the
trace (`asgd.gossip.peer` explains the rows). JAX arrays are immutable, so a
message is a reference, not a copy, until a peer mixes it.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from asgd import base, gossip
from asgd import norms as norms_lib
from asgd.compression import packing
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event, Ledger
from asgd.simulator import records as records_lib
from asgd.simulator.peer_links import (
  Key,
  LinkTraffic,
  PeerLinks,
  Taken,
  read_key,
  takers_in,
)
from asgd.simulator.steps import ALONE, Observation, WorkerDevices, compile_work
from asgd.simulator.traffic import ReceivedMessage


class PeerSteps(NamedTuple):
  """The compiled functions of a peer. The same calls give the same bits."""

  # (worker state, ticket, batch, root, job): as Worker.work
  work: Callable[..., Any]
  send: Callable[..., Any]  # (PeerState, worker) -> Job
  # (PeerState, Job, message, loss) -> (PeerState, Observation)
  receive: Callable[..., Any]
  # (PeerState, keep, root, worker, seq) -> (PeerState, code)
  put: Callable[..., Any]
  # (PeerState, codes, weights, slots) -> (PeerState, float32[], the RMS of the
  # change of its parameters)
  mix: Callable[..., Any]
  lend: Callable[..., Any]  # (PeerState, slot) -> (PeerState, loan)
  adopt: Callable[..., Any]  # (PeerState, loan, slot, first) -> PeerState
  # PeerState -> float32[], RMS of the unsent residual
  residual: Callable[..., Any]


@functools.lru_cache(maxsize=32)
def compile_peer(
  peer: gossip.Peer, worker: base.Worker, devices: WorkerDevices = ALONE
) -> PeerSteps:
  """Compiles the functions that runtimes call, once for each peer, worker and
  group of devices, which share the worker's jobs."""
  work = compile_work(worker, devices)

  def gathered_work(*args):
    # The other functions run on one device.
    state, *result = work(*args)
    return state, *records_lib.fetch(result)

  def receive(state, job, message, loss):
    state, report = peer.receive(state, job, message)
    integers = state.server.version, report.staleness, report.accepted
    reals = report.gap, loss, report.message_norm, report.update_norm
    observation = Observation(
      jnp.stack([jnp.asarray(x, jnp.int32) for x in integers]),
      jnp.stack([x.astype(jnp.float32) for x in reals]),
    )
    return state, observation

  def put(state, keep, root, worker, seq):
    key = None if peer.is_reference else gossip.message_key(root, worker, seq)
    return peer.put(state, keep, key)

  def mix(state, codes, weights, slots):
    mixed = peer.mix(state, codes, weights, slots)
    return mixed, norms_lib.gap(mixed.server.params, state.server.params)

  return PeerSteps(
    work if devices.devices == 1 else gathered_work,
    peer.send if peer.sends_current else jax.jit(peer.send),
    jax.jit(receive),
    put if peer.is_reference else jax.jit(put),
    *map(jax.jit, (mix, peer.lend, peer.adopt, peer.residual)),
  )


class PeerRecords(NamedTuple):
  """One row per message of a peer to itself: the columns of `base.Records`, and
  `mix_norm`."""

  update: npt.NDArray[np.int32]  # [U], the peer's own updates
  time: npt.NDArray[np.float64]  # [U]
  worker: npt.NDArray[np.int32]  # [U], the peer
  job: npt.NDArray[np.int32]  # [U]
  staleness: npt.NDArray[np.int32]  # [U], the peer's mixes during the job
  gap: npt.NDArray[np.float32]  # [U]
  loss: npt.NDArray[np.float32]  # [U]
  accepted: npt.NDArray[np.bool_]  # [U]
  message_norm: npt.NDArray[np.float32]  # [U]
  update_norm: npt.NDArray[np.float32]  # [U]
  # [U], bytes of the messages that the peer put since its previous row; each
  # message counts once, for any number of receivers
  bytes_up: npt.NDArray[np.int64]
  # [U], bytes of the messages that the peer took since its previous row
  bytes_down: npt.NDArray[np.int64]
  residual_norm: npt.NDArray[np.float32]  # [U]
  # [U], sum of the RMS of changes by mixing since the peer's previous row
  mix_norm: npt.NDArray[np.float32]


def peer_records(
  messages: Sequence[ReceivedMessage],
  observations: Sequence[Observation],
  mixes: Sequence[Sequence[Any]],
) -> PeerRecords:
  """Fetches the results of `PeerSteps.receive` and `residual` for all messages
  at once, and returns their records. `mixes` has, for each message, the norms
  of `PeerSteps.mix` since the peer's previous message."""
  residual_norms = records_lib.fetch(
    [message.residual_norm for message in messages]
  )
  messages = [
    message._replace(residual_norm=float(norm))
    for message, norm in zip(messages, residual_norms, strict=True)
  ]
  rows = records_lib.records(messages, list(observations))
  norms = [
    math.fsum(map(float, records_lib.fetch(list(row_norms))))
    for row_norms in mixes
  ]
  return PeerRecords(*rows, np.array(norms, np.float32))


def join_records(parts: Sequence[PeerRecords]) -> PeerRecords:
  """Joins records of consecutive parts of a run."""
  if parts:
    return PeerRecords(*map(np.concatenate, zip(*parts, strict=True)))
  return peer_records([], [], [])


def array_bytes(code: Any) -> int:
  """Returns the bytes of the arrays of a code."""
  return sum(np.dtype(x.dtype).itemsize * x.size for x in jax.tree.leaves(code))


def packed_bytes(code: Any) -> int:
  """Returns the bytes of a code, packed for the wire."""
  layout = packing.layout(code)
  return len(packing.pack(layout, records_lib.fetch(code)))


# The entries that a received job adds to the records; see `peer_records`.
PeerRow = tuple[ReceivedMessage, Observation, list[Any]]


class OnePeer:
  """The states of one peer, and its counts since its last record.

  Attributes:
    state: the PeerState.
    worker: the state of the peer's worker.
    bytes_up: bytes of the messages that the peer put since its last record.
    bytes_down: bytes of the messages that it took since its last record.
    norms: RMS of each change by mixing since its last record.
  """

  def __init__(
    self,
    index: int,
    rules: gossip.Gossip,
    steps: PeerSteps,
    root: jax.Array,
    start: tuple[gossip.PeerState, Any],
  ):
    """`start` are the first states of the peer and of its worker."""
    self._index, self._gossip, self._steps = index, rules, steps
    self._root, self._index_array = root, np.int32(index)
    self.begin(*start)

  def begin(self, state: gossip.PeerState, worker: Any) -> None:
    """Sets the states, and the counts to zero."""
    self.state, self.worker = state, worker
    self.bytes_up = self.bytes_down = 0
    self.norms: list[Any] = []

  def send(self) -> gossip.Job:
    """Returns a job on the peer's present parameters."""
    return self._steps.send(self.state, self._index_array)

  def work(self, job: gossip.Job, batch: base.Batch, number: int) -> Any:
    """Computes a job, and returns (worker state after the job, message, loss).
    The peer does not change."""
    state, message, metrics = self._steps.work(
      *(self.worker, job.ticket, batch, self._root, np.int32(number))
    )
    return state, message, metrics.loss

  def receive(self, event: Event, job: gossip.Job, work: Any) -> PeerRow:
    """Applies the result of `work` and ends the job; returns its record."""
    self.worker, message, loss = work
    residual_norm: Any = 0.0
    if self._gossip.compressed:
      residual_norm = self._steps.residual(self.state)
    self.state, observation = self._steps.receive(
      self.state, job, message, loss
    )
    received = ReceivedMessage(
      *(event.time, self._index, event.job, self.bytes_up, self.bytes_down),
      residual_norm,
    )
    norms = self.norms
    self.begin(self.state, self.worker)
    return received, observation, norms

  def put(self, round: int, seq: int) -> Any:
    """Makes the peer's message `seq` in a round, and returns its code."""
    keep = np.float64(self._gossip.keep(round, self._index))
    self.state, code = self._steps.put(
      self.state, keep, self._root, self._index_array, np.int32(seq)
    )
    return code

  def preview(self) -> Any:
    """Returns the code of a message with the number 0, without putting it."""
    keep, seq = np.float64(self._gossip.keep(0, self._index)), np.int32(0)
    args = self.state, keep, self._root, self._index_array, seq
    return self._steps.put(*args)[1]

  def mix(self, taken: Sequence[Taken]) -> None:
    """Mixes the taken messages into the parameters, in their order."""
    rules, i = self._gossip, self._index
    weights = [
      rules.weight(message.round, i, message.sender) for message in taken
    ]
    slots = [rules.topology.slot(i, message.sender) for message in taken]
    self.state, norm = self._steps.mix(
      self.state,
      tuple(message.code for message in taken),
      np.array(weights, np.float64),
      np.array(slots, np.int32),
    )
    self.norms.append(norm)

  def lend(self, borrower: int) -> Any:
    """Returns this peer's loan to `borrower`, for its `adopt`."""
    topology = self._gossip.topology
    # Only a neighbour has a slot at this peer. A loan to another peer has no
    # values of that peer.
    is_neighbour = topology.union[self._index, borrower]
    slot = np.int32(topology.slot(self._index, borrower) if is_neighbour else 0)
    self.state, loan = self._steps.lend(self.state, slot)
    return loan

  def adopt(self, loan: Any, lender: int, *, is_first: bool) -> None:
    """Takes the loan of another peer; `is_first` is whether this newcomer has
    taken no loan before."""
    slot = np.int32(self._gossip.topology.slot(self._index, lender))
    self.state = self._steps.adopt(self.state, loan, slot, np.bool_(is_first))


class Peers:
  """All peers of a run, and their position in its trace.

  Args:
    rules: the mixing rule, the topology and the order of the run.
    peer: the functions of a peer.
    worker: the functions of a peer's worker.
    params: the parameters with which all peers begin.
    trace: the rows of the run; or a list of rows, to which the caller adds rows
      before they are run, as the messages become known.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
    devices: the devices of each peer.

  Attributes:
    peers: the N peers, by index.
  """

  def __init__(
    self,
    rules: gossip.Gossip,
    peer: gossip.Peer,
    worker: base.Worker,
    params: base.Params,
    trace: base.Trace | list[Event],
    *,
    batch: Callable[[int, int], base.Batch],
    root: jax.Array,
    devices: WorkerDevices = ALONE,
  ):
    self.gossip, self._steps = rules, compile_peer(peer, worker, devices)
    self.trace, self._batch, self._root = trace, batch, root
    n = rules.topology.workers
    takers, last_peer = rules.takers, -1
    if isinstance(trace, base.Trace):
      takers = takers_in(trace)
      last_peer = int(trace.worker.max(initial=-1))
    if last_peer >= n:
      raise ValueError(
        f"the trace has a peer {last_peer}, the topology only {n}, counted"
        " from 0"
      )
    self._first_states = lambda: (peer.init(params), worker.init(params))
    state = peer.init(params)
    start = state, worker.init(state.server.params)
    self.peers = [
      OnePeer(i, rules, self._steps, root, start) for i in range(n)
    ]
    self.ledger: Ledger[gossip.Job] = Ledger(self._send, keeps=False)
    self._saved_jobs: dict[Key, gossip.Job] | None = None
    self._links = PeerLinks(n, takers)
    self._newcomers: set[int] = set()  # peers that joined and adopted nothing

  @property
  def event(self) -> int:
    """The next row of the trace."""
    return self.ledger.rows

  @property
  def states(self) -> list[gossip.PeerState]:
    """The state of each peer."""
    return [peer.state for peer in self.peers]

  @property
  def present(self) -> list[int]:
    """The peers that have not left."""
    ended = self.ledger.ended
    return [i for i in range(len(self.peers)) if i not in ended]

  @property
  def traffic(self) -> LinkTraffic:
    """The traffic of each link; only taken messages count."""
    return self._links.traffic

  @property
  def codes(self) -> dict[Key, Any]:
    """The codes of messages that at least one peer has yet to take."""
    messages = self._links.messages.items()
    return {key: message.code for key, message in messages}

  def _events(self, start: int, end: int) -> Iterable[Event]:
    """Returns the rows [start, end)."""
    if isinstance(self.trace, base.Trace):
      return trace_lib.events(self.trace, start, end)
    return self.trace[start:end]

  def run(self, end: int) -> PeerRecords:
    """Replays the rows up to, not including, row `end`; returns the records of
    the received messages. Raises TraceError for a row that cannot be replayed.
    """
    rows: list[PeerRow] = []
    for event in self._events(self.event, end):
      job, peer = self.ledger.apply(event), self.peers[event.worker]
      if event.action == base.RECEIVE:
        batch = self._batch(event.worker, event.job)
        work = peer.work(job, batch, event.job)
        rows.append(peer.receive(event, job, work))
      elif event.action == base.JOIN:
        self._links.mix(event.worker)
        self._newcomers.add(event.worker)
        peer.begin(*self._first_states())
      elif event.action in (base.PUT, base.LEND):
        self._put(peer, event)
      elif event.action == base.TAKE:
        peer.bytes_down += self._links.take(event)
      elif event.action == base.ADOPT:
        code, nbytes = self._links.adopt(event)
        peer.bytes_down += nbytes
        is_first = event.worker in self._newcomers
        peer.adopt(code, event.job, is_first=is_first)
        self._newcomers.discard(event.worker)
      elif event.action == base.MIX:
        peer.mix(self._links.mix(event.worker))
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    return peer_records(*columns)

  def _send(self, event: Event, kept_ticket: Any) -> Any:
    """Returns the job of a SEND row; during `restore`, the saved job."""
    del kept_ticket
    # A checkpoint has only open jobs: nothing reads an ended job again.
    if self._saved_jobs is not None:
      return self._saved_jobs.get(event.key, ())
    return self.peers[event.worker].send()

  def nbytes(self, peer: int, seq: int | None) -> int:
    """Returns the bytes of a message that some receiver has yet to take; with
    `seq` None, of the message that a peer would put now."""
    if seq is not None:
      return self._links.messages[peer, seq].nbytes
    return self._measure(self.peers[peer].preview())

  def _measure(self, code: Any) -> int:
    """Returns the bytes of a message."""
    # A code travels as a packet, another message as its arrays.
    return (packed_bytes if self.gossip.compressed else array_bytes)(code)

  def _put(self, peer: OnePeer, event: Event) -> None:
    """Makes and sends the message of a PUT or LEND row."""
    if event.action == base.LEND:
      code = peer.lend(event.job)
      nbytes = array_bytes(code)
    else:
      code = peer.put(event.job, event.seq)
      nbytes = self._measure(code)
    peer.bytes_up += nbytes
    self._links.put(event, code, nbytes)

  # Checkpoints, at a row of the trace.

  def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a tree of arrays and JSON, for `restore`."""
    jobs = {
      f"{worker},{seq}": job
      for worker, tickets in self.ledger.open.items()
      for seq, job in tickets.items()
    }
    tree, notes = self._links.save()
    workers = [peer.worker for peer in self.peers]
    tree |= {"states": self.states, "workers": workers, "jobs": jobs}
    notes |= {"event": self.event, "jobs": list(jobs)}
    notes["since"] = [
      [peer.bytes_up, peer.bytes_down, list(map(float, peer.norms))]
      for peer in self.peers
    ]
    return tree, notes

  def template(self, notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree with the structure of the tree that `save` returned with
    `notes`; these peers have not run."""
    state = self.peers[0].state
    job = self._steps.send(state, np.int32(0))
    root = self._root
    _, code = self._steps.put(
      state, np.float64(1), root, np.int32(0), np.int32(0)
    )
    _, loan = self._steps.lend(state, np.int32(0))
    lent_keys = {
      f"{e.worker},{e.seq}"
      for e in self._events(0, notes["event"])
      if e.action == base.LEND
    }
    return {
      "states": self.states,
      "workers": [peer.worker for peer in self.peers],
      "jobs": dict.fromkeys(notes["jobs"], job),
      "codes": {k: loan if k in lent_keys else code for k in notes["codes"]},
      "traffic": self.traffic,
    }

  def restore(self, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    """Continues from the tree and the notes of `save`."""
    without_traffic = {k: v for k, v in tree.items() if k != "traffic"}
    arrays = jax.tree.map(jnp.array, without_traffic)
    jobs = arrays["jobs"].items()
    self._saved_jobs = {read_key(name): job for name, job in jobs}
    self._links.restore(arrays["codes"], tree["traffic"], notes)
    # Replay the rows without computation: they restore the ledger, the inboxes
    # and the newcomers.
    for event in self._events(0, notes["event"]):
      self.ledger.apply(event)
      self._links.apply_saved_row(event)
      if event.action == base.JOIN:
        self._newcomers.add(event.worker)
      elif event.action == base.ADOPT:
        self._newcomers.discard(event.worker)
    self._saved_jobs = None
    for peer, state, worker, (bytes_up, bytes_down, norms) in zip(
      *(self.peers, arrays["states"], arrays["workers"], notes["since"]),
      strict=True,
    ):
      peer.begin(state, worker)
      peer.bytes_up, peer.bytes_down = bytes_up, bytes_down
      peer.norms = [np.float32(x) for x in norms]
