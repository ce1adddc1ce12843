"""Trains one model on a mesh of devices, all of them in step.

  python -m launch.train_sync --config=configs/gpt_text.py
  python -m launch.train_sync --config=configs/gpt_text.py \\
    --config.mesh=data:2,tensor:4
  python -m launch.train_sync --config=configs/gpt_text.py \\
    --config.mesh=data:2,tensor:4 --num_processes=2

The axes of the mesh say what its devices share: data (examples), tensor (every
matrix of a GPT), pipe (its blocks), rows (the images of a ResNet). Whatever
they are, examples are learned from in the same order, and the losses are the
same, but for round-off; --config.precision=float64 shows it. Where there are
fewer devices than the mesh has, JAX_PLATFORMS=cpu makes as many of the CPU.

With --num_processes=N the devices are in N processes of this machine. On
several machines, start one on each, all with the same command otherwise:

  python -m launch.train_sync --config=FILE --config.mesh=data:16 \\
    --num_processes=2 --process_id=0 --coordinator=HOST_OF_0:PORT

or, under Slurm (and others that JAX knows), without numbers:

  srun python -m launch.train_sync --config=FILE --coordinator=auto

Process 0 writes, to --out; data is read by each. If a process dies, all end,
and the same command goes on from the last checkpoint with --resume. Ctrl-C, or
a kill, loses nothing that matters: with --resume on the same mesh the run ends
with the same parameters, to the bit. The parameters that it leaves
(params.msgpack) are whole, whatever the mesh was.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from asgd.parallel import meshes
from launch import (
  checkpoints,
  cli,
  outputs,
  progress,
  session,
  sync_experiment,
  sync_figures,
  sync_processes,
)

flags.adopt_module_key_flags(session)  # --help lists them, too
flags.adopt_module_key_flags(sync_processes)
_LOOK_SECONDS = 1.0  # of training, between two looks at clocks and signals
_RESULT_KEYS = frozenset(("seed", "updates", "seconds", "test_loss"))


class Records(NamedTuple):
  """What is recorded of a cell, of each update."""

  loss: np.ndarray  # float32[U], before the update
  norm: np.ndarray  # float32[U], of the gradient before it is clipped
  finite: np.ndarray  # bool[U], False if the loss scale skipped it

  @classmethod
  def empty(cls, count: int) -> "Records":
    """Records of updates that are still to come."""
    nan = np.full(count, np.nan, np.float32)
    return cls(nan, nan.copy(), np.ones(count, bool))


class _Checkpoints(checkpoints._Folder):
  """Checkpoints of a cell: whole arrays, whatever the mesh."""

  def save(self, state: Any, records: Records, notes: dict[str, Any]) -> None:
    """Writes one; when this returns it is on disk, whole.

    Raises:
      ValueError: if it cannot be written; what was there is left as it was.
    """
    self._write(notes["update"], (state, records), {"notes": notes})

  def restore(self, template: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the newest that is whole: ((state, records), notes).

    Args:
      template: of their structure.
    """
    structure = jax.tree.structure(template)

    def unpack(leaves, meta):
      wanted = [jnp.shape(leaf) for leaf in jax.tree.leaves(template)]
      if [leaf.shape for leaf in leaves] != wanted:
        raise ValueError("it is of another model, or of another mesh")
      return jax.tree.unflatten(structure, leaves), meta["notes"]

    return self._newest(unpack)


class SyncRun:
  """One cell: trains, evaluates, keeps its checkpoints and its log.

  With several processes all make the same calls; process 0 evaluates and has
  the files.
  """

  def __init__(
    self,
    exp: sync_experiment.Experiment,
    cell: sync_experiment.Cell,
    folder: Path | None,
    board: Path | None = None,
  ):
    """Starts the cell, or goes on from its last checkpoint.

    Args:
      exp: the experiment.
      cell: which one.
      folder: for its files; None where another process has them.
      board: folder for TensorBoard.
    """
    self._exp, self._cell, self._folder = exp, cell, folder
    init_key, self._root = jax.random.split(jax.random.key(cell.seed))
    self._first = exp.problem.init(init_key)
    self._batches = exp.problem.batches(cell.seed, 1)
    self.updates = exp.config["updates"]
    count = min(exp.config["evaluations"], self.updates)
    self._due = [round((k + 1) * self.updates / count) for k in range(count)]
    self.update, self.seconds, self.rows = 0, 0.0, []
    self.diverged = False  # whether a loss was not finite
    self._records = Records.empty(self.updates)
    self._scaled = exp.config["loss_scale"] is not None
    self._checkpoints, self._log = None, None
    if folder is not None:
      folder.mkdir(parents=True, exist_ok=True)
      self._checkpoints = _Checkpoints(folder / "checkpoints")
    self.state = exp.step.init(self._first)
    self._restore()
    if folder is not None:
      self._log = outputs.CellLog(folder, board, self.rows)

  def _restore(self):
    like, found = (self.state, self._records), None
    if self._checkpoints is not None:
      found = self._checkpoints.restore(like)
    notes = sync_processes.share(found and found[1])
    if notes is None:
      return
    if found is None:  # it is read by another process
      held = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    else:
      held = found[0]
    state, records = sync_processes.share_arrays(held)
    self._put(state)
    self._records = Records(*map(np.array, records))
    for key in ("update", "seconds", "rows", "diverged"):
      setattr(self, key, notes[key])

  def _put(self, held):
    """Goes on from a state of NumPy arrays."""
    where = jax.tree.map(lambda leaf: leaf.sharding, self.state)
    specs = jax.tree.map(lambda sharding: sharding.spec, where)
    placed = meshes.place(held, self._exp.mesh, specs)
    # Copied: the step donates buffers, and these are NumPy's.
    copy = jax.jit(
      lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=where
    )
    self.state = copy(placed)

  def _whole_state(self):
    """The state as NumPy arrays, on every process."""
    state = self.state
    if jax.process_count() > 1:
      state = meshes.whole(state, self._exp.mesh)
    return jax.device_get(state)

  def save(self) -> None:
    """Writes a checkpoint.

    Raises:
      ValueError: if it cannot be written.
    """
    state = self._whole_state()
    notes = {"update": self.update, "seconds": self.seconds}
    notes |= {"rows": self.rows, "diverged": self.diverged}

    def write():
      if self._checkpoints is not None:
        self._checkpoints.save(state, self._records, notes)

    sync_processes.together(write)

  def warm_up(self) -> None:
    """Compiles all there is, by an update that is forgotten."""
    if not self.finished:
      held = self._whole_state() if self.update else None
      self._step(self.update)
      self.state = self._exp.step.init(self._first)
      if held is not None:
        self._put(held)

  def _step(self, update):
    """Makes an update; returns its metrics."""
    step = self._exp.step
    batch = step.place(self._batches(0, update))
    key = jax.random.fold_in(self._root, update)
    self.state, metrics = step.step(self.state, batch, key)
    return jax.device_get(metrics)

  @property
  def finished(self) -> bool:
    """Whether the last evaluation was made, or one after a NaN."""
    return self.diverged or len(self.rows) == len(self._due)

  def advance(self, count: int) -> np.ndarray:
    """Trains on, for so many updates, not past an evaluation.

    Returns:
      The losses that are new.

    Raises:
      ValueError: for a loss that is not finite, if that is not to be recorded.
    """
    first, due = self.update, self._due[len(self.rows)]
    start = time.perf_counter()
    while self.update < min(first + count, due) and not self.diverged:
      metrics = self._step(self.update)
      for column, value in zip(self._records, metrics, strict=True):
        column[self.update] = value
      finite = np.isfinite(metrics.loss) and (metrics.finite or self._scaled)
      self.diverged = not finite
      self.update += 1
    self.seconds += time.perf_counter() - start
    if self.diverged and self._exp.config["on_nan"] == "stop":
      raise ValueError(self._not_finite())
    if self.update == due or self.diverged:
      self._evaluate(first)
    return self._records.loss[first : self.update]

  def _not_finite(self):
    last = self.update - 1
    return (
      f"{self._cell.name}: the loss of update {last} is"
      f" {self._records.loss[last]} and the norm of its gradient"
      f" {self._records.norm[last]}: set a lower --config.learning_rate, a"
      " longer warm-up or --config.clip_norm, or --config.on_nan=record to keep"
      " the run as diverged and go on"
    )

  def params(self) -> Any:
    """The parameters, whole, as NumPy arrays; on every process."""
    return jax.device_get(self._exp.step.params(self.state))

  def _evaluate(self, first):
    params = self.params()
    before = self.rows[-1]["update"] if self.rows else 0
    new = slice(before, self.update)
    rate = self._exp.rate
    row = {
      "cell": self._cell.name,
      "seed": self._cell.seed,
      "message": self.update,  # where TensorBoard puts it
      "update": self.update,
      "examples": self.update * self._exp.config["batch_size"],
      "seconds": self.seconds,
      "learning_rate": float(rate(self.update) if callable(rate) else rate),
      "train_loss": _mean(self._records.loss[new]),
      "gradient_norm": _mean(self._records.norm[new]),
      "skipped": int(self._scaled and (~self._records.finite[new]).sum()),
      "test_loss": float("nan"),
      "test_accuracy": float("nan"),
      "diverged": self.diverged,
    }
    if self._folder is not None:
      found = self._exp.problem.evaluate(jax.device_put(params))
      row |= {"test_loss": found.loss, "test_accuracy": found.accuracy}
      if outputs.is_known(found.measure):  # of tasks that have one
        row["test_measure"] = found.measure
    self.rows.append(row)
    if self._log is not None:
      self._log.write(row)

  def result(self) -> dict[str, Any]:
    """What the cell came to."""
    config, last = self._exp.config, self.rows[-1]
    here = jax.local_devices()[0]
    kept = sum(
      shard.data.nbytes
      for leaf in jax.tree.leaves(self.state)
      for shard in leaf.addressable_shards
      if shard.device == here
    )
    examples = self.update * config["batch_size"]
    each = self.seconds / self.update
    measure = {k: last[k] for k in ("test_measure",) if k in last}
    return {
      "cell": self._cell.name,
      "algorithm": self._exp.title,
      "seed": self._cell.seed,
      "mesh": dict(self._exp.mesh.shape),
      "processes": jax.process_count(),
      "optimizer": config["optimizer"]["name"],
      "parameters": sync_experiment.parameters(self._exp),
      "updates": self.update,
      "evaluations": len(self.rows),
      "examples": examples,
      "seconds": self.seconds,
      "seconds_per_update": each,
      "examples_per_second": examples / self.seconds,
      "state_bytes": kept,  # parameters and the optimizer's, on one device
      "train_loss": last["train_loss"],
      "test_loss": last["test_loss"],
      "test_accuracy": last["test_accuracy"],
      **measure,
      "skipped": sum(row["skipped"] for row in self.rows),
      "diverged": self.diverged or not outputs.is_known(last["test_loss"]),
    }

  def finish(self) -> dict[str, Any]:
    """Writes what is kept of a finished cell, result.json last."""
    result, params = self.result(), self.params()
    self.save()

    def write():
      if self._folder is None:
        return None
      result["params_sha256"] = checkpoints.digest(params)
      count = self.update
      records = Records(*(column[:count] for column in self._records))
      outputs.save_records(self._folder / "records.npz", records)
      content = flax.serialization.to_bytes(params)
      outputs.write_atomically(self._folder / "params.msgpack", content)
      outputs.write_atomically(
        self._folder / "result.json", outputs.to_json(result, indent=2) + "\n"
      )
      return result

    return sync_processes.share(sync_processes.together(write))

  def close(self) -> None:
    """Releases the files."""
    if self._log is not None:
      self._log.close()
    if self._checkpoints is not None:
      self._checkpoints.close()


def _mean(values: np.ndarray) -> float:
  return float(values.mean()) if values.size else float("nan")


def finished_result(folder: Path) -> dict[str, Any] | None:
  """Returns the result of a cell that is finished and whole, else None."""
  result = outputs.read_json(folder / "result.json")
  try:
    whole = len(read_rows(folder)) == result["evaluations"]
    return result if whole and set(result) >= _RESULT_KEYS else None
  except Exception:  # whatever is missing or cut short
    return None


def read_rows(folder: Path) -> list[dict[str, Any]]:
  """Returns the evaluations of a cell."""
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines]


# All cells.


def _train(run, exp, cell, bar, signals) -> dict[str, Any]:
  """Runs one cell to its end, or raises Stopped after saving it."""
  bar.skip(run.update)
  run.warm_up()
  saved, count = time.monotonic(), 1
  while not run.finished:
    before, rows = run.update, len(run.rows)
    start = time.monotonic()
    loss = run.advance(count)
    now = time.monotonic()
    bar.update(cell.name, run.update - before, float(loss[-1]))
    if run.finished:
      break
    # All do what the first process finds is due, and anybody may be told to
    # stop.
    factor = min(2, _LOOK_SECONDS / (now - start))
    count = max(1, round((run.update - before) * factor))
    due = now - saved >= exp.config["checkpoint_seconds"]
    told = sync_processes.gather([count, due, signals.received])
    count, due, signal = int(told[0, 0]), told[0, 1], int(told[:, 2].max())
    if len(run.rows) > rows or due or signal:
      run.save()
      saved = time.monotonic()
    if signal:
      raise cli.Stopped(
        f"stopped in {cell.name} at update {run.update}; the same command with"
        " --resume goes on from there",
        signal,
      )
  return run.finish()


def train(
  exp: sync_experiment.Experiment,
  folder: Path | None,
  bar: progress.Progress,
  signals: Any = None,
) -> list[dict[str, Any]]:
  """Runs the cells that are not finished; returns the results of all.

  Args:
    exp: the experiment.
    folder: for results; None where another process has it.
    bar: told how far it is.
    signals: its `received` says whether to stop; None: it is not to.

  Raises:
    Stopped: once all is saved.
  """
  signals, results = signals or _Nobody, []
  for number, cell in enumerate(exp.cells):
    place = folder and folder / "cells" / cell.name
    result = sync_processes.share(place and finished_result(place))
    if result is not None:
      bar.skip(exp.config["updates"])
      results.append(result)
      continue
    board = folder and folder / "tensorboard" / cell.name
    run = SyncRun(exp, cell, place, board)
    try:
      result = _train(run, exp, cell, bar, signals)
    finally:
      run.close()
    results.append(result)
    for line in sync_figures.lines(result):
      bar.line(line)
    signal = int(sync_processes.gather([signals.received]).max())
    if signal and number + 1 < len(exp.cells):
      raise cli.Stopped(
        f"stopped after {cell.name}; the same command with --resume goes on"
        " from there",
        signal,
      )
  return results


class _Nobody:
  """Who never asks a run to stop."""

  received = 0


class _Silent:
  """A bar where another process has it."""

  def skip(self, *_):
    """Says nothing."""

  update = line = skip

  def close(self):
    """Says nothing."""


def _config() -> dict[str, Any]:
  if session.CONFIG.value is None:
    raise ValueError("no --config; try --config=configs/gpt_text.py")
  return sync_experiment.override(session.CONFIG.value, cli.overrides())


def _start(config: dict[str, Any], way: sync_processes.Way) -> None:
  """Starts JAX as the config wants it."""
  if config["precision"] == sync_experiment.DOUBLE:
    jax.config.update("jax_enable_x64", True)
  sync_processes.join(way, sync_experiment.devices_of(config))


def _supervise(config, way):
  """Checks what can be, and lets others train."""
  sync_experiment.check(config)
  devices = sync_experiment.devices_of(config)
  if devices is not None:
    sync_processes.devices_of_each(devices, way.count)
  sync_processes.supervise(way.count)


def main() -> None:
  """Runs the experiment that the flags describe."""
  way, config = sync_processes.way(), _config()
  if way.supervises:
    _supervise(config, way)
    return
  try:
    _run(config, way)
  except jax.errors.JaxRuntimeError as error:
    if way.number is None and not way.auto:
      raise
    line = " ".join(str(error).split())[:200]
    raise ValueError(
      "another process has ended, or cannot be reached; what was saved goes on"
      f" with --resume ({line})"
    ) from error


def _run(config, way):
  """What a process does that trains."""
  exp = sync_processes.together(
    lambda: sync_experiment.build(
      config,
      data_dir=session.DATA_DIR.value,
      start=lambda config: _start(config, way),
    )
  )
  sync_processes.same("config", checkpoints.digest(_bytes(exp.config)))
  sync_processes.same("dataset", checkpoints.digest(exp.dataset[2:]))
  signals = session.Signals()
  leads = sync_processes.leads()
  folder = sync_processes.together(
    lambda: session.open_folder(exp) if leads else None
  )
  total = exp.config["updates"] * len(exp.cells)
  bar = progress.Progress(total) if leads else _Silent()
  try:
    results = train(exp, folder, bar, signals)
  finally:
    bar.close()
  if leads:
    rows = [
      row
      for cell in exp.cells
      for row in read_rows(folder / "cells" / cell.name)
    ]
    sync_figures.write(folder, exp, results, rows)


def _bytes(config: dict[str, Any]) -> Sequence[np.ndarray]:
  text = json.dumps(config, sort_keys=True)
  return [np.frombuffer(text.encode(), np.uint8)]


if __name__ == "__main__":
  sync_processes.run(main)
