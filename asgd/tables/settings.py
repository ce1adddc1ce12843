"""Settings of a run of tables, and the computation of its workers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from asgd import base, checks, names, optimizers
from asgd.tables import consistency as consistency_lib
from asgd.tables import filters as filters_lib
from asgd.tables import functions
from asgd.tables.keys import Keys
from asgd.tables.messages import ValueCodec

Values = Mapping[str, Any]  # table -> [n, ...]


class Work(NamedTuple):
  """The computation of workers, as functions of plain arrays."""

  batch: Callable[[int, int], base.Batch]  # (worker, job)
  keys: Callable[[base.Batch], Mapping[str, Keys]]  # of the rows to read
  # (rows, batch, keys, worker, job) -> (loss, values): the gradient of each
  # row, or with `TableSettings.direct` the value to push to it.
  gradient: Callable[..., tuple[float, Values]]


class TableSettings(NamedTuple):
  """Settings of a run of tables; `table` explains them."""

  rules: consistency_lib.ConsistencyRules
  function: functions.RowFunction
  learning_rate: optax.ScalarOrSchedule
  clock_every: int = 1
  shards: int = 1
  rebalance_every: int = 0
  filters: tuple[filters_lib.Filter, ...] = ()
  codec: tuple[tuple[str, Any], ...] = ()
  key_caching: bool = True
  # Whether workers compute values to push (`Problem.updates`), not gradients.
  direct: bool = False
  workers: int | None = None  # N; None: the run gives it
  # Jobs between messages; None: the jobs of a clock, or 1 with a bandwidth.
  push_every: int | None = None
  bandwidth: float = math.inf  # bytes per second (`tables.bandwidth`)

  @property
  def rounds(self) -> bool:
    """Whether messages are counted in rounds of all workers."""
    return True

  @property
  def protocol(self) -> str:
    """Name of the protocol that trains with these settings."""
    return "tables"

  @property
  def steps(self) -> int:
    """Batches in one message."""
    return 1

  def of_run(self, workers: int, jobs: int) -> "TableSettings":
    """Returns the settings for a run: its rules of value_bounded reserve a
    part of the bound for updates that filters and a codec hold back.

    Args:
      workers: N.
      jobs: the number of jobs of each worker.

    Raises:
      ValueError: if value_bounded cannot bound the effect of held-back updates.
    """
    holds_back, function = bool(self.filters or self.codec), self.function
    if not self.rules.by_value:
      return self
    if function.aggregates or (holds_back and not function.additive):
      raise ValueError(
        "value_bounded cannot bound updates that filters, a codec or other"
        " workers hold back if the server has an optimizer, ftrl or proximal,"
        " as their effect is unknown: leave filters, codec and compress out,"
        " or use another consistency"
      )
    if not holds_back:
      return self
    clocks = math.ceil(jobs / self.clock_every)
    return self._replace(rules=self.rules.holding(workers, clocks))

  def rate(self, clock: int) -> float:
    """Returns the learning rate at a clock."""
    rate = self.learning_rate
    return float(rate(clock) if callable(rate) else rate)

  def factor(self, clock: int) -> float:
    """Returns the factor with which a read includes the worker's unsent values.

    It is 1 for increments, and minus the learning rate for gradients (a step of
    gradient descent). It is 0 if the effect of the values depends on the values
    of other workers.
    """
    if self.function.aggregates:
      return 0.0
    return 1.0 if self.function.additive else -self.rate(clock)

  def written(
    self, clock: int, keys: Mapping[str, Keys], values: Values
  ) -> dict[str, tuple[Keys, Any]]:
    """Returns the values that a worker pushes for a job, by table.

    If the function at the server adds, a gradient g becomes the increment -a g.
    Values that a problem computes itself are pushed as they are, without rows
    of zeros.

    Args:
      clock: the clock of the worker.
      keys: the keys of the rows that the job read.
      values: [n, ...], from `Work.gradient`.
    """
    if self.direct:
      written_values = {}
      for name, rows in values.items():
        is_nonzero = rows.any(tuple(range(1, rows.ndim)))
        written_values[name] = keys[name][is_nonzero], rows[is_nonzero]
      return written_values
    if self.function.additive:  # workers apply the learning rate themselves
      rate = self.rate(clock)
      values = {
        name: rows * rows.dtype.type(-rate) for name, rows in values.items()
      }
    return {name: (keys[name], rows) for name, rows in values.items()}

  def clock_of_message(
    self, done: int, jobs: int, *, link_is_free: bool = True
  ) -> int | None:
    """Returns the clock in a worker's message after `done` of its `jobs`; None
    if it sends no message then: none is due, or the link is busy."""
    clock, jobs_of_clock = divmod(done, self.clock_every)
    # value_bounded bounds unsent updates, so a worker sends after each job.
    sends_each_job = self.rules.by_value or self.bandwidth < math.inf
    message_every = self.push_every or (
      1 if sends_each_job else self.clock_every
    )
    is_due = not jobs_of_clock or (link_is_free and not done % message_every)
    if not is_due and done < jobs:
      return None
    # The last job completes its clock, even if the clock has fewer jobs.
    return clock + (done == jobs and jobs_of_clock > 0)

  def sends_everything(self, done: int, jobs: int) -> bool:
    """Whether the message after `done` of `jobs` bypasses the filters: the last
    message and, with a bandwidth, each message at the end of a clock."""
    ends_clock = done % self.clock_every == 0
    return done == jobs or (self.bandwidth < math.inf and ends_clock)

  def make_codec(self) -> ValueCodec | None:
    """Returns the codec of messages, or None."""
    return ValueCodec(**dict(self.codec)) if self.codec else None


def _function_at_server(
  options: Mapping[str, Any],
  learning_rate: optax.ScalarOrSchedule,
  *,
  messages: int,
) -> functions.RowFunction:
  """Returns the function at the server that the one given option selects; if
  all are None, `add`. Raises ValueError if two options are given."""
  chosen = {
    name: option for name, option in options.items() if option is not None
  }
  if len(chosen) > 1:
    raise ValueError(
      f"{' and '.join(chosen)} are both the function at the server: drop one"
    )
  if not chosen:
    return functions.add()
  ((name, option),) = chosen.items()
  if name == "proximal":
    if callable(learning_rate):
      raise ValueError(
        "proximal has no schedule of its learning rate: use a constant one"
      )
    return _make_from_options(
      name, functions.proximal, option, learning_rate, messages=messages
    )
  if name == "ftrl":
    maker = functions.ftrl_proximal
    ftrl = _make_from_options(name, maker, option, learning_rate)
    return functions.by_row(ftrl)
  return functions.by_row(optimizers.resolve(option)(learning_rate))


@names.checked_recipe
def table(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  consistency: str = "ssp",
  bound: int | None = None,
  threshold: float | None = None,
  budget: int | None = None,
  clock_every: int = 1,
  push_every: int | None = None,
  bandwidth: float | None = None,
  shards: int = 1,
  rebalance_every: int = 0,
  filters: str | Sequence[str | Mapping[str, Any]] = (),
  codec: str | Mapping[str, Any] | None = None,
  key_caching: bool = True,
  ftrl: Mapping[str, float] | None = None,
  proximal: Mapping[str, float] | None = None,
  optimizer: optimizers.OptimizerLike = None,
) -> TableSettings:
  """Recipe of a parameter server of keyed rows, under a consistency model.

    row <- row + sum of the increments pushed,   an increment is -a g
    or row, state <- tx(row, state, g) with an optax transform by row

  A worker computes on the rows that its batch needs, and pushes once per clock.
  Each leaf of the parameters is a table; its leading axis is that of the keys.

  Args:
    learning_rate: a, or a schedule of it over clocks; over updates of a row if
      an optimizer is given.
    workers: N.
    consistency: a name of `tables.CONSISTENCIES`.
    bound: s or tau, in clocks; by default 3 for ssp, essp and managed.
    threshold: v0 of value_bounded; filters and a codec may hold back at most
      half of the least bound of the run.
    budget: rows that the server of `managed` sends a worker per clock.
    clock_every: jobs in a clock; value_bounded sends a message after each job
      nevertheless.
    push_every: jobs between two messages within a clock, a divisor of
      clock_every, for a server that applies updates as they arrive. None: one
      message per clock; with a bandwidth, a message may follow any job.
    bandwidth: bytes that a worker may send per second, or per unit of a
      simulation's durations, for the same servers. A worker sends a message
      within a clock only if all earlier messages have been sent at this rate;
      the message at the end of a clock has all updates (`tables.bandwidth`).
      None: no limit.
    shards: number of shards over which the rows of each table are divided.
    rebalance_every: clocks between divisions of the keys by load; 0: never. In
      a live run, all workers wait during a division.
    filters: the filters of messages, a list of names or dicts of a `name` and
      options (`FILTERS`); a single one may be given without the list.
    codec: the codec of values, a name of `compression.CODECS`, or a dict of a
      `name` and options; None: values are sent as they are.
    key_caching: whether workers send a list of keys that they have sent before
      as its digest, of 8 bytes.
    ftrl: options of `ftrl_proximal`, which becomes the function at the server.
    proximal: options of `functions.proximal`, which becomes the function at the
      server with the run's learning rate. It requires a problem that computes
      its values, such as `sparse_logistic.sparse_logistic_regression`.
    optimizer: as that of other recipes (`optimizers.OptimizerLike`); it runs by
      row at the server. None: the server adds increments.

  Raises:
    ValueError: for a value out of its range or not used by the model, and for
      settings that value_bounded cannot bound.

  Source:
    Li et al., OSDI 2014; Ho et al., "More effective distributed ML via a stale
    synchronous parallel parameter server", NIPS 2013; Dai et al.,
    "High-performance distributed ML at scale through parameter server
    consistency models", AAAI 2015, arXiv:1410.8043; Wei et al., SoCC 2015.

  Example:
    >>> from asgd import tables
    >>> settings = tables.table(0.1, workers=4, consistency="essp", bound=10)
    >>> settings.rules.bound, settings.function.additive
    (10, True)
  """
  checks.integer("workers", workers)
  clock_every = checks.integer("clock_every", clock_every, most=10**6)
  checks.flag("key_caching", key_caching)
  if push_every is not None:
    checks.integer("push_every", push_every)
    parts = "messages of {} jobs (push_every)"
    checks.multiple(clock_every, "jobs of a clock", push_every, parts)
  if bandwidth is not None:
    checks.positive("bandwidth", bandwidth)
  if not callable(learning_rate):
    checks.positive("learning_rate", learning_rate)
  if isinstance(filters, str | Mapping):
    filters = (filters,)
  filters = [
    {"name": value} if isinstance(value, str) else value
    for value in filters_lib.check(filters)
  ]
  model = names.lookup(
    "consistency", consistency, consistency_lib.CONSISTENCIES
  )
  if bound is None:
    bound = model.bound
  rules = consistency_lib.rules(
    model, bound=bound, threshold=threshold, budget=budget
  )
  options = {"ftrl": ftrl, "proximal": proximal, "the optimizer": optimizer}
  messages = workers * clock_every
  function = _function_at_server(options, learning_rate, messages=messages)
  if proximal is not None:
    # Rows of `functions.proximal` are (weight, curvature).
    filters = [
      {"column": 0, "l1": proximal["l1"], **value} if _is_kkt(value) else value
      for value in filters
    ]
  settings = TableSettings(
    rules,
    function,
    learning_rate,
    clock_every,
    checks.integer("shards", shards),
    checks.integer("rebalance_every", rebalance_every, 0),
    tuple(map(filters_lib.named, filters)),
    _codec_options(codec),
    key_caching,
    workers=workers,
    push_every=push_every,
    bandwidth=math.inf if bandwidth is None else float(bandwidth),
  )
  _check_uses(settings, filters)
  with checks.section_errors("codec", codec or ()):  # errors name the option
    settings.make_codec()
  settings.of_run(workers, 1)  # raises for what value_bounded cannot bound
  return settings


def _check_uses(
  settings: TableSettings, filters: Sequence[Mapping[str, Any]]
) -> None:
  """Raises ValueError for an option that the server cannot use."""
  rules, function = settings.rules, settings.function
  message_options = {
    "push_every": settings.push_every,
    "bandwidth": settings.bandwidth,
  }
  for key, value in message_options.items():
    is_given = value is not None and value < math.inf
    if is_given and (rules.deferred or rules.by_value or function.aggregates):
      raise ValueError(
        f"{key} {value} is for a server that applies updates as they arrive,"
        f" and workers that send by clock: not for {rules.consistency.name}"
        " with these options; leave it out"
      )
  if settings.bandwidth < math.inf and any(
    value["name"] != "largest_change" for value in filters
  ):
    raise ValueError(
      "with a bandwidth the message at the end of a clock has all updates, so"
      " that filters can only order those within a clock: use largest_change"
      " alone, or leave bandwidth out"
    )
  if any(map(_is_kkt, filters)) and function.additive:
    raise ValueError(
      "the filter kkt is for gradients, but workers push increments: use kkt"
      " with ftrl, proximal or an optimizer"
    )


def _codec_options(codec: Any) -> tuple[tuple[str, Any], ...]:
  """Returns the options of a codec, its name among them; () for no codec."""
  if codec is None:
    return ()
  options = {"name": codec} if isinstance(codec, str) else codec
  if not isinstance(options, Mapping) or "name" not in options:
    raise ValueError(
      "codec must be a name or a dict of a name and options, as"
      f" dict(name='int8'), not {checks.shown(codec)}; None is no codec"
    )
  return tuple(options.items())


def _make_from_options(
  name: str,
  make: Callable[..., Any],
  options: Any,
  learning_rate: Any,
  **required: Any,
) -> Any:
  """Calls `make` with the options of a config, and returns its result. Errors
  name the option."""
  if not isinstance(options, Mapping):
    raise ValueError(
      f"{name} must be a dict of options, as dict(l1=0.1), not"
      f" {checks.shown(options)}"
    )
  with checks.section_errors(name, ("learning_rate", *options)):
    options = {"learning_rate": learning_rate, **options, **required}
    return names.call("function", name, make, options)


def _is_kkt(value: Mapping[str, Any]) -> bool:
  return value.get("name") == "kkt"
