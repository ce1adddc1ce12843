"""Trains the runs of a config, on any engine, and compares them.

  asgd train --config=configs/digits.py
  asgd train --config=configs/digits.py --engine=threads \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0
  asgd train --config=configs/compare_engines.py

The same command with the same folder resumes where it stopped: after Ctrl-C, a
kill or a requeued job. Runs, numbers of workers and seeds may be added to an
experiment that has begun; the folder of another experiment is refused. The exit
status is 3 if a requested cell has no valid result at the end: another command
is training it, or messages of a live cell are missing because workers or peers
exited. The last line names the cell.

Simulated cells are independent. --jobs=N trains N at once (default: one for
each core), and --jobs=ray trains them as tasks of a Ray cluster. --cells=I/N
trains a share of them, for commands on several machines with one --workdir.
Live runs, pipelines and meshes are timed, so their cells are trained one after
the other.

With --num_processes=N a mesh's devices are divided over N processes of this
machine. On several machines, start the same command on each with
--num_processes, --process_id and --coordinator=HOST_OF_0:PORT. Under Slurm (and
other launchers that JAX knows) --coordinator=auto is enough.

  asgd train --list

lists recipes, schedules, engines, models and datasets with their options.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re

import jax
import numpy as np

from asgd.experiment import (
  boards,
  build,
  code,
  dry_run,
  folder,
  jobs,
  provenance,
  report,
  storage,
)
from asgd.experiment.engines import mesh_plan
from asgd.experiment.machine import Machine
from asgd.experiment.progress import ProgressBar, Silent
from asgd.experiment.signals import Signals
from asgd.live import faults as faults_lib
from asgd.parallel import processes, supervisor

from . import compiled, flags

_F = flags.define("train")


def _jobs() -> int | str:
  """Returns --jobs: "auto", "ray" or a number."""
  text = _F["jobs"].value
  if _F["profile"].value and text not in ("auto", "1"):
    raise ValueError(
      f"--profile traces this process, but --jobs={text} trains in others: drop"
      " one of the two"
    )
  if text in ("auto", "ray"):
    return text
  if not text.isdecimal() or not 0 < int(text) <= 1024:
    raise ValueError(
      f"--jobs must be auto, ray, or a number from 1 to 1024, not {text!r}"
    )
  return int(text)


def _share() -> tuple[int, int]:
  """Returns --cells=I/N as (I - 1, N)."""
  text = _F["cells"].value
  match = re.fullmatch(r"(\d+)/(\d+)", text)
  if match is None or not 1 <= int(match[1]) <= int(match[2]):
    raise ValueError(
      f"--cells must be I/N with I from 1 to N, such as 2/4, not {text!r}"
    )
  return int(match[1]) - 1, int(match[2])


def _check_mesh_only(runs, role):
  """Raises ValueError if several processes would train another engine."""
  for run in runs.values():
    if role.count != 1 and run.engine != "mesh":
      raise ValueError(
          f"--num_processes={role.count} is for engine mesh, but"
          f" config.runs.{run.label} has engine {run.engine}: choose runs with"
          " --config.only, or add --engine=mesh"
      )


def _start_float64(runs):
  """Enables float64 in JAX if meshes need it. It holds for the process."""
  sections = (run.config.get("mesh", {}) for run in runs.values())
  double = {mesh.get("precision") == mesh_plan.DOUBLE for mesh in sections}
  if len(double) > 1:
    raise ValueError(
      f"config.mesh.precision {mesh_plan.DOUBLE} must be that of all runs of a"
      " command, and others differ: choose runs with --config.only"
    )
  if True in double:
    jax.config.update("jax_enable_x64", True)


def _keep_off_accelerators(runs):
  """Keeps a driver of Ray workers on the CPU, unless JAX_PLATFORMS is set. On a
  GPU, JAX would take most of the memory that the workers need."""
  on_ray = all(run.engine == "ray" for run in runs.values())
  if on_ray and not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")


_USERS = {  # flag -> engines that use it
  "address": ("ray",),
  "fault": flags.LIVE,
  "processes": ("pipeline",),
  "gpus_per_process": ("pipeline",),
  "spans": ("pipeline",),
}
_ON_RAY = " (--jobs=ray for simulations, --processes=N for pipelines)"


def _check_used(runs):
  """Raises ValueError for flags that no engine of these runs uses."""
  engines = {run.engine for run in runs.values()}
  stages = "pipeline" in engines and _F["processes"].value
  on_ray = stages or _F["jobs"].value == "ray"  # both use Ray on any engine
  for name, users in _USERS.items():
    used = engines & set(users) or (name == "address" and on_ray)
    if _F[name].value and not used:
      raise ValueError(
        f"--{name} is for engine {' or '.join(users)}, but no run here uses"
        f" it: add --engine={users[0]}{_ON_RAY if name == 'address' else ''},"
        f" or drop --{name}"
      )


def _open(resolved):
  """Returns (experiment, its folder, machine). The folder is opened, but only
  by process 0; it is None in the others."""
  make = functools.partial(
    build, resolved, engines=flags.ENGINES, data_dir=_F["data_dir"].value
  )
  # All processes of a mesh build the same experiment.
  experiment = processes.fail_together(make)
  text = json.dumps(experiment.config, sort_keys=True)
  content = [np.frombuffer(text.encode(), np.uint8)]
  # Fail now if the processes were started with different flags or data.
  processes.check_same("config", storage.digest(content))
  processes.check_same("dataset", experiment.dataset_identity["sha256"])
  faults = [faults_lib.parse(text) for text in _F["fault"].value]
  own = {field.name for field in dataclasses.fields(Machine)} & _F.keys()
  where = Machine(faults=faults, **{name: _F[name].value for name in own})
  where.address = where.address or os.environ.get("RAY_ADDRESS")
  where.modules = code.to_send(code.describe(experiment.config))
  experiment.check_machine(where)

  given, name = _F["workdir"].value, flags.config_name()
  workdir = processes.fail_together(
    lambda: (
      folder.open_folder(given, name, experiment)
      if processes.is_first()
      else None
    )
  )
  if workdir is not None:
    # A resumed run keeps the measurements that its orders were made of.
    stored = folder.read_measurements(workdir)
    if stored is not None and stored != experiment.measurements:
      # Orders of a resumed run are made of the stored measurements.
      experiment = make(measurements=stored)
    print(f"data: {experiment.dataset.source}\nresults go to {workdir}")
  return experiment, workdir, where


def _train(resolved, crew=None) -> None:
  """Trains this command's cells, and writes the report at the end."""
  if _F["dry_run"].value:
    _dry_run(resolved)
    return
  experiment, workdir, where = _open(resolved)
  if where.profile:  # fail now if the folder cannot be made
    os.makedirs(where.profile, exist_ok=True)
  signals, count = Signals(prints=workdir is not None), _jobs()
  cells = jobs.share(experiment.cells, *_share())
  if count == "auto":  # JAX has initialised its devices by now
    count = 1 if where.profile else jobs.default_jobs()
  total = sum(experiment.plan(c).messages for c in cells)
  bar, naming = Silent(), contextlib.nullcontext()
  if workdir is not None:
    bar = ProgressBar(
      total,
      describe=lambda name, row: flags.ENGINES[name].describe(row),
      quiet=flags.is_quiet(),
    )
    naming = storage.naming_folder(workdir, trains=True)
  with naming, report.at_the_end(workdir, experiment, bar):
    try:
      jobs.train_all(
        experiment,
        workdir,
        bar=bar,
        machine=where,
        jobs=count,
        cells=cells,
        signals=signals,
        data_dir=_F["data_dir"].value,
        crew=crew,
      )
    finally:
      bar.close()
      where.close()
      if workdir is not None:
        _publish(experiment, workdir)


def _publish(experiment, workdir) -> None:
  """Passes the results of the finished cells to --json."""
  results = folder.read_results(workdir)
  names = {cell.name for cell in experiment.cells}
  flags.publish(
    workdir=str(workdir),
    report=str(workdir / "report.html"),
    cells=[row for row in results if row["cell"] in names],
    missing=sorted(names - {row["cell"] for row in results}),
  )


def _dry_run(resolved) -> None:
  """Prints the cells, messages and minutes of this command."""
  experiment = build(
    resolved, engines=flags.ENGINES, data_dir=_F["data_dir"].value
  )
  cells, count = jobs.share(experiment.cells, *_share()), _jobs()
  found = dry_run.rows(experiment, cells, Machine())
  count = count if isinstance(count, int) else jobs.default_jobs()
  print(dry_run.describe(found, count))
  flags.publish(dry_run=found)


def _crew(runs) -> jobs.Crew:
  """Starts the processes that train cells at once. They inherit the imports of
  this one; there are none if one cell is trained at a time."""
  count = provenance.cores() if _jobs() == "auto" else _jobs()
  if count == "ray" or _F["profile"].value or _F["dry_run"].value:
    count = 1
  return jobs.start_crew(runs.values(), flags.ENGINES, count)


def main() -> None:
  """Trains as the flags describe."""
  of_role = "num_processes", "process_id", "coordinator", "start_seconds"
  role = processes.role(*(_F[name].value for name in of_role))
  # [1] Read the config, and check the flags against it.
  resolved = flags.load_config("configs/digits.py", _F["engine"].value)
  runs = resolved.runs
  if _F["compile"].value is not None:
    _start_float64(runs)
    compiled.main(resolved, _F["compile"].value, _F["data_dir"].value)
    return
  _check_mesh_only(runs, role)
  _check_used(runs)
  boards.ask(_F["wandb"].value)
  _jobs(), _share()  # check these flags before anything is written
  _start_float64(runs)
  _keep_off_accelerators(runs)
  # [2] Find the role of this process in a mesh.
  devices = None
  if role.count != 1:
    for run in runs.values():
      mesh_plan.check(run)
    devices = max(mesh_plan.devices_of(run) or 1 for run in runs.values())
  # [3] The first command starts N processes and only watches them.
  if role.supervises:
    processes.devices_of_each(devices, role.count)
    supervisor.supervise(role.count)
    return
  if role.count == 1 and not role.auto:
    with contextlib.closing(_crew(runs)) as crew:
      _train(resolved, crew)
    return
  # [4] A process of a mesh joins the others, then trains its part.
  processes.join(role, devices)
  try:
    _train(resolved)
  except jax.errors.JaxRuntimeError as error:
    line = " ".join(str(error).split())[:200]
    raise ValueError(
        "another process has exited or cannot be reached; run the same command"
        f" again to resume from the last save ({line})"
    ) from error


if __name__ == "__main__":
  processes.run(lambda: flags.run(main, "train"))
