"""A live cell of workers and a server: the engines `threads` and `ray`.

Shards keep parameters for evaluations, so training waits neither for the driver
nor for a checkpoint. The records of the lead, shard 0, are those of the cell.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import base, simulator
from asgd.experiment import checkpoint, engines, live_figures, live_files
from asgd.experiment.engines import (
  allocations,
  live_clusters,
  live_engine,
  live_news,
  networks,
  parameter_server,
  server_results,
  traffic,
)
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.schema import Run
from asgd.live import records
from asgd.live.journal import read_journal
from asgd.live.links.base import Disconnected
from asgd.live.setup import slot_counts
from asgd.live.shard.recovery import align_journals
from asgd.live.slots import check_room, slots_nbytes
from asgd.orders.trace import follow, from_events


def check(run: Run) -> None:
  """Checks the settings that need neither data nor a model."""
  parameter_server.check(run)
  config = run.config
  server = config["server"]
  if config["compress_down"] is not None and server["wire"] != "float32":
    raise ValueError(
      f"config.compress_down: with config.server.wire {server['wire']!r}"
      " workers get rounded parameters, so the parameters that they rebuild"
      " from updates would differ from the server's; leave one of the two out"
    )
  if server["consistent"] and server["shards"] > 1 and not server["log"]:
    raise ValueError(
      "config.server.consistent needs a log: without one a restarted shard"
      " would differ from the others; set config.server.log=16"
    )


def _check_kept_tickets(plan: ServerPlan) -> None:
  """Raises ValueError for kept tickets with a codec of updates: a worker that
  rebuilds parameters from updates needs each update."""
  if plan.codec_down is not None and plan.keeps:
    key = "cache" if plan.order.get("cache") else "fetch_every"
    raise ValueError(
      f"config.compress_down is not for live workers that keep tickets ({key}"
      f" of config.runs.{plan.run.label}): they would be sent all parameters"
      " after each message; leave one of the two out, or use engine 'simulate'"
    )


def plan(experiment: Any, run: Run, workers: int) -> ServerPlan:
  """Returns the plan of `parameter_server.plan`. Raises ValueError for orders
  that only a simulation can follow, and for a server that cannot be split into
  its shards."""
  result = parameter_server.plan(experiment, run, workers)
  _check_kept_tickets(result)
  # With one ticket a worker has nothing to fetch ahead.
  depth = result.rules().depth
  if run.config["live"]["overlap"] and depth < 2:
    raise ValueError(
      f"config.live.overlap needs config.order.depth=2 or more, not {depth}:"
      " tickets that workers hold while they compute"
    )
  if run.config["server"]["shards"] > 1:
    live_clusters.needs_totals(result)  # raises ValueError
  return result


class LiveServerEngine(live_engine.LiveEngine):
  """A cell with a server of dense parameters."""

  @property
  def _writers(self):
    """Shards write the journals and the records."""
    return range(self._plan.run.config["server"]["shards"])

  def _prepare(self) -> bool:
    """Reads the journals, and prepares the inputs of shards and workers."""
    journals = live_files.read_journals(self._folder, len(self._writers))
    self._resumed = bool(journals[0])
    # The lead shard's journal has each message once.
    self._received = sum(e.action == base.RECEIVE for e in journals[0])
    self._record_paths = [
      records.records_path(self._folder, i) for i in self._writers
    ]
    self._plan = allocations.read(
      self._plan, self._folder, begun=self._resumed
    )
    config = self._context.experiment.config
    evaluated_messages = engines.evaluation_messages(
      config["evaluations"], self.total
    )
    seed = self._context.cell.seed
    self._run = live_clusters.prepare(self._plan, seed, evaluated_messages)
    shards = self._run.setup.shards
    # The figures scale the lead's bytes to those of all shards.
    self._bytes_share = live_figures.lead_share(self._run.params, shards)
    return self._resumed

  def _setup(self):
    return self._run.setup

  def _network(self):
    return self._plan.network

  def _unpack(
    self, saved: checkpoint.Restored
  ) -> list[tuple[base.ServerState, Any]]:
    """Returns the shards' images in a checkpoint."""
    server, shard_params = self._plan.server, self._run.shard_params
    states = saved.tree(
      [simulator.start(server, params) for params in shard_params]
    )
    return list(zip(states, saved.notes["shards"], strict=True))

  def _open_files(self, saved, *, begun):
    # Shards cut their files back themselves, when they recover.
    return self._received

  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[Any, Callable[[], None]]:
    """Returns the cluster of shards and workers, and its start."""
    machine, setup = self._context.machine, self._run.setup
    # Only new slots need memory.
    if not self._memory.is_resumed:
      shares = live_clusters.slot_shares(self._run)
      wire = networks.dtype_on_wire(self._plan.run.config)
      counts = slot_counts(setup)
      nbytes = [slots_nbytes(counts, share, compress=wire) for share in shares]
      check_room(machine.memory_dir, sum(nbytes))
    self._shard_news = live_news.ShardNews(
      setup, live.memory, self._received, resumed=self._resumed
    )
    # If one shard has lost its memory, all roll back to one checkpoint.
    if self._resumed:
      align_journals(setup, self._folder, live.memory)
    cluster = live_clusters.make_cluster(
      *(self._run, live, hosts, machine), images=saved, resumed=self._resumed
    )
    # `make_cluster` has measured and written an allocation by speed.
    self._plan = allocations.read(self._plan, self._folder)
    self._run = self._run._replace(plan=self._plan)
    return cluster, cluster.start

  # Training.

  def _check_cluster(self, until):
    super()._check_cluster(until)
    if status := self.cluster.status():
      self._news += self._shard_news.new_lines(status)

  def _read(self):
    return self._read_rows(self._received, self._count_records())

  def _count_records(self) -> int:
    """Returns the count of the lead's records."""
    return records.count_records(self._record_paths[0])

  def _read_rows(self, start: int, end: int) -> base.Records:
    """Reads some of the lead's records."""
    return records.read_records(self._record_paths[0], start, end)

  def _snapshot_at(self, until: int) -> None:
    """Fetches the parameters of message `until`, if it was received."""
    status = self.cluster.statuses
    if status is None:
      return
    is_last = until == self.total
    # A shard that lags may still lack message `until`.
    all_received = all(shard["received"] >= until for shard in status)
    # Shards that are not consistent may receive a job twice or, at the end,
    # never. So their counts may differ when the cluster has finished.
    if not self.cluster.finished and (is_last or not all_received):
      # `until` counts as done only after its snapshot.
      self.done = min(self._received, until - 1)
      return
    if not self._received:
      return
    is_kept = not is_last and all(until in s["kept_params"] for s in status)
    with contextlib.suppress(Disconnected):  # the next look tries again
      if is_kept:
        self._snapshot = self._fetch_snapshot(until, kept_at=until)
      else:
        # A shard failed and lost the kept parameters: take the present ones.
        self._snapshot = self._fetch_snapshot(status[0]["received"])
      self.done = until

  def _fetch_snapshot(
    self, message: int, kept_at: int | None = None
  ) -> engines.Snapshot:
    """Fetches the parameters kept at message `kept_at`, or the present ones."""
    params = self.cluster.params(kept_at)
    # If the message has no record yet, use the last record.
    row = min(message, self._count_records()) - 1
    record = self._read_rows(row, row + 1)
    records_of_shards = [
      records.read_records(path, 0, row + 1) for path in self._record_paths
    ]
    clock = {
      "seconds": float(record.time[0]) - self._first_ticket,
      "megabytes": traffic.megabytes(records_of_shards),
    }
    return engines.Snapshot(params, message, int(record.update[0]), clock)

  def _take_last_snapshot(self):
    take = lambda: self._fetch_snapshot(self._received)  # noqa: E731
    # This call tries again while a shard recovers.
    self._snapshot = self.cluster.call_until_connected(take)

  # Results.

  def records(self) -> base.Records:
    """Returns the lead's record of each message. If all shards have received
    the message, its norms and bytes are those of all shards together."""
    records_of_shards = [
      records.read_records(path) for path in self._record_paths
    ]
    return live_clusters.combine(
      records_of_shards, self._run.shard_plan, self._run.params
    )

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of some messages, at least one."""
    return server_results.summary(self._records_between(start, end))

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result. Raises ValueError if rows of
    the shards' files are missing."""
    # Images first: their counts are then not newer than the files.
    images = self.cluster.wait_for_images()
    self._check_files()
    paths = self._journals()
    journals = [read_journal(path) for path in paths]
    # Files are compared with the counts that the shards have in memory.
    for path, records_path, events, (_, meta) in zip(
      paths, self._record_paths, journals, images, strict=True
    ):
      if len(events) < meta["rows"]:
        raise ValueError(
          f"{path} has {len(events)} rows where the run wrote {meta['rows']}:"
          " it was cut short or changed; start anew in another folder"
          " (--workdir)"
        )
      n_records = records.count_records(records_path)
      records.check_records(records_path, n_records, events, run_has_ended=True)
    plan, rows = self._plan, self.records()
    version, trace = int(images[0][0].version), from_events(journals[0])
    row = server_results.columns(plan, rows, version, trace)
    if not plan.server.sends_current and plan.run.given_recipe is None:
      # With look-ahead, workers receive other parameters than the server has.
      sent_params = live_clusters.sent_params(self._run, images)
      row["sent_accuracy"] = plan.problem.evaluate(sent_params).accuracy
    return {
      **row,
      "seconds": float(rows.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      "rolled_back": sum(follow(events).undone for events in journals),
      "took_part": len(np.unique(rows.worker)),
      **traffic.lost_residual(plan, journals[0], rows),
    }

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns an image of each shard, from which the cell resumes if its memory
    is lost. Returns None if a shard does not answer now; a stopped run waits
    for the answer."""
    is_stopped = self._all_paused is not None
    try:
      cluster = self.cluster
      images = cluster.wait_for_images() if is_stopped else cluster.images()
    except Disconnected:  # a shard restarts; the next checkpoint follows
      return None
    if images is None:
      return None
    states, metas = zip(*images, strict=True)
    step = sum(meta["rows"] for meta in metas)
    if not step:  # nothing has happened yet
      return None
    return step, list(states), {"shards": list(metas)}
