"""The loop of a worker, fed by hand: what it writes, and says, and when."""

from typing import NamedTuple

import jax
import live_stores
import numpy as np
import pytest

from asgd import sharding
from asgd.live import frames
from asgd.live.faults import Script
from asgd.live.frames import Frame
from asgd.live.slots import MESSAGES, PARAMS, message_stamp
from asgd.live.worker import LoopContext, WorkerLoop
from asgd.live.worker_spec import WorkerSpec

ROOT = jax.random.key(0)


class Link:
  """Says what was prepared, and keeps what it is told."""

  def __init__(self, heard):
    self.heard, self.said = heard, []

  def send(self, shard, frame):
    self.said.append((shard, frame))

  def receive(self, seconds):
    return self.heard.pop(0)

  def connect(self, shard):
    return True

  def wake(self):
    pass

  def pushes(self):
    return [shard for shard, frame in self.said if frame.kind == frames.PUSH]


class Metrics(NamedTuple):
  loss: np.ndarray


def loop(
  heard,
  shards=1,
  *,
  consistent=False,
  loss=0.5,
  wait=lambda seconds: None,
  **options,
):
  """A worker of so many shards, each of which has its parameters in slot 0."""
  params = {str(i): np.ones(2, np.float32) for i in range(shards)}

  def work(state, ticket, batch, root, job):
    message = jax.tree.map(lambda x: 2 * x, ticket.params)
    return state, message, Metrics(np.float32(loss))

  plan = sharding.make_plan(params, shards) if shards > 1 else None
  spec = WorkerSpec(
    *(work, lambda params: None, lambda worker, job: None, ROOT, params, plan),
    consistent=consistent,
    slowdown=(2.0,),
  )
  memories = [live_stores.Memory() for _ in range(shards)]
  parts = sharding.split(plan, params) if plan else [params]
  for memory, part in zip(memories, parts, strict=True):
    memory.write(PARAMS, 0, part, 7)
  link = Link(heard)
  script = Script((), kill=lambda: None, wait=lambda seconds: None)
  context = LoopContext(
    *(link, memories.__getitem__, lambda: 0.0, wait),
    *(script, None, lambda: None),
  )
  return WorkerLoop(0, spec, context, **options), link, memories


def ticket(shard=0, seq=0):
  frame = Frame(frames.TICKET, 0, seq, 0, params=0, message=3)
  return shard, frame._replace(value=7.0)


WELCOME = 0, Frame(frames.WELCOME, 0, job=1)
STOP = 0, Frame(frames.STOP, 0)


def test_a_worker_that_lost_its_place_says_nothing_any_more():
  made, link, _ = loop([WELCOME, (0, Frame(frames.EXPEL, 0))], restarts=3)
  hear, first = link.receive, made._hello()
  assert (first.seq, first.job) == (3, -1)

  def hear_last(seconds):
    if len(link.heard) == 1:
      made.revoke()  # by the driver, while the frame is under way
    return hear(seconds)

  link.receive = hear_last
  assert made.run() == "replaced"
  assert link.said == [(0, first)]


def test_an_answer_to_the_holder_before_is_passed_over():
  # It said HELLO twice before it was expelled: the second answer comes late.
  expel = 0, Frame(frames.EXPEL, 0)
  third = 0, Frame(frames.WELCOME, 0, job=3, version=1)
  made, link, _ = loop([WELCOME, expel, WELCOME, ticket(), third, STOP])
  numbers = []
  hear = link.receive

  def note_number(seconds):
    numbers.append(made._incarnation.number)
    return hear(0)

  link.receive = note_number
  assert made.run() == "stopped"
  assert numbers == [-1, 1, -1, -1, -1, 3]
  said = [frame.version for _, frame in link.said]
  assert said == [0, 1]
  # The ticket was the other holder's, too.
  assert not made._incarnation.started_seqs


def test_a_worker_that_lost_its_place_while_it_waited_writes_nothing():
  made, link, (memory,) = loop(
    [WELCOME, ticket(), None], wait=lambda seconds: made.revoke()
  )
  assert made.run() == "replaced"
  assert (MESSAGES, 3) not in memory
  assert not link.pushes()
  made, link, (memory,) = loop([WELCOME, ticket(), None, STOP])
  assert made.run() == "stopped"
  message, stamp = memory[MESSAGES, 3]
  assert stamp == message_stamp(0, 0)
  np.testing.assert_array_equal(message["0"], [2, 2])


@pytest.mark.parametrize(
  ("consistent", "loss", "before"),
  [(False, 0.5, [1]), (True, 0.5, [1, 0]), (False, np.nan, [1, 0])],
)
def test_the_lead_gets_a_message_when_the_other_shards_have_theirs(
  consistent, loss, before
):
  heard = [WELCOME, ticket(), ticket(1), None]
  options = dict(shards=2, consistent=consistent, loss=loss)
  made, link, _ = loop([*heard, STOP], **options)
  assert made.run() == "stopped"
  assert link.pushes() == before
  ack = 1, Frame(frames.ACK, 0, 0)
  made, link, _ = loop([*heard, ack, STOP], **options)
  assert made.run() == "stopped"
  assert link.pushes() == [1, 0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_message_is_of_the_parameters_of_its_ticket(when):
  """The ticket has died, and its slot holds what others were sent."""

  def wait(seconds):
    if when == "meanwhile":
      memory.write(PARAMS, 0, params, 8)

  heard = [WELCOME, ticket(), None, None, STOP]
  made, link, (memory,) = loop(heard, wait=wait)
  params, _ = memory[PARAMS, 0]
  if when == "before":
    memory.write(PARAMS, 0, params, 8)
  assert made.run() == "stopped"
  assert (MESSAGES, 3) not in memory
  assert not link.pushes()


@pytest.mark.parametrize(
  ("heard", "is_sign"),
  [
    ([], False),  # the lead has no job
    ([ticket()], True),  # shard 1 has not sent its part
    ([ticket(), ticket(1), None], True),  # nor acknowledged the message
  ],
)
def test_a_worker_that_waits_for_another_shard_gives_a_sign_of_life(
  heard, is_sign
):
  """Otherwise the lead would expel all workers when a shard is stopped."""
  # None: no frame has arrived for some time, so the worker repeats its own.
  made, link, _ = loop([WELCOME, *heard, None, STOP], shards=2)
  assert made.run() == "stopped"
  *_, last = [
    frame
    for shard, frame in link.said
    if (shard, frame.kind) == (0, frames.HELLO)
  ]
  assert last.flag == is_sign
