"""Runs of live Sandblaster L-BFGS in a simulated world: cases, driver, checks.

With any faults, the iterates of a run must be those of an undisturbed run.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import orders, safe_files
from asgd.live.sandblaster import worker
from asgd.live.sandblaster.driver import Driver, HostMakers, Options, SavedRun
from asgd.live.sandblaster.run_log import LiveRunLog
from asgd.live.world.broken import bits, refused, require
from asgd.live.world.injections import Menu, Scenario
from asgd.live.world.run import COMMON, LADDER, WorldRun
from asgd.orders.trace import from_events
from asgd.sandblaster import Settings, count_jobs, recompute
from asgd.sandblaster.run_log import Lengths

WORKERS, PORTIONS, EVALUATIONS = 3, 6, 5
KINDS = *COMMON, "remove memory"
INVARIANTS = (
  "iterates are those of an undisturbed run",
  "every job of an evaluation counts once",
  "the order is allowed",
  "it ends in bounded time",
  "no error without a reason",
)


class BatchCase(NamedTuple):
  """A run without its faults."""

  shards: int = 2
  push_every: int = 2
  backup: int = 1
  history: int = 4
  kills: bool = True  # hosts are processes; False: threads

  @property
  def settings(self) -> Settings:
    """Settings of the run."""
    return Settings(
      portions=PORTIONS,
      push_every=self.push_every,
      shards=self.shards,
      backup=self.backup,
      history=self.history,
    )


CASES = (
  *(BatchCase(), BatchCase(shards=1), BatchCase(shards=3, backup=0)),
  *(BatchCase(push_every=1), BatchCase(kills=False)),
)


_normal = np.random.default_rng(0).standard_normal
DATA = _normal((PORTIONS, 5, 4)).astype(np.float32)  # five examples a portion
PARAMS = {
  "v": _normal(3).astype(np.float32),
  "w": _normal((4, 3)).astype(np.float32),
}


@jax.jit
def _gradient(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
  """Returns the loss and gradient of a small network on x, float32[5, 4]."""

  def loss(params):
    prediction = jax.numpy.tanh(x @ params["w"]) @ params["v"]
    return ((prediction - x[:, 0]) ** 2).mean()

  return jax.value_and_grad(loss)(params)


def _work(params: Any, portion: int) -> tuple[jax.Array, Any]:
  """Returns the loss and gradient of a portion."""
  return _gradient(params, DATA[portion])


class BatchRun(WorldRun):
  """One scenario of Sandblaster."""

  INVARIANTS, SAVES = INVARIANTS, 4
  INJECT = {**COMMON, "remove memory": WorldRun.remove_memory}  # noqa: RUF012

  _driver: Driver  # of the present command

  def __init__(self, scenario: Scenario, folder: Path):
    super().__init__(scenario, folder)
    self._settings = scenario.case.settings
    # The driver's notes on the present evaluation, kept in the run's memory.
    self._notes: dict[str, Any] | None = None
    self._saved: SavedRun | None = None  # the last checkpoint
    self._portions_begun = 0  # by all workers
    self._params: Any = None  # at the end of the run

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(CASES, KINDS, WORKERS, EVALUATIONS * PORTIONS // 2)

  # Makers of the objects in hosts.

  def _make_worker(self, index: int) -> Callable[..., worker.LiveWorker]:
    """Returns the maker of a worker."""

    def work(params: Any, portion: int) -> tuple[jax.Array, Any]:
      self._portions_begun += 1
      self.work(self._portions_begun)
      loss, gradient = _work(params, portion)
      return loss, self.world.spoil(gradient)

    task = worker.PortionTask(
      *(self._settings, PARAMS, lambda worker, portion: DATA[portion]),
      lambda batches: work,
      keep=3,
    )
    return functools.partial(
      worker.LiveWorker, index=index, make_task=lambda: task
    )

  # A command.

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    self.make_hosts()
    return functools.partial(self._drive, resumed)

  def _resume_point(self, resumed: bool) -> SavedRun | None:
    """Returns the last driver's notes if the memory exists, else the last
    checkpoint; None: the run starts new."""
    if not self.memory.exists():
      self._notes = None  # the memory held the notes
    if resumed and self._notes is not None:
      return SavedRun(copy.deepcopy(self._notes), None)
    # There are no notes if a shard reported unusable files.
    return copy.deepcopy(self._saved) if resumed else None

  def _note_down(self, notes: dict[str, Any] | None) -> None:
    """Stores the driver's notes; None: they are no longer usable."""
    # The driver may be killed before, but not during the write: a real driver
    # replaces a file.
    self.scheduler.touch()
    self._notes = copy.deepcopy(notes)

  def _drive(self, resumed: bool) -> None:
    """Runs a command's driver."""
    saved = self._resume_point(resumed)
    safe_files.make_private(self.memory)
    lengths = Lengths(*saved.notes["lengths"]) if saved else None
    run_log = LiveRunLog(self.folder, lengths, disk=self.world.disk)
    self._driver = driver = Driver(
      *(self._settings, PARAMS),
      HostMakers(self.hosts, self.memory, self._make_worker),
      run_log,
      workers=WORKERS,
      options=Options(LADDER),
      saved=saved,
      note_down=self._note_down,
    )
    driver.start()
    until = EVALUATIONS * self._settings.jobs

    def advance() -> bool:
      return driver.advance(until, self.LOOK) >= until or driver.ended

    def save() -> None:
      # A driver that repeats an evaluation makes no checkpoint.
      self._saved = copy.deepcopy(driver.save()) or self._saved

    # `advance` waits itself, so nothing waits between two steps.
    self.drive(advance, save, wait=lambda seconds: None)
    self._params = driver.params()
    self.finished = True

  # Checks.

  def check(self) -> None:
    """See the base."""
    driver = self._driver
    records = driver.run_log.records()
    rows = [(event.action, event.job) for event in driver.run_log.rows]
    jobs, repeated = count_jobs(rows, records.accepted.tolist())
    # Without hosts or faults, until as many jobs are done.
    undisturbed = recompute(self._settings, PARAMS, _work, jobs)
    are_equal = driver.state == undisturbed.state
    are_equal &= bits(self._params) == bits(undisturbed.params)
    result = driver.state, self._params
    require(are_equal, INVARIANTS[0], result, "and not", tuple(undisturbed))
    require(not repeated, INVARIANTS[1], records.job.tolist())
    with refused(INVARIANTS[2]):
      orders.check(from_events(driver.run_log.rows))
