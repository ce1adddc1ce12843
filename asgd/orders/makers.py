"""Makers of orders: a protocol is played with durations.

Which worker may start when is all that distinguishes asynchronous from bulk or
stale synchronous training. Each maker plays durations through one such protocol
and returns a Trace; no model is involved, so a trace can be printed, checked,
stored, and obeyed by any engine. `asgd.orders.trace` shows one.

`messages` counts the RECEIVE rows; the last one ends the trace, with what is
received together with it where a round is (`backup_workers`). Jobs are numbered
in the order of the sends: every arrival consumes the next batch, and an epoch
is one pass in total over all workers.
"""

from asgd import base, checks, names
from asgd.orders import protocol
from asgd.orders.backups import backup_tasks
from asgd.orders.durations import Durations
from asgd.orders.network import Network
from asgd.orders.play import Play, Sizes, begin, played
from asgd.orders.trace import Event, from_events


def stale_synchronous(
  durations: Durations,
  *,
  workers: int,
  messages: int,
  bound: float,
  cache: bool = False,
  depth: int = 1,
  fetch_every: int = 1,
  warm_start: int = 0,
) -> base.Trace:
  """Stale synchronous parallel: nobody is further ahead than a bound.

    a worker that has finished c jobs may start another
    while the slowest has finished at least c - s

  Bound s = 0 is bulk synchronous, an infinite bound is asynchronous. All
  workers are sent to at time 0.

  Args:
    durations: how long each job of the N workers takes.
    workers: N.
    messages: RECEIVE rows. Up to N depth - 1 tickets are open at the end.
    bound: s, how many jobs a worker may be ahead of the slowest.
    cache: a worker reads its own copy of the parameters, with its own writes
      (`asgd.own_writes`), while that is fresh enough for the bound, as the
      paper's clients do; otherwise it fetches before each job (eager SSP, Dai
      et al. 2015).
    depth: tickets that a worker may hold; 2 fetches while it computes. Its
      message on the way is not in the parameters that it fetches.
    fetch_every: jobs done on one ticket (Downpour's n_fetch); not beside a
      cache.
    warm_start: as of `asynchronous`; clocks are equal after it.

  Returns:
    A Trace, its times in the unit of the durations.

  Raises:
    ValueError: for a count or a bound out of its range, or a cache without a
      finite bound or beside `fetch_every`.

  Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NIPS 2013. Dai et al., "High-performance distributed ML
    at scale through parameter server consistency models", AAAI 2015,
    arXiv:1410.8043.

  Example:
    Worker 0 ends its second job at 2 and waits until 3, when worker 1, which
    takes 3 times as long, has ended its first.

    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 3])
    >>> trace = orders.stale_synchronous(clock, workers=2, messages=4, bound=1)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,receive
    1.0,0,1,2,send
    2.0,0,1,2,receive
    3.0,1,0,1,receive
    3.0,0,2,3,send
    3.0,1,1,4,send
    4.0,0,2,3,receive
    >>> orders.staleness(trace).tolist()
    [0, 0, 2, 0]
  """
  rules = protocol.Rules(
    bound=bound,
    cache=cache,
    depth=depth,
    fetch_every=fetch_every,
    warm_start=warm_start,
  )
  return played(rules, durations, workers, messages)


def asynchronous(
  durations: Durations,
  *,
  workers: int,
  messages: int,
  depth: int = 1,
  fetch_every: int = 1,
  warm_start: int = 0,
) -> base.Trace:
  """Every worker starts again as soon as its message is received.

  It is `stale_synchronous` with an infinite bound.

  Args:
    durations: how long each job of the N workers takes.
    workers: N.
    messages: RECEIVE rows. Up to N depth - 1 tickets are open at the end.
    depth: tickets that a worker may hold; 2 fetches while it computes.
    fetch_every: jobs done on one ticket (Downpour's n_fetch).
    warm_start: messages that are of one worker alone, which holds one ticket,
      before all of them start on the parameters of that moment.

  Returns:
    A Trace, its times in the unit of the durations.

  Raises:
    ValueError: for a count out of its range.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012, where
    workers do not wait for each other, and a warm start "almost eliminates"
    stability trouble.

  Example:
    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 1.5])
    >>> trace = orders.asynchronous(clock, workers=2, messages=3)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,receive
    1.0,0,1,2,send
    1.5,1,0,1,receive
    1.5,1,1,3,send
    2.0,0,1,2,receive
    >>> orders.staleness(trace).tolist()
    [0, 1, 1]
  """
  rules = protocol.Rules(
    depth=depth, fetch_every=fetch_every, warm_start=warm_start
  )
  return played(rules, durations, workers, messages)


def backup_workers(
  durations: Durations, *, workers: int, messages: int, backup: int
) -> base.Trace:
  """Synchronous rounds of the fastest messages, with backup workers.

    a round is N - b messages; what comes after its round is dropped

  Use it with `make_server(..., every=workers - backup, gate=max_staleness(0))`,
  which drops it. The messages of a round are received together, when it is
  complete, in the order of their jobs.

  Args:
    durations: how long each job of the N workers takes.
    workers: N.
    messages: RECEIVE rows, and those that are received together with the last.
    backup: b, from 0 to N - 1.

  Returns:
    A Trace, its times in the unit of the durations.

  Raises:
    ValueError: for a count out of its range.

  Source:
    Chen et al., "Revisiting distributed synchronous SGD", 2016,
    arXiv:1604.00981. It is the K-sync SGD of Dutta et al., "Slow and stale
    gradients can win the race", AISTATS 2018, arXiv:1803.01113.

  Example:
    The workers take 1, 2 and 4. At 2, the two fast ones complete the first
    round; at 4, the second. The slow one's message comes then, a round late.

    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 2, 4])
    >>> trace = orders.backup_workers(clock, workers=3, messages=5, backup=1)
    >>> for row in orders.trace.events(trace):
    ...   if row.action == 1:  # base.RECEIVE
    ...     print(row.time, row.worker)
    2.0 0
    2.0 1
    4.0 2
    4.0 0
    4.0 1
  """
  rules = _backup_rules(workers, backup)
  return played(rules, durations, workers, messages)


def _backup_rules(workers, backup) -> protocol.Rules:
  checks.whole("workers", workers)
  if checks.whole("backup", backup, 0) >= workers:
    most = f"at most {workers - 1}, of {workers} workers"
    raise ValueError(f"backup must be {most}, not {backup!r}")
  return protocol.Rules(round=workers - backup, backup=backup)


def bulk_synchronous(
  durations: Durations, *, workers: int, messages: int
) -> base.Trace:
  """All workers start a round together, when all have ended the one before.

  Use it with `make_server(..., every=workers)`.

  Args:
    durations: how long each job of the N workers takes.
    workers: N.
    messages: RECEIVE rows, N for each round.

  Returns:
    A Trace, its times in the unit of the durations.

  Raises:
    ValueError: for a count out of its range, or a round that is not whole.

  Source:
    none of its own: synchronous SGD. The name is of Valiant, "A bridging model
    for parallel computation", 1990.

  Example:
    A round takes as long as its slowest worker.

    >>> from asgd import base, orders
    >>> clock = orders.durations.constant(slowdown=[1, 1.5])
    >>> trace = orders.bulk_synchronous(clock, workers=2, messages=4)
    >>> trace.time[trace.action == base.RECEIVE].tolist()
    [1.0, 1.5, 2.5, 3.0]
    >>> orders.staleness(trace, every=2).tolist()
    [0, 0, 0, 0]
  """
  checks.whole("workers", workers)
  checks.whole("messages", messages)
  checks.multiple(messages, "messages", workers, "rounds of {} workers")
  return stale_synchronous(
    durations, workers=workers, messages=messages, bound=0
  )


def fixed_delay(*, delay: int, messages: int) -> base.Trace:
  """Every message has the same staleness, after the first ones (0, 1, 2, ...).

    w_{t+1} = w_t - eta g(w_{t-tau}),   w_t = w_0 for t < 0

  It is the round robin of tau + 1 workers, each taking as long as the others.

  Args:
    delay: tau, 0 or more, in updates.
    messages: RECEIVE rows.

  Returns:
    A Trace, with one message in each unit of time.

  Raises:
    ValueError: for a count out of its range.

  Source:
    Yang et al., "PipeMare: asynchronous pipeline parallel DNN training", 2021,
    arXiv:1910.05124, whose lemma says where it is stable on lambda w^2 / 2: at
    eta lambda < 2 sin(pi / (4 tau + 2)).

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=2, messages=5)
    >>> orders.staleness(trace).tolist()
    [0, 1, 2, 2, 2]
    >>> trace.worker[:3].tolist(), trace.time[-1].item()
    ([0, 1, 2], 5.0)
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
  "backup_tasks": backup_tasks,
  "backup_workers": backup_workers,
  "bulk_synchronous": bulk_synchronous,
  "stale_synchronous": stale_synchronous,
  "fixed_delay": fixed_delay,
}


NAMES = tuple(_PROTOCOLS)  # that `build` knows


def build(
  name: str, durations: Durations, *, workers: int, messages: int, **kwargs
) -> base.Trace:
  """Builds a trace by the name of its protocol.

  Args:
    name: "asynchronous", "backup_tasks", "backup_workers",
      "bulk_synchronous", "stale_synchronous" or "fixed_delay".
    durations: how long each job of the N workers takes; a fixed delay needs
      none.
    workers: N; the fixed delay is N - 1.
    messages: RECEIVE rows.
    **kwargs: options of the maker.

  Returns:
    A Trace.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, and
      for what the maker raises it for.

  Source:
    none: it calls one of the others.

  Example:
    >>> from asgd import orders
    >>> clock = orders.durations.constant()
    >>> trace = orders.build("fixed_delay", clock, workers=3, messages=4)
    >>> orders.staleness(trace).tolist()
    [0, 1, 2, 2]
  """
  maker = names.lookup("order", name, _PROTOCOLS)
  checks.whole("workers", workers)
  common = {"durations": durations, "workers": workers}
  if maker is fixed_delay:
    common = {"delay": workers - 1}
  kwargs = {"messages": messages, **common, **kwargs}
  return names.call("order", name, maker, kwargs)


def _asynchronous_rules(workers, *, depth=1, fetch_every=1, warm_start=0):
  del workers
  return protocol.Rules(
    depth=depth, fetch_every=fetch_every, warm_start=warm_start
  )


def _stale_rules(
  workers, *, bound, cache=False, depth=1, fetch_every=1, warm_start=0
):
  del workers
  return protocol.Rules(
    bound=bound,
    cache=cache,
    depth=depth,
    fetch_every=fetch_every,
    warm_start=warm_start,
  )


def _backup_task_rules(workers, *, late):
  return protocol.Rules(round=workers, late=late)


def _bulk_rules(workers):
  del workers
  return protocol.Rules(bound=0)


_RULES = {
  "asynchronous": _asynchronous_rules,
  "backup_tasks": _backup_task_rules,
  "backup_workers": _backup_rules,
  "bulk_synchronous": _bulk_rules,
  "stale_synchronous": _stale_rules,
}


def start(
  name: str,
  durations: Durations,
  *,
  workers: int,
  network: Network | None = None,
  sizes: Sizes | None = None,
  **kwargs,
) -> Play:
  """Starts the order of a protocol over a network, to be made event by event.

  With a network that takes no time its rows are those of `build`.

  Args:
    name: "asynchronous", "backup_tasks", "backup_workers",
      "bulk_synchronous" or "stale_synchronous".
    durations: how long each job of the N workers takes.
    workers: N.
    network: what messages pass, in the unit of the durations.
    sizes: of messages and tickets, in bytes.
    **kwargs: options of the maker.

  Returns:
    A Play; `until` makes its rows, `trace` returns them, and `links.use` says
    what the network bore.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one, or a
      network or an option out of range. A fixed delay takes no time of its own,
      and is refused.

  Source:
    none: it plays the protocols of the other makers.

  Example:
    Two workers compute for 1. Their messages of 8 bytes meet at a port that
    takes 4 bytes a unit of time: the second is received 2 later.

    >>> from asgd import orders
    >>> from asgd.orders import network, play
    >>> order = orders.start(
    ...   "asynchronous",
    ...   orders.durations.constant(),
    ...   workers=2,
    ...   network=network.Network(port=4.0),
    ...   sizes=play.fixed([8.0], [0.0]),
    ... )
    >>> order.until(2)
    >>> [row.time for row in order.rows if row.action == 1]  # base.RECEIVE
    [3.0, 5.0]
    >>> order.links.use(order.now)
    LinkUse(utilisation=0.8, service=0.0, waited=1.0)
  """
  if name == "fixed_delay":
    raise ValueError(
      "name 'fixed_delay' is an order without times, which a network cannot"
      " delay; use asynchronous, or leave the network out"
    )
  maker = names.lookup("order", name, _RULES)
  checks.whole("workers", workers)
  rules = names.call("order", name, maker, {"workers": workers, **kwargs})
  return begin(rules, durations, workers, network=network, sizes=sizes)
