"""The results folder of an experiment, and the folder of each cell.

WORKDIR/
  config.json            the resolved config, and what the data were
  measurements.json      of this machine, if plans depend on them
  cells/LABEL-nN-sSEED/  one cell
    cell.json            which cell it is, of what config
    checkpoints/         see asgd.experiment.checkpoint
    metrics.jsonl        one row per evaluation, with its checksum
    records.npz          one row per message
    params.msgpack       final parameters, for flax.serialization
    result.json          written last: the cell is finished; checksums of all
    cell.npz             all of these in one; see below
  tensorboard/           the same rows as metrics.jsonl; of several seeds that
                         are finished, their means (asgd.experiment.cell_log)
  metrics.jsonl          all cells' rows
  results.csv, table.txt one row per run and number of workers
  figure.png, .svg, .pdf the figure, and figure.csv with the numbers in it
  report.html            all of it on one page

The files of a finished cell become one, cell.npz: a zip file of the columns of
records, which `numpy.load` reads by their names, and of the other files. A live
cell, which cannot be trained again to the same bits, keeps its files.

The same command with the same folder resumes. Runs, numbers of workers and
seeds may be added; any other change needs another folder. The process that
trains a cell locks it, so several processes may train one experiment.
"""

import contextlib
import copy
import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd import safe_files
from asgd.experiment import cells as cells_lib
from asgd.experiment import code, identities, provenance, schema, storage
from asgd.experiment.cell_files import CELL, FILES, locked, read_file
from asgd.experiment.live_memory import RUNNING
from asgd.experiment.signals import GO_ON

VERSION = 3  # of the layout; another is refused
_REMEDY = "choose another folder with --workdir"
_PUT_BACK = f"and stages were cut by it: put it back as it was, or {_REMEDY}"
_NAMED = 3  # missing cells that an error names
_STARTED = {"config.json.tmp", ".lock"}  # of a run that was killed at once


class FolderError(ValueError):
  """A folder cannot be used for this experiment."""


class Incomplete(Exception):
  """Training has ended, and cells that were asked for have no valid result, or
  fewer messages than were asked for."""


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
      "modules": code.describe(config),
      "jax": f"{jax.__version__} on {jax.default_backend()}",
      "cpus": os.cpu_count(),
      **provenance.describe(),
    },
  }


def open_folder(
  workdir: str | None, name: str, experiment: cells_lib.Experiment
) -> Path:
  """Finds or makes the folder of an experiment, with config.json: `workdir`
  unless it holds something else (FolderError), or the newest of runs/NAME-001,
  -002, ... with this experiment, or the next. A read-only folder is left as it
  is, and its finished cells can be read."""
  wanted = json.loads(storage.to_json(identity(experiment)))
  if workdir is None:
    folder = _numbered(Path("runs"), name, wanted)
  else:
    folder = Path(workdir)
    whole = folder.resolve()  # a link that appears there later is not followed
    if folder.exists() and not folder.is_dir():
      raise _refused(f"--workdir={folder} is a file")
    names = {path.name for path in folder.glob("*")}
    if names - _STARTED and "config.json" not in names:
      raise _refused(
        f"--workdir={folder} is not empty and holds no experiment, which has a"
        " config.json"
      )
    safe_files.make_folder(whole)
  if not safe_files.is_writable(folder):
    written = read_identity(folder)
    if written is None:
      why = f"--workdir={folder} cannot be written to: make it writable"
      raise _refused(why)
    _grown(folder, written, wanted)
    return folder
  with alone(folder):
    written = read_identity(folder)
    if written is not None:
      wanted = _grown(folder, written, wanted)
    storage.write_json(folder / "config.json", storage.sealed(wanted))
    measured = folder / "measurements.json"
    if experiment.measurements and not measured.exists():
      if (folder / "cells").exists():
        raise FolderError(f"{measured} is gone, {_PUT_BACK}")
      storage.write_json(measured, storage.sealed(experiment.measurements))
  return folder


def check_writable(folder: Path, cell: str) -> None:
  """Raises FolderError if a cell is to be trained in a folder that this user
  may only read."""
  if folder.exists() and not safe_files.is_writable(folder):
    raise FolderError(
      f"{cell} is not finished, and {folder} cannot be written to: make it"
      f" writable to train the cell, or {_REMEDY}"
    )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
  """Waits until no other process is within such a block for a folder."""
  opened = safe_files.descriptor(folder / ".lock", os.O_RDWR | os.O_CREAT)
  with os.fdopen(opened, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def read_measurements(folder: Path) -> dict[str, Any] | None:
  """Returns what the build measured with which an experiment began, so that
  plans are the same, if there is such a file; FolderError if it was changed."""
  path = folder / "measurements.json"
  value = storage.read_sealed(path)
  if value is None and path.exists():
    raise FolderError(f"{path} cannot be read or was changed, {_PUT_BACK}")
  return value


def read_identity(folder: Path) -> dict[str, Any] | None:
  """Returns what config.json says, None without one; FolderError if it was
  changed or is of another release."""
  path = folder / "config.json"
  if not path.exists():
    return None
  value = storage.read_json(path) or {}
  if isinstance(value.get("config"), dict) and value.get("version") != VERSION:
    raise _refused(
      f"{path} is of version {value.get('version')} of the layout, and this"
      f" release writes {VERSION}"
    )
  value = storage.read_sealed(path)
  if value is None:
    raise _refused(
      f"{path} cannot be read or was changed: put it back as the run wrote it"
    )
  return value


def _fixed(identity, labels):
  """What may not differ between two parts of one experiment."""
  growing = identities.GROWING
  config = {k: v for k, v in identity["config"].items() if k not in growing}
  runs = {label: dict(config["runs"][label]) for label in labels}
  for entry in runs.values():
    entry.pop("workers", None)
  return {"config": {**config, "runs": runs}, "dataset": identity["dataset"]}


def _grown(folder, written, wanted):
  """Merges two identities that may differ in runs, workers and seeds only."""
  before, now = written["config"], dict(wanted["config"])
  labels = [label for label in before["runs"] if label in now["runs"]]
  differences = identities.differences(
    _fixed(written, labels), _fixed(wanted, labels)
  )
  if differences:
    first = "; ".join(differences[:3])
    raise _refused(f"--workdir={folder} holds another experiment ({first})")

  def union(key, *sections):
    lists = [schema.shared(key, section[key]) for section in sections]
    return list(dict.fromkeys(itertools.chain(*lists)))

  for key in identities.GROWING:
    now[key] = union(key, before, now)
  runs = dict(before["runs"])
  for label, new in now["runs"].items():
    old = runs.get(label, {})
    runs[label] = {**old, **new}
    if "workers" in old and "workers" in new:
      runs[label]["workers"] = union("workers", old, new)
  return {**wanted, "config": {**now, "runs": runs}}


def _numbered(root, name, wanted) -> Path:
  """The newest folder of this very experiment, or the next that is free."""
  pattern = re.compile(re.escape(name) + r"-(\d+)")
  matches = (pattern.fullmatch(p.name) for p in root.glob("*") if p.is_dir())
  numbers = sorted(int(match[1]) for match in matches if match)
  for number in reversed(numbers):
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FolderError):
      written, same = read_identity(folder), ("config", "dataset")
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


@contextlib.contextmanager
def hold_cell(
  place: Path, experiment: cells_lib.Experiment, cell: cells_lib.Cell
) -> Iterator[None]:
  """Locks the folder of a cell and writes cell.json; raises CellInUse if
  another process holds it, FolderError if it is of another experiment."""
  safe_files.make_folder(place)
  with locked(place / ".lock"):
    run = experiment.runs[cell.label]
    config = cells_lib.only(run, cell)
    description = {
      "version": VERSION,
      "cell": cell._asdict(),
      "engine": run.engine,
      "config": config,
      "dataset": experiment.dataset_identity,
      "modules": code.describe(config),
      "cpus": os.cpu_count(),
    }
    path = place / "cell.json"
    now = json.loads(storage.to_json(description))
    differing = _differing(storage.read_json(path), now)
    if differing and not (place / CELL).exists():
      raise _foreign(path, f"is of another experiment ({differing})")
    storage.write_json(path, description)
    yield


def _foreign(path, why):
  return FolderError(
    f"{path} {why}: remove {path.parent} to train the cell from its start, or"
    f" {_REMEDY}"
  )


def _differing(*descriptions):
  """Says in what a cell that has begun, None if none has, differs from this
  one, "" if in nothing."""
  sides = []
  for side in filter(None, descriptions):
    config = side.get("config")
    if isinstance(config, dict):
      config = {k: v for k, v in config.items() if k not in schema.FREE}
      sides.append({"config": config, "dataset": side.get("dataset")})
  return identities.summary(
    identities.differences(*sides) if len(sides) == 2 else []
  )


def read_cell(place: Path) -> dict[str, Any]:
  """Returns what cell.json says; FolderError for a folder of no cell."""
  value = storage.read_json(place / "cell.json")
  if value is None:
    members = storage.read_archive(place / CELL, "cell.json")
    if members is None and (place / CELL).exists():
      raise FolderError(
        f"{place / CELL} {_CHANGED}: the cell is damaged; the asgd train that"
        " made it trains it again"
      )
    value = members and storage.json_object(members["cell.json"])
  version = value and value.get("version")
  if type(version) is int and version != VERSION:
    raise FolderError(
      f"{place} is of version {version} of the layout, and this release reads"
      f" {VERSION}: use the release that wrote it, or {_REMEDY}"
    )
  if value is None or version != VERSION:
    raise FolderError(
      f"{place} is not the folder of a cell: it should be WORKDIR/cells/NAME,"
      " as asgd train makes them"
    )
  return value


def check_own(place: Path, description: Mapping[str, Any]) -> None:
  """Raises FolderError for a cell of another experiment than its folder's."""
  written = _experiment_of(place)
  why = written and identities.foreign(description, written)
  if why:
    raise _foreign(place / "cell.json", f"is of another experiment ({why})")


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


_CHANGED = "was changed or cut since it was written"
_OF_A_RESULT = {"cell", "label", "workers", "seed", "engine"}


def _read_result(place, written=None):
  """Returns (result, None, ""), or (None, a file, its fault): gone, changed, or
  not of the experiment whose config.json is `written`."""
  path = place / CELL
  if path.is_dir():
    return None, path, "is a folder"
  packed = path.exists()
  if packed:
    names = {*FILES, "result.json"} - {"records.npz"}  # those are its columns
    members = storage.read_archive(path, *names) or {}
    texts = (members.get(name, b"") for name in ("result.json", "cell.json"))
    result, description = map(storage.json_object, texts)
    if not (result and description and result.keys() >= _OF_A_RESULT):
      result = None
  else:
    path = place / "result.json"
    result = storage.read_sealed(path)
    description = storage.read_json(place / "cell.json")
  if result is None:
    gone = "was changed" if path.exists() else "is gone"
    return None, path, _CHANGED if packed else gone
  if result.get("cell") != place.name:
    return None, path, f"is of another cell, {result.get('cell')}"
  for name, digest in result.pop("files", {}).items():
    if storage.file_digest(place / name) != digest:
      gone = "was changed" if (place / name).exists() else "is gone"
      return None, place / name, gone
  why = written and identities.foreign(description, written)
  if why:
    return None, path, f"is of another experiment ({why})"
  return result, None, ""


def _experiment_of(place):
  """What config.json says in the folder that a cell is in, if it has one."""
  return storage.read_sealed(place.parent.parent / "config.json")


def fault(place: Path) -> str | None:
  """Says why a cell that has ended does not count: its file, and that it was
  changed or is of another experiment. None: it counts, or has not ended."""
  _, wrong, why = _read_result(place, _experiment_of(place))
  ended = any((place / name).exists() for name in (CELL, "result.json"))
  return f"{wrong} {why}" if wrong and ended else None


def finished_result(
  place: Path, *, repeatable: bool = True
) -> dict[str, Any] | None:
  """Returns the result of a finished cell whose files are all as a run of this
  experiment wrote them, else None. FolderError if a cell that is not
  `repeatable`, as a live one, ended and was changed or is of another
  experiment, or if a folder is in the place of its file."""
  result, wrong, why = _read_result(place, _experiment_of(place))
  if wrong and wrong.is_dir():
    raise FolderError(
      f"{wrong} {why}, and a file of the cell is to be there: remove it, or"
      f" {_REMEDY}"
    )
  ended = any((place / name).exists() for name in ("result.json", FILES[-1]))
  if not wrong or not ended or repeatable:
    return result
  if "another experiment" in why:
    raise _foreign(wrong, why)
  if not (place / RUNNING).exists():
    remedy = "Put it back as the run wrote it"
    if wrong.name == "params.msgpack":
      remedy += f", let asgd replay {place} --restore compute it"
    raise FolderError(
      f"{wrong} {why}, and the run has ended: real time decided what came of"
      f" it, and cannot do so again. {remedy}, or {_REMEDY}"
    )
  return result


def read_rows(place: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell, from its metrics.jsonl."""
  content = read_file(place, "metrics.jsonl").decode()
  return [storage.unsealed(json.loads(line)) for line in content.splitlines()]


def _places(workdir):
  """The folders of cells; whatever else is among them is not looked at."""
  return sorted(p for p in (workdir / "cells").glob("*") if p.is_dir())


def faults(workdir: Path) -> list[str]:
  """Says of each cell of a folder that has ended and does not count why."""
  return list(filter(None, map(fault, _places(workdir))))


def incomplete(workdir: Path, names: Sequence[str]) -> str:
  """Says which of these cells have no valid result, and why the first has none;
  else which lack messages because workers or peers exited; "" if none."""
  places = [workdir / "cells" / name for name in names]
  results = {place: finished_result(place) for place in places}
  absent = [place for place, result in results.items() if result is None]
  if absent:
    return (
      f"only {len(names) - len(absent)} of the {len(names)} cells that were"
      f" asked for are finished, without {_listed(p.name for p in absent)}"
      f" ({fault(absent[0]) or 'it has no result'}); {GO_ON}"
    )
  short = [
    f"{place.name} ({missed} of {result['messages'] + missed})"
    for place, result in results.items()
    if (missed := result.get("missed"))
  ]
  if not short:
    return ""
  return (
    "workers or peers exited, and their messages are missing in"
    f" {_listed(short)}; to train a cell again, remove its folder"
  )


def _listed(texts) -> str:
  texts = list(texts)
  return ", ".join(texts[:_NAMED] + ["..."] * (len(texts) > _NAMED))


def read_results(workdir: Path) -> list[dict[str, Any]]:
  """Returns the results of all finished cells of a folder: by workers, then
  run, then seed; by run first where engines are compared."""
  written = read_identity(workdir)
  labels = list(written["config"]["runs"]) if written else []
  read = (_read_result(place, written)[0] for place in _places(workdir))
  results = list(filter(None, read))
  mixed = len({result["engine"] for result in results}) > 1

  def rank(result):
    label, workers = result["label"], result["workers"]
    place = labels.index(label) if label in labels else len(labels)
    sweep = (place, label, workers) if mixed else (workers, place, label)
    return *sweep, result["seed"]

  return sorted(results, key=rank)
