"""The line search is optax's, one step at a time."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd.sandblaster import line_search
from asgd.sandblaster.line_search import Tried, advise

FUNCTIONS = {
  "near": lambda a: (a - 1.2) ** 2,
  "far": lambda a: (a - 1000.0) ** 2,
  "close": lambda a: (a - 1e-3) ** 2 * 100,
  "wavy": lambda a: jnp.sin(3 * a) - 0.5 * a + 0.1 * a**2,
  "barrier": lambda a: -jnp.log(0.3 - a) - 5 * a,
  "quartic": lambda a: (a - 2) ** 4,
}


@jax.jit
def evaluate(index, a):
  """Returns the value and the slope of a function, by its index."""
  branches = [jax.value_and_grad(function) for function in FUNCTIONS.values()]
  return jax.lax.switch(index, branches, a)


@jax.jit
def optax_search(index):
  """(step, steps that were tried) of optax, from 0."""
  search = optax.scale_by_zoom_linesearch(20, initial_guess_strategy="one")
  value, slope = evaluate(index, 0.0)
  step, state = search.update(
    *(jnp.ones(()), search.init(jnp.zeros(())), jnp.zeros(())),
    value=value,
    grad=slope,
    value_fn=lambda a: evaluate(index, a)[0],
  )
  return step, state.info.num_linesearch_steps


def steps_of(index):
  """The steps that are asked for, and the last advice."""
  value, slope = map(float, evaluate(index, 0.0))
  tried = []
  while True:
    advice = advise(value, slope, tried, line_search.options_of({}))
    if advice.done:
      return len(tried), advice
    tried.append(Tried(advice.step, *map(float, evaluate(index, advice.step))))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_step_is_that_of_optax(name):
  index = list(FUNCTIONS).index(name)
  with jax.enable_x64(True):
    value, slope = evaluate(index, 0.0)
    step, count = optax_search(index)
    tried, advice = steps_of(index)
    assert advice.found
    np.testing.assert_allclose(advice.step, step, rtol=1e-12)
    assert tried == count
    # The strong Wolfe conditions, (3.7) of Nocedal and Wright.
    reached, its_slope = evaluate(index, advice.step)
    assert reached <= value + 1e-4 * advice.step * slope
    assert abs(its_slope) <= 0.9 * abs(slope)


def test_no_step_is_found_where_none_decreases():
  value, tried = 1.0, []
  advice = advise(value, -1.0)
  while not advice.done:
    tried.append(Tried(advice.step, value + advice.step, 1.0))
    advice = advise(value, -1.0, tried)
  assert not advice.found


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_steps_out_of_the_domain_are_no_steps_to_take(bad):
  advice = advise(1.0, -1.0, [Tried(1.0, bad, np.nan)])
  assert not advice.done
  assert 0 < advice.step < 1
  tried, advice = [], advise(1.0, -1.0)
  while not advice.done:
    tried.append(Tried(advice.step, bad, np.nan))
    advice = advise(1.0, -1.0, tried)
  assert not advice.found


test_options_that_are_none = kit.refuses(
  [
    ("zoom", "line_search must be a dict of arguments of"),
    ({"verbose": True}, "line_search.verbose cannot be set"),
    ({"c1": 1}, "line_search 'zoom' takes no argument 'c1'"),
    ({"curv_rtol": -1}, r"curv_rtol must be in \[0, 1\), not -1"),
    ({"slope_rtol": 1.0}, r"slope_rtol must be in \[0, 1\), not 1.0"),
    ({"increase_factor": 1}, "^line_search.increase_factor must be more"),
    ({"increase_factor": None}, "increase_factor must be 0 or more, not None"),
    ({"max_learning_rate": 0}, "max_learning_rate must be a positive .*not 0"),
    ({"max_linesearch_steps": 0}, "must be a positive whole number, not 0"),
  ],
  lambda given: line_search.options_of(given),
)
