"""Simulates a protocol event by event, with durations of jobs and a network.
The result is an order.

  grant --> ticket in transit --> compute --> message in transit --> receive

If no worker joins or leaves and messages take no time, `asgd.orders.columns`
makes the same rows faster.

A ticket has the version at the time of its grant, and its SEND row has that
time. A RECEIVE row has the time at which the last shard has processed its part
of the message. To grant a job on a kept ticket, the server sends a message
without parameters, which takes only the latency. All shards apply messages in
the order of shard 0, the lead.
"""

import array
import collections
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from asgd import base, checks
from asgd.orders import columns, protocol
from asgd.orders.durations import Durations
from asgd.orders.network import Links, MessagePart, Network
from asgd.orders.trace import Event, from_events


class Sizes(NamedTuple):
  """Bytes of messages and tickets, for each of S shards.

  `up` is called when a job's message is computed. `down` is called when a job's
  ticket is sent: the job's SEND row is then the last of `Play.rows`. A kept
  ticket has no bytes. Sizes may depend on the contents.
  """

  up: Callable[[int, int], Sequence[float]]  # (worker, seq) -> S
  down: Callable[[int, int], Sequence[float]]  # (worker, seq) -> S


def fixed(up: Sequence[float], down: Sequence[float]) -> Sizes:
  """Returns Sizes with the same bytes for all messages and for all tickets."""
  return Sizes(lambda worker, seq: up, lambda worker, seq: down)


class _Job:
  """A job from its grant until its message is received."""

  __slots__ = (
    *("worker", "seq", "number", "sort_key", "duration", "parts"),
    *("parts_left", "is_computed"),
  )

  def __init__(self, grant: protocol.Grant, duration: float):
    self.worker, self.seq, self.number = grant.worker, grant.seq, grant.job
    self.sort_key = grant.job, grant.worker  # of events at one time
    self.duration = duration  # time that it takes to compute
    self.parts: list[MessagePart] = []  # the ticket's, then the message's too
    self.parts_left = 0  # parts in transit
    self.is_computed = False


class Play:
  """Plays a protocol event by event.

  Args:
    rules: the protocol.
    streams: for each of N workers, the durations of its jobs.
    join_times: time at which each worker joins. None: all join at time 0, and
      the trace has no rows of joins.
    jobs: number of jobs; None: no limit.
    network: links between workers and shards; with None, messages take no time.
    sizes: bytes of messages and tickets; with None, they have no bytes.

  Attributes:
    rows: rows of the trace so far.
    now: time of the last event.

  Raises:
    ValueError: for rules or a network out of range.

  Example:
    One worker. A job takes 3, its ticket and its message 1 each.

    >>> import itertools
    >>> from asgd.orders import network, play, protocol
    >>> wire = network.Network(latency=1.0)
    >>> streams = [itertools.repeat(3.0)]
    >>> simulation = play.Play(protocol.Rules(), streams, network=wire)
    >>> simulation.until(2)
    >>> [row.time for row in simulation.rows]
    [0.0, 5.0, 5.0, 10.0]
  """

  def __init__(
    self, rules: protocol.Rules, streams: Sequence[Iterator[float]],
    join_times: Sequence[float] | None = None, *, jobs: int | None = None,
    network: Network | None = None, sizes: Sizes | None = None,
  ):
    workers = len(streams)
    self.rows: list[Event] = []
    self._dispatcher = protocol.Dispatcher(
      rules, jobs=jobs, log=self.rows.append
    )
    self.now = 0.0
    self.links = Links(network or Network(), workers)
    no_bytes = [0.0] * self.links.network.shards
    self._sizes = sizes or fixed(no_bytes, no_bytes)
    self._is_instant = self.links.network.is_instant
    self._streams, self._repeats_late_jobs = streams, rules.late < math.inf
    # Worker -> time at which it will have ended all jobs that it has begun.
    self._free_at = list(join_times or [0.0] * workers)
    # Worker -> granted jobs that have not begun; they begin in this order.
    self._granted: list[collections.deque[_Job]] = [
      collections.deque() for _ in range(workers)
    ]
    self._jobs: dict[tuple[int, int], _Job] = {}
    # Worker -> start and end of each computation, one after the other.
    self._compute_times = [array.array("d") for _ in range(workers)]
    self._heap: list[tuple[float, tuple[int, int], int, Any, Any]] = []
    # Heap entries so far: sorts entries of equal time and sort key.
    self._count = 0
    self._may_send = not join_times  # the last event may start a job
    if join_times is None:
      for worker in range(workers):
        self._dispatcher.join(worker, 0.0)
      self.rows.clear()
    else:
      # Joins precede jobs of the same time: sort keys of jobs start at 0.
      for worker, time in enumerate(join_times):
        self._put(time, (worker - workers, worker), self._join, worker)

  @property
  def received(self) -> int:
    """Messages received so far."""
    return self._dispatcher.received

  def job(self, worker: int, seq: int) -> int:
    """Returns the job number of an open ticket."""
    return self._jobs[worker, seq].number

  def compute_times(self, worker: int, seq: int) -> tuple[float, ...]:
    """Returns when a worker began and ended the computation of a job; () if it
    has not ended, or the network takes no time."""
    return tuple(self._compute_times[worker][2 * seq : 2 * seq + 2])

  def until(self, messages: int) -> None:
    """Advances until `messages` messages have been received in all."""
    while self.received < messages:
      self.advance()

  def trace(self) -> base.Trace:
    """Returns the rows so far."""
    return from_events(self.rows)

  def advance(self) -> None:
    """Starts the jobs that may start, then plays the next event."""
    if self._may_send:
      self._send()
    if self._repeats_late_jobs:
      late_time = self._dispatcher.next_late(before=self._heap[0][0])
      # A job becomes late before the next event. At that time an idle worker
      # may repeat it.
      if late_time < self._heap[0][0]:
        self.now, self._may_send = late_time, True
        return
    self.now, _, _, call, argument = heapq.heappop(self._heap)
    call(argument)

  def _put(
    self, time: float, sort_key: tuple[int, int], call: Any, argument: Any
  ) -> None:
    """Schedules `call(argument)` at a time. Among calls at the same time the
    least `sort_key` is first."""
    self._count += 1
    heapq.heappush(self._heap, (time, sort_key, self._count, call, argument))

  def _join(self, worker: int) -> None:
    """Adds a worker. Tickets are sent once all workers that join now are
    present."""
    self._dispatcher.join(worker, self.now)
    next_time, next_key = math.inf, (0, 0)
    if self._heap:
      next_time, next_key = self._heap[0][:2]
    # Workers that join together get tickets together.
    self._may_send = next_time != self.now or next_key[0] >= 0

  def _send(self) -> None:
    """Starts the jobs that may start now, and sends their tickets."""
    self._may_send = False
    for grant in self._dispatcher.grants(self.now):
      worker, seq, _, keep = grant
      job = _Job(grant, next(self._streams[worker]))
      self._jobs[worker, seq] = job
      self._granted[worker].append(job)
      if self._is_instant:
        self._start_fetched_jobs(job)
        continue
      no_bytes = [0.0] * self.links.network.shards
      sizes = no_bytes if keep else self._sizes.down(worker, seq)
      self._send_parts(job, self.links.ticket_part, range(len(sizes)), sizes)

  def _send_parts(
    self, job: _Job, make_part: Callable[..., MessagePart],
    shards: Iterable[int], sizes: Sequence[float],
  ) -> None:
    """Sends the parts of a job's ticket, or of its message."""
    parts = [
      make_part(job, job.worker, shard, sizes[shard]) for shard in shards
    ]
    job.parts += parts
    job.parts_left = len(parts)
    for part in parts:
      self._move((part, None))

  def _move(self, part_and_line: tuple[MessagePart, Any]) -> None:
    """Moves a part to its next line. `line` is the shared line that the part
    may leave now; None if the part is on no line."""
    part, line = part_and_line
    if line is None and part.has_arrived:
      self._arrive(part.key)
      return
    for time, next_part, next_line in self.links.advance(self.now, part, line):
      sort_key = next_part.key.sort_key
      self._put(time, sort_key, self._move, (next_part, next_line))

  def _arrive(self, job: _Job) -> None:
    """Counts a part of a ticket that has arrived at its worker, or a part of a
    message that a shard has processed."""
    job.parts_left -= 1
    if not job.parts_left:
      (self._receive if job.is_computed else self._start_fetched_jobs)(job)

  def _receive(self, job: _Job) -> None:
    """Gives the dispatcher a message that all shards have processed."""
    self._may_send = True
    self._dispatcher.arrive(job.worker, job.seq, self.now)
    for worker, seq, _ in self._dispatcher.deliver(self.now):
      parts = self._jobs.pop((worker, seq)).parts
      self.links.count_received(sum(part.waited for part in parts))

  def _start_fetched_jobs(self, job: _Job) -> None:
    """Begins the granted jobs of the job's worker, in order, up to the first
    job without its ticket."""
    worker = job.worker
    waiting = self._granted[worker]
    while waiting and not waiting[0].parts_left:
      job = waiting.popleft()
      start_time = max(self.now, self._free_at[worker])
      self._free_at[worker] = start_time + job.duration
      self._put(self._free_at[worker], job.sort_key, self._end_job, job)

  def _end_job(self, job: _Job) -> None:
    """Ends the computation of a job, and sends its message."""
    job.is_computed = True
    if self._is_instant:
      self._receive(job)
      return
    self._compute_times[job.worker].extend((self.now - job.duration, self.now))
    sizes = self._sizes.up(job.worker, job.seq)
    # The lead's part leaves last: when the lead receives its part, all other
    # parts have been sent.
    shards = reversed(range(len(sizes)))
    self._send_parts(job, self.links.message_part, shards, sizes)


def begin(
  rules: protocol.Rules, durations: Durations, workers: int, **options: Any
) -> Play:
  """Returns a Play of N workers with drawn times; `options` are those of Play.
  """
  workers = checks.integer("workers", workers)
  streams = [durations.stream(worker) for worker in range(workers)]
  return Play(rules, streams, **options)


def play_rules(
  rules: protocol.Rules, durations: Durations, workers: int, messages: int
) -> base.Trace:
  """Returns the order of a protocol until `messages` messages are received.
  Messages that are received together with the last one are added."""
  checks.integer("messages", messages)
  checks.integer("workers", workers)
  protocol.check_rules(rules)
  trace = columns.make(rules, durations, workers, messages)
  if trace is not None:
    return trace
  simulation = begin(rules, durations, workers)
  simulation.until(messages)
  return simulation.trace()
