"""The problems: images, sentences and text to predict, and a quadratic."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks, data, models
from asgd import worker as worker_lib
from asgd.data import sentences as sentences_lib
from asgd.data import text as text_lib
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Pieces, Problem, cross_entropy

_IMAGES, _SENTENCES = 500, 128  # evaluated at once


def classification(
  dataset: data.Dataset,
  layers: models.Layers,
  *,
  batch_size: int,
  augment: bool = False,
  partition: str = "shared",
  evaluation_examples: int = 0,
) -> Problem:
  """Image classification with cross-entropy.

  Images travel as uint8 and are normalised per channel where they are used: the
  batches are (uint8[B, H, W, C], int32[B]).

  Args:
    dataset: from `data.load`; `layers` have as many classes.
    batch_size: B, examples in one worker's batch.
    augment: pad, crop and flip training images at random.
    partition: "shared", one epoch over all workers, or "sharded", each worker
      drawing from examples of its own.
    evaluation_examples: evaluate on the first so many test images; 0 is all.
  """
  checks.nonnegative("evaluation_examples", evaluation_examples)

  def normalise(images, dtype):
    mean, std = (jnp.asarray(x, dtype) for x in (dataset.mean, dataset.std))
    return (images.astype(dtype) - mean) / std

  def init(key):
    images = jnp.zeros((1, *dataset.train_images.shape[1:]), jnp.float32)
    return models.init(layers, key, images)

  def prepare(batch, key, dtype):
    images = normalise(batch[0], dtype)
    return data.augment(images, key) if augment else images

  @jax.jit
  def score(params, images, labels):
    """Returns summed loss and number of hits over one batch."""
    images = normalise(images, lib.dtype_of(params))
    logits, _ = models.apply(layers, params, images)
    hits = (logits.argmax(-1) == labels).sum()
    return cross_entropy(logits, labels).sum(), hits

  count = evaluation_examples or None
  test_images = dataset.test_images[:count]
  test_labels = dataset.test_labels[:count]

  def evaluate(params):
    total = np.zeros(2)
    for start in range(0, len(test_labels), _IMAGES):
      rows = slice(start, start + _IMAGES)
      sums = score(params, test_images[rows], test_labels[rows])
      total += jax.device_get(sums)
    return Evaluation(*(total / len(test_labels)).tolist())

  pieces = Pieces(layers, prepare, lib.classification_loss)
  data_of = lib.examples_of(
    dataset.train_images, dataset.train_labels, partition
  )
  return lib.join(pieces, init, evaluate, data_of, batch_size)


def classify_sentences(
  task: sentences_lib.Sentences,
  layers: models.Layers,
  *,
  batch_size: int,
  evaluation_examples: int = 0,
  weights: Sequence[Mapping[str, Any]] | None = None,
) -> Problem:
  """Classification of sentences, or of pairs of them, with cross-entropy.

  Its batches are (int32[B, 2, T], int32[B]).

  Args:
    task: from `data.sentences.load`.
    layers: `encoder.bert`, with as many classes as the task.
    batch_size: B, examples in one worker's batch.
    evaluation_examples: how many test examples, evenly spaced; 0 is all.
    weights: initial weights of each layer, as of `encoder.pretrained`. Those
      that are not given, such as the classifier's, are drawn.
  """
  if task.vocabulary > layers[0].vocabulary:
    raise ValueError(
      f"{task.name} has {task.vocabulary:,} different words, and the model has"
      f" {layers[0].vocabulary:,}; use the tokenizer that the model was trained"
      " with"
    )
  checks.nonnegative("evaluation_examples", evaluation_examples)
  if weights is not None and len(weights) != len(layers):
    raise ValueError(
      f"{len(layers)} layers need weights each, not {len(weights)}"
    )

  def init(key):
    shape = 1, *task.train_tokens.shape[1:]
    params = models.init(layers, key, jnp.zeros(shape, jnp.int32))
    return params if weights is None else _replace(params, weights)

  test = len(task.test_labels)
  indices = lib.spread(test, evaluation_examples or test)
  labels = task.test_labels[indices]

  def evaluate(params):
    results = []
    for start in range(0, len(indices), _SENTENCES):
      rows = indices[start : start + _SENTENCES]
      batch = task.test_tokens[rows], task.test_labels[rows]
      results.append(jax.device_get(_score(layers, params, *batch)))
    loss, predicted = map(np.concatenate, zip(*results, strict=True))
    hits = predicted == labels
    evaluation = Evaluation(float(loss.mean()), float(hits.mean()))
    if task.measure is None:
      return evaluation
    measure = sentences_lib.MEASURES[task.measure](labels, predicted)
    return evaluation._replace(measure=float(measure))

  pieces = Pieces(
    layers, lambda batch, key, dtype: batch[0], lib.classification_loss
  )
  data_of = lib.examples_of(task.train_tokens, task.train_labels)
  return lib.join(pieces, init, evaluate, data_of, batch_size)


def _replace(params, weights):
  """Returns `params` with the given weights of each layer in their places."""
  layers = []
  for number, (old, new) in enumerate(zip(params, weights, strict=True)):
    layer = {**old, **jax.tree.map(jnp.asarray, dict(new))}
    if jax.tree.map(jnp.shape, layer) != jax.tree.map(jnp.shape, old):
      raise ValueError(
        f"the weights given for layer {number} are not of its sizes; build the"
        " model with the sizes that `encoder.pretrained` returns"
      )
    layers.append(layer)
  return tuple(layers)


@functools.partial(jax.jit, static_argnums=0)
def _score(layers, params, tokens, labels):
  """Returns the loss of each example, and the class predicted for it."""
  logits, _ = models.apply(layers, params, tokens)
  return cross_entropy(logits, labels), logits.argmax(-1)


def language(
  text: text_lib.Text,
  layers: models.Layers,
  *,
  batch_size: int,
  context: int,
  evaluation_windows: int = 64,
) -> Problem:
  """Prediction of the next character, with cross-entropy.

  Its batches are int32[B, T + 1]; its accuracy is of characters.

  Args:
    text: from `data.text.load`; `layers` have as many classes.
    batch_size: B, windows in one worker's batch.
    context: T, characters predicted in a window.
    evaluation_windows: of the test part, evenly spaced; 1 or more.
  """
  checks.whole("evaluation_windows", evaluation_windows)

  def criterion(logits, batch):
    return cross_entropy(logits, batch[:, 1:]).mean()

  def init(key):
    return models.init(layers, key, jnp.zeros((1, context), jnp.int32))

  @jax.jit
  def score(params, tokens):
    logits, _ = models.apply(layers, params, tokens[:, :-1])
    hits = logits.argmax(-1) == tokens[:, 1:]
    return criterion(logits, tokens), hits.mean()

  windows = np.lib.stride_tricks.sliding_window_view(text.test, context + 1)
  windows = windows[lib.spread(len(windows), evaluation_windows)]

  def evaluate(params):
    return Evaluation(*map(float, jax.device_get(score(params, windows))))

  def data_of(size):
    def batches(seed, workers):
      del workers
      return text_lib.make_batches(
        text.train, batch_size=size, context=context, seed=seed
      )

    per_epoch = max(len(text.train) // (size * context), 1)
    return batches, batches(0, 1)(0, 0), per_epoch

  pieces = Pieces(layers, lambda batch, key, dtype: batch[:, :-1], criterion)
  return lib.join(pieces, init, evaluate, data_of, batch_size)


def quadratic(curvatures: Any, *, noise: float = 0.0) -> Problem:
  """A noisy quadratic: f(w) = sum_i curvature_i w_i^2 / 2, from w = 1.

  Gradients carry Gaussian noise of standard deviation `noise`, through a linear
  term of mean 0: a batch is that term, float32[K]. The accuracy is NaN. Raises
  ValueError unless the curvatures, float[K], are all positive.
  """
  curvatures = np.asarray(curvatures, np.float64)
  if curvatures.ndim != 1 or not (curvatures > 0).all():
    raise ValueError(f"curvatures must be positive, got {curvatures}")

  def value(params):
    return 0.5 * jnp.sum(jnp.asarray(curvatures, params.dtype) * params**2)

  def loss(params, batch, key):
    del key
    return value(params) + batch @ params, worker_lib.Aux(())

  def batches(seed, workers):
    del workers

    def batch(worker, job):
      rng = np.random.default_rng((seed, worker, job))
      return (noise * rng.standard_normal(curvatures.shape)).astype(np.float32)

    return batch

  def evaluate(params):
    return Evaluation(float(value(params)), float("nan"))

  probe = np.zeros(curvatures.shape, np.float32)
  return Problem(
    lambda key: jnp.ones(curvatures.shape), loss, evaluate, batches, probe, 1
  )
