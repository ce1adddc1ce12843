"""Matrix factorisation: its loss on a batch's rows is that on all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asgd.problems import factorisation

SMALL = {"users": 30, "items": 20, "ratings": 300}


def problem_of(**options):
  return factorisation.matrix_factorisation(16, generate=SMALL, **options)


def test_the_loss_on_the_rows_of_a_batch_is_the_loss():
  problem = problem_of(rank=3, l2=0.1)
  params = problem.init(jax.random.key(0))
  batch, key = problem.batches(0, 1)(0, 3), jax.random.key(1)
  grad = jax.jit(jax.value_and_grad(lambda p, b: problem.loss(p, b, key)[0]))
  whole, gradient = grad(params, batch)
  keys = problem.keyed.keys(batch)
  # Rows after those that are needed change nothing.
  rows = {k: jnp.pad(x[keys[k]], [(0, 4), (0, 0)]) for k, x in params.items()}
  part, of_rows = grad(rows, problem.keyed.localise(batch, keys))
  np.testing.assert_allclose(part, whole, rtol=1e-6)
  for name, each in keys.items():
    count = len(each)
    np.testing.assert_allclose(
      of_rows[name][:count], gradient[name][each], rtol=1e-5, atol=1e-7
    )
    assert not of_rows[name][count:].any()
    rest = np.delete(gradient[name], each, 0)
    assert not rest.any()


def test_zeros_predict_the_mean_and_explain_nothing():
  problem = problem_of(rank=3)
  zero = jax.tree.map(jnp.zeros_like, problem.init(jax.random.key(0)))
  nothing = problem.evaluate(zero)
  assert nothing.measure == pytest.approx(0, abs=1e-6)


def test_options_of_other_ratings_are_refused(tmp_path):
  with pytest.raises(ValueError, match="have a test part: drop test_ratings"):
    problem_of(test_ratings="x")
  with pytest.raises(ValueError, match="option of ratings='generated' only"):
    problem_of(ratings=str(tmp_path / "file"))
  with pytest.raises(ValueError, match="option of ratings='generated' only"):
    problem_of(ratings="movielens")
  with pytest.raises(ValueError, match="'generated' takes no argument 'x'"):
    factorisation.matrix_factorisation(16, generate={"x": 3})
  with pytest.raises(ValueError, match="users must be a positive whole"):
    factorisation.matrix_factorisation(16, generate={"users": [3]})


def test_a_file_that_was_edited_is_read_again(tmp_path):
  path = tmp_path / "ratings.csv"

  def probe_of(factor):
    rows = (f"{i % 20},{i % 7},{i * factor % 5}" for i in range(100))
    path.write_text("\n".join(rows))
    return factorisation.matrix_factorisation(4, ratings=str(path)).probe[1]

  assert (probe_of(1) != probe_of(3)).any()
