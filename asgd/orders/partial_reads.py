"""Partial reads: a worker reads the parameters block by block while the server
applies messages, so that its copy mixes versions.

  block b of w_hat = block b of the server's w at t + r d b / B,   b < B

  t  time at which the job starts
  d  time from then until its message is received
  r  share of that time in which the worker reads
  B  number of blocks

This is the inconsistent read of Lian et al.: block b of w_hat is that of
w_{k - tau_b}, with a staleness tau_b for each block. Messages are applied to
all blocks at once.

There is a trace for each block. All traces have the same RECEIVE rows. The SEND
rows of a later block are later. `asgd.simulator.Sharded` replays the traces,
with the blocks as shards: the Delay of each block has the staleness and the
parameters of that block. In live runs, workers read in this way from shards
without a common order (`server.consistent=False`).
"""

from collections.abc import Iterator

import numpy as np

from asgd import base, checks
from asgd.orders.trace import ENDS, Event, events, from_events


def by_block(
  trace: base.Trace, *, blocks: int, share: float = 1.0
) -> list[base.Trace]:
  """Returns the trace of each block, for workers that read block by block.

  Args:
    trace: the order of the run, without ROLLBACK rows; a worker's jobs end in
      the order in which they start.
    blocks: B. With one block the result is the trace.
    share: r, from 0 to 1. At 0 all traces are equal.

  Returns:
    B traces. For jobs that have not ended, d is the time until the end of the
    trace. A read at the same time as a message precedes the message.

  Raises:
    ValueError: for a value out of its range, and for a trace that rolls back.

  Source:
    Recht et al., "Hogwild!: a lock-free approach to parallelizing stochastic
    gradient descent", NIPS 2011, arXiv:1106.5730; Lian et al., "Asynchronous
    parallel stochastic gradient for nonconvex optimization", NIPS 2015,
    arXiv:1506.08272, the inconsistent read.

  Example:
    Worker 1 takes 2.5 and reads its second block at 1.25: between the two
    blocks, worker 0 has changed the parameters.

    >>> from asgd import orders
    >>> clock = orders.durations.constant(slowdown=[1, 2.5])
    >>> trace = orders.asynchronous(clock, workers=2, messages=3)
    >>> whole, later = orders.partial_reads.by_block(trace, blocks=2)
    >>> [row.time for row in orders.trace.events(later) if row.action == 0]
    [0.5, 1.25, 1.5, 2.25]
    >>> orders.staleness(whole).tolist(), orders.staleness(later).tolist()
    ([0, 0, 2], [0, 0, 1])
  """
  checks.integer("blocks", blocks)
  checks.real("share", share, lambda x: 0 <= x <= 1, "from 0 to 1")
  if (np.asarray(trace.action) == base.ROLLBACK).any():
    raise ValueError(
      "a trace that rolls back names its rows by their numbers, which partial"
      " reads change: use the trace of a run without failures"
    )
  rows = list(events(trace))
  ends = {row.key: row.time for row in rows if row.action in ENDS}

  def rows_of_block(block: int) -> Iterator[Event]:
    """Yields the rows of the trace of a block."""
    last_read: dict[int, float] = {}  # worker -> time of its last read
    for row in rows:
      if row.action == base.SEND:
        end = ends.get(row.key, rows[-1].time)
        delay = share * (end - row.time) * block / blocks
        row = row._replace(time=row.time + delay)
        last_read[row.worker] = row.time
      elif row.action == base.KEEP:
        # A job on a kept ticket may be granted before the ticket is read.
        read_time = last_read.get(row.worker, row.time)
        row = row._replace(time=max(row.time, read_time))
      yield row

  # A stable sort: rows with equal times keep the order of the trace.
  return [
    from_events(sorted(rows_of_block(b), key=lambda row: row.time))
    for b in range(blocks)
  ]
