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
from asgd.transforms.per_worker import per_worker
from asgd.transforms.rows import check_workers, peek
from asgd.transforms.staleness import scale_by_staleness
from asgd.transforms.statistics import own_statistics

__all__ = [
  "adaptive_delay_compensation",
  "check_workers",
  "dana_momentum",
  "delay_compensation",
  "gap_aware",
  "lookahead",
  "own_statistics",
  "per_worker",
  "peek",
  "precede",
  "scale_by_staleness",
  "velocity_lookahead",
]
