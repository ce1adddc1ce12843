"""Trains live: real workers and server shards, in threads or in processes.

  python -m launch.serve --config=configs/simulate_digits.py --runtime=ray \\
    --config.workers=4 --config.only=dana_zero --config.seeds=0

The configs are those of `launch.simulate`, and so are the results; the
durations are not used, as workers take the time that they take. Each run leaves
a trace, `cells/*/trace-0.csv`, from which

  python -m launch.simulate --trace=FOLDER/cells/NAME

computes the same parameters again. Workers and shards that die are replaced.
Ctrl-C lets workers hand in what they have begun; after that, or after a kill of
everything, --resume goes on.
"""

import functools
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd import base, diagnosis, sharding, simulator
from asgd.runtimes import faults as faults_lib
from asgd.runtimes import files, threads
from asgd.runtimes.memory import SharedMemory
from asgd.runtimes.shard import sizes
from launch import (
  cell_book,
  cli,
  experiment,
  live_cell,
  live_figures,
  live_run,
  outputs,
  progress,
  ray_session,
  report,
  session,
)

_RUNTIME = flags.DEFINE_enum(
  "runtime", "threads", ["threads", "ray"], "Threads, or processes by Ray."
)
_ADDRESS = flags.DEFINE_string(
  "address", None, "Ray cluster to join. Default: one on this machine."
)
_ALLOW_NETWORK = flags.DEFINE_bool(
  "allow_network",
  False,
  "Let Ray listen beyond this machine; see Security in the README.",
)
_MEMORY_DIR = flags.DEFINE_string(
  "memory_dir", "/dev/shm", "Where shared memory is made."
)
_FAULTS = flags.DEFINE_multi_string(
  "fault", [], "Fault to inject, KIND:WORKER:SEQ, such as kill:1:20."
)
_GRACE = flags.DEFINE_float(
  "grace_seconds", 20.0, "How long workers may take to finish when stopped."
)

RUNNING = "running.json"  # in a cell's folder: who runs it, and in which memory


def _check_flags() -> None:
  """Raises ValueError for what cannot be, before anything is written."""
  if not os.path.isdir(_MEMORY_DIR.value):
    raise ValueError(
      f"--memory_dir={_MEMORY_DIR.value} is no folder; use one in memory, such"
      " as /dev/shm, or any other (slower)"
    )
  if _RUNTIME.value == "ray":
    ray_session.check(_ADDRESS.value, allow_network=_ALLOW_NETWORK.value)


def _memory_folder(cell_folder: Path) -> Path:
  """A run's own place in memory: short, and the same when it is resumed."""
  held = outputs.read_json(cell_folder / RUNNING)
  if session.RESUME.value and held and os.path.isdir(held["memory"]):
    return Path(held["memory"])
  name = hashlib.sha256(str(cell_folder.absolute()).encode()).hexdigest()[:12]
  return Path(_MEMORY_DIR.value).absolute() / f"asgd-{os.getuid()}-{name}"


def _forget(cell_folder: Path) -> None:
  """Removes the memory of a finished run."""
  held = outputs.read_json(cell_folder / RUNNING)
  if held:
    shutil.rmtree(held["memory"], ignore_errors=True)
    (cell_folder / RUNNING).unlink()


def _memory(live, index, like):
  # Values are rounded where they are made (`compile_steps`), so that what is
  # written in the narrow dtype comes back as it was.
  return SharedMemory(
    *(live.memory / f"shard-{index}", sizes(live.setup), like),
    compress=live_run.dtype_on_wire(live.exp.config),
  )


def _warm_up(live, duty, steps, states):
  """Compiles before the first ticket is sent: nobody is to be slow, or to be
  stale, because of that."""
  ticket = base.Ticket(np.int32(0), np.int32(0), live.params, np.True_)
  batch = duty.batch(0, 0)
  made = duty.work(
    *(duty.init(live.params), ticket, batch, duty.root, np.int32(0))
  )
  jax.block_until_ready(made)
  if live.setup.totals:
    return
  for state in states:
    state = jax.tree.map(jnp.array, state)  # it is consumed
    ticket = steps.send(state, jnp.int32(0))
    ticket = ticket._replace(version=np.int32(ticket.version))
    message = jax.tree.map(np.zeros_like, jax.device_get(state.params))
    jax.block_until_ready(
      steps.receive(state, ticket, message, np.float32(0.0))
    )


def _thread_cluster(faults, live, images, resumed, began):
  """Builds a cluster of threads, whose memory outlives the process."""
  duty = live_run.make_duty(live)
  parts = [live.params]
  if duty.plan is not None:
    parts = sharding.split(duty.plan, live.params)
  wire = live_run.dtype_on_wire(live.exp.config)
  steps = simulator.compile_steps(
    live.plan.server, live.plan.worker, wire=wire
  )
  states = [simulator.start(live.plan.server, part) for part in parts]
  _warm_up(live, duty, steps, states)
  likes = [
    (part, part, state) for part, state in zip(parts, states, strict=True)
  ]
  return threads.Cluster(
    *(live.setup, steps, states, duty),
    faults=faults,
    refill=live.exp.config["live"]["refill"],
    memories=[_memory(live, i, like) for i, like in enumerate(likes)],
    journals=[
      files.FileJournal(files.journal_path(live.folder, i))
      for i in range(len(parts))
    ],
    sinks=[
      files.FileSink(files.records_path(live.folder, i))
      for i in range(len(parts))
    ],
    images=images,
    resumed=resumed,
    began=began,
    span=(
      live_cell.SpanWriter(live.folder)
      if live.exp.config["live"]["spans"]
      else None
    ),
  )


def _remote_experiment(config, dataset):
  """The experiment, in a process that was given the data."""
  import ray

  if isinstance(dataset, ray.ObjectRef):
    dataset = ray.get(dataset)
  return experiment.build(config, dataset=dataset)


def _remote_server(config, dataset, cell):
  return experiment.server(_remote_experiment(config, dataset), cell)


def _remote_duty(config, dataset, cell, setup, params):
  exp = _remote_experiment(config, dataset)
  worker = experiment.worker(exp, cell)
  plan = cell_plan(worker)
  live = live_run.Live(exp, plan, cell, setup, None, None, params)
  return live_run.make_duty(live)


def cell_plan(worker):
  """A plan of which workers know only what they do."""
  return experiment.Plan(
    **dict.fromkeys(experiment.Plan._fields) | {"worker": worker}
  )


def _ray_cluster(faults, dataset, live, images, resumed, began):
  """Builds a cluster of Ray actors."""
  from asgd.runtimes import ray_cluster

  config = experiment.only(live.exp.config, live.cell)
  settings = config["live"]
  site = ray_cluster.Site(
    live.setup,
    str(live.folder.absolute()),
    str(live.memory),
    began,
    compress=live_run.dtype_on_wire(config),
    spans=settings["spans"],
    devices=settings["devices"],
  )
  return ray_cluster.Cluster(
    site,
    functools.partial(_remote_server, config, dataset, live.cell),
    live.params,
    functools.partial(
      *(_remote_duty, config, dataset, live.cell, live.setup, live.params)
    ),
    faults=faults,
    refill=settings["refill"],
    resources=ray_cluster.Resources(
      worker={
        "num_cpus": settings["worker_cpus"],
        "num_gpus": settings["worker_gpus"],
      }
    ),
    images=images,
    resumed=resumed,
  )


def _run_cell(run, cell, bar, signals, watch) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  bar.skip(run.message)
  run.start()
  while True:
    news, new, done = run.look()
    seen = watch.look(run.looked, new, run.message)
    for line in news:
      bar.line(f"{cell.name}: {line}")
    if len(new.loss):
      bar.update(
        cell.name,
        len(new.loss),
        float(new.loss.mean()),
        float(new.staleness.mean()),
        float(new.gap.mean()),
        seen,
      )
    if done:
      return run.finish()
    if signals.received:
      whole = run.drain(_GRACE.value)
      run.save()
      what = "" if whole else "; some workers did not finish in time"
      raise cli.Stopped(
        f"stopped in {cell.name} at message {run.message}{what}; the same"
        " command with --resume goes on from there",
        signals.received,
      )


def _run_all(exp, folder, bar, make_cluster, signals):
  """Runs the cells that are not finished; returns the results of all."""
  sharpness = diagnosis.make_sharpness(exp.problem.loss, exp.problem.probe)
  results = []
  for cell in exp.cells:
    place = folder / "cells" / cell.name
    result = cell_book.finished_result(place)
    if result is None:
      plan = experiment.plan(exp, cell)
      memory = _memory_folder(place)
      if not session.RESUME.value:
        files.end_all(memory)
        shutil.rmtree(memory, ignore_errors=True)
      live = live_run.prepare(exp, plan, cell, place, memory)
      run = live_run.LiveRun(
        *(live, make_cluster, sharpness),
        folder / "tensorboard" / cell.name,
        resume=session.RESUME.value,
      )
      watch = live_figures.Watch(
        live,
        folder / "tensorboard" / cell.name,
        compress=live_run.dtype_on_wire(exp.config),
      )
      running = {"driver": os.getpid(), "memory": str(memory)}
      outputs.write_atomically(place / RUNNING, outputs.to_json(running))
      try:
        result = _run_cell(run, cell, bar, signals, watch)
      finally:
        run.close()
        watch.close()
      _forget(place)
      bar.line(report.line(result))
    else:
      _forget(place)  # killed right after it had finished
      bar.skip(experiment.messages(exp, cell))
    results.append(result)
  return results


def train() -> Path:
  """Runs the experiment that the flags describe; returns its folder."""
  faults = [faults_lib.parse(text) for text in _FAULTS.value]
  exp = session.build("configs/simulate_digits.py")
  for cell in exp.cells:
    live_run.check(exp, cell)
  _check_flags()
  folder = session.open_folder(
    exp,
    suffix="-live",
    identity={"runtime": _RUNTIME.value, "cpus": os.cpu_count()},
  )
  signals = session.Signals()
  total = sum(experiment.messages(exp, cell) for cell in exp.cells)
  started = time.monotonic()
  if _RUNTIME.value == "ray":
    dataset = ray_session.start(
      exp.dataset, _ADDRESS.value, allow_network=_ALLOW_NETWORK.value
    )
    make_cluster = functools.partial(_ray_cluster, faults, dataset)
  else:
    make_cluster = functools.partial(_thread_cluster, faults)
  bar = progress.Progress(total)
  try:
    results = _run_all(exp, folder, bar, make_cluster, signals)
  finally:
    bar.close()
    if _RUNTIME.value == "ray":
      ray_session.stop()
  del started
  report.write(folder, exp, results)
  return folder


def main() -> None:
  """Trains."""
  train()


if __name__ == "__main__":
  cli.run(main)
