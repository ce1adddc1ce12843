"""Draws a pipeline's schedule and prints its costs.

  asgd draw_schedule --schedule=one_f_one_b --stages=4 \\
    --microbatches=8 --backward=2 --out=FOLDER

prints the table, its times and figures derived from them, and writes

  FOLDER/grid.txt        the table, a column for each slot
         analysis.txt    its times and costs
         schedule.csv, schedule.json   the table in other forms
         gantt.png, .svg the picture
         trace.json      for https://ui.perfetto.dev

A schedule's options are flags of the same names, or --options=KEY=VALUE,... Any
of grid.txt, schedule.csv and schedule.json can be edited and read with
--table=FILE. Times are in any unit; each is one number, or one for each stage:
--forward=1,1,2,1. A measured run (--measured=FILE.json, as
`asgd.pipeline.spans` writes it) is drawn beside its plan. The plan then uses
the medians of the measured times, unless times are given.
"""

import contextlib
import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asgd import names, safe_files
from asgd.experiment import storage
from asgd.pipeline import analyze, render, schedules, spans, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.table import Schedule, ScheduleError

from . import flags
from .command_flags import DRAW_SCHEDULE, SCHEDULE_OPTIONS, TIMES

# Slots x devices of a drawing: a larger number is a misprint.
_MAX_CELLS = 2_000_000
_DEFAULT_COLUMNS = 160  # columns, if the output is no terminal
_WORDS_AS_VALUES = {"true": True, "false": False, "none": None}
_FILES = (
  *("grid.txt", "analysis.txt", "schedule.csv", "schedule.json"),
  *("trace.json", "gantt.png", "gantt.svg"),
)
# `custom` takes a function, which a flag cannot pass.
_SCHEDULES = {
  name: list(inspect.signature(maker).parameters)
  for name, maker in schedules.SCHEDULES.items()
  if "rule" not in inspect.signature(maker).parameters
}


def _parse_value(text: str) -> Any:
  """Returns a number, a bool, None or else the text; a list of these if the
  text has commas."""
  text = text.strip()
  if "," in text:
    # A trailing comma makes a list of one: --replicas=2,
    return [_parse_value(part) for part in text.rstrip(",").split(",")]
  if text.lower() in _WORDS_AS_VALUES:
    return _WORDS_AS_VALUES[text.lower()]
  # Try int before float, so that 2 stays an int, which counts need.
  for number_type in (int, float):
    with contextlib.suppress(ValueError):
      return number_type(text)
  return text


def _parse_pairs(flag: str, texts: list[str]) -> dict[str, str]:
  """Returns the dict of KEY=VALUE,... A part without = extends the last
  value."""
  values: dict[str, str] = {}
  key = None
  for part in texts:
    name, equals, value = part.partition("=")
    if equals and name.strip():
      key = name.strip()
      values[key] = value
    elif key is None or equals:
      raise ValueError(f"--{flag}: write KEY=VALUE,..., not {part!r}")
    # --options=replicas=2,1,every=4: absl split the value at its comma.
    else:
      values[key] += f",{part}"
  return values


def _parse_numbers(flag: str, text: str) -> float | list[float]:
  """Returns the number of a flag, or a list of one for each stage."""
  try:
    values = [float(part) for part in text.split(",")]
  except ValueError:
    raise ValueError(
      f"--{flag} must be a number, or one for each stage (1,2,1), not {text!r}"
    ) from None
  return values if len(values) > 1 else values[0]


def _costs(
  cost_texts: Mapping[str, str], action_times: Mapping[str, str], stages: int
) -> analyze.Costs:
  """Returns the analysis' costs from the texts of flags."""
  numbers: dict[str, Any] = {
    k: _parse_numbers(k, v) for k, v in cost_texts.items()
  }
  times: dict[str, Any] = {
    k: _parse_numbers("own", v) for k, v in action_times.items()
  }
  # The times of an overlapped block and of users' actions must be one number,
  # which holds for all stages.
  for name, value in {"overlap": numbers.get("overlap"), **times}.items():
    if isinstance(value, list):
      raise ValueError(f"{name} must be one number, not {value}")
  costs: analyze.Costs = analyze.costs(stages, **numbers, own=times)
  return costs


def _build(
  name: str,
  options: Mapping[str, str],
  cost_texts: Mapping[str, str],
  action_times: Mapping[str, str],
) -> Schedule:
  """Builds a schedule. A schedule that depends on costs gets the given ones."""
  name = names.canonical(name, _SCHEDULES)
  arguments = names.lookup("schedule", name, _SCHEDULES)
  values = {key: _parse_value(text) for key, text in options.items()}
  if "costs" in values:
    raise ValueError("costs are flags: --forward=1 --backward=2 and so on")
  # Check the size first, since building is slow. Most schedules have a backward
  # for each forward.
  if (count := schedules.forwards(values)) >= _MAX_CELLS // 2:
    raise ValueError(
      f"{name} of {count:,} forwards is too large to be drawn: check the"
      " numbers for a misprint"
    )
  table = schedules.build(name, **values)
  if "costs" in arguments and (cost_texts or action_times):
    # Two passes: the costs need the number of stages, which the table has.
    costs = _costs(cost_texts, action_times, table.stages)
    table = schedules.build(name, **values, costs=costs)
  return table


@contextlib.contextmanager
def _explain_read_error(flag: str, path: str) -> Iterator[None]:
  """Turns the OSError of a file that a flag names into a ValueError."""
  try:
    yield
  except OSError as error:
    raise ValueError(
      f"--{flag}={path} cannot be read ({error.strerror}): name a file"
    ) from error


def _drawing_folder(folder: Path) -> Path:
  """Returns the folder; ValueError if it holds anything but a drawing."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"--out={folder} is a file; choose a folder")
  # A full disk may have left a temporary file.
  existing = {path.name.removesuffix(".tmp") for path in folder.glob("*")}
  # Files of another tool are not overwritten.
  if foreign := existing - set(_FILES):
    raise ValueError(
      f"--out={folder} holds {min(foreign)}, which is not part of a drawing;"
      " choose another folder"
    )
  return folder


def _write(folder: Path, drawing: render.Drawing) -> str:
  """Writes the files; returns lines that name them."""
  timing = drawing.facts.timing
  perfetto = render.perfetto(drawing.table, timing, drawing.measured)
  texts = {**render.texts(drawing), "trace.json": storage.to_json(perfetto)}
  with safe_files.opening(f"--out={folder}"):
    safe_files.make_folder(folder.resolve())
    for name, text in texts.items():
      safe_files.write(folder / name, text)
  paths = folder / "gantt.png", folder / "gantt.svg"
  picture_line = f"{paths[0]}, .svg"
  try:
    render.gantt(drawing.table, timing, *paths, measured=drawing.measured)
  except ImportError as error:
    picture_line = f"not drawn: {error}"
  return (
    f"picture  {picture_line}\n"
    f"table    {folder}/grid.txt, schedule.csv, schedule.json\n"
    f"times    {folder}/analysis.txt; trace.json is for https://ui.perfetto.dev"
  )


def _build_or_read(
  schedule: str | None,
  table: str | None,
  options: Mapping[str, str],
  cost_texts: Mapping[str, str],
  action_times: Mapping[str, str],
) -> Schedule:
  """Builds the schedule that is named, or reads the table of a file."""
  # Exactly one of the two.
  if (schedule is None) == (table is None):
    raise ValueError(
      "give a table: either --schedule=NAME, one of"
      f" {', '.join(sorted(_SCHEDULES))}, or --table=FILE"
    )
  if table is None:
    assert schedule is not None
    return _build(schedule, options, cost_texts, action_times)
  if options:
    raise ValueError(
      f"--table already contains --{next(iter(options))}; drop one of them"
    )
  with _explain_read_error("table", table):
    return table_lib.read(Path(table))


def main(
  *,
  options: Mapping[str, str] | None = None,
  cost_texts: Mapping[str, str] | None = None,
  action_times: Mapping[str, str] | None = None,
  **flag_values: Any,
) -> None:
  """Draws the table that the flags describe, see `DRAW_SCHEDULE`."""
  options, cost_texts = options or {}, cost_texts or {}
  action_times = action_times or {}
  defaults = {name: default for name, (_, default, _) in DRAW_SCHEDULE.items()}
  given = defaults | flag_values
  folder = None if given["out"] is None else _drawing_folder(Path(given["out"]))
  try:
    # [1] The table, and whether it can be drawn and run.
    table = _build_or_read(
      given["schedule"], given["table"], options, cost_texts, action_times
    )
    if table.slots * table.devices > _MAX_CELLS:
      raise ValueError(
        f"{table.name} has {table.slots} slots on {table.devices} devices, too"
        " many to be drawn: check the numbers for a misprint"
      )
    limits = {name: given[name] for name in ("max_in_flight", "transfers")}
    validate.validate(table, **limits)
    # [2] Its costs: the given ones, else those of the measured run.
    measured_run, costs = None, None
    if given["measured"] is not None:
      with _explain_read_error("measured", given["measured"]):
        measured_run = spans.read(Path(given["measured"]))
      if not (cost_texts or action_times):
        costs = analyze.measured_costs(table, measured_run)
    if costs is None:
      costs = _costs(cost_texts, action_times, table.stages)
    # [3] The analysis.
    weights = given["weights"] or schedules.weights_of(table)
    analysis = analyze.analyze(table, costs, weights=weights)
    drawing = render.Drawing(table, analysis, weights, measured_run)
    description = render.describe(drawing)
  except ScheduleError as error:
    reason, _, grid = str(error).partition("\n")
    if grid:  # print it apart, with its line ends: `fail` prints one line
      print(grid, file=sys.stderr)
    raise ValueError(reason) from None
  # [4] Print, and write.
  columns = shutil.get_terminal_size((_DEFAULT_COLUMNS, 24)).columns
  for line in table_lib.to_text(table).splitlines():
    print(line if len(line) <= columns else line[: columns - 4] + " ...")
  # The grid has a column for the devices' numbers.
  width = max(columns - len(str(table.devices)) - 4, 20)
  print()
  print(render.to_text(table, analysis.timing, columns=width))
  print(description)
  if folder is not None:
    print(_write(folder, drawing))


def _define() -> Callable[[], None]:
  """Defines the flags; returns a function that calls `main` with them."""
  flag_holders = flags.define("draw_schedule")

  def values(flag_names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of the flags that are given."""
    flag_values = {name: flag_holders[name].value for name in flag_names}
    return {k: v for k, v in flag_values.items() if v is not None}

  def call() -> None:
    """Calls `main` with the values of the flags."""
    given, options = values(DRAW_SCHEDULE), values(SCHEDULE_OPTIONS)
    # An option may be a separate flag or part of --options, not both.
    parsed_options = _parse_pairs("options", given.pop("options"))
    action_times = _parse_pairs("own", given.pop("own"))
    if repeated := sorted(set(parsed_options) & set(options)):
      raise ValueError(
        f"{repeated[0]} is given twice, also in --options; drop one"
      )
    texts = {"cost_texts": values(TIMES), "action_times": action_times}
    main(options=options | parsed_options, **texts, **given)

  return call


if __name__ == "__main__":
  flags.run(_define(), "draw_schedule")
