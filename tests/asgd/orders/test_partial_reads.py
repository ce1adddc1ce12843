"""Partial reads: orders in which a worker reads block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import asgd
from asgd import base, orders, simulator
from asgd.orders import partial_reads

ROOT = jax.random.key(0)


def run(traces, recipe=None, params=(8.0, 8.0)):
  """Returns the run of two workers on w^2 / 2, whose gradient is w."""
  recipe = recipe or asgd.asgd(0.5, workers=2)
  worker = asgd.gradient_worker(lambda w, batch: (w * w).sum() / 2)
  return simulator.run_sharded(
    *(recipe.server(), worker, jnp.array(params), traces),
    workers=2, batch=lambda worker, job: np.zeros(1), root=ROOT,
  )


def test_two_workers_and_three_messages_by_hand():
  """Worker 0 takes 1, worker 1 takes 2.5, and reads its second block at 1.25.

    0     worker 0 and worker 1 read 8 as block 0
    0.5   worker 0 reads 8 as block 1
    1     worker 0's message: w = (4, 4)
    1.25  worker 1 reads 4 as block 1
    2     worker 0's message, of (4, 4): w = (2, 2)
    2.5   worker 1's message, of (8, 4): w = (-2, 0)
  """
  clock = orders.durations.constant(slowdown=[1, 2.5])
  trace = orders.asynchronous(clock, workers=2, messages=3)
  traces = partial_reads.by_block(trace, blocks=2)
  result = run(traces)
  # Each block is a shard, with a Delay of its own.
  assert [s.params.item() for s in result.states] == [-2.0, 0.0]
  staleness = [records.staleness.tolist() for records in result.records]
  assert staleness == [[0, 0, 2], [0, 0, 1]]
  assert orders.shards.spreads(traces).tolist() == [0, 0, 1]
  # The gap of worker 1's message: 8 - 2 in block 0, and 4 - 2 in block 1.
  assert [records.gap[2] for records in result.records] == [6.0, 2.0]


ORDERS = {
  "asynchronous": dict(name="asynchronous"),
  "ahead": dict(name="stale_synchronous", bound=2, depth=2),
  "kept": dict(name="asynchronous", fetch_every=3, warm_start=4),
  "kept ahead": dict(name="asynchronous", fetch_every=2, depth=2),
}


@pytest.mark.parametrize("label", ORDERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_all_blocks_have_the_messages_of_the_trace_in_its_order(label, share):
  clock = orders.durations.heterogeneous(0.6, seed=3)
  trace = orders.build(
    durations=clock, workers=4, messages=40, **ORDERS[label]
  )
  first, *later = partial_reads.by_block(trace, blocks=3, share=share)
  assert orders.dump(first) == orders.dump(trace)
  (one,) = partial_reads.by_block(trace, blocks=1, share=share)
  assert orders.dump(one) == orders.dump(trace)

  def received(of):
    rows = orders.trace.events(of)
    return [row for row in rows if row.action == base.RECEIVE]

  stale = [orders.staleness(trace).sum()]
  for block in later:
    orders.check(block, depth=2)
    assert received(block) == received(trace)
    stale.append(orders.staleness(block).sum())
    assert share or orders.dump(block) == orders.dump(trace)
  # A block that is read later is less stale.
  assert (np.diff(stale) <= 0).all()
  assert not share or stale[2] < stale[0]


def test_momentum_is_kept_for_each_block():
  """Blocks that are read at once train as one server does."""
  trace = orders.asynchronous(
    orders.durations.constant(slowdown=[1, 3]), workers=2, messages=9
  )
  recipe = asgd.nag_asgd(0.05, workers=2)
  whole = run(partial_reads.by_block(trace, blocks=2, share=0.0), recipe)
  parts = run(partial_reads.by_block(trace, blocks=2, share=1.0), recipe)
  values = [[s.params.item() for s in x.states] for x in (whole, parts)]
  assert values[0][0] == values[0][1]
  assert values[1][0] != values[1][1]


@pytest.mark.parametrize(
  ("options", "wrong"),
  [
    (dict(blocks=0), "blocks must be a positive whole number"),
    (dict(blocks=2, share=1.5), "share must be from 0 to 1, not 1.5"),
  ],
)
def test_values_out_of_range_are_refused(options, wrong):
  trace = orders.fixed_delay(delay=1, messages=2)
  with pytest.raises(ValueError, match=wrong):
    partial_reads.by_block(trace, **options)


def test_a_trace_that_rolls_back_is_refused():
  trace = orders.fixed_delay(delay=0, messages=2)
  action = trace.action.copy()
  action[-1] = base.ROLLBACK
  with pytest.raises(ValueError, match="rolls back names its rows"):
    partial_reads.by_block(trace._replace(action=action), blocks=2)
