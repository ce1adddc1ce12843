"""Problems: a quadratic by hand, and a classification against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from scipy import special, stats

from asgd import base, data, models, problems
from asgd.data import text

KEY = jax.random.key(0)


# The quadratic.


def test_quadratic_by_hand():
  problem = problems.quadratic([1.0, 4.0])
  params = jnp.array([3.0, -2.0])
  noise = np.array([0.5, -1.0], np.float32)
  (value, aux), gradient = jax.value_and_grad(problem.loss, has_aux=True)(
    params, noise, KEY
  )
  assert value == 0.5 * 1 * 9 + 0.5 * 4 * 4 + 0.5 * 3 + 1 * 2
  assert gradient.tolist() == [3 + 0.5, -8 - 1]
  assert aux.stats == ()

  evaluation = problem.evaluate(params)
  assert evaluation.loss == 12.5
  assert np.isnan(evaluation.accuracy)


def test_quadratic_starts_at_one_whatever_the_key():
  problem = problems.quadratic([1.0, 4.0, 9.0], noise=0.1)
  for seed in (0, 1):
    assert problem.init(jax.random.key(seed)).tolist() == [1, 1, 1]


def test_quadratic_probe_and_noiseless_batches_leave_the_loss_alone():
  problem = problems.quadratic([1.0, 4.0])
  assert problem.probe.tolist() == [0, 0]
  assert not np.any(problem.batches(3, 2)(1, 5))


def test_quadratic_noise_has_its_standard_deviation():
  draw = problems.quadratic(np.ones(8), noise=0.3).batches(0, 2)
  noise = np.concatenate([draw(job % 2, job) for job in range(1000)])
  assert noise.dtype == np.float32
  assert stats.kstest(noise, stats.norm(0, 0.3).cdf).pvalue > 0.01


def test_quadratic_is_computed_in_the_precision_of_its_parameters():
  problem = problems.quadratic([1 / 3])
  with jax.enable_x64(True):
    params = jnp.array([1.0], jnp.float64)
    value, _ = problem.loss(params, problem.probe, KEY)
    assert value.dtype == jnp.float64
    assert float(value) == 1 / 6


@pytest.mark.parametrize(
  "curvatures", [[1.0, 0.0], [-1.0], [np.nan], 2.0, [[1.0]]]
)
def test_quadratic_needs_positive_curvatures(curvatures):
  with pytest.raises(ValueError, match="curvatures must be positive, got"):
    problems.quadratic(curvatures)


def test_quadratic_batches_are_functions_of_seed_worker_and_job():
  places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 5)]
  problem = problems.quadratic(np.ones(4), noise=1.0)
  forth, back, other = (problem.batches(seed, 3) for seed in (7, 7, 8))
  first = {place: forth(*place).tobytes() for place in places}
  assert {place: back(*place).tobytes() for place in places[::-1]} == first
  assert len({*first.values(), other(0, 0).tobytes()}) == len(places) + 1


# The classification.


@pytest.fixture(scope="module")
def digits():
  return data.load("digits")


LAYERS = models.build("mlp", 10)


def classify(digits, **kwargs):
  return problems.classification(digits, LAYERS, **{"batch_size": 16, **kwargs})


def test_classification_batches_are_those_of_the_data(digits):
  problem = classify(digits, batch_size=100, partition="sharded")
  options = {"batch_size": 100, "seed": 7, "workers": 3, "partition": "sharded"}
  drawn = data.make_batches(
    digits.train_images, digits.train_labels, **options
  )
  kit.same(problem.batches(7, 3)(1, 4), drawn(1, 4))
  assert problem.batches_per_epoch == 14  # of 1,437 images


def test_probe_is_spread_over_the_training_images(digits):
  images, labels = classify(digits).probe
  assert len(images) == len(labels) == 256
  rows = [
    np.flatnonzero((digits.train_images == image).all((1, 2, 3)))[0]
    for image in images
  ]
  assert rows[0] == 0
  assert rows[-1] == 1436
  assert set(np.diff(rows)) <= {5, 6}  # 1,436 / 255 = 5.6
  np.testing.assert_array_equal(labels, digits.train_labels[rows])


@partial(jax.jit, static_argnums=0, static_argnames="train")
def outputs(layers, params, pixels, *, train):
  return models.apply(layers, params, pixels, train=train)[0]


def reference(layers, params, images, labels, dataset, train):
  """Returns mean cross-entropy and accuracy, by NumPy from the logits."""
  pixels = (images.astype(np.float32) - dataset.mean) / dataset.std
  logits = np.asarray(outputs(layers, params, pixels, train=train), np.float64)
  log_probabilities = logits - special.logsumexp(logits, 1, keepdims=True)
  rows = np.arange(len(labels))
  hits = logits.argmax(1) == labels
  return -log_probabilities[rows, labels].mean(), hits.mean()


def test_loss_is_the_cross_entropy_of_normalised_images(digits):
  problem = classify(digits)
  params = problem.init(KEY)
  batch = problem.batches(0, 1)(0, 3)
  value, aux = jax.jit(problem.loss)(params, batch, KEY)
  expected, _ = reference(LAYERS, params, *batch, digits, train=True)
  assert float(value) == pytest.approx(expected, rel=1e-5)
  assert aux.stats == ()


def test_loss_at_the_start_is_near_that_of_a_guess(digits):
  problem = classify(digits)
  params = problem.init(KEY)
  # Logits of variance 1 cost about half a nat on top of ln 10.
  loss_of = jax.jit(problem.loss)
  loss, _ = loss_of(params, problem.probe, KEY)
  assert float(loss) == pytest.approx(np.log(10) + 0.5, abs=0.5)

  *body, classifier = params
  guess = (*body, jax.tree.map(jnp.zeros_like, classifier))
  loss, _ = loss_of(guess, problem.probe, KEY)
  assert float(loss) == pytest.approx(np.log(10), rel=1e-6)
  # Equal logits are all read as the class 0.
  accuracy = problem.evaluate(guess).accuracy
  assert accuracy == np.mean(digits.test_labels == 0)


def test_init_is_that_of_the_model(digits):
  ours = classify(digits).init(KEY)
  theirs = models.init(LAYERS, KEY, jnp.zeros((1, 8, 8, 1)))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_evaluate_is_a_direct_computation(digits):
  problem = classify(digits)
  params = problem.init(KEY)
  got = problem.evaluate(params)
  loss, accuracy = reference(
    *(LAYERS, params, digits.test_images, digits.test_labels, digits),
    train=False,
  )
  assert got.loss == pytest.approx(loss, rel=1e-5)
  assert got.accuracy == accuracy
  assert all(isinstance(number, float) for number in got[:3])


@pytest.mark.parametrize("examples", [500, 1100])
def test_evaluate_counts_each_test_image_once(digits, examples):
  # Whatever the number of batches, of which the last may be small.
  rng = np.random.default_rng(0)
  rows = rng.integers(0, len(digits.test_labels), examples)
  images, labels = digits.test_images[rows], digits.test_labels[rows]
  dataset = digits._replace(test_images=images, test_labels=labels)
  problem = classify(dataset)
  params = problem.init(KEY)
  loss, accuracy = reference(
    LAYERS, params, images, labels, dataset, train=False
  )
  assert problem.evaluate(params).loss == pytest.approx(loss, rel=1e-5)
  assert problem.evaluate(params).accuracy == pytest.approx(accuracy)


def test_batch_norm_trains_on_the_batch_and_is_evaluated_on_the_stats(digits):
  layers = (models.Stem(2, "batch"), models.Head(10))
  problem = problems.classification(digits, layers, batch_size=16)
  params = problem.init(KEY)
  assert isinstance(params, base.Variables)
  shifted = params._replace(stats=jax.tree.map(lambda x: x + 0.5, params.stats))

  batch = problem.batches(0, 1)(0, 0)
  loss = jax.jit(problem.loss)
  value, aux = loss(params, batch, KEY)
  again, same = loss(shifted, batch, KEY)
  assert value == again
  jax.tree.map(np.testing.assert_array_equal, aux.stats, same.stats)
  expected, _ = reference(layers, params, *batch, digits, train=True)
  assert float(value) == pytest.approx(expected, rel=1e-5)

  for variables in (params, shifted):
    loss, _ = reference(
      *(layers, variables, digits.test_images, digits.test_labels, digits),
      train=False,
    )
    assert problem.evaluate(variables).loss == pytest.approx(loss, rel=1e-5)
  assert problem.evaluate(params).loss != problem.evaluate(shifted).loss


def test_only_augmentation_reads_the_key(digits):
  plain, augmented = classify(digits), classify(digits, augment=True)
  params = plain.init(KEY)
  batch = plain.batches(0, 1)(0, 0)
  keys = [jax.random.key(seed) for seed in (1, 2)]

  loss = jax.jit(plain.loss)
  first, second = (loss(params, batch, key)[0] for key in keys)
  assert first == second
  loss = jax.jit(augmented.loss)
  first, again, second = (
    loss(params, batch, key)[0] for key in (keys[0], *keys)
  )
  assert first == again != second

  assert plain.evaluate(params) == augmented.evaluate(params)


def test_loss_is_computed_in_the_precision_of_the_weights(digits):
  problem = classify(digits)
  params = problem.init(KEY)
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    value, _ = jax.eval_shape(problem.loss, params, problem.probe, KEY)
    assert value.dtype == jnp.float64


def test_what_is_wrong_is_said_when_building(digits):
  with pytest.raises(ValueError, match="batch_size 1438 is larger than the 14"):
    classify(digits, batch_size=1438)
  with pytest.raises(ValueError, match="dirichlet, not 'share'"):
    classify(digits, partition="share")


# Other batch sizes.


def text_problem(batch_size):
  tokens = np.random.default_rng(0).integers(0, 7, 400).astype(np.int32)
  corpus = text.Text("t", "drawn", tokens[:300], tokens[300:], "abcdefg")
  layers = models.build("gpt", 7, depth=1, width=8, heads=2, context=5)
  return problems.language(corpus, layers, batch_size=batch_size, context=5)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_another_batch_size_shares_all_but_the_batches(digits, kind):
  build = text_problem
  if kind == "images":
    build = lambda size: classify(digits, batch_size=size)  # noqa: E731
  problem = build(16)
  other, fresh = problem.with_batch_size(6), build(6)
  for name in ("init", "loss", "evaluate", "pieces"):
    assert getattr(other, name) is getattr(problem, name)
  assert other.batches_per_epoch == fresh.batches_per_epoch
  kit.same(other.probe, fresh.probe)
  kit.same(other.batches(3, 2)(1, 5), fresh.batches(3, 2)(1, 5))
  kit.same(
    other.with_batch_size(16).batches(0, 1)(0, 1), problem.batches(0, 1)(0, 1)
  )


def test_another_batch_size_must_fit_the_data(digits):
  problem = classify(digits, batch_size=16)
  with pytest.raises(ValueError, match="batch_size 1438 is larger than"):
    problem.with_batch_size(1438)
  with pytest.raises(ValueError, match="the data are given as batches"):
    problems.quadratic([1.0]).with_batch_size(4)


# Regression.


def linear(outputs=1):
  x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
  y = x @ np.arange(1, 1 + 3 * outputs).reshape(3, outputs)
  y = y[:, 0] if outputs == 1 else y
  return data.from_arrays(x[:30], y[:30], x[30:], y[30:])


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression_is_the_mean_squared_error(outputs):
  dataset = linear(outputs)
  layers = models.build("mlp", outputs, hidden=())
  problem = problems.regression(dataset, layers, batch_size=8)
  params = problem.init(KEY)
  x, y = batch = problem.batches(0, 1)(0, 0)
  assert (x.dtype, y.dtype) == (np.float32, np.float32)
  weights = params[-1]["dense"]

  def squares(x, y):
    output = x @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])
    return (output.reshape(y.shape) - y) ** 2

  value, _ = problem.loss(params, batch, KEY)
  assert float(value) == pytest.approx(squares(x, y).mean(), rel=1e-5)
  got = problem.evaluate(params)
  expected = squares(dataset.test_images, dataset.test_labels)
  assert got.loss == pytest.approx(expected.mean(), rel=1e-5)
  assert np.isnan(got.accuracy)
  centred = dataset.test_labels - dataset.test_labels.mean(0)
  share = 1 - expected.sum() / (centred**2).sum()
  assert got.measure == pytest.approx(share, rel=1e-4)
  guess = dataset.train_labels.var(0).mean()
  assert problem.guess == pytest.approx(guess, rel=1e-5)


def test_kinds_of_labels_are_not_mixed_up(digits):
  with pytest.raises(ValueError, match="no classes; use regression"):
    problems.classification(linear(), LAYERS, batch_size=8)
  with pytest.raises(ValueError, match="are classes, not floats"):
    problems.regression(digits, LAYERS, batch_size=8)
  problem = problems.regression(linear(2), LAYERS, batch_size=8)
  with pytest.raises(ValueError, match=r"\(8, 10\), but labels of 2 .* \(8, 2"):
    problem.loss(problem.init(KEY), problem.batches(0, 1)(0, 0), KEY)
