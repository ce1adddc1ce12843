"""What must hold of a run of live peers that has ended, read from its files."""

import itertools
from collections.abc import Mapping
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
RECORDS = "records are those of the replay"
ONCE = "every job of pairs is received once"
ROUNDS = "who is alive ended all rounds"
ADOPTS = "a newcomer adopts before it works"
ALL = "a message comes to all or to none"
TWO = "an exchange has two sides"
COPIES = "copies are what was told"
SAME = "who shares all has the same"
ROWS = "rows stay as they were written"
ENDS = "it ends in bounded time"
NO_ERROR = "no error without a reason"
NAMES = (
  *(JOURNALS, REPLAY, RECORDS, ONCE, ROUNDS, ADOPTS, ALL, TWO, COPIES, SAME),
  *(ROWS, ENDS, NO_ERROR),
)
_CLOSE = 1e-5  # between peers that share all, whose sums have other orders


class Incarnation(NamedTuple):
  """What one incarnation of a peer did."""

  peer: int
  life: int  # incarnations before it
  rows: list[Event]  # from its JOIN, if it has one, to its LEAVE
  left: bool  # it exited before the end of the run
  received: list[int]  # numbers of jobs

  def of(self, action: int) -> list[Event]:
    """Returns its rows of an action."""
    return [row for row in self.rows if row.action == action]


def _incarnations(peer, rows):
  """Yields those of a journal."""
  parts: list[list[Event]] = [[]]
  for row in rows:
    parts[-1].append(row)
    if row.action == base.LEAVE:
      parts.append([])
  for life, part in enumerate(parts):
    received = [row.job for row in part if row.action == base.RECEIVE]
    if part:
      left = life < len(parts) - 1
      yield Incarnation(peer, life, part, left, received)


class _Checks:
  """The checks of one run; each raises Broken."""

  def __init__(
    self, run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
  ):
    self._run, self._duty, self._views = run, duty, views
    self._messages, self._how = messages, duty.gossip
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
    """Returns what the trace says that peers and records are."""
    with refused(JOURNALS):
      trace = files.read_trace(self._run, len(self._journals))
    peers = simulator.Peers(
      *(self._how, self._duty.peer, self._duty.worker, self._duty.params),
      trace,
      batch=self._duty.batch,
      root=self._duty.root,
    )
    with refused(REPLAY):
      records = peers.run(len(trace.time))
    for peer, view in self._views.items():
      state = peers.states[peer]
      weight = float(self._duty.peer.weight(state))
      again = View(state.server.params, weight, int(state.server.version))
      same = peer in peers.present and bits(view) == bits(again)
      require(same, REPLAY, "peer", peer, "is", view, "and not", again)
    return peers, records

  def records(self, replayed: simulator.PeerRecords) -> None:
    """A record that a peer did not live to write may be missing."""
    for peer, events in enumerate(self._journals):
      there = files.read_peer_records(self._run, peer)
      path, lives = records_path(self._run, peer), files.lives_of(events)
      with refused(RECORDS):
        check_count(path, len(there.loss), events, lives)
      # A job may be done twice, before and after its peer has exited.
      ends = [(e.job, e.time) for e in events if e.action == base.RECEIVE]
      mine = [
        ends.index(key)
        for key in zip(there.job.tolist(), there.time.tolist(), strict=True)
        if key in ends
      ]
      which = np.flatnonzero(replayed.worker == peer)[mine]
      for name in set(there._fields) - {"time"}:  # which merging may change
        column, again = getattr(there, name), getattr(replayed, name)[which]
        same = column.tobytes() == again.tobytes()
        require(same, RECORDS, "peer", peer, name, column, "and not", again)

  def jobs(self) -> None:
    """Which jobs were received."""
    if self._how.order == gossip.PAIRS:
      jobs = sorted(job for each in self._incarnations for job in each.received)
      require(jobs == list(range(self._messages)), ONCE, jobs)
      return
    n = len(self._journals)
    for peer, life, _, left, mine in self._incarnations:
      begin = mine[0] if mine and life else peer
      end = mine[-1] if mine else begin - n
      if peer in self._views and not left and (mine or not life):
        end = self._messages - n + peer  # one that joined last has none
      ended = mine == list(range(begin, end + 1, n)) and begin % n == peer
      require(ended, ROUNDS, "peer", peer, "received", mine)

  def newcomers(self) -> None:
    """What incarnations but the first begin with."""
    for each in self._incarnations:
      actions = [row.action for row in each.rows]
      begins = actions[0] == base.JOIN and (
        base.SEND not in actions or actions[1] == base.ADOPT
      )
      names = [base.ACTIONS[action] for action in actions]
      require(begins or not each.life, ADOPTS, "peer", each.peer, names)

  def messages(self) -> None:
    """In rounds: who is alive at the end takes the same messages of a peer that
    exited, and all of one that did not."""
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
        none = answers == {False} and not sender.left
        require(len(answers) < 2 and not none, ALL, put, taken)

  def _is_for(self, put: Event, each: Incarnation) -> bool:
    """Whether an incarnation that is alive at the end mixes what was put."""
    links, number = self._how.topology.links, put.job
    first = 0
    if each.life and each.received:  # the first message that it puts
      first = -(-(each.received[0] // len(self._journals)) // self._how.every)
    return (
      not each.left
      and each.peer != put.worker
      and bool(links[number % len(links), each.peer, put.worker])
      and number >= first
      and any(mix.job == number for mix in each.of(base.MIX))
    )

  def exchanges(self) -> None:
    """In pairs: who puts takes and mixes at once, unless the other exited."""
    alive = [each for each in self._incarnations if not each.left]
    exits = len(self._incarnations) - len(alive)
    for each in alive:
      alone = sum(
        put.action == base.PUT
        and [row.action for row in each.rows[at + 1 : at + 3]]
        != [base.TAKE, base.MIX]
        for at, put in enumerate(each.rows)
      )
      text = "put for nobody so many times:"
      require(alone <= exits, TWO, "peer", each.peer, text, alone)
    first = [each for each in alive if not each.life]
    for one, two in itertools.combinations(first, 2):
      takes = [
        sum(take.job == other.peer for take in each.of(base.TAKE))
        for each, other in ((one, two), (two, one))
      ]
      same = takes[0] == takes[1]
      require(same, TWO, "peers", one.peer, two.peer, "took", takes)

  def copies(self, peers: simulator.Peers) -> None:
    """With `choco`, what neighbours have of each other."""
    topology, states = self._how.topology, peers.states
    for peer, other in itertools.permutations(self._views, 2):
      own, told = states[peer].own, states[other].own
      if isinstance(own, Choco) and topology.union[peer, other]:
        slot = topology.slot(peer, other)
        copy = {name: copies[slot] for name, copies in own.copies.items()}
        text = "peer", peer, "has", copy, "of peer", other, "which told"
        require(_close(copy, told.public), COPIES, *text, told.public)

  def shared(self, peers: simulator.Peers) -> None:
    """With `share`, the parameters of all."""
    states = [peers.states[peer] for peer in self._views]
    params = [s.server.params for s in states if isinstance(s.own, Share)]
    same = all(_close(each, params[0]) for each in params)
    require(same, SAME, params)


def _close(one: base.Params, two: base.Params) -> bool:
  close = jax.tree.map(lambda x, y: np.allclose(x, y, atol=_CLOSE), one, two)
  return all(jax.tree.leaves(close))


def check(
  run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
) -> None:
  """Checks the files of a run in which peers did so many messages; the views
  are of those that were alive at the end. Raises Broken."""
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
