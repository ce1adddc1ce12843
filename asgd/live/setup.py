"""Settings that all shards of a run share."""

from typing import NamedTuple

from asgd.live.deadlines import Ladder
from asgd.live.slots import SlotCounts
from asgd.orders import protocol


class Setup(NamedTuple):
  """Settings of a run; the same for all of its shards."""

  rules: protocol.Rules
  workers: int  # count of worker indices
  jobs: int  # count of jobs, each of which is received once
  shards: int = 1
  consistent: bool = False  # all shards apply messages in the lead's order
  totals: bool = False  # the algorithm needs totals; consistent only
  log: int = 16  # messages that stay in slots until a snapshot; 0: no log
  snapshot_seconds: float = 30.0  # between two snapshots if there is no log
  owned: bool = False  # job j belongs to one worker index (sharded data)
  ladder: Ladder = Ladder()
  # Counts of received messages at which shards store parameters to evaluate.
  keep_params_at: tuple[int, ...] = ()
  together: bool = False  # the first job waits until all workers have joined

  @property
  def first_job_workers(self) -> int:
    """Number of workers that must have joined before the first job starts.

    A synchronous round has one job for each worker. If the round
    started with fewer workers, some would get several of its jobs.
    """
    round_workers = self.rules.round + self.rules.backup  # 0 without rounds
    return self.workers if self.together else min(self.workers, round_workers)


def slot_counts(setup: Setup) -> SlotCounts:
  """Returns the counts of slots that a shard needs.

  Slots of parameters are needed for the tickets that are open, that were open
  at the last snapshot, or that workers reuse. Slots of messages are needed for
  the messages that workers write, and for the messages of the log.
  """
  rules = setup.rules
  # A worker has up to `depth` open tickets, and may reuse one more.
  n_tickets = setup.workers * (rules.depth + 1) + rules.round + rules.backup
  # Twice: the present tickets, and the tickets of the last snapshot. Two more:
  # the latest parameters that were sent, and their successor.
  return SlotCounts(2 * n_tickets + 2, n_tickets + setup.log)
