"""The driver of a dense parameter server: it watches shards and workers.

The driver takes no part in the training: it sees no message. Its supervisor
starts and calls shards and workers, and counts their exits. `ServerCluster`
also replaces workers that the lead (shard 0) has expelled. It collects each
shard's image, its state for a checkpoint. When the lead has all messages, it
ends the tickets that are still open.
"""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

from asgd import sharding
from asgd.live.cluster import Cluster
from asgd.live.deadlines import DEAD_FACTOR
from asgd.live.failures import NotFinite
from asgd.live.hosts import Hosts
from asgd.live.hosts.base import SHARD, WORKER
from asgd.live.links.base import Disconnected
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.shard import Shard
from asgd.live.supervisor import MOST_REFUSALS, Party, Supervisor
from asgd.live.worker_spec import WorkerSpec

Status = dict[str, Any]  # of a shard, see `Shard.status`
# Images are requested for a journal row this far ahead, so that the request
# reaches all shards before that row.
_ROWS_AHEAD = 20
_END_SECONDS = 5.0  # for shards to write pending rows
_CHECK_SECONDS = 0.1  # seconds between two checks of shards
_LEAVE_SECONDS = 2.0  # for workers to leave, after the last job


def _are_finished(statuses: Sequence[Status] | None) -> bool:
  """Whether the lead has received every job, and no shard has an open ticket;
  `statuses` begin with the lead's."""
  if not statuses or not statuses[0]["stopped"]:
    return False
  return not any(shard["busy"] for shard in statuses)


# At module level, so that pickle can send the function to a shard by its name.
def _take_params(received: int | None, shard: Shard) -> Any:
  """Returns a shard's parameters: the present ones if `received` is None, else
  those that the shard stored after `received` messages and now drops."""
  if received is None:
    return shard.state.server.params
  return shard.state.messages.kept_params.pop(received, None)


class ServerCluster(Cluster):
  """Shards and workers of a run. After `start`, the driver calls `check` and
  `status` again and again until the cluster is `finished`."""

  def __init__(
    self,
    setup: Setup,
    plan: sharding.ShardPlan | None,
    hosts: Hosts,
    makers: ServerMakers,
    make_spec: Callable[[], WorkerSpec],
    *,
    refill: bool = True,
    resumed: bool = False,
    leave_seconds: float = _LEAVE_SECONDS,
  ):
    """Stores the settings; `measure` and `start` start hosts.

    Args:
      setup: settings of the run.
      plan: division of the parameters among shards; None: there is one shard.
      hosts: the hosts in which shards and workers run.
      makers: the makers of shards and workers.
      make_spec: returns the workers' spec; called in their hosts.
      refill: whether a worker that exits is replaced.
      resumed: whether the journals of shards have rows from earlier drivers.
      leave_seconds: time for workers to write their files after the last job.
    """
    self.setup, self._plan, self._makers = setup, plan, makers
    self._make_spec, self._is_resumed = make_spec, resumed
    self._refill, self._leave_seconds = refill, leave_seconds
    counts = {SHARD: setup.shards, WORKER: setup.workers}
    super().__init__(Supervisor(hosts, counts, setup.ladder))
    self._hosts_started = collections.Counter[int]()  # for each worker
    self._image_row = -1  # the row of the requested images; -1: none
    # Workers that this cluster has replaced since the last status of the lead.
    # The next status may name their former incarnations as expelled: this is
    # one exit, not two.
    self._replaced_workers: set[int] = set()
    # Worker -> time since which the worker is not registered at the lead.
    self._absent_since: dict[int, float] = {}
    self._stopped = False  # all jobs are received, as the lead reported
    # The result of the last `status`, None if a shard did not answer.
    self.statuses: list[Status] | None = None

  @property
  def finished(self) -> bool:
    """Whether all shards received every job, by the last `status`."""
    return _are_finished(self.statuses)

  @property
  def _patience(self) -> float:
    """Seconds after which a worker that has not joined is replaced."""
    return DEAD_FACTOR * self.setup.ladder.start

  # Starting.

  def measure(self, jobs: int) -> list[float]:
    """Returns for each worker the seconds that a job takes it.

    Call this before `start`. All workers do `jobs` jobs at the same time. They
    later train in the same hosts, so the seconds hold for the machines of the
    run.
    """
    for worker in range(self.setup.workers):
      self._make_worker(worker)
    limit = self._patience
    self.ask_all_timed(WORKER, "prepare", self._make_spec, limit=limit)
    return self.ask_all_timed(WORKER, "measure", jobs, limit=limit)

  def set_spec(self, make_spec: Callable[[], WorkerSpec]) -> None:
    """Replaces the spec of the workers, before `start`. If the shares of the
    jobs depend on the workers' speed, the spec is known only after `measure`.
    """
    self._make_spec = make_spec

  def start(self) -> None:
    """Starts all shards and workers."""
    for index in range(self.setup.shards):
      self._start_shard(index, self._is_resumed)
    for worker in range(self.setup.workers):
      measured_worker = self._supervisor.parties[WORKER].get(worker)
      self._run_worker(measured_worker or self._make_worker(worker))

  def _start_shard(self, index: int, resumed: bool = False) -> None:
    """Starts a shard, or the successor of one that has exited."""
    # A successor is never `resumed`: to a resumed shard, no worker and no other
    # shard is alive.
    make = self._makers.shard(index, resumed)
    party = self._supervisor.start(SHARD, index, make)
    party.run = party.host.call("run")

  def add_worker(self, worker: int) -> None:
    """Starts a worker, or the successor of one that has exited."""
    self._run_worker(self._make_worker(worker))

  def _make_worker(self, worker: int) -> Party:
    make = self._makers.worker(worker, self._hosts_started[worker])
    self._hosts_started[worker] += 1
    self._absent_since.pop(worker, None)
    return self._supervisor.start(WORKER, worker, make)

  def _run_worker(self, party: Party) -> None:
    party.run = party.host.call("run", self._make_spec)

  # Watching.

  def check(self, received: int = 0) -> list[str]:
    """Replaces workers and shards that have exited; returns lines for the user.
    Raises the error of a participant if its successor would raise it, too."""
    del received  # the lead itself reports this count
    supervisor = self._supervisor
    for party, ending in supervisor.take_ended(SHARD):
      supervisor.count_exit(SHARD, party.index, ending)
      text = f"shard {party.index} {ending}; another takes over"
      supervisor.news.append(text)
      self._start_shard(party.index)
    for party, ending in supervisor.take_ended(WORKER):
      self._replace_worker(party.index, ending)
    return supervisor.take_news()

  def _replace_worker(self, worker: int, ending: str) -> None:
    """Reports the exit of a worker to the shards, and replaces the worker
    unless the run needs no replacement."""
    news, restarts = self._supervisor.news, self._hosts_started[worker] - 1
    for shard in self._supervisor.parties[SHARD].values():
      shard.host.call("worker_exited", worker, restarts)
    if ending == "stopped":  # after the last job
      return
    if not self._refill:
      news.append(f"worker {worker} {ending}")
      return
    self._replaced_workers.add(worker)
    self._supervisor.count_exit(WORKER, worker, ending)
    self.add_worker(worker)
    news.append(f"worker {worker} {ending}; another takes its place")

  def status(self) -> list[Status] | None:
    """Returns the `Shard.status` of all shards; None if a shard does not
    answer.

    Also replaces the workers that the lead has expelled, and ends tickets that
    stay open after the last job. Raises NotFinite if more than MOST_REFUSALS
    messages per worker were refused, in a row or of one job.
    """
    answers = self._supervisor.poll(
      SHARD, "ask", Shard.status, among=self._ready_shards()
    )
    # A shard answers (status,), or None if its server has ended.
    statuses = {index: value[0] for index, value in answers.items() if value}
    if lead := statuses.get(0):
      if lead["refused"] > MOST_REFUSALS * self.setup.workers:
        raise NotFinite(
          f"{lead['refused']} messages, in a row or of one job, were not"
          f" finite, at message {lead['received']}"
        )
      self._supervisor.count_received(lead["received"])
      self._stopped = lead["stopped"]
      self._replace_lost_workers(lead)
      self._replaced_workers.clear()
      # The lead has all messages, so tickets still open at other shards would
      # never end.
      if _are_finished([lead]) and any(s["busy"] for s in statuses.values()):
        self._call_shards(Shard.end_open_tickets)
    self.statuses = None
    if len(statuses) == self.setup.shards:
      self.statuses = [statuses[i] for i in range(self.setup.shards)]
    return self.statuses

  def _replace_lost_workers(self, lead: Status) -> None:
    """Replaces the workers that the lead has expelled, and workers that have
    not been registered at the lead for too long."""
    now = self._supervisor.hosts.clock()
    lost_workers = set(lead["expelled"]) - self._replaced_workers
    workers = self._supervisor.parties[WORKER]
    for worker in workers:
      if worker in lead["workers"]:
        self._absent_since.pop(worker, None)
        continue
      absent_since = self._absent_since.setdefault(worker, now)
      if now - absent_since > self._patience:
        lost_workers.add(worker)
    for worker in sorted(lost_workers & set(workers)):
      self._supervisor.drop(workers[worker])
      self._replace_worker(worker, "hung")

  # Asking shards.

  def _ready_shards(self) -> list[int]:
    """Returns the indices of the shards that can be called."""
    indices = []
    for index, party in self._supervisor.parties[SHARD].items():
      with contextlib.suppress(Exception):  # `check` raises the error
        indices += [index] if party.is_ready else []
    return indices

  def _call_shards(self, call: Callable[[Shard], Any]) -> dict[int, Any]:
    """Calls a function with each shard. Returns shard -> answer, without the
    shards that have ended."""
    answers = self._supervisor.ask(SHARD, "ask", call)
    return {index: value[0] for index, value in answers.items() if value}

  def _call_all_shards(self, call: Callable[[Shard], Any]) -> list[Any]:
    """Calls a function with each shard; returns the answers. Raises
    Disconnected if a shard has exited, or has not answered the last poll."""
    for index, party in self._supervisor.parties[SHARD].items():
      if party.poll is not None:
        raise Disconnected(index)
    answers = self._call_shards(call)
    for index in range(self.setup.shards):
      if index not in answers:
        raise Disconnected(index)
    return [answers[index] for index in range(self.setup.shards)]

  def params(self, received: int | None = None) -> Any:
    """Returns the parameters of all shards: the present ones, or those that the
    shards stored after `received` messages. Raises Disconnected if a shard that
    had them has exited."""
    parts = self._call_all_shards(functools.partial(_take_params, received))
    for index, part in enumerate(parts):
      if part is None:  # the successor of a shard has no stored parameters
        raise Disconnected(index)
    return parts[0] if self._plan is None else sharding.join(self._plan, parts)

  def images(self) -> list[tuple[Any, Any]] | None:
    """Returns the `Shard.image` of each shard. In a consistent run all images
    are of the same journal row; None: call this again, they do not exist yet.
    Raises Disconnected if a shard has exited."""
    if not self.setup.consistent or self.setup.shards == 1:
      return self._call_all_shards(Shard.image)
    # [1] If all shards are at the same row, take images now. An image that was
    # requested earlier may be of a row that they have passed long ago.
    row = self._image_row
    answers = self._call_all_shards(methodcaller("requested_image", row))
    rows = [shard_rows for shard_rows, _ in answers]
    if len(set(rows)) == 1:
      images = self._call_all_shards(Shard.image)
      # Further rows may have arrived between the two calls.
      if len({meta["rows"] for _, meta in images}) == 1:
        self._image_row = -1
        return images
    # [2] Take the images of the row that was requested earlier.
    images = [image for _, image in answers if image is not None]
    if len(images) == self.setup.shards:
      self._image_row = -1
      return images
    # [3] Request images of a row in the future. A shard may have passed the
    # row of an earlier request without an image: the successor of a shard does
    # not know that request.
    if row < 0 or max(rows) > row + _ROWS_AHEAD:
      self._image_row = max(rows) + _ROWS_AHEAD
      self._call_all_shards(methodcaller("request_image", self._image_row))
    return None

  # Waiting.

  def call_until_connected(self, call: Callable[[], Any]) -> Any:
    """Repeats a call while it raises Disconnected, that is, while a shard is
    being replaced. Returns the result of the last call."""
    while True:
      try:
        return call()
      except Disconnected:
        # `check` and `status` replace the shard. `check` raises the shard's
        # error, if the successor would raise it, too.
        self.check()
        self.status()
        self._supervisor.hosts.sleep(_CHECK_SECONDS)

  def wait_for_images(self) -> list[tuple[Any, Any]]:
    """Waits until `images` returns images, and returns them."""
    while (images := self.call_until_connected(self.images)) is None:
      self.check()
      self._supervisor.hosts.sleep(_CHECK_SECONDS)
    return images

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes shards start no new job, and waits for the messages of open jobs,
    for `seconds` at most. Returns whether all messages have arrived."""
    self.call_until_connected(lambda: self._call_all_shards(Shard.pause))

    def are_at_rest() -> bool:
      statuses = self.status()
      return statuses is not None and not any(s["busy"] for s in statuses)

    return self.wait_for_rest(are_at_rest, seconds)

  # The end.

  def close(self) -> None:
    """Ends all shards and workers; the files that they wrote stay."""
    supervisor = self._supervisor
    try:
      if self._stopped:  # then workers end by themselves
        workers = supervisor.parties[WORKER].items()
        runs = {(WORKER, w): party.run for w, party in workers if party.run}
        supervisor.wait_for_calls(runs, self._leave_seconds)
      shards = supervisor.parties[SHARD]
      end_calls = {
        (SHARD, shard): shards[shard].host.call("end")
        for shard in self._ready_shards()
      }
      supervisor.wait_for_calls(end_calls, _END_SECONDS)
    finally:
      supervisor.close()
