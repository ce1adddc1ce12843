"""Makes the HTML page of a report from the template page.html.

The page is one file, and needs no other file and no network. The template
escapes all text: names, paths, configs, warnings.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Pixels for each point of a figure, so that its text has the page's size.
_PIXELS = 1.45
_WIDEST, _NARROWEST = 760, 480  # width of a figure, in pixels
_ROUNDING = 1e-9  # a smaller relative spread is not shown


def render(title: str, lead: str, **sections: Any) -> str:
  """Returns a page.

  Args:
    title: of the page.
    lead: a line below the title.
    **sections: of the page, each drawn by page.html if it is given:
      warnings: texts.
      pictures: from `pictures`.
      results: a `Results`.
      config: a `Config`.
      facts: names and values.
      differing: (header, rows).
      folders: texts.
      files: names of files beside the page.
      cells: for each cell a mapping with these sections.

  Example:
    >>> text = render("a <b>", "of one seed", warnings=["x < y"])
    >>> "<h1>a &lt;b&gt;</h1>" in text, "<li>x &lt; y</li>" in text
    (True, True)
  """
  import jinja2  # only here, which shortens the start of commands

  templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  template = templates.get_template("page.html")
  return template.render(title=title, lead=lead, **sections) + "\n"


class Picture(NamedTuple):
  """A figure that becomes part of a page."""

  name: str
  source: str  # a data URL
  width: int  # largest width in pixels
  narrowest: int  # smallest width in pixels


def pictures(paths: Iterable[Path]) -> list[Picture]:
  """Reads figures, SVG or PNG, from the paths that exist."""
  read = []
  for path in filter(Path.exists, paths):
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    content = path.read_bytes()
    size = re.search(rb'<svg[^>]* viewBox="0 0 (\d+)', content[:2000])
    width = round(_PIXELS * int(size[1])) if size else _WIDEST
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    read.append(Picture(path.stem, source, width, min(width, _NARROWEST)))
  return read


class Heading(NamedTuple):
  """The head of a column of results."""

  kind: str  # CSS class
  key: str
  name: str


class ResultCell(NamedTuple):
  """A cell of the table of results."""

  kind: str  # CSS class
  sort: str  # key of the sort
  shown: str
  value: float | None = None  # with all digits; None: it is no number
  spread: tuple[float, str] | None = None  # (deviation, shown text)


class Results(NamedTuple):
  """The table of results. A click on a column sorts it."""

  columns: list[Heading]
  rows: list[list[ResultCell]]


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_missing(value: Any) -> bool:
  return value is None or (_is_number(value) and not np.isfinite(value))


def results(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[Any]
) -> Results:
  """Returns the table of results.

  Args:
    rows: of results.csv; KEY_std is the deviation of KEY, in the same cell.
    columns: an `asgd.experiment.engines.Column` for each key that is shown at
      once; the page hides the others until a click.
  """
  known = {column.key: column for column in columns}
  keys = dict.fromkeys(key for row in rows for key in row)
  spreads = {f"{key}_std" for key in keys}
  first = [key for key in known if key in keys]
  others = (key for key in keys if key not in known and key not in spreads)
  keys = [*first, *others]
  headings = []
  for key in keys:
    numeric = any(_is_number(row.get(key)) for row in rows)
    kind = "n" * numeric + " more" * (key not in known)
    name = known[key].header if key in known else key
    headings.append(Heading(kind, key, name))
  cells = [
    [_cell(row, head, known.get(head.key)) for head in headings] for row in rows
  ]
  return Results(headings, cells)


def _cell(
  row: Mapping[str, Any], heading: Heading, column: Any
) -> ResultCell:
  """Returns the cell of a row with its value and deviation. `column` is an
  `asgd.experiment.engines.Column`, or None for a key without one."""
  kind, key, _ = heading
  value, std = row.get(key), row.get(f"{key}_std")
  scale, form = (column.scale, column.form) if column else (1, "{:.4g}")
  if _is_missing(value):
    return ResultCell(kind, "", "-")
  if not _is_number(value):
    return ResultCell(kind, str(value), str(value))
  is_integer = isinstance(value, int) and scale == 1
  shown = str(value) if is_integer else form.format(scale * value)
  spread = None
  if not _is_missing(std) and std > _ROUNDING * abs(value):
    few = form if scale != 1 else "{:.2g}"
    spread = std, few.format(scale * std)
  return ResultCell(kind, str(value), shown, value, spread)


def leaves(value: Any, key: str = "") -> dict[str, Any]:
  """Returns the leaves of a config by dotted name, such as data.name. A run is
  one leaf.

  Example:
    >>> leaves({"data": {"name": "digits"}, "seeds": [0, 1]})
    {'data.name': 'digits', 'seeds': [0, 1]}
  """
  is_leaf = not isinstance(value, Mapping) or not value
  if is_leaf or key.startswith("runs."):
    return {key: value}
  above, out = f"{key}." if key else "", {}
  for name, inner in value.items():
    out |= leaves(inner, f"{above}{name}")
  return out


class Config(NamedTuple):
  """Rows (key, value, default) of a config."""

  changed: list[tuple[str, str, str]]  # the value is not the default
  same: list[tuple[str, str, str]]


def config(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
  """Returns a config beside its defaults."""
  defaults = leaves(defaults)
  rows = [
    (key, json.dumps(x), json.dumps(defaults[key]) if key in defaults else "")
    for key, x in leaves(values).items()
  ]
  changed = [row for row in rows if row[1] != row[2]]
  return Config(changed, [row for row in rows if row[1] == row[2]])


def facts(pairs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the pairs with a value; a mapping becomes one line of text."""
  out = {}
  for name, value in pairs.items():
    if isinstance(value, Mapping):
      value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    if value not in (None, ""):
      out[name] = value
  return out
