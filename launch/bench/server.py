"""How fast a live parameter server is, beside Ray's own and memory copies.

Workers whose gradient costs one pass over the parameters train as fast as the
server can reply, in separate processes, with all records on. The peer is
the asynchronous parameter-server loop that Ray's documentation shows.
"""

import contextlib
import functools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import algorithms, base, orders, simulator
from asgd.experiment import ray_runtime
from asgd.live import frames, processes
from asgd.live.duty import Duty
from asgd.live.hosts.actors import ActorHosts
from asgd.live.hosts.site import Site
from asgd.live.journal import FileJournal
from asgd.live.records import FileSink
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.orders.trace import Event

from . import compression, turns
from .report import BenchReport, Measured

WORKERS = 2
_LEARNING_RATE, _CURVATURE = 0.01, 0.01  # gradients are curvature x parameters
_SIZES = 0.1, 1.0, 10.0, 100.0  # MB
_TURNS = 2  # of each contestant
_TARGETS = {  # MB -> times the Ray loop, time of the floor
  0.1: (">= 6", "<= 10"),
  1.0: (">= 6", "<= 6"),
  10.0: (">= 4", "<= 1.5"),
  100.0: (">= 2", "<= 1.5"),
}


def _make_server() -> base.Server:
  return algorithms.build("asgd", _LEARNING_RATE, WORKERS).server()


def _make_duty(params: Any) -> Duty:
  """Work that costs as little as it can: one pass over the parameters."""

  def work(state, ticket, batch, key):
    del batch, key
    message = jax.tree.map(lambda x: _CURVATURE * x, ticket.params)
    return state, message, base.Metrics(jnp.float32(0.0))

  worker, batch = base.Worker(lambda params: (), work), np.zeros(1, np.float32)
  step, root = simulator.compile_work(worker), jax.random.key(0)
  return Duty(step, worker.init, lambda *_: batch, root, params, None)


class Speed(NamedTuple):
  """A run of the Ray runtime, and what an update costs its processes."""

  updates: float  # per second
  shard: float  # us of CPU time an update
  workers: float  # us of CPU time an update, of all workers
  wakes: float  # times an update that a thread had waited


def _usage(pids: Mapping[str, Mapping[int, int]]) -> np.ndarray:
  """Returns float64[3]: CPU seconds of shards and of workers so far, and how
  often a thread of theirs has waited."""
  seconds, wakes = {"shard": 0.0, "worker": 0.0}, 0
  for kind, parties in pids.items():
    for pid in parties.values():
      process = Path(f"/proc/{pid}")
      fields = (process / "stat").read_text().rpartition(")")[2].split()
      ticks = int(fields[11]) + int(fields[12])  # in user and kernel mode
      seconds[kind] += ticks / os.sysconf("SC_CLK_TCK")
      for task in (process / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
          status = (task / "status").read_text()
          wakes += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
  return np.array([*seconds.values(), wakes])


def ours(params: Any, seconds: float, log: int) -> Speed:
  """Returns the speed of the Ray runtime."""
  setup = Setup(orders.protocol.Rules(), WORKERS, 10**7, log=log)
  run = Path(tempfile.mkdtemp(prefix="asgd-bench-"))
  site = Site(setup, str(run), f"/dev/shm/{run.name}", time.monotonic())
  make_duty = functools.partial(_make_duty, params)
  hosts = ActorHosts(site)
  makers = ServerMakers(hosts.site, _make_server, [params])
  cluster = ServerCluster(setup, None, hosts, makers, make_duty)
  try:
    cluster.start()
    first = None
    while True:
      cluster.check()
      status = cluster.status()
      # A worker that still compiles would be measured with the others.
      present = len(status[0]["workers"]) if status else 0
      if present == WORKERS and status[0]["received"] > 20:
        now = time.perf_counter(), status[0]["received"]
        used = _usage(processes.pids(Path(site.memory)))
        first = first or (*now, used)
        if now[0] - first[0] >= seconds:
          updates = now[1] - first[1]
          costs = (used - first[2]) / updates * [1e6, 1e6, 1]
          return Speed(updates / (now[0] - first[0]), *costs)
      time.sleep(0.05 if first is None else seconds / 4)
  finally:
    cluster.close()
    shutil.rmtree(site.memory, ignore_errors=True)
    shutil.rmtree(run)


class CanonicalServer:
  """The server of Ray's own parameter-server example, in NumPy."""

  def __init__(self, weights):
    self._weights = {name: w.copy() for name, w in weights.items()}

  def apply_gradients(self, gradients: Any) -> Any:
    """Makes an update of them, and returns the weights."""
    for name, gradient in gradients.items():
      self._weights[name] -= _LEARNING_RATE * gradient
    return self._weights

  def get_weights(self) -> Any:
    """Returns the weights."""
    return self._weights


class _CanonicalWorker:
  def compute_gradients(self, weights):
    return {name: np.float32(_CURVATURE) * w for name, w in weights.items()}


def canonical(params: Any, seconds: float) -> float:
  """Updates per second of the loop that Ray's documentation shows."""
  import ray

  server = ray.remote(CanonicalServer).options(num_cpus=0).remote(params)
  actor = ray.remote(_CanonicalWorker).options(num_cpus=0)
  weights = server.get_weights.remote()
  workers = [actor.remote() for _ in range(WORKERS)]
  running = {w.compute_gradients.remote(weights): w for w in workers}
  updates, start = -20, None
  while True:
    (ready,), _ = ray.wait(list(running), num_returns=1)
    worker = running.pop(ready)
    weights = server.apply_gradients.remote(ready)
    running[worker.compute_gradients.remote(weights)] = worker
    updates += 1
    if updates == 0:
      ray.get(server.get_weights.remote())
      start = time.perf_counter()
    if start and time.perf_counter() - start >= seconds:
      ray.get(weights)
      rate = updates / (time.perf_counter() - start)
      for actor in (server, *workers):
        ray.kill(actor)
      return rate


def unavoidable(params: Any) -> turns.Contestant:
  """Returns the work of an update that no server can do without, in one thread:
  a message is copied to where the server finds it, the parameters are changed,
  and copied to where the workers find them."""
  source, slot, weights, published, scratch = (
    {name: x.copy() for name, x in params.items()} for _ in range(5)
  )

  def once():
    for name in params:
      np.copyto(slot[name], source[name])
      np.multiply(slot[name], np.float32(_LEARNING_RATE), out=scratch[name])
      np.subtract(weights[name], scratch[name], out=weights[name])
      np.copyto(published[name], weights[name])

  return once


def receive(params: Any) -> turns.Contestant:
  """Returns the compiled receive and send of a shard, in this process."""
  server = _make_server()
  steps = simulator.compile_steps(server, None, keeps_messages=True)
  state, worker = simulator.start(server, params), jnp.int32(0)
  ticket = steps.send(state, worker)

  def once():
    nonlocal state, ticket
    state, seen = steps.receive(state, ticket, params, np.float32(0))
    ticket = steps.send(state, worker)
    return jax.block_until_ready(seen)

  return once


def send_frames() -> turns.Contestant:
  """Returns the frames of an update, PUSH, ACK and TICKET, which are packed,
  sent through a socket and unpacked by one thread, so that none is woken."""
  ends = socket.socketpair()
  kinds = frames.PUSH, frames.ACK, frames.TICKET

  def once():
    for kind in kinds:
      ends[0].sendall(frames.pack(frames.Frame(kind)))
      frames.unpack(ends[1].recv(frames.SIZE))

  return once


def record(params: Any, folder: Path) -> turns.Contestant:
  """Returns the rows that are written of an update: two of the journal, and a
  record; of these a shard writes many at once, here 100."""
  journal = FileJournal(folder / "trace-0.csv")
  sink = FileSink(folder / "records-0.bin")
  seen, count = receive(params)(), 0
  message = simulator.ReceivedMessage(1.5, 0, 1)

  def once():
    nonlocal count
    for action in (base.RECEIVE, base.SEND):
      journal.append(Event(1.234567, 0, count, count, action, count, 1, 2))
    count += 1
    if count % 100 == 0:
      sink.append(simulator.records([message] * 100, [seen] * 100))

  return once


def rate(once: turns.Contestant, seconds: float) -> float:
  """How often in a second something can be done."""
  count, start = 0, time.perf_counter()
  while (took := time.perf_counter() - start) < seconds:
    once()
    count += 1
  return count / took


def run(
  report: BenchReport, sizes: Sequence[float] = _SIZES, seconds: float = 3.0
) -> None:
  """Prints updates/s and MB/s by MB of parameters, and the ratios, with so many
  seconds for each contestant and size."""
  print(
    f"{WORKERS} workers, {os.cpu_count()} cores; floor: message"
    " in, update and parameters out in one thread of NumPy\n",
    flush=True,
  )
  ray_runtime.start(None, memory=4 * 2**30)  # the Ray loop needs it
  try:
    table = report.table(
      f"a server of {WORKERS} workers on Ray, by MB of parameters",
      "MB",
      {"copies/s": ".0f", "floor/s": ".0f", "Ray loop/s": ".1f"}
      | {"ours/s": ".1f", "MB/s": ".0f", "no log/s": ".1f"},
      {"of Ray loop": ".2f", "time of floor": ".2f", "of 2 copies": ".2f"}
      | {"of no log": ".2f"},
      width=6,
    )
    speeds = {}
    for size in sizes:
      params = compression.message(size)
      cells, speeds[size] = _cells(params, seconds / _TURNS)
      table.row(f"{size:g}", *cells)
    _print_parts(report, speeds, seconds)
  finally:
    ray_runtime.stop()


def _print_parts(
  report: BenchReport, speeds: Mapping[float, Sequence[Speed]], seconds: float
) -> None:
  """Prints where the time of an update goes, by MB of parameters."""
  table = report.table(
    "parts of an update by MB of parameters: CPU of the shard and the workers;"
    " receive, frames and rows alone, in one thread",
    "MB",
    {"shard us": ".0f", "workers us": ".0f", "wakes": ".1f"}
    | {"receive us": ".0f", "frames us": ".0f", "rows us": ".0f"},
    {"rows, of an update": ".3f"},
    width=6,
  )
  for size, each in speeds.items():
    params = compression.message(size)
    with tempfile.TemporaryDirectory() as folder:
      alone = receive(params), send_frames(), record(params, Path(folder))
      for once in alone:
        once()  # which compiles
      costs = [1e6 / rate(once, seconds / 8) for once in alone]
    _, *used = np.median(each, axis=0)
    share = np.array([costs[-1] * speed.updates / 1e6 for speed in each])
    table.row(f"{size:g}", *used, *costs, Measured(share, "<= 0.05"))


def _cells(
  params: dict[str, np.ndarray], seconds: float
) -> tuple[list[float | Measured], list[Speed]]:
  """Has the contestants take turns; returns the numbers of a row, and the
  speeds of the runs with a log."""
  megabytes = sum(x.nbytes for x in params.values()) / 1e6
  log = 128 if megabytes < 5 else 16 if megabytes < 50 else 4
  target, floor_once = (
    {k: x.copy() for k, x in params.items()},
    unavoidable(params),
  )

  def copy_all():
    for name, x in params.items():
      np.copyto(target[name], x)

  contestants = (
    lambda: rate(copy_all, seconds / 4),
    lambda: rate(floor_once, seconds / 4),
    lambda: canonical(params, seconds),
  )
  logs, rates, logged = (log, 0), [], []
  for _ in range(_TURNS):
    others = [measure() for measure in contestants]
    own = [ours(params, seconds, each) for each in logs]
    logged.append(own[0])
    rates.append([*others, *(speed.updates for speed in own)])
  copy, floor, theirs, mine, fast = np.transpose(rates)
  speeds = [np.median(x) for x in (copy, floor, theirs, mine)]
  ratios = mine / theirs, floor / mine, copy / 2 / mine, mine / fast
  wanted = _TARGETS.get(round(megabytes, 1), ("", ""))
  targets = *wanted, "", ">= 0.95"
  cells = [
    *(*speeds, 2 * megabytes * speeds[-1], np.median(fast)),
    *map(Measured, ratios, targets),
  ]
  return cells, logged
