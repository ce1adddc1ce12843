"""Swaps weights larger than a device between the host and the device.

The host's memory holds the blocks of all stages, and a lane's device caches as
many as fit (`asgd.device_memory`). The table gives the order of their uses.

  weights  of a stage: read by its forwards, backwards and updates
  state    of its optimizer: read and replaced by its updates
  sum      of gradients of an update of several microbatches
"""

from collections.abc import Sequence

import jax

from asgd import base
from asgd.device_memory import Block, DeviceMemory, copies, nbytes
from asgd.pipeline.instructions import UPDATE, Instruction
from asgd.pipeline.stage import Part
from asgd.pipeline.state import SUM
from asgd.pipeline.table import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule

WEIGHTS, STATE = "weights", "state"


def needs(op: Instruction, every: int) -> tuple[Block, ...]:
  """Returns the blocks that an instruction of a synchronous schedule needs.

  Example:
    >>> from asgd.pipeline.instructions import Instruction
    >>> needs(Instruction(3, "update", 1, 0, 0, last=True), every=1)
    ((1, 'weights'), (1, 'state'))
  """
  if op.kind in (FORWARD, BACKWARD, INPUT, WEIGHT):
    return ((op.stage, WEIGHTS),)
  if op.kind != UPDATE:
    return ()
  blocks = []
  if every > 1:
    blocks.append((op.stage, SUM))
  if op.last:
    blocks += [(op.stage, WEIGHTS), (op.stage, STATE)]
  return tuple(blocks)


def sizes_of(part: Part) -> dict[str, int]:
  """Returns the bytes of a stage's blocks, by kind; shapes are enough."""
  state = jax.eval_shape(part.server.init, part.params)
  return {
    WEIGHTS: nbytes(state.params),
    STATE: nbytes(state._replace(params=())),
    SUM: nbytes(base.weights_of(part.params)),
  }


def check(schedule: Schedule, parts: Sequence[Part], room: int) -> None:
  """Raises ValueError if `room` bytes per device are too few for an update, or
  if schedule or recipe do not allow weights on the host. `parts` may have
  shapes in place of arrays."""
  if not schedule.flush:
    raise ValueError(
      f"the schedule {schedule.name} keeps several versions of weights; use one"
      " that is synchronous, such as breadth_first"
    )
  for stage, (part, places) in enumerate(
    zip(parts, schedule.places(), strict=True)
  ):
    if len(places) > 1:
      raise ValueError(
        f"stage {stage} has {len(places)} replicas; give each stage one device"
      )
    if part.at_worker or not part.server.sends_current:
      raise ValueError(
        "the recipe keeps a state at workers, or sends other parameters than"
        " the server's, which would be held too: use another, such as ssgd"
      )
    sizes, every = sizes_of(part), schedule.every
    needed_bytes = sizes[WEIGHTS] + sizes[STATE]
    if every > 1:
      needed_bytes += sizes[SUM]
    if needed_bytes > room:
      raise ValueError(
        f"the update of stage {stage} needs {needed_bytes / 1e6:.6g} MB at"
        f" once, and there is room for {room / 1e6:.6g}: give more, or cut the"
        " model into more stages"
      )


class LaneMemory(DeviceMemory):
  """The memory of a lane's device, for the blocks of its stages."""

  def __init__(
    self,
    ops: Sequence[Instruction],
    every: int,
    room: int,
    device: jax.Device,
  ):
    """Prepares for a lane's instructions of one batch, with updates of `every`
    microbatches. Raises ValueError if JAX has no host memory for the device."""
    super().__init__([needs(op, every) for op in ops], room, copies(device))
    self._index = {_op_key(op): index for index, op in enumerate(ops)}

  def begin_op(self, op: Instruction) -> None:
    """Begins an instruction of any batch; see `begin`."""
    self.begin(self._index[_op_key(op)])


def _op_key(op):
  return op.slot, op.kind, op.stage, op.microbatch
