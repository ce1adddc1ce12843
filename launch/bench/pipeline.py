"""The pipeline benchmark: the cost of executing a table.

A stack of transformer blocks on two stages and two cores, against the same
stack and the same microbatches on one device and one core:

- GPipe and 1F1B against the bubble bound, (M + S - 1) / M x T / S, with stages
  as threads, and as processes that have a core each (these need Ray). T is the
  time of the one device, S the stages, M the microbatches;
- PipeDream against T / S;
- GPipe and 1F1B of torch.distributed.pipelining over Gloo, if torch is
  installed, against the bound by torch's time of one core (`--peer` names a
  Python that has torch);
- a table of 256 stages and 4,096 microbatches made, checked and analysed;
- the cost of a task beyond its compiled program, on a stage that does nothing:
  one thread calls the same programs one after the other, in turns with it;
- memory of activations, counted and by the table.

The one device is in another process, which has one core when JAX starts: XLA
sizes its threads by the cores that it may use. Stages as threads share XLA's
two threads, so one stage may use the time in which the other is idle.
"""

import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from asgd import algorithms, models
from asgd.experiment import ray_runtime
from asgd.models import transformer
from asgd.pipeline import (
  analyze,
  executor,
  lanes,
  processes,
  schedules,
  validate,
)
from asgd.pipeline import stage as stage_lib
from asgd.pipeline.state import RESIDUALS
from asgd.pipeline.table import Schedule

from . import turns
from .report import BenchReport, Measured

_STAGES, _MICROBATCHES = 2, 8  # a stage for each core
# Blocks, features, heads, tokens of a sequence, sequences of a microbatch.
_DEPTH, _WIDTH, _HEADS, _LENGTH, _BATCH = 4, 256, 4, 64, 8
_PIPEDREAM_MICROBATCHES = 48  # microbatches of a PipeDream run
# The large table, which is not run.
_MANY_STAGES, _MANY_MICROBATCHES = 256, 4096
_FLUSHING = "GPipe", "1F1B"
# Processes pay for their messages; PipeDream also for filling and draining.
_TARGETS = {  # where stages run, schedule -> share of its bound
  **{("threads", name): 1.0 for name in (*_FLUSHING, "PipeDream")},
  **{("processes", name): 0.95 for name in _FLUSHING},
  ("processes", "PipeDream"): 0.92,
}


def _stack() -> tuple[Any, Any, jax.Array]:
  """Returns transformer blocks, their parameters, and noise as their input."""
  layers = transformer.gpt(
    2, depth=_DEPTH, width=_WIDTH, heads=_HEADS, context=_LENGTH
  # Without the embedding and the head, so that all layers are alike.
  )[1:-1]
  x = jax.random.normal(jax.random.key(0), (_BATCH, _LENGTH, _WIDTH))
  return layers, models.init(layers, jax.random.key(1), x), x


@functools.cache
def _stage_fn(layers: Any, first: int, last: int) -> Callable[..., Any]:
  """Returns the function of a stage of layers `first` to `last` - 1."""

  def fn(params: Any, x: Any, extra: Any) -> tuple[jax.Array, tuple[()]]:
    # The first stage reads the microbatch; the last computes the loss.
    x = extra if first == 0 else x
    y, _ = models.apply(layers[first:last], params, x, first=first)
    return (jnp.mean(y**2) if last == len(layers) else y), ()

  return fn


@functools.cache
def _one_device() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
  """Returns (gradient of a microbatch, sum of two gradients, parameters)."""
  layers, params, x = _stack()
  fn = _stage_fn(layers, 0, len(layers))
  gradient = jax.jit(jax.grad(lambda p: fn(p, (), x)[0]))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
  return gradient, add, params


def _compute_gradients(microbatches: int) -> None:
  """Computes the gradients of so many microbatches in this process."""
  gradient, add, params = _one_device()
  total = gradient(params)
  for _ in range(microbatches - 1):
    total = add(total, gradient(params))
  jax.block_until_ready(total)


def _take_core() -> None:
  """Keeps a process on one core, before it starts JAX."""
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _arguments(
  table: Schedule, layers: Any, params: Any, x: jax.Array, cuts: Sequence[int]
) -> dict[str, Any]:
  """Returns the arguments of a table's executor, for layers that are cut at the
  boundaries `cuts`."""
  # A tiny rate: the parameters hardly change over all repetitions.
  server = algorithms.build("asgd", 1e-6, 1).server()
  parts = [
    stage_lib.Part(_stage_fn(layers, a, b), params[a:b], server)
    for a, b in itertools.pairwise(cuts)
  ]

  def extra(stage: int, microbatch: int) -> Any:
    del microbatch  # all are the same
    return x if stage == 0 else ()

  return {"schedule": table, "parts": parts, "extra": extra}


def _stack_arguments(table: Schedule) -> dict[str, Any]:
  """Returns the executor's arguments for the stack, divided equally."""
  layers, params, x = _stack()
  cuts = np.linspace(0, len(layers), table.stages + 1).astype(int).tolist()
  return _arguments(table, layers, params, x, cuts)


def _repeat_runs(engine: Any) -> turns.Contestant:
  """Returns a contestant that runs the whole table, from its last state."""
  return turns.repeated(
    lambda state: engine.next_pass(engine.run(state).state), engine.start()
  )


def _threads(table: Schedule) -> contextlib.AbstractContextManager[Any]:
  """Returns an engine with a thread for each stage."""
  return contextlib.nullcontext(executor.Executor(**_stack_arguments(table)))


def _processes(table: Schedule) -> contextlib.AbstractContextManager[Any]:
  """Returns an engine with a process for each stage, each on one core."""
  cores = [[core] for core in sorted(os.sched_getaffinity(0))[:_STAGES]]
  make = functools.partial(_stack_arguments, table)
  return contextlib.closing(
    processes.Processes(make, table, _STAGES, cores=cores)
  )


def _speed(report: BenchReport, rounds: int, peer: str | None) -> None:
  """Prints the time of each schedule beside its bubble bound."""
  s, m = _STAGES, _MICROBATCHES
  # (M + S - 1) / M: slots over those with work. / S: the work of a stage.
  flushing = (m + s - 1) / m / s
  tables = {  # name -> (table, its bound over the time on one core)
    "GPipe": (schedules.gpipe(s, m), flushing),
    "1F1B": (schedules.one_f_one_b(s, m), flushing),
    "PipeDream": (schedules.pipedream(s, _PIPEDREAM_MICROBATCHES), 1 / s),
  }
  result_table = report.table(
    f"{_DEPTH} blocks of width {_WIDTH}, {_BATCH} x {_LENGTH} tokens a"
    f" microbatch, {s} stages, {m} microbatches (PipeDream:"
    f" {_PIPEDREAM_MICROBATCHES}, with its fill and drain)",
    "schedule, stages",
    {"one core ms": ".0f", "bound ms": ".0f", "ms": ".0f"},
    {"speed / bound": ".2f"},
  )
  # A new process, which starts JAX only after it has one core.
  spawn = multiprocessing.get_context("spawn")
  with contextlib.ExitStack() as stack:
    one_core = stack.enter_context(
      concurrent.futures.ProcessPoolExecutor(1, spawn, _take_core)
    )

    def run_on_one_core() -> None:
      """Computes the microbatches in that process."""
      one_core.submit(_compute_gradients, m).result()

    def measure(kind: str, open_engine: Callable[..., Any]) -> None:
      """Prints the rows of all tables on one kind of engine."""
      for name, (table, bound) in tables.items():
        with open_engine(table) as engine:
          work = {"alone": run_on_one_core, "engine": _repeat_runs(engine)}
          base_seconds, seconds = turns.take_turns(work, rounds).values()
          # The one core computed m microbatches; PipeDream's table has more.
          base_seconds = base_seconds * table.microbatches / m
        target = f">= {_TARGETS[kind, name]}"
        label = f"{name}, {kind}"
        result_table.row(label, *_cells(bound, base_seconds, seconds, target))

    measure("threads", _threads)
    if importlib.util.find_spec("ray"):
      ray_runtime.start(None)
      stack.callback(ray_runtime.stop)
      measure("processes", _processes)
    else:
      print("no Ray, so no stages in processes: pip install 'asgd[ray]'")
  for name, base_seconds, seconds in _torch_times(rounds, peer):
    result_table.row(f"{name}, torch", *_cells(flushing, base_seconds, seconds))


def _cells(
  bound: float,
  base_seconds: npt.NDArray[Any],
  seconds: npt.NDArray[Any],
  target: str = "",
) -> list[Any]:
  """Returns the cells of a row. The times of a ratio were measured one after
  the other: what slows the machine slows both."""
  milliseconds = [
    1e3 * float(np.median(x))
    for x in (base_seconds, bound * base_seconds, seconds)
  ]
  return [*milliseconds, Measured(base_seconds * bound / seconds, target)]


def _torch_times(
  rounds: int, python: str | None
) -> Iterator[tuple[str, npt.NDArray[Any], npt.NDArray[Any]]]:
  """Yields PyTorch's (schedule, seconds of one core, seconds)."""
  python = turns.python_with_torch(python)  # none: no rows of torch
  if python is None:
    return
  sizes = {"depth": _DEPTH, "width": _WIDTH, "heads": _HEADS}
  sizes |= {"length": _LENGTH, "batch": _BATCH, "microbatches": _MICROBATCHES}
  script = str(Path(__file__).with_name("torch_peer.py"))
  command = [python, script, json.dumps({**sizes, "rounds": rounds})]
  try:
    out = subprocess.run(command, capture_output=True, text=True, check=True)
  except OSError as error:
    raise ValueError(f"--peer={python}: {error.strerror}") from error
  except subprocess.CalledProcessError as error:
    reason = (error.stderr.strip() or "it said nothing").splitlines()[-1]
    raise ValueError(f"--peer={python} has failed: {reason}") from error
  seconds = {k: np.array(v) for k, v in json.loads(out.stdout).items()}
  # torch measures its one core once, not in turns with each schedule.
  base = np.full(rounds, np.median(seconds.pop("one_core")))
  for name, peer_seconds in seconds.items():
    yield name, base, peer_seconds


def _time_large_table(report: BenchReport) -> None:
  """Prints the times to make, check and analyse a large table."""
  result_table = report.table(
    f"a 1F1B schedule of {_MANY_STAGES} stages, {_MANY_MICROBATCHES:,}"
    " microbatches",
    "step",
    {},
    {"seconds": ".2f"},
  )
  times = [time.perf_counter()]
  table = schedules.one_f_one_b(_MANY_STAGES, _MANY_MICROBATCHES)
  times.append(time.perf_counter())
  for step in (validate.validate, analyze.analyze):
    step(table)
    times.append(time.perf_counter())
  steps = "make", "check", "analyse"
  for name, seconds in zip(steps, np.diff(times), strict=True):
    result_table.row(name, Measured(seconds))


def _programs(engine: executor.Executor, count: int) -> turns.Contestant:
  """Returns a contestant that calls the compiled programs of two stages, one
  after the other, for `count` microbatches and without the updates."""
  # Compiled, so every part has its stage.
  stages: list[Any] = [part.stage for part in engine.compiled_program.parts]
  devices, state = engine.devices, engine.start()
  params = [
    jax.device_put(server.params, devices[i])
    for i, server in enumerate(state.servers)
  ]
  # Zeros with the shape of the arrays that pass between the stages.
  small = np.zeros(stages[0].y.shape, stages[0].y.dtype)
  copiers = [lanes.copier_of(devices[i], small) for i in range(2)]
  x = engine.compiled_program.extra(0, 0)
  unit_gradient = np.ones((), stages[1].y.dtype)

  def once(totals: Any) -> Any:
    """Computes `count` microbatches, and adds up their gradients."""
    for _ in range(count):
      # [1] Forward on both stages; each keeps residuals for its backward.
      y, _, residuals_0 = stages[0].forward(params[0], (), x)
      y = copiers[1](y)
      loss, _, residuals_1 = stages[1].forward(params[1], y, ())
      # [2] Backward from the loss: its gradient is one.
      grads_1, y_grad = stages[1].backward(
        params[1], residuals_1, [unit_gradient]
      )
      grads_0, _ = stages[0].backward(
        params[0], residuals_0, copiers[0](y_grad)
      )
      grads = grads_0, grads_1
      # [3] Add the gradients up, as a table with a flush does.
      totals = [lanes.add(*pair) for pair in zip(totals, grads, strict=True)]
      jax.block_until_ready((loss, totals))
    return totals

  return turns.repeated(once, jax.tree.map(jnp.copy, params))


def _overhead(report: BenchReport, rounds: int) -> None:
  """Prints the cost of a task beyond its compiled program."""
  # Layers of two features: their arithmetic takes no time.
  layers = models.mlp(2, hidden=(2, 2))[1:]
  x = jnp.zeros((1, 2))
  params = models.init(layers, jax.random.key(0), x)
  table = schedules.one_f_one_b(2, 256)
  arguments = _arguments(table, layers, params, x, (0, 1, 3))
  engine = executor.Executor(**arguments)
  work = {"tasks": _repeat_runs(engine), "programs": _programs(engine, 256)}
  seconds = turns.take_turns(work, rounds).values()
  # Microseconds of a task of the table.
  task_us, programs_us = (1e6 * total / len(table.time) for total in seconds)
  result_table = report.table(
    "a task of a stage that does nothing", "", {}, {"us": ".0f"}
  )
  result_table.row("the whole task", Measured(task_us))
  result_table.row(
    "its compiled programs, in one thread", Measured(programs_us)
  )
  result_table.row("overhead", Measured(task_us - programs_us, "<= 60"))


def _memory(report: BenchReport) -> None:
  """Prints the memory of activations, counted and computed from the table."""
  result_table = report.table(
    "most activations held, between slots, and as the table says",
    "schedule, device",
    {"table MB": ".1f", "MB": ".1f"},
    {},
  )
  for make in (schedules.gpipe, schedules.one_f_one_b):
    table = make(_STAGES, _MICROBATCHES)
    engine = executor.Executor(**_stack_arguments(table))
    stages: list[Any] = [part.stage for part in engine.compiled_program.parts]
    sizes = [stage.residual_bytes for stage in stages]
    stage_devices = engine.compiled_program.program.places
    state, peak = engine.start(), np.zeros(table.devices)
    # Stop after each slot, and count the residuals that are stored.
    for slot in range(1, table.slots + 1):
      state = engine.run(state, slot).state
      stored = np.zeros(table.devices)
      for (kind, stage, *_), value in state.entries.items():
        if kind == RESIDUALS:
          for leaf in jax.tree.leaves(value[0]):
            stored[stage_devices[stage][0]] += leaf.nbytes
      peak = np.maximum(peak, stored)
    planned = analyze.analyze(table, activation=sizes).peak_activations
    for device in range(table.devices):
      megabytes = planned[device] / 1e6, peak[device] / 1e6
      result_table.row(f"{table.name}, {device}", *megabytes)


def run(report: BenchReport, rounds: int = 3, peer: str | None = None) -> None:
  """Runs all measurements; `peer` is a Python with torch, None this one."""
  jax.config.update("jax_num_cpu_devices", _STAGES)
  _speed(report, rounds, peer)
  _time_large_table(report)
  _overhead(report, rounds)
  _memory(report)
