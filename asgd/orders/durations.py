"""How long workers take: the clocks that an order is made from.

A `Durations` gives each worker an endless stream of positive times. Streams
are functions of the seed and the worker alone, so adding a worker leaves the
times of the others as they were.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from asgd import checks, names


class Durations(NamedTuple):
  """Times of one batch, per worker, in the unit of `mean`."""

  stream: Callable[[int], Iterator[float]]  # worker -> its times, in order


_BLOCK = 256  # draws made at once; the stream does not depend on it


def constant(mean: float = 1.0, *, slowdown: Sequence[float] = ()) -> Durations:
  """Every batch takes `mean`, or `slowdown[i]` times as long at worker i."""
  checks.positive("mean", mean)
  for factor in slowdown:
    checks.positive("slowdown", factor)

  def stream(worker):
    factor = slowdown[worker] if worker < len(slowdown) else 1.0
    return itertools.repeat(float(mean * factor))

  return Durations(stream)


def gamma(
  mean=1.0, *, seed=0, variation=0.1, machine_variation=0.0
) -> Durations:
  """The gamma model of Ali et al. 2000, as used by the DANA papers.

  With machine_variation V_m = 0 (homogeneous) every batch time is
  Gamma(shape 1/V^2, scale mean V^2); V = `variation` is the coefficient of
  variation. Otherwise (heterogeneous) each worker first draws its own mean,
  once, from Gamma(1/V_m^2, mean V_m^2), then its batch times around that mean.
  Hakimi et al. 2019 use V = 0.1, and V_m = 0.6 where machines differ; 0.94 %
  and 27.9 % of the batches are then slower than 1.25 mean.
  """
  checks.positive("mean", mean)
  checks.positive("variation", variation)
  checks.nonnegative("machine_variation", machine_variation)
  checks.whole("seed", seed, 0)

  def stream(worker):
    rng = np.random.default_rng((seed, worker))

    def draw(mean, variation, count=None):
      square = variation**2
      return rng.gamma(1 / square, mean * square, count)

    machine = draw(mean, machine_variation) if machine_variation else mean
    while True:
      yield from draw(machine, variation, _BLOCK).tolist()

  return Durations(stream)


def homogeneous(mean: float = 1.0, *, seed: int = 0) -> Durations:
  """The DANA papers' cluster of equal machines: V = 0.1."""
  return gamma(mean, seed=seed)


def heterogeneous(mean: float = 1.0, *, seed: int = 0) -> Durations:
  """The DANA papers' cluster of unequal machines: V = 0.1, V_m = 0.6."""
  return gamma(mean, seed=seed, machine_variation=0.6)


def measured(
  samples: Sequence[Sequence[float]], *, resample: bool = False, seed: int = 0
) -> Durations:
  """Times that were measured, played back over and over.

  Worker i uses row i of `samples`, modulo their number; with `resample`, it
  draws from the row at random, with replacement.
  """
  checks.whole("seed", seed, 0)
  rows = [np.asarray(row, float) for row in samples]
  if not rows or any(row.ndim != 1 or not row.size for row in rows):
    raise ValueError(
      "samples must hold at least one row of times, each with at least one"
      f" time; got {checks.shown(samples)}"
    )
  for row in rows:
    if bad := row[~(np.isfinite(row) & (row > 0))].tolist():
      raise ValueError(
        f"samples must be positive and finite times, got {bad[0]}"
      )

  def stream(worker):
    row = rows[worker % len(rows)]
    if not resample:
      yield from itertools.cycle(row.tolist())
    rng = np.random.default_rng((seed, worker))
    while True:
      yield from rng.choice(row, _BLOCK).tolist()

  return Durations(stream)


_MAKERS = {
  maker.__name__: maker
  for maker in (constant, gamma, homogeneous, heterogeneous, measured)
}


def build(name: str, *, seed: int = 0, **kwargs) -> Durations:
  """Builds durations by name; `seed` reaches those that draw."""
  maker = names.lookup("durations", name, _MAKERS)
  if maker is not constant:
    kwargs = {"seed": seed, **kwargs}
  return names.call("durations", name, maker, kwargs)
