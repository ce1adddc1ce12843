"""Progress: a bar on a terminal, plain lines elsewhere."""

import io

import numpy as np

from asgd.experiment import progress
from asgd.experiment.cells import Cell
from asgd.experiment.engines import Progress

CELL = Cell("asgd", "ASGD", 8, 0)
NEWS = Progress(loss=np.full(10, 0.25), staleness=7.0, gap=0.001)


class Terminal(io.StringIO):
  def isatty(self):
    return True


def test_a_terminal_gets_a_block_with_loss_staleness_and_gap(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "80")
  stream = Terminal()
  bar = progress.ProgressBar(10, stream=stream)
  bar.update(CELL, NEWS)
  bar.line("a line that stays")
  bar.close()
  assert bar.notes == ["a line that stays"]  # for the report
  text = stream.getvalue()
  assert "asgd-n8-s0: loss 0.250 staleness 7.0 gap 0.001" in text
  assert "10/10" in text
  assert "a line that stays\n" in text


def test_a_quiet_bar_shows_notes_only():
  stream = Terminal()
  bar = progress.ProgressBar(10, stream=stream, seconds=0, quiet=True)
  bar.update(CELL, NEWS)
  bar.line("a note")
  bar.close()
  assert stream.getvalue() == "a note\n"


def test_anything_else_gets_plain_lines():
  stream = io.StringIO()
  bar = progress.ProgressBar(40, stream=stream, seconds=0)
  bar.skip(10)
  bar.update(CELL, NEWS)
  bar.update(CELL, NEWS._replace(staleness=None, gap=None))
  bar.close()
  assert stream.getvalue() == (
    " 50% asgd-n8-s0: loss 0.250 staleness 7.0 gap 0.001\n"
    " 75% asgd-n8-s0: loss 0.250\n"
  )


def test_lines_are_rare():
  stream = io.StringIO()
  bar = progress.ProgressBar(40, stream=stream, seconds=1000)
  bar.update(CELL, NEWS)
  assert stream.getvalue() == ""


def test_warnings_are_said_for_the_first_seed_of_a_run_only():
  stream = io.StringIO()
  bar = progress.ProgressBar(
    40, stream=stream, describe=lambda engine, row: f"on {engine}"
  )
  result = {
    "engine": "simulate",
    "recipe": "asgd",
    "test_accuracy": 0.5,
    "rate_x_sharpness_limit": None,
    "sustained": None,
    "diverged": True,
  }
  for cell in (CELL, CELL._replace(seed=1), CELL._replace(workers=16)):
    bar.finish(cell, {**result, "cell": cell.name})
  lines = stream.getvalue().splitlines()
  assert lines[0] == "asgd-n8-s0: accuracy 50.0 %, on simulate"
  assert [line.startswith("warning: ") for line in lines] == [
    *(False, True, False),
    *(False, True),
  ]
  assert "the loss diverged. Try a lower learning rate" in lines[1]


def test_a_closed_stderr_is_no_reason_to_fail():
  bar = progress.ProgressBar(10, stream=None, seconds=0)
  bar.update(CELL, NEWS)
  bar.close()


def test_silence_takes_all_that_a_bar_takes():
  bar = progress.Silent()
  bar.skip(3)
  bar.update(CELL, NEWS)
  bar.line("x")
  bar.finish(CELL, {})
  bar.close()
