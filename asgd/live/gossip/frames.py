"""What peers tell each other, and how a code travels.

  kind     from, to                    content
  MESSAGE  a peer, who hears it        a code of a round
  ASK      a peer, whom it is to meet  nothing: be mine for one exchange
  GRANT    who was asked, the asker    a code
  ANSWER   the asker, who was asked    a code
  LOAN     a neighbour, a newcomer,    what `Peer.lend` made
           and the other way

The three in the middle are those of an exchange of two (AD-PSGD).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, gossip, simulator
from asgd.compression import packing

MESSAGE, ASK, GRANT, ANSWER, LOAN = "message", "ask", "grant", "answer", "loan"
CODES = MESSAGE, GRANT, ANSWER  # frames that bring a code


class PeerFrame(NamedTuple):
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


def array_wire(*, copies: bool) -> Wire:
  """Codes as they are: arrays, in `copies` of NumPy for other processes."""
  pack = jax.device_get if copies else lambda code: code
  return Wire(pack, lambda content: content, simulator.array_bytes)


def packed_wire(peer: gossip.Peer, params: base.Params) -> Wire:
  """Codes as the bytes that `compression.packing` makes of them."""
  key = jax.eval_shape(jax.random.key, 0)

  def put(params, key):
    return peer.put(peer.init(params), np.float64(1), key)[1]

  layout = packing.layout(jax.eval_shape(put, params, key))
  return Wire(
    lambda code: packing.pack(layout, simulator.fetch(code)),
    lambda content: packing.unpack(layout, content),
    len,
  )
