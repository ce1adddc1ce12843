"""Measures the jobs of a live run, and simulates the run with their durations.

A job starts when its ticket is sent, or when the worker's previous job ends, if
that is later. It ends when its message arrives. The server's work on ticket and
message is included. Two times in which the protocol makes a worker wait are
excluded: until the worker gets its next ticket, and while a message waits for
the other messages of its round. Spans show the second one.

`measure_jobs` and `measure_work` measure; `play` simulates the protocol with
these durations. Durations, rates and shares leave out the start of the run: the
time until each worker has sent a message.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from asgd import base
from asgd.experiment import live_files
from asgd.experiment.live_files import Journal, Spans
from asgd.live.links.throttled import Throttle
from asgd.orders import protocol
from asgd.orders.network import Network
from asgd.orders.play import Play, Sizes
from asgd.orders.trace import STARTS, Event, Ledger

_MIN_SECONDS = 1e-9  # seconds; the shortest duration of a job
TOO_SHORT = "the run is too short to be measured; use a larger --config.epochs"


class MeasuredJob(NamedTuple):
  """A job of a worker, in seconds of the shard's clock."""

  worker: int
  start: float
  end: float
  received: float  # later than `end` if the message waited for its round
  is_first: bool  # whether it is the first job of an incarnation


class Outcome(NamedTuple):
  """A run of a cell, live or simulated."""

  start_time: float  # of the first ticket, in seconds
  records: base.Records  # with times in seconds
  accuracy: float  # at the end; NaN if it is not known


def _message_arrivals(
  journal: Journal, spans: Spans
) -> dict[tuple[int, int], float]:
  """Returns the time at which each message arrived, by (worker, seq)."""
  # Messages of a round are received together, when the last one has arrived.
  # Spans have the end of each push. The time from push to arrival is known only
  # for the last message of a round; all its messages are given that time.
  pushed = live_files.spans_by_job(spans, "push")
  groups: dict[float, list[tuple[int, int]]] = {}
  for event in journal:
    if event.action == base.RECEIVE:
      groups.setdefault(event.time, []).append(event.key)
  arrivals = {}
  for time, keys in groups.items():
    push_ends = {key: pushed[key].end for key in keys if key in pushed}
    last_push = max(push_ends.values()) if len(push_ends) == len(keys) else time
    for key in keys:
      arrivals[key] = time - max(last_push - push_ends.get(key, last_push), 0.0)
  return arrivals


def measure_jobs(journal: Journal, spans: Spans) -> list[MeasuredJob]:
  """Returns the jobs that ended with a RECEIVE, in that order."""
  arrivals = _message_arrivals(journal, spans)
  last_ends: dict[int, float] = {}  # of the last job, by worker
  # Workers that have joined and not ended their first job since.
  awaiting_first: set[int] = set()
  measured = []
  ledger: Ledger[Event] = Ledger()
  for event in journal:
    worker, ticket = event.worker, ledger.apply(event)
    if event.action == base.JOIN:
      awaiting_first.add(worker)
    elif event.action == base.RECEIVE and ticket is not None:
      # A worker with two tickets starts the second job after the first.
      start = max(ticket.time, last_ends.get(worker, ticket.time))
      last_ends[worker] = end = arrivals[event.key]
      is_first = worker in awaiting_first
      measured.append(MeasuredJob(worker, start, end, event.time, is_first))
      awaiting_first.discard(worker)
  return measured


def _simulate_arrivals(
  sends: Iterable[tuple[float, int, str, tuple[int, int], Sequence[float]]],
  network: Network,
  workers: int,
) -> dict[tuple[str, tuple[int, int]], float]:
  """Simulates a network; returns (direction, key) -> time of arrival.

  `sends` has (time, job, "up" or "down", key, bytes for each shard).
  """
  now = 0.0  # the throttle's clock: the time of the send below
  arrivals: dict[tuple[str, tuple[int, int]], float] = {}
  throttle = Throttle(network, workers, clock=lambda: now)

  def deliver(message: tuple[str, tuple[int, int]]) -> None:
    # Each part overwrites the time; that of the last one remains.
    arrivals[message] = throttle.time

  # In the order of the times: the queues of links keep the order of sends.
  for time, _, direction, key, sizes in sorted(sends):
    now = time
    carry = throttle.send_up if direction == "up" else throttle.send_down
    for shard, nbytes in enumerate(sizes):
      arrive = functools.partial(deliver, (direction, key))
      carry(key[0], shard, nbytes, arrive)
  now = math.inf  # all parts have arrived
  throttle.deliver_due()
  return arrivals


def measure_work(
  journal: Journal,
  spans: Spans,
  network: Network,
  sizes: Sizes,
  workers: int,
) -> list[MeasuredJob]:
  """Returns the jobs without the time that tickets and messages spend in the
  network and its queues. The work of worker and shard remains. Raises
  ValueError without spans."""
  span_names = ("fetch", "push")
  fetched, pushed = (
    live_files.spans_by_job(spans, kind) for kind in span_names
  )
  if not pushed:
    raise ValueError(
      "the links of this run take time, and the jobs' time without them was not"
      " measured: train it with --config.live.spans=True"
    )
  # [1] What the network carried: tickets when the shard sent them, messages
  # when the workers had pushed them. Jobs without spans are left out.
  sends: list[tuple[float, int, str, tuple[int, int], Sequence[float]]] = []
  groups: dict[float, list[tuple[int, int]]] = {}  # received at once
  for event in journal:
    key = event.key
    if key not in pushed or key not in fetched:
      continue
    if event.action in STARTS:
      end, job = pushed[key].end, event.job
      sends.append((event.time, job, "down", key, sizes.down(*key)))
      sends.append((end, job, "up", key, sizes.up(*key)))
    elif event.action == base.RECEIVE:
      groups.setdefault(event.time, []).append(key)
  # [2] The times of arrival if the network alone delayed tickets and messages.
  arrivals = _simulate_arrivals(sends, network, workers)
  # [3] The jobs: from the fetch to the push, and the time by which ticket and
  # message were later than the network explains.
  awaiting_first: set[int] = set()  # as in `measure_jobs`
  last_ends: dict[int, float] = {}
  measured = []
  for event in journal:
    worker, key = event.worker, event.key
    if event.action == base.JOIN:
      awaiting_first.add(worker)
    elif event.action == base.RECEIVE and ("up", key) in arrivals:
      # Messages of a round are received together, after the last has arrived.
      last_arrival = max(
        arrivals.get(("up", message), 0.0) for message in groups[event.time]
      )
      # A delay that the network does not explain is work of the shard or the
      # worker on ticket or message: it counts as part of the job.
      unexplained_delay = max(fetched[key].end - arrivals["down", key], 0.0)
      unexplained_delay += max(event.time - last_arrival, 0.0)
      start = max(fetched[key].end, last_ends.get(worker, 0.0))
      last_ends[worker] = end = pushed[key].end
      is_first = worker in awaiting_first
      measured.append(
        MeasuredJob(
          worker, start, end + unexplained_delay, event.time, is_first
        )
      )
      awaiting_first.discard(worker)
  return measured


def job_sizes(records: Sequence[base.Records], workers: int) -> Sizes:
  """Returns the bytes of messages and tickets at each shard, by worker and seq
  of the job. Jobs that the records lack have the mean size."""

  def column_sizes(name: str) -> Callable[[int, int], list[float]]:
    """Returns (worker, seq) -> bytes at each shard, of a column of records."""
    columns = [getattr(shard, name).astype(float) for shard in records]
    mean = [float(column.mean()) for column in columns]
    # bytes[worker][shard][seq]: the records of a worker are in order of seq.
    nbytes = [
      [
        column[shard.worker == w].tolist()
        for column, shard in zip(columns, records, strict=True)
      ]
      for w in range(workers)
    ]

    def sizes_of_job(worker: int, seq: int) -> list[float]:
      shards = nbytes[worker]
      if seq >= min(map(len, shards)):
        return mean
      return [column[seq] for column in shards]

    return sizes_of_job

  return Sizes(column_sizes("bytes_up"), column_sizes("bytes_down"))


def count_until_all_sent(worker: np.ndarray, workers: int) -> int:
  """Returns the number of messages until each worker has sent one. Raises
  ValueError if a worker sent none.

  Args:
    worker: int[N], the worker of each message in the order of receipt.
    workers: the number of workers of the cell.
  """
  present, first_indices = np.unique(worker, return_index=True)
  silent_workers = np.setdiff1d(range(workers), present)
  if silent_workers.size:
    raise ValueError(f"worker {silent_workers[0]} sent no message: {TOO_SHORT}")
  return int(first_indices.max()) + 1


def join_times(journal: Journal, workers: int) -> list[float]:
  """Returns the time of each worker's first JOIN, in seconds since the first
  ticket and at least 0. A worker that never joined has the latest time."""
  start_time = live_files.first_ticket(journal)
  times: dict[int, float] = {}
  for event in journal:
    if event.action == base.JOIN:  # later ones are of the next incarnations
      times.setdefault(event.worker, max(event.time - start_time, 0.0))
  return [times.get(worker, max(times.values())) for worker in range(workers)]


def durations_by_worker(
  jobs: Sequence[MeasuredJob], workers: int
) -> list[list[float]]:
  """Returns the durations of each worker's jobs, in the order of the jobs."""
  rows: list[list[float]] = [[] for _ in range(workers)]
  for job in jobs:
    rows[job.worker].append(max(job.end - job.start, _MIN_SECONDS))
  return rows


def settled_durations(
  jobs: Sequence[MeasuredJob], workers: int
) -> list[list[float]]:
  """Returns the durations of each worker's jobs that began when all workers had
  sent a message. First jobs are left out, because they compile. Raises
  ValueError if a worker has no such job."""
  senders = np.array([job.worker for job in jobs], int)
  begin_time = jobs[count_until_all_sent(senders, workers) - 1].received
  later_jobs = [
    job for job in jobs if job.start >= begin_time and not job.is_first
  ]
  rows = durations_by_worker(later_jobs, workers)
  if [] in rows:
    text = f"worker {rows.index([])} ended no job after all {workers} had begun"
    raise ValueError(f"{text}: {TOO_SHORT}")
  return rows


def shifted_durations(
  rows: Sequence[Sequence[float]], workers: int
) -> list[list[float]]:
  """Returns durations of N workers' jobs, repeated from those of fewer workers.
  Workers with the same durations begin at different jobs: otherwise they would
  stay in step.

  Example:
    >>> from asgd.experiment import predict
    >>> predict.shifted_durations([[1.0, 2.0, 3.0, 4.0]], 2)
    [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 1.0, 2.0]]
  """
  shifted_rows = []
  max_copies = -(-workers // len(rows))  # most workers with one row, rounded up
  for worker in range(workers):
    copy, index = divmod(worker, len(rows))
    row = list(rows[index])
    # Evenly spaced starts for the workers that share a row.
    start = copy * len(row) // max_copies
    shifted_rows.append(row[start:] + row[:start])
  return shifted_rows


def play(
  rules: protocol.Rules,
  streams: Sequence[Iterator[float]],
  joins: Sequence[float],
  messages: int,
  *,
  network: Network | None = None,
  sizes: Sizes | None = None,
) -> base.Trace:
  """Simulates the order of a live run until `messages` are received.

  Args:
    rules: the rules of the order.
    streams: durations of each worker's jobs, in seconds.
    joins: time at which each worker joins.
    messages: the number of messages to receive.
    network: carries tickets and messages; None: they take no time.
    sizes: bytes of tickets and messages.
  """
  order = Play(
    *(rules, streams, joins), jobs=messages, network=network, sizes=sizes
  )
  order.until(messages)
  return order.trace()


class Curve(NamedTuple):
  """The loss of a run against time."""

  time: np.ndarray  # seconds since the message at which the curve begins
  loss: np.ndarray  # smoothed

  def loss_after_share(self, share: float) -> float:
    """Returns the loss after a share of its total decrease."""
    return float(self.loss[0] - share * (self.loss[0] - self.loss.min()))

  def reaches(self, loss: float) -> float:
    """Returns the time at which a loss is first reached; NaN if never."""
    reached = np.flatnonzero(self.loss <= loss)
    return float(self.time[reached[0]]) if len(reached) else float("nan")


def curve(run: Outcome, first_messages: int) -> Curve:
  """Returns the losses of all messages but the first few, against time.

  Args:
    run: live or simulated.
    first_messages: number of messages to leave out. Times count from the last
      of these, or from the first ticket if the number is 0.

  Returns:
    The losses, smoothed by means over 1/40 of the messages.
  """
  times = run.records.time
  loss = np.asarray(run.records.loss[first_messages:], float)
  width = max(len(loss) // 40, 1)
  sums = np.cumsum(np.concatenate([[0.0], loss]))
  start = times[first_messages - 1] if first_messages else run.start_time
  # means[i] = (loss[i] + ... + loss[i + width - 1]) / width, at the time of the
  # last of these messages
  means = (sums[width:] - sums[:-width]) / width
  return Curve(times[first_messages + width - 1 :] - start, means)


def rate(run: Outcome, first_messages: int) -> float:
  """Returns messages per second after the first ones; NaN if no message
  follows.

  Args:
    run: live or simulated.
    first_messages: number of messages to leave out, at least 1.
  """
  times = run.records.time
  seconds = times[-1] - times[first_messages - 1]
  if not seconds > 0:
    return float("nan")
  return (len(times) - first_messages) / seconds


# Keys of `where_time_goes`: the value of BUSY is a share of the time, the
# values of _JOB_PARTS are seconds.
BUSY = "the server is busy"
_WORK = ("until the worker has the ticket", "fetching", "computing", "pushing")
_JOB_PARTS = (*_WORK, "until it is received")


def where_time_goes(
  journal: Journal, spans: Spans, begin_time: float
) -> dict[str, float] | None:
  """Returns mean seconds of each part of a job, from the job's ticket on, and
  the share of time in which the server is busy (BUSY). Only jobs that began at
  time `begin_time` or later count. Returns None without spans."""
  span_names = ("fetch", "compute", "push")
  spans_by_name = [live_files.spans_by_job(spans, kind) for kind in span_names]
  part_seconds = []  # of each job: the seconds of _JOB_PARTS
  for ticket, end in live_files.ended_jobs(journal):
    fetch, compute, push = (by_job.get(end.key) for by_job in spans_by_name)
    if fetch is None or compute is None or push is None:
      continue
    if end.action == base.RECEIVE and ticket.time >= begin_time:
      times = ticket.time, fetch.start, compute.start, compute.end, push.end
      part_seconds.append(np.diff((*times, end.time)))
  if not part_seconds:
    return None
  mean_seconds = np.mean(part_seconds, axis=0).tolist()
  means = dict(zip(_JOB_PARTS, mean_seconds, strict=True))
  busy_periods = live_files.busy_periods(journal, spans)
  busy_seconds = sum(
    end - start for start, end in busy_periods if start >= begin_time
  )
  return {
    **means,
    BUSY: busy_seconds / max(journal[-1].time - begin_time, _MIN_SECONDS),
  }
