"""A protocol of a user's own: one model walks from worker to worker.

There is no server. The worker that has the model computes a gradient on a batch
of its own, takes a step, and sends the model on to the next one (a random walk
on a ring; Johansson et al., SIAM J. Optimization 20(3), 2009). So nothing is
ever stale, and one worker works at a time.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, names
from asgd.experiment import checkpoint, engines
from asgd.experiment.engines import learning_rates, outcomes, parameter_server
from asgd.experiment.engines.simulated import SimulatedEngine
from asgd.experiment.protocol import Protocol, Refusal, Runner
from asgd.simulator import concatenate


class Settings(NamedTuple):
  """A step, and how many batches a worker takes before it sends it on."""

  learning_rate: float
  stay: int = 1


def walk(learning_rate, workers, *, stay: int = 1) -> Settings:
  """One model that walks around a ring of workers."""
  del workers
  if type(stay) is not int or stay < 1:
    raise ValueError(f"stay must be a whole number from 1, not {stay!r}")
  return Settings(learning_rate, stay)


@dataclasses.dataclass(frozen=True, eq=False)
class WalkPlan(outcomes.OutcomePlan):
  """What the cells of a run share."""

  run: Any
  workers: int
  problem: Any
  settings: Settings
  messages: int
  learning_rate: float
  schedule: float
  batches: int = 1
  curvature_limit: float = math.nan


def plan(experiment, run, workers) -> WalkPlan:
  problem, rate = experiment.problem_of(run), run.config["learning_rate"]
  given = {"learning_rate": rate, "workers": workers, **run.options}
  settings = names.call("recipe", run.recipe, walk, given)
  messages = round(learning_rates.passes(run, problem))
  return WalkPlan(run, workers, problem, settings, messages, rate, rate)


class WalkEngine(SimulatedEngine):
  """A cell of a walk, in simulated time."""

  def _begin(self, seed, params, root, restore):
    plan = self._plan
    self._root, self._batch = root, plan.problem.batches(seed, plan.workers)
    self._times = [plan.durations(seed).stream(i) for i in range(plan.workers)]
    self._params, self._now = jax.device_get(params), 0.0
    self._parts = [concatenate([])]

    def unpack(saved):
      records = checkpoint.any_shapes(self._parts[0])
      return saved.tree({"params": self._params, "records": records})

    restored = restore(unpack)
    if restored is not None:
      self._params = restored["params"]
      self._parts = [base.Records(*restored["records"])]
      for worker in self._parts[0].worker.tolist():
        self._now += next(self._times[worker])
    return len(self._parts[0].loss)

  def _run(self, end):
    plan, rows = self._plan, []
    for job in range(self.done, end):
      worker = job // plan.settings.stay % plan.workers
      batch, key = self._batch(worker, job), jax.random.fold_in(self._root, job)
      (loss, _), gradient = plan.gradient(self._params, batch, key)
      step = jax.tree.map(lambda g: -plan.learning_rate * g, gradient)
      self._params = jax.tree.map(lambda x, s: x + s, self._params, step)
      self._now += next(self._times[worker])
      norms = [math.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(t)))
        for t in (gradient, step)]
      moved = job // plan.settings.stay != (job + 1) // plan.settings.stay
      nbytes = moved * sum(x.nbytes for x in jax.tree.leaves(self._params))
      rows.append(
        (job + 1, self._now, worker, job, 0, 0.0, float(loss), True, *norms)
        + (nbytes, nbytes, 0.0)
      )
    columns = zip(*rows, strict=True)
    like = self._parts[0]
    part = base.Records(
      *(np.array(c, x.dtype) for c, x in zip(columns, like, strict=True))
    )
    self._parts.append(part)
    return part

  def snapshot(self):
    clock = {"time": self._now}
    return engines.Snapshot(self._params, self.done, self.done, clock)

  def columns(self):
    records = self.records()
    summary = parameter_server.summary(records)
    hops = int((records.bytes_up > 0).sum())
    row = {"order": "walk", "messages": self.done, "updates": self.done}
    return {**row, **summary, "hops": hops, "simulated_time": self._now}

  def save(self):
    tree = {"params": self._params, "records": self.records()}
    return self.done, tree, {}


def describe(result) -> str:
  return f"{result['hops']} hops, time {result['simulated_time']:.4g}"


WALK = Protocol(
  name="walk",
  what="a model that walks",
  recipes={"walk": walk},
  runners={"simulate": Runner(plan, WalkEngine, describe)},
  refusals=(
    Refusal("gate", "nothing is ever stale"),
    Refusal("compress", "it sends models"),
  ),
  columns=(engines.Column("hops", "hops"),),
  column="hops",
)
