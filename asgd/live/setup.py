"""Settings that all shards of a run share."""

from typing import NamedTuple

from asgd.live.deadlines import Ladder
from asgd.live.slots import SlotCounts
from asgd.orders import protocol


class Setup(NamedTuple):
  """Settings of a run; the same for all of its shards."""

  rules: protocol.Rules
  workers: int  # places
  jobs: int  # each to be received once
  shards: int = 1
  consistent: bool = False  # all shards obey the lead's order
  totals: bool = False  # the algorithm needs totals; consistent only
  log: int = 16  # messages kept until a snapshot; 0: none
  snapshot_seconds: float = 30.0  # between two, where there is no log
  owned: bool = False  # jobs belong to places (sharded data)
  ladder: Ladder = Ladder()
  keep_params_at: tuple[int, ...] = ()  # received counts, for evaluations
  together: bool = False  # the first job waits until every place is taken

  @property
  def gathered(self) -> int:
    """Workers that the first job waits for. A synchronous round has a job for
    each: with fewer workers, the first to come would make several messages."""
    of_round = self.rules.round + self.rules.backup
    return self.workers if self.together else min(self.workers, of_round)


def slot_counts(setup: Setup) -> SlotCounts:
  """Returns the slots that a shard needs: for tickets that are open now, were
  open at the last snapshot or are kept, and for messages that are being written
  or belong to the log."""
  rules = setup.rules
  tickets = setup.workers * (rules.depth + 1) + rules.round + rules.backup
  return SlotCounts(2 * tickets + 2, tickets + setup.log)
