"""Learning rates that may be numbers or schedules."""

import jax
import jax.numpy as jnp
import optax


def at(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """Returns the learning rate of update number `count`, float[]."""
  return jnp.asarray(rate(count) if callable(rate) else rate)
