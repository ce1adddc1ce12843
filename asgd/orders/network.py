"""Networks: the times of messages and tickets between workers and shards.

A message passes its worker's link and then the ports of the shards, where it
may wait in a queue. A ticket takes the opposite way:

  worker --up--> latency --port--> service        a part for each shard
  worker <-down-- latency <-port-- shard

Each arrow, and the service of a shard, is a `Line`. A line carries one part
after the other, first come, first served. A part of b bytes occupies an arrow
for b / bandwidth. The arrows are cut-through, as in switches: the first bytes
of a part enter the next line while the last bytes leave this one. So a part
that meets no other takes latency + b / (the slower bandwidth). Parts that
arrive at a busy line wait: this is incast. With `incast="share"` the port of a
shard divides its bandwidth equally among the parts on it instead.

The time comes from the caller of `Links.advance`: simulated time
(`asgd.orders.play`) or wall-clock time (`asgd.live.links.throttled`).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asgd import checks

INCAST = "queue", "share"


class Network(NamedTuple):
  """The links between workers and shards; by default messages take no time.

  Bandwidths are in bytes per unit of time, the unit of the durations (seconds
  in a live run). Each direction of a link or a port has the full bandwidth.

  Example:
    >>> from asgd.orders.network import Network
    >>> Network(latency=0.5, port=100.0).is_instant
    False
  """

  latency: float = 0.0  # time of every message and ticket, one way
  up: float = math.inf  # bandwidth of a worker's link, to the shards
  down: float = math.inf  # bandwidth of a worker's link, from the shards
  port: float = math.inf  # bandwidth of a shard's port, each way
  service: float = 0.0  # time in which a shard processes one message
  shards: int = 1  # S; each has a part of each message and ticket
  incast: str = "queue"  # or "share": messages divide a port's bandwidth

  @property
  def is_instant(self) -> bool:
    """Whether nothing takes any time."""
    rates = self.up, self.down, self.port
    return not self.latency and not self.service and min(rates) == math.inf


def check(network: Network) -> Network:
  """Returns the network; raises ValueError for a time that is negative or not
  finite, a bandwidth that is not positive, or an unknown rule of incast."""
  for name in ("latency", "service"):
    checks.nonnegative(name, getattr(network, name))
  for name in ("up", "down", "port"):
    checks.real(
      *(name, getattr(network, name), lambda value: value > 0),
      "a bandwidth above 0, in bytes per unit of time",
      "; leave it out where it is no limit",
      finite=False,
    )
  checks.integer("shards", network.shards)
  checks.one_of("incast", network.incast, INCAST)
  return network


PartOf = Callable[[Any], Any]  # key of a part, read from JSON -> MessagePart


class Line:
  """Carries one part after the other, first come, first served."""

  def __init__(self) -> None:
    self.free_at = 0.0  # time at which all parts so far have passed
    self._busy = 0.0  # time taken by all parts so far

  def take(self, now: float, duration: float) -> float:
    """Adds a part that takes `duration`; returns the time when it begins."""
    start = max(now, self.free_at)
    self.free_at = start + duration
    self._busy += duration
    return start

  def busy_time(self, end: float) -> float:
    """Returns the time that the line was busy up to `end`, which must not be
    earlier than the time at which the last part began."""
    return self._busy - max(self.free_at - end, 0.0)

  def pack(self) -> list[Any]:
    """Returns the line as JSON."""
    return [self.free_at, self._busy]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores what was packed."""
    del part_of
    self.free_at, self._busy = packed


class SharedLine:
  """Carries all parts on it at the same time, each at an equal share.

  With n parts on the line each has 1 / n of the bandwidth. The line counts
  "served" time, which grows by time / n. A part that alone would take the time
  d, and that entered at served V, has passed at served V + d (processor
  sharing; Kleinrock, "Queueing systems", volume 2, 1976, section 4.4).
  """

  def __init__(self) -> None:
    # Served time, the time up to which it is counted, and the time in use.
    self._served = self._served_at = self._busy = 0.0
    self._entered = 0  # parts that entered so far
    # (served time at which the part has passed, its rank of entry, the part)
    self._heap: list[tuple[float, int, Any]] = []

  def _serve_until(self, now: float) -> None:
    """Serves the parts on the line until a time."""
    if self._heap:
      self._served += (now - self._served_at) / len(self._heap)
      self._busy += now - self._served_at
    self._served_at = now

  def join(self, now: float, duration: float, part: Any) -> None:
    """Adds a part that takes `duration` if no other part is on the line."""
    self._serve_until(now)
    heapq.heappush(self._heap, (self._served + duration, self._entered, part))
    self._entered += 1

  def next_end(self) -> tuple[float, Any] | None:
    """Returns (time, part) of the part that passes first if no other part
    enters before; None if the line is empty."""
    if not self._heap:
      return None
    served_at_end, _, part = self._heap[0]
    # Rounding may have served slightly more than the part needs.
    missing_service = max(served_at_end - self._served, 0.0)
    return self._served_at + missing_service * len(self._heap), part

  def leave(self, now: float) -> None:
    """Removes the part that has passed first."""
    self._serve_until(now)
    self._served = max(self._served, heapq.heappop(self._heap)[0])

  def busy_time(self, end: float) -> float:
    """Returns the time that the line was busy up to `end`, which must not be
    earlier than the time of the last `join` or `leave`."""
    return self._busy + (end - self._served_at if self._heap else 0.0)

  def pack(self) -> list[Any]:
    """Returns the line as JSON, with the keys of the parts on it."""
    heap = [
      [served_at_end, rank, part.key]
      for served_at_end, rank, part in self._heap
    ]
    return [self._served, self._served_at, self._busy, self._entered, heap]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores what was packed; `part_of` finds parts by their keys."""
    self._served, self._served_at, self._busy, self._entered, heap = packed
    self._heap = [
      (served_at_end, rank, part_of(key)) for served_at_end, rank, key in heap
    ]


class Hop(NamedTuple):
  """A line on the way of a part."""

  line: Any  # Line or SharedLine
  duration: float  # time that the part takes there if it meets no other
  latency: float = 0.0  # to the next line
  # Whether the line begins when the last byte has arrived, not the first.
  store_and_forward: bool = False
  is_worker_link: bool = False  # its queue is not counted as waiting


class MessagePart:
  """The part of a message or of a ticket that goes to or from one shard."""

  def __init__(self, key: Any, hops: Sequence[Hop]):
    self.key, self._hops = key, hops  # the caller's key
    self.waited = 0.0  # time in queues of shards so far
    self._next = 0  # index of the next hop
    self._ready = 0.0  # time at which the part may begin at the next hop
    self._last_byte = 0.0  # time at which its last byte is at the next hop

  @property
  def has_arrived(self) -> bool:
    """Whether the part has passed its last line."""
    return self._next == len(self._hops)

  def is_on(self, line: Any) -> bool:
    """Whether the part is on this shared line, or enters this `Line` next."""
    return not self.has_arrived and self._hops[self._next].line is line

  def pack(self) -> list[Any]:
    """Returns the progress as JSON."""
    return [self.waited, self._next, self._ready, self._last_byte]

  def unpack(self, packed: Sequence[Any]) -> None:
    """Restores the progress of a part with the same hops."""
    self.waited, self._next, self._ready, self._last_byte = packed


# (time, part, line). If `line` is None, `part` enters its next line, or has
# arrived. If `line` is a shared line, `part` leaves that line; the event is
# obsolete if another part has entered the line since.
LinkEvent = tuple[float, MessagePart, Any]


class LinkUse(NamedTuple):
  """The use of a network until a time."""

  utilisation: float  # share of the time in which the busiest port was busy
  service: float  # the same for the service of the busiest shard
  # Mean over messages and shards: time in queues of shards, of a shard's parts
  # of the message and of its ticket together.
  waited: float


class Links:
  """All lines between N workers and S shards, and the parts on them.

  Example:
    Two messages of 8 bytes meet at a port of 4 bytes per unit of time.

    >>> from asgd.orders.network import Links, Network
    >>> links = Links(Network(latency=1.0, port=4.0), workers=2)
    >>> for worker in range(2):
    ...   part = links.message_part("message", worker, shard=0, nbytes=8)
    ...   events = links.advance(0.0, part)
    ...   while not part.has_arrived:
    ...     (time, part, line), = events
    ...     events = links.advance(time, part, line)
    ...   print(events[0][0], part.waited)
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
    self._waited, self._messages = 0.0, 0  # sum over messages, and their count

  def message_part(
    self, key: Any, worker: int, shard: int, nbytes: float
  ) -> MessagePart:
    """Returns the part of a message for a shard; it has `nbytes` bytes."""
    net = self.network
    hops = (
      Hop(self._up[worker], nbytes / net.up, net.latency, is_worker_link=True),
      Hop(self._in[shard], nbytes / net.port),
      Hop(self._service[shard], net.service, store_and_forward=True),
    )
    return MessagePart(key, hops)

  def ticket_part(
    self, key: Any, worker: int, shard: int, nbytes: float
  ) -> MessagePart:
    """Returns the part of a ticket from a shard; it has `nbytes` bytes."""
    net = self.network
    hops = (
      Hop(self._out[shard], nbytes / net.port, net.latency),
      Hop(self._down[worker], nbytes / net.down, is_worker_link=True),
    )
    return MessagePart(key, hops)

  def advance(
    self, now: float, part: MessagePart, line: Any = None
  ) -> list[LinkEvent]:
    """Moves a part to its next line, or removes it from a shared line.

    Args:
      now: the time of the event.
      part, line: those of the event. `line` is None for a part that is sent.

    Returns:
      The events that follow. The caller passes each to `advance` at its time,
      except the event with `line` None of a part that `has_arrived`.
    """
    if line is None:
      return self._enter(now, part)
    next_end = line.next_end()
    if next_end is None or part is not next_end[1] or next_end[0] > now:
      return []  # another part has entered since: this one takes longer
    line.leave(now)
    events = [self._leave(now, part, part._ready, now)]
    return events + self._next_end(line)

  def _enter(self, now: float, part: MessagePart) -> list[LinkEvent]:
    """Puts a part on its next line; returns the events that follow."""
    line, duration, _, _, is_worker_link = part._hops[part._next]
    # Events may be late (`_leave` returns none before its `now`). After the
    # first hop, use the time at which the part was ready instead of `now`.
    part._ready = ready = part._ready if part._next else now
    if isinstance(line, SharedLine):
      line.join(now, duration, part)
      return self._next_end(line)
    start = line.take(ready, duration)
    # Waiting for a worker's link does not count: it is no queue at a shard.
    part.waited += 0.0 if is_worker_link else start - ready
    return [self._leave(now, part, start, start + duration)]

  def _next_end(self, line: SharedLine) -> list[LinkEvent]:
    """Returns the next event of a shared line, if a part is on the line."""
    next_end = line.next_end()
    return [] if next_end is None else [(*next_end, line)]

  def _leave(
    self, now: float, part: MessagePart, started: float, ended: float
  ) -> LinkEvent:
    """Returns the event in which a part enters its next line. The part was on
    the present line from `started` to `ended`."""
    hops, index = part._hops, part._next
    hop = hops[index]
    if isinstance(hop.line, SharedLine):
      part.waited += max(ended - started - hop.duration, 0.0)
    # If an earlier line is slower, the last byte arrives later than this line
    # alone would deliver it.
    ended = max(ended, part._last_byte)
    part._next += 1
    part._ready = part._last_byte = ended + hop.latency
    if not part.has_arrived and not hops[index + 1].store_and_forward:
      # Cut-through: begin on the next line as early as possible, but so late
      # that the next line never waits for bytes of the part.
      lead = max(ended - started - hops[index + 1].duration, 0.0)
      part._ready = started + hop.latency + lead
    return max(part._ready, now), part, None

  def count_received(self, waited: float) -> None:
    """Counts a received message. All parts of the message and of its ticket
    together have spent the time `waited` in queues of shards."""
    self._messages += 1
    self._waited += waited

  def use(self, end: float) -> LinkUse:
    """Returns the use until `end`, the time of the last message (above 0)."""
    port_busy = max(line.busy_time(end) for line in (*self._in, *self._out))
    service_busy = max(line.busy_time(end) for line in self._service)
    n_parts = max(self._messages, 1) * self.network.shards
    return LinkUse(port_busy / end, service_busy / end, self._waited / n_parts)

  # Checkpoints.

  @property
  def _lines(self):
    return [*self._up, *self._down, *self._in, *self._out, *self._service]

  def number_of(self, line: Any) -> int | None:
    """Returns the number by which `line_of` finds a line; None for None."""
    return None if line is None else list(map(id, self._lines)).index(id(line))

  def line_of(self, number: int | None) -> Any:
    """Returns the line with a number; None for None."""
    return None if number is None else self._lines[number]

  def pack(self) -> list[Any]:
    """Returns all lines as JSON, with the keys of the parts on them."""
    lines = [line.pack() for line in self._lines]
    return [self._waited, self._messages, lines]

  def unpack(self, packed: Sequence[Any], part_of: PartOf) -> None:
    """Restores the packed lines of a `Links` of the same network."""
    self._waited, self._messages, lines = packed
    for line, packed_line in zip(self._lines, lines, strict=True):
      line.unpack(packed_line, part_of)
