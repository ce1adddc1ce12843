"""A live run of tables obeyed again, from the orders of its shards and workers.

No order of all of it is known, as shards and workers are in different places;
none is needed. Each shard obeys its own rows, each holder of a worker's place
does its own jobs on what it had taken when they began, and both wait for what
the other has to make first.
"""

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
  """What shards and workers wrote down cannot be obeyed together."""


def _apart(why: str) -> OrdersError:
  return OrdersError(f"the orders do not belong together: {why}")


class Orders(NamedTuple):
  """What a live run wrote down."""

  shards: Sequence[Sequence[Event]]  # S, see `tables.shard`
  workers: Sequence[Sequence[Event]]  # N, see `tables.worker`


class Replayed(NamedTuple):
  """The result of a run."""

  tables: dict[str, np.ndarray]  # whole
  records: list[list[tuple[float, JobRecord]]]  # of each worker: (time, record)


def lives(events: Sequence[Event]) -> list[list[Event]]:
  """Returns a worker's rows by the holders of its place, each without its JOIN.

  Raises:
    ValueError: for a row before the first JOIN.
  """
  out: list[list[Event]] = []
  for event in events:
    if event.action == base.JOIN:
      out.append([])
    elif out:
      out[-1].append(event)
    else:
      raise OrdersError(
        f"a worker's rows begin with join, not {event.format()}"
      )
  return out


class _Holder:
  """A holder of a place, and its rows."""

  def __init__(
    self,
    worker: TableWorker,
    events: Sequence[Event],
    before: Sequence["_Holder"],
  ):
    """`before` are those who had the place, in their order."""
    self.worker, self._before = worker, before
    starts = [e for e in events if e.action in STARTS]
    self._starts = [e for e in starts if e.totals]
    # Jobs of a holder before it, whose message it sends again.
    self._again = {e.job for e in starts if not e.totals}
    self._messages: dict[int, ClockMessage] = {}  # the last two, by jobs done
    # What its rows say that it received, and that has not been done.
    self.ends = [e for e in events if e.action == base.RECEIVE]
    self.asks: dict[int, Request] = {}  # by shard: not answered yet
    self.records: list[tuple[float, JobRecord]] = []
    self._steps = worker.join(self._left, done=self._record)
    self._go_on()

  def _left(self, done):
    """The message that it sends again, if its rows say so."""
    if not self._again:
      return None
    for holder in reversed(self._before):
      if message := holder._messages.get(done):
        self._keep(message)
        mine = [r for r in message.records if r.job in self._again]
        return message._replace(records=mine)
    raise _apart(
      f"holder {self.worker.mail.life} of worker {self.worker.worker} sends a"
      " message again that no holder made"
    )

  def _keep(self, message):
    self._messages[message.done] = message
    if len(self._messages) > 2:  # the last may not have been sent
      del self._messages[min(self._messages)]

  def _go_on(self):
    """Goes to the next request, or to the end of a job."""
    try:
      asks = next(self._steps, None)
    except RowNotFinite:  # the holder ended
      self._steps, self._starts = None, []
      return
    if asks is None:
      self._steps = None
    else:
      self.asks = {s: requests.load_request(x) for s, x in asks.items()}

  def advance(self, shards: Sequence[TableShard]) -> bool:
    """Does what can be done; whether it did something."""
    worker = self.worker
    self.hear(shards)
    if self._steps is not None:
      if self.asks or any(map(worker.mail.lacks, range(len(shards)))):
        return False
      self._go_on()
      return True
    if not self._starts or worker.next is None or worker.rests:
      return False
    event = self._starts[0]
    upto = [int(number) for number in event.totals]
    if any(worker.mail.there(s) < end for s, end in enumerate(upto)):
      return False
    if event.job != worker.next:
      raise OrdersError(
        f"{event.format()} is not the next job of worker {worker.worker}, which"
        f" is {worker.next}"
      )
    for s, end in enumerate(upto):
      worker.take(s, end)
    self._starts.pop(0)

    def begun(action):
      if action != event.action:
        raise OrdersError(f"{event.format()} was {base.ACTIONS[action]}")

    self._steps = worker.job(begun, self._record, sends=self._keep)
    self._go_on()
    return True

  def hear(self, shards: Sequence[TableShard]) -> None:
    """Keeps the rows that shards have for it."""
    worker = self.worker
    for number, shard in enumerate(shards):
      if shard.life(worker.worker) == worker.mail.life:
        rows = shard.unsent(worker.worker, worker.mail.taken[number])
        worker.mail.hear_rows(number, rows)

  @property
  def rests(self) -> bool:
    """Whether it waits for another division of the tables."""
    return self._steps is None and self.worker.rests

  def _record(self, record):
    if self.ends:
      event = self.ends.pop(0)
      self.records.append((event.time, record))


def _hand_over(shards, number, event, holders) -> None:
  """A shard is about to forget the holder of a place, which may have taken all
  rows that the shard had sent by then: jobs that it had begun may need them."""
  life = shards[number].life(event.worker)
  if holder := holders.get((event.worker, life)):
    holder.hear(shards)


def _obey(shards, number, event, holders) -> bool:
  """Obeys a shard's next row; False if its request is not there yet."""
  shard = shards[number]
  if event.action == base.LEAVE:
    _hand_over(shards, number, event, holders)
    shard.leave(event.worker)
    return True
  if event.action == base.MOVE:  # which all shards do together
    return False
  joins = event.action == base.JOIN
  life = event.job if joins else shard.life(event.worker)
  holder = holders.get((event.worker, life))
  request = holder.asks.get(number) if holder else None
  if request is None or ACTIONS[request.kind] != event.action:
    return False
  if not joins and request.number != event.seq:
    return False
  if shard.waits(request):
    raise OrdersError(
      f"{event.format()} answers worker {event.worker} before its consistency"
      " model allows it"
    )
  if joins:
    _hand_over(shards, number, event, holders)
  shard.obey(request)
  del holder.asks[number]
  holder.worker.mail.hear(number, shard.reply(request))
  return True


def _move(shards, rows, holders, division) -> bool:
  """Moves ranges, as a MOVE row says that all shards have next which a run that
  was cut short has let write it; False if some have another, or a holder of a
  place does not wait for it."""
  event = next((row for row in rows if row is not None), None)
  if event is None or any(
    row is not None and (row.action, row.totals) != (base.MOVE, event.totals)
    for row in rows
  ):
    return False
  there = [
    holder
    for (worker, life), holder in holders.items()
    if life == shards[0].holder(worker)
  ]
  if event.job != shards[0].version + 1 or not all(x.rests for x in there):
    return False
  cuts = division.cuts_of(event.totals)
  given = [shard.give(cuts) for shard in shards]
  for number, shard in enumerate(shards):
    parts = [mine[number] for mine in given if number in mine]
    data = requests.dump_move(event.job, cuts, parts)
    shard.obey(requests.load_request(data))
  for holder in there:
    holder.hear(shards)
    holder.worker.divide(cuts)
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
  """Computes again what a live run computed.

  Args:
    settings: of the run.
    tables: whole, [K, ...] by name, as they were at first.
    division: of them over shards.
    work: what workers compute.
    orders: what was written down.
    jobs: of each worker.
    seed: of filters and codecs.

  Raises:
    OrdersError: for rows that do not belong together.
  """
  workers = len(orders.workers)
  shards = [
    TableShard(s, division.server(s, tables, settings, workers))
    for s in range(division.shards)
  ]
  holders: dict[tuple[int, int], _Holder] = {}
  for w, events in enumerate(orders.workers):
    before: list[_Holder] = []
    for life, rows in enumerate(lives(events)):
      worker = TableWorker(
        *(w, life, settings, division, work),
        workers=workers,
        jobs=jobs,
        seed=seed,
      )
      holders[w, life] = _Holder(worker, rows, [*before])
      before.append(holders[w, life])
  at = [0 for _ in shards]
  moved = True
  while moved:
    moved = False
    for s, events in enumerate(orders.shards):
      while at[s] < len(events) and _obey(shards, s, events[at[s]], holders):
        at[s] += 1
        moved = True
    for holder in holders.values():
      while holder.advance(shards):
        moved = True
    if not moved:
      rows = [
        events[i] if i < len(events) else None
        for i, events in zip(at, orders.shards, strict=True)
      ]
      if moved := _move(shards, rows, holders, division):
        at = [i + (row is not None) for i, row in zip(at, rows, strict=True)]
  for s, events in enumerate(orders.shards):
    if at[s] < len(events):
      row = f"row {at[s]} of shard {s} ({events[at[s]].format()})"
      raise _apart(f"{row} cannot be obeyed")
  for (w, life), holder in holders.items():
    if holder.ends:
      raise _apart(f"holder {life} of worker {w} received a job no shard has")
  whole = division.join(
    [
      {name: table.whole() for name, table in shard.server.tables.items()}
      for shard in shards
    ]
  )
  records = [
    [row for (w, _), h in sorted(holders.items()) if w == worker
      for row in h.records]
    for worker in range(workers)
  ]
  return Replayed(whole, records)
