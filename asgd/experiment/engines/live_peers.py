"""Live peers: the engines `threads` and `ray` of recipes without a server.

The driver watches: it replaces who dies, evaluates what peers keep for it, and
has all stop at once for a checkpoint. A run that was stopped or killed goes on
from its last checkpoint; what peers wrote after that is dropped, as nobody is
left who has seen it.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asgd import gossip, safe_files, simulator
from asgd.experiment import engines, storage
from asgd.experiment.engines import (
  parameter_server,
  peer_clusters,
  peers,
  watched,
)
from asgd.experiment.engines.peer_clusters import LivePeers
from asgd.live.gossip import files
from asgd.live.gossip.peer_rows import View
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import check_count, records_path
from asgd.orders.trace import TAKES


def check_files(folder: Path, description: Mapping[str, Any]) -> None:
  """Raises ValueError if a journal or records of a finished cell were changed
  since; a message that its peer did not outlive may have no record."""
  workers = description["cell"]["workers"]
  files.read_trace(folder, workers)
  for peer in range(workers):
    events = read_journal(journal_path(folder, peer))
    count = len(files.read_peer_records(folder, peer).loss)
    path = records_path(folder, peer)
    check_count(path, count, events, files.lives_of(events))


class LivePeerEngine(watched.WatchedEngine):
  """A cell of live peers."""

  _who = "peers"
  _gaps = True

  def __init__(
    self, context: engines.Context, make_cluster: Callable[..., Any]
  ):
    """Starts the cell, or goes on from its last checkpoint, in a cluster as
    `peer_clusters.thread_peers` makes it."""
    self.quantum = context.plan.quantum
    self._views: dict[int, View] = {}  # that were evaluated last
    self._cuts: list[list[int]] = []
    places = range(context.plan.workers)
    paths = [journal_path(context.folder, peer) for peer in places]
    begun = any(map(read_journal, paths))
    super().__init__(context, make_cluster, begun=begun)

  def _make(self, make_cluster, began, images):
    plan, experiment = self._plan, self._context.experiment
    if plan.gossip.order != gossip.PAIRS:
      ended = [notes["rounds"] for _, notes in (images or {}).values()]
      self.done = plan.workers * min(ended, default=0)
    evaluations = experiment.config["evaluations"]
    live = LivePeers(
      plan,
      self._context.cell,
      self._folder,
      self._memory.memory,
      began,
      engines.due(evaluations, self.total, self.quantum),
    )
    return make_cluster(live, self._context.machine)

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
    # Peers themselves are not needed to read what they were.
    aside = "" if images else self._keep_aside()
    cuts = self._cuts if images else [(0, 0)] * len(self._places)
    dropped = files.cut_back(self._folder, cuts)
    self._say_going_on(images, dropped, aside)

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
          safe_files.write(path_of(damaged[-1], peer), path.read_bytes())
    return f", and kept in {damaged[-1]}"

  def _records_of(self, place, start=0):
    return files.read_peer_records(self._folder, place, start)

  def _look_for(self, until):
    rounds, views = None, {}
    if until == self.total:
      if self.cluster.finished:
        views = self.cluster.views()
    elif self._plan.gossip.order == gossip.PAIRS:
      if self._received >= until or self.cluster.finished:
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

  def _take_last(self):
    self._take(self.total, self.cluster.views())

  def records(self) -> simulator.PeerRecords:
    """Returns a row for each message, in the order of their times."""
    return self._all()

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

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns all peers, as they are when all have ended the same round, or the
    job they are at; None if they did not come to rest to stop."""
    if self._stopped is False:
      return None
    with self._watched():
      if not self._stopped:
        self.cluster.pause()
      images = self.cluster.images()
      cuts = files.lengths(self._folder, len(self._places), images)
      if not self._stopped:
        self.cluster.go_on()
    step = sum(rows for rows, _ in cuts)
    if not step:  # nothing has happened yet
      return None
    tree = {str(peer): tree for peer, (tree, _) in images.items()}
    notes = {str(peer): notes for peer, (_, notes) in images.items()}
    return step, tree, {"peers": notes, "files": cuts}

  def stop(self) -> str:
    """See the base."""
    told = super().stop()
    if self._plan.gossip.order != gossip.PAIRS:
      self.done = self.cluster.rounds * self.quantum
    return told


def describe(result: Mapping[str, Any]) -> str:
  """Returns what a cell came to in a few words."""
  words = peers.describe(result)
  if missed := result["missed"]:
    words += f", {missed} messages missed while peers were gone"
  if lost := result.get("residual_lost"):
    words += f", RMS {lost:.2g} that codecs had kept back lost with peers"
  return words
