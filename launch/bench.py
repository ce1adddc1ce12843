"""Benchmarks: ratios against a baseline in the same run.

  python -m launch.bench simulator
  python -m launch.bench server
  python -m launch.bench pipeline
  python -m launch.bench parallel

Machines are noisy, so contestants take turns in short blocks, and what is
printed is the median over rounds of each one's speed over the baseline's.
"""

import functools
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from absl import flags

from asgd import (
  algorithms,
  data,
  durations,
  models,
  names,
  orders,
  problems,
  simulator,
)
from asgd import worker as worker_lib
from launch import bench_parallel, bench_pipeline, bench_server, cli, outputs

_SIZES = flags.DEFINE_list(
  "sizes", ["0.1", "1", "10", "100"], "MB of parameters (server)."
)
_SECONDS = flags.DEFINE_float("seconds", 5.0, "For each contestant (server).")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Blocks each contestant runs.")
_BLOCK = flags.DEFINE_integer("block", 24, "Updates in a block.")
_BATCH = flags.DEFINE_integer("batch_size", 64, "Images in a batch.")

_RATE = 0.01
_RECIPES = ("asgd", "dc_asgd_a", "nag_asgd", "gap_aware", "dana_zero")
_WORKERS = (8, 64)


def _problem(batch_size: int) -> problems.Problem:
  """The CNN of configs/simulate_fashion.py, at its batch, on random images."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (2048, 28, 28, 1), np.uint8)
  labels = rng.integers(0, 10, 2048, np.int32)
  mean, std = np.float32([128]), np.float32([74])
  dataset = data.Dataset(
    *("random", "drawn here", images, labels, images[:64], labels[:64]),
    *(10, mean, std),
  )
  return problems.classification(
    dataset, models.build("cnn", 10), batch_size=batch_size
  )


def _plain_sgd(problem) -> Callable[[int], None]:
  """The loop a user would write with one worker: one jitted, donated step."""
  tx = optax.sgd(_RATE)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch, key):
    gradient = jax.value_and_grad(problem.loss, has_aux=True)
    (loss, _), grads = gradient(params, batch, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  batch, key = problem.batches(0, 1), jax.random.key(0)
  params = problem.init(key)
  opt_state = tx.init(params)
  job = 0

  def run(updates):
    nonlocal params, opt_state, job
    losses = []
    for _ in range(updates):
      params, opt_state, loss = step(params, opt_state, batch(0, job), key)
      losses.append(loss)
      job += 1
    jax.device_get(losses)

  return run


def _simulated(problem, worker, name, workers, messages) -> Callable:
  recipe = algorithms.build(name, _RATE, workers)
  host = simulator.make_host(recipe.server(), worker)
  trace = orders.asynchronous(
    durations.homogeneous(), workers=workers, messages=messages
  )
  ends = simulator.end_of_message(trace)
  simulation = host.init(problem.init(jax.random.key(0)), workers)
  batch, root = problem.batches(0, workers), jax.random.key(0)
  message = 0

  def run(updates):
    nonlocal simulation, message
    message += updates
    simulation, _ = host.run(
      simulation, trace, int(ends[message - 1]), batch=batch, root=root
    )

  return run


def _simulator() -> None:
  """Updates per second of the simulator against a plain jitted optax loop."""
  rounds, block = _ROUNDS.value, _BLOCK.value
  problem = _problem(_BATCH.value)
  worker = worker_lib.gradient_worker(problem.loss)
  contestants = {("plain optax.sgd", 1): _plain_sgd(problem)}
  for name in _RECIPES:
    for workers in _WORKERS:
      contestants[name, workers] = _simulated(
        problem, worker, name, workers, (rounds + 1) * block
      )
  speeds = {key: [] for key in contestants}
  for turn in range(rounds + 1):  # the first compiles and is not counted
    for key, run in contestants.items():
      start = time.perf_counter()
      run(block)
      if turn:
        speeds[key].append(block / (time.perf_counter() - start))
  baseline = np.array(speeds["plain optax.sgd", 1])
  rows = [
    [
      name,
      str(workers),
      f"{np.median(speed):.0f}",
      f"{np.median(np.array(speed) / baseline):.2f}",
    ]
    for (name, workers), speed in speeds.items()
  ]
  parameters = models.count(problem.init(jax.random.key(0)))
  print(
    f"CNN of {parameters:,} parameters, batch {_BATCH.value}, on"
    f" {jax.default_backend()}; {rounds} rounds of {block} updates\n"
  )
  header = ["algorithm", "workers", "updates/s", "of plain"]
  print(outputs.format_table(header, rows), end="")


def _server() -> None:
  """Updates per second of the live server against Ray's own example."""
  bench_server.run(_SECONDS.value, [float(x) for x in _SIZES.value])


def _pipeline() -> None:
  """Tables obeyed on two stages against one device."""
  bench_pipeline.run(_ROUNDS.value)


def _parallel() -> None:
  """Steps shared by two devices against one, collectives against psum."""
  bench_parallel.run(_ROUNDS.value)


BENCHMARKS = {
  "simulator": _simulator,
  "server": _server,
  "pipeline": _pipeline,
  "parallel": _parallel,
}


def main(name: str = "") -> None:
  """Runs one benchmark."""
  if not name:
    raise ValueError(f"which benchmark? one of: {', '.join(BENCHMARKS)}")
  if _ROUNDS.value < 1 or _BLOCK.value < 1 or not _SECONDS.value > 0:
    raise ValueError("--rounds, --block and --seconds must be positive")
  names.lookup("benchmark", name, BENCHMARKS)()


if __name__ == "__main__":
  cli.run(main, words=1)
