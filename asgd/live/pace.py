"""Workers that are slow on purpose: a factor multiplies the time of a job."""

from collections.abc import Callable, Sequence


def factor_of(slowdown: Sequence[float], worker: int) -> float:
  """Returns the factor of a worker: slowdown[worker], 1 beyond its length."""
  return slowdown[worker] if worker < len(slowdown) else 1.0


def slow_down(
  factor: float,
  since: float,
  *,
  clock: Callable[[], float],
  wait: Callable[[float], None],
) -> None:
  """Waits until a job has taken `factor` times as long as it has taken so far.

  Args:
    factor: 1 or less: returns at once.
    since: the start of the job, in seconds of `clock`.
    clock: returns the present time in seconds.
    wait: blocks for a number of seconds.

  Example:
    >>> from asgd.live import pace
    >>> pace.slow_down(3.0, 10.0, clock=lambda: 10.5, wait=print)
    1.0
  """
  if factor > 1:
    wait((factor - 1) * (clock() - since))
