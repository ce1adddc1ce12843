"""Tables on a terminal are as wide as the screen, elsewhere complete."""

import io
import re
import sys

import pytest

from asgd import output, text_table

HEADER = ["run", *(f"column {n}" for n in range(10))]
ROWS = [["dana_zero", *(str(n) for n in range(10))]]


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize(("columns", "shown"), [(200, 8), (60, 5)])
def test_a_terminal_gets_columns_that_fit_at_most_eight(
  monkeypatch, columns, shown
):
  monkeypatch.setenv("COLUMNS", str(columns))
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setattr(sys, "stdout", Terminal())
  text = re.sub(r"\x1b\[[0-9;]*m", "", output.table(HEADER, ROWS, "all.csv"))
  *table, last = text.splitlines()
  assert re.split(r"\s{2,}", table[0].strip()) == HEADER[:shown]
  assert table[-1].split() == ROWS[0][:shown]
  assert max(map(len, table)) <= columns
  assert last == f"{len(HEADER) - shown} more columns are in all.csv"


def test_a_pipe_gets_the_complete_table():
  plain = text_table.format_table(HEADER, ROWS)
  assert output.table(HEADER, ROWS, "all.csv") == plain
