"""Parts of Ray that it does not promise to keep: see `asgd.internals`.

Imports happen at calls, as Ray need not be installed.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from asgd import internals


def driver() -> Any:
  """Returns Ray's module of this process's connection to a cluster."""
  return internals.find("ray._private.worker")


def node() -> Any:
  """Returns the processes of Ray that this process has started, or None."""
  return getattr(driver(), "_global_node", None)


def never_connect_unasked() -> None:
  """Prevents a call without a cluster from starting one, on all interfaces."""
  internals.find("ray._private.auto_init_hook").enable_auto_connect = False


@contextlib.contextmanager
def keeping_to_loopback() -> Iterator[None]:
  """Makes Ray keep a loopback address, not replace it."""
  internals.find("ray._private.services.resolve_ip_for_localhost")
  services = internals.find("ray._private.services")
  with mock.patch.object(
    services, "resolve_ip_for_localhost", lambda host: host
  ):
    yield


def _join(cluster: str, address: str, resource: str, memory: int) -> Any:
  """Starts the processes of another node of a cluster on this machine, at an IP
  address or on loopback."""
  params = internals.find("ray._private.parameter.RayParams")(
    gcs_address=cluster,
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
  with keeping_to_loopback():
    return internals.find("ray._private.node.Node")(
      params, head=False, shutdown_at_exit=True, spawn_reaper=True
    )


@contextlib.contextmanager
def second_node(resource: str, memory: int) -> Iterator[None]:
  """Adds another node on this machine to the cluster of this process. It keeps
  to loopback too: data between the nodes pass through sockets, as between
  machines, not through shared memory.

  Args:
    resource: that this node alone has, 1 of it.
    memory: bytes of its object store.
  """
  second = _join(node().gcs_address, "127.0.0.1", resource, memory)
  try:
    yield
  finally:
    second.kill_all_processes(check_alive=False, allow_graceful=True)


def be_node(cluster: str, address: str, resource: str, memory: str) -> None:
  """Runs a node of a cluster, at an IP address, until the standard input ends;
  prints a line when it has joined. Arguments are as of `second_node`, as text.
  """
  other = _join(cluster, address, resource, int(memory))
  print("joined", flush=True)
  sys.stdin.read()
  other.kill_all_processes(check_alive=False, allow_graceful=True)


# Processes of a node that serve an autoscaler, a dashboard, and a driver
# that prints what workers print. Each imports Ray, on the cores of the run.
_UNUSED = "start_monitor", "start_api_server", "start_log_monitor"


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
  """Makes Ray start a cluster without three processes that do not run tasks,
  for which `ray.init` would wait."""
  node = internals.find("ray._private.node.Node")
  with contextlib.ExitStack() as stack:
    for name in _UNUSED:
      if hasattr(node, name):
        nothing = mock.patch.object(node, name, lambda self, **options: None)
        stack.enter_context(nothing)
    yield


def read_environment() -> None:
  """Makes the loaded part of Ray read its environment variables again."""
  internals.find("ray._raylet.Config").initialize("")
  library = internals.find("ray._raylet")
  loader = getattr(library, "AuthenticationTokenLoader", None)  # from 2.52 on
  if loader is not None:
    loader.instance().reset_cache()


def asks_for_token() -> bool:
  """Whether a cluster answers only calls with its token."""
  library = internals.find("ray._raylet")
  mode = getattr(library, "get_authentication_mode", None)  # from 2.52 on
  if mode is None:
    return False
  return bool(mode() == library.AuthenticationMode.TOKEN)
