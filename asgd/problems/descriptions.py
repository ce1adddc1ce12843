"""Texts that describe the objects of a caller: names, options, source code.

A results folder holds them, to recognise the same run. So they must not contain
an address in memory.
"""

import ast
import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import numbers
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from asgd import algorithms, base, names
from asgd.problems import streams


def name_of(value: Any) -> str:
  """Returns MODULE:NAME of a function, otherwise the name of a value's type."""
  # The options of a partial belong to its name: they change the run.
  if isinstance(value, functools.partial):
    options = ", ".join(f"{k}={name_of(v)}" for k, v in value.keywords.items())
    return f"{name_of(value.func)}({options})"
  if hasattr(value, "__qualname__"):
    return f"{value.__module__}:{value.__qualname__}"
  # Plain values are their own names.
  if value is None or isinstance(value, (str, numbers.Number)):
    return repr(value)
  is_plain_tuple = isinstance(value, (tuple, list)) and (
    not hasattr(value, "_fields")  # a NamedTuple is named by its type
  )
  if is_plain_tuple and any(map(callable, value)):
    return f"({', '.join(map(name_of, value))})"
  return type(value).__name__


_LIBRARIES = {"asgd", "flax", "jax", "optax", "builtins", "functools"}
# Beginnings of the files of Python's and of installed modules.
_INSTALLED = "<frozen", *map(
  sysconfig.get_path, ("stdlib", "purelib", "platlib")
)


def _code_of(value: Any) -> list[str]:
  """Returns texts: the source of functions, classes and classes of objects,
  without comments, and the plain values that a function closes over. There are
  none for code of libraries, and for code typed into an interpreter."""
  if isinstance(value, functools.partial):
    # The repr of a function has an address.
    args = (name_of(x) if callable(x) else repr(x) for x in value.args)
    return [*_code_of(value.func), *args]
  if isinstance(value, (tuple, list)):
    return [text for part in value for text in _code_of(part)]
  value = _python_function(value)
  has_source = inspect.isroutine(value) or isinstance(value, type)
  source_owner = value if has_source else type(value)
  module = getattr(source_owner, "__module__", None) or ""  # None: made by exec
  if module.partition(".")[0] in _LIBRARIES or isinstance(value, np.ndarray):
    return []
  try:
    text = textwrap.dedent(inspect.getsource(source_owner))
    # Without comments and layout, which do not change a run.
    text = ast.dump(ast.parse(text))
  except (OSError, TypeError):
    return []
  except SyntaxError:
    pass  # getsource cut a lambda out of the middle of a call: hash the text
  code = getattr(value, "__code__", None)
  if code is not None and text.count("ambda") > 1:
    # Several lambdas on one line have one source: their code distinguishes
    # them.
    constants = list(filter(_is_plain, code.co_consts))
    text += repr((code.co_code, code.co_names, constants))
  return [text, *(repr(x) for x in _closed_over(source_owner) if _is_plain(x))]


def _python_function(value: Any) -> Any:
  """Returns the function that `jax.jit` compiles; other values as they are."""
  return value if inspect.isfunction(value) else inspect.unwrap(value)


def _closed_over(function: Any) -> Iterator[Any]:
  """Yields the values of variables that a function closes over."""
  for cell in getattr(function, "__closure__", None) or ():
    with contextlib.suppress(ValueError):  # the variable has no value yet
      yield cell.cell_contents


def _globals_read(function: types.FunctionType) -> Iterator[Any]:
  """Yields the constants, and the user's functions and classes, among the
  global variables, and the variables of the user's modules, that a user's
  function reads and does not set."""
  if not _is_users(function):
    return
  # Path of names -> value: ("X",), or ("module", "X") of module.X.
  values: dict[tuple[str, ...], Any] = {}
  codes, names_set = [function.__code__], set()
  for code in codes:  # which grows: a function contains others
    codes += (c for c in code.co_consts if isinstance(c, types.CodeType))
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
      name = instruction.argval
      if instruction.opname == "LOAD_GLOBAL":
        path = (name,)
        values[path] = function.__globals__.get(name)
      elif path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        module = values[path]
        is_module = isinstance(module, types.ModuleType)
        if is_module and _is_users_module(module.__name__):
          path = (*path, name)
          values[path] = getattr(module, name, None)
        else:
          path = ()
      else:
        path = ()
        if instruction.opname == "STORE_GLOBAL":
          names_set.add(name)
  for path, value in sorted(values.items(), key=lambda item: item[0]):
    if value is not None and path[0] not in names_set and _is_constant(value):
      yield value


def _is_constant(value: Any) -> bool:
  """Whether a global variable is in the checksum of a function: numbers, texts,
  arrays, modules of flax, dataclasses of plain values, functions and classes of
  the user, and tuples, lists and dicts of these."""
  if isinstance(value, dict):
    return all(map(_is_constant, value.values()))
  if isinstance(value, tuple | list):
    return all(map(_is_constant, value))
  kinds = str, numbers.Number, np.generic, np.ndarray, jax.Array
  if value is None or isinstance(value, kinds):
    # A tracer of a trace that has ended has no value, and an array of objects
    # holds addresses.
    is_tracer = isinstance(value, jax.core.Tracer)
    return not is_tracer and getattr(value, "dtype", None) != np.dtype(object)
  if isinstance(value, nn.Module):
    return True
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return _is_plain(_attributes(value))
  return _is_users(_python_function(value))


def _is_users(value: Any) -> bool:
  """Whether a value is a Python function or a class, and is not of an installed
  library."""
  module = getattr(value, "__module__", None) or ""  # None: made by exec
  if inspect.isfunction(value):
    return _is_users_module(module, value.__code__.co_filename)
  return isinstance(value, type) and _is_users_module(module)


def _is_users_module(name: str, path: str | None = None) -> bool:
  """Whether a module is not of an installed library. `path` is its file, if the
  caller knows it."""
  if path is None:
    path = getattr(sys.modules.get(name), "__file__", None) or ""
  is_library = name.partition(".")[0] in _LIBRARIES
  is_installed = name in sys.builtin_module_names or path.startswith(_INSTALLED)
  return not is_library and not is_installed


def _read_by_class(class_: type) -> Iterator[Any]:
  """Yields what the results of a user's class depend on beside its own source:
  its base classes, and the global variables of `_globals_read` and variables of
  enclosing functions that its methods read."""
  yield from filter(_is_users, class_.__bases__)
  for value in vars(class_).values():
    method = inspect.unwrap(getattr(value, "fget", value))  # or a property's
    code = getattr(method, "__code__", None)
    if code and code.co_filename != "<string>":  # as dataclasses generate
      values = *_closed_over(method), *_globals_read(method)
      yield from (x for x in values if x is not class_)


def _constants(value: Any, seen: set[int]) -> Iterator[bytes]:
  """Yields the values of an object that change its results: those that its
  functions close over, such as the rates of a transform of optax, however deep,
  or read as globals, and the attributes of dataclasses and of a user's callable
  objects; and the source of those functions, and of classes. `seen` has the
  identities of functions, classes and objects that were visited; if there are
  none, the source of the first is known."""
  value = _python_function(value)
  if isinstance(value, functools.partial):
    value = value.func, value.args, value.keywords
  elif inspect.ismethod(value):
    value = value.__func__, *_object_parts(value.__self__, is_owner=True)
  if isinstance(value, np.ndarray | jax.Array):
    if streams.is_key(value):
      value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    yield f"{array.dtype}{array.shape}".encode() + array.tobytes()
  elif isinstance(value, Mapping):
    for key, part in value.items():
      yield repr(key).encode()
      yield from _constants(part, seen)
  elif isinstance(value, tuple | list):
    for part in value:
      yield from _constants(part, seen)
  else:
    yield name_of(value).encode()
    parts: Sequence[Any]
    if inspect.isfunction(value):
      parts = value.__defaults__, value.__kwdefaults__, *_closed_over(value)
      parts += *_globals_read(value),
    elif _is_users(value):  # a class
      parts = value.__name__, *_read_by_class(value)
    else:
      parts = _object_parts(value)
    if parts and id(value) not in seen:
      if seen:
        yield from (text.encode() for text in _code_of(value))
      seen.add(id(value))
      yield from _constants(parts, seen)


def _object_parts(value: Any, *, is_owner: bool = False) -> Sequence[Any]:
  """Returns the attributes of an object, and its class if it is a user's. The
  owner of a class method is the class. Empty for other values."""
  class_ = value if isinstance(value, type) else type(value)
  counts = is_owner or callable(value) or dataclasses.is_dataclass(value)
  parts: list[Any] = [_attributes(value, is_owner=is_owner)]
  parts += [class_] if counts and _is_users(class_) else []
  return list(filter(None, parts))


def _attributes(value: Any, *, is_owner: bool = False) -> dict[str, Any]:
  """Returns the fields of a dataclass, such as a Topology or a flax module, or
  the attributes of a user's object, if it is callable or the owner of a method;
  {} for other values."""
  if isinstance(value, type):
    return {}
  if dataclasses.is_dataclass(value):
    fields = dataclasses.fields(value)
    pairs = ((field, getattr(value, field.name, None)) for field in fields)
    # Another release of flax may have more fields: leave out their defaults.
    return {field.name: x for field, x in pairs if x is not field.default}
  is_users = type(value).__module__.partition(".")[0] not in _LIBRARIES
  has_attributes = is_users and (callable(value) or is_owner)
  return getattr(value, "__dict__", {}) if has_attributes else {}


def importable(name: str) -> Any:
  """Returns the function of MODULE:NAME, or None if it cannot be imported."""
  module, _, path = name.partition(":")
  if not names.is_import(name) or module == "__main__" or "<" in path:
    return None
  try:
    return names.import_function("function", name)
  except ValueError:
    return None


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
  return repr(value) if _is_plain(value) else describe_object(value)


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
  text = ", ".join(
    f"{key}={value if _is_plain(value) else name_of(value)!s}"
    for key, value in options.items()
  )
  change = "" if algorithms.is_as_built(recipe) else ", changed by hand"
  return f"{build.name}({_rate(build.learning_rate)}, {text}){change}"


def describe_object(value: Any) -> str:
  """Returns the name and a checksum of an order, durations, a codec, or a
  function. The checksum has the rows of a trace, or source and constants of
  functions."""
  is_trace = isinstance(value, base.Trace)
  texts = [column.tobytes() for column in value] if is_trace else []
  # A trace has no source, and a function has no columns.
  texts += [text.encode() for text in _code_of(value)]
  texts += [] if is_trace else _constants(value, set())
  digest = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
  return f"{name_of(value)} {digest}"


def _is_plain(value: Any) -> bool:
  """Whether a value is made of numbers, strings, lists and dicts."""
  if isinstance(value, Mapping):
    return all(map(_is_plain, value.values()))
  if isinstance(value, Sequence) and not isinstance(value, str):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, (bool, int, float, str))


def plain_arguments(recipe: Any) -> dict[str, Any] | None:
  """Returns the arguments of `algorithms.build` for a recipe that was built
  from plain data, and not changed since; None for others."""
  build = _build_call(recipe)
  if build is None or not algorithms.is_as_built(recipe):
    return None
  if not _is_plain([build.learning_rate, build.options]):
    return None
  return {
    "name": build.name,
    "learning_rate": float(build.learning_rate),
    "workers": recipe.workers,
    "options": dict(build.options),
  }


def digest_of_code(recipe: Any, loss: Any, params: Any, dataset: Any) -> str:
  """Returns a checksum of the source of a caller's functions, of the constants
  of the loss and of a function that makes batches, and of the objects among the
  arguments of a recipe with their constants. A Recipe that was made or changed
  by hand has no arguments: its own constants are in the checksum."""
  build = _build_call(recipe)
  options = tuple(build.options.values()) if build else ()
  functions = loss, params, dataset, *options
  parts = [text.encode() for x in functions for text in _code_of(x)]
  # Parameters and data in memory are in another checksum.
  users = [*loss] if isinstance(loss, tuple | list) else [loss]
  users += [dataset] if callable(dataset) else []
  for value in users:
    name, *constants = _constants(value, set())
    # Two None: a function without defaults that closes over nothing.
    parts += [name, *constants] if constants not in ([], [b"None"] * 2) else []
  if isinstance(recipe, algorithms.Recipe):
    given: Any = recipe._replace(build=None)
    if build and algorithms.is_as_built(recipe):
      arguments = build.learning_rate, *options
      given = [value for value in arguments if not _is_plain(value)]
    parts += _constants(given, {id(recipe)})
  return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
