"""Shards: plans, splitting, totals, and who may run on parts of parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import algorithms, base, elementwise, server, sharding, transforms

RATE = 0.1


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def same(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(np.testing.assert_array_equal, left, right)
  for x, y in zip(*map(jax.tree.leaves, (left, right)), strict=True):
    assert np.asarray(x).dtype == np.asarray(y).dtype


# Plans.


def test_a_leaf_is_cut_where_the_bytes_are_even():
  plan = sharding.plan({"a": np.zeros((6, 2)), "b": np.zeros(12)}, 3)
  # 96 + 96 bytes, 64 to each: rows of 16, and of 8.
  assert plan.cuts == ((0, 4, 6, 6), (0, 0, 4, 12))
  assert plan.row_bytes == (16, 8)
  assert sharding.bytes_of(plan) == (64, 64, 64)


def test_bytes_count_not_elements():
  tree = [np.zeros(8, np.float16), np.zeros(2, np.float64)]
  assert sharding.plan(tree, 2).cuts == ((0, 8, 8), (0, 0, 2))


def test_small_leaves_stay_whole():
  # 100 * 80 bytes in rows, four times 8 that no cut may go through.
  tree = [np.zeros(2, np.float32), np.zeros((100, 10))] * 2
  plan = sharding.plan(tree, 2)
  assert plan.cuts == ((0, 2, 2), (0, 100, 100), (0, 0, 2), (0, 0, 100))
  big = [np.zeros((1000, 1000), np.float32), np.zeros(2**14, np.float32)]
  plan = sharding.plan(big, 2)
  assert plan.cuts[1] == (0, 0, 2**14)  # 64 KiB


def test_small_leaves_are_split_when_there_are_too_few_others():
  plan = sharding.plan([np.zeros((1, 1000)), np.zeros(3)], 4)
  assert plan.cuts == ((0, 1, 1, 1, 1), (0, 0, 1, 2, 3))


def test_a_leaf_without_axes_is_one_row():
  plan = sharding.plan({"a": np.float64(0), "b": np.float64(0)}, 2)
  assert plan.cuts == ((0, 1, 1), (0, 0, 1))


def test_one_shard_holds_all_of_any_tree():
  tree = {"a": np.zeros((0, 2)), "b": np.zeros((3, 0)), "c": np.zeros(2)}
  assert sharding.plan(tree, 1).cuts == ((0, 0), (0, 3), (0, 2))
  assert sharding.plan((), 1) == sharding.Plan(1, (), (), ())


SHAPES = st.lists(
  st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6
)


def arrays(shapes, seed=0):
  rng = np.random.default_rng(seed)
  kinds = (np.float32, np.float64, np.int8)
  return {
    str(i): rng.integers(0, 9, size=shape).astype(kinds[i % 3])
    for i, shape in enumerate(shapes)
  }


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 7))
def test_no_shard_holds_more_than_its_part_and_one_piece(shapes, shards):
  tree = arrays(shapes)
  rows = sum(x.shape[0] if x.ndim else 1 for x in tree.values() if x.size)
  if shards > max(rows, 1):
    message = f"shards must be at most {max(rows, 1)}, .* not {shards}"
    with pytest.raises(ValueError, match=message):
      sharding.plan(tree, shards)
    return
  plan = sharding.plan(tree, shards)
  sizes = sharding.bytes_of(plan)
  whole = sum(x.nbytes for x in tree.values())
  assert sum(sizes) == whole
  largest_row = max(
    [
      x.nbytes // (x.shape[0] if x.ndim else 1) for x in tree.values() if x.size
    ],
    default=0,
  )
  assert max(sizes) <= whole / shards + max(whole / (8 * shards), largest_row)
  assert whole == 0 or min(sizes) > 0


def test_large_models_are_balanced():
  shapes = [(50257, 768), (1024, 768)]
  shapes += [(768, 2304), (2304,), (768, 3072), (3072,), (3072, 768)] * 12
  tree = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
  for shards in (2, 5, 16):
    sizes = sharding.bytes_of(sharding.plan(tree, shards))
    assert max(sizes) < 1.001 * sum(sizes) / shards


def test_a_plan_is_a_function_of_shapes_and_dtypes():
  tree = base.Variables({"w": np.ones((9, 3)), "b": 1.0}, [np.zeros(3)])
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), np.float64), tree
  )
  plan = sharding.plan(tree, 3)
  assert plan == sharding.plan(structs, 3)
  assert plan == sharding.plan(jax.tree.map(jnp.asarray, tree), 3)
  assert hash(plan) == hash(sharding.plan(tree, 3))


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, None])
def test_shards_must_be_a_positive_whole_number(shards):
  with pytest.raises(ValueError, match=f"positive whole number, not {shards}"):
    sharding.plan(np.zeros(3), shards)


# Split and join.


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 7), st.integers(0, 9))
def test_what_is_split_is_joined(shapes, shards, seed):
  tree = arrays(shapes, seed)
  rows = sum(x.shape[0] if x.ndim else 1 for x in tree.values() if x.size)
  plan = sharding.plan(tree, min(shards, max(rows, 1)))
  parts = sharding.split(plan, tree)
  assert len(parts) == plan.shards
  same(sharding.join(plan, parts), tree)
  held = [sum(x.nbytes for x in jax.tree.leaves(part)) for part in parts]
  assert tuple(held) == sharding.bytes_of(plan)


TREE = base.Variables(
  {
    "w": np.arange(15.0).reshape(5, 3),
    "b": np.linspace(-1, 1, 4),
    "scale": np.float64(2),
  },
  {"mean": np.arange(3.0)},
)
PLAN = sharding.plan(TREE, 3)


def test_parts_show_all_leaves():
  # Bytes 32, 8, 120, 24 of b, scale, w, mean: 184, cut at 61.3 and 122.7.
  assert PLAN.cuts == ((0, 4, 4, 4), (0, 1, 1, 1), (0, 1, 3, 5), (0, 0, 0, 3))
  shapes = [
    jax.tree.map(np.shape, part, is_leaf=lambda x: hasattr(x, "shape"))
    for part in sharding.split(PLAN, TREE)
  ]
  rest = {"mean": (0,)}
  assert shapes == [
    base.Variables({"w": (1, 3), "b": (4,), "scale": (1,)}, rest),
    base.Variables({"w": (2, 3), "b": (0,), "scale": (0,)}, rest),
    base.Variables({"w": (2, 3), "b": (0,), "scale": (0,)}, {"mean": (3,)}),
  ]
  assert sharding.trained_sizes(PLAN, TREE) == (8, 6, 6)


def test_numpy_arrays_are_not_copied_unless_they_are_split():
  parts = sharding.split(PLAN, TREE)
  for part in parts:
    for whole, x in zip(*map(jax.tree.leaves, (TREE, part)), strict=True):
      assert not x.size or not whole.ndim or np.shares_memory(whole, x)
  joined = sharding.join(PLAN, parts)
  assert joined.weights["b"] is TREE.weights["b"]
  assert joined.stats["mean"] is TREE.stats["mean"]
  assert not np.shares_memory(joined.weights["w"], TREE.weights["w"])
  assert joined.weights["scale"].shape == ()


def test_jax_arrays_are_split_and_joined_as_numpy_arrays_are():
  tree = jax.tree.map(jnp.asarray, TREE)
  parts = sharding.split(PLAN, tree)
  for part, other in zip(parts, sharding.split(PLAN, TREE), strict=True):
    same(part, other)
  joined = sharding.join(PLAN, parts)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(joined))
  assert parts[0].weights["b"] is tree.weights["b"]
  same(joined, tree)
  compiled = jax.jit(lambda x: sharding.join(PLAN, sharding.split(PLAN, x)))
  same(compiled(tree), tree)


def test_shapes_are_split_as_arrays_are():
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, np.float16), TREE
  )
  for part, other in zip(
    *(sharding.split(PLAN, structs), sharding.split(PLAN, TREE)), strict=True
  ):
    for x, y in zip(*map(jax.tree.leaves, (part, other)), strict=True):
      assert (x.shape, x.dtype) == (y.shape, np.float16)


def test_other_trees_are_refused():
  message = r"leaf \.stats\['mean'\] has shape \(4,\), in the plan"
  with pytest.raises(ValueError, match=message):
    sharding.split(PLAN, TREE._replace(stats={"mean": np.zeros(4)}))
  with pytest.raises(ValueError, match="3 leaves, where the plan has 4"):
    sharding.part(PLAN, TREE.weights, 0)
  parts = sharding.split(PLAN, TREE)
  with pytest.raises(ValueError, match="plan is of 3 shards, not 2"):
    sharding.join(PLAN, parts[:2])
  with pytest.raises(ValueError, match=r"\(4,\), in part 1 of the plan \(0,\)"):
    sharding.join(PLAN, [parts[0], parts[0], parts[2]])
  with pytest.raises(ValueError, match="part 1 is a PyTreeDef"):
    sharding.join(PLAN, [parts[0], tuple(parts[1]), parts[2]])


# Servers on parts.


def messages(count):
  rng = np.random.default_rng(1)
  return [
    jax.tree.map(lambda x: rng.normal(size=np.shape(x)), TREE)
    for _ in range(count)
  ]


def train(made, states, split, rounds=6):
  """Two workers in turn on a server in parts. Returns states and reports."""
  send, receive = jax.jit(made.send), jax.jit(made.receive)
  numbers = [np.int32(w) for w in range(2)]
  tickets = [[send(s, n) for s in states] for n in numbers]
  reports = []
  for event, message in enumerate(messages(rounds)):
    worker = event % 2
    outs = [
      receive(state, ticket, part)
      for state, ticket, part in zip(
        *(states, tickets[worker], split(message)), strict=True
      )
    ]
    states = [state for state, _ in outs]
    reports.append([report for _, report in outs])
    tickets[worker] = [send(s, numbers[worker]) for s in states]
  sent = [ticket.params for ticket in tickets[0]]
  return [s.params for s in states], sent, reports


@pytest.mark.parametrize(
  ("name", "kwargs"),
  [
    ("asgd", dict(momentum=0.9, weight_decay=0.01)),
    ("dc_asgd_a", dict(momentum=0.9, scope="worker")),
    ("gap_aware", {}),
    ("dana_zero", {}),
  ],
)
def test_shards_in_step_are_the_server_bit_by_bit(name, kwargs):
  recipe = algorithms.build(name, RATE, 2, **kwargs)
  made = recipe.server()
  split = functools.partial(sharding.split, PLAN)
  (whole,), (sent,), reports = train(made, [made.init(TREE)], lambda x: [x])
  parts, sents, partial = train(made, list(map(made.init, split(TREE))), split)
  same(sharding.join(PLAN, parts), whole)
  same(sharding.join(PLAN, sents), sent)
  sizes = sharding.trained_sizes(PLAN, TREE)
  for (report,), these in zip(reports, partial, strict=True):
    combined = sharding.combine(these, sizes)
    for x, y in zip(report, combined, strict=True):
      np.testing.assert_allclose(y, x, rtol=1e-6)
      assert y.dtype == x.dtype
  assert int(report.staleness) == 1


def test_reports_combine_by_hand():
  def report(staleness, value, accepted):
    value = np.float32(value)
    return base.Report(
      *(np.int32(staleness), value, np.bool_(accepted), 2 * value, 3 * value)
    )

  # RMS 1 over 3 elements and 3 over 1: the root of (3 + 9) / 4.
  reports = [report(2, 1, True), report(5, 3, False), report(0, 7, True)]
  combined = sharding.combine(reports, (3, 1, 0))
  root = np.float32(math.sqrt(3))
  assert combined == (5, root, False, np.float32(2 * math.sqrt(3)), 3 * root)
  assert [x.dtype for x in combined] == ["i4", "f4", "?", "f4", "f4"]
  columns = jax.tree.map(lambda *xs: np.stack(xs), *reports)
  stacked = sharding.combine([columns, columns], (1, 2))
  same(jax.tree.map(np.asarray, stacked), columns)


def test_nothing_is_trained_where_there_is_nothing():
  report = base.Report(*map(np.float32, (0, 0, 1, 0, 0)))
  assert sharding.combine([report], [0]).gap == 0


def test_each_report_needs_its_size():
  with pytest.raises(ValueError, match="0 reports and 0 sizes"):
    sharding.combine([], [])
  with pytest.raises(ValueError, match="0 reports and 2 sizes"):
    sharding.combine([], [1, 2])


# Totals.


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
  with sharding.totals(over_lanes):
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
  with pytest.raises(ValueError, match="number 1 is asked for .* known as"):
    step((np.zeros(2),), jnp.ones(2))
  with pytest.raises(ValueError, match="2 totals .* asks for 1"):
    step((1.0, 2.0), jnp.ones(2))


def test_shards_must_ask_for_the_same_totals():
  step = sharding.staged(lambda x: share(x) if x.size else x)
  with pytest.raises(ValueError, match=r"after 0 totals shards \[1\] are done"):
    sharding.run_staged(step, [(jnp.ones(2),), (jnp.ones(0),)])


# Clipping.


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_without_shards_is_optaxs(max_norm):
  message = jax.tree.map(jnp.asarray, messages(1)[0].weights)
  ours = sharding.clip_by_global_norm(max_norm)
  theirs = optax.clip_by_global_norm(max_norm)
  for cast in (np.float64, jnp.bfloat16):
    updates = jax.tree.map(lambda x, cast=cast: x.astype(cast), message)
    outs = jax.jit(ours.update)(updates, ours.init(updates))
    same(outs, jax.jit(theirs.update)(updates, theirs.init(updates)))


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
  for message in messages(4):
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
  with pytest.raises(ValueError, match="a server that gates or averages"):
    step((), state, ticket, TREE.weights)


@pytest.mark.parametrize(
  "max_norm", [0.0, -1.0, math.nan, math.inf, 10**400, None, "x", True]
)
def test_the_largest_norm_is_a_positive_number(max_norm):
  with pytest.raises(ValueError, match="max_norm must be a positive number"):
    sharding.clip_by_global_norm(max_norm)


# Who may run on parts.

PARAMS = {
  "b": np.linspace(-1, 1, 4),
  "k": np.linspace(-2, 1, 36).reshape(3, 3, 2, 2),
  "s": np.float64(0.5),
  "w": np.linspace(-1, 2, 130 * 140).reshape(130, 140),  # is factored
}
check = elementwise.check


@pytest.mark.parametrize("name", sorted(algorithms.RECIPES))
def test_all_recipes_may_run_on_shards(name):
  recipe = algorithms.build(name, RATE, 3)
  check(recipe.algorithm, PARAMS)
  check(transforms.own_statistics(recipe.algorithm), TREE)
  for transform in (recipe.message, recipe.per_message):
    if transform:
      check(transform, PARAMS)


KEEP = {
  "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 3, 9)),
  "adagrad": optax.adagrad(RATE),
  "lion": optax.lion(RATE),
  "clip": optax.clip(0.1),
  "inject": optax.inject_hyperparams(optax.rmsprop)(
    optax.piecewise_constant_schedule(RATE, {2: 0.1})
  ),
  "every_3": optax.MultiSteps(optax.adam(RATE), 3).gradient_transformation(),
  "masked": optax.masked(
    optax.add_decayed_weights(RATE),
    lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
  ),
  "partition": optax.multi_transform(
    {"a": optax.adam(RATE), "b": optax.sgd(RATE)},
    {"b": "a", "k": "b", "s": "a", "w": "b"},
  ),
  "schedule_free": optax.contrib.schedule_free_sgd(RATE),
  "per_worker": transforms.per_worker(optax.adam(RATE), 3),
  "lookahead": transforms.lookahead(optax.adam(RATE), lambda w: jnp.arange(3)),
  # It counts what it finds anywhere, but nothing depends on that.
  "zero_nans": optax.zero_nans(),
  # A mean over other axes than the leading one.
  "centralize": optax.centralize(),
}


@pytest.mark.parametrize("name", KEEP)
def test_what_keeps_rows_apart_is_accepted(name):
  assert check(KEEP[name], PARAMS) is None
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), PARAMS
  )
  assert check(KEEP[name], structs) is None


MIX = {
  "global_norm": (optax.clip_by_global_norm(1.0), "reduce_sum"),
  "block_rms": (optax.clip_by_block_rms(1.0), "the number of rows"),
  "unit_norm": (optax.adaptive_grad_clip(0.1), "reduce_sum"),
  "lamb": (optax.lamb(RATE), "reduce_sum"),
  "lars": (optax.lars(RATE), "reduce_sum"),
  "novograd": (optax.novograd(RATE), "reduce_sum"),
  "normalize": (optax.contrib.normalize(), "reduce_sum"),
  "dog": (optax.contrib.dog(RATE), "reduce_sum"),
  "prodigy": (optax.contrib.prodigy(RATE), "dot_general"),
  "adafactor": (optax.adafactor(RATE), "program"),
  "muon": (optax.contrib.muon(RATE), "the number of rows"),
  "if_finite": (optax.apply_if_finite(optax.sgd(RATE), 3), "reduce_and"),
  "noise": (optax.add_noise(RATE, 0.5, key=0), "random_bits"),
  "flatten": (optax.flatten(optax.sgd(RATE)), "concatenate"),
  "per_worker": (transforms.per_worker(optax.lamb(RATE), 3), "reduce_sum"),
}


@pytest.mark.parametrize("name", MIX)
def test_what_reads_other_rows_is_refused(name):
  tx, why = MIX[name]
  message = f"not the same on shards: .*{why}.*; use one shard .*shards=1"
  with pytest.raises(ValueError, match=rf"{message}\)$"):
    check(tx, PARAMS)


def test_totals_count_only_where_they_are_carried():
  tx = sharding.clip_by_global_norm(RATE)
  check(tx, PARAMS, totals=True)
  with pytest.raises(ValueError, match="reduce_sum; use one shard"):
    check(tx, PARAMS)
  remedy = "or transforms made for shards, such as asgd.sharding.clip"
  with pytest.raises(ValueError, match=remedy):
    check(optax.clip_by_global_norm(RATE), PARAMS, totals=True)


def test_the_leaf_is_named():
  masks = {"b": False, "k": False, "s": False, "w": True}
  tx = optax.masked(optax.contrib.normalize(), masks)
  with pytest.raises(ValueError, match=r"the update of \['w'\] reads"):
    check(tx, PARAMS)


def test_what_is_sent_counts():
  def send(opt_state, params, *, worker):
    return jax.tree.map(lambda x: x - jnp.max(x), params)

  algorithm = base.as_algorithm(optax.sgd(RATE), send)
  with pytest.raises(ValueError, match=r"what is sent of \['b'\] .*reduce_max"):
    check(algorithm, PARAMS)


def test_what_is_remembered_counts_when_it_is_read():
  def build(read):
    def update(updates, state, params=None):
      out = jax.tree.map(lambda u: u * state, updates) if read else updates
      return out, state + jnp.sum(updates["b"])

    return optax.GradientTransformation(lambda params: jnp.zeros([]), update)

  check(build(read=False), PARAMS)
  with pytest.raises(ValueError, match="reduce_sum"):
    check(build(read=True), PARAMS)


def test_an_algorithms_own_errors_stay_its_own():
  with pytest.raises(TypeError, match="value"):
    check(optax.polyak_sgd(), PARAMS)


# Single operations, as rules for one leaf of 4 rows. The numbers say whether
# parts give the same as the whole, which the proof has to agree with.

x44 = np.linspace(-1, 2, 16).reshape(4, 4)
x44 += 0.1 * np.sin(50 * x44)
table = np.arange(12.0).reshape(3, 4)


def index():
  """1, but the program does not know."""
  return jnp.argmax(jnp.array([0, 2, 1]))


def rows_of(table, i):
  return jnp.asarray(table)[i]


KEEPING = {
  "reverse columns": lambda x: x[:, ::-1],
  "shift columns": lambda x: jnp.roll(x, 1, axis=1),
  "pad columns": lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :4],
  "sort columns": lambda x: jnp.sort(x, axis=1),
  "sum columns": lambda x: x - x.sum(1, keepdims=True),
  "first of columns": lambda x: x * jnp.argmax(x, axis=1)[:, None],
  "cumulate columns": lambda x: jnp.cumsum(x, axis=1),
  "softmax columns": lambda x: jax.nn.softmax(x, axis=1),
  "ravel": lambda x: (2 * jnp.ravel(x)).reshape(x.shape),
  "there and back": lambda x: jnp.tanh(x.T).T,
  "split columns": lambda x: sum(jnp.split(x, 2, 1))[:, jnp.array([0, 1] * 2)],
  "stack": lambda x: jnp.stack([x, 2 * x])[index()],
  "write a column": lambda x: x.at[:, index()].set(0.0),
  "add a column": lambda x: x.at[:, 1].add(x[:, 0]),
  "update columns": lambda x: jax.lax.dynamic_update_slice(
    *(x, x[:, :2], (0, index()))
  ),
  "a row of a table": lambda x: x * rows_of(table, index()),
  "columns of a table": lambda x: x * jnp.arange(4.0),
  "number the columns": lambda x: x * jax.lax.broadcasted_iota(int, x.shape, 1),
  "noise for all": lambda x: x * jax.random.normal(jax.random.key(0), (4,)),
  "branch": lambda x: jax.lax.cond(index() > 0, lambda x: 2 * x, jnp.tanh, x),
  "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c * x + i, x),
  "scan": lambda x: jax.lax.scan(lambda c, t: (c + t * x, c), x, table[0])[0],
  "scan columns": lambda x: (
    jax.lax.scan(lambda c, t: (c + t, c * t), x[:, 0], x.T)[1].T
  ),
  "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
  "tile": lambda x: jnp.tile(x, (1, 2))[:, 2:6],
  "unstack": lambda x: jnp.stack(jnp.unstack(x, axis=1)[::-1], axis=1),
  "relu": jax.nn.relu,  # custom_jvp
  "vjp": lambda x: jax.grad(lambda x: jnp.sum(jax.nn.gelu(x) * x[:, :1]))(x),
  "compiled": jax.jit(lambda x: jnp.where(x > 0, x, jnp.zeros_like(x))),
  "an unused sum": lambda x: jax.jit(lambda x: (2 * x, jnp.sum(x)))(x)[0],
}
MIXING = {
  "reverse rows": lambda x: x[::-1],
  "shift rows": lambda x: jnp.roll(x, 1, axis=0),
  "skip rows": lambda x: jnp.repeat(x[::2], 2, axis=0)[: len(x)],
  "pad rows": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
  "sort rows": lambda x: jnp.sort(-x, axis=0),
  "sum rows": lambda x: x - x.sum(0),
  "mean": lambda x: x - x.mean(),
  "max": lambda x: x / jnp.max(jnp.abs(x)),
  "cumulate rows": lambda x: jnp.cumsum(x, axis=0),
  "gram": lambda x: x @ (x.T @ x),
  "the first row": lambda x: x + x[:1],
  "a row": lambda x: x * x[index()],
  "gather a row": lambda x: x + x[jnp.array([0, 0])][:1],
  "write a row": lambda x: x.at[index()].set(0.0),
  "update rows": lambda x: jax.lax.dynamic_update_slice(
    *(x, jnp.ones((1, 4)), (index(), 0))
  ),
  "number the rows": lambda x: x + jnp.arange(len(x))[:, None],
  "rows of a table": lambda x: x * jnp.ones((9, 4)).at[1].set(2.0)[: len(x)],
  "size": lambda x: x / x.size,
  "count": lambda x: x / jnp.sum(jnp.ones_like(x)),
  "extents as numbers": lambda x: x**1.5 if len(x) > 2 else x,
  "noise for each": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
  "branch of a sum": lambda x: jax.lax.cond(
    x.sum() > 1, lambda x: 2 * x, jnp.sin, x
  ),
  "branches": lambda x: jax.lax.cond(
    index() > 0, lambda x: x * x.sum(), lambda x: x, x
  ),
  "loop of a sum": lambda x: jax.lax.while_loop(
    lambda c: jnp.sum(c * c) > 1, lambda c: c / 2, x
  ),
  "loop body": lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c * c.sum(), x),
  "scan rows": lambda x: jax.lax.scan(lambda c, t: (c + t, c), x[0], x)[1],
  "join rows": lambda x: x * jnp.sum(x.reshape(2, -1), 1)[0],
  "tile rows": lambda x: jnp.tile(x, (2, 1))[1 : len(x) + 1],
  "unstack rows": lambda x: jnp.stack([jnp.unstack(x)[0]] * len(x)),
  "callback": lambda x: jax.pure_callback(
    lambda x: np.sort(-x, axis=0), jax.ShapeDtypeStruct(x.shape, x.dtype), x
  ),
}


@functools.cache
def on_parts():
  """Which rules do the same on parts as on the whole, all in one program."""
  rules = {**KEEPING, **MIXING}
  compiled = jax.jit(lambda x: {name: rules[name](x) for name in rules})
  whole, first, rest = compiled(x44), compiled(x44[:1]), compiled(x44[1:])
  return {
    name: np.allclose([*first[name], *rest[name]], whole[name], rtol=1e-12)
    for name in rules
  }


@pytest.mark.parametrize("name", KEEPING)
def test_an_operation_that_keeps_rows_apart(name):
  assert on_parts()[name]
  rule = KEEPING[name]
  check(optax.stateless(lambda u, p: jax.tree.map(rule, u)), {"x": x44})


@pytest.mark.parametrize("name", MIXING)
def test_an_operation_that_mixes_rows(name):
  assert not on_parts()[name]
  rule = MIXING[name]
  with pytest.raises(ValueError, match="not the same on shards"):
    check(optax.stateless(lambda u, p: jax.tree.map(rule, u)), {"x": x44})


def test_leaves_of_one_shape_are_told_apart():
  def swap(updates, params):
    return {"a": updates["b"], "b": updates["a"]}

  with pytest.raises(ValueError, match=r"\['a'\] .* rows of another leaf"):
    check(optax.stateless(swap), {"a": x44, "b": x44})

  def add(updates, params):
    return {"a": updates["a"] + updates["b"], "b": updates["b"]}

  with pytest.raises(ValueError, match="add of two leaves"):
    check(optax.stateless(add), {"a": x44, "b": x44})


SHARED = {
  "sum": lambda x: x - sharding.total(jnp.sum(x)),
  "mean": lambda x: (
    x - sharding.total(x.sum()) / sharding.total(jnp.sum(jnp.ones_like(x)))
  ),
  "norm": lambda x: x / jnp.sqrt(sharding.total(jnp.vdot(x, x))),
  "columns": lambda x: x - 2 * sharding.total(-jnp.sum(x, 0) / 3),
  "tree": lambda x: x - sharding.total(sum([jnp.sum(x), jnp.sum(x**2)])),
}
NOT_SHARED = {
  "a norm": lambda x: x - sharding.total(jnp.linalg.norm(x)),
  "a maximum": lambda x: x - sharding.total(jnp.max(x)),
  "rows": lambda x: x - sharding.total(x),
  "a number": lambda x: x - sharding.total(jnp.float64(1.0)),
  "a sum and one": lambda x: x - sharding.total(jnp.sum(x) + 1),
  "a rounded sum": lambda x: x - sharding.total(jnp.round(jnp.sum(x))),
  "an integer": lambda x: x - sharding.total(x.sum().astype(int)),
  "a ratio": lambda x: x - sharding.total(1 / jnp.sum(x)),
}


@pytest.mark.parametrize("name", SHARED)
def test_totals_of_sums_over_rows_are_everybodys(name):
  rule = SHARED[name]
  check(
    optax.stateless(lambda u, p: jax.tree.map(rule, u)), {"x": x44}, totals=True
  )
  parts = [(x44[:1],), (x44[1:],)]
  results = sharding.run_staged(sharding.staged(rule), parts)
  np.testing.assert_allclose(jnp.concatenate(results), rule(x44), rtol=1e-12)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_totals_of_anything_else_are_refused(name):
  rule = NOT_SHARED[name]
  with pytest.raises(ValueError, match="not the same on shards"):
    check(optax.stateless(lambda u, p: jax.tree.map(rule, u)), x44, totals=True)


def test_arrays_of_the_rules_own_are_refused_if_they_have_rows():
  mask = np.linspace(0, 1, 16).reshape(4, 4)
  rule = optax.stateless(lambda u, p: u * mask)
  with pytest.raises(ValueError, match="cannot be traced at another number"):
    check(rule, x44)
  ones = optax.stateless(lambda u, p: u * np.ones(u.shape))
  check(ones, x44)
  rows = optax.stateless(lambda u, p: u * np.arange(len(u))[:, None])
  with pytest.raises(ValueError, match="through the number of rows"):
    check(rows, x44)
