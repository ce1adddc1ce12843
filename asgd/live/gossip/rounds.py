"""Peers in rounds: a job, a message to the receivers, and a mix of the senders'
messages.

A peer waits for its neighbours only: it may be rounds ahead of distant peers.
It does not wait for a neighbour that has exited. The last messages of that
neighbour are mixed by all its receivers or by none: the driver forwards them
(`Rounds.numbers_received_from`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from asgd.live.gossip import frames
from asgd.live.gossip.frames import PeerFrame
from asgd.live.gossip.outbox import Neighbour
from asgd.live.gossip.peer import LivePeer
from asgd.live.gossip.peer_rows import View

_IDLE, _COMPUTING, _WAITING = range(3)


class Rounds(LivePeer):
  """A peer of synchronous rounds, in the order of `gossip.orders.rounds`.

  Messages are numbered: message m is put in round m * every.
  """

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    self._phase = _IDLE
    # (sender, number) -> message received in this or one of the last rounds.
    # Mixed messages stay here for a while: the driver may have to forward them.
    self._messages: dict[tuple[int, int], PeerFrame] = {}
    # Sender -> number of its first message for this peer; absent: 0.
    self._first_numbers: dict[int, int] = {}
    # Senders that have exited: only forwarded messages of them still count.
    self._lost_senders: set[int] = set()
    self._kept_views: dict[int, View] = {}  # by number of rounds ended

  def _senders(self, number: int) -> list[int]:
    """Returns the peers that send message `number` to this peer."""
    return self.spec.gossip.topology.neighbours(self.index, number)

  def join(
    self, others: Mapping[int, Neighbour], rounds: int, lenders: Iterable[int]
  ) -> None:
    """Begins as a newcomer, which takes no message put before its first
    round."""
    super().join(others, rounds, lenders)
    peers = range(self.spec.gossip.topology.workers)
    self._first_numbers = dict.fromkeys(peers, self._next_put)

  def add_newcomer(self, peer: int, newcomer: Neighbour, lend: bool) -> None:
    """Adds a newcomer between two rounds, and drops two kinds of messages that
    must not be mixed.

    - Messages of lost peers for later rounds: no peer has mixed these messages,
      and the newcomer will not receive them.
    - All messages of the newcomer's predecessor, if the newcomer lends its
      public parameters: mixing would add the messages to these parameters.
    """
    super().add_newcomer(peer, newcomer, lend)
    self._first_numbers[peer] = next_put = self._next_put
    other_peers = self.incarnations.keys() - {peer}
    # The messages of the predecessor below number `end_number` stay.
    end_number = 0 if lend and self._newcomers_lend else next_put
    self._messages = {
      (sender, number): frame
      for (sender, number), frame in self._messages.items()
      if sender in other_peers
      or number < (end_number if sender == peer else next_put)
    }

  def halt(self) -> int:
    """Sets the limit so that the peer stops at the end of the present round.
    Returns the number of rounds that it will have ended then."""
    self.limit = min(self.limit, self.rounds + (self._phase != _IDLE))
    return self.limit

  @property
  def is_quiet(self) -> bool:
    """Whether the peer is idle at its limit, and has received all messages that
    were put in its ended rounds."""
    return (
      super().is_quiet
      and self._phase == _IDLE
      and self.rounds >= self.limit
      and not any(map(self._is_missing, self._unmixed_numbers))
    )

  @property
  def _next_put(self) -> int:
    """The number of the next message to put; valid between two rounds."""
    # ceil(rounds / every), as message m is put in round m * every
    return -(-self.rounds // self.spec.gossip.every)

  @property
  def _unmixed_numbers(self) -> range:
    """The numbers of messages that were put and not mixed; valid between two
    rounds."""
    # Message m is mixed at the end of round m * every + every - 1, so the range
    # has at most one number.
    return range(self.rounds // self.spec.gossip.every, self._next_put)

  def _is_missing(self, number: int) -> bool:
    """Returns whether a message of this number from a live neighbour has not
    arrived."""
    return any(
      peer in self.incarnations
      and number >= self._first_numbers.get(peer, 0)
      and (peer, number) not in self._messages
      for peer in self._senders(number)
    )

  def peer_exited(self, peer: int) -> None:
    """Removes the peer; its last messages were forwarded before."""
    super().peer_exited(peer)
    self._lost_senders.discard(peer)

  def _receive_frame(self, frame: PeerFrame) -> None:
    """Stores a message, unless the driver has already collected the messages of
    the sender: other peers would not get this message."""
    if frame.sender not in self._lost_senders:
      self.store_message(frame)

  def _broadcast(self) -> None:
    """Puts a message and sends it to all receivers, if the round has one."""
    number, rounds_since_put = divmod(self.rounds, self.spec.gossip.every)
    if rounds_since_put:
      return
    frame, topology = self.rows.put(number), self.spec.gossip.topology
    links = topology.links[number % topology.period]  # bool[receiver, sender]
    for peer in self.incarnations:
      if links[peer, self.index]:
        self._send(peer, frame)

  def _step(self) -> bool:
    """Begins a round, ends its job, or ends the round."""
    settings = self.spec.gossip
    # [1] Begin a round: its job and, with `put_first`, its message.
    if self._phase == _IDLE:
      if self.rounds >= self.limit:
        return False
      self._begin_job(self.rounds * settings.topology.workers + self.index)
      if settings.put_first:
        self._broadcast()
      self._compute_job()
      self._phase = _COMPUTING
    # [2] End the job, and put the message.
    elif self._phase == _COMPUTING:
      if self._result is None:
        return False
      if self._end_job():
        if not settings.put_first:
          self._broadcast()
        self._phase = _WAITING
    # [3] Mix the messages of the round once they have arrived.
    else:
      return self._end_round()
    return True

  def _end_round(self) -> bool:
    """Ends a round; if messages are due, mixes them before. Returns False if a
    due message has not arrived."""
    number, rounds_since_mix = divmod(self.rounds + 1, self.spec.gossip.every)
    if not rounds_since_mix:
      number -= 1  # the message that was put `every` - 1 rounds ago
      if self._is_missing(number):
        return False
      peers = self._senders(number)
      messages = [self._messages.get((peer, number)) for peer in peers]
      self.rows.mix(number, [frame for frame in messages if frame])
    self.rounds += 1
    self._phase = _IDLE
    if self.rounds in self.spec.keep_at:
      self._kept_views[self.rounds] = self.view()
    self._drop_old_messages()
    return True

  def _drop_old_messages(self) -> None:
    """Drops messages that all neighbours have, so that the driver need not
    forward them if their sender exits."""
    oldest = self.rounds // self.spec.gossip.every - 2
    for key in [key for key in self._messages if key[1] < oldest]:
      del self._messages[key]

  def take_kept_view(self, rounds: int) -> View | None:
    """Returns the view that was kept after `rounds` rounds, or None. Drops that
    view and all earlier views."""
    view = self._kept_views.get(rounds)
    # The driver asks for rounds in increasing order.
    self._kept_views = {
      view_rounds: view
      for view_rounds, view in self._kept_views.items()
      if view_rounds > rounds
    }
    return view

  # The driver forwards a lost peer's messages to all its receivers.

  def numbers_received_from(self, peer: int) -> list[int]:
    """Returns the numbers of a lost peer's received messages. Later frames of
    that peer are dropped."""
    self._lost_senders.add(peer)
    return [number for sender, number in self._messages if sender == peer]

  def find_message(self, peer: int, number: int) -> PeerFrame | None:
    """Returns the received message of a peer and number, or None."""
    return self._messages.get((peer, number))

  def store_message(self, frame: PeerFrame) -> None:
    """Stores a message, which another peer may have received first."""
    if frame.round >= self._first_numbers.get(frame.sender, 0):
      self._messages.setdefault((frame.sender, frame.round), frame)

  def image(self) -> Any:
    """Returns the image of the base class, with the messages that were received
    and not mixed."""
    tree, notes = super().image()
    unpack = self.spec.wire.unpack
    # Keys are text, as `notes` is written as JSON.
    unmixed = {
      f"{sender},{number}": frame
      for (sender, number), frame in self._messages.items()
      if number in self._unmixed_numbers
    }
    tree["codes"] = {
      key: unpack(frame.content) for key, frame in unmixed.items()
    }
    notes["codes"] = {
      key: [frame.seq, frame.nbytes] for key, frame in unmixed.items()
    }
    notes["first"] = list(self._first_numbers.items())
    return tree, notes

  def restore(self, tree: Any, notes: dict[str, Any]) -> None:
    """Continues from an image."""
    super().restore(tree, notes)
    self._first_numbers = dict(map(tuple, notes["first"]))
    pack = self.spec.wire.pack
    for key, (seq, nbytes) in notes["codes"].items():
      sender, number = map(int, key.split(","))
      # Nothing reads the incarnation of a stored frame.
      self._messages[sender, number] = PeerFrame(
        frames.MESSAGE,
        sender,
        incarnation=0,
        seq=seq,
        round=number,
        content=pack(tree["codes"][key]),
        nbytes=nbytes,
      )
