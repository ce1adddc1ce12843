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
makes it another experiment, which needs another folder. Each cell is locked by
the process that trains it, so several may work on one experiment.
"""

import contextlib
import copy
import fcntl
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from asgd.experiment import cells as cells_lib
from asgd.experiment import event_file, schema, storage

VERSION = 1  # of the layout; another is refused
_REMEDY = "choose another folder with --workdir"
_PUT_BACK = f"and stages were cut by it: put it back as it was, or {_REMEDY}"
_GROWING = ("workers", "seeds")  # lists that may get longer
_STARTED = {"config.json.tmp", ".lock"}  # of a run that was killed at once


class FolderError(ValueError):
  """A folder cannot be used for this experiment."""


def _refused(why):
  return FolderError(f"{why}; {_REMEDY}")


def identity(experiment: cells_lib.Experiment) -> dict[str, Any]:
  """Returns what config.json says; what is under "free" may differ."""
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
  """Finds or makes the folder of an experiment, holding config.json: `workdir`
  unless it holds something else (FolderError), or without one the newest of
  runs/NAME-001, -002, ... with this very experiment, or the next."""
  wanted = json.loads(storage.to_json(identity(experiment)))
  if workdir is None:
    folder = _numbered(Path("runs"), name, wanted)
  else:
    folder = Path(workdir)
    if folder.exists() and not folder.is_dir():
      raise _refused(f"--workdir={folder} is a file")
    names = {path.name for path in folder.glob("*")}
    if names - _STARTED and "config.json" not in names:
      raise _refused(f"--workdir={folder} is not empty and holds no experiment")
    folder.mkdir(parents=True, exist_ok=True)
  with (folder / ".lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for other processes
    written = _read_identity(folder)
    if written is not None:
      wanted = _grown(folder, written, wanted)
    storage.write_json(folder / "config.json", wanted)
    measured = folder / "measurements.json"
    if experiment.measurements and not measured.exists():
      if (folder / "cells").exists():
        raise FolderError(f"{measured} is gone, {_PUT_BACK}")
      storage.write_json(measured, experiment.measurements)
  return folder


def read_measurements(folder: Path) -> dict[str, Any] | None:
  """Returns what the build measured with which an experiment began, so that
  plans are the same, if there is such a file; FolderError if it was changed."""
  path = folder / "measurements.json"
  value = storage.read_json(path)
  if value is None and path.exists():
    raise FolderError(f"{path} cannot be read, {_PUT_BACK}")
  return value


def _read_identity(folder):
  path = folder / "config.json"
  if not path.exists():
    return None
  value = storage.read_json(path) or {}
  known, config = value.get("version") == VERSION, value.get("config")
  if not isinstance(config, dict) or (known and not _can_grow(value)):
    raise _refused(f"{path} cannot be read: it is not what a run wrote")
  if not known:
    raise _refused(
      f"{path} is of version {value.get('version')} of the layout, and this"
      f" release writes {VERSION}"
    )
  return value


def _can_grow(identity):
  """Whether an identity has what `_grown` reads of it."""
  config = identity["config"]
  try:
    for key in _GROWING:
      schema.shared(key, config[key])
    for entry in config["runs"].values():
      schema.shared("workers", entry.get("workers", 1))
  except (ValueError, KeyError, AttributeError):
    return False
  return isinstance(identity.get("dataset"), dict)


def _fixed(identity, labels):
  """What may not differ between two parts of one experiment."""
  config = {k: v for k, v in identity["config"].items() if k not in _GROWING}
  runs = {label: dict(config["runs"][label]) for label in labels}
  for entry in runs.values():
    entry.pop("workers", None)
  return {"config": {**config, "runs": runs}, "dataset": identity["dataset"]}


def _grown(folder, written, wanted):
  """Merges two identities that may differ in runs, workers and seeds only."""
  before, now = written["config"], dict(wanted["config"])
  labels = [label for label in before["runs"] if label in now["runs"]]
  differences = _differences(_fixed(written, labels), _fixed(wanted, labels))
  if differences:
    first = "; ".join(differences[:3])
    raise _refused(f"--workdir={folder} holds another experiment ({first})")

  def union(key, *sections):
    lists = [schema.shared(key, section[key]) for section in sections]
    return list(dict.fromkeys(itertools.chain(*lists)))

  for key in _GROWING:
    now[key] = union(key, before, now)
  runs = dict(before["runs"])
  for label, new in now["runs"].items():
    old = runs.get(label, {})
    runs[label] = {**old, **new}
    if "workers" in old and "workers" in new:
      runs[label]["workers"] = union("workers", old, new)
  return {**wanted, "config": {**now, "runs": runs}}


def _differences(old, new, path="") -> list[str]:
  """Names the leaves in which two trees of plain data differ."""
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    lines, above = [], f"{path}." if path else ""
    for key in {**old, **new}:
      lines += _differences(old.get(key), new.get(key), above + key)
    return lines
  return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _numbered(root, name, wanted) -> Path:
  """The newest folder of this very experiment, or the next that is free."""
  pattern = re.compile(re.escape(name) + r"-(\d+)")
  matches = (pattern.fullmatch(p.name) for p in root.glob("*") if p.is_dir())
  numbers = sorted(int(match[1]) for match in matches if match)
  for number in reversed(numbers):
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FolderError):
      written, same = _read_identity(folder), ("config", "dataset")
      if written and all(written[key] == wanted[key] for key in same):
        return folder
  number = max(numbers, default=0)
  while True:
    number += 1
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FileExistsError):  # another process was faster
      folder.mkdir(parents=True)
      return folder


# Cells.


class CellInUse(ValueError):
  """Another process trains the cell."""


@contextlib.contextmanager
def claim_cell(
  place: Path, experiment: cells_lib.Experiment, cell: cells_lib.Cell
) -> Iterator[None]:
  """Holds the folder of a cell while it is trained, and writes cell.json;
  raises CellInUse if another process holds it."""
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
    storage.write_json(place / "cell.json", description)
    yield


def read_cell(place: Path) -> dict[str, Any]:
  """Returns what cell.json says; FolderError for a folder of no cell."""
  value = storage.read_json(place / "cell.json")
  if value is None or value.get("version") != VERSION:
    raise FolderError(
      f"{place} is not the folder of a cell: it should be WORKDIR/cells/NAME,"
      " as launch.train makes them"
    )
  return value


def only_cell(folder: Path) -> Path:
  """Returns WORKDIR/cells/NAME, also for a WORKDIR that has one cell."""
  if not (folder / "cells").is_dir():
    return folder
  cells = sorted(path for path in (folder / "cells").iterdir() if path.is_dir())
  if len(cells) != 1:
    names = ", ".join(path.name for path in cells[:5])
    raise FolderError(
      f"{folder} has {len(cells)} cells: name one of {folder}/cells/ ({names})"
    )
  return cells[0]


_OF_A_CELL = ("cell", "algorithm", "engine", "workers", "seed")  # in its rows
_TEXTS = ("cell", "label", "algorithm", "engine", "recipe")
_NUMBERS = {
  *("workers", "seed", "messages", "updates", "evaluations", "examples"),
  *("learning_rate", "train_loss", "test_loss", "test_accuracy", "diverged"),
}
# What a report needs of a result; one without was written by another version.
RESULT_KEYS = {*_TEXTS, *_NUMBERS}
_IN_A_ROW = {"message", "update", "train_loss", "test_loss", "test_accuracy"}
# Of some engines, and of some evaluations.
_MEASURES = {
  *("epoch", "time", "seconds", "simulated_time", "staleness_mean", "gap_mean"),
  *("test_measure", "accepted", "sharpness", "rate_x_sharpness", "sustained"),
}


def finished_result(place: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished, and whose files are whole
  and what a run wrote, as far as reports read them; else None."""
  result = storage.read_json(place / "result.json")
  try:
    rows = read_rows(place)
    # A file that is cut short is closed, too.
    with (place / "records.npz").open("rb") as file, np.load(file) as records:
      counts = len(rows), len(records["loss"])
    whole = counts == (result["evaluations"], result["messages"])
    whole = whole and (place / "params.msgpack").stat().st_size > 0
    known = _is_result(result, place)
    known = known and all(_is_row(row, result) for row in rows)
    return result if whole and known else None
  except Exception:  # whatever is missing, cut short or of another kind
    return None


def _is_result(result, place):
  """Whether it is one of this cell, with all that reports read of it."""
  name = f"{result['label']}-n{result['workers']}-s{result['seed']}"
  return (
    name == result["cell"] == place.name
    and result["engine"] == storage.read_json(place / "cell.json")["engine"]
    and all(isinstance(result[key], str) for key in _TEXTS)
    and _are_numbers(result, _NUMBERS)
  )


def _is_row(row, result):
  same = all(row[key] == result[key] for key in _OF_A_CELL)
  return same and _are_numbers(row, _IN_A_ROW)


def _are_numbers(row, keys):
  """Whether a row has numbers, or None, of these keys and as its measures."""
  values = [row[key] for key in {*keys, *(_MEASURES & row.keys())}]
  return all(value is None or math.isfinite(value) for value in values)


def read_rows(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell, from its metrics.jsonl."""
  content = (place / "metrics.jsonl").read_text(encoding="utf-8")
  return [json.loads(line) for line in content.splitlines()]


def read_results(workdir: Path) -> list[dict[str, Any]]:
  """Returns the results of all finished cells of a folder: by workers, then
  run, then seed; by run first where engines are compared."""
  written = _read_identity(workdir)
  labels = list(written["config"]["runs"]) if written else []
  places = sorted((workdir / "cells").glob("*"))
  results = list(filter(None, map(finished_result, places)))
  mixed = len({result["engine"] for result in results}) > 1

  def rank(result):
    label, workers = result["label"], result["workers"]
    place = labels.index(label) if label in labels else len(labels)
    sweep = (place, label, workers) if mixed else (workers, place, label)
    return *sweep, result["seed"]

  return sorted(results, key=rank)


def read_rows_so_far(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell that is to go on; a last one that was cut
  short is dropped, and FolderError names another line that is none."""
  path, rows = place / "metrics.jsonl", []
  if not path.exists():
    return rows
  content = path.read_text(encoding="utf-8", errors="replace")
  for number, line in enumerate(content.splitlines(True), 1):
    if not line.endswith("\n"):
      break
    try:
      row = json.loads(line)
      known = row.keys() >= _IN_A_ROW and isinstance(row["message"], int)
    except (ValueError, AttributeError):
      known = False
    if not known:
      raise FolderError(
        f"{path}, line {number} is no evaluation: {line[:60].strip()!r}. Put"
        " the file back as the run wrote it, or remove it; evaluations that"
        " were made are then made again, with the parameters of now"
      )
    rows.append(row)
  return rows


class CellLog:
  """metrics.jsonl and TensorBoard of one cell."""

  def __init__(self, place: Path, board: Path, rows: Sequence[Mapping]):
    """Starts the log with the rows that a checkpoint kept; later ones, written
    before a kill, are dropped."""
    path = place / "metrics.jsonl"
    storage.write_atomically(path, storage.to_lines(rows))
    self._file: IO = path.open("a", encoding="utf-8")
    step = rows[-1]["message"] + 1 if rows else 0
    self._board = event_file.open_board(board, purge_step=step)

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one evaluation."""
    self._file.write(storage.to_lines([row]))
    self._file.flush()
    for key, value in row.items():
      if key in ("workers", "seed", "message", "diverged"):
        continue  # they say which curve and where, and are none
      if isinstance(value, (int, float)) and np.isfinite(value):
        self._board.add_scalar(key, value, row["message"])

  def close(self) -> None:
    """Closes the files."""
    self._file.close()
    self._board.close()
