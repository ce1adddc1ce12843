"""Messages in transit between simulated peers, and the traffic of links."""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asgd import base
from asgd.orders import trace as trace_lib
from asgd.orders.trace import Event

Key = tuple[int, int]  # (sender, seq), which names a message


def read_key(name: str) -> Key:
  """Returns the key that a checkpoint names."""
  sender, _, seq = name.partition(",")
  return int(sender), int(seq)


class LinkTraffic(NamedTuple):
  """Messages and bytes that peers have taken over each link."""

  messages: npt.NDArray[np.int64]  # [n, n], by receiver and sender
  nbytes: npt.NDArray[np.int64]  # [n, n]


class SentCode(NamedTuple):
  """A message that at least one peer has yet to take."""

  code: Any
  round: int  # the round in which the sender put it
  nbytes: int  # bytes of the message on a link


class Taken(NamedTuple):
  """A message that a peer mixes."""

  sender: int
  round: int  # the round in which the sender put it
  code: Any


def takers_in(trace: base.Trace) -> Callable[[Event], int]:
  """Returns a function of a PUT or LEND row: the number of rows in the trace
  that take its message."""
  is_take = np.isin(trace.action, trace_lib.TAKES)
  keys = zip(
    trace.job[is_take].tolist(), trace.seq[is_take].tolist(), strict=True
  )
  takes = collections.Counter(keys)
  return lambda event: takes[event.key]


class PeerLinks:
  """Messages in transit between peers, and the traffic of each link."""

  def __init__(self, peers: int, takers: Callable[[Event], int]):
    """Starts without messages; `takers` returns how many rows will take the
    message of a PUT or LEND row, at most."""
    self.messages: dict[Key, SentCode] = {}
    self._inboxes: list[list[Key]] = [[] for _ in range(peers)]
    self._takers = takers
    # message -> number of rows that will take it
    self._takes_left: dict[Key, int] = {}
    zeros = np.zeros((peers, peers), np.int64)
    self.traffic = LinkTraffic(zeros, zeros.copy())

  def put(self, event: Event, code: Any, nbytes: int) -> None:
    """Sends a message, and keeps it if at least one peer will take it."""
    if takers := self._takers(event):
      self._takes_left[event.key] = takers
      self.messages[event.key] = SentCode(code, event.job, nbytes)

  def _count_on_link(self, event: Event) -> tuple[Key, int]:
    """Counts a message on its link; returns (its key, its bytes)."""
    key, i = (event.job, event.seq), event.worker
    nbytes = self.messages[key].nbytes
    self.traffic.messages[i, event.job] += 1
    self.traffic.nbytes[i, event.job] += nbytes
    return key, nbytes

  def take(self, event: Event) -> int:
    """Takes a message, which the peer mixes later; returns its bytes."""
    key, nbytes = self._count_on_link(event)
    self._inboxes[event.worker].append(key)
    return nbytes

  def adopt(self, event: Event) -> tuple[Any, int]:
    """Takes a message that the peer uses at once; returns (code, bytes)."""
    key, nbytes = self._count_on_link(event)
    code = self.messages[key].code
    self._count_take(key)
    return code, nbytes

  def mix(self, peer: int) -> list[Taken]:
    """Returns the messages that a peer has taken since its last mix. Those of a
    peer that was killed are dropped in this way when it joins again."""
    keys, self._inboxes[peer] = self._inboxes[peer], []
    messages = [(sender, self.messages[sender, seq]) for sender, seq in keys]
    for key in keys:
      self._count_take(key)
    return [
      Taken(sender, message.round, message.code) for sender, message in messages
    ]

  def _count_take(self, key):
    self._takes_left[key] -= 1
    if not self._takes_left[key]:
      del self.messages[key], self._takes_left[key]

  def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a tree of arrays and JSON, for `restore`."""
    by_name = {
      f"{sender},{seq}": message
      for (sender, seq), message in self.messages.items()
    }
    tree = {"codes": {name: message.code for name, message in by_name.items()}}
    notes = {
      "codes": list(by_name),
      "sizes": [message.nbytes for message in by_name.values()],
    }
    return {**tree, "traffic": self.traffic}, notes

  def restore(
    self, codes: Mapping[str, Any], traffic: Any, notes: Mapping[str, Any]
  ) -> None:
    """Restores what `save` returned. The caller then passes the earlier rows to
    `apply_saved_row`, which restores the rounds and the inboxes."""
    sizes = dict(zip(notes["codes"], notes["sizes"], strict=True))
    self.messages = {
      read_key(name): SentCode(code, 0, sizes[name])
      for name, code in codes.items()
    }
    self.traffic = LinkTraffic(*(np.array(x) for x in traffic))

  def apply_saved_row(self, event: Event) -> None:
    """Restores the effects of a row that was replayed before `save`."""
    i, key = event.worker, (event.job, event.seq)  # key of a taken message
    if event.action in trace_lib.PUTS and event.key in self.messages:
      message = self.messages[event.key]
      self.messages[event.key] = message._replace(round=event.job)
      self._takes_left[event.key] = self._takers(event)
    elif event.action == base.TAKE:
      self._inboxes[i].append(key)
    elif event.action == base.ADOPT and key in self.messages:
      self._takes_left[key] -= 1
    elif event.action in (base.MIX, base.JOIN):
      for taken in self._inboxes[i]:
        if taken in self.messages:
          self._takes_left[taken] -= 1
      self._inboxes[i] = []
