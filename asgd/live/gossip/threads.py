"""Peers as threads of one process, which tell each other references."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asgd.live import faults as faults_lib
from asgd.live.deadlines import Ladder
from asgd.live.gossip import cluster
from asgd.live.gossip.frames import Frame
from asgd.live.gossip.loop import PeerThread
from asgd.live.gossip.peer_rows import PeerDuty


class ThreadPeers(cluster.PeerCluster):
  """Peers as threads. One that hangs cannot be killed: it is not heard any
  more, and another takes its place."""

  def __init__(
    self,
    duty: PeerDuty,
    run: Path,
    *,
    messages: int,
    began: float,
    received: Sequence[int] = (),
    seed: int = 0,
    ladder: Ladder | None = None,
    refill: bool = True,
    faults: Sequence[faults_lib.Fault] = (),
    span: Callable[[int, Any], None] | None = None,
  ):
    """Prepares; `start` begins. `began` is `time.monotonic()` when the run
    began, or would have; `received` are the jobs that are done already."""
    ladder = ladder or Ladder()
    clock = lambda: time.monotonic() - began  # noqa: E731
    alike = {frozenset(counts): i for i, counts in enumerate(duty.hears)}
    for peer in alike.values():
      duty.warm_up(peer)
    super().__init__(
      duty.gossip,
      run,
      messages=messages,
      ladder=ladder,
      refill=refill,
      clock=clock,
    )
    self._duty, self._seed, self._span = duty, seed, span
    self._end = threading.Event()
    self.script = faults_lib.Script(faults, kill=self._die, wait=self._wait)
    self._jobs = cluster.JobNumbers(messages, received)
    self._threads: dict[int, PeerThread] = {}
    self._hung: set[int] = set()

  def _die(self):
    raise faults_lib.Killed

  def _wait(self, seconds):
    if self._end.wait(seconds):
      raise faults_lib.Killed

  def _deliver(self, peer: int, frame: Frame) -> None:
    if peer in self._threads:
      self._threads[peer].loop.hear(frame)

  def _make(self, peer, image):
    loop = cluster.make_loop(
      *(peer, self._duty, self._run, image),
      jobs=self._jobs.take,
      draw=lambda life: np.random.default_rng((self._seed, peer, life)),
      clock=self._clock,
      tell=self._deliver,
      wait=self._wait,
      faults=self.script,
      span=self._span and functools.partial(self._span, peer),
    )
    self._hung.discard(peer)
    self._threads[peer] = PeerThread(loop)

  def _is_ready(self, peer):
    return True

  def _run_loop(self, peer):
    self._threads[peer].start()

  def _ask(self, peer, name, *args, **options):
    loop = self._threads[peer].loop
    return loop.ask(lambda: getattr(loop, name)(*args, **options))

  def _gone(self):
    ended = []
    for peer in self.lives:
      thread = self._threads[peer]
      if thread.failure is not None:
        raise thread.failure
      if not thread.alive:
        ended.append((peer, "hung" if peer in self._hung else thread.how))
    return ended

  def _kill(self, peer):
    self._hung.add(peer)
    self._threads[peer].loop.end()

  def _give_back(self, number):
    self._jobs.give_back(number)

  def _introduce(self, peer):
    pass

  def _close(self):
    self._end.set()
    for thread in self._threads.values():
      if thread.alive:
        thread.loop.end()
        thread.join()
