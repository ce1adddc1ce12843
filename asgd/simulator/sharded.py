"""The engine for a server in shards: obeys one trace a shard.

Each shard obeys the trace that it wrote. What ties the shards together is the
work: a job starts when all of them have sent their part of the ticket, and none
can receive its part of the message before that.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, compression, sharding
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event
from asgd.simulator import steps as steps_lib
from asgd.simulator.records import fetch
from asgd.simulator.stepwise import ServerReplay, needs_of

_Key = tuple[int, int]  # (worker, seq), which names a message


class ShardedRun(NamedTuple):
  """What a run came to."""

  states: tuple[base.ServerState, ...]  # S
  records: tuple[base.Records, ...]  # S


class _Shard(ServerReplay):
  """One shard, its trace and how far it is."""

  def __init__(self, state, steps, trace, numbers):
    super().__init__(state, steps, numbers, **needs_of(trace))
    self.events = list(trace_lib.events(trace))
    # Until the job has ended at all shards: a worker that the lead took for
    # dead may yet have handed in its part elsewhere.
    self.tickets: dict[_Key, base.Ticket] = {}

  @property
  def next(self) -> Event | None:
    """The row that is to be obeyed next, None after the last."""
    row = self.ledger.rows
    return self.events[row] if row < len(self.events) else None


class _Run:
  """All shards, and the workers between them."""

  def __init__(self, worker, params, plan, shards, work):
    self._worker, self._params, self._plan = worker, params, plan
    self._work = work  # (state, ticket, worker, job) -> as Worker.work
    self._shards: list[_Shard] = shards
    self._states: dict[_Key, Any] = {}  # (worker, holder) -> worker state
    self._holder: dict[_Key, int] = {}  # of each message
    self._messages: dict[_Key, tuple] = {}  # S parts, and the loss
    self._ends: dict[_Key, int] = {}  # at how many shards a job has ended

  def message(self, key: _Key, job: int) -> tuple | None:
    """Returns a message, computing it if all shards have sent; else None."""
    if key in self._messages:
      return self._messages[key]
    tickets = [shard.tickets.get(key) for shard in self._shards]
    if any(ticket is None for ticket in tickets):
      return None
    ticket = tickets[0]._replace(
      params=sharding.join(self._plan, [ticket.params for ticket in tickets])
    )
    place = key[0], self._holder[key]
    if place not in self._states:
      self._states[place] = self._worker.init(self._params)
    self._states[place], message, metrics = self._work(
      self._states[place], ticket, key[0], job
    )
    message, loss = fetch((message, metrics.loss))
    self._messages[key] = compression.split(self._plan, message), loss
    return self._messages[key]

  def obey(self, index: int, totals: Sequence[Any] | None) -> bool:
    """Obeys a shard's next row; False if it has to wait for other shards."""
    shard = self._shards[index]
    event = shard.next
    if event is None:
      return False
    key, row, message = event.key, shard.ledger.rows, None
    if event.action == base.RECEIVE and key in shard.tickets:
      message = self.message(key, event.job)
      if message is None:
        return False
    ticket = shard.obey(event)
    if message is not None:
      parts, loss = message
      sums = None if totals is None else totals[row]
      shard.receive(event, (ticket, parts[index], loss), sums)
    if event.action in trace_lib.ENDS:
      self._end(key)
    elif event.action in trace_lib.STARTS:
      shard.tickets[key] = ticket
      if index == 0:
        self._holder[key] = shard.ledger.holders.get(event.worker, 0)
    return True

  def _end(self, key):
    self._ends[key] = self._ends.get(key, 0) + 1
    if self._ends[key] == len(self._shards):
      for shard in self._shards:
        shard.tickets.pop(key, None)
      for table in (self._messages, self._ends, self._holder):
        table.pop(key, None)


def run_sharded(
  server: base.Server,
  worker: base.Worker,
  params: Any,
  traces: Sequence[base.Trace],
  *,
  workers: int,
  batch: Callable[[int, int], base.Batch],
  root: jax.Array,
  wire: str | None = None,
  totals: Sequence[Sequence[tuple[float, ...]]] | None = None,
  group: steps_lib.WorkerDevices = steps_lib.ALONE,
  plan: sharding.ShardPlan | None = None,
) -> ShardedRun:
  """Replays a run whose server was in shards.

  Args:
    server: the pure server that each shard runs on its part.
    worker: as in `compile_steps`; so are `wire` and `group`.
    params: before the first message.
    traces: of each shard; S of them, at least two. (worker, seq) names the same
      message in all of them; ValueError is raised if they do not fit.
    workers: N.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
    totals: of each row of each trace, those that its message needed; None where
      the algorithm needs none.
    plan: what each shard holds; None is `sharding.make_plan`. With the stages
      of a pipeline as shards and their traces (`pipeline.analyze.traces`), the
      delays are those of the pipeline.
  """
  plan = sharding.make_plan(params, len(traces)) if plan is None else plan
  steps = steps_lib.compile_steps(
    server, worker, wire=wire, group=group, keeps_messages=True
  )
  numbers = [jnp.int32(w) for w in range(workers)]
  shards = [
    _Shard(steps_lib.start(server, part), steps, trace, numbers)
    for part, trace in zip(sharding.split(plan, params), traces, strict=True)
  ]

  def work(state, ticket, w, job):
    return steps.work(state, ticket, batch(w, job), root, np.int32(job))

  run = _Run(worker, params, plan, shards, work)
  while any(shard.next for shard in shards):
    before = sum(shard.ledger.rows for shard in shards)
    for index in range(len(shards)):
      while run.obey(index, totals and totals[index]):
        pass
    if before == sum(shard.ledger.rows for shard in shards):
      stuck = {i: s.next.format() for i, s in enumerate(shards) if s.next}
      raise ValueError(
        f"the shards' traces do not belong together: no row of {stuck}"
        f" ({trace_lib.HEADER}) can be obeyed"
      )
  return ShardedRun(
    tuple(shard.state for shard in shards),
    tuple(shard.records() for shard in shards),
  )
