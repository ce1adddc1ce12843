"""Checks of single settings: kind and range, with errors that name the key.

A check is a function (value, key) that returns the value or raises ValueError
with the key, the value and what it should be.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asgd import names

Check = Callable[[Any, str], Any]

MOST_NUMBER = 1e30  # float32 holds it, and its inverse
MOST_INTEGER = 2**31 - 1  # int32 holds it
MOST_COUNT = 10**8  # messages, updates, examples of a test


def _refuse(key, kind, value):
  raise ValueError(f"config.{key} must be {kind}, not {value!r}")


def anything(value: Any, key: str) -> Any:
  """Takes any plain value; what it selects checks it."""
  del key
  return value


def whole(least: int = 1, most: int = MOST_COUNT) -> Check:
  """A whole number in a range; not a bool."""

  def check(value, key):
    if type(value) is not int or not least <= value <= most:
      _refuse(key, f"a whole number from {least} to {most}", value)
    return value

  return check


def number(
  least: float = 0.0, most: float = MOST_NUMBER, *, above: bool = False
) -> Check:
  """A finite number in a range; `above` leaves out the least."""
  low = f"above {least:g}" if above else f"from {least:g}"

  def check(value, key):
    real = type(value) in (int, float) and math.isfinite(value)
    inside = real and (least < value if above else least <= value)
    if not inside or value > most:
      _refuse(key, f"a number {low} to {most:g}", value)
    return value

  return check


positive = number(above=True)


def flag(value: Any, key: str) -> bool:
  """A bool."""
  if not isinstance(value, bool):
    _refuse(key, "True or False", value)
  return value


def text(value: Any, key: str) -> str:
  """A string that is not empty."""
  if not isinstance(value, str) or not value:
    _refuse(key, "a name", value)
  return value


def choice(*known: str) -> Check:
  """One of a few names."""

  def check(value, key):
    if value not in known:
      words = " or ".join(map(repr, known)) if len(known) < 4 else ""
      if words:
        _refuse(key, words, value)
      raise ValueError(
        f"config.{key} {value!r} is not known; {names.nearest(value, known)}"
      )
    return value

  return check


def optional(check: Check) -> Check:
  """The same, or None."""

  def either(value, key):
    if value is None:
      return None
    try:
      return check(value, key)
    except ValueError as error:
      raise ValueError(f"{error}; None leaves it out") from None

  return either


def several(check: Check, *, distinct: bool = False, least: int = 0) -> Check:
  """A list of such values."""

  def each(value, key):
    if not isinstance(value, list):
      _refuse(key, "a list", value)
    for item in value:
      check(item, key)
    if distinct and len(set(value)) != len(value):
      _refuse(key, "a list of different values", value)
    if len(value) < least:
      _refuse(key, f"a list of at least {least}", value)
    return value

  return each


@contextlib.contextmanager
def blame(key: str, keys: Sequence[str] = ()) -> Iterator[None]:
  """Names the key of the config in errors about its value.

  Args:
    key: the dotted key.
    keys: below it; an error that begins with one of them is about that one.
  """
  try:
    yield
  except (
    *(TypeError, OverflowError, ArithmeticError, LookupError),
    AttributeError,
  ) as error:
    raise ValueError(
      f"config.{key} has a value of the wrong kind: {error}"
    ) from error
  except ValueError as error:
    message = str(error)
    if "config." in message:
      raise
    mark = "." if message.split(" ")[0] in keys else ": "
    raise ValueError(f"config.{key}{mark}{message}") from error
