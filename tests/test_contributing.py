"""What CONTRIBUTING.md adds can be added as it is written."""

import doctest
import re
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import test_docstrings

from asgd import experiment
from asgd.algorithms import Recipe
from asgd.pipeline import validate

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def module(word):
  (code,) = (text for text in BLOCKS if word in text)
  made = types.ModuleType(word)
  exec(code, vars(made))
  return made


def test_every_block_is_tested_here():
  assert len(BLOCKS) == 4


def test_a_transform():
  made = module("SignsState")
  assert doctest.testmod(made).failed == 0
  # What the messages leave out is not lost: in time they add up to the same.
  tx, state, total = made.signs(), None, 0.0
  gradient = jnp.array([0.5, -2.0, 1.0])
  state = tx.init(gradient)
  for _ in range(10):
    sent, state = tx.update(gradient, state)
    total = total + sent
  np.testing.assert_allclose(total + state.error, 10 * gradient, rtol=1e-5)


def test_an_algorithm():
  made = module("clipped_asgd")
  assert list(test_docstrings.missing(made.clipped_asgd, equation=True)) == [
    "an import of clipped_asgd"  # from where it is put
  ]
  assert doctest.testmod(made).failed == 0
  recipe = made.clipped_asgd(0.1, 4, limit=0.5)
  assert isinstance(recipe, Recipe)
  server = recipe.server()
  state = server.init(jnp.zeros(2))
  ticket = server.send(state, 0)
  state, _ = server.receive(state, ticket, jnp.array([3.0, -0.1]))
  np.testing.assert_allclose(state.params, [-0.05, 0.01], rtol=1e-6)
  with pytest.raises(ValueError, match="limit must be a positive"):
    module("clipped_asgd").clipped_asgd(0.1, 4, limit=0)


def test_a_schedule():
  table = module("one_at_a_time").one_at_a_time(3, 2)
  validate.validate(table)
  assert table.flush


def test_an_engine():
  engines = {**experiment.ENGINES, "hasty": module("HastyEngine").HASTY}
  built = experiment.build(
    {"engine": "hasty", "runs": {"mine": {"recipe": "asgd"}}}, engines=engines
  )
  assert {run.engine for run in built.runs.values()} == {"hasty"}


def test_the_tables_that_it_names_are_there():
  for name, path in re.findall(r"`(\w+)`[^`]*?of\s+`([\w/]+\.py)`", TEXT):
    assert re.search(rf"^{name}\b", (ROOT / path).read_text(), re.M), path


def test_the_files_that_it_names_are_there():
  names = set(re.findall(r"`((?:asgd|pipeline|launch|tests)/[\w/.]*)`", TEXT))
  assert len(names) > 30
  missing = sorted(name for name in names if not (ROOT / name).exists())
  assert not missing
