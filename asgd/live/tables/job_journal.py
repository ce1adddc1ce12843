"""The trace, the records and the last message of a worker of tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asgd import base
from asgd.live.hosts import Inside
from asgd.live.spans import Span
from asgd.live.tables import files
from asgd.live.worker_files import WorkerJournal
from asgd.orders.trace import NO_SEQ, Event
from asgd.tables.requests import ClockMessage, JobRecord


class JobJournal(WorkerJournal):
  """Writes the files of one incarnation of a worker, and tracks its open
  jobs."""

  def __init__(
    self,
    inside: Inside,
    run: Path,
    index: int,
    *,
    resumes: bool = False,
    on_span: Callable[[int, Span], None] | None = None,
    memory: Path | None = None,
  ):
    """Opens the files, which may have rows of earlier incarnations.

    Args:
      inside: the clock, disk and `wait` of the worker's host.
      run: the folder of the run.
      index: the index of the worker.
      resumes: whether the worker was restored from an image, its stored state.
        Then it remains the incarnation that wrote the image.
      on_span: called with (index, span) for each span of the worker's time.
      memory: the folder of the run's memory; None: the last message of a worker
        that is killed is lost.
    """
    self._inside, self._on_span = inside, on_span or (lambda *_: None)
    # (seq, job) of jobs that have begun and are not received. If a clock has
    # several jobs, all of them are received at the end of the clock.
    self._open_jobs: list[tuple[int, int]] = []
    self._last_start: Event | None = None  # the row that began the last job
    journal_and_records = files.FILES.open(run, index, inside.disk)
    super().__init__(index, journal_and_records, inside.clock)
    # Incarnations count from 0, so the number of JOIN rows is the index of the
    # next one. A worker that resumes from an image has its JOIN row already.
    incarnations = files.count_incarnations(self._journal.events())
    self.incarnation = incarnations - resumes
    self._last_message: files.LastMessage | None = None
    if memory:
      self._last_message = files.LastMessage(
        memory, index, self.incarnation, inside.disk
      )

  @property
  def seq(self) -> int:
    """Sequence number of the job that began last."""
    return self._open_jobs[-1][0]

  def write(self, seq: int, job: int, action: int, **fields: Any) -> Event:
    """Writes a row, as the base class does. A killed worker writes no more."""
    self._inside.wait(0.0)  # raises if the worker was killed
    return super().write(seq, job, action, **fields)

  def join(self) -> None:
    """Writes the JOIN row of the incarnation."""
    self.write(NO_SEQ, self.incarnation, base.JOIN)

  def begin(self, job: int, action: int, **fields: Any) -> Event:
    """Writes and returns the row that begins a job."""
    self._last_start = row = self.write(
      self.started_jobs, job, action, **fields
    )
    self._open_jobs.append((row.seq, job))
    return row

  def receive(self, record: JobRecord) -> tuple[int, float]:
    """Writes the row and record of the first open job, which all shards have
    received. Returns (seq, time)."""
    seq, job = self._open_jobs.pop(0)
    row = self.write(seq, job, base.RECEIVE, loss=record.loss)
    # Write the row first: a kill may come before the record is written. Readers
    # allow a received job without a record, but no record without a row.
    self._sink.append(files.columns([(row.time, record)]))
    return seq, row.time

  def reject(self) -> None:
    """Writes REJECT for the last open job, because its update was not finite,
    and LOST for the earlier ones."""
    for seq, job in self._open_jobs:
      is_last = (seq, job) == self._open_jobs[-1]
      self.write(seq, job, base.REJECT if is_last else base.LOST)
    self._open_jobs = []

  def span(
    self, name: str, start: float, end: float, seq: int, job: int
  ) -> None:
    """Reports a span of the worker's time."""
    self._on_span(self.index, Span(name, start, end, seq, job))

  # The last message.

  def save_message(self, message: ClockMessage) -> None:
    """Saves a message that is about to be sent, if the run has a memory."""
    if self._last_message and self._last_start:
      self._last_message.write(self._last_start, message)

  def find_saved_message(self, jobs_done: int) -> ClockMessage | None:
    """Returns the saved message of an earlier incarnation.

    Args:
      jobs_done: number of the worker's finished jobs, the jobs of the message
        included.

    Returns:
      The message, with the records only of jobs that were not received; None if
      there is no such message, or all its jobs were received.
    """
    events = self._journal.events()
    if self._last_message is None:
      return None
    row_and_message = self._last_message.read(events)
    if row_and_message is None:
      return None
    row, message = row_and_message
    if message.done != jobs_done:
      return None
    received_jobs = {
      event.job for event in events if event.action == base.RECEIVE
    }
    records = [
      record for record in message.records if record.job not in received_jobs
    ]
    if not records:
      return None
    # Saved again for this incarnation, which may be killed, too.
    self._last_message.write(row, message)
    return message._replace(records=records)
