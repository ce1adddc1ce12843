"""The results folder of an experiment, and the folder of each cell.

WORKDIR/
  config.json            the resolved config, and the identity of the data
  measurements.json      of this machine, if plans depend on them
  cells/LABEL-nN-sSEED/  one cell
    cell.json            run, workers and seed of the cell, and its config
    checkpoints/         see asgd.experiment.checkpoint
    metrics.jsonl        one row per evaluation, with its checksum
    progress.json        state of the cell, once a second, for asgd watch
    records.npz          one row per message
    params.msgpack       final parameters, for flax.serialization
    result.json          written last; with checksums of the other files
    cell.npz             all of these in one file; see below
  tensorboard/           the rows of metrics.jsonl, and means over finished
                         seeds (asgd.experiment.cell_log)
  metrics.jsonl          all cells' rows
  results.csv, table.txt one row per run and number of workers
  figure.png, .svg, .pdf the figure, and figure.csv with the numbers in it
  report.html            all of it on one page

The files of a finished cell are packed into cell.npz. This zip file has the
columns of the records, which `numpy.load` reads by name, and the other files. A
live cell keeps its files, because training cannot repeat it to the bit.

The same command with the same folder resumes. Runs, numbers of workers and
seeds may be added; any other change needs another folder. The process that
trains a cell locks it, so several processes may train one experiment.
"""

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd import safe_files
from asgd.checks import RERUN
from asgd.experiment import cells as cells_lib
from asgd.experiment import code, identities, provenance, schema, storage
from asgd.experiment.cell_files import ARCHIVE, FILES, locked_cell, read_file
from asgd.experiment.live_memory import RUNNING

VERSION = 3  # of the layout; folders of other versions are refused
# Ends of errors, and words that several errors share.
_REMEDY = "choose another folder with --workdir"
_RESTORE = f"and the stages depend on it: put it back as it was, or {_REMEDY}"
_OTHER_EXPERIMENT = "is of another experiment ({})"
_MAX_NAMED = 3  # most missing cells that an error names
_START_FILES = {"config.json.tmp", ".lock"}  # left by a run killed at its start


class FolderError(ValueError):
  """A folder cannot be used for this experiment."""


class Incomplete(Exception):
  """Training has ended, but a requested cell has no valid result, or has fewer
  messages than requested."""


def _refusal(reason: str) -> FolderError:
  return FolderError(f"{reason}; {_REMEDY}")


def identity(experiment: cells_lib.Experiment) -> dict[str, Any]:
  """Returns the contents of config.json for an experiment. Values under "free"
  may differ when the experiment resumes."""
  config = copy.deepcopy(experiment.config)
  free = {key: config.pop(key) for key in schema.FREE_KEYS}
  # `engine` and `only` move into the entries of the runs: two configs that
  # train the same cells have one identity.
  engine, labels = config.pop("engine"), config.pop("only")
  for entry in config["runs"].values():
    entry.setdefault("engine", engine)
  if labels:
    config["runs"] = {label: config["runs"][label] for label in labels}
  return {
    "version": VERSION,
    "config": config,
    "dataset": identities.of_data(experiment),
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
  """Finds or makes the folder of an experiment, and writes its config.json.

  Without `workdir`, it is the newest of runs/NAME-001, -002, ... that has this
  experiment, else the next number. A read-only folder is not changed. Raises
  FolderError for other contents, ValueError for a folder that cannot be opened.
  """
  with safe_files.opening(f"--workdir={workdir or 'runs'}"):
    return _find_or_make(workdir, name, experiment)


def _find_or_make(
  workdir: str | None, name: str, experiment: cells_lib.Experiment
) -> Path:
  """See `open_folder`."""
  # Through JSON, so that it can be compared with the content of a file.
  new_identity = json.loads(storage.to_json(identity(experiment)))
  if workdir is None:
    folder = _numbered_folder(Path("runs"), name, new_identity)
  else:
    folder = Path(workdir)
    # Resolved first: if a link replaces the folder later, `make_folder` fails.
    path = folder.resolve()
    if folder.exists() and not folder.is_dir():
      raise _refusal(f"--workdir={folder} is a file")
    # The files of an experiment are not mixed with those of other programs.
    names = {path.name for path in folder.glob("*")}
    if names - _START_FILES and "config.json" not in names:
      raise _refusal(
        f"--workdir={folder} is not empty and holds no experiment, which has a"
        " config.json"
      )
    safe_files.make_folder(path)
  if not safe_files.is_writable(folder):
    old_identity = read_identity(folder)
    if old_identity is None:
      raise _refusal(f"--workdir={folder} is read-only: make it writable")
    _merged_identity(folder, old_identity, new_identity)  # its checks only
    return folder
  # Other commands may add runs to the same folder at this moment.
  with storage.locked_folder(folder):
    old_identity = read_identity(folder)
    if old_identity is not None:
      new_identity = _merged_identity(folder, old_identity, new_identity)
    storage.write_json(folder / "config.json", storage.sealed(new_identity))
    path = folder / "measurements.json"
    if experiment.measurements and not path.exists():
      # The plans of trained cells came from measurements that are now lost.
      if (folder / "cells").exists():
        raise FolderError(f"{path} is missing, {_RESTORE}")
      storage.write_json(path, storage.sealed(experiment.measurements))
  return folder


def check_writable(folder: Path, cell: str) -> None:
  """Raises FolderError if a cell has to be trained in a read-only folder."""
  if folder.exists() and not safe_files.is_writable(folder):
    raise FolderError(
      f"{cell} is not finished, and {folder} cannot be written to: make it"
      f" writable to train the cell, or {_REMEDY}"
    )


def read_measurements(folder: Path) -> dict[str, Any] | None:
  """Returns the measurements that an experiment's plans use; None if there are
  none. Raises FolderError if the file was changed."""
  path = folder / "measurements.json"
  value = storage.read_sealed(path)
  if value is None and path.exists():
    raise FolderError(f"{path} cannot be read or was changed, {_RESTORE}")
  return value


def read_identity(folder: Path) -> dict[str, Any] | None:
  """Returns the contents of config.json; None if there is none. Raises
  FolderError if it was changed, or another release wrote it."""
  path = folder / "config.json"
  if not path.exists():
    return None
  # The version comes first: another release may seal files in another way.
  content = storage.read_json(path) or {}
  version = content.get("version")
  if isinstance(content.get("config"), dict) and version != VERSION:
    raise _refusal(
      f"{path} is of version {version} of the layout, and this release writes"
      f" {VERSION}"
    )
  value = storage.read_sealed(path)
  if value is None or not isinstance(value.get("config"), dict):
    raise _refusal(
      f"{path} cannot be read or was changed: put it back as the run wrote it"
    )
  return value


def _merged_identity(
  folder: Path, old_identity: Mapping[str, Any], new_identity: Mapping[str, Any]
) -> dict[str, Any]:
  """Merges the written identity and a new one. Raises FolderError if they
  differ in more than runs, workers and seeds."""
  differences = identities.changes(old_identity, new_identity)
  if differences:
    text = identities.summary(differences)
    raise _refusal(f"--workdir={folder} holds another experiment ({text})")
  return identities.merge(old_identity, new_identity)


def _numbered_folder(
  root: Path, name: str, new_identity: Mapping[str, Any]
) -> Path:
  """Returns the newest folder of the same experiment, else a new one with the
  next free number."""
  pattern = re.compile(re.escape(name) + r"-(\d+)")
  matches = (pattern.fullmatch(p.name) for p in root.glob("*") if p.is_dir())
  numbers = sorted(int(match[1]) for match in matches if match)
  for number in reversed(numbers):
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FolderError):  # damaged, or of another release
      old = read_identity(folder)
      if old and all(old[k] == new_identity[k] for k in ("config", "dataset")):
        return folder
  number = max(numbers, default=0)
  while True:
    number += 1
    folder = root / f"{name}-{number:03d}"
    with contextlib.suppress(FileExistsError):  # another process was faster
      folder.mkdir(parents=True)
      return folder


@contextlib.contextmanager
def hold_cell(
  cell_folder: Path, experiment: cells_lib.Experiment, cell: cells_lib.Cell
) -> Iterator[None]:
  """Locks the folder of a cell and writes cell.json. Raises CellInUse if
  another process holds the lock, FolderError if the folder has another
  experiment's cell."""
  safe_files.make_folder(cell_folder)
  with locked_cell(cell_folder):
    run = experiment.runs[cell.label]
    config = cells_lib.single_cell_config(run, cell)
    description = {
      "version": VERSION,
      "cell": cell._asdict(),
      "engine": run.engine,
      "config": config,
      "dataset": experiment.dataset_identity,
      "modules": code.describe(config),
      "cpus": os.cpu_count(),
      **getattr(experiment.dataset, "notes", {}),
    }
    path = cell_folder / "cell.json"
    content = json.loads(storage.to_json(description))
    differences = _cell_differences(storage.read_json(path), content)
    # A packed cell was checked when its result was read.
    if differences and not (cell_folder / ARCHIVE).exists():
      raise _foreign_cell_error(path, _OTHER_EXPERIMENT.format(differences))
    storage.write_json(path, description)
    yield


def _foreign_cell_error(path: Path, reason: str) -> FolderError:
  """Returns the error for a cell of another experiment."""
  return FolderError(
    f"{path} {reason}: remove {path.parent} to train the cell from its start,"
    f" or {_REMEDY}"
  )


def _cell_differences(*descriptions: dict[str, Any] | None) -> str:
  """Returns the differences of two contents of cell.json; "" if there are none
  or one of them is None."""
  contents = []
  for description in filter(None, descriptions):
    config = description.get("config")
    # A damaged file counts as missing: the new content replaces it.
    if isinstance(config, dict):
      config = {k: v for k, v in config.items() if k not in schema.FREE_KEYS}
      contents.append({"config": config, "dataset": description.get("dataset")})
  if len(contents) < 2:
    return ""
  old, new = contents
  return identities.summary(identities.differences(old, new))


def read_cell(cell_folder: Path) -> dict[str, Any]:
  """Returns the contents of cell.json. Raises FolderError if the folder is no
  cell's."""
  # [1] From the file of a cell in training, or of a live cell.
  with safe_files.opening(cell_folder):
    value = storage.read_json(cell_folder / "cell.json")
  # [2] From the archive of a finished cell.
  if value is None:
    archive = cell_folder / ARCHIVE
    members = storage.read_archive(archive, "cell.json")
    if members is None and archive.exists():
      raise FolderError(
        f"{archive} {_CHANGED}: the cell is damaged. Run the asgd train that"
        " made it, which trains the cell again"
      )
    value = members and storage.json_object(members["cell.json"])
  version = value and value.get("version")
  if type(version) is int and version != VERSION:
    raise FolderError(
      f"{cell_folder} is of version {version} of the layout, and this release"
      f" reads {VERSION}: use the release that wrote it, or {_REMEDY}"
    )
  if value is None or version != VERSION:
    if (cell_folder / "cell.json").exists():
      remedy = "cell.json is damaged or empty: restore it as the run wrote it"
      raise FolderError(f"{cell_folder}/{remedy}")
    fault_text = "does not exist"
    if cell_folder.exists():
      fault_text = "is not the folder of a cell"
    raise FolderError(
      f"{cell_folder} {fault_text}: it should be WORKDIR/cells/NAME, as asgd"
      " train makes them, or the folder= of a training call in Python"
    )
  return value


def check_own(cell_folder: Path, description: Mapping[str, Any]) -> None:
  """Raises FolderError if a cell is of another experiment than its WORKDIR."""
  identity = _read_experiment(cell_folder)
  difference = identity and identities.difference_from(description, identity)
  if difference:
    path = cell_folder / "cell.json"
    raise _foreign_cell_error(path, _OTHER_EXPERIMENT.format(difference))


def only_cell(folder: Path) -> Path:
  """Returns the folder of a cell: `folder` itself, or its only cell if it is a
  WORKDIR. Raises FolderError for a WORKDIR with more cells or none."""
  with safe_files.opening(folder):
    if not (folder / "cells").is_dir():
      return folder
    cells = _cell_folders(folder)
  if len(cells) != 1:
    names = ", ".join(path.name for path in cells[:5])
    raise FolderError(
      f"{folder} has {len(cells)} cells: name one of {folder}/cells/ ({names})"
    )
  return cells[0]


_CHANGED = "was changed or cut since it was written"
_RESULT_KEYS = {"cell", "label", "workers", "seed", "engine"}  # of any result


def _read_result(
  cell_folder: Path, identity: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any] | None, Path | None, str]:
  """Returns (result, None, ""), or (None, file, fault): the file is missing or
  changed, or is of another cell or experiment (`identity`: its config.json)."""
  path = cell_folder / ARCHIVE
  if path.is_dir():
    return None, path, "is a folder"
  # [1] The result and cell.json, from the archive or from their files.
  packed = path.exists()
  if packed:
    # The columns of records.npz are members of the archive.
    names = {*FILES, "result.json"} - {"records.npz"}
    members = storage.read_archive(path, *names) or {}
    contents = (members.get(name, b"") for name in ("result.json", "cell.json"))
    result, description = map(storage.json_object, contents)
    result = description and result
  else:
    path = cell_folder / "result.json"
    result = storage.read_sealed(path)
    description = storage.read_json(cell_folder / "cell.json")
  if not (result and result.keys() >= _RESULT_KEYS):
    fault_of_file = "was changed" if path.exists() else "is missing"
    return None, path, _CHANGED if packed else fault_of_file
  # [2] Whether the result is of this cell: a folder may be a renamed copy.
  if result.get("cell") != cell_folder.name:
    return None, path, f"is of another cell, {result.get('cell')}"
  # [3] The other files. An archive has no "files": one checksum covers it.
  for name, digest in result.pop("files", {}).items():
    file = cell_folder / name
    if storage.file_digest(file) != digest:
      return None, file, "was changed" if file.exists() else "is missing"
  # [4] Whether the result is of this experiment.
  difference = identity and identities.difference_from(description, identity)
  if difference:
    return None, path, _OTHER_EXPERIMENT.format(difference)
  return result, None, ""


def _read_experiment(cell_folder: Path) -> dict[str, Any] | None:
  """Returns the contents of the config.json of a cell's WORKDIR, if any."""
  return storage.read_sealed(cell_folder.parent.parent / "config.json")


def fault(cell_folder: Path) -> str | None:
  """Returns why the result of a cell that has ended is not valid: a file and
  its fault. None: the result is valid, or the cell has not ended."""
  _, file, reason = _read_result(cell_folder, _read_experiment(cell_folder))
  last_files = ARCHIVE, "result.json"
  has_ended = any((cell_folder / name).exists() for name in last_files)
  return f"{file} {reason}" if file and has_ended else None


def finished_result(
  cell_folder: Path, *, repeatable: bool = True
) -> dict[str, Any] | None:
  """Returns the result of a finished cell; None if it has no valid one. Raises
  FolderError if a folder has the name of a cell's file, or if a cell that is
  not `repeatable`, such as a live one, has ended without a valid result."""
  identity = _read_experiment(cell_folder)
  result, file, reason = _read_result(cell_folder, identity)
  if file and file.is_dir():
    raise FolderError(
      f"{file} {reason}, but it must be a file of the cell: remove it, or"
      f" {_REMEDY}"
    )
  # The parameters are written before result.json, at the end of a run.
  end_files = "result.json", FILES[-1]
  has_ended = any((cell_folder / name).exists() for name in end_files)
  if not file or not has_ended or repeatable:
    return result
  if "another experiment" in reason:
    raise _foreign_cell_error(file, reason)
  # With running.json the run can still resume and write its result.
  if not (cell_folder / RUNNING).exists():
    remedy = "Restore it as the run wrote it"
    if file.name == "params.msgpack":
      remedy += f", compute it with asgd replay {cell_folder} --restore"
    raise FolderError(
      f"{file} {reason}, and the run has ended: its order followed from"
      f" real time, so it cannot be repeated. {remedy}, or {_REMEDY}"
    )
  return result


def read_rows(cell_folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell, from its metrics.jsonl."""
  content = read_file(cell_folder, "metrics.jsonl").decode()
  return [storage.unsealed(json.loads(line)) for line in content.splitlines()]


def _cell_folders(workdir: Path) -> list[Path]:
  """Returns the folders of cells; files beside them are ignored."""
  return sorted(p for p in (workdir / "cells").glob("*") if p.is_dir())


def faults(workdir: Path) -> list[str]:
  """Returns the `fault` of each cell in a folder that has a fault."""
  return list(filter(None, map(fault, _cell_folders(workdir))))


def incomplete(workdir: Path, names: Sequence[str]) -> str:
  """Returns a text on the cells without a valid result, else on cells that lack
  messages because workers or peers exited; "" if there are none."""
  folders = [workdir / "cells" / name for name in names]
  readings = {folder: finished_result(folder) for folder in folders}
  results = {folder: result for folder, result in readings.items() if result}
  unfinished = [folder for folder in folders if folder not in results]
  if unfinished:
    return (
      f"only {len(results)} of the {len(names)} requested cells are"
      f" finished, without {_join_names(p.name for p in unfinished)}"
      f" ({fault(unfinished[0]) or 'it has no result'}); {RERUN}"
    )
  short_cells = [
    f"{folder.name} ({missed} of {result['messages'] + missed})"
    for folder, result in results.items()
    if (missed := result.get("missed"))
  ]
  if not short_cells:
    return ""
  return (
    "workers or peers exited, and their messages are missing in"
    f" {_join_names(short_cells)}; to train a cell again, remove its folder"
  )


def _join_names(texts: Iterable[str]) -> str:
  """Joins texts with commas. "..." stands for all after the first few."""
  texts = list(texts)
  return ", ".join(texts[:_MAX_NAMED] + ["..."] * (len(texts) > _MAX_NAMED))


def read_results(workdir: Path) -> list[dict[str, Any]]:
  """Returns the results of all finished cells of a folder. They are sorted by
  workers, run and seed; if engines are compared, by run, workers and seed."""
  identity = read_identity(workdir)
  labels = list(identity["config"].get("runs", {})) if identity else []
  folders = _cell_folders(workdir)
  readings = (_read_result(folder, identity)[0] for folder in folders)
  results = list(filter(None, readings))
  compares_engines = len({result["engine"] for result in results}) > 1

  def rank(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the sort key of a result."""
    label, workers = result["label"], result["workers"]
    # By the config's order of runs, then by name.
    run = (labels.index(label) if label in labels else len(labels)), label
    ranks = (*run, workers) if compares_engines else (workers, *run)
    return *ranks, result["seed"]

  return sorted(results, key=rank)
