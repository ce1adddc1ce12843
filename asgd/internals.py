"""What JAX and Ray have, but do not promise to keep: found here, or refused.

Nothing else in this repository imports `jax.extend`, `jax._src` or a private
module of Ray, but for `asgd.live.ray_internals` through this module. A version
that lacks one is refused with the versions of pyproject.toml.
"""

import importlib
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any


def versions(library: str) -> str:
  """Returns the requirement of this package on a library, as pip takes it.

  Example:
    >>> versions("no-such-library")
    'no-such-library'
  """
  try:
    requirements = metadata.requires("asgd") or []
  except metadata.PackageNotFoundError:  # only the code is here
    requirements = []
  for requirement in requirements:
    match = re.match(r"([\w.-]+)(?:\[.*?\])?\s*([^;]*)", requirement)
    if match and match[1] == library and match[2]:
      return match[1] + match[2].strip()
  return library


def find(path: str) -> Any:
  """Returns what a dotted name stands for, imported.

  Raises:
    ImportError: if the installed version of the library has it no longer, or
      not yet; it names the versions that have it.

  Example:
    >>> find("jax.extend.core.Literal").__name__
    'Literal'
  """
  library = path.partition(".")[0]
  module, _, name = path.rpartition(".")
  try:
    return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError) as error:
    there = metadata.version(library)
    raise ImportError(
      f"asgd uses {path}, which {library} {there} does not have: pip install"
      f" '{versions(library)}'"
    ) from error


# Programs as JAX traces them, taken apart and put together again.
ClosedJaxpr = find("jax.extend.core.ClosedJaxpr")
DebugInfo = find("jax.extend.core.DebugInfo")
Jaxpr = find("jax.extend.core.Jaxpr")
Literal = find("jax.extend.core.Literal")
jaxpr_as_fun = find("jax.extend.core.jaxpr_as_fun")
jaxprs_in_params = find("jax.extend.core.jaxprs_in_params")
# Whether a function is called within the same jit, scan or grad as another.
get_opaque_trace_state = find("jax.extend.core.get_opaque_trace_state")


def equations(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a traced program, and of those within it, in
  order."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from equations(inner)


def operations(jaxpr: Any) -> Iterator[str]:
  """Yields the names of the operations of `equations`."""
  return (equation.primitive.name for equation in equations(jaxpr))


def xla_library() -> Any:
  """Returns JAX's compiled library, which makes the connections of several
  processes on CPUs."""
  return find("jax._src.xla_bridge._jax")


def has_devices() -> bool:
  """Whether JAX has looked for its devices, after which a process is not to be
  forked."""
  return bool(find("jax._src.xla_bridge.backends_are_initialized")())
