"""Messages per second over slow links: live, and simulated from one worker.

A worker's job waits for a drawn time and computes a gradient that costs almost
nothing. So any number of workers run on a few cores. The benchmark

1. measures the jobs of one live worker over links that take no time;
2. simulates N workers over a slow network with these times;
3. runs N live workers over links of the same speed.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, losses, problems
from asgd.experiment import (
  cells,
  live_files,
  loop,
  predict,
  ray_runtime,
  storage,
)
from asgd.experiment.engines import live, simulate
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.live import ray_internals

from . import namespaces
from .report import BenchReport, Measured

_ENGINES = {
  "simulate": simulate.SIMULATE,
  "threads": live.THREADS,
  "ray": live.RAY,
}
_LEAVES, _WIDTH = 4, 256  # of the parameters: matrices, and their columns
_SPREAD = 0.5  # a job takes from 1 - _SPREAD to 1 + _SPREAD times the mean
_LEARNING_RATE = 0.01  # the loss does not matter
FAR = "far"  # resource of the workers' machine
_FAR_RESOURCE = {FAR: 0.001}  # resource that each worker asks for
_OBJECT_STORE_BYTES = 2**29  # of Ray, on each machine
_TARGET = "0.85 to 1.15"  # of simulated / live
_JOBS = 40  # jobs in a live run of a worker that waits for no other
# Least jobs of a worker that waits for others; its first does not count.
_MIN_JOBS = 12
# A measurement is repeated if jobs took 5 % longer than their waits.
_LATE_LIMIT, _MAX_TRIES = 0.05, 2
_T = TypeVar("_T")


class LinkSpeeds(NamedTuple):
  """The speeds of a network and of jobs, in seconds and bytes."""

  job: float = 0.1  # mean time of a job
  latency: float = 0.005  # one way
  port: float = 20 * 409_600  # bandwidth of a shard's port, each way
  nbytes: int = 409_600  # of a message, and of a ticket
  incast: str = "queue"  # of `asgd.orders.network.Network`

  def section(self) -> dict[str, Any]:
    """Returns the section `network` of a config."""
    keys = "latency", "port", "incast"
    return {key: getattr(self, key) for key in keys}

  def slower(self, factor: float) -> "LinkSpeeds":
    """Returns the speeds with every time, and the time of every byte,
    multiplied by `factor`."""
    job, latency = factor * self.job, factor * self.latency
    return self._replace(job=job, latency=latency, port=self.port / factor)

  def bound(self, workers: int, shards: int, job: float | None = None) -> float:
    """Returns an upper bound of the messages per second: the smaller of N / c
    and S B / b. N / c is the rate of N workers that never wait for each other;
    c is the time from ticket to ticket, with jobs of the mean time `job`. S B /
    b is the rate that the ports of S shards allow.

    Example:
      >>> from .network import LinkSpeeds
      >>> links = LinkSpeeds(job=1.0, latency=0.5, port=4.0, nbytes=8)
      >>> links.bound(2, 1), links.bound(2, 2), links.bound(16, 2)
      (0.3333333333333333, 0.5, 1.0)
    """
    # Seconds of a message at a shard's port: each shard gets 1 / S of it.
    job, port_seconds = job or self.job, self.nbytes / shards / self.port
    # A cycle: the job, the ticket and the message.
    cycle = job + 2 * (self.latency + port_seconds)
    return min(workers / cycle, 1 / port_seconds)


def _draw_wait(seconds: float, seed: int, worker: int, job: int) -> float:
  """Returns how long a job waits, `seconds` in the mean."""
  # `_mean_lateness` draws the same wait again.
  rng = np.random.default_rng((seed, worker, job))
  return seconds * rng.uniform(1 - _SPREAD, 1 + _SPREAD)


def waiting(
  batch_size: int, *, seconds: float = 0.0, nbytes: int = 409_600
) -> problems.Problem:
  """Returns a problem with jobs that wait, `seconds` in the mean.

  The wait is drawn uniformly from 0.5 to 1.5 times the mean, with worker and
  job as the seed. The parameters have `nbytes` bytes; the loss is half the sum
  of their squares.
  """
  rows = max(round(nbytes / 4 / _LEAVES / _WIDTH), 1)
  empty_batch = np.zeros((batch_size, 1), np.float32)

  def init(key: jax.Array) -> list[jax.Array]:
    keys = jax.random.split(key, _LEAVES)
    return [jax.random.normal(k, (rows, _WIDTH)) for k in keys]

  def loss(params: Any, batch: Any, key: Any) -> tuple[jax.Array, losses.Aux]:
    del batch, key
    squares: Any = sum(jnp.sum(x**2) for x in params)
    return squares / 2, losses.Aux(())

  def batches(seed: int, workers: int) -> Callable[[int, int], Any]:
    """Returns the batches, all empty, each after its wait."""
    del workers

    def batch(worker: int, job: int) -> Any:
      if seconds:
        # Making the batch is part of the job, and sleeping needs no core.
        time.sleep(_draw_wait(seconds, seed, worker, job))
      return empty_batch

    return batch

  def evaluate(params: Any) -> problems.Evaluation:
    return problems.Evaluation(
      float(sum(np.sum(np.square(x)) for x in params) / 2)
    )

  return problems.Problem(init, loss, evaluate, batches, empty_batch, 1)


def _train(
  links: LinkSpeeds,
  engine: str,
  workers: int,
  shards: int,
  messages: int,
  read: Callable[[Path], Any] = lambda folder: None,
  **config: Any,
) -> tuple[base.Records, Any]:
  """Trains a cell; returns its records, and the result of `read`(folder)."""
  # In simulated time a job must not sleep: its time is drawn.
  job = 0.0 if engine == "simulate" else links.job
  experiment = cells.build(
    {
      "problem": dict(
        name=f"{__name__}:waiting",
        seconds=job,
        nbytes=links.nbytes,
      ),
      "runs": {"run": dict(recipe="asgd")},
      "server": dict(shards=shards, consistent=True),
      "engine": engine,
      "workers": (workers,),
      "seeds": (0,),
      "batch_size": 1,
      "examples": messages,
      "learning_rate": _LEARNING_RATE,
      "evaluations": 1,
      "curvature_checks": 0,  # these would take time of the workers
      **config,
    },
    engines=_ENGINES,
  )
  (cell,) = experiment.cells
  end_results: list[Any] = []  # the arguments that the loop passes to `on_end`
  with tempfile.TemporaryDirectory() as folder:
    machine = Machine()
    try:
      loop.train(
        experiment,
        cell,
        Path(folder),
        bar=Silent(),
        machine=machine,
        on_end=lambda *results: end_results.extend(results),
      )
    finally:
      machine.close()
    # Before the folder is removed.
    return end_results[0], read(Path(folder) / "cells" / cell.name)


def _mean_lateness(files: live_files.LiveFiles, seconds: float) -> float:
  """Returns the mean time by which jobs of a live run took longer than their
  waits, relative to the mean wait `seconds`. It is large if other programs used
  the cores."""
  lateness = [
    # A wait is drawn from worker and job, so that it can be drawn again here.
    span.end - span.start - _draw_wait(seconds, 0, worker, span.job)
    for worker, spans in files.spans.items()
    for span in spans
    if span.name == "compute"
  ]
  return float(np.mean(lateness)) / seconds


def undisturbed(call: Callable[[], tuple[_T, float]]) -> tuple[_T, float]:
  """Makes a measurement, again if other programs disturb it (`_MAX_TRIES`).

  Returns (result, lateness of jobs) of the least disturbed try.
  """
  tries: list[tuple[_T, float]] = []
  while len(tries) < _MAX_TRIES and (not tries or tries[-1][1] > _LATE_LIMIT):
    tries.append(call())
  return min(tries, key=lambda result_and_lateness: result_and_lateness[1])


def _rate(records: base.Records, workers: int) -> float:
  """Returns messages per second, after each worker has sent one."""
  # From here on all workers are at work: the start is left out.
  n_first = predict.count_until_all_sent(records.worker, workers)
  return predict.rate(predict.Outcome(0.0, records, float("nan")), n_first)


def simulated(
  links: LinkSpeeds,
  workers: int,
  shards: int,
  messages: int,
  times: Sequence[float],
  seed: int = 0,
) -> float:
  """Returns the messages per second of N simulated workers over the network.

  Args:
    links: the latency, the bandwidth, and the bytes of a message.
    workers: N.
    shards: S; all shards apply the messages in one order.
    messages: the number of messages of the run. The rate leaves out the first
      messages, until each worker has sent one.
    times: measured seconds of jobs; each worker's times are drawn from them.
    seed: the seed of the draws.
  """
  rows = [{"worker": 0, "seconds": seconds} for seconds in times]
  with tempfile.TemporaryDirectory() as folder:
    # The simulation reads durations from a file, as for any live run.
    path = Path(folder) / "durations.csv"
    storage.write_csv(path, rows)
    clock = dict(name="recorded", path=str(path), resample=True)
    config: dict[str, Any] = {"network": links.section(), "seeds": (seed,)}
    size = workers, shards, messages
    records, _ = _train(links, "simulate", *size, durations=clock, **config)
  return _rate(records, workers)


class Threads:
  """Live workers and shards in this process, over throttled links.

  Messages and tickets are delayed as by a network
  (`asgd.live.links.throttled`).
  """

  runs = *((n, 1) for n in (1, 2, 4, 8)), (8, 2)  # workers, shards
  _links, _engine = LinkSpeeds(), "threads"

  def __init__(self, seconds: float):
    """Scales the links so that a live run takes about `seconds`.

    That is `_JOBS` jobs of a worker that waits for no other. Disturbances of
    the machine matter less in longer jobs.
    """
    cycle = 1 / self._links.bound(1, 1)
    self.links = self._links.slower(seconds / _JOBS / cycle)

  def _slow_links(self) -> dict[str, Any]:
    """Makes links slow; returns the config keys for slow links."""
    return {"network": self.links.section()}

  def _fast_links(self) -> dict[str, Any]:
    """Makes links fast; returns the config keys for fast links."""
    return {}

  def _run_live(
    self, workers: int, shards: int, messages: int, **config: Any
  ) -> tuple[base.Records, Any, float]:
    """Returns (records, files, mean lateness of jobs) of a live run."""
    live = {"spans": True, **config.pop("live", {})}
    read, links = live_files.read, self.links
    records, files = _train(
      *(links, self._engine, workers, shards, messages, read),
      live=live,
      **config,
    )
    return records, files, _mean_lateness(files, links.job)

  def measured(self, messages: int) -> tuple[list[float], float]:
    """Returns (seconds of each job of one worker, mean lateness of the jobs),
    over fast links."""
    _, files, late = self._run_live(1, 1, messages, **self._fast_links())
    # From the end of a job to the next one, without the first.
    jobs = predict.measure_jobs(files.journals[0], files.spans)
    return predict.settled_durations(jobs, 1)[0], late

  def rate(
    self, workers: int, shards: int, messages: int
  ) -> tuple[float, float]:
    """Returns (messages per second, mean lateness of jobs) of N workers over
    slow links."""
    records, _, late = self._run_live(
      workers, shards, messages, **self._slow_links()
    )
    return _rate(records, workers), late


class SeparateMachines(Threads):
  """A live server, and workers at the other end of a wire.

  Server and workers are processes of Ray in two network namespaces. `tc` limits
  the wire between them to the bandwidth of a port. TCP divides this bandwidth
  among simultaneous messages, and the latency is the wire's. There is one
  shard, because several would share one machine and its port.
  """

  runs = tuple((n, 1) for n in (1, 2, 4, 8))
  _links = LinkSpeeds(
    latency=0.0, nbytes=2**20, port=20 * 2**20, incast="share"
  )
  _engine = "ray"

  def __init__(self, seconds: float, wire: namespaces.VirtualWire):
    """Ray must run, with a node at the far end that has the resource FAR."""
    super().__init__(seconds)
    self._wire = wire

  def _slow_links(self) -> dict[str, Any]:
    self._wire.limit(self.links.port)
    return {"live": {"resources": _FAR_RESOURCE}}

  def _fast_links(self) -> dict[str, Any]:
    self._wire.limit(None)
    return {"live": {"resources": _FAR_RESOURCE}}


@contextlib.contextmanager
def machines(seconds: float) -> Iterator[SeparateMachines]:
  """Yields a server and workers with a wire between them.

  Raises:
    ValueError: where no network namespace can be made, with the reason.
  """
  with namespaces.wire() as wire:
    # Ray listens on all interfaces, which here lead to the wire's other end
    # only. Ray's helper processes would take time of the two cores.
    with ray_internals.without_unused_processes():
      ray_runtime.start(None, allow_network=True, memory=_OBJECT_STORE_BYTES)
    try:
      with namespaces.far_node(wire, FAR, _OBJECT_STORE_BYTES):
        yield SeparateMachines(seconds, wire)
    finally:
      ray_runtime.stop()


# --links -> a context manager that yields the runtime with slow links.
RUNTIMES: dict[str, Callable[[float], Any]] = {
  "threads": lambda seconds: contextlib.nullcontext(Threads(seconds)),
  "tc": machines,
}


class Turn(NamedTuple):
  """The rates of a live run and of its prediction, in messages per second."""

  bound: float  # the most that workers and ports allow
  live: float
  simulated: float
  late: float  # by what fraction jobs took longer than drawn


def turn(
  runtime: Threads,
  workers: int,
  shards: int,
  seed: int,
  job_times: tuple[Sequence[float], float],
) -> Turn:
  """Simulates N workers over slow links, and runs N live workers over them.

  `job_times` are (times of jobs, their lateness), measured over fast links. The
  simulation uses these times.
  """
  links, (times, lateness_before) = runtime.links, job_times
  bound = links.bound(workers, shards, float(np.mean(times)))
  # The rate of a worker over that of one alone: it waits for busy ports.
  rate_share = links.bound(workers, shards) / links.bound(1, 1) / workers
  jobs = max(round(_JOBS * rate_share), _MIN_JOBS)
  size = workers, shards, workers * jobs
  # Predict first: the prediction must not know the live run.
  predicted = simulated(links, *size, times, seed)
  live, lateness_after = undisturbed(lambda: runtime.rate(*size))
  return Turn(bound, live, predicted, max(lateness_before, lateness_after))


def run(
  report: BenchReport,
  links: str = "threads",
  seconds: float = 3.0,
  rounds: int = 3,
) -> None:
  """Prints messages per second for several counts of workers and shards.

  A row has the bound that the links set, the rate of live runs of `seconds`
  each, and the simulated rate.
  """
  with RUNTIMES[links](seconds) as runtime:
    speeds = runtime.links
    table = report.table(
      f"slow links, {links}: jobs of {speeds.job:.3g} s, {speeds.latency:.3g} s"
      f" each way, a port takes {speeds.port / speeds.nbytes:.3g} messages/s",
      "number",
      {"at most/s": ".2f", "live/s": ".2f", "simulated/s": ".2f"}
      | {"late %": ".1f"},
      {"simulated / live": ".2f"},
      width=20,
    )
    # Each round measures one worker, and predicts from this measurement.
    job_measurements = [
      undisturbed(lambda: runtime.measured(_JOBS)) for _ in range(rounds)
    ]
    for workers, shards in runtime.runs:
      measured_turns = [
        turn(runtime, workers, shards, *seed_and_jobs)
        for seed_and_jobs in enumerate(job_measurements)
      ]
      bound, live, simulated, late = np.transpose(measured_turns)
      rates = [float(np.median(x)) for x in (bound, live, simulated)]
      ratio = Measured(simulated / live, _TARGET)
      name = f"workers {workers}, shards {shards}"
      table.row(name, *rates, 100 * late.max(), ratio)
