"""The report's HTML: it is well formed, whole, and text stays text."""

import csv
import html.parser
import json

import kit
import pytest

from asgd.experiment import report
from asgd.experiment.engines import Column
from asgd.pages import page

VOID = {"meta", "img", "input", "br", "link", "hr"}


class Reader(html.parser.HTMLParser):
  """Asserts that all elements are closed in order; keeps what they hold."""

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.texts = [], [], []
    self.links, self.sources, self.values = [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    named = dict(attrs)
    assert not any(name.startswith("on") for name in named)
    self.links += filter(None, [named.get("href")])
    self.sources += filter(None, [named.get("src")])
    if tag == "data":
      self.values.append(float(named["value"]))
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.texts.append(data)


ATTACK = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """The folder of an experiment of two runs, one with an odd title."""
  workdir = tmp_path_factory.mktemp("page") / "a folder"
  runs = {
    "a": {"recipe": "asgd", "title": ATTACK},
    "b": {"recipe": "asgd", "title": 'B & "b"'},
  }
  exp = kit.train_tiny(workdir, runs=runs, seeds=(0, 1))
  report.write(workdir, exp, ["a-n2-s0: on again after <b>a death</b>"])
  return workdir


def test_a_report_is_one_well_formed_file(written):
  text = (written / "report.html").read_text()
  read = Reader(text)
  assert all(source.startswith("data:image/") for source in read.sources)
  assert read.tags.count("img") == 1
  assert read.tags.count("script") == 1  # the sorting
  for outside in ("http://", "https://", "@import", "url("):
    assert outside not in text
  for link in read.links:
    assert (written / link.replace("%20", " ")).is_file(), link
  assert "figure.pdf" in read.links
  assert "cells/a-n2-s0/cell.npz" in read.links


def test_a_cell_is_one_file_and_a_row_of_the_table_one_board(written):
  files = [path for path in written.rglob("*") if path.is_file()]
  of_cells = [path for path in files if written / "cells" in path.parents]
  boards = [path.parent.name for path in files if "tfevents" in path.name]
  assert len(of_cells) == 4
  assert sorted(boards) == ["a-n2", "b-n2"]
  assert len(files) - len(of_cells) - len(boards) <= 12


def test_every_number_of_the_results_is_in_its_table(written):
  read = Reader((written / "report.html").read_text())
  lines = (written / "results.csv").read_text().splitlines()
  for row in csv.DictReader(lines):
    for key, value in row.items():
      try:
        number = float(value)
      except ValueError:
        continue
      assert number in read.values, key


def test_it_says_what_was_run_where_and_what_went_wrong(written):
  read = Reader((written / "report.html").read_text())
  text = " ".join(read.texts)
  for word in ("jaxlib", "command", "cores", "data.name", ATTACK, 'B & "b"'):
    assert word in text
  assert "on again after <b>a death</b>" in text
  config = json.loads((written / "config.json").read_text())
  versions = config["free"]["versions"]
  assert versions["jax"] in text
  # What differs from the defaults comes first.
  before, _, rest = text.partition("keys with their defaults")
  assert "batch_size" in before
  assert "clip_norm" in rest


def test_all_of_a_config_is_beside_its_default():
  values = {"a": {"b": 1, "c": [2]}, "runs": {"x": {"recipe": "asgd"}}}
  config = page.config(values, {"a": {"b": 1, "c": [3]}})
  text = page.render("", "", config=config)
  first, _, rest = text.partition("<details>")
  assert "a.c" in first
  assert "[2]" in first
  assert "[3]" in first
  assert "runs.x" in first
  assert "a.b" in rest
  assert "1 keys with" in rest


def test_a_deviation_is_beside_its_value_and_what_is_missing_is_a_dash():
  rows = [
    {"algorithm": "A", "loss": 0.123456, "loss_std": 0.01, "of_std": 3, "n": 2},
    {"algorithm": "B", "loss": float("nan"), "loss_std": None, "n": 1},
  ]
  shown = [Column("run", "algorithm"), Column("l", "loss")]
  read = Reader(page.render("", "", results=page.results(rows, shown)))
  assert read.values == [0.123456, 0.01, 3.0, 2.0, 1.0]
  assert "0.123" in read.texts
  assert read.texts.count("-") == 2


def test_warnings_are_told_once_for_all_seeds():
  assert report.warnings([]) == []
  row = {
    **dict(cell="a-n8-s0", label="a", workers=8, recipe="asgd"),
    **dict(learning_rate=0.1, rate_x_sharpness_limit=0.4, sustained=0.8),
    **dict(staleness_mean=7.0, diverged=False),
  }
  (said,) = report.warnings([row, {**row, "cell": "a-n8-s1"}])
  assert said.startswith("a-n8-s0: learning rate x sharpness")
  once = page.render("", "", warnings=page.merge_warnings([said, said]))
  assert once.count("<li>") == 1
  assert "Warnings" not in page.render("", "", warnings=[])


def mean_of(workers, accuracy, std, seeds=3):
  return {
    "algorithm": str(accuracy),
    "workers": workers,
    "seeds": seeds,
    "test_accuracy": accuracy,
    "test_accuracy_std": std,
  }


def marked(*rows):
  """Returns the groups of a table, and the accuracies that it marks."""
  shown = [Column("run", "algorithm"), Column("accuracy", "test_accuracy")]
  drawn = page.results(rows, shown)
  cells = [
    cell for rows in drawn.groups.values() for row in rows for cell in row
  ]
  best = [cell.value for cell in cells if "best" in cell.css_class]
  assert bool(best) == bool(drawn.legend)
  text = page.render("", "", results=drawn)
  assert text.count('best"') == len(best) + bool(best)
  return list(drawn.groups), best


def test_the_best_of_each_number_of_workers_is_marked():
  rows = mean_of(2, 0.9, 0.01), mean_of(2, 0.5, 0.02), mean_of(4, 0.5, 0.01)
  assert marked(*rows) == (["2 workers", "4 workers"], [0.9])
  again = mean_of(4, 0.3, 0.01)
  assert marked(*rows, again)[1] == [0.9, 0.5]


def test_what_is_not_better_than_the_noise_is_not_marked():
  # Welch's test by hand: the difference is 0.1, its standard error
  # sqrt(2 x 0.05**2 / 3) = 0.0408, t of 4 degrees of freedom 2.776.
  assert 2.776 * 0.0408 > 0.1
  assert marked(mean_of(2, 0.9, 0.05), mean_of(2, 0.8, 0.05))[1] == []
  # With 0.04 the bound is 0.0907.
  assert marked(mean_of(2, 0.9, 0.04), mean_of(2, 0.8, 0.04))[1] == [0.9]
  # One seed has no noise that is known; two equal bests are no best.
  one = mean_of(2, 0.9, None, seeds=1)
  assert marked(one, mean_of(2, 0.1, 0.01))[1] == []
  assert marked(mean_of(2, 0.9, 0.0), mean_of(2, 0.9, 0.0))[1] == []
  # A third run that is as good as the first.
  near = mean_of(2, 0.89, 0.04)
  assert marked(mean_of(2, 0.9, 0.04), mean_of(2, 0.8, 0.04), near)[1] == []


def test_a_run_that_diverged_is_not_the_fastest():
  """It ended early."""
  rows = [
    dict(algorithm=name, workers=2, seeds=2, seconds=time, seconds_std=0.1)
    for name, time in zip("abc", (1.0, 5.0, 9.0), strict=True)
  ]
  rows[0]["diverged"] = 1
  (group,) = page.results(rows, [Column("time", "seconds")]).groups.values()
  best = ["best" in cell.css_class for row in group for cell in row[:1]]
  assert best == [False, True, False]


def test_equal_warnings_of_several_cells_are_one_with_a_count():
  texts = [f"a-n{n}-s0: rate stayed at {n / 10}, try 1e-3" for n in (2, 4, 8)]
  texts += ["a-n2-s0: diverged", "the disk: full", "the disk: full"]
  merged = page.merge_warnings(texts)
  assert [len(each.cells) for each in merged] == [3, 1, 0]
  read = Reader(page.render("", "", warnings=merged))
  text = " ".join(read.texts)
  assert "3 cells" in text
  assert "a-n2-s0, a-n4-s0, a-n8-s0" in text
  assert "rate stayed at 0.2, try 1e-3" in text
  assert text.count("the disk: full") == 1


def test_a_report_has_the_panels_of_each_run(written):
  read = Reader((written / "report.html").read_text())
  text = " ".join(read.texts)
  for name in ("a-n2-s0", "b-n2-s0"):
    assert name in text
  assert read.texts.count("Staleness") == 2
  assert "2 other cells have the same panels" in text
