"""flax's TrainState for a user's own loop with transforms that read a Delay."""

import dataclasses
from typing import Any

import optax
from flax.training import train_state


class TrainState(train_state.TrainState):
  """A TrainState that passes extra args of `apply_gradients` to its transform.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> import asgd
    >>> tx = optax.chain(asgd.delay_compensation(0.04), optax.adam(1e-3))
    >>> state = asgd.TrainState.create(
    ...   apply_fn=None, params=jnp.ones(2), tx=tx
    ... )
    >>> sent = state.params  # a worker computes on them, while others update
    >>> for _ in range(3):
    ...   gradient = jax.grad(lambda w: (w**2).sum())(sent)
    ...   state = state.apply_gradients(grads=gradient, sent_params=sent)
    >>> print(state.params.round(4))
    [0.997 0.997]
  """

  def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
    """Returns the state after an update. A keyword that names a field replaces
    that field; others (sent_params, staleness, worker) go to the transform."""
    fields = {field.name for field in dataclasses.fields(self)}
    replaced_fields = {k: kwargs.pop(k) for k in fields & kwargs.keys()}
    tx = optax.with_extra_args_support(self.tx)
    updates, opt_state = tx.update(grads, self.opt_state, self.params, **kwargs)
    params = optax.apply_updates(self.params, updates)
    return self.replace(
      step=self.step + 1, params=params, opt_state=opt_state, **replaced_fields
    )
