"""What workers compute, as functions of plain arrays."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from asgd import base
from asgd.tables.keys import Keys

Values = Mapping[str, Any]  # table -> [n, ...]


class Work(NamedTuple):
  """What workers compute, as functions of plain arrays."""

  batch: Callable[[int, int], base.Batch]  # (worker, job)
  keys: Callable[[base.Batch], Mapping[str, Keys]]  # of the rows it needs
  # (rows, batch, keys, worker, job) -> (loss, the gradient of each row, or what
  # is pushed to it: `Settings.direct`)
  gradient: Callable[..., tuple[float, Values]]
