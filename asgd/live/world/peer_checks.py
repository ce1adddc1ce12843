"""What must hold of a run of live peers that has ended, read from its files."""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asgd import base, gossip, simulator
from asgd.gossip.rules import Choco, Share
from asgd.live.gossip import files
from asgd.live.gossip.peer_rows import PeerDuty, View
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import check_count, records_path
from asgd.live.world.storage import Broken
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
  """Rows of one incarnation of a peer, from its JOIN to its LEAVE."""

  peer: int
  life: int
  rows: list[Event]
  left: bool  # it exited before the end of the run

  @property
  def received(self) -> list[int]:
    """Numbers of the jobs that it received."""
    return [row.job for row in self.rows if row.action == base.RECEIVE]


def incarnations(peer: int, rows: Sequence[Event]) -> list[Incarnation]:
  """Splits the rows of a journal."""
  parts: list[list[Event]] = [[]]
  for row in rows:
    parts[-1].append(row)
    if row.action == base.LEAVE:
      parts.append([])
  last = len(parts) - 1
  return [
    Incarnation(peer, life, part, life < last)
    for life, part in enumerate(parts)
    if part
  ]


class _Checks:
  """The checks, in turn; each raises Broken."""

  def __init__(
    self, run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
  ):
    self._run, self._duty, self._views = run, duty, views
    self._messages, self._how = messages, duty.gossip
    self._peers = range(duty.gossip.topology.workers)
    self._journals = [read_journal(journal_path(run, p)) for p in self._peers]
    self._lives = [
      each
      for peer, rows in enumerate(self._journals)
      for each in incarnations(peer, rows)
    ]

  @property
  def _pairs(self):
    return self._how.order == gossip.PAIRS

  def replay(self):
    try:
      trace = files.read_trace(self._run, len(self._peers))
    except ValueError as error:
      raise Broken(f"{JOURNALS}: {error}") from error
    peers = simulator.Peers(
      *(self._how, self._duty.peer, self._duty.worker, self._duty.params),
      trace,
      batch=self._duty.batch,
      root=self._duty.root,
    )
    try:
      records = peers.run(len(trace.time))
    except ValueError as error:
      raise Broken(f"{REPLAY}: {error}") from error
    if not self._views.keys() <= set(peers.present):
      raise Broken(f"{REPLAY}: {list(self._views)}, not {peers.present}")
    for peer, view in self._views.items():
      there = peers.states[peer].server
      for name, value in view.params.items():
        if np.asarray(value).tobytes() != np.asarray(
          there.params[name]
        ).tobytes():
          raise Broken(
            f"{REPLAY}: {name} of peer {peer} is {value}, not"
            f" {there.params[name]}"
          )
      if view.version != int(there.version):
        raise Broken(f"{REPLAY}: peer {peer} {view.version}, {there.version}")
    return peers, records

  def records(self, replayed: simulator.PeerRecords):
    """A record that a peer did not live to write may be missing."""
    for peer in self._peers:
      events = self._journals[peer]
      there = files.read_peer_records(self._run, peer)
      rows = [row for row in events if row.action == base.RECEIVE]
      try:
        lives = files.lives_of(events)
        path = records_path(self._run, peer)
        check_count(path, len(there.loss), events, lives)
      except ValueError as error:
        raise Broken(f"{RECORDS}: {error}") from error
      which = np.flatnonzero(replayed.worker == peer)
      # A job may be done twice, before and after its peer has died.
      at, found = 0, []
      for job, time in zip(there.job, there.time, strict=True):
        while (rows[at].job, rows[at].time) != (job, time):
          at += 1
          if at == len(rows):
            raise Broken(f"{RECORDS}: peer {peer} has one of job {job}")
        found.append(which[at])
      for name in set(there._fields) - {"time"}:
        mine, again = getattr(there, name), getattr(replayed, name)[found]
        if mine.tobytes() != again.tobytes():
          raise Broken(f"{RECORDS}: peer {peer} {name} {mine}, not {again}")

  def jobs(self):
    received = [job for each in self._lives for job in each.received]
    if self._pairs:
      if sorted(received) != list(range(self._messages)):
        raise Broken(f"{ONCE}: {sorted(received)}")
      return
    n = len(self._peers)
    for each in self._lives:
      mine = each.received
      begin = mine[0] if mine and each.life else each.peer
      end = mine[-1] if mine else begin - n
      if each.peer in self._views and not each.left and (mine or not each.life):
        end = self._messages - n + each.peer  # one that joined last has none
      if mine != list(range(begin, end + 1, n)) or begin % n != each.peer:
        raise Broken(f"{ROUNDS}: peer {each.peer} received {mine}")

  def newcomers(self):
    for each in self._lives:
      actions = [row.action for row in each.rows]
      if each.life and (
        actions[0] != base.JOIN
        or (base.SEND in actions)
        and actions[1] != base.ADOPT
      ):
        raise Broken(
          f"{ADOPTS}: peer {each.peer} {[base.ACTIONS[a] for a in actions]}"
        )

  def messages(self):
    """In rounds: whoever is alive at the end takes the same of a message."""
    alive = [each for each in self._lives if not each.left]
    every, links = self._how.every, self._how.topology
    for sender in self._lives:
      for put in sender.rows:
        if put.action != base.PUT:
          continue
        taken = {}
        for each in alive:
          first = self._first(each)
          mixes = any(
            row.action == base.MIX and row.job == put.job for row in each.rows
          )
          hears = each.peer in np.flatnonzero(
            links.links[put.job % links.period][:, sender.peer]
          )
          if hears and mixes and put.job >= first and each.peer != sender.peer:
            taken[each.peer] = any(
              (row.action, row.job, row.seq)
              == (base.TAKE, sender.peer, put.seq)
              for row in each.rows
            )
        if len(set(taken.values())) > 1 or (
          not sender.left and not all(taken.values())
        ):
          raise Broken(
            f"{ALL}: message {put.seq} of peer {sender.peer}, of round"
            f" {put.job * every}: {taken}"
          )

  def _first(self, each):
    """The first message that an incarnation puts or takes."""
    if not each.life or not each.received:
      return 0
    joined = each.received[0] // len(self._peers)
    return -(-joined // self._how.every)

  def exchanges(self):
    """In pairs: a peer that put takes and mixes, unless the other exited."""
    exits = sum(each.left for each in self._lives)
    alone = 0
    for each in self._lives:
      for row, (at, event) in zip(
        each.rows, enumerate(each.rows), strict=True
      ):
        if row.action != base.PUT:
          continue
        rest = [e.action for e in each.rows[at + 1 : at + 3]]
        if rest == [base.TAKE, base.MIX]:
          continue
        alone += not each.left
        others = {e.action for e in each.rows[at + 1 :]}
        if rest[:1] == [base.TAKE] and not each.left:
          raise Broken(f"{TWO}: peer {each.peer}, {event}, {others}")
    if alone > exits:
      raise Broken(f"{TWO}: {alone} were left by {exits}")
    alive = {each.peer: each for each in self._lives if not each.left}
    for peer, each in alive.items():
      if each.life:
        continue
      took = collections.Counter(
        row.job for row in each.rows if row.action == base.TAKE
      )
      for other, count in took.items():
        mine = alive.get(other)
        if mine is None or mine.life:
          continue
        back = sum(
          (row.action, row.job) == (base.TAKE, peer) for row in mine.rows
        )
        if back != count:
          raise Broken(
            f"{TWO}: peer {peer} took {count} of {other}, which took {back}"
          )

  def copies(self, peers: simulator.Peers):
    topology = self._how.topology
    for peer in self._views:
      own = peers.states[peer].own
      if not isinstance(own, Choco):
        return
      for other in np.flatnonzero(topology.union[peer]).tolist():
        if other not in self._views:
          continue
        slot, told = topology.slot(peer, other), peers.states[other].own
        for name, copy in own.copies.items():
          if not np.allclose(copy[slot], told.public[name], atol=_CLOSE):
            raise Broken(
              f"{COPIES}: peer {peer} has {copy[slot]} of peer {other}, which"
              f" told {told.public[name]}"
            )

  def shared(self, peers: simulator.Peers):
    some = [peers.states[peer] for peer in self._views]
    if not isinstance(some[0].own, Share):
      return
    for state in some[1:]:
      for name, value in state.server.params.items():
        if not np.allclose(value, some[0].server.params[name], atol=_CLOSE):
          raise Broken(f"{SAME}: {[s.server.params for s in some]}")


def check(
  run: Path, duty: PeerDuty, messages: int, views: Mapping[int, View]
) -> None:
  """Raises Broken for the first thing that does not hold.

  Args:
    run: the folder of the run.
    duty: what the peers did.
    messages: jobs of all peers together.
    views: of the peers that were alive at the end.
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
