"""Frames: the messages between live peers, and the encoding of codes.

  kind     from          to             content
  MESSAGE  a peer        its receivers  a code of a round
  ASK      a peer        its partner    none: requests an exchange
  GRANT    the partner   the asker      a code
  ANSWER   the asker     the partner    a code
  LOAN     a neighbour   a newcomer     the result of `Peer.lend`
           a newcomer    a neighbour

ASK, GRANT and ANSWER are the frames of an exchange of two peers (AD-PSGD).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, gossip, simulator
from asgd.compression import packing

MESSAGE, ASK, GRANT, ANSWER, LOAN = "message", "ask", "grant", "answer", "loan"


class PeerFrame(NamedTuple):
  """A frame from one peer to another."""

  kind: str
  sender: int
  incarnation: int  # of the sender, counted from 0
  seq: int = -1  # of the message, over all incarnations of the sender
  round: int = 0
  content: Any = None  # a code, as the wire packs it, or a loan
  nbytes: int = 0  # of the content


class Wire(NamedTuple):
  """The encoding of codes for sending."""

  pack: Callable[[Any], Any]
  unpack: Callable[[Any], Any]
  measure: Callable[[Any], int]  # packed code -> its bytes


def array_wire(*, copies: bool) -> Wire:
  """Returns a wire that sends codes as arrays; with `copies`, as NumPy copies
  for other processes."""
  # Threads may share a code, as JAX arrays are immutable.
  pack = jax.device_get if copies else lambda code: code
  return Wire(pack, lambda content: content, simulator.array_bytes)


def packed_wire(peer: gossip.Peer, params: base.Params) -> Wire:
  """Returns a wire that sends codes as the bytes of `compression.packing`."""

  def first_code(
    params: base.Params, keep: jax.Array, key: jax.Array
  ) -> base.Params:
    return peer.put(peer.init(params), keep, key)[1]

  # The layout needs shapes and dtypes only, so nothing is computed here.
  key = jax.eval_shape(jax.random.key, 0)
  code = jax.eval_shape(first_code, params, np.float64(1), key)
  layout = packing.layout(code)
  return Wire(
    lambda code: packing.pack(layout, simulator.fetch(code)),
    lambda content: packing.unpack(layout, content),
    len,
  )
