"""Steps whose optimizer searches along a line (`asgd.optimizers.lbfgs`)."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from asgd.parallel import meshes


def check(mesh: Mesh, **options: Any) -> None:
  """Raises ValueError for a step that cannot be made with a search, which
  decides by numbers that each device computes from the whole parameters."""
  wanted = {"form": "shard_map", "zero": 0}
  for name, value in options.items():
    if value != wanted.get(name):
      raise ValueError(
        "an optimizer that searches along a line (lbfgs) needs"
        f" {name}={wanted.get(name)!r}, not {_shown(value)}"
      )
  if tuple(mesh.axis_names) != (meshes.DATA,):
    raise ValueError(
      "an optimizer that searches along a line (lbfgs) needs a mesh of the axis"
      f" {meshes.DATA!r} alone, not of {tuple(mesh.axis_names)}"
    )


def _shown(value):
  """A value of plain data; of anything else, what it is."""
  if isinstance(value, str | int | float):
    return repr(value)
  return f"a {type(value).__name__}"


def function_of(
  value_and_grad: Callable[[Any], tuple[jax.Array, Any]],
) -> Callable[[Any], jax.Array]:
  """Returns the value as a function that JAX may differentiate.

  Args:
    value_and_grad: weights -> (float[], gradient, like the weights).
  """

  @jax.custom_vjp
  def value_fn(weights):
    return value_and_grad(weights)[0]

  def backward(grads, cotangent):
    return (jax.tree.map(lambda g: cotangent.astype(g.dtype) * g, grads),)

  value_fn.defvjp(value_and_grad, backward)
  return value_fn
