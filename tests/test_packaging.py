"""What is installed: the packages, the command, the configs, and no more."""

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import asgd

ROOT = Path(__file__).parent.parent
MOVED = ("pipeline", "launch", "configs")
PARTS = ("asgd", *MOVED)
SETUPTOOLS = importlib.metadata.version("setuptools")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


def sources():
  """The files that belong into a wheel, by their names there."""
  for part in PARTS:
    for path in (ROOT / part).rglob("*"):
      if path.is_file() and path.parent.name != "__pycache__":
        below = path.relative_to(ROOT).as_posix()
        yield f"asgd/{below}" if part in MOVED else below


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  if int(SETUPTOOLS.split(".")[0]) < 77:
    pytest.skip(f"setuptools {SETUPTOOLS} is older than what builds this")
  place = tmp_path_factory.mktemp("packaging") / "checkout"
  for part in PARTS:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / part, place / part, symlinks=True, ignore=skip)
  for name in ("pyproject.toml", "setup.py", "requirements.txt"):
    shutil.copy(ROOT / name, place)
  for name in ("README.md", "LICENSE"):
    shutil.copy(ROOT / name, place)
  subprocess.run(
    [sys.executable, "-c", BUILD], cwd=place, check=True, capture_output=True
  )
  (built,) = (place / "dist").glob("*.whl")
  whole = place.parent / "installed"
  zipfile.ZipFile(built).extractall(whole)
  return whole


@pytest.mark.process
def test_a_wheel_holds_the_packages_the_commands_and_the_configs(wheel):
  (info,) = wheel.glob("asgd-*.dist-info")
  held = {
    path.relative_to(wheel).as_posix()
    for path in wheel.rglob("*")
    if path.is_file() and info not in path.parents
  }
  assert held == set(sources())
  tops = (info / "top_level.txt").read_text().split()
  assert tops == ["asgd"]
  shown = (info / "METADATA").read_text().partition("\n\n")[2]
  links = re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", shown)
  assert links and all(not bang and "://" in to for bang, to in links)
  assert "The main job below" not in shown  # the caption of its figure
  scripts = configparser.ConfigParser()
  scripts.read(info / "entry_points.txt")
  main = "asgd.launch.__main__:main"
  assert dict(scripts["console_scripts"]) == {"asgd": main}


@pytest.mark.process
def test_a_wheel_runs_without_the_checkout(wheel, tmp_path):
  environment = {**os.environ, "PYTHONPATH": str(wheel)}
  command = [sys.executable, "-m", "asgd.launch", "train", "digits:nope"]
  result = subprocess.run(
    command, cwd=tmp_path, env=environment, capture_output=True, text=True
  )
  assert result.returncode == 2
  assert str(wheel / "asgd" / "configs" / "digits.py") in result.stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_modules_of_a_user_have_any_names(wheel, tmp_path):
  for name in ("pipeline", "data", "launch", "configs"):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError(__name__)\n")
  config = wheel / "asgd" / "configs" / "pipeline_digits.py"
  # What the installed command calls; -c imports from this folder first.
  code = "from asgd.launch.__main__ import main; main()"
  command = [sys.executable, "-c", code, "train", f"--config={config}:tiny"]
  result = subprocess.run(
    [*command, "--config.only=('gpipe',)", "--workdir=out"],
    env={**os.environ, "PYTHONPATH": str(wheel)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  assert (tmp_path / "out" / "results.csv").is_file()


def test_the_version_is_that_of_the_package():
  assert asgd.__version__ == importlib.metadata.version("asgd")
  text = (ROOT / "pyproject.toml").read_text()
  said = re.search(r'^version = "(.*)"$', text, re.MULTILINE)[1]
  assert f"\nversion: {said}\n" in (ROOT / "CITATION.cff").read_text()
  assert f"version = {{{said}}}" in (ROOT / "README.md").read_text()
  assert f"\n## {said}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_where_nothing_is_installed_the_version_is_not_known(monkeypatch):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(asgd.metadata, "version", missing)
  assert asgd.__version__ == "unknown"


def requirements(path):
  """name -> what a file of requirements says of it, first."""
  lines = (ROOT / path).read_text().splitlines()
  found = (re.match(r"([\w.-]+)([<>=].*)$", line) for line in lines)
  return {match[1]: match[2] for match in reversed([*filter(None, found)])}


def test_the_locks_hold_all_that_is_required():
  needed = requirements("requirements.txt")
  newest = requirements("requirements.lock")
  oldest = requirements("requirements-oldest.lock")
  for name, limits in needed.items():
    least = re.match(r">=([\d.]+)", limits)[1]
    assert newest[name].startswith("==")
    assert oldest[name].split(" ")[0] in (f"=={least}", f"=={least}.0")
