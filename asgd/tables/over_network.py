"""Simulation of tables with messages that take time on a network.

  pull   worker --> shards    requests the rows that a job needs
  reply  worker <-- shards    once all workers have finished the needed clocks
  push   worker --> shards    at the end of a clock
  ack    worker <-- shards    the push was received: the next job may start
  rows   worker <-- shards    changed rows, when the slowest clock advances

- Each message has a part for each shard that it concerns. A part has the bytes
  of that shard's rows, and an equal share of the 16 bytes of the header.
- All shards share one order: a request is answered, and a push is applied, once
  the last shard has received its part.
- A pull that must wait does so at the shards. Under value_bounded a push waits
  there, too, if a reply to another worker is on its way and the push would make
  that worker's copies lack too much.
- An ack has no bytes, and arrives before the rows that its push caused.
- If the server pushes rows, a worker that lacks changed rows waits for them. It
  requests only rows that it never had.

A SEND row of the trace has the time of the reply, a RECEIVE row the time at
which the push is applied.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.network import LinkUse, Network
from asgd.orders.network_events import (
  DOWN,
  END_JOB,
  MESSAGE,
  START_JOB,
  UP,
  WAITING,
  Message,
  NetworkEvents,
)
from asgd.tables import requests, wire
from asgd.tables.keys import Keys
from asgd.tables.messages import Push, Rows
from asgd.tables.requests import PULL, PUSH, Request
from asgd.tables.simulation import TableRun, request_bytes

REPLY, ACK, ROWS = "reply", "ack", "rows"
_START, _ANSWER, _COMPUTED = "start", "answer", "computed"  # kinds of events
_HEADER_BYTES = 16  # of a message, without keys and rows


class OverNetwork(TableRun):
  """A run of tables over a network.

  Example:
    Jobs of the one worker take 1. Pull, reply, push and ack take 0.5 each.

    >>> import numpy as np
    >>> from asgd import orders, tables
    >>> work = tables.Work(
    ...   lambda worker, job: job,
    ...   lambda batch: {"w": np.array([0])},
    ...   lambda rows, batch, *_: (0.0, {"w": np.array([[-1.0]])}),
    ... )
    >>> run = tables.OverNetwork(
    ...   tables.table(1.0, 1, consistency="ssp", bound=0),
    ...   {"w": np.zeros((1, 1))},
    ...   work,
    ...   orders.durations.constant(),
    ...   network=orders.network.Network(latency=0.5),
    ...   workers=1, messages=2,
    ... )
    >>> run.advance(until=2)
    2
    >>> [(row.time, row.action) for row in run.rows]
    [(0.5, 0), (2.5, 1), (3.5, 0), (5.5, 1)]
  """

  def __init__(self, *args: Any, network: Network, **options: Any):
    """Takes the arguments of `TableRun` and a network. The tables' number of
    shards replaces the network's."""
    super().__init__(*args, **options)
    shards = self._settings.shards
    network = network._replace(shards=shards)
    self._events = NetworkEvents(network, len(self._workers))
    self._shards = range(shards)
    # Worker -> its request that waits at the shards.
    self._waiting: dict[int, Request] = {}

  def use(self) -> LinkUse:
    """Returns the use of the links until the last event."""
    return self._events.links.use(self.now)

  # The event loop.

  def _begin(self):
    for worker in range(len(self._workers)):
      self._schedule(0.0, START_JOB, _START, worker)

  def _schedule(self, time: float, rank: int, kind: str, worker: int) -> None:
    self._events.put(time, rank, kind, worker)

  def _step(self) -> None:
    """Handles the next event. Raises ValueError for an update that is not
    finite; then the event stays in the queue."""
    kind, subject = self._events.pop()  # a worker's index, or a Message
    self.now = self._events.now
    handlers = {_START: self._start_job, _ANSWER: self._answer_if_allowed}
    handlers |= {_COMPUTED: self._end_job, MESSAGE: self._deliver}
    try:
      handlers[kind](subject)
    except ValueError:
      self._events.put_back(subject)
      raise

  def _deliver(self, message: Message) -> None:
    """Handles a message that has arrived, at the shards or at its worker."""
    worker = message.worker
    self._workers[worker].queued += message.waited
    if message.kind == PULL:
      self._waiting[worker] = requests.load_request(message.data[0])
      self._answer_if_allowed(worker)
    elif message.kind == PUSH:
      self._waiting[worker] = requests.load_request(message.data[0])
      self._apply_pushes()
    elif message.kind == ACK:
      self._schedule(self.now, START_JOB, _START, worker)
    else:
      self._deliver_rows(message)

  # The worker.

  def _start_job(self, worker: int) -> None:
    """Starts the worker's next job on its copies, or requests the rows that it
    lacks, or makes the worker wait for rows that the shards will send."""
    state, rules = self._workers[worker], self._settings.rules
    state.waits = False
    if state.started == self._jobs:
      return
    keys, clock, stale = self._inspect_next_job(worker)
    if not stale and not rules.by_value:
      self._write_row(worker, self._next_job(worker), base.KEEP)
      self._workers[worker].row = len(self.rows) - 1
      self._begin_job(worker, keys, clock)
    elif rules.by_clock and self._workers[worker].heard < rules.need(clock):
      # The shards send the changed rows when the slowest clock advances.
      state.waits = True
    else:
      self._request_rows(worker, clock, stale)

  def _request_rows(
    self, worker: int, clock: int, stale: Mapping[str, Keys]
  ) -> None:
    """Sends a pull for the stale rows of a worker's next job."""
    request = Request(PULL, worker, 0, 0, 0, clock, tables=stale)
    self._workers[worker].up += request_bytes(stale)
    parts = [(name, keys, 8 * len(keys)) for name, keys in stale.items()]
    # Under value_bounded every shard gets the request: the worker's copies of a
    # shard's rows may lack too much even if no row is stale.
    shards: Iterable[int] = self._shards
    if not self._settings.rules.by_value:
      shards = self._owners(stale)
    sizes = self._part_bytes(parts, shards)
    data = [requests.dump_request(request)]
    self._events.send(Message(PULL, UP, worker, sizes, data))

  def _deliver_rows(self, message: Message) -> None:
    """Delivers rows to a worker, which may start a job with them."""
    worker = message.worker
    client, state = self._clients[worker], self._workers[worker]
    # The shards sent these rows before they had the worker's last push.
    is_behind = message.number < client.flushes
    for data in message.data:
      rows = Rows(*wire.load(data))
      state.heard = max(state.heard, rows.clock)
      (client.take_behind if is_behind else client.take)(rows)
    if message.kind == REPLY:
      keys, clock, _ = self._inspect_next_job(worker)
      self._begin_job(worker, keys, clock)
      self._apply_pushes()
    elif state.waits:  # other rows may arrive at this time: retry only once
      state.waits = False
      self._schedule(self.now, WAITING, _START, worker)

  def _begin_job(
    self, worker: int, keys: Mapping[str, Keys], clock: int
  ) -> None:
    """Starts to compute a worker's next job; the worker has all rows of it."""
    self._start_ticket(worker, keys, clock, self._workers[worker].row)
    end = self.now + self._workers[worker].draw()
    self._schedule(end, END_JOB, _COMPUTED, worker)

  def _end_job(self, worker: int) -> None:
    """Ends the computation of a job, and sends its push if it ends a clock."""
    push = self._compute(worker)
    if push is None:  # the job does not end a clock, so it sends no message
      self._receive(worker, None)
      self._count_queued(worker)
      self._schedule(self.now, START_JOB, _START, worker)
      return
    lists = self._clients[worker].key_cache.lists
    sizes = self._part_bytes(
      [
        (name, lists[row_values.keys.digest], row_values.nbytes)
        for name, row_values in push.tables.items()
      ],
      self._shards,
    )
    request = Request(PUSH, worker, 0, 0, 0, push.clock, tables=push.tables)
    data = [requests.dump_request(request)]
    self._events.send(Message(PUSH, UP, worker, sizes, data))

  # The shards.

  def _answer_if_allowed(self, worker: int) -> None:
    """Answers a worker's pull, unless other workers must finish a clock
    before."""
    request = self._waiting.get(worker)
    if request is None or request.kind == PUSH or self._must_wait(request):
      return
    del self._waiting[worker]
    rows = self._answer(worker, request.clock, dict(request.tables))
    self._workers[worker].row = len(self.rows) - 1
    self._send_rows(REPLY, worker, rows, self._owners(request.tables))

  def _must_wait(self, request: Request) -> bool:
    """Whether a pull must wait until other workers have finished a clock."""
    required_clock = self._settings.rules.need(request.clock)
    return bool(request.tables) and self.server.slowest < required_clock

  def _count_queued(self, worker: int) -> None:
    """Reports to the links how long the messages of a received job queued."""
    self._events.links.count_received(self._workers[worker].queued)
    self._workers[worker].queued = 0.0

  def _apply_pushes(self) -> None:
    """Applies the pushes that have arrived and need not wait.

    Under value_bounded a push waits while a reply is on its way to another
    worker if the push would make that worker's copies lack too much. It is
    applied once that worker has read its copies.
    """
    pushes = {
      worker: request
      for worker, request in self._waiting.items()
      if request.kind == PUSH
    }
    for worker, request in pushes.items():
      if not self.server.defers(request.push, pushes):
        self._push(request.push)
        del self._waiting[worker]
        self._apply_pushes()  # another push may have waited for this push
        return

  def _push(self, push: Push) -> None:
    """Applies a push, sends its ack and the server's changed rows, and
    schedules the answers to pulls that waited for the push."""
    worker = push.worker
    rows_by_worker = self._receive(worker, push)
    self._workers[worker].applied += 1
    self._count_queued(worker)
    # Send the ack first, so that the stream delivers it before these rows.
    ack = Message(ACK, DOWN, worker, dict.fromkeys(self._shards, 0.0))
    self._events.send(ack)
    for other_worker, rows in rows_by_worker.items():
      self._send_rows(ROWS, other_worker, [rows], self._shards)
    for other_worker, request in self._waiting.items():
      if request.kind == PULL and not self._must_wait(request):
        self._schedule(self.now, WAITING, _ANSWER, other_worker)

  def _send_rows(
    self, kind: str, worker: int, messages: list[Rows], shards: Iterable[int]
  ) -> None:
    """Sends `Rows` of some shards to a worker as one message of the network."""
    parts = []
    for rows in messages:
      for name, (keys, values) in rows.tables.items():
        nbytes = values.nbytes + (0 if rows.asked else 8 * len(keys))
        parts.append((name, keys, nbytes))
      late_keys = rows.late or {}
      parts += [(name, keys, 8 * len(keys)) for name, keys in late_keys.items()]
    sizes = self._part_bytes(parts, shards or self._shards, len(messages))
    data = list(map(wire.dump, messages))
    # Count of the worker's pushes that the shards have applied.
    applied = self._workers[worker].applied
    self._events.send(Message(kind, DOWN, worker, sizes, data, applied))

  def _owners(self, keys: Mapping[str, Keys]) -> list[int]:
    """Returns the shards that own at least one of the keys."""
    tables = self.server.tables
    owners = [
      tables[name].ranges.shard_of(table_keys)
      for name, table_keys in keys.items()
    ]
    return np.unique(np.concatenate([*owners, np.zeros(0, int)])).tolist()

  def _part_bytes(
    self,
    parts: Iterable[tuple[str, Keys, float]],
    shards: Iterable[int],
    headers: int = 1,
  ) -> dict[int, float]:
    """Returns the bytes of each shard's part of a message.

    Args:
      parts: (table, keys, bytes); the bytes go to the owners of the keys.
      shards: these share the bytes of the headers equally.
      headers: number of headers in the message.
    """
    shards = list(shards)
    nbytes_of = dict.fromkeys(shards, headers * _HEADER_BYTES / len(shards))
    for name, keys, nbytes in parts:
      counts = np.bincount(self.server.tables[name].ranges.shard_of(keys))
      for shard in np.flatnonzero(counts).tolist():
        part_bytes = nbytes * float(counts[shard]) / len(keys)
        nbytes_of[shard] = nbytes_of.get(shard, 0.0) + part_bytes
    return nbytes_of

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns the state of the run as a tree of arrays and JSON."""
    return {
      **super().pack(),
      "carrier": self._events.pack(),
      "asked": list(map(requests.dump_request, self._waiting.values())),
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a run with the same arguments. This run must
    not have begun."""
    super().unpack(tree)
    self._events.unpack(tree["carrier"])
    waiting_requests = map(requests.load_request, tree["asked"])
    self._waiting = {request.worker: request for request in waiting_requests}
