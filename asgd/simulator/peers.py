"""The engine for peers without a server: obeys a trace of theirs.

A Python loop calls the compiled functions of each peer in the order of the
trace (`asgd.gossip.peer` says what its rows mean). JAX arrays are immutable, so
a message is a reference until it is mixed.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from asgd import base, gossip
from asgd import server as server_lib
from asgd.compression import packing
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event, Ledger
from asgd.simulator import records as records_lib
from asgd.simulator.steps import Observation, compile_work
from asgd.simulator.traffic import Received

Key = tuple[int, int]  # (sender, seq), which names a message


class PeerSteps(NamedTuple):
  """The compiled functions of a peer; same calls, same bits."""

  work: Callable  # (worker state, ticket, batch, root, job): as Worker.work
  send: Callable  # (PeerState, worker) -> Job
  receive: Callable  # (PeerState, Job, message, loss) -> (it, Observation)
  put: Callable  # (PeerState, keep, root, worker, seq) -> (PeerState, code)
  # (PeerState, codes, weights, slots) -> (PeerState, float32[], the RMS of the
  # change of its parameters)
  mix: Callable
  lend: Callable  # (PeerState, slot) -> (PeerState, loan)
  adopt: Callable  # (PeerState, loan, slot, first) -> PeerState
  residual: Callable  # PeerState -> float32[], RMS of what it has not told yet


@functools.lru_cache(maxsize=32)
def compile_peer(peer: gossip.Peer, worker: base.Worker) -> PeerSteps:
  """Compiles what runtimes call, once for each peer and worker."""

  def receive(state, job, message, loss):
    state, report = peer.receive(state, job, message)
    whole = state.server.version, report.staleness, report.accepted
    real = report.gap, loss, report.message_norm, report.update_norm
    observation = Observation(
      jnp.stack([jnp.asarray(x, jnp.int32) for x in whole]),
      jnp.stack([x.astype(jnp.float32) for x in real]),
    )
    return state, observation

  def put(state, keep, root, worker, seq):
    key = None if peer.refers else gossip.message_key(root, worker, seq)
    return peer.put(state, keep, key)

  def mix(state, codes, weights, slots):
    after = peer.mix(state, codes, weights, slots)
    return after, server_lib.gap(after.server.params, state.server.params)

  return PeerSteps(
    compile_work(worker),
    peer.send if peer.sends_current else jax.jit(peer.send),
    jax.jit(receive),
    put if peer.refers else jax.jit(put),
    *map(jax.jit, (mix, peer.lend, peer.adopt, peer.residual)),
  )


class PeerRecords(NamedTuple):
  """One row per message of a peer to itself: the columns of `base.Records`, and
  what came from others. `update` counts the peer's own updates, `staleness` how
  often it mixed during the job."""

  update: npt.NDArray[np.int32]  # [U]
  time: npt.NDArray[np.float64]  # [U]
  worker: npt.NDArray[np.int32]  # [U]
  job: npt.NDArray[np.int32]  # [U]
  staleness: npt.NDArray[np.int32]  # [U]
  gap: npt.NDArray[np.float32]  # [U]
  loss: npt.NDArray[np.float32]  # [U]
  accepted: npt.NDArray[np.bool_]  # [U]
  message_norm: npt.NDArray[np.float32]  # [U]
  update_norm: npt.NDArray[np.float32]  # [U]
  # Since the peer's row before:
  bytes_up: npt.NDArray[np.int64]  # [U], of what it put, each message once
  bytes_down: npt.NDArray[np.int64]  # [U], of what it took
  # RMS of what its codec had kept back of all before
  residual_norm: npt.NDArray[np.float32]  # [U]
  mix_norm: npt.NDArray[np.float32]  # [U], RMS of changes by mixing, their sum


def peer_records(
  messages: Sequence[Received],
  observations: Sequence[Observation],
  mixes: Sequence[Sequence[Any]],
) -> PeerRecords:
  """Fetches, once for all, what `PeerSteps.receive` returned of each message,
  and what `residual` did before; `mixes` are what `PeerSteps.mix` returned
  since the one before."""
  kept = records_lib.fetch([message.residual_norm for message in messages])
  messages = [
    message._replace(residual_norm=float(norm))
    for message, norm in zip(messages, kept, strict=True)
  ]
  rows = records_lib.records(messages, list(observations))
  norms = [
    math.fsum(map(float, records_lib.fetch(list(some)))) for some in mixes
  ]
  return PeerRecords(*rows, np.array(norms, np.float32))


def join_records(parts: Sequence[PeerRecords]) -> PeerRecords:
  """Joins records of consecutive stretches of a run."""
  if parts:
    return PeerRecords(*map(np.concatenate, zip(*parts, strict=True)))
  return peer_records([], [], [])


class LinkTraffic(NamedTuple):
  """What went over each link, as far as it was taken."""

  messages: npt.NDArray[np.int64]  # [n, n], by receiver and sender
  nbytes: npt.NDArray[np.int64]  # [n, n]


def array_bytes(code: Any) -> int:
  """Returns the bytes of the arrays of a code."""
  return sum(np.dtype(x.dtype).itemsize * x.size for x in jax.tree.leaves(code))


def packed_bytes(code: Any) -> int:
  """Returns the bytes of a code as it is packed for the wire."""
  layout = packing.layout(code)
  return len(packing.pack(layout, records_lib.fetch(code)))


class Peers:
  """All peers of a run, and how far they are in its trace.

  Args:
    how: whom they talk to, and how.
    steps: of `compile_peer`.
    peer: which `steps` were compiled of.
    worker: likewise.
    params: all begin with.
    trace: which they obey.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
  """

  def __init__(
    self,
    how: gossip.Gossip,
    peer: gossip.Peer,
    worker: base.Worker,
    params: base.Params,
    trace: base.Trace,
    *,
    batch: Callable[[int, int], base.Batch],
    root: jax.Array,
  ):
    self.gossip, self._steps = how, compile_peer(peer, worker)
    self._peer, self._worker, self._params = peer, worker, params
    self.trace, self._batch, self._root = trace, batch, root
    n = how.topology.workers
    most = int(trace.worker.max(initial=-1))
    if most >= n:
      raise ValueError(
        f"the trace has a peer {most}, the topology only {n}, counted from 0"
      )
    first = peer.init(params)
    self.states = [first] * n
    self.workers = [worker.init(first.server.params)] * n
    self.ledger: Ledger[gossip.Job] = Ledger(self._send, keeps=False)
    self._restored: dict[Key, gossip.Job] | None = None
    self._numbers = [np.int32(i) for i in range(n)]
    self.codes: dict[Key, Any] = {}  # that somebody will take
    self._rounds: dict[Key, int] = {}  # in which they were put
    self._sizes: dict[Key, int] = {}  # in bytes, on a link
    self._inboxes: list[list[Key]] = [[] for _ in range(n)]
    self._newcomers: set[int] = set()  # that have adopted nothing yet
    taken = np.isin(trace.action, trace_lib.TAKES)
    keys = zip(
      trace.job[taken].tolist(), trace.seq[taken].tolist(), strict=True
    )
    self._takes = collections.Counter(keys)  # still to come, of each message
    zeros = np.zeros((n, n), np.int64)
    self.traffic = LinkTraffic(zeros, zeros.copy())
    # Bytes up and down, and norms of mixes, since a peer's last message.
    self._since: list[tuple[int, int, list[Any]]] = [(0, 0, [])] * n
    self._obey = {
      base.RECEIVE: self._receive,
      base.JOIN: self._join,
      base.PUT: self._put,
      base.LEND: self._put,
      base.TAKE: self._take,
      base.ADOPT: self._adopt,
      base.MIX: self._mix,
    }

  @property
  def event(self) -> int:
    """The next row of the trace."""
    return self.ledger.rows

  @property
  def present(self) -> list[int]:
    """The peers that are there."""
    gone = self.ledger.ended
    return [i for i in range(len(self.states)) if i not in gone]

  def run(self, end: int) -> PeerRecords:
    """Obeys the rows up to, not including, row `end`; returns the records of
    the messages received. Raises TraceError for a row that cannot be obeyed."""
    self._messages: list[Received] = []
    self._observations: list[Observation] = []
    self._norms: list[list[Any]] = []
    for event in trace_lib.events(self.trace, self.event, end):
      job = self.ledger.obey(event)
      if event.action in self._obey:
        self._obey[event.action](event, job)
    return peer_records(self._messages, self._observations, self._norms)

  def _send(self, event, kept):
    del kept
    if self._restored is not None:  # which jobs are open; others have ended
      return self._restored.get(event.key, ())
    i = event.worker
    return self._steps.send(self.states[i], self._numbers[i])

  def _receive(self, event, job):
    i = event.worker
    self.workers[i], message, metrics = self._steps.work(
      self.workers[i],
      job.ticket,
      self._batch(i, event.job),
      self._root,
      np.int32(event.job),
    )
    kept: Any = 0.0
    if self.gossip.compressed:
      kept = self._steps.residual(self.states[i])
    self.states[i], observation = self._steps.receive(
      self.states[i], job, message, metrics.loss
    )
    up, down, norms = self._since[i]
    self._since[i] = 0, 0, []
    self._messages.append(Received(event.time, i, event.job, up, down, kept))
    self._observations.append(observation)
    self._norms.append(norms)

  def _join(self, event, job):
    del job
    i = event.worker
    self.states[i] = self._peer.init(self._params)
    self.workers[i] = self._worker.init(self._params)
    self._inboxes[i].clear()
    self._since[i] = 0, 0, []
    self._newcomers.add(i)

  def _put(self, event, job):
    del job
    i = event.worker
    if event.action == base.LEND:
      topology = self.gossip.topology
      hears = topology.union[i, event.job]  # or it knows nothing of it
      slot = np.int32(topology.slot(i, event.job) if hears else 0)
      self.states[i], code = self._steps.lend(self.states[i], slot)
    else:
      keep = np.float64(self.gossip.keep(event.job, i))
      self.states[i], code = self._steps.put(
        *(self.states[i], keep, self._root),
        *(self._numbers[i], np.int32(event.seq)),
      )
    whole = event.action == base.LEND or not self.gossip.compressed
    size = (array_bytes if whole else packed_bytes)(code)
    up, down, norms = self._since[i]
    self._since[i] = up + size, down, norms
    if self._takes[event.key]:
      self.codes[event.key], self._rounds[event.key] = code, event.job
      self._sizes[event.key] = size

  def _carry(self, event):
    """Counts a message on its link; returns its key."""
    key, i = (event.job, event.seq), event.worker
    size = self._sizes[key]
    self.traffic.messages[i, event.job] += 1
    self.traffic.nbytes[i, event.job] += size
    up, down, norms = self._since[i]
    self._since[i] = up, down + size, norms
    return key

  def _take(self, event, job):
    del job
    self._inboxes[event.worker].append(self._carry(event))

  def _adopt(self, event, job):
    del job
    i, key = event.worker, self._carry(event)
    slot = np.int32(self.gossip.topology.slot(i, event.job))
    first = np.bool_(i in self._newcomers)
    self.states[i] = self._steps.adopt(
      self.states[i], self.codes[key], slot, first
    )
    self._newcomers.discard(i)
    self._done(key)

  def _done(self, key):
    self._takes[key] -= 1
    if not self._takes[key]:
      for table in (self.codes, self._rounds, self._sizes):
        del table[key]

  def _mix(self, event, job):
    del job
    i = event.worker
    keys, self._inboxes[i] = self._inboxes[i], []
    weights = [
      self.gossip.weight(self._rounds[key], i, key[0]) for key in keys
    ]
    slots = [self.gossip.topology.slot(i, key[0]) for key in keys]
    codes = tuple(self.codes[key] for key in keys)
    self.states[i], norm = self._steps.mix(
      *(self.states[i], codes),
      *(np.array(weights, np.float64), np.array(slots, np.int32)),
    )
    up, down, norms = self._since[i]
    self._since[i] = up, down, [*norms, norm]
    for key in keys:
      self._done(key)

  # Checkpoints, at a row of the trace.

  def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a tree of arrays and JSON, from which `restore` goes on."""
    jobs = {
      f"{worker},{seq}": job
      for worker, tickets in self.ledger.open.items()
      for seq, job in tickets.items()
    }
    codes = {f"{sender},{seq}": code for (sender, seq), code in
      self.codes.items()}
    since = [
      [up, down, list(map(float, norms))] for up, down, norms in self._since
    ]
    tree = {
      "states": self.states,
      "workers": self.workers,
      "jobs": jobs,
      "codes": codes,
      "traffic": self.traffic,
    }
    notes = {
      "event": self.event,
      "jobs": list(jobs),
      "codes": list(codes),
      "sizes": [self._sizes[_key(name)] for name in codes],
      "since": since,
    }
    return tree, notes

  def template(self, notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a tree of the same structure, of peers that were not run."""
    state = self.states[0]
    job = self._steps.send(state, np.int32(0))
    root = self._root
    _, code = self._steps.put(
      state, np.float64(1), root, np.int32(0), np.int32(0)
    )
    _, loan = self._steps.lend(state, np.int32(0))
    lent = {
      f"{e.worker},{e.seq}"
      for e in trace_lib.events(self.trace, 0, notes["event"])
      if e.action == base.LEND
    }
    return {
      "states": self.states,
      "workers": self.workers,
      "jobs": dict.fromkeys(notes["jobs"], job),
      "codes": {k: loan if k in lent else code for k in notes["codes"]},
      "traffic": self.traffic,
    }

  def restore(self, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    """Goes on from what `save` returned, as arrays of any kind."""
    traffic = LinkTraffic(*(np.array(x) for x in tree["traffic"]))
    parts = {k: v for k, v in tree.items() if k != "traffic"}
    tree = jax.tree.map(jnp.array, parts)
    self._restored = {_key(name): job for name, job in tree["jobs"].items()}
    self.codes = {_key(name): code for name, code in tree["codes"].items()}
    sizes = zip(notes["codes"], notes["sizes"], strict=True)
    self._sizes = {_key(name): size for name, size in sizes}
    for event in trace_lib.events(self.trace, 0, notes["event"]):
      self.ledger.obey(event)
      self._note(event)
    self._restored = None
    self.states, self.workers = list(tree["states"]), list(tree["workers"])
    self.traffic = traffic
    self._since = [
      (up, down, [np.float32(x) for x in norms])
      for up, down, norms in notes["since"]
    ]

  def _note(self, event: Event):
    """What a row that was obeyed before leaves open."""
    i, key = event.worker, (event.job, event.seq)
    if event.action in trace_lib.PUTS and event.key in self.codes:
      self._rounds[event.key] = event.job
    elif event.action == base.TAKE:
      self._inboxes[i].append(key)
    elif event.action == base.ADOPT:
      self._takes[key] -= 1
      self._newcomers.discard(i)
    elif event.action == base.MIX:
      self._takes.subtract(self._inboxes[i])
      self._inboxes[i] = []
    elif event.action == base.JOIN:
      self._inboxes[i].clear()
      self._newcomers.add(i)


def _key(name: str) -> Key:
  sender, _, seq = name.partition(",")
  return int(sender), int(seq)


# What all peers together are.


def mean_params(
  states: Sequence[gossip.PeerState], weights: Sequence[Any]
) -> base.Params:
  """Returns the mean of peers' parameters, as NumPy arrays.

  Args:
    states: of the peers that are there.
    weights: of each, `Peer.weight`: of push-sum the mean is that of x = w z.
  """
  shares = np.array([float(w) for w in weights])
  shares = shares / shares.sum()

  def mean(*leaves):
    first, total = np.asarray(leaves[0]), 0.0
    for share, leaf in zip(shares, leaves, strict=True):
      total = total + share * np.asarray(leaf, np.float64)
    return np.asarray(total).astype(first.dtype)

  return jax.tree.map(mean, *(state.server.params for state in states))


def consensus(
  states: Sequence[gossip.PeerState], mean: base.Params
) -> float:
  """Returns the consensus distance, in the unit of a parameter.

    sqrt(1 / (n k) sum_i ||x_i - mean||^2),   k the trained parameters

  Args:
    states: of n peers.
    mean: of their parameters.
  """
  centre = jax.tree.leaves(base.weights_of(mean))
  square = count = 0.0
  for state in states:
    leaves = jax.tree.leaves(base.weights_of(state.server.params))
    for x, c in zip(leaves, centre, strict=True):
      difference = np.asarray(x, np.float64) - np.asarray(c, np.float64)
      square += float(np.square(difference).sum())
      count += difference.size
  return float(np.sqrt(square / max(count, 1)))
