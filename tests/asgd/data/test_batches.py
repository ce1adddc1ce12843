"""Batches are functions of (seed, worker, job), augmentation of its key."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from asgd import data
from asgd.data import batches as batches_lib
from asgd.data import partitions


def numbered(n):
  """Returns n images that show their own number, and it as their label."""
  labels = np.arange(n, dtype=np.int32)
  images = np.broadcast_to(labels[:, None, None, None], (n, 2, 2, 1))
  return images.astype(np.uint8), labels


def batches_of(n, **options):
  images, labels = numbered(n)
  return data.make_batches(images, labels, **options)


def drawn_labels(batches, jobs, worker=0):
  return np.concatenate([batches(worker, job)[1] for job in jobs])


@pytest.mark.parametrize("partition", partitions.NAMES)
def test_a_batch_is_images_with_their_labels(partition):
  batches = batches_of(
    100, batch_size=8, seed=3, partition=partition, workers=4
  )
  images, labels = batches(1, 5)
  assert images.shape == (8, 2, 2, 1)
  assert images.dtype == np.uint8
  assert labels.dtype == np.int32
  np.testing.assert_array_equal(images[:, 0, 0, 0], labels)


@pytest.mark.parametrize("partition", partitions.NAMES)
def test_batches_do_not_depend_on_what_was_drawn_before(partition):
  options = {"batch_size": 7, "seed": 5, "partition": partition, "workers": 3}
  calls = [(w, job) for job in range(40) for w in range(3)]
  first = batches_of(90, **options)
  expected = {call: first(*call)[1] for call in calls}
  batches_lib._permutations.cache_clear()  # as after a restart
  second = batches_of(90, **options)
  np.random.default_rng(0).shuffle(calls)
  for call in calls:
    np.testing.assert_array_equal(second(*call)[1], expected[call])


@pytest.mark.parametrize("partition", partitions.NAMES)
def test_jobs_and_seeds_draw_different_batches(partition):
  options = {"batch_size": 9, "partition": partition}
  seeds = [batches_of(90, seed=seed, **options) for seed in range(3)]
  # Two and a half epochs when shared.
  draws = {tuple(seed(0, job)[1]) for seed in seeds for job in range(25)}
  assert len(draws) == 75


@settings(deadline=None)
@given(
  n=st.integers(1, 60),
  batch_size=st.integers(1, 60),
  epoch=st.integers(0, 3),
  seed=st.integers(0, 2**64),
)
def test_an_epoch_visits_no_example_twice(n, batch_size, epoch, seed):
  batch_size = min(n, batch_size)
  jobs = n // batch_size
  batches = batches_of(n, batch_size=batch_size, seed=seed)
  visited = drawn_labels(batches, range(epoch * jobs, (epoch + 1) * jobs))
  assert len(set(visited)) == len(visited) == jobs * batch_size


@settings(deadline=None)
@given(
  batch_size=st.integers(1, 6),
  workers=st.integers(1, 6),
  jobs=st.integers(1, 4),
  seed=st.integers(0, 100),
)
def test_the_batches_of_a_round_are_one_large_batch(
  batch_size, workers, jobs, seed
):
  n = batch_size * workers * jobs
  small = batches_of(n, batch_size=batch_size, seed=seed)
  large = batches_of(n, batch_size=batch_size * workers, seed=seed)
  for r in range(2 * jobs):  # two epochs
    turns = range(r * workers, (r + 1) * workers)
    np.testing.assert_array_equal(drawn_labels(small, turns), large(0, r)[1])


def test_shared_batches_ignore_the_worker():
  batches = batches_of(50, batch_size=5, seed=0)
  np.testing.assert_array_equal(batches(0, 4)[1], batches(17, 4)[1])


@settings(deadline=None)
@given(
  n=st.integers(1, 80),
  workers=st.integers(1, 8),
  batch_size=st.integers(1, 10),
  job=st.integers(0, 10**9),
)
def test_a_shard_is_seen_by_its_worker_alone(n, workers, batch_size, job):
  workers = min(workers, n)
  batch_size = min(batch_size, n // workers)
  batches = batches_of(
    n, batch_size=batch_size, seed=1, partition="sharded", workers=workers
  )
  for worker in range(workers):
    rows = batches(worker, job)[1]
    assert len(set(rows)) == batch_size
    assert set(rows % workers) == {worker}


def test_seeds_workers_and_jobs_all_change_a_sharded_batch():
  options = {"batch_size": 6, "partition": "sharded", "workers": 4}
  seeds = [batches_of(200, seed=seed, **options) for seed in range(3)]
  places = {  # in the shard
    tuple(seed(worker, job)[1] // 4)
    for seed in seeds
    for worker in range(4)
    for job in range(5)
  }
  assert len(places) == 60


def test_a_worker_sees_all_of_its_shard():
  batches = batches_of(23, batch_size=4, seed=1, partition="sharded", workers=4)
  for worker in range(4):
    seen = set(drawn_labels(batches, range(30), worker))
    assert seen == set(range(worker, 23, 4))


def test_a_batch_may_be_changed_without_changing_the_data():
  images, labels = numbered(10)
  batches = data.make_batches(images, labels, batch_size=10, seed=0)
  batches(0, 0)[0][:] = 255
  np.testing.assert_array_equal(images, numbered(10)[0])


@given(
  labels=st.lists(st.integers(0, 4), min_size=1, max_size=80),
  workers=st.integers(1, 8),
  concentration=st.sampled_from([0.01, 0.3, 100.0]),
)
def test_shards_of_a_label_skew_are_a_partition(labels, workers, concentration):
  skewed = {"name": "dirichlet", "concentration": concentration}
  shards = partitions.shards(skewed, np.array(labels), workers, seed=1)
  assert sorted(np.concatenate(shards)) == list(range(len(labels)))
  sizes = [len(shard) for shard in shards]
  assert max(sizes) - min(sizes) <= 1


def entropy_of_shards(labels, concentration, seed=0):
  """Returns the mean entropy of the ten classes in 10 shards, in nats."""
  skewed = {"name": "dirichlet", "concentration": concentration}
  shards = partitions.shards(skewed, labels, 10, seed)
  counts = [np.bincount(labels[rows], minlength=10) for rows in shards]
  return stats.entropy(np.stack(counts), axis=1).mean()


def test_the_smaller_the_concentration_the_fewer_classes_has_a_worker():
  labels = np.arange(5000) % 10
  few, some, all_of_them = (
    entropy_of_shards(labels, alpha) for alpha in (0.01, 1.0, 1e4)
  )
  assert few < 0.3
  # The mean entropy of Dirichlet(1 / 10, ..., 1 / 10): psi(2) - psi(1.1).
  assert some == pytest.approx(0.85, abs=0.3)
  assert all_of_them == pytest.approx(np.log(10), abs=0.03)


def test_numbers_are_skewed_by_bins():
  values = np.random.default_rng(0).normal(size=1000)
  skewed = {"name": "dirichlet", "concentration": 0.01}
  shards = partitions.shards(skewed, values, 10, seed=0)
  # A worker with one of ten bins has a tenth of the range of quantiles.
  spans = [np.ptp(np.argsort(np.argsort(values))[rows]) for rows in shards]
  assert np.median(spans) < 200


test_bad_options_are_refused_when_building = kit.refuses(
  [
    ({"batch_size": 5000}, "batch_size 5000 is larger than the 100 training"),
    ({"batch_size": 101}, "use at most 100"),
    ({"batch_size": 0}, "batch_size must be a positive whole number, not 0"),
    ({"batch_size": 2.5}, "a positive whole number, not 2.5"),
    ({"batch_size": True}, "a positive whole number, not True"),
    ({"seed": -1}, "seed must be a whole number, 0 or more, not -1"),
    ({"workers": 0}, "workers must be a positive whole number, not 0"),
    ({"partition": "split"}, "partition must be .*, not 'split'"),
    (
      {"partition": "sharded", "workers": 8, "batch_size": 13},
      r"the 12 training examples of a shard \(100 over 8 workers\); use at "
      "most 12",
    ),
    ({"partition": "sharded", "workers": 101}, "workers 101 is more than"),
    (
      {"partition": {"name": "dirichlet", "concentration": 0}},
      "partition.concentration must be a positive finite number, not 0",
    ),
    (
      {"partition": {"name": "dirichlet", "alpha": 1.0}},
      "partition 'dirichlet' has no option 'alpha'",
    ),
  ],
  lambda options: batches_of(100, **{"batch_size": 10, "seed": 0, **options}),
)


def test_labels_must_fit_the_images():
  images, labels = numbered(10)
  with pytest.raises(ValueError, match=r"shape \(10, \.\.\.\).*not \(9,\)"):
    data.make_batches(images, labels[:-1], batch_size=1, seed=0)


def test_a_job_or_worker_out_of_range_is_refused():
  with pytest.raises(ValueError, match="job must be at least 0, not -1"):
    batches_of(10, batch_size=1, seed=0)(0, -1)
  sharded = batches_of(10, batch_size=1, seed=0, partition="sharded", workers=2)
  for worker in (-1, 2):
    with pytest.raises(ValueError, match=rf"0\.\.1, not {worker}"):
      sharded(worker, 0)


# Augmentation.


def windows(image, pad):
  """Yields every (dy, dx, flip, result) that augmentation may give."""
  height, width, _ = image.shape
  padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
  for dy in range(2 * pad + 1):
    for dx in range(2 * pad + 1):
      window = padded[dy : dy + height, dx : dx + width]
      yield dy, dx, False, window
      yield dy, dx, True, window[:, ::-1]


def choices(images, results, pad):
  """Returns the (dy, dx, flip) of each result; fails if there is none."""
  found = []
  for image, result in zip(images, results, strict=True):
    matches = [
      choice
      for *choice, window in windows(image, pad)
      if np.array_equal(window, result)
    ]
    assert len(matches) == 1
    found.append(matches[0])
  return np.array(found)


@pytest.mark.parametrize(
  ("shape", "pad"), [((200, 5, 7, 3), 2), ((20, 8, 8, 1), 4), ((9, 3, 3, 2), 0)]
)
def test_every_augmented_image_is_one_window_of_its_own(shape, pad):
  images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  results = data.augment(jnp.asarray(images), jax.random.key(1), pad=pad)
  assert results.shape == shape
  assert results.dtype == jnp.float32
  choices(images, np.asarray(results), pad)


def test_shifts_and_flips_are_uniform_and_independent():
  images = np.random.default_rng(0).normal(size=(900, 4, 5, 1))
  images = images.astype(np.float32)
  results = data.augment(jnp.asarray(images), jax.random.key(2), pad=1)
  dy, dx, flip = choices(images, np.asarray(results), 1).T
  counts = np.bincount(6 * dy + 2 * dx + flip, minlength=18)
  assert counts.min() > 25  # 50 expected, standard deviation 7
  assert counts.max() < 80


def test_augmentation_is_a_function_of_its_key():
  images = jnp.asarray(numbered(20)[0], jnp.float32) + jnp.eye(2)[:, :, None]
  keys = jax.random.split(jax.random.key(0))
  first, again = (data.augment(images, keys[0]) for _ in range(2))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, data.augment(images, keys[1]))
  both = jax.vmap(data.augment, (None, 0))(images, keys)
  np.testing.assert_array_equal(both[0], first)


@pytest.mark.parametrize(
  ("images", "pad", "message"),
  [
    (np.zeros((2, 4, 4, 1), np.uint8), 4, "normalised floats.*uint8"),
    (np.zeros((4, 4, 1), np.float32), 4, "normalised floats"),
    (np.zeros((2, 4, 4, 1), np.float32), -1, "pad must be .*, not -1"),
  ],
)
def test_augmentation_refuses_what_it_would_spoil(images, pad, message):
  with pytest.raises(ValueError, match=message):
    data.augment(jnp.asarray(images), jax.random.key(0), pad=pad)
