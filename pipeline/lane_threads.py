"""The threads that run lanes: as few as can work at the same time.

A thread runs one lane until the lane lacks an entry, and then another lane that
lacks none. If it has to wait for a device, a second thread takes the lanes that
are ready. So stages with programs that end within their call share one thread:
waking another thread for each entry takes longer than such a program.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

_UNCLAIMED_SECONDS = 0.005  # until a ready lane gets another thread


class Stop:
  """Put into an inbox when a lane of another process has failed."""


class LaneInbox:
  """Entries that other processes send to a lane, also between runs."""

  def __init__(self):
    self._items: collections.deque[Any] = collections.deque()
    self._on_arrival: Callable[[], None] | None = None

  def put(self, item: Any) -> None:
    """Adds (key, value), or Stop."""
    self._items.append(item)
    if on_arrival := self._on_arrival:
      on_arrival()

  def take(self) -> list[Any]:
    """Removes and returns all items."""
    return [self._items.popleft() for _ in range(len(self._items))]

  def attach(self, on_arrival: Callable[[], None] | None) -> None:
    """Calls `on_arrival` after each item, and once now; None: no longer."""
    self._on_arrival = on_arrival
    if on_arrival:
      on_arrival()


class LaneThreads:
  """The entries of a process's lanes, and the threads that run these lanes."""

  def __init__(
    self,
    run_lane: Callable[[int], bool],
    lanes: Iterable[int],
  ):
    """Prepares for one run.

    Args:
      run_lane: runs a lane. Returns False when the lane lacks an entry (`has`
        is False), True at its end. It raises no error.
      lanes: lanes of this process.
    """
    self.boxes: dict[int, dict[tuple, Any]] = {lane: {} for lane in lanes}
    self._run_lane = run_lane
    self._lock = threading.RLock()
    self._idle_threads = threading.Condition(self._lock)
    self._arrivals = threading.Condition(self._lock)
    self._ready = collections.deque(self.boxes)
    self._missing_key: dict[int, tuple] = {}  # lane -> first key that it lacks
    self._threads: list[threading.Thread] = []
    self._n_idle = self._n_waiting = self._n_turns = 0
    self._last_waited = False  # whether the last task waited for its device
    self._unfinished = len(self.boxes)  # lanes that are not at their end
    self._ended = threading.Event()  # all lanes are at their end, or one failed
    # JAX has this setting for each thread: new threads get the caller's.
    self._x64 = jax.config.jax_enable_x64

  def run(self, inboxes: Mapping[int, LaneInbox]) -> None:
    """Returns when all lanes are at their end, or after `stop`. `inboxes` are
    those of lanes to which other processes send."""
    for lane, inbox in inboxes.items():
      inbox.attach(lambda lane=lane, inbox=inbox: self._collect(lane, inbox))
    with self._lock:
      self._add_thread()
    n_turns = None
    try:
      while not self._ended.wait(_UNCLAIMED_SECONDS):
        if n_turns == self._n_turns:  # no progress: a thread may be blocked
          self._share()
        n_turns = self._n_turns
    finally:
      self.stop()
      for inbox in inboxes.values():
        inbox.attach(None)
    for thread in self._threads:
      thread.join()

  def stop(self) -> None:
    """Ends the run: each thread ends after its task."""
    with self._lock:
      self._ended.set()
      self._idle_threads.notify_all()
      self._arrivals.notify_all()

  def has(self, lane: int, keys: Iterable[tuple]) -> bool:
    """Returns whether a lane has all of these entries. A lane that lacks one is
    run again when that entry arrives."""
    box = self.boxes[lane]
    for key in keys:
      # Checked again under the lock: `put` may add the key in between.
      if key not in box:
        with self._lock:
          if key not in box:
            self._missing_key[lane] = key
            return False
    return True

  def put(self, lane: int, key: tuple, value: Any) -> None:
    """Gives an entry to a lane of this process."""
    with self._lock:
      self.boxes[lane][key] = value
      # The lane continues: the entry that it lacked has arrived.
      if self._missing_key.get(lane) == key:
        del self._missing_key[lane]
        self._ready.append(lane)
        if self._last_waited:
          self._share()
      if self._n_waiting:
        self._arrivals.notify_all()

  def wait(self, lane: int, key: tuple) -> Any:
    """Waits for an entry in the middle of an instruction, and takes it. Returns
    None after `stop`."""
    box = self.boxes[lane]
    with self._lock:
      # This thread blocks, so another one takes the ready lanes.
      self._share()
      self._n_waiting += 1
      while key not in box and not self._ended.is_set():
        self._arrivals.wait()
      self._n_waiting -= 1
      return box.pop(key, None)

  def settle(self, value: Any) -> None:
    """Waits for a tree of arrays."""
    leaves = jax.tree.leaves(value)
    # Keys of random numbers have no `is_ready`.
    self._last_waited = not all(
      hasattr(leaf, "is_ready") and leaf.is_ready() for leaf in leaves
    )
    if self._last_waited:
      self._share()
    for leaf in leaves:  # also if it is ready: this raises its errors
      leaf.block_until_ready()

  def _share(self) -> None:
    """Wakes or adds a thread for the lanes that are ready."""
    with self._lock:
      if self._ready and self._n_idle:
        self._n_idle -= 1
        self._idle_threads.notify()
      elif self._ready and len(self._threads) < len(self.boxes):
        self._add_thread()

  def _add_thread(self) -> None:
    """Starts another thread."""
    thread = threading.Thread(
      target=self._work, name=f"lanes-{len(self._threads)}", daemon=True
    )
    self._threads.append(thread)
    thread.start()

  def _work(self) -> None:
    """Runs ready lanes, in a thread, until the run ends."""
    with jax.enable_x64(self._x64):
      while (lane := self._next()) is not None:
        if self._run_lane(lane):
          with self._lock:
            self._unfinished -= 1
            if not self._unfinished:
              self.stop()

  def _next(self) -> int | None:
    """Returns a lane that is ready; None at the end of the run."""
    with self._lock:
      self._n_turns += 1
      while not self._ready and not self._ended.is_set():
        self._n_idle += 1
        self._idle_threads.wait()
      return None if self._ended.is_set() else self._ready.popleft()

  def _collect(self, lane: int, inbox: LaneInbox) -> None:
    """Takes the items that have arrived for a lane."""
    with self._lock:
      for item in inbox.take():
        if item is Stop:
          self.stop()
        else:
          self.put(lane, *item)
      self._share()
