"""One cell of an experiment: a training run that can stop and go on.

What it computes is a function of the config and the cell. Clocks decide when
it looks up and when it writes a checkpoint, never what happens next.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import base, simulator
from launch import cell_book, checkpoints, experiment


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
    self.trace = experiment.trace(exp, cell, plan.messages)
    self._ends = simulator.end_of_message(self.trace)
    self._book = cell_book.Book(exp, plan, cell, sharpness)
    self._batch = experiment.batches(exp, cell)
    init_key, self._root = jax.random.split(jax.random.key(cell.seed))
    folder.mkdir(parents=True, exist_ok=True)
    self._checkpoints = checkpoints.Checkpoints(folder / "checkpoints")
    simulation = plan.host.init(exp.problem.init(init_key), cell.workers)
    saved = self._checkpoints.restore(simulation)
    if saved is None:
      saved = checkpoints.Saved(simulation, simulator.concatenate([]), [])
    self.simulation = saved.simulation
    self._parts = [saved.records]
    self.message = len(saved.records.loss)  # received so far
    self.diverged = not cell_book.finite(saved.records).all()
    self._book.open(folder, board, saved.notes)

  def advance(self, messages: int) -> base.Records:
    """Obeys the trace for up to that many messages, not past an evaluation."""
    end = min(self.message + messages, self._book.next)
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
    if end == self._book.next:
      self._evaluate()
    return part

  @property
  def finished(self) -> bool:
    """Whether the last evaluation, or the first after a NaN, was made."""
    rows = self._book.rows
    if self.diverged:
      return bool(rows) and rows[-1]["message"] == self.message
    return self._book.next is None

  def _records(self):
    self._parts = [simulator.concatenate(self._parts)]
    return self._parts[0]

  def save(self) -> None:
    """Writes a checkpoint."""
    self._checkpoints.save(self.simulation, self._records(), self._book.rows)

  def close(self) -> None:
    """Releases the files."""
    self._book.close()
    self._checkpoints.close()

  def _look_for_nan(self, part):
    finite = cell_book.finite(part)
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
    rows, state = self._book.rows, self.simulation.server
    start = rows[-1]["message"] if rows else 0
    self._book.evaluate(
      self.message,
      state.params,
      int(state.version),
      float(self.trace.time[self._ends[self.message - 1] - 1]),
      _part(self._records(), start),
    )

  def result(self, seconds: float) -> dict[str, Any]:
    """What the cell came to."""
    state, sent = self.simulation.server, None
    if not self._plan.server.sends_current:
      sent = self._plan.server.send(state, jax.numpy.int32(0)).params
    return self._book.result(
      *(self._records(), state.params, sent, int(state.version), seconds),
      diverged=self.diverged,
    )

  def finish(self, result: dict[str, Any]) -> None:
    """Writes what is kept of a finished cell, result.json last."""
    self.save()
    cell_book.finish(
      self._folder, result, self._records(), self.simulation.server.params
    )
