"""What is said of a drawn schedule: its facts as text, and its files.

The pictures are in `pipeline.render`, the numbers in `pipeline.analyze`.
"""

from typing import NamedTuple

from asgd import text_table
from pipeline import analyze, render, spans
from pipeline import table as table_lib
from pipeline.table import Schedule

_WIDE = 160  # columns of times in a file


class Drawing(NamedTuple):
  """A table, its times under some costs, and what they come to."""

  table: Schedule
  facts: analyze.Analysis
  weights: str  # that tasks read, of `analyze.WEIGHTS`
  measured: list[spans.TaskSpan] | None = None


def _percent(share):
  return f"{share:.1%}"


def _range(values):
  """`3` or `2-3`."""
  low, high = int(values.min()), int(values.max())
  return f"{low}" if low == high else f"{low}-{high}"


def describe(drawing: Drawing) -> str:
  """Returns what a table costs: bubbles, memory and staleness, by device and by
  stage, and beside them those of a measured run."""
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
  lines.append(text_table.format_table(head, rows))
  # From there on the pipeline is full, and staleness does not change.
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
  lines.append(text_table.format_table(head, rows))
  lines.append(
    "sent: activations and gradients to other devices; weights:"
    f" {drawing.weights}; stale: updates since\nthey were read, in the later"
    " half of the microbatches"
  )
  if drawing.measured is not None:
    lines += ["", _describe_measured(drawing).rstrip("\n")]
  return "\n".join(lines) + "\n"


def _describe_measured(drawing: Drawing) -> str:
  """Returns the plan's bubbles beside those of the measured run."""
  comparison = spans.compare(
    drawing.table, drawing.facts.timing, drawing.measured
  )
  plan, run = comparison.planned, comparison.measured
  rows = [
    [
      *(f"device {d}", f"{plan.idle[d]:.5g}", f"{run.idle[d]:.5g}"),
      *(_percent(plan.bubble[d]), _percent(run.bubble[d])),
    ]
    for d in range(drawing.table.devices)
  ]
  rows += [
    ["of the total", "", "", _percent(plan.of_total), _percent(run.of_total)],
    ["of the ideal", "", "", _percent(plan.of_ideal), _percent(run.of_ideal)],
  ]
  head = ["", "planned idle", "measured", "planned bubble", "measured"]
  missing = ""
  if comparison.missing:
    missing = f"{comparison.missing} tasks of the table were not measured\n"
  return (
    f"makespan  {plan.makespan:.6g} planned, {run.makespan:.6g} measured\n"
    f"{missing}\n{text_table.format_table(head, rows)}"
  )


def texts(drawing: Drawing) -> dict[str, str]:
  """Returns the table and its analysis as contents of files, by their names."""
  table = drawing.table
  grid = render.to_text(table, drawing.facts.timing, columns=_WIDE)
  return {
    "grid.txt": table_lib.to_text(table),
    "analysis.txt": f"{grid}\n{describe(drawing)}",
    "schedule.csv": table_lib.to_csv(table),
    "schedule.json": table_lib.to_json(table) + "\n",
  }
