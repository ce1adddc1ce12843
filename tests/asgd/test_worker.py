"""A local worker of one step is a gradient worker, bits included."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, orders, simulator
from asgd import worker as worker_lib
from asgd.orders import durations

KEY = jax.random.key(0)
WEIGHTS = {"w": np.float32(kit.normal(4, 3)), "b": np.zeros(3, np.float32)}


def loss(params, batch, key):
  """Softmax regression on noisy inputs; statistics are those of the batch."""
  x = batch + 0.1 * jax.random.normal(key, batch.shape)
  weights = base.weights_of(params)
  logits = jnp.tanh(x @ weights["w"]) + weights["b"]
  stats = {"mean": x.mean(0)} if isinstance(params, base.Variables) else ()
  return -jax.nn.log_softmax(logits)[:, 0].mean(), worker_lib.Aux(stats)


def batch(worker, job):
  del worker
  return np.float32(kit.normal(8, 4, seed=job))


@pytest.mark.parametrize(
  "params",
  [WEIGHTS, base.Variables(WEIGHTS, {"mean": np.zeros(4, np.float32)})],
  ids=["weights", "variables"],
)
def test_one_step_sends_the_gradient_to_the_bit(params):
  recipe = algorithms.build("asgd", 0.05, 2, momentum=0.9)
  server = recipe.server()
  trace = orders.asynchronous(durations.homogeneous(), workers=2, messages=8)
  results = []
  for worker in (
    recipe.make_worker(loss),
    worker_lib.local_worker(
      loss, optax.adam(0.1), steps=1, message="gradients"
    ),
  ):
    host = simulator.make_host(server, worker)
    simulation, records = simulator.run_whole(
      host, params, 2, trace, batch=batch, root=KEY
    )
    results.append((simulation.server, records))
  assert records.staleness.any()
  kit.same(*results)
