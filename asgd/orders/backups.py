"""Backup tasks: an idle worker repeats a late job of a synchronous round.

  worker 0   |--job 0--|      |--job 2, again--|
  worker 1   |--job 1--|
  worker 2   |--job 2------------------------------------|  dropped

When the other jobs of a round have ended, an idle worker takes a late job, and
the first of the two results counts. The late worker still finishes its copy,
and the server drops it. Until then that worker is missing in the rounds, so
another worker does two jobs.
"""

import bisect
import math

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
    >>> copies.superseded()
    [(0, 0)]
  """

  def __init__(self) -> None:
    self.open: dict[int, list[Key]] = {}
    self.single: dict[int, Key] = {}
    self.awaited: set[int] = set()
    self._done: set[int] = set()  # open jobs of which a message was received
    self._arrived: dict[int, list[Key]] = {}  # job -> messages, oldest first
    self._second: list[tuple[int, Key]] = []  # candidates for `superseded`
    self._time: dict[int, float] = {}  # worker -> time of its latest job
    self._times: list[float] = []  # the same, sorted

  def start(self, job: int, key: Key) -> bool:
    """Notes an opened ticket; returns whether it is the only one of its job."""
    keys = self.open.setdefault(job, [])
    keys.append(key)
    self._note(job)
    return len(keys) == 1

  def arrive(self, job: int, key: Key) -> None:
    """Notes that a message has arrived."""
    keys = self._arrived.setdefault(job, [])
    keys.append(key)
    if len(keys) > 1 or job in self._done:
      self._second.append((job, key))
    self._note(job)

  def end(self, job: int, key: Key, *, counts: bool) -> bool:
    """Notes that a ticket was closed, because its message `counts` or for
    another reason; returns whether the job is lost: no ticket is open, and no
    message was received."""
    others, done = self.open[job], job in self._done
    others.remove(key)
    arrived = self._arrived.get(job, [])
    if key in arrived:
      arrived.remove(key)
    if not arrived:
      self._arrived.pop(job, None)
    if not others:
      del self.open[job]
      self._done.discard(job)
    elif counts:
      self._done.add(job)
    self._note(job)
    return not (counts or others or done)

  def _note(self, job):
    """Updates `awaited` and `single` after a job has changed."""
    keys = self.open.get(job, ())
    if not keys or job in self._done or job in self._arrived:
      self.awaited.discard(job)
      keys = ()
    else:
      self.awaited.add(job)
    if len(keys) == 1:
      self.single[job] = keys[0]
    else:
      self.single.pop(job, None)

  def superseded(self) -> list[Key]:
    """Returns the messages that arrived since the last call, in their order,
    after another message of their job."""
    second, self._second = self._second, []
    out = []
    for job, key in second:
      keys = self._arrived.get(job, [])
      if key in keys and (job in self._done or keys[0] != key):
        out.append(key)
    return out

  def set_time(self, worker: int, time: float) -> None:
    """Sets the time that a worker needed for its latest job."""
    if worker in self._time:
      del self._times[bisect.bisect_left(self._times, self._time[worker])]
    self._time[worker] = time
    bisect.insort(self._times, time)

  def usual(self, worker: int) -> float | None:
    """Returns the median of the latest times of the other workers; None if no
    other worker has one."""
    if worker not in self._time:
      return _median(self._times, None)
    own = bisect.bisect_left(self._times, self._time[worker])
    return _median(self._times, own)

  def least_usual(self) -> float:
    """Returns a lower bound of `usual` for all workers; infinity if no worker
    has a time."""
    most = len(self._times) - 1
    least = _median(self._times, most if most > 0 else None)
    return math.inf if least is None else least


def _median(ordered: list[float], without: int | None) -> float | None:
  """Returns the median of sorted numbers, leaving out the one at the index
  `without`; None if no number is left."""
  count = len(ordered) - (without is not None)
  if not count:
    return None

  def at(index):
    return ordered[index + (without is not None and index >= without)]

  half = count // 2
  return at(half) if count % 2 else (at(half - 1) + at(half)) / 2


def count_backups(trace: base.Trace) -> tuple[int, int]:
  """Returns (backup tasks that were started, those whose result counted) of a
  trace."""
  copies, started, first = Copies(), 0, 0
  for event in events(trace):
    if event.action in STARTS:
      started += not copies.start(event.job, event.key)
    elif event.action in ENDS:
      counts = event.action == base.RECEIVE
      first += counts and copies.open[event.job][0] != event.key
      copies.end(event.job, event.key, counts=counts)
  return started, first
