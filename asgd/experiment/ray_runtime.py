"""Ray, started so that no other machine and no other user can reach it."""

import atexit
import contextlib
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asgd.checks import text_of
from asgd.experiment import compiled
from asgd.live import processes, ray_internals, ray_waits

_PACKAGES = "asgd", "pipeline"  # what a cluster is sent, as it is here
# Set by Ray in the entry point of a job that was submitted to a cluster.
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Of the environment: where programs that were compiled are kept, and which. A
# cluster on this machine has all of it.
_CACHE = "JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_"
_NICENESS = "RAY_worker_niceness"
# What Ray says in a paragraph, and the command in a line of its own.
_TOLD = "A worker died or was killed", "Raylet is terminated"
_LONGEST = 24  # characters of a folder's path: those of sockets are short
_MEMORY = 256 * 2**20  # bytes of Ray's object store: data and evaluations only
_undo = contextlib.ExitStack()  # what was done for the present cluster
atexit.register(_undo.close)  # where nobody calls `stop`; after Ray's own


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
      f"{asked} needs Ray ({error}): pip install 'asgd[ray]', or use {instead}"
    ) from error
  if address and not allow_network:
    said = f"--address={address} joins"
    if address == os.environ.get("RAY_ADDRESS"):
      said = f"RAY_ADDRESS={address} in the environment names"
    raise ValueError(
      f"{said} a Ray cluster, which other machines may reach: read"
      " docs/howto/security.md, and add --allow_network"
    )


def start(
  address: str | None = None,
  *,
  allow_network: bool = False,
  memory: int = _MEMORY,
  modules: Sequence[str | Path] = (),
) -> bool:
  """Starts a Ray cluster with so many bytes of object store, or joins one,
  which is sent this code and the files of a user's `modules`; ValueError
  without Ray, or if it would listen to other machines.

  Returns False if this process has a cluster already, which is then used.

  Ray listens on all interfaces unless its address is the loopback one, which a
  private function of it replaces. That is replaced here, and checked.
  """
  check(address, allow_network=allow_network)
  import ray

  if ray.is_initialized():
    return False
  _quieten(ray_internals.driver())
  # Ray starts programs, which is safe: they do not go on as this process.
  warnings.filterwarnings("ignore", message="os.fork.. was called")
  ray_internals.never_connect_unasked()
  os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
  options = {
    "log_to_driver": False,
    "logging_level": logging.CRITICAL,
  }
  if address:
    with contextlib.ExitStack() as undo, _own_signals():
      options["runtime_env"] = _runtime_env(modules, undo)
      _join(ray, address, options)
      _undo.push(undo.pop_all())
    return True
  options.update(
    address="local",  # not a cluster that was started by somebody else
    include_dashboard=False,
    object_store_memory=memory,
  )
  with contextlib.ExitStack() as undo, _own_signals(), _own_path():
    _share_processors(undo)
    _ask_for_token(undo)
    options["_temp_dir"] = _own_folder(undo)
    if allow_network:
      _init(ray, options)
    else:
      _stay_on_loopback(ray, options)
    _undo.push(undo.pop_all())
  if not ray_internals.asks_for_token():
    print(
      "Ray asks nobody for a token (RAY_AUTH_MODE, or a Ray before 2.52): every"
      " user of this machine can run code as you; see docs/howto/security.md",
      file=sys.stderr,
    )
  return True


@contextlib.contextmanager
def _own_signals():
  """Keeps what this process does when it is asked to end: Ray puts an end at
  once in its place, before anything is saved."""
  handler = signal.getsignal(signal.SIGTERM)
  yield
  in_main = threading.current_thread() is threading.main_thread()
  if in_main and callable(handler):
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _own_path():
  """Has the processes of a cluster that is started in here import what this one
  can. A runtime_env would cost each of them another process, which imports Ray
  to set the variable, and Ray would keep none ready."""
  before = os.environ.get("PYTHONPATH")
  os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
  try:
    yield
  finally:
    del os.environ["PYTHONPATH"]
    if before is not None:
      os.environ["PYTHONPATH"] = before


def _join(ray, address, options) -> None:
  try:
    ray.init(address=address, **options)
  except (ConnectionError, RuntimeError) as error:
    line = text_of(error)
    if "ersion mismatch" in line:
      raise ValueError(
        f"--address={address}: the cluster has another version than Ray"
        f" {ray.__version__} and Python {platform.python_version()} here"
        f" ({line}); install the same on both"
      ) from error
    raise ValueError(
      f"--address={address}: no Ray cluster answers there ({line}); is it"
      " started (ray start --head), and the token the same?"
    ) from error


def _runtime_env(modules, undo) -> dict[str, Any]:
  """Returns the runtime_env of a cluster that is joined. What a job's own one
  has is left to the job: Ray refuses what both have."""
  job = json.loads(os.environ.get(_JOB, "{}")).get("runtime_env", {})
  own = job.get("env_vars") or {}
  variables = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(_CACHE) and name not in own and not compiled.is_own()
  }
  options = {"env_vars": variables} if variables else {}
  if "working_dir" not in job:
    options["working_dir"] = _code(modules, undo)
  return options


def _code(modules, undo) -> str:
  """Returns a folder with the code as it is here, and no more."""
  folder = Path(tempfile.mkdtemp(prefix="asgd-code-"))
  undo.callback(shutil.rmtree, folder, ignore_errors=True)
  root, only = Path(__file__).parents[2], shutil.ignore_patterns("__pycache__")
  for path in (*(root / name for name in _PACKAGES), *map(Path, modules)):
    source = path.parent if path.name == "__init__.py" else path
    if source.is_dir():
      shutil.copytree(source, folder / source.name, ignore=only)
    else:
      shutil.copy(source, folder)
  return str(folder)


def _init(ray, options) -> None:
  """Starts a cluster. ValueError if its processes do not come up in time, for
  which Ray has no narrower exception."""
  try:
    ray.init(**options)
  except Exception as error:
    if type(error) is not Exception:
      raise
    raise ValueError(
      f"Ray cannot start: {text_of(error)} A busy machine, or one without free"
      " memory, does that: run the same command again, or use --engine=threads"
    ) from error


def _stay_on_loopback(ray, options) -> None:
  with (
    ray_internals.keeping_to_loopback(),
    ray_internals.without_unused_processes(),
  ):
    _init(ray, {"_node_ip_address": "127.0.0.1", **options})
  if ray.util.get_node_ip_address() != "127.0.0.1":
    ray.shutdown()
    raise ValueError(
      f"Ray {ray.__version__} does not stay on the loopback interface; use"
      " another version, --engine=threads, or --allow_network"
    )


def _share_processors(undo) -> None:
  """Has Ray's workers run at the priority of this process. Ray gives them 15
  less, and on a busy machine a run's workers then get next to nothing."""
  if _NICENESS not in os.environ:
    os.environ[_NICENESS] = "0"
    undo.callback(os.environ.pop, _NICENESS, None)


def _ask_for_token(undo) -> None:
  """Has Ray answer only who knows a token: one of this cluster alone, which is
  in the environment of its processes, unless the user's environment says more.
  Without, every user of the machine could run code as this one."""
  if os.environ.get("RAY_AUTH_MODE"):
    return
  environment = {"RAY_AUTH_MODE": "token"}
  if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
  undo.callback(ray_internals.read_environment)
  for name, value in environment.items():
    os.environ[name] = value
    undo.callback(os.environ.pop, name, None)
  ray_internals.read_environment()


def _own_folder(undo) -> str:
  """Returns a folder for a cluster's sockets and files. Ray lets every user
  write there; but nobody else gets there, as the one above is closed."""
  place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
  place = place if len(place) <= _LONGEST else "/tmp"
  _remove_left(Path(place))
  closed = tempfile.mkdtemp(prefix="ray-", dir=place)
  processes.write_pid(Path(closed), "worker", 0)
  processes.FOLDERS.add(closed)
  undo.callback(shutil.rmtree, closed, ignore_errors=True)
  return os.path.join(closed, "s")


def _remove_left(place: Path) -> None:
  """Removes the folders of this user's drivers that were killed: nobody else
  does. A folder has its driver's number and start from when it is made."""
  for folder in place.glob("ray-????????"):
    with contextlib.suppress(OSError):
      mine = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
      named = (folder / "worker-0.pid").exists()
      if mine and named and not processes.pids(folder)["worker"]:
        shutil.rmtree(folder, ignore_errors=True)


def _quieten(ray_worker) -> None:
  """Keeps Ray from printing a paragraph for each process that dies."""
  said = getattr(ray_worker, "print_to_stdstream", None)
  if said is None or hasattr(said, "quiet"):
    return

  def say_others(data, *args, **kwargs):
    text = "".join(data.get("lines", ()))
    told = any(words in text for words in _TOLD) or ray_waits.dead()
    if not told:
      said(data, *args, **kwargs)

  say_others.quiet = True
  ray_worker.print_to_stdstream = say_others


def stop() -> None:
  """Ends what `start` started."""
  import ray

  if ray_waits.dead():
    ray_waits.bury()  # or what depends on it would wait for it
  ray.shutdown()
  _undo.close()
