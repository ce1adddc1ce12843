"""Train one network with many workers, and cure the staleness of gradients.

  import asgd

  result = asgd.simulate(
    loss, params, data, asgd.dana_zero(0.01, workers=8), messages=400
  )

`simulate`, `train_live` and `train_mesh` train your own loss; `replay`
recomputes a live run. Recipes, such as `dana_zero`, are functions of a learning
rate and a number of workers. `table` (keyed rows) and `sandblaster_lbfgs` are
recipes, too. The transforms inside recipes, such as `delay_compensation`, can
be used in your own optax chains. All of them are in `asgd.transforms`, and most
also in `asgd`. If a recipe and a transform share a name, `asgd` has the recipe:
`asgd.gap_aware` is the recipe, `asgd.transforms.gap_aware` its transform.

    order -> ticket -> message -> delay -> update -> record

Where to begin: the contract is in `asgd.base`, the two sides of a message in
`asgd.server` and `asgd.worker`, the algorithms in `asgd.algorithms`. An order
(`asgd.orders`) says when workers receive parameters and send gradients;
`asgd.simulator` runs any order. Experiments, which have files and clocks, are
in `asgd.experiment`. Each module is imported at its first use.
"""

import gc
import importlib
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

# For type checkers. Python itself looks names up in `_NAMES_BY_MODULE`.
if TYPE_CHECKING:
  from asgd import (
    algorithms,
    compression,
    data,
    gossip,
    models,
    optimizers,
    orders,
    pipeline,
    problems,
    simulator,
    transforms,
  )
  from asgd.algorithms import (
    PEER_RECIPES,
    RECIPES,
    Recipe,
    ad_psgd,
    adadelay,
    asgd,
    async_diloco,
    async_threshold_sharing,
    build,
    choco_sgd,
    d2,
    d_psgd,
    dana_dc,
    dana_slim,
    dana_zero,
    dc_asgd_a,
    dc_asgd_c,
    delay_adaptive,
    diloco,
    downpour,
    easgd,
    fedasync,
    fedbuff,
    gap_aware,
    gradient_tracking,
    local_d_psgd,
    mindflayer_sgd,
    model_averaging,
    multi_asgd,
    nag_asgd,
    rennala_sgd,
    ringmaster_asgd,
    sgp,
    slowmo,
    ssgd,
    staleness_aware,
    threshold_sharing,
    worker_optimizer,
  )
  from asgd.base import (
    Algorithm,
    Delay,
    Records,
    Report,
    Server,
    ServerState,
    Ticket,
    Trace,
    Variables,
    Worker,
    as_algorithm,
  )
  from asgd.facade import Result, replay, simulate, train_live, train_mesh
  from asgd.sandblaster.settings import sandblaster_lbfgs
  from asgd.server import make_server
  from asgd.tables.settings import table
  from asgd.train_state import TrainState
  from asgd.transforms import (
    adaptive_delay_compensation,
    delay_compensation,
    per_worker,
    precede,
    scale_by_staleness,
  )
  from asgd.transforms.lookahead import lookahead
  from asgd.worker import elastic_worker, gradient_worker, local_worker

  __version__: str

_RECIPES_MODULE = "algorithms"  # each of its recipes is a function of `asgd`
# Module -> the names that `asgd` exports from it.
_NAMES_BY_MODULE = {
  _RECIPES_MODULE: ("PEER_RECIPES", "RECIPES", "Recipe", "build"),
  "base": (
    *("Algorithm", "Delay", "Records", "Report", "Server", "ServerState"),
    *("Ticket", "Trace", "Variables", "Worker", "as_algorithm"),
  ),
  "facade": ("Result", "replay", "simulate", "train_live", "train_mesh"),
  "sandblaster.settings": ("sandblaster_lbfgs",),
  "server": ("make_server",),
  "tables.settings": ("table",),
  "train_state": ("TrainState",),
  "transforms": (
    *("adaptive_delay_compensation", "delay_compensation", "lookahead"),
    *("per_worker", "precede", "scale_by_staleness"),
  ),
  "worker": ("elastic_worker", "gradient_worker", "local_worker"),
}
_MODULES = (
  *("algorithms", "compression", "data", "gossip", "models", "optimizers"),
  *("orders", "pipeline", "problems", "simulator", "transforms"),
)
_MODULE_OF_NAME = {
  name: module
  for module, names in _NAMES_BY_MODULE.items()
  for name in names
}


def _import_lazily(name: str) -> Any:
  """Imports a name at its first use: JAX alone takes a second."""
  if name == "__version__":
    return _version()
  if name.startswith("_") and name != "__all__":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  gc_was_enabled = gc.isenabled()
  # Imported modules stay, JAX included. Garbage collections during the import
  # would find nothing and take a quarter of its time.
  gc.disable()
  try:
    value = _import(name)
  finally:
    if gc_was_enabled:
      gc.enable()
  globals()[name] = value  # later uses do not call __getattr__
  return value


if not TYPE_CHECKING:  # to a type checker an unknown name is an error
  __getattr__ = _import_lazily


def _import(name: str) -> Any:
  """Returns a submodule, a name of `_NAMES_BY_MODULE`, a recipe, or the list of
  all names."""
  load = importlib.import_module
  if util.find_spec(f"asgd.{name}"):
    return load(f"asgd.{name}")
  if name in _MODULE_OF_NAME:
    return getattr(load(f"asgd.{_MODULE_OF_NAME[name]}"), name)
  algorithms = load(f"asgd.{_RECIPES_MODULE}")
  if name == "__all__":
    return [*_MODULE_OF_NAME, *_MODULES, *algorithms.ALL, "__version__"]
  if name not in algorithms.ALL:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return algorithms.recipe_function(name)


def _version() -> str:
  """Returns the installed version; "unknown" if only the source is present, as
  on the machines of a Ray cluster."""
  try:
    return metadata.version("asgd")
  except metadata.PackageNotFoundError:
    return "unknown"


def __dir__() -> list[str]:
  return sorted(_import_lazily("__all__"))
