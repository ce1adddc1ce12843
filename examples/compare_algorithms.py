"""Compares how well four algorithms tolerate more workers, in simulated time.

All have the same learning rate and the same order of messages. The gap is the
distance that the parameters moved between sending and receiving.
"""

import jax.numpy as jnp
import numpy as np

import asgd

rng = np.random.default_rng(0)
X = rng.normal(size=(512, 20)).astype(np.float32)
Y = (X @ rng.normal(size=20) + 0.1 * rng.normal(size=512)).astype(np.float32)


def loss(w, batch):
  x, y = batch
  return ((x @ w - y) ** 2).mean()


recipes = asgd.asgd, asgd.nag_asgd, asgd.gap_aware, asgd.dana_zero
for workers in (4, 16):
  print(f"{workers} workers")
  for make in recipes:
    result = asgd.simulate(
      *(loss, jnp.zeros(20), (X, Y), make(0.005, workers=workers)),
      messages=640,
      batch_size=32,
      progress=False,
      on_nan="record",
    )
    name, gap = make.__name__, result.records.gap.mean()
    print(f"  {name:10} loss {loss(result.params, (X, Y)):9.3g}  gap {gap:.3g}")
