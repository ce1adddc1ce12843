"""From claims and finished cells to verdicts.

A claim has a part for each pair of cells (or cell) that it is about. A part has
one number for each seed, and an interval of these numbers. The part holds if
the interval lies in the claimed range; the claim holds if all parts hold.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import text_table
from asgd.figures import figure_file, statistics
from asgd.figures.columns import CellTable
from asgd.figures.figure_file import Claim, Counts
from asgd.figures.statistics import UNDECIDED, Interval

VERSION = 1  # of the format of stored verdicts


class Effect(NamedTuple):
  """One number for each seed, and the bounds that are claimed for them."""

  what: str
  values: Mapping[int, float]  # seed -> number; empty: cells did not run
  above: float
  below: float
  ratio: bool = False


class Decided(NamedTuple):
  """A part of a claim, with its interval and verdict."""

  part: Effect
  interval: Interval
  verdict: str
  why: str


class ClaimVerdict(NamedTuple):
  """A claim, with its verdict and its parts."""

  claim: Claim
  verdict: str
  parts: Sequence[Decided]


def _paired(one, other, combine) -> dict[int, float]:
  """Returns combine(a, b) for the seeds that both have. An infinite number was
  never reached; of two such numbers the larger is not known (NaN)."""
  both = [seed for seed in one if seed in other]
  return {
    seed: math.nan
    if math.isinf(one[seed]) and math.isinf(other[seed])
    else combine(one[seed], other[seed])
    for seed in both
  }


def _over(a, b):
  """Returns a / b for positive numbers, otherwise NaN."""
  return a / b if a > 0 and b > 0 else math.nan


class _Cells:
  """The values of a claim's column, for cells as the claim writes them."""

  def __init__(self, claim, table, counts):
    self._claim, self._table, self._counts = claim, table, counts

  def __call__(self, spot: str) -> dict[int, float]:
    cell = figure_file.cell_of(spot, self._counts)
    return self._table.values(self._claim.column, *cell) if cell else {}

  def along(self, label: str) -> list[str]:
    """Returns the cells of a run, ordered by their number of workers."""
    counts = sorted(self._counts.get(label, ()))
    return [f"{label}@{count}" for count in counts]


def _steps(claim, cells) -> Iterator[Effect]:
  """Yields the differences from each cell to the next."""
  runs, margin = claim.data["runs"], float(claim.data.get("by", 0.0))
  if isinstance(runs, str):
    # "monotone" names one run: its cells by the number of workers.
    runs = cells.along(runs)
  steps = list(itertools.pairwise(figure_file.groups(runs)))
  if not steps:
    yield Effect(str(claim.data["runs"]), {}, margin, math.inf)
  for before, after in steps:
    # Each cell of a group is compared with each cell of the next group.
    for a, b in itertools.product(before, after):
      # The claimed difference is positive in either direction.
      first, second, sign = (b, a, "<") if (
        claim.data["order"] == "rises"
      ) else (a, b, ">")
      values = _paired(cells(first), cells(second), operator.sub)
      yield Effect(f"{a} {sign} {b}", values, margin, math.inf)


def _pairs(claim, cells) -> Iterator[Effect]:
  """Yields the difference or ratio of each pair of cells."""
  data, ratio = claim.data, claim.kind == "ratio"
  ofs = itertools.chain(*figure_file.groups(data["of"]))
  tos = list(itertools.chain(*figure_file.groups(data["to"])))
  sign, combine = ("/", _over) if ratio else ("-", operator.sub)
  for a, b in itertools.product(ofs, tos):
    values = _paired(cells(a), cells(b), combine)
    yield Effect(f"{a} {sign} {b}", values, *claim.bounds, ratio)


def _bounds(claim, cells) -> Iterator[Effect]:
  """Yields the value of each cell."""
  for spot in itertools.chain(*figure_file.groups(claim.data["of"])):
    yield Effect(spot, cells(spot), *claim.bounds)


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
      break
    if (y0 - level) * (y1 - level) <= 0 and y0 != y1:
      return float(x0 + (x1 - x0) * (level - y0) / (y1 - y0))
  return math.nan


def _threshold(claim, cells) -> Iterator[Effect]:
  """Yields the x at which the column crosses the claimed level."""
  data = claim.data
  columns = [(x, cells(spot)) for spot, x in data["runs"]]
  # A crossing needs the values of one seed at every x.
  seeds = set.intersection(*(set(column) for _, column in columns))
  xs = [x for x, _ in columns]
  values = {
    seed: crossing(xs, [column[seed] for _, column in columns], data["level"])
    for seed in sorted(seeds)
  }
  ends = f"{data['runs'][0][0]} ... {data['runs'][-1][0]}"
  what = f"{claim.column} = {data['level']:g} in {ends}"
  yield Effect(what, values, *claim.bounds)


_FOUND = Interval._fields[:4]
_PARTS = {
  "ordering": _steps,
  "monotone": _steps,
  "difference": _pairs,
  "ratio": _pairs,
  "bound": _bounds,
  "threshold": _threshold,
}


def decide(part: Effect, statistic: str) -> Decided:
  """Returns a part with its interval by a statistic, and its verdict."""
  values = list(part.values.values())
  nothing = Interval(math.nan, -math.inf, math.inf, 0.0, "not run at this size")
  if not values:
    return Decided(part, nothing, UNDECIDED, nothing.why)
  # A seed without a value makes the part undecided: leaving it out would be a
  # choice.
  lacking = sum(map(math.isnan, values))
  if lacking:
    odd = ", infinite ones, or none above 0" if part.ratio else (
      ", or infinite ones"
    )
    why = f"{lacking} of {len(values)} seeds have no value{odd}"
    return Decided(part, nothing._replace(why=why), UNDECIDED, why)
  if part.ratio:
    interval = statistics.of_ratios(statistic, values)
  else:
    interval = statistics.STATISTICS[statistic](values)
  # The interval, not the effect alone, must lie between the bounds.
  verdict, why = statistics.judge(interval, part.above, part.below)
  return Decided(part, interval, verdict, why)


def judge(
  claims: Sequence[Claim], table: CellTable, counts: Counts
) -> list[ClaimVerdict]:
  """Returns the verdict of each claim, from finished cells. `counts` are the
  numbers of workers of each run of the experiment at this size."""
  out = []
  for claim in claims:
    parts = _PARTS[claim.kind](claim, _Cells(claim, table, counts))
    decided = [decide(part, claim.statistic) for part in parts]
    said = statistics.conclude([each.verdict for each in decided])
    out.append(ClaimVerdict(claim, said, decided))
  return out


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
    for each in verdict.parts:
      low, high = number(each.interval.low), number(each.interval.high)
      percent = 100 * each.interval.coverage
      rows.append(
        [
          f"    {each.part.what}",
          number(each.interval.effect),
          f"{low} to {high}" if percent else "-",
          f"{percent:.1f} %" if percent else "",
          bounds_text(each.part),
          each.verdict,
          each.why,
        ]
      )
    header[0] = f"    {claim.column}, {claim.statistic}"
    lines.append(text_table.format_table(header, rows))
  return "\n".join(lines)


def plain(value: float) -> float | str | None:
  """Returns a number for JSON: an infinite one is a text that float() reads."""
  if math.isnan(value):
    return None
  return value if math.isfinite(value) else str(value)


def as_data(verdict: ClaimVerdict) -> dict[str, Any]:
  """Returns a verdict as data for JSON."""
  claim, parts = verdict.claim, []
  for part, interval, said, why in verdict.parts:
    bounds = {"above": plain(part.above), "below": plain(part.below)}
    values = {str(seed): plain(v) for seed, v in part.values.items()}
    found = {k: plain(v) for k, v in zip(_FOUND, interval[:4], strict=True)}
    parts.append(
      {"what": part.what, "verdict": said, "why": why, **found, **bounds}
      | {"ratio": part.ratio, "values": values}
    )
  fields = ("name", "says", "kind", "column", "statistic", "note")
  own = {key: getattr(claim, key) for key in fields}
  return {**own, "verdict": verdict.verdict, "parts": parts}


def part_of(data: Mapping[str, Any]) -> Effect:
  """Returns the part that `as_data` wrote."""
  bounds = float(data["above"]), float(data["below"])
  values = {
    int(seed): math.nan if value is None else float(value)
    for seed, value in data["values"].items()
  }
  return Effect(data["what"], values, *bounds, data["ratio"])
