"""The config and the plan of a run on a mesh: axes, optimizer, step."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import (
  algorithms,
  base,
  compression,
  names,
  optimizers,
  problems,
  stacking,
  transforms,
)
from asgd.checks import shown
from asgd.experiment import build_cache, checks, refusals
from asgd.experiment.engines import learning_rates, traffic
from asgd.experiment.schema import RUN_KEYS, Run, Setting
from asgd.parallel import (
  data_parallel,
  hybrid,
  islands,
  meshes,
  precision,
  step_checks,
)

DOUBLE = "float64"  # a precision for comparisons: all numbers are float64
# Outermost first.
_AXES: tuple[str, ...] = (meshes.DATA, meshes.ISLAND, meshes.PIPE)
_AXES += meshes.ROWS, meshes.COLUMNS, meshes.TENSOR
_MOST_DEVICES = 4096
_WARM_UP_SHARE = 0.1  # a warm-up begins at this share of the peak


@checks.with_schema(type=["object", "string"])
def _read_axes(value: Any, key: str) -> dict[str, int]:
  """Reads a mesh: a dict, or a text such as data:2,tensor:4."""
  axes, pairs = value, []
  if isinstance(value, str):
    pairs = [part.replace("=", ":").split(":") for part in value.split(",")]
    with contextlib.suppress(ValueError):
      axes = {axis.strip(): int(size) for axis, size in pairs}
  if not isinstance(axes, Mapping):
    raise ValueError(
      f"config.{key} must be a dict of axes and their sizes, or a text as in"
      f" data:2,tensor:4, not {shown(value)}"
    )
  if len(axes) < len(pairs):
    raise ValueError(f"config.{key} names an axis twice: {shown(value)}")
  for axis, size in axes.items():
    if axis not in _AXES:
      nearest = names.nearest(axis, _AXES)
      raise ValueError(f"unknown axis {axis!r} of config.{key}; {nearest}")
    # -1 takes the remaining devices; True is no size, though it is an int.
    if size != -1 or isinstance(size, bool):
      checks.whole_number(1, _MOST_DEVICES)(size, f"{key}.{axis}")
  if list(axes.values()).count(-1) > 1:
    raise ValueError(
      f"config.{key}: only one axis can be -1 (all other devices):"
      f" {shown(value)}"
    )
  # In the order of _AXES, however the config writes them.
  axes = {axis: axes[axis] for axis in _AXES if axis in axes}
  # `data` always exists, so that the batch has an axis to be divided over.
  return {meshes.DATA: 1, **axes} if axes else {}


@checks.with_schema(type=["object", "null"])
def _scale_fields(value: Any, key: str) -> dict[str, Any] | None:
  """Checks the fields of a dynamic loss scale."""
  if value is None:
    return None
  fields = precision.Dynamic._fields
  if not isinstance(value, Mapping):
    raise ValueError(
      f"config.{key} must be None or a dict of {', '.join(fields)}, not"
      f" {shown(value)}"
    )
  for name in value:
    if name not in fields:
      nearest = names.nearest(name, fields)
      raise ValueError(f"unknown config key '{key}.{name}'; {nearest}")
  with checks.prefix_errors(key):
    precision.check_dynamic(precision.Dynamic(**value))
  return dict(value)


_COUNT = checks.optional(checks.whole_number(1, 10**6))
_PRECISION = checks.choice(*precision.POLICIES, DOUBLE)

SECTIONS: dict[str, Any] = {
  "mesh": {
    # Axis -> devices. One may be -1: all other devices. {}: all on "data".
    "axes": Setting({}, _read_axes),
    # CPU devices to make; None: the number that the mesh has.
    "devices": Setting(
      None, checks.optional(checks.whole_number(1, _MOST_DEVICES))
    ),
    "accumulate": Setting(1, checks.whole_number(1, 10**6)),  # pieces per batch
    "zero": Setting(0, checks.whole_number(0, 3)),  # ZeRO stage
    "precision": Setting("unchanged", _PRECISION),
    "loss_scale": Setting(None, _scale_fields),  # a dict, of precision.Dynamic
    "sequence": Setting(False, checks.flag),  # axis tensor: split positions too
    "microbatches": Setting(None, _COUNT),  # axis pipe; None: one per stage
    "rounds": Setting(None, _COUNT),  # axis pipe: passes around; None: one
    # Axis pipe: compute blocks again in the backward pass.
    "recompute": Setting(False, checks.flag),
    "form": Setting("shard_map", checks.choice(*data_parallel.FORMS)),
  },
  # A codec for the gradients that devices send, or a reducer.
  "compress": traffic.SECTIONS["compress"],
}


def required_devices(run: Run) -> int | None:
  """Returns how many devices a run needs, None for all there are."""
  section = run.config["mesh"]
  # A size of -1 needs the number of devices, which is not known yet.
  shape, devices = section["axes"], section["devices"]
  if not shape or -1 in shape.values():
    return devices
  n_devices = math.prod(shape.values())
  axes = f"config.mesh.axes {meshes.text(shape)}"
  if n_devices > _MOST_DEVICES:
    raise ValueError(
      f"{axes} has {n_devices:,} devices; use at most {_MOST_DEVICES:,}"
    )
  if devices is not None and devices < n_devices:
    raise ValueError(
      f"config.mesh.devices {devices} are fewer than the {n_devices} of {axes}:"
      f" leave it out, or use {n_devices} or more"
    )
  return n_devices if devices is None else devices


def check(run: Run) -> None:
  """Checks a run as far as possible before there are devices."""
  required_devices(run)
  section = run.config["mesh"]
  axes = section["axes"]
  for key, axis, default in (
    ("sequence", meshes.TENSOR, False),
    ("rounds", meshes.PIPE, None),
    ("recompute", meshes.PIPE, False),
    ("microbatches", meshes.PIPE, None),
  ):
    if section[key] is not default and axis not in axes:
      raise ValueError(
        f"config.mesh.{key} {section[key]!r} is for the axis {axis!r}, which"
        f" config.mesh.axes {meshes.text(axes) or 'data'} has not: drop it"
      )
  # With -1 the number of replicas is known only on the devices.
  if -1 not in axes.values():
    _check_batch(run, axes or {meshes.DATA: 1})
  jax_config: Any = jax.config  # its options are attributes at run time
  if section["precision"] == DOUBLE and not jax_config.jax_enable_x64:
    raise ValueError(
      "config.mesh.precision float64 needs jax.config.update('jax_enable_x64',"
      " True) before anything is computed; the command asgd train does that"
    )


def _check_batch(run: Run, shape: Mapping[str, int]) -> None:
  """Raises ValueError for a batch that the mesh cannot divide."""
  section, size = run.config["mesh"], run.config["batch_size"]
  replicas, accumulate = shape[meshes.DATA], section["accumulate"]
  replicas *= shape.get(meshes.ISLAND, 1)
  # The examples of a replica are cut into `accumulate` pieces, and each piece
  # into the microbatches of a pipeline.
  pieces = replicas * accumulate
  microbatches = count_microbatches(section, shape)
  axes = "data x island" if meshes.ISLAND in shape else meshes.DATA
  factors = f"config.mesh.axes.{axes} {replicas} x config.mesh.accumulate"
  if size % pieces:
    raise ValueError(
      f"config.batch_size {size} cannot be divided into {pieces} pieces"
      f" ({factors} {accumulate}): use a multiple of {pieces}"
    )
  if size // pieces % microbatches:
    raise ValueError(
      f"config.batch_size {size} makes pieces of {size // pieces} ({factors}"
      f" {accumulate}), which config.mesh.microbatches {microbatches} does not"
      f" divide: use a multiple of {pieces * microbatches}"
    )


def count_microbatches(section: Mapping[str, Any], shape: Any) -> int:
  """Returns the number of microbatches of a replica's examples."""
  return section["microbatches"] or shape.get(meshes.PIPE, 1)


class MeshPlan(NamedTuple):
  """The plan that the cells of a run share."""

  run: Run
  problem: problems.Problem
  mesh: jax.sharding.Mesh
  step: data_parallel.Step
  learning_rate: float  # the peak
  schedule: Any  # float, or update -> learning rate
  messages: int  # updates
  batches: int = 1  # in one message
  curvature_limit: float = math.nan


def _local_recipe(
  run: Run, mesh: jax.sharding.Mesh, rate: Any
) -> algorithms.Recipe | None:
  """Returns the recipe of islands, replicas that take local steps; None if the
  run's workers send gradients. ValueError unless it has rounds of all islands.
  """
  # Built for one worker: a recipe that was made by hand cannot be rebuilt.
  if run.make_recipe(rate, 1, searches=True).worker is None:
    if meshes.ISLAND in mesh.shape:
      raise ValueError(
        "config.mesh.axes.island is for recipes whose workers take local steps,"
        f" and those of {refusals.recipe_text(run)} send gradients: use the"
        " axis data"
      )
    return None
  optimizers.refuse_search(run.config["optimizer"])
  recipe = run.make_recipe(rate, mesh.shape[meshes.DATA], searches=True)
  in_rounds = recipe.order == "bulk_synchronous" and recipe.at_server is None
  if not in_rounds or recipe.every != mesh.shape[meshes.DATA]:
    raise ValueError(
      f"config.mesh.axes: the workers of {refusals.recipe_text(run)} take local"
      f" steps, and the {mesh.shape[meshes.DATA]} islands of a mesh make one"
      " update of the mean of their messages, which have no order: use a recipe"
      " in rounds of the same number of workers (model_averaging, slowmo,"
      " diloco), or engine simulate, threads or ray"
    )
  section = {**run.config["mesh"], "compress": run.config["compress"]}
  with checks.prefix_errors("mesh"):
    step_checks.check_alone(
      *(step_checks.ISLANDS, mesh, section, step_checks.ISLANDS_VALUES),
      axes=(meshes.DATA, meshes.ISLAND),
    )
  return recipe


def job_batches(
  problem: problems.Problem, steps: int, seed: int
) -> stacking.Batches:
  """Returns the function (0, update) -> the batches of an update."""
  # Worker 0 of 1: a mesh has one stream of batches.
  return stacking.job_batches(problem.batches(seed, 1), steps)


def _algorithm(run: Run, rate: Any) -> base.Algorithm:
  """Returns the algorithm of the run's recipe, with its optimizer."""
  # The step clips the gradient after its sum over the devices.
  run = run._replace(config={**run.config, "clip_norm": None})
  recipe = run.make_recipe(rate, 1, searches=True)
  # The transforms of a worker precede those of the server.
  if recipe.at_worker is None:
    return recipe.one_message()
  return transforms.precede(recipe.one_message(), recipe.at_worker)


def _warn_of_delay(run: Run, problem: problems.Problem, rate: Any) -> None:
  """Warns if the recipe's update reads the delay: on a mesh it is always 0."""
  if not _reads_delay(_algorithm(run, rate), problem):
    return
  is_given = run.given_recipe is not None
  name = "the recipe" if is_given else f"recipe {run.recipe!r}"
  warnings.warn(
    f"{name} of run {run.label!r} reads the delay of a gradient, and a mesh is"
    " in step: it reads staleness 0 and the present parameters. Its rule shows"
    " on engines simulate, threads and ray",
    stacklevel=2,
  )


def _reads_delay(
  algorithm: base.Algorithm, problem: problems.Problem
) -> bool:
  """Whether an update depends on the staleness or on the sent parameters. The
  update is traced: if no equation uses an input, the update does not read it.
  """

  def update(params: Any, staleness: jax.Array, sent_params: Any) -> Any:
    delay = base.Delay(jnp.int32(0), staleness, sent_params)
    # Initialised inside, so that only `delay` and the weights are inputs.
    state = algorithm.init(params)
    return algorithm.update(params, state, params, **delay._asdict())

  shapes = jax.eval_shape(problem.init, jax.random.key(0))
  weights = base.weights_of(shapes)
  staleness_shape = jax.ShapeDtypeStruct((), np.int32)
  jaxpr = jax.make_jaxpr(update)(weights, staleness_shape, weights).jaxpr
  # The inputs after the weights: staleness and the sent parameters.
  delay = jaxpr.invars[len(jax.tree.leaves(weights)) :]
  used_variables = (x for equation in jaxpr.eqns for x in equation.invars)
  # By identity, which is how a jaxpr distinguishes its variables.
  return any(x is y for x in used_variables for y in delay)


def _reducer(
  run: Run, mesh: jax.sharding.Mesh, codec_size: traffic.CodecSize
) -> compression.Reducer | None:
  """Returns the reducer of the devices' gradients; None: the exact mean."""
  section = run.config["compress"]
  if section is None:
    return None
  refusals.refuse_codec_object(run, "compress")
  if optimizers.searches(run.config["optimizer"]):
    raise ValueError(
      f"config.compress {section['name']!r} is not for config.optimizer"
      " 'lbfgs', which searches along a line with the exact gradient: drop"
      " config.compress, or use another optimizer"
    )
  with checks.prefix_errors("compress", tuple(section)):
    step_checks.check_alone(
      *(step_checks.REDUCER, mesh, run.config["mesh"]),
      step_checks.REDUCER_VALUES,
    )
    return compression.fitted(compression.named_reducer(**section), *codec_size)


def plan(experiment: Any, run: Run, workers: int) -> MeshPlan:
  """Builds mesh and step of a run, checking that they fit the model."""
  del workers
  mesh = _make_mesh(run, jax.devices())
  problem, step, peak, rate, steps = build_step(experiment, run, mesh)
  # Workers of islands start at the server's parameters: nothing is stale.
  is_local = _local_recipe(run, mesh, peak) is not None
  if not is_local and not optimizers.searches(run.config["optimizer"]):
    _warn_of_delay(run, problem, rate)
  # Traced, so that shapes that do not fit are found now.
  batch, key = job_batches(problem, steps, 0)(0, 0), jax.random.key(0)
  # The error names mesh and model: a shape alone would not help.
  with _name_mesh_in_errors(run, mesh):
    state = step.init(jax.eval_shape(problem.init, key))
    jax.eval_shape(step.step, state, step.place(batch), key)
  updates = max(round(learning_rates.budget_batches(run, problem) / steps), 1)
  return MeshPlan(run, problem, mesh, step, peak, rate, updates, steps)


def build_step(
  experiment: Any, run: Run, mesh: jax.sharding.Mesh
) -> tuple[problems.Problem, data_parallel.Step, float, Any, int]:
  """Returns problem, step, peak and schedule of a run on a mesh, and the count
  of batches in an update."""
  problem = experiment.problem_of(run)
  _check_batch(run, mesh.shape)
  peak = float(run.config["learning_rate"])
  local_recipe = _local_recipe(run, mesh, peak)
  steps = 1 if local_recipe is None else local_recipe.steps
  rate = learning_rates.schedule(
    *(run, problem),
    peak=peak,
    batches=steps,
    start=_WARM_UP_SHARE * peak,
    steps=steps,
  )
  devices = mesh.shape.get(meshes.DATA, 1)  # each has a share of a batch
  # One batch in a message.
  codec_size = traffic.codec_size(experiment.dataset, problem, devices, 1)
  config_keys = *RUN_KEYS, "mesh", "compress"
  # Everything that the step depends on; equal runs share one compilation.
  values = [
    run.recipe,
    run.options,
    codec_size,
    [run.config[key] for key in config_keys],
  ]
  step = _step_cache.get(
    lambda: _make_step(run, problem, mesh, rate, codec_size),
    *(values, rate, mesh, problem.loss, run.given_recipe),
  )
  return problem, step, peak, rate, steps


_step_cache = build_cache.BuildCache()


def _make_step(
  run: Run,
  problem: problems.Problem,
  mesh: jax.sharding.Mesh,
  rate: Any,
  codec_size: traffic.CodecSize,
) -> data_parallel.Step:
  """Builds the step that `build_step` caches."""
  recipe = _local_recipe(run, mesh, rate)
  if recipe is not None:
    decay = problem.statistics_decay
    return islands.make_step(
      # The islands' messages arrive as one, their mean.
      recipe._replace(every=1).server(statistics_decay=decay),
      recipe.make_worker(problem.loss),
      mesh,
      steps=recipe.steps,
    )
  section = run.config["mesh"]
  policy, scale = section["precision"], section["loss_scale"]
  clip = run.config["clip_norm"]
  # A policy of three dtypes: parameters, computation, reduction.
  if policy == DOUBLE:
    policy = precision.Policy(jnp.float64, jnp.float64, jnp.float64)
  reducer = _reducer(run, mesh, codec_size)
  with checks.prefix_errors("mesh.form"):
    return hybrid.make_step(
      _mesh_model(run, problem, mesh),
      _algorithm(run, rate),
      mesh,
      accumulate=section["accumulate"],
      clip_norm=clip and float(clip),  # an int may be too large for JAX
      zero=section["zero"],
      policy=policy,
      loss_scale=scale and precision.Dynamic(**scale),
      form=section["form"],
      statistics_decay=problem.statistics_decay,
      reducer=reducer,
      searches=optimizers.searches(run.config["optimizer"]),
    )


def _make_mesh(run: Run, devices: Sequence[Any]) -> jax.sharding.Mesh:
  """Returns the mesh of a run. Raises ValueError for too few devices."""
  axes = run.config["mesh"]["axes"]
  size = required_devices(run)
  if size is not None and size > len(devices):
    raise ValueError(
      f"config.mesh.axes {meshes.text(axes) or 'data'} needs {size} devices"
      f" and there are {len(devices)} ({devices[0].platform}): use a smaller"
      " mesh, or JAX_PLATFORMS=cpu in the environment, where this command makes"
      " as many of the host's CPU as are needed"
    )
  with checks.prefix_errors("mesh.axes"):
    return meshes.make(axes or {meshes.DATA: -1}, devices)


def mesh_on(run: Run, devices: Sequence[Any]) -> jax.sharding.Mesh:
  """Returns the mesh of a run on `devices`; ValueError unless it uses all of
  them."""
  mesh = _make_mesh(run, devices)
  if mesh.size != len(devices):
    raise ValueError(
      f"config.mesh.axes {meshes.text(mesh.shape)} has {mesh.size} devices, and"
      f" a program is compiled for all {len(devices)} of a topology: use -1 for"
      " one of the axes, or another topology"
    )
  return mesh


def _mesh_model(
  run: Run, problem: problems.Problem, mesh: jax.sharding.Mesh
) -> Any:
  """Returns the problem's model, divided for the axes of the mesh."""
  section = run.config["mesh"]
  options = {"sequence": section["sequence"]}
  if meshes.PIPE in mesh.shape:
    options["microbatches"] = count_microbatches(section, mesh.shape)
    options["rounds"] = section["rounds"] or 1  # None: once around
    options["recompute"] = section["recompute"]
  with _name_mesh_in_errors(run, mesh):
    return hybrid.mesh_model(problem, mesh, **options)


@contextlib.contextmanager
def _name_mesh_in_errors(run: Run, mesh: jax.sharding.Mesh) -> Iterator[None]:
  """Names mesh and model in errors, on one line."""
  try:
    yield
  except (TypeError, ValueError) as error:
    message = " ".join(str(error).split())[:300]
    raise ValueError(
      f"config.mesh.axes {meshes.text(mesh.shape)} and config.model"
      f" {run.config['model']['name']!r}: {message}"
    ) from error
