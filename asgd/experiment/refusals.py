"""Refuses keys of a config that do nothing under the protocol of a run.

Each protocol lists such keys (`protocol.Refusal`). `check` reads the lists, and
the reference in the docs prints them as a table.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from asgd.checks import shown
from asgd.experiment import schema
from asgd.experiment.protocol import Protocol
from asgd.experiment.schema import Run

# Prefix of a refusal's key for an option of the recipe, which a config has at
# runs.LABEL.OPTION.
OPTION_PREFIX = "recipe."


def given_object(run: Run, key: str) -> Any:
  """Returns the object that a call passed for `key`; the config has GIVEN_MARK
  instead. Raises ValueError if no call passed one."""
  if key not in run.objects:
    raise ValueError(
      f"config.{key} {schema.GIVEN_MARK!r} stands for an object that a call was"
      f" given, such as asgd.simulate(..., {key}=...): pass the object, or set"
      " a name"
    )
  return run.objects[key]


def refuse_codec_object(run: Run, key: str) -> None:
  """Raises ValueError if a call passed a codec as an object for `key`."""
  if run.config[key]["name"] == schema.GIVEN_MARK:
    raise ValueError(
      f"config.{key}: {recipe_text(run)} on engine {run.engine!r} takes a codec"
      " by its name, as 'top_k', or as a dict of its name and options: give it"
      " instead of an object"
    )


def recipe_text(run: Run) -> str:
  """Returns the name of a run's recipe for an error."""
  if run.given_recipe is not None:  # a call gave the recipe, and has no config
    return "this recipe"
  return f"the recipe {run.recipe!r} (config.runs.{run.label})"


def other_runs_remedy(run: Run) -> str:
  """Returns a second remedy for a refused setting, which ends an error's text.
  A config's other runs may use the setting; a call has one run only."""
  if run.given_recipe is not None:
    return ""
  return ", or set it in the entries of other runs alone"


def _covered_settings(
  key: str, run: Run, sections: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
  """Yields (dotted key, value) of each setting that a run has set and that the
  key of a refusal covers."""
  if key.startswith(OPTION_PREFIX):
    name = key.removeprefix(OPTION_PREFIX)
    if name in run.options:
      yield f"runs.{run.label}.{name}", run.options[name]
    return
  section, _, inner_key = key.partition(".")
  schemas = {**schema.SHARED_KEYS, **sections}
  if section not in schemas:
    return  # this engine has no such section
  value, default = run.config[section], schema.default_of(schemas[section])
  # A single setting.
  if not isinstance(
    schemas[section], (dict, schema.NamedSection, schema.Section)
  ):
    if value != default:
      yield section, value
    return
  # A section: one of its keys, or (`inner_key` is "") all of them.
  for name, inner_value in value.items():
    if inner_key in ("", name) and inner_value != default.get(name):
      yield f"{section}.{name}", inner_value


def check(
  run: Run, protocol: Protocol, engine: str, sections: Mapping[str, Any]
) -> None:
  """Raises ValueError for a key that a run sets and its protocol refuses.

  Args:
    run: the run of a config.
    protocol: the protocol of the run.
    engine: the engine's name in Refusal.engines. `run.engine` may be the name
      of a variant of that engine.
    sections: the schema of each section of a config that the engine has.

  Raises:
    ValueError: names the key, its value, the reason and the remedies.
  """
  for refusal in protocol.refusals:
    # Empty `engines` and `values` stand for all of them.
    if not refusal.engines or engine in refusal.engines:
      for key, value in _covered_settings(refusal.key, run, sections):
        if not refusal.values or value in refusal.values:
          remedy = refusal.remedy.format(value=value, label=run.label)
          engine_text = f" on engine {run.engine!r}" if refusal.engines else ""
          raise ValueError(
            f"config.{key} {shown(value)} is not for"
            f" {recipe_text(run)}{engine_text}: {refusal.why}; {remedy}"
            f"{other_runs_remedy(run)}"
          )
