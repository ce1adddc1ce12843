"""Live peers: the engines `threads` and `ray` of recipes without a server.

The driver replaces peers that fail, evaluates the parameters that peers keep
for it, and pauses all peers for a checkpoint. A run that was stopped or killed
resumes from its last checkpoint. Later rows of the peers' files are dropped:
all processes that had received those messages have exited.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import gossip, safe_files, simulator
from asgd.experiment import engines, storage
from asgd.experiment.engines import (
  allocations,
  live_engine,
  peers,
  server_results,
)
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.experiment.engines.peers import PeerPlan
from asgd.live.gossip import files, timed
from asgd.live.gossip.cluster import PeerCluster, PeerMaker
from asgd.live.gossip.frames import array_wire, packed_wire
from asgd.live.gossip.peer_rows import PeerSpec, View
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import records_path
from asgd.orders.trace import TAKES


def check_files(folder: Path, description: Mapping[str, Any]) -> None:
  """Raises ValueError if journals or records of a finished cell were changed.
  The last message of a peer that failed may have no record."""
  workers = description["cell"]["workers"]
  files.read_trace(folder, workers)
  files.FILES.check(folder, workers, files.count_incarnations)


def make_spec(
  plan: PeerPlan, seed: int, evaluated_messages: Sequence[int], *, copies: bool
) -> PeerSpec:
  """Returns the spec of the peers.

  Args:
    plan: the plan of the cell.
    seed: the seed of the cell.
    evaluated_messages: messages after which peers keep their parameters.
    copies: whether messages are copied, as between processes.
  """
  key, root = jax.random.split(jax.random.key(seed))
  params = jax.device_get(plan.problem.init(key))
  wire = array_wire(copies=copies)
  if plan.gossip.compressed:
    # Codes are sent as packed bytes, even between threads.
    wire = packed_wire(plan.peer, params)
  return PeerSpec(
    *(plan.gossip, plan.peer, plan.worker, params),
    *(plan.job_batches(seed), root, wire),
    # A round is a message of each worker, so an evaluation is after a round.
    frozenset(message // plan.workers for message in evaluated_messages),
    tuple(plan.run.config["live"]["slowdown"]),
    plan.devices,
  )


def _spec_in_host(
  make_plan: Callable[[], PeerPlan],
  allocation: Any,
  seed: int,
  evaluated_messages: Sequence[int],
) -> PeerSpec:
  """Returns the spec, made in the process of a peer."""
  plan = dataclasses.replace(make_plan(), allocation=allocation)
  return make_spec(plan, seed, evaluated_messages, copies=True)


def image_template(spec: PeerSpec, notes: dict[str, Any]) -> Any:
  """Returns a tree like that of an image with these notes."""
  state = spec.peer.init(spec.params)
  # Codes have the shapes that an encoder returns; nothing is encoded here.
  key = jax.eval_shape(jax.random.key, 0)
  weight: Any = np.float64(1)  # any weight of a put has this shape
  code = jax.eval_shape(
    lambda state, key: spec.peer.put(state, weight, key)[1], state, key
  )
  code = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), code)
  tree = {"peer": (state, spec.worker.init(spec.params))}
  return tree | {"codes": dict.fromkeys(notes.get("codes", ()), code)}


class LivePeerEngine(live_engine.LiveEngine):
  """A cell of live peers."""

  _participants = "peers"
  _files = files.FILES

  def _prepare(self) -> bool:
    """Returns whether a peer has written a row."""
    # Peers keep parameters only after complete rounds.
    self.quantum = self._plan.quantum
    self._views: dict[int, View] = {}  # of the last evaluation
    # A cell has begun if any peer has written a row.
    begun = any(map(read_journal, self._journals()))
    self._plan = allocations.read(self._plan, self._folder, begun=begun)
    return begun

  @property
  def _counts_jobs(self):
    """Whether progress is counted in jobs, not in rounds."""
    return self._plan.gossip.order != gossip.ROUNDS

  def _network(self):
    return self._plan.call_network

  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[PeerCluster, Callable[[], None]]:
    """Returns the cluster of peers, and its start; see the base."""
    plan, seed = self._plan, live.cell.seed
    # In rounds the cell resumes after the round that all peers have ended.
    if not self._counts_jobs:
      images = saved[0] if saved else {}
      ended_rounds = [notes["rounds"] for _, notes in images.values()]
      # The slowest peer's round: all messages up to it were received.
      self.done = plan.workers * min(ended_rounds, default=0)
    if allocations.awaits_speeds(plan):
      plan = self._plan = self._with_shares(live, hosts)
    maker = PeerMaker(
      *(self._spec_maker(hosts), live.folder, seed),
      *(tuple(self._context.machine.faults), live.write_span),
      warm_up=hosts.are_processes,
    )
    cluster = PeerCluster(
      *(plan.gossip, hosts.hosts, maker),
      messages=plan.messages,
      ladder=live.setup.ladder,
      refill=live.settings["refill"],
    )
    return cluster, functools.partial(cluster.start, saved and saved[0])

  def _spec_maker(self, hosts: CellHosts) -> Callable[[], PeerSpec]:
    """Returns the function by which a host makes the spec of its peer."""
    plan, seed = self._plan, self._context.cell.seed
    config = self._context.experiment.config
    evaluated_messages = engines.evaluation_messages(
      config["evaluations"], self.total, self.quantum
    )
    if hosts.are_processes:
      arguments = plan.allocation, seed, evaluated_messages
      return functools.partial(_spec_in_host, hosts.make_plan, *arguments)
    spec = make_spec(plan, seed, evaluated_messages, copies=False)
    # Compiled once, for all threads of this process.
    spec.warm_up_all()
    return lambda: spec

  def _with_shares(self, live: LiveCell, hosts: CellHosts) -> PeerPlan:
    """Times the peers with equal shares; returns the plan with their shares by
    speed, which are written to the folder of the cell."""
    plan = self._plan
    jobs = plan.run.config["allocation"]["jobs"]
    make = self._spec_maker(hosts)
    seconds = timed.measure(
      hosts.hosts, make, plan.workers, live.setup.ladder, jobs
    )
    plan = allocations.with_shares_by_speed(plan, seconds)
    allocations.write(live.folder, plan.allocation)
    return plan

  def _journal(self, peer):
    return read_journal(journal_path(self._folder, peer))

  def _unpack(self, saved: Any) -> tuple[dict[int, Any], dict[str, Any]]:
    """Returns the images of a checkpoint, and its notes."""
    notes, seed = saved.notes, self._context.cell.seed
    # No evaluations: this spec is only a template.
    spec = make_spec(self._plan, seed, (), copies=True)
    template = {
      peer: image_template(spec, peer_notes)
      for peer, peer_notes in notes["peers"].items()
    }
    trees = saved.tree(template)
    images = {
      int(peer): (trees[peer], peer_notes)
      for peer, peer_notes in notes["peers"].items()
    }
    return images, notes

  def _cut_files_back(self, saved: Any) -> None:
    """Cuts the files back; see the base."""
    # With a checkpoint, files are only cut back to it, so nothing is lost.
    copies_text = "" if saved else self._copy_files_aside()
    super()._cut_files_back(saved)
    self._news[-1] += copies_text

  def _copy_files_aside(self) -> str:
    """Copies the peers' files to the folder of the last damaged checkpoint.
    Returns a text that names it, "" if there is none or it has the files."""
    damaged = sorted(self._folder.glob("damaged-*"))
    # An earlier resume may have copied the files.
    if not damaged or journal_path(damaged[-1], 0).exists():
      return ""
    for peer in self._writers:
      for make_path in (journal_path, records_path):
        path = make_path(self._folder, peer)
        if path.exists():
          safe_files.write(make_path(damaged[-1], peer), path.read_bytes())
    return f", and kept in {damaged[-1]}"

  def _snapshot_at(self, until: int) -> None:
    """Takes a snapshot at message `until`, if peers keep views of it."""
    # [1] Ask the peers for their views (parameters, weight, version), if the
    # message was received.
    rounds, views = None, {}
    if until == self.total:
      if self.cluster.finished:
        # At the end the peers keep their last parameters.
        views = self.cluster.views()
    elif self._counts_jobs:
      if self._received >= until or self.cluster.finished:
        views = self.cluster.views()
    elif self.cluster.rounds * self.quantum >= until:
      # Peers keep views of the evaluated rounds. If a replaced peer has lost
      # its view, use the present views.
      rounds = until // self.quantum
      views = self.cluster.views(rounds) or self.cluster.views()
    # [2] Without views, only report how far the cell is.
    if not views:
      reached = self._received
      if not self._counts_jobs:
        reached = self.cluster.rounds * self.quantum
      # Message `until` is not done before it is evaluated.
      self.done = max(self.done, min(reached, until - 1))
      return
    self._take_snapshot(until, views)

  def _take_snapshot(self, message: int, views: dict[int, View]) -> None:
    """Evaluates the mean of the peers' views as the snapshot of a message."""
    self._views = views
    # A View has the fields of a PeerState that the mean reads.
    ordered_views: list[Any] = [views[peer] for peer in sorted(views)]
    # Views have the peers' weights: push-sum's mean is a weighted one.
    params = simulator.mean_params(
      ordered_views, [view.weight for view in ordered_views]
    )
    records = self.records()
    row = min(message, len(records.loss)) - 1
    # The clock of the message, not of the views, which may be later.
    clock = {"seconds": float(records.time[row]) - self._first_ticket}
    updates = round(np.mean([view.version for view in ordered_views]))
    self._snapshot = engines.Snapshot(params, message, updates, clock)
    self.done = message

  def _evaluated_views(self) -> tuple[list[Any], list[Any]]:
    """Returns views and weights of the peers in the last evaluation."""
    ordered_views = [self._views[peer] for peer in sorted(self._views)]
    return ordered_views, [view.weight for view in ordered_views]

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of some messages, and the consensus
    distance and quality of peers at the last evaluation."""
    ordered_views, weights = self._evaluated_views()
    summary = peers.summary(
      self._records_between(start, end), ordered_views, weights
    )
    return summary | peers.peer_quality(
      self._plan.problem, [view.params for view in ordered_views]
    )

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    self._received += len(self._read().loss)
    records, plan = self.records(), self._plan
    updates = round(np.mean([v.version for v in self._views.values()]))
    row = server_results.columns(plan, records, updates)
    row |= self.summary(0, len(records.loss))
    row |= peers.link_columns(plan, self._traffic)
    return {
      **row,
      "peers_sha256": storage.digest(
        [v.params for v in self._evaluated_views()[0]]
      ),
      "seconds": float(records.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      **self._residual_lost(records),
      "missed": self.total - len(records.loss),
      "took_part": len(np.unique(records.worker)),
    }

  def _residual_lost(self, records: Any) -> dict[str, float]:
    """Returns the column of `traffic.lost_residual`, for peers that left before
    the end."""
    if not self._plan.gossip.compressed:
      return {}
    end, squares = records.time[-1], 0.0
    for peer in self._writers:
      records_of_peer = self._files.read(self._folder, peer)
      for event, norm in files.residuals_lost(
        self._journal(peer), records_of_peer
      ):
        # After the last message no residual would have been sent.
        squares += norm**2 if event.time < end else 0.0
    return {"residual_lost": math.sqrt(squares)}

  @functools.cached_property
  def _traffic(self) -> simulator.LinkTraffic:
    """Messages and bytes that were received over each link, read at the end of
    the cell. Rows are receivers, columns senders."""
    n = len(self._writers)
    messages, nbytes = np.zeros((2, n, n), np.int64)
    for receiver in self._writers:
      for event in self._journal(receiver):
        # In a peer's journal `job` is the sender, and `message` the bytes.
        if event.action in TAKES:
          messages[receiver, event.job] += 1
          nbytes[receiver, event.job] += event.message
    return simulator.LinkTraffic(messages, nbytes)

  def extras(self) -> dict[str, str]:
    """Returns the traffic of each link, as a table."""
    return {"links.csv": peers.links_table(self._traffic)}

  def _pack(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns the peers' images and the counts of their files."""
    images = self.cluster.images()
    n_peers = len(self._writers)
    file_counts = files.checkpoint_counts(self._folder, n_peers, images)
    tree = {str(peer): tree for peer, (tree, _) in images.items()}
    notes = {str(peer): notes for peer, (_, notes) in images.items()}
    # The step is the number of rows, which grows from checkpoint to
    # checkpoint.
    step = sum(rows for rows, _ in file_counts)
    return step, tree, {"peers": notes, "files": file_counts}

  def stop(self) -> str:
    """See the base."""
    stop_note = super().stop()
    if not self._counts_jobs:
      # Rounds that all peers have completed.
      self.done = self.cluster.rounds * self.quantum
    return stop_note


def describe(result: Mapping[str, Any]) -> str:
  """Returns a cell's result in a few words."""
  words = peers.describe(result)
  if missed := result["missed"]:
    words += f", {missed} messages missed because peers exited"
  if lost := result.get("residual_lost"):
    words += f", residuals of RMS {lost:.2g} lost with peers that exited"
  return words
