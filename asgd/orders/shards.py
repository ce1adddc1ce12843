"""Orders of a server with shards that are out of step: a trace for each shard.

  lead      send ----------------------------- receive ...
  shard 1        send ---------------- receive
              |     |     compute    |    |    |
            grant  its tickets     its message

Shard 0, the lead, decides which job starts. The worker asks every other shard
for its part of the ticket, computes when it has all parts, and sends its
message to every shard. Each request and each message takes the delay of its
(worker, shard) pair. So a ticket mixes versions, and shards receive messages in
different orders. Messages of one worker to one shard arrive in order. The
delays are drawn (`out_of_step`), or come from the links of a network
(`over_network`).
"""

import collections
import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asgd import base, checks
from asgd.orders import protocol
from asgd.orders.durations import Durations
from asgd.orders.link_queue import LinkQueue
from asgd.orders.network import Links, LinkUse, Network
from asgd.orders.trace import STARTS, Event, events, from_events


class _MessageDelays:
  """Arrival times of messages from workers at shards."""

  def __init__(self, delays: Durations | None, workers: int, shards: int):
    count, self._shards = workers * shards, shards
    delays = delays or Durations(lambda pair: itertools.repeat(0.0))
    self._delays = [delays.stream(pair) for pair in range(count)]
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
  """Plays a protocol with a server; each of its shards has a separate order.

  Args:
    rules: the protocol, without rounds.
    durations: time that each job of the N workers takes to compute.
    delays: time of a message from a worker to a shard, in the unit of
      `durations`; stream i S + s is for worker i and shard s. None: messages
      take no time, so each trace equals the trace of one server.
    workers: N.
    messages: number of RECEIVE rows in each shard's trace.
    shards: S.

  Returns:
    S traces; the first is the lead's. (worker, seq) names the same message in
    all of them.

  Raises:
    ValueError: as `protocol.check_rules`; for a count out of its range, and for
      rounds: the shards would form different rounds.

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
  checks.integer("workers", workers)
  checks.integer("messages", messages)
  checks.integer("shards", shards)
  _check_rounds(rules)
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
  heap: list[Any] = []
  now = 0.0
  while dispatcher.received < messages:
    for worker, seq, job, keep in dispatcher.grants(now):
      ready_at, action = now, base.KEEP if keep else base.SEND
      for shard in range(1, shards):
        time = message_delays.arrival_time(now, worker, shard)
        rows[shard].append(Event(time, worker, seq, job, action))
        ready_at = max(ready_at, time)
      free_at[worker] = max(ready_at, free_at[worker]) + next(streams[worker])
      heapq.heappush(heap, (free_at[worker], job, worker, seq, None))
    # Times are None for the end of a job, else the arrival at each shard.
    now, job, worker, seq, times = heapq.heappop(heap)
    if times is None:  # the job has ended: its message is sent to all shards
      times = [
        message_delays.arrival_time(now, worker, shard)
        for shard in range(shards)
      ]
      heapq.heappush(heap, (times[0], job, worker, seq, times))
      continue
    for shard in range(1, shards):
      event = Event(times[shard], worker, seq, job, base.RECEIVE)
      rows[shard].append(event)
    dispatcher.arrive(worker, seq)
    dispatcher.deliver(now)
  return _sorted_traces(rows)


def _check_rounds(rules: protocol.Rules) -> None:
  """Raises ValueError for rounds."""
  if rules.round:
    raise ValueError(
      f"rounds of {rules.round} messages need shards in step: shards that are"
      " out of step would make different rounds; use shards=1"
    )


def _sorted_traces(rows: Sequence[list[Event]]) -> list[base.Trace]:
  """Returns the trace of each shard."""
  # A stable sort: rows with equal times keep their order.
  return [
    from_events(sorted(shard_rows, key=lambda row: row.time))
    for shard_rows in rows
  ]


class _Job:
  """A job from its grant until all shards have its message."""

  def __init__(self, grant: protocol.Grant, shards: int, duration: float):
    self.worker, self.seq, self.number, self.keep = grant
    self.parts_left = shards  # parts of its ticket that the worker lacks
    self.unreceived = shards  # parts of its message that shards lack
    self.lead_received = False  # whether the lead has received its part
    self.duration = duration

  def row(self, time: float, action: int) -> Event:
    """Returns a row of the job."""
    return Event(time, self.worker, self.seq, self.number, action)


class _OverNetwork:
  """Plays a protocol over the links between workers and shards."""

  def __init__(
    self, rules: protocol.Rules, durations: Durations, network: Network,
    nbytes: Sequence[float], workers: int, messages: int,
  ):
    self._shards, self._messages = range(network.shards), messages
    self._nbytes = nbytes
    self._waited = 0.0  # sum over parts of the time in queues of shards
    # Counted messages that all shards have received, and the time of the last.
    self._n_complete, self._end = 0, 0.0
    self.queue = LinkQueue(Links(network, workers), self._add_waited)
    self.rows: list[list[Event]] = [[] for _ in self._shards]
    self._dispatcher = protocol.Dispatcher(rules, log=self.rows[0].append)
    self._streams = [durations.stream(worker) for worker in range(workers)]
    self._free_at = [0.0] * workers
    # Worker -> granted jobs that have not begun; they begin in this order.
    self._granted: list[collections.deque[_Job]] = [
      collections.deque() for _ in range(workers)
    ]
    for worker in range(workers):
      self._dispatcher.join(worker, 0.0)
    self.rows[0].clear()  # workers present at time 0 get no JOIN row

  def _add_waited(self, waited: float) -> None:
    self._waited += waited

  def use(self) -> LinkUse:
    """Returns the use of the links until the end of the play."""
    n_parts = self._messages * len(self._shards)
    waited = self._waited / n_parts
    return self.queue.links.use(self._end)._replace(waited=waited)

  def grant(self, time: float) -> None:
    """Starts the jobs that may start: the lead sends its parts of tickets."""
    for grant in self._dispatcher.grants(time):
      stream = self._streams[grant.worker]
      job = _Job(grant, len(self._shards), next(stream))
      self._granted[job.worker].append(job)
      self._send_part(0, job, time)

  def _send_part(self, shard: int, job: _Job, time: float) -> None:
    """Sends a shard's part of a ticket; a kept ticket has no bytes."""
    nbytes = 0.0 if job.keep else self._nbytes[shard]
    arrive = functools.partial(self._take_part, shard, job)
    self.queue.send_down(time, job.worker, shard, nbytes, arrive)

  def _take_part(self, shard: int, job: _Job, time: float) -> None:
    """Counts a part of a ticket at its worker. After the lead's part, the
    worker asks the other shards for their parts."""
    for other_shard in self._shards[1:] if not shard else ():
      send_answer = functools.partial(self._answer, other_shard, job)
      self.queue.send_up(time, job.worker, other_shard, 0.0, send_answer)
    job.parts_left -= 1
    waiting = self._granted[job.worker]
    while waiting and not waiting[0].parts_left:
      job = waiting.popleft()
      end = max(time, self._free_at[job.worker]) + job.duration
      self._free_at[job.worker] = end
      self.queue.at(end, functools.partial(self._push, job))

  def _answer(self, shard: int, job: _Job, time: float) -> None:
    """Sends a shard's part of a ticket, for which a worker has asked."""
    action = base.KEEP if job.keep else base.SEND
    self.rows[shard].append(job.row(time, action))
    self._send_part(shard, job, time)

  def _push(self, job: _Job, time: float) -> None:
    """Sends the message of a job that has ended, the lead's part last."""
    for shard in reversed(self._shards):
      receive = functools.partial(self._receive, shard, job)
      nbytes = self._nbytes[shard]
      self.queue.send_up(time, job.worker, shard, nbytes, receive)

  def _receive(self, shard: int, job: _Job, time: float) -> None:
    """Receives a part of a message. A shard does not wait for the other
    shards."""
    if shard:
      self.rows[shard].append(job.row(time, base.RECEIVE))
    elif self._dispatcher.received < self._messages:
      job.lead_received = True
      self._dispatcher.arrive(job.worker, job.seq)
      self._dispatcher.deliver(time)
      if self._dispatcher.received < self._messages:
        self.grant(time)
    job.unreceived -= 1
    self._n_complete += job.lead_received and not job.unreceived
    if self._n_complete == self._messages:
      # Jobs in flight do not use the links after the last counted part.
      self._end = time
      self.queue.clear()


def over_network(
  rules: protocol.Rules, durations: Durations, network: Network, *,
  nbytes: Sequence[float], workers: int, messages: int,
) -> tuple[list[base.Trace], LinkUse]:
  """Plays a protocol with shards that are out of step, over a network.

  The lead sends its part of a ticket with the grant. When the part arrives, the
  worker asks every other shard for its part: a message without bytes. A shard
  receives its part of a message when it has processed the part, whatever the
  other shards do.

  Args:
    rules, durations, workers, messages: as for `out_of_step`.
    network: the links, for S shards, in the unit of the durations.
    nbytes: bytes of each shard's part; the same for tickets and for messages.

  Returns:
    (S traces, use of the links until the end). The first trace is the lead's;
    its last row is that of the last message. The other traces have the same
    messages.

  Raises:
    ValueError: as `out_of_step`.

  Example:
    A job takes 1, each transfer 0.5. The transfers are the lead's part of the
    ticket, the request to the other shard, its answer, and the message.

    >>> from asgd import orders
    >>> from asgd.orders import protocol, shards
    >>> network = orders.network.Network(latency=0.5, shards=2)
    >>> (lead, other), _ = shards.over_network(
    ...   protocol.Rules(), orders.durations.constant(), network,
    ...   nbytes=(8, 8), workers=1, messages=2,
    ... )
    >>> lead.time.tolist(), other.time.tolist()
    ([0.0, 3.0, 3.0, 6.0], [1.0, 3.0, 4.0, 6.0])
  """
  checks.integer("workers", workers)
  checks.integer("messages", messages)
  _check_rounds(rules)
  play = _OverNetwork(rules, durations, network, nbytes, workers, messages)
  play.grant(0.0)
  play.queue.run()
  received_keys = {e.key for e in play.rows[0] if e.action == base.RECEIVE}
  traces = _sorted_traces([
    [e for e in rows if e.action != base.RECEIVE or e.key in received_keys]
    for rows in play.rows
  ])
  return traces, play.use()


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
    n_received, version_of_ticket = 0, {}
    for event in events(trace):
      n_received += event.action == base.RECEIVE
      if event.action in STARTS:
        version_of_ticket[event.key] = n_received
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
