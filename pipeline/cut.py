"""Cuts a problem of `asgd` into the stages of a pipeline."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from asgd import algorithms, base, problems
from asgd import worker as worker_lib
from asgd.pipeline.stage import Part
from asgd.problems.cuts import joined as joined
from asgd.problems.cuts import slice_of, stage_fn


def cut(
  problem: problems.Problem,
  params: Any,
  cuts: Sequence[int],
  recipe: algorithms.Recipe | Sequence[algorithms.Recipe],
) -> list[Part]:
  """Returns the stages: layers[cuts[s] : cuts[s + 1]] and a server for them.

  Args:
    problem: one that has `pieces`.
    params: the parameters of the whole model.
    cuts: S + 1 layers, from 0 to the number of layers, rising.
    recipe: the recipe of each stage, or of all.

  Raises:
    ValueError: for a problem that cannot be cut, cuts that leave out a layer or
      make a stage without weights, a wrong number of recipes, or recipes
      with workers that do more than compute gradients.
  """
  if problem.pieces is None:
    raise ValueError("this problem is not made of layers: it cannot be cut")
  layers = problem.pieces.layers
  is_rising = list(cuts) == sorted(set(cuts)) and len(cuts) > 1
  if not is_rising or (cuts[0], cuts[-1]) != (0, len(layers)):
    raise ValueError(
      f"cuts must rise from 0 to the {len(layers)} layers of the model, each"
      f" layer in one stage, not {list(cuts)}"
    )
  # A recipe for each stage: staleness differs between stages.
  count, is_one_recipe = len(cuts) - 1, isinstance(recipe, algorithms.Recipe)
  recipes = [recipe] * count if is_one_recipe else recipe
  if len(recipes) != count:
    raise ValueError(
      f"{count} stages need a recipe each, or one for all, not {len(recipes)}"
    )
  slices = []
  for stage, (first, last) in enumerate(itertools.pairwise(cuts)):
    stage_params = slice_of(params, first, last)
    # Each stage has a server, which needs weights to update.
    if not jax.tree.leaves(base.weights_of(stage_params)):
      raise ValueError(
        f"stage {stage} (layers {first} to {last - 1}) has no weights; give its"
        " layers to another stage"
      )
    stage_recipe = recipes[stage]
    drops_late = stage_recipe.max_staleness is not None
    if stage_recipe.worker is not None or stage_recipe.every > 1 or drops_late:
      raise ValueError(
        "a pipeline's stages send plain gradients, averaged as the schedule"
        " says: recipes with local workers or rounds, or that drop late"
        " gradients, do not fit; use asgd, nag_asgd, dana_zero, dana_slim,"
        " dc_asgd_c, dc_asgd_a, staleness_aware, adadelay or gap_aware"
      )
    fn = stage_fn(problem.pieces, first, last)
    slices.append(
      Part(fn, stage_params, stage_recipe.server(), stage_recipe.at_worker)
    )
  return slices


def extras(
  batch: Callable[[int], base.Batch], root: jax.Array, stages: int
) -> Callable[[int, int], Any]:
  """Returns the function `extra` of an executor: (stage, microbatch) -> (batch,
  key). The batch is () except at the first and the last stage, so `batch` is
  called once or twice per microbatch. The key is that of job `microbatch` of
  worker 0, from the run's key `root` (`asgd.worker.job_key`)."""

  key_of = jax.jit(lambda job: worker_lib.job_key(root, np.int32(0), job))

  def extra(stage, microbatch):
    # The key depends on the microbatch alone, so all stages agree on it.
    key = key_of(np.int32(microbatch))
    reads_batch = stage in (0, stages - 1)
    return (batch(microbatch) if reads_batch else ()), key

  return extra
