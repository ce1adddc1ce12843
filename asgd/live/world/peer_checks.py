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
from asgd.live.world.broken import bits, breaks_on_value_error, require
from asgd.orders.trace import Event

JOURNALS = "journals fit together"
REPLAY = "the replay has the same bits"
RECORDS = "records agree with the replay"
ONCE = "every job of pairs or arrivals is received once"
ROUNDS = "each live peer ended all rounds"
ADOPTS = "a peer that joins adopts parameters first"
BROADCAST = "a message reaches all neighbours or none"
EXCHANGE = "both peers take part in an exchange"
COPIES = "copies equal the neighbour's public parameters"
SHARED = "peers that share all updates are equal"
ROWS = "written rows of a journal do not change"
ENDS = "it ends in bounded time"
NO_ERROR = "no error without a reason"
NAMES = (
  *(JOURNALS, REPLAY, RECORDS, ONCE, ROUNDS, ADOPTS, BROADCAST, EXCHANGE),
  *(COPIES, SHARED, ROWS, ENDS, NO_ERROR),
)
# Tolerance between peers that add the same updates in different orders.
_CLOSE = 1e-5


class Incarnation(NamedTuple):
  """The journal rows of one incarnation of a peer."""

  peer: int
  number: int  # 0: the first incarnation of the peer
  rows: list[Event]  # from JOIN, which number 0 lacks, to LEAVE
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
  for number, part in enumerate(parts):
    received = [row.job for row in part if row.action == base.RECEIVE]
    if part:  # the last part is empty if the last row is LEAVE
      left = number < len(parts) - 1
      yield Incarnation(peer, number, part, left, received)


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
      incarnation
      for peer, rows in enumerate(self._journals)
      for incarnation in _incarnations(peer, rows)
    ]

  def replay(self) -> tuple[simulator.Peers, simulator.PeerRecords]:
    """Replays the trace; returns its peers and records. Raises Broken if a live
    peer's parameters differ from the replay's."""
    with breaks_on_value_error(JOURNALS):
      trace = files.read_trace(self._run, len(self._journals))
    peers = simulator.Peers(
      *(self._gossip, self._duty.peer, self._duty.worker, self._duty.params),
      trace,
      batch=self._duty.batch,
      root=self._duty.root,
    )
    with breaks_on_value_error(REPLAY):
      records = peers.run(len(trace.time))
    for peer, view in self._views.items():
      state = peers.states[peer]
      weight = float(self._duty.peer.weight(state))
      expected = View(state.server.params, weight, int(state.server.version))
      is_equal = peer in peers.present and bits(view) == bits(expected)
      require(is_equal, REPLAY, "peer", peer, "is", view, "and not", expected)
    return peers, records

  def records(self, replayed: simulator.PeerRecords) -> None:
    """Compares records with the replay's. One record of each failed incarnation
    may be missing: the peer exited before it wrote the record."""
    for peer, events in enumerate(self._journals):
      written = files.read_peer_records(self._run, peer)
      path = records_path(self._run, peer)
      incarnations = files.count_incarnations(events)
      with breaks_on_value_error(RECORDS):
        check_count(path, len(written.loss), events, incarnations)
      # A job may be done twice, by two incarnations at two times.
      ends = [(e.job, e.time) for e in events if e.action == base.RECEIVE]
      keys = zip(written.job.tolist(), written.time.tolist(), strict=True)
      positions = [ends.index(key) for key in keys if key in ends]
      rows = np.flatnonzero(replayed.worker == peer)[positions]
      # The merge of the journals into one trace may change times.
      for name in set(written._fields) - {"time"}:
        column, expected = getattr(written, name), getattr(replayed, name)[rows]
        is_equal = column.tobytes() == expected.tobytes()
        text = "peer", peer, name, column, "and not", expected
        require(is_equal, RECORDS, *text)

  def jobs(self) -> None:
    """Checks that the peers received all jobs: without rounds once each, in
    rounds each incarnation without gaps."""
    if self._gossip.order != gossip.ROUNDS:
      jobs = sorted(
        job
        for incarnation in self._incarnations
        for job in incarnation.received
      )
      require(jobs == list(range(self._messages)), ONCE, jobs)
      return
    # In round k, peer i of n does job k n + i.
    n = len(self._journals)
    for peer, number, _, left, received in self._incarnations:
      begin = received[0] if received and number else peer
      end = received[-1] if received else begin - n
      # A peer that is alive ends the last round, unless it joined after it.
      if peer in self._views and not left and (received or not number):
        end = self._messages - n + peer
      has_ended = (
        received == list(range(begin, end + 1, n)) and begin % n == peer
      )
      require(has_ended, ROUNDS, "peer", peer, "received", received)

  def newcomers(self) -> None:
    """Checks that later incarnations begin with JOIN and then ADOPT, unless
    they started no job."""
    for incarnation in self._incarnations:
      actions = [row.action for row in incarnation.rows]
      adopts_first = actions[0] == base.JOIN and (
        base.SEND not in actions or actions[1] == base.ADOPT
      )
      names = [base.ACTIONS[action] for action in actions]
      is_allowed = adopts_first or not incarnation.number
      require(is_allowed, ADOPTS, "peer", incarnation.peer, names)

  def messages(self) -> None:
    """In rounds: checks that the peers alive at the end took the same messages
    of a peer that exited, and all messages of a peer that did not."""
    for sender in self._incarnations:
      for put in sender.of(base.PUT):
        # Receiver -> whether it took the message. A TAKE row has the sender as
        # its job, and the sender's seq.
        taken = {
          receiver.peer: any(
            (take.job, take.seq) == put.key for take in receiver.of(base.TAKE)
          )
          for receiver in self._incarnations
          if self._is_for(put, receiver)
        }
        answers = set(taken.values())
        missed = answers == {False} and not sender.left
        require(len(answers) < 2 and not missed, BROADCAST, put, taken)

  def _is_for(self, put: Event, receiver: Incarnation) -> bool:
    """Whether an incarnation, alive at the end, had to mix a sent message."""
    links, message = self._gossip.topology.links, put.job
    first_message = 0  # number of the first one that the incarnation takes
    if receiver.number and receiver.received:
      round_index = receiver.received[0] // len(self._journals)
      # Message m is put in round m every.
      first_message = -(-round_index // self._gossip.every)
    return (
      not receiver.left
      and receiver.peer != put.worker
      and bool(links[message % len(links), receiver.peer, put.worker])
      and message >= first_message
      and any(mix.job == message for mix in receiver.of(base.MIX))
    )

  def exchanges(self) -> None:
    """In pairs: checks that a peer that puts takes and mixes at once, and that
    two peers took each other's messages equally often. A put alone is allowed
    once for each peer that exited."""
    alive = [
      incarnation for incarnation in self._incarnations if not incarnation.left
    ]
    exits = len(self._incarnations) - len(alive)
    for incarnation in alive:
      actions = [row.action for row in incarnation.rows]
      alone = sum(
        action == base.PUT
        and actions[i + 1 : i + 3] != [base.TAKE, base.MIX]
        for i, action in enumerate(actions)
      )
      text = "put without an answer; times:"
      require(alone <= exits, EXCHANGE, "peer", incarnation.peer, text, alone)
    # An exit of one of the two may cut an exchange short.
    never_replaced = [
      incarnation for incarnation in alive if not incarnation.number
    ]
    for pair in itertools.combinations(never_replaced, 2):
      takes = [
        sum(take.job == sender.peer for take in receiver.of(base.TAKE))
        for receiver, sender in (pair, pair[::-1])
      ]
      peers = [incarnation.peer for incarnation in pair]
      require(takes[0] == takes[1], EXCHANGE, "peers", *peers, "took", takes)

  def copies(self, peers: simulator.Peers) -> None:
    """With `choco`: checks each peer's copy of its neighbour's public
    parameters."""
    topology, states = self._gossip.topology, peers.states
    for peer, other in itertools.permutations(self._views, 2):
      rule_state = states[peer].own
      if isinstance(rule_state, Choco) and topology.union[peer, other]:
        public = states[other].own.public
        slot = topology.slot(peer, other)
        copy = jax.tree.map(lambda x, i=slot: x[i], rule_state.copies)
        text = "peer", peer, "has", copy, "of peer", other, "which has"
        require(_are_close(copy, public), COPIES, *text, public)

  def shared(self, peers: simulator.Peers) -> None:
    """With `share`: checks that all peers have the same parameters."""
    states = [peers.states[peer] for peer in self._views]
    all_params = [s.server.params for s in states if isinstance(s.own, Share)]
    are_equal = all(_are_close(params, all_params[0]) for params in all_params)
    require(are_equal, SHARED, all_params)


def _are_close(params: base.Params, other: base.Params) -> bool:
  """Returns whether two trees of parameters are equal but for rounding."""
  leaves_close = jax.tree.map(
    lambda x, y: np.allclose(x, y, atol=_CLOSE), params, other
  )
  return all(jax.tree.leaves(leaves_close))


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
  elif duty.gossip.order == gossip.ROUNDS:
    checks.messages()
  checks.copies(peers)
  checks.shared(peers)
