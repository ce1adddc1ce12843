"""The evaluations of a cell: when they are due, their rows, and the result.

The run loop (`asgd.experiment.loop`) calls `Evaluations.evaluate` whenever the
engine has reached `next_message`, and `result` at the end.
"""

from typing import Any

import jax
import numpy as np

from asgd import checks, problems
from asgd.experiment import build_cache, storage
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.engines import Engine, evaluation_messages

_CURVATURE_COLUMNS = "sharpness", "rate_x_sharpness"  # of some evaluations
# Columns of a result that the rows of evaluations do not have.
_RESULT_COLUMNS = (
  *("label", "recipe", "evaluations", "sent_accuracy", "sustained"),
  *(
    "rate_x_sharpness_limit",
    "params_sha256",
    "wall_seconds",
    *_CURVATURE_COLUMNS,
  ),
)


class Evaluations:
  """The evaluations of a cell: their messages and their rows.

  `next_message` is the message at which the next evaluation is due. The loop
  writes the rows to metrics.jsonl and to checkpoints.
  """

  def __init__(
    self,
    experiment: Experiment,
    cell: Cell,
    engine: Engine,
    rows: list[dict[str, Any]],
    diverged: bool,
  ):
    """`rows`: the evaluations of earlier attempts; `evaluate` adds to them.
    `diverged`: whether a loss was not finite."""
    self._cell, self._engine = cell, engine
    self._run, self._plan = experiment.runs[cell.label], experiment.plan(cell)
    self._problem = experiment.problem_of(self._run)
    self._sharpness = experiment.sharpness_of(self._run)
    self.rows, self.diverged = rows, diverged
    config = experiment.config
    self._due_messages = evaluation_messages(
      config["evaluations"], engine.total, engine.quantum
    )
    # Some evaluations, evenly spaced, measure the sharpness.
    n_due = len(self._due_messages)
    positions = np.linspace(
      0, n_due - 1, min(config["curvature_checks"], n_due)
    )
    self._sharpness_messages = {self._due_messages[round(i)] for i in positions}

  @property
  def next_message(self) -> int | None:
    """The message after which the next evaluation is due; None at the end."""
    n_rows, due_messages = len(self.rows), self._due_messages
    return due_messages[n_rows] if n_rows < len(due_messages) else None

  @property
  def finished(self) -> bool:
    """Whether the final evaluation was made: the last one that is due, or the
    first one after a NaN or after the engine ended early."""
    if self.diverged or self._engine.ended:
      return bool(self.rows) and self.rows[-1]["message"] >= self._engine.done
    return self.next_message is None

  def evaluate(self) -> dict[str, Any]:
    """Evaluates the engine's parameters; adds the row to `rows`, returns it."""
    snapshot = self._engine.snapshot()
    schedule = self._plan.schedule
    rate = schedule(snapshot.update) if callable(schedule) else schedule
    # `summary` covers the messages since the last evaluation.
    batches = snapshot.message * self._plan.batches
    previous_message = self.rows[-1]["message"] if self.rows else 0
    row = {
      "cell": self._cell.name,
      "algorithm": self._cell.title,
      "engine": self._run.engine,
      "workers": self._cell.workers,
      "seed": self._cell.seed,
      "message": snapshot.message,
      "update": snapshot.update,
      "epoch": batches / self._problem.batches_per_epoch,
      "examples": batches * self._run.config["batch_size"],
      **snapshot.clock,
      "learning_rate": float(rate),
      **self._engine.summary(previous_message, snapshot.message),
      "test_loss": float("nan"),
      "test_accuracy": float("nan"),
      "diverged": self.diverged,
    }
    # Only process 0 writes rows; other processes need only their messages.
    if jax.process_index() == 0:
      evaluation = _evaluate(
        self._problem, snapshot.params, self._cell, snapshot.message
      )
      row["test_loss"] = evaluation.loss
      row["test_accuracy"] = evaluation.accuracy
      if storage.is_finite(evaluation.measure):  # of tasks that have one
        row["test_measure"] = evaluation.measure
      if taken_names := evaluation.more.keys() & {*row, *_RESULT_COLUMNS}:
        raise ValueError(
          f"{self._cell.name}: evaluate returned {min(taken_names)!r}, and a"
          " row of results has a column of this name already: return another"
          " name"
        )
      row.update(evaluation.more)
      if self.next_message in self._sharpness_messages:
        row["sharpness"] = self._sharpness(snapshot.params)
        row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]
    self.rows.append(row)
    return row

  def result(self, params: Any, *, diverged: bool) -> dict[str, Any]:
    """Returns the row of results, with the final parameters."""
    cell, engine, plan = self._cell, self._engine, self._plan
    last_row = self.rows[-1]
    # The two largest values of learning rate x sharpness; NaN without any.
    products = sorted(
      (
        product
        for row in self.rows
        if storage.is_finite(product := row.get("rate_x_sharpness", np.nan))
      ),
      reverse=True,
    )[:2] or [float("nan")]
    keys = ["examples", "epoch", "test_accuracy", "test_loss"]
    # The columns after `diverged` are measures of the problem, and sharpness.
    columns_after = list(last_row)[list(last_row).index("diverged") + 1 :]
    keys += [key for key in columns_after if key not in _CURVATURE_COLUMNS]
    return {
      "cell": cell.name,
      "label": cell.label,
      "algorithm": cell.title,
      "engine": self._run.engine,
      "recipe": self._run.recipe,
      "workers": cell.workers,
      "seed": cell.seed,
      "evaluations": len(self.rows),
      **{key: last_row[key] for key in keys},
      # `engine.columns` replaces this value if the server looks ahead, because
      # it then sends other parameters than it has.
      "sent_accuracy": last_row["test_accuracy"],
      "train_loss": last_row["train_loss"],
      **engine.columns(),
      "learning_rate": plan.learning_rate,
      # The largest may be a single spike, so `sustained` is the second.
      "rate_x_sharpness": products[0],
      "sustained": products[-1],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": diverged,
      "params_sha256": storage.digest(params),
    }


def _evaluate(
  problem: problems.Problem, params: Any, cell: Cell, message: int
) -> problems.Evaluation:
  """Evaluates parameters at a message. Any error becomes a ValueError: a user's
  function, model or data may raise it."""
  failure = f"{cell.name}: evaluate(params) fails at message {message}"
  remedy = ": mend the function, or the model or data that it uses, and"
  with checks.user_code(failure, f"{remedy} {checks.RERUN}"):
    return problem.evaluate(params)


_compiled_evaluations = build_cache.BuildCache(8)


def compile_evaluation(experiment: Experiment, cell: Cell) -> None:
  """Compiles the evaluation before a live run, once for each problem.

  Later the workers would share the cores with the compiler. A user's function
  is not compiled here.
  """
  run = experiment.runs[cell.label]
  if run.given_recipe is not None:
    return
  problem, sharpness = experiment.problem_of(run), experiment.sharpness_of(run)
  with_sharpness = bool(experiment.config["curvature_checks"])

  def compile_both() -> Any:
    params = problem.init(jax.random.key(0))
    _evaluate(problem, params, cell, 0)
    return with_sharpness and sharpness(params)

  cache_objects = problem.evaluate, sharpness
  _compiled_evaluations.get(compile_both, with_sharpness, *cache_objects)
