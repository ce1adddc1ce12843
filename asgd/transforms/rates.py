"""Learning rates that may be numbers or schedules."""

import jax
import jax.numpy as jnp
import optax


def at(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """Returns the learning rate of update number `count`, float[]."""
  return jnp.asarray(rate(count) if callable(rate) else rate)


def scale_by_sent_rate(
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
  """Scales by minus the learning rate that was in force at the ticket.

  For the optimizer of a worker that works locally. A schedule counts the
  server's updates, and a worker that counted its own steps would not know
  where the others have come to; but its ticket says which version it is of.
  The rate is constant within a job.

  Args:
    learning_rate: a number, or a schedule over the server's updates.

  Returns:
    A stateless transform whose update, if the rate is a schedule, needs the
    extra arg `version`, int32[], as `asgd.worker.local_worker` passes it.
  """
  if not callable(learning_rate):
    return optax.scale_by_learning_rate(learning_rate)

  def update_fn(updates, state, params=None, *, version, **extra_args):
    del params, extra_args
    rate = at(learning_rate, version)
    return jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates), state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )
