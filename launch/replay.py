"""Computes again what a live run computed, from its traces.

A trace says who was sent what when, whose message came when, who died and who
took over. With the same order the same functions give the same bits, on the
same kind of device with as many cores (XLA divides its sums among them).
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, orders, sharding, simulator
from asgd.runtimes import files, shard
from launch import checkpoints, experiment, live_run, outputs

_CHUNK = 2000  # rows between two looks at the progress


class Replay(NamedTuple):
  """What a replay came to."""

  cell: experiment.Cell
  trace: base.Trace  # of the lead
  records: base.Records  # of the lead
  params: Any
  accuracy: float
  digest: str  # of the parameters
  recorded: str | None  # the same, of the run, if it was finished
  messages: int | None = None  # of the run, if it was finished


def load(folder: Path) -> tuple[dict[str, Any], list[list]]:
  """Returns (identity of the experiment, journals) of a live cell.

  Raises:
    ValueError: if the folder holds no such thing.
  """
  held = outputs.read_json(folder.parent.parent / "config.json")
  if held is None or not files.journal_path(folder, 0).exists():
    raise ValueError(
      f"--trace={folder} is no folder of a live run: it should be"
      " RESULTS/cells/NAME, as launch.serve makes them, with a trace-0.csv"
    )
  if "runtime" not in held:
    raise ValueError(f"--trace={folder} was simulated; there is no live trace")
  count = held["config"]["server"]["shards"]
  journals = [
    files.read_journal(files.journal_path(folder, index))
    for index in range(count)
  ]
  if not journals[0]:
    raise ValueError(f"the trace in {folder} holds no event")
  return held, journals


def _cell(held, folder):
  config = {**held["config"], **held["free"]}
  config = {k: v for k, v in config.items() if k in experiment.DEFAULTS}
  return config, folder.name


def run(folder: Path, *, data_dir: str | None = None) -> Replay:
  """Replays a cell of a live run.

  Args:
    folder: RESULTS/cells/NAME.
    data_dir: where the dataset's files are; None looks in the usual places.

  Raises:
    ValueError: if there is nothing to replay, or it cannot be obeyed.
  """
  held, journals = load(folder)
  config, name = _cell(held, folder)
  if config["live"]["devices"] > 1:
    jax.config.update("jax_num_cpu_devices", config["live"]["devices"])
  exp = experiment.build(config, data_dir=data_dir)
  if checkpoints.digest(exp.dataset[2:]) != held["dataset"]["sha256"]:
    raise ValueError(
      f"the data is not that of the run ({exp.dataset.source}); give the folder"
      " with --data_dir"
    )
  matching = [cell for cell in exp.cells if cell.name == name]
  if not matching:
    raise ValueError(f"{folder}: the experiment has no cell {name!r}")
  (cell,) = matching
  traces = [shard.entries_to_trace(entries) for entries in journals]
  for index, trace in enumerate(traces):
    path = files.journal_path(folder, index)
    try:
      orders.check(trace, depth=len(trace.time))
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error
    if not (trace.action == base.RECEIVE).any():
      raise ValueError(
        f"{path} holds no message that was received: there is nothing to be"
        " computed (yet)"
      )
  init_key, root = jax.random.split(jax.random.key(cell.seed))
  params = jax.device_get(exp.problem.init(init_key))
  server, worker = experiment.server(exp, cell), experiment.worker(exp, cell)
  wire, group = live_run.dtype_on_wire(config), live_run.group(exp, cell)
  common = {"batch": experiment.batches(exp, cell), "root": root}
  if len(traces) == 1:
    (trace,) = traces
    host = simulator.make_host(server, worker, wire=wire, group=group)
    simulation, parts = host.init(params, cell.workers), []
    while simulation.event < len(trace.time):
      end = min(simulation.event + _CHUNK, len(trace.time))
      simulation, part = host.run(simulation, trace, end, **common)
      parts.append(part)
    records = simulator.concatenate(parts)
    final = jax.device_get(simulation.server.params)
  else:
    seqs = [np.array([entry.seq for entry in journal]) for journal in journals]
    replayed = simulator.run_sharded(
      *(server, worker, params, traces, seqs),
      workers=cell.workers,
      wire=wire,
      totals=_totals(journals),
      group=group,
      **common,
    )
    records = replayed.records[0]
    plan = sharding.plan(params, len(traces))
    final = sharding.join(
      plan, [jax.device_get(state.params) for state in replayed.states]
    )
  result = outputs.read_json(folder / "result.json") or {}
  return Replay(
    *(cell, traces[0], records, final),
    exp.problem.evaluate(final).accuracy,
    checkpoints.digest(final),
    result.get("params_sha256"),
    result.get("messages"),
  )


def _totals(journals):
  """What was needed of all shards, if the algorithm needed anything."""
  totals = [[entry.totals for entry in journal] for journal in journals]
  return totals if any(map(any, totals)) else None


def describe(replay: Replay, held: dict[str, Any]) -> str:
  """Says what a replay came to, and whether it is what the run came to."""
  counts = {
    name: int((replay.trace.action == action).sum())
    for action, name in enumerate(base.ACTIONS)
  }
  events = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
  lines = [
    f"{replay.cell.name}: {events}",
    f"accuracy {100 * replay.accuracy:.1f} %, staleness mean"
    f" {replay.records.staleness.mean():.1f} max"
    f" {replay.records.staleness.max()}",
    f"parameters {replay.digest[:16]}",
  ]
  if replay.recorded is None:
    lines.append("the run did not finish, or not yet: nothing to compare with")
  elif replay.recorded == replay.digest:
    lines.append("the same parameters as the live run, to the bit")
  else:
    why, came = "", counts["receive"]
    if came < (replay.messages or 0):
      why = (
        f": the trace has {came} messages, result.json {replay.messages}; it"
        " was cut short"
      )
    elif held["cpus"] != os.cpu_count():
      why = f": it had {held['cpus']} CPU cores, this machine {os.cpu_count()}"
    lines.append(
      f"NOT the parameters of the live run ({replay.recorded[:16]}){why}"
    )
  return "\n".join(lines)
