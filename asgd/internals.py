"""Imports of unstable names of JAX and Ray, in one module.

No other module of this repository imports `jax.extend`, `jax._src` or a private
module of Ray (`asgd.live.ray_internals` calls `imported`). If the installed
version lacks a name, the error gives the versions of pyproject.toml.
"""

import importlib
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any


def requirement(library: str) -> str:
  """Returns this package's requirement on a library, as pip takes it.

  Example:
    >>> requirement("no-such-library")
    'no-such-library'
  """
  try:
    requirements = metadata.requires("asgd") or []
  except metadata.PackageNotFoundError:  # asgd is not installed, only present
    requirements = []
  for line in requirements:
    match = re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)", line)
    if match and match[1] == library and match[2]:
      return match[1] + match[2].strip()
  return library


def imported(path: str) -> Any:
  """Imports a dotted name and returns its value.

  Raises:
    ImportError: if the installed version of the library does not have it; the
      error names the versions that do.

  Example:
    >>> imported("jax.extend.core.Literal").__name__
    'Literal'
  """
  library = path.partition(".")[0]
  module, _, name = path.rpartition(".")
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError) as error:
    installed = metadata.version(library)
    raise ImportError(
      f"asgd uses {path}, which {library} {installed} does not have: pip"
      f" install '{requirement(library)}'"
    ) from error


# JAX's types for traced programs, which asgd inspects and rebuilds.
ClosedJaxpr = imported("jax.extend.core.ClosedJaxpr")
DebugInfo = imported("jax.extend.core.DebugInfo")
Jaxpr = imported("jax.extend.core.Jaxpr")
Literal = imported("jax.extend.core.Literal")
dce_jaxpr = imported("jax.interpreters.partial_eval.dce_jaxpr")
jaxpr_as_fun = imported("jax.extend.core.jaxpr_as_fun")
jaxprs_in_params = imported("jax.extend.core.jaxprs_in_params")
# Shows whether two calls are inside the same trace (jit, scan or grad).
get_opaque_trace_state = imported("jax.extend.core.get_opaque_trace_state")


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a traced program in order, with those of its inner
  programs."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


def operations(jaxpr: Any) -> Iterator[str]:
  """Yields the name of the operation of each equation, as `equations` does."""
  return (equation.primitive.name for equation in equations(jaxpr))


def xla_library() -> Any:
  """Returns JAX's compiled library. Its functions connect several processes on
  CPUs."""
  return imported("jax._src.xla_bridge._jax")


def has_devices() -> bool:
  """Whether JAX has initialised its devices. Such a process must not be
  forked."""
  return bool(imported("jax._src.xla_bridge.backends_are_initialized")())
