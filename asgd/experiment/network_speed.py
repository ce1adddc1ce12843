"""Messages a second over slow links: live, and simulated from one worker.

A worker's job is to wait, for a time that is drawn, and to take a gradient that
costs next to nothing: so any number of them do not want for cores. How long the
jobs of one live worker take over links that take no time is measured; the same
protocol is simulated for N workers over a network with these times; and beside
it is the live run whose links are as slow.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import base, losses, problems
from asgd.experiment import (
  cells,
  live_files,
  loop,
  predict,
  storage,
)
from asgd.experiment.engines import live, simulate
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent

_ENGINES = {
  "simulate": simulate.SIMULATE,
  "threads": live.THREADS,
  "ray": live.RAY,
}
_LEAVES, _WIDTH = 4, 250  # of the parameters
_SPREAD = 0.5  # a job takes 1 - this to 1 + this of the mean
_RATE = 0.01


class Links(NamedTuple):
  """What workers are to meet, in seconds and bytes."""

  job: float = 0.1  # mean time of a job
  latency: float = 0.005  # one way
  port: float = 8e6  # bandwidth of a shard's port, each way
  nbytes: int = 400_000  # of a message, and of a ticket
  incast: str = "queue"  # as `asgd.orders.network.Network` has it

  def section(self) -> dict[str, Any]:
    """Returns the section `network` of a config."""
    return {
      "latency": self.latency, "port": self.port, "incast": self.incast
    }

  def bound(self, workers: int, shards: int) -> float:
    """Returns the smaller of N / c and S B / b: the messages a second of N
    workers that never wait for each other, c seconds each from ticket to
    ticket, and those that the ports of S shards let through."""
    port = self.nbytes / shards / self.port
    return min(
      workers / (self.job + 2 * self.latency + 2 * port), 1 / port
    )


def waiting(
  batch_size: int, *, seconds: float = 0.0, nbytes: int = 400_000
) -> problems.Problem:
  """Returns a problem whose jobs wait, `seconds` in the mean, for what is drawn
  uniformly from half to one and a half of it by the worker and the job. The
  parameters have so many bytes; the loss is half their square."""
  rows = max(round(nbytes / 4 / _LEAVES / _WIDTH), 1)
  nothing = np.zeros((batch_size, 1), np.float32)

  def init(key):
    keys = jax.random.split(key, _LEAVES)
    return [jax.random.normal(k, (rows, _WIDTH)) for k in keys]

  def loss(params, batch, key):
    del batch, key
    return sum(jnp.sum(x**2) for x in params) / 2, losses.Aux(())

  def batches(seed, workers):
    del workers

    def batch(worker, job):
      rng = np.random.default_rng((seed, worker, job))
      if seconds:
        time.sleep(seconds * rng.uniform(1 - _SPREAD, 1 + _SPREAD))
      return nothing

    return batch

  def evaluate(params):
    return problems.Evaluation(
      float(sum(np.sum(np.square(x)) for x in params) / 2)
    )

  return problems.Problem(init, loss, evaluate, batches, nothing, 1)


def _train(
  links: Links,
  engine: str,
  workers: int,
  shards: int,
  messages: int,
  read: Callable[[Path], Any] = lambda place: None,
  **config: Any,
) -> tuple[base.Records, Any]:
  """Trains a cell; returns its records, and what is read of its folder."""
  job = 0.0 if engine == "simulate" else links.job
  experiment = cells.build(
    {
      "problem": dict(
        name="asgd.experiment.network_speed:waiting",
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
      "learning_rate": _RATE,
      "evaluations": 1,
      "curvature_checks": 0,
      **config,
    },
    engines=_ENGINES,
  )
  (cell,) = experiment.cells
  kept: list[Any] = []
  with tempfile.TemporaryDirectory() as folder:
    machine = Machine()
    try:
      loop.train(
        experiment,
        cell,
        Path(folder),
        bar=Silent(),
        machine=machine,
        ended=lambda *what: kept.extend(what),
      )
    finally:
      machine.close()
    return kept[0], read(Path(folder) / "cells" / cell.name)


def _rate(records: base.Records, workers: int) -> float:
  """Messages a second, once each worker has handed one in."""
  zero = predict.all_there(records.worker, workers)
  return predict.rate(predict.Outcome(0.0, records, float("nan")), zero)


def measured(
  links: Links, messages: int, engine: str = "threads", **config: Any
) -> list[float]:
  """Returns the seconds that jobs of one live worker take, over links that take
  no time."""

  def read(place):
    files = live_files.read(place)
    jobs = predict.jobs(files.journals[0], files.spans)
    return predict.settled(jobs, 1)[0]

  _, times = _train(links, engine, 1, 1, messages, read, **config)
  return times


def simulated(
  links: Links,
  workers: int,
  shards: int,
  messages: int,
  times: Sequence[float],
  seed: int = 0,
) -> float:
  """Returns the messages a second of N simulated workers over the network,
  whose jobs take times that are drawn from these."""
  rows: list[Mapping[str, Any]] = [
    {"worker": 0, "seconds": seconds} for seconds in times
  ]
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "durations.csv"
    storage.write_csv(path, rows)
    clock = dict(name="recorded", path=str(path), resample=True)
    records, _ = _train(
      links,
      "simulate",
      workers,
      shards,
      messages,
      network=links.section(),
      durations=clock,
      seeds=(seed,),
    )
  return _rate(records, workers)


def throttled(links: Links, workers: int, shards: int, messages: int) -> float:
  """Returns the messages a second of N live workers, threads, whose links take
  the time of the network."""
  network = links.section()
  records, _ = _train(
    links, "threads", workers, shards, messages, network=network
  )
  return _rate(records, workers)
