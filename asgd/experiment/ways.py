"""Ways to train a config on several machines, measured and simulated.

    problem --measure--> StepCosts --+
    flags -------------> Machines ---+--find_ways--> Way, ... --choose--> Way

`measure` trains some steps on this machine. `find_ways` simulates the order of
each way of training (`asgd.orders.play`) with the measured durations. `choose`
selects the simplest way that is nearly as fast as the fastest.
`asgd.experiment.advice` gives the reasons.
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

WORTHWHILE_SPEEDUP = 1.25  # a less simple way must be this many times as fast
# The share of a way's greatest speed that its number of workers has to reach.
NEAR_FASTEST = 0.9
_MAX_STEPS, _MAX_SECONDS = 30, 5.0  # limits of the measured steps
_SIMULATED_ROUNDS = 40  # messages of each worker in the simulation of a way
_LOCAL_STEPS = 4, 16, 64  # local steps to choose from
_CODED_MESSAGES = 3  # messages that the size of a code is measured on
# Keys that a run may set for itself, so that a new run has to repeat them.
_REPEATED_KEYS = (
  *("batch_size", "clip_norm", "learning_rate_schedule"),
  *("compress", "compress_down", "durations"),
)

ONE_MACHINE, MESH, ASYNCHRONOUS = "one machine", "mesh", "asynchronous"
CODED, LOCAL = "coded messages", "local steps"


class Machines(NamedTuple):
  """The machines and links that may be used."""

  machines: int  # most workers
  network: Network  # in bytes per second, and seconds
  memory: float  # bytes of each machine
  start_seconds: float  # until the workers of a live run train
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
  repeated_options: dict[str, Any]  # options that a new run has to repeat
  up: Any  # codec of messages, or None
  down: Any  # codec of the server's updates, or None


class StepCosts(NamedTuple):
  """Measurements of a step on this machine."""

  seconds: tuple[float, ...]  # of warm steps on a batch
  batches: float  # of the whole run
  parameters: int
  dense: int  # bytes of a message, or of a ticket, without a codec
  coded: int  # bytes of a message with a codec
  residuals: int  # bytes that a step stores for its backward pass
  sharpness: float  # largest Hessian eigenvalue; NaN if it is not known

  @property
  def mean(self) -> float:
    """Mean seconds of a step."""
    return statistics.fmean(self.seconds)

  @property
  def one_machine_seconds(self) -> float:
    """Seconds of the whole run on one machine."""
    return self.batches * self.mean


class Way(NamedTuple):
  """A way of training, with the number of workers that suits it."""

  name: str
  workers: int
  speed: float  # batches in the time of one batch on one machine
  staleness: float = 0.0  # mean staleness of a message
  most_stale: int = 0  # largest staleness
  steps: int = 1  # batches of a message


# [1] Measuring.


def step_rule(run: schema.Run, config: Mapping[str, Any]) -> StepRule:
  """Reads how a run takes its steps. Raises ValueError if the recipe's
  messages are not gradients of all parameters."""
  if schema.makes_settings(run.recipe):
    raise ValueError(
      f"config.runs.{run.label} has the recipe {run.recipe!r}, whose messages"
      " are no gradients of all parameters: choose another run by"
      " --config.only, or simulate this one with config.network"
    )
  options = {**algorithms.options(run.recipe), **run.options}
  momentum, own_options = options.get("momentum", 0.0), {}
  optimizer = run.config["optimizer"]
  if optimizer:
    if optimizer != config["optimizer"]:
      own_options = {"optimizer": optimizer}
    momentum_or_none = optimizers.momentum_of(optimizers.named(optimizer))
    momentum = momentum_or_none or 0.0
    if momentum_or_none is not None:
      optimizer = None
  elif momentum:
    own_options = {"momentum": momentum}
  up, down = (
    run.config.get(key, config[key]) for key in ("compress", "compress_down")
  )
  for key in _REPEATED_KEYS:
    if run.config.get(key, config[key]) != config[key]:
      own_options[key] = _differing(run.config[key], config[key])
  rate = run.config["learning_rate"]
  return StepRule(rate, momentum, optimizer, own_options, up, down)


def _differing(value: Any, shared: Any) -> Any:
  """Returns a run's value of a key. Of a dict with the name that the config's
  dict has, it returns the items that differ: a run takes over the others."""
  dicts = value, shared
  if not all(isinstance(each, Mapping) for each in dicts):
    return value
  if value.get("name") != shared.get("name"):
    return value
  return {k: v for k, v in value.items() if v != shared.get(k)}


def optimizer_options(name: str, rule: StepRule) -> dict[str, Any]:
  """Returns the rule's momentum or optimizer as options of a recipe."""
  if rule.optimizer is not None:
    return {"optimizer": rule.optimizer}
  has_momentum = "momentum" in algorithms.options(name)
  return {"momentum": rule.momentum} if has_momentum else {}


def build_recipe(
  name: str, rule: StepRule, workers: int
) -> algorithms.Recipe:
  """Builds a recipe with the rule's momentum or optimizer."""
  options = optimizer_options(name, rule)
  return algorithms.build(name, rule.rate, workers, **options)


def message_codec(rule: StepRule) -> dict[str, Any]:
  """Returns the config's codec of messages, else a suitable one: with momentum
  it is DGC, which keeps the momentum at the workers."""
  if rule.up is not None:
    return dict(rule.up)
  if rule.momentum:
    return {"name": "dgc", "momentum": rule.momentum, "warm_up": 0.0}
  return {"name": "top_k"}


def measure(
  problem: problems.Problem, rule: StepRule, batches: float
) -> StepCosts:
  """Trains some steps on this machine, and measures them.

  Args:
    problem: the problem, with the batch size of the config.
    rule: how the config's first run takes steps.
    batches: the number of batches of the whole run.

  Returns:
    Measurements. The first step compiles, and is left out. The sharpness is
    that of the first parameters.
  """
  server = build_recipe("asgd", rule, 1).server()
  worker = worker_lib.gradient_worker(problem.loss)
  key, draw_batch = jax.random.key(0), problem.batches(0, 1)
  params = problem.init(key)

  @jax.jit
  def step(state, worker_state, batch):
    ticket = server.send(state, jnp.int32(0))
    worker_state, message, _ = worker.work(worker_state, ticket, batch, key)
    return server.receive(state, ticket, message)[0], worker_state

  state, worker_state = server.init(params), worker.init(params)
  seconds: list[float] = []
  while len(seconds) <= _MAX_STEPS:
    start_time = time.perf_counter()
    state, worker_state = step(state, worker_state, draw_batch(0, len(seconds)))
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - start_time)
    if len(seconds) > 3 and sum(seconds[1:]) > _MAX_SECONDS:
      break
  sharpness = math.nan
  if rule.optimizer is None:  # for others, no limit of stability is known
    estimate = diagnosis.make_sharpness(problem.loss, problem.probe)
    # At the first parameters: training at the rate of one machine would raise
    # the sharpness until this rate is at its limit of stability.
    sharpness = estimate(params)

  def loss(weights, batch):
    return problem.loss(base.with_weights(params, weights), batch, key)[0]

  weights = base.weights_of(params)
  return StepCosts(
    tuple(seconds[1:]),
    batches,
    sum(leaf.size for leaf in jax.tree.leaves(weights)),
    wire.layout(params).nbytes,
    _coded_bytes(problem, message_codec(rule), params),
    memory.residual_bytes(loss, weights, draw_batch(0, 0)),
    sharpness,
  )


def _coded_bytes(
  problem: problems.Problem, section: Mapping[str, Any], params: base.Params
) -> int:
  """Returns the bytes of the largest of _CODED_MESSAGES packed messages."""
  codec = compression.named(**section)
  codec = compression.fitted(codec, 1, problem.batches_per_epoch)
  worker = compression.compressed(
    worker_lib.gradient_worker(problem.loss), codec
  )
  server = algorithms.build("asgd", 0.1, 1).server()
  ticket = server.send(server.init(params), jnp.int32(0))
  worker_state, draw_batch = worker.init(params), problem.batches(0, 1)
  sizes = []
  work, layout = jax.jit(worker.work), compression.layout(codec, params)
  for job in range(_CODED_MESSAGES):
    worker_state, message, _ = work(
      worker_state, ticket, draw_batch(0, job), jax.random.key(job)
    )
    code = jax.tree.map(np.asarray, message)
    sizes.append(len(bytes(packing.pack(layout, code))))
  return max(sizes)


def slowness(
  section: Mapping[str, Any], machines: int, *, draws: int = 32
) -> tuple[float, ...]:
  """Returns the mean duration of each of a config's machines, divided by their
  median. This machine counts as the median one."""
  times = clocks.build(**{"seed": 0, **section})
  mean_seconds = [
    statistics.fmean(itertools.islice(times.stream(worker), draws))
    for worker in range(machines)
  ]
  median = statistics.median_low(mean_seconds)
  return tuple(mean / median for mean in mean_seconds)


# [2] Ways of training, simulated.


def local_recipe(rule: StepRule, cluster: Machines) -> str:
  """Returns the recipe of local steps that suits the optimizer and machines."""
  if are_unequal(cluster):
    return "fedasync"  # no worker waits for another
  return "model_averaging" if rule.optimizer is None else "diloco"


def are_unequal(cluster: Machines) -> bool:
  """Whether the machines differ enough to make rounds slow."""
  return cluster.spread >= WORTHWHILE_SPEEDUP


def _worker_counts(machines: int) -> list[int]:
  """Returns numbers of workers to try: 2, 3, 4, 6, 8, 12, ... and all."""
  powers = {n for i in range(1, 20) for n in (2**i, 3 * 2 ** (i - 1))}
  return sorted({n for n in powers if n < machines} | {machines})


def job_durations(
  step_costs: StepCosts, cluster: Machines, steps: int = 1
) -> Any:
  """Returns the durations of jobs of `steps` steps. Jobs of several steps all
  take the mean time."""
  times = step_costs.seconds if steps == 1 else (step_costs.mean,)
  rows = [[steps * factor * t for t in times] for factor in cluster.slowness]
  return durations.measured(rows, resample=True)


def _play_server(
  name: str, step_costs: StepCosts, cluster: Machines, workers: int, up: float,
  down: float, *, order: str = "asynchronous", steps: int = 1,
) -> Way:
  """Simulates workers with a server over the network."""
  simulation = orders.start(
    *(order, job_durations(step_costs, cluster, steps)),
    workers=workers,
    network=cluster.network,
    sizes=play.fixed([up], [down]),
  )
  simulation.until(_SIMULATED_ROUNDS * workers)
  messages_per_update = 1 if order == "asynchronous" else workers
  staleness = orders.staleness(simulation.trace(), every=messages_per_update)
  speed = simulation.received * steps * step_costs.mean / simulation.now
  return Way(
    name, workers, speed, float(staleness.mean()), int(staleness.max()), steps
  )


def _play_mesh(step_costs: StepCosts, cluster: Machines, workers: int) -> Way:
  """Simulates rounds without a network; adds the time of a ring's all-reduce to
  each round."""
  without_network = cluster._replace(network=Network())
  way = _play_server(
    MESH, step_costs, without_network, workers, 0, 0, order="bulk_synchronous"
  )
  reducing = reduce_seconds(step_costs, cluster, workers)
  seconds = workers * step_costs.mean / way.speed + reducing
  return way._replace(speed=workers * step_costs.mean / seconds)


def reduce_seconds(
  step_costs: StepCosts, cluster: Machines, workers: int
) -> float:
  """Returns the seconds of a ring's all-reduce of a gradient."""
  link = costs.link(cluster.network.up, cluster.network.latency)
  return costs.seconds(costs.ring(step_costs.dense, workers), link)


def _fewest_workers(ways: Iterable[Way]) -> Way:
  """Returns the first of some ways that is nearly as fast as the fastest."""
  ways = list(ways)
  max_speed = max(way.speed for way in ways)
  return next(way for way in ways if way.speed >= NEAR_FASTEST * max_speed)


def find_ways(
  step_costs: StepCosts, cluster: Machines, rule: StepRule
) -> tuple[Way, ...]:
  """Returns the ways of training, the simplest first, each with the fewest
  workers that give nearly its greatest speed."""
  counts = _worker_counts(cluster.machines) if cluster.machines > 1 else []
  candidates = [Way(ONE_MACHINE, 1, 1.0)]
  if not counts:
    return tuple(candidates)

  # `coded`: whether messages, and whether the server's updates, are coded.
  def play_server(name, workers, coded, **options):
    # A worker receives the updates of all others since its last ticket.
    down = min(step_costs.dense, workers * step_costs.coded)
    up = step_costs.coded if coded[0] else step_costs.dense
    down = down if coded[1] else step_costs.dense
    return _play_server(name, step_costs, cluster, workers, up, down, **options)

  candidates.append(
    _fewest_workers(_play_mesh(step_costs, cluster, n) for n in counts)
  )
  has_codecs = rule.up is not None, rule.down is not None
  candidates.append(
    _fewest_workers(play_server(ASYNCHRONOUS, n, has_codecs) for n in counts)
  )
  if not any(has_codecs):
    candidates.append(
      _fewest_workers(play_server(CODED, n, (True, True)) for n in counts)
    )
  order = build_recipe(local_recipe(rule, cluster), rule, 2).order
  candidates.append(
    _fewest_workers(
      play_server(LOCAL, n, (False, False), order=order, steps=steps)
      for steps in _LOCAL_STEPS
      for n in counts
    )
  )
  return tuple(candidates)


def choose(
  candidates: Sequence[Way], step_costs: StepCosts, cluster: Machines
) -> Way:
  """Returns the first way such that no other is WORTHWHILE_SPEEDUP times as
  fast; the first of all if starting the workers takes longer than they save."""
  max_speed = max(way.speed for way in candidates)
  way = next(
    way for way in candidates if WORTHWHILE_SPEEDUP * way.speed >= max_speed
  )
  one_machine = step_costs.one_machine_seconds
  if cluster.start_seconds + one_machine / way.speed >= one_machine:
    return candidates[0]
  return way
