"""Live runs of a coordinator, with the engines `threads` and `ray`.

The coordinator runs in the driver, which is this process. Its state follows
from the answers that it receives, so a run that was killed and resumed has the
same iterates as one that was never interrupted. A run resumes from the shards'
memory, in the evaluation that was under way. Without that memory it resumes
from the last checkpoint, or starts again.
"""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from asgd import base, sandblaster
from asgd.experiment import engines, storage
from asgd.experiment.engines import coordinated, live_engine
from asgd.experiment.engines.coordinated import CoordinatedPlan
from asgd.experiment.engines.live_hosts import CellHosts, LiveCell
from asgd.live import faults as faults_lib
from asgd.live.sandblaster import worker
from asgd.live.sandblaster.driver import Driver, HostMakers, Options, SavedRun
from asgd.live.sandblaster.run_log import LiveRunLog
from asgd.sandblaster import Image
from asgd.sandblaster.run_log import Lengths

_NOTES_FILE = "driver.json"  # in the memory of a cell


def _initial_state(
  plan: CoordinatedPlan, seed: int
) -> tuple[base.Params, jax.Array]:
  """Returns (parameters, root of random numbers) of a cell."""
  # The first key of the split is for `problem.init`, as in simulated runs.
  key, root = jax.random.split(jax.random.key(seed))
  return jax.device_get(plan.problem.init(key)), root


def make_task(
  make_plan: Callable[[], CoordinatedPlan], seed: int
) -> worker.PortionTask:
  """Returns the task of a cell's workers: gradients of portions."""
  plan = make_plan()
  params, root = _initial_state(plan, seed)
  settings = plan.settings
  # A worker gets about the same portions in each evaluation, so it caches the
  # batches of twice its share.
  portions_per_worker = -(-settings.portions // plan.workers)  # rounded up
  return worker.PortionTask(
    settings,
    params,
    # Batches are worker 0's, so a portion has the same data on any worker.
    plan.problem.batches(seed, 1),
    lambda batches: plan.work(seed, root, batches),
    cache_size=2 * (portions_per_worker + settings.push_every),
    slowdown=tuple(plan.run.config["live"]["slowdown"]),
  )


class LiveBatchEngine(live_engine.LiveEngine, coordinated.CoordinatedEngine):
  """A cell of Sandblaster L-BFGS with real workers and shards."""

  # A live run has no simulated time: evaluations and result have seconds.
  _clock_column = _end_column = "seconds"
  unit = "s"  # of the times of `work`; in simulations the mean time of a batch
  # The live driver has the interface of the simulation.
  snapshot = coordinated.CoordinatedEngine.snapshot
  records = coordinated.CoordinatedEngine.records

  @property
  def _writers(self):
    """The driver writes the only journal, and all records."""
    return range(1)

  def _prepare(self):
    self._name = self._context.cell.name
    self._params, _ = _initial_state(self._plan, self._context.cell.seed)
    return super()._prepare()

  def _network(self):
    return self._plan.call_network

  def _load_of_network(self):
    return {}  # only a simulation measures it

  def _restore(self) -> SavedRun | None:
    """Returns the driver's notes in memory, else the last checkpoint; None if
    there is neither."""
    # [1] The driver's notes, if the memory of the cell still exists.
    sealed, source = None, "the evaluation that was under way"
    if self._memory.is_resumed:
      sealed = storage.read_sealed(self._memory.folder / _NOTES_FILE)
    if sealed is not None:
      saved = SavedRun(json.loads(sealed["text"]), None)
    # [2] Else a checkpoint, or nothing.
    else:
      saved, source = super()._restore(), "the checkpoint"
    if saved is None:
      source = "the beginning: no checkpoint"
    self._news.append(f"resuming from {source}")
    return saved

  def _unpack(self, saved: Any) -> SavedRun:
    """Returns notes and shard images of a checkpoint."""
    notes, settings = saved.notes, self._plan.settings
    # The notes name the vectors of a shard; the template is built from them.
    template = sandblaster.template(notes, self._params, settings)["vectors"]
    vectors = saved.tree({"vectors": template})["vectors"]
    images = [
      Image(notes["number"], dict(shard_vectors)) for shard_vectors in vectors
    ]
    return SavedRun(notes, images)

  def _open_files(self, saved: Any, *, begun: bool) -> int:
    """Opens the run log; returns the count of received messages."""
    del begun
    # The log drops rows that were written after these lengths.
    lengths = Lengths(*saved.notes["lengths"]) if saved else None
    self._run_log = LiveRunLog(self._folder, lengths)
    return len(self._run_log.messages)

  def _make_cluster(
    self, live: LiveCell, hosts: CellHosts, saved: Any
  ) -> tuple[Driver, Callable[[], None]]:
    """Returns (driver, function that starts its hosts)."""
    # The driver is coordinator and cluster: `advance` runs the loop of both.
    live_settings = live.settings
    machine, write_span = self._context.machine, live.write_span

    def worker_factory(index: int) -> Any:
      """Returns the function by which a host makes its worker."""
      span = None
      if write_span is not None:
        span = functools.partial(write_span, index)
      return functools.partial(
        worker.LiveWorker,
        index=index,
        make_task=functools.partial(make_task, hosts.make_plan, live.cell.seed),
        # The faults that are injected into this worker.
        faults=[f for f in machine.faults if f.worker == index],
        record=functools.partial(faults_lib.append_fault, live.folder),
        span=span,
      )

    driver = Driver(
      *(self._plan.settings, self._params),
      HostMakers(hosts.hosts, live.memory, worker_factory),
      self._run_log,
      workers=self._plan.workers,
      options=Options(
        live.setup.ladder, live_settings["refill"], live_settings["together"]
      ),
      saved=saved,
      save_notes=self._save_notes,
    )
    # The base reads the driver as it reads a simulation.
    self._simulation: Any = driver
    return driver, driver.start

  def _save_notes(self, notes: dict[str, Any] | None) -> None:
    """Writes the driver's notes to the memory; None removes them."""
    path = self._memory.folder / _NOTES_FILE
    if notes is None:
      path.unlink(missing_ok=True)
      return
    text = json.dumps(notes)  # as a string, because `write_json` drops NaN
    storage.write_json(path, storage.sealed({"text": text}))

  def _check_cluster(self, until):
    # The driver runs the coordinator, so a look advances the run itself.
    self.cluster.advance(until, live_engine.LOOK_SECONDS)
    self._news += self._run_log.news
    self._run_log.news = []

  def _read(self):
    return self._run_log.records(self._received)

  def _snapshot_at(self, until):
    # The driver has the iterate, so there is nothing to fetch.
    self.done = self._received

  def advance(self, until: int) -> engines.Progress:
    """Trains for a moment, but not past message `until`."""
    progress, error_text = super().advance(until), self._error_text(None)
    # If the loss is not finite, the news say the same as the error.
    if error_text:
      progress = progress._replace(news=[], broken=error_text)
    # A coordinator's gradients are never stale.
    return progress._replace(gap=0.0)

  def columns(self) -> dict[str, Any]:
    """Returns the columns of the cell's result."""
    return {**super().columns(), "replaced": self._replaced()}

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns the present state of the shards and the coordinator; None if the
    run has not begun, or the driver repeats an evaluation."""
    step = len(self._run_log.rows)  # 0: nothing has been computed
    saved = self.cluster.save() if step else None
    if saved is None:
      return None
    notes, images = saved
    vectors = [image.vectors for image in images]
    # `_unpack` needs the names of the vectors for its template.
    notes = {**notes, "vectors": sorted(vectors[0])}
    return step, {"vectors": vectors}, notes

  def stop(self) -> str:
    """Does nothing: open jobs are computed again when the run resumes."""
    return ""


def describe(result: Mapping[str, Any]) -> str:
  """Returns a cell's result in a few words."""
  text = coordinated.describe(result)
  text += f", after {result['seconds']:.3g} s"
  replaced = [
    f"{count} {kind}{'s' * (count > 1)}"
    for kind, count in sorted(result["replaced"].items(), reverse=True)
    if count
  ]
  return f"{text}; {' and '.join(replaced)} replaced" if replaced else text
