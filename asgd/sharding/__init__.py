"""Parameters that are split over the shards of a server.

A `ShardPlan` says which shard holds which rows; `split` and `join` go there and
back. It is the same training as without shards if the algorithm keeps rows
apart (`probe.check` finds out), as SGD, Adam, delay compensation, gap-awareness
and DANA do. A rule that needs a number of the whole asks for it by `total`, as
`clip_by_global_norm` does; `combine` makes one report of the parts'.
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
