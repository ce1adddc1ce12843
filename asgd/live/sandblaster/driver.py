"""The driver of a live run: it has the coordinator, and calls shards and
workers. No parameters or gradients come to it, but for evaluations and
checkpoints.

Of a worker that dies the job goes to another. If the driver is killed, the next
one begins the evaluation again that was under way: shards answer commands of
before as they did, and what workers have pushed stays.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, sharding
from asgd.live.cluster import Cluster
from asgd.live.deadlines import DEAD, Ladder
from asgd.live.failures import WorkersDie
from asgd.live.hosts import Gone, Hosts, Make
from asgd.live.hosts.base import WORKER
from asgd.live.sandblaster.book import LiveRunLog
from asgd.live.sandblaster.places import LiveJob, LivePlaces
from asgd.live.sandblaster.shard import LiveShard
from asgd.live.sandblaster.shards import LiveShards
from asgd.live.supervisor import Supervisor
from asgd.sandblaster import Await, Image, Iterate, Settings
from asgd.sandblaster.batch_driver import BatchDriver
from asgd.sandblaster.settings import COORDINATOR, SHARD

_LOOK = 0.05  # seconds between two looks at deadlines
_MOST = 1.0  # seconds that a look may take, of a driver that is not stopped


class SavedRun(NamedTuple):
  """From which a run goes on."""

  notes: dict[str, Any]  # JSON
  images: Sequence[Image] | None  # of the shards; None: they have their files


class Options(NamedTuple):
  """How a run is watched over."""

  ladder: Ladder = Ladder()
  refill: bool = True  # put another in the place of a worker that died
  together: bool = True  # the first job waits until all workers are there


class HostMakers(NamedTuple):
  """Where shards and workers run, and how each is made in its host."""

  hosts: Hosts
  memory: Path  # where shards keep what outlives them
  worker: Callable[[int], Make]  # (worker)

  def shard(
    self, evaluation: int, index: int, image: Image, anew: bool
  ) -> Make:
    """Returns what makes a shard; see LiveShard."""
    folder = self.memory / f"shard-{index}"
    options = {"folder": folder, "image": image, "evaluation": evaluation}
    return functools.partial(LiveShard, anew=anew, **options)


def _first_images(plan, params):
  return [
    Image(0, {"point": jax.tree.map(np.array, part)})
    for part in sharding.split(plan, params)
  ]


class Driver(BatchDriver, Cluster):
  """A live run of Sandblaster."""

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    makers: HostMakers,
    book: LiveRunLog,
    *,
    workers: int,
    options: Options | None = None,
    saved: SavedRun | None = None,
    note_down: Callable[[dict[str, Any] | None], None] = lambda notes: None,
  ):
    """Prepares; `start` begins with parameters, NumPy's, or continues from what
    was saved. `note_down` is called when an evaluation begins, with what the
    next driver needs to resume it, and with None if the files of a shard cannot
    be used: the next driver then needs a checkpoint."""
    self._options = options = options or Options()
    self._note_down = note_down
    notes = saved.notes if saved else {}
    BatchDriver.__init__(self, settings, params, book, notes)
    supervisor = Supervisor(
      makers.hosts,
      {SHARD: settings.shards, WORKER: workers},
      options.ladder,
      patience=DEAD * options.ladder.start,
    )
    Cluster.__init__(self, supervisor)
    self._places: LivePlaces = LivePlaces(
      workers, settings.jobs, supervisor, makers.worker, book
    )
    failures = sorted(settings.failures)
    self._failures = failures[notes.get("failed", 0) :]
    if saved is not None:
      book.iterates = [Iterate(*each) for each in notes["iterates"]]
    # Images of shards lack the messages that the coordinator did not ask for.
    if saved is not None and saved.images is None:
      self._losses = dict(notes.get("losses", ()))
    if isinstance(self.request, Await):  # in the middle of an evaluation
      self._jobs.begin(self.request.job, self._losses)
    elif self.request is None:
      self._jobs.begin(settings.jobs)
    plan = sharding.make_plan(params, settings.shards)
    images = saved and saved.images
    self._shards = LiveShards(
      plan,
      supervisor,
      functools.partial(makers.shard, self._current),
      images or _first_images(plan, params),
      anew=saved is None or images is not None,
      number=notes.get("number", 0),
      unfit=lambda: note_down(None),
    )

  # Reading.

  @property
  def now(self) -> float:
    """See the base; in seconds."""
    began = self.book.began
    return 0.0 if math.isnan(began) else self._clock() - began

  def _clock(self):
    return self._supervisor.hosts.clock()

  # Running.

  def start(self) -> None:
    """Starts all shards and workers. Raises ValueError for what keeps them from
    it."""
    self._shards.start()
    self._places.go_on()
    for worker in range(len(self._places.all)):
      self._places.fill(worker)
    while self._options.together and self._places.coming:
      self._listen(_LOOK, self.received)

  def advance(self, until: int, seconds: float) -> int:
    """Goes on until so many messages are received, the coordinator ends, or
    the time is over; returns how many are received. Raises WorkersDie,
    ShardsDie, and ValueError for what ends a worker or a shard."""
    end = self._clock() + seconds

    def wait():
      left = end - self._clock()
      if left > 0:
        self._listen(min(_LOOK, left), until)
      return left > 0

    received = self._run(until, wait)
    self.book.news += self._supervisor.take_news()
    return received

  def _prepare(self, evaluation):
    self._shards.flush()
    self._begun = self._notes()
    self._note_down(self._begun)
    self._shards.begin(evaluation)

  def _ticket(self, worker, job, fresh):
    return self._call(
      worker, self._current, job, self._places[worker].seq, fresh
    )

  def _call(self, worker, evaluation, job, seq, fresh):
    party, shards = self._places[worker].party, self._shards.hosts
    call = party.host.call(
      "work", evaluation, job, seq, shards, self._jobs.peek(worker)
    )
    party.since = began = self._clock()
    return LiveJob(evaluation, job, seq, fresh, began, call, shards)

  # What happens.

  def _listen(self, seconds, until=math.inf):
    """Waits for the next things to happen, so long at most; not for more
    messages than are to be received."""
    if not math.isnan(self.book.began):
      while self._failures and self._failures[0].time <= self.now:
        self._fail(self._failures.pop(0))
    waiting = self._places.calls()
    if not waiting and not self._supervisor.parties[WORKER]:
      raise WorkersDie(
        "all workers died, and none takes their place: set"
        " config.live.refill=True"
      )
    hosts = self._supervisor.hosts
    began = self._clock()
    ended = hosts.wait(list(waiting.values()), seconds)
    # The driver itself may have stood still meanwhile.
    passed = min(max(self._clock() - began, 0.0), _MOST)
    for worker, call in waiting.items():
      if call not in ended:
        continue
      if not self._places[worker].joined or self.received < until:
        self._hear(worker)
    self._bury_idle()
    self._places.end_late(passed, DEAD * self._options.ladder.start)
    self._end_hanging()

  def _fail(self, failure):
    """Kills what is to be killed."""
    if failure.what == COORDINATOR:
      self._lose_coordinator()
    elif party := self._supervisor.parties[failure.what].get(failure.index):
      self._supervisor.end(party)

  def _hear(self, worker):
    """A call of a worker has ended."""
    place = self._places[worker]
    try:
      if not place.joined:
        self._places.join(worker)
      else:
        self._end_job(worker, place.ticket.call.result())
    except ValueError:
      self._shards.check()  # a worker may have told why a shard cannot be made
      raise
    except Gone as gone:
      if gone.kind == WORKER:
        self._bury(worker)
      else:  # it pushes again what it has computed
        job = place.ticket
        self._shards.replace(gone.index, job.shards[gone.index])
        again = self._call(worker, *job[:4])
        place.ticket = again._replace(began=job.began, loss=job.loss)
      return
    if self._current >= 0:
      self._start(worker)

  def _end_job(self, worker, done):
    place = self._places[worker]
    job = place.ticket

    def result(accepted):
      loss = job.loss if done.late else done.loss
      return loss, done.norm if accepted else 0.0

    self._supervisor.job_ended(place.party, self._clock() - job.began)
    self._receive(worker, result)
    self._supervisor.progressed(self.received)

  # Exits.

  def _bury_idle(self):
    for party in self._supervisor.lost(WORKER):
      if self._places[party.index].idle:
        self._bury(party.index)

  def _bury(self, worker):
    """Gives the job of a worker that has exited to another, and replaces it."""
    how = "hung" if self._places[worker].party.hung else "died"
    self._empty(worker)
    self._supervisor.count_exit(WORKER, worker, how)
    news = f"worker {worker} {how}"
    if self._options.refill:
      self._places.fill(worker)
      news += "; another takes its place"
    self._supervisor.news.append(news)
    if self._current >= 0:
      self._start_idle()  # somebody who was idle may do what it did

  def _end_hanging(self):
    """Ends workers that are at a job for too long; their calls then end."""
    if not self._shards.are_made():
      self._supervisor.excuse(WORKER)
    for place in self._places.all:
      # A call may have ended that was not received yet.
      if place.ticket is not None and not place.ticket.call.done():
        self._supervisor.end_overdue(place.party)

  # Going on.

  def _notes(self):
    losses: dict[int, float] = {}  # of messages that are not added up yet
    if isinstance(self.request, Await):
      first = self.request.job
      losses = {job: x for job, x in self._losses.items() if job >= first}
    return {
      **super()._notes(),
      "losses": list(losses.items()),
      "iterates": [list(each) for each in self.book.iterates],
      "failed": len(self._settings.failures) - len(self._failures),
      "lengths": list(self.book.lengths),
    }

  def save(self) -> SavedRun | None:
    """Returns the run as it is now; None while it repeats what shards did for
    the driver before this one."""
    images = self._shards.images()
    if images is None:
      return None
    # The next driver cuts the trace and the records back to what the notes
    # count. A checkpoint that counts more would then be of no use.
    notes = self._notes()
    self._note_down(notes)
    return SavedRun(notes, images)
