"""Calls over a network: the same calls and answers, later by its formula."""

import time
from concurrent.futures import Future

import pytest

from asgd.live.hosts import Host, HostExited
from asgd.live.hosts.base import SHARD
from asgd.live.links import throttled_hosts
from asgd.live.links.throttled import Throttle
from asgd.orders.network import Network

NETWORK = Network(latency=1.0, up=4.0, down=2.0, port=8.0)


class Shard(Host):
  """Answers with twice what it is sent, at once, and notes when it was."""

  kind, index = SHARD, 0

  def __init__(self, clock):
    self.clock, self.calls = clock, []

  def call(self, method, *args):
    self.calls.append((self.clock(), method, args))
    answer = Future()
    if method == "fail":
      answer.set_exception(HostExited(SHARD, 0))
    else:
      answer.set_result(args[0] * 2)
    return answer


class VirtualTime:
  """A shard behind a network, by a clock that moves from event to event."""

  def __init__(self, network):
    self.now = 0.0
    self.throttle = Throttle(network, 2, clock=lambda: self.now)
    self.shard = Shard(lambda: self.now)
    self.answers = []

  def call(self, worker, *args):
    host = throttled_hosts.ThrottledHost(self.throttle, worker, self.shard)
    call = host.call(*args)
    call.add_done_callback(
      lambda done: self.answers.append((self.now, done.result()))
    )

  def run(self):
    while (due := self.throttle.deliver_due()) is not None:
      self.now = due


def test_calls_and_answers_are_as_late_as_the_network_says():
  one, two = b"8 bytes.", b"8 more.."
  times = VirtualTime(NETWORK)
  times.call(0, "hear", one)
  times.call(0, "hear", two)
  times.run()
  # Sent at 0 and, when the first has left, at 8 / 4: 1 + 8 / min(4, 8) later.
  assert times.shard.calls == [(3.0, "hear", (one,)), (5.0, "hear", (two,))]
  # 1 + 16 / min(8, 2) later; the second waits for the link: 16 / 2 more.
  assert times.answers == [(12.0, one * 2), (20.0, two * 2)]
  # Without a network they are the same, at once.
  direct = VirtualTime(Network())
  direct.call(0, "hear", one)
  direct.call(0, "hear", two)
  direct.run()
  assert [call[1:] for call in direct.shard.calls] == [
    call[1:] for call in times.shard.calls
  ]
  assert direct.answers == [(0.0, one * 2), (0.0, two * 2)]


def test_two_workers_meet_at_the_port_of_a_shard():
  times = VirtualTime(Network(port=4.0))
  times.call(0, "hear", b"8 bytes.")
  times.call(1, "hear", b"8 more..")
  times.run()
  assert [when for when, *_ in times.shard.calls] == [2.0, 4.0]


def test_a_lost_host_is_known_when_the_call_arrives():
  times = VirtualTime(NETWORK)
  host = throttled_hosts.ThrottledHost(times.throttle, 0, times.shard)
  call = host.call("fail", b"8 bytes.")
  times.run()
  assert times.now == 3.0
  with pytest.raises(HostExited):
    call.result()


def test_hosts_in_threads_link_their_calls():
  """And one that waits for an answer on its way ends with the others."""
  hosts = throttled_hosts.make_hosts(
    Network(latency=1e-4), 1, began=time.monotonic()
  )
  shard = hosts.start(SHARD, 0, lambda inside: [3, 1, 2])

  class Worker:
    def __init__(self, inside):
      self.link = inside.wrap_host

    def ask(self, host):
      linked = self.link(host)
      linked.call("sort").result()
      return linked.call("index", 3).result()

  worker = hosts.start("worker", 0, Worker)
  assert worker.call("ask", shard).result() == 2
  waiting = worker.call("ask", shard)
  hosts.close()
  assert waiting.done()
