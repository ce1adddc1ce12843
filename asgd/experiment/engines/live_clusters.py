"""From the plan of a cell to a cluster of threads or of Ray processes."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, sharding, simulator, transforms
from asgd.checks import shortened
from asgd.experiment import cells
from asgd.experiment.checks import blame
from asgd.experiment.engines import allocations
from asgd.experiment.engines.parameter_server import ServerPlan, build_recipe
from asgd.live.deadlines import Ladder
from asgd.live.duty import Duty
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.threads import ThreadMakers
from asgd.live.setup import Setup, slot_counts
from asgd.live.shard import ShardStorage
from asgd.live.slots import SharedMemory
from asgd.live.spans import SpanWriter

_CALLS = 8  # of the driver that a shard may have to answer at once
_DEADLINES = "late_mads", "late_seconds", "start_seconds"  # of a Ladder


class LiveRun(NamedTuple):
  """What a live cell is made of; a cluster is made of it."""

  plan: ServerPlan
  cell: Any  # asgd.experiment.cells.Cell
  setup: Setup
  folder: Path  # of the cell
  memory: Path  # shared memory and sockets
  params: Any  # NumPy arrays, before the first message

  @property
  def split(self) -> sharding.ShardPlan | None:
    """How the shards share the parameters; None: there is one shard."""
    shards = self.setup.shards
    return sharding.make_plan(self.params, shards) if shards > 1 else None


def ladder(settings: Mapping[str, Any]) -> Ladder:
  """Returns when a worker is late, as the section `live` says."""
  return Ladder(*(settings[key] for key in _DEADLINES))


def dtype_on_wire(config: Mapping[str, Any]) -> str | None:
  """Returns the dtype to which numbers are rounded on their way, or None."""
  wire = config["server"]["wire"]
  return None if wire == "float32" else wire


def group(plan: ServerPlan) -> simulator.WorkerDevices:
  """Returns the devices of each worker of a cell."""
  live = plan.run.config["live"]
  axis = int(plan.recipe.steps > 1)  # before it, that of a job's batches
  return simulator.WorkerDevices(live["devices"], live["parallel"], axis)


@functools.lru_cache(maxsize=256)
def needs_totals(plan: ServerPlan) -> bool:
  """Returns whether an algorithm, on shards, needs numbers of all of them; what
  cannot be split into shards is refused with ValueError."""
  server, rules = plan.run.config["server"], plan.rules()
  # Not with the codec of updates: each shard has one of its own, of its part.
  recipe = build_recipe(plan.run, plan.workers, plan.schedule)
  label = plan.run.label
  if rules.round and not server["consistent"]:
    raise ValueError(
      f"{label} works in rounds, of which shards with an order of their own"
      " would make different ones after a failure: set"
      " config.server.consistent=True, or config.server.shards=1"
    )
  params = jax.device_get(plan.problem.init(jax.random.key(0)))
  with blame("server", ("shards",)):
    sharding.make_plan(params, server["shards"])
  # A transform of single messages may read other rows, too.
  algorithm = transforms.own_statistics(recipe.one_message())
  try:
    sharding.probe.check(algorithm, params)
    return False
  except ValueError as refused:
    try:
      sharding.probe.check(algorithm, params, totals=True)
    except ValueError:
      raise refused from None
  if not server["consistent"]:
    raise ValueError(
      f"{label} needs a norm over all shards, which are of one version in a"
      " consistent run only: set config.server.consistent=True, or"
      " config.server.shards=1"
    )
  gated = plan.run.config["gate"]["max_staleness"] is not None
  if recipe.every > 1 or recipe.push_every > 1 or gated:
    raise ValueError(
      f"{label} needs a norm over all shards, which works where each message is"
      " an update: without rounds, gate or averaging, or with"
      " config.server.shards=1"
    )
  return True


def prepare(
  plan: ServerPlan, cell: Any, folder: Path, memory: Path, due: Sequence[int]
) -> LiveRun:
  """Says what a live cell is, with the messages at which shards keep parameters
  for the driver, and what its processes share in `memory`."""
  config = plan.run.config
  server, settings = config["server"], config["live"]
  totals = server["shards"] > 1 and needs_totals(plan)
  setup = Setup(
    rules=plan.rules(),
    workers=plan.workers,
    jobs=plan.messages,
    shards=server["shards"],
    consistent=server["consistent"] and server["shards"] > 1,
    totals=totals,
    log=server["log"],
    snapshot_seconds=config["checkpoint_seconds"],
    owned=config["data"]["partition"] == "sharded",
    ladder=ladder(settings),
    keep_params_at=tuple(due),
    together=settings["together"],
  )
  key, _ = jax.random.split(jax.random.key(cell.seed))
  params = jax.device_get(plan.problem.init(key))
  live = LiveRun(plan, cell, setup, folder, memory, params)
  if totals:  # a shard can be asked for them
    piece = parts(live)[0]
    steps = simulator.compile_steps(plan.server, None, keeps_messages=True)
    state = simulator.start(plan.server, piece)
    ticket = steps.send(state, jnp.int32(0))
    message = compression.blank(plan.server.codec, piece)
    jax.eval_shape(steps.stage, (), state, ticket, message, np.float32(0))
  return live


def parts(live: LiveRun) -> list[Any]:
  """Returns the parameters of each shard, before the first message."""
  split = live.split
  return [live.params] if split is None else sharding.split(split, live.params)


def make_duty(live: LiveRun) -> Duty:
  """Returns what the workers of a cell do."""
  plan, setup = live.plan, live.setup
  worker = plan.coded_worker(live.split)
  _, root = jax.random.split(jax.random.key(live.cell.seed))
  return Duty(
    simulator.compile_work(worker, group(plan)),
    worker.init,
    plan.job_batches(live.cell.seed),
    root,
    live.params,
    live.split,
    setup.consistent,
    setup.rules.depth,
    tuple(plan.run.config["live"]["slowdown"]),
    codec=plan.server.codec,
    codec_down=plan.codec_down,
    overlap=plan.run.config["live"]["overlap"],
  )


def local_devices(live: LiveRun) -> tuple[jax.Device, ...]:
  """Returns the accelerators of this process that its workers share; () if one
  is all there is. On a CPU all its devices are the same cores."""
  devices = jax.local_devices()
  alone = len(devices) == 1 or devices[0].platform == "cpu"
  grouped = live.plan.run.config["live"]["devices"] > 1
  return () if alone or grouped else tuple(devices)


def sent_params(live: LiveRun, images: Sequence[tuple[Any, Any]]) -> Any:
  """Returns what a worker would be sent now, of shards as they are."""
  send, split = jax.jit(live.plan.server.send), live.split
  pieces = [send(state, np.int32(0)).params for state, _ in images]
  return sharding.join(split, jax.device_get(pieces)) if split else pieces[0]


def combine(
  parts: Sequence[base.Records], split: sharding.ShardPlan | None, params: Any
) -> base.Records:
  """Makes one table of the shards' records: that of the lead, with the norms of
  the whole where every shard has received the message."""
  lead = parts[0]
  if split is None or not len(lead.loss):
    return lead
  rows = []  # of each shard: (worker, job) -> row
  for part in parts:
    keys = zip(part.worker.tolist(), part.job.tolist(), strict=True)
    rows.append({key: row for row, key in enumerate(keys)})
  keys = list(zip(lead.worker.tolist(), lead.job.tolist(), strict=True))
  whole = [i for i, key in enumerate(keys) if all(key in each for each in rows)]
  at = [[index[keys[i]] for i in whole] for index in rows]

  def of_all(name):
    return [getattr(part, name)[i] for part, i in zip(parts, at, strict=True)]

  reports = zip(*map(of_all, base.Report._fields), strict=True)
  reports = [base.Report(*columns) for columns in reports]
  sizes = sharding.trained_sizes(split, params)
  combined = sharding.combine(reports, sizes)._asdict()
  columns = {name: column.copy() for name, column in lead._asdict().items()}
  for name in columns.keys() & combined.keys():
    columns[name][whole] = combined[name]
  for name in ("bytes_up", "bytes_down"):
    columns[name][whole] = sum(of_all(name))
  squares = np.square(of_all("residual_norm"), dtype=np.float64)
  share = np.asarray(sizes) / max(sum(sizes), 1)
  columns["residual_norm"][whole] = np.sqrt(share @ squares)
  return base.Records(**columns)


def _warm_up(live, duty, steps, states):
  """Compiles before the first ticket is sent, so that no worker is slow, or
  stale, because of that."""
  duty.warm_up_all(live.setup.workers)
  if live.setup.totals:
    return
  for state in states:
    state = jax.tree.map(jnp.array, state)  # it is consumed
    ticket = steps.send(state, jnp.int32(0))
    ticket = ticket._replace(version=np.int32(ticket.version))
    message = compression.blank(live.plan.server.codec, state.params)
    jax.block_until_ready(steps.receive(state, ticket, message, np.float32(0)))


def _allot(live: LiveRun, cluster: Any, duty_of: Callable) -> Any:
  """Returns the cluster of a cell. If its work is to follow from the speed of
  its workers and nothing is known of that, they are timed, what they get is
  written down, and they get it: `duty_of` returns what makes their duty."""
  if not allocations.unknown(live.plan):
    return cluster
  with contextlib.ExitStack() as stack:
    stack.callback(cluster.close)
    jobs = live.plan.run.config["allocation"]["jobs"]
    plan = allocations.by_seconds(live.plan, cluster.measure(jobs))
    allocations.write(live.folder, plan.allocation)
    cluster.assign(duty_of(plan.allocation))
    stack.pop_all()
  return cluster


def thread_cluster(
  live: LiveRun, machine: Any, images: Any, resumed: bool, began: float
) -> ServerCluster:
  """Builds a cluster of threads, with memory that outlives the process."""
  duty = make_duty(live)._replace(devices=local_devices(live))
  wire = dtype_on_wire(live.plan.run.config)
  steps = simulator.compile_steps(
    live.plan.server, None, wire=wire, keeps_messages=True
  )
  pieces = parts(live)
  states = [simulator.start(live.plan.server, piece) for piece in pieces]
  _warm_up(live, duty, steps, states)
  settings = live.plan.run.config["live"]
  counts, stores = slot_counts(live.setup), []
  for i, (like, state) in enumerate(zip(duty.shares(), states, strict=True)):
    # Values are rounded where they are made (`compile_steps`), so that what is
    # written in the narrow dtype comes back as it was.
    folder, trees = live.memory / f"shard-{i}", (*like, state)
    memory = SharedMemory(folder, counts, trees, compress=wire)
    image = images[i] if images else None
    stores.append(ShardStorage.open(live.folder, i, memory, image))
  makers = ThreadMakers(
    *(live.setup, steps, states, stores),
    faults=machine.faults,
    span=SpanWriter(live.folder) if settings["spans"] else None,
    network=live.plan.network,
  )
  hosts = ThreadHosts(began=began)
  hosts.say = machine.tell
  cluster = ServerCluster(
    *(live.setup, live.split, hosts, makers, lambda: duty),
    refill=settings["refill"],
    resumed=resumed,
  )

  def duty_of(allocation):
    plan = dataclasses.replace(live.plan, allocation=allocation)
    allotted = make_duty(live._replace(plan=plan))
    allotted = allotted._replace(devices=duty.devices)
    allotted.warm_up_all(live.setup.workers)
    return lambda: allotted

  return _allot(live, cluster, duty_of)


Rebuild = Callable[[Mapping[str, Any], Any, Any], Any]


def remote_plan(
  rebuild: Rebuild, live: Any, dataset: Any, machine: Any
) -> Callable[[], Any]:
  """Returns a function that makes the plan of a live cell in another process.

  Args:
    rebuild: (config, dataset, cell) -> plan, a function of a module, which the
      other process imports.
    live: the `LiveRun` of the cell, or that of another kind of run.
    dataset: of the experiment; Ray's object store keeps it.
    machine: whose Ray is started, unless it runs already.
  """
  config = cells.only(live.plan.run, live.cell)
  shared = machine.share(dataset)
  return functools.partial(make_plan, rebuild, config, shared, live.cell)


def make_plan(
  rebuild: Rebuild, config: Mapping[str, Any], dataset: Any, cell: Any
) -> Any:
  """Makes the plan of a cell in a process that received config and data."""
  import ray

  if isinstance(dataset, ray.ObjectRef):
    try:
      dataset = ray.get(dataset)  # an error if the driver, who has it, died
    except ray.exceptions.RaySystemError as error:  # it cannot be unpickled
      line = shortened(str(error).strip().splitlines()[-1], 200)
      raise ValueError(
        f"functions or data cannot be read in another process ({line}): their"
        " modules must be importable there: put their folder on PYTHONPATH"
        " before Ray starts, or define them in the script that is run"
      ) from error
  return rebuild(config, dataset, cell)


def _remote_server(make):
  return make().server


def _remote_duty(make, cell, setup, params, allocation):
  plan = dataclasses.replace(make(), allocation=allocation)
  return make_duty(LiveRun(plan, cell, setup, None, None, params))


_PLACEMENT = {"pack": "DEFAULT", "spread": "SPREAD"}  # as Ray has them


def resources(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what Ray is asked for each worker, as the section `live` says."""
  return {
    "num_cpus": settings["worker_cpus"],
    "num_gpus": settings["worker_gpus"],
    "resources": settings["resources"],
    "accelerator_type": settings["accelerator"],
    "scheduling_strategy": _PLACEMENT[settings["placement"]],
  }


def site(live: Any, began: float, machine: Any) -> Any:
  """Returns the `Site` of a live cell: plan, setup, folder and memory."""
  from asgd.live.hosts.site import Site

  settings = live.plan.run.config["live"]
  # What was not reserved is left to others: JAX would take most of the memory
  # of a GPU that it sees.
  accelerated = settings["worker_gpus"] or settings["accelerator"]
  accelerated = accelerated or "TPU" in settings["resources"]
  return Site(
    live.setup,
    str(live.folder.absolute()),
    str(live.memory),
    began,
    spans=settings["spans"],
    devices=settings["devices"],
    platform=None if accelerated else "cpu",
    gpus=settings["worker_gpus"],
    cluster_seconds=settings["cluster_seconds"],
    profile=machine.profile and str(Path(machine.profile).absolute()),
  )


def ray_cluster(
  rebuild: Rebuild,
  live: LiveRun,
  machine: Any,
  images: Any,
  resumed: bool,
  began: float,
) -> ServerCluster:
  """Builds a cluster of Ray actors; see `remote_plan`."""
  config = live.plan.run.config
  settings = config["live"]
  # Which starts Ray.
  make = remote_plan(rebuild, live, live.plan.dataset, machine)
  from asgd.live.hosts.actors import ActorHosts
  from asgd.live.server.processes import ProcessMakers

  where = site(live, began, machine)
  hosts = ActorHosts(
    where._replace(compress=dtype_on_wire(config)),
    resources=resources(settings),
    calls=_CALLS + 2 * live.setup.workers,
  )
  hosts.say = machine.tell
  make_server = functools.partial(_remote_server, make)
  makers = ProcessMakers(
    *(hosts.site, make_server, parts(live)),
    faults=machine.faults,
    images=images,
  )
  duty_of = functools.partial(
    *(functools.partial, _remote_duty, make),
    *(live.cell, live.setup, live.params),
  )
  cluster = ServerCluster(
    *(live.setup, live.split, hosts, makers, duty_of(live.plan.allocation)),
    refill=settings["refill"],
    resumed=resumed,
    leave_seconds=_leave_seconds(where),
  )
  return _allot(live, cluster, duty_of)


def _leave_seconds(where):
  """Seconds that processes get to write what they did, once all is done."""
  if where.profile:
    return 60.0
  return 10.0 if where.spans else 2.0
