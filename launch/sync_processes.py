"""Several processes that train as one: how they start, agree and end.

On one machine --num_processes=N makes this process a supervisor. It starts N
more of the same command, each with its share of the devices, that find one
another on the loopback interface, and passes on what the first of them prints,
and signals to all. If one dies, the others, which would wait for it, are ended
within seconds. If the supervisor dies, they save and end.

On several machines each process is started by --process_id and --coordinator,
or by something that JAX knows of (--coordinator=auto). Whoever can reach the
coordinator's port can take part: this is for networks that one trusts.
"""

import collections
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from launch import cli

_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 1, "Processes that train together, on this machine or more."
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "This process's number, from 0: others start the others."
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator",
  None,
  "HOST:PORT of process 0; or auto, under Slurm and others that JAX knows.",
)
_START_SECONDS = flags.DEFINE_float(
  "start_seconds", 60.0, "For all processes to come."
)
_LIFELINE = "ASGD_LIFELINE"  # a pipe that ends when the supervisor does
_GRACE = 2.0  # seconds for the others to end by themselves, once one died
_SAVING = 60.0  # seconds to save, once asked to stop
_LOOK = 0.5  # seconds between two looks at whether one was asked to stop
_ALONE = 10.0  # seconds to save, once the supervisor died
_MOST_DEVICES = 2048  # of a process: JAX takes others for another process's
_MOST = 300  # bytes of an error that others are told
_LOUD = "[Gloo]"  # begins lines of the library that are no news


class Way(NamedTuple):
  """How this process takes part."""

  count: int | None = 1  # of processes; None: JAX finds out
  number: int | None = None  # of this one; None: it is alone, or JAX finds out
  auto: bool = False  # whether JAX finds the others
  supervises: bool = False  # it starts the others, and trains nothing


def way() -> Way:
  """Returns what the flags ask for.

  Raises:
    ValueError: for flags that do not go together.
  """
  count, number = _NUM_PROCESSES.value, _PROCESS_ID.value
  place = _COORDINATOR.value
  if count < 1:
    raise ValueError(f"--num_processes must be 1 or more, not {count}")
  if not 0 < _START_SECONDS.value < 1e6:
    raise ValueError(
      f"--start_seconds must be positive, not {_START_SECONDS.value:g}"
    )
  if place == "auto":
    if number is not None:
      raise ValueError("--coordinator=auto finds the --process_id: drop it")
    return Way(count if count > 1 else None, auto=True)
  if (number is None) != (place is None):
    raise ValueError(
      "--process_id and --coordinator=HOST:PORT go together, one process at a"
      " time; for all of them on this machine, --num_processes is enough"
    )
  if number is not None and not 0 <= number < count:
    raise ValueError(
      f"--process_id must be from 0 to {count - 1} with --num_processes={count}"
      f", not {number}"
    )
  if place is not None:
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
      raise ValueError(f"--coordinator must be HOST:PORT, not {place!r}")
  return Way(count, number, supervises=count > 1 and number is None)


# What each process does.


def join(given: Way, devices: int | None) -> None:
  """Starts JAX, together with the others if there are any.

  If they do not come, this process ends with one line.

  Args:
    given: how to take part; not one that supervises.
    devices: CPU devices of all processes; None for what there is.

  Raises:
    ValueError: if the devices cannot be divided, or there are none.
  """
  share = None
  if devices is not None and given.count is not None:
    share = devices_of_each(devices, given.count)
    if jax.config.jax_num_cpu_devices < share:
      jax.config.update("jax_num_cpu_devices", share)
  loopback = contextlib.nullcontext()
  if given.auto or given.number is not None:
    supervised = _watch_supervisor()
    _connect(given, share if supervised else None)
    loopback = _loopback() if supervised else loopback
  try:
    with loopback:
      jax.devices()
  except (RuntimeError, AssertionError) as error:
    # JAX asserts it, for a platform of which nothing is installed.
    raise ValueError(
      f"JAX finds no device: {str(error) or 'none'}; see the variable"
      f" JAX_PLATFORMS, which is {os.environ.get('JAX_PLATFORMS', 'not set')}"
    ) from error


def devices_of_each(devices: int, count: int) -> int:
  """Returns how many devices each process has.

  Raises:
    ValueError: if they are not as many for each, or more than JAX can make.
  """
  if devices % count:
    raise ValueError(
      f"the {devices} devices of config.mesh (or config.devices) cannot be"
      f" divided among --num_processes={count}: use another mesh, or a divisor"
      f" of {devices}"
    )
  if devices // count > _MOST_DEVICES:
    raise ValueError(
      f"the {devices} devices of config.mesh (or config.devices) are"
      f" {devices // count:,} for each process; JAX makes at most"
      f" {_MOST_DEVICES:,}: use a smaller mesh, or more --num_processes"
    )
  return devices // count


def _connect(given, share):
  """Finds the others; `share` devices are this one's, None for all here."""
  jax.config.update("jax_enable_preemption_service", False)  # takes SIGTERM
  name, place = "this process", _COORDINATOR.value
  options: dict[str, Any] = {"num_processes": given.count}
  if not given.auto:
    options |= {"coordinator_address": place, "process_id": given.number}
    name = f"process {given.number} of {given.count}"
  if share is not None:
    first = given.number * share
    options["local_device_ids"] = list(range(first, first + share))
    options["coordinator_bind_address"] = place  # and nowhere else
  patience = _START_SECONDS.value

  def give_up():
    print(
      f"error: {name} waited {patience:g} s at --coordinator={place} and not"
      " all processes came: start each with the same --num_processes and"
      " --coordinator and its own --process_id, or wait longer with"
      " --start_seconds",
      file=sys.stderr,
      flush=True,
    )
    os._exit(cli.USAGE_ERROR)

  # JAX would end the process with a trace of its own, and later.
  timer = threading.Timer(patience, give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(
      **options,
      initialization_timeout=round(patience) + 60,
      shutdown_timeout_seconds=10,
    )
  except (RuntimeError, ValueError) as error:
    line = " ".join(str(error).split())[:_MOST]
    raise ValueError(
      f"{name} cannot take part at --coordinator={place}: {line}"
    ) from error
  finally:
    timer.cancel()


@contextlib.contextmanager
def _loopback():
  """Keeps the processes' own connections off the network.

  JAX lets nobody choose the interface; without this it is that of the machine's
  name, on some machines one that others can reach.
  """
  from jax._src import xla_bridge

  library = getattr(xla_bridge, "_jax", None)
  name = "make_gloo_tcp_collectives"
  if not hasattr(library, name):
    raise ValueError(
      f"JAX {jax.__version__} does not let processes stay on the loopback"
      " interface; use another version, or --process_id and --coordinator"
    )
  make = getattr(library, name)

  def near(**options):
    return make(**options, hostname="127.0.0.1")

  with mock.patch.object(library, name, near):
    yield


def _watch_supervisor() -> bool:
  """Ends this process if its supervisor does; False if there is none."""
  pipe = os.environ.pop(_LIFELINE, None)
  if pipe is None:
    return False

  def watch():
    os.read(int(pipe), 1)  # nobody writes: this is the end
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(_ALONE)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()
  return True


def leads() -> bool:
  """Whether this process writes and prints."""
  return jax.process_index() == 0


def gather(numbers: Any) -> np.ndarray:
  """Returns float[N, k]: the k numbers that each process gives."""
  row = np.asarray(numbers, np.float32)
  if jax.process_count() == 1:
    return row[None]
  return np.asarray(multihost_utils.process_allgather(row))


def _gather_bytes(content: bytes) -> list[bytes]:
  size = int(gather([len(content)]).max())
  row = np.frombuffer(content.ljust(size + 1), np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(row.astype(np.int32)))
  return [bytes(found.astype(np.uint8)).rstrip() for found in rows]


def share(value: Any) -> Any:
  """Returns process 0's value, plain data, on every process."""
  if jax.process_count() == 1:
    return value
  content = json.dumps(value).encode() if leads() else b""
  return json.loads(_gather_bytes(content)[0])


def share_arrays(tree: Any) -> Any:
  """Returns process 0's arrays; others give some of the same shapes."""
  if jax.process_count() == 1:
    return tree
  return multihost_utils.broadcast_one_to_all(tree)


def together(make: Callable[[], Any]) -> Any:
  """Calls `make`, and fails on all processes if it does on one.

  Raises:
    ValueError: what it raised, or another process's error.
  """
  made, error = None, None
  try:
    made = make()
  except (ValueError, OSError) as caught:
    error = caught
  if not jax.distributed.is_initialized():
    if error is not None:
      raise error
    return made
  told = _gather_bytes(str(error or "").encode()[:_MOST])
  if error is not None:
    raise error
  for number, text in enumerate(told):
    if text:
      raise ValueError(f"process {number}: {text.decode(errors='replace')}")
  return made


def same(what: str, digest: str) -> None:
  """Checks that all processes have the same of something.

  Raises:
    ValueError: if not, on all of them.
  """
  if jax.process_count() == 1:
    return
  first, *others = _gather_bytes(digest.encode())
  for number, found in enumerate(others, 1):
    if found != first:
      raise ValueError(
        f"process {number} was given another {what} than process 0: start all"
        " with the same command and the same files"
      )


def run(main: Callable[[], None]) -> None:
  """`cli.run`, after which a process that failed waits for no other."""
  try:
    cli.run(main)
  except BaseException as end:
    status = 1
    if isinstance(end, SystemExit):
      status = end.code
    failed = status in (1, cli.USAGE_ERROR)
    # Asked twice to stop: the others may be in the middle of something.
    failed |= isinstance(end.__context__, KeyboardInterrupt)
    if not failed or not jax.distributed.is_initialized():
      raise
    if not isinstance(end, SystemExit):
      traceback.print_exception(end)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # JAX's own way out is to meet the others


# What the supervisor does.


def supervise(count: int) -> None:
  """Starts this command `count` times, as processes that train together.

  Returns when all are done.

  Raises:
    ValueError: if one fails: which, and the last thing it said.
    SystemExit: if they were stopped by a signal, which they were passed.
  """
  with socket.socket() as chosen:
    chosen.bind(("127.0.0.1", 0))
    port = chosen.getsockname()[1]
  _Supervisor(count, f"127.0.0.1:{port}").run()


class _Supervisor:
  """Who starts processes, listens to them, and ends them."""

  def __init__(self, count, place):
    self._count, self._place = count, place
    self._children: list[subprocess.Popen] = []
    self._said = [collections.deque(maxlen=100) for _ in range(count)]
    self._readers: list[tuple[threading.Thread, Any]] = []
    self._deaths = queue.SimpleQueue()  # of (number, status), as they come
    self._signal = 0

  def run(self):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, self._pass_on)
    killed: list[str] = []
    ours, theirs = os.pipe()  # both ends are closed when this process ends
    try:
      for number in range(self._count):
        self._start(number, ours)
      os.close(ours)
      failed = self._wait()
    finally:
      for child in self._children:
        if child.poll() is None:
          child.kill()
          killed.append(child.args[-2].removeprefix("--process_id="))
        child.wait()
      for reader, stream in self._readers:
        reader.join(_GRACE)
        if stream is not None and not reader.is_alive():
          stream.close()
      os.close(theirs)
    if self._signal:
      if killed:
        print(
          f"process {', '.join(killed)} of {self._count} did not stop in"
          f" {_SAVING:g} s and was killed; what was saved goes on with"
          " --resume",
          file=sys.stderr,
        )
      sys.exit(128 + self._signal)
    if failed is not None:
      raise ValueError(self._describe(*failed))

  def _start(self, number, pipe):
    command = [
      *(sys.executable, *sys.orig_argv[1:]),
      *(f"--process_id={number}", f"--coordinator={self._place}"),
    ]
    child = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env={**os.environ, _LIFELINE: str(pipe), "PYTHONUNBUFFERED": "1"},
      pass_fds=(pipe,),
      start_new_session=True,  # the terminal's Ctrl-C is passed on from here
      text=True,
      errors="replace",
    )
    self._children.append(child)
    if self._signal:
      child.send_signal(self._signal)
    for listen, stream in (
      *((self._hear, child.stdout), (self._listen, child.stderr)),
      (self._await, None),
    ):
      reader = threading.Thread(target=listen, args=(number,), daemon=True)
      reader.start()
      self._readers.append((reader, stream))

  def _hear(self, number):
    """Passes on what the first process prints."""
    for line in self._children[number].stdout:
      if number == 0 and not line.startswith(_LOUD):
        print(line, end="", flush=True)

  def _listen(self, number):
    """Remembers what a process complains of; errors come in the end."""
    interrupted = False
    for line in self._children[number].stderr:
      self._said[number].append(line.strip())
      if self._signal and line.startswith(("Traceback (", "Could not import")):
        interrupted = True  # before it listened to signals: no news
      if interrupted or number != 0:
        continue
      if not line.startswith(("error: ", _LOUD)):
        print(line, end="", file=sys.stderr, flush=True)

  def _await(self, number):
    self._deaths.put((number, self._children[number].wait()))

  def _pass_on(self, number, frame):
    del frame
    self._signal = number
    for child in self._children:
      with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)

  def _wait(self):
    """Returns the first that failed, (number, status), when all are to end."""
    failed, end, left = None, None, self._count
    while left:
      if end is None and self._signal:
        end = time.monotonic() + _SAVING
      try:
        number, status = self._deaths.get(timeout=_LOOK)
      except queue.Empty:
        if end is not None and time.monotonic() > end:
          break
        continue
      left -= 1
      if status and failed is None:
        failed = number, status
        patience = _SAVING if self._signal else _GRACE
        end = time.monotonic() + patience
    return failed

  def _describe(self, number, status):
    how, remedy = f"failed with status {status}", ""
    if status < 0:
      how = f"was killed by {signal.Signals(-status).name}"
      remedy = "; what was saved goes on with --resume"
    lines = [line for line in self._said[number] if line]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or ["it said nothing"])[-1]
    return (
      f"process {number} of {self._count} {how}:"
      f" {last.removeprefix('error: ')}{remedy}"
    )
