"""Keys of a config that the protocol of a run has no use for.

Each protocol has its rows (`protocol.Refusal`); one function reads them, and
the reference prints them as a table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from asgd.checks import shown
from asgd.experiment import schema
from asgd.experiment.protocol import Protocol
from asgd.experiment.schema import Run

OPTIONS = "recipe."  # before a key that is an option of the recipe


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


def _given(
  key: str, run: Run, sections: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
  """Yields the keys, as a config names them, and values that a run has set of
  what a refusal names."""
  if key.startswith(OPTIONS):
    option = key.removeprefix(OPTIONS)
    if option in run.options:
      yield f"runs.{run.label}.{option}", run.options[option]
    return
  section, _, inner = key.partition(".")
  known = {**schema.SHARED, **sections}
  if section not in known:
    return
  value, default = run.config[section], schema.default_of(known[section])
  if not isinstance(known[section], (dict, schema.Open, schema.Section)):
    if value != default:
      yield section, value
    return
  for name, each in value.items():
    if inner in ("", name) and each != default.get(name):
      yield f"{section}.{name}", each


def check(
  run: Run, protocol: Protocol, engine: str, sections: Mapping[str, Any]
) -> None:
  """Raises ValueError for a key that a run sets and its protocol refuses.

  Args:
    run: of a config.
    protocol: of the run.
    engine: by whose name refusals know it; a variant may have another.
    sections: of the engine.
  """
  for refusal in protocol.refusals:
    if not refusal.engines or engine in refusal.engines:
      for key, value in _given(refusal.key, run, sections):
        if not refusal.values or value in refusal.values:
          remedy = refusal.remedy.format(value=value, label=run.label)
          where = f" on engine {run.engine!r}" if refusal.engines else ""
          raise ValueError(
            f"config.{key} {shown(value)} is not for {recipe_of(run)}{where}:"
            f" {refusal.why}; {remedy}{others(run)}"
          )
