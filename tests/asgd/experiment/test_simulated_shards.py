"""Simulated servers in shards that are out of step: replayed and resumed."""

import kit

import asgd
from asgd import base
from asgd.experiment import cell_files, live_files, storage

CONFIG = {
  "engine": "simulate",
  "examples": 576,
  "runs": {"a": {"recipe": "dana_slim"}},
}
OUT = {"shards": 3, "delays": {"name": "gamma", "mean": 0.8}}


def test_shards_out_of_step_are_replayed_and_resumed_to_the_bit(tmp_path):
  place, result, _ = kit.train_live(tmp_path / "whole", **CONFIG, server=OUT)
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

  settings = {**CONFIG, "server": OUT}
  again, other, _ = kit.train_live(tmp_path / "cut", stop=(9,), **settings)
  assert other["params_sha256"] == result["params_sha256"]
  records = [cell_files.read_records(cell) for cell in (place, again)]
  assert storage.digest(records[0]) == storage.digest(records[1])


MISTAKES = (
  ({"server": {"delays": "gamma"}}, "delays is for shards that are out of"),
  ({"server": {**OUT, "delays": {"name": "gama"}}}, "did you mean 'gamma'"),
  ({"server": {**OUT, "delays": 3}}, "delays must be a name or a dict"),
  ({"server": OUT, "engine": "threads"}, "delays .* is not for .* 'threads'"),
  ({"server": OUT, "runs": {"a": {"recipe": "ssgd"}}},
   "a works in rounds, and without one order for all shards their"),
)


test_what_does_not_fit_is_refused = kit.refuses(
  MISTAKES, lambda settings: kit.tiny(**settings)
)
