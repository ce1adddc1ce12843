"""The log of a run: trace, records of messages, and iterates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import base
from asgd.orders.trace import Event, events, from_events
from asgd.sandblaster.coordinator import Coordinator


class Iterate(NamedTuple):
  """A point that the coordinator has reached."""

  iteration: int  # 0 is the start
  time: float  # simulated, or seconds of a live run
  evaluations: int  # of the complete batch
  loss: float  # of the complete batch, with the weight decay
  norm: float  # of the gradient
  step: float  # a, of the line search
  fallback: int  # count of times that the history was cleared


class Lengths(NamedTuple):
  """Numbers of entries of a log."""

  rows: int
  messages: int
  iterates: int


class RunLog:
  """The log of a run in memory."""

  def __init__(self):
    self.rows: list[Event] = []  # of the trace
    self.messages: list[tuple[Any, ...]] = []  # rows of base.Records
    self.iterates: list[Iterate] = []
    self.news: list[str] = []  # for the user

  @property
  def lengths(self) -> Lengths:
    """The current numbers of entries."""
    return Lengths(len(self.rows), len(self.messages), len(self.iterates))

  def write(self, row: Event) -> None:
    """Adds a row of the trace."""
    self.rows.append(row)

  def receive(self, *message: float) -> None:
    """Adds the record of a message; fields in the order of base.Records."""
    self.messages.append(message)

  def add_iterate(self, coordinator: Coordinator, time: float) -> None:
    """Adds the news of a coordinator, and its latest iterate if it is new."""
    self.news += coordinator.news
    coordinator.news.clear()
    state, latest = coordinator.state, -1
    if self.iterates:
      latest = self.iterates[-1].iteration
    if state.iteration > latest:
      self.iterates.append(
        Iterate(
          *(state.iteration, time, state.evaluations, state.loss),
          *(state.norm, state.step, state.fallbacks),
        )
      )

  def records(self, start: int = 0, end: int | None = None) -> base.Records:
    """Returns the records of messages from `start` to `end`; `update` is the
    iteration, the staleness is in evaluations."""
    return base.Records.of(self.messages[start:end])

  def arrays(self, lengths: Lengths) -> dict[str, Any]:
    """Returns the first `lengths` entries as arrays."""
    reals = np.array(self.iterates[: lengths.iterates], np.float64)
    return {
      "records": self.records(0, lengths.messages),
      "trace": from_events(self.rows[: lengths.rows]),
      "iterates": reals.reshape(-1, len(Iterate._fields)),
    }

  def read(self, arrays: dict[str, Sequence[Any]]) -> None:
    """Replaces the entries by those of arrays."""
    self.rows = list(events(base.Trace(*arrays["trace"])))
    self.messages = base.Records(*arrays["records"]).rows()
    rows = np.asarray(arrays["iterates"]).tolist()
    self.iterates = [
      Iterate(int(i), time, int(count), *reals, int(fallbacks))
      for i, time, count, *reals, fallbacks in rows
    ]
