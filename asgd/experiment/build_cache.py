"""A cache of problems, recipes, servers and steps that equal configs share.

JAX traces and compiles a function once for each function object. A session that
builds the same config several times gets the same objects from here, so nothing
is compiled twice in one process.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class BuildCache:
  """The latest results of one builder; the oldest is dropped first."""

  def __init__(self, most: int = 64):
    """`most` is the number of results that are kept."""
    # In the order of their making: a dict keeps it.
    self._results: dict[tuple[Any, ...], Any] = {}
    self._most = most

  def get(self, make: Callable[[], Any], plain: Any, *objects: Any) -> Any:
    """Returns the cached result for this key, or calls `make` and caches it.

    A `plain` that names a function as MODULE:FUNCTION is not cached: the user
    may have edited that function since.

    Args:
      make: builds the result. It reads nothing of a config beyond the key.
      plain: values of a config, as JSON can write them; part of the key.
      *objects: hashable objects that `make` uses; part of the key.
    """
    # A colon is then in a value, and never a separator.
    text = json.dumps(plain, sort_keys=True, separators=(",", "="))
    if ":" in text:
      return make()
    # float32, or float64 if jax_enable_x64 is set
    real = jax.dtypes.canonicalize_dtype(np.float64)
    # The key holds its objects. So none is freed, and no later object has its
    # id, by which most objects are hashed.
    key = text, real, *objects
    if key not in self._results:
      result = make()
      # After `make`, which may build and cache other results.
      if len(self._results) >= self._most:
        self._results.pop(next(iter(self._results)), None)
      self._results[key] = result
    return self._results[key]
