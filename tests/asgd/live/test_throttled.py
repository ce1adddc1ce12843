"""Links that take the time of a network, by a clock that the test holds."""

import math
import socket
import threading
from types import SimpleNamespace

import pytest

from asgd.live import frames, slots
from asgd.live.frames import Frame
from asgd.live.links.throttled import (
  Throttle,
  ThrottledNetwork,
  _ThrottledSocket,
)
from asgd.orders.network import Network


class Clock:
  def __init__(self, network, workers=2):
    self.now, self.came = 0.0, []
    self.throttle = Throttle(network, workers, clock=lambda: self.now)

  def carry(self, way, worker, nbytes, what, shard=0):
    def deliver():
      self.came.append((self.throttle.time, what))

    getattr(self.throttle, f"send_{way}")(worker, shard, nbytes, deliver)

  def at(self, now):
    """Lets time go by, and returns what has come."""
    self.now = now
    self.throttle.deliver_due()
    came, self.came = self.came, []
    return came


def test_bytes_take_their_time():
  clock = Clock(Network(latency=1.0, port=4.0, service=0.5))
  clock.carry("up", 0, 8, "a")
  assert clock.at(3.25) == []
  assert clock.at(3.75) == [(3.5, "a")]
  clock.carry("down", 0, 8, "b")
  assert clock.at(10.0) == [(6.75, "b")]


def test_messages_of_two_workers_meet():
  clock = Clock(Network(port=4.0))
  clock.carry("up", 0, 8, "a")
  clock.at(1.0)
  clock.carry("up", 1, 8, "b")
  assert clock.at(10.0) == [(2.0, "a"), (4.0, "b")]


def test_nothing_overtakes_between_one_worker_and_one_shard():
  for incast in ("queue", "share"):
    clock = Clock(Network(port=4.0, latency=1.0, shards=2, incast=incast))
    clock.carry("up", 0, 8, "push")
    clock.carry("up", 0, 0, "bye")
    clock.carry("up", 0, 0, "to another", shard=1)
    came = clock.at(10.0)
    assert [what for _, what in came] == ["to another", "push", "bye"]
    assert [time for time, _ in came] == [1.0, 3.0, 3.0]


def test_what_is_late_to_be_delivered_delays_nothing_else():
  clock = Clock(Network(up=1.0, port=1.0))
  for what in "abc":
    clock.carry("up", 0, 2, what)
  assert clock.at(100.0) == [(2.0, "a"), (4.0, "b"), (6.0, "c")]
  assert clock.throttle.deliver_due() is None


def test_when_more_may_be_due_is_told():
  clock = Clock(Network(latency=1.0))
  assert clock.throttle.deliver_due() is None
  clock.carry("up", 0, 2, "a")
  assert clock.throttle.deliver_due() == 1.0
  assert clock.at(math.inf) == [(1.0, "a")]


@pytest.mark.parametrize(
  ("kind", "flag", "content"),
  [
    (frames.PUSH, 1, (slots.MESSAGES, 5)),
    (frames.TICKET, frames.WHOLE, (slots.PARAMS, 4)),
    (frames.TICKET, frames.UPDATES, (slots.UPDATES, 5)),
    (frames.TICKET, frames.KEPT, 0),
    (frames.ACK, 0, 0),
  ],
)
def test_a_frame_takes_the_time_of_the_content_that_it_names(
  kind, flag, content
):
  memory = SimpleNamespace(content_nbytes=lambda kind, slot: (kind, slot))
  network, carried = ThrottledNetwork(None, lambda shard: memory), []
  frame = Frame(kind, flag=flag, params=4, message=5)
  network._carry(lambda *args: carried.append(args), 1, frame, "deliver")
  assert carried == [(0, 1, content, "deliver")]


def test_a_receiver_that_reads_nothing_loses_its_connection():
  sender, receiver = socket.socketpair()
  throttled = _ThrottledSocket(sender, lambda frame, deliver: deliver())
  throttled.setblocking(False)
  sent, received = b"", b""
  for first in (0, 10_000):
    # The second time there is room again, after frames that were lost.
    numbers = range(first, first + 10_000)
    packed = b"".join(frames.pack(Frame(frames.ACK, seq=i)) for i in numbers)
    sent += packed
    throttled.send(packed)
    received += receiver.recv(2**20)
  sender.close()
  while part := receiver.recv(2**20):
    received += part
  receiver.close()
  assert received == sent[: len(received)]


def test_a_thread_delivers_and_ends():
  throttle, came = Throttle(Network(latency=1e-4), workers=1), []
  throttle.start()
  there = threading.Event()
  throttle.send_up(0, 0, 8, lambda: (came.append(1), there.set()))
  assert there.wait(60)
  throttle.send_down(0, 0, 8, lambda: came.append(2))
  throttle.close()
  assert came in ([1], [1, 2])
