"""Configs: overrides, defaults, and what is wrong with them."""

import copy
import functools

import jax
import kit
import ml_collections
import numpy as np
import pytest

from asgd import experiment
from asgd.experiment import overrides as overrides_lib
from asgd.experiment import schema
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
ASGD = {"asgd": {"recipe": "asgd"}}
STALE = {"name": "stale_synchronous", "bound": 1}


def resolve(overrides=(), **config):
  config = overrides_lib.override(
    {"runs": ASGD, **config}, dict(overrides), ENGINES
  )
  return schema.resolve(config, ENGINES)


def resolved(overrides=(), **config):
  return resolve(overrides, **config).config


def runs(overrides=(), **config):
  return resolve(overrides, **config).runs


build = functools.partial(kit.build, {"runs": ASGD})

# Defaults and overrides.


def test_missing_keys_have_their_defaults():
  config = resolved()
  assert config["batch_size"] == 32
  assert config["durations"] == {"name": "homogeneous"}
  assert config["workers"] == [8]
  assert config["live"]["together"] is True
  assert config["pipeline"]["schedule"] == "pipedream"
  assert config["mesh"]["axes"] == {}
  assert config.keys() == schema.sections(ENGINES).keys()


def test_resolving_again_changes_nothing():
  config = resolved(
    {"mesh.axes": "data:2,tensor:4", "only": "asgd", "model.hidden": (3,)}
  )
  assert schema.resolve(config, ENGINES).config == config


@pytest.mark.parametrize(
  ("given", "value"),
  [(4, [4]), ((4, 8), [4, 8]), ([16], [16]), (range(2, 4), [2, 3])],
)
def test_lists_may_be_written_in_many_ways(given, value):
  assert resolved({"workers": given})["workers"] == value
  assert resolved(workers=given)["workers"] == value


@pytest.mark.parametrize(
  "given", ["asgd,dana", " asgd, dana ,", ("asgd", "dana"), ["asgd", "dana"]]
)
def test_lists_of_names_may_be_a_text(given):
  labels = {**ASGD, "dana": {"recipe": "dana_zero"}}
  assert resolved({"only": given}, runs=labels)["only"] == ["asgd", "dana"]


def test_overrides_reach_what_the_file_leaves_out():
  config = resolved(
    [
      ("only", "asgd"),
      ("runs.asgd.momentum", 0.5),
      ("order.bound", 3),
      ("order.name", "stale_synchronous"),
      ("data.augment", True),
      ("mesh.zero", 1),
    ]
  )
  assert config["only"] == ["asgd"]
  assert config["runs"]["asgd"] == {"recipe": "asgd", "momentum": 0.5}
  assert config["order"] == {"name": "stale_synchronous", "bound": 3}
  assert config["data"]["augment"] is True
  assert config["data"]["name"] == "digits"
  assert config["mesh"]["zero"] == 1


def test_overrides_reach_the_sections_of_a_run():
  order = {"name": "stale_synchronous", "bound": 2}
  chosen = runs(
    [
      ("runs.asgd.order.bound", 4),
      ("runs.new.order.name", "asynchronous"),
      ("runs.new.momentum", 0.5),
      ("runs.new.recipe", "dana_zero"),
      ("runs.mesh.axes.data", 2),
      ("runs.mesh.engine", "mesh"),
    ],
    order=order,
  )
  assert chosen["asgd"].config["order"] == {**order, "bound": 4}
  assert chosen["new"].config["order"] == {"name": "asynchronous"}
  assert chosen["new"].options == {"momentum": 0.5}
  assert chosen["mesh"].config["mesh"]["axes"] == {"data": 2}


def test_another_name_drops_the_arguments_of_the_old_one():
  model = {"name": "mlp", "hidden": (9,)}
  config = resolved(
    [("model.features", (4,)), ("model.name", "cnn")], model=model
  )
  assert config["model"] == {"name": "cnn", "features": [4]}
  same = resolved([("model.name", "mlp")], model=model)
  assert same["model"] == {"name": "mlp", "hidden": [9]}
  other = resolved(
    {"optimizer.name": "lion"}, optimizer={"name": "sgd", "momentum": 0.9}
  )
  assert other["optimizer"] == {"name": "lion"}
  new = resolved({"optimizer.b1": 0.8, "optimizer.name": "lion"})
  assert new["optimizer"] == {"name": "lion", "b1": 0.8}
  augmented = {"name": "fashion", "augment": True, "partition": "sharded"}
  data = resolved({"data.name": "digits"}, data=augmented)["data"]
  assert (data["augment"], data["partition"]) == (False, "shared")
  data = resolved({"data.partition": "sharded", "data.name": "digits"})["data"]
  assert data["partition"] == "sharded"


def test_another_recipe_drops_options_that_it_has_not():
  mine = {
    "recipe": "dc_asgd_c",
    "title": "Mine",
    "strength": 2.0,
    "momentum": 0.9,
    "workers": (2,),
    "learning_rate": 0.5,
  }
  config = resolved({"runs.mine.recipe": "asgd"}, runs={"mine": mine})
  assert config["runs"]["mine"] == {
    "recipe": "asgd",
    "title": "Mine",
    "momentum": 0.9,
    "workers": [2],
    "learning_rate": 0.5,
  }


def test_another_schedule_drops_what_follows_from_the_old_one():
  mine = {
    "recipe": "asgd",
    "engine": "pipeline",
    "schedule": "pipedream_2bw",
    "every": 4,
    "weights": "2bw",
    "title": "2BW",
    "stages": 3,
  }
  config = resolved(
    {"runs.mine.microbatches": 6, "runs.mine.schedule": "gpipe"},
    runs={"mine": mine},
  )
  assert config["runs"]["mine"] == {
    "recipe": "asgd",
    "engine": "pipeline",
    "schedule": "gpipe",
    "stages": 3,
    "microbatches": 6,
  }


def test_overriding_leaves_the_file_as_it_was():
  config = ml_collections.ConfigDict({"runs": ASGD}).lock()
  overrides_lib.override(config, {"runs.asgd.momentum": 0.5}, ENGINES)
  assert "momentum" not in config.runs.asgd


test_an_override_of_nothing_names_the_nearest = kit.refuses(
  [
    ("run.asgd.momentum", "'run'; did you mean 'runs'"),
    ("runs.adsg.momentum",
     "'runs.adsg' .a new run begins with runs.adsg.recipe.; did you mean"),
    ("runs.asgd.name", "unknown config key 'runs.asgd.name' .*'asgd'.; known"),
    ("runs.asgd.ordr.name", "'runs.asgd.ordr'; did you mean 'order'.*momentum"),
    ("runs.asgd.title.name", "'title' has no keys below it"),
    ("epochs.many", "'epochs' has no keys below it"),
  ],
  lambda path: resolved([(path, "1")]),
)


@pytest.mark.parametrize("config", [None, 3, [("a", 1)]])
def test_a_config_must_be_a_dict(config):
  with pytest.raises(ValueError, match="must return a ConfigDict"):
    overrides_lib.override(config, {}, ENGINES)


@pytest.mark.parametrize(
  ("key", "nearest"),
  [
    ("lr", "learning_rate"),
    ("epocs", "epochs"),
    ("bs", "batch_size"),
    ("worker", "workers"),
    ("algorithms", None),
  ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
  hint = f"; did you mean '{nearest}'" if nearest else ""
  with pytest.raises(ValueError, match=f"^unknown config key '{key}'{hint}"):
    resolved(**{key: 1})


# Runs, and what each sets for itself.


MANY = {
  "sim": {"recipe": "dana_zero", "workers": (2, 3), "momentum": 0.5},
  "live": {"recipe": "asgd", "engine": "threads", "batch_size": 16},
  "pipe": {
    "engine": "pipeline",
    "schedule": "gpipe",
    "stages": 4,
    "title": "GPipe",
    "learning_rate_schedule": {"decay_epochs": (2.0,)},
  },
  "mesh": {
    "engine": "mesh",
    "axes": "data:8",
    "optimizer": {"name": "adamw", "b2": 0.95},
    "learning_rate": 0.01,
  },
}


def test_a_run_is_the_whole_config_as_it_holds_for_it():
  by_label = runs(
    runs=MANY,
    batch_size=64,
    learning_rate_schedule={"warmup_epochs": 1.0, "decay_epochs": (5.0,)},
  )
  assert list(by_label) == ["sim", "live", "pipe", "mesh"]
  sim, live, pipe, mesh = by_label.values()
  assert (sim.engine, sim.recipe, sim.title) == ("simulate", "dana_zero", "sim")
  assert sim.options == {"momentum": 0.5}
  assert sim.config["workers"] == [2, 3]
  assert live.config["batch_size"] == 16
  assert live.config["workers"] == [8]
  assert [r.config["batch_size"] for r in (sim, pipe, mesh)] == [64] * 3
  assert (pipe.title, pipe.recipe) == ("GPipe", "asgd")
  assert pipe.config["pipeline"]["schedule"] == "gpipe"
  assert pipe.config["pipeline"]["stages"] == 4
  # What a run does not name of a section is as the config has it.
  assert pipe.config["learning_rate_schedule"]["warmup_epochs"] == 1.0
  assert pipe.config["learning_rate_schedule"]["decay_epochs"] == [2.0]
  assert sim.config["learning_rate_schedule"]["decay_epochs"] == [5.0]
  assert mesh.config["mesh"]["axes"] == {"data": 8}
  assert sim.config["optimizer"] is None
  assert mesh.config["optimizer"] == {"name": "adamw", "b2": 0.95}
  assert mesh.config["learning_rate"] == 0.01
  for run in by_label.values():
    assert "runs" not in run.config


def test_a_run_may_have_sections_of_its_own():
  (mine,) = runs(
    runs={
      "mine": {
        "recipe": "asgd",
        "order": {"name": "stale_synchronous", "bound": 2},
        "gate": {"max_staleness": 3},
      }
    }
  ).values()
  assert mine.config["order"] == {"name": "stale_synchronous", "bound": 2}
  assert mine.config["gate"] == {"max_staleness": 3}


def test_only_chooses_and_orders():
  assert list(runs(runs=MANY, only=("mesh", "sim"))) == ["mesh", "sim"]
  assert list(runs(runs=MANY)) == list(MANY)


# Another engine.


@pytest.mark.parametrize("engine", ENGINES)
def test_retargeting_moves_all_runs_and_drops_foreign_settings(engine):
  before = {"runs": copy.deepcopy(MANY), "batch_size": 64, "workers": (1,)}
  moved = overrides_lib.use_engine(before, engine, ENGINES)
  assert before["runs"] == MANY
  by_label = schema.resolve(moved, ENGINES).runs
  assert {run.engine for run in by_label.values()} == {engine}
  assert by_label["live"].config["batch_size"] == 16
  assert by_label["sim"].options == {"momentum": 0.5}
  assert by_label["mesh"].config["learning_rate"] == 0.01
  if engine != "pipeline":
    assert "schedule" not in moved["runs"]["pipe"]
  if engine != "mesh":
    assert "axes" not in moved["runs"]["mesh"]


def test_retargeting_keeps_what_is_wrong_to_be_told():
  moved = overrides_lib.use_engine(
    {"runs": {"a": {"recipe": "asgd", "momentun": 1}}}, "mesh", ENGINES
  )
  words = "'runs.a.momentun'.*; did you mean 'momentum'"
  with pytest.raises(ValueError, match=words):
    schema.resolve(moved, ENGINES)
  with pytest.raises(ValueError, match="unknown engine 'mehs'; .* 'mesh'"):
    overrides_lib.use_engine({"runs": ASGD}, "mehs", ENGINES)


# What is wrong.


def leaves(node, path=()):
  for key, inner in schema.keys_of(node).items():
    if isinstance(inner, schema.Setting):
      yield (*path, key), inner
    else:
      yield from leaves(inner, (*path, key))


SETTINGS = dict(leaves(schema.sections(ENGINES)))
ODD = float("nan"), float("inf"), -1, 10**400, "odd", {"odd": 1}, True, [[1]]
ODD += ([None], {}, 10**40)


@pytest.mark.parametrize("path", SETTINGS, ids=".".join)
def test_each_setting_takes_its_default_and_names_itself_otherwise(path):
  setting, key = SETTINGS[path], ".".join(path)
  default = schema.plain_data(setting.default)
  assert setting.check(default, key) == default
  refused = 0
  for odd in ODD:
    try:
      setting.check(odd, key)
    except ValueError as error:
      assert key in str(error), (odd, error)
      assert len(str(error)) < 250 or "known: " in str(error)
      refused += 1
  # A name may be any text; what it selects is found out elsewhere.
  assert refused >= 8 or path == ("runs",)


MISTAKES = (
  ({"live.refil": 1}, "did you mean 'refill'"),
  ({"server.shard": 1}, "did you mean 'shards'"),
  ({"order.name": "asynchronous", "order.depht": 1}, "did you mean 'depth'"),
  ({"epocs": 3}, "unknown config key 'epocs'; did you mean 'epochs'"),
  ({"learning_rate_schedule.warmup_epoch": 1},
   "'learning_rate_schedule.warmup_epoch'; did you mean 'warmup_epochs'"),
  ({"learning_rate_schedule": 3},
   "config.learning_rate_schedule must be a dict"),
  ({"order": "bulk_synchronous"},
   "config.order must be a dict, .*; set config.order.name='bulk_synchronous'"),
  ({"workers": (8, 0)}, "config.workers must be .* not 0"),
  ({"workers": (8, 8)}, r"a list of different values, not \[8, 8\]"),
  ({"workers": ()}, "config.workers must be a list of at least 1"),
  ({"workers": "many"}, "config.workers must be"),
  ({"seeds": (-1,)}, "config.seeds must be .* not -1"),
  ({"epochs": 0}, "config.epochs must be a number above 0"),
  ({"learning_rate": float("nan")}, "learning_rate must be .* not nan"),
  ({"learning_rate": float("inf")}, "learning_rate must be .* not inf"),
  ({"batch_size": True}, "batch_size must be a whole number"),
  ({"batch_size": 2.5}, "batch_size must be a whole number"),
  ({"batch_size": 5000}, "larger than the 1437 training examples"),
  ({"batch_size": 300, "data.partition": "sharded"},
   "training examples of a shard"),
  ({"on_nan": "ignore"}, "on_nan must be 'stop' or 'record'"),
  ({"model.name": "mpl"}, "unknown model 'mpl'; did you mean"),
  ({"model.name": "mlp", "model.hiden": 3}, "did you mean 'hidden'"),
  ({"model.name": "mlp", "model.classes": 3},
   "^config.model.classes follows from other keys; drop it"),
  ({"order.name": "asynch"}, "unknown order 'asynch'"),
  ({"order.name": "stale_synchronous", "order.bound": "two"},
   "bound must be a number, 0 or more, not 'two'"),
  ({"order.name": "stale_synchronous"}, "needs .* 'bound'"),
  ({"durations.name": "gama"}, "did you mean 'gamma'"),
  ({"data.name": "digit"}, "did you mean 'digits'"),
  ({"engine": "thread"},
   "^config.engine: unknown engine 'thread'; did you mean 'threads'"),
  ({"runs.a.recipe": "asgd", "runs.a.engine": 3},
   "^config.runs.a.engine: unknown engine 3"),
  ({"runs.a": {}}, "must be a dict with a recipe"),
  ({"runs.a.recipe": "asgdd"},
   "^config.runs.a: unknown .* 'asgdd'; did you mean 'asgd'"),
  ({"runs": {}}, "^config.runs names no run"),
  ({"runs": [1]}, "^config.runs names no run"),
  ({"runs.a": 3}, "config.runs.a must be a dict with a recipe"),
  ({"runs.a.recipe": "asgd", "runs.a.momentun": 1},
   "'runs.a.momentun'.*; did you mean 'momentum'"),
  ({"runs.a.recipe": "asgd", "runs.a.schedule": "gpipe"},
   "'runs.a.schedule' .engine 'simulate', recipe 'asgd'"),
  ({"runs.a.engine": "mesh", "runs.a.zeros": 1},
   "'runs.a.zeros' .engine 'mesh', recipe 'asgd'.; did you mean 'zero'"),
  ({"runs.a.engine": "mesh", "runs.a.zero": 4},
   "^config.runs.a.zero must be a whole number from 0 to 3, not 4"),
  ({"pipeline.schedule": "gpipe", "pipeline.stage": 3},
   "'pipeline.stage'; did you mean 'stages'"),
  ({"pipeline.schedule": "pipedreem"},
   "^config.pipeline: unknown .*'pipedreem'; did you mean 'pipedream'"),
  ({"runs.a.recipe": "asgd", "runs.a.title": "T", "runs.b.recipe": "ssgd",
    "runs.b.title": "T"},
   "config.runs.b and .a have the same title 'T'"),
  ({"runs": {"../a": {"recipe": "asgd"}}}, "names a folder"),
  ({"data.augment": "no"}, "augment must be True or False"),
  ({"order.name": "fixed_delay", "order.delay": 3},
   "config.order.delay follows from other keys"),
  ({"workers": (10**9,)}, "from 1 to 10000"),
  ({"epochs": 1e9}, "messages in one cell; use at most"),
  ({"learning_rate_schedule.decay_epochs": ("a",)},
   "^config.learning_rate_schedule.decay_epochs must be a number .* not 'a'"),
  ({"runs.a.recipe": "asgd", "runs.a.momentum": "x"},
   "^config.runs.a.momentum must be a number .* not 'x'"),
  ({"runs.a.recipe": "asgd", "runs.a.momentum": []},
   r"^config.runs.a.momentum must be a number .* not \[\]"),
  ({"runs.a.recipe": "asgd", "runs.a.weight_decay": True},
   "^config.runs.a.weight_decay must be a number .* not True"),
  ({"durations.name": "gamma", "durations.seed": "x"},
   "^config.durations.seed must be a whole number, 0 or more, not 'x'$"),
  ({"model.name": "mlp", "model.hidden": (10**12,)},
   "^config.model: each width of hidden must be at most 1000000, not 1000000"),
  ({"durations.name": "constant", "durations.mean": 1e999}, "not inf$"),
  ({"model.name": "cnn", "model.features": (8, 8, 8, 8)}, "8"),
  ({"runs.a.recipe": "asgd", "runs.a.learning_rate": -1},
   "^config.runs.a.learning_rate must be a number above 0"),
  ({"runs.a.recipe": "asgd", "runs.a.workers": (0,)},
   "^config.runs.a.workers must be .* not 0"),
  ({"only": ("dana",)}, "unknown label in config.only 'dana'"),
  ({"seeds": object()}, "^config.seeds is <object .*a config holds"),
  ({"model.name": "mlp", "model.hidden": np.arange(3)},
   "^config.model.hidden is array.*, and a config holds numbers"),
  ({"runs.a.recipe": "diloco"},
   "1 is 44 batches, and one message from each of 8 workers takes 4000"),
  ({"runs.a.recipe": "downpour", "runs.a.fetch_every": 3,
    "order.name": "asynchronous", "order.fetch_every": 2},
   "order.fetch_every is 2, but the recipe has 3 jobs on a ticket"),
  ({"runs.a.recipe": "downpour", "runs.a.fetch_every": 3,
    "order.name": "fixed_delay"},
   "'fixed_delay' takes no argument 'fetch_every'"),
  ({"runs.a.recipe": "downpour", "runs.a.push_every": 2,
    "runs.a.fetch_every": 3, "compress.name": "sign"},
   "^config.compress is not for config.runs.a, .*: 1 of 2 jobs push nothing"),
  ({"order.name": "asynchronous", "order.warm_start_epochs": 2},
   "^config.order.warm_start_epochs 2 is 88 messages .* a cell has 40 in all"),
  ({"order.warm_start_epochs": 0.1, "order.warm_start": 2},
   "^config.order.warm_start and .warm_start_epochs say the same thing"),
  ({"order.name": "asynchronous", "order.stage_epochs": ((1, 2),)},
   "^config.order.stage_epochs .* has a stage of 1 workers until message 88, "),
  ({"order.name": "asynchronous", "order.stages": ((9, 5),)},
   "^config.order.stages .* has a stage of 9 workers .* a cell has 8 workers"),
  ({"order.name": "asynchronous", "order.stage_epochs": (1, 2)},
   "^config.order.stage_epochs must be pairs .workers, epochs., as"),
  ({"order.name": "asynchronous", "order.stage_epochs": 3},
   "^config.order.stage_epochs must be pairs .*, not 3$"),
  ({"order.stage_epochs": ((1, 0.1),), "order.stages": ((1, 2),)},
   "^config.order.stages and .stage_epochs say the same thing; drop one"),
  ({"order.name": "backup_tasks", "order.late": 0.5},
   "^config.order.late must be a number, 1 or more, not 0.5"),
  ({"order.name": "backup_tasks"},
   "^config.order: .*'backup_tasks' needs .*'late'"),
  ({"order.name": "backup_tasks", "order.late": 2, "data.name": "digits",
    "data.partition": "sharded"},
   "^config.order.name 'backup_tasks' hands a worker's job to another"),
  ({"engine": "threads", "live.overlap": True},
   "^config.live.overlap needs config.order.depth=2 or more, not 1"),
  ({"order.name": "fixed_delay", "order.warm_start": 2},
   "'fixed_delay' takes no argument 'warm_start'"),
  ({"order": {**STALE, "cache": "yes"}},
   "^config.order.cache must be True or False, not 'yes'"),
  ({"order.name": "asynchronous", "order.depth": 10**20},
   "^config.order.depth must be at most 1000, not 100000000000000000000$"),
  ({"order": {**STALE, "bound": [1]}},
   r"^config.order.bound must be a number, 0 or more, not \[1\]"),
  ({"order.name": "backup_workers", "order.backup": "abc"},
   "^config.order.backup must be a whole number .* not 'abc'"),
  ({"order.name": "backup_workers", "order.backup": 8},
   "^config.order.backup must be at most 7, of 8 workers, not 8$"),
  ({"order.name": "asynchronous", "order.fetch_every": 10**20},
   "^config.order.fetch_every makes .* each of 8 workers has 5 in all"),
  ({"runs.a.recipe": "downpour", "runs.a.fetch_every": 6},
   "^config.runs.a.fetch_every makes 6 jobs on one ticket"),
  ({"runs.a.recipe": "staleness_aware", "runs.a.splits": 9},
   "^config.runs.a.splits must be from 1 to the 8 workers, not 9"),
  ({"runs.a.recipe": "asgd", "runs.a.weight_decay": 10**20},
   "^config.runs.a.weight_decay must be a number .*2.14748e.09"),
  ({"clip_norm": 1e99}, "^config.clip_norm must be .* to 1e.30"),
  ({"gate.max_staleness": 10**20},
   "^config.gate.max_staleness must be a whole number from 0 to 100000000"),
  ({"live.slowdown": (1, 1e20)},
   "^config.live.slowdown must be a number from 1 to 10000, not 1e.20"),
  ({"live.late_seconds": 1e300},
   "^config.live.late_seconds must be a number above 0 to 1e.09"),
  ({"engine": "threads", "live.devices": 40},
   "^config.live.devices 40 must divide config.batch_size 32, .* use 8"),
  ({"live.devices": 10**9},
   "^config.live.devices must be a whole number from 1 to 256"),
  ({"server.shards": 10**9},
   "^config.server.shards must be a whole number from 1 to 256"),
  ({"engine": "threads", "server.shards": 256, "model.name": "mlp",
    "model.hidden": (3,)},
   "^config.server.shards must be at most 80, the rows"),
  ({"server.log": 10**20}, "^config.server.log must be .*to 10000"),
  ({"engine": "threads", "server.shards": 2, "server.consistent": True,
    "server.log": 0},
   "^config.server.consistent needs a log"),
  ({"engine": "threads", "order.name": "fixed_delay"},
   "^config.order.name 'fixed_delay' is for simulations only"),
  ({"engine": "threads", "runs.a.recipe": "ringmaster_asgd",
    "runs.a.stops": True},
   "^config.order.name 'with_stops' is for simulations of one order only"),
  ({"server.shards": 2, "order.name": "with_stops", "order.stop_after": 3},
   "^config.order.name 'with_stops' is for simulations of one order only"),
  ({"network.latency": 1.0, "runs.a.recipe": "mindflayer_sgd",
    "runs.a.budget": 2.0},
   "'with_stops' is an order that a network cannot delay"),
  ({"runs.a.recipe": "mindflayer_sgd", "runs.a.budget": (1.0, 2.0)},
   "^config.runs.a.budget must be a number, or one for each of the 8 workers"),
  ({"runs.a.recipe": "mindflayer_sgd", "runs.a.budget": 2.0,
    "order.name": "stale_synchronous", "order.bound": 2},
   "^config.order.bound 2 is not for .* prescribes the order with_stops"),
  ({"durations.name": "gamma", "durations.mean": -1},
   "^config.durations.mean must be a positive finite number"),
  ({"learning_rate_schedule.warmup_epochs": 1e300},
   "^config.learning_rate_schedule.warmup_epochs must be a number from 0 to"),
  ({"runs.a.recipe": "downpour", "runs.a.push_every": True},
   "^config.runs.a.push_every must be a whole number, not True"),
  ({"runs.a.recipe": "asgd", "runs.a.learning_rate": 10**50},
   "^config.runs.a.learning_rate must be .* to 1e.30"),
  ({"learning_rate_schedule.warmup_epochs": 2.0,
    "learning_rate_schedule.decay_epochs": (1.0,)},
   "^config.learning_rate_schedule.*inside the warm-up"),
  ({"learning_rate_schedule.name": "cosine_decay",
    "learning_rate_schedule.decay_factor": 0.5},
   "^config.learning_rate_schedule: decay_factor is not for .* 'cosine_decay'"),
  ({"learning_rate_schedule.count": "updates",
    "learning_rate_schedule.decay_epochs": (0.5,)},
   "^config.learning_rate_schedule: count is not for the schedule 'steps'"),
  ({"learning_rate_schedule.warmup_epochs": 2.0,
    "learning_rate_schedule.warmup_examples": 9},
   "^config.learning_rate_schedule.*warmup_epochs and warmup_examples say the"
   " same thing; drop one"),
  ({"mesh.axes": "data:2,tensr:2"},
   "unknown axis 'tensr' of config.mesh.axes; did you mean 'tensor'"),
  ({"optimizer.name": "adamv"},
   "^config.optimizer: unknown optimizer 'adamv'; did you mean"),
  ({"engine": "mesh", "mesh.axes.data": 8, "batch_size": 20},
   "^config.batch_size 20 cannot be divided into 8 pieces"),
  ({"engine": "mesh", "runs.a.recipe": "easgd"},
   r"^config.mesh.axes: the workers of the recipe 'easgd' \(config.runs.a\)"
   " take local steps, and the 8 islands of a mesh make one update"),
  ({"engine": "pipeline", "runs.a.recipe": "easgd"}, "^config.runs.a"),
)


test_what_is_wrong_with_a_config_is_named = kit.refuses(
  MISTAKES, lambda config: build(**kit.nested(config))
)


def test_a_required_placeholder_without_a_value_is_named():
  missing = ml_collections.config_dict.required_placeholder(str)
  config = ml_collections.ConfigDict({"runs": ASGD, "data": {"name": missing}})
  message = "^config.data.name is a required placeholder without a value"
  with pytest.raises(ValueError, match=message):
    schema.resolve(config, ENGINES)


def test_large_values_that_are_taken_can_be_computed_with():
  exp = build(
    clip_norm=10**20, gate={"max_staleness": 10**8}, learning_rate=10**20
  )
  (cell,) = exp.cells
  plan = exp.plan(cell)
  shapes = jax.eval_shape(plan.problem.init, jax.random.key(0))
  state = jax.eval_shape(plan.server.init, shapes)
  ticket = jax.eval_shape(plan.server.send, state, np.int32(0))
  jax.eval_shape(plan.server.receive, state, ticket, shapes)


def test_a_worker_of_many_weights_may_have_any_number_of_devices():
  exp = build(live={"devices": 40, "parallel": "tensor"})
  assert exp.config["live"]["devices"] == 40
