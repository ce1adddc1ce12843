"""What the README says can be run runs as it is written."""

import ast
import inspect
import re
import sys
import types
from pathlib import Path

import jax
import ml_collections
import numpy as np
import pytest

import asgd
from asgd import algorithms, experiment
from asgd.experiment import schema
from pipeline import schedules
from pipeline.engine import PIPELINE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}


def block(word):
  (code,) = (text for text in BLOCKS if word in text)
  return code


def test_every_block_is_tested_here():
  assert len(BLOCKS) == 7


def test_a_model_of_your_own(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  names = {}
  exec(block("asgd.train_live"), names)
  loss, staleness, same = capsys.readouterr().out.split()
  assert float(loss) < names["loss"](names["params"], names["data"]) / 2
  assert float(staleness) > 1
  assert same == "True"
  exec(block("asgd.TrainState"), names)
  assert names["state"].step == 1


@pytest.mark.slow
def test_the_library_example(capsys):
  names = {}
  exec(block("make_host"), names)
  staleness, gap = map(float, capsys.readouterr().out.split()[:2])
  assert 6.5 < staleness <= 7
  assert gap > 0
  assert (
    names["problem"].evaluate(names["simulation"].server.params).accuracy > 0.8
  )


def test_an_algorithm_of_your_own(capsys, monkeypatch):
  module = types.ModuleType("mymodule")
  exec(block("halve_when_stale"), vars(module))
  assert capsys.readouterr().out == "asynchronous\n"
  monkeypatch.setitem(sys.modules, "mymodule", module)
  exp = experiment.build(
    {"runs": {"mine": {"recipe": "mymodule:careful", "limit": 2}}},
    engines=ENGINES,
  )
  (cell,) = exp.cells
  assert np.isfinite(exp.plan(cell).curvature_limit)


def test_a_config_of_your_own():
  names = {}
  exec(block("softsync"), names)
  config = names["get_config"]()
  assert isinstance(config, ml_collections.ConfigDict)
  exp = experiment.build(config, engines=ENGINES)
  assert {cell.label for cell in exp.cells} == {"softsync", "dana"}


@pytest.mark.slow
def test_a_pipeline(capsys, quick_compilation):
  devices = 'jax.config.update("jax_num_cpu_devices", 4)'
  text = block("schedules.pipedream")
  assert devices in text  # tests have more of them already
  names = {}
  exec(text.replace(devices, ""), names)
  assert capsys.readouterr().out.startswith("[3 2 1 0]")
  assert sorted(names["result"].losses) == list(range(16))


@pytest.mark.slow
def test_a_step_on_a_mesh(quick_compilation):
  devices = 'jax.config.update("jax_num_cpu_devices", 4)'
  text = block("hybrid.make_step")
  assert devices in text  # tests have more of them already
  names = {}
  exec(text.replace(devices, ""), names)
  problem, params = names["problem"], names["made"].params(names["state"])
  assert problem.evaluate(problem.init(jax.random.key(0))).accuracy < 0.3
  assert problem.evaluate(params).accuracy > 0.8


def test_the_table_of_schedules_names_every_one():
  for name in schedules.SCHEDULES:
    assert f"`{name}`" in README, name


def test_the_table_of_keys_names_every_key():
  table = README[README.index("| key | meaning") :]
  for key in schema.sections(ENGINES):
    assert f"`{key}`" in table, key


def test_the_table_of_algorithms_names_every_recipe():
  for name in asgd.RECIPES:
    assert f"`{name}`" in README, name


def test_the_table_of_algorithms_names_every_option_and_its_default():
  table = README[README.index("| recipe |") :]
  for name, maker in asgd.RECIPES.items():
    row = re.search(rf"^\| `{name}` \|.*$", table, re.MULTILINE)[0]
    said = dict(re.findall(r"`(\w+)` \(([^:)]+)", row.split(" | ")[2]))
    parameters = inspect.signature(maker).parameters.values()
    options = {
      p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    assert options.pop("weight_decay") == (0.1 if name == "diloco" else 0)
    assert options.pop("optimizer") is None
    assert options.pop("outer_optimizer", None) is None
    assert {k: ast.literal_eval(v) for k, v in said.items()} == options
    text = f"{maker.__doc__}\n{algorithms.__doc__}"  # the latter: of most
    for option in (*options, "weight_decay", "optimizer"):
      named = rf"^ +{option}(:|  )|`{option}`"
      assert re.search(named, text, re.MULTILINE), (name, option)


@pytest.mark.parametrize("path", re.findall(r"configs/\w+\.py", README))
def test_the_configs_it_names_exist(path):
  assert (ROOT / path).exists()
