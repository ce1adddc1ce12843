"""Sandblaster in simulated time: workers take drawn durations.

The coordinator gives its next request; commands to shards take no time,
jobs take the time of their portions. What happens is written down as rows of a
trace: SEND where a worker fetches the parameters, KEEP where it starts another
job on those that it has, RECEIVE where its message comes. A message that comes
after the first of its job is received too, and not accepted.

Checkpoints are of the beginning of an evaluation: what comes after it happens
again, bit by bit.
"""

import heapq
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import base, sharding
from asgd.orders.durations import Durations
from asgd.orders.trace import NO_SEQ, Event
from asgd.sandblaster.book import Lengths, RunLog
from asgd.sandblaster.commands import Command
from asgd.sandblaster.coordinator import (
  Begin,
  Coordinator,
  Pair,
  State,
  message_name,
)
from asgd.sandblaster.portions import PortionJobs, Work, make_sums, message_norm
from asgd.sandblaster.settings import COORDINATOR, SHARD, WORKER, Settings
from asgd.sandblaster.shard import Image, Shards

_RETURN, _FINISH = "return", "finish"  # of a killed worker, and of a job


class PortionTicket(NamedTuple):
  """A job that a worker has started."""

  evaluation: int
  job: int
  seq: int
  finish: float  # when it will be done
  fresh: bool  # the parameters were fetched for it
  loss: float = math.nan  # of a copy of it that ended before


class _BatchWorker:
  """A worker in simulated time."""

  def __init__(self, stream):
    self._stream = stream
    self._drawn = 0  # durations so far
    self.seq = 0  # of the next job
    self.holder = 0  # how many came before it in this place
    self.empty()
    self.alive = True

  def empty(self) -> None:
    """Its worker is killed, with all that it has."""
    self.alive, self.fetched = False, -1  # evaluation whose parameters it has
    self.ticket: PortionTicket | None = None
    self._ready: dict[int, float] = {}  # job -> when its data are here
    self._loader = 0.0  # when all that it loads is here

  def draw(self, count: int) -> float:
    """The time of so many portions."""
    self._drawn += count
    return sum(itertools.islice(self._stream, count))

  def load(self, job: int, needs: float, now: float) -> float:
    """Returns when the data of a job are here, which are kept; loading them
    takes so long, one after the other."""
    if job not in self._ready:
      self._loader = max(now, self._loader) + needs
      self._ready[job] = self._loader
    return self._ready[job]

  def pack(self) -> dict[str, Any]:
    """Returns it as JSON."""
    ready = list(self._ready.items())
    return {**vars(self), "_stream": None, "_ready": ready}

  def unpack(self, packed: Mapping[str, Any]) -> None:
    """Becomes what was packed; its stream is at the beginning."""
    ready, stream = dict(packed["_ready"]), self._stream
    vars(self).update(packed, _stream=stream, _ready=ready, _drawn=0)
    self.draw(packed["_drawn"])
    self.ticket = self.ticket and PortionTicket(*self.ticket)


class _Evaluation(NamedTuple):
  """What workers compute at present."""

  number: int  # of the evaluation
  params: Any = None  # on the device
  losses: dict[int, float] = {}  # job -> its, once it is known


class Counts(NamedTuple):
  """What happened, over all evaluations."""

  copies: int = 0  # backup tasks
  first: int = 0  # of these, that came first
  recoveries: int = 0  # of shards


class Saved(NamedTuple):
  """All there is when an evaluation begins."""

  number: int  # grows
  arrays: dict[str, Any]
  notes: dict[str, Any]  # JSON


class SandblasterSimulation:
  """A run of Sandblaster L-BFGS.

  Example:
    Two workers, one of them three times as slow, and a batch of six portions.

    >>> import jax
    >>> import numpy as np
    >>> from asgd import orders
    >>> from asgd.sandblaster import Settings, SandblasterSimulation
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> clock = orders.durations.constant(slowdown=[1, 3])
    >>> run = SandblasterSimulation(
    ...   Settings(portions=6), np.float32([3.0, 4.0]), work, clock, workers=2
    ... )
    >>> run.advance(until=14)
    14
    >>> [(each.time, each.loss) for each in run.book.iterates]
    [(5.0, 87.5), (10.0, 56.0)]
    >>> run.book.records().worker[:6].tolist()  # of 7, one is a late copy
    [0, 0, 1, 0, 0, 0]
  """

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    work: Work,
    durations: Durations,
    *,
    workers: int,
    saved: Saved | None = None,
  ):
    """Starts from parameters, which are NumPy's, or resumes from what was
    saved. `work` is the loss and the gradient of a portion, a mean."""
    self._settings, self._add_up = settings, make_sums(work)
    self._like = params
    self._places = [_BatchWorker(durations.stream(i)) for i in range(workers)]
    self.book = RunLog()
    self.counts = Counts()
    self.now = 0.0  # the simulated time
    # What is to come: (time, number, what, to whom).
    self._agenda: list[tuple[float, int, str, int]] = []
    self._pushed = 0
    self._current = _Evaluation(-1)
    if saved is None:
      self._shards = Shards(params, settings.shards, start={"point": params})
      self._coordinator = Coordinator(settings)
      self._jobs = PortionJobs(settings.jobs, settings.backup)
      for failure in settings.failures:
        self._push(failure.time, failure.what, failure.index)
    else:
      self._unpack(saved)
    self._saved = self._pack()

  # Reading.

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
    return self._coordinator.request is None

  @property
  def recoveries(self) -> int:
    """How often a shard came back."""
    return self.counts.recoveries + self._shards.recoveries

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

  # Running.

  def advance(self, until: int) -> int:
    """Simulates until so many messages are received or the coordinator ends;
    returns how many are."""
    while not self.ended:
      request = self._coordinator.request
      if isinstance(request, Command):
        self._answer(self._shards.obey(request))
      elif isinstance(request, Begin):
        self._begin(request.evaluation)
      elif request.job in self._current.losses:
        self._answer(self._current.losses[request.job])
      elif self.received >= until:
        break
      else:
        self._happen()
    return self.received

  def _answer(self, value):
    self._coordinator.answer(value)
    self.book.note(self._coordinator, self.now)

  def _begin(self, evaluation):
    """Workers that are idle start on new parameters; one that asks for an
    evaluation again, as it was killed, is told that it has begun."""
    if evaluation > self._current.number:
      self._saved = self._pack()
      self._shards.forget(self._shards.number)
      trial = jax.tree.map(jnp.asarray, self._shards.read("trial"))
      self._current = _Evaluation(evaluation, trial, {})
      self._jobs.begin()
      for worker, place in enumerate(self._places):
        if place.alive and place.ticket is None:
          self._start(worker)
    self._answer(None)

  def _start(self, worker):
    """Gives an idle worker a job, if there is one."""
    place, jobs, settings = self._places[worker], self._jobs, self._settings
    job = jobs.take(worker)
    if job is None:
      return
    copies = self.counts.copies + (len(jobs.workers(job)) > 1)
    self.counts = self.counts._replace(copies=copies)
    current = self._current.number
    fresh, place.fetched = place.fetched != current, current
    begin = max(self.now, self._load(place, job))
    if settings.prefetch and (coming := jobs.peek(worker)) is not None:
      self._load(place, coming)
    finish = begin + place.draw(len(settings.portions_of(job)))
    place.ticket = PortionTicket(current, job, place.seq, finish, fresh)
    self._write(worker, base.SEND if fresh else base.KEEP)
    place.seq += 1
    self._push(finish, _FINISH, worker)

  def _load(self, place, job):
    """Returns when the data of a job are with a worker."""
    settings = self._settings
    needs = settings.loading * len(settings.portions_of(job))
    return place.load(job, needs, self.now)

  def _write(self, worker, action):
    place = self._places[worker]
    seq, job = NO_SEQ, place.holder
    if place.ticket is not None:
      evaluation, job, seq, *_ = place.ticket
      job += evaluation * self._settings.jobs
    self.book.write(Event(self.now, worker, seq, job, action))

  def _push(self, time, what, index):
    heapq.heappush(self._agenda, (time, self._pushed, what, index))
    self._pushed += 1

  def _happen(self):
    """The next thing in time happens."""
    time, _, what, index = heapq.heappop(self._agenda)
    self.now = max(time, self.now)
    if what == SHARD:
      self._shards.lose(index)
    elif what == COORDINATOR:
      # Its journal is that of the beginning of this evaluation.
      self._coordinator = coordinator_from(self._settings, self._saved[1])
    elif what == _RETURN:
      self._places[index].alive = True
      self._write(index, base.JOIN)
      self._start(index)
    elif what == WORKER:
      self._kill(index)
    elif (ticket := self._places[index].ticket) and ticket.finish == time:
      self._receive(index, ticket)

  def _kill(self, worker):
    place, ticket = self._places[worker], self._places[worker].ticket
    if not place.alive:
      return
    if ticket is not None:
      self._write(worker, base.LOST)
      if ticket.evaluation == self._current.number:
        self._jobs.lose(worker, ticket.job)
    place.empty()
    self._write(worker, base.LEAVE)
    place.holder += 1
    self._push(self.now + self._settings.restart, _RETURN, worker)
    # An idle worker may take its job.
    for other, its_place in enumerate(self._places):
      if its_place.alive and its_place.ticket is None:
        self._start(other)

  def _receive(self, worker, ticket):
    place, current = self._places[worker], self._current.number
    late, job, loss = current - ticket.evaluation, ticket.job, ticket.loss
    others = self._jobs.workers(job) if not late else ()
    accepted = not late and self._jobs.finish(worker, job)
    portions, norm = self._settings.portions_of(job), 0.0
    if accepted:
      first = self.counts.first + (others[0] != worker)
      self.counts = self.counts._replace(first=first)
      loss, message = self._add_up(self._current.params, portions)
      norm = message_norm(message, len(portions))
      self._current.losses[job] = loss
      self._shards.put(message_name(current, job), message)
      for other in others:  # a copy of it has the same loss
        copy = self._places[other].ticket
        self._places[other].ticket = copy._replace(loss=loss)
    self._write(worker, base.RECEIVE)
    place.ticket, row = None, self.book.rows[-1]
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._like))
    self.book.receive(
      *(max(self.state.iteration, 0), self.now, worker, row.job),
      *(late, 0.0, loss / len(portions), accepted, norm, 0.0),
      *(nbytes, nbytes * ticket.fresh, 0.0),
    )
    self._start(worker)

  # Checkpoints.

  def save(self) -> Saved:
    """Returns its state when the last evaluation began."""
    images, notes, lengths = self._saved
    vectors = {"vectors": [image.vectors for image in images]}
    number = notes["evaluation"] + 1
    return Saved(number, {**vectors, **self.book.arrays(lengths)}, notes)

  def _pack(self) -> tuple[list[Image], dict[str, Any], Lengths]:
    """Returns images of the shards, notes, and how far the book is written."""
    images, coordinator = self._shards.images(), self._coordinator
    notes = {
      "vectors": sorted(images[0].vectors),
      "number": self._shards.number,
      "state": coordinator.state._asdict(),
      "answers": list(coordinator.answers),
      "now": self.now,
      "agenda": list(self._agenda),
      "pushed": self._pushed,
      "evaluation": self._current.number,
      "places": [place.pack() for place in self._places],
      "owners": list(self._jobs.owners.items()),
      "counts": list(self.counts._replace(recoveries=self.recoveries)),
    }
    return images, notes, self.book.lengths

  def _unpack(self, saved):
    notes, settings = saved.notes, self._settings
    vectors = saved.arrays["vectors"]
    images = [Image(notes["number"], dict(each)) for each in vectors]
    self._shards = Shards(self._like, settings.shards, images)
    self._coordinator = coordinator_from(settings, notes)
    owners = dict(notes["owners"])
    self._jobs = PortionJobs(settings.jobs, settings.backup, owners)
    self.now, self._pushed = notes["now"], notes["pushed"]
    self._agenda = [tuple(each) for each in notes["agenda"]]
    self._current = _Evaluation(notes["evaluation"])
    for place, packed in zip(self._places, notes["places"], strict=True):
      place.unpack(packed)
    self.counts = Counts(*notes["counts"])
    self.book.read(saved.arrays)


def template(
  notes: Mapping[str, Any], params: base.Params, settings: Settings
) -> dict[str, Any]:
  """Returns trees like the arrays that were saved with some notes; of records,
  trace and iterates, of another length."""
  parts = sharding.split(sharding.make_plan(params, settings.shards), params)
  return {
    "vectors": [dict.fromkeys(notes["vectors"], part) for part in parts],
    **RunLog().arrays(Lengths(0, 0, 0)),
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
