"""A cell is of the experiment that trained it, whatever a run gives itself."""

import json
import types

import kit
import pytest

import asgd
from asgd import experiment
from asgd.experiment import cells, folder, identities, schema, storage
from asgd.pipeline.engine import PIPELINE
from asgd.problems import descriptions

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
DATASET = {"name": "digits", "sha256": "0"}
SKIP = {"name": "random_skip", "probability": 0.5}


def stored(content):
  """What is read again from a file."""
  return json.loads(storage.to_json(content))


def written(config):
  """Returns config.json, and label -> cell.json of a cell of each run."""
  config, runs = schema.resolve(config, ENGINES)
  dataset = types.SimpleNamespace(source="here")
  identity = folder.identity(
    types.SimpleNamespace(
      config=config, dataset_identity=DATASET, dataset=dataset
    )
  )
  descriptions = {}
  for label, run in runs.items():
    cell = cells.Cell(label, run.title, run.config["workers"][0], 0)
    own = cells.single_cell_config(run, cell)
    description = {"cell": cell._asdict(), "config": own, "dataset": DATASET}
    descriptions[label] = stored(description)
  return stored(identity), descriptions


MESH, LIVE = {"engine": "mesh"}, {"engine": "threads", "recipe": "asgd"}
STAGES = {"engine": "pipeline", "schedule": "pipedream", "stages": 2}
ASGD = {"recipe": "asgd"}
CODEC = {"name": "threshold", "tau": 0.1, "error_feedback": False}
# What a run gives itself: entry of the run.
SHAPES = {
  "a dict with the name of a shared key": MESH | {"axes": {"data": 8}},
  "a dict that another run may extend": MESH | {"axes": {"tensor": 2}},
  "a text that is read as a dict": MESH | {"axes": "data:2,tensor:4"},
  "a dict of options": MESH | {"loss_scale": {"initial": 8.0}},
  "a section": MESH | {"mesh": {"axes": {"data": 4}, "zero": 1}},
  "a section and a key of it": MESH | {"mesh": {"zero": 1}, "accumulate": 2},
  "a number and a list": LIVE | {"slowdown": [1, 2], "late_seconds": 9.0},
  "a live section": LIVE | {"live": {"slowdown": [1, 2]}},
  "an order": ASGD | {"order": {"name": "stale_synchronous", "bound": 3}},
  "durations": ASGD | {"durations": {"name": "constant", "slowdown": [1, 3]}},
  "a codec by name": ASGD | {"compress": "onebit"},
  "a codec with options": ASGD | {"compress": CODEC},
  "a schedule of stages": STAGES,
  "a schedule's section": {"engine": "pipeline", "pipeline": {"stages": 2}},
  "an optimizer": ASGD | {"optimizer": {"name": "adam", "b1": 0.8}},
  "a title, workers and a rate": ASGD
  | {"title": "B", "workers": (1,), "learning_rate": 1},
  "a schedule of rates": ASGD | {"learning_rate_schedule": {"name": "linear"}},
}


@pytest.mark.parametrize("entry", SHAPES.values(), ids=list(SHAPES))
def test_nested_settings_that_a_run_gives_itself_are_of_its_cell(entry):
  other = {"recipe": "asgd", "engine": entry.get("engine", "simulate")}
  axes, scale = {"pipe": 2, "data": 2}, {"initial": 2.0}
  mesh = {"axes": axes, "zero": 2, "loss_scale": scale}
  for common in ({}, {"mesh": mesh}):
    identity, descriptions = written(
      {"runs": {"run": entry, "other": other}, **common}
    )
    for description in descriptions.values():
      assert identities.difference_from(description, identity) == ""


@pytest.mark.parametrize(
  "path", sorted((kit.ROOT / "configs").rglob("*.py")), ids=lambda p: p.stem
)
def test_cells_of_the_shipped_configs_are_of_their_experiments(path):
  config = kit.load_config_file(path).get_config()
  identity, descriptions = written(config)
  for description in descriptions.values():
    assert identities.difference_from(description, identity) == ""


@pytest.mark.parametrize(
  ("common", "changed", "said"),
  [
    ({"mesh": {"zero": 1}}, {"mesh": {"zero": 2}}, "mesh.zero was 1, now 2"),
    ({"model": {"name": "gpt", "stages": 2}},
     {"model": {"name": "gpt", "stages": 3}}, "model.stages was 2, now 3"),
    ({"data": {}}, {"data": {"augment": True}}, "data.augment was False, now"),
  ],
)
def test_what_the_config_says_beside_them_is_compared(common, changed, said):
  """Also where a key of another section has the name of such a setting."""
  entries = {"mesh": MESH | {"axes": {"data": 8}}, "pipeline": STAGES}
  _, before = written({"runs": entries, **common})
  identity, _ = written({"runs": entries, **changed})
  label = "pipeline" if "stages" in said else "mesh"
  assert f"config.{said}" in identities.difference_from(before[label], identity)


@pytest.mark.parametrize(
  ("old", "new", "said"),
  [
    (ASGD, ASGD | {"momentum": 0.9}, "momentum was None, now 0.9"),
    (ASGD | {"momentum": 0.9}, ASGD, "momentum was 0.9, now None"),
    ({"recipe": "table"}, {"recipe": "table", "bound": 2}, "bound was None"),
  ],
)
def test_an_option_that_only_one_of_the_two_has_is_a_difference(old, new, said):
  _, before = written({"runs": {"run": old}})
  identity, _ = written({"runs": {"run": new}})
  found = identities.difference_from(before["run"], identity)
  assert found.startswith(f"config.runs.run.{said}")


@pytest.mark.parametrize(
  ("old", "new", "said"),
  [
    (LIVE, LIVE | {"slowdown": [1, 9]}, "runs.run.slowdown was [], now [1, 9]"),
    (LIVE | {"slowdown": [1]}, LIVE | {"slowdown": [2]}, "slowdown[0] was 1"),
    (STAGES, STAGES | {"stages": 4}, "runs.run.stages was 2, now 4"),
    (STAGES, STAGES | {"every": 4}, "runs.run.every was None, now 4"),
    (MESH | {"axes": {"data": 8}}, MESH | {"axes": {"data": 4}}, "axes.data w"),
    (LIVE, LIVE | {"live": {"refill": False}}, "live.refill was True, now F"),
  ],
)
def test_a_setting_of_the_engine_is_that_of_the_run(old, new, said):
  _, before = written({"runs": {"run": old}})
  identity, _ = written({"runs": {"run": new}})
  assert said in identities.difference_from(before["run"], identity)


def test_of_a_long_description_the_changed_settings_are_shown():
  """As of tables, whose description has a thousand characters."""
  old, new = (
    descriptions.describe_recipe(asgd.table(0.1, workers=4, bound=2, **options))
    for options in ({}, {"clock_every": 5, "filters": SKIP})
  )
  skip = "filters=, random_skip, probability=0.5"
  assert identities.differences({"recipe": old}, {"recipe": new}) == [
    "a part of recipe was 'clock_every=1', now 'clock_every=5'",
    f"a part of recipe was 'filters=()', now {skip!r}",
  ]


def test_a_long_value_is_shortened():
  (line,) = identities.differences({"a": [1.5] * 500}, {"a": [1.5] * 400})
  assert line.startswith("a was [1.5, 1.5,") and len(line) < 200


@pytest.mark.parametrize(
  "entry",
  [
    ASGD | {"durations": {"name": "recorded", "path": "rows.csv"}},
    STAGES | {"schedule": "rows.csv", "stages": 1},
  ],
)
def test_a_file_that_a_config_names_is_a_part_of_the_identity(
  tmp_path, monkeypatch, entry
):
  monkeypatch.chdir(tmp_path)
  identity_of = []
  for text in ("F0", "F0 B0"):
    (tmp_path / "rows.csv").write_text(text)
    identity_of.append(written({"runs": {"a": entry}, "workers": (1,)})[0])
  (line,) = identities.changes(*identity_of)
  assert line.startswith("dataset.file rows.csv was '")


def test_the_weights_of_an_encoder_are_a_part_of_the_identity(tmp_path):
  values = []
  for text in ("one", "other"):
    (tmp_path / "model.safetensors").write_text(text)
    config = {"model": {"name": "bert", "pretrained": str(tmp_path)}}
    values.append(identities._checksums(config))
  assert list(values[0]) == [f"file {tmp_path / 'model.safetensors'}"]
  assert values[0] != values[1]
