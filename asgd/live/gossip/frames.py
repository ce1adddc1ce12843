"""What peers tell each other, and how a code travels.

  kind     from, to                    content
  MESSAGE  a peer, who hears it        a code of a round
  ASK      a peer, whom it is to meet  nothing: be mine for one exchange
  GRANT    who was asked, the asker    a code
  ANSWER   the asker, who was asked    a code
  LOAN     a neighbour, a newcomer     what `Peer.lend` made

The three in the middle are those of an exchange of two (AD-PSGD).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from asgd import simulator

MESSAGE, ASK, GRANT, ANSWER, LOAN = "message", "ask", "grant", "answer", "loan"
CODES = MESSAGE, GRANT, ANSWER  # frames that bring a code


class Frame(NamedTuple):
  """What one peer tells another."""

  kind: str
  sender: int
  life: int  # holders that the sender's place had before it
  seq: int = -1  # of the message among those of the sender's place
  round: int = 0
  content: Any = None  # a code or a loan, as it travels
  nbytes: int = 0  # of the content


class Wire(NamedTuple):
  """How codes travel: functions of a code and of what is sent for it."""

  pack: Callable[[Any], Any]
  unpack: Callable[[Any], Any]
  measure: Callable[[Any], int]  # what is sent -> its bytes


def by_reference() -> Wire:
  """Codes as they are, for threads of one process."""
  return Wire(lambda code: code, lambda code: code, simulator.array_bytes)


def as_arrays() -> Wire:
  """Codes as NumPy arrays, for other processes."""
  return by_reference()._replace(pack=jax.device_get)
