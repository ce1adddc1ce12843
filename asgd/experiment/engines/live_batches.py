"""Runs that a coordinator drives, live: the engines `threads` and `ray`.

The driver, which is this process, has the coordinator. It is a function of what
it was answered, so a run that was stopped or killed goes on to the same
iterates: from the memory of its shards, with the evaluation of the batch that
was under way; from the last checkpoint, if that memory is gone; or from the
beginning.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from asgd import base, sharding
from asgd.experiment import engines, live_figures, storage
from asgd.experiment import live_memory as memory_lib
from asgd.experiment.engines import coordinated, live_clusters
from asgd.experiment.engines.coordinated import CoordinatedPlan
from asgd.live import faults as faults_lib
from asgd.live.append_only import FileGone
from asgd.live.hosts import Hosts
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.journal import journal_path
from asgd.live.records import records_path
from asgd.live.sandblaster import shard, worker
from asgd.live.sandblaster.book import LiveRunLog, last_time
from asgd.live.sandblaster.driver import Driver, HostMakers, Options, SavedRun
from asgd.live.setup import Setup
from asgd.live.spans import SpanWriter
from asgd.orders import protocol
from asgd.sandblaster import Image
from asgd.sandblaster.book import Lengths

_SECONDS = 0.1  # between two looks at signals
_NOTES = "driver.json"  # in the memory of a cell


class LiveBatches(NamedTuple):
  """What a live cell is made of; its hosts are made of it."""

  plan: CoordinatedPlan
  cell: Any  # asgd.experiment.cells.Cell
  dataset: Any
  folder: Path  # of the cell
  memory: Path  # where the files of its shards are
  began: float  # time.monotonic() when it began, or would have

  @property
  def setup(self) -> Setup:
    """How many workers there are, and when one is late."""
    plan = self.plan
    ladder = live_clusters.ladder(plan.run.config["live"])
    return Setup(protocol.Rules(), plan.workers, plan.messages, ladder=ladder)


class Made(NamedTuple):
  """Hosts, and what makes the task of workers in them."""

  hosts: Hosts
  make_task: Callable[[], worker.PortionTask]


def _start_of(plan, seed) -> tuple[base.Params, jax.Array]:
  """Returns (parameters, root of random numbers) of a cell."""
  key, root = jax.random.split(jax.random.key(seed))
  return jax.device_get(plan.problem.init(key)), root


def make_task(plan: CoordinatedPlan, seed: int) -> worker.PortionTask:
  """Returns what the workers of a cell compute."""
  params, root = _start_of(plan, seed)
  settings = plan.settings
  # With a job of each evaluation, it keeps its share of the batch and more.
  share = -(-settings.portions // plan.workers)
  return worker.PortionTask(
    settings,
    params,
    plan.problem.batches(seed, 1),
    lambda batches: plan.work(seed, root, batches),
    keep=2 * (share + settings.push_every),
    slowdown=tuple(plan.run.config["live"]["slowdown"]),
  )


def thread_hosts(live: LiveBatches, machine: Any) -> Made:
  """Hosts in threads."""
  del machine
  make = functools.partial(make_task, live.plan, live.cell.seed)
  return Made(ThreadHosts(began=live.began), make)


def _remote_task(make, seed) -> worker.PortionTask:
  return make_task(make(), seed)


def ray_hosts(
  rebuild: live_clusters.Rebuild, live: LiveBatches, machine: Any
) -> Made:
  """Hosts in actors of Ray; see `live_clusters.remote_plan`."""
  plan_of = live_clusters.remote_plan(rebuild, live, live.dataset, machine)
  from asgd.live.hosts.actors import ActorHosts

  hosts = ActorHosts(
    live_clusters.site(live, live.began, machine),
    resources=live_clusters.resources(live.plan.run.config["live"]),
    calls=2 * live.plan.workers + 4,
  )
  make = functools.partial(_remote_task, plan_of, live.cell.seed)
  return Made(hosts, make)


class LiveBatchEngine(coordinated.CoordinatedEngine):
  """A cell of Sandblaster L-BFGS with real workers and shards."""

  _clock = _end = "seconds"

  def __init__(
    self, context: engines.Context, make_hosts: Callable[..., Made]
  ):
    """Starts the cell, or goes on with what there is of it."""
    self._context, self._folder = context, context.folder
    self._plan = plan = context.plan
    self._name, self.total = context.cell.name, plan.messages
    self.done = 0
    begun = journal_path(self._folder, 0).exists()
    self._memory = memory_lib.LiveMemory(
      self._folder, context.machine.memory_dir, resume=begun
    )
    with contextlib.ExitStack() as stack:
      stack.callback(self._release)
      self._start(make_hosts, begun, stack)
      self._open = stack.pop_all()

  def _start(self, make_hosts, begun, stack):
    context, plan = self._context, self._plan
    params, _ = _start_of(plan, context.cell.seed)
    saved, where = self._saved(params) if begun else (None, "")
    lengths = Lengths(*saved.notes["lengths"]) if saved else None
    book = LiveRunLog(self._folder, lengths)
    if begun:
      book.news.append(f"going on from {where}")
    live = LiveBatches(
      *(plan, context.cell, context.experiment.dataset),
      *(self._folder, self._memory.memory),
      time.monotonic() - last_time(book.rows),
    )
    settings = plan.run.config["live"]
    hosts, task = make_hosts(live, context.machine)
    hosts.say = context.machine.tell
    stack.callback(hosts.close)
    self._simulation = driver = Driver(
      *(plan.settings, params),
      HostMakers(
        hosts, self._make_shard, functools.partial(self._make_worker, task)
      ),
      book,
      workers=plan.workers,
      options=Options(
        live_clusters.ladder(settings), settings["refill"], settings["together"]
      ),
      saved=saved,
      note_down=self._note_down,
    )
    self.done = driver.received
    self._memory.note(self._replaced())
    self._figures = live_figures.Watch(plan.workers, context.board)
    stack.callback(self._figures.close)
    driver.start()

  def _saved(self, params):
    """Returns what there is to go on with, and words for it."""
    sealed = None
    if self._memory.kept:
      sealed = storage.read_sealed(self._memory.memory / _NOTES)
    if sealed is not None:
      notes = json.loads(sealed["text"])
      return SavedRun(notes, None), "the evaluation that was under way"
    saved = self._context.restore(lambda found: self._unpack(found, params))
    if saved is None:
      return None, "the beginning: no checkpoint"
    return saved, "the checkpoint"

  def _unpack(self, found, params):
    notes, shards = found.notes, self._plan.settings.shards
    parts = sharding.split(sharding.make_plan(params, shards), params)
    like = [dict.fromkeys(notes["vectors"], part) for part in parts]
    vectors = found.tree({"vectors": like})["vectors"]
    images = [Image(notes["number"], dict(each)) for each in vectors]
    return SavedRun(notes, images)

  def _make_shard(self, evaluation, index, image, anew):
    folder = self._memory.memory / f"shard-{index}"
    return shard.make(str(folder), image, evaluation, anew=anew)

  def _make_worker(self, make_task, index):
    settings, run = self._plan.run.config["live"], self._folder.absolute()
    mine = [f for f in self._context.machine.faults if f.worker == index]
    write = SpanWriter(run)
    return worker.make(
      index,
      make_task,
      faults=mine,
      tell=functools.partial(faults_lib.append_fault, run),
      span=functools.partial(write, index) if settings["spans"] else None,
    )

  def _note_down(self, notes):
    path = self._memory.memory / _NOTES
    if notes is None:
      path.unlink(missing_ok=True)
      return
    text = json.dumps(notes)  # which has NaN
    storage.write_json(path, storage.sealed({"text": text}))

  def advance(self, until: int) -> engines.Progress:
    """Goes on for a moment, not past message `until`."""
    first = self.done
    self._check_files()
    self.done = self._simulation.advance(until, _SECONDS)
    self._memory.note(self._replaced())
    new = self._simulation.book.records(first)
    figures = self._figures.look(time.monotonic(), new, self.done)
    return self._progress(new)._replace(figures=figures)

  def _check_files(self):
    for path in (journal_path(self._folder, 0), records_path(self._folder, 0)):
      if not path.exists():
        raise FileGone(path)

  def _replaced(self) -> dict[str, int]:
    return self._memory.replaced_since(self._simulation.replaced)

  def columns(self) -> dict[str, Any]:
    """Returns what the cell came to."""
    return {**super().columns(), "replaced": self._replaced()}

  def save(self) -> tuple[int, Any, dict[str, Any]] | None:
    """Returns the shards and the coordinator as they are."""
    driver = self._simulation
    step = len(driver.book.rows)
    saved = driver.save() if step else None  # nothing has happened yet
    if saved is None:
      return None
    notes, images = saved
    vectors = [image.vectors for image in images]
    notes = {**notes, "vectors": sorted(vectors[0])}
    return step, {"vectors": vectors}, notes

  def discard(self) -> None:
    """Removes the files of the shards: there is nothing to go on with."""
    self.close()
    memory_lib.forget(self._folder)

  def close(self) -> None:
    """Ends all hosts, and lets go of the memory."""
    self._open.close()

  def _release(self):
    if not self._memory.kept and not self.done:
      self._memory.remove()  # there is nothing to go on with
    self._memory.close()


def describe(result: Mapping[str, Any]) -> str:
  """Returns what a cell came to in a few words."""
  words = coordinated.describe(result)
  words += f", after {result['seconds']:.3g} s"
  died = [
    f"{count} {kind}{'s' * (count > 1)}"
    for kind, count in sorted(result["replaced"].items(), reverse=True)
    if count
  ]
  return f"{words}; {' and '.join(died)} replaced" if died else words
