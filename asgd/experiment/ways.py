"""Ways to train a config on several machines, measured and played.

    problem --measure--> StepCosts --+
    flags -------------> Machines ---+--ways--> Way, ... --choose--> Way

`measure` trains some steps on this machine. `ways` plays each way of training
by `asgd.orders`, with the measured durations. `choose` takes the simplest way
that is nearly as fast as the fastest. `asgd.experiment.advice` says why.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import (
  algorithms,
  base,
  compression,
  diagnosis,
  optimizers,
  orders,
  problems,
  wire,
)
from asgd import worker as worker_lib
from asgd.compression import packing
from asgd.experiment import schema
from asgd.experiment.engines import clocks
from asgd.orders import durations, play
from asgd.orders.network import Network
from asgd.parallel import costs, memory

WORTH = 1.25  # a way that is so much faster is worth being less simple
ENOUGH = 0.9  # of the most speed, which the fewest workers have to reach
_STEPS, _SECONDS = 30, 5.0  # limits of the measured steps
_ROUNDS = 40  # messages of each worker that a way is played for
_LOCAL = 4, 16, 64  # local steps to choose from
_CODED = 3  # messages that the size of a code is measured on

ONE, MESH, ASYNCHRONOUS = "one machine", "mesh", "asynchronous"
CODED, LOCAL = "coded messages", "local steps"


class Machines(NamedTuple):
  """The machines and links that may be used."""

  machines: int  # most workers
  network: Network  # in bytes a second, and seconds
  memory: float  # bytes of each machine
  start: float  # seconds until the workers of a live run train
  slowness: tuple[float, ...]  # of each machine's steps; 1 is this machine

  @property
  def spread(self) -> float:
    """How many times as long the slowest machine takes as the fastest."""
    return max(self.slowness) / min(self.slowness)


class StepRule(NamedTuple):
  """How the config's first run takes its steps."""

  rate: float  # peak learning rate of one gradient
  momentum: float  # of SGD
  optimizer: Any  # other than SGD, as `optimizers.named` takes it; or None
  own: dict[str, Any]  # options that a new run has to repeat
  up: Any  # codec of messages, or None
  down: Any  # codec of the server's updates, or None


class StepCosts(NamedTuple):
  """Measurements of a step on this machine."""

  seconds: tuple[float, ...]  # of warm steps on a batch
  batches: float  # of the whole run
  parameters: int
  dense: int  # bytes of a message, or of a ticket, without a codec
  coded: int  # bytes of a message with a codec
  kept: int  # bytes that a step keeps for its backward
  sharpness: float  # largest Hessian eigenvalue; NaN if it is not known

  @property
  def mean(self) -> float:
    """Mean seconds of a step."""
    return statistics.fmean(self.seconds)

  @property
  def alone(self) -> float:
    """Seconds of the whole run on one machine."""
    return self.batches * self.mean


class Way(NamedTuple):
  """A way of training, with the number of workers that suits it."""

  name: str
  workers: int
  speed: float  # batches in the time of one batch on one machine
  stale: float = 0.0  # mean staleness of a message
  oldest: int = 0  # largest staleness
  steps: int = 1  # batches of a message


# [1] Measuring.


def training_of(run: schema.Run, config: Mapping[str, Any]) -> StepRule:
  """Reads how a run takes its steps. Raises ValueError if the recipe's
  messages are no gradients of all parameters."""
  if schema.makes_settings(run.recipe):
    raise ValueError(
      f"config.runs.{run.label} has the recipe {run.recipe!r}, whose messages"
      " are no gradients of all parameters: choose another run by"
      " --config.only, or simulate this one with config.network"
    )
  options = {**algorithms.options(run.recipe), **run.options}
  momentum, own = options.get("momentum", 0.0), {}
  optimizer = run.config["optimizer"]
  if optimizer:
    if optimizer != config["optimizer"]:
      own = {"optimizer": optimizer}
    plain = optimizers.momentum_of(optimizers.named(optimizer))
    momentum = plain or 0.0
    if plain is not None:
      optimizer = None
  elif momentum:
    own = {"momentum": momentum}
  up, down = (
    run.config.get(key, config[key]) for key in ("compress", "compress_down")
  )
  rate = run.config["learning_rate"]
  return StepRule(rate, momentum, optimizer, own, up, down)


def options_of(name: str, training: StepRule) -> dict[str, Any]:
  """Returns the training's momentum or optimizer as options of a recipe."""
  if training.optimizer is not None:
    return {"optimizer": training.optimizer}
  has_momentum = "momentum" in algorithms.options(name)
  return {"momentum": training.momentum} if has_momentum else {}


def built(name: str, training: StepRule, workers: int) -> algorithms.Recipe:
  """Builds a recipe with the training's momentum or optimizer."""
  options = options_of(name, training)
  return algorithms.build(name, training.rate, workers, **options)


def codec_of(training: StepRule) -> dict[str, Any]:
  """Returns the config's codec of messages, or else one that suits it: DGC
  keeps the momentum at the workers."""
  if training.up is not None:
    return dict(training.up)
  if training.momentum:
    return {"name": "dgc", "momentum": training.momentum, "warm_up": 0.0}
  return {"name": "top_k"}


def measure(
  problem: problems.Problem, training: StepRule, batches: float
) -> StepCosts:
  """Trains some steps on this machine, and measures them.

  Args:
    problem: with the batch size of the config.
    training: how it takes steps.
    batches: the number of batches of the whole run.

  Returns:
    Measurements. The first step compiles, and is left out. The sharpness is
    that of the first parameters.
  """
  server = built("asgd", training, 1).server()
  worker = worker_lib.gradient_worker(problem.loss)
  key, draw = jax.random.key(0), problem.batches(0, 1)
  params = problem.init(key)

  @jax.jit
  def step(state, own, batch):
    ticket = server.send(state, jnp.int32(0))
    own, message, _ = worker.work(own, ticket, batch, key)
    return server.receive(state, ticket, message)[0], own

  state, own = server.init(params), worker.init(params)
  seconds: list[float] = []
  while len(seconds) <= _STEPS:
    began = time.perf_counter()
    state, own = step(state, own, draw(0, len(seconds)))
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - began)
    if len(seconds) > 3 and sum(seconds[1:]) > _SECONDS:
      break
  sharpness = math.nan
  if training.optimizer is None:  # other optimizers have no such limit
    estimate = diagnosis.make_sharpness(problem.loss, problem.probe)
    # At the first parameters: training at the rate of one machine would raise
    # the sharpness until this rate is at its limit.
    sharpness = estimate(params)

  def loss(weights, batch):
    return problem.loss(base.with_weights(params, weights), batch, key)[0]

  weights = base.weights_of(params)
  return StepCosts(
    tuple(seconds[1:]),
    batches,
    sum(leaf.size for leaf in jax.tree.leaves(weights)),
    wire.layout(params).nbytes,
    _coded_bytes(problem, codec_of(training), params),
    memory.residual_bytes(loss, weights, draw(0, 0)),
    sharpness,
  )


def _coded_bytes(
  problem: problems.Problem, section: Mapping[str, Any], params: base.Params
) -> int:
  """Returns the largest packed message of some, behind a codec."""
  codec = compression.named(**section)
  codec = compression.fitted(codec, 1, problem.batches_per_epoch)
  worker = compression.compressed(
    worker_lib.gradient_worker(problem.loss), codec
  )
  server = algorithms.build("asgd", 0.1, 1).server()
  ticket = server.send(server.init(params), jnp.int32(0))
  own, draw, sizes = worker.init(params), problem.batches(0, 1), []
  work, layout = jax.jit(worker.work), compression.layout(codec, params)
  for job in range(_CODED):
    own, message, _ = work(own, ticket, draw(0, job), jax.random.key(job))
    code = jax.tree.map(np.asarray, message)
    sizes.append(len(bytes(packing.pack(layout, code))))
  return max(sizes)


def slowness(
  section: Mapping[str, Any], machines: int, *, draws: int = 32
) -> tuple[float, ...]:
  """Returns the mean durations of a config's machines, over the median one,
  which this machine stands for."""
  times = clocks.build(**{"seed": 0, **section})
  means = [
    statistics.fmean(itertools.islice(times.stream(worker), draws))
    for worker in range(machines)
  ]
  middle = statistics.median_low(means)
  return tuple(mean / middle for mean in means)


# [2] Ways of training, played.


def local_recipe(training: StepRule, cluster: Machines) -> str:
  """Returns the recipe of local steps for an optimizer and for machines."""
  if unequal(cluster):
    return "fedasync"  # no worker waits for another
  return "model_averaging" if training.optimizer is None else "diloco"


def unequal(cluster: Machines) -> bool:
  """Whether the machines differ enough to make rounds slow."""
  return cluster.spread >= WORTH


def _counts(machines: int) -> list[int]:
  """Returns numbers of workers to try: 2, 3, 4, 6, 8, 12, ... and all."""
  tried = {n for i in range(1, 20) for n in (2**i, 3 * 2 ** (i - 1))}
  return sorted({n for n in tried if n < machines} | {machines})


def clock(measured: StepCosts, cluster: Machines, steps: int = 1) -> Any:
  """Returns the durations of jobs of so many steps. Those of several steps all
  take the mean."""
  times = measured.seconds if steps == 1 else (measured.mean,)
  rows = [[steps * slow * t for t in times] for slow in cluster.slowness]
  return durations.measured(rows, resample=True)


def _served(
  name: str, measured: StepCosts, cluster: Machines, workers: int, up: float,
  down: float, *, order: str = "asynchronous", steps: int = 1,
) -> Way:
  """Plays workers with a server over the network."""
  played = orders.start(
    *(order, clock(measured, cluster, steps)),
    workers=workers,
    network=cluster.network,
    sizes=play.fixed([up], [down]),
  )
  played.until(_ROUNDS * workers)
  every = 1 if order == "asynchronous" else workers
  stale = orders.staleness(played.trace(), every=every)
  speed = played.received * steps * measured.mean / played.now
  return Way(name, workers, speed, float(stale.mean()), int(stale.max()), steps)


def _meshed(measured: StepCosts, cluster: Machines, workers: int) -> Way:
  """Plays rounds without a server, and adds a ring's all-reduce to each."""
  alone = cluster._replace(network=Network())
  way = _served(
    MESH, measured, alone, workers, 0, 0, order="bulk_synchronous"
  )
  reducing = reduce_seconds(measured, cluster, workers)
  seconds = workers * measured.mean / way.speed + reducing
  return way._replace(speed=workers * measured.mean / seconds)


def reduce_seconds(
  measured: StepCosts, cluster: Machines, workers: int
) -> float:
  """Returns the seconds of a ring's all-reduce of a gradient."""
  link = costs.link(cluster.network.up, cluster.network.latency)
  return costs.seconds(costs.ring(measured.dense, workers), link)


def _enough(tried: Iterable[Way]) -> Way:
  """Returns the first that has nearly the speed of the fastest."""
  tried = list(tried)
  most = max(way.speed for way in tried)
  return next(way for way in tried if way.speed >= ENOUGH * most)


def ways(
  measured: StepCosts, cluster: Machines, training: StepRule
) -> tuple[Way, ...]:
  """Returns the ways of training, the simplest first, each with the fewest
  workers that give nearly its greatest speed."""
  counts = _counts(cluster.machines) if cluster.machines > 1 else []
  found = [Way(ONE, 1, 1.0)]
  if not counts:
    return tuple(found)

  def served(name, workers, coded, **options):
    # A worker receives the updates of all others since its last ticket.
    down = min(measured.dense, workers * measured.coded)
    up = measured.coded if coded[0] else measured.dense
    down = down if coded[1] else measured.dense
    return _served(name, measured, cluster, workers, up, down, **options)

  found.append(_enough(_meshed(measured, cluster, n) for n in counts))
  given = training.up is not None, training.down is not None
  found.append(_enough(served(ASYNCHRONOUS, n, given) for n in counts))
  if not any(given):
    found.append(_enough(served(CODED, n, (True, True)) for n in counts))
  order = built(local_recipe(training, cluster), training, 2).order
  found.append(
    _enough(
      served(LOCAL, n, (False, False), order=order, steps=steps)
      for steps in _LOCAL
      for n in counts
    )
  )
  return tuple(found)


def choose(
  found: Sequence[Way], measured: StepCosts, cluster: Machines
) -> Way:
  """Returns the first way that nothing is `WORTH` times as fast as; the first
  one, too, if starting the workers takes longer than they save."""
  most = max(way.speed for way in found)
  way = next(way for way in found if WORTH * way.speed >= most)
  if cluster.start + measured.alone / way.speed >= measured.alone:
    return found[0]
  return way
