"""The numbers that claims are about: one for each cell, or each run and seed.

A column of a figure is a column of a cell's result (`result.json`: RESULTS), or
is computed from the cell's records. `get_figure()["columns"]` defines the
latter by name:

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
  dict(kind="deviation", column=R)   standard deviation of R over messages. Both
                                     may have `since`, a part of the run
  dict(kind="noise_scale", since=0.5)  gradient noise scale in examples, of
                                     synchronous SGD without momentum at a
                                     constant rate (`_noise_scale`)

Three values count as infinite: a column of a diverged cell without a finite
value, a loss that is never reached, and a "first" that never occurs. So a run
that diverges is late, far and large, and fails at no number of workers.

Panels can also draw histograms (PROFILES) as fractions: a cell's file with two
columns, a value and its count, or else the staleness of its messages.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, names
from asgd.checks import shown
from asgd.experiment import cell_files, folder, predict, storage
from asgd.figures import fields
from asgd.figures.fields import FieldCheck

OF_PEERS = "consensus", "peer_accuracy_worst", "taken_bytes", "bytes_per_peer"
OF_PEERS += ("bytes_per_link",)
OF_TABLES = "differential_mean", "differential_least", "fresh_reads"
OF_NETWORKS = "throughput", "link_utilisation", "service_utilisation"
OF_NETWORKS += ("queue_wait",)
OF_PIPELINES = "bubble_predicted", "bubble_measured"
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
# Staleness of the rows that tables read, or of a server's messages.
PROFILES = ("staleness.csv",)
# "duration" is the time from one message of a worker to its next one: that of a
# batch, if the worker never waits. Each worker counts the same in its share.
RECORDED = "staleness", "gap", "loss", "message_norm", "update_norm", "duration"
_RESULT = FieldCheck(fields.named(RESULTS), "a column of the result")
EVALUATED = "test_accuracy", "test_loss", "train_loss", "objective"
ALONG = "time", "epoch"  # columns of evaluations that can be an x axis
_SIDES = {
  side: FieldCheck(fields.bound(fields.number)) for side in ("below", "above")
}
_RECORD = FieldCheck(fields.named(RECORDED), "a column of the records")
_SINCE = FieldCheck(fields.share)
_KINDS: Mapping[str, fields.Table] = {
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
_ONE_SIDED = "first", "until", "share"
Made = Mapping[str, Mapping[str, Any]]  # name -> definition of a column


def check(made: Made) -> None:
  """Raises ValueError for a definition of a column that is not valid."""
  fields.mapping(made, "columns")
  for name, how in made.items():
    where = f"column {shown(name)}"
    fields.text(name, "the name of a column")
    if name in RESULTS:
      raise ValueError(f"{where} is one of the result; give it another name")
    kind = how.get("kind") if isinstance(how, Mapping) else how
    names.check(f"kind of {where}:", kind, _KINDS)
    kinds = FieldCheck(fields.named(list(_KINDS)))
    fields.check(where, how, {"kind": kinds, **_KINDS[kind]})
    if kind == "at" and len(set(ALONG) & set(how)) != 1:
      raise ValueError(f"{where} needs either 'time' or 'epoch'")
    if kind == "first":  # of the result, or of one cell
      cells = [key for key in made if not is_over_workers(made, key)]
      names.check(f"column of {where}:", how["column"], [*RESULTS, *cells])
    if kind in _ONE_SIDED and len(_SIDES.keys() & set(how)) != 1:
      raise ValueError(f"{where} needs either 'below' or 'above'")


def known(made: Made) -> list[str]:
  """Returns the names of all columns: those of results and `made` ones."""
  return [*RESULTS, *made]


def is_over_workers(made: Made, column: str) -> bool:
  """Whether a column has one value for a run and seed, over its workers."""
  return made.get(column, {}).get("kind") == "first"


class CellResult(NamedTuple):
  """The result of a finished cell, and its folder."""

  result: Mapping[str, Any]
  place: Path  # the cell's folder


def read(workdir: Path, cells: Sequence[Any]) -> dict[tuple, CellResult]:
  """Returns (label, workers, seed) -> CellResult of the given cells that are
  finished. Other cells in the folder are left out."""
  wanted = {cell.name for cell in cells}
  return {
    (row["label"], row["workers"], row["seed"]): CellResult(
      row, workdir / "cells" / row["cell"]
    )
    for row in folder.read_results(workdir)
    if row["cell"] in wanted
  }


class CellTable:
  """Values of columns; each is read or computed once."""

  def __init__(self, cells: Mapping[tuple, CellResult], made: Made):
    """Starts with finished cells (`read`) and definitions of columns."""
    self._cells, self._made = cells, made
    self._values: dict[tuple, float] = {}
    self.seeds = sorted({seed for *_, seed in cells})

  def diverged(self, label: str, workers: int, seed: int) -> bool:
    """Whether a cell diverged."""
    return bool(self._cells[label, workers, seed].result["diverged"])

  def values(
    self, column: str, label: str, workers: int | None
  ) -> dict[int, float]:
    """Returns seed -> value. If the column is over all numbers of workers, pass
    None as `workers`."""
    cells = [key for key in self._cells if key[0] == label]
    if is_over_workers(self._made, column):
      seeds = sorted({seed for *_, seed in cells})
      return {seed: self._first(column, label, seed) for seed in seeds}
    return {
      key[2]: self._value(column, key) for key in cells if key[1] == workers
    }

  def curve(
    self, column: str, along: str, label: str, workers: int | None
  ) -> list[tuple[float, dict[int, float]]]:
    """Returns the evaluations of a run as (mean of the x column, seed ->
    value). An evaluation lists only the seeds that have reached it."""
    rows = {
      key[2]: folder.read_rows(done.place)
      for key, done in self._cells.items()
      if key[:2] == (label, workers)
    }
    out = []
    # A seed that diverged may have fewer evaluations than others.
    for i in range(max(map(len, rows.values()), default=0)):
      ith = {seed: each[i] for seed, each in rows.items() if i < len(each)}
      xs = [_number(row.get(along)) for row in ith.values()]
      values = {seed: _number(row.get(column)) for seed, row in ith.items()}
      out.append((sum(xs) / len(xs), values))
    return out

  def profiles(
    self, name: str, label: str, workers: int
  ) -> dict[int, dict[float, float]]:
    """Returns seed -> value -> fraction, of a file of PROFILES. A value that is
    only in other seeds' files has a fraction of 0."""
    counts = {
      seed: _read_profile(done.place, name)
      for (run, count, seed), done in sorted(self._cells.items())
      if run == label and count == workers
    }
    values = sorted({value for each in counts.values() for value in each})
    return {
      seed: {v: each.get(v, 0.0) / sum(each.values()) for v in values}
      for seed, each in counts.items()
      if each
    }

  def _first(self, column, label, seed):
    """Returns the fewest workers at which a column passes its bound."""
    how = self._made[column]
    # Keys sort by their number of workers.
    cells = [k for k in self._cells if k[0] == label and k[2] == seed]
    for key in sorted(cells):
      if _is_beyond(how, self._value(how["column"], key)):
        return float(key[1])
    return math.inf

  def _value(self, column, key):
    """Returns the value of a cell; infinite if it diverged without one."""
    if (column, key) not in self._values:
      value = self._make(column, self._cells[key])
      # A diverged run counts as infinitely far, late and large.
      if not math.isfinite(value) and self.diverged(*key):
        value = math.inf
      self._values[column, key] = value
    return self._values[column, key]

  def _make(self, column, done) -> float:
    """Computes a column of a cell from its definition."""
    how = self._made.get(column, {"kind": None})
    match how["kind"]:
      case "reach":
        return _reach(done, how["loss"])
      case "until":
        return _until(done, how)
      case "last":
        rows = folder.read_rows(done.place)
        return _number(rows[-1].get(how["column"]))
      case "at":
        return _at(done, how)
      case "change":
        return _change(done, how["column"], how.get("since", 0.0))
      case "share":
        return _share(done, how)
      case "deviation":
        return float(_recorded(done, how)[1].std())
      case "noise_scale":
        return _noise_scale(done, how.get("since", 0.0))
      case "quotient":
        of, by = (_number(done.result.get(how[k])) for k in ("of", "by"))
        return of / by if by else math.nan
    return _number(done.result.get(column))


def _number(value: Any) -> float:
  """Returns a number of JSON, which has null for NaN and infinities."""
  return math.nan if value is None else float(value)


def _reach(done, loss):
  """Returns the time at which the smoothed training loss reaches a value."""
  arrays = cell_files.read_records(done.place)
  records = base.Records(*(arrays[key] for key in base.Records._fields))
  # Count the time from the start of the training. It is 0 in simulated time;
  # the time of a live run starts earlier, before its first ticket.
  seconds = done.result.get("seconds")
  began = 0.0 if seconds is None else float(records.time[-1]) - seconds
  run = predict.Outcome(began, records, math.nan)
  time = predict.curve(run, 0).reaches(loss)
  return math.inf if math.isnan(time) else time


def _read_profile(place, name):
  """Returns value -> count of a file of PROFILES. Without the file, the values
  are those of the messages; a run of tables without rows has none."""
  path = place / name
  if path.exists():
    with path.open(newline="") as file:
      _, *rows = csv.reader(file)
    return {float(value): float(number) for value, number in rows}
  try:
    messages = cell_files.read_records(place)["staleness"]
  except FileNotFoundError:
    return {}
  return dict(zip(*np.unique(messages, return_counts=True), strict=True))


def _recorded(done, how):
  """Returns (workers, values) of a column of RECORDED, one row for each message
  since a part of the run."""
  records, column = cell_files.read_records(done.place), how["column"]
  rows = slice(int(how.get("since", 0.0) * len(records["worker"])), None)
  workers = records["worker"][rows]
  if column != "duration":
    return workers, records[column][rows]
  order = np.argsort(workers, kind="stable")
  same = np.diff(workers[order]) == 0
  return workers[order][1:][same], np.diff(records["time"][rows][order])[same]


def _share(done, how):
  """Returns the fraction of messages beyond a column's bound."""
  workers, values = _recorded(done, how)
  below, above = how.get("below", -math.inf), how.get("above", math.inf)
  beyond = (values < below) | (values > above)
  if how["column"] != "duration":
    return float(beyond.mean())
  shares = [beyond[workers == worker].mean() for worker in np.unique(workers)]
  return float(np.mean(shares))


def _noise_scale(done, since):
  """Returns the gradient noise scale tr(S) / |G|^2, in examples.

    |G|^2 = (B g_B^2 - b g_b^2) / (B - b)
    tr(S) = (g_b^2 - g_B^2) / (1 / b - 1 / B)

  g_b^2 and g_B^2 are the mean squares of the gradients of messages of b, and of
  updates of B examples. Source: McCandlish, Kaplan, Amodei et al., "An
  empirical model of large-batch training", arXiv:1812.06162, appendix A.1.
  """
  records, result = cell_files.read_records(done.place), done.result
  b, large = (result["examples"] / result[k] for k in ("messages", "updates"))
  rows = slice(int(since * len(records["update_norm"])), None)
  updates = records["update_norm"][rows] / result["learning_rate"]
  # Only the last message of an update changes the parameters.
  of_update = np.square(updates[updates > 0], dtype=float).mean()
  of_message = np.square(records["message_norm"][rows], dtype=float).mean()
  signal = (large * of_update - b * of_message) / (large - b)
  noise = (of_message - of_update) / (1 / b - 1 / large)
  return noise / signal if signal > 0 else math.inf


def _is_beyond(how, value):
  """Whether a value is below, or above, a column's bound."""
  below, above = how.get("below", -math.inf), how.get("above", math.inf)
  return value < below or value > above


def _until(done, how):
  """Returns the time, or epoch, of the first evaluation beyond a bound."""
  for row in folder.read_rows(done.place):
    if _is_beyond(how, _number(row.get(how["column"]))):
      return _moment(row, how.get("along", "time"))
  return math.inf


def _at(done, how):
  """Returns a column of the last evaluation until a time or an epoch."""
  (along,) = set(ALONG) & set(how)
  rows = folder.read_rows(done.place)
  passed = [row for row in rows if _moment(row, along) <= how[along]]
  return _number(passed[-1].get(how["column"])) if passed else math.nan


def _moment(row, along):
  """Returns the time of an evaluation (simulated, or seconds of a live run), or
  its epoch."""
  return _number(row.get(along, row.get("seconds")))


def _change(done, column, since):
  """Returns ln(last / first) of a column of evaluations."""
  rows = folder.read_rows(done.place)
  # `since` is a fraction of the evaluations, to leave out the start.
  first = _number(rows[int(since * (len(rows) - 1))].get(column))
  last = _number(rows[-1].get(column))
  if not storage.is_finite(last) or not first > 0 or not last > 0:
    return math.nan
  return math.log(last / first)
