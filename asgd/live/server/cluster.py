"""The driver of a dense parameter server: it watches its shards and workers.

The driver is no part of the training: it sees no message. Its supervisor
starts, asks and counts parties. This module adds the dense server's part:
replacing workers that the lead has expelled, images of one row, and tickets
that stay open when all messages are received.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from asgd import sharding
from asgd.live.cluster import Cluster
from asgd.live.deadlines import DEAD
from asgd.live.duty import Duty
from asgd.live.failures import NotFinite
from asgd.live.hosts import Hosts
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.links.base import Disconnected
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.shard import Shard
from asgd.live.supervisor import TRIES, Party, Supervisor, answer_of

Status = dict[str, Any]  # of a shard, see `Shard.status`
_ROWS_AHEAD = 20  # rows until an image, for the request to reach all shards
_END_SECONDS = 5.0  # for shards to write pending rows
_LOOK = 0.1  # seconds between two looks
_LEAVE_SECONDS = 2.0  # for workers to leave, once all is done


def _finished(status):
  if not status or not status[0]["stopped"]:
    return False
  return not any(shard["busy"] for shard in status)


def _take_params(received, shard):  # of a module, to travel by its name
  if received is None:
    return shard.state.server.params
  return shard.state.messages.kept_params.pop(received, None)


class ServerCluster(Cluster):
  """Shards and workers of a run: `start` begins, and `check` and `status` are
  to be called again and again until it is `finished`."""

  def __init__(
    self,
    setup: Setup,
    plan: sharding.ShardPlan | None,
    hosts: Hosts,
    makers: ServerMakers,
    make_duty: Callable[[], Duty],
    *,
    refill: bool = True,
    resumed: bool = False,
    leave_seconds: float = _LEAVE_SECONDS,
  ):
    """Prepares.

    Args:
      setup: of the run.
      plan: how its shards share the parameters; None: there is one shard.
      hosts: which run shards and workers.
      makers: of both.
      make_duty: what workers do; called where they run.
      refill: replace a worker that exits.
      resumed: the journals of shards hold the beginning.
      leave_seconds: that workers get to write their files after the last job.
    """
    self.setup, self._plan, self._makers = setup, plan, makers
    self._make_duty, self._resumed = make_duty, resumed
    self._refill, self._leave_seconds = refill, leave_seconds
    counts = {SHARD: setup.shards, WORKER: setup.workers}
    super().__init__(Supervisor(hosts, counts, setup.ladder))
    self._starts = collections.Counter[int]()  # incarnations of each worker
    self._image_row = -1  # at which shards keep an image
    # Workers that were replaced since the lead last reported whom it has given
    # up: it may mean the one before, which is one exit.
    self._refilled: set[int] = set()
    self._absent: dict[int, float] = {}  # workers that have not joined, since
    self._stopped = False  # all jobs are received, as the lead reported
    self.statuses: list[Status] | None = None  # that were asked for last

  @property
  def finished(self) -> bool:
    """Whether every job was received, by all shards, as `statuses` say."""
    return _finished(self.statuses)

  @property
  def _patience(self):
    """Seconds after which a worker that has not joined is replaced."""
    return DEAD * self.setup.ladder.start

  # Starting.

  def measure(self, jobs: int) -> list[float]:
    """Returns the seconds that a job takes each worker, of so many jobs that
    all do at the same time; to be called before `start`. The same workers then
    train: what was measured are the machines they are on."""
    for worker in range(self.setup.workers):
      self._make_worker(worker)
    self._of_all_workers("prepare", self._make_duty)
    return self._of_all_workers("measure", jobs)

  def _of_all_workers(self, method, *args):
    """Returns what all workers answer; raises what one of them raises."""
    calls = {
      (WORKER, worker): party.host.call(method, *args)
      for worker, party in sorted(self._supervisor.parties[WORKER].items())
    }
    # No line names the silent worker: an answer may take as long as a job.
    silent = self._supervisor.silent(calls, self._patience)
    if silent:
      raise ValueError(
        f"{len(silent)} workers took more than {self._patience:g} seconds to"
        " compile or to do the jobs that are timed: give them more with"
        " config.live.start_seconds, or fewer with config.allocation.jobs"
      )
    found = []
    for (_, worker), call in calls.items():
      answer = answer_of(call)
      if answer is None:
        raise ValueError(
          f"worker {worker} died while it was measured; run the same command"
          " again, or give sizes instead (config.allocation)"
        )
      found.append(answer[0])
    return found

  def assign(self, make_duty: Callable[[], Duty]) -> None:
    """Gives workers something else to do than what the cluster was made with;
    to be called before `start`."""
    self._make_duty = make_duty

  def start(self) -> None:
    """Starts all parties."""
    for index in range(self.setup.shards):
      self._start_shard(index, self._resumed)
    for worker in range(self.setup.workers):
      measured = self._supervisor.parties[WORKER].get(worker)
      self._run_worker(measured or self._make_worker(worker))

  def _start_shard(self, index, resumed=False):
    make = self._makers.shard(index, resumed)
    party = self._supervisor.start(SHARD, index, make)
    party.run = party.host.call("run")

  def add_worker(self, worker: int) -> None:
    """Starts the next incarnation of a worker."""
    self._run_worker(self._make_worker(worker))

  def _make_worker(self, worker) -> Party:
    make = self._makers.worker(worker, self._starts[worker])
    self._starts[worker] += 1
    self._absent.pop(worker, None)
    return self._supervisor.start(WORKER, worker, make)

  def _run_worker(self, party):
    party.run = party.host.call("run", self._make_duty)

  # Watching.

  def check(self, received: int = 0) -> list[str]:
    """Replaces workers and shards that have exited; returns lines for the user.
    Raises what made one of them exit, if it would end the next one, too. The
    lead itself reports how many messages were `received`."""
    del received
    supervisor = self._supervisor
    for party, how in supervisor.take_ended(SHARD):
      supervisor.count_exit(SHARD, party.index, how)
      supervisor.news.append(f"shard {party.index} {how}; another takes over")
      self._start_shard(party.index)
    for party, how in supervisor.take_ended(WORKER):
      self._worker_ended(party.index, how)
    return supervisor.take_news()

  def _worker_ended(self, worker, how):
    """Handles a worker that was dropped."""
    news, restarts = self._supervisor.news, self._starts[worker] - 1
    for shard in self._supervisor.parties[SHARD].values():
      shard.host.call("worker_exited", worker, restarts)
    if how == "stopped":
      return
    if not self._refill:
      news.append(f"worker {worker} {how}")
      return
    self._refilled.add(worker)
    self._supervisor.count_exit(WORKER, worker, how)
    self.add_worker(worker)
    news.append(f"worker {worker} {how}; another takes its place")

  def status(self) -> list[Status] | None:
    """Returns each `Shard.status`, None while a shard is being replaced.
    Workers that the lead has given up are replaced. Raises NotFinite for more
    refused messages, in a row or of one job, than three for each worker."""
    found = self._supervisor.poll(
      SHARD, "ask", Shard.status, among=self._made_shards()
    )
    found = {index: value[0] for index, value in found.items() if value}
    statuses = [found.get(index) for index in range(self.setup.shards)]
    lead, *others = statuses
    if lead:
      if lead["refused"] > TRIES * self.setup.workers:
        raise NotFinite(
          f"{lead['refused']} messages, in a row or of one job, were not"
          f" finite, at message {lead['received']}"
        )
      self._supervisor.progressed(lead["received"])
      self._stopped = lead["stopped"]
      self._replace_lost_workers(lead)
      self._refilled.clear()
      there = [shard for shard in others if shard]
      if _finished([lead]) and any(shard["busy"] for shard in there):
        self._answers(Shard.end_open_tickets)
    self.statuses = statuses if all(statuses) else None
    return self.statuses

  def _replace_lost_workers(self, lead):
    """Replaces workers that the lead has given up, and those that never
    join."""
    now = self._supervisor.hosts.clock()
    lost = set(lead["expelled"]) - self._refilled
    workers = self._supervisor.parties[WORKER]
    for worker in workers:
      if worker in lead["workers"]:
        self._absent.pop(worker, None)
        continue
      since = self._absent.setdefault(worker, now)
      if now - since > self._patience:
        lost.add(worker)
    for worker in sorted(lost & set(workers)):
      self._supervisor.drop(workers[worker])
      self._worker_ended(worker, "hung")

  # Asking shards.

  def _made_shards(self) -> list[int]:
    """Returns the shards whose objects are made; `check` raises what kept one
    from that."""
    made = []
    for index, party in self._supervisor.parties[SHARD].items():
      with contextlib.suppress(Exception):
        made += [index] if party.ready else []
    return made

  def _answers(self, call) -> dict[int, Any]:
    """Calls something with all shards; returns what those that serve answer."""
    found = self._supervisor.ask(SHARD, "ask", call)
    return {index: value[0] for index, value in found.items() if value}

  def _ask(self, call: Callable[[Shard], Any]) -> list[Any]:
    """Calls something with each shard. Raises Disconnected if one has exited,
    or does not answer polls."""
    for index, party in self._supervisor.parties[SHARD].items():
      if party.poll is not None:
        raise Disconnected(index)
    found = self._answers(call)
    for index in range(self.setup.shards):
      if index not in found:
        raise Disconnected(index)
    return [found[index] for index in range(self.setup.shards)]

  def params(self, received: int | None = None) -> Any:
    """Returns the whole parameters: now, or as kept after so many messages.
    Raises Disconnected if a shard that has them has exited."""
    parts = self._ask(functools.partial(_take_params, received))
    for index, part in enumerate(parts):
      if part is None:
        raise Disconnected(index)
    return parts[0] if self._plan is None else sharding.join(self._plan, parts)

  def images(self) -> list[tuple[Any, Any]] | None:
    """Returns each `Shard.image`; in a consistent run they are of one row, and
    None says that there are none yet: call again later. Raises Disconnected if
    a shard has exited."""
    if not self.setup.consistent or self.setup.shards == 1:
      return self._ask(Shard.image)
    row = self._image_row
    kept = self._ask(methodcaller("requested_image", row))
    rows, images = zip(*kept, strict=True)
    if None not in images:
      self._image_row = -1
      return list(images)
    if len(set(rows)) == 1:  # nothing is under way
      images = self._ask(Shard.image)
      if len({meta["rows"] for _, meta in images}) == 1:
        return images
    if row < 0 or max(rows) > row + _ROWS_AHEAD:  # or one has lost it
      self._image_row = max(rows) + _ROWS_AHEAD
      self._ask(methodcaller("request_image", self._image_row))
    return None

  # Waiting.

  def insist(self, question: Callable[[], Any]) -> Any:
    """Returns what shards answer to a question, which is asked again if one of
    them has to be replaced first."""
    while True:
      try:
        return question()
      except Disconnected:
        self.check()
        self.status()
        self._supervisor.hosts.sleep(_LOOK)

  def images_now(self) -> list[tuple[Any, Any]]:
    """Returns `images`, once there are some."""
    while (images := self.insist(self.images)) is None:
      self.check()
      self._supervisor.hosts.sleep(_LOOK)
    return images

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes workers start nothing new, and waits until they have handed in what
    they have begun, so many seconds at most; returns whether they have."""
    self.insist(lambda: self._ask(Shard.pause))

    def at_rest():
      status = self.status()
      return bool(status) and not any(shard["busy"] for shard in status)

    return self._supervisor.rest(at_rest, seconds)

  # The end.

  def close(self) -> None:
    """Ends all parties; the files that they wrote stay."""
    supervisor = self._supervisor
    try:
      if self._stopped:  # then workers end by themselves
        workers = supervisor.parties[WORKER].items()
        runs = {(WORKER, worker): party.run for worker, party in workers}
        supervisor.silent(runs, self._leave_seconds)
      shards = supervisor.parties[SHARD]
      ends = {
        (SHARD, shard): shards[shard].host.call("end")
        for shard in self._made_shards()
      }
      supervisor.silent(ends, _END_SECONDS)
    finally:
      supervisor.close()
