"""Sandblaster: batch training by a coordinator that holds no parameters.

  coordinator -- commands --> shards     vectors by rows: dot, axpy, ...
  coordinator -- jobs -----> workers     fetch parameters, compute portions
  workers     -- messages --> shards     sums of gradients

The coordinator (`coordinator`, `line_search`) runs L-BFGS by numbered commands
(`commands`) to the shards of a server (`shard`). Idle workers compute the batch
in portions (`portions`). A driver carries out the coordinator's requests
(`batch_driver`), in simulated time (`simulation`) or live
(`asgd.live.sandblaster`). Begin with `coordinator`.

Source: Dean et al., "Large scale distributed deep networks", NIPS 2012, section
4.2 and algorithm 1 of its appendix.
"""

import sys

from asgd import names
from asgd.sandblaster.batch_driver import coordinator_from
from asgd.sandblaster.commands import OPERATIONS, Command
from asgd.sandblaster.coordinator import (
  Await,
  Begin,
  Coordinator,
  State,
  message_name,
)
from asgd.sandblaster.over_network import SandblasterOverNetwork
from asgd.sandblaster.portions import Work, make_sums, message_norm
from asgd.sandblaster.replay import RecomputedState, count_jobs, recompute
from asgd.sandblaster.run_log import Iterate
from asgd.sandblaster.settings import PlannedKill, Settings, sandblaster_lbfgs
from asgd.sandblaster.shard import Image, Shards, VectorShard, dot
from asgd.sandblaster.simulation import (
  SandblasterSimulation,
  Saved,
  template,
)

# Recipes that this protocol trains, by their names in a config.
RECIPES = {"sandblaster": sandblaster_lbfgs}

# Named in the error for a call of this module.
_recipe = "asgd.sandblaster_lbfgs(1.0, workers=8)"
sys.modules[__name__].__class__ = names.RecipeModule
