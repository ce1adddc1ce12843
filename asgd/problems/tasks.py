"""Problems with a model: images, numbers, sentences, text; and a quadratic."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import checks, data, models
from asgd import losses as losses_lib
from asgd.data import partitions
from asgd.data import sentences as sentences_lib
from asgd.data import text as text_lib
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Pieces, Problem, cross_entropy

# Examples of one call in an evaluation.
_IMAGES_PER_CALL, _SENTENCES_PER_CALL = 500, 128


def classification(
  dataset: data.Dataset,
  layers: models.Layers | models.Model,
  *,
  batch_size: int,
  augment: bool = False,
  partition: partitions.Partition = partitions.SHARED,
  evaluation_examples: int = 0,
) -> Problem:
  """Classification of images, or of any other arrays, with cross-entropy.

  Batches hold images as uint8, and the model normalises each channel: batches
  are (uint8[B, H, W, C], int32[B]), or the dataset's dtypes.

  Args:
    dataset: from `data.load` or `data.from_arrays`.
    layers: layers, or a model that cannot be cut, with an output per class.
    batch_size: B, examples in one worker's batch.
    augment: whether to pad, crop and flip training images at random.
    partition: "shared", one epoch over all workers, or another partition of
      `asgd.data.partitions`: each worker draws only from its own examples.
    evaluation_examples: number of test images to evaluate on; 0 is all.
  """
  classes = dataset.classes
  if classes is None:
    raise ValueError(
      f"the labels of {dataset.name} are no classes; use regression"
    )

  def check(logits, labels):
    expected = *labels.shape, classes
    lib.check_output(logits, expected, f"{classes} classes")

  def criterion(logits, batch):
    check(logits, batch[1])
    return lib.classification_loss(logits, batch)

  def score(logits, labels):
    """Returns (summed loss, number of correct predictions)."""
    check(logits, labels)
    # A tie counts as the first class.
    hits = (logits.argmax(-1) == labels).sum()
    return cross_entropy(logits, labels).sum(), hits

  def conclude(sums, labels):
    return Evaluation(*(sums / labels.size).tolist())

  task = _Task(criterion, score, conclude, float(np.log(classes)))
  options = batch_size, augment, partition, evaluation_examples
  return _labelled_problem(dataset, layers, task, *options)


def regression(
  dataset: data.Dataset,
  layers: models.Layers | models.Model,
  *,
  batch_size: int,
  **options: Any,
) -> Problem:
  """Regression with the mean squared error, over examples and outputs.

  Its evaluations have no accuracy. Their measure is R^2, the part of the test
  labels' variance that is predicted. For arguments see `classification`; the
  labels of the dataset are floats, [n] or [n, ...], and the model has the same
  number of outputs for an example.
  """
  if dataset.classes is not None:
    raise ValueError(
      f"the labels of {dataset.name} are classes, not floats; use"
      " classification"
    )

  def errors(output, labels):
    count = labels[0].size
    expected = labels.shape if labels.ndim > 1 else (len(labels), 1)
    if getattr(output, "shape", None) != labels.shape:
      lib.check_output(output, expected, f"labels of {count} numbers")
    return output.reshape(labels.shape) - labels

  def criterion(output, batch):
    return (errors(output, batch[1]) ** 2).mean()

  def score(output, labels):
    return ((errors(output, labels) ** 2).sum(),)

  def conclude(sums, labels):
    # R^2 = 1 - squared errors / squared deviations from the mean label.
    deviations = np.square(labels - labels.mean(0), dtype=np.float64).sum()
    measure = 1 - sums[0] / deviations if deviations else np.nan
    return Evaluation(float(sums[0] / labels.size), measure=float(measure))

  # The loss of a model that predicts the mean label.
  guess = float(dataset.train_labels.var(0).mean())
  task = _Task(criterion, score, conclude, guess)
  return _labelled_problem(dataset, layers, task, batch_size, **options)


class _Task(NamedTuple):
  """The criterion and the scores of a task on labelled examples."""

  criterion: Callable[..., Any]  # (output, batch) -> float[]
  score: Callable[..., Any]  # (output, labels) -> sums
  # (sums over the test part, its labels) -> Evaluation
  conclude: Callable[..., Any]
  guess: float  # see Problem


def _labelled_problem(
  dataset: data.Dataset,
  layers: models.Layers | models.Model,
  task: _Task,
  batch_size: int,
  augment: bool = False,
  partition: partitions.Partition = partitions.SHARED,
  evaluation_examples: int = 0,
) -> Problem:
  """Returns the problem of a task on labelled examples."""
  checks.nonnegative("evaluation_examples", evaluation_examples)
  shape = dataset.train_images.shape[1:]
  if augment and len(shape) != 3:
    raise ValueError(
      f"augment is for images [n, H, W, C], but examples of {dataset.name} have"
      f" the shape {shape}; leave it out"
    )

  def normalise(images, dtype):
    # Token numbers stay integers.
    if dataset.mean is None:
      is_floating = jnp.issubdtype(images.dtype, jnp.floating)
      return images.astype(dtype) if is_floating else jnp.asarray(images)
    mean, std = (jnp.asarray(x, dtype) for x in (dataset.mean, dataset.std))
    return (images.astype(dtype) - mean) / std

  # The shape and dtype of an example suffice to initialise the model.
  stored_example = jax.ShapeDtypeStruct((1, *shape), dataset.train_images.dtype)
  example = jax.eval_shape(lambda x: normalise(x, jnp.float32), stored_example)

  def init(key):
    return models.init(layers, key, example)

  def prepare(batch, key, dtype):
    images = normalise(batch[0], dtype)
    return data.augment(images, key) if augment else images

  @jax.jit
  def evaluate_batch(params, images, labels):
    # Parameters decide the precision, as in training.
    images = normalise(images, lib.dtype_of(params))
    output, _ = models.apply(layers, params, images)
    return task.score(output, labels)

  # 0 means all test examples.
  count = evaluation_examples or None
  test_images = dataset.test_images[:count]
  test_labels = dataset.test_labels[:count]

  def evaluate(params):
    score_of = functools.partial(evaluate_batch, params)
    sums = lib.totals(score_of, (test_images, test_labels), _IMAGES_PER_CALL)
    return task.conclude(sums, test_labels)

  # Workers draw from all examples, or each from its part of a partition.
  data_of = lib.examples_of(
    dataset.train_images, dataset.train_labels, partition
  )
  return lib.join(
    *(Pieces(layers, prepare, task.criterion), init, evaluate),
    *(data_of, batch_size),
    example=example,
    guess=task.guess,
  )


def classify_sentences(
  task: sentences_lib.Sentences,
  layers: models.Layers | models.Model,
  *,
  batch_size: int,
  partition: partitions.Partition = partitions.SHARED,
  evaluation_examples: int = 0,
  weights: Sequence[Mapping[str, Any]] | None = None,
) -> Problem:
  """Classification of sentences, or of pairs of them, with cross-entropy.

  Its batches are (int32[B, 2, T], int32[B]).

  Args:
    task: from `data.sentences.load`.
    layers: `encoder.bert`, with the task's number of classes; or a model that
      cannot be cut.
    batch_size: B, examples in one worker's batch.
    partition: as for `classification`.
    evaluation_examples: number of test examples, evenly spaced; 0 is all.
    weights: initial weights of each layer, from `encoder.pretrained`. Entries
      that they lack, such as the classifier's, are drawn.
  """
  first = None if isinstance(layers, models.Model) else layers[0]
  # A model that cannot be cut may have no known vocabulary.
  model_vocabulary = getattr(first, "vocabulary", task.vocabulary)
  if task.vocabulary > model_vocabulary:
    raise ValueError(
      f"{task.name} has {task.vocabulary:,} different words, but the model has"
      f" {model_vocabulary:,}; use the tokenizer that the model was trained"
      " with"
    )
  checks.nonnegative("evaluation_examples", evaluation_examples)
  if weights is not None and len(weights) != len(layers):
    raise ValueError(
      f"{len(layers)} layers need a dict of weights each, not {len(weights)}"
    )

  shape = 1, *task.train_tokens.shape[1:]
  example = jax.ShapeDtypeStruct(shape, jnp.int32)

  def init(key):
    params = models.init(layers, key, example)
    return params if weights is None else _with_weights(params, weights)

  # The evaluated examples are the same at each evaluation.
  test_count = len(task.test_labels)
  indices = lib.spread(test_count, evaluation_examples or test_count)
  labels = task.test_labels[indices]

  def evaluate(params):
    results = []
    for start in range(0, len(indices), _SENTENCES_PER_CALL):
      rows = indices[start : start + _SENTENCES_PER_CALL]
      batch = task.test_tokens[rows], task.test_labels[rows]
      results.append(jax.device_get(_score(layers, params, *batch)))
    # Scores such as F1 are no means over batches, so predictions are joined
    # first.
    loss, predicted = map(np.concatenate, zip(*results, strict=True))
    hits = predicted == labels
    evaluation = Evaluation(float(loss.mean()), float(hits.mean()))
    if task.measure is None:
      return evaluation
    measure = sentences_lib.MEASURES[task.measure](labels, predicted)
    return evaluation._replace(measure=float(measure))

  def criterion(logits, batch):
    expected = *batch[1].shape, task.classes
    lib.check_output(logits, expected, f"{task.classes} classes")
    return lib.classification_loss(logits, batch)

  pieces = Pieces(layers, lambda batch, key, dtype: batch[0], criterion)
  data_of = lib.examples_of(
    task.train_tokens, task.train_labels, partition
  )
  return lib.join(
    *(pieces, init, evaluate, data_of, batch_size),
    example=example,
    guess=float(np.log(task.classes)),
  )


def _with_weights(
  params: Any, weights: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], ...]:
  """Returns `params`, in which the entries of `weights` replace those of each
  layer."""
  layers = []
  for number, (initial, replacement) in enumerate(
    zip(params, weights, strict=True)
  ):
    # `replacement` may lack entries, such as the classifier's: they stay as
    # drawn.
    layer = {**initial, **jax.tree.map(jnp.asarray, dict(replacement))}
    if jax.tree.map(jnp.shape, layer) != jax.tree.map(jnp.shape, initial):
      raise ValueError(
        f"the weights given for layer {number} have other sizes; build the"
        " model with the sizes that `encoder.pretrained` returns"
      )
    layers.append(layer)
  return tuple(layers)


@functools.partial(jax.jit, static_argnums=0)
def _score(layers, params, tokens, labels):
  """Returns the loss and the predicted class of each example."""
  logits, _ = models.apply(layers, params, tokens)
  return cross_entropy(logits, labels), logits.argmax(-1)


def language(
  text: text_lib.Text,
  layers: models.Layers | models.Model,
  *,
  batch_size: int,
  context: int,
  evaluation_windows: int = 64,
) -> Problem:
  """Prediction of the next character (or token), with cross-entropy.

  Its batches are int32[B, T + 1]. Its accuracy is the share of characters that
  are predicted.

  Args:
    text: from `data.text.load`.
    layers: layers, or a model that cannot be cut, with an output per class.
    batch_size: B, windows in one worker's batch.
    context: T, characters predicted in a window.
    evaluation_windows: windows of the test part, evenly spaced; 1 or more.
  """
  checks.integer("evaluation_windows", evaluation_windows)

  example = jax.ShapeDtypeStruct((1, context), jnp.int32)

  def criterion(logits, batch):
    labels = batch[:, 1:]
    expected = *labels.shape, text.classes
    lib.check_output(logits, expected, f"{text.classes} different tokens")
    return cross_entropy(logits, labels).mean()

  def init(key):
    return models.init(layers, key, example)

  @jax.jit
  def score(params, tokens):
    logits, _ = models.apply(layers, params, tokens[:, :-1])
    hits = logits.argmax(-1) == tokens[:, 1:]
    return criterion(logits, tokens), hits.mean()

  # Views, not copies: the text is in memory once.
  windows = text_lib.windows_of(text.test, context, "a test part")
  windows = windows[lib.spread(len(windows), evaluation_windows)]

  def evaluate(params):
    loss, accuracy = jax.device_get(score(params, windows))
    return Evaluation(float(loss), float(accuracy))

  def data_of(size):
    def batches(seed, workers):
      del workers
      return text_lib.make_batches(
        text.train, batch_size=size, context=context, seed=seed
      )

    # Windows are drawn at random; those of an epoch have together as many
    # characters as the text.
    per_epoch = max(len(text.train) // (size * context), 1)
    return batches, batches(0, 1)(0, 0), per_epoch

  pieces = Pieces(layers, lambda batch, key, dtype: batch[:, :-1], criterion)
  return lib.join(
    *(pieces, init, evaluate, data_of, batch_size),
    example=example,
    guess=float(np.log(text.classes)),
  )


def quadratic(curvatures: Any, *, noise: float = 0.0) -> Problem:
  """A noisy quadratic: f(w) = sum_i curvature_i w_i^2 / 2, from w = 1.

  Gradients have Gaussian noise of standard deviation `noise`, from a linear
  term with mean 0: a batch is that term, float32[K]. The accuracy is NaN.
  Raises ValueError unless the curvatures, float[K], are all positive.
  """
  curvatures = np.asarray(curvatures, np.float64)
  if curvatures.ndim != 1 or not (curvatures > 0).all():
    raise ValueError(f"curvatures must be positive, got {curvatures}")

  def value(params):
    return 0.5 * jnp.sum(jnp.asarray(curvatures, params.dtype) * params**2)

  def loss(params, batch, key):
    del key
    return value(params) + batch @ params, losses_lib.Aux(())

  def batches(seed, workers):
    del workers

    def batch(worker, job):
      # A batch depends on (seed, worker, job) only, so a replay draws it again.
      rng = np.random.default_rng((seed, worker, job))
      return (noise * rng.standard_normal(curvatures.shape)).astype(np.float32)

    return batch

  def evaluate(params):
    return Evaluation(float(value(params)))

  probe = np.zeros(curvatures.shape, np.float32)
  return Problem(
    lambda key: jnp.ones(curvatures.shape), loss, evaluate, batches, probe, 1
  )
