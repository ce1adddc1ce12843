"""Statistics of BatchNorm: owned by the server, averaged from messages.

With many workers, BatchNorm's running means and variances have no natural
owner: each worker sees only its batches, and no worker has the server's current
parameters. Here the server owns them, beside the weights in `base.Variables`. A
message has the statistics of one batch, and the server averages them in:

  stats <- decay stats + (1 - decay) batch_stats.

No gradient rule, momentum, look-ahead or gap uses them.
"""

from typing import Any

import jax
import optax

from asgd import base, checks


def own_statistics(
  algorithm: base.Algorithm, decay: float = 0.9
) -> base.Algorithm:
  """Extends an algorithm for weights to parameters of type `base.Variables`.

    stats <- decay stats + (1 - decay) batch_stats

  The algorithm gets weights only. Trees that are not `Variables` are passed to
  the algorithm unchanged, so this function can extend every algorithm.

  Args:
    algorithm: an Algorithm that handles weights only.
    decay: the weight of the old statistics, in [0, 1).

  Returns:
    An Algorithm of `Variables`. Its messages are `Variables`, too.

  Source:
    none: BatchNorm's update of statistics, with the server as their owner.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> from asgd import transforms
    >>> algorithm = asgd.as_algorithm(optax.sgd(0.5))
    >>> algorithm = transforms.own_statistics(algorithm, decay=0.75)
    >>> now = asgd.Variables(jnp.float32(8.0), stats=jnp.float32(0.0))
    >>> message = asgd.Variables(jnp.float32(4.0), stats=jnp.float32(4.0))
    >>> update, _ = algorithm.update(message, algorithm.init(now), now)
    >>> weights, stats = optax.apply_updates(now, update)
    >>> print(weights, stats)  # 8 - 0.5 4; 0.75 0 + 0.25 4
    6.0 1.0
  """
  checks.fraction("decay", decay)

  def init(params):
    return algorithm.init(base.weights_of(params))

  def update(updates, state, params=None, **extra_args):
    # A rule may compare `sent_params` with the weights, so `sent_params` must
    # be weights, too.
    if "sent_params" in extra_args:
      sent = base.weights_of(extra_args["sent_params"])
      extra_args = {**extra_args, "sent_params": sent}
    weights, state = algorithm.update(
      base.weights_of(updates), state, base.weights_of(params), **extra_args
    )
    if not isinstance(updates, base.Variables):
      return weights, state
    stats = _statistics_update(updates.stats, params.stats, decay)
    return base.Variables(weights, stats), state

  def send(opt_state, params, *, worker):
    weights = algorithm.send(opt_state, base.weights_of(params), worker=worker)
    return base.with_weights(params, weights)

  # Runtimes skip a compiled call if the send rule is `send_current`, so this
  # function must not wrap that rule.
  if algorithm.send is base.send_current:
    return base.Algorithm(init, update)
  return base.Algorithm(init, update, send)


def _statistics_update(batch_stats: Any, stats: Any, decay: float) -> Any:
  """Returns the update of statistics, (1 - decay) (batch_stats - stats). The
  update of a `StatsWithState` replaces the server's optimizer state by that of
  the message."""
  if isinstance(stats, base.StatsWithState):
    change = _statistics_update(batch_stats.stats, stats.stats, decay)
    # The server's state plus this update is the message's state.
    return base.StatsWithState(
      change, optax.tree.sub(batch_stats.state, stats.state)
    )
  return jax.tree.map(lambda x, y: (1 - decay) * (x - y), batch_stats, stats)
