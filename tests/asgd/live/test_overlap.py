"""A worker that fetches, computes and pushes in three threads."""

import queue
import threading
from typing import NamedTuple

import jax
import live_stores
import numpy as np
import pytest

from asgd.live import frames
from asgd.live.faults import Script
from asgd.live.frames import Frame
from asgd.live.incarnation import OpenJob
from asgd.live.overlap import Stages
from asgd.live.slots import MESSAGES, PARAMS
from asgd.live.worker import LoopContext, WorkerLoop
from asgd.live.worker_spec import WorkerSpec

LONG = 60.0  # seconds until what must happen is taken not to


class Metrics(NamedTuple):
  loss: np.ndarray


class Events:
  """What has happened, by name; `after` waits for it."""

  def __init__(self):
    self._events = {}
    self._lock = threading.Lock()

  def _event(self, name):
    with self._lock:
      return self._events.setdefault(name, threading.Event())

  def happen(self, name):
    self._event(name).set()

  def after(self, name):
    assert self._event(name).wait(LONG), f"{name} did not happen"


class Memory(live_stores.Memory):
  """Message s lies in slot s."""

  def __init__(self, events):
    super().__init__()
    self._events = events
    self[PARAMS, 0] = {"w": np.ones(2, np.float32)}, 7

  def write(self, kind, slot, tree, stamp):
    if slot == 0:
      self._events.happen("push 0")
      self._events.after("compute 1")
    super().write(kind, slot, tree, stamp)


class Link:
  """Three tickets, and the end once three messages were handed in."""

  def __init__(self):
    self._box = queue.SimpleQueue()
    self._box.put((0, Frame(frames.WELCOME, 0, job=1)))
    for seq in range(3):
      ticket = Frame(frames.TICKET, 0, seq, seq, params=0, message=seq)
      self._box.put((0, ticket._replace(value=7.0)))
    self.pushed = []

  def send(self, shard, frame):
    if frame.kind == frames.PUSH:
      self.pushed.append(frame.seq)
    if len(self.pushed) == 3:
      self._box.put((0, Frame(frames.STOP, 0)))

  def receive(self, seconds):
    try:
      return self._box.get(block=seconds != 0, timeout=seconds or None)
    except queue.Empty:
      return None

  def wake(self):
    self._box.put(None)


def make_loop(spec, link, memory, span=None):
  wait = lambda seconds: None  # noqa: E731
  script = Script((), kill=lambda: None, wait=wait)
  context = LoopContext(
    *(link, lambda shard: memory, lambda: 0.0, wait),
    *(script, span, lambda: None),
  )
  return WorkerLoop(0, spec, context, patience=LONG)


def run(fail=None):
  """Runs a loop in which job 1 is computed while job 0 is pushed and job 2 is
  fetched, or nothing goes on; returns (link, memory, spans)."""
  events, spans = Events(), []
  memory, link = Memory(events), Link()

  def batch(worker, job):
    events.happen(f"fetch {job}")

  def work(state, ticket, batch, root, job):
    events.happen(f"compute {job}")
    if fail == job:
      raise ArithmeticError("job 1 fails")
    if job == 1:
      events.after("push 0")
      events.after("fetch 2")
    message = jax.tree.map(lambda x: x * (job + state), ticket.params)
    return state + 10, message, Metrics(np.float32(0.5))

  spec = WorkerSpec(
    *(work, lambda params: 0, batch, None, memory[PARAMS, 0][0], None),
    depth=3,
    overlap=True,
  )
  loop = make_loop(spec, link, memory, spans.append)
  assert loop.run() == "stopped"
  return link, memory, spans


def test_a_job_is_computed_while_others_are_fetched_and_pushed():
  link, memory, spans = run()
  assert link.pushed == [0, 1, 2]
  ends = [(s.name, s.seq) for s in spans if s.name != "fetch"]
  assert ends == [(n, s) for s in range(3) for n in ("compute", "push")]
  for seq in range(3):  # and the worker's state goes from job to job
    message, _ = memory[MESSAGES, seq]
    np.testing.assert_array_equal(message["w"], np.full(2, 11.0 * seq))


def test_a_holder_that_begins_anew_writes_nothing_for_the_one_before():
  memory, link = Memory(Events()), Link()
  params = memory[PARAMS, 0][0]
  spec = WorkerSpec(
    None, lambda params: 0, None, None, params, None, overlap=True
  )
  loop = make_loop(spec, link, memory)
  job = OpenJob(Frame(frames.TICKET, 0, 1, 1), 0.0)
  job.ticket_frames[0] = Frame(frames.TICKET, 0, 1, 1, message=1)
  before = loop._incarnation
  loop._start_next_incarnation()
  loop._write_to_slots(before, job, params)
  assert (MESSAGES, 1) not in memory
  loop._write_to_slots(loop._incarnation, job, params)
  assert (MESSAGES, 1) in memory


def test_what_fails_in_a_thread_ends_the_worker():
  with pytest.raises(ArithmeticError, match="job 1 fails"):
    run(fail=1)


def test_what_fails_in_a_push_is_raised_where_it_is_taken():
  woken = threading.Event()

  def push(job):
    raise KeyError(job)

  with Stages(lambda job: None, push, woken.set) as stages:
    stages.begin("job")
    assert woken.wait(LONG)
    with pytest.raises(KeyError, match="job"):
      stages.take()
    assert not stages.is_ready
