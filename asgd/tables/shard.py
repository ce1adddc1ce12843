"""A shard of tables that orders requests independently: no clock, no files.

Its trace has a row for each operation, in their order:

  JOIN     an incarnation of a worker joined
  SEND     a pull was answered; `seq` is the number of the request
  RECEIVE  a push was applied; `seq` is the number of the request
  LEAVE    a worker left for good
  MOVE     ranges of keys moved between shards

The same requests in the same order give the same bits. So the successor of a
killed shard starts from an image and applies the requests since then, and a
replay recomputes a complete run (`tables.replay`).
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
EXPELLED = Reply(-1, [])  # to an incarnation after a later one has joined


@dataclasses.dataclass
class _WorkerSession:
  """A shard's state of one worker; the fields are keys of images."""

  incarnation: int = -1  # the latest incarnation that joined; -1: none has
  done: int = 0  # jobs that the shard has received
  number: int = -1  # of the last request
  sent: int = 0  # count of rows for this incarnation
  # Number -> row, for the rows that the incarnation may not have taken.
  rows: dict[int, bytes] = dataclasses.field(default_factory=dict)
  upto: int = 0  # see `Reply`
  version: int = 0  # of the server, after the last request
  # By the last push: (sum of squared changes, number of elements).
  change: tuple[float, int] = 0.0, 0
  left: bool = False  # whether the worker has left for good

  def pack(self) -> dict[str, Any]:
    """Returns the session as a tree of JSON and bytes."""
    return {**vars(self), "rows": list(self.rows.items())}

  @classmethod
  def unpack(cls, tree: Mapping[str, Any]) -> "_WorkerSession":
    """Returns a session from what `pack` returned."""
    rows, change = dict(tree["rows"]), tuple(tree["change"])
    return cls(**{**tree, "rows": rows, "change": change})


class TableShard:
  """A server of some rows, and a session for each worker.

  For each request the caller asks whether it `must_wait_for_clock`. Once the
  request need not wait, the caller applies it with `apply`, and sends the
  `reply`.
  """

  def __init__(self, index: int, server: TableServer):
    """Takes ownership of a server; its workers have not joined."""
    self.index, self.server = index, server
    self._sessions = {worker: _WorkerSession() for worker in server.workers}
    self._division: tuple[int, Cuts] = 0, {}  # (version, cuts)

  # Questions about a request.

  def is_outdated(self, request: Request) -> bool:
    """Whether a later incarnation of the request's worker has joined, or the
    worker has left."""
    session = self._sessions[request.worker]
    return session.left or request.incarnation < session.incarnation

  def is_done(self, request: Request) -> bool:
    """Whether the request was applied before."""
    if request.kind == MOVE:
      return request.number <= self.version
    session = self._sessions[request.worker]
    is_current = request.incarnation == session.incarnation
    return is_current and request.number <= session.number

  def must_wait_for_clock(self, request: Request) -> bool:
    """Whether a pull must wait until other workers have finished a clock."""
    if request.kind != PULL:
      return False
    return self.server.slowest < self.server.rules.need(request.clock)

  def must_wait_for_reads(
    self, request: Request, arrived: Collection[int]
  ) -> bool:
    """Whether a push must wait until other workers have read their replies:
    with the push their copies would lack too much (`TableServer.defers`). The
    workers in `arrived` have a waiting push."""
    if request.kind != PUSH or not self.server.rules.by_value:
      return False
    if request.done <= self._sessions[request.worker].done:
      return False
    return self.server.defers(request.push, arrived)

  def trace_row(self, request: Request, time: float) -> Event:
    """Returns the trace row of a request."""
    kind, worker, incarnation, number, *_ = request
    fields = (NO_SEQ, incarnation) if kind == JOIN else (number, request.done)
    totals: tuple[float, ...] = ()
    if kind == MOVE:
      fields = NO_SEQ, number
      cuts = request.tables["cuts"].values()
      totals = tuple(float(cut) for table_cuts in cuts for cut in table_cuts)
    row = *fields, ACTIONS[kind], self.server.version
    return Event(time, worker, *row, totals=totals)

  # Applying requests.

  def apply(self, request: Request) -> None:
    """Applies a request, which must be the next one of its incarnation."""
    if request.kind == MOVE:
      self._move(request)
      return
    session = self._sessions[request.worker]
    if request.kind == JOIN:
      # The updates of earlier incarnations stay in the tables.
      done, change = session.done, session.change
      session = _WorkerSession(request.incarnation, done, change=change)
      self._sessions[request.worker] = session
      self.server.join(request.worker)
    session.number = request.number
    # The request acknowledges the rows before number `taken`.
    session.rows = {
      number: data
      for number, data in session.rows.items()
      if number >= request.taken
    }
    if request.kind == PULL:
      self._pull(request)
    elif request.kind == PUSH:
      self._push(session, request)
    session.version = self.server.version

  def leave(self, worker: int) -> None:
    """Removes a worker for good: no other worker waits for it."""
    session = self._sessions[worker]
    incarnation, done = session.incarnation, session.done
    self._sessions[worker] = _WorkerSession(incarnation, done, left=True)
    if len(self.server.workers) > 1 and self.server.leave(worker):
      self._send_changes()

  def _add_rows(self, worker: int, rows: Rows) -> None:
    """Numbers rows for a worker, if it has joined and not left."""
    session = self._sessions[worker]
    if session.incarnation >= 0 and not session.left:
      session.rows[session.sent] = wire.dump(rows)
      session.sent += 1

  def _pull(self, request: Request) -> None:
    """Numbers the rows of a reply: the requested rows and, under value_bounded,
    the rows of which the worker's copies lack too much."""
    worker, server = request.worker, self.server
    self._add_rows(worker, server.pull(worker, request.tables))
    by_value = server.rules.by_value
    if by_value and (rows := server.by_value(worker, request.clock)):
      self._add_rows(worker, rows)
    self._sessions[worker].upto = self._sessions[worker].sent

  def _push(self, session: _WorkerSession, request: Request) -> None:
    """Applies a push, unless an earlier incarnation has sent the push of the
    same jobs."""
    push = request.push
    session.upto = session.sent  # the rows so far lack this push
    if request.done <= session.done:
      # The earlier incarnation was killed after it had sent the message.
      self.server.skip(push)
      session.change = 0.0, 0
      return
    clocks_advanced, session.change = self.server.receive_measured(push)
    session.done = request.done
    if clocks_advanced:
      self._send_changes()

  def _send_changes(self) -> None:
    """Numbers the rows to send after the slowest clock has advanced."""
    for worker, rows in self.server.at_clock().items():
      self._add_rows(worker, rows)

  # Moving ranges, after all workers have ended the same clock.

  @property
  def version(self) -> int:
    """Version of the division of tables: count of earlier divisions."""
    return self._division[0]

  def load(self) -> dict[str, np.ndarray]:
    """Returns float[k] by table: how often each row was pulled or pushed since
    the last division."""
    tables = self.server.tables.items()
    return {name: table.load for name, table in tables}

  def give(self, cuts: Cuts) -> dict[int, bytes]:
    """Returns shard -> the rows that it gets under new cuts, as bytes. This
    shard keeps these rows until it receives a MOVE."""
    parts: dict[int, dict[str, Any]] = {}
    for name, table in self.server.tables.items():
      old_cuts = table.ranges.cuts
      edges = cuts[name]
      for other_shard, (low, high) in enumerate(itertools.pairwise(edges)):
        start, stop = max(low, old_cuts[0]), min(high, old_cuts[-1])
        if other_shard != self.index and start < stop:
          part = self.server.part(name, start, stop)
          parts.setdefault(other_shard, {})[name] = part
    return {other_shard: wire.dump(tree) for other_shard, tree in parts.items()}

  def _move(self, request: Request) -> None:
    """Adopts the ranges of a new division, with rows of other shards."""
    cuts = request.tables["cuts"]
    trees = list(map(wire.load, request.tables["parts"]))
    for name in self.server.tables:
      start, stop = cuts[name][self.index : self.index + 2]
      parts = [tree[name] for tree in trees if name in tree]
      self.server.set_range(name, start, stop, parts)
    self._division = request.number, cuts

  # Replies.

  def rows_from(self, worker: int, start: int) -> list[tuple[int, bytes]]:
    """Returns (number, row) of the rows for a worker, from number `start` on.
    """
    rows = self._sessions[worker].rows.items()
    return [(number, data) for number, data in rows if number >= start]

  def active_incarnation(self, worker: int) -> int | None:
    """The worker's latest incarnation; None before the first one joins, and
    after the worker has left for good."""
    session = self._sessions[worker]
    is_absent = session.left or session.incarnation < 0
    return None if is_absent else session.incarnation

  def incarnation(self, worker: int) -> int:
    """The worker's latest incarnation that joined; -1 if no incarnation has."""
    return self._sessions[worker].incarnation

  def has_left(self, worker: int) -> bool:
    """Whether the worker has left for good."""
    return self._sessions[worker].left

  def jobs_done(self) -> dict[int, int]:
    """Returns worker -> number of jobs that the shard has received."""
    return {worker: session.done for worker, session in self._sessions.items()}

  def reply(self, request: Request, start: int = 0) -> Reply:
    """Returns the reply to a worker's last request. The reply has the rows from
    number `start` on that the request does not acknowledge."""
    session = self._sessions[request.worker]
    rows = self.rows_from(request.worker, max(start, request.taken))
    return Reply(
      *(session.number, rows, session.upto, session.done, session.version),
      *session.change,
      division=self._division if request.kind == JOIN else None,
    )

  # Images.

  def pack(self) -> dict[str, Any]:
    """Returns the shard as a tree of arrays and JSON."""
    return {
      "server": self.server.pack(),
      "places": [
        [worker, session.pack()] for worker, session in self._sessions.items()
      ],
      "division": self._division,
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a shard of the same index and tables."""
    self.server.unpack(tree["server"])
    self._sessions = {
      worker: _WorkerSession.unpack(packed) for worker, packed in tree["places"]
    }
    self._division = tuple(tree["division"])
