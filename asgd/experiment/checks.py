"""Checks of single settings: kind and range, with errors that name the key.

A check is a function (value, key) that returns the value or raises ValueError
with the key, the value and what it should be.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from asgd import names
from asgd.checks import shown, text_of

Check = Callable[[Any, str], Any]

MOST_NUMBER = 1e30  # float32 holds it, and its inverse
MOST_INTEGER = 2**31 - 1  # int32 holds it
MOST_COUNT = 10**8  # messages, updates, examples of a test


def _require(holds, value, key, kind):
  if not holds:
    raise ValueError(f"config.{key} must be {kind}, not {shown(value)}")
  return value


def _check(is_valid: Callable[[Any], bool], kind: str) -> Check:
  return lambda value, key: _require(is_valid(value), value, key, kind)


def anything(value: Any, key: str) -> Any:
  """Takes any plain value; what it selects checks it."""
  del key
  return value


def whole(least: int = 1, most: int = MOST_COUNT) -> Check:
  """A whole number in a range; not a bool."""
  return _check(
    lambda value: type(value) is int and least <= value <= most,
    f"a whole number from {least} to {most}",
  )


def number(
  least: float = 0.0, most: float = MOST_NUMBER, *, above: bool = False
) -> Check:
  """A finite number in a range; `above` leaves out the least."""

  def inside(value):
    real = type(value) in (int, float)
    return real and least <= value <= most and not (above and value == least)

  low = f"above {least:g}" if above else f"from {least:g}"
  return _check(inside, f"a number {low} to {most:g}")


positive = number(above=True)
flag = _check(lambda value: isinstance(value, bool), "True or False")
text = _check(lambda value: isinstance(value, str) and value != "", "a name")


def choice(*known: str) -> Check:
  """One of a few names."""
  if len(known) < 4:
    words = " or ".join(map(repr, known))
    return _check(lambda value: value in known, words)

  def check(value, key):
    if value not in known:
      hint = names.nearest(value, known)
      raise ValueError(f"config.{key} {shown(value)} is not known; {hint}")
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
    _require(isinstance(value, list), value, key, "a list")
    for item in value:
      check(item, key)
    unique = not distinct or len(set(value)) == len(value)
    _require(unique, value, key, "a list of different values")
    enough = len(value) >= least
    return _require(enough, value, key, f"a list of at least {least}")

  return each


@contextlib.contextmanager
def blame(key: str, keys: Sequence[str] = ()) -> Iterator[None]:
  """Names the dotted key of the config in errors about its value; one that
  begins with one of `keys`, below it, is about that one."""
  try:
    yield
  except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
    raise ValueError(
      f"config.{key} has a value of the wrong kind: {text_of(error)}"
    ) from error
  except ValueError as error:
    message = str(error)
    if message.startswith("config."):
      raise
    first = message.split(" ")[0].split(".")[0].rstrip(":")
    mark = "." if first in keys else ": "
    raise ValueError(f"config.{key}{mark}{message}") from error


def few_messages(config: Mapping[str, Any], messages: int) -> None:
  """Raises ValueError if the budget of a cell is more messages than are
  counted."""
  if messages > MOST_COUNT:
    raise ValueError(
      f"config.epochs {config['epochs']:g} is {messages:.3g} messages in one"
      f" cell; use at most {MOST_COUNT:.0e}"
    )
