"""Texts that describe the objects of a caller: names, options, source code.

A results folder holds them, to recognise the same run. So they must not contain
an address in memory.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asgd import algorithms, base, names
from asgd.problems import user_code


def importable(name: str) -> Any:
  """Returns the function of MODULE:NAME, or None if it cannot be imported."""
  module, _, path = name.partition(":")
  if not names.is_import(name) or module == "__main__" or "<" in path:
    return None
  try:
    return names.import_function("function", name)
  except ValueError:
    return None


def describe_functions(config: Any, recipe: Any) -> dict[str, str]:
  """Returns the descriptions of the user's functions that a config, a recipe or
  its arguments name as MODULE:FUNCTION, by these names. Those that cannot be
  imported are left out: the run refuses them later."""
  texts, build = {}, _build_call(recipe)
  given = (build.name, build.options) if build else recipe
  for name in names.import_paths([config, given]):
    with contextlib.suppress(ValueError):
      function = names.import_function("function", name)
      if user_code.is_users_module(function.__module__ or ""):
        texts[name] = describe_object(function)
  return texts


_UPDATES = 0, 1, 10, 100, 1000, 10_000  # counts at which rates are sampled


def _rate(rate: float | Callable[[int], Any]) -> str:
  """Returns a learning rate as text, a schedule by samples."""
  if callable(rate):
    rates = (float(rate(update_count)) for update_count in _UPDATES)
    samples = ", ".join(f"{value:.6g}" for value in rates)
    return f"schedule({samples}, ...)"
  return repr(float(rate))


def _build_call(recipe) -> Any:
  """Returns the name and the arguments of `algorithms.build` that made a
  recipe; None if another function made it."""
  return getattr(recipe, "build", None)


def _describe_settings(value: Any) -> str:
  """Describes settings field by field, by the names of configs. The text of a
  run must not change if a class or module of asgd is renamed. Functions have
  the values that they close over, or a checksum of them: their names do not
  distinguish two rates or thresholds."""
  if hasattr(value, "_asdict"):
    return _describe_fields(value._asdict())
  if isinstance(value, tuple):
    return f"({', '.join(map(_describe_settings, value))})"
  module = getattr(value, "__module__", None) or ""  # None: made by exec
  if inspect.isfunction(value) and module.startswith("asgd."):
    name = value.__qualname__.partition(".")[0]
    options = inspect.getclosurevars(value).nonlocals
    return name + _describe_fields(options) if options else name
  return repr(value) if user_code.is_plain(value) else describe_object(value)


def _describe_fields(fields: Mapping[str, Any]) -> str:
  """Describes settings by name."""
  texts = (f"{key}={_describe_settings(x)}" for key, x in fields.items())
  return f"({', '.join(texts)})"


def describe_recipe(recipe: Any) -> str:
  """Returns a recipe's build call, or the settings of another protocol."""
  build = _build_call(recipe)
  if build is None and not isinstance(recipe, algorithms.Recipe):
    return f"{recipe.protocol}{_describe_settings(recipe)}"
  if build is None:
    return f"a Recipe of one's own ({recipe.order}, every={recipe.every})"
  options = {"workers": recipe.workers, **build.options}
  texts = {
    key: value if user_code.is_plain(value) else user_code.name_of(value)
    for key, value in options.items()
  }
  text = ", ".join(f"{key}={value!s}" for key, value in texts.items())
  change = "" if algorithms.is_as_built(recipe) else ", changed by hand"
  return f"{build.name}({_rate(build.learning_rate)}, {text}){change}"


def describe_object(value: Any) -> str:
  """Returns the name and a checksum of an order, durations, a codec, or a
  function. The checksum has the rows of a trace, or source and constants of
  functions."""
  is_trace = isinstance(value, base.Trace)
  texts = [column.tobytes() for column in value] if is_trace else []
  # A trace has no source, and a function has no columns.
  texts += [text.encode() for text in user_code.code_of(value)]
  texts += [] if is_trace else user_code.constants(value, set())
  digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
  return f"{user_code.name_of(value)} {digest}"


def plain_arguments(recipe: Any) -> dict[str, Any] | None:
  """Returns the arguments of `algorithms.build` for a recipe that was built
  from plain data, and not changed since; None for others."""
  build = _build_call(recipe)
  if build is None or not algorithms.is_as_built(recipe):
    return None
  if not user_code.is_plain([build.learning_rate, build.options]):
    return None
  return {
    "name": build.name,
    "learning_rate": float(build.learning_rate),
    "workers": recipe.workers,
    "options": dict(build.options),
  }


def digest_of_code(recipe: Any, loss: Any, params: Any, dataset: Any) -> str:
  """Returns a checksum of the source of a caller's functions, of the constants
  of the loss, of a model and of functions that make parameters or batches, and
  of the objects among the arguments of a recipe with their constants. A Recipe
  that was made or changed by hand has no arguments: its own constants are in
  the checksum."""
  build = _build_call(recipe)
  options = tuple(build.options.values()) if build else ()
  functions = loss, params, dataset, *options
  parts = [text.encode() for x in functions for text in user_code.code_of(x)]
  # Parameters and data in memory are in another checksum.
  users = [*loss] if isinstance(loss, tuple | list) else [loss]
  users += filter(callable, (params, dataset))
  for value in users:
    name, *constants = user_code.constants(value, set())
    # Two None: a function without defaults that closes over nothing.
    parts += [name, *constants] if constants not in ([], [b"None"] * 2) else []
  if isinstance(recipe, algorithms.Recipe):
    given: Any = recipe._replace(build=None)
    if build and algorithms.is_as_built(recipe):
      arguments = build.learning_rate, *options
      given = [value for value in arguments if not user_code.is_plain(value)]
    parts += user_code.constants(given, {id(recipe)})
  return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
