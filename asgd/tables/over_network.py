"""Tables in simulated time whose messages take time, too.

  pull   worker --> shards    a request for the rows that a job needs
  reply  worker <-- shards    once all have finished the clocks it needs
  push   worker --> shards    at the end of a clock
  ack    worker <-- shards    the push was taken: the next job may start
  rows   worker <-- shards    that changed, as the slowest clock advances

Each message has a part for each shard that it concerns, whose bytes are those
of its rows; what is said of no row (16 bytes, what it is and of whom) is
divided equally. A request that must wait does so at the shards. All shards have
one order: a request is answered, and a push applied, when the last of them has
taken its part. Of value_bounded, a push then waits for replies on their way to
workers that would lack too much with it. An ack has no bytes, and comes before
rows that the push has caused to be sent. A worker of a model of server push
that lacks changed rows waits for these, and asks for others alone.

A row SEND of the trace has the time of the answer, a row RECEIVE that at which
the push is applied.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.network import LinkUse, Network
from asgd.tables import carrier as carrier_lib
from asgd.tables import requests, wire
from asgd.tables.carrier import DOWN, MESSAGE, UP, Carrier, Message
from asgd.tables.keys import Keys
from asgd.tables.messages import Rows
from asgd.tables.requests import PULL, PUSH, Request
from asgd.tables.simulation import Jobs, request_bytes

REPLY, ACK, ROWS = "reply", "ack", "rows"
_START, _ANSWER, _COMPUTED = "start", "answer", "computed"
_HEADER = 16  # bytes of a message beside its keys and rows


class OverNetwork(Jobs):
  """A run of tables over a network.

  Example:
    One worker, a job of 1. Request, reply and ack take 0.5 each; so does the
    push.

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
    """As a run without a network, whose arguments these are; the network has
    the shards of the tables."""
    super().__init__(*args, **options)
    shards = self._settings.shards
    network = network._replace(shards=shards)
    self._carrier = Carrier(network, len(self._places))
    self._shards = range(shards)
    self._asked: dict[int, Request] = {}  # that wait at the shards, by worker

  def use(self) -> LinkUse:
    """Returns what the network has borne until the last job ended."""
    return self._carrier.links.use(self.now)

  # What happens next.

  def _begin(self):
    for worker in range(len(self._places)):
      self._put(0.0, carrier_lib.NEXT, _START, worker)

  def _put(self, time, rank, kind, worker):
    self._carrier.put(time, rank, kind, worker)

  def _happen(self):
    kind, what = self._carrier.pop()
    self.now = self._carrier.now
    steps = {_START: self._start, _ANSWER: self._may_answer}
    steps |= {_COMPUTED: self._end, MESSAGE: self._come}
    try:
      steps[kind](what)
    except ValueError:
      self._carrier.put_back(what)
      raise

  def _come(self, message):
    """A message has come."""
    worker = message.worker
    self._places[worker].queued += message.waited
    if message.kind == PULL:
      self._asked[worker] = requests.load_request(message.data[0])
      self._may_answer(worker)
    elif message.kind == PUSH:
      self._asked[worker] = requests.load_request(message.data[0])
      self._may_push()
    elif message.kind == ACK:
      self._put(self.now, carrier_lib.NEXT, _START, worker)
    else:
      self._take(message)

  # The worker.

  def _start(self, worker):
    """A worker starts its next job, if it has one and may."""
    place, rules = self._places[worker], self._settings.rules
    place.waits = False
    if place.started == self._jobs:
      return
    keys, clock, stale = self._wants(worker)
    if not stale and not rules.by_value:
      self._write(worker, self._next(worker), base.KEEP)
      self._places[worker].row = len(self.rows) - 1
      self._go(worker, keys, clock)
    elif rules.by_clock and self._places[worker].heard < rules.need(clock):
      place.waits = True  # what has changed is sent
    else:
      self._ask(worker, clock, stale)

  def _ask(self, worker, clock, stale):
    request = Request(PULL, worker, 0, 0, 0, clock, tables=stale)
    self._places[worker].up += request_bytes(stale)
    parts = [(name, each, 8 * len(each)) for name, each in stale.items()]
    # Shards without its rows, too, send those that lack too much.
    sizes = self._sizes(
      parts, self._shards if self._settings.rules.by_value else self._of(stale)
    )
    data = [requests.dump_request(request)]
    self._carrier.send(Message(PULL, UP, worker, sizes, data))

  def _take(self, message):
    """Rows have come to a worker."""
    worker = message.worker
    client, place = self._clients[worker], self._places[worker]
    # Of a message that is on its way the shards did not know yet.
    behind = message.number < client.flushes
    for data in message.data:
      rows = Rows(*wire.load(data))
      place.heard = max(place.heard, rows.clock)
      (client.take_behind if behind else client.take)(rows)
    if message.kind == REPLY:
      keys, clock, _ = self._wants(worker)
      self._go(worker, keys, clock)
      self._may_push()
    elif place.waits:  # once, though more rows may come at the same time
      place.waits = False
      self._put(self.now, carrier_lib.WAITING, _START, worker)

  def _go(self, worker, keys, clock):
    """A worker has all that its job needs."""
    self._read(worker, keys, clock, self._places[worker].row)
    end = self.now + self._places[worker].draw()
    self._put(end, carrier_lib.END, _COMPUTED, worker)

  def _end(self, worker):
    """A job is computed."""
    push = self._compute(worker)
    if push is None:
      self._receive(worker, None)
      self._count(worker)
      self._put(self.now, carrier_lib.NEXT, _START, worker)
      return
    lists = self._clients[worker].sender.lists
    sizes = self._sizes(
      [
        (name, lists[each.keys.digest], each.nbytes)
        for name, each in push.tables.items()
      ],
      self._shards,
    )
    request = Request(PUSH, worker, 0, 0, 0, push.clock, tables=push.tables)
    data = [requests.dump_request(request)]
    self._carrier.send(Message(PUSH, UP, worker, sizes, data))

  # The shards.

  def _may_answer(self, worker):
    """A request is answered, unless others have to finish a clock first."""
    request = self._asked.get(worker)
    if request is None or request.kind == PUSH or self._must_wait(request):
      return
    del self._asked[worker]
    rows = self._answer(worker, request.clock, dict(request.tables))
    self._places[worker].row = len(self.rows) - 1
    self._send_rows(REPLY, worker, rows, self._of(request.tables))

  def _must_wait(self, request):
    need = self._settings.rules.need(request.clock)
    return bool(request.tables) and self.server.slowest < need

  def _count(self, worker):
    """The time that a job's messages were in queues is known."""
    self._carrier.links.received(self._places[worker].queued)
    self._places[worker].queued = 0.0

  def _may_push(self):
    """Messages are applied, unless a worker whose reply is on its way would
    lack too much with them: they wait until it has read."""
    pushes = {w: r for w, r in self._asked.items() if r.kind == PUSH}
    for worker, request in pushes.items():
      if not self.server.defers(request.push, pushes):
        self._push(request.push)
        del self._asked[worker]
        self._may_push()  # those that waited for it
        return

  def _push(self, push):
    """A worker's message is applied."""
    worker = push.worker
    sent = self._receive(worker, push)
    self._places[worker].applied += 1
    self._count(worker)
    ack = Message(ACK, DOWN, worker, dict.fromkeys(self._shards, 0.0))
    self._carrier.send(ack)
    for other, rows in sent.items():
      self._send_rows(ROWS, other, [rows], self._shards)
    for other, request in self._asked.items():
      if request.kind == PULL and not self._must_wait(request):
        self._put(self.now, carrier_lib.WAITING, _ANSWER, other)

  def _send_rows(self, kind, worker, every: list[Rows], shards):
    parts = []
    for rows in every:
      for name, (keys, values) in rows.tables.items():
        nbytes = values.nbytes + (0 if rows.asked else 8 * len(keys))
        parts.append((name, keys, nbytes))
      late = rows.late or {}
      parts += [(name, keys, 8 * len(keys)) for name, keys in late.items()]
    sizes = self._sizes(parts, shards or self._shards, len(every))
    data = list(map(wire.dump, every))
    applied = self._places[worker].applied
    self._carrier.send(Message(kind, DOWN, worker, sizes, data, applied))

  def _of(self, keys: Mapping[str, Keys]) -> list[int]:
    """Returns the shards that have some keys."""
    tables = self.server.tables
    owners = [tables[name].ranges.shard_of(x) for name, x in keys.items()]
    return np.unique(np.concatenate([*owners, np.zeros(0, int)])).tolist()

  def _sizes(
    self,
    parts: Iterable[tuple[str, Keys, float]],
    shards: Iterable[int],
    headers: int = 1,
  ) -> dict[int, float]:
    """Returns the bytes of each shard's part, of (table, keys, bytes), with
    those of no row divided over some shards."""
    shards = list(shards)
    out = dict.fromkeys(shards, headers * _HEADER / len(shards))
    for name, keys, nbytes in parts:
      counts = np.bincount(self.server.tables[name].ranges.shard_of(keys))
      for shard in np.flatnonzero(counts).tolist():
        share = nbytes * float(counts[shard]) / len(keys)
        out[shard] = out.get(shard, 0.0) + share
    return out

  # Checkpoints.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      **super().pack(),
      "carrier": self._carrier.pack(),
      "asked": list(map(requests.dump_request, self._asked.values())),
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what a run like this one, which has not begun, has packed."""
    super().unpack(tree)
    self._carrier.unpack(tree["carrier"])
    asked = map(requests.load_request, tree["asked"])
    self._asked = {request.worker: request for request in asked}
