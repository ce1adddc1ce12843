"""Backup tasks: what is late in a synchronous round is done twice.

  worker 0   |--job 0--|      |--job 2, again--|
  worker 1   |--job 1--|
  worker 2   |--job 2------------------------------------|  dropped

When the rest of a round is done, an idle worker takes a job that is late, and
the first of the two results counts. The other worker ends its own, which is
dropped when it comes, and lacks in the rounds until then: others do two jobs.
"""

import statistics
from collections.abc import Collection, Iterator

from asgd import base
from asgd.orders.trace import ENDS, STARTS, events

Key = tuple[int, int]  # (worker, seq)


class Copies:
  """The open tickets of each job, of which one counts.

  Example:
    Workers 0 and 1 do job 5. Worker 1 comes first.

    >>> from asgd.orders.backups import Copies
    >>> copies = Copies()
    >>> copies.start(5, (0, 0)), copies.start(5, (1, 0))
    (True, False)
    >>> copies.end(5, (1, 0), counts=True)
    False
    >>> copies.beaten({(0, 0): 5})
    [(0, 0)]
  """

  def __init__(self) -> None:
    self.open: dict[int, list[Key]] = {}  # by job, the first one first
    # Open ones of jobs of which another message was received.
    self._superseded: set[Key] = set()
    self.took: dict[int, float] = {}  # worker -> time of its latest job

  def start(self, job: int, key: Key) -> bool:
    """A ticket is opened; returns whether it is the only one of its job."""
    keys = self.open.setdefault(job, [])
    keys.append(key)
    return len(keys) == 1

  def end(self, job: int, key: Key, *, counts: bool) -> bool:
    """A ticket is closed, because its message `counts` or for another reason;
    returns whether the job is open at no worker, and was not done."""
    others = self.open[job]
    others.remove(key)
    if not others:
      del self.open[job]
    superseded = key in self._superseded
    self._superseded.discard(key)
    if counts:
      self._superseded.update(others)
    return not (counts or others or superseded)

  def beaten(self, arrived: dict[Key, int]) -> list[Key]:
    """Returns the messages, of message -> job in the order of their arrival,
    that came after another one of their job."""
    out, jobs = [], set()
    for key, job in arrived.items():
      if key in self._superseded or job in jobs:
        out.append(key)
      jobs.add(job)
    return out

  def awaited(self, arrived: Collection[Key]) -> bool:
    """Whether a job is not done and has no message among the arrived."""
    return any(
      not any(key in arrived for key in keys)
      and not self._superseded.issuperset(keys)
      for keys in self.open.values()
    )

  def single(self, arrived: Collection[Key]) -> Iterator[Key]:
    """Yields the tickets of jobs that one worker alone does, without a message
    among the arrived."""
    for keys in self.open.values():
      done = keys[0] in arrived or keys[0] in self._superseded
      if len(keys) == 1 and not done:
        yield keys[0]

  def usual(self, worker: int) -> float | None:
    """Returns the median of the latest times of a worker's peers, if any."""
    peers = [took for peer, took in self.took.items() if peer != worker]
    return statistics.median(peers) if peers else None


def count_backups(trace: base.Trace) -> tuple[int, int]:
  """Counts the jobs of a trace that two workers did: how many were started as
  backup tasks, and how many of these came first."""
  copies, started, first = Copies(), 0, 0
  for event in events(trace):
    if event.action in STARTS:
      started += not copies.start(event.job, event.key)
    elif event.action in ENDS:
      counts = event.action == base.RECEIVE
      first += counts and copies.open[event.job][0] != event.key
      copies.end(event.job, event.key, counts=counts)
  return started, first
