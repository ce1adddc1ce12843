"""A run's site (folders, clock, devices), and the set-up of a process before
it uses JAX."""

import contextlib
import ctypes
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, internals
from asgd.live import slots
from asgd.live.setup import Setup, slot_counts

# The environment variable for a process's share of a GPU's memory, by its
# present and its former name. XLA reads it when JAX is first used.
_FRACTION_VARIABLES = (
  "XLA_CLIENT_MEM_FRACTION",
  "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
# XLA on the CPU divides only arrays of more elements among threads.
UNDIVIDED = 2**15
_THREADS_VARIABLE = "PJRT_NPROC"  # number of threads of XLA's pool on the CPU


class Site(NamedTuple):
  """Folders, clock and devices of a run; the same for all of its processes."""

  setup: Setup
  run: str  # folder of the journals and records
  memory: str  # folder of sockets and shared memory; removed at the end
  began: float  # by time.monotonic() of the driver's machine
  compress: str | None = None  # how slots store numbers, as in `wire.layout`
  spans: bool = False  # whether workers write the times of their actions
  devices: int = 1  # CPU devices of each worker
  platform: str | None = None  # JAX's platform in workers; None: JAX chooses
  gpus: float = 0.0  # GPUs that Ray reserves for each worker
  profile: str | None = None  # folder for the profiler's trace of worker 0
  token: str = ""  # prefix of the names of the run's actors
  machine: str = ""  # id of the driver's node in Ray's cluster
  sockets: bool = True  # whether participants on one machine use sockets
  cluster_seconds: float = 0.0  # time that a cluster may take to grow
  jax: str = jax.__version__  # the driver's version of JAX
  patience: float = 5.0  # seconds after which a worker repeats a frame

  def clock(self) -> float:
    """Returns the seconds since the run began. Valid on the driver's machine
    only: monotonic clocks of other machines have another zero."""
    return time.monotonic() - self.began

  def actor_name(self, kind: str, index: int, generation: int) -> str:
    """Returns the name of a participant's actor. `generation` counts its
    earlier actors: an actor that has exited may occupy its name for a while."""
    return f"{self.token}-{kind}-{index}-{generation}"

  def socket(self, index: int) -> Path:
    """Returns the path of a shard's socket."""
    return Path(self.memory) / f"{index}.sock"

  def open_memory(self, index: int, *like: Any) -> slots.SharedMemory:
    """Opens a shard's memory; `like` is as in `SharedMemory`."""
    folder = Path(self.memory) / f"shard-{index}"
    counts = slot_counts(self.setup)
    return slots.SharedMemory(folder, counts, like, compress=self.compress)


def prepare_process(site: Site, worker: bool) -> None:
  """Sets up malloc and JAX in a process that has not used JAX yet.

  Args:
    site: the site of the run.
    worker: True in the process of a worker or a peer, False in that of a host
      of a `LOCAL` kind.

  Raises:
    ValueError: if the version of JAX is not the driver's.
  """
  if site.jax != jax.__version__:
    raise ValueError(
      f"{platform.node()} has jax {jax.__version__}, and the driver {site.jax}:"
      " install the same version, or a replay may differ in its bits"
    )
  # Each new version of the parameters is a new array. By default glibc requests
  # the memory of a large array from the kernel, which zeroes each page, and
  # later returns it: this takes twice the time of an update itself.
  trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
  with contextlib.suppress(OSError, AttributeError):
    malloc_option = ctypes.CDLL(None).mallopt
    malloc_option(mmap_max, 0)
    malloc_option(trim_threshold, 2**31 - 1)
    malloc_option(top_pad, 2**26)
  if not worker or site.setup.rules.depth == 1:
    # The process only waits for the result. Dispatch to a second thread would
    # cost two context switches.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  if worker and site.devices > 1:
    jax.config.update("jax_num_cpu_devices", site.devices)
  _choose_devices(site, worker)


def receive_in_one_thread(server: base.Server, params: Any) -> bool:
  """Makes JAX compute in one thread, in a process that has not used JAX yet, if
  the program that receives a message has small arrays only.

  XLA divides operations among a pool of threads. The threads spin while they
  wait, on cores that workers need. How XLA divides a sum over many elements
  depends on the size of the pool, and so do the bits of the sum: with one
  thread a replay could differ. XLA never divides an array of up to `UNDIVIDED`
  elements.

  Args:
    server: the shard's server.
    params: the shard's part of the parameters, or their shapes and dtypes.

  Returns:
    Whether JAX computes in one thread.
  """
  leaves = jax.tree.leaves(params)
  if server.codec is not None or any(leaf.size > UNDIVIDED for leaf in leaves):
    return False

  def receive(params: Any, message: Any, worker: jax.Array) -> Any:
    state = server.init(params)
    ticket = server.send(state, worker)
    return server.receive(state, ticket, message)

  try:
    # Tracing computes nothing, so XLA does not read its options yet.
    program = jax.make_jaxpr(receive)(params, params, np.int32(0)).jaxpr
  except jax.errors.ConcretizationTypeError:  # `init` reads values of params
    return False
  if _largest_size(program) > UNDIVIDED:
    return False
  former_value = os.environ.get(_THREADS_VARIABLE)
  os.environ[_THREADS_VARIABLE] = "1"
  try:
    jax.local_devices()  # the first use of JAX: XLA reads the variable
  finally:  # processes that this one starts do not inherit the value
    os.environ.pop(_THREADS_VARIABLE)
    if former_value is not None:
      os.environ[_THREADS_VARIABLE] = former_value
  return True


def _largest_size(jaxpr: Any) -> int:
  """Returns the number of elements of the largest array in a program."""
  arrays = (
    array
    for equation in internals.equations(jaxpr)
    for array in (*equation.invars, *equation.outvars)
  )
  return max((getattr(array.aval, "size", 0) for array in arrays), default=0)


def _choose_devices(site: Any, worker: bool) -> None:
  """Chooses the devices of JAX in this process.

  Shards use the CPU on every machine: an update reads and writes each number
  once, and messages and tickets are in the machine's memory. Workers use
  `site.platform` unless JAX_PLATFORMS is set. Workers that share a GPU divide
  nine tenths of its memory and leave a tenth to CUDA."""
  if not worker:
    jax.config.update("jax_platforms", "cpu")
  elif site.platform and not os.environ.get("JAX_PLATFORMS"):
    jax.config.update("jax_platforms", site.platform)
  elif 0 < site.gpus < 1 and not any(map(os.environ.get, _FRACTION_VARIABLES)):
    os.environ[_FRACTION_VARIABLES[0]] = f"{0.9 * site.gpus:g}"


def node_id() -> str:
  """Returns the id of this machine's node in Ray's cluster."""
  import ray

  return ray.get_runtime_context().get_node_id()
