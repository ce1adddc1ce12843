"""Backup tasks: what is late in a synchronous round is done twice.

  worker 0   |--job 0--|      |--job 2, again--|
  worker 1   |--job 1--|
  worker 2   |--job 2------------------------------------|  dropped

When the rest of a round is done, a worker that has nothing to do takes a job
that is late, and the first of the two results counts. The other worker ends its
own, which is dropped when it comes, and is missed in the rounds until then:
others do two jobs.
"""

from asgd import base, checks
from asgd.orders import protocol
from asgd.orders.durations import Durations
from asgd.orders.play import played
from asgd.orders.trace import ENDS, STARTS, events


def backup_tasks(
  durations: Durations, *, workers: int, messages: int, late: float
) -> base.Trace:
  """Synchronous rounds in which late jobs are handed to idle workers, too.

    a job is late after f times the median of its worker's peers' last times

  Use it with `make_server(..., every=workers)`. The messages of a round are
  received together, when one of each of its N jobs is there: in the order of
  the jobs, but those of one worker in the order in which it did them.

  Args:
    durations: how long each job of the N workers takes.
    workers: N.
    messages: RECEIVE rows, N for each round.
    late: f, 1 or more; infinite is no backup task, `bulk_synchronous`.

  Returns:
    A Trace, whose DROP rows are of the results that were second.

  Raises:
    ValueError: for a number out of its range, or a round that is not whole.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012, as to
    Sandblaster's portions, and Dean, Ghemawat, "MapReduce", OSDI 2004; that
    the median decides is our own choice.

  Example:
    At 2 the jobs of workers 0 and 1 have taken 1, and worker 2's is late.

    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 1, 9])
    >>> trace = orders.backup_tasks(clock, workers=3, messages=3, late=2)
    >>> for row in orders.trace.events(trace):
    ...   if row.time:
    ...     print(row.format())
    2.0,0,1,2,send
    3.0,0,0,0,receive
    3.0,1,0,1,receive
    3.0,0,1,2,receive
    >>> orders.count_backups(trace)
    (1, 1)
  """
  checks.whole("workers", workers)
  checks.whole("messages", messages)
  checks.multiple(messages, "messages", workers, "rounds of {} workers")
  rules = protocol.Rules(round=workers, late=late)
  return played(rules, durations, workers, messages)


def count_backups(trace: base.Trace) -> tuple[int, int]:
  """Counts the jobs that two workers did.

  Args:
    trace: of any order.

  Returns:
    How many were started as backup tasks, and how many of these came first.
  """
  doing: dict[int, list[tuple[int, int]]] = {}  # by job, the first one first
  started = first = 0
  for event in events(trace):
    if event.action in STARTS:
      keys = doing.setdefault(event.job, [])
      started += bool(keys)
      keys.append(event.key)
    elif event.action in ENDS and event.key in doing.get(event.job, ()):
      keys = doing[event.job]
      second = event.action == base.RECEIVE and keys[0] != event.key
      first += second
      keys.remove(event.key)
      if second or not keys:
        del doing[event.job]
  return started, first
