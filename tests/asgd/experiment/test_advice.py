"""Advice on distributing a config: its rules by hand, and what it proposes."""

import ast
import math

import jax
import kit
import pytest

from asgd import algorithms
from asgd.experiment import advice, build, overrides, schema, ways
from asgd.experiment.ways import CODED, LOCAL, MESH, ONE_MACHINE, Way
from asgd.orders.network import Network
from launch import flags

ASYNCHRONOUS = ways.ASYNCHRONOUS
EQUAL = 1.0, 1.0, 1.0, 1.0
TRAINING = ways.StepRule(0.1, 0.0, None, {}, None, None)
WITH_MOMENTUM = TRAINING._replace(
  momentum=0.9, repeated_options={"momentum": 0.9}
)
ADAM = TRAINING._replace(optimizer={"name": "adam"})
# A step takes 1 s; 100 parameters; a run of 1,000 steps.
MEASURED = ways.StepCosts((1.0, 1.0), 1000.0, 100, 400, 40, 1000, 2.0)


def cluster(machines=2, slowness=EQUAL, memory=1e9, start=10.0, **network):
  links = {**dict.fromkeys(("up", "down", "port"), 1e15), **network}
  slowness = slowness[:machines]
  return ways.Machines(machines, Network(**links), memory, start, slowness)


def speeds(found):
  return {way.name: (way.workers, round(way.speed, 6)) for way in found}


# Ways, played.


def test_messages_of_half_a_second_each_way_halve_the_speed():
  # Asynchronous: a job takes 0.5 + 1 + 0.5, so two workers are as fast as one
  # machine. Mesh: 1 + 2 messages of 0.5. Local: 4 + 1 for 4 steps of each of 2
  # workers; 16 steps take 17, and 64 take 65, a tenth more than those.
  found = ways.find_ways(MEASURED, cluster(latency=0.5), TRAINING)
  assert speeds(found) == {
    ONE_MACHINE: (1, 1.0),
    MESH: (2, 1.0),
    ASYNCHRONOUS: (2, 1.0),
    CODED: (2, 1.0),
    LOCAL: (2, round(32 / 17, 6)),
  }
  assert found[-1].steps == 16


def test_a_codec_shortens_both_directions():
  # 400 bytes take 1 s on a link; codes take 0.1 s up, and two of them 0.2 s
  # down. Two tickets and two messages meet at the port.
  rates = dict.fromkeys(("up", "down", "port"), 400.0)
  found = speeds(ways.find_ways(MEASURED, cluster(**rates), TRAINING))
  assert found[CODED] == (2, pytest.approx(2 / 1.3, rel=0.02))
  assert found[ASYNCHRONOUS][1] < 0.75
  given = TRAINING._replace(up={"name": "top_k"}, down={"name": "top_k"})
  own = speeds(ways.find_ways(MEASURED, cluster(**rates), given))
  assert own[ASYNCHRONOUS] == found[CODED] and CODED not in own


def test_rounds_wait_for_the_slowest_machine():
  slow = cluster(4, (4.0, 1.0, 1.0, 1.0))
  found = speeds(ways.find_ways(MEASURED, slow, TRAINING))
  assert found[MESH] == (4, 1.0)  # 4 batches in 4 s
  assert found[ASYNCHRONOUS] == (4, pytest.approx(3.25, rel=0.05))
  slow = cluster(4, (1.0, 1.0, 1.0, 4.0))
  found = speeds(ways.find_ways(MEASURED, slow, TRAINING))
  assert found[MESH] == (3, 3.0)  # without the slow one


def test_the_fewest_workers_that_are_fast_enough():
  # The server takes 0.5 s for a message, so 2 messages a second at most.
  found = ways.find_ways(MEASURED, cluster(4, service=0.5), TRAINING)
  way = next(way for way in found if way.name == ASYNCHRONOUS)
  assert way.workers == 3 and way.speed == pytest.approx(2.0, rel=0.02)


def test_one_machine_has_one_way():
  one_way = (Way(ONE_MACHINE, 1, 1.0),)
  assert ways.find_ways(MEASURED, cluster(1), TRAINING) == one_way


def test_machines_are_compared_with_the_median_one():
  section = {"name": "constant", "mean": 2.0, "slowdown": [1, 3, 1]}
  assert ways.slowness(section, 3) == (1.0, 3.0, 1.0)
  assert ways.are_unequal(cluster(3, (1.0, 3.0, 1.0)))
  assert not ways.are_unequal(cluster(2, (1.0, 1.2)))


@pytest.mark.parametrize(
  ("fastest", "start", "chosen"),
  [
    ((1.2, 1.2), 0.0, ONE_MACHINE),  # 1.2 times is not worth it
    ((1.6, 1.9), 10.0, MESH),  # 1.9 is less than 1.25 times 1.6
    ((1.6, 2.1), 10.0, ASYNCHRONOUS),
    ((1.6, 2.1), 520.0, ASYNCHRONOUS),  # 520 + 1000 / 2.1 < 1000
    ((1.6, 2.1), 530.0, ONE_MACHINE),
  ],
)
def test_the_simplest_way_that_is_nearly_the_fastest(fastest, start, chosen):
  mesh, asynchronous = fastest
  found = [Way(ONE_MACHINE, 1, 1.0), Way(MESH, 4, mesh)]
  found += [Way(ASYNCHRONOUS, 4, asynchronous)]
  assert ways.choose(found, MEASURED, cluster(start=start)).name == chosen


# Recipes, rates, memory.


@pytest.mark.parametrize(
  ("way", "training", "options", "recipe", "number"),
  [
    (Way(ONE_MACHINE, 1, 1.0), TRAINING, {}, "asgd", "Nothing is stale"),
    (Way(MESH, 4, 3.0), TRAINING, {}, "ssgd", "Nothing is stale"),
    (Way(ASYNCHRONOUS, 8, 4.0, 7, 9), TRAINING, {}, "asgd", "up to 8"),
    (Way(ASYNCHRONOUS, 9, 4.0, 8, 9), TRAINING, {}, "dc_asgd_a", "9 workers"),
    (Way(ASYNCHRONOUS, 4, 4.0, 3, 5), WITH_MOMENTUM, {}, "dana_zero", "0.9"),
    (
      Way(ASYNCHRONOUS, 4, 4.0, 3, 5),
      WITH_MOMENTUM._replace(down={"name": "top_k"}),
      *({}, "multi_asgd", "0.9"),
    ),
    # 4 velocities, their sum and one on its way: 2.4 kB of 100 parameters.
    (
      *(Way(ASYNCHRONOUS, 4, 4.0, 3, 5), WITH_MOMENTUM, {"memory": 2e3}),
      *("dana_slim", "2.4 kB"),
    ),
    (
      *(Way(ASYNCHRONOUS, 2, 1.2, 1, 9), WITH_MOMENTUM),
      *({"slowness": (5.0, 1.0)}, "dana_zero", "0.9"),
    ),
    (
      *(Way(ASYNCHRONOUS, 2, 1.2, 1, 9), TRAINING),
      *({"slowness": (5.0, 1.0)}, "gap_aware", "5 times as long"),
    ),
    (
      *(Way(ASYNCHRONOUS, 2, 1.2, 1, 9), ADAM),
      *({"slowness": (5.0, 1.0)}, "asgd", "adam"),
    ),
    (Way(CODED, 4, 4.0), WITH_MOMENTUM, {}, "asgd", "codec dgc"),
    (Way(CODED, 4, 4.0), TRAINING, {}, "asgd", "codec top_k"),
    (Way(LOCAL, 4, 4.0, steps=16), TRAINING, {}, "model_averaging", "16"),
    (Way(LOCAL, 4, 4.0, steps=16), ADAM, {}, "diloco", "16"),
    (
      *(Way(LOCAL, 2, 2.0, steps=4), TRAINING, {"slowness": (1.0, 2.0)}),
      *("fedasync", "4"),
    ),
  ],
)
def test_the_recipe_follows_the_table(way, training, options, recipe, number):
  machines = cluster(way.workers, **options)
  name, why = advice.recipe_for(way, training, machines, MEASURED.dense)
  assert name == recipe and number in why


def test_rows_of_the_table_are_in_the_order_of_the_rules():
  page = (kit.ROOT / "docs/howto/choosing.md").read_text()
  table = page.partition("## Which asynchronous recipe?")[2]
  rows = [line.split("|")[1:3] for line in table.splitlines() if "|" in line]
  slow = (5.0, *[1.0] * 9)
  cases = [  # all that could answer a later question with yes do so, too
    ("optimizer", ADAM._replace(momentum=0.9), 4, slow),
    ("momentum", WITH_MOMENTUM, 4, slow),
    ("4 times", TRAINING, 4, slow),
    ("at most 8", TRAINING, 8, (1.0,) * 10),
    ("more than 8", TRAINING, 9, (1.0,) * 10),
  ]
  for (question, choice), case in zip(rows[2:7], cases, strict=True):
    word, training, workers, slowness = case
    machines = cluster(10, slowness)
    way = Way(ASYNCHRONOUS, workers, 3.0, 3.0, 9)
    name, _ = advice.recipe_for(way, training, machines, 400)
    assert word in question and choice.split("`")[1] == name


@pytest.mark.parametrize(
  ("way", "training", "sharpness", "limit", "rate", "warm_up", "words"),
  [
    ((ASYNCHRONOUS, 4), TRAINING, 2.0, 0.2, 0.1, False, "stable from the"),
    ((ASYNCHRONOUS, 4), TRAINING, 2.0, 0.1, 0.1, True, "warm-up from 0.025"),
    # 4 x 0.04 / 2: the warm-up from a quarter of it begins at the limit.
    ((ASYNCHRONOUS, 4), TRAINING, 2.0, 0.04, 0.08, True, "0.08 instead of"),
    ((ONE_MACHINE, 1), TRAINING, 40.0, 2.0, 0.05, False, "0.05 instead of 0.1"),
    ((MESH, 4), TRAINING, 1.0, 2.0, 0.4, True, "multiplied by 4"),
    ((MESH, 4), ADAM, math.nan, math.nan, 0.2, True, "the root of 4"),
    ((LOCAL, 4), TRAINING, 2.0, math.nan, 0.1, False, "is not known"),
  ],
)
def test_the_rate_begins_below_the_limit(
  way, training, sharpness, limit, rate, warm_up, words
):
  given = Way(*way, 2.0), training, sharpness, limit
  found, warms_up, why = advice.rate_for(*given)
  assert (found, warms_up) == (pytest.approx(rate), warm_up)
  assert words in why


@pytest.mark.parametrize(
  ("way", "name", "training", "limit"),
  [
    # Two equal workers have a delay of 1: 2 sin(pi / 6) = 1.
    ((ASYNCHRONOUS, 2), "asgd", TRAINING, 1.0),
    ((CODED, 2), "asgd", TRAINING, 1.0),
    ((MESH, 2), "ssgd", TRAINING, 2.0),
    ((MESH, 2), "ssgd", WITH_MOMENTUM, 3.8),  # 2 (1 + momentum)
    ((ASYNCHRONOUS, 2), "asgd", ADAM, math.nan),
    ((LOCAL, 2), "model_averaging", TRAINING, math.nan),
  ],
)
def test_the_limit_is_that_of_delayed_sgd(way, name, training, limit):
  given = name, Way(*way, 2.0), training, MEASURED, cluster()
  # The limit is the last stable point of a grid with steps of a quarter.
  found = advice.stability_limit(*given)
  if math.isnan(limit):
    assert math.isnan(found)
  else:
    assert limit / 1.3 < found <= limit


def test_memory_is_that_of_the_recipe():
  way = Way(ASYNCHRONOUS, 4, 3.0)
  given = way, "dana_zero", WITH_MOMENTUM, MEASURED
  # Worker: parameters, gradient and what the backward needs. Server: the
  # parameters, and 6 velocities.
  assert advice.memory_for(*given) == (2 * 400 + 1000, 7 * 400)
  alone = Way(ONE_MACHINE, 1, 1.0), "asgd", WITH_MOMENTUM, MEASURED
  assert advice.memory_for(*alone) == (3 * 400 + 1000, 0.0)


def test_a_model_that_does_not_fit_is_to_be_divided():
  given = MEASURED, cluster(memory=1000.0), TRAINING, kit_config()
  assert "asgd plan" in advice.advise(*given).reasons["memory"]


# Configs.


def kit_config(**changes):
  config = {"runs": {"a": {"recipe": "asgd"}}, **changes}
  return schema.resolve(config, flags.ENGINES).config


def training_of(entry, **changes):
  resolved = schema.resolve({"runs": {"a": entry}, **changes}, flags.ENGINES)
  return ways.step_rule(resolved.runs["a"], resolved.config)


def test_how_a_run_takes_its_steps():
  found = training_of({"recipe": "nag_asgd", "learning_rate": 0.5})
  assert found[:4] == (0.5, 0.9, None, {"momentum": 0.9})
  found = training_of({"recipe": "asgd"}, optimizer="adam")
  assert found[1:4] == (0.0, {"name": "adam"}, {})
  sgd = {"name": "sgd", "momentum": 0.5}
  assert training_of({"recipe": "asgd"}, optimizer=sgd)[1:4] == (0.5, None, {})
  own = training_of({"recipe": "asgd", "optimizer": sgd})
  assert own[1:4] == (0.5, None, {"optimizer": sgd})
  found = training_of({"recipe": "asgd"}, compress="onebit")
  assert ways.message_codec(found) == {"name": "onebit"}


def test_messages_that_are_no_gradients_are_refused():
  with pytest.raises(ValueError, match=r"'table', .* by --config\.only"):
    training_of({"recipe": "table"})


@pytest.mark.parametrize(
  "name", [ONE_MACHINE, MESH, ASYNCHRONOUS, CODED, LOCAL]
)
@pytest.mark.parametrize("optimizer", [None, "adam", {"a": "adamw"}])
def test_the_command_that_is_proposed_is_one(monkeypatch, name, optimizer):
  run = {"recipe": "nag_asgd"} if optimizer is None else {"recipe": "asgd"}
  own = {
    "batch_size": 4,
    "clip_norm": 2.0,
    "learning_rate_schedule": {"decay_epochs": [1.0]},
  }
  run |= own
  if isinstance(optimizer, dict):  # of the run alone
    run["optimizer"], optimizer = optimizer["a"], None
  config = {**kit.TINY_RUN, "runs": {"a": run}, "optimizer": optimizer}
  resolved = schema.resolve(config, flags.ENGINES)
  training = ways.step_rule(resolved.runs["a"], resolved.config)
  chosen = Way(name, 1 if name == ONE_MACHINE else 2, 2.0, 1.0, 1)
  chosen = chosen._replace(steps=4 if name == LOCAL else 1)
  monkeypatch.setattr(advice.ways_lib, "choose", lambda *_: chosen)
  config_of_run = resolved.runs["a"].config
  found = advice.advise(MEASURED, cluster(), training, config_of_run)
  engine, *changes = found.flags
  config = overrides.use_engine(config, engine.partition("=")[2], flags.ENGINES)
  values = {}
  for change in changes:
    key, _, text = change.removeprefix("--config.").partition("=")
    try:
      values[key] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      values[key] = text
  config = overrides.override(config, values, flags.ENGINES)
  resolved = schema.resolve(config, flags.ENGINES)
  (cell,) = build(resolved, engines=flags.ENGINES).cells
  assert cell.workers == (1 if name == MESH else chosen.workers)
  assert resolved.runs["advised"].recipe == found.recipe in algorithms.RECIPES
  # The measured values of the run.
  advised = resolved.runs["advised"].config
  assert advised["clip_norm"] == 2.0
  assert advised["learning_rate_schedule"]["decay_epochs"] == [1.0]
  assert advised["batch_size"] == (8 if name == MESH else 4)


def test_a_mesh_has_no_codec_of_a_server_and_no_durations():
  own = {"compress_down": {"name": "top_k"}, "durations": {"name": "pareto"}}
  rule = TRAINING._replace(repeated_options=own | {"clip_norm": 2.0})
  given = Way(MESH, 2, 2.0), "ssgd", 0.1, False, rule, kit_config()
  flags_of_run = [x for x in advice._flags(*given) if ".advised." in x]
  assert [x.rpartition(".advised.")[2] for x in flags_of_run] == [
    *("recipe=ssgd", "clip_norm=2.0"),
  ]


def test_the_codec_of_a_run_is_repeated():
  own = {"recipe": "asgd", "compress": {"name": "top_k", "density": 0.25}}
  found = training_of(own, compress={"name": "top_k", "density": 0.5})
  assert found.repeated_options == {"compress": {"density": 0.25}}
  found = training_of(own, compress="onebit")
  assert found.repeated_options["compress"]["name"] == "top_k"


def test_a_problem_is_measured():
  experiment = kit.tiny(runs={"a": {"recipe": "asgd"}})
  problem = experiment.problem_of(experiment.runs["a"])
  params = jax.eval_shape(problem.init, jax.random.key(0))
  count = sum(leaf.size for leaf in jax.tree.leaves(params))
  found = ways.measure(problem, TRAINING, 12.0)
  assert found.parameters == count and 4 * count <= found.dense
  assert 0 < found.coded < found.dense
  assert found.batches == 12.0 and min(found.seconds) > 0
  assert found.residuals > 0 and found.sharpness > 0
  assert math.isnan(ways.measure(problem, ADAM, 12.0).sharpness)
