"""Settings of a run of Sandblaster L-BFGS."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import optax

from asgd import checks, names
from asgd.sandblaster import line_search

WORKER, SHARD, COORDINATOR = "worker", "shard", "coordinator"
FAILURES = WORKER, SHARD, COORDINATOR
_MOST_PORTIONS = 10**7


class PlannedKill(NamedTuple):
  """A process that is killed on purpose."""

  time: float  # simulated: unit of the durations; live: seconds
  kind: str  # kind of process, one of FAILURES
  index: int  # of the worker or shard; 0 for the coordinator


class Settings(NamedTuple):
  """Settings of L-BFGS, its batch and the shards; `sandblaster_lbfgs` explains
  them."""

  history: int = 10
  portions: int = 1
  push_every: int = 1
  backup: int = 1
  shards: int = 1
  weight_decay: float = 0.0
  tolerance: float = 0.0
  loading: float = 0.0
  prefetch: bool = True
  restart: float = 1.0
  search: tuple[tuple[str, Any], ...] = line_search.options_of({})
  failures: tuple[PlannedKill, ...] = ()
  workers: int | None = None  # N; None: the run gives it

  @property
  def rounds(self) -> bool:
    """Whether messages are counted in rounds of all workers."""
    return False

  @property
  def protocol(self) -> str:
    """Name of the protocol that trains with these settings."""
    return "sandblaster"

  @property
  def steps(self) -> int:
    """Batches in one message."""
    return self.push_every

  @property
  def jobs(self) -> int:
    """Jobs of an evaluation, of `push_every` portions each."""
    return -(-self.portions // self.push_every)

  def portions_of(self, job: int) -> range:
    """Returns the portions of a job."""
    start = job * self.push_every
    return range(start, min(start + self.push_every, self.portions))


@names.checked_recipe
def sandblaster_lbfgs(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  history: int = 10,
  portions: int | None = None,
  push_every: int = 1,
  backup: int = 1,
  shards: int = 1,
  weight_decay: float = 0.0,
  tolerance: float = 0.0,
  loading: float = 0.0,
  prefetch: bool = True,
  restart: float = 1.0,
  line_search: Mapping[str, Any] = {},  # noqa: B006
  failures: Sequence[Sequence[Any]] = (),
) -> Settings:
  """Sandblaster L-BFGS: batch training by a coordinator without parameters.

    d = -H g;   x <- x + a d,   a by a line search (strong Wolfe),
    H from the last m pairs s = x' - x, y = g' - g (two-loop recursion)

  The loss is the mean over a fixed batch. Workers compute portions of the
  batch; an idle worker gets the next ones. There is no learning rate.

  Args:
    learning_rate: checked and not used: the line search finds the step.
    workers: N.
    history: m, pairs (s, y) that the shards keep.
    portions: number of portions, each one batch of the config's batch_size;
      None: one pass over the training data.
    push_every: portions of a job: a worker sends the sum of their gradients.
    backup: copies of a job that idle workers may start when no other job is
      left; 0: none. The first result counts.
    shards: number of shards over which the rows of all vectors are divided.
    weight_decay: 0 or more; weight_decay |x|^2 / 2 is added to the loss.
    tolerance: norm of the gradient at which the run ends.
    loading: time to load the data of a portion, which the worker then keeps; in
      the unit of the durations, for simulations only.
    prefetch: whether a worker loads the next job's data while it computes.
    restart: time until a killed worker restarts, for simulations only.
    line_search: arguments of `optax.scale_by_zoom_linesearch`.
    failures: (time, "worker", "shard" or "coordinator", index) of processes to
      kill; in live runs the time is in seconds after the first job. Failures
      change no iterate.

  Returns:
    Settings, with `portions` 0 for None.

  Raises:
    ValueError: for a value out of its range, with the value.

  Source:
    Dean et al., "Large scale distributed deep networks", NIPS 2012, section
    4.2. Nocedal and Wright, "Numerical optimization", algorithm 7.4. The
    scaling and the line search are those of `optax.lbfgs`.

  Example:
    >>> import asgd
    >>> settings = asgd.sandblaster_lbfgs(
    ...   1.0, workers=4, portions=10, push_every=4
    ... )
    >>> settings.jobs, list(settings.portions_of(2))
    (3, [8, 9])
  """
  if not callable(learning_rate):
    checks.positive("learning_rate", learning_rate)
  count = checks.integer("workers", workers)
  if portions is not None:
    portions = checks.integer("portions", portions, most=_MOST_PORTIONS)
  for name, value in (
    *(("weight_decay", weight_decay), ("tolerance", tolerance)),
    *(("loading", loading), ("restart", restart)),
  ):
    checks.nonnegative(name, value)
  checks.flag("prefetch", prefetch)
  if not isinstance(failures, Sequence):
    raise ValueError(
      "failures must be a list of (time, kind, index), as [(12.5, 'worker',"
      f" 0)], not {checks.shown(failures)}"
    )
  return Settings(
    checks.integer("history", history, most=1000),
    portions or 0,
    checks.integer("push_every", push_every, most=_MOST_PORTIONS),
    checks.integer("backup", backup, 0, most=1000),
    checks.integer("shards", shards),
    *map(float, (weight_decay, tolerance, loading)),
    prefetch,
    float(restart),
    _search_options(line_search),
    tuple(_failure(failure, count, shards) for failure in failures),
    workers=count,
  )


_search_options = line_search.options_of


def _failure(failure: Sequence[Any], workers: int, shards: int) -> PlannedKill:
  """Returns the PlannedKill of an entry of `failures`, which is checked."""
  try:
    time, kind, index = failure
  except (TypeError, ValueError):
    raise ValueError(
      "a failure must be (time, kind, index), as (12.5, 'worker', 0), not"
      f" {checks.shown(failure)}"
    ) from None
  checks.nonnegative("the time of failures", time)
  checks.one_of("failures", kind, FAILURES)
  most = {WORKER: workers, SHARD: shards, COORDINATOR: 1}[kind] - 1
  return PlannedKill(
    float(time), kind, checks.integer(f"failures: {kind}", index, 0, most)
  )
