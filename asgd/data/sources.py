"""Shared parts of data sources: names, files, tokenizers, shared memory."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from asgd import names
from asgd.data import formats
from asgd.data.download import DataError


def freeze(arrays: Iterable[np.ndarray]) -> None:
  """Makes arrays read-only: every worker reads the same memory."""
  for array in arrays:
    array.setflags(write=False)


def drawn(
  kind: str,
  name: str,
  loaders: Mapping[str, Callable[..., Any]],
  data_dir: str | os.PathLike | None,
  options: Mapping[str, Any],
) -> Any:
  """Returns the data "generated", made with its options; None for another name,
  whose files the caller loads.

  Args:
    kind: of the data, for errors.
    name: of `loaders`, one of which is "generated".
    loaders: the functions by their names.
    data_dir: path of files; must be None for "generated".
    options: of the loader "generated" only.

  Raises:
    ValueError: for an unknown name, and for a folder or options that the data
      do not take.
  """
  maker = names.lookup(kind, name, loaders)
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
  return names.call(kind, name, maker, options)


def embedded(name: str, data_dir: str | os.PathLike | None) -> ModuleType:
  """Returns `sklearn.datasets`, for data that scikit-learn contains; ValueError
  if a folder is given."""
  _refuse_folder(name, data_dir)
  from sklearn import datasets

  return datasets


def embedded_file(
  name: str, data_dir: str | os.PathLike | None, filename: str
) -> Path:
  """Returns the path of a data file of scikit-learn without importing it, which
  would take a second. ValueError if a folder is given; DataError if the file is
  not installed."""
  _refuse_folder(name, data_dir)
  path = file_of_package("sklearn", "datasets", "data", filename)
  if path is None:
    raise DataError(
      f"the installed scikit-learn has no datasets/data/{filename}; pip install"
      " --force-reinstall scikit-learn"
    )
  return path


def _refuse_folder(name: str, data_dir: str | os.PathLike | None) -> None:
  """Raises ValueError if a folder is given."""
  if data_dir is not None:
    raise ValueError(
      f"{name} is embedded in scikit-learn and takes no data_dir, not"
      f" {str(data_dir)!r}; leave it out"
    )


def file_of_package(package: str, *parts: str) -> Path | None:
  """Returns the path of a file of an installed package, without importing it;
  None without the package or the file."""
  found = importlib.util.find_spec(package)
  for root in (found and found.submodule_search_locations) or ():
    path = Path(root, *parts)
    if path.is_file():
      return path
  return None


def file_of(kind: str, data_dir: str | os.PathLike | None) -> Path:
  """Returns the path of a user's own file; ValueError if there is none."""
  if data_dir is None:
    raise ValueError(f"the {kind} 'file' needs data_dir, the path of a file")
  return Path(os.path.expanduser(data_dir))


def read_tokenizer(path: Path) -> Any:
  """Returns the tokenizer of a file; DataError if it cannot be read."""
  try:
    import tokenizers
  except ImportError:
    raise DataError(
      f"{path} needs the package tokenizers; pip install tokenizers"
    ) from None
  with formats.reading(path, Exception):  # tokenizers raises plain Exceptions
    return tokenizers.Tokenizer.from_file(str(path))
