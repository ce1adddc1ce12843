"""The budget of a cell in batches, and its learning rate in updates.

Epochs and examples of a config become updates of the engine.
"""

from collections.abc import Mapping
from typing import Any

from asgd import problems, rates
from asgd.experiment import build_cache, checks
from asgd.experiment.schema import SHARED_KEYS, Run, default_of


def budget_batches(run: Run, problem: problems.Problem) -> float:
  """Returns the budget of a cell, in batches."""
  examples = run.config["examples"]
  if examples is not None:
    return examples / run.config["batch_size"]
  return run.config["epochs"] * problem.batches_per_epoch


def schedule(
  run: Run,
  problem: problems.Problem,
  *,
  peak: float,
  batches: int,
  start: float,
  steps: int = 1,
) -> Any:
  """Returns the learning rate of a run, a float or a function of the update.

  In the warm-up the rate rises from `start` to `peak`. An update is made from
  `batches` batches, and a message from `steps`. Raises ValueError, naming the
  key, if the schedule drops inside the warm-up.
  """
  recipe = run.given_recipe
  given_rate = recipe and recipe.build and recipe.build.learning_rate
  if callable(given_rate):
    # A caller's schedule is only scaled, if `peak` is not its peak.
    factor = peak / float(run.config["learning_rate"])
    return (
      given_rate if factor == 1 else lambda update: factor * given_rate(update)
    )
  config_keys = "learning_rate_schedule", "batch_size", "epochs", "examples"
  values = [run.config[key] for key in config_keys]
  return _schedule_cache.get(
    lambda: _build_schedule(run, problem, peak, batches, start, steps),
    *([*values, peak, batches, start, steps], problem.batches_per_epoch),
  )


_schedule_cache = build_cache.BuildCache()
_OF_STEPS = "decay_epochs", "decay_examples", "decay_factor"


def _refuse_unused(section: Mapping[str, Any]) -> None:
  """Raises ValueError for a key that the named schedule does not read."""
  name, unused = section["name"], {"count"}
  if name != rates.STEPS:
    unused = {*_OF_STEPS} - {*rates.arguments(name)}
  defaults = default_of(SHARED_KEYS["learning_rate_schedule"])
  for key in sorted(unused):
    if section[key] != defaults[key]:
      raise ValueError(f"{key} is not for the schedule {name!r}: drop it")


def _build_schedule(
  run: Run,
  problem: problems.Problem,
  peak: float,
  batches: int,
  start: float,
  steps: int,
) -> Any:
  """Builds the rate that `schedule` caches."""
  section = run.config["learning_rate_schedule"]
  # Updates per epoch, and updates per example.
  per_epoch = problem.batches_per_epoch / batches
  per_example = 1 / (run.config["batch_size"] * batches)
  with checks.prefix_errors("learning_rate_schedule"):
    _refuse_unused(section)
    for name in ("warmup", "decay"):
      if section[f"{name}_epochs"] and section[f"{name}_examples"]:
        raise ValueError(
          f"{name}_epochs and {name}_examples say the same thing; drop one"
        )
    # Both lists become updates; at most one of them has entries.
    drops = [round(e * per_epoch) for e in section["decay_epochs"]]
    drops += [round(e * per_example) for e in section["decay_examples"]]
    warmup = round(section["warmup_epochs"] * per_epoch)
    warmup += round(section["warmup_examples"] * per_example)
    last_update = max([warmup, *drops])
    if last_update > checks.MOST_INTEGER:
      raise ValueError(
        f"{last_update:.3g} updates are more than can be counted"
      )
    if section["name"] != rates.STEPS:
      units = {"epochs": per_epoch, "messages": steps / batches, "updates": 1.0}
      # The named schedule covers the updates after the warm-up.
      updates = max(round(budget_batches(run, problem) / batches) - warmup, 1)
      rate = rates.named(
        *(section["name"], peak),
        updates=updates,
        unit=units[section["count"]],
        options={
          key: section[key]
          for key in rates.arguments(section["name"])
          if key in section
        },
      )
      first_rate: Any = rate(0)  # a float, or an array of JAX
      return rates.after_warmup(rate, first_rate, warmup=warmup, start=start)
    return rates.warmup_steps(
      peak,
      warmup=warmup,
      start=start,
      boundaries=drops,
      factor=float(section["decay_factor"]),
    )
