"""The engines `threads` and `ray`: real workers, real time, real faults.

What is common to them: their sections of a config, the checks of a machine, and
which driver has the workers, by the recipe of a run: `live_server` of a server,
`live_peers` of peers, `live_batches` of a coordinator, `live_tables` of tables.
"""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asgd import sandblaster
from asgd import tables as tables_lib
from asgd.checks import shown
from asgd.experiment import cells, checks, engines, live_files
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import (
  coordinated,
  live_batches,
  live_clusters,
  live_peers,
  live_server,
  live_tables,
  parameter_server,
  peer_clusters,
  peers,
  server_orders,
  table_clusters,
)
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.ray_runtime import check as check_ray
from asgd.experiment.schema import Run, Setting
from asgd.live import faults
from asgd.live.deadlines import MOST_SECONDS

_SECONDS = checks.number(most=MOST_SECONDS, above=True)


def _resources(value: Any, key: str) -> dict[str, float]:
  """Reads amounts of Ray's resources, by their names."""
  if not isinstance(value, Mapping):
    raise ValueError(
      f"config.{key} must be a dict of names and amounts, not {shown(value)}"
    )
  for name, amount in value.items():
    checks.number(most=10_000, above=True)(amount, f"{key}.{name}")
  return dict(value)


SECTIONS: dict[str, Any] = {
  **parameter_server.SECTIONS,
  "live": {
    # Factors on the time of workers 0, 1, ...; () is none.
    "slowdown": Setting((), checks.several(checks.number(1, 1e4))),
    "refill": Setting(True, checks.flag),  # replace workers that die
    "together": Setting(True, checks.flag),  # wait for all before the first job
    "late_mads": Setting(10.0, _SECONDS),
    "late_seconds": Setting(2.0, _SECONDS),
    "start_seconds": Setting(120.0, _SECONDS),
    "worker_cpus": Setting(0.0, checks.number(most=10_000)),  # for Ray
    "worker_gpus": Setting(0.0, checks.number(most=10_000)),
    "resources": Setting({}, _resources),  # of Ray's other ones, each worker
    "accelerator": Setting(None, checks.optional(checks.text)),  # Ray's type
    "placement": Setting("pack", checks.choice("pack", "spread")),
    # To wait for a cluster that grows until it has what workers ask for.
    "cluster_seconds": Setting(0.0, checks.number(most=MOST_SECONDS)),
    "devices": Setting(1, checks.whole(1, 256)),  # of each worker
    "parallel": Setting("data", checks.choice("data", "tensor")),
    "spans": Setting(False, checks.flag),  # write what workers do when
    # Workers fetch, compute and push in threads; needs order.depth.
    "overlap": Setting(False, checks.flag),
  },
}


def _check(run: Run) -> None:
  """Checks what needs neither data nor a model, of workers and a server or of
  peers."""
  if peers.of_peers(run):
    live_peers.check(run)
    return
  parameter_server.check(run)
  config = run.config
  server, live = config["server"], config["live"]
  if config["compress_down"] is not None and server["wire"] != "float32":
    raise ValueError(
      f"config.compress_down: with config.server.wire {server['wire']!r}"
      " workers get rounded parameters, and those that they rebuild of updates"
      " would not be the server's; leave one of the two out"
    )
  if server["delays"] is not None:
    raise ValueError(
      f"config.server.delays is not for engine {run.engine!r}, whose shards"
      " hear of a message when it comes; leave it out, or use engine 'simulate'"
    )
  if server["consistent"] and server["shards"] > 1 and not server["log"]:
    raise ValueError(
      "config.server.consistent needs a log, or shards that come back would"
      " differ from the others; set config.server.log=16"
    )
  devices, batch = live["devices"], config["batch_size"]
  if live["parallel"] == "data" and batch % devices:
    raise ValueError(
      f"config.live.devices {devices} must divide config.batch_size {batch}, or"
      " each device would do the whole batch; use"
      f" {math.gcd(devices, batch)}, or another batch size"
    )


def _check_kept(plan):
  """A worker that rebuilds parameters of updates needs each of them."""
  if plan.codec_down is not None and server_orders.keeps(plan.order):
    key = "cache" if plan.order.get("cache") else "fetch_every"
    raise ValueError(
      f"config.compress_down is not for live workers that keep tickets ({key}"
      f" of config.runs.{plan.run.label}): they would be sent all parameters"
      " after each message; leave one of the two out, or use engine 'simulate'"
    )


def _plan(experiment: Any, run: Run, workers: int) -> ServerPlan:
  """As `parameter_server.plan`; refuses an order that only a simulation can
  keep, and what cannot be split into shards."""
  result = parameter_server.plan(experiment, run, workers, peers.PeerPlan)
  if peers.of_peers(run):
    live_peers.check_plan(result)
    return result
  _check_kept(result)
  depth = result.rules().depth
  if run.config["live"]["overlap"] and depth < 2:
    raise ValueError(
      f"config.live.overlap needs config.order.depth=2 or more, not {depth}:"
      " tickets that workers hold while they compute"
    )
  if run.config["server"]["shards"] > 1:
    live_clusters.needs_totals(result)
  return result


def check_machine(
  experiment: Any, plans: Sequence[Any], machine: Any, *, ray: bool
) -> None:
  """Checks that a machine has what live cells need."""
  del experiment
  for plan in plans:
    faults.check(machine.faults, plan.workers, plan.messages)
  for plan in plans:
    _driver(plan.run.recipe).check_faults(plan, machine)
  grace, most = machine.grace_seconds, MOST_SECONDS
  if not 0 <= grace <= most:
    raise ValueError(f"--grace_seconds must be 0 to {most:g}, not {grace:g}")
  folder = machine.memory_dir
  flag, remedy = f"--memory_dir={folder}", "in memory, such as /dev/shm, or any"
  if not os.path.isdir(folder):
    raise ValueError(f"{flag} is no folder; use one {remedy} other (slower)")
  try:
    os.rmdir(tempfile.mkdtemp(prefix="asgd-", dir=folder))
  except OSError as error:
    raise ValueError(
      f"{flag}: no folder can be made there ({error.strerror}); use one"
      f" {remedy} other (slower)"
    ) from error
  if ray:
    run = plans[0].run
    of_all = run.config["engine"] == run.engine
    key = "config.engine" if of_all else f"config.runs.{run.label}.engine"
    check_ray(
      machine.address,
      allow_network=machine.allow_network,
      asked=f"{key}=ray",
      instead=f"--{key}=threads",
    )


def _clean(folder: Path) -> None:
  """Removes the memory of a finished cell; ValueError if a trace, its records
  or spans were changed since."""
  memory_lib.forget(folder)
  description = live_files.read_description(folder)
  if live_files.has_tables(description):
    live_tables.check_files(folder, description)
    return
  if live_files.has_peers(folder, description):
    live_peers.check_files(folder)
    return
  live_files.read(folder)


def _rebuild(config: Mapping[str, Any], dataset: Any, cell: cells.Cell) -> Any:
  """Makes the plan of a cell again, in a process of Ray."""
  experiment = cells.build(config, engines={"ray": RAY}, dataset=dataset)
  return experiment.plan(cell)


def _on_ray(make: Callable[..., Any]) -> Callable[..., Any]:
  return functools.partial(make, _rebuild)


def _start(context: engines.Context, *, ray: bool) -> engines.Engine:
  if peers.of_peers(context.plan.run):
    of_ray = _on_ray(peer_clusters.ray_peers)
    make = of_ray if ray else peer_clusters.thread_peers
    return live_peers.LivePeerEngine(context, make)
  of_ray = _on_ray(live_clusters.ray_cluster)
  cluster = of_ray if ray else live_clusters.thread_cluster
  return live_server.LiveEngine(context, cluster)


def _start_batches(context: engines.Context, *, ray: bool) -> engines.Engine:
  of_ray = _on_ray(live_batches.ray_hosts)
  make = of_ray if ray else live_batches.thread_hosts
  return live_batches.LiveBatchEngine(context, make)


def _start_tables(context: engines.Context, *, ray: bool) -> engines.Engine:
  of_ray = _on_ray(table_clusters.ray_tables)
  make = of_ray if ray else table_clusters.thread_tables
  return live_tables.LiveTableEngine(context, make)


def _describe(result: Mapping[str, Any]) -> str:
  if peers.has_peers(result):
    words = peers.describe(result)
    if missed := result["missed"]:
      words += f", {missed} messages missed while peers were gone"
    if lost := result.get("residual_lost"):
      words += f", RMS {lost:.2g} that codecs had kept back lost with peers"
    return words
  return parameter_server.describe(result)


class _Driver(NamedTuple):
  """What drives the workers of a cell, by the recipe of its run."""

  check: Callable[[Run], None]  # what needs neither data nor a model
  plan: Callable[[Any, Run, int], Any]  # experiment, run, workers
  check_faults: Callable[[Any, Any], None]  # plan, machine
  start: Callable[..., engines.Engine]  # context, ray=
  describe: Callable[[Mapping[str, Any]], str]


_COORDINATOR = _Driver(
  live_batches.check,
  coordinated.plan,
  live_batches.check_faults,
  _start_batches,
  live_batches.describe,
)
_ORDER = _Driver(  # of messages to a server, or between peers
  _check, _plan, live_peers.check_faults, _start, _describe
)
_TABLES = _Driver(
  live_tables.check,
  live_tables.plan,
  live_tables.check_faults,
  _start_tables,
  live_tables.describe,
)
_DRIVERS = {
  **dict.fromkeys(sandblaster.RECIPES, _COORDINATOR),
  **dict.fromkeys(tables_lib.RECIPES, _TABLES),
}


def _driver(recipe: str) -> _Driver:
  return _DRIVERS.get(recipe, _ORDER)


def check(run: Run) -> None:
  """Checks what needs neither data nor a model."""
  _driver(run.recipe).check(run)


def plan(experiment: Any, run: Run, workers: int) -> Any:
  """Builds what the cells of a run with so many workers share, checking it."""
  return _driver(run.recipe).plan(experiment, run, workers)


def _kind(*, ray: bool) -> engines.EngineKind:
  return engines.EngineKind(
    sections=SECTIONS,
    settings="live",
    workers=lambda run: run.config["workers"],
    check=check,
    devices=lambda run: run.config["live"]["devices"],
    plan=plan,
    start=lambda context: _driver(context.plan.run.recipe).start(
      context, ray=ray
    ),
    check_machine=functools.partial(check_machine, ray=ray),
    columns=(engines.Column("seconds", "seconds"), *parameter_server.COLUMNS),
    describe=lambda result: _driver(result["recipe"]).describe(result),
    timed=True,
    elsewhere=ray,
    journaled=True,
    clean=_clean,
    served=tuple(_DRIVERS),
  )


THREADS, RAY = _kind(ray=False), _kind(ray=True)
