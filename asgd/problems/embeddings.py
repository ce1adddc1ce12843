"""Word embeddings: skip-gram with negative sampling on two tables.

  config.problem = dict(name="asgd.problems.embeddings:skip_gram", dimension=32)

Index letters used in shape comments:
  n  words of a text; B pairs of a batch
  V  different words
  N  negatives of a pair
  d  components of a word's vector
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks
from asgd import losses as losses_lib
from asgd.data import words as words_lib
from asgd.problems import problem as problem_lib
from asgd.problems.problem import Evaluation, Problem

_TEST_PAIRS = 4000  # pairs of the test part
_PROBE = 256  # pairs of a Problem's probe
_PROBE_SEED, _TEST_SEED = 2**32 - 1, 2**32 - 2


def skip_gram(
  batch_size: int,
  *,
  dimension: int = 32,
  window: int = 3,
  negatives: int = 5,
  power: float = 0.75,
  text: str = "pydoc",
  data_dir: str | None = None,
  least: int = 5,
  most: int = 20_000,
) -> Problem:
  """Predicts the words near a word, against words drawn at random.

    f = mean over pairs (c, o) of -log s(u_c . v_o) - sum_i log s(-u_c . v_i)

  with s the logistic function, and words i drawn in proportion to count^power.
  A pair is a word and another at most `window` words away. The loss of an
  evaluation is f over pairs of the test part, always with the same negatives.
  Its accuracy is the share of the pairs (c, o) with u_c . v_o above u_c . v_1,
  the product with their first negative.

  Args:
    batch_size: B, pairs of a batch.
    dimension: d.
    window: words to each side, 1 or more.
    negatives: N, 1 or more.
    power: exponent of the words' counts, 0 or more.
    text: "pydoc" or "file".
    data_dir: path of the file.
    least: words that occur less often in the text are left out.
    most: largest size of the vocabulary.

  Returns:
    A Problem with parameters {"inner": float32[V, d], "outer": ...}, u and v.
    Its batches are (int32[B] words, int32[B, 1 + N] the nearby word and the
    negatives), and it is keyed: a batch determines the rows that it needs.

  Raises:
    ValueError: for a value out of its range, a text too short for the window,
      and one without words.

  Source:
    Mikolov et al., "Distributed representations of words and phrases and their
    compositionality", NIPS 2013, equation 4.

  Example:
    >>> from asgd.problems import embeddings
    >>> problem = embeddings.skip_gram(4, negatives=2, most=100)
    >>> inner, outer = problem.batches(0, 1)(0, 0)
    >>> inner.shape, outer.shape
    ((4,), (4, 3))
  """
  for key, value in (
    ("dimension", dimension), ("window", window), ("negatives", negatives)
  ):
    checks.integer(key, value, most=10**6)
  checks.nonnegative("power", power)
  data = words_lib.load(text, data_dir=data_dir, least=least, most=most)
  vocabulary_size = len(data.vocabulary)
  draw_pairs = _pair_sampler(data, window, negatives, power)
  # Drawn once, so that all evaluations have the same negatives.
  test = draw_pairs(data.test, _TEST_PAIRS, np.random.default_rng(_TEST_SEED))

  def init(key):
    # As in word2vec, the table `outer` starts at 0, so all products are 0 at
    # first.
    shape = vocabulary_size, dimension
    inner = jax.random.uniform(key, shape, minval=-0.5, maxval=0.5)
    return {"inner": inner / dimension, "outer": jnp.zeros(shape, inner.dtype)}

  def evaluate(params):
    loss, accuracy = _score(params, test)
    return Evaluation(float(loss), float(accuracy))

  def data_of(size):
    checks.integer("batch_size", size, most=len(data.train))

    def batches(seed, workers):
      del workers

      def batch(worker, job):
        del worker
        rng = np.random.default_rng((seed, int(job)))
        return draw_pairs(data.train, size, rng)

      return batch

    probe = draw_pairs(data.train, _PROBE, np.random.default_rng(_PROBE_SEED))
    return batches, probe, max(len(data.train) // size, 1)

  return problem_lib.of_data(
    *(data_of, batch_size, init, _loss, evaluate),
    guess=float((1 + negatives) * np.log(2)),  # the loss if products are 0
    keyed=problem_lib.keyed(
      lambda batch: {"inner": (batch[0], True), "outer": (batch[1], True)},
      lambda batch, inner, outer: (inner, outer),
    ),
  )


def _pair_sampler(
  data: words_lib.Words, window: int, negatives: int, power: float
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
  """Returns a function (tokens, count, generator) that draws pairs with
  negatives from a part of a text: int32[B] and int32[B, 1 + N]."""
  shortest = min(len(data.train), len(data.test))
  if shortest <= 2 * window:
    raise ValueError(
      f"a part of {data.source} has {shortest} known words, too few for a"
      f" window of {window}: use a longer text, or a smaller window"
    )
  with np.errstate(over="ignore"):
    weights = data.counts.astype(float) ** power
    total = weights.sum()
  if not np.isfinite(total):
    raise ValueError(
      f"power {power:g} is too large: counts of words to that power are not"
      " finite; 0.75 is usual"
    )
  # Inversion: a uniform number selects the first cumulative weight above it.
  cumulative = np.cumsum(weights / total)

  def draw(tokens, count, rng):
    # A centre is at least `window` words from both ends of the text.
    positions = rng.integers(window, len(tokens) - window, count)
    distances = rng.integers(1, window + 1, count) * rng.choice([-1, 1], count)
    negative_words = np.searchsorted(cumulative, rng.random((count, negatives)))
    # Rounding may leave the last cumulative weight below 1.
    negative_words = negative_words.clip(max=len(cumulative) - 1)
    # int[B, 1 + N]: the nearby word, then the negatives.
    nearby = tokens[positions + distances]
    contexts = np.concatenate([nearby[:, None], negative_words], 1)
    return tokens[positions], contexts.astype(np.int32)

  return draw


def _products(params, batch):
  """Returns u_c . v_o and u_c . v_i of each pair, float[B, 1 + N]."""
  centres, contexts = batch
  u, v = params["inner"][centres], params["outer"][contexts]
  return jnp.einsum("bd,bnd->bn", u, v)


def _mean(products):
  """Returns the mean loss of pairs from their products."""
  nearby, negative = products[:, 0], products[:, 1:]
  losses = jax.nn.softplus(-nearby) + jax.nn.softplus(negative).sum(1)
  return losses.mean()


def _loss(params, batch: base.Batch, key):
  del key
  return _mean(_products(params, batch)), losses_lib.Aux(())


@jax.jit
def _score(params, batch):
  """Returns (loss, share of pairs with a product above that of their first
  negative)."""
  products = _products(params, batch)
  return _mean(products), (products[:, 0] > products[:, 1]).mean()
