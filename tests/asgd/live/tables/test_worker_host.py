"""A worker of tables in its host, with shards that give a test's answers."""

import numpy as np
import pytest

from asgd import tables
from asgd.live.faults import Script
from asgd.live.hosts import HostExited, Inside
from asgd.live.hosts.base import SHARD
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.worker import LOST, WorkerHost
from asgd.tables import division as division_lib
from asgd.tables.worker import TableWorker

FIRST = {"w": np.zeros((4, 1))}


class Waits:
  """A shard that has not answered when it is looked at."""

  def __init__(self):
    self.calls = 0

  def call(self, method, *args):
    self.calls += 1
    return self

  def result(self):
    raise AssertionError("the worker must not wait for this shard yet")


class Lost(Waits):
  """A shard that has exited."""

  def result(self):
    raise HostExited(SHARD, 0)


@pytest.fixture
def worker(tmp_path):
  settings = tables.table(1.0, 1, consistency="asynchronous", shards=2)
  division = division_lib.divide(FIRST, 2)
  work = tables.Work(lambda *_: 0, lambda _: {"w": np.arange(4)}, None)

  def make(incarnation, work):
    counts = {"workers": 1, "jobs": 1}
    return TableWorker(0, incarnation, settings, division, work, **counts)

  inside = Inside(
    kill=lambda: None, wait=lambda seconds: None, clock=lambda: 0.0
  )
  return WorkerHost(
    *(inside, make, work, JobJournal(inside, tmp_path, 0)),
    shards={},
    script=Script((), kill=inside.kill, wait=inside.wait),
  )


def test_a_lost_shard_is_reported_before_others_have_answered(worker):
  """Other shards may wait for a request that the lost shard has not
  received."""
  lost, waits = Lost(), Waits()
  assert worker.run(None, {0: lost, 1: waits}) == (LOST, 0)
  # The call to the other shard stays open.
  assert worker.run(None, {0: lost}) == (LOST, 0)
  assert (lost.calls, waits.calls) == (2, 1)
