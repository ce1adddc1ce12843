"""One idea against staleness per file, each an optax transform.

What makes a transform raises ValueError for an argument out of its range.
"""

from asgd.rates import scale_by_sent_rate
from asgd.transforms.compensation import (
  adaptive_delay_compensation,
  delay_compensation,
)
from asgd.transforms.gap import gap_aware
from asgd.transforms.lookahead import (
  dana_momentum,
  lookahead,
  precede,
  slim,
  velocity_lookahead,
)
from asgd.transforms.mixing import (
  add_proximal_pull,
  constant_discount,
  hinge_discount,
  make_discount,
  mix_models,
  polynomial_discount,
)
from asgd.transforms.rows import peek, per_worker
from asgd.transforms.staleness import scale_by_staleness
from asgd.transforms.statistics import own_statistics
