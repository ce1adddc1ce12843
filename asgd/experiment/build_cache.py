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

  def __init__(self, max_results: int = 64):
    """`max_results` is the number of results that are kept."""
    # A dict keeps the order of insertion, so the oldest result comes first.
    self._results: dict[tuple[Any, ...], Any] = {}
    self._max_results = max_results

  def get(
    self, make: Callable[[], Any], config_values: Any, *objects: Any
  ) -> Any:
    """Returns the cached result for this key, or calls `make` and caches it.

    If `config_values` name a function as MODULE:FUNCTION, the result is not
    cached: the user may have edited that function since.

    Args:
      make: builds the result. It reads nothing of a config beyond the key.
      config_values: values of a config, as JSON has them; part of the key.
      *objects: hashable objects that `make` uses; part of the key.
    """
    # With these separators a colon can only be part of a value.
    config_text = json.dumps(
      config_values, sort_keys=True, separators=(",", "=")
    )
    if ":" in config_text:
      return make()
    # float32, or float64 if jax_enable_x64 is set
    float_dtype = jax.dtypes.canonicalize_dtype(np.float64)
    # The key holds its objects. So none is freed, and no later object has its
    # id, by which most objects are hashed.
    cache_key = config_text, float_dtype, *objects
    if cache_key not in self._results:
      result = make()
      # After `make`, which may build and cache other results.
      if len(self._results) >= self._max_results:
        self._results.pop(next(iter(self._results)), None)
      self._results[cache_key] = result
    return self._results[cache_key]
