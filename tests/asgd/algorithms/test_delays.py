"""Recipes that scale or drop late gradients, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from asgd import algorithms

pytestmark = pytest.mark.usefixtures("float64")


def path_of(recipe, *gradients, start=8.0):
  """Two workers begin at the same parameters; each sends its gradients in the
  given order, (worker, gradient), and is sent a ticket after each of them.

  Returns the parameters and the versions after each message."""
  server = recipe.server()
  state = server.init(jnp.float64(start))
  tickets = [server.send(state, jnp.int32(worker)) for worker in range(2)]
  path, versions = [], []
  for worker, gradient in gradients:
    state, _ = server.receive(state, tickets[worker], jnp.float64(gradient))
    tickets[worker] = server.send(state, jnp.int32(worker))
    path.append(float(state.params))
    versions.append(int(state.version))
  return path, versions


def close(found, expected):
  np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_adadelay_by_hand():
  # L = 2 and c = 2: alpha = 1 / (2 + 2 sqrt(t + tau)).
  recipe = algorithms.build("adadelay", 0.5, 2, strength=2.0)
  path, versions = path_of(recipe, (0, 12.0), (1, 12.0), (0, 6.0))
  second = 8 - 12 / (2 + 2 * 1)  # t = 1, fresh
  third = second - 12 / (2 + 2 * np.sqrt(2 + 1))
  close(path, [second, third, third - 6 / (2 + 2 * np.sqrt(3 + 1))])
  assert versions == [1, 2, 3]


def test_adadelay_reads_the_schedule_of_its_optimizer():
  # L = 1, then 2: the scale and the step read the rate of the same update.
  recipe = algorithms.build("adadelay", lambda count: 1.0 / (1.0 + count), 2)
  path, _ = path_of(recipe, (0, 4.0), (0, 4.0))
  close(path, [8 - 4 / (1 + 1), 6 - 4 / (2 + np.sqrt(2))])


def test_delay_adaptive_steps_by_hand():
  # The third gradient is two updates late: eta T / tau = 0.5 / 2.
  sent = (0, 4.0), (0, 4.0), (1, 4.0)
  scaled = algorithms.build("delay_adaptive", 0.5, 2, threshold=1)
  assert path_of(scaled, *sent) == ([6.0, 4.0, 3.0], [1, 2, 3])
  # By default T = N = 2, the concurrency: two is not too late.
  plain = algorithms.build("delay_adaptive", 0.5, 2)
  assert path_of(plain, *sent) == ([6.0, 4.0, 2.0], [1, 2, 3])
  drops = algorithms.build("delay_adaptive", 0.5, 2, threshold=1, late="drop")
  assert path_of(drops, *sent) == ([6.0, 4.0, 4.0], [1, 2, 2])


def test_a_threshold_of_one_is_the_staleness_aware_rule():
  sent = [(0, 4.0)] * 5 + [(1, 3.0), (1, 2.0)]
  paths = [
    path_of(algorithms.build(name, 0.25, 2, momentum=0.5, **options), *sent)
    for name, options in (
      ("delay_adaptive", {"threshold": 1}),
      ("staleness_aware", {}),
    )
  ]
  assert paths[0] == paths[1]


def test_the_gate_of_a_recipe_adds_to_the_gate_of_a_run():
  recipe = algorithms.build("delay_adaptive", 0.5, 2, late="drop")
  server = recipe.server(gate=lambda delay, message: message < 3.0)
  state = server.init(jnp.float64(8.0))
  ticket = server.send(state, jnp.int32(0))
  accepted = []
  for gradient in (4.0, 2.0, 2.0, 2.0, 2.0):
    state, report = server.receive(state, ticket, jnp.float64(gradient))
    accepted.append(bool(report.accepted))
  # Too large; fresh, one and two late; three late.
  assert accepted == [False, True, True, True, False]
  assert not server.alone
