"""One stage of a pipeline: its function, initial weights and server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from asgd import base


class Part(NamedTuple):
  """One stage, for the executor."""

  # params, x, extra -> y, aux; the last stage's y is the loss, float[].
  fn: Callable[[Any, Any, Any], tuple[Any, Any]]
  params: Any  # initial values
  # Makes an update of each message: the table averages microbatches to one.
  server: base.Server
  at_worker: optax.GradientTransformation | None = None  # DANA-Slim's momentum
  # Server state -> the parameters for a backward that reads newer weights than
  # its forward (`discrepancy`); None: the server's weights.
  correct: Callable[[base.ServerState], Any] | None = None
