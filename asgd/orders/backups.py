"""Backup tasks: an idle worker repeats a late job of a synchronous round.

  worker 0   |--job 0--|      |--job 2, again--|
  worker 1   |--job 1--|
  worker 2   |--job 2------------------------------------|  dropped

When the other jobs of a round have ended, an idle worker starts a late job
again, and the first of the two results counts. The late worker still finishes
its copy, and the server drops the result. Until then the late worker starts no
other job, so another worker does two jobs in a round.
"""

import bisect
import math
from collections.abc import Sequence

from asgd import base
from asgd.orders.trace import ENDS, STARTS, events

Key = tuple[int, int]  # (worker, seq)


class Copies:
  """The open tickets of each job; the first message of a job counts.

  Attributes:
    open: job -> its tickets, oldest first.
    single: awaited job -> its ticket, for jobs with one ticket.
    awaited: jobs of which no message has arrived.

  Example:
    Workers 0 and 1 compute job 5. Worker 1's message arrives first.

    >>> from asgd.orders.backups import Copies
    >>> copies = Copies()
    >>> copies.start(5, (0, 0)), copies.start(5, (1, 0))
    (True, False)
    >>> copies.end(5, (1, 0), counts=True)
    False
    >>> copies.arrive(5, (0, 0))
    >>> copies.take_superseded()
    [(0, 0)]
  """

  def __init__(self) -> None:
    self.open: dict[int, list[Key]] = {}
    self.single: dict[int, Key] = {}
    self.awaited: set[int] = set()
    # Jobs with an open ticket of which a message was received.
    self._answered_jobs: set[int] = set()
    self._arrived: dict[int, list[Key]] = {}  # job -> messages, oldest first
    # (job, message) that arrived after another message of the job
    self._repeats: list[tuple[int, Key]] = []
    self._time_of: dict[int, float] = {}  # worker -> duration of its latest job
    self._sorted_times: list[float] = []  # the values of `_time_of`, sorted

  def start(self, job: int, key: Key) -> bool:
    """Adds an opened ticket. Returns whether it is the only ticket of its job.
    """
    keys = self.open.setdefault(job, [])
    keys.append(key)
    self._update_sets(job)
    return len(keys) == 1

  def arrive(self, job: int, key: Key) -> None:
    """Adds a message that has arrived."""
    keys = self._arrived.setdefault(job, [])
    keys.append(key)
    if len(keys) > 1 or job in self._answered_jobs:
      self._repeats.append((job, key))
    self._update_sets(job)

  def end(self, job: int, key: Key, *, counts: bool) -> bool:
    """Removes a ticket that was closed, because its message `counts` or for
    another reason. Returns whether the job is lost: it has no open ticket, and
    no message of it was received."""
    open_keys, was_answered = self.open[job], job in self._answered_jobs
    open_keys.remove(key)
    arrived = self._arrived.get(job, [])
    if key in arrived:
      arrived.remove(key)
    if not arrived:
      self._arrived.pop(job, None)
    if not open_keys:
      del self.open[job]
      self._answered_jobs.discard(job)
    elif counts:
      self._answered_jobs.add(job)
    self._update_sets(job)
    return not (counts or open_keys or was_answered)

  def _update_sets(self, job: int) -> None:
    """Updates `awaited` and `single` after a job has changed."""
    keys: Sequence[Key] = self.open.get(job, ())
    # A job with a message, even one not received yet, needs no copy.
    if not keys or job in self._answered_jobs or job in self._arrived:
      self.awaited.discard(job)
      keys = ()
    else:
      self.awaited.add(job)
    if len(keys) == 1:
      self.single[job] = keys[0]
    else:
      self.single.pop(job, None)

  def take_superseded(self) -> list[Key]:
    """Returns the messages that arrived since the last call, in their order,
    after another message of their job."""
    repeats, self._repeats = self._repeats, []
    superseded_keys = []
    # Since its arrival the ticket may have been closed, or the first message of
    # the job lost.
    for job, key in repeats:
      keys = self._arrived.get(job, [])
      if key in keys and (job in self._answered_jobs or keys[0] != key):
        superseded_keys.append(key)
    return superseded_keys

  def set_time(self, worker: int, time: float) -> None:
    """Sets the time that a worker needed for its latest job."""
    if worker in self._time_of:
      del self._sorted_times[
        bisect.bisect_left(self._sorted_times, self._time_of[worker])
      ]
    self._time_of[worker] = time
    bisect.insort(self._sorted_times, time)

  def median_time(self, worker: int) -> float | None:
    """Returns the median of the other workers' latest times; None if no other
    worker has a time."""
    if worker not in self._time_of:
      return _median(self._sorted_times, None)
    own_position = bisect.bisect_left(self._sorted_times, self._time_of[worker])
    return _median(self._sorted_times, own_position)

  def least_median_time(self) -> float:
    """Returns a lower bound of `median_time` for all workers; infinity if no
    worker has a time."""
    # The median of the other workers is smallest for the slowest worker, since
    # it leaves out the largest time.
    last_index = len(self._sorted_times) - 1
    lower_bound = _median(
      self._sorted_times, last_index if last_index > 0 else None
    )
    return math.inf if lower_bound is None else lower_bound


def _median(ordered: list[float], excluded: int | None) -> float | None:
  """Returns the median of sorted numbers without the number at the index
  `excluded`; None if no number is left."""
  count = len(ordered) - (excluded is not None)
  if not count:
    return None

  def number_at(position: int) -> float:
    return ordered[position + (excluded is not None and position >= excluded)]

  half = count // 2
  if count % 2:
    return number_at(half)
  return (number_at(half - 1) + number_at(half)) / 2


def count_backups(trace: base.Trace) -> tuple[int, int]:
  """Returns (number of backup tasks that were started, number of backup tasks
  with a result that counted) of a trace."""
  copies, n_started, n_counted = Copies(), 0, 0
  for event in events(trace):
    if event.action in STARTS:
      n_started += not copies.start(event.job, event.key)
    elif event.action in ENDS:
      counts = event.action == base.RECEIVE
      # The oldest open ticket of a job is the original, the others are copies.
      n_counted += counts and copies.open[event.job][0] != event.key
      copies.end(event.job, event.key, counts=counts)
  return n_started, n_counted
