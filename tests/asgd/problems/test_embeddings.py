"""Word embeddings on tables: the loss, and plain SGD beside stale workers."""

import jax
import numpy as np
import pytest
import table_kit

from asgd.problems import embeddings


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  """Sentences of two kinds of words, which never meet."""
  rng, kinds = np.random.default_rng(0), ("abcdefgh", "stuvwxyz")
  lines = [
    " ".join(rng.choice(list(kinds[i % 2]), 12)) for i in range(500)
  ]
  path = tmp_path_factory.mktemp("text") / "text"
  path.write_text("\n".join(lines))
  return str(path)


def sgd(problem, params, jobs, rate):
  """Plain SGD of one process, pair by pair of each batch."""
  u, v = (np.array(params[name], np.float64) for name in ("inner", "outer"))
  batches = problem.batches(0, 1)
  for job in range(jobs):
    inner, outer = batches(0, job)
    of_u, of_v = u.copy(), v.copy()
    for c, others in zip(inner, outer, strict=True):
      for i, o in enumerate(others):
        slope = 1 / (1 + np.exp(-u[c] @ v[o])) - (i == 0)
        of_u[c] -= rate / len(inner) * slope * v[o]
        of_v[o] -= rate / len(inner) * slope * u[c]
    u, v = of_u, of_v
  return u, v


PROBLEM = {
  "name": "asgd.problems.embeddings:skip_gram",
  "dimension": 4,
  "window": 2,
  "negatives": 2,
  "text": "file",
}


def test_stale_workers_end_where_plain_sgd_ends(text):
  exp = table_kit.build(
    PROBLEM,
    {"one": {"workers": (1,)}, "ssp": {"bound": 3, "shards": 2}},
    data_dir=text,
    batch_size=64,
    epochs=3.0,
    learning_rate=8.0,
  )
  ends = table_kit.ends(exp)
  problem = exp.problem_of(exp.runs["one"])
  start = problem.init(jax.random.split(jax.random.key(0))[0])
  u, v = sgd(problem, start, exp.plan(exp.cells[0]).messages, 8.0)
  params, row = ends["one"]
  np.testing.assert_allclose(params["inner"], u, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(params["outer"], v, rtol=1e-3, atol=1e-4)
  stale = ends["ssp"][1]
  assert stale["test_loss"] == pytest.approx(row["test_loss"], rel=0.05)
  assert stale["test_loss"] < 0.9 * problem.guess
  # Nothing is known of a negative of the same kind, which each other one is.
  assert stale["test_accuracy"] > 0.6


def test_the_loss_on_the_rows_of_a_batch_is_the_loss(text):
  problem = embeddings.skip_gram(16, **_own(text))
  rng, batch = np.random.default_rng(0), problem.batches(0, 1)(0, 3)
  shape = problem.init(jax.random.key(0))["inner"].shape
  params = {name: rng.normal(size=shape) for name in ("inner", "outer")}
  keys = problem.keyed.keys(batch)
  rows = {name: params[name][each] for name, each in keys.items()}
  whole = problem.loss(params, batch, None)[0]
  part = problem.loss(rows, problem.keyed.localise(batch, keys), None)[0]
  np.testing.assert_allclose(part, whole, rtol=1e-6)


def _own(text):
  return {k: x for k, x in PROBLEM.items() if k != "name"} | {"data_dir": text}


def test_a_text_without_words_is_refused(tmp_path, text):
  path = tmp_path / "text"
  path.write_text("one two three")
  with pytest.raises(ValueError, match="the vocabulary of .* has no word: of"):
    embeddings.skip_gram(4, text="file", data_dir=str(path))
  path.write_text("one two " * 9)
  with pytest.raises(ValueError, match="has 1 known words, too few for a win"):
    embeddings.skip_gram(4, text="file", data_dir=str(path))
  with pytest.raises(ValueError, match="batch_size must be at most"):
    embeddings.skip_gram(10**6, **_own(text))
