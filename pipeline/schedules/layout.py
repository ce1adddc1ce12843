"""Shared code of the schedules: traits, checks of sizes, orders of devices, and
the table of these orders.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from asgd import checks
from asgd.pipeline import analyze, validate
from asgd.pipeline import table as table_lib
from asgd.pipeline.table import (
  BACKWARD,
  FORWARD,
  Schedule,
  Step,
  check_positive,
)

# For each device, its steps and pairs of steps that overlap.
Orders = list[list[Step | tuple[Step, Step]]]
Maker = TypeVar("Maker")  # the function that makes a table

# Arguments that a run's stages and microbatches determine, not its options.
_DERIVED = ("stages", "microbatches", "batches", "every", "costs", "name")


class Traits(NamedTuple):
  """Properties and defaults of a schedule for its runs."""

  options: tuple[str, ...]  # arguments of its maker that a run may set
  flush: bool = True  # whether all stages are updated at the end of a batch
  weights: str = "stash"  # as in `analyze.versions`, of a table without a flush
  recompute: bool | str = False  # as in `recompute_of`
  # Whether rates and weights follow from stages' delays (`discrepancy`).
  corrected: bool = False
  sums: bool = False  # whether an update is of a batch also without a flush
  listed: bool = False  # whether `devices` is a list, a device for each stage
  chunks: int = 1  # stages on a device in a run that does not set them
  partitioner: str | None = None  # module of `partition` that cuts it


def traits(**values: Any) -> Callable[[Maker], Maker]:
  """Declares the traits (fields of `Traits`) of the schedule that the decorated
  function makes. Its options are the arguments that do not follow from stages
  and microbatches.

  Example:
    >>> @traits(chunks=2)
    ... def mine(devices, microbatches, *, reverse=False):
    ...   ...
    >>> mine.traits.options, mine.traits.chunks
    (('reverse',), 2)
  """

  def declare(maker):
    derived_keys = _DERIVED if values.get("listed") else (*_DERIVED, "devices")
    parameters = inspect.signature(maker).parameters
    options = tuple(key for key in parameters if key not in derived_keys)
    maker.traits = Traits(options, **values)
    return maker

  return declare


def listed(value: Any, length: int | None = None) -> list[Any] | None:
  """Returns the items of an iterable with `length` items (None: any number), or
  None for a text and for other values.

  Example:
    >>> listed((1, 2)), listed((1, 2), 3), listed("12"), listed(12)
    ([1, 2], None, None, None)
  """
  try:
    items = list(value)
  except TypeError:
    return None
  has_length = length is None or len(items) == length
  return items if has_length and not isinstance(value, (str, bytes)) else None


def check_updates(microbatches: int, every: int) -> None:
  """Raises ValueError unless `every` divides the microbatches."""
  check_positive(microbatches=microbatches, every=every)
  checks.multiple(microbatches, "microbatches", every, "updates of {}")


def synchronous(
  name: str,
  orders: Orders,
  microbatches: int,
  batches: int,
  limit: int | None = None,
) -> Schedule:
  """Returns the valid table of a batch's orders, done once for each batch.

  Args:
    name: the name of the schedule.
    orders: for each device, the steps of the first batch.
    microbatches: the number of microbatches of a batch, which is one update.
    batches: number of consecutive batches.
    limit: the most forwards in flight on a device; None: no limit.

  Raises:
    ValueError: for orders that cannot be run, with the cell marked.

  Example:
    >>> orders = [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    >>> table = synchronous("mine", orders, microbatches=1, batches=2)
    >>> print(table_lib.to_text(table), end="")
    # mine; every 1; flush
    0 | F0 .  .  B0 F1 .  .  B1
    1 | .  F0 B0 .  .  F1 B1 .
  """
  check_positive(batches=batches)

  def shift(block, offset):
    if not isinstance(block[0], str):
      return tuple(shift(step, offset) for step in block)
    return block[0], block[1], block[2] + offset

  if batches > 1:
    starts = range(0, batches * microbatches, microbatches)
    orders = [
      [shift(block, start) for start in starts for block in order]
      for order in orders
    ]
  return valid(name, orders, microbatches, flush=True, limit=limit)


def valid(
  name: str,
  orders: Orders,
  every: int,
  *,
  flush: bool = False,
  limit: int | None = None,
) -> Schedule:
  """Lays out the orders of devices as a table, validates and returns it.
  Arguments are those of `synchronous` and `table.lay_out`."""
  table = table_lib.lay_out(name, orders, every=every, flush=flush)
  return validate.validate(table, max_in_flight=limit)


def alternate(
  forwards: Sequence[Step], backwards: Sequence[Step], depth: int
) -> list[Step]:
  """Returns 1F1B: `depth` - 1 forwards first, then one forward and one backward
  in turn, so that `depth` forwards are in flight at the most.

  Example:
    >>> "".join(alternate("abc", "ABC", depth=2))
    'abAcBC'
  """
  # Warm-up: forwards that no backward follows yet.
  n_warm_up = min(depth - 1, len(forwards))
  pairs = zip(forwards[n_warm_up:], backwards, strict=False)
  turns = itertools.chain.from_iterable(pairs)
  drain = backwards[len(forwards) - n_warm_up :]
  return [*forwards[:n_warm_up], *turns, *drain]


def one_f_one_b_order(
  stage: int, microbatches: Sequence[int], depth: int, backward: str = BACKWARD
) -> list[Step]:
  """Returns the 1F1B order of a stage that holds `depth` microbatches at the
  most; `backward` is B or I."""
  forwards = [(FORWARD, stage, i) for i in microbatches]
  backwards = [(backward, stage, i) for i in microbatches]
  return alternate(forwards, backwards, depth)


def straight(
  depths: Sequence[int], microbatches: int, backward: str = BACKWARD
) -> Orders:
  """Returns the 1F1B orders of stages of these depths, one on each device."""
  return [
    one_f_one_b_order(stage, range(microbatches), depth, backward)
    for stage, depth in enumerate(depths)
  ]


def places_of(
  devices: Sequence[Any], without_replicas: str = ""
) -> list[tuple[int, ...]]:
  """Returns the devices of each stage, checked.

  Args:
    devices: of each stage its device, or those of its replicas.
    without_replicas: the name of a schedule that has none.

  Raises:
    ValueError: for devices that are not named from 0, or replicas that may not
      be.

  Example:
    >>> places_of([0, (1, 2), 0])
    [(0,), (1, 2), (0,)]
  """
  integer = int, np.integer
  try:
    places = [
      (int(replicas),) if isinstance(replicas, integer) else tuple(replicas)
      for replicas in devices
    ]
    names = {device for replicas in places for device in replicas}
    if not all(isinstance(device, integer) for device in names):
      names = None
  except TypeError:
    names = None
  if not names or not all(places) or names != set(range(len(names))):
    raise ValueError(
      "devices must be the device of each stage, or those of its replicas, and"
      f" name all from 0, not {devices!r}"
    )
  if without_replicas and any(len(replicas) > 1 for replicas in places):
    raise ValueError(f"{without_replicas} has no replicas: devices={devices!r}")
  return places


def stages_of(places: Sequence[Sequence[int]]) -> list[list[int]]:
  """Returns the stages of each device, the last one first.

  Example:
    >>> stages_of([(0,), (1, 2), (0,)])
    [[2, 0], [1], [1]]
  """
  out = [[] for _ in range(1 + max(map(max, places)))]
  for stage in reversed(range(len(places))):
    for device in sorted(set(places[stage])):
      out[device].append(stage)
  return out


def costs_of(costs: analyze.Costs | None, stages: int) -> analyze.Costs:
  """Returns costs, checked, by default those of `analyze.costs`."""
  if costs is None:
    return analyze.costs(stages)
  analyze.check_costs(costs, stages)
  return costs
