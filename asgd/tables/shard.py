"""A shard of tables that orders what it is asked by itself: no clock, no files.

The order of what it did is its record: a row for each JOIN (another holder has
the place), SEND (it answered a pull), RECEIVE (it applied a push) and LEAVE,
with the worker, and with the number of the request in the place of `seq`; and
for each MOVE (ranges of keys went to other shards). Given
the same requests in the same order, it comes to the same bits: so it is built
again, after it was killed, from an image and the requests since, and the whole
run by a replay (`tables.replay`).
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.trace import NO_SEQ, Event
from asgd.tables import requests, wire
from asgd.tables.division import Cuts
from asgd.tables.messages import Rows
from asgd.tables.requests import JOIN, MOVE, PULL, PUSH, Reply, Request
from asgd.tables.rows import squares
from asgd.tables.server import TableServer

ACTIONS = {
  JOIN: base.JOIN, PULL: base.SEND, PUSH: base.RECEIVE, MOVE: base.MOVE
}
EXPELLED = Reply(-1, [])  # told one whose place another holder has


class _Place:
  """What a shard knows of a worker's place."""

  def __init__(self, life: int = -1, done: int = 0):
    self.life = life  # of its holder; -1: there was none
    self.done = done  # jobs whose updates are here
    self.number = -1  # of the last request
    self.sent = 0  # rows that the holder was sent
    self.rows: dict[int, bytes] = {}  # those that it may not have
    self.upto = 0
    self.version = 0  # of the server, as the last request was done
    self.change = (0.0, 0)  # by the last push: sum of squares, elements
    self.gone = False  # for good

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of JSON and bytes."""
    return {**vars(self), "rows": list(self.rows.items())}

  @classmethod
  def unpack(cls, tree: Mapping[str, Any]) -> "_Place":
    """Returns what was packed."""
    place = cls()
    vars(place).update(tree)
    place.rows, place.change = dict(tree["rows"]), tuple(tree["change"])
    return place


class TableShard:
  """A server of some rows, and what it said to whom.

  Whoever runs it asks `waits` of each request, has `obey` do it once it need
  not wait, and sends the `reply`.
  """

  def __init__(self, index: int, server: TableServer):
    """Takes a server over, of all places."""
    self.index, self.server = index, server
    self._places = {worker: _Place() for worker in server.workers}
    self._division: tuple[int, Cuts] = 0, {}  # its version, its cuts

  # Deciding.

  def is_old(self, request: Request) -> bool:
    """Whether it is of one who has lost the place."""
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
    if kind == MOVE:
      cuts = request.tables["cuts"].values()
      totals = tuple(float(cut) for mine in cuts for cut in mine)
      version = self.server.version
      return Event(
        *(time, worker, NO_SEQ, number, base.MOVE, version), totals=totals
      )
    of_life = kind == JOIN
    return Event(
      *(time, worker, NO_SEQ if of_life else number),
      life if of_life else request.done,
      ACTIONS[kind],
      self.server.version,
    )

  # Obeying.

  def obey(self, request: Request) -> None:
    """Does what is asked, the next request of its holder."""
    if request.kind == MOVE:
      self._move(request)
      return
    place = self._places[request.worker]
    if request.kind == JOIN:
      before, place = place, _Place(request.life, place.done)
      place.change = before.change
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
    """A worker goes for good: nobody waits for it."""
    done = self._places[worker].done
    self._places[worker] = place = _Place(self._places[worker].life, done)
    place.gone = True
    if len(self.server.workers) > 1 and self.server.leave(worker):
      self._tell_changes()

  def _put(self, worker, rows: Rows):
    place = self._places[worker]
    if place.life >= 0 and not place.gone:
      place.rows[place.sent] = requests.dump_rows(rows)
      place.sent += 1

  def _pull(self, request):
    worker, server = request.worker, self.server
    self._put(worker, server.pull(worker, request.tables))
    if server.rules.by_value:
      rows = server.by_value(worker, request.clock)
      if rows is not None:
        self._put(worker, rows)
    self._places[worker].upto = self._places[worker].sent

  def _push(self, place, request):
    push = request.push
    place.upto = place.sent
    if request.done <= place.done:  # of a holder that died after it
      self.server.skip(push)
      place.change = 0.0, 0
      return
    known = self.server.keys_of(push)
    before = self._peek(known)
    advanced = self.server.receive(push)
    place.done = request.done
    after = self._peek(known)
    place.change = squares(map(np.subtract, after, before))
    if advanced:
      self._tell_changes()

  def _peek(self, keys):
    tables = self.server.tables
    return [np.array(tables[name].peek(k), float) for name, k in keys.items()]

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
