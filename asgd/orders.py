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

from asgd import base, names
from asgd.durations import Durations

_ACTIONS = {base.SEND: "send", base.RECEIVE: "receive"}
HEADER = "time,worker,job,action"


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


def stale_synchronous(
  durations: Durations, *, workers: int, messages: int, bound: float
) -> base.Trace:
  """Stale synchronous parallel (Ho et al. 2013).

  A worker that has finished c batches may start another while the slowest has
  finished at least c - bound. Bound 0 is bulk synchronous, an infinite bound
  is asynchronous.

  Args:
    durations: how long each batch takes.
    workers: N; all send at time 0, in the order of their numbers.
    messages: RECEIVE rows to produce.
    bound: how many batches a worker may be ahead of the slowest.

  Returns:
    A Trace that ends with the last RECEIVE; its N - 1 or fewer open tickets
    are never received.

  Raises:
    ValueError: for counts that are not positive, or a negative bound.
  """
  _check_positive("workers", workers)
  _check_positive("messages", messages)
  if isinstance(bound, (str, bool)) or bound is None or not bound >= 0:
    raise ValueError(f"bound must be a number, 0 or more, not {bound!r}")
  streams = [durations.stream(worker) for worker in range(workers)]
  finished = [0] * workers  # batches, per worker
  waiting = set(range(workers))  # may not start, or not yet asked
  running = []  # heap of (finish time, job, worker); ties go by job
  rows = []
  job = received = 0
  now = 0.0
  while received < messages:
    slowest = min(finished)
    for worker in sorted(waiting):
      if finished[worker] - slowest <= bound:
        waiting.discard(worker)
        rows.append((now, worker, job, base.SEND))
        finish = now + next(streams[worker])
        heapq.heappush(running, (finish, job, worker))
        job += 1
    now, done, worker = heapq.heappop(running)
    rows.append((now, worker, done, base.RECEIVE))
    finished[worker] += 1
    waiting.add(worker)
    received += 1
  return _trace(rows)


def asynchronous(
  durations: Durations, *, workers: int, messages: int
) -> base.Trace:
  """Every worker starts again as soon as its message is received."""
  return stale_synchronous(
    durations, workers=workers, messages=messages, bound=math.inf
  )


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


def check(trace: base.Trace) -> int:
  """Checks that a trace can be obeyed and returns its number of workers.

  Raises:
    ValueError: naming the first row that is wrong, and why.
  """
  open_jobs = {}
  last = -math.inf
  for row, (time, worker, job, action) in enumerate(zip(*trace, strict=True)):
    where = f"trace row {row} ({_line(time, worker, job, action)})"
    if worker < 0 or job < 0:
      raise ValueError(f"{where}: worker and job must be 0 or more")
    if not time >= last:
      raise ValueError(f"{where}: time goes back from {last}")
    last = time
    if action == base.SEND:
      if worker in open_jobs:
        raise ValueError(f"{where}: the worker holds a ticket already")
      open_jobs[worker] = job
    elif action == base.RECEIVE:
      if open_jobs.pop(worker, None) != job:
        raise ValueError(f"{where}: that job was not sent to the worker")
    else:
      raise ValueError(f"{where}: action must be send or receive")
  return int(trace.worker.max(initial=-1)) + 1


def staleness(trace: base.Trace, every: int = 1) -> np.ndarray:
  """Counts the staleness of each received message, int32[U], without a model.

  Args:
    trace: an order.
    every: messages averaged into one parameter change.
  """
  version = {}
  counts = []
  for worker, action in zip(
    trace.worker.tolist(), trace.action.tolist(), strict=True
  ):
    changes = len(counts) // every
    if action == base.SEND:
      version[worker] = changes
    else:
      counts.append(changes - version[worker])
  return np.array(counts, np.int32)


def _line(time, worker, job, action) -> str:
  name = _ACTIONS.get(int(action), int(action))
  return f"{float(time)!r},{worker},{job},{name}"


def dump(trace: base.Trace) -> str:
  """Returns the trace as CSV, one line a row; times keep all their bits."""
  rows = zip(*trace, strict=True)
  return "\n".join([HEADER, *(_line(*row) for row in rows), ""])


def load(lines: Iterable[str]) -> base.Trace:
  """Reads what `dump` wrote.

  A last line without its newline was cut off while being written: it is
  dropped, and what comes before it is the trace.

  Args:
    lines: a text file or `text.splitlines(keepends=True)`.

  Raises:
    ValueError: naming the line that cannot be read.
  """
  codes = {name: code for code, name in _ACTIONS.items()}
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
