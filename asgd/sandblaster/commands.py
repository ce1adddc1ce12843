"""Commands: what a coordinator may tell the shards of a server to do.

A command is plain data with a number. It names vectors, of which each shard
holds its rows, and is done by every shard on those. So a coordinator needs no
parameters, and a journal of commands is all that a shard did.

  operation  what it does to the rows                     its answer
  allocate   target <- 0
  copy       target <- source
  scale      target <- factor target
  axpy       target <- target + factor source
  multiply   target <- target source, by coefficient
  dot                                                     target . source
  discard    target is forgotten

Source: Dean et al., "Large scale distributed deep networks", NIPS 2012, section
4.2: "a small set of operations (e.g., dot product, scaling, coefficient-wise
addition, multiplication) that can be performed by each parameter server shard
independently".
"""

import math
from typing import NamedTuple

from asgd import checks, names

OPERATIONS = (
  *("allocate", "copy", "scale", "axpy", "multiply", "dot", "discard"),
)
_WITH_SOURCE = "copy", "axpy", "multiply", "dot"
_WITH_FACTOR = "scale", "axpy"


class Command(NamedTuple):
  """One command.

  Example:
    >>> from asgd.sandblaster import Command
    >>> command = Command(12, "axpy", "direction", "s3", -0.1)
    >>> command.format()
    '12,axpy,direction,s3,-0.1'
    >>> Command.parse("12,axpy,direction,s3,-0.1") == command
    True
  """

  number: int  # counts the commands of a run from 0
  operation: str  # one of OPERATIONS
  target: str  # the vector that is written; of dot, one of the two
  source: str = ""  # the vector that is read, if there is one
  factor: float = 1.0  # of scale and axpy

  def format(self) -> str:
    """Returns the command as a line of a journal, without newline; the factor
    keeps all its bits."""
    number, *words, factor = self
    return ",".join([str(number), *words, repr(float(factor))])

  @classmethod
  def parse(cls, line: str) -> "Command":
    """Returns the Command of a line; ValueError, which shows it, if it is
    none."""
    try:
      number, operation, target, source, factor = line.strip().split(",")
      command = cls(int(number), operation, target, source, float(factor))
      check(command)
    except ValueError as error:
      raise ValueError(
        f"{checks.shown(line)} is no command, which is number,operation,target,"
        f"source,factor: {checks.text_of(error, 200)}"
      ) from None
    return command


def check(command: Command) -> None:
  """Raises ValueError, which names the field, for a command that no shard can
  obey."""
  number, operation, target, source, factor = command
  checks.whole("number", number, 0)
  names.check("operation", operation, OPERATIONS)
  needs = operation in _WITH_SOURCE
  if not target or bool(source) != needs:
    wanted = "a target and a source" if needs else "a target and no source"
    raise ValueError(
      f"{operation} needs {wanted}, not {checks.shown((target, source))}"
    )
  if operation in _WITH_FACTOR:
    if not math.isfinite(factor):
      raise ValueError(f"a factor of {operation} must be finite, not {factor}")
  elif factor != 1:
    raise ValueError(f"{operation} has no factor, not {factor}")
