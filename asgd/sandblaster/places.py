"""The places of workers in simulated time."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class PortionTicket(NamedTuple):
  """A job that a worker has started."""

  evaluation: int
  job: int
  seq: int
  finish: float  # when it will be done
  fresh: bool  # the parameters were fetched for it
  loss: float = math.nan  # what a copy of it came to


class SimulatedBatchWorker:
  """A worker."""

  def __init__(self, stream: Iterator[float]):
    self.stream = stream
    self.drawn = 0  # durations so far
    self.fetched = -1  # the evaluation whose parameters it has
    self.seq = 0  # of the next job
    self.holder = 0  # how many came before it in this place
    self.alive = True
    self.ticket: PortionTicket | None = None
    self.ready: dict[int, float] = {}  # job -> when its data are here
    self.loader = 0.0  # when all that it loads is here

  def draw(self, count: int) -> float:
    """The time of so many portions."""
    self.drawn += count
    return sum(itertools.islice(self.stream, count))

  def load(self, job: int, needs: float, now: float) -> float:
    """Returns when the data of a job are here, which are kept; loading them
    takes so long, one after the other."""
    if job not in self.ready:
      self.loader = max(now, self.loader) + needs
      self.ready[job] = self.loader
    return self.ready[job]

  def pack(self) -> list[Any]:
    """Returns all it is, as JSON."""
    ready = list(self.ready.items())
    ticket = list(self.ticket) if self.ticket else None
    who = self.fetched, self.seq, self.holder, self.alive
    return [self.drawn, *who, ticket, ready, self.loader]

  def unpack(self, packed: Sequence[Any]) -> None:
    """Becomes what was packed; its stream is at the beginning."""
    drawn, *who, ticket, ready, self.loader = packed
    self.fetched, self.seq, self.holder, self.alive = who
    self.draw(drawn)
    self.ticket = PortionTicket(*ticket) if ticket else None
    self.ready = dict(ready)

  def kill(self) -> None:
    """Its worker is killed, with all that it has."""
    self.alive, self.ticket, self.fetched = False, None, -1
    self.ready, self.loader = {}, 0.0
