"""The driver of a coordinator: it assigns jobs to workers and logs events.

Two subclasses define how time passes and where shards and workers run: in
simulated time (`simulation`), or in hosts (`asgd.live.sandblaster.driver`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from asgd import base
from asgd.orders.trace import NO_SEQ, Event
from asgd.sandblaster.commands import Command
from asgd.sandblaster.coordinator import (
  Begin,
  Coordinator,
  Pair,
  Request,
  State,
)
from asgd.sandblaster.portions import PortionJobs
from asgd.sandblaster.run_log import RunLog
from asgd.sandblaster.settings import Settings


class Counts(NamedTuple):
  """Counts of events over all evaluations."""

  copies: int = 0  # backup tasks started
  first: int = 0  # backup tasks that ended before the original
  recoveries: int = 0  # restarts of shards


class BatchWorker:
  """The state of one worker index, over the worker's incarnations. Attributes
  are keys of checkpoints."""

  def __init__(self):
    self.alive = True  # according to the rows of the trace
    self.fetched = -1  # the evaluation of the worker's parameters
    self.seq = 0  # number of the next job
    self.incarnation = 0  # the present incarnation, counted from 0
    # The running job, or None. Its first fields are evaluation, job, seq. Its
    # field `fresh` is whether the worker fetches parameters for the job, and
    # `loss` is set if a copy of the job has ended.
    self.ticket: Any = None

  def reset(self) -> None:
    """Clears the job and the parameters of a worker that has exited."""
    self.fetched, self.ticket = -1, None

  @property
  def is_idle(self) -> bool:
    """Whether the worker waits for a job."""
    return self.alive and self.ticket is None


class BatchWorkers:
  """The states of all workers; writes their rows of the trace."""

  def __init__(
    self,
    states: Sequence[Any],
    jobs: int,
    run_log: RunLog,
    clock: Callable[[], float],
  ):
    """Copies the list of states, but not the states.

    Args:
      states: a BatchWorker for each worker.
      jobs: the number of jobs in one evaluation.
      run_log: the log of the run.
      clock: returns the time of a row.
    """
    self.states = list(states)
    self._jobs, self._run_log, self._clock = jobs, run_log, clock

  def __getitem__(self, worker: int) -> Any:
    return self.states[worker]

  @property
  def idle(self) -> list[int]:
    """The workers that wait for a job."""
    return [worker for worker, state in enumerate(self.states) if state.is_idle]

  def write(self, worker: int, action: int) -> Event:
    """Writes a row of a worker, and returns it."""
    state = self.states[worker]
    # A row of the worker itself (JOIN, LEAVE) has the incarnation as its job.
    seq, job = NO_SEQ, state.incarnation
    if state.ticket is not None:
      evaluation, job, seq, *_ = state.ticket
      job += evaluation * self._jobs
    row = Event(self._clock(), worker, seq, job, action)
    self._run_log.write(row)
    return row

  def join(self, worker: int) -> None:
    """Writes a JOIN row, unless the worker is alive."""
    if not self.states[worker].alive:
      self.states[worker].alive = True
      self.write(worker, base.JOIN)

  def leave(self, worker: int) -> Any:
    """Writes the LOST and LEAVE rows of a worker that has exited. Returns its
    running job, or None."""
    state = self.states[worker]
    ticket = state.ticket
    if ticket is not None:
      self.write(worker, base.LOST)
    state.reset()
    if state.alive:
      state.alive = False
      self.write(worker, base.LEAVE)
      state.incarnation += 1
    return ticket


class BatchDriver:
  """Runs L-BFGS by carrying out the requests of the coordinator."""

  _shards: Any  # `Shards` in simulated time, `LiveShards` in hosts
  _workers: BatchWorkers

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    run_log: RunLog,
    notes: Mapping[str, Any] | None,
  ):
    """Starts a run, or resumes one from the notes of an earlier driver.

    Args:
      settings: the settings of the run.
      params: with the shapes and dtypes of parameters; no values are read.
      run_log: the log of the run.
      notes: from `_notes` of the earlier driver; None starts a run.
    """
    self._settings, self._params_like, self.run_log = settings, params, run_log
    notes = notes or {"state": State()._asdict(), "answers": []}
    self._evaluation_notes = notes  # of the start of this evaluation
    self._coordinator = coordinator_from(settings, notes)
    self._jobs = PortionJobs(
      settings.jobs, settings.backup, dict(notes.get("owners", ()))
    )
    self.counts = Counts(*notes.get("counts", ()))
    # The evaluation that workers compute, and job -> loss of its finished jobs.
    self._evaluation, self._losses = notes.get("evaluation", -1), {}

  # State.

  @property
  def now(self) -> float:
    """The time since the first job began."""
    raise NotImplementedError

  @property
  def request(self) -> Request | None:
    """The coordinator's open request; None at the end of the run."""
    return self._coordinator.request

  @property
  def received(self) -> int:
    """Count of received messages."""
    return len(self.run_log.messages)

  @property
  def state(self) -> State:
    """The coordinator's state after the last iterate."""
    return self._coordinator.state

  @property
  def ended(self) -> bool:
    """Whether the coordinator has ended the run."""
    return self.request is None

  @property
  def recoveries(self) -> int:
    """Count of restarts of shards."""
    return self.counts.recoveries + self._shards.recoveries

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

  # Running.

  def _run(self, until: int, wait: Callable[[], bool]) -> int:
    """Runs until `until` messages of the run are received, the coordinator
    ends, or `wait`, which waits for the next event, returns False: no time is
    left. Returns the count of received messages."""
    while not self.ended:
      request = self.request
      if isinstance(request, Command):
        self._answer(self._shards.execute(request))
      elif isinstance(request, Begin):
        self._begin(request.evaluation)
      elif request.job in self._losses:
        self._answer(self._losses[request.job])
      elif self.received >= until or not wait():
        break
    return self.received

  def _answer(self, value: float | None) -> None:
    """Answers the coordinator's request, and logs the result."""
    self._coordinator.answer(value)
    self.run_log.add_iterate(self._coordinator, self.now)

  def _begin(self, evaluation: int) -> None:
    """Starts an evaluation, at most once: a restarted coordinator repeats its
    request, which is then only acknowledged."""
    if evaluation > self._evaluation:
      self._prepare(evaluation)
      self._evaluation, self._losses = evaluation, {}
      self._jobs.begin()
      self._start_idle()
    self._answer(None)

  def _prepare(self, evaluation: int) -> None:
    """Saves the state and the jobs' parameters before an evaluation starts."""
    raise NotImplementedError

  def _start_idle(self) -> None:
    """Starts jobs on all idle workers."""
    for worker in self._workers.idle:
      self._start(worker)

  def _start(self, worker: int) -> None:
    """Starts the next job on an idle worker, if a job is left."""
    state, jobs = self._workers[worker], self._jobs
    job = jobs.take(worker)
    if job is None:
      return
    copies = self.counts.copies + (len(jobs.workers(job)) > 1)
    self.counts = self.counts._replace(copies=copies)
    fresh, state.fetched = state.fetched != self._evaluation, self._evaluation
    state.ticket = self._ticket(worker, job, fresh)
    state.seq += 1
    self._workers.write(worker, base.SEND if fresh else base.KEEP)

  def _ticket(self, worker: int, job: int, fresh: bool) -> Any:
    """Starts a job on a worker; returns the ticket."""
    raise NotImplementedError

  def _receive(
    self, worker: int, result: Callable[[bool], tuple[float, float]]
  ) -> None:
    """Processes the result of a worker's job.

    Args:
      worker: the index of the worker.
      result: (whether the message is accepted) -> (loss, norm of the gradient).
    """
    state, jobs = self._workers[worker], self._jobs
    ticket = state.ticket
    # A message is late if its evaluation has ended. It is recorded as received
    # and not accepted, like the second message of a job.
    evaluations_late, job = self._evaluation - ticket.evaluation, ticket.job
    copy_workers = jobs.workers(job) if not evaluations_late else ()
    accepted = not evaluations_late and jobs.finish(worker, job)
    loss, norm = result(accepted)
    if accepted:
      n_first = self.counts.first + (copy_workers[0] != worker)
      self.counts = self.counts._replace(first=n_first)
      self._losses[job] = loss
      for copy_worker in copy_workers:  # copies of the job have the same loss
        copy_ticket = self._workers[copy_worker].ticket
        self._workers[copy_worker].ticket = copy_ticket._replace(loss=loss)
    row, state.ticket = self._workers.write(worker, base.RECEIVE), None
    n_portions = len(self._settings.portions_of(job))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._params_like))
    self.run_log.receive(
      *(max(self.state.iteration, 0), row.time, worker, row.job),
      *(evaluations_late, 0.0, loss / n_portions, accepted, norm, 0.0),
      *(nbytes, nbytes * ticket.fresh, 0.0),
    )

  def _leave(self, worker: int) -> None:
    """Processes the exit of a worker; its job is assigned to another one."""
    ticket = self._workers.leave(worker)
    if ticket is not None and ticket.evaluation == self._evaluation:
      self._jobs.lose(worker, ticket.job)

  def _lose_coordinator(self) -> None:
    """Replaces the coordinator by one that starts from the notes saved at the
    start of this evaluation."""
    self._coordinator = coordinator_from(self._settings, self._evaluation_notes)

  def _notes(self) -> dict[str, Any]:
    """Returns the state, as JSON, from which another driver can resume."""
    return {
      "number": self._shards.number,
      "state": self.state._asdict(),
      "answers": list(self._coordinator.answers),
      "evaluation": self._evaluation,
      "owners": list(self._jobs.owners.items()),
      "counts": list(self.counts._replace(recoveries=self.recoveries)),
    }


def coordinator_from(
  settings: Settings, notes: Mapping[str, Any]
) -> Coordinator:
  """Returns a coordinator from its saved `state` and `answers`."""
  state = State(**notes["state"])
  pairs = tuple(Pair(*pair) for pair in state.pairs)
  state = state._replace(pairs=pairs)
  coordinator = Coordinator(settings, state, notes["answers"])
  coordinator.news.clear()  # the log has them already
  return coordinator
