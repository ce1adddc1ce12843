"""Runs of a coordinator (Sandblaster L-BFGS) in simulated time.

The result of a cell follows from its config and seed, as for all simulated
runs. Its order is not known before the run, because the line search decides how
often the batch is evaluated. So the cell writes its trace to `trace.csv`, and
the time at which it reached each loss to `iterates.csv`. `live_batches` has
live runs.
"""

import csv
import functools
import io
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from asgd import base, names, orders, problems, sandblaster, sharding
from asgd import worker as worker_lib
from asgd.checks import blame_batch
from asgd.experiment import checkpoint, checks, engines
from asgd.experiment.engines import learning_rates, networks, outcomes
from asgd.experiment.engines.simulated import (
  Restore,
  SimulatedEngine,
  rows_between,
)
from asgd.experiment.schema import Run
from asgd.orders import trace
from asgd.orders.network import Network

_job_key = jax.jit(worker_lib.job_key)


class CoordinatedPlan(outcomes.OutcomePlan):
  """The plan that the cells of a run share. The learning rate is the first step
  that a line search tries."""

  @property
  def batches(self) -> int:
    """Batches in one message: the sum of `push_every` portions."""
    return self.settings.push_every

  @property
  def call_network(self) -> Network | None:
    """Network between workers and shards; None: messages take no time."""
    section, shards = self.run.config["network"], self.settings.shards
    return networks.make_network(section, shards)

  def work(
    self, seed: int, root: jax.Array, batches: problems.Batches | None = None
  ) -> sandblaster.Work:
    """Returns the function portion -> (loss, gradient), which is the same for
    all workers. `batches` are the seed's, if they exist already."""
    batches = batches or self.problem.batches(seed, 1)

    def work(params: Any, portion: int) -> tuple[Any, Any]:
      """Returns (loss, gradient) of a portion."""
      with blame_batch(f"portion {portion}"):
        # By worker 0: a portion is the same for all workers.
        batch = batches(0, portion)
      # The same key for a portion, whichever worker computes it.
      key = _job_key(root, np.int32(0), np.int32(portion))
      (value, _), gradient = self.gradient(params, batch, key)
      return value, gradient

    return work


def plan(experiment: Any, run: Run, workers: int) -> CoordinatedPlan:
  """Builds and checks the plan of a run with a number of workers."""
  problem, config = experiment.problem_of(run), run.config
  # The learning rate of the config may be for other runs. Only a learning rate
  # of this run is an error.
  if "learning_rate" in experiment.config["runs"].get(run.label, {}):
    raise ValueError(
      f"config.runs.{run.label}.learning_rate {config['learning_rate']!r} is"
      f" not for the recipe {run.recipe}: the line search finds the steps; drop"
      " it"
    )
  # An error in an option of the recipe names config.runs.LABEL.KEY.
  with checks.prefix_errors(f"runs.{run.label}", tuple(run.options)):
    settings: Any = run.given_recipe or names.call(
      "recipe",
      run.recipe,
      sandblaster.RECIPES[run.recipe],
      {"learning_rate": 1.0, "workers": workers, **run.options},
    )
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    # Raises if there are more shards than parameters.
    sharding.make_plan(shapes, settings.shards)
  if isinstance(shapes, base.Variables):
    raise ValueError(
      f"config.runs.{run.label}: the recipe {run.recipe} needs a loss that is a"
      " function of the parameters alone, and config.model has statistics of"
      " batches (BatchNorm): use a model without them, or another recipe"
    )
  # By default a portion is a batch, and the whole batch is the training set.
  if not settings.portions:
    settings = settings._replace(portions=problem.batches_per_epoch)
  batches = learning_rates.budget_batches(run, problem)
  messages = round(batches / settings.push_every)
  _check_budget(run, problem, settings, workers, messages)
  checks.check_message_count(config, messages)
  return CoordinatedPlan(run, workers, problem, settings, messages)


def _check_budget(
  run: Run,
  problem: problems.Problem,
  settings: sandblaster.Settings,
  workers: int,
  messages: int,
) -> None:
  """Raises ValueError if the messages may not suffice for one evaluation."""
  jobs = settings.jobs
  other_workers = workers - 1  # the worker that starts a copy has no open job
  # At most `backup` copies of each of the jobs that are open at the end.
  copies = min(settings.backup, other_workers) * min(jobs, other_workers)
  min_messages = jobs + copies
  if messages >= min_messages:
    return
  # The remedy is in the unit that the config uses.
  key = "epochs" if run.config["examples"] is None else "examples"
  min_budget: float = min_messages * settings.push_every  # batches
  if key == "epochs":
    # Epochs, rounded up to two decimals, so that the remedy suffices.
    min_budget = math.ceil(100 * min_budget / problem.batches_per_epoch) / 100
  else:
    min_budget *= run.config["batch_size"]
  raise ValueError(
    f"config.{key} {run.config[key]:g} is {messages} messages in one cell, and"
    f" one evaluation of the whole batch (config.runs.{run.label}) takes up to"
    f" {min_messages}: {jobs} for its {settings.portions} portions, and"
    f" {copies} for copies of the last ones (backup tasks). Use config.{key}"
    f" {min_budget:g} or more; each iteration takes another evaluation at least"
  )


class CoordinatedEngine(SimulatedEngine):
  """A cell of Sandblaster L-BFGS in simulated time."""

  _clock_column = "time"  # the time of an evaluation
  _end_column = "simulated_time"  # the time at the end, in the result

  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Makes the simulation; see the base."""
    plan, params = self._plan, jax.device_get(params)
    # `restore` calls the function with a checkpoint, if there is one.
    saved = restore(lambda restored: _unpack(restored, params, plan.settings))
    simulation_class: Any = sandblaster.SandblasterSimulation
    if plan.call_network is not None:
      simulation_class = functools.partial(
        sandblaster.SandblasterOverNetwork, network=plan.call_network
      )
    self._simulation = simulation_class(
      *(plan.settings, params, plan.work(seed, root), plan.durations(seed)),
      workers=plan.workers,
      saved=saved,
    )
    return self._simulation.received

  @property
  def ended(self) -> bool:
    """Whether the coordinator ended before the last message."""
    return self._simulation.ended

  def _run(self, until):
    self._simulation.advance(until)
    return self._simulation.run_log.records(self.done)

  def _error_text(self, part: Any) -> str | None:
    """Describes the loss or gradient that ended the run, else None."""
    del part
    reason = self._simulation.state.reason
    # Another reason, such as convergence, ends a cell without an error.
    is_error = reason.startswith("not finite")
    return f"{self._name}: {reason}" if is_error else None

  def _trace(self):
    rows = self._simulation.run_log.rows
    return rows, len(rows)

  def _progress(self, part: Any) -> engines.Progress:
    """Returns the progress, with the news of the run log."""
    run_log = self._simulation.run_log
    # Clear the news of the log, so that each line is shown once.
    news, run_log.news = run_log.news, []
    progress = super()._progress(part)
    # Gradients of a coordinator are never stale, so the gap is 0.
    return progress._replace(gap=0.0, news=[] if progress.broken else news)

  def snapshot(self) -> engines.Snapshot:
    """Returns the last iterate, and the time."""
    simulation = self._simulation
    clock = {self._clock_column: simulation.now}
    # `iteration` is -1 before the first evaluation.
    update = max(simulation.state.iteration, 0)
    return engines.Snapshot(simulation.params(), self.done, update, clock)

  def records(self) -> base.Records:
    """Returns a row for each message."""
    return self._simulation.run_log.records()

  def loss_course(self) -> np.ndarray:
    """Returns the losses of the iterates, without losses of rejected steps."""
    losses = [iterate.loss for iterate in self._simulation.run_log.iterates]
    return np.array(losses, np.float64)

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns the state so far, and the staleness of some messages."""
    records = rows_between(self.records(), start, end)
    state = self._simulation.state
    # Before the first iterate there are only the losses of single portions.
    loss = state.loss if state.iteration >= 0 else engines.mean(records.loss)
    return {
      "train_loss": loss,
      "gradient_norm": state.norm,
      "iterations": max(state.iteration, 0),
      "evaluations_of_batch": state.evaluations,
      "staleness_mean": engines.mean(records.staleness),
      "staleness_max": int(records.staleness.max(initial=0)),
      "accepted": engines.mean(records.accepted),
    }

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    simulation, settings = self._simulation, self._plan.settings
    state, records = simulation.state, self.records()
    return {
      "order": settings.protocol,
      "messages": self.done,
      "updates": max(state.iteration, 0),
      "portions": settings.portions,
      "backup_started": simulation.counts.copies,
      "backup_first": simulation.counts.first,
      "fallbacks": state.fallbacks,
      "shard_recoveries": simulation.recoveries,
      "bytes_up": int(records.bytes_up.sum()),
      "bytes_down": int(records.bytes_down.sum()),
      "reason": state.reason or "the end of config.epochs",
      **self.summary(0, self.done),
      self._end_column: simulation.now,
      **self._load_of_network(),
    }

  def _load_of_network(self) -> dict[str, float]:
    """Returns the columns of the network; {} if the run has none."""
    if self._plan.call_network is None:
      return {}
    now = self._simulation.now
    return networks.columns(self._simulation.use(), self.done, now)

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns the state at the start of the present evaluation."""
    step, tree, notes = self._simulation.save()
    return step, tree, notes

  def extras(self) -> dict[str, str]:
    """Returns the trace and the table of iterates."""
    buffer = io.StringIO()
    rows = csv.writer(buffer, lineterminator="\n")
    rows.writerow(sandblaster.Iterate._fields)
    rows.writerows(self._simulation.run_log.iterates)
    table = trace.from_events(self._simulation.run_log.rows)
    return {"trace.csv": orders.dump(table), "iterates.csv": buffer.getvalue()}


def _unpack(
  restored: checkpoint.Restored,
  params: base.Params,
  settings: sandblaster.Settings,
) -> sandblaster.Saved:
  """Returns the state of a checkpoint."""
  template = sandblaster.template(restored.notes, params, settings)
  # These tables grow, so the template cannot have their lengths.
  for key in ("records", "trace", "iterates"):
    template[key] = checkpoint.any_shapes(template[key])
  return sandblaster.Saved(0, restored.tree(template), restored.notes)


# Columns of tables with a cell that has a coordinator; updates are iterations.
COLUMNS = (
  engines.Column("updates", "updates", 1, "{:.0f}"),
  engines.Column("batch evaluations", "evaluations_of_batch", 1, "{:.0f}"),
  engines.Column("gradient norm", "gradient_norm", 1, "{:.2g}"),
)


def describe(result: Mapping[str, Any]) -> str:
  """Returns iterations, evaluations and reason of the end in a few words."""
  words = (
    "{updates} iterations, {evaluations_of_batch} evaluations of {portions}"
    " portions, loss {train_loss:.4g}, gradient norm {gradient_norm:.2g}"
  ).format_map(result)
  if "simulated_time" in result:
    words += f" at time {result['simulated_time']:.4g}"
  if result["backup_started"]:
    words += (
      f"; {result['backup_first']} of {result['backup_started']} backup tasks"
      " came first"
    )
  if result["fallbacks"]:
    words += f"; {result['fallbacks']} times back to steepest descent"
  words += networks.describe(result)
  # The coordinator's own words, such as "the gradient norm".
  return f"{words}; ended by {result['reason']}"
