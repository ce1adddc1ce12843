"""What the benchmarks refuse, their list, and where their numbers go."""

import json
import subprocess
import sys
import types
from pathlib import Path

import kit
import pytest

from asgd.experiment import provenance
from launch.bench import __main__ as command
from launch.bench import report

MISTAKES = {
  "name": (["serve"], "unknown benchmark 'serve'; did you mean 'server'"),
  "rounds": (["parallel", "--rounds=0"], "--block and --seconds must be"),
  "seconds": (["server", "--seconds=nan"], "--seconds must be positive"),
  "text": (["server", "--sizes=1,x"], "--sizes must be numbers of MB"),
  "none": (["server", "--sizes=0"], "--sizes must be above 0 to 100000 MB"),
  "nan": (["server", "--sizes=nan"], "--sizes must be above 0 to 100000 MB"),
  "other": (["hogwild", "--sizes=1"], "--sizes: the benchmark hogwild does n"),
  "links": (["network", "--links=udp"], "should be one of <threads|tc>"),
  "peer": (["pipeline", "--peer=/nix"], "--peer=/nix: there is no such progr"),
  "files": (["--table"], "--table needs the FILEs that --json=FILE has wri"),
  "file": (["--table", "/no.json"], "No such file or directory: '/no.json'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name):
  arguments, message = MISTAKES[name]
  result = kit.call("bench", *arguments)
  kit.assert_one_line(result, message)
  assert result.stdout == ""


def test_without_a_name_all_are_listed():
  listed = kit.call("bench").stdout.splitlines()
  assert [line.split()[2] for line in listed] == list(command.BENCHMARKS)


def fake(monkeypatch, share):
  """Has a benchmark that measures nothing, on a machine whose cores other
  programs use to a share."""

  def run(report, rounds=3, peer=None):
    table = report.table("MLP", "who", {"ms": ".0f"}, {})
    table.row("a", rounds)

  module = types.SimpleNamespace(run=run)
  monkeypatch.setitem(sys.modules, "launch.bench.simulator", module)
  monkeypatch.setattr(report, "busy_share", lambda: share)


def test_numbers_are_printed_as_json(monkeypatch):
  fake(monkeypatch, 0.25)
  done = kit.call("bench", "simulator", "--rounds=7", "--json", status=0)
  (result,) = json.loads(done.stdout)
  (row,) = result.pop("rows")
  assert row["values"] == {"ms": 7.0}
  assert result.pop("seconds") >= 0
  assert result == {
    "name": "simulator",
    "command": "asgd bench simulator --rounds=7",
    "device": "cpu",
    "cores": provenance.cores(),
    "busy": [0.25, 0.25],
  }
  # What is printed for a reader goes elsewhere, with a warning at both ends.
  assert "\nMLP\n" in done.stderr
  warnings = [x for x in done.stderr.splitlines() if x.startswith("warning: ")]
  assert ["25%" in line for line in warnings] == [True, True]


def test_a_machine_that_is_free_is_not_warned_of(monkeypatch, tmp_path):
  fake(monkeypatch, 0.05)
  path = tmp_path / "runs.json"
  done = kit.call("bench", "simulator", f"--json={path}", status=0)
  assert done.stderr == ""
  assert "of which other programs used 5% before and 5% after" in done.stdout
  assert report.read(path)[0]["rows"][0]["values"] == {"ms": 3.0}


def test_all_are_run_and_joined(monkeypatch, tmp_path):
  commands = []

  def run(words, **_):
    name, path = words[3:5]
    commands.append(words)
    if name == "tables":
      return subprocess.CompletedProcess(words, 1)
    results = [{"name": name, "rows": []}]
    Path(path.partition("=")[2]).write_text(report.to_json(results))
    return subprocess.CompletedProcess(words, 0)

  monkeypatch.setattr(subprocess, "run", run)
  path = tmp_path / "runs.json"
  done = kit.call("bench", "--all", "--rounds=7", f"--json={path}", status=1)
  assert done.stderr == "no results of: tables\n"
  joined = report.read(path)
  assert [each["name"] for each in joined] == list(command.BENCHMARKS)
  failed = {"name": "tables", "failed": 1, "rows": []}
  assert [each for each in joined if "failed" in each] == [failed]
  # A flag goes to those that take it.
  with_rounds = {words[3] for words in commands if words[-1] == "--rounds=7"}
  assert with_rounds == set(command.BENCHMARKS) - {"server"}
