"""Two network namespaces of Linux and a wire, in place of two machines.

Traffic between the namespaces passes a pair of virtual Ethernet devices, in
packets of TCP. `tc` limits the bandwidth each way (a token bucket, tc-tbf(8)).
So the effect of a network on a run can be measured on one machine. The process
must already be in a new namespace, in which it cannot change the network of the
machine:

  unshare --net asgd bench network --links=tc
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from asgd.live import ray_internals

NEAR, FAR = "10.211.0.1", "10.211.0.2"  # addresses of the two ends
# Size of the token bucket: the bytes of this time may pass at once.
_BURST_SECONDS = 0.002
_MIN_BURST_BYTES = 4096  # more than a packet
_MAX_QUEUE_DELAY = "50ms"  # packets that would wait longer are dropped
# The devices of a new namespace: loopback, and one for each loaded module of
# tunnels.
_INITIAL_DEVICES = {
  *("lo", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0"),
  *("sit0", "ip6tnl0", "ip6gre0", "ip6_vti0"),
}
_HINT = (
  "it needs Linux with iproute2, and a new network namespace, which root can"
  " make: unshare --net COMMAND"
)


def _run(*words: str) -> str:
  """Runs a command; returns its output. Raises ValueError if it fails."""
  try:
    result = subprocess.run(words, capture_output=True, text=True)
  except OSError as error:
    raise ValueError(f"{words[0]} cannot be run ({error}): {_HINT}") from error
  if result.returncode:
    reason = result.stderr.strip().splitlines()[-1:] or ["it does not say why"]
    raise ValueError(f"{' '.join(words)} failed ({reason[0]}): {_HINT}")
  return result.stdout


def _check_namespace() -> None:
  """Raises ValueError unless this process is in a new network namespace."""
  devices = [link["ifname"] for link in json.loads(_run("ip", "-json", "link"))]
  if foreign_devices := sorted(set(devices) - _INITIAL_DEVICES):
    raise ValueError(
      f"this process is in the network of the machine (it has"
      f" {foreign_devices[0]}), which the benchmark must not change: {_HINT}"
    )


class VirtualWire:
  """The wire between the namespace of this process and another one."""

  def __init__(self, far_pid: int):
    """Lays a wire to the namespace of a process."""
    # The prefix runs a command in the namespace of the process `far_pid`.
    self.prefix = ["nsenter", f"--net=/proc/{far_pid}/ns/net"]
    namespace = ["netns", str(far_pid)]
    _run("ip", "link", "set", "lo", "up")
    # One end here, the other in that namespace.
    ends = ["near", "type", "veth", "peer", "name", "far", *namespace]
    _run("ip", "link", "add", *ends)
    self._set_up_end([], "near", NEAR)
    _run(*self.prefix, "ip", "link", "set", "lo", "up")
    self._set_up_end(self.prefix, "far", FAR)

  def _set_up_end(self, prefix: list[str], name: str, address: str) -> None:
    """Sets up one end of the wire, with its address and route."""
    _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", name)
    _run(*prefix, "ip", "link", "set", name, "up")
    # Ray finds its address by the route to the internet, which leads here.
    _run(*prefix, "ip", "route", "add", "default", "dev", name)

  def limit(self, bandwidth: float | None) -> None:
    """Limits the bytes per second in each direction; None: no limit."""
    for prefix, name in (([], "near"), (self.prefix, "far")):
      words = [*prefix, "tc", "qdisc"]
      current = _run(*words, "show", "dev", name)
      # A device has one root; the old limit must be removed first.
      if "tbf" in current:
        _run(*words, "del", "dev", name, "root")
      if bandwidth is not None:
        burst = max(round(bandwidth * _BURST_SECONDS), _MIN_BURST_BYTES)
        # tc counts bits, not bytes.
        options = ["rate", f"{round(8 * bandwidth)}bit", "burst", str(burst)]
        options += ["latency", _MAX_QUEUE_DELAY]
        _run(*words, "add", "dev", name, "root", "tbf", *options)


@contextlib.contextmanager
def wire() -> Iterator[VirtualWire]:
  """Lays a wire to another namespace, which is removed at the end.

  Raises:
    ValueError: if that is not permitted, with the command that failed and its
      error.
  """
  _check_namespace()
  holder = subprocess.Popen(
    ["unshare", "--net", sys.executable, "-c", _WAIT_FOR_INPUT],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    # The line is printed in the new namespace, so it exists from here on.
    if not _wait_for_line(holder):
      raise ValueError(f"unshare --net is not permitted: {_HINT}")
    yield VirtualWire(holder.pid)
  finally:
    _end(holder)


# The namespace exists while this program waits for the end of its input.
_WAIT_FOR_INPUT = "import sys; print(flush=True); sys.stdin.read()"


def _wait_for_line(process: subprocess.Popen[bytes]) -> bool:
  """Waits for the line of a process; returns False if it exits without one."""
  assert process.stdout is not None  # a pipe
  return bool(process.stdout.readline())


def _end(process: subprocess.Popen[bytes]) -> None:
  """Ends a process that runs until its input ends."""
  assert process.stdin is not None and process.stdout is not None  # pipes
  # Closing its input ends the process. A signal would leave processes of Ray.
  process.stdin.close()
  process.stdout.close()
  process.wait()


@contextlib.contextmanager
def far_node(link: VirtualWire, resource: str, memory: int) -> Iterator[None]:
  """Adds a node at the other end of a wire to this process's cluster of Ray.

  Only this node has the resource, with amount 1. Its object store has `memory`
  bytes.
  """
  code = (
    "import sys; from asgd.live import ray_internals;"
    " ray_internals.run_node(*sys.argv[1:])"
  )
  arguments: Sequence[str] = (
    ray_internals.node().gcs_address,
    FAR,
    resource,
    str(memory),
  )
  node = subprocess.Popen(
    [*link.prefix, sys.executable, "-c", code, *arguments],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  try:
    # `run_node` prints a line when the node is part of the cluster.
    if not _wait_for_line(node):
      raise ValueError("no node of Ray started in the other namespace")
    yield
  finally:
    _end(node)
