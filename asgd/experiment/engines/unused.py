"""Settings that the recipe of a run has no use for."""

from collections.abc import Mapping
from typing import Any

from asgd import names, orders
from asgd.checks import shown
from asgd.experiment import checks
from asgd.experiment.schema import Run


def recipe_of(run: Run) -> str:
  """Returns how an error names the recipe of a run."""
  if run.given is not None:
    return "this recipe"
  return f"the recipe {run.recipe!r} (config.runs.{run.label})"


def others(run: Run) -> str:
  """Returns the other remedy for a setting that a run has no use for, if it is
  of a config, whose other runs may have it."""
  if run.given is not None:
    return ""
  return ", or set it in the entries of other runs alone"


def refuse(run: Run, reasons: Mapping[str, str]) -> None:
  """Raises ValueError for settings that a config names and a recipe has no use
  for: `reasons` says of each key why."""
  for key, why in reasons.items():
    _refuse(run, key, run.config[key], why)


def refuse_gates(run: Run, why: str) -> None:
  """The same, of staleness that is refused and of work by speed, which are of
  messages of gradients to a server."""
  for section, key in (("gate", "max_staleness"), ("allocation", "name")):
    _refuse(run, f"{section}.{key}", run.config[section].get(key), why)


def _refuse(run: Run, key: str, value: Any, why: str) -> None:
  if value is not None:
    raise ValueError(
      f"config.{key} {value!r} is not for the recipe {run.recipe}"
      f" (config.runs.{run.label}): {why}; drop it"
    )


def check_order(run: Run, own: str) -> None:
  """Raises ValueError if a config asks for another order than that of a recipe
  made for one of its own."""
  order = run.config["order"]
  with checks.blame("order", ("name",)):
    names.check("order", order["name"], orders.makers.NAMES)
  given = {key: value for key, value in order.items() if key != "name"}
  if not given and order["name"] in ("asynchronous", own):
    return
  key, value = next(iter(given.items()), ("name", order["name"]))
  raise ValueError(
    f"config.order.{key} {shown(value)} is not for {recipe_of(run)},"
    f" which has an order of its own ({own}): leave it out{others(run)}"
  )
