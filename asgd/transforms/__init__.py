"""Optax transforms against staleness, one idea per file.

    message, Delay -> at_server transform -> algorithm's transform -> update

A factory raises ValueError for an argument out of its range. Each transform
keeps optax's contract: it ignores unknown extra args, and its state is arrays.
`optax.inject_hyperparams` moves the numbers of a factory to the state:
`optax.inject_hyperparams(delay_compensation)(strength=schedule)`. Its
`static_args` must name arguments that are sizes, such as `workers`.

Begin with `staleness.py`, the shortest, then `lookahead.py` and `rows.py`.

References:
  Hakimi et al. 2019: "Taming momentum in a distributed asynchronous
  environment", arXiv:1907.11612.
  Xie et al. 2019: "Asynchronous federated optimization", arXiv:1903.03934.
  Zheng et al. 2017: "Asynchronous stochastic gradient descent with delay
  compensation", ICML 2017, arXiv:1609.08326.
"""

from asgd.rates import scale_by_sent_rate
from asgd.transforms.compensation import (
  adaptive_delay_compensation,
  delay_compensation,
)
from asgd.transforms.gap import divide_by_gap, gap_aware
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
from asgd.transforms.nesterov import delayed_nesterov
from asgd.transforms.rows import peek, per_worker
from asgd.transforms.staleness import (
  scale_by_adadelay,
  scale_by_discount,
  scale_by_staleness,
)
from asgd.transforms.statistics import own_statistics
