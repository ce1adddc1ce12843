"""Workers that are slow on purpose: each job takes a factor of its time."""

from collections.abc import Callable, Sequence


def factor_of(slowdown: Sequence[float], worker: int) -> float:
  """Returns the factor on the time of a worker's jobs.

  Args:
    slowdown: factors of workers 0, 1, ...; further workers have 1.
    worker: its index.

  Example:
    >>> from asgd.live import pace
    >>> pace.factor_of((1.0, 3.0), 1), pace.factor_of((1.0, 3.0), 2)
    (3.0, 1.0)
  """
  return slowdown[worker] if worker < len(slowdown) else 1.0


def slow_down(
  factor: float,
  since: float,
  *,
  clock: Callable[[], float],
  wait: Callable[[float], None],
) -> None:
  """Waits until a job has taken a factor of the time that it took so far.

  Args:
    factor: on the time; there is no wait up to 1.
    since: when the job was started.
    clock: in seconds.
    wait: blocks the caller for some seconds.

  Example:
    >>> from asgd.live import pace
    >>> pace.slow_down(3.0, 10.0, clock=lambda: 10.5, wait=print)
    1.0
  """
  if factor > 1:
    wait((factor - 1) * (clock() - since))
