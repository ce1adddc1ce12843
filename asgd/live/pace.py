"""Workers that are slow on purpose: each job takes a factor of its time."""

from collections.abc import Callable, Sequence


def factor_of(slowdown: Sequence[float], worker: int) -> float:
  """Returns the factor on the time of a worker's jobs; 1 beyond the list."""
  return slowdown[worker] if worker < len(slowdown) else 1.0


def slow_down(
  factor: float,
  since: float,
  *,
  clock: Callable[[], float],
  wait: Callable[[float], None],
) -> None:
  """Waits until a job has taken a factor of the time since its start.

  Example:
    >>> from asgd.live import pace
    >>> pace.slow_down(3.0, 10.0, clock=lambda: 10.5, wait=print)
    1.0
  """
  if factor > 1:
    wait((factor - 1) * (clock() - since))
