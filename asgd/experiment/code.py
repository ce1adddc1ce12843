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
  elif names.is_import(value) and value.partition(":")[0].isidentifier():
    yield value.partition(":")[0]


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns, of each module that a config names, its file and checksum."""
  out = {}
  for module in sorted(set(_named(config))):
    try:
      spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
      continue
    if spec is None or spec.origin is None or not Path(spec.origin).exists():
      continue
    path = Path(spec.origin).resolve()
    out[module] = {"file": str(path), "sha256": storage.file_digest(path)}
  return out


def add_folder(folder: str | Path) -> None:
  """Makes modules in a folder importable; those that are importable already
  come first."""
  folder = str(Path(folder).resolve())
  if folder not in sys.path:
    sys.path.append(folder)


def make_importable(described: Mapping[str, Any]) -> None:
  """Adds the folders in which `describe` found modules."""
  for module in described.values():
    path = Path(module["file"])
    add_folder(path.parent.parent if path.stem == "__init__" else path.parent)


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
