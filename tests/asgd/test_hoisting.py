"""Functions whose numbers are arguments of their compiled programs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asgd
from asgd import hoisting, orders, rates
from asgd.simulator.chunk import make_chunk
from asgd.simulator.simulation import run_whole
from asgd.simulator.stepwise import make_host


def scaled_sum(number):
  def function(tree, x):
    return jax.tree.map(lambda y: hoisting.constant(number) * y + x, tree), x

  return function


ARGUMENTS = {"w": jnp.arange(3.0), "b": jnp.ones(2, jnp.bfloat16)}, 2.0


def test_a_hoisted_function_is_the_compiled_function():
  function = scaled_sum(0.3)
  chex.assert_trees_all_equal(
    hoisting.jit(function)(*ARGUMENTS), jax.jit(function)(*ARGUMENTS)
  )


def test_functions_that_differ_in_a_number_are_one_program():
  def program(number, compiler=hoisting.jit):
    function = compiler(scaled_sum(number))
    return function.lower(*ARGUMENTS).as_text()

  assert program(0.3) == program(0.7)
  assert program(0.3, jax.jit) != program(0.7, jax.jit)


def test_arguments_of_another_shape_have_the_same_number():
  function = scaled_sum(0.5)
  compiled = hoisting.jit(function)
  for shape in [(3,), (2, 2), (3,)]:
    arguments = jnp.ones(shape), 1.0
    chex.assert_trees_all_equal(compiled(*arguments), function(*arguments))


def test_a_number_in_a_branch_that_the_first_call_lacks_is_kept():
  def function(x):
    return x * hoisting.constant(2.0 if x.ndim else 5.0)

  compiled = hoisting.jit(function)
  assert compiled(jnp.ones(1)) == 2
  assert compiled(jnp.ones(())) == 5


def test_a_donated_argument_is_overwritten():
  donated = jnp.ones(4)
  compiled = hoisting.jit(
    lambda x: hoisting.constant(2.0) * x, donate_argnums=(0,)
  )
  chex.assert_trees_all_equal(compiled(donated), np.full(4, 2, np.float32))
  assert donated.is_deleted()


CACHE_MISSES = []  # events of JAX's cache of compiled programs


def _listen(event, **_):
  if event == "/jax/compilation_cache/cache_misses":
    CACHE_MISSES.append(event)


jax.monitoring.register_event_listener(_listen)


@pytest.mark.parametrize("make_engine", [make_host, make_chunk])
def test_recipes_whose_warm_ups_start_elsewhere_share_programs(make_engine):
  worker = asgd.gradient_worker(lambda w, batch: ((w - batch) ** 2).sum())
  trace = orders.fixed_delay(delay=1, messages=8)

  def run(start):
    rate = rates.warmup_steps(0.5, warmup=3, start=start)
    server = asgd.nag_asgd(rate, workers=2).server()
    simulation, _ = run_whole(
      *(make_engine(server, worker), jnp.ones(2), 2, trace),
      batch=lambda worker, job: np.full(2, job, np.float32),
      root=jax.random.key(0),
    )
    return simulation.server.params

  # Numbers that no earlier run of the tests had.
  starts = np.random.default_rng().uniform(0.1, 0.2, 2).tolist()
  first = run(starts[0])
  CACHE_MISSES.clear()
  second = run(starts[1])
  assert not CACHE_MISSES
  assert not np.array_equal(first, second)
