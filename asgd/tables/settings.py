"""What a run of tables may be given, and what its workers compute."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from asgd import base, checks, names
from asgd.tables import consistency as consistency_lib
from asgd.tables import filters as filters_lib
from asgd.tables import functions
from asgd.tables.keys import Keys
from asgd.tables.messages import ValueCodec

Values = Mapping[str, Any]  # table -> [n, ...]


class Work(NamedTuple):
  """What workers compute, as functions of plain arrays."""

  batch: Callable[[int, int], base.Batch]  # (worker, job)
  keys: Callable[[base.Batch], Mapping[str, Keys]]  # of the rows it needs
  # (rows, batch, keys, worker, job) -> (loss, the gradient of each row, or what
  # is pushed to it: `TableSettings.direct`)
  gradient: Callable[..., tuple[float, Values]]


class TableSettings(NamedTuple):
  """How tables are served; see `table`."""

  rules: consistency_lib.ConsistencyRules
  function: functions.RowFunction
  learning_rate: optax.ScalarOrSchedule
  clock_every: int = 1
  shards: int = 1
  rebalance_every: int = 0
  filters: tuple[filters_lib.Filter, ...] = ()
  codec: tuple[tuple[str, Any], ...] = ()
  # Workers compute what is pushed (`Problem.updates`), and not a gradient.
  direct: bool = False

  @property
  def protocol(self) -> str:
    """Name of the protocol that trains it."""
    return "tables"

  @property
  def steps(self) -> int:
    """Batches in one message."""
    return 1

  def of_run(self, workers: int, jobs: int) -> "TableSettings":
    """Returns the settings for a run: value_bounded counts what its filters and
    its codec hold back.

    Args:
      workers: N.
      jobs: of each.

    Raises:
      ValueError: if it is not known what that would change.
    """
    holds, function = bool(self.filters or self.codec), self.function
    if not self.rules.by_value:
      return self
    if function.aggregates or (holds and not function.additive):
      raise ValueError(
        "value_bounded bounds all updates on their way, and of an optimizer,"
        " ftrl or proximal at the server it is not known what the updates"
        " change that filters, a codec or other workers hold back: leave"
        " filters, codec and compress out, or use another consistency"
      )
    if not holds:
      return self
    clocks = math.ceil(jobs / self.clock_every)
    return self._replace(rules=self.rules.holding(workers, clocks))

  def rate(self, clock: int) -> float:
    """Returns the learning rate at a clock."""
    rate = self.learning_rate
    return float(rate(clock) if callable(rate) else rate)

  def factor(self, clock: int) -> float:
    """Returns what a read shows of a value that a worker is to push: all of an
    increment, of a gradient a step of gradient descent, and nothing where
    others' values are needed to know."""
    if self.function.aggregates:
      return 0.0
    return 1.0 if self.function.additive else -self.rate(clock)

  def written(
    self, clock: int, keys: Mapping[str, Keys], values: Values
  ) -> dict[str, tuple[Keys, Any]]:
    """Returns what a worker writes of a job, by table.

    Where the function adds, a gradient g becomes the increment -a g. Of what a
    problem computes itself, which is written as it is, rows of zeros are left
    out.

    Args:
      clock: of the worker.
      keys: of the rows that the job was done on.
      values: [n, ...], of `Work.gradient`.
    """
    if self.direct:
      out = {}
      for name, each in values.items():
        some = each.any(tuple(range(1, each.ndim)))
        out[name] = keys[name][some], each[some]
      return out
    if self.function.additive:
      rate = self.rate(clock)
      values = {k: x * x.dtype.type(-rate) for k, x in values.items()}
    return {name: (keys[name], each) for name, each in values.items()}

  def clock_of_message(self, done: int, jobs: int) -> int | None:
    """Returns the clocks that a worker has finished with its message after so
    many of its jobs; None if it sends none then."""
    clock, rest = divmod(done, self.clock_every)
    if rest and done < jobs and not self.rules.by_value:
      return None
    # With its last job a worker has no more clocks to wait for.
    return clock + (done == jobs and rest > 0)

  def make_codec(self) -> ValueCodec | None:
    """Returns the codec of messages, if there is one."""
    return ValueCodec(**dict(self.codec)) if self.codec else None


def _function_at_server(options, learning_rate, *, messages):
  """Returns the function that one of the options, by name, asks for: a sum of
  increments if all are None. Raises ValueError for two of them."""
  given = {k: value for k, value in options.items() if value is not None}
  if len(given) > 1:
    raise ValueError(
      f"{' and '.join(given)} are both the function at the server: drop one"
    )
  if not given:
    return functions.add()
  ((name, option),) = given.items()
  if name == "proximal":
    if callable(learning_rate):
      raise ValueError(
        "proximal has no schedule of its learning rate: use a constant one"
      )
    return _from_options(
      name, functions.proximal, option, learning_rate, messages=messages
    )
  if name == "ftrl":
    ftrl = _from_options(name, functions.ftrl_proximal, option, learning_rate)
    return functions.by_row(ftrl)
  if not callable(option):
    raise ValueError(
      "optimizer must be an optimizers.Optimizer, as optimizers.named('adam')"
      f" is, not {checks.shown(option)}"
    )
  return functions.by_row(option(learning_rate))


def table(
  learning_rate: optax.ScalarOrSchedule,
  workers: int,
  *,
  consistency: str = "ssp",
  bound: int | None = None,
  threshold: float | None = None,
  budget: int | None = None,
  clock_every: int = 1,
  shards: int = 1,
  rebalance_every: int = 0,
  filters: str | Sequence[str | Mapping[str, Any]] = (),
  codec: str | Mapping[str, Any] | None = None,
  ftrl: Mapping[str, float] | None = None,
  proximal: Mapping[str, float] | None = None,
  optimizer: Any = None,
) -> TableSettings:
  """A parameter server of keyed rows, under a consistency model.

    row <- row + sum of the increments pushed,   an increment is -a g
    or row, state <- tx(row, state, g) with an optax transform by row

  A worker computes on the rows that its batch needs, and pushes once a clock.
  The leaves of the parameters are tables, their leading axes keys.

  Args:
    learning_rate: a, or a schedule of it, in clocks; of an optimizer, in
      updates of a row.
    workers: N.
    consistency: of `tables.CONSISTENCIES`.
    bound: s or tau, in clocks; 3 of ssp, essp and managed if left out.
    threshold: v0 of value_bounded; of this, filters and a codec hold back half
      of the least bound of the run at most.
    budget: rows of managed.
    clock_every: jobs in a clock. Of value_bounded, messages are sent after each
      job all the same.
    shards: over which the rows of each table are divided.
    rebalance_every: clocks after which keys are divided anew by load; 0 never.
      Live, workers rest until that is done.
    filters: of messages, names or dicts of a `name` and options (`FILTERS`);
      one alone is a list of one.
    codec: of values, a name of `compression.CODECS`, or a dict of a `name` and
      options; None is none.
    ftrl: options of `ftrl_proximal`, which is then the function at the server.
    proximal: options of `functions.proximal`, the same; its learning rate is
      the run's, and a problem is needed that computes its values, as
      `sparse_logistic.sparse_logistic_regression`.
    optimizer: an `optimizers.Optimizer` by row at the server; None adds.

  Raises:
    ValueError: for a value out of its range, or of another model, and for what
      value_bounded cannot bound.

  Source:
    Li et al., OSDI 2014; Ho et al., "More effective distributed ML via a stale
    synchronous parallel parameter server", NIPS 2013; Dai et al.,
    "High-performance distributed ML at scale through parameter server
    consistency models", AAAI 2015, arXiv:1410.8043.

  Example:
    >>> from asgd import tables
    >>> settings = tables.table(0.1, workers=4, consistency="essp", bound=10)
    >>> settings.rules.bound, settings.function.additive
    (10, True)
  """
  checks.whole("workers", workers)
  clock_every = checks.whole("clock_every", clock_every, most=10**6)
  if not callable(learning_rate):
    checks.positive("learning_rate", learning_rate)
  if isinstance(filters, str | Mapping):
    filters = (filters,)
  filters = [
    {"name": each} if isinstance(each, str) else each
    for each in filters_lib.check(filters)
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
      {"column": 0, "l1": proximal["l1"], **each} if _is_kkt(each) else each
      for each in filters
    ]
  settings = TableSettings(
    rules,
    function,
    learning_rate,
    clock_every,
    checks.whole("shards", shards),
    checks.whole("rebalance_every", rebalance_every, 0),
    tuple(map(filters_lib.named, filters)),
    _codec_options(codec),
  )
  if any(_is_kkt(each) for each in filters) and function.additive:
    raise ValueError(
      "the filter kkt is for gradients, and increments are pushed: use it with"
      " ftrl, proximal or an optimizer"
    )
  with checks.below("codec", codec or ()):
    settings.make_codec()
  settings.of_run(workers, 1)  # or it is refused
  return settings


def _codec_options(codec):
  """The options of a codec, with its name; () for none."""
  if codec is None:
    return ()
  options = {"name": codec} if isinstance(codec, str) else codec
  if not isinstance(options, Mapping) or "name" not in options:
    raise ValueError(
      "codec must be the name of one or a dict of a name and options, as"
      f" dict(name='int8'), not {checks.shown(codec)}; None is no codec"
    )
  return tuple(options.items())


def _from_options(name, make, options, learning_rate, **needed):
  """What `make` returns for options of a config."""
  if not isinstance(options, Mapping):
    raise ValueError(
      f"{name} must be a dict of options, as dict(l1=0.1), not"
      f" {checks.shown(options)}"
    )
  with checks.below(name, ("learning_rate", *options)):
    options = {"learning_rate": learning_rate, **options, **needed}
    return names.call("function", name, make, options)


def _is_kkt(value):
  return value.get("name") == "kkt"

