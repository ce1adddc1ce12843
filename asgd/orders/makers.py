"""Makers of orders: a protocol is played with durations.

Which worker may start when is all that distinguishes asynchronous from bulk or
stale synchronous training. Each maker plays durations through one such protocol
and returns a Trace; no model is involved, so a trace can be printed, checked,
stored, and obeyed by any engine. `asgd.orders.trace` shows one.

`messages` counts the RECEIVE rows; the last one ends the trace. Jobs are
numbered in the order of the sends: every arrival consumes the next batch, and
an epoch is one pass in total over all workers. A maker raises ValueError for
counts that do not fit.
"""

import heapq

from asgd import base, checks, names
from asgd.orders import protocol
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, from_events


def _play(
  rules: protocol.Rules, durations: Durations, workers: int, messages: int
) -> base.Trace:
  """Drives a protocol with durations, until so many messages are received."""
  checks.whole("workers", workers)
  checks.whole("messages", messages)
  streams = [durations.stream(worker) for worker in range(workers)]
  free = [0.0] * workers  # when each worker has done all it was given
  running = []  # heap of (finish time, job, worker, seq); ties go by job
  rows: list[Event] = []
  dispatcher = protocol.Dispatcher(rules, log=rows.append)
  for worker in range(workers):
    dispatcher.join(worker, 0.0)
  rows.clear()  # workers present at time 0 get no JOIN row
  now = 0.0
  while dispatcher.received < messages:
    for grant in dispatcher.grants(now):
      worker = grant.worker
      free[worker] = max(now, free[worker]) + next(streams[worker])
      heapq.heappush(running, (free[worker], grant.job, worker, grant.seq))
    now, _, worker, seq = heapq.heappop(running)
    dispatcher.arrive(worker, seq)
    dispatcher.deliver(now)
  return from_events(rows)


def stale_synchronous(
  durations: Durations,
  *,
  workers: int,
  messages: int,
  bound: float,
  cache: bool = False,
  depth: int = 1,
  fetch_every: int = 1,
) -> base.Trace:
  """Stale synchronous parallel (Ho et al. 2013).

  A worker that has finished c jobs may start another while the slowest has
  finished at least c - bound. Bound 0 is bulk synchronous, an infinite bound
  is asynchronous. All workers are sent to at time 0.

  Args:
    durations: how long each job of the N workers takes.
    messages: to be received; N depth - 1 or fewer open tickets never are.
    bound: how many jobs a worker may be ahead of the slowest.
    cache: a worker reads its own copy of the parameters while that is fresh
      enough for the bound, as the paper's clients do; otherwise it fetches
      before each job (eager SSP, Dai et al. 2015).
    depth: tickets that a worker may hold; 2 fetches while it computes.
    fetch_every: jobs done on one ticket (Downpour's n_fetch).
  """
  rules = protocol.Rules(
    bound=bound, cache=cache, depth=depth, fetch_every=fetch_every
  )
  return _play(rules, durations, workers, messages)


def asynchronous(
  durations: Durations, *, workers: int, messages: int, depth=1, fetch_every=1
) -> base.Trace:
  """Every worker starts again as soon as its message is received."""
  rules = protocol.Rules(depth=depth, fetch_every=fetch_every)
  return _play(rules, durations, workers, messages)


def backup_workers(
  durations: Durations, *, workers: int, messages: int, backup: int
) -> base.Trace:
  """Synchronous rounds of N - backup messages, the fastest of N (Chen et al.
  2016; K-sync of Dutta et al. 2018).

  Use it with `make_server(..., every=workers - backup, gate=max_staleness(0))`,
  which drops what comes after its round. The messages of a round are received
  together, when it is complete, in the order of their jobs.
  """
  checks.whole("workers", workers)
  if checks.whole("backup", backup, 0) >= workers:
    most = f"at most {workers - 1}, of {workers} workers"
    raise ValueError(f"backup must be {most}, not {backup!r}")
  rules = protocol.Rules(round=workers - backup, backup=backup)
  return _play(rules, durations, workers, messages)


def bulk_synchronous(
  durations: Durations, *, workers: int, messages: int
) -> base.Trace:
  """All workers start a round together, when all have ended the one before.

  Use it with `make_server(..., every=workers)`; `messages` are whole rounds.
  """
  checks.whole("workers", workers)
  checks.whole("messages", messages)
  checks.multiple(messages, "messages", workers, "rounds of {} workers")
  return stale_synchronous(
    durations, workers=workers, messages=messages, bound=0
  )


def fixed_delay(*, delay: int, messages: int) -> base.Trace:
  """Every message has staleness `delay`, after the first ones (0, 1, 2, ...).

  w_{t+1} = w_t - eta g(w_{t-delay}), with w_t = w_0 for t < 0: the round robin
  of delay + 1 workers, each taking as long as the others.
  """
  workers = checks.whole("delay", delay, 0) + 1
  checks.whole("messages", messages)
  rows = [Event(0.0, worker, 0, worker, base.SEND) for worker in range(workers)]
  for job in range(messages):
    time, (seq, worker) = float(job + 1), divmod(job, workers)
    rows.append(Event(time, worker, seq, job, base.RECEIVE))
    if job + 1 < messages:
      rows.append(Event(time, worker, seq + 1, job + workers, base.SEND))
  return from_events(rows)


_PROTOCOLS = {
  "asynchronous": asynchronous,
  "backup_workers": backup_workers,
  "bulk_synchronous": bulk_synchronous,
  "stale_synchronous": stale_synchronous,
  "fixed_delay": fixed_delay,
}


def build(
  name: str, durations: Durations, *, workers: int, messages: int, **kwargs
) -> base.Trace:
  """Builds a trace by the name of its protocol; a fixed delay is N - 1."""
  maker = names.lookup("order", name, _PROTOCOLS)
  checks.whole("workers", workers)
  common = {"durations": durations, "workers": workers}
  if maker is fixed_delay:
    common = {"delay": workers - 1}
  kwargs = {"messages": messages, **common, **kwargs}
  return names.call("order", name, maker, kwargs)
