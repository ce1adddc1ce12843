"""The run loop: one cell from its start, or its checkpoint, to its result.

This loop trains every engine: it evaluates, writes the log, checkpoints and the
result, and stops at a loss that is not finite. Clocks decide when a checkpoint
is written; they never change a computed value.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import safe_files
from asgd.experiment import (
  build_cache,
  cell_files,
  cell_log,
  cell_progress,
  checkpoint,
  folder,
  storage,
)
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.engines import Context, Died, NonFiniteResult, due
from asgd.experiment.machine import Machine
from asgd.experiment.signals import GO_ON, NoSignals, Stopped
from asgd.parallel import processes

_DEATHS = 3  # attempts without progress, then the loop gives up a cell
_OF_CURVATURE = "sharpness", "rate_x_sharpness"
_CLEARLY = 1.2  # times the loss at the beginning
_GUESSING = 0.95  # fraction of the loss of guessing, for classes log(classes);
# the margin covers noise and class imbalance


def has_diverged(loss: np.ndarray, least: int, guess: float) -> bool:
  """Returns whether a run diverged, by its losses.

  The start is the mean of the first `least` messages (at least 8). The end is
  the mean of the last tenth. A run diverged if its end is more than a fifth
  above its start. It also diverged if the mean of `least` consecutive messages
  was, and the end is no better than `guess`, the loss of guessing (NaN:
  unknown): networks with dead units end so.
  """
  few = max(least, 8)
  if not np.isfinite(loss).all():
    return True
  if len(loss) < 2 * few:
    return False  # too few messages for a separate start and end
  began = loss[:few].mean()
  ended = loss[-max(few, len(loss) // 10) :].mean()
  limit = began + (_CLEARLY - 1) * abs(began)  # losses may be negative
  if ended > limit:
    return True
  parts = np.array_split(loss, len(loss) // few)
  highest = max(part.mean() for part in parts)
  return bool(highest > limit and ended > _GUESSING * guess)


class _Evaluations:
  """The evaluations of a cell: their messages and their rows."""

  def __init__(self, experiment, cell, engine, rows, diverged):
    self._experiment, self._cell, self._engine = experiment, cell, engine
    self._run, self._plan = experiment.runs[cell.label], experiment.plan(cell)
    self._problem = experiment.problem_of(self._run)
    self._sharpness = experiment.sharpness_of(self._run)
    self.rows: list[dict[str, Any]] = rows
    self.diverged: bool = diverged  # something was not finite
    config = experiment.config
    self._due = due(config["evaluations"], engine.total, engine.quantum)
    count = len(self._due)
    at = np.linspace(0, count - 1, min(config["curvature_checks"], count))
    self._checks = {self._due[round(i)] for i in at}  # with the sharpness

  @property
  def next(self) -> int | None:
    """The message after which the next evaluation is due."""
    made = len(self.rows)
    return self._due[made] if made < len(self._due) else None

  @property
  def finished(self) -> bool:
    """Whether the final evaluation was made.

    It is the last one that is due, or the one after a NaN, or the one where an
    engine ended early.
    """
    if self.diverged or self._engine.ended:
      return bool(self.rows) and self.rows[-1]["message"] >= self._engine.done
    return self.next is None

  def evaluate(self) -> dict[str, Any]:
    """Returns the row of the evaluation that is due, and keeps it."""
    snapshot = self._engine.snapshot()
    rate = self._plan.schedule
    rate = rate(snapshot.update) if callable(rate) else rate
    batches = snapshot.message * self._plan.batches
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
      "examples": batches * self._run.config["batch_size"],
      **snapshot.clock,
      "learning_rate": float(rate),
      **self._engine.summary(start, snapshot.message),
      "test_loss": float("nan"),
      "test_accuracy": float("nan"),
      "diverged": self.diverged,
    }
    if jax.process_index() == 0:
      evaluation = self._problem.evaluate(snapshot.params)
      row["test_loss"] = evaluation.loss
      row["test_accuracy"] = evaluation.accuracy
      if storage.is_finite(evaluation.measure):  # of tasks that have one
        row["test_measure"] = evaluation.measure
      row.update(evaluation.more)
      if self.next in self._checks:
        row["sharpness"] = self._sharpness(snapshot.params)
        row["rate_x_sharpness"] = row["learning_rate"] * row["sharpness"]
    self.rows.append(row)
    return row

  def result(self, params: Any) -> dict[str, Any]:
    """Returns the row of results, with the final parameters."""
    cell, engine, plan = self._cell, self._engine, self._plan
    last = self.rows[-1]
    products = [row.get("rate_x_sharpness") for row in self.rows]
    products = sorted(filter(storage.is_finite, products), reverse=True)
    products = products[:2] or [float("nan")]
    loss, few = engine.course(), max(cell.workers, engine.quantum)
    guess = self._problem.guess
    of_last = ["examples", "epoch", "test_accuracy", "test_loss"]
    # The problem adds its own measures behind the column `diverged`.
    after = list(last)[list(last).index("diverged") + 1 :]
    of_last += [key for key in after if key not in _OF_CURVATURE]
    return {
      "cell": cell.name,
      "label": cell.label,
      "algorithm": cell.title,
      "engine": self._run.engine,
      "recipe": self._run.recipe,
      "workers": cell.workers,
      "seed": cell.seed,
      "evaluations": len(self.rows),
      **{key: last[key] for key in of_last},
      "sent_accuracy": last["test_accuracy"],
      "train_loss": last["train_loss"],
      **engine.columns(),
      "learning_rate": plan.learning_rate,
      # The largest may be a single spike, so `sustained` is the second.
      "rate_x_sharpness": products[0],
      "sustained": products[-1],
      "rate_x_sharpness_limit": plan.learning_rate * plan.curvature_limit,
      "diverged": self.diverged or has_diverged(loss, few, guess),
      "params_sha256": storage.digest(params),
    }


def finished(
  experiment: Experiment, cell: Cell, workdir: Path | None
) -> dict[str, Any] | None:
  """Returns the result of a finished cell, else None.

  All processes call it. It removes files that a kill right after the cell's end
  left. Raises ValueError for a finished cell whose files were changed, if its
  engine cannot repeat it.
  """
  place = workdir and workdir / "cells" / cell.name
  kind = experiment.kind(cell)
  result = processes.share(
    place and folder.finished_result(place, repeatable=not kind.journaled)
  )
  if result is not None and place is not None:
    kind.clean(place)
    cell_files.tidy(place)
  return result


def train(
  experiment: Experiment,
  cell: Cell,
  workdir: Path | None,
  *,
  bar: Any,
  machine: Machine | None = None,
  signals: Any = NoSignals,
  ended: Callable[[Any, Any, list], None] | None = None,
) -> dict[str, Any]:
  """Trains one cell to its end, unless it is finished, and returns its result.
  All processes make this call; process 0 has the files.

  Args:
    workdir: folder of the experiment; None where another process has it.
    bar: shows the progress; an `asgd.experiment.progress.ProgressBar`.
    machine: the devices, hosts and faults that engines use.
    signals: its `received` is the number of a signal that asks to stop, or 0.
    ended: called with the records, the final parameters and the evaluations of
      a cell that this call has trained to its end.

  Raises:
    Stopped: after a signal, when the state is saved.
    NonFiniteResult: for a loss that is not finite, unless `on_nan` records it.
    cell_files.CellInUse: if another process trains the cell.
    ValueError: if an engine cannot resume, or its processes exited `_DEATHS`
      times without progress.
  """
  result = finished(experiment, cell, workdir)
  if result is not None:
    bar.skip(experiment.plan(cell).messages)
    return result
  if workdir is not None:
    folder.check_writable(workdir, cell.name)
  wrong = workdir and folder.fault(workdir / "cells" / cell.name)
  if wrong:
    bar.line(f"warning: {cell.name}: {wrong}; the cell is trained again")
  deaths, before, machine = 0, -1, machine or Machine()
  machine.lines.clear()

  def say(line):
    machine.lines.append(line)
    bar.line(f"{cell.name}: {line}")

  machine.show_line = say
  while True:
    attempt = _Attempt(experiment, cell, workdir, bar, machine, signals)
    try:
      with attempt:
        return attempt.run(ended)
    except Died as error:
      if attempt.start > before:
        deaths, before = 0, attempt.start
      deaths += 1
      if deaths == _DEATHS:
        message = f"{cell.name}: {error}"
        raise ValueError(message + _remedy(attempt, machine)) from error
      bar.skip(-attempt.counted)
      where = "resuming from the last checkpoint"
      if not attempt.has_saved:
        where = "starting again, as no checkpoint was saved yet"
      say(f"{error}; {where}")


def _remedy(attempt: "_Attempt", machine: Machine) -> str:
  """Returns the remedy for a cell whose processes exited in each attempt."""
  saved = "from the last checkpoint"
  if not attempt.has_saved:
    saved = "from the beginning, as nothing was saved"
  if machine.faults:
    return (
      ". The faults of --fault repeat each time that the cell resumes from a"
      f" message before them: leave them out and {GO_ON} {saved}"
    )
  return f"; {GO_ON} {saved}"


class _Attempt(contextlib.ExitStack):
  """One attempt at a cell, until the cell is finished or a process exits."""

  def __init__(self, experiment, cell, workdir, bar, machine, signals):
    super().__init__()
    self._experiment, self._cell = experiment, cell
    self._bar, self._machine, self._signals = bar, machine, signals
    self._place = workdir and workdir / "cells" / cell.name
    self._board = workdir and workdir / "tensorboard" / cell.name
    self._kind = experiment.kind(cell)
    # Messages that were received before this attempt, and in it.
    self.start, self.counted = -1, 0
    self._checkpoints, self._log = None, None
    self._rows, self._diverged = [], False  # of earlier attempts

  @property
  def has_saved(self) -> bool:
    """Whether a checkpoint exists that the cell can resume from."""
    if self._place is None:
      return self.start > 0
    return any((self._place / "checkpoints").glob("[0-9]*"))

  def run(
    self, ended: Callable[[Any, Any, list], None] | None
  ) -> dict[str, Any]:
    """Trains the cell from its last checkpoint to its end; returns its result.
    See `train` for `ended`."""
    began = time.monotonic()
    engine = self._open()
    before = self._rows, self._diverged
    self._book = _Evaluations(self._experiment, self._cell, engine, *before)
    if self._place is not None:
      settings = cell_log.settings_of(self._experiment, self._cell)
      progress = cell_progress.ProgressFile(
        self._place, self._about(), engine, self._machine.lines
      )
      self._log = cell_log.CellLog(
        *(self._place, self._board, self._book.rows, settings), progress
      )
      self.push(_closing(self._log.close))
    self.start = self.counted = engine.done
    self._bar.skip(engine.done)
    self._train(engine)
    params = jax.device_get(engine.snapshot().params)
    result = self._book.result(params)
    result["wall_seconds"] = time.monotonic() - began
    processes.fail_together(lambda: self._write(engine, params, result))
    if ended is not None:
      ended(engine.records(), params, self._book.rows)
    engine.discard()
    self._bar.finish(self._cell, result)
    return result

  def _about(self):
    """Returns what progress.json says of the cell itself."""
    run = self._experiment.runs[self._cell.label]
    return {**self._cell._asdict(), "engine": run.engine}

  def _open(self):
    """Starts the engine, from the last checkpoint if one exists."""
    rows = []
    if self._place is not None:
      lock = folder.hold_cell(self._place, self._experiment, self._cell)
      self.enter_context(lock)
      self._checkpoints = checkpoint.Checkpoints(self._place / "checkpoints")
      self.push(_closing(self._checkpoints.close))
      if self._kind.journaled:
        rows = cell_log.read_rows_so_far(self._place)
        _compile_evaluation(self._experiment, self._cell)
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
    """See `Context.restore`. Only process 0 reads the checkpoint; it shares the
    notes with the other processes."""

    def unpack(saved):
      notes = saved.notes
      value = rebuild(saved._replace(notes=notes["engine"]))
      return value, notes["rows"], notes["diverged"]

    restored = self._checkpoints and self._checkpoints.restore(unpack)
    if jax.process_count() > 1:
      notes = processes.share(restored and restored[1:])
      restored = notes and (restored and restored[0], *notes)
    if restored is None:
      return None
    value, self._rows, self._diverged = restored
    return value

  def _train(self, engine):
    """Trains to the last evaluation, or to the first after a NaN."""
    book, config, saved = self._book, self._experiment.config, time.monotonic()
    advance = self._log.progress.advance if self._log else engine.advance
    while not book.finished:
      target = book.next
      progress = advance(target)
      for line in progress.news:
        self._machine.show_line(line)
      if progress.count:
        self.counted += progress.count
        self._bar.update(self._cell, progress)
        if processes.is_first() and not self._kind.elsewhere:
          self._machine.worked()
      if progress.broken:
        book.diverged = True
        if config["on_nan"] == "stop":
          raise NonFiniteResult(
            f"{progress.broken}, or set --config.on_nan=record to keep the cell"
            " as diverged and continue"
          )
      if engine.done >= target or engine.ended:
        row = book.evaluate()
        if self._log is not None:
          self._log.write(row)
      is_old = time.monotonic() - saved >= config["checkpoint_seconds"]
      # All processes must decide alike. The clock of process 0 counts, and a
      # signal to any process stops all.
      gathered = processes.gather([is_old, self._signals.received])
      is_due, signal_number = bool(gathered[0, 0]), int(gathered[:, 1].max())
      if book.finished:
        break
      left = engine.stop() if signal_number else ""
      if (is_due or signal_number) and self._save(engine):
        saved = time.monotonic()
      if signal_number:
        place = f"{self._cell.name} at message {engine.done}{left}"
        raise Stopped(f"stopped in {place}; {GO_ON}", signal_number)

  def _save(self, engine) -> bool:
    """Writes a checkpoint, if the engine can give one now."""
    content = engine.save()
    if content is None:
      return False
    step, tree, notes = content
    book = self._book
    notes = {"engine": notes, "rows": book.rows, "diverged": book.diverged}
    processes.fail_together(
      lambda: self._checkpoints and self._checkpoints.save(step, tree, notes)
    )
    return True

  def _write(self, engine, params, result):
    """Writes the files of a finished cell."""
    if self._place is None:
      return
    for name, content in engine.extras().items():
      safe_files.write(self._place / name, content)
    self._log.progress.finish()
    kept, packs = engine.records(), not self._kind.journaled
    cell_files.finish(self._place, result, kept, params, packs=packs)


_evaluations = build_cache.BuildCache(8)  # compiled evaluations


def _compile_evaluation(experiment, cell) -> None:
  """Compiles the evaluation before a live run, once for each problem.

  Later the workers would share the cores with the compiler. A user's function
  is not compiled here.
  """
  run = experiment.runs[cell.label]
  if run.given is not None:
    return
  problem, sharpness = experiment.problem_of(run), experiment.sharpness_of(run)
  checked = bool(experiment.config["curvature_checks"])

  def compiled():
    params = problem.init(jax.random.key(0))
    problem.evaluate(params)
    return checked and sharpness(params)

  _evaluations.get(compiled, checked, problem.evaluate, sharpness)


def _closing(close: Callable[[], None]):
  """Returns an exit callback that closes something.

  An error of the block itself is raised rather than one of `close`.
  """

  def leave(kind, error, trace):
    del error, trace
    with contextlib.suppress(*([OSError, ValueError] if kind else [])):
      close()

  return leave
