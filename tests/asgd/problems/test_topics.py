"""LDA on tables: no count is lost, and its topics are those of one process."""

import jax
import kit
import numpy as np
import table_kit
from sklearn import decomposition

from asgd.data import documents
from asgd.problems import topics

TOPICS, ALPHA, BETA, SWEEPS = 6, 0.3, 0.05, 16
SMALL = {"documents": 120, "side": 3, "length": 30}
PROBLEM = {
  "name": "asgd.problems.topics:lda",
  "topics": TOPICS,
  "alpha": ALPHA,
  "beta": BETA,
  "words": SMALL,
}


def counted(data, z):
  """Words by topic, float[V, T], of the topic of each word."""
  out = np.zeros((len(data.vocabulary), TOPICS), int)
  for words, of, length in zip(
    data.train_words, z, data.train_lengths, strict=True
  ):
    np.add.at(out, (words[:length], of[:length]), 1)
  return out


def gibbs(data, sweeps, seed):
  """A sampler of one process, of which each line is the definition."""
  rng = np.random.default_rng(seed)
  z = rng.integers(0, TOPICS, data.train_words.shape)
  words, size = counted(data, z), len(data.vocabulary)
  of_docs = np.stack([np.bincount(row, minlength=TOPICS) for row in z])
  totals = words.sum(0)
  draws = rng.random((sweeps, *z.shape))
  for sweep in range(sweeps):
    for d, row in enumerate(data.train_words):
      for i, w in enumerate(row):
        old = z[d, i]
        words[w, old] -= 1
        totals[old] -= 1
        of_docs[d, old] -= 1
        p = (of_docs[d] + ALPHA) * (words[w] + BETA) / (totals + size * BETA)
        p = p.cumsum()
        z[d, i] = new = p.searchsorted(draws[sweep, d, i] * p[-1])
        words[w, new] += 1
        totals[new] += 1
        of_docs[d, new] += 1
  return words


def test_stale_samplers_end_where_one_process_and_scikit_learn_end():
  data = documents.generated(**SMALL)
  exp = table_kit.build(
    PROBLEM,
    {"essp": {"consistency": "essp", "bound": 2, "shards": 2}},
    batch_size=9,
    epochs=float(SWEEPS),
  )
  params, row = table_kit.ends(exp)["essp"]
  # Counts are the sums of the topics of words, to the last one.
  assert params["words"].dtype == np.int32
  np.testing.assert_array_equal(
    params["words"], counted(data, params["assignments"])
  )
  np.testing.assert_array_equal(params["totals"][0], params["words"].sum(0))
  assert row["test_measure"] > 0.85

  evaluate = exp.problem_of(exp.runs["essp"]).evaluate

  def perplexity(words):
    counts = {"words": words, "totals": words.sum(0)[None]}
    return evaluate(counts).more["perplexity"]

  references = [perplexity(gibbs(data, SWEEPS, seed=0))]
  matrix = np.stack(
    [np.bincount(row, minlength=9) for row in data.train_words]
  )
  variational = decomposition.LatentDirichletAllocation(
    TOPICS, doc_topic_prior=ALPHA, topic_word_prior=BETA, random_state=0
  ).fit(matrix)
  references.append(perplexity(variational.components_.T - BETA))
  assert row["perplexity"] < 1.05 * min(references)
  assert row["perplexity"] < 0.9 * len(data.vocabulary)


def test_a_sweep_over_one_topic_of_words_changes_nothing_that_cannot_be():
  problem = topics.lda(
    3, topics=2, alpha=1e-6, beta=1e-6, words={"documents": 20, "side": 2}
  )
  batch = problem.batches(0, 1)(0, 0)
  docs, words, lengths = batch
  z = (words % 2) * np.ones_like(words)
  counts = np.zeros((4, 2), np.int32)
  np.add.at(counts, (words, z), 1)
  params = {
    "assignments": np.zeros((18, words.shape[1]), np.int32),
    "totals": counts.sum(0)[None],
    "words": counts,
  }
  params["assignments"][docs] = z
  # Each word has one topic only, and the priors allow hardly any other: what
  # is drawn is what a document has of it.
  _, updates = jax.jit(problem.updates)(params, batch, jax.random.key(0))
  assert all(not np.asarray(x).any() for x in updates.values())


def test_documents_are_of_one_worker_and_padding_counts_nothing():
  problem = topics.lda(4, topics=3, words={"documents": 40})
  batches = problem.batches(0, 5)
  docs = {}
  for job in range(10):
    rows, _, lengths = batches(job % 5, job)
    docs.setdefault(job % 5, set()).update(rows[lengths > 0].tolist())
  assert sorted(sum(map(list, docs.values()), [])) == list(range(36))
  assert all(d % 5 == w for w, own in docs.items() for d in own)
  batch = batches(4, 9)  # the rest of the seven documents of worker 4
  assert (batch[2] > 0).sum() == 3
  params = problem.init(jax.random.key(1))
  _, updates = jax.jit(problem.updates)(params, batch, jax.random.key(2))
  changed = np.flatnonzero(np.asarray(updates["assignments"]).any(1))
  assert set(changed) <= set(batch[0][batch[2] > 0])
  assert not np.asarray(updates["totals"]).sum()


def test_each_job_has_a_document():
  batches = topics.lda(1, words={"documents": 40}).batches(0, 25)
  assert all(batches(job % 25, job)[2].any() for job in range(100))


def test_counts_of_different_ages_may_be_below_zero():
  model = topics._Model(2, 4, 0.1, 0.1)
  frequencies = model.word_frequencies(np.array([[-1, 3]]), np.array([-2, 8]))
  assert (np.asarray(frequencies) > 0).all()


test_runs_that_counts_are_not_for_are_refused = kit.refuses(
  [
    ({"codec": "int8"}, "codec 'int8' is for floats, and .* whole numbers"),
    ({"optimizer": "adagrad"}, "are for the function 'add' at the server,"),
    ({"recipe": "dana_slim"}, "not gradients; the recipe 'dana_slim' of"),
  ],
  lambda run: table_kit.build(PROBLEM, {"run": run}, batch_size=9),
)


test_bad_options_are_refused = kit.refuses(
  [
    ({"topics": 1}, "topics must be .*2.*not 1"),
    ({"alpha": 0.0}, "alpha must be a positive finite number"),
    ({"documents": "pydocs"}, "did you mean 'pydoc'"),
    ({"words": {"side": 1}}, "side must be"),
    ({"documents": "pydoc", "words": {"side": 3}}, "side is only an option of"),
  ],
  lambda options: topics.lda(4, **options),
)
