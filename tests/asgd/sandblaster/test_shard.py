"""Shards execute numbered commands once, and are rebuilt to the same state."""

import kit
import numpy as np
import pytest

from asgd.sandblaster import Command, Shards, VectorShard, commands, dot


def shard(**vectors):
  made = VectorShard({"w": np.zeros(3)})
  for name, value in vectors.items():
    made.put(name, {"w": np.asarray(value, float)})
  return made


def test_each_operation():
  made = shard(x=[1, 2, 3], y=[4, 5, 6])
  answers = [
    made.execute(Command(number, *rest))
    for number, rest in enumerate([
      ("copy", "z", "x"),
      ("scale", "z", "", 2.0),
      ("axpy", "z", "y", -1.0),
      ("multiply", "z", "x"),
      ("dot", "z", "y"),
      ("allocate", "x"),
      ("discard", "y"),
    ])
  ]
  assert made.read("z")["w"].tolist() == [-2, -2, 0]
  assert answers == [None, None, None, None, -18.0, None, None]
  assert made.read("x")["w"].tolist() == [0, 0, 0]
  with pytest.raises(ValueError, match="no vector 'y'; the vectors: x, z$"):
    made.read("y")


def test_a_command_is_obeyed_once_in_its_turn():
  made = shard(x=[1, 2, 3])
  made.execute(Command(0, "copy", "z", "x"))
  double = Command(1, "scale", "z", factor=2.0)
  for _ in range(3):
    assert made.execute(double) is None
  assert made.execute(Command(2, "dot", "z", "z")) == 56
  made.execute(Command(3, "allocate", "z"))
  assert made.execute(Command(2, "dot", "z", "z")) == 56  # the stored answer
  early = "'5,allocate,z,,1.0' comes too early: the next number is 4"
  with pytest.raises(ValueError, match=early):
    made.execute(Command(5, "allocate", "z"))
  with pytest.raises(ValueError, match="differs from '1,scale,z,,2.0', which"):
    made.execute(double._replace(factor=3.0))
  made.forget(2)
  with pytest.raises(ValueError, match="dropped: the journal starts at 2"):
    made.execute(double)
  assert made.execute(Command(2, "dot", "z", "z")) == 56


def test_the_first_message_counts_and_a_lost_shard_comes_back():
  made, other = shard(x=[1, 2, 3]), shard(x=[1, 2, 3])
  other.put("x", {"w": np.ones(3)})
  for number in range(200):
    for each in (made, other):
      if number == 150:
        each.put("y", {"w": np.full(3, 0.1)})
      name = "x" if number < 150 else "y"
      copy = Command(number, "axpy" if number else "copy", "z", name)
      each.execute(copy)
    if number % 33 == 0 or number > 190:
      other.lose()
  kit.same(other.read("z"), made.read("z"))
  assert other.recoveries == 15


def test_the_total_is_the_sum_over_shards_in_their_order():
  x = {"b": kit.normal(5), "w": kit.normal(7, 3, seed=1)}
  parts = [Shards(x, count, start={"x": x}) for count in (1, 2, 5)]
  totals = [each.execute(Command(0, "dot", "x", "x")) for each in parts]
  np.testing.assert_allclose(totals, dot(x, x), rtol=1e-15)
  for each in parts:
    kit.same(each.read("x"), x)


@pytest.mark.parametrize(
  ("line", "why"),
  [
    ("0,dot,x", "not enough values"),
    ("-1,dot,x,y,1.0", "number must be a whole number, 0 or more, not -1"),
    ("0,dott,x,y,1.0", "unknown operation 'dott'; did you mean 'dot'"),
    ("0,dot,x,,1.0", "dot needs a target and a source, not"),
    ("0,scale,x,y,1.0", "scale needs a target and no source, not"),
    ("0,scale,x,,nan", "a factor of scale must be finite, not nan"),
    ("0,copy,x,y,2.0", "copy has no factor, not 2.0"),
  ],
)
def test_commands_that_are_none(line, why):
  with pytest.raises(ValueError, match="is no command, which is") as told:
    commands.Command.parse(line)
  assert why in str(told.value)
