"""Tables of keyed rows: in simulated time and live."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from asgd import base, simulator, tables
from asgd.experiment import live_files
from asgd.experiment.engines import live, live_tables, parameter_server
from asgd.experiment.engines import tables as simulated
from asgd.experiment.engines.tables import TablePlan
from asgd.experiment.findings import Failure, Finding, worker_findings
from asgd.experiment.protocol import (
  LIVE_ENGINES,
  LiveCells,
  Protocol,
  Recomputed,
  Refusal,
  Runner,
)
from asgd.live.tables import files
from asgd.orders import trace

Description = Mapping[str, Any]
_OWN_SHARDS = "its tables have separate shards"
_WAITS = "its consistency decides which workers wait"


def _trace(folder: Path, description: Description) -> base.Trace:
  """Returns the trace of all workers, merged from their journals."""
  return files.read_trace(folder, description["cell"]["workers"])


def _read(folder: Path, description: Description) -> live_files.LiveFiles:
  """Reads the files of a cell. Its workers record their jobs; its shards have
  orders and no records."""
  shards = live_tables.table_shards(folder)
  workers = description["cell"]["workers"]
  orders = files.read_orders(folder, shards, workers)
  return live_files.LiveFiles(
    dict(description),
    journals=list(orders.shards),
    spans=live_files.spans_of(folder, range(workers)),
    records=[simulator.concatenate([])] * shards,  # no rows
    jobs=files.read_rows_of_workers(folder),
  )


def _replay(
  plan: TablePlan, cell: Any, folder: Path, description: Description
) -> Recomputed:
  """Replays a cell in the orders of its shards and workers."""
  workers = description["cell"]["workers"]
  # The first of the keys is for the tables, which `first_tables` makes.
  _, root = jax.random.split(jax.random.key(cell.seed))
  try:
    replayed = tables.replay.replay(
      plan.settings,
      live_tables.first_tables(plan, cell.seed),
      live_tables.make_division(plan),
      plan.work(cell.seed, root),
      files.read_orders(folder, plan.settings.shards, workers),
      jobs=plan.messages // workers,  # of each worker
      seed=cell.seed,
    )
  except tables.replay.OrdersError as error:
    raise ValueError(
      f"{folder}: {error}. A file shard-*.csv or trace-*.csv was changed:"
      " restore it as the run wrote it"
    ) from error
  # A worker's records are in the order of its jobs; together they are sorted
  # by time, as the run's are.
  records_by_worker = [files.columns(rows) for rows in replayed.records]
  records = files.join_by_time(records_by_worker).plain
  params = plan.join(replayed.tables)
  return Recomputed(_trace(folder, description), records, params)


def _audit(
  plan: TablePlan, folder: Path, result: Any, failures: Sequence[Failure]
) -> Generator[Finding, None, base.Records | None]:
  """Yields the findings of a finished cell; returns the records that a replay
  has to repeat. Each shard has a separate order."""
  del result
  events = [*trace.events(files.read_trace(folder, plan.workers))]
  records = files.FILES.read_all(folder, plan.workers).plain
  # A worker sends the updates of the jobs of one clock together.
  depth = plan.settings.clock_every
  yield from worker_findings(events, records, plan, depth, failures)
  received = sum(event.action == base.RECEIVE for event in events)
  # A worker that was killed between a row and its record left no record.
  return records if len(records.loss) == received else None


PROTOCOL = Protocol(
  name="tables",
  participants="tables",
  recipes=tables.RECIPES,
  runners={
    "simulate": Runner(
      plan=simulated.plan,
      start=simulated.TableEngine,
      describe=simulated.describe,
      check=parameter_server.check,
    ),
    **live.runners(
      live_tables.LiveTableEngine,
      plan=live_tables.plan,
      describe=live_tables.describe,
    ),
  },
  live=LiveCells(
    # Only the shards of tables have journals of this name.
    wrote_folder=lambda folder, description: any(folder.glob("shard-*.csv")),
    trace=_trace,
    read=_read,
    check=live_tables.check_files,
    rows=files.read_rows_of_workers,
    replay=_replay,
    audit=_audit,
    link_faults=(
      "a worker of tables repeats a request until it is answered"
    ),
  ),
  refusals=(
    # Settings that need all parameters at one worker, or dense messages.
    Refusal("clip_norm", "a worker has only the rows of its batch"),
    Refusal("memory", "a worker has only the rows of its batch"),
    Refusal("compress_down", "rows are sent as they are"),
    Refusal("simulator", "its simulation has one engine"),
    # Rules of a server: which workers may start, which messages count.
    Refusal("gate", _WAITS),
    Refusal("allocation", _WAITS),
    Refusal("order", "its order follows from its consistency"),
    Refusal("server.reads", "a job reads single rows", engines=("simulate",)),
    Refusal("network", "its live messages have real times", engines=("ray",)),
    # Live shards are those of the tables, not a server's.
    Refusal(
      "server.shards",
      _OWN_SHARDS,
      "write config.runs.{label}.shards={value}",
      engines=LIVE_ENGINES,
    ),
    Refusal("server.consistent", _OWN_SHARDS, engines=LIVE_ENGINES),
    Refusal("server.wire", _OWN_SHARDS, engines=LIVE_ENGINES),
  ),
  columns=simulated.COLUMNS,
  column="differential_mean",
  updates=True,
)
