"""Checks of plain data by tables of fields: names of fields, and their values.

A table is name -> FieldCheck. A check is a function (value, name) as those of
`asgd.experiment.checks`, which raises ValueError. `check` prefixes the error
with the owner of the fields: a claim, a panel, a column, a file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import names
from asgd.checks import shown
from asgd.experiment import checks


class FieldCheck(NamedTuple):
  """A field's check; and, if the field is needed, a text that describes it."""

  check: checks.Check
  needed: str = ""


Table = Mapping[str, FieldCheck]


def must(holds: Callable[[Any], bool], kind: str) -> checks.Check:
  """Returns a check that `holds` is true of a value; errors name `kind`.

  Example:
    >>> must(lambda value: value == 1, "one")(2, "by")
    Traceback (most recent call last):
    ValueError: by must be one, not 2
  """

  def check(value: Any, key: str) -> Any:
    if not holds(value):
      raise ValueError(f"{key} must be {kind}, not {shown(value)}")
    return value

  return check


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value.strip())


def is_list(value: Any) -> bool:
  """Whether a value is a list or a tuple."""
  return isinstance(value, list | tuple)


text = must(_is_text, "a text")
note = must(lambda value: isinstance(value, str), "a text, which may be empty")
mapping = must(lambda value: isinstance(value, Mapping), "a dict")
texts = must(
  lambda v: isinstance(v, Mapping)
  and all(isinstance(text, str) for text in v.values()),
  "a dict of texts",
)
any_list = must(is_list, "a list")
# Within the range of float32 on both sides, so that no arithmetic overflows.
number = checks.number(-checks.MOST_NUMBER)


def bound(check: checks.Check) -> checks.Check:
  """Returns a check of a bound; its error adds that a bound can be left out."""

  # The bound is optional, but the plain error reads as if it were needed.
  def checked_bound(value: Any, key: str) -> Any:
    try:
      return check(value, key)
    except ValueError as error:
      raise ValueError(f"{error}; leave it out for no bound") from None

  return checked_bound


share = must(
  lambda x: type(x) in (int, float) and 0 <= x < 1,
  "a number from 0 to below 1",  # bool is a subclass of int, and refused
)


def named(allowed_names: Sequence[str]) -> checks.Check:
  """Returns a check for one of a few names; errors show the nearest."""

  def check(value: Any, key: str) -> Any:
    names.check(f"{key}:", value, allowed_names)
    return value

  return check


def pairs(kind: str, first: checks.Check, second: checks.Check) -> checks.Check:
  """Returns a check for a list of one or more pairs."""

  def check(value: Any, key: str) -> Any:
    """Checks the list, and both halves of each pair."""
    must(lambda v: is_list(v) and v, f"a list of pairs {kind}")(value, key)
    # `kind` is "(a, b)": errors name the half of a pair that is wrong.
    for item in value:
      pair = must(lambda v: is_list(v) and len(v) == 2, f"pairs {kind}")
      pair(item, key)
      first(item[0], f"{key}, {shown(item)}: {kind[1:-1].split(', ')[0]}")
      second(item[1], f"{key}, {shown(item)}: {kind[1:-1].split(', ')[1]}")
    return value

  return check


def check(where: str, data: Any, table: Table, *, closed: bool = True) -> None:
  """Raises ValueError unless data are a dict with valid fields of a table, all
  needed fields included and, if `closed`, no others.

  Example:
    >>> check("claim 'c'", {"by": "x"}, {"by": FieldCheck(share)})
    Traceback (most recent call last):
    ValueError: claim 'c': by must be a number from 0 to below 1, not 'x'
  """
  if not isinstance(data, Mapping):
    raise ValueError(f"{where} must be a dict, not {shown(data)}")
  # Without `closed`, keys that the table lacks are accepted.
  for key in data if closed else ():
    if key not in table:
      nearest = names.nearest(str(key), table)
      raise ValueError(f"{where} has no key {shown(key)}; {nearest}")
  for key, field in table.items():
    if key not in data:
      if field.needed:
        raise ValueError(f"{where} needs {key!r}, {field.needed}")
      continue
    try:
      field.check(data[key], key)
    except ValueError as error:
      # Checks of `asgd.experiment` name config keys; these data are no config.
      message = str(error).removeprefix("config.")
      raise ValueError(f"{where}: {message}") from None


def plain(value: Any) -> Any:
  """Returns plain data with Python numbers instead of numpy's, and with every
  text on one line."""
  if isinstance(value, Mapping):
    return {plain(k): plain(v) for k, v in value.items()}
  if is_list(value):
    return [plain(item) for item in value]
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  return re.sub(r"\s*[\r\n]\s*", " ", value) if type(value) is str else value
