"""One transform in your own loop: SGD on delayed gradients.

A queue of sent parameters stands for three other workers. A transform before
the optimizer compensates for the staleness. The loop passes the staleness of a
gradient, and the parameters at which it was computed.
"""

import collections

import jax
import jax.numpy as jnp
import optax

import asgd

X = jax.random.normal(jax.random.key(0), (256, 10))
Y = jnp.tanh(X.sum(1))


def loss(w):
  return ((jnp.tanh(X @ w) - Y) ** 2).mean()


@jax.jit
def step(state, sent, staleness):
  grads = jax.grad(loss)(sent)
  return state.apply_gradients(
    grads=grads, sent_params=sent, staleness=staleness
  )


def train(name, tx, delay=3, updates=60):
  state = asgd.TrainState.create(apply_fn=None, params=jnp.zeros(10), tx=tx)
  sent = collections.deque([state.params] * (delay + 1))
  for _ in range(updates):
    state = step(state, sent.popleft(), delay)  # sent `delay` updates ago
    sent.append(state.params)
  print(f"delay {delay}, {name:22} loss {loss(state.params):.4f}")


sgd = optax.sgd(1.0)
train("SGD", sgd, delay=0)
train("SGD", sgd)
train("delay compensation", optax.chain(asgd.delay_compensation(0.5), sgd))
train("divided by staleness", optax.chain(asgd.scale_by_staleness(), sgd))
