"""Training from a script: your own loss, parameters and data, in one call.

Each function makes an experiment of one cell from objects, and trains it as
`asgd.experiment` trains configs, so it can be stopped, resumed and replayed.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from asgd import algorithms, calls, checks, compression
from asgd.call_options import (
  LiveOptions,
  MeshOptions,
  RecipeLike,
  RunOptions,
  SimulateOptions,
  read_options,
)
from asgd.call_runs import Result, train
from asgd.experiment import code
from asgd.experiment import replay as replay_lib
from asgd.experiment.engines import EngineKind
from asgd.experiment.engines.live import RAY, THREADS
from asgd.experiment.engines.mesh import MESH
from asgd.experiment.engines.simulate import SIMULATE
from asgd.experiment.folder import only_cell
from asgd.parallel import meshes
from asgd.problems import descriptions, own

_RUNTIMES = {"threads": THREADS, "ray": RAY}


def simulate(
  loss: Any,
  params: Any,
  data: Any,
  recipe: RecipeLike,
  *,
  messages: int | None = None,
  epochs: float | None = None,
  workers: int | None = None,
  batch_size: int | None = None,
  **options: Unpack[SimulateOptions],
) -> Result:
  """Trains with many workers in simulated time.

  Args:
    loss: a function (params, batch) or (params, batch, key) that returns a
      scalar or (scalar, aux); or a pair (model, criterion), with
      criterion(output, batch) -> scalar. The model is a flax module, functions
      (init, apply), such as Haiku's, or a function rngs -> nnx module. It is
      called on the first element of a batch that is a tuple, or on "x" of a
      dict (or its only "image", "images", "input", "inputs" or "tokens"). If it
      takes an argument `train` or `deterministic`, it gets this argument and a
      key for dropout.
    params: a tree of arrays, or a function of a random key that makes one. In
      an Equinox model only arrays of floats are trained; an nnx module must
      have parameters only (nnx.split). With BatchNorm in plain JAX give
      `asgd.Variables`, and a loss that returns (value, the batch's statistics).
      For a flax module give its variables; None draws them from the seed.
    data: arrays with a leading axis of examples, in a tuple or a dict, with
      `batch_size`; an object with len() and an index, such as a
      grain.MapDataset or a list, of batches, or of examples with `batch_size`;
      a pure function (worker, job) -> batch, with jobs counted over all
      workers; or a function (worker) -> iterator of batches
      (`asgd.data.iterators`).
    recipe: a recipe of `asgd`, such as `asgd.dana_zero(0.01, workers=8)`,
      `asgd.table` (tables of keyed rows) or `asgd.sandblaster_lbfgs`; an
      `asgd.Recipe`; or an optax transform, which may read a Delay.
    messages: the number that the server receives; in rounds a multiple of
      `workers`.
    epochs: instead of `messages`: passes of all workers together over the data,
      in rounds rounded down to complete rounds.
    workers: needed if the recipe does not give the number.
    batch_size: examples in a batch, unless the data are batches already.
    folder: where results, a report.html and checkpoints are stored; the same
      call resumes from them. None stores nothing.
    seed: the seed of the initial parameters, the order of examples and the
      durations.
    evaluate: called with the parameters; returns a number or a dict of numbers,
      in which "loss" and "accuracy" count as those of a test.
    every: messages between two evaluations; it divides `messages`. None is
      `messages`: one evaluation, at the end.
    order: when workers start. A name or a dict, as {"name": "fixed_delay"};
      `asgd.orders.protocol.Rules`; the worker of each message, as [0, 1, 0, 2];
      rows (time, worker, seq, job, action); or a function that makes one of
      them (`asgd.orders.own`), or "MODULE:FUNCTION".
    trace: instead of `order`: the trace of another run, as `result.trace`,
      which is repeated. It also gives `messages`.
    durations: the durations of jobs. The seconds of each worker, as [1, 1, 1,
      3]; a name or a dict, as {"name": "gamma"}; a function (worker) -> seconds
      of its jobs; `asgd.orders.durations.Durations`; or "MODULE:FUNCTION".
    topology: the topology of a recipe of peers: a matrix of weights, a name or
      a dict, an `asgd.gossip.Topology`, or "MODULE:FUNCTION". Rows and columns
      sum to 1.
    progress: whether a progress bar is printed on the standard error.
    machine: an `asgd.experiment.machine.Machine`.
    options: `seed` (0) to `machine` (None), described above, and further keys
      of a config. Some are gate={"max_staleness": 8}, clip_norm=1.0 and
      allocation={"batch_size": "speed"} (`asgd.allocation`). `compress` is a
      codec of messages (`asgd.compression`), its name, or a dict of its name
      and options; `compress_down` is a codec of the server's updates.

  Raises ValueError for arguments that do not fit, before anything runs.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import asgd
    >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    >>> def loss(w, batch):
    ...   x, y = batch
    ...   return ((x @ w - y) ** 2).mean()
    >>> recipe = asgd.dana_zero(0.01, workers=4)
    >>> result = asgd.simulate(
    ...   loss, jnp.zeros(3), (x, x.sum(1)), recipe, messages=800, batch_size=8
    ... )
    >>> print(result.params.round(2), result.records.staleness.mean().round())
    [1. 1. 1.] 3.0
    >>> len(str(result).splitlines()) < 10  # print(result) has no arrays
    True
  """
  run_values = messages, epochs, workers, batch_size
  parts = loss, params, data, recipe
  return _train(
    ("simulate", SIMULATE), parts, *read_options(run_values, options)
  )


def train_live(
  loss: Any,
  params: Any,
  data: Any,
  recipe: RecipeLike,
  *,
  messages: int | None = None,
  epochs: float | None = None,
  workers: int | None = None,
  runtime: str = "threads",
  batch_size: int | None = None,
  **options: Unpack[LiveOptions],
) -> Result:
  """Trains with real workers, in real time; for other arguments see `simulate`.

  `asgd.replay` recomputes a run from its folder.

  Args:
    runtime: "threads" of this process, or "ray": processes of a cluster, on
      this machine unless `machine` names another. Ray's cloudpickle sends
      functions and data to them; `evaluate` is called in this process.
    order: a name, a dict, Rules, or a function of `workers` that returns Rules.
    durations: the relative seconds of each worker, as [1, 1, 1, 3]: worker 3 is
      slowed down to a third of the speed of the others.
    options: also further keys of a config, such as server={"shards": 2}, or
      live={"slowdown": (1, 3)}.
  """
  checks.one_of("runtime", runtime, tuple(_RUNTIMES))
  run_values = messages, epochs, workers, batch_size
  parts = loss, params, data, recipe
  engine = runtime, _RUNTIMES[runtime]
  return _train(engine, parts, *read_options(run_values, options))


def train_mesh(
  loss: Any,
  params: Any,
  data: Any,
  recipe: RecipeLike,
  *,
  messages: int | None = None,
  epochs: float | None = None,
  workers: int | None = None,
  axes: Mapping[str, int] | None = None,
  batch_size: int | None = None,
  **options: Unpack[MeshOptions],
) -> Result:
  """Trains one model on a mesh of devices in step: the synchronous baseline.

  Other arguments are those of `simulate`. On a CPU the call makes as many
  devices as `axes` has, if JAX was not used before.

  Args:
    recipe: its update takes the gradient of a complete batch. So a rule that
      reads a delay reads staleness 0, and the call warns of it once. A recipe
      of peers needs a device for each peer.
    messages: the number of updates; for peers the number of messages, a
      multiple of `workers`.
    workers: the number of peers of a recipe of peers.
    axes: axis of the mesh -> its size, as {"data": 4}; None: all devices share
      the examples of a batch. The batch size is a multiple of `data`.
    options: also accumulate=2, zero=1, precision="bfloat16", compress= and
      other settings of `config.mesh` (docs/howto/meshes.md).

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import optax
    >>> import asgd
    >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    >>> def loss(w, batch):
    ...   x, y = batch
    ...   return ((x @ w - y) ** 2).mean()
    >>> result = asgd.train_mesh(
    ...   *(loss, jnp.zeros(3), (x, x.sum(1)), optax.adam(0.1)),
    ...   epochs=20,
    ...   batch_size=16,
    ...   axes={"data": 1},
    ... )
    >>> print(result.params.round(1), len(result.records.loss))
    [1. 1. 1.] 80
  """
  settings: dict[str, Any] = dict(options)
  mesh = {k: settings.pop(k) for k in MESH.sections["mesh"] if k in settings}
  if axes is not None:
    mesh["axes"] = axes
    sizes = axes.values() if isinstance(axes, Mapping) else ()
    if all(isinstance(size, int) and size > 0 for size in sizes):
      meshes.want_cpu_devices(math.prod(sizes))
  if getattr(recipe, "gossip", None) is not None:
    meshes.want_cpu_devices(getattr(recipe, "workers", None) or 1)
  elif getattr(recipe, "protocol", None) in (None, "server"):
    if workers is not None:
      raise ValueError(
        f"workers={workers} is for recipes of peers: the devices of a mesh"
        f" compute one gradient; drop it, and use axes={{'data': {workers}}}"
      )
    recipe, workers = _of_one_worker(recipe), 1
  run_values = messages, epochs, workers, batch_size
  run, config = read_options(run_values, settings)
  calls.check_keys(config, (*MESH.sections["mesh"], "compress"))
  if mesh:
    config["mesh"] = mesh
  parts = loss, params, data, recipe
  return _train(("mesh", MESH), parts, run, config)


def _of_one_worker(recipe: Any) -> Any:
  """Returns a recipe with a server for one worker. A recipe that was changed by
  hand cannot be rebuilt, and is used as it is."""
  if not isinstance(recipe, algorithms.Recipe):
    return recipe
  try:
    rate = recipe.build.learning_rate if recipe.build else 1.0
    return algorithms.rebuild(recipe, rate, 1)
  except ValueError:
    return recipe._replace(workers=1)


def _train(
  engine: tuple[str, EngineKind],
  parts: tuple[Any, ...],
  options: RunOptions,
  config: Mapping[str, Any],
) -> Result:
  """Trains a caller's (loss, parameters, data, recipe)."""
  loss, params, data, recipe = parts
  config, kind = dict(config), engine[1]
  # Mistakes that do not depend on the data are found before data are read.
  extra_keys = ("topology", "trace") if "order" in kind.sections else ()
  calls.check_keys(config, (*kind.sections, *extra_keys))
  calls.check_length(options, has_trace="trace" in config)
  topology = config.pop("topology", None)
  recipe = calls.read_recipe(recipe, options.workers, topology)
  config, objects = calls.read_config(
    config, recipe.workers, live=kind.journaled
  )
  with calls.in_words_of_calls(engine[0]):
    caller_objects = own.Objects(
      *(loss, params, data, recipe),
      batch_size=options.batch_size,
      evaluate=options.evaluate,
      objects=objects,
    )
    quantum = calls.quantum_of(recipe, config, recipe.workers)
    return train(caller_objects, engine, config, options, quantum=quantum)


@calls.in_words_of_calls()
def replay(
  folder: str | os.PathLike[str],
  loss: Any = None,
  params: Any = None,
  data: Any = None,
  recipe: Any = None,
  *,
  compress: compression.Codec | None = None,
  compress_down: compression.Codec | None = None,
  data_dir: str | None = None,
  trust: bool = False,
) -> replay_lib.Replay:
  """Recomputes a live run from its traces.

  Args:
    folder: the folder of `train_live`; or WORKDIR/cells/NAME of asgd train, or
      a WORKDIR that has one cell.
    loss, params, data, recipe: for a run of `train_live`, the objects that it
      was given. They may be left out if the first three are functions of
      modules that can be imported, and the recipe was built by name with plain
      options.
    compress, compress_down: the codecs, if the run was given them as objects.
    data_dir: for a run of asgd train: where the dataset's files are.
    trust: whether to import and run functions that another user's folder names.

  Returns:
    A `Replay`; its `same` says whether it equals the run to the bit. If not,
    `reason` has the most likely reason, such as a trace that was cut short.

  Raises:
    ValueError: if there is nothing to replay, the trace cannot be replayed, or
      an argument is not what the run was trained on.
  """
  folder = checks.path("folder", folder)
  if data_dir is not None:
    data_dir = str(checks.path("data_dir", data_dir))
  identity = replay_lib.dataset_identity(folder)
  # [1] A run of a config names all that it needs.
  if identity.get("name") != own.Objects.name:
    if any(part is not None for part in (loss, params, data, recipe)):
      raise ValueError(
        f"{folder} was trained from a config, which names loss, params, data"
        " and recipe: call asgd.replay(folder) alone"
      )
    return replay_lib.replay(folder, data_dir=data_dir, trust=trust)
  # [2] A run of objects needs them again: given, or imported by their names.
  if loss is None:
    code.check_trusted(only_cell(folder), identity, trust=trust)
    loss, params, data, recipe = _import_parts(folder, identity)
  # [3] A recipe for another number of workers would be another computation.
  build = identity.get("build") or {}
  count, recipe_workers = build.get("workers"), getattr(recipe, "workers", None)
  if None not in (count, recipe_workers) and count != recipe_workers:
    raise ValueError(
      f"{folder} has {count} workers, but the recipe was built for"
      f" {recipe_workers}: build it with workers={count}"
    )
  if count is None:
    count = replay_lib.worker_count(folder)
  recipe = calls.read_recipe(recipe, count)
  # [4] Recompute the run.
  codecs = {"compress": compress, "compress_down": compress_down}
  caller_objects = own.Objects(
    *(loss, params, data, recipe),
    batch_size=identity.get("batch_size"),
    objects={key: codec for key, codec in codecs.items() if codec},
  )
  result = replay_lib.replay(
    folder, caller_objects=caller_objects, trust=trust
  )
  return result._replace(params=caller_objects.outward(result.params))


def _import_parts(folder: Path, identity: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns (loss, params, data, recipe) by the names in a run's folder."""
  parts = {
    key: descriptions.importable(identity[key])
    for key in ("loss", "params", "data")
  }
  # A lambda or a nested function has no name that can be imported.
  missing = [key for key, value in parts.items() if value is None]
  missing += [] if identity["build"] else ["recipe"]
  if missing:
    raise ValueError(
      f"{folder} was trained on objects that cannot be imported"
      f" ({', '.join(missing)}): pass them, asgd.replay(folder, loss, params,"
      " data, recipe)"
    )
  build = dict(identity["build"])
  options = build.pop("options")
  return *parts.values(), algorithms.build(**build, **options)


__all__ = ["Result", "replay", "simulate", "train_live", "train_mesh"]
