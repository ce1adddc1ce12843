"""Numbers of a compiled function as its arguments.

XLA compiles a number of Python into a program, so two functions that differ in
one number are two programs. `constant` marks a number. `jit` passes marked
numbers as arguments, so functions that differ in these numbers alone share a
program in JAX's cache of compiled programs on disk.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import internals


def constant(value: float | jax.Array) -> jax.Array:
  """Returns a number, float[], that `jit` makes an argument of a program.

  Call it where the number is used, while the function is traced. Like a number
  of Python, it takes the dtype of the array that it is combined with. An array
  is returned as it is, and stays a constant.

  Example:
    >>> from asgd import hoisting
    >>> (hoisting.constant(0.5) * jnp.ones(2, jnp.bfloat16)).dtype
    dtype(bfloat16)
  """
  if isinstance(value, jax.Array):
    return value
  return _array(value, jax.config.jax_enable_x64)[0]


# `jit` finds a number in a traced program by the identity of its array. JAX
# replaces arrays without axes by their values, so this one has an axis.
@functools.lru_cache(maxsize=4096)
def _array(value: float, x64: bool) -> jax.Array:
  """Returns a number as float[1], the same array for the same arguments."""
  del x64  # the dtype depends on it
  with jax.ensure_compile_time_eval():
    return jnp.reshape(jnp.asarray(value), (1,))


class _Traced(NamedTuple):
  """A function that was traced for arguments of one signature."""

  signature: Any  # tree and types of the arguments
  program: Any  # ClosedJaxpr
  structure: Any  # PyTreeDef of the result


class HoistedFunction:
  """A compiled function; it takes numbers of `constant` as arguments."""

  def __init__(
    self, function: Callable[..., Any], donate_argnums: Sequence[int]
  ) -> None:
    """See `jit`."""
    self._function = function
    self._first: _Traced | None = None  # of the first call
    self._numbers: list[jax.Array] = []  # float[1] each, from the first trace

    @functools.wraps(function)  # the program has the name of the function
    def program(*arguments_and_numbers):
      return self._with_numbers(*arguments_and_numbers)

    self._compiled = jax.jit(program, donate_argnums=donate_argnums)

  def __call__(self, *arguments: Any) -> Any:
    """Calls the compiled function."""
    if self._first is None:
      self._trace_first(arguments)
    return self._compiled(*arguments, self._numbers)

  def lower(self, *arguments: Any) -> jax.stages.Lowered:
    """Lowers the program, as the function of `jax.jit` does. Its last argument
    is the list of numbers."""
    if self._first is None:
      self._trace_first(arguments)
    return self._compiled.lower(*arguments, self._numbers)

  def _trace_first(self, arguments: Sequence[Any]) -> None:
    """Traces the function, and collects its numbers."""
    traced = _trace(self._function, arguments)
    self._numbers = [x for x in traced.program.consts if _is_number(x)]
    self._first = traced

  def _with_numbers(self, *arguments_and_numbers: Any) -> Any:
    """Computes the function. The last argument has the values of its numbers,
    which replace its constants."""
    *arguments, values = arguments_and_numbers
    traced = self._first
    if traced is None or _signature(arguments) != traced.signature:
      traced = _trace(self._function, arguments)
    pairs = zip(self._numbers, values, strict=True)
    value_of = {id(number): value for number, value in pairs}
    # A number that was not in the first trace stays a constant.
    constants = [value_of.get(id(x), x) for x in traced.program.consts]
    program = internals.ClosedJaxpr(traced.program.jaxpr, constants)
    results = internals.jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(traced.structure, results)


def jit(
  function: Callable[..., Any], *, donate_argnums: Sequence[int] = ()
) -> HoistedFunction:
  """Compiles a function; its numbers of `constant` become arguments.

  Args:
    function: takes positional arguments, trees of arrays.
    donate_argnums: as in `jax.jit`.

  Returns:
    The compiled function. It has the results of `jax.jit(function)`, in which
    XLA may compute with a number in advance.

  Example:
    >>> from asgd import hoisting
    >>> print(hoisting.jit(lambda x: hoisting.constant(0.5) * x)(3.0))
    1.5
  """
  return HoistedFunction(function, donate_argnums)


def _trace(function: Callable[..., Any], arguments: Sequence[Any]) -> _Traced:
  """Traces a function for arguments."""
  program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  structure = jax.tree.structure(shapes)
  return _Traced(_signature(arguments), program, structure)


def _signature(arguments: Sequence[Any]) -> Any:
  """Returns the tree of arguments, and the type of each leaf."""
  leaves, structure = jax.tree.flatten(list(arguments))
  return structure, [jax.typeof(leaf) for leaf in leaves]


def _is_number(constant: Any) -> bool:
  """Whether a constant of a traced function may be one of `constant`."""
  is_array = isinstance(constant, jax.Array) and constant.shape == (1,)
  return is_array and jax.typeof(constant).weak_type
