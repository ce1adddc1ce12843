"""HTML of a report: one file that needs no network and no other file.

Every function returns HTML. What comes from outside (names of runs, paths,
configs, warnings) is escaped here, and stays text whatever it holds.
"""

import base64
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; margin: 0 auto;
  max-width: 1360px; padding: 0 16px 48px; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin: .8em 0 .1em; } h2 { font-size: 1.15em;
  margin: 1.6em 0 .5em; border-bottom: 1px solid #ccc; }
.scroll { overflow-x: auto; } .scroll img { width: 100%; }
p.lead { margin: 0; color: #444; } ul { margin: .3em 0; padding-left: 1.3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 9px; border-bottom: 1px solid #e2e2e2; text-align: left;
  vertical-align: top; }
th { white-space: nowrap; } td:first-child { min-width: 8em; }
ul.warnings { max-width: 60em; }
table.results { font-size: 13px; }
table.results td, table.results th { overflow-wrap: normal; padding: 3px 6px; }
td.n, th.n { text-align: right; white-space: nowrap; }
table.results th { background: #f3f3f3; white-space: nowrap; }
table.results td:first-child, table.results th:first-child { position: sticky;
  left: 0; background: #fff; min-width: 8.5em; }
table.results th:first-child { background: #f3f3f3; }
th button { font: inherit; font-weight: bold; border: 0; background: none;
  padding: 0; cursor: pointer; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
#every:not(:checked) ~ .scroll .more { display: none; }
.warnings { border-left: 4px solid #b35900; padding-left: 2em; }
code, pre { font-size: .9em; } pre { white-space: pre-wrap; margin: 0; }
tr.changed td { background: #fff6d6; }
.spread { color: #666; }
@media (max-width: 600px) { body { font-size: 14px; padding: 0 10px 32px; }
  th, td { padding: 3px 6px; } }
@media print { .scroll { overflow: visible; } }
"""
_PIXELS = 1.45  # for a point of a figure, so that its text is as that of a page
_WIDEST, _NARROWEST = 760, 480  # of a figure, pixels
_ROUNDING = 1e-9  # a smaller relative spread is none
_SCRIPT = """
for (const table of document.querySelectorAll("table.results")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, i) => head.querySelector("button").onclick = () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[i].dataset.sort;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}
"""


def text(value: Any) -> str:
  """Escapes a text, also for an attribute in double quotes.

  Example:
    >>> text('<b class="x">')
    '&lt;b class=&quot;x&quot;&gt;'
  """
  return html.escape(str(value))


def document(title: str, *parts: str) -> str:
  """Returns the whole page of some parts, of which empty ones are left out."""
  body = "\n".join(part for part in parts if part)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n"
    f"<body>\n{body}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
  )


def heading(title: str, lead: str = "") -> str:
  """The heading of the page, with a line below it."""
  return f'<h1>{text(title)}</h1>\n<p class="lead">{text(lead)}</p>'


def section(title: str, content: str) -> str:
  """Some HTML below a heading; nothing without content."""
  return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>"


def more(title: str, content: str) -> str:
  """HTML that is shown when its title is clicked."""
  return (
    f"<details>\n<summary>{text(title)}</summary>\n{content}\n</details>"
  )


def items(texts: Iterable[str], kind: str = "") -> str:
  """A list of texts; `kind` is its class."""
  rows = "".join(f"<li>{text(one)}</li>\n" for one in texts)
  return f'<ul class="{text(kind)}">\n{rows}</ul>' if rows else ""


def warnings(texts: Sequence[str]) -> str:
  """The section of warnings, each once; nothing without one."""
  kept = items(dict.fromkeys(texts), "warnings")
  return section("Warnings", kept) if kept else ""


def figures(paths: Iterable[Path], title: str) -> str:
  """The section of figures, of those files that are there."""
  drawn = [
    picture(path, f"{path.stem} of {title}; the numbers are in the table")
    for path in paths
    if path.exists()
  ]
  return section("Figures", "\n".join(drawn)) if drawn else ""


def picture(path: Path, description: str) -> str:
  """A figure from a file, SVG or PNG, which becomes part of the page."""
  kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
  content = path.read_bytes()
  size = re.search(rb'<svg[^>]* viewBox="0 0 (\d+)', content[:2000])
  width = round(_PIXELS * int(size[1])) if size else _WIDEST
  return (
    f'<div class="scroll"><img alt="{text(description)}"'
    f' style="max-width: {width}px; min-width: {min(width, _NARROWEST)}px"'
    f' src="data:{kind};base64,{base64.b64encode(content).decode()}"></div>'
  )


def table(
  header: Sequence[str],
  rows: Iterable[Sequence[Any]],
  marked: Sequence[bool] = (),
) -> str:
  """A table of texts; rows that are `marked` stand out."""
  head = "".join(f"<th>{text(name)}</th>" for name in header)
  lines = []
  for i, row in enumerate(rows):
    cells = "".join(f"<td>{text(value)}</td>" for value in row)
    kind = ' class="changed"' if i < len(marked) and marked[i] else ""
    lines.append(f"<tr{kind}>{cells}</tr>")
  body = "\n".join(lines)
  return (
    f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
    f"{body}\n</tbody></table></div>"
  )


def facts(pairs: Mapping[str, Any]) -> str:
  """Names and what is known of them; a mapping is given in one line."""
  rows = []
  for name, value in pairs.items():
    if isinstance(value, Mapping):
      value = ", ".join(f"{key} {inner}" for key, inner in value.items())
    if value not in (None, ""):
      rows.append(
        f"<tr><th>{text(name)}</th><td><code>{text(value)}</code></td></tr>"
      )
  body = "\n".join(rows)
  return f"<table>\n<tbody>\n{body}\n</tbody></table>" if rows else ""


def links(paths: Iterable[Path], folder: Path) -> str:
  """Links to files below a folder, which is that of the page."""
  out = []
  for path in paths:
    name = path.relative_to(folder).as_posix()
    out.append(f'<a href="{text(urllib.parse.quote(name))}">{text(name)}</a>')
  return ", ".join(out)


def _number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _datum(value: Any, scale: float, form: str) -> str:
  """A value, and all digits of it where it is a number."""
  if not _number(value):
    return text(value)
  shown = str(value) if isinstance(value, int) and scale == 1 else ""
  shown = shown or form.format(scale * value)
  return f'<data value="{value!r}">{text(shown)}</data>'


def _missing(value: Any) -> bool:
  return value is None or (_number(value) and not np.isfinite(value))


def results(
  rows: Sequence[Mapping[str, Any]], columns: Sequence[Any]
) -> str:
  """The table of results, which is sorted by a click on a column.

  Args:
    rows: of results.csv; KEY_std is the deviation of KEY, in the same cell.
    columns: an `asgd.experiment.engines.Column` for each key that is shown at
      once; the others are shown when that is asked for.
  """
  known = {column.key: column for column in columns}
  keys = list(dict.fromkeys(key for row in rows for key in row))
  stds = {key for key in keys if key.removesuffix("_std") in keys} - {
    key for key in keys if not key.endswith("_std")
  }
  keys = [key for key in keys if key not in stds]
  first = [key for key in known if key in keys]
  keys = [*first, *(key for key in keys if key not in known)]
  head, lines, kinds = [], [], {}
  for key in keys:
    name = known[key].header if key in known else key
    numeric = any(_number(row.get(key)) for row in rows)
    kinds[key] = "n" * numeric + " more" * (key not in known)
    head.append(
      f'<th class="{kinds[key]}" title="{text(key)}">'
      f'<button type="button">{text(name)}</button></th>'
    )
  for row in rows:
    cells = (_cell(row, key, known.get(key), kinds[key]) for key in keys)
    lines.append(f"<tr>{''.join(cells)}</tr>")
  body = "\n".join(lines)
  return (
    '<input type="checkbox" id="every"> <label for="every">all columns</label>'
    ' of results.csv; a click on a name sorts\n<div class="scroll">'
    f'<table class="results">\n<thead><tr>{"".join(head)}</tr></thead>\n'
    f"<tbody>\n{body}\n</tbody></table></div>"
  )


def _cell(row, key, column, kind):
  """A value with its deviation."""
  value, std = row.get(key), row.get(f"{key}_std")
  scale, form = (column.scale, column.form) if column else (1, "{:.4g}")
  if _missing(value):
    return f'<td class="{kind}" data-sort="">-</td>'
  shown = _datum(value, scale, form)
  few = form if scale != 1 else "{:.2g}"
  if not _missing(std) and std > _ROUNDING * abs(value):
    shown += f' <span class="spread">± {_datum(std, scale, few)}</span>'
  return f'<td class="{kind}" data-sort="{text(value)}">{shown}</td>'


def leaves(value: Any, key: str = "") -> dict[str, Any]:
  """Returns the leaves of a config by their names, such as data.name; a run is
  one.

  Example:
    >>> leaves({"data": {"name": "digits"}, "seeds": [0, 1]})
    {'data.name': 'digits', 'seeds': [0, 1]}
  """
  whole = not isinstance(value, Mapping) or not value
  if whole or key.startswith("runs."):
    return {key: value}
  above, out = f"{key}." if key else "", {}
  for name, inner in value.items():
    out |= leaves(inner, f"{above}{name}")
  return out


def config(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
  """A config beside its defaults: what differs from them, and the rest."""
  ours, theirs = leaves(values), leaves(defaults)
  rows = [
    (key, json.dumps(value), json.dumps(theirs[key]) if key in theirs else "")
    for key, value in ours.items()
  ]
  header = "key", "value", "default"
  changed = [row for row in rows if row[1] != row[2]]
  same = [row for row in rows if row[1] == row[2]]
  first = table(header, changed, [True] * len(changed))
  rest = more(f"{len(same)} keys with their defaults", table(header, same))
  return first + "\n" + rest
