"""How fast live tables pull and push rows, and learn ratings.

A worker pulls rows of a table from a shard in another process, and pushes
updates to it, one job after the other, with all records on. The baseline is the
parameter server of Ray's documentation: an actor that holds all weights, and
returns all of them through the object store.
"""

import contextlib
import functools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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

# A message has 256 kB of parameters, or of updates.
ROWS, WIDTH = 1000, 64  # of a message
_TABLE_ROWS = 100_000  # rows of the table
_RATE = 0.01  # learning rate of an update
_KEY_LISTS = 50  # lists of keys, which jobs use in turn
_JOBS = 10  # of a contestant in a turn
_NO_LIMIT = 10**6  # jobs: more than any turn does


def _settings() -> tables.TableSettings:
  """Returns the settings of one shard on which reads never wait."""
  return tables.table(_RATE, 1, consistency="asynchronous")


def _initial_rows(rows: int) -> dict[str, npt.NDArray[np.float32]]:
  """Returns the initial table, float32[rows, WIDTH]."""
  rng = np.random.default_rng(0)
  return {"w": rng.standard_normal((rows, WIDTH), np.float32)}


def _shard(rows: int, folder: Path, memory: Path, inside: Inside) -> ShardHost:
  """Returns the shard of a process, with all rows."""

  def make_shard() -> TableShard:
    initial_rows = _initial_rows(rows)
    server = divide(initial_rows, 1).server(0, initial_rows, _settings(), 1)
    return TableShard(0, server)

  return ShardHost(inside, make_shard, folder, memory, 0, clock_every=1)


def _worker(
  rows: int, folder: Path, host: Any, keys: Sequence[Any], clock: Any
) -> WorkerHost:
  """Returns a worker of this process. Its job costs one pass over rows."""
  # The batch of a job is its list of keys; the updates are the rows, scaled.
  work = tables.Work(
    lambda worker, job: keys[job % len(keys)],
    lambda batch: {"w": batch},
    lambda values, *_: (0.0, {"w": np.float32(_RATE) * values["w"]}),
  )
  division = divide(_initial_rows(rows), 1)

  def make_worker(incarnation: int, work: tables.Work) -> TableWorker:
    return TableWorker(
      *(0, incarnation, _settings(), division, work), workers=1, jobs=_NO_LIMIT
    )

  def ignore(*_: Any) -> None:
    pass

  # No faults and no messages: nothing is injected, and messages are dropped.
  inside = Inside(ignore, ignore, clock)
  return WorkerHost(
    inside,
    make_worker,
    work,
    JobJournal(inside, folder, 0),
    shards={0: host},
    script=Script([], kill=ignore, wait=ignore),
  )


def _live_jobs(
  rows: int,
  keys: Sequence[Any],
  stack: contextlib.ExitStack,
  folder: Path,
) -> Contestant:
  """Returns a contestant that does jobs of a live worker in this process, on a
  shard in another process. `stack` ends that process."""
  folder.mkdir()
  memory = Path(
    stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
  )
  setup = Setup(protocol.Rules(), 1, _NO_LIMIT)
  site = Site(setup, str(folder), str(memory), time.monotonic())
  hosts = ActorHosts(site)
  stack.callback(hosts.close)
  # The shard's process calls `make`.
  make = functools.partial(_shard, rows, folder, memory)
  host = hosts.start(SHARD, 0, make)
  hosts.make_call(SHARD, 0).result()
  handle, allowed_jobs = host.fastest_handle(), 0
  worker = _worker(rows, folder, handle, keys, site.clock)

  def run_jobs() -> None:
    """Does the jobs of a turn."""
    nonlocal allowed_jobs
    allowed_jobs += _JOBS
    # The shard limits jobs, as a driver between two evaluations does.
    host.call("set_limit", allowed_jobs).result()
    worker.run(allowed_jobs)

  return run_jobs


def _ray_jobs(
  rows: int, keys: Sequence[Any], stack: contextlib.ExitStack
) -> Contestant:
  """Returns a contestant that does jobs of Ray's example: a gradient has all
  rows, and so has its reply."""
  import ray

  actor_class: Any = ray.remote(CanonicalServer).options(num_cpus=0)
  server = actor_class.remote(_initial_rows(rows))
  stack.callback(ray.kill, server)
  weights: Any = ray.get(server.get_weights.remote())
  job = 0

  def run_jobs() -> None:
    """Does the jobs of a turn."""
    nonlocal weights, job
    for _ in range(_JOBS):
      row_indices = keys[job % len(keys)] % rows
      # The example's gradient is dense, whichever rows the job has.
      gradient = {name: np.zeros_like(w) for name, w in weights.items()}
      gradient["w"][row_indices] = np.float32(_RATE) * weights["w"][row_indices]
      weights = ray.get(server.apply_gradients.remote(gradient))
      job += 1

  return run_jobs


@contextlib.contextmanager
def running() -> Iterator[None]:
  """Starts Ray, and stops it at the end."""
  ray_runtime.start(None, memory=4 * 2**30)
  try:
    yield
  finally:
    ray_runtime.stop()


@contextlib.contextmanager
def contestants(rows: int) -> Iterator[dict[str, Contestant]]:
  """Yields contestants by name. Each does ten jobs, and a job pulls and pushes
  1,000 rows of 64 float32 of a table of `rows`. Ray is running."""
  rng = np.random.default_rng(1)
  # Rows that are spread over the table, and the same number of contiguous rows.
  sparse = [
    np.sort(rng.choice(rows, ROWS, replace=False)) for _ in range(_KEY_LISTS)
  ]
  starts = rng.integers(0, rows - ROWS + 1, _KEY_LISTS).tolist()
  dense = [np.arange(start, start + ROWS) for start in starts]
  with contextlib.ExitStack() as stack:
    run = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    yield {
      "sparse": _live_jobs(rows, sparse, stack, run / "sparse"),
      "dense, as many bytes": _live_jobs(rows, dense, stack, run / "dense"),
      "Ray loop": _ray_jobs(rows, sparse, stack),
      f"Ray loop, {ROWS} rows": _ray_jobs(ROWS, sparse, stack),
    }


def ratings_per_second(
  workers: int, *, epochs: float = 100.0, batch_size: int = 10_000
) -> float:
  """Returns the ratings per second from which live workers learn, in matrix
  factorisation by SSP on two shards. The second half of the jobs is measured.
  Ray must be running."""
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
    cell_folder = Path(folder) / "cells" / cell.name
    times = files.FILES.read_all(cell_folder, workers).time
  # The first half compiles, and fills the caches.
  second_half = times[len(times) // 2 :]
  # N times span N - 1 intervals.
  seconds = float(second_half[-1] - second_half[0])
  return batch_size * (len(second_half) - 1) / seconds


def run(report: BenchReport, rounds: int = 5) -> None:
  """Prints jobs of 1,000 rows against Ray's loop, then ratings by workers."""
  with running():
    with contestants(_TABLE_ROWS) as contestants_by_name:
      seconds_by_name = turns.take_turns(contestants_by_name, rounds)
    table = report.table(
      f"pull and push of 1,000 rows of 64 float32, of {_TABLE_ROWS:,}",
      "contestant",
      {"ms": ".2f"},
      {"time / sparse": ".2f"},
    )
    for name, seconds in seconds_by_name.items():
      ratio = Measured(seconds / seconds_by_name["sparse"])
      # Milliseconds of one of ten jobs.
      table.row(name, 100 * float(np.median(seconds)), ratio)
    # Ratings by number of workers, three times each in turns.
    table = report.table(
      "matrix factorisation by SSP, on two shards",
      "workers",
      {"ratings/s": ",.0f"},
      {"speed / one worker": ".2f"},
      width=9,
    )
    rates = [[ratings_per_second(w) for w in (1, 4)] for _ in "123"]
  one_worker, four_workers = np.transpose(rates)
  table.row("1 worker", float(np.median(one_worker)), None)
  table.row(
    "4 workers",
    float(np.median(four_workers)),
    Measured(four_workers / one_worker, ">= 1.7"),
  )
