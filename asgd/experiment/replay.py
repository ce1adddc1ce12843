"""Recomputes a live run from its traces.

A trace has a row for each sent ticket, each received message, and each worker
that left or joined. Calls in this order give the same bits as in the run, on
the same kind of device with the same number of cores (XLA divides sums among
cores).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asgd import base, problems
from asgd.checks import shown
from asgd.experiment import (
  cell_files,
  cells,
  code,
  live_files,
  protocol,
  report,
  schema,
  storage,
)
from asgd.experiment.engines import live, simulate
from asgd.problems import own

ENGINES = {
  "threads": live.THREADS,
  "ray": live.RAY,
  "simulate": simulate.SIMULATE,
}


class Replay(NamedTuple):
  """The result of a replay."""

  name: str  # of the cell
  trace: base.Trace  # of the lead, or of all peers or workers
  records: base.Records  # of the lead, or of all peers or workers
  params: Any  # the final parameters; of peers their mean
  evaluation: problems.Evaluation
  digest: str  # checksum of the parameters
  recorded: str | None  # the same of the run; None if it has not finished
  messages: int | None  # of the run; None if it has not finished
  cpus: int | None  # cores of the run's machine
  changed: Sequence[str] = ()  # user modules that were changed since the run

  @property
  def accuracy(self) -> float:
    """Accuracy of the parameters; NaN if the task has none."""
    return self.evaluation.accuracy

  @property
  def same(self) -> bool:
    """Whether the replay has the run's bits; True for an unfinished run."""
    return self.recorded in (None, self.digest)

  @property
  def reason(self) -> str:
    """The most likely reason why the replay has other bits than the run; "" if
    it has the same, or no reason is known."""
    if self.same:
      return ""
    count = int((self.trace.action == base.RECEIVE).sum())
    if count < (self.messages or 0):
      return (
        f"the trace ends at message {count} of {self.messages}: it was cut"
        " short; put the files back as the run wrote them"
      )
    if self.changed:
      return f"{', '.join(self.changed)} changed since"
    if self.cpus != os.cpu_count():
      return f"it had {self.cpus} CPU cores, this machine {os.cpu_count()}"
    return ""

  def __repr__(self) -> str:
    """Returns a few lines: trace and parameters have too many numbers."""
    return describe(self)


def dataset_identity(folder: str | Path) -> dict[str, Any]:
  """Returns the `Experiment.dataset_identity` of a live cell."""
  cell_folder = live_files.only_cell(Path(folder))
  return live_files.read_description(cell_folder).get("dataset") or {}


def worker_count(folder: str | Path) -> int:
  """Returns the number of workers of a live cell."""
  cell_folder = live_files.only_cell(Path(folder))
  return live_files.read_description(cell_folder)["cell"]["workers"]


def read_trace(folder: Path) -> base.Trace:
  """Returns the trace of a live cell's lead."""
  description = live_files.read_description(folder)
  live = protocol.of_cell(folder, description).live
  return live.trace(folder, description)


def load(
  folder: Path,
  *,
  data_dir: str | None = None,
  caller_objects: own.Objects | None = None,
  trust: bool = False,
) -> tuple[cells.Experiment, cells.Cell]:
  """Builds the experiment of one live cell. This imports and runs the code that
  the cell's config names.

  Args:
    folder: the folder of the cell.
    data_dir: folder of the data set; None: the default.
    caller_objects: the objects of a run that a call trained; None for a config.
    trust: whether code of other users may run.

  Raises:
    ValueError: the data differ, or the code is not trusted
      (`code.check_trusted`).
  """
  # [1] The config and the data of the run; whether its code may run.
  description = live_files.read_description(folder)
  config, modules = description["config"], description["modules"]
  code.check_trusted(folder, config, modules, trust=trust)
  code.make_importable(modules)
  recorded: Mapping[str, Any] = description.get("dataset") or {}
  # [2] Whether objects are given exactly where the run had objects.
  for key in caller_objects.objects if caller_objects is not None else ():
    section = config.get(key)
    name = section["name"] if isinstance(section, Mapping) else section
    if name != schema.GIVEN_MARK:
      raise ValueError(
        f"{folder} had {key}={shown(section)}, not an object: leave {key} out"
      )
  if caller_objects is None and recorded.get("name") == own.Objects.name:
    raise ValueError(
      f"{folder} is of asgd.train_live, which was given functions: call"
      " asgd.replay(folder, loss, params, data, recipe)"
    )
  # [3] The experiment, of this cell alone.
  experiment = cells.build(
    config, engines=ENGINES, data_dir=data_dir, dataset=caller_objects
  )
  if caller_objects is not None and caller_objects.sequential:
    raise ValueError(
      f"{folder} was trained on iterators, which a replay cannot rewind to the"
      " batch of each job: for runs to be replayed, give data as a function"
      " (worker, job) -> batch"
    )
  if len(experiment.cells) != 1:
    raise ValueError(f"{folder}/{live_files.CHANGED}")
  # [4] Whether these are the data of the run.
  identity = experiment.dataset_identity
  if caller_objects is not None:
    _check_same_objects(folder, recorded, identity)
  elif identity != recorded:
    raise ValueError(
      f"the data ({experiment.dataset.source}) is not the run's data; give its"
      " folder with --data_dir"
    )
  (cell,) = experiment.cells
  return experiment, cell


def _check_same_objects(
  folder: Path, recorded: Mapping[str, Any], identity: Mapping[str, Any]
) -> None:
  """Raises ValueError if the identity of objects differs from the recorded one
  of a run. The error names the values that differ, but not checksums."""
  keys = [key for key in identity if identity[key] != recorded.get(key)]
  if not keys:
    return
  reasons = [
    f"{key} was {shown(recorded.get(key))}, and is {shown(identity[key])}"
    for key in keys
    if key not in ("sha256", "build", "code")
  ]
  if keys == ["code"]:
    reasons = ["the source of the loss, or of another function, was changed"]
  reasons = reasons or ["the parameters or the first batches differ"]
  raise ValueError(
    f"{folder} was trained with other arguments: {'; '.join(reasons)}"
  )


def replay(
  folder: str | Path,
  *,
  data_dir: str | None = None,
  caller_objects: own.Objects | None = None,
  trust: bool = False,
) -> Replay:
  """Replays a cell of a live run.

  Args:
    folder: WORKDIR/cells/NAME, or a WORKDIR that has one cell.
    data_dir: folder of the data set; None: the default.
    caller_objects: the objects of a run that a call trained; None for a config.
    trust: whether code may run that the folder of another user names.

  Raises:
    ValueError: there is no message to replay, the trace is not allowed, or the
      code is not trusted (`code.check_trusted`).
  """
  folder = live_files.only_cell(Path(folder))
  description = live_files.read_description(folder)
  live = protocol.of_cell(folder, description).live
  # [1] Whether the files allow a replay, before data are loaded.
  if live.check_replayable is not None:
    live.check_replayable(folder, description)
  else:
    if (folder / "result.json").exists():
      live.check(folder, description)
    live.trace(folder, description)
  # [2] The computation.
  experiment, cell = load(
    folder, data_dir=data_dir, caller_objects=caller_objects, trust=trust
  )
  plan = experiment.plan(cell)
  computed = live.replay(plan, cell, folder, description)
  # [3] The comparison. Further digests are compared only if the parameters are
  # equal, or not known: otherwise they differ for the same reason.
  result, digest = read_result(folder), storage.digest(computed.params)
  recorded = result.get("params_sha256")
  for key, value in computed.digests.items():
    if result.get(key) not in (None, value) and recorded in (None, digest):
      raise ValueError(
        f"{folder}: the replay has the same parameters as the run, but another"
        f" {key}: the evaluated parameters are equal, and their parts are not"
      )
  return Replay(
    cell.name,
    computed.trace,
    computed.records,
    computed.params,
    evaluation=plan.problem.evaluate(computed.params),
    digest=digest,
    recorded=recorded,
    messages=result.get("messages"),
    cpus=description.get("cpus"),
    changed=code.changed_modules(description["modules"]),
  )


def read_result(folder: Path) -> dict[str, Any]:
  """Returns the contents of result.json; {} if there is none. Raises ValueError
  if it was changed."""
  path = folder / "result.json"
  result = storage.read_sealed(path)
  # Simulated shards leave traces, too, and pack their cells.
  packed = storage.read_archive(folder / cell_files.ARCHIVE, path.name)
  if result is None and packed:
    return storage.json_object(packed[path.name]) or {}
  if result is None and path.exists():
    raise ValueError(
      f"{path} cannot be read or was changed: restore it as the run wrote it,"
      " or remove it to compute the parameters without a comparison"
    )
  return result or {}


def restore(folder: str | Path, replayed: Replay) -> Path:
  """Writes the params.msgpack of a finished cell from its replay, with the same
  bytes. Raises ValueError if the replay has other parameters than the run."""
  folder = live_files.only_cell(Path(folder))
  if replayed.recorded != replayed.digest:
    raise ValueError(
      f"{folder}: the replay has other parameters than the run, or the run has"
      " not finished: nothing is restored"
    )
  return storage.write_params(folder, replayed.params)


def describe(replayed: Replay) -> str:
  """Returns a text on a replay's result, and whether the run's is the same."""
  action, staleness = replayed.trace.action, replayed.records.staleness
  counts = np.bincount(action, minlength=len(base.ACTIONS)).tolist()
  events = ", ".join(
    f"{n} {name}" for name, n in zip(base.ACTIONS, counts, strict=True) if n
  )
  evaluation = replayed.evaluation
  quality = report.quality_text(
    evaluation.accuracy, evaluation.measure, evaluation.loss
  )
  lines = [
    f"{replayed.name}: {events}",
    f"{quality}staleness mean {staleness.mean():.1f} max {staleness.max()}",
    f"parameters {replayed.digest[:16]}",
  ]
  if replayed.recorded is None:
    lines.append("the run did not finish, or not yet: nothing to compare with")
  elif replayed.recorded == replayed.digest:
    lines.append("the same parameters as the run, to the bit")
  else:
    reason = replayed.reason and f": {replayed.reason}"
    lines.append(
      f"NOT the parameters of the run ({replayed.recorded[:16]}){reason}"
    )
  return "\n".join(lines)
