"""Speed of a live parameter server beside Ray's example and memory copies.

Workers run in separate processes, and a gradient costs them one pass over the
parameters. So they train as fast as the server can reply. All records are on.
Ray's example is the asynchronous parameter-server loop in its documentation.
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
import numpy.typing as npt

from asgd import algorithms, base, orders, simulator
from asgd.experiment import provenance, ray_runtime
from asgd.live import frames, processes
from asgd.live.hosts.actors import ActorHosts
from asgd.live.hosts.site import Site
from asgd.live.journal import FileJournal
from asgd.live.records import FileSink
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.worker_spec import WorkerSpec
from asgd.orders.trace import Event

from . import compression, turns
from .report import BenchReport, Measured

WORKERS = 2
_LEARNING_RATE, _CURVATURE = 0.01, 0.01  # gradients are curvature x parameters
_SIZES = 0.1, 1.0, 10.0, 100.0  # MB
_RUNS = 2  # of each contestant
_TARGETS = {  # MB -> times the Ray loop, time of the minimum
  # A small server is bound by messages, a large one by memory.
  0.1: (">= 6", "<= 10"),
  1.0: (">= 6", "<= 6"),
  10.0: (">= 4", "<= 1.5"),
  100.0: (">= 2", "<= 1.5"),
}


def _make_server() -> base.Server:
  """Returns the server of plain SGD; each process makes its own."""
  return algorithms.build("asgd", _LEARNING_RATE, WORKERS).server()


def _make_spec(params: Any) -> WorkerSpec:
  """Returns the spec of a worker with as little work as possible: one pass over
  the parameters."""

  def work(
    state: Any, ticket: base.Ticket, batch: Any, key: Any
  ) -> tuple[Any, Any, base.Metrics]:
    """Returns (state, message, metrics) of a job."""
    del batch, key
    message = jax.tree.map(lambda x: _CURVATURE * x, ticket.params)
    return state, message, base.Metrics(jnp.float32(0.0))

  worker, batch = base.Worker(lambda params: (), work), np.zeros(1, np.float32)
  step, root = simulator.compile_work(worker), jax.random.key(0)
  return WorkerSpec(step, worker.init, lambda *_: batch, root, params, None)


class Speed(NamedTuple):
  """The speed of a run on Ray, and the cost of an update for its processes."""

  updates: float  # per second
  shard: float  # us of CPU time per update
  workers: float  # us of CPU time per update, of all workers
  wakes: float  # how often a thread was woken, per update


def _resource_usage(
  pids: Mapping[str, Mapping[int, int]],
) -> npt.NDArray[np.float64]:
  """Returns float64[3]: CPU seconds of shards and of workers so far, and how
  often their threads have waited. `pids` is kind -> index -> process id."""
  seconds, wakes = {"shard": 0.0, "worker": 0.0}, 0
  for kind, pid_by_index in pids.items():
    for pid in pid_by_index.values():
      process = Path(f"/proc/{pid}")
      # Fields after the program's name, which may have spaces and brackets.
      fields = (process / "stat").read_text().rpartition(")")[2].split()
      ticks = int(fields[11]) + int(fields[12])  # in user and kernel mode
      seconds[kind] += ticks / os.sysconf("SC_CLK_TCK")
      for task in (process / "task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
          status = (task / "status").read_text()
          wakes += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
  return np.array([*seconds.values(), wakes])


def ours(params: Any, seconds: float, log: int) -> Speed:
  """Returns the speed of our server on Ray; `log` is that of `Setup`."""
  # 10**7 jobs: more than can be done.
  setup = Setup(orders.protocol.Rules(), WORKERS, 10**7, log=log)
  run_folder = Path(tempfile.mkdtemp(prefix="asgd-bench-"))
  memory = f"/dev/shm/{run_folder.name}"
  site = Site(setup, str(run_folder), memory, time.monotonic())
  # The functions that processes call; closures would not be pickled.
  make_spec = functools.partial(_make_spec, params)
  hosts = ActorHosts(site)
  makers = ServerMakers(hosts.site, _make_server, [params])
  cluster = ServerCluster(setup, None, hosts, makers, make_spec)
  try:
    cluster.start()
    first_look = None
    while True:
      cluster.check()  # raises if a process has failed
      status = cluster.status()
      lead_status: Mapping[str, Any] = {"workers": (), "received": 0}
      if status:
        lead_status = status[0]
      # All have compiled, and have sent a few messages: a worker that still
      # compiles would be measured with the others.
      n_workers = len(lead_status["workers"])
      if n_workers == WORKERS and lead_status["received"] > 20:
        time_and_count = time.perf_counter(), lead_status["received"]
        usage = _resource_usage(processes.live_pids(Path(site.memory)))
        # The first look starts the clock; the next ones count from it.
        first_look = first_look or (*time_and_count, usage)
        if time_and_count[0] - first_look[0] >= seconds:
          updates = time_and_count[1] - first_look[1]
          # From seconds to microseconds, for each update.
          costs = (usage - first_look[2]) / updates * [1e6, 1e6, 1]
          return Speed(updates / (time_and_count[0] - first_look[0]), *costs)
      # Looking itself takes time of the cores, so look rarely.
      time.sleep(0.05 if first_look is None else seconds / 4)
  finally:
    cluster.close()
    shutil.rmtree(site.memory, ignore_errors=True)
    # In any case: shared memory would stay until the machine restarts.
    shutil.rmtree(run_folder)


class CanonicalServer:
  """The server of Ray's own parameter-server example, in NumPy."""

  def __init__(self, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Starts from a copy of the weights."""
    self._weights = {name: w.copy() for name, w in weights.items()}

  def apply_gradients(self, gradients: Any) -> Any:
    """Makes an update of the gradients, and returns the weights."""
    for name, gradient in gradients.items():
      self._weights[name] -= _LEARNING_RATE * gradient
    return self._weights

  def get_weights(self) -> Any:
    """Returns the weights."""
    return self._weights


class _CanonicalWorker:
  """The worker of Ray's parameter-server example, in NumPy."""

  def compute_gradients(
    self, weights: Mapping[str, npt.NDArray[Any]]
  ) -> dict[str, npt.NDArray[Any]]:
    """Returns the gradients, in one pass over the weights."""
    return {name: np.float32(_CURVATURE) * w for name, w in weights.items()}


def canonical(params: Any, seconds: float) -> float:
  """Returns updates per second of the loop that Ray's documentation shows."""
  import ray

  server_class: Any = ray.remote(CanonicalServer).options(num_cpus=0)
  actor: Any = ray.remote(_CanonicalWorker).options(num_cpus=0)
  server = server_class.remote(params)
  weights = server.get_weights.remote()
  workers = [actor.remote() for _ in range(WORKERS)]
  running = {w.compute_gradients.remote(weights): w for w in workers}
  updates, start = -20, None  # negative: a warm-up of 20
  while True:
    # The first worker that is ready; the server's actor queues the calls.
    (ready,), _ = ray.wait(list(running), num_returns=1)
    worker = running.pop(ready)
    weights = server.apply_gradients.remote(ready)
    running[worker.compute_gradients.remote(weights)] = worker
    updates += 1
    if updates == 0:
      ray.get(server.get_weights.remote())  # waits for the warm-up
      start = time.perf_counter()
    if start and time.perf_counter() - start >= seconds:
      ray.get(weights)  # the updates that are still queued
      rate = updates / (time.perf_counter() - start)
      for handle in (server, *workers):
        ray.kill(handle)
      return rate


def unavoidable(params: Any) -> turns.Contestant:
  """Returns a contestant that does the least work of an update, in one thread:
  it copies a message for the server, changes the parameters, and copies them
  for the workers."""
  source, slot, weights, published, scratch = (
    {name: x.copy() for name, x in params.items()} for _ in range(5)
  )

  def make_update() -> None:
    """One update of all parameters."""
    for name in params:
      # [1] The message arrives. [2] The update. [3] The parameters leave.
      np.copyto(slot[name], source[name])
      np.multiply(slot[name], np.float32(_LEARNING_RATE), out=scratch[name])
      np.subtract(weights[name], scratch[name], out=weights[name])
      np.copyto(published[name], weights[name])

  return make_update


def receive(params: Any) -> turns.Contestant:
  """Returns a contestant that calls a shard's compiled receive and send."""
  server = _make_server()
  steps = simulator.compile_steps(server, None, keeps_messages=True)
  state, worker = simulator.start(server, params), jnp.int32(0)
  ticket = steps.send(state, worker)

  def receive_message() -> Any:
    nonlocal state, ticket
    state, received = steps.receive(state, ticket, params, np.float32(0))
    ticket = steps.send(state, worker)
    return jax.block_until_ready(received)

  return receive_message


def send_frames() -> turns.Contestant:
  """Returns a contestant that sends an update's frames, PUSH, ACK and TICKET.
  One thread packs them, sends them through a socket and unpacks them, so no
  thread is woken."""
  ends = socket.socketpair()
  kinds = frames.PUSH, frames.ACK, frames.TICKET

  def send_three_frames() -> None:
    for kind in kinds:
      ends[0].sendall(frames.pack(frames.Frame(kind)))
      frames.unpack(ends[1].recv(frames.SIZE))

  return send_three_frames


def record(params: Any, folder: Path) -> turns.Contestant:
  """Returns a contestant that writes an update's rows: two rows of the journal,
  and a record. A shard writes many records at once, here 100."""
  journal = FileJournal(folder / "trace-0.csv")
  sink = FileSink(folder / "records-0.bin")
  received: Any = receive(params)()
  count = 0
  message = simulator.ReceivedMessage(1.5, 0, 1)

  def write_rows() -> None:
    """Writes the rows of one update."""
    nonlocal count
    for action in (base.RECEIVE, base.SEND):
      journal.append(Event(1.234567, 0, count, count, action, count, 1, 2))
    count += 1
    if count % 100 == 0:
      sink.append(simulator.records([message] * 100, [received] * 100))

  return write_rows


def rate(contestant: turns.Contestant, seconds: float) -> float:
  """Returns how often per second a contestant does its work."""
  count, start = 0, time.perf_counter()
  while (elapsed := time.perf_counter() - start) < seconds:
    contestant()
    count += 1
  return count / elapsed


def run(
  report: BenchReport, sizes: Sequence[float] = _SIZES, seconds: float = 3.0
) -> None:
  """Prints updates/s, MB/s and ratios for each size of the parameters, in MB.
  Each contestant runs for `seconds` at each size."""
  # The table has only the name of the minimum.
  print(
    f"{WORKERS} workers, {provenance.cores()} cores; minimum: message"
    " in, update and parameters out in one thread of NumPy\n",
    flush=True,
  )
  ray_runtime.start(None, memory=4 * 2**30)  # the Ray loop needs it
  try:
    table = report.table(
      f"a server of {WORKERS} workers on Ray, by size of the parameters",
      "parameters",
      {"copies/s": ".0f", "minimum/s": ".0f", "Ray loop/s": ".1f"}
      | {"server/s": ".1f", "MB/s": ".0f", "no log/s": ".1f"},
      {"speed / Ray loop": ".2f", "time / minimum": ".2f"}
      | {"time / 2 copies": ".2f", "speed / no log": ".2f"},
      width=10,
    )
    speeds = {}
    for size in sizes:
      params = compression.message(size)
      cells, speeds[size] = _measure_row(params, seconds / _RUNS)
      table.row(f"{size:g} MB", *cells)
    _print_parts(report, speeds, seconds)
  finally:
    ray_runtime.stop()


# The parts are measured alone, so their sum may differ from the whole.
def _print_parts(
  report: BenchReport, speeds: Mapping[float, Sequence[Speed]], seconds: float
) -> None:
  """Prints where the time of an update goes, by MB of parameters."""
  table = report.table(
    "time of an update: CPU of the shard and the workers; the compiled receive,"
    " the frames, and the rows of journal and records, each alone",
    "parameters",
    {"shard us": ".0f", "workers us": ".0f", "wakes": ".1f"}
    | {"receive us": ".0f", "frames us": ".0f", "rows us": ".0f"},
    {"rows / whole update": ".3f"},
    width=10,
  )
  for size, runs in speeds.items():
    params = compression.message(size)
    with tempfile.TemporaryDirectory() as folder:
      parts: list[turns.Contestant] = [
        receive(params),
        send_frames(),
        record(params, Path(folder)),
      ]
      for contestant in parts:
        contestant()  # which compiles
      costs = [1e6 / rate(contestant, seconds / 8) for contestant in parts]
    _, *medians = np.median(runs, axis=0)  # without the updates per second
    # The cost of the rows by the time of an update.
    share = np.array([costs[-1] * speed.updates / 1e6 for speed in runs])
    table.row(f"{size:g} MB", *medians, *costs, Measured(share, "<= 0.05"))


def _measure_row(
  params: dict[str, np.ndarray], seconds: float
) -> tuple[list[float | Measured], list[Speed]]:
  """Runs the contestants in turns; returns the cells of a row, and the speeds
  of our runs with a log."""
  megabytes = sum(x.nbytes for x in params.values()) / 1e6
  # Messages of the log, which then has about as many bytes at any size.
  log = 128 if megabytes < 5 else 16 if megabytes < 50 else 4
  target, minimum_once = (
    {k: x.copy() for k, x in params.items()},
    unavoidable(params),
  )

  def copy_all() -> None:
    for name, x in params.items():
      np.copyto(target[name], x)

  contestants = (
    lambda: rate(copy_all, seconds / 4),
    lambda: rate(minimum_once, seconds / 4),
    lambda: canonical(params, seconds),
  )
  # With the log, and without it.
  log_lengths, rates, logged_runs = (log, 0), [], []
  for _ in range(_RUNS):
    other_rates = [measure() for measure in contestants]
    ours_runs = [ours(params, seconds, length) for length in log_lengths]
    logged_runs.append(ours_runs[0])
    rates.append([*other_rates, *(speed.updates for speed in ours_runs)])
  copy, minimum, ray_loop, ours_rate, without_log = np.transpose(rates)
  speeds = [np.median(x) for x in (copy, minimum, ray_loop, ours_rate)]
  # An update copies at least twice: the message and the parameters.
  ratios = (
    *(ours_rate / ray_loop, minimum / ours_rate),
    *(copy / 2 / ours_rate, ours_rate / without_log),
  )
  size_targets = _TARGETS.get(round(megabytes, 1), ("", ""))
  targets = *size_targets, "", ">= 0.95"
  cells = [
    *(*speeds, 2 * megabytes * speeds[-1], np.median(without_log)),
    *map(Measured, ratios, targets),
  ]
  return cells, logged_runs
