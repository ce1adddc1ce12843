"""The content of a file in configs/figures: an experiment, and claims about it.

The file has `get_config()`, which returns an ordinary config (the shipped ones
take the name of a variant, like other configs), and `get_figure()`, which
returns plain data:

  title    str.
  paper    str: authors, title, where, arXiv number.
  finding  str: what holds here, what does not, and why, in a sentence.
  about    str: the content, in a few sentences.
  claims   list of dicts, see `Claim`.
  columns  name -> definition, see `asgd.figures.columns`.
  panels   list of dicts, see `PanelSpec`.
  notes    name of a claim -> why it holds or does not, as its `note`.
  quick    dotted key of the config -> value, for --quick.
  tuned    str: which settings were chosen on which seeds.
  turns    bool, for cells with seconds as a result. They are trained seed by
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

# (label, workers); workers is None for a column over all of the run's cells
CellKey = tuple[str, int | None]
Counts = Mapping[str, Sequence[int]]  # label -> numbers of workers

# Kinds of claims that compare each cell with the next.
_STEP_KINDS = ("ordering", "monotone")
_ORDERS = ("rises", "falls")
_SCALES = ("linear", "log", "symlog")
_LINES = ("", "-", "--", ":", "-.")
_MARKERS = ("", *".,ov^<>12348spP*hH+xXDd|_")
# Files of an experiment beside those of the figure: a figure of that name would
# overwrite one of them.
_RESERVED_NAMES = (
  *("config", "measurements", "metrics", "results", "table", "report"),
  *("figure", "compare", "cells", "tensorboard"),
)


class Claim(NamedTuple):
  """A claim. Its `kind` defines how its effect is computed:

  ordering, monotone: `runs` are cells, or lists of cells that are not compared
    with each other. From each to the next the column rises or falls (`order`)
    by more than `by`. "monotone" also takes one label, for all cells of a run.
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


def _bounds_of(data: Mapping[str, Any]) -> tuple[float, float]:
  """Returns (above, below), which are infinite where they are left out."""
  return data.get("above", -math.inf), data.get("below", math.inf)


class PanelSpec(NamedTuple):
  """A panel: series of cells, each at an x, beside published values."""

  title: str
  # A column, or a file of `columns.PROFILES`: its fractions, at x + its values.
  column: str
  xlabel: str
  ylabel: str
  series: Mapping[str, Sequence[tuple[float, str]]] = {}  # title -> (x, cell)s
  # dicts of title, source, points (x, y), and `of`, a series of the same colour
  published: Sequence[Mapping[str, Any]] = ()
  minus: str | None = None  # LABEL@N; its value of the same seed is subtracted
  scale: float = 1.0  # factor of the values, such as 100 for percent
  xlog: bool = False
  # A column, such as traffic: its mean over seeds, times `xscale`, is the x of
  # a cell. The x beside a cell is then only used if the column has no values.
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
  finding: str
  turns: bool


def find_cell(cell_name: str, counts: Counts) -> CellKey:
  """Returns (label, workers) of LABEL@N. `workers` is None if the label stands
  alone and its run has several numbers. Raises ValueError for an unknown cell.

  Example:
    >>> find_cell("a@most", {"a": (4, 8)})
    ('a', 8)
  """
  if not isinstance(cell_name, str):
    raise ValueError(f"{shown(cell_name)} names no cell; write LABEL@N")
  label, at, text = cell_name.partition("@")
  names.check("run", label, counts)
  worker_counts = sorted(counts[label])
  if not at:
    # "a" is the one cell of run a if that has one number of workers.
    return label, worker_counts[0] if len(worker_counts) == 1 else None
  if text in ("most", "least"):
    return label, worker_counts[-1 if text == "most" else 0]
  if not text.isdecimal() or int(text) not in worker_counts:
    choices = ", ".join(map(str, worker_counts))
    raise ValueError(
      f"{shown(cell_name)}: run {label!r} has no cells with {text!r} workers,"
      f" only with {choices}"
    )
  return label, int(text)


def groups(value: Any) -> list[list[Any]]:
  """Returns cells as lists of cells; of a single cell [[cell]]."""
  items = value if isinstance(value, (list, tuple)) else [value]
  return [list(g) if isinstance(g, (list, tuple)) else [g] for g in items]


def cells_of_claim(claim: Claim) -> Iterator[tuple[str, str]]:
  """Yields (field, cell) for the cells that a claim names."""
  data = claim.data
  # `runs` of a threshold are pairs, which `groups` would take for groups.
  if claim.kind == "threshold":
    yield from (("runs", cell_name) for cell_name, _ in data["runs"])
    return
  for key in ("of", "to", "runs"):
    for group in groups(data.get(key, [])):
      yield from ((key, cell_name) for cell_name in group)


def _are_cells(value: Any) -> bool:
  """Whether a value is a cell, or a list of cells or of groups of cells."""
  cells = [cell for group in groups(value) for cell in group or [None]]
  return bool(value) and all(isinstance(cell, str) for cell in cells)


# The checks of fields, as tables that claims and panels share.
_CELLS = FieldCheck(
  fields.must(_are_cells, "a cell, or a list of cells, written LABEL@N"),
  "a cell, or a list of cells",
)
_BOUND = FieldCheck(fields.bound(fields.number))
_BOUNDS = dict.fromkeys(("above", "below"), _BOUND)
# A ratio is above 0.
_RATIOS = dict.fromkeys(_BOUNDS, FieldCheck(fields.bound(checks.positive)))
_STEP_FIELDS = {
  "runs": _CELLS,
  "order": FieldCheck(fields.named(_ORDERS), "rises or falls"),
  "by": FieldCheck(checks.number()),
}
_PAIRS = fields.pairs("(cell, x)", fields.text, fields.number)
_POINTS = fields.pairs("(x, y)", fields.number, fields.number)
_TEXT = FieldCheck(fields.text, "a text")
_KIND_FIELDS: Mapping[str, fields.Table] = {  # kind of a claim -> its fields
  "ordering": _STEP_FIELDS,
  "monotone": _STEP_FIELDS,
  "difference": {"of": _CELLS, "to": _CELLS, **_BOUNDS},
  "ratio": {"of": _CELLS, "to": _CELLS, **_RATIOS},
  "bound": {"of": _CELLS, **_BOUNDS},
  "threshold": {
    "runs": FieldCheck(_PAIRS, "pairs (cell, x)"),
    "level": FieldCheck(fields.number, "a number"),
    **_BOUNDS,
  },
}
_PUBLISHED_FIELDS = {
  "title": _TEXT,
  "source": _TEXT,
  "points": FieldCheck(_POINTS, "a list of pairs (x, y)"),
  "of": FieldCheck(fields.text),
  "line": FieldCheck(fields.must(_LINES.__contains__, f"one of {_LINES}")),
  "marker": FieldCheck(
    fields.must(_MARKERS.__contains__, "a marker of Matplotlib, as 'o' or ''")
  ),
}


def _is_range(value: Any) -> bool:
  """Whether a value is None or a pair of finite, ascending numbers."""
  is_pair = fields.is_list(value) and len(value) == 2
  has_numbers = is_pair and all(type(v) in (int, float) for v in value)
  ascends = has_numbers and -math.inf < value[0] < value[1] < math.inf
  return value is None or ascends


_FACTOR = FieldCheck(  # 0 would draw every value as 0
  fields.must(
    lambda v: type(v) in (int, float) and v and math.isfinite(v),
    "a finite number other than 0",
  )
)
_PANEL_FIELDS = {
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
_FIGURE_FIELDS = {
  **dict.fromkeys(("title", "paper", "about"), _TEXT),
  **dict.fromkeys(("claims", "panels"), FieldCheck(fields.any_list)),
  **dict.fromkeys(("columns", "quick"), FieldCheck(fields.mapping)),
  "notes": FieldCheck(fields.texts),
  **dict.fromkeys(("tuned", "finding"), FieldCheck(fields.note)),
  "turns": FieldCheck(checks.flag),
}


def _read_claim(data: Any, number: int, columns: Sequence[str]) -> Claim:
  """Reads a claim, and checks all that does not depend on the runs."""
  # Errors name the claim, or its position if the name itself is wrong.
  where = f"claim {number}"
  if isinstance(data, Mapping) and isinstance(data.get("name"), str):
    where = f"claim {shown(data['name'])}"
  # [1] The fields of every kind, one of which is the kind.
  common_checks = {
    **dict.fromkeys(("name", "says", "kind", "column"), _TEXT),
    "note": FieldCheck(fields.note),
  }
  fields.check(where, data, common_checks, closed=False)
  # [2] The statistic. That of an order, by default, assumes no distribution.
  kind = data["kind"]
  names.check(f"kind of {where}:", kind, _KIND_FIELDS)
  statistic = data.get("statistic", "sign" if kind in _STEP_KINDS else "t")
  names.check(f"statistic of {where}:", statistic, STATISTICS)
  names.check(f"column of {where}:", data["column"], columns)
  # [3] The fields of the kind; the statistic was checked above.
  common_checks["statistic"] = FieldCheck(checks.anything)
  all_checks = {**common_checks, **_KIND_FIELDS[kind]}
  fields.check(f"{where} of kind {kind!r}", data, all_checks)
  # [4] Fields that are valid alone, but not together.
  _check_consistent(where, kind, data)
  kind_fields = {key: data[key] for key in _KIND_FIELDS[kind] if key in data}
  texts = {key: data[key] for key in ("name", "says", "kind", "column")}
  texts["note"] = data.get("note", "")
  return Claim(**texts, statistic=statistic, data=kind_fields)


def _with_notes(claims: Sequence[Claim], notes: Any) -> list[Claim]:
  """Returns claims with the figure's notes. Raises ValueError for a note on an
  unknown claim, or on a claim that has a note."""
  by_name = {claim.name: claim for claim in claims}
  for name, note in notes.items():
    names.check("claim in notes:", name, by_name)
    if by_name[name].note:
      raise ValueError(f"claim {shown(name)} has two notes; drop one")
    by_name[name] = by_name[name]._replace(note=note)
  return list(by_name.values())


def _check_consistent(where: str, kind: str, data: Mapping[str, Any]) -> None:
  """Raises ValueError for fields that do not fit together."""
  if kind in _STEP_KINDS:
    runs = data["runs"]
    # One label stands for all cells of its run, which `_check_cells` counts.
    is_run = kind == "monotone" and isinstance(runs, str)
    if not is_run and len(groups(runs)) < 2:
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
    # Two cells at one x have no line between them.
    xs = [x for _, x in data["runs"]]
    if len(xs) < 2 or len(set(xs)) < len(xs):
      raise ValueError(
        f"{where}: runs must be two or more pairs (cell, x), each at another x,"
        f" not {shown(data['runs'])}"
      )


def _read_panel(data: Any, number: int, columns: Sequence[str]) -> PanelSpec:
  """Reads a panel, and checks all that does not depend on the runs."""
  where = f"panel {number}"
  if isinstance(data, Mapping) and isinstance(data.get("title"), str):
    where = f"panel {shown(data['title'])}"
  fields.check(where, data, _PANEL_FIELDS)
  # Published values alone are allowed: a panel to compare with by eye.
  if not data.get("series") and not data.get("published"):
    raise ValueError(f"{where} has neither series nor published values")
  # From here on `panel` has the defaults of the fields that are left out.
  panel = PanelSpec(**data)
  names.check(
    f"column of {where}:", panel.column, [*columns, *columns_lib.PROFILES]
  )
  # A histogram has no single value to subtract, or to stand at a measured x.
  if panel.column in columns_lib.PROFILES:
    for key in ("minus", "xcolumn"):
      if (value := getattr(panel, key)) is not None:
        raise ValueError(
          f"{where}: {key} {shown(value)} is not for the histogram"
          f" {panel.column!r}; leave it out"
        )
  if panel.xcolumn is not None:
    names.check(f"xcolumn of {where}:", panel.xcolumn, columns)
  # Only evaluations form a curve; their x is then given by `along`.
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
  points_check = fields.pairs("(x, cell)", fields.number, fields.text)
  series = dict.fromkeys(panel.series, FieldCheck(points_check))
  fields.check(f"series of {where}", panel.series, series)
  for key in panel.series:
    fields.text(key, f"the name of a series of {where}")
  for i, line in enumerate(panel.published):
    fields.check(f"published {i} of {where}", line, _PUBLISHED_FIELDS)
  # Every x and limit that a logarithmic axis shows must be positive.
  xs = [x for points in panel.series.values() for x, _ in points]
  xs += [x for line in panel.published for x, _ in line["points"]]
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
  # The name becomes NAME.json and part of a link: it needs no escapes.
  if not re.fullmatch("[A-Za-z0-9_-]+", name):
    raise ValueError(
      f"a figure is named after its file, {shown(name)}: rename it to letters,"
      " digits, _ and -"
    )
  # Some file systems do not distinguish upper and lower case.
  if name.lower() in _RESERVED_NAMES:
    raise ValueError(
      f"a figure {name!r} would overwrite a file of its experiment, one of"
      f" {', '.join(_RESERVED_NAMES)}; rename the figure's file"
    )


def _check_distinct(what: str, titles: Sequence[str]) -> None:
  """Raises ValueError if two claims or panels have the same name."""
  for title in titles:
    if titles.count(title) > 1:
      raise ValueError(
        f"two {what} have the name {shown(title)}; give them different names"
      )


def read(name: str, data: Any, counts: Counts) -> Figure:
  """Returns the checked result of a file's `get_figure()`. `counts`: numbers of
  workers of its config's runs. Raises ValueError, naming the wrong field."""
  check_name(name)
  if not isinstance(data, Mapping):
    raise ValueError(f"get_figure() must return a dict, not {shown(data)}")
  # NumPy's numbers become Python's; checks and JSON know only those.
  data = fields.plain(data)
  fields.check("get_figure()", data, _FIGURE_FIELDS)
  if not data.get("claims"):
    raise ValueError(
      "get_figure() has no claims: a figure without claims is only drawn; give"
      " a list of claims, or use asgd train"
    )
  specs = data.get("columns", {})
  columns_lib.check(specs)
  columns = columns_lib.all_columns(specs)
  # Columns first: claims and panels name them.
  claims = [_read_claim(c, i, columns) for i, c in enumerate(data["claims"])]
  _check_distinct("claims", [claim.name for claim in claims])
  claims = _with_notes(claims, data.pop("notes", {}))
  panels = [
    _read_panel(panel, i, columns)
    for i, panel in enumerate(data.get("panels", ()))
  ]
  _check_distinct("panels", [panel.title for panel in panels])
  defaults = {"quick": {}, "tuned": "", "finding": "", "turns": False}
  # These replace the raw claims and panels by checked ones.
  checked_fields = dict(name=name, claims=claims, columns=specs, panels=panels)
  figure = Figure(**{**defaults, **data, **checked_fields})
  _check_cells(figure, counts)
  return figure


def _check_cell(
  where: str, cell_name: str, counts: Counts, over_workers: bool
) -> None:
  """Raises ValueError for a cell that the experiment does not have.
  `over_workers`: the column has one value for all numbers of workers."""
  try:
    _, workers = find_cell(cell_name, counts)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None
  if workers is None and not over_workers:
    raise ValueError(
      f"{where}: run {cell_name!r} has several numbers of workers; write"
      f" {cell_name}@N, {cell_name}@most or {cell_name}@least"
    )


def _check_cells(figure: Figure, counts: Counts) -> None:
  """Raises ValueError for claims and panels with cells that do not exist."""
  for claim in figure.claims:
    over_workers = columns_lib.is_over_workers(figure.columns, claim.column)
    where, runs = f"claim {claim.name!r}", claim.data.get("runs")
    # One label: its cells by their number of workers.
    if claim.kind == "monotone" and isinstance(runs, str):
      names.check(f"run of {where}:", runs, counts)
      if over_workers or len(counts[runs]) < 2:
        raise ValueError(
          f"{where}: runs {runs!r} is one cell, along which nothing rises or"
          " falls; name cells, or a run with several numbers of workers"
        )
      continue
    for key, cell_name in cells_of_claim(claim):
      _check_cell(f"{where}, {key}", cell_name, counts, over_workers)
  # Published values may take the colour of a series of another panel.
  series = [name for panel in figure.panels for name in panel.series]
  for panel in figure.panels:
    over_workers = columns_lib.is_over_workers(figure.columns, panel.column)
    where = f"panel {panel.title!r}"
    for name, points in panel.series.items():
      for _, cell_name in points:
        owner = f"{where}, series {name!r}"
        _check_cell(owner, cell_name, counts, over_workers)
    if panel.minus is not None:
      _check_cell(f"{where}, minus", panel.minus, counts, over_workers)
    for line in panel.published:
      if "of" in line:
        title = f"of, in published {shown(line['title'])} of {where}: series"
        names.check(title, line["of"], series)


def cell_of(cell_name: str, counts: Counts) -> CellKey | None:
  """Returns the result of `find_cell`, or None for a cell that this size does
  not have, such as a run that --quick leaves out."""
  try:
    return find_cell(cell_name, counts)
  except ValueError:
    return None
