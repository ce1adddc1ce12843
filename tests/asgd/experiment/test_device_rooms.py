"""Workers with room for a part of the model, on every engine with a server."""

import jax
import kit
import pytest

import asgd

# Bytes of a device: a job of TINY_RUN on digits (batches of 16 images of 64
# pixels, a layer of 8) needs 8,896 for its largest layer.
LEAST = 8896
ROOM = {"device_megabytes": LEAST / 1e6}


@pytest.mark.parametrize(
  "config",
  [
    {},
    {"runs": {"run": {"recipe": "ssgd", "momentum": 0.5}}},
    {"runs": {"run": {"recipe": "dana_zero"}}, "clip_norm": 0.5},
    {"server": {"shards": 2}},
  ],
  ids=["asynchronous", "rounds", "look-ahead, clipped", "shards out of step"],
)
def test_it_trains_as_plain_workers_do(config, float64):
  plain, part = kit.simulated(**config), kit.simulated(**config, memory=ROOM)
  kit.close(
    *(jax.device_get(each.snapshot().params) for each in (plain, part)),
    atol=1e-6,  # the parameters are float32
  )
  row, messages = part.columns(), len(part.records().loss)
  assert messages == 24
  assert "worker_peak_bytes" not in plain.columns()
  assert row["worker_peak_bytes"] <= LEAST
  # Each job reads all parameters, 64 x 8 + 8 and 8 x 10 + 10 of 4 bytes, and
  # sends a gradient of each.
  assert row["worker_fetched_bytes"] > messages * 4 * 610
  assert row["worker_written_bytes"] >= messages * 4 * 610


def test_a_saved_cell_resumes_to_the_same_bits():
  def build():
    return kit.tiny(memory=ROOM)

  whole = kit.to_its_end(kit.simulation_of(build()))
  resumed = kit.resumed_simulation(build, 8)
  kit.same(resumed.snapshot().params, whole.snapshot().params)


def test_a_live_cell_is_replayed_to_the_bit(tmp_path):
  place, result, _ = kit.train_live(
    tmp_path / "out",
    examples=576,
    model={"name": "mlp", "hidden": (8,)},
    memory=ROOM,
  )
  assert result["worker_peak_bytes"] <= LEAST
  replayed = asgd.replay(place)
  assert replayed.same
  assert len(replayed.records.loss) == result["messages"]


MISTAKES = {
  "too small": (
    {"memory": {"device_megabytes": (LEAST - 1) / 1e6}},
    r"memory.device_megabytes: one layer .* give at least 0.008896 MB",
  ),
  "no number": ({"memory": {"device_megabytes": 0}}, "device_megabytes must"),
  "a state at the worker": (
    {"runs": {"run": {"recipe": "dana_slim"}}}, "keeps a state of all"
  ),
  "local steps": (
    {"runs": {"run": {"recipe": "diloco"}}}, "do more than compute a gradient"
  ),
  "a codec": ({"compress": "onebit"}, "codes a complete message"),
  "kept tickets": (
    {"order": {"name": "asynchronous", "fetch_every": 2}}, "on a kept ticket"
  ),
  "uneven batches": (
    {"allocation": {"batch_size": [8, 24]}}, "changes the bytes of a job"
  ),
  "several devices": (
    {"engine": "threads", "live": {"devices": 2}}, "divide the work"
  ),
  "another engine of the simulator": (
    {"simulator": {"engine": "chunk"}}, "job is several programs"
  ),
  "peers": (
    {"runs": {"run": {"recipe": "d_psgd"}}}, "each peer has the complete model"
  ),
  "a coordinator": (
    {"runs": {"run": {"recipe": "sandblaster"}}}, "its shards send a worker all"
  ),
}


def plans(config):
  """Builds a tiny run and its plan, and chooses its simulator."""
  exp = kit.tiny(**{"memory": ROOM, **config})
  plan = exp.plan(exp.cells[0])
  plan.simulator(plan.trace(0))


test_what_does_not_fit_is_refused = kit.refuses(MISTAKES, plans)
