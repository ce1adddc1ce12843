"""Makers of orders: a protocol is played with durations.

Asynchronous, bulk synchronous and stale synchronous training differ only in
when a worker may start. Each maker plays durations through one such protocol
and returns a Trace. It needs no model, so a trace can be printed, checked,
stored, and replayed by any engine. `asgd.orders.trace` shows one.

Jobs are numbered in the order of the sends: every arrival consumes the next
batch, and an epoch is one pass in total over all workers. Shared options:

- `durations`: how long each job of the N workers takes; times of the trace have
  their unit;
- `workers`: N;
- `messages`: number of RECEIVE rows; the last one ends the trace. Messages of
  one round are received together (`backup_workers`), so the last round may add
  rows. Up to N depth - 1 tickets are open at the end;
- `depth`: tickets that a worker may hold; with 2 it fetches while it computes.
  The fetched parameters then lack the message that it is computing;
- `fetch_every`: jobs done on one ticket (Downpour's n_fetch);
- `warm_start`: number of messages that worker 0 sends alone, on one ticket at a
  time. Then all workers start on the same parameters, with equal clocks;
- `stages`: pairs (workers, messages), both increasing. Until the number of
  messages is received, only the number of workers start jobs. After the last
  stage all workers start jobs.

Each maker raises ValueError for a value out of its range, and for an incomplete
last round.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asgd import base, checks, names
from asgd.orders import own, protocol
from asgd.orders import stages as stages_lib
from asgd.orders.durations import Durations
from asgd.orders.network import Network
from asgd.orders.play import Play, Sizes, begin, play_rules
from asgd.orders.stops import with_stops
from asgd.orders.trace import Event, from_events


def stale_synchronous(
  durations: Durations, *, workers: int, messages: int, bound: float,
  cache: bool = False, depth: int = 1, fetch_every: int = 1,
  warm_start: int = 0, stages: Sequence[Sequence[int]] = (),
) -> base.Trace:
  """Stale synchronous parallel: no worker is further ahead than a bound.

    a worker that has finished c jobs may start another
    while the slowest has finished at least c - s

  Bound s = 0 is bulk synchronous, an infinite bound is asynchronous. Every
  worker is sent a ticket at time 0.

  Args:
    durations, workers, messages, depth, warm_start, stages: shared options.
    bound: s, by how many jobs a worker may be ahead of the slowest.
    cache: whether a worker reads a cached copy of the parameters, with its own
      writes (`asgd.own_writes`), while the copy is fresh enough for the bound,
      as the paper's clients do. Without a cache it fetches before each job
      (eager SSP, Dai et al. 2015).
    fetch_every: shared option; 1 with a cache. A cache needs a finite bound.

  Returns:
    A Trace.

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
  counts = dict(depth=depth, fetch_every=fetch_every, warm_start=warm_start)
  stage_pairs = stages_lib.read(stages)
  rules = protocol.Rules(bound=bound, cache=cache, stages=stage_pairs, **counts)
  return play_rules(rules, durations, workers, messages)


def asynchronous(
  durations: Durations, *, workers: int, messages: int, depth: int = 1,
  fetch_every: int = 1, warm_start: int = 0,
  stages: Sequence[Sequence[int]] = (),
) -> base.Trace:
  """Every worker starts again as soon as its message is received.

  It is `stale_synchronous` with an infinite bound.

  Args:
    durations, workers, messages, depth, fetch_every, warm_start: shared.
    stages: shared option.

  Returns:
    A Trace.

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
    depth=depth,
    fetch_every=fetch_every,
    warm_start=warm_start,
    stages=stages_lib.read(stages),
  )
  return play_rules(rules, durations, workers, messages)


def backup_workers(
  durations: Durations, *, workers: int, messages: int, backup: int
) -> base.Trace:
  """Synchronous rounds of the fastest messages, with backup workers.

    a round is N - b messages; a message after its round is dropped

  Use it with `make_server(..., every=workers - backup, gate=max_staleness(0))`:
  the gate drops late messages. The messages of a round are received together,
  when it is complete, in the order of their jobs.

  Args:
    durations, workers, messages: shared options.
    backup: b, from 0 to N - 1.

  Returns:
    A Trace.

  Source:
    Chen et al., "Revisiting distributed synchronous SGD", 2016,
    arXiv:1604.00981. It is the K-sync SGD of Dutta et al., "Slow and stale
    gradients can win the race", AISTATS 2018, arXiv:1803.01113.

  Example:
    The workers take 1, 2 and 4. The two fast ones complete the first round at
    2, and the second at 4. The slow worker's message arrives at 4, a round
    late.

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
  return play_rules(rules, durations, workers, messages)


def _backup_rules(workers: int, backup: int) -> protocol.Rules:
  """Returns the rules of `backup_workers`. Raises ValueError."""
  checks.integer("workers", workers)
  if checks.integer("backup", backup, 0) >= workers:
    limit = f"at most {workers - 1}, of {workers} workers"
    raise ValueError(f"backup must be {limit}, not {backup!r}")
  return protocol.Rules(round=workers - backup, backup=backup)


def backup_tasks(
  durations: Durations, *, workers: int, messages: int, late: float
) -> base.Trace:
  """Synchronous rounds in which idle workers repeat late jobs.

    a job is late after f times the median of the other workers' last times

  Use it with `make_server(..., every=workers)`. See `asgd.orders.backups`. The
  messages of a round are received together, when a message of each of its N
  jobs has arrived. They are received in the order of the jobs; two messages of
  one worker keep that worker's order.

  Args:
    durations, workers, messages: shared options; N messages for each round.
    late: f, 1 or more. With an infinite f there are no backup tasks, as in
      `bulk_synchronous`.

  Returns:
    A Trace. Its DROP rows are the second results of repeated jobs.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012 (portions
    of Sandblaster); Dean, Ghemawat, "MapReduce", OSDI 2004. The rule with the
    median is ours.

  Example:
    Workers 0 and 1 take 1, so at time 2 the job of worker 2 is late.

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
  _check_rounds(workers, messages)
  rules = protocol.Rules(round=workers, late=late)
  return play_rules(rules, durations, workers, messages)


def _check_rounds(workers: int, messages: int) -> None:
  checks.integer("workers", workers)
  checks.integer("messages", messages)
  checks.multiple(messages, "messages", workers, "rounds of {} workers")


def bulk_synchronous(
  durations: Durations, *, workers: int, messages: int
) -> base.Trace:
  """All workers start a round together, when all have ended the last round.

  Use it with `make_server(..., every=workers)`.

  Args:
    durations, workers, messages: shared options; N messages for each round.

  Returns:
    A Trace.

  Source:
    none: it is synchronous SGD. The name is from Valiant, "A bridging model
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
  _check_rounds(workers, messages)
  return play_rules(protocol.Rules(bound=0), durations, workers, messages)


def fixed_delay(*, delay: int, messages: int) -> base.Trace:
  """Every message has the same staleness, after the first ones (0, 1, 2, ...).

    w_{t+1} = w_t - eta g(w_{t-tau}),   w_t = w_0 for t < 0

  It is the round robin of tau + 1 workers of equal speed.

  Args:
    delay: tau, 0 or more, in updates.
    messages: RECEIVE rows.

  Returns:
    A Trace, with one message in each unit of time.

  Source:
    Yang et al., "PipeMare: asynchronous pipeline parallel DNN training", 2021,
    arXiv:1910.05124. By its lemma the iteration is stable on lambda w^2 / 2 for
    eta lambda < 2 sin(pi / (4 tau + 2)).

  Example:
    >>> from asgd import orders
    >>> trace = orders.fixed_delay(delay=2, messages=5)
    >>> orders.staleness(trace).tolist()
    [0, 1, 2, 2, 2]
    >>> trace.worker[:3].tolist(), trace.time[-1].item()
    ([0, 1, 2], 5.0)
  """
  workers = checks.integer("delay", delay, 0) + 1
  checks.integer("messages", messages)
  rows = [Event(0.0, worker, 0, worker, base.SEND) for worker in range(workers)]
  for job in range(messages):
    time, (seq, worker) = float(job + 1), divmod(job, workers)
    rows.append(Event(time, worker, seq, job, base.RECEIVE))
    if job + 1 < messages:
      rows.append(Event(time, worker, seq + 1, job + workers, base.SEND))
  return from_events(rows)


_MAKER_FUNCTIONS: list[Callable[..., base.Trace]] = [asynchronous, backup_tasks]
_MAKER_FUNCTIONS += [backup_workers, bulk_synchronous, stale_synchronous]
_MAKER_FUNCTIONS += [fixed_delay, with_stops]
_MAKERS = {maker.__name__: maker for maker in _MAKER_FUNCTIONS}
NAMES = tuple(_MAKERS)  # names that `build` knows


def build(
  name: str, durations: Durations, *, workers: int, messages: int, **kwargs: Any
) -> base.Trace:
  """Builds a trace by the name of its protocol.

  Args:
    name: "asynchronous", "backup_tasks", "backup_workers",
      "bulk_synchronous", "stale_synchronous", "fixed_delay", "with_stops", or
      MODULE:FUNCTION, a user's function (`asgd.orders.own`).
    durations, workers, messages: shared options; the fixed delay is N - 1, and
      needs no durations.
    **kwargs: options of the maker.

  Returns:
    A Trace.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one.

  Source:
    none: it calls one of the other makers.

  Example:
    >>> from asgd import orders
    >>> clock = orders.durations.constant()
    >>> trace = orders.build("fixed_delay", clock, workers=3, messages=4)
    >>> orders.staleness(trace).tolist()
    [0, 1, 2, 2]
  """
  maker = names.resolve("order", name, _MAKERS)
  checks.integer("workers", workers)
  common: dict[str, Any] = {"durations": durations, "workers": workers}
  if names.is_import(name):
    return own.make(maker, name, **common, messages=messages, **kwargs)
  if maker is fixed_delay:
    common = {"delay": workers - 1}
  kwargs = {"messages": messages, **common, **kwargs}
  return names.call("order", name, maker, kwargs)


def _rules(
  name: str, workers: int, options: Mapping[str, Any]
) -> protocol.Rules:
  """Returns the rules that a maker plays."""
  if name == "bulk_synchronous":
    return protocol.Rules(bound=0)
  if name == "backup_workers":
    return _backup_rules(workers, **options)
  count = workers if name == "backup_tasks" else 0
  return protocol.Rules(round=count, **options)


def named(rules: protocol.Rules, workers: int) -> dict[str, Any]:
  """Returns the name and the options of the maker that plays some rules.

  Args:
    rules: the protocol.
    workers: N; with rounds, the messages of a round plus backup workers.

  Returns:
    A dict with `name` and the maker's options: arguments of `build`.

  Raises:
    ValueError: if rules exclude one another, or if rounds need another number
      of workers.

  Source:
    none: it names the protocols of the makers.

  Example:
    >>> from asgd import orders
    >>> orders.makers.named(orders.protocol.Rules(bound=3), workers=4)
    {'name': 'stale_synchronous', 'bound': 3}
  """
  protocol.check_rules(rules)
  if rules.round and rules.round + rules.backup != workers:
    raise ValueError(
      f"rounds of {rules.round} messages with {rules.backup} backup workers"
      f" need {rules.round + rules.backup} workers, and the run has {workers}"
    )
  options = {
    key: value
    for key, value in rules._asdict().items()
    if value != protocol.Rules._field_defaults[key]
  }
  options.pop("round", None)
  if rules.backup:
    return {"name": "backup_workers", **options}
  if rules.late < math.inf:
    return {"name": "backup_tasks", **options}
  if rules.round or options == {"bound": 0}:
    return {"name": "bulk_synchronous"}
  name = "stale_synchronous" if "bound" in options else "asynchronous"
  return {"name": name, **options}


def start(
  name: str, durations: Durations, *, workers: int,
  network: Network | None = None, sizes: Sizes | None = None, **kwargs: Any
) -> Play:
  """Returns a Play of a protocol over a network, which makes rows on demand.

  With a network that takes no time its rows are those of `build`.

  Args:
    name: "asynchronous", "backup_tasks", "backup_workers",
      "bulk_synchronous" or "stale_synchronous".
    durations, workers: shared options.
    network: the links between workers and shards, in the durations' unit.
    sizes: bytes of messages and tickets.
    **kwargs: options of the maker.

  Returns:
    A Play; `until` makes its rows, `trace` returns them, and `links.use`
    returns the use of the network.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one; for a
      fixed delay, an order with stops, and a user's function.

  Source:
    none: it plays the protocols of the other makers.

  Example:
    Two workers compute for 1. Their messages of 8 bytes meet at a port that
    takes 4 bytes per unit of time: the server receives the second message 2
    units later.

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
  if name in ("fixed_delay", "with_stops") or names.is_import(name):
    raise ValueError(
      f"name {name!r} is an order that a network cannot delay; use"
      " asynchronous, or leave the network out"
    )
  maker = names.lookup("order", name, _MAKERS)
  checks.integer("workers", workers)
  argument_names = "durations", "workers", "messages", *kwargs
  names.check_arguments("order", name, maker, argument_names)
  rules = _rules(name, workers, kwargs)
  return begin(rules, durations, workers, network=network, sizes=sizes)
