"""Makes the orders of gossip: traces of when peers work, put, take and mix.

`asgd.gossip.peer` explains the rows. Jobs take time. Messages take no time, or
that of the links of `asgd.gossip.over_network`.

Letters:
  n  peers
  i  a peer; as a receiver, it takes messages
  j  a neighbour of i, the sender of a message
  k  a round
  m  the number of a message of a peer, 0, 1, ...
"""

import collections
import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import base, checks
from asgd.gossip.over_network import EventQueue, PeerNetwork
from asgd.gossip.peer import Rule
from asgd.gossip.round_events import RoundEvents
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
  links: PeerNetwork | None = None,
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
    links: the links of messages; None: messages take no time. A peer mixes when
      all its neighbours' messages have arrived.

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
  jobs = _begin_rounds(
    durations, topology, messages=messages, put_first=put_first, every=every,
    links=links,
  )
  jobs.queue.run()
  rows = jobs.queue.rows
  if links is None:  # peers may be rounds apart, and their rows interleave
    rows = [row for _, row in sorted(zip(jobs.keys, rows, strict=True))]
  return trace_lib.from_events(rows)


def _begin_rounds(
  durations: Durations, topology: Topology, *, messages: int,
  put_first: bool = False, every: int = 1, links: PeerNetwork | None = None,
) -> RoundEvents:
  """Returns the events of `rounds`, before the first one."""
  n = topology.workers
  checks.integer("messages", messages)
  checks.multiple(messages, "messages", n, "rounds of {} peers")
  checks.integer("every", every)
  queue = EventQueue(durations, n, links)
  jobs = RoundEvents(queue, topology, messages // n, put_first, every)
  for i in range(n):
    queue.at(0.0, functools.partial(jobs.start, i))
  return jobs


def pairs(
  durations: Durations, topology: Topology, *, messages: int, seed: int = 0,
  links: PeerNetwork | None = None
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
    links: the links of messages; None: messages take no time. The parameters of
      the peer travel to the neighbour, and then those of the neighbour travel
      back. When these arrive, both mix; the neighbour computes meanwhile.

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
  queue = _begin_pairs(
    durations, topology, messages=messages, seed=seed, links=links
  )
  queue.run()
  return trace_lib.from_events(queue.rows)


def _begin_pairs(
  durations: Durations, topology: Topology, *, messages: int, seed: int = 0,
  links: PeerNetwork | None = None,
) -> EventQueue:
  """Returns the events of `pairs`, before the first one."""
  checks.integer("messages", messages)
  check_pairs(topology)
  n = topology.workers
  queue = EventQueue(durations, n, links)
  rngs = [np.random.default_rng((seed, peer, n)) for peer in range(n)]
  neighbours = [np.flatnonzero(row).tolist() for row in topology.union]
  puts, received = [0] * n, 0

  def start(i, time):
    # The peer receives its job when it has met a neighbour, not at the end.
    queue.start_job(time, i, functools.partial(end, i), receives=False)

  def end(i, seq, job, time):
    # The parameters of both peers travel, there and back; then both mix.
    candidates = neighbours[i]
    neighbour = candidates[int(rngs[i].integers(len(candidates)))]
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
      queue.clear()

  for i in range(n):
    queue.at(0.0, functools.partial(start, i))
  return queue


def arrivals(
  durations: Durations, topology: Topology, *, messages: int,
  links: PeerNetwork | None = None
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
    links: the links of messages; None: messages take no time. Messages that are
      in transit when the last job ends arrive, too.

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
  queue = _begin_arrivals(
    durations, topology, messages=messages, links=links
  )
  queue.run()
  return trace_lib.from_events(queue.rows)


def _begin_arrivals(
  durations: Durations, topology: Topology, *, messages: int,
  links: PeerNetwork | None = None,
) -> EventQueue:
  """Returns the events of `arrivals`, before the first one."""
  checks.integer("messages", messages)
  n = topology.workers
  queue = EventQueue(durations, n, links)
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
    for j in queue.receivers(topology.union, i):
      arrive_at = functools.partial(arrive, j, i, seq)
      queue.carry(time, i, j, arrive_at, seq=seq)
    if received < messages:
      start(i, time)

  def arrive(j, sender, seq, time):
    queue.add_row(time, j, seq, sender, base.TAKE)
    queue.add_row(time, j, NO_SEQ, seq, base.MIX)

  for i in range(n):
    queue.at(0.0, functools.partial(start, i))
  return queue


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

  def queue_first_row(index: int) -> None:
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
    queue_first_row(index)
  time = 0.0
  while ready:
    _, index = heapq.heappop(ready)
    event = queues[index].popleft()
    time = max(time, event.time)  # the clock of the event's peer may be slow
    rows.append(event._replace(time=time))
    if event.action in trace_lib.PUTS:
      merged_puts.add(event.key)
      for waiting_index in waiting.pop(event.key, ()):
        queue_first_row(waiting_index)
    queue_first_row(index)
  blocked_rows = [queue[0] for queue in queues if queue]
  if blocked_rows:
    later_puts = {
      e.key for q in queues for e in q if e.action in trace_lib.PUTS
    }
    # Report a take of a message that no trace puts: other takes wait for puts
    # behind this take. If all messages are put, the takes wait in a circle;
    # then report the first take.
    unput_takes = [
      event
      for event in blocked_rows
      if (event.job, event.seq) not in later_puts
    ]
    event = (unput_takes or blocked_rows)[0]
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
    self, durations: Durations, *, messages: int, seed: int = 0,
    links: PeerNetwork | None = None
  ) -> base.Trace:
    """Returns the order of a run as a trace.

    Args:
      durations: how long each job takes.
      messages: jobs of all peers together; with ROUNDS a multiple of n.
      seed: 0 or more, for the draws of neighbours; only PAIRS uses it.
      links: the links of messages; None: messages take no time.
    """
    makers: dict[str, Callable[..., base.Trace]] = {
      ROUNDS: rounds, PAIRS: pairs, ARRIVALS: arrivals
    }
    options = self._options(messages, seed, links)
    return makers[self.order](durations, self.topology, **options)

  def begin(
    self, durations: Durations, *, messages: int, seed: int = 0,
    links: PeerNetwork
  ) -> EventQueue:
    """Returns the events of a run, before the first one. The queue's `advance`
    adds the rows of `trace`, which has the same arguments."""
    options = self._options(messages, seed, links)
    if self.order == ROUNDS:
      return _begin_rounds(durations, self.topology, **options).queue
    begin = _begin_pairs if self.order == PAIRS else _begin_arrivals
    return begin(durations, self.topology, **options)

  def _options(
    self, messages: int, seed: int, links: PeerNetwork | None
  ) -> dict[str, Any]:
    """Returns the options of the function that makes the order."""
    options: dict[str, Any] = {"messages": messages, "links": links}
    if self.order == ROUNDS:
      options |= {"put_first": self.put_first, "every": self.every}
    elif self.order == PAIRS:
      options["seed"] = seed
    return options

  def takers(self, put: Event) -> int:
    """Returns how many peers take the message of a PUT row."""
    if self.order == PAIRS:
      return 1
    links = self.topology.union
    if self.order == ROUNDS:  # `job` is the number of the message
      links = self.topology.links[put.job % self.topology.period]
    return int(links[:, put.worker].sum())
