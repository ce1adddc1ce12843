"""What a worker computes: sums over the portions of a job."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, simulator
from asgd.sandblaster.shard import dot

# (parameters, portion) -> (float, gradient)
Work = Callable[[base.Params, int], tuple[Any, base.Params]]


@jax.jit
def _add(x, y):
  return jax.tree.map(jnp.add, x, y)


def make_sums(
  work: Work,
) -> Callable[[base.Params, Iterable[int]], tuple[float, base.Params]]:
  """Returns (parameters, portions) -> the sums of their losses and of their
  gradients, in the order of the portions; gradients are added up on the device
  and are then NumPy's.

  Example:
    >>> import jax
    >>> import numpy as np
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> loss, gradient = make_sums(work)(np.float32([3.0, 4.0]), range(2))
    >>> loss, gradient.tolist()
    (75.0, [18.0, 24.0])
  """

  def sums(params, portions):
    loss, gradient = 0.0, None
    for portion in portions:
      value, part = work(params, portion)
      loss += float(value)
      gradient = part if gradient is None else _add(gradient, part)
    return loss, simulator.fetch(gradient)

  return sums


def message_norm(message: base.Params, portions: int) -> float:
  """Returns the root mean square of the mean gradient that the sum over some
  portions is of."""
  size = sum(leaf.size for leaf in jax.tree.leaves(message))
  return math.sqrt(dot(message, message) / max(size, 1)) / portions
