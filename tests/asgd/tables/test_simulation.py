"""Runs of tables: updates held back, codecs, moved ranges, checkpoints."""

import jax
import numpy as np
import pytest
from table_kit import MESSAGES, ROWS, finished, resumed, run_of, same

from asgd import orders, tables, worker


def test_shards_and_moves_change_no_bit():
  one = finished()
  many = finished(shards=4, rebalance_every=2)
  assert many.moved > 0
  assert many.tables()["w"].tobytes() == one.tables()["w"].tobytes()


def test_what_filters_hold_back_is_sent_later():
  for each in (
    dict(name="random_skip", probability=0.5),
    dict(name="significantly_modified", threshold=0.5),
    dict(name="largest_change", nbytes=50),  # three rows of 16 bytes
  ):
    run = finished(filters=(each,))
    assert run.held[0] > 0
    assert run.held[1] == 0
    for client in run._clients:  # at the end nothing is left
      assert client.residual() == 0
    assert (run.tables()["w"][2:] != 0).all()


def test_messages_within_a_clock_fit_their_budget():
  """A clock is of two jobs. A row has 8 bytes, and its key 8."""
  managed = dict(consistency="managed", budget=6)
  same(finished(push_every=2, **managed), finished(**managed))
  few = dict(name="largest_change", nbytes=48)
  options = dict(push_every=1, filters=(few,), **managed)
  run = finished(**options)
  records, half = run.records(), MESSAGES // 2
  assert (records.bytes_up > 0).sum() == MESSAGES  # after each job
  assert run.held[0] > 0
  # The last message of each worker bypasses filters.
  last = [np.flatnonzero(records.worker == w)[-1] for w in range(3)]
  others = np.delete(records.bytes_up, last)
  assert others.max() < 3 * 16 + 100
  first = run_of(**options)
  first.advance(half)
  same(resumed(first, **options), run)


def test_the_first_half_of_a_clock_reaches_a_reader_in_that_clock():
  settings = tables.table(
    0.5, 2, consistency="asynchronous", clock_every=4, push_every=2
  )
  clocks = [settings.clock_of_message(done, 7) for done in range(1, 8)]
  assert clocks == [None, 0, None, 1, None, 1, 2]
  work = tables.Work(
    lambda worker, job: job,
    lambda job: {"w": np.arange(1)},
    lambda rows, job, keys, worker, number: (0.0, {"w": -np.ones((1, 1))}),
  )
  reads = []
  run = tables.Simulation(
    settings,
    {"w": np.zeros((1, 1))},
    work,
    orders.durations.constant(slowdown=[1, 3]),
    workers=2,
    messages=8,
    observe=lambda read: reads.append((read.worker, read.values["w"].item())),
  )
  run.advance(8)
  # Increments of a half. Worker 1 begins jobs at 0 and 3: by then worker 0 has
  # sent two, and worker 1 adds its first one to that.
  assert [value for index, value in reads if index == 1][:2] == [0.0, 1.5]


def test_what_a_codec_leaves_out_is_sent_later():
  dense = finished()
  coded = finished(codec=dict(name="top_k", density=0.2))
  assert coded.records().residual_norm.max() > 0
  whole, few = (np.abs(r.tables()["w"] - np.arange(ROWS)[:, None]).mean()
    for r in (dense, coded))
  assert few < 2 * whole + 1


def test_no_codec_draws_with_the_key_of_a_job(monkeypatch):
  packed, pack = [], tables.ValueCodec.pack

  def recording(self, values, key):
    packed.append(key)
    return pack(self, values, key)

  monkeypatch.setattr(tables.ValueCodec, "pack", recording)
  finished(codec="int8")
  root, jobs = jax.random.key(0), range(MESSAGES)
  job_keys = [worker.job_key(root, i, job) for i in range(3) for job in jobs]
  # A job of several batches folds the batch's index into its key.
  job_keys += [jax.random.fold_in(key, 0) for key in job_keys]
  draws = {tuple(jax.random.key_data(key).tolist()) for key in packed}
  assert len(draws) == len(packed)
  for key in job_keys:
    assert tuple(jax.random.key_data(key).tolist()) not in draws


def test_the_kkt_filter_drops_gradients_of_zeros():
  run = finished(
    ftrl=dict(learning_rate=0.5, l1=4.0), filters=(dict(name="kkt", l1=4.0),)
  )
  assert run.held[1] > 0
  assert not run.tables()["w"][:3].any()
  assert run.tables()["w"][8:].all()
  with pytest.raises(ValueError, match="kkt is for gradients"):
    tables.table(0.1, 2, filters=(dict(name="kkt", l1=1.0),))


def test_lists_of_keys_are_sent_once():
  few, many = run_of(messages=12), run_of()
  few.advance(12)
  many.advance(36)
  first = few.records().bytes_up.sum()
  assert many.records().bytes_up.sum() < 3 * first


def test_without_key_caching_each_message_has_its_keys():
  cached, plain = finished(), finished(key_caching=False)
  same(cached, plain, but=("bytes_up",))
  up = [run.records().bytes_up.sum() for run in (cached, plain)]
  assert up[0] < up[1]
  keys = np.arange(5)
  sender = tables.KeyCache(sends_digests=False)
  first, again = sender.pack(keys), sender.pack(keys)
  assert first.nbytes == again.nbytes == 48
  receiver = tables.KeyCache()
  for sent in (first, again):
    assert receiver.unpack(sent).tolist() == keys.tolist()
  with pytest.raises(ValueError, match="key_caching must be True or False"):
    tables.table(0.1, 2, key_caching="no")


@pytest.mark.parametrize("bad", [0, 17])
def test_a_row_that_is_not_finite_ends_its_job_only(bad):
  run = run_of(bad=bad)
  with pytest.raises(ValueError, match=r"w: the update of key \d+ is not fin"):
    run.advance(MESSAGES)
  assert np.isfinite(run.tables()["w"]).all()
  received = run.received
  with pytest.raises(ValueError, match="is not finite"):  # and again
    run.advance(MESSAGES)
  assert run.received == received
  assert len(run.records().loss) == received


def test_a_message_of_a_strange_table_is_refused():
  server = run_of().server
  sender = tables.KeyCache()
  keys = sender.pack(np.array([1]))
  push = tables.Push(1, 1, {"v": tables.RowValues(keys, np.zeros((1, 2)))})
  with pytest.raises(ValueError, match="worker 1, clock 1: there is no table"):
    server.receive(push)
  far = tables.RowValues(sender.pack(np.array([99])), np.zeros((1, 2)))
  with pytest.raises(ValueError, match="clock 1: w: key 99 is out of range"):
    server.receive(tables.Push(1, 1, {"w": far}))
  assert server.slowest == 0
  assert not server.tables["w"].whole().any()


OPTIONS = (
  dict(consistency="bulk_synchronous"),
  dict(consistency="essp", bound=2, shards=2, rebalance_every=1),
  dict(consistency="managed", bound=2, budget=3),
  dict(
    consistency="value_bounded",
    threshold=0.5,
    filters=(dict(name="random_skip", probability=0.5),),
  ),
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: o["consistency"])
def test_a_run_goes_on_from_what_was_saved_with_the_same_bits(options):
  first = run_of(**options)
  first.advance(16)
  same(resumed(first, **options), finished(**options))


def test_managed_sends_no_more_than_its_budget():
  sent = []
  run = run_of(consistency="managed", bound=2, budget=3)
  at_clock = run.server.at_clock

  def watched():
    out = at_clock()
    sent.extend(
      len(keys) for rows in out.values() for keys, _ in rows.tables.values()
    )
    return out

  run.server.at_clock = watched
  run.advance(MESSAGES)
  assert max(sent) == 3


def test_messages_must_be_as_many_for_each_worker():
  with pytest.raises(ValueError, match="10 messages are not the same number"):
    run_of(messages=10)
