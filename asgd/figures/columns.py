"""Columns: the numbers of a figure's claims, one for each cell, or for each run
and seed.

A column of a figure is a column of a cell's result (`result.json`: RESULTS), or
is computed from the cell's records. `get_figure()["columns"]` defines the
computed columns by name:

  dict(kind="reach", loss=0.3)       time until the training loss, a mean over a
                                     fortieth of the run, first reaches 0.3:
                                     simulated, or seconds of a live run
  dict(kind="until", column=C, above=0.9)  time of the first evaluation with C
                                     above (or `below`) that; more evaluations
                                     make it more precise. With along="epoch",
                                     its epoch
  dict(kind="last", column=C)        C of the last evaluation
  dict(kind="at", column=C, time=T)  C of the last evaluation until the time T
                                     (or `epoch`): simulated, or live seconds
  dict(kind="quotient", of=A, by=B)  A / B, two columns of the result
  dict(kind="change", column=C, since=0.5)  ln(last C / C at `since`), over
                                     evaluations; `since` is a part of the run,
                                     from 0 (the default) to below 1
  dict(kind="first", column=C, below=0.5)   the smallest number of workers of a
                                     run at which C is below (or `above`) that
  dict(kind="share", column=R, above=20)    fraction of messages with R, a
                                     column of RECORDED, above (or `below`) that
  dict(kind="deviation", column=R)   standard deviation of R over messages;
                                     "share" and "deviation" may have `since`
  dict(kind="noise_scale", since=0.5)  gradient noise scale in examples, of
                                     synchronous SGD without momentum at a
                                     constant rate (`_noise_scale`)

Four values count as infinite: a column of a diverged cell without a finite
value, the time of a diverged cell, which ends early, a loss that is never
reached, and a "first" that never occurs. So a run that diverges counts as late,
far and large.

Panels can also draw histograms (PROFILES) as fractions: a cell's file with two
columns, a value and its count, or else the staleness of its messages.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base, names
from asgd.checks import shown
from asgd.experiment import cell_files, folder, predict, storage
from asgd.figures import fields
from asgd.figures.fields import FieldCheck

# Columns of results that only some protocols or engines have.
OF_PEERS = (
  "consensus",
  "peer_accuracy_worst",
  "taken_bytes",
  "bytes_per_peer",
  "bytes_per_link",
)
OF_TABLES = "differential_mean", "differential_least", "fresh_reads"
OF_NETWORKS = (
  "throughput",
  "link_utilisation",
  "service_utilisation",
  "queue_wait",
)
OF_PIPELINES = "bubble_predicted", "bubble_measured", "microbatch_seconds"
RESULTS = (
  *OF_PEERS,
  *OF_TABLES,
  *("test_accuracy", "test_loss", "train_loss", "sent_accuracy", "diverged"),
  *("messages", "updates", "examples", "epoch", "learning_rate"),
  *("staleness_mean", "staleness_max", "gap_mean", "gap_max"),
  *("effective_rate", "accepted", "simulated_time", "seconds", "wall_seconds"),
  *("bytes_up", "bytes_down", "compression_up"),
  "compression_down",
  *OF_NETWORKS,
  *OF_PIPELINES,
)
_TIMES = "simulated_time", "seconds", "wall_seconds"  # of a whole run
# Staleness of the rows that tables read, or of a server's messages.
PROFILES = ("staleness.csv",)
# "duration" is the time from one message of a worker to its next message: the
# time of a batch, if the worker never waits. In a "share" of durations each
# worker has the same weight.
RECORDED = "staleness", "gap", "loss", "message_norm", "update_norm", "duration"
_RESULT = FieldCheck(fields.named(RESULTS), "a column of the result")
# Columns of metrics.jsonl, one row for each evaluation of a cell.
EVALUATED = "test_accuracy", "test_loss", "train_loss", "objective"
ALONG = "time", "epoch"  # columns of evaluations that can be an x axis
# Exactly one of the two is given, so the other side is unbounded.
_SIDES = {
  side: FieldCheck(fields.bound(fields.number)) for side in ("below", "above")
}
_RECORD = FieldCheck(fields.named(RECORDED), "a column of the records")
_SINCE = FieldCheck(fields.share)
# The fields of each kind of column, beside "kind" itself.
_KIND_FIELDS: Mapping[str, fields.Table] = {
  "reach": {"loss": FieldCheck(fields.number, "the loss to be reached")},
  "until": {
    "column": FieldCheck(fields.named(EVALUATED), "a column of evaluations"),
    "along": FieldCheck(fields.named(ALONG)),
    **_SIDES,
  },
  "last": {
    "column": FieldCheck(fields.named(EVALUATED), "a column of evaluations"),
  },
  "at": {
    "column": FieldCheck(fields.named(EVALUATED), "a column of evaluations"),
    **dict.fromkeys(ALONG, FieldCheck(fields.number)),
  },
  "quotient": {"of": _RESULT, "by": _RESULT},
  "change": {"column": _RESULT, "since": _SINCE},
  "first": {"column": FieldCheck(fields.text, "a column"), **_SIDES},
  "share": {"column": _RECORD, "since": _SINCE, **_SIDES},
  "deviation": {"column": _RECORD, "since": _SINCE},
  "noise_scale": {"since": _SINCE},
}
_ONE_SIDED = "first", "until", "share"  # kinds that need `below` or `above`
ColumnSpecs = Mapping[str, Mapping[str, Any]]  # name -> kind and fields


def check(specs: ColumnSpecs) -> None:
  """Raises ValueError for a definition of a column that is not valid."""
  fields.mapping(specs, "columns")
  for name, spec in specs.items():
    where = f"column {shown(name)}"
    fields.text(name, "the name of a column")
    # A computed column must not hide one that result.json has.
    if name in RESULTS:
      raise ValueError(f"{where} is one of the result; give it another name")
    kind: Any = spec.get("kind") if isinstance(spec, Mapping) else spec
    # `names.check` refuses a kind that is not known, and one that is no text.
    names.check(f"kind of {where}:", kind, _KIND_FIELDS)
    kinds = FieldCheck(fields.named(list(_KIND_FIELDS)))
    fields.check(where, spec, {"kind": kinds, **_KIND_FIELDS[kind]})
    # Both keys, or none, leave the axis of the comparison open.
    if kind == "at" and len(set(ALONG) & set(spec)) != 1:
      raise ValueError(f"{where} needs either 'time' or 'epoch'")
    if kind in _ONE_SIDED and len(_SIDES.keys() & set(spec)) != 1:
      raise ValueError(f"{where} needs either 'below' or 'above'")
  # The column of a "first" must have a value for each number of workers.
  cell_columns = [k for k in specs if not is_over_workers(specs, k)]
  for name, spec in specs.items():
    if name not in cell_columns:
      known_columns, where = [*RESULTS, *cell_columns], f"column {shown(name)}"
      names.check(f"column of {where}:", spec["column"], known_columns)


def all_columns(specs: ColumnSpecs) -> list[str]:
  """Returns the names of all columns: those of results, and those that `specs`
  define."""
  return [*RESULTS, *specs]


def is_over_workers(specs: ColumnSpecs, column: str) -> bool:
  """Whether a column has one value for a run and seed, over all its numbers of
  workers."""
  return specs.get(column, {}).get("kind") == "first"


class CellResult(NamedTuple):
  """The result of a finished cell, and its folder."""

  result: Mapping[str, Any]
  folder: Path  # the cell's folder, which has its records and evaluations


def read(
  workdir: Path, cells: Sequence[Any]
) -> dict[tuple[str, int, int], CellResult]:
  """Returns (label, workers, seed) -> CellResult of the given cells that are
  finished. Other cells in the folder are left out."""
  cell_names = {cell.name for cell in cells}
  return {
    (row["label"], row["workers"], row["seed"]): CellResult(
      row, workdir / "cells" / row["cell"]
    )
    for row in folder.read_results(workdir)
    if row["cell"] in cell_names
  }


class CellTable:
  """Values of columns; each is read or computed once."""

  def __init__(
    self, cells: Mapping[tuple[str, int, int], CellResult], specs: ColumnSpecs
  ):
    """Starts with finished cells (`read`) and definitions of columns."""
    self._cells, self._specs = cells, specs
    # (column, (label, workers, seed)) -> value: a claim reads a cell again for
    # each pair that it is part of, and records are large.
    self._values: dict[tuple[str, tuple[str, int, int]], float] = {}
    self.seeds = sorted({seed for *_, seed in cells})

  def diverged(self, label: str, workers: int, seed: int) -> bool:
    """Whether a cell diverged."""
    return bool(self._cells[label, workers, seed].result["diverged"])

  def values(
    self, column: str, label: str, workers: int | None
  ) -> dict[int, float]:
    """Returns seed -> value. If the column has one value for all numbers of
    workers, pass None as `workers`."""
    keys = [key for key in self._cells if key[0] == label]
    if is_over_workers(self._specs, column):
      seeds = sorted({seed for *_, seed in keys})
      return {seed: self._first(column, label, seed) for seed in seeds}
    return {
      key[2]: self._value(column, key) for key in keys if key[1] == workers
    }

  def curve(
    self, column: str, along: str, label: str, workers: int | None
  ) -> list[tuple[float, dict[int, float]]]:
    """Returns the evaluations of a run as (mean of the x column, seed ->
    value). Evaluation i has only the seeds with more than i evaluations."""
    rows = {
      key[2]: folder.read_rows(cell.folder)
      for key, cell in self._cells.items()
      if key[:2] == (label, workers)
    }
    evaluations = []
    # A seed that diverged may have fewer evaluations than others.
    for i in range(max(map(len, rows.values()), default=0)):
      ith_rows = {
        seed: rows_of_seed[i]
        for seed, rows_of_seed in rows.items()
        if i < len(rows_of_seed)
      }
      # Seeds evaluate at slightly different times in a live run; the point is
      # drawn at their mean x.
      xs = [_time_or_epoch(row, along) for row in ith_rows.values()]
      values = {
        seed: _number(row.get(column)) for seed, row in ith_rows.items()
      }
      evaluations.append((sum(xs) / len(xs), values))
    return evaluations

  def profiles(
    self, name: str, label: str, workers: int
  ) -> dict[int, dict[float, float]]:
    """Returns seed -> value -> fraction, of a file of PROFILES. A value that is
    only in other seeds' files has a fraction of 0."""
    counts = {
      seed: _read_profile(cell.folder, name)
      for (run, count, seed), cell in sorted(self._cells.items())
      if run == label and count == workers
    }
    # All seeds get the same x values, so that medians over seeds are those of
    # fractions of the same value.
    values = sorted(
      {value for counts_of_seed in counts.values() for value in counts_of_seed}
    )
    return {
      seed: {
        v: counts_of_seed.get(v, 0.0) / sum(counts_of_seed.values())
        for v in values
      }
      for seed, counts_of_seed in counts.items()
      if counts_of_seed
    }

  def _first(self, column: str, label: str, seed: int) -> float:
    """Returns the fewest workers at which a column passes its bound."""
    spec = self._specs[column]
    # Keys sort by their number of workers.
    keys = [k for k in self._cells if k[0] == label and k[2] == seed]
    for key in sorted(keys):
      if _is_beyond(spec, self._value(spec["column"], key)):
        return float(key[1])
    return math.inf

  def _value(self, column: str, key: tuple[str, int, int]) -> float:
    """Returns the value of a cell; infinite if it diverged without one."""
    if (column, key) not in self._values:
      value = self._compute(column, self._cells[key])
      # A diverged run counts as infinitely far, late and large.
      if not math.isfinite(value) or column in _TIMES:
        value = math.inf if self.diverged(*key) else value
      self._values[column, key] = value
    return self._values[column, key]

  def _compute(self, column: str, cell: CellResult) -> float:
    """Computes a column of a cell from its definition."""
    spec = self._specs.get(column, {"kind": None})
    match spec["kind"]:
      case "reach":
        return _reach(cell, spec["loss"])
      case "until":
        return _until(cell, spec)
      case "last":
        rows = folder.read_rows(cell.folder)
        return _number(rows[-1].get(spec["column"]))
      case "at":
        return _at(cell, spec)
      case "change":
        return _change(cell, spec["column"], spec.get("since", 0.0))
      case "share":
        return _share(cell, spec)
      case "deviation":
        return float(_recorded_values(cell, spec)[1].std())
      case "noise_scale":
        return _noise_scale(cell, spec.get("since", 0.0))
      case "quotient":
        of, by = (_number(cell.result.get(spec[k])) for k in ("of", "by"))
        # A divisor of 0, such as no bytes sent, leaves the quotient unknown.
        return of / by if by else math.nan
    # Without a definition it is a column of result.json.
    return _number(cell.result.get(column))


def _number(value: Any) -> float:
  """Returns a number of JSON, which has null for NaN and infinities."""
  return math.nan if value is None else float(value)


def _reach(cell: CellResult, loss: float) -> float:
  """Returns the time at which the smoothed training loss reaches a value."""
  arrays = cell_files.read_records(cell.folder)
  records = base.Records(*(arrays[key] for key in base.Records._fields))
  # Count the time from the start of the training. It is 0 in simulated time;
  # the time of a live run starts earlier, before its first ticket.
  seconds = cell.result.get("seconds")
  start_time = 0.0 if seconds is None else float(records.time[-1]) - seconds
  run = predict.Outcome(start_time, records, math.nan)
  time = predict.curve(run, 0).reaches(loss)
  return math.inf if math.isnan(time) else time


def _read_profile(cell_folder: Path, name: str) -> dict[float, float]:
  """Returns value -> count of a file of PROFILES. Without the file, it counts
  the staleness of messages; {} without records."""
  path = cell_folder / name
  if path.exists():
    # The first line is the header: value, count.
    with path.open(newline="") as file:
      _, *rows = csv.reader(file)
    return {float(value): float(number) for value, number in rows}
  try:
    messages = cell_files.read_records(cell_folder)["staleness"]
  except FileNotFoundError:
    return {}
  values, counts = np.unique(messages, return_counts=True)
  return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _recorded_values(
  cell: CellResult, spec: Mapping[str, Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
  """Returns (workers, values) of a column of RECORDED, one row for each message
  since a part of the run."""
  records, column = cell_files.read_records(cell.folder), spec["column"]
  rows = slice(int(spec.get("since", 0.0) * len(records["worker"])), None)
  workers = records["worker"][rows]
  if column != "duration":
    return workers, records[column][rows]
  # Sort by worker. The sort is stable, so each worker's messages stay in the
  # order of time and differences are those of successive messages.
  order = np.argsort(workers, kind="stable")
  # False where a row and the next are of two workers.
  is_same_worker = np.diff(workers[order]) == 0
  durations = np.diff(records["time"][rows][order])
  return workers[order][1:][is_same_worker], durations[is_same_worker]


def _share(cell: CellResult, spec: Mapping[str, Any]) -> float:
  """Returns the fraction of messages beyond a column's bound; NaN if one has
  no value."""
  workers, values = _recorded_values(cell, spec)
  if np.isnan(values).any():
    return math.nan
  below, above = spec.get("below", -math.inf), spec.get("above", math.inf)
  is_beyond = (values < below) | (values > above)
  if spec["column"] != "duration":
    return float(is_beyond.mean())
  # A fast worker has more durations than a slow one, but both count the same.
  shares = [
    is_beyond[workers == worker].mean() for worker in np.unique(workers)
  ]
  return float(np.mean(shares))


def _noise_scale(cell: CellResult, since: float) -> float:
  """Returns the gradient noise scale tr(S) / |G|^2, in examples.

    |G|^2 = (B g_B^2 - b g_b^2) / (B - b)
    tr(S) = (g_b^2 - g_B^2) / (1 / b - 1 / B)

  g_b^2 and g_B^2 are the mean squares of the gradients of messages of b, and of
  updates of B examples. Source: McCandlish, Kaplan, Amodei et al., "An
  empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
  """
  records, result = cell_files.read_records(cell.folder), cell.result
  # b and B: examples of a message, and of an update.
  message_examples, update_examples = (
    result["examples"] / result[k] for k in ("messages", "updates")
  )
  # One message in each update: the two batches must differ.
  if message_examples == update_examples:
    return math.nan
  rows = slice(int(since * len(records["update_norm"])), None)
  # SGD without momentum: the change is the rate times the mean gradient, so
  # this is g_B, the norm of an update's mean gradient.
  updates = records["update_norm"][rows] / result["learning_rate"]
  # Only the last message of an update changes the parameters.
  update_square = np.square(updates[updates > 0], dtype=float).mean()
  message_square = np.square(records["message_norm"][rows], dtype=float).mean()
  signal = (
    update_examples * update_square - message_examples * message_square
  ) / (update_examples - message_examples)  # |G|^2
  noise = (message_square - update_square) / (
    1 / message_examples - 1 / update_examples
  )  # tr(S)
  # Noise alone can make the estimate of |G|^2 negative.
  return float(noise / signal) if signal > 0 else math.inf


def _is_beyond(spec: Mapping[str, Any], value: float) -> bool:
  """Whether a value is below, or above, a column's bound."""
  below, above = spec.get("below", -math.inf), spec.get("above", math.inf)
  return bool(value < below or value > above)


def _until(cell: CellResult, spec: Mapping[str, Any]) -> float:
  """Returns the time, or epoch, of the first evaluation beyond a bound."""
  for row in folder.read_rows(cell.folder):
    if _is_beyond(spec, _number(row.get(spec["column"]))):
      return _time_or_epoch(row, spec.get("along", "time"))
  return math.inf


def _at(cell: CellResult, spec: Mapping[str, Any]) -> float:
  """Returns a column of the last evaluation until a time or an epoch."""
  # `check` ensures that exactly one of the two is given.
  (along,) = set(ALONG) & set(spec)
  rows, end = folder.read_rows(cell.folder), spec[along]
  earlier_rows = [row for row in rows if _time_or_epoch(row, along) <= end]
  return (
    _number(earlier_rows[-1].get(spec["column"])) if earlier_rows else math.nan
  )


def _time_or_epoch(row: Mapping[str, Any], along: str) -> float:
  """Returns the time of an evaluation (simulated, or seconds of a live run), or
  its epoch."""
  # Live runs have no simulated time: their rows have "seconds" instead.
  return _number(row.get(along, row.get("seconds")))


def _change(cell: CellResult, column: str, since: float) -> float:
  """Returns ln(last / first) of a column of evaluations."""
  rows = folder.read_rows(cell.folder)
  # `since` is a fraction of the evaluations, to leave out the start.
  first = _number(rows[int(since * (len(rows) - 1))].get(column))
  last = _number(rows[-1].get(column))
  # The logarithm needs two positive numbers.
  if not storage.is_finite(last) or not first > 0 or not last > 0:
    return math.nan
  return math.log(last / first)
