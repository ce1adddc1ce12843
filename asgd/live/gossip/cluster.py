"""The driver of a run of peers: it introduces them, and makes them pause.

The driver is no part of the training: it sees no message. It reports to peers
who is alive, and can make all of them end the same round (`pause`), which it
does for checkpoints and before a newcomer joins. Its supervisor starts, watches
and replaces them.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import gossip
from asgd.live import faults as faults_lib
from asgd.live.cluster import Cluster
from asgd.live.deadlines import Ladder
from asgd.live.failures import AllDied, NotFinite
from asgd.live.gossip import files
from asgd.live.gossip.counter import JobCounter
from asgd.live.gossip.outbox import Neighbour
from asgd.live.gossip.pairs import Pairs
from asgd.live.gossip.peer import REJECTED, LivePeer
from asgd.live.gossip.peer_rows import PeerDuty, PeerRows, View
from asgd.live.gossip.rounds import Rounds
from asgd.live.hosts import Host, Hosts, Inside
from asgd.live.hosts.base import COUNTER, PEER
from asgd.live.journal import journal_path, read_journal
from asgd.live.spans import Span
from asgd.live.supervisor import Party, Supervisor

_PATIENCE = 30.0  # seconds until a peer that is silent is ended, at least
Image = tuple[Any, dict[str, Any]]  # of a peer: a tree of arrays, JSON


class PeerMaker(NamedTuple):
  """How a host makes a peer; it travels to the peer's process."""

  make_duty: Callable[[], PeerDuty]
  run: Path
  seed: int
  faults: Sequence[faults_lib.Fault] = ()
  span: Callable[[int, Span], None] | None = None  # takes what peers do when
  # Compile in the host: a process of its own has compiled nothing.
  warm_up: bool = False
  # (faults, folder of the run, Inside) -> those of a host
  make_script: Callable[..., faults_lib.Script] = faults_lib.script_of

  def __call__(
    self, index: int, image: Image | None, counter: Host | None, inside: Inside
  ) -> LivePeer:
    """Makes the next incarnation of a peer, from its files and perhaps an
    image."""
    duty = self.make_duty()
    if self.warm_up:
      duty.warm_up(index)
    opened = files.open_files(self.run, index, inside.disk)
    rows = PeerRows(index, duty, opened, inside.clock)
    script = self.make_script(self.faults, self.run, inside)
    span = self.span and functools.partial(self.span, index)
    options: dict[str, Any] = {"faults": script, "span": span}
    if counter is None:
      peer: LivePeer = Rounds(inside, rows, **options)
    else:
      draw = np.random.default_rng((self.seed, index, rows.journal.life))
      peer = Pairs(inside, rows, counter=counter, draw=draw, **options)
    if image is not None:
      peer.restore(*image)
    return peer


class PeerCluster(Cluster):
  """The peers of a run: `start` begins, and `check` is to be called again and
  again until `finished`."""

  def __init__(
    self,
    how: gossip.Gossip,
    hosts: Hosts,
    maker: PeerMaker,
    *,
    messages: int,
    ladder: Ladder,
    refill: bool,
    patience: float = _PATIENCE,
  ):
    """Prepares.

    Args:
      how: recipe of the run.
      hosts: which run the peers.
      maker: of peers.
      messages: jobs of all peers together.
      ladder: when a job takes too long.
      refill: replace a peer that exits.
      patience: seconds until a peer that is silent is ended, at least.
    """
    self.gossip, self._maker, self._refill = how, maker, refill
    self._messages = messages
    peers = how.topology.workers
    counts = {PEER: peers, COUNTER: 1} if self._pairs else {PEER: peers}
    super().__init__(Supervisor(hosts, counts, ladder, patience=patience))
    self._limit = sys.maxsize if self._pairs else messages // peers
    self.lives: dict[int, int] = {}  # peer -> life, of those that have joined
    self._coming: dict[int, int] = {}  # of those that are being made
    self._paused = True  # until `start`
    self.finished = False  # whether all is done, as `check` saw
    self.rounds = 0  # that all have ended, as `check` saw

  @property
  def _pairs(self):
    return self.gossip.order == gossip.PAIRS

  # Starting.

  def start(self, images: dict[int, Image] | None = None) -> None:
    """Starts all peers, or those of images, and the others as newcomers."""
    if self._pairs:
      self._start_counter()
    places = range(self.gossip.topology.workers)
    first = sorted(images) if images else list(places)
    parties = [
      self._make(peer, images[peer] if images else None) for peer in first
    ]
    self._supervisor.await_made(parties)
    for party in parties:
      self.lives[party.index] = self._coming.pop(party.index)
      party.run = party.host.call("run")
    self._ask("meet", self._neighbours())
    self.go_on()
    for peer in set(places) - set(first):
      self._make(peer)

  def _start_counter(self):
    """Starts a counter. The journals have the numbers that are taken: records
    may lack a message that its peer did not outlive."""
    taken: set[int] = set()
    for peer in range(self.gossip.topology.workers):
      path = journal_path(self._maker.run, peer)
      taken.update(files.numbers_of(read_journal(path)))
    make = functools.partial(_make_counter, self._messages, sorted(taken))
    party = self._supervisor.start(COUNTER, 0, make)
    self._supervisor.await_made([party])

  def _make(self, peer, image=None) -> Party:
    run = self._maker.run
    self._coming[peer] = files.lives_of(read_journal(journal_path(run, peer)))
    counters = self._supervisor.parties.get(COUNTER, {})
    counter = counters[0].host if counters else None
    make = functools.partial(self._maker, peer, image, counter)
    party = self._supervisor.start(PEER, peer, make)
    party.proven = True  # it has compiled when it is made
    return party

  def _neighbours(self):
    parties = self._supervisor.parties[PEER]
    return {
      peer: Neighbour(life, parties[peer].host)
      for peer, life in self.lives.items()
    }

  def _ask(self, name, *args, among=None) -> dict[int, Any]:
    """Asks peers that have joined, all at once; returns what those that are
    alive answer."""
    among = self.lives if among is None else among
    return self._supervisor.ask(PEER, "ask", name, *args, among=among)

  # Watching.

  def check(self, messages: int) -> list[str]:
    """Looks at the cluster, of which so many messages were received; returns
    lines for the user. Raises AllDied, NotFinite and WorkersDie, and what would
    end newcomers, too."""
    self._supervisor.progressed(messages)
    rest = self._at_rest()
    # In pairs a peer that is not paused is quiet when no number is left.
    ended = not self._paused if self._pairs else self.rounds >= self._limit
    self.finished = rest and ended
    if not self.finished:
      parties = self._supervisor.parties[PEER]
      for peer in [*self._coming]:
        if peer in self._coming and parties[peer].ready:
          self._admit(peer)
    return self._supervisor.take_news()

  def _at_rest(self) -> bool:
    """Buries who has exited; returns whether all others are quiet.

    A peer of pairs that was quiet may have been asked for an exchange since, by
    one that has ended its job and was quiet when it was looked at: so the
    driver looks twice."""
    self._bury()
    return self._look() and (not self._pairs or self._look())

  def _look(self) -> bool:
    """Asks how all are, and ends those that are at a job for too long; returns
    whether all are alive and quiet."""
    statuses = self._ask("status")
    rounds = [status.rounds for status in statuses.values()]
    self.rounds = max(self.rounds, min(rounds, default=0))
    for peer, status in statuses.items():
      party = self._supervisor.parties[PEER].get(peer)
      if party is not None:  # what the peer says: the driver may have waited
        busy = status.busy or 0.0
        self._supervisor.watch(party, status.rounds, busy=busy)
    return self.lives.keys() == statuses.keys() and all(
      status.quiet for status in statuses.values()
    )

  def _bury(self):
    """Handles the parties that have exited."""
    supervisor = self._supervisor
    for party in supervisor.lost(COUNTER) if self._pairs else ():
      self._replace_counter(party)
    for party, how in supervisor.take_ended(PEER):
      self._bury_peer(party.index, how)

  def _bury_peer(self, peer, how):
    residual, clock = 0.0, self._supervisor.hosts.clock
    self._coming.pop(peer, None)  # before it had joined
    if peer in self.lives:
      life, run = self.lives.pop(peer), self._maker.run
      disk = self._supervisor.hosts.disk
      left = files.leave(run, peer, life, clock(), disk)
      residual = files.last_residual_lost(run, peer)
      if self._pairs:
        self._supervisor.ask(COUNTER, "left", peer, life, *left)
      self._pass_on(peer)
      self._ask("gone", peer)
    self._supervisor.count_exit(PEER, peer, how)
    if how == REJECTED:
      self._supervisor.count_refusal(PEER, peer)
    if self.finished and self.lives:
      return
    news = f"peer {peer} {how}; the others go on"
    if self._refill:
      news += ", another takes its place"
    if residual:
      news += f"; what its codec had kept back is lost (RMS {residual:.3g})"
    self._supervisor.news.append(news)
    if not self.lives:
      last = f"the last was peer {peer}"
      if how == REJECTED:
        raise NotFinite(f"what all peers computed was not finite, {last}")
      raise AllDied(f"all peers died, {last}")
    if self._refill:
      self._make(peer)

  def _replace_counter(self, party):
    """Starts another counter, which gives no number again that a peer has."""
    supervisor = self._supervisor
    supervisor.drop(party)
    supervisor.count_exit(COUNTER, 0, "died")
    supervisor.news.append("the counter of jobs died; it is started again")
    self._ask("count_by", None)
    self._start_counter()
    self._ask("count_by", supervisor.parties[COUNTER][0].host)

  def _pass_on(self, lost):
    """Forwards a lost peer's last messages to every neighbour if at least one
    has received them."""
    if self._pairs:
      return
    topology = self.gossip.topology
    heard = self._ask("heard_of", lost)
    for round in sorted({r for rounds in heard.values() for r in rounds}):
      links = topology.links[round % topology.period]
      having = [peer for peer, rounds in heard.items() if round in rounds]
      lacking = [
        peer
        for peer, rounds in heard.items()
        if round not in rounds and links[peer, lost]
      ]
      answers = self._ask("message_of", lost, round, among=having)
      frames = [frame for frame in answers.values() if frame is not None]
      if frames and lacking:
        self._ask("take_over", frames[0], among=lacking)

  # All at once.

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes all end the same round, or the jobs they are at, and waits for it,
    so many seconds at most; returns whether they have. Raises as `check`."""
    self._paused = True
    limits = self._ask("halt")
    if not self._pairs and limits:
      self._ask("allow", max(limits.values()))
    return self._supervisor.rest(self._at_rest, seconds)

  def go_on(self) -> None:
    """Ends a pause."""
    self._paused = False
    self._ask("allow", self._limit)

  def _lenders(self, peer):
    """The peers alive that lend to a newcomer."""
    union = self.gossip.topology.union
    hears = [j for j in self.lives if union[peer, j]]
    return [j for j in hears if union[j, peer]] or hears

  def _admit(self, peer):
    """Makes a newcomer join, once a neighbour is alive: what it begins with is
    what that lends."""
    if not self._lenders(peer):
      return
    self.pause()
    if peer in self._coming and self._lenders(peer):  # they may have exited
      self._introduce(peer)
      self._supervisor.news.append(f"peer {peer} joins again")
    self.go_on()

  def _introduce(self, peer):
    parties, lenders = self._supervisor.parties, self._lenders(peer)
    party = parties[PEER][peer]
    others, among = self._neighbours(), list(self.lives)
    life = self.lives[peer] = self._coming.pop(peer)
    party.run = party.host.call("run")
    if self._pairs:  # which may be another than when the peer was made
      self._ask("count_by", parties[COUNTER][0].host, among=[peer])
    self._ask("join", others, self.rounds, lenders, among=[peer])
    newcomer = Neighbour(life, party.host)
    lending = [other for other in among if other in lenders]
    self._ask("present", peer, newcomer, True, among=lending)
    rest = [other for other in among if other not in lenders]
    self._ask("present", peer, newcomer, False, among=rest)

  def images(self) -> dict[int, Image]:
    """Returns an image of each peer, at a pause. Raises as `check`."""
    images: dict[int, Image] = {}

    def take():
      images.clear()
      images.update(self._ask("image"))
      self._bury()  # the journal of one without an image says that it left
      return images.keys() == self.lives.keys()

    self._supervisor.rest(take)
    return images

  def views(self, rounds: int | None = None) -> dict[int, View]:
    """Returns the parameters of all peers, as they are, or of those that have
    kept them after so many rounds."""
    if rounds is None:
      return self._ask("view")
    views = self._ask("take_kept", rounds)
    return {peer: view for peer, view in views.items() if view is not None}


def _make_counter(messages, taken, inside: Inside) -> JobCounter:
  del inside
  return JobCounter(messages, taken)
