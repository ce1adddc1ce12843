"""Configs: overrides, defaults, and what is wrong with them."""

import jax
import ml_collections
import numpy as np
import pytest

from asgd import base, data, orders
from launch import experiment

ASGD = {"asgd": {"recipe": "asgd"}}


def resolved(overrides=(), **config):
  config = experiment.override({"algorithms": ASGD, **config}, overrides)
  return experiment.resolve(config)


def build(**config):
  return experiment.build({"algorithms": ASGD, **config})


def test_missing_keys_have_their_defaults():
  config = resolved()
  assert config["batch_size"] == 32
  assert config["durations"] == {"name": "homogeneous"}
  assert config["workers"] == [8]


@pytest.mark.parametrize(
  ("text", "value"),
  [("4", [4]), ("4,8", [4, 8]), ("(4, 8)", [4, 8]), ("[16]", [16])],
)
def test_lists_may_be_written_in_many_ways(text, value):
  assert resolved([("workers", text)])["workers"] == value


def test_one_number_may_stand_for_a_list_in_a_file():
  assert resolved(workers=4, seeds=range(3))["seeds"] == [0, 1, 2]
  assert resolved(workers=4)["workers"] == [4]


def test_overrides_reach_what_the_file_leaves_out():
  config = resolved(
    [
      ("only", "asgd,dana"),
      ("algorithms.asgd.momentum", "0.5"),
      ("order.bound", "3"),
      ("order.name", "stale_synchronous"),
      ("data.augment", "true"),
    ]
  )
  assert config["only"] == ["asgd", "dana"]
  assert config["algorithms"]["asgd"] == {"recipe": "asgd", "momentum": 0.5}
  assert config["order"] == {"name": "stale_synchronous", "bound": 3}
  assert config["data"]["augment"] is True
  assert config["data"]["name"] == "digits"


def test_another_name_drops_the_arguments_of_the_old_one():
  model = {"name": "mlp", "hidden": (9,)}
  config = resolved(
    [("model.features", "(4,)"), ("model.name", "cnn")], model=model
  )
  assert config["model"] == {"name": "cnn", "features": [4]}
  same = resolved([("model.name", "mlp")], model=model)
  assert same["model"] == {"name": "mlp", "hidden": [9]}


def test_overriding_leaves_the_file_as_it_was():
  config = ml_collections.ConfigDict({"algorithms": ASGD}).lock()
  experiment.override(config, [("algorithms.asgd.momentum", "0.5")])
  assert "momentum" not in config.algorithms.asgd


def test_seeds_draw_other_orders_and_runs_share_them():
  exp = build(seeds=(0, 1), workers=(4,))
  first, second = (
    experiment.trace(exp, cell, messages=40).time for cell in exp.cells
  )
  assert (first != second).any()
  again = experiment.trace(exp, exp.cells[0], messages=40).time
  np.testing.assert_array_equal(first, again)


def test_cells_go_by_workers_then_algorithm_then_seed():
  exp = experiment.build(
    {
      "algorithms": {
        "a": {"recipe": "asgd"},
        "b": {"recipe": "asgd", "workers": (1,)},
      },
      "workers": (8, 2),
      "seeds": (0, 3),
    }
  )
  assert [cell.name for cell in exp.cells] == [
    *("b-n1-s0", "b-n1-s3"),
    *("a-n2-s0", "a-n2-s3", "a-n8-s0", "a-n8-s3"),
  ]


def test_the_schedule_counts_updates_not_messages():
  exp = experiment.build(
    {
      "algorithms": {
        "ssgd": {"recipe": "ssgd"},
        "asgd": {"recipe": "asgd"},
      },
      "workers": (4,),
      "batch_size": 16,  # 89 batches in an epoch
      "learning_rate": 0.4,
      "schedule": {
        "warmup_epochs": 1.0,
        "decay_epochs": (2.0,),
        "decay_factor": 0.5,
      },
    }
  )
  for label, per_epoch in (("asgd", 89), ("ssgd", 22)):
    (cell,) = (c for c in exp.cells if c.label == label)
    schedule = experiment.plan(exp, cell).schedule
    assert float(schedule(0)) == pytest.approx(0.1)  # the peak over N
    assert float(schedule(per_epoch)) == pytest.approx(0.4)
    # ssgd: 178 batches are 44.5 rounds, rounded to 44.
    assert float(schedule(2 * per_epoch + 1)) == pytest.approx(0.2)


LOCAL = {
  "downpour": {"recipe": "downpour", "push_every": 2, "fetch_every": 4},
  "averaging": {"recipe": "model_averaging", "steps": 2, "momentum": 0.9},
  "easgd": {"recipe": "easgd", "steps": 2},
  "diloco": {"recipe": "diloco", "steps": 2},
  "fedasync": {"recipe": "fedasync", "steps": 2},
}


def local(**config):
  return experiment.build(
    {
      "algorithms": LOCAL,
      "workers": (3,),
      "batch_size": 16,  # 89 batches in an epoch
      "learning_rate": 0.01,
      **config,
    }
  )


@pytest.mark.parametrize("label", LOCAL)
def test_recipes_that_work_locally_run(label):
  exp = local(only=(label,), schedule={"warmup_epochs": 0.1})
  (cell,) = exp.cells
  plan = experiment.plan(exp, cell)
  assert plan.steps == 2
  assert plan.messages == 42  # of 44 jobs of two batches: 14 whole rounds
  assert np.isnan(plan.curvature_limit)
  trace = experiment.trace(exp, cell, messages=6)
  assert orders.check(trace) == 3
  assert (trace.action == base.KEEP).any() == (label == "downpour")
  params = exp.problem.init(jax.random.key(0))
  simulation, records = plan.host.run(
    *(plan.host.init(params, 3), trace, len(trace.action)),
    batch=experiment.batches(exp, cell),
    root=jax.random.key(0),
  )
  assert len(records.loss) == 6
  every = 3 if plan.order == "bulk_synchronous" else 1
  assert int(simulation.server.version) == 6 // every
  for column in records:
    assert np.isfinite(column).all()
  assert (records.message_norm > 0).all()


def test_a_job_is_consecutive_batches_and_takes_their_time():
  exp = local(
    algorithms={**LOCAL, "asgd": {"recipe": "asgd"}},
    only=("asgd", "easgd"),
    workers=(1,),
  )
  two, one = exp.cells
  images, labels = experiment.batches(exp, two)(0, 3)
  assert images.shape == (2, 16, 8, 8, 1)
  for h in range(2):
    image, label = experiment.batches(exp, one)(0, 6 + h)
    np.testing.assert_array_equal(images[h], image)
    np.testing.assert_array_equal(labels[h], label)
  batches, jobs = (
    experiment.trace(exp, cell, messages=n) for cell, n in ((one, 8), (two, 4))
  )
  times = batches.time[batches.action == base.RECEIVE]
  np.testing.assert_allclose(
    jobs.time[jobs.action == base.RECEIVE], times[1::2], rtol=1e-12
  )


def test_the_schedule_counts_updates_of_long_jobs():
  exp = local(
    only=("averaging", "easgd"),
    epochs=2.0,
    schedule={"warmup_epochs": 1.0},
  )
  # 89 batches are 44.5 jobs of two, and 14.8 rounds of three such jobs.
  for cell, updates in zip(exp.cells, (15, 44), strict=True):
    schedule = experiment.plan(exp, cell).schedule
    assert float(schedule(0)) == pytest.approx(0.01 / 3)
    assert float(schedule(updates - 1)) < 0.0099
    assert float(schedule(updates)) == pytest.approx(0.01)


def test_plain_gradients_share_a_worker():
  exp = experiment.build(
    {
      "algorithms": {"a": {"recipe": "asgd"}, "b": {"recipe": "dana_zero"}},
      "workers": (2,),
    }
  )
  before = experiment._gradient_worker.cache_info()
  for cell in exp.cells:
    experiment.plan(exp, cell)
  after = experiment._gradient_worker.cache_info()
  assert after.misses - before.misses == 1
  assert after.hits - before.hits == 1


def test_a_dataset_that_is_loaded_is_used_as_it_is():
  digits = data.load("digits")
  some = digits._replace(
    train_images=digits.train_images[:64], train_labels=digits.train_labels[:64]
  )
  config = {"algorithms": ASGD, "data": {"name": "nowhere"}, "batch_size": 8}
  exp = experiment.build(config, dataset=some)
  assert exp.dataset is some
  assert exp.problem.batches_per_epoch == 8


STALE = {"name": "stale_synchronous", "bound": 1}


def test_large_values_that_are_taken_can_be_computed_with():
  exp = build(
    clip_norm=10**20, gate={"max_staleness": 10**8}, learning_rate=10**20
  )
  (cell,) = exp.cells
  server = experiment.server(exp, cell)
  shapes = jax.eval_shape(exp.problem.init, jax.random.key(0))
  state = jax.eval_shape(server.init, shapes)
  ticket = jax.eval_shape(server.send, state, np.int32(0))
  jax.eval_shape(server.receive, state, ticket, shapes)


def test_a_worker_of_many_weights_may_have_any_number_of_devices():
  exp = build(live={"devices": 40, "parallel": "tensor"})
  assert exp.config["live"]["devices"] == 40


def test_live_runs_begin_together():
  assert resolved()["live"]["together"] is True


MISTAKES = {
  "epocs": ({"epocs": 3}, "unknown config key 'epocs'; did you mean 'epochs'"),
  "schedule.warmup": (
    {"schedule": {"warmup_epoch": 1}},
    "'schedule.warmup_epoch'; did you mean 'warmup_epochs'",
  ),
  "schedule": ({"schedule": 3}, "config.schedule must be a dict"),
  "workers": ({"workers": (8, 0)}, "config.workers must be .* not 0"),
  "twice": ({"workers": (8, 8)}, "different whole numbers"),
  "none": ({"workers": ()}, "at least one"),
  "text": ({"workers": "many"}, "config.workers must be"),
  "seeds": ({"seeds": (-1,)}, "config.seeds must be .* not -1"),
  "epochs": ({"epochs": 0}, "config.epochs must be positive"),
  "nan": ({"learning_rate": float("nan")}, "learning_rate must be positive"),
  "inf": ({"learning_rate": float("inf")}, "learning_rate must be .*finite"),
  "bool": ({"batch_size": True}, "batch_size must be a whole number"),
  "fraction": ({"batch_size": 2.5}, "batch_size must be a whole number"),
  "batch": ({"batch_size": 5000}, "larger than the 1437 training examples"),
  "shard": (
    {"batch_size": 300, "data": {"partition": "sharded"}},
    "training examples of a shard",
  ),
  "on_nan": ({"on_nan": "ignore"}, "on_nan must be 'stop' or 'record'"),
  "model": ({"model": {"name": "mpl"}}, "unknown model 'mpl'; did you mean"),
  "hidden": ({"model": {"name": "mlp", "hiden": 3}}, "did you mean 'hidden'"),
  "order": ({"order": {"name": "asynch"}}, "unknown order 'asynch'"),
  "bound": (
    {"order": {"name": "stale_synchronous", "bound": "two"}},
    "bound must be a number, 0 or more, not 'two'",
  ),
  "needs": ({"order": {"name": "stale_synchronous"}}, "needs .* 'bound'"),
  "durations": ({"durations": {"name": "gama"}}, "did you mean 'gamma'"),
  "data": ({"data": {"name": "digit"}}, "did you mean 'digits'"),
  "recipe": ({"algorithms": {"a": {}}}, "must be a dict with a recipe"),
  "no algorithms": ({"algorithms": {}}, "names no algorithm"),
  "option": (
    {"algorithms": {"a": {"recipe": "asgd", "momentun": 1}}},
    "'algorithms.a.momentun'; did you mean 'momentum'",
  ),
  "label": ({"algorithms": {"../a": {"recipe": "asgd"}}}, "names a folder"),
  "augment": ({"data": {"augment": "no"}}, "augment must be True or False"),
  "reserved": (
    {"order": {"name": "fixed_delay", "delay": 3}},
    "config.order.delay is set by other keys",
  ),
  "too many": ({"workers": (10**9,)}, "from 1 to 10000"),
  "too long": ({"epochs": 1e9}, "messages in one cell; use at most"),
  "kind": (
    {"schedule": {"decay_epochs": ("a",)}},
    "config.schedule has a value of the wrong kind",
  ),
  "momentum": (
    {"algorithms": {"a": {"recipe": "asgd", "momentum": "x"}}},
    "config.algorithms.a has a value of the wrong kind",
  ),
  "seed": (
    {"durations": {"name": "gamma", "seed": "x"}},
    "config.*durations: ",
  ),
  "huge": (
    {"model": {"name": "mlp", "hidden": (10**12,)}},
    "parameters; use at most",
  ),
  "infinite": ({"durations": {"name": "constant", "mean": 1e999}}, "finite"),
  "misfit": (
    {"model": {"name": "cnn", "features": (8, 8, 8, 8)}},
    "8",
  ),
  "rate": (
    {"algorithms": {"a": {"recipe": "asgd", "learning_rate": -1}}},
    "learning_rate must be positive",
  ),
  "own workers": (
    {"algorithms": {"a": {"recipe": "asgd", "workers": (0,)}}},
    "workers must be .* not 0",
  ),
  "only": ({"only": ("dana",)}, "unknown label in config.only 'dana'"),
  "object": ({"seeds": object()}, "a config holds numbers"),
  "short": (
    {"algorithms": {"a": {"recipe": "diloco"}}},
    "1 is 44 batches, and one message from each of 8 workers takes 4000",
  ),
  "fetches twice": (
    {
      "algorithms": {"a": {"recipe": "downpour", "fetch_every": 3}},
      "order": {"name": "asynchronous", "fetch_every": 2},
    },
    "order.fetch_every is 2, but the recipe has 3 jobs on a ticket",
  ),
  "fetch": (
    {
      "algorithms": {"a": {"recipe": "downpour", "fetch_every": 3}},
      "order": {"name": "fixed_delay"},
    },
    "'fixed_delay' takes no argument 'fetch_every'",
  ),
  "push": (
    {
      "algorithms": {
        "a": {"recipe": "downpour", "push_every": 2, "fetch_every": 3}
      }
    },
    "algorithms.a.fetch_every must be a multiple of push_every",
  ),
  "cache": (
    {"order": {**STALE, "cache": "yes"}},
    "^config.order.cache must be True or False, not 'yes'",
  ),
  "depth": (
    {"order": {"name": "asynchronous", "depth": 10**20}},
    "^config.order.depth must be a whole number from 1 to 1000, not 1000",
  ),
  "bound list": (
    {"order": {**STALE, "bound": [1]}},
    r"^config.order.bound must be a number, 0 or more, not \[1\]",
  ),
  "backup": (
    {"order": {"name": "backup_workers", "backup": "abc"}},
    "^config.order.backup must be a whole number .* not 'abc'",
  ),
  "backup all": (
    {"order": {"name": "backup_workers", "backup": 8}},
    "^config.order.backup must be a whole number from 0 to 7",
  ),
  "never fetches": (
    {"order": {"name": "asynchronous", "fetch_every": 10**20}},
    "^config.order.fetch_every makes .* each of 8 workers has 5 in all",
  ),
  "never fetches either": (
    {"algorithms": {"a": {"recipe": "downpour", "fetch_every": 6}}},
    "^config.algorithms.a.fetch_every makes 6 jobs on one ticket",
  ),
  "splits": (
    {"algorithms": {"a": {"recipe": "staleness_aware", "splits": 9}}},
    "^config.algorithms.a.splits must be from 1 to the 8 workers, not 9",
  ),
  "integer": (
    {"algorithms": {"a": {"recipe": "asgd", "weight_decay": 10**20}}},
    "^config.algorithms.a.weight_decay must be a number up to 1e.30",
  ),
  "clip": ({"clip_norm": 1e99}, "^config.clip_norm must be .*at most 1e.30"),
  "gate": (
    {"gate": {"max_staleness": 10**20}},
    "^config.gate.max_staleness must be a whole number from 0 to 100000000",
  ),
  "slowdown": (
    {"live": {"slowdown": (1, 1e20)}},
    "^config.live.slowdown must be factors from 1 to 10000",
  ),
  "late": (
    {"live": {"late_seconds": 1e300}},
    "^config.live.late_seconds must be positive, at most 1e.09",
  ),
  "devices": (
    {"live": {"devices": 40}},
    "^config.live.devices 40 must divide config.batch_size 32, .* use 8",
  ),
  "many devices": (
    {"live": {"devices": 10**9}},
    "^config.live.devices must be a whole number from 1 to 256",
  ),
  "shards": (
    {"server": {"shards": 10**9}},
    "^config.server.shards must be a whole number from 1 to 256",
  ),
  "shards of little": (
    {"server": {"shards": 256}, "model": {"name": "mlp", "hidden": (3,)}},
    "^config.server.shards must be at most 80, the rows",
  ),
  "log": ({"server": {"log": 10**20}}, "^config.server.log must be .*to 10000"),
  "mean": (
    {"durations": {"name": "gamma", "mean": -1}},
    "^config.durations.mean must be positive",
  ),
  "warm-up": (
    {"schedule": {"warmup_epochs": 1e300}},
    "^config.schedule.warmup_epochs must be from 0 to",
  ),
  "own rate": (
    {"algorithms": {"a": {"recipe": "asgd", "learning_rate": 10**50}}},
    "^config.algorithms.a.learning_rate must be at most 1e.30",
  ),
  "decay": (
    {"schedule": {"warmup_epochs": 2.0, "decay_epochs": (1.0,)}},
    "inside the warm-up",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_wrong_with_a_config_is_named(name):
  config, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    build(**config)


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("algoritms.asgd.momentum", "'algoritms'; did you mean 'algorithms'"),
    ("algorithms.adsg.momentum", "'algorithms.adsg'; did you mean 'asgd'"),
    ("epochs.many", "'epochs' has no keys below it"),
  ],
)
def test_an_override_of_nothing_names_the_nearest(path, message):
  with pytest.raises(ValueError, match=message):
    resolved([(path, "1")])


@pytest.mark.parametrize("config", [None, 3, [("a", 1)]])
def test_a_config_must_be_a_dict(config):
  with pytest.raises(ValueError, match="must return a ConfigDict"):
    experiment.override(config, [])
