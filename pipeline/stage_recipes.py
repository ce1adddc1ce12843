"""The recipe of each stage: its workers, predictions and corrections."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from asgd import algorithms, transforms
from asgd.experiment import checks
from asgd.experiment.schema import Run
from asgd.pipeline import analyze, discrepancy, prediction, schedules
from asgd.pipeline.table import Schedule


class Variant(NamedTuple):
  """The numbers in which the recipe of a stage differs from the run's."""

  workers: int  # of the recipe: the updates in flight, or 1
  # Updates by which tickets are rolled forward, or a horizon along the
  # velocity. None: no prediction besides the recipe's.
  ahead: int | prediction.Horizon | None
  cure: discrepancy.Cure | None  # PipeMare's corrections


def variants(
  run: Run,
  rate: Any,
  table: Schedule,
  weights: str,
  *,
  section: Mapping[str, Any],
  updates: int,
  shapes: Any,
) -> list[Variant]:
  """Returns the variant of each stage.

  Args:
    run: the run of the pipeline.
    rate: the learning rate of an update, or a schedule.
    table: the schedule.
    weights: which weights backwards read, a name of `analyze.versions`.
    section: the run's settings of the pipeline.
    updates: the number of updates of the run.
    shapes: the shapes of the weights of the complete model.

  Raises:
    ValueError: for a prediction that does not fit the table or the recipe.
  """
  workers = analyze.in_flight(table, weights).tolist()
  if not _keeps_workers(run, rate, shapes):
    workers = [1] * table.stages
  cures = _cures(section, table, weights, updates)
  ahead: list[Any] = [None] * table.stages
  if section["predict"]:
    staleness = analyze.staleness(table, weights).forward
    ahead = np.median(staleness, axis=1).astype(int).tolist()
  if isinstance(name := section["predict"], str):
    with checks.prefix_errors(f"runs.{run.label}", ("predict",)):
      if name == prediction.SPECTRAIN and (
        table.flush or weights != "latest" or cures[0]
      ):
        raise ValueError(
          "predict 'spectrain' is for both passes of an asynchronous schedule"
          f" without a stash, not for {table.name} with weights={weights!r}:"
          " set schedule='pipedream' and weights='latest', or predict='ftpipe'"
        )
      momentum = prediction.momentum_of(name, run.make_recipe(rate, 1), shapes)
      ahead = prediction.horizons(name, ahead, momentum)
  return list(map(Variant, workers, ahead, cures))


def _keeps_workers(run: Run, rate: Any, shapes: Any) -> bool:
  """Returns whether a recipe keeps state for each worker.

  The state may be at the worker or at the server. Each update in flight at a
  stage counts as a worker: their number is DANA's N.
  """
  recipe_of_one = run.make_recipe(rate, 1)
  try:
    recipe_of_two = run.make_recipe(rate, 2)
  except ValueError:  # a user's recipe for exactly one worker
    return False
  # A recipe that averages over workers: a schedule averages microbatches.
  if recipe_of_two.every > 1:
    return False
  states = (
    jax.eval_shape(r.server().init, shapes)
    for r in (recipe_of_one, recipe_of_two)
  )
  leaves_of_one, leaves_of_two = map(jax.tree.leaves, states)
  return recipe_of_two.at_worker is not None or leaves_of_one != leaves_of_two


def _cures(
  section: Mapping[str, Any], table: Schedule, weights: str, updates: int
) -> list[discrepancy.Cure | None]:
  """Returns PipeMare's corrections of each stage; None for other schedules."""
  traits = schedules.SCHEDULES.get(table.name, schedules.custom).traits
  if not traits.corrected or weights != "latest":
    return [None] * table.stages
  anneal = section.get("anneal") or max(updates // 4, 1)
  options = {"decay": section["decay"]} if "decay" in section else {}
  return [*discrepancy.cures(table.stages, table.every, anneal, **options)]


def recipe(run: Run, rate: Any, variant: Variant) -> algorithms.Recipe:
  """Returns the recipe of a stage."""
  workers, ahead, cure = variant
  if cure is not None:
    rate = discrepancy.reschedule(rate, cure)
  recipe = run.make_recipe(rate, workers)
  algorithm = recipe.algorithm
  if isinstance(ahead, prediction.Horizon):
    algorithm = prediction.along_velocity(algorithm, rate, ahead.forward)
  elif ahead is not None:
    steps = np.arange(-ahead, 0)
    algorithm = transforms.lookahead(
      optax.GradientTransformationExtraArgs(algorithm.init, algorithm.update),
      lambda worker: (worker + steps) % workers,
    )
  if cure is not None:
    algorithm = discrepancy.follow(algorithm, cure)
  return recipe._replace(algorithm=algorithm)


def correction(rate: Any, variant: Variant) -> Any:
  """Returns the rule by which a stage's backward changes the newest weights,
  for `stage.Part.correct`; None: the backward reads them unchanged."""
  if variant.cure is not None:
    return discrepancy.extrapolate(variant.cure)
  ahead = variant.ahead
  if isinstance(ahead, prediction.Horizon) and ahead.backward:
    return prediction.extrapolate(rate, ahead.backward)
  return None
