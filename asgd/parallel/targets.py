"""Devices to compile programs for, which this machine need not have.

TPU topologies come from libtpu (`pip install 'asgd[tpu]'`), which needs no TPU.
For GPUs the CUDA plugin of JAX (`pip install 'asgd[cuda]'`) compiles for a
description of a GPU, and needs no GPU. On a machine with a GPU, XLA times
several kernels and chooses the fastest; here it does not.
"""

import os
import re
from typing import Any, NamedTuple

from jax.experimental import topologies

from asgd import names

_SIZES = r"(\d+(?:x\d+)*)"
_FORM = re.compile(rf"([a-z0-9]+):{_SIZES}(?:\*(\d+))?")  # kind:grid*slices
_MAX_SLICES = 64
_GIB = 2**30

# Bytes of a device's memory, from the maker's data sheets.
TPUS = {"v5e": 16 * _GIB, "v5p": 95 * _GIB, "v6e": 32 * _GIB}


class Gpu(NamedTuple):
  """The properties of a GPU that XLA's compiler needs."""

  memory: int  # bytes
  cores: int
  capability: int  # major number of the CUDA compute capability
  cache: int  # bytes of the level 2 cache
  speed: float  # bytes per second that the memory transfers
  clock: float  # GHz
  name: str


GPUS = {
  "h100": Gpu(
    84942979072, 132, 9, 52428800, 3.35e12, 1.98, "NVIDIA H100 80GB HBM3"
  ),
  "h200": Gpu(
    151397597184, 132, 9, 52428800, 4.8e12, 1.98, "NVIDIA H200 141GB HBM3e"
  ),
  "b200": Gpu(
    191514411008, 148, 10, 132644864, 7.67e12, 1.965, "NVIDIA B200"
  ),
}
# XLA's description of a GPU, a text protocol buffer. The limits without a field
# are the same for all GPUS.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {speed:.0f} l2_cache_size: {cache}
  clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


class Target(NamedTuple):
  """Devices to compile for."""

  name: str
  memory: int  # bytes of a device
  devices: list[Any]  # in the order of their slices
  slices: int  # groups of devices with fast links inside
  options: dict[str, Any]  # options of the compiler


def find(text: str) -> Target:
  """Returns the devices that a text names: v5p:4x4x4, h100:8, or v5e:2x2*2 for
  two slices.

  Raises ValueError for another text, for a topology that libtpu does not know,
  and if libtpu (for GPUs: JAX's CUDA plugin) is not installed.
  """
  match = _FORM.fullmatch(text.strip())
  if match is None:
    raise ValueError(
      f"cannot read the topology {text!r}: give a kind of device and its grid,"
      " as v5e:4x4, v5p:4x4x4, two slices as v5e:2x2*2, or GPUs as h100:8"
    )
  kind, sizes, slices = match[1], match[2], int(match[3] or 1)
  names.lookup("kind of device", kind, {**TPUS, **GPUS})
  if not 1 <= slices <= _MAX_SLICES:
    raise ValueError(f"slices of {text!r} must be 1 to {_MAX_SLICES}")
  if kind in GPUS:
    return _gpus(text, kind, sizes, slices)
  return _tpus(text, kind, sizes, slices)


def _tpus(text: str, kind: str, sizes: str, slices: int) -> Target:
  """Returns a topology of libtpu."""
  # Without these variables libtpu waits for the machine's metadata server, and
  # only one process may load it. Here no process uses a TPU.
  for name, value in (
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_ACCELERATOR_TYPE", f"{kind}-1"),
  ):
    os.environ.setdefault(name, value)
  grid = {} if slices == 1 else {"num_slices": slices}
  try:
    topology = topologies.get_topology_desc(f"{kind}:{sizes}", "tpu", **grid)
  except Exception as error:  # XLA does not document the type of its errors
    line = " ".join(str(error).split())[:200]
    if "not installed" in line:
      line = f"libtpu is not installed: pip install 'asgd[tpu]' ({line})"
    raise ValueError(f"the topology {text!r}: {line}") from error
  return Target(text, TPUS[kind], list(topology.devices), slices, {})


def _gpus(text: str, kind: str, sizes: str, slices: int) -> Target:
  """Returns a topology of JAX's CUDA plugin."""
  gpu = GPUS[kind]
  if not sizes.isdecimal():
    raise ValueError(
      f"GPUs have no grid: give their number on a host, as {kind}:8, or of two"
      f" hosts as {kind}:8*2; not {text!r}"
    )
  # Without this variable the plugin does not load on a machine without a CUDA
  # driver.
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  try:
    topology = topologies.get_topology_desc(
      kind,
      "cuda",
      target_config=_CONFIG.format(**gpu._asdict()),
      topology=f"1x{slices}x{sizes}",
    )
  except Exception as error:
    raise ValueError(
      f"{text!r} needs JAX's CUDA plugin, which compiles for a GPU without one:"
      f" pip install 'asgd[cuda]' ({' '.join(str(error).split())[:200]})"
    ) from error
  # This machine need not have a GPU on which XLA could time kernels.
  options = {"xla_gpu_autotune_level": 0}
  return Target(text, gpu.memory, list(topology.devices), slices, options)
