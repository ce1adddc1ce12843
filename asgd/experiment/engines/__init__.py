"""Engines: what makes a run of an experiment, and what the run loop needs.

An engine trains one cell; the loop around it is `asgd.experiment.loop`. An
engine counts messages: gradients received by a server, microbatches that every
stage has learned from, updates of a mesh.

`EngineKind` describes an engine before there is a cell: its sections of the
config, the plan that the cells of a run share, and how a cell starts.
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


class Died(RuntimeError):
  """A process of an engine died: the cell goes on from its checkpoint."""


class Progress(NamedTuple):
  """What one call of `Engine.advance` did."""

  loss: np.ndarray  # float[k], of the messages that are new
  staleness: float | None = None  # mean over them; None: nothing is ever stale
  gap: float | None = None  # mean over them
  news: Sequence[str] = ()  # what the user should be told
  figures: Any = None  # of a live run: asgd.experiment.live_figures.Figures
  broken: str | None = None  # which message was not finite, and why not

  @property
  def count(self) -> int:
    """Messages that are new."""
    return len(self.loss)


class Snapshot(NamedTuple):
  """Parameters, and when they were reached."""

  params: optax.Params
  message: int  # messages received by then
  update: int  # parameter changes by then
  # {"time": simulated} or {"seconds": of training}, {"megabytes": sent}
  clock: dict[str, float]


class Engine(abc.ABC):
  """One cell in training."""

  total: int  # messages of the cell
  done: int  # messages received
  quantum: int = 1  # evaluations are at multiples of so many messages
  ended: bool = False  # there is nothing left to train, whatever `total` is

  @abc.abstractmethod
  def advance(self, until: int) -> Progress:
    """Trains on, not past message `until`, for about a second at most."""

  @abc.abstractmethod
  def snapshot(self) -> Snapshot:
    """Returns the parameters as they are after message `done`."""

  @abc.abstractmethod
  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns the columns of an evaluation, of messages start to end."""

  @abc.abstractmethod
  def records(self) -> Any:
    """Returns what was recorded, a NamedTuple of columns; one is `loss`."""

  def course(self) -> np.ndarray:
    """Returns the losses, in their order, that say whether it diverged."""
    return self.records().loss

  @abc.abstractmethod
  def columns(self) -> dict[str, Any]:
    """Returns its part of the row of results."""

  @abc.abstractmethod
  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns a checkpoint, from which the constructor goes on: (a number that
    grows, tree of arrays, JSON); None if there cannot be one now."""

  def stop(self) -> str:
    """Comes to rest where a checkpoint can be made, as training is to end.
    Returns what the user should know."""
    return ""

  def extras(self) -> dict[str, str]:
    """Returns further files of a finished cell: name -> text."""
    return {}

  def discard(self) -> None:
    """Drops what is kept outside the results folder: the cell is finished."""
    self.close()

  def close(self) -> None:
    """Releases what it holds; may be called at any time, and twice."""
    return


class Plan(Protocol):
  """What the cells of a run with one number of workers share."""

  learning_rate: float  # the peak
  schedule: Any  # float, or update -> learning rate
  messages: int  # of a cell
  batches: int  # of `batch_size` examples, in one message
  curvature_limit: float  # largest stable curvature at the peak; NaN: unknown


class Context(NamedTuple):
  """What a cell is started with."""

  experiment: Any  # asgd.experiment.cells.Experiment
  cell: Any  # asgd.experiment.cells.Cell
  plan: Any  # a Plan of the engine
  folder: Path | None  # of the cell; None where another process writes
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
  """What an engine does that has no such keys, or nothing to check or clean."""
  return ()


class EngineKind(NamedTuple):
  """An engine, as an experiment knows it. `check`, `plan` and `check_machine`
  raise ValueError, naming the key or the flag, its value and the remedy."""

  sections: Mapping[str, Any]  # of the config, as in schema.SHARED
  settings: str | None  # the section that a run may set directly
  workers: Callable[[Any], Sequence[int]]  # of the cells of a Run
  check: Callable[[Any], None]  # of a Run, before there are data or devices
  devices: Callable[[Any], int]  # CPU devices that a Run needs
  plan: Callable[[Any, Any, int], Any]  # (Experiment, Run, workers) -> Plan
  start: Callable[[Context], Engine]
  columns: Sequence[Column]  # of the table, beside those that all have
  describe: Callable[[Mapping[str, Any]], str]  # a result, in a few words
  # (entry of a run) -> further keys that it may give: of what it selects
  options: Callable[[Mapping[str, Any]], Sequence[str]] = _nothing
  # (section or entry, key, value) -> keys that follow from the old value
  dependents: Callable[[Mapping[str, Any], str, Any], Sequence[str]] = _nothing
  default_recipe: str | None = None  # None: a run must name one
  # (Experiment, plans of its cells, Machine): before anything is written
  check_machine: Callable[[Any, Sequence[Any], Any], Any] = _nothing
  timed: bool = False  # its seconds are a result: its cells run one at a time
  # (folder of a finished cell): removes what a kill right after its end left,
  # and refuses what was changed since
  clean: Callable[[Path], Any] = _nothing
  elsewhere: bool = False  # its work is done in processes of its own
  journaled: bool = False  # it goes on from a journal: evaluations are those of
  # the log, not those of the checkpoint
  # (Experiment, Run, workers, target): yields programs to compile ahead of
  # time, as `asgd.parallel.ahead.Compilation`; None: it has none of its own.
  programs: Callable[[Any, Any, int, Any], Iterator[Any]] | None = None
  # () -> names of the protocols that it runs, of `asgd.experiment.protocol`
  protocols: Callable[[], Sequence[str]] = lambda: ("server",)


def due(evaluations: int, total: int, quantum: int = 1) -> list[int]:
  """Returns the messages after which a cell is evaluated, the last at its end:
  so many at most, all multiples of `quantum`."""
  steps = total // quantum
  count = min(evaluations, steps)
  return [round((k + 1) * steps / count) * quantum for k in range(count)]


class Pace:
  """How many steps take about so many seconds."""

  def __init__(self, seconds: float, first: int = 1):
    """Starts with `first` steps for calls that may take so many seconds."""
    self._seconds, self.steps = seconds, first
    self._start = 0.0

  def begin(self) -> int:
    """Starts the clock; returns how many steps to make."""
    self._start = time.perf_counter()
    return self.steps

  def end(self) -> float:
    """Learns from what the steps took; returns that, in seconds."""
    took = time.perf_counter() - self._start
    self.steps = max(1, round(self.steps * min(2, self._seconds / took)))
    return took


def mean(values: np.ndarray) -> float:
  """Returns the mean, NaN of nothing."""
  return float(values.mean()) if values.size else float("nan")
