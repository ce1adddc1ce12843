"""Trains a user's layers in a pipeline, in one call; see `asgd.facade`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from flax import linen as nn

from asgd import call_options, call_runs, calls, checks, models, problems
from asgd.parallel import meshes
from asgd.pipeline import segments
from asgd.pipeline.engine import PIPELINE
from asgd.problems import own, streams, user_code


class _Plain(nn.Module):
  """Wraps a module without an argument `train`. A layer of flax that reads its
  mode from its call, such as `nn.BatchNorm()`, gets the mode."""

  inner: nn.Module

  def setup(self) -> None:
    nn.share_scope(self, self.inner)  # its weights have the same names

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    modes = {"deterministic": not train, "use_running_average": not train}
    # flax leaves such a field None until the module or its call sets it.
    unset_modes = {
      name: value
      for name, value in modes.items()
      if getattr(self.inner, name, self) is None
    }
    output: jax.Array = self.inner(x, **unset_modes)
    return output


class _Function(nn.Module):
  """Wraps a function without weights."""

  function: Callable[[jax.Array], jax.Array]

  def __call__(self, x: jax.Array, train: bool) -> jax.Array:
    del train
    return self.function(x)


def _has_state(layer: Any) -> bool:
  """Whether a callable holds state that would not be trained: it is a module of
  another library than linen, is bound to one, or closes over one."""
  if isinstance(layer, functools.partial):
    return any(map(_has_state, (layer.func, *layer.args)))
  if inspect.ismethod(layer):
    return _has_state(layer.__self__)
  function = inspect.unwrap(layer) if callable(layer) else None
  if not inspect.isfunction(function):
    return _is_stateful(layer)
  # A lambda may use a module of its scope: check the values that it uses.
  names = inspect.getclosurevars(function)
  used_values = *names.nonlocals.values(), *names.globals.values()
  return any(map(_is_stateful, used_values))


def _is_stateful(value: Any) -> bool:
  """Whether a value is a module of flax.nnx, or a callable object that holds
  arrays, such as one of Equinox. Arrays that a function uses are constants."""
  from flax import nnx

  if isinstance(value, nnx.Module):
    return True
  other_types = type, nn.Module, functools.partial
  if isinstance(value, other_types) or not callable(value):
    return False
  # An object of Equinox is a tree with its arrays as leaves.
  leaves = jax.tree.leaves(value)
  return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def read_layers(layers: Sequence[Any]) -> models.Layers:
  """Converts a user's layers to linen modules.

  Args:
    layers: modules of flax.linen, with or without an argument `train`, and
      functions of an array, which have no weights.

  Returns:
    A linen module for each layer, called as layer(x, train=bool).

  Raises:
    ValueError: for anything else, and for a layer with weights that would not
      be trained: a module of flax.nnx or of another library, or a function that
      calls such a module.

  Example:
    >>> import jax.numpy as jnp
    >>> dense, tanh = read_layers((nn.Dense(4), jnp.tanh))
    >>> tanh.apply({}, jnp.zeros(2), train=True).tolist()
    [0.0, 0.0]
  """
  if not isinstance(layers, (tuple, list)) or not layers:
    raise ValueError(
      "layers must be a tuple of flax modules and functions, in the order in"
      f" which they are called, not {checks.shown(layers)}"
    )
  modules: list[nn.Module] = []
  for number, layer in enumerate(layers):
    if isinstance(layer, nn.Module):
      parameters = inspect.signature(type(layer).__call__).parameters
      modules.append(layer if "train" in parameters else _Plain(layer))
    elif _has_state(layer):
      raise ValueError(
        f"layer {number} ({user_code.name_of(layer)}) has state, such as"
        " weights, which would not be trained: write it as a"
        " module of flax.linen, or train the model as one piece with"
        " asgd.simulate or asgd.train_live"
      )
    elif callable(layer):
      modules.append(_Function(layer))
    else:
      raise ValueError(
        f"layer {number} must be a flax.linen module or a function, not"
        f" {checks.shown(layer)}"
      )
  return tuple(modules)


class TrainOptions(call_options.CheckpointOptions, total=False):
  """Further keyword arguments of `train`: settings of a pipeline, then options
  of its schedule."""

  epochs: float | None
  batch_size: int | None
  cuts: str | Sequence[int]
  weights: str | None
  predict: bool | str
  recompute: Any
  device_megabytes: Any
  partition: Any
  bandwidth: float
  compress: str | Mapping[str, Any] | None

  chunks: int
  group: int
  reverse: bool
  max_activations: Any
  costs: Any
  replicas: Sequence[int]
  anneal: Any
  decay: Any
  stage_depth: int
  supremum: int


def train(
  layers: Sequence[Any] | nn.Module,
  criterion: Callable[[jax.Array, Any], jax.Array],
  data: Any,
  recipe: call_options.RecipeLike,
  *,
  messages: int | None = None,
  params: Any = None,
  stages: int = 2,
  schedule: str = "pipedream",
  microbatches: int = 8,
  **options: Unpack[TrainOptions],
) -> call_runs.Result:
  """Trains layers, or a flax module, cut into the stages of a pipeline.

  Arguments without a description are those of `asgd.simulate`. On a CPU set
  jax.config.update("jax_num_cpu_devices", stages) before JAX is used, or all
  stages share one device.

  Args:
    layers: flax.linen modules, called as layer(x) or layer(x, train=bool), and
      functions without weights, in their order. Or one module, such as an
      nn.Sequential or one with a list of blocks, which is cut between the
      submodules that it calls (`asgd.pipeline.segments`).
    criterion: (output of the last layer, batch) -> scalar.
    data: as of `asgd.simulate`; a batch is (input, ...), or a dict with "x".
    recipe: such as `asgd.asgd(0.1, workers=1, momentum=0.9)`. Its learning rate
      is for one microbatch; an update of n microbatches uses n times the rate.
      Its workers are the updates in flight at each stage.
    messages: microbatches in all, a multiple of `microbatches`.
    epochs: instead of `messages`: passes over the data, rounded down to
      complete batches.
    params: a tuple with the weights of each layer, or the variables of the one
      module; None draws them. The result has the same form.
    schedule: a name of `asgd.pipeline.schedules`, or a table's file.
    microbatches: the number of microbatches of a batch of a synchronous
      schedule.
    machine: with processes=2 stages are in processes of Ray.
    options: batch_size, folder, seed, evaluate, every, progress, clip_norm and
      on_nan as of `asgd.simulate`; further settings of a pipeline: cuts,
      weights, predict, recompute, partition, compress (the name of a codec for
      activations and gradients between stages); or options of its schedule.

  Example:
    >>> import numpy as np
    >>> import asgd
    >>> from asgd import pipeline
    >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    >>> result = pipeline.train(
    ...   (nn.Dense(8), nn.tanh, nn.Dense(1)),
    ...   lambda y, batch: ((y[:, 0] - batch[1]) ** 2).mean(),
    ...   (x, x.sum(1)),
    ...   asgd.asgd(0.02, workers=1, momentum=0.9),
    ...   messages=400,
    ...   batch_size=16,
    ... )
    >>> print(result.records.loss[-8:].mean() < 0.2, len(result.params))
    True 3
  """
  run, settings = call_options.read_options((messages,), options)
  # One pipeline is one worker; the recipe's workers are updates in flight.
  if run.workers not in (None, 1):
    raise ValueError(
      f"workers={checks.shown(run.workers)}, but a pipeline is one worker with"
      f" stages={stages} in parallel: drop workers=, and set stages="
    )
  run = run._replace(workers=1)
  calls.check_length(run)
  checks.integer("stages", stages)
  meshes.want_cpu_devices(stages)
  with calls.in_words_of_calls("pipeline"):
    recipe = calls.read_recipe(recipe, getattr(recipe, "workers", None) or 1)
    # [1] The first batch gives the shapes; then layers become modules.
    first_batch = streams.read_data(data, run.batch_size).first
    outward: Callable[[Any], Any] = _identity
    if isinstance(layers, nn.Module):
      layers = parts = segments.cut(layers, own.input_of(first_batch))
      outward = segments.outward
      if params is not None and not callable(params):
        params = segments.inward(parts, params)
    else:
      layers = read_layers(layers)
    # [2] A problem in pieces: layers, criterion, and the caller's evaluation.
    evaluate = run.evaluate
    if callable(evaluate):
      evaluate = _wrap_evaluate(evaluate, outward)
    pieces = problems.Pieces(
      layers, lambda batch, key, dtype: own.input_of(batch), criterion
    )

    def init(key: jax.Array) -> Any:
      return models.init(layers, key, own.input_of(first_batch))

    objects = own.Objects(
      *(problems.whole_loss(pieces), init if params is None else params),
      *(data, recipe),
      batch_size=run.batch_size,
      evaluate=evaluate,
      pieces=pieces,
    )
    models.own.check_layers(init, "or train with asgd.simulate")
    # [3] The settings of the run, in the keys of a config.
    config_keys = *call_options.CONFIG_KEYS, "compress"
    config = {key: settings.pop(key) for key in config_keys if key in settings}
    section = {"schedule": schedule, "stages": stages, **settings}
    section["microbatches"] = checks.integer("microbatches", microbatches)
    if run.every is not None:
      groups = "batches of {} microbatches (every)"
      checks.multiple(run.every, "messages", microbatches, groups)
    result = call_runs.train(
      objects,
      ("pipeline", PIPELINE),
      {"pipeline": section, **config},
      run,
      quantum=(microbatches, "batches of {} microbatches"),
    )
  return result._replace(params=outward(result.params))


def _identity(params: Any) -> Any:
  return params


def _wrap_evaluate(
  evaluate: Callable[[Any], Any], outward: Callable[[Any], Any]
) -> Callable[[Any], Any]:
  """Returns a function that evaluates parameters in the caller's form."""

  @functools.wraps(evaluate)  # its source and signature are the caller's
  def evaluate_outward(params: Any) -> Any:
    return evaluate(outward(params))

  return evaluate_outward
