"""A shard in a process that may be killed at any command."""

import random
import re
import shutil

import kit
import numpy as np
import pytest

from asgd.live.hosts import Inside
from asgd.live.sandblaster.shard import LiveShard
from asgd.sandblaster import Command, Image, VectorShard, message_name

INSIDE = Inside(kill=lambda: None, wait=lambda seconds: None, clock=lambda: 0.0)
LIKE = {"v": kit.normal(3), "w": kit.normal(4, 3, seed=1)}
MESSAGES = [
  {"v": kit.normal(3, seed=9 + i), "w": kit.normal(4, 3, seed=50 + i)}
  for i in range(12)
]


def open_shard(folder, from_image=None, **options):
  """Opens a shard from its files if it has any, unless `from_image` is set."""
  if from_image is None:
    from_image = not (folder / "image").exists()
  image = Image(0, {"point": LIKE})
  return LiveShard(INSIDE, folder, image, from_image=from_image, **options)


def evaluation(number, first):
  """Returns the commands of an evaluation with two jobs, from a number on."""
  jobs = [message_name(number, job) for job in range(2)]
  rows = [
    ("copy", "trial", "point"),
    ("allocate", "sum"),
    None,
    *(each for job in jobs for each in (("axpy", "sum", job, 0.5),
      ("discard", job))),
    ("dot", "sum", "sum"),
    ("axpy", "point", "sum", -0.1),
  ]
  commands = []
  for row in rows:
    if row is None:
      commands.append(None)  # it begins
    else:
      number = first + sum(each is not None for each in commands)
      operation, target, *rest = row
      commands.append(Command(number, operation, target, *rest))
  return commands


def test_it_is_what_it_was_after_every_death(tmp_path):
  dice = random.Random(3)
  plain = VectorShard(LIKE, Image(0, {"point": LIKE}))
  live, deaths, number = open_shard(tmp_path), 0, 0
  for count in range(30):
    commands = evaluation(count, number)
    for command in commands:
      if dice.random() < 0.3:
        live.close()
        live, deaths = open_shard(tmp_path), deaths + 1
      if command is None:
        live.begin(count, number)
        kit.same(live.fetch(count), plain.read("trial"))
        for job in range(2):
          rows = MESSAGES[(count + job) % 12]
          live.push(count, job, rows)
          plain.put(message_name(count, job), rows)
        continue
      answer = plain.execute(command)
      assert live.execute_all([command]) == [answer]
      assert live.execute_all([command]) == [answer]  # once only
      number = command.number + 1
    # A late copy of a message is dropped.
    live.push(count, 0, MESSAGES[0])
    live.push(count - 1, 1, MESSAGES[0])
  kit.same(live.read("point"), plain.read("point"))
  kit.same(live.image_at(number).vectors["sum"], plain.read("sum"))
  assert deaths > 40
  # Files that are no longer needed are removed from the folder.
  live.begin(30, number)
  names = {re.sub(r"\d+", "N", path.name) for path in tmp_path.iterdir()}
  assert names == {"commands", "image", "vector-N"}
  assert len(list(tmp_path.iterdir())) <= 3 + len(live.image().vectors) + 1
  live.close()


def test_only_the_parameters_of_this_evaluation_are_fetched(tmp_path):
  live = open_shard(tmp_path)
  live.execute(Command(0, "copy", "trial", "point"))
  live.begin(0, 1)
  live.execute(Command(1, "scale", "trial", factor=2.0))  # after the evaluation
  kit.same(live.fetch(0), LIKE)
  live.begin(1, 2)
  assert live.fetch(0) is None
  np.testing.assert_array_equal(live.fetch(1)["v"], 2 * LIKE["v"])
  live.close()


def test_it_begins_anew_or_from_an_image_of_a_checkpoint(tmp_path):
  live = open_shard(tmp_path)
  live.execute(Command(0, "scale", "point", factor=3.0))
  live.close()
  (tmp_path / "commands").write_bytes(b"damaged" * 8)  # must not be read
  vectors = {"point": LIKE, "trial": MESSAGES[0]}
  again = LiveShard(INSIDE, tmp_path, Image(7, vectors), 4, from_image=True)
  assert again.number == 7
  kit.same(again.read("point"), LIKE)
  kit.same(again.fetch(4), MESSAGES[0])
  again.close()


@pytest.mark.parametrize(
  "name", ["image", "commands", "vector-0", "message-0-0"]
)
def test_files_that_were_changed_are_refused_in_one_line(tmp_path, name):
  live = open_shard(tmp_path)
  live.execute(Command(0, "copy", "trial", "point"))
  live.begin(0, 1)
  live.push(0, 0, MESSAGES[0])
  live.execute(Command(1, "dot", "point", "point"))
  live.close()
  path = tmp_path / name
  content = path.read_bytes()
  path.write_bytes(b"x" + content[1:])
  with pytest.raises(ValueError, match=f"{name} is not what the run wr") as e:
    open_shard(tmp_path)
  assert "\n" not in str(e.value)
  assert len(str(e.value)) < 600
  # Damaged files do not matter to a shard that starts from an image.
  image = Image(0, {"point": LIKE})
  again = LiveShard(INSIDE, tmp_path, image, from_image=True)
  assert again.number == 0
  kit.same(again.read("point"), LIKE)
  again.close()


def test_a_line_that_a_kill_cut_short_was_not_answered(tmp_path):
  live = open_shard(tmp_path)
  live.execute(Command(0, "scale", "point", factor=3.0))
  live.execute(Command(1, "scale", "point", factor=5.0))
  live.close()
  path = tmp_path / "commands"
  path.write_bytes(path.read_bytes()[:-3])
  again = open_shard(tmp_path)
  assert again.number == 1
  again.execute(Command(1, "scale", "point", factor=5.0))
  again.close()
  np.testing.assert_array_equal(
    open_shard(tmp_path).read("point")["v"], LIKE["v"] * 3 * 5
  )


def test_a_shard_whose_files_are_gone_does_not_start_from_the_first_image(
  tmp_path,
):
  """Otherwise the iterate would be the parameters before the first step."""
  folder = tmp_path / "shard-0"
  open_shard(folder).close()
  shutil.rmtree(folder)
  with pytest.raises(ValueError, match="was removed or changed while the run"):
    open_shard(folder, from_image=False)
