"""Imports go one way: nothing imports anything above it."""

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path

import test_packaging

ROOT = Path(__file__).parent.parent
# What each folder may import of this repository, from the bottom up. Installed,
# those above asgd are its subpackages.
ALLOWED = {
  "asgd": {"asgd"},
  "pipeline": {"asgd", "pipeline"},
  "configs": set(),
  "launch": {"asgd", "pipeline", "launch"},
}
# Inside asgd: a room may import those of a lower rank, and itself.
RANKS = {
  "checks": -3,
  "internals": -3,
  "safe_files": -3,
  "names": -2,
  "hoisting": -2,
  "rates": -1,
  "base": -1,
  "losses": 0,
  "stages": 0,
  "device_memory": 0,
  "norms": 0,
  "running_sums": 0,
  "output": 0.5,
  "stacking": 0,
  "text_table": 0,
  "tracks": 0,
  "optimizers": 0,
  "transforms": 1,
  "server": 1,
  "worker": 1,
  "orders": 1,
  "allocation": 2,
  "own_writes": 2,
  "data": 1,
  "models": 2,
  "compression": 1.5,
  "gossip": 1.7,
  "algorithms": 2,
  "sharding": 1.3,
  "wire": 1,
  "sandblaster": 3.5,
  "layer_worker": 3.5,
  "tables": 3.5,
  "problems": 3,
  "diagnosis": 3,
  "simulator": 3,
  "live": 4,
  "parallel": 4,
  "pages": 4,
  "experiment": 5,
  "call_options": 5.5,
  "figures": 5.7,
  "calls": 5.8,
  "call_runs": 5.9,
  "facade": 6,
  "train_state": 0,
  "__init__": 7,
}
# asgd.experiment is the only room of asgd with files, clocks and configs; live
# runs look at clocks, as time is what they are about, and so does the
# supervisor of processes.
FORBIDDEN = {"time", "logging", "absl", "ml_collections", "orbax", "chex"}
_DATA = ROOT / "asgd" / "data"
EXCEPTIONS = {
  _DATA / "download.py": {"logging"},
  _DATA / "formats.py": {"logging"},
  ROOT / "asgd" / "parallel" / "supervisor.py": {"time"},
}


@functools.cache
def tree_of(path):
  return ast.parse(path.read_text())


@functools.cache
def imports(path):
  """Returns dotted names of what a file imports, also inside of functions."""
  names = []
  for node in ast.walk(tree_of(path)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      above = [node.module] if node.module else []
      if node.level:
        place = path.relative_to(ROOT).parts
        assert place[0] == "launch", f"{path}: relative import"
        above = [*place[: -node.level], *above]
      names += [".".join([*above, alias.name]) for alias in node.names]
  return [_in_checkout(name) for name in names]


def _in_checkout(name):
  """The dotted name of a module by its folder: pipeline for asgd.pipeline."""
  assert name.split(".")[0] != "pipeline", f"{name} is asgd.{name}"
  return re.sub(r"^asgd\.(pipeline|configs|launch)\b", r"\1", name)


def files(package):
  return sorted((ROOT / package).rglob("*.py"))


def room(path):
  return path.relative_to(ROOT / "asgd").parts[0].removesuffix(".py")


def test_packages_import_only_what_is_below_them():
  for package, allowed in ALLOWED.items():
    for path in files(package):
      # asgd/__init__.py shows type checkers all that is installed below asgd.
      names = imports(path) if path != ROOT / "asgd" / "__init__.py" else []
      for name in names:
        top = name.split(".")[0]
        assert top not in ALLOWED or top in allowed, f"{path} imports {name}"


def test_configs_import_ml_collections_only():
  """And a figure another one, of which it makes the same claims."""
  figures = [path.stem for path in files("configs/figures")]
  for path in files("configs"):
    allowed = ["ml_collections"]
    allowed += figures if path.parent.name == "figures" else []
    for name in imports(path):
      assert name.split(".")[0] in allowed, f"{path}: {name}"


def test_private_modules_of_libraries_are_looked_up_in_one_place():
  private = ("jax.extend", "jax._src", "jaxlib", "ray._private", "ray._raylet")
  for package in ALLOWED:
    for path in files(package):
      for name in imports(path):
        assert not name.startswith(private), f"{path}: {name}; see internals"


def test_every_room_has_a_rank():
  assert {room(path) for path in files("asgd")} == set(RANKS)


def test_rooms_of_asgd_import_only_what_ranks_below_them():
  for path in files("asgd"):
    rank = RANKS[room(path)]
    for name in imports(path):
      parts = name.split(".")
      if parts[0] != "asgd" or parts[1] == room(path):
        continue
      assert RANKS[parts[1]] < rank, f"{path} imports {name}"


def module_of(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_one_another_in_a_circle():
  paths = {module_of(p): p for package in ALLOWED for p in files(package)}

  def imported(path):
    for name in imports(path):
      while name and name not in paths:
        name = name.rpartition(".")[0]
      if name:
        yield name

  graph = {
    module: {name for name in imported(path) if name != module}
    for module, path in paths.items()
  }
  graphlib.TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_asgd_does_no_logging_flags_or_clocks():
  for path in files("asgd"):
    free = EXCEPTIONS.get(path, set())
    if room(path) == "experiment":
      free = FORBIDDEN - {"absl", "chex"}
    elif room(path) == "live":
      free = {"time"}
    for name in imports(path):
      assert name.split(".")[0] not in FORBIDDEN - free, f"{path}: {name}"


def test_commands_import_one_another_wherever_they_are_installed():
  for path in files("launch"):
    for node in ast.walk(tree_of(path)):
      absolute = isinstance(node, ast.ImportFrom) and not node.level
      names = [node.module] if absolute else []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      for name in names:
        assert name.split(".")[0] != "launch", f"{path}: {name} is asgd.{name}"


def test_no_module_shadows_a_package():
  for package in ALLOWED:
    for path in files(package):
      assert path.stem not in {"ray", "jax", "optax", "flax", "orbax", "rich"}


def tops(nodes):
  """The packages that some statements import."""
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
      yield node.module.partition(".")[0]


def test_what_is_imported_is_required():
  others = {"absl-py": "absl", "orbax-checkpoint": "orbax"}
  needed = {
    others.get(name, name.replace("-", "_"))
    for name in test_packaging.requirements("requirements.txt")
  }
  needed |= {"asgd", *sys.stdlib_module_names}
  extras = {"ray", "matplotlib", "tensorboardX", "PIL", "tokenizers"}
  extras |= {"safetensors", "wandb", "torch"}
  for package in ("asgd", "pipeline", "launch"):
    for path in files(package):
      if path.stem.startswith("torch_"):  # scripts for another Python
        continue
      at_once = set(tops(tree_of(path).body)) - needed
      assert not at_once, f"{path} imports {at_once}, which may be missing"
      at_need = set(tops(ast.walk(tree_of(path)))) - needed - extras
      assert not at_need, f"{path} imports {at_need}, which no extra has"
