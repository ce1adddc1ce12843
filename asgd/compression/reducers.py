"""Means of compressed gradients, for devices that are in step.

A `Reducer` is called on every device of a mesh axis with its own gradient, and
returns what an all-reduce would: one tree, the same on all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from asgd import base
from asgd.compression.codec import Codec, composed

MOST_STEPS = 2**31 - 1  # that a reducer counts


class Reducer(NamedTuple):
  """A mean over a mesh axis, of less than whole gradients."""

  init: Callable[[base.Params], Any]  # shapes -> the state of one device
  # (state, tree, key, axis) -> (mean, state); the key is the same on all
  reduce: Callable[
    [Any, optax.Updates, jax.Array, str], tuple[optax.Updates, Any]
  ]
  # As of `Codec`; workers are devices, and messages steps.
  for_run: Callable[[int, float | None], "Reducer"] | None = None


def average(codec: Codec) -> Reducer:
  """Averages what each device's codec makes of its gradient.

    g <- mean_w decode(encode_w(g_w))

  Each device decodes its own code and the numbers are averaged: they are those
  of devices that send codes, not fewer bytes on this machine's links.

  Args:
    codec: any; each device has a state of its own.

  Returns:
    A Reducer.

  Source:
    none.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> reducer = compression.average(compression.threshold(1.0))
    >>> g = jnp.array([[2.0, 0.5], [3.0, -4.0]])
    >>> def reduce(g, key=jax.random.key(0)):
    ...   return reducer.reduce(reducer.init(g), g, key, "data")[0]
    >>> mean = jax.vmap(reduce, axis_name="data")(g)  # over two devices
    >>> print(mean[0])  # of [1, 0] and [1, -1]
    [ 1.  -0.5]
  """

  def reduce(state, tree, key, axis):
    key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    code, state = codec.encode(state, tree, key)
    return jax.lax.pmean(codec.decode(code), axis), state

  return Reducer(codec.init, reduce, composed(codec, average))
