"""How fast a live parameter server is, beside Ray's own and memory copies.

Workers whose gradient costs one pass over the parameters train as fast as the
server lets them, in processes of their own, with all records on. The peer is
the asynchronous parameter-server loop that Ray's documentation shows.
"""

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asgd import algorithms, base, orders, simulator
from asgd.experiment import ray_runtime
from asgd.live.duty import Duty
from asgd.live.hosts.actors import ActorHosts
from asgd.live.hosts.site import Site
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup

from . import compression, turns
from .report import Measured, Report

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


def ours(params: Any, seconds: float, log: int) -> float:
  """Updates per second of the Ray runtime."""
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
      if status and status[0]["received"] > 20:
        now = time.perf_counter(), status[0]["received"]
        first = first or now
        if now[0] - first[0] >= seconds:
          return (now[1] - first[1]) / (now[0] - first[0])
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


def rate(once: turns.Contestant, seconds: float) -> float:
  """How often in a second something can be done."""
  count, start = 0, time.perf_counter()
  while (took := time.perf_counter() - start) < seconds:
    once()
    count += 1
  return count / took


def run(
  report: Report, sizes: Sequence[float] = _SIZES, seconds: float = 3.0
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
    for size in sizes:
      cells = _cells(compression.message(size), seconds / _TURNS)
      table.row(f"{size:g}", *cells)
  finally:
    ray_runtime.stop()


def _cells(
  params: dict[str, np.ndarray], seconds: float
) -> list[float | Measured]:
  """Has the contestants take turns; returns the numbers of a row."""
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
    lambda: ours(params, seconds, log),
    lambda: ours(params, seconds, 0),
  )
  rates = [[measure() for measure in contestants] for _ in range(_TURNS)]
  copy, floor, theirs, mine, fast = np.transpose(rates)
  speeds = [np.median(x) for x in (copy, floor, theirs, mine)]
  ratios = mine / theirs, floor / mine, copy / 2 / mine, mine / fast
  wanted = _TARGETS.get(round(megabytes, 1), ("", ""))
  targets = *wanted, "", ">= 0.95"
  return [
    *(*speeds, 2 * megabytes * speeds[-1], np.median(fast)),
    *map(Measured, ratios, targets),
  ]
