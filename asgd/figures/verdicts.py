"""From claims and finished cells to verdicts.

A claim has a part for each cell, or pair of cells, that it is about. A part has
one number for each seed, and an interval of these numbers. The part holds if
the interval lies in the claimed range; the claim holds if all parts hold.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import text_table
from asgd.figures import figure_file, statistics
from asgd.figures.columns import CellTable
from asgd.figures.figure_file import Claim, Counts
from asgd.figures.statistics import UNDECIDED, Interval

VERSION = 1  # of the format of stored verdicts


class Effect(NamedTuple):
  """One number for each seed, and the bounds that are claimed for them."""

  what: str  # the cells, as the claim writes them: "a@8 < b@8"
  values: Mapping[int, float]  # seed -> number; empty: cells did not run
  above: float  # -inf without a bound
  below: float  # inf without a bound
  ratio: bool = False  # whether the values are quotients


class DecidedPart(NamedTuple):
  """A part of a claim, with its interval and verdict."""

  part: Effect
  interval: Interval
  verdict: str
  why: str


class ClaimVerdict(NamedTuple):
  """A claim, with its verdict and its parts."""

  claim: Claim
  verdict: str
  parts: Sequence[DecidedPart]


def _combine_by_seed(
  first: Mapping[int, float],
  second: Mapping[int, float],
  combine: Callable[[float, float], float],
) -> dict[int, float]:
  """Returns combine(a, b) for the seeds that both have. An infinite number
  stands for a value that was never reached; which of two is larger is not known
  (NaN)."""
  return {
    seed: math.nan
    if math.isinf(first[seed]) and math.isinf(second[seed])
    else combine(first[seed], second[seed])
    for seed in first
    if seed in second
  }


def _ratio(a: float, b: float) -> float:
  """Returns a / b for positive numbers, otherwise NaN."""
  return a / b if a > 0 and b > 0 else math.nan


class _ColumnValues:
  """The values of a claim's column, for cells as the claim writes them."""

  def __init__(
    self, claim: Claim, table: CellTable, counts: Counts
  ) -> None:
    self._claim, self._table, self._counts = claim, table, counts

  def __call__(self, cell_name: str) -> dict[int, float]:
    """Returns seed -> value; {} for a cell that this size does not have. Only
    some seeds may have run: the others have NaN."""
    cell = figure_file.cell_of(cell_name, self._counts)
    values = self._table.values(self._claim.column, *cell) if cell else {}
    return {s: values.get(s, math.nan) for s in self._table.seeds if values}

  def cells_of_run(self, label: str) -> list[str]:
    """Returns the cells of a run, ordered by their number of workers."""
    counts = sorted(self._counts.get(label, ()))
    return [f"{label}@{count}" for count in counts]


def _steps(claim: Claim, values_of: _ColumnValues) -> Iterator[Effect]:
  """Yields the differences from each cell to the next."""
  runs, margin = claim.data["runs"], float(claim.data.get("by", 0.0))
  if isinstance(runs, str):
    # "monotone" names one run: its cells by the number of workers.
    runs = values_of.cells_of_run(runs)
  steps = list(itertools.pairwise(figure_file.groups(runs)))
  # A run that has one number of workers at this size has no step.
  if not steps:
    yield Effect(str(claim.data["runs"]), {}, margin, math.inf)
  for group, next_group in steps:
    # Each cell of a group is compared with each cell of the next group.
    for a, b in itertools.product(group, next_group):
      # The claimed difference is positive in either direction.
      upper, lower, sign = (b, a, "<") if (
        claim.data["order"] == "rises"
      ) else (a, b, ">")
      values = _combine_by_seed(
        values_of(upper), values_of(lower), operator.sub
      )
      yield Effect(f"{a} {sign} {b}", values, margin, math.inf)


def _pairs(claim: Claim, values_of: _ColumnValues) -> Iterator[Effect]:
  """Yields the difference or ratio of each pair of cells."""
  data, ratio = claim.data, claim.kind == "ratio"
  first_cells = itertools.chain(*figure_file.groups(data["of"]))
  second_cells = list(itertools.chain(*figure_file.groups(data["to"])))
  sign, combine = ("/", _ratio) if ratio else ("-", operator.sub)
  # Each cell of `of` with each cell of `to`, groups flattened.
  for a, b in itertools.product(first_cells, second_cells):
    values = _combine_by_seed(values_of(a), values_of(b), combine)
    yield Effect(f"{a} {sign} {b}", values, *claim.bounds, ratio)


def _bounds(claim: Claim, values_of: _ColumnValues) -> Iterator[Effect]:
  """Yields the value of each cell."""
  for cell_name in itertools.chain(*figure_file.groups(claim.data["of"])):
    yield Effect(cell_name, values_of(cell_name), *claim.bounds)


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float:
  """Returns the first x at which a line through points crosses a level. NaN if
  it does not, or if an earlier point is not finite.

  Example:
    >>> crossing([1.0, 2.0], [-1.0, 3.0], 0.0)
    1.25
  """
  points = sorted(zip(xs, ys, strict=True))
  for (x0, y0), (x1, y1) in itertools.pairwise(points):
    if not (math.isfinite(y0) and math.isfinite(y1)):
      # An unknown value may hide an earlier crossing.
      break
    # Opposite signs, or one point on the level. Equal ys have no slope.
    if (y0 - level) * (y1 - level) <= 0 and y0 != y1:
      # Linear interpolation between the two points.
      return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))
  return math.nan


def _threshold(claim: Claim, values_of: _ColumnValues) -> Iterator[Effect]:
  """Yields the x at which the column crosses the claimed level."""
  data = claim.data
  columns = [(x, values_of(cell_name)) for cell_name, x in data["runs"]]
  # A crossing needs the values of one seed at every x.
  seeds = set.intersection(*(set(column) for _, column in columns))
  xs = [x for x, _ in columns]
  values = {
    seed: crossing(xs, [column[seed] for _, column in columns], data["level"])
    for seed in sorted(seeds)
  }
  end_cells = f"{data['runs'][0][0]} ... {data['runs'][-1][0]}"
  what = f"{claim.column} = {data['level']:g} in {end_cells}"
  yield Effect(what, values, *claim.bounds)


_INTERVAL_KEYS = Interval._fields[:4]  # effect, low, high, coverage
# Kind of a claim -> its parts.
_PART_MAKERS = {
  "ordering": _steps,
  "monotone": _steps,
  "difference": _pairs,
  "ratio": _pairs,
  "bound": _bounds,
  "threshold": _threshold,
}


def decide(part: Effect, statistic: str) -> DecidedPart:
  """Returns a part with its interval by a statistic, and its verdict."""
  values = list(part.values.values())
  no_interval = Interval(math.nan, -math.inf, math.inf, 0.0)
  no_interval = no_interval._replace(why="not run at this size")
  if not values:
    return DecidedPart(part, no_interval, UNDECIDED, no_interval.why)
  # To leave out a seed without a value would select results, so the part is
  # undecided.
  missing = sum(map(math.isnan, values))
  if missing:
    such_values = ", infinite ones, or none above 0" if part.ratio else (
      ", or infinite ones"
    )
    why = f"{missing} of {len(values)} seeds have no value{such_values}"
    return DecidedPart(part, no_interval._replace(why=why), UNDECIDED, why)
  if part.ratio:
    interval = statistics.of_ratios(statistic, values)
  else:
    interval = statistics.STATISTICS[statistic](values)
  # The interval, not the effect alone, must lie between the bounds.
  verdict, why = statistics.judge(interval, part.above, part.below)
  return DecidedPart(part, interval, verdict, why)


def judge(
  claims: Sequence[Claim], table: CellTable, counts: Counts
) -> list[ClaimVerdict]:
  """Returns the verdict of each claim, from finished cells. `counts`: the
  numbers of workers of each run of the experiment at this size."""
  claim_verdicts = []
  for claim in claims:
    # `values_of` reads the claim's column of a cell.
    parts = _PART_MAKERS[claim.kind](claim, _ColumnValues(claim, table, counts))
    decided_parts = [decide(part, claim.statistic) for part in parts]
    verdict = statistics.conclude([each.verdict for each in decided_parts])
    claim_verdicts.append(ClaimVerdict(claim, verdict, decided_parts))
  return claim_verdicts


def number(value: float | None) -> str:
  """Returns a number as text; "-" for NaN, which is None in JSON."""
  if value is None or math.isnan(value):
    return "-"
  return f"{value:.4g}"


def bounds_text(part: Effect) -> str:
  """Returns the claimed bounds of a part as text."""
  if part.above == -math.inf:
    return f"< {number(part.below)}"
  if part.below == math.inf:
    return f"> {number(part.above)}"
  return f"{number(part.above)} to {number(part.below)}"


def text(verdicts: Sequence[ClaimVerdict]) -> str:
  """Returns each claim with its parts: effect, interval and verdict."""
  lines = []
  for verdict in verdicts:
    claim = verdict.claim
    lines.append(f"{verdict.verdict:9}  {claim.name}: {claim.says}")
    header = ["", "effect", "interval", "", "claimed", "verdict", ""]
    rows = []
    for part in verdict.parts:
      low, high = number(part.interval.low), number(part.interval.high)
      # A coverage of 0 says that there is no interval.
      percent = 100 * part.interval.coverage
      rows.append(
        [
          f"    {part.part.what}",
          number(part.interval.effect),
          f"{low} to {high}" if percent else "-",
          f"{percent:.1f} %" if percent else "",
          bounds_text(part.part),
          part.verdict,
          part.why,
        ]
      )
    header[0] = f"    {claim.column}, {claim.statistic}"
    lines.append(text_table.format_table(header, rows))
  return "\n".join(lines)


def plain(value: float) -> float | str | None:
  """Returns a number for JSON: NaN as None, infinities as text for float()."""
  if math.isnan(value):
    return None
  return value if math.isfinite(value) else str(value)


def as_data(verdict: ClaimVerdict) -> dict[str, Any]:
  """Returns a verdict as data for JSON."""
  claim, parts = verdict.claim, []
  for part, interval, part_verdict, why in verdict.parts:
    bounds = {"above": plain(part.above), "below": plain(part.below)}
    values = {str(seed): plain(v) for seed, v in part.values.items()}
    interval_fields = {key: getattr(interval, key) for key in _INTERVAL_KEYS}
    numbers = {key: plain(value) for key, value in interval_fields.items()}
    parts.append(
      {"what": part.what, "verdict": part_verdict, "why": why}
      | numbers
      | bounds
      | {"ratio": part.ratio, "values": values}
    )
  fields = ("name", "says", "kind", "column", "statistic", "note")
  claim_fields = {key: getattr(claim, key) for key in fields}
  return {**claim_fields, "verdict": verdict.verdict, "parts": parts}


def part_of(data: Mapping[str, Any]) -> Effect:
  """Returns the part that `as_data` wrote. JSON has no infinities: `plain`
  wrote them as text, which float() reads, and NaN as null."""
  above, below = float(data["above"]), float(data["below"])
  values = {
    int(seed): math.nan if value is None else float(value)
    for seed, value in data["values"].items()
  }
  return Effect(data["what"], values, above, below, data["ratio"])
