"""Scenarios that test live Sandblaster L-BFGS in the simulated world.

With any faults a run must end with the state and the parameters of an
undisturbed run.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import orders, safe_files
from asgd.live.sandblaster import worker as worker_lib
from asgd.live.sandblaster.driver import Driver, HostMakers, Options, SavedRun
from asgd.live.sandblaster.run_log import LiveRunLog
from asgd.live.world.broken import bits, breaks_on_value_error, require
from asgd.live.world.injections import Menu, Scenario
from asgd.live.world.run import COMMON, LADDER, WorldRun
from asgd.orders.trace import from_events
from asgd.sandblaster import (
  RecomputedState,
  Settings,
  count_jobs,
  recompute,
)
from asgd.sandblaster.run_log import Lengths

WORKERS, PORTIONS, EVALUATIONS = 3, 6, 5
KINDS = *COMMON, "remove memory"
SAME_ITERATES = "iterates are those of an undisturbed run"
JOBS_ONCE = "every job of an evaluation counts once"
ALLOWED_ORDER = "the order is allowed"
INVARIANTS = (
  *(SAME_ITERATES, JOBS_ONCE, ALLOWED_ORDER),
  "it ends in bounded time",
  "no error without a reason",
)


class BatchCase(NamedTuple):
  """The configuration of a run; a Scenario adds the faults."""

  shards: int = 2
  push_every: int = 2
  backup: int = 1
  history: int = 4
  kills: bool = True  # hosts are processes, which can be killed, not threads

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
DATA = _normal((PORTIONS, 5, 4)).astype(np.float32)  # 5 examples per portion
PARAMS = {
  "v": _normal(3).astype(np.float32),
  "w": _normal((4, 3)).astype(np.float32),
}


@jax.jit
def _gradient(params: Any, examples: jax.Array) -> tuple[jax.Array, Any]:
  """Returns the loss and gradient of a small network on `examples`, [5, 4]."""

  def loss(params):
    prediction = jax.numpy.tanh(examples @ params["w"]) @ params["v"]
    return ((prediction - examples[:, 0]) ** 2).mean()

  return jax.value_and_grad(loss)(params)


def _portion_gradient(params: Any, portion: int) -> tuple[jax.Array, Any]:
  """Returns the loss and gradient on a portion of DATA."""
  return _gradient(params, DATA[portion])


@functools.cache
def _undisturbed(settings: Settings, jobs: frozenset[int]) -> RecomputedState:
  """Returns the state of a run without faults after the given jobs."""
  return recompute(settings, PARAMS, _portion_gradient, jobs)


class BatchRun(WorldRun):
  """One scenario of Sandblaster."""

  INVARIANTS, STEPS_PER_SAVE = INVARIANTS, 4
  INJECT = {**COMMON, "remove memory": WorldRun.remove_memory}  # noqa: RUF012

  _driver: Driver  # of the present command

  def __init__(self, scenario: Scenario, folder: Path):
    super().__init__(scenario, folder)
    self._settings = scenario.case.settings
    # The driver's notes on the present evaluation; a real run has a file.
    self._driver_notes: dict[str, Any] | None = None
    self._checkpoint: SavedRun | None = None  # the last checkpoint
    self._portions_begun = 0  # by all workers
    self._params: Any = None  # at the end of the run

  @staticmethod
  def menu() -> Menu:
    """See the base."""
    return Menu(CASES, KINDS, WORKERS, EVALUATIONS * PORTIONS // 2)

  # Makers of the objects in hosts.

  def _make_worker(self, index: int) -> Callable[..., worker_lib.LiveWorker]:
    """Returns the maker of a worker."""

    def do_portion(params: Any, portion: int) -> tuple[jax.Array, Any]:
      self._portions_begun += 1
      self.simulate_work(self._portions_begun)
      loss, gradient = _portion_gradient(params, portion)
      return loss, self.world.spoil(gradient)

    task = worker_lib.PortionTask(
      settings=self._settings,
      params=PARAMS,
      batch=lambda worker, portion: DATA[portion],
      work=lambda batches: do_portion,
      cache_size=3,
    )
    return functools.partial(
      worker_lib.LiveWorker, index=index, make_task=lambda: task
    )

  # A command.

  def command(self, resumed: bool) -> Callable[[], None]:
    """See the base."""
    self.make_hosts()
    return functools.partial(self._drive, resumed)

  def _resume_point(self, resumed: bool) -> SavedRun | None:
    """Returns the state from which a resumed run starts: the last driver's
    notes, or the last checkpoint if the notes are lost; None for a new run."""
    if not self.memory.exists():
      self._driver_notes = None  # the memory held the notes
    if resumed and self._driver_notes is not None:
      return SavedRun(copy.deepcopy(self._driver_notes), None)
    return copy.deepcopy(self._checkpoint) if resumed else None

  def _save_notes(self, notes: dict[str, Any] | None) -> None:
    """Stores the driver's notes; None: a shard's files are unusable, and the
    notes with them."""
    # The driver may be killed at `touch`. It is not killed within the write,
    # because a real driver writes the notes atomically.
    self.scheduler.touch()
    self._driver_notes = copy.deepcopy(notes)

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
      save_notes=self._save_notes,
    )
    driver.start()
    total_jobs = EVALUATIONS * self._settings.jobs

    def advance() -> bool:
      done_jobs = driver.advance(total_jobs, self.STEP_SECONDS)
      return done_jobs >= total_jobs or driver.ended

    def save() -> None:
      # A driver that repeats an evaluation makes no checkpoint.
      self._checkpoint = copy.deepcopy(driver.save()) or self._checkpoint

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
    # The same run in one process without faults, for the same number of jobs.
    expected = _undisturbed(self._settings, frozenset(jobs))
    are_equal = driver.state == expected.state
    are_equal &= bits(self._params) == bits(expected.params)
    result = driver.state, self._params
    require(are_equal, SAME_ITERATES, result, "and not", tuple(expected))
    require(not repeated, JOBS_ONCE, records.job.tolist())
    with breaks_on_value_error(ALLOWED_ORDER):
      orders.check(from_events(driver.run_log.rows))
