"""A worker of tables in its host: its jobs, and its calls to shards.

The driver calls `run`, which works until the jobs are done, a pause begins, or
a shard is lost. In the last case the driver calls `run` again, with the host of
the restarted shard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asgd import base
from asgd.live import pace
from asgd.live.faults import Script
from asgd.live.hosts import Call, Host, HostExited, Inside
from asgd.live.tables.job_journal import JobJournal
from asgd.tables import wire
from asgd.tables.client import RowNotFinite
from asgd.tables.division import Cuts
from asgd.tables.requests import JobRecord
from asgd.tables.settings import Work
from asgd.tables.worker import Steps, TableWorker

# Results of `run`: all jobs are done, the limit is reached, a shard is lost, or
# the worker waits for ranges to move.
ENDED, HALTED, LOST, RESTS = "ended", "halted", "lost", "rests"
# An update was not finite, or a later incarnation has joined.
REJECTED, EXPELLED = "rejected", "expelled"


class NewDivision(NamedTuple):
  """A new division for a worker that rests."""

  cuts: Cuts
  # For each shard: (number, dumped rows) of the rows that the worker may not
  # have received.
  rows: Sequence[Sequence[tuple[int, bytes]]]


class WorkerHost:
  """One incarnation of a worker of tables."""

  def __init__(
    self,
    inside: Inside,
    make: Callable[[int, Work], TableWorker],
    work: Work,
    journal: JobJournal,
    *,
    shards: Mapping[int, Host],
    script: Script,
    slowdown: float = 1.0,
    image: bytes | None = None,
  ):
    """Starts a worker, or continues one from an image.

    Args:
      inside: the functions of the host.
      make: (incarnation, work) -> a worker without rows.
      work: the functions that compute the worker's jobs.
      journal: the worker's files.
      shards: shard -> its host.
      script: the script of injected faults.
      slowdown: factor on the time of a job.
      image: the image of the worker, from which it continues; `journal` was
        then opened with `resumes`.
    """
    self._inside, self._journal, self._script = inside, journal, script
    self._shards = {
      shard: inside.wrap_host(host) for shard, host in shards.items()
    }
    self._slowdown, self._work = slowdown, work
    work_with_faults = work._replace(gradient=self._gradient)
    self._worker = make(journal.incarnation, work_with_faults)
    self._steps: Steps | None = None  # of the join or job that is under way
    # Shard -> request without a reply, the open call with the request, and the
    # open long poll (`listen`).
    self._requests: dict[int, bytes] = {}
    self._calls: dict[int, Call] = {}
    self._polls: dict[int, Call] = {}
    self._limit: int | None = None  # jobs after which the worker halts
    self._span_end = self._inside.clock()  # time at which the last span ended
    if image is None:
      journal.join()
      self._resume(
        self._worker.join(
          find_saved=journal.find_saved_message,
          on_start=self._write_resent_start,
          on_done=self._write_receive,
        )
      )
    else:
      self._worker.unpack(wire.load(image))

  # Methods that the driver calls.

  def run(
    self,
    limit: int | None,
    restarted_hosts: Mapping[int, Host] | None = None,
    new_division: NewDivision | None = None,
  ) -> tuple[str, int]:
    """Does jobs until one of the results at the top of this module is reached.

    Args:
      limit: jobs after which the worker halts; None: no limit.
      restarted_hosts: shard -> host, for restarted shards. They are arguments
        of this call because separate calls may arrive in another order.
      new_division: the new division for which the worker has rested.

    Returns:
      (result, the lost shard if LOST, else 0).
    """
    self._limit = limit
    for shard, host in (restarted_hosts or {}).items():
      self._shards[shard] = self._inside.wrap_host(host)
      # Calls at the earlier host get no reply: they are repeated.
      self._calls.pop(shard, None)
      self._polls.pop(shard, None)
    # The driver has collected the rows that shards had not sent to the worker.
    if new_division is not None:
      for shard, rows in enumerate(new_division.rows):
        self._worker.sessions.receive_rows(shard, rows)
      self._worker.divide(new_division.cuts)
    try:
      return self._run(), 0
    except HostExited as error:
      return LOST, error.index
    except RowNotFinite:
      self._journal.reject()
      return REJECTED, 0

  def _run(self) -> str:
    """Does jobs until `run` must return. Returns the result of `run`."""
    while True:
      # [1] Continue a join or job that waits for replies. After a return with
      # LOST, the replies of the other shards are still stored.
      if self._steps is not None:
        if not self._await_replies():
          return EXPELLED
        self._resume(self._steps)
        continue
      # [2] Return if there is no job to start.
      worker = self._worker
      if worker.next_job is None:
        return ENDED
      if worker.must_rest:
        return RESTS
      if self._limit is not None and worker.done >= self._limit:
        return HALTED
      # [3] Start the next job on the rows that have arrived.
      self._pass_rows()
      self._resume(
        worker.job(
          self._write_start,
          self._write_receive,
          self._inject_faults,
          self._journal.save_message,
        )
      )

  def image(self) -> tuple[int, int, bytes]:
    """Returns (number of trace rows, number of records, image of the worker).
    Called between clocks."""
    return *self._journal.counts(), wire.dump(self._worker.pack())

  def held_counts(self) -> tuple[int, int]:
    """Returns counts of rows: (held back by filters, dropped by filters)."""
    return self._worker.held_counts()

  def close(self) -> None:
    """Closes the worker's files."""
    self._journal.close()

  # Requests.

  def _resume(self, steps: Steps) -> None:
    """Runs to the next requests, or to the end of the join or job."""
    new_requests = next(steps, None)
    self._steps = None if new_requests is None else steps
    self._requests = dict(new_requests or {})

  def _await_replies(self) -> bool:
    """Sends the requests and waits for the replies. Returns False if a later
    incarnation of the worker has joined."""
    # [1] Send all requests before the first reply is awaited, also if a shard
    # was lost. A shard may delay the reply to a push until other workers have
    # pushed to it. If one worker awaited shard 0 before it sent to shard 1,
    # and another worker did the reverse, they would deadlock.
    for shard, data in self._requests.items():
      if shard not in self._calls:
        self._calls[shard] = self._shards[shard].call("handle", data)
    # [2] A lost shard raises HostExited at once: the calls to later shards stay
    # open, and the next `run` awaits them.
    for shard in [*self._requests]:
      reply = self._calls.pop(shard).result()
      if reply.number < 0:
        return False
      self._worker.sessions.receive(shard, reply)
      del self._requests[shard]
      if shard == 0:  # this shard sets the limit of a pause
        self._limit = reply.limit
    # [3] A reply may refer to rows of an answer to `listen`. That answer may be
    # lost or on its way.
    for shard in self._shards:
      while self._worker.sessions.lacks_rows(shard):
        self._listen(shard)
        self._receive_rows(shard)
    return True

  def _listen(self, shard: int) -> None:
    """Opens a long poll at a shard, if none is open."""
    if shard not in self._polls:
      sessions = self._worker.sessions
      expected = sessions.available(shard)
      self._polls[shard] = self._shards[shard].call(
        "listen", self._journal.index, sessions.incarnation, expected
      )

  def _receive_rows(self, shard: int) -> None:
    """Waits for the open long poll at a shard, and receives its rows."""
    call = self._polls.pop(shard)
    self._worker.sessions.receive_rows(shard, call.result())

  def _pass_rows(self) -> None:
    """Passes the rows that have arrived to the worker, and opens long polls."""
    for shard in self._shards:
      if self._worker.gets_server_push:
        if shard in self._polls and self._polls[shard].done():
          self._receive_rows(shard)
        self._listen(shard)
      self._worker.take(shard, self._worker.sessions.available(shard))

  # A job.

  def _write_start(self, action: int) -> float:
    """Writes the row of a job that begins, with the number of rows taken from
    each shard. Returns the time of the row."""
    job = self._worker.next_job
    assert job is not None
    rows_taken = tuple(map(float, self._worker.sessions.taken))
    return self._journal.begin(job, action, totals=rows_taken).time

  def _gradient(
    self,
    rows: Mapping[str, Any],
    batch: base.Batch,
    keys: Mapping[str, Any],
    worker: int,
    job: int,
  ) -> tuple[float, Any]:
    """Computes a job as `Work.gradient`, with spans, faults and slowdown."""
    clock, wait = self._inside.clock, self._inside.wait
    seq = self._journal.seq
    self._script.apply_to_job(worker, seq)
    start = clock()
    self._journal.span("fetch", self._span_end, start, seq, job)
    loss, gradient = self._work.gradient(rows, batch, keys, worker, job)
    pace.slow_down(self._slowdown, start, clock=clock, wait=wait)
    wait(0.0)  # a worker that was killed meanwhile sends nothing
    self._span_end = clock()
    self._journal.span("compute", start, self._span_end, seq, job)
    return loss, gradient

  def _inject_faults(self, gradient: Any) -> Any:
    """Returns a gradient with the injected faults of its job."""
    journal = self._journal
    return self._script.apply_to_message(journal.index, journal.seq, gradient)

  def _write_resent_start(self, record: JobRecord) -> None:
    """Writes the row that begins a job of a saved message. The row has no
    `totals`, as the job is not computed again."""
    self._journal.begin(record.job, base.SEND)

  def _write_receive(self, record: JobRecord) -> None:
    """Writes the row and record of a job that all shards have."""
    seq, time = self._journal.receive(record)
    start, self._span_end = self._span_end, time
    self._journal.span("push", start, time, seq, record.job)
