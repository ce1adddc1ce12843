"""Updates per second of the simulator against a plain jitted optax loop."""

import functools
import itertools

import jax
import numpy as np
import optax

from asgd import algorithms, models, orders, simulator
from asgd import worker as worker_lib
from asgd.orders import durations

from . import turns
from .report import Measured, Report

_RATE = 0.01
_RECIPES = ("asgd", "dc_asgd_a", "nag_asgd", "gap_aware", "dana_zero")
_WORKERS = (8, 64)


def _plain_sgd(problem, updates) -> turns.Contestant:
  """Makes so many updates with one worker and no simulator."""
  tx = optax.sgd(_RATE)
  step = turns.plain_step(problem, tx)
  batch, key = problem.batches(0, 1), jax.random.key(0)
  params, jobs = problem.init(key), itertools.count()

  def block(state):
    losses = []
    for job in itertools.islice(jobs, updates):
      *state, loss = step(*state, batch(0, job), key)
      losses.append(loss)
    jax.device_get(losses)
    return state

  return turns.repeated(block, (params, tx.init(params)))


def _simulated(problem, name, workers, updates, rounds) -> turns.Contestant:
  """Simulates so many messages of a recipe in each of `rounds` + 1 calls."""
  recipe = algorithms.build(name, _RATE, workers)
  worker = worker_lib.gradient_worker(problem.loss)
  host = simulator.make_host(recipe.server(), worker)
  trace = orders.asynchronous(
    durations.homogeneous(), workers=workers, messages=(rounds + 1) * updates
  )
  ends = iter(simulator.end_of_message(trace)[updates - 1 :: updates])
  batch, root = problem.batches(0, workers), jax.random.key(0)
  simulation = host.init(problem.init(root), workers)

  def once():
    nonlocal simulation
    end = int(next(ends))
    simulation, _ = host.run(simulation, trace, end, batch=batch, root=root)

  return once


def run(
  report: Report, rounds: int = 9, block: int = 24, batch_size: int = 64
) -> None:
  """Prints updates/s and their ratio to the plain loop's, over so many rounds
  of `block` updates, with the CNN of configs/fashion.py."""
  layers = models.build("cnn", 10)
  problem = turns.image_problem(layers, 2048, batch_size)
  parameters = models.count(problem.init(jax.random.key(0)))
  contestants = {
    f"{name}, {workers} workers": functools.partial(
      _simulated, problem, name, workers, block, rounds
    )
    for name in _RECIPES
    for workers in _WORKERS
  }
  table = report.table(
    f"CNN of {parameters:,} parameters, batch {batch_size}",
    "algorithm",
    {"updates/s": ".0f", "plain/s": ".0f"},
    {"of plain": ".2f"},
  )
  plain = _plain_sgd(problem, block)
  for name, base, mine in turns.against(plain, contestants, rounds):
    speeds = (block / float(np.median(seconds)) for seconds in (mine, base))
    table.row(name, *speeds, Measured(base / mine))
