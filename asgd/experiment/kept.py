"""Parts of experiments that equal configs share in one process, where they are
traced and compiled once, however often a session builds them."""

import json
from collections.abc import Callable
from typing import Any

import jax


class Kept:
  """The latest results of a function, by what they were made of."""

  def __init__(self, most: int = 64):
    self._results: dict[tuple[Any, ...], Any] = {}
    self._most = most

  def get(self, make: Callable[[], Any], plain: Any, *objects: Any) -> Any:
    """Returns what `make()` returned for an equal `plain`, data as of a config,
    and the same `objects`; calls it where a function of one's own is named,
    MODULE:FUNCTION, which may have changed."""
    text = json.dumps(plain, sort_keys=True, separators=(",", "="))
    if ":" in text:
      return make()
    key = text, jax.config.jax_enable_x64, *objects
    if key not in self._results:
      made = make()
      if len(self._results) >= self._most:
        self._results.pop(next(iter(self._results)), None)
      self._results[key] = made
    return self._results[key]
