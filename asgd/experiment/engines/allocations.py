"""The section `allocation` of a config: work by speed, as `asgd.allocation`.

The work of a worker is given, or follows from its speed: drawn in a simulation,
measured at the start of a live cell, which writes allocation.json to be resumed
and replayed.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from asgd import algorithms, problems
from asgd.allocation import Allocation, in_proportion
from asgd.checks import line_of, shown
from asgd.experiment import checks, storage
from asgd.experiment.schema import Run, Setting

EQUAL, SPEED = "equal", "speed"
_NUMBER = re.compile("[0-9]{1,9}")
_FILE = "allocation.json"  # in the folder of a live cell


def _shares(value: Any, key: str) -> str | list[int]:
  """Reads "equal", "speed" or a number for each worker."""
  if value in (EQUAL, SPEED):
    return value
  parts = value
  if isinstance(value, str):  # of a command line
    texts = [part.strip() for part in value.split(",")]
    parts = [int(x) if _NUMBER.fullmatch(x) else x for x in texts]
  listed = isinstance(parts, list) and parts
  if not listed or any(type(x) is not int or x < 1 for x in parts):
    raise ValueError(
      f"config.{key} must be {EQUAL!r}, {SPEED!r}, or a whole number from 1 for"
      f" each worker, not {shown(value)}"
    )
  return parts


SECTION: dict[str, Any] = {
  # Examples of a batch of workers 0, 1, ...; on average config.batch_size.
  "batch_size": Setting(EQUAL, _shares),
  # Batches of a job of workers 0, 1, ..., of recipes with steps at the worker;
  # on average those of the recipe.
  "steps": Setting(EQUAL, _shares),
  "jobs": Setting(4, checks.whole(1, 1000)),  # of each worker, to be timed
}


def _key_by_speed(run: Run) -> str | None:
  """The key that is to follow from speeds, if one is."""
  section = run.config["allocation"]
  keys = [key for key in ("batch_size", "steps") if section[key] == SPEED]
  if len(keys) == 2:
    raise ValueError(
      "config.allocation.batch_size and .steps are both 'speed', and work has"
      " one measure: make one of them 'equal', or a number for each worker"
    )
  return keys[0] if keys else None


def changes_batches(run: Run) -> bool:
  """Whether workers may have batches of different sizes."""
  return run.config["allocation"]["batch_size"] != EQUAL


def _divided(run: Run, recipe: algorithms.Recipe, workers: int, key: str):
  """Returns (what is divided among workers, the unit of each part)."""
  if key == "steps":
    if recipe.steps == 1:
      raise ValueError(
        f"config.allocation.steps is of recipes whose jobs are several batches,"
        f" and a job of {run.label} is one: give it steps (push_every), or use"
        " config.allocation.batch_size"
      )
    return recipe.steps * workers, 1
  live = run.config.get("live", {"parallel": None})
  unit = live["devices"] if live["parallel"] == "data" else 1
  return run.config["batch_size"] * workers, unit


def _given(run, recipe, workers, key, even) -> tuple[int, ...]:
  value = run.config["allocation"][key]
  if value in (EQUAL, SPEED):
    return (even,) * workers
  return _checked(run, recipe, workers, key, value)


def _checked(run, recipe, workers, key, value) -> tuple[int, ...]:
  """What workers get, of one key, as a tuple; ValueError if it does not fit."""
  total, unit = _divided(run, recipe, workers, key)
  name = f"config.allocation.{key}"
  if len(value) != workers:
    raise ValueError(
      f"{name} has {len(value)} numbers, and there are {workers} workers"
    )
  if sum(value) != total:
    of = "config.batch_size" if key == "batch_size" else "those of the recipe"
    raise ValueError(
      f"{name} comes to {sum(value)}, and {workers} times {of} is {total}: make"
      f" the two the same, so that {of} is the mean"
    )
  if uneven := [x for x in value if x % unit]:
    raise ValueError(
      f"{name}: config.live.devices {unit} must divide {uneven[0]}, or each"
      " device would do the whole batch"
    )
  return tuple(value)


def given(
  run: Run, recipe: algorithms.Recipe, problem: problems.Problem, workers: int
) -> Allocation | None:
  """Returns the allocation of a config, None if all get the same or it follows
  from speeds. ValueError for what does not fit, also what is to follow."""
  by_speed = _key_by_speed(run)
  sizes = _given(run, recipe, workers, "batch_size", run.config["batch_size"])
  steps = _given(run, recipe, workers, "steps", recipe.steps)
  if by_speed:
    _divided(run, recipe, workers, by_speed)
  if changes_batches(run):
    with checks.blame("allocation.batch_size"):
      problem.with_batch_size(max(sizes)).batches(0, workers)
      if by_speed == "batch_size":  # any other will do
        most = _most(run, problem, workers)
        sizes_tried = {min(2 * run.config["batch_size"], most)}
      else:
        sizes_tried = {*sizes} - {run.config["batch_size"]}
      for size in sorted(sizes_tried):
        _try_loss(problem, size)
  result = Allocation(sizes, steps)
  is_even = not result.by_steps and len(set(sizes)) == 1
  return None if by_speed or is_even else result


def _most(run, problem, workers) -> int:
  """The examples that there are for a batch."""
  most = problem.batches_per_epoch * run.config["batch_size"]
  if run.config["data"]["partition"] == "sharded":
    most //= workers
  return max(most, 1)


def _try_loss(problem, size) -> None:
  """Raises ValueError if the loss takes batches of one size only."""
  key = jax.random.key(0)
  batch = problem.with_batch_size(size).batches(0, 1)(0, 0)
  try:
    jax.eval_shape(problem.loss, jax.eval_shape(problem.init, key), batch, key)
  except Exception as error:  # whatever somebody's loss raises
    raise ValueError(
      f"the loss fails on a batch of {size} examples ({line_of(error, 250)}):"
      " it must take batches of any size, or all workers the same"
    ) from error


def unknown(plan: Any) -> bool:
  """Whether the allocation of a plan is still to follow from speeds."""
  return plan.allocation is None and _key_by_speed(plan.run) is not None


def by_seconds(plan: Any, seconds: Sequence[float]) -> Any:
  """Returns the plan of a cell with work for its workers by the time that one
  job, the same for all, took each."""
  run, workers, recipe = plan.run, plan.workers, plan.recipe
  key = _key_by_speed(run)
  total, unit = _divided(run, recipe, workers, key)
  most = None
  if key == "batch_size":
    most = _most(run, plan.problem, workers)
  speeds = [1 / each for each in seconds]
  parts = in_proportion(speeds, total, unit=unit, most=most)
  sizes = _given(run, recipe, workers, "batch_size", run.config["batch_size"])
  steps = _given(run, recipe, workers, "steps", recipe.steps)
  if key == "steps":
    steps = parts
  else:
    sizes = parts
  return dataclasses.replace(plan, allocation=Allocation(sizes, steps))


def write(folder: Path, allocation: Allocation) -> None:
  """Writes down what the workers of a live cell get."""
  value = storage.sealed(allocation._asdict())
  storage.write_json(folder / _FILE, value)


def read(plan: Any, folder: Path, *, begun: bool = False) -> Any:
  """Returns the plan of a live cell with the allocation in its folder; as it is
  if there is none yet. ValueError if that of a cell that has `begun` was
  changed or is gone."""
  path = folder / _FILE
  if not unknown(plan) or not (begun or path.exists()):
    return plan
  found = storage.read_sealed(path)
  if found is None:
    raise ValueError(
      f"{path} is gone or was changed, and says what the workers of the run"
      " got: put it back as the run wrote it, or start anew in another folder"
      " (--workdir)"
    )
  evens = plan.run.config["batch_size"], plan.recipe.steps
  keys = "batch_size", "steps"
  parts = []
  for key, even, field in zip(keys, evens, Allocation._fields, strict=True):
    arguments = plan.run, plan.recipe, plan.workers, key
    try:
      value = _shares(found.get(field), f"allocation.{key}")
      given = value == [even] * plan.workers
      parts.append(tuple(value) if given else _checked(*arguments, value))
    except ValueError as error:
      raise ValueError(f"{path} is not what the run wrote: {error}") from error
  return dataclasses.replace(plan, allocation=Allocation(*parts))


def describe(allocation: Allocation) -> str:
  """Returns what workers get in a few words."""
  many = allocation.steps if allocation.by_steps else allocation.batch_sizes
  what = "steps in a job" if allocation.by_steps else "examples in a batch"
  listed = ", ".join(map(str, many[:8])) + (", ..." if len(many) > 8 else "")
  return f"{what} of workers 0 to {len(many) - 1}: {listed}"
