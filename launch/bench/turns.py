"""Shared parts of the benchmarks: turns, and a plain optax step."""

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import optax

from asgd import data, models, problems

Contestant = Callable[[], object]  # does its work once, to the end
Contestants = Mapping[str, Contestant]  # by name


def fixed_call(step: Callable[..., Any], *args: Any) -> Contestant:
  """Returns a contestant that calls `step` with the same arguments."""
  # JAX returns before the work is done: the call alone would seem too short.
  return lambda: jax.block_until_ready(step(*args))


def repeated(step: Callable[[Any], Any], state: Any) -> Contestant:
  """Returns a contestant that calls `step` on the state that its previous call
  returned."""

  def call_once() -> None:
    nonlocal state
    state = jax.block_until_ready(step(state))

  return call_once


def take_turns(
  contestants: Contestants,
  rounds: int,
  calls: int = 1,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, npt.NDArray[np.float64]]:
  """Runs contestants one after the other, round by round, `calls` calls each. A
  round before the first compiles the programs.

  Args:
    contestants: the contestants, by name.
    rounds: number of rounds that count.
    calls: number of calls of each contestant in a round.
    clock: a clock in seconds. `time.process_time` does not count the time that
      other programs take on the core.

  Returns:
    float64[rounds], seconds of a call, for each.
  """
  seconds: dict[str, list[float]] = {name: [] for name in contestants}
  for round_index in range(rounds + 1):
    for name, contestant in contestants.items():
      start = clock()
      for _ in range(calls):
        contestant()
      if round_index:  # round 0 compiles
        seconds[name].append((clock() - start) / calls)
  return {name: np.array(times) for name, times in seconds.items()}


def against(
  baseline: Contestant,
  contestants: Mapping[str, Callable[[], Contestant]],
  rounds: int,
  calls: int = 1,
) -> Iterator[tuple[str, npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
  """Runs each contestant in turns with the baseline: what slows the machine
  down slows both. A contestant is made when its turns begin, and dropped before
  the next is made. Yields (name, seconds of the baseline, seconds of the
  contestant); seconds are those of `take_turns`."""
  for name, make_contestant in contestants.items():
    pair = {"baseline": baseline, "contestant": make_contestant()}
    base_seconds, seconds = take_turns(pair, rounds, calls).values()
    yield name, base_seconds, seconds


def image_problem(
  layers: models.Layers, n_images: int, batch_size: int
) -> problems.Problem:
  """Returns a problem of 10 classes on `n_images` random 28 x 28 images."""
  rng = np.random.default_rng(0)
  x = rng.integers(0, 256, (n_images, 28, 28, 1), np.uint8)
  labels = rng.integers(0, 10, n_images, np.int32)
  mean, std = np.array([128], np.float32), np.array([74], np.float32)
  dataset = data.Dataset(  # the test examples are not used
    "random", "drawn here", x, labels, x[:64], labels[:64], 10, mean, std
  )
  return problems.classification(dataset, layers, batch_size=batch_size)


def python_with_torch(python_path: str | None) -> str | None:
  """Returns the Python that PyTorch is measured in: `python_path`, or this one
  if it has torch; else None, and prints how to name one."""
  if python_path is not None or importlib.util.find_spec("torch") is not None:
    return python_path or sys.executable
  print("no torch to compare with: pip install torch, or --peer=PYTHON")
  return None


def plain_step(
  problem: problems.Problem, tx: optax.GradientTransformation
) -> Callable[..., Any]:
  """Returns (params, opt_state, batch, key) -> (params, opt_state, loss)."""

  # Donated, as the simulator does: the step updates in place.
  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(
    params: Any, opt_state: Any, batch: Any, key: jax.Array
  ) -> tuple[Any, Any, jax.Array]:
    """Returns (params, opt_state, loss) after an update."""
    gradient = jax.value_and_grad(problem.loss, has_aux=True)
    (loss, _), grads = gradient(params, batch, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step
