"""Strategies to train a model on some devices, and the cost of each.

From a Workload, Hardware and TrainingOptions `find` makes a Strategy for each
way to divide the work. A Strategy has the bytes of a device, and the seconds of
a step in which a device computes, sends and waits.

Assumptions:

  - `asgd.parallel.costs` gives the times. Each device has one link to all other
    devices, and maybe a faster link inside a node. Without `overlap` a device
    sends nothing while it computes;
  - `asgd.parallel.memory` gives the bytes. All layers have equal sizes: the
    stages of a pipeline differ by the layers that cannot be divided evenly;
  - each strategy takes the fastest microbatch that fits, unless the options
    give one. The batch size counts the examples of all devices;
  - ZeRO-2 scatters gradients, and ZeRO-3 gathers weights twice, for each
    microbatch;
  - an asynchronous step is a message of each worker. Parameters and the
    recipe's state are in float32, on shards at the workers;
  - batch times vary around their mean: a synchronous step takes the expected
    maximum.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from asgd.parallel import costs, memory, meshes, waiting
from asgd.parallel.workloads import TrainingOptions, Workload

ONE = "one device"  # name of a strategy
_MAX_HYBRIDS = 3  # strategies of several axes that `find` returns
# Share of the backward in a step's computing time; it can overlap sending.
_BACKWARD = 2 / 3


class Hardware(NamedTuple):
  """Devices and their links."""

  devices: int
  memory: float  # bytes of a device
  flops: float  # operations per second of a device
  far: costs.LinkSpeed  # between any two devices
  node: int = 1  # devices of a node
  near: costs.LinkSpeed | None = None  # inside a node; None: as `far`

  def link(self, devices: int) -> costs.LinkSpeed:
    """Returns the slowest link among `devices` neighbouring devices."""
    if self.near is None or devices > self.node:
      return self.far
    return self.near


class Strategy(NamedTuple):
  """A way to train, and its cost."""

  name: str
  fits: bool
  state: float  # bytes of a device: weights, gradients, optimizer, versions
  activations: float  # bytes of a device
  microbatch: int
  compute: float  # seconds of a step
  communication: float  # seconds in which a device sends and does not compute
  waiting: float  # seconds of waiting for the slowest device, or in a bubble
  stale: bool = False  # whether gradients are taken at older weights

  @property
  def bytes(self) -> float:
    """Bytes of a device."""
    return self.state + self.activations

  @property
  def seconds(self) -> float:
    """Seconds of a step."""
    return self.compute + self.communication + self.waiting


class _Division(NamedTuple):
  """The division of a synchronous step, or of a pipeline without a flush."""

  name: str
  data: int = 1  # devices that have the same part of the model
  tensor: int = 1  # devices that share each layer
  stages: int = 1  # stages of a pipeline
  zero: int = 0  # stage of ZeRO among `data`
  versions: int = 1  # versions of the weights in memory
  flush: bool = True  # whether the pipeline waits for the end of a step
  least: int = 1  # microbatches of a step, at the least
  reduce: Callable[[float], float] | None = None  # bytes -> s; None: a ring


class _Planner(NamedTuple):
  """Makes strategies for one workload, hardware and set of options."""

  work: Workload
  hardware: Hardware
  options: TrainingOptions

  @property
  def precision(self) -> memory.Precision:
    return memory.PRECISIONS[self.options.precision]

  def microbatches(self, data: int) -> list[int]:
    """Returns the microbatch sizes that divide the examples of each of `data`
    parts of a batch; none if `data` does not divide the batch."""
    examples, remainder = divmod(self.options.batch, data)
    sizes = _divisors(examples)
    if self.options.microbatch is not None:
      sizes = [self.options.microbatch]
    if remainder:
      return []
    return [size for size in sizes if examples % size == 0]

  def compute_seconds(self, devices: int) -> float:
    """Returns the mean seconds in which a device computes its part of a step.
    """
    flops = self.work.flops
    if self.options.activations == "full":
      flops += self.work.recompute_flops
    return self.options.batch * flops / (devices * self.hardware.flops)

  def strategy(
    self, name: str, state: float, activations: float, *others: Any
  ) -> Strategy:
    """Returns a Strategy, which fits if the device has memory for its bytes;
    `others` are the fields from `microbatch` on."""
    fits = state + activations <= self.hardware.memory
    return Strategy(name, fits, state, activations, *others)

  def make(self, name: str, **parts: Any) -> Strategy | None:
    """Returns a synchronous strategy, or a pipeline without a flush, given
    fields of _Division; None if they do not divide the batch."""
    division = _Division(name, **parts)
    most = self.options.batch // division.data // division.least
    sizes = [n for n in self.microbatches(division.data) if n <= most]
    return _smallest_cost(self._cost(division, micro) for micro in sizes)

  def _cost(self, division: _Division, micro: int) -> Strategy:
    """Returns the strategy of a division with microbatches of `micro`
    examples."""
    work, options = self.work, self.options
    _, data, tensor, stages, zero, versions, flush, *_ = division
    devices, count = data * tensor * stages, options.batch // data // micro
    far = self.hardware.link(devices)
    # [1] Bytes. The stage with most layers takes most time and memory: `uneven`
    # is its share of the layers, divided by an equal share.
    uneven = math.ceil(work.layers / stages) * stages / work.layers
    bytes_of_state = memory.state(
      *(work.parameters, options.optimizer, options.precision),
      zero=zero,
      data=data,
      tensor=tensor,
      stages=stages,
      versions=versions,
    )
    state = uneven * bytes_of_state.total
    if zero == 3:  # the weights of one layer are whole
      state += work.largest * self.precision.weights / tensor
    # 1F1B: the first stage holds one microbatch for each stage.
    in_flight = min(stages, count) if flush else stages
    activations = uneven * in_flight / stages * work.activations(micro, tensor)
    # [2] Seconds in which a device computes, and in which it waits: for the
    # slowest device, and in the bubble of S - 1 microbatches. Without a flush
    # it does not wait.
    compute, wait_seconds = uneven * self.compute_seconds(devices), 0.0
    if flush:
      wait_seconds = (
        waiting.expected_slowest(devices, variation=options.variation) - 1
      )
      wait_seconds = wait_seconds * compute + (stages - 1) * (compute / count)
    # [3] Seconds in which a device of the stage with most layers sends.
    part = work.parameters * uneven / (tensor * stages)
    sending = self._reduce_seconds(division, part, count, far)
    if options.overlap:
      sending = max(sending - _BACKWARD * compute, 0.0)
    if tensor > 1:
      sending += self._tensor_seconds(division, micro, count)
    if stages > 1:  # stages send activations and their gradients
      turns = count + stages - 2 if flush else count
      stream = work.boundary_bytes * micro / tensor
      sending += 2 * turns * (far.latency + stream / far.bandwidth)
    times = compute, sending, wait_seconds
    return self.strategy(
      division.name, state, activations, micro, *times, not flush
    )

  def _reduce_seconds(
    self, division: _Division, part: float, count: int, link: costs.LinkSpeed
  ) -> float:
    """Returns the seconds in which replicas send gradients and weights of
    `part` parameters, in a step of `count` microbatches."""
    gradients = part * self.precision.gradients
    if division.reduce is not None:
      return division.reduce(gradients)
    scatter, gather = (
      costs.seconds(costs.ring_reduce_scatter(size, division.data), link)
      for size in (gradients, part * self.precision.weights)
    )
    seconds_of_stage = (  # by the stage of ZeRO
      costs.seconds(costs.ring(gradients, division.data), link),
      scatter + gather,
      count * scatter + gather,
      count * (scatter + 2 * gather),
    )
    return seconds_of_stage[division.zero]

  def _tensor_seconds(
    self, division: _Division, micro: int, count: int
  ) -> float:
    """Returns the seconds in which tensor parallel devices reduce
    activations."""
    work, tensor = self.work, division.tensor
    assert work.gpt is not None  # only a GPT is split into tensors
    ring = costs.ring(work.boundary_bytes * micro, tensor)
    reduce_seconds = costs.seconds(ring, self.hardware.link(tensor))
    # All-reduces of a block and microbatch: 2 in the forward, 2 in the
    # backward, and 2 in a forward that is computed again.
    times = 6 if self.options.activations == "full" else 4
    blocks = math.ceil(work.gpt.depth / division.stages)
    return count * times * blocks * reduce_seconds


def _smallest_cost(candidates: Iterable[Strategy | None]) -> Strategy | None:
  """Returns the fastest strategy that fits; if none fits, the smallest. Of
  equal strategies it returns the one with the largest microbatch."""

  def order(strategy):
    cost = strategy.seconds if strategy.fits else strategy.bytes
    return not strategy.fits, cost, -strategy.microbatch

  return min(filter(None, candidates), key=order, default=None)


def _data_strategies(plan: _Planner) -> Iterator[Strategy | None]:
  """Yields the data parallel strategies."""
  hardware, options, work = plan.hardware, plan.options, plan.work
  count = hardware.devices
  link = hardware.link(count)
  # [1] Each all-reduce, on one kind of link. A device has one link, and a
  # bidirectional ring needs two.
  for kind, cost in costs.COSTS.items():
    if kind == "bidirectional_ring":
      continue
    title = f"data, {kind.replace('_', ' ')}"
    if kind == "parameter_server":
      title += f", {options.shards or count} shards"
      cost = functools.partial(cost, shards=options.shards)

    def reduce(size, cost=cost):
      return costs.seconds(cost(size, count), link)

    yield plan.make(title, data=count, reduce=reduce)
  # [2] Rings on two levels, if there are several equal nodes.
  if 1 < hardware.node < count and count % hardware.node == 0:
    near = hardware.near or hardware.far

    def reduce_levels(size):
      inside, between = costs.hierarchical(
        size, hardware.node, count // hardware.node
      )
      far = costs.seconds(between, hardware.far)
      return costs.seconds(inside, near) + far

    yield plan.make("data, hierarchical", data=count, reduce=reduce_levels)
  # [3] Poseidon's factors, if its rule prefers them for any dense layer.
  examples = options.batch // count
  if any(
    costs.prefers_factors(d.rows * examples, d.inputs, d.outputs, count)
    for d in work.dense
  ):
    grain = plan.precision.gradients

    def reduce_hybrid(size):
      """Returns the seconds of Poseidon's hybrid communication."""
      dense = [(d.inputs, d.outputs) for d in work.dense]
      others = size - grain * sum(m * n for m, n in dense)
      rows = work.dense[0].rows * examples
      cost = costs.hybrid(dense, others, rows, count, grain=grain)
      return costs.seconds(cost, link)

    title = "data, sufficient factors"
    yield plan.make(title, data=count, reduce=reduce_hybrid)
  # [4] ZeRO.
  for zero in (1, 2, 3):
    yield plan.make(f"data, ZeRO-{zero}", data=count, zero=zero)


def _model_strategies(plan: _Planner) -> Iterator[Strategy | None]:
  """Yields the model parallel strategies on all devices."""
  count, work = plan.hardware.devices, plan.work
  if work.gpt is not None and work.gpt.heads % count == 0:
    yield plan.make(f"tensor {count}", tensor=count)
  if count <= work.layers:
    yield plan.make(f"pipeline {count}, 1F1B", stages=count)
    # Without a flush: PipeDream stashes a version for each stage, 2BW two. An
    # update of 2BW has a microbatch for each stage, or more.
    for kind, versions, least in (("PipeDream", count, 1), ("2BW", 2, count)):
      parts = dict(stages=count, versions=versions, least=least, flush=False)
      yield plan.make(f"pipeline {count}, {kind}", **parts)


def _divisors(count: int) -> list[int]:
  low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
  return sorted({*low, *(count // n for n in low)})


def _hybrid_strategies(plan: _Planner) -> list[Strategy]:
  """Returns the best of data x tensor x pipeline."""
  hardware, work = plan.hardware, plan.work
  hybrids: list[Strategy | None] = []
  count = hardware.devices
  for tensor, stages in itertools.product(_divisors(count), repeat=2):
    if count % (tensor * stages) or stages > work.layers:
      continue
    data = count // (tensor * stages)
    if sum(n > 1 for n in (data, tensor, stages)) < 2:
      continue  # one axis alone is no hybrid
    if tensor > 1 and (work.gpt is None or work.gpt.heads % tensor):
      continue
    # Tensor parallel devices send in every layer: they stay inside a node.
    if hardware.near is not None and tensor > hardware.node:
      continue
    axes = {"data": data, "tensor": tensor, "pipe": stages}
    name = meshes.text({axis: n for axis, n in axes.items() if n > 1})
    parts = dict(data=data, tensor=tensor, stages=stages)
    candidates = [plan.make(name, **parts)]
    if data > 1:
      candidates.append(plan.make(f"{name}, ZeRO-1", **parts, zero=1))
    hybrids.append(_smallest_cost(candidates))
  sorted_hybrids = sorted(
    filter(None, hybrids),
    key=lambda strategy: (not strategy.fits, strategy.seconds),
  )
  return sorted_hybrids[:_MAX_HYBRIDS]


def _asynchronous_strategies(plan: _Planner) -> Iterator[Strategy | None]:
  """Yields a strategy with a parameter server for each recipe."""
  work, options, hardware = plan.work, plan.options, plan.hardware
  count, bytes_of_number = hardware.devices, plan.precision
  shards = options.shards or count
  compute = plan.compute_seconds(count)
  size = float(
    work.parameters * max(bytes_of_number.weights, bytes_of_number.gradients)
  )
  speed = waiting.asynchronous_throughput(
    count, compute=compute, size=size, link=hardware.link(count), shards=shards
  )
  # A step is N messages. The time in which a device does not compute counts as
  # communication.
  times = compute, count / speed - compute, 0.0
  for recipe in options.recipes:
    # Bytes per parameter; the server's own parameters are float32.
    recipe_bytes = memory.recipe_bytes(recipe, count)
    at_shard = (4 + recipe_bytes.total) * work.parameters / shards
    at_worker = (
      bytes_of_number.weights + bytes_of_number.gradients + recipe_bytes.worker
    )
    state = at_shard + at_worker * work.parameters
    name = f"asynchronous, {recipe}"
    yield _smallest_cost(
      plan.strategy(
        name, state, work.activations(micro, 1), micro, *times, True
      )
      for micro in plan.microbatches(count)
    )


def find(
  work: Workload, hardware: Hardware, options: TrainingOptions
) -> list[Strategy]:
  """Returns the strategies that batch, heads and layers allow, including those
  that do not fit into memory."""
  plan = _Planner(work, hardware, options)
  candidates = [plan.make(ONE)]
  if hardware.devices > 1:
    candidates += [*_data_strategies(plan), *_model_strategies(plan)]
    candidates += _hybrid_strategies(plan)
    candidates += _asynchronous_strategies(plan)
  return [strategy for strategy in candidates if strategy is not None]


def left_out(
  work: Workload, hardware: Hardware, options: TrainingOptions
) -> list[str]:
  """Returns a line for each kind of strategy on all devices that `find` leaves
  out, with the reason."""
  count = hardware.devices
  reasons: list[str] = []
  if options.batch % count:
    reasons.append(
      f"data: a batch of {options.batch} is not divided by {count} devices"
    )
  if work.gpt is None:
    reasons.append("tensor: the model is no GPT")
  elif work.gpt.heads % count:
    reasons.append(f"tensor: {work.gpt.heads} heads are not divided by {count}")
  if work.layers < count:
    reasons.append(
      f"pipeline: {work.layers} layers are fewer than {count} devices"
    )
  elif (number := options.batch // (options.microbatch or 1)) < count:
    reasons.append(
      f"2BW: {number} microbatches of a step are fewer than {count} stages"
    )
  return reasons


def best(strategies: Sequence[Strategy], *, stale: bool) -> Strategy | None:
  """Returns the fastest strategy that fits, with stale gradients (`stale`) or
  without."""
  fitting = [x for x in strategies if x.fits and x.stale == stale]
  return min(fitting, key=lambda strategy: strategy.seconds, default=None)
