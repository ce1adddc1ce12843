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
from asgd.live.gossip.peer_rows import PeerSpec, View
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
INVARIANTS = (
  *(JOURNALS, REPLAY, RECORDS, ONCE, ROUNDS, ADOPTS, BROADCAST, EXCHANGE),
  *(COPIES, SHARED, ROWS, ENDS, NO_ERROR),
)
# Tolerance between peers that add the same updates in different orders.
_CLOSE = 1e-5


class Incarnation(NamedTuple):
  """The journal rows of one incarnation of a peer."""

  peer: int
  number: int  # 0: the first incarnation of the peer
  rows: list[Event]  # from JOIN, which incarnation 0 lacks, to LEAVE
  exited_early: bool  # the incarnation exited before the end of the run
  received: list[int]  # jobs of its RECEIVE rows

  def rows_with(self, action: int) -> list[Event]:
    """Returns the rows that have an action."""
    return [row for row in self.rows if row.action == action]


def _incarnations(peer: int, rows: list[Event]) -> Iterator[Incarnation]:
  """Yields the incarnations of a peer, from its journal."""
  groups: list[list[Event]] = [[]]
  for row in rows:
    groups[-1].append(row)
    if row.action == base.LEAVE:
      groups.append([])
  for number, group in enumerate(groups):
    received = [row.job for row in group if row.action == base.RECEIVE]
    if group:  # the last group is empty if the last row is LEAVE
      exited_early = number < len(groups) - 1
      yield Incarnation(peer, number, group, exited_early, received)


class _Checks:
  """The checks of one run; each raises Broken."""

  def __init__(
    self, run: Path, spec: PeerSpec, n_messages: int, views: Mapping[int, View]
  ):
    self._run, self._spec, self._views = run, spec, views
    self._n_messages, self._gossip = n_messages, spec.gossip
    self._journals = [
      read_journal(journal_path(run, peer))
      for peer in range(spec.gossip.topology.workers)
    ]
    self._incarnations = [
      incarnation
      for peer, rows in enumerate(self._journals)
      for incarnation in _incarnations(peer, rows)
    ]

  def replay(self) -> tuple[simulator.Peers, simulator.PeerRecords]:
    """Replays the trace; returns the replayed peers and records. Raises Broken
    if a live peer's parameters differ from the replayed ones."""
    with breaks_on_value_error(JOURNALS):
      trace = files.read_trace(self._run, len(self._journals))
    peers = simulator.Peers(
      *(self._gossip, self._spec.peer, self._spec.worker, self._spec.params),
      trace,
      batch=self._spec.batch,
      root=self._spec.root,
    )
    with breaks_on_value_error(REPLAY):
      records = peers.run(len(trace.time))
    for peer, view in self._views.items():
      state = peers.states[peer]
      weight = float(self._spec.peer.weight(state))
      expected = View(state.server.params, weight, int(state.server.version))
      is_equal = peer in peers.present and bits(view) == bits(expected)
      require(is_equal, REPLAY, "peer", peer, "is", view, "and not", expected)
    return peers, records

  def check_records(self, replayed: simulator.PeerRecords) -> None:
    """Checks that the written records equal the replayed ones. One record of
    each failed incarnation may be missing: the peer may have exited before it
    wrote the record."""
    for peer, events in enumerate(self._journals):
      written = files.read_peer_records(self._run, peer)
      path = records_path(self._run, peer)
      n_left = files.count_incarnations(events)
      with breaks_on_value_error(RECORDS):
        check_count(path, len(written.loss), events, n_left)
      # A job may be done twice, by two incarnations at two times.
      received_keys = [
        (event.job, event.time)
        for event in events
        if event.action == base.RECEIVE
      ]
      record_keys = zip(
        written.job.tolist(), written.time.tolist(), strict=True
      )
      positions = [
        received_keys.index(key) for key in record_keys if key in received_keys
      ]
      rows = np.flatnonzero(replayed.worker == peer)[positions]
      # The merge of the journals into one trace may change times.
      for name in set(written._fields) - {"time"}:
        column, expected = getattr(written, name), getattr(replayed, name)[rows]
        is_equal = column.tobytes() == expected.tobytes()
        text = "peer", peer, name, column, "and not", expected
        require(is_equal, RECORDS, *text)

  def check_jobs(self) -> None:
    """Checks which jobs the peers received. Without rounds, every job was
    received exactly once. In rounds, the jobs that an incarnation received have
    no gap."""
    if self._gossip.order != gossip.ROUNDS:
      jobs = sorted(
        job
        for incarnation in self._incarnations
        for job in incarnation.received
      )
      require(jobs == list(range(self._n_messages)), ONCE, jobs)
      return
    # In round k, peer i of n does job k n + i.
    n_peers = len(self._journals)
    for peer, number, _, exited_early, received in self._incarnations:
      begin = received[0] if received and number else peer
      end = received[-1] if received else begin - n_peers
      # A live peer ends the last round, unless it joined after that round.
      is_live = peer in self._views and not exited_early
      if is_live and (received or not number):
        end = self._n_messages - n_peers + peer
      has_ended = (
        received == list(range(begin, end + 1, n_peers))
        and begin % n_peers == peer
      )
      require(has_ended, ROUNDS, "peer", peer, "received", received)

  def check_first_rows(self) -> None:
    """Checks that each incarnation after a peer's first begins with JOIN, and
    that ADOPT follows if the incarnation started a job."""
    for incarnation in self._incarnations:
      actions = [row.action for row in incarnation.rows]
      adopts_first = actions[0] == base.JOIN and (
        base.SEND not in actions or actions[1] == base.ADOPT
      )
      names = [base.ACTIONS[action] for action in actions]
      is_allowed = adopts_first or not incarnation.number
      require(is_allowed, ADOPTS, "peer", incarnation.peer, names)

  def check_broadcasts(self) -> None:
    """In rounds: checks which peers took a message. If its sender is alive at
    the end, all neighbours that are alive at the end took the message. If the
    sender exited, all of these neighbours took the message, or none of them."""
    for sender in self._incarnations:
      for put in sender.rows_with(base.PUT):
        # Receiver -> whether it took the message. The `job` of a TAKE row is
        # the sender, and its `seq` is that of the PUT row.
        took_message = {
          receiver.peer: any(
            (take.job, take.seq) == put.key
            for take in receiver.rows_with(base.TAKE)
          )
          for receiver in self._incarnations
          if self._is_for(put, receiver)
        }
        answers = set(took_message.values())
        is_missing = answers == {False} and not sender.exited_early
        require(
          len(answers) < 2 and not is_missing, BROADCAST, put, took_message
        )

  def _is_for(self, put: Event, receiver: Incarnation) -> bool:
    """Whether an incarnation, alive at the end, had to mix a sent message."""
    links, message = self._gossip.topology.links, put.job
    first_message = 0  # number of the first message that the incarnation takes
    if receiver.number and receiver.received:
      round_index = receiver.received[0] // len(self._journals)
      # Message m is put in round m * every.
      first_message = -(-round_index // self._gossip.every)
    return (
      not receiver.exited_early
      and receiver.peer != put.worker
      and bool(links[message % len(links), receiver.peer, put.worker])
      and message >= first_message
      and any(mix.job == message for mix in receiver.rows_with(base.MIX))
    )

  def check_exchanges(self) -> None:
    """In pairs: checks that a TAKE and a MIX row follow each PUT row, and that
    two peers took each other's messages equally often. Each exit of an
    incarnation may leave one PUT row of a peer without TAKE and MIX."""
    alive = [
      incarnation
      for incarnation in self._incarnations
      if not incarnation.exited_early
    ]
    exits = len(self._incarnations) - len(alive)
    for incarnation in alive:
      actions = [row.action for row in incarnation.rows]
      n_unanswered = sum(
        action == base.PUT
        and actions[i + 1 : i + 3] != [base.TAKE, base.MIX]
        for i, action in enumerate(actions)
      )
      require(
        n_unanswered <= exits,
        *(EXCHANGE, "peer", incarnation.peer, "put", n_unanswered),
        *("messages that were never answered; allowed:", exits),
      )
    # An exit may cut an exchange short, so only peers without exits count.
    never_replaced = [
      incarnation for incarnation in alive if not incarnation.number
    ]
    for pair in itertools.combinations(never_replaced, 2):
      takes = [
        sum(take.job == sender.peer for take in receiver.rows_with(base.TAKE))
        for receiver, sender in (pair, pair[::-1])
      ]
      peers = [incarnation.peer for incarnation in pair]
      require(takes[0] == takes[1], EXCHANGE, "peers", *peers, "took", takes)

  def check_copies(self, peers: simulator.Peers) -> None:
    """With `choco`: checks each peer's copy of its neighbour's public
    parameters."""
    topology, states = self._gossip.topology, peers.states
    for peer, other in itertools.permutations(self._views, 2):
      rule_state = states[peer].rule_state
      if isinstance(rule_state, Choco) and topology.union[peer, other]:
        public = states[other].rule_state.public
        slot = topology.slot(peer, other)
        copy = jax.tree.map(lambda x, i=slot: x[i], rule_state.copies)
        text = "peer", peer, "has", copy, "of peer", other, "which has"
        require(_are_close(copy, public), COPIES, *text, public)

  def check_shared(self, peers: simulator.Peers) -> None:
    """With `share`: checks that all peers have the same parameters."""
    states = [peers.states[peer] for peer in self._views]
    all_params = [
      state.server.params
      for state in states
      if isinstance(state.rule_state, Share)
    ]
    are_equal = all(_are_close(params, all_params[0]) for params in all_params)
    require(are_equal, SHARED, all_params)


def _are_close(params: base.Params, other: base.Params) -> bool:
  """Returns whether two trees of parameters are equal up to rounding."""
  leaves_close = jax.tree.map(
    lambda x, y: np.allclose(x, y, atol=_CLOSE), params, other
  )
  return all(jax.tree.leaves(leaves_close))


def check(
  run: Path, spec: PeerSpec, n_messages: int, views: Mapping[int, View]
) -> None:
  """Checks the files of a finished run.

  Args:
    run: folder of the run.
    spec: the rules, loss, data and key with which the peers ran.
    n_messages: the number of jobs of all peers together.
    views: peer -> its parameters, for the peers that were alive at the end.

  Raises:
    Broken: an invariant is violated.
  """
  checks = _Checks(run, spec, n_messages, views)
  peers, records = checks.replay()
  checks.check_records(records)
  checks.check_jobs()
  checks.check_first_rows()
  if spec.gossip.order == gossip.PAIRS:
    checks.check_exchanges()
  elif spec.gossip.order == gossip.ROUNDS:
    checks.check_broadcasts()
  checks.check_copies(peers)
  checks.check_shared(peers)
