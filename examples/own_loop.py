"""One transform in a loop of your own: SGD on gradients that come late.

A queue of sent parameters stands for three other workers. With DC-ASGD's
compensation in the chain, each gradient is corrected for how far the parameters
have moved since; the loop says where they were.
"""

import collections

import jax
import jax.numpy as jnp
import optax

import asgd

X = jax.random.normal(jax.random.key(0), (256, 10))
Y = (X.sum(1) > 0).astype(jnp.float32)


def loss(w):
  return optax.sigmoid_binary_cross_entropy(X @ w, Y).mean()


def train(tx, delay=3, updates=60):
  state = asgd.TrainState.create(apply_fn=None, params=jnp.zeros(10), tx=tx)
  sent = collections.deque([state.params] * (delay + 1))
  for _ in range(updates):
    old = sent.popleft()  # what the worker was sent, `delay` updates ago
    state = state.apply_gradients(grads=jax.grad(loss)(old), sent_params=old)
    sent.append(state.params)
  return float(loss(state.params))


sgd = optax.sgd(2.0, momentum=0.7)
compensated = optax.chain(asgd.delay_compensation(2.0), sgd)
print("delay 0, SGD      loss", round(train(sgd, delay=0), 4))
print("delay 3, SGD      loss", round(train(sgd), 4))
print("delay 3, DC-ASGD  loss", round(train(compensated), 4))
