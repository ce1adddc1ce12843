"""The supervisor of a run's parties, with threads and a clock by hand."""

import threading
import time
from concurrent.futures import Future

import pytest

from asgd.live import supervisor as supervisor_lib
from asgd.live.deadlines import DEAD_FACTOR, Ladder
from asgd.live.failures import NotFinite, ShardsDie, WorkersDie
from asgd.live.hosts import HostExited
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.supervisor import Supervisor

LADDER = Ladder(floor=1.0, start=10.0)


class Counter:
  """Counts its calls; one that is made with an odd number exits when it is
  called."""

  def __init__(self, inside, start):
    self.inside, self.count = inside, start

  def add(self, number):
    if self.count % 2:
      self.inside.kill()
    self.count += number
    return self.count


def counter(start):
  return lambda inside: Counter(inside, start)


@pytest.fixture
def supervisor():
  made = Supervisor(
    ThreadHosts(began=time.monotonic()), {"shard": 2, "worker": 2}, LADDER
  )
  yield made
  made.close()


@pytest.fixture
def clock(supervisor):
  """Seconds that the supervisor reads, to be set."""
  seconds = [0.0]
  supervisor.hosts.clock = lambda: seconds[0]
  return seconds


def test_a_party_that_does_not_answer_is_left_out_and_ended(supervisor):
  parties = [supervisor.start("shard", i, counter(2 + i)) for i in range(2)]
  assert supervisor.await_made(parties) == []
  assert supervisor.ask("shard", "add", 5) == {0: 7}
  (lost,) = supervisor.exited_parties("shard")
  assert lost is supervisor.parties["shard"][1]
  assert not supervisor.ask(lost.kind, "add", 5, among=[lost.index])
  supervisor.drop(lost)
  assert supervisor.exited_parties("shard") == []


def test_a_party_is_asked_until_one_that_replaces_it_answers(supervisor):
  starts = {0: [4], 1: [1, 3, 6]}

  def start(index):
    supervisor.start("shard", index, counter(starts[index].pop(0)))

  for index in starts:
    start(index)
  answer = supervisor.ask_until_answered("shard", "add", 2, restart=start)
  assert answer == [6, 8]  # the one that answered was called once
  assert supervisor.replaced == {"shard": 2, "worker": 0}


def test_a_silent_party_is_named_and_ended(monkeypatch):
  monkeypatch.setattr(supervisor_lib, "_CALL_CHECK_SECONDS", 0.01)
  monkeypatch.setattr(supervisor_lib, "_SHOW_AFTER", 0.0)
  hosts, lines = ThreadHosts(began=time.monotonic()), []
  hosts.show = lines.append
  supervisor = Supervisor(hosts, {"shard": 2}, LADDER, patience=0.0)
  for index in range(2):
    supervisor.start("shard", index, lambda inside: inside)
  supervisor.await_made([*supervisor.parties["shard"].values()])
  silent = supervisor.parties["shard"][1]
  assert not supervisor.ask(silent.kind, "wait", 600.0, among=[silent.index])
  assert lines == ["waiting 0 s for an answer of shard 1"]
  assert hosts.exited() == [("shard", 1)]
  hosts.close()


def test_a_party_that_is_still_starting_is_not_ended(monkeypatch):
  """On a busy machine the imports of a process take longer than `patience`."""
  monkeypatch.setattr(supervisor_lib, "_CALL_CHECK_SECONDS", 0.01)
  monkeypatch.setattr(supervisor_lib, "_SHOW_AFTER", 0.0)
  hosts, imported = ThreadHosts(began=time.monotonic()), threading.Event()
  hosts.show = lambda line: imported.set()
  supervisor = Supervisor(hosts, {"shard": 1}, LADDER, patience=0.0)

  def make(inside):
    assert imported.wait(300.0)
    return Counter(inside, 2)

  supervisor.start("shard", 0, make)
  assert supervisor.ask("shard", "add", 5) == {0: 7}
  hosts.close()


class Full:
  """Fails when it is called, and reports why a moment later."""

  def __init__(self, inside):
    self._inside, self._ended = inside, Future()

  def run(self):
    return self._ended

  def add(self, number):
    self._inside.run_later(lambda: None, "report")
    raise HostExited("shard", 0)

  def report(self, call):
    self._ended.set_exception(ValueError("no space left"))


def test_a_party_that_fails_as_it_is_asked_reports_why(supervisor):
  party = supervisor.start("shard", 0, Full)
  party.run = party.host.call("run")
  assert supervisor.ask("shard", "add", 5) == {}
  with pytest.raises(ValueError, match="no space left"):
    list(supervisor.take_ended("shard"))


class Still:
  """Stands still in a call until it is freed."""

  def __init__(self):
    self.free = threading.Event()

  def add(self, number):
    assert self.free.wait(300.0)
    return number


def test_a_party_that_stands_still_holds_up_no_poll(supervisor):
  still, later, hosts = Still(), [0.0], supervisor.hosts
  run_clock = hosts.clock
  hosts.clock = lambda: run_clock() + later[0]
  supervisor.start("shard", 0, lambda inside: still)
  supervisor.start("shard", 1, counter(2))
  supervisor.await_made([*supervisor.parties["shard"].values()])

  def poll():
    return supervisor.poll("shard", "add", 4, among=range(2))

  assert [poll(), poll()] == [{1: 6}, {1: 10}]
  call = supervisor.parties["shard"][0].poll
  still.free.set()
  assert call.result() == 4
  assert poll() == {0: 4, 1: 14}
  still.free.clear()
  assert poll() == {1: 18}
  assert not supervisor.exited_parties("shard")
  later[0] = 60.0
  assert poll() == {1: 22}
  assert [party.index for party in supervisor.exited_parties("shard")] == [0]
  still.free.set()


def test_a_job_that_takes_too_long_ends_its_party(supervisor, clock):
  workers = [supervisor.start("worker", i, counter(0)) for i in range(2)]

  def watch(seconds, *done):
    clock[0] = seconds
    for worker, jobs in zip(workers, done, strict=True):
      supervisor.watch(worker, jobs)
    return [worker.index for worker in workers if worker.hung]

  for second in range(7):  # worker 0 does a job a second, worker 1 is idle
    assert not watch(second, second, None)
  assert supervisor.deadlines.dead_after == 3 * DEAD_FACTOR  # the median is 1
  assert workers[0].has_done_job and not workers[1].has_done_job
  assert not watch(15.0, 6, 0)
  assert watch(15.1, 6, 0) == [0]
  assert not watch(25.0, None, 0)[1:]  # it has time to start
  supervisor.stop_job_times("worker")
  assert not watch(35.0, None, 0)[1:]
  assert not watch(45.0, None, 0)[1:]
  assert watch(45.1, None, 0)[1:] == [1]
  assert len(supervisor.exited_parties("worker")) == 2


def test_exits_count_until_a_message_is_received(supervisor):
  for _ in range(10):
    supervisor.count_exit("shard", 1, "died")
    supervisor.count_exit("worker", 1, "died")
  supervisor.count_received(0)
  with pytest.raises(ShardsDie, match="shards ended 11 times before a message"):
    supervisor.count_exit("shard", 1, "died")
  with pytest.raises(WorkersDie, match=r"11 workers ended.*worker 1 hung"):
    supervisor.count_exit("worker", 1, "hung")
  supervisor.count_received(1)
  supervisor.count_exit("shard", 1, "died")


def test_refusals_count_until_a_message_is_received(supervisor):
  for _ in range(6):
    supervisor.count_refusal("worker", 0)
  with pytest.raises(NotFinite, match="7 messages in a row.*of worker 1"):
    supervisor.count_refusal("worker", 1)
  supervisor.count_received(1)
  supervisor.count_refusal("worker", 1)


def test_who_exits_while_it_is_made_is_not_ready(supervisor):
  """The driver may look at it before it sees that it has exited."""
  parties = [
    supervisor.start("worker", index, make)
    for index, make in enumerate((counter(0), lambda inside: inside.kill()))
  ]
  assert supervisor.await_made(parties) == parties[1:]
  assert [party.is_ready for party in parties] == [True, False]
