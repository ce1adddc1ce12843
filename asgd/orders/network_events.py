"""Event queue of a simulated run over a network: messages and other events.

A message has one part for each shard that it concerns, and arrives when all of
its parts have arrived. The messages of one worker in one direction form a
stream. They are delivered in the order in which they were sent, as on a
connection.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from asgd.orders.network import Links, MessagePart, Network

UP, DOWN = "up", "down"  # directions: worker to shards, shards to worker
MESSAGE, _PART = "message", "part"  # kinds of events that a message causes
# Ranks order events of equal time: transfers and arrivals, then starts of a
# next job, then waiting workers that retry, then ends of a computation.
IN_TRANSIT, START_JOB, WAITING, END_JOB = range(4)


@dataclasses.dataclass(eq=False)
class Message:
  """A message between a worker and shards."""

  kind: str  # chosen by the sender, as are `data` and `number`
  direction: str  # UP or DOWN
  worker: int
  sizes: dict[int, float]  # bytes of each part, by shard
  data: list[bytes] = dataclasses.field(default_factory=list)
  number: int = 0
  parts: dict[int, MessagePart] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.missing = len(self.sizes)  # parts that have not arrived

  @property
  def waited(self) -> float:
    """Time that its parts have spent in queues of shards."""
    return sum(part.waited for part in self.parts.values())

  def pack(self) -> list[Any]:
    """Returns the message as a tree of JSON and bytes."""
    parts = [part.pack() for part in self.parts.values()]
    sizes, counts = list(self.sizes.items()), [self.number, self.missing]
    head = [self.kind, self.direction, self.worker, sizes, self.data]
    return [*head, parts, *counts]


class NetworkEvents:
  """The future events of a run over a network, in the order of time.

  Attributes:
    now: time of the last popped event.

  Example:
    >>> from asgd.orders.network import Network
    >>> from asgd.orders.network_events import (
    ...   START_JOB, UP, Message, NetworkEvents
    ... )
    >>> events = NetworkEvents(Network(latency=1.0, up=4.0), workers=1)
    >>> events.send(Message("push", UP, 0, sizes={0: 8.0}))
    >>> events.put(2.0, START_JOB, "start", 0)
    >>> events.pop(), events.pop()[0], events.now
    (('start', 0), 'message', 3.0)
  """

  def __init__(self, network: Network, workers: int):
    """Starts at time 0 without events."""
    self.links, self.now = Links(network, workers), 0.0
    # (time, rank, worker if WAITING, insertion count, kind, subject)
    self._heap: list[tuple[float, int, int, int, str, Any]] = []
    self._last_event: Any = None  # the event that was popped last
    self._count = self._sent = 0  # numbers of events and of messages so far
    # Messages that were not popped, by their index among all messages.
    self._messages: dict[int, Message] = {}
    # (direction, worker) -> indices of messages, in the order of sending
    self._streams: dict[tuple[str, int], collections.deque[int]] = (
      collections.defaultdict(collections.deque)
    )

  def put(self, time: float, rank: int, kind: str, subject: Any) -> None:
    """Schedules an event at a time.

    Events of equal times are ordered by `rank`, then by insertion. WAITING
    events, which have a worker as subject, are ordered by worker instead.
    """
    self._count += 1
    order = subject if rank == WAITING else 0
    event = time, rank, order, self._count, kind, subject
    heapq.heappush(self._heap, event)

  def send(self, message: Message) -> None:
    """Sends a message at the time `now`."""
    index = self._sent
    self._sent += 1
    self._add(index, message)
    self._streams[message.direction, message.worker].append(index)
    for part in message.parts.values():
      self._advance_part(part, None)

  def _add(self, index: int, message: Message) -> None:
    """Registers a message, and creates its parts."""
    self._messages[index] = message
    up = message.direction == UP
    make_part = self.links.message_part if up else self.links.ticket_part
    message.parts = {
      shard: make_part((index, shard), message.worker, shard, nbytes)
      for shard, nbytes in message.sizes.items()
    }

  def pop(self) -> tuple[str, Any]:
    """Returns (kind, subject) of the next event: MESSAGE and a Message that has
    arrived, or the arguments of a call of `put`."""
    while True:
      event = heapq.heappop(self._heap)
      self.now, *_, kind, subject = event
      if kind == _PART:
        # Progress of a part on the links is no event for the caller.
        self._advance_part(*subject)
        continue
      self._last_event = event
      if kind == MESSAGE:
        return kind, self._messages.pop(subject)
      return kind, subject

  def put_back(self, subject: Any) -> None:
    """Undoes the last `pop`, which returned this subject."""
    heapq.heappush(self._heap, self._last_event)
    if isinstance(subject, Message):
      self._messages[self._last_event[-1]] = subject

  def _advance_part(self, part: MessagePart, line: Any) -> None:
    """Moves a part one step along its links, or counts its arrival."""
    if line is None and part.has_arrived:
      self._arrive(self._messages[part.key[0]])
      return
    for time, moved, next_line in self.links.advance(self.now, part, line):
      self.put(time, IN_TRANSIT, _PART, (moved, next_line))

  def _arrive(self, message: Message) -> None:
    """Counts an arrived part, then schedules each complete message at the head
    of its stream. A complete message behind an incomplete one waits."""
    message.missing -= 1
    stream = self._streams[message.direction, message.worker]
    while stream and not self._messages[stream[0]].missing:
      self.put(self.now, IN_TRANSIT, MESSAGE, stream.popleft())

  # Checkpoints.

  def _packed_events(self) -> Iterator[list[Any]]:
    """Yields the events, with keys and numbers for parts and lines."""
    for *order, kind, subject in self._heap:
      if kind != _PART:
        yield [*order, kind, subject]
        continue
      part, line = subject
      # On a shared line a part's event is rescheduled whenever another part
      # joins or leaves. Events of parts that have left the line are obsolete.
      if line is None or part.is_on(line):
        yield [*order, kind, [*part.key, self.links.number_of(line)]]

  def pack(self) -> dict[str, Any]:
    """Returns the queue as a tree of arrays and JSON."""
    return {
      "now": self.now,
      "counts": [self._count, self._sent],
      "messages": [[n, *m.pack()] for n, m in self._messages.items()],
      "streams": [[*key, list(x)] for key, x in self._streams.items()],
      "links": self.links.pack(),
      "events": list(self._packed_events()),
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Restores the packed state of a queue of the same network and workers."""
    self.now = tree["now"]
    self._count, self._sent = tree["counts"]
    for index, kind, direction, worker, sizes, data, parts, *counts in tree[
      "messages"
    ]:
      number, missing = counts
      message = Message(kind, direction, worker, dict(sizes), data, number)
      self._add(index, message)
      message.missing = missing
      for part, packed in zip(message.parts.values(), parts, strict=True):
        part.unpack(packed)
    for direction, worker, indices in tree["streams"]:
      self._streams[direction, worker] = collections.deque(indices)
    self.links.unpack(tree["links"], self._part)
    for *order, kind, subject in tree["events"]:
      if kind == _PART:
        *key, line = subject
        subject = self._part(key), self.links.line_of(line)
      self._heap.append((*order, kind, subject))
    heapq.heapify(self._heap)

  def _part(self, key: Any) -> MessagePart:
    index, shard = key
    return self._messages[index].parts[shard]
