"""Compiled stages on the devices of a program's lanes: what obeys a table."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, simulator
from pipeline import stage as stage_lib
from pipeline.instructions import Program, TicketKey


class PipelineError(RuntimeError):
  """A task failed; its text names stage and microbatch, its cause says why."""


class CompiledPart(NamedTuple):
  """One stage's programs."""

  stage: stage_lib.Stage | None  # None where all of its lanes are elsewhere
  steps: simulator.Steps  # of its server
  message: optax.GradientTransformationExtraArgs | None


@functools.lru_cache(maxsize=64)
def _steps(server):
  return simulator.compile_steps(server, None)


@functools.lru_cache(maxsize=64)
def _transform(message):
  if message is None:
    return None
  transform = optax.with_extra_args_support(message)
  return optax.GradientTransformationExtraArgs(
    jax.jit(transform.init), jax.jit(transform.update)
  )


def compile_parts(
  parts: Sequence[stage_lib.Part],
  extra: Callable[[int, int], Any],
  here: Sequence[bool],
) -> tuple[CompiledPart, ...]:
  """Compiles each stage once, from shapes.

  Args:
    parts: the stages, S.
    extra: as of `executor.Executor`.
    here: whether a lane of the stage is in this process; others are not
      compiled.

  Raises:
    ValueError: for parameters without a gradient, or a last stage that returns
      no loss.
    PipelineError: for a stage that cannot be compiled.
  """
  out: list[CompiledPart] = []
  x: Any = ()
  for index, part in enumerate(parts):
    for leaf in jax.tree.leaves(base.weights_of(part.params)):
      if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
          f"stage {index} has parameters of dtype {leaf.dtype}, which have no"
          " gradient: make them constants of its fn, or give them by extra"
        )
    inputs, compiled = extra(index, 0), None
    try:
      if here[index]:
        compiled = stage_lib.compile_stage(part.fn, part.params, x, inputs)
        x = compiled.y
      else:
        x = jax.eval_shape(part.fn, part.params, x, inputs)[0]
    except Exception as error:
      raise PipelineError(
        f"stage {index} cannot be compiled: {error}"
      ) from error
    out.append(
      CompiledPart(compiled, _steps(part.server), _transform(part.message))
    )
  scalar = getattr(x, "shape", None) == ()
  if not scalar or not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(
      "the last stage must return its loss, float[], not"
      f" {jax.tree.map(lambda s: f'{s.dtype}{list(s.shape)}', x)}"
    )
  return tuple(out)


class CompiledProgram(NamedTuple):
  """Compiled stages on the devices of a program's lanes."""

  program: Program
  parts: tuple[CompiledPart, ...]  # S
  devices: dict[int, jax.Device]  # of the lanes that are here
  queues: Mapping[int, Any] | None  # of all lanes, if some are elsewhere
  extra: Callable[[int, int], Any]
  own: Mapping[str, Callable[[int], Any]]  # the user's actions
  recompute: bool
  clock: Callable[[], float] | None
  # Whether a lane waits for what it has started: its own core does the work, or
  # the time of the work is taken.
  waits: bool

  def now(self, slot: int = 0) -> float:
    """Returns the time; without a clock it is that of the slot."""
    return self.clock() if self.clock else float(slot)

  def settle(self, value: Any) -> None:
    """Waits for a value, if lanes wait."""
    if self.waits:
      jax.block_until_ready(value)

  def homes(self) -> dict[int, jax.Device]:
    """Returns the devices of the servers that are here, by stage."""
    lanes = enumerate(places[0] for places in self.program.places)
    return {s: self.devices[lane] for s, lane in lanes if lane in self.devices}

  def tickets(
    self, stage: int, version: int, server: base.ServerState
  ) -> Iterator[tuple[TicketKey, int, base.Ticket]]:
    """Yields what replicas are sent of a version that they will read: (key,
    lane, ticket on the lane's device, if that is here)."""
    for replica in self.program.readers.get((stage, version), ()):
      ticket = self.parts[stage].steps.send(server, jnp.int32(replica))
      lane = self.program.places[stage][replica]
      if lane in self.devices:
        ticket = jax.device_put(ticket, self.devices[lane])
      yield (stage, version, replica), lane, ticket
