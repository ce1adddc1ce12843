"""One cell of an experiment: a training run that can stop and go on.

What it computes is a function of the config and the cell. Clocks decide when
it looks up and when it writes a checkpoint, never what happens next.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np

from asgd import base, simulator
from launch import checkpoints, experiment, outputs


def _summary(records: base.Records) -> dict[str, float]:
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


def _finite(records: base.Records) -> np.ndarray:
  """Which messages left finite numbers, bool[U]."""
  return np.isfinite(records.loss) & np.isfinite(records.update_norm)


def _part(records: base.Records, start: int) -> base.Records:
  return base.Records(*(column[start:] for column in records))


class NotFinite(ValueError):
  """A loss or an update is NaN or infinite."""


class CellRun:
  """One cell: runs it, evaluates it, keeps its checkpoints and its log."""

  def __init__(
    self,
    exp: experiment.Experiment,
    plan: experiment.Plan,
    cell: experiment.Cell,
    folder: Path,
    sharpness: Callable[[Any], float],
    board: Path,
  ):
    """Starts the cell, or goes on from its last checkpoint.

    Args:
      exp: the experiment.
      plan: of this cell.
      cell: which one.
      folder: for its files.
      sharpness: from `diagnosis.make_sharpness`.
      board: folder for TensorBoard.
    """
    self._exp, self._plan, self._cell = exp, plan, cell
    self._folder = folder
    self._sharpness = sharpness
    config = exp.config
    self.trace = experiment.trace(exp, cell, plan.messages)
    self._ends = simulator.end_of_message(self.trace)
    count = min(config["evaluations"], plan.messages)
    self._evaluations = [
      round((k + 1) * plan.messages / count) for k in range(count)
    ]
    checks = np.linspace(0, count - 1, min(config["curvature_checks"], count))
    self._checks = {self._evaluations[round(i)] for i in checks}
    self._batch = exp.problem.batches(cell.seed, cell.workers)
    init_key, self._root = jax.random.split(jax.random.key(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    self._checkpoints = checkpoints.Checkpoints(folder / "checkpoints")
    simulation = plan.host.init(exp.problem.init(init_key), cell.workers)
    saved = self._checkpoints.restore(simulation)
    if saved is None:
      saved = checkpoints.Saved(simulation, simulator.concatenate([]), [])
    self.simulation = saved.simulation
    self._parts = [saved.records]
    self.rows = saved.notes
    self.message = len(saved.records.loss)  # received so far
    self.diverged = not _finite(saved.records).all()
    self._log = outputs.CellLog(folder, board, self.rows)

  def advance(self, messages: int) -> base.Records:
    """Obeys the trace for up to that many messages, not past an evaluation."""
    end = min(self.message + messages, self._next_evaluation())
    self.simulation, part = self._plan.host.run(
      self.simulation,
      self.trace,
      int(self._ends[end - 1]),
      batch=self._batch,
      root=self._root,
    )
    self._parts.append(part)
    self.message = end
    self._look_for_nan(part)
    if end == self._next_evaluation():
      self._evaluate()
    return part

  def _next_evaluation(self):
    return self._evaluations[len(self.rows)]

  @property
  def finished(self) -> bool:
    """Whether the last evaluation, or the first after a NaN, was made."""
    if self.diverged:
      return bool(self.rows) and self.rows[-1]["message"] == self.message
    return len(self.rows) == len(self._evaluations)

  def _records(self):
    self._parts = [simulator.concatenate(self._parts)]
    return self._parts[0]

  def save(self) -> None:
    """Writes a checkpoint."""
    self._checkpoints.save(self.simulation, self._records(), self.rows)

  def close(self) -> None:
    """Releases the files."""
    self._log.close()
    self._checkpoints.close()

  def _look_for_nan(self, part):
    finite = _finite(part)
    if finite.all() or self.diverged:
      return
    self.diverged = True
    if self._exp.config["on_nan"] == "record":
      return
    first = int(np.argmin(finite))
    cell, plan = self._cell, self._plan
    raise NotFinite(
      f"{cell.name}: the loss is {part.loss[first]} and the update"
      f" {part.update_norm[first]} at message"
      f" {self.message - len(finite) + first + 1}, staleness"
      f" {part.staleness[first]}, with learning rate {plan.learning_rate:g}."
      f" This algorithm at {cell.workers} workers is stable up to a sharpness"
      f" of {plan.curvature_limit:.3g} at that rate: lower"
      f" --config.learning_rate, use fewer workers or a longer warm-up, or set"
      f" --config.on_nan=record to keep the cell as diverged and go on"
    )

  def _evaluate(self):
    cell, plan = self._cell, self._plan
    start = self._evaluations[len(self.rows) - 1] if self.rows else 0
    state = self.simulation.server
    result = self._exp.problem.evaluate(state.params)
    version = int(state.version)
    rate = plan.schedule(version) if callable(plan.schedule) else plan.schedule
    row = {
      "cell": cell.name,
      "algorithm": cell.title,
      "workers": cell.workers,
      "seed": cell.seed,
      "message": self.message,
      "update": version,
      "epoch": self.message / self._exp.problem.batches_per_epoch,
      "time": float(self.trace.time[self._ends[self.message - 1] - 1]),
      "learning_rate": float(rate),
      **_summary(_part(self._records(), start)),
      "test_loss": result.loss,
      "test_accuracy": result.accuracy,
    }
    if self.message in self._checks:
      row["sharpness"] = self._sharpness(state.params)
      row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]
    self.rows.append(row)
    self._log.write(row)

  def result(self, seconds: float) -> dict[str, Any]:
    """What the cell came to."""
    cell, plan = self._cell, self._plan
    records, state = self._records(), self.simulation.server
    last, products = self.rows[-1], self._products()
    sent_accuracy = last["test_accuracy"]
    if not plan.server.sends_current:
      ticket = plan.server.send(state, jax.numpy.int32(0))
      sent_accuracy = self._exp.problem.evaluate(ticket.params).accuracy
    return {
      "cell": cell.name,
      "algorithm": cell.title,
      "recipe": self._exp.config["algorithms"][cell.label]["recipe"],
      "workers": cell.workers,
      "seed": cell.seed,
      "order": plan.order,
      "messages": len(records.loss),
      "evaluations": len(self.rows),
      "updates": int(state.version),
      "simulated_time": float(records.time[-1]),
      "test_accuracy": last["test_accuracy"],
      "test_loss": last["test_loss"],
      "sent_accuracy": sent_accuracy,
      **_summary(records),
      "learning_rate": plan.learning_rate,
      "rate_x_sharpness": products[0],
      "sustained": products[min(1, len(products) - 1)],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": self.diverged or self._collapsed(),
      "params_sha256": checkpoints.digest(state.params),
      "seconds": seconds,
    }

  def _products(self) -> list[float]:
    """Learning rate x sharpness where it is known, the largest first. The
    second largest is sustained: one check may be of a moment only."""
    values = [r.get("rate_x_sharpness") for r in self.rows]
    return sorted(filter(outputs.is_known, values), reverse=True) or [
      float("nan")
    ]

  def _collapsed(self) -> bool:
    """Whether the training loss blew up and ended no better than chance."""
    losses = [row["train_loss"] for row in self.rows]
    chance = np.log(self._exp.dataset.classes)
    if losses[-1] < 0.9 * chance:
      return False  # it has learnt something
    return bool(
      losses[-1] > 1.15 * min(losses)
      or losses[0] > 1.5 * chance
      or max(losses) > 1.1 * max(losses[0], chance)
    )

  def finish(self, result: dict[str, Any]) -> None:
    """Writes what is kept of a finished cell, result.json last."""
    self.save()
    outputs.save_records(self._folder / "records.npz", self._records())
    params = flax.serialization.to_bytes(
      jax.device_get(self.simulation.server.params)
    )
    outputs.write_atomically(self._folder / "params.msgpack", params)
    outputs.write_atomically(
      self._folder / "result.json", outputs.to_json(result, indent=2) + "\n"
    )


# What a report needs of a result; one without was written by another version.
RESULT_KEYS = frozenset(
  (
    *("algorithm", "workers", "messages", "evaluations", "simulated_time"),
    *("test_accuracy", "sent_accuracy", "test_loss", "diverged"),
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
