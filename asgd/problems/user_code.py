"""The code of a caller's functions and models, and the values that it reads.

`code_of` and `constants` give texts for a checksum, by which a results folder
recognises the same run. They have no address in memory, and are the same in
each process.
"""

import argparse
import ast
import contextlib
import dataclasses
import dis
import functools
import importlib
import importlib.util
import inspect
import numbers
import os
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

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
# Parts of the paths of installed modules; beginnings of Python's and asgd's.
_FOLDERS = {"site-packages", "dist-packages"}
_LIBRARY_PATHS = (
  *("<frozen", os.path.join(sysconfig.get_path("stdlib"), "")),
  os.path.join(Path(__file__).parents[1], ""),
)


def code_of(value: Any) -> list[str]:
  """Returns texts: the source of functions, classes and classes of objects,
  without comments, and the plain values that a function closes over. Functions
  without a source, as in an interpreter, have their bytecode. There are none
  for code of libraries."""
  if isinstance(value, functools.partial):
    # The repr of a function has an address.
    args = (name_of(x) if callable(x) else repr(x) for x in value.args)
    return [*code_of(value.func), *args]
  if isinstance(value, (tuple, list)):
    return [text for part in value for text in code_of(part)]
  value = _python_function(value)
  if hasattr(value, "__wrapped__") and not _is_users(value):
    return code_of(value.__wrapped__)  # of jax.vmap, for example
  has_source = inspect.isroutine(value) or isinstance(value, type)
  source_owner = value if has_source else type(value)
  module = getattr(source_owner, "__module__", None) or ""  # None: made by exec
  if module.partition(".")[0] in _LIBRARIES or isinstance(value, np.ndarray):
    return []
  # The source of a function would be that of the function that it decorates.
  code = getattr(value, "__code__", None)
  if code:
    text = _source(code) or _bytecode(code)
  else:
    text = _class_source(source_owner)
  if code and text.count("ambda") > 1:
    # Several lambdas on one line have one source: their code distinguishes
    # them.
    text += _bytecode(code)
  closed_over = _closed_over(source_owner).values()
  plain = (repr(x) for x in closed_over if is_plain(x))
  return [text, *plain] if text else []


def _source(owner: Any) -> str:
  """Returns the source of code or of a class without comments and layout, which
  do not change a run; "" if there is none."""
  try:
    text = textwrap.dedent(inspect.getsource(owner))
  except (OSError, TypeError):
    return ""
  # getsource may cut a lambda out of the middle of a call: that text counts.
  with contextlib.suppress(SyntaxError):
    text = ast.dump(ast.parse(text))
  return text


# To find a class, `inspect` parses its whole module.
_class_source: Any = functools.lru_cache(maxsize=256)(_source)


def _bytecode(code: types.CodeType) -> str:
  """Returns the bytecode, the names and the plain constants of code."""
  kinds = types.CodeType
  constants = [
    _bytecode(x) if isinstance(x, kinds) else x
    for x in code.co_consts
    if isinstance(x, kinds) or is_plain(x)
  ]
  return repr((code.co_code, code.co_names, constants))


def _python_function(value: Any) -> Any:
  """Returns the function that `jax.jit` compiles; other values as they are."""
  while _is_wrapper(value):
    value = value.__wrapped__
  return value


def _is_wrapper(value: Any) -> bool:
  """Whether a value is an object that a library made of a function."""
  is_object = hasattr(value, "__wrapped__") and not inspect.isfunction(value)
  return is_object and not _has_users_code(type(value))


def _closed_over(function: Any) -> dict[str, Any]:
  """Returns the variables that a function closes over, by their names."""
  values = {}
  cells = getattr(function, "__closure__", None) or ()
  names = function.__code__.co_freevars if cells else ()
  for name, cell in zip(names, cells, strict=True):
    with contextlib.suppress(ValueError):  # the variable has no value yet
      values[name] = cell.cell_contents
  return values


# Methods that change a list, a dict or a set.
_CHANGES = {"add", "append", "extend", "insert", "pop", "setdefault", "update"}
_LONG = 1000  # items
_Path = tuple[str, ...]  # of names: ("X",), or ("module", "X") of module.X


def _paths_read(
  code: types.CodeType, owner: str = ""
) -> tuple[set[_Path], set[_Path]]:
  """Returns (read, changed): paths from the global variables, the variables of
  enclosing functions, and the imported modules of a function; and from its
  argument `owner`."""
  reads: set[_Path] = set()
  changes: set[_Path] = set()
  path: _Path = ()
  copied: _Path = ()  # of a += b
  steps = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
  end = -1  # index of the last instruction of the path
  for index, step in enumerate(steps):
    opname, name, is_next = step.opname, step.argval, index == end + 1
    is_owner = opname == "LOAD_FAST" and name == owner
    if opname in ("LOAD_GLOBAL", "LOAD_DEREF") or is_owner:
      path, end = (name,), index
      reads.add(path)
    elif is_next and opname in ("LOAD_ATTR", "LOAD_METHOD"):
      # The attribute is read alone, without the rest of its object.
      reads.discard(path)
      path, end = (*path, name), index
      reads.add(path)
    elif is_next and opname == "COPY":
      reads.discard(path)
      copied = path
    elif opname == "STORE_GLOBAL":
      changes.add((name,))
    elif opname == "STORE_ATTR":
      is_sum = steps[index - 1].opname == "SWAP"
      changes |= {(*path, name)} if is_next else set()
      changes |= {(*copied, name)} if is_sum and copied else set()
    elif opname == "STORE_SUBSCR" and index == end + 2:  # path[key] = ...
      is_key = steps[index - 1].opname.startswith("LOAD_")
      changes |= {path} if is_key else set()
    elif opname == "IMPORT_NAME":
      # A local variable has the module: each of its names may be read.
      reads |= {(f"import {name}", x) for x in code.co_names}
  return reads, changes


def _globals_read(function: types.FunctionType) -> Iterator[Any]:
  """Yields the values of global variables, and of attributes of the user's
  modules and objects, that a user's function reads and does not change, as far
  as they count (`_counts`)."""
  if not _is_users(function):
    return
  reads: set[_Path] = set()
  changes: set[_Path] = set()
  codes = [function.__code__]
  for code in codes:  # which grows: a function contains others
    codes += (c for c in code.co_consts if isinstance(c, types.CodeType))
    for paths, more in zip((reads, changes), _paths_read(code), strict=True):
      paths |= more
  closed_over = _closed_over(function)
  variables = function.__globals__ | closed_over
  values: dict[_Path, Any] = {}
  for path in reads:
    known, value = _follow(path, variables)
    is_container = isinstance(value, list | dict | set)
    if is_container and _CHANGES.intersection(path[len(known) :]):
      changes.add(known)
    # Other variables of enclosing functions count anyway.
    if known[0] not in closed_over or len(known) > 1 or _is_namespace(value):
      values[known] = value
  for known, value in sorted(values.items(), key=lambda item: item[0]):
    is_changed = any(known[: len(x)] == x for x in changes)
    if not is_changed and _counts(value):
      yield value


def _follow(path: _Path, variables: Mapping[str, Any]) -> tuple[_Path, Any]:
  """Returns (the part of a path that can be followed, its value)."""
  name, *attributes = path
  value: Any = variables.get(name)
  if name.startswith("import "):
    value = _imported(name.removeprefix("import "), variables)
  known_path: _Path = (name,)
  for attribute in attributes:
    is_module = isinstance(value, types.ModuleType)
    if is_module and not is_users_module(value.__name__):
      return known_path, None
    if isinstance(value, type):
      break  # a class counts as a whole
    if attribute in getattr(value, "__dict__", ()):
      value = vars(value)[attribute]
    elif _is_users(inspect.getattr_static(type(value), attribute, None)):
      value = getattr(value, attribute)  # a method
    elif is_module:
      return known_path, None
    elif _is_namespace(value) and attribute in getattr(value, "keys", tuple)():
      value = value[attribute]
    else:
      break
    known_path = *known_path, attribute
  return known_path, value


def _imported(name: str, variables: Mapping[str, Any]) -> Any:
  """Returns the module that a function imports itself; None for a library."""
  package = variables.get("__package__") or ""
  for full_name in (name, f"{package}.{name}".strip(".")):
    with contextlib.suppress(ImportError, ValueError):
      spec = importlib.util.find_spec(full_name)
      if spec and is_users_module(full_name, spec.origin or ""):
        return importlib.import_module(full_name)
  return None


def _counts(value: Any) -> bool:
  """Whether a global variable is in the checksum of a function: numbers, texts,
  arrays, functions and classes with code of the user, functions that close over
  values, objects of `_object_parts`, and what lists and dicts hold."""
  value = _python_function(value)
  if inspect.isfunction(value):
    return _is_users(value) or bool(value.__closure__)
  if isinstance(value, type):
    return _has_users_code(value)
  if inspect.ismethod(value):
    return _is_users(value.__func__)
  kinds = (
    *(str, numbers.Number, np.generic, np.ndarray, jax.Array),
    *(Mapping, tuple, list, set, frozenset, functools.partial),
  )
  is_known = isinstance(value, kinds) or _is_namespace(value)
  return is_known or bool(_object_parts(value))


def _is_namespace(value: Any) -> bool:
  """Whether a value holds settings by name, of which a function reads some: a
  Namespace, a ConfigDict."""
  if isinstance(value, types.SimpleNamespace | argparse.Namespace):
    return True
  class_ = type(value)
  has_keys = hasattr(class_, "keys") and hasattr(class_, "items")
  return has_keys and not isinstance(value, type | Mapping)


def _is_users(value: Any) -> bool:
  """Whether a value is a Python function or a class, and is not of an installed
  library."""
  module = getattr(value, "__module__", None) or ""  # None: made by exec
  if inspect.isfunction(value):
    return is_users_module(module, value.__code__.co_filename)
  return isinstance(value, type) and is_users_module(module)


def _has_users_code(class_: type) -> bool:
  """Whether a class or a base of it is a user's: flax makes classes, too."""
  return any(map(_is_users, class_.__mro__))


def is_users_module(name: str, path: str | None = None) -> bool:
  """Whether a module is not of an installed library. `path` is its file, if the
  caller knows it."""
  top = name.partition(".")[0]
  if path is None and name != "__main__":  # which a launcher may have started
    module = sys.modules.get(name) or sys.modules.get(top)
    path = getattr(module, "__file__", None)
  path = path or ""
  is_installed = path.startswith(_LIBRARY_PATHS) or (
    _FOLDERS & {*Path(path).parts}
  )
  is_library = top in _LIBRARIES or name in sys.builtin_module_names
  return not is_library and not is_installed


def _read_by_class(class_: type) -> Iterator[Any]:
  """Yields what the results of a user's class depend on beside its own source:
  its name, its base classes, its constants, and what its methods read."""
  yield class_.__name__
  yield from filter(_has_users_code, class_.__bases__)
  has_source = bool(code_of(class_))  # none in a notebook
  for name, value in vars(class_).items():
    for attribute in ("fget", "func"):  # of a property, of a cached one
      value = getattr(value, attribute, value)
    is_method = inspect.isroutine(value) or hasattr(value, "__wrapped__")
    # Methods may fill a list or a dict, as a log; the source has its start.
    is_filled = has_source and isinstance(value, list | dict | set)
    if not (is_method or is_filled or name.startswith("_")) and _counts(value):
      yield value
    while is_method:
      code = getattr(value, "__code__", None)
      prefix = f"{class_.__qualname__}."
      is_own = code is not None and code.co_qualname.startswith(prefix)
      # Not those that dataclasses generate.
      if code and (is_own or code.co_filename != "<string>"):
        if _is_users(value) and not (has_source and is_own):
          yield value
        values = *_closed_over(value).values(), *_globals_read(value)
        values += value.__defaults__, value.__kwdefaults__
        yield from (x for x in values if x is not class_)
      # A decorated method has the functions of its decorators around it.
      is_method = hasattr(value, "__wrapped__")
      value = value.__wrapped__ if is_method else None


def constants(value: Any, seen: set[Any]) -> Iterator[bytes]:
  """Yields the values of an object that change its results: those that its
  functions close over, such as the rates of a transform of optax, however deep,
  or read as globals, and the attributes of dataclasses and of a user's callable
  objects; and the source of those functions, and of classes. `seen` has the
  identities of functions, classes and objects that were visited; if there are
  none, the source of the first is known."""
  value = _opened(value, seen)
  if isinstance(value, jax.core.Tracer) or (
    isinstance(value, np.ndarray) and value.dtype == np.dtype(object)
  ):
    return  # of a trace that has ended, or addresses
  if isinstance(value, np.ndarray | jax.Array):
    if streams.is_key(value):
      value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    yield f"{array.dtype}{array.shape}".encode() + array.tobytes()
  elif isinstance(value, Mapping):
    key = "dict", id(value)
    if key not in seen:  # a dict may hold itself
      seen.add(key)
      for name, part in value.items():
        yield (name_of(name) if callable(name) else repr(name)).encode()
        yield from constants(part, seen)
      seen.remove(key)
  elif isinstance(value, tuple | list):
    if len(value) > _LONG and {*map(type, value)} <= {bool, int, float, str}:
      yield repr(value).encode()  # the same, in less time
    else:
      for part in value:
        yield from constants(part, seen)
  elif isinstance(value, set | frozenset):
    yield from sorted(name_of(part).encode() for part in value)
  else:
    yield name_of(value).encode()
    if id(value) in seen:
      return
    parts: Sequence[Any]
    if inspect.isfunction(value):
      closed_over = [*_closed_over(value).values()]
      parts = value.__defaults__, value.__kwdefaults__
      # `_globals_read` has the settings that a user's function reads.
      if _is_users(value):
        closed_over = [x for x in closed_over if not _is_namespace(x)]
      parts += *closed_over, *_globals_read(value)
    elif isinstance(value, type):
      parts = [*_read_by_class(value)] if _has_users_code(value) else []
    else:
      parts = _object_parts(value)
    if parts:
      if seen:
        yield from (text.encode() for text in code_of(value))
      seen.add(id(value))
      yield from constants(parts, seen)


def _opened(value: Any, seen: set[Any]) -> Any:
  """Returns the values in a wrapped function, a partial, a method or a
  Namespace; other values as they are. See `constants` for `seen`."""
  while _is_wrapper(value):
    has_rules = isinstance(value, jax.custom_jvp | jax.custom_vjp)
    names = ("jvp", "fwd", "bwd") if has_rules else ()
    rules = [getattr(value, name, None) for name in names]
    value = (value.__wrapped__, *rules) if rules else value.__wrapped__
  if isinstance(value, functools.partial):
    return value.func, value.args, value.keywords
  if inspect.ismethod(value):
    owner, key = value.__self__, ("owner", id(value.__self__))
    # An attribute of the owner may be the method itself, compiled.
    known = key in seen
    seen.add(key)
    of_owner = () if known else _object_parts(owner, is_owner=True)
    return value.__func__, *of_owner
  if _is_namespace(value):
    return dict(value.items()) if hasattr(value, "items") else vars(value)
  return value


def _object_parts(value: Any, *, is_owner: bool = False) -> Sequence[Any]:
  """Returns the attributes of an object, and its class if it is a user's. The
  owner of a class method is the class. Empty for other values."""
  class_ = value if isinstance(value, type) else type(value)
  counts = is_owner or callable(value) or dataclasses.is_dataclass(value)
  parts: list[Any] = [_attributes(value, is_owner=is_owner)]
  parts += [class_] if counts and _has_users_code(class_) else []
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
  if not is_users or not (callable(value) or is_owner):
    return {}
  changed = _changed_by_calls(type(value))
  attributes = getattr(value, "__dict__", {}).items()
  return {name: x for name, x in attributes if name not in changed}


_CALLED = "__call__", "__getitem__", "__iter__", "__next__"


def _changed_by_calls(class_: type) -> set[str]:
  """Returns the names of attributes that the calls of an object change, such as
  a counter or a cache: a second run with the same object is the same run."""
  changes: set[_Path] = set()
  for name in _CALLED:
    code = getattr(getattr(class_, name, None), "__code__", None)
    if code and code.co_argcount:
      read, changed = _paths_read(code, owner := code.co_varnames[0])
      changed |= {path[:-1] for path in read if path[-1] in _CHANGES}
      changes |= {path for path in changed if path[0] == owner}
  return {path[1] for path in changes if len(path) > 1}


def is_plain(value: Any) -> bool:
  """Whether a value is made of numbers, strings, lists and dicts."""
  if isinstance(value, Mapping):
    return all(map(is_plain, value.values()))
  if isinstance(value, Sequence) and not isinstance(value, str):
    return all(map(is_plain, value))
  return value is None or isinstance(value, (bool, int, float, str))
