"""Learning rates over updates, in the form the papers of this field use."""

import collections
import math
from collections.abc import Sequence

import optax


def warmup_steps(
  peak: float,
  *,
  warmup: int = 0,
  start: float = 0.0,
  boundaries: Sequence[int] = (),
  factor: float = 0.1,
) -> optax.ScalarOrSchedule:
  """Linear warm-up from `start` to `peak`, then drops at given updates.

  Args:
    peak: the learning rate after the warm-up.
    warmup: updates it takes; 0 for none.
    start: the learning rate of update 0; the DANA papers use peak / workers.
    boundaries: updates from which the rate is multiplied by `factor` once more.
    factor: of each drop, positive.

  Returns:
    A schedule update -> learning rate, or `peak` itself if it never changes.

  Raises:
    ValueError: for values out of range, or a drop inside the warm-up.
  """
  if not 0 < peak < math.inf:
    raise ValueError(f"learning_rate must be positive, not {peak}")
  if warmup < 0 or not 0 <= start <= peak:
    raise ValueError(
      f"warm-up must take 0 or more updates (not {warmup}) and start between 0"
      f" and the peak {peak} (not at {start})"
    )
  if boundaries and not 0 < factor < math.inf:
    raise ValueError(f"decay factor must be positive, not {factor}")
  if any(boundary < warmup for boundary in boundaries):
    raise ValueError(
      f"the learning rate drops at updates {tuple(boundaries)}, inside the"
      f" warm-up of {warmup}"
    )
  if not warmup and not boundaries:
    return peak
  drops = optax.piecewise_constant_schedule(
    peak,
    {
      boundary - warmup: factor**count
      for boundary, count in collections.Counter(map(int, boundaries)).items()
    },
  )
  if not warmup:
    return drops
  rise = optax.linear_schedule(start, peak, warmup)
  return optax.join_schedules([rise, drops], [warmup])
