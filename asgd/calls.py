"""Reads the arguments of `simulate` and `train_live`, and adapts their errors.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from asgd import algorithms, base, checks, compression
from asgd.experiment import protocol, schema
from asgd.problems import own


def read_recipe(recipe: Any, workers: int | None = None) -> Any:
  """Returns a caller's `recipe` argument as a Recipe for `workers` workers.
  Settings of tables or of Sandblaster are returned as they are."""
  if isinstance(recipe, (base.Algorithm, optax.GradientTransformation)):
    send = getattr(recipe, "send", base.send_current)
    recipe = algorithms.Recipe(base.as_algorithm(recipe, send))
  has_protocol = getattr(recipe, "protocol", None) in protocol.PROTOCOLS
  if has_protocol and not isinstance(recipe, algorithms.Recipe):
    if workers is None:
      raise ValueError(
        f"the settings of {recipe.protocol} do not give the number of workers:"
        " add workers="
      )
    checks.whole("workers", workers)
    return recipe
  if not isinstance(recipe, algorithms.Recipe):
    example = "such as asgd.dana_zero(0.01, workers=8)"
    raise ValueError(
      f"the recipe must be one of asgd, {example}, an asgd.Recipe or an optax"
      f" transform, not {checks.shown(recipe)}"
    )
  if workers is None and recipe.workers is None:
    raise ValueError(
      "the recipe does not give the number of workers: add workers="
    )
  if workers is not None:
    checks.whole("workers", workers)
    if recipe.workers not in (None, workers):
      raise ValueError(
        f"workers={workers}, but the recipe was built for {recipe.workers}:"
        f" drop workers=, or build the recipe with workers={workers}"
      )
    recipe = recipe._replace(workers=workers)
  return recipe


def codecs_of(
  config: Mapping[str, Any],
) -> tuple[dict[str, compression.Codec], dict[str, Any]]:
  """Returns (codecs, config) of a call. Each codec that the caller gave as an
  object is replaced in the config by the mark `schema.GIVEN`."""
  codecs = {
    key: value
    for key, value in config.items()
    if isinstance(value, compression.Codec)
  }
  return codecs, {**config, **dict.fromkeys(codecs, schema.GIVEN)}


_SEQUENTIAL = "simulate", "threads", "ray", "mesh"  # engines, with a server


def check_sequential(given: own.Objects, engine: str) -> None:
  """Raises ValueError for data from iterators where batches are not asked for
  in the order of each worker's jobs."""
  recipe = given.recipe
  of_server = isinstance(recipe, algorithms.Recipe) and recipe.gossip is None
  if given.sequential and (engine not in _SEQUENTIAL or not of_server):
    what = f"engine {engine!r}" if of_server else "this recipe"
    raise ValueError(
      f"iterators as data are for a server of one model (simulate, train_live,"
      f" train_mesh), not for {what}: give arrays, or a function (worker, job)"
      " -> batch"
    )


def check_travels(given: own.Objects) -> None:
  """Raises ValueError for an object that cannot be sent to other processes."""
  from ray import cloudpickle

  # Pickle the parts one by one, to name the one that fails.
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
  """Replaces command-line words in errors by those of function calls."""
  try:
    yield
  except ValueError as error:
    text = str(error)
    for old, new in _WORDS:
      text = text.replace(old, new)
    text = re.sub(r"\bconfig\.(runs\.\w+\.)?", "", text)
    # A subclass with other arguments cannot be rebuilt from a text.
    plain = type(error).__init__ is ValueError.__init__
    if text == str(error) or not plain:
      raise
    raise type(error)(text) from error.__cause__


# Replaced from the first to the last: a longer text is before its parts.
_WORDS = (
  ("choose another folder with --workdir", "choose another folder"),
  ("--workdir=", "folder="),
  ("--workdir", "folder"),
  ("dataset.sha256", "the checksum of params and data"),
  ("dataset.", ""),
  ("--config.", ""),
  ("run the same command again", "make the same call again"),
)
