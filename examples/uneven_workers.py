"""Compares equal work and work by speed, with one of two workers three times
slower.

In rounds the fast worker waits for the slow one. With batches in proportion to
speed both take the same time, and the same examples take less simulated time.
The second recipe is your own: an optax transform that reads staleness.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import asgd

x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
data, start = (x, x.sum(1)), jnp.zeros(8)


def loss(w, batch):
  return ((batch[0] @ w - batch[1]) ** 2).mean()


def halve_when_stale(limit):
  def update(updates, state, params=None, *, staleness, **extra_args):
    factor = jnp.where(staleness > limit, 0.5, 1.0)
    return jax.tree.map(lambda g: factor * g, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


own = optax.chain(halve_when_stale(1), optax.sgd(0.02))
for name, recipe in (("ssgd", asgd.ssgd(0.05, workers=2)), ("own", own)):
  for share in ("equal", "speed"):
    result = asgd.simulate(
      *(loss, start, data, recipe),
      messages=200,
      workers=2,
      batch_size=32,
      durations={"name": "constant", "slowdown": (1, 3)},
      allocation={"batch_size": share},
      progress=False,
    )
    print(
      f"{name:4} {share} work: time {result.records.time[-1]:5.1f},"
      f" staleness {result.records.staleness.mean():.2f},"
      f" loss {loss(result.params, data):.1e}"
    )
