"""Durations: the papers' two clusters, and streams that depend on nothing but
the seed and the worker."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from asgd import base, orders
from asgd.orders import durations

MACHINES = 20_000
EQUAL = stats.gamma(1 / 0.1**2, scale=0.1**2)  # homogeneous, mean 1
MACHINE = stats.gamma(1 / 0.6**2, scale=0.6**2)  # means, heterogeneous


def take(clock, worker, count):
  return list(itertools.islice(clock.stream(worker), count))


@pytest.fixture(scope="module")
def machines():
  """The first two times of many unequal machines, float64[MACHINES, 2]."""
  clock = durations.heterogeneous(3.0, seed=1)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(durations, "_MAX_BLOCK", 2)  # no more than are taken
    return np.array([take(clock, worker, 2) for worker in range(MACHINES)])


# The model of Ali et al. 2000.


def test_equal_machines_draw_from_the_gamma_of_the_papers():
  assert round(100 * EQUAL.sf(1.25), 2) == 0.94  # "about 1 %" in the papers
  assert EQUAL.mean() == pytest.approx(1)
  assert EQUAL.std() == pytest.approx(0.1)

  clock = durations.homogeneous(3.0, seed=1)
  times = np.concatenate([take(clock, worker, 10_000) for worker in range(5)])
  assert stats.kstest(times / 3, EQUAL.cdf).pvalue > 0.01
  # The standard error of the share is sqrt(0.0094 / 50,000) = 0.0004.
  assert np.mean(times > 1.25 * 3) == pytest.approx(0.0094, abs=4 * 0.0004)


def test_share_of_slow_batches_over_unequal_machines(machines):
  exact, _ = integrate.quad(
    lambda mean: MACHINE.pdf(mean) * EQUAL.sf(1.25 / mean), 0, np.inf
  )
  assert round(100 * exact, 1) == 27.9

  # One time a machine, since those of one are nearly equal. The standard
  # error of the share is sqrt(0.279 * 0.721 / 20,000) = 0.0032.
  slow = np.mean(machines[:, 0] > 1.25 * 3)
  assert slow == pytest.approx(exact, abs=4 * 0.0032)


def test_mean_over_machines_is_the_mean(machines):
  # Each time varies by sqrt(0.6^2 + 0.1^2 + (0.6 * 0.1)^2) = 0.61 of the mean;
  # over 20,000 machines the standard error is 0.0043 of it.
  assert machines[:, 0].mean() == pytest.approx(3, rel=4 * 0.0043)


def test_a_machine_varies_less_than_machines_do(machines):
  # The other order of the draws would swap the two. Two times of a machine of
  # mean m differ by a standard deviation of sqrt(2) 0.1 m. The fourth moments
  # of both gammas leave 1 % of error here; 5 % is safe.
  between = np.sqrt(np.cov(machines.T)[0, 1]) / 3
  assert between == pytest.approx(0.6, rel=0.05)
  within = (machines[:, 0] - machines[:, 1]) / machines.mean(axis=1)
  assert within.std() == pytest.approx(np.sqrt(2) * 0.1, rel=0.05)


def test_one_machine_keeps_its_mean():
  times = np.reshape(take(durations.heterogeneous(seed=2), 0, 4000), (4, 1000))
  # Means of 1000 batches have a standard error of 0.1 / sqrt(1000) = 0.3 %.
  np.testing.assert_allclose(times.mean(1), times.mean(), rtol=4 * 0.003)
  np.testing.assert_allclose(times.std(1) / times.mean(1), 0.1, rtol=0.1)


def test_named_clusters_are_settings_of_gamma():
  for name, variation in (("homogeneous", 0.0), ("heterogeneous", 0.6)):
    named = getattr(durations, name)(2.0, seed=7)
    general = durations.gamma(
      2.0, seed=7, variation=0.1, machine_variation=variation
    )
    assert take(named, 3, 10) == take(general, 3, 10)


@pytest.mark.parametrize("name", ["homogeneous", "heterogeneous"])
def test_the_mean_is_only_a_unit_of_time(name):
  maker = getattr(durations, name)
  np.testing.assert_allclose(
    take(maker(128.0, seed=4), 1, 600),
    128 * np.array(take(maker(1.0, seed=4), 1, 600)),
    rtol=1e-12,
  )


# Streams.

ROWS = [[1.0, 2.0, 4.0], [8.0], [16.0, 32.0]]
RANDOM = {
  "homogeneous": durations.homogeneous,
  "heterogeneous": durations.heterogeneous,
  "measured": lambda seed: durations.measured(ROWS, resample=True, seed=seed),
  "pareto": durations.pareto,
  "bursts": lambda seed: durations.bursts(every=3.0, length=2.0, seed=seed),
  "failing": lambda seed: durations.failing(mtbf=3.0, mttr=2.0, seed=seed),
}


@pytest.mark.parametrize("maker", RANDOM.values(), ids=RANDOM)
def test_streams_are_functions_of_seed_and_worker(maker, monkeypatch):
  expected = take(maker(seed=5), 0, 600)
  clock = maker(seed=5)
  ours, theirs, again = clock.stream(0), clock.stream(2), clock.stream(0)
  drawn = [(next(ours), next(theirs), next(again)) for _ in range(600)]
  assert [row[0] for row in drawn] == expected
  assert [row[2] for row in drawn] == expected

  assert take(maker(seed=5), 2, 600) == [row[1] for row in drawn] != expected
  assert take(maker(seed=6), 0, 600) != expected

  monkeypatch.setattr(durations, "_MAX_BLOCK", 7)
  assert take(maker(seed=5), 0, 600) == expected


@pytest.mark.parametrize("maker", RANDOM.values(), ids=RANDOM)
def test_no_two_streams_are_the_same(maker):
  places = [(seed, worker) for seed in range(4) for worker in (0, 2, 3)]
  streams = {tuple(take(maker(seed=seed), w, 50)) for seed, w in places}
  assert len(streams) == len(places)


@pytest.mark.parametrize("maker", RANDOM.values(), ids=RANDOM)
def test_another_worker_leaves_the_times_of_the_others(maker):
  def finishes(workers):
    trace = orders.asynchronous(maker(seed=1), workers=workers, messages=60)
    received = trace.action == base.RECEIVE
    return [trace.time[received & (trace.worker == w)] for w in range(2)]

  for few, many in zip(finishes(2), finishes(3), strict=True):
    shared = min(len(few), len(many))
    assert shared >= 3
    np.testing.assert_array_equal(few[:shared], many[:shared])


def test_constant_times_and_slow_machines():
  clock = durations.constant(2.0, slowdown=(1, 1.5))
  assert take(clock, 0, 3) == [2.0] * 3
  assert take(clock, 1, 3) == [3.0] * 3
  assert take(clock, 2, 3) == [2.0] * 3
  assert take(durations.constant(), 9, 2) == [1.0, 1.0]


def test_measured_times_play_in_their_order_over_and_over():
  clock = durations.measured(ROWS)
  assert take(clock, 0, 7) == [1, 2, 4, 1, 2, 4, 1]
  assert take(clock, 1, 2) == [8, 8]
  assert take(clock, 2, 3) == [16, 32, 16]
  assert take(clock, 3, 4) == [1, 2, 4, 1]  # a fourth worker uses row 0 again


def test_measured_times_are_drawn_with_replacement_when_resampled():
  clock = durations.measured(ROWS, resample=True)
  times = take(clock, 0, 3000)
  # The standard error of each share is sqrt(1 / 3 * 2 / 3 / 3000) = 0.0086.
  shares = [times.count(time) / 3000 for time in ROWS[0]]
  np.testing.assert_allclose(shares, 1 / 3, atol=4 * 0.0086)
  assert set(take(clock, 5, 100)) == set(ROWS[2])
  assert take(clock, 3, 100) != times[:100]  # same row, a stream of its own


# By name, and errors.


@pytest.mark.parametrize("name", ["gamma", "homogeneous", "heterogeneous"])
def test_build_passes_the_seed_to_clocks_that_draw(name):
  maker = getattr(durations, name)
  built = durations.build(name, seed=9, mean=2.0)
  assert take(built, 1, 5) == take(maker(2.0, seed=9), 1, 5)
  default = durations.build(name)
  assert take(default, 1, 5) == take(maker(seed=0), 1, 5)


def test_build_takes_a_seed_for_any_clock():
  slow = durations.build("constant", seed=9, mean=2.0, slowdown=[3])
  assert take(slow, 0, 2) == [6, 6]
  played = durations.build("measured", seed=9, samples=ROWS)
  assert take(played, 0, 4) == [1, 2, 4, 1]


def test_build_names_the_nearest_clock_and_argument():
  with pytest.raises(ValueError, match="'gama'; did you mean 'gamma'"):
    durations.build("gama")
  with pytest.raises(ValueError, match="'varation'; did you mean 'variation'"):
    durations.build("gamma", varation=0.1)
  with pytest.raises(ValueError, match="needs the argument 'samples'"):
    durations.build("measured")


MISTAKES = {
  "constant": [
    (dict(mean=0), "^mean must be a positive.* not 0"),
    (dict(mean=np.nan), "^mean must be a positive.* not nan"),
    (dict(mean=np.inf), "not inf"),
    (dict(slowdown=(1, -2)), "^slowdown must be .* not -2"),
    (dict(slowdown=(np.inf,)), "not inf"),
  ],
  "gamma": [
    (dict(mean=-1.0), "^mean must be a positive.* not -1.0"),
    (dict(mean=np.inf), "not inf"),
    (dict(variation=0), "^variation must be a positive.* not 0"),
    (dict(variation=np.inf), "not inf"),
    (dict(machine_variation=-0.5), "must be 0 or more, not -0.5"),
    (dict(machine_variation=np.inf), "not inf"),
    (dict(machine_variation=np.nan), "not nan"),
  ],
  "measured": [
    (dict(samples=[]), r"at least one row .* got \[\]"),
    (dict(samples=[[1], []]), r"at least one time; got .*\[\]"),
    (dict(samples=[1, 2]), r"at least one row .* got \[1, 2\]"),
    (dict(samples=[[2], [3, -3.5]]), "times, got -3.5$"),
    (dict(samples=[[np.inf, 2]]), "and finite .*inf"),
  ],
  "pareto": [
    (dict(tail=1.0), "tail must be above 1, .* not 1.0"),
    (dict(tail=np.nan), "tail must be above 1, .* not nan"),
  ],
  "bursts": [
    (dict(slowdown=0.5), "slowdown must be 1 or more, not 0.5"),
    (dict(every=-1), "every must be 1 or more, not -1"),
    (dict(length=0.1), "length must be 1 or more, not 0.1"),
  ],
  "failing": [
    (dict(mtbf=0.5), "mtbf must be 1 or more, .* not 0.5"),
    (dict(mean=4.0, mtbf=3.0), "mtbf must be 4 or more, .* not 3.0"),
    (dict(mttr=-1.0), "mttr must be 0 or more, not -1.0"),
  ],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_show_the_value_and_the_remedy(name):
  for kwargs, words in MISTAKES[name]:
    with pytest.raises(ValueError, match=words):
      getattr(durations, name)(**kwargs)


# Transient stragglers.


def test_a_heavy_tail_is_that_of_pareto():
  times = np.array(take(durations.pareto(3.0, tail=2.5, seed=1), 0, 20_000))
  least = 3.0 * 1.5 / 2.5
  assert times.min() >= least
  assert times.mean() == pytest.approx(3.0, rel=0.03)
  for factor in (2.0, 4.0):
    share = (times > factor * least).mean()
    assert share == pytest.approx(factor**-2.5, rel=0.1)


def test_bursts_are_slow_for_a_while():
  options = {"slowdown": 4.0, "every": 20.0, "length": 5.0}
  times = np.array(take(durations.bursts(2.0, seed=1, **options), 1, 20_000))
  plain = np.array(take(durations.gamma(2.0, seed=1), 1, 20_000))
  slow = times != plain
  assert times[slow].tolist() == (4.0 * plain[slow]).tolist()
  assert slow.mean() == pytest.approx(5 / 25, rel=0.1)
  # A burst ends with one chance in five, and begins with one in twenty.
  ends = slow[:-1] & ~slow[1:]
  assert ends.sum() / slow[:-1].sum() == pytest.approx(1 / 5, rel=0.1)


# Failures.


def test_a_batch_that_fails_is_computed_again_after_the_replacement():
  options = {"mtbf": 20.0, "mttr": 30.0}
  times = np.array(take(durations.failing(2.0, seed=1, **options), 1, 20_000))
  plain = np.array(take(durations.gamma(2.0, seed=1), 1, 20_000))
  failed = times != plain
  # The others take the times of `gamma`: a batch of 2 fails with 1 - exp(-0.1).
  assert failed.mean() == pytest.approx(1 - np.exp(-0.1), rel=0.05)
  # One failure costs the replacement, and less than the batch.
  once = failed & (times - plain < 60.0)
  costs = times[once] - plain[once] - 30.0
  assert costs.min() > 0
  assert (costs < plain[once]).all()
  assert times.mean() == pytest.approx(50 * np.expm1(0.1), rel=0.03)


def test_availability_is_the_throughput_of_long_lived_workers():
  clock = durations.failing(variation=1e-3, mtbf=200.0, mttr=100.0, seed=3)
  times = take(clock, 0, 100_000)
  assert len(times) / sum(times) == pytest.approx(200 / 300, rel=0.03)
