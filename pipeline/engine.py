"""The engine `pipeline`: stages on devices that obey a table.

Stages run on devices of this process, or share what there is; or they are in
processes of Ray, with the same parameters to the bit. A process that dies is
replaced, and the cell goes on from its last checkpoint.

  from asgd import experiment
  from pipeline.engine import PIPELINE

  engines = {**experiment.ENGINES, "pipeline": PIPELINE}
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import simulator
from asgd.experiment import cells, checkpoint, ray_runtime, storage
from asgd.experiment.engines import (
  Column,
  Context,
  Died,
  Engine,
  EngineKind,
  Pace,
  Progress,
  Snapshot,
  mean,
)
from pipeline import analyze, cut, executor, processes, run_plan, spans, table
from pipeline import stage as stage_lib
from pipeline import state as state_lib
from pipeline.compiled import PipelineError
from pipeline.run_plan import PipelinePlan
from pipeline.state import PipelineState

_SECONDS = 1.0  # of an asynchronous table, between two looks at clocks


def _arguments(plan: PipelinePlan, seed: int, clock) -> dict[str, Any]:
  """Arguments of the executor for a cell."""
  init_key, root = jax.random.split(jax.random.key(seed))
  params = plan.problem.init(init_key)
  batches = plan.problem.batches(seed, 1)
  return {
    "schedule": plan.table,
    "parts": [
      part._replace(params=cut.slice_of(params, first, last))
      for part, (first, last) in zip(
        plan.parts, itertools.pairwise(plan.cuts), strict=True
      )
    ],
    "extra": cut.extras(
      lambda microbatch: batches(0, microbatch), root, plan.table.stages
    ),
    "weights": plan.weights,
    "recompute": plan.recompute,
    "together": plan.together,
    "clock": clock,
  }


def _remote_arguments(config, dataset, measurements, cell):
  """The same, in a process that was given config and data."""
  import ray

  experiment = cells.build(
    config,
    engines={"pipeline": PIPELINE},
    dataset=ray.get(dataset),
    measurements=measurements,
  )
  plan = experiment.plan(cell)
  return _arguments(plan, cell.seed, time.time)  # of all machines


def _cores(count):
  """Shares of this machine's cores; None if there are not enough."""
  affinity = getattr(os, "sched_getaffinity", lambda process: ())
  here = sorted(affinity(0))
  if len(here) < count:
    return None
  return [share.tolist() for share in np.array_split(here, count)]


def _in_processes(context: Context) -> processes.Processes:
  plan, machine = context.plan, context.machine
  count = min(machine.processes, plan.table.devices)
  dataset = machine.share(plan.dataset)  # which starts Ray
  if machine.gpus_per_process:
    import ray

    there = ray.cluster_resources().get("GPU", 0.0)
    _check_gpus(machine.gpus_per_process, count, there)
  config = cells.only(plan.run, context.cell)
  sources = dataset, plan.measurements, context.cell
  make = functools.partial(_remote_arguments, config, *sources)
  return processes.Processes(
    *(make, plan.table, count),
    cores=None if machine.address else _cores(count),
    options={"num_gpus": machine.gpus_per_process},
  )


def _in_threads(context: Context) -> executor.Executor:
  plan, here = context.plan, jax.local_devices()
  return executor.Executor(
    **_arguments(plan, context.cell.seed, time.perf_counter),
    devices=[here[d % len(here)] for d in range(plan.table.devices)],
  )


def check_machine(
  experiment: Any, plans: Sequence[PipelinePlan], machine: Any
) -> None:
  """Checks that a machine has what pipelines need, before anything is written.

  Raises:
    ValueError: naming the flag and the remedy.
  """
  del experiment
  count = machine.processes
  if count < 0:
    raise ValueError(f"--processes must be 0 or more, not {count}")
  if count:
    ray_runtime.check(
      machine.address,
      allow_network=machine.allow_network,
      asked=f"--processes={count}",
      instead="--processes=0",
    )
  most = max(plan.table.devices for plan in plans)
  here = jax.local_devices()
  if most > len(here):
    print(f"{most} devices of the tables share {len(here)}: {here[0].platform}")
  for plan in plans:
    if plan.run.config["pipeline"]["partition"]:
      print(plan.describe_partition())


def _check_gpus(each: float, count: int, there: float) -> None:
  """Refuses processes for which Ray would wait forever."""
  if each * count > there:
    raise ValueError(
      f"{count} processes of --gpus_per_process={each:g} need {each * count:g}"
      f" GPUs, and Ray has {there:g}: use fewer --processes, or parts of a GPU"
      " (0.5)"
    )


class PipelineRecords(NamedTuple):
  """What is recorded of a cell."""

  loss: np.ndarray  # float32[M], of each microbatch learned from
  update: np.ndarray  # int32[S, U]
  staleness: np.ndarray  # int32[S, U]
  gap: np.ndarray  # float32[S, U]
  update_norm: np.ndarray  # float32[S, U]


class PipelineEngine(Engine):
  """A cell in a pipeline."""

  def __init__(self, context: Context):
    """Starts the cell, or goes on from its last checkpoint.

    Raises:
      ValueError: if its stages cannot be compiled or started.
    """
    self._plan = plan = context.plan
    self._cell, self._machine = context.cell, context.machine
    self.total, self.quantum = plan.messages, plan.table.every
    self._updates_done = analyze.updates_done(plan.table).max(0)  # slots
    self._loss = np.full(plan.messages, np.nan, np.float32)
    self._pieces = [[simulator.concatenate([])] for _ in plan.parts]
    self._seconds = 0.0
    self._log = spans.SpanLog(plan.table)
    self._pace = Pace(_SECONDS, 4 * plan.table.stages)
    with self._as_engine_errors():
      make = _in_processes if self._machine.processes else _in_threads
      self._executor = make(context)
      self._state = self._restore(context, self._executor.start())
      self._warm_up()

  @contextlib.contextmanager
  def _as_engine_errors(self) -> Iterator[None]:
    """Turns what a pipeline raises into what the run loop knows."""
    try:
      yield
    except processes.ProcessDied as error:
      raise Died(str(error)) from error
    except PipelineError as error:
      if not self._machine.processes:
        raise
      raise ValueError(
        f"{error}; run the same command again to go on from what was saved"
      ) from error

  def _warm_up(self):
    """Compiles all there is, by training that is forgotten."""
    if self.done == self.total:
      return
    updates = min(2, self._plan.updates)
    until = None if self._plan.table.flush else self._slot_of(updates)
    state = self._executor.fetch(self._state)
    self._executor.run(self._executor.start(), until)
    self._state = self._executor.place(state)

  def _update(self):
    """Updates that every stage has made."""
    before = self._state.microbatch // self._plan.table.every
    return before + int(np.searchsorted(self._updates_done, self._state.slot))

  @property
  def done(self) -> int:
    """Microbatches that every stage has learned from."""
    return self._update() * self._plan.table.every

  def _slot_of(self, update):
    """The slot before which every stage has made that many updates."""
    if update == self._plan.updates:
      return self._plan.table.slots
    return int(self._updates_done[update - 1]) + 1

  def advance(self, until: int) -> Progress:
    """Trains on: an update of a synchronous schedule, or some slots."""
    flush, slot = self._plan.table.flush, None
    steps = self._pace.begin()
    if not flush:
      last = self._slot_of(until // self._plan.table.every)
      slot = min(self._state.slot + steps, last)
    with self._as_engine_errors():
      result = self._executor.run(self._state, slot)
    self._seconds += self._pace.end()
    self._state = result.state
    if flush:
      self._state = self._executor.again(self._state)
    numbers = sorted(result.losses)
    new = np.array([float(result.losses[number]) for number in numbers])
    self._loss[numbers] = new
    for pieces, records in zip(self._pieces, result.records, strict=True):
      pieces.append(records)
    self._log.add(result.spans)
    broken = np.flatnonzero(~np.isfinite(new))
    stale, gap = _delays(result.records)
    return Progress(
      loss=new,
      staleness=mean(stale) if stale.size else None,
      gap=mean(gap),
      broken=self._not_finite(numbers[broken[0]]) if len(broken) else None,
    )

  def _not_finite(self, first):
    label, rate = self._cell.label, self._plan.learning_rate
    return (
      f"{self._cell.name}: the loss of microbatch {first} is"
      f" {self._loss[first]}, with learning rate {rate:g}: set a lower"
      f" --config.runs.{label}.learning_rate, a longer warm-up or"
      " --config.clip_norm"
    )

  def _stage_records(self):
    """What each stage recorded, a row an update."""
    whole = [simulator.concatenate(pieces) for pieces in self._pieces]
    self._pieces = [[rows] for rows in whole]
    return whole

  def records(self) -> PipelineRecords:
    """Returns what was recorded of updates that all stages have made."""
    records = self._stage_records()
    count = min(len(rows.update) for rows in records)
    columns = (
      np.stack([getattr(rows, name)[:count] for rows in records])
      for name in ("update", "staleness", "gap", "update_norm")
    )
    return PipelineRecords(self._loss[: self.done], *columns)

  def snapshot(self) -> Snapshot:
    """Returns the parameters of all stages, on the host."""
    params = cut.whole(self._executor.params(self._state))
    clock = {"seconds": self._seconds}
    return Snapshot(params, self.done, self._update(), clock)

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns losses, staleness and gap of some microbatches."""
    first = start // self._plan.table.every
    stale, gap = _delays(self._stage_records(), first)
    return {
      "train_loss": mean(self._loss[start:end]),
      "staleness_mean": mean(stale),
      "gap_mean": mean(gap),
    }

  def columns(self) -> dict[str, Any]:
    """Returns what the table says of the cell, and what was measured."""
    plan, records, schedule = self._plan, self.records(), self._plan.table
    costs = self._log.costs()
    kept = _kept_bytes(plan, self._cell.seed)
    facts = analyze.analyze(
      schedule, costs, weights=plan.weights, activation=kept
    )
    return {
      "messages": self.done,
      "updates": self._update(),
      "schedule": schedule.name,
      "stages": schedule.stages,
      "devices": schedule.devices,
      "cuts": list(plan.cuts),
      "weights": plan.weights,
      "recompute": plan.recompute,
      "every": schedule.every,
      "seconds": self._seconds,
      "stage_staleness": records.staleness.max(1, initial=0).tolist(),
      "staleness_mean": mean(records.staleness),
      "staleness_max": int(records.staleness.max(initial=0)),
      "gap_mean": mean(records.gap),
      "weight_versions": facts.weight_versions.tolist(),
      "peak_bytes": int(max(facts.peak_activations)),
      "stage_peak_bytes": facts.peak_activations.tolist(),
      "bubble_predicted": facts.bubble_of_total if costs else float("nan"),
      "bubble_measured": self._log.bubble(),
    }

  def _identity(self):
    """What a checkpoint is of; another may have the same shapes."""
    return [self._cell.name, self._plan.table.name, list(self._plan.cuts)]

  def _tree(self, servers, messages, on_its_way, records):
    """The arrays of a checkpoint."""
    return {
      "servers": servers,
      "messages": messages,
      "on_its_way": on_its_way,
      "loss": self._loss,
      "records": records,
    }

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns the state with all that is on its way, and what was recorded."""
    schedule = self._plan.table
    with self._as_engine_errors():
      state = self._executor.fetch(self._state)
    leaves: list[np.ndarray] = []
    rest = state_lib.to_host(tuple(state[4:]))
    on_its_way = state_lib.describe(rest, leaves)
    records = self._stage_records()
    tree = self._tree(state.servers, state.messages, leaves, records)
    passes = state.microbatch // schedule.microbatches
    notes = {
      "at": [state.slot, state.microbatch],
      "of": self._identity(),
      "leaves": len(leaves),
      "state": on_its_way,
      "seconds": self._seconds,
    }
    return passes * schedule.slots + state.slot, tree, notes

  def _restore(self, context, first):
    template = self._executor.fetch(first)

    def unpack(saved):
      notes, of = saved.notes, self._identity()
      if notes["of"] != of:
        raise ValueError(f"it is of {notes['of']}, not of {of}")
      empty = [simulator.concatenate([]) for _ in self._plan.parts]
      there = [checkpoint.ANY] * notes["leaves"]
      records = checkpoint.any_shapes(empty)
      tree = saved.tree(
        self._tree(template.servers, template.messages, there, records)
      )
      servers, messages = (
        jax.tree.map(jnp.array, tree[name]) for name in ("servers", "messages")
      )
      rest = state_lib.rebuild(notes["state"], tree["on_its_way"])
      rest = state_lib.with_keys(rest)
      state = PipelineState(*notes["at"], servers, messages, *rest)
      return state, tree["loss"], tree["records"], notes["seconds"]

    restored = context.restore(unpack)
    if restored is None:
      return first
    state, loss, records, self._seconds = restored
    self._loss, self._pieces = np.array(loss), [[rows] for rows in records]
    return self._executor.place(state)

  def extras(self) -> dict[str, str]:
    """Returns the table and what its devices did when, if that was kept."""
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


def _delays(records, first=0):
  """Staleness and gaps of all stages' updates, from update `first` on."""
  return (
    np.concatenate([getattr(rows, name)[first:] for rows in records])
    for name in ("staleness", "gap")
  )


def _kept_bytes(plan: PipelinePlan, seed: int) -> list[int]:
  """Bytes that each stage keeps for a microbatch's backward."""
  extra, sizes, x = _arguments(plan, seed, None)["extra"], [], ()
  for stage, part in enumerate(plan.parts):
    given = extra(stage, 0)
    compiled = stage_lib.compile_stage(part.fn, part.params, x, given)
    size = compiled.kept_bytes
    if plan.recompute:
      leaves = jax.tree.leaves((x, given))
      size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    sizes.append(size)
    x = compiled.y
  return sizes


def _percent(share):
  """A dash for a cell that ended before it was gone on with."""
  return f"{100 * share:.0f} %" if storage.is_finite(share) else "-"


def _describe_result(result: Mapping[str, Any]) -> str:
  return (
    f"test loss {result['test_loss']:.3f}, {result['seconds']:.1f} s, staleness"
    f" of stages {' '.join(map(str, result['stage_staleness']))}, versions"
    f" {' '.join(map(str, result['weight_versions']))}, activations"
    f" {result['peak_bytes'] / 2**20:.3g} MiB, bubble"
    f" {_percent(result['bubble_measured'])} (predicted"
    f" {_percent(result['bubble_predicted'])})"
  )


PIPELINE = EngineKind(
  sections=run_plan.SECTIONS,
  settings="pipeline",
  options=run_plan.options,
  dependents=run_plan.dependents,
  default_recipe="asgd",
  workers=lambda run: (1,),
  check=run_plan.check,
  devices=run_plan.devices,
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
    Column("predicted", "bubble_predicted", 100, "{:.0f}"),
  ),
  describe=_describe_result,
  timed=True,
)
