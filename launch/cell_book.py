"""What is written about one cell, however it is run: evaluations and result.

A simulated and a live run keep the same book, so that their results stand in
one table.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np

from asgd import base
from launch import checkpoints, experiment, outputs


def summary(records: base.Records) -> dict[str, float]:
  """What a stretch of records says, as the columns of an evaluation."""
  messages = float(records.message_norm.sum())
  return {
    "train_loss": float(records.loss.mean()),
    "staleness_mean": float(records.staleness.mean()),
    "staleness_max": int(records.staleness.max()),
    "gap_mean": float(records.gap.mean()),
    "gap_max": float(records.gap.max()),
    # Parameter change per unit of message: plain SGD's learning rate.
    "effective_rate": float(records.update_norm.sum()) / max(messages, 1e-30),
    "accepted": float(records.accepted.mean()),
  }


def finite(records: base.Records) -> np.ndarray:
  """Which messages left finite numbers, bool[U]."""
  return np.isfinite(records.loss) & np.isfinite(records.update_norm)


_CLEARLY = 1.2  # times the loss at the beginning
_GUESSING = 0.95  # of the loss of who guesses; noise and class sizes are less


def has_diverged(loss: np.ndarray, workers: int, classes: int) -> bool:
  """Whether training made it worse, as far as the losses of its messages tell.

  The beginning is the mean of the first messages, one for each worker and 8 at
  least; the end is that of the last tenth. A run has diverged if it ends more
  than a fifth above where it began; or if it was more than a fifth above that
  on the way (in as many messages in a row) and ends no better than who guesses
  (log of the number of classes), as networks do that died of it. A loss that
  falls from first to last has not, however high it still is.

  Args:
    loss: of each message, float[U], in their order.
    workers: N.
    classes: of the problem.
  """
  few = max(workers, 8)
  if not np.isfinite(loss).all():
    return True
  if len(loss) < 2 * few:
    return False  # beginning and end are one
  began = loss[:few].mean()
  ended = loss[-max(few, len(loss) // 10) :].mean()
  if ended > _CLEARLY * began:
    return True
  parts = np.array_split(loss, len(loss) // few)
  highest = max(part.mean() for part in parts)
  rose = highest > _CLEARLY * began
  return bool(rose and ended > _GUESSING * np.log(classes))


class Book:
  """The evaluations of a cell, when they are due, and what comes of them."""

  def __init__(
    self,
    exp: experiment.Experiment,
    plan: experiment.Plan,
    cell: experiment.Cell,
    sharpness: Callable[[Any], float],
  ):
    """Starts with no evaluation.

    Args:
      exp: the experiment.
      plan: of this cell.
      cell: which one.
      sharpness: from `diagnosis.make_sharpness`.
    """
    self._exp, self._plan, self._cell = exp, plan, cell
    self._sharpness = sharpness
    config = exp.config
    count = min(config["evaluations"], plan.messages)
    self.due = [round((k + 1) * plan.messages / count) for k in range(count)]
    checks = np.linspace(0, count - 1, min(config["curvature_checks"], count))
    self._checks = {self.due[round(i)] for i in checks}
    self.rows: list[dict[str, Any]] = []
    self._log: outputs.CellLog | None = None

  def open(self, folder: Path, board: Path, rows: list[dict]) -> None:
    """Opens the log, with the rows that were written before."""
    self.rows = rows
    self._log = outputs.CellLog(folder, board, rows)

  @property
  def next(self) -> int | None:
    """The message after which the next evaluation is due."""
    done = len(self.rows)
    return self.due[done] if done < len(self.due) else None

  def evaluate(
    self,
    message: int,
    params: Any,
    version: int,
    time: float,
    records: base.Records,
  ) -> None:
    """Evaluates.

    Args:
      message: how many were received.
      params: after that message.
      version: of these parameters.
      time: when they were reached.
      records: of the messages since the last evaluation.
    """
    cell, plan = self._cell, self._plan
    result = self._exp.problem.evaluate(params)
    rate = plan.schedule(version) if callable(plan.schedule) else plan.schedule
    batches = message * plan.steps
    row = {
      "cell": cell.name,
      "algorithm": cell.title,
      "workers": cell.workers,
      "seed": cell.seed,
      "message": message,
      "update": version,
      "epoch": batches / self._exp.problem.batches_per_epoch,
      "time": time,
      "learning_rate": float(rate),
      **summary(records),
      "test_loss": result.loss,
      "test_accuracy": result.accuracy,
    }
    if message in self._checks:
      row["sharpness"] = self._sharpness(params)
      row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]
    self.rows.append(row)
    self._log.write(row)

  def result(
    self,
    records: base.Records,
    params: Any,
    sent_params: Any,
    updates: int,
    seconds: float,
    *,
    diverged: bool,
  ) -> dict[str, Any]:
    """What the cell came to.

    Args:
      records: of all messages.
      params: the last ones.
      sent_params: what a worker would be sent now; None: those.
      updates: changes of the parameters.
      seconds: that it took.
      diverged: whether something was not finite.
    """
    cell, plan = self._cell, self._plan
    last, products = self.rows[-1], self._products()
    sent_accuracy = last["test_accuracy"]
    if sent_params is not None:
      sent_accuracy = self._exp.problem.evaluate(sent_params).accuracy
    return {
      "cell": cell.name,
      "algorithm": cell.title,
      "recipe": self._exp.config["algorithms"][cell.label]["recipe"],
      "workers": cell.workers,
      "seed": cell.seed,
      "order": plan.order,
      "messages": len(records.loss),
      "evaluations": len(self.rows),
      "updates": updates,
      "simulated_time": float(records.time[-1]),
      "test_accuracy": last["test_accuracy"],
      "test_loss": last["test_loss"],
      "sent_accuracy": sent_accuracy,
      **summary(records),
      "learning_rate": plan.learning_rate,
      "rate_x_sharpness": products[0],
      "sustained": products[min(1, len(products) - 1)],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": diverged
      or has_diverged(records.loss, cell.workers, self._exp.dataset.classes),
      "params_sha256": checkpoints.digest(params),
      "seconds": seconds,
    }

  def _products(self) -> list[float]:
    """Learning rate x sharpness where it is known, the largest first. The
    second largest is sustained: one check may be of a moment only."""
    values = [r.get("rate_x_sharpness") for r in self.rows]
    return sorted(filter(outputs.is_known, values), reverse=True) or [
      float("nan")
    ]

  def close(self) -> None:
    """Releases the log."""
    if self._log:
      self._log.close()


def finish(
  folder: Path, result: dict[str, Any], records: base.Records, params: Any
) -> None:
  """Writes what is kept of a finished cell, result.json last."""
  outputs.save_records(folder / "records.npz", records)
  content = flax.serialization.to_bytes(jax.device_get(params))
  outputs.write_atomically(folder / "params.msgpack", content)
  outputs.write_atomically(
    folder / "result.json", outputs.to_json(result, indent=2) + "\n"
  )


# What a report needs of a result; one without was written by another version.
# A live one has no simulated time: `seconds` is its time.
RESULT_KEYS = frozenset(
  (
    *("algorithm", "workers", "messages", "evaluations", "seconds"),
    *("test_accuracy", "sent_accuracy", "test_loss", "diverged", "accepted"),
    *("staleness_mean", "staleness_max", "gap_mean", "effective_rate"),
    *("rate_x_sharpness", "rate_x_sharpness_limit"),
  )
)


def finished_result(folder: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished and whole, else None: it is
  then made again from its last checkpoint."""
  result = outputs.read_json(folder / "result.json")
  try:
    rows = read_rows(folder)
    with np.load(folder / "records.npz") as records:
      whole = len(records["loss"]) == result["messages"]
    whole = whole and len(rows) == result["evaluations"]
    return result if whole and set(result) >= RESULT_KEYS else None
  except Exception:  # whatever is missing or cut short
    return None


def read_rows(folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell, from its metrics.jsonl."""
  text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]
