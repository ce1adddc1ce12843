"""From the plan of a cell of peers to a cluster of threads or of Ray actors."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.experiment.engines import live_clusters, networks
from asgd.experiment.engines.peers import PeerPlan
from asgd.live.gossip.cluster import PeerCluster, PeerMaker
from asgd.live.gossip.frames import array_wire, packed_wire
from asgd.live.gossip.peer_rows import PeerDuty
from asgd.live.links import throttled_hosts
from asgd.live.setup import Setup
from asgd.live.spans import SpanWriter
from asgd.orders import protocol

_CALLS = 16  # of the driver that a peer may have to answer at once


class LivePeers(NamedTuple):
  """What a live cell of peers is made of; a cluster is made of it."""

  plan: PeerPlan
  cell: Any  # asgd.experiment.cells.Cell
  folder: Path  # of the cell
  memory: Path  # where its processes say who they are
  began: float  # time.monotonic() when it began, or would have
  due: Sequence[int]  # messages after which it is evaluated

  @property
  def setup(self) -> Setup:
    """How many peers and jobs there are, and when a peer is late."""
    ladder = live_clusters.ladder(self.plan.run.config["live"])
    plan = self.plan
    return Setup(protocol.Rules(), plan.workers, plan.messages, ladder=ladder)


def make_duty(
  plan: PeerPlan, cell: Any, due: Sequence[int], *, copies: bool
) -> PeerDuty:
  """Returns what peers do; codes travel as `copies`, to other processes."""
  key, root = jax.random.split(jax.random.key(cell.seed))
  params = jax.device_get(plan.problem.init(key))
  wire = array_wire(copies=copies)
  if plan.gossip.compressed:
    wire = packed_wire(plan.peer, params)
  return PeerDuty(
    plan.gossip,
    plan.peer,
    plan.worker,
    params,
    plan.job_batches(cell.seed),
    root,
    wire,
    frozenset(message // plan.workers for message in due),
    tuple(plan.run.config["live"]["slowdown"]),
  )


def image_template(duty: PeerDuty, notes: dict[str, Any]) -> Any:
  """Returns a tree like that of an image with these notes."""
  state = duty.peer.init(duty.params)
  key = jax.eval_shape(jax.random.key, 0)
  code = jax.eval_shape(
    lambda state, key: duty.peer.put(state, np.float64(1), key)[1], state, key
  )
  code = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), code)
  tree = {"peer": (state, duty.worker.init(duty.params))}
  return tree | {"codes": dict.fromkeys(notes.get("codes", ()), code)}


def _cluster(live: LivePeers, machine: Any, hosts, maker) -> PeerCluster:
  plan, settings = live.plan, live.plan.run.config["live"]
  hosts.say = machine.tell
  return PeerCluster(
    plan.gossip,
    hosts,
    maker,
    messages=plan.messages,
    ladder=live.setup.ladder,
    refill=settings["refill"],
  )


def _maker(live: LivePeers, machine: Any, make_duty, folder, **options):
  settings = live.plan.run.config["live"]
  return PeerMaker(
    make_duty,
    folder,
    live.cell.seed,
    tuple(machine.faults),
    SpanWriter(folder) if settings["spans"] else None,
    **options,
  )


def thread_peers(live: LivePeers, machine: Any) -> PeerCluster:
  """Builds a cluster of threads."""
  duty = make_duty(live.plan, live.cell, live.due, copies=False)
  duty.warm_up_all()
  maker = _maker(live, machine, lambda: duty, live.folder)
  peers = live.plan.workers
  section = live.plan.run.config["network"]
  network = networks.from_section(section, peers)
  if network is not None:  # what a peer receives passes its link down
    network = network._replace(port=network.down)
  hosts = throttled_hosts.make_hosts(network, peers, began=live.began)
  return _cluster(live, machine, hosts, maker)


def _remote_duty(make, cell, due) -> PeerDuty:
  return make_duty(make(), cell, due, copies=True)


def ray_peers(
  rebuild: live_clusters.Rebuild, live: LivePeers, machine: Any
) -> PeerCluster:
  """Builds a cluster of Ray actors; see `live_clusters.remote_plan`."""
  plan, settings = live.plan, live.plan.run.config["live"]
  make = live_clusters.remote_plan(rebuild, live, plan.dataset, machine)
  from asgd.live.hosts.actors import ActorHosts

  hosts = ActorHosts(
    live_clusters.site(live, live.began, machine),
    resources=live_clusters.resources(settings),
    calls=_CALLS + plan.workers,
  )
  duty = functools.partial(_remote_duty, make, live.cell, live.due)
  folder = live.folder.absolute()
  maker = _maker(live, machine, duty, folder, warm_up=True)
  return _cluster(live, machine, hosts, maker)
