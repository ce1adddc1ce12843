"""Commands of a coordinator to the shards of a server.

A command is plain data with a number. It names vectors. Every shard executes it
on its own rows of these vectors. So a coordinator needs no parameters, and the
journal of commands determines a shard's vectors.

  operation  effect on the rows                           answer
  allocate   target <- 0
  copy       target <- source
  scale      target <- factor target
  axpy       target <- target + factor source
  multiply   target <- target source, by coefficient
  dot                                                     target . source
  discard    removes target

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
  target: str  # the vector that is written; for dot, the first operand
  source: str = ""  # the vector that is read; "" if the operation reads none
  factor: float = 1.0  # of scale and axpy

  def format(self) -> str:
    """Returns the command as a line of a journal, without newline. The factor
    keeps all its bits."""
    number, *words, factor = self
    return ",".join([str(number), *words, repr(float(factor))])

  @classmethod
  def parse(cls, line: str) -> "Command":
    """Returns the Command of a line; ValueError, which shows the line, if the
    line is no command."""
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
  """Raises ValueError, which names the field, for an invalid command."""
  number, operation, target, source, factor = command
  checks.integer("number", number, 0)
  names.check("operation", operation, OPERATIONS)
  needs_source = operation in _WITH_SOURCE
  if not target or bool(source) != needs_source:
    expected = (
      "a target and a source" if needs_source else "a target and no source"
    )
    raise ValueError(
      f"{operation} needs {expected}, not {checks.shown((target, source))}"
    )
  if operation in _WITH_FACTOR:
    if not math.isfinite(factor):
      raise ValueError(f"a factor of {operation} must be finite, not {factor}")
  elif factor != 1:
    raise ValueError(f"{operation} has no factor, not {factor}")
