"""Sandblaster: batch training by a coordinator without parameters.

It tells the shards of a server by numbered commands what to do with their rows
(`commands`, `shard`), runs L-BFGS with them (`coordinator`, `line_search`), and
has idle workers compute the batch in portions (`portions`, `simulation`).

Source: Dean et al., "Large scale distributed deep networks", NIPS 2012, section
4.2 and algorithm 1 of its appendix.
"""

from asgd.sandblaster.again import RecomputedState, count_jobs, recompute
from asgd.sandblaster.batch_driver import coordinator_from
from asgd.sandblaster.book import Iterate
from asgd.sandblaster.commands import OPERATIONS, Command
from asgd.sandblaster.coordinator import (
  Await,
  Begin,
  Coordinator,
  State,
  message_name,
)
from asgd.sandblaster.portions import Work, make_sums, message_norm
from asgd.sandblaster.settings import PlannedKill, Settings, sandblaster
from asgd.sandblaster.shard import Image, Shards, VectorShard, dot
from asgd.sandblaster.simulation import (
  SandblasterSimulation,
  Saved,
  template,
)

RECIPES = {"sandblaster": sandblaster}  # that a coordinator drives
