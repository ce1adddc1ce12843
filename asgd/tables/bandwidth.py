"""A worker's budget of bytes per second, for messages within a clock.

At the end of each job a worker may send a message. It sends one if its link has
sent all earlier messages at the rate of the budget:

  send if t >= free,   then free <- max(free, t) + n / B

  t     time at which the worker began the job
  free  time at which the link has sent all earlier messages
  n     bytes of the message
  B     budget in bytes per second

A message within a clock has the rows with the largest relative change (filter
`largest_change`). The message at the end of a clock is always sent, with all
updates, so that the bound of the consistency model holds. If these messages
alone exceed the budget, the link is never free within a clock.

The trace row of a job's start has the time t. So a replay makes the same
decisions, even if t was measured in a live run.
"""


def free_after(
  free: float, time: float, nbytes: int, bandwidth: float
) -> float:
  """Returns the time at which a link has sent a message and all earlier ones.

  Args:
    free: the time at which the link has sent the earlier messages.
    time: the time at which the message's job began, in the same unit.
    nbytes: the bytes of the message.
    bandwidth: bytes per unit of time; infinity: no limit.

  Source:
    Wei et al., "Managed communication and consistency for fast data-parallel
    iterative analytics", SoCC 2015, and the authors' code
    (sailing-pmls/bosen, ssp_aggr_bg_worker.cpp).

  Example:
    The link sends 8 bytes per second, a message has 16 bytes. The second
    message ends a clock, and waits for the first one.

    >>> from asgd.tables import bandwidth
    >>> free = bandwidth.free_after(0.0, time=1.0, nbytes=16, bandwidth=8.0)
    >>> free, bandwidth.free_after(free, time=2.0, nbytes=16, bandwidth=8.0)
    (3.0, 5.0)
  """
  return max(free, time) + nbytes / bandwidth
