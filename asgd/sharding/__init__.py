"""Parameters that are split over the shards of a server.

- `ShardPlan`: which shard holds which rows; `split` and `join` use it.
- `total`: sums a number (such as a squared norm) over all shards, for a rule
  that needs it, such as `clip_by_global_norm`; `run_staged` adds the summands.
- `combine`: one report from the reports of the parts.

    params --split--> part of shard s --server--> update --join--> params

Training on shards equals training without them if each row of an update depends
on this row alone, as in SGD, Adam, delay compensation, gap-awareness and DANA;
`probe.check` tests this. Begin with `plan.py`.
"""

from asgd.sharding import probe
from asgd.sharding.plan import (
  ShardPlan,
  combine,
  join,
  make_plan,
  part,
  paths_of,
  shape_of,
  split,
  trained_sizes,
)
from asgd.sharding.totals import (
  Ask,
  Done,
  add_up,
  clip_by_global_norm,
  run_staged,
  staged,
  total,
)
