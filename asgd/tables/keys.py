"""Keys: the identifiers of a table's rows.

Index letters used in shape comments of this package:
  n  keys of a message
  K  rows of a table
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from asgd import checks

Keys = npt.NDArray[np.int64]  # [n]
_INT64 = np.iinfo(np.int64)


def read(keys: Any, *, start: int = 0, stop: int | None = None) -> Keys:
  """Returns keys as int64[n]; a slice or range stands for all keys in it.

  Args:
    keys: integers, an array of them, a range, or a slice; a slice without ends
      goes from `start` to `stop`.
    start: the least valid key.
    stop: 1 + the largest valid key; None: no upper limit.

  Raises:
    ValueError: for values that are not integers, for a key out of range, and
      for a key that occurs twice.

  Example:
    >>> from asgd.tables import keys
    >>> keys.read(slice(None, 3), stop=10).tolist()
    [0, 1, 2]
    >>> keys.read([2, 11], stop=10)
    Traceback (most recent call last):
    ValueError: key 11 is out of range: the table has the keys 0 to 9
  """
  if isinstance(keys, slice):
    first = start if keys.start is None else keys.start
    last = stop if keys.stop is None else keys.stop
    if last is None or keys.step not in (None, 1):
      raise ValueError(
        "a range of keys needs an end and no step; this one is"
        f" {checks.shown(keys)}"
      )
    first = checks.integer("the start of a range", first, _INT64.min)
    keys = range(first, checks.integer("the end of a range", last, _INT64.min))
  if isinstance(keys, range):
    # Check the ends before making an array, which might be too large.
    for key in (*keys[:1], *keys[-1:]):
      if key < start or key > _INT64.max or (stop is not None and key >= stop):
        raise _out_of_range(key, start, stop)
    keys = np.arange(keys.start, keys.stop, keys.step, np.int64)
  array = np.asarray(keys)
  if not array.size and array.ndim == 1:  # NumPy makes [] an array of floats
    return np.zeros(0, np.int64)
  if array.ndim != 1 or array.dtype.kind not in "iu":
    raise ValueError(
      "keys must be a list of integers, not"
      f" {checks.shown(keys)} ({array.dtype}{list(array.shape)})"
    )
  if array.dtype.kind == "u" and array.max(initial=0) > _INT64.max:
    raise ValueError(f"key {array.max()} does not fit into 64 bits")
  array = array.astype(np.int64, copy=False)
  # Lists and arrays are checked key by key.
  is_out_of_range = array < start
  if stop is not None:
    is_out_of_range |= array >= stop
  if is_out_of_range.any():
    raise _out_of_range(array[np.argmax(is_out_of_range)], start, stop)
  _check_distinct(array)
  return array


def _out_of_range(key: int, start: int, stop: int | None) -> ValueError:
  """Returns the error of a key out of range."""
  upper_limit = "or more" if stop is None else f"to {stop - 1}"
  return ValueError(
    f"key {key} is out of range: the table has the keys {start} {upper_limit}"
  )


def _check_distinct(keys: Keys) -> None:
  """Raises ValueError for a key that occurs twice."""
  is_ascending = np.diff(keys) > 0  # the usual case, without a sort
  if is_ascending.all():
    return
  ordered = np.sort(keys)
  is_repeated = ordered[1:] == ordered[:-1]
  if is_repeated.any():
    raise ValueError(
      f"key {ordered[1:][np.argmax(is_repeated)]} occurs twice: add up the"
      " values of equal keys first (tables.keys.add_up)"
    )


def add_up(keys: Any, values: Any) -> tuple[Keys, np.ndarray]:
  """Returns the distinct keys, ascending, and the sum of each key's values.

  Args:
    keys: int[n], which may repeat.
    values: [n, ...], one for each key.

  Example:
    >>> import numpy as np
    >>> from asgd.tables import keys
    >>> unique, sums = keys.add_up([7, 3, 7], np.array([1.0, 2.0, 4.0]))
    >>> unique.tolist(), sums.tolist()
    ([3, 7], [2.0, 5.0])
  """
  unique, positions = np.unique(np.asarray(keys, np.int64), return_inverse=True)
  values = np.asarray(values)
  # `add.at` counts repeated indices, which += would not.
  sums = np.zeros((len(unique), *values.shape[1:]), values.dtype)
  np.add.at(sums, positions, values)
  return unique, sums
