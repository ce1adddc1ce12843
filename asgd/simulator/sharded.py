"""The engine for a server in shards: obeys one trace a shard.

Shards obey their traces each by itself, as they did when they wrote them. What
ties them together is the work: a job starts when all of them have sent their
part of the ticket, and none can receive before it is done.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, sharding
from asgd.simulator import host


class Sharded(NamedTuple):
  """What a run came to."""

  states: tuple[base.ServerState, ...]  # S
  records: tuple[base.Records, ...]  # S


class _Shard:
  """One shard, its trace and how far it is."""

  def __init__(self, state, trace, seqs, workers):
    self.state = state
    self.rows = list(
      zip(*(column.tolist() for column in (*trace, seqs)), strict=True)
    )
    self.row = 0
    # Until the job has ended at all shards: a worker that the lead took for
    # dead may yet have handed in its part elsewhere.
    self.tickets: dict[tuple[int, int], base.Ticket] = {}
    self.kept: list[base.Ticket | None] = [None] * workers
    self.known, self.seen = [], []
    self.marks = {
      row: None for _, _, row, action, _ in self.rows if action == base.ROLLBACK
    }


class _Job(NamedTuple):
  """A message that was computed."""

  parts: list[Any]  # S
  loss: Any


def run_sharded(
  server: base.Server,
  worker: base.Worker,
  params: Any,
  traces: Sequence[base.Trace],
  seqs: Sequence[np.ndarray],
  *,
  workers: int,
  batch: Callable[[int, int], base.Batch],
  root: jax.Array,
  wire: str | None = None,
  totals: Sequence[Sequence[tuple[float, ...]]] | None = None,
  group: host.Group = host.Group(),  # noqa: B008
  plan: sharding.Plan | None = None,
) -> Sharded:
  """Replays a run whose server was in shards.

  Args:
    server: the pure server that each shard runs on its part.
    worker: what every worker does.
    params: before the first message.
    traces: of each shard; S of them, at least two.
    seqs: int[E] of each: the sequence number, at its worker, of the message
      that a row is about.
    workers: N.
    batch: (worker, job) -> NumPy arrays.
    root: key of the run.
    wire: as in `host.compile_steps`.
    totals: of each row of each trace, those that its message needed; None where
      the algorithm needs none.
    group: the devices of each worker.
    plan: what each shard holds; None is `sharding.plan`. With the stages of a
      pipeline as shards (`sharding.plan_of`) and their traces
      (`pipeline.analyze.traces`), the delays of a pipeline are those of the
      simulation.

  Returns:
    The shards' states and records.

  Raises:
    ValueError: if the traces do not belong together.
  """
  plan = sharding.plan(params, len(traces)) if plan is None else plan
  steps = host.compile_steps(server, worker, wire=wire, group=group)
  numbers = [jnp.int32(w) for w in range(workers)]
  shards = [
    _Shard(host.start(server, part), trace, seq, workers)
    for part, trace, seq in zip(
      sharding.split(plan, params), traces, seqs, strict=True
    )
  ]
  states: dict[tuple[int, int], Any] = {}  # (worker, holder) -> worker state
  holder: dict[tuple[int, int], int] = {}  # (worker, seq) -> holder
  holders = [0] * workers
  done: dict[tuple[int, int], _Job] = {}
  ended: dict[tuple[int, int], int] = {}  # at how many shards

  def job_of(key, job):
    """Returns a message, computing it if all shards have sent; else None."""
    if key in done:
      return done[key]
    tickets = [shard.tickets.get(key) for shard in shards]
    if key not in holder or any(ticket is None for ticket in tickets):
      return None
    w, who = key[0], (key[0], holder[key])
    ticket = tickets[0]._replace(
      params=sharding.join(plan, [t.params for t in tickets])
    )
    if who not in states:
      states[who] = worker.init(params)
    states[who], message, metrics = steps.work(
      states[who], ticket, batch(w, job), root, np.int32(job)
    )
    message, loss = host.fetch((message, metrics.loss))
    done[key] = _Job(sharding.split(plan, message), loss)
    return done[key]

  def close(key):
    ended[key] = ended.get(key, 0) + 1
    if ended[key] == len(shards):
      for shard in shards:
        shard.tickets.pop(key, None)
      for table in (done, ended, holder):
        table.pop(key, None)

  def obey(index, shard):
    """Obeys one row; False if it has to wait for other shards."""
    time, w, job, action, seq = shard.rows[shard.row]
    key = w, seq
    if shard.row in shard.marks:
      shard.marks[shard.row] = jax.tree.map(jnp.copy, shard.state)
    if action == base.SEND:
      ticket = steps.send(shard.state, numbers[w])
      shard.tickets[key] = ticket
      shard.kept[w] = ticket._replace(fresh=np.False_)
    elif action == base.KEEP:
      shard.tickets[key] = shard.kept[w]
    elif action == base.RECEIVE:
      message = job_of(key, job)
      if message is None:
        return False
      args = shard.state, shard.tickets[key], message.parts[index], message.loss
      if totals is None:
        shard.state, row = steps.receive(*args)
      else:
        known = host.as_totals(totals[index][shard.row])
        shard.state, row = steps.stage(known, *args).result
      close(key)
      shard.known.append((time, w, job))
      shard.seen.append(row)
    elif action in (base.LOST, base.REJECT):
      close(key)
    elif action == base.JOIN and index == 0:
      holders[w] = job
    elif action == base.ROLLBACK:
      shard.state = jax.tree.map(jnp.copy, shard.marks[job])
    if index == 0 and action in (base.SEND, base.KEEP):
      holder[key] = holders[w]
    shard.row += 1
    return True

  waiting = set(range(len(shards)))
  while waiting:
    before = sum(shard.row for shard in shards)
    for index, shard in enumerate(shards):
      while shard.row < len(shard.rows) and obey(index, shard):
        pass
      if shard.row == len(shard.rows):
        waiting.discard(index)
    if waiting and before == sum(shard.row for shard in shards):
      stuck = {i: shards[i].rows[shards[i].row] for i in sorted(waiting)}
      raise ValueError(
        f"the shards' traces do not belong together: no row of {stuck} (time,"
        " worker, job, action, seq) can be obeyed"
      )
  return Sharded(
    tuple(shard.state for shard in shards),
    tuple(host.records(shard.known, shard.seen) for shard in shards),
  )
