"""The base of engines in simulated time, which train some messages at a time.

The result of a cell is a function of its config and its seed. Real time decides
only how many messages a call trains, and when the loop writes a checkpoint.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from asgd import base, simulator
from asgd.experiment import cell_progress, engines
from asgd.experiment.engines import server_results
from asgd.orders.trace import Event

_CALL_SECONDS = 0.25  # of a call; the loop checks clocks and signals in between
_FIRST_MESSAGES = 16  # messages of the first call of `advance`

Restore = Callable[[Callable[[Any], Any]], Any]  # see Context.restore


def rows_between(records: Any, start: int, end: int) -> Any:
  """Returns rows `start`, ..., `end` - 1 of records."""
  return type(records)(*(column[start:end] for column in records))


class SimulatedEngine(engines.Engine):
  """A cell in simulated time, of any protocol."""

  _message_text = "staleness {staleness}"  # of a message that is not finite
  # Joins consecutive records.
  _join: Callable[[Any], Any] = staticmethod(simulator.concatenate)
  # Records so far, if the simulation does not keep them.
  _record_parts: list[Any]
  _seconds = 0.0  # of all calls of `advance`
  unit = "mean batches"

  def __init__(self, context: engines.Context):
    """Starts the cell, or resumes from its last checkpoint."""
    seed = context.cell.seed
    self._plan: Any = context.plan.of_seed(seed)
    self._name = context.cell.name
    init_key, root = jax.random.split(jax.random.key(seed))
    params = self._plan.problem.init(init_key)
    self.total = self._plan.messages
    self.done = self._make_simulation(seed, params, root, context.restore)
    # In rounds all messages of a round are received together.
    first_steps = max(_FIRST_MESSAGES, getattr(self._plan, "quantum", 1))
    self._pace = engines.Pace(_CALL_SECONDS, first_steps)

  @abc.abstractmethod
  def _make_simulation(
    self, seed: int, params: base.Params, root: jax.Array, restore: Restore
  ) -> int:
    """Makes the simulation, new or from a checkpoint.

    Returns the number of messages received so far.
    """

  @abc.abstractmethod
  def _run(self, end: int) -> Any:
    """Simulates to message `end` at most; returns the new records."""

  def _error_text(self, new_records: Any) -> str | None:
    """Describes the first message that is not finite; None if there is none."""
    return server_results.describe_first_not_finite(
      self._plan, new_records, self.done, self._name, self._message_text
    )

  def advance(self, until: int) -> engines.Progress:
    """Simulates for about `_CALL_SECONDS`, to message `until` at most."""
    new_records = self._run(min(self.done + self._pace.begin(), until))
    self._seconds += self._pace.end()
    self.done += len(new_records.loss)
    return self._progress(new_records)

  def _progress(self, new_records: Any) -> engines.Progress:
    """Returns the progress that the new records show."""
    return engines.Progress(
      loss=new_records.loss,
      staleness=engines.mean(new_records.staleness),
      gap=engines.mean(new_records.gap),
      broken=self._error_text(new_records),
      rows=new_records,
    )

  def _trace(self) -> tuple[base.Trace | Sequence[Event], int]:
    """Returns (trace as columns or rows, index of the next row to apply)."""
    return (), 0

  def work(self) -> list[cell_progress.Segment]:
    """Returns the last segments of the workers' time; see the base."""
    rows = cell_progress.rows_before(*self._trace())
    return cell_progress.segments(rows)

  def records(self) -> Any:
    """Returns a row for each message."""
    if len(self._record_parts) > 1:
      self._record_parts = [self._join(self._record_parts)]
    return self._record_parts[0]

  def summary(self, start: int, end: int) -> dict[str, Any]:
    """Returns staleness, gap and losses of messages `start`, ..., `end` - 1."""
    return server_results.summary(rows_between(self.records(), start, end))


def sent_accuracy(
  plan: Any,
  states: Sequence[base.ServerState],
  join: Callable[[list[Any]], base.Params],
) -> dict[str, float]:
  """Returns the accuracy of the parameters in the next ticket, as a column.

  Returns {} for an algorithm that sends the server's parameters.

  Args:
    plan: the cell's plan.
    states: the server's state, one for each shard.
    join: the function that joins the parameters of all shards.
  """
  if plan.server.sends_current or plan.run.given_recipe is not None:
    return {}
  # As worker 0 would receive them.
  sent_params = join([plan.server.send(x, jnp.int32(0)).params for x in states])
  return {"sent_accuracy": plan.problem.evaluate(sent_params).accuracy}
