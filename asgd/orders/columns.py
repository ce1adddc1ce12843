"""Orders computed in columns, by NumPy: millions of rows in seconds.

`asgd.orders.play` is the reference: it plays an order event by event, with the
dispatcher of live runs. This module computes the same rows, to the bit, for
protocols in which each worker has one ticket and no worker joins or leaves.
Messages take no time here, so orders over a network are always played. `make`
returns None for `Rules` with `depth` above 1, `cache`, `late` or `stages`, and
for durations that are not regular (`_Irregular`). The caller then plays the
order. `tests/asgd/orders/test_columns.py` compares both on drawn protocols.

Without rounds and with a bound s, a worker starts its job k when it has ended
its job k - 1 and all workers have ended their job k - s - 1:

  end[w, k] = max(end[w, k - 1], max over v of end[v, k - s - 1]) + time[w, k]

A job starts when the server receives a certain message, the job's trigger. The
first jobs of the workers have no trigger. Jobs are numbered in the order of
their triggers; jobs of one trigger are numbered by worker. Rounds are computed
one after the other.

Index letters:
  N  workers
  M  messages
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from asgd import base
from asgd.orders.durations import Durations
from asgd.orders.protocol import Rules
from asgd.orders.trace import DTYPES

_BLOCK = 1024  # largest number of times that are drawn for a worker at once


class _Irregular(Exception):
  """Raised if a duration is not positive or too small to change the time, or if
  a stream of durations ends: the caller plays the protocol instead."""


def make(
  rules: Rules, durations: Durations, workers: int, messages: int
) -> base.Trace | None:
  """Returns the order of a protocol, or None if it has to be played.

  Args:
    rules: the protocol.
    durations: how long each job of the N workers takes.
    workers: N.
    messages: M, the least number of messages. If message M belongs to the
      messages that a round applies, the trace has all messages of this round.

  Example:
    >>> from asgd.orders import columns, durations, protocol
    >>> clock = durations.constant(slowdown=[1, 3])
    >>> trace = columns.make(protocol.Rules(bound=1), clock, 2, 4)
    >>> trace.time.tolist(), trace.worker.tolist()
    ([0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, 4.0], [0, 1, 0, 0, 0, 1, 0, 1, 0])
    >>> columns.make(protocol.Rules(depth=2), clock, 2, 4) is None
    True
  """
  if rules.depth > 1 or rules.cache or rules.late < math.inf or rules.stages:
    return None
  # No worker has more than M + 1 jobs, so a larger `fetch_every` changes
  # nothing; it could overflow an int64.
  rules = rules._replace(fetch_every=min(rules.fetch_every, messages + 1))
  if rules.bound > messages:
    rules = rules._replace(bound=math.inf)
  # A time may be slow to draw (`asgd.orders.phases`): no more than M + 1.
  block = min(messages // workers + 8, messages + 1, _BLOCK)
  draws = _Draws(durations, workers, block)
  try:
    if rules.round:
      return _Rounds(rules, draws, workers).until(messages)
    return _without_rounds(rules, draws, workers, messages)
  except _Irregular:
    return None


class _Draws:
  """Durations of each worker's next jobs, drawn in blocks."""

  def __init__(self, durations, workers, block):
    self._streams = [durations.stream(worker) for worker in range(workers)]
    self._times = np.empty((workers, block))
    self._n_used = np.full(workers, block)

  def first(self, count: int) -> np.ndarray:
    """Returns the first `count` times of worker 0. The caller must call `first`
    before `peek`, which draws from the same stream."""
    return _next_times(self._streams[0], count)

  def peek(self, workers: np.ndarray) -> np.ndarray:
    """Returns the next time of each of these workers."""
    n_used, block = self._n_used[workers], self._times.shape[1]
    if n_used.max(initial=0) == block:
      for worker in workers[n_used == block].tolist():
        self._times[worker] = _next_times(self._streams[worker], block)
        self._n_used[worker] = 0
      n_used = self._n_used[workers]
    return self._times[workers, n_used]

  def use(self, workers: np.ndarray) -> None:
    """Advances these workers to their following times."""
    self._n_used[workers] += 1


def _next_times(stream: Iterator[float], count: int) -> np.ndarray:
  """Returns the next `count` times of a stream. Raises _Irregular if the stream
  ends, or if a time is not positive and finite."""
  times = np.fromiter(itertools.islice(stream, count), float)
  if len(times) < count or not (np.isfinite(times) & (times > 0)).all():
    raise _Irregular
  return times


def _without_rounds(
  rules: Rules, draws: _Draws, workers: int, messages: int
) -> base.Trace:
  """Returns the trace of a protocol without rounds: first the warm start of
  worker 0, then all workers. The bound may be infinite."""
  warm_jobs = min(rules.warm_start, messages)  # jobs of the warm start
  ends = np.add.accumulate(draws.first(warm_jobs))
  job_numbers = np.arange(warm_jobs)
  # A job has two rows. It starts when the job before it ends.
  times = np.repeat(np.append(0.0, ends), 2)[1:-1] if warm_jobs else ends
  start_actions = np.where(
    job_numbers % rules.fetch_every, base.KEEP, base.SEND
  )
  actions = np.stack(
    [start_actions, np.full(warm_jobs, base.RECEIVE)], 1
  ).ravel()
  jobs = np.repeat(job_numbers, 2)
  rows = [times, np.zeros(2 * warm_jobs), jobs, jobs, actions]
  if messages > warm_jobs:
    start_time = float(ends[-1]) if warm_jobs else 0.0
    schedule = _Levels(rules, draws, workers, messages - warm_jobs, start_time)
    time, worker, seq, job_numbers, action = schedule.rows()
    seq[worker == 0] += warm_jobs
    later_rows = (time, worker, seq, job_numbers + warm_jobs, action)
    rows = [*map(np.concatenate, zip(rows, later_rows, strict=True))]
  return _trace(rows)


def _trace(columns):
  typed_columns = zip(columns, DTYPES, strict=True)
  return base.Trace(*(column.astype(dtype) for column, dtype in typed_columns))


class _Levels:
  """Messages by level: level k has the message of each worker's job k.

  A message is named by its index: all messages of level 0, sorted by worker,
  then those of level 1, and so on. Its rank is its position in the order in
  which the server receives messages.
  """

  def __init__(self, rules, draws, workers, messages, start_time):
    self._workers, self._messages = workers, messages
    self._start_time = start_time  # of the first job of each worker
    self._fetch_every, bound = rules.fetch_every, rules.bound
    self._bound = None if bound == math.inf else math.floor(bound)
    levels = self._draw_levels(draws)
    sizes = [len(ends) for _, ends in levels]
    self._offsets = np.cumsum([0, *sizes])  # first index of each level
    # By message index: its worker, the time at which the server receives it,
    # its level, and the worker's previous message.
    self._worker = np.concatenate([w for w, _ in levels]).astype(np.int32)
    self._end_time = np.concatenate([ends for _, ends in levels])
    self._level = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    self._predecessor = self._predecessors()

  def _draw_levels(
    self, draws: _Draws
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (workers, times at which their jobs end) of each level. The
    levels include the first M messages and every job that starts before message
    M is received."""
    active_workers = np.arange(self._workers)
    latest_ends = np.full(self._workers, self._start_time)
    levels: list[Any] = []
    # Latest end of each level; infinity if the level lacks a worker.
    level_ends: list[Any] = []
    # Messages so far; an upper bound of the time of message M.
    count, horizon = 0, math.inf
    next_estimate = self._messages  # count at which to lower `horizon` next
    while len(active_workers):
      starts = latest_ends[active_workers]
      if self._bound is not None and len(levels) > self._bound:
        # No worker may start before this earlier level has ended.
        level_end = level_ends[len(levels) - self._bound - 1]
        if level_end > horizon:
          break
        starts = np.maximum(starts, level_end)
      ends = starts + draws.peek(active_workers)
      draws.use(active_workers)
      if (ends <= starts).any():
        raise _Irregular
      # levels[k] has job k of each worker
      levels.append((active_workers, ends))
      latest_ends[active_workers] = ends
      is_full = len(active_workers) == self._workers
      level_ends.append(ends.max() if is_full else math.inf)
      count += len(active_workers)
      if count >= next_estimate:
        # The M-th smallest end so far. Further levels can only lower it.
        all_ends = np.concatenate([ends for _, ends in levels])
        last = self._messages - 1
        horizon = np.partition(all_ends, last)[last]
        next_estimate = count + count // 16
      # Drop each worker with a job that ends after the horizon: its next jobs
      # end even later.
      if horizon < math.inf and (ends > horizon).any():
        active_workers = active_workers[ends <= horizon]
    return levels

  def _predecessors(self) -> np.ndarray:
    """Returns the index of the same worker's previous message, or -1."""
    # A stable sort by worker puts each message after its worker's previous one.
    order = np.argsort(self._worker, kind="stable")
    predecessor = np.full(len(order), -1)
    predecessor[order[1:]] = order[:-1]
    predecessor[: self._offsets[1]] = -1
    return predecessor

  def _trigger_ranks(
    self,
    indices: np.ndarray,
    rank: np.ndarray,
    level_ranks: Callable[[np.ndarray], np.ndarray],
  ) -> np.ndarray:
    """Returns the rank of the trigger of each job of `indices`; -1 if the job
    starts at the beginning. A job has the index of its message."""
    predecessor = self._predecessor[indices]
    trigger_ranks = np.where(predecessor < 0, -1, rank[predecessor])
    if self._bound is None:
      return trigger_ranks
    # With a bound s, job k also needs the last message of level k - s - 1. The
    # later of the two messages is the trigger.
    level = self._level[indices] - self._bound - 1
    is_bounded = level >= 0
    trigger_ranks[is_bounded] = np.maximum(
      trigger_ranks[is_bounded], level_ranks(level[is_bounded])
    )
    return trigger_ranks

  def _ranks(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns (message indices in the order in which they are received, rank of
    each message). Messages of equal times are sorted by the ranks of their
    triggers, then by worker."""
    order = np.argsort(self._end_time, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    last_rank_of: dict[int, int] = {}  # level -> rank of its last message

    def level_ranks(levels):
      ranks = np.empty(len(levels), np.int64)
      for level in np.unique(levels).tolist():
        if level not in last_rank_of:
          level_slice = slice(self._offsets[level], self._offsets[level + 1])
          last_rank_of[level] = rank[level_slice].max()
        ranks[levels == level] = last_rank_of[level]
      return ranks

    # A tie is a group of messages with equal times, which are sorted by the
    # ranks of their triggers. A trigger is earlier than its job's message. So
    # the loop sorts the ties from the earliest on, and the ranks of triggers
    # are final when they are read. Tie g has the positions tie_starts[g], ...,
    # tie_stops[g] - 1 of `order`.
    ends = self._end_time[order]
    tied = np.flatnonzero(ends[1:] == ends[:-1])
    group_starts = np.flatnonzero(np.diff(tied, prepend=-2) > 1)
    tie_starts = tied[group_starts]
    tie_stops = np.append(tied[group_starts[1:] - 1], tied[-1:]) + 2
    for start, stop in zip(
      tie_starts.tolist(), tie_stops.tolist(), strict=True
    ):
      if start >= self._messages:
        break
      tie = order[start:stop]
      trigger_ranks = self._trigger_ranks(tie, rank, level_ranks)
      tie = tie[np.lexsort((self._worker[tie], trigger_ranks))]
      order[start:stop] = tie
      rank[tie] = np.arange(start, stop)
    return order, rank

  def rows(self):
    """Returns the columns (time, worker, seq, job, action) of all rows, from
    the first starts on."""
    order, rank = self._ranks()
    last_ranks = np.maximum.reduceat(rank, self._offsets[:-1])
    level_is_full = np.diff(self._offsets) == self._workers
    # A level without all its workers never ends, so it is no trigger.
    last_ranks[~level_is_full] = len(rank)
    indices = np.arange(len(rank))
    trigger_ranks = self._trigger_ranks(indices, rank, last_ranks.__getitem__)
    granted_indices = np.flatnonzero(trigger_ranks < self._messages - 1)
    # Jobs are numbered by trigger and then by worker.
    sort_keys = trigger_ranks[granted_indices] * self._workers
    sort_keys += self._worker[granted_indices]
    granted_indices = granted_indices[np.argsort(sort_keys)]
    trigger_ranks = trigger_ranks[granted_indices]
    jobs = np.empty(len(rank), np.int64)
    jobs[granted_indices] = np.arange(len(granted_indices))
    received_indices = order[: self._messages]

    # Row numbers:
    #   row of the start of job j = j + (rank of its trigger + 1)
    #   row of message r = r + (number of jobs with a trigger of a rank below r)
    start_rows = np.arange(len(granted_indices)) + trigger_ranks + 1
    message_ranks = np.arange(self._messages)
    end_rows = message_ranks + np.searchsorted(trigger_ranks, message_ranks)
    level = self._level[granted_indices]
    trigger_times = self._end_time[order[trigger_ranks]]
    start_times = np.where(trigger_ranks < 0, self._start_time, trigger_times)
    start_actions = np.where(level % self._fetch_every, base.KEEP, base.SEND)
    index_of_row = np.empty(len(start_rows) + len(end_rows), np.int64)
    times = np.empty(len(index_of_row))
    action = np.full(len(index_of_row), base.RECEIVE, np.int8)
    index_of_row[start_rows] = granted_indices
    index_of_row[end_rows] = received_indices
    times[start_rows] = start_times
    times[end_rows] = self._end_time[received_indices]
    action[start_rows] = start_actions
    return [
      *(times, self._worker[index_of_row], self._level[index_of_row]),
      *(jobs[index_of_row], action),
    ]


class _Rounds:
  """Rounds that end with a fixed number of their messages.

  A round starts `rules.round` + `rules.backup` jobs, first at idle workers. If
  too few workers are idle, each worker starts another job of the round when its
  message arrives, until the round has all its jobs. The round ends with the
  first `rules.round` messages of its jobs. The other messages of its jobs are
  late: the server receives them when they arrive, during later rounds.
  """

  def __init__(self, rules, draws, workers):
    self._draws, self._round_size = draws, rules.round
    self._jobs_of_round = rules.round + rules.backup
    # [N] each: values of a worker's current job. The end of an idle worker is
    # infinity.
    self._end_time = np.full(workers, math.inf)
    self._seq = np.full(workers, -1)
    self._job = np.zeros(workers, np.int64)
    self._round_of_job = np.zeros(workers, np.int64)
    # Index of the round, number of jobs started, number of messages received.
    self._round = self._jobs = self._received = 0
    # float64[5, R] each, columns of R rows; integers below 2^53 are exact.
    self._rows = []

  def until(self, messages: int) -> base.Trace:
    """Returns the trace of M = `messages` messages. It has more messages if
    message M is one of those that the server receives at the end of a round."""
    now = 0.0
    while True:
      now = self._play_round(now)
      if self._received + self._round_size >= messages:
        break
      self._received += self._round_size
    rows = np.concatenate(self._rows, axis=1)
    # Late messages alone may bring the count to M before the round ends.
    if self._received >= messages:
      receive_rows = np.flatnonzero(rows[-1] == base.RECEIVE)
      rows = rows[:, : receive_rows[messages - 1] + 1]
    return _trace(rows)

  def _start(
    self, workers: np.ndarray, times: np.ndarray | float
  ) -> np.ndarray:
    """Starts a job at each of these workers; returns the rows."""
    self._end_time[workers] = times + self._draws.peek(workers)
    self._draws.use(workers)
    self._seq[workers] += 1
    self._job[workers] = self._jobs + np.arange(len(workers))
    self._jobs += len(workers)
    self._round_of_job[workers] = self._round
    return self._columns(workers, times, base.SEND)

  def _columns(
    self, workers: np.ndarray, times: np.ndarray | float, action: int
  ) -> np.ndarray:
    """Returns rows, float[5, W], of the current jobs of W workers."""
    rows = np.empty((len(base.Trace._fields), len(workers)))
    rows[0], rows[1], rows[2] = times, workers, self._seq[workers]
    rows[3], rows[4] = self._job[workers], action
    return rows

  def _play_round(self, now: float) -> float:
    """Plays a round; returns the time at which it is complete."""
    # [1] Idle workers start jobs of the round.
    starters = np.flatnonzero(self._end_time == math.inf)[: self._jobs_of_round]
    self._rows.append(self._start(starters, now))
    jobs_left = self._jobs_of_round - len(starters)  # jobs that may still start
    # RECEIVE rows of this round's messages; they are added at the round's end.
    round_messages = []
    # [2] Messages arrive, and their workers may start another job.
    messages_left = self._round_size
    while messages_left:
      arrivals, n_restarts = self._next_arrivals(jobs_left, messages_left)
      times = self._end_time[arrivals]
      receive_rows = self._columns(arrivals, times, base.RECEIVE)
      is_on_time = self._round_of_job[arrivals] == self._round
      messages_left -= int(is_on_time.sum())
      round_messages.append(receive_rows[:, is_on_time])
      late_rows = receive_rows[:, ~is_on_time]
      self._received += late_rows.shape[1]
      self._end_time[arrivals] = math.inf
      start_rows = self._start(arrivals[:n_restarts], times[:n_restarts])
      jobs_left -= n_restarts
      # An arrival has a RECEIVE row if it is late, then a SEND row if the
      # worker starts again.
      arrival_of_row = np.flatnonzero(~is_on_time), np.arange(n_restarts)
      order = np.argsort(np.concatenate(arrival_of_row), kind="stable")
      self._rows.append(
        np.concatenate([late_rows, start_rows], axis=1)[:, order]
      )
      now = times[-1]
    self._round += 1
    # [3] The server receives all messages of a round at its end, sorted by job.
    received = np.concatenate(round_messages, axis=1)
    received[0] = now
    self._rows.append(received[:, np.argsort(received[3])])
    return now

  def _next_arrivals(
    self, jobs_left: int, messages_left: int
  ) -> tuple[np.ndarray, int]:
    """Returns (workers, n_restarts): the workers in the order of their next
    messages, and how many of them, from the first on, start another job.

    The message of the last worker completes the round. The list ends
    earlier if the message of a restarted job would arrive before the next
    message of the list."""
    busy = np.flatnonzero(self._end_time < math.inf)
    order = busy[np.lexsort((self._job[busy], self._end_time[busy]))]
    # Messages of this round, up to each one in `order`.
    n_on_time = np.cumsum(self._round_of_job[order] == self._round)
    # The message at this index completes the round.
    completing_index = int(np.searchsorted(n_on_time, messages_left))
    order = order[: completing_index + 1]
    n_restarts = min(jobs_left, completing_index, len(order))
    if n_restarts:
      restarting = order[:n_restarts]
      restart_ends = self._end_time[restarting] + self._draws.peek(restarting)
      # The earliest end among the jobs restarted before each arrival.
      earliest = np.full(len(order), math.inf)
      earliest[1 : n_restarts + 1] = np.minimum.accumulate(restart_ends)[
        : len(order) - 1
      ]
      earliest[n_restarts + 1 :] = restart_ends.min()
      is_overtaken = self._end_time[order] > earliest
      if is_overtaken.any():
        order = order[: int(np.argmax(is_overtaken))]
        n_restarts = min(n_restarts, len(order))
    return order, n_restarts
