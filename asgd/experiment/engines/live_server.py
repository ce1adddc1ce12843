"""A live cell of workers and a server: real time, real faults.

The driver, which is this process, watches a cluster of workers and shards: it
replaces what dies, evaluates parameters that the shards keep for it, and writes
down what it sees. Training does not wait for it.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import base, simulator
from asgd.experiment import engines, live_figures, live_files
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import (
  allocations,
  live_clusters,
  live_engine,
  live_news,
  parameter_server,
  server_orders,
  traffic,
)
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.schema import Run
from asgd.live import records
from asgd.live.append_only import FileGone
from asgd.live.journal import journal_path, read_journal
from asgd.live.links.base import Disconnected
from asgd.live.resume import agree
from asgd.live.server.cluster import finished
from asgd.live.setup import slot_counts
from asgd.live.slot_formats import contents
from asgd.live.slots import check_room, slots_nbytes
from asgd.orders.trace import follow, from_events

_LOOK = 0.1  # seconds between two looks at the cluster


def check(run: Run) -> None:
  """Checks what needs neither data nor a model."""
  parameter_server.check(run)
  config = run.config
  server, live = config["server"], config["live"]
  if config["compress_down"] is not None and server["wire"] != "float32":
    raise ValueError(
      f"config.compress_down: with config.server.wire {server['wire']!r}"
      " workers get rounded parameters, and those that they rebuild of updates"
      " would not be the server's; leave one of the two out"
    )
  if server["consistent"] and server["shards"] > 1 and not server["log"]:
    raise ValueError(
      "config.server.consistent needs a log, or shards that come back would"
      " differ from the others; set config.server.log=16"
    )
  devices, batch = live["devices"], config["batch_size"]
  if live["parallel"] == "data" and batch % devices:
    raise ValueError(
      f"config.live.devices {devices} must divide config.batch_size {batch}, or"
      " each device would do the whole batch; use"
      f" {math.gcd(devices, batch)}, or another batch size"
    )


def _check_kept(plan):
  """A worker that rebuilds parameters of updates needs each of them."""
  if plan.codec_down is not None and server_orders.keeps(plan.order):
    key = "cache" if plan.order.get("cache") else "fetch_every"
    raise ValueError(
      f"config.compress_down is not for live workers that keep tickets ({key}"
      f" of config.runs.{plan.run.label}): they would be sent all parameters"
      " after each message; leave one of the two out, or use engine 'simulate'"
    )


def plan(experiment: Any, run: Run, workers: int) -> ServerPlan:
  """As `parameter_server.plan`; refuses an order that only a simulation can
  keep, and what cannot be split into shards."""
  result = parameter_server.plan(experiment, run, workers)
  _check_kept(result)
  depth = result.rules().depth
  if run.config["live"]["overlap"] and depth < 2:
    raise ValueError(
      f"config.live.overlap needs config.order.depth=2 or more, not {depth}:"
      " tickets that workers hold while they compute"
    )
  if run.config["server"]["shards"] > 1:
    live_clusters.needs_totals(result)
  return result


class LiveEngine(engines.Engine):
  """A cell of real workers, watched until all its jobs are received."""

  def __init__(
    self, context: engines.Context, make_cluster: Callable[..., Any]
  ):
    """Starts the cell, or goes on where its journals end, in a cluster as
    `live_clusters.thread_cluster` makes it. Raises ValueError if the files of
    the cell are not all there, or do not fit."""
    self._context, folder = context, context.folder
    shards = range(context.plan.run.config["server"]["shards"])
    self._journals = [journal_path(folder, index) for index in shards]
    self._sinks = [records.records_path(folder, index) for index in shards]
    journals = live_files.read_journals(folder, len(shards))
    self._received = sum(e.action == base.RECEIVE for e in journals[0])
    self._memory = memory_lib.LiveMemory(
      folder, context.machine.memory_dir, resume=bool(journals[0])
    )
    with contextlib.ExitStack() as stack:
      stack.callback(self._release)
      self._start(make_cluster, journals, stack)
      self._open = stack.pop_all()

  def _start(self, make_cluster, journals, stack):
    context, events = self._context, journals[0]
    plan = allocations.read(context.plan, context.folder, begun=bool(events))
    self.total, self.done = plan.messages, self._received
    evaluated = engines.due(
      context.experiment.config["evaluations"], self.total
    )
    self._live = live_clusters.prepare(
      plan, context.cell, context.folder, self._memory.memory, evaluated
    )
    counts, live = slot_counts(self._live.setup), self._live
    compress = live_clusters.dtype_on_wire(plan.run.config)
    if not self._memory.kept:
      # Of several shards each has its part: about as much in all.
      down = plan.codec_down is not None
      like = contents(plan.server.codec, live.params, updates=down)
      nbytes = slots_nbytes(counts, like, compress=compress)
      check_room(context.machine.memory_dir, nbytes)
    images, before = None, 0.0
    if events:
      images = context.restore(self._images)
      before = events[-1].time
    self._snapshot: engines.Snapshot | None = None
    self._insists = False  # whether a checkpoint must be made now
    self._news = live_news.ShardNews(
      self._live, self._received, resumed=bool(events)
    )
    began = time.monotonic() - before
    if events:
      agree(self._live.setup, context.folder, self._live.memory)
    self.cluster = make_cluster(
      self._live, context.machine, images, bool(events), began
    )
    stack.callback(self.cluster.close)
    plan = allocations.read(plan, context.folder)  # may be known by now
    self._live = self._live._replace(plan=plan)
    self._memory.note(self._replaced())
    share = live_figures.lead_share(live.params, live.setup.shards)
    workers = live.setup.workers
    self._watch = live_figures.Watch(workers, context.board, share)
    stack.callback(self._watch.close)
    self._next_look = 0.0
    self.cluster.start()

  def _images(self, saved):
    """The shards' images in a checkpoint."""
    server, parts = self._context.plan.server, live_clusters.parts(self._live)
    states = saved.tree([simulator.start(server, part) for part in parts])
    return list(zip(states, saved.notes["shards"], strict=True))

  def advance(self, until: int) -> engines.Progress:
    """Looks at the cluster once, a moment after the last time."""
    time.sleep(max(self._next_look - time.monotonic(), 0))
    self._next_look = time.monotonic() + _LOOK
    news = self.cluster.check()
    self._memory.note(self._replaced())
    status = self._status()
    if status is None:
      return engines.Progress(loss=np.empty(0), news=news)
    self._check_files()
    news += self._news.of(status)
    new = self._rows(self._received, self._count())
    self._received += len(new.loss)
    figures = self._watch.look(time.monotonic(), new, self._received)
    self._look_for(until, status)
    return engines.Progress(
      loss=new.loss,
      staleness=engines.mean(new.staleness),
      gap=engines.mean(new.gap),
      news=news,
      figures=figures,
    )

  def _status(self):
    """The shards' status; raises NonFiniteResult if no result is finite."""
    with live_engine.engine_errors(self._context):
      return self.cluster.status()

  def _look_for(self, until, status):
    """Fetches the parameters of message `until`, if it was received."""
    last = until == self.total
    everywhere = all(shard["received"] >= until for shard in status)
    # Shards with an order of their own may receive a job twice or, in the end,
    # not at all.
    if not finished(status) and (last or not everywhere):
      self.done = min(self._received, until - 1)
      return
    if not self._received:
      return
    kept = not last and all(until in s["kept_params"] for s in status)
    with contextlib.suppress(Disconnected):  # the next look will do
      if kept:
        self._snapshot = self._take(until, kept=until)
      else:  # a shard died with what it kept: the parameters of now will do
        self._snapshot = self._take(status[0]["received"])
      self.done = until

  def _take(self, message, kept=None):
    """Fetches parameters: those kept at a message, or those of now."""
    params = self.cluster.params(kept)
    row = min(message, self._count()) - 1
    at = self._rows(row, row + 1)
    sent = [records.read_records(path, 0, row + 1) for path in self._sinks]
    clock = {
      "seconds": float(at.time[0]) - self._first_ticket,
      "megabytes": traffic.megabytes(sent),
    }
    return engines.Snapshot(params, message, int(at.update[0]), clock)

  def _count(self) -> int:
    """How many messages the lead has recorded."""
    return records.count_records(self._sinks[0])

  def _rows(self, start: int, end: int) -> base.Records:
    """Reads a stretch of the lead's records."""
    return records.read_records(self._sinks[0], start, end)

  def _check_files(self):
    """Raises ValueError if what the shards write is not there any more."""
    for path in (*self._journals, *self._sinks):
      if not path.exists():
        raise FileGone(path)

  @functools.cached_property
  def _first_ticket(self) -> float:
    return live_files.first_ticket(read_journal(self._journals[0]))

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters of the message that `advance` was to reach."""
    if self._snapshot is None:  # all was evaluated before this process began
      self._snapshot = self._ask(lambda: self._take(self._received))
    return self._snapshot

  def records(self) -> base.Records:
    """Returns a row for each message, as the lead has them, with the norms of
    all shards where each has received the message."""
    parts = [records.read_records(path) for path in self._sinks]
    return live_clusters.combine(parts, self._live.split, self._live.params)

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of some messages, at least one."""
    # Without a log, some records die with a shard.
    count = self._count()
    start = max(min(start, end - 1, count - 1), 0)
    return parameter_server.summary(self._rows(start, min(end, count)))

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to. Raises ValueError if what the shards wrote
    is not all there."""
    images = self._images_now()
    self._check_files()
    journals = [read_journal(path) for path in self._journals]
    for path, sink, events, (_, meta) in zip(
      self._journals, self._sinks, journals, images, strict=True
    ):
      if len(events) < meta["rows"]:
        raise ValueError(
          f"{path} has {len(events)} rows where the run wrote {meta['rows']}:"
          " it was cut short or changed; start anew in another folder"
          " (--workdir)"
        )
      count = records.count_records(sink)
      records.check_records(sink, count, events, whole=True)
    plan, rows = self._live.plan, self.records()
    version, trace = int(images[0][0].version), from_events(journals[0])
    row = parameter_server.columns(plan, rows, version, trace)
    if not plan.server.sends_current and plan.run.given is None:
      sent = live_clusters.sent_params(self._live, images)
      row["sent_accuracy"] = plan.problem.evaluate(sent).accuracy
    return {
      **row,
      "seconds": float(rows.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      "rolled_back": sum(follow(events).undone for events in journals),
      "took_part": len(np.unique(rows.worker)),
      **traffic.lost(plan, journals[0], rows),
    }

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns an image of each shard, for when the memory of the machine is
    lost; None if a shard cannot be asked now."""
    try:
      images = self._images_now() if self._insists else self.cluster.images()
    except Disconnected:
      return None
    if images is None:
      return None
    states, metas = zip(*images, strict=True)
    step = sum(meta["rows"] for meta in metas)
    if not step:  # nothing has happened yet
      return None
    return step, list(states), {"shards": list(metas)}

  def stop(self) -> str:
    """Lets workers hand in what they have begun."""
    end = time.monotonic() + self._context.machine.grace_seconds
    self._ask(self.cluster.pause)
    whole = False
    while not whole and time.monotonic() < end:
      status = self._status()
      whole = bool(status) and not any(shard["busy"] for shard in status)
      if not whole:
        time.sleep(_LOOK)
    self._insists = True
    self.done = self._received = self._count()
    return "" if whole else "; some workers did not finish in time"

  def _ask(self, question: Callable[[], Any]) -> Any:
    """Asks the shards something, again if one has to be replaced first."""
    while True:
      try:
        return question()
      except Disconnected:
        self.cluster.check()
        time.sleep(_LOOK)

  def _images_now(self) -> list[Any]:
    """Returns an image of each shard, waiting until there are."""
    while (images := self._ask(self.cluster.images)) is None:
      self.cluster.check()
      time.sleep(_LOOK)
    return images

  def discard(self) -> None:
    """Removes the shared memory: there is nothing to go on with any more."""
    self.close()
    memory_lib.forget(self._context.folder)

  def close(self) -> None:
    """Ends the cluster, and lets go of the memory."""
    self._open.close()

  def _release(self):
    if not self._memory.kept and not self._received:
      self._memory.remove()  # there is nothing to go on with
    self._memory.close()
