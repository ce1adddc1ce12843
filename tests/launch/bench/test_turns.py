"""Turns of contestants, and tables that are printed row by row."""

import numpy as np

from launch.bench import turns


def test_all_take_turns():
  order = []
  seconds = turns.take_turns(
    {name: lambda name=name: order.append(name) for name in "ab"}, 2, calls=2
  )
  assert "".join(order) == "aabb" * 3  # the first is not counted
  assert {name: each.shape for name, each in seconds.items()} == {
    "a": (2,),
    "b": (2,),
  }


def test_each_takes_turns_with_the_baseline_and_is_told_at_once():
  order = []

  def make(name):
    order.append(f"make {name}")
    return lambda: order.append(name)

  contestants = {name: lambda name=name: make(name) for name in "ab"}
  rows = turns.against(lambda: order.append("base"), contestants, 1)
  name, base, mine = next(rows)
  assert (name, base.shape, mine.shape) == ("a", (1,), (1,))
  assert order == ["make a", "base", "a", "base", "a"]
  assert [row[0] for row in rows] == ["b"]


def test_a_table_is_aligned(capsys):
  table = turns.TimingTable(["name", "updates/s", "of it"], first=8, least=7)
  assert capsys.readouterr().out.splitlines() == [
    "name      updates/s    of it",
    "-" * 28,
  ]
  ratio = np.array([0.5, 1.0, 0.75])
  table.row("a", "12", turns.ratio_cells(ratio)[0])
  assert capsys.readouterr().out == "a                12     0.75\n"
  assert turns.ratio_cells(ratio)[1] == "0.50-1.00"
