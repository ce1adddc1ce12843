"""Orders of a server in shards that are out of step: a trace for each shard.

  lead      send ----------------------------- receive ...
  shard 1        send ---------------- receive
              |     |     compute    |    |    |
            grant  its tickets     its message

Shard 0, the lead, decides which job starts. The worker asks each other shard
for its part of the ticket, computes when it has all parts, and sends its
message to every shard. Each request and each message takes the delay of its
(worker, shard) pair. So a ticket mixes versions, and shards receive messages in
different orders. Messages of one worker to one shard arrive in order.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asgd import base, checks
from asgd.orders import protocol
from asgd.orders.durations import Durations
from asgd.orders.trace import STARTS, Event, events, from_events


class _MessageDelays:
  """Arrival times of messages from workers at shards."""

  def __init__(self, delays: Durations | None, workers: int, shards: int):
    count, self._shards = workers * shards, shards
    delays = delays or Durations(lambda way: itertools.repeat(0.0))
    self._delays = [delays.stream(way) for way in range(count)]
    self._last_arrival = [0.0] * count  # arrival time of the last message

  def arrival_time(self, now: float, worker: int, shard: int) -> float:
    """Returns the arrival time at a shard of a message that a worker sends
    now."""
    pair = worker * self._shards + shard
    self._last_arrival[pair] = max(
      self._last_arrival[pair], now + next(self._delays[pair])
    )
    return self._last_arrival[pair]


def out_of_step(
  rules: protocol.Rules, durations: Durations, delays: Durations | None = None,
  *, workers: int, messages: int, shards: int,
) -> list[base.Trace]:
  """Plays a protocol with a server in shards that each have a separate order.

  Args:
    rules: the protocol, without rounds.
    durations: time that each job of the N workers takes to compute.
    delays: time of a message from a worker to a shard, in the same unit; stream
      i S + s is for worker i and shard s. None: messages take no time, so each
      trace equals the trace of one server.
    workers: N.
    messages: RECEIVE rows of the lead. At the end each shard has this number.
    shards: S.

  Returns:
    S traces; the first is the lead's. (worker, seq) names the same message in
    all of them.

  Raises:
    ValueError: for a count out of its range, rules that do not fit, or rounds:
      the shards would make different rounds.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012: shards of
    the parameter server run independently of one another.

  Example:
    A message to the lead takes 1, one to the other shard 2.

    >>> from asgd import orders
    >>> from asgd.orders import protocol, shards
    >>> ways = orders.durations.constant(slowdown=[1, 2])
    >>> lead, other = shards.out_of_step(
    ...   protocol.Rules(), orders.durations.constant(), ways,
    ...   workers=1, messages=2, shards=2,
    ... )
    >>> lead.time.tolist(), other.time.tolist()
    ([0.0, 4.0, 4.0, 8.0], [2.0, 5.0, 6.0, 9.0])
  """
  checks.whole("workers", workers)
  checks.whole("messages", messages)
  checks.whole("shards", shards)
  if rules.round:
    raise ValueError(
      f"rounds of {rules.round} messages need shards in step: shards that are"
      " out of step would make different rounds; use shards=1"
    )
  message_delays = _MessageDelays(delays, workers, shards)
  streams = [durations.stream(worker) for worker in range(workers)]
  free_at = [0.0] * workers  # time at which each worker has ended its jobs
  # Rows of each shard. Rows of the same time keep the order in which the lead
  # made them.
  rows: list[list[Event]] = [[] for _ in range(shards)]
  dispatcher = protocol.Dispatcher(rules, log=rows[0].append)
  for worker in range(workers):
    dispatcher.join(worker, 0.0)
  rows[0].clear()  # workers present at time 0 get no JOIN row
  # Heap of (end, job, worker, seq, None) for computations, and of (arrival at
  # the lead, job, worker, seq, arrival at each shard) for messages.
  running: list[Any] = []
  now = 0.0
  while dispatcher.received < messages:
    for worker, seq, job, keep in dispatcher.grants(now):
      ready_at, action = now, base.KEEP if keep else base.SEND
      for shard in range(1, shards):
        time = message_delays.arrival_time(now, worker, shard)
        rows[shard].append(Event(time, worker, seq, job, action))
        ready_at = max(ready_at, time)
      free_at[worker] = max(ready_at, free_at[worker]) + next(streams[worker])
      heapq.heappush(running, (free_at[worker], job, worker, seq, None))
    # Times are None for the end of a job, else the arrival at each shard.
    now, job, worker, seq, times = heapq.heappop(running)
    if times is None:  # the job has ended: its message is sent to all shards
      times = [
        message_delays.arrival_time(now, worker, shard)
        for shard in range(shards)
      ]
      heapq.heappush(running, (times[0], job, worker, seq, times))
      continue
    for shard in range(1, shards):
      event = Event(times[shard], worker, seq, job, base.RECEIVE)
      rows[shard].append(event)
    dispatcher.arrive(worker, seq)
    dispatcher.deliver(now)
  # A stable sort: rows with equal times keep their order.
  return [
    from_events(sorted(shard_rows, key=lambda row: row.time))
    for shard_rows in rows
  ]


def spreads(traces: Sequence[base.Trace]) -> npt.NDArray[np.int32]:
  """Returns how far apart the versions of the parts of each ticket were,
  int32[U], for the lead's messages in their order.

    spread = max - min over shards of the messages that the shard had received
             before it sent its part of the ticket

  Example:
    >>> import numpy as np
    >>> from asgd import orders
    >>> from asgd.orders import shards
    >>> trace = orders.fixed_delay(delay=1, messages=3)
    >>> shards.spreads([trace, trace]).tolist()
    [0, 0, 0]
  """
  versions = []
  for trace in traces:
    received, version_of_ticket = 0, {}
    for event in events(trace):
      received += event.action == base.RECEIVE
      if event.action in STARTS:
        version_of_ticket[event.key] = received
    versions.append(version_of_ticket)
  keys = [e.key for e in events(traces[0]) if e.action == base.RECEIVE]
  # Rows are the lead's messages, columns the shards.
  table = np.array(
    [
      [version_of_ticket[key] for version_of_ticket in versions] for key in keys
    ],
    np.int32,
  )
  return np.ptp(table.reshape(len(keys), len(versions)), axis=1)
