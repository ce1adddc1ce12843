"""What callers give to functions of scripts, and errors in their words."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from asgd import algorithms, base, checks, compression
from asgd.experiment import protocol, schema
from asgd.problems import own


def read_recipe(recipe: Any, workers: int | None = None) -> Any:
  """Returns a recipe for so many workers, from what a caller gave as one; or
  the settings of tables or of Sandblaster, as they are."""
  if isinstance(recipe, (base.Algorithm, optax.GradientTransformation)):
    send = getattr(recipe, "send", base.send_current)
    recipe = algorithms.Recipe(base.as_algorithm(recipe, send))
  of_settings = getattr(recipe, "protocol", None) in protocol.PROTOCOLS
  if of_settings and not isinstance(recipe, algorithms.Recipe):
    if workers is None:
      raise ValueError(
        f"the settings of {recipe.protocol} do not say how many workers: give"
        " workers="
      )
    checks.whole("workers", workers)
    return recipe
  if not isinstance(recipe, algorithms.Recipe):
    asked = "such as asgd.dana_zero(0.01, workers=8)"
    raise ValueError(
      f"the recipe must be one of asgd, {asked}, an asgd.Recipe or an optax"
      f" transform, not {checks.shown(recipe)}"
    )
  if workers is None and recipe.workers is None:
    raise ValueError("the recipe does not say how many workers: give workers=")
  if workers is not None:
    checks.whole("workers", workers)
    if recipe.workers not in (None, workers):
      raise ValueError(
        f"workers={workers}, and the recipe is for {recipe.workers}: drop"
        " workers=, or build the recipe with as many"
      )
    recipe = recipe._replace(workers=workers)
  return recipe


def codecs_of(
  config: Mapping[str, Any],
) -> tuple[dict[str, compression.Codec], dict[str, Any]]:
  """Returns (codecs, config) of a call whose codecs may be objects, which stand
  in a config as given."""
  codecs = {
    key: value
    for key, value in config.items()
    if isinstance(value, compression.Codec)
  }
  return codecs, {**config, **dict.fromkeys(codecs, schema.GIVEN)}


def check_travels(given: own.Objects) -> None:
  """Raises ValueError for what no other process can be given."""
  from ray import cloudpickle

  state = given.__getstate__()
  parts = {
    "the loss": [state["_loss"], state["_pieces"]],
    "params": state["_init"],
    "data": state["_stream"],
    "the recipe": state["recipe"],
  }
  for what, part in parts.items():
    remedy = ": make what it holds (locks, files, generators) inside of the"
    remedy += " function, or use runtime='threads'"
    with checks.user_code(f"{what} cannot be sent to other processes", remedy):
      cloudpickle.dumps(part)


@contextlib.contextmanager
def in_words_of_calls() -> Iterator[None]:
  """Turns errors in the words of commands into those of calls."""
  try:
    yield
  except ValueError as error:
    text = str(error)
    for old, new in _WORDS:
      text = text.replace(old, new)
    text = re.sub(r"\bconfig\.(runs\.\w+\.)?", "", text)
    plain = type(error).__init__ is ValueError.__init__
    if text == str(error) or not plain:
      raise
    raise type(error)(text) from error.__cause__


# They are used from first to last.
_WORDS = (
  ("choose another folder with --workdir", "choose another folder"),
  ("--workdir=", "folder="),
  ("--workdir", "folder"),
  ("dataset.sha256", "the checksum of params and data"),
  ("dataset.", ""),
  ("--config.", ""),
  ("run the same command again", "make the same call again"),
)
