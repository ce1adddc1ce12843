"""A cluster in one process: workers and server shards are threads.

XLA runs without Python's lock, so workers really run at the same time.
Parameters and messages are passed by reference. This is the embedded default,
and where faults are tried without killing anything. A thread that hangs cannot
be killed: another takes its place, and what it does when it goes on is ignored.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, sharding, simulator
from asgd.runtimes import faults as faults_lib
from asgd.runtimes.memory import LocalMemory
from asgd.runtimes.protocol import Entry
from asgd.runtimes.shard import Setup, Shard, sizes
from asgd.runtimes.shard import check as check_setup
from asgd.runtimes.worker_loop import Disconnected, Duty, Span, WorkerLoop


class ListJournal:
  """A journal in memory."""

  name = "journal"

  def __init__(self, entries: Sequence[Entry] = ()):
    self._entries = list(entries)

  def append(self, entry: Entry) -> None:
    """Keeps an entry."""
    self._entries.append(entry)

  def entries(self) -> list[Entry]:
    """Returns them all."""
    return list(self._entries)

  def sync(self) -> None:
    """Nothing of it outlives the process."""


class ListSink:
  """Records in memory."""

  name = "records"

  def __init__(self):
    self._parts: list[base.Records] = []

  def append(self, records: base.Records) -> None:
    """Keeps records."""
    self._parts.append(records)

  def truncate(self, count: int) -> None:
    """Drops all but the first `count`."""
    records = self.records()
    self._parts = [base.Records(*(column[:count] for column in records))]

  @property
  def count(self) -> int:
    """How many there are."""
    return sum(len(part.loss) for part in self._parts)

  def records(self) -> base.Records:
    """Returns them all."""
    return simulator.concatenate(self._parts)

  def sync(self) -> None:
    """Nothing of them outlives the process."""


class _Killed(Exception):
  """Ends a shard's thread as a kill would."""


_TICK = 0.1  # seconds between two looks at the deadlines


class _ShardThread:
  """One shard and the thread that feeds it."""

  def __init__(self, index: int, make: Callable[[], Shard], clock):
    self.index = index
    self._make, self._clock = make, clock
    self._box: queue.SimpleQueue = queue.SimpleQueue()
    self.shard: Shard | None = None
    self.failure: BaseException | None = None
    self.alive = True
    self._thread = threading.Thread(
      target=self._run, name=f"shard-{index}", daemon=True
    )

  def start(self):
    self._thread.start()

  def put(self, call: Callable[[Shard, float], Any]) -> None:
    """Has the shard's thread call something."""
    self._box.put(call)

  def ask(self, call: Callable[[Shard, float], Any]) -> Any:
    """The same, and waits for the answer."""
    answer: queue.SimpleQueue = queue.SimpleQueue()
    self.put(lambda shard, now: answer.put(call(shard, now)))
    while True:
      try:
        return answer.get(timeout=_TICK)
      except queue.Empty:
        if not self.alive:
          raise Disconnected(self.index) from None

  def stop(self):
    """Ends the thread as a kill would: nothing is said or saved."""

    def kill(shard, now):
      raise _Killed

    self.put(kill)
    self._thread.join()

  def _run(self):
    try:
      self.shard = shard = self._make()
      ticked = self._clock()
      while True:
        with contextlib.suppress(queue.Empty):
          self._box.get(timeout=_TICK)(shard, self._clock())
        if self._clock() - ticked >= _TICK:
          ticked = self._clock()
          shard.tick(ticked)
    except _Killed:
      pass
    except BaseException as error:  # to be raised where somebody can act
      self.failure = error
    finally:
      self.alive = False


class _ThreadLink:
  """A worker's way to the shards of its process."""

  def __init__(self, cluster, worker):
    self._cluster, self._worker = cluster, worker
    self._box: queue.SimpleQueue = queue.SimpleQueue()
    self._threads = list(cluster.shards)
    # One object a connection: shards tell holders of a place by it.
    self._ways = [self._way(shard) for shard in range(len(self._threads))]

  def _way(self, shard):
    def way(frame):
      self._box.put((shard, way, frame))

    return way

  def say(self, shard, frame):
    thread = self._threads[shard]
    if not thread.alive:
      raise Disconnected(shard)
    way = self._ways[shard]
    thread.put(lambda shard, now: shard.handle(frame, way, now))

  def hear(self, seconds):
    while True:
      for shard, thread in enumerate(self._threads):
        if not thread.alive:
          raise Disconnected(shard)
      try:
        heard = self._box.get(block=seconds != 0, timeout=seconds or None)
      except queue.Empty:
        return None
      if heard is None:
        return None
      shard, way, frame = heard
      if way is self._ways[shard]:  # or it was said before a connection broke
        return shard, frame

  def connect(self, shard):
    if self._cluster.over:
      raise faults_lib.Killed
    self._threads[shard] = self._cluster.shards[shard]
    if self._threads[shard].alive:
      self._ways[shard] = self._way(shard)
      return True
    time.sleep(_TICK)
    return False

  def wake(self):
    self._box.put(None)

  def close(self):
    """What a broken connection is to a shard."""
    for shard, thread in enumerate(self._threads):
      way = self._ways[shard]
      thread.put(functools.partial(self._gone, way))

  def _gone(self, way, shard, now):
    if shard.peer(self._worker) is way:
      shard.gone(self._worker, now)


def finished(status: Sequence[dict[str, Any]] | None) -> bool:
  """Whether every job was received, by all shards, as their status says."""
  return bool(status) and status[0]["stopped"] and not any(
    shard["busy"] for shard in status
  )


class Cluster:
  """Shards and workers, as threads."""

  def __init__(
    self,
    setup: Setup,
    steps: simulator.Steps,
    states: Sequence[base.ServerState],
    duty: Duty,
    *,
    faults: Sequence[faults_lib.Fault] = (),
    refill: bool = True,
    patience: float = 5.0,
    memories: Sequence[Any] | None = None,
    journals: Sequence[Any] | None = None,
    sinks: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    resumed: bool = False,
    began: float | None = None,
    span: Callable[[int, Span], None] | None = None,
  ):
    """Prepares; `start` begins.

    Args:
      setup: of the run.
      steps: compiled functions.
      states: of each shard, before the first message.
      duty: of the workers.
      faults: to be injected.
      refill: put a new worker in the place of one that died.
      patience: of the workers, in seconds.
      memories: of each shard; references if None.
      journals: of each shard; in memory if None.
      sinks: of each shard; in memory if None.
      images: checkpoints of each shard, as `Shard` takes them.
      resumed: the journals hold a run that stopped.
      began: `time.monotonic()` when the run began, or would have; None: now.
      span: told (worker, stretch of time).
    """
    check_setup(setup)
    faults_lib.check(faults, setup.workers, setup.jobs)
    if len(states) != setup.shards:
      raise ValueError(
        f"states must be of {setup.shards} shards, not of {len(states)}"
      )
    count = range(setup.shards)
    self._setup, self._steps, self._duty = setup, steps, duty
    self._states = list(states)
    self.memories = list(
      memories or (LocalMemory(sizes(setup)) for _ in count)
    )
    self._images = list(images or (None for _ in count))
    self.journals = list(journals or (ListJournal() for _ in count))
    self.sinks = list(sinks or (ListSink() for _ in count))
    self._refill, self._patience = refill, patience
    self._span = span or (lambda worker, span: None)
    self._began = time.monotonic() if began is None else began
    self.script = faults_lib.Script(
      faults, kill=self._kill_this_thread, wait=self._wait
    )
    self.over = False
    self._end = threading.Event()
    self.shards = [self._shard_thread(index, resumed) for index in count]
    self._workers: dict[int, tuple[threading.Thread, _ThreadLink]] = {}
    self._loops: dict[int, WorkerLoop] = {}
    self.failure: BaseException | None = None
    self.replaced = {"worker": 0, "shard": 0}

  def clock(self) -> float:
    """Seconds since the run began."""
    return time.monotonic() - self._began

  def _shard_thread(self, index, resumed=False):
    def make():
      # Copied, for the next one: a shard consumes its state.
      state = jax.tree.map(jnp.array, self._states[index])
      shard = Shard(
        *(index, self._setup, self._steps, state),
        *(self.memories[index], self.journals[index], self.sinks[index]),
        now=self.clock(),
        image=self._images[index],
        resumed=resumed,
      )
      if index and self._setup.consistent:
        self._follow(index, shard)
      return shard

    return _ShardThread(index, make, self.clock)

  def _follow(self, index, shard):
    """Opens the way between a follower and the lead, in both directions."""
    lead, me = self.shards[0], self.shards[index]

    def to_me(frame):
      me.put(lambda shard, now: shard.handle(frame, to_lead, now))

    def to_lead(frame):
      lead.put(lambda shard, now: shard.handle(frame, to_me, now))

    shard.follow(to_lead)

  def _kill_this_thread(self):
    raise faults_lib.Killed

  def _wait(self, seconds):
    if self._end.wait(seconds):
      raise faults_lib.Killed

  def start(self) -> None:
    """Starts all threads."""
    for thread in self.shards:
      thread.start()
    for worker in range(self._setup.workers):
      self.add_worker(worker)

  def add_worker(self, worker: int) -> None:
    """Has a new worker take a place."""
    link = _ThreadLink(self, worker)
    loop = WorkerLoop(
      *(worker, self._duty, link, self.memories),
      clock=self.clock,
      patience=self._patience,
      wait=self._wait,
      faults=self.script,
      span=functools.partial(self._span, worker),
    )
    thread = threading.Thread(
      target=self._work,
      args=(worker, loop, link),
      name=f"worker-{worker}",
      daemon=True,
    )
    self._workers[worker] = thread, link
    self._loops[worker] = loop
    thread.start()

  def _work(self, worker, loop, link):
    try:
      loop.run()
    except faults_lib.Killed:
      pass
    except BaseException as error:
      error.add_note(f"in worker {worker}")
      self.failure = self.failure or error
    finally:
      link.close()

  def drain_worker(self, worker: int) -> None:
    """Asks a worker to finish what it has begun and to leave."""
    self._loops[worker].drain()

  def kill_shard(self, index: int) -> None:
    """Kills a shard, and puts another in its place."""
    self.replaced["shard"] += 1
    self.shards[index].stop()
    self.shards[index] = self._shard_thread(index)
    self.shards[index].start()
    if index == 0 and self._setup.consistent:
      for other in range(1, self._setup.shards):
        follower = self.shards[other]
        follower.put(
          lambda shard, now, other=other: self._follow(other, shard)
        )

  def check(self) -> list[str]:
    """Replaces workers that are gone; returns what there is to tell.

    Raises:
      whatever ended a thread.
    """
    for thread in self.shards:
      if thread.failure:
        raise thread.failure
    if self.failure:
      raise self.failure
    lead, news = self.shards[0].shard, []
    if lead is None or not self._refill or lead.stopped:
      return news
    for worker, (thread, _) in list(self._workers.items()):
      if not thread.is_alive() and not self._loops[worker].draining:
        news.append(f"worker {worker} died; another takes its place")
        self.replaced["worker"] += 1
        self.add_worker(worker)
    return news

  def status(self) -> list[dict[str, Any]] | None:
    """Returns how each shard is doing (`Shard.status`); None while one is being
    replaced. Workers that were taken for dead are replaced."""
    try:
      found = [
        thread.ask(lambda shard, now: shard.status()) for thread in self.shards
      ]
    except Disconnected:
      return None
    for worker in found[0]["expelled"]:
      self._loops[worker].revoked = True
      self.replaced["worker"] += 1
      self.add_worker(worker)
    return found

  def run(self, seconds: float = 600.0) -> None:
    """Waits until it is finished.

    Raises:
      TimeoutError: if it is not, in that time.
    """
    end = time.monotonic() + seconds
    while not finished(self.status()):
      self.check()
      if time.monotonic() > end:
        raise TimeoutError(f"not finished after {seconds} s")
      time.sleep(0.01)

  def _ask_all(self, call):
    return [
      thread.ask(lambda shard, now: call(shard)) for thread in self.shards
    ]

  def params(self, received: int | None = None) -> Any:
    """Returns the whole parameters: now, or as kept after so many messages."""
    if received is None:
      parts = self._ask_all(lambda shard: shard.params)
    else:
      parts = self._ask_all(lambda shard: shard.kept_params.pop(received))
    plan = self._duty.plan
    parts = jax.device_get(parts)
    return parts[0] if plan is None else sharding.join(plan, parts)

  def images(self) -> list[tuple[Any, Any]]:
    """Returns what a checkpoint needs, of each shard."""
    return self._ask_all(lambda shard: shard.image())

  def pause(self) -> None:
    """Has workers finish what they do, and start nothing new."""
    self.shards[0].ask(lambda shard, now: shard.pause())

  def close(self) -> None:
    """Ends all threads."""
    self.over = True
    self._end.set()
    for _, link in self._workers.values():
      link.wake()
    for thread in self.shards:
      if thread.alive:
        thread.ask(lambda shard, now: shard.flush())
        thread.stop()
    for thread, _ in self._workers.values():
      thread.join()
