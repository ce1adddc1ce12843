"""Turns of contestants."""

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
