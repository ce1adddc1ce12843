"""Hosts in threads; each call takes the time that a network would take.

A call at a shard or a peer is a message with the bytes of the arguments. The
result is a message in the other direction. Calls of the driver take no time. A
message passes the caller's upload link and the port of the called host, as in
`asgd.orders.network`. If the called host is a peer, that port is the peer's
download link.
"""

from concurrent.futures import Future
from typing import Any, Protocol

from asgd.live.hosts.base import Host, Inside, Make
from asgd.live.hosts.threads import ThreadHost, ThreadHosts
from asgd.live.links.throttled import Throttle
from asgd.orders.network import Network


def nbytes(content: Any) -> int:
  """Returns the number of bytes that a network would carry for a content.
  Bytes, arrays and frames of peers count, also in tuples, lists and
  dictionaries; other objects count 0.

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


class LocalHost(Protocol):
  """A host in this process: its calls are futures."""

  kind: str
  index: int

  def call(self, method: str, *args: Any) -> Future[Any]:
    """See `Host`."""


class ThrottledHost(Host):
  """A handle by which a worker or a peer calls another host over a network."""

  def __init__(self, throttle: Throttle, caller: int, host: LocalHost):
    """`caller` is the index of the worker or peer that has the handle."""
    self.kind, self.index = host.kind, host.index
    self._throttle, self._caller, self._host = throttle, caller, host

  def call(self, method: str, *args: Any) -> Future[Any]:
    """See the base; the host runs calls in the order in which they arrive."""
    answer: Future[Any] = Future()

    def arrive() -> None:  # [2] The host runs the call.
      self._host.call(method, *args).add_done_callback(reply)

    def reply(call: Future[Any]) -> None:  # [3] The result travels down.
      # An error takes no time: a broken connection is noticed at once.
      if error := call.exception():
        answer.set_exception(error)
        return
      result = call.result()
      caller, size = self._caller, nbytes(result)
      self._throttle.send_down(
        caller, self.index, size, lambda: answer.set_result(result)
      )

    # [1] The arguments travel up.
    self._throttle.send_up(self._caller, self.index, nbytes(args), arrive)
    return answer


class ThrottledHosts(ThreadHosts):
  """Hosts in threads; workers and peers call other hosts over a network."""

  def __init__(self, network: Network, callers: int, *, began: float):
    """`callers` is the number of workers or peers; for `began` see the base."""
    super().__init__(began=began)
    self.throttle = Throttle(network, callers)
    self.throttle.start()

  def start(self, kind: str, index: int, make: Make) -> ThreadHost:
    """See the base. The object calls other hosts by throttled handles."""

    def wrap(host: Any) -> Host:
      return ThrottledHost(self.throttle, index, host)

    def make_throttled(inside: Inside) -> Any:
      return make(inside._replace(wrap_host=wrap))

    return super().start(kind, index, make_throttled)

  def close(self) -> None:
    """See the base; calls under way are delivered first."""
    super().close()  # it waits for the calls that the throttle still delivers
    self.throttle.close()


def make_hosts(
  network: Network | None, callers: int, *, began: float
) -> ThreadHosts:
  """Returns `ThrottledHosts`, or plain ThreadHosts if there is no network."""
  if network is None:
    return ThreadHosts(began=began)
  return ThrottledHosts(network, callers, began=began)
