"""A queue of events on a network: parcels that arrive, and calls at a time.

A parcel is a part of a message or of a ticket on `asgd.orders.network.Links`.
The caller gives the clock: it sends parcels at a time, and runs the events up
to a time.
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
  """An act that waits for the arrival of a part."""

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
    """`count` gets the time that each parcel has waited at shards; the default
    counts every parcel as a message of the links."""
    self.links, self._count_waited = links, count or links.count_received
    self._heap: list[tuple[float, int, Act]] = []
    self._count = 0
    # Way of a parcel -> the parcels on this way, in the order of sending.
    self._ways: dict[Hashable, collections.deque[_Parcel]] = (
      collections.defaultdict(collections.deque)
    )

  @property
  def next_time(self) -> float | None:
    """The time of the next event; None if there is none."""
    return self._heap[0][0] if self._heap else None

  def at(self, time: float, act: Act) -> None:
    """Schedules a call."""
    heapq.heappush(self._heap, (time, self._count, act))
    self._count += 1

  def send_up(
    self, time: float, worker: int, shard: int, nbytes: float, act: Act
  ) -> None:
    """Sends bytes from a worker to a shard at a time, then calls `act`.

    Parcels of one worker, shard and direction are delivered in the order in
    which they were sent: one that arrives before an earlier one waits for it.
    """
    self._send(self.links.message_part, time, worker, shard, nbytes, act)

  def send_down(
    self, time: float, worker: int, shard: int, nbytes: float, act: Act
  ) -> None:
    """Sends bytes from a shard to a worker, as `send_up`."""
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
    parcel = _Parcel(act)
    parcels = self._ways[make_part.__name__, worker, shard]
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
    """Drops all events: parcels on their way do not arrive."""
    self._heap.clear()
    self._ways.clear()
