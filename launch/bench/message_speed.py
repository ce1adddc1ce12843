"""What codecs and the packed wire cost, in turns with a memory copy, and how
many messages a second come from a worker to a server on another machine.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import compression
from asgd.compression import packing
from asgd.compression.packing import gaps

from .turns import Contestant

_RATE = 0.01  # of the update that a message ends in
_FIRST = 10  # messages that are not counted
FAR = "far"  # resource of the worker's node
_NEAR = "node:__internal_head__"  # that Ray gives to the first node
Options = Mapping[str, Any]  # of `compression.named`, with the name


def take_core(number: int) -> set[int]:
  """Keeps this thread, and those it starts, on one of its cores, where a
  machine lets it; before JAX starts its own. Returns the cores it had."""
  if not hasattr(os, "sched_setaffinity"):
    return set()
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
  return cores


def message(megabytes: float, leaves: int = 4) -> dict[str, np.ndarray]:
  """Returns matrices of normal numbers, of so many MB together."""
  rows = max(round(megabytes * 1e6 / 4 / leaves / 256), 1)
  rng = np.random.default_rng(0)
  return {
    f"layer{i}": rng.standard_normal((rows, 256), np.float32)
    for i in range(leaves)
  }


class MessageStages:
  """What is done to a message on its way, each stage over and over."""

  def __init__(self, options: Options, like: Any):
    """Makes the code of a message, a tree of float32 arrays; compiles."""
    self._codec = codec = compression.named(**options)
    like, key = jax.tree.map(jnp.asarray, like), jax.random.key(0)
    step = jax.jit(
      lambda state, tree: codec.encode(state, tree, key), donate_argnums=0
    )
    # Each array has memory of its own, as it is donated.
    state = jax.tree.map(jnp.array, codec.init(like))
    self.code, self._state = jax.block_until_ready(step(state, like))
    self._decode = jax.jit(codec.decode)
    # Where a residual is kept, what was sent of it comes again: so all codes
    # are like the first.
    keeps = compression.residual_norm(self._state) > 0
    self._message = self._decode(self.code) if keeps else like
    self._step = step
    self.layout = packing.layout(self.code)
    self._buffer = np.zeros(self.layout.most, np.uint8)
    self._unpacked = packing.unpack(self.layout, self.pack())

  def begin(self) -> None:
    """Begins to make a code; what uses it waits for it."""
    self.code, self._state = self._step(self._state, self._message)

  def encode(self) -> None:
    """Makes a code, and waits for it."""
    self.begin()
    jax.block_until_ready((self.code, self._state))

  def pack(self) -> np.ndarray:
    """Returns the packed code, uint8[bytes], until the next call."""
    length = packing.pack(self.layout, self.code, self._buffer)
    return self._buffer[:length]

  def unpack(self, data: np.ndarray) -> None:
    """Unpacks a packed code."""
    self._unpacked = packing.unpack(self.layout, data)

  def decode(self) -> None:
    """Decodes what was unpacked, and waits for it."""
    jax.block_until_ready(self._decode(self._unpacked))

  def contestants(self) -> dict[str, Contestant]:
    """Returns the stages by name."""
    data = self.pack().copy()
    return {
      "encode": self.encode,
      "pack": self.pack,
      "unpack": lambda: self.unpack(data),
      "decode": self.decode,
    }


def copy(like: Any) -> Contestant:
  """Returns a copy of all elements, from memory to memory."""
  pairs = [(x.copy(), x) for x in jax.tree.leaves(like)]

  def once():
    for target, source in pairs:
      np.copyto(target, source)

  return once


def coder(density: float, count: int) -> tuple[dict[str, Contestant], float]:
  """Returns the coder of positions, both ways, and the bits of a position, for
  so many positions drawn with a density."""
  steps = np.random.default_rng(0).geometric(density, count)
  positions = np.cumsum(steps) - 1
  coded = gaps.measure(positions)
  data = np.concatenate(gaps.encode(coded))
  length = int(positions[-1]) + 1
  both = {
    "encode": lambda: gaps.encode(gaps.measure(positions)),
    "decode": lambda: gaps.decode(data, count, coded.k, coded.unary, length),
  }
  return both, 8 * data.size / count


class Rate(NamedTuple):
  """Of messages from a worker to a server."""

  per_second: float
  cpu: float  # seconds of both processes for a message


class _Server:
  """A server's end of the way, in a process of its own."""

  def __init__(self, like: Any, options: Options | None):
    """Starts from parameters of zeros."""
    take_core(1)
    self._layout, decode = None, lambda tree: tree
    if options is not None:
      decode = compression.named(**options).decode
      self._layout = MessageStages(options, like).layout

    def update(params, code):
      change = jax.tree.map(lambda x: -_RATE * x, decode(code))
      return optax.apply_updates(params, change)

    self._update = jax.jit(update, donate_argnums=0)
    self._params = jax.tree.map(jnp.zeros_like, like)

  def tell(self, sent: Any) -> None:
    """Takes a message, and makes an update of it."""
    if self._layout is not None:
      sent = packing.unpack(self._layout, sent)
    self._params = jax.block_until_ready(self._update(self._params, sent))

  def cpu(self) -> float:
    """Returns the CPU seconds of the process so far."""
    return time.process_time()


class _Worker:
  """A worker's end of the way, in a process of its own."""

  def rate(
    self, server: Any, like: Any, options: Options | None, seconds: float
  ) -> Rate:
    """Sends messages, each when the last was taken."""
    import ray

    take_core(0)
    dense = jax.tree.map(jnp.asarray, like)
    stages = None if options is None else MessageStages(options, like)

    def once():
      if stages is None:
        told = server.tell.remote(jax.tree.map(np.asarray, dense))
      else:
        told = server.tell.remote(stages.pack())
        stages.begin()
      ray.get(told)

    def cpu():
      return time.process_time() + ray.get(server.cpu.remote())

    for _ in range(_FIRST):
      once()
    count, used, start = 0, cpu(), time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
      once()
      count += 1
    return Rate(count / took, (cpu() - used) / count)


def rate(like: Any, options: Options | None, seconds: float) -> Rate:
  """Returns how fast a server takes messages from a worker.

  Each is in a call of Ray between two nodes on this machine, which share no
  memory: what is sent goes through sockets, as between machines, but as fast
  as this machine copies. The worker has the message on its device, and the
  server makes an update of it. Without a codec the elements are sent; with one
  the worker encodes and packs, and the server unpacks, and decodes in the
  update. The next code is made while a message is on its way, as by a worker of
  two tickets.

  Args:
    like: the message, a tree of float32 arrays of NumPy.
    options: the codec; None: dense.
    seconds: how long is measured. Ray has been started, and a node of it has
      the resource FAR.
  """
  import ray

  # Each has a core and a node, as on machines of their own.
  near, far = {_NEAR: 0.001}, {FAR: 1}
  server = ray.remote(num_cpus=0, resources=near)(_Server).remote(like, options)
  worker = ray.remote(num_cpus=0, resources=far)(_Worker).remote()
  try:
    return ray.get(worker.rate.remote(server, like, options, seconds))
  finally:
    ray.kill(worker)
    ray.kill(server)
