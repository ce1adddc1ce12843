"""Imports go one way: nothing imports anything above it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What each package may import of this repository, from the bottom up.
ALLOWED = {
  "asgd": {"asgd"},
  "pipeline": {"asgd", "pipeline"},
  "configs": set(),
  "launch": {"asgd", "pipeline", "launch"},
}
# Inside asgd: a module may import those of a lower rank, and its own rank only
# where it is listed twice over (the files of one room).
RANKS = {
  "base": 0,
  "names": 0,
  "data_formats": 0,
  "schedules": 0,
  "transformer": 0,
  "transforms": 1,
  "server": 1,
  "worker": 1,
  "dispatch": 1,
  "durations": 1,
  "data": 1,
  "encoder": 1,
  "models": 2,
  "sentences": 2,
  "text": 2,
  "orders": 2,
  "algorithms": 2,
  "problems": 3,
  "elementwise": 3,
  "sharding": 2,
  "diagnosis": 3,
  "simulator": 3,
  "runtimes": 4,
  "parallel": 4,
  "__init__": 5,
}
# asgd does no I/O beyond reading data, and looks at no clock and no flag. Live
# runtimes look at clocks, as time is what they are about.
FORBIDDEN = {"time", "logging", "absl", "ml_collections", "orbax", "chex"}


def imports(path):
  """Yields dotted names of what a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(package):
  return sorted((ROOT / package).rglob("*.py"))


def room(path):
  return path.relative_to(ROOT / "asgd").parts[0].removesuffix(".py")


def test_packages_import_only_what_is_below_them():
  for package, allowed in ALLOWED.items():
    for path in files(package):
      for name in imports(path):
        top = name.split(".")[0]
        assert top not in ALLOWED or top in allowed, f"{path} imports {name}"


def test_configs_import_ml_collections_only():
  for path in files("configs"):
    for name in imports(path):
      assert name.split(".")[0] == "ml_collections", f"{path}: {name}"


def test_every_module_of_asgd_has_a_rank():
  assert {room(path) for path in files("asgd")} == set(RANKS)


def test_modules_of_asgd_import_only_what_ranks_below_them():
  for path in files("asgd"):
    rank = RANKS[room(path)]
    for name in imports(path):
      parts = name.split(".")
      if parts[0] != "asgd" or parts[1] == room(path):
        continue
      assert RANKS[parts[1]] < rank, f"{path} imports {name}"


def test_asgd_does_no_logging_flags_or_clocks():
  allowed = {ROOT / "asgd" / "data_formats.py": {"logging"}}
  for path in files("asgd"):
    for name in imports(path):
      top = name.split(".")[0]
      free = {"time"} if room(path) == "runtimes" else set()
      free |= allowed.get(path, set())
      assert top not in FORBIDDEN - free, f"{path}: {name}"


def test_no_launcher_shadows_a_package():
  for path in files("launch"):
    assert path.stem not in {"ray", "jax", "optax", "flax", "orbax", "tqdm"}
