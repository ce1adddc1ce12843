"""The parts that simulated and live runs of a server share.

These are sections of a config, and the plan of a run for one number of workers:
recipe, server, worker, order and number of messages.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, Self

import jax

from asgd import (
  algorithms,
  base,
  compression,
  diagnosis,
  optimizers,
  orders,
  own_writes,
  problems,
  sharding,
  simulator,
  stacking,
)
from asgd import allocation as allocation_lib
from asgd import server as server_lib
from asgd import worker as worker_lib
from asgd.experiment import build_cache, checks, storage
from asgd.experiment.engines import (
  allocations,
  clocks,
  device_rooms,
  learning_rates,
  networks,
  server_orders,
  traffic,
  worker_devices,
)
from asgd.experiment.schema import NamedSection, Run, Setting
from asgd.orders import durations, play, protocol
from asgd.orders import network as network_lib

SECTIONS: dict[str, Any] = {
  "order": NamedSection(
    # Keys that a run gets from its cell cannot be options.
    {"name": "asynchronous"}, ("durations", "workers", "messages", "delay")
  ),
  "durations": NamedSection({"name": "homogeneous"}),
  # Messages of a larger staleness are dropped.
  "gate": {
    "max_staleness": Setting(None, checks.optional(checks.whole_number(0)))
  },
  "allocation": allocations.SECTION,
  "memory": device_rooms.SECTION,
  **networks.SECTIONS,
  **server_orders.SECTIONS,
  **traffic.SECTIONS,
}


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as an object
class ServerPlan:
  """The parts that the cells of a run with one number of workers share."""

  run: Run
  workers: int
  dataset: Any
  problem: problems.Problem
  recipe: algorithms.Recipe  # with its schedule
  server: base.Server  # with the codec of its messages
  worker: base.Worker  # without the codec; see `coded_worker`
  order: dict[str, Any]  # name and options of the protocol
  learning_rate: float  # the peak
  schedule: Any  # float, or update -> learning rate
  messages: int  # received in one cell
  codec_down: compression.Codec | None = None  # of updates
  # Shares of the work; None: all are equal, or they are not known yet.
  allocation: allocation_lib.Allocation | None = None

  @property
  def batches(self) -> int:
    """Batches in one message."""
    return self.recipe.steps

  @property
  def devices(self) -> simulator.WorkerDevices:
    """The devices of each worker."""
    # Axis 0 of a job with several batches counts the batches.
    axis = int(self.recipe.steps > 1)
    return worker_devices.of_run(self.run, axis=axis)

  @classmethod
  def batches_of_update(cls, recipe: algorithms.Recipe, workers: int) -> int:
    """Returns the batches in one update, over all workers."""
    del workers
    return recipe.every * recipe.push_every * recipe.steps

  @classmethod
  def with_codec(
    cls, recipe: algorithms.Recipe, codec: compression.Codec | None
  ) -> tuple[algorithms.Recipe, compression.Codec | None]:
    """Returns (recipe, codec of the messages to a server). In a `PeerPlan` the
    peers of the recipe use the codec instead."""
    return recipe, codec

  def check(self) -> None:
    """Raises ValueError for an order that does not fit the rest of the plan."""
    server_orders.check(self)
    device_rooms.check(self)

  @functools.cached_property
  def _job_shapes(self) -> simulator.JobShapes:
    """Shapes for one program that simulates the jobs of all cells."""
    # Shapes of the parameters: nothing is allocated.
    shapes = jax.eval_shape(self.problem.init, jax.random.key(0))
    messages = self.messages * len(self.run.config["seeds"])
    # Equal jobs of all workers allow a faster engine.
    batch, even = self.job_batches(0)(0, 0), self.allocation is None
    return simulator.JobShapes(shapes, batch, messages, even)

  def simulator(self, trace: base.Trace) -> simulator.Choice:
    """Returns the engine that simulates a cell in an order. Equal engines are
    compiled once."""
    with checks.prefix_errors("simulator"):
      return simulator.choose(
        *(self.server, self.coded_worker(), trace, self._job_shapes),
        asked=self.run.config["simulator"]["engine"],
      )

  def coded_worker(
    self, split: sharding.ShardPlan | None = None
  ) -> base.Worker:
    """Returns the worker, which encodes messages with the server's codec. If it
    keeps tickets, it reads its own writes. `split`: the division of messages
    over shards, if each part is encoded separately."""
    worker, server = self.worker, self.server
    if server.codec is not None:
      worker = traffic.compressed_worker(worker, server.codec, split)
    if self.keeps:
      worker = own_writes.own_writes(worker, server, split)
    return worker

  @functools.cached_property
  def keeps(self) -> bool:
    """Whether jobs may share a ticket."""
    if server_orders.own_order(self.run) is None:
      return server_orders.keeps(self.order)
    # Whether a user's order has KEEP rows, only a trace shows; seeds agree.
    trace = self.trace(self.run.config["seeds"][0])
    return bool((trace.action == base.KEEP).any())

  @functools.cached_property
  def curvature_limit(self) -> float:
    """Largest curvature at which the recipe is stable along its order, at the
    peak learning rate; NaN if that is not known."""
    # If sizes of codes decide the order, no trace is known before the run.
    is_known = self.network is None or not networks.has_coded_sizes(self)
    has_own_order = server_orders.own_order(self.run) is not None
    if self.run.given_recipe is not None or has_own_order or not is_known:
      return math.nan
    # The limit is measured with workers that send one gradient for each ticket;
    # for other workers it is not known.
    if self.recipe.worker is not None:
      return math.nan
    # The limit holds for the order after a warm start.
    warm_start_keys = "warm_start", "stages"
    order = {
      key: v for key, v in self.order.items() if key not in warm_start_keys
    }
    without_warm_start = dataclasses.replace(self, order=order)
    rate = self.learning_rate
    # 40 messages of each worker: by then the staleness has settled.
    order_trace = without_warm_start.trace(0, 40 * self.workers)
    if (order_trace.action == base.KEEP).any():
      return math.nan
    optimizer = self.run.config["optimizer"]
    tx = optimizer and optimizers.named(optimizer)
    if tx and optimizers.momentum_of(tx) is None:
      return math.nan  # the stability of other optimizers depends on more
    recipe = build_recipe(self.run, self.workers, rate)
    # Equal orders have equal limits, whatever their times are.
    rows = storage.digest([order_trace.worker, order_trace.action])
    return _limit_cache.get(
      lambda: diagnosis.curvature_limit(
        recipe, order_trace, learning_rate=rate
      ),
      *(rate, recipe, rows),
    )

  def trace(self, seed: int, messages: int | None = None) -> base.Trace:
    """Returns the order of a cell, which follows from config and seed, for
    `messages` messages (None: all). Over a network they have dense sizes."""
    n_messages = self.messages if messages is None else messages
    own_order = self._own_trace(seed, n_messages)
    if own_order is not None:
      # A user's order has given times, so no network delays it.
      return own_order
    if self.network is not None:
      order = self.over_network(seed, networks.dense_sizes(self))
      order.until(n_messages)
      return order.trace()
    return orders.build(
      durations=self._durations(seed),
      workers=self.workers,
      messages=n_messages,
      **self.order,
    )

  def _own_trace(self, seed: int, messages: int) -> base.Trace | None:
    """Returns the user's order with `messages` messages; None if the user gave
    none."""
    return server_orders.own_trace(
      *(self.run, self._durations(seed)),
      workers=self.workers,
      messages=messages,
      fetch_every=self.recipe.fetch_every,
    )

  @functools.cached_property
  def network(self) -> network_lib.Network | None:
    """Network of the run; None if messages take no time."""
    return networks.run_network(self.run)

  def over_network(self, seed: int, sizes: play.Sizes) -> play.Play:
    """Returns the order of a cell over its network, before its first event."""
    return orders.start(
      durations=self._durations(seed),
      workers=self.workers,
      network=self.network,
      sizes=sizes,
      **self.order,
    )

  def traces(
    self, seed: int
  ) -> tuple[list[base.Trace], network_lib.LinkUse | None]:
    """Returns (the order of each shard, the use of the network), for shards
    that are out of step. The use is None without a network."""
    server = self.run.config["server"]
    if server["reads"]:  # only the reads are out of step
      return orders.partial_reads.by_block(
        self.trace(seed), blocks=server["shards"], share=server["reads"]
      ), None
    rules, times = self.rules(), self._durations(seed)
    counts = {"workers": self.workers, "messages": self.messages}
    if self.network is not None:
      nbytes = networks.shard_bytes(self, self.network.shards)
      return orders.shards.over_network(
        rules, times, self.network, nbytes=nbytes, **counts
      )
    delays = server_orders.delays(self.run, seed)
    traces = orders.shards.out_of_step(
      rules, times, delays, shards=server["shards"], **counts
    )
    return traces, None

  def _durations(self, seed: int) -> durations.Durations:
    """Returns the durations of jobs."""
    return clocks.job_durations(
      self.run, seed, self.recipe.steps, self.allocation
    )

  def of_seed(self, seed: int) -> Self:
    """Returns the plan of a simulated cell. An allocation by speed uses the
    durations that are drawn with the seed."""
    if not allocations.awaits_speeds(self):
      return self
    # A worker's mean time, over as many jobs as a live cell would time.
    times, jobs = self._durations(seed), self.run.config["allocation"]["jobs"]
    seconds = [
      math.fsum(itertools.islice(times.stream(worker), jobs)) / jobs
      for worker in range(self.workers)
    ]
    return allocations.with_shares_by_speed(self, seconds)

  def job_batches(self, seed: int) -> stacking.NamedBatches:
    """Returns the function (worker, job) -> batches of the job. It raises
    ValueError, with worker and job, for any error of a user's batches."""
    return stacking.NamedBatches(self._job_batches(seed))

  def _job_batches(self, seed: int) -> problems.Batches:
    """Returns the batches of jobs, with each worker's share."""
    steps, problem = self.recipe.steps, self.problem
    allocation = self.allocation
    if allocation is None:
      batches = problem.batches(seed, self.workers)
      return stacking.job_batches(batches, steps)
    if allocations.changes_batches(self.run):
      # The largest batch is drawn; each worker uses a part of it.
      problem = problem.with_batch_size(max(allocation.batch_sizes))
    return allocation_lib.job_batches(
      problem.batches(seed, self.workers), allocation, stacked=steps > 1
    )

  def rules(self) -> protocol.Rules:
    """Returns the rules of a live run's order; ValueError if it has none."""
    return server_orders.rules(self.order, self.recipe.every, self.workers)


def check(run: Run) -> None:
  """Checks the settings that are used before a plan is made."""
  server_orders.check_settings(run)
  networks.check(run)
  with checks.prefix_errors("durations", tuple(run.config["durations"])):
    clocks.check(run)


_recipe_cache = build_cache.BuildCache()
_limit_cache = build_cache.BuildCache(256)


def build_recipe(
  run: Run, workers: int, learning_rate: Any
) -> algorithms.Recipe:
  """Builds the recipe of a run, adapted to the config's order. Equal runs share
  one recipe."""

  def make():
    recipe = run.make_recipe(learning_rate, workers)
    return server_orders.in_order(run, recipe, workers)

  if run.given_recipe is not None:
    return make()  # a given recipe is an object already
  settings = [run.config[key] for key in ("optimizer", "clip_norm", "order")]
  cache_key = [run.recipe, run.options, workers, *settings]
  return _recipe_cache.get(make, cache_key, learning_rate)


def _make_server(
  run: Run,
  problem: problems.Problem,
  recipe: algorithms.Recipe,
  order: Mapping[str, Any],
) -> base.Server:
  """Returns the server of a recipe. Late messages of backup workers count as
  too stale."""
  backup = order["name"] == "backup_workers"  # drops late messages
  bound = 0 if backup else run.config["gate"]["max_staleness"]
  return _cached_server(recipe, bound, problem.statistics_decay)


@functools.lru_cache(maxsize=32)
def _cached_server(recipe, bound, statistics_decay):
  gate: server_lib.Gate = server_lib.accept_all
  if bound is not None:
    gate = server_lib.max_staleness(bound)
  return recipe.server(gate=gate, statistics_decay=statistics_decay)


# All algorithms that send plain gradients share a Worker and a compilation.
_gradient_worker = functools.lru_cache(maxsize=8)(worker_lib.gradient_worker)
_weighted_worker = functools.lru_cache(maxsize=8)(worker_lib.weighted)


def _make_worker(
  run: Run, recipe: algorithms.Recipe, problem: problems.Problem
) -> base.Worker:
  """Returns the worker of a recipe. If the workers' batches differ in size, it
  weights its gradients by them."""
  loss, in_parts = problem.loss, device_rooms.worker_of(run, recipe, problem)
  if in_parts is not None:
    return in_parts
  if recipe.worker is None and recipe.steps == 1:
    worker = _gradient_worker(loss, recipe.at_worker)
  else:
    worker = recipe.make_worker(loss)
  if recipe.mixes or not allocations.changes_batches(run):
    return worker
  return _weighted_worker(worker, run.config["batch_size"])


def plan(
  experiment: Any,
  run: Run,
  workers: int,
  plan_class: type[ServerPlan] = ServerPlan,
) -> Any:
  """Builds and checks the plan of a run with a number of workers, an object of
  `plan_class`."""
  problem = experiment.problem_of(run)
  # [1] The schedule counts updates, so it needs the batches of one update from
  # the recipe. So the recipe is built twice: with the peak, then the schedule.
  run = server_orders.with_protocol(run, workers)
  peak = float(run.config["learning_rate"])
  peak_recipe = run.given_recipe or build_recipe(run, workers, peak)
  batches = plan_class.batches_of_update(peak_recipe, workers)
  rate = learning_rates.schedule(
    *(run, problem),
    peak=peak,
    batches=batches,
    start=peak / workers,  # of the warm-up
    steps=peak_recipe.steps,
  )
  if run.given_recipe is not None and run.given_recipe.build is None:
    rate = peak = math.nan  # a given recipe has an unknown rate
  recipe = build_recipe(run, workers, rate)
  # [2] Codecs, order, and length.
  codec, codec_down = traffic.run_codecs(
    run, experiment.dataset, problem, recipe, workers
  )
  recipe, codec = plan_class.with_codec(recipe, codec)
  recipe = traffic.with_encoded_updates(run, recipe, codec_down, problem)
  order = server_orders.plan_order(run, problem, recipe)
  batches_of_cell = learning_rates.budget_batches(run, problem)
  messages = round(batches_of_cell / recipe.steps)
  if run.given_recipe is None:  # else a call has given the number of messages
    # All workers send equally many messages.
    messages = max(messages // workers, 1) * workers
  checks.check_message_count(run.config, messages)
  # [3] The plan, and checks that need all of it.
  result = plan_class(
    run=run,
    workers=workers,
    dataset=experiment.dataset,
    problem=problem,
    recipe=recipe,
    server=traffic.decoding_server(
      run, _make_server(run, problem, recipe, order), codec, problem
    ),
    codec_down=codec_down,
    worker=_make_worker(run, recipe, problem),
    order=order,
    learning_rate=peak,
    schedule=rate,
    messages=messages,
    allocation=allocations.configured_allocation(run, recipe, problem, workers),
  )
  server_orders.check_length(result, round(batches_of_cell))
  _try_seeds(result)
  result.check()
  if problem.sequential:
    _check_sequential(result)
  return result


def _try_seeds(plan: ServerPlan) -> None:
  """Raises errors of a user's batches and orders, before the first cell."""
  with checks.prefix_errors("order", tuple(plan.run.config["order"])):
    for seed in plan.run.config["seeds"]:
      plan.problem.batches(seed, plan.workers)
      # The first message of each worker is enough to find such errors.
      trace = plan.of_seed(seed).trace
      trace(seed, messages=min(plan.workers, plan.messages))


def _check_sequential(plan: ServerPlan) -> None:
  """Raises ValueError for a run that does not ask for batches in the order of
  the jobs, if iterators yield them."""
  # An iterator yields each batch once, in a fixed order.
  reasons = {
    "config.allocation, which cuts batches": allocations.changes_batches(
      plan.run
    )
    or allocations.awaits_speeds(plan)
    or plan.allocation is not None,
    "codes over a network, which are computed ahead": (
      plan.network is not None and networks.has_coded_sizes(plan)
    ),
    "shards out of step": server_orders.out_of_step(plan.run),
    "the order with_stops, which skips jobs": plan.order["name"]
    == "with_stops",
  }
  for reason, applies in reasons.items():
    if applies:
      raise ValueError(
        f"iterators as data are not for {reason}: leave it out, or give a"
        " function (worker, job) -> batch"
      )
