"""The pipeline benchmark: what executing a table costs.

A stack of transformer blocks on two stages, one core each, against the same
stack and the same microbatches on one core:

- GPipe and 1F1B against the bubble bound, (M + S - 1) / M x T / S;
- PipeDream against T / S, in its steady state;
- a table of 64 stages and 1,024 microbatches made, checked and analysed;
- what a task costs beside what is compiled, on a stage that does nothing;
- memory of activations, counted and as the table says.

It is run by `python -m launch.bench pipeline` in a process of its own, as XLA
reads the number of its threads when it starts.
"""

import functools
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd import algorithms, models, transformer
from launch import cli, outputs
from pipeline import analyze, executor, generate, validate

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns that each contestant has.")

_STAGES, _MICROBATCHES = 2, 8
_DEPTH, _WIDTH, _HEADS, _LENGTH, _BATCH = 4, 256, 4, 64, 8
_ASYNCHRONOUS = 48  # microbatches of a PipeDream run


def run(rounds: int) -> None:
  """Runs the benchmark with one thread for each stage."""
  threads = "--xla_cpu_multi_thread_eigen=false"
  given = os.environ.get("XLA_FLAGS", "")
  environment = {**os.environ, "XLA_FLAGS": f"{given} {threads}".strip()}
  command = [sys.executable, "-m", "launch.bench_pipeline"]
  subprocess.run([*command, f"--rounds={rounds}"], env=environment, check=True)


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


def _one_device(layers, params, x, microbatches):
  """Gradients of microbatches, one after the other, and their sum."""
  fn = _stage_fn(layers, 0, len(layers))
  gradient = jax.jit(jax.grad(lambda p: fn(p, (), x)[0]))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)

  def once():
    total = gradient(params)
    for _ in range(microbatches - 1):
      total = add(total, gradient(params))
    jax.block_until_ready(total)

  return once


def _pipelined(table, layers, params, x, **options):
  server = algorithms.build("asgd", 1e-6, 1).server()
  cuts = np.linspace(0, len(layers), table.stages + 1).astype(int).tolist()
  parts = [
    executor.Part(_stage_fn(layers, a, b), params[a:b], server)
    for a, b in zip(cuts, cuts[1:], strict=False)
  ]
  engine = executor.Executor(
    table, parts, lambda stage, m: x if stage == 0 else (), **options
  )
  held = {"state": engine.start()}

  def once():
    result = engine.run(held["state"])
    held["state"] = engine.again(result.state)
    return result

  return engine, once


def _turns(contestants, rounds):
  """Returns the seconds of each contestant's turns."""
  for once in contestants.values():
    once()
  seconds = {name: [] for name in contestants}
  for _ in range(rounds):
    for name, once in contestants.items():
      start = time.perf_counter()
      once()
      seconds[name].append(time.perf_counter() - start)
  return seconds


def _speed(rounds):
  """(a) and (b)."""
  layers, params, x = _stack()
  s, m = _STAGES, _MICROBATCHES
  contestants = {
    "one": _one_device(layers, params, x, m),
    "GPipe": _pipelined(generate.gpipe(s, m), layers, params, x)[1],
    "1F1B": _pipelined(generate.one_f_one_b(s, m), layers, params, x)[1],
    "one, long": _one_device(layers, params, x, _ASYNCHRONOUS),
    "PipeDream": _pipelined(
      generate.pipedream(s, _ASYNCHRONOUS), layers, params, x
    )[1],
  }
  seconds = _turns(contestants, rounds)
  rows = []
  for name, base, bound in (
    ("GPipe", "one", (m + s - 1) / m / s),
    ("1F1B", "one", (m + s - 1) / m / s),
    ("PipeDream", "one, long", 1 / s),
  ):
    # Turn by turn: what slows the machine slows both.
    ratio = np.array(seconds[base]) * bound / np.array(seconds[name])
    times = [np.median(seconds[base]), bound * np.median(seconds[base])]
    times.append(np.median(seconds[name]))
    rows.append(
      [
        *(name, *(f"{1e3 * value:.0f}" for value in times)),
        *(f"{np.median(ratio):.2f}", f"{ratio.max():.2f}"),
      ]
    )
  print(
    f"{_DEPTH} blocks of width {_WIDTH}, {_BATCH} x {_LENGTH} tokens a"
    f" microbatch, {s} stages, {m} microbatches (PipeDream:"
    f" {_ASYNCHRONOUS}, with its fill and drain)\n"
  )
  header = ["schedule", "one device ms", "bound ms", "ms", "of bound", "best"]
  print(outputs.format_table(header, rows))


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
  layers, params, x = _stack()
  rows = []
  for make in (generate.gpipe, generate.one_f_one_b):
    table = make(_STAGES, _MICROBATCHES)
    engine, _ = _pipelined(table, layers, params, x)
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


def main() -> None:
  """Runs all of it, with as many threads as XLA has."""
  jax.config.update("jax_num_cpu_devices", _STAGES)
  _speed(_ROUNDS.value)
  _table()
  _overhead(_ROUNDS.value)
  _memory()


if __name__ == "__main__":
  cli.run(main)
