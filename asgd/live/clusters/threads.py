"""A cluster in one process: workers and server shards are threads.

XLA runs without Python's lock, so workers really run at the same time.
Faults are tried here without killing anything. A thread that hangs cannot be
killed: another takes its place, and what it does when it goes on is ignored.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import base, simulator
from asgd.live import faults as faults_lib
from asgd.live import frames, journal, records, slots, spans
from asgd.live.clusters.base import LiveCluster
from asgd.live.duty import Duty
from asgd.live.links.base import Disconnected
from asgd.live.links.local import ShardThread, ThreadLink, connect_follower
from asgd.live.links.throttled import Throttle
from asgd.live.setup import Setup
from asgd.live.shard import Shard
from asgd.live.worker import WorkerLoop
from asgd.orders.network import Network


class Stores(NamedTuple):
  """What outlives a shard; of each shard, in their order."""

  memories: Sequence[slots.SharedMemory]
  journals: Sequence[journal.FileJournal]
  sinks: Sequence[records.FileSink]
  images: Sequence[Any]  # checkpoints as `Shard` takes them, or None


class WorkerThread(NamedTuple):
  """The holder of a place."""

  thread: threading.Thread
  link: ThreadLink
  loop: WorkerLoop


class ThreadCluster(LiveCluster):
  """Shards and workers, as threads."""

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    states: Sequence[base.ServerState],
    duty: Duty,
    stores: Stores,
    *,
    began: float,
    faults: Sequence[faults_lib.Fault] = (),
    refill: bool = True,
    patience: float = 5.0,
    resumed: bool = False,
    span: Callable[[int, spans.Span], None] | None = None,
    network: Network | None = None,
  ):
    """Prepares; `start` begins. Raises ValueError for impossible faults.

    The states are those of each shard before the first message. `began` is
    `time.monotonic()` when the run began, or would have; of a run that is
    resumed the journals hold the beginning. Workers are patient for so many
    seconds; `span` is told (worker, stretch of time); frames take the time of
    a `network`, in seconds.
    """
    faults_lib.check(faults, setup.workers, setup.jobs)
    super().__init__(setup, duty.plan, refill=refill)
    self._steps, self._states, self.stores = steps, states, stores
    self._end = threading.Event()
    self.script = faults_lib.Script(faults, kill=self._kill, wait=self._wait)
    self._clock = lambda: time.monotonic() - began  # seconds of the run
    self._span, self._duty = span, duty
    self._throttle = network and Throttle(network, setup.workers)
    self._make_loop = functools.partial(
      WorkerLoop,
      memories=self.stores.memories,
      clock=self._clock,
      patience=patience,
      wait=self._wait,
      faults=self.script,
    )
    self.shards = [self.shard_thread(i, resumed) for i in range(setup.shards)]
    self.workers: dict[int, WorkerThread] = {}
    self._failure: BaseException | None = None  # of a worker

  def shard_thread(self, index: int, resumed: bool = False) -> ShardThread:
    """Returns a thread, to be started, that takes a shard's place."""
    stores, setup = self.stores, self.setup

    def make():
      # Copied, for the next one: a shard consumes its state.
      state = jax.tree.map(jnp.array, self._states[index])
      shard = Shard(
        *(index, setup, self._steps, state, stores.memories[index]),
        *(stores.journals[index], stores.sinks[index]),
        now=self._clock(),
        image=stores.images[index],
        resumed=resumed,
      )
      if index and setup.consistent:
        connect_follower(shard, self.shards[index], self.shards[0])
      return shard

    return ShardThread(index, make, self._clock)

  def _kill(self):
    raise faults_lib.Killed

  def _wait(self, seconds):
    if self._end.wait(seconds):
      raise faults_lib.Killed

  def measure(self, jobs: int) -> list[float]:
    """Returns the seconds that a job takes each worker, of so many jobs that
    all do at the same time; to be called before `start`. They are compiled."""
    workers, duty = self.setup.workers, self._duty
    with ThreadPoolExecutor(workers) as pool:
      return list(
        pool.map(lambda w: duty.measure(w, jobs, self._wait), range(workers))
      )

  def assign(self, make_duty: Callable[[], Duty]) -> None:
    """Has workers do something else than what the cluster was made with, and
    compiles it; to be called before `start`."""
    self._duty = make_duty()
    self._duty.warm_up_all(self.setup.workers)

  def start(self) -> None:
    """Starts all threads."""
    if self._throttle:
      self._throttle.start()
    for thread in self.shards:
      thread.start()
    for worker in range(self.setup.workers):
      self.add_worker(worker)

  def add_worker(self, worker: int) -> None:
    """Has a new worker take a place."""
    link = ThreadLink(worker, self.shards, self._end.is_set, **self._ways())
    span = functools.partial(self._span, worker) if self._span else None
    life = self._next_life(worker)
    loop = self._make_loop(
      worker, self._duty, link=link, span=span, life=life
    )
    args = worker, loop, link
    thread = threading.Thread(target=self._work, args=args, daemon=True)
    self.workers[worker] = WorkerThread(thread, link, loop)
    thread.start()

  def _ways(self):
    """How frames are carried, over a network."""
    throttle, memories = self._throttle, self.stores.memories
    if throttle is None:
      return {}

    def up(worker, shard, frame, deliver):
      nbytes = 0
      if frame.kind == frames.PUSH:
        nbytes = memories[shard].length(slots.MESSAGES, frame.message)
      throttle.up(worker, shard, nbytes, deliver)

    def down(worker, shard, frame, deliver):
      nbytes = 0
      if frame.kind == frames.TICKET and not frame.flag:
        nbytes = memories[shard].length(slots.PARAMS, frame.params)
      throttle.down(worker, shard, nbytes, deliver)

    return {"up": up, "down": down}

  def _work(self, worker, loop, link):
    try:
      with self._duty.on_device(worker):
        loop.run()
    except faults_lib.Killed:
      pass
    except BaseException as error:
      error.add_note(f"in worker {worker}")
      self._failure = self._failure or error
    finally:
      link.close()

  def check(self) -> list[str]:
    """Replaces workers that are gone; raises what ended a thread."""
    failures = [thread.failure for thread in self.shards]
    for failure in filter(None, [*failures, self._failure]):
      raise failure
    lead, holders = self.shards[0].shard, self.workers.items()
    # First: those that end because the run is over end after it is.
    ended = [w for w, holder in holders if not holder.thread.is_alive()]
    if lead is None or not self._refill or lead.stopped:
      return []
    news = []
    for worker in ended:
      if not self.workers[worker].loop.draining:
        news += self._replace_worker(worker, "died")
    return news

  def _ask(self, call):
    return [thread.ask(call) for thread in self.shards]

  def _ask_status(self):
    statuses = [None] * len(self.shards)
    for index, thread in enumerate(self.shards):
      with contextlib.suppress(Disconnected):
        statuses[index] = thread.ask(Shard.status)
    return statuses

  def _end_lost_workers(self, status):
    for worker in set(status["expelled"]):
      self.workers[worker].loop.revoke()
      self.replaced["worker"] += worker not in self._refilled
      self.add_worker(worker)

  def close(self) -> None:
    """Ends all threads; what they wrote stays."""
    self._end.set()
    for holder in self.workers.values():
      holder.link.wake()
    for thread in self.shards:
      if thread.alive:
        thread.ask(lambda shard: shard.state.flush())
        thread.stop()
    for holder in self.workers.values():
      holder.thread.join()
    if self._throttle:
      self._throttle.close()
