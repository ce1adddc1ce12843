"""Settings that the recipe of a run has no use for."""

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
