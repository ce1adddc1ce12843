"""Tables over a network: times by hand, the same bits without limits, and the
guarantees of consistency models."""

import numpy as np
import pytest
from table_kit import (
  ROWS,
  WORKERS,
  finished,
  least_squares,
  resumed,
  run_of,
  same,
)

from asgd import base, orders, tables
from asgd.orders import trace as trace_lib
from asgd.orders.network import Network

WIRE = Network(latency=0.25, up=640.0, down=320.0, port=960.0, service=0.0625)
MODELS = (
  dict(consistency="bulk_synchronous"),
  dict(consistency="ssp", bound=2),
  dict(consistency="essp", bound=2, shards=2, rebalance_every=1),
  dict(consistency="managed", bound=2, budget=3),
  dict(consistency="value_bounded", threshold=0.5),
  dict(consistency="asynchronous"),
)


def ident(model):
  return model["consistency"]


def one_worker(network, jobs=2, **options):
  """Runs one worker on two rows of eight bytes; a job takes 1 and needs
  both."""
  run = tables.OverNetwork(
    tables.table(1.0, 1, **options),
    {"w": np.zeros((2, 1))},
    tables.Work(
      lambda worker, job: job,
      lambda job: {"w": np.arange(2)},
      lambda rows, *_: (0.0, {"w": np.ones((2, 1))}),
    ),
    orders.durations.constant(),
    network=network,
    workers=1,
    messages=jobs,
  )
  run.advance(jobs)
  return run


def test_one_worker_and_one_shard_by_hand():
  network = Network(latency=0.5, up=64.0, down=32.0, port=128.0, service=0.25)
  run = one_worker(network, consistency="ssp", bound=0)
  request = (16 + 2 * 8) / 64 + 0.5 + 0.25  # a header and two keys
  reply = (16 + 2 * 8) / 32 + 0.5  # and two values
  first = (16 + 8 + 2 * 8 + 2 * 8) / 64 + 0.5 + 0.25  # a digest, keys, values
  again = (16 + 8 + 2 * 8) / 64 + 0.5 + 0.25  # the shard knows the keys
  ack = 0.5
  ends = request + reply + 1 + first
  next_answer = ends + ack + request
  times = [request, ends, next_answer, next_answer + reply + 1 + again]
  assert times[:2] == [1.25, 5.375]
  np.testing.assert_allclose([r.time for r in run.rows], times, rtol=1e-12)
  assert run.records().bytes_up.tolist() == [32 + 56, 32 + 40]
  assert run.records().bytes_down.tolist() == [32, 32]
  use = run.use()
  assert use.waited == 0
  assert use.service == pytest.approx(4 * 0.25 / times[-1])
  assert use.utilisation == pytest.approx((88 + 72) / 128 / times[-1])


def test_rows_that_are_sent_spare_a_worker_its_requests():
  """ESSP pulls once; later rows arrive while the next job is computed."""
  network = Network(latency=0.5, port=32.0)
  run = one_worker(network, consistency="essp", bound=1)
  assert [row.action for row in run.rows] == [
    *(base.SEND, base.RECEIVE, base.KEEP, base.RECEIVE)
  ]
  request, reply, push = 0.5 + 1, 0.5 + 1, 0.5 + 56 / 32
  again = 0.5 + 40 / 32
  ends = request + reply + 1 + push
  times = [request, ends, ends + 0.5, ends + 0.5 + 1 + again]
  np.testing.assert_allclose([row.time for row in run.rows], times)
  ssp = one_worker(network, consistency="ssp", bound=0)
  assert ssp.now > run.now


def test_shards_share_the_bytes_of_a_message():
  """With two shards, each port carries one of two rows, half of the header, and
  half of the digest."""
  two = one_worker(
    Network(port=32.0), consistency="ssp", bound=0, shards=2
  )
  times = [(32 + 32) / 64 + 1 + 56 / 64, (32 + 32) / 64 + 1 + 40 / 64]
  np.testing.assert_allclose(two.records().time, np.cumsum(times))


@pytest.mark.parametrize(
  ("incast", "times"), [("queue", "ties"), ("share", "gamma")]
)
@pytest.mark.parametrize("model", MODELS, ids=ident)
def test_a_network_without_limits_changes_no_bit(model, incast, times):
  clock = None
  if times == "ties":
    clock = orders.durations.constant(slowdown=[1, 2, 1])
  plain = finished(clock=clock, **model)
  over = finished(Network(incast=incast), clock=clock, **model)
  # Rows are pulled if their copies lack too much.
  asks = model["consistency"] == "value_bounded"
  same(over, plain, but=("bytes_up",) if asks else ())


CODED = dict(consistency="ssp", codec=dict(name="top_k", density=0.2))


@pytest.mark.parametrize(
  ("model", "incast"),
  [*((model, "share") for model in MODELS[1:5]), (CODED, "queue")],
)
def test_a_run_goes_on_from_what_was_saved_with_the_same_bits(model, incast):
  network = WIRE._replace(incast=incast)
  straight = finished(network, **model)
  for messages in (1, 17):
    first = run_of(network, **model)
    first.advance(messages)
    second = resumed(first, network, **model)
    same(second, straight)
    assert second.use() == straight.use()


@pytest.mark.parametrize(
  "model",
  [dict(consistency="bulk_synchronous", shards=3), *MODELS[1:2]],
  ids=ident,
)
def test_its_order_obeyed_without_a_network_gives_the_same_bits(model):
  run = finished(WIRE, **model)
  assert run.now > 1.2 * finished(**model).now
  assert orders.check(trace_lib.from_events(run.rows)) == WORKERS
  again = run_of(**model)
  again.replay(trace_lib.from_events(run.rows))
  same(again, run)


def test_an_update_that_is_not_finite_ends_its_job_only():
  run = one_worker(Network(latency=0.5), jobs=1, consistency="ssp", bound=0)
  assert run.received == 1
  broken = least_squares()._replace(
    gradient=lambda rows, job, *_: (0.0, {"w": rows["w"] + np.nan})
  )
  run = tables.OverNetwork(
    tables.table(0.2, 1),
    {"w": np.zeros((ROWS, 2))},
    broken,
    orders.durations.constant(),
    network=WIRE,
    workers=1,
    messages=4,
  )
  for _ in range(2):
    with pytest.raises(ValueError, match=r"w: the update of key 0 is not fin"):
      run.advance(4)
  assert run.received == 0
