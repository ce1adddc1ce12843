"""Trains the objects of a call, as an experiment with one run and one cell.

`asgd.facade` and `pipeline.facade` read the arguments of calls; `train` counts
the messages, trains the cell like a cell of a config, and collects its results.
"""

import collections
import contextlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, calls, checks, orders
from asgd.call_options import RunOptions
from asgd.experiment import (
  cell_files,
  cells,
  folder,
  live_memory,
  loop,
  progress,
  report,
  schema,
  storage,
)
from asgd.experiment import replay as replay_lib
from asgd.experiment.engines import EngineKind
from asgd.experiment.machine import Machine
from asgd.problems import descriptions, own


class Result(NamedTuple):
  """The results of a training."""

  params: Any  # the final parameters, in the caller's form
  records: Any  # a row for each message: loss, staleness, gap, ...
  # The order of sends and receives; None for tables and meshes.
  trace: base.Trace | None
  evaluations: list[dict[str, Any]]  # results of `evaluate`, and their times
  folder: Path | None  # folder of the results; None if the call keeps none

  def __repr__(self) -> str:
    """Returns a few lines: the records and parameters have too many numbers."""
    columns = self.records._asdict()
    lines = [f"Result of {len(columns['loss']):,} messages"]
    lines.append(f"  folder       {self.folder or 'none: nothing is kept'}")
    if len(columns["loss"]):
      lines.append(f"  last loss    {np.mean(columns['loss'][-1]):.4g}")
    if "staleness" in columns and np.size(columns["staleness"]):
      lines.append(f"  staleness    {np.mean(columns['staleness']):.3g} (mean)")
    last: dict[str, Any] = dict(*self.evaluations[-1:])
    texts = [f"{key} {value:.5g}" for key, value in last.items()]
    text = f", the last: {', '.join(texts)}" if texts else ""
    lines.append(f"  evaluations  {len(self.evaluations)}{text}")
    lines.append(f"  params       {_shapes(self.params)}")
    return "\n".join(lines)


_MAX_SHAPES = 6  # arrays of the parameters that a Result shows


def _shapes(params: Any) -> str:
  """Returns the shapes of a tree's arrays as a text.

  Example:
    >>> _shapes({"bias": np.zeros(3), "scale": 1.0})
    "['bias'] (3,), ['scale'] ()"
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  texts = [
    f"{jax.tree_util.keystr(path)} {getattr(leaf, 'shape', ())}".strip()
    for path, leaf in leaves[:_MAX_SHAPES]
  ]
  n_hidden = len(leaves) - len(texts)
  return ", ".join(texts) + f" and {n_hidden} more" * (n_hidden > 0)


def _config(
  caller: own.Objects,
  name: str,
  messages: int,
  every: int,
  options: RunOptions,
) -> dict[str, Any]:
  """Returns the config of an experiment with one run of a caller's objects."""
  recipe = caller.recipe
  named_recipe = getattr(recipe, "build", None)
  # A recipe that was made by hand has neither a name nor a rate; the rate 1 is
  # only a record then.
  has_name = named_recipe and named_recipe.name.isidentifier()
  label = named_recipe.name if has_name else "run"
  rate = named_recipe.learning_rate if named_recipe else 1.0
  if callable(rate):  # a schedule: the config records its peak
    points = np.unique(np.linspace(0, messages, 100).astype(int)).tolist()
    rate = max(float(rate(update)) for update in points)
  return {
    "data": {"name": caller.name},
    "model": {"name": caller.name},
    "runs": {label: {"recipe": schema.GIVEN_MARK}},
    "engine": name,
    "workers": [options.workers or recipe.workers],
    "seeds": [options.seed],
    "batch_size": caller.size,
    "examples": messages * recipe.steps * caller.size,
    "learning_rate": float(rate),
    "evaluations": messages // every,
    "curvature_checks": 0,
  }


def train(
  caller: own.Objects,
  engine: tuple[str, EngineKind],
  config: Mapping[str, Any],
  options: RunOptions,
  *,
  quantum: tuple[int, str],
) -> Result:
  """Trains the objects that a caller gave on an engine.

  Args:
    caller: the caller's objects.
    engine: (name, kind).
    config: further keys of a config.
    options: the options of the call.
    quantum: (n, format text for a group of n messages), see `calls.quantum_of`.
  """
  name, kind = engine
  folder_path = options.folder
  messages = calls.count_messages(options, caller, quantum)
  options = options._replace(messages=messages)
  calls.read_rows(caller, options.workers or caller.recipe.workers, messages)
  every = _check_every(options)
  calls.check_sequential(caller, name)
  # [1] Make an experiment with one cell.
  full_config = _config(caller, name, messages, every, options) | dict(config)
  caller.functions = descriptions.describe_functions(config, caller.recipe)
  experiment = cells.build(full_config, engines={name: kind}, dataset=caller)
  (cell,), machine = experiment.cells, options.machine or _machine()
  plan = experiment.plan(cell)
  experiment.check_machine(machine)
  if name == "ray" or machine.processes:
    calls.check_travels(caller)
  results: list[Any] = []
  with contextlib.ExitStack() as stack:
    stack.callback(machine.close)
    # [2] Open its folder. A live run needs one for its journals, even if the
    # caller keeps nothing.
    workdir, cell_folder = None, None
    is_temporary = folder_path is None and kind.journaled
    if is_temporary:
      folder_path = stack.enter_context(
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
      )
    if folder_path is not None:
      workdir = folder.open_folder(
        os.fspath(folder_path), cell.label, experiment
      )
      cell_folder = workdir / "cells" / cell.name
      if is_temporary:  # a run that fails keeps its memory, to be resumed
        stack.callback(live_memory.remove_leftover, cell_folder)
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
      on_end=lambda *values: results.extend(values),
    )
    # [4] Collect its results.
    if workdir is not None and options.folder is not None:
      _write_report(workdir, experiment, bar)
    if not results and cell_folder is not None:
      _check_evaluation(cell_folder, caller)
      bar.line(f"{cell_folder} had finished already: its results are read")
      results += *_read_finished(cell_folder, experiment, cell), {}
    records, params, rows, files = results
    trace = _trace(plan, cell, cell_folder, kind, files)
  params = caller.outward(params)
  evaluations = [_evaluation(row) for row in rows]
  results_folder = None if options.folder is None else Path(options.folder)
  return Result(params, records, trace, evaluations, results_folder)


def _check_every(options: RunOptions) -> int:
  """Returns the number of messages between two evaluations; ValueError if it
  does not divide that of the run."""
  messages, every = options.messages, options.every
  assert messages is not None
  every = messages if every is None else checks.integer("every", every)
  if messages % every:
    raise ValueError(
      f"{messages} messages are not a multiple of every={every}, the messages"
      f" between two evaluations; use {max(messages // every, 1) * every}"
    )
  return every


def _check_evaluation(cell_folder: Path, caller: own.Objects) -> None:
  """Raises ValueError if a finished cell was trained with another `evaluate`:
  the call would return that function's results."""
  evaluate_now = caller.notes.get("evaluate")
  evaluate_before = folder.read_cell(cell_folder).get("evaluate")
  evaluations = map(_evaluation, folder.read_rows(cell_folder))
  was_evaluated = any(row.keys() - own.RESULT_COLUMNS for row in evaluations)
  # Earlier releases evaluated, but did not record the function.
  if evaluate_now in (None, evaluate_before) or (
    evaluate_before is None and was_evaluated
  ):
    return
  text = "with another evaluate" if evaluate_before else "without evaluate"
  raise ValueError(
    f"{cell_folder} was trained {text}, and has finished: leave evaluate out,"
    " and call it on the parameters of the result; or choose another folder"
  )


def _write_report(
  workdir: Path,
  experiment: cells.Experiment,
  bar: progress.ProgressBar | progress.Silent,
) -> None:
  """Writes the report. A full disk only causes a warning: the caller still gets
  the result."""
  try:
    report.write(workdir, experiment, bar.notes)
    bar.line(f"report: {workdir / 'report.html'}")
  except OSError as error:
    warnings.warn(f"{workdir} has no report: {error}", stacklevel=4)


# Files of a simulated cell with an order that no plan can draw: that of codes
# over a network, and the lead's of shards that are out of step.
_TRACES = "trace.csv", "trace-0.csv"


def _trace(
  plan: Any,
  cell: cells.Cell,
  cell_folder: Path | None,
  kind: EngineKind,
  files: Mapping[str, str],
) -> base.Trace | None:
  """Returns the order of a cell: read from the lead's journal, from the cell's
  folder or else from `files`, or drawn; None if the engine has no trace."""
  if cell_folder is not None and kind.journaled:
    return replay_lib.read_trace(cell_folder)
  # Devices of a mesh are in step: no order is drawn for them.
  if "durations" not in kind.sections or not hasattr(plan, "trace"):
    return None
  if cell_folder is not None:
    paths = (cell_folder / name for name in _TRACES)
    files = {path.name: path.read_text() for path in paths if path.exists()}
  for name in files.keys() & _TRACES:
    return orders.load(files[name].splitlines(keepends=True))
  trace: base.Trace = plan.of_seed(cell.seed).trace(cell.seed)
  return trace


def _machine() -> Machine:
  """Returns the default machine, with a temporary folder if it has no shared
  memory."""
  memory = Machine.memory_dir
  if not os.path.isdir(memory):
    memory = tempfile.gettempdir()
  return Machine(memory_dir=memory)


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the evaluation of a row, with the keys that the caller knows."""
  columns = {key: row[key] for key in own.RESULT_COLUMNS if key in row}
  columns |= {
    key.removeprefix("test_"): value
    for key, value in row.items()
    if key.startswith("test_")
  }
  return {
    key: value
    for key, value in columns.items()
    if value is not None and value == value  # not a NaN
  }


def _read_finished(
  cell_folder: Path, experiment: cells.Experiment, cell: cells.Cell
) -> tuple[Any, Any, list[dict[str, Any]]]:
  """Returns records, parameters and evaluations of a finished cell."""
  columns = cell_files.read_records(cell_folder)
  # Peers, meshes and pipelines have other columns than `Records`.
  records_type: Any = base.Records
  if set(columns) != set(base.Records._fields):
    namedtuple: Any = collections.namedtuple  # with fields known at run time
    records_type = namedtuple("Records", columns)
  records = records_type(**columns)
  # The file holds arrays alone; the initial parameters give their structure.
  key, _ = jax.random.split(jax.random.key(cell.seed))
  problem = experiment.problem_of(experiment.runs[cell.label])
  template = jax.device_get(problem.init(key))
  content = cell_files.read_file(cell_folder, "params.msgpack")
  params = storage.params_from_bytes(content, template)
  return records, params, folder.read_rows(cell_folder)
