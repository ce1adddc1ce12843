"""From the plan of a live cell of tables to a cluster of threads or actors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd.experiment.engines import live_clusters, networks
from asgd.experiment.engines.tables import TablePlan
from asgd.live import pace
from asgd.live.faults import Fault, Script, append_fault
from asgd.live.hosts import Host, Inside
from asgd.live.links import throttled_hosts
from asgd.live.setup import Setup
from asgd.live.spans import SpanWriter
from asgd.live.tables.cluster import Places, TableCluster
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.orders import protocol
from asgd.tables.division import Division, divide
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker

_CALLS = 4  # of each worker that a shard may have to answer at once


class LiveTables(NamedTuple):
  """What a live cell of tables is made of; a cluster is made of it."""

  plan: TablePlan
  cell: Any  # asgd.experiment.cells.Cell
  folder: Path  # of the cell
  memory: Path  # where its shards keep what outlives them
  began: float  # time.monotonic() when it began, or would have

  @property
  def setup(self) -> Setup:
    """How many workers and jobs there are, and when a worker is late."""
    ladder = live_clusters.ladder(self.plan.run.config["live"])
    plan = self.plan
    return Setup(protocol.Rules(), plan.workers, plan.messages, ladder=ladder)


def first_tables(plan: TablePlan, seed: int) -> dict[str, Any]:
  """Returns the tables of a cell before the first push."""
  key, _ = jax.random.split(jax.random.key(seed))
  return plan.split(jax.device_get(plan.problem.init(key)))


def division_of(plan: TablePlan) -> Division:
  """Returns which shard has which rows; ValueError for more shards than the
  largest table has rows."""
  like = jax.tree.map(lambda x: np.broadcast_to(0.0, x.shape), plan.like)
  like = jax.tree.map(
    lambda x, spec: x.astype(spec.dtype), like, plan.like
  )
  return divide(plan.split(like), plan.settings.shards)


def _shard(plan, seed, folder, memory, index, image, inside: Inside):
  """Makes a shard in its host."""
  tables = first_tables(plan, seed)

  def make():
    division = division_of(plan)
    server = division.server(index, tables, plan.settings, plan.workers)
    return TableShard(index, server)

  every = plan.settings.clock_every
  return ShardHost(
    inside, make, folder, memory, index, every=every, image=image
  )


def _worker(
  plan, seed, folder, memory, faults, index, shards, image, inside: Inside
):
  """Makes a worker in its host."""
  division = division_of(plan)
  settings = plan.run.config["live"]
  _, root = jax.random.split(jax.random.key(seed))

  def make(life, work):
    return TableWorker(
      *(index, life, plan.settings, division, work),
      workers=plan.workers,
      jobs=plan.messages // plan.workers,
      seed=seed,
    )

  script = Script(
    [fault for fault in faults if fault.worker == index],
    kill=inside.kill,
    wait=inside.wait,
    tell=functools.partial(append_fault, folder),
  )
  return WorkerHost(
    inside,
    make,
    plan.work(seed, root),
    JobJournal(
      inside,
      folder,
      index,
      resumes=image is not None,
      span=SpanWriter(folder) if settings["spans"] else None,
      memory=memory,
    ),
    shards=shards,
    script=script,
    slowdown=pace.factor_of(settings["slowdown"], index),
    image=image,
  )


def _cluster(
  live: LiveTables, machine, hosts, places: Places
) -> TableCluster:
  hosts.say = machine.tell
  return TableCluster(
    hosts,
    places,
    live.folder,
    shards=live.plan.settings.shards,
    workers=live.plan.workers,
    ladder=live.setup.ladder,
    refill=live.plan.run.config["live"]["refill"],
  )


def thread_tables(live: LiveTables, machine: Any) -> TableCluster:
  """Builds a cluster of threads."""
  plan, seed, folder = live.plan, live.cell.seed, live.folder

  def shard(index, image):
    return functools.partial(
      _shard, plan, seed, folder, live.memory, index, image
    )

  def worker(index, shards, image):
    return functools.partial(
      *(_worker, plan, seed, folder, live.memory, machine.faults),
      *(index, dict(shards), image),
    )

  section, shards = plan.run.config["network"], plan.settings.shards
  network = networks.from_section(section, shards)
  hosts = throttled_hosts.make_hosts(network, plan.workers, began=live.began)
  return _cluster(live, machine, hosts, Places(shard, worker))


def _remote_shard(make, seed, folder, memory, index, image, inside: Inside):
  return _shard(make(), seed, folder, memory, index, image, inside)


def _remote_worker(
  make: Callable[[], TablePlan],
  seed: int,
  folder: Path,
  memory: Path,
  faults: Sequence[Fault],
  index: int,
  shards: Mapping[int, Host],
  image: bytes | None,
  inside: Inside,
):
  args = make(), seed, folder, memory, faults
  return _worker(*args, index, shards, image, inside)


def ray_tables(
  rebuild: live_clusters.Rebuild, live: LiveTables, machine: Any
) -> TableCluster:
  """Builds a cluster of Ray actors; see `live_clusters.remote_plan`."""
  plan, settings = live.plan, live.plan.run.config["live"]
  make = live_clusters.remote_plan(rebuild, live, plan.dataset, machine)
  seed, folder = live.cell.seed, live.folder.absolute()
  from asgd.live.hosts.actors import ActorHosts

  def shard(index, image):
    return functools.partial(
      _remote_shard, make, seed, folder, live.memory, index, image
    )

  def worker(index, shards, image):
    return functools.partial(
      *(_remote_worker, make, seed, folder, live.memory, machine.faults),
      *(index, dict(shards), image),
    )

  hosts = ActorHosts(
    live_clusters.site(live, live.began, machine),
    resources=live_clusters.resources(settings),
    calls=_CALLS * plan.workers,
  )
  return _cluster(live, machine, hosts, Places(shard, worker))
