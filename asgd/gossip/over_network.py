"""Orders of peers over a network, on which messages take time.

  peer j --up--> latency --down--> peer i

The links are those of `asgd.orders.network`. The receiving peer takes the place
of a shard: the peer's download link is the shard's port. A peer sends a copy of
its message to each receiver, one after the other. The trace has the same kinds
of rows as that of `asgd.gossip.orders`; if messages take no time, it has the
same rows.
"""

import collections
import functools
import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import base, checks
from asgd.gossip.topology import Topology
from asgd.orders import trace as trace_lib
from asgd.orders.durations import Durations
from asgd.orders.network import Links, LinkUse, Network
from asgd.orders.trace import NO_SEQ, Event

_Act = Callable[[float], None]  # called with the time of its event


def _receivers(links: np.ndarray, peer: int) -> list[int]:
  """Returns the receivers of a peer's message, in the order of sending.

  `links`, bool[n, n], are those of the message: `[j, i]` is whether peer j
  receives from peer i."""
  receivers = np.flatnonzero(links[:, peer]).tolist()
  # Each peer begins with the next higher one. Otherwise all peers would send to
  # peer 0 first.
  return sorted(receivers, key=lambda j: (j - peer) % len(links))


class _EventQueue:
  """Events of peers in the order of their times, and the trace rows so far.

  Events at equal times keep the order in which they were added.
  """

  def __init__(
    self, durations: Durations, network: Network, peers: int, nbytes: float
  ):
    peer_network = network._replace(port=network.down, shards=peers)
    self.links, self._nbytes = Links(peer_network, peers), nbytes
    self._streams = [durations.stream(peer) for peer in range(peers)]
    self._heap: list[tuple[float, int, _Act]] = []
    self._count = 0
    self._n_jobs, self._next_seq = 0, [0] * peers  # of `start_job`
    self.rows: list[Event] = []

  def add_row(self, *fields: Any) -> None:
    """Adds a row: the fields of an Event."""
    self.rows.append(Event(*fields))

  def compute(self, time: float, peer: int, on_end: _Act) -> None:
    """Starts a job of a peer; `on_end` is called at the end of the job."""
    self._schedule(time + next(self._streams[peer]), on_end)

  def start_job(
    self, time: float, peer: int, on_end: Callable[[int, int, float], None]
  ) -> None:
    """Adds the row of a peer's next job, and starts the job. At its end calls
    on_end(seq, job, time). Jobs are numbered in the order of their starts."""
    seq, job = self._next_seq[peer], self._n_jobs
    self.add_row(time, peer, seq, job, base.SEND)
    self.compute(time, peer, functools.partial(on_end, seq, job))
    self._next_seq[peer], self._n_jobs = seq + 1, job + 1

  def carry(
    self, time: float, sender: int, receiver: int, on_arrival: _Act
  ) -> None:
    """Sends a message; `on_arrival` is called when the last byte arrives."""
    part = self.links.message_part(on_arrival, sender, receiver, self._nbytes)
    self._move(time, part=part, line=None)

  def _schedule(self, time: float, act: _Act) -> None:
    heapq.heappush(self._heap, (time, self._count, act))
    self._count += 1

  def _move(self, time: float, *, part: Any, line: Any) -> None:
    """Moves a part of a message to its next line, or to its receiver."""
    if line is None and part.has_arrived:
      self.links.count_received(part.waited)
      on_arrival = part.key
      on_arrival(time)
      return
    for next_time, next_part, next_line in self.links.advance(time, part, line):
      move = functools.partial(self._move, part=next_part, line=next_line)
      self._schedule(next_time, move)

  def run(self) -> None:
    """Processes events until none is left."""
    while self._heap:
      time, _, act = heapq.heappop(self._heap)
      act(time)

  def stop(self) -> None:
    """Drops all events: messages on their way do not arrive."""
    self._heap.clear()

  def result(self) -> tuple[base.Trace, LinkUse]:
    """Returns the trace and the use of the links."""
    end = max(row.time for row in self.rows)
    use = self.links.use(end)
    # `Links.use` averages over a part for each shard. Here a message has one
    # part, for its receiver: undo the division by the number of shards.
    waited = use.waited * self.links.network.shards
    return trace_lib.from_events(self.rows), use._replace(waited=waited)


def rounds(
  durations: Durations, topology: Topology, network: Network, *, nbytes: float,
  messages: int, put_first: bool = False, every: int = 1
) -> tuple[base.Trace, LinkUse]:
  """Rounds over a network: a peer mixes when all its neighbours' messages have
  arrived.

  Args:
    durations, topology, messages, put_first, every: as in
      `asgd.gossip.orders.rounds`.
    network: the links of peers; times in the unit of the durations.
    nbytes: bytes of a message.

  Returns:
    A Trace, and the use of the links until its end.

  Raises:
    ValueError: for messages that do not make complete rounds, or `every` below
      1.

  Example:
    Messages of 8 bytes take 0.5 on the way, and 8 / 16 on a link.

    >>> from asgd import base, orders
    >>> from asgd.gossip import over_network, topologies
    >>> from asgd.orders.network import Network
    >>> trace, use = over_network.rounds(
    ...   orders.durations.constant(), topologies.full(2),
    ...   Network(latency=0.5, up=16.0, down=16.0), nbytes=8, messages=4,
    ... )
    >>> trace.time[trace.action == base.MIX].tolist()
    [2.0, 2.0, 4.0, 4.0]
  """
  n = topology.workers
  checks.whole("messages", messages)
  checks.multiple(messages, "messages", n, "rounds of {} peers")
  checks.whole("every", every)
  queue = _EventQueue(durations, network, n, nbytes)
  # By peer: its round, and whether it has ended the job of that round.
  round_of, job_ended = [0] * n, [False] * n
  # (receiver, message number) -> messages of that number that have arrived.
  arrived: collections.Counter[Any] = collections.Counter()

  def start(i, time):
    k = round_of[i]  # job k n + i is that of peer i in round k
    queue.add_row(time, i, k, k * n + i, base.SEND)
    if put_first:
      put(i, time)
    queue.compute(time, i, functools.partial(end, i))

  def put(i, time):
    m, wait = divmod(round_of[i], every)
    if wait:  # message m is put in round m * every
      return
    queue.add_row(time, i, m, m, base.PUT)
    for j in _receivers(topology.links[m % topology.period], i):
      queue.carry(time, i, j, functools.partial(arrive, j, m))

  def end(i, time):
    k = round_of[i]
    queue.add_row(time, i, k, k * n + i, base.RECEIVE)
    job_ended[i] = True
    if not put_first:
      put(i, time)
    proceed(i, time)

  def arrive(i, m, time):
    arrived[i, m] += 1
    proceed(i, time)

  def proceed(i, time):
    """Ends the round of a peer, if it has all that it waits for."""
    if not job_ended[i]:
      return
    ended_rounds = round_of[i] + 1
    if not ended_rounds % every:  # the last round of message m: mix it
      m = ended_rounds // every - 1
      senders = topology.neighbours(i, m)
      if arrived[i, m] < len(senders):
        return
      for j in senders:
        queue.add_row(time, i, m, j, base.TAKE)
      queue.add_row(time, i, NO_SEQ, m, base.MIX)
    job_ended[i] = False
    round_of[i] += 1
    if round_of[i] < messages // n:
      start(i, time)

  for i in range(n):
    start(i, 0.0)
  queue.run()
  return queue.result()


def pairs(
  durations: Durations, topology: Topology, network: Network, *, nbytes: float,
  messages: int, seed: int = 0
) -> tuple[base.Trace, LinkUse]:
  """Pairs over a network: a peer that ends a job sends its parameters to one
  neighbour, which answers with its own parameters.

  Both peers average at the time when the answer arrives. Then the first peer
  starts its next job. The neighbour computes all the while.

  Args:
    durations, topology, messages, seed: as in `asgd.gossip.orders.pairs`.
    network: the links of peers; times in the unit of the durations.
    nbytes: bytes of a message.

  Returns:
    A Trace, and the use of the links until its end.

  Raises:
    ValueError: for messages that are no whole number.

  Example:
    >>> from asgd import base, orders
    >>> from asgd.gossip import over_network, topologies
    >>> from asgd.orders.network import Network
    >>> trace, use = over_network.pairs(
    ...   orders.durations.constant(slowdown=[1, 9]), topologies.full(2),
    ...   Network(latency=0.5), nbytes=8, messages=2,
    ... )
    >>> trace.time[trace.action == base.RECEIVE].tolist()  # a job, both ways
    [2.0, 4.0]
  """
  checks.whole("messages", messages)
  n = topology.workers
  queue = _EventQueue(durations, network, n, nbytes)
  draws = [np.random.default_rng((seed, peer, n)) for peer in range(n)]
  neighbours = [np.flatnonzero(row).tolist() for row in topology.union]
  puts, received = [0] * n, 0

  def start(i, time):
    queue.start_job(time, i, functools.partial(end, i))

  def end(i, seq, job, time):
    # The parameters of both peers travel, there and back; then both mix.
    candidates = neighbours[i]
    neighbour = candidates[int(draws[i].integers(len(candidates)))]
    meet_at = functools.partial(meet, i, neighbour, seq, job)
    reply = functools.partial(
      queue.carry, sender=neighbour, receiver=i, on_arrival=meet_at
    )
    queue.carry(time, i, neighbour, reply)

  def meet(i, neighbour, seq, job, time):
    nonlocal received
    # [1] Both put their present parameters.
    for member in (i, neighbour):
      queue.add_row(time, member, puts[member], 0, base.PUT)
    # [2] Each takes the other's message and mixes it.
    for member, partner in ((i, neighbour), (neighbour, i)):
      queue.add_row(time, member, puts[partner], partner, base.TAKE)
      queue.add_row(time, member, NO_SEQ, 0, base.MIX)
    for member in (i, neighbour):
      puts[member] += 1
    # [3] The peer applies its job, and starts the next one.
    queue.add_row(time, i, seq, job, base.RECEIVE)
    received += 1
    if received < messages:
      start(i, time)
    else:
      queue.stop()

  for i in range(n):
    start(i, 0.0)
  queue.run()
  return queue.result()


def arrivals(
  durations: Durations, topology: Topology, network: Network, *, nbytes: float,
  messages: int
) -> tuple[base.Trace, LinkUse]:
  """Arrivals over a network: a peer that ends a job sends its message to all
  its receivers, and starts the next job. Each receiver mixes the message at the
  time when it arrives.

  Messages that are on their way when the last job ends arrive, too.

  Args:
    durations, topology, messages: as of `asgd.gossip.orders.arrivals`.
    network: the links of peers, in the durations' unit.
    nbytes: of a message.

  Returns:
    A Trace, and the use of the links until its end.

  Raises:
    ValueError: for messages that are no whole number.

  Example:
    Messages take 0.5 on the way, and no peer waits for one.

    >>> from asgd import base, orders
    >>> from asgd.gossip import over_network, topologies
    >>> from asgd.orders.network import Network
    >>> trace, use = over_network.arrivals(
    ...   orders.durations.constant(), topologies.full(2),
    ...   Network(latency=0.5), nbytes=8, messages=4,
    ... )
    >>> trace.time[trace.action == base.RECEIVE].tolist()
    [1.0, 1.0, 2.0, 2.0]
    >>> trace.time[trace.action == base.TAKE].tolist()
    [1.5, 1.5, 2.5, 2.5]
  """
  checks.whole("messages", messages)
  n = topology.workers
  queue = _EventQueue(durations, network, n, nbytes)
  received = 0

  def start(i, time):
    queue.start_job(time, i, functools.partial(end, i))

  def end(i, seq, job, time):
    nonlocal received
    if received == messages:  # the job stays open
      return
    queue.add_row(time, i, seq, job, base.RECEIVE)
    queue.add_row(time, i, seq, seq, base.PUT)
    queue.add_row(time, i, NO_SEQ, seq, base.MIX)
    received += 1
    for j in _receivers(topology.union, i):
      queue.carry(time, i, j, functools.partial(arrive, j, i, seq))
    if received < messages:
      start(i, time)

  def arrive(j, sender, seq, time):
    queue.add_row(time, j, seq, sender, base.TAKE)
    queue.add_row(time, j, NO_SEQ, seq, base.MIX)

  for i in range(n):
    start(i, 0.0)
  queue.run()
  return queue.result()
