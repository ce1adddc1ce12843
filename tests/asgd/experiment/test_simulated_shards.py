"""Simulated servers in shards that are out of step: replayed and resumed."""

import kit
import numpy as np
import pytest

import asgd
from asgd import base
from asgd.experiment import cell_files, live_files, storage
from asgd.live.journal import journal_path, read_journal

pytestmark = pytest.mark.usefixtures("blank_pictures")

CONFIG = {
  "engine": "simulate",
  "examples": 576,
  "runs": {"a": {"recipe": "dana_slim"}},
}
OUT = {"shards": 3, "delays": {"name": "gamma", "mean": 0.8}}
READS = {"shards": 3, "reads": 0.75}


@pytest.mark.parametrize("server", [OUT, READS], ids=["delays", "reads"])
def test_shards_out_of_step_are_replayed_and_resumed_to_the_bit(
  tmp_path, server
):
  place, result, _ = kit.train_live(tmp_path / "whole", **CONFIG, server=server)
  assert result["spread_mean"] > 0
  replayed = asgd.replay(place)
  assert replayed.same
  assert replayed.recorded == result["params_sha256"]
  description = live_files.read_description(place)
  counts = [
    sum(event.action == base.RECEIVE for event in events)
    for _, events in live_files.read_traces(place, description)
  ]
  assert counts == [result["messages"]] * 3

  settings = {**CONFIG, "server": server}
  again, other, _ = kit.train_live(tmp_path / "cut", stop=(9,), **settings)
  assert other["params_sha256"] == result["params_sha256"]
  records = [cell_files.read_records(cell) for cell in (place, again)]
  assert storage.digest(records[0]) == storage.digest(records[1])


def bowl(w, batch):
  return 0.5 * ((w - 0 * batch.sum()) ** 2).sum()


def test_shards_out_of_step_clip_by_a_norm_for_each_shard(tmp_path):
  """The gradient of [1/2, 3] is itself: the shard of 3 clips it to 1."""
  data = np.array([0.5, 3.0], np.float32), np.zeros(8, np.float32)
  options = {"messages": 2, "batch_size": 1, "clip_norm": 1.0}
  recipe, server = asgd.asgd(0.5, workers=1), {"shards": 2}
  calls = (
    lambda: asgd.simulate(
      bowl, *data, recipe, server={**server, "delays": "gamma"}, **options
    ),
    lambda: asgd.train_live(
      bowl, *data, recipe, server=server, folder=tmp_path, **options
    ),
  )
  for call in calls:
    with pytest.warns(UserWarning, match="is a norm for each of 2 shards"):
      params = call().params
    np.testing.assert_array_equal(params, [0.5 / 4, 3 - 0.5 - 0.5])
  with pytest.warns(UserWarning, match="is a norm for each"):
    assert asgd.replay(tmp_path, bowl, *data, recipe).same


def test_a_network_decides_the_order_of_shards_out_of_step(tmp_path):
  network = {"latency": 0.25, "port": 6000.0, "service": 0.125}
  settings = {**CONFIG, "network": network, "server": {"shards": 3}}
  place, result, _ = kit.train_live(tmp_path / "whole", **settings)
  assert result["spread_mean"] > 0
  assert 0 < result["link_utilisation"] <= 1
  replayed = asgd.replay(place)
  assert replayed.same
  again, other, _ = kit.train_live(tmp_path / "cut", stop=(9,), **settings)
  assert other["params_sha256"] == result["params_sha256"]


def test_live_shards_out_of_step_over_a_network_are_replayed(tmp_path):
  settings = {"network": {"latency": 1e-3}, "server": {"shards": 2}}
  place, result, _ = kit.train_live(tmp_path, examples=576, **settings)
  replayed = asgd.replay(place)
  assert replayed.same
  assert replayed.recorded == result["params_sha256"]
  starts = {}
  for row in read_journal(journal_path(place, 0)):
    if row.action == base.SEND:
      starts[row.key] = row.time
    elif row.action == base.RECEIVE:  # the ticket and the message, 1 ms each
      assert row.time - starts[row.key] > 2e-3


def test_one_block_is_a_read_at_once_to_the_bit(tmp_path):
  cells = [
    kit.train_live(tmp_path / str(share), **CONFIG, server={"reads": share})
    for share in (0.0, 1.0)
  ]
  digests = [result["params_sha256"] for _, result, _ in cells]
  assert digests[0] == digests[1]


MISTAKES = (
  ({"server": READS, "network": {"latency": 0.5}},
   "server.reads and config.network both say when messages arrive"),
  ({"server": {**OUT, "reads": 0.5}}, "delays rules out: leave one of the two"),
  ({"server": {"shards": 2, "consistent": True, "reads": 0.5}},
   "server.reads 0.5 reads the shards .*server.consistent rules out"),
  ({"server": {"reads": 1.5}}, "server.reads must be a number from 0 to 1"),
  ({"server": READS, "engine": "threads"}, "reads .* is not for .* 'threads'"),
  ({"server": {"delays": "gamma"}}, "delays is for shards that are out of"),
  ({"server": {**OUT, "delays": {"name": "gama"}}}, "did you mean 'gamma'"),
  ({"server": {**OUT, "delays": 3}}, "delays must be a name or a dict"),
  ({"server": OUT, "engine": "threads"}, "delays .* is not for .* 'threads'"),
  ({"server": OUT, "runs": {"a": {"recipe": "ssgd"}}},
   "a works in rounds, and without one order for all shards their"),
  ({"server": OUT, "clip_norm": 1.0, "runs": {"a": {"recipe": "asgd"}},
    "order": {"name": "asynchronous", "fetch_every": 2}},
   "^config.clip_norm 1.0 clips by a norm for each shard, .* keeps tickets"),
  ({"server": {"shards": 2, "consistent": True}, "clip_norm": 1.0,
    "runs": {"a": {"recipe": "ssgd"}}, "engine": "threads"},
   "a needs a norm over all shards, which requires that each message"),
)


test_what_does_not_fit_is_refused = kit.refuses(
  MISTAKES, lambda settings: kit.tiny(**settings)
)
