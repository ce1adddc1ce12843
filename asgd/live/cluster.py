"""The base class of clusters: the participants of a run, as its driver sees
them.

Each protocol has a subclass. After `start` the driver calls `check` again and
again until the cluster is `finished`. `check` replaces lost parties and returns
lines for the user. It raises the error of a party if the successor would raise
it, too. For a checkpoint the driver calls `pause`, which returns whether all
parties were at rest in time, and then `resume`.
"""

from typing import Any

from asgd.live.supervisor import Supervisor


class Cluster:
  """The parties of a run, under one supervisor."""

  finished: Any  # bool: all jobs are done, by the last `check`

  def __init__(self, supervisor: Supervisor):
    self._supervisor = supervisor

  @property
  def replaced(self) -> dict[str, int]:
    """Kind of party -> count of replacements."""
    return self._supervisor.replaced

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    self._supervisor.close()
