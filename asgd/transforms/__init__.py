"""One idea against staleness per file, each an optax transform."""

from asgd.transforms.compensation import (
  adaptive_delay_compensation,
  delay_compensation,
)
from asgd.transforms.gap import gap_aware
from asgd.transforms.lookahead import (
  dana_momentum,
  lookahead,
  precede,
  velocity_lookahead,
)
from asgd.transforms.mixing import (
  add_proximal_pull,
  constant_discount,
  hinge_discount,
  mix_models,
  polynomial_discount,
)
from asgd.transforms.per_worker import per_worker
from asgd.transforms.rates import scale_by_sent_rate
from asgd.transforms.rows import check_workers, peek
from asgd.transforms.staleness import scale_by_staleness
from asgd.transforms.statistics import own_statistics

__all__ = [
  "add_proximal_pull",
  "adaptive_delay_compensation",
  "check_workers",
  "constant_discount",
  "dana_momentum",
  "delay_compensation",
  "gap_aware",
  "hinge_discount",
  "lookahead",
  "mix_models",
  "own_statistics",
  "per_worker",
  "peek",
  "polynomial_discount",
  "precede",
  "scale_by_sent_rate",
  "scale_by_staleness",
  "velocity_lookahead",
]
