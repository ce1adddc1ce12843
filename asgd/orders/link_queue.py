"""A queue of events on a network: arrivals of parcels, and scheduled calls.

A parcel is a part of a message or of a ticket on `asgd.orders.network.Links`.
The caller has the clock: it passes the time at which a parcel is sent, and the
time up to which events run.
"""

import collections
import functools
import heapq
import math
from collections.abc import Callable, Hashable
from typing import Any

from asgd.orders.network import Links, MessagePart

Act = Callable[[float], None]  # called with the time of its event


class _Parcel:
  """A part on its way, and the act to call when it is delivered."""

  def __init__(self, act: Act):
    self.act, self.has_arrived = act, False


class LinkQueue:
  """Events in the order of their times; events at equal times keep the order in
  which they were added.

  Example:
    >>> from asgd.orders.link_queue import LinkQueue
    >>> from asgd.orders.network import Links, Network
    >>> queue, arrivals = LinkQueue(Links(Network(latency=0.5), workers=1)), []
    >>> queue.send_up(1.0, worker=0, shard=0, nbytes=8, act=arrivals.append)
    >>> queue.run()
    >>> arrivals
    [1.5]
  """

  def __init__(
    self, links: Links, count: Callable[[float], None] | None = None
  ):
    """`count` is called with the time that each parcel has waited at shards.
    The default counts every parcel as a message of the links."""
    self.links, self._count_waited = links, count or links.count_received
    self._heap: list[tuple[float, int, Act]] = []
    self._n_scheduled = 0  # events so far
    # (direction, worker, shard) -> parcels under way, in the order of sending.
    self._parcels: dict[Hashable, collections.deque[_Parcel]] = (
      collections.defaultdict(collections.deque)
    )

  @property
  def next_time(self) -> float | None:
    """The time of the next event; None if there is none."""
    return self._heap[0][0] if self._heap else None

  def at(self, time: float, act: Act) -> None:
    """Schedules a call of `act` at a time."""
    heapq.heappush(self._heap, (time, self._n_scheduled, act))
    self._n_scheduled += 1

  def send_up(
    self, time: float, worker: int, shard: int, nbytes: float, act: Act
  ) -> None:
    """Sends bytes from a worker to a shard at a time, then calls `act`.

    Parcels of one worker, shard and direction are delivered in the order in
    which they were sent: a parcel that arrives before an earlier one waits.
    """
    self._send(self.links.message_part, time, worker, shard, nbytes, act)

  def send_down(
    self, time: float, worker: int, shard: int, nbytes: float, act: Act
  ) -> None:
    """Sends bytes from a shard to a worker; see `send_up`."""
    self._send(self.links.ticket_part, time, worker, shard, nbytes, act)

  def _send(
    self,
    make_part: Callable[..., MessagePart],
    time: float,
    worker: int,
    shard: int,
    nbytes: float,
    act: Act,
  ) -> None:
    """Adds a parcel to those under way, and moves its part to the first line.
    """
    parcel = _Parcel(act)
    parcels = self._parcels[make_part.__name__, worker, shard]
    parcels.append(parcel)
    part = make_part((parcels, parcel), worker, shard, nbytes)
    self._move(time, part=part, line=None)

  def _move(self, time: float, *, part: MessagePart, line: Any) -> None:
    """Moves a part to its next line, or to its receiver."""
    if line is None and part.has_arrived:
      self._count_waited(part.waited)
      parcels, parcel = part.key
      parcel.has_arrived = True
      while parcels and parcels[0].has_arrived:
        parcels.popleft().act(time)
      return
    for next_time, next_part, next_line in self.links.advance(time, part, line):
      move = functools.partial(self._move, part=next_part, line=next_line)
      self.at(next_time, move)

  def run(self, until: float = math.inf) -> None:
    """Processes the events up to a time, in their order."""
    while self._heap and self._heap[0][0] <= until:
      self.advance()

  def advance(self) -> None:
    """Processes the next event; there must be one."""
    time, _, act = heapq.heappop(self._heap)
    act(time)

  def clear(self) -> None:
    """Drops all events: parcels under way do not arrive."""
    self._heap.clear()
    self._parcels.clear()
