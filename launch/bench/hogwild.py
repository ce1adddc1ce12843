"""How fast processes train in one shared memory without locks (Hogwild).

  w[k] <- w[k] - eta dF_i(w)/dw[k]   for the features k of one example i

Processes read and write the weights of a sparse logistic regression in shared
memory, and none waits for another. Reads and writes of several processes mix,
and an addition may be lost (Recht et al., "Hogwild!: a lock-free approach to
parallelizing stochastic gradient descent", NIPS 2011). The baseline is one
process; the other contestant has a lock around each update. All contestants
make the same number of updates, so that their losses can be compared.
"""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd.data import sparse
from asgd.experiment import provenance

from .report import BenchReport, Measured

_UPDATES = 200_000  # of all processes together
_LEARNING_RATE = 0.05  # eta
_FEATURES, _EXAMPLES = 2_000, 5_000
_PATIENCE = 240.0  # seconds to wait for the processes: they may have failed


class Example(NamedTuple):
  """An example: its features, their values, and its label 0 or 1."""

  keys: npt.NDArray[np.int32]
  values: npt.NDArray[np.float64]
  label: float


def examples_of(data: sparse.Sparse) -> list[Example]:
  """Returns the training examples, without the values of 0 that fill rows. The
  filling repeats a key, and NumPy adds only one of the changes to it."""
  rows = zip(data.train_keys, data.train_values, data.train_labels, strict=True)
  return [
    Example(keys[values != 0], values[values != 0].astype(float), float(label))
    for keys, values, label in rows
  ]


def train(
  weights: npt.NDArray[np.float64],
  examples: Sequence[Example],
  order: npt.NDArray[np.int64],
  lock: Any,
) -> None:
  """Makes an update of the weights for each example of an order.

  Args:
    weights: float64[K], changed in place.
    examples: the training examples.
    order: int64[U], indices of `examples`.
    lock: a context that each update enters, such as a lock.
  """
  for index in order:
    keys, values, label = examples[index]
    with lock:
      prediction = 1 / (1 + np.exp(-(weights[keys] @ values)))
      weights[keys] -= _LEARNING_RATE * (prediction - label) * values


def _train_in_process(
  memory: Any, data: sparse.Sparse, part: slice, updates: int, lock: Any,
  barrier: Any,
) -> None:
  """Trains in a process on its part of an order of `updates` examples, which is
  the same for any number of processes. All processes wait at the barrier before
  and after the training."""
  examples = examples_of(data)
  rng = np.random.default_rng(0)
  order = rng.integers(len(examples), size=updates)[part]
  weights = np.frombuffer(memory)
  barrier.wait()
  train(weights, examples, order, lock or contextlib.nullcontext())
  barrier.wait()


def loss_of(
  weights: npt.NDArray[np.float64], examples: Sequence[Example]
) -> float:
  """Returns the mean log loss of the examples."""
  logits = np.array([weights[x.keys] @ x.values for x in examples])
  labels = np.array([x.label for x in examples])
  return float((np.logaddexp(0, logits) - labels * logits).mean())


def measure(
  data: sparse.Sparse, processes: int, updates: int, *, has_lock: bool
) -> tuple[float, float]:
  """Returns (updates per second, loss) of processes that share the updates.
  Raises ValueError if one of them fails."""
  context = multiprocessing.get_context("spawn")  # JAX has threads: no fork
  memory = context.RawArray("d", data.features)
  lock = context.Lock() if has_lock else None
  barrier = context.Barrier(processes + 1, timeout=_PATIENCE)
  parts = [slice(index, None, processes) for index in range(processes)]
  children = [
    context.Process(
      target=_train_in_process,
      args=(memory, data, part, updates, lock, barrier),
      daemon=True,  # they end with this process, also if it fails
    )
    for part in parts
  ]
  for child in children:
    child.start()
  try:
    barrier.wait()  # all have loaded their examples
    start = time.perf_counter()
    barrier.wait()
  except threading.BrokenBarrierError:
    raise ValueError(
      f"one of {processes} processes has failed, or took over {_PATIENCE:g} s"
    ) from None
  seconds = time.perf_counter() - start
  for child in children:
    child.join()
  loss = loss_of(np.frombuffer(memory), examples_of(data))
  return updates / seconds, loss


def run(report: BenchReport, rounds: int = 3) -> None:
  """Prints updates/s, and the loss after equally many updates, for each number
  of processes."""
  data = sparse.generated(_EXAMPLES, _FEATURES, nonzeros=20, relevant=200)
  cores = provenance.cores()
  contestants = {
    "1 process": (1, False),
    "2 processes": (2, False),
    "2 processes, a lock": (2, True),
    f"{2 * cores} processes": (2 * cores, False),
  }
  table = report.table(
    f"sparse logistic regression, {_UPDATES:,} updates of {_FEATURES:,} weights"
    " in shared memory",
    "processes",
    {"updates/s": ",.0f", "loss": ".4f"},
    {"speed / one process": ".2f", "loss / one process": ".4f"},
    width=10,
  )
  measurements = [
    [
      measure(data, processes, _UPDATES, has_lock=has_lock)
      for processes, has_lock in contestants.values()
    ]
    for _ in range(rounds)
  ]
  # By contestant: the rates and the losses of the rounds.
  results = np.transpose(measurements, (1, 2, 0))
  base_rates, base_losses = results[0]
  for name, (rates, final_losses) in zip(contestants, results, strict=True):
    ratios = (
      Measured(rates / base_rates),
      Measured(final_losses / base_losses, "<= 1.01"),
    )
    table.row(name, np.median(rates), np.median(final_losses), *ratios)
