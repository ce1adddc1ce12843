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
from asgd.live.sandblaster.shards import LiveShards
from asgd.live.supervisor import Supervisor
from asgd.sandblaster import (
  Await,
  Begin,
  Command,
  Image,
  Iterate,
  Settings,
  State,
  coordinator_from,
)
from asgd.sandblaster.portions import PortionJobs
from asgd.sandblaster.settings import COORDINATOR, SHARD
from asgd.sandblaster.simulation import Counts

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
  # (evaluation, shard, its image, whether it begins anew)
  shard: Callable[[int, int, Image, bool], Make]
  worker: Callable[[int], Make]  # (worker)


def _first_images(plan, params):
  return [
    Image(0, {"point": jax.tree.map(np.array, part)})
    for part in sharding.split(plan, params)
  ]


class Driver(Cluster):
  """A live run of Sandblaster, with the interface of SandblasterSimulation."""

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
    self._settings, self._like = settings, params
    self._options = options = options or Options()
    self._note_down = note_down
    self.book = book
    self.counts = Counts()
    super().__init__(
      Supervisor(
        makers.hosts,
        {SHARD: settings.shards, WORKER: workers},
        options.ladder,
        patience=DEAD * options.ladder.start,
      )
    )
    self._places = LivePlaces(
      workers, settings.jobs, self._supervisor, makers.worker, book
    )
    self._failures = sorted(settings.failures)
    self._current, self._losses = -1, {}  # the evaluation; job -> its loss
    notes: dict[str, Any] = {"state": State()._asdict(), "answers": []}
    if saved is not None:
      notes = saved.notes
      self._current = notes["evaluation"]
      self.counts = Counts(*notes["counts"])
      book.iterates = [Iterate(*each) for each in notes["iterates"]]
      self._failures = self._failures[notes["failed"] :]
    self._begun = notes
    self._coordinator = coordinator_from(settings, notes)
    self._jobs = PortionJobs(
      settings.jobs, settings.backup, dict(notes.get("owners", ()))
    )
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
      self._supervisor,
      functools.partial(makers.shard, self._current),
      images or _first_images(plan, params),
      anew=saved is None or images is not None,
      number=notes.get("number", 0),
      unfit=lambda: note_down(None),
    )

  # Reading.

  @property
  def request(self) -> Any:
    """What the coordinator asks for."""
    return self._coordinator.request

  @property
  def received(self) -> int:
    """Messages."""
    return len(self.book.messages)

  @property
  def now(self) -> float:
    """Seconds since the first job began."""
    began = self.book.began
    return 0.0 if math.isnan(began) else self._clock() - began

  def _clock(self):
    return self._supervisor.hosts.clock()

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
    return self.counts.recoveries + self.replaced[SHARD]

  def params(self) -> base.Params:
    """Returns the last iterate."""
    return self._shards.read("point")

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
    while not self.ended:
      request = self.request
      if isinstance(request, Command):
        self._answer(self._shards.obey(request))
      elif isinstance(request, Begin):
        self._begin(request.evaluation)
      elif request.job in self._losses:
        self._answer(self._losses[request.job])
      elif self.received >= until or self._clock() >= end:
        break
      else:
        left = max(end - self._clock(), 0.0)
        self._listen(min(_LOOK, left), until)
    self.book.news += self._supervisor.take_news()
    return self.received

  def _answer(self, value):
    self._coordinator.answer(value)
    self.book.note(self._coordinator, self.now)

  def _begin(self, evaluation):
    """Workers that are idle start on new parameters; one that asks for an
    evaluation again is told that it has begun."""
    if evaluation > self._current:
      self._shards.flush()
      self._begun = self._notes()
      self._note_down(self._begun)
      self._shards.begin(evaluation)
      self._current, self._losses = evaluation, {}
      self._jobs.begin()
      self._start_idle()
    self._answer(None)

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
    fresh = place.fetched != self._current
    place.fetched = self._current
    place.job = self._call(worker, self._current, job, place.seq, fresh)
    place.seq += 1
    self._places.write(worker, base.SEND if fresh else base.KEEP)

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
      self._coordinator = coordinator_from(self._settings, self._begun)
    elif party := self._supervisor.parties[failure.what].get(failure.index):
      self._supervisor.end(party)

  def _hear(self, worker):
    """A call of a worker has ended."""
    place = self._places[worker]
    try:
      if not place.joined:
        self._places.join(worker)
      else:
        self._receive(worker, place.job.call.result())
    except ValueError:
      self._shards.check()  # a worker may have told why a shard cannot be made
      raise
    except Gone as gone:
      if gone.kind == WORKER:
        self._bury(worker)
      else:  # it pushes again what it has computed
        job = place.job
        self._shards.replace(gone.index, job.shards[gone.index])
        again = self._call(worker, *job[:4])
        place.job = again._replace(began=job.began, loss=job.loss)
      return
    if self._current >= 0:
      self._start(worker)

  def _receive(self, worker, result):
    place, jobs, current = self._places[worker], self._jobs, self._current
    job = place.job
    late = current - job.evaluation
    others = jobs.workers(job.job) if not late else ()
    accepted = not late and jobs.finish(worker, job.job)
    loss, norm = job.loss if result.late else result.loss, 0.0
    if accepted:
      first = self.counts.first + (others[0] != worker)
      self.counts = self.counts._replace(first=first)
      self._losses[job.job], norm = loss, result.norm
      for other in others:  # a copy of it comes to the same loss
        copy = self._places[other].job
        self._places[other].job = copy._replace(loss=loss)
    self._supervisor.job_ended(place.party, self._clock() - job.began)
    row, place.job = self._places.write(worker, base.RECEIVE), None
    count = len(self._settings.portions_of(job.job))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._like))
    self.book.receive(
      *(max(self.state.iteration, 0), row.time, worker, row.job),
      *(late, 0.0, loss / count, accepted, norm, 0.0),
      *(nbytes, nbytes * job.fresh, 0.0),
    )
    self._supervisor.progressed(self.received)

  # Exits.

  def _bury_idle(self):
    for party in self._supervisor.lost(WORKER):
      if self._places[party.index].idle:
        self._bury(party.index)

  def _bury(self, worker):
    """Gives the job of a worker that has exited to another, and replaces it."""
    how = "hung" if self._places[worker].party.hung else "died"
    job = self._places.empty(worker)
    if job is not None and job.evaluation == self._current:
      self._jobs.lose(worker, job.job)
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
      if place.job is not None and not place.job.call.done():
        self._supervisor.end_overdue(place.party)

  # Going on.

  def _notes(self) -> dict[str, Any]:
    """What the next driver needs, as JSON."""
    coordinator, lengths = self._coordinator, self.book.lengths
    losses: dict[int, float] = {}  # of messages that are not added up yet
    if isinstance(self.request, Await):
      first = self.request.job
      losses = {job: x for job, x in self._losses.items() if job >= first}
    counts = self.counts._replace(recoveries=self.recoveries)
    return {
      "number": self._shards.number,
      "state": coordinator.state._asdict(),
      "answers": list(coordinator.answers),
      "evaluation": self._current,
      "losses": list(losses.items()),
      "owners": list(self._jobs.owners.items()),
      "counts": list(counts),
      "iterates": [list(each) for each in self.book.iterates],
      "failed": len(self._settings.failures) - len(self._failures),
      "lengths": list(lengths),
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
