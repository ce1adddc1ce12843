"""Topics of documents: LDA by collapsed Gibbs sampling on tables of counts.

  config.problem = dict(name="asgd.problems.topics:lda", topics=10)

Index letters used in shape comments:
  n  documents; B of a batch
  L  words of the longest document
  V  words of the vocabulary
  T  topics
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks
from asgd import losses as losses_lib
from asgd.data import documents as documents_lib
from asgd.problems import problem as lib
from asgd.problems.problem import Evaluation, Problem

_PROBE = 64  # documents of a Problem's probe
_AT_ONCE = 500  # documents of one call in an evaluation
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

  where the counts leave out the sampled word. A job samples each word of its
  documents once, in order, on the counts that its worker has, and pushes the
  change of the counts. The topics of words are in a table, too. Only one worker
  reads and writes the rows of a document. A message contains the changes of
  both tables. So the counts at the server always agree with its topics, even if
  a worker fails.

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
  checks.whole("topics", topics, 2, most=10**5)
  checks.positive("alpha", alpha)
  checks.positive("beta", beta)
  data = documents_lib.load(documents, data_dir=data_dir, **(words or {}))
  size = len(data.vocabulary)
  model = _Model(topics, size, alpha, beta)
  valid = np.arange(data.train_words.shape[1]) < data.train_lengths[:, None]

  def init(key):
    shape = data.train_words.shape
    # int32[n, L]: a topic for each word; padding has topic 0, without a count.
    z = jax.random.randint(key, shape, 0, topics, np.int32) * valid
    counts = jnp.zeros((size, topics), np.int32)
    # n_wt: how often word w has topic t, over all documents.
    counts = counts.at[data.train_words, z].add(valid.astype(np.int32))
    return {"assignments": z, "totals": counts.sum(0)[None], "words": counts}

  return lib.of_data(
    *(functools.partial(_batches, data), batch_size, init, model.loss),
    functools.partial(_evaluate, model, data),
    guess=float(np.log(size)),
    keyed=lib.keyed(
      _rows,
      lambda batch, assignments, words, **_: (assignments, words, batch[2]),
    ),
    updates=model.updates,
  )


def _batches(data, batch_size):
  """Returns the `DataOf` of batches: (int32[B] documents, int32[B, L] words,
  int32[B] lengths), padded with documents of length 0."""
  n = len(data.train_lengths)
  checks.whole("batch_size", batch_size, most=n)

  def of(rows):
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
      turn, owner = divmod(int(job), workers)
      worker_rows = np.arange(owner, n, workers)
      jobs = -(-len(worker_rows) // batch_size)  # of one worker in a pass
      start = (turn % jobs) * batch_size
      return of(worker_rows[start : start + batch_size])

    return batch

  # The probe needs the same form as a batch: documents, words, lengths.
  rows = lib.spread(n, _PROBE)
  probe = rows.astype(np.int32), data.train_words[rows]
  return batches, (*probe, data.train_lengths[rows]), max(n // batch_size, 1)


def _rows(batch: base.Batch) -> dict[str, tuple[np.ndarray, Any]]:
  """Returns the rows of each table that a batch of documents needs."""
  docs, words, lengths = batch
  return {
    "assignments": (docs, lengths > 0),
    "totals": (np.zeros(1, int), True),
    "words": (words, np.arange(words.shape[1]) < lengths[:, None]),
  }


class _Model:
  """The functions of LDA, for given sizes and priors."""

  def __init__(self, topics, size, alpha, beta):
    self._topics, self._size = topics, size
    self._alpha, self._beta = alpha, beta

  def word_frequencies(self, words, totals):
    """Returns the frequency of words in topics, float[..., T]. Counts of
    different ages can be negative; these count as 0."""
    words, totals = jnp.maximum(words, 0), jnp.maximum(totals, 0)
    return (words + self._beta) / (totals + self._size * self._beta)

  def loss(self, params, batch: base.Batch, key):
    """Returns the mean loss of words, given their documents' topics."""
    del key
    docs, words, lengths = batch
    of_docs, valid = self._document_counts(params["assignments"][docs], lengths)
    of_docs += self._alpha
    # theta: topics of documents, float[B, T]; phi: words of topics,
    # float[B, L, T].
    theta = of_docs / of_docs.sum(1, keepdims=True)
    phi = self.word_frequencies(params["words"][words], params["totals"][0])
    losses = -jnp.log(jnp.einsum("bk,blk->bl", theta, phi)) * valid
    return losses.sum() / valid.sum(), losses_lib.Aux(())

  def _document_counts(self, z, lengths):
    """Returns topic counts of documents, float[B, T], and which positions hold
    words."""
    valid = jnp.arange(z.shape[1]) < lengths[:, None]
    ones = jax.nn.one_hot(z, self._topics) * valid[..., None]
    return ones.sum(1), valid

  def updates(self, params, batch: base.Batch, key):
    """Samples the topic of each word once; returns loss and changes."""
    docs, words, lengths = batch
    old = params["assignments"][docs]
    of_docs, valid = self._document_counts(old, lengths)
    rows = jnp.broadcast_to(jnp.arange(len(docs))[:, None], words.shape)
    uniform = jax.random.uniform(key, words.shape)
    counts = of_docs, params["words"], params["totals"][0]
    positions = rows, words, old, valid, uniform
    (_, counts, totals), new = jax.lax.scan(
      self._sample, counts, jax.tree.map(jnp.ravel, positions)
    )
    # Changes, not values: the server adds those of all workers.
    change = new.reshape(old.shape) - old
    updates = {
      "assignments": jnp.zeros_like(params["assignments"]).at[docs].add(change),
      "totals": (totals - params["totals"][0])[None],
      "words": counts - params["words"],
    }
    updated = jax.tree.map(jnp.add, params, updates)
    return self.loss(updated, batch, key), updates

  def _sample(self, counts, position):
    """Draws the topic of one word, on the counts of all other words."""
    of_docs, words, totals = counts
    row, word, old, valid, uniform = position
    unit = valid.astype(words.dtype)
    # [1] Remove the word from the counts.
    of_docs = of_docs.at[row, old].add(-unit)
    words, totals = words.at[word, old].add(-unit), totals.at[old].add(-unit)
    # [2] Weigh each topic.
    frequencies = self.word_frequencies(words[word], totals)
    weights = (of_docs[row] + self._alpha) * frequencies
    cumulative = jnp.cumsum(weights)
    # [3] Draw one by inversion; rounding may exceed the last index.
    is_below = cumulative <= uniform * cumulative[-1]
    drawn = is_below.sum().clip(max=self._topics - 1)
    new = jnp.where(valid, drawn, old).astype(old.dtype)
    # [4] Add the word to the counts of its new topic.
    of_docs = of_docs.at[row, new].add(unit)
    words, totals = words.at[word, new].add(unit), totals.at[new].add(unit)
    return (of_docs, words, totals), new

  @functools.partial(jax.jit, static_argnums=0)
  def completion(self, phi, words, lengths):
    """Returns (summed loss, number) of the odd words of documents. Their topics
    are estimated from the even words; phi is float[V, T]."""
    positions = jnp.arange(words.shape[1])
    valid = positions < lengths[:, None]
    read = (valid & (positions % 2 == 0))[..., None]
    of_words = phi[words]  # [B, L, T]

    def step(_, theta):
      weights = theta[:, None] * of_words
      weights = weights / weights.sum(2, keepdims=True) * read
      theta = weights.sum(1) + self._alpha
      return theta / theta.sum(1, keepdims=True)

    # Expectation maximisation from equal topics, with a Dirichlet prior.
    start = jnp.full((len(words), self._topics), 1 / self._topics)
    theta = jax.lax.fori_loop(0, _ESTIMATION_STEPS, step, start)
    rest = valid & (positions % 2 == 1)
    losses = -jnp.log(jnp.einsum("bk,blk->bl", theta, of_words))
    return (losses * rest).sum(), rest.sum()


def _evaluate(model, data, params) -> Evaluation:
  """Returns the test loss, and the overlap with the true topics."""
  phi = model.word_frequencies(params["words"], params["totals"][0])
  arrays = data.test_words, data.test_lengths
  score = functools.partial(model.completion, phi)
  total, count = lib.totals(score, arrays, _AT_ONCE).tolist()
  loss = total / count
  measure = float("nan")
  if data.topics is not None:
    measure = in_common(np.asarray(phi).T, data.topics)
  more = {"perplexity": float(np.exp(loss))}
  return Evaluation(loss, measure=measure, more=more)


def in_common(estimated: np.ndarray, true: np.ndarray) -> float:
  """Returns the overlap of two sets of topics, in their best order.

  Args:
    estimated: float[T', V], rows that sum to 1.
    true: float[T, V], rows that sum to 1.

  Returns:
    The mean over the true topics of sum_w min(estimated, true), from 0 to 1.

  Example:
    >>> import numpy as np
    >>> from asgd.problems import topics
    >>> topics.in_common(np.eye(3)[[2, 0, 1]], np.eye(3))
    1.0
  """
  # The import takes a third of a second.
  from scipy import optimize

  # float[T', T]: the overlap of each pair of topics.
  overlaps = np.minimum(estimated[:, None], true[None]).sum(2)
  rows, columns = optimize.linear_sum_assignment(-overlaps)
  return float(overlaps[rows, columns].sum() / len(true))
