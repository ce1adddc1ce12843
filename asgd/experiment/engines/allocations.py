"""The section `allocation` of a config: each worker's share of the work.

A worker's share is given, or follows from its speed (`asgd.allocation`). The
speed is drawn in a simulation and measured at the start of a live cell. A live
cell writes its allocation to allocation.json, for resumes and replays.
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
from asgd.data import partitions
from asgd.experiment import checks, storage
from asgd.experiment.schema import Run, Setting

EQUAL, SPEED = "equal", "speed"
_WHOLE_NUMBER = re.compile("[0-9]{1,9}")
_SHARE_CHECK = checks.whole_number(1)
_FILE = "allocation.json"  # in the folder of a live cell


@checks.with_schema(
  anyOf=[
    {"enum": [EQUAL, SPEED]},
    {"type": "array", "minItems": 1, "items": checks.schema_of(_SHARE_CHECK)},
  ]
)
def _read_shares(value: Any, key: str) -> str | list[int]:
  """Checks "equal", "speed" or a number for each worker."""
  if value in (EQUAL, SPEED):
    return value
  numbers = value
  if isinstance(value, str):  # from a command line
    texts = [part.strip() for part in value.split(",")]
    numbers = [int(x) if _WHOLE_NUMBER.fullmatch(x) else x for x in texts]
  # `type(x) is not int`: True is an int for Python, and no number of examples.
  is_list = isinstance(numbers, list) and numbers
  if not is_list or any(type(x) is not int or x < 1 for x in numbers):
    raise ValueError(
      f"config.{key} must be {EQUAL!r}, {SPEED!r}, or a whole number from 1 for"
      f" each worker, not {shown(value)}"
    )
  return numbers


SECTION: dict[str, Any] = {
  # Examples in a batch of workers 0, 1, ...; their mean is config.batch_size.
  "batch_size": Setting(EQUAL, _read_shares),
  # Batches in a job of workers 0, 1, ..., for recipes with local steps; their
  # mean is the recipe's steps.
  "steps": Setting(EQUAL, _read_shares),
  "jobs": Setting(4, checks.whole_number(1, 1000)),  # timed jobs per worker
}


def _key_by_speed(run: Run) -> str | None:
  """Returns the key with the value "speed", if one has it."""
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
  return bool(run.config["allocation"]["batch_size"] != EQUAL)


def _total_and_unit(
  run: Run, recipe: algorithms.Recipe, workers: int, key: str
) -> tuple[int, int]:
  """Returns (total that is divided among workers, unit of each part)."""
  if key == "steps":
    if recipe.steps == 1:
      raise ValueError(
        "config.allocation.steps is for recipes with several batches in a job,"
        f" and a job of {run.label} is one batch: give it steps (push_every),"
        " or use config.allocation.batch_size"
      )
    return recipe.steps * workers, 1
  live_section = run.config.get("live", {"parallel": None})
  # With data parallelism a worker's devices share its batch evenly.
  unit = live_section["devices"] if live_section["parallel"] == "data" else 1
  return run.config["batch_size"] * workers, unit


def _worker_values(
  run: Run, recipe: algorithms.Recipe, workers: int, key: str, even_share: int
) -> tuple[int, ...]:
  """Returns the workers' values of a key; by default each has `even_share`."""
  value = run.config["allocation"][key]
  # Values that follow from speed are not known yet: use the even share.
  if value in (EQUAL, SPEED):
    return (even_share,) * workers
  return _check_values(run, recipe, workers, key, value)


def _check_values(
  run: Run,
  recipe: algorithms.Recipe,
  workers: int,
  key: str,
  value: Sequence[int],
) -> tuple[int, ...]:
  """Returns the workers' values of a key as a tuple. Raises ValueError if their
  number or their sum is wrong."""
  total, unit = _total_and_unit(run, recipe, workers, key)
  name = f"config.allocation.{key}"
  if len(value) != workers:
    raise ValueError(
      f"{name} has {len(value)} numbers, and there are {workers} workers"
    )
  if sum(value) != total:
    mean = "config.batch_size" if key == "batch_size" else "the recipe's steps"
    raise ValueError(
      f"{name} has the sum {sum(value)}, and {workers} times {mean} is {total}:"
      f" make the two equal, so that the mean is {mean}"
    )
  if uneven := [x for x in value if x % unit]:
    raise ValueError(
      f"{name}: config.live.devices {unit} must divide {uneven[0]}, or each"
      " device would do the whole batch"
    )
  return tuple(value)


def configured_allocation(
  run: Run, recipe: algorithms.Recipe, problem: problems.Problem, workers: int
) -> Allocation | None:
  """Returns the allocation of a config; None if all workers have equal shares,
  or shares follow from speeds. Raises ValueError if a value does not fit, also
  for shares that will follow from speeds."""
  speed_key = _key_by_speed(run)
  sizes = _worker_values(
    run, recipe, workers, "batch_size", run.config["batch_size"]
  )
  steps = _worker_values(run, recipe, workers, "steps", recipe.steps)
  if speed_key:
    _total_and_unit(run, recipe, workers, speed_key)
  # Check that the problem makes batches of these sizes, and that the loss takes
  # them.
  if changes_batches(run):
    with checks.prefix_errors("allocation.batch_size"):
      problem.with_batch_size(max(sizes)).batches(0, workers)
      # Any size may follow from speeds, so one other size is tried.
      if speed_key == "batch_size":
        max_size = _max_examples(run, problem, workers)
        sizes_tried = {min(2 * run.config["batch_size"], max_size)}
      else:
        sizes_tried = {*sizes} - {run.config["batch_size"]}
      for size in sorted(sizes_tried):
        _try_loss(problem, size)
  result = Allocation(sizes, steps)
  # No allocation is needed if all workers have equal shares.
  is_even = not result.by_steps and len(set(sizes)) == 1
  return None if speed_key or is_even else result


def _max_examples(run: Run, problem: problems.Problem, workers: int) -> int:
  """Returns the most examples that a batch can have."""
  # A batch cannot have more examples than a worker has in an epoch.
  max_examples = problem.batches_per_epoch * run.config["batch_size"]
  if partitions.divides(run.config["data"]["partition"]):
    max_examples //= workers
  return max(max_examples, 1)


def _try_loss(problem: problems.Problem, size: int) -> None:
  """Raises ValueError if the loss takes batches of one size only."""
  key = jax.random.key(0)
  batch = problem.with_batch_size(size).batches(0, 1)(0, 0)  # worker 0, job 0
  try:
    # Shapes alone are computed, which takes no time.
    jax.eval_shape(problem.loss, jax.eval_shape(problem.init, key), batch, key)
  except Exception as error:  # a user's loss may raise any type
    raise ValueError(
      f"the loss fails on a batch of {size} examples ({line_of(error, 250)}):"
      " it must take batches of any size, or all workers the same"
    ) from error


def awaits_speeds(plan: Any) -> bool:
  """Whether a plan's allocation will follow from speeds that are not known."""
  return plan.allocation is None and _key_by_speed(plan.run) is not None


def with_shares_by_speed(plan: Any, seconds: Sequence[float]) -> Any:
  """Returns the plan of a cell with shares in proportion to speed. `seconds`
  are the times that each worker took for equal jobs."""
  run, workers, recipe = plan.run, plan.workers, plan.recipe
  key = _key_by_speed(run)
  assert key is not None, "`awaits_speeds` asks for speeds only then"
  # Only one of the two keys follows from the speeds; the other is given.
  total, unit = _total_and_unit(run, recipe, workers, key)
  # A share by steps has no limit; one by examples must not exceed a worker's
  # data.
  max_share = None
  if key == "batch_size":
    max_share = _max_examples(run, plan.problem, workers)
  # Speed is jobs per second; all workers did equal jobs.
  speeds = [1 / time for time in seconds]
  proportional_shares = in_proportion(speeds, total, unit=unit, most=max_share)
  sizes = _worker_values(
    run, recipe, workers, "batch_size", run.config["batch_size"]
  )
  steps = _worker_values(run, recipe, workers, "steps", recipe.steps)
  if key == "steps":
    steps = proportional_shares
  else:
    sizes = proportional_shares
  return dataclasses.replace(plan, allocation=Allocation(sizes, steps))


def write(folder: Path, allocation: Allocation) -> None:
  """Writes the allocation of a live cell to its folder."""
  value = storage.sealed(allocation._asdict())
  storage.write_json(folder / _FILE, value)


def read(plan: Any, folder: Path, *, begun: bool = False) -> Any:
  """Returns the plan of a live cell with the allocation in its folder; the plan
  itself if there is none yet. Raises ValueError if the file of a cell that has
  `begun` is missing or was changed."""
  path = folder / _FILE
  # An allocation of the config needs no file, nor does a cell that is new.
  if not awaits_speeds(plan) or not (begun or path.exists()):
    return plan
  fields = storage.read_sealed(path)
  if fields is None:
    raise ValueError(
      f"{path}, the allocation of the run, is missing or was changed: restore"
      " it as the run wrote it, or start in another folder (--workdir)"
    )
  even_shares = plan.run.config["batch_size"], plan.recipe.steps
  keys = "batch_size", "steps"
  shares_by_field = []
  for key, even_share, field in zip(
    keys, even_shares, Allocation._fields, strict=True
  ):
    arguments = plan.run, plan.recipe, plan.workers, key
    try:
      # The numbers in the file get the same checks as those of a config.
      value = _read_shares(fields.get(field), f"allocation.{key}")
      is_even = value == [even_share] * plan.workers
      shares_by_field.append(
        tuple(value) if is_even else _check_values(*arguments, value)
      )
    except ValueError as error:
      raise ValueError(f"{path} is not what the run wrote: {error}") from error
  return dataclasses.replace(plan, allocation=Allocation(*shares_by_field))


def describe(allocation: Allocation) -> str:
  """Returns the shares of workers in a few words."""
  # One of the two is equal for all workers; the other is described.
  shares = allocation.steps if allocation.by_steps else allocation.batch_sizes
  unit = "steps in a job" if allocation.by_steps else "examples in a batch"
  ellipsis = ", ..." if len(shares) > 8 else ""  # the first eight
  first_shares = ", ".join(map(str, shares[:8])) + ellipsis
  return f"{unit} of workers 0 to {len(shares) - 1}: {first_shares}"
