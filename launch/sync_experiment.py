"""From a config to a synchronous experiment: one step, on a mesh of devices.

The mesh is a matter of the config alone: whatever its axes are, the same
examples are learned from in the same order, and the losses are the same, but
for round-off (and what is drawn: see `asgd.parallel.data.make_step`). A cell is
a run with a seed. Everything that can be wrong with a config is found here,
before anything is written or trained.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import optax

from asgd import base, data, names, problems, sentences, text, transformer
from asgd.parallel import data as data_parallel
from asgd.parallel import hybrid, meshes, precision
from launch import experiment, pipeline_experiment
from launch.pipeline_experiment import blame, flag, whole
from pipeline import spmd

DEFAULTS = {
  # As those of a pipeline.
  "data": pipeline_experiment.DEFAULTS["data"],
  "model": {"name": "mlp"},
  # Axis -> devices; on the command line data:2,tensor:4. One may be -1, for
  # what is left. Without an axis "data" it has one of 1; {} is all on "data".
  "mesh": {},
  "devices": None,  # of the host's CPU, to make; None: as many as the mesh has
  "batch_size": 64,  # examples, or windows, of an update: of all devices
  "accumulate": 1,  # pieces that a replica computes one after the other
  "optimizer": {"name": "sgd"},  # of optax, and its options
  "learning_rate": 0.1,
  "schedule": {  # in updates
    "warmup_updates": 0,
    "decay_updates": (),
    "decay_factor": 0.1,
  },
  "clip_norm": None,  # largest norm of an update's gradient
  "zero": 0,  # what a replica keeps whole: see asgd.parallel.data
  "precision": "unchanged",  # of asgd.parallel.precision; or float64
  "loss_scale": None,  # or a dict, of precision.Dynamic
  "sequence": False,  # the axis tensor splits positions, too
  "microbatches": None,  # of the axis pipe; None: as many as it has stages
  "rounds": None,  # of the axis pipe: how often each goes around; None: once
  "form": "shard_map",  # or pmap
  "updates": 100,
  "seeds": (0,),
  "evaluations": 10,  # per seed, evenly spaced, the last at the end
  "evaluation_examples": 0,  # 0 is all images or sentences, or 64 windows
  "checkpoint_seconds": 30.0,
  "on_nan": "stop",  # or "record": keep the run as diverged and go on
}
DOUBLE = "float64"  # a precision for comparisons: all of it
_AXES = meshes.DATA, meshes.PIPE, meshes.ROWS, meshes.TENSOR  # outermost first
_MOST_DEVICES = 4096
# One needs more than a gradient, one keeps a key, which no checkpoint does.
_NOT = ("lbfgs", "noisy_sgd")


class Cell(NamedTuple):
  """One training run."""

  seed: int

  @property
  def name(self) -> str:
    """Its folder."""
    return f"s{self.seed}"


class Experiment(NamedTuple):
  """All there is to run."""

  config: dict[str, Any]  # resolved: every key, plain data
  dataset: data.Dataset | text.Text | sentences.Sentences
  problem: problems.Problem
  mesh: jax.sharding.Mesh
  step: data_parallel.Step
  rate: Any  # float, or update -> learning rate
  cells: tuple[Cell, ...]

  @property
  def title(self) -> str:
    """The mesh and the optimizer, for people."""
    kept = f", ZeRO {self.config['zero']}" if self.config["zero"] else ""
    return (
      f"{mesh_text(self.mesh.shape)}, {self.config['optimizer']['name']}{kept}"
    )


def mesh_text(shape: Mapping[str, int]) -> str:
  """A mesh for people: "data 2 x tensor 4"."""
  return " x ".join(f"{axis} {size}" for axis, size in shape.items())


# The config.


def resolve(config: ml_collections.ConfigDict | Mapping) -> dict[str, Any]:
  """Returns the config as plain data, with defaults filled in.

  The axes of a mesh are put into one order, so that a mesh is the same however
  it was written.

  Raises:
    ValueError: for a key that means nothing, naming the nearest that does, and
      for a mesh that cannot be read.
  """
  if isinstance(config, ml_collections.ConfigDict):
    config = config.to_dict()
  if isinstance(config, Mapping):
    config = dict(config)
    if isinstance(config.get("optimizer"), str):
      config["optimizer"] = {"name": config["optimizer"]}
    if "mesh" in config:
      config["mesh"] = _mesh(config["mesh"])
  return pipeline_experiment.resolve(config, DEFAULTS)


def _mesh(value: Any) -> dict[str, int]:
  """Reads a mesh: a dict, or a text such as data:2,tensor:4."""
  if isinstance(value, str):
    pairs = [part.replace("=", ":").split(":") for part in value.split(",")]
    try:
      found = {axis.strip(): int(size) for axis, size in pairs}
    except ValueError:
      raise ValueError(
        f"config.mesh must be axes and their sizes, as in data:2,tensor:4, not"
        f" {value!r}"
      ) from None
    if len(found) < len(pairs):
      raise ValueError(f"config.mesh names an axis twice: {value!r}")
    value = found
  if not isinstance(value, Mapping):
    raise ValueError(
      f"config.mesh must be a dict of axes and their sizes, not {value!r}"
    )
  for axis, size in value.items():
    if axis not in _AXES:
      raise ValueError(
        f"unknown axis {axis!r} of config.mesh; {names.nearest(axis, _AXES)}"
      )
    if size != -1 or isinstance(size, bool):
      whole(size, f"mesh.{axis}", most=_MOST_DEVICES)
  if list(value.values()).count(-1) > 1:
    raise ValueError(
      f"config.mesh: only one axis can be -1, for what is left: {value!r}"
    )
  found = {axis: value[axis] for axis in _AXES if axis in value}
  if not found:
    return {}
  return found if meshes.DATA in found else {meshes.DATA: 1, **found}


def override(
  config: ml_collections.ConfigDict | Mapping,
  overrides: Iterable[tuple[str, str]],
) -> dict[str, Any]:
  """Applies command-line overrides to a config.

  Another optimizer drops the options that the config has for the old one.

  Args:
    config: keys as in DEFAULTS.
    overrides: (dotted key, text), as in `experiment.override`.

  Returns:
    The config as plain data, checked by `resolve`.

  Raises:
    ValueError: for a key that means nothing.
  """
  config, overrides = resolve(config), list(overrides)
  for path, value in overrides:
    first, *_ = path.split(".")
    if first not in DEFAULTS:
      raise ValueError(
        f"unknown config key {first!r}; {names.nearest(first, DEFAULTS)}"
      )
    if path == "optimizer.name" and config["optimizer"]["name"] != value:
      config["optimizer"] = {"name": value}
  return resolve(experiment.override(config, overrides))


def devices_of(config: Mapping[str, Any]) -> int | None:
  """Returns how many devices a resolved config needs, None for all there are.

  Raises:
    ValueError: for fewer `devices` than the mesh has.
  """
  shape, devices = config["mesh"], config["devices"]
  if devices is not None:
    whole(devices, "devices", most=_MOST_DEVICES)
  if not shape or -1 in shape.values():
    return devices
  size = math.prod(shape.values())
  if size > _MOST_DEVICES:
    raise ValueError(
      f"config.mesh {mesh_text(shape)} has {size:,} devices; use at most"
      f" {_MOST_DEVICES:,}"
    )
  if devices is not None and devices < size:
    raise ValueError(
      f"config.devices {devices} are fewer than the {size} of config.mesh"
      f" {mesh_text(shape)}: leave it out, or use {size} or more"
    )
  return size if devices is None else devices


def check(config: Mapping[str, Any]) -> None:
  """Checks what can be known of a resolved config before there are devices.

  Raises:
    ValueError: naming a key, its value and the remedy.
  """
  pipeline_experiment.check_common(config)
  devices_of(config)
  whole(config["batch_size"], "batch_size")
  whole(config["accumulate"], "accumulate")
  flag(config["sequence"], "sequence")
  if type(config["zero"]) is not int or config["zero"] not in range(4):
    raise ValueError(
      f"config.zero must be 0, 1, 2 or 3, not {config['zero']!r}"
    )
  with blame("precision"):
    if config["precision"] != DOUBLE:
      known = {**precision.POLICIES, DOUBLE: None}
      names.lookup("precision", config["precision"], known)
  with blame("form"):
    known = {form: form for form in data_parallel.FORMS}
    names.lookup("form", config["form"], known)
  axes = config["mesh"]
  for key, axis, unset in (
    *(("sequence", meshes.TENSOR, False), ("rounds", meshes.PIPE, None)),
    ("microbatches", meshes.PIPE, None),
  ):
    if config[key] is unset:
      continue
    if axis not in axes:
      raise ValueError(
        f"config.{key} {config[key]!r} is for the axis {axis!r}, which"
        f" config.mesh {mesh_text(axes) or 'data'} has not: drop it"
      )
    if axis == meshes.PIPE:
      whole(config[key], key)
  _optimizer(config)
  _loss_scale(config)
  if -1 not in axes.values():
    _check_batch(config, axes or {meshes.DATA: 1})


def _check_batch(config, shape):
  """Whether a batch can be divided as the mesh and others want it."""
  size, replicas = config["batch_size"], shape[meshes.DATA]
  pieces = replicas * config["accumulate"]
  each = f"config.mesh.data {replicas} x config.accumulate"
  if size % pieces:
    raise ValueError(
      f"config.batch_size {size} cannot be divided into {pieces} pieces"
      f" ({each} {config['accumulate']}): use a multiple of {pieces}"
    )
  cut = _microbatches(config, shape)
  if size // pieces % cut:
    raise ValueError(
      f"config.batch_size {size} makes pieces of {size // pieces} ({each}"
      f" {config['accumulate']}), which config.microbatches {cut} does not"
      f" divide: use a multiple of {pieces * cut}"
    )


def _microbatches(config, shape):
  if config["microbatches"] is None:
    return shape.get(meshes.PIPE, 1)
  return config["microbatches"]


# The optimizer.


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
  """Returns optax's optimizers by their names: what takes a learning rate."""
  found = {}
  for name in dir(optax):
    maker = getattr(optax, name)
    if name.startswith(("_", "scale_by")) or name in _NOT:
      continue
    if not isinstance(maker, types.FunctionType | functools.partial):
      continue
    if "learning_rate" in inspect.signature(maker).parameters:
      found[name] = maker
  return found


def _optimizer(config) -> tuple[Any, optax.GradientTransformation]:
  """Returns (float, or update -> learning rate; the transform)."""
  options = dict(config["optimizer"])
  with blame("optimizer.name"):
    maker = names.lookup("optimizer", options.pop("name"), optimizers())
  known = [k for k in inspect.signature(maker).parameters if k[0] != "_"]
  known.remove("learning_rate")
  for key in options:
    if key == "learning_rate":
      raise ValueError(
        "config.optimizer.learning_rate is config.learning_rate: set that"
      )
    if key not in known:
      raise ValueError(
        f"unknown config key 'optimizer.{key}' (optimizer"
        f" {config['optimizer']['name']!r}); {names.nearest(key, known)}"
      )
  with blame("schedule"):
    # In updates: those of a pipeline are of so many microbatches.
    rate = pipeline_experiment.rate_of(
      {**config, "microbatches": 1}, config["learning_rate"], 1
    )
  with blame("optimizer"):
    tx = maker(learning_rate=rate, **options)
    like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    jax.eval_shape(lambda w: tx.update(w, tx.init(w), w), like)
  return rate, tx


def _loss_scale(config) -> precision.Dynamic | None:
  given = config["loss_scale"]
  if given is None:
    return None
  fields = precision.Dynamic._fields
  if not isinstance(given, Mapping):
    raise ValueError(
      f"config.loss_scale must be None or a dict of {', '.join(fields)}, not"
      f" {given!r}"
    )
  for key in given:
    if key not in fields:
      raise ValueError(
        f"unknown config key 'loss_scale.{key}'; {names.nearest(key, fields)}"
      )
  rule = precision.Dynamic(**given)
  with blame("loss_scale"):
    precision.check_dynamic(rule)
  return rule


# The whole.


def build(
  config: ml_collections.ConfigDict | Mapping,
  *,
  data_dir: str | None = None,
  dataset: Any = None,
  start: Callable[[dict[str, Any]], None] = lambda config: None,
) -> Experiment:
  """Builds an experiment from a config, checking all of it.

  Args:
    config: keys as in DEFAULTS.
    data_dir: where the data's files are; of a text, the file.
    dataset: one that is loaded already.
    start: called with the resolved config, to start JAX as it wants it.

  Raises:
    ValueError: for anything wrong, naming it and the remedy.
  """
  config = resolve(config)
  check(config)
  start(config)
  policy = config["precision"]
  if policy == DOUBLE:
    if not jax.config.jax_enable_x64:
      raise ValueError(
        "config.precision float64 needs jax.config.update('jax_enable_x64',"
        " True) first"
      )
    policy = precision.Policy(jnp.float64, jnp.float64, jnp.float64)
  mesh = _make_mesh(config)
  _check_batch(config, mesh.shape)
  dataset, problem = pipeline_experiment.load_problem(
    config, data_dir, dataset, "batch_size"
  )
  shapes = pipeline_experiment.shapes_of(config, problem)
  task = _task(config, problem, mesh)
  rate, tx = _optimizer(config)
  with blame("form"):
    step = hybrid.make_step(
      *(task, tx, mesh),
      accumulate=config["accumulate"],
      clip_norm=config["clip_norm"],
      zero=config["zero"],
      policy=policy,
      loss_scale=_loss_scale(config),
      form=config["form"],
    )
  _try(config, problem, mesh, step, shapes)
  cells = tuple(map(Cell, config["seeds"]))
  return Experiment(config, dataset, problem, mesh, step, rate, cells)


def _make_mesh(config):
  here, wanted = jax.devices(), devices_of(config)
  if wanted is not None and wanted > len(here):
    raise ValueError(
      f"config.mesh {mesh_text(config['mesh']) or 'data'} needs {wanted}"
      f" devices and there are {len(here)} ({here[0].platform}): use a smaller"
      " mesh, or JAX_PLATFORMS=cpu in the environment, where this command makes"
      " as many of the host's CPU as are needed"
    )
  with blame("mesh"):
    return meshes.make(config["mesh"] or {meshes.DATA: -1})


def _task(config, problem, mesh):
  options = {}
  if meshes.PIPE in mesh.shape:
    options = {
      "pipe": spmd.inside,
      "microbatches": _microbatches(config, mesh.shape),
      "rounds": config["rounds"] or 1,
    }
  layers = problem.pieces.layers if problem.pieces else ()
  size = mesh.shape.get(meshes.TENSOR, 1)
  for layer in layers:
    if isinstance(layer, transformer.Block) and layer.heads % size:
      raise ValueError(
        f"config.model.heads {layer.heads} cannot be divided among"
        f" config.mesh.tensor {size}: use other heads or another mesh"
      )
  try:
    return hybrid.task(problem, mesh, sequence=config["sequence"], **options)
  except ValueError as error:
    raise ValueError(
      f"config.mesh {mesh_text(mesh.shape)} and config.model"
      f" {config['model']['name']!r}: {error}"
    ) from error


def _try(config, problem, mesh, step, shapes):
  """Traces a step, so that what does not fit together is found now."""
  batch = problem.batches(0, 1)(0, 0)
  try:
    state = jax.eval_shape(step.init, shapes)
    key = jax.random.key(0)
    jax.eval_shape(step.step, state, step.place(batch), key)
  except (TypeError, ValueError) as error:
    line = " ".join(str(error).split())[:300]
    raise ValueError(
      f"config.mesh {mesh_text(mesh.shape)} and config.model"
      f" {config['model']['name']!r}: {line}"
    ) from error


def parameters(exp: Experiment) -> int:
  """Returns how many numbers are trained."""
  shapes = jax.eval_shape(exp.problem.init, jax.random.key(0))
  return sum(leaf.size for leaf in jax.tree.leaves(base.weights_of(shapes)))
