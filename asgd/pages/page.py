"""Makes the HTML pages of reports and of `asgd watch` from their templates.

A page is one file, and needs no other file and no network. The templates
escape all text: names, paths, configs, warnings.
"""

import base64
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd.pages import panels

# Pixels per point of a figure; its text then has the size of the page's text.
_PIXELS_PER_POINT = 1.45
_DEFAULT_WIDTH = 760  # pixels; width of a picture without a known size
# Pixels. A window that is narrower scrolls the picture and does not shrink it
# further.
_MIN_WIDTH = 480
_ROUNDING = 1e-9  # a smaller relative spread is not shown


def render(
  title: str, lead: str, template: str = "report.html", **sections: Any
) -> str:
  """Returns a page.

  Args:
    title: the title of the page.
    lead: a line below the title.
    template: a template of this folder.
    **sections: values for the template; report.html draws those that are given:
      warnings: from `merge_warnings`.
      pictures: from `pictures`.
      results: a `Results`.
      panels: a `panels.Panels` for each shown cell; left_out counts the others.
      config: a `Config`.
      facts: names and values.
      differing: (header, rows) of the keys in which compared folders differ.
      folders: paths of the compared folders.
      files: names of files beside the page.
      cells: for each cell the names of its files.

  Example:
    >>> text = render("a <b>", "of one seed", folders=["x < y"])
    >>> "<h1>a &lt;b&gt;</h1>" in text, "<li>x &lt; y</li>" in text
    (True, True)
  """
  text: str = _template(template).render(
    title=title, lead=lead, size=panels.SIZE, **sections
  )
  return text


@functools.cache
def _template(name: str) -> Any:
  """Returns a template, which is compiled once."""
  import jinja2  # only here, which shortens the start of commands

  return jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
  ).get_template(name)


class CellWarning(NamedTuple):
  """A warning of one cell or more."""

  text: str
  cells: list[str]  # cells that have the warning; [] if the text names none


# LABEL-nWORKERS-sSEED: message.
_CELL_PREFIX = re.compile(r"([^\s:]+-n\d+-s\d+): (.*)", re.DOTALL)


def merge_warnings(texts: Iterable[str]) -> list[CellWarning]:
  """Merges warnings that differ in their cell and their numbers only.

  Example:
    >>> texts = ["a-n2-s0: stayed at 0.5", "a-n4-s0: stayed at 0.75", "full"]
    >>> merge_warnings(texts)
    ... # doctest: +NORMALIZE_WHITESPACE
    [CellWarning(text='stayed at 0.5', cells=['a-n2-s0', 'a-n4-s0']),
     CellWarning(text='full', cells=[])]
  """
  groups: dict[str, CellWarning] = {}
  for text in texts:
    match = _CELL_PREFIX.fullmatch(text)
    cell, message = match.groups() if match else ("", text)
    # Warnings that name no cell are merged only if they are equal.
    key = re.sub(r"\d[\d.e+-]*", "#", message) if cell else text
    warning = groups.setdefault(key, CellWarning(message, []))
    if cell and cell not in warning.cells:
      # A cell may repeat a warning, such as one for each evaluation.
      warning.cells.append(cell)
  return list(groups.values())


class Picture(NamedTuple):
  """A figure that becomes part of a page."""

  name: str
  source: str  # a data URL
  width: int  # largest width in pixels
  narrowest: int  # smallest width in pixels


def pictures(paths: Iterable[Path]) -> list[Picture]:
  """Reads figures, SVG or PNG, from the paths that exist."""
  read_pictures = []
  for path in filter(Path.exists, paths):
    media_type = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    content = path.read_bytes()
    # Matplotlib writes the size into the first lines of an SVG, in points.
    size = re.search(rb'<svg[^>]* viewBox="0 0 (\d+)', content[:2000])
    width = round(_PIXELS_PER_POINT * int(size[1])) if size else _DEFAULT_WIDTH
    source = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    width_range = width, min(width, _MIN_WIDTH)
    read_pictures.append(Picture(path.stem, source, *width_range))
  return read_pictures


class Heading(NamedTuple):
  """The head of a column of results."""

  css_class: str  # CSS class
  key: str
  name: str


class ResultCell(NamedTuple):
  """A cell of the table of results."""

  css_class: str  # CSS class
  sort: str  # key of the sort
  shown: str
  value: float | None = None  # with all digits; None: it is no number
  spread: tuple[float, str] | None = None  # (deviation, shown text)


class Results(NamedTuple):
  """The table of results. A click on a column sorts each group."""

  columns: list[Heading]
  groups: dict[str, list[list[ResultCell]]]  # by number of workers
  legend: str  # legend of the best values; "" if no cell is marked


# Columns with a best value: 1 if higher is better, -1 if lower is.
_BETTER = {"test_accuracy": 1, "test_measure": 1, "test_loss": -1}
_BETTER |= {"train_loss": -1, "simulated_time": -1, "seconds": -1}
_T_LEVEL = 0.975  # of Student's t: 95 % on two sides


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
  return value is None or (_is_number(value) and not np.isfinite(value))


def results(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[Any]
) -> Results:
  """Returns the table of results.

  Args:
    rows: the rows of results.csv; KEY_std is the deviation of KEY, in the same
      cell.
    columns: an `asgd.experiment.engines.Column` for each key that the page
      shows at first; it hides the other keys until a click.
  """
  shown_columns = {column.key: column for column in columns}
  row_keys = dict.fromkeys(key for row in rows for key in row)
  # KEY_std is drawn in the cell of KEY, not as a separate column.
  spreads = {f"{key}_std" for key in row_keys}
  shown_keys = [key for key in shown_columns if key in row_keys]
  hidden = set(row_keys) - set(shown_columns) - spreads
  keys = [*shown_keys, *(key for key in row_keys if key in hidden)]
  headings = []
  for key in keys:
    is_numeric = any(_is_number(row.get(key)) for row in rows)
    # CSS: "n" aligns numbers to the right; "more" hides until the click.
    css_class = "n" * is_numeric + " more" * (key not in shown_columns)
    name = shown_columns[key].header if key in shown_columns else key
    headings.append(Heading(css_class, key, name))
  # Only runs with the same number of workers are compared, and sorted together.
  groups: dict[Any, list[Any]] = {}
  for row in rows:
    groups.setdefault(row.get("workers"), []).append(row)
  tables: dict[str, list[list[ResultCell]]] = {}
  has_best = False
  for workers, members in groups.items():
    # The row itself, not its value: two rows may have equal values.
    best = {key: _best(members, key) for key in keys}
    name = f"{workers} worker{'s' * (workers != 1)}"
    tables[name] = [
      [
        _cell(
          row,
          heading,
          shown_columns.get(heading.key),
          is_best=row is best[heading.key],
        )
        for heading in headings
      ]
      for row in members
    ]
    # The legend appears only if a cell is marked.
    has_best |= any(row is not None for row in best.values())
  legend = (
    "better than every other run with the same number of workers that did not"
    " diverge (Welch, 95 %)"
  )
  return Results(headings, tables, legend if has_best else "")


def _best(
  rows: Sequence[Mapping[str, Any]], key: str
) -> Mapping[str, Any] | None:
  """Returns the best row of a column; None if another row is within the noise
  of the seeds, or that noise is not known. A run that diverged ended early,
  which is no merit: such rows are left out."""
  sign = _BETTER.get(key)
  rows = [
    row
    for row in rows
    if not _is_missing(row.get(key)) and not row.get("diverged")
  ]
  if not sign or len(rows) < 2:
    return None
  best = max(rows, key=lambda row: sign * row[key])
  is_best = all(row is best or _differ(best, row, key) for row in rows)
  return best if is_best else None


def _differ(
  first: Mapping[str, Any], second: Mapping[str, Any], key: str
) -> bool:
  """Whether two means over seeds differ, by Welch's test."""
  from scipy import special  # only here: `asgd watch` needs no SciPy

  # Runs of one seed have no spread, so no difference is more than noise.
  spreads = first.get(f"{key}_std"), second.get(f"{key}_std")
  counts = first.get("seeds", 1), second.get("seeds", 1)
  if any(map(_is_missing, spreads)) or min(counts) < 2:
    return False
  # Squared standard errors of the two means: s^2 / n.
  pairs = zip(spreads, counts, strict=True)
  squared_errors = [float(std or 0) ** 2 / count for std, count in pairs]
  variance = sum(squared_errors)
  difference = abs(first[key] - second[key])
  if not variance:  # both runs gave the same value in every seed
    return bool(difference > 0)
  # The degrees of freedom of Welch and Satterthwaite.
  degrees_of_freedom = variance**2 / sum(
    squared_error**2 / (count - 1)
    for squared_error, count in zip(squared_errors, counts, strict=True)
  )
  noise = special.stdtrit(degrees_of_freedom, _T_LEVEL) * variance**0.5
  return bool(difference > noise)


def _cell(
  row: Mapping[str, Any], heading: Heading, column: Any, *, is_best: bool
) -> ResultCell:
  """Returns the cell of a row with its value and deviation. `column` is an
  `asgd.experiment.engines.Column`, or None for a key without one."""
  css_class, key, _ = heading  # the CSS class, and the key of results.csv
  css_class += " best" * is_best
  value: Any = row.get(key)
  std: Any = row.get(f"{key}_std")
  scale, form = (column.scale, column.form) if column else (1, "{:.4g}")
  # Missing values sort first, as an empty text does.
  if _is_missing(value):
    return ResultCell(css_class, "", "-")
  if not _is_number(value):
    return ResultCell(css_class, str(value), str(value))
  # A whole number keeps all its digits, such as a count of bytes.
  is_integer = isinstance(value, int) and scale == 1
  shown = str(value) if is_integer else form.format(scale * value)
  spread: tuple[float, str] | None = None
  # If all seeds have equal values, the deviation is only a rounding error.
  deviation = 0.0 if std is None or _is_missing(std) else float(std)
  if deviation > _ROUNDING * abs(value):
    spread_form = form if scale != 1 else "{:.2g}"
    spread = deviation, spread_form.format(scale * deviation)
  return ResultCell(css_class, str(value), shown, value, spread)


def leaves(value: Any, key: str = "") -> dict[str, Any]:
  """Returns the leaves of a config by dotted name, such as data.name. A run is
  one leaf.

  Example:
    >>> leaves({"data": {"name": "digits"}, "seeds": [0, 1]})
    {'data.name': 'digits', 'seeds': [0, 1]}
  """
  # An empty mapping is a leaf: it would otherwise vanish from the page.
  is_leaf = not isinstance(value, Mapping) or not value
  if is_leaf or key.startswith("runs."):
    return {key: value}
  prefix = f"{key}." if key else ""
  leaves_by_name: dict[str, Any] = {}
  for name, child in value.items():
    leaves_by_name |= leaves(child, f"{prefix}{name}")
  return leaves_by_name


class Config(NamedTuple):
  """Rows (key, value, default) of a config."""

  changed: list[tuple[str, str, str]]  # the value is not the default
  unchanged: list[tuple[str, str, str]]


def config(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
  """Returns a config beside its defaults."""
  # Both sides as JSON: a tuple equals a list, and 1 differs from 1.0.
  defaults = leaves(defaults)
  rows = [
    (key, json.dumps(x), json.dumps(defaults[key]) if key in defaults else "")
    for key, x in leaves(values).items()
  ]
  changed = [row for row in rows if row[1] != row[2]]
  return Config(changed, [row for row in rows if row[1] == row[2]])


def facts(pairs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the pairs with a value; a mapping becomes one line of text."""
  known_facts = {}
  for name, value in pairs.items():
    if isinstance(value, Mapping):
      value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    if value not in (None, ""):
      known_facts[name] = value
  return known_facts
