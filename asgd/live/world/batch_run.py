"""Runs of live Sandblaster L-BFGS in a world: scenarios, the driver, and what
must hold. Whatever is done to a run, its iterates are those of one that was
left alone."""

import copy
import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import orders, safe_files
from asgd.live.deadlines import Ladder
from asgd.live.sandblaster import shard, worker
from asgd.live.sandblaster.book import LiveRunLog
from asgd.live.sandblaster.driver import (
  Driver,
  HostMakers,
  Options,
  SavedRun,
)
from asgd.live.world import host_run
from asgd.live.world.run import Injection, Menu, Scenario
from asgd.live.world.storage import Broken
from asgd.orders.trace import from_events
from asgd.sandblaster import Settings, recompute
from asgd.sandblaster.book import Lengths

WORKERS, PORTIONS, EVALUATIONS = 3, 6, 5
_LOOK = 0.1  # seconds of the driver in one advance
_SAVES = 4  # looks between two checkpoints
_JOB = 0.03  # seconds that a portion takes, on average
_LADDER = Ladder(k=5.0, floor=0.3, start=2.0)
KINDS = *host_run.KINDS[:-1], "remove memory", "nan"
INVARIANTS = (
  "iterates are those of an undisturbed run",
  "every job of an evaluation counts once",
  "the order is allowed",
  "it ends in bounded time",
  "no error without a reason",
)


class Case(NamedTuple):
  """A run without its faults."""

  shards: int = 2
  push_every: int = 2
  backup: int = 1
  history: int = 4
  kills: bool = True  # as processes; False: as threads

  @property
  def settings(self) -> Settings:
    """Of the run."""
    return Settings(
      portions=PORTIONS,
      push_every=self.push_every,
      shards=self.shards,
      backup=self.backup,
      history=self.history,
    )


CASES = (
  *(Case(), Case(shards=1), Case(shards=3, backup=0), Case(push_every=1)),
  Case(kills=False),
)


def menu() -> Menu:
  """Returns from what scenarios are drawn."""
  return Menu(CASES, KINDS, WORKERS, EVALUATIONS * PORTIONS // 2)


_draw = np.random.default_rng(0).standard_normal
DATA = _draw((PORTIONS, 5, 4)).astype(np.float32)
PARAMS = {
  "v": _draw(3).astype(np.float32),
  "w": _draw((4, 3)).astype(np.float32),
}


@jax.jit
def _gradient(params, x):
  def loss(params):
    guess = jax.numpy.tanh(x @ params["w"]) @ params["v"]
    return ((guess - x[:, 0]) ** 2).mean()

  return jax.value_and_grad(loss)(params)


def _work(params, portion):
  return _gradient(params, DATA[portion])


class BatchRun(host_run.HostRun):
  """One scenario of Sandblaster."""

  def __init__(self, drawn: Scenario, folder: Path):
    super().__init__(drawn, folder)
    self._settings = drawn.case.settings
    self._memory = folder / "memory"
    self._rng = random.Random(drawn.seed + 1)
    self._driver: Driver | None = None
    self._notes: dict[str, Any] | None = None  # of the evaluation under way
    self._saved: SavedRun | None = None  # a checkpoint
    self._begun = 0  # jobs
    self._went_back = False  # to a checkpoint, or to the beginning
    self._params: Any = None  # at the end

  # Objects in hosts.

  def _make_shard(self, evaluation, index, image, anew):
    folder = self._memory / f"shard-{index}"
    return shard.make(str(folder), image, evaluation, anew=anew)

  def _make_worker(self, index):
    def work(params, portion):
      self._begun += 1
      self.job_begins(self._begun)
      self.scheduler.sleep(self._rng.expovariate(1 / _JOB))
      loss, gradient = _work(params, portion)
      if self.world.nans:
        self.world.nans.pop()
        gradient = jax.tree.map(lambda x: x * float("nan"), gradient)
      return loss, gradient

    task = worker.PortionTask(
      *(self._settings, PARAMS, lambda worker, portion: DATA[portion]),
      lambda batches: work,
      keep=3,
    )
    return worker.make(index, lambda: task)

  # A command.

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    self.make_hosts()
    return functools.partial(self._drive, resumed)

  def _from_where(self, resumed):
    """The notes of the last driver, if its memory is there; a checkpoint."""
    if resumed and self._notes is not None and self._memory.exists():
      return SavedRun(copy.deepcopy(self._notes), None)
    # Without notes a shard has said that its files are unfit.
    self._went_back = resumed
    return copy.deepcopy(self._saved) if resumed else None

  def _note_down(self, notes):
    self.scheduler.touch()
    self._notes = copy.deepcopy(notes)  # None: they are of no use any more

  def _drive(self, resumed):
    """The main function of the driver."""
    saved = self._from_where(resumed)
    safe_files.make_private(self._memory)
    lengths = Lengths(*saved.notes["lengths"]) if saved else None
    book = LiveRunLog(self.folder, lengths, disk=self.world.disk)
    self._driver = driver = Driver(
      *(self._settings, PARAMS),
      HostMakers(self.hosts, self._make_shard, self._make_worker),
      book,
      workers=WORKERS,
      options=Options(_LADDER),
      saved=saved,
      note_down=self._note_down,
    )
    driver.start()
    until, looks = EVALUATIONS * self._settings.jobs, 0
    while driver.advance(until, _LOOK) < until and not driver.ended:
      looks += 1
      if looks % _SAVES == 0:
        self._saved = copy.deepcopy(driver.save()) or self._saved
    self._params = driver.params()
    self.finished = True

  # What must hold.

  def check(self) -> None:
    """See the base."""
    driver = self._driver
    records = driver.book.records()
    jobs = set(records.job.tolist())
    again = recompute(self._settings, PARAMS, _work, jobs)
    if again.state != driver.state:
      raise Broken(f"{INVARIANTS[0]}: {driver.state}, not {again.state}")
    for mine, other in zip(
      *map(jax.tree.leaves, (self._params, again.params)), strict=True
    ):
      if np.asarray(mine).tobytes() != np.asarray(other).tobytes():
        raise Broken(f"{INVARIANTS[0]}: {mine}, not {other}")
    counted = records.job[records.accepted].tolist()
    # A checkpoint has no messages that the coordinator had not asked for: after
    # it these jobs are done again, and count again.
    if not self._went_back and len(set(counted)) != len(counted):
      raise Broken(f"{INVARIANTS[1]}: {counted}")
    try:
      orders.check(from_events(driver.book.rows))
    except ValueError as error:
      raise Broken(f"{INVARIANTS[2]}: {error}") from error

  def _remove_memory(self, fault: Injection):
    shutil.rmtree(self._memory, ignore_errors=True)
    self.kill("shard", fault)
    return True

  INJECT = {  # noqa: RUF012
    **host_run.HostRun.INJECT,
    "remove memory": _remove_memory,
  }
