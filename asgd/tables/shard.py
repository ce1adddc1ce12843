"""A shard of tables that orders requests by itself: no clock, no files.

Its record is the order of its operations: a row for each JOIN (another holder
has the place), SEND (it answered a pull), RECEIVE (it applied a push) and
LEAVE, with the worker, and the number of the request as `seq`; and for each
MOVE (ranges of keys went to other shards). The same requests in the same order
give the same bits: so a shard that was killed is built again from an image and
the requests since, and the whole run by a replay (`tables.replay`).
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.trace import NO_SEQ, Event
from asgd.tables import wire
from asgd.tables.division import Cuts
from asgd.tables.messages import Rows
from asgd.tables.requests import JOIN, MOVE, PULL, PUSH, Reply, Request
from asgd.tables.server import TableServer

ACTIONS = {
  JOIN: base.JOIN, PULL: base.SEND, PUSH: base.RECEIVE, MOVE: base.MOVE
}
EXPELLED = Reply(-1, [])  # for a worker whose place another holder has


@dataclasses.dataclass
class _Place:
  """What a shard knows of a worker's place."""

  life: int = -1  # of its holder; -1: there was none
  done: int = 0  # jobs whose updates are here
  number: int = -1  # of the last request
  sent: int = 0  # rows that the holder was sent
  rows: dict[int, bytes] = dataclasses.field(default_factory=dict)  # that the
  # holder may not have
  upto: int = 0
  version: int = 0  # of the server, as the last request was done
  change: tuple[float, int] = 0.0, 0  # sum of squares, elements: the last push
  gone: bool = False  # for good

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of JSON and bytes."""
    return {**vars(self), "rows": list(self.rows.items())}

  @classmethod
  def unpack(cls, tree: Mapping[str, Any]) -> "_Place":
    """Returns what was packed."""
    rows, change = dict(tree["rows"]), tuple(tree["change"])
    return cls(**{**tree, "rows": rows, "change": change})


class TableShard:
  """A server of some rows, and what workers have of them.

  Its caller asks `waits` of each request, has `obey` do it once it need not
  wait, and sends the `reply`.
  """

  def __init__(self, index: int, server: TableServer):
    """Takes a server over, of all places."""
    self.index, self.server = index, server
    self._places = {worker: _Place() for worker in server.workers}
    self._division: tuple[int, Cuts] = 0, {}  # its version, its cuts

  # Deciding.

  def is_old(self, request: Request) -> bool:
    """Whether its worker has lost the place."""
    place = self._places[request.worker]
    return place.gone or request.life < place.life

  def is_done(self, request: Request) -> bool:
    """Whether it was done before."""
    if request.kind == MOVE:
      return request.number <= self.version
    place = self._places[request.worker]
    return request.life == place.life and request.number <= place.number

  def waits(self, request: Request) -> bool:
    """Whether it must wait until others have finished a clock."""
    if request.kind != PULL:
      return False
    return self.server.slowest < self.server.rules.need(request.clock)

  def defers(self, request: Request, arrived: Collection[int]) -> bool:
    """Whether a push must wait until others that were answered have pushed,
    too, as they would lack too much (`TableServer.defers`); `arrived` have."""
    if request.kind != PUSH or not self.server.rules.by_value:
      return False
    if request.done <= self._places[request.worker].done:
      return False
    return self.server.defers(request.push, arrived)

  def event(self, request: Request, time: float) -> Event:
    """Returns the row that records a request."""
    kind, worker, life, number, *_ = request
    fields = (NO_SEQ, life) if kind == JOIN else (number, request.done)
    totals: tuple[float, ...] = ()
    if kind == MOVE:
      fields = NO_SEQ, number
      cuts = request.tables["cuts"].values()
      totals = tuple(float(cut) for mine in cuts for cut in mine)
    row = *fields, ACTIONS[kind], self.server.version
    return Event(time, worker, *row, totals=totals)

  # Obeying.

  def obey(self, request: Request) -> None:
    """Does what is asked, the next request of its holder."""
    if request.kind == MOVE:
      self._move(request)
      return
    place = self._places[request.worker]
    if request.kind == JOIN:
      place = _Place(request.life, place.done, change=place.change)
      self._places[request.worker] = place
      self.server.join(request.worker)
    place.number = request.number
    place.rows = {n: x for n, x in place.rows.items() if n >= request.taken}
    if request.kind == PULL:
      self._pull(request)
    elif request.kind == PUSH:
      self._push(place, request)
    place.version = self.server.version

  def leave(self, worker: int) -> None:
    """Removes a worker for good: no other waits for it."""
    place = self._places[worker]
    self._places[worker] = _Place(place.life, place.done, gone=True)
    if len(self.server.workers) > 1 and self.server.leave(worker):
      self._tell_changes()

  def _put(self, worker, rows: Rows):
    place = self._places[worker]
    if place.life >= 0 and not place.gone:
      place.rows[place.sent] = wire.dump(rows)
      place.sent += 1

  def _pull(self, request):
    worker, server = request.worker, self.server
    self._put(worker, server.pull(worker, request.tables))
    by_value = server.rules.by_value
    if by_value and (rows := server.by_value(worker, request.clock)):
      self._put(worker, rows)
    self._places[worker].upto = self._places[worker].sent

  def _push(self, place, request):
    push = request.push
    place.upto = place.sent
    if request.done <= place.done:  # of a holder that died after it
      self.server.skip(push)
      place.change = 0.0, 0
      return
    advanced, place.change = self.server.measure(push)
    place.done = request.done
    if advanced:
      self._tell_changes()

  def _tell_changes(self):
    for worker, rows in self.server.at_clock().items():
      self._put(worker, rows)

  # Moving ranges, when all workers have ended the same clock.

  @property
  def version(self) -> int:
    """Of the division of tables: how many there were before."""
    return self._division[0]

  def load(self) -> dict[str, np.ndarray]:
    """Returns float[k] by table: how often each row was pulled and pushed since
    the last division."""
    tables = self.server.tables.items()
    return {name: table.load for name, table in tables}

  def give(self, cuts: Cuts) -> dict[int, bytes]:
    """Returns what other shards are to have of its rows, by their numbers. It
    has them still."""
    parts: dict[int, dict[str, Any]] = {}
    for name, table in self.server.tables.items():
      before = table.ranges.cuts
      edges = cuts[name]
      for other, (low, high) in enumerate(itertools.pairwise(edges)):
        start, stop = max(low, before[0]), min(high, before[-1])
        if other != self.index and start < stop:
          part = self.server.part(name, start, stop)
          parts.setdefault(other, {})[name] = part
    return {other: wire.dump(mine) for other, mine in parts.items()}

  def _move(self, request):
    cuts = request.tables["cuts"]
    trees = list(map(wire.load, request.tables["parts"]))
    for name in self.server.tables:
      start, stop = cuts[name][self.index : self.index + 2]
      mine = [tree[name] for tree in trees if name in tree]
      self.server.set_range(name, start, stop, mine)
    self._division = request.number, cuts

  # Answering.

  def unsent(self, worker: int, start: int) -> list[tuple[int, bytes]]:
    """Returns the rows for a place's holder, from a number on."""
    rows = self._places[worker].rows.items()
    return [(number, data) for number, data in rows if number >= start]

  def holder(self, worker: int) -> int | None:
    """The number of a place's holder, None before there was one, and when it
    has gone for good."""
    place = self._places[worker]
    return None if place.gone or place.life < 0 else place.life

  def life(self, worker: int) -> int:
    """The number of a place's holder, -1 before there was one."""
    return self._places[worker].life

  def done(self) -> dict[int, int]:
    """Returns the jobs of each place whose updates are here."""
    return {worker: place.done for worker, place in self._places.items()}

  def reply(self, request: Request, start: int = 0) -> Reply:
    """Returns the answer to the last request of a holder, with rows from a
    number on."""
    place = self._places[request.worker]
    rows = self.unsent(request.worker, max(start, request.taken))
    return Reply(
      *(place.number, rows, place.upto, place.done, place.version),
      *place.change,
      division=self._division if request.kind == JOIN else None,
    )

  # Images.

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "server": self.server.pack(),
      "places": [[w, place.pack()] for w, place in self._places.items()],
      "division": self._division,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it has packed."""
    self.server.unpack(tree["server"])
    self._places = {w: _Place.unpack(place) for w, place in tree["places"]}
    self._division = tuple(tree["division"])
