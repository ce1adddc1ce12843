"""The content of a file in configs/figures: an experiment, and claims about it.

The file has `get_config()`, which returns an ordinary config (the shipped ones
take the name of a variant, like other configs), and `get_figure()`, which
returns plain data:

  title    str.
  paper    str: authors, title, where, arXiv number.
  about    str: the content, in a sentence or two.
  claims   list of dicts, see `Claim`.
  columns  name -> definition, see `asgd.figures.columns`.
  panels   list of dicts, see `PanelSpec`.
  quick    dotted key of the config -> value, for --quick.
  tuned    str: which settings were chosen on which seeds.
  turns    bool, for cells whose seconds are a result. They are trained seed by
           seed, alternately in and against the order of the runs, so that all
           runs of a seed meet the same load of a shared machine.

A cell is written LABEL@N: a run of the config with N workers. LABEL@most and
LABEL@least are those with its most and its fewest workers. LABEL alone is for a
run with one number of workers, or for a column over all of them.
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
# Files of an experiment beside those of the figure.
_TAKEN = ("config", "measurements", "metrics", "results", "table", "report")
_TAKEN += ("figure", "compare", "cells", "tensorboard")


class Claim(NamedTuple):
  """One claim; `kind` defines its effect.

  ordering, monotone: `runs` are cells, or lists of cells that are not compared
    with each other. From each to the next, the column `order`s ("rises" or
    "falls") by more than `by`. For "monotone" `runs` may be one label: its
    cells, by their number of workers.
  difference: each of `of` minus each of `to` lies between `above` and `below`.
  ratio: the same for `of` divided by `to`, both positive.
  bound: each of `of` lies between `above` and `below`.
  threshold: `runs` are pairs (cell, x). The first x at which the column crosses
    `level`, by linear interpolation, lies between `above` and `below`.
  """

  name: str
  says: str  # in words, for people
  kind: str
  column: str
  statistic: str  # of `statistics.STATISTICS`
  data: Mapping[str, Any]  # the other fields in the file
  note: str = ""  # why it holds or does not

  @property
  def bounds(self) -> tuple[float, float]:
    """The bounds of its effect; infinite for a missing bound."""
    return _bounds_of(self.data)


def _bounds_of(data):
  return data.get("above", -math.inf), data.get("below", math.inf)


class PanelSpec(NamedTuple):
  """One pair of axes: series of cells at an x, beside published values."""

  title: str
  # Or a file of `columns.PROFILES`: its fractions, at its values plus x.
  column: str
  xlabel: str
  ylabel: str
  series: Mapping[str, Sequence[tuple[float, str]]] = {}  # -> (x, cell)s
  # dicts of title, source, points (x, y), and `of`, a series of the same colour
  published: Sequence[Mapping[str, Any]] = ()
  minus: str | None = None  # a cell whose values are subtracted, seed by seed
  scale: float = 1.0  # factor of the values
  xlog: bool = False
  # A column, such as traffic, whose mean over seeds is the x of a cell, times
  # `xscale`. The x beside a cell is then only used if the column has no values.
  xcolumn: str | None = None
  xscale: float = 1.0
  # A column of evaluations, "time" or "epoch": a cell is a curve along it, and
  # the x beside the cell is not used.
  along: str | None = None
  yscale: str = "linear"  # or "log", "symlog"
  ylim: Sequence[float] | None = None


class Figure(NamedTuple):
  """The checked result of `get_figure()`."""

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
  """Returns (label, workers) of LABEL@N. workers is None for a label alone
  whose run has several numbers. ValueError if there is no such cell.

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
      f"{shown(spot)}: run {label!r} has no cells with {text!r} workers, only"
      f" with {known}"
    )
  return label, int(text)


def groups(value: Any) -> list[list[Any]]:
  """Returns cells as lists of cells; a single cell is a list of one list."""
  several = value if isinstance(value, (list, tuple)) else [value]
  return [list(g) if isinstance(g, (list, tuple)) else [g] for g in several]


def spots_of(claim: Claim) -> Iterator[tuple[str, str]]:
  """Yields (field, cell) for the cells that a claim names."""
  data = claim.data
  if claim.kind == "threshold":
    yield from (("runs", spot) for spot, _ in data["runs"])
    return
  for key in ("of", "to", "runs"):
    for group in groups(data.get(key, [])):
      yield from ((key, spot) for spot in group)


def _are_cells(value):
  """Whether a value is a cell, or a list of cells or of groups of cells."""
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
_KINDS: Mapping[str, fields.Table] = {  # kind of a claim -> its own fields
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
  """Whether a value is None or a pair of finite, ascending numbers."""
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
  """Reads a claim, and checks all that does not depend on the runs."""
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
  """Raises ValueError for fields that do not fit together."""
  if kind in _SPREAD:
    runs = data["runs"]
    along = kind == "monotone" and isinstance(runs, str)
    if not along and len(groups(runs)) < 2:
      raise ValueError(
        f"{where}: runs must be two or more cells or groups of cells, not"
        f" {shown(runs)}"
      )
    return
  low, high = _bounds_of(data)
  if low == -math.inf and high == math.inf:
    raise ValueError(
      f"{where} needs 'above' or 'below', or it would always hold"
    )
  if not low < high:
    raise ValueError(f"{where}: above {low} is not below {high}")
  if kind == "threshold":
    xs = [x for _, x in data["runs"]]
    if len(xs) < 2 or len(set(xs)) < len(xs):
      raise ValueError(
        f"{where}: runs must be two or more pairs (cell, x), each at another x,"
        f" not {shown(data['runs'])}"
      )


def _panel(data: Any, number: int, known: Sequence[str]) -> PanelSpec:
  """Reads a panel, and checks all that does not depend on the runs."""
  where = f"panel {number}"
  if isinstance(data, Mapping) and isinstance(data.get("title"), str):
    where = f"panel {shown(data['title'])}"
  fields.check(where, data, _PANEL)
  if not data.get("series") and not data.get("published"):
    raise ValueError(f"{where} has neither series nor published values")
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
          f"{where} is along {panel.along!r}, but has {key}"
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
    raise ValueError(f"{where}: xlog cannot show x = {min(xs)}; leave xlog out")
  if panel.yscale == "log" and panel.ylim and panel.ylim[0] <= 0:
    raise ValueError(
      f"{where}: ylim {shown(panel.ylim)} must be above 0 for a log scale"
    )
  return panel


def check_name(name: str) -> None:
  """Raises ValueError for a figure's name that is no plain file name, or that
  is the name of a file of the experiment."""
  if not re.fullmatch("[A-Za-z0-9_-]+", name):
    raise ValueError(
      f"a figure is named after its file, {shown(name)}: rename it to letters,"
      " digits, _ and -"
    )
  if name.lower() in _TAKEN:
    raise ValueError(
      f"a figure {name!r} would overwrite a file of its experiment, one of"
      f" {', '.join(_TAKEN)}; rename the figure's file"
    )


def _check_distinct(what, titles):
  """Raises ValueError if two claims or panels have the same name."""
  for title in titles:
    if titles.count(title) > 1:
      raise ValueError(
        f"two {what} have the name {shown(title)}; give them different names"
      )


def read(name: str, given: Any, counts: Counts) -> Figure:
  """Returns the checked result of a file's `get_figure()`. `counts` are the
  numbers of workers of its config's runs. ValueError names what is wrong."""
  check_name(name)
  if not isinstance(given, Mapping):
    raise ValueError(f"get_figure() must return a dict, not {shown(given)}")
  given = fields.plain(given)
  fields.check("get_figure()", given, _FIGURE)
  if not given.get("claims"):
    raise ValueError(
      "get_figure() has no claims: a figure without claims is only drawn; give"
      " a list of claims, or use asgd train"
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
  """Raises ValueError for a cell that the experiment does not have. `over`
  is whether the column is over all numbers of workers."""
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
  """Raises ValueError for claims and panels with cells that do not exist."""
  for claim in figure.claims:
    over = columns_lib.is_over_workers(figure.columns, claim.column)
    where, runs = f"claim {claim.name!r}", claim.data.get("runs")
    if claim.kind == "monotone" and isinstance(runs, str):
      names.check(f"run of {where}:", runs, counts)
      if over or len(counts[runs]) < 2:
        raise ValueError(
          f"{where}: runs {runs!r} is one cell, along which nothing rises or"
          " falls; name cells, or a run with several numbers of workers"
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
  """Returns the result of `find_cell`, or None for a cell that this size does
  not have, such as a run that --quick leaves out."""
  try:
    return find_cell(spot, counts)
  except ValueError:
    return None
