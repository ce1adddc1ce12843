"""Several experiments in one figure, one table and one page."""

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd.checks import shortened
from asgd.experiment import figure, folder, page, report, storage
from asgd.experiment.schema import Engines

_SHOWN = 60  # characters of a value of a config


def _read(place: Path) -> tuple[dict[str, Any], list[dict], list[dict]]:
  """Returns what config.json says, the results and the evaluations."""
  identity = folder.read_identity(place) if place.is_dir() else None
  if identity is None:
    raise ValueError(
      f"{place} is not the folder of an experiment, which has a config.json:"
      " give folders that launch.train made (its --workdir)"
    )
  results = folder.read_results(place)
  if not results:
    raise ValueError(
      f"{place} holds no finished cell: finish its training, or leave it out"
    )
  cells = [place / "cells" / row["cell"] for row in results]
  return identity, results, [row for p in cells for row in folder.read_rows(p)]


def _names(places: Sequence[Path]) -> list[str]:
  """Names for folders: the last parts of their paths in which they differ."""
  whole = [place.resolve() for place in places]
  if len(set(whole)) < len(whole):
    twice = next(p for i, p in enumerate(places) if whole[i] in whole[:i])
    raise ValueError(f"{twice} is given twice: give each folder once")
  above = Path(os.path.commonpath([path.parent for path in whole]))
  return [path.relative_to(above).as_posix() for path in whole]


def _named_apart(
  rows: Sequence[Mapping[str, Any]], name: str, shared: set[str]
) -> list[dict[str, Any]]:
  """Rows with the folder's name at what other folders have too."""
  out = []
  for row in rows:
    title = row["algorithm"]
    title = f"{title} ({name})" if title in shared else title
    out.append({**row, "algorithm": title, "cell": f"{name}/{row['cell']}"})
  return out


def _differences(
  names: Sequence[str], identities: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
  """The keys in which configs and what made them differ: (header, rows)."""
  columns = []
  for identity in identities:
    free = {
      f"made by: {key}": value
      for key, value in page.leaves(identity["free"]).items()
    }
    known = {"data": identity["dataset"]["name"], **free}
    columns.append({**page.leaves(identity["config"]), **known})
  rows = []
  for key in dict.fromkeys(key for column in columns for key in column):
    values = [str(column.get(key, "-")) for column in columns]
    if len(set(values)) > 1:
      rows.append([key, *(shortened(value, _SHOWN) for value in values)])
  return ["key", *names], rows


def write(places: Sequence[Path], out: Path, engines: Engines) -> str:
  """Writes figure, table and report.html of several experiments into a folder.

  A run that several folders have is named with its folder.

  Returns:
    What there is to say: the table, and where all of it is.

  Raises:
    ValueError: for a folder of no experiment, without a finished cell, or given
      twice; or if `out` is an experiment's own.
  """
  if (out / "config.json").exists():
    raise ValueError(f"{out} is an experiment's own folder: give another --out")
  names = _names(places)
  identities, results, rows = zip(*map(_read, places), strict=True)
  counts = collections.Counter(
    title for mine in results for title in {row["algorithm"] for row in mine}
  )
  shared = {title for title, count in counts.items() if count > 1}
  together: list[dict[str, Any]] = []
  curves: list[dict[str, Any]] = []
  for name, mine, own in zip(names, results, rows, strict=True):
    together += _named_apart(mine, name, shared)
    curves += _named_apart(own, name, shared)
  points = figure.numbers(together, curves)
  csv_rows, table = report.tabulate(together, engines)
  out.mkdir(parents=True, exist_ok=True)
  title = " and ".join(names)
  storage.write_csv(out / "results.csv", csv_rows)
  storage.write_atomically(out / "table.txt", f"{title}\n\n{table}")
  storage.write_csv(out / "figure.csv", report.flat(points))
  drawn = report.draw(points, together, out / "figure", title)
  notes = report.warnings(together)
  data = {identity["dataset"]["sha256"] for identity in identities}
  if len(data) > 1:
    notes.insert(0, "the folders are of different data")
  header, differing = _differences(names, identities)
  content = page.document(
    title,
    page.heading(title, f"{len(together)} cells of {len(places)} experiments"),
    page.warnings(notes),
    page.figures([out / "figure.svg"], title),
    page.section(
      "Results",
      page.results(csv_rows, report.columns_of(together, engines)),
    ),
    page.section("Where they differ", page.table(header, differing)),
    page.section("Folders", page.items(str(place) for place in places)),
  )
  storage.write_atomically(out / "report.html", content)
  return (
    f"\n{table}\nreport       {out}/report.html\nfigure       {drawn}\n"
    f"table        {out}/table.txt, {out}/results.csv"
  )
