"""How fast rows are pulled and pushed, and ratings learned, by live tables.

A worker pulls rows of a table from a shard in another process, and pushes
updates to it, one job after the other, with all records on. The baseline is the
parameter server of Ray's documentation: an actor that has all weights, and
gives them out through the object store.
"""

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asgd import tables
from asgd.experiment import cells, loop, ray_runtime
from asgd.experiment.engines import live
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.live.faults import Script
from asgd.live.hosts import Inside
from asgd.live.hosts.actors import ActorHosts
from asgd.live.hosts.base import SHARD
from asgd.live.hosts.site import Site
from asgd.live.setup import Setup
from asgd.live.tables import files
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.orders import protocol
from asgd.tables.division import divide
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker

from . import turns
from .report import BenchReport, Measured
from .server import CanonicalServer
from .turns import Contestant

ROWS, WIDTH = 1000, 64  # of a message
_ALL = 100_000  # rows of the table
_RATE = 0.01
_DRAWN = 50  # lists of keys
_JOBS = 10  # that a contestant does in a turn
_MANY = 10**6


def _settings() -> tables.TableSettings:
  return tables.table(_RATE, 1, consistency="asynchronous")


def _first(rows: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {"w": rng.standard_normal((rows, WIDTH), np.float32)}


def _shard(rows, folder, memory, inside: Inside):
  def make():
    first = _first(rows)
    server = divide(first, 1).server(0, first, _settings(), 1)
    return TableShard(0, server)

  return ShardHost(inside, make, folder, memory, 0, every=1)


def _worker(rows, folder, host, keys, clock) -> WorkerHost:
  """Returns a worker of this process, whose job costs one pass over rows."""
  work = tables.Work(
    lambda worker, job: keys[job % len(keys)],
    lambda batch: {"w": batch},
    lambda values, *_: (0.0, {"w": np.float32(_RATE) * values["w"]}),
  )
  division = divide(_first(rows), 1)

  def make(incarnation, work):
    return TableWorker(
      *(0, incarnation, _settings(), division, work), workers=1, jobs=_MANY
    )

  def ignore(*_: Any) -> None:
    pass

  inside = Inside(ignore, ignore, clock)
  return WorkerHost(
    inside,
    make,
    work,
    JobJournal(inside, folder, 0),
    shards={0: host},
    script=Script([], kill=ignore, wait=ignore),
  )


def _ours(rows, keys, stack, folder) -> Contestant:
  folder.mkdir()
  memory = Path(
    stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
  )
  setup = Setup(protocol.Rules(), 1, _MANY)
  site = Site(setup, str(folder), str(memory), time.monotonic())
  hosts = ActorHosts(site)
  stack.callback(hosts.close)
  make = functools.partial(_shard, rows, folder, memory)
  host = hosts.start(SHARD, 0, make)
  hosts.made(SHARD, 0).result()
  worker, done = _worker(rows, folder, host.near(), keys, site.clock), 0

  def once():
    nonlocal done
    done += _JOBS
    host.call("allow", done).result()
    worker.run(done)

  return once


def _canonical(rows, keys, stack) -> Contestant:
  """The loop of Ray's example: weights come with the answer to a gradient,
  which is of all of them."""
  import ray

  actor_class = ray.remote(CanonicalServer).options(num_cpus=0)
  server = actor_class.remote(_first(rows))
  stack.callback(ray.kill, server)
  weights = ray.get(server.get_weights.remote())
  job = 0

  def once():
    nonlocal weights, job
    for _ in range(_JOBS):
      mine = keys[job % len(keys)] % rows
      gradient = {name: np.zeros_like(w) for name, w in weights.items()}
      gradient["w"][mine] = np.float32(_RATE) * weights["w"][mine]
      weights = ray.get(server.apply_gradients.remote(gradient))
      job += 1

  return once


@contextlib.contextmanager
def running() -> Iterator[None]:
  """Has Ray."""
  ray_runtime.start(None, memory=4 * 2**30)
  try:
    yield
  finally:
    ray_runtime.stop()


@contextlib.contextmanager
def contestants(rows: int) -> Iterator[dict[str, Contestant]]:
  """Yields who does ten jobs, by name, each of which pulls and pushes 1,000
  rows of 64 float32 of a table of `rows`; Ray is running."""
  rng = np.random.default_rng(1)
  sparse = [
    np.sort(rng.choice(rows, ROWS, replace=False)) for _ in range(_DRAWN)
  ]
  starts = rng.integers(0, rows - ROWS + 1, _DRAWN).tolist()
  dense = [np.arange(start, start + ROWS) for start in starts]
  with contextlib.ExitStack() as stack:
    run = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    yield {
      "sparse": _ours(rows, sparse, stack, run / "sparse"),
      "dense, as many bytes": _ours(rows, dense, stack, run / "dense"),
      "Ray loop": _canonical(rows, sparse, stack),
      f"Ray loop, {ROWS} rows": _canonical(ROWS, sparse, stack),
    }


def ratings_per_second(
  workers: int, *, epochs: float = 100.0, batch_size: int = 10_000
) -> float:
  """Returns how many ratings live workers learn from in a second, of matrix
  factorisation by SSP on two shards, in the second half of the jobs; Ray
  is running."""
  config = {
    "problem": dict(
      name="asgd.problems.factorisation:matrix_factorisation",
      rank=64,
      generate=dict(users=1000, items=500, ratings=100_000),
    ),
    "runs": {
      "ssp": dict(
        recipe="table", consistency="ssp", bound=3, clock_every=5, shards=2
      )
    },
    "engine": "ray",
    "workers": (workers,),
    "seeds": (0,),
    "batch_size": batch_size,
    "epochs": epochs,
    "learning_rate": 8.0,
    "evaluations": 1,
    "curvature_checks": 0,
    "on_nan": "record",
  }
  experiment = cells.build(config, engines={"ray": live.RAY})
  (cell,) = experiment.cells
  with tempfile.TemporaryDirectory() as folder:
    machine = Machine()
    try:
      loop.train(
        experiment, cell, Path(folder), bar=Silent(), machine=machine
      )
    finally:
      machine.close()
    place = Path(folder) / "cells" / cell.name
    times = files.FILES.read_all(place, workers).time
  late = times[len(times) // 2 :]
  return batch_size * (len(late) - 1) / float(late[-1] - late[0])


def run(report: BenchReport, rounds: int = 5) -> None:
  """Prints jobs of 1,000 rows against Ray's loop, then ratings by workers."""
  with running():
    with contestants(_ALL) as each:
      taken = turns.take_turns(each, rounds)
    table = report.table(
      f"pull and push of 1,000 rows of 64 float32, of {_ALL:,}",
      "contestant",
      {"ms": ".2f"},
      {"time of sparse": ".2f"},
    )
    for name, seconds in taken.items():
      ratio = Measured(seconds / taken["sparse"])
      table.row(name, 100 * float(np.median(seconds)), ratio)
    table = report.table(
      "matrix factorisation by SSP, on two shards",
      "workers",
      {"ratings/s": ",.0f"},
      {"of one": ".2f"},
      width=7,
    )
    rates = [[ratings_per_second(w) for w in (1, 4)] for _ in "123"]
  one, four = np.transpose(rates)
  table.row("1", float(np.median(one)), None)
  table.row("4", float(np.median(four)), Measured(four / one, ">= 1.7"))
