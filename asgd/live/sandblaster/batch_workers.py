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

_STARTS = 3  # failed starts in a row after which the run ends


class LiveJob(NamedTuple):
  """The running job of a worker."""

  evaluation: int
  job: int
  seq: int
  fresh: bool  # whether the worker fetches parameters for the job
  began: float  # time of the first call for the job
  call: Call
  shards: Sequence[Host]  # hosts that the worker was given with the call
  loss: float = math.nan  # set if a copy of the job has ended


class LiveBatchWorker(BatchWorker):
  """The state of a worker in a host."""

  def __init__(self):
    super().__init__()
    self.party: Party | None = None  # the process; None: there is none
    self.joined = False  # whether the process has started
    self.waited = 0.0  # seconds that it has been starting
    self.late = 0  # incarnations in a row that took too long to start

  @property
  def idle(self) -> bool:
    """Whether the worker has started and has no job."""
    return self.joined and self.ticket is None

  @property
  def call(self) -> Call | None:
    """The call that the driver waits for: the start, the job, or None."""
    if self.party is not None and not self.joined:
      return self.party.made
    return self.ticket and self.ticket.call

  def reset(self) -> None:
    """Clears the state of the base class, and the process."""
    super().reset()
    self.party, self.joined = None, False


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
      count: N.
      jobs: in one evaluation.
      supervisor: of the processes.
      make: worker -> factory of the worker in its host.
      run_log: of the run.
    """
    self._supervisor, self._make = supervisor, make

    def clock():
      return max(supervisor.hosts.clock(), last_time(run_log.rows))

    states = [LiveBatchWorker() for _ in range(count)]
    super().__init__(states, jobs, run_log, clock)

  @property
  def starting(self) -> list[int]:
    """The workers that are starting."""
    return [
      worker
      for worker, state in enumerate(self.all)
      if state.party is not None and not state.joined
    ]

  def calls(self) -> dict[int, Call]:
    """Returns the calls that the driver waits for, by worker."""
    calls = {worker: state.call for worker, state in enumerate(self.all)}
    return {k: call for k, call in calls.items() if call is not None}

  def resume(self) -> None:
    """Restores the workers' states from the trace of an earlier driver, and
    writes LOST and LEAVE for its workers, which have all exited."""
    begun, ledger = bool(self._run_log.rows), follow(self._run_log.rows)
    leaves = [e.worker for e in self._run_log.rows if e.action == base.LEAVE]
    for worker, state in enumerate(self.all):
      state.seq = ledger.next_seq.get(worker, 0)
      state.incarnation, state.alive = leaves.count(worker), not begun
      for row in ledger.open[worker].values():
        lost = Event(ledger.time, worker, row.seq, row.job, base.LOST)
        self._run_log.write(lost)
      if begun and (worker in ledger.present or worker not in ledger.ended):
        left = Event(ledger.time, worker, NO_SEQ, state.incarnation, base.LEAVE)
        self._run_log.write(left)
        state.incarnation += 1

  def start(self, worker: int) -> None:
    """Starts the next incarnation of a worker, without waiting for it."""
    party = self._supervisor.start(WORKER, worker, self._make(worker))
    self.all[worker].party, self.all[worker].waited = party, 0.0

  def join(self, worker: int) -> None:
    """Records that a worker has started. Raises `HostExited` if its process
    exited, or the error of the start."""
    state = self.all[worker]
    assert state.party is not None
    state.party.made.result()
    state.joined, state.late = True, 0
    super().join(worker)

  def end_late(self, passed: float, limit: float) -> None:
    """Ends workers that take too long to start; they are then started again.

    Args:
      passed: seconds since the last call.
      limit: seconds that a start may take.

    Raises:
      ValueError: if a worker was late `_STARTS` times in a row.
    """
    for worker in self.starting:
      state = self.all[worker]
      state.waited += passed
      if state.party is None or state.waited <= limit:
        continue
      state.late += 1
      text = (
        f"worker {worker} took more than {limit:g} seconds to start: give it"
        " more with config.live.start_seconds"
      )
      if state.late == _STARTS:
        raise ValueError(text)
      self._supervisor.hosts.show(text)
      self._supervisor.end(state.party)
      state.waited = 0.0  # do not end it again before its exit is noticed

  def leave(self, worker: int) -> LiveJob | None:
    """Writes the rows of the base class, and drops the process."""
    self._supervisor.drop(self.all[worker].party)
    return super().leave(worker)
