"""Lists the cells that a command would train, and estimates their time.

Nothing is written. A simulated cell of each run and number of workers trains
for about a second, which gives its messages per second. The time of live runs,
pipelines and meshes is not estimated: it is a result of training them.
"""

import time
from collections.abc import Sequence
from typing import Any

from asgd import output
from asgd.experiment import cells as cells_lib
from asgd.experiment.cells import Cell, Experiment
from asgd.experiment.engines import Context
from asgd.experiment.machine import Machine

_MEASURED_SECONDS = 1.0  # seconds of training from which a rate is computed
_HEADER = ["run", "engine", "workers", "cells", "messages", "minutes"]


def _rate(experiment: Experiment, cell: Cell, machine: Machine) -> float:
  """Returns the measured messages per second of a simulated cell; NaN if the
  cell ends with the call that compiles."""
  context = Context(
    experiment,
    cell,
    experiment.plan(cell),
    folder=None,
    board=None,
    restore=lambda rebuild: None,  # no checkpoint
    rows=(),
    machine=machine,
  )
  engine = experiment.engine_kind(cell).start(context)
  try:
    engine.advance(engine.total)  # compiles, so it is not measured
    start_time, start_message = time.perf_counter(), engine.done
    while engine.done < engine.total:
      engine.advance(engine.total)
      if time.perf_counter() - start_time > _MEASURED_SECONDS:
        break
    seconds = time.perf_counter() - start_time
    messages = engine.done - start_message
  finally:
    engine.close()
  return messages / seconds if messages else float("nan")


def rows(
  experiment: Experiment, cells: Sequence[Cell], machine: Machine
) -> list[dict[str, Any]]:
  """Returns a row for each run and number of workers.

  Args:
    experiment: the experiment.
    cells: the cells to describe.
    machine: the resources of engines.

  Returns:
    Rows with run, engine, workers, cells, messages (of all cells) and minutes
    on one core, without evaluations; None for engines that are not estimated.
  """
  table_rows = []
  for group in cells_lib.groups(cells):
    first_cell = group[0]
    messages = len(group) * experiment.plan(first_cell).messages
    minutes = None  # the time is a result of the run, and is not estimated
    if not experiment.engine_kind(first_cell).timed:
      minutes = messages / _rate(experiment, first_cell, machine) / 60
      # NaN: the first call of `advance` has finished the cell.
      minutes = round(minutes, 6) if minutes == minutes else 0.0
    engine = experiment.runs[first_cell.label].engine
    values = (
      first_cell.label,
      engine,
      first_cell.workers,
      len(group),
      messages,
      minutes,
    )
    table_rows.append(dict(zip(_HEADER, values, strict=True)))
  return table_rows


def describe(table_rows: Sequence[dict[str, Any]], jobs: int) -> str:
  """Returns the rows as a table, with their sums for `jobs` cells at once."""
  text_rows = [
    [*map(str, list(row.values())[:-1]), _format_minutes(row["minutes"])]
    for row in table_rows
  ]
  header = [*_HEADER[:-1], "time"]
  minutes = [row["minutes"] for row in table_rows if row["minutes"] is not None]
  cells = sum(row["cells"] for row in table_rows)
  messages = sum(row["messages"] for row in table_rows)
  summary = (
    f"{output.table(header, text_rows)}\n{cells} cells, {messages:,} messages"
  )
  if minutes:
    # A process trains whole groups of cells, so there are at most that many.
    at_once = min(jobs, len(minutes))
    time_of_all = _format_minutes(sum(minutes) / at_once)
    summary += f", an estimated {time_of_all} on {at_once} cores"
    summary += " without evaluations"
  if len(minutes) < len(table_rows):
    summary += "; runs in real time (-) are not estimated"
  return f"{summary}\nnothing was trained or written"


def _format_minutes(minutes: float | None) -> str:
  """Returns a time as text, in seconds below a minute; "-" for None."""
  if minutes is None:
    return "-"
  if 60 * minutes < 1:
    return "1 second or less"
  if minutes < 1:
    return f"{60 * minutes:.0f} seconds"
  return f"{minutes:.1f} minutes"
