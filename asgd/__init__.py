"""Train one network with many workers, and cure the staleness of gradients.

The contract is in `asgd.base`, the algorithms in `asgd.algorithms`, the orders
in which workers receive parameters and send gradients in `asgd.orders`, and a
simulator of any of them in `asgd.simulator`. Experiments, which have files and
clocks, are in `asgd.experiment`; it is imported when it is asked for.
"""

from typing import Any

from asgd.algorithms import RECIPES, Recipe, build
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
from asgd.worker import elastic_worker, gradient_worker, local_worker


def __getattr__(name: str) -> Any:
  """Imports `replay`, and `asgd.experiment` with it, at its first use."""
  if name != "replay":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from asgd.experiment.replay import replay

  return replay
