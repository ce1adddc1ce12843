"""Trains in pipelines, a schedule beside the other, and compares them.

  python -m launch.train_pipeline --config=configs/pipeline_digits.py
  python -m launch.train_pipeline --config=configs/pipeline_gpt.py \\
    --config.only=gpipe,pipedream --config.runs.gpipe.schedule=zb_h1
  python -m launch.train_pipeline --config=configs/pipeline_sentences.py:small

Every run is given the same microbatches in the same order: `updates` times
`microbatches` of them. A synchronous schedule averages `every` (default:
`microbatches`) to one update and flushes; an asynchronous one updates each
stage on every microbatch (`every=1`), or on the mean of some. The learning
rate is that of an update of `microbatches`; a run whose update has fewer takes
its part of it (1 / microbatches for PipeDream), so that an example moves the
parameters as far, unless the run has a `learning_rate` of its own.

Keys of a run: schedule (of pipeline.generate), recipe (of asgd.algorithms),
title, weights (latest, stash, 2bw, vertical), predict (send weights rolled
forward by the stage's staleness), recompute, every, stages, learning_rate, and
the options of its schedule and of its recipe. With partition=pipedream (of the
schedule pipedream: stages with replicas) or mixed_pipe (of ftpipe: several
stages on a device) the layers are timed, and `stages` is how many devices there
are; `bandwidth` is in bytes a second between them (1e10). What was measured is
kept, so --resume has the same stages. Instead of a name, schedule may be
FILE.txt, .csv or .json of a table, as launch.draw_schedule writes them.

The table's staleness is the largest of each stage; bubbles are of the whole
run, with updates as work, and predicted from medians of its tasks.

Stages run on CPU devices of their own, or share what is there; seconds are
those of training alone. With --processes=N they are in N processes, by Ray, on
this machine or (--address) on others: the same parameters, to the bit. One that
dies is replaced, and the run goes on from its last checkpoint. Ctrl-C, or a
kill, loses nothing that matters: the same command with --resume ends with the
same parameters, to the bit, in processes or not.

With --spans each run's folder has what its devices did when, the last time
through the table, to be drawn beside the plan, or looked at in Perfetto:

  python -m launch.draw_schedule --table=RUN/schedule.csv \\
    --measured=RUN/spans.json --out=FOLDER
"""

import collections
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd import base, simulator
from launch import (
  cell_book,
  checkpoints,
  cli,
  outputs,
  pipeline_experiment,
  pipeline_figures,
  progress,
  ray_session,
  session,
)
from pipeline import analyze, executor, parts, processes, spans, validate
from pipeline import schedule as schedule_lib
from pipeline import stage as stage_lib
from pipeline.schedule import BACKWARD, FORWARD, INPUT, WEIGHT

flags.adopt_module_key_flags(session)  # --help lists them, too
flags.adopt_module_key_flags(ray_session)
_PROCESSES = flags.DEFINE_integer(
  "processes", 0, "Processes for the stages, by Ray. 0: threads of this one."
)
_GPUS = flags.DEFINE_float(
  "gpus_per_process", 0.0, "That Ray reserves.", lower_bound=0.0
)
_SPANS = flags.DEFINE_bool(
  "spans", False, "Write what each device did when, for launch.draw_schedule."
)
_DEATHS = 3  # of processes, without a checkpoint in between
_CHUNK_SECONDS = 1.0  # of an asynchronous table, between two looks at clocks
_MANY = 400  # durations of a task that are remembered
_MOST_SPANS = 200_000  # that are written, the last ones
# What comparing cells reads of them; see `pipeline_figures`.
_RESULT_KEYS = frozenset(
  (
    *("cell", "label", "algorithm", "schedule", "weights", "recompute"),
    *("every", "learning_rate", "stages", "devices", "updates", "examples"),
    *("seconds", "train_loss", "test_loss", "test_accuracy", "staleness"),
    *("weight_versions", "peak_bytes", "bubble_predicted", "diverged"),
    *("bubble_measured", "evaluations", "messages"),
  )
)
_ROW_KEYS = frozenset(
  ("algorithm", "message", "update", "examples", "seconds", "test_loss")
)


class Trained(NamedTuple):
  """What is recorded of a cell."""

  loss: np.ndarray  # float32[M], of each microbatch learned from
  update: np.ndarray  # int32[S, U]
  staleness: np.ndarray  # int32[S, U]
  gap: np.ndarray  # float32[S, U]
  update_norm: np.ndarray  # float32[S, U]


# A checkpoint: all of the executor's state, so what is in flight too.

_NODES = {node.__name__: node for node in (base.Ticket, base.Variables)}


def _describe(tree: Any, leaves: list[np.ndarray]) -> Any:
  """Puts the arrays of a tree into `leaves`; returns JSON that says where."""
  if tree is None:
    return None
  if isinstance(tree, dict):
    pairs = [[key, _describe(held, leaves)] for key, held in tree.items()]
    return {"dict": pairs}
  if isinstance(tree, (tuple, list)):
    name = type(tree).__name__
    return {name: [_describe(held, leaves) for held in tree]}
  kind = "array"
  if jnp.issubdtype(getattr(tree, "dtype", np.bool_), jax.dtypes.prng_key):
    kind, tree = "key", jax.random.key_data(tree)
  leaves.append(np.asarray(tree))
  return {kind: len(leaves) - 1}


def _recall(said: Any, leaves: Sequence[np.ndarray]) -> Any:
  """Returns the tree that `_describe` was given; its arrays are copies."""
  if said is None:
    return None
  ((kind, held),) = said.items()
  if kind == "dict":
    return {_hashable(key): _recall(value, leaves) for key, value in held}
  if kind == "array":
    return jnp.array(leaves[held])
  if kind == "key":
    return jax.random.wrap_key_data(jnp.array(leaves[held]))
  made = [_recall(value, leaves) for value in held]
  if kind in ("tuple", "list"):
    return made if kind == "list" else tuple(made)
  return _NODES[kind](*made)


def _hashable(key):
  return tuple(key) if isinstance(key, list) else key


class _Checkpoints(checkpoints._Folder):
  """Checkpoints of a cell."""

  def save(
    self,
    step: int,
    state: executor.State,
    trained: Any,
    notes: dict[str, Any],
  ) -> None:
    """Writes one; when this returns it is on disk, whole.

    Raises:
      ValueError: if it cannot be written; what was there is left as it was.
    """
    leaves: list[np.ndarray] = []
    on_way = _describe(tuple(state[4:]), leaves)
    tree = state.servers, state.messages, leaves, trained
    meta = {"at": [state.slot, state.microbatch], "state": on_way}
    counts = [len(jax.tree.leaves(part)) for part in tree]
    self._write(step, tree, {**meta, "counts": counts, "notes": notes})

  def restore(
    self, template: executor.State, trained: Any, of: Sequence[Any] = ()
  ) -> tuple[executor.State, Any, dict[str, Any]] | None:
    """Returns the newest that is whole: state, what was recorded, notes.

    Args:
      template: a state of the same servers, such as the first one.
      trained: something of the structure that was saved.
      of: what the notes must have as "of", if they have it: a checkpoint of
        something else may have the same shapes.
    """

    def unpack(leaves, meta):
      held = meta["notes"].get("of", of)
      if list(held) != list(of):
        raise ValueError(f"it is of {held}, not of {list(of)}")
      ends = np.cumsum(meta["counts"])[:-1]
      groups = [
        leaves[start:end]
        for start, end in zip([0, *ends], [*ends, len(leaves)], strict=True)
      ]
      servers, messages = (
        jax.tree.unflatten(jax.tree.structure(held), map(jnp.array, group))
        for held, group in zip(template[2:4], groups, strict=False)
      )
      rest = _recall(meta["state"], groups[2])
      state = executor.State(*meta["at"], servers, messages, *rest)
      kept = jax.tree.unflatten(jax.tree.structure(trained), groups[3])
      return state, kept, meta["notes"]

    return self._newest(unpack)


# One cell.


class Signals:
  """What a run looks at where nobody can ask it to stop."""

  received = 0


class _Clock:
  """Sums up what devices did, from spans."""

  def __init__(self, table):
    self._table = table
    self._took = collections.defaultdict(
      lambda: collections.deque(maxlen=_MANY)
    )
    self._busy = self._whole = 0.0

  def add(self, found: Sequence[executor.Span]) -> None:
    """Counts the spans of one call of `run`."""
    if not found:
      return
    for span in found:
      self._took[span.stage, span.action].append(span.end - span.start)
    count = self._table.devices
    idle = spans.idle(spans.measured(self._table, found), count)
    self._busy += float(idle.busy.sum())
    self._whole += count * idle.makespan

  @property
  def bubble(self) -> float:
    """The part of all devices' time in which they did no task."""
    return 1 - self._busy / self._whole if self._whole else float("nan")

  def costs(self) -> analyze.Costs | None:
    """Medians of what tasks took; None if nothing was measured."""
    if not self._took:
      return None

    def column(action):
      return [
        float(np.median(self._took.get((stage, action), [0.0])))
        for stage in range(self._table.stages)
      ]

    return analyze.costs(
      self._table.stages,
      forward=column(FORWARD),
      backward=column(BACKWARD),
      input=column(INPUT),
      weight=column(WEIGHT),
    )


class Way(NamedTuple):
  """How stages are run."""

  processes: int = 0  # of Ray; 0 is threads of this process
  shared: Any = None  # reference to the dataset, in Ray's object store
  gpus: float = 0.0  # of each process
  cores: bool = True  # each process keeps to its part of this machine's cores
  spans: bool = False  # write what devices did when


def _engine_arguments(exp, cell, clock=time.perf_counter) -> dict[str, Any]:
  """Arguments of the executor for a cell."""
  plan = exp.plans[cell.label]
  init_key, root = jax.random.split(jax.random.key(cell.seed))
  params = exp.problem.init(init_key)
  batches = exp.problem.batches(cell.seed, 1)
  return {
    "schedule": plan.table,
    "parts": [
      part._replace(params=parts.slice_of(params, first, last))
      for part, first, last in zip(
        plan.parts, plan.cuts, plan.cuts[1:], strict=False
      )
    ],
    "extra": parts.extras(
      lambda microbatch: batches(0, microbatch), root, plan.table.stages
    ),
    "weights": plan.weights,
    "recompute": plan.recompute,
    "together": plan.together,
    "clock": clock,
  }


def _remote_arguments(config, shared, seconds, cell):
  """The same, in a process that was given the data."""
  import ray

  config = {**config, "only": [cell.label]}
  exp = pipeline_experiment.build(
    config, dataset=ray.get(shared[0]), seconds=seconds
  )
  return _engine_arguments(exp, cell, time.time)  # of all machines


def _cores(count):
  """Shares of this machine's cores; None if there are not enough."""
  if not hasattr(os, "sched_getaffinity"):
    return None
  here = sorted(os.sched_getaffinity(0))
  return np.array_split(here, count) if len(here) >= count else None


def _in_processes(exp, cell, way) -> processes.Processes:
  table = exp.plans[cell.label].table
  count = min(way.processes, table.devices)
  make = functools.partial(
    _remote_arguments, exp.config, [way.shared], exp.seconds, cell
  )
  cores = _cores(count) if way.cores else None
  return processes.Processes(
    *(make, table, count),
    cores=cores and [share.tolist() for share in cores],
    options={"num_gpus": way.gpus},
  )


class PipelineRun:
  """One cell: trains, evaluates, keeps its checkpoints and its log."""

  def __init__(
    self,
    exp: pipeline_experiment.Experiment,
    cell: pipeline_experiment.Cell,
    folder: Path,
    board: Path | None = None,
    way: Way = Way(),  # noqa: B008
  ):
    """Starts the cell, or goes on from its last checkpoint.

    Args:
      exp: the experiment.
      cell: which one.
      folder: for its files.
      board: folder for TensorBoard.
      way: how its stages are run.

    Raises:
      PipelineError: if a process cannot start.
    """
    self._exp, self._cell, self._folder = exp, cell, folder
    self.plan = plan = exp.plans[cell.label]
    table = plan.table
    arguments = _engine_arguments(exp, cell)
    self._parts, self._extra = arguments["parts"], arguments["extra"]
    if way.processes:
      self._executor = _in_processes(exp, cell, way)
    else:
      here = jax.local_devices()
      self._executor = executor.Executor(
        **arguments,
        devices=[here[d % len(here)] for d in range(table.devices)],
      )
    self._done = _updates_done(table)
    count = min(exp.config["evaluations"], plan.updates)
    self._due = [round((k + 1) * plan.updates / count) for k in range(count)]
    self._clock, self._slots = _Clock(table), 4 * table.stages
    self._loss = np.full(plan.microbatches, np.nan, np.float32)
    self._pieces = [[simulator.concatenate([])] for _ in range(table.stages)]
    self.seconds, self.rows = 0.0, []
    # Of the last time through the table.
    self._spans = collections.deque(maxlen=_MOST_SPANS) if way.spans else None
    self._end = 0.0  # of the spans
    self.diverged = False  # whether a loss was not finite
    folder.mkdir(parents=True, exist_ok=True)
    self._checkpoints = _Checkpoints(folder / "checkpoints")
    self._restore()
    self._log = outputs.CellLog(folder, board, self.rows)

  def _restore(self):
    trained, first = (self._loss, self._records()), self._executor.start()
    template = self._executor.fetch(first)
    found = self._checkpoints.restore(template, trained, self._of())
    if found is None:
      self.state = first
      return
    state, (loss, records), notes = found
    self.state = self._executor.place(state)
    self._loss, self._pieces = np.array(loss), [[rows] for rows in records]
    self.seconds, self.rows = notes["seconds"], notes["rows"]
    self.diverged = notes["diverged"]

  def _of(self):
    """What a checkpoint must be of: stages may be cut elsewhere by now."""
    return [self._cell.name, self.plan.table.name, list(self.plan.cuts)]

  def _records(self):
    """What each stage recorded, a row an update."""
    whole = [simulator.concatenate(pieces) for pieces in self._pieces]
    self._pieces = [[rows] for rows in whole]
    return whole

  def save(self) -> None:
    """Writes a checkpoint."""
    notes = {"seconds": self.seconds, "rows": self.rows}
    notes["diverged"], notes["of"] = self.diverged, self._of()
    trained = self._loss, self._records()
    state = self._executor.fetch(self.state)
    self._checkpoints.save(self._step(), state, trained, notes)

  def _step(self):
    """Slots since the beginning."""
    table = self.plan.table
    passes = self.state.microbatch // table.microbatches
    return passes * table.slots + self.state.slot

  def warm_up(self) -> None:
    """Compiles all there is, by training that is forgotten."""
    if self.finished:
      return
    updates = min(2, self.plan.updates)
    until = None if self.plan.table.flush else self._slot_of(updates)
    held = self._executor.fetch(self.state)
    self._executor.run(self._executor.start(), until)
    self.state = self._executor.place(held)

  @property
  def update(self) -> int:
    """Updates that every stage has made."""
    table = self.plan.table
    before = self.state.microbatch // table.every
    if self.state.slot == table.slots:
      return before + table.microbatches // table.every
    return before + int(np.searchsorted(self._done, self.state.slot, "left"))

  @property
  def message(self) -> int:
    """Microbatches that every stage has learned from."""
    return self.update * self.plan.table.every

  def _slot_of(self, update):
    """The slot before which every stage has made that many updates."""
    if update == self.plan.updates:
      return self.plan.table.slots
    return int(self._done[update - 1]) + 1

  @property
  def finished(self) -> bool:
    """Whether the last evaluation was made, or one after a NaN."""
    if self.diverged:
      return bool(self.rows) and self.rows[-1]["diverged"]
    return len(self.rows) == len(self._due)

  def advance(self) -> np.ndarray:
    """Trains on: an update, or some slots, not past an evaluation.

    Returns:
      The losses that are new.

    Raises:
      ValueError: for a loss that is not finite, if that is not to be recorded.
    """
    flush, due = self.plan.table.flush, self._due[len(self.rows)]
    until = None
    if not flush:
      until = min(self.state.slot + self._slots, self._slot_of(due))
    start = time.perf_counter()
    result = self._executor.run(self.state, until)
    took = time.perf_counter() - start
    self.seconds += took
    self._slots = max(1, round(self._slots * min(2, _CHUNK_SECONDS / took)))
    self.state = result.state
    if flush:
      self.state = self._executor.again(self.state)
    numbers = sorted(result.losses)
    new = np.array([float(result.losses[number]) for number in numbers])
    self._loss[numbers] = new
    broken = np.flatnonzero(~np.isfinite(new))
    self.diverged = self.diverged or bool(len(broken))
    for pieces, found in zip(self._pieces, result.records, strict=True):
      pieces.append(found)
    self._clock.add(result.spans)
    if self._spans is not None:
      self._keep_spans(result.spans)
    if len(broken) and self._exp.config["on_nan"] == "stop":
      raise ValueError(self._not_finite(numbers[broken[0]]))
    if self.update >= due or self.diverged:
      self._evaluate()
    return new

  def _keep_spans(self, new):
    """Adds the spans of a call, right after those before: what lies between
    two calls, such as an evaluation, is no bubble."""
    if self.plan.table.flush:
      self._spans.clear()
    shift = self._end - new[0].start if self._spans and new else 0.0
    for span in new:
      self._end = max(self._end, span.end + shift) if self._spans else span.end
      self._spans.append(
        span._replace(start=span.start + shift, end=span.end + shift)
      )

  def _not_finite(self, first):
    label, rate = self._cell.label, self.plan.learning_rate
    return (
      f"{self._cell.name}: the loss of microbatch {first} is"
      f" {self._loss[first]}, with learning rate {rate:g}: set a lower"
      f" --config.runs.{label}.learning_rate, a longer warm-up or"
      " --config.clip_norm, or --config.on_nan=record to keep the cell as"
      " diverged and go on"
    )

  def _evaluate(self):
    params = parts.whole(self._executor.params(self.state))
    found = self._exp.problem.evaluate(params)
    plan, size = self.plan, self._exp.config["microbatch_size"]
    last = self.rows[-1] if self.rows else {"message": 0, "update": 0}
    rate = plan.rate(self.update) if callable(plan.rate) else plan.rate
    new = [
      (rows.staleness[last["update"] :], rows.gap[last["update"] :])
      for rows in self._records()
    ]
    staleness, gap = (np.concatenate(columns) for columns in zip(*new))  # noqa: B905
    # None where the task has none: NaN is not itself.
    measured = found.measure if outputs.is_known(found.measure) else None
    row = {
      "cell": self._cell.name,
      "algorithm": plan.title,
      "schedule": plan.table.name,
      "seed": self._cell.seed,
      "message": self.message,
      "update": self.update,
      "examples": self.message * size,
      "seconds": self.seconds,
      "learning_rate": float(rate),
      "train_loss": _mean(self._loss[last["message"] : self.message]),
      "test_loss": found.loss,
      "test_accuracy": found.accuracy,
      "test_measure": measured,
      "staleness_mean": _mean(staleness),
      "gap_mean": _mean(gap),
      "diverged": self.diverged,
    }
    self.rows.append(row)
    self._log.write(row)

  def trained(self) -> Trained:
    """What was recorded, of updates that all stages have made."""
    records = self._records()
    count = min(len(rows.update) for rows in records)
    columns = (
      np.stack([getattr(rows, name)[:count] for rows in records])
      for name in ("update", "staleness", "gap", "update_norm")
    )
    return Trained(self._loss[: self.message], *columns)

  def _kept_bytes(self):
    """Bytes that each stage keeps for a microbatch's backward."""
    sizes, x = [], ()
    for stage, part in enumerate(self._parts):
      extra = self._extra(stage, 0)
      compiled = stage_lib.compile_stage(part.fn, part.params, x, extra)
      size = compiled.kept_bytes
      if self.plan.recompute:
        size = sum(
          leaf.size * leaf.dtype.itemsize
          for leaf in jax.tree.leaves((x, extra))
        )
      sizes.append(size)
      x = compiled.y
    return sizes

  def result(self) -> dict[str, Any]:
    """What the cell came to."""
    plan, config, last = self.plan, self._exp.config, self.rows[-1]
    table, trained = plan.table, self.trained()
    costs = self._clock.costs()
    facts = analyze.analyze(
      table, costs, weights=plan.weights, activation=self._kept_bytes()
    )
    classes = self._exp.dataset.classes
    params = parts.whole(self._executor.params(self.state))
    stale = trained.staleness
    return {
      "cell": self._cell.name,
      "label": self._cell.label,
      "algorithm": plan.title,
      "schedule": table.name,
      "recipe": config["runs"][self._cell.label].get("recipe", "asgd"),
      "seed": self._cell.seed,
      "stages": table.stages,
      "devices": table.devices,
      "cuts": list(plan.cuts),
      "weights": plan.weights,
      "recompute": plan.recompute,
      "every": table.every,
      "learning_rate": plan.learning_rate,
      "messages": self.message,
      "evaluations": len(self.rows),
      "updates": self.update,
      "examples": self.message * config["microbatch_size"],
      "seconds": self.seconds,
      "train_loss": last["train_loss"],
      "test_loss": last["test_loss"],
      "test_accuracy": last["test_accuracy"],
      "test_measure": last["test_measure"],
      "staleness": stale.max(1, initial=0).tolist(),
      "staleness_mean": _mean(stale),
      "gap_mean": _mean(trained.gap),
      "weight_versions": facts.weight_versions.tolist(),
      "peak_bytes": facts.peak_activations.tolist(),
      "bubble_predicted": facts.bubble_of_total if costs else float("nan"),
      "bubble_measured": self._clock.bubble,
      "diverged": self.diverged
      or cell_book.has_diverged(trained.loss, table.every, classes),
      "params_sha256": checkpoints.digest(params),
    }

  def finish(self) -> dict[str, Any]:
    """Writes what is kept of a finished cell, result.json last."""
    result = self.result()
    self.save()
    outputs.save_records(self._folder / "records.npz", self.trained())
    if self._spans:
      for name, text in (
        ("schedule.csv", schedule_lib.to_csv(self.plan.table)),
        ("spans.json", spans.to_json(self._spans) + "\n"),
      ):
        outputs.write_atomically(self._folder / name, text)
    params = parts.whole(self._executor.params(self.state))
    content = flax.serialization.to_bytes(params)
    outputs.write_atomically(self._folder / "params.msgpack", content)
    outputs.write_atomically(
      self._folder / "result.json", outputs.to_json(result, indent=2) + "\n"
    )
    return result

  def close(self) -> None:
    """Releases the files, and ends the processes."""
    self._log.close()
    self._checkpoints.close()
    if isinstance(self._executor, processes.Processes):
      self._executor.close()


def _mean(values: np.ndarray) -> float:
  return float(values.mean()) if values.size else float("nan")


def _updates_done(table) -> np.ndarray:
  """int[U]: the slot in which the last stage makes each update of a table."""
  times = np.sort(table.time[validate.rows(table).weight], axis=1)
  return times[:, table.every - 1 :: table.every].max(0)


def finished_result(folder: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished and whole, else None."""
  result = outputs.read_json(folder / "result.json")
  try:
    rows = read_rows(folder)
    whole = len(rows) == result["evaluations"] and set(result) >= _RESULT_KEYS
    return result if whole and all(set(r) >= _ROW_KEYS for r in rows) else None
  except Exception:  # whatever is missing or cut short
    return None


def read_rows(folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell."""
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines]


# All cells.


def _train(run, exp, cell, bar, signals) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  bar.skip(run.message)
  run.warm_up()
  saved = time.monotonic()
  while not run.finished:
    before, rows = run.message, len(run.rows)
    loss = run.advance()
    stale, gap = 0.0, 0.0
    if run.rows:
      stale, gap = run.rows[-1]["staleness_mean"], run.rows[-1]["gap_mean"]
    mean = float(loss.mean()) if len(loss) else float("nan")
    bar.update(cell.name, run.message - before, mean, stale, gap)
    if run.finished:
      break
    due = time.monotonic() - saved >= exp.config["checkpoint_seconds"]
    if len(run.rows) > rows or due or signals.received:
      run.save()
      saved = time.monotonic()
    if signals.received:
      raise cli.Stopped(
        f"stopped in {cell.name} at microbatch {run.message}; the same command"
        " with --resume goes on from there",
        signals.received,
      )
  return run.finish()


def _train_whoever_dies(exp, cell, place, board, bar, signals, way):
  """Runs one cell; when a process dies, goes on with new ones."""
  deaths, before = 0, -1
  while True:
    run = None
    try:
      run = PipelineRun(exp, cell, place, board, way)
      if run.message > before:
        deaths, before = 0, run.message
      return _train(run, exp, cell, bar, signals)
    except executor.PipelineError as error:
      if not way.processes:
        raise
      deaths += 1
      if not isinstance(error, processes.Died) or deaths == _DEATHS:
        raise ValueError(
          f"{cell.name}: {error}; what was saved goes on with --resume"
        ) from error
      bar.line(f"{cell.name}: {error}; on from the last checkpoint")
    finally:
      if run is not None:
        bar.skip(-run.message if way.processes and not run.finished else 0)
        run.close()


def train(
  exp: pipeline_experiment.Experiment,
  folder: Path,
  bar: progress.Progress,
  signals: Any = Signals,
  way: Way = Way(),  # noqa: B008
) -> list[dict[str, Any]]:
  """Runs the cells that are not finished; returns the results of all.

  Args:
    exp: the experiment.
    folder: for results.
    bar: told how far it is.
    signals: its `received` says whether to stop.
    way: how stages are run.

  Raises:
    Stopped: once all is saved.
    ValueError: if a process fails, or dies again and again.
  """
  results = []
  for cell in exp.cells:
    place = folder / "cells" / cell.name
    result = finished_result(place)
    if result is not None:
      bar.skip(exp.plans[cell.label].microbatches)
      results.append(result)
      if way.spans and not (place / "spans.json").exists():
        bar.line(
          f"{cell.name} is finished, and no --spans were written of it: another"
          " --out trains it again"
        )
      continue
    board = folder / "tensorboard" / cell.name
    result = _train_whoever_dies(
      *(exp, cell, place, board, bar, signals, way)
    )
    results.append(result)
    for line in pipeline_figures.lines(result):
      bar.line(line)
    if signals.received and len(results) < len(exp.cells):
      raise cli.Stopped(
        f"stopped after {cell.name}; the same command with --resume goes on"
        " from there",
        signals.received,
      )
  return results


def _build(seconds=None) -> pipeline_experiment.Experiment:
  """Builds the experiment that the flags describe."""
  if session.CONFIG.value is None:
    raise ValueError("no --config; try --config=configs/pipeline_digits.py")
  return pipeline_experiment.build(
    pipeline_experiment.override(session.CONFIG.value, cli.overrides()),
    data_dir=session.DATA_DIR.value,
    start=pipeline_experiment.start_jax,
    seconds=seconds,
  )


def _same_cuts(exp, folder, build: Callable[[list[float]], Any]):
  """Returns the experiment with the cuts that it began with, if they were made
  by times: those are others whenever they are measured."""
  if exp.seconds is None:
    return exp
  path = folder / "layer_seconds.json"
  held = outputs.read_json(path)
  if path.exists() or (folder / "cells").exists():
    return build(_seconds(path, held, exp))
  text = outputs.to_json({"seconds": exp.seconds})
  outputs.write_atomically(path, text + "\n")
  return exp


def _seconds(path, held, exp):
  """The times of layers that a file has, if it has them."""
  try:
    found = np.array(held["seconds"], float)
    if found.shape == np.shape(exp.seconds) and (found >= 0).all():
      return found.tolist()
  except (KeyError, TypeError, ValueError):
    pass
  raise ValueError(
    f"{path} does not say what each of {len(exp.seconds)} layers takes, forward"
    " and backward, by which this experiment's stages were cut: put it back as"
    " it was, or choose another folder with --out=FOLDER"
  )


def _describe_partition(plan) -> str:
  """Which layers a partitioner put where."""
  stages = zip(plan.cuts, plan.cuts[1:], plan.table.places(), strict=False)
  said = (
    f"{first} to {last - 1} on {', '.join(map(str, places))}"
    for first, last, places in stages
  )
  return f"{plan.label}: layers (on devices) {'; '.join(said)}"


def _check_gpus(each: float, count: int, there: float) -> None:
  """Refuses processes for which Ray would wait forever."""
  if each * count > there:
    raise ValueError(
      f"{count} processes of --gpus_per_process={each:g} need {each * count:g}"
      f" GPUs, and Ray has {there:g}: use fewer --processes, or parts of a GPU"
      " (0.5)"
    )


def main() -> None:
  """Runs the experiment that the flags describe."""
  count = _PROCESSES.value
  if count < 0:
    raise ValueError(f"--processes must be 0 or more, not {count}")
  if count:
    ray_session.check(
      *(ray_session.ADDRESS.value,),
      allow_network=ray_session.ALLOW_NETWORK.value,
      asked=f"--processes={count}",
      instead="--processes=0",
    )
  elif ray_session.ADDRESS.value:
    raise ValueError(
      f"--address={ray_session.ADDRESS.value} is of a Ray cluster, and stages"
      " are threads of this process: add --processes=N, or drop --address"
    )
  exp = _build()
  folder = session.open_folder(exp)
  exp = _same_cuts(exp, folder, _build)
  most = max(plan.table.devices for plan in exp.plans.values())
  here = jax.local_devices()
  if most > len(here):
    print(f"{most} devices of the tables share {len(here)}: {here[0].platform}")
  way = Way()
  if count:
    address = ray_session.ADDRESS.value
    shared = ray_session.start(
      *(exp.dataset, address),
      allow_network=ray_session.ALLOW_NETWORK.value,
    )
    way = Way(count, shared, _GPUS.value, cores=not address)
  way = way._replace(spans=_SPANS.value)
  for label in exp.plans:
    if "partition" in exp.config["runs"][label]:
      print(_describe_partition(exp.plans[label]))
  signals = session.Signals()
  total = sum(exp.plans[cell.label].microbatches for cell in exp.cells)
  bar = progress.Progress(total)
  try:
    if count:
      import ray

      there = ray.cluster_resources().get("GPU", 0.0)
      _check_gpus(way.gpus, min(count, most), there)
    results = train(exp, folder, bar, signals, way)
  finally:
    bar.close()
    if count:
      ray_session.stop()
  rows = [
    row for cell in exp.cells for row in read_rows(folder / "cells" / cell.name)
  ]
  pipeline_figures.write(folder, exp, results, rows)


if __name__ == "__main__":
  cli.run(main)
