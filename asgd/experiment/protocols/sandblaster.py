"""A coordinator of batch training (Sandblaster): simulated and live."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd import base, orders, sandblaster
from asgd.experiment import live_files
from asgd.experiment.engines import (
  coordinated,
  live,
  live_batches,
  parameter_server,
)
from asgd.experiment.engines.coordinated import CoordinatedPlan
from asgd.experiment.findings import Failure, Finding
from asgd.experiment.protocol import (
  LIVE_ENGINES,
  LiveCells,
  Protocol,
  Recomputed,
  Refusal,
  Runner,
)
from asgd.experiment.protocols import server
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import read_records, records_path

Description = Mapping[str, Any]
_NEVER_STALE = (
  "a free worker takes the next portions, and gradients are never stale"
)
_SIMULATED = "a simulated time has no use where workers have real times"


def _replay(
  plan: CoordinatedPlan, cell: Any, folder: Path, description: Description
) -> Recomputed:
  """Replays a cell from the jobs that were received. The result does not depend
  on the workers that computed them."""
  trace = server.PROTOCOL.live.trace(folder, description)
  # The same keys as in training: one for the parameters, one for the jobs.
  init_key, root = jax.random.split(jax.random.key(cell.seed))
  params = jax.device_get(plan.problem.init(init_key))
  records = read_records(records_path(folder, 0))
  rows = zip(trace.action.tolist(), trace.job.tolist(), strict=True)
  # Backup workers may send copies of a job: the first that arrives counts.
  jobs, _ = sandblaster.count_jobs(rows, records.accepted)
  work = plan.work(cell.seed, root)
  computed = sandblaster.recompute(plan.settings, params, work, jobs)
  return Recomputed(trace, records, computed.params)


def _audit(
  plan: CoordinatedPlan, folder: Path, result: Any, failures: Sequence[Failure]
) -> Generator[Finding, None, None]:
  """Yields the findings of a finished cell: each job counts once, whichever
  workers computed copies of it. Deaths of workers are not checked, because a
  driver that resumes drops their rows."""
  del plan, result, failures
  events = read_journal(journal_path(folder, 0))
  records = read_records(records_path(folder, 0))
  received = sum(event.action == base.RECEIVE for event in events)
  rows = ((event.action, event.job) for event in events)
  jobs, counted_twice = sandblaster.count_jobs(rows, records.accepted)
  counts = f"{received} received, {len(jobs)} counted, {counted_twice} twice"
  is_complete = received == len(records.loss)
  yield Finding("jobs", counts, not counted_twice and is_complete)
  # The coordinator's rules are not known here: tickets and workers are checked.
  try:
    orders.check(events)
  except ValueError as error:
    yield Finding("order", str(error), False)
  else:
    yield Finding("order", "obeys the protocol", True)


PROTOCOL = Protocol(
  name="sandblaster",
  participants="a coordinator",
  recipes=sandblaster.RECIPES,
  runners={
    "simulate": Runner(
      plan=coordinated.plan,
      start=coordinated.CoordinatedEngine,
      describe=coordinated.describe,
      check=parameter_server.check,
    ),
    **live.runners(
      live_batches.LiveBatchEngine,
      plan=coordinated.plan,
      describe=live_batches.describe,
    ),
  },
  # The lead writes the same files as the lead of a server.
  live=LiveCells(
    # Called only for recipes without a name; all of Sandblaster's have one.
    wrote_folder=lambda folder, description: False,
    trace=server.PROTOCOL.live.trace,
    read=live_files.read_shards,
    check=live_files.read_shards,
    check_replayable=server.check_replayable,
    rows=server.PROTOCOL.live.rows,
    replay=_replay,
    audit=_audit,
    # No `simulation`: the coordinator decides by commands, not by an order.
    link_faults="a coordinator calls its workers, and no call's answer is lost",
  ),
  refusals=(
    # Settings that would change the loss, its gradient, or the steps.
    Refusal("optimizer", "L-BFGS is the optimizer"),
    Refusal("clip_norm", "a clipped gradient is not that of the loss"),
    Refusal("memory", "its shards send a worker all parameters"),
    Refusal("compress", "a coded gradient is not that of the loss"),
    Refusal(
      "compress_down", "its loss must be computed with the exact parameters"
    ),
    Refusal("simulator", "its simulation has one engine"),
    # Rules of a server: which workers may start, which messages count.
    Refusal("gate", _NEVER_STALE),
    Refusal("allocation", _NEVER_STALE),
    Refusal("order", "its order follows from its portions"),
    Refusal("server.reads", _NEVER_STALE, engines=("simulate",)),
    Refusal("network", "its live messages have real times", engines=("ray",)),
    # Live shards are the coordinator's, not a server's.
    Refusal(
      "server.shards",
      "its shards are an option of its recipe",
      "write config.runs.{label}.shards={value}",
      engines=LIVE_ENGINES,
    ),
    Refusal(
      "server.consistent",
      "its shards are always consistent",
      engines=LIVE_ENGINES,
    ),
    Refusal(
      "server.wire", "it would change what is computed", engines=LIVE_ENGINES
    ),
    # Durations of the simulation.
    Refusal("recipe.loading", _SIMULATED, engines=LIVE_ENGINES),
    Refusal("recipe.restart", _SIMULATED, engines=LIVE_ENGINES),
  ),
  columns=coordinated.COLUMNS,
  column="evaluations_of_batch",
)
