"""What a file in configs/figures says: an experiment, and claims about it.

The file has `get_config()`, which returns an ordinary config (those that are
shipped take the name of a variant, as other configs do), and `get_figure()`,
which returns plain data:

  title    str.
  paper    str: authors, title, where, arXiv number.
  about    str: what is shown, in a sentence or two.
  claims   list of dicts, see `Claim`.
  columns  name -> how it is made, see `asgd.figures.columns`.
  panels   list of dicts, see `PanelSpec`.
  quick    dotted key of the config -> value, for --quick.
  tuned    str: which settings were chosen on which seeds.
  turns    bool: cells whose seconds are a result are trained seed by seed, in
           the order of the runs and then backwards, so that runs of one seed
           take turns on a machine that others use.

Cells are written LABEL@N: a run of the config at N workers; LABEL@most and
LABEL@least are those with its most and its fewest, LABEL alone is for a run
that has one number of workers, or for a column that is over all of them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import names
from asgd.checks import shown
from asgd.experiment import checks
from asgd.figures import columns as columns_lib
from asgd.figures import fields
from asgd.figures.fields import FieldCheck
from asgd.figures.statistics import STATISTICS

Spot = tuple[str, int | None]  # (label, workers); None: all of the run's
Counts = Mapping[str, Sequence[int]]  # label -> numbers of workers

_SPREAD = ("ordering", "monotone")
_ORDERS = ("rises", "falls")
_SCALES = ("linear", "log", "symlog")
_LINES = ("", "-", "--", ":", "-.")
_MARKERS = ("", *".,ov^<>12348spP*hH+xXDd|_")
# Of files that an experiment writes beside those of the figure.
_TAKEN = ("config", "measurements", "metrics", "results", "table", "report")
_TAKEN += ("figure", "compare", "cells", "tensorboard")


class Claim(NamedTuple):
  """One claim; `kind` says what its effect is.

  ordering, monotone: `runs` are cells, or lists of cells that are not compared
    with each other; from one to the next the column `order`s ("rises" or
    "falls") by more than `by`, in each pair. Of "monotone" `runs` may be one
    label: its cells, by their number of workers.
  difference: each of `of` minus each of `to` lies between `above` and `below`.
  ratio: the same of `of` divided by `to`, both positive.
  bound: each of `of` lies there.
  threshold: `runs` are pairs (cell, x), along which the column crosses `level`;
    where it does so first, linear in between, lies there.
  """

  name: str
  says: str  # in words, for people
  kind: str
  column: str
  statistic: str  # of `statistics.STATISTICS`
  data: Mapping[str, Any]  # what else the file has of it
  note: str = ""  # why it holds or does not

  @property
  def bounds(self) -> tuple[float, float]:
    """Between which its effect lies, infinite where there is none."""
    return _bounds_of(self.data)


def _bounds_of(data):
  return data.get("above", -math.inf), data.get("below", math.inf)


class PanelSpec(NamedTuple):
  """One pair of axes: series of cells at an x, beside what others published."""

  title: str
  # Or a file of `columns.PROFILES`: its shares, at its values plus x.
  column: str
  xlabel: str
  ylabel: str
  series: Mapping[str, Sequence[tuple[float, str]]] = {}  # -> (x, cell)s
  # dicts of title, source, points (x, y), and of a series of the same colour
  published: Sequence[Mapping[str, Any]] = ()
  minus: str | None = None  # a cell whose values are taken off, seed by seed
  scale: float = 1.0  # of the values
  xlog: bool = False
  # A column of which the mean over seeds is the x of a cell, times `xscale`,
  # such as its traffic; an x beside a cell is then where it stands if none is
  # known.
  xcolumn: str | None = None
  xscale: float = 1.0
  # A column of evaluations, "time" or "epoch": a cell is a curve along it, and
  # the x beside it is not drawn.
  along: str | None = None
  yscale: str = "linear"  # or "log", "symlog"
  ylim: Sequence[float] | None = None


class Figure(NamedTuple):
  """What `get_figure()` returned, checked."""

  name: str
  title: str
  paper: str
  about: str
  claims: Sequence[Claim]
  columns: Mapping[str, Mapping[str, Any]]
  panels: Sequence[PanelSpec]
  quick: Mapping[str, Any]
  tuned: str
  turns: bool


def find_cell(spot: str, counts: Counts) -> Spot:
  """Returns (label, workers) of LABEL@N, as a run has it; workers are None of a
  label alone whose run has several. ValueError if there is no such cell.

  Example:
    >>> find_cell("a@most", {"a": (4, 8)})
    ('a', 8)
  """
  if not isinstance(spot, str):
    raise ValueError(f"{shown(spot)} names no cell; write LABEL@N")
  label, at, text = spot.partition("@")
  names.check("run", label, counts)
  own = sorted(counts[label])
  if not at:
    return label, own[0] if len(own) == 1 else None
  if text in ("most", "least"):
    return label, own[-1 if text == "most" else 0]
  if not text.isdecimal() or int(text) not in own:
    known = ", ".join(map(str, own))
    raise ValueError(
      f"{shown(spot)}: run {label!r} has no cells with {text!r} workers; it has"
      f" {known}"
    )
  return label, int(text)


def groups(value: Any) -> list[list[Any]]:
  """Returns cells as lists of cells: one of one for a cell alone."""
  several = value if isinstance(value, (list, tuple)) else [value]
  return [list(g) if isinstance(g, (list, tuple)) else [g] for g in several]


def spots_of(claim: Claim) -> Iterator[tuple[str, str]]:
  """Yields (field, cell) of the cells that a claim names."""
  data = claim.data
  if claim.kind == "threshold":
    yield from (("runs", spot) for spot, _ in data["runs"])
    return
  for key in ("of", "to", "runs"):
    for group in groups(data.get(key, [])):
      yield from ((key, spot) for spot in group)


def _are_cells(value):
  return bool(value) and all(
    isinstance(spot, str) for group in groups(value) for spot in group or [None]
  )


_CELLS = FieldCheck(
  fields.must(_are_cells, "a cell, or a list of cells, written LABEL@N"),
  "a cell, or a list of cells",
)
_BOUND = FieldCheck(fields.bound(fields.number))
_BOUNDS = dict.fromkeys(("above", "below"), _BOUND)
_RATIOS = dict.fromkeys(_BOUNDS, FieldCheck(fields.bound(checks.positive)))
_STEPS = {
  "runs": _CELLS,
  "order": FieldCheck(fields.named(_ORDERS), "rises or falls"),
  "by": FieldCheck(checks.number()),
}
_PAIRS = fields.pairs("(cell, x)", fields.text, fields.number)
_POINTS = fields.pairs("(x, y)", fields.number, fields.number)
_TEXT = FieldCheck(fields.text, "a text")
_KINDS: Mapping[str, fields.Table] = {  # -> fields that say what of
  "ordering": _STEPS,
  "monotone": _STEPS,
  "difference": {"of": _CELLS, "to": _CELLS, **_BOUNDS},
  "ratio": {"of": _CELLS, "to": _CELLS, **_RATIOS},
  "bound": {"of": _CELLS, **_BOUNDS},
  "threshold": {
    "runs": FieldCheck(_PAIRS, "pairs (cell, x)"),
    "level": FieldCheck(fields.number, "a number"),
    **_BOUNDS,
  },
}
_PUBLISHED = {
  "title": _TEXT,
  "source": _TEXT,
  "points": FieldCheck(_POINTS, "a list of pairs (x, y)"),
  "of": FieldCheck(fields.text),
  "line": FieldCheck(fields.must(_LINES.__contains__, f"one of {_LINES}")),
  "marker": FieldCheck(
    fields.must(_MARKERS.__contains__, "a marker of Matplotlib, as 'o' or ''")
  ),
}


def _is_range(value):
  fits = value is None or (fields.is_list(value) and len(value) == 2)
  real = fits and all(type(v) in (int, float) for v in value or ())
  return real and (value is None or -math.inf < value[0] < value[1] < math.inf)


_FACTOR = FieldCheck(
  fields.must(
    lambda v: type(v) in (int, float) and v and math.isfinite(v),
    "a finite number other than 0",
  )
)
_PANEL = {
  **dict.fromkeys(("title", "column", "xlabel", "ylabel"), _TEXT),
  "series": FieldCheck(fields.mapping),
  "published": FieldCheck(fields.any_list),
  "minus": FieldCheck(checks.optional(fields.text)),
  **dict.fromkeys(("scale", "xscale"), _FACTOR),
  "xcolumn": FieldCheck(checks.optional(fields.text)),
  "along": FieldCheck(fields.named(columns_lib.ALONG)),
  "xlog": FieldCheck(checks.flag),
  "yscale": FieldCheck(fields.named(_SCALES)),
  "ylim": FieldCheck(fields.must(_is_range, "a pair (low, high) of numbers")),
}
_FIGURE = {
  **dict.fromkeys(("title", "paper", "about"), _TEXT),
  "claims": FieldCheck(fields.any_list),
  "columns": FieldCheck(fields.mapping),
  "panels": FieldCheck(fields.any_list),
  "quick": FieldCheck(fields.mapping),
  "tuned": FieldCheck(fields.note),
  "turns": FieldCheck(checks.flag),
}


def _claim(data: Any, number: int, known: Sequence[str]) -> Claim:
  """Reads a claim and checks all that needs no runs."""
  where = f"claim {number}"
  if isinstance(data, Mapping) and isinstance(data.get("name"), str):
    where = f"claim {shown(data['name'])}"
  always = {
    **dict.fromkeys(("name", "says", "kind", "column"), _TEXT),
    "note": FieldCheck(fields.note),
  }
  fields.check(where, data, always, closed=False)
  kind = data["kind"]
  names.check(f"kind of {where}:", kind, _KINDS)
  statistic = data.get("statistic", "sign" if kind in _SPREAD else "t")
  names.check(f"statistic of {where}:", statistic, STATISTICS)
  names.check(f"column of {where}:", data["column"], known)
  always["statistic"] = FieldCheck(checks.anything)
  fields.check(f"{where} of kind {kind!r}", data, always | _KINDS[kind])
  _check_whole(where, kind, data)
  own = {key: data[key] for key in _KINDS[kind] if key in data}
  keys = "name", "says", "kind", "column"
  given = {key: data[key] for key in keys} | {"note": data.get("note", "")}
  return Claim(**given, statistic=statistic, data=own)


def _check_whole(where, kind, data):
  """Raises ValueError for fields that do not go together."""
  if kind in _SPREAD:
    runs = data["runs"]
    along = kind == "monotone" and isinstance(runs, str)
    if not along and len(groups(runs)) < 2:
      raise ValueError(
        f"{where}: runs must be two cells or groups of cells at least, not"
        f" {shown(runs)}"
      )
    return
  low, high = _bounds_of(data)
  if low == -math.inf and high == math.inf:
    raise ValueError(f"{where} needs 'above' or 'below', or holds of anything")
  if not low < high:
    raise ValueError(f"{where}: above {low} is not below {high}")
  if kind == "threshold":
    xs = [x for _, x in data["runs"]]
    if len(xs) < 2 or len(set(xs)) < len(xs):
      raise ValueError(
        f"{where}: runs must be two pairs (cell, x) at least, each at another"
        f" x, not {shown(data['runs'])}"
      )


def _panel(data: Any, number: int, known: Sequence[str]) -> PanelSpec:
  where = f"panel {number}"
  if isinstance(data, Mapping) and isinstance(data.get("title"), str):
    where = f"panel {shown(data['title'])}"
  fields.check(where, data, _PANEL)
  if not data.get("series") and not data.get("published"):
    raise ValueError(f"{where} has neither series nor what is published")
  panel = PanelSpec(**data)
  names.check(
    f"column of {where}:", panel.column, [*known, *columns_lib.PROFILES]
  )
  if panel.column in columns_lib.PROFILES:
    for key in ("minus", "xcolumn"):
      if (value := getattr(panel, key)) is not None:
        raise ValueError(
          f"{where}: {key} {shown(value)} is not for the histogram"
          f" {panel.column!r}; leave it out"
        )
  if panel.xcolumn is not None:
    names.check(f"xcolumn of {where}:", panel.xcolumn, known)
  if panel.along is not None:
    names.check(
      f"column of {where} along {panel.along!r}:",
      panel.column,
      columns_lib.EVALUATED,
    )
    for key in ("xcolumn", "minus"):
      if getattr(panel, key) is not None:
        raise ValueError(
          f"{where} is along {panel.along!r} and has {key}"
          f" {shown(getattr(panel, key))}: drop one"
        )
  places = fields.pairs("(x, cell)", fields.number, fields.text)
  series = dict.fromkeys(panel.series, FieldCheck(places))
  fields.check(f"series of {where}", panel.series, series)
  for key in panel.series:
    fields.text(key, f"the name of a series of {where}")
  for i, each in enumerate(panel.published):
    fields.check(f"published {i} of {where}", each, _PUBLISHED)
  xs = [x for points in panel.series.values() for x, _ in points]
  xs += [x for each in panel.published for x, _ in each["points"]]
  if panel.xlog and min(xs) <= 0:
    raise ValueError(f"{where}: xlog takes no x of {min(xs)}; leave it out")
  if panel.yscale == "log" and panel.ylim and panel.ylim[0] <= 0:
    raise ValueError(
      f"{where}: ylim {shown(panel.ylim)} has no logarithm; begin above 0"
    )
  return panel


def check_name(name: str) -> None:
  """Raises ValueError for a figure's name whose files would have odd names, or
  those of files of the experiment."""
  if not re.fullmatch("[A-Za-z0-9_-]+", name):
    raise ValueError(
      f"a figure has the name of its file, {shown(name)}: rename it to letters,"
      " digits, _ and -"
    )
  if name.lower() in _TAKEN:
    raise ValueError(
      f"a figure {name!r} would overwrite files of its experiment, which has"
      f" {', '.join(_TAKEN)}; rename the file"
    )


def _check_distinct(what, titles):
  for title in titles:
    if titles.count(title) > 1:
      raise ValueError(
        f"two {what} have the name {shown(title)}; give each its own"
      )


def read(name: str, given: Any, counts: Counts) -> Figure:
  """Returns what `get_figure()` of a file gave, checked against the numbers of
  workers of the runs of its config; ValueError names what is wrong."""
  check_name(name)
  if not isinstance(given, Mapping):
    raise ValueError(f"get_figure() must return a dict, not {shown(given)}")
  given = fields.plain(given)
  fields.check("get_figure()", given, _FIGURE)
  if not given.get("claims"):
    raise ValueError(
      "get_figure() has no claims: a figure without one is not reproduced but"
      " drawn; give it a list of claims, or use launch.train"
    )
  made = given.get("columns", {})
  columns_lib.check(made)
  known = columns_lib.known(made)
  claims = [_claim(c, i, known) for i, c in enumerate(given["claims"])]
  _check_distinct("claims", [claim.name for claim in claims])
  panels = [
    _panel(panel, i, known) for i, panel in enumerate(given.get("panels", ()))
  ]
  _check_distinct("panels", [panel.title for panel in panels])
  defaults = {"quick": {}, "tuned": "", "turns": False}
  own = {"name": name, "claims": claims, "columns": made, "panels": panels}
  figure = Figure(**{**defaults, **given, **own})
  _check_cells(figure, counts)
  return figure


def _check_cell(where, spot, counts, over):
  """Raises ValueError for a cell that the experiment does not have; `over`: its
  column is over all numbers of workers."""
  try:
    _, workers = find_cell(spot, counts)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None
  if workers is None and not over:
    raise ValueError(
      f"{where}: run {spot!r} has several numbers of workers; write"
      f" {spot}@N, {spot}@most or {spot}@least"
    )


def _check_cells(figure, counts):
  for claim in figure.claims:
    over = columns_lib.is_over_workers(figure.columns, claim.column)
    where, runs = f"claim {claim.name!r}", claim.data.get("runs")
    if claim.kind == "monotone" and isinstance(runs, str):
      names.check(f"run of {where}:", runs, counts)
      if over or len(counts[runs]) < 2:
        raise ValueError(
          f"{where}: runs {runs!r} is one cell, and nothing rises or falls"
          " along it; name cells, or a run of several numbers of workers"
        )
      continue
    for key, spot in spots_of(claim):
      _check_cell(f"{where}, {key}", spot, counts, over)
  series = [name for panel in figure.panels for name in panel.series]
  for panel in figure.panels:
    over = columns_lib.is_over_workers(figure.columns, panel.column)
    where = f"panel {panel.title!r}"
    for name, points in panel.series.items():
      for _, spot in points:
        _check_cell(f"{where}, series {name!r}", spot, counts, over)
    if panel.minus is not None:
      _check_cell(f"{where}, minus", panel.minus, counts, over)
    for known in panel.published:
      if "of" in known:
        title = f"of, in published {shown(known['title'])} of {where}: series"
        names.check(title, known["of"], series)


def cell_of(spot: str, counts: Counts) -> Spot | None:
  """Returns what `find_cell` does; None for a cell that this size does not
  have, such as a run that --quick leaves out."""
  try:
    return find_cell(spot, counts)
  except ValueError:
    return None
