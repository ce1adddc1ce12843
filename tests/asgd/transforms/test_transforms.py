"""The transforms, against their equations worked by hand or in NumPy."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import base, rates, transforms
from asgd.transforms import rows as rows_lib

pytestmark = pytest.mark.usefixtures("float64")


def update(tx, gradient, params=None, sent=None, state=None, staleness=1):
  """An update by a gradient that worker 0 computed at `sent`."""
  state = tx.init(params) if state is None else state
  delay = base.Delay(jnp.int32(0), jnp.int32(staleness), sent)
  return tx.update(jnp.asarray(gradient), state, params, **delay._asdict())


close = functools.partial(np.testing.assert_allclose, rtol=1e-15)


@pytest.mark.parametrize(
  ("staleness", "factor"), [(0, 1.0), (1, 1.0), (2, 0.5), (7, 1 / 7)]
)
def test_staleness_divides_but_for_a_fresh_gradient(staleness, factor):
  tx = transforms.scale_by_staleness()
  close(update(tx, [3.0], staleness=staleness)[0], [3.0 * factor])


@pytest.mark.parametrize(
  ("staleness", "factor"), [(0, 1.0), (4, 1.0), (5, 0.8), (16, 0.25)]
)
def test_staleness_divides_beyond_a_grace(staleness, factor):
  tx = transforms.scale_by_staleness(grace=4)
  close(update(tx, [3.0], staleness=staleness)[0], [3.0 * factor])


def test_compensation_is_lambda_g_g_times_the_distance():
  tx = transforms.delay_compensation(0.5)
  params, sent = jnp.array([1.0, -1.0]), jnp.array([0.0, 1.0])
  updates, _ = update(tx, [2.0, 3.0], params, sent)
  close(updates, [4.0, -6.0])  # 2 + 0.5 * 4 * 1 and 3 + 0.5 * 9 * -2


def test_compensation_over_adadelta_is_that_of_bytedance_monolith():
  # The numbers of its dc_optimizer_test.cc, within the 1e-6 that it allows.
  tx = optax.chain(
    transforms.delay_compensation(0.1),
    optax.adadelta(0.01, rho=0.9, eps=0.01),
  )
  params, g = jnp.zeros(2), jnp.array([10.0, 1.0])
  state = tx.init(params)
  for sent, expected in (
    (0.1, [-0.0031603, -0.00301233]),
    (0.0, [-0.0065548, -0.0061140]),
  ):
    updates, state = update(tx, g, params, jnp.full(2, sent), state)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-6)
    if sent:  # 0.1 9^2 and 0.1 0.99^2, as 10 + 0.1 10^2 (0 - 0.1) = 9
      accumulator = optax.tree.get(state, "e_g")
      np.testing.assert_allclose(accumulator, [8.1, 0.09801], rtol=1e-6)


def test_adaptive_compensation_takes_in_the_gradient_first():
  tx = transforms.adaptive_delay_compensation(2.0, decay=0.75, eps=0.0)
  params, sent = jnp.array([1.0]), jnp.array([0.5])
  updates, state = update(tx, [4.0], params, sent)
  # Mean square 0.25 * 16 = 4; lambda = 2 / 2; 4 + 1 * 16 * 0.5.
  close(updates, [12.0])
  updates, _ = update(tx, [2.0], params, sent, state)
  # Mean square 0.75 * 4 + 0.25 * 4 = 4; lambda = 1; 2 + 4 * 0.5.
  close(updates, [4.0])


def test_adaptive_compensation_does_not_divide_by_zero():
  tx = transforms.adaptive_delay_compensation()
  params = jnp.array([1.0])
  assert update(tx, [0.0], params, params - 1)[0] == 0.0


def gap_aware_reference(
  gradients, distances, rates_, momentum, decay, average
):
  """The equations, one parameter, in plain Python."""
  v = a = largest = 0.0
  samples, out = 0, []
  for g, distance, rate in zip(gradients, distances, rates_, strict=True):
    largest = max(largest, rate)
    if average == "gradients":
      a, samples = decay * a + (1 - decay) * g * g, samples + 1
    if samples:
      size = largest * (np.sqrt(a / (1 - decay**samples)) + 1e-8)
      g = g / (1 + abs(distance) / size)
    v = momentum * v + g
    if average == "updates":
      a, samples = decay * a + (1 - decay) * v * v, samples + 1
    out.append(-rate * v)
  return out


@pytest.mark.parametrize(
  ("momentum", "average", "rule"),
  [
    (None, None, "gradients"),
    (None, "updates", "updates"),
    (0.9, None, "updates"),
    (0.9, "gradients", "gradients"),
  ],
)
def test_gap_awareness_follows_its_equations_through_a_decay(
  momentum, average, rule
):
  rng = np.random.default_rng(0)
  gradients, distances = rng.normal(size=(2, 12))
  steps = [0.1] * 6 + [0.01] * 6
  schedule = optax.piecewise_constant_schedule(0.1, {6: 0.1})
  tx = transforms.gap_aware(
    optax.sgd(schedule, momentum), schedule, average=average, decay=0.9
  )
  params = jnp.array([0.3])
  state = tx.init(params)
  expected = gap_aware_reference(
    gradients, distances, steps, momentum or 0.0, 0.9, rule
  )
  for g, distance, value in zip(gradients, distances, expected, strict=True):
    updates, state = update(tx, [g], params, params - distance, state)
    close(updates, [value], rtol=1e-6)
  np.testing.assert_allclose(state.largest_rate, 0.1, rtol=1e-6)


def test_gap_awareness_of_updates_penalizes_nothing_before_the_first():
  tx = transforms.gap_aware(optax.sgd(0.1, 0.9), 0.1)
  params = jnp.array([1.0])
  assert update(tx, [2.0], params, params - 5)[0] == -0.2


def test_gap_awareness_reads_distance_elementwise():
  tx = transforms.gap_aware(
    optax.sgd(1.0), 1.0, average="updates", decay=0.0, eps=0.0
  )
  params = jnp.array([1.0, 1.0])
  _, state = update(tx, [2.0, 2.0], params, params)
  sent = params - jnp.array([0.0, 4.0])
  updates, _ = update(tx, [6.0, 6.0], params, sent, state)
  # One parameter did not move; the other moved by two typical updates.
  close(updates, [-6.0, -2.0])


def test_each_message_is_divided_by_the_gap_to_its_own_ticket():
  tx = transforms.divide_by_gap(decay=0.5, eps=0.0)
  path = np.array([8.0, 8.0, 6.0, 6.0, 7.0])  # two steps: -2, and 1
  squares = [None, None, 4.0, 4.0, (0.25 * 4 + 0.5 * 1) / 0.75]
  state = tx.init(jnp.array([path[0]]))
  for now, square in zip(path, squares, strict=True):
    updates, state = update(
      tx, [4.0], jnp.array([now]), jnp.array([8.0]), state
    )
    gap = abs(now - 8.0) / np.sqrt(square) if square else 0.0
    close(updates, [4.0 / (1 + gap)], rtol=1e-6)
  assert int(state.samples) == 2


def test_rows_read_what_was_last_written_to_each():
  rng = np.random.default_rng(0)
  rows = rows_lib.make_rows({"a": jnp.zeros((2,))}, 3)
  mirror = np.zeros((3, 2))
  for worker in rng.integers(0, 3, 30):
    w = jnp.int32(worker)
    peeked = rows_lib.peek(rows, w)["a"]
    row, rows = rows_lib.read(rows, w)
    np.testing.assert_array_equal(row["a"], mirror[worker])
    np.testing.assert_array_equal(peeked, mirror[worker])
    mirror[worker] = rng.normal(size=2)
    rows = rows_lib.write(rows, w, {"a": jnp.asarray(mirror[worker])})
    np.testing.assert_array_equal(rows_lib.settle(rows)["a"], mirror)


def test_per_worker_runs_one_copy_of_the_transform_for_each():
  tx = transforms.per_worker(optax.adam(0.1), 3)
  plain = optax.adam(0.1)
  params = jnp.zeros(2)
  state = tx.init(params)
  singles = [plain.init(params) for _ in range(3)]
  rng = np.random.default_rng(1)
  for worker in (0, 2, 2, 1, 0, 2):
    g = jnp.asarray(rng.normal(size=2))
    updates, state = tx.update(g, state, params, worker=jnp.int32(worker))
    expected, singles[worker] = plain.update(g, singles[worker], params)
    np.testing.assert_allclose(updates, expected, rtol=1e-14)


def test_dana_momentum_keeps_the_sum_of_its_velocities():
  tx = transforms.dana_momentum(3, 0.9)
  params = {"a": jnp.zeros(2), "b": jnp.zeros(())}
  state = tx.init(params)
  rng = np.random.default_rng(2)
  for _ in range(40):
    g = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
    _, state = tx.update(g, state, worker=jnp.int32(rng.integers(3)))
  total = jax.tree.map(lambda v: v.sum(axis=0), rows_lib.settle(state.velocity))
  kit.close(state.total, total, rtol=1e-12)


def test_dana_momentum_keeps_the_sum_of_bfloat16_velocities():
  tx = transforms.dana_momentum(3, 0.9)
  gradients = jnp.asarray(kit.normal(1000, 8), jnp.bfloat16)

  def step(state, message):
    g, job = message
    return tx.update(g, state, worker=job % 3)[1], None

  messages = gradients, jnp.arange(1000, dtype=jnp.int32)
  state, _ = jax.lax.scan(step, tx.init(gradients[0]), messages)
  total = rows_lib.settle(state.velocity).astype(jnp.float32).sum(axis=0)
  kit.close(state.total, total, atol=1e-4)


def test_a_look_ahead_uses_the_rate_of_the_next_update():
  schedule = optax.piecewise_constant_schedule(0.1, {1: 0.1})
  algorithm = transforms.velocity_lookahead(
    optax.trace(0.5), schedule, lambda state, worker: state.trace
  )
  params = jnp.array([0.0])
  state = algorithm.init(params)
  updates, state = algorithm.update(jnp.array([1.0]), state, params)
  np.testing.assert_allclose(updates, [-0.1], rtol=1e-6)
  sent = algorithm.send(state, params + updates, worker=jnp.int32(0))
  np.testing.assert_allclose(sent, [-0.1 - 0.01], rtol=1e-6)


def test_precede_keeps_the_send_rule():
  inner = transforms.velocity_lookahead(
    optax.trace(0.5), 0.1, lambda state, worker: state.trace
  )
  algorithm = transforms.precede(inner, optax.scale(2.0))
  params = jnp.array([0.0])
  updates, state = algorithm.update(
    jnp.array([1.0]), algorithm.init(params), params
  )
  np.testing.assert_allclose(updates, [-0.2], rtol=1e-15)
  sent = algorithm.send(state, params, worker=jnp.int32(0))
  np.testing.assert_allclose(sent, [-0.2], rtol=1e-15)
  # Clipping is no look-ahead, which `compress_down` would refuse.
  plain = transforms.precede(base.as_algorithm(optax.sgd(0.1)), optax.clip(1.0))
  assert plain.send is base.send_current


def test_rates_may_be_numbers_or_schedules():
  assert float(rates.at(0.5, jnp.int32(3))) == 0.5
  assert float(rates.at(lambda count: 0.5 * count, jnp.int32(3))) == 1.5


test_factories_validate_first = kit.refuses(
  [
    (lambda: transforms.gap_aware(None, 0.1, decay=1.0), "decay must be in"),
    (
      lambda: transforms.gap_aware(None, 0.1, average="velocity"),
      "average must be one of gradients, updates, not 'velocity'",
    ),
    (
      lambda: transforms.gap_aware(None, 0.1, weight_decay=-1.0),
      "weight_decay must be 0 or more",
    ),
    (lambda: transforms.divide_by_gap(decay=1.0), "decay must be in"),
    (lambda: transforms.dana_momentum(2, 1.0), "momentum must be in"),
    (lambda: transforms.dana_momentum(0, 0.9), "workers must be"),
    (lambda: transforms.per_worker(optax.identity(), 0), "workers must be"),
    (lambda: transforms.delay_compensation(-1), "0 or more, not -1"),
    (lambda: transforms.own_statistics(None, 1.5), "decay must be in"),
  ],
)
