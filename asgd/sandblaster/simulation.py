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
from asgd.sandblaster.batch_driver import BatchDriver, Place, Places
from asgd.sandblaster.book import Lengths, RunLog
from asgd.sandblaster.coordinator import message_name
from asgd.sandblaster.portions import Work, make_sums, message_norm
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


class _BatchWorker(Place):
  """A worker in simulated time."""

  def __init__(self, stream):
    super().__init__()
    self._stream = stream
    self._drawn = 0  # durations so far
    self.empty()

  def empty(self) -> None:
    """See the base."""
    super().empty()
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


class Saved(NamedTuple):
  """All there is when an evaluation begins."""

  number: int  # grows
  arrays: dict[str, Any]
  notes: dict[str, Any]  # JSON


class SandblasterSimulation(BatchDriver):
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

  now = 0.0  # the simulated time

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
    super().__init__(settings, params, RunLog(), saved and saved.notes)
    self._add_up = make_sums(work)
    self._params: base.Params = None  # of the evaluation, on the device
    self._places = Places(
      [_BatchWorker(durations.stream(i)) for i in range(workers)],
      *(settings.jobs, self.book, lambda: self.now),
    )
    # What is to come: (time, number, what, to whom).
    self._agenda: list[tuple[float, int, str, int]] = []
    self._pushed = 0
    if saved is None:
      self._shards = Shards(params, settings.shards, start={"point": params})
      for failure in settings.failures:
        self._push(failure.time, failure.what, failure.index)
    else:
      self._unpack(saved)
    self._saved = self._pack()

  # Running.

  def advance(self, until: int) -> int:
    """Simulates until so many messages are received or the coordinator ends;
    returns how many are."""
    return self._run(until, self._happen)

  def _prepare(self, evaluation):
    self._saved = self._pack()
    self._shards.forget(self._shards.number)
    self._params = jax.tree.map(jnp.asarray, self._shards.read("trial"))

  def _ticket(self, worker, job, fresh):
    place, settings = self._places[worker], self._settings
    begin = max(self.now, self._load(place, job))
    if settings.prefetch and (coming := self._jobs.peek(worker)) is not None:
      self._load(place, coming)
    finish = begin + place.draw(len(settings.portions_of(job)))
    self._push(finish, _FINISH, worker)
    return PortionTicket(self._current, job, place.seq, finish, fresh)

  def _load(self, place, job):
    """Returns when the data of a job are with a worker."""
    settings = self._settings
    needs = settings.loading * len(settings.portions_of(job))
    return place.load(job, needs, self.now)

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
      self._lose_coordinator()
    elif what == _RETURN:
      self._places.join(index)
      self._start(index)
    elif what == WORKER:
      self._kill(index)
    elif (ticket := self._places[index].ticket) and ticket.finish == time:
      self._finish(index, ticket)
    return True

  def _kill(self, worker):
    if self._places[worker].alive:
      self._empty(worker)
      self._push(self.now + self._settings.restart, _RETURN, worker)
      self._start_idle()  # an idle worker may take its job

  def _finish(self, worker, ticket):
    def result(accepted):
      if not accepted:
        return ticket.loss, 0.0
      portions = self._settings.portions_of(ticket.job)
      loss, message = self._add_up(self._params, portions)
      self._shards.put(message_name(self._current, ticket.job), message)
      return loss, message_norm(message, len(portions))

    self._receive(worker, result)
    self._start(worker)

  # Checkpoints.

  def save(self) -> Saved:
    """Returns its state when the last evaluation began."""
    images, lengths = self._saved
    vectors = {"vectors": [image.vectors for image in images]}
    arrays = {**vectors, **self.book.arrays(lengths)}
    return Saved(self._begun["evaluation"] + 1, arrays, self._begun)

  def _pack(self) -> tuple[list[Image], Lengths]:
    """Notes all there is; returns images of the shards, and how far the book is
    written."""
    images = self._shards.images()
    self._begun = {
      **self._notes(),
      "vectors": sorted(images[0].vectors),
      "now": self.now,
      "agenda": list(self._agenda),
      "pushed": self._pushed,
      "places": [place.pack() for place in self._places.all],
    }
    return images, self.book.lengths

  def _unpack(self, saved):
    notes, vectors = saved.notes, saved.arrays["vectors"]
    images = [Image(notes["number"], dict(each)) for each in vectors]
    self._shards = Shards(self._like, self._settings.shards, images)
    self.now, self._pushed = notes["now"], notes["pushed"]
    self._agenda = [tuple(each) for each in notes["agenda"]]
    for place, packed in zip(self._places.all, notes["places"], strict=True):
      place.unpack(packed)
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
