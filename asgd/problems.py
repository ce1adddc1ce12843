"""Problems: what is trained, as four functions.

A Problem joins data and model: initial parameters, a loss on a batch, an
evaluation, and batches as a function of (worker, job). Runtimes see nothing
else of either.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, data, models, sentences, text
from asgd import worker as worker_lib


class Evaluation(NamedTuple):
  """How good parameters are on data that was not trained on."""

  loss: float  # mean cross-entropy, nats
  accuracy: float  # fraction in [0, 1]
  measure: float = float("nan")  # the task's own beside these, if it has one


Batches = Callable[[int, int], base.Batch]  # (worker, job) -> NumPy arrays


class Pieces(NamedTuple):
  """The training loss in pieces, for those who cut the layers: that of a batch
  is criterion(apply(layers, params, prepare(batch, key, dtype)), batch)."""

  layers: models.Layers
  prepare: Callable[..., jax.Array]  # batch, key, dtype -> what layer 0 gets
  criterion: Callable[..., jax.Array]  # (what the last gives, batch) -> float[]


class Problem(NamedTuple):
  """Something to train. Nothing in it is drawn: seeds come from outside, so
  that runs which differ in the seed share what is compiled."""

  init: Callable[[jax.Array], optax.Params]  # key -> parameters
  loss: worker_lib.Loss  # (params, batch, key) -> (float[], Aux)
  evaluate: Callable[[optax.Params], Evaluation]
  batches: Callable[[int, int], Batches]  # (seed, workers) -> Batches
  probe: base.Batch  # training examples to measure curvature on
  batches_per_epoch: int  # batches in one pass over the training data
  pieces: Pieces | None = None  # None: it cannot be cut


_EVALUATION_BATCH = 500  # images evaluated at once
_EVALUATION_SENTENCES = 128  # evaluated at once
_PROBE = 256  # training images on which curvature is estimated


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

  Images travel as uint8 and are normalised per channel where they are used.

  Args:
    dataset: from `data.load`.
    layers: from `models.build`, with as many classes as the dataset.
    batch_size: examples in one worker's batch.
    augment: pad, crop and flip training images at random.
    partition: "shared", one epoch over all workers, or "sharded", each worker
      drawing from examples of its own.
    evaluation_examples: evaluate on the first so many test images; 0 is all.

  Returns:
    A Problem.

  Raises:
    ValueError: for a batch larger than the data, and as `data.make_batches`.
  """

  def batches(seed, workers):
    return data.make_batches(
      dataset.train_images,
      dataset.train_labels,
      batch_size=batch_size,
      seed=seed,
      partition=partition,
      workers=workers,
    )

  if evaluation_examples < 0:
    raise ValueError(
      f"evaluation_examples must be 0 (all) or more, not {evaluation_examples}"
    )
  batches(0, 1)  # raises what is wrong with the arguments here, not later

  def normalise(images, dtype):
    mean, std = (jnp.asarray(x, dtype) for x in (dataset.mean, dataset.std))
    return (images.astype(dtype) - mean) / std

  def init(key):
    images = jnp.zeros((1, *dataset.train_images.shape[1:]), jnp.float32)
    return models.init(layers, key, images)

  def prepare(batch, key, dtype):
    images = normalise(batch[0], dtype)
    return data.augment(images, key) if augment else images

  def criterion(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
    return losses.mean()

  pieces = Pieces(layers, prepare, criterion)

  @jax.jit
  def score(params, images, labels):
    """Returns summed loss and number of hits over one batch."""
    images = normalise(images, dtype_of(params))
    logits, _ = models.apply(layers, params, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), (logits.argmax(-1) == labels).sum()

  evaluated = slice(evaluation_examples or None)
  test_images = dataset.test_images[evaluated]
  test_labels = dataset.test_labels[evaluated]

  def evaluate(params):
    total = np.zeros(2)
    for start in range(0, len(test_labels), _EVALUATION_BATCH):
      rows = slice(start, start + _EVALUATION_BATCH)
      total += jax.device_get(
        score(params, test_images[rows], test_labels[rows])
      )
    return Evaluation(*(total / len(test_labels)).tolist())

  train = len(dataset.train_labels)
  spread = np.linspace(0, train - 1, min(_PROBE, train)).astype(int)
  probe = dataset.train_images[spread], dataset.train_labels[spread]
  return Problem(
    *(init, whole_loss(pieces), evaluate, batches, probe),
    *(train // batch_size, pieces),
  )


def dtype_of(params: optax.Params) -> Any:
  """Returns the dtype in which a model computes: that of its parameters."""
  return jax.tree.leaves(params)[0].dtype


def whole_loss(pieces: Pieces) -> worker_lib.Loss:
  """Returns the loss of all layers, one after the other."""

  def loss(params, batch, key):
    prepare_key, model_key = jax.random.split(key)
    x = pieces.prepare(batch, prepare_key, dtype_of(params))
    y, stats = models.apply(pieces.layers, params, x, train=True, key=model_key)
    return pieces.criterion(y, batch), worker_lib.Aux(stats)

  return loss


def language(
  held: text.Text,
  layers: models.Layers,
  *,
  batch_size: int,
  context: int,
  evaluation_windows: int = 64,
) -> Problem:
  """Prediction of the next character, with cross-entropy.

  Args:
    held: from `text.load`.
    layers: from `models.build`, with as many classes as the text.
    batch_size: windows in one worker's batch.
    context: characters predicted in a window.
    evaluation_windows: of the test part, evenly spaced.

  Returns:
    A Problem; its accuracy is of characters.

  Raises:
    ValueError: as `text.make_batches`, and for no evaluation windows.
  """
  if evaluation_windows < 1:
    raise ValueError(
      f"evaluation_windows must be positive, not {evaluation_windows!r}"
    )

  def batches(seed, workers):
    del workers
    return text.make_batches(
      held.train, batch_size=batch_size, context=context, seed=seed
    )

  def criterion(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch[:, 1:]
    )
    return losses.mean()

  def prepare(batch, key, dtype):
    del key, dtype
    return batch[:, :-1]

  pieces = Pieces(layers, prepare, criterion)

  def init(key):
    return models.init(layers, key, jnp.zeros((1, context), jnp.int32))

  @jax.jit
  def score(params, tokens):
    logits, _ = models.apply(layers, params, tokens[:, :-1])
    hits = logits.argmax(-1) == tokens[:, 1:]
    return criterion(logits, tokens), hits.mean()

  test = np.lib.stride_tricks.sliding_window_view(held.test, context + 1)
  rows = np.linspace(0, len(test) - 1, min(evaluation_windows, len(test)))
  windows = test[rows.astype(int)]

  def evaluate(params):
    return Evaluation(*map(float, jax.device_get(score(params, windows))))

  probe = batches(0, 1)(0, 0)
  count = max(len(held.train) // (batch_size * context), 1)
  loss = whole_loss(pieces)
  return Problem(init, loss, evaluate, batches, probe, count, pieces)


def classify_sentences(
  held: sentences.Sentences,
  layers: models.Layers,
  *,
  batch_size: int,
  evaluation_examples: int = 0,
  weights: Sequence[Mapping[str, Any]] | None = None,
) -> Problem:
  """Classification of sentences, or of pairs of them, with cross-entropy.

  Args:
    held: from `sentences.load`.
    layers: `encoder.bert`, with as many classes as the task.
    batch_size: examples in one worker's batch.
    evaluation_examples: evaluate on so many test examples, evenly spaced; 0 is
      all.
    weights: of each layer, as `encoder.pretrained` has them: where training
      begins. What a layer has beside them, such as the classifier, is drawn.

  Returns:
    A Problem.

  Raises:
    ValueError: for a task of more words than the model's, weights of another
      model, and as `data.make_batches`.
  """
  if held.vocabulary > layers[0].vocabulary:
    raise ValueError(
      f"{held.name} has {held.vocabulary:,} different words, and the model has"
      f" {layers[0].vocabulary:,}; use the tokenizer that the model was trained"
      " with"
    )
  if evaluation_examples < 0:
    raise ValueError(
      f"evaluation_examples must be 0 (all) or more, not {evaluation_examples}"
    )
  if weights is not None and len(weights) != len(layers):
    raise ValueError(
      f"{len(layers)} layers need weights each, not {len(weights)}"
    )

  def batches(seed, workers):
    return data.make_batches(
      held.train_tokens,
      held.train_labels,
      batch_size=batch_size,
      seed=seed,
      workers=workers,
    )

  batches(0, 1)  # raises what is wrong with the arguments here, not later

  def init(key):
    shape = 1, *held.train_tokens.shape[1:]
    params = models.init(layers, key, jnp.zeros(shape, jnp.int32))
    if weights is None:
      return params
    made = []
    for number, (drawn, given) in enumerate(zip(params, weights, strict=True)):
      chosen = {**drawn, **jax.tree.map(jnp.asarray, dict(given))}
      if _shapes_of(chosen) != _shapes_of(drawn):
        raise ValueError(
          f"the weights given for layer {number} are not of its sizes; build"
          " the model with those that `encoder.pretrained` tells"
        )
      made.append(chosen)
    return tuple(made)

  def prepare(batch, key, dtype):
    del key, dtype
    return batch[0]

  def criterion(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
    return losses.mean()

  pieces = Pieces(layers, prepare, criterion)

  test = len(held.test_labels)
  count = min(evaluation_examples or test, test)
  rows = np.linspace(0, test - 1, count).astype(int)
  labels = held.test_labels[rows]

  def evaluate(params):
    found = []
    for start in range(0, count, _EVALUATION_SENTENCES):
      some = rows[start : start + _EVALUATION_SENTENCES]
      batch = held.test_tokens[some], held.test_labels[some]
      found.append(jax.device_get(_score_sentences(layers, params, *batch)))
    loss, predicted = map(np.concatenate, zip(*found, strict=True))
    hits = predicted == labels
    evaluation = Evaluation(float(loss.mean()), float(hits.mean()))
    if held.measure is None:
      return evaluation
    measure = sentences.MEASURES[held.measure](labels, predicted)
    return evaluation._replace(measure=float(measure))

  train = len(held.train_labels)
  spread = np.linspace(0, train - 1, min(_PROBE, train)).astype(int)
  probe = held.train_tokens[spread], held.train_labels[spread]
  loss = whole_loss(pieces)
  return Problem(
    init, loss, evaluate, batches, probe, train // batch_size, pieces
  )


@functools.partial(jax.jit, static_argnums=0)
def _score_sentences(layers, params, tokens, labels):
  """Returns the loss of each example, and the class predicted for it."""
  logits, _ = models.apply(layers, params, tokens)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses, logits.argmax(-1)


def _shapes_of(tree):
  return jax.tree.map(lambda leaf: leaf.shape, tree)


def quadratic(curvatures: Any, *, noise: float = 0.0) -> Problem:
  """Half the curvature-weighted square norm: the world with known answers.

  f(w) = sum_i curvature_i w_i^2 / 2, from w = 1, with gradients that carry
  Gaussian noise of standard deviation `noise` (through a linear term of mean
  0). Its accuracy is reported as NaN.

  Args:
    curvatures: float[K], all positive.
    noise: standard deviation of each gradient element.

  Raises:
    ValueError: for curvatures that are not positive.
  """
  curvatures = np.asarray(curvatures, np.float64)
  if curvatures.ndim != 1 or not (curvatures > 0).all():
    raise ValueError(f"curvatures must be positive, got {curvatures}")

  def init(key):
    del key
    return jnp.ones(curvatures.shape)

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
  return Problem(init, loss, evaluate, batches, probe, 1)
