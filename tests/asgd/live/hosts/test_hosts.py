"""Hosts that are threads: calls, deaths and successors."""

import os
import threading
import time
from concurrent.futures import Future

import pytest

from asgd.live.hosts import HostExited
from asgd.live.hosts.threads import ThreadHosts


class Counter:
  """Counts, and can be killed or hang on the way."""

  def __init__(self, inside, events=None):
    self.inside, self.count, self.later = inside, 0, Future()
    self.events = events if events is not None else []

  def add(self, number=1):
    self.count += number
    return self.count

  def fail(self):
    raise ValueError("not so")

  def put_off(self):
    return self.later

  def do_it(self):
    self.later.set_result("late")

  def die(self):
    self.inside.kill()

  def hang(self, entered):
    entered.set()
    self.inside.wait(3600.0)

  def of(self, other):
    return other.call("add").result()

  def close(self):
    self.events.append("closed")


def test_calls_are_made_one_after_the_other(hosts):
  host = hosts.start("shard", 0, Counter)
  calls = [host.call("add") for _ in range(100)]
  assert [call.result() for call in calls] == list(range(1, 101))
  assert hosts.make_call("shard", 0).result() is None
  assert hosts.exited() == []


def test_an_answer_may_be_put_off(hosts):
  host = hosts.start("shard", 0, Counter)
  late = host.call("put_off")
  assert host.call("add").result() == 1
  assert not late.done()
  host.call("do_it").result()
  assert late.result() == "late"


def test_what_a_method_raises_is_the_answer_and_ends_nothing(hosts):
  host = hosts.start("worker", 3, Counter)
  with pytest.raises(ValueError, match="not so") as told:
    host.call("fail").result()
  assert told.value.__notes__ == ["in worker 3"]
  assert host.call("add").result() == 1


def test_what_making_raises_is_the_answer_to_all(hosts):
  def make(inside):
    raise ValueError("no such folder")

  host = hosts.start("shard", 0, make)
  for call in (hosts.make_call("shard", 0), host.call("add")):
    with pytest.raises(ValueError, match="no such folder"):
      call.result()


@pytest.mark.parametrize("how", ["itself", "killed"])
def test_one_that_died_is_gone_for_all_and_another_takes_its_place(hosts, how):
  events = []
  host = hosts.start("shard", 0, lambda inside: Counter(inside, events))
  entered = threading.Event()
  other = hosts.start("worker", 0, Counter)
  assert other.call("of", host).result() == 1
  call = host.call("die") if how == "itself" else host.call("hang", entered)
  if how == "killed":
    entered.wait()
    hosts.kill("shard", 0)
  waiting = host.call("add")
  for each in (call, waiting, other.call("of", host)):
    with pytest.raises(HostExited, match="shard 0 has exited"):
      each.result()
  assert hosts.exited() == [("shard", 0)]
  host.thread.join()
  assert events == ["closed"]
  again = hosts.start("shard", 0, Counter)
  assert other.call("of", again).result() == 1
  assert hosts.exited() == []


def test_waiting_ends_with_the_first(hosts):
  host = hosts.start("worker", 0, Counter)
  late, soon = host.call("put_off"), host.call("add")
  assert hosts.wait([late, soon], 60.0) == [soon]
  assert hosts.wait([late], 0.0) == []


def test_a_thread_that_was_ended_writes_nothing_when_it_wakes(tmp_path):
  """Another may have its place by then, and write to the same file."""
  begun, woken = threading.Event(), threading.Event()

  class Sleeper:
    def __init__(self, inside):
      self.disk = inside.disk

    def write(self, path):
      file = os.open(path, os.O_WRONLY | os.O_CREAT)
      self.disk.write(file, b"before")
      begun.set()
      woken.wait()
      try:
        self.disk.write(file, b"after")
      finally:
        os.close(file)

  hosts = ThreadHosts(began=time.monotonic())
  host = hosts.start("worker", 0, Sleeper)
  call = host.call("write", tmp_path / "file")
  begun.wait()
  hosts.kill("worker", 0)
  woken.set()
  hosts.close()
  assert (tmp_path / "file").read_bytes() == b"before"
  with pytest.raises(HostExited):
    call.result()


class Waiter:
  """Waits for something that its host does not know of."""

  def __init__(self, inside):
    self.over, self.drained = threading.Event(), False

  def run(self):
    assert self.over.wait(300.0)
    return self.drained

  def interrupt(self):
    self.over.set()

  def drain(self):
    self.drained = True
    self.over.set()


def test_an_object_that_waits_elsewhere_is_interrupted(hosts):
  host = hosts.start("worker", 0, Waiter)
  call = host.call("run")
  host.make_call.result()
  hosts.kill("worker", 0)
  host.thread.join()
  with pytest.raises(HostExited):
    call.result()


def test_an_object_drains_if_it_can(hosts):
  host = hosts.start("worker", 0, Waiter)
  call = host.call("run")
  host.make_call.result()
  assert host.drain()
  assert call.result()
  other = hosts.start("worker", 1, Counter)
  other.make_call.result()
  assert not other.drain()


def test_who_takes_an_index_ends_the_one_before(hosts):
  before = hosts.start("worker", 0, Counter)
  hosts.start("worker", 0, Counter)
  before.thread.join()
  with pytest.raises(HostExited):
    before.call("add").result()
