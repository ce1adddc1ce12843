"""Tasks: their starts follow the definition of each consistency."""

import random
from concurrent.futures import Future

import numpy as np
import pytest

from asgd import tables


class Server:
  """Records the tasks that start; a test decides when they finish."""

  def __init__(self):
    self.started, self.finished, self._open = [], set(), {}

  def call(self, method, number):
    assert method == "do"
    self.started.append(number)
    self._open[number] = Future()
    return self._open[number]

  def finish(self, number):
    self.finished.add(number)
    self._open.pop(number).set_result(-number)

  @property
  def running(self):
    return sorted(self._open)


@pytest.mark.parametrize("delay", [0, 1, 3, None])
def test_a_task_starts_when_those_it_comes_after_have_finished(delay):
  draw = random.Random(7)
  server = Server()
  tasks = tables.Tasks(server.call, delay=delay)
  after = {}
  while len(server.finished) < 40:
    number = len(tasks)
    if number < 40 and draw.random() < 0.5:
      mine = draw.sample(range(number), min(number, draw.randrange(3)))
      after[number] = set(mine)
      assert tasks.issue("do", number, after=mine) == number
    elif server.running:
      server.finish(draw.choice(server.running))
      tasks.look()
    needed = {
      n: {m for m in range(n) if delay is not None and m < n - delay} | each
      for n, each in after.items()
    }
    ready = {n for n, each in needed.items() if each <= server.finished}
    assert set(server.started) == ready  # all that may, and nothing else
  assert tasks.unfinished == []
  assert [tasks.result(n) for n in range(40)] == [-n for n in range(40)]


def test_tasks_of_a_table_see_what_they_come_after():
  table = tables.Table(np.zeros((3, 1)))
  call = tables.tasks.at_once(table)
  tasks = tables.Tasks(call, delay=tables.tasks.SEQUENTIAL)
  tasks.push([1], np.array([[2.0]]))
  bad = tasks.push([7], np.array([[2.0]]))
  rows = tasks.pull([0, 1])
  tasks.finish()
  assert tasks.result(rows).tolist() == [[0.0], [2.0]]
  with pytest.raises(ValueError, match="key 7 is out of range"):
    tasks.result(bad)
  with pytest.raises(ValueError, match="task 1 was not issued, or its result"):
    tasks.result(bad)
  with pytest.raises(ValueError, match="task 3 cannot come after 5: 3 tasks"):
    tasks.pull([0], after=[5])
  with pytest.raises(ValueError, match="delay must be"):
    tables.Tasks(call, delay=-1)
