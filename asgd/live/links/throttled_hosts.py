"""Hosts in threads; each call takes the time that a network would take.

A call of a shard or of a peer is a message from its caller, of so many bytes as
its arguments have; its answer goes the other way. Calls of the driver take no
time. A message passes its caller's link up and the port of whom it calls, as in
`asgd.orders.network`; with peers, that port is the receiver's link down.
"""

from concurrent.futures import Future
from typing import Any

from asgd.live.hosts.base import Call, Host, Make
from asgd.live.hosts.threads import ThreadHost, ThreadHosts
from asgd.live.links.throttled import Throttle
from asgd.orders.network import Network


def nbytes(content: Any) -> int:
  """Returns the bytes of a content: of arrays, frames of peers, and bytes in
  tuples, lists and dictionaries; all else has none.

  Example:
    >>> import numpy as np
    >>> nbytes(("push", [b"four", {"w": np.zeros(2)}], None))
    20
  """
  if isinstance(content, bytes):
    return len(content)
  if hasattr(content, "nbytes"):
    return int(content.nbytes)
  if isinstance(content, dict):
    content = list(content.values())
  return sum(map(nbytes, content)) if isinstance(content, list | tuple) else 0


class ThrottledHost(Host):
  """A handle of another host, whose calls pass a network."""

  def __init__(self, throttle: Throttle, caller: int, host: Host):
    """The caller is a worker's or a peer's index."""
    self.kind, self.index = host.kind, host.index
    self._throttle, self._caller, self._host = throttle, caller, host

  def call(self, method: str, *args: Any) -> Call:
    """See the base; the host makes calls in the order in which they arrive."""
    answer: Future[Any] = Future()

    def arrive():
      self._host.call(method, *args).add_done_callback(reply)

    def reply(done):
      if error := done.exception():
        answer.set_exception(error)
        return
      value = done.result()
      way = self._caller, self.index, nbytes(value)
      self._throttle.down(*way, lambda: answer.set_result(value))

    self._throttle.up(self._caller, self.index, nbytes(args), arrive)
    return answer


class ThrottledHosts(ThreadHosts):
  """Threads whose workers or peers call others over a network."""

  def __init__(self, network: Network, callers: int, *, began: float):
    """`callers` workers or peers call `network.shards` hosts; `began` is as of
    the base."""
    super().__init__(began=began)
    self.throttle = Throttle(network, callers)
    self.throttle.start()

  def start(self, kind: str, index: int, make: Make) -> ThreadHost:
    """See the base."""

    def link(host):
      return ThrottledHost(self.throttle, index, host)

    def make_linked(inside):
      return make(inside._replace(link=link))

    return super().start(kind, index, make_linked)

  def close(self) -> None:
    """See the base; calls under way arrive before."""
    super().close()
    self.throttle.close()


def make_hosts(
  network: Network | None, callers: int, *, began: float
) -> ThreadHosts:
  """Returns threads, over a network if there is one; see `ThrottledHosts`."""
  if network is None:
    return ThreadHosts(began=began)
  return ThrottledHosts(network, callers, began=began)
