"""Another machine on this one: two network namespaces of Linux, and a wire.

What goes from one to the other passes a pair of virtual Ethernet devices, in
packets of TCP, and `tc` lets no more than a bandwidth through each way (a token
bucket, tc-tbf(8)). So what a network does to a run can be tried without one.
The process that asks for it is in a namespace of its own already, in which
nothing of the machine's network can be changed:

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
_QUEUE = "50ms"  # what waits longer is dropped
_HINT = (
  "it needs Linux with iproute2, and a namespace of its own, which root can"
  " make: unshare --net COMMAND"
)


def _tell(*words: str) -> str:
  """Runs a command; returns what it prints, or raises ValueError."""
  try:
    done = subprocess.run(words, capture_output=True, text=True)
  except OSError as error:
    raise ValueError(f"{words[0]} cannot be run ({error}): {_HINT}") from error
  if done.returncode:
    said = done.stderr.strip().splitlines()[-1:] or ["it does not say why"]
    raise ValueError(f"{' '.join(words)} failed ({said[0]}): {_HINT}")
  return done.stdout


def _check() -> None:
  """Raises ValueError unless this process is in a namespace of its own."""
  there = [link["ifname"] for link in json.loads(_tell("ip", "-json", "link"))]
  if others := sorted(set(there) - {"lo"}):
    raise ValueError(
      f"this process is in the network of the machine (it has {others[0]}),"
      f" which is not to be changed: {_HINT}"
    )


class VirtualWire:
  """Two namespaces, that of this process and another, and what is between."""

  def __init__(self, far: int):
    """Lays a wire to the namespace of a process."""
    self.prefix = ["nsenter", f"--net=/proc/{far}/ns/net"]
    other = ["netns", str(far)]
    _tell("ip", "link", "set", "lo", "up")
    ends = ["near", "type", "veth", "peer", "name", "far", *other]
    _tell("ip", "link", "add", *ends)
    self._end([], "near", NEAR)
    _tell(*self.prefix, "ip", "link", "set", "lo", "up")
    self._end(self.prefix, "far", FAR)

  def _end(self, prefix, name, address):
    _tell(*prefix, "ip", "address", "add", f"{address}/24", "dev", name)
    _tell(*prefix, "ip", "link", "set", name, "up")
    # What asks for its own address by the way to the world gets this one.
    _tell(*prefix, "ip", "route", "add", "default", "dev", name)

  def limit(self, bandwidth: float | None) -> None:
    """Lets so many bytes a second through, each way; None: whatever comes."""
    for prefix, name in (([], "near"), (self.prefix, "far")):
      words = [*prefix, "tc", "qdisc"]
      there = _tell(*words, "show", "dev", name)
      if "tbf" in there:
        _tell(*words, "del", "dev", name, "root")
      if bandwidth is not None:
        burst = max(round(bandwidth * _BURST), _LEAST)
        limit = ["rate", f"{round(8 * bandwidth)}bit", "burst", str(burst)]
        limit += ["latency", _QUEUE]
        _tell(*words, "add", "dev", name, "root", "tbf", *limit)


@contextlib.contextmanager
def wire() -> Iterator[VirtualWire]:
  """Lays a wire to another namespace, which is gone at the end.

  Raises:
    ValueError: where that is not permitted, with the command that failed and
      what it said.
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


def _end(process):
  """Ends a process that goes on until its input ends."""
  process.stdin.close()
  process.stdout.close()
  process.wait()


@contextlib.contextmanager
def far_node(wire: VirtualWire, resource: str, memory: int) -> Iterator[None]:
  """Adds a node at the other end of a wire to this process's cluster of Ray,
  which alone has a resource, 1 of it, and so many bytes of object store."""
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
      raise ValueError("no node of Ray came up in the other namespace")
    yield
  finally:
    _end(node)
