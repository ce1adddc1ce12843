"""Orders that a user gives: workers in their order, rows, or a function.

  given                                  read as
  [0, 1, 0, 2]                           the worker of each received message
  base.Trace, or rows of five values     the rows, until enough are received
  a function                             it returns one of these, or Rules

A function gets its options, and those of `durations`, `workers` and `messages`
that are among its parameters. A function that takes neither durations nor
messages, and returns `protocol.Rules`, is a protocol: live workers can follow
it, too.
"""

import inspect
import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from asgd import base, checks, names
from asgd.orders import play, protocol
from asgd.orders.checking import check
from asgd.orders.durations import Durations
from asgd.orders.trace import Event, from_events

FORMS = (
  "a sequence of workers, rows of a trace, or a function of durations, workers"
  " and messages"
)
_N_FIELDS = 5  # number of values in a row of a trace


def rows_in_turn(workers: int, order: Iterable[int]) -> Iterator[Event]:
  """Yields the rows of an order in which the server receives one message in
  each unit of time, and sends its worker the next ticket at once. All workers
  start at time 0.

  Args:
    workers: N.
    order: the worker of each message.

  Raises:
    ValueError: for a value that is not a worker from 0 to N - 1.

  Example:
    >>> from asgd.orders import own
    >>> trace = own.read([0, 0, 1], workers=2)
    >>> trace.time.tolist(), trace.worker.tolist()
    ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0], [0, 1, 0, 0, 0, 0, 1])
  """
  seqs, jobs = [0] * workers, list(range(workers))
  for worker in range(workers):
    yield Event(0.0, worker, 0, worker, base.SEND)
  for count, worker in enumerate(order, 1):
    worker = checks.integer("a worker of the order", worker, 0, workers - 1)
    time = float(count)
    yield Event(time, worker, seqs[worker], jobs[worker], base.RECEIVE)
    # The first N jobs are sent at the start, so this is job N + count - 1.
    seqs[worker], jobs[worker] = seqs[worker] + 1, workers + count - 1
    yield Event(time, worker, seqs[worker], jobs[worker], base.SEND)


def read(
  source: Any, *, workers: int, messages: int | None = None
) -> base.Trace:
  """Reads an order in any form of the module's table but a function.

  Args:
    source: a Trace, rows, or workers. Rows or workers may have no end.
    workers: N; the rows may have workers from 0 to N - 1.
    messages: number of RECEIVE rows after which the trace ends; None: all.

  Returns:
    A Trace that ends with its last RECEIVE row.

  Raises:
    ValueError: if `source` has another form, fewer messages, an unknown worker,
      or a row that protocols forbid (`TraceError`, which names the row).
  """
  if isinstance(source, base.Trace):
    trace = _truncate(source, messages)
  elif isinstance(source, str | Mapping) or not isinstance(source, Iterable):
    raise ValueError(f"an order must be {FORMS}, not {checks.shown(source)}")
  else:
    trace = from_events(_rows(source, workers, messages))
    trace = _truncate(trace, None)  # no ticket is sent after the last message
  n_received = int((trace.action == base.RECEIVE).sum())
  if not n_received or n_received < (messages or 0):
    raise ValueError(
      f"the order ends after {n_received} messages, and {messages or 'some'}"
      " are to be received: give a longer one, or fewer messages"
    )
  if (trace.action == base.ROLLBACK).any():
    raise ValueError(
      "the order has ROLLBACK rows, as a live run writes them when messages are"
      " lost: recompute that run with asgd.replay, or give another order"
    )
  trace_workers = check(trace, depth=len(trace.time))
  if trace_workers > workers:
    raise ValueError(
      f"the order is of {trace_workers} workers, and the run has {workers}: use"
      f" workers={trace_workers}, or another order"
    )
  return trace


def _truncate(trace: base.Trace, messages: int | None) -> base.Trace:
  """Returns the rows until RECEIVE row number `messages`, or the last one."""
  receive_rows = np.flatnonzero(np.asarray(trace.action) == base.RECEIVE)
  count = (
    len(receive_rows) if messages is None else min(messages, len(receive_rows))
  )
  end = int(receive_rows[count - 1]) + 1 if count else 0
  # Rows after the last message stay if no ticket is sent in them: peers mix
  # their parameters there.
  if messages is None or count == len(receive_rows):
    actions = np.asarray(trace.action[end:])
    is_start = np.isin(actions, (base.SEND, base.KEEP))
    end += len(actions) if len(actions) and not is_start.any() else 0
  columns: list[Any] = [column[:end] for column in trace]
  return base.Trace(*columns)


def _rows(
  source: Iterable[Any], workers: int, messages: int | None
) -> Iterator[Event]:
  """Yields rows until `messages` are received; `source` has rows or workers."""
  items = iter(source)
  # The first item decides whether all are workers or rows.
  first_item = next(items, None)
  if first_item is None:
    return
  items = itertools.chain([first_item], items)
  rows: Iterator[Event] = map(_row, items)
  if isinstance(first_item, numbers.Integral):
    rows = rows_in_turn(workers, items)
  n_received = 0
  for row in rows:
    yield row
    n_received += row.action == base.RECEIVE
    if n_received == messages:
      return


def _row(value: Any) -> Event:
  """Returns a row that a user gives as an Event or a sequence of its values."""
  try:
    time, worker, seq, job, action = tuple(value)[:_N_FIELDS]
    if isinstance(action, str):
      action = base.ACTIONS.index(action)
    return Event(float(time), int(worker), int(seq), int(job), int(action))
  except (TypeError, ValueError):
    raise ValueError(
      "a row of an order must be (time, worker, seq, job, action), as (1.0, 0,"
      f" 0, 0, 'receive'), or a worker, not {checks.shown(value)}"
    ) from None


def call_maker(
  maker: Callable[..., Any], name: str, options: Mapping[str, Any],
  **common: Any,
) -> Any:
  """Returns the result of a user's function. It gets the options, and those of
  the `common` arguments that it takes. Raises the errors of `names.call`."""
  parameters = inspect.signature(maker).parameters.values()
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
  parameter_names = {p.name for p in parameters}
  taken_arguments = {
    k: v for k, v in common.items() if takes_any or k in parameter_names
  }
  with checks.user_code(f"the order {name} fails", passes=(ValueError,)):
    return names.call("order", name, maker, {**taken_arguments, **options})


def is_protocol(maker: Callable[..., Any]) -> bool:
  """Whether a function may be a protocol for live workers: it takes neither
  durations nor messages."""
  parameters = inspect.signature(maker).parameters
  return "durations" not in parameters and "messages" not in parameters


def make(
  maker: Callable[..., Any], name: str, durations: Durations, *,
  workers: int, messages: int, **options: Any,
) -> base.Trace:
  """Returns the trace of an order that a user's function returns.

  Args:
    maker: the function; see the module.
    name: the function's name, for errors.
    durations, workers, messages: as in `makers.build`.
    **options: the function's own arguments.

  Raises:
    ValueError: if the result has another form; also the errors of `read`.

  Example:
    >>> import itertools
    >>> from asgd import orders
    >>> def in_turn(workers):
    ...   return itertools.cycle(range(workers))
    >>> clock = orders.durations.constant()
    >>> counts = {"workers": 2, "messages": 3}
    >>> trace = orders.own.make(in_turn, "in_turn", clock, **counts)
    >>> orders.staleness(trace).tolist()
    [0, 1, 1]
  """
  common = {"durations": durations, "workers": workers, "messages": messages}
  result = call_maker(maker, name, options, **common)
  if isinstance(result, protocol.Rules):
    return play.play_rules(result, durations, workers, messages)
  try:
    return read(result, workers=workers, messages=messages)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error
