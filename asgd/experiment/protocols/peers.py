"""Peers without a server: in simulated time, live, and on a mesh."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import algorithms, base, simulator
from asgd.experiment import live_files, storage
from asgd.experiment.engines import (
  live,
  live_peers,
  mesh_programs,
  parameter_server,
  peer_mesh,
  peers,
)
from asgd.experiment.engines.peers import PeerPlan
from asgd.experiment.findings import Failure, Finding, worker_findings
from asgd.experiment.protocol import (
  LiveCells,
  Protocol,
  Recomputed,
  Refusal,
  Runner,
)
from asgd.experiment.protocols.server import plan_of_cell
from asgd.live.gossip import files
from asgd.live.hosts.base import COUNTER, PEER
from asgd.live.journal import journal_path, read_journal, read_nonempty_journal
from asgd.orders import trace

Description = Mapping[str, Any]
_NO_SERVER = "its peers have no server"


def _wrote_folder(folder: Path, description: Description) -> bool:
  """Returns whether a folder has a journal for each peer, not each shard."""
  if description["config"]["server"]["shards"] > 1:
    return False
  lead_journal = journal_path(folder, 0)
  return any(path != lead_journal for path in folder.glob("trace-*.csv"))


def _trace(folder: Path, description: Description) -> base.Trace:
  """Returns the trace of all peers, merged from their journals."""
  return files.read_trace(folder, description["cell"]["workers"])


# Actions of rows on jobs. Journals also have rows on messages between peers.
_JOB_ACTIONS = (*trace.STARTS, *trace.ENDS, base.JOIN, base.LEAVE)


def _rows(folder: Path) -> list[trace.Event]:
  """Returns the rows on jobs of all peers, sorted by time."""
  paths = sorted(folder.glob("trace-*.csv"))
  rows = [event for path in paths for event in read_journal(path)]
  rows = [event for event in rows if event.action in _JOB_ACTIONS]
  return sorted(rows, key=lambda event: event.time)


def _read(folder: Path, description: Description) -> live_files.LiveFiles:
  """Reads the journals of all peers. Each peer records its jobs; there are no
  shards."""
  workers = range(description["cell"]["workers"])
  for peer in workers:
    read_nonempty_journal(folder, journal_path(folder, peer))
  spans = live_files.spans_of(folder, workers)
  return live_files.LiveFiles(dict(description), [], spans, [], _rows(folder))


def _replay(
  plan: PeerPlan, cell: Any, folder: Path, description: Description
) -> Recomputed:
  """Replays peers; parameters are the mean over those present at the end."""
  order = _trace(folder, description)
  plan = plan_of_cell(plan, folder, cell.seed)
  replayed = plan.peers(cell.seed, order)
  records = replayed.run(len(order.time))
  states = [replayed.states[i] for i in replayed.present]
  params = simulator.mean_params(states, [*map(plan.peer.weight, states)])
  # Equal means may hide peers that differ, so these have a digest, too.
  digest = storage.digest([state.server.params for state in states])
  return Recomputed(order, records, params, {"peers_sha256": digest})


def _audit(
  plan: PeerPlan, folder: Path, result: Any, failures: Sequence[Failure]
) -> Generator[Finding, None, None]:
  """Yields the findings of a finished cell. The last job of a peer that failed
  may be done by no peer: the result counts such jobs as `missed`."""
  files.read_trace(folder, plan.workers)  # checks all journals
  events = _rows(folder)  # `Failure` counts these rows, too
  records = files.FILES.read_all(folder, plan.workers)
  missed = result["missed"]
  # A peer has at most one open job. No records are returned: only the
  # parameters of a replay are compared.
  yield from worker_findings(events, records, plan, 1, failures, missed)


PROTOCOL = Protocol(
  name="peers",
  participants="peers",
  recipes=algorithms.PEER_RECIPES,
  runners={
    "simulate": Runner(
      plan=peers.plan,
      start=peers.PeerEngine,
      describe=peers.describe,
      check=parameter_server.check,
    ),
    **live.runners(
      live_peers.LivePeerEngine,
      plan=peers.plan,
      describe=live_peers.describe,
    ),
    "mesh": Runner(
      plan=peer_mesh.plan,
      programs=mesh_programs.peer_rounds,
      start=peer_mesh.PeerMeshEngine,
      describe=peer_mesh.describe,
      check=peer_mesh.check,
      devices=peer_mesh.devices,
    ),
  },
  live=LiveCells(
    wrote_folder=_wrote_folder,
    trace=_trace,
    read=_read,
    check=live_peers.check_files,
    rows=_rows,
    replay=_replay,
    audit=_audit,
    parties={"worker": PEER, "shard": COUNTER},
    link_faults="peers send a message once, over a link that loses none",
  ),
  refusals=(
    # Links. Simulated peers and threads have some; none leads to a server.
    Refusal(
      "network",
      "its messages have real times",
      engines=("ray", "mesh"),
    ),
    *(
      Refusal(f"network.{key}", _NO_SERVER, engines=("simulate", "threads"))
      for key in ("port", "service", "incast")
    ),
    Refusal("simulator", "its simulation has one engine"),
    # On a server an idle worker gets the ticket of a late job.
    Refusal(
      "order.name",
      "a copy of a late job needs the parameters of its peer, which no other"
      " peer has: each copy would add two messages to the links that peers wait"
      " for, and in pairs and arrivals no peer is idle",
      'leave it out, or set config.allocation.batch_size="speed"',
      values=("backup_tasks",),
    ),
    # The mean of the first messages needs one decision for all peers.
    Refusal(
      "order.name",
      "without a server each peer would decide alone which messages are late:"
      " if one peer takes a message that another drops, the columns of the"
      " round's weights do not sum to 1, and the mean over peers moves; in"
      " pairs and arrivals no peer waits for a round",
      "leave it out, use ad_psgd, whose peers do not wait for late ones, or use"
      " ssgd on a server",
      values=("backup_workers",),
    ),
    Refusal("memory", "each peer has the complete model, and updates it"),
    # The server itself.
    Refusal("compress_down", _NO_SERVER),
    *(
      Refusal(f"server.{key}", _NO_SERVER)
      for key in ("shards", "consistent", "wire")
    ),
    Refusal("server.delays", _NO_SERVER, engines=("simulate",)),
    Refusal("server.reads", _NO_SERVER, engines=("simulate",)),
    Refusal("server.log", _NO_SERVER, engines=("simulate",)),
    # Keys that divide one model among the devices of a mesh.
    *(
      Refusal(f"mesh.{key}", "each peer has a separate model")
      for key in peer_mesh.ONE_MODEL_KEYS
    ),
  ),
  columns=peers.COLUMNS,
  column="consensus",  # the distance of the peers from their mean
)
