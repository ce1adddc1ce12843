"""A device that holds a part of the weights: the same bits, less memory."""

import functools
import itertools

import kit
import pytest
from pipeline_experiments import (
  build_pipelines,
  host_leaves,
  plan_of,
  small_config,
  to_the_end,
)

from asgd.pipeline import analyze, instructions, residence
from asgd.pipeline.residence import STATE, SUM, WEIGHTS

pytestmark = pytest.mark.usefixtures("float64")

A, B = [(stage, WEIGHTS) for stage in range(2)]
ONE_DEVICE = dict(
  schedule="breadth_first", stages=4, chunks=4, microbatches=2, momentum=0.9
)


ROOMS = None, 60, 100, 1000  # KB of a device; None is all


@functools.cache
def experiment():
  """Returns an experiment with a run for each number of microbatches and each
  room of a device."""
  runs = {}
  for microbatches, room in itertools.product((1, 2), ROOMS):
    run = ONE_DEVICE | {"recipe": "ssgd", "microbatches": microbatches}
    if room is not None:
      run["device_megabytes"] = room / 1000
    runs[f"m{microbatches}r{room}"] = run
  config = small_config(**runs)
  config["model"]["hidden"] = (32, 32, 32)
  return build_pipelines(config=config)


@functools.cache
def trained(microbatches, room=None):
  return to_the_end(experiment(), f"m{microbatches}r{room}")


def outcome(engine):
  return host_leaves(engine.snapshot().params), engine.records().loss


# All that is trained is 0.1 MB, with momentum twice as much.
@pytest.mark.parametrize("room", [100, 60])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_part_of_the_weights_trains_to_the_same_bits(room, microbatches):
  whole, part = trained(microbatches), trained(microbatches, room)
  kit.same(outcome(whole), outcome(part))
  columns = part.columns()
  assert "weights_peak_bytes" not in whole.columns()
  assert columns["weights_peak_bytes"] <= 1000 * room
  assert 0 < columns["weights_fetched_bytes"] < columns["weights_used_bytes"]


def test_a_batch_may_stop_before_any_slot():
  executor = trained(2, 60)._executor
  whole = executor.run(executor.start()).state
  state = executor.start()
  for slot in range(1, executor.schedule.slots + 1):
    state = executor.place(executor.run(state, slot).state)
  kit.same(executor.params(whole), executor.params(state))


def test_with_room_for_all_each_byte_is_fetched_once():
  columns, plan = trained(1, 1000).columns(), plan_of(experiment(), "m1r1000")
  sizes = [residence.sizes_of(part) for part in plan.parts]
  total = sum(each[WEIGHTS] + each[STATE] for each in sizes)
  assert columns["weights_fetched_bytes"] == total
  assert columns["weights_peak_bytes"] == total
  # What an update makes is written, so that a checkpoint has it.
  assert columns["weights_written_bytes"] == plan.updates * total
  # A forward and a backward read the weights, an update the state too.
  used = sum(3 * each[WEIGHTS] + each[STATE] for each in sizes)
  assert columns["weights_used_bytes"] == plan.updates * used


def test_what_an_instruction_needs():
  shape = dict(microbatches=4, stages=2, chunks=2)
  run = ONE_DEVICE | {"recipe": "ssgd", **shape}
  table = plan_of(build_pipelines(config=small_config(x=run))).table
  program = instructions.write(table, analyze.versions(table, "latest"))
  needed = [residence.needs(op, 4) for op in program.lanes[0]]
  # Breadth first: four forwards of a stage, four of the next, and back.
  assert needed[:8] == [(A,)] * 4 + [(B,)] * 4
  backward = [(B,), ((1, SUM),)] * 3 + [(B,), ((1, SUM), B, (1, STATE))]
  assert needed[8:16] == backward


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"device_megabytes": 0.001}, "MB at once, and there is room for 0.001"),
    ({"device_megabytes": -1}, "device_megabytes must be"),
    ({"device_megabytes": 1, "schedule": "pipedream", "chunks": None},
     "keeps several versions of weights"),
    ({"device_megabytes": 1, "recipe": "dana_slim"}, "a state at workers"),
    ({"device_megabytes": 1, "clip_norm": 1.0}, "config.clip_norm needs"),
  ],
)
def test_what_cannot_be_held_in_part_is_refused(changes, message):
  run = {**ONE_DEVICE, "recipe": "ssgd", **changes}
  run = {key: value for key, value in run.items() if value is not None}
  with pytest.raises(ValueError, match=message):
    plan_of(build_pipelines(config=small_config(x=run)))
