"""Draws a pipeline's schedule and says what it costs.

  python -m launch.draw_schedule --schedule=one_f_one_b --stages=4 \\
    --microbatches=8 --backward=2 --out=FOLDER

prints the table, its times and what can be read off them, and writes

  FOLDER/grid.txt        the table, a column for each slot
         analysis.txt    its times, and what they cost
         schedule.csv, schedule.json   the table in other forms
         gantt.png, .svg the picture
         trace.json      for https://ui.perfetto.dev

A schedule's options are flags of their names, or --options=KEY=VALUE,...; any
of grid.txt, schedule.csv and schedule.json can be changed by hand and given as
--table=FILE. Times are in a unit of your choice, each a number or one for each
stage: --forward=1,1,2,1. A run that was measured (--measured=FILE.json, as
`pipeline.spans` writes it) is drawn beside its plan, which then takes the
medians that were measured, unless times are given.
"""

import inspect
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from asgd import names
from launch import cli, outputs, tables
from pipeline import analyze, generate, render, spans, validate
from pipeline import schedule as schedule_lib
from pipeline.schedule import Schedule, ScheduleError

_MOST_CELLS = 2_000_000  # slots x devices
_WIDE = 160  # columns of times in a file
_COSTS = {
  "forward": "Time of a forward (1).",
  "backward": "Time of a backward (that of input + weight).",
  "input": "Time of a backward of inputs (1).",
  "weight": "Time of a backward of weights (1).",
  "transfer": "Time from a stage to the next one, if it is elsewhere (0).",
  "transfer_back": "The same of gradients (as transfer).",
  "overlap": "Time of a block of a forward and a backward (their sum).",
}
_WEIGHTS = {"pipedream_2bw": "2bw", "stale": "latest", "pipemare": "latest"}
_FILES = ("grid.txt", "analysis.txt", "schedule.csv", "schedule.json")
_FILES += ("trace.json", "gantt.png", "gantt.svg")
# `custom` takes a function, which no flag can be.
_SCHEDULES = {
  name: list(inspect.signature(maker).parameters)
  for name, maker in generate.SCHEDULES.items()
  if "rule" not in inspect.signature(maker).parameters
}


# What is asked for.


def _value(text: str) -> Any:
  """Returns a number, a truth, None, a list of those, or the text."""
  text = text.strip()
  if "," in text:
    return [_value(part) for part in text.rstrip(",").split(",")]
  constants = {"true": True, "false": False, "none": None}
  if text.lower() in constants:
    return constants[text.lower()]
  for number in (int, float):
    try:
      return number(text)
    except ValueError:
      pass
  return text


def _pairs(flag: str, texts: list[str]) -> dict[str, str]:
  """Returns KEY=VALUE,...; a part without = goes on with the value before."""
  out: dict[str, str] = {}
  key = None
  for text in texts:
    name, equals, value = text.partition("=")
    if equals and name.strip():
      key = name.strip()
      out[key] = value
    elif key is None or equals:
      raise ValueError(f"--{flag}: write KEY=VALUE,..., not {text!r}")
    else:
      out[key] += f",{text}"
  return out


def _numbers(name: str, text: str) -> float | list[float]:
  try:
    values = [float(part) for part in text.split(",")]
  except ValueError:
    raise ValueError(
      f"--{name} must be a number, or one for each stage (1,2,1), not {text!r}"
    ) from None
  return values if len(values) > 1 else values[0]


def _costs(given: Mapping[str, str], own: Mapping[str, str], stages: int):
  numbers = {name: _numbers(name, text) for name, text in given.items()}
  own = {name: _numbers("own", text) for name, text in own.items()}
  for name, value in {**numbers, **own}.items():
    if isinstance(value, list) and (name == "overlap" or name in own):
      raise ValueError(f"{name} must be one number, not {value}")
  return analyze.costs(stages, **numbers, own=own)


def _build(name: str, options: Mapping[str, str], costs, own) -> Schedule:
  """Builds a schedule; one that depends on costs, for those that are given."""
  known = names.lookup("schedule", name, _SCHEDULES)
  values = {key: _value(text) for key, text in options.items()}
  if "costs" in values:
    raise ValueError("costs are flags: --forward=1 --backward=2 and so on")
  if (count := generate.forwards(values)) > _MOST_CELLS:  # before it is made
    raise ValueError(
      f"{name} of {count:,} forwards is too large to be drawn: is there a"
      " misprint?"
    )
  table = generate.build(name, **values)
  if "costs" in known and (costs or own):
    cost = _costs(costs, own, table.stages)
    table = generate.build(name, **values, costs=cost)
  return table


# What is found.


class Drawing(NamedTuple):
  """All that is known of a table."""

  table: Schedule
  timing: analyze.Timing
  facts: analyze.Analysis
  weights: str
  spans: list[spans.Span] | None


def _percent(share):
  return f"{share:.1%}"


def _range(values):
  """`3` or `2-3`."""
  low, high = int(values.min()), int(values.max())
  return f"{low}" if low == high else f"{low}-{high}"


def describe(drawing: Drawing) -> str:
  """Returns what a table costs, in words and two tables."""
  table, facts = drawing.table, drawing.facts
  total = facts.makespan or 1.0
  kind = "a flush after each" if table.flush else "no flush"
  lines = [
    f"{table.name}: {table.stages} stages on {table.devices} devices,"
    f" {table.microbatches} microbatches, {table.every} in an update, {kind}",
    f"makespan  {facts.makespan:.6g}",
    f"bubble    {_percent(facts.bubble_of_total)} of the total (idle / devices"
    " x makespan)",
    f"          {_percent(facts.bubble_of_ideal)} of the ideal (idle / busy)",
    "",
  ]
  rows = [
    [
      *(f"device {d}", f"{facts.busy[d]:.6g}", f"{facts.idle[d]:.6g}"),
      *(_percent(facts.idle[d] / total), f"{facts.peak_activations[d]:.6g}"),
      f"{facts.sent[d]:.6g}",
    ]
    for d in range(table.devices)
  ]
  head = ["", "busy", "idle", "bubble", "peak activations", "sent"]
  lines.append(outputs.format_table(head, rows))
  # By then a pipeline is full, and staleness what it is for good.
  steady = slice(table.microbatches // 2, None)
  rows = [
    [
      f"stage {stage}",
      ",".join(map(str, devices)),
      str(facts.weight_versions[stage]),
      _range(facts.staleness.forward[stage, steady]),
      _range(facts.staleness.backward[stage, steady]),
    ]
    for stage, devices in enumerate(table.places())
  ]
  head = ["", "devices", "weight versions", "stale forward", "stale backward"]
  lines.append(outputs.format_table(head, rows))
  lines.append(
    "sent: activations and gradients to other devices; weights:"
    f" {drawing.weights}; stale: updates since\nthey were read, in the later"
    " half of the microbatches"
  )
  return "\n".join(lines) + "\n"


def describe_measured(drawing: Drawing) -> str:
  """Returns the plan's bubbles beside the measured ones."""
  found = spans.compare(drawing.table, drawing.timing, drawing.spans)
  plan, run = found.planned, found.measured

  def row(name, *cells):
    return [name, *cells]

  rows = [
    row(
      f"device {d}",
      *(f"{plan.idle[d]:.5g}", f"{run.idle[d]:.5g}"),
      *(_percent(plan.bubble[d]), _percent(run.bubble[d])),
    )
    for d in range(drawing.table.devices)
  ]
  for name, one, other in (
    ("of the total", plan.of_total, run.of_total),
    ("of the ideal", plan.of_ideal, run.of_ideal),
  ):
    rows.append(row(name, "", "", _percent(one), _percent(other)))
  head = ["", "planned idle", "measured", "planned bubble", "measured"]
  missing = (
    f"{found.missing} tasks of the table were not measured\n"
    if found.missing
    else ""
  )
  return (
    f"makespan  {plan.makespan:.6g} planned, {run.makespan:.6g} measured\n"
    f"{missing}\n{outputs.format_table(head, rows)}"
  )


def _crop(text: str, columns: int) -> str:
  lines = text.splitlines()
  return "\n".join(
    line if len(line) <= columns else line[: columns - 4] + " ..."
    for line in lines
  )


# What is left behind.


def _free(folder: Path) -> Path:
  """Returns a folder that holds nothing but what is written here."""
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"--out={folder} is a file; choose a folder")
  # A full disk leaves a temporary file.
  held = {path.name.removesuffix(".tmp") for path in folder.glob("*")}
  others = held - set(_FILES)
  if others:
    raise ValueError(
      f"--out={folder} holds {min(others)}, which is not of a drawing; choose"
      " another folder"
    )
  return folder


def _write(folder: Path, drawing: Drawing, analysis: str) -> list[str]:
  """Writes the files; returns lines that say where they are."""
  table, timing = drawing.table, drawing.timing
  texts = (
    schedule_lib.to_text(table),
    analysis,
    schedule_lib.to_csv(table),
    schedule_lib.to_json(table) + "\n",
    outputs.to_json(render.perfetto(table, timing, drawing.spans)),
  )
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in zip(_FILES, texts, strict=False):
    outputs.write_atomically(folder / name, text)
  paths = folder / "gantt.png", folder / "gantt.svg"
  picture = f"{paths[0]}, .svg"
  try:
    render.gantt(table, timing, *paths, measured=drawing.spans)
  except ImportError as error:
    picture = f"not drawn: {error}"
  return [
    f"picture  {picture}",
    f"table    {folder}/grid.txt, {folder}/schedule.csv,"
    f" {folder}/schedule.json",
    f"times    {folder}/analysis.txt, and {folder}/trace.json for"
    " https://ui.perfetto.dev",
  ]


def _make(schedule, table, options, costs, own) -> Schedule:
  if (schedule is None) == (table is None):
    raise ValueError(
      "which table? give --schedule=NAME, one of"
      f" {', '.join(sorted(_SCHEDULES))}, or --table=FILE, and not both"
    )
  if table is None:
    return _build(schedule, options, costs, own)
  if options:
    raise ValueError(
      f"--table has all that --{next(iter(options))} says; drop one of them"
    )
  return tables.read(Path(table))


def main(
  *,
  schedule: str | None = None,
  table: str | None = None,
  options: Mapping[str, str] | None = None,
  costs: Mapping[str, str] | None = None,
  own: Mapping[str, str] | None = None,
  weights: str | None = None,
  transfers: str = "buffered",
  max_in_flight: int | None = None,
  measured: str | None = None,
  out: str | None = None,
) -> None:
  """Draws the table that the flags describe; `_define` says what each is."""
  options, costs, own = dict(options or {}), dict(costs or {}), dict(own or {})
  folder = None if out is None else _free(Path(out))
  try:
    made = _make(schedule, table, options, costs, own)
    if made.slots * made.devices > _MOST_CELLS:
      raise ValueError(
        f"{made.name} has {made.slots} slots on {made.devices} devices, too"
        " many to be drawn: is there a misprint?"
      )
    validate.validate(made, max_in_flight=max_in_flight, transfers=transfers)
    seen = None
    if measured is not None:
      seen = spans.from_json(tables.read_text(Path(measured)))
    if seen is not None and not costs and not own:
      cost = spans.costs(made, seen)
    else:
      cost = _costs(costs, own, made.stages)
    if weights is None:
      weights = "latest" if made.flush else _WEIGHTS.get(made.name, "stash")
    facts = analyze.analyze(made, cost, weights=weights)
    drawing = Drawing(made, facts.timing, facts, weights, seen)
    analysis = describe(drawing)
    if seen is not None:
      analysis += "\n" + describe_measured(drawing)
  except ScheduleError as error:
    reason, _, grid = str(error).partition("\n")
    if grid:  # whose columns need their line ends
      print(grid, file=sys.stderr)
    raise ValueError(reason) from None
  columns = shutil.get_terminal_size((_WIDE, 24)).columns
  print(_crop(schedule_lib.to_text(made), columns), end="\n\n")
  number = len(str(made.devices)) + 4
  width = max(columns - number, 20)
  print(render.to_text(made, facts.timing, columns=width))
  print(analysis)
  if folder is not None:
    wide = render.to_text(made, facts.timing, columns=_WIDE)
    print("\n".join(_write(folder, drawing, f"{wide}\n{analysis}")))


def _define():
  """Defines the flags; returns a function that calls `main` with them."""
  string, text = flags.DEFINE_string, {}
  text["schedule"] = string(
    "schedule", None, f"One of {', '.join(sorted(_SCHEDULES))}."
  )
  text["table"] = string("table", None, "FILE.txt, .csv or .json of a table.")
  text["weights"] = string(
    "weights",
    None,
    f"Which weights are read: {', '.join(analyze.WEIGHTS)}. Default: latest"
    " with a flush, and without what the schedule's paper has, or stash.",
  )
  text["transfers"] = string(
    "transfers",
    "buffered",
    "Or rendezvous: sends wait for the other side, which must not deadlock.",
  )
  text["max_in_flight"] = flags.DEFINE_integer(
    "max_in_flight", None, "Refuse tables with more forwards on a device."
  )
  text["measured"] = string("measured", None, "FILE.json of spans of a run.")
  text["out"] = string("out", None, "Folder to write to. Default: none.")
  own = flags.DEFINE_list("own", [], "NAME=TIME,... of actions of your own.")
  listed = flags.DEFINE_list("options", [], "KEY=VALUE,... of the schedule.")
  costs = {name: string(name, None, help_) for name, help_ in _COSTS.items()}
  takers: dict[str, list[str]] = {}
  for name, known in sorted(_SCHEDULES.items()):
    for option in known:
      takers.setdefault(option, []).append(name)
  takers.pop("costs", None)
  options = {
    option: string(option, None, f"Option of {', '.join(of)}.")
    for option, of in takers.items()
  }

  def given(holders):
    return {n: f.value for n, f in holders.items() if f.value is not None}

  def call():
    extra = _pairs("options", listed.value)
    both = sorted(set(extra) & set(given(options)))
    if both:
      raise ValueError(f"{both[0]} is given twice, in --options, too")
    main(
      **{name: flag.value for name, flag in text.items()},
      options={**given(options), **extra},
      costs=given(costs),
      own=_pairs("own", own.value),
    )

  return call


if __name__ == "__main__":
  cli.run(_define())
