"""Microseconds to make, check and summarise a row of an order.

Orders of a fixed set of workers, over a network that takes no time, are
computed as whole columns. For comparison the dispatcher of live runs computes
the same orders event by event. Growth is the time of a row with 8,192 workers
over that with 8.
"""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from asgd import orders
from asgd.orders import durations, play
from asgd.orders.protocol import Rules

from .report import BenchReport, Measured, peak_bytes

_WORKERS = (8, 64, 512, 8192)  # growth compares the last with the first
_MESSAGES, _PLAYED_MESSAGES = 200_000, 10_000  # of a turn; playing is slower
_LARGE = {10_000: 5_000_000, 100_000: 500_000}  # workers -> messages


def _protocols(workers: int, messages: int) -> dict[str, Rules]:
  """Returns the rules that are measured: one of each kind."""
  backup = workers // 8
  return {
    "asynchronous": Rules(),
    "bulk synchronous": Rules(bound=0),
    "stale synchronous, 3": Rules(bound=3),
    "backup workers, 1/8": Rules(round=workers - backup, backup=backup),
    "warm start": Rules(warm_start=messages // 100),
  }


def _make(rules: Rules, workers: int, messages: int) -> int:
  """Makes, checks and summarises an order in columns; returns its rows."""
  clock = durations.homogeneous()
  trace = play.play_rules(rules, clock, workers, messages)
  # The check walks over all rows, and staleness is what reports need.
  # A worker of a round with backups holds messages that wait, too.
  orders.check(trace, depth=messages if rules.round else 1)
  orders.staleness(trace).mean()
  return len(trace.time)


def _time_columns(rules: Rules, workers: int) -> float:
  """Returns the microseconds of a row, in CPU time of this process."""
  start_time = time.process_time()
  rows = _make(rules, workers, _MESSAGES)
  return (time.process_time() - start_time) / rows * 1e6


def _time_played(rules: Rules, workers: int) -> float:
  """Returns the microseconds of a row of an order that is played event by
  event, after all workers have started."""
  # The start differs from the rest: no worker waits yet.
  order = play.begin(rules, durations.homogeneous(), workers)
  order.until(start := 2 * workers + rules.warm_start)
  rows_before, start_time = len(order.rows), time.process_time()
  order.until(start + _PLAYED_MESSAGES)
  seconds = time.process_time() - start_time
  return seconds / (len(order.rows) - rows_before) * 1e6


def _by_workers(
  report: BenchReport,
  title: str,
  measure: Callable[[Rules, int], float],
  rounds: int,
) -> None:
  """Prints the time of a row for each number of workers, measured in turns."""
  table = report.table(
    title,
    "protocol",
    {f"us, {workers:,}": ".2f" for workers in _WORKERS},
    {"growth to 8,192 workers": ".2f"},
  )
  for name in _protocols(8, 1):
    # The first call in a process takes longer: it does not count.
    measure(_protocols(_WORKERS[0], _MESSAGES)[name], _WORKERS[0])
    turns = [
      [measure(_protocols(n, _MESSAGES)[name], n) for n in _WORKERS]
      for _ in range(rounds)
    ]
    times = np.array(turns).T  # float[numbers of workers, rounds]
    # 1.5: a row may cost O(log N) more.
    growth = Measured(times[-1] / times[0], "<= 1.5")
    table.row(name, *np.median(times, axis=1), growth)


def _measure_in_process(
  name: str, workers: int, messages: int, results: Any
) -> None:
  """Makes one order; puts (rows, seconds, peak memory in GB) into `results`."""
  start_time = time.perf_counter()
  rows = _make(_protocols(workers, messages)[name], workers, messages)
  seconds = time.perf_counter() - start_time
  results.put((rows, seconds, peak_bytes() / 1e9))


def _large(report: BenchReport) -> None:
  """Prints time and memory of large orders, against a limit for each."""
  table = report.table(
    "Large orders, made, checked and summarised in a process of their own",
    "protocol, workers",
    {"M rows": ".2f", "us a row": ".2f"},
    {"s": ".1f", "GB at most": ".2f"},
    width=30,
  )
  # A forked process would inherit this one's peak of memory.
  context = multiprocessing.get_context("spawn")
  for workers, messages in _LARGE.items():
    for name in _protocols(workers, messages):
      results = context.SimpleQueue()
      arguments = name, workers, messages, results
      process = context.Process(target=_measure_in_process, args=arguments)
      process.start()
      process.join()
      if process.exitcode:
        raise ValueError(f"{name} of {workers:,} workers has failed")
      # A queue of the process that has ended still has its result.
      rows, seconds, peak = results.get()
      table.row(
        f"{name}, {workers:,}",
        *(rows / 1e6, seconds / rows * 1e6),
        *(Measured(seconds, "<= 60"), Measured(peak, "<= 4")),
      )


def run(report: BenchReport, rounds: int = 2, *, large: bool = False) -> None:
  """Measures all protocols in `rounds` turns. If `large`, measures large orders
  instead: 10 M rows of 10,000 workers and 1 M rows of 100,000."""
  if large:
    _large(report)
    return
  how = "made by columns, checked and summarised"
  _by_workers(report, f"us for a row, {how}", _time_columns, rounds)
  _by_workers(report, "us for a row, made event by event", _time_played, rounds)
