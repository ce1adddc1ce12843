"""What a config of a pipeline means: tables, weights, cuts and rates."""

import types
from pathlib import Path

import jax
import kit
import numpy as np
import pytest
from flax import linen as nn
from pipeline_experiments import (
  CASES,
  ENGINES,
  MICROBATCHES,
  STAGES,
  UPDATES,
  build_pipelines,
  host_leaves,
  plan_of,
  small_config,
  to_the_end,
  train_pipelines,
)

from asgd.experiment import folder, schema
from asgd.pipeline import run_plan, schedules
from asgd.pipeline import table as table_lib
from asgd.pipeline.partition import mixed_pipe

ROOT = Path(__file__).parents[2]


def test_an_update_of_several_microbatches_takes_as_many_times_the_rate():
  exp = build_pipelines(
    {
      "runs.x.schedule": "pipedream",
      "runs.x.every": 2,
      "learning_rate_schedule.warmup_examples": 8,
      "learning_rate_schedule.decay_examples": 48,
    }
  )
  plan = plan_of(exp)
  assert plan.learning_rate == pytest.approx(0.0125 * 2)
  assert (plan.messages, plan.updates, plan.batches) == (16, 8, 1)
  assert float(plan.schedule(0)) == pytest.approx(0.1 * plan.learning_rate)
  assert float(plan.schedule(5)) == pytest.approx(plan.learning_rate)
  assert float(plan.schedule(7)) == pytest.approx(0.1 * plan.learning_rate)
  own = build_pipelines(
    {"runs.x.schedule": "pipedream", "runs.x.learning_rate": 0.3}
  )
  assert plan_of(own).schedule == 0.3
  flush = plan_of(build_pipelines({"runs.x.learning_rate": 0.3}))
  assert flush.schedule == pytest.approx(0.3 * MICROBATCHES)


def test_a_budget_is_whole_updates():
  assert plan_of(build_pipelines({"examples": 4 * 23})).messages == 16
  assert plan_of(build_pipelines({"examples": 4})).messages == MICROBATCHES
  per_epoch = plan_of(build_pipelines()).problem.batches_per_epoch
  epochs = 3 * MICROBATCHES / per_epoch
  assert (
    plan_of(build_pipelines({"examples": None, "epochs": epochs})).updates == 3
  )


def test_another_schedule_drops_what_the_old_one_was_given():
  entry = dict(schedule="pipedream_2bw", weights="2bw", every=4, title="2BW")
  entry["momentum"] = 0.5
  exp = build_pipelines(
    {"runs.x.schedule": "zb_h1"}, config=small_config(x=entry)
  )
  assert exp.config["runs"]["x"] == {"schedule": "zb_h1", "momentum": 0.5}
  assert plan_of(exp).weights == "latest"


def test_only_chooses_the_runs_and_their_order():
  config = small_config(
    **{n: {"schedule": n} for n in ("gpipe", "stale", "zb_v")}
  )
  exp = build_pipelines({"only": "zb_v,gpipe"}, config=config)
  assert [cell.label for cell in exp.cells] == ["zb_v", "gpipe"]
  assert plan_of(exp, "zb_v").table.devices == 2
  assert len(build_pipelines({"only": "x,x"}).cells) == 1


def test_layers_without_weights_go_with_the_next():
  assert plan_of(build_pipelines()).cuts == (0, 2, 3, 4, 5)
  two = plan_of(build_pipelines({"pipeline.stages": 2})).cuts
  assert two == (0, 2, 5)  # 650 parameters, and 3 x 110
  wanted = 0, 2, 3, 4, 5
  for value in ("0,2,3,4,5", wanted):
    assert plan_of(build_pipelines({"pipeline.cuts": value})).cuts == wanted


@pytest.mark.slow
def test_cuts_by_time_are_measured_once_and_kept(tmp_path):
  by_time = {"pipeline.cuts": "time", "pipeline.stages": 2}
  exp = build_pipelines(by_time)
  cuts = plan_of(exp).cuts
  assert (cuts[0], cuts[-1]) == (0, 5)
  place = folder.open_folder(str(tmp_path / "out"), "x", exp)
  stored = folder.read_measurements(place)
  assert stored == exp.measurements
  again = build_pipelines(by_time, measurements=stored)
  assert (again.measurements, plan_of(again).cuts) == (stored, cuts)
  # What has been cut by them can be cut by no others.
  for seconds in ([[1, 2]], [[1, 2]] * 4 + [[1]], [[1, -2]] * 5, "now"):
    with pytest.raises(ValueError, match="does not have the 5 layers' seconds"):
      build_pipelines(by_time, measurements={"layer_seconds": seconds})
  path = place / "measurements.json"
  path.write_text('{"layer_seconds": [')
  with pytest.raises(ValueError, match="put it back as it was"):
    folder.read_measurements(place)
  path.unlink()
  (place / "cells").mkdir()
  with pytest.raises(ValueError, match="put it back as it was"):
    folder.open_folder(str(place), "x", exp)


@pytest.mark.slow
def test_a_partitioner_places_the_stages():
  config = small_config(
    replicas={"schedule": "pipedream", "partition": "pipedream"},
    mixed={"schedule": "ftpipe", "partition": "mixed_pipe", "stages": 2},
    plain={"schedule": "gpipe"},
  )
  config["pipeline"]["stages"] = 3
  # Flatten, which goes with the next, and four layers with weights.
  seconds = [[0.0, 0.0], [3.0, 6.0], [1.0, 2.0], [1.0, 1.0], [1.0, 3.0]]
  exp = build_pipelines(config=config, measurements={"layer_seconds": seconds})
  # 18 seconds on three devices: no cut does better than 6.
  replicas = plan_of(exp, "replicas")
  assert replicas.cuts == (0, 5)
  assert replicas.table.places() == [[0, 1, 2]]
  said = "replicas: layers (on devices) 0 to 4 on 0, 1, 2"
  assert replicas.describe_partition() == said
  # 9 + 0 on a device, 3 + 2 + 4 on the other.
  assert plan_of(exp, "mixed").table.places() == [[0], [1]]
  assert plan_of(exp, "plain").table.devices == 3
  # Where a kilobyte takes twenty seconds, no stage has replicas.
  config["runs"]["replicas"]["bandwidth"] = 50.0
  exp = build_pipelines(config=config, measurements={"layer_seconds": seconds})
  plan = plan_of(exp, "replicas")
  assert plan.cuts[:2] == (0, 2)
  assert plan.table.places() == [[0], [1], [2]]
  seconds = [[0.0, 0.0], [1.0, 3.0], [1.0, 1.0], [0.5, 0.5], [1.0, 2.0]]
  exp = build_pipelines(config=config, measurements={"layer_seconds": seconds})
  mixed = plan_of(exp, "mixed")
  # 4 + 1 and 2 + 3, where no cut of a chain does better than 6 and 4.
  assert mixed.cuts == (0, 2, 3, 4, 5)
  assert mixed.table.places() == [[0], [1], [0], [1]]
  # Two of three devices are enough where the last layer takes longest.
  config["runs"]["mixed"]["stages"] = 3
  seconds = [[0.0, 0.0], *[[1.0, 2.0]] * 3, [4.0, 8.0]]
  exp = build_pipelines(config=config, measurements={"layer_seconds": seconds})
  assert plan_of(exp, "mixed").table.places() == [[1], [0]]


@pytest.mark.slow
def test_a_table_of_a_file_is_obeyed(tmp_path):
  mine = schedules.dualpipe(2, MICROBATCHES)
  path = tmp_path / "mine.CSV"
  path.write_text(table_lib.to_csv(mine))
  runs = {"x": {"schedule": "gpipe"}, "y": {"schedule": "gpipe", "stages": 2}}
  exp = build_pipelines(
    {"runs.x.schedule": str(path)}, config=small_config(**runs)
  )
  assert plan_of(exp).table.tasks == mine.tasks
  assert plan_of(exp).table.devices == 2
  found, wanted = (
    host_leaves(to_the_end(exp, label).snapshot().params) for label in runs
  )
  kit.close(found, wanted, atol=2e-6)
  stale = schedules.pipedream(STAGES, MICROBATCHES * UPDATES - 1)
  for table, overrides, said in (
    (mine, {"pipeline.microbatches": 4}, "8 microbatches in an update.*=8"),
    (stale, {}, "any other table must contain all"),
    (mine, {"runs.x.stages": 3}, "stages 3 are not the 2 of"),
    (mine, {"runs.x.cuts": "0,2,3,4,5"}, "2 stages are cut at 3 layers"),
  ):
    path.write_text(table_lib.to_csv(table))
    with pytest.raises(ValueError, match=said):
      build_pipelines({"runs.x.schedule": str(path), **overrides})
  with pytest.raises(ValueError, match="none.txt cannot be read: No such file"):
    build_pipelines({"runs.x.schedule": "none.txt"})


def test_a_prediction_is_the_roll_forward_of_momentum():
  """The first stage's weights are 3 updates old: it is sent p - rate v (m +
  m^2 + m^3), and the last stage's what it has."""
  config = small_config(
    x={"schedule": "pipedream", "predict": True, "momentum": 0.5}
  )
  parts = plan_of(build_pipelines(config=config)).parts
  for part, factor in ((parts[0], 0.5 + 0.25 + 0.125), (parts[3], 0.0)):
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), part.params)
    state = part.server.init(params)
    ticket = part.server.send(state, np.int32(0))
    ones = jax.tree.map(np.ones_like, params)
    state, _ = part.server.receive(state, ticket, ones)
    sent = part.server.send(state, np.int32(0)).params
    for leaf in host_leaves(sent):
      np.testing.assert_allclose(leaf, -0.0125 * (1 + factor), rtol=1e-6)


def sent_after_an_update(part):
  """Returns the server's state and what it sends, after a gradient of ones on
  weights of zero."""
  params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), part.params)
  state = part.server.init(params)
  ticket = part.server.send(state, np.int32(0))
  ones = jax.tree.map(np.ones_like, params)
  state, _ = part.server.receive(state, ticket, ones)
  return state, part.server.send(state, np.int32(0)).params


def test_predictions_by_name_are_along_the_velocity():
  """The velocity is 1: weights are -rate, and each update ahead is f rates
  more. Stage k of 4 is 3 - k updates stale."""
  common = {"schedule": "pipedream", "momentum": 0.5}
  latest = {"weights": "latest", **common}
  forward = {"spectrain": (3, 2, 2, 1), "ftpipe": (0.875, 0.75, 0.5, 0.0)}
  backward = {"spectrain": (0, 0, 1, 1), "ftpipe": (0, 0, 0, 0)}
  runs = {name: {"predict": name, **latest} for name in forward}
  exp = build_pipelines(config=small_config(**runs))
  for name in runs:
    for k, part in enumerate(plan_of(exp, name).parts):
      state, sent = sent_after_an_update(part)
      assert (part.correct is not None) == (backward[name][k] > 0)
      read = part.correct(state) if part.correct else state.params
      for params, factor in ((sent, forward[name][k]),
          (read, backward[name][k])):
        for leaf in host_leaves(params):
          np.testing.assert_allclose(leaf, -0.0125 * (1 + factor), rtol=1e-6)


def test_ftpipes_prediction_is_the_roll_forward_of_momentum():
  common = {"schedule": "pipedream", "momentum": 0.9}
  runs = {str(p): {"predict": p, **common} for p in (True, "ftpipe")}
  plans = build_pipelines(config=small_config(**runs))
  both = (plan_of(plans, label).parts for label in runs)
  for rolled, named in zip(*both, strict=True):
    _, sent = sent_after_an_update(rolled)
    kit.close(sent_after_an_update(named)[1], sent, rtol=1e-6)


@pytest.mark.slow
def test_a_run_with_predictions_of_both_passes_is_finite():
  run = {"schedule": "pipedream", "weights": "latest", "momentum": 0.9}
  exp = build_pipelines(config=small_config(x={**run, "predict": "spectrain"}))
  assert np.isfinite(to_the_end(exp, "x").records().loss).all()


@pytest.mark.parametrize(
  ("run", "why"),
  [
    ({"predict": "spectrain"}, "'spectrain' is for both passes of an"),
    ({"predict": "spectrain", "schedule": "gpipe", "weights": None},
     "not for gpipe with weights='latest'"),
    ({"predict": "spectrain", "schedule": "pipemare", "weights": None},
     "not for pipemare"),
    ({"predict": "ftpipe", "recipe": "dana_zero"},
     "'ftpipe' follows the velocity of SGD with momentum, of which"),
    ({"predict": "ftpipe", "momentum": 0.0}, "set momentum=0.9 of the recipe"),
    ({"predict": "xpipe"}, "must be True or False, 'spectrain', 'ftpipe', not"),
  ],
)
def test_predictions_that_do_not_fit_are_refused(run, why):
  run = {"schedule": "pipedream", "weights": "stash", **run}
  with pytest.raises(ValueError, match=f"config.runs.x.predict.*{why}"):
    plan_of(build_pipelines(config=small_config(x=run)))


def test_ftpipe_stashes_nothing_and_recomputes_all_but_the_last_stage():
  runs = {
    "plain": {"schedule": "ftpipe"},
    "keeps": {"schedule": "ftpipe", "recompute": False},
    "stashes": {"schedule": "ftpipe", "weights": "stash", "recompute": True},
    "one": {"schedule": "pipedream", "recompute": (2,)},
  }
  exp = build_pipelines(config=small_config(**runs))
  plans = {label: plan_of(exp, label) for label in runs}
  found = {label: (p.weights, list(p.recompute)) for label, p in plans.items()}
  assert found == {
    "plain": ("latest", [True, True, True, False]),
    "keeps": ("latest", [False] * 4),
    "stashes": ("stash", [True] * 4),
    "one": ("stash", [False, False, True, False]),
  }


def test_the_partitioner_spares_the_last_stage_of_ftpipe():
  """It is told what the run recomputes: the last layer, of 2 + 2 seconds, is
  the shorter stage only while its forward counts once."""
  seconds = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]
  given = {"measurements": {"layer_seconds": seconds}}
  config = small_config(
    x={"schedule": "ftpipe", "partition": "mixed_pipe", "bandwidth": 1e30}
  )
  config["pipeline"]["stages"] = 2
  seen = []

  def mixed_pipe_of(chain, count, **options):
    seen.append(options["recompute"])
    return mixed_pipe.mixed_pipe(chain, count, **options)

  with pytest.MonkeyPatch.context() as patch:
    stand_in = types.SimpleNamespace(mixed_pipe=mixed_pipe_of)
    patch.setattr(run_plan, "mixed_pipe", stand_in)
    for said, plan_says in (
      (None, [True, False]),
      (True, [True, True]),
      (False, [False, False]),
    ):
      exp = build_pipelines({"runs.x.recompute": said}, config, **given)
      recompute = plan_of(exp).recompute
      assert [recompute[0], recompute[-1]] == plan_says
  assert seen == ["but_last", "all", "none"]


def test_the_time_of_a_microbatch_follows_from_the_seconds_of_layers():
  """Two devices, stages of 1 + 2 and 2 + 4 seconds, and the flush of GPipe."""
  seconds = [[0.0, 0.0], [1.0, 2.0], [0.5, 1.0], [0.5, 1.0], [1.0, 2.0]]
  given = {"measurements": {"layer_seconds": seconds}}
  stages = {"cuts": [0, 2, 5], "stages": 2}
  config = small_config(
    plain={"schedule": "gpipe", **stages},
    again={"schedule": "gpipe", "recompute": "but_last", **stages},
    free={"schedule": "ftpipe", **stages},
    split={"schedule": "zb_h1", **stages},
  )
  exp = build_pipelines(config=config, **given)
  times = {
    label: plan_of(exp, label).predicted_times()["microbatch_seconds"]
    for label in ("plain", "again", "free", "split")
  }
  # The second device is busy for 6 of each microbatch. It waits for the first
  # forward, and the first device ends with a backward.
  m = MICROBATCHES
  assert times["plain"] == pytest.approx((6 * m + 1 + 2) / m)
  assert times["again"] == pytest.approx((6 * m + 1 + 3) / m)
  total = plan_of(exp, "free").messages
  assert times["free"] == pytest.approx((6 * total + 1 + 3) / total)
  assert 6 <= times["split"] <= times["plain"]
  assert plan_of(build_pipelines()).predicted_times() == {}


@pytest.mark.slow
def test_gpipe_has_any_stages_on_a_device_by_a_rule():
  """5 seconds on each of two devices, where cuts of a chain give 6 and 4."""
  rule = "asgd.pipeline.schedules.user_rules:forwards_first"
  config = small_config(
    mixed={"schedule": "custom", "rule": rule, "partition": "mixed_pipe"},
    plain={"schedule": "gpipe", "cuts": "time"},
  )
  config["pipeline"]["stages"] = 2
  seconds = [[0.0, 0.0], [1.0, 3.0], [1.0, 1.0], [0.5, 0.5], [1.0, 2.0]]
  exp = build_pipelines(config=config, measurements={"layer_seconds": seconds})
  mixed = plan_of(exp, "mixed")
  assert mixed.table.places() == [[0], [1], [0], [1]]
  assert mixed.table.flush
  times = [
    plan_of(exp, label).predicted_times()["microbatch_seconds"]
    for label in ("mixed", "plain")
  ]
  assert times[0] < times[1]
  found, wanted = (
    host_leaves(to_the_end(exp, label).snapshot().params)
    for label in ("mixed", "plain")
  )
  kit.close(found, wanted, atol=2e-6)


def test_pipemare_divides_the_rates_of_stages_by_their_delays():
  """By tau^p at update k, p = 1 - min(k / K, 1): tau is 7, 5, 3 and 1."""
  config = small_config(x={"schedule": "pipemare", "anneal": 2})
  plan = plan_of(build_pipelines(config=config))
  for part, tau in zip(plan.parts, (7, 5, 3, 1), strict=True):
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), part.params)
    state, before = part.server.init(params), 0.0
    ones = jax.tree.map(np.ones_like, params)
    for update in range(4):
      ticket = part.server.send(state, np.int32(0))
      state, _ = part.server.receive(state, ticket, ones)
      before -= 0.0125 / tau ** (1 - min(update / 2, 1))
      for leaf in host_leaves(state.params):
        np.testing.assert_allclose(leaf, before, rtol=1e-5)
  stash = {**config["runs"]["x"], "weights": "stash"}
  for part in plan_of(build_pipelines(config=small_config(x=stash))).parts:
    assert part.correct is None


def test_workers_of_dana_are_the_updates_in_flight_at_the_stage():
  names = ("gpipe", "pipedream", "pipedream_2bw", "stale")
  runs = {name: {"schedule": name, "recipe": "dana_zero"} for name in names}
  runs["replicas"] = {**runs["pipedream"], "replicas": (1, 1, 1, 2)}
  exp = build_pipelines({"pipeline.microbatches": 4}, small_config(**runs))
  workers = {
    label: [part.server.workers for part in plan_of(exp, label).parts]
    for label in runs
  }
  assert workers == {
    "gpipe": [1, 1, 1, 1],
    "pipedream": [4, 3, 2, 1],
    "pipedream_2bw": [2, 2, 2, 2],
    "stale": [7, 5, 3, 1],
    "replicas": [5, 4, 3, 2],
  }


@pytest.mark.slow
def test_predictions_need_no_stash():
  """FTPipe's runs without a stash predict the weights of forwards only."""
  run = {"schedule": "ftpipe", "predict": True, "momentum": 0.9}
  exp = build_pipelines(config=small_config(x=run))
  assert plan_of(exp).weights == "latest"
  assert np.isfinite(to_the_end(exp, "x").records().loss).all()


def test_runs_of_one_algorithm_share_its_servers():
  config = small_config(
    **{n: {"schedule": n} for n in ("gpipe", "zb_h1", "pipedream")}
  )
  exp = build_pipelines(config=config)
  servers = {
    label: [part.server for part in plan_of(exp, label).parts]
    for label in exp.runs
  }
  assert servers["gpipe"] == servers["zb_h1"]
  assert servers["pipedream"][0] != servers["gpipe"][0]


# Mistakes.


PLACED = dict(schedule="ftpipe", partition="mixed_pipe")
OF_A_RUN = [
  (dict(schedule="gpip"), "did you mean 'gpipe'"),
  (dict(recipe="dana_zer"), "did you mean 'dana_zero'"),
  (dict(chunk=3), "'runs.x.chunk'.*known"),
  (dict(chunks=3), "'runs.x.chunks'.*pipeline"),  # of another schedule
  (dict(schedule="ftpipe", devices=(0, 1)),
   "config.runs.x.devices must be a device for each of 4"),
  (dict(partition="pipedram"),
   "config.runs.x.partition must be 'pipedream' or 'mixed_pipe'"),
  (dict(partition="mixed_pipe"),
   "mixed_pipe is not for the schedule gpipe: use ftpipe"),
  (dict(devices=(0, 1), **PLACED),
   "config.runs.x.devices follows from config.runs.x.partition"),
  (dict(cuts=(0, 2, 5), **PLACED),
   "config.runs.x.cuts follows from config.runs.x.partition"),
  (dict(bandwidth=50.0),
   "config.runs.x.bandwidth is for a partitioner: set .*partition"),
  (dict(schedule="custom"), "config.runs.x.rule must name a function"),
  (dict(schedule="stale", weights="newest"), "config.runs.x.weights .*newest"),
  (dict(weights="2bw"), "is for asynchronous"),
  (dict(schedule="pipedream", weights="2bw"),
   "config.runs.x.*needs more microbatches in an update"),
  (dict(schedule="pipedream", every=3),
   "config.runs.x.every 3 does not divide the 16"),
  (dict(recompute=1), "recompute must be True or False"),
  (dict(schedule="pipemare", anneal=-1),
   "config.runs.x.anneal must be a positive whole number, not -1"),
  (dict(schedule="pipemare", decay=1.0),
   "config.runs.x.decay must be between 0 and 1, not 1.0"),
  (dict(recompute=(0, 4)),
   r"config.runs.x.recompute must be stages from 0 to 3, not \[0, 4\]"),
  (dict(recompute="0,1", **PLACED),  # stages that are still to be made
   r"config.runs.x.recompute \[0, 1\] lists stages before mixed_pipe"),
  (dict(recipe="easgd"), "do not fit; use asgd"),
  (dict(learning_rate="a"), "config.runs.x.learning_rate must"),
]
MISTAKES = [
  *(({f"runs.x.{k}": v for k, v in d.items()}, m) for d, m in OF_A_RUN),
  ({"exampels": 3}, "'exampels'; did you mean 'examples'"),
  ({"pipeline.stagess": 3}, "'pipeline.stagess'; did you mean 'stages'"),
  ({"pipeline.stages": 0}, "stages must be a whole number from 1"),
  ({"pipeline.stages": 7}, "4 layers with weights.*config.pipeline.stages=4"),
  ({"pipeline.stages": 3, "runs.x.schedule": "zb_v"},
   "2 stages on each device.*config.runs.x.stages=4|config.runs.x.stages"),
  ({"pipeline.stages": 3, "runs.x.schedule": "chimera"},
   "config.runs.x.* stages must be even|config.runs.x.stages must be even"),
  ({"pipeline.microbatches": 4, "runs.x.schedule": "dualpipe"},
   "config.runs.x.*dualpipe needs 8 microbatches"),
  ({"pipeline.cuts": "0,1,2,3"}, "4 stages are cut at 5 layers"),
  ({"pipeline.cuts": "size"}, "cuts must be 'parameters', 'time'"),
  ({"pipeline.cuts": "0,1,2,3,5"}, "stage 0 .* has no weights"),
  ({
     "learning_rate_schedule.warmup_examples": 64,
     "learning_rate_schedule.decay_examples": 32,
   },
   "config.learning_rate_schedule: .*inside the warm-up"),
  ({"batch_size": 5000}, "batch_size"),
  ({"epochs": 1e9, "examples": None}, "use at most 1,000,000"),
  ({"data.name": "pydok"}, "config.data.name: .* texts: pydoc"),
]


test_a_mistake_names_key_value_and_remedy = kit.refuses(
  MISTAKES, build_pipelines
)


def test_every_case_is_known_by_its_schedule():
  runs = schema.resolve(small_config(**CASES), ENGINES).runs
  assert runs["replicas"].config["pipeline"]["replicas"] == [1, 1, 1, 2]
  assert runs["stash"].recipe == "gap_aware"
  assert runs["predicted"].options == {"momentum": 0.9}


# Kinds of problems.

_SMALL = {"depth": 1, "width": 8, "heads": 2}
# Data, model, and how many examples; of a text enough for its loss to fall.
KINDS = {
  "text": ({"name": "pydoc", "context": 8}, {"name": "gpt", **_SMALL}, 192),
  "sentences": (
    {"name": "topics", "context": 16}, {"name": "bert", **_SMALL}, 64
  ),
  "regression": ({"name": "diabetes"}, {"name": "mlp", "hidden": (8,)}, 64),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_layers_is_trained_in_a_pipeline(kind, tmp_path):
  section, model, examples = KINDS[kind]
  config = small_config(x={"schedule": "pipedream", "momentum": 0.9})
  config |= {"data": section, "model": model, "examples": examples}
  config |= {"evaluations": 1, "evaluation_examples": 4}
  exp = build_pipelines(config=config, overrides={"pipeline.stages": 2})
  (result,) = train_pipelines(exp, tmp_path)
  assert np.isfinite(result["test_loss"])
  if kind == "text":
    assert result["test_loss"] < np.log(exp.dataset.classes)


class OnePiece(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(10)(x.reshape(len(x), -1))


def one_piece(classes):
  del classes
  return OnePiece()


def test_a_model_in_one_piece_cannot_be_cut():
  name = f"{__name__}:one_piece"
  words = f"^config.runs.x: config.model.name '{name}' makes a model that is"
  with pytest.raises(ValueError, match=words) as caught:
    build_pipelines(config={**small_config(), "model": {"name": name}})
  assert "\n" not in str(caught.value)
