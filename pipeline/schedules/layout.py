"""What families of schedules share: traits, checks of sizes, and the table that
the orders of devices lead to.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asgd import checks
from pipeline import analyze, validate
from pipeline import table as table_lib
from pipeline.table import BACKWARD, FORWARD, Schedule, Step, check_positive

Orders = list[list[Step | tuple[Step, Step]]]  # of each device

# What follows from the stages and microbatches of a run, not from its options.
_DERIVED = ("stages", "microbatches", "batches", "every", "costs", "name")


class Traits(NamedTuple):
  """What a schedule assumes where a run does not say otherwise."""

  options: tuple[str, ...]  # arguments of its maker that a run may set
  flush: bool = True  # whether its table is one update, after which it flushes
  weights: str = "stash"  # as in `analyze.versions`, of a table without a flush
  sums: bool = False  # whether an update is of a batch although none flushes
  listed: bool = False  # whether `devices` is a list, a device for each stage
  chunks: int = 1  # stages on a device, where `devices` is a number
  partitioner: str | None = None  # module of `pipeline.partition` to place it
  placed: str | None = None  # the option that follows from the partitioner


def traits(**values) -> Callable:
  """Declares the traits of the schedule that the decorated function makes; its
  options are the arguments that do not follow from stages and microbatches."""

  def declare(maker):
    derived = _DERIVED if values.get("listed") else (*_DERIVED, "devices")
    takes = inspect.signature(maker).parameters
    options = tuple(key for key in takes if key not in derived)
    maker.traits = Traits(options, **values)
    return maker

  return declare


def check_bool(name: str, value: bool) -> None:
  """Refuses what is not a bool."""
  if not isinstance(value, (bool, np.bool_)):
    raise ValueError(f"{name} must be True or False, not {value!r}")


def listed(value, length: int | None = None) -> list | None:
  """Returns a list of the items of an iterable that is no text, else None; also
  None if it is not of `length`."""
  try:
    items = list(value)
  except TypeError:
    return None
  fits = length is None or len(items) == length
  return items if fits and not isinstance(value, (str, bytes)) else None


def check_even(**numbers: int) -> None:
  """Refuses what is not a positive even number, by its name."""
  for name, value in numbers.items():
    check_positive(**{name: value})
    if value % 2:
      raise ValueError(
        f"{name} must be even, because half of them go each way, not {value};"
        f" use {value + 1}"
      )


def check_updates(microbatches: int, every: int) -> None:
  """Refuses microbatches that are not a whole number of updates."""
  check_positive(microbatches=microbatches, every=every)
  checks.multiple(microbatches, "microbatches", every, "updates of {}")


def synchronous(
  name: str, orders: Orders, microbatches: int, batches: int, limit=None
) -> Schedule:
  """Returns the valid table of a batch's orders, done once for each batch."""
  check_positive(batches=batches)

  def later(block, by):
    if not isinstance(block[0], str):
      return tuple(later(step, by) for step in block)
    return block[0], block[1], block[2] + by

  if batches > 1:
    starts = range(0, batches * microbatches, microbatches)
    orders = [
      [later(block, start) for start in starts for block in order]
      for order in orders
    ]
  return valid(name, orders, microbatches, flush=True, limit=limit)


def valid(
  name: str, orders: Orders, every: int, *, flush: bool = False, limit=None
) -> Schedule:
  """Returns the table of orders, checked; `limit` is of forwards in flight."""
  table = table_lib.lay_out(name, orders, every=every, flush=flush)
  return validate.validate(table, max_in_flight=limit)


def alternate(
  forwards: Sequence[Step], backwards: Sequence[Step], depth: int
) -> list[Step]:
  """Returns forwards until `depth` are in flight, then one backward and one
  forward in turn."""
  first = min(depth - 1, len(forwards))
  pairs = zip(forwards[first:], backwards, strict=False)
  turns = itertools.chain.from_iterable(pairs)
  return [*forwards[:first], *turns, *backwards[len(forwards) - first :]]


def one_f_one_b_order(
  stage: int, microbatches: Sequence[int], depth: int, backward: str = BACKWARD
) -> list[Step]:
  """Returns the order of a stage that holds at most `depth` microbatches."""
  forwards = [(FORWARD, stage, i) for i in microbatches]
  backwards = [(backward, stage, i) for i in microbatches]
  return alternate(forwards, backwards, depth)


def straight(
  depths: Sequence[int], microbatches: int, backward: str = BACKWARD
) -> Orders:
  """Returns the orders of stages that hold at most so many microbatches."""
  return [
    one_f_one_b_order(stage, range(microbatches), depth, backward)
    for stage, depth in enumerate(depths)
  ]


def places_of(devices, without_replicas: str = "") -> list[tuple[int, ...]]:
  """Returns the devices of each stage, checked; for the schedule of that name
  also that no stage has replicas."""
  whole = int, np.integer
  try:
    places = [
      (int(place),) if isinstance(place, whole) else tuple(place)
      for place in devices
    ]
    names = {device for place in places for device in place}
    if not all(isinstance(device, whole) for device in names):
      names = None
  except TypeError:
    names = None
  if not names or not all(places) or names != set(range(len(names))):
    raise ValueError(
      "devices must be the device of each stage, or those of its replicas, and"
      f" name all from 0, not {devices!r}"
    )
  if without_replicas and any(len(place) > 1 for place in places):
    raise ValueError(f"{without_replicas} has no replicas: devices={devices!r}")
  return places


def stages_of(places: Sequence[Sequence[int]]) -> list[list[int]]:
  """Returns the stages of each device, the last one first."""
  out = [[] for _ in range(1 + max(map(max, places)))]
  for stage in reversed(range(len(places))):
    for device in sorted(set(places[stage])):
      out[device].append(stage)
  return out


def costs_of(costs: analyze.Costs | None, stages: int) -> analyze.Costs:
  """Returns costs of that many stages; None is those of `analyze.costs`."""
  if costs is None:
    return analyze.costs(stages)
  if len(costs.forward) != stages:
    raise ValueError(
      f"costs are of {len(costs.forward)} stages, and there are {stages}"
    )
  return costs
