"""Workers' places in simulated time: what each is at."""

import collections
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from asgd.tables.keys import Keys
from asgd.tables.work import Values


class TableTicket(NamedTuple):
  """A job that a worker has started."""

  job: int
  keys: Mapping[str, Keys]
  values: Values  # as they were read
  oldest: int  # clock of the oldest row
  version: int  # of the server


class JobResult(NamedTuple):
  """What a worker has computed."""

  loss: float
  norm: float  # RMS of what it writes


class SimulatedTableWorker:
  """A worker."""

  def __init__(self, stream):
    self.stream = stream  # of the times of its jobs
    self.drawn = self.started = self.done = 0
    self.ticket: TableTicket | None = None
    self.outcome: JobResult | None = None  # until the job has ended
    self.waits = False
    self.up = self.down = 0  # bytes since its last record

  def draw(self) -> float:
    """Returns the time of its next job."""
    self.drawn += 1
    return next(self.stream)

  def pack(self) -> tuple[list[Any], list[int] | None]:
    """Returns its numbers, and those of its ticket, as JSON."""
    numbers = [self.drawn, self.started, self.done]
    numbers += [self.waits, self.up, self.down]
    ticket = self.ticket
    return numbers, ticket and [ticket.job, ticket.oldest, ticket.version]

  def unpack(
    self,
    numbers: list[Any],
    of_ticket: list[int] | None,
    arrays: Mapping[str, Any] | None,
  ) -> None:
    """Takes over what was packed; `arrays` are the ticket's rows."""
    self.drawn, self.started, self.done, *rest = numbers
    self.waits, self.up, self.down = rest
    collections.deque(itertools.islice(self.stream, self.drawn), maxlen=0)
    if of_ticket is not None:
      keys, values = (
        {name: np.array(x) for name, x in arrays[part].items()}
        for part in ("keys", "values")
      )
      job, oldest, version = of_ticket
      self.ticket = TableTicket(job, keys, values, oldest, version)
