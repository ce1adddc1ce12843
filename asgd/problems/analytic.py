"""Problems with known solutions, for configs (MODULE:FUNCTION of a problem).

  config.problem = dict(name="asgd.problems.analytic:quadratic", dimensions=16)
"""

import jax
import numpy as np

from asgd import checks
from asgd.problems import tasks
from asgd.problems.problem import Problem


def quadratic(
  batch_size: int,
  *,
  dimensions: int = 16,
  least: float = 0.05,
  noise: float = 0.0,
) -> Problem:
  """f(w) = sum_i c_i w_i^2 / 2 with curvatures c from `least` to 1. The initial
  w is normally distributed.

  Args:
    batch_size: not used; gradients are exact except for `noise`.
    dimensions: length of w. Curvatures are equally spaced on a logarithmic
      scale.
    least: the smallest curvature, up to 1; the largest is 1.
    noise: standard deviation of the gradient's noise.

  Example:
    >>> problem = quadratic(1, dimensions=2, least=0.5)
    >>> w = np.array([1.0, 2.0], np.float32)
    >>> problem.evaluate(w).loss  # 0.5 / 2 + 4 / 2
    2.25
  """
  del batch_size
  checks.integer("dimensions", dimensions)
  checks.positive("least", least)
  checks.nonnegative("noise", noise)
  if least > 1:
    raise ValueError(f"least must be at most 1, not {least}")
  # The condition number is 1 / least.
  curvatures = np.geomspace(least, 1, dimensions)
  problem = tasks.quadratic(curvatures, noise=noise)
  return problem._replace(
    init=lambda key: jax.random.normal(key, (dimensions,))
  )
