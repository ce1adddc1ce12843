"""The command that reproduces figures."""

from pathlib import Path

import kit
import pytest

from asgd.data import DataError


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], "give one figure: a NAME (asgd_parity, averaging_period, "),
    (["dano"], "unknown figure 'dano'; did you mean 'dana'"),
    (["no/file.py"], "no/file.py: there is no such file"),
    (["dana", "--all"], "give one figure: a NAME"),
    (["--all", "--workdir=x"], "--workdir is the folder of one figure"),
    (["--all", "--data_dir=x"], "--data_dir is the folder of one figure"),
    (["--docs", "--quick"], "--quick is for a figure: name one, or drop --q"),
    (["dana", "stragglers"], "unexpected argument 'stragglers'"),
    (["{}"], "claim 'c', of: unknown run 'nag'; known: nag_asgd"),
    (["delayed_edge", "--quick", "--workdir={}"], "is a file"),
  ],
)
def test_a_mistake_is_one_line(tmp_path, arguments, message):
  file = tmp_path / "mine.py"
  file.write_text(
    "def get_config():\n"
    "  return {'runs': {'nag_asgd': {'recipe': 'nag_asgd'}}}\n"
    "def get_figure():\n"
    "  bound = dict(name='c', says='s', kind='bound', column='gap_mean')\n"
    "  claims = [dict(bound, of='nag@8', above=0)]\n"
    "  return dict(title='t', paper='p', about='a', claims=claims)\n"
  )
  arguments = [argument.format(file) for argument in arguments]
  done = kit.call("reproduce", *arguments, status=2)
  (line,) = done.stderr.strip().splitlines()
  assert message in line


def test_figures_are_listed():
  said = kit.call("reproduce", "--list", status=0).stdout
  titles = dict(line.split(None, 1) for line in said.splitlines() if line)
  assert titles["delayed_edge"] == "The stability edge of delayed SGD"


def test_all_figures_but_those_without_data_are_trained(monkeypatch):
  trained = []

  def reproduce(task, *_, **options):
    if task.figure.name == "dc_asgd_resnet":
      raise DataError("cannot download cifar10")
    trained.append(task.figure.name)
    return Path()

  figure = {"title": "t"}
  monkeypatch.setattr("asgd.figures.reproduce.reproduce", reproduce)
  monkeypatch.setattr("asgd.experiment.storage.read_json", lambda _: figure)
  pages = []
  monkeypatch.setattr("asgd.figures.gallery.write", pages.append)
  done = kit.call("reproduce", "--all", "--quick", "--docs", status=3)
  assert pages == [Path("docs")]  # of those that were trained
  assert len(trained) == 27
  assert done.stderr == (
    "error: not reproduced: dc_asgd_resnet: cannot download cifar10\n"
  )
