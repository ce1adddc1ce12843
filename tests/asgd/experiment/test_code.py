"""A user's own recipe, optimizer and schedule, of a module outside the package,
on every engine."""

import os
import subprocess
import sys

import kit
import pytest

import asgd
from asgd import experiment
from asgd.experiment import cell_files, code, folder, jobs, storage
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.pipeline.engine import PIPELINE

ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
MODULE = '''
"""What a user writes."""

import optax

import asgd


def careful(learning_rate, workers, *, strength=0.5):
  del workers
  return asgd.Recipe(
    asgd.as_algorithm(optax.adam(learning_rate)),
    at_server=asgd.transforms.delay_compensation(strength),
  )


def signs(learning_rate, decay=0.9):
  return optax.chain(optax.trace(decay), optax.sign_sgd(learning_rate))


def halved(peak_value, decay_steps):
  return optax.linear_schedule(peak_value, peak_value / 2, decay_steps)


def nothing(learning_rate, workers):
  return None


def of_nothing():
  return None
'''
CONFIG = {
  **kit.TINY_RUN,
  "runs": {
    "own": {"recipe": "own_module:careful", "strength": 0.25},
    "optimizer": {
      "recipe": "asgd",
      "optimizer": {"name": "own_module:signs", "decay": 0.5},
    },
  },
  "learning_rate": 0.01,
  "learning_rate_schedule": {"name": "own_module:halved"},
}


@pytest.fixture
def own(tmp_path, monkeypatch):
  """The folder of the module, which can be imported."""
  (tmp_path / "own_module.py").write_text(MODULE)
  monkeypatch.setattr(sys, "path", list(sys.path))
  for name in ("own_module", "own_helper"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  code.add_folder(tmp_path)
  return tmp_path


def train(workdir, config, **options):
  exp = kit.build(config)
  workdir.mkdir()
  options = {"bar": Silent(), "machine": Machine(), **options}
  jobs.train_all(exp, workdir, **options)
  return exp


def params_of(workdir, cell):
  place = workdir / "cells" / cell.name
  return cell_files.read_file(place, "params.msgpack")


# The recipe reads a gradient's delay, which a mesh does not have.
@pytest.mark.filterwarnings("ignore:recipe .* reads the delay")
@pytest.mark.parametrize("engine", ["simulate", "mesh", "pipeline"])
def test_names_of_another_module_train(engine, own):
  workers = {"mesh": {"workers": (1,)}}.get(engine, {})
  config = {**CONFIG, "engine": engine, **workers}
  exp = train(own / "out", config)
  for cell in exp.cells:
    place = own / "out" / "cells" / cell.name
    described = folder.read_cell(place)["modules"]
    assert described["own_module"]["file"] == str(own / "own_module.py")
  plan = exp.plan(exp.cells[0])
  assert float(plan.schedule(0)) == pytest.approx(0.01)
  assert float(plan.schedule(10**6)) == pytest.approx(0.005)


@pytest.mark.parametrize("name", ["own_module", "own_helper"])
def test_a_module_that_changed_is_told(name, own):
  class Bar(Silent):
    def line(self, text):
      lines.append(text)

  lines: list[str] = []
  (own / "own_helper.py").write_text("def one():\n  return 1\n")
  text = f"{MODULE}\nfrom own_helper import one\n"
  (own / "own_module.py").write_text(text)
  only = {**CONFIG, "only": ("optimizer",)}
  exp = train(own / "out", only)
  again = {"bar": Bar(), "machine": Machine()}
  jobs.train_all(exp, own / "out", **again)
  assert lines == []
  path = own / f"{name}.py"
  path.write_text(f"{path.read_text()}# another\n")
  jobs.train_all(exp, own / "out", **again)
  (line,) = lines
  count = len(exp.cells)
  assert f"{name} has changed since a finished cell ({count} in all)" in line
  # Cells that have not finished, and would resume.
  for cell in exp.cells:
    (own / "out" / "cells" / cell.name / "cell.npz").unlink()
    description = {"modules": {name: {"sha256": "before"}}}
    path = own / "out" / "cells" / cell.name / "cell.json"
    path.write_text(storage.to_json(description))
  jobs.train_all(exp, own / "out", **again)
  assert f"{name} has changed since an unfinished cell" in lines[1]


def test_other_processes_import_it_too(own, monkeypatch):
  one = train(own / "one", CONFIG)
  start = jobs._train_in_processes

  def in_one(work, groups, count, *others):
    return start(work, groups, 1, *others)

  monkeypatch.setattr(jobs, "_train_in_processes", in_one)
  train(own / "two", CONFIG, jobs=2)
  for cell in one.cells:
    assert params_of(own / "one", cell) == params_of(own / "two", cell)


def test_a_live_run_of_it_is_replayed_elsewhere(own):
  exp = train(own / "out", {**CONFIG, "engine": "threads"})
  for cell in exp.cells:
    assert asgd.replay(own / "out" / "cells" / cell.name).same
  # A process that knows nothing of the folder finds it in cell.json.
  command = [sys.executable, "-m", "launch.replay"]
  place = own / "out" / "cells" / exp.cells[0].name
  environment = {**os.environ, "PYTHONPATH": str(kit.ROOT)}
  done = subprocess.run(
    [*command, str(place)],
    cwd=own.parent,
    env=environment,
    capture_output=True,
    text=True,
    timeout=kit.DEADLINE,
  )
  assert "to the bit" in done.stdout, done.stderr


def test_a_module_that_changed_is_named(own):
  described = code.describe({"runs": {"a": {"recipe": "own_module:careful"}}})
  assert code.changed_modules(described) == []
  (own / "own_module.py").write_text(f"{MODULE}\n# more\n")
  assert code.changed_modules(described) == ["own_module"]


def test_a_module_of_a_package_is_found_by_its_top(own):
  package = own / "own_package" / "inner"
  package.mkdir(parents=True)
  (package.parent / "__init__.py").write_text("")
  (package / "__init__.py").write_text("")
  (package / "parts.py").write_text("def make():\n  return 1\n")
  described = code.describe(
    {"model": {"name": "own_package.inner.parts:make"}, "x": ["optax:adam"]}
  )
  parts = described["own_package.inner.parts"]
  assert parts["file"] == str(package / "parts.py")
  assert parts["top"] == str(package.parent)
  # What is installed is not sent to other machines.
  assert code.files_to_send(described) == [str(package.parent)]
  sys.path.remove(str(own))
  code.make_importable(described)
  assert str(own) in sys.path


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"runs": {"a": {"recipe": "no_module:careful"}}},
     "config.runs.a: algorithm 'no_module:careful': no_module cannot be"
     ".*folder must be that of the config"),
    ({"runs": {"a": {"recipe": "own_module:carefull"}}},
     "own_module has no 'carefull'; did you mean 'careful'"),
    ({"runs": {"a": {"recipe": "own_module:signs"}}},
     "must take learning_rate and workers.* it takes learning_rate, decay"),
    ({"runs": {"a": {"recipe": "own_module:careful", "strenght": 1}}},
     "'runs.a.strenght'.*; did you mean 'strength'"),
    ({"runs": {"a": {"recipe": "own_module:nothing"}}},
     "config.runs.a: algorithm 'own_module:nothing' must return an asgd.Rec"),
    ({"optimizer": "own_module:of_nothing"},
     "config.optimizer: optimizer 'own_module:of_nothing' takes no argument"
     " 'learning_rate'"),
    ({"optimizer": {"name": "own_module:signs", "decai": 1}},
     "config.optimizer: .* takes no argument 'decai'; did you mean 'decay'"),
    ({"learning_rate_schedule": {"name": "own_module:nothing"}},
     "config.learning_rate_schedule: schedule 'own_module:nothing' needs the"),
  ],
)
def test_what_is_wrong_with_it_is_one_line(own, changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    kit.build(CONFIG, **changes)
  assert len(str(caught.value)) <= 600
  assert "\n" not in str(caught.value)
