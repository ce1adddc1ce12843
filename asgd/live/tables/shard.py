"""A shard in its host: what it is asked, and what is kept of it.

A pull that must wait waits here: its answer is a Future, which is there when
those that it waits for have finished a clock. Rows that nobody asked for are
the answer to a call that a worker leaves here (`listen`).
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import base, safe_files
from asgd.live.hosts import Inside
from asgd.live.journal import FileJournal
from asgd.live.store import Log
from asgd.live.tables import files
from asgd.orders.trace import NO_SEQ, Event
from asgd.tables import requests, wire
from asgd.tables.division import Cuts
from asgd.tables.requests import JOIN, Reply, Request
from asgd.tables.shard import EXPELLED, TableShard

_LEAST_LOG = 2**20  # bytes, up to which no image is made
Rows = list[tuple[int, bytes]]


class _Waiting(NamedTuple):
  """A request that waits for others."""

  request: Request
  data: bytes
  answer: Future[Reply]


class Status(NamedTuple):
  """What a shard says of places."""

  done: dict[int, int]  # jobs whose updates are here
  waiting: set[int]  # those that wait for others


class Given(NamedTuple):
  """What a shard gives away."""

  parts: dict[int, bytes]  # of its rows, to other shards
  rows: dict[int, Rows]  # that workers may not have, to these


class ShardHost:
  """A shard of tables, with its files."""

  def __init__(
    self,
    inside: Inside,
    make: Callable[[], TableShard],
    run: Path,
    memory: Path,
    index: int,
    *,
    every: int,
    image: bytes | None = None,
  ):
    """Makes it, or brings it back.

    Args:
      inside: of the host.
      make: of a shard before the first request.
      run: the folder of the run.
      memory: the folder of the run's memory.
      index: its number.
      every: jobs in a clock.
      image: of a run that goes on, which is then the one of a checkpoint.
    """
    self._inside, self._every = inside, every
    self._folder = memory / f"shard-{index}"
    safe_files.make_private(self._folder)
    path = files.order_path(run, index)
    self._journal = FileJournal(path, disk=inside.disk)
    events = self._journal.events()
    self._rows = len(events)
    self._time = events[-1].time if events else 0.0
    if image is not None or not events:  # what is there is of a run before
      self._forget_memory()
    if image is not None:
      files.write_image(self._folder, image, self._rows, inside.disk)
    self._shard = make()
    self._recover(events)
    self._waiting: dict[int, _Waiting] = {}
    self._listening: dict[int, Future[Rows]] = {}
    self._sent: dict[int, int] = {}  # rows that the present holder was given
    self._limit: int | None = None

  # What outlives it.

  def _forget_memory(self):
    for name in ("messages", "snapshots", "snapshots.tmp"):
      (self._folder / name).unlink(missing_ok=True)

  def _recover(self, events):
    """Does again what the order says since the image. What was logged, and is
    not in the order, nobody has heard of."""
    image = files.read_image(self._folder)
    rows, self._image_size = 0, 0
    if image is not None:
      rows, data = image
      self._shard.unpack(wire.load(data))
      self._image_size = len(data)
    path = self._folder / "messages"
    self._log = Log(path, self._inside.disk)
    logged = iter(self._log.bodies)
    for event in events[rows:]:
      if event.action == base.LEAVE:
        self._shard.leave(event.worker)
        continue
      data = next(logged, None)
      if data is None:
        raise ValueError(
          f"{self._folder} lacks requests of {self._journal.name}: the memory"
          " of the run was changed; start anew in another folder (--workdir)"
        )
      self._shard.obey(requests.load_request(data))
    if self._log.bodies:
      self._save()

  def _save(self):
    """Makes an image, in the place of the log before it."""
    data = wire.dump(self._shard.pack())
    files.write_image(self._folder, data, self._rows, self._inside.disk)
    self._image_size = len(data)
    self._log.replace()

  # Requests of workers.

  def hear(self, data: bytes) -> Reply | Future[Reply]:
    """Does a request of a worker, once it need not wait; returns the reply."""
    request = requests.load_request(data)
    worker, shard = request.worker, self._shard
    if shard.is_old(request):
      return EXPELLED
    if request.kind == JOIN and not shard.is_done(request):
      self._expel(worker)
    if shard.is_done(request):
      return self._reply(request)
    before = self._waiting.pop(worker, None)  # if it asks again
    if self._must_wait(request):
      answer = before.answer if before else Future()
      self._waiting[worker] = _Waiting(request, data, answer)
      self._wake()  # others need not wait for this worker any more
      return answer
    self._do(request, data)
    reply = self._reply(request)
    if before:
      before.answer.set_result(reply)
    self._wake()
    return reply

  def _must_wait(self, request):
    arrived = {
      worker
      for worker, each in self._waiting.items()
      if each.request.kind == requests.PUSH
    }
    return self._shard.waits(request) or self._shard.defers(request, arrived)

  def _expel(self, worker):
    """Tells the holder before that another has its place."""
    self._sent[worker] = 0
    if waiting := self._waiting.pop(worker, None):
      waiting.answer.set_result(EXPELLED)
    if listening := self._listening.pop(worker, None):
      listening.set_result([])

  def _do(self, request, data):
    """Writes a request down, then does it."""
    self._log.append(data)
    self._write(self._shard.event(request, self._now()))
    self._shard.obey(request)
    if self._log.size > max(self._image_size, _LEAST_LOG):
      self._save()

  def _now(self):
    self._time = max(self._inside.clock(), self._time)
    return self._time

  def _write(self, event: Event):
    self._journal.append(event)
    self._rows += 1

  def _reply(self, request) -> Reply:
    worker = request.worker
    start = self._sent.get(worker, 0)
    if request.number == 0:
      start = 0
    reply = self._shard.reply(request, start)
    self._note_sent(worker, reply.rows)
    return reply._replace(limit=self._limit)

  def _note_sent(self, worker, rows):
    if rows:
      self._sent[worker] = rows[-1][0] + 1

  def _wake(self):
    """Answers those that need not wait any more, and those that listen."""
    before = -1
    while len(self._waiting) != before:  # who is answered may free others
      before = len(self._waiting)
      for worker, (request, data, answer) in [*self._waiting.items()]:
        if not self._must_wait(request):
          del self._waiting[worker]
          self._do(request, data)
          answer.set_result(self._reply(request))
    for worker, answer in [*self._listening.items()]:
      if rows := self._unsent(worker):
        del self._listening[worker]
        answer.set_result(rows)

  def _unsent(self, worker, taken=0) -> Rows:
    start = max(self._sent.get(worker, 0), taken)
    rows = self._shard.unsent(worker, start)
    self._note_sent(worker, rows)
    return rows

  def listen(self, worker: int, life: int, have: int) -> Rows | Future[Rows]:
    """Returns rows that a holder was not sent, once there are some; it has
    those before a number."""
    if life != self._shard.life(worker):
      return []
    # A holder that asks anew may not have heard what an answer before had.
    self._sent[worker] = have
    if rows := self._unsent(worker):
      return rows
    if before := self._listening.pop(worker, None):
      before.set_result([])
    answer: Future[Rows] = Future()
    self._listening[worker] = answer
    return answer

  # What workers may do, which the first shard tells them.

  def halt(self) -> int:
    """Has all workers end the same clock; returns the jobs that each does until
    then."""
    if self._limit is None:
      most = max(self._shard.done().values(), default=0)
      self._limit = (most // self._every + 1) * self._every
    return self._limit

  def allow(self, limit: int | None) -> None:
    """Lets workers do so many jobs, None all."""
    self._limit = limit

  def status(self) -> Status:
    """Returns how far workers are."""
    return Status(self._shard.done(), set(self._waiting))

  def leave(self, worker: int) -> None:
    """A worker goes for good."""
    self._expel(worker)
    life = max(self._shard.life(worker), 0)
    self._write(Event(self._now(), worker, NO_SEQ, life, base.LEAVE))
    self._shard.leave(worker)
    self._wake()

  # Moving ranges, when all workers have ended the same clock.

  def load(self) -> tuple[int, dict[str, np.ndarray]]:
    """Returns (version of the division, load of each row by table)."""
    return self._shard.version, self._shard.load()

  def give(self, cuts: Cuts) -> Given:
    """Returns what others are to have, if tables are cut so."""
    workers = {
      worker: self._shard.unsent(worker, 0) for worker in self._shard.done()
    }
    return Given(self._shard.give(cuts), workers)

  def move(self, data: bytes) -> None:
    """Has other ranges from now on, unless it has them already."""
    request = requests.load_request(data)
    if not self._shard.is_done(request):
      self._do(request, data)

  # What the driver asks.

  def rows(self) -> dict[str, np.ndarray]:
    """Returns all its rows, by table."""
    tables = self._shard.server.tables.items()
    return {name: np.asarray(table.whole()) for name, table in tables}

  def counts(self) -> tuple[int, int]:
    """Returns (messages applied, the slowest worker's clock)."""
    server = self._shard.server
    return server.version, server.slowest

  def image(self) -> tuple[int, bytes]:
    """Returns (rows of its order, it as bytes)."""
    return self._rows, wire.dump(self._shard.pack())
