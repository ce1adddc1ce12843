"""Workers of a live run: their processes, jobs and rows of the trace."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asgd import base
from asgd.live.hosts import Call, Host, Make
from asgd.live.hosts.base import WORKER
from asgd.live.sandblaster.run_log import LiveRunLog, last_time
from asgd.live.supervisor import Party, Supervisor
from asgd.orders.trace import NO_SEQ, Event, follow
from asgd.sandblaster.batch_driver import BatchWorker, BatchWorkers

_MAX_LATE_STARTS = 3  # late starts of a worker in a row that end the run


class LiveJob(NamedTuple):
  """The running job of a worker."""

  evaluation: int
  job: int
  seq: int
  fresh: bool  # whether the worker fetches parameters for the job
  start: float  # time of the first call for the job
  call: Call
  shards: Sequence[Host]  # hosts that the driver passed with the call
  loss: float = math.nan  # set if a copy of the job has ended


class LiveBatchWorker(BatchWorker):
  """The state of a worker in a host."""

  def __init__(self):
    super().__init__()
    self.party: Party | None = None  # the process; None: no process
    self.has_joined = False  # the process has created its worker
    self.start_seconds = 0.0  # time that its start has taken so far
    self.late_starts = 0  # incarnations in a row that took too long to start

  @property
  def is_idle(self) -> bool:
    """Whether the worker has started and has no job."""
    return self.has_joined and self.ticket is None

  @property
  def call(self) -> Call | None:
    """The open call of the worker: its start, its job, or None."""
    if self.party is not None and not self.has_joined:
      return self.party.make_call
    return self.ticket and self.ticket.call

  def reset(self) -> None:
    """Clears the state of the base class, and the process."""
    super().reset()
    self.party, self.has_joined = None, False


class LiveBatchWorkers(BatchWorkers):
  """The states of all workers of a run."""

  def __init__(
    self,
    count: int,
    jobs: int,
    supervisor: Supervisor,
    make: Callable[[int], Make],
    run_log: LiveRunLog,
  ):
    """Prepares the states of all workers, without starting any.

    Args:
      count: the number of workers.
      jobs: the number of jobs in one evaluation.
      supervisor: the supervisor of the processes.
      make: worker -> factory of the worker in its host.
      run_log: the log of the run.
    """
    self._supervisor, self._make = supervisor, make

    def clock() -> float:
      # Times in the trace must not decrease, and the clock of an earlier driver
      # may have been ahead.
      return max(supervisor.hosts.clock(), last_time(run_log.rows))

    states = [LiveBatchWorker() for _ in range(count)]
    super().__init__(states, jobs, run_log, clock)

  @property
  def starting_workers(self) -> list[int]:
    """The indices of the workers with processes that are starting."""
    return [
      worker
      for worker, state in enumerate(self.states)
      if state.party is not None and not state.has_joined
    ]

  def calls(self) -> dict[int, Call]:
    """Returns worker -> its open call."""
    calls = enumerate(state.call for state in self.states)
    return {worker: call for worker, call in calls if call is not None}

  def resume(self) -> None:
    """Restores the workers' states from the trace of an earlier driver, and
    writes LOST and LEAVE for its workers, which have all exited."""
    rows = self._run_log.rows
    has_rows, ledger = bool(rows), follow(rows)
    leavers = [row.worker for row in rows if row.action == base.LEAVE]
    for worker, state in enumerate(self.states):
      state.seq = ledger.next_seq.get(worker, 0)
      # A new run has no JOIN rows: all workers count as alive from the start.
      state.incarnation, state.alive = leavers.count(worker), not has_rows
      for start_row in ledger.open[worker].values():
        lost_row = Event(
          ledger.time, worker, start_row.seq, start_row.job, base.LOST
        )
        self._run_log.write(lost_row)
      # A worker without a row counts as alive, too.
      if has_rows and (worker in ledger.present or worker not in ledger.ended):
        self._run_log.write(
          Event(ledger.time, worker, NO_SEQ, state.incarnation, base.LEAVE)
        )
        state.incarnation += 1

  def start(self, worker: int) -> None:
    """Starts the next incarnation of a worker, without waiting for it."""
    party = self._supervisor.start(WORKER, worker, self._make(worker))
    self.states[worker].party, self.states[worker].start_seconds = party, 0.0

  def join(self, worker: int) -> None:
    """Records that a worker has started. Raises `HostExited` if its process
    exited, or the error of the start."""
    state = self.states[worker]
    assert state.party is not None
    state.party.make_call.result()
    state.has_joined, state.late_starts = True, 0
    super().join(worker)

  def end_late(self, elapsed: float, limit: float) -> None:
    """Ends workers that take too long to start; the driver then restarts them.

    Args:
      elapsed: seconds since the last call of this method.
      limit: seconds that a start may take.

    Raises:
      ValueError: if a worker was late `_MAX_LATE_STARTS` times in a row.
    """
    for worker in self.starting_workers:
      state = self.states[worker]
      state.start_seconds += elapsed
      if state.party is None or state.start_seconds <= limit:
        continue
      state.late_starts += 1
      text = (
        f"worker {worker} took more than {limit:g} seconds to start: give it"
        " more with config.live.start_seconds"
      )
      if state.late_starts == _MAX_LATE_STARTS:
        raise ValueError(text)
      self._supervisor.hosts.show(text)
      self._supervisor.end(state.party)
      # Do not end the worker again before the driver notices its exit.
      state.start_seconds = 0.0

  def leave(self, worker: int) -> LiveJob | None:
    """Writes the rows as the base class does, and drops the process."""
    self._supervisor.drop(self.states[worker].party)
    return super().leave(worker)
