"""A user's own code: where it is imported from, and what it was.

A config may name MODULE:FUNCTION. The folder of the config file is on the path
of the process that read it, and so on that of the processes it starts. What was
imported is written beside what it was used for; a replay, which has no config
file, looks in the same folders.
"""

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd import names
from asgd.experiment import storage


def _named(value: Any) -> Iterator[str]:
  """Yields the modules that a config names."""
  if isinstance(value, Mapping):
    for inner in value.values():
      yield from _named(inner)
  elif isinstance(value, list | tuple):
    for inner in value:
      yield from _named(inner)
  elif names.is_import(value):
    module = value.partition(":")[0]
    if all(part.isidentifier() for part in module.split(".")):
      yield module


def _file(module: str) -> Path | None:
  """Returns where a module would be imported from."""
  try:
    spec = importlib.util.find_spec(module)
  except (ImportError, ValueError):
    return None
  path = Path(spec.origin) if spec and spec.origin else None
  return path.resolve() if path and path.exists() else None


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns, of each module that a config names, its file, a checksum of it,
  and the file or folder that is to be importable for it."""
  out = {}
  for module in sorted(set(_named(config))):
    path, top = _file(module), _file(module.partition(".")[0])
    if path and top:
      top = top.parent if top.stem == "__init__" else top
      digest = storage.file_digest(path)
      out[module] = {"file": str(path), "sha256": digest, "top": str(top)}
  return out


def to_send(described: Mapping[str, Any]) -> list[str]:
  """Returns what other machines lack of it: what is not installed here."""
  tops = {module["top"] for module in described.values()}
  return sorted(top for top in tops if "site-packages" not in Path(top).parts)


def add_folder(folder: str | Path) -> None:
  """Makes modules in a folder importable; those that are importable already
  come first."""
  folder = str(Path(folder).resolve())
  if folder not in sys.path:
    sys.path.append(folder)


def make_importable(described: Mapping[str, Any]) -> None:
  """Adds the folders in which `describe` found modules."""
  for module in described.values():
    add_folder(Path(module["top"]).parent)


def changed(
  described: Mapping[str, Any], config: Mapping[str, Any]
) -> Sequence[str]:
  """Returns the modules that are not what they were."""
  now = describe(config)
  return [
    module
    for module, was in described.items()
    if now.get(module, {}).get("sha256") != was["sha256"]
  ]
