"""Peers that do not work in rounds: a counter assigns the numbers of jobs."""

from concurrent.futures import Future
from typing import Any

from asgd.live.gossip.peer import RETRY_SECONDS, LivePeer
from asgd.live.hosts import Host, HostExited


class Counted(LivePeer):
  """A peer with jobs that the run's `JobCounter` numbers; the base of `Pairs`
  and `PeerArrivals`."""

  def __init__(self, *args: Any, counter: Host, **options: Any):
    """Takes the host of the counter."""
    super().__init__(*args, **options)
    self._counter: Host | None = counter
    self._asks_counter = False  # whether a call of the counter is open
    self._next_job: int | None = None  # its number, from the counter
    self._no_job_left = False

  def use_counter(self, counter: Host | None) -> None:
    """Uses another counter from now on; None: no counter for now. A number that
    the old counter has assigned, and that was not begun, is dropped: the new
    counter assigns it again."""
    self._counter, self._next_job = counter, None

  def on_number(self, counter: Host, call: Future[int | None]) -> None:
    """Handles the end of a call of a counter, or the loss of its
    connection."""

    def store_number() -> None:
      self._asks_counter = False
      try:
        number = call.result()
      except HostExited:  # retry until the driver passes another counter
        if self._counter is not None:
          self._ask_counter(self._counter, wait=RETRY_SECONDS)
        return
      # A number of an earlier counter is dropped, as by `use_counter`.
      if counter is self._counter:
        self._next_job, self._no_job_left = number, number is None

    self._handle(store_number)

  def _ask_counter(self, counter: Host, wait: float = 0.0) -> None:
    """Asks a counter for a number, in another thread, after a wait in
    seconds."""
    self._asks_counter = True
    inside, journal = self._inside, self.rows.journal
    # The count of begun jobs makes the call idempotent: if an answer is lost,
    # the retry gets the same number.
    asker = self.index, journal.incarnation, journal.begun

    def ask() -> int | None:
      if wait:
        inside.wait(wait)
      number: int | None = counter.call("take", *asker).result()
      return number

    inside.run_later(ask, "on_number", counter)

  def halt(self) -> int:
    """Stops after the open job; returns the count of ended jobs at that
    time."""
    self.limit = min(self.limit, self.rounds + (self._job_start is not None))
    return self.limit

  @property
  def is_quiet(self) -> bool:
    """Whether the peer is idle, and stays so until its limit is raised or
    another peer sends a frame."""
    has_no_job = self._no_job_left or self.rounds >= self.limit
    return super().is_quiet and has_no_job and not self._asks_counter

  def peer_exited(self, peer: int) -> None:
    """Removes the peer; the counter assigns its open job again."""
    super().peer_exited(peer)
    self._no_job_left = False

  def _start_job(self) -> bool:
    """Begins a job if its number is known, else asks the counter. Returns
    whether it has begun one."""
    if self._no_job_left or self.rounds >= self.limit:
      return False
    if self._next_job is None:
      if self._counter is not None and not self._asks_counter:
        self._ask_counter(self._counter)
      return False
    number, self._next_job = self._next_job, None
    self._begin_job(number)
    self._compute_job()
    return True

  def _count_job(self) -> bool:
    """Ends the open job, and counts it if its message is finite; returns
    whether it is."""
    is_finite = self._end_job()
    self.rounds += is_finite
    return is_finite
