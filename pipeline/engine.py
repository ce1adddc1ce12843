"""The engine `pipeline`: stages on devices, which execute a table.

Stages run on the devices of this process, which they may share, or in processes
of Ray, to the same bits. If one exits, the cell resumes from its checkpoint.

  from asgd import experiment
  from asgd.pipeline.engine import PIPELINE
  engines = {**experiment.ENGINES, "pipeline": PIPELINE}
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, checks, device_memory, simulator
from asgd import stages as stage_lib
from asgd.experiment import cells, checkpoint, engines, ray_runtime, storage
from asgd.experiment.cell_progress import MAX_ROWS, Segment
from asgd.experiment.engines import Column, mean
from asgd.pipeline import (
  analyze,
  cut,
  executor,
  processes,
  run_plan,
  spans,
  table,
)
from asgd.pipeline import state as state_lib
from asgd.pipeline.lanes import PipelineError
from asgd.pipeline.run_plan import PipelinePlan
from asgd.pipeline.state import PipelineState
from asgd.problems.cuts import slice_of

_OPTIONS = "weights", "recompute", "together", "room", "codec"  # of a plan
_ADVANCE_SECONDS = 1.0  # intended for an `advance` of an asynchronous table


def _arguments(
  plan: PipelinePlan, seed: int, clock: Callable[[], float]
) -> dict[str, Any]:
  """Returns the arguments of the executor for a cell."""
  init_key, _ = jax.random.split(jax.random.key(seed))
  params = plan.problem.init(init_key)
  stages = zip(plan.parts, itertools.pairwise(plan.cuts), strict=True)
  return {
    "schedule": plan.table,
    "parts": [
      part._replace(params=slice_of(params, first, last))
      for part, (first, last) in stages
    ],
    "extra": _extras(plan, seed),
    **{name: getattr(plan, name) for name in _OPTIONS},
    "clock": clock,
  }


def _extras(plan: PipelinePlan, seed: int) -> Callable[[int, int], Any]:
  """Returns (stage, microbatch) -> examples, labels and keys of the stage."""
  _, root = jax.random.split(jax.random.key(seed))
  batches = plan.problem.batches(seed, 1)
  return cut.extras(
    lambda microbatch: batches(0, microbatch), root, plan.table.stages
  )


def _remote_arguments(
  config: Any, dataset: Any, measurements: dict[str, Any], cell: cells.Cell
) -> dict[str, Any]:
  """Rebuilds `_arguments` from config and data, in a process of Ray."""
  import ray

  experiment = cells.build(
    config,
    engines={"pipeline": PIPELINE},
    dataset=ray.get(dataset),
    measurements=measurements,
  )
  plan = experiment.plan(cell)
  return _arguments(plan, cell.seed, time.time)  # comparable between machines


def _make_processes(context: engines.Context) -> processes.Processes:
  """Starts and returns the processes of a cell."""
  plan, machine = context.plan, context.machine
  count = min(machine.processes, plan.table.devices)
  dataset = machine.ray_reference(plan.dataset)  # which starts Ray
  if machine.gpus_per_process:
    import ray

    available = ray.cluster_resources().get("GPU", 0.0)
    _check_gpus(machine.gpus_per_process, count, available)
  config = cells.single_cell_config(plan.run, context.cell)
  make = functools.partial(
    _remote_arguments, config, dataset, plan.measurements, context.cell
  )
  affinity = getattr(os, "sched_getaffinity", lambda process: ())
  core_groups = np.array_split(sorted(affinity(0)), count)
  cores = None  # processes share cores if there are fewer cores than processes
  if not machine.address and all(map(len, core_groups)):
    cores = [share.tolist() for share in core_groups]
  gpus = {"num_gpus": machine.gpus_per_process}
  return processes.Processes(make, plan.table, count, cores=cores, options=gpus)


def _make_executor(context: engines.Context) -> executor.Executor:
  """Returns a cell's executor on the devices of this process."""
  plan, local = context.plan, jax.local_devices()
  return executor.Executor(
    **_arguments(plan, context.cell.seed, time.perf_counter),
    devices=[local[d % len(local)] for d in range(plan.table.devices)],
  )


def check_machine(
  experiment: Any, plans: Sequence[PipelinePlan], machine: Any
) -> None:
  """Raises ValueError for flags that do not fit the plans."""
  del experiment
  count, gpus = machine.processes, machine.gpus_per_process
  checks.integer("--processes", count, 0)
  checks.nonnegative("--gpus_per_process", gpus)
  swap_plans = [plan for plan in plans if plan.room is not None]
  if count and swap_plans:
    raise ValueError(
      f"config.runs.{swap_plans[0].run.label}.device_megabytes needs all stages"
      f" in one process: drop it, or --processes={count}"
    )
  if count:
    ray_runtime.check(
      machine.address,
      allow_network=machine.allow_network,
      setting=f"--processes={count}",
      alternative="--processes=0",
    )
  max_devices = max(plan.table.devices for plan in plans)
  local = jax.local_devices()
  if max_devices > len(local):
    shared = f"{len(local)}: {local[0].platform}"
    print(f"{max_devices} devices of the tables share {shared}")
  for plan in plans:
    if plan.run.config["pipeline"]["partition"]:
      print(plan.describe_partition())


def _check_gpus(gpus: float, count: int, total: float) -> None:
  """Raises ValueError for more GPUs than Ray has: Ray would wait forever."""
  if gpus * count > total:
    raise ValueError(
      f"{count} processes of --gpus_per_process={gpus:g} need {gpus * count:g}"
      f" GPUs, and Ray has {total:g}: use fewer --processes, or parts of a GPU"
      " (0.5)"
    )


class PipelineRecords(NamedTuple):
  """Records of a cell: M microbatches, and U updates of S stages."""

  loss: np.ndarray  # float32[M], of each finished microbatch
  update: np.ndarray  # int32[S, U]
  staleness: np.ndarray  # int32[S, U]
  gap: np.ndarray  # float32[S, U]
  update_norm: np.ndarray  # float32[S, U]


class PipelineEngine(engines.Engine):
  """Runs one cell. A synchronous schedule's table is repeated for each update;
  `advance` runs some slots of an asynchronous one, which spans the cell."""

  def __init__(self, context: engines.Context):
    """Starts the cell, or resumes it from its last checkpoint."""
    self._plan = plan = context.plan
    self._cell, self._machine = context.cell, context.machine
    # Stored in checkpoints: another cell's arrays may have the same shapes.
    self._identity = [self._cell.name, plan.table.name, list(plan.cuts)]
    self.total, self.quantum = plan.messages, plan.table.every
    self._updates_done = analyze.updates_done(plan.table).max(0)  # slots
    self._loss = np.full(plan.messages, np.nan, np.float32)
    self._pieces = [[simulator.concatenate([])] for _ in plan.parts]
    self._seconds, self._earlier_traffic = 0.0, device_memory.DeviceTraffic()
    self._log = spans.SpanLog(plan.table)
    self._pace = engines.Pace(_ADVANCE_SECONDS, 4 * plan.table.stages)
    with self._as_engine_errors():
      make = _make_processes if self._machine.processes else _make_executor
      self._executor = make(context)
      self._state = self._restore(context, self._executor.start())
      self._warm_up()

  @contextlib.contextmanager
  def _as_engine_errors(self) -> Iterator[None]:
    """Turns errors of a pipeline into errors that the run loop handles."""
    try:
      yield
    except processes.ProcessDied as error:
      raise engines.ProcessExited(str(error)) from error
    except PipelineError as error:
      if not self._machine.processes:
        raise
      raise ValueError(
        f"{error}; run the same command again to resume from the last"
        " checkpoint"
      ) from error

  def _warm_up(self) -> None:
    """Compiles all programs by a short training, then restores the state."""
    if self.done == self.total:
      return
    updates = min(2, self._plan.updates)
    stop_slot = None if self._plan.table.flush else self._slot_of(updates)
    state = self._executor.fetch(self._state)
    self._executor.run(self._executor.start(), stop_slot)
    if self._plan.room is not None:
      self._executor.reset_traffic(self._earlier_traffic)
    self._state = self._executor.place(state)

  def _update(self):
    """Returns how many updates every stage has made."""
    earlier = self._state.microbatch // self.quantum
    return earlier + int(np.searchsorted(self._updates_done, self._state.slot))

  @property
  def done(self) -> int:
    """Microbatches that have updated every stage."""
    return self._update() * self.quantum

  def _slot_of(self, update):
    """Returns the first slot at which every stage has made `update` updates."""
    if update == self._plan.updates:
      return self._plan.table.slots
    return int(self._updates_done[update - 1]) + 1

  def advance(self, until: int) -> engines.Progress:
    """Trains for one update of a synchronous schedule, or for some slots."""
    flush, stop_slot = self._plan.table.flush, None
    steps = self._pace.begin()
    # [1] Choose the slot to stop at: a synchronous table runs to its end.
    if not flush:
      last_slot = self._slot_of(until // self.quantum)
      stop_slot = min(self._state.slot + steps, last_slot)
    with self._as_engine_errors():
      result = self._executor.run(self._state, stop_slot)
      self._state = result.state
      self._seconds += self._pace.end()
      if flush:
        self._state = self._executor.next_pass(self._state)
    # [2] Record losses, updates and spans.
    microbatches = sorted(result.losses)
    losses = np.array([float(result.losses[m]) for m in microbatches])
    self._loss[microbatches] = losses
    for pieces, records in zip(self._pieces, result.records, strict=True):
      pieces.append(records)
    self._log.add(result.spans)
    # [3] Report, and name the first loss that is not finite.
    broken, cell = None, self._cell
    bad = next(itertools.compress(microbatches, ~np.isfinite(losses)), None)
    if bad is not None:
      broken = (
        f"{cell.name}: the loss of microbatch {bad} is {self._loss[bad]}, with"
        f" learning rate {self._plan.learning_rate:g}: set a lower"
        f" --config.runs.{cell.label}.learning_rate, a longer warm-up or"
        " --config.clip_norm"
      )
    staleness, gap = _delays(result.records)
    age = mean(staleness) if staleness.size else None
    rows = PipelineRecords(losses, np.zeros(0, int), staleness, gap, staleness)
    return engines.Progress(losses, age, mean(gap), broken=broken, rows=rows)

  def work(self) -> list[Segment]:
    """Returns the last tasks of the devices, in seconds of training."""
    return [Segment(*x) for x in self._log.last(MAX_ROWS, self._seconds)]

  def _stage_records(self):
    """Returns the records of each stage, one row for each update."""
    records = [simulator.concatenate(pieces) for pieces in self._pieces]
    self._pieces = [[rows] for rows in records]  # so none is joined twice
    return records

  def records(self) -> PipelineRecords:
    """Returns the records of the updates that all stages have made."""
    records = self._stage_records()
    count = min(len(rows.update) for rows in records)
    columns = (
      np.stack([getattr(rows, name)[:count] for rows in records])
      for name in PipelineRecords._fields[1:]
    )
    return PipelineRecords(self._loss[: self.done], *columns)

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters of all stages, on the host."""
    with self._as_engine_errors():
      params = cut.joined(self._executor.params(self._state))
    clock = {"seconds": self._seconds}
    return engines.Snapshot(params, self.done, self._update(), clock)

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns losses, staleness and gap of some microbatches."""
    staleness, gap = _delays(self._stage_records(), start // self.quantum)
    return {
      "train_loss": mean(self._loss[start:end]),
      "staleness_mean": mean(staleness),
      "gap_mean": mean(gap),
    }

  def columns(self) -> dict[str, Any]:
    """Returns facts of the cell's table, and measured values."""
    plan, records, schedule = self._plan, self.records(), self._plan.table
    tasks = self._log.spans
    costs = analyze.measured_costs(schedule, tasks) if tasks else None
    activation_bytes = _residual_bytes(plan, self._cell.seed)
    options = {"weights": plan.weights, "activation": activation_bytes}
    facts = analyze.analyze(schedule, costs, **options)
    return {
      "messages": self.done, "updates": self._update(),
      "schedule": schedule.name,
      "stages": schedule.stages, "devices": schedule.devices,
      "cuts": list(plan.cuts),
      "weights": plan.weights,
      "recompute": list(map(int, plan.recompute)),
      "every": schedule.every, "seconds": self._seconds,
      "stage_staleness": records.staleness.max(1, initial=0).tolist(),
      "staleness_mean": mean(records.staleness),
      "staleness_max": int(records.staleness.max(initial=0)),
      "gap_mean": mean(records.gap),
      "weight_versions": facts.weight_versions.tolist(),
      "peak_bytes": int(max(facts.peak_activations)),
      "stage_peak_bytes": facts.peak_activations.tolist(),
      "bubble_predicted": facts.bubble_of_total if costs else float("nan"),
      "bubble_measured": self._log.bubble(),
      **plan.predicted_times(), **self._traffic(),
    }

  def _traffic(self) -> dict[str, int]:
    """Returns bytes moved between devices and host; {} without a limit."""
    if self._plan.room is None:
      return {}
    with self._as_engine_errors():
      traffic = self._executor.traffic()._asdict()
    return {f"weights_{name}_bytes": value for name, value in traffic.items()}

  def _tree(self, servers, messages, on_its_way, records):
    state = {"servers": servers, "messages": messages, "on_its_way": on_its_way}
    return {**state, "loss": self._loss, "records": records}

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns the state with all entries, and the records."""
    schedule, leaves = self._plan.table, []
    with self._as_engine_errors():
      state = self._executor.fetch(self._state)
    messages, others = _split(state.entries)
    on_its_way = state_lib.describe(state_lib.to_host(others), leaves)
    tree = self._tree(state.servers, messages, leaves, self._stage_records())
    passes = state.microbatch // schedule.microbatches
    notes = {
      "at": [state.slot, state.microbatch],
      "of": self._identity,
      "leaves": len(leaves), "state": on_its_way,
      "seconds": self._seconds, "moved": list(self._traffic().values()),
    }
    return passes * schedule.slots + state.slot, tree, notes

  def _restore(self, context: engines.Context, first_state: Any) -> Any:
    """Returns the state of the last checkpoint; without one, `first_state`."""
    template = self._executor.fetch(first_state)

    def unpack(saved):
      notes = saved.notes
      if notes["of"] != self._identity:
        raise ValueError(f"it is of {notes['of']}, not of {self._identity}")
      array_leaves = [checkpoint.ANY] * notes["leaves"]
      records = checkpoint.any_shapes(
        [simulator.concatenate([]) for _ in self._plan.parts]
      )
      messages, _ = _split(template.entries)
      tree = saved.tree(
        self._tree(template.servers, messages, array_leaves, records)
      )
      servers, messages = (
        jax.tree.map(jnp.array, tree[name]) for name in ("servers", "messages")
      )
      others = state_lib.rebuild(notes["state"], tree["on_its_way"])
      entries = messages | state_lib.with_keys(others)
      traffic = device_memory.DeviceTraffic(*notes["moved"])
      return PipelineState(*notes["at"], servers, entries), tree, notes, traffic

    restored = context.restore(unpack)
    if restored is None:
      return first_state
    state, tree, notes, self._earlier_traffic = restored
    self._seconds, self._loss = notes["seconds"], np.array(tree["loss"])
    self._pieces = [[rows] for rows in tree["records"]]
    return self._executor.place(state)

  def extras(self) -> dict[str, str]:
    """Returns file -> text: the table and the spans; {} without spans."""
    if not (self._machine.spans and self._log.spans):
      return {}
    return {
      "schedule.csv": table.to_csv(self._plan.table),
      "spans.json": spans.to_json(self._log.spans) + "\n",
    }

  def close(self) -> None:
    """Ends the processes."""
    if self._machine.processes:
      self._executor.close()


def _split(entries):
  """Splits entries into (worker states, which have a template, the others)."""
  at_worker = {k: v for k, v in entries.items() if k[0] == state_lib.AT_WORKER}
  return at_worker, {k: v for k, v in entries.items() if k not in at_worker}


def _delays(
  records: Iterable[base.Records], first_update: int = 0
) -> Iterator[np.ndarray]:
  """Returns staleness and gaps of all stages' updates, from an update on."""
  return (
    np.concatenate([getattr(rows, name)[first_update:] for rows in records])
    for name in ("staleness", "gap")
  )


def _residual_bytes(plan: PipelinePlan, seed: int) -> list[int]:
  """Returns the bytes that each stage stores for a microbatch's backward."""
  extra, sizes, x = _extras(plan, seed), [], ()
  for stage, part in enumerate(plan.parts):
    inputs = extra(stage, 0)
    compiled = stage_lib.compile_stage(part.fn, part.params, x, inputs)
    size = compiled.residual_bytes
    if plan.recompute[stage]:
      leaves = jax.tree.leaves((x, inputs))
      size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    sizes.append(size)
    x = compiled.y
  return sizes


def _percent(share):
  """Returns a share as text; a dash if it was not measured."""
  return f"{100 * share:.0f} %" if storage.is_finite(share) else "-"


def _describe_result(result: Mapping[str, Any]) -> str:
  """Returns the line that is printed of a cell's result."""
  traffic = ""
  if "weights_fetched_bytes" in result:
    names = ("fetched", "written", "peak")
    sizes = (result[f"weights_{name}_bytes"] / 1e6 for name in names)
    traffic = ", {:.3g} MB fetched, {:.3g} written, {:.3g} held".format(*sizes)
  return (
    f"{engines.test_loss_text(result)}{result['seconds']:.1f} s, staleness"
    f" of stages {' '.join(map(str, result['stage_staleness']))}, versions"
    f" {' '.join(map(str, result['weight_versions']))}, activations"
    f" {result['peak_bytes'] / 2**20:.3g} MiB, bubble"
    f" {_percent(result['bubble_measured'])} (predicted"
    f" {_percent(result['bubble_predicted'])}){traffic}"
  )


PIPELINE = engines.EngineKind(
  sections=run_plan.SECTIONS,
  settings="pipeline",
  options=run_plan.options,
  dependents=run_plan.dependents,
  default_recipe="asgd",
  workers=lambda run: (1,),
  check=run_plan.check,
  devices=lambda run: run.config["pipeline"]["stages"],  # or fewer
  plan=run_plan.plan,
  start=PipelineEngine,
  check_machine=check_machine,
  columns=(
    Column("schedule", "schedule"),
    Column("weights", "weights"),
    Column("recompute", "recompute"),
    Column("every", "every"),
    Column("rate", "learning_rate"),
    Column("train loss", "train_loss", 1, "{:.3f}"),
    Column("seconds", "seconds", 1, "{:.1f}"),
    Column("staleness", "stage_staleness"),
    Column("versions", "weight_versions"),
    Column("peak MiB", "peak_bytes", 2**-20, "{:.3g}"),
    Column("bubble %", "bubble_measured", 100, "{:.0f}"),
    Column("predicted %", "bubble_predicted", 100, "{:.0f}"),
    Column("MB fetched", "weights_fetched_bytes", 1e-6),  # device_megabytes
    Column("written", "weights_written_bytes", 1e-6),
    Column("held", "weights_peak_bytes", 1e-6),
  ),
  describe=_describe_result,
  timed=True,
)
