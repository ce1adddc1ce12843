"""Orders of peers over a network whose sizes are known as the values are."""

import kit
import pytest

from asgd.experiment.engines import peer_orders

# Four peers; a job takes 1.
CONFIG = {
  "workers": (4,),
  "durations": {"name": "constant", "mean": 1.0},
  "network": {"latency": 0.25, "up": 9000.0, "down": 6000.0},
}
RUNS = {
  "rounds": {"recipe": "d_psgd", "topology": "ring"},
  "overlap": {"recipe": "sgp", "overlap": 2},
  "pairs": {"recipe": "ad_psgd", "topology": "ring"},
  "choco": {
    "recipe": "choco_sgd", "topology": "ring", "codec": "top_k", "gamma": 0.1
  },
  "arrivals": {
    "recipe": "async_threshold_sharing",
    "codec": {"name": "threshold", "tau": 0.01},
  },
}
QSGD = {"name": "qsgd", "levels": 3, "error_feedback": False}


def build(run, **config):
  return kit.tiny(**{"runs": {"a": RUNS[run]}, **CONFIG, **config})


def in_parts(engine):
  """Advances an engine by a few messages at a time, to its end."""
  while engine.done < engine.total:
    engine.advance(min(engine.done + 8, engine.total))
  return engine


@pytest.mark.parametrize("run", ["rounds", "overlap", "pairs"])
def test_an_order_that_is_made_as_it_goes_is_the_one_made_before(
  run, monkeypatch
):
  durations = {"name": "gamma"}
  made = in_parts(kit.simulation_of(build(run, durations=durations)))
  monkeypatch.setattr(peer_orders, "order_of", peer_orders.GrownPeerOrder)
  grown = in_parts(kit.simulation_of(build(run, durations=durations)))
  kit.same(grown.records(), made.records())
  kit.same(grown.snapshot().params, made.snapshot().params)
  assert grown.columns() == made.columns()


@pytest.mark.parametrize("run", RUNS)
def test_a_cell_of_codes_goes_on_from_a_checkpoint(run):
  coded = {"compress": QSGD} if run in ("rounds", "overlap", "pairs") else {}
  exp = build(run, **coded, durations={"name": "gamma"})
  whole = kit.to_its_end(kit.simulation_of(exp))
  again = kit.resumed_simulation(lambda: exp, 12)
  kit.same(again.records(), whole.records())
  kit.same(again.snapshot().params, whole.snapshot().params)
  assert again.columns() == whole.columns()


def test_codes_take_the_time_of_their_own_bytes():
  """Two peers put b bytes when they start a job of 1; the code takes longer
  than the job, so a peer starts the next job when the other's code arrives."""
  network = {"latency": 2.0, "down": 6000.0}
  config = {"workers": (2,), "compress": QSGD, "network": network}
  engine = kit.to_its_end(kit.simulation_of(build("rounds", **config)))
  records = engine.records()
  nbytes = [records.bytes_up[records.worker == i].tolist() for i in (0, 1)]
  assert len({*nbytes[0], *nbytes[1]}) > 2
  assert max(*nbytes[0], *nbytes[1]) < 1000
  starts = [0.0, 0.0]
  for k, codes in enumerate(zip(*nbytes, strict=True)):
    for peer, start in enumerate(starts):
      times = records.time[records.worker == peer]
      assert times[k] == pytest.approx(start + 1, rel=1e-9)
    starts = [starts[1] + 2 + codes[1] / 6000, starts[0] + 2 + codes[0] / 6000]
