"""Train one network with many workers, and cure the staleness of gradients.

The contract is in `asgd.base`, the algorithms in `asgd.algorithms`, who sends
when in `asgd.orders`, and an engine that obeys it in `asgd.simulator`.
"""

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

__all__ = [
  "RECIPES",
  "Algorithm",
  "Delay",
  "Recipe",
  "Records",
  "Report",
  "Server",
  "ServerState",
  "Ticket",
  "Trace",
  "Variables",
  "Worker",
  "as_algorithm",
  "build",
  "elastic_worker",
  "gradient_worker",
  "local_worker",
  "make_server",
]
