"""The engines `threads` and `ray`: real workers, real time, real faults.

This module has their sections of a config, and the checks of a machine.
`live_engine.LiveEngine` trains a cell. Each protocol has a subclass:
`live_server`, `live_peers`, `live_batches` (coordinator), `live_tables`.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd.checks import shown
from asgd.experiment import cells, checks, engines, live_files, protocol
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import (
  by_protocol,
  live_hosts,
  parameter_server,
  server_results,
  worker_devices,
)
from asgd.experiment.ray_runtime import check as check_ray
from asgd.experiment.schema import Run, Setting
from asgd.live import faults
from asgd.live.deadlines import MOST_SECONDS

_SECONDS_CHECK = checks.number(most=MOST_SECONDS, above=True)


@checks.with_schema(type="object")
def _resources(value: Any, key: str) -> dict[str, float]:
  """Checks amounts of Ray's resources, by name."""
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
    # Factors on the time of workers 0, 1, ...; (): no worker is slowed down.
    "slowdown": Setting((), checks.several(checks.number(1, 1e4))),
    "refill": Setting(True, checks.flag),  # replace workers that fail
    # Start the first job when all workers have joined.
    "together": Setting(True, checks.flag),
    # A job is late after its median time and this many MADs (median absolute
    # deviations), and at least `late_seconds`.
    "late_mads": Setting(10.0, _SECONDS_CHECK),
    "late_seconds": Setting(2.0, _SECONDS_CHECK),
    # From the start of the hosts until all workers have joined.
    "start_seconds": Setting(120.0, _SECONDS_CHECK),
    "worker_cpus": Setting(0.0, checks.number(most=10_000)),  # for Ray
    "worker_gpus": Setting(0.0, checks.number(most=10_000)),
    "resources": Setting({}, _resources),  # other resources of Ray, per worker
    "accelerator": Setting(None, checks.optional(checks.text)),  # Ray's type
    "placement": Setting("pack", checks.choice("pack", "spread")),
    # Time to wait until a growing cluster has the workers' resources.
    "cluster_seconds": Setting(0.0, checks.number(most=MOST_SECONDS)),
    "devices": Setting(1, checks.whole_number(1, 256)),  # of each worker
    "parallel": Setting("data", checks.choice("data", "tensor")),
    "spans": Setting(False, checks.flag),  # write times of the workers' steps
    # Workers fetch, compute and push in threads; needs order.depth.
    "overlap": Setting(False, checks.flag),
  },
}


def check_machine(
  experiment: Any, plans: Sequence[Any], machine: Any, *, ray: bool
) -> None:
  """Raises ValueError if a machine or its flags do not fit live cells."""
  del experiment
  # [1] Faults of the command line, against each plan.
  for plan in plans:
    faults.check(machine.faults, plan.workers, plan.messages)
  for plan in plans:
    refusal = protocol.of(plan.run).live.link_faults
    for fault in machine.faults:
      if refusal and fault.kind in faults.LINK_FAULTS:
        raise ValueError(
          f"--fault={fault.kind}:{fault.worker}:{fault.seq}: {refusal}; use"
          " kill, hang, slow or nan"
        )
  # [2] The seconds that live workers have to end their jobs after a signal.
  grace, max_seconds = machine.grace_seconds, MOST_SECONDS
  if not 0 <= grace <= max_seconds:
    raise ValueError(
      f"--grace_seconds must be 0 to {max_seconds:g}, not {grace:g}"
    )
  # [3] The folder of shared memory. A trial shows whether this user may write.
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
  # [4] Ray itself, last: the check may take seconds.
  if ray:
    run = plans[0].run
    # The error names the key that chose Ray.
    is_config_key = run.config["engine"] == run.engine
    key = (
      "config.engine" if is_config_key else f"config.runs.{run.label}.engine"
    )
    check_ray(
      machine.address,
      allow_network=machine.allow_network,
      setting=f"{key}=ray",
      alternative=f"--{key}=threads",
    )


def _clean(folder: Path) -> None:
  """Removes the memory of a finished cell. Raises ValueError if a file of the
  cell was changed since."""
  # A kill right after the end of a cell leaves its memory.
  memory_lib.remove_leftover(folder)
  description = live_files.read_description(folder)
  protocol.of_cell(folder, description).live.check(folder, description)


def rebuild_plan(
  config: Mapping[str, Any], dataset: Any, cell: cells.Cell
) -> Any:
  """Rebuilds the plan of a cell in a process of Ray."""
  # `dataset` is from Ray's object store: it is not loaded again.
  experiment = cells.build(config, engines={"ray": RAY}, dataset=dataset)
  return experiment.plan(cell)


def runners(
  make_engine: Callable[..., engines.Engine],
  *,
  check: Callable[[Run], None] = parameter_server.check,
  **fields: Any,
) -> dict[str, protocol.Runner]:
  """Returns the runners of a protocol for threads and Ray.

  Args:
    make_engine: (Context, live_hosts.MakeHosts) -> a LiveEngine.
    check: of the Runner, which also checks the devices of workers.
    **fields: of the Runner, except `start` and `devices`.
  """

  def check_run(run):
    check(run)
    worker_devices.check(run)

  def runner(make_hosts):
    def start(context):
      return make_engine(context, make_hosts)

    return protocol.Runner(
      start=start,
      check=check_run,
      devices=lambda run: run.config["live"]["devices"],
      **fields,
    )

  # A process of Ray can import `rebuild_plan`, as it is a module's function.
  ray_hosts = functools.partial(live_hosts.ray_hosts, rebuild_plan)
  return {"threads": runner(live_hosts.thread_hosts), "ray": runner(ray_hosts)}


def _live_engine_kind(name: str, *, ray: bool) -> engines.EngineKind:
  """Returns the EngineKind of live cells; `ray` selects processes of Ray."""
  return by_protocol.engine_kind(
    name,
    sections=SECTIONS,
    settings="live",
    check_machine=functools.partial(check_machine, ray=ray),
    columns=(engines.Column("seconds", "seconds"), *server_results.COLUMNS),
    timed=True,
    in_other_processes=ray,  # the work is done by Ray's processes
    journaled=True,
    clean=_clean,
  )


THREADS = _live_engine_kind("threads", ray=False)
RAY = _live_engine_kind("ray", ray=True)
