"""Checks of arguments; their errors show the name and the value.

`real` and the checks that call it accept values that JAX traces, so their
callers can be wrapped by `optax.inject_hyperparams`. `integer` and `multiple`
need a concrete int. Functions import JAX when they are called, not at the top:
a command can then report a wrong name without waiting for that import.
"""

import contextlib
import math
import numbers
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RERUN = "run the same command again to resume"  # the remedy in errors and logs
_MAX_SHOWN = 120  # characters of a value in an error


def shortened(text: str, most: int) -> str:
  """Returns `text`, without its middle if it exceeds `most` characters."""
  mark = " [...] "
  if len(text) <= most:
    return text
  tail = (most - len(mark)) // 2
  head = most - len(mark) - tail
  return f"{text[:head]}{mark}{text[-tail:]}"


def text_of(error: BaseException, most: int = 300) -> str:
  """Returns an error's message on one line, shortened to `most` characters."""
  return shortened(" ".join(str(error).split()), most)


def line_of(error: BaseException, most: int = 300) -> str:
  """Returns an error's type and message on one line."""
  return f"{type(error).__name__}: {text_of(error, most)}"


@contextlib.contextmanager
def user_code(
  failure: str,
  remedy: str = "",
  *,
  passes: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
  """Turns any exception of a user's code into a ValueError of one line.

  Args:
    failure: the call that fails, as in "the loss fails on the first batch".
    remedy: text after the user's error.
    passes: errors that are raised unchanged: they name the remedy already.

  Example:
    >>> with user_code("data[3] fails", "; drop it"):
    ...   [][3]
    Traceback (most recent call last):
    ValueError: data[3] fails (IndexError: list index out of range); drop it
  """
  try:
    yield
  except passes:
    raise
  except Exception as error:
    raise ValueError(f"{failure} ({line_of(error, 250)}){remedy}") from error


@contextlib.contextmanager
def section_errors(
  section: str, section_keys: Collection[str]
) -> Iterator[None]:
  """Prefixes a ValueError with the name of the section that it is about.

  - The message starts with one of `section_keys`: "density must be ..." becomes
    "codec.density must be ...".
  - The message is about the section's own name: "unknown codec 'x'" becomes
    "codec: unknown codec 'x'".

  Other errors pass unchanged.
  """
  try:
    yield
  except ValueError as error:
    message = str(error)
    if message.startswith(f"unknown {section} "):
      raise ValueError(f"{section}: {message}") from error
    if message.split(" ")[0].rstrip(":") not in section_keys:
      raise
    raise ValueError(f"{section}.{message}") from error


def shown(value: Any) -> str:
  """Returns the repr of a value for an error: on one line, and shortened."""
  text = repr(value)
  if "\n" in text:  # an array
    text = " ".join(text.split())
  return shortened(text, _MAX_SHOWN)


def integer(
  name: str, value: int, least: int = 1, most: int | None = None
) -> int:
  """Returns `value` as an int. Raises ValueError unless it is an integer (a
  bool is not one), `least` or more, and at most `most`."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or value < least:
    lower_bound = f"whole number, {least} or more"
    requirement = "positive whole number" if least == 1 else lower_bound
    import jax

    # optax.inject_hyperparams makes arrays of numbers.
    static_remedy = ": name it in static_args of optax.inject_hyperparams"
    remedy = static_remedy if isinstance(value, jax.Array) else ""
    is_float = isinstance(value, float)
    if is_float and float(value).is_integer() and value >= least:
      remedy = f", which is a float: write {int(value)}"
    raise ValueError(
      f"{name} must be a {requirement}, not {shown(value)}{remedy}"
    )
  if most is not None and value > most:
    raise ValueError(f"{name} must be at most {most}, not {shown(value)}")
  return int(value)


def multiple(count: int, things: str, size: int, groups: str) -> None:
  """Raises ValueError unless `count` is a multiple of `size`.

  The error names the nearest multiples. `things` is a plural such as
  "messages". `groups` is a format text, such as "rounds of {} workers"; `size`
  replaces its {}.
  """
  if count % size:
    lower = count - count % size
    remedy = f"{lower} or {lower + size}" if lower else str(size)
    raise ValueError(
      f"{count} {things} are not a whole number of {groups.format(size)}; use"
      f" {remedy}"
    )


def one_of(name: str, value: object, known: Sequence[str]) -> None:
  """Raises ValueError unless `value` is one of the strings in `known`."""
  if not isinstance(value, str) or value not in known:
    raise ValueError(
      f"{name} must be one of {', '.join(known)}, not {shown(value)}"
    )


def path(name: str, value: Any) -> Path:
  """Returns the path of a file or a folder. Raises ValueError unless `value` is
  a text or an `os.PathLike` of one, not empty and without a null character."""
  text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
  if isinstance(text, str) and text and "\0" not in text:
    return Path(text)
  raise ValueError(
    f"{name} must be a path, a text such as 'runs/mine' or a pathlib.Path, not"
    f" {shown(value)}"
  )


def flag(name: str, value: bool | None, *, none: str | None = None) -> None:
  """Raises ValueError unless `value` is True or False. None is also valid if
  `none` is given, which explains the meaning of None."""
  if isinstance(value, bool | np.bool_) or (value is None and none is not None):
    return
  kinds = "True or False" if none is None else f"True, False or None ({none})"
  raise ValueError(f"{name} must be {kinds}, not {shown(value)}")


def real(
  name: str,
  value: Any,
  condition: Callable[[Any], bool],
  kind: str,
  remedy: str = "",
  *,
  finite: bool = True,
) -> None:
  """Raises ValueError unless a value is a number for which `condition` is true.

  `kind` names the condition in the error. With `finite` an infinity is an
  error, too. A value that JAX traces is not checked."""
  import jax

  if isinstance(value, jax.core.Tracer):
    return
  try:
    is_number = np.asarray(value).dtype.kind not in "bc"  # no bool, no complex
    is_valid = is_number and bool(condition(value))
    is_valid = is_valid and (not finite or math.isfinite(float(value)))
  except (TypeError, ValueError, OverflowError):  # no number, or too large
    is_valid = False
  if not is_valid:
    raise ValueError(f"{name} must be {kind}, not {shown(value)}{remedy}")


def fraction(name: str, value: float) -> None:
  """Raises ValueError unless `value` is in [0, 1)."""
  real(name, value, lambda x: 0 <= x < 1, "in [0, 1)")


def positive(name: str, value: float) -> None:
  """Raises ValueError unless `value` is positive and finite."""
  real(name, value, lambda x: x > 0, "a positive finite number")


def nonnegative(name: str, value: float) -> None:
  """Raises ValueError unless `value` is 0 or more, and finite."""
  real(name, value, lambda x: x >= 0, "0 or more")


def portion(name: str, value: float, remedy: str = "") -> None:
  """Raises ValueError unless `value` is in (0, 1]."""
  real(name, value, lambda x: 0 < x <= 1, "in (0, 1]", remedy)


def is_zero(value: float) -> bool:
  """Whether an argument is the number 0. False for any JAX array: one that is
  traced, or made by `optax.inject_hyperparams`, may change at each update."""
  import jax

  return not isinstance(value, jax.Array) and value == 0


def blame_batch(owner: str) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which errors say that the batch of `owner` could not
  be made. The maker may be a user's function; a ValueError passes unchanged."""
  return user_code(
    f"the batch of {owner} cannot be made",
    ": mend the data, or the function that makes batches",
    passes=(ValueError,),
  )
