"""Which algorithm stands more workers? Four of them, in simulated time.

All have the same learning rate and the same order of messages. The gap is how
far the parameters moved between sending and receiving.
"""

import jax.numpy as jnp
import numpy as np
import optax

import asgd

rng = np.random.default_rng(0)
X = rng.normal(size=(512, 20)).astype(np.float32)
Y = (X @ rng.normal(size=20) > 0).astype(np.float32)


def loss(w, batch):
  x, y = batch
  return optax.sigmoid_binary_cross_entropy(x @ w, y).mean()


recipes = asgd.asgd, asgd.nag_asgd, asgd.gap_aware, asgd.dana_zero
for workers in (4, 16):
  print(f"{workers} workers")
  for make in recipes:
    result = asgd.simulate(
      *(loss, jnp.zeros(20), (X, Y), make(0.5, workers=workers)),
      messages=640,
      batch_size=32,
      progress=False,
      on_nan="record",
    )
    name, gap = make.__name__, result.records.gap.mean()
    print(f"  {name:10} loss {loss(result.params, (X, Y)):8.4f}  gap {gap:.4f}")
