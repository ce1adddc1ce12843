"""D2: a correction for differences between the data of peers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base


class PreviousStep(NamedTuple):
  """State of `correct_variance`."""

  params: base.Params  # x_{k-1}
  update: optax.Updates  # u_{k-1}, like params
  started: jax.Array  # bool[], False before the first update


def correct_variance() -> base.Transform:
  """Adds the change of the previous step to an update, as D2 does.

      update_k = u_k - u_{k-1} + x_k - x_{k-1},   update_0 = u_0

  u_k = -eta g_k is the update of the transforms before this one in a chain.
  After the mixing, x_{k+1} = W (2 x_k - x_{k-1} - eta g_k + eta g_{k-1}).

  Returns:
    A transform, which reads the parameters.

  Source:
    Tang et al., "D2: decentralized training over decentralized data", ICML
    2018, arXiv:1803.07068, algorithm 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.gossip import correct_variance
    >>> tx, x = correct_variance(), jnp.float32(8.0)
    >>> u, state = tx.update(jnp.float32(-1.0), tx.init(x), x)
    >>> print(u, tx.update(jnp.float32(-3.0), state, jnp.float32(5.0))[0])
    -1.0 -5.0
  """

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return PreviousStep(zeros, zeros, jnp.zeros([], bool))

  def update(updates, state, params=None, **extra):
    del extra

    # The first step has no predecessor to correct for.
    def add_change(u, x, previous_u, previous_x):
      return jnp.where(state.started, u - previous_u + (x - previous_x), u)

    new_updates = jax.tree.map(
      add_change, updates, params, state.update, state.params
    )
    return new_updates, PreviousStep(params, updates, jnp.ones([], bool))

  return optax.GradientTransformationExtraArgs(init, update)
