"""The pipeline benchmark: the cost of executing a table.

A stack of transformer blocks on two stages and two cores, against the same
stack and the same microbatches on one device and one core:

- GPipe and 1F1B against the bubble bound, (M + S - 1) / M x T / S, with stages
  as threads, and as processes that have a core each (these need Ray);
- PipeDream against T / S;
- GPipe and 1F1B of torch.distributed.pipelining over Gloo, if torch is
  installed, against their own bound (`--peer` names a Python that has it);
- a table of 256 stages and 4,096 microbatches made, checked and analysed;
- the cost of a task beyond its compiled program, on a stage that does nothing:
  one thread calls the same programs one after the other, in turns with it;
- memory of activations, counted and by the table.

The one device is another process, which has one core when JAX starts: XLA sizes
its threads by the cores that it may use. As threads, the stages share XLA's two
threads, so one stage may use the time in which the other is idle.
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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

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
from asgd.pipeline.state import KEPT

from . import turns
from .report import BenchReport, Measured

_STAGES, _MICROBATCHES = 2, 8
_DEPTH, _WIDTH, _HEADS, _LENGTH, _BATCH = 4, 256, 4, 64, 8
_ASYNCHRONOUS = 48  # microbatches of a PipeDream run
_MANY_STAGES, _MANY_MICROBATCHES = 256, 4096
_FLUSHING = "GPipe", "1F1B"
_TARGETS = {  # where stages run, schedule -> share of its bound
  **{("threads", name): 1.0 for name in (*_FLUSHING, "PipeDream")},
  **{("processes", name): 0.95 for name in _FLUSHING},
  ("processes", "PipeDream"): 0.92,
}


def _stack():
  """Returns transformer blocks, their parameters, and noise as their input."""
  layers = transformer.gpt(
    2, depth=_DEPTH, width=_WIDTH, heads=_HEADS, context=_LENGTH
  )[1:-1]
  x = jax.random.normal(jax.random.key(0), (_BATCH, _LENGTH, _WIDTH))
  return layers, models.init(layers, jax.random.key(1), x), x


@functools.cache
def _stage_fn(layers, first, last):
  def fn(params, x, extra):
    x = extra if first == 0 else x
    y, _ = models.apply(layers[first:last], params, x, first=first)
    return (jnp.mean(y**2) if last == len(layers) else y), ()

  return fn


@functools.cache
def _one_device():
  """Returns gradients of microbatches, one after the other, and their sum."""
  layers, params, x = _stack()
  fn = _stage_fn(layers, 0, len(layers))
  gradient = jax.jit(jax.grad(lambda p: fn(p, (), x)[0]))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
  return gradient, add, params


def _work(microbatches: int) -> None:
  """Makes the gradients of so many microbatches in this process."""
  gradient, add, params = _one_device()
  total = gradient(params)
  for _ in range(microbatches - 1):
    total = add(total, gradient(params))
  jax.block_until_ready(total)


def _take_core():
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _arguments(table, layers, params, x, cuts):
  """Returns the arguments of a table's executor, cut before layers `cuts`."""
  server = algorithms.build("asgd", 1e-6, 1).server()
  parts = [
    stage_lib.Part(_stage_fn(layers, a, b), params[a:b], server)
    for a, b in itertools.pairwise(cuts)
  ]

  def extra(stage, microbatch):
    del microbatch
    return x if stage == 0 else ()

  return {"schedule": table, "parts": parts, "extra": extra}


def _stack_arguments(table):
  layers, params, x = _stack()
  cuts = np.linspace(0, len(layers), table.stages + 1).astype(int).tolist()
  return _arguments(table, layers, params, x, cuts)


def _repeated(engine) -> turns.Contestant:
  """Runs the whole table, from the state that it left."""
  return turns.repeated(
    lambda state: engine.next_pass(engine.run(state).state), engine.start()
  )


def _threads(table):
  """An engine with a thread for each stage."""
  return contextlib.nullcontext(executor.Executor(**_stack_arguments(table)))


def _own_cores(table):
  """Returns an engine with a process for each stage, each on one core."""
  cores = [[core] for core in sorted(os.sched_getaffinity(0))[:_STAGES]]
  make = functools.partial(_stack_arguments, table)
  return contextlib.closing(
    processes.Processes(make, table, _STAGES, cores=cores)
  )


def _speed(report, rounds, peer):
  """Prints rows of tables against the bubble bound."""
  s, m = _STAGES, _MICROBATCHES
  flushing = (m + s - 1) / m / s
  tables = {
    "GPipe": (schedules.gpipe(s, m), flushing),
    "1F1B": (schedules.one_f_one_b(s, m), flushing),
    "PipeDream": (schedules.pipedream(s, _ASYNCHRONOUS), 1 / s),
  }
  printed = report.table(
    f"{_DEPTH} blocks of width {_WIDTH}, {_BATCH} x {_LENGTH} tokens a"
    f" microbatch, {s} stages, {m} microbatches (PipeDream:"
    f" {_ASYNCHRONOUS}, with its fill and drain)",
    "schedule, stages",
    {"one core ms": ".0f", "bound ms": ".0f", "ms": ".0f"},
    {"of bound": ".2f"},
  )
  spawn = multiprocessing.get_context("spawn")
  with contextlib.ExitStack() as stack:
    one = stack.enter_context(
      concurrent.futures.ProcessPoolExecutor(1, spawn, _take_core)
    )

    def alone():
      one.submit(_work, m).result()

    def measure(where, open_engine):
      for name, (table, bound) in tables.items():
        with open_engine(table) as engine:
          work = {"alone": alone, "engine": _repeated(engine)}
          base, mine = turns.take_turns(work, rounds).values()
          base = base * table.microbatches / m
        target = f">= {_TARGETS[where, name]}"
        label = f"{name}, {where}"
        printed.row(label, *_cells(bound, base, mine, target))

    measure("threads", _threads)
    if importlib.util.find_spec("ray"):
      ray_runtime.start(None)
      stack.callback(ray_runtime.stop)
      measure("processes", _own_cores)
    else:
      print("no Ray, so no stages in processes: pip install 'asgd[ray]'")
  for name, base, mine in _peer(rounds, peer):
    printed.row(f"{name}, torch", *_cells(flushing, base, mine))


def _cells(bound, base, mine, target=""):
  """A row; ratios are turn by turn: what slows the machine slows both."""
  medians = [1e3 * float(np.median(x)) for x in (base, bound * base, mine)]
  return [*medians, Measured(base * bound / mine, target)]


def _peer(rounds, python):
  """Yields PyTorch's (schedule, seconds of one core, seconds)."""
  python = turns.python_with_torch(python)
  if python is None:
    return
  sizes = {"depth": _DEPTH, "width": _WIDTH, "heads": _HEADS}
  sizes |= {"length": _LENGTH, "batch": _BATCH, "microbatches": _MICROBATCHES}
  script = Path(__file__).with_name("torch_peer.py")
  command = [python, script, json.dumps({**sizes, "rounds": rounds})]
  try:
    out = subprocess.run(command, capture_output=True, text=True, check=True)
  except OSError as error:
    raise ValueError(f"--peer={python}: {error.strerror}") from error
  except subprocess.CalledProcessError as error:
    last = (error.stderr.strip() or "it said nothing").splitlines()[-1]
    raise ValueError(f"--peer={python} has failed: {last}") from error
  seconds = {k: np.array(v) for k, v in json.loads(out.stdout).items()}
  base = np.full(rounds, np.median(seconds.pop("one_core")))
  for name, mine in seconds.items():
    yield name, base, mine


def _table(report):
  """Prints the times to make, check and analyse a large table."""
  printed = report.table(
    f"a 1F1B table of {_MANY_STAGES} stages, {_MANY_MICROBATCHES:,}"
    " microbatches",
    "step",
    {},
    {"s": ".2f"},
  )
  times = [time.perf_counter()]
  table = schedules.one_f_one_b(_MANY_STAGES, _MANY_MICROBATCHES)
  times.append(time.perf_counter())
  for step in (validate.validate, analyze.analyze):
    step(table)
    times.append(time.perf_counter())
  steps = "make", "check", "analyse"
  for name, took in zip(steps, np.diff(times), strict=True):
    printed.row(name, Measured(took))


def _programs(engine, count):
  """Calls the compiled programs of two stages for `count` microbatches.

  One program is called after the other, without the updates.
  """
  stages = [part.stage for part in engine.compiled_program.parts]
  devices, state = engine.devices, engine.start()
  params = [
    jax.device_put(server.params, devices[i])
    for i, server in enumerate(state.servers)
  ]
  small = np.zeros(stages[0].y.shape, stages[0].y.dtype)
  copiers = [lanes.copier_of(devices[i], small) for i in range(2)]
  x, one = engine.compiled_program.extra(0, 0), np.ones((), stages[1].y.dtype)

  def once(totals):
    for _ in range(count):
      y, _, kept = stages[0].forward(params[0], (), x)
      y = copiers[1](y)
      loss, _, kept_later = stages[1].forward(params[1], y, ())
      later, gy = stages[1].backward(params[1], kept_later, [one])
      first, _ = stages[0].backward(params[0], kept, copiers[0](gy))
      grads = first, later
      totals = [lanes.add(*pair) for pair in zip(totals, grads, strict=True)]
      jax.block_until_ready((loss, totals))
    return totals

  return turns.repeated(once, jax.tree.map(jnp.copy, params))


def _overhead(report, rounds):
  """Prints the cost of a task beyond its compiled program."""
  layers = models.mlp(2, hidden=(2, 2))[1:]
  x = jnp.zeros((1, 2))
  params = models.init(layers, jax.random.key(0), x)
  table = schedules.one_f_one_b(2, 256)
  arguments = _arguments(table, layers, params, x, (0, 1, 3))
  engine = executor.Executor(**arguments)
  work = {"tasks": _repeated(engine), "programs": _programs(engine, 256)}
  seconds = turns.take_turns(work, rounds).values()
  whole, programs = (1e6 * each / len(table.time) for each in seconds)
  printed = report.table(
    "a task of a stage that does nothing", "", {}, {"us": ".0f"}
  )
  printed.row("all of it", Measured(whole))
  printed.row("its compiled programs, by one thread", Measured(programs))
  printed.row("beside them", Measured(whole - programs, "<= 60"))


def _memory(report):
  """Prints the memory of activations, counted and as the table says."""
  printed = report.table(
    "most activations held, between slots, and as the table says",
    "schedule, device",
    {"table MB": ".1f", "MB": ".1f"},
    {},
  )
  for make in (schedules.gpipe, schedules.one_f_one_b):
    table = make(_STAGES, _MICROBATCHES)
    engine = executor.Executor(**_stack_arguments(table))
    sizes = [part.stage.kept_bytes for part in engine.compiled_program.parts]
    places = engine.compiled_program.program.places
    state, most = engine.start(), np.zeros(table.devices)
    for slot in range(1, table.slots + 1):
      state = engine.run(state, slot).state
      now = np.zeros(table.devices)
      for (kind, stage, *_), value in state.entries.items():
        if kind == KEPT:
          for leaf in jax.tree.leaves(value[0]):
            now[places[stage][0]] += leaf.nbytes
      most = np.maximum(most, now)
    planned = analyze.analyze(table, activation=sizes).peak_activations
    for device in range(table.devices):
      megabytes = planned[device] / 1e6, most[device] / 1e6
      printed.row(f"{table.name}, {device}", *megabytes)


def run(report: BenchReport, rounds: int = 3, peer: str | None = None) -> None:
  """Runs all of it; `peer` is a Python that has torch, None this one."""
  jax.config.update("jax_num_cpu_devices", _STAGES)
  _speed(report, rounds, peer)
  _table(report)
  _overhead(report, rounds)
  _memory(report)
