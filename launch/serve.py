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

import contextlib
import errno
import functools
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd import base, diagnosis, sharding, simulator
from asgd.runtimes import faults as faults_lib
from asgd.runtimes import files, threads
from asgd.runtimes.memory import SharedMemory, check_room
from asgd.runtimes.shard import sizes
from launch import (
  cell_book,
  cli,
  experiment,
  live_cell,
  live_figures,
  live_run,
  progress,
  ray_session,
  report,
  running,
  session,
)

flags.adopt_module_key_flags(session)
_RUNTIME = flags.DEFINE_enum(
  "runtime", "threads", ["threads", "ray"], "Threads, or processes by Ray."
)
flags.adopt_module_key_flags(ray_session)
_ADDRESS, _ALLOW_NETWORK = ray_session.ADDRESS, ray_session.ALLOW_NETWORK
_MEMORY_DIR = flags.DEFINE_string(
  "memory_dir", "/dev/shm", "Where shared memory is made."
)
_FAULTS = flags.DEFINE_multi_string(
  "fault", [], "Fault to inject, KIND:WORKER:SEQ, such as kill:1:20."
)
_GRACE = flags.DEFINE_float(
  "grace_seconds", 20.0, "How long workers may take to finish when stopped."
)

RUNNING = running.RUNNING


def _check_flags(exp) -> None:
  """Raises ValueError for what cannot be, before anything is written."""
  if not os.path.isdir(_MEMORY_DIR.value):
    raise ValueError(
      f"--memory_dir={_MEMORY_DIR.value} is no folder; use one in memory, such"
      " as /dev/shm, or any other (slower)"
    )
  try:
    os.rmdir(tempfile.mkdtemp(prefix="asgd-", dir=_MEMORY_DIR.value))
  except OSError as error:
    raise ValueError(
      f"--memory_dir={_MEMORY_DIR.value}: no folder can be made there"
      f" ({error.strerror}); use one in memory, such as /dev/shm, or any other"
      " (slower)"
    ) from error
  if not session.RESUME.value:  # else it may have its memory
    needed = max(live_run.memory_needed(exp, cell) for cell in exp.cells)
    check_room(_MEMORY_DIR.value, needed)
  if _RUNTIME.value == "ray":
    ray_session.check(_ADDRESS.value, allow_network=_ALLOW_NETWORK.value)
  elif _ADDRESS.value:
    raise ValueError(
      f"--address={_ADDRESS.value} is of a Ray cluster, and threads are of this"
      " process: add --runtime=ray, or drop --address"
    )


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


def _run_cell(run, cell, bar, signals, watch, claim) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  bar.skip(run.message)
  run.start()
  replaced = run.replaced
  while True:
    news, new, done = run.look()
    if run.replaced != replaced:
      replaced = run.replaced
      claim.note(replaced)
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
      what = "" if whole else "; some workers did not finish in time"
      raise cli.Stopped(
        f"stopped in {cell.name} at message {run.message}{what}; the same"
        " command with --resume goes on from there",
        signals.received,
      )


def _closer(close):
  """Closes something at the end; what went wrong before that is told first."""

  def leave(kind, error, trace):
    del error, trace
    with contextlib.suppress(*([OSError, ValueError] if kind else [])):
      close()

  return leave


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _say_once_that_it_is_full():
  """Keeps what others (TensorBoard's writer) print of a full disk from stderr,
  at length, from their threads and at the exit: one line of ours says it."""

  def quiet(before):
    def hook(args):
      error, thread = args.exc_value, type(getattr(args, "thread", None))
      board = thread.__module__.startswith("tensorboardX")
      full = isinstance(error, OSError) and error.errno in _FULL
      if not full and not (board and isinstance(error, OSError)):
        before(args)

    return hook

  sys.unraisablehook = quiet(sys.unraisablehook)
  threading.excepthook = quiet(threading.excepthook)


@contextlib.contextmanager
def _naming(folder):
  """Names the folder in an error that names no file."""
  try:
    yield
  except OSError as error:
    if error.filename is not None or error.errno not in _FULL:
      raise
    raise ValueError(
      f"cannot write to {folder} ({error.strerror}); make room and go on with"
      " --resume"
    ) from error


def _run_one(exp, folder, cell, bar, make_cluster, sharpness, signals):
  """Runs a cell from its start, or from where it stopped; returns its result.
  """
  place, board = folder / "cells" / cell.name, folder / "tensorboard"
  plan, begun = experiment.plan(exp, cell), False
  if session.RESUME.value:
    shards = exp.config["server"]["shards"]
    begun = bool(live_run.read_journals(place, shards)[0])
  claim = running.Claim(place, _MEMORY_DIR.value, resume=begun)
  run = None
  try:
    with contextlib.ExitStack() as stack:
      live = live_run.prepare(exp, plan, cell, place, claim.memory)
      run = live_run.LiveRun(
        *(live, make_cluster, sharpness, board / cell.name),
        resume=begun,
        replaced=claim.replaced,
      )
      stack.push(_closer(run.close))
      watch = live_figures.Watch(
        live,
        board / cell.name,
        compress=live_run.dtype_on_wire(exp.config),
      )
      stack.push(_closer(watch.close))
      claim.note(claim.replaced)
      result = _run_cell(run, cell, bar, signals, watch, claim)
    claim.remove()
    return result
  except (ValueError, OSError):
    new = not claim.kept and (run is None or not run.message)
    if new or not place.exists():
      claim.remove()  # there is nothing to go on with
    raise
  finally:
    claim.close()


def _run_all(exp, folder, bar, make_cluster, signals):
  """Runs the cells that are not finished; returns the results of all."""
  sharpness = diagnosis.make_sharpness(exp.problem.loss, exp.problem.probe)
  results, warned = [], set()
  for cell in exp.cells:
    place = folder / "cells" / cell.name
    result = cell_book.finished_result(place)
    if result is not None:
      running.forget(place)  # killed right after it had finished
      bar.skip(experiment.messages(exp, cell))
      results.append(result)
      continue
    result = _run_one(
      exp, folder, cell, bar, make_cluster, sharpness, signals
    )
    results.append(result)
    bar.line(report.line(result))
    if result["took_part"] < cell.workers:
      bar.line(
        f"{cell.name}: only {result['took_part']} of {cell.workers} workers"
        " took part; what is said of this many is not known from it"
      )
    key = cell.label, cell.workers
    if key not in warned:  # one seed tells
      lines = report.warnings(result)
      warned |= {key} if lines else set()
      for line in lines:
        bar.line(line)
  return results


def train() -> Path:
  """Runs the experiment that the flags describe; returns its folder."""
  faults = [faults_lib.parse(text) for text in _FAULTS.value]
  exp = session.build("configs/simulate_digits.py")
  for cell in exp.cells:
    live_run.check(exp, cell)
    faults_lib.check(faults, cell.workers, experiment.messages(exp, cell))
  _check_flags(exp)
  folder = session.open_folder(
    exp,
    suffix="-live",
    identity={"runtime": _RUNTIME.value, "cpus": os.cpu_count()},
  )
  signals = session.Signals()
  total = sum(experiment.messages(exp, cell) for cell in exp.cells)
  if _RUNTIME.value == "ray":
    dataset = ray_session.start(
      exp.dataset, _ADDRESS.value, allow_network=_ALLOW_NETWORK.value
    )
    make_cluster = functools.partial(_ray_cluster, faults, dataset)
  else:
    make_cluster = functools.partial(_thread_cluster, faults)
  bar = progress.Progress(total)
  _say_once_that_it_is_full()
  try:
    with _naming(folder):
      results = _run_all(exp, folder, bar, make_cluster, signals)
  except KeyboardInterrupt:
    raise cli.Stopped(
      "interrupted; the same command with --resume goes on from the last"
      " message that was received",
      signals.received or signal.SIGINT,
    ) from None
  finally:
    bar.close()
    if _RUNTIME.value == "ray":
      ray_session.stop()
  with _naming(folder):
    report.write(folder, exp, results)
  return folder


def main() -> None:
  """Trains."""
  train()


if __name__ == "__main__":
  cli.run(main)
