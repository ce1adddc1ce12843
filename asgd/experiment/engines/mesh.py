"""The engine `mesh`: one model on a mesh of devices, all of them in step.

The axes of the mesh name what its devices share: data (examples), tensor (every
matrix of a GPT), pipe (its blocks), rows (images). All meshes train on the same
examples in the same order with the same losses, but for round-off and draws
(see `asgd.parallel.data_parallel.make_step`).

An update is one message: the gradient of a batch, of staleness 0, for an optax
optimizer or the run's recipe. If the workers of the recipe take local steps,
the replicas are islands (`asgd.parallel.islands`). Then an update applies the
mean of their messages, once per job.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, stacking
from asgd.experiment import engines
from asgd.experiment.engines import Column, by_protocol, mesh_plan
from asgd.experiment.schema import Run
from asgd.parallel import meshes, processes

_CALL_SECONDS = 1.0  # seconds of training per call of `advance`


class MeshRecords(NamedTuple):
  """The records of each update of a cell."""

  loss: np.ndarray  # float32[U], before the update
  norm: np.ndarray  # float32[U], of the gradient before it is clipped
  finite: np.ndarray  # bool[U], False if the loss scale skipped it


class MeshEngine(engines.Engine):
  """A cell on a mesh. With several processes all make the same calls."""

  def __init__(self, context: engines.Context):
    """Starts the cell, or continues from its last checkpoint."""
    self._plan, self._name = context.plan, context.cell.name
    problem, seed = self._plan.problem, context.cell.seed
    init_key, self._root = jax.random.split(jax.random.key(seed))
    self._first_params = problem.init(init_key)
    self._batches = stacking.NamedBatches(
      mesh_plan.job_batches(problem, self._plan.batches, seed)
    )
    self.total, self.done, self._seconds = self._plan.messages, 0, 0.0
    # NaN marks updates that were not made yet. `finite` is True for an update
    # that the loss scale does not skip.
    nan = np.full(self.total, np.nan, np.float32)
    self._records = MeshRecords(nan, nan.copy(), np.ones(self.total, bool))
    self._has_loss_scale = (
      self._plan.run.config["mesh"]["loss_scale"] is not None
    )
    # The state is made first: it is the template of a checkpoint.
    self._state = self._plan.step.init(self._first_params)
    self._restore(context)
    self._pace = engines.Pace(_CALL_SECONDS)
    self._warm_up()

  def _restore(self, context: engines.Context) -> None:
    """Restores the last checkpoint on all processes, if there is one."""
    template = {"state": self._state, "records": self._records}
    # [1] Process 0 reads the checkpoint.
    tree, notes = context.restore(
      lambda saved: (saved.tree(template), saved.notes)
    ) or (None, None)
    # [2] The other processes receive notes and arrays from it.
    notes = processes.share(notes)
    if notes is None:
      return
    if tree is None:  # process 0 alone reads it
      tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)
    tree = processes.share_arrays(tree)
    # [3] Each process puts its parts of the arrays on its devices.
    self._set_state(tree["state"])
    # Arrays of a checkpoint are read-only, and `advance` writes into them.
    self._records = MeshRecords(*map(np.array, tree["records"]))
    self.done, self._seconds = notes["update"], notes["seconds"]
    if "iterators" in notes:
      self._batches.iterators.restore(notes["iterators"])

  def _set_state(self, arrays: Any) -> None:
    """Sets the state to NumPy arrays."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self._state)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    placed = meshes.place(arrays, self._plan.mesh, specs)
    # Copied, since the step donates its state.
    self._state = meshes.copy(placed, shardings)

  def _warm_up(self) -> None:
    """Compiles all programs by an update that is discarded."""
    if self.done == self.total:
      return
    # The update donates the state, so a restored one is copied first.
    arrays = self._whole_state() if self.done else None
    self._step(self.done)
    self._state = self._plan.step.init(self._first_params)
    if arrays is not None:
      self._set_state(arrays)

  def _whole_state(self) -> Any:
    """Returns the state as NumPy arrays, on every process."""
    state = self._state
    if jax.process_count() > 1:
      # A process has only the parts of its devices.
      state = meshes.replicated(state, self._plan.mesh)
    return jax.device_get(state)

  def _step(self, update: int) -> Any:
    """Makes an update; returns its metrics."""
    step = self._plan.step
    batch = step.place(self._batches(0, update))
    key = jax.random.fold_in(self._root, update)
    self._state, metrics = step.step(self._state, batch, key)
    # Waits for the update, so that its time is measured.
    return jax.device_get(metrics)

  def advance(self, until: int) -> engines.Progress:
    """Makes updates, as many as process 0 has time for."""
    start, error_text = self.done, None
    # All processes must make the same number of updates, or they would wait
    # for one another forever.
    steps = int(processes.gather([self._pace.begin()])[0, 0])
    while self.done < min(start + steps, until):
      metrics = self._step(self.done)
      for column, value in zip(self._records, metrics, strict=True):
        column[self.done] = value
      # A loss scale skips updates that are not finite, and is then lowered.
      is_valid = np.isfinite(metrics.loss) and (
        metrics.finite or self._has_loss_scale
      )
      if not is_valid and error_text is None:
        error_text = (
          f"{self._name}: the loss of update {self.done} is"
          f" {self._records.loss[self.done]} and the norm of its gradient"
          f" {self._records.norm[self.done]}: set a lower"
          " --config.learning_rate, a longer warm-up or --config.clip_norm"
        )
      self.done += 1
    # `_warm_up` has compiled all programs, so this is training time.
    self._seconds += self._pace.end()
    rows = MeshRecords(*(column[start : self.done] for column in self._records))
    return engines.Progress(loss=rows.loss, broken=error_text, rows=rows)

  def snapshot(self) -> engines.Snapshot:
    """Returns the parameters, whole, as NumPy arrays; on every process."""
    params = jax.device_get(self._plan.step.params(self._state))
    clock = {"seconds": self._seconds}
    # Skipped updates change neither the parameters nor the learning rate.
    updates = self.done - self.summary(0, self.done)["skipped"]
    return engines.Snapshot(params, self.done, updates, clock)

  def records(self) -> MeshRecords:
    """Returns a row for each update that was made."""
    return MeshRecords(*(column[: self.done] for column in self._records))

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns losses and gradient norms of some updates. The norms are without
    those of updates that the loss scale skipped, which are not finite."""
    rows = MeshRecords(*(column[start:end] for column in self._records))
    is_made = rows.finite | (not self._has_loss_scale)
    return {
      "train_loss": engines.mean(rows.loss),
      "gradient_norm": engines.mean(rows.norm[is_made]),
      "skipped": int((~is_made).sum()),
    }

  def columns(self) -> dict[str, Any]:
    """Returns speed, memory and counts of the cell."""
    config = self._plan.run.config
    reducer = config["compress"] and {"reducer": config["compress"]["name"]}
    optimizer = config["optimizer"]
    weights = base.weights_of(self._first_params)
    examples = self.done * self._plan.batches * config["batch_size"]
    skipped = self.summary(0, self.done)["skipped"]
    return {
      "messages": self.done,
      "updates": self.done - skipped,
      "mesh": meshes.text(self._plan.mesh.shape),
      "processes": jax.process_count(),
      "optimizer": optimizer["name"] if optimizer else self._plan.run.recipe,
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
      "seconds": self._seconds,
      "seconds_per_update": self._seconds / self.done,
      "examples_per_second": examples / self._seconds,
      # Parameters and the optimizer's state, on one device.
      "state_bytes": meshes.bytes_here(self._state),
      "skipped": skipped,
      **(reducer or {}),
    }

  def save(self) -> tuple[int, Any, dict[str, Any]]:
    """Returns a checkpoint of whole arrays, which does not depend on the mesh.
    """
    tree = {"state": self._whole_state(), "records": self._records}
    notes = {"update": self.done, "seconds": self._seconds}
    if self._batches.iterators is not None:
      notes["iterators"] = self._batches.iterators.save()
    return self.done, tree, notes


def describe(result: Mapping[str, Any]) -> str:
  """Returns losses, speed and memory of a cell as one line."""
  words = (
    f"{engines.test_loss_text(result)}{result['seconds']:.1f} s,"
    f" {result['examples_per_second']:.4g} examples per second, state"
    f" {result['state_bytes'] / 2**20:.3g} MiB on each device of"
    f" {result['mesh']}"
  )
  if result["skipped"]:
    words += (
      f"; {result['skipped']} updates were skipped, as"
      " their gradient was not finite with the loss scale"
    )
  return words


def devices(run: Run) -> int:
  """Returns how many devices a run needs."""
  return mesh_plan.required_devices(run) or 1


MESH = by_protocol.engine_kind(
  "mesh",
  sections=mesh_plan.SECTIONS,
  settings="mesh",
  default_recipe="asgd",
  columns=(
    Column("mesh", "mesh"),
    Column("optimizer", "optimizer"),
    Column("train loss", "train_loss", 1, "{:.4f}"),
    Column("seconds", "seconds", 1, "{:.1f}"),
    Column("ms/update", "seconds_per_update", 1000, "{:.1f}"),
    Column("examples/s", "examples_per_second", 1, "{:.4g}"),
    Column("MiB/device", "state_bytes", 2**-20, "{:.3g}"),
  ),
  timed=True,
)
