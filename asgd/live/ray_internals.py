"""What Ray has, but does not promise to keep: see `asgd.internals`.

All is imported when it is asked for, as Ray need not be installed.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from asgd import internals


def driver() -> Any:
  """Returns the module of Ray that has what this process knows of a cluster."""
  return internals.find("ray._private.worker")


def node() -> Any:
  """Returns the processes of Ray that this process has started, or None."""
  return getattr(driver(), "_global_node", None)


def never_connect_unasked() -> None:
  """Or a call without a cluster would start one, on all interfaces."""
  internals.find("ray._private.auto_init_hook").enable_auto_connect = False


@contextlib.contextmanager
def keeping_to_loopback() -> Iterator[None]:
  """Has Ray take the loopback address as it is given, and not replace it."""
  internals.find("ray._private.services.resolve_ip_for_localhost")
  services = internals.find("ray._private.services")
  with mock.patch.object(
    services, "resolve_ip_for_localhost", lambda host: host
  ):
    yield


def _join(cluster: str, address: str, resource: str, memory: int) -> Any:
  """Starts a node of a cluster on this machine, at an IP address of its own or
  on loopback, as its processes."""
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
  """Adds to the cluster of this process another node on this machine, which
  keeps to loopback too: what goes to it and comes from it passes through
  sockets, as between machines, and not through memory that is shared.

  Args:
    resource: which this node alone has, 1 of it.
    memory: bytes of its object store.
  """
  second = _join(node().gcs_address, "127.0.0.1", resource, memory)
  try:
    yield
  finally:
    second.kill_all_processes(check_alive=False, allow_graceful=True)


def be_node(cluster: str, address: str, resource: str, memory: str) -> None:
  """Is a node of a cluster, at an IP address, until the standard input ends;
  says so when it has joined. Arguments are as of `second_node`, in words."""
  other = _join(cluster, address, resource, int(memory))
  print("joined", flush=True)
  sys.stdin.read()
  other.kill_all_processes(check_alive=False, allow_graceful=True)


# Of a node: the processes that serve an autoscaler, a dashboard, and a driver
# that prints what workers print. Each imports Ray, on the cores of the run.
_UNUSED = "start_monitor", "start_api_server", "start_log_monitor"


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
  """Has Ray start a cluster that runs tasks and does nothing else: without
  three processes, for which `ray.init` would wait."""
  node = internals.find("ray._private.node.Node")
  with contextlib.ExitStack() as stack:
    for name in _UNUSED:
      if hasattr(node, name):
        nothing = mock.patch.object(node, name, lambda self, **options: None)
        stack.enter_context(nothing)
    yield


def read_environment() -> None:
  """Has the part of Ray that is loaded already look at it again."""
  internals.find("ray._raylet.Config").initialize("")
  library = internals.find("ray._raylet")
  loader = getattr(library, "AuthenticationTokenLoader", None)  # from 2.52 on
  if loader is not None:
    loader.instance().reset_cache()


def asks_for_token() -> bool:
  """Whether a cluster answers only those who know its token."""
  library = internals.find("ray._raylet")
  mode = getattr(library, "get_authentication_mode", None)  # from 2.52 on
  if mode is None:
    return False
  return bool(mode() == library.AuthenticationMode.TOKEN)
