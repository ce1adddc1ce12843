"""From a live run to the simulation that predicts it.

A job lasts from its ticket, or from the end of the worker's job before if that
is later, until its message arrives, with the time of the server. Time in which
the protocol holds a worker back is no part of it: before a ticket, or of a
message that waits for others of its round (known from spans). The protocol is
then played with these durations. Clocks start when all workers have sent one.
"""

import functools
import math
from collections.abc import Iterator, Sequence
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

_LEAST = 1e-9  # seconds that a job takes
SHORT = "the run is too short to be measured; use a larger --config.epochs"


class MeasuredJob(NamedTuple):
  """A message, and the time that it took its worker."""

  worker: int
  start: float
  end: float
  received: float  # later than its end, if it waited for others of its round
  first: bool  # of a worker that had just come


class Outcome(NamedTuple):
  """A run of a cell, live or simulated."""

  began: float  # when the first ticket was sent, in seconds
  records: base.Records  # with times in seconds
  accuracy: float  # at the end; NaN if it is not known


def _handed_in(journal, spans):
  """Returns when each message was there, by (worker, seq)."""
  # Messages of a round are received together, when the last of them has come.
  # Spans tell when they were pushed; that the last was received a moment later
  # is taken to hold for all.
  pushed = live_files.spans_by_job(spans, "push")
  groups: dict[float, list[tuple[int, int]]] = {}
  for event in journal:
    if event.action == base.RECEIVE:
      groups.setdefault(event.time, []).append(event.key)
  out = {}
  for time, keys in groups.items():
    ends = {key: pushed[key].end for key in keys if key in pushed}
    last = max(ends.values()) if len(ends) == len(keys) else time
    for key in keys:
      out[key] = time - max(last - ends.get(key, last), 0.0)
  return out


def jobs(journal: Journal, spans: Spans) -> list[MeasuredJob]:
  """Returns the jobs that ended with a RECEIVE, in that order."""
  ends = _handed_in(journal, spans)
  free: dict[int, float] = {}  # when a worker ended its last job
  new, out = set(), []
  ledger: Ledger[Event] = Ledger()
  for event in journal:
    worker, ticket = event.worker, ledger.obey(event)
    if event.action == base.JOIN:
      new.add(worker)
    elif event.action == base.RECEIVE:
      start = max(ticket.time, free.get(worker, ticket.time))
      free[worker] = end = ends[event.key]
      out.append(MeasuredJob(worker, start, end, event.time, worker in new))
      new.discard(worker)
  return out


def _carried(marks, network, workers):
  """Returns when messages and tickets came that were said at some times, rows
  (time, job, way, key, sizes), by (way, key)."""
  now, came = 0.0, {}
  throttle = Throttle(network, workers, clock=lambda: now)

  def deliver(name):
    came[name] = throttle.time  # the last part's

  for time, _, way, key, sizes in sorted(marks):
    now = time
    carry = throttle.up if way == "up" else throttle.down
    for shard, nbytes in enumerate(sizes):
      carry(key[0], shard, nbytes, functools.partial(deliver, (way, key)))
  now = math.inf
  throttle.deliver_due()
  return came


def off_network(
  journal: Journal,
  spans: Spans,
  network: Network,
  sizes: Sizes,
  workers: int,
) -> list[MeasuredJob]:
  """Returns the same jobs without the time of tickets and messages in a network
  and its queues, which leaves that of worker and shard. ValueError without
  spans."""
  kinds = ("fetch", "push")
  fetched, pushed = (live_files.spans_by_job(spans, kind) for kind in kinds)
  if not pushed:
    raise ValueError(
      "the links of this run take time, and what else its jobs took is not"
      " known: train it with --config.live.spans=True"
    )
  marks, groups = [], {}
  for event in journal:
    key = event.key
    if key not in pushed or key not in fetched:
      continue
    if event.action in STARTS:
      end, job = pushed[key].end, event.job
      marks.append((event.time, job, "down", key, sizes.down(*key)))
      marks.append((end, job, "up", key, sizes.up(*key)))
    elif event.action == base.RECEIVE:
      groups.setdefault(event.time, []).append(key)
  came = _carried(marks, network, workers)
  new, free, out = set(), {}, []
  for event in journal:
    worker, key = event.key[0], event.key
    if event.action == base.JOIN:
      new.add(worker)
    elif event.action == base.RECEIVE and ("up", key) in came:
      # Those of a round are received together, after the last has come.
      last = max(came.get(("up", each), 0.0) for each in groups[event.time])
      late = max(fetched[key].end - came["down", key], 0.0)
      late += max(event.time - last, 0.0)
      start = max(fetched[key].end, free.get(worker, 0.0))
      free[worker] = end = pushed[key].end
      first = worker in new
      out.append(MeasuredJob(worker, start, end + late, event.time, first))
      new.discard(worker)
  return out


def sizes_of(records: Sequence[base.Records], workers: int) -> Sizes:
  """Returns the bytes that messages and tickets of each shard had, by the
  number of the job at its worker; the mean of those beyond."""

  def of(name):
    columns = [getattr(part, name).astype(float) for part in records]
    mean = [float(column.mean()) for column in columns]
    rows = [
      [
        column[part.worker == w].tolist()
        for column, part in zip(columns, records, strict=True)
      ]
      for w in range(workers)
    ]

    def size(worker, seq):
      shards = rows[worker]
      if seq >= min(map(len, shards)):
        return mean
      return [column[seq] for column in shards]

    return size

  return Sizes(of("bytes_up"), of("bytes_down"))


def all_there(worker: np.ndarray, workers: int) -> int:
  """Returns how many messages it took until each worker had handed one in;
  ValueError if one of them never did."""
  there, firsts = np.unique(worker, return_index=True)
  missing = np.setdiff1d(range(workers), there)
  if missing.size:
    raise ValueError(f"worker {missing[0]} handed in nothing: {SHORT}")
  return int(firsts.max()) + 1


def joins(journal: Journal, workers: int) -> list[float]:
  """Returns when each worker came first, in seconds since the first ticket was
  sent, or 0 if that is later; a worker that never came counts as the last."""
  times, began = {}, live_files.first_ticket(journal)
  for event in journal:
    if event.action == base.JOIN:
      times.setdefault(event.worker, max(event.time - began, 0.0))
  return [times.get(worker, max(times.values())) for worker in range(workers)]


def in_order(jobs: Sequence[MeasuredJob], workers: int) -> list[list[float]]:
  """Returns the times of each worker's jobs, in their order."""
  rows: list[list[float]] = [[] for _ in range(workers)]
  for job in jobs:
    rows[job.worker].append(max(job.end - job.start, _LEAST))
  return rows


def settled(jobs: Sequence[MeasuredJob], workers: int) -> list[list[float]]:
  """Returns the times of each worker's jobs begun once all are at work, without
  first ones, which compile; ValueError if a worker has none."""
  there = all_there(np.array([job.worker for job in jobs], int), workers)
  zero = jobs[there - 1].received
  late = [job for job in jobs if job.start >= zero and not job.first]
  rows = in_order(late, workers)
  if [] in rows:
    idle = f"worker {rows.index([])} did no job after all {workers} had come"
    raise ValueError(f"{idle}: {SHORT}")
  return rows


def shifted(rows: Sequence[Sequence[float]], workers: int) -> list[list[float]]:
  """Returns the times of N workers' jobs from those of fewer. Workers that
  share times begin at different jobs, or they would stay in step.

  Example:
    >>> from asgd.experiment import predict
    >>> predict.shifted([[1.0, 2.0, 3.0, 4.0]], 2)
    [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 1.0, 2.0]]
  """
  each, out = -(-workers // len(rows)), []  # workers that have a row
  for worker in range(workers):
    turn, place = divmod(worker, len(rows))
    row = list(rows[place])
    at = turn * len(row) // each
    out.append(row[at:] + row[:at])
  return out


def play(
  rules: protocol.Rules,
  streams: Sequence[Iterator[float]],
  comes: Sequence[float],
  messages: int,
  *,
  network: Network | None = None,
  sizes: Sizes | None = None,
) -> base.Trace:
  """Plays the protocol of a live run until so many messages are received;
  `streams` gives the times of each worker's jobs, `comes` when it joins,
  `network` what messages of these `sizes` pass, in seconds."""
  order = Play(
    *(rules, streams, comes), jobs=messages, network=network, sizes=sizes
  )
  order.until(messages)
  return order.trace()


class Curve(NamedTuple):
  """The loss of a run against time."""

  time: np.ndarray  # seconds from zero
  loss: np.ndarray  # smoothed

  def way(self, share: float) -> float:
    """Returns the loss after a share of the way down that it goes."""
    return float(self.loss[0] - share * (self.loss[0] - self.loss.min()))

  def reaches(self, loss: float) -> float:
    """Returns when the loss is reached for the first time; NaN if never."""
    below = np.flatnonzero(self.loss <= loss)
    return float(self.time[below[0]]) if len(below) else float("nan")


def curve(run: Outcome, zero: int) -> Curve:
  """Returns the loss, over a fortieth of the run, after message number `zero`
  against the time since then; 0 is the first ticket."""
  times, loss = run.records.time, np.asarray(run.records.loss[zero:], float)
  width = max(len(loss) // 40, 1)
  sums = np.cumsum(np.concatenate([[0.0], loss]))
  start = times[zero - 1] if zero else run.began
  means = (sums[width:] - sums[:-width]) / width
  return Curve(times[zero + width - 1 :] - start, means)


def rate(run: Outcome, zero: int) -> float:
  """Returns messages per second from number `zero` on, NaN without any."""
  times = run.records.time
  seconds = times[-1] - times[zero - 1]
  return (len(times) - zero) / seconds if seconds > 0 else float("nan")


BUSY = "the server is busy"  # a share, the others are seconds
_WORK = ("until it is heard of", "fetching", "computing", "pushing")
_PARTS = (*_WORK, "until it is received")


def where_time_goes(
  journal: Journal, spans: Spans, zero: float
) -> dict[str, float] | None:
  """Returns the means of the parts of a job from its ticket on, of those begun
  after `zero`, and the share of time the server is busy; None without spans."""
  kinds = ("fetch", "compute", "push")
  pieces = [live_files.spans_by_job(spans, kind) for kind in kinds]
  lengths = []
  for ticket, end in live_files.ended_jobs(journal):
    spans_of_job = [piece.get(end.key) for piece in pieces]
    if end.action == base.RECEIVE and ticket.time >= zero and all(spans_of_job):
      fetch, compute, push = spans_of_job
      marks = ticket.time, fetch.start, compute.start, compute.end, push.end
      lengths.append(np.diff((*marks, end.time)))
  if not lengths:
    return None
  means = dict(zip(_PARTS, np.mean(lengths, axis=0).tolist(), strict=True))
  served = live_files.served(journal, spans)
  work = sum(end - start for start, end in served if start >= zero)
  return {**means, BUSY: work / max(journal[-1].time - zero, _LEAST)}
