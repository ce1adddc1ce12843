"""A user's own code: the files of its modules, and whether they are trusted.

A config may name MODULE:FUNCTION. The folder of the config file is on the
import path, also in child processes. Each cell records the files of its
modules, and a replay imports the modules from there. Reading results imports no
module. Code that a folder of another user names runs only with --trust.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import names
from asgd.experiment import storage
from asgd.problems import user_code

_MAX_NAMES = 3  # most names in an error


def _imported_names(config: Mapping[str, Any]) -> list[str]:
  """Returns each MODULE:FUNCTION of a config, except titles of runs."""
  config, runs = dict(config), config.get("runs")
  # A title is any text, such as "asgd:fast", and is never imported.
  if isinstance(runs, Mapping):
    config["runs"] = [
      {k: v for k, v in entry.items() if k != "title"}
      for entry in runs.values()
      if isinstance(entry, Mapping)
    ]
  return list(dict.fromkeys(names.import_paths(config)))


def _owners(cell_folder: Path) -> set[int]:
  """Returns the owners (uid) of a cell's folders and of its config's files."""
  folder = Path(os.path.abspath(cell_folder))
  paths = [folder, *(folder / name for name in ("cell.json", "cell.npz"))]
  # The owner of a folder may replace the files in it.
  if folder.parent.name == "cells":
    workdir = folder.parents[1]
    paths += [folder.parent, workdir, workdir / "config.json"]
  paths = [path for path in paths if os.path.lexists(path)]
  # The owners of links, and of the files that they lead to.
  return {path.lstat().st_uid for path in paths} | {
    path.stat().st_uid for path in paths if path.exists()
  }


def check_trusted(
  cell_folder: Path,
  config: Mapping[str, Any],
  modules: Iterable[str] = (),
  *,
  trust: bool = False,
) -> None:
  """Refuses to run code that the folder of another user names.

  Args:
    cell_folder: WORKDIR/cells/NAME.
    config: the config of the cell; each MODULE:FUNCTION counts.
    modules: more modules; their folders would become importable.
    trust: whether this user allows the code to run.

  Raises:
    ValueError: if code is named, and the effective user of this process does
      not own the cell's folders, cell.json and config.json.
  """
  code_names = [*_imported_names(config), *modules]
  other_owners = _owners(cell_folder) - {os.geteuid()}
  if not code_names or not other_owners or trust:
    return
  raise ValueError(
    f"{cell_folder} was made by another user (uid {min(other_owners)}), and its"
    f" files name code to be run: {', '.join(code_names[:_MAX_NAMES])}. Read"
    " them and that code, then add --trust (in Python trust=True)"
  )


def _module_file(module: str) -> Path | None:
  """Returns the file that a module would be imported from; None without one."""
  # For A.B this imports A. Callers ask only about code that may be run.
  try:
    spec = importlib.util.find_spec(module)
  except (ImportError, ValueError):
    return None
  path = Path(spec.origin) if spec and spec.origin else None
  return path.resolve() if path and path.exists() else None


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns {module: {"file", "sha256", "top"}} for a config's modules, and for
  those of the user that they import, if they were imported.

  "top" is the file or folder that must be importable: the top package's.
  """
  modules = {}
  named_modules = (name.partition(":")[0] for name in _imported_names(config))
  for module in sorted(_with_imports(dict.fromkeys(named_modules))):
    path, top = _module_file(module), _module_file(module.partition(".")[0])
    if path and top:  # built-in modules have no file, and need none
      top = top.parent if top.stem == "__init__" else top
      digest = storage.file_digest(path)
      modules[module] = {"file": str(path), "sha256": digest, "top": str(top)}
  return modules


def _with_imports(modules: Iterable[str]) -> list[str]:
  """Returns modules, and the user's modules that their variables come from."""
  modules = list(modules)
  for name in modules:  # which grows
    imported = sys.modules.get(name)
    for value in list(vars(imported).values()) if imported else ():
      is_module = isinstance(value, types.ModuleType)
      owner = value.__name__ if is_module else getattr(value, "__module__", "")
      is_new = isinstance(owner, str) and owner not in (*modules, "__main__")
      if is_new and owner in sys.modules and user_code.is_users_module(owner):
        modules.append(owner)
  return modules


def files_to_send(described: Mapping[str, Any]) -> list[str]:
  """Returns the files that other machines lack: those not in site-packages."""
  # Other machines have the same packages installed.
  tops = {module["top"] for module in described.values()}
  return sorted(top for top in tops if "site-packages" not in Path(top).parts)


def add_folder(folder: str | Path) -> None:
  """Appends a folder to the import path; earlier folders take precedence."""
  # No module of the folder then hides a module of the library or a package.
  folder = str(Path(folder).resolve())
  if folder not in sys.path:
    sys.path.append(folder)


def make_importable(described: Mapping[str, Any]) -> None:
  """Adds the folders in which `describe` found modules."""
  for module in described.values():
    add_folder(Path(module["top"]).parent)


def changed_modules(described: Mapping[str, Any]) -> Sequence[str]:
  """Returns the modules with another file content than in `described`."""
  return [
    module
    for module, recorded in described.items()
    if not (path := _module_file(module))
    or storage.file_digest(path) != recorded["sha256"]
  ]
