"""The error of a violated invariant, and helpers that raise it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


class Broken(Exception):
  """An invariant is violated."""


def require(holds: Any, name: str, *values: Any) -> None:
  """Raises Broken with the invariant's name and the values, unless it `holds`.
  Values are formatted only then, because formatting an array takes time."""
  if not holds:
    raise Broken(f"{name}: {' '.join(map(str, values))}")


@contextlib.contextmanager
def breaks_on_value_error(name: str, text: str = "") -> Iterator[None]:
  """Raises Broken with the invariant's name for a ValueError in the block."""
  try:
    yield
  except ValueError as error:
    raise Broken(f"{name}: {text}{error}") from error


def bits(tree: Any) -> list[bytes]:
  """Returns the bytes of each array of a tree."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
