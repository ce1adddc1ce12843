"""The driver of a run of peers: it introduces, pauses and replaces them.

The driver sees no message of the training. It notifies peers when one joins or
exits. It can make all of them end the same round (`pause`), for checkpoints and
before a newcomer joins. Its supervisor starts, watches and replaces peers.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import gossip
from asgd.live import faults as faults_lib
from asgd.live.cluster import Cluster
from asgd.live.deadlines import Ladder
from asgd.live.failures import AllDied, NotFinite
from asgd.live.gossip import files
from asgd.live.gossip.arrivals import Arrivals
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

_PATIENCE = 30.0  # least seconds of silence after which a peer is ended
Image = tuple[Any, dict[str, Any]]  # of a peer: (tree of arrays, JSON)


class PeerMaker(NamedTuple):
  """The data from which a host makes its peer; sent to the peer's process."""

  make_duty: Callable[[], PeerDuty]
  run: Path  # folder of the run
  seed: int  # of the draws of partners
  faults: Sequence[faults_lib.Fault] = ()
  span: Callable[[int, Span], None] | None = None  # called with peers' spans
  # Whether to compile in the host, as a new process has compiled nothing.
  warm_up: bool = False
  # (faults, folder of the run, Inside) -> the script of a host's faults
  make_script: Callable[..., faults_lib.Script] = faults_lib.script_of

  def make(
    self, index: int, image: Image | None, counter: Host | None, inside: Inside
  ) -> LivePeer:
    """Makes the next incarnation of a peer from its files.

    Args:
      index: of the peer.
      image: from which it resumes; None: it begins with the first parameters.
      counter: of jobs; None: the peer works in rounds.
      inside: of the host.
    """
    duty = self.make_duty()
    if self.warm_up:
      duty.warm_up(index)
    journal_and_records = files.open_files(self.run, index, inside.disk)
    rows = PeerRows(index, duty, journal_and_records, inside.clock)
    script = self.make_script(self.faults, self.run, inside)
    span = self.span and functools.partial(self.span, index)
    options: dict[str, Any] = {"faults": script, "span": span}
    peer: LivePeer
    if counter is None:
      peer = Rounds(inside, rows, **options)
    elif duty.gossip.order == gossip.ARRIVALS:
      peer = Arrivals(inside, rows, counter=counter, **options)
    else:
      # Keyed by incarnation too: a new one does not repeat the draws of the
      # last.
      draw = np.random.default_rng((self.seed, index, rows.journal.incarnation))
      peer = Pairs(inside, rows, counter=counter, draw=draw, **options)
    if image is not None:
      peer.restore(*image)
    return peer


class PeerCluster(Cluster):
  """The peers of a run. The caller calls `start` once, then `check` repeatedly
  until `finished`."""

  def __init__(
    self,
    settings: gossip.Gossip,
    hosts: Hosts,
    maker: PeerMaker,
    *,
    messages: int,
    ladder: Ladder,
    refill: bool,
    patience: float = _PATIENCE,
  ):
    """Prepares a cluster.

    Args:
      settings: rule, topology and order of the run.
      hosts: of the peers.
      maker: of peers.
      messages: jobs of all peers together.
      ladder: time limits of jobs.
      refill: whether to replace peers that have exited.
      patience: least seconds of silence after which a peer is ended.
    """
    self.gossip, self._maker, self._refill = settings, maker, refill
    self._messages = messages
    peers = settings.topology.workers
    counts = {PEER: peers, COUNTER: 1} if self._counts_jobs else {PEER: peers}
    super().__init__(Supervisor(hosts, counts, ladder, patience=patience))
    # Rounds of each peer. A counter ends the run by itself, without a limit.
    self._limit = sys.maxsize if self._counts_jobs else messages // peers
    self.incarnations: dict[int, int] = {}  # of peers that have joined
    self._starting: dict[int, int] = {}  # incarnations of peers being made
    self._paused = True  # until `start`
    self.finished = False  # whether all jobs were done at the last `check`
    self.rounds = 0  # ended by all peers at the last `check`

  @property
  def _counts_jobs(self) -> bool:
    """Whether a counter numbers the jobs, as of peers without rounds."""
    return self.gossip.order != gossip.ROUNDS

  # Starting.

  def start(self, images: dict[int, Image] | None = None) -> None:
    """Starts all peers. With images, only the peers of the images continue the
    run; the others join it as newcomers."""
    # The counter first: each peer is made with a handle of it.
    if self._counts_jobs:
      self._start_counter()
    indices = range(self.gossip.topology.workers)
    members = sorted(images) if images else list(indices)
    parties = [
      self._start_peer(peer, images[peer] if images else None)
      for peer in members
    ]
    self._supervisor.await_made(parties)
    for party in parties:
      self.incarnations[party.index] = self._starting.pop(party.index)
      party.run = party.host.call("run")
    # No peer works before all know each other: `allow` of `resume` starts them.
    self._ask("meet", self._neighbours())
    self.resume()
    for peer in set(indices) - set(members):
      self._start_peer(peer)  # `check` admits it once it is made

  def _start_counter(self) -> None:
    """Starts a counter of jobs. The taken numbers are read from the journals,
    as records may lack the last message of a peer that was killed."""
    taken: set[int] = set()
    for peer in range(self.gossip.topology.workers):
      path = journal_path(self._maker.run, peer)
      taken.update(files.numbers_of(read_journal(path)))
    make = functools.partial(_make_counter, self._messages, sorted(taken))
    party = self._supervisor.start(COUNTER, 0, make)
    self._supervisor.await_made([party])

  def _start_peer(self, peer: int, image: Image | None = None) -> Party:
    """Starts the next incarnation of a peer, without waiting for it."""
    run = self._maker.run
    events = read_journal(journal_path(run, peer))
    self._starting[peer] = files.count_incarnations(events)
    counters = self._supervisor.parties.get(COUNTER, {})
    counter = counters[0].host if counters else None
    make = functools.partial(self._maker.make, peer, image, counter)
    party = self._supervisor.start(PEER, peer, make)
    party.has_done_job = True  # it has compiled by the time that it is made
    return party

  def _neighbours(self) -> dict[int, Neighbour]:
    """Returns incarnation and host of each peer that has joined."""
    parties = self._supervisor.parties[PEER]
    return {
      peer: Neighbour(incarnation, parties[peer].host)
      for peer, incarnation in self.incarnations.items()
    }

  def _ask(
    self, name: str, *args: Any, among: Iterable[int] | None = None
  ) -> dict[int, Any]:
    """Calls a method of peers that have joined, concurrently; returns the
    answers of those that are alive."""
    among = self.incarnations if among is None else among
    return self._supervisor.ask(PEER, "ask", name, *args, among=among)

  # Watching.

  def check(self, messages: int) -> list[str]:
    """Replaces peers that have exited, ends peers that hang, and admits
    newcomers. Returns lines for the user.

    Args:
      messages: received so far in the run.

    Raises:
      AllDied: if the last peer has exited.
      NotFinite: if no peer computes finite messages.
      WorkersDie: if peers exit again and again.
    """
    self._supervisor.progressed(messages)
    at_rest = self._at_rest()
    ended = self.rounds >= self._limit
    if self._counts_jobs:
      # A peer without rounds is quiet at a pause, and once no job is left.
      ended = not self._paused
    self.finished = at_rest and ended
    if not self.finished:
      parties = self._supervisor.parties[PEER]
      # A copy: `_admit` handles exits, which change `_starting`.
      for peer in [*self._starting]:
        if peer in self._starting and parties[peer].ready:
          self._admit(peer)
    return self._supervisor.take_news()

  def _at_rest(self) -> bool:
    """Handles exits; returns whether all other peers are quiet.

    Without rounds the driver asks twice: a peer that has reported that it is
    quiet becomes busy again if another peer then sends it a frame.
    """
    self._handle_exits()
    return self._all_quiet() and (not self._counts_jobs or self._all_quiet())

  def _all_quiet(self) -> bool:
    """Asks for the peers' status, and ends those that take too long for a job;
    returns whether all are alive and quiet."""
    statuses = self._ask("status")
    rounds = [status.rounds for status in statuses.values()]
    # The minimum is 0 if no peer answers, but the count never decreases.
    self.rounds = max(self.rounds, min(rounds, default=0))
    for peer, status in statuses.items():
      party = self._supervisor.parties[PEER].get(peer)
      # The peer measures how long it has been busy: the driver itself may have
      # been delayed.
      if party is not None:
        busy = status.busy or 0.0
        self._supervisor.watch(party, status.rounds, busy=busy)
    return self.incarnations.keys() == statuses.keys() and all(
      status.quiet for status in statuses.values()
    )

  def _handle_exits(self) -> None:
    """Handles the peers, and the counter, that have exited."""
    supervisor = self._supervisor
    for party in supervisor.exited(COUNTER) if self._counts_jobs else ():
      self._replace_counter(party)
    for party, how in supervisor.take_ended(PEER):
      self._handle_peer_exit(party.index, how)

  def _handle_peer_exit(self, peer: int, how: str) -> None:
    """Records the exit of a peer, notifies the others, and replaces it.

    Args:
      peer: that has exited.
      how: "died", "hung", or the result of its `run`.
    """
    residual = 0.0
    self._starting.pop(peer, None)  # it may not have joined yet
    if peer in self.incarnations:
      incarnation, run = self.incarnations.pop(peer), self._maker.run
      # [1] LEAVE is written before its jobs are released: a new counter, which
      # reads the journals, must assign the same jobs again.
      clock, disk = self._supervisor.hosts.clock, self._supervisor.hosts.disk
      jobs = files.write_leave(run, peer, incarnation, clock(), disk)
      residual = files.last_residual_lost(run, peer)
      if self._counts_jobs:
        self._supervisor.ask(COUNTER, "release", peer, incarnation, *jobs)
      # [2] The last messages are forwarded before `peer_exited`: after it, a
      # neighbour no longer waits for them.
      self._complete_broadcast(peer)
      self._ask("peer_exited", peer)
    # [3] The exit is counted, reported to the user, and the peer replaced.
    self._supervisor.count_exit(PEER, peer, how)
    if how == REJECTED:
      self._supervisor.count_refusal(PEER, peer)
    if self.finished and self.incarnations:
      return
    replaced = "it is replaced, " if self._refill else ""
    news = f"peer {peer} {how}; {replaced}the others continue"
    if residual:
      news += f"; the update that its codec kept is lost (RMS {residual:.3g})"
    self._supervisor.news.append(news)
    if not self.incarnations:
      last_peer = f"the last was peer {peer}"
      if how == REJECTED:
        raise NotFinite(
          f"the messages of all peers were not finite; {last_peer}"
        )
      raise AllDied(f"all peers have exited; {last_peer}")
    if self._refill:
      self._start_peer(peer)

  def _replace_counter(self, party: Party) -> None:
    """Starts another counter, which assigns no number that a peer has."""
    supervisor = self._supervisor
    supervisor.drop(party)
    supervisor.count_exit(COUNTER, 0, "died")
    supervisor.news.append("the counter of jobs exited and is restarted")
    # Peers first drop the numbers that they have not begun: the journals lack
    # them, so the new counter assigns them again.
    self._ask("count_by", None)
    self._start_counter()
    self._ask("count_by", supervisor.parties[COUNTER][0].host)

  def _complete_broadcast(self, lost: int) -> None:
    """Forwards each of a lost peer's last messages to all its receivers, if at
    least one of them has it. So all receivers mix the same messages."""
    # In pairs a message has one receiver.
    if self.gossip.order == gossip.PAIRS:
      return
    topology = self.gossip.topology
    # Peer -> numbers of the messages that it has received from the lost one.
    received = self._ask("received_from", lost)
    for number in sorted(set().union(*received.values())):
      links = topology.links[number % topology.period]
      having, lacking = [], []
      for peer, numbers in received.items():
        if number in numbers:
          having.append(peer)
        elif links[peer, lost]:
          lacking.append(peer)
      answers = self._ask("message_of", lost, number, among=having)
      frames = [frame for frame in answers.values() if frame is not None]
      if frames and lacking:
        self._ask("take_over", frames[0], among=lacking)

  # Pause and checkpoints.

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes all peers end the same round (without rounds: their open jobs), and
    waits for it. Raises as `check`.

    Args:
      seconds: to wait at most.

    Returns:
      Whether all peers are quiet.
    """
    self._paused = True
    limits = self._ask("halt")
    # A peer that has begun a later round needs the messages of its neighbours
    # to end it. So all peers continue to the latest round that has begun.
    if not self._counts_jobs and limits:
      self._ask("allow", max(limits.values()))
    return self._supervisor.wait_for_rest(self._at_rest, seconds)

  def resume(self) -> None:
    """Ends a pause."""
    self._paused = False
    self._ask("allow", self._limit)

  def _lenders(self, peer: int) -> list[int]:
    """Returns the peers alive that lend to a newcomer: its senders, or only
    those with links in both directions if there are any."""
    union = self.gossip.topology.union  # bool[receiver, sender], of all rounds
    senders = [j for j in self.incarnations if union[peer, j]]
    return [j for j in senders if union[j, peer]] or senders

  def _admit(self, peer: int) -> None:
    """Makes a newcomer join, if a neighbour is alive that lends it its first
    parameters."""
    if not self._lenders(peer):
      return
    # All peers end the same round, so that the newcomer's first round, and the
    # first message that each neighbour takes of it, are the same for all.
    self.pause()
    # The newcomer or its lenders may have exited during the pause.
    if peer in self._starting and self._lenders(peer):
      self._introduce(peer)
      self._supervisor.news.append(f"peer {peer} joins again")
    self.resume()

  def _introduce(self, peer: int) -> None:
    """Connects a newcomer with the peers alive, some of which lend to it."""
    parties, lenders = self._supervisor.parties, self._lenders(peer)
    party, others = parties[PEER][peer], self._neighbours()
    incarnation = self.incarnations[peer] = self._starting.pop(peer)
    party.run = party.host.call("run")
    if self._counts_jobs:  # the counter may have been replaced meanwhile
      self._ask("count_by", parties[COUNTER][0].host, among=[peer])
    # `join` comes first: before it, the newcomer drops all frames, loans too.
    self._ask("join", others, self.rounds, lenders, among=[peer])
    newcomer = Neighbour(incarnation, party.host)
    self._ask("present", peer, newcomer, True, among=lenders)
    not_lending = [other for other in others if other not in lenders]
    self._ask("present", peer, newcomer, False, among=not_lending)

  def images(self) -> dict[int, Image]:
    """Returns an image of each peer of a paused run. Raises as `check`."""
    images: dict[int, Image] = {}

    def take_images() -> bool:
      images.clear()
      images.update(self._ask("image"))
      # LEAVE of a peer that has exited is written here, before the caller
      # counts the rows that belong to the checkpoint.
      self._handle_exits()
      return images.keys() == self.incarnations.keys()

    self._supervisor.wait_for_rest(take_images)
    return images

  def views(self, rounds: int | None = None) -> dict[int, View]:
    """Returns the present parameters of all peers; with `rounds` those of the
    peers that kept them after that number of rounds."""
    if rounds is None:
      return self._ask("view")
    views = self._ask("take_kept", rounds)
    return {peer: view for peer, view in views.items() if view is not None}


def _make_counter(
  messages: int, taken: Sequence[int], inside: Inside
) -> JobCounter:
  del inside
  return JobCounter(messages, taken)
