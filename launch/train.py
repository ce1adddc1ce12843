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
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from asgd.experiment import (
  boards,
  build,
  cells,
  code,
  dry_run,
  folder,
  jobs,
  provenance,
  report,
  schema,
  storage,
)
from asgd.experiment.engines import mesh_plan
from asgd.experiment.machine import Machine
from asgd.experiment.progress import ProgressBar, Silent
from asgd.experiment.signals import Signals
from asgd.live import faults as faults_lib
from asgd.parallel import processes, supervisor

from . import compiled, flags

_FLAGS = flags.define("train")


def _jobs() -> int | str:
  """Returns --jobs: "auto", "ray" or a number."""
  text = _FLAGS["jobs"].value
  # A profile of this process would miss the work of the others.
  if _FLAGS["profile"].value and text not in ("auto", "1"):
    raise ValueError(
      f"--profile traces this process, but --jobs={text} trains in others: drop"
      " one of the two"
    )
  if text in ("auto", "ray"):
    return text
  # More than 1024 processes are a misprint.
  if not text.isdecimal() or not 0 < int(text) <= 1024:
    raise ValueError(
      f"--jobs must be auto, ray, or a number from 1 to 1024, not {text!r}"
    )
  return int(text)


def _share_of_cells() -> tuple[int, int]:
  """Returns --cells=I/N as (I - 1, N)."""
  text = _FLAGS["cells"].value
  match = re.fullmatch(r"(\d+)/(\d+)", text)
  if match is None or not 1 <= int(match[1]) <= int(match[2]):
    raise ValueError(
      f"--cells must be I/N with I from 1 to N, such as 2/4, not {text!r}"
    )
  return int(match[1]) - 1, int(match[2])


def _check_mesh_only(
  runs: Mapping[str, schema.Run], role: processes.ProcessRole
) -> None:
  """Raises ValueError if several processes would train another engine."""
  for run in runs.values():
    if role.count != 1 and run.engine != "mesh":
      raise ValueError(
          f"--num_processes={role.count} is for engine mesh, but"
          f" config.runs.{run.label} has engine {run.engine}: choose runs with"
          " --config.only, or add --engine=mesh"
      )


def _start_float64(runs: Mapping[str, schema.Run]) -> None:
  """Enables float64 in JAX if meshes need it. It holds for the process."""
  sections = (run.config.get("mesh", {}) for run in runs.values())
  needs_float64 = {
    mesh.get("precision") == mesh_plan.DOUBLE for mesh in sections
  }
  if len(needs_float64) > 1:
    raise ValueError(
      f"config.mesh.precision {mesh_plan.DOUBLE} must be that of all runs of a"
      " command, and others differ: choose runs with --config.only"
    )
  if True in needs_float64:
    jax.config.update("jax_enable_x64", True)


def _keep_off_accelerators(runs: Mapping[str, schema.Run]) -> None:
  """Keeps a driver of Ray workers on the CPU, unless JAX_PLATFORMS is set. On a
  GPU, JAX would take most of the memory that the workers need."""
  on_ray = all(run.engine == "ray" for run in runs.values())
  if on_ray and not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", "cpu")


# flag -> the engines that use it. A flag that no run uses is an error, because
# it would be ignored in silence.
_USED_BY = {
  "address": ("ray",),
  "fault": flags.LIVE,
  "processes": ("pipeline",),
  "gpus_per_process": ("pipeline",),
  "spans": ("pipeline",),
}
_ON_RAY = " (--jobs=ray for simulations, --processes=N for pipelines)"


def _check_used(runs: Mapping[str, schema.Run]) -> None:
  """Raises ValueError for flags that no engine of these runs uses."""
  engines = {run.engine for run in runs.values()}
  stages = "pipeline" in engines and _FLAGS["processes"].value
  on_ray = stages or _FLAGS["jobs"].value == "ray"  # both use Ray on any engine
  for name, users in _USED_BY.items():
    is_used = engines & set(users) or (name == "address" and on_ray)
    if _FLAGS[name].value and not is_used:
      raise ValueError(
        f"--{name} is for engine {' or '.join(users)}, but no run here uses"
        f" it: add --engine={users[0]}{_ON_RAY if name == 'address' else ''},"
        f" or drop --{name}"
      )


def _open_experiment(
  resolved: schema.Resolved,
) -> tuple[cells.Experiment, Path | None, Machine]:
  """Returns (experiment, its folder, machine). The folder is opened, but only
  by process 0; it is None in the others."""
  make = functools.partial(
    build, resolved, engines=flags.ENGINES, data_dir=_FLAGS["data_dir"].value
  )
  # [1] The experiment. All processes of a mesh build the same one.
  experiment = processes.fail_together(make)
  # Compare digests, not the texts: processes exchange fixed sizes.
  text = json.dumps(experiment.config, sort_keys=True)
  content = [np.frombuffer(text.encode(), np.uint8)]
  # Fail now if the processes were started with different flags or data.
  processes.check_same("config", storage.digest(content))
  processes.check_same("dataset", experiment.dataset_identity["sha256"])
  # [2] The machine, with the fields that are flags of this command.
  faults = [faults_lib.parse(text) for text in _FLAGS["fault"].value]
  fields = {field.name for field in dataclasses.fields(Machine)}
  options = {name: _FLAGS[name].value for name in fields & _FLAGS.keys()}
  machine = Machine(faults=faults, **options)
  machine.address = machine.address or os.environ.get("RAY_ADDRESS")
  # Workers on other nodes import the user's modules from this list.
  machine.modules = code.files_to_send(code.describe(experiment.config))
  experiment.check_machine(machine)

  # [3] The folder. One process opens it; an error there ends all of them.
  requested, name = _FLAGS["workdir"].value, flags.config_name()
  workdir = processes.fail_together(
    lambda: (
      folder.open_folder(requested, name, experiment)
      if processes.is_first()
      else None
    )
  )
  if workdir is not None:
    # A resumed run keeps the measurements that its orders were made of.
    stored = folder.read_measurements(workdir)
    if stored is not None and stored != experiment.measurements:
      experiment = make(measurements=stored)
    print(f"data: {experiment.dataset.source}\nresults go to {workdir}")
  return experiment, workdir, machine


def _announce(runs: Mapping[str, schema.Run]) -> None:
  """Prints the cells and their folder, before data are read and programs
  compiled. `_open_experiment` prints the exact folder, which depends on the
  data."""
  n_cells = sum(
    len(flags.ENGINES[run.engine].workers(run)) * len(run.config["seeds"])
    for run in runs.values()
  )
  engines = ", ".join(dict.fromkeys(run.engine for run in runs.values()))
  name, share = flags.config_name(), _FLAGS["cells"].value
  share_text = (
    "" if share == "1/1" else f", of which this command trains {share},"
  )
  folder_text = _FLAGS["workdir"].value or f"runs/{name}-NNN"
  print(
    f"training {name}: {n_cells} cell{'s' * (n_cells != 1)} of {len(runs)}"
    f" run{'s' * (len(runs) != 1)} on {engines}{share_text} in {folder_text}"
  )


def _train(
  resolved: schema.Resolved, crew: jobs.Crew | None = None
) -> None:
  """Trains this command's cells, and writes the report at the end."""
  if _FLAGS["dry_run"].value:
    _dry_run(resolved)
    return
  experiment, workdir, machine = _open_experiment(resolved)
  if machine.profile:  # fail now if the folder cannot be made
    os.makedirs(machine.profile, exist_ok=True)
  # Only the process with the folder prints that it was asked to stop.
  signals, cells_at_once = Signals(prints=workdir is not None), _jobs()
  own_cells = jobs.cells_of_command(experiment.cells, *_share_of_cells())
  # `default_jobs` asks JAX for its devices, so this cannot be known earlier.
  if cells_at_once == "auto":
    cells_at_once = 1 if machine.profile else jobs.default_jobs()
  n_messages = sum(experiment.plan(c).messages for c in own_cells)
  bar: ProgressBar | Silent = Silent()
  if workdir is not None:
    bar = ProgressBar(
      n_messages,
      describe=lambda name, row: flags.ENGINES[name].describe(row),
      quiet=flags.is_quiet(),
    )
  # The report is written also after an error or a stop, from all finished
  # cells.
  with report.report_at_end(workdir, experiment, bar):
    try:
      finished = jobs.train_all(
        experiment,
        workdir,
        bar=bar,
        machine=machine,
        jobs=cells_at_once,
        cells=own_cells,
        signals=signals,
        data_dir=_FLAGS["data_dir"].value,
        crew=crew,
      )
      if workdir is not None and len(finished) == len(own_cells):
        print(
          f"all {len(own_cells)} cells had finished already, and nothing was"
          " trained: for a new run give another --workdir"
        )
    finally:
      bar.close()
      machine.close()
      if workdir is not None:
        # --json has the finished cells, whatever ended the training.
        _publish(experiment, workdir)


def _publish(experiment: cells.Experiment, workdir: Path) -> None:
  """Passes the results of the finished cells to --json."""
  results = folder.read_results(workdir)
  # The folder may have cells of other commands.
  names = {cell.name for cell in experiment.cells}
  flags.add_json(
    workdir=str(workdir),
    report=str(workdir / "report.html"),
    cells=[row for row in results if row["cell"] in names],
    missing=sorted(names - {row["cell"] for row in results}),
  )


def _dry_run(resolved: schema.Resolved) -> None:
  """Prints the cells, messages and time of this command."""
  experiment = build(
    resolved, engines=flags.ENGINES, data_dir=_FLAGS["data_dir"].value
  )
  own_cells = jobs.cells_of_command(experiment.cells, *_share_of_cells())
  cells_at_once = _jobs()
  # One row for each run and number of workers.
  rows = dry_run.rows(experiment, own_cells, Machine())
  if not isinstance(cells_at_once, int):
    cells_at_once = jobs.default_jobs()
  print(dry_run.describe(rows, cells_at_once))
  flags.add_json(dry_run=rows)


def _start_crew(runs: Mapping[str, schema.Run]) -> jobs.Crew:
  """Starts the processes that train cells at once; none if one cell is trained
  at a time. They inherit the imports of this process."""
  cells_at_once = _jobs()
  if cells_at_once == "auto":
    cells_at_once = provenance.cores()
  # No crew: Ray has its own processes, and a profile is of this one.
  is_alone = _FLAGS["profile"].value or _FLAGS["dry_run"].value
  if cells_at_once == "ray" or is_alone:
    cells_at_once = 1
  return jobs.start_crew(runs.values(), flags.ENGINES, int(cells_at_once))


def main() -> None:
  """Trains as the flags describe."""
  role_flags = "num_processes", "process_id", "coordinator", "start_seconds"
  role = processes.role(*(_FLAGS[name].value for name in role_flags))
  # [1] Read the config, and check the flags against it.
  resolved = flags.load_config("configs/digits.py", _FLAGS["engine"].value)
  runs = resolved.runs
  # Programs for other devices need neither a role nor a folder.
  if _FLAGS["compile"].value is not None:
    _start_float64(runs)
    compiled.main(resolved, _FLAGS["compile"].value, _FLAGS["data_dir"].value)
    return
  _check_mesh_only(runs, role)
  _check_used(runs)
  boards.request_wandb(_FLAGS["wandb"].value)
  _jobs(), _share_of_cells()  # check these flags before anything is written
  # Before any array is made: JAX keeps the precision of its first arrays.
  _start_float64(runs)
  _keep_off_accelerators(runs)
  is_other_process = role.supervises or role.auto or role.process_id
  if not _FLAGS["dry_run"].value and not is_other_process:
    _announce(runs)
  # [2] Find the role of this process in a mesh.
  devices = None
  if role.count != 1:
    for run in runs.values():
      mesh_plan.check(run)
    # Every run must fit the same processes, so the largest mesh counts.
    devices = max(mesh_plan.required_devices(run) or 1 for run in runs.values())
  # [3] The first command starts N processes and only watches them.
  if role.supervises:
    assert devices is not None and role.count is not None
    processes.devices_of_each(devices, role.count)
    supervisor.supervise(role.count)
    return
  if role.count == 1 and not role.auto:
    # The processes start before JAX does: they are forked.
    with contextlib.closing(_start_crew(runs)) as crew:
      _train(resolved, crew)
    return
  # [4] A process of a mesh joins the others, then trains its part.
  processes.join(role, devices)
  try:
    _train(resolved)
  except jax.errors.JaxRuntimeError as error:
    message = " ".join(str(error).split())[:200]
    raise ValueError(
        "another process has exited or cannot be reached; run the same command"
        f" again to resume from the last save ({message})"
    ) from error


if __name__ == "__main__":
  processes.run(lambda: flags.run(main, "train"))
