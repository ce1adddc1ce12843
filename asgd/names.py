"""Lookups by name; their errors show the nearest valid name and all others."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def nearest(name: str, valid: Iterable[str]) -> str:
  """Returns a hint for a misspelt name: the nearest, if any, and all valid.

  A name of several words is also recognised by its initials, as lr.
  """
  valid = sorted(set(valid))
  words = {each: each.split("_") for each in valid if "_" in each}
  close = [k for k, v in words.items() if "".join(w[:1] for w in v) == name]
  if not close:
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.55)
  hint = f"did you mean {close[0]!r}? " if close else ""
  return f"{hint}known: {', '.join(valid)}"


def check(kind: str, name: str, valid: Iterable[str]) -> None:
  """Raises ValueError, with the nearest name, unless `name` is valid."""
  if not isinstance(name, str) or name not in valid:
    raise ValueError(f"unknown {kind} {name!r}; {nearest(name, valid)}")


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
  """Returns table[name]; raises as `check`."""
  check(kind, name, table)
  return table[name]


def call(kind: str, name: str, maker: Callable, kwargs: Mapping) -> Any:
  """Calls maker(**kwargs); raises ValueError if one is unknown, or missing."""
  parameters = inspect.signature(maker).parameters
  for key in kwargs:
    if key not in parameters:
      raise ValueError(
        f"{kind} {name!r} takes no argument {key!r}; {nearest(key, parameters)}"
      )
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and key not in kwargs:
      raise ValueError(f"{kind} {name!r} needs the argument {key!r}")
  return maker(**kwargs)
