"""Messages between workers and shards on their way, and what else is to come.

A message has a part for each shard that it concerns, and has come when all of
them have; those of one worker, in one direction, come in the order in which
they were sent, as those of a connection are.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Mapping
from typing import Any

from asgd.orders.network import Links, MessagePart, Network

UP, DOWN = "up", "down"  # to the shards, and from them
MESSAGE, _PART = "message", "part"
# Events of the same time happen in this order: messages on their way, workers
# that have ended a job, workers that wait, and ends of jobs.
ON_ITS_WAY, NEXT, WAITING, END = range(4)


@dataclasses.dataclass(eq=False)
class Message:
  """A message between a worker and shards."""

  kind: str  # of the sender, as are the data and the number
  way: str  # UP or DOWN
  worker: int
  sizes: dict[int, float]  # bytes of each part, by shard
  data: list[bytes] = dataclasses.field(default_factory=list)
  number: int = 0
  parts: dict[int, MessagePart] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.left = len(self.sizes)  # parts that are on their way

  @property
  def waited(self) -> float:
    """Time that its parts have spent in queues of shards."""
    return sum(part.waited for part in self.parts.values())

  def pack(self) -> list[Any]:
    """Returns it as a tree of JSON and bytes."""
    parts = [part.pack() for part in self.parts.values()]
    sizes, numbers = list(self.sizes.items()), [self.number, self.left]
    return [self.kind, self.way, self.worker, sizes, self.data, parts, *numbers]


class Carrier:
  """All that is to come in a run over a network, in the order of time.

  Attributes:
    now: time of what has happened last.

  Example:
    >>> from asgd.orders.network import Network
    >>> from asgd.tables.carrier import NEXT, UP, Carrier, Message
    >>> carrier = Carrier(Network(latency=1.0, up=4.0), workers=1)
    >>> carrier.send(Message("push", UP, 0, sizes={0: 8.0}))
    >>> carrier.put(2.0, NEXT, "start", 0)
    >>> carrier.pop(), carrier.pop()[0], carrier.now
    (('start', 0), 'message', 3.0)
  """

  def __init__(self, network: Network, workers: int):
    """Starts at time 0 with nothing to come."""
    self.links, self.now = Links(network, workers), 0.0
    # (time, rank, order among those that wait, number, kind, of which)
    self._heap: list[tuple[float, int, int, int, str, Any]] = []
    self._last: Any = None  # which was popped
    self._count = self._sent = 0
    self._messages: dict[int, Message] = {}  # that have not been popped
    self._streams: dict[tuple[str, int], collections.deque[int]] = (
      collections.defaultdict(collections.deque)
    )

  def put(self, time: float, rank: int, kind: str, what: Any) -> None:
    """Something is to happen at a time, among what happens then by its rank,
    and among who waits by the worker, which `what` is."""
    self._count += 1
    order = what if rank == WAITING else 0
    heapq.heappush(self._heap, (time, rank, order, self._count, kind, what))

  def send(self, message: Message) -> None:
    """A message sets out now."""
    number = self._sent
    self._sent += 1
    self._add(number, message)
    self._streams[message.way, message.worker].append(number)
    for part in message.parts.values():
      self._move(part, None)

  def _add(self, number, message):
    self._messages[number] = message
    way = self.links.up if message.way == UP else self.links.down
    message.parts = {
      shard: way((number, shard), message.worker, shard, nbytes)
      for shard, nbytes in message.sizes.items()
    }

  def pop(self) -> tuple[str, Any]:
    """Returns what happens next, and to which worker, or MESSAGE and the
    message that has come."""
    while True:
      event = heapq.heappop(self._heap)
      self.now, *_, kind, what = event
      if kind == _PART:
        self._move(*what)
        continue
      self._last = event
      if kind == MESSAGE:
        return kind, self._messages.pop(what)
      return kind, what

  def put_back(self, what: Any) -> None:
    """What was popped last has not happened."""
    heapq.heappush(self._heap, self._last)
    if isinstance(what, Message):
      self._messages[self._last[-1]] = what

  def _move(self, part, line):
    if line is None and part.arrived:
      self._arrive(self._messages[part.key[0]])
      return
    for time, following, on in self.links.advance(self.now, part, line):
      self.put(time, ON_ITS_WAY, _PART, (following, on))

  def _arrive(self, message):
    """A part of a message has come; messages that have come, and all that were
    sent before them, are to be told."""
    message.left -= 1
    stream = self._streams[message.way, message.worker]
    while stream and not self._messages[stream[0]].left:
      self.put(self.now, ON_ITS_WAY, MESSAGE, stream.popleft())

  # Checkpoints.

  def _packed_events(self) -> Iterator[list[Any]]:
    for *place, kind, what in self._heap:
      if kind != _PART:
        yield [*place, kind, what]
        continue
      part, line = what
      # The others are of parts that have left a line which is shared.
      if line is None or part.is_on(line):
        yield [*place, kind, [*part.key, self.links.number_of(line)]]

  def pack(self) -> dict[str, Any]:
    """Returns it as a tree of arrays and JSON."""
    return {
      "now": self.now,
      "counts": [self._count, self._sent],
      "messages": [[n, *m.pack()] for n, m in self._messages.items()],
      "streams": [[*key, list(x)] for key, x in self._streams.items()],
      "links": self.links.pack(),
      "events": list(self._packed_events()),
    }

  def unpack(self, tree: Mapping[str, Any]) -> None:
    """Takes over what one like it has packed."""
    self.now = tree["now"]
    self._count, self._sent = tree["counts"]
    for number, kind, way, worker, sizes, data, parts, *rest in tree[
      "messages"
    ]:
      message = Message(kind, way, worker, dict(sizes), data, rest[0])
      self._add(number, message)
      message.left = rest[1]
      for part, packed in zip(message.parts.values(), parts, strict=True):
        part.unpack(packed)
    for way, worker, numbers in tree["streams"]:
      self._streams[way, worker] = collections.deque(numbers)
    self.links.unpack(tree["links"], self._part)
    for *place, kind, what in tree["events"]:
      if kind == _PART:
        *key, line = what
        what = self._part(key), self.links.line_of(line)
      self._heap.append((*place, kind, what))
    heapq.heapify(self._heap)

  def _part(self, key):
    number, shard = key
    return self._messages[number].parts[shard]
