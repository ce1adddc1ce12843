"""The command `asgd` runs a command of launch with its flags."""

import re
import runpy
import sys

import kit
import pytest

from asgd.experiment import shipped
from launch import __main__ as command

SUPPORT = {"command_flags", "command_line", "compiled", "flags", "listing"}
SUPPORT |= {"platforms"}  # modules that are no commands


@pytest.fixture
def run(monkeypatch, capsys):
  """Runs the command; returns the module that it would run, its arguments, and
  what it printed."""

  def run(*words):
    ran = []

    def run_module(name, **options):
      assert options == {"run_name": "__main__", "alter_sys": True}
      ran.append((name, sys.argv[1:]))

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["asgd", *words])
    command.main()
    return (*(ran or [(None, [])])[0], capsys.readouterr().out)

  return run


@pytest.mark.parametrize(
  ("words", "module", "arguments"),
  [
    (["train", "digits"], "train", ["--config=digits"]),
    (["train", "my.py", "--jobs=1"], "train", ["--config=my.py", "--jobs=1"]),
    (["train", "--jobs", "1"], "train", ["--jobs", "1"]),
    (["replay", "runs/a"], "replay", ["runs/a"]),
    (["bench", "server"], "bench", ["server"]),
    (["draw-schedule"], "draw_schedule", []),
  ],
)
def test_words_go_to_the_command(run, words, module, arguments):
  assert run(*words)[:2] == (f"launch.{module}", arguments)


def test_without_a_command_all_are_listed(run):
  module, _, out = run()
  assert module is None
  named = dict(re.findall(r"^asgd (\w+) +(\S.*)\.$", out, re.MULTILINE))
  files = (kit.ROOT / "launch").glob("[!_]*.py")
  commands = {path.stem for path in files} - SUPPORT
  assert named.keys() == commands | {"bench"}
  assert run("--help") == (None, [], out)
  assert run("--version")[2].startswith("asgd ")


def test_an_unknown_command_names_the_nearest(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["asgd", "trian"])
  with pytest.raises(SystemExit, match="2"):
    command.main()
  (line,) = capsys.readouterr().err.splitlines()
  said = "error: unknown command 'trian'; did you mean 'train'?"
  assert line.startswith(said)


@pytest.mark.parametrize(
  "name", ["digits", "digits.py", "configs/digits.py", "configs/digits"]
)
def test_a_shipped_config_is_found_by_its_name(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  file = str(shipped.FOLDER / "digits.py")
  assert shipped.find(name) == file
  assert shipped.find(f"{name}:tiny") == f"{file}:tiny"


def test_a_file_of_that_path_wins(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  for name in ("digits", "configs/digits.py"):
    (tmp_path / name).touch()
    assert shipped.find(name) == name
    assert shipped.find(f"{name}:tiny") == f"{name}:tiny"


@pytest.mark.parametrize(
  "name", ["digit", "configs/digit.py", "other/digits.py"]
)
def test_an_unknown_config_names_the_nearest(name):
  with pytest.raises(ValueError, match="no such file.*did you mean 'digits'"):
    shipped.find(name)
