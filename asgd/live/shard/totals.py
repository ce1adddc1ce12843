"""Sums over all shards that an algorithm needs before a message is received.

The lead asks each follower for its operand, adds up, and asks for the next
total until the message can be received; one message at a time.
"""

from typing import Any, NamedTuple

import numpy as np

from asgd import sharding
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.shard.role import Role, Say, total_frames
from asgd.live.shard.state import Key
from asgd.orders import protocol


class _Asking(NamedTuple):
  """The message of which the totals are being added up."""

  key: Key
  totals: list[float]  # so far
  operands: dict[int, Any]  # of the next one, by shard


class LeadTotals:
  """Messages wait here, at the lead, until their totals are complete."""

  def __init__(self, lead: Role, dispatcher: protocol.Dispatcher):
    self._lead, self._dispatcher = lead, dispatcher
    self._queue: list[Key] = []  # messages that all shards have
    self._asking: _Asking | None = None
    self._complete: dict[Key, tuple[float, ...]] = {}

  def add(self, key: Key) -> None:
    """Every shard has its part of a message."""
    if key not in self._queue:
      self._queue.append(key)
      self.propose()

  def propose(self) -> None:
    """Begins with the next message, unless one is under way."""
    pushed = self._lead.state.pushed
    if self._asking and self._asking.key not in pushed:
      self._asking = None  # its worker died
    self._queue = [key for key in self._queue if key in pushed]
    for worker, seq in self._queue:
      first = next(iter(self._dispatcher.open(worker)))
      if self._asking is None and seq == first:
        self._asking = _Asking((worker, seq), [], {})
        self._next_stage()
        return

  def _next_stage(self):
    """Goes as far as the totals so far allow."""
    key, totals, operands = self._asking
    state = self._lead.state
    out = state.stage(key, state.pushed[key].value, totals)
    if isinstance(out, sharding.Ask):
      operands[0] = out.operand
      for say in self._lead.followers.values():
        self.ask(say)
      return
    self._asking = None
    self._queue.remove(key)
    self._complete[key] = tuple(totals)
    self._dispatcher.arrive(*key)

  def ask(self, say: Say) -> None:
    """Asks a follower for its operand, if one is needed."""
    if self._asking:
      key, totals, _ = self._asking
      for frame in total_frames(key, totals):
        say(frame)
      say(Frame(frames.ASK, *key, version=len(totals)))

  def answer(self, frame: Frame) -> None:
    """Takes a follower's operand (ASKED)."""
    asking, key = self._asking, (frame.worker, frame.seq)
    if not asking or (asking.key, len(asking.totals)) != (key, frame.version):
      return
    own = np.asarray(asking.operands[0])
    asking.operands[frame.job] = own.dtype.type(frame.value)
    if len(asking.operands) == self._lead.setup.shards:
      operands = [operand for _, operand in sorted(asking.operands.items())]
      asking.totals.append(float(sharding.add_up(operands)))
      asking.operands.clear()
      self._next_stage()

  def take(self, key: Key) -> tuple[float, ...]:
    """Returns a message's totals, and forgets them."""
    return self._complete.pop(key, ())
