"""The driver of a run of peers: it introduces, pauses and replaces them.

The driver sees no message of the training. It notifies the peers when a peer
joins or exits. It can make all peers end the same round (`pause`), for
checkpoints and before a newcomer joins. Its supervisor starts, watches and
replaces peers.
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
from asgd.live.gossip.arrivals import PeerArrivals
from asgd.live.gossip.counter import JobCounter
from asgd.live.gossip.outbox import Neighbour
from asgd.live.gossip.pairs import Pairs
from asgd.live.gossip.peer import REJECTED, LivePeer
from asgd.live.gossip.peer_rows import PeerRows, PeerSpec, View
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

  make_spec: Callable[[], PeerSpec]
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
      index: the index of the peer.
      image: the image from which it resumes; None: it begins with the first
        parameters.
      counter: the counter of jobs; None: the peer works in rounds.
      inside: the functions of the host.
    """
    spec = self.make_spec()
    if self.warm_up:
      spec.warm_up(index)
    journal_and_records = files.open_files(self.run, index, inside.disk)
    rows = PeerRows(index, spec, journal_and_records, inside.clock)
    script = self.make_script(self.faults, self.run, inside)
    span = self.span and functools.partial(self.span, index)
    options: dict[str, Any] = {"faults": script, "span": span}
    peer: LivePeer
    if counter is None:
      peer = Rounds(inside, rows, **options)
    elif spec.gossip.order == gossip.ARRIVALS:
      peer = PeerArrivals(inside, rows, counter=counter, **options)
    else:
      # The incarnation is part of the seed: an incarnation must not repeat the
      # draws of the previous one.
      rng = np.random.default_rng((self.seed, index, rows.journal.incarnation))
      peer = Pairs(inside, rows, counter=counter, rng=rng, **options)
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
      hosts: the hosts of the peers.
      maker: the maker of peers.
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
    # Rounds of each peer. Without rounds the counter ends the run.
    self._limit = sys.maxsize if self._counts_jobs else messages // peers
    # Peer -> incarnation, for peers that have joined, and for starting peers.
    self.incarnations: dict[int, int] = {}
    self._starting_incarnations: dict[int, int] = {}
    self._is_paused = True  # until `start`
    self.finished = False  # whether all jobs were done at the last `check`
    self.rounds = 0  # number of rounds that all peers have ended

  @property
  def _counts_jobs(self) -> bool:
    """Whether a counter numbers the jobs, as of peers without rounds."""
    return self.gossip.order != gossip.ROUNDS

  # Starting.

  def start(self, images: dict[int, Image] | None = None) -> None:
    """Starts all peers. With images, only the peers of the images continue the
    run; the others join it as newcomers."""
    # Start the counter first: each counted peer needs a handle of it.
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
      self.incarnations[party.index] = self._starting_incarnations.pop(
        party.index
      )
      party.run = party.host.call("run")
    # No peer may work before it knows all others. `resume` starts their work.
    self._ask("set_peers", self._neighbours())
    self.resume()
    for peer in set(indices) - set(members):
      self._start_peer(peer)  # `check` admits it once it is made

  def _start_counter(self) -> None:
    """Starts a counter of jobs. Reads the taken numbers from the journals: the
    records may lack the last message of a peer that was killed."""
    taken_numbers: set[int] = set()
    for peer in range(self.gossip.topology.workers):
      path = journal_path(self._maker.run, peer)
      taken_numbers.update(files.kept_job_numbers(read_journal(path)))
    make = functools.partial(
      _make_counter, self._messages, sorted(taken_numbers)
    )
    party = self._supervisor.start(COUNTER, 0, make)
    self._supervisor.await_made([party])

  def _start_peer(self, peer: int, image: Image | None = None) -> Party:
    """Starts the next incarnation of a peer, without waiting for it."""
    run = self._maker.run
    events = read_journal(journal_path(run, peer))
    self._starting_incarnations[peer] = files.count_incarnations(events)
    counters = self._supervisor.parties.get(COUNTER, {})
    counter = counters[0].host if counters else None
    make = functools.partial(self._maker.make, peer, image, counter)
    party = self._supervisor.start(PEER, peer, make)
    party.has_done_job = True  # making the peer includes compiling
    return party

  def _neighbours(self) -> dict[int, Neighbour]:
    """Returns the incarnation and the host of each peer that has joined."""
    parties = self._supervisor.parties[PEER]
    return {
      peer: Neighbour(incarnation, parties[peer].host)
      for peer, incarnation in self.incarnations.items()
    }

  def _ask(
    self, name: str, *args: Any, among: Iterable[int] | None = None
  ) -> dict[int, Any]:
    """Calls a method of peers that have joined, all at once. Returns peer ->
    answer, for the live peers."""
    among = self.incarnations if among is None else among
    return self._supervisor.ask(PEER, "ask", name, *args, among=among)

  # Watching.

  def check(self, messages: int) -> list[str]:
    """Replaces peers that have exited, ends peers that hang, and admits
    newcomers. Returns lines for the user.

    Args:
      messages: number of messages received so far in the run.

    Raises:
      AllDied: if the last peer has exited.
      NotFinite: if no peer computes finite messages.
      WorkersDie: if peers exit repeatedly.
    """
    self._supervisor.count_received(messages)
    at_rest = self._are_at_rest()
    # Without rounds, a peer that is not paused is quiet only if no job is left.
    no_job_left = self.rounds >= self._limit
    if self._counts_jobs:
      no_job_left = not self._is_paused
    self.finished = at_rest and no_job_left
    if not self.finished:
      parties = self._supervisor.parties[PEER]
      # A copy: `_admit` handles exits, which change `_starting_incarnations`.
      for peer in [*self._starting_incarnations]:
        if peer in self._starting_incarnations and parties[peer].is_ready:
          self._admit(peer)
    return self._supervisor.take_news()

  def _are_at_rest(self) -> bool:
    """Handles exits; returns whether all other peers are quiet.

    Without rounds the driver asks twice. After a peer has reported that it is
    quiet, another peer may send it a frame, so that it is busy again.
    """
    self._handle_exits()
    if not self._are_all_quiet():
      return False
    return not self._counts_jobs or self._are_all_quiet()

  def _are_all_quiet(self) -> bool:
    """Asks for the peers' status, and ends peers that take too long for a job.
    Returns whether all peers are alive and quiet."""
    statuses = self._ask("status")
    rounds = [status.rounds for status in statuses.values()]
    # The minimum is 0 if no peer answers, but the count never decreases.
    self.rounds = max(self.rounds, min(rounds, default=0))
    for peer, status in statuses.items():
      party = self._supervisor.parties[PEER].get(peer)
      # The peer itself measures how long it has been busy: the driver may have
      # been delayed.
      if party is not None:
        busy = status.busy_seconds or 0.0
        self._supervisor.watch(party, status.rounds, busy=busy)
    return self.incarnations.keys() == statuses.keys() and all(
      status.is_quiet for status in statuses.values()
    )

  def _handle_exits(self) -> None:
    """Handles the peers, and the counter, that have exited."""
    supervisor = self._supervisor
    counters = supervisor.exited_parties(COUNTER) if self._counts_jobs else ()
    for party in counters:
      self._replace_counter(party)
    for party, ending in supervisor.take_ended(PEER):
      self._handle_peer_exit(party.index, ending)

  def _handle_peer_exit(self, peer: int, ending: str) -> None:
    """Records the exit of a peer, notifies the other peers, and replaces it.

    Args:
      peer: the peer that has exited.
      ending: "died", "hung", or the result of the peer's `run`.
    """
    residual = 0.0
    # The peer may not have joined yet.
    self._starting_incarnations.pop(peer, None)
    if peer in self.incarnations:
      incarnation, run = self.incarnations.pop(peer), self._maker.run
      # [1] Write LEAVE before the peer's jobs are released: a new counter reads
      # the journals, and must assign the same jobs again.
      clock, disk = self._supervisor.hosts.clock, self._supervisor.hosts.disk
      jobs = files.write_leave(run, peer, incarnation, clock(), disk)
      residual = files.last_residual_lost(run, peer)
      if self._counts_jobs:
        self._supervisor.ask(COUNTER, "release", peer, incarnation, *jobs)
      # [2] Forward the peer's last messages before `peer_exited`: after that
      # call a neighbour no longer waits for them.
      self._complete_broadcast(peer)
      self._ask("peer_exited", peer)
    # [3] Count the exit, report it to the user, and replace the peer.
    self._supervisor.count_exit(PEER, peer, ending)
    if ending == REJECTED:
      self._supervisor.count_refusal(PEER, peer)
    if self.finished and self.incarnations:
      return
    replacement = "it is replaced, " if self._refill else ""
    news = f"peer {peer} {ending}; {replacement}the others continue"
    if residual:
      news += f"; the update that its codec kept is lost (RMS {residual:.3g})"
    self._supervisor.news.append(news)
    if not self.incarnations:
      last_peer = f"the last was peer {peer}"
      if ending == REJECTED:
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
    # Peers first drop the numbers of jobs that they have not begun: the
    # journals lack these numbers, so the new counter assigns them again.
    self._ask("use_counter", None)
    self._start_counter()
    self._ask("use_counter", supervisor.parties[COUNTER][0].host)

  def _complete_broadcast(self, lost_peer: int) -> None:
    """Forwards the last messages of a lost peer, so that all its receivers mix
    the same messages. A message that no receiver has is not forwarded."""
    # In pairs a message has one receiver.
    if self.gossip.order == gossip.PAIRS:
      return
    topology = self.gossip.topology
    # Peer -> numbers of the messages that it has received from the lost peer.
    received_numbers = self._ask("numbers_received_from", lost_peer)
    for number in sorted(set().union(*received_numbers.values())):
      links = topology.links[number % topology.period]
      owners, lacking_peers = [], []
      for peer, numbers in received_numbers.items():
        if number in numbers:
          owners.append(peer)
        elif links[peer, lost_peer]:
          lacking_peers.append(peer)
      answers = self._ask("find_message", lost_peer, number, among=owners)
      frames = [frame for frame in answers.values() if frame is not None]
      if frames and lacking_peers:
        self._ask("store_message", frames[0], among=lacking_peers)

  # Pause and checkpoints.

  def pause(self, seconds: float = math.inf) -> bool:
    """Makes all peers end the same round (without rounds: their open jobs),
    and waits until they have. Raises as `check`.

    Args:
      seconds: the time to wait at most.

    Returns:
      Whether all peers are quiet.
    """
    self._is_paused = True
    limits = self._ask("halt")
    # A peer that has begun a later round needs the messages of its neighbours
    # to end that round. So all peers continue to the latest round that any peer
    # has begun.
    if not self._counts_jobs and limits:
      self._ask("set_limit", max(limits.values()))
    return self.wait_for_rest(self._are_at_rest, seconds)

  def resume(self) -> None:
    """Ends a pause."""
    self._is_paused = False
    self._ask("set_limit", self._limit)

  def _lenders(self, peer: int) -> list[int]:
    """Returns the live peers that lend to a newcomer: the peers with links in
    both directions if there are any, else the senders of the newcomer."""
    union = self.gossip.topology.union  # bool[receiver, sender], of all rounds
    senders = [sender for sender in self.incarnations if union[peer, sender]]
    return [sender for sender in senders if union[sender, peer]] or senders

  def _admit(self, peer: int) -> None:
    """Makes a newcomer join, if a live neighbour can lend it the first
    parameters."""
    if not self._lenders(peer):
      return
    # All peers end the same round. So they agree on the newcomer's first round,
    # and on the first message that each neighbour takes from the newcomer.
    self.pause()
    # The newcomer or its lenders may have exited during the pause.
    if peer in self._starting_incarnations and self._lenders(peer):
      self._introduce(peer)
      self._supervisor.news.append(f"peer {peer} joins again")
    self.resume()

  def _introduce(self, peer: int) -> None:
    """Connects a newcomer with the peers alive, some of which lend to it."""
    parties, lenders = self._supervisor.parties, self._lenders(peer)
    party, others = parties[PEER][peer], self._neighbours()
    incarnation = self.incarnations[peer] = self._starting_incarnations.pop(
      peer
    )
    party.run = party.host.call("run")
    if self._counts_jobs:  # the counter may have been replaced meanwhile
      self._ask("use_counter", parties[COUNTER][0].host, among=[peer])
    # Call `join` first: before it, the newcomer drops all frames, loans too.
    self._ask("join", others, self.rounds, lenders, among=[peer])
    newcomer = Neighbour(incarnation, party.host)
    self._ask("add_newcomer", peer, newcomer, True, among=lenders)
    other_peers = [other for other in others if other not in lenders]
    self._ask("add_newcomer", peer, newcomer, False, among=other_peers)

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

    self.wait_for_rest(take_images)
    return images

  def views(self, rounds: int | None = None) -> dict[int, View]:
    """Returns the parameters of peers: the present ones of all peers, or those
    that peers stored after `rounds` rounds."""
    if rounds is None:
      return self._ask("view")
    views = self._ask("take_kept_view", rounds)
    return {peer: view for peer, view in views.items() if view is not None}


def _make_counter(
  messages: int, taken_numbers: Sequence[int], inside: Inside
) -> JobCounter:
  """Returns the counter of a run; the host calls this."""
  del inside
  return JobCounter(messages, taken_numbers)
