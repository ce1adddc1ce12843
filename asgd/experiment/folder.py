"""The results folder of an experiment, and the folder of each cell.

WORKDIR/
  config.json            the resolved config, and what the data were
  measurements.json      of this machine, if plans depend on them
  cells/LABEL-nN-sSEED/  one cell
    cell.json            which cell it is, of what config
    checkpoints/         see asgd.experiment.checkpoint
    metrics.jsonl        one row per evaluation
    records.npz          one row per message
    params.msgpack       final parameters, for flax.serialization
    result.json          written last: the cell is finished
  tensorboard/           the same rows as metrics.jsonl
  metrics.jsonl          all cells' rows
  results.csv, table.txt one row per run and number of workers
  figure.png, .svg, .csv the figure and the numbers in it

The same command with the same folder goes on where it stopped. Runs, numbers of
workers and seeds may be added to an experiment that has begun; anything else
makes it another experiment, whose folder is refused. Each cell is locked by the
process that trains it, so several may work on one experiment.
"""

import contextlib
import copy
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from asgd.experiment import cells as cells_lib
from asgd.experiment import schema, storage

VERSION = 1  # of the layout; another is refused
_REMEDY = "choose another folder with --workdir"
_GROWING = ("workers", "seeds")  # lists that may get longer
# Written by a run that was killed as it started.
_STARTED = ("config.json.tmp", ".lock")


class FolderError(ValueError):
  """A folder cannot be used for this experiment."""


def identity(experiment: cells_lib.Experiment) -> dict[str, Any]:
  """Returns what config.json says: JSON that tells experiments apart, and
  under "free" what may differ."""
  config = copy.deepcopy(experiment.config)
  free = {key: config.pop(key) for key in schema.FREE}
  engine, chosen = config.pop("engine"), config.pop("only")
  for entry in config["runs"].values():
    entry.setdefault("engine", engine)
  if chosen:
    config["runs"] = {label: config["runs"][label] for label in chosen}
  return {
    "version": VERSION,
    "config": config,
    "dataset": experiment.dataset_identity,
    "free": {
      **free,
      "data source": experiment.dataset.source,
      "jax": f"{jax.__version__} on {jax.default_backend()}",
      "cpus": os.cpu_count(),
    },
  }


def open_folder(
  workdir: str | None, name: str, experiment: cells_lib.Experiment
) -> Path:
  """Finds or makes the folder of an experiment; never takes over another's.

  Args:
    workdir: the folder asked for, or None: runs/NAME-001, -002, ..., the newest
      that holds this very experiment, or the next that is free.
    name: of the experiment.
    experiment: what is run.

  Returns:
    The folder, holding config.json.

  Raises:
    FolderError: if the folder holds something else.
  """
  wanted = json.loads(storage.to_json(identity(experiment)))
  if workdir is None:
    folder = _numbered(Path("runs"), name, wanted)
  else:
    folder = Path(workdir)
    _check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
  with _locked(folder / ".lock"):
    written = _read_identity(folder)
    if written is not None:
      _check_same(folder, written, wanted)
      wanted = _grown(written, wanted)
    content = storage.to_json(wanted, indent=2) + "\n"
    storage.write_atomically(folder / "config.json", content)
    _keep_measurements(folder, experiment)
  return folder


def _keep_measurements(folder, experiment):
  """Writes what the plans depend on, once; see `read_measurements`.

  Raises:
    FolderError: if it is gone and cells were begun.
  """
  path = folder / "measurements.json"
  if not experiment.measurements or path.exists():
    return
  if (folder / "cells").exists():
    raise FolderError(
      f"{path} is gone, and stages were cut by it: put it back as it was, or"
      f" {_REMEDY}"
    )
  content = storage.to_json(experiment.measurements) + "\n"
  storage.write_atomically(path, content)


def read_measurements(folder: Path) -> dict[str, Any] | None:
  """Returns what the build measured with which an experiment began, so that
  plans are the same; None if there is nothing.

  Raises:
    FolderError: if the file is not what a build wrote.
  """
  path = folder / "measurements.json"
  if not path.exists():
    return None
  value = storage.read_json(path)
  if value is None:
    raise FolderError(
      f"{path} cannot be read, and stages were cut by it: put it back as it"
      f" was, or {_REMEDY}"
    )
  return value


def _read_identity(folder: Path) -> dict | None:
  path = folder / "config.json"
  if not path.exists():
    return None
  value = storage.read_json(path)
  if value is None or not isinstance(value.get("config"), dict):
    raise FolderError(
      f"{path} cannot be read: it is not what a run wrote; {_REMEDY}"
    )
  if value.get("version") != VERSION:
    raise FolderError(
      f"{path} is of version {value.get('version')} of the layout, and this"
      f" release writes {VERSION}; {_REMEDY}"
    )
  return value


def _check_folder(folder):
  """Raises FolderError unless the folder is free, or of an experiment."""
  if not folder.exists():
    return
  if not folder.is_dir():
    raise FolderError(f"--workdir={folder} is a file; {_REMEDY}")
  if (folder / "config.json").exists():
    return
  if any(path.name not in _STARTED for path in folder.iterdir()):
    raise FolderError(
      f"--workdir={folder} is not empty and holds no experiment; {_REMEDY}"
    )


def _fixed(value: Mapping[str, Any]) -> dict[str, Any]:
  """What may not differ between two parts of one experiment."""
  config = {
    key: inner
    for key, inner in value["config"].items()
    if key not in (*_GROWING, "runs")
  }
  return {"config": config, "dataset": value["dataset"]}


def _run_identity(entry: Mapping[str, Any]) -> dict[str, Any]:
  return {key: v for key, v in entry.items() if key != "workers"}


def _check_same(folder, written, wanted):
  differences = _differences(_fixed(written), _fixed(wanted))
  before, now = written["config"]["runs"], wanted["config"]["runs"]
  for label in before.keys() & now.keys():
    differences += _differences(
      *(_run_identity(before[label]), _run_identity(now[label])),
      f"config.runs.{label}",
    )
  if differences:
    raise FolderError(
      f"--workdir={folder} holds another experiment"
      f" ({'; '.join(differences[:3])}); {_REMEDY}"
    )


def _grown(written, wanted):
  """The identity with runs, workers and seeds of both."""
  both = copy.deepcopy(wanted)
  before, now = written["config"], both["config"]
  for key in _GROWING:
    now[key] = list(dict.fromkeys([*before[key], *now[key]]))
  merged = {}
  for label in dict.fromkeys([*before["runs"], *now["runs"]]):
    old, new = (runs.get(label) for runs in (before["runs"], now["runs"]))
    merged[label] = {**(old or {}), **(new or {})}
    if old and new and "workers" in old and "workers" in new:
      lists = (
        [counts] if isinstance(counts, int) else counts
        for counts in (old["workers"], new["workers"])
      )
      merged[label]["workers"] = list(
        dict.fromkeys(n for each in lists for n in each)
      )
  now["runs"] = merged
  return both


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
  """Names the leaves in which two trees of plain data differ."""
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    keys = [*old, *(key for key in new if key not in old)]
    return [
      line
      for key in keys
      for line in _differences(
        old.get(key), new.get(key), f"{path}.{key}" if path else key
      )
    ]
  return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _numbered(root, name, wanted) -> Path:
  """The newest folder of this very experiment, or the next that is free."""
  pattern = re.compile(re.escape(name) + r"-(\d+)")
  matches = (pattern.fullmatch(p.name) for p in root.glob("*") if p.is_dir())
  numbers = sorted(int(match[1]) for match in matches if match)
  for number in reversed(numbers):
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FolderError):
      written = _read_identity(folder)
      if written and all(
        written[key] == wanted[key] for key in ("config", "dataset")
      ):
        return folder
  number = max(numbers, default=0) + 1
  while True:
    folder = root / f"{name}-{number:03d}"
    try:
      folder.mkdir(parents=True)
    except FileExistsError:  # another process was faster
      number += 1
    else:
      return folder


# Cells.


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
  """Holds a lock for a moment, waiting for other processes."""
  with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


class CellInUse(ValueError):
  """Another process trains the cell."""


@contextlib.contextmanager
def claim_cell(
  place: Path, experiment: cells_lib.Experiment, cell: cells_lib.Cell
) -> Iterator[None]:
  """Holds the folder of a cell while it is trained, and writes cell.json.

  Raises:
    CellInUse: if another process trains it.
  """
  place.mkdir(parents=True, exist_ok=True)
  with (place / ".lock").open("w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise CellInUse(
        f"{place} is in use by another process; wait for it, or {_REMEDY}"
      ) from error
    run = experiment.runs[cell.label]
    description = {
      "version": VERSION,
      "cell": cell._asdict(),
      "engine": run.engine,
      "config": cells_lib.only(run, cell),
      "dataset": experiment.dataset_identity,
      "cpus": os.cpu_count(),
    }
    content = storage.to_json(description, indent=2) + "\n"
    storage.write_atomically(place / "cell.json", content)
    yield


def read_cell(place: Path) -> dict[str, Any]:
  """Returns what cell.json says.

  Raises:
    FolderError: if the folder is not that of a cell.
  """
  value = storage.read_json(place / "cell.json")
  if value is None or value.get("version") != VERSION:
    raise FolderError(
      f"{place} is not the folder of a cell: it should be WORKDIR/cells/NAME,"
      " as launch.train makes them"
    )
  return value


def only_cell(folder: Path) -> Path:
  """Returns WORKDIR/cells/NAME, also for a WORKDIR that has one cell.

  Raises:
    FolderError: if it has several, naming them.
  """
  if not (folder / "cells").is_dir():
    return folder
  cells = sorted(path for path in (folder / "cells").iterdir() if path.is_dir())
  if len(cells) != 1:
    names = ", ".join(path.name for path in cells[:5])
    raise FolderError(
      f"{folder} has {len(cells)} cells: name one of {folder}/cells/ ({names})"
    )
  return cells[0]


# What a report needs of a result; one without was written by another version.
RESULT_KEYS = frozenset(
  (
    *("cell", "label", "algorithm", "engine", "recipe", "workers", "seed"),
    *("messages", "updates", "evaluations", "examples", "learning_rate"),
    *("train_loss", "test_loss", "test_accuracy", "diverged"),
  )
)


def finished_result(place: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished and whole, else None: it is
  then made again from its last checkpoint."""
  result = storage.read_json(place / "result.json")
  try:
    whole = (
      set(result) >= RESULT_KEYS
      and len(read_rows(place)) == result["evaluations"]
    )
    with (place / "records.npz").open("rb") as file, np.load(file) as records:
      whole = whole and len(records["loss"]) == result["messages"]
    return result if whole else None
  except Exception:  # whatever is missing or cut short
    return None


def read_rows(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell, from its metrics.jsonl."""
  content = (place / "metrics.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in content.splitlines()]


def read_results(workdir: Path) -> list[dict[str, Any]]:
  """Returns the results of all finished cells of a folder: by workers, then
  run, then seed; by run first where engines are compared."""
  written = storage.read_json(workdir / "config.json") or {}
  labels = list(written.get("config", {}).get("runs", {}))
  places = sorted((workdir / "cells").glob("*"))
  results = list(filter(None, map(finished_result, places)))
  mixed = len({result["engine"] for result in results}) > 1

  def rank(result):
    label, workers = result["label"], result["workers"]
    place = labels.index(label) if label in labels else len(labels)
    sweep = (place, label, workers) if mixed else (workers, place, label)
    return *sweep, result["seed"]

  return sorted(results, key=rank)


_IN_A_ROW = {"message", "update", "train_loss", "test_loss", "test_accuracy"}


def read_rows_so_far(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell that is to go on; a last one that was cut
  short is dropped.

  Raises:
    FolderError: naming the line that is none.
  """
  path, rows = place / "metrics.jsonl", []
  if not path.exists():
    return rows
  content = path.read_text(encoding="utf-8", errors="replace")
  for number, line in enumerate(content.splitlines(True), 1):
    if not line.endswith("\n"):
      break
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if (
      not isinstance(row, dict)
      or not row.keys() >= _IN_A_ROW
      or not (isinstance(row["message"], int))
    ):
      raise FolderError(
        f"{path}, line {number} is no evaluation: {line[:60].strip()!r}. Put"
        " the file back as the run wrote it, or remove it; evaluations that"
        " were made are then made again, with the parameters of now"
      )
    rows.append(row)
  return rows


class CellLog:
  """metrics.jsonl and TensorBoard of one cell."""

  def __init__(
    self, place: Path, board: Path | None, rows: Iterable[Mapping] = ()
  ):
    """Starts the log with the rows that a checkpoint kept; later ones, written
    before a kill, are dropped."""
    rows = list(rows)
    path = place / "metrics.jsonl"
    storage.write_atomically(path, storage.to_lines(rows))
    self._file: IO = path.open("a", encoding="utf-8")
    self._board = None
    if board is not None:
      with contextlib.suppress(ImportError):
        from tensorboardX import SummaryWriter

        step = rows[-1]["message"] + 1 if rows else 0
        self._board = SummaryWriter(str(board), purge_step=step)

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one evaluation."""
    self._file.write(storage.to_lines([row]))
    self._file.flush()
    if self._board is None:
      return
    for key, value in row.items():
      if key in ("workers", "seed", "message", "diverged"):
        continue  # they say which curve and where, and are none
      if isinstance(value, (int, float)) and np.isfinite(value):
        self._board.add_scalar(key, value, row["message"])

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    if self._board is not None:
      self._board.close()
