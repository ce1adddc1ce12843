"""Compares several experiments in one figure, one table and one page."""

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import safe_files
from asgd.checks import shortened
from asgd.experiment import folder, report, schema, storage
from asgd.experiment.schema import Engines
from asgd.names import is_import
from asgd.pages import page

_MAX_CHARACTERS = 60  # of a config's value in the table of differences
_MARK = "compared.json"  # the file that marks a folder of a comparison
# Files that a comparison writes, and a later one may replace.
_FILES = {
  *("results.csv", "table.txt", "report.html", _MARK),
  *(f"figure.{suffix}" for suffix in ("csv", "png", "svg", "pdf")),
}


def _check_out(out: Path) -> None:
  """Raises ValueError if `out` is in an experiment's folder, or has files that
  no comparison wrote."""
  path = out.resolve()
  # [1] `out` is no experiment's folder, nor inside one. In a parent folder
  # config.json may belong to another program, so a parent is an experiment's
  # folder only if it has a folder `cells`, too.
  for parent in (path, *path.parents):
    if (parent / "config.json").exists() and (
      parent == path or (parent / "cells").is_dir()
    ):
      relation = "is" if parent == path else f"is in {parent}, which is"
      raise ValueError(
        f"--out={out} {relation} an experiment's own folder: give another --out"
      )
  # [2] `out` is new, empty, or a comparison's; hidden files do not count.
  names = {path.name for path in out.glob("*")} if out.is_dir() else set()
  names = {name for name in names if not name.startswith(".")}
  is_comparison = storage.read_sealed(out / _MARK) is not None
  # A kill at the start leaves a half-written mark.
  expected = _FILES if is_comparison else {f"{_MARK}.tmp"}
  foreign_files = sorted(names - expected)
  if foreign_files:
    raise ValueError(
      f"--out={out} holds {foreign_files[0]}, which no comparison wrote: give"
      " an empty or a new folder, or the folder of an earlier comparison"
    )


def _count_cells(config: Mapping[str, Any], engines: Engines) -> int | None:
  """Returns the count of an experiment's cells. No user code is imported, so
  the count is None if it depends on the code that the config names."""
  unfiltered_config = {**config, "engine": next(iter(engines)), "only": []}
  count = 0
  try:
    for label, entry, kind in schema.entries(unfiltered_config, engines):
      recipe = entry.get("recipe", kind.default_recipe)
      workers_setting = entry.get("workers", config["workers"])
      workers = schema.shared("workers", workers_setting)
      user_recipe = is_import(recipe)
      # The engine may choose other numbers of workers than the config has.
      # `kind.workers` reads only the recipe and the workers of a run, so the
      # other fields of this run are empty.
      name = "" if user_recipe else recipe
      run = schema.Run(label, label, "", name, {}, {"workers": workers})
      counts = kind.workers(run)
      if user_recipe and list(counts) != workers:
        return None
      count += len(counts)
  except (ValueError, KeyError):  # the config of another release
    return None
  return count * len(config["seeds"])


def _missing_cell_warnings(
  workdir: Path, identity: Mapping[str, Any], n_finished: int, engines: Engines
) -> list[str]:
  """Returns warnings about cells that the means of a folder leave out."""
  texts = [f"{fault}; the cell is left out" for fault in folder.faults(workdir)]
  count = _count_cells(identity["config"], engines)
  if count is not None and n_finished < count:
    texts.append(
      f"{workdir}: {n_finished} of {count} cells are finished; means and"
      " figures include only these"
    )
  return texts


def _read_experiment(
  workdir: Path,
) -> tuple[dict[str, Any], report.Table, report.Table]:
  """Returns config.json, the results and the evaluations of an experiment."""
  identity = folder.read_identity(workdir) if workdir.is_dir() else None
  if identity is None:
    raise ValueError(
      f"{workdir} is not the folder of an experiment, which has a config.json:"
      " give folders that asgd train made (its --workdir)"
    )
  results = folder.read_results(workdir)
  if not results:
    reason = "".join(f" ({fault})" for fault in folder.faults(workdir)[:1])
    raise ValueError(
      f"{workdir} holds no finished cell{reason}: finish its training, or leave"
      " it out"
    )
  cells = [workdir / "cells" / row["cell"] for row in results]
  return identity, results, [row for p in cells for row in folder.read_rows(p)]


def _folder_names(workdirs: Sequence[Path]) -> list[str]:
  """Returns names for folders: their paths below the common parent folder."""
  paths = [workdir.resolve() for workdir in workdirs]
  if len(set(paths)) < len(paths):
    repeated = next(w for i, w in enumerate(workdirs) if paths[i] in paths[:i])
    raise ValueError(f"{repeated} is given twice: give each folder once")
  common_parent = Path(os.path.commonpath([path.parent for path in paths]))
  return [path.relative_to(common_parent).as_posix() for path in paths]


def _with_folder_name(
  rows: Sequence[Mapping[str, Any]], name: str, shared_titles: set[str]
) -> report.Table:
  """Returns rows in which the folder's name is added to each cell, and to the
  titles that other folders have, too."""
  named_rows = []
  for row in rows:
    title, cell = row["algorithm"], f"{name}/{row['cell']}"
    title = f"{title} ({name})" if title in shared_titles else title
    named_rows.append({**row, "algorithm": title, "cell": cell})
  return named_rows


def _differences(
  names: Sequence[str], identities: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
  """Returns (header, rows) of the keys in which configs, data, machines or
  releases differ."""
  # [1] A column for each folder: dotted key -> value.
  columns = []
  for identity in identities:
    # Values under "free", such as the release of JAX, may differ between the
    # parts of an experiment that was resumed.
    origin = {
      f"made by: {key}": value
      for key, value in page.leaves(identity["free"]).items()
    }
    further_values = {"data": identity["dataset"]["name"], **origin}
    columns.append({**page.leaves(identity["config"]), **further_values})
  # [2] A row for each key, in order of first appearance, if values differ.
  rows = []
  for key in dict.fromkeys(key for column in columns for key in column):
    values = [str(column.get(key, "-")) for column in columns]
    if len(set(values)) > 1:
      rows.append(
        [key, *(shortened(value, _MAX_CHARACTERS) for value in values)]
      )
  return ["key", *names], rows


def write(workdirs: Sequence[Path], out: Path, engines: Engines) -> str:
  """Writes figure, table and report.html of several experiments into a folder.

  If runs of several folders have the same title, the name of the folder is
  appended to the title.

  Returns:
    Text: the table, the cells that are not in it, and the paths.

  Raises:
    ValueError: a folder is no experiment's, has no finished cell, or is given
      twice; or `out` is an experiment's, has other files, or cannot be written.
  """
  # Resolved before the check: if a symbolic link replaces this folder after the
  # check, `make_folder` refuses the link.
  path = out.resolve()
  _check_out(out)
  # [1] Read all folders.
  names = _folder_names(workdirs)
  experiments = map(_read_experiment, workdirs)
  identities, results, evaluations = zip(*experiments, strict=True)
  counts = collections.Counter(
    title
    for folder_results in results
    for title in {row["algorithm"] for row in folder_results}
  )
  shared_titles = {title for title, count in counts.items() if count > 1}
  # [2] Merge their rows, so that equal titles remain different runs.
  all_cells: report.Table = []
  all_evaluations: report.Table = []
  for name, cells, rows in zip(names, results, evaluations, strict=True):
    all_cells += _with_folder_name(cells, name, shared_titles)
    all_evaluations += _with_folder_name(rows, name, shared_titles)
  csv_rows, table = report.tabulate(all_cells, engines)
  title = " and ".join(names)
  # [3] Warnings: of the cells, and of cells that the means leave out.
  notes = report.warnings(all_cells)
  cell_warnings = []
  for workdir, identity, cells in zip(
    workdirs, identities, results, strict=True
  ):
    count = len(cells)
    cell_warnings += _missing_cell_warnings(workdir, identity, count, engines)
  data_hashes = {identity["dataset"]["sha256"] for identity in identities}
  if len(data_hashes) > 1:
    notes.insert(0, "the folders have different data")
  # [4] Write the files, the mark first.
  with storage.naming_folder(out):
    safe_files.make_folder(path)
    mark = storage.sealed({"folders": [str(workdir) for workdir in workdirs]})
    storage.write_json(out / _MARK, mark)
    text = f"{title}\n\n{table}"
    figure_line = report.write_tables(
      out, title, text, csv_rows, all_cells, all_evaluations
    )
    content = page.render(
      title,
      f"{len(all_cells)} cells of {len(workdirs)} experiments",
      warnings=page.merge_warnings([*cell_warnings, *notes]),
      pictures=page.pictures([out / "figure.svg"]),
      results=page.results(csv_rows, report.table_columns(all_cells, engines)),
      differing=_differences(names, identities),
      folders=workdirs,
    )
    safe_files.write(out / "report.html", content)
  warning_lines = "".join(f"warning: {text}\n" for text in cell_warnings)
  return (
    f"\n{table}\n{warning_lines}report       {out}/report.html\n"
    f"figure       {figure_line}\n"
    f"table        {out}/table.txt, {out}/results.csv"
  )
