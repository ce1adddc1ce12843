"""Training from a script: your own loss, parameters and data, in one call.

Each function makes an experiment of one cell from objects, and trains it as
`asgd.experiment` trains configs, so it can be stopped, resumed and replayed.
"""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from asgd import algorithms, base, calls, checks, compression
from asgd.call_options import (
  FURTHER,
  LiveOptions,
  RecipeLike,
  RunOptions,
  SimulateOptions,
  read_options,
)
from asgd.experiment import (
  cell_files,
  cells,
  code,
  folder,
  loop,
  progress,
  report,
  schema,
  storage,
)
from asgd.experiment import replay as replay_lib
from asgd.experiment.engines import EngineKind
from asgd.experiment.engines.live import RAY, THREADS
from asgd.experiment.engines.simulate import SIMULATE
from asgd.experiment.folder import only_cell
from asgd.experiment.machine import Machine
from asgd.problems import descriptions, own

_RUNTIMES = {"threads": THREADS, "ray": RAY}
# Columns of an evaluation's row that a caller gets.
_OF_A_ROW = (
  *("message", "update", "time", "seconds", "megabytes", "train_loss"),
  *("staleness_mean", "gap_mean", "test_loss", "test_accuracy"),
)

class Result(NamedTuple):
  """The results of a training."""

  params: Any  # the final parameters, in the caller's form
  records: Any  # a row for each message: loss, staleness, gap, ...
  trace: base.Trace | None  # the order of sends and receives; None for tables
  evaluations: list[dict[str, Any]]  # results of `evaluate`, and their times
  folder: Path | None  # of the results; None if they are not kept


def simulate(
  loss: Any,
  params: Any,
  data: Any,
  recipe: RecipeLike,
  *,
  messages: int,
  workers: int | None = None,
  batch_size: int | None = None,
  folder: str | os.PathLike[str] | None = None,
  **options: Unpack[SimulateOptions],
) -> Result:
  """Trains with many workers in simulated time.

  Args:
    loss: a function (params, batch) or (params, batch, key) that returns a
      scalar or (scalar, aux); or a pair (model, criterion), with
      criterion(output, batch) -> scalar. The model is a flax module, functions
      (init, apply) or a function rngs -> nnx module. It is called on the first
      element of a batch that is a tuple, or on "x" of a dict.
    params: a tree of arrays, or a function of a random key that makes one. A
      model of Equinox or an nnx module is a tree of arrays if all its leaves
      can be trained; split it otherwise (eqx.partition, nnx.split). With
      BatchNorm in plain JAX give `asgd.Variables`, and a loss that returns
      (value, the batch's statistics). For a flax module give its variables;
      None draws them from the seed.
    data: arrays with a leading axis of examples, in a tuple or a dict, with
      `batch_size`; anything with len() and an index (a grain.MapDataset, a list
      of batches), of batches, or with `batch_size` of examples; or a pure
      function (worker, job) -> batch. Jobs are counted over all workers.
    recipe: of `asgd`, such as `asgd.dana_zero(0.01, workers=8)`; an
      `asgd.Recipe`; an optax transform, which may read a Delay; or the settings
      of `asgd.tables.table` or `asgd.sandblaster.sandblaster`, with `workers`.
    messages: how many the server receives, a multiple of the workers.
    workers: needed if the recipe does not give the number.
    batch_size: examples in a batch, unless the data are batches already.
    folder: where results, a report.html and checkpoints are kept; the same call
      resumes from them. None keeps nothing.
    seed: of the initial parameters, the order of examples and the durations.
    evaluate: called with the parameters; returns a number or a dict of numbers.
      "loss" and "accuracy" are those of a test.
    every: messages between two evaluations; it divides `messages`. None is
      `messages`: one evaluation, at the end.
    progress: whether a progress bar is printed on the standard error.
    machine: an `asgd.experiment.machine.Machine`.
    options: `seed` (0) to `machine` (None), described above, and further keys
      of a config. Some are order={"name": "fixed_delay"}, durations={...},
      gate={"max_staleness": 8}, clip_norm=1.0 and allocation={"batch_size":
      "speed"} (`asgd.allocation`). `compress` is a codec of messages
      (`asgd.compression`), its name, or a dict of its name and options;
      `compress_down` is a codec of the server's updates.

  Raises ValueError for arguments that do not fit, before anything runs.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import asgd
    >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    >>> def loss(w, batch):
    ...   x, y = batch
    ...   return ((x @ w - y) ** 2).mean()
    >>> recipe = asgd.dana_zero(0.01, workers=4)
    >>> result = asgd.simulate(
    ...   loss, jnp.zeros(3), (x, x.sum(1)), recipe, messages=800, batch_size=8
    ... )
    >>> print(result.params.round(2), result.records.staleness.mean().round())
    [1. 1. 1.] 3.0
  """
  named = messages, workers, batch_size, folder
  parts = loss, params, data, recipe
  return _train(("simulate", SIMULATE), parts, *read_options(named, options))


def train_live(
  loss: Any,
  params: Any,
  data: Any,
  recipe: RecipeLike,
  *,
  messages: int,
  workers: int | None = None,
  runtime: str = "threads",
  batch_size: int | None = None,
  folder: str | os.PathLike[str] | None = None,
  **options: Unpack[LiveOptions],
) -> Result:
  """Trains with real workers, in real time; for other arguments see `simulate`.

  `asgd.replay` recomputes a run from its folder.

  Args:
    runtime: "threads" of this process, or "ray": processes of a cluster, on
      this machine unless `machine` names another. Ray's cloudpickle sends
      functions and data to them; `evaluate` is called in this process.
    options: also further keys of a config, such as server={"shards": 2}, or
      live={"slowdown": (1, 3)}.
  """
  checks.one_of("runtime", runtime, tuple(_RUNTIMES))
  named = messages, workers, batch_size, folder
  parts = loss, params, data, recipe
  engine = runtime, _RUNTIMES[runtime]
  return _train(engine, parts, *read_options(named, options))


def _train(
  engine: tuple[str, EngineKind],
  parts: tuple[Any, ...],
  options: RunOptions,
  config: Mapping[str, Any],
) -> Result:
  """Trains a caller's (loss, parameters, data, recipe)."""
  loss, params, data, recipe = parts
  recipe = calls.read_recipe(recipe, options.workers)
  codecs, config = calls.codecs_of(config)
  with calls.in_words_of_calls():
    given = own.Objects(
      *(loss, params, data, recipe),
      batch_size=options.batch_size,
      evaluate=options.evaluate,
      codecs=codecs,
    )
    return train(given, engine, config, options)


def replay(
  folder: str | os.PathLike[str],
  loss: Any = None,
  params: Any = None,
  data: Any = None,
  recipe: Any = None,
  *,
  compress: compression.Codec | None = None,
  compress_down: compression.Codec | None = None,
  data_dir: str | None = None,
  trust: bool = False,
) -> replay_lib.Replay:
  """Recomputes a live run from its traces.

  Args:
    folder: of `train_live`; or WORKDIR/cells/NAME of asgd train, or a WORKDIR
      that has one cell.
    loss, params, data, recipe: for a run of `train_live`, the objects that it
      was given. They may be left out if the first three are functions of
      modules that can be imported, and the recipe was built by name with plain
      options.
    compress, compress_down: the codecs, if the run was given them as objects.
    data_dir: for a run of asgd train: where the dataset's files are.
    trust: whether to import and run functions that another user's folder names.

  Returns:
    A `Replay`; its `same` says whether it equals the run to the bit.

  Raises:
    ValueError: if there is nothing to replay, the trace cannot be replayed, or
      an argument is not what the run was trained on.
  """
  folder = Path(folder)
  recorded = replay_lib.trained(folder)
  # [1] A run of a config names all that it needs.
  if recorded.get("name") != own.Objects.name:
    if any(part is not None for part in (loss, params, data, recipe)):
      raise ValueError(
        f"{folder} was trained from a config, which names loss, params, data"
        " and recipe: call asgd.replay(folder) alone"
      )
    return replay_lib.replay(folder, data_dir=data_dir, trust=trust)
  # [2] A run of objects needs them again: given, or imported by their names.
  if loss is None:
    code.check_trusted(only_cell(folder), recorded, trust=trust)
    loss, params, data, recipe = _imported(folder, recorded)
  # [3] A recipe for another number of workers would be another computation.
  built = recorded.get("build") or {}
  count, asked = built.get("workers"), getattr(recipe, "workers", None)
  if None not in (count, asked) and count != asked:
    raise ValueError(
      f"{folder} has {count} workers, but the recipe was built for {asked}:"
      f" build it with workers={count}"
    )
  if count is None:
    count = replay_lib.workers_of(folder)
  recipe = calls.read_recipe(recipe, count)
  # [4] Recompute the run.
  codecs = {"compress": compress, "compress_down": compress_down}
  with calls.in_words_of_calls():
    given = own.Objects(
      *(loss, params, data, recipe),
      batch_size=recorded.get("batch_size"),
      codecs={key: codec for key, codec in codecs.items() if codec},
    )
    replayed = replay_lib.replay(folder, given=given, trust=trust)
  return replayed._replace(params=given.outward(replayed.params))


def _imported(folder: Path, recorded: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns (loss, params, data, recipe) by the names in a run's folder."""
  parts = {
    key: descriptions.importable(recorded[key])
    for key in ("loss", "params", "data")
  }
  # A lambda or a nested function has no name that can be imported.
  missing = [key for key, value in parts.items() if value is None]
  missing += [] if recorded["build"] else ["recipe"]
  if missing:
    raise ValueError(
      f"{folder} was trained on objects that cannot be imported"
      f" ({', '.join(missing)}): pass them, asgd.replay(folder, loss, params,"
      " data, recipe)"
    )
  build = dict(recorded["build"])
  options = build.pop("options")
  return *parts.values(), algorithms.build(**build, **options)


def _config(
  given: own.Objects, name: str, options: RunOptions
) -> dict[str, Any]:
  """Returns the config of an experiment with one run, of given objects."""
  recipe, messages = given.recipe, options.messages
  made = getattr(recipe, "made", None)
  # A recipe that was made by hand has neither a name nor a rate; the rate 1 is
  # only a record then.
  label = made.name if made and made.name.isidentifier() else "run"
  rate = made.learning_rate if made else 1.0
  if callable(rate):  # a schedule: the config records its peak
    at = np.unique(np.linspace(0, messages, 100).astype(int)).tolist()
    rate = max(float(rate(update)) for update in at)
  return {
    "data": {"name": given.name},
    "model": {"name": given.name},
    "runs": {label: {"recipe": schema.GIVEN}},
    "engine": name,
    "workers": [options.workers or recipe.workers],
    "seeds": [options.seed],
    "batch_size": given.size,
    "examples": messages * recipe.steps * given.size,
    "learning_rate": float(rate),
    "evaluations": messages // (options.every or messages),
    "curvature_checks": 0,
  }


# `pipeline` uses the functions below, too.


def train(
  given: own.Objects,
  engine: tuple[str, EngineKind],
  config: Mapping[str, Any],
  options: RunOptions,
  *,
  quantum: tuple[int, str] | None = None,
) -> Result:
  """Trains the objects that a caller gave on an engine.

  Args:
    given: the caller's objects.
    engine: (name, kind).
    config: further keys of a config.
    options: of the call.
    quantum: (how many messages must be counted together, a text such as "rounds
      of {} workers"); None: the messages of a round of workers.
  """
  name, kind = engine
  kept_in = options.folder
  rounds = options.workers or given.recipe.workers, "rounds of {} workers"
  every = _check_counts(options, quantum or rounds)
  # An unknown key would otherwise be ignored.
  known = *kind.sections, *FURTHER
  for key in config:
    if key not in known:
      raise ValueError(
        f"unknown argument {key!r}; further ones are {', '.join(known)}"
      )
  calls.check_sequential(given, name)
  # [1] Make an experiment with one cell.
  whole = _config(given, name, options._replace(every=every)) | dict(config)
  experiment = cells.build(whole, engines={name: kind}, dataset=given)
  (cell,), machine = experiment.cells, options.machine or _machine()
  plan = experiment.plan(cell)
  experiment.check_machine(machine)
  if name == "ray" or machine.processes:
    calls.check_travels(given)
  kept: list[Any] = []
  with contextlib.ExitStack() as stack:
    stack.callback(machine.close)
    # [2] Open its folder. A live run needs one for its journals, even if the
    # caller keeps nothing.
    workdir, cell_folder = None, None
    if kept_in is None and kind.journaled:
      kept_in = stack.enter_context(
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
      )
    if kept_in is not None:
      workdir = folder.open_folder(os.fspath(kept_in), cell.label, experiment)
      cell_folder = workdir / "cells" / cell.name
    bar: progress.ProgressBar | progress.Silent = progress.Silent()
    if options.progress:
      bar = progress.ProgressBar(
        plan.messages, describe=lambda name, row: kind.describe(row)
      )
      stack.callback(bar.close)
    # [3] Train the cell.
    loop.train(
      *(experiment, cell, workdir),
      bar=bar,
      machine=machine,
      ended=lambda *what: kept.extend(what),
    )
    # [4] Collect its results.
    if workdir is not None and options.folder is not None:
      _report(workdir, experiment, bar)
    if not kept and cell_folder is not None:  # the cell had finished before
      kept += _read(cell_folder, experiment, cell)
    records, params, rows = kept
    trace = _trace(plan, cell, cell_folder)
  params = given.outward(params)
  rows = [_row(row) for row in rows]
  results = None if options.folder is None else Path(options.folder)
  return Result(params, records, trace, rows, results)


def _check_counts(options: RunOptions, quantum: tuple[Any, str]) -> int:
  """Returns the messages between two evaluations; ValueError for counts that do
  not fit."""
  messages = checks.whole("messages", options.messages)
  checks.whole("seed", options.seed, 0, 2**32 - 1)
  checks.multiple(messages, "messages", *quantum)
  every = messages if options.every is None else options.every
  checks.whole("every", every)
  if messages % every:
    raise ValueError(
      f"{messages} messages are not a multiple of every={every}, the messages"
      f" between two evaluations; use {max(messages // every, 1) * every}"
    )
  return every


def _report(
  workdir: Path,
  experiment: cells.Experiment,
  bar: progress.ProgressBar | progress.Silent,
) -> None:
  """Writes the report; a full disk is a warning, as the caller gets the
  result."""
  try:
    report.write(workdir, experiment, bar.notes)
    bar.line(f"report: {workdir / 'report.html'}")
  except OSError as error:
    warnings.warn(f"{workdir} has no report: {error}", stacklevel=4)


def _trace(
  plan: Any, cell: cells.Cell, cell_folder: Path | None
) -> base.Trace | None:
  """Returns the order of a cell: read from the lead's journal, or drawn; None
  if the engine has no trace."""
  if cell_folder is not None and plan.run.engine in _RUNTIMES:
    return replay_lib.trace_of(cell_folder)
  if not hasattr(plan, "trace"):
    return None
  trace: base.Trace = plan.of_seed(cell.seed).trace(cell.seed)
  return trace


def _machine() -> Machine:
  """Returns the default machine, with a temporary folder if it has no shared
  memory."""
  memory = Machine.memory_dir
  if not os.path.isdir(memory):
    memory = tempfile.gettempdir()
  return Machine(memory_dir=memory)


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
  """An evaluation as the caller knows it."""
  out = {key: row[key] for key in _OF_A_ROW if row.get(key) is not None}
  out |= {
    key.removeprefix("test_"): value
    for key, value in row.items()
    if key.startswith("test_") and value is not None
  }
  return {
    key: value
    for key, value in out.items()
    if not key.startswith("test_") and value == value  # not a NaN
  }


def _read(
  cell_folder: Path, experiment: cells.Experiment, cell: cells.Cell
) -> tuple[Any, Any, list[dict[str, Any]]]:
  """Returns records, parameters and evaluations of a finished cell."""
  columns = cell_files.read_records(cell_folder)
  records: Any = columns
  # Servers and simulators write `Records`; peers, tables and Sandblaster have
  # columns of their own.
  if set(columns) == set(base.Records._fields):
    records = base.Records(**columns)
  # The file holds arrays alone; the initial parameters give their structure.
  key, _ = jax.random.split(jax.random.key(cell.seed))
  problem = experiment.problem_of(experiment.runs[cell.label])
  like = jax.device_get(problem.init(key))
  content = cell_files.read_file(cell_folder, "params.msgpack")
  params = storage.params_of(content, like)
  return records, params, folder.read_rows(cell_folder)


__all__ = ["Result", "replay", "simulate", "train_live"]
