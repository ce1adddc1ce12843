"""Networks: what the way between workers and shards adds to an order.

A message goes from its worker's link to the ports of the shards, and waits at
each for its turn; a ticket goes the other way:

  worker --up--> latency --port--> service        a part for each shard
  worker <-down-- latency <-port-- shard

Each arrow is a `Line`: it carries one part after the other, first come, first
served, and a part of b bytes keeps it for b / bandwidth. Lines are cut-through,
as switches are: while a part still leaves one line its first bytes enter the
next, so that a part alone takes latency + b / (the slower
bandwidth). What is received while a line is busy waits: that is incast. With
`incast="share"` the port of a shard gives all parts that are there an equal
share of its bandwidth instead.

`Links.advance` is given the time, drawn (`asgd.orders.play`) or real
(`asgd.live.links.throttled`).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asgd import checks

INCAST = "queue", "share"


class Network(NamedTuple):
  """What messages pass; by default they take no time.

  Bandwidths are in bytes a unit of time, the unit of the durations (seconds of
  a live run). Each direction of a link or a port has the whole of it.

  Example:
    >>> from asgd.orders.network import Network
    >>> Network(latency=0.5, port=100.0).is_instant
    False
  """

  latency: float = 0.0  # one way, of every message and ticket
  up: float = math.inf  # bandwidth of a worker's link, to the shards
  down: float = math.inf  # the same, from them
  port: float = math.inf  # bandwidth of a shard's port, each way
  service: float = 0.0  # time in which a shard takes a message, one by one
  shards: int = 1  # S, which have a part of each message and ticket
  incast: str = "queue"  # how messages that meet at a port pass it; or "share"

  @property
  def is_instant(self) -> bool:
    """Whether nothing takes any time."""
    rates = self.up, self.down, self.port
    return not self.latency and not self.service and min(rates) == math.inf


def check(network: Network) -> Network:
  """Returns the network, or raises ValueError for a time negative or not
  finite, a bandwidth that is not positive, or an unknown rule of incast."""
  for name in ("latency", "service"):
    checks.nonnegative(name, getattr(network, name))
  for name in ("up", "down", "port"):
    checks.real(
      *(name, getattr(network, name), lambda value: value > 0),
      "a bandwidth above 0, in bytes a unit of time",
      "; leave it out where it is no limit",
      finite=False,
    )
  checks.whole("shards", network.shards)
  checks.one_of("incast", network.incast, INCAST)
  return network


PartOf = Callable[[Any], Any]  # its key, as JSON has it -> MessagePart


class Line:
  """Carries one part after the other, first come, first served."""

  def __init__(self) -> None:
    self.free = 0.0  # when it has carried all that came
    self._busy = 0.0  # time taken by all that came

  def take(self, now: float, length: float) -> float:
    """Returns when a part begins that comes now and takes `length`."""
    begin = max(now, self.free)
    self.free = begin + length
    self._busy += length
    return begin

  def busy(self, end: float) -> float:
    """Returns how long it was busy until a time, not before the last part."""
    return self._busy - max(self.free - end, 0.0)

  def pack(self) -> list[Any]:
    """Returns the line as JSON."""
    return [self.free, self._busy]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores what was packed."""
    del part_of
    self.free, self._busy = packed


class SharedLine:
  """Carries all parts on it at the same time, each at an equal share.

  Of n parts each has 1 / n of the bandwidth, so that "served" grows by time / n
  and a part of length d that came at served V is through at V + d (processor
  sharing; Kleinrock, "Queueing systems", volume 2, 1976, section 4.4).
  """

  def __init__(self) -> None:
    self._served = self._at = self._busy = 0.0
    self._number = 0  # of parts that came
    self._heap: list[tuple[float, int, Any]] = []  # (served at its end, ...)

  def _move(self, now):
    """Serves the parts on the line until a time."""
    if self._heap:
      self._served += (now - self._at) / len(self._heap)
      self._busy += now - self._at
    self._at = now

  def join(self, now: float, length: float, part: Any) -> None:
    """Adds a part, which alone would take `length`."""
    self._move(now)
    heapq.heappush(self._heap, (self._served + length, self._number, part))
    self._number += 1

  def next_end(self) -> tuple[float, Any] | None:
    """Returns (time, part) of the first to be through if none comes before."""
    if not self._heap:
      return None
    until, _, part = self._heap[0]
    left = max(until - self._served, 0.0)
    return self._at + left * len(self._heap), part

  def leave(self, now: float) -> None:
    """Removes the first part, which is through."""
    self._move(now)
    self._served = max(self._served, heapq.heappop(self._heap)[0])

  def busy(self, end: float) -> float:
    """Returns how long it was busy until a time, not before the last part."""
    return self._busy + (end - self._at if self._heap else 0.0)

  def pack(self) -> list[Any]:
    """Returns the line as JSON, with the keys of the parts on it."""
    heap = [[until, number, part.key] for until, number, part in self._heap]
    return [self._served, self._at, self._busy, self._number, heap]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores what was packed; `part_of` finds parts by their keys."""
    self._served, self._at, self._busy, self._number, heap = packed
    self._heap = [(until, n, part_of(key)) for until, n, key in heap]


class Hop(NamedTuple):
  """A line that a part passes."""

  line: Any  # Line or SharedLine
  length: float  # time that it takes there alone
  after: float = 0.0  # latency to the next
  whole: bool = False  # begins when the last byte has come, not the first
  own: bool = False  # of a worker: parts wait for each other only


class MessagePart:
  """The share of one shard in a message or a ticket, on its way."""

  def __init__(self, key: Any, hops: Sequence[Hop]):
    self.key, self._hops = key, hops  # the caller's key
    self.waited = 0.0  # time in queues of shards so far
    self._next = 0
    self._ready = 0.0  # when it may begin at the hop that is next
    self._last_byte = 0.0  # when all of it is there

  @property
  def arrived(self) -> bool:
    """Whether it has passed its last line."""
    return self._next == len(self._hops)

  def is_on(self, line: Any) -> bool:
    """Whether a line is the present or the next one."""
    return not self.arrived and self._hops[self._next].line is line

  def pack(self) -> list[Any]:
    """Returns the progress as JSON."""
    return [self.waited, self._next, self._ready, self._last_byte]

  def unpack(self, packed: Sequence[Any]) -> None:
    """Restores the progress of a part with the same hops."""
    self.waited, self._next, self._ready, self._last_byte = packed


# (time, part, line): a part comes to its next line (None), or is through on a
# shared one unless another came since.
Happening = tuple[float, MessagePart | None, Any]


class LinkUse(NamedTuple):
  """What a network bore until a time."""

  utilisation: float  # share of the time that the busiest port was busy
  service: float  # the same, of the shard that is busiest taking messages
  waited: float  # mean time of a message and its ticket in queues of shards


class Links:
  """All lines between N workers and S shards, and the parts on them.

  Example:
    Two messages of 8 bytes meet at a port that takes 4 bytes a unit.

    >>> from asgd.orders.network import Links, Network
    >>> links = Links(Network(latency=1.0, port=4.0), workers=2)
    >>> for worker in range(2):
    ...   part = links.up("message", worker, shard=0, nbytes=8)
    ...   happenings = links.advance(0.0, part)
    ...   while not part.arrived:
    ...     (time, part, line), = happenings
    ...     happenings = links.advance(time, part, line)
    ...   print(happenings[0][0], part.waited)
    3.0 0.0
    5.0 2.0
  """

  def __init__(self, network: Network, workers: int):
    self.network = check(network)
    shards, shared = range(network.shards), network.incast == "share"
    self._up = [Line() for _ in range(workers)]
    self._down = [Line() for _ in range(workers)]
    self._in: list[Any] = [SharedLine() if shared else Line() for _ in shards]
    self._out: list[Any] = [SharedLine() if shared else Line() for _ in shards]
    self._service = [Line() for _ in shards]
    self._waited, self._messages = 0.0, 0

  def up(
    self, key: Any, worker: int, shard: int, nbytes: float
  ) -> MessagePart:
    """Returns the part of a message for a shard, of so many bytes."""
    net = self.network
    hops = (
      Hop(self._up[worker], nbytes / net.up, net.latency, own=True),
      Hop(self._in[shard], nbytes / net.port),
      Hop(self._service[shard], net.service, whole=True),
    )
    return MessagePart(key, hops)

  def down(
    self, key: Any, worker: int, shard: int, nbytes: float
  ) -> MessagePart:
    """Returns the part of a ticket from a shard, of so many bytes."""
    net = self.network
    hops = (
      Hop(self._out[shard], nbytes / net.port, net.latency),
      Hop(self._down[worker], nbytes / net.down, own=True),
    )
    return MessagePart(key, hops)

  def advance(
    self, now: float, part: MessagePart | None, line: Any = None
  ) -> list[Happening]:
    """Moves a part that has come to its next line, or one that is through on a
    shared line. Returns what happens next, for a call of this at its time; a
    part that has passed its last line is returned once more, `arrived`."""
    if line is None:
      return self._enter(now, part)
    due = line.next_end()
    if due is None or part is not due[1] or due[0] > now:
      return []  # another came since, and it will take longer
    line.leave(now)
    out = [self._leave(now, part, part._ready, now)]
    return out + self._tell(line)

  def _enter(self, now, part):
    line, length, _, _, own = part._hops[part._next]
    part._ready = ready = part._ready if part._next else now
    if isinstance(line, SharedLine):
      line.join(now, length, part)
      return self._tell(line)
    begin = line.take(ready, length)
    part.waited += 0.0 if own else begin - ready
    return [self._leave(now, part, begin, begin + length)]

  def _tell(self, line):
    due = line.next_end()
    return [] if due is None else [(*due, line)]

  def _leave(self, now, part, began, ended):
    """A part passes a line from `began` to `ended`: when it is at the next."""
    hops, at = part._hops, part._next
    hop = hops[at]
    if isinstance(hop.line, SharedLine):
      part.waited += max(ended - began - hop.length, 0.0)
    # The last byte may come later than the line would have it, where a line
    # before is slower.
    ended = max(ended, part._last_byte)
    part._next += 1
    part._ready = part._last_byte = ended + hop.after
    if not part.arrived and not hops[at + 1].whole:
      # It may begin as soon as it can go on without a gap.
      gap = max(ended - began - hops[at + 1].length, 0.0)
      part._ready = began + hop.after + gap
    return max(part._ready, now), part, None

  def received(self, waited: float) -> None:
    """Counts a received message, whose parts, and its ticket's, have spent so
    long in queues of shards."""
    self._messages += 1
    self._waited += waited

  def use(self, end: float) -> LinkUse:
    """Returns the use until a time above 0, that of the last message."""
    most = max(line.busy(end) for line in (*self._in, *self._out))
    service = max(line.busy(end) for line in self._service)
    parts = max(self._messages, 1) * self.network.shards
    return LinkUse(most / end, service / end, self._waited / parts)

  # Checkpoints.

  @property
  def _lines(self):
    return [*self._up, *self._down, *self._in, *self._out, *self._service]

  def number_of(self, line: Any) -> int | None:
    """Returns the number of a line for `line_of`; of None it is None."""
    return None if line is None else list(map(id, self._lines)).index(id(line))

  def line_of(self, number: int | None) -> Any:
    """Returns the line of a number."""
    return None if number is None else self._lines[number]

  def pack(self) -> list[Any]:
    """Returns all lines as JSON, with the keys of the parts on them."""
    lines = [line.pack() for line in self._lines]
    return [self._waited, self._messages, lines]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores what links of the same network have packed."""
    self._waited, self._messages, lines = packed
    for line, each in zip(self._lines, lines, strict=True):
      line.unpack(each, part_of)
