"""What a file in configs/figures says: an experiment, and claims about it.

The file has `get_config()`, which returns an ordinary config, and
`get_figure()`, which returns plain data:

  title    str.
  paper    str: authors, title, where, arXiv number.
  about    str: what is shown, in a sentence or two.
  claims   list of dicts, see `Claim`.
  columns  name -> how it is made, see `asgd.experiment.claims.columns`.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import names
from asgd.checks import shown
from asgd.experiment.claims import columns as columns_lib
from asgd.experiment.claims.statistics import STATISTICS

Spot = tuple[str, int | None]  # (label, workers); None: all of the run's
Counts = Mapping[str, Sequence[int]]  # label -> numbers of workers

_ALWAYS = ("name", "says", "kind", "column", "statistic", "note")
KINDS: Mapping[str, tuple[str, ...]] = {  # -> keys that say what of
  "ordering": ("runs", "order", "by"),
  "monotone": ("runs", "order", "by"),
  "difference": ("of", "to", "above", "below"),
  "ratio": ("of", "to", "above", "below"),
  "bound": ("of", "above", "below"),
  "threshold": ("runs", "level", "above", "below"),
}
_NEEDED = {"threshold": ("runs", "level"), "bound": ("of",)}
_SPREAD = ("ordering", "monotone")
_ORDERS = ("rises", "falls")
_SCALES = ("linear", "log", "symlog")


class Claim(NamedTuple):
  """One claim; `kind` says what its effect is.

  ordering, monotone: `runs` are cells, or lists of cells that are not compared
    with each other; from one to the next the column `order`s ("rises" or
    "falls") by more than `by`, in each pair. Of "monotone" `runs` may be one
    label: its cells, by their number of workers.
  difference: each of `of` minus each of `to` lies between `above` and `below`.
  ratio: the same of `of` divided by `to`.
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


class PanelSpec(NamedTuple):
  """One pair of axes: series of cells at an x, beside what others published."""

  title: str
  column: str
  xlabel: str
  ylabel: str
  series: Mapping[str, Sequence[tuple[float, str]]] = {}  # -> (x, cell)s
  # dicts of title, source, points (x, y), and of a series of the same colour
  published: Sequence[Mapping[str, Any]] = ()
  minus: str | None = None  # a cell whose values are taken off, seed by seed
  scale: float = 1.0  # of the values
  xlog: bool = False
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


def _texts(data, keys, where):
  for key in keys:
    if not isinstance(data.get(key), str) or not data[key].strip():
      raise ValueError(f"{where} needs {key!r}, a text")


def groups(value: Any) -> list[list[Any]]:
  """Returns cells as lists of cells: one of one for a cell alone."""
  several = value if isinstance(value, (list, tuple)) else [value]
  return [list(g) if isinstance(g, (list, tuple)) else [g] for g in several]


def spots_of(claim: Claim) -> Iterator[str]:
  """Yields the cells that a claim names, as the file has them."""
  data = claim.data
  if claim.kind == "threshold":
    yield from (spot for spot, _ in data["runs"])
    return
  for key in ("of", "to", "runs"):
    for group in groups(data.get(key, [])):
      yield from group


def _claim(data: Any, number: int, known: Sequence[str]) -> Claim:
  """Reads a claim and checks all that needs no runs."""
  if not isinstance(data, Mapping):
    raise ValueError(f"claim {number} must be a dict, not {shown(data)}")
  where = f"claim {data.get('name', number)!r}"
  _texts(data, ("name", "says", "kind", "column"), where)
  kind = data["kind"]
  names.check(f"kind of {where}:", kind, KINDS)
  allowed = (*_ALWAYS, *KINDS[kind])
  for key in data:
    if key not in allowed:
      raise ValueError(
        f"{where} of kind {kind!r} has no key {shown(key)};"
        f" {names.nearest(str(key), allowed)}"
      )
  default = "sign" if kind in _SPREAD else "t"
  statistic = data.get("statistic", default)
  names.check(f"statistic of {where}:", statistic, STATISTICS)
  names.check(f"column of {where}:", data["column"], known)
  for key in _NEEDED.get(kind, ("runs",) if kind in _SPREAD else ("of", "to")):
    if not data.get(key) and data.get(key) != 0:
      raise ValueError(f"{where} of kind {kind!r} needs {key!r}")
  _check_bounds(where, kind, data)
  own = {key: data[key] for key in KINDS[kind] if key in data}
  return Claim(
    *(data["name"], data["says"], kind, data["column"], statistic, own),
    data.get("note", ""),
  )


def _check_bounds(where, kind, data):
  if kind in _SPREAD:
    if data.get("order") not in _ORDERS:
      raise ValueError(
        f"{where} needs 'order', {' or '.join(_ORDERS)}, not"
        f" {shown(data.get('order'))}"
      )
    return
  low, high = data.get("above", -math.inf), data.get("below", math.inf)
  if low == -math.inf and high == math.inf:
    raise ValueError(f"{where} needs 'above' or 'below', or holds of anything")
  if not low < high:
    raise ValueError(f"{where}: above {low} is not below {high}")
  if kind == "threshold":
    runs = [r for r in data["runs"] if isinstance(r, list | tuple)]
    if len(runs) < max(2, len(data["runs"])) or {len(r) for r in runs} != {2}:
      raise ValueError(f"{where}: runs are two pairs (cell, x) at least")


def _panel(data: Any, known: Sequence[str]) -> PanelSpec:
  if not isinstance(data, Mapping):
    raise ValueError(f"a panel must be a dict, not {shown(data)}")
  where = f"panel {data.get('title')!r}"
  for key in data:
    if key not in PanelSpec._fields:
      raise ValueError(
        f"{where} has no key {shown(key)};"
        f" {names.nearest(str(key), PanelSpec._fields)}"
      )
  _texts(data, ("title", "column", "xlabel", "ylabel"), where)
  if not data.get("series") and not data.get("published"):
    raise ValueError(f"{where} has neither series nor what is published")
  panel = PanelSpec(**data)
  names.check(f"column of {where}:", panel.column, known)
  names.check(f"yscale of {where}:", panel.yscale, _SCALES)
  for each in panel.published:
    _texts(each, ("title", "source"), f"what is published in {where}")
  return panel


def read(name: str, given: Any, counts: Counts) -> Figure:
  """Returns what `get_figure()` of a file gave, checked against the numbers of
  workers of the runs of its config; ValueError names what is wrong."""
  if not isinstance(given, Mapping):
    raise ValueError(f"get_figure() must return a dict, not {shown(given)}")
  fields = [f for f in Figure._fields if f != "name"]
  for key in given:
    if key not in fields:
      raise ValueError(
        f"get_figure() has no key {shown(key)}; {names.nearest(key, fields)}"
      )
  _texts(given, ("title", "paper", "about"), "get_figure()")
  if not given.get("claims"):
    raise ValueError(
      "get_figure() has no claims: a figure without one is not reproduced but"
      " drawn; give it a list of claims, or use launch.train"
    )
  made = dict(given.get("columns", {}))
  columns_lib.check(made)
  known = columns_lib.known(made)
  claims = [_claim(c, i, known) for i, c in enumerate(given["claims"])]
  titles = [claim.name for claim in claims]
  for title in titles:
    if titles.count(title) > 1:
      raise ValueError(f"two claims have the name {title!r}; give each its own")
  panels = [_panel(panel, known) for panel in given.get("panels", ())]
  figure = Figure(
    *(name, given["title"], given["paper"], given["about"], claims, made),
    *(panels, given.get("quick", {}), given.get("tuned", "")),
    bool(given.get("turns")),
  )
  _check_cells(figure, counts)
  return figure


def _check_cells(figure, counts):
  """Raises ValueError for a cell that the experiment does not have."""
  for claim in figure.claims:
    over = columns_lib.is_over_workers(figure.columns, claim.column)
    along = claim.kind == "monotone" and isinstance(claim.data["runs"], str)
    for spot in spots_of(claim):
      where = f"claim {claim.name!r}"
      try:
        _, workers = find_cell(spot, counts)
      except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
      if workers is None and not over and not along:
        raise ValueError(
          f"{where}: run {spot!r} has several numbers of workers; write"
          f" {spot}@N, {spot}@most or {spot}@least"
        )
  for panel in figure.panels:
    for points in panel.series.values():
      for _, spot in points:
        try:
          find_cell(spot, counts)
        except ValueError as error:
          raise ValueError(f"panel {panel.title!r}: {error}") from None


def cell_of(spot: str, counts: Counts) -> Spot | None:
  """Returns what `find_cell` does; None for a cell that this size does not
  have, such as a run that --quick leaves out."""
  try:
    return find_cell(spot, counts)
  except ValueError:
    return None
