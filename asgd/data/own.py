"""Data that a user's function returns: a data set, or plain arrays.

Index letters used in shape comments:
  n, m  examples of the training and the test part
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asgd import checks
from asgd.data import sources
from asgd.data.images import Dataset, statistics
from asgd.data.sentences import Sentences
from asgd.data.text import Text

_ARRAYS = "train_x", "train_y", "test_x", "test_y"
_OPTIONS = "classes", "mean", "std", "name", "source"
_FORMS = (
  f"arrays ({', '.join(_ARRAYS)}), a dict of them, or an"
  " asgd.data.Dataset, Text or Sentences"
)


def as_dataset(value: Any, name: str) -> Dataset | Text | Sentences:
  """Returns the result of a user's function as a data set.

  Arrays are the positional arguments of `from_arrays`; a dict may have its
  other arguments, too. Raises ValueError, with the remedy, for anything else.

  Example:
    >>> x, y = np.zeros((6, 3)), [0, 1, 2, 0, 1, 2]
    >>> as_dataset((x, y, x, y), "mine").classes
    3
  """
  if isinstance(value, Dataset | Text | Sentences):
    return value
  options: dict[str, Any] = {}
  if isinstance(value, Mapping):
    known_keys = *_ARRAYS, *_OPTIONS
    unknown_keys = [key for key in value if key not in known_keys]
    missing_keys = [key for key in _ARRAYS if key not in value]
    if unknown_keys or missing_keys:
      fault = f"has {unknown_keys[0]!r}" if unknown_keys else (
        f"lacks {missing_keys[0]!r}"
      )
      raise ValueError(
        f"the dict that it returned {fault}; its keys are"
        f" {', '.join(_ARRAYS)} and, optionally, {', '.join(_OPTIONS)}"
      )
    options = {key: value[key] for key in _OPTIONS if key in value}
    value = [value[key] for key in _ARRAYS]
  if isinstance(value, list | tuple) and list(map(_length, value)) == [2, 2]:
    value = [*value[0], *value[1]]  # ((train_x, train_y), (test_x, test_y))
  if not isinstance(value, list | tuple) or len(value) != len(_ARRAYS):
    text = " ".join(checks.shown(value).split())
    raise ValueError(f"it returned {text}; return {_FORMS}")
  return from_arrays(*value, **{"name": name, "source": name, **options})


def _length(value):
  return len(value) if isinstance(value, list | tuple) else None


def from_arrays(
  train_x: Any,
  train_y: Any,
  test_x: Any,
  test_y: Any,
  *,
  name: str = "arrays",
  source: str = "arrays",
  classes: int | None = None,
  mean: Any = None,
  std: Any = None,
) -> Dataset:
  """Makes a Dataset from arrays, and checks that they fit.

  Args:
    train_x: [n, ...]. uint8 is normalised by the mean and deviation of each
      channel (the last axis) in training; floats and other integers are not
      changed, unless `mean` and `std` are given.
    train_y: integers are classes, int[n] or int[n, ...]; floats are the targets
      of a regression, float[n] or float[n, ...].
    test_x: [m, ...].
    test_y: [m] or [m, ...].
    name: the name of the data.
    source: where the data are from.
    classes: number of classes; None is the largest label + 1.
    mean: subtracted from examples.
    std: divides the differences.
  """
  values = dict(zip(_ARRAYS, (train_x, train_y, test_x, test_y), strict=True))
  arrays = {key: _array(key, value) for key, value in values.items()}
  for part in ("train", "test"):
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if len(x) != len(y):
      raise ValueError(
        f"{part}_x has {len(x):,} examples and {part}_y {len(y):,} labels; give"
        " each example its label"
      )
  for kind in ("x", "y"):
    train, test = arrays[f"train_{kind}"], arrays[f"test_{kind}"]
    if (train.shape[1:], train.dtype) != (test.shape[1:], test.dtype):
      raise ValueError(
        f"train_{kind} is {_form(train)} and test_{kind} {_form(test)}: they"
        " must have the same dtype and shape, except for the number of examples"
      )
  x, labels = arrays["train_x"], (arrays["train_y"], arrays["test_y"])
  if np.issubdtype(labels[0].dtype, np.floating):
    if classes is not None:
      raise ValueError(
        "labels are floats, the targets of a regression, but classes"
        f" {classes!r} are given; give class labels as integers"
      )
  else:
    classes = _count_classes(labels, classes)
  # Bytes are pixels, which need a scale; floats come as the user scaled them.
  if mean is None and std is None and x.dtype == np.uint8:
    mean, std = statistics(x)
  elif mean is not None or std is not None:
    mean = np.asarray(0.0 if mean is None else mean, np.float32)
    std = np.asarray(1.0 if std is None else std, np.float32)
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and std.all()):
      raise ValueError("mean and std must be finite, and no std 0")
  # `_array` made views, so the caller's arrays stay writable.
  sources.freeze(arrays.values())
  return Dataset(
    str(name),
    str(source),
    arrays["train_x"],
    arrays["train_y"],
    arrays["test_x"],
    arrays["test_y"],
    classes,
    mean,
    std,
  )


def _form(array):
  return f"{array.dtype}{list(array.shape)}"


def _array(key: str, value: Any) -> np.ndarray:
  """Returns a view of an array [n, ...]: uint8, int32 or float32."""
  try:
    array = np.asarray(value)
  except Exception as error:  # a user's lazy array may raise anything
    line = checks.text_of(error, 150)
    raise ValueError(f"{key} is no array ({line}); make it one") from error
  if array.dtype.kind not in "biuf":
    if array.ndim:
      description = f"an array of {array.dtype}"
    else:
      kind = type(value).__name__
      description = f"{kind}, which cannot be indexed as an array"
    raise ValueError(
      f"{key} is {description}; give numbers [examples, ...], as"
      " numpy.asarray(list(...)) makes them of examples of one shape"
    )
  if not array.ndim or not len(array):
    raise ValueError(f"{key} is {_form(array)}; give it a row for each example")
  if array.dtype.kind == "f":
    if not np.isfinite(array).all():
      raise ValueError(f"{key} has numbers that are not finite; leave them out")
    return array.astype(np.float32, copy=False).view()
  # Examples stay bytes, a quarter of the memory; a job scales its batch.
  if array.dtype == np.uint8 and key.endswith("_x"):
    return array.view()
  least, most = int(array.min()), int(array.max())
  if least < -(2**31) or most >= 2**31:
    raise ValueError(f"{key} has integers beyond 32 bits; make them floats")
  return array.astype(np.int32, copy=False).view()


def _count_classes(labels: Sequence[np.ndarray], classes: int | None) -> int:
  """Returns the number of classes; ValueError for a label that is no class."""
  least = min(part.min() for part in labels)
  most = max(part.max() for part in labels)
  if classes is None:
    classes = int(most) + 1
  classes = checks.integer("classes", classes)
  if least < 0 or most >= classes:
    raise ValueError(
      f"labels are {least} to {most}, but must be 0 to {classes - 1}: number"
      f" the {classes} classes from 0"
    )
  return classes
