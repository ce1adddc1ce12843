"""Replays a live run of tables from the traces of its shards and workers.

A live run has no total order of events, as shards and workers are separate
processes, and the replay needs none. Each shard replays the rows of its trace.
Each incarnation of a worker computes its jobs on the rows that it had taken
when the jobs began. A shard waits for the requests of workers, and a worker
waits for the replies and rows of shards.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import base
from asgd.orders.trace import STARTS, Event
from asgd.tables import requests
from asgd.tables.client import RowNotFinite
from asgd.tables.division import Division
from asgd.tables.requests import ClockMessage, JobRecord, Request
from asgd.tables.settings import TableSettings, Work
from asgd.tables.shard import ACTIONS, TableShard
from asgd.tables.worker import TableWorker


class OrdersError(ValueError):
  """The traces of shards and workers cannot be replayed together."""


def _inconsistent(reason: str) -> OrdersError:
  """Returns the error of traces that contradict each other."""
  return OrdersError(f"the orders do not belong together: {reason}")


class Orders(NamedTuple):
  """The traces of a live run."""

  shards: Sequence[Sequence[Event]]  # S, see `tables.shard`
  workers: Sequence[Sequence[Event]]  # N, see `tables.worker`


class Replayed(NamedTuple):
  """The result of a replay."""

  tables: dict[str, np.ndarray]  # complete, [K, ...] by name
  records: list[list[tuple[float, JobRecord]]]  # by worker: (time, record)


def by_incarnation(events: Sequence[Event]) -> list[list[Event]]:
  """Splits a worker's rows by incarnation, and drops the JOIN rows.

  Raises:
    OrdersError: for a row before the first JOIN.
  """
  incarnations: list[list[Event]] = []
  for event in events:
    if event.action == base.JOIN:
      incarnations.append([])
    elif incarnations:
      incarnations[-1].append(event)
    else:
      raise OrdersError(
        f"a worker's rows begin with join, not {event.format()}"
      )
  return incarnations


class _Incarnation:
  """One incarnation of a worker, with its rows of the trace."""

  def __init__(
    self,
    worker: TableWorker,
    events: Sequence[Event],
    earlier: Sequence["_Incarnation"],
  ):
    """`earlier` are the worker's earlier incarnations, in their order."""
    self.worker, self._earlier = worker, earlier
    start_rows = [event for event in events if event.action in STARTS]
    self._start_rows = [event for event in start_rows if event.totals]
    # Jobs of the earlier incarnation's message that this incarnation resends.
    self._resent_jobs = {
      event.job for event in start_rows if not event.totals
    }
    # The last two messages, by the number of jobs done with each.
    self._messages: dict[int, ClockMessage] = {}
    # RECEIVE rows of the jobs that the replay has not finished.
    self.open_receives = [
      event for event in events if event.action == base.RECEIVE
    ]
    # Shard -> the request that has no reply yet.
    self.open_requests: dict[int, Request] = {}
    self.records: list[tuple[float, JobRecord]] = []
    self._steps = worker.join(self._saved_message, on_done=self._record)
    self._run_steps()

  def _saved_message(self, jobs_done: int) -> ClockMessage | None:
    """Returns the earlier message that this incarnation resends, or None if its
    rows have no resent job."""
    if not self._resent_jobs:
      return None
    for incarnation in reversed(self._earlier):
      if message := incarnation._messages.get(jobs_done):
        self._store_message(message)
        records = [
          record
          for record in message.records
          if record.job in self._resent_jobs
        ]
        return message._replace(records=records)
    raise _inconsistent(
      f"incarnation {self.worker.sessions.incarnation} of worker"
      f" {self.worker.worker} resends a message that no incarnation made"
    )

  def _store_message(self, message: ClockMessage) -> None:
    """Stores a message, as the next incarnation may resend it."""
    self._messages[message.done] = message
    # The next incarnation resends the last message that reached a shard. If the
    # last message reached none, it is the message before. So keep two.
    if len(self._messages) > 2:
      del self._messages[min(self._messages)]

  def _run_steps(self) -> None:
    """Runs the worker to its next requests, or to the end of a job."""
    try:
      new_requests = next(self._steps, None)
    except RowNotFinite:  # the live incarnation ended here
      self._steps, self._start_rows = None, []
      return
    if new_requests is None:
      self._steps = None
    else:
      self.open_requests = {
        shard: requests.load_request(data)
        for shard, data in new_requests.items()
      }

  def advance(self, shards: Sequence[TableShard]) -> bool:
    """Does the next step if its inputs exist. Returns whether it did."""
    worker = self.worker
    self.receive_rows(shards)

    # [1] Continue a job once all its requests have replies, and the rows of the
    # replies have arrived.
    if self._steps is not None:
      lacks_rows = map(worker.sessions.lacks_rows, range(len(shards)))
      if self.open_requests or any(lacks_rows):
        return False
      self._run_steps()
      return True
    if not self._start_rows or worker.next_job is None or worker.must_rest:
      return False

    # [2] Start the next job on the rows that its trace row counts.
    event = self._start_rows[0]
    counts = [int(count) for count in event.totals]  # rows taken, by shard
    if any(
      worker.sessions.available(shard) < count
      for shard, count in enumerate(counts)
    ):
      return False
    if event.job != worker.next_job:
      raise OrdersError(
        f"{event.format()} is not the next job of worker {worker.worker}, which"
        f" is {worker.next_job}"
      )
    for shard, count in enumerate(counts):
      worker.take(shard, count)
    self._start_rows.pop(0)

    def check_start(action):
      if action != event.action:
        actual = base.ACTIONS[action]
        raise OrdersError(f"{event.format()}: the replayed job is a {actual}")
      return event.time

    self._steps = worker.job(
      check_start, self._record, on_send=self._store_message
    )
    self._run_steps()
    return True

  def receive_rows(self, shards: Sequence[TableShard]) -> None:
    """Receives the rows that shards have for the incarnation."""
    worker = self.worker
    for index, shard in enumerate(shards):
      if shard.incarnation(worker.worker) == worker.sessions.incarnation:
        rows = shard.rows_from(worker.worker, worker.sessions.taken[index])
        worker.sessions.receive_rows(index, rows)

  @property
  def must_rest(self) -> bool:
    """Whether the worker waits for another division of the tables."""
    return self._steps is None and self.worker.must_rest

  def _record(self, record):
    if self.open_receives:
      event = self.open_receives.pop(0)
      self.records.append((event.time, record))


# (worker, number) -> the incarnation.
_Incarnations = Mapping[tuple[int, int], _Incarnation]


def _deliver_rows(
  shards: Sequence[TableShard],
  shard: TableShard,
  worker: int,
  incarnations: _Incarnations,
) -> None:
  """Delivers a shard's rows to a worker's incarnation before the shard drops
  the incarnation: in the live run it may have begun jobs on these rows."""
  number = shard.incarnation(worker)
  if incarnation := incarnations.get((worker, number)):
    incarnation.receive_rows(shards)


def _replay_row(
  shards: Sequence[TableShard],
  index: int,
  event: Event,
  incarnations: _Incarnations,
) -> bool:
  """Replays the next row of shard `index`. Returns False if no worker has sent
  the row's request yet."""
  shard = shards[index]
  if event.action == base.LEAVE:
    _deliver_rows(shards, shard, event.worker, incarnations)
    shard.leave(event.worker)
    return True
  if event.action == base.MOVE:  # `_move` replays it for all shards at once
    return False
  is_join = event.action == base.JOIN
  number = event.job if is_join else shard.incarnation(event.worker)
  incarnation = incarnations.get((event.worker, number))
  request = incarnation.open_requests.get(index) if incarnation else None
  if request is None or ACTIONS[request.kind] != event.action:
    return False
  # A later request of the worker belongs to a later row.
  if not is_join and request.number != event.seq:
    return False
  if shard.must_wait_for_clock(request):
    raise OrdersError(
      f"{event.format()} answers worker {event.worker} before its consistency"
      " model allows it"
    )
  if is_join:
    _deliver_rows(shards, shard, event.worker, incarnations)
  shard.apply(request)
  del incarnation.open_requests[index]
  incarnation.worker.sessions.receive(index, shard.reply(request))
  return True


def _move(
  shards: Sequence[TableShard],
  rows: Sequence[Event | None],
  incarnations: _Incarnations,
  division: Division,
) -> bool:
  """Moves ranges between shards, if all next rows are the same MOVE row.

  Args:
    shards: the shards of the run.
    rows: the next row of each shard; None where the trace has ended, as a run
      may end before all shards have written their MOVE row.
    incarnations: the incarnations of all workers.
    division: the first division of the run.

  Returns:
    Whether the ranges have moved. They have not if the rows differ, or if a
    worker that has joined does not rest.
  """
  event = next((row for row in rows if row is not None), None)
  if event is None or any(
    row is not None and (row.action, row.totals) != (base.MOVE, event.totals)
    for row in rows
  ):
    return False
  active_incarnations = [
    incarnation
    for (worker, number), incarnation in incarnations.items()
    if number == shards[0].active_incarnation(worker)
  ]
  if event.job != shards[0].version + 1 or not all(
    incarnation.must_rest for incarnation in active_incarnations
  ):
    return False
  cuts = division.cuts_of(event.totals)
  given_parts = [shard.give(cuts) for shard in shards]
  for index, shard in enumerate(shards):
    parts = [given[index] for given in given_parts if index in given]
    data = requests.dump_move(event.job, cuts, parts)
    shard.apply(requests.load_request(data))
  for incarnation in active_incarnations:
    incarnation.receive_rows(shards)
    incarnation.worker.divide(cuts)
  return True


def replay(
  settings: TableSettings,
  tables: Mapping[str, Any],
  division: Division,
  work: Work,
  orders: Orders,
  *,
  jobs: int,
  seed: int = 0,
) -> Replayed:
  """Recomputes the result of a live run.

  Args:
    settings: the settings of the run.
    tables: the complete tables, [K, ...] by name, before the first job.
    division: the first division of the tables.
    work: the work of the workers.
    orders: the traces of the run.
    jobs: the number of jobs of each worker.
    seed: the seed of filters and codecs.

  Raises:
    OrdersError: for traces that do not belong together.
  """
  workers = len(orders.workers)
  shards = [
    TableShard(shard, division.server(shard, tables, settings, workers))
    for shard in range(division.shards)
  ]
  make_worker = functools.partial(
    TableWorker, workers=workers, jobs=jobs, seed=seed
  )
  incarnations: dict[tuple[int, int], _Incarnation] = {}
  for worker_index, events in enumerate(orders.workers):
    earlier_incarnations: list[_Incarnation] = []
    for number, its_events in enumerate(by_incarnation(events)):
      worker = make_worker(worker_index, number, settings, division, work)
      incarnations[worker_index, number] = _Incarnation(
        worker, its_events, [*earlier_incarnations]
      )
      earlier_incarnations.append(incarnations[worker_index, number])
  next_rows = [0 for _ in shards]  # index of each shard's next row
  has_progressed = True
  while has_progressed:
    has_progressed = False
    for shard, events in enumerate(orders.shards):
      while next_rows[shard] < len(events) and _replay_row(
        shards, shard, events[next_rows[shard]], incarnations
      ):
        next_rows[shard] += 1
        has_progressed = True
    for incarnation in incarnations.values():
      while incarnation.advance(shards):
        has_progressed = True
    if not has_progressed:  # all shards may be at a MOVE row
      rows = [
        events[i] if i < len(events) else None
        for i, events in zip(next_rows, orders.shards, strict=True)
      ]
      if has_progressed := _move(shards, rows, incarnations, division):
        pairs = zip(next_rows, rows, strict=True)
        next_rows = [i + (row is not None) for i, row in pairs]
  for shard, events in enumerate(orders.shards):
    if next_rows[shard] < len(events):
      index = next_rows[shard]
      row = f"row {index} of shard {shard} ({events[index].format()})"
      raise _inconsistent(f"{row} cannot be replayed")
  # All shards have finished, so each RECEIVE row must have its record.
  for (worker_index, number), incarnation in incarnations.items():
    if incarnation.open_receives:
      raise _inconsistent(
        f"incarnation {number} of worker {worker_index} received a job that no"
        " shard has"
      )
  complete_tables = division.join(
    [
      {name: table.whole() for name, table in shard.server.tables.items()}
      for shard in shards
    ]
  )
  records: list[list[tuple[float, JobRecord]]] = [[] for _ in range(workers)]
  for (worker, _), incarnation in sorted(incarnations.items()):
    records[worker] += incarnation.records
  return Replayed(complete_tables, records)
