"""Sandblaster in simulated time: workers take drawn durations.

The coordinator is asked what it wants next; commands to shards take no time,
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding, simulator
from asgd.orders.durations import Durations
from asgd.orders.trace import NO_SEQ, Event, events, from_events
from asgd.sandblaster.commands import Command
from asgd.sandblaster.coordinator import (
  Begin,
  Coordinator,
  Pair,
  State,
  message_name,
)
from asgd.sandblaster.portions import Jobs
from asgd.sandblaster.settings import COORDINATOR, SHARD, Settings
from asgd.sandblaster.shard import Image, Shards, dot

# (parameters, portion) -> (float, gradient)
Work = Callable[[base.Params, int], tuple[Any, base.Params]]
_RETURN = "return"  # of a killed worker


class Iterate(NamedTuple):
  """A point that the coordinator has come to."""

  iteration: int  # 0 is the start
  time: float  # simulated
  evaluations: int  # of the whole batch
  loss: float  # of the whole batch, with the weight decay
  norm: float  # of the gradient
  step: float  # a
  fallback: int  # times so far that the history was forgotten


class _Ticket(NamedTuple):
  """A job that a worker has started."""

  evaluation: int
  job: int
  seq: int
  finish: float  # when it will be done
  fresh: bool  # the parameters were fetched for it
  loss: float = math.nan  # what a copy of it came to


class _Place:
  """A worker."""

  def __init__(self, stream: Iterator[float]):
    self.stream = stream
    self.drawn = 0  # durations so far
    self.fetched = -1  # the evaluation whose parameters it has
    self.seq = 0  # of the next job
    self.holder = 0  # how many came before it in this place
    self.alive = True
    self.ticket: _Ticket | None = None
    self.ready: dict[int, float] = {}  # job -> when its data are here
    self.loader = 0.0  # when all that it loads is here

  def draw(self, count: int) -> float:
    """The time of so many portions."""
    self.drawn += count
    return sum(itertools.islice(self.stream, count))

  def pack(self) -> list[Any]:
    ready = list(self.ready.items())
    ticket = list(self.ticket) if self.ticket else None
    who = self.fetched, self.seq, self.holder, self.alive
    return [self.drawn, *who, ticket, ready, self.loader]

  def unpack(self, packed: Sequence[Any]) -> None:
    drawn, *who, ticket, ready, self.loader = packed
    self.fetched, self.seq, self.holder, self.alive = who
    self.draw(drawn)
    self.ticket = _Ticket(*ticket) if ticket else None
    self.ready = dict(ready)

  def killed(self) -> None:
    self.alive, self.ticket, self.fetched = False, None, -1
    self.ready, self.loader = {}, 0.0


class Saved(NamedTuple):
  """All there is when an evaluation begins."""

  number: int  # grows
  arrays: dict[str, Any]
  notes: dict[str, Any]  # JSON


class Simulation:
  """A run of Sandblaster L-BFGS.

  Example:
    Two workers, one of them three times as slow, and a batch of six portions.

    >>> import jax
    >>> import numpy as np
    >>> from asgd import orders
    >>> from asgd.sandblaster import Settings, Simulation
    >>> work = jax.value_and_grad(lambda x, p: (p + 1) * (x**2).sum())
    >>> clock = orders.durations.constant(slowdown=[1, 3])
    >>> run = Simulation(
    ...   Settings(portions=6), np.float32([3.0, 4.0]), work, clock, workers=2
    ... )
    >>> run.advance(until=14)
    14
    >>> [(each.time, each.loss) for each in run.iterates]
    [(5.0, 87.5), (10.0, 56.0)]
    >>> run.records().worker[:6].tolist()  # of 7, one is a late copy
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
    """Starts from parameters, which are NumPy's, or goes on from what was
    saved. `work` is the loss and the gradient of a portion, a mean."""
    self._settings, self._work = settings, work
    self._like = params
    self._bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    self._places = [_Place(durations.stream(i)) for i in range(workers)]
    self._add = jax.jit(lambda x, y: jax.tree.map(jnp.add, x, y))
    self.now = 0.0
    self.rows: list[Event] = []
    self.iterates: list[Iterate] = []
    self.news: list[str] = []
    self._recovered = 0  # before what was saved
    self.copies = self.won = 0  # backup tasks, and those that came first
    self._messages: list[tuple[Any, ...]] = []  # the rows of `records`
    self._losses: dict[int, float] = {}  # job -> of this evaluation
    self._evaluation = -1  # that the workers work on
    self._params: Any = None  # of this evaluation, on the device
    self._heap: list[tuple[float, int, str, int]] = []  # what is to come
    self._pushed = 0
    if saved is None:
      self._shards = Shards(params, settings.shards, start={"point": params})
      self._coordinator = Coordinator(settings)
      self._jobs = Jobs(settings.jobs, settings.backup)
      for failure in settings.failures:
        self._push(failure.time, failure.what, failure.index)
    else:
      self._unpack(saved)
    self._saved = self._pack()

  # Reading.

  @property
  def received(self) -> int:
    """Messages."""
    return len(self._messages)

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
    return self._recovered + self._shards.recoveries

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

  def records(self, start: int = 0) -> base.Records:
    """Returns a row for each message, from message `start`; the update is the
    iteration, the staleness evaluations."""
    columns = zip(*self._messages[start:], strict=True)
    dtypes = (
      *(np.int32, np.float64, np.int32, np.int32, np.int32, np.float32),
      *(np.float32, np.bool_, np.float32, np.float32),
      *(np.int64, np.int64, np.float32),
    )
    empty = [()] * len(dtypes)
    return base.Records(*map(np.array, list(columns) or empty, dtypes))

  # Running.

  def advance(self, until: int) -> int:
    """Goes on until so many messages are received, or the coordinator ends;
    returns how many are."""
    while not self.ended:
      request = self._coordinator.request
      if isinstance(request, Command):
        self._answer(self._shards.obey(request))
      elif isinstance(request, Begin):
        self._begin(request.evaluation)
      elif request.job in self._losses:
        self._answer(self._losses[request.job])
      elif self.received >= until:
        break
      else:
        self._happen()
    return self.received

  def _answer(self, value):
    coordinator = self._coordinator
    before = coordinator.state.iteration
    coordinator.answer(value)
    self.news += coordinator.news
    coordinator.news.clear()
    state = coordinator.state
    if state.iteration > before:
      self.iterates.append(
        Iterate(
          *(state.iteration, self.now, state.evaluations, state.loss),
          *(state.norm, state.step, state.fallbacks),
        )
      )

  def _begin(self, evaluation):
    """Workers that are idle start on new parameters; one that asks for an
    evaluation again, as it was killed, is told that it has begun."""
    if evaluation > self._evaluation:
      self._saved = self._pack()
      self._shards.forget(self._shards.number)
      self._evaluation, self._losses = evaluation, {}
      self._params = jax.tree.map(jnp.asarray, self._shards.read("trial"))
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
    self.copies += len(jobs.workers(job)) > 1
    fresh = place.fetched != self._evaluation
    place.fetched = self._evaluation
    begin = max(self.now, self._load(place, job))
    if settings.prefetch and (coming := jobs.peek(worker)) is not None:
      self._load(place, coming)
    finish = begin + place.draw(len(settings.portions_of(job)))
    place.ticket = _Ticket(self._evaluation, job, place.seq, finish, fresh)
    self._write(worker, base.SEND if fresh else base.KEEP)
    place.seq += 1
    self._push(finish, "", worker)

  def _load(self, place, job):
    """Returns when the data of a job are with a worker, which keeps them."""
    if job not in place.ready:
      needs = self._settings.loading * len(self._settings.portions_of(job))
      place.loader = max(self.now, place.loader) + needs
      place.ready[job] = place.loader
    return place.ready[job]

  def _push(self, time, what, index):
    heapq.heappush(self._heap, (time, self._pushed, what, index))
    self._pushed += 1

  def _write(self, worker, action):
    place = self._places[worker]
    seq, job = NO_SEQ, place.holder
    if place.ticket is not None:
      evaluation, job, seq, *_ = place.ticket
      job += evaluation * self._settings.jobs
    self.rows.append(Event(self.now, worker, seq, job, action))

  def _happen(self):
    """The next thing in time happens."""
    time, _, what, index = heapq.heappop(self._heap)
    self.now = max(time, self.now)
    if what == SHARD:
      self._shards.lose(index)
    elif what == COORDINATOR:
      # Its journal is that of the beginning of this evaluation.
      self._coordinator = _coordinator(self._settings, self._saved[1])
    elif what == _RETURN:
      self._return(index)
    elif what:
      self._kill(index)
    elif (ticket := self._places[index].ticket) and ticket.finish == time:
      self._receive(index, ticket)

  def _kill(self, worker):
    place, ticket = self._places[worker], self._places[worker].ticket
    if not place.alive:
      return
    if ticket is not None:
      self._write(worker, base.LOST)
      if ticket.evaluation == self._evaluation:
        self._jobs.lose(worker, ticket.job)
    place.killed()
    self._write(worker, base.LEAVE)
    place.holder += 1
    self._push(self.now + self._settings.restart, _RETURN, worker)
    # Somebody who was idle may do what it did.
    for other, its_place in enumerate(self._places):
      if its_place.alive and its_place.ticket is None:
        self._start(other)

  def _return(self, worker):
    self._places[worker].alive = True
    self._write(worker, base.JOIN)
    self._start(worker)

  def _receive(self, worker, ticket):
    place, current = self._places[worker], self._evaluation
    late, job, loss = current - ticket.evaluation, ticket.job, ticket.loss
    first = self._jobs.workers(job)[:1] if not late else ()
    accepted = not late and self._jobs.finish(worker, job)
    count, norm = len(self._settings.portions_of(job)), 0.0
    if accepted:
      self.won += first != (worker,)
      loss, message = self._compute(job)
      size = sum(leaf.size for leaf in jax.tree.leaves(message))
      norm = math.sqrt(dot(message, message) / max(size, 1)) / count
      self._losses[job] = loss
      self._shards.put(message_name(current, job), message)
      for other in self._places:  # a copy of it comes to the same loss
        if other.ticket is not None and other.ticket[:2] == ticket[:2]:
          other.ticket = other.ticket._replace(loss=loss)
    self._write(worker, base.RECEIVE)
    place.ticket = None
    self._messages.append(
      (
        *(max(self.state.iteration, 0), self.now, worker, self.rows[-1].job),
        *(late, 0.0, loss / count, accepted, norm, 0.0),
        *(self._bytes, self._bytes * ticket.fresh, 0.0),
      )
    )
    self._start(worker)

  def _compute(self, job):
    """Returns the sums of losses and of gradients over the portions of a job,
    in their order."""
    loss, gradient = 0.0, None
    for portion in self._settings.portions_of(job):
      value, part = self._work(self._params, portion)
      loss += float(value)
      gradient = part if gradient is None else self._add(gradient, part)
    return loss, simulator.fetch(gradient)

  # Checkpoints.

  def save(self) -> Saved:
    """Returns what it was when the last evaluation began."""
    images, notes, (messages, rows, iterates) = self._saved
    reals = np.array(self.iterates[:iterates], np.float64)
    arrays = {
      "vectors": [image.vectors for image in images],
      "records": base.Records(*(x[:messages] for x in self.records())),
      "trace": from_events(self.rows[:rows]),
      "iterates": reals.reshape(-1, len(Iterate._fields)),
    }
    return Saved(notes["evaluation"] + 1, arrays, notes)

  def _pack(self) -> tuple[list[Image], dict[str, Any], tuple[int, int, int]]:
    """Returns images of the shards, notes, and how many messages, rows and
    iterates there are."""
    images, coordinator = self._shards.images(), self._coordinator
    notes = {
      "vectors": sorted(images[0].vectors),
      "number": self._shards.number,
      "state": coordinator.state._asdict(),
      "answers": list(coordinator.answers),
      "now": self.now,
      "heap": [list(each) for each in self._heap],
      "pushed": self._pushed,
      "evaluation": self._evaluation,
      "places": [place.pack() for place in self._places],
      "owners": list(self._jobs.owners.items()),
      "counts": [self.copies, self.won, self.recoveries],
    }
    return images, notes, (self.received, len(self.rows), len(self.iterates))

  def _unpack(self, saved):
    arrays, notes, settings = saved.arrays, saved.notes, self._settings
    images = [Image(notes["number"], dict(v)) for v in arrays["vectors"]]
    self._shards = Shards(self._like, settings.shards, images)
    self._coordinator = _coordinator(settings, notes)
    self._jobs = Jobs(settings.jobs, settings.backup, dict(notes["owners"]))
    self.now, self._pushed = notes["now"], notes["pushed"]
    self._evaluation = notes["evaluation"]
    self._heap = [(t, n, what, index) for t, n, what, index in notes["heap"]]
    for place, packed in zip(self._places, notes["places"], strict=True):
      place.unpack(packed)
    self.copies, self.won, self._recovered = notes["counts"]
    self.rows = list(events(arrays["trace"]))
    columns = (column.tolist() for column in arrays["records"])
    self._messages = list(zip(*columns, strict=True))
    self.iterates = [
      Iterate(int(i), t, int(e), *real, int(fallbacks))
      for i, t, e, *real, fallbacks in arrays["iterates"].tolist()
    ]


def template(
  notes: Mapping[str, Any], params: base.Params, settings: Settings
) -> dict[str, Any]:
  """Returns trees like the arrays that were saved with some notes; of records,
  trace and iterates, of another length."""
  parts = sharding.split(sharding.make_plan(params, settings.shards), params)
  return {
    "vectors": [dict.fromkeys(notes["vectors"], part) for part in parts],
    "records": simulator.concatenate([]),
    "trace": from_events([]),
    "iterates": np.zeros((0, len(Iterate._fields))),
  }


def _coordinator(settings: Settings, notes: Mapping[str, Any]) -> Coordinator:
  """The coordinator of some notes, from its journal."""
  state = State(**notes["state"])
  pairs = tuple(Pair(*pair) for pair in state.pairs)
  state = state._replace(pairs=pairs)
  coordinator = Coordinator(settings, state, notes["answers"])
  coordinator.news.clear()  # they were told
  return coordinator
