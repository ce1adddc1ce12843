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
clocks, are in `asgd.experiment`; it is imported when it is asked for.
"""

import gc
import importlib
from importlib import metadata
from typing import Any

# What is imported, JAX with it, stays: to look for garbage in it, again and
# again, would take a quarter of the time.
_collects = gc.isenabled()
gc.disable()
try:
  from asgd import algorithms, optimizers, transforms
  from asgd.algorithms import PEER_RECIPES, RECIPES, Recipe, build
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
  from asgd.server import make_server
  from asgd.transforms import (
    adaptive_delay_compensation,
    delay_compensation,
    lookahead,
    per_worker,
    precede,
    scale_by_staleness,
  )
  from asgd.worker import elastic_worker, gradient_worker, local_worker
finally:
  if _collects:
    gc.enable()

_FACADE = "Result", "replay", "simulate", "train_live"
_ROOMS = "compression", "data", "gossip", "models", "orders", "problems"
_ROOMS += ("simulator",)
_RECIPES = {name: algorithms.called(name) for name in algorithms.ALL}
globals().update(_RECIPES)  # a function for each

__all__ = [
  *("PEER_RECIPES", "RECIPES", "Algorithm", "Delay", "Recipe", "Records"),
  *("Report", "Server", "ServerState", "Ticket", "Trace", "TrainState"),
  *("Variables", "Worker", "as_algorithm", "build", "elastic_worker"),
  *("gradient_worker", "local_worker", "make_server", "algorithms"),
  *("optimizers", "transforms"),
  *("adaptive_delay_compensation", "delay_compensation", "lookahead"),
  *("per_worker", "precede", "scale_by_staleness"),
  *(*_FACADE, *_ROOMS, *_RECIPES, "__version__"),
]


def __getattr__(name: str) -> Any:
  """Imports what takes long, such as the room of experiments, at its first
  use."""
  if name in _FACADE:
    return getattr(importlib.import_module("asgd.facade"), name)
  if name in _ROOMS:
    return importlib.import_module(f"asgd.{name}")
  if name == "TrainState":
    return importlib.import_module("asgd.train_state").TrainState
  if name == "__version__":
    return _version()
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
  """What pyproject.toml says, as it was installed; where only the code is, as
  on the machines of a Ray cluster, it is not known."""
  try:
    return metadata.version("asgd")
  except metadata.PackageNotFoundError:
    return "unknown"


def __dir__() -> list[str]:
  return sorted(__all__)
