"""Uses of names of Ray that are not stable: see `asgd.internals`.

Imports happen at calls, as Ray need not be installed.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from asgd import internals


def driver_module() -> Any:
  """Returns the module of Ray with this process's connection to a cluster."""
  return internals.imported("ray._private.worker")


def node() -> Any:
  """Returns Ray's object for the processes that this process has started, or
  None."""
  return getattr(driver_module(), "_global_node", None)


def disable_auto_connect() -> None:
  """Prevents Ray from starting a cluster by itself at a call without a cluster.
  Such a cluster would listen on all network interfaces."""
  internals.imported("ray._private.auto_init_hook").enable_auto_connect = False


@contextlib.contextmanager
def allow_loopback() -> Iterator[None]:
  """Returns a context in which Ray does not replace a loopback address by the
  machine's own."""
  internals.imported("ray._private.services.resolve_ip_for_localhost")
  services = internals.imported("ray._private.services")
  with mock.patch.object(
    services, "resolve_ip_for_localhost", lambda host: host
  ):
    yield


def _start_node(
  gcs_address: str, address: str, resource: str, memory: int
) -> Any:
  """Starts another node of a cluster on this machine, at an IP address, which
  may be that of the loopback."""
  params = internals.imported("ray._private.parameter.RayParams")(
    gcs_address=gcs_address,
    node_ip_address=address,
    num_cpus=1,
    num_gpus=0,
    object_store_memory=memory,
    resources={resource: 1},
    min_worker_port=0,
    max_worker_port=0,
    node_manager_port=0,
    include_log_monitor=False,
  )
  params.dashboard_agent_listen_port = None
  with allow_loopback():
    return internals.imported("ray._private.node.Node")(
      params, head=False, shutdown_at_exit=True, spawn_reaper=True
    )


@contextlib.contextmanager
def second_node(resource: str, memory: int) -> Iterator[None]:
  """Returns a context in which the cluster of this process has another node on
  this machine, at a loopback address. Data between the nodes pass through
  sockets, as between machines, not through shared memory.

  Args:
    resource: name of a resource; only this node has it, in the amount 1.
    memory: bytes of the node's object store.
  """
  ray_node = _start_node(node().gcs_address, "127.0.0.1", resource, memory)
  try:
    yield
  finally:
    ray_node.kill_all_processes(check_alive=False, allow_graceful=True)


def run_node(
  gcs_address: str, address: str, resource: str, memory: str
) -> None:
  """Runs a node of a cluster, at an IP address, until the standard input ends.
  Prints a line when the node has joined. `resource` and `memory` are those of
  `second_node`, as text."""
  ray_node = _start_node(gcs_address, address, resource, int(memory))
  print("joined", flush=True)
  sys.stdin.read()
  ray_node.kill_all_processes(check_alive=False, allow_graceful=True)


# Methods that start processes for an autoscaler, for a dashboard, and for a
# driver that prints the output of workers. Each process imports Ray, on the
# cores of the run.
_UNUSED = "start_monitor", "start_api_server", "start_log_monitor"


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
  """Returns a context in which Ray starts a cluster without three processes
  that run no tasks; `ray.init` would wait for them."""
  node_class = internals.imported("ray._private.node.Node")
  with contextlib.ExitStack() as stack:
    for name in _UNUSED:
      if hasattr(node_class, name):
        stack.enter_context(
          mock.patch.object(node_class, name, lambda self, **options: None)
        )
    yield


def reread_environment() -> None:
  """Makes the parts of Ray that are already loaded read their environment
  variables again."""
  internals.imported("ray._raylet.Config").initialize("")
  raylet = internals.imported("ray._raylet")
  loader = getattr(raylet, "AuthenticationTokenLoader", None)  # from 2.52 on
  if loader is not None:
    loader.instance().reset_cache()


def requires_token() -> bool:
  """Whether a cluster answers only calls with its token."""
  raylet = internals.imported("ray._raylet")
  get_mode = getattr(raylet, "get_authentication_mode", None)  # from 2.52 on
  if get_mode is None:
    return False
  return bool(get_mode() == raylet.AuthenticationMode.TOKEN)
