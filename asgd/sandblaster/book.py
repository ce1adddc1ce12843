"""What a run writes down: trace, messages and iterates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import base
from asgd.orders.trace import Event, events, from_events
from asgd.sandblaster.coordinator import Coordinator


class Iterate(NamedTuple):
  """A point that the coordinator has come to."""

  iteration: int  # 0 is the start
  time: float  # simulated, or seconds of a live run
  evaluations: int  # of the whole batch
  loss: float  # of the whole batch, with the weight decay
  norm: float  # of the gradient
  step: float  # a
  fallback: int  # times so far that the history was forgotten


class Lengths(NamedTuple):
  """How far a book is written."""

  rows: int
  messages: int
  iterates: int


class RunLog:
  """The outcome of a run, row by row."""

  def __init__(self):
    self.rows: list[Event] = []  # of the trace
    self.messages: list[tuple[Any, ...]] = []  # rows of base.Records
    self.iterates: list[Iterate] = []
    self.news: list[str] = []  # for the user

  @property
  def lengths(self) -> Lengths:
    """How far it is written."""
    return Lengths(len(self.rows), len(self.messages), len(self.iterates))

  def write(self, row: Event) -> None:
    """Adds a row of the trace."""
    self.rows.append(row)

  def receive(self, *message: float) -> None:
    """Adds a message, in the order of base.Records."""
    self.messages.append(message)

  def note(self, coordinator: Coordinator, time: float) -> None:
    """Adds news of a coordinator, and the iterate that it has come to."""
    self.news += coordinator.news
    coordinator.news.clear()
    state, known = coordinator.state, -1
    if self.iterates:
      known = self.iterates[-1].iteration
    if state.iteration > known:
      self.iterates.append(
        Iterate(
          *(state.iteration, time, state.evaluations, state.loss),
          *(state.norm, state.step, state.fallbacks),
        )
      )

  def records(self, start: int = 0, end: int | None = None) -> base.Records:
    """Returns a row for each message, from `start` to `end`; the update is the
    iteration, the staleness is in evaluations."""
    return base.Records.of(self.messages[start:end])

  def arrays(self, lengths: Lengths) -> dict[str, Any]:
    """Returns its beginning, as arrays."""
    reals = np.array(self.iterates[: lengths.iterates], np.float64)
    return {
      "records": self.records(0, lengths.messages),
      "trace": from_events(self.rows[: lengths.rows]),
      "iterates": reals.reshape(-1, len(Iterate._fields)),
    }

  def read(self, arrays: dict[str, Sequence[Any]]) -> None:
    """Becomes what the arrays say."""
    self.rows = list(events(base.Trace(*arrays["trace"])))
    self.messages = base.Records(*arrays["records"]).rows()
    rows = np.asarray(arrays["iterates"]).tolist()
    self.iterates = [
      Iterate(int(i), time, int(count), *reals, int(fallbacks))
      for i, time, count, *reals, fallbacks in rows
    ]
