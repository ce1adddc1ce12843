"""A worker's budget of bytes a second, for messages within a clock.

At the end of each job a worker may send a message. It does so if its link has
sent the earlier messages, at the rate of the budget:

  send if t >= free,   then free <- max(free, t) + n / B

  t     time at which the worker began the job
  free  time at which the link has sent all earlier messages
  n     bytes of the message
  B     budget in bytes a second

A message within a clock has the rows with the largest relative change (filter
`largest_change`). The message at the end of a clock is always sent, with all
updates, so that the bound of the consistency model holds. If the clocks'
messages alone exceed the budget, the link is never free within a clock.

The rows of a trace that begin jobs have the times t. So a replay makes the same
decisions, also the replay of a live run, in which times are measured.
"""


def free_after(
  free: float, time: float, nbytes: int, bandwidth: float
) -> float:
  """Returns the time at which a link has sent a message and those before it.

  Args:
    free: time at which it has sent the earlier messages.
    time: the time at which the message is sent, in the same unit.
    nbytes: the bytes of the message.
    bandwidth: bytes in a unit of time; infinite is no limit.

  Source:
    Wei et al., "Managed communication and consistency for fast data-parallel
    iterative analytics", SoCC 2015, and the authors' code
    (sailing-pmls/bosen, ssp_aggr_bg_worker.cpp).

  Example:
    A link of 8 bytes a second, with messages of 16 bytes. The second message
    ends a clock, and waits for the first one.

    >>> from asgd.tables import bandwidth
    >>> free = bandwidth.free_after(0.0, time=1.0, nbytes=16, bandwidth=8.0)
    >>> free, bandwidth.free_after(free, time=2.0, nbytes=16, bandwidth=8.0)
    (3.0, 5.0)
  """
  return max(free, time) + nbytes / bandwidth
