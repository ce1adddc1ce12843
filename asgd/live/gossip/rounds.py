"""Peers in rounds: a job, a message to those who hear it, and a mix of theirs.

A peer waits for its neighbours, not for all: it may be rounds ahead of peers
far away. Who has died is not waited for; what it put before is taken by all its
neighbours, or by none (`Rounds.heard_of`).
"""

from typing import Any

from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.peer import LivePeer
from asgd.live.gossip.peer_rows import View

_IDLE, _COMPUTING, _WAITING = range(3)


class Rounds(LivePeer):
  """A peer of synchronous rounds, as `gossip.orders.rounds` has them.

  Messages have numbers of their own: message m is put in round m `every`.
  """

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self._phase = _IDLE
    # By sender and number.
    self._messages: dict[tuple[int, int], PeerFrame] = {}
    self._first: dict[int, int] = {}  # message of a newcomer; others have 0
    self._dying: set[int] = set()  # of whom nothing more is heard
    self.kept: dict[int, View] = {}  # by rounds ended

  @property
  def _hears(self):
    return self.duty.gossip.topology.neighbours

  def join(self, others, rounds, lenders):
    """See the base; what was put before its first round is not for it."""
    super().join(others, rounds, lenders)
    peers = range(self.duty.gossip.topology.workers)
    self._first = dict.fromkeys(peers, self._next_put)

  def present(self, peer, newcomer, lend):
    """See the base; what lost peers put for rounds to come is dropped, as
    nobody has mixed it and the newcomer lacks it. Of its predecessor all is, if
    the newcomer lends what these messages would be added to."""
    super().present(peer, newcomer, lend)
    self._first[peer] = first = self._next_put
    old = 0 if lend and self._introduces else first
    self._messages = {
      (sender, number): frame
      for (sender, number), frame in self._messages.items()
      if number < (old if sender == peer else first)
      or sender in self.lives.keys() - {peer}
    }

  def halt(self) -> int:
    """Stops at the end of the round that it is in; returns how many rounds it
    will have ended."""
    self.limit = min(self.limit, self.rounds + (self._phase != _IDLE))
    return self.limit

  @property
  def quiet(self) -> bool:
    """See the base; what others put in rounds that it has ended has come."""
    return (
      super().quiet
      and self._phase == _IDLE
      and self.rounds >= self.limit
      and not any(map(self._missing, self._to_come))
    )

  @property
  def _next_put(self):
    """The number of the next message, before a round."""
    return -(-self.rounds // self.duty.gossip.every)

  @property
  def _to_come(self):
    """Numbers of messages that were put and not mixed, before a round."""
    return range(self.rounds // self.duty.gossip.every, self._next_put)

  def _missing(self, number: int) -> bool:
    """Whether such a message of a neighbour is still to come."""
    return any(
      peer in self.lives
      and number >= self._first.get(peer, 0)
      and (peer, number) not in self._messages
      for peer in self._hears(self.index, number)
    )

  def gone(self, peer):
    """See the base."""
    super().gone(peer)
    self._dying.discard(peer)

  def _heard(self, frame):
    if frame.sender not in self._dying:
      self.take_over(frame)

  def _tell_all(self):
    how = self.duty.gossip
    number, rest = divmod(self.rounds, how.every)
    if rest:
      return
    frame, topology = self.rows.put(number), how.topology
    links = topology.links[number % topology.period]
    for peer in self.lives:
      if links[peer, self.index]:
        self._tell(peer, frame)

  def _step(self):
    how = self.duty.gossip
    if self._phase == _IDLE:
      if self.rounds >= self.limit:
        return False
      self._begin(self.rounds * how.topology.workers + self.index)
      if how.put_first:
        self._tell_all()
      self._compute()
      self._phase = _COMPUTING
    elif self._phase == _COMPUTING:
      if self._work is None:
        return False
      if self._receive():
        if not how.put_first:
          self._tell_all()
        self._phase = _WAITING
    else:
      return self._end_round()
    return True

  def _end_round(self):
    """Ends a round; if messages are due, once they have come."""
    number, rest = divmod(self.rounds + 1, self.duty.gossip.every)
    if not rest:
      number -= 1
      if self._missing(number):
        return False
      peers = self._hears(self.index, number)
      heard = [self._messages.get((peer, number)) for peer in peers]
      self.rows.mix(number, [frame for frame in heard if frame])
    self.rounds += 1
    self._phase = _IDLE
    if self.rounds in self.duty.keep_at:
      self.kept[self.rounds] = self.view()
    self._forget()
    return True

  def _forget(self):
    """Drops what no neighbour can lack any more, if one that told it dies."""
    oldest = self.rounds // self.duty.gossip.every - 2
    for key in [key for key in self._messages if key[1] < oldest]:
      del self._messages[key]

  def take_kept(self, rounds: int) -> View | None:
    """Returns what was kept after so many rounds, and drops it and all before;
    None if nothing was."""
    view = self.kept.get(rounds)
    self.kept = {k: v for k, v in self.kept.items() if k > rounds}
    return view

  # What a dead peer has put comes to all that hear it, or to none.

  def heard_of(self, peer: int) -> list[int]:
    """Returns the numbers of the messages of a peer that have come; no more is
    heard of it itself."""
    self._dying.add(peer)
    return [number for sender, number in self._messages if sender == peer]

  def message_of(self, peer: int, number: int) -> PeerFrame | None:
    """Returns such a message."""
    return self._messages.get((peer, number))

  def take_over(self, frame: PeerFrame) -> None:
    """Takes a message, which has come to another."""
    if frame.round >= self._first.get(frame.sender, 0):
      self._messages.setdefault((frame.sender, frame.round), frame)

  def image(self):
    """See the base; with what has come and is not mixed."""
    tree, notes = super().image()
    unpack = self.duty.wire.unpack
    waiting = {
      f"{sender},{number}": frame
      for (sender, number), frame in self._messages.items()
      if number in self._to_come
    }
    tree["codes"] = {k: unpack(f.content) for k, f in waiting.items()}
    notes["codes"] = {k: [f.seq, f.nbytes] for k, f in waiting.items()}
    notes["first"] = list(self._first.items())
    return tree, notes

  def restore(self, tree, notes):
    """See the base."""
    super().restore(tree, notes)
    self._first = dict(map(tuple, notes["first"]))
    pack = self.duty.wire.pack
    for key, (seq, size) in notes["codes"].items():
      sender, number = map(int, key.split(","))
      content = pack(tree["codes"][key])
      self._messages[sender, number] = PeerFrame(
        frames.MESSAGE, sender, 0, seq, number, content, size
      )
