"""Statistics of BatchNorm: owned by the server, averaged from messages.

BatchNorm's running means and variances have no natural owner when many workers
train: each sees its own batches, and none sees the server's parameters. Here
the server owns them. They ride with the weights in `base.Variables`; a
message carries the statistics of one batch, and the server averages them in:

  stats <- decay stats + (1 - decay) batch_stats.

No gradient rule, momentum, look-ahead or gap ever touches them.
"""

import jax

from asgd import base, checks


def own_statistics(
  algorithm: base.Algorithm, decay: float = 0.9
) -> base.Algorithm:
  """Lets an algorithm on weights train `base.Variables`.

  It sees weights only. A tree that is not `Variables` passes through, so this
  can wrap every algorithm. Of the statistics, `decay` is kept, in [0, 1).
  """
  checks.fraction("decay", decay)

  def init(params):
    return algorithm.init(base.weights_of(params))

  def update(updates, state, params=None, **extra_args):
    if "sent_params" in extra_args:
      sent = base.weights_of(extra_args["sent_params"])
      extra_args = {**extra_args, "sent_params": sent}
    weights, state = algorithm.update(
      base.weights_of(updates), state, base.weights_of(params), **extra_args
    )
    if not isinstance(updates, base.Variables):
      return weights, state
    stats = jax.tree.map(
      lambda new, old: (1 - decay) * (new - old), updates.stats, params.stats
    )
    return base.Variables(weights, stats), state

  def send(opt_state, params, *, worker):
    weights = algorithm.send(opt_state, base.weights_of(params), worker=worker)
    return base.with_weights(params, weights)

  if algorithm.send is base.send_current:
    return base.Algorithm(init, update)
  return base.Algorithm(init, update, send)
