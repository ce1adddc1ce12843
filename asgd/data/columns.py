"""Columns of a Hugging Face `datasets.Dataset` as arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from asgd import checks


def is_table(value: Any) -> bool:
  """Whether a value has the interface of a map-style `datasets.Dataset`."""
  methods = "with_format", "__getitem__", "__len__"
  has_columns = isinstance(getattr(value, "column_names", None), list)
  return has_columns and all(hasattr(value, name) for name in methods)


def arrays(dataset: Any, names: Sequence[str] | None = None) -> Any:
  """Returns columns of a data set as arrays, [n, ...] each.

  Args:
    dataset: a `datasets.Dataset`, or an object with its `column_names`,
      `with_format("numpy", columns=...)` and slices.
    names: the names of columns. None takes all.

  Returns:
    A tuple of arrays in the order of `names`; without names, a dict of all.

  Raises:
    ValueError: for an unknown column, and for one that is no array of numbers.

  Example: `asgd.simulate(loss, params, columns.arrays(dataset, ["image",
  "label"]), recipe, messages=400, batch_size=32)`
  """
  if not is_table(dataset):
    raise ValueError(
      f"{checks.shown(dataset)} is no datasets.Dataset of one split: choose a"
      " split, dataset['train']"
    )
  column_names = dataset.column_names
  is_list = isinstance(names, Sequence) and not isinstance(names, str)
  if names is not None and not (is_list and names):
    example = [names] if isinstance(names, str) else column_names[:2]
    raise ValueError(
      f"names must be a list of columns, such as {checks.shown(example)}, or"
      f" None for all of them, not {checks.shown(names)}"
    )
  for name in names or ():
    if name not in column_names:
      raise ValueError(
        f"the data set has no column {name!r}; its columns are"
        f" {', '.join(column_names)}"
      )
  selected = list(column_names if names is None else names)
  # A slice of all rows is a dict of complete columns.
  table = dataset.with_format("numpy", columns=selected)[:]
  array_of = {name: _array(name, table[name], selected) for name in selected}
  if not array_of:
    raise ValueError(
      f"{checks.shown(dataset)} has no columns: give a data set with examples"
    )
  return array_of if names is None else tuple(array_of[name] for name in names)


def _array(name: str, column: Any, selected: Sequence[str]) -> np.ndarray:
  """Returns a column as an array of numbers."""
  try:
    array = np.asarray(column)
  except ValueError:  # rows of several shapes
    array = np.asarray(None)
  # Without examples, the shape of an example is unknown.
  if array.ndim and not array.size:
    raise ValueError(
      f"column {name!r} has the shape {array.shape}, without a number: give a"
      " data set with examples, or leave the column out"
    )
  if array.dtype.kind in "biuf" and array.ndim:
    return array
  other_names = [other_name for other_name in selected if other_name != name]
  raise ValueError(
    f"column {name!r} is no array of numbers of one shape: encode or pad it"
    " with dataset.map, or leave it out, columns.arrays(dataset,"
    f" {other_names})"
  )
