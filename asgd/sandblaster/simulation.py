"""Simulation of Sandblaster: jobs take drawn durations.

Commands to shards take no time, and a job takes the time of its portions. Trace
rows are SEND where a worker fetches the parameters for a job, KEEP where it
starts another job on parameters that it has, RECEIVE where its message arrives.
A later message of the same job is received, too, but not accepted.

A checkpoint has the state at the beginning of an evaluation. The events since
then are repeated after a resume, with the same bits.
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
from asgd.sandblaster.batch_driver import BatchDriver, BatchWorker, BatchWorkers
from asgd.sandblaster.coordinator import message_name
from asgd.sandblaster.portions import Work, make_sums, message_norm
from asgd.sandblaster.run_log import Lengths, RunLog
from asgd.sandblaster.settings import COORDINATOR, SHARD, WORKER, Settings
from asgd.sandblaster.shard import Image, Shards

# Kinds of events beside planned kills: a worker restarts, a job finishes.
_RETURN, _FINISH = "return", "finish"


class PortionTicket(NamedTuple):
  """A job that a worker has started."""

  evaluation: int
  job: int
  seq: int
  finish: float  # time at which the job will be done
  fresh: bool  # whether the parameters were fetched for this job
  loss: float = math.nan  # set if a copy of the job ended before


class _SimulatedWorker(BatchWorker):
  """A worker in simulated time."""

  def __init__(self, stream):
    super().__init__()
    self._stream = stream  # durations of portions
    self._drawn = 0  # durations drawn so far
    self.reset()

  def reset(self) -> None:
    """Clears the loaded data, too."""
    super().reset()
    self._ready: dict[int, float] = {}  # job -> time when its data are loaded
    self._loader = 0.0  # time when the last load ends

  def draw(self, count: int) -> float:
    """Returns the time that `count` portions take."""
    self._drawn += count
    return sum(itertools.islice(self._stream, count))

  def load(self, job: int, load_time: float, now: float) -> float:
    """Returns the time when the data of a job are loaded.

    Loads run one after the other, and loaded data are kept.

    Args:
      job: the job that needs the data.
      load_time: time that the load takes.
      now: the present time.
    """
    if job not in self._ready:
      self._loader = max(now, self._loader) + load_time
      self._ready[job] = self._loader
    return self._ready[job]

  def pack(self) -> dict[str, Any]:
    """Returns the state as JSON."""
    ready = list(self._ready.items())
    return {**vars(self), "_stream": None, "_ready": ready}

  def unpack(self, packed: Mapping[str, Any]) -> None:
    """Restores what `pack` returned. The durations' stream must be new."""
    ready, stream = dict(packed["_ready"]), self._stream
    vars(self).update(packed, _stream=stream, _ready=ready, _drawn=0)
    self.draw(packed["_drawn"])
    self.ticket = self.ticket and PortionTicket(*self.ticket)


class Saved(NamedTuple):
  """A checkpoint: the complete state when an evaluation begins."""

  number: int  # increases with each evaluation
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
    >>> [(each.time, each.loss) for each in run.run_log.iterates]
    [(5.0, 87.5), (10.0, 56.0)]
    >>> run.run_log.records().worker[:6].tolist()  # of 7, one is a late copy
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
    """Starts a run, or resumes a saved one.

    Args:
      settings: the settings of the run.
      params: before the first step, of NumPy.
      work: the loss and the gradient of a portion, a mean.
      durations: the durations of portions.
      workers: N.
      saved: the checkpoint to resume from.
    """
    super().__init__(settings, params, RunLog(), saved and saved.notes)
    self._add_up = make_sums(work)
    self._params: base.Params = None  # those of the evaluation, on the device
    self._workers = BatchWorkers(
      [_SimulatedWorker(durations.stream(i)) for i in range(workers)],
      *(settings.jobs, self.run_log, lambda: self.now),
    )
    # Events to come: (time, count, kind, index of the worker or shard).
    self._agenda: list[tuple[float, int, str, int]] = []
    self._event_count = 0
    if saved is None:
      self._shards = Shards(params, settings.shards, start={"point": params})
      for failure in settings.failures:
        self._schedule(failure.time, failure.kind, failure.index)
    else:
      self._unpack(saved)
    self._images_and_lengths = self._pack()

  # Running.

  def advance(self, until: int) -> int:
    """Simulates until `until` messages are received or the coordinator ends;
    returns the count of received messages."""
    return self._run(until, self._step)

  def _prepare(self, evaluation):
    self._images_and_lengths = self._pack()
    self._shards.forget(self._shards.number)
    self._params = jax.tree.map(jnp.asarray, self._shards.read("trial"))

  def _ticket(self, worker: int, job: int, fresh: bool) -> PortionTicket:
    """Starts a job, and schedules its end."""
    finish = self._end_of(worker, job, self.now)
    self._schedule(finish, _FINISH, worker)
    seq = self._workers[worker].seq
    return PortionTicket(self._evaluation, job, seq, finish, fresh)

  def _end_of(self, worker: int, job: int, now: float) -> float:
    """Returns the end of a job that a worker begins once its data are loaded;
    prefetches the data of the next job."""
    state, settings = self._workers[worker], self._settings
    begin = max(now, self._load(state, job, now))
    if settings.prefetch and (next_job := self._jobs.peek(worker)) is not None:
      self._load(state, next_job, now)
    return begin + state.draw(len(settings.portions_of(job)))

  def _load(self, state: _SimulatedWorker, job: int, now: float) -> float:
    """Returns the time when a worker has loaded the data of a job."""
    settings = self._settings
    load_time = settings.loading * len(settings.portions_of(job))
    return state.load(job, load_time, now)

  def _schedule(self, time: float, kind: str, index: int) -> None:
    heapq.heappush(self._agenda, (time, self._event_count, kind, index))
    self._event_count += 1

  def _step(self) -> bool:
    """Handles the next event; there always is one."""
    time, _, kind, index = heapq.heappop(self._agenda)
    self._handle(time, kind, index)
    return True

  def _handle(self, time: float, kind: str, index: int) -> None:
    """Handles an event."""
    self.now = max(time, self.now)
    if kind == SHARD:
      self._shards.lose(index)
    elif kind == COORDINATOR:
      self._lose_coordinator()
    elif kind == _RETURN:
      self._workers.join(index)
      self._start(index)
    elif kind == WORKER:
      self._kill(index)
    # A finish at another time is of a job that was lost with its worker.
    elif (ticket := self._workers[index].ticket) and ticket.finish == time:
      self._finish(index, ticket)

  def _kill(self, worker):
    if self._workers[worker].alive:
      self._leave(worker)
      self._schedule(self.now + self._settings.restart, _RETURN, worker)
      self._start_idle()  # an idle worker may take its job

  def _finish(self, worker: int, ticket: PortionTicket) -> None:
    """Ends a job of a worker, and starts its next one."""

    def result(accepted):
      if not accepted:  # the gradient is not needed, so it is not computed
        return ticket.loss, 0.0
      portions = self._settings.portions_of(ticket.job)
      loss, message = self._add_up(self._params, portions)
      self._shards.put(message_name(self._evaluation, ticket.job), message)
      return loss, message_norm(message, len(portions))

    self._receive(worker, result)
    self._start(worker)

  # Checkpoints.

  def save(self) -> Saved:
    """Returns a checkpoint of the beginning of the present evaluation."""
    images, lengths = self._images_and_lengths
    vectors = {"vectors": [image.vectors for image in images]}
    arrays = {**vectors, **self.run_log.arrays(lengths)}
    return Saved(
      self._evaluation_notes["evaluation"] + 1, arrays, self._evaluation_notes
    )

  def _pack(self) -> tuple[list[Image], Lengths]:
    """Saves the present state in `_evaluation_notes`. Returns images of the
    shards, and the lengths of the log."""
    images = self._shards.images()
    self._evaluation_notes = {
      **self._notes(),
      "vectors": sorted(images[0].vectors),
      "now": self.now,
      "agenda": list(self._agenda),
      "pushed": self._event_count,
      "places": [state.pack() for state in self._workers.states],
    }
    return images, self.run_log.lengths

  def _unpack(self, saved: Saved) -> None:
    """Restores a checkpoint."""
    notes, vectors = saved.notes, saved.arrays["vectors"]
    images = [
      Image(notes["number"], dict(shard_vectors)) for shard_vectors in vectors
    ]
    self._shards = Shards(self._params_like, self._settings.shards, images)
    self.now, self._event_count = notes["now"], notes["pushed"]
    self._agenda = [tuple(event) for event in notes["agenda"]]
    for state, packed in zip(
      self._workers.states, notes["places"], strict=True
    ):
      state.unpack(packed)
    self.run_log.read(saved.arrays)


def template(
  notes: Mapping[str, Any], params: base.Params, settings: Settings
) -> dict[str, Any]:
  """Returns trees that have the structure of the saved arrays of some notes.
  Their records, trace and iterates are empty."""
  parts = sharding.split(sharding.make_plan(params, settings.shards), params)
  return {
    "vectors": [dict.fromkeys(notes["vectors"], part) for part in parts],
    **RunLog().arrays(Lengths(0, 0, 0)),
  }
