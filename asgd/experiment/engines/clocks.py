"""The section `durations` of a config: times that are drawn, read from a file,
computed for a model that is divided among machines, or given by a user."""

import csv
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from asgd import checks, models, names
from asgd.allocation import Allocation
from asgd.checks import shown
from asgd.experiment import refusals
from asgd.experiment.checks import MOST_NUMBER
from asgd.experiment.schema import GIVEN_MARK, Run
from asgd.orders import durations, phases
from asgd.orders.network import Network
from asgd.parallel import partitions

HEADER = ["worker", "seconds"]  # of a file of times


def build(name: str, **options: Any) -> durations.Durations:
  """Builds durations by name: `recorded`, `partitioned`, MODULE:FUNCTION, or a
  name of `asgd.orders.durations.build`. Raises the errors of that function.

  A user's function gets the options as arguments, and `seed` if it takes one.
  It returns times in a form of `as_durations`.
  """
  local_makers = {maker.__name__: maker for maker in (recorded, partitioned)}
  if not isinstance(name, str):
    raise ValueError(
      f"name must be a text, such as 'homogeneous', not {shown(name)}"
    )
  if names.is_import(name):
    maker = names.import_function("durations", name)
    # A user's function need not take a seed.
    if "seed" not in inspect.signature(maker).parameters:
      options.pop("seed", None)
    with checks.user_code(f"{name} fails", passes=(ValueError,)):
      return as_durations(names.call("durations", name, maker, options))
  names.check("durations", name, (*durations.NAMES, *local_makers))
  if name not in local_makers:
    return durations.build(name, **options)
  return names.call(
    # `options` may have another seed.
    "durations", name, local_makers[name], {"seed": 0, **options}
  )


def as_durations(value: Any) -> durations.Durations:
  """Reads durations that a user gives: Durations, a function (worker) -> times,
  or numbers that `durations.of_each` takes. Raises ValueError for another form.
  """
  if isinstance(value, durations.Durations):
    return value
  if callable(value):
    return durations.of_stream(value)
  if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
    times: Any = value  # numbers, or a list of numbers for each worker
    return durations.of_each(times)
  raise ValueError(
    "durations must be the seconds of each worker, as [1, 1, 1, 3], a function"
    f" (worker) -> seconds of its jobs, or Durations, not {shown(value)}"
  )


def run_durations(run: Run, seed: int) -> durations.Durations:
  """Returns the durations of a run with a seed."""
  section = run.config["durations"]
  if section["name"] != GIVEN_MARK:
    return build(**{"seed": seed, **section})
  return as_durations(refusals.given_object(run, "durations"))


def job_durations(
  run: Run, seed: int, steps: int, allocation: Allocation | None
) -> durations.Durations:
  """Returns the durations of jobs: the sum over a job's batches, each in
  proportion to its examples.

  Args:
    run: the run.
    seed: the seed of the cell.
    steps: batches of a job, unless an allocation is given.
    allocation: the workers' shares; None: all are equal.
  """
  times = run_durations(run, seed)
  # The time of a job is the time of its one batch.
  if steps == 1 and allocation is None:
    return times

  def stream(worker: int) -> Iterator[float]:
    """Yields the times of a worker's jobs."""
    batches = times.stream(worker)
    n_batches = allocation.steps[worker] if allocation else steps
    batch_size = allocation.batch_sizes[worker] if allocation else 1
    # A worker with twice the examples in a batch takes twice as long.
    size_ratio = batch_size / run.config["batch_size"] if allocation else 1.0
    # `fsum` rounds once, whatever the count of batches.
    while True:
      yield size_ratio * math.fsum(itertools.islice(batches, n_batches))

  return durations.Durations(stream)


def check(run: Run) -> None:
  """Raises ValueError if a run's durations cannot be built, or if the first
  time of a worker is too long. Later times are unknown until they are drawn."""
  section, workers = run.config["durations"], max(run.config["workers"])
  times = run_durations(run, 0)
  if section["name"] == partitioned.__name__:
    return  # `partitioned` has checked the slowest possible step
  for worker in range(workers):
    _check_time(next(times.stream(worker)))


def _check_time(time: float) -> None:
  """Raises ValueError for a time that is negative, NaN or too long."""
  # `not` also finds NaN.
  if not 0 <= time <= MOST_NUMBER:
    raise ValueError(f"a job may take at most {MOST_NUMBER:g}")


def recorded(
  path: str, *, resample: bool = False, seed: int = 0
) -> durations.Durations:
  """Times from a file, such as the durations.csv that `asgd compare` writes.

  Args:
    path: the path of a CSV file with the columns worker and seconds, and a row
      for each job, in the order of a worker's jobs. Worker i uses the times of
      worker i mod n of the n workers in the file, and repeats them.
    resample: whether times are drawn from these at random, with replacement.
    seed: the seed of the draws.

  Raises:
    ValueError: for a file that cannot be read, naming the line.
  """
  seconds_by_worker: dict[int, list[float]] = {}
  try:
    with Path(path).open(newline="") as file:
      reader = csv.reader(file)
      header = next(reader, None)
      if header != HEADER:
        raise ValueError(
          f"path {shown(path)}: line 1 must be {','.join(HEADER)!r}, not"
          f" {shown(','.join(header or []))}"
        )
      for fields in reader:
        worker, seconds = _parse_row(path, reader.line_num, fields)
        # Workers may alternate in the file; each keeps its order.
        seconds_by_worker.setdefault(worker, []).append(seconds)
  except (OSError, TypeError, UnicodeDecodeError, csv.Error) as error:
    raise ValueError(
      f"path {shown(path)} cannot be read as times ({checks.text_of(error)}):"
      " give a CSV file, as asgd compare writes it (durations.csv)"
    ) from None
  if not seconds_by_worker:
    raise ValueError(f"path {shown(path)} holds no time")
  # The workers of a file need not be 0, 1, ...: sorted, worker i is the i-th.
  samples = [seconds_by_worker[worker] for worker in sorted(seconds_by_worker)]
  return durations.measured(samples, resample=resample, seed=seed)


def _parse_row(
  path: str, line_number: int, row: Sequence[str]
) -> tuple[int, float]:
  """Returns (worker, seconds) of a row in a file of times. Raises ValueError if
  the row has another form."""
  try:
    worker, seconds = int(row[0]), float(row[1])
    # inf would stop the simulated clock.
    if len(row) == len(HEADER) and worker >= 0 and 0 < seconds < float("inf"):
      return worker, seconds
  except (ValueError, IndexError):
    pass
  raise ValueError(
    f"path {shown(path)}: line {line_number} must be a worker from 0 and a"
    f" positive time, not {shown(','.join(row))}"
  )


def partitioned(
  model: Mapping[str, Any],
  inputs: Sequence[int],
  classes: int,
  machines: int,
  flops: float,
  bandwidth: float,
  *,
  batch_size: int = 100,
  latency: float = 0.0,
  service: float = 0.0,
  mean: float = 1.0,
  variation: float = 0.1,
  seed: int = 0,
) -> durations.Durations:
  """Returns the times of a replica that divides its model among machines.

  `asgd.orders.phases.partitioned` computes them from the shapes of a model, in
  units of the mean time on one machine. Only shapes are used, so the model may
  be larger than the trained one and than this machine's memory.

  Args:
    model: name and options, as in the section `model`.
    inputs: shape of an example, as (440,) or (100, 100, 3).
    classes: number of classes, and so of logits.
    machines: machines per replica, at most 256.
    flops: floating-point operations per second of a machine.
    bandwidth: bytes per second of a machine's link, each way.
    batch_size: examples of a step.
    latency: seconds of a message, one way.
    service: seconds for which each received message occupies a machine.
    mean: the mean time of a step on one machine, in any unit of time.
    variation: V of the time of a machine in a phase.
    seed: the seed of the draws.

  Raises:
    ValueError: for a model that cannot be divided, or a value out of range.
  """
  checks.positive("bandwidth", bandwidth)
  checks.integer("batch_size", batch_size)
  for size in inputs:
    checks.integer("inputs", size)
  if "name" not in model:
    raise ValueError(f"model needs a name, as in config.model: {shown(model)}")
  # The options are those of the section `model`.
  options = {key: value for key, value in model.items() if key != "name"}
  # `phases` refuses a model that is not a tuple of layers.
  layers: Any = models.build(model["name"], classes, **options)
  # A shape is enough: no layer is computed, and no parameter is allocated.
  example = jax.ShapeDtypeStruct((batch_size, *inputs), "float32")
  machine_phases = partitions.phases(layers, example, machines)
  network = Network(
    latency=latency, up=bandwidth, port=bandwidth, service=service
  )
  # The slowest possible step, before any time is drawn.
  _check_time(mean * phases.most_seconds(machine_phases, network, flops=flops))
  return phases.partitioned(
    machine_phases,
    network,
    flops=flops,
    mean=mean,
    variation=variation,
    seed=seed,
  )
