"""Intervals and verdicts for a number that was measured once for each seed.

A claim is about one number per seed: a difference, a ratio, a value. Two runs
with the same seed have the same initial parameters, batches and drawn
durations. So runs are compared seed by seed, never mean against mean. Each
statistic makes an `Interval` from the numbers of n seeds:

- `sign`: the median, between the order statistics x_(k) and x_(n+1-k), with k
  the largest for which P(Binomial(n, 1/2) <= k - 1) <= 5 %. This is the sign
  test as an interval (Conover, Practical Nonparametric Statistics, 3rd ed.,
  section 3.2): it lies above 0 if and only if the one-sided sign test rejects
  at 5 %. It assumes only that seeds are independent, and needs five of them:
  with all five on one side it errs in 1 of 32 cases. Numbers may be infinite; a
  tie counts against the claim.
- `t`: the mean, plus and minus t_(n-1)(97.5 %) s / sqrt(n) (Student). For
  logarithms of ratios it is the interval of their geometric mean.
- `bootstrap`: the mean, between the BCa quantiles of 9,999 resamples (Efron
  1987, by `scipy.stats.bootstrap`). Below ten seeds it is too narrow.

A verdict follows from the interval's position: PASS inside the claimed range,
FAIL outside of it, UNDECIDED if the interval contains a bound.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

VERDICTS = PASS, FAIL, UNDECIDED = "PASS", "FAIL", "UNDECIDED"
_SIGN_LEVEL = 0.05  # level of the sign test, one-sided
_COVERAGE = 0.95  # coverage of the other intervals, two-sided
_RESAMPLES = 9999


class Interval(NamedTuple):
  """An effect, and the interval in which it is likely to lie."""

  effect: float
  low: float
  high: float
  coverage: float  # two-sided; 0 if there is no interval
  why: str = ""  # the reason if there is no interval


def _without_interval(effect: float, why: str) -> Interval:
  """Returns an effect without an interval."""
  return Interval(effect, -math.inf, math.inf, 0.0, why)


def least_seeds() -> int:
  """Returns the fewest seeds for the sign test: 5."""
  # All n seeds lie on one side by chance with probability 2^-n.
  return math.ceil(-math.log2(_SIGN_LEVEL))


def sign(values: Sequence[float]) -> Interval:
  """The median, between two of the ordered values.

  Args:
    values: float[n], one per seed; may be infinite.

  Example:
    >>> sign([3.0, 1.0, 2.0, 5.0, 4.0])
    Interval(effect=3.0, low=1.0, high=5.0, coverage=0.9375, why='')
    >>> sign([3.0, 1.0, 2.0, 5.0]).why
    '4 seeds; the sign test needs 5'
  """
  ordered = np.sort(np.asarray(values, float))
  count = len(ordered)
  # The middle value, or the two middle values of an even count.
  middle = ordered[(count - 1) // 2 : count // 2 + 1]
  # The mean of two equal infinities would be NaN.
  median = float(middle[0] if middle[0] == middle[-1] else middle.mean())
  # k: how many order statistics the test may leave out on each side.
  rank = sum(
    stats.binom.cdf(k, count, 0.5) <= _SIGN_LEVEL for k in range(count // 2)
  )
  # Even the extreme values cannot reject at 5 %.
  if not rank:
    need = f"the sign test needs {least_seeds()}"
    return _without_interval(median, f"{_seeds_text(count)}; {need}")
  # Two-sided coverage: both tails beyond the k-th order statistics.
  coverage = 1 - 2 * float(stats.binom.cdf(rank - 1, count, 0.5))
  low, high = float(ordered[rank - 1]), float(ordered[-rank])
  return Interval(median, low, high, coverage)


def _seeds_text(count: int) -> str:
  return f"{count} seed{'s' * (count != 1)}"


def _mean_interval(
  values: Sequence[float],
  between: Callable[[npt.NDArray[Any]], Sequence[float]],
) -> Interval:
  """Returns the mean, and the interval that `between` computes if the values
  are finite and differ."""
  array = np.asarray(values, float)
  finite = np.isfinite(array)
  if not finite.all():
    seeds = _seeds_text(len(array))
    missing = f"{(~finite).sum()} of {seeds} have no finite value"
    return _without_interval(float("nan"), missing)
  mean = float(array.mean())
  if len(array) < 2:
    seeds = _seeds_text(len(array))
    return _without_interval(mean, f"{seeds}; an interval needs 2")
  # Equal values have no spread: Student's error is 0, and BCa is undefined.
  if np.ptp(array) == 0:
    return Interval(mean, mean, mean, _COVERAGE)
  low, high = map(float, between(array))
  return Interval(mean, low, high, _COVERAGE)


def t(values: Sequence[float]) -> Interval:
  """The mean, with Student's interval of 95 %.

  Example:
    >>> [round(x, 3) for x in t([1.0, 2.0, 3.0])[:3]]  # 2 +- 4.303 / sqrt(3)
    [2.0, -0.484, 4.484]
  """

  def between(array: npt.NDArray[Any]) -> Sequence[float]:
    error = stats.sem(array)  # s / sqrt(n)
    bounds = stats.t.interval(_COVERAGE, len(array) - 1, array.mean(), error)
    return float(bounds[0]), float(bounds[1])

  return _mean_interval(values, between)


def bootstrap(values: Sequence[float]) -> Interval:
  """The mean, with the BCa bootstrap's interval of 95 %. The seed of the
  resamples is fixed: the same numbers give the same interval."""

  def between(array: npt.NDArray[Any]) -> Sequence[float]:
    """Returns the BCa quantiles."""
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # it warns for few, nearly equal values
      result = stats.bootstrap(
        (array,),
        np.mean,
        confidence_level=_COVERAGE,
        n_resamples=_RESAMPLES,
        method="BCa",
        rng=np.random.default_rng(0),
      )
    bounds = result.confidence_interval
    return float(bounds.low), float(bounds.high)

  return _mean_interval(values, between)


STATISTICS: Mapping[str, Callable[[Sequence[float]], Interval]] = {
  "sign": sign,
  "t": t,
  "bootstrap": bootstrap,
}


def of_ratios(name: str, values: Sequence[float]) -> Interval:
  """Returns a statistic's interval for ratios, float[n] from 0 on, computed on
  their logarithms.

  Example:
    >>> of_ratios("t", [2.0, 8.0]).effect
    4.0
  """
  if name == "sign":  # the median commutes with the logarithm
    interval = sign(values)
    # Without an interval `low` is -inf, but a ratio is at least 0.
    return interval._replace(low=max(interval.low, 0.0))
  # log(0) is -inf here, which `_mean_interval` reports as a value that is not
  # finite.
  with np.errstate(divide="ignore"):
    logs = STATISTICS[name](np.log(np.asarray(values, float)).tolist())
  # Back from logarithms: the mean becomes the geometric mean.
  effect, low, high = (float(np.exp(x)) for x in logs[:3])
  return Interval(effect, low, high, logs.coverage, logs.why)


def judge(interval: Interval, above: float, below: float) -> tuple[str, str]:
  """Returns (verdict, why it is UNDECIDED) for the claim that an effect lies
  between two bounds, which may be infinite.

  Example:
    >>> judge(Interval(2.0, 1.0, 3.0, 0.95), 0.5, float("inf"))
    ('PASS', '')
    >>> judge(Interval(2.0, 1.0, 3.0, 0.95), 3.5, float("inf"))
    ('FAIL', '')
    >>> judge(Interval(2.0, 1.0, 3.0, 0.95), 2.5, float("inf"))
    ('UNDECIDED', 'the interval spans 2.5')
  """
  if interval.why:
    return UNDECIDED, interval.why
  # An infinite bound always holds, even for an infinite effect.
  is_above = above == -math.inf or interval.low > above
  is_below = below == math.inf or interval.high < below
  if is_above and is_below:
    return PASS, ""
  # Touching a bound from outside fails: the claimed range is open.
  if interval.high <= above or interval.low >= below:
    return FAIL, ""
  spanned = below if is_above else above
  return UNDECIDED, f"the interval spans {spanned:.4g}"


def conclude(verdicts: Sequence[str]) -> str:
  """Returns the verdict of a claim, which holds if all its parts hold.

  It is FAIL if one part fails, and PASS if all parts pass, each at its level.
  This is an intersection-union test: the claim errs no more often than one
  part."""
  if FAIL in verdicts:
    return FAIL
  return PASS if verdicts and set(verdicts) == {PASS} else UNDECIDED
