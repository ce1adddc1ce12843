"""How long jobs take: the clocks from which an order is computed.

A `Durations` gives each worker an endless stream of positive times. A stream
depends only on the seed and the worker, so adding a worker does not change the
times of the others. Two options are shared:

- `mean`: positive, in any unit of time;
- `seed`: 0 or more.

Each maker raises ValueError for a value out of its range.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from asgd import checks, names


class Durations(NamedTuple):
  """Times of one batch, per worker, in the unit of `mean`."""

  stream: Callable[[int], Iterator[float]]  # worker -> its times, in order


_MAX_BLOCK = 256  # most times drawn at once; streams do not depend on it


def _repeat_draws(draw: Callable[[int], np.ndarray]) -> Iterator[float]:
  """Yields drawn times without an end, from larger and larger blocks."""
  count = 8  # few at first, as a short run uses few
  while True:
    count = min(2 * count, _MAX_BLOCK)
    yield from draw(count).tolist()


def constant(mean: float = 1.0, *, slowdown: Sequence[float] = ()) -> Durations:
  """Every batch takes the same time, or a multiple of it at some workers.

    time of worker i = mean slowdown[i]

  Args:
    mean: shared option.
    slowdown: positive factors of the first workers; the others have 1.

  Returns:
    Durations in the unit of `mean`.

  Source:
    none: nothing is drawn.

  Example:
    >>> from asgd.orders import durations
    >>> clock = durations.constant(2.0, slowdown=[1.0, 3.0])
    >>> [next(clock.stream(worker)) for worker in range(3)]
    [2.0, 6.0, 2.0]
  """
  checks.positive("mean", mean)
  for factor in slowdown:
    checks.positive("slowdown", factor)

  def stream(worker):
    factor = slowdown[worker] if worker < len(slowdown) else 1.0
    return itertools.repeat(float(mean * factor))

  return Durations(stream)


def gamma(
  mean: float = 1.0,
  *,
  seed: int = 0,
  variation: float = 0.1,
  machine_variation: float = 0.0,
  offset: float = 0.0,
) -> Durations:
  """Batch times are drawn from gamma distributions.

    time - offset ~ Gamma(shape 1 / V^2, scale p_i V^2)
    p_i = mean if V_m = 0, else
    p_i ~ Gamma(shape 1 / V_m^2, scale mean V_m^2),   once for worker i

  V_m = 0 is a homogeneous cluster. With V_m > 0 the cluster is heterogeneous:
  each worker i has a mean p_i. V and V_m are coefficients of variation, the
  standard deviation over the mean. With V = 0.1, 0.94 % of the batches are
  slower than 1.25 mean; with V = 0.1 and V_m = 0.6, 27.9 % are.

  Args:
    mean, seed: shared options; the DANA papers' mean is the batch size.
    variation: V, positive.
    machine_variation: V_m, 0 or more.
    offset: 0 or more, added to each time, for example the time of a collective.

  Returns:
    Durations in the unit of `mean`.

  Source:
    Ali et al., "Task execution time modeling for heterogeneous computing
    systems", 2000 (the CVB method), as used by Hakimi et al., "Taming momentum
    in a distributed asynchronous environment", 2019, arXiv:1907.11612.

  Example:
    >>> import itertools
    >>> import statistics
    >>> from asgd.orders import durations
    >>> clock = durations.gamma(100.0, variation=0.1)
    >>> times = list(itertools.islice(clock.stream(0), 10_000))
    >>> f"{statistics.mean(times):.0f} +- {statistics.stdev(times):.0f}"
    '100 +- 10'
  """
  checks.positive("mean", mean)
  checks.positive("variation", variation)
  checks.nonnegative("machine_variation", machine_variation)
  checks.nonnegative("offset", offset)
  checks.integer("seed", seed, 0)

  def stream(worker):
    rng, machine_mean = np.random.default_rng((seed, worker)), mean
    if machine_variation:
      square = machine_variation**2
      machine_mean = rng.gamma(1 / square, mean * square)
    square = variation**2
    shape, scale = 1 / square, machine_mean * square
    return _repeat_draws(lambda count: offset + rng.gamma(shape, scale, count))

  return Durations(stream)


def homogeneous(mean: float = 1.0, *, seed: int = 0) -> Durations:
  """The DANA papers' cluster of equal machines: `gamma`, V = 0.1.

  Args:
    mean, seed: shared options.

  Returns:
    Durations in the unit of `mean`.

  Source:
    Hakimi et al., "Taming momentum in a distributed asynchronous environment",
    2019, arXiv:1907.11612.

  Example:
    >>> from asgd.orders import durations
    >>> mine, other = durations.homogeneous(), durations.gamma(variation=0.1)
    >>> next(mine.stream(5)) == next(other.stream(5))
    True
  """
  return gamma(mean, seed=seed)


def heterogeneous(mean: float = 1.0, *, seed: int = 0) -> Durations:
  """The DANA papers' cluster of unequal machines: `gamma`, V = 0.1, V_m = 0.6.

  Args:
    mean, seed: shared options; the mean is over machines.

  Returns:
    Durations in the unit of `mean`.

  Source:
    Hakimi et al., "Taming momentum in a distributed asynchronous environment",
    2019, arXiv:1907.11612.

  Example:
    The times of one worker are similar; the means of two workers differ.

    >>> import itertools
    >>> import statistics
    >>> from asgd.orders import durations
    >>> clock = durations.heterogeneous()
    >>> means = [
    ...   statistics.mean(itertools.islice(clock.stream(worker), 10))
    ...   for worker in range(1000)
    ... ]
    >>> f"{statistics.mean(means):.1f} +- {statistics.stdev(means):.1f}"
    '1.0 +- 0.6'
  """
  return gamma(mean, seed=seed, machine_variation=0.6)


def pareto(mean: float = 1.0, *, seed: int = 0, tail: float = 2.5) -> Durations:
  """Batch times with a heavy tail: a few batches take very long.

    P(time > t) = (m / t)^alpha  for t > m,   m = mean (alpha - 1) / alpha

  Each time is at least m. The smaller alpha, the heavier the tail; if alpha is
  2 or less, the variance is infinite.

  Args:
    mean, seed: shared options.
    tail: alpha, above 1.

  Returns:
    Durations in the unit of `mean`.

  Source:
    none: the distribution of Pareto, of the first kind.

  Example:
    Of 10,000 batches the slowest takes many times as long as the median.

    >>> import itertools
    >>> import statistics
    >>> from asgd.orders import durations
    >>> times = list(
    ...   itertools.islice(durations.pareto(tail=2.0).stream(0), 10_000)
    ... )
    >>> f"{statistics.median(times):.1f} {min(times):.1f}"
    '0.7 0.5'
    >>> max(times) > 20
    True
  """
  checks.positive("mean", mean)
  checks.integer("seed", seed, 0)
  required = "above 1, or there is no mean"
  checks.real("tail", tail, lambda value: value > 1, required)

  def stream(worker):
    rng = np.random.default_rng((seed, worker))
    minimum = mean * (tail - 1) / tail
    return _repeat_draws(lambda count: minimum * (1 + rng.pareto(tail, count)))

  return Durations(stream)


def bursts(
  mean: float = 1.0, *, seed: int = 0, variation: float = 0.1,
  slowdown: float = 5.0, every: float = 100.0, length: float = 10.0,
) -> Durations:
  """Transient stragglers: each worker is slow for short series of batches.

    time = slowdown^b x,   x as in `gamma`,   b in {0, 1} a Markov chain:
    P(0 -> 1) = 1 / every,   P(1 -> 0) = 1 / length

  The mean of all times is mean (every + slowdown length) / (every + length).

  Args:
    mean, seed: shared options; `mean` is that of batches that are not slow.
    variation: V of a batch, positive.
    slowdown: factor on the time of slow batches, 1 or more.
    every: mean number of batches between two bursts, 1 or more.
    length: mean number of batches in a burst, 1 or more.

  Returns:
    Durations in the unit of `mean`.

  Source:
    Gilbert, "Capacity of a burst-noise channel", Bell System Technical Journal
    39, 1960, for the chain of two states.

  Example:
    >>> import itertools
    >>> from asgd.orders import durations
    >>> clock = durations.bursts(every=100, length=25, slowdown=4)
    >>> times = list(itertools.islice(clock.stream(0), 100_000))
    >>> f"{sum(time > 2 for time in times) / len(times):.1f}"
    '0.2'
  """
  checks.positive("mean", mean)
  checks.positive("variation", variation)
  factors = {"slowdown": slowdown, "every": every, "length": length}
  for name, value in factors.items():
    checks.real(name, value, lambda value: value >= 1, "1 or more")
  base_clock = gamma(mean, seed=seed, variation=variation)

  def stream(worker):
    # A separate generator, so that batches that are not slow have the times of
    # `gamma` with this seed.
    rng, is_slow = np.random.default_rng((seed, worker, 1)), False  # the chain
    for time in base_clock.stream(worker):
      is_slow = rng.random() < (1 - 1 / length if is_slow else 1 / every)
      yield time * slowdown if is_slow else time

  return Durations(stream)


def failing(
  mean: float = 1.0, *, seed: int = 0, variation: float = 0.1,
  mtbf: float = 100.0, mttr: float = 10.0,
) -> Durations:
  """Workers fail while they compute, and are replaced.

    time = x + sum over the failures of the batch of (f_k + mttr),
    x as in `gamma`,   f_k the time computed in vain before failure k

  A machine computes for a time drawn from Exp(mtbf) until it fails. `mttr`
  later a replacement begins the batch again, on the ticket of the batch. A
  machine that waits does not fail. For a constant x the mean of all times is

    (mtbf + mttr) (exp(x / mtbf) - 1),

  which is x / A for x << mtbf, where A = mtbf / (mtbf + mttr) is the
  availability of a worker.

  Args:
    mean, seed: shared options; `mean` is that of batches without a failure.
    variation: V of a batch, positive.
    mtbf: mean time between failures, `mean` or more: the computing time of a
      machine from its start to its failure.
    mttr: time to replace a machine, 0 or more, the same for all replacements.

  Returns:
    Durations in the unit of `mean`.

  Source:
    Barlow, Proschan, "Mathematical theory of reliability", 1965, for the
    availability.

  Example:
    >>> import itertools
    >>> from asgd.orders import durations
    >>> clock = durations.failing(mtbf=50.0, mttr=10.0)
    >>> times = list(itertools.islice(clock.stream(0), 100_000))
    >>> f"{len(times) / sum(times):.2f}"  # batches in a unit of time
    '0.83'
    >>> round(50 / (50 + 10), 2)
    0.83
  """
  base_clock = gamma(mean, seed=seed, variation=variation)
  # With less than `mean`, most batches would fail, and some would hardly end.
  required = f"{mean:g} or more, the mean time of a batch"
  checks.real("mtbf", mtbf, lambda value: value >= mean, required)
  checks.nonnegative("mttr", mttr)

  def stream(worker):
    # A separate generator, so that batches without a failure have the times of
    # `gamma` with this seed.
    rng = np.random.default_rng((seed, worker, 2))
    time_to_failure = rng.exponential(mtbf)  # computing time until then
    for time in base_clock.stream(worker):
      lost_time = 0.0
      while time_to_failure < time:
        lost_time += time_to_failure + mttr
        time_to_failure = rng.exponential(mtbf)
      time_to_failure -= time
      yield lost_time + time

  return Durations(stream)


def measured(
  samples: Sequence[Sequence[float]], *, resample: bool = False, seed: int = 0
) -> Durations:
  """Measured times, repeated without an end.

  Args:
    samples: rows of positive times; worker i uses row i, modulo their number.
    resample: whether to draw from the row at random, with replacement.
    seed: shared option, for these draws.

  Returns:
    Durations in the unit of `samples`.

  Source:
    none: the times are measurements.

  Example:
    >>> import itertools
    >>> from asgd.orders import durations
    >>> clock = durations.measured([[1.0, 2.0], [5.0]])
    >>> for worker in range(3):
    ...   print(list(itertools.islice(clock.stream(worker), 3)))
    [1.0, 2.0, 1.0]
    [5.0, 5.0, 5.0]
    [1.0, 2.0, 1.0]
  """
  checks.integer("seed", seed, 0)
  rows = [np.asarray(row, float) for row in samples]
  if not rows or any(row.ndim != 1 or not row.size for row in rows):
    raise ValueError(
      "samples must hold at least one row of times, each with at least one"
      f" time; got {checks.shown(samples)}"
    )
  for row in rows:
    if wrong_times := row[~(np.isfinite(row) & (row > 0))].tolist():
      raise ValueError(
        f"samples must be positive and finite times, got {wrong_times[0]}"
      )

  def stream(worker):
    row = rows[worker % len(rows)]
    if not resample:
      return itertools.cycle(row.tolist())
    rng = np.random.default_rng((seed, worker))
    return _repeat_draws(lambda count: rng.choice(row, count))

  return Durations(stream)


def of_each(
  times: Sequence[float] | Sequence[Sequence[float]],
) -> Durations:
  """Returns the times that a user gives for each worker.

  Args:
    times: positive numbers, one for each worker, the time of each of its
      batches; or rows of numbers, one for each worker, which repeat.

  Returns:
    Durations in the unit of `times`.

  Raises:
    ValueError: for other values.

  Source:
    none: nothing is drawn.

  Example:
    >>> from asgd.orders import durations
    >>> clock = durations.of_each([1.0, 3.0])
    >>> [next(clock.stream(worker)) for worker in range(2)]
    [1.0, 3.0]
  """
  rows: list[Any] = [row if np.ndim(row) else [row] for row in times]
  return measured(rows)


def of_stream(stream: Callable[[int], Iterable[float]]) -> Durations:
  """Returns the times that a user's function yields, and checks them.

  Args:
    stream: worker -> its times, positive numbers without an end.

  Returns:
    Durations. A stream that ends, or yields another value, raises ValueError
    when it is reached.

  Source:
    none: the function decides.

  Example:
    >>> import itertools
    >>> from asgd.orders import durations
    >>> clock = durations.of_stream(lambda worker: itertools.repeat(worker + 1))
    >>> next(clock.stream(2))
    3.0
  """

  def checked_stream(worker: int) -> Iterator[float]:
    count = 0
    for time in stream(worker):
      checks.positive(f"the duration of worker {worker}", time)
      yield float(time)
      count += 1
    raise ValueError(
      f"the durations of worker {worker} end after {count} jobs: yield them"
      " without an end, as itertools.cycle does"
    )

  return Durations(checked_stream)


_MAKER_FUNCTIONS = (
  *(constant, gamma, homogeneous, heterogeneous, measured, pareto, bursts),
  failing,
)
_MAKERS = {maker.__name__: maker for maker in _MAKER_FUNCTIONS}

NAMES = tuple(_MAKERS)  # names that `build` knows


def build(name: str, *, seed: int = 0, **kwargs: Any) -> Durations:
  """Builds durations by name.

  Args:
    name: "constant", "gamma", "homogeneous", "heterogeneous", "measured",
      "pareto", "bursts" or "failing".
    seed: shared option, for makers that draw.
    **kwargs: options of the maker.

  Returns:
    Durations.

  Raises:
    ValueError: for an unknown name or option, with the nearest known one.

  Source:
    none: it calls one of the other makers.

  Example:
    >>> from asgd.orders import durations
    >>> next(durations.build("constant", mean=2.0).stream(0))
    2.0
  """
  maker = names.lookup("durations", name, _MAKERS)
  if maker is not constant:
    kwargs = {"seed": seed, **kwargs}
  return names.call("durations", name, maker, kwargs)
