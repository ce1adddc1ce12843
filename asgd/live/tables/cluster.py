"""The driver of a run of tables: it moves ranges, and makes workers rest.

The driver sees no message, but rows that go to another shard. Its supervisor
starts, watches and ends shards and workers, which are in hosts
(`asgd.live.hosts`): threads or actors of Ray.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
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
  Moved,
)
from asgd.tables import division, requests

_WORKS = "works"  # beside how `WorkerHost.run` ends


class Images(NamedTuple):
  """All of a run at rest."""

  shards: list[tuple[int, bytes]]  # rows of the order, image
  workers: dict[int, tuple[int, int, bytes]]  # rows, records, image


class Makers(NamedTuple):
  """Each returns the function that a host calls to make its party."""

  shard: Callable[[int, bytes | None], Make]  # (index, image)
  # (index, hosts of shards, image)
  worker: Callable[[int, Mapping[int, Host], bytes | None], Make]


class _Standing(NamedTuple):
  """What a worker does, or how its last call of `run` ended."""

  how: str = _WORKS
  shard: int = 0  # that a LOST one waits for

  @property
  def idle(self) -> bool:
    """Whether it does nothing until it is called."""
    return self.how in (ENDED, HALTED, RESTS)


class TableCluster(Cluster):
  """Shards and workers of a run: `start` begins, and `check` is to be called
  again and again until `finished`."""

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
    """`refill`: put a new worker in the place of one that died; without it
    nobody waits for the place any more."""
    self._makers, self._run, self._refill = makers, run, refill
    self._counts = {SHARD: shards, WORKER: workers}
    super().__init__(Supervisor(hosts, self._counts, ladder))
    self._standing: dict[int, _Standing] = {}  # of each worker alive
    self._limit: int | None = None

  # A run.

  def start(self, images: Images | None = None) -> None:
    """Starts all shards and workers, or those of images."""
    shards = []
    for index in range(self._counts[SHARD]):
      image = images.shards[index][1] if images else None
      make = self._makers.shard(index, image)
      shards.append(self._supervisor.start(SHARD, index, make))
    self._supervisor.await_made(shards)
    for worker in range(self._counts[WORKER]):
      packed = images.workers.get(worker) if images else None
      if images and packed is None and not self._refill:
        continue  # it had left
      self._add(worker, packed and packed[2])

  def _add(self, worker, image=None):
    shards = self._supervisor.parties[SHARD].items()
    hosts = {index: party.host for index, party in shards}
    make = self._makers.worker(worker, hosts, image)
    self._call_run(self._supervisor.start(WORKER, worker, make))

  def _call_run(self, party, found=(), ranges=None):
    """Makes a worker work: `found` has the hosts of shards that were started
    again, and `ranges` those of a worker that rests."""
    party.run = party.host.call("run", self._limit, dict(found), ranges)
    self._standing[party.index] = _Standing()

  @property
  def finished(self) -> bool:
    """Whether all jobs of the workers alive are done."""
    return self._all_are(ENDED)

  def _all_are(self, how):
    each = self._standing.values()
    return bool(each) and all(standing.how == how for standing in each)

  def check(self, received: int) -> list[str]:
    """Looks at the cluster, of which so many jobs were received; returns lines
    for the user. Raises AllDied, NotFinite, WorkersDie and ShardsDie, and what
    would end those that follow, too."""
    self._supervisor.progressed(received)
    self._look()
    return self._supervisor.take_news()

  def _look(self):
    supervisor = self._supervisor
    for party in supervisor.lost(SHARD):
      self._restart(party.index)
    lost = supervisor.lost(WORKER)
    for party in [*supervisor.parties[WORKER].values()]:
      if party.run is not None and party.run.done():
        answer, party.run = answer_of(party.run), None
        self._ended(party, answer)
      elif party in lost:
        self._bury(party, "died")
      elif self._standing[party.index].how == LOST:
        self._call_again(party)
    self._end_hanging()
    if self._limit is None and self._all_are(RESTS):
      self._divide()

  def _restart(self, index):
    """Starts a shard again, from its image and the requests since."""
    supervisor = self._supervisor
    supervisor.count_exit(SHARD, index, "died")
    supervisor.excuse(WORKER)
    supervisor.news.append(f"shard {index} died; it comes back")
    party = supervisor.start(SHARD, index, self._makers.shard(index, None))
    supervisor.await_made([party])
    if self._limit is not None and not index:
      self._ask("allow", self._limit, among=[0])

  def _ended(self, party, answer: tuple[tuple[str, int]] | None):
    """Handles the end of a worker's call of `run`, without an answer if the
    worker has exited."""
    standing = _Standing(*answer[0]) if answer else _Standing("died")
    if standing.how == LOST:
      self._standing[party.index] = standing
      self._call_again(party)
    elif standing.idle:
      self._standing[party.index] = standing
      if self._limit is None and standing.how == HALTED:
        self._call_run(party)  # a pause is over since
    else:
      self._bury(party, standing.how)

  def _call_again(self, party):
    """Makes a worker work that has lost a shard, unless that is lost still: the
    worker may have lost the connection alone."""
    shard = self._standing[party.index].shard
    if any(lost.index == shard for lost in self._supervisor.lost(SHARD)):
      return
    host = self._supervisor.parties[SHARD][shard].host
    self._call_run(party, {shard: host})

  def _bury(self, party: Party, how: str):
    """Handles a worker that has ended before its jobs."""
    supervisor, worker = self._supervisor, party.index
    hosts = supervisor.hosts
    supervisor.drop(party)
    del self._standing[worker]
    files.leave(self._run, worker, hosts.clock(), hosts.disk)
    if how == REJECTED:
      supervisor.count_refusal(WORKER, worker)
    if party.hung or how == EXPELLED:  # another has its place
      how = "hung"
    supervisor.count_exit(WORKER, worker, how)
    if self._refill:
      supervisor.news.append(f"worker {worker} {how}; another takes its place")
      self._add(worker)
      return
    supervisor.news.append(
      f"worker {worker} {how}; nobody waits for it any more"
    )
    if not self._standing:
      raise AllDied(f"all workers died, the last was worker {worker}")
    self._ask("leave", worker)

  def _ask(
    self, method: str, *args: Any, among: Iterable[int] | None = None
  ) -> list[Any]:
    """Returns what shards answer; those that have exited are started again."""
    return self._supervisor.ask_until_answered(
      SHARD, method, *args, among=among, restart=self._restart
    )

  def _end_hanging(self):
    """Ends workers that are at a clock for too long; `check` then replaces
    them."""
    statuses = self._ask("status")
    waiting = set().union(*(status.waiting for status in statuses))
    for worker, party in self._supervisor.parties[WORKER].items():
      idle = party.run is None or worker in waiting
      done = None if idle else statuses[0].done[worker]
      self._supervisor.watch(party, done)

  # Moving ranges.

  def wait(self, seconds: float) -> None:
    """Waits until a worker has ended or rests, so many seconds at most."""
    parties = self._supervisor.parties[WORKER].values()
    runs = [party.run for party in parties if party.run is not None]
    if runs:
      self._supervisor.hosts.wait(runs, seconds)
    else:
      self._supervisor.hosts.sleep(seconds)

  def _divide(self):
    """Divides tables anew, by what was pulled and pushed of each row since the
    last time, and makes workers work again. All of them rest, so nothing
    changes until then: a shard that is started again answers the same."""
    loads = self._ask("load")
    cuts = division.by_load([load for _, load in loads])
    given = self._ask("give", cuts)
    version = loads[0][0] + 1
    for shard in range(self._counts[SHARD]):
      parts = [mine.parts[shard] for mine in given if shard in mine.parts]
      data = requests.dump_move(version, cuts, parts)
      self._ask("move", data, among=[shard])
    for worker, party in self._supervisor.parties[WORKER].items():
      rows = [each.rows[worker] for each in given]
      self._call_run(party, ranges=Moved(cuts, rows))

  # All at once.

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes all workers end the same clock, and waits for it, so many seconds
    at most; returns whether they have. Raises as `check`."""
    if self._limit is None:
      (self._limit,) = self._ask("halt", among=[0])
    return self._supervisor.rest(self._at_rest, seconds)

  def _at_rest(self):
    self._look()  # also at rest a shard may exit
    return all(standing.idle for standing in self._standing.values())

  def go_on(self) -> None:
    """Ends a pause."""
    self._limit = None
    self._ask("allow", None, among=[0])
    for worker, standing in self._standing.items():
      if standing.how == HALTED:
        self._call_run(self._supervisor.parties[WORKER][worker])

  def images(self) -> Images:
    """Returns all there is, at a pause. Of a worker that has exited, the next
    one has to rest first. Raises as `check`."""
    while True:
      shards = self._ask("image")
      workers = self._supervisor.ask(WORKER, "image")
      if workers.keys() == self._standing.keys():
        return Images(shards, workers)
      self.pause()

  def rows(self) -> list[dict[str, np.ndarray]]:
    """Returns the rows of each shard, as they are."""
    return self._ask("rows")

  def held(self) -> tuple[int, int]:
    """(rows that filters held back for later, rows that they dropped), of the
    workers that are alive and have ended."""
    standings = self._standing.items()
    ended = [worker for worker, each in standings if each.how == ENDED]
    both = self._supervisor.ask(WORKER, "held", among=ended).values()
    return sum(back for back, _ in both), sum(dropped for _, dropped in both)

  def counts(self) -> list[tuple[int, int]]:
    """Returns (messages applied, the slowest clock) of each shard."""
    return self._ask("counts")
