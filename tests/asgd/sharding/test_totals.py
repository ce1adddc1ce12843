"""Totals: numbers of the whole, asked for on parts."""

import functools
import math

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import base, server, sharding, transforms
from asgd.sharding import totals

pytestmark = pytest.mark.usefixtures("float64")

RATE = 0.1
TREE = kit.VARIABLES
PLAN = sharding.make_plan(TREE, 3)


def share(x):
  return x / sharding.total(jnp.sum(x))


def test_without_shards_a_total_is_what_it_is_of():
  x = object()
  assert sharding.total(x) is x
  np.testing.assert_array_equal(share(jnp.array([1.0, 3.0])), [0.25, 0.75])


def over_lanes(x):
  return jax.lax.psum(x, "shards")


def test_totals_may_be_a_collective():
  x = jnp.arange(1.0, 7).reshape(3, 2)
  compiled = jax.jit(jax.vmap(share, axis_name="shards"))
  alone = compiled(x)
  with totals._SUM_OVER_SHARDS(over_lanes):
    together = compiled(x)  # not what was compiled before
    again = compiled(x)
  np.testing.assert_array_equal(alone[0], [1 / 3, 2 / 3])
  np.testing.assert_array_equal(together, x / 21)
  np.testing.assert_array_equal(again, together)
  np.testing.assert_array_equal(compiled(x), alone)
  assert compiled._cache_size() == 2


def center(x, power):
  """Two totals, the second of what the first is needed for, and a tree."""
  sums = sharding.total({"x": jnp.sum(x), "n": jnp.sum(jnp.ones_like(x))})
  x = x - sums["x"] / sums["n"]
  return x / sharding.total(jnp.sum(x**power)), power


def test_a_staged_function_asks_for_one_total_after_the_other():
  step = sharding.staged(center)
  x = jnp.array([1.0, 2.0])
  first = step((), x, 2)
  assert isinstance(first, sharding.Ask)
  assert first.operand == {"x": 3, "n": 2}
  known = ({"x": 10.0, "n": 4.0},)
  assert step(known, x, 2).operand == 1.5**2 + 0.5**2
  result, power = step((*known, 5.0), x, 2).result
  np.testing.assert_allclose(result, [-0.3, -0.1])
  assert power == 2


@pytest.mark.parametrize("compiled", [False, True])
def test_shards_together_are_the_whole(compiled):
  step = sharding.staged(center)
  step = jax.jit(step) if compiled else step
  x = jnp.array([3.0, 1.0, 4.0, 1.0, 5.0])
  parts = [(x[:2], 4), (x[2:2], 4), (x[2:], 4)]
  for _ in range(2):
    results = sharding.run_staged(step, parts)
  whole = jnp.concatenate([result for result, _ in results])
  np.testing.assert_allclose(whole, center(x, 4)[0], rtol=1e-14)
  if compiled:  # one program for each number of totals and each shape
    assert step._cache_size() == 3 * 3


def test_sums_are_in_the_order_of_shards_and_their_own_dtype():
  values = np.float32([1e8, 1, -1e8])
  out = sharding.add_up([{"x": x} for x in values])
  assert out["x"] == 0 and out["x"].dtype == np.float32
  assert sharding.add_up([{"x": x} for x in values[[0, 2, 1]]])["x"] == 1


def test_a_rule_cannot_catch_its_total():
  def careful(x):
    try:
      return share(x)
    except Exception:
      return x

  out = sharding.staged(careful)((), jnp.ones(2))
  assert out == sharding.Ask(2)


INSIDE = {
  "jit": jax.jit(share),
  "cond": lambda x: jax.lax.cond(x[0] > 0, share, lambda x: x, x),
  "scan": lambda x: jax.lax.scan(lambda c, _: (share(c), 0), x, None, 2)[0],
  "vmap": lambda x: jax.vmap(share)(x[None]),
  "grad": jax.grad(lambda x: share(x)[0]),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_total_that_cannot_be_left_is_refused(name, compiled):
  x = jnp.ones(2)
  INSIDE[name](x)  # what this compiles is not used for shards
  step = sharding.staged(INSIDE[name])
  step = jax.jit(step) if compiled else step
  with pytest.raises(ValueError, match="called inside jit, cond.* outside"):
    step((), x)
  np.testing.assert_array_equal(share(x), [0.5, 0.5])  # all is as before


def test_totals_that_do_not_fit_are_refused():
  step = sharding.staged(share)
  with pytest.raises(ValueError, match="total 1 was asked for .* given as"):
    step((np.zeros(2),), jnp.ones(2))
  with pytest.raises(ValueError, match="2 totals .* asks for only 1"):
    step((1.0, 2.0), jnp.ones(2))


def test_shards_must_ask_for_the_same_totals():
  step = sharding.staged(lambda x: share(x) if x.size else x)
  with pytest.raises(ValueError, match=r"after 0 totals shards \[1\] are done"):
    sharding.run_staged(step, [(jnp.ones(2),), (jnp.ones(0),)])


# Clipping.


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_without_shards_is_optaxs(max_norm):
  message = jax.tree.map(jnp.asarray, kit.random_like(TREE, 1)[0].weights)
  ours = sharding.clip_by_global_norm(max_norm)
  theirs = optax.clip_by_global_norm(max_norm)
  for cast in (np.float64, jnp.bfloat16):
    updates = jax.tree.map(lambda x, cast=cast: x.astype(cast), message)
    outs = jax.jit(ours.update)(updates, ours.init(updates))
    kit.same(outs, jax.jit(theirs.update)(updates, theirs.init(updates)))


def test_clipping_on_shards_is_clipping():
  def build(clip):
    tx = optax.chain(clip(0.5), optax.sgd(RATE, momentum=0.9))
    algorithm = transforms.own_statistics(base.as_algorithm(tx))
    return server.make_server(algorithm)

  whole = build(optax.clip_by_global_norm)
  made = build(sharding.clip_by_global_norm)
  step = jax.jit(sharding.staged(made.receive))
  split = functools.partial(sharding.split, PLAN)
  state, states = whole.init(TREE), list(map(made.init, split(TREE)))
  for message in kit.random_like(TREE, 4):
    ticket = whole.send(state, np.int32(0))
    tickets = [made.send(s, np.int32(0)) for s in states]
    state, _ = whole.receive(state, ticket, message)
    args = list(zip(states, tickets, split(message), strict=True))
    states = [s for s, _ in sharding.run_staged(step, args)]
  joined = sharding.join(PLAN, [s.params for s in states])
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12),
    *(joined, state.params),
  )


def test_a_gate_hides_the_total_of_a_shard():
  algorithm = base.as_algorithm(sharding.clip_by_global_norm(1.0))
  made = server.make_server(algorithm, gate=server.max_staleness(3))
  state = made.init(TREE.weights)
  ticket = made.send(state, np.int32(0))
  step = sharding.staged(made.receive)
  with pytest.raises(ValueError, match="server that gates messages, or aver"):
    step((), state, ticket, TREE.weights)


@pytest.mark.parametrize(
  "max_norm", [0.0, -1.0, math.nan, math.inf, 10**400, None, "x", True]
)
def test_the_largest_norm_is_a_positive_number(max_norm):
  with pytest.raises(ValueError, match="max_norm must be a positive number"):
    sharding.clip_by_global_norm(max_norm)
