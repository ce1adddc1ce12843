"""A shard of tables in its host: its methods are called remotely.

The answer to a pull that must wait is a Future, which is set once other workers
have finished a clock. Rows that a worker does not request reach it by a long
poll: the worker keeps one call of `listen` open, and the shard answers the call
when it has rows.
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

_MIN_LOG_BYTES = 2**20  # a smaller log is not replaced by an image
Rows = list[tuple[int, bytes]]  # (number, dumped rows), by number


class _WaitingRequest(NamedTuple):
  """A request that waits for other workers."""

  request: Request
  data: bytes  # the request as it was received, for the log
  answer: Future[Reply]  # the result of the worker's open call


class Status(NamedTuple):
  """The progress of workers at a shard."""

  jobs_done: dict[int, int]  # worker -> jobs that the shard has received
  waiting: set[int]  # workers with a request that waits for other workers


class Handover(NamedTuple):
  """The rows that a shard gives away when ranges move."""

  parts: dict[int, bytes]  # shard -> rows that it gets
  rows: dict[int, Rows]  # worker -> rows that it may not have received


class ShardHost:
  """A shard of tables, with its trace, log and image.

  The shard first logs a request, then writes its trace row, then applies and
  answers it. So a reply never depends on data that a crash would lose.
  """

  def __init__(
    self,
    inside: Inside,
    make: Callable[[], TableShard],
    run: Path,
    memory: Path,
    index: int,
    *,
    clock_every: int,
    image: bytes | None = None,
  ):
    """Makes a shard, or rebuilds it from the files of an earlier process.

    Args:
      inside: the functions of the host.
      make: returns the shard before its first request.
      run: folder of the run.
      memory: folder of the run's memory.
      index: the index of the shard.
      clock_every: number of jobs in a clock.
      image: the image of a checkpoint from which the run resumes; None
        otherwise.
    """
    self._inside, self._clock_every = inside, clock_every
    self._folder = memory / f"shard-{index}"
    safe_files.make_private(self._folder)
    path = files.order_path(run, index)
    self._journal = FileJournal(path, disk=inside.disk)
    events = self._journal.events()
    self._rows = len(events)
    self._time = events[-1].time if events else 0.0
    # A run that begins, or resumes from a checkpoint, must not read the memory
    # of an earlier run.
    if image is not None or not events:
      self._remove_memory()
    if image is not None:
      files.write_image(self._folder, image, self._rows, inside.disk)
    self._shard = make()
    self._recover(events)
    self._waiting: dict[int, _WaitingRequest] = {}  # by worker
    self._polls: dict[int, Future[Rows]] = {}  # worker -> open call of `listen`
    # Worker -> number of rows that were sent to its latest incarnation.
    self._sent_counts: dict[int, int] = {}
    self._limit: int | None = None  # jobs of each worker until a pause

  # Files that outlive the process.

  def _remove_memory(self) -> None:
    """Removes the log and the image, also an image that a kill left half
    written."""
    for name in ("messages", "snapshots", "snapshots.tmp"):
      (self._folder / name).unlink(missing_ok=True)

  def _recover(self, events: list[Event]) -> None:
    """Loads the image, and applies the requests of later trace rows again.

    A logged request without a trace row was never answered: it is ignored, and
    its worker sends it again.
    """
    # [1] The image, which covers the first `rows` rows of the trace.
    image = files.read_image(self._folder)
    rows, self._image_size = 0, 0
    if image is not None:
      rows, image_data = image
      self._shard.unpack(wire.load(image_data))
      self._image_size = len(image_data)
    # [2] One logged request for each later row, except for LEAVE rows: these
    # come from the driver, not from a worker.
    path = self._folder / "messages"
    self._log = Log(path, self._inside.disk)
    logged_requests = iter(self._log.bodies)
    for event in events[rows:]:
      if event.action == base.LEAVE:
        self._shard.leave(event.worker)
        continue
      data = next(logged_requests, None)
      if data is None:
        raise ValueError(
          f"{self._folder} lacks requests of {self._journal.name}: the memory"
          " of the run was changed; start again in another folder (--workdir)"
        )
      self._shard.apply(requests.load_request(data))
    # [3] Save an image and empty the log: after a kill the log may have
    # requests that the image covers, or a last request without a row.
    if self._log.bodies:
      self._save()

  def _save(self) -> None:
    """Writes an image, and empties the log."""
    data = wire.dump(self._shard.pack())
    files.write_image(self._folder, data, self._rows, self._inside.disk)
    self._image_size = len(data)
    self._log.replace()

  # Requests of workers.

  def handle(self, data: bytes) -> Reply | Future[Reply]:
    """Handles a request of a worker. Returns the reply, or a Future of the
    reply if the request must wait."""
    request = requests.load_request(data)
    worker, shard = request.worker, self._shard
    # [1] An expelled worker exits. A new incarnation expels the previous one.
    if shard.is_outdated(request):
      return EXPELLED
    if request.kind == JOIN and not shard.is_done(request):
      self._expel(worker)
    # [2] The answer to this request was lost: answer it again, and do no more.
    if shard.is_done(request):
      return self._reply(request)
    # [3] A request may have to wait. A worker that lost its connection sends a
    # waiting request again; its earlier call gets the same answer.
    earlier_request = self._waiting.pop(worker, None)
    if self._must_wait(request):
      answer = earlier_request.answer if earlier_request else Future()
      self._waiting[worker] = _WaitingRequest(request, data, answer)
      # A push shows that its worker has read the last reply: other requests may
      # have waited for that.
      self._answer_waiting()
      return answer
    # [4] Apply the request and reply. Then answer requests that waited for it.
    self._execute(request, data)
    reply = self._reply(request)
    if earlier_request:
      earlier_request.answer.set_result(reply)
    self._answer_waiting()
    return reply

  def _must_wait(self, request: Request) -> bool:
    """Whether a pull or push must wait for other workers."""
    pushing_workers = {
      worker
      for worker, waiting_request in self._waiting.items()
      if waiting_request.request.kind == requests.PUSH
    }
    if self._shard.must_wait_for_clock(request):
      return True
    return self._shard.must_wait_for_reads(request, pushing_workers)

  def _expel(self, worker: int) -> None:
    """Answers the open calls of a worker's earlier incarnation, which then
    exits."""
    self._sent_counts[worker] = 0
    if waiting_request := self._waiting.pop(worker, None):
      waiting_request.answer.set_result(EXPELLED)
    if poll := self._polls.pop(worker, None):
      poll.set_result([])

  def _execute(self, request: Request, data: bytes) -> None:
    """Logs a request, writes its trace row, and applies it."""
    # The request is logged before its row: a restarted shard ignores a request
    # without a row, but cannot apply a row without its request.
    self._log.append(data)
    self._write(self._shard.trace_row(request, self._now()))
    self._shard.apply(request)
    # An image is written only after a log of its size, so images take at most
    # about as much time as the log.
    if self._log.size > max(self._image_size, _MIN_LOG_BYTES):
      self._save()

  def _now(self) -> float:
    """Returns the time; times of rows do not decrease, even after a restart."""
    self._time = max(self._inside.clock(), self._time)
    return self._time

  def _write(self, event: Event) -> None:
    """Writes a row of the trace."""
    self._journal.append(event)
    self._rows += 1

  def _reply(self, request: Request) -> Reply:
    """Returns the reply to an applied request, with the rows not yet sent."""
    worker = request.worker
    start = self._sent_counts.get(worker, 0)
    if request.number == 0:  # JOIN: no row was sent to this incarnation
      start = 0
    reply = self._shard.reply(request, start)
    self._mark_sent(worker, reply.rows)
    return reply._replace(limit=self._limit)

  def _mark_sent(self, worker: int, rows: Rows) -> None:
    """Records that rows were sent to a worker; the last row is the newest."""
    if rows:
      self._sent_counts[worker] = rows[-1][0] + 1

  def _answer_waiting(self) -> None:
    """Answers requests that need not wait any more, and calls of `listen` for
    which there are rows."""
    n_waiting = -1
    # Applying a request may allow other requests.
    while len(self._waiting) != n_waiting:
      n_waiting = len(self._waiting)
      for worker, (request, data, answer) in [*self._waiting.items()]:
        if not self._must_wait(request):
          del self._waiting[worker]
          self._execute(request, data)
          answer.set_result(self._reply(request))
    for worker, poll in [*self._polls.items()]:
      if rows := self._take_unsent(worker):
        del self._polls[worker]
        poll.set_result(rows)

  def _take_unsent(self, worker: int) -> Rows:
    """Returns the unsent rows for a worker, and marks them as sent."""
    rows = self._shard.rows_from(worker, self._sent_counts.get(worker, 0))
    self._mark_sent(worker, rows)
    return rows

  def listen(
    self, worker: int, incarnation: int, expected: int
  ) -> Rows | Future[Rows]:
    """Long poll: returns rows that were not sent to a worker, once there are
    some.

    Args:
      worker: its index.
      incarnation: the incarnation of the worker; an earlier incarnation gets no
        rows.
      expected: number of the next row; the worker has all earlier rows.
    """
    if incarnation != self._shard.incarnation(worker):
      return []
    # A worker that calls again may have missed the rows of the last answer.
    self._sent_counts[worker] = expected
    if rows := self._take_unsent(worker):
      return rows
    # A worker has one open call: an earlier call has lost its connection.
    if earlier_poll := self._polls.pop(worker, None):
      earlier_poll.set_result([])
    answer: Future[Rows] = Future()
    self._polls[worker] = answer
    return answer

  # The limit of a pause, which shard 0 sends to workers in its replies.

  def halt(self) -> int:
    """Makes all workers halt after the same clock. Returns the number of jobs
    that each worker will have done then."""
    if self._limit is None:
      # Workers halt at the end of the clock that the fastest worker is in.
      most_done = max(self._shard.jobs_done().values(), default=0)
      self._limit = (most_done // self._clock_every + 1) * self._clock_every
    return self._limit

  def set_limit(self, limit: int | None) -> None:
    """Sets the number of jobs after which workers halt; None: no limit."""
    self._limit = limit

  def status(self) -> Status:
    """Returns the progress of workers."""
    return Status(self._shard.jobs_done(), set(self._waiting))

  def leave(self, worker: int) -> None:
    """Removes a worker that is not replaced, so that no worker waits for it.
    Does nothing for a worker that was removed before a kill of this shard."""
    if self._shard.has_left(worker):
      return
    self._expel(worker)
    incarnation = max(self._shard.incarnation(worker), 0)
    self._write(Event(self._now(), worker, NO_SEQ, incarnation, base.LEAVE))
    self._shard.leave(worker)
    self._answer_waiting()  # requests may have waited for this worker

  # Moving ranges, while all workers rest after the same clock.

  def load(self) -> tuple[int, dict[str, np.ndarray]]:
    """Returns (version of the division, load of each row by table)."""
    return self._shard.version, self._shard.load()

  def give(self, cuts: Cuts) -> Handover:
    """Returns the rows that other shards get if tables are cut at `cuts`."""
    # These are all unread rows, sent or not: an answer with rows may be lost.
    unread_rows = {
      worker: self._shard.rows_from(worker, 0)
      for worker in self._shard.jobs_done()
    }
    return Handover(self._shard.give(cuts), unread_rows)

  def move(self, data: bytes) -> None:
    """Applies a new division of the tables, unless the shard has it already."""
    request = requests.load_request(data)
    if not self._shard.is_done(request):
      self._execute(request, data)

  # State for the driver.

  def rows(self) -> dict[str, np.ndarray]:
    """Returns all rows of the shard, by table."""
    tables = self._shard.server.tables.items()
    return {name: np.asarray(table.whole()) for name, table in tables}

  def progress(self) -> tuple[int, int]:
    """Returns (messages applied, the slowest worker's clock)."""
    server = self._shard.server
    return server.version, server.slowest

  def image(self) -> tuple[int, bytes]:
    """Returns (rows of the trace, image of the shard)."""
    return self._rows, wire.dump(self._shard.pack())

  def close(self) -> None:
    """Closes the shard's files."""
    self._journal.close()
    self._log.close()
