"""What drives a coordinator: it hands out jobs and writes down what happens.

A class below it says how time passes, and where shards and workers are: in
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
  """What happened, over all evaluations."""

  copies: int = 0  # backup tasks
  first: int = 0  # of these, that came first
  recoveries: int = 0  # of shards


class Place:
  """The place of a worker."""

  def __init__(self):
    self.alive = True  # as the trace has it
    self.fetched = -1  # the evaluation whose parameters its worker has
    self.seq = 0  # of the next job
    self.holder = 0  # how many came before its worker
    # The job that its worker is at: a tuple of evaluation, job and seq, with
    # `fresh` if the parameters are fetched for it, and `loss` of a copy of it
    # that has ended.
    self.ticket: Any = None

  def empty(self) -> None:
    """Drops what its worker had, which has exited."""
    self.fetched, self.ticket = -1, None

  @property
  def idle(self) -> bool:
    """Whether its worker waits for a job."""
    return self.alive and self.ticket is None


class Places:
  """The places of all workers, and their rows of the trace."""

  def __init__(
    self,
    places: Sequence[Any],
    jobs: int,
    book: RunLog,
    clock: Callable[[], float],
  ):
    """`jobs` are those of an evaluation."""
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
    """Writes that a place has a worker, unless it has one."""
    if not self.all[worker].alive:
      self.all[worker].alive = True
      self.write(worker, base.JOIN)

  def empty(self, worker: int) -> Any:
    """Writes that a worker has exited; returns the job that it was at."""
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
  """Runs L-BFGS: gives what the coordinator asks for to shards and workers."""

  _shards: Any  # Shards, or what they are for a live run
  _places: Places

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    book: RunLog,
    notes: Mapping[str, Any] | None,
  ):
    """Starts, or goes on from the notes of another; of the parameters shapes
    and dtypes are read."""
    self._settings, self._like, self.book = settings, params, book
    notes = notes or {"state": State()._asdict(), "answers": []}
    self._begun = notes  # of the beginning of this evaluation
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
    """What the coordinator asks for."""
    return self._coordinator.request

  @property
  def received(self) -> int:
    """Messages."""
    return len(self.book.messages)

  @property
  def state(self) -> State:
    """What the coordinator knows of the last iterate."""
    return self._coordinator.state

  @property
  def ended(self) -> bool:
    """Whether the coordinator has nothing more to ask for."""
    return self.request is None

  @property
  def recoveries(self) -> int:
    """How often a shard came back."""
    return self.counts.recoveries + self._shards.recoveries

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

  # Running.

  def _run(self, until: int, wait: Callable[[], bool]) -> int:
    """Goes on until so many messages are received or the coordinator ends;
    returns how many are. `wait` lets something happen; False: no time is
    left."""
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
    """Workers that are idle start on new parameters; a coordinator that asks
    for an evaluation again, as it was killed, is told that it has begun."""
    if evaluation > self._current:
      self._prepare(evaluation)
      self._current, self._losses = evaluation, {}
      self._jobs.begin()
      self._start_idle()
    self._answer(None)

  def _prepare(self, evaluation: int) -> None:
    """Notes the beginning of an evaluation, and what workers are to fetch."""
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
    """Makes a worker begin a job; returns its ticket."""
    raise NotImplementedError

  def _receive(
    self, worker: int, result: Callable[[bool], tuple[float, float]]
  ) -> None:
    """The job of a worker has ended; `result` returns its loss and its norm,
    told whether it is accepted."""
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
    """A worker has exited; its job goes to another."""
    ticket = self._places.empty(worker)
    if ticket is not None and ticket.evaluation == self._current:
      self._jobs.lose(worker, ticket.job)

  def _lose_coordinator(self):
    """The coordinator is killed; its journal is that of the beginning of this
    evaluation."""
    self._coordinator = coordinator_from(self._settings, self._begun)

  def _notes(self) -> dict[str, Any]:
    """Returns what another needs to go on, as JSON."""
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
  """Returns the coordinator whose `state` and `answers` were noted."""
  state = State(**notes["state"])
  pairs = tuple(Pair(*pair) for pair in state.pairs)
  state = state._replace(pairs=pairs)
  coordinator = Coordinator(settings, state, notes["answers"])
  coordinator.news.clear()  # the log has them
  return coordinator
