"""Checks of arguments; their errors show the name and the value."""

import math
import numbers
from collections.abc import Sequence


def whole(name: str, value: int, least: int = 1) -> int:
  """Returns `value` as an int; raises ValueError unless it is whole (a bool is
  not), `least` or more."""
  integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not integral or value < least:
    more = f"whole number, {least} or more"
    kind = "positive whole number" if least == 1 else more
    raise ValueError(f"{name} must be a {kind}, not {value!r}")
  return int(value)


def multiple(count: int, things: str, size: int, groups: str) -> None:
  """Raises ValueError, naming the nearest counts, unless `count` fits groups.

  `things` are as "messages", `groups` as "rounds of {} workers", of `size`.
  """
  if count % size:
    below = count - count % size
    remedy = f"{below} or {below + size}" if below else str(size)
    raise ValueError(
      f"{count} {things} are not a whole number of {groups.format(size)}; use"
      f" {remedy}"
    )


def one_of(name: str, value: object, known: Sequence[str]) -> None:
  """Raises ValueError unless `value` is one of some names."""
  if value not in known:
    raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def fraction(name: str, value: float) -> None:
  """Raises ValueError unless `value` is in [0, 1)."""
  if not 0 <= value < 1:
    raise ValueError(f"{name} must be in [0, 1), not {value!r}")


def positive(name: str, value: float) -> None:
  """Raises ValueError unless `value` is positive and finite."""
  if not 0 < value < math.inf:
    raise ValueError(f"{name} must be positive, not {value!r}")


def nonnegative(name: str, value: float) -> None:
  """Raises ValueError unless `value` is 0 or more, and finite."""
  if not 0 <= value < math.inf:
    raise ValueError(f"{name} must be 0 or more, not {value!r}")
