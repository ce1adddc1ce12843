"""Lookups by name; errors show the nearest valid name and all others."""

import difflib
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, Union, cast

from asgd import checks

_Maker = TypeVar("_Maker", bound=Callable[..., Any])

_DIGITS = {"1": "one", "2": "two"}  # in names such as one_f_one_b


def canonical(name: Any, valid: Iterable[str]) -> Any:
  """Returns the valid name that differs from `name` only in case, in "_", "-"
  or spaces, or in digits instead of words; otherwise `name` unchanged.

  Example:
    >>> canonical("1F1B", ["gpipe", "one_f_one_b"])
    'one_f_one_b'
  """
  if not isinstance(name, str) or name in valid:
    return name

  def letters(text: str) -> str:
    plain = "".join(_DIGITS.get(letter, letter) for letter in text.lower())
    return re.sub(r"[-_ ]", "", plain)

  wanted = letters(name)
  matches = (
    valid_name for valid_name in valid if letters(valid_name) == wanted
  )
  return next(matches, name)


def nearest(name: str, valid: Iterable[str]) -> str:
  """Returns a hint for a misspelt name: the nearest valid name, if one is near,
  and all valid names.

  The initials of several words are near: "lr" is near "learning_rate".
  """
  valid = sorted(set(valid))
  close_names = [
    valid_name
    for valid_name in valid
    if "_" in valid_name
    and "".join(word[:1] for word in valid_name.split("_")) == name
  ]
  if not close_names and isinstance(name, str):
    close_names = difflib.get_close_matches(name, valid, n=1, cutoff=0.55)
  hint = f"did you mean {close_names[0]!r}? " if close_names else ""
  return f"{hint}known: {', '.join(valid)}"


def check(kind: str, name: str, valid: Iterable[str]) -> None:
  """Raises ValueError, naming the nearest name, unless `name` is valid."""
  if not isinstance(name, str) or name not in valid:
    hint = nearest(name, valid)
    raise ValueError(f"unknown {kind} {checks.shown(name)}; {hint}")


class RecipeModule(types.ModuleType):
  """A module with the name of a recipe. A call of the module, as if it were the
  recipe, raises an error that names the recipe."""

  _recipe: str

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Raises TypeError."""
    del args, kwargs
    raise TypeError(
      f"{self.__name__} is a module, not a recipe: call {self._recipe}"
    )


def is_import(name: Any) -> bool:
  """Whether a name is of the form MODULE:FUNCTION."""
  return isinstance(name, str) and ":" in name


def import_paths(value: Any) -> Iterator[str]:
  """Yields each MODULE:FUNCTION in plain data, also several from one text with
  commas. Nothing is imported.

  Example:
    >>> list(import_paths({"name": "own:make", "runs": [{"recipe": "asgd"}]}))
    ['own:make']
  """
  if isinstance(value, Mapping):
    for inner in value.values():
      yield from import_paths(inner)
  elif isinstance(value, list | tuple):
    for inner in value:
      yield from import_paths(inner)
  elif is_import(value):
    for text in map(str.strip, value.split(",")):
      if all(part.isidentifier() for part in text.replace(":", ".").split(".")):
        # A part without a colon is not an import path: it is yielded 0 times.
        yield from [text] * is_import(text)


def import_function(kind: str, name: str) -> Callable[..., Any]:
  """Returns the function that MODULE:FUNCTION names. Raises ValueError if it
  cannot be imported or is not a function.

  Example:
    >>> import_function("schedule", "optax:cosine_decay_schedule").__name__
    'cosine_decay_schedule'
  """
  module, _, path = name.partition(":")
  subject = f"{kind} {checks.shown(name)}"
  parts = [*module.split("."), *path.split(".")]
  if not all(part.isidentifier() for part in parts):
    raise ValueError(f"{subject}: write MODULE:FUNCTION, as in mymodule:make")
  try:
    target: Any = importlib.import_module(module)
  except Exception as error:  # a user's module may raise anything
    remedy = ""
    if isinstance(error, ModuleNotFoundError):
      remedy = "; its folder must be that of the config file, or on PYTHONPATH"
    raise ValueError(
      f"{subject}: {module} cannot be imported"
      f" ({checks.line_of(error, 200)}){remedy}"
    ) from error
  for part in path.split("."):
    if not hasattr(target, part):
      public = [key for key in vars(target) if not key.startswith("_")]
      close_names = difflib.get_close_matches(part, public, n=1, cutoff=0.55)
      hint = f"; did you mean {close_names[0]!r}?" if close_names else ""
      raise ValueError(f"{subject}: {module} has no {part!r}{hint}")
    target = getattr(target, part)
  try:
    inspect.signature(target)
  except (TypeError, ValueError):
    raise ValueError(
      f"{subject} is {checks.shown(target)}, not a Python function: name a"
      " function"
    ) from None
  function: Callable[..., Any] = target
  return function


def resolve(kind: str, name: str, table: Mapping[str, Any]) -> Any:
  """Returns table[name], or the function that MODULE:FUNCTION names; raises the
  errors of `check` and `import_function`."""
  if is_import(name):
    return import_function(kind, name)
  try:
    return lookup(kind, name, table)
  except ValueError as error:
    hint = "; or MODULE:FUNCTION, your own" if isinstance(name, str) else ""
    raise ValueError(f"{error}{hint}") from None


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
  """Returns table[name]; raises the errors of `check`."""
  check(kind, name, table)
  return table[name]


# Type of plain data in configs -> its name in errors. A bool is no number.
_TYPE_NAMES = {
  bool: "True or False",
  float: "a number",
  str: "a text",
  list: "a list",
  dict: "a dict",
  type(None): "None",
}
_TYPES_BY_BASE = (  # (base class, key of _TYPE_NAMES)
  *((bool, bool), (int | float, float), (str, str), (Sequence, list)),
  *((Mapping, dict), (type(None), type(None))),
)


def _plain_type(cls: Any) -> type | None:
  """Returns the key of _TYPE_NAMES for a type; None for any other type."""
  cls = typing.get_origin(cls) or cls
  if not isinstance(cls, type):
    return None
  types_of_cls = (t for base, t in _TYPES_BY_BASE if issubclass(cls, base))
  return next(types_of_cls, None)


def _check_type(key: str, value: Any, parameter: inspect.Parameter) -> None:
  """Raises ValueError if a value is plain data of a type that the parameter's
  annotation (or, without one, its default) does not allow."""
  # Without an annotation the type of the default decides.
  annotation, empty = parameter.annotation, parameter.empty
  if annotation is empty:
    annotation = empty if parameter.default is None else type(parameter.default)
  members = (annotation,)
  is_union = isinstance(annotation, types.UnionType)
  if is_union or typing.get_origin(annotation) is Union:
    members = typing.get_args(annotation)
  allowed = list(dict.fromkeys(filter(None, map(_plain_type, members))))
  is_default = value is parameter.default
  if not allowed or Any in members or is_default:
    return
  # A value that is not plain data, such as an array, is left to the maker.
  if _plain_type(type(value)) not in (None, *allowed):
    words = " or ".join(_TYPE_NAMES[plain_type] for plain_type in allowed)
    raise ValueError(f"{key} must be {words}, not {checks.shown(value)}")


def check_arguments(
  kind: str, name: str, maker: Callable[..., Any], arguments: Iterable[str]
) -> None:
  """Raises ValueError, naming the argument, for an unknown argument or a
  missing one without a default."""
  arguments = list(arguments)
  parameters = inspect.signature(maker).parameters
  var_keyword = inspect.Parameter.VAR_KEYWORD
  variadic_kinds = inspect.Parameter.VAR_POSITIONAL, var_keyword
  argument_names = [
    key for key, p in parameters.items() if p.kind not in variadic_kinds
  ]
  takes_any = any(p.kind == var_keyword for p in parameters.values())
  for key in arguments:
    if key not in argument_names and not takes_any:
      hint = "it takes no options"
      if argument_names:
        hint = nearest(key, argument_names)
      raise ValueError(f"{kind} {name!r} takes no argument {key!r}; {hint}")
  for key in argument_names:
    is_required = parameters[key].default is inspect.Parameter.empty
    if is_required and key not in arguments:
      raise ValueError(f"{kind} {name!r} needs the argument {key!r}")


def call_with(
  kind: str,
  name: str,
  maker: Callable[..., Any],
  first: Any,
  kwargs: Mapping[str, Any],
) -> Any:
  """Calls maker(first, **kwargs), as `call` does. Any error of a user's
  function is raised as a ValueError."""
  make = functools.partial(maker, first)
  if not is_import(name):
    return call(kind, name, make, kwargs)
  try:
    inspect.signature(make)
  except ValueError:  # it has no positional parameter for `first`
    raise ValueError(
      f"{kind} {name!r} is called with {checks.shown(first)}, and takes no"
      " argument: give a function with one positional argument, and options"
    ) from None
  failure = f"{kind} {name!r} fails with {checks.shown(first)}"
  with checks.user_code(failure, passes=(ValueError,)):
    return call(kind, name, make, kwargs)


def call(
  kind: str,
  name: str,
  maker: Callable[..., Any],
  kwargs: Mapping[str, Any],
) -> Any:
  """Calls maker(**kwargs). Raises ValueError for an unknown or missing
  argument, and if the maker fails and an argument has the wrong type."""
  check_arguments(kind, name, maker, kwargs)
  parameters = inspect.signature(maker).parameters
  try:
    return maker(**kwargs)
  # Types are checked only after a failed call, because a maker may accept more
  # than its annotations.
  except (TypeError, AttributeError):
    for key in kwargs.keys() & parameters.keys():
      _check_type(key, kwargs[key], parameters[key])
    raise


def checked_recipe(maker: _Maker) -> _Maker:
  """Decorates a recipe: a wrong argument is an error of `call`."""

  @functools.wraps(maker)
  def recipe(learning_rate: Any, workers: int, **options: Any) -> Any:
    shared = {"learning_rate": learning_rate, "workers": workers}
    return call("recipe", maker.__name__, maker, {**shared, **options})

  return cast(_Maker, recipe)
