"""A shard of value_bounded applies no update of which a worker lacks too
much."""


import numpy as np
import pytest

from asgd import tables
from asgd.live.hosts import Inside
from asgd.live.tables.shard import ShardHost
from asgd.tables import division as division_lib
from asgd.tables import requests
from asgd.tables.requests import JOIN, PULL, PUSH, Request
from asgd.tables.shard import TableShard

KEYS = np.arange(3)


class Hand:
  """A worker that sends requests to a shard, one by one."""

  def __init__(self, host, worker):
    self._host, self._worker = host, worker
    self._cache, self._number, self._life = tables.KeyCache(), 0, 0
    self.ask(JOIN)

  def ask(self, kind, clock=0, **parts):
    head = kind, self._worker, self._life, self._number, 0, clock
    request = Request(*head, **parts)
    self._number += 1
    self._last = requests.dump_request(request)
    return self.ask_again()

  def ask_again(self):
    return self._host.handle(self._last)

  def pull(self, clock=0):
    return self.ask(PULL, clock, tables={"w": KEYS})

  def push(self, value, clock=1):
    values = np.full((3, 1), value)
    sent = tables.RowValues(self._cache.pack(KEYS), values)
    return self.ask(PUSH, clock, done=clock, tables={"w": sent})

  def die(self):
    """Joins as the worker's next incarnation."""
    self._cache, self._number = tables.KeyCache(), 0
    self._life += 1
    self.ask(JOIN)


@pytest.fixture
def host_of(tmp_path):
  def make(threshold=2.0):
    settings = tables.table(
      1.0, 3, consistency="value_bounded", threshold=threshold
    )
    first = {"w": np.zeros((3, 1))}

    def shard():
      division = division_lib.divide(first, 1)
      return TableShard(0, division.server(0, first, settings, 3))

    inside = Inside(
      kill=lambda: None, wait=lambda seconds: None, clock=lambda: 0.0
    )
    return ShardHost(inside, shard, tmp_path, tmp_path, 0, clock_every=1)

  return make


def of(reply):
  """Returns the reply, or None while the request waits."""
  if isinstance(reply, requests.Reply):
    return reply
  return reply.result() if reply.done() else None


def test_an_update_waits_for_those_who_would_lack_too_much(host_of):
  host = host_of()
  one, two = Hand(host, 0), Hand(host, 1)
  assert of(one.pull())
  assert of(two.pull())
  first = two.push(1.5)  # of 2 that worker 0 may lack
  assert of(first)
  two.pull(1)
  second = two.push(0.75, clock=2)  # 2.25
  assert of(second) is None
  assert host.status().waiting == {1}
  assert host.rows()["w"].tolist() == [[1.5]] * 3
  # Worker 0 computes no more: its own message does not wait for the other's.
  assert of(one.push(1.0))
  assert of(second)
  assert host.rows()["w"].tolist() == [[3.25]] * 3
  # A row that was pulled again lacks nothing.
  (_, data), *_ = of(one.pull(1)).rows[-1:]
  rows = tables.Rows(*tables.wire.load(data))
  assert rows.tables["w"][1].tolist() == [[3.25]] * 3


def test_two_updates_that_wait_for_each_other_do_not(host_of):
  host = host_of(threshold=0.5)
  one, two = Hand(host, 0), Hand(host, 1)
  one.pull()
  two.pull()
  first = one.push(4.0)
  assert of(first) is None
  second = two.push(4.0)
  assert of(first)
  assert of(second)
  assert host.rows()["w"].tolist() == [[8.0]] * 3


@pytest.mark.parametrize("goes", [Hand.die, None])
def test_an_update_does_not_wait_for_the_dead(host_of, goes):
  host = host_of(threshold=0.5)
  one, two = Hand(host, 0), Hand(host, 1)
  one.pull()
  two.pull()
  push = two.push(4.0)
  assert of(push) is None
  if goes is None:
    host.leave(0)
  else:
    goes(one)
  assert of(push)
  assert host.rows()["w"].tolist() == [[4.0]] * 3


def test_a_request_that_waits_and_is_asked_again_has_one_answer(host_of):
  host = host_of()
  one, two = Hand(host, 0), Hand(host, 1)
  one.pull()
  two.pull()
  two.push(1.5)
  first = two.push(0.75, clock=2)
  again = two.ask_again()
  assert of(first) is of(again) is None
  one.push(1.0)
  assert of(first) == of(again)
  assert of(first) is not None
  assert host.rows()["w"].tolist() == [[3.25]] * 3
