"""Several experiments in one figure, one table and one page."""

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.checks import shortened
from asgd.experiment import folder, page, report, schema, storage
from asgd.experiment.schema import Engines
from asgd.names import is_import

_SHOWN = 60  # characters of a value of a config
_MADE = "compared.json"  # of an earlier comparison: the folders
_FILES = {
  *("results.csv", "table.txt", "report.html", _MADE),
  *(f"figure.{suffix}" for suffix in ("csv", "png", "svg", "pdf")),
}


def _check_out(out: Path) -> None:
  """Refuses to write into an experiment, or over what is not ours."""
  whole = out.resolve()
  for above in (whole, *whole.parents):
    if (above / "config.json").exists() and (
      above == whole or (above / "cells").is_dir()
    ):
      where = "is" if above == whole else f"is in {above}, which is"
      raise ValueError(
        f"--out={out} {where} an experiment's own folder: give another --out"
      )
  names = {path.name for path in out.glob("*")} if out.is_dir() else set()
  names = {name for name in names if not name.startswith(".")}
  ours = storage.read_sealed(out / _MADE) is not None
  others = sorted(names - _FILES if ours else names - {f"{_MADE}.tmp"})
  if others:
    raise ValueError(
      f"--out={out} holds {others[0]}, which no comparison wrote: give a folder"
      " that is empty, not there, or of an earlier comparison"
    )


def _count(config: Mapping[str, Any], engines: Engines) -> int | None:
  """The number of cells of an experiment, None if it cannot be known without
  the code that the config names, of which nothing is imported."""
  whole, count = {**config, "engine": next(iter(engines)), "only": []}, 0
  try:
    for label, entry, kind in schema.entries(whole, engines):
      recipe = entry.get("recipe", kind.default_recipe)
      swept = entry.get("workers", config["workers"])
      workers = schema.shared("workers", swept)
      own = is_import(recipe)
      run = schema.Run(label, label, "", "" if own else recipe, {}, config)
      chosen = kind.workers(run._replace(config={"workers": workers}))
      if own and list(chosen) != workers:  # the recipe has a say in it
        return None
      count += len(chosen)
  except (ValueError, KeyError):
    return None
  return count * len(config["seeds"])


def _left_out(
  place: Path, identity: Mapping[str, Any], done: int, engines: Engines
) -> list[str]:
  """Says which cells of a folder are not in its means."""
  said = [f"{fault}; the cell is left out" for fault in folder.faults(place)]
  count = _count(identity["config"], engines)
  if count is not None and done < count:
    said.append(
      f"{place}: {done} of {count} cells are finished; means and figures are of"
      " these alone"
    )
  return said


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
    why = "".join(f" ({fault})" for fault in folder.faults(place)[:1])
    raise ValueError(
      f"{place} holds no finished cell{why}: finish its training, or leave it"
      " out"
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
    Text: the table, the cells that are not in it, and the paths.

  Raises:
    ValueError: for a folder of no experiment, without a finished cell, or given
      twice; if `out` is an experiment's own, holds other files, or cannot be
      written to.
  """
  whole = out.resolve()  # a link that appears there later is not followed
  _check_out(out)
  names = _names(places)
  identities, results, rows = zip(*map(_read, places), strict=True)
  counts = collections.Counter(
    title for mine in results for title in {row["algorithm"] for row in mine}
  )
  shared = {title for title, count in counts.items() if count > 1}
  together, curves = [], []
  for name, mine, own in zip(names, results, rows, strict=True):
    together += _named_apart(mine, name, shared)
    curves += _named_apart(own, name, shared)
  csv_rows, table = report.tabulate(together, engines)
  title = " and ".join(names)
  notes = report.warnings(together)
  left_out = []
  for place, identity, mine in zip(places, identities, results, strict=True):
    left_out += _left_out(place, identity, len(mine), engines)
  data = {identity["dataset"]["sha256"] for identity in identities}
  if len(data) > 1:
    notes.insert(0, "the folders are of different data")
  with storage.naming_folder(out):
    safe_files.make_folder(whole)
    made = storage.sealed({"folders": [str(place) for place in places]})
    storage.write_json(out / _MADE, made)
    text = f"{title}\n\n{table}"
    drawn = report.write_tables(out, title, text, csv_rows, together, curves)
    content = page.render(
      title,
      f"{len(together)} cells of {len(places)} experiments",
      warnings=[*left_out, *notes],
      pictures=page.pictures([out / "figure.svg"]),
      results=page.results(csv_rows, report.columns_of(together, engines)),
      differing=_differences(names, identities),
      folders=places,
    )
    safe_files.write(out / "report.html", content)
  warned = "".join(f"warning: {text}\n" for text in left_out)
  return (
    f"\n{table}\n{warned}report       {out}/report.html\nfigure       {drawn}\n"
    f"table        {out}/table.txt, {out}/results.csv"
  )
