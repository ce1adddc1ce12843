"""Checks of single settings: kind and range, with errors that name the key.

A check is a function (value, key) that returns the value or raises ValueError
with the key, the value and the expected kind.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from asgd import names
from asgd.checks import shown, text_of
from asgd.data import partitions

Check = Callable[[Any, str], Any]
JsonSchema = dict[str, Any]

# Config values become arrays on devices, where x64 is off by default.
MOST_NUMBER = 1e30  # float32 holds it, and its inverse
MOST_INTEGER = 2**31 - 1  # int32 holds it
MOST_COUNT = 10**8  # messages, updates, examples of a test


def _require(is_valid: Any, value: Any, key: str, expected: str) -> Any:
  """Returns `value` if `is_valid`; otherwise raises a ValueError that names the
  key and states the requirement."""
  if not is_valid:
    raise ValueError(f"config.{key} must be {expected}, not {shown(value)}")
  return value


@dataclasses.dataclass(frozen=True)
class CheckWithSchema:
  """A check, with the JSON schema of the values that it accepts."""

  run: Check
  schema: JsonSchema  # for the reference of the keys in the docs

  def __call__(self, value: Any, key: str) -> Any:
    """Returns the value or raises ValueError."""
    return self.run(value, key)


def with_schema(**schema: Any) -> Callable[[Check], CheckWithSchema]:
  """Returns a decorator that adds a JSON schema, with these keys, to a check.
  """
  return lambda check: CheckWithSchema(check, schema)


# Decorates a check that accepts a name, or a dict of a name and options.
name_or_options = with_schema(type=["string", "object", "null"])


def schema_of(check: Check) -> JsonSchema:
  """Returns the JSON schema of a check; {} accepts all values."""
  return getattr(check, "schema", {})


def _make_check(
  is_valid: Callable[[Any], bool], expected: str, **schema: Any
) -> Check:
  """Returns a check; `schema` has the keys of its JSON schema."""
  return CheckWithSchema(
    lambda value, key: _require(is_valid(value), value, key, expected), schema
  )


def anything(value: Any, key: str) -> Any:
  """Accepts any plain value; the code that uses the setting checks it."""
  del key
  return value


def whole_number(least: int = 1, most: int = MOST_COUNT) -> Check:
  """Returns a check of a whole number in a range. It refuses a bool."""
  return _make_check(
    # `type`, not isinstance: a bool is an int, and no number in a config.
    lambda value: type(value) is int and least <= value <= most,
    f"a whole number from {least} to {most}",
    **dict(type="integer", minimum=least, maximum=most),
  )


def number(
  least: float = 0.0, most: float = MOST_NUMBER, *, above: bool = False
) -> Check:
  """Returns a check of a finite number in a range; `above` excludes `least`."""

  def is_in_range(value: Any) -> bool:
    is_real = type(value) in (int, float)
    # NaN and infinity fail the comparison.
    return is_real and least <= value <= most and not (above and value == least)

  lowest = f"above {least:g}" if above else f"from {least:g}"
  bound = "exclusiveMinimum" if above else "minimum"
  schema = {"type": "number", bound: least, "maximum": most}
  return _make_check(is_in_range, f"a number {lowest} to {most:g}", **schema)


positive = number(above=True)
flag = _make_check(
  lambda value: isinstance(value, bool), "True or False", type="boolean"
)
text = _make_check(
  lambda value: isinstance(value, str) and value != "",
  "a name",
  **dict(type="string", minLength=1),
)


def choice(*options: str) -> Check:
  """Returns a check of one of several names."""
  # The error lists up to three names; of more names it shows the nearest.
  if len(options) < 4:
    expected = " or ".join(map(repr, options))
    return _make_check(
      lambda value: value in options, expected, enum=list(options)
    )

  @with_schema(enum=list(options))
  def check(value: Any, key: str) -> Any:
    if value not in options:
      hint = names.nearest(value, options)
      raise ValueError(f"config.{key} {shown(value)} is not known; {hint}")
    return value

  return check


def optional(check: Check) -> Check:
  """Returns a check that also accepts None."""

  @with_schema(anyOf=[schema_of(check), {"type": "null"}])
  def either(value: Any, key: str) -> Any:
    if value is None:
      return None
    try:
      return check(value, key)
    except ValueError as error:
      raise ValueError(f"{error}; None leaves it out") from None

  return either


def several(check: Check, *, distinct: bool = False, least: int = 0) -> Check:
  """Returns a check of a list, with `check` for each of its values."""

  @with_schema(
    type="array",
    items=schema_of(check),
    minItems=least,
    uniqueItems=distinct,
  )
  def each(value: Any, key: str) -> Any:
    _require(isinstance(value, list), value, key, "a list")
    for item in value:
      check(item, key)
    # Check the items first: only then are they sure to be hashable.
    unique = not distinct or len(set(value)) == len(value)
    _require(unique, value, key, "a list of different values")
    enough = len(value) >= least
    return _require(enough, value, key, f"a list of at least {least}")

  return each


@contextlib.contextmanager
def prefix_errors(key: str, keys: Sequence[str] = ()) -> Iterator[None]:
  """Turns errors of the block into ValueErrors that begin with `config.KEY: `.

  If a message starts with one of `keys`, which are keys below `key`, the prefix
  is `config.KEY.` instead.
  """
  try:
    yield
  except (TypeError, ArithmeticError, LookupError, AttributeError) as error:
    raise ValueError(
      f"config.{key} has a value of the wrong kind: {text_of(error)}"
    ) from error
  except ValueError as error:
    message = str(error)
    if message.startswith("config."):
      raise  # an inner block knows the key better, and has named it
    first_key = message.split(" ")[0].split(".")[0].rstrip(":")
    separator = "." if first_key in keys else ": "
    raise ValueError(f"config.{key}{separator}{message}") from error


_PARTITION = {"enum": [*partitions.NAMES]}
_PARTITION_KEYS = {
  "name": _PARTITION,
  "concentration": {"type": "number", "exclusiveMinimum": 0},
}


@with_schema(
  anyOf=[
    _PARTITION,
    {
      "type": "object",
      "properties": _PARTITION_KEYS,
      "required": ["name"],
      "additionalProperties": False,
    },
  ]
)
def partition(value: Any, key: str) -> Any:
  """Checks a partition of the data: a name, or a dict of it and its options."""
  section, _, last_key = key.rpartition(".")
  # Errors of `divides` begin with "partition", which names the key.
  with prefix_errors(section, (last_key,)):
    partitions.divides(value)
  return value


def check_message_count(config: Mapping[str, Any], messages: int) -> None:
  """Raises ValueError if a cell would send more than MOST_COUNT messages."""
  if messages > MOST_COUNT:
    raise ValueError(
      f"config.epochs {config['epochs']:g} is {messages:.3g} messages in one"
      f" cell; use at most {MOST_COUNT:.0e}"
    )
