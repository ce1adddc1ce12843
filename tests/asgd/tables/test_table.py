"""Tables, their parts, and refused arguments."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import tables
from asgd.tables import functions

ADAGRAD = functions.by_row(optax.adagrad(0.1))  # compiled once


def dense(shards=1, function=None, rows=6):
  return tables.Table(np.zeros((rows, 2)), function, shards=shards)


@pytest.mark.parametrize(
  ("keys", "wrong"),
  [
    ([1, 6], "table: key 6 is out of range: the table has the keys 0 to 5"),
    ([-1], "key -1 is out of range"),
    ([3, 1, 3], "key 3 occurs twice: add up the values of equal keys first"),
    ([0.5], "keys must be a list of integers"),
    (slice(0, 6, 2), "a range of keys needs an end and no step"),
    (slice("a", 3), "the start of a range must be a whole number"),
    (slice(0, 10**15), "key 999999999999999 is out of range"),
    (range(10**30), "is out of range"),
  ],
)
def test_bad_keys_are_one_line_and_change_nothing(keys, wrong):
  table = dense(2)
  with pytest.raises(ValueError, match=wrong):
    table.pull(keys)
  if isinstance(keys, list):
    with pytest.raises(ValueError, match=wrong):
      table.push(keys, np.ones((len(keys), 2)))
  assert not table.whole().any()


def test_a_nan_in_one_row_is_refused_and_nothing_is_applied():
  table, values = dense(3), np.ones((3, 2))
  values[1, 1] = np.nan
  with pytest.raises(ValueError, match=r"key 4 is not finite \(1 of 3 rows\)"):
    table.push([0, 4, 5], values)
  assert not table.whole().any()


@pytest.mark.parametrize(
  ("dtype", "values", "wrong"),
  [
    (np.float32, np.full((2, 2), 1e300), "key 1 is not finite"),
    (np.float32, np.ones((2, 2), complex), "values of complex128 do not fit"),
    (np.float32, [["a", "b"]] * 2, "do not fit into a table of float32"),
    (np.int32, np.full((2, 2), 0.5), "values of float64 do not fit"),
    (np.int32, np.full((2, 2), 2**40), "do not fit into a table of int32"),
  ],
)
def test_values_that_a_table_cannot_hold_are_refused(dtype, values, wrong):
  table = tables.Table(np.zeros((6, 2), dtype))
  with pytest.raises(ValueError, match=wrong):
    table.push([1, 2], values)
  assert not table.whole().any()
  table.push([1, 2], [[1, 2], [3, 4]])
  table.push([], np.zeros((0, 2)))
  assert table.pull([2, 1]).tolist() == [[3, 4], [1, 2]]


def test_nothing_may_be_pushed_to_a_function():
  table = dense(function=ADAGRAD)
  table.push([], np.zeros((0, 2)))
  assert not table.whole().any()


test_what_makes_no_table_is_refused = kit.refuses(
  [
    (dict(function=optax.sgd(0.1)), "function must be a RowFunction"),
    (dict(load=[1.0]), "load must be a number for each of 6 keys"),
    (dict(start=-1), "start must be a whole number, 0 or more, not -1"),
  ],
  lambda options: tables.Table(np.zeros((6, 2)), **options),
)


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("shards", [1, 3])
def test_pull_gives_rows_in_the_order_of_keys(xp, shards):
  table = tables.Table(xp.arange(12.0).reshape(6, 2), shards=shards)
  table.push([5, 0], xp.array([[1.0, 1.0], [2.0, 2.0]]))
  assert table.pull([4, 0, 5]).tolist() == [[8, 9], [2, 3], [11, 12]]
  assert isinstance(table.pull([0]), type(xp.zeros(1)))


def test_a_sparse_table_makes_rows_as_they_are_asked_for():
  table = tables.Table.sparse(
    (1,), np.float64, init=lambda keys: keys[:, None] / 10.0,
    ranges=tables.Ranges((0, 100, 10**18)),
  )
  assert table.pull([7, 10**17, 3]).ravel().tolist() == [0.7, 1e16, 0.3]
  table.push([3, 200], np.ones((2, 1)))
  assert table.pull([200, 3]).ravel().tolist() == [21.0, 1.3]
  assert [len(rows) for rows in table.shard_rows] == [2, 2]


def test_adagrad_by_row_is_adagrad_on_the_rows_that_are_pushed():
  tx, start = optax.adagrad(0.5), np.linspace(-1, 1, 12).reshape(6, 2)
  start = start.astype(np.float32)
  table = tables.Table(start, functions.by_row(tx), shards=2)
  rng = np.random.default_rng(0)
  alone = {key: (jnp.asarray(start[key]), tx.init(start[key])) for key in
    range(6)}
  for _ in range(4):
    keys = np.sort(rng.choice(6, 3, replace=False))
    values = rng.normal(size=(3, 2)).astype(np.float32)
    table.push(keys, values)
    for key, value in zip(keys.tolist(), values, strict=True):
      row, state = alone[key]
      change, state = tx.update(jnp.asarray(value), state, row)
      alone[key] = row + change, state
  wanted = np.stack([alone[key][0] for key in range(6)])
  np.testing.assert_allclose(table.whole(), wanted, rtol=1e-6)


def test_ftrl_keeps_zeros_where_l1_is_above_the_gradient():
  tx = functions.ftrl_proximal(0.5, beta=1.0, l1=2.0)
  table = tables.Table(np.zeros((2, 1), np.float32), functions.by_row(tx))
  for _ in range(3):
    table.push([0, 1], np.array([[0.5], [-1.0]], np.float32))
  # z of the second is -3, n is 3: w = (3 - 2) / ((1 + sqrt(3)) / 0.5).
  assert table.whole()[0] == 0
  np.testing.assert_allclose(table.whole()[1], 0.5 / (1 + 3**0.5), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
  st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 6)
)
def test_ranges_have_the_same_load_up_to_a_key(load, shards):
  shards = min(shards, len(load))
  cuts = tables.by_load(load, shards).cuts
  assert cuts[0] == 0
  assert cuts[-1] == len(load)
  assert all(np.diff(cuts) >= 1)
  weights = load if sum(load) else [1.0] * len(load)
  for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
    if stop - start > 1:
      most = sum(weights) / shards + 2 * max(weights) + 1e-9
      assert sum(weights[start:stop]) <= most


@settings(max_examples=20, deadline=None)
@given(
  st.lists(
    st.lists(st.integers(0, 19), min_size=1, unique=True), max_size=8
  ),
  st.integers(1, 5),
)
def test_ranges_move_with_rows_and_states_and_lose_nothing(pushes, shards):
  one, many = (
    tables.Table(np.ones((20, 1), np.float32), ADAGRAD, shards=n)
    for n in (1, shards)
  )
  for keys in pushes:
    for table in (one, many):
      table.push(keys, np.float32(keys)[:, None])
    for move in many.rebalance():
      assert many.ranges.shard_of(np.array([move.start])) == move.target
    assert many.whole().tolist() == one.whole().tolist()
    assert many.pull(range(20)).tolist() == one.whole().tolist()


def test_a_hot_range_is_divided():
  table = dense(2, rows=100)

  def loads():
    return [rows.columns["load"].sum() for rows in table.shard_rows]

  for _ in range(10):
    table.pull(range(10))
  before = loads()
  table.rebalance()
  for _ in range(10):
    table.pull(range(10))
  assert (before, loads()) == ([100, 0], [50, 50])


def test_range_clocks_split_where_they_are_told_of_a_part():
  clocks = tables.RangeClocks([0, 1, 2], 0, 1000)
  for worker in (0, 1, 2):
    clocks.advance(worker, 3)
  clocks.advance(0, 5, 100, 200)
  clocks.advance(1, 4)
  assert (len(clocks), clocks.slowest) == (3, 3)
  clocks.leave(2)
  assert clocks.least([99, 100, 199, 200]).tolist() == [3, 4, 4, 3]
  clocks.advance(0, 1)  # late: nothing goes back
  assert clocks.slowest == 3
  again = tables.RangeClocks.unpack(clocks.pack())
  assert again.least([99, 100]).tolist() == [3, 4]


test_a_filter_that_would_send_nothing_is_refused = kit.refuses(
  [
    (dict(name="random_skip", probability=1), "must be in .0, 1., not 1"),
    (
      dict(name="significantly_modified", threshold=float("inf")),
      "threshold must be 0 or more, not inf",
    ),
    (dict(name="kkt", l1=1.0, slack=1.0), "slack 1.0 must be below l1"),
    (dict(name="largest_change", nbytes=0), "nbytes must be a positive whole"),
    (dict(name="ktt", l1=1.0), "unknown filter 'ktt'; did you mean 'kkt'"),
    (3, "filters must be a list of names and of dicts of a name and options"),
  ],
  lambda given: tables.filters.named(given),
)


test_settings_of_the_wrong_kind_are_one_line = kit.refuses(
  [
    (dict(filters=[3]), "filters must be a list of names and of dicts"),
    (dict(filters=None), "filters must be a list of names and of dicts"),
    (dict(clock_every=4, push_every=3), "not a whole number of messages of 3"),
    (
      dict(push_every=1, consistency="bulk_synchronous"),
      "push_every 1 is for a server that applies updates as they arrive",
    ),
    (dict(ftrl=3), "ftrl must be a dict of options"),
    (dict(ftrl=dict(l1=-1)), "^ftrl.l1 must be 0 or more, not -1"),
    (dict(ftrl=dict(x=1)), "function 'ftrl' takes no argument 'x'"),
    (dict(proximal=dict(l1=-1)), "^proximal.l1 must be 0 or more, not -1"),
    (dict(optimizer=3), "optimizer must be a name, a dict of name and"),
    (dict(learning_rate=np.nan), "learning_rate must be a positive finite"),
  ],
  lambda options: tables.settings.table(
    **{"learning_rate": 0.1, "workers": 2, **options}
  ),
)


def test_a_job_without_rows_writes_none():
  direct = tables.settings.table(0.1, 2)._replace(direct=True)
  none = {"w": np.zeros(0, np.int64)}
  written = direct.written(0, none, {"w": np.zeros((0, 2))})
  assert [x.size for x in written["w"]] == [0, 0]


def test_a_column_that_rows_have_not_is_refused():
  rows = np.zeros((1, 2))
  with pytest.raises(ValueError, match="column 5 of the filter kkt is out of"):
    tables.filters.kkt(1.0, column=5)(rows, rows, None)


def test_packed_values_come_back_and_are_fewer_bytes():
  codec = tables.ValueCodec("int8")
  values = np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32)
  packet = codec.pack(values, jax.random.key(0))
  back = codec.unpack(packet, 100, (16,), np.float32)
  assert len(packet) < values.nbytes / 3
  np.testing.assert_allclose(back, values, atol=0.05)
  with pytest.raises(ValueError, match="keeps the part of values that it"):
    tables.ValueCodec("dgc", density=0.1)
