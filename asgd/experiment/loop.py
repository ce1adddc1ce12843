"""The run loop: one cell from its start, or its checkpoint, to its result.

Every engine is trained by this loop. It evaluates when that is due, keeps the
log and the checkpoints, stops at what is not finite, and writes the result.
Clocks decide when a checkpoint is written, never what happens next.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np

from asgd import diagnosis
from asgd.experiment import checkpoint, folder, storage
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.engines import Context, Died, NotFinite, due
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals, Stopped
from asgd.parallel import processes

_DEATHS = 3  # of an engine's processes without progress in between
_CLEARLY = 1.2  # times the loss at the beginning
_GUESSING = 0.95  # fraction of log(classes), the loss of uniform guessing; the
# margin covers noise and class imbalance


def has_diverged(loss: np.ndarray, least: int, classes: int) -> bool:
  """Returns whether training made it worse, as far as its losses tell.

  The beginning is the mean of the first messages; the end is that of the last
  tenth. A run has diverged if it ends more than a fifth above where it began;
  or if it was more than a fifth above that on the way (in as many messages in a
  row) and ends no better than uniform guessing (log of the number of classes),
  as networks do whose units died. A run whose loss falls throughout never
  counts as diverged.

  Args:
    loss: of each message, float[U], in their order.
    least: messages of the beginning; 8 at least are taken.
    classes: of the problem.
  """
  few = max(least, 8)
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


class Evaluations:
  """The evaluations of a cell: when they are due, and what came of them."""

  def __init__(
    self, experiment: Experiment, cell: Cell, sharpness: Callable[[Any], float]
  ):
    """Starts with none.

    Args:
      experiment: that the cell is of.
      cell: which one.
      sharpness: from `diagnosis.make_sharpness`.
    """
    self._experiment, self._cell = experiment, cell
    self._run, self._plan = experiment.runs[cell.label], experiment.plan(cell)
    self._problem = experiment.problem_of(self._run)
    self._sharpness = sharpness
    self.rows: list[dict[str, Any]] = []
    self.due: list[int] = []
    self._checks: set[int] = set()

  def start(self, engine: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Says when evaluations are due, and which were made before."""
    config = self._experiment.config
    self.due = due(config["evaluations"], engine.total, engine.quantum)
    count = len(self.due)
    at = np.linspace(0, count - 1, min(config["curvature_checks"], count))
    self._checks = {self.due[round(i)] for i in at}
    self.rows = [dict(row) for row in rows]

  @property
  def next(self) -> int | None:
    """The message after which the next evaluation is due."""
    made = len(self.rows)
    return self.due[made] if made < len(self.due) else None

  def evaluate(self, engine: Any, *, diverged: bool) -> dict[str, Any]:
    """Evaluates the engine's parameters; returns the row.

    Args:
      engine: at the message that is due.
      diverged: whether something was not finite.
    """
    snapshot = engine.snapshot()
    plan, batch = self._plan, self._run.config["batch_size"]
    rate = plan.schedule
    rate = rate(snapshot.update) if callable(rate) else rate
    batches = snapshot.message * plan.batches
    start = self.rows[-1]["message"] if self.rows else 0
    row = {
      "cell": self._cell.name,
      "algorithm": self._cell.title,
      "engine": self._run.engine,
      "workers": self._cell.workers,
      "seed": self._cell.seed,
      "message": snapshot.message,
      "update": snapshot.update,
      "epoch": batches / self._problem.batches_per_epoch,
      "examples": batches * batch,
      **snapshot.clock,
      "learning_rate": float(rate),
      **engine.summary(start, snapshot.message),
      "test_loss": float("nan"),
      "test_accuracy": float("nan"),
      "diverged": diverged,
    }
    if jax.process_index() == 0:
      self._measure(row, snapshot, self.next)
    self.rows.append(row)
    return row

  def _measure(self, row, snapshot, planned):
    """Adds what is measured of the parameters."""
    evaluation = self._problem.evaluate(snapshot.params)
    row["test_loss"] = evaluation.loss
    row["test_accuracy"] = evaluation.accuracy
    if storage.is_finite(evaluation.measure):  # of tasks that have one
      row["test_measure"] = evaluation.measure
    if planned in self._checks:
      row["sharpness"] = self._sharpness(snapshot.params)
      row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]

  def result(
    self, engine: Any, params: Any, *, diverged: bool
  ) -> dict[str, Any]:
    """Returns the row of results.

    Args:
      engine: at its end.
      params: that it ended with.
      diverged: whether something was not finite.
    """
    cell, last, plan = self._cell, self.rows[-1], self._plan
    loss = engine.records().loss
    products = sorted(
      filter(
        storage.is_finite, (row.get("rate_x_sharpness") for row in self.rows)
      ),
      reverse=True,
    ) or [float("nan")]
    classes = self._experiment.dataset.classes
    few = max(cell.workers, engine.quantum)
    return {
      "cell": cell.name,
      "label": cell.label,
      "algorithm": cell.title,
      "engine": self._run.engine,
      "recipe": self._run.recipe,
      "workers": cell.workers,
      "seed": cell.seed,
      "evaluations": len(self.rows),
      "examples": last["examples"],
      "epoch": last["epoch"],
      "test_accuracy": last["test_accuracy"],
      "test_loss": last["test_loss"],
      **{key: last[key] for key in ("test_measure",) if key in last},
      "sent_accuracy": last["test_accuracy"],
      "train_loss": last["train_loss"],
      **engine.columns(),
      "learning_rate": plan.learning_rate,
      # One check may be of a moment only: the second largest is sustained.
      "rate_x_sharpness": products[0],
      "sustained": products[min(1, len(products) - 1)],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": diverged or has_diverged(loss, few, classes),
      "params_sha256": storage.digest(params),
    }


def train(
  experiment: Experiment,
  cell: Cell,
  workdir: Path | None,
  *,
  bar: Any,
  machine: Machine | None = None,
  signals: Any = NoSignals,
) -> dict[str, Any]:
  """Trains one cell to its end and returns its result.

  With several processes all make the same calls; process 0 has the files.

  Args:
    experiment: that the cell is of.
    cell: which one.
    workdir: folder of the experiment; None where another process has it.
    bar: told how far it is; an `asgd.experiment.progress.ProgressBar`.
    machine: what engines run on.
    signals: its `received` says whether to stop.

  Raises:
    Stopped: once all is saved.
    NotFinite: for a loss that is not finite, unless that is to be recorded.
    folder.CellInUse: if another process trains the cell.
    ValueError: if an engine cannot go on.
  """
  deaths, before = 0, -1
  while True:
    training = _CellTraining(
      experiment, cell, workdir, bar, machine or Machine(), signals
    )
    try:
      with training:
        return training.run()
    except Died as error:
      if training.start > before:
        deaths, before = 0, training.start
      deaths += 1
      if deaths == _DEATHS:
        raise ValueError(
          f"{cell.name}: {error}; run the same command again to go on from what"
          " was saved"
        ) from error
      bar.skip(-training.counted)
      bar.line(f"{cell.name}: {error}; on from the last checkpoint")


class _CellTraining(contextlib.ExitStack):
  """One attempt at a cell."""

  def __init__(self, experiment, cell, workdir, bar, machine, signals):
    super().__init__()
    self._experiment, self._cell = experiment, cell
    self._bar, self._machine, self._signals = bar, machine, signals
    self._place = workdir and workdir / "cells" / cell.name
    self._board = workdir and workdir / "tensorboard" / cell.name
    self._kind = experiment.kind(cell)
    self.start, self.counted = -1, 0  # messages: before it, and by it
    self._diverged = False
    self._rows: list[dict[str, Any]] = []
    self._checkpoints, self._log = None, None

  def run(self):
    began = time.monotonic()
    problem = self._experiment.problem_of(
      self._experiment.runs[self._cell.label]
    )
    sharpness = diagnosis.make_sharpness(problem.loss, problem.probe)
    book = Evaluations(self._experiment, self._cell, sharpness)
    engine = self._open()
    book.start(engine, self._rows)
    if self._place is not None:
      self._log = folder.CellLog(self._place, self._board, book.rows)
      self.push(_closing(self._log.close))
    self.start = self.counted = engine.done
    self._bar.skip(engine.done)
    self._train(engine, book)
    result = self._finish(engine, book, time.monotonic() - began)
    self._bar.finish(self._cell, result)
    return result

  def _open(self):
    """Starts the engine, from the checkpoint if there is one."""
    rows = []
    if self._place is not None:
      claim = folder.claim_cell(self._place, self._experiment, self._cell)
      self.enter_context(claim)
      self._checkpoints = checkpoint.Checkpoints(self._place / "checkpoints")
      self.push(_closing(self._checkpoints.close))
      if self._kind.journaled:
        rows = folder.read_rows_so_far(self._place)
    engine = self._kind.start(
      Context(
        *(self._experiment, self._cell, self._experiment.plan(self._cell)),
        *(self._place, self._board, self._restore, rows, self._machine),
      )
    )
    self.push(_closing(engine.close))
    if self._kind.journaled:
      self._rows = [row for row in rows if row["message"] <= engine.done]
    return engine

  def _restore(self, rebuild):
    """See `Context.restore`; all processes are given what process 0 reads."""

    def unpack(saved):
      notes = saved.notes
      value = rebuild(saved._replace(notes=notes["engine"]))
      return value, notes["rows"], notes["diverged"]

    restored = self._checkpoints and self._checkpoints.restore(unpack)
    if jax.process_count() > 1:
      notes = processes.share(restored and restored[1:])
      value = restored and restored[0]
      restored = notes and (value, *notes)
    if restored is None:
      return None
    value, self._rows, self._diverged = restored
    return value

  def _train(self, engine, book):
    """Trains to the last evaluation, or to the first after a NaN."""
    saved = time.monotonic()
    while not self._is_finished(engine, book):
      target = book.next
      progress = engine.advance(target)
      self._tell(progress)
      if progress.broken:
        self._diverged = True
        if self._experiment.config["on_nan"] == "stop":
          raise NotFinite(
            f"{progress.broken}, or set --config.on_nan=record to keep the cell"
            " as diverged and go on"
          )
      if engine.done >= target:
        row = book.evaluate(engine, diverged=self._diverged)
        if self._log is not None:
          self._log.write(row)
      patience = self._experiment.config["checkpoint_seconds"]
      told = processes.gather(
        [time.monotonic() - saved >= patience, self._signals.received]
      )
      is_due, signal_number = bool(told[0, 0]), int(told[:, 1].max())
      if self._is_finished(engine, book):
        break
      left = engine.stop() if signal_number else ""
      if (is_due or signal_number) and self._save(engine, book):
        saved = time.monotonic()
      if signal_number:
        raise Stopped(
          f"stopped in {self._cell.name} at message {engine.done}{left}; run"
          " the same command again to go on",
          signal_number,
        )

  def _is_finished(self, engine, book):
    if self._diverged:
      return bool(book.rows) and book.rows[-1]["message"] >= engine.done
    return book.next is None

  def _tell(self, progress):
    for line in progress.news:
      self._bar.line(f"{self._cell.name}: {line}")
    if progress.count:
      self.counted += progress.count
      self._bar.update(self._cell, progress)

  def _save(self, engine, book) -> bool:
    """Writes a checkpoint, if the engine can give one now."""
    content = engine.save()
    if content is None:
      return False
    step, tree, notes = content
    whole = {"engine": notes, "rows": book.rows, "diverged": self._diverged}

    def write():
      if self._checkpoints is not None:
        self._checkpoints.save(step, tree, whole)

    processes.together(write)
    return True

  def _finish(self, engine, book, seconds):
    """Writes what is kept of a finished cell, result.json last."""
    params = jax.device_get(engine.snapshot().params)
    result = book.result(engine, params, diverged=self._diverged)
    result["wall_seconds"] = seconds
    if not self._kind.journaled:
      self._save(engine, book)

    def write():
      place = self._place
      if place is None:
        return
      storage.save_columns(place / "records.npz", engine.records())
      for name, content in engine.extras().items():
        storage.write_atomically(place / name, content)
      content = flax.serialization.to_bytes(params)
      storage.write_atomically(place / "params.msgpack", content)
      content = storage.to_json(result, indent=2) + "\n"
      storage.write_atomically(place / "result.json", content)

    processes.together(write)
    engine.discard()
    return result


def _closing(close: Callable[[], None]):
  """Closes something at the end; what went wrong before that is told first."""

  def leave(kind, error, trace):
    del error, trace
    with contextlib.suppress(*([OSError, ValueError] if kind else [])):
      close()

  return leave
