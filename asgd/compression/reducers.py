"""Means of compressed gradients, for devices that compute in step.

Every device of a mesh axis calls a `Reducer` with its own gradient. As with an
all-reduce, all devices get the same tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from asgd import base
from asgd.compression.codec import Codec, fit_then_compose

MOST_STEPS = 2**31 - 1  # a reducer counts steps in an int32


class Reducer(NamedTuple):
  """A mean over a mesh axis, computed from compressed gradients."""

  init: Callable[[base.Params], Any]  # shapes -> the state of one device
  # (state, tree, key, axis) -> (mean, state); the key is the same on all
  reduce: Callable[
    [Any, optax.Updates, jax.Array, str], tuple[optax.Updates, Any]
  ]
  # See `Codec`; workers are devices here, and messages are steps.
  for_run: Callable[[int, float | None], "Reducer"] | None = None


def average(codec: Codec) -> Reducer:
  """Averages the decoded gradients of all devices' codecs.

    g <- mean_w decode(encode_w(g_w))

  Each device decodes its own code, and the decoded numbers are averaged. The
  mean is as if devices exchanged codes, but they do not send fewer bytes.

  Args:
    codec: any; each device has a separate state.

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
    # All devices get the same key; their draws must be independent.
    key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    code, state = codec.encode(state, tree, key)
    return jax.lax.pmean(codec.decode(code), axis), state

  return Reducer(codec.init, reduce, fit_then_compose(codec, average))
