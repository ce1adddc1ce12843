"""Plans: cutting, splitting and joining, and servers on parts."""

import functools
import math

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import algorithms, base, sharding

pytestmark = pytest.mark.usefixtures("float64")

RATE = 0.1


# Plans.


def bytes_of(plan, tree):
  """Returns the bytes that each shard holds."""
  parts = sharding.split(plan, jax.tree.map(sharding.shape_of, tree))
  return tuple(
    sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(part))
    for part in parts
  )


ZEROS = np.zeros


@pytest.mark.parametrize(
  ("tree", "shards", "cuts"),
  [
    # 96 + 96 bytes, 64 to each: rows of 16, and of 8.
    ([ZEROS((6, 2)), ZEROS(12)], 3, ((0, 4, 6, 6), (0, 0, 4, 12))),
    # Bytes count, not elements.
    ([ZEROS(8, np.float16), ZEROS(2)], 2, ((0, 8, 8), (0, 0, 2))),
    # 100 * 80 bytes in rows, four times 8 that no cut may go through.
    (
      [ZEROS(2, np.float32), ZEROS((100, 10))] * 2,
      2,
      ((0, 2, 2), (0, 100, 100), (0, 0, 2), (0, 0, 100)),
    ),
    # A leaf of 64 KiB stays whole.
    (
      [ZEROS((1000, 1000), np.float32), ZEROS(2**14, np.float32)],
      2,
      ((0, 508, 1000), (0, 0, 2**14)),
    ),
    # Small leaves are split when there are too few others.
    ([ZEROS((1, 1000)), ZEROS(3)], 4, ((0, 1, 1, 1, 1), (0, 0, 1, 2, 3))),
    # A leaf without axes is one row.
    ([np.float64(0), np.float64(0)], 2, ((0, 1, 1), (0, 0, 1))),
    # One shard holds all of any tree.
    ([ZEROS((0, 2)), ZEROS((3, 0)), ZEROS(2)], 1, ((0, 0), (0, 3), (0, 2))),
    ((), 1, ()),
  ],
)
def test_cuts_by_hand(tree, shards, cuts):
  plan = sharding.make_plan(tree, shards)
  assert plan.cuts == cuts
  whole = sum(x.nbytes for x in jax.tree.leaves(tree))
  assert sum(bytes_of(plan, tree)) == whole


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
      sharding.make_plan(tree, shards)
    return
  plan = sharding.make_plan(tree, shards)
  sizes = bytes_of(plan, tree)
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
    sizes = bytes_of(sharding.make_plan(tree, shards), tree)
    assert max(sizes) < 1.001 * sum(sizes) / shards


def test_a_plan_is_a_function_of_shapes_and_dtypes():
  tree = base.Variables({"w": np.ones((9, 3)), "b": 1.0}, [np.zeros(3)])
  structs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), np.float64), tree
  )
  plan = sharding.make_plan(tree, 3)
  assert plan == sharding.make_plan(structs, 3)
  assert plan == sharding.make_plan(jax.tree.map(jnp.asarray, tree), 3)
  assert hash(plan) == hash(sharding.make_plan(tree, 3))


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, None])
def test_shards_must_be_a_positive_whole_number(shards):
  with pytest.raises(ValueError, match=f"positive whole number, not {shards}"):
    sharding.make_plan(np.zeros(3), shards)


# Split and join.


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 7), st.integers(0, 9))
def test_what_is_split_is_joined(shapes, shards, seed):
  tree = arrays(shapes, seed)
  rows = sum(x.shape[0] if x.ndim else 1 for x in tree.values() if x.size)
  plan = sharding.make_plan(tree, min(shards, max(rows, 1)))
  parts = sharding.split(plan, tree)
  assert len(parts) == plan.shards
  kit.same(sharding.join(plan, parts), tree)
  held = [sum(x.nbytes for x in jax.tree.leaves(part)) for part in parts]
  assert tuple(held) == bytes_of(plan, tree)


TREE = kit.VARIABLES
PLAN = sharding.make_plan(TREE, 3)


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
    kit.same(part, other)
  joined = sharding.join(PLAN, parts)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(joined))
  assert parts[0].weights["b"] is tree.weights["b"]
  kit.same(joined, tree)
  compiled = jax.jit(lambda x: sharding.join(PLAN, sharding.split(PLAN, x)))
  kit.same(compiled(tree), tree)


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
  with pytest.raises(ValueError, match="plan has 3 shards, not 2"):
    sharding.join(PLAN, parts[:2])
  with pytest.raises(ValueError, match=r"\(4,\), in part 1 of the plan \(0,\)"):
    sharding.join(PLAN, [parts[0], parts[0], parts[2]])
  with pytest.raises(ValueError, match="part 1 is a PyTreeDef"):
    sharding.join(PLAN, [parts[0], tuple(parts[1]), parts[2]])


# Servers on parts.


def train(made, states, split, rounds=6):
  """Two workers in turn on a server in parts. Returns states and reports."""
  send, receive = jax.jit(made.send), jax.jit(made.receive)
  numbers = [np.int32(w) for w in range(2)]
  tickets = [[send(s, n) for s in states] for n in numbers]
  reports = []
  for event, message in enumerate(kit.random_like(TREE, rounds)):
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
  kit.same(sharding.join(PLAN, parts), whole)
  kit.same(sharding.join(PLAN, sents), sent)
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
  kit.same(jax.tree.map(np.asarray, stacked), columns)


def test_nothing_is_trained_where_there_is_nothing():
  report = base.Report(*map(np.float32, (0, 0, 1, 0, 0)))
  assert sharding.combine([report], [0]).gap == 0


def test_each_report_needs_its_size():
  with pytest.raises(ValueError, match="0 reports and 0 sizes"):
    sharding.combine([], [])
  with pytest.raises(ValueError, match="0 reports and 2 sizes"):
    sharding.combine([], [1, 2])
