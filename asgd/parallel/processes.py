"""Several processes that train together: how they start, agree and end.

On one machine `asgd.parallel.supervisor` starts the same command N times, each
process with its share of the devices. On several machines the user starts each
process with its number and the address of process 0, or a scheduler that JAX
knows starts them (AUTO). Any machine that can reach the coordinator's port can
take part: use several machines on trusted networks only.

Errors name the flags from which a command calls `role`: --num_processes,
--process_id, --coordinator and --start_seconds.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils

from asgd import internals
from asgd.parallel import meshes

AUTO = "auto"  # a --coordinator: JAX finds the address of the coordinator
USAGE_ERROR = 2  # exit status of a process that could not take part
INCOMPLETE = 3  # exit status of a process that ends without all cells
# Environment variable with the read end of a pipe. The pipe closes when the
# supervisor exits.
LIFELINE = "ASGD_LIFELINE"
_SAVE_SECONDS = 10.0  # time to save after the supervisor has exited
_MAX_ERROR = 300  # bytes of an error that is sent to the other processes


class ProcessRole(NamedTuple):
  """The part of this process in the training."""

  # Number of processes; None: JAX finds the number.
  count: int | None  # type: ignore[assignment]
  # None if this process is alone or the supervisor, or JAX finds the number
  process_id: int | None
  coordinator: str | None  # HOST:PORT of process 0, or AUTO
  start_seconds: float  # time in which all processes have to connect

  @property
  def auto(self) -> bool:
    """Whether JAX finds the other processes."""
    return self.coordinator == AUTO

  @property
  def supervises(self) -> bool:
    """Whether this process starts the other processes, and trains nothing."""
    several = self.count is not None and self.count > 1
    return several and self.process_id is None and not self.auto


def role(
  count: int,
  process_id: int | None = None,
  coordinator: str | None = None,
  start_seconds: float = 60.0,
) -> ProcessRole:
  """Returns the role that a command's flags set; `count` is --num_processes.
  Raises ValueError for values that exclude one another."""
  if count < 1:
    raise ValueError(f"--num_processes must be 1 or more, not {count}")
  if not 0 < start_seconds < 1e6:
    raise ValueError(f"--start_seconds must be positive, not {start_seconds:g}")
  if coordinator == AUTO:
    if process_id is not None:
      raise ValueError("--coordinator=auto finds the --process_id: drop it")
    return ProcessRole(count if count > 1 else None, None, AUTO, start_seconds)
  if (process_id is None) != (coordinator is None):
    raise ValueError(
      "--process_id and --coordinator=HOST:PORT go together, one process at a"
      " time; for all of them on this machine, --num_processes is enough"
    )
  if process_id is not None and not 0 <= process_id < count:
    raise ValueError(
      f"--process_id must be from 0 to {count - 1} with --num_processes={count}"
      f", not {process_id}"
    )
  if coordinator is not None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
      raise ValueError(f"--coordinator must be HOST:PORT, not {coordinator!r}")
  return ProcessRole(count, process_id, coordinator, start_seconds)


def join(role: ProcessRole, devices: int | None) -> None:
  """Starts JAX, and connects this process to the other processes, if there are
  any. If they do not connect in time, this process ends with one line.

  Args:
    role: the role of this process.
    devices: CPU devices of all processes together; None: the devices of the
      machine.

  Raises:
    ValueError: if the processes cannot share the devices evenly, or JAX finds
      no device.
  """
  share, has_supervisor = None, False
  # [1] The number of CPU devices, which JAX reads when it starts.
  if devices is not None and role.count is not None:
    share = devices_of_each(devices, role.count)
    if meshes.cpu_devices() < share:
      jax.config.update("jax_num_cpu_devices", share)
  # [2] Connect, before JAX starts, if there are other processes.
  if role.auto or role.process_id is not None:
    has_supervisor = _watch_supervisor()
    _connect(role, share if has_supervisor else None)
  # [3] Start JAX. Its collectives open further connections.
  with _loopback() if has_supervisor else contextlib.nullcontext():
    meshes.find_devices()


def devices_of_each(devices: int, count: int) -> int:
  """Returns the number of devices of each process. Raises ValueError if `count`
  does not divide the devices, or each process has more than JAX can make."""
  total = f"the {devices} devices of config.mesh (or config.devices)"
  if devices % count:
    raise ValueError(
      f"{total} cannot be divided among --num_processes={count}: use another"
      f" mesh, or a divisor of {devices}"
    )
  if devices // count > meshes.MAX_DEVICES:
    raise ValueError(
      f"{total} are {devices // count:,} for each process; JAX makes at most"
      f" {meshes.MAX_DEVICES:,}: use a smaller mesh, or more --num_processes"
    )
  return devices // count


def _connect(role: ProcessRole, n_devices: int | None) -> None:
  """Connects to the other processes, with `n_devices` devices of this process;
  None: all devices."""
  # JAX's preemption service would catch SIGTERM, on which runs save and end.
  jax.config.update("jax_enable_preemption_service", False)
  name = "this process"
  options: dict[str, Any] = {}
  if not role.auto:
    name = f"process {role.process_id} of {role.count}"
    options["coordinator_address"] = role.coordinator
  if n_devices is not None:
    assert role.process_id is not None  # a supervisor gives each a number
    first = role.process_id * n_devices
    options["local_device_ids"] = list(range(first, first + n_devices))
    # Listen on the loopback interface only.
    options["coordinator_bind_address"] = role.coordinator

  def give_up():
    print(
      f"error: {name} waited {role.start_seconds:g} s at"
      f" --coordinator={role.coordinator} and not all processes connected:"
      " start each with the same --num_processes and --coordinator and its own"
      " --process_id, or wait longer with --start_seconds",
      file=sys.stderr,
      flush=True,
    )
    os._exit(USAGE_ERROR)

  # JAX would end the process with a traceback. So JAX's time limit is a minute
  # longer.
  timer = threading.Timer(role.start_seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      **options,
      num_processes=role.count,
      process_id=role.process_id,
      initialization_timeout=round(role.start_seconds) + 60,
      shutdown_timeout_seconds=10,
    )
  except (RuntimeError, ValueError) as error:
    message = " ".join(str(error).split())[:_MAX_ERROR]
    raise ValueError(
      f"{name} cannot take part at --coordinator={role.coordinator}: {message}"
    ) from error
  finally:
    timer.cancel()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
  """Keeps connections of the processes on the loopback interface, for which JAX
  has no option."""
  library, name = internals.xla_library(), "make_gloo_tcp_collectives"
  make = getattr(library, name, None)
  if make is None:
    raise ValueError(
      f"JAX {jax.__version__} does not let processes stay on the loopback"
      " interface; use another version, or --process_id and --coordinator"
    )
  on_loopback = functools.partial(make, hostname="127.0.0.1")
  with mock.patch.object(library, name, on_loopback):
    yield


def _watch_supervisor() -> bool:
  """Ends this process when its supervisor ends. Returns False if this process
  has no supervisor."""
  pipe = os.environ.pop(LIFELINE, None)
  if pipe is None:
    return False

  def watch():
    # Nothing is ever written: `read` returns at the end of file, when the
    # supervisor has exited and its write end is closed.
    os.read(int(pipe), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_SAVE_SECONDS)
    # The main thread may wait for other processes that have exited.
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
  return True


def is_first() -> bool:
  """Whether this is process 0, which writes and prints."""
  return jax.process_index() == 0


def gather(numbers: Any) -> np.ndarray:
  """Returns float[N, k]: the k numbers of each process."""
  row = np.asarray(numbers, np.float32)
  if jax.process_count() == 1:
    return row[None]
  return np.asarray(multihost_utils.process_allgather(row))


def _gather_bytes(content: bytes) -> list[bytes]:
  """Returns the content of every process without spaces at its end."""
  # All rows need one length, so the lengths are gathered first.
  length = np.int32(len(content))
  size = int(np.max(multihost_utils.process_allgather(length)))
  padded = np.frombuffer(content.ljust(size + 1), np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(padded.astype(np.int32)))
  return [bytes(each.astype(np.uint8)).rstrip() for each in rows]


def share(value: Any) -> Any:
  """Returns process 0's value, plain data, on every process."""
  if jax.process_count() == 1:
    return value
  content = json.dumps(value).encode() if is_first() else b""
  return json.loads(_gather_bytes(content)[0])


def share_arrays(tree: Any) -> Any:
  """Returns the arrays of process 0; the other processes pass arrays of the
  same shapes."""
  if jax.process_count() == 1:
    return tree
  return multihost_utils.broadcast_one_to_all(tree)


def fail_together(make: Callable[[], Any]) -> Any:
  """Returns make(). If make raises a ValueError or an OSError on a process,
  this process raises it, and the others raise a ValueError."""
  if not jax.distributed.is_initialized():
    return make()
  value, error = None, None
  try:
    value = make()
  except (ValueError, OSError) as caught:
    error = caught
  # A failed process also takes part in this exchange: otherwise the other
  # processes would wait for it in their next collective.
  errors = _gather_bytes(str(error or "").encode()[:_MAX_ERROR])
  if error is not None:
    raise error
  for number, text in enumerate(errors):
    if text:
      raise ValueError(f"process {number}: {text.decode(errors='replace')}")
  return value


def check_same(name: str, digest: str) -> None:
  """Raises ValueError on all processes if their digests of `name` differ."""
  if jax.process_count() == 1:
    return
  first_digest, *other_digests = _gather_bytes(digest.encode())
  for number, other_digest in enumerate(other_digests, 1):
    if other_digest != first_digest:
      raise ValueError(
        f"process {number} was given another {name} than process 0: start all"
        " with the same command and the same files"
      )


def run(main: Callable[[], None]) -> None:
  """Calls `main`. If it fails, ends this process without waiting for the other
  processes."""
  try:
    main()
  except BaseException as error:
    status: Any = error.code if isinstance(error, SystemExit) else 1
    failed = status in (1, USAGE_ERROR)
    # After a second interrupt the other processes may be in the middle of a
    # step.
    failed |= isinstance(error.__context__, KeyboardInterrupt)
    # With any other status (of a signal, of missing cells) all processes end
    # together.
    if not failed or not jax.distributed.is_initialized():
      raise
    if not isinstance(error, SystemExit):
      traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # JAX's own exit would wait for the other processes
