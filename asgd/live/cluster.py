"""The base class of clusters: the participants of a run, as its driver sees
them.

A protocol has a subclass. `start` begins; the driver calls `check` again and
again until the cluster is `finished`. `check` returns lines for the user, and
raises what would end the parties that replace others, too. For a checkpoint the
driver calls `pause`, which returns whether all parties were at rest in time,
and then `resume`.
"""

from typing import Any

from asgd.live.supervisor import Supervisor


class Cluster:
  """The parties of a run, under one supervisor."""

  finished: Any  # whether all jobs are done, as the last `check` saw

  def __init__(self, supervisor: Supervisor):
    self._supervisor = supervisor

  @property
  def replaced(self) -> dict[str, int]:
    """How many parties of each kind were replaced."""
    return self._supervisor.replaced

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    self._supervisor.close()
