"""What a worker on another machine did, as its lead writes it down."""

import math
import sys
import threading
import time
import types
from concurrent import futures

import pytest

from asgd.live.faults import Fault
from asgd.live.hosts import Inside
from asgd.live.links import notes
from asgd.live.server.hosted_shard import HostedShard
from asgd.live.spans import Span, read_spans, spans_path

AHEAD = 1000.0  # of the lead's clock, that of the worker


class RayError(Exception):
  pass


class RayTaskError(RayError):
  def __init__(self, cause):
    self.cause = cause


class World:
  """Leads without Ray, one in the place of the other; their calls are thunks,
  which are made when somebody looks at them. Half a second goes by before a
  call is made, and as much until its answer is there."""

  exceptions = types.SimpleNamespace(
    RayError=RayError, RayTaskError=RayTaskError
  )

  def __init__(self, run):
    self.now = 1.0  # by the lead's clock
    self.run = run
    self.leads = [self.lead()]
    self.calls = []

  def lead(self):
    inside = Inside(
      lambda: None, lambda seconds: None, lambda: self.now
    )
    server = types.SimpleNamespace(serve=None)
    return HostedShard(inside, server, self.run)

  def find(self):
    if not self.leads:
      raise ValueError("no such actor")
    return self.handle(self.leads[-1])

  def handle(self, actor):
    def remote(name, args):
      self.calls.append(name)

      def call():
        if actor not in self.leads:
          raise RayError("it died")
        try:
          return getattr(actor, name)(*args)
        except OSError as error:
          raise RayTaskError(error) from error

      return call

    return types.SimpleNamespace(call=types.SimpleNamespace(remote=remote))

  def get(self, call, timeout):
    assert timeout
    self.wait_for(0.5)
    try:
      return call()
    finally:
      self.wait_for(0.5)

  def wait_for(self, seconds):
    self.now += seconds

  def clock(self):
    return self.now + AHEAD


@pytest.fixture
def world(monkeypatch, tmp_path):
  made = World(tmp_path)
  monkeypatch.setitem(sys.modules, "ray", made)
  return made


def made_notes(world):
  return notes.RemoteNotes(
    2, world.find, clock=world.clock, wait=world.wait_for
  )


def job(at, seq):
  """The stretches of a job of a second each, from then on by a clock."""
  names = enumerate(("fetch", "compute", "push"))
  return [Span(name, at + i, at + i + 1, seq, 10 + seq) for i, name in names]


def do(told, at, seq):
  """Does a job, of which the notes are told."""
  for span in job(at, seq):
    told.add_span(span)


def written(world):
  return read_spans(spans_path(world.run, 2))


def test_spans_are_written_in_the_time_of_the_lead(world):
  told = made_notes(world)
  for seq in range(2):
    do(told, AHEAD + 10.0 * seq, seq)
  told.close()
  assert written(world) == job(0.0, 0) + job(10.0, 1)
  asked = world.calls.count("clock")
  assert asked == 5  # the second job was within five seconds of that


def test_the_clock_is_asked_again_as_time_goes_by(world):
  told = made_notes(world)
  do(told, AHEAD, 0)
  futures.wait(told._calls)
  world.now += 10.0
  do(told, AHEAD + 20.0, 1)
  told.close()
  assert world.calls.count("clock") == 6


def test_what_a_dying_lead_was_told_is_told_to_the_next(world):
  tried = threading.Event()
  told = made_notes(world)
  told._wait = lambda seconds: (tried.set(), time.sleep(0.001))
  do(told, AHEAD, 0)
  world.leads = []
  do(told, AHEAD + 3.0, 1)
  do(told, AHEAD + 6.0, 2)
  assert tried.wait(60)
  world.leads = [world.lead()]
  told.close()
  assert written(world) == job(0.0, 0) + job(3.0, 1) + job(6.0, 2)


def test_without_a_lead_the_end_is_not_put_off_for_ever(world, monkeypatch):
  monkeypatch.setattr(notes, "_CLOSE_SECONDS", 0.01)
  told, world.leads = made_notes(world), []
  told._wait = lambda seconds: time.sleep(0.001)
  do(told, AHEAD, 0)
  told.close()
  assert not spans_path(world.run, 2).exists()


def test_a_fault_is_written_before_it_happens(world):
  told, fault = made_notes(world), Fault(2, 7, "kill")
  told.send_fault(fault)
  assert (world.run / "faults.csv").read_text() == "2,7,kill,0.0\n"
  replacement, world.leads = [world.lead()], []
  told._wait = lambda seconds: world.leads.extend(replacement)
  told.send_fault(fault._replace(seq=8))
  assert (world.run / "faults.csv").read_text().count("\n") == 2


def test_a_disk_that_takes_nothing_ends_the_worker(world, tmp_path):
  told = made_notes(world)
  world.leads[0]._run = tmp_path / "gone"
  with pytest.raises(FileNotFoundError):
    told.send_fault(Fault(2, 7, "kill"))


def test_no_thread_goes_on_after_a_span_that_was_not_written(
  world, monkeypatch
):
  monkeypatch.setattr(notes, "_CLOSE_SECONDS", 0.01)
  told = made_notes(world)
  told._wait = lambda seconds: time.sleep(0.001)
  (world.run / "spans-2.csv").mkdir()
  do(told, AHEAD, 0)
  futures.wait(told._calls)
  world.leads = []
  told._pool.submit(told._call, "clock")
  with pytest.raises(IsADirectoryError):
    told.close()
  (thread,) = told._pool._threads
  thread.join(10)
  is_alive, told._closed = thread.is_alive(), True
  assert not is_alive


# One machine's clock and another's.


def test_nothing_is_known_before_the_first_answer():
  offset = notes.ClockOffset()
  assert math.isnan(offset.seconds)
  assert offset.error == math.inf


def test_the_truth_is_between_the_question_and_the_answer():
  offset = notes.ClockOffset()
  offset.add_answer(100.0, 7.0, 104.0)  # theirs is ours less 93 to 97
  assert (offset.seconds, offset.error) == (-95.0, 2.0)


@pytest.mark.parametrize("answers", [1, -1])
def test_the_bounds_of_all_answers_hold(monkeypatch, answers):
  monkeypatch.setattr(notes, "_MAX_DRIFT", 0.0)
  offset = notes.ClockOffset()
  # Theirs is ours less 95: of one question the way there is the slow one, of
  # the other the way back, and together they are exact.
  for question in [(100.0, 9.0, 104.0), (200.0, 105.0, 208.0)][::answers]:
    offset.add_answer(*question)
  assert (offset.seconds, offset.error) == (-95.0, 0.0)


def test_bounds_widen_as_clocks_drift(monkeypatch):
  monkeypatch.setattr(notes, "_MAX_DRIFT", 0.25)
  offset = notes.ClockOffset()
  offset.add_answer(100.0, 10.0, 100.0)
  offset.add_answer(100.0, 10.0, 108.0)  # a slow answer, eight seconds later
  # -90 at 100; 2 either way at 108, of which the answer has -98 to -90.
  assert (offset.seconds, offset.error) == (-91.0, 1.0)


def test_the_last_of_two_answers_that_contradict_each_other_counts():
  offset = notes.ClockOffset()
  offset.add_answer(100.0, 10.0, 100.0)
  offset.add_answer(102.0, 52.0, 104.0)  # theirs was set, or ours stood still
  assert (offset.seconds, offset.error) == (-51.0, 1.0)
