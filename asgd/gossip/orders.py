"""Makes the orders of gossip: traces of when peers work, put, take and mix.

`asgd.gossip.peer` explains the rows. Jobs take time; messages take none.

Letters:
  n  peers
  i  a peer; as a receiver, it takes messages
  j  a neighbour of i, the sender of a message
  k  a round
  m  the number of a message of a peer, 0, 1, ...
"""

import collections
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asgd import base, checks
from asgd.gossip.peer import Rule
from asgd.gossip.topology import Topology
from asgd.orders import trace as trace_lib
from asgd.orders.durations import Durations
from asgd.orders.trace import NO_SEQ, Event

ROUNDS, PAIRS, ARRIVALS = "rounds", "pairs", "arrivals"


def rounds(
  durations: Durations,
  topology: Topology,
  *,
  messages: int,
  put_first: bool = False,
  every: int = 1,
) -> base.Trace:
  """Rounds: each peer does a job, then mixes the messages of its neighbours.

  A peer waits only for the messages of its neighbours, not for the end of their
  rounds. With `every` = e it may be up to 2 e - 1 rounds ahead of a neighbour.
  The rows of peer i in round k are send, receive, put, takes and mix. With
  `put_first` they are send, put, receive, takes and mix: the peer then puts the
  parameters on which it computes the job, and the message travels during the
  job. The job of peer i in round k has the number k n + i.

  With `every` = e a peer puts message m in round m e. At the end of round
  (m + 1) e - 1 the peer takes and mixes the messages m of its neighbours. The
  number m selects the topology's matrix. A put row has m in `seq` and in `job`,
  a take row in `seq`, a mix row in `job`.

  Args:
    durations: how long each job takes.
    topology: which peers take the messages of each peer.
    messages: jobs of all peers together, a multiple of n.
    put_first: whether a peer puts before its job.
    every: e, the rounds from one put of a peer to its next put. If the number
      of rounds is no multiple of e, no peer takes the last messages.

  Raises:
    ValueError: for `messages` that do not make complete rounds, or `every`
      below 1.

  Example:
    Two peers; the second one is half as fast.

    >>> from asgd import orders
    >>> from asgd.gossip import orders as peers, topologies
    >>> clock = orders.durations.constant(slowdown=[1, 2])
    >>> trace = peers.rounds(clock, topologies.full(2), messages=2)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,receive
    1.0,0,0,0,put
    2.0,1,0,1,receive
    2.0,1,0,0,put
    2.0,0,0,1,take
    2.0,0,-1,0,mix
    2.0,1,0,0,take
    2.0,1,-1,0,mix
  """
  n = topology.workers
  checks.whole("messages", messages)
  checks.multiple(messages, "messages", n, "rounds of {} peers")
  checks.whole("every", every)
  streams = [durations.stream(peer) for peer in range(n)]
  start, rows = np.zeros(n), []
  put_times = start  # times at which the peers put their last messages
  for k in range(messages // n):
    # [1] Times: a peer's round ends when its job has ended and all neighbours
    # have put their messages.
    job_ends = start + np.array([next(stream) for stream in streams])
    m, puts, mixes = k // every, k % every == 0, (k + 1) % every == 0
    if puts:
      put_times = start if put_first else job_ends
    end = job_ends
    if mixes:
      links = topology.links[m % topology.period]
      end = np.maximum(job_ends, np.where(links, put_times[None], 0.0).max(1))

    # [2] Rows, as (time, round, rank of the action, peer, sender, event). The
    # first five entries are the sort key. Ranks: send 0, put 1 or 3, receive 2,
    # take and mix 4. The sender n puts a mix after its takes.
    for i in range(n):
      job = k * n + i
      rows.append((start[i], k, 0, i, 0, (i, k, job, base.SEND)))
      if puts:
        order = 1 if put_first else 3
        rows.append((put_times[i], k, order, i, 0, (i, m, m, base.PUT)))
      rows.append((job_ends[i], k, 2, i, 0, (i, k, job, base.RECEIVE)))
      if mixes:
        for j in topology.neighbours(i, m):
          rows.append((end[i], k, 4, i, j, (i, m, j, base.TAKE)))
        rows.append((end[i], k, 4, i, n, (i, NO_SEQ, m, base.MIX)))
    start = end
  # Peers may be rounds apart, so rows of different rounds interleave.
  rows.sort(key=lambda row: row[:5])
  return trace_lib.from_events(Event(float(row[0]), *row[5]) for row in rows)


def pairs(
  durations: Durations, topology: Topology, *, messages: int, seed: int = 0
) -> base.Trace:
  """Pairs: a peer that ends a job meets one neighbour; other peers do not wait.

  Both peers put, take and mix at once, even if the neighbour is in the middle
  of a job. Then the peer that has ended its job applies the job's gradient to
  its present parameters, and starts its next job. Jobs are numbered in the
  order of their sends. Put and take rows have the sender's message number m in
  `seq`.

  Args:
    durations: how long each job takes.
    topology: which peers may meet. A peer meets each of its neighbours with
      equal probability.
    messages: jobs of all peers together.
    seed: 0 or more. The draws of a peer's neighbours depend on the seed, the
      peer's index and n.

  Returns:
    A Trace. At its end n - 1 jobs are open.

  Raises:
    ValueError: for a topology with a link in one direction only.

  Source:
    Lian et al., "Asynchronous decentralized parallel stochastic gradient
    descent", ICML 2018, arXiv:1710.06952, algorithm 1.

  Example:
    >>> from asgd import orders
    >>> from asgd.gossip import orders as peers, topologies
    >>> clock = orders.durations.constant(slowdown=[1, 3])
    >>> trace = peers.pairs(clock, topologies.ring(2), messages=1)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,put
    1.0,1,0,0,put
    1.0,0,0,1,take
    1.0,0,-1,0,mix
    1.0,1,0,0,take
    1.0,1,-1,0,mix
    1.0,0,0,0,receive
  """
  checks.whole("messages", messages)
  check_pairs(topology)
  n = topology.workers
  draws = [np.random.default_rng((seed, peer, n)) for peer in range(n)]
  neighbours = [np.flatnonzero(row).tolist() for row in topology.union]
  jobs, puts = _Jobs(durations, n), [0] * n
  rows = jobs.rows
  for count in range(messages):
    time, job, peer, seq = jobs.next_end()
    near = neighbours[peer]
    neighbour = near[int(draws[peer].integers(len(near)))]
    for member in (peer, neighbour):
      rows.append(Event(time, member, puts[member], 0, base.PUT))
    for member, partner in ((peer, neighbour), (neighbour, peer)):
      rows.append(Event(time, member, puts[partner], partner, base.TAKE))
      rows.append(Event(time, member, NO_SEQ, 0, base.MIX))
    for member in (peer, neighbour):
      puts[member] += 1
    rows.append(Event(time, peer, seq, job, base.RECEIVE))
    # No job starts after the last message.
    if count + 1 < messages:
      jobs.start(peer, time)
  return trace_lib.from_events(rows)


def arrivals(
  durations: Durations, topology: Topology, *, messages: int
) -> base.Trace:
  """Arrivals: a peer that ends a job sends a message to all its receivers,
  which mix the message at once, even while they compute. No peer ever waits.

  The peer applies its job, puts the message, and mixes its own message: the
  rule `share` changes parameters only by mixes. Then each receiver takes and
  mixes the message, and the sender starts its next job. Jobs are numbered in
  the order of their sends. Put and mix rows have the sender's message number m
  in `job`.

  Args:
    durations: how long each job takes.
    topology: which peers take the messages of each peer.
    messages: jobs of all peers together.

  Returns:
    A Trace. At its end n - 1 jobs are open.

  Example:
    >>> from asgd import orders
    >>> from asgd.gossip import orders as peers, topologies
    >>> clock = orders.durations.constant(slowdown=[1, 3])
    >>> trace = peers.arrivals(clock, topologies.full(2), messages=1)
    >>> print(orders.dump(trace), end="")
    time,worker,seq,job,action
    0.0,0,0,0,send
    0.0,1,0,1,send
    1.0,0,0,0,receive
    1.0,0,0,0,put
    1.0,0,-1,0,mix
    1.0,1,0,0,take
    1.0,1,-1,0,mix
  """
  checks.whole("messages", messages)
  jobs = _Jobs(durations, topology.workers)
  for count in range(messages):
    time, job, peer, seq = jobs.next_end()
    jobs.rows += [
      Event(time, peer, seq, job, base.RECEIVE),
      Event(time, peer, seq, seq, base.PUT),
      Event(time, peer, NO_SEQ, seq, base.MIX),
    ]
    for receiver in np.flatnonzero(topology.union[:, peer]).tolist():
      jobs.rows.append(Event(time, receiver, seq, peer, base.TAKE))
      jobs.rows.append(Event(time, receiver, NO_SEQ, seq, base.MIX))
    # No job starts after the last message.
    if count + 1 < messages:
      jobs.start(peer, time)
  return trace_lib.from_events(jobs.rows)


class _Jobs:
  """Simulates the jobs of peers that never wait. `rows` collects the rows of
  the trace: this class adds the send rows, the caller all other rows."""

  def __init__(self, durations: Durations, peers: int):
    """Starts the first job of each peer."""
    self.rows: list[Event] = []
    self._streams = [durations.stream(peer) for peer in range(peers)]
    # (end, job, peer, seq); ties go by job.
    self._running: list[tuple[float, int, int, int]] = []
    self._count, self._seqs = 0, [0] * peers
    for peer in range(peers):
      self.start(peer, 0.0)

  def start(self, peer: int, time: float) -> None:
    """Starts the next job of a peer."""
    job, seq = self._count, self._seqs[peer]
    self.rows.append(Event(time, peer, seq, job, base.SEND))
    end = time + next(self._streams[peer])
    heapq.heappush(self._running, (end, job, peer, seq))
    self._count, self._seqs[peer] = job + 1, seq + 1

  def next_end(self) -> tuple[float, int, int, int]:
    """Returns (time, job, peer, seq) of the next job that ends."""
    return heapq.heappop(self._running)


def check_pairs(topology: Topology) -> None:
  """Raises ValueError if a link of the topology has one direction only."""
  one_way = np.argwhere(topology.union & ~topology.union.T)
  if len(one_way):
    receiver, sender = one_way[0].tolist()
    raise ValueError(
      f"the topology {topology.name!r} is directed (peer {receiver} receives"
      f" from {sender}, but {sender} does not receive from {receiver}), and two"
      " peers that meet send each other messages: use an undirected topology,"
      " such as ring, or sgp"
    )


def merge(traces: Sequence[base.Trace | Iterable[Event]]) -> base.Trace:
  """Joins the traces of peers, each with its own rows, into one trace.

  Each take follows the put of its message, and the rows of one peer keep their
  order. Otherwise rows are ordered by time. A row that is earlier than the row
  before it gets the time of that row, so clocks that differ cannot break the
  order.

  Args:
    traces: the rows of each peer, as a Trace or as events; the peers in any
      order.

  Returns:
    A Trace of all rows.

  Raises:
    ValueError: if a peer took a message that no peer put, or if takes wait for
      one another in a circle.

  Example:
    The clock of peer 1 is slow.

    >>> from asgd import gossip, orders
    >>> from asgd.gossip import topologies
    >>> clock = orders.durations.constant()
    >>> trace = gossip.orders.rounds(clock, topologies.full(2), messages=2)
    >>> one, two = (
    ...   trace._replace(**{k: v[trace.worker == i] for k, v in
    ...     trace._asdict().items()}) for i in range(2)
    ... )
    >>> merged = gossip.orders.merge([one, two._replace(time=two.time - 0.5)])
    >>> orders.check(merged), len(merged.time)
    (2, 10)
  """
  queues = [
    collections.deque(trace_lib.events(t) if isinstance(t, base.Trace) else t)
    for t in traces
  ]
  merged_puts: set[tuple[int, int]] = set()  # (sender, seq) of merged puts
  # (sender, seq) -> indices of queues that begin with a take of that message.
  waiting: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
  ready: list[tuple[float, int]] = []  # (time, index) of first rows

  def offer(index: int) -> None:
    if not queues[index]:
      return
    event = queues[index][0]
    key = event.job, event.seq
    if event.action in trace_lib.TAKES and key not in merged_puts:
      waiting[key].append(index)
    else:
      heapq.heappush(ready, (event.time, index))

  rows: list[Event] = []
  for index in range(len(queues)):
    offer(index)
  time = 0.0
  while ready:
    _, index = heapq.heappop(ready)
    event = queues[index].popleft()
    time = max(time, event.time)  # the clock of the event's peer may be slow
    rows.append(event._replace(time=time))
    if event.action in trace_lib.PUTS:
      merged_puts.add(event.key)
      for waiting_index in waiting.pop(event.key, ()):
        offer(waiting_index)
    offer(index)
  heads = [queue[0] for queue in queues if queue]
  if heads:
    later = {e.key for q in queues for e in q if e.action in trace_lib.PUTS}
    # Report a take whose message no trace puts: other takes wait for puts
    # behind this take. If all messages are put, the takes wait in a circle;
    # then report the first take.
    lacks = [event for event in heads if (event.job, event.seq) not in later]
    event = (lacks or heads)[0]
    raise ValueError(
      "the traces of peers do not belong together: peer"
      f" {event.worker} takes message {event.seq} of peer {event.job}, which"
      f" peer {event.job} did not put, at {event.format()}"
      f" ({trace_lib.HEADER})"
    )
  return trace_lib.from_events(rows)


class Gossip(NamedTuple):
  """The choices of a gossip algorithm: rule, topology and order."""

  rule: Rule
  topology: Topology
  # When a peer that ends a job exchanges messages:
  #   ROUNDS    with all its neighbours, once per `every` rounds
  #   PAIRS     with one neighbour, at once
  #   ARRIVALS  it sends one message, and the receivers add it on arrival
  order: str = ROUNDS
  put_first: bool = False  # rounds: put before the job, not after it
  # ROUNDS: a peer puts a message in each `every`-th round, and mixes at the end
  # of the round before its next put.
  every: int = 1
  compressed: bool = False  # whether a codec compresses the messages

  def weight(self, round: int, receiver: int, sender: int) -> float:
    """Returns the weight that a receiver gives a sender's message. `round` is
    the number m of the message, which counts the rounds that have puts."""
    if self.order != ROUNDS:
      return 0.5 if self.order == PAIRS else 1.0
    return self.topology.weight(round, receiver, sender)

  def keep(self, round: int, peer: int) -> float:
    """Returns the weight that a peer gives its own parameters when it puts or
    mixes message number `round`."""
    return self.weight(round, peer, peer)

  def trace(
    self, durations: Durations, *, messages: int, seed: int = 0
  ) -> base.Trace:
    """Returns the order of a run as a trace.

    Args:
      durations: how long each job takes.
      messages: jobs of all peers together; with ROUNDS a multiple of n.
      seed: 0 or more, for the draws of neighbours; only PAIRS uses it.
    """
    if self.order == PAIRS:
      return pairs(durations, self.topology, messages=messages, seed=seed)
    if self.order == ARRIVALS:
      return arrivals(durations, self.topology, messages=messages)
    return rounds(
      durations,
      self.topology,
      messages=messages,
      put_first=self.put_first,
      every=self.every,
    )
