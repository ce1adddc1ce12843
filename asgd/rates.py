"""Learning rates over the server's updates, as numbers or as schedules."""

import collections

import jax
import jax.numpy as jnp
import optax

from asgd import checks


def at(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """Returns the learning rate of update number `count`, float[]."""
  return jnp.asarray(rate(count) if callable(rate) else rate)


def check(name: str, rate: optax.ScalarOrSchedule) -> None:
  """Raises ValueError for a number that is no positive learning rate."""
  if not callable(rate):
    checks.positive(name, rate)


def warmup_steps(
  peak: float, *, warmup=0, start=0.0, boundaries=(), factor=0.1
) -> optax.ScalarOrSchedule:
  """Linear warm-up from `start` to `peak`, then drops at given updates.

  Args:
    peak: the learning rate after the warm-up.
    warmup: updates it takes; 0 for none.
    start: the learning rate of update 0; the DANA papers use peak / workers.
    boundaries: updates from which the rate is multiplied by `factor` once more;
      none of them is inside the warm-up.

  Returns:
    A schedule update -> learning rate, or `peak` itself if it never changes.
  """
  checks.positive("learning_rate", peak)
  if warmup < 0 or not 0 <= start <= peak:
    raise ValueError(
      f"warm-up must take 0 or more updates (not {warmup}) and start between 0"
      f" and the peak {peak} (not at {start})"
    )
  if boundaries:
    checks.positive("decay factor", factor)
  if any(boundary < warmup for boundary in boundaries):
    raise ValueError(
      f"the learning rate drops at updates {tuple(boundaries)}, inside the"
      f" warm-up of {warmup}"
    )
  if not warmup and not boundaries:
    return peak
  counts = collections.Counter(map(int, boundaries))
  drops = optax.piecewise_constant_schedule(
    peak, {at - warmup: factor**count for at, count in counts.items()}
  )
  if not warmup:
    return drops
  rise = optax.linear_schedule(start, peak, warmup)
  return optax.join_schedules([rise, drops], [warmup])


def scale_by_sent_rate(
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
  """Scales by minus the learning rate that was in force at the ticket.

  For the optimizer of a local worker (`asgd.worker.local_worker`). A schedule
  counts the server's updates; a worker knows that count from its ticket, and
  passes it as the extra arg `version`, int32[].
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
