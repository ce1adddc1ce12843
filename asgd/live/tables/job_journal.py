"""The journal, the records and the last message of a worker of tables."""

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
  """Writes the files of one worker, and knows which of its jobs are open."""

  def __init__(
    self,
    inside: Inside,
    run: Path,
    index: int,
    *,
    resumes: bool = False,
    span: Callable[[int, Span], None] | None = None,
    memory: Path | None = None,
  ):
    """Opens the files, which may have rows of earlier incarnations.

    Args:
      inside: of the worker's host.
      run: the folder of the run.
      index: the worker's.
      resumes: whether the worker continues from an image, as the incarnation
        that it was.
      span: called with the worker's stretches of time.
      memory: the folder of the run's memory; None: the last message of a worker
        that is killed is lost.
    """
    self._inside, self._span = inside, span or (lambda *_: None)
    self._open: list[tuple[int, int]] = []  # (seq, job) that no shard has
    self._row: Event | None = None  # which began the last job
    opened = files.FILES.open(run, index, inside.disk)
    super().__init__(index, opened, inside.clock)
    self.life = files.lives_of(self._journal.events()) - resumes
    self._last = None
    if memory:
      self._last = files.LastMessage(memory, index, self.life, inside.disk)

  @property
  def seq(self) -> int:
    """Of the job that was begun last."""
    return self._open[-1][0]

  def write(self, seq: int, job: int, action: int, **more: Any) -> Event:
    """See the base; a worker that was killed writes no more."""
    self._inside.wait(0.0)
    return super().write(seq, job, action, **more)

  def join(self) -> None:
    """Writes that the incarnation begins."""
    self.write(NO_SEQ, self.life, base.JOIN)

  def begin(self, job: int, action: int, **fields) -> None:
    """Writes that a job begins."""
    self._row = self.write(self.seqs, job, action, **fields)
    self._open.append((self._row.seq, job))

  def receive(self, record: JobRecord) -> tuple[int, float]:
    """Writes that the shards have the first open job; returns (seq, time)."""
    seq, job = self._open.pop(0)
    row = self.write(seq, job, base.RECEIVE, loss=record.loss)
    self._sink.append(files.columns([(row.time, record)]))
    return seq, row.time

  def reject(self) -> None:
    """Writes that the last open job is refused, and the others are lost."""
    for seq, job in self._open:
      last = (seq, job) == self._open[-1]
      self.write(seq, job, base.REJECT if last else base.LOST)
    self._open = []

  def span(
    self, name: str, start: float, end: float, seq: int, job: int
  ) -> None:
    """Reports a stretch of the worker's time."""
    self._span(self.index, Span(name, start, end, seq, job))

  # The last message.

  def keep(self, message: ClockMessage) -> None:
    """Keeps a message that is about to be sent, if the run has a memory."""
    if self._last:
      self._last.write(self._row, message)

  def left(self, done: int) -> ClockMessage | None:
    """Returns the message of an earlier incarnation after which `done` jobs are
    done, if it was kept and some of its jobs were not received."""
    events = self._journal.events()
    left = self._last.read(events) if self._last else None
    if left is None or left[1].done != done:
      return None
    row, message = left
    received = {e.job for e in events if e.action == base.RECEIVE}
    records = [r for r in message.records if r.job not in received]
    if not records:
      return None
    self._last.write(row, message)
    return message._replace(records=records)
