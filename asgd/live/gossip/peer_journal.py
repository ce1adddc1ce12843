"""The journal and the records of one live peer.

A row is on disk before what it stands for is done: who takes the peer's place
continues after the last row.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import base, simulator
from asgd.live.journal import FileJournal
from asgd.live.records import FileSink
from asgd.orders.trace import PUTS, STARTS, Event
from asgd.simulator.steps import Observation


class PeerJournal:
  """Writes rows and records of a peer, and counts its rows.

  Bytes and norms are those since the last record, of which they become part.
  """

  def __init__(
    self,
    index: int,
    journal: FileJournal,
    sink: FileSink,
    clock: Callable[[], float],
  ):
    """Continues after the rows that the journal has, those of earlier
    incarnations of the peer too. The clock tells seconds of the run."""
    self.index = index
    self._journal, self._sink, self._clock = journal, sink, clock
    self._time = 0.0  # of the last row
    self.seqs = 0  # jobs that were started
    self.puts = 0  # messages that were put
    self.life = 0  # incarnations that have left
    self.begun = 0  # jobs of this incarnation
    self.bytes_down, self.bytes_up = 0, 0
    self.norms: list[Any] = []  # of changes by mixing
    for event in journal.events():
      self._note(event)

  def _note(self, event):
    self._time = max(self._time, event.time)
    self.seqs += event.action in STARTS
    self.puts += event.action in PUTS
    self.life += event.action == base.LEAVE
    self.begun += event.action in STARTS
    if event.action == base.LEAVE:
      self.begun = 0

  def write(self, seq: int, job: int, action: int, **more: Any) -> Event:
    """Appends a row; returns it. No time is less than the one before."""
    time = max(self._clock(), self._time)
    event = Event(time, self.index, seq, job, action, **more)
    self._journal.append(event)
    self._note(event)
    return event

  def record(
    self, event: Event, observation: Observation, kept: float
  ) -> None:
    """Appends the record of a job that was received, `event`; `kept` is the
    norm of the residual of its codec."""
    row = simulator.ReceivedMessage(
      event.time, self.index, event.job, self.bytes_up, self.bytes_down, kept
    )
    self._sink.append(
      simulator.peer_records([row], [observation], [self.norms])
    )
    self.bytes_down, self.bytes_up, self.norms = 0, 0, []

  def image(self) -> dict[str, Any]:
    """Returns counts of rows and records, bytes and norms, as JSON."""
    return {
      "rows": len(self._journal.events()),
      "records": self._sink.count,
      "bytes": self.bytes_down,
      "bytes_up": self.bytes_up,
      "norms": list(map(float, simulator.fetch(self.norms))),
    }

  def restore(self, image: dict[str, Any]) -> None:
    """Takes bytes and norms from an image."""
    self.bytes_down, self.bytes_up = image["bytes"], image["bytes_up"]
    self.norms = [np.float32(x) for x in image["norms"]]
