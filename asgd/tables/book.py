"""What a simulated run of tables has written down: a trace and records."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.trace import Event, Ledger, events, from_events

_DTYPES = (
  *(np.int32, np.float64, np.int32, np.int32, np.int32, np.float32),
  *(np.float32, np.bool_, np.float32, np.float32, np.int64, np.int64),
  np.float32,
)


class Book:
  """Rows of a trace, and a record of each job that has ended."""

  def __init__(self) -> None:
    self.rows: list[Event] = []
    self.ledger: Ledger[Event] = Ledger()  # which counts the rows
    # Rows read at each clock differential.
    self.differentials: collections.Counter[int] = collections.Counter()
    self._records: list[tuple[Any, ...]] = []  # values of `base.Records`

  @property
  def received(self) -> int:
    """Jobs that have ended."""
    return len(self._records)

  def write(self, event: Event) -> None:
    """Writes a row of the trace."""
    self.rows.append(event)
    self.ledger.rows += 1
    self.ledger.time = event.time

  def record(self, values: tuple[Any, ...]) -> None:
    """Writes what is known of a job that has ended."""
    self._records.append(values)

  def count(self, clocks: Iterable[np.ndarray], clock: int) -> np.ndarray:
    """Counts the rows that are read at a clock, whose own clocks are these;
    returns all of them."""
    every = np.concatenate([*clocks, np.zeros(0, int)])
    lacks, counts = np.unique(every - 1 - clock, return_counts=True)
    pairs = zip(lacks.tolist(), counts.tolist(), strict=True)
    self.differentials.update(dict(pairs))
    return every

  def records(self, start: int = 0) -> base.Records:
    """Returns the records from number `start` on."""
    columns = zip(*self._records[start:], strict=True)
    empty = [()] * len(_DTYPES)
    return base.Records(*map(np.array, list(columns) or empty, _DTYPES))

  def pack(self) -> tuple[dict[str, Any], list[Any]]:
    """Returns its arrays, and the clock differentials as JSON."""
    arrays = {"records": self.records(), "trace": from_events(self.rows)}
    return arrays, sorted(self.differentials.items())

  def unpack(
    self, arrays: Mapping[str, Any], differentials: Any, now: float
  ) -> None:
    """Takes over what was packed, at a time."""
    self.differentials = collections.Counter(dict(differentials))
    self.rows = list(events(arrays["trace"]))
    self.ledger.rows, self.ledger.time = len(self.rows), now
    columns = (column.tolist() for column in arrays["records"])
    self._records = list(zip(*columns, strict=True))
