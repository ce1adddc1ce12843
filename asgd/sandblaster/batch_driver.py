"""The driver of a coordinator: it hands out jobs and logs events.

Two subclasses say how time passes and where shards and workers run: in
simulated time (`simulation`), or in hosts (`asgd.live.sandblaster.driver`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from asgd import base
from asgd.orders.trace import NO_SEQ, Event
from asgd.sandblaster.book import RunLog
from asgd.sandblaster.commands import Command
from asgd.sandblaster.coordinator import (
  Begin,
  Coordinator,
  Pair,
  Request,
  State,
)
from asgd.sandblaster.portions import PortionJobs
from asgd.sandblaster.settings import Settings


class Counts(NamedTuple):
  """Events over all evaluations."""

  copies: int = 0  # backup tasks
  first: int = 0  # backup tasks that ended before the original
  recoveries: int = 0  # shards that were restarted


class Place:
  """The state of one worker rank, over its incarnations."""

  def __init__(self):
    self.alive = True  # by the rows of the trace
    self.fetched = -1  # the evaluation whose parameters the worker has
    self.seq = 0  # number of the next job
    self.holder = 0  # number of earlier incarnations
    # The running job: evaluation, job, seq, `fresh` if the parameters are
    # fetched for it, and `loss` if a copy of the job has ended.
    self.ticket: Any = None

  def empty(self) -> None:
    """Drops the job and the parameters of a worker that has exited."""
    self.fetched, self.ticket = -1, None

  @property
  def idle(self) -> bool:
    """Whether the worker waits for a job."""
    return self.alive and self.ticket is None


class Places:
  """The state of all workers; writes their rows of the trace."""

  def __init__(
    self,
    places: Sequence[Any],
    jobs: int,
    book: RunLog,
    clock: Callable[[], float],
  ):
    """`jobs` is the number of jobs in one evaluation."""
    self.all = list(places)
    self._jobs, self._book, self._clock = jobs, book, clock

  def __getitem__(self, worker: int) -> Any:
    return self.all[worker]

  @property
  def idle(self) -> list[int]:
    """The workers that wait for a job."""
    return [worker for worker, place in enumerate(self.all) if place.idle]

  def write(self, worker: int, action: int) -> Event:
    """Writes a row of a worker, and returns it."""
    place = self.all[worker]
    seq, job = NO_SEQ, place.holder
    if place.ticket is not None:
      evaluation, job, seq, *_ = place.ticket
      job += evaluation * self._jobs
    row = Event(self._clock(), worker, seq, job, action)
    self._book.write(row)
    return row

  def join(self, worker: int) -> None:
    """Writes a JOIN row, unless the worker is alive."""
    if not self.all[worker].alive:
      self.all[worker].alive = True
      self.write(worker, base.JOIN)

  def empty(self, worker: int) -> Any:
    """Writes that a worker has exited; returns its running job, or None."""
    place = self.all[worker]
    ticket = place.ticket
    if ticket is not None:
      self.write(worker, base.LOST)
    place.empty()
    if place.alive:
      place.alive = False
      self.write(worker, base.LEAVE)
      place.holder += 1
    return ticket


class BatchDriver:
  """Runs L-BFGS: carries out the requests of the coordinator."""

  _shards: Any  # `Shards` in simulated time, `LiveShards` in hosts
  _places: Places

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    book: RunLog,
    notes: Mapping[str, Any] | None,
  ):
    """Starts, or resumes from `notes` of an earlier driver. Only the shapes and
    dtypes of `params` are read."""
    self._settings, self._like, self.book = settings, params, book
    notes = notes or {"state": State()._asdict(), "answers": []}
    self._begun = notes  # at the start of this evaluation
    self._coordinator = coordinator_from(settings, notes)
    self._jobs = PortionJobs(
      settings.jobs, settings.backup, dict(notes.get("owners", ()))
    )
    self.counts = Counts(*notes.get("counts", ()))
    # The evaluation that workers compute, and job -> its loss.
    self._current, self._losses = notes.get("evaluation", -1), {}

  # Reading.

  @property
  def now(self) -> float:
    """The time since the first job began."""
    raise NotImplementedError

  @property
  def request(self) -> Request | None:
    """The open request of the coordinator; None at the end."""
    return self._coordinator.request

  @property
  def received(self) -> int:
    """The number of messages."""
    return len(self.book.messages)

  @property
  def state(self) -> State:
    """The state of the coordinator after the last iterate."""
    return self._coordinator.state

  @property
  def ended(self) -> bool:
    """Whether the coordinator has no request any more."""
    return self.request is None

  @property
  def recoveries(self) -> int:
    """The number of restarts of shards."""
    return self.counts.recoveries + self._shards.recoveries

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

  # Running.

  def _run(self, until: int, wait: Callable[[], bool]) -> int:
    """Runs until `until` messages are received or the coordinator ends, and
    returns the number of messages. `wait` waits for the next event; it returns
    False when no time is left."""
    while not self.ended:
      request = self.request
      if isinstance(request, Command):
        self._answer(self._shards.obey(request))
      elif isinstance(request, Begin):
        self._begin(request.evaluation)
      elif request.job in self._losses:
        self._answer(self._losses[request.job])
      elif self.received >= until or not wait():
        break
    return self.received

  def _answer(self, value):
    self._coordinator.answer(value)
    self.book.note(self._coordinator, self.now)

  def _begin(self, evaluation):
    """Starts an evaluation. A coordinator that was killed repeats its request:
    an evaluation that has begun is acknowledged and not started again."""
    if evaluation > self._current:
      self._prepare(evaluation)
      self._current, self._losses = evaluation, {}
      self._jobs.begin()
      self._start_idle()
    self._answer(None)

  def _prepare(self, evaluation: int) -> None:
    """Saves the state before an evaluation and the parameters of its jobs."""
    raise NotImplementedError

  def _start_idle(self):
    for worker in self._places.idle:
      self._start(worker)

  def _start(self, worker):
    """Gives an idle worker a job, if there is one."""
    place, jobs = self._places[worker], self._jobs
    job = jobs.take(worker)
    if job is None:
      return
    copies = self.counts.copies + (len(jobs.workers(job)) > 1)
    self.counts = self.counts._replace(copies=copies)
    fresh, place.fetched = place.fetched != self._current, self._current
    place.ticket = self._ticket(worker, job, fresh)
    place.seq += 1
    self._places.write(worker, base.SEND if fresh else base.KEEP)

  def _ticket(self, worker: int, job: int, fresh: bool) -> Any:
    """Starts a job on a worker; returns the ticket."""
    raise NotImplementedError

  def _receive(
    self, worker: int, result: Callable[[bool], tuple[float, float]]
  ) -> None:
    """Takes the result of a worker's job. `result(accepted)` returns the loss
    and the norm of its gradient."""
    place, jobs = self._places[worker], self._jobs
    ticket = place.ticket
    late, job = self._current - ticket.evaluation, ticket.job
    others = jobs.workers(job) if not late else ()
    accepted = not late and jobs.finish(worker, job)
    loss, norm = result(accepted)
    if accepted:
      first = self.counts.first + (others[0] != worker)
      self.counts = self.counts._replace(first=first)
      self._losses[job] = loss
      for other in others:  # a copy of it has the same loss
        copy = self._places[other].ticket
        self._places[other].ticket = copy._replace(loss=loss)
    row, place.ticket = self._places.write(worker, base.RECEIVE), None
    count = len(self._settings.portions_of(job))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._like))
    self.book.receive(
      *(max(self.state.iteration, 0), row.time, worker, row.job),
      *(late, 0.0, loss / count, accepted, norm, 0.0),
      *(nbytes, nbytes * ticket.fresh, 0.0),
    )

  def _empty(self, worker):
    """Takes the exit of a worker; its job is given to another one."""
    ticket = self._places.empty(worker)
    if ticket is not None and ticket.evaluation == self._current:
      self._jobs.lose(worker, ticket.job)

  def _lose_coordinator(self):
    """Kills the coordinator. Its successor starts from the journal at the start
    of this evaluation."""
    self._coordinator = coordinator_from(self._settings, self._begun)

  def _notes(self) -> dict[str, Any]:
    """Returns the state that another driver resumes from, as JSON."""
    return {
      "number": self._shards.number,
      "state": self.state._asdict(),
      "answers": list(self._coordinator.answers),
      "evaluation": self._current,
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
  coordinator.news.clear()  # they are in the log already
  return coordinator
