"""Each config file builds, and every run of it trains at a tiny size."""

import re
from pathlib import Path

import kit
import ml_collections
import pytest
import tiny
from tiny import drawn_images, no_limits

from asgd import experiment
from asgd.pipeline.engine import PIPELINE

pytestmark = pytest.mark.usefixtures(drawn_images.__name__)

ROOT = Path(__file__).parent.parent
ENGINES = {**experiment.ENGINES, "pipeline": PIPELINE}
FILES = sorted(
  path
  for path in (ROOT / "configs").glob("*.py")
  if not path.stem.startswith("__")
)
# Where building every run would take long, or needs files of others.
SOME = {"cifar10": ("sgd", "ssgd", "dana_dc"), "pipeline_cifar10": ("stale",)}
VARIANTS_ONLY = ("pipeline_sentences", "mesh_gpt")


def variants(path):
  """The variants that a file has: FILE.py:NAME."""
  return re.findall(r'arg == "(\w+)"', path.read_text())


def build(path, arg=None):
  config = kit.load_config_file(path).get_config(*filter(None, [arg]))
  assert isinstance(config, ml_collections.ConfigDict)
  assert config.is_locked
  config = config.to_dict()
  config["only"] = SOME.get(path.stem, config.get("only", ()))
  # In the place of what it takes to measure each layer.
  seconds = {"layer_seconds": [[1.0, 2.0]] * 11}
  exp = experiment.build(
    config,
    engines=ENGINES,
    measurements=seconds if path.stem == "pipeline_cifar10" else None,
  )
  assert {c.label for c in exp.cells} == set(config["only"] or config["runs"])
  return exp


@pytest.mark.slow
@pytest.mark.parametrize(
  ("path", "arg"),
  [
    (path, arg)
    for path in FILES
    for arg in (None, *variants(path))
    if (path.stem in VARIANTS_ONLY) == bool(arg) or arg not in (None, "tiny")
  ],
  ids=lambda value: getattr(value, "stem", value),
)
def test_the_config_builds(path, arg):
  exp = build(path, arg)
  one_of_each = {cell.label: cell for cell in exp.cells}
  plans = [exp.plan(cell) for cell in one_of_each.values()]
  for plan in plans:
    assert plan.messages > 0
    assert plan.learning_rate > 0
  if path.stem.startswith("pipeline") and arg != "tiny":
    assert max(plan.table.devices for plan in plans) == 4
  if path.stem.startswith("mesh"):
    assert plans[0].mesh.size == 8
  if arg:
    assert len({cell.seed for cell in exp.cells}) == 1


@pytest.mark.parametrize(
  "path",
  [*FILES, *sorted((ROOT / "configs" / "figures").glob("[!_]*.py"))],
  ids=lambda path: path.stem,
)
def test_an_unknown_variant_is_refused(path):
  for arg in ("tiny", *variants(path)):
    with pytest.raises(ValueError, match=f"known: .*{arg}"):
      kit.load_config_file(path).get_config(arg[:-1])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("no_pictures", "commands_as_here", no_limits.__name__)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_run_trains_at_the_tiny_size_and_its_cells_count(path, tmp_path):
  arguments = [f"--config={path}:tiny"]
  if kit.load_config_file(path).get_config().get("engine") == "ray":
    arguments.append("--engine=threads")
  tiny.train_twice(tmp_path / "out", *arguments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_gives_the_command(path):
  doc = kit.load_config_file(path).__doc__
  given = re.findall(r"python -m (launch\.\w+) --config=configs/(\w+)\.py", doc)
  assert {name for _, name in given} == {path.stem}
  assert given[0][0] in ("launch.train", "launch.compare")


def test_a_config_is_data():
  for path in FILES:
    pattern = r"^(?:import|from) (\S+)"
    imported = re.findall(pattern, path.read_text(), re.MULTILINE)
    assert set(imported) <= {"ml_collections"}, path
