"""Ray, started so that no other machine and no other user can reach it."""

import atexit
import contextlib
import functools
import importlib.util
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asgd.checks import text_of
from asgd.experiment import compiled
from asgd.live import processes, ray_internals, ray_waits

# Ray sets this variable in a job that was submitted to a cluster.
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Prefixes of the variables that configure JAX's cache of compiled programs. A
# cluster on this machine inherits them; a joined one is sent them.
_CACHE_PREFIXES = "JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_"
_NICENESS_VARIABLE = "RAY_worker_niceness"  # variable
# Ray prints a paragraph with these words. The command prints one line instead.
_NOISE = "A worker died or was killed", "Raylet is terminated"
_MAX_FOLDER_LENGTH = 24  # characters: Linux limits the paths of sockets
_OBJECT_STORE_BYTES = 256 * 2**20  # it holds data and evaluations only
# Undoes the changes that were made for the present cluster.
_undo_at_stop = contextlib.ExitStack()
# For a program that does not call `stop`. Ray is imported later and registers
# its handler then, which runs first.
atexit.register(_undo_at_stop.close)


def check(
  address: str | None,
  *,
  allow_network: bool,
  setting: str = "engine='ray'",
  alternative: str = "--engine=threads",
) -> None:
  """Checks, before a cluster exists, what `start` needs.

  Raises ValueError without Ray, and for an address without `allow_network`.
  `setting` is the setting that asks for Ray, `alternative` one that does not.
  """
  try:
    import ray  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f"{setting} needs Ray ({error}): pip install 'asgd[ray]', or use"
      f" {alternative}"
    ) from error
  if address and not allow_network:
    source = f"--address={address} joins"
    # The flag has this variable as its default.
    if address == os.environ.get("RAY_ADDRESS"):
      source = f"RAY_ADDRESS={address} in the environment names"
    raise ValueError(
      f"{source} a Ray cluster, which other machines may reach: read"
      " docs/howto/security.md, and add --allow_network"
    )


def start(
  address: str | None = None,
  *,
  allow_network: bool = False,
  memory: int = _OBJECT_STORE_BYTES,
  modules: Sequence[str | Path] = (),
) -> bool:
  """Starts a Ray cluster, or joins the one at `address`.

  A new cluster has `memory` bytes of object store. A joined one is sent this
  code and the files of a user's `modules`. Raises ValueError without Ray, or if
  Ray would listen to other machines.

  Returns False if this process has a cluster already, which is then used.

  Ray listens on all interfaces unless its address is the loopback one. A
  private function of Ray replaces the loopback address by the machine's own.
  `_stay_on_loopback` patches that function and checks the resulting address.
  """
  check(address, allow_network=allow_network)
  import ray

  if ray.is_initialized():
    return False
  # [1] Settings of this process, which remain after `stop`.
  _quieten(ray_internals.driver_module())
  # Ray forks only to start other programs, which is safe with threads.
  warnings.filterwarnings("ignore", message="os.fork.. was called")
  ray_internals.disable_auto_connect()
  os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
  options: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": logging.CRITICAL,
  }
  # `undo` reverts the changes if a later step fails; else `stop` reverts them.
  # [2] Join a cluster.
  if address:
    with contextlib.ExitStack() as undo, _keeping_signals():
      options["runtime_env"] = _runtime_env(modules, undo)
      _join(ray, address, options)
      _undo_at_stop.push(undo.pop_all())
    return True
  # [3] Or start one.
  options.update(
    address="local",  # never the cluster of another program or user
    include_dashboard=False,  # it would listen on a port
    object_store_memory=memory,
  )
  with contextlib.ExitStack() as undo, _keeping_signals(), _passing_path():
    _keep_priority(undo)
    _ask_for_token(undo)
    options["_temp_dir"] = _make_folder(undo)
    if allow_network:
      _init(ray, options)
    else:
      _stay_on_loopback(ray, options)
    _undo_at_stop.push(undo.pop_all())
  if not ray_internals.requires_token():
    print(
      "Ray asks for no token (RAY_AUTH_MODE, or a Ray before 2.52): every"
      " user of this machine can run code as you; see docs/howto/security.md",
      file=sys.stderr,
    )
  return True


@contextlib.contextmanager
def _keeping_signals() -> Iterator[None]:
  """Keeps this process's SIGTERM handler, which saves before it ends.

  `ray.init` installs a handler that ends the process at once.
  """
  handler = signal.getsignal(signal.SIGTERM)
  yield
  # Python allows only the main thread to set a handler.
  in_main = threading.current_thread() is threading.main_thread()
  if in_main and callable(handler):
    signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _passing_path() -> Iterator[None]:
  """Gives the processes of a new cluster this process's import path.

  A runtime_env could set the variable, too. But each worker would then start a
  helper process that imports Ray, and Ray would keep no worker ready.
  """
  path = os.environ.get("PYTHONPATH")
  os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
  try:
    yield
  finally:
    del os.environ["PYTHONPATH"]
    if path is not None:
      os.environ["PYTHONPATH"] = path


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
  """Joins a cluster; raises ValueError if it does not answer."""
  try:
    ray.init(address=address, **options)
  except (ConnectionError, RuntimeError) as error:
    line = text_of(error)
    if "ersion mismatch" in line:  # with V or v, as Ray's versions differ
      raise ValueError(
        f"--address={address}: the cluster has another version than Ray"
        f" {ray.__version__} and Python {platform.python_version()} here"
        f" ({line}); install the same on both"
      ) from error
    raise ValueError(
      f"--address={address}: no Ray cluster answers there ({line}); is it"
      " started (ray start --head), and the token the same?"
    ) from error


def _runtime_env(
  modules: Sequence[str | Path], undo: contextlib.ExitStack
) -> dict[str, Any]:
  """Returns the runtime_env for a joined cluster.

  It sets no variable, and no `working_dir`, that a submitted job's own
  runtime_env sets: Ray refuses what both set.
  """
  job = json.loads(os.environ.get(_JOB_VARIABLE, "{}")).get("runtime_env", {})
  job_variables = job.get("env_vars") or {}
  # A user's choice of a cache may be a folder that all machines share. The
  # default one is this machine's.
  variables = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(_CACHE_PREFIXES)
    and name not in job_variables
    and not compiled.uses_default_folder()
  }
  options: dict[str, Any] = {"env_vars": variables} if variables else {}
  if "working_dir" not in job:
    options["working_dir"] = _copy_code(modules, undo)
  return options


def _copy_code(
  modules: Sequence[str | Path], undo: contextlib.ExitStack
) -> str:
  """Returns a folder with copies of asgd, asgd.pipeline and `modules` only."""
  folder = Path(tempfile.mkdtemp(prefix="asgd-code-"))
  undo.callback(shutil.rmtree, folder, ignore_errors=True)
  ignore = shutil.ignore_patterns("__pycache__")
  for path in (Path(__file__).parents[1], *map(Path, modules)):
    source = path.parent if path.name == "__init__.py" else path
    if source.is_dir():
      shutil.copytree(source, folder / source.name, ignore=ignore)
    else:
      shutil.copy(source, folder)
  # In a checkout this package lies beside asgd, not inside it.
  pipeline_folder = folder / "asgd" / "pipeline"
  if not pipeline_folder.exists():
    spec = importlib.util.find_spec("asgd.pipeline")
    assert spec is not None and spec.origin, "asgd.pipeline is installed too"
    shutil.copytree(Path(spec.origin).parent, pipeline_folder, ignore=ignore)
  return str(folder)


def _init(ray: Any, options: dict[str, Any]) -> None:
  """Starts a cluster; raises ValueError if its processes do not start in time.

  Ray raises a plain Exception then, so only that type is caught.
  """
  try:
    ray.init(**options)
  except Exception as error:
    if type(error) is not Exception:
      raise
    raise ValueError(
      f"Ray cannot start: {text_of(error)} A busy machine, or one without free"
      " memory, does that: run the same command again, or use --engine=threads"
    ) from error


def _stay_on_loopback(ray: Any, options: dict[str, Any]) -> None:
  """Starts a cluster that listens on the loopback interface only. Raises
  ValueError if this version of Ray listens elsewhere."""
  with (
    ray_internals.allow_loopback(),
    ray_internals.without_unused_processes(),
  ):
    _init(ray, {"_node_ip_address": "127.0.0.1", **options})
  if ray.util.get_node_ip_address() != "127.0.0.1":
    ray.shutdown()
    raise ValueError(
      f"Ray {ray.__version__} does not stay on the loopback interface; use"
      " another version, --engine=threads, or --allow_network"
    )


def _keep_priority(undo: contextlib.ExitStack) -> None:
  """Makes Ray's workers run at the priority of this process.

  Ray lowers theirs by 15. On a busy machine they would get almost no CPU time.
  """
  if _NICENESS_VARIABLE not in os.environ:
    os.environ[_NICENESS_VARIABLE] = "0"
    undo.callback(os.environ.pop, _NICENESS_VARIABLE, None)


def _ask_for_token(undo: contextlib.ExitStack) -> None:
  """Makes Ray answer only processes that know this cluster's token.

  The token is in the environment of the cluster's processes; a token of the
  user's environment takes precedence. Without one, every user of the machine
  could run code as this user.
  """
  if os.environ.get("RAY_AUTH_MODE"):  # the user has decided
    return
  environment = {"RAY_AUTH_MODE": "token"}
  if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & set(os.environ):
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
  # Callbacks run in reverse: Ray reads the environment after the removals.
  undo.callback(ray_internals.reread_environment)
  for name, value in environment.items():
    os.environ[name] = value
    undo.callback(os.environ.pop, name, None)
  ray_internals.reread_environment()


def _make_folder(undo: contextlib.ExitStack) -> str:
  """Returns a folder for a cluster's sockets and files.

  Ray makes the folder writable for every user. Its parent is closed to other
  users, so they cannot reach it.
  """
  parent_folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
  parent_folder = (
    parent_folder if len(parent_folder) <= _MAX_FOLDER_LENGTH else "/tmp"
  )
  _remove_abandoned(Path(parent_folder))
  # Only this user can read the folder (mode 700).
  private_folder = tempfile.mkdtemp(prefix="ray-", dir=parent_folder)
  processes.write_pid(Path(private_folder), "worker", 0)
  # `processes.kill_descendants` removes the folder, too.
  processes.TEMPORARY_FOLDERS.add(private_folder)
  undo.callback(shutil.rmtree, private_folder, ignore_errors=True)
  return os.path.join(private_folder, "s")


def _remove_abandoned(parent_folder: Path) -> None:
  """Removes the folders of this user's killed drivers.

  A driver writes its process id and start time into its folder first.
  """
  for folder in parent_folder.glob("ray-????????"):
    with contextlib.suppress(OSError):
      is_mine = folder.lstat().st_uid == os.geteuid()
      is_mine = is_mine and not folder.is_symlink()
      has_pid = (folder / "worker-0.pid").exists()
      if is_mine and has_pid and not processes.live_pids(folder)["worker"]:
        shutil.rmtree(folder, ignore_errors=True)


def _quieten(ray_worker: Any) -> None:
  """Keeps Ray from printing a paragraph for each process that dies."""
  show = getattr(ray_worker, "print_to_stdstream", None)
  if show is None or getattr(show, "func", None) is _show_unless_noise:
    return  # an earlier cluster of this process has replaced it
  replacement = functools.partial(_show_unless_noise, show)
  ray_worker.print_to_stdstream = replacement


def _show_unless_noise(
  show: Callable[..., None], data: Mapping[str, Any], *args: Any, **kwargs: Any
) -> None:
  """Prints a text by Ray's function `show`. Prints nothing if the text has a
  phrase of `_NOISE`, or if the cluster has died."""
  text = "".join(data.get("lines", ()))
  is_noise = any(words in text for words in _NOISE)
  if not is_noise and not ray_waits.dead_processes():
    show(data, *args, **kwargs)


def stop() -> None:
  """Ends the cluster that `start` started, and undoes its changes."""
  import ray

  if ray_waits.dead_processes():
    ray_waits.end_processes()  # the rest of the cluster would wait for its head
  ray.shutdown()
  _undo_at_stop.close()
