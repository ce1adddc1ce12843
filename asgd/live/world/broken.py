"""An invariant that does not hold, and what checks of them share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


class Broken(Exception):
  """An invariant does not hold."""


def require(well: Any, name: str, *shown: Any) -> None:
  """Raises Broken, which names an invariant and shows values, unless all is
  well. Values are made texts only then: that of an array takes time."""
  if not well:
    raise Broken(f"{name}: {' '.join(map(str, shown))}")


@contextlib.contextmanager
def refused(name: str, text: str = "") -> Iterator[None]:
  """Raises Broken, which names an invariant, for a ValueError of the block."""
  try:
    yield
  except ValueError as error:
    raise Broken(f"{name}: {text}{error}") from error


def bits(tree: Any) -> list[bytes]:
  """Returns the bytes of each array of a tree."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]
