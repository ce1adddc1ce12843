"""Another machine on this one: two network namespaces of Linux, and a wire.

Traffic between the namespaces passes a pair of virtual Ethernet devices, in
packets of TCP. `tc` limits the bandwidth each way (a token bucket, tc-tbf(8)).
So the effect of a network on a run can be measured on one machine. The process
must already be in a new namespace, where it cannot change the network of the
machine:

  unshare --net asgd bench network --links=tc
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from asgd.live import ray_internals

NEAR, FAR = "10.211.0.1", "10.211.0.2"  # addresses of the two
_BURST = 0.002  # seconds of bandwidth that may pass at once
_LEAST = 4096  # bytes of a burst: a packet and some
_QUEUE = "50ms"  # packets that would wait longer are dropped
_HINT = (
  "it needs Linux with iproute2, and a new network namespace, which root can"
  " make: unshare --net COMMAND"
)


def _run(*words: str) -> str:
  """Runs a command; returns its output. Raises ValueError if it fails."""
  try:
    done = subprocess.run(words, capture_output=True, text=True)
  except OSError as error:
    raise ValueError(f"{words[0]} cannot be run ({error}): {_HINT}") from error
  if done.returncode:
    said = done.stderr.strip().splitlines()[-1:] or ["it does not say why"]
    raise ValueError(f"{' '.join(words)} failed ({said[0]}): {_HINT}")
  return done.stdout


def _check() -> None:
  """Raises ValueError unless this process is in a new network namespace."""
  devices = [link["ifname"] for link in json.loads(_run("ip", "-json", "link"))]
  if others := sorted(set(devices) - {"lo"}):
    raise ValueError(
      f"this process is in the network of the machine (it has {others[0]}),"
      f" which the benchmark must not change: {_HINT}"
    )


class VirtualWire:
  """The wire between the namespace of this process and another one."""

  def __init__(self, far: int):
    """Lays a wire to the namespace of a process."""
    self.prefix = ["nsenter", f"--net=/proc/{far}/ns/net"]
    other = ["netns", str(far)]
    _run("ip", "link", "set", "lo", "up")
    ends = ["near", "type", "veth", "peer", "name", "far", *other]
    _run("ip", "link", "add", *ends)
    self._end([], "near", NEAR)
    _run(*self.prefix, "ip", "link", "set", "lo", "up")
    self._end(self.prefix, "far", FAR)

  def _end(self, prefix: list[str], name: str, address: str) -> None:
    """Sets up one end of the wire, with its address and route."""
    _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", name)
    _run(*prefix, "ip", "link", "set", name, "up")
    # A process that finds its address by its route to the internet gets this
    # one.
    _run(*prefix, "ip", "route", "add", "default", "dev", name)

  def limit(self, bandwidth: float | None) -> None:
    """Limits the wire to bytes a second, each way; None: no limit."""
    for prefix, name in (([], "near"), (self.prefix, "far")):
      words = [*prefix, "tc", "qdisc"]
      current = _run(*words, "show", "dev", name)
      if "tbf" in current:
        _run(*words, "del", "dev", name, "root")
      if bandwidth is not None:
        burst = max(round(bandwidth * _BURST), _LEAST)
        limit = ["rate", f"{round(8 * bandwidth)}bit", "burst", str(burst)]
        limit += ["latency", _QUEUE]
        _run(*words, "add", "dev", name, "root", "tbf", *limit)


@contextlib.contextmanager
def wire() -> Iterator[VirtualWire]:
  """Lays a wire to another namespace, which is removed at the end.

  Raises:
    ValueError: if that is not permitted, with the command that failed and its
      error.
  """
  _check()
  other = subprocess.Popen(
    ["unshare", "--net", sys.executable, "-c", _STAY],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    if not other.stdout.readline():
      raise ValueError(f"unshare --net is not permitted: {_HINT}")
    yield VirtualWire(other.pid)
  finally:
    _end(other)


_STAY = "import sys; print(flush=True); sys.stdin.read()"


def _end(process: subprocess.Popen[bytes]) -> None:
  """Ends a process that runs until its input ends."""
  process.stdin.close()
  process.stdout.close()
  process.wait()


@contextlib.contextmanager
def far_node(wire: VirtualWire, resource: str, memory: int) -> Iterator[None]:
  """Adds a node at the other end of a wire to this process's cluster of Ray.

  Only this node has the resource, 1 of it. Its object store has `memory` bytes.
  """
  code = (
    "import sys; from asgd.live import ray_internals;"
    " ray_internals.be_node(*sys.argv[1:])"
  )
  arguments: Sequence[str] = (
    ray_internals.node().gcs_address,
    FAR,
    resource,
    str(memory),
  )
  node = subprocess.Popen(
    [*wire.prefix, sys.executable, "-c", code, *arguments],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    if not node.stdout.readline():
      raise ValueError("no node of Ray started in the other namespace")
    yield
  finally:
    _end(node)
