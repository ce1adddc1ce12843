"""The page of keys and the JSON schema say what the checks of a config do."""

import json

import jsonschema
import kit
import pytest

from asgd.experiment import checks, schema, shipped

reference = kit.load_module(
  kit.ROOT / "docs" / "hooks" / "config_reference.py"
)
SCHEMA = json.loads(reference.SCHEMA.read_text())
# jsonschema.validate would check the schema, which is large, at each call.
VALIDATE = jsonschema.Draft202012Validator(SCHEMA).validate
VALUES = (
  *(None, True, False, "", "name", "stop", "speed", "time", "float32", "both"),
  *(-1, 0, 1, 2, 3, 300, 10**5, 10**9, 10**13, -0.5, 0.5, 1.5, 1e7 + 0.5, 1e31),
  *([], [1], [0, 3], [1, 1], [0.5], ["a"], [True], [-1], {}, {"a": 1}),
)


def settings(keys, above=""):
  """Yields all settings, by their dotted keys."""
  for key, node in keys.items():
    if isinstance(node, schema.Setting):
      yield pytest.param(node, id=f"{above}{key}")
    else:
      yield from settings(schema.keys_of(node), f"{above}{key}.")


def test_the_committed_page_and_schema_are_as_the_code_has_them():
  text = reference.PAGE.read_text()
  assert text == reference.page(text)  # else run config_reference.py
  assert reference.json_schema(text) == SCHEMA
  jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_page_names_each_key_once_with_its_meaning():
  found = reference._ROW.findall(reference.PAGE.read_text())
  keys = [*reference.KEYS]
  for key, node in reference.KEYS.items():
    keys += [f"{key}.{inner}" for inner in schema.keys_of(node)]
  assert sorted(key for key, _ in found) == sorted(keys)
  assert all(meaning for _, meaning in found)


@pytest.mark.parametrize("node", [*settings(reference.KEYS)])
def test_the_schema_accepts_what_the_check_accepts(node):
  described = checks.schema_of(node.check)
  # A dict, or a text that stands for one, has more checks than its kind.
  more = {"string", "object"} & {*described.get("type", ())}
  valid = jsonschema.Draft202012Validator(described).is_valid
  for value in (*VALUES, schema.default_of(node)):
    try:
      node.check(value, "key")
      accepted = True
    except ValueError:
      accepted = False
    if accepted or not (more and isinstance(value, (str, dict))):
      assert valid(value) == accepted, value


RUNS = {"mine": {"recipe": "dana_zero"}}


@pytest.mark.parametrize(
  "config",
  [
    {"runs": {}},
    {"runs": {"mine": {"recipe": "dana_zeros"}}},
    {"runs": {"mine": {"recipe": "dana_zero", "workers": [0]}}},
    {"runs": RUNS, "workers": -4},
    {"runs": RUNS, "workers": "four"},
    {"runs": RUNS, "seeds": [-1]},
    {"runs": RUNS, "engine": "threats"},
    {"runs": RUNS, "learning_rate": 0},
    {"runs": RUNS, "evaluations": 0},
  ],
)
def test_the_schema_refuses_what_asgd_refuses(config):
  with pytest.raises(jsonschema.ValidationError):
    VALIDATE(config)
  with pytest.raises(ValueError):
    schema.resolve(config, reference.ENGINES)


@pytest.mark.parametrize(
  "config",
  [
    {"runs": RUNS, "workers": 4, "seeds": 0},
    {"runs": RUNS, "only": "mine"},
    {"runs": {"mine": {"recipe": "mine:recipe"}}, "workers": [4, 8]},
  ],
)
def test_the_schema_accepts_single_values_and_functions(config):
  VALIDATE(config)


@pytest.mark.parametrize("path", sorted(shipped.FOLDER.glob("*.py")))
def test_shipped_configs_are_valid_by_the_schema(path):
  names = {}
  exec(path.read_text(), names)
  config = schema.plain_data(schema.as_dict(names["get_config"]("tiny")))
  VALIDATE(config)
  with pytest.raises(jsonschema.ValidationError, match="was unexpected"):
    VALIDATE(config | {"batchsize": 3})
