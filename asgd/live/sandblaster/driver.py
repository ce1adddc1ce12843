"""The driver of a live run of Sandblaster.

The driver runs the coordinator, and calls shards and workers. Parameters pass
through the driver for evaluations and checkpoints only.

If a worker exits, the driver assigns its job to another worker. If the driver
is killed, the next driver repeats the present evaluation: shards answer
repeated commands from their journals, and keep the messages that workers have
pushed.
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
from asgd.live.deadlines import DEAD_FACTOR, Ladder
from asgd.live.failures import WorkersDie
from asgd.live.hosts import HostExited, Hosts, Make
from asgd.live.hosts.base import WORKER
from asgd.live.sandblaster.batch_workers import LiveBatchWorkers, LiveJob
from asgd.live.sandblaster.run_log import LiveRunLog
from asgd.live.sandblaster.shard import LiveShard
from asgd.live.sandblaster.shards import LiveShards
from asgd.live.sandblaster.worker import PortionResult
from asgd.live.supervisor import Supervisor
from asgd.sandblaster import Await, Image, Iterate, Settings
from asgd.sandblaster.batch_driver import BatchDriver
from asgd.sandblaster.settings import COORDINATOR, SHARD, PlannedKill

_CHECK_SECONDS = 0.05  # seconds between two checks of deadlines
# At most this many seconds between two checks count as time that workers took.
# If more have passed, the driver itself was stopped.
_MAX_DELAY = 1.0


class SavedRun(NamedTuple):
  """A saved state from which a run resumes."""

  notes: dict[str, Any]  # what `save_notes` got; can be written as JSON
  images: Sequence[Image] | None  # of the shards; None: use the shards' files


class Options(NamedTuple):
  """Settings of how the driver watches a run."""

  ladder: Ladder = Ladder()
  refill: bool = True  # replace workers that have exited
  together: bool = True  # start the first job once all workers have started


class HostMakers(NamedTuple):
  """The hosts, and factories of the shards and workers in them."""

  hosts: Hosts
  memory: Path  # folder of the shards' files
  worker: Callable[[int], Make]  # index -> the factory of the worker

  def shard(
    self, evaluation: int, index: int, image: Image, from_image: bool
  ) -> Make:
    """Returns the factory of a shard; the arguments are those of LiveShard."""
    return functools.partial(
      LiveShard,
      folder=self.memory / f"shard-{index}",
      image=image,
      evaluation=evaluation,
      from_image=from_image,
    )


def _first_images(
  plan: sharding.ShardPlan, params: base.Params
) -> list[Image]:
  """Returns the image of each shard before the first command. It has only the
  vector `point`, the first iterate."""
  return [
    Image(0, {"point": jax.tree.map(np.array, part)})
    for part in sharding.split(plan, params)
  ]


class Driver(BatchDriver, Cluster):
  """A live run of Sandblaster."""

  run_log: LiveRunLog
  _shards: LiveShards
  _workers: LiveBatchWorkers

  def __init__(
    self,
    settings: Settings,
    params: base.Params,
    makers: HostMakers,
    run_log: LiveRunLog,
    *,
    workers: int,
    options: Options | None = None,
    saved: SavedRun | None = None,
    save_notes: Callable[[dict[str, Any] | None], None] = lambda notes: None,
  ):
    """Prepares a run; `start` starts it.

    Args:
      settings: the settings of the run.
      params: the first iterate, as NumPy arrays.
      makers: the hosts, and the factories of shards and workers.
      run_log: the log of the run.
      workers: the number of workers.
      options: how the driver watches the run.
      saved: the state to resume from.
      save_notes: called when an evaluation begins, with the notes from which
        the next driver can resume it. Called with None if the files of a shard
        are unusable, so that the next driver needs a checkpoint.
    """
    self._options = options = options or Options()
    self._save_notes = save_notes
    notes = saved.notes if saved else {}
    BatchDriver.__init__(self, settings, params, run_log, notes)
    supervisor = Supervisor(
      makers.hosts,
      {SHARD: settings.shards, WORKER: workers},
      options.ladder,
      patience=DEAD_FACTOR * options.ladder.start,
    )
    Cluster.__init__(self, supervisor)
    self._workers = LiveBatchWorkers(
      workers, settings.jobs, supervisor, makers.worker, run_log
    )
    # Planned kills that have not happened, in the order of their times.
    failures = sorted(settings.failures)
    self._failures = failures[notes.get("failed", 0) :]
    if saved is not None:
      run_log.iterates = [Iterate(*fields) for fields in notes["iterates"]]
    # The shards' files have the messages that the coordinator has not requested
    # yet. Images lack these messages, so their jobs are computed again.
    if saved is not None and saved.images is None:
      self._losses = dict(notes.get("losses", ()))
    if isinstance(self.request, Await):  # in the middle of an evaluation
      self._jobs.begin(self.request.job, self._losses)
    elif self.request is None:  # the coordinator has ended: no job is left
      self._jobs.begin(settings.jobs)
    plan = sharding.make_plan(params, settings.shards)
    images = saved and saved.images
    self._shards = LiveShards(
      plan,
      supervisor,
      functools.partial(makers.shard, self._evaluation),
      images or _first_images(plan, params),
      from_images=saved is None or images is not None,
      number=notes.get("number", 0),
      on_unusable=lambda: save_notes(None),
    )

  # State.

  @property
  def now(self) -> float:
    """Seconds since the first job began."""
    start = self.run_log.first_start
    return 0.0 if math.isnan(start) else self._clock() - start

  def _clock(self) -> float:
    """Returns the seconds since the run began."""
    return self._supervisor.hosts.clock()

  # Running.

  def start(self) -> None:
    """Starts all shards and workers. If one of them cannot be created, raises a
    ValueError with the reason."""
    self._shards.start()
    self._workers.resume()
    for worker in range(len(self._workers.states)):
      self._workers.start(worker)
    # A resumed evaluation may start jobs meanwhile. Their messages wait, as
    # `until` is the number of messages received so far.
    while self._options.together and self._workers.starting_workers:
      self._handle_events(_CHECK_SECONDS, self.received)

  def advance(self, until: int, seconds: float) -> int:
    """Runs until `until` messages are received, the coordinator ends, or the
    time is over. Returns the number of received messages.

    Raises:
      WorkersDie, ShardsDie: if processes exit again and again.
      ValueError: the error that ended a worker or a shard.
    """
    deadline = self._clock() + seconds

    def wait() -> bool:
      remaining = deadline - self._clock()
      if remaining > 0:
        self._handle_events(min(_CHECK_SECONDS, remaining), until)
      return remaining > 0

    received = self._run(until, wait)
    self.run_log.news += self._supervisor.take_news()
    return received

  def _prepare(self, evaluation: int) -> None:
    """Saves the state, then makes the shards begin an evaluation."""
    # Save the notes before `begin`. After `begin` the shards have dropped the
    # answers of earlier commands, which a driver with older notes would repeat.
    self._shards.flush()
    self._evaluation_notes = self._notes()
    self._save_notes(self._evaluation_notes)
    self._shards.begin(evaluation)

  def _ticket(self, worker: int, job: int, fresh: bool) -> LiveJob:
    """Starts a job of the present evaluation on a worker."""
    seq = self._workers[worker].seq
    return self._call_worker(worker, self._evaluation, job, seq, fresh)

  def _call_worker(
    self, worker: int, evaluation: int, job: int, seq: int, fresh: bool
  ) -> LiveJob:
    """Calls a worker to do a job, with the present hosts of the shards."""
    party, shards = self._workers[worker].party, self._shards.hosts
    next_job = self._jobs.peek(worker)
    call = party.host.call("work", evaluation, job, seq, shards, next_job)
    party.job_start = start = self._clock()
    return LiveJob(evaluation, job, seq, fresh, start, call, shards)

  # Events.

  def _handle_events(self, seconds: float, until: float = math.inf) -> None:
    """Waits for events, for `seconds` at most, and handles them. After `until`
    messages are received, further messages wait."""
    # [1] Planned kills.
    if not math.isnan(self.run_log.first_start):
      while self._failures and self._failures[0].time <= self.now:
        self._kill(self._failures.pop(0))
    calls = self._workers.calls()
    if not calls and not self._supervisor.parties[WORKER]:
      raise WorkersDie(
        "all workers have exited, and none is replaced: set"
        " config.live.refill=True"
      )

    # [2] Calls of workers that have ended.
    hosts = self._supervisor.hosts
    start = self._clock()
    ended_calls = hosts.wait(list(calls.values()), seconds)
    elapsed = min(max(self._clock() - start, 0.0), _MAX_DELAY)
    for worker, call in calls.items():
      if call not in ended_calls:
        continue
      # The end of a job is a message, but the end of a start is not.
      if not self._workers[worker].has_joined or self.received < until:
        self._end_call(worker)

    # [3] Exits without a call, late starts, jobs that take too long.
    self._handle_idle_exits()
    self._workers.end_late(elapsed, DEAD_FACTOR * self._options.ladder.start)
    self._end_hanging_workers()

  def _kill(self, failure: PlannedKill) -> None:
    """Kills the process of a planned failure."""
    # The coordinator is an object of this process: only its state is lost.
    if failure.kind == COORDINATOR:
      self._lose_coordinator()
    elif party := self._supervisor.parties[failure.kind].get(failure.index):
      self._supervisor.end(party)

  def _end_call(self, worker: int) -> None:
    """Handles the end of a worker's call: a start or a job, or its failure."""
    state = self._workers[worker]
    try:
      if not state.has_joined:
        self._workers.join(worker)
      else:
        self._end_job(worker, state.ticket.call.result())
    except ValueError:
      # If the worker failed because a shard could not be created, `check`
      # raises the error of the shard, which has the reason.
      self._shards.check()
      raise
    except HostExited as error:
      if error.kind == WORKER:
        self._handle_exit(worker)
      else:  # a shard exited: the worker pushes its message again
        job = state.ticket
        self._shards.replace(error.index, job.shards[error.index])
        retry = self._call_worker(
          worker, job.evaluation, job.job, job.seq, job.fresh
        )
        state.ticket = retry._replace(start=job.start, loss=job.loss)
      return
    if self._evaluation >= 0:  # an evaluation has begun
      self._start(worker)

  def _end_job(self, worker: int, outcome: PortionResult) -> None:
    """Records the result of a job, and counts it for the deadlines."""
    state = self._workers[worker]
    job = state.ticket

    def result(accepted: bool) -> tuple[float, float]:
      # A late worker has computed nothing; a copy of the job may have ended.
      loss = job.loss if outcome.is_late else outcome.loss
      return loss, outcome.norm if accepted else 0.0

    self._supervisor.add_job(state.party, self._clock() - job.start)
    self._receive(worker, result)
    self._supervisor.count_received(self.received)

  # Exits.

  def _handle_idle_exits(self) -> None:
    """Handles the exits of workers without an open call: no call reports these
    exits."""
    for party in self._supervisor.exited_parties(WORKER):
      if self._workers[party.index].is_idle:
        self._handle_exit(party.index)

  def _handle_exit(self, worker: int) -> None:
    """Assigns the job of a worker that has exited to another worker. Replaces
    the worker that exited if the options say so."""
    ending = "hung" if self._workers[worker].party.hung else "died"
    self._leave(worker)
    self._supervisor.count_exit(WORKER, worker, ending)
    news = f"worker {worker} {ending}"
    if self._options.refill:
      self._workers.start(worker)
      news += " and is replaced"
    self._supervisor.news.append(news)
    if self._evaluation >= 0:
      self._start_idle()  # an idle worker may take the job

  def _end_hanging_workers(self) -> None:
    """Ends workers that take too long for a job; their calls then fail."""
    if not self._shards.are_made():  # workers wait for a restarted shard
      self._supervisor.stop_job_times(WORKER)
    for state in self._workers.states:
      # A call that has ended is handled in the next round.
      if state.ticket is not None and not state.ticket.call.done():
        self._supervisor.end_overdue(state.party)

  # Checkpoints.

  def _notes(self) -> dict[str, Any]:
    """Returns the notes of the base class, and those of a live run."""
    losses: dict[int, float] = {}  # job -> loss, of messages not yet summed
    if isinstance(self.request, Await):
      awaited_job = self.request.job
      losses = {
        job: loss for job, loss in self._losses.items() if job >= awaited_job
      }
    return {
      **super()._notes(),
      "losses": list(losses.items()),
      "iterates": [list(iterate) for iterate in self.run_log.iterates],
      "failed": len(self._settings.failures) - len(self._failures),
      "lengths": list(self.run_log.lengths),
    }

  def save(self) -> SavedRun | None:
    """Returns the present state; None while the coordinator repeats commands
    that the shards executed for an earlier driver."""
    images = self._shards.images()
    if images is None:
      return None
    # The next driver cuts trace and records back to the lengths in the notes.
    # So the notes must be as new as this checkpoint.
    notes = self._notes()
    self._save_notes(notes)
    return SavedRun(notes, images)

  def close(self) -> None:
    """Ends all parties, and closes the files of the log."""
    super().close()
    self.run_log.close()
