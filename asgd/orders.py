"""Orders: who sends and receives when, as data.

Who may start when is all that distinguishes asynchronous from bulk or stale
synchronous training. Each maker plays durations through one such protocol and
returns a Trace; no model is involved, so a trace can be printed, checked,
stored, and obeyed by any runtime. Here is an asynchronous one, worker 1 being
the slower:

  time    worker  job  action
  0       0       0    send       two tickets of version 0
  0       1       1    send
  1       0       0    receive    staleness 0 -> version 1
  1       0       2    send
  1.5     1       1    receive    staleness 1 -> version 2
  1.5     1       3    send
  2       0       2    receive    staleness 1 -> version 3

A job is a piece of data. Jobs are numbered in the order of the sends, so every
arrival consumes the next batch and an epoch is one pass in total over all
workers, whatever their number.
"""

import heapq
import math
from collections.abc import Iterable

import numpy as np

from asgd import base, dispatch, names
from asgd.durations import Durations

HEADER = "time,worker,job,action"
_NAMES = ", ".join(base.ACTIONS)


def _trace(rows: list[tuple[float, int, int, int]]) -> base.Trace:
  time, worker, job, action = zip(*rows, strict=True)
  return base.Trace(
    np.array(time, np.float64),
    np.array(worker, np.int32),
    np.array(job, np.int32),
    np.array(action, np.int8),
  )


def _check_positive(name: str, value: int) -> None:
  integral = isinstance(value, (int, np.integer))
  if isinstance(value, bool) or not integral or value < 1:
    raise ValueError(f"{name} must be a positive whole number, not {value!r}")


def _play(
  rules: dispatch.Rules, durations: Durations, workers: int, messages: int
) -> base.Trace:
  """Drives a protocol with durations, until so many messages are received."""
  _check_positive("workers", workers)
  _check_positive("messages", messages)
  streams = [durations.stream(worker) for worker in range(workers)]
  free = [0.0] * workers  # when each worker has done all it was given
  running = []  # heap of (finish time, job, worker, seq); ties go by job
  rows = []
  dispatcher = dispatch.Dispatcher(rules, log=rows.append)
  for worker in range(workers):
    dispatcher.join(worker, 0.0)
  rows.clear()  # who is there from the start need not join
  now = 0.0
  while dispatcher.received < messages:
    for grant in dispatcher.grants(now):
      worker = grant.worker
      free[worker] = max(now, free[worker]) + next(streams[worker])
      heapq.heappush(running, (free[worker], grant.job, worker, grant.seq))
    now, _, worker, seq = heapq.heappop(running)
    dispatcher.arrive(worker, seq)
    dispatcher.deliver(now)
  return _trace(rows)


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
  is asynchronous.

  Args:
    durations: how long each job takes.
    workers: N; all send at time 0, in the order of their numbers.
    messages: RECEIVE rows to produce.
    bound: how many jobs a worker may be ahead of the slowest.
    cache: a worker reads its own copy of the parameters while that is fresh
      enough for the bound, as the paper's clients do; otherwise it fetches
      before each job (the freshest parameters, as eager SSP, Dai et al. 2015).
    depth: tickets that a worker may hold; 2 fetches while it computes.
    fetch_every: jobs done on one ticket (Downpour's n_fetch).

  Returns:
    A Trace that ends with the last RECEIVE; its N depth - 1 or fewer open
    tickets are never received.

  Raises:
    ValueError: for counts that are not positive, or a negative bound.
  """
  rules = dispatch.Rules(
    bound=bound, cache=cache, depth=depth, fetch_every=fetch_every
  )
  return _play(rules, durations, workers, messages)


def asynchronous(
  durations: Durations,
  *,
  workers: int,
  messages: int,
  depth: int = 1,
  fetch_every: int = 1,
) -> base.Trace:
  """Every worker starts again as soon as its message is received."""
  rules = dispatch.Rules(depth=depth, fetch_every=fetch_every)
  return _play(rules, durations, workers, messages)


def backup_workers(
  durations: Durations, *, workers: int, messages: int, backup: int
) -> base.Trace:
  """Synchronous rounds of N - backup messages, the fastest of N (Chen et al.
  2016; K-sync of Dutta et al. 2018).

  Use it with `make_server(..., every=workers - backup, gate=max_staleness(0))`,
  which drops what comes after its round. The messages of a round are received
  together, when it is complete, in the order of their jobs.

  Raises:
    ValueError: if nobody is left to wait for.
  """
  _check_positive("workers", workers)
  integral = isinstance(backup, (int, np.integer))
  if isinstance(backup, bool) or not integral or not 0 <= backup < workers:
    raise ValueError(
      f"backup must be a whole number from 0 to {workers - 1}, of {workers}"
      f" workers, not {backup!r}"
    )
  rules = dispatch.Rules(round=workers - int(backup), backup=int(backup))
  return _play(rules, durations, workers, messages)


def bulk_synchronous(
  durations: Durations, *, workers: int, messages: int
) -> base.Trace:
  """All workers start a round together, when all have ended the one before.

  Use it with `make_server(..., every=workers)`.

  Raises:
    ValueError: if `messages` is not a whole number of rounds.
  """
  _check_positive("workers", workers)
  _check_positive("messages", messages)
  if messages % workers:
    below = messages - messages % workers
    remedy = f"{below} or {below + workers}" if below else str(workers)
    raise ValueError(
      f"{messages} messages are not a whole number of rounds of {workers}"
      f" workers; use {remedy}"
    )
  return stale_synchronous(
    durations, workers=workers, messages=messages, bound=0
  )


def fixed_delay(*, delay: int, messages: int) -> base.Trace:
  """Every message has staleness `delay`, after the first ones (0, 1, 2, ...).

  w_{t+1} = w_t - eta g(w_{t-delay}), with w_t = w_0 for t < 0: the round robin
  of delay + 1 workers, each taking as long as the others.
  """
  integral = isinstance(delay, (int, np.integer))
  if isinstance(delay, bool) or not integral or delay < 0:
    raise ValueError(f"delay must be a whole number from 0, not {delay!r}")
  _check_positive("messages", messages)
  workers = delay + 1
  rows = [(0.0, worker, worker, base.SEND) for worker in range(workers)]
  for job in range(messages):
    time = float(job + 1)
    rows.append((time, job % workers, job, base.RECEIVE))
    if job + 1 < messages:
      rows.append((time, job % workers, job + workers, base.SEND))
  return _trace(rows)


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
  """Builds a trace by the name of its protocol.

  Fixed delay takes its delay from the number of workers: workers - 1.

  Raises:
    ValueError: for an unknown name or argument, naming the nearest known one.
  """
  maker = names.lookup("order", name, _PROTOCOLS)
  _check_positive("workers", workers)
  if maker is fixed_delay:
    common = {"delay": workers - 1, "messages": messages}
  else:
    common = {"durations": durations, "workers": workers, "messages": messages}
  return names.call("order", name, maker, {**common, **kwargs})


def check(trace: base.Trace, depth: int = 1) -> int:
  """Checks that a trace can be obeyed and returns its number of workers.

  Args:
    trace: an order.
    depth: tickets that a worker may hold at once; more than one where workers
      fetch while they compute.

  Raises:
    ValueError: naming the first row that is wrong, and why.
  """
  held = {}  # worker -> its open jobs, in their order
  sent = set()  # workers that hold a ticket to keep
  ended = set()  # workers that lost a ticket, or left, and must join first
  last = -math.inf
  for row, (time, worker, job, action) in enumerate(zip(*trace, strict=True)):
    where = f"trace row {row} ({format_row(time, worker, job, action)})"
    if worker < 0 or job < 0:
      raise ValueError(f"{where}: worker and job must be 0 or more")
    if not time >= last:
      raise ValueError(f"{where}: time goes back from {last}")
    last = time
    jobs = held.setdefault(worker, [])
    if action in (base.SEND, base.KEEP):
      if worker in ended:
        raise ValueError(f"{where}: the worker is gone and did not join again")
      if len(jobs) >= depth:
        raise ValueError(f"{where}: the worker holds a ticket already")
      if action == base.KEEP and worker not in sent:
        raise ValueError(f"{where}: the worker was sent no ticket to keep")
      jobs.append(job)
      sent.add(worker)
    elif action in (base.RECEIVE, base.LOST, base.REJECT):
      if job not in jobs:
        raise ValueError(f"{where}: that job was not sent to the worker")
      if action == base.RECEIVE and (job != jobs[0] or worker in ended):
        raise ValueError(f"{where}: the worker's jobs end in their order")
      jobs.remove(job)
      if action != base.RECEIVE:
        ended.add(worker)
    elif action in (base.JOIN, base.LEAVE):
      if jobs:
        raise ValueError(f"{where}: the worker still holds a ticket")
      sent.discard(worker)
      if action == base.JOIN:
        ended.discard(worker)
      else:
        ended.add(worker)
    elif action == base.ROLLBACK:
      if job > row:
        raise ValueError(f"{where}: that row is still to come")
    else:
      raise ValueError(f"{where}: action must be one of {_NAMES}")
  return int(trace.worker.max(initial=-1)) + 1


def staleness(trace: base.Trace, every: int = 1) -> np.ndarray:
  """Counts the staleness of each received message, int32[U], without a model.

  Args:
    trace: an order without rollbacks, all of whose messages are accepted.
    every: messages averaged into one parameter change.
  """
  version = {}  # (worker, job) -> version it was sent
  latest = {}  # worker -> version it was sent last
  counts = []
  for worker, job, action in zip(
    *(column.tolist() for column in trace[1:]), strict=True
  ):
    changes = len(counts) // every
    if action == base.SEND:
      version[worker, job] = latest[worker] = changes
    elif action == base.KEEP:
      version[worker, job] = latest[worker]
    elif action == base.RECEIVE:
      counts.append(changes - version.pop((worker, job)))
  return np.array(counts, np.int32)


def format_row(time, worker, job, action) -> str:
  """One row as a line of the file, without its newline."""
  known = 0 <= action < len(base.ACTIONS)
  name = base.ACTIONS[action] if known else int(action)
  return f"{float(time)!r},{worker},{job},{name}"


def dump(trace: base.Trace) -> str:
  """Returns the trace as CSV, one line a row; times keep all their bits."""
  rows = zip(*trace, strict=True)
  return "\n".join([HEADER, *(format_row(*row) for row in rows), ""])


def load(lines: Iterable[str]) -> base.Trace:
  """Reads what `dump` wrote.

  A last line without its newline was cut off while being written: it is
  dropped, and what comes before it is the trace.

  Args:
    lines: a text file or `text.splitlines(keepends=True)`.

  Raises:
    ValueError: naming the line that cannot be read.
  """
  codes = {name: code for code, name in enumerate(base.ACTIONS)}
  rows = []
  for number, line in enumerate(lines, 1):
    if not line.endswith("\n"):
      break
    if number == 1:
      if line.strip() != HEADER:
        raise ValueError(f"line 1 is {line.strip()!r}; a trace has {HEADER!r}")
      continue
    try:
      time, worker, job, action = line.strip().split(",")
      row = (
        float(time),
        np.int32(int(worker)),
        np.int32(int(job)),
        codes[action],
      )
    except (ValueError, KeyError, OverflowError) as error:
      raise ValueError(f"line {number} is no event: {line!r}") from error
    rows.append(row)
  if not rows:
    raise ValueError("the trace holds no event")
  return _trace(rows)
