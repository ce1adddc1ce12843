"""The driver of a run of tables: it replaces processes, and moves rows.

The driver handles no messages of training, only rows that move to another
shard. Its supervisor starts, watches and ends shards and workers. They run in
hosts (`asgd.live.hosts`): threads or Ray actors.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from asgd.live.cluster import Cluster
from asgd.live.deadlines import Ladder
from asgd.live.failures import AllDied
from asgd.live.hosts import Host, Hosts, Make
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.supervisor import Party, Supervisor, answer_of
from asgd.live.tables import files
from asgd.live.tables.worker import (
  ENDED,
  EXPELLED,
  HALTED,
  LOST,
  REJECTED,
  RESTS,
  NewDivision,
)
from asgd.tables import division, requests

_WORKS = "works"  # `WorkerHost.run` has not returned


class Images(NamedTuple):
  """The complete state of a run at rest."""

  shards: list[tuple[int, bytes]]  # (rows of the trace, image)
  # Worker -> (rows of its trace, records, image).
  workers: dict[int, tuple[int, int, bytes]]


class Makers(NamedTuple):
  """Factories: each returns a function that makes a shard or worker in its
  host."""

  shard: Callable[[int, bytes | None], Make]  # (index, image)
  # (index, hosts by shard, image)
  worker: Callable[[int, Mapping[int, Host], bytes | None], Make]


class _WorkerState(NamedTuple):
  """The state of a worker: at work, or the result of its last call of `run`."""

  result: str = _WORKS
  shard: int = 0  # if LOST: the shard that the worker could not reach

  @property
  def is_idle(self) -> bool:
    """Whether the worker does nothing until the driver calls it."""
    return self.result in (ENDED, HALTED, RESTS)


class TableCluster(Cluster):
  """Shards and workers of a run. The caller calls `start` once, then `check`
  repeatedly until `finished`."""

  def __init__(
    self,
    hosts: Hosts,
    makers: Makers,
    run: Path,
    *,
    shards: int,
    workers: int,
    ladder: Ladder,
    refill: bool,
  ):
    """Prepares a cluster.

    Args:
      hosts: the hosts of shards and workers.
      makers: the makers of shards and workers.
      run: folder of the run.
      shards: the number of shards.
      workers: the number of workers.
      ladder: time limits of workers that hang.
      refill: whether a new incarnation replaces a worker that has exited. If
        not, the other workers stop waiting for that worker.
    """
    self._makers, self._run, self._refill = makers, run, refill
    self._counts = {SHARD: shards, WORKER: workers}
    super().__init__(Supervisor(hosts, self._counts, ladder))
    # The images from which shards start; None once all shards are created.
    self._shard_images: Sequence[bytes] | None = None
    self._states: dict[int, _WorkerState] = {}  # live worker -> its state
    # Jobs after which each worker halts for a pause; None: no pause.
    self._limit: int | None = None

  # A run.

  def start(self, images: Images | None = None) -> None:
    """Starts all shards and workers, from images if given."""
    if images:
      self._shard_images = [image for _, image in images.shards]
    shards = [self._start_shard(i) for i in range(self._counts[SHARD])]
    # A shard that exits before it is created may not have stored its image.
    while exited_shards := self._supervisor.await_made(shards):
      shards = [self._replace_shard(party.index) for party in exited_shards]
    self._shard_images = None
    for worker in range(self._counts[WORKER]):
      worker_image = images.workers.get(worker) if images else None
      if images and worker_image is None and not self._refill:
        continue  # the worker had left before the checkpoint
      self._start_worker(worker, worker_image and worker_image[2])

  def _start_shard(self, index: int) -> Party:
    """Starts a shard: from its image, or else from the files that it has."""
    image = self._shard_images[index] if self._shard_images else None
    make = self._makers.shard(index, image)
    return self._supervisor.start(SHARD, index, make)

  def _start_worker(self, worker: int, image: bytes | None = None) -> None:
    """Starts a worker, and calls its `run`."""
    shards = self._supervisor.parties[SHARD].items()
    hosts = {index: party.host for index, party in shards}
    make = self._makers.worker(worker, hosts, image)
    self._call_run(self._supervisor.start(WORKER, worker, make))

  def _call_run(
    self,
    party: Party,
    restarted_hosts: Mapping[int, Host] = MappingProxyType({}),
    new_division: NewDivision | None = None,
  ) -> None:
    """Calls a worker's `run`, with the hosts of shards that were restarted, and
    with the new division if the worker rests."""
    party.run = party.host.call(
      "run", self._limit, dict(restarted_hosts), new_division
    )
    self._states[party.index] = _WorkerState()

  @property
  def finished(self) -> bool:
    """Whether all jobs of the live workers are done."""
    return self._all_returned(ENDED)

  def _all_returned(self, result: str) -> bool:
    """Whether `run` of each live worker has returned this result."""
    results = {state.result for state in self._states.values()}
    return results == {result}

  def check(self, received: int) -> list[str]:
    """Restarts shards and workers that have exited, ends workers that hang, and
    moves ranges of rows once all workers rest. Returns lines for the user.

    Args:
      received: jobs received so far in the run.

    Raises:
      AllDied: if the last worker has exited, and none replaces it.
      NotFinite, WorkersDie, ShardsDie: if replacing processes would not help.
    """
    self._supervisor.count_received(received)
    self._handle_events()
    return self._supervisor.take_news()

  def _handle_events(self) -> None:
    """Handles exits and results of participants. Raises the errors of `check`.
    """
    supervisor = self._supervisor

    # [1] Shards first: workers cannot continue without them.
    for party in supervisor.exited_parties(SHARD):
      self._restart(party.index)

    # [2] Workers that have returned from `run`, that have exited, or that had
    # lost a shard, which may be alive again.
    exited_workers = supervisor.exited_parties(WORKER)
    for party in [*supervisor.parties[WORKER].values()]:
      if party.run is not None and party.run.done():
        answer, party.run = answer_of(party.run), None
        self._handle_return(party, answer)
      elif party in exited_workers:
        self._handle_exit(party, "died")
      elif self._states[party.index].result == LOST:
        self._retry_run(party)

    # [3] Workers that hang; then ranges, once all workers rest.
    self._end_hanging_workers()
    if self._limit is None and self._all_returned(RESTS):
      self._divide()

  def _replace_shard(self, index: int) -> Party:
    """Starts a shard again that has exited."""
    supervisor = self._supervisor
    supervisor.count_exit(SHARD, index, "died")
    supervisor.stop_job_times(WORKER)
    supervisor.news.append(f"shard {index} exited and is restarted")
    return self._start_shard(index)

  def _restart(self, index: int) -> None:
    """Restarts a shard from its image and the requests since the image."""
    self._supervisor.await_made([self._replace_shard(index)])
    # During a pause shard 0 sends the limit to workers. An image has no limit.
    if self._limit is not None and not index:
      self._ask("set_limit", self._limit, among=[0])

  def _handle_return(
    self, party: Party, answer: tuple[tuple[str, int]] | None
  ) -> None:
    """Handles the return of a worker's `run`. If there is no answer, the worker
    has exited."""
    state = _WorkerState(*answer[0]) if answer else _WorkerState("died")
    if state.result == LOST:
      self._states[party.index] = state
      self._retry_run(party)
    elif state.is_idle:
      self._states[party.index] = state
      if self._limit is None and state.result == HALTED:
        self._call_run(party)  # the pause has ended before the worker halted
    else:
      self._handle_exit(party, state.result)

  def _retry_run(self, party: Party) -> None:
    """Calls `run` of a worker that had lost a shard, if the shard is alive: it
    was restarted, or only the connection had failed."""
    shard = self._states[party.index].shard
    # The next `check` restarts a shard that has exited, and then calls this
    # method again.
    exited_shards = self._supervisor.exited_parties(SHARD)
    if any(party.index == shard for party in exited_shards):
      return
    host = self._supervisor.parties[SHARD][shard].host
    self._call_run(party, {shard: host})

  def _handle_exit(self, party: Party, ending: str) -> None:
    """Records that a worker exited before it had finished its jobs. Then
    replaces the worker, or removes it from the shards."""
    supervisor, worker = self._supervisor, party.index
    hosts = supervisor.hosts
    # Drop the worker first: an ended process writes no row after its LEAVE.
    supervisor.drop(party)
    del self._states[worker]
    files.write_leave(self._run, worker, hosts.clock(), hosts.disk)
    if ending == REJECTED:
      supervisor.count_refusal(WORKER, worker)
    # Shards expel a worker when its next incarnation joins: it had hung.
    if party.hung or ending == EXPELLED:
      ending = "hung"
    supervisor.count_exit(WORKER, worker, ending)
    if self._refill:
      supervisor.news.append(f"worker {worker} {ending} and is replaced")
      self._start_worker(worker)
      return
    supervisor.news.append(
      f"worker {worker} {ending}; the run continues without it"
    )
    if not self._states:
      raise AllDied(f"all workers have exited; the last was worker {worker}")
    self._ask("leave", worker)

  def _ask(
    self, method: str, *args: Any, among: Iterable[int] | None = None
  ) -> list[Any]:
    """Calls a method of shards until all have answered, and restarts shards
    that have exited. Returns the answers."""
    return self._supervisor.ask_until_answered(
      SHARD, method, *args, among=among, restart=self._restart
    )

  def _end_hanging_workers(self) -> None:
    """Ends workers that take too long for a clock. `check` then replaces these
    workers."""
    supervisor, statuses = self._supervisor, self._ask("status")
    waiting_workers = set().union(*(status.waiting for status in statuses))
    for worker, party in supervisor.parties[WORKER].items():
      # A worker that waits for other workers at a shard does not hang.
      is_idle = party.run is None or worker in waiting_workers
      jobs_done = None if is_idle else statuses[0].jobs_done[worker]
      supervisor.watch(party, jobs_done)

  # Moving ranges.

  def wait(self, seconds: float) -> None:
    """Waits until a worker's `run` has returned, for `seconds` at most."""
    parties = self._supervisor.parties[WORKER].values()
    runs = [party.run for party in parties if party.run is not None]
    if runs:
      self._supervisor.hosts.wait(runs, seconds)
    else:
      self._supervisor.hosts.sleep(seconds)

  def _divide(self) -> None:
    """Divides the tables by the load since the last division, and makes the
    workers continue.

    All workers rest, so no shard changes meanwhile. A shard that is restarted
    gives the same answers.
    """
    # [1] Compute new cuts from the loads.
    loads = self._ask("load")
    cuts = division.by_load([load for _, load in loads])
    # [2] Each shard returns the rows that move to other shards.
    handovers = self._ask("give", cuts)
    # The version makes `move` idempotent: a shard that has this version ignores
    # a repeated call.
    version = loads[0][0] + 1
    # [3] Each shard gets its new ranges.
    for shard in range(self._counts[SHARD]):
      parts = [
        handover.parts[shard]
        for handover in handovers
        if shard in handover.parts
      ]
      data = requests.dump_move(version, cuts, parts)
      self._ask("move", data, among=[shard])
    # [4] The workers get the cuts and continue.
    for worker, party in self._supervisor.parties[WORKER].items():
      rows = [handover.rows[worker] for handover in handovers]
      self._call_run(party, new_division=NewDivision(cuts, rows))

  # Pause and checkpoints.

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes all workers halt after the same clock, and waits until they have.
    Raises the errors of `check`.

    Args:
      seconds: the time to wait at most.

    Returns:
      Whether all workers have halted.
    """
    # Shard 0 alone sets the limit: two shards could set different limits.
    if self._limit is None:
      (self._limit,) = self._ask("halt", among=[0])
    return self.wait_for_rest(self._are_at_rest, seconds)

  def _are_at_rest(self) -> bool:
    """Handles exits; returns whether all live workers are idle."""
    self._handle_events()  # a shard may exit while the workers halt
    return all(state.is_idle for state in self._states.values())

  def resume(self) -> None:
    """Ends a pause."""
    self._limit = None
    self._ask("set_limit", None, among=[0])
    for worker, state in self._states.items():
      if state.result == HALTED:
        self._call_run(self._supervisor.parties[WORKER][worker])

  def images(self) -> Images:
    """Returns the state of a paused run. If a worker has exited, first waits
    until its replacement has halted. Raises the errors of `check`."""
    while True:
      shards = self._ask("image")
      workers = self._supervisor.ask(WORKER, "image")
      if workers.keys() == self._states.keys():
        return Images(shards, workers)
      # A worker has exited. Its replacement may send requests before it halts,
      # which change the shards. So all images are requested again.
      self.pause()

  def rows(self) -> list[dict[str, np.ndarray]]:
    """Returns the current rows of each shard."""
    return self._ask("rows")

  def filtered_counts(self) -> tuple[int, int]:
    """Returns numbers of rows: (held back by filters, dropped by filters), over
    the live workers that have finished."""
    states = self._states.items()
    ended_workers = [
      worker for worker, state in states if state.result == ENDED
    ]
    counts = self._supervisor.ask(
      WORKER, "held_counts", among=ended_workers
    ).values()
    n_held_back = sum(held_back for held_back, _ in counts)
    return n_held_back, sum(dropped for _, dropped in counts)

  def progress(self) -> list[tuple[int, int]]:
    """Returns (messages applied, the slowest clock) of each shard."""
    return self._ask("progress")
