"""The base of plans in which the order is a result of the run.

Tables and a coordinator decide in simulated time which worker works next. They
have no server of `asgd.server`, so they have no `ServerPlan`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from asgd import losses, problems, simulator
from asgd.experiment.engines import clocks, worker_devices
from asgd.experiment.schema import Run
from asgd.orders import durations


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as an object
class OutcomePlan:
  """The parts that the cells of a run with one number of workers share."""

  run: Run
  workers: int
  problem: problems.Problem
  settings: Any  # of the recipe
  messages: int  # received in one cell
  learning_rate: float = 1.0  # the peak
  schedule: Any = 1.0  # float, or update -> learning rate
  curvature_limit: float = math.nan  # unknown for these recipes

  @functools.cached_property
  def gradient(self) -> Any:
    """(params, batch, key) -> ((loss, Aux), gradient or updates), compiled
    once for all plans of a problem."""
    problem, devices = self.problem, worker_devices.of_run(self.run)
    return _compile_gradient(problem.loss, problem.updates, devices)

  def of_seed(self, seed: int) -> Any:
    """Returns the plan of a cell, which is the same for all seeds."""
    del seed
    return self

  def durations(self, seed: int) -> durations.Durations:
    """Returns the durations of jobs."""
    return clocks.run_durations(self.run, seed)


@functools.lru_cache(maxsize=32)
def _compile_gradient(
  loss: Any, updates: Any, devices: simulator.WorkerDevices
) -> Any:
  """Compiles `OutcomePlan.gradient` for the devices of a worker. Plans with
  equal arguments share the result."""
  # A problem with its own updates, such as counts, has no gradient.
  if updates is None:
    updates = jax.value_and_grad(losses.as_loss(loss), has_aux=True)
  return simulator.compile_divided(updates, devices)
