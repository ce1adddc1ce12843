"""The events of peers in rounds: an order of `asgd.gossip.orders.rounds`.

The letters are those of `asgd.gossip.orders`.
"""

import collections
import functools
from typing import Any

from asgd import base
from asgd.gossip.over_network import EventQueue
from asgd.gossip.topology import Topology
from asgd.orders.trace import NO_SEQ


class RoundEvents:
  """The peers of an order of rounds, and the rows that they add."""

  def __init__(
    self, queue: EventQueue, topology: Topology, rounds: int, put_first: bool,
    every: int
  ):
    self.queue, self._topology, self._rounds = queue, topology, rounds
    self._put_first, self._every, n = put_first, every, topology.workers
    # By peer: its round, and whether it has ended the job of that round.
    self._round_of, self._job_ended = [0] * n, [False] * n
    self._n_running = n  # peers with a round to do
    # (receiver, message number) -> messages of that number that have arrived.
    self._arrived: collections.Counter[Any] = collections.Counter()
    self._to_end: collections.deque[int] = collections.deque()  # see `_proceed`
    self._ranks = {base.SEND: 0, base.PUT: 1 if put_first else 3}
    self._ranks |= {base.RECEIVE: 2, base.TAKE: 4, base.MIX: 4}
    # A key for each row: (time, round, rank of the action, peer, sender). The
    # sender n puts a mix after its takes.
    self.keys: list[tuple[float, int, int, int, int]] = []

  def _add(self, time: float, i: int, seq: int, job: int, action: int) -> None:
    self.queue.add_row(time, i, seq, job, action)
    sender = job if action == base.TAKE else self._topology.workers
    rank = self._ranks[action]
    self.keys.append((time, self._round_of[i], rank, i, sender))

  def start(self, i: int, time: float) -> None:
    """Starts the job of a peer's present round."""
    k, n = self._round_of[i], self._topology.workers
    self._add(time, i, k, k * n + i, base.SEND)
    if self._put_first:
      self._put(i, time)
    self.queue.compute(time, i, functools.partial(self._end, i))

  def _put(self, i: int, time: float) -> None:
    """Sends a peer's message to its receivers, once in `every` rounds."""
    m, wait = divmod(self._round_of[i], self._every)
    if wait:  # message m is put in round m * every
      return
    self._add(time, i, m, m, base.PUT)
    links = self._topology.links[m % self._topology.period]
    for j in self.queue.receivers(links, i):
      arrive = functools.partial(self._arrive, j, m)
      self.queue.carry(time, i, j, arrive, seq=m)

  def _end(self, i: int, time: float) -> None:
    """Ends the job of a peer's present round."""
    k, n = self._round_of[i], self._topology.workers
    self._add(time, i, k, k * n + i, base.RECEIVE)
    self._job_ended[i] = True
    if not self._put_first:
      self._put(i, time)
    self._proceed(i, time)

  def _arrive(self, i: int, m: int, time: float) -> None:
    self._arrived[i, m] += 1
    self._proceed(i, time)

  def _proceed(self, i: int, time: float) -> None:
    """Ends the round of a peer, if its job and its messages are complete."""
    # The end of a round may end rounds of other peers, at once if messages take
    # no time. The first call ends all: a chain of calls could be too deep.
    self._to_end.append(i)
    if len(self._to_end) == 1:
      while self._to_end:
        self._end_round(self._to_end[0], time)
        self._to_end.popleft()

  def _end_round(self, i: int, time: float) -> None:
    """Ends the round of a peer if it is complete, and starts the next one."""
    if not self._job_ended[i]:
      return
    ended_rounds = self._round_of[i] + 1
    if not ended_rounds % self._every:  # the last round of message m: mix it
      m = ended_rounds // self._every - 1
      senders = self._topology.neighbours(i, m)
      if self._arrived[i, m] < len(senders):
        return
      for j in senders:
        self._add(time, i, m, j, base.TAKE)
      self._add(time, i, NO_SEQ, m, base.MIX)
    self._job_ended[i] = False
    self._round_of[i] += 1
    if self._round_of[i] < self._rounds:
      self.start(i, time)
      return
    self._n_running -= 1
    if not self._n_running:
      # No peer takes a message that is still on its way: the message does not
      # use the links after the last round.
      self.queue.clear()
