"""Shared parts of data sources: names, files, tokenizers, shared memory."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from asgd import checks, names
from asgd.data import formats
from asgd.data.download import DataError


def freeze(arrays: Iterable[np.ndarray]) -> None:
  """Makes arrays read-only: every worker reads the same memory."""
  for array in arrays:
    array.setflags(write=False)


def draw_generated(
  kind: str,
  name: str,
  loaders: Mapping[str, Callable[..., Any]],
  data_dir: str | os.PathLike[str] | None,
  options: Mapping[str, Any],
) -> Any:
  """Returns the data "generated", made with its options. For another name it
  returns None, and the caller loads the files.

  Args:
    kind: the kind of the data, for errors.
    name: a name of `loaders`, one of which is "generated".
    loaders: the functions by their names.
    data_dir: path of files; must be None for "generated".
    options: the options of the loader "generated" only.

  Raises:
    ValueError: for an unknown name, and for a folder or options that the data
      do not take.
  """
  # Check the name first: an error about options would hide a typing error.
  loader = names.lookup(kind, name, loaders)
  if name != "generated":
    for key in options:
      raise ValueError(
        f"{key} is only an option of {kind} 'generated'; drop it"
      )
    return None
  if data_dir is not None:
    raise ValueError(
      f"{kind} {name!r} are drawn: leave data_dir {str(data_dir)!r} out"
    )
  return names.call(kind, name, loader, options)


def scikit_learn(module: str, needed_by: str) -> ModuleType:
  """Imports a module of scikit-learn, which is an extra.

  Args:
    module: as in `sklearn.MODULE`.
    needed_by: the data or the file that needs it, for the error.

  Raises:
    DataError: if scikit-learn is not installed.
  """
  try:
    return importlib.import_module(f"sklearn.{module}")
  except ImportError as error:
    raise DataError(
      f"{needed_by} needs scikit-learn ({error}); pip install 'asgd[sklearn]'"
    ) from None


def refuse_folder(
  name: str, data_dir: str | os.PathLike[str] | None, owner: str
) -> None:
  """Raises ValueError if a folder is given for data that `owner` contains."""
  if data_dir is not None:
    raise ValueError(
      f"{name} is embedded in {owner} and takes no data_dir, not"
      f" {str(data_dir)!r}; leave it out"
    )


def file_of_package(package: str, *parts: str) -> Path | None:
  """Returns the path of a file of an installed package, without importing it;
  None without the package or the file."""
  # A package may have several roots (namespace packages).
  spec = importlib.util.find_spec(package)
  for root in (spec and spec.submodule_search_locations) or ():
    path = Path(root, *parts)
    if path.is_file():
      return path
  return None


def file_of(kind: str, data_dir: str | os.PathLike[str] | None) -> Path:
  """Returns the path of a user's own file; ValueError if there is none."""
  if data_dir is None:
    raise ValueError(f"the {kind} 'file' needs data_dir, the path of a file")
  return Path(os.path.expanduser(checks.path("data_dir", data_dir)))


def read_tokenizer(path: Path) -> Any:
  """Returns the tokenizer of a file; DataError if it cannot be read."""
  try:
    # Imported here: only users of such a file need the package.
    import tokenizers
  except ImportError:
    raise DataError(
      f"{path} needs the package tokenizers; pip install tokenizers"
    ) from None
  with formats.reading(path, Exception):  # tokenizers raises plain Exceptions
    return tokenizers.Tokenizer.from_file(str(path))
