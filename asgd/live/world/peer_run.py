"""Runs of live peers in a simulated world: cases, driver, checks.

Each peer writes its actions to its journal. So most checks read the journals of
the finished run (`peer_checks`).
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from asgd import algorithms, base, gossip
from asgd.live.failures import AllDied, NotFinite
from asgd.live.gossip import files
from asgd.live.gossip.cluster import Image, PeerCluster, PeerMaker
from asgd.live.gossip.frames import array_wire, packed_wire
from asgd.live.gossip.peer_rows import PeerSpec, View
from asgd.live.journal import journal_path
from asgd.live.records import records_path
from asgd.live.world import peer_checks
from asgd.live.world import scenario as server_scenario
from asgd.live.world.broken import Broken
from asgd.live.world.hosts import WorldHosts
from asgd.live.world.injections import Injection, Menu, Scenario
from asgd.live.world.run import COMMON, LADDER, WorldRun, WorldScript
from asgd.live.world.storage import Flip, flip

PEERS, ROUNDS = 3, 8
_PATIENCE = 1.0  # seconds after which the driver ends a silent peer
KINDS = (
  *("kill peer", "kill counter", "kill driver", "kill all"),
  *("stop peer", "stop driver"),
  *("cut", "drop", "double", "delay"),  # calls
  *("tear", "fill", "jump", "flip", "nan"),
  "term",  # asks the driver to stop, with some time to save
)


class PeerCase(NamedTuple):
  """A run without its faults."""

  recipe: str
  peers: int = PEERS
  every: int = 1
  refill: bool = True
  options: tuple[tuple[str, Any], ...] = ()
  kills: bool = True  # hosts are processes; False: threads

  @property
  def messages(self) -> int:
    """Count of jobs of all peers together."""
    return ROUNDS * self.peers


_QSGD = (("codec", "qsgd"), ("gamma", 0.5))
CASES = (
  PeerCase("d_psgd"),
  PeerCase("d_psgd", peers=4, kills=False),  # not all peers are neighbours
  PeerCase("d_psgd", refill=False),
  PeerCase("sgp", peers=4, options=(("overlap", 2),)),
  PeerCase("sgp", kills=False),
  PeerCase("choco_sgd", options=_QSGD),
  PeerCase("choco_sgd", every=2, options=_QSGD, kills=False),
  PeerCase("choco_sgd", peers=4, every=2, options=_QSGD),
  PeerCase("threshold_sharing", options=(("codec", "top_k"),)),
  PeerCase("threshold_sharing", options=(("codec", "top_k"),), kills=False),
  PeerCase("ad_psgd"),
  PeerCase("ad_psgd", kills=False),
  PeerCase("ad_psgd", peers=4, options=(("topology", "star"),)),
  PeerCase("ad_psgd", refill=False),
  PeerCase("async_threshold_sharing", options=(("codec", "top_k"),)),
)


@functools.cache
def _compile(
  name: str, peers: int, every: int, options: tuple[tuple[str, Any], ...]
) -> tuple[gossip.Gossip, gossip.Peer, base.Worker]:
  """Returns how peers exchange messages, the peer and its worker; the same
  objects for all cases of these arguments, so they are compiled once."""
  recipe = algorithms.build(name, 0.05, peers, **dict(options))
  assert recipe.gossip, f"{name} is a recipe of peers"
  settings = recipe.gossip._replace(every=every)
  recipe = recipe._replace(gossip=settings)
  worker = recipe.make_worker(server_scenario.loss)
  # A run starts peers often.
  peer = recipe.peer()
  peer = peer._replace(init=jax.jit(peer.init))
  return settings, peer, worker._replace(init=jax.jit(worker.init))


@functools.cache
def _make_spec(case: PeerCase) -> PeerSpec:
  """Returns the spec of a case's peers."""
  settings, peer, worker = _compile(
    case.recipe, case.peers, case.every, case.options
  )
  params = server_scenario.first_params()
  # Threads share arrays; a process gets copies.
  wire = array_wire(copies=case.kills)
  if settings.compressed:
    wire = packed_wire(peer, params)
  return PeerSpec(
    gossip=settings,
    peer=peer,
    worker=worker,
    params=params,
    batch=server_scenario.batch,
    root=server_scenario.ROOT,
    wire=wire,
  )


class PeersRun(WorldRun):
  """One scenario of live peers."""

  INVARIANTS, STEP_SECONDS = peer_checks.INVARIANTS, 0.05
  _cluster: PeerCluster  # of the present command

  def __init__(self, scenario: Scenario, folder: Path):
    super().__init__(scenario, folder)
    self._case: PeerCase = scenario.case
    self._spec = _make_spec(self._case)
    # The last checkpoint: images, and counts (rows, records) of each peer.
    self._checkpoint: tuple[dict[int, Image], list[Sequence[int]]] | None = None
    self._views: dict[int, View] = {}  # of the peers alive at the end
    self._flips: list[Flip] = []  # changes that were not undone
    self._stops: list[float] = []  # seconds to save, for each "term"
    # Complete rows of each journal at the last check, by path.
    self._checked_rows: dict[Path, bytes] = {}

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(CASES, KINDS, PEERS, PEERS * ROUNDS)

  def make_hosts(self) -> WorldHosts:
    """See the base. A host that is a process executes waiting calls in a random
    order, because calls over several connections arrive in any order."""
    hosts = super().make_hosts()
    if self._case.kills:
      hosts.order = self.rng
    return hosts

  # A command.

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    case = self._case
    maker = PeerMaker(
      lambda: self._spec._replace(batch=self._batch),
      *(self.folder, self.scenario.seed),
      make_script=lambda *args: WorldScript(self.world),
    )
    self._cluster = PeerCluster(
      self._spec.gossip,
      self.make_hosts(),
      maker,
      messages=case.messages,
      ladder=LADDER,
      refill=case.refill,
      patience=_PATIENCE,
    )
    return functools.partial(self._drive, resumed)

  def _batch(self, peer: int, job: int) -> Any:
    """Returns the batch of a job, after the time that the job takes."""
    self.simulate_work(job)
    return server_scenario.batch(peer, job)

  def _drive(self, resumed: bool) -> None:
    """Runs a command's driver."""
    if resumed:
      self._cut_back()
    try:
      self._cluster.start(self._checkpoint and self._checkpoint[0])
      self.drive(self._step, self._pause_and_save)
    except (AllDied, NotFinite) as error:
      # The driver ended early; the next one resumes from the checkpoint.
      self._check_all_exited(error)

  def _step(self) -> bool:
    """Drives the peers one step; returns whether the command has ended."""
    cluster = self._cluster
    cluster.check(self._count_received())
    self._check_rows()
    # The last peers may exit after their last job: then there is no view.
    if cluster.finished and (views := cluster.views()):
      self._views, self.finished = views, True
      return True
    if self._stops:
      if cluster.pause(self._stops.pop()):
        self._save()
      return True
    return False

  def _pause_and_save(self) -> None:
    self._cluster.pause()
    self._save()
    self._cluster.resume()

  def _count_received(self) -> int:
    """Returns the count of messages that have a record."""
    peers = range(self._case.peers)
    return sum(
      len(files.read_peer_records(self.folder, peer).loss) for peer in peers
    )

  def _save(self) -> None:
    """Makes a checkpoint while the peers are paused."""
    cluster, peers = self._cluster, self._case.peers
    # Notes are converted to JSON and back, as in a real checkpoint: keys become
    # text.
    images = {
      peer: (tree, json.loads(json.dumps(notes)))
      for peer, (tree, notes) in cluster.images().items()
    }
    self._checkpoint = (
      images,
      files.checkpoint_counts(self.folder, peers, images),
    )

  def _cut_back(self) -> None:
    """Restores changed files that the last driver refused, as its error asks.
    Then cuts all files back to the last checkpoint, or to nothing."""
    for change in reversed(self._flips):
      if self.outcome.refused and change.path.name in self.outcome.refused[-1]:
        change.restore()
    counts: list[Sequence[int]] = [(0, 0)] * self._case.peers
    if self._checkpoint:
      _, counts = self._checkpoint
    files.cut_back(self.folder, counts)
    # A flip in the part that was cut off is undone.
    self._flips = [change for change in self._flips if change.original()]
    self._checked_rows = {}

  # Checks.

  def _check_rows(self) -> None:
    """Raises Broken if a journal has lost or changed a row since the last
    check. Bytes that a fault changed are compared as they were before."""
    for peer in range(self._case.peers):
      path = journal_path(self.folder, peer)
      data = path.read_bytes() if path.exists() else b""
      for change in reversed(self._flips):
        if change.path == path and data.startswith(change.before[:-1]):
          data = change.before + data[len(change.before) :]
      # Leave out a last row that a kill has torn: the peer's next incarnation
      # removes it.
      data = data[: data.rfind(b"\n") + 1]
      if not data.startswith(self._checked_rows.get(path, b"")):
        raise Broken(f"{peer_checks.ROWS}: {path.name} at {self.scheduler.now}")
      self._checked_rows[path] = data

  def _check_all_exited(self, error: Exception) -> None:
    """Raises Broken if all peers exited with fewer faults than peers. A jump of
    the clock may end all peers at once."""
    counts = self.outcome.injected
    if not counts["jump"] and counts.total() < self._case.peers:
      raise Broken(f"{peer_checks.NO_ERROR}: {error}") from error

  def check(self) -> None:
    """See the base."""
    for change in reversed(self._flips):
      change.restore()
    peer_checks.check(
      self.folder, self._spec, self._case.messages, self._views
    )

  # Faults.

  def flip(self, fault: Injection) -> Sequence[str]:
    """Changes a byte of a peer's journal or records, and kills the peer."""
    peer = int(fault.target * self._case.peers)
    fraction = fault.target * self._case.peers - peer
    path_of = journal_path if fraction < 0.5 else records_path
    path = path_of(self.folder, peer)
    new_change = flip(path, fault.seconds / 8) if path.exists() else None
    if new_change is None:
      return ()
    # An earlier flip of the same bit: the byte is the original one again.
    undone_changes = [
      change
      for change in self._flips
      if change.path == path and change.after == new_change.before
    ]
    if undone_changes:
      self._flips.remove(undone_changes[-1])
    else:
      self._flips.append(new_change)
    for process in self.processes(f"peer {peer}"):
      self.scheduler.kill(process)
    return (f"peer {peer}",)

  def _term(self, fault: Injection) -> Sequence[str]:
    """Asks the driver to stop, with `fault.seconds` to save."""
    self._stops.append(fault.seconds)
    return ("driver",)

  def _stop_peer(self, fault: Injection) -> Sequence[str]:
    """Stops a peer with its helper threads, or the job counter."""
    kind = "counter" if fault.target < 0.2 else "peer"
    return self.stop(kind, fault) or self.stop("peer", fault)

  INJECT = {  # noqa: RUF012
    **COMMON,
    "kill peer": lambda run, fault: run.kill("peer", fault),
    "kill counter": lambda run, fault: run.kill("counter", fault),
    "stop peer": _stop_peer,
    "flip": flip,
    "term": _term,
  }
