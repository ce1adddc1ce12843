"""The run loop: one cell from its start, or its checkpoint, to its result.

This loop trains every engine: it evaluates, writes the log, checkpoints and the
result, and stops at a loss that is not finite. Clocks decide when a checkpoint
is written; they never change a computed value.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import safe_files
from asgd.checks import RERUN
from asgd.experiment import (
  cell_files,
  cell_log,
  cell_progress,
  checkpoint,
  folder,
)
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.engines import (
  Context,
  Engine,
  NonFiniteResult,
  ProcessExited,
  Progress,
)
from asgd.experiment.evaluations import Evaluations, compile_evaluation
from asgd.experiment.machine import Machine
from asgd.experiment.signals import NoSignals, Stopped
from asgd.parallel import processes
from asgd.problems import finite

_MAX_ATTEMPTS = 3  # attempts without progress, after which a cell fails
_DIVERGENCE_FACTOR = 1.2  # loss at the end / at the start, for positive losses
# A loss above this fraction of the loss of guessing is no better than guessing.
# The margin covers noise and class imbalance.
_GUESSING_FRACTION = 0.95
_SEARCHED_JOBS = 64  # before and after the last message, for a bad value


def has_diverged(loss: np.ndarray, window: int, guess: float) -> bool:
  """Returns whether a run diverged, by its losses.

  The start is the mean of the first `window` messages (at least 8). The end is
  the mean of the last tenth. A run diverged if its end is more than a fifth
  above its start. It also diverged if the mean of `window` consecutive messages
  was that high, and the end is no better than `guess`, the loss of guessing
  (NaN: unknown), as in a network with dead units.
  """
  length = max(window, 8)
  if not np.isfinite(loss).all():
    return True
  if len(loss) < 2 * length:
    return False  # too few messages for a separate start and end
  start = loss[:length].mean()
  end = loss[-max(length, len(loss) // 10) :].mean()
  # `abs`, because losses may be negative.
  limit = start + (_DIVERGENCE_FACTOR - 1) * abs(start)
  if end > limit:
    return True
  # Or the loss rose and fell again. A guess of NaN makes the comparison False.
  chunks = np.array_split(loss, len(loss) // length)
  highest = max(chunk.mean() for chunk in chunks)
  return bool(highest > limit and end > _GUESSING_FRACTION * guess)


def finished_result(
  experiment: Experiment, cell: Cell, workdir: Path | None
) -> dict[str, Any] | None:
  """Returns the result of a finished cell, else None.

  All processes call this function. It removes files that a kill right after the
  cell's end left. Raises ValueError if files of a finished cell were changed,
  and its engine cannot repeat the cell.
  """
  path = workdir and workdir / "cells" / cell.name
  engine_kind = experiment.engine_kind(cell)
  result = processes.share(
    path and folder.finished_result(path, repeatable=not engine_kind.journaled)
  )
  if result is not None and path is not None:
    engine_kind.clean(path)
    cell_files.remove_leftovers(path)
  return result


# A caller's function of (records, final parameters, rows of the evaluations,
# `Engine.extras`).
EndCallback = Callable[[Any, Any, list[dict[str, Any]], dict[str, str]], None]


def train(
  experiment: Experiment,
  cell: Cell,
  workdir: Path | None,
  *,
  bar: Any,
  machine: Machine | None = None,
  signals: Any = NoSignals,
  on_end: EndCallback | None = None,
) -> dict[str, Any]:
  """Trains one cell to its end, unless it is finished, and returns its result.
  All processes make this call; process 0 has the files.

  Args:
    workdir: folder of the experiment; None on a process that writes no files.
    bar: shows the progress; an `asgd.experiment.progress.ProgressBar`.
    machine: the devices, hosts and faults that engines use.
    signals: its `received` is the number of a signal that asks to stop, or 0.
    on_end: called with the records, the final parameters, the evaluations and
      further files of a cell that this call has trained to its end.

  Raises:
    Stopped: after a signal, when the state is saved.
    NonFiniteResult: for a loss that is not finite, unless `on_nan` records it.
    cell_files.CellInUse: if another process trains the cell.
    ValueError: if an engine cannot resume, or its processes exited in
      _MAX_ATTEMPTS attempts in a row without progress.
  """
  # [1] A finished cell has a result; a damaged cell is trained again.
  result = finished_result(experiment, cell, workdir)
  if result is not None:
    bar.skip(experiment.plan(cell).messages)
    return result
  if workdir is not None:
    folder.check_writable(workdir, cell.name)
  fault = workdir and folder.fault(workdir / "cells" / cell.name)
  if fault:
    bar.line(f"warning: {cell.name}: {fault}; the cell is trained again")
  # [2] Lines of the engine go to the bar and to the cell's progress.json.
  machine = machine or Machine()
  lines = machine.lines
  lines.clear()

  def show(line: str) -> None:
    """Shows a line on this cell."""
    lines.append(line)
    bar.line(f"{cell.name}: {line}")

  machine.show_line = show
  # [3] Attempts, until one ends the cell, or _MAX_ATTEMPTS in a row fail with
  # no progress.
  failed_attempts, last_start = 0, -1
  while True:
    attempt = _Attempt(experiment, cell, workdir, bar, machine, signals)
    try:
      with attempt:
        return attempt.run(on_end)
    except ProcessExited as error:
      if attempt.start > last_start:
        failed_attempts, last_start = 0, attempt.start
      failed_attempts += 1
      if failed_attempts == _MAX_ATTEMPTS:
        message = f"{cell.name}: {error}"
        raise ValueError(message + _remedy(attempt, machine)) from error
      bar.skip(-attempt.counted)  # the next attempt counts its start anew
      action = "resuming from the last checkpoint"
      if not attempt.has_saved:
        action = "starting again, as no checkpoint was saved yet"
      show(f"{error}; {action}")


def _board_folder(cell_folder: Path) -> Path:
  """Returns the folder WORKDIR/tensorboard/NAME of a WORKDIR/cells/NAME."""
  return cell_folder.parents[1] / "tensorboard" / cell_folder.name


def _remedy(attempt: "_Attempt", machine: Machine) -> str:
  """Returns the remedy for a cell in which processes failed in each attempt."""
  resume_point = "from the last checkpoint"
  if not attempt.has_saved:
    resume_point = "from the beginning, as nothing was saved"
  if machine.faults:
    return (
      ". The faults of --fault occur again each time that the cell resumes from"
      f" an earlier message: leave them out and {RERUN} {resume_point}"
    )
  return f"; {RERUN} {resume_point}"


class _Attempt(contextlib.ExitStack):
  """One attempt at a cell, until the cell is finished or a process exits.

  An attempt closes in this order: the log, the engine, the checkpoints, the
  lock of the cell's folder.
  """

  def __init__(
    self,
    experiment: Experiment,
    cell: Cell,
    workdir: Path | None,
    bar: Any,
    machine: Machine,
    signals: Any,
  ):
    """Opens nothing yet; the arguments are those of `train`."""
    super().__init__()
    self._experiment, self._cell = experiment, cell
    self._bar, self._machine, self._signals = bar, machine, signals
    self._folder = workdir and workdir / "cells" / cell.name
    self._engine_kind = experiment.engine_kind(cell)
    self._run = experiment.runs[cell.label]
    # Message at which this attempt began; messages that the bar has counted.
    self.start, self.counted = -1, 0
    # Files of process 0; None on the others.
    self._checkpoints: checkpoint.Checkpoints | None = None
    self._log: cell_log.CellLog | None = None
    self._progress: cell_progress.ProgressFile | None = None
    # Rows of earlier attempts, which `_restore` or `_open` reads.
    self._rows: list[dict[str, Any]] = []
    self._diverged = False

  @property
  def has_saved(self) -> bool:
    """Whether a checkpoint exists that the cell can resume from."""
    if self._folder is None:
      return self.start > 0
    # A save that was killed has left a folder of another name.
    saved = (self._folder / "checkpoints").glob("*")
    return any(path.name.isdecimal() for path in saved)

  def run(self, on_end: EndCallback | None) -> dict[str, Any]:
    """Trains the cell from its last checkpoint to its end; returns its result.
    See `train` for `on_end`."""
    start_time = time.monotonic()
    # [1] The engine, and the evaluations and the log so far.
    engine = self._open()
    evaluations = Evaluations(
      self._experiment, self._cell, engine, self._rows, self._diverged
    )
    if self._folder is not None:
      self._open_log(engine, self._folder, evaluations.rows)
    self.start = self.counted = engine.done
    self._bar.skip(engine.done)
    # Live engines say it themselves, with the source of their state.
    if engine.done and not self._engine_kind.journaled:
      self._bar.line(f"{self._cell.name}: resuming at message {engine.done}")
    # [2] Training and evaluations.
    self._train(engine, evaluations)
    # [3] The result.
    params = jax.device_get(engine.snapshot().params)
    window = max(self._cell.workers, engine.quantum)
    guess = self._experiment.problem_of(self._run).guess
    diverged = has_diverged(engine.loss_course(), window, guess)
    diverged = evaluations.diverged or diverged
    result = evaluations.result(params, diverged=diverged)
    result["wall_seconds"] = time.monotonic() - start_time
    files = engine.extras()
    processes.fail_together(lambda: self._write(engine, params, result, files))
    if on_end is not None:
      on_end(engine.records(), params, evaluations.rows, files)
    # A live run's memory is removed once its result is on disk.
    engine.discard()
    self._bar.finish(self._cell, result)
    return result

  def _open(self) -> Engine:
    """Starts the engine, from the last checkpoint if one exists."""
    rows: list[dict[str, Any]] = []
    if self._folder is not None:
      lock = folder.hold_cell(self._folder, self._experiment, self._cell)
      self.enter_context(lock)
      self._checkpoints = checkpoint.Checkpoints(self._folder / "checkpoints")
      self.push(_closing(self._checkpoints.close))
      if self._engine_kind.journaled:
        rows = cell_log.read_rows_so_far(self._folder)
        compile_evaluation(self._experiment, self._cell)
    engine: Engine = self._engine_kind.start(
      Context(
        self._experiment,
        self._cell,
        self._experiment.plan(self._cell),
        folder=self._folder,
        board=self._folder and _board_folder(self._folder),
        restore=self._restore,
        rows=rows,
        machine=self._machine,
      )
    )
    self.push(_closing(engine.close))
    # The log may have rows after the message at which the engine resumes.
    if self._engine_kind.journaled:
      self._rows = [row for row in rows if row["message"] <= engine.done]
    return engine

  def _open_log(
    self, engine: Engine, cell_folder: Path, rows: list[dict[str, Any]]
  ) -> None:
    """Continues the log and progress.json of the cell."""
    about = {**self._cell._asdict(), "engine": self._run.engine}
    self._progress = cell_progress.ProgressFile(
      cell_folder, about, engine, self._machine.lines
    )
    settings = cell_log.settings_of(self._experiment, self._cell)
    board = _board_folder(cell_folder)
    self._log = cell_log.CellLog(cell_folder, board, rows, settings)
    self.push(_closing(self._log.close))

  def _restore(self, rebuild: Callable[[checkpoint.Restored], Any]) -> Any:
    """See `Context.restore`. Only process 0 reads the checkpoint; it shares the
    notes with the other processes."""

    def unpack(saved: checkpoint.Restored) -> tuple[Any, Any, Any]:
      notes = saved.notes
      value = rebuild(saved._replace(notes=notes["engine"]))
      return value, notes["rows"], notes["diverged"]

    restored: tuple[Any, Any, Any] | None = None
    if self._checkpoints is not None:
      restored = self._checkpoints.restore(unpack)
    # The engine itself shares the arrays that `rebuild` returned on process 0.
    if jax.process_count() > 1:
      notes = processes.share(restored and restored[1:])
      restored = notes and (restored and restored[0], *notes)
    if restored is None:
      return None
    value, self._rows, self._diverged = restored
    return value

  def _train(self, engine: Engine, evaluations: Evaluations) -> None:
    """Trains to the last evaluation, or to the first after a NaN."""
    config, last_save = self._experiment.config, time.monotonic()
    advance = self._progress.advance if self._progress else engine.advance
    while not evaluations.finished:
      # [1] Train for about a second, up to the next evaluation.
      target = evaluations.next_message
      assert target is not None, "a cell without a due evaluation is finished"
      try:
        progress = advance(target)
      except NonFiniteResult as error:  # of a live worker's job
        raise self._not_finite(str(error), self._next_jobs()) from error
      for line in progress.news:
        self._machine.show(line)
      if progress.messages:
        self.counted += progress.messages
        # Without rows: a bar may be in another process, and shows no rows.
        self._bar.update(self._cell, progress._replace(rows=None))
        if processes.is_first() and not self._engine_kind.in_other_processes:
          self._machine.after_job()
      if progress.broken:
        evaluations.diverged = True
        self._stop_or_warn(progress)
      # [2] Evaluate.
      if engine.done >= target or engine.ended:
        row = evaluations.evaluate()
        if self._log is not None:
          self._log.write(row)
      # [3] Save, and stop if a signal asks for it.
      is_old = time.monotonic() - last_save >= config["checkpoint_seconds"]
      # All processes must decide alike. The clock of process 0 counts, and a
      # signal to any process stops all.
      gathered = processes.gather([is_old, self._signals.received])
      is_due, signal_number = bool(gathered[0, 0]), int(gathered[:, 1].max())
      if evaluations.finished:
        break
      stop_note = engine.stop() if signal_number else ""
      is_due = is_due or bool(signal_number)
      if is_due and self._save(engine, evaluations):
        last_save = time.monotonic()
      if signal_number:
        state = f"{self._cell.name} at message {engine.done}{stop_note}"
        raise Stopped(f"stopped in {state}; {RERUN}", signal_number)

  def _stop_or_warn(self, progress: Progress) -> None:
    """Raises NonFiniteResult for messages that are not finite. If `on_nan`
    records them, a warning names data that are not finite."""
    rows = progress.rows._asdict() if progress.rows else {}
    # A pipeline has columns of stages, which are not rows of messages.
    rows = {k: v for k, v in rows.items() if len(v) == progress.messages}
    is_finite = np.isfinite(progress.loss)
    is_finite = is_finite & np.isfinite(rows.get("update_norm", 0.0))
    jobs = self._next_jobs()
    # If all records are finite, a message without a record was not. In a run of
    # tables, the first update may be such a message.
    if not is_finite.all():
      index = int(np.argmin(is_finite))  # of the first False
      jobs = [(0, self.counted - progress.messages + index)]
      # A server and peers record the job of each message.
      if {"worker", "job"} <= rows.keys():
        jobs = [(int(rows["worker"][index]), int(rows["job"][index]))]
    if self._experiment.config["on_nan"] == "stop":
      text = f"{progress.broken}, or set --config.on_nan=record to keep the"
      raise self._not_finite(f"{text} cell as diverged and continue", jobs)
    if fault := self._data_fault(jobs):
      self._machine.show(f"warning: {fault}")

  def _next_jobs(self) -> Iterable[tuple[int, int]]:
    """Yields the (worker, job) pairs that the next messages may have. A job
    that a live run repeats may be earlier than the last message."""
    first = max(self.counted - _SEARCHED_JOBS, 0)
    jobs = range(first, self.counted + _SEARCHED_JOBS)
    return itertools.product(range(self._cell.workers), jobs)

  def _not_finite(
    self, text: str, jobs: Iterable[tuple[int, int]]
  ) -> NonFiniteResult:
    """Returns the error for a message that is not finite. Its text begins with
    the first value of the data that is not finite, if there is one."""
    name = f"{self._cell.name}: "
    if fault := self._data_fault(jobs):
      # A loss may ignore such values; then `text` has the reason.
      of_loss = text.removeprefix(name)
      text = f"{name}{fault}. If the loss leaves them out: {of_loss}"
    return NonFiniteResult(text)

  def _data_fault(self, jobs: Iterable[tuple[int, int]]) -> str:
    """Returns a text, with the remedy, on a value that is not finite in stored
    data or in the batches of jobs (worker, job); "" if none is found."""
    experiment, cell = self._experiment, self._cell
    steps = experiment.plan(cell).batches
    fault = finite.find_fault(
      experiment.problem_of(self._run),
      getattr(experiment.dataset, "stored", None),
      seed=cell.seed,
      workers=cell.workers,
      jobs=[(w, job * steps + h) for w, job in jobs for h in range(steps)],
    )
    remedy = "no learning rate cures that: replace or drop such values"
    return f"{fault}; {remedy}" if fault else ""

  def _save(self, engine: Engine, evaluations: Evaluations) -> bool:
    """Writes a checkpoint; returns False if the engine cannot give one now."""
    content = engine.save()
    if content is None:
      return False
    step, tree, notes = content
    notes = {
      "engine": notes,
      "rows": evaluations.rows,
      "diverged": evaluations.diverged,
    }
    checkpoints = self._checkpoints

    def save() -> None:
      if checkpoints is not None:
        checkpoints.save(step, tree, notes)

    processes.fail_together(save)
    return True

  def _write(
    self,
    engine: Engine,
    params: Any,
    result: dict[str, Any],
    files: Mapping[str, str],
  ) -> None:
    """Writes the files of a finished cell; `files` are `Engine.extras`."""
    if self._folder is None or self._progress is None:
      return
    for name, content in files.items():
      safe_files.write(self._folder / name, content)
    self._progress.finish()
    records, as_archive = engine.records(), not self._engine_kind.journaled
    cell_files.finish(
      self._folder, result, records, params, as_archive=as_archive
    )


def _closing(close: Callable[[], Any]) -> Callable[..., None]:
  """Returns an exit callback that calls `close`.

  If the block has raised an error, errors of `close` are suppressed.
  """

  def leave(error_type: Any, error: Any, trace: Any) -> None:
    del error, trace
    with contextlib.suppress(*([OSError, ValueError] if error_type else [])):
      close()

  return leave
