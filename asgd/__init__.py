"""Train one network with many workers, and cure the staleness of gradients.

  import asgd

  result = asgd.simulate(
    loss, params, data, asgd.dana_zero(0.01, workers=8), messages=400
  )

`simulate` and `train_live` train a loss of one's own, and `replay` computes a
live run again. Recipes, such as `dana_zero`, are functions of a learning rate
and a number of workers. The transforms that they are made of, such as
`delay_compensation`, are for optax chains of one's own: all are in
`asgd.transforms`, and here unless a recipe has that name (`gap_aware` is the
recipe, `transforms.gap_aware` its transform).

The contract is in `asgd.base`, the algorithms in `asgd.algorithms`, the orders
in which workers receive parameters and send gradients in `asgd.orders`, and a
simulator of any of them in `asgd.simulator`. Experiments, which have files and
clocks, are in `asgd.experiment`. All are imported when they are asked for.
"""

import gc
import importlib
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker sees names; `_HOMES` has them for Python
  from asgd.algorithms import (
    PEER_RECIPES,
    RECIPES,
    Recipe,
    ad_psgd,
    asgd,
    build,
    choco_sgd,
    d2,
    d_psgd,
    dana_dc,
    dana_slim,
    dana_zero,
    dc_asgd_a,
    dc_asgd_c,
    diloco,
    downpour,
    easgd,
    fedasync,
    gap_aware,
    local_d_psgd,
    model_averaging,
    multi_asgd,
    nag_asgd,
    sgp,
    ssgd,
    staleness_aware,
    threshold_sharing,
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
  from asgd.facade import Result, replay, simulate, train_live
  from asgd.server import make_server
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

_RECIPES_ROOM = "algorithms"  # each of its recipes is a function of `asgd`
_HOMES = {  # room -> names that are here, too
  _RECIPES_ROOM: ("PEER_RECIPES", "RECIPES", "Recipe", "build"),
  "base": (
    *("Algorithm", "Delay", "Records", "Report", "Server", "ServerState"),
    *("Ticket", "Trace", "Variables", "Worker", "as_algorithm"),
  ),
  "facade": ("Result", "replay", "simulate", "train_live"),
  "server": ("make_server",),
  "train_state": ("TrainState",),
  "transforms": (
    *("adaptive_delay_compensation", "delay_compensation", "lookahead"),
    *("per_worker", "precede", "scale_by_staleness"),
  ),
  "worker": ("elastic_worker", "gradient_worker", "local_worker"),
}
_ROOMS = (
  *("algorithms", "compression", "data", "gossip", "models", "optimizers"),
  *("orders", "problems", "simulator", "transforms"),
)
_HOME_OF = {name: room for room, names in _HOMES.items() for name in names}


def _attribute(name: str) -> Any:
  """Imports a name at its first use: JAX alone takes a second."""
  if name == "__version__":
    return _version()
  if name.startswith("_") and name != "__all__":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  collects = gc.isenabled()
  # What is imported, JAX with it, stays: to look for garbage in it, again and
  # again, would take a quarter of the time.
  gc.disable()
  try:
    value = _imported(name)
  finally:
    if collects:
      gc.enable()
  globals()[name] = value  # and is looked up once
  return value


if not TYPE_CHECKING:  # to a type checker an unknown name is an error
  __getattr__ = _attribute


def _imported(name: str) -> Any:
  room = importlib.import_module
  if util.find_spec(f"asgd.{name}"):
    return room(f"asgd.{name}")
  if name in _HOME_OF:
    return getattr(room(f"asgd.{_HOME_OF[name]}"), name)
  algorithms = room(f"asgd.{_RECIPES_ROOM}")
  if name == "__all__":
    return [*_HOME_OF, *_ROOMS, *algorithms.ALL, "__version__"]
  if name not in algorithms.ALL:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return algorithms.called(name)


def _version() -> str:
  """What pyproject.toml says, as it was installed; where only the code is, as
  on the machines of a Ray cluster, it is not known."""
  try:
    return metadata.version("asgd")
  except metadata.PackageNotFoundError:
    return "unknown"


def __dir__() -> list[str]:
  return sorted(_attribute("__all__"))
