"""Invariants of a finished run of live peers, checked from its files."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from asgd import base, gossip, simulator
from asgd.gossip.rules import Choco, Share
from asgd.live.gossip import files
from asgd.live.gossip.peer_rows import PeerDuty, View
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import check_count, records_path
from asgd.live.world.broken import bits, refused, require
from asgd.orders.trace import Event

JOURNALS = "journals fit together"
REPLAY = "the replay has the same bits"
RECORDS = "records agree with the replay"
ONCE = "every job of pairs is received once"
ROUNDS = "each live peer ended all rounds"
ADOPTS = "a peer that joins adopts parameters first"
ALL = "a message reaches all neighbours or none"
TWO = "both peers take part in an exchange"
COPIES = "copies equal the neighbour's public parameters"
SAME = "peers that share all updates are equal"
ROWS = "written rows of a journal do not change"
ENDS = "it ends in bounded time"
NO_ERROR = "no error without a reason"
NAMES = (
  *(JOURNALS, REPLAY, RECORDS, ONCE, ROUNDS, ADOPTS, ALL, TWO, COPIES, SAME),
  *(ROWS, ENDS, NO_ERROR),
)
# Tolerance between peers that add the same updates in different orders.
_CLOSE = 1e-5


class Incarnation(NamedTuple):
  """The journal rows of one incarnation of a peer."""

  peer: int
  index: int  # 0: the first incarnation of the peer
  rows: list[Event]  # from JOIN, which index 0 lacks, to LEAVE
  left: bool  # the incarnation exited before the end of the run
  received: list[int]  # its jobs

  def of(self, action: int) -> list[Event]:
    """Returns the rows that have an action."""
    return [row for row in self.rows if row.action == action]


def _incarnations(peer: int, rows: list[Event]) -> Iterator[Incarnation]:
  """Yields the incarnations of a peer, from its journal."""
  parts: list[list[Event]] = [[]]
  for row in rows:
    parts[-1].append(row)
    if row.action == base.LEAVE:
      parts.append([])
  for index, part in enumerate(parts):
    received = [row.job for row in part if row.action == base.RECEIVE]
    if part:
      left = index < len(parts) - 1
      yield Incarnation(peer, index, part, left, received)


class _Checks:
  """The checks of one run; each raises Broken."""

  def __init__(
    self, run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
  ):
    self._run, self._duty, self._views = run, duty, views
    self._messages, self._gossip = messages, duty.gossip
    self._journals = [
      read_journal(journal_path(run, peer))
      for peer in range(duty.gossip.topology.workers)
    ]
    self._incarnations = [
      each
      for peer, rows in enumerate(self._journals)
      for each in _incarnations(peer, rows)
    ]

  def replay(self) -> tuple[simulator.Peers, simulator.PeerRecords]:
    """Replays the trace; returns its peers and records. Raises Broken if a live
    peer's parameters differ from the replay's."""
    with refused(JOURNALS):
      trace = files.read_trace(self._run, len(self._journals))
    peers = simulator.Peers(
      *(self._gossip, self._duty.peer, self._duty.worker, self._duty.params),
      trace,
      batch=self._duty.batch,
      root=self._duty.root,
    )
    with refused(REPLAY):
      records = peers.run(len(trace.time))
    for peer, view in self._views.items():
      state = peers.states[peer]
      weight = float(self._duty.peer.weight(state))
      expected = View(state.server.params, weight, int(state.server.version))
      same = peer in peers.present and bits(view) == bits(expected)
      require(same, REPLAY, "peer", peer, "is", view, "and not", expected)
    return peers, records

  def records(self, replayed: simulator.PeerRecords) -> None:
    """Compares records with the replay's. One record of each failed incarnation
    may be missing: the peer exited before it wrote the record."""
    for peer, events in enumerate(self._journals):
      written = files.read_peer_records(self._run, peer)
      path = records_path(self._run, peer)
      incarnations = files.count_incarnations(events)
      with refused(RECORDS):
        check_count(path, len(written.loss), events, incarnations)
      # A job may be done twice, by two incarnations at two times.
      ends = [(e.job, e.time) for e in events if e.action == base.RECEIVE]
      keys = zip(written.job.tolist(), written.time.tolist(), strict=True)
      jobs_written = [ends.index(key) for key in keys if key in ends]
      rows = np.flatnonzero(replayed.worker == peer)[jobs_written]
      # The merge of the journals into one trace may change times.
      for name in set(written._fields) - {"time"}:
        column, expected = getattr(written, name), getattr(replayed, name)[rows]
        same = column.tobytes() == expected.tobytes()
        require(same, RECORDS, "peer", peer, name, column, "and not", expected)

  def jobs(self) -> None:
    """Checks that the peers received all jobs: in pairs once each, in rounds
    each incarnation without gaps."""
    if self._gossip.order == gossip.PAIRS:
      jobs = sorted(job for each in self._incarnations for job in each.received)
      require(jobs == list(range(self._messages)), ONCE, jobs)
      return
    n = len(self._journals)
    for peer, index, _, left, received in self._incarnations:
      begin = received[0] if received and index else peer
      end = received[-1] if received else begin - n
      # A peer that is alive ends the last round, unless it joined after it.
      if peer in self._views and not left and (received or not index):
        end = self._messages - n + peer
      ended = received == list(range(begin, end + 1, n)) and begin % n == peer
      require(ended, ROUNDS, "peer", peer, "received", received)

  def newcomers(self) -> None:
    """Checks that later incarnations begin with JOIN and then ADOPT, unless
    they started no job."""
    for each in self._incarnations:
      actions = [row.action for row in each.rows]
      begins = actions[0] == base.JOIN and (
        base.SEND not in actions or actions[1] == base.ADOPT
      )
      names = [base.ACTIONS[action] for action in actions]
      require(begins or not each.index, ADOPTS, "peer", each.peer, names)

  def messages(self) -> None:
    """In rounds: checks that the peers alive at the end took the same messages
    of a peer that exited, and all messages of a peer that did not."""
    for sender in self._incarnations:
      for put in sender.of(base.PUT):
        taken = {
          each.peer: any(
            (take.job, take.seq) == put.key for take in each.of(base.TAKE)
          )
          for each in self._incarnations
          if self._is_for(put, each)
        }
        answers = set(taken.values())
        missed = answers == {False} and not sender.left
        require(len(answers) < 2 and not missed, ALL, put, taken)

  def _is_for(self, put: Event, each: Incarnation) -> bool:
    """Whether an incarnation, alive at the end, had to mix a sent message."""
    links, mixing = self._gossip.topology.links, put.job
    first = 0  # index of the first mixing that the incarnation takes part in
    if each.index and each.received:
      round_index = each.received[0] // len(self._journals)
      first = -(-round_index // self._gossip.every)
    return (
      not each.left
      and each.peer != put.worker
      and bool(links[mixing % len(links), each.peer, put.worker])
      and mixing >= first
      and any(mix.job == mixing for mix in each.of(base.MIX))
    )

  def exchanges(self) -> None:
    """In pairs: checks that a peer that puts takes and mixes at once, and that
    two peers took each other's messages equally often. A put alone is allowed
    once for each peer that exited."""
    alive = [each for each in self._incarnations if not each.left]
    exits = len(self._incarnations) - len(alive)
    for each in alive:
      alone = sum(
        put.action == base.PUT
        and [row.action for row in each.rows[at + 1 : at + 3]]
        != [base.TAKE, base.MIX]
        for at, put in enumerate(each.rows)
      )
      text = "put without an answer; times:"
      require(alone <= exits, TWO, "peer", each.peer, text, alone)
    first = [each for each in alive if not each.index]
    for one, two in itertools.combinations(first, 2):
      takes = [
        sum(take.job == other.peer for take in each.of(base.TAKE))
        for each, other in ((one, two), (two, one))
      ]
      same = takes[0] == takes[1]
      require(same, TWO, "peers", one.peer, two.peer, "took", takes)

  def copies(self, peers: simulator.Peers) -> None:
    """With `choco`: checks each peer's copy of its neighbour's public
    parameters."""
    topology, states = self._gossip.topology, peers.states
    for peer, other in itertools.permutations(self._views, 2):
      own = states[peer].own
      if isinstance(own, Choco) and topology.union[peer, other]:
        public = states[other].own.public
        slot = topology.slot(peer, other)
        copy = {name: copies[slot] for name, copies in own.copies.items()}
        text = "peer", peer, "has", copy, "of peer", other, "which has"
        require(_close(copy, public), COPIES, *text, public)

  def shared(self, peers: simulator.Peers) -> None:
    """With `share`: checks that all peers have the same parameters."""
    states = [peers.states[peer] for peer in self._views]
    params = [s.server.params for s in states if isinstance(s.own, Share)]
    same = all(_close(each, params[0]) for each in params)
    require(same, SAME, params)


def _close(one: base.Params, two: base.Params) -> bool:
  """Returns whether two trees of parameters are equal but for rounding."""
  close = jax.tree.map(lambda x, y: np.allclose(x, y, atol=_CLOSE), one, two)
  return all(jax.tree.leaves(close))


def check(
  run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
) -> None:
  """Checks the files of a finished run.

  Args:
    run: folder of the run.
    duty: of the peers.
    messages: jobs of all peers together.
    views: of the peers that were alive at the end.

  Raises:
    Broken: an invariant is violated.
  """
  checks = _Checks(run, duty, messages, views)
  peers, records = checks.replay()
  checks.records(records)
  checks.jobs()
  checks.newcomers()
  if duty.gossip.order == gossip.PAIRS:
    checks.exchanges()
  else:
    checks.messages()
  checks.copies(peers)
  checks.shared(peers)
