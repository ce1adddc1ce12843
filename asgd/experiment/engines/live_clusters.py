"""Makes the cluster of a cell with a server from its plan, in any hosts."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, sharding, simulator, transforms
from asgd.checks import shown
from asgd.data import partitions
from asgd.experiment.checks import prefix_errors
from asgd.experiment.engines import allocations, live_hosts, server_orders
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.experiment.engines.parameter_server import ServerPlan, build_recipe
from asgd.live.hosts.site import Site
from asgd.live.links.throttled import ThrottledNetwork
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.slot_formats import contents
from asgd.live.worker_spec import WorkerSpec


class LiveRun(NamedTuple):
  """The inputs from which shards and workers of a live cell are made."""

  plan: ServerPlan
  seed: int
  setup: Setup
  params: Any  # NumPy arrays, before the first message

  @property
  def shard_plan(self) -> sharding.ShardPlan | None:
    """The division of the parameters into shards; None: there is one shard."""
    shards = self.setup.shards
    return sharding.make_plan(self.params, shards) if shards > 1 else None

  @property
  def shard_params(self) -> list[Any]:
    """The parameters of each shard, before the first message."""
    shard_plan = self.shard_plan
    if shard_plan is None:
      return [self.params]
    return sharding.split(shard_plan, self.params)


@functools.lru_cache(maxsize=256)
def needs_totals(plan: ServerPlan) -> bool:
  """Returns whether an algorithm needs totals (sums over all shards, as for a
  norm). Raises ValueError if it cannot be split into shards."""
  server, rules = plan.run.config["server"], plan.rules()
  run, label = plan.run, plan.run.label
  if server_orders.out_of_step(run) and run.config["clip_norm"] is not None:
    _warn_of_clip_norm(plan)
    # Each shard clips its own part, so only the rest of the recipe is checked.
    run = run._replace(config={**run.config, "clip_norm": None})
  # Without the codec of updates: each shard encodes the updates of its part.
  recipe = build_recipe(run, plan.workers, plan.schedule)
  if rules.round and not server["consistent"]:
    raise ValueError(
      f"{label} works in rounds, and without one order for all shards their"
      " rounds would differ after a failure: set"
      " config.server.consistent=True, or config.server.shards=1"
    )
  # Parameters of a fixed seed, so that the result holds for all cells.
  params = jax.device_get(plan.problem.init(jax.random.key(0)))
  with prefix_errors("server", ("shards",)):
    sharding.make_plan(params, server["shards"])
  # A transform of single messages may also read other workers' rows.
  algorithm = transforms.own_statistics(recipe.one_message())
  # [1] Check that shards without totals give the parameters of one server.
  try:
    sharding.probe.check(algorithm, params)
    return False
  except ValueError as error_without_totals:
    # [2] Check the same for shards that exchange totals, such as norms.
    try:
      sharding.probe.check(algorithm, params, totals=True)
    except ValueError:
      # The first error explains more: the second only says that totals do not
      # help.
      raise error_without_totals from None
  if not server["consistent"]:
    raise ValueError(
      f"{label} needs a norm over all shards, and only consistent shards have"
      " the same version: set config.server.consistent=True, or"
      " config.server.shards=1"
    )
  if not plan.server.alone:
    raise ValueError(
      f"{label} needs a norm over all shards, which requires that each message"
      " is an update: drop rounds, gate and averaging, or set"
      " config.server.shards=1"
    )
  return True


def _warn_of_clip_norm(plan: ServerPlan) -> None:
  """Warns that each shard out of step clips by the norm of its part. Raises
  ValueError if workers keep tickets: they would clip by another norm."""
  clip_norm = plan.run.config["clip_norm"]
  if plan.keeps:
    raise ValueError(
      f"config.clip_norm {shown(clip_norm)} clips by a norm for each shard, as"
      " shards out of step have no common one, and a worker that keeps tickets"
      " would clip by the norm of all: set config.server.consistent=True, or"
      " leave out cache and fetch_every"
    )
  warnings.warn(
    f"config.clip_norm {shown(clip_norm)} of {plan.run.label} is a norm for"
    f" each of {plan.run.config['server']['shards']} shards: a shard out of"
    " step clips its part of a message by the norm of that part. With"
    " config.server.consistent=True it is the norm of the complete message",
    stacklevel=3,
  )


def prepare(
  plan: ServerPlan, seed: int, evaluated_messages: Sequence[int]
) -> LiveRun:
  """Returns the inputs of a live cell. Shards store their parameters at
  `evaluated_messages`, for the driver's evaluations."""
  config = plan.run.config
  server, settings = config["server"], config["live"]
  totals = server["shards"] > 1 and needs_totals(plan)
  # One description for all participants, which is pickled to their processes.
  setup = Setup(
    rules=plan.rules(),
    workers=plan.workers,
    jobs=plan.messages,
    shards=server["shards"],
    consistent=server["consistent"] and server["shards"] > 1,
    totals=totals,
    log=server["log"],
    snapshot_seconds=config["checkpoint_seconds"],
    owned=partitions.divides(config["data"]["partition"]),
    ladder=live_hosts.ladder(settings),
    keep_params_at=tuple(evaluated_messages),
    together=settings["together"],
  )
  # `init` uses the first key, and the workers' jobs use the second.
  key, _ = jax.random.split(jax.random.key(seed))
  params = jax.device_get(plan.problem.init(key))
  run = LiveRun(plan, seed, setup, params)
  if totals:  # check now that a shard can compute them
    first_params = run.shard_params[0]  # of shard 0
    steps = simulator.compile_steps(plan.server, None, keeps_messages=True)
    state = simulator.start(plan.server, first_params)
    ticket = steps.send(state, jnp.int32(0))
    message = compression.blank(plan.server.codec, first_params)
    # Shapes alone: an error of `stage` appears before any process starts.
    jax.eval_shape(steps.stage, (), state, ticket, message, np.float32(0))
  return run


def make_spec(run: LiveRun) -> WorkerSpec:
  """Returns the work of a cell's workers."""
  plan, setup, settings = run.plan, run.setup, run.plan.run.config["live"]
  worker = plan.coded_worker(run.shard_plan)
  # `prepare` has used the first half of the same split.
  _, root = jax.random.split(jax.random.key(run.seed))
  return WorkerSpec(
    simulator.compile_work(worker, plan.devices),
    *(worker.init, plan.job_batches(run.seed), root),
    *(run.params, run.shard_plan),
    consistent=setup.consistent,
    depth=setup.rules.depth,
    slowdown=tuple(settings["slowdown"]),
    codec=plan.server.codec,
    codec_down=plan.codec_down,
    overlap=settings["overlap"],
  )


def slot_shares(run: LiveRun) -> list[tuple[Any, ...]]:
  """Returns the contents of each shard's slots; see
  `WorkerSpec.slot_contents`."""
  codec, updates = run.plan.server.codec, run.plan.codec_down is not None
  return [
    contents(codec, params, updates=updates) for params in run.shard_params
  ]


def local_devices(plan: ServerPlan) -> tuple[jax.Device, ...]:
  """Returns the accelerators of this process that its workers share; () if
  there is one device only, or a worker takes several."""
  devices = jax.local_devices()
  # All CPU devices are the same cores.
  is_single = len(devices) == 1 or devices[0].platform == "cpu"
  takes_several = plan.devices.devices > 1
  return () if is_single or takes_several else tuple(devices)


def sent_params(run: LiveRun, images: Sequence[tuple[Any, Any]]) -> Any:
  """Returns the parameters that the shards would send to a worker now."""
  # The parameters that worker 0 would receive, in parts.
  send, shard_plan = jax.jit(run.plan.server.send), run.shard_plan
  params_of_shards = [send(state, np.int32(0)).params for state, _ in images]
  if shard_plan is None:
    return params_of_shards[0]
  return sharding.join(shard_plan, jax.device_get(params_of_shards))


def combine(
  shard_records: Sequence[base.Records],
  shard_plan: sharding.ShardPlan | None,
  params: Any,
) -> base.Records:
  """Returns the records of the lead. If every shard has received a message, its
  row has the report, bytes and residual norm of all shards together."""
  lead = shard_records[0]
  if shard_plan is None or not len(lead.loss):
    return lead
  rows_by_shard = []  # of each shard: (worker, job) -> row
  for records in shard_records:
    pairs = zip(records.worker.tolist(), records.job.tolist(), strict=True)
    rows_by_shard.append({key: row for row, key in enumerate(pairs)})
  job_keys = list(zip(lead.worker.tolist(), lead.job.tolist(), strict=True))
  # Rows of the lead that every shard has, and their index at each shard.
  complete = [
    i
    for i, key in enumerate(job_keys)
    if all(key in row_of_key for row_of_key in rows_by_shard)
  ]
  rows_of_complete = [
    [index[job_keys[i]] for i in complete] for index in rows_by_shard
  ]

  def columns_of_shards(name):
    return [
      getattr(records, name)[i]
      for records, i in zip(shard_records, rows_of_complete, strict=True)
    ]

  fields = zip(*map(columns_of_shards, base.Report._fields), strict=True)
  reports = [base.Report(*columns) for columns in fields]
  sizes = sharding.trained_sizes(shard_plan, params)
  combined = sharding.combine(reports, sizes)._asdict()
  # Copy the columns: the records of the lead must not change.
  columns = {name: column.copy() for name, column in lead._asdict().items()}
  for name in columns.keys() & combined.keys():
    columns[name][complete] = combined[name]
  for name in ("bytes_up", "bytes_down"):
    columns[name][complete] = sum(columns_of_shards(name))
  # RMS over all shards: the mean of the squares, weighted by sizes.
  squares = np.square(columns_of_shards("residual_norm"), dtype=np.float64)
  shares = np.asarray(sizes) / max(sum(sizes), 1)
  columns["residual_norm"][complete] = np.sqrt(shares @ squares)
  return base.Records(**columns)


# allocation -> function that makes a spec in the process of a worker.
_SpecMaker = Callable[[Any], Callable[[], WorkerSpec]]


def _parts_for_threads(
  run: LiveRun, live: LiveCell, hosts: CellHosts
) -> tuple[Site, dict[str, Any], _SpecMaker]:
  """Returns the site of a run, options of `ServerMakers`, and a function that
  makes specs, for hosts that are threads."""

  # The spec is compiled once here, and shared by all threads.
  def spec_maker(allocation: Any) -> Callable[[], WorkerSpec]:
    """Returns the maker of the one spec that all threads share."""
    plan = dataclasses.replace(run.plan, allocation=allocation)
    spec = make_spec(run._replace(plan=plan))
    spec = spec._replace(devices=local_devices(plan))
    spec.warm_up_all(run.setup.workers)
    return lambda: spec

  # `compile_steps` rounds values to the narrow dtype, so that writing them in
  # it loses nothing.
  site, shares = live_hosts.site(live), slot_shares(run)
  steps = simulator.compile_steps(
    run.plan.server, None, wire=site.compress, keeps_messages=True
  )
  options: dict[str, Any] = {"steps": steps}
  if run.plan.network is not None:
    throttled: Any = hosts.hosts  # ThrottledHosts, because there is a network
    options["network"] = ThrottledNetwork(
      throttled.throttle, lambda i: site.open_memory(i, *shares[i], None)
    )
  return site, options, spec_maker


def _parts_for_processes(
  run: LiveRun, live: LiveCell, hosts: CellHosts
) -> tuple[Site, dict[str, Any], _SpecMaker]:
  """Returns the values of `_parts_for_threads` for hosts that are processes."""
  arguments = hosts.make_plan, run.seed, run.setup, run.params
  # partial(partial, f, *parts)(allocation) is partial(f, *parts, allocation),
  # which can be pickled.
  spec_maker = functools.partial(functools.partial, _spec_in_host, *arguments)
  actors: Any = hosts.hosts  # ActorHosts, which is imported with Ray only
  return actors.site, {}, spec_maker


def _server_in_host(make_plan):
  return make_plan().server


def _spec_in_host(make_plan, seed, setup, params, allocation):
  plan = dataclasses.replace(make_plan(), allocation=allocation)
  return make_spec(LiveRun(plan, seed, setup, params))


def make_cluster(
  run: LiveRun,
  live: LiveCell,
  hosts: CellHosts,
  machine: Any,
  *,
  images: Sequence[Any] | None,
  resumed: bool,
) -> ServerCluster:
  """Makes the cluster of a cell.

  If the workers' shares follow from their speeds, which are not known yet, the
  workers are timed first, and the allocation is written to the cell's folder.

  Args:
    run: inputs of shards and workers.
    live: inputs of hosts.
    hosts: the hosts of shards and workers.
    machine: the machine, with the faults to inject.
    images: the image of each shard, from a checkpoint; None: there is none.
    resumed: whether the journals have rows.
  """
  # Threads share the parts made here; processes make their parts themselves.
  make_parts = (
    _parts_for_processes if hosts.are_processes else _parts_for_threads
  )
  site, options, spec_maker = make_parts(run, live, hosts)
  make_server = functools.partial(_server_in_host, hosts.make_plan)
  makers = ServerMakers(
    *(site, make_server, run.shard_params),
    faults=tuple(machine.faults),
    images=images,
    **options,
  )
  cluster = ServerCluster(
    *(run.setup, run.shard_plan, hosts.hosts, makers),
    spec_maker(run.plan.allocation),
    refill=live.settings["refill"],
    resumed=resumed,
    leave_seconds=hosts.leave_seconds,
  )
  if not allocations.awaits_speeds(run.plan):
    return cluster
  with contextlib.ExitStack() as stack:
    # The cluster is closed only if the timing fails: see `pop_all` below.
    stack.callback(cluster.close)
    # Jobs that are timed, of each worker.
    jobs = run.plan.run.config["allocation"]["jobs"]
    # The cluster measures with equal shares, and gets the new ones before its
    # start.
    plan = allocations.with_shares_by_speed(run.plan, cluster.measure(jobs))
    allocations.write(live.folder, plan.allocation)
    cluster.set_spec(spec_maker(plan.allocation))
    stack.pop_all()
  return cluster
