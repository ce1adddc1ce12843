"""The pipeline benchmark: what executing a table costs.

A stack of transformer blocks on two stages and two cores, against the same
stack and the same microbatches on one device and one core:

- GPipe and 1F1B against the bubble bound, (M + S - 1) / M x T / S, with stages
  as threads, and as processes that have a core each (these need Ray);
- PipeDream against T / S;
- GPipe and 1F1B of torch.distributed.pipelining over Gloo, if there is torch,
  against their own bound (`--peer` names a Python that has it);
- a table of 64 stages and 1,024 microbatches made, checked and analysed;
- what a task costs beside what is compiled, on a stage that does nothing;
- memory of activations, counted and as the table says.

The one device is another process, which has one core when JAX starts: XLA sizes
its threads by the cores that it may use. As threads, the stages share XLA's two
threads, so what a stage leaves of its core the other may take.
"""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd import algorithms, models, transformer
from launch import cli, outputs, ray_session
from pipeline import analyze, executor, generate, processes, validate

_ONE_CORE = flags.DEFINE_bool("one_core", False, "Be the baseline; see above.")
_PEER = flags.DEFINE_string(
  "peer", None, "Python that has torch (pipeline). Default: this, if it has."
)

_STAGES, _MICROBATCHES = 2, 8
_DEPTH, _WIDTH, _HEADS, _LENGTH, _BATCH = 4, 256, 4, 64, 8
_ASYNCHRONOUS = 48  # microbatches of a PipeDream run


class _OneCore:
  """The baseline, in a process that has one core."""

  def __init__(self):
    command = [sys.executable, "-m", "launch.bench_pipeline", "--one_core"]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

  def seconds(self, microbatches: int) -> float:
    """Has it compute the gradients of so many microbatches."""
    self._process.stdin.write(f"{microbatches}\n")
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      raise RuntimeError("the process with one core has died; see above")
    return float(answer)

  def close(self) -> None:
    """Ends it."""
    self._process.communicate()


def _serve_one_core():
  """Does what `_OneCore` asks for."""
  layers, params, x = _stack()
  _one_device(layers, params, x)(1)
  once = _one_device(layers, params, x)
  for line in sys.stdin:
    start = time.perf_counter()
    once(int(line))
    print(time.perf_counter() - start, flush=True)


def _stack():
  """Blocks, their parameters, and a loss on what they make of noise."""
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


def _one_device(layers, params, x):
  """Gradients of microbatches, one after the other, and their sum."""
  fn = _stage_fn(layers, 0, len(layers))
  gradient = jax.jit(jax.grad(lambda p: fn(p, (), x)[0]))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)

  def once(microbatches):
    total = gradient(params)
    for _ in range(microbatches - 1):
      total = add(total, gradient(params))
    jax.block_until_ready(total)

  return once


def _arguments(table):
  """What an executor of the stack needs."""
  layers, params, x = _stack()
  server = algorithms.build("asgd", 1e-6, 1).server()
  cuts = np.linspace(0, len(layers), table.stages + 1).astype(int).tolist()
  parts = [
    executor.Part(_stage_fn(layers, a, b), params[a:b], server)
    for a, b in zip(cuts, cuts[1:], strict=False)
  ]
  extra = functools.partial(_extra, x)
  return {"schedule": table, "parts": parts, "extra": extra}


def _extra(x, stage, microbatch):
  del microbatch
  return x if stage == 0 else ()


def _again_and_again(engine):
  """Returns a function that obeys the whole table, with what follows."""
  held = {"state": engine.start()}

  def once():
    result = engine.run(held["state"])
    held["state"] = engine.again(result.state)
    return result

  return once


@contextlib.contextmanager
def _of_own_core(tables):
  """Engines whose stages are processes with a core each; none without Ray."""
  if importlib.util.find_spec("ray") is None:
    print("no Ray, so no stages in processes: pip install -e '.[ray]'")
    yield []
    return
  cores = [[core] for core in sorted(os.sched_getaffinity(0))[:_STAGES]]
  with contextlib.ExitStack() as stack:
    ray_session.start(None)
    stack.callback(ray_session.stop)
    engines = []
    for table in tables:
      make = functools.partial(_arguments, table)
      engine = processes.Processes(make, table, _STAGES, cores=cores)
      engines.append(engine)
      stack.callback(engine.close)
    yield engines


def _speed(rounds):
  """(a) and (b)."""
  s, m = _STAGES, _MICROBATCHES
  flushing = (m + s - 1) / m / s
  tables = {
    "GPipe": (generate.gpipe(s, m), flushing),
    "1F1B": (generate.one_f_one_b(s, m), flushing),
    "PipeDream": (generate.pipedream(s, _ASYNCHRONOUS), 1 / s),
  }
  names, seconds = list(tables), []
  engines = [executor.Executor(**_arguments(t)) for t, _ in tables.values()]
  one = _OneCore()
  with (
    contextlib.closing(one),
    _of_own_core([table for table, _ in tables.values()]) as others,
  ):
    contestants = [
      (name, where, *tables[name], _again_and_again(engine))
      for where, held in (("threads", engines), ("processes", others))
      for name, engine in zip(names, held, strict=False)
    ]
    for turn in range(rounds + 1):  # the first compiles and is not counted
      row = []
      for _, _, table, _, once in contestants:
        base = one.seconds(table.microbatches)
        start = time.perf_counter()
        once()
        row.append((base, time.perf_counter() - start))
      if turn:
        seconds.append(row)
  seconds = np.array(seconds)  # [rounds, contestants, (one core, pipeline)]
  rows = [
    _row(name, where, bound, *seconds[:, i].T)
    for i, (name, where, _, bound, _) in enumerate(contestants)
  ]
  rows += _peer(rounds, flushing)
  print(
    f"{_DEPTH} blocks of width {_WIDTH}, {_BATCH} x {_LENGTH} tokens a"
    f" microbatch, {s} stages, {m} microbatches (PipeDream:"
    f" {_ASYNCHRONOUS}, with its fill and drain)\n"
  )
  header = [
    *("schedule", "stages are", "one core ms", "bound ms", "ms", "of bound"),
    "range",
  ]
  print(outputs.format_table(header, rows))


def _row(name, where, bound, base, mine):
  # Turn by turn: what slows the machine slows both.
  ratio = base * bound / mine
  times = (base, bound * base, mine)
  return [
    *(name, where, *(f"{1e3 * np.median(value):.0f}" for value in times)),
    *(f"{np.median(ratio):.2f}", f"{ratio.min():.2f}-{ratio.max():.2f}"),
  ]


def _peer(rounds, bound):
  """Rows of PyTorch, if there is one."""
  python = _PEER.value
  if python is None:
    if importlib.util.find_spec("torch") is None:
      print("no torch to compare with: pip install torch, or --peer=PYTHON\n")
      return []
    python = sys.executable
  sizes = {
    "rounds": rounds,
    "depth": _DEPTH,
    "width": _WIDTH,
    "heads": _HEADS,
    "length": _LENGTH,
    "batch": _BATCH,
    "microbatches": _MICROBATCHES,
  }
  script = Path(__file__).with_name("bench_torch.py")
  command = [python, script, *(f"--{k}={v}" for k, v in sizes.items())]
  try:
    said = subprocess.run(command, capture_output=True, text=True, check=True)
  except OSError as error:
    raise ValueError(f"--peer={python}: {error.strerror}") from error
  except subprocess.CalledProcessError as error:
    last = (error.stderr.strip() or "it said nothing").splitlines()[-1]
    raise ValueError(f"--peer={python} has failed: {last}") from error
  found = {k: np.array(v) for k, v in json.loads(said.stdout).items()}
  base = np.full(rounds, np.median(found.pop("one_core")))
  return [
    _row(name, "torch", bound, base, mine) for name, mine in found.items()
  ]


def _table():
  """(c)."""
  start = time.perf_counter()
  table = generate.one_f_one_b(64, 1024)
  made = time.perf_counter()
  validate.validate(table)
  checked = time.perf_counter()
  analyze.analyze(table)
  done = time.perf_counter()
  print(
    f"\n64 stages, 1,024 microbatches: made in {made - start:.2f} s, checked in"
    f" {checked - made:.2f} s, analysed in {done - checked:.2f} s"
  )


def _overhead(rounds):
  """(e)."""
  layers = models.mlp(2, hidden=(2, 2))[1:]
  x = jnp.zeros((1, 2))
  params = models.init(layers, jax.random.key(0), x)
  server = algorithms.build("asgd", 1e-6, 1).server()

  def fn(first, last, params, x, extra):
    x = extra if first == 0 else x
    y, _ = models.apply(layers[first:last], params, x)
    return (jnp.mean(y) if last == len(layers) else y), ()

  parts = [
    executor.Part(functools.partial(fn, 0, 1), params[:1], server),
    executor.Part(functools.partial(fn, 1, 3), params[1:], server),
  ]
  m = 256
  table = generate.one_f_one_b(2, m)
  engine = executor.Executor(
    table, parts, lambda stage, m: x if stage == 0 else ()
  )
  state, best = engine.start(), []
  for _ in range(rounds):
    start = time.perf_counter()
    result = engine.run(state)
    best.append((time.perf_counter() - start) / len(table.time))
    state = engine.again(result.state)
  print(
    f"a task of a stage that does nothing: {1e6 * min(best):.0f} us at best,"
    f" {1e6 * np.median(best):.0f} us median (forward, or backward with its"
    " update)"
  )


def _memory():
  """(d)."""
  rows = []
  for make in (generate.gpipe, generate.one_f_one_b):
    table = make(_STAGES, _MICROBATCHES)
    engine = executor.Executor(**_arguments(table))
    sizes = [stage.kept_bytes for stage in engine.compiled]
    state, held = engine.start(), np.zeros(table.devices)
    for slot in range(1, table.slots + 1):
      state = engine.run(state, slot).state
      now = np.zeros(table.devices)
      for (stage, _), (kept, _) in state.kept.items():
        for leaf in jax.tree.leaves(kept):
          now[engine.places[stage][0]] += leaf.nbytes
      held = np.maximum(held, now)
    said = analyze.analyze(table, activation=sizes).peak_activations
    for device in range(table.devices):
      rows.append(
        [
          *(table.name, str(device), f"{said[device] / 1e6:.1f}"),
          f"{held[device] / 1e6:.1f}",
        ]
      )
  print("\nmost activations held, between slots, and as the table says")
  print(outputs.format_table(["schedule", "device", "said MB", "MB"], rows))


def run(rounds: int) -> None:
  """Runs all of it.

  Raises:
    ValueError: for rounds that are not positive.
  """
  if rounds < 1:
    raise ValueError(f"--rounds must be positive, not {rounds}")
  jax.config.update("jax_num_cpu_devices", _STAGES)
  _speed(rounds)
  _table()
  _overhead(rounds)
  _memory()


def main() -> None:
  """Is the baseline's process."""
  if not _ONE_CORE.value:
    raise ValueError("use `python -m launch.bench pipeline`")
  _serve_one_core()


if __name__ == "__main__":
  if "--one_core" in sys.argv and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
  cli.run(main)
