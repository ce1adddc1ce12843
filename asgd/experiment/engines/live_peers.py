"""Live peers: the engines `threads` and `ray` of recipes without a server.

The driver watches: it replaces who dies, evaluates what peers keep for it, and
has all stop at once for a checkpoint. A run that was stopped or killed goes on
from its last checkpoint; what peers wrote after that is dropped, as nobody is
left who has seen it.
"""

import contextlib
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asgd import base, gossip, simulator
from asgd.experiment import engines, live_figures, live_files, storage
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import (
  allocations,
  parameter_server,
  peer_clusters,
  peers,
)
from asgd.experiment.engines.peer_clusters import LivePeers
from asgd.experiment.schema import Run
from asgd.live.append_only import PUT_BACK, FileGone
from asgd.live.gossip import cluster as cluster_lib
from asgd.live.gossip import files
from asgd.live.gossip.peer_rows import View
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import records_path
from asgd.orders.trace import STARTS, TAKES

_LOOK = 0.1  # seconds between two looks at the cluster
_ONLY = {  # section, key -> the one value that peers have
  ("server", "shards"): 1,
  ("server", "consistent"): False,
  ("server", "wire"): "float32",
  ("live", "devices"): 1,
}
_OF_LINKS = ("lose", "double", "reorder")  # faults between worker and server


def check(run: Run) -> None:
  """Checks what needs neither data nor a model."""
  parameter_server.check(run)
  for (section, key), value in _ONLY.items():
    given = run.config[section][key]
    if given != value:
      raise ValueError(
        f"config.{section}.{key} {given!r} is for workers and a server, and"
        f" config.runs.{run.label}.recipe {run.recipe!r} is of peers: leave it"
        f" {value!r}"
      )


def check_plan(plan: peers.PeerPlan) -> None:
  """Refuses work by measured speeds, which only workers of a server get."""
  if allocations.unknown(plan):
    raise ValueError(
      f"config.allocation follows from speeds, and the live peers of"
      f" config.runs.{plan.run.label} are not timed: give numbers, one for each"
      " peer"
    )


def check_faults(plan: Any, machine: Any) -> None:
  """Refuses faults that cannot happen between peers."""
  for fault in machine.faults:
    if peers.of_peers(plan.run) and fault.kind in _OF_LINKS:
      raise ValueError(
        f"--fault={fault.kind}:{fault.worker}:{fault.seq}: a message of peers"
        " is told once, over a link that loses none; use kill, hang, slow or"
        " nan"
      )


def check_files(folder: Path) -> None:
  """Raises ValueError if a journal or records of a finished cell were changed
  since; a message that its peer did not outlive may have no record."""
  workers = live_files.read_description(folder)["cell"]["workers"]
  files.read_trace(folder, workers)
  for peer in range(workers):
    events = read_journal(journal_path(folder, peer))
    received = sum(event.action == base.RECEIVE for event in events)
    count = len(files.read_peer_records(folder, peer).loss)
    if not received - files.lives_of(events) <= count <= received:
      raise ValueError(
        f"{records_path(folder, peer)} has {count} records, and the trace"
        f" beside it {received} messages: one of the two was cut short or"
        f" changed. {PUT_BACK}"
      )


class LivePeerEngine(engines.Engine):
  """A cell of live peers, watched until all its jobs are received."""

  def __init__(
    self, context: engines.Context, make_cluster: Callable[..., Any]
  ):
    """Starts the cell, or goes on from its last checkpoint, in a cluster as
    `peer_clusters.thread_peers` makes it."""
    self._context, self._folder = context, context.folder
    self._plan = plan = context.plan
    self.total, self.quantum = plan.messages, plan.quantum
    self._places = range(plan.workers)
    begun = any(len(self._journal(i)) for i in self._places)
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    self._news: list[str] = []
    self._snapshot: engines.Snapshot | None = None
    self._views: dict[int, View] = {}  # that were evaluated last
    self._cuts: list[list[int]] = []
    self._stopped: bool | None = None  # whether all came to rest in time
    with contextlib.ExitStack() as stack:
      stack.callback(self._memory.close)
      self._start(make_cluster, begun, stack)
      self._open = stack.pop_all()

  def _start(self, make_cluster, begun, stack):
    context, plan = self._context, self._plan
    due = engines.due(
      context.experiment.config["evaluations"], self.total, self.quantum
    )
    # Peers themselves are not needed to read what they were.
    images = context.restore(self._unpack) if begun else None
    if begun:
      self._go_back(images)
    self._counts = [0] * plan.workers  # records that were read, of each
    self._parts: list[simulator.PeerRecords] = []
    new = self._read()
    self._received = len(new.loss)
    self.done = min(self._received, self.total)
    if plan.gossip.order != gossip.PAIRS:
      ended = [notes["rounds"] for _, notes in (images or {}).values()]
      self.done = plan.workers * min(ended, default=0)
    events = [self._journal(i)[-1:] for i in self._places]
    before = max((e.time for (e, *_) in filter(None, events)), default=0.0)
    live = LivePeers(
      plan,
      context.cell,
      self._folder,
      self._memory.memory,
      time.monotonic() - before,
      new.job.tolist(),
      due,
    )
    self.cluster = make_cluster(live, context.machine)
    stack.callback(self.cluster.close)
    self._memory.note(self._replaced())
    self._counter = live_figures.Counter(plan.workers, time.monotonic())
    self._board = live_figures.Board(context.board / "live")
    stack.callback(self._board.close)
    self._next_look = 0.0
    with self._watched():
      self.cluster.start(images)

  def _journal(self, peer):
    return read_journal(journal_path(self._folder, peer))

  def _unpack(self, saved):
    """The images of a checkpoint, and what to cut files to."""
    notes = saved.notes
    duty = peer_clusters.make_duty(
      self._plan, self._context.cell, (), copies=True
    )
    template = {
      peer: peer_clusters.image_template(duty, each)
      for peer, each in notes["peers"].items()
    }
    trees = saved.tree(template)
    self._cuts = notes["files"]
    return {int(k): (trees[k], each) for k, each in notes["peers"].items()}

  def _go_back(self, images):
    """Drops what was written after the checkpoint, or all without one."""
    aside = "" if images else self._keep_aside()
    cuts = self._cuts if images else [[0, 0]] * len(self._places)
    dropped = 0
    for peer, (rows, records) in enumerate(cuts):
      self._check_length(peer, rows, records)
      dropped += len(self._journal(peer)) - rows
      files.cut(self._folder, peer, rows, records)
    where = "the checkpoint" if images else "the beginning: no checkpoint"
    self._news.append(
      f"going on from {where}; {dropped} rows are dropped{aside}"
    )

  def _keep_aside(self):
    """Copies what peers wrote to where a damaged checkpoint of it is kept;
    returns words that say so."""
    damaged = sorted(self._folder.glob("damaged-*"))
    if not damaged or journal_path(damaged[-1], 0).exists():
      return ""
    for peer in self._places:
      for path_of in (journal_path, records_path):
        path = path_of(self._folder, peer)
        if path.exists():
          shutil.copy2(path, path_of(damaged[-1], peer))
    return f", and kept in {damaged[-1]}"

  def _check_length(self, peer, rows, records):
    """Refuses files that lost what a checkpoint is of."""
    there = len(files.read_peer_records(self._folder, peer).loss)
    for path, count, least in (
      (journal_path(self._folder, peer), len(self._journal(peer)), rows),
      (records_path(self._folder, peer), there, records),
    ):
      if count < least:
        has = f"has {count} rows" if path.exists() else "is missing"
        raise ValueError(
          f"{path} {has} where the checkpoint is of {least} rows: it was cut"
          f" short or removed. {PUT_BACK}"
        )

  @contextlib.contextmanager
  def _watched(self) -> Iterator[None]:
    """What the cluster raises, as the run loop knows it."""
    try:
      yield
    except cluster_lib.AllDied as error:
      raise engines.Died(str(error)) from error
    except cluster_lib.NotFinite as error:
      raise engines.NotFinite(
        parameter_server.not_finite(
          self._plan, str(error), self._context.cell.name
        )
      ) from error

  def advance(self, until: int) -> engines.Progress:
    """Looks at the cluster once, a moment after the last time."""
    time.sleep(max(self._next_look - time.monotonic(), 0))
    self._next_look = time.monotonic() + _LOOK
    before = self._replaced()
    with self._watched():
      self._news += self.cluster.check(self._received)
    if self._replaced() != before:
      self._memory.note(self._replaced())
    news, self._news = self._news, []
    self._check_files()
    new = self._read()
    self._received += len(new.loss)
    now = time.monotonic()
    self._counter.add(now, new)
    figures = self._counter.figures()
    if figures.messages:
      self._board.write(now, self._received, figures)
    with self._watched():
      self._look_for(until)
    return engines.Progress(
      loss=new.loss,
      staleness=engines.mean(new.staleness),
      gap=engines.mean(new.gap),
      news=news,
      figures=figures,
    )

  def _read(self) -> simulator.PeerRecords:
    """Returns the records that are new, and keeps them."""
    parts = []
    for peer in self._places:
      start = self._counts[peer]
      parts.append(files.read_peer_records(self._folder, peer, start))
      self._counts[peer] += len(parts[-1].loss)
    new = files.by_time(parts)
    self._parts.append(new)
    return new

  def _check_files(self):
    for peer in self._places:
      for path in (
        journal_path(self._folder, peer),
        records_path(self._folder, peer),
      ):
        if not path.exists():
          raise FileGone(path)

  def _look_for(self, until):
    """Fetches the parameters of message `until`, if it was received."""
    rounds, views = None, {}
    if until == self.total:
      if self.cluster.finished:
        views = self.cluster.views()
    elif self._plan.gossip.order == gossip.PAIRS:
      if self._received >= until:
        views = self.cluster.views()
    elif self.cluster.rounds * self.quantum >= until:
      rounds = until // self.quantum
      views = self.cluster.views(rounds) or self.cluster.views()
    if not views:
      reached = self._received
      if self._plan.gossip.order != gossip.PAIRS:
        reached = self.cluster.rounds * self.quantum
      self.done = max(self.done, min(reached, until - 1))
      return
    self._take(until, views)

  def _take(self, message, views):
    self._views = views
    seen = [views[peer] for peer in sorted(views)]
    params = simulator.mean_params(seen, [view.weight for view in seen])
    records = self.records()
    at = min(message, len(records.loss)) - 1
    clock = {"seconds": float(records.time[at]) - self._first_ticket}
    updates = round(np.mean([view.version for view in seen]))
    self._snapshot = engines.Snapshot(params, message, updates, clock)
    self.done = message

  @functools.cached_property
  def _first_ticket(self) -> float:
    sent = (e for i in self._places for e in self._journal(i))
    return min(event.time for event in sent if event.action in STARTS)

  def snapshot(self) -> engines.Snapshot:
    """Returns the mean model of the message that `advance` was to reach."""
    if self._snapshot is None:  # all was evaluated before this process began
      with self._watched():
        while not self.cluster.finished:
          self._news += self.cluster.check(self._received)
          time.sleep(_LOOK)
        self._take(self.total, self.cluster.views())
    assert self._snapshot is not None
    return self._snapshot

  def records(self) -> simulator.PeerRecords:
    """Returns a row for each message, in the order of their times."""
    if len(self._parts) > 1:
      self._parts = [files.by_time(self._parts)]
    return self._parts[0]

  def _seen(self):
    """The peers that were evaluated last, and what each counts."""
    seen = [self._views[peer] for peer in sorted(self._views)]
    return seen, [view.weight for view in seen]

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of some messages; and how far apart
    peers were, and how good single ones, when they were evaluated."""
    records = self.records()
    count = len(records.loss)
    start = max(min(start, end - 1, count - 1), 0)
    part = simulator.PeerRecords(*(column[start:end] for column in records))
    seen, weights = self._seen()
    return peers.summary(part, seen, weights) | peers.peer_quality(
      self._plan.problem, [view.params for view in seen]
    )

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to."""
    self._received += len(self._read().loss)
    records, plan = self.records(), self._plan
    updates = round(np.mean([v.version for v in self._views.values()]))
    row = parameter_server.columns(plan, records, updates)
    row |= self.summary(0, len(records.loss))
    row |= peers.of_links(plan.gossip, self._traffic)
    return {
      **row,
      "peers_sha256": storage.digest([v.params for v in self._seen()[0]]),
      "seconds": float(records.time[-1]) - self._first_ticket,
      "replaced": self._replaced(),
      **self._residual_lost(records),
      "missed": self.total - len(records.loss),
      "took_part": len(np.unique(records.worker)),
    }

  def _residual_lost(self, records):
    """As `traffic.lost`, of peers that left while others went on."""
    if not self._plan.gossip.compressed:
      return {}
    end, squares = records.time[-1], 0.0
    for peer in self._places:
      own = files.read_peer_records(self._folder, peer)
      for event, norm in files.residuals_lost(self._journal(peer), own):
        squares += norm**2 if event.time < end else 0.0
    return {"residual_lost": math.sqrt(squares)}

  @functools.cached_property
  def _traffic(self) -> simulator.LinkTraffic:
    """What went over each link, as far as it was taken; asked for when the cell
    has come to its end."""
    n = len(self._places)
    messages, nbytes = np.zeros((2, n, n), np.int64)
    for receiver in self._places:
      for event in self._journal(receiver):
        if event.action in TAKES:
          messages[receiver, event.job] += 1
          nbytes[receiver, event.job] += event.message
    return simulator.LinkTraffic(messages, nbytes)

  def extras(self) -> dict[str, str]:
    """Returns what went over each link, as a table."""
    return {"links.csv": peers.links_table(self._traffic)}

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self.cluster.replaced)

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns all peers, as they are when all have ended the same round, or the
    job they are at; None if they did not come to rest to stop."""
    if self._stopped is False:
      return None
    with self._watched():
      if not self._stopped:
        self.cluster.pause()
      images = self.cluster.images()
      cuts = [self._written(peer, images.get(peer)) for peer in self._places]
      if not self._stopped:
        self.cluster.go_on()
    step = sum(rows for rows, _ in cuts)
    if not step:  # nothing has happened yet
      return None
    tree = {str(peer): tree for peer, (tree, _) in images.items()}
    notes = {str(peer): notes for peer, (_, notes) in images.items()}
    return step, tree, {"peers": notes, "files": cuts}

  def _written(self, peer, image):
    """Rows and records of a peer; those of a dead one are all there are."""
    if image is not None:
      return [image[1]["rows"], image[1]["records"]]
    records = files.read_peer_records(self._folder, peer)
    return [len(self._journal(peer)), len(records.loss)]

  def stop(self) -> str:
    """Lets all peers end the same round, or the job they are at."""
    with self._watched():
      whole = self.cluster.pause(self._context.machine.grace_seconds)
    self._stopped = whole
    self._received += len(self._read().loss)
    self.done = self._received
    if self._plan.gossip.order != gossip.PAIRS:
      self.done = self.cluster.rounds * self.quantum
    return "" if whole else "; some peers did not finish in time"

  def discard(self) -> None:
    """Removes what says which processes run: there is nothing to go on with."""
    self.close()
    memory_lib.forget(self._folder)

  def close(self) -> None:
    """Ends all peers."""
    self._open.close()

