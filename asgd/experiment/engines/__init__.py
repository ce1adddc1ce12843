"""Engines train the cells of an experiment, by one interface to the run loop.

An engine trains one cell; the loop around it is `asgd.experiment.loop`. An
engine counts messages. These are gradients that a server received, microbatches
that every stage has learned from, or updates of a mesh.

`EngineKind` describes an engine before there is a cell: its sections of the
config, the plan that the cells of a run share, and how a cell starts.

    EngineKind.check, plan, check_machine        before anything is written
    EngineKind.start(Context) -> Engine          new, or from a checkpoint
    Engine.advance, snapshot, summary, save      again and again
    Engine.records, columns, extras, discard     at the end
"""

import abc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import optax


class NonFiniteResult(ValueError):
  """A loss or an update is NaN or infinite."""


class ProcessExited(RuntimeError):
  """A process of an engine exited: the cell resumes from its checkpoint."""


class Progress(NamedTuple):
  """The messages that one call of `Engine.advance` received, and the news."""

  loss: np.ndarray  # float[k], of the k new messages
  # Means over the new messages; None: the engine has no staleness, or no gap.
  staleness: float | None = None
  gap: float | None = None
  news: Sequence[str] = ()  # lines to show to the user
  figures: Any = None  # of a live run: asgd.experiment.live_figures.Figures
  broken: str | None = None  # the error, if a message was not finite
  rows: Any = None  # records of the new messages, a NamedTuple of columns
  # Seconds of training by the engine's clock; None: it has none, or no news.
  seconds: float | None = None

  @property
  def messages(self) -> int:
    """The number of new messages."""
    return len(self.loss)


class Snapshot(NamedTuple):
  """Parameters, and when they were reached."""

  params: optax.Params
  message: int  # messages received by then
  update: int  # parameter changes by then
  # "time" (simulated) or "seconds" (of training), and "megabytes" (sent)
  clock: dict[str, float]


class Engine(abc.ABC):
  """One cell in training."""

  total: int  # messages of the cell
  done: int  # messages received
  quantum: int = 1  # evaluations are at multiples of `quantum` messages
  unit: str = "s"  # of the times of `work`

  @property
  def ended(self) -> bool:
    """Whether training ended, even if `total` is not reached."""
    return False

  @abc.abstractmethod
  def advance(self, until: int) -> Progress:
    """Continues to message `until` at most, for about a second at most."""

  @abc.abstractmethod
  def snapshot(self) -> Snapshot:
    """Returns the parameters as they are after message `done`."""

  @abc.abstractmethod
  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns the columns of an evaluation, over messages start to end."""

  @abc.abstractmethod
  def records(self) -> Any:
    """Returns the records, a NamedTuple of columns; one is `loss`."""

  def work(self) -> list[Any]:
    """Returns the last segments of the workers' time, as
    `asgd.experiment.cell_progress.Segment`; [] if all work in step."""
    return []

  def loss_course(self) -> np.ndarray:
    """Returns the losses, in order, that show whether the cell diverged."""
    losses: np.ndarray = self.records().loss
    return losses

  # Results of a cell: the table shows some, results.csv has all.
  @abc.abstractmethod
  def columns(self) -> dict[str, Any]:
    """Returns the engine's part of the row of results."""

  @abc.abstractmethod
  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns a checkpoint, from which the constructor resumes.

    It is (step, tree of arrays, data for JSON); later checkpoints have larger
    steps. Returns None if the engine cannot save at this message.
    """

  def stop(self) -> str:
    """Stops training, if possible at a message where the engine can save.

    Returns the end of the line that the user sees.
    """
    return ""

  def extras(self) -> dict[str, str]:
    """Returns further files of a finished cell: name -> text."""
    return {}

  def discard(self) -> None:
    """Removes files outside the results folder: the cell is finished."""
    self.close()

  def close(self) -> None:
    """Releases the resources; may be called at any time, and twice."""
    return


class Plan(Protocol):
  """The plan that the cells of a run with one worker count share."""

  learning_rate: float  # the peak
  schedule: Any  # float, or update -> learning rate
  messages: int  # of a cell
  batches: int  # of `batch_size` examples, in one message
  curvature_limit: float  # largest stable curvature at the peak; NaN: unknown


class Context(NamedTuple):
  """The arguments of a cell's start."""

  experiment: Any  # asgd.experiment.cells.Experiment
  cell: Any  # asgd.experiment.cells.Cell
  plan: Any  # a Plan of the engine
  folder: Path | None  # of the cell; None: another process writes it
  board: Path | None  # for TensorBoard
  restore: Callable[[Callable[[Any], Any]], Any]  # see Checkpoints.restore
  rows: Sequence[Mapping[str, Any]]  # evaluations that the log has
  machine: Any  # asgd.experiment.machine.Machine


class Column(NamedTuple):
  """A column of the table of results."""

  header: str
  key: str  # of a result
  scale: float = 1
  form: str = "{:.3g}"


def _nothing(*_: Any) -> tuple[str, ...]:
  """The default: an engine without such keys, checks or files to clean."""
  return ()


class EngineKind(NamedTuple):
  """The description of an engine. `check`, `plan` and `check_machine` raise
  ValueError, naming the key or the flag, its value and the remedy."""

  sections: Mapping[str, Any]  # of the config, as in schema.SHARED_KEYS
  settings: str | None  # the section that a run may set directly
  workers: Callable[[Any], Sequence[int]]  # (Run) -> workers of each cell
  check: Callable[[Any], None]  # (Run): before data or devices are loaded
  devices: Callable[[Any], int]  # (Run) -> CPU devices that it needs
  plan: Callable[[Any, Any, int], Any]  # (Experiment, Run, workers) -> Plan
  start: Callable[[Context], Engine]
  columns: Sequence[Column]  # of the table, beside the columns of all engines
  describe: Callable[[Mapping[str, Any]], str]  # (result) -> a few words
  # (entry of a run) -> further keys that it may have, such as its schedule's
  options: Callable[[Mapping[str, Any]], Sequence[str]] = _nothing
  # (section or entry, key, new value) -> keys that belong to the old value
  dependents: Callable[[Mapping[str, Any], str, Any], Sequence[str]] = (
    _nothing
  )
  default_recipe: str | None = None  # None: a run must name one
  # (Experiment, plans of its cells, Machine): before anything is written
  check_machine: Callable[[Any, Sequence[Any], Any], Any] = _nothing
  timed: bool = False  # seconds are results, so its cells run one at a time
  # (folder of a finished cell): removes files that a kill right after its end
  # left, and refuses files that were changed since
  clean: Callable[[Path], Any] = _nothing
  in_other_processes: bool = False  # its work is done in other processes
  # A cell resumes from a journal, which may be newer than a checkpoint. So its
  # earlier evaluations are read from the log, not from the checkpoint.
  journaled: bool = False
  # (Experiment, Run, workers, target): yields programs to compile ahead of
  # time, as `asgd.parallel.ahead.Compilation`; None: the engine has none.
  programs: Callable[[Any, Any, int, Any], Iterator[Any]] | None = None
  # () -> names of the protocols that it runs, of `asgd.experiment.protocol`
  protocols: Callable[[], Sequence[str]] = lambda: ("server",)


def evaluation_messages(
  evaluations: int, total: int, quantum: int = 1
) -> list[int]:
  """Returns the messages after which a cell is evaluated, the last at its end.

  There are at most `evaluations` of them, all multiples of `quantum`.
  """
  steps = total // quantum
  n_evaluations = min(evaluations, steps)
  # Equal distances up to rounding; the last is at `steps`.
  return [
    round((k + 1) * steps / n_evaluations) * quantum
    for k in range(n_evaluations)
  ]


class Pace:
  """Adapts the number of steps of a call to a time in seconds."""

  def __init__(self, seconds: float, first_steps: int = 1):
    """Starts with `first_steps`; later calls should take about `seconds`."""
    self._seconds, self.steps = seconds, first_steps
    self._start = 0.0

  def begin(self) -> int:
    """Starts the clock; returns how many steps to make."""
    self._start = time.perf_counter()
    return self.steps

  def end(self) -> float:
    """Adapts the number of steps to the seconds that they took. Returns these
    seconds."""
    elapsed = time.perf_counter() - self._start
    # At most twice as many: one fast call must not make the next one too long.
    self.steps = max(1, round(self.steps * min(2, self._seconds / elapsed)))
    return elapsed


def test_loss_text(result: Mapping[str, Any]) -> str:
  """Returns the test loss as text with a comma, for a line that begins with an
  accuracy or a measure. Returns "" if no loss is known, or if the result has
  neither accuracy nor measure: the line then begins with the loss
  (`asgd.experiment.report.quality_text`).

  Example:
    >>> test_loss_text({"test_accuracy": 0.5, "test_loss": 0.25})
    'test loss 0.250, '
  """

  def is_known(key: str) -> bool:
    value = result.get(key)
    return value is not None and bool(np.isfinite(value))

  begins_with_score = is_known("test_accuracy") or is_known("test_measure")
  if not begins_with_score or not is_known("test_loss"):
    return ""
  return f"test loss {result['test_loss']:.3f}, "


def mean(values: np.ndarray) -> float:
  """Returns the mean, NaN for an empty array."""
  return float(values.mean()) if values.size else float("nan")
