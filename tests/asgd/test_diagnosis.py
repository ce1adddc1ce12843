"""Diagnosis: limits that theory knows, and eigenvalues that can be computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from asgd import algorithms, base, data, diagnosis, models, orders, problems
from asgd.orders import durations
from asgd.worker import Aux

pytestmark = pytest.mark.slow

# Learning rate x curvature, where w_{t+1} = w_t - eta lambda w_{t - tau} ceases
# to shrink, without momentum and with 0.9 (as in v <- 0.9 v + g).
PLAIN = {0: 2.0, 1: 1.0, 2: 0.618, 4: 0.3473, 8: 0.1845, 16: 0.0952, 32: 0.0483}
MOMENTUM = {0: 3.8, 1: 0.1, 2: 0.0512, 4: 0.0265, 8: 0.01394}


def spectral_radius(rate, staleness, momentum):
  """Of the linear recursion of delayed SGD on a curvature of 1.

  w_{t+1} = (1 + gamma) w_t - gamma w_{t-1} - rate w_{t-tau}.
  """
  polynomial = np.zeros(staleness + 3)  # of z^{tau + 2} and below
  polynomial[:3] = 1, -1 - momentum, momentum
  polynomial[staleness + 1] += rate
  return np.abs(np.roots(polynomial)).max()


def exact_limit(staleness, momentum):
  low, high = 0.0, 4.0
  for _ in range(40):
    middle = (low + high) / 2
    if spectral_radius(middle, staleness, momentum) > 1 + 1e-9:
      high = middle
    else:
      low = middle
  return low


def delayed_sgd_limit(staleness):
  """The largest stable learning rate x curvature of SGD at a fixed delay."""
  return 2 * np.sin(np.pi / (4 * staleness + 2))


def test_delayed_sgd_limit_is_the_table():
  for staleness, limit in PLAIN.items():
    got = delayed_sgd_limit(staleness)
    assert got == pytest.approx(limit, abs=0.5e-4)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 8, 32])
def test_delayed_sgd_limit_is_where_the_recursion_ceases_to_shrink(staleness):
  limit = delayed_sgd_limit(staleness)
  assert spectral_radius(limit, staleness, 0.0) == pytest.approx(1, abs=1e-6)
  assert spectral_radius(0.99 * limit, staleness, 0.0) < 1 - 1e-5
  assert spectral_radius(1.01 * limit, staleness, 0.0) > 1 + 1e-5


# The measured limit.

POINTS = 400
STEP = 40_000 ** (1 / (POINTS - 1))  # 1.027, between neighbours of the grid


def measure(name, trace, *, learning_rate=1.0, points=POINTS, **kwargs):
  """Returns the largest stable learning rate x curvature of a recipe."""
  workers = orders.check(trace)
  recipe = algorithms.build(name, learning_rate, workers, **kwargs)
  return learning_rate * diagnosis.curvature_limit(
    recipe, trace, learning_rate=learning_rate, points=points
  )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_curvature_limit_of_delayed_sgd_is_the_exact_one(staleness, momentum):
  exact = exact_limit(staleness, momentum)
  published = (MOMENTUM if momentum else PLAIN)[staleness]
  assert exact == pytest.approx(published, rel=2e-3)

  messages = 150 * (staleness + 1)
  trace = orders.fixed_delay(delay=staleness, messages=messages)
  limit = measure("asgd", trace, momentum=momentum)
  # The last stable point of the grid; growth within 0.2 % of the limit is too
  # slow to be seen.
  assert exact / STEP <= limit <= 1.002 * exact


# In a long order a stable path shrinks to where rounding holds it.
@pytest.mark.parametrize(("name", "workers"), [("asgd", 3), ("dana_zero", 1)])
def test_curvature_limit_does_not_depend_on_the_length_of_the_order(
  name, workers
):
  short, long = (
    measure(
      name,
      orders.fixed_delay(delay=workers - 1, messages=messages),
      learning_rate=0.5,
      points=100,
    )
    for messages in (60 * workers, 2000)
  )
  neighbour = 40_000 ** (1 / 99)
  assert short / neighbour <= long * (1 + 1e-6)
  assert long <= short * neighbour * (1 + 1e-6)


def test_curvature_limit_is_over_the_learning_rate():
  trace = orders.fixed_delay(delay=1, messages=200)
  limit = measure("asgd", trace, learning_rate=1.0)
  assert measure("asgd", trace, learning_rate=0.25) == pytest.approx(limit)


def test_limits_of_the_algorithms_at_eight_workers():
  trace = orders.asynchronous(durations.homogeneous(), workers=8, messages=480)
  names = ("nag_asgd", "multi_asgd", "dana_zero", "asgd")
  nag, multi, dana, plain = (measure(name, trace, points=48) for name in names)
  assert nag < multi < dana < plain
  assert measure("dana_slim", trace, points=48) == dana


def test_look_ahead_of_a_single_worker_is_nesterov_whatever_its_name():
  trace = orders.fixed_delay(delay=0, messages=200)
  limit = measure("nag_asgd", trace, points=48)
  for name in ("multi_asgd", "dana_zero", "dana_slim"):
    assert measure(name, trace, points=48) == limit


@pytest.mark.parametrize(
  ("plain", "compensated"), [("asgd", "dc_asgd_c"), ("dana_zero", "dana_dc")]
)
def test_delay_compensation_leaves_the_limit_where_it_is(plain, compensated):
  # It adds g g (w - w_sent), of third order in w. Where a path does grow, that
  # term may end it in a cycle, which is not stability.
  trace = orders.asynchronous(durations.homogeneous(), workers=4, messages=1600)
  limit, other = (
    measure(name, trace, learning_rate=0.1, points=48)
    for name in (plain, compensated)
  )
  assert limit == other


def test_division_by_the_staleness_multiplies_the_limit_by_it():
  staleness = 3
  trace = orders.fixed_delay(delay=staleness, messages=150 * (staleness + 1))
  exact = staleness * delayed_sgd_limit(staleness)
  limit = measure("staleness_aware", trace)
  assert exact / STEP <= limit <= 1.002 * exact


def test_a_stopped_job_does_not_change_the_limit():
  clock = durations.heterogeneous(seed=2)
  trace = orders.with_stops(clock, workers=4, messages=200, stop_after=2)
  kept = trace.action != base.STOP
  assert kept.sum() < len(kept) - 20
  rate, recipe = 0.1, algorithms.build("asgd", 0.1, 4)
  limits = [
    diagnosis.curvature_limit(recipe, rows, learning_rate=rate)
    for rows in (trace, base.Trace(*(column[kept] for column in trace)))
  ]
  assert limits[0] == limits[1]
  # No message is more than one update late.
  assert rate * limits[0] > delayed_sgd_limit(1) / STEP


def test_a_dropped_message_does_not_change_the_limit():
  clock = durations.heterogeneous(seed=0)
  trace = orders.backup_tasks(clock, workers=4, messages=160, late=1.5)
  kept = trace.action != base.DROP
  assert kept.sum() < len(kept) - 10
  recipe = algorithms.build("ssgd", 0.1, 4)
  limits = [
    diagnosis.curvature_limit(recipe, rows, learning_rate=0.1)
    for rows in (trace, base.Trace(*(column[kept] for column in trace)))
  ]
  assert limits[0] == limits[1]


def test_synchronous_workers_have_the_limit_of_one():
  trace = orders.bulk_synchronous(
    durations.homogeneous(), workers=4, messages=600
  )
  assert 2 / STEP <= measure("ssgd", trace) <= 2


def test_curvature_limit_stays_within_its_grid():
  trace = orders.fixed_delay(delay=0, messages=100)
  stable = algorithms.build("asgd", 0.25, 1)  # up to a curvature of 8
  got = diagnosis.curvature_limit(stable, trace, learning_rate=1.0)
  assert got == pytest.approx(4.0)
  unstable = algorithms.build("asgd", 1e6, 1)  # from 2e-6 on
  got = diagnosis.curvature_limit(unstable, trace, learning_rate=1.0)
  assert got == 0.0


# Sharpness.


def test_sharpness_of_a_quadratic_is_its_largest_curvature():
  problem = problems.quadratic([3.0, 0.5, 7.0, 1.0])
  sharpness = diagnosis.make_sharpness(
    problem.loss, problem.probe, iterations=30
  )
  for point in (np.ones(4), np.arange(4.0)):
    got = sharpness(jnp.asarray(point, jnp.float32))
    assert isinstance(got, float)
    assert got == pytest.approx(7.0, rel=1e-5)


def test_sharpness_is_an_estimate_from_below_that_rises():
  problem = problems.quadratic([1.0, 2.0, 2.5, 3.0])
  params = problem.init(jax.random.key(0))
  values = [
    diagnosis.make_sharpness(problem.loss, problem.probe, iterations=n)(params)
    for n in (1, 2, 4, 8)
  ]
  assert 1 < values[0] < values[1] < values[2] < values[3] < 3


def test_sharpness_of_a_network_is_the_top_of_its_hessian():
  problem = problems.classification(
    data.load("digits"), models.build("mlp", 10, hidden=(4,)), batch_size=32
  )
  batch = tuple(x[:64] for x in problem.probe)
  key = jax.random.key(0)
  params = problem.init(key)
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    flat, unravel = ravel_pytree(params)
    hessian = jax.jit(
      jax.hessian(lambda w: problem.loss(unravel(w), batch, key)[0])
    )(flat)
    *_, second, top = np.linalg.eigvalsh(hessian)
    assert second < 0.85 * top  # so 40 products leave 0.85^80 = 2e-6
    sharpness = diagnosis.make_sharpness(problem.loss, batch, iterations=40)
    assert sharpness(params) == pytest.approx(top, rel=1e-4)


def test_sharpness_varies_weights_only():
  def loss(params, batch, key):
    del key
    curvature = batch * params.stats["scale"]
    value = 0.5 * jnp.sum(curvature * params.weights["w"] ** 2)
    return value + 1e3 * jnp.sum(params.stats["scale"] ** 2), Aux(())

  params = base.Variables({"w": jnp.ones(2)}, {"scale": jnp.array([2.0, 1.0])})
  batch = jnp.array([3.0, 1.0])
  sharpness = diagnosis.make_sharpness(loss, batch, iterations=20)
  assert sharpness(params) == pytest.approx(6.0, rel=1e-5)


def test_sharpness_of_a_saddle_is_its_upward_curvature():
  def loss(params, batch, key):
    del key
    return 0.5 * jnp.sum(batch * params**2), Aux(())

  batch = jnp.array([1.0, -3.0])
  sharpness = diagnosis.make_sharpness(loss, batch, iterations=40)
  assert sharpness(jnp.ones(2)) == pytest.approx(1.0, rel=1e-4)


def test_sharpness_of_a_flat_loss_is_zero():
  def loss(params, batch, key):
    del key
    return jnp.sum(batch * params), Aux(())

  sharpness = diagnosis.make_sharpness(loss, jnp.ones(2))
  assert sharpness(jnp.ones(2)) == 0.0


def test_sharpness_is_not_finite_where_the_loss_is_not():
  problem = problems.quadratic([1.0, 2.0])
  sharpness = diagnosis.make_sharpness(problem.loss, problem.probe)
  for weight in (np.inf, np.nan):
    assert not np.isfinite(sharpness(jnp.array([weight, 1.0])))


@pytest.mark.parametrize("iterations", [0, -1])
def test_sharpness_needs_an_iteration(iterations):
  problem = problems.quadratic([1.0])
  words = f"iterations must be .* not {iterations}"
  with pytest.raises(ValueError, match=words):
    diagnosis.make_sharpness(problem.loss, problem.probe, iterations=iterations)


def test_directions_of_small_models_are_those_of_optax():
  key = jax.random.key(3)
  weights = [jnp.zeros(shape) for shape in ((3,), (5, 4), (), (2, 1, 3))]
  drawn = diagnosis._random_direction(key, weights)
  wanted = optax.tree.random_like(key, weights)
  for mine, theirs in zip(drawn, wanted, strict=True):
    np.testing.assert_array_equal(mine, theirs)
