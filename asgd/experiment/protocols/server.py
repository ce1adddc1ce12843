"""A server of dense parameters: in simulated time, live, and on a mesh."""

import itertools
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from asgd import algorithms, base, orders, sharding, simulator
from asgd.experiment import live_files
from asgd.experiment.engines import (
  allocations,
  live,
  live_server,
  mesh,
  mesh_plan,
  mesh_programs,
  networks,
  server_results,
  simulate,
)
from asgd.experiment.engines.parameter_server import ServerPlan
from asgd.experiment.findings import Failure, Finding, deaths, jobs, updates
from asgd.experiment.protocol import (
  LIVE_ENGINES,
  LiveCells,
  Protocol,
  Recomputed,
  Refusal,
  Runner,
)
from asgd.live.deadlines import DEAD_FACTOR
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import read_records, records_path
from asgd.orders.trace import from_events

Description = Mapping[str, Any]


_Plan = TypeVar("_Plan", bound=ServerPlan)


# Folders of live cells, and of simulated shards.


def _trace(folder: Path, description: Description) -> base.Trace:
  """Returns the lead's trace."""
  ((_, events), *_) = live_files.read_traces(folder, description)
  return from_events(events)


def check_replayable(folder: Path, description: Description) -> None:
  """Raises ValueError for journals that cannot be replayed or have no
  message."""
  for path, events in live_files.read_traces(folder, description):
    orders.check(events, depth=len(events), path=path)
    if not any(event.action == base.RECEIVE for event in events):
      raise ValueError(
        f"{path} has no received message, so there is nothing to replay (yet)"
      )


def train_in_order(
  plan: ServerPlan,
  seed: int,
  traces: Sequence[base.Trace],
  totals: Any = None,
  **options: Any,
) -> tuple[Any, base.Records]:
  """Trains a cell in the order of its shards' traces.

  Args:
    plan: the plan of the cell.
    seed: the seed of the cell.
    traces: one for each shard, the lead's first.
    totals: sums over all shards, by shard and event; None: there are none.
    **options: of `simulator.run_sharded`.

  Returns:
    (final parameters, the lead's records).
  """
  # [1] The start, by the same keys as in training.
  init_key, root = jax.random.split(jax.random.key(seed))
  params = jax.device_get(plan.problem.init(init_key))
  options["wire"] = networks.dtype_on_wire(plan.run.config)
  data = {"batch": plan.job_batches(seed), "root": root}
  # [2] One server. Equal bits need the program of the run, which does not
  # overwrite messages.
  if len(traces) == 1:
    host = simulator.make_host(
      plan.server, plan.coded_worker(), keeps_messages=True, **options
    )
    simulation, records = simulator.run_whole(
      host, params, plan.workers, traces[0], **data
    )
    return jax.device_get(simulation.server.params), records
  # [3] Several shards, each in the order of its trace. Worker and shards have
  # the same shard plan.
  data |= {"workers": plan.workers, "totals": totals}
  shard_plan = sharding.make_plan(params, len(traces))
  worker = plan.coded_worker(shard_plan)
  sharded = simulator.run_sharded(
    plan.server, worker, params, traces, plan=shard_plan, **options, **data
  )
  shard_params = [jax.device_get(state.params) for state in sharded.states]
  final_params = sharding.join(shard_plan, shard_params)
  return final_params, sharded.records[0]


def plan_of_cell(plan: _Plan, folder: Path, seed: int) -> _Plan:
  """Returns the plan of a cell, with the allocation that its workers had."""
  if "live" in plan.run.config:
    return allocations.read(plan, folder, begun=True)
  return plan.of_seed(seed)


def _simulation(plan: ServerPlan, cell: Any, folder: Path) -> tuple[Any, Any]:
  """Returns (rules of a cell's order, trace -> (parameters, records))."""
  plan = plan_of_cell(plan, folder, cell.seed)
  return plan.rules(), lambda trace: train_in_order(plan, cell.seed, [trace])


def _replay(
  plan: ServerPlan, cell: Any, folder: Path, description: Description
) -> Recomputed:
  """Replays a cell from the journals of its shards."""
  journals = [
    events for _, events in live_files.read_traces(folder, description)
  ]
  traces = [from_events(events) for events in journals]
  plan = plan_of_cell(plan, folder, cell.seed)
  # Some algorithms need sums over all shards: the rows of the journals have
  # them. A cell without such sums has empty tuples.
  totals = [[event.totals for event in events] for events in journals]
  params, records = train_in_order(
    plan,
    cell.seed,
    traces,
    totals if any(map(any, totals)) else None,
    group=plan.devices,  # sums are divided among them
  )
  return Recomputed(traces[0], records, params)


def _audit(
  plan: ServerPlan, folder: Path, result: Any, failures: Sequence[Failure]
) -> Generator[Finding, None, base.Records | None]:
  """Yields the findings of a finished cell. Returns the records that a replay
  has to repeat; None if a rollback undid some of them."""
  # [1] The journals and records of all shards, the lead's first.
  config, rules = plan.run.config, plan.rules()
  server = config["server"]
  shards = range(server["shards"])
  journals = [read_journal(journal_path(folder, i)) for i in shards]
  shard_records = [read_records(records_path(folder, i)) for i in shards]
  # [2] Jobs, updates and workers that left.
  consistent = server["consistent"] and server["shards"] > 1
  yield from jobs(journals, plan.messages, consistent)
  messages_per_update, log_slots = plan.recipe.every, server["log"]
  yield from updates(
    journals, shard_records, result, messages_per_update, log_slots
  )
  # The shortest time after which a silent worker counts as failed; see
  # `asgd.live.deadlines`.
  slow_seconds = DEAD_FACTOR * config["live"]["late_seconds"]
  yield from deaths(journals[0], failures, rules.depth, slow_seconds)
  # [3] Whether the protocol allows the orders.
  errors = []
  for index, events in enumerate(journals):
    # `depth` limits a worker's open jobs only at the lead and outside rounds:
    # in a round, messages are received at its end, and other shards may still
    # have a ticket open that the lead has closed.
    depth = len(events) if index or rules.round else rules.depth
    try:
      orders.check(events, depth=depth)
    except ValueError as error:
      errors.append(f"shard {index}: {error}")
  yield Finding("order", "; ".join(errors) or "obeys the protocol", not errors)
  # The records of undone messages remain, and a replay does not repeat them.
  rollbacks = any(e.action == base.ROLLBACK for e in itertools.chain(*journals))
  return None if rollbacks else shard_records[0]


PROTOCOL = Protocol(
  name="server",
  participants="a server",
  recipes=algorithms.RECIPES,
  runners={
    "simulate": Runner(
      plan=simulate.plan,
      start=simulate.start,
      describe=server_results.describe,
      check=simulate.check,
    ),
    **live.runners(
      live_server.LiveServerEngine,
      plan=live_server.plan,
      describe=server_results.describe,
      check=live_server.check,
    ),
    "mesh": Runner(
      plan=mesh_plan.plan,
      programs=mesh_programs.model_steps,
      start=mesh.MeshEngine,
      describe=mesh.describe,
      check=mesh_plan.check,
      workers=lambda run: (1,),  # all devices compute one synchronous gradient
      devices=mesh.devices,
    ),
  },
  live=LiveCells(
    wrote_folder=lambda folder, description: False,  # it is the default
    trace=_trace,
    read=live_files.read_shards,
    check=live_files.read_shards,
    check_replayable=check_replayable,
    rows=lambda folder: read_journal(journal_path(folder, 0)),
    replay=_replay,
    audit=_audit,
    simulation=_simulation,
  ),
  refusals=(
    Refusal("network", "its live messages have real times", engines=("ray",)),
    Refusal(
      "server.delays",
      "its shards receive a message when it arrives",
      "leave it out, or use engine 'simulate'",
      engines=LIVE_ENGINES,
    ),
    Refusal(
      "server.reads",
      "its shards answer a worker when they are asked",
      "leave it out, or use engine 'simulate'",
      engines=LIVE_ENGINES,
    ),
  ),
  iterators=True,
)
