"""Ray, started so that no other machine can reach it."""

import logging
import os
import sys
import warnings
from unittest import mock

_EXCLUDES = [".git", ".venv", "runs"]  # of what a cluster is sent
_MEMORY = 256 * 2**20  # bytes of Ray's object store: data and evaluations only


def check(
  address: str | None,
  *,
  allow_network: bool,
  asked: str = "engine='ray'",
  instead: str = "--engine=threads",
) -> None:
  """Raises ValueError where `start` would, as far as that is known before;
  `asked` is the setting that asks for Ray, `instead` one that does not."""
  try:
    import ray  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f"{asked} needs Ray ({error}): pip install -e '.[ray]', or use {instead}"
    ) from error
  if address and not allow_network:
    raise ValueError(
      f"--address={address} joins a Ray cluster, which other machines may"
      " reach: read Security in the README, and add --allow_network"
    )


def start(
  address: str | None = None,
  *,
  allow_network: bool = False,
  memory: int = _MEMORY,
) -> bool:
  """Starts a Ray cluster with so many bytes of object store, or joins one;
  ValueError without Ray, or if it would listen to other machines.

  Returns False if this process has a cluster already, which is then used.

  Ray listens on all interfaces unless its address is the loopback one, which a
  private function of it replaces. That is replaced here, and checked.
  """
  check(address, allow_network=allow_network)
  import ray
  from ray._private import services
  from ray._private import worker as ray_worker

  if ray.is_initialized():
    return False
  _quieten(ray_worker)
  # Ray starts programs, which is safe: they do not go on as this process.
  warnings.filterwarnings("ignore", message="os.fork.. was called")
  os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
  options = {
    "log_to_driver": False,
    "logging_level": logging.CRITICAL,
    "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
  }
  if address:
    # Other machines get the code as it is here.
    options["runtime_env"] = {"working_dir": os.getcwd(), "excludes": _EXCLUDES}
    try:
      ray.init(address=address, **options)
    except (ConnectionError, RuntimeError) as error:
      raise ValueError(
        f"--address={address}: no Ray cluster answers there ({error}); is it"
        " started (ray start --head), and the token the same?"
      ) from error
    return True
  options.update(include_dashboard=False, object_store_memory=memory)
  if allow_network:
    ray.init(**options)
    return True
  with mock.patch.object(
    services, "resolve_ip_for_localhost", lambda host: host
  ):
    ray.init(_node_ip_address="127.0.0.1", **options)
  if ray.util.get_node_ip_address() != "127.0.0.1":
    ray.shutdown()
    raise ValueError(
      f"Ray {ray.__version__} does not stay on the loopback interface; use"
      " another version, --engine=threads, or --allow_network"
    )
  return True


def _quieten(ray_worker) -> None:
  """Keeps Ray from printing a paragraph for each process that dies."""
  said = getattr(ray_worker, "print_to_stdstream", None)
  if said is None or hasattr(said, "quiet"):
    return

  def say_others(data, *args, **kwargs):
    if "A worker died or was killed" not in "".join(data.get("lines", ())):
      said(data, *args, **kwargs)

  say_others.quiet = True
  ray_worker.print_to_stdstream = say_others


def stop() -> None:
  """Ends what `start` started."""
  import ray

  ray.shutdown()
