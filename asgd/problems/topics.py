"""Topics of documents: LDA by collapsed Gibbs sampling on tables of counts.

  config.problem = dict(name="asgd.problems.topics:lda", topics=10)

Index letters used in shape comments:
  n  documents; B of a batch
  L  words of the longest document
  V  words of the vocabulary
  T  topics
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks
from asgd import losses as losses_lib
from asgd.data import documents as documents_lib
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Problem

_PROBE = 64  # documents in the batch on which a Problem measures curvature
_DOCUMENTS_PER_CALL = 500  # documents of one call in an evaluation
_ESTIMATION_STEPS = 50  # steps to estimate the topics of a test document


def lda(
  batch_size: int,
  *,
  topics: int = 10,
  alpha: float = 0.1,
  beta: float = 0.05,
  documents: str = "generated",
  data_dir: str | None = None,
  words: dict[str, Any] | None = None,
) -> Problem:
  """Latent Dirichlet allocation, sampled on counts that all workers change.

    p(z = k) ~ (n_dk + alpha) (n_wk + beta) / (n_k + V beta)

  Here the counts leave out the word that is sampled. A job samples each word of
  its documents once, in order, on the counts that its worker has, and pushes
  the change of the counts. The topics of words are in a table, too. The rows of
  a document are read and written by one worker only. A message contains the
  changes of the counts and of the topics. So the counts at the server always
  agree with its topics, even if a worker fails.

  An evaluation estimates the topics of test documents from every other word.
  Its loss is the mean over the remaining words, in nats; `perplexity` is its
  exponential. If the true topics are known, its measure is the overlap of the
  estimated topics with them, in the best order.

  Args:
    batch_size: B, documents of a job. Worker i of N has the documents i, i + N,
      ..., and visits them cyclically: a pass takes N ceil(n / (N B)) jobs.
    topics: T, 2 or more.
    alpha: parameter of the Dirichlet prior of a document's topics, positive.
    beta: parameter of the prior of a topic's words, positive.
    documents: a name of `data.documents.load`.
    data_dir: folder of the documents.
    words: further arguments of `data.documents.load`.

  Returns:
    A Problem with parameters {"assignments": int32[n, L], "totals": int32[1,
    T], "words": int32[V, T]}. Its workers compute updates, for the recipe
    `table`.

  Raises:
    ValueError: for a value out of its range, and for invalid documents.

  Source:
    Griffiths and Steyvers, "Finding scientific topics", PNAS 2004, equation 5;
    Smola and Narayanamurthy, "An architecture for parallel topic models", VLDB
    2010, and Li et al., OSDI 2014, which sample with stale counts.

  Example:
    >>> import jax
    >>> from asgd.problems import topics
    >>> problem = topics.lda(4, topics=3, words=dict(documents=40))
    >>> params = problem.init(jax.random.key(0))
    >>> params["words"].shape, int(params["totals"].sum())
    ((25, 3), 2160)
  """
  checks.integer("topics", topics, 2, most=10**5)
  checks.positive("alpha", alpha)
  checks.positive("beta", beta)
  data = documents_lib.load(documents, data_dir=data_dir, **(words or {}))
  vocabulary_size = len(data.vocabulary)
  model = _Model(topics, vocabulary_size, alpha, beta)
  is_word = np.arange(data.train_words.shape[1]) < data.train_lengths[:, None]

  def init(key):
    shape = data.train_words.shape
    # int32[n, L]: a topic for each word; padding has topic 0, without a count.
    z = jax.random.randint(key, shape, 0, topics, np.int32) * is_word
    counts = jnp.zeros((vocabulary_size, topics), np.int32)
    # n_wt: how often word w has topic t, over all documents.
    counts = counts.at[data.train_words, z].add(is_word.astype(np.int32))
    return {"assignments": z, "totals": counts.sum(0)[None], "words": counts}

  return lib.of_data(
    *(functools.partial(_batches, data), batch_size, init, model.loss),
    functools.partial(_evaluate, model, data),
    guess=float(np.log(vocabulary_size)),
    keyed=lib.keyed(
      _rows,
      lambda batch, assignments, words, **_: (assignments, words, batch[2]),
    ),
    updates=model.updates,
  )


def _batches(
  data: documents_lib.Documents, batch_size: int
) -> tuple[Callable[..., Any], base.Batch, int]:
  """Returns (batches, probe, batches per epoch), as a `DataOf` does: a function
  (seed, workers) -> Batches, a batch to measure curvature on, and an int. A
  batch is (int32[B] documents, int32[B, L] words, int32[B] lengths), padded
  with documents of length 0."""
  n = len(data.train_lengths)
  checks.integer("batch_size", batch_size, most=n)

  def make_batch(rows):
    docs = np.resize(rows, batch_size).astype(np.int32)
    lengths = data.train_lengths[docs] * (np.arange(batch_size) < len(rows))
    return docs, data.train_words[docs], lengths

  def batches(seed, workers):
    del seed  # the order of documents matters little
    if workers > n:
      raise ValueError(
        f"workers {workers} is more than the {n} documents; use at most {n}"
      )
    def batch(worker, job):
      del worker  # job j always belongs to worker j % N
      worker_job, owner = divmod(int(job), workers)
      worker_rows = np.arange(owner, n, workers)
      jobs = -(-len(worker_rows) // batch_size)  # of one worker in a pass
      start = (worker_job % jobs) * batch_size
      return make_batch(worker_rows[start : start + batch_size])

    return batch

  # The probe needs the same form as a batch: documents, words, lengths.
  rows = lib.spread(n, _PROBE)
  probe = rows.astype(np.int32), data.train_words[rows]
  return batches, (*probe, data.train_lengths[rows]), max(n // batch_size, 1)


def _rows(batch: base.Batch) -> dict[str, tuple[np.ndarray, Any]]:
  """Returns the rows that a batch of documents needs: for each table, their
  numbers, int[...], and which of these count, bool[...] or True."""
  docs, words, lengths = batch
  return {
    "assignments": (docs, lengths > 0),
    "totals": (np.zeros(1, int), True),
    "words": (words, np.arange(words.shape[1]) < lengths[:, None]),
  }


class _Model:
  """The functions of LDA, for given sizes and priors."""

  def __init__(self, topics, vocabulary_size, alpha, beta):
    self._topics, self._vocabulary_size = topics, vocabulary_size
    self._alpha, self._beta = alpha, beta

  def word_frequencies(self, words, totals):
    """Returns the frequency of words in topics, float[..., T]. A worker's
    tables can be of different ages, so a count can be negative; it is taken as
    0."""
    words, totals = jnp.maximum(words, 0), jnp.maximum(totals, 0)
    prior_count = self._vocabulary_size * self._beta
    return (words + self._beta) / (totals + prior_count)

  def loss(self, params, batch: base.Batch, key):
    """Returns the mean loss of words, given their documents' topics."""
    del key
    docs, words, lengths = batch
    document_counts, is_word = self._document_counts(
      params["assignments"][docs], lengths
    )
    document_counts += self._alpha
    # theta: topics of documents, float[B, T]; phi: words of topics,
    # float[B, L, T].
    theta = document_counts / document_counts.sum(1, keepdims=True)
    phi = self.word_frequencies(params["words"][words], params["totals"][0])
    losses = -jnp.log(jnp.einsum("bk,blk->bl", theta, phi)) * is_word
    return losses.sum() / is_word.sum(), losses_lib.Aux(())

  def _document_counts(
    self, z: jax.Array, lengths: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns topic counts of documents, float[B, T], and which positions hold
    words, bool[B, L]."""
    is_word = jnp.arange(z.shape[1]) < lengths[:, None]
    topics_one_hot = jax.nn.one_hot(z, self._topics) * is_word[..., None]
    return topics_one_hot.sum(1), is_word

  def updates(self, params, batch: base.Batch, key):
    """Samples the topic of each word once; returns ((loss, aux), changes of the
    tables)."""
    docs, words, lengths = batch
    topics_before = params["assignments"][docs]
    document_counts, is_word = self._document_counts(topics_before, lengths)
    rows = jnp.broadcast_to(jnp.arange(len(docs))[:, None], words.shape)
    uniform = jax.random.uniform(key, words.shape)
    counts = document_counts, params["words"], params["totals"][0]
    positions = rows, words, topics_before, is_word, uniform
    (_, counts, totals), topics_after = jax.lax.scan(
      self._sample, counts, jax.tree.map(jnp.ravel, positions)
    )
    # Changes, not values: the server adds those of all workers.
    change = topics_after.reshape(topics_before.shape) - topics_before
    updates = {
      "assignments": jnp.zeros_like(params["assignments"]).at[docs].add(change),
      "totals": (totals - params["totals"][0])[None],
      "words": counts - params["words"],
    }
    updated = jax.tree.map(jnp.add, params, updates)
    return self.loss(updated, batch, key), updates

  def _sample(self, counts: Any, position: Any) -> tuple[Any, jax.Array]:
    """Draws the topic of one word, on the counts of all other words; returns
    (counts, topic). Counts are (float[B, T] of documents, int32[V, T] of words,
    int32[T] of all words)."""
    document_counts, words, totals = counts
    row, word, topic_before, is_word, uniform = position
    unit = is_word.astype(words.dtype)
    # [1] Remove the word from the counts.
    document_counts = document_counts.at[row, topic_before].add(-unit)
    words = words.at[word, topic_before].add(-unit)
    totals = totals.at[topic_before].add(-unit)
    # [2] Weigh each topic.
    frequencies = self.word_frequencies(words[word], totals)
    weights = (document_counts[row] + self._alpha) * frequencies
    cumulative = jnp.cumsum(weights)
    # [3] Draw one by inversion; rounding may exceed the last index.
    is_below = cumulative <= uniform * cumulative[-1]
    topic_drawn = is_below.sum().clip(max=self._topics - 1)
    topic_after = jnp.where(is_word, topic_drawn, topic_before).astype(
      topic_before.dtype
    )
    # [4] Add the word to the counts of its new topic.
    document_counts = document_counts.at[row, topic_after].add(unit)
    words = words.at[word, topic_after].add(unit)
    totals = totals.at[topic_after].add(unit)
    return (document_counts, words, totals), topic_after

  @functools.partial(jax.jit, static_argnums=0)
  def held_out_loss(self, phi, words, lengths):
    """Returns (summed loss, number) of the odd words of documents. Their topics
    are estimated from the even words; phi is float[V, T]."""
    positions = jnp.arange(words.shape[1])
    is_word = positions < lengths[:, None]
    is_read = (is_word & (positions % 2 == 0))[..., None]
    phi_of_words = phi[words]  # [B, L, T]

    def step(_, theta):
      weights = theta[:, None] * phi_of_words
      weights = weights / weights.sum(2, keepdims=True) * is_read
      theta = weights.sum(1) + self._alpha
      return theta / theta.sum(1, keepdims=True)

    # Expectation maximisation from equal topics, with a Dirichlet prior.
    start = jnp.full((len(words), self._topics), 1 / self._topics)
    theta = jax.lax.fori_loop(0, _ESTIMATION_STEPS, step, start)
    is_predicted = is_word & (positions % 2 == 1)
    losses = -jnp.log(jnp.einsum("bk,blk->bl", theta, phi_of_words))
    return (losses * is_predicted).sum(), is_predicted.sum()


def _evaluate(
  model: _Model, data: documents_lib.Documents, params: Any
) -> Evaluation:
  """Returns the test loss, and the overlap with the true topics."""
  phi = model.word_frequencies(params["words"], params["totals"][0])
  arrays = data.test_words, data.test_lengths
  score = functools.partial(model.held_out_loss, phi)
  total, count = lib.totals(score, arrays, _DOCUMENTS_PER_CALL).tolist()
  loss = total / count
  measure = float("nan")
  if data.topics is not None:
    measure = overlap(np.asarray(phi).T, data.topics)
  more = {"perplexity": float(np.exp(loss))}
  return Evaluation(loss, measure=measure, more=more)


def overlap(estimated: np.ndarray, true: np.ndarray) -> float:
  """Returns the overlap of two sets of topics, in their best order.

  Args:
    estimated: float[T', V], rows that sum to 1.
    true: float[T, V], rows that sum to 1.

  Returns:
    The mean over the true topics of sum_w min(estimated, true), from 0 to 1.

  Example:
    >>> import numpy as np
    >>> from asgd.problems import topics
    >>> topics.overlap(np.eye(3)[[2, 0, 1]], np.eye(3))
    1.0
  """
  # The import takes a third of a second.
  from scipy import optimize

  # float[T', T]: the overlap of each pair of topics.
  overlaps = np.minimum(estimated[:, None], true[None]).sum(2)
  rows, columns = optimize.linear_sum_assignment(-overlaps)
  return float(overlaps[rows, columns].sum() / len(true))
