"""The examples run, each as it is, and come to what they say."""

import re
import runpy

import kit
import pytest


@pytest.fixture
def run(capsys):
  def run(name):
    runpy.run_path(str(kit.ROOT / "examples" / f"{name}.py"))
    return capsys.readouterr().out

  return run


def numbers(text):
  found = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?", text)
  return [float(number) for number in found]


def test_every_example_is_tested_and_documented():
  page = (kit.ROOT / "docs" / "examples.md").read_text()
  tests = " ".join(globals())
  for path in (kit.ROOT / "examples").glob("*.py"):
    assert f"test_{path.stem}" in tests, path.stem
    assert f"examples/{path.name}" in page
    assert len(path.read_text().splitlines()) < 60, path.name


def test_own_loop(run):
  fresh, late, compensated, scaled = (
    numbers(line)[-1] for line in run("own_loop").splitlines()
  )
  assert fresh < compensated < late
  assert fresh < scaled < late


def test_compare_algorithms(run):
  words = [line.split() for line in run("compare_algorithms").splitlines()]
  losses = [float(line[2]) for line in words if line[1] == "loss"]
  few, many = losses[:4], losses[4:]
  assert max(few) < 0.02
  asgd, nag_asgd, gap_aware, dana_zero = many
  assert nag_asgd > 1 > max(asgd, gap_aware, dana_zero)


@pytest.mark.slow
def test_train_live(run):
  text = run("train_live")
  first, last, staleness = numbers(text)
  assert last < first / 2
  assert staleness > 1
  assert text.endswith("True\n")


@pytest.mark.slow
def test_train_pipeline(run):
  lines = run("train_pipeline").splitlines()
  assert [line.split()[0] for line in lines] == ["gpipe", "pipedream"]
  for line in lines:
    first, last = numbers(line)
    assert last < first / 2


def test_uneven_workers(run):
  rows = [numbers(line) for line in run("uneven_workers").splitlines()]
  times = [row[0] for row in rows]
  assert times == [300, 150, 150, 150]
  assert all(row[-1] < 1e-3 for row in rows)
