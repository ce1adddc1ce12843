"""A local worker of one step is a gradient worker, bits included."""

import jax
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, data, models, orders, problems, simulator
from asgd import worker as worker_lib
from asgd.orders import durations

KEY = jax.random.key(0)
MODELS = {
  "weights": models.mlp(3, hidden=(4,)),
  "variables": (models.Stem(2, "batch"), models.Head(3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_step_sends_the_gradient_to_the_bit(name):
  images = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 1), np.uint8)
  labels = np.arange(24, dtype=np.int32) % 3
  dataset = data.Dataset(
    *("random", "drawn here", images, labels, images[:8], labels[:8], 3),
    *(np.float32([128]), np.float32([74])),
  )
  # Augmentation draws from the key.
  problem = problems.classification(
    dataset, MODELS[name], batch_size=4, augment=True
  )
  recipe = algorithms.build("asgd", 0.05, 2, momentum=0.9)
  server = recipe.server()
  trace = orders.asynchronous(durations.homogeneous(), workers=2, messages=6)
  results = []
  for worker in (
    recipe.make_worker(problem.loss),
    worker_lib.local_worker(
      problem.loss, optax.adam(0.1), steps=1, message="gradients"
    ),
  ):
    simulation, records = simulator.run_whole(
      *(simulator.make_host(server, worker), problem.init(KEY), 2, trace),
      **dict(batch=problem.batches(0, 2), root=KEY),
    )
    results.append((simulation.server, records))
  assert records.staleness.any()
  kit.same(*results)
