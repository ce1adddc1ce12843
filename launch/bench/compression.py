"""The cost of codecs and packed messages beside a memory copy.

The benchmark also measures how many messages per second a server receives from
a worker on another node of Ray.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from asgd import compression
from asgd.compression import packing
from asgd.compression.packing import gaps
from asgd.experiment import ray_runtime
from asgd.live import ray_internals

from . import turns
from .report import BenchReport, Measured
from .turns import Contestant

# Small: no parameter overflows in many updates.
_LEARNING_RATE = 0.01
_WARM_UP_MESSAGES = 10  # sent while programs compile
FAR = "far"  # resource of the worker's node
_NEAR = "node:__internal_head__"  # resource that Ray gives to the first node
# label -> options. Messages are standard normal numbers; 0.1 % are above 3.29
# in absolute value.
_CODECS: dict[str, Mapping[str, Any]] = {
  "threshold, 0.1 %": dict(name="threshold", tau=3.29),
  "top_k, 0.1 %": dict(name="top_k", density=0.001),
  "top_k, 1 %": dict(name="top_k", density=0.01),
  "dgc, 0.1 %": dict(name="dgc", density=0.001, warm_up=0),
  "random_k, 0.1 %": dict(name="random_k", density=0.001),
  "onebit": dict(name="onebit"),
  "sign": dict(name="sign"),
  "terngrad": dict(name="terngrad"),
  "qsgd": dict(name="qsgd"),
  "e3m0": dict(name="e3m0"),
  "int8": dict(name="int8"),
  "bf16": dict(name="bf16"),
  "powersgd": dict(name="powersgd"),
  "identity": dict(name="identity"),
}
# Codecs of messages to the server.
_SENT_CODECS = "threshold, 0.1 %", "top_k, 0.1 %", "onebit", "int8"
_MESSAGE_MB = 10
_DENSITIES = 0.0001, 0.001, 0.01, 0.1  # fraction of elements that are sent
_POSITIONS = 200_000  # number of positions that are coded at once
_RATE_TURNS = 3  # turns of each codec in which it sends messages
Options = Mapping[str, Any]  # of `compression.named`, with the name


def take_core(number: int) -> set[int]:
  """Keeps this thread, and those it starts, on one of its cores.

  Call it before JAX starts its threads. Returns the cores that the thread could
  use before; the empty set on a system that cannot bind threads.
  """
  if not hasattr(os, "sched_setaffinity"):
    return set()
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
  return cores


def message(megabytes: float, leaves: int = 4) -> dict[str, npt.NDArray[Any]]:
  """Returns a message of matrices of normal numbers, `megabytes` in total."""
  # An element has 4 bytes.
  rows = max(round(megabytes * 1e6 / 4 / leaves / 256), 1)
  rng = np.random.default_rng(0)
  return {
    f"layer{i}": rng.standard_normal((rows, 256), np.float32)
    for i in range(leaves)
  }


class MessageStages:
  """The stages of a message between worker and server, each repeatable."""

  def __init__(self, options: Options, like: Any):
    """Compiles, and encodes a message `like`: a tree of float32 arrays."""
    self._codec = codec = compression.named(**options)
    like, key = jax.tree.map(jnp.asarray, like), jax.random.key(0)
    step = jax.jit(
      lambda state, tree: codec.encode(state, tree, key), donate_argnums=0
    )
    # Copied: the step donates its arrays, so none may share memory.
    # `init` may return one array for several leaves.
    state = jax.tree.map(jnp.array, codec.init(like))
    self.code, self._state = jax.block_until_ready(step(state, like))
    self._decode = jax.jit(codec.decode)
    # A codec with a residual gets its own decoded message again. Then the
    # residual stays the same, and all codes are like the first.
    has_residual = compression.residual_norm(self._state) > 0
    self._message = self._decode(self.code) if has_residual else like
    self._step = step
    self.layout = packing.layout(self.code)
    # The largest length of a code; `pack` reuses the buffer.
    self._buffer = np.zeros(self.layout.most, np.uint8)
    self._unpacked = packing.unpack(self.layout, self.pack())

  def begin(self) -> None:
    """Starts the encoding; the first use of the code waits for its end."""
    self.code, self._state = self._step(self._state, self._message)

  def encode(self) -> None:
    """Encodes the message, and waits for the code."""
    self.begin()
    jax.block_until_ready((self.code, self._state))

  def pack(self) -> npt.NDArray[np.uint8]:
    """Returns the packed code, uint8[bytes]; the next call overwrites it."""
    length = packing.pack(self.layout, self.code, self._buffer)
    return self._buffer[:length]

  def unpack(self, data: npt.NDArray[np.uint8]) -> None:
    """Unpacks a packed code."""
    self._unpacked = packing.unpack(self.layout, data)

  def decode(self) -> None:
    """Decodes the unpacked code, and waits for the message."""
    jax.block_until_ready(self._decode(self._unpacked))

  def contestants(self) -> dict[str, Contestant]:
    """Returns the stages by name."""
    # `pack` would overwrite the data that `unpack` reads.
    data = self.pack().copy()
    return {
      "encode": self.encode,
      "pack": self.pack,
      "unpack": lambda: self.unpack(data),
      "decode": self.decode,
    }


def copy(like: Any) -> Contestant:
  """Returns a contestant that copies all elements in memory."""
  pairs = [(x.copy(), x) for x in jax.tree.leaves(like)]

  def copy_all() -> None:
    for target, source in pairs:
      np.copyto(target, source)

  return copy_all


def coder(density: float, count: int) -> tuple[dict[str, Contestant], float]:
  """Returns (contestants that encode and decode positions, bits per position).
  The `count` positions are drawn at random with the density."""
  # Gaps between positions that are drawn independently are geometric.
  steps = np.random.default_rng(0).geometric(density, count)
  positions = np.cumsum(steps) - 1
  gap_code = gaps.measure(positions)
  data = np.concatenate(gaps.encode(gap_code))
  length = int(positions[-1]) + 1
  directions: dict[str, Contestant] = {
    "encode": lambda: gaps.encode(gaps.measure(positions)),
    "decode": lambda: gaps.decode(
      data, count, gap_code.k, gap_code.unary_nbytes, length
    ),
  }
  return directions, 8 * data.size / count


class Rate(NamedTuple):
  """The rate of messages from a worker to a server."""

  per_second: float
  cpu: float  # CPU seconds of both processes per message


def _identity(tree: Any) -> Any:
  """Decodes a message that was sent without a codec."""
  return tree


class _Server:
  """The server of `rate`, in a separate process."""

  def __init__(self, like: Any, options: Options | None):
    """Starts from parameters of zeros."""
    take_core(1)  # before JAX starts its threads; the worker has core 0
    self._layout: packing.CodeLayout | None = None
    decode: Callable[[Any], Any] = _identity
    if options is not None:
      decode = compression.named(**options).decode
      self._layout = MessageStages(options, like).layout

    def update(params: Any, code: Any) -> Any:
      """Returns the parameters after a step of SGD."""
      change = jax.tree.map(lambda x: -_LEARNING_RATE * x, decode(code))
      return optax.apply_updates(params, change)

    # The parameters are donated: the server updates them in place.
    self._update = jax.jit(update, donate_argnums=0)
    self._params = jax.tree.map(jnp.zeros_like, like)

  def receive(self, sent: Any) -> None:
    """Receives a message, and makes an update from it."""
    if self._layout is not None:
      sent = packing.unpack(self._layout, sent)
    self._params = jax.block_until_ready(self._update(self._params, sent))

  def cpu_seconds(self) -> float:
    """Returns the CPU seconds of the process so far."""
    return time.process_time()


class _Worker:
  """The worker of `rate`, in a separate process."""

  def rate(
    self, server: Any, like: Any, options: Options | None, seconds: float
  ) -> Rate:
    """Sends messages, each after the reply to the last one."""
    import ray

    take_core(0)
    dense = jax.tree.map(jnp.asarray, like)
    stages = None if options is None else MessageStages(options, like)

    def send_one() -> None:
      """Sends a message, and waits for the reply."""
      if stages is None:
        reply = server.receive.remote(jax.tree.map(np.asarray, dense))
      else:
        # The worker encodes the next message while the server handles this one.
        reply = server.receive.remote(stages.pack())
        stages.begin()
      ray.get(reply)

    def cpu_seconds() -> float:
      """Returns the CPU seconds of both processes so far."""
      return time.process_time() + ray.get(server.cpu_seconds.remote())

    for _ in range(_WARM_UP_MESSAGES):
      send_one()
    count, elapsed = 0, 0.0
    cpu_before, start = cpu_seconds(), time.perf_counter()
    while elapsed < seconds:  # at least one message
      send_one()
      count, elapsed = count + 1, time.perf_counter() - start
    per_message = (cpu_seconds() - cpu_before) / count
    return Rate(count / elapsed, per_message)


def rate(like: Any, options: Options | None, seconds: float) -> Rate:
  """Returns how fast a server receives messages from a worker.

  Each message is a call of Ray between two nodes on this machine that share no
  memory. It travels through sockets, as between machines, but at the speed of
  this machine's memory. The worker has the message on its device, and the
  server makes an update from it. Without a codec the elements are sent. With a
  codec the worker encodes and packs; the server unpacks, and decodes in the
  update. The worker encodes the next message while one is in flight, as a
  worker with two tickets does. Ray must run, with a node that has the resource
  FAR.

  Args:
    like: the message, a tree of float32 arrays of NumPy.
    options: the codec; None: the message is sent without a codec.
    seconds: how long to send.
  """
  import ray

  # Each process has a core and a node, as on two machines. Ray gives a node a
  # resource with the name of the node; a small share of it is enough.
  near, far = {_NEAR: 0.001}, {FAR: 1.0}
  server_class: Any = ray.remote(num_cpus=0, resources=near)(_Server)
  worker_class: Any = ray.remote(num_cpus=0, resources=far)(_Worker)
  server = server_class.remote(like, options)
  worker = worker_class.remote()
  try:
    return ray.get(worker.rate.remote(server, like, options, seconds))
  finally:
    ray.kill(worker)
    ray.kill(server)


def _stages(
  report: BenchReport, like: dict[str, npt.NDArray[Any]], rounds: int
) -> None:
  """Prints the speeds of each codec's stages, relative to that of a copy."""
  copy_call = copy(like)
  size = sum(x.nbytes for x in like.values())
  table = report.table(
    f"speed on a message of {_MESSAGE_MB} MB of float32 in 4 leaves, one core",
    "codec",
    {"bytes": ".0f", "times less": ".1f", "encode": ".2f", "pack": ".2f"}
    | {"unpack": ".2f", "decode": ".2f", "MB/s packed": ".0f"}
    | {"MB/s decoded": ".0f"},
    {"encode and pack / copy": ".2f", "unpack and decode / copy": ".2f"},
    width=16,
  )
  for label, options in _CODECS.items():
    stages = MessageStages(options, like)
    contestants = {"copy": copy_call, **stages.contestants()}
    # CPU time, because other programs change the elapsed time.
    times = turns.take_turns(contestants, rounds, 3, time.process_time)
    copy_seconds, *stage_seconds = times.values()
    stage_speeds = [
      float(np.median(copy_seconds / seconds)) for seconds in stage_seconds
    ]
    length = stages.pack().size
    encode, pack, unpack, decode = stage_seconds
    direction_seconds = encode + pack, unpack + decode  # up, down
    speeds = [size / 1e6 / float(np.median(s)) for s in direction_seconds]
    ratios = [Measured(copy_seconds / s) for s in direction_seconds]
    table.row(label, length, size / length, *stage_speeds, *speeds, *ratios)
  speed = size / 1e6 / np.median(copy_seconds)
  print(f"\nspeed of a copy: {speed:.0f} MB/s")


def _coder(report: BenchReport, rounds: int) -> None:
  """Prints positions per second, and the bits per position."""
  table = report.table(
    "the coder of positions, by density",
    "density",
    {"bits": ".2f", "entropy": ".2f", "M/s encoded": ".0f"}
    | {"M/s decoded": ".0f"},
    {"bits / entropy": ".3f"},
    width=8,
  )
  for density in _DENSITIES:
    directions, bits = coder(density, _POSITIONS)
    # Bits of a gap: the entropy of a geometric distribution, which no code can
    # go below.
    entropy = -np.log2(density) - (1 - density) / density * np.log2(1 - density)
    times = turns.take_turns(directions, rounds, 3, time.process_time).values()
    speeds = [_POSITIONS / 1e6 / float(np.median(seconds)) for seconds in times]
    table.row(f"{density:g}", bits, entropy, *speeds, Measured(bits / entropy))


def _messages(report: BenchReport, like: Any, seconds: float) -> None:
  """Prints messages per second, with codecs and without."""
  options_of: dict[str, Options | None] = {"dense": None}
  options_of |= {label: _CODECS[label] for label in _SENT_CODECS}
  rates: dict[str, list[tuple[float, float]]] = {
    label: [] for label in options_of
  }
  # In turns: a slow phase of the machine then slows all codecs alike.
  for _ in range(_RATE_TURNS):
    for label, options in options_of.items():
      turn_rate = rate(like, options, seconds / _RATE_TURNS)
      milliseconds = 1e3 * turn_rate.cpu
      rates[label].append((turn_rate.per_second, milliseconds))
  table = report.table(
    "from a worker to a server, each on a node of Ray, on one machine",
    "sent",
    {"messages/s": ".1f", "CPU ms": ".1f"},
    {"speed / dense": ".2f", "CPU time / dense": ".2f"},
    width=16,
  )
  dense = np.transpose(rates["dense"])  # float[2, turns]
  for label, measured_rates in rates.items():
    measurements = np.transpose(measured_rates)
    speed, cpu = (float(x) for x in np.median(measurements, axis=1))
    table.row(label, speed, cpu, *map(Measured, measurements / dense))


def run(report: BenchReport, seconds: float = 3.0, rounds: int = 5) -> None:
  """Prints speeds of codecs, of packing and of the coder of positions, by CPU
  time on one core. Then it prints messages per second to a server and their CPU
  time, measured for `seconds` with each codec."""
  like = message(_MESSAGE_MB)
  # One core: threads of XLA would share a codec's work unevenly.
  cores = take_core(0)
  _stages(report, like, rounds)
  _coder(report, rounds)
  # Ray's processes need all cores again.
  if cores:
    os.sched_setaffinity(0, cores)
  memory = 2**29  # bytes of the object store of each node
  ray_runtime.start(None, memory=memory)
  try:
    with ray_internals.second_node(FAR, memory):
      _messages(report, like, seconds)
  finally:
    ray_runtime.stop()
