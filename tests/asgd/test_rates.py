"""Schedules: the learning rate at every update where it could be off by one."""

import jax
import kit
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import rates

UPDATES = 40


def values(updates=UPDATES, **kwargs):
  schedule = rates.warmup_steps(**kwargs)
  return [float(schedule(update)) for update in range(updates)]


def by_loop(update, peak, warmup=0, start=0.0, boundaries=(), factor=0.1):
  """The definition, update by update."""
  if update < warmup:
    return start + (peak - start) * update / warmup
  rate = peak
  for boundary in boundaries:
    if update >= boundary:
      rate *= factor
  return rate


def test_a_rate_that_never_changes_is_a_number():
  assert rates.warmup_steps(0.3) == 0.3
  assert rates.warmup_steps(0.3, start=0.1, factor=0.5) == 0.3


def test_warmup_starts_at_start_and_ends_before_the_first_full_update():
  expected = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
  got = values(6, peak=1.0, warmup=4, start=0.2)
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  np.testing.assert_allclose(values(3, peak=1.0, warmup=1), [0, 1, 1])


def test_drops_hold_from_their_own_update():
  got = values(7, peak=8.0, boundaries=(2, 5), factor=0.25)
  np.testing.assert_allclose(got, [8, 8, 2, 2, 2, 0.5, 0.5], rtol=1e-6)


def test_drops_count_updates_from_the_start_not_from_the_warmup():
  got = values(8, peak=8.0, warmup=2, boundaries=(4, 6), factor=0.5)
  np.testing.assert_allclose(got, [0, 4, 8, 8, 4, 4, 2, 2], rtol=1e-6)


def test_a_drop_may_end_the_warmup():
  got = values(4, peak=8.0, warmup=2, boundaries=(2,), factor=0.5)
  np.testing.assert_allclose(got, [0, 4, 4, 4], rtol=1e-6)


def test_boundaries_may_come_in_any_order():
  kwargs = dict(peak=8.0, factor=0.5)
  assert values(boundaries=(9, 3), **kwargs) == values(
    boundaries=(3, 9), **kwargs
  )


def test_two_drops_at_one_update_are_two_drops():
  got = values(3, peak=8.0, boundaries=(1, 1), factor=0.5)
  np.testing.assert_allclose(got, [8, 2, 2], rtol=1e-6)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(data=st.data())
def test_agrees_with_a_loop_over_the_definition(data):
  peak = data.draw(st.floats(1e-3, 10))
  warmup = data.draw(st.integers(0, 20))
  kwargs = dict(
    peak=peak,
    warmup=warmup,
    start=peak * data.draw(st.floats(0, 1)),
    boundaries=data.draw(
      st.lists(st.integers(warmup, UPDATES), unique=True, max_size=4)
    ),
    factor=data.draw(st.floats(0.1, 2)),
  )
  schedule = rates.warmup_steps(**kwargs)
  updates = np.arange(UPDATES)
  rate = schedule(updates) if callable(schedule) else schedule
  expected = [by_loop(update, **kwargs) for update in updates]
  got = np.broadcast_to(rate, UPDATES)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6 * peak)


def test_is_the_same_under_jit():
  kwargs = dict(peak=0.1, warmup=5, start=0.0125, boundaries=(9, 12))
  compiled = jax.jit(rates.warmup_steps(**kwargs))
  np.testing.assert_allclose(
    [float(compiled(np.int32(update))) for update in range(15)],
    values(15, **kwargs),
    rtol=1e-6,
  )


test_errors_show_the_value = kit.refuses(
  [
    (dict(peak=0), "learning_rate must be a positive finite number, not 0"),
    (dict(peak=np.nan), "learning_rate must be a positive .*not nan"),
    (dict(peak=1, warmup=-2), r"0 or more updates, not -2,"),
    (dict(peak=1, warmup=2, start=1.5), r"the peak 1, not at 1.5"),
    (dict(peak=1, warmup=2, start=-0.5), r"between 0 .*, not at -0.5"),
    (dict(peak=1, boundaries=(3,), factor=0), "factor .* positive .*not 0"),
    (dict(peak=1, boundaries=(3,), factor=np.nan),
     "factor .* positive finite number, not nan"),
    (dict(peak=1, warmup=5, boundaries=(4, 8)),
     r"drops at updates \(4, 8\), inside the warm-up of 5"),
    (dict(peak=1, boundaries=(-1,)), r"drops at updates \(-1,\), inside"),
  ],
  lambda kwargs: rates.warmup_steps(**kwargs),
)


# Schedules by name.


def test_every_schedule_of_optax_that_is_made_of_numbers_is_known():
  assert {"constant", "cosine_decay", "exponential_decay"} <= set(rates.known())
  needed = {
    "exponential_decay": {"decay_rate": 0.5},
    "warmup_exponential_decay": {"decay_rate": 0.5, "warmup_steps": 5},
    "polynomial": {"power": 2},
    "warmup_cosine_decay": {"warmup_steps": 5},
    "warmup_constant": {"warmup_steps": 5},
    "piecewise_interpolate": {"interpolate_type": "linear"},
    "sgdr": {"cosine_kwargs": [{"init_value": 0.0, "peak_value": 0.1,
                                "decay_steps": 50, "warmup_steps": 5}]},
  }
  for name in rates.known():
    made = rates.named(name, 0.1, updates=50, options=needed.get(name))
    values = [float(made(update)) for update in range(50)]
    assert max(values) == pytest.approx(0.1, rel=0.02), name
    assert min(values) >= 0


def test_a_named_schedule_counts_in_units():
  made = rates.named(
    "warmup_cosine_decay",
    0.1,
    updates=1000,
    unit=10,
    options={"warmup_steps": 2, "decay_steps": 10, "end_value": 0.01},
  )
  plain = optax.warmup_cosine_decay_schedule(0.0, 0.1, 20, 100, 0.01)
  for update in (0, 7, 20, 60, 100, 200):
    assert float(made(update)) == float(plain(update))
  drops = rates.named(
    "piecewise_constant",
    *(0.1,),
    updates=9,
    unit=10,
    options={"boundaries_and_scales": {"0.5": 0.5, "2": 0.1}},
  )
  assert [round(float(drops(u)), 6) for u in (4, 5, 19, 20)] == [
    *(0.1, 0.05, 0.05, 0.005)
  ]


def test_a_named_schedule_may_grow():
  made = rates.named(
    "exponential_decay", 0.1, updates=10, options={"decay_rate": 4.0}
  )
  assert [round(float(made(u)), 6) for u in (0, 5, 10)] == [0.1, 0.2, 0.4]


def falling(init_value, decay_steps, end_value=0.02):
  """A schedule of a user's, whose end is not 0."""
  return optax.linear_schedule(init_value, end_value, decay_steps)


def test_a_users_schedule_keeps_its_defaults():
  made = rates.named(f"{__name__}:falling", 0.1, updates=10)
  assert [round(float(made(u)), 6) for u in (0, 5, 10)] == [0.1, 0.06, 0.02]


def test_a_warm_up_comes_before_a_named_schedule():
  made = rates.named("cosine_decay", 0.1, updates=10)
  warm = rates.after_warmup(made, made(0), warmup=4, start=0.02)
  assert [round(float(warm(u)), 6) for u in (0, 2, 4)] == [0.02, 0.06, 0.1]
  assert float(warm(9)) == float(made(5))
  assert rates.after_warmup(made, 0.1, warmup=0, start=0.0) is made


test_a_wrong_schedule_is_refused = kit.refuses(
  [
    (("cosine", {}), "unknown schedule 'cosine'; did you mean 'cosine_"),
    (("cosine_decay", {"alfa": 1}), "takes no argument 'alfa'; did you mean"),
    (("polynomial", {}), "needs the argument 'power'"),
    (("cosine_decay", {"decay_steps": -1}), "decay_steps must be 0 or more"),
    (("cosine_decay", {"decay_steps": 1e12}), r"more than 2\^31 - 1"),
    (("optax:adam", {}), "schedule 'optax:adam' needs the argument"),
    (("optax:EmptyState", {}), "must return a function of an update"),
  ],
  lambda x: rates.named(x[0], 0.1, updates=10, options=x[1]),
)
