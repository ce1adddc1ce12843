"""How a model can be trained on some devices, and what each way costs.

What is trained is a Workload: how many parameters, operations and bytes, by the
formulas of a GPT, or counted on any problem of layers. What it is trained on is
a Cluster, and how, whatever the strategy, a Job. `find` makes of the three a
Strategy for each way to share the work out: bytes of a device, and seconds of a
step in computing, sending and waiting. What is assumed is said in
`launch.plan`, which asks and prints.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from asgd import base, models, problems, transformer
from asgd.parallel import costs, memory, wait_free

RECIPES = ("asgd", "dc_asgd_a", "gap_aware", "dana_zero", "dana_dc")
_HYBRIDS = 3  # of which that many are shown
_HEADS = (128, 64, 8)  # features of a head, the first of which fits well
_BACKWARD = 2 / 3  # of a step's computing


class Workload(NamedTuple):
  """What is trained."""

  name: str
  parameters: int
  layers: int  # between which a pipeline may cut
  largest: int  # parameters of the largest layer
  flops: float  # of an example, forward and backward
  again: float  # of an example, what computing the forward again adds
  activations: Callable[[int, int], float]  # (examples, tensor) -> bytes of all
  border: float  # bytes of an example between two layers, at most
  gpt: memory.Gpt | None = None  # only that can be split into tensors
  dense: tuple[wait_free.Dense, ...] = ()  # rows are of an example


class Cluster(NamedTuple):
  """What it is trained on."""

  devices: int
  memory: float  # bytes of a device
  flops: float  # a second, of a device
  far: costs.Link  # between any two devices
  node: int = 1  # devices of a node
  near: costs.Link | None = None  # inside of a node; None is as far

  def link(self, devices: int) -> costs.Link:
    """What connects that many neighbours."""
    inside = self.near is not None and devices <= self.node
    return self.near if inside else self.far


class Job(NamedTuple):
  """How it is trained, whatever the strategy."""

  batch: int  # examples of a step, of all devices
  microbatch: int | None = None  # None: the best
  optimizer: str = "adam"
  precision: str = "mixed"
  activations: str = "plain"
  variation: float = 0.1
  overlap: bool = False
  shards: int | None = None  # of a parameter server; None: all devices
  recipes: tuple[str, ...] = RECIPES


class Strategy(NamedTuple):
  """A way to train, and what it costs."""

  name: str
  fits: bool
  state: float  # bytes of a device: weights, gradients, optimizer, versions
  activations: float  # bytes of a device
  microbatch: int
  compute: float  # seconds of a step
  communication: float  # seconds, what is not hidden
  waiting: float  # seconds: for the slowest, or in a bubble
  stale: bool = False  # asynchronous: gradients of older weights

  @property
  def bytes(self) -> float:
    """Of a device."""
    return self.state + self.activations

  @property
  def seconds(self) -> float:
    """Of a step."""
    return self.compute + self.communication + self.waiting


# What is trained.


def guess_gpt(parameters: float, **sizes: int | None) -> memory.Gpt:
  """Returns the sizes of a GPT with about so many parameters.

  Args:
    parameters: wanted; of blocks, 12 depth width^2.
    **sizes: of `memory.Gpt`, where they are known; None is not.

  Raises:
    ValueError: for sizes that are none, or have another number of parameters.
  """
  known = {name: value for name, value in sizes.items() if value is not None}
  for name, value in known.items():
    if value < 1:
      raise ValueError(f"{name} must be positive, not {value!r}")
  context, vocabulary = (
    known.get("context", 2048),
    known.get("vocabulary", 51200),
  )
  depth, width = known.get("depth"), known.get("width")
  if depth is None and width is None:
    depth = max(round((parameters / (12 * 128**2)) ** (1 / 3)), 1)
  if width is None:
    width = math.sqrt(parameters / (12 * depth))
    step = next((n for n in _HEADS if width >= 4 * n), 1)
    step = known.get("heads", step)
    width = max(round(width / step), 1) * step
  if depth is None:
    depth = max(round(parameters / (12 * width**2)), 1)
  heads = next((width // n for n in _HEADS if width % n == 0), 1)
  heads = known.get("heads", heads)
  gpt = memory.check_gpt(memory.Gpt(depth, width, heads, context, vocabulary))
  blocks = 12 * depth * width**2
  if known.keys() & {"depth", "width", "heads"} and not (
    parameters / 2 <= blocks <= 2 * parameters
  ):
    raise ValueError(
      f"{parameters:g} parameters, a depth of {depth} and a width of {width}"
      f" ({heads} heads) do not agree: their blocks have {blocks:.3g}"
      " parameters; leave one out, or change it"
    )
  return gpt


def of_gpt(gpt: memory.Gpt, parameters: int, job: Job) -> Workload:
  """Returns the workload of a GPT, by the formulas of its papers."""
  itemsize = memory.PRECISIONS[job.precision].weights
  plain = memory.gpt_flops(gpt, 1)

  def kept(examples, tensor):
    return gpt.depth * memory.activations(
      *(gpt, examples), kind=job.activations, tensor=tensor, itemsize=itemsize
    )

  return Workload(
    f"GPT of {parameters:,} parameters: {gpt.depth} blocks of {gpt.width},"
    f" {gpt.heads} heads, {gpt.context} positions, {gpt.vocabulary} tokens",
    *(parameters, gpt.depth, parameters // gpt.depth, plain),
    memory.gpt_flops(gpt, 1, recompute=True) - plain,
    *(kept, float(gpt.context * gpt.width * itemsize), gpt),
  )


def _find_gpt(layers, tokens) -> memory.Gpt | None:
  blocks = [layer for layer in layers if isinstance(layer, transformer.Block)]
  first, last = layers[0], layers[-1]
  if not blocks or not isinstance(first, transformer.Embed):
    return None
  return memory.Gpt(
    *(len(blocks), first.width, blocks[0].heads, tokens.shape[1]),
    getattr(last, "vocabulary", first.vocabulary),
  )


def of_problem(problem: problems.Problem, name: str, job: Job) -> Workload:
  """Returns the workload of a problem; its model is traced and counted.

  Raises:
    ValueError: if it cannot be cut into layers.
  """
  pieces = problem.pieces
  if pieces is None:
    raise ValueError(f"{name} has no layers that could be counted")
  key = jax.random.key(0)
  params = jax.eval_shape(problem.init, key)
  weights = base.weights_of(params)
  batch = problem.batches(0, 1)(0, 0)
  examples = len(jax.tree.leaves(batch)[0])
  lowered = jax.jit(jax.grad(problem.loss, has_aux=True)).lower(
    params, batch, key
  )
  flops = lowered.cost_analysis()["flops"] / examples
  borders: list[int] = []

  def forward(params, batch, key):
    x = pieces.prepare(batch, key, problems.dtype_of(base.weights_of(params)))
    for i, layer in enumerate(pieces.layers):
      held = jax.tree.map(
        lambda tree, i=i: tree[i : i + 1],
        params,
        is_leaf=lambda tree: type(tree) is tuple,
      )
      x, _ = models.apply((layer,), held, x, train=True, key=key, first=i)
      borders.append(memory.bytes_of(x))
    return pieces.criterion(x, batch)

  kept, _ = memory.kept(forward, params, batch, key)
  sizes = [models.count(held) for held in weights]
  tokens = jax.eval_shape(
    lambda b, k: pieces.prepare(b, k, jax.numpy.float32), batch, key
  )
  dense = wait_free.choose(pieces, params, batch, 2)
  layers = sum(size > 0 for size in sizes)
  recomputing = job.activations == "full"
  border = max(borders[: len(sizes) - 1], default=borders[-1]) / examples
  each = sum(borders) / examples if recomputing else kept / examples

  gpt = _find_gpt(pieces.layers, tokens)

  def activations(examples, tensor):
    part = 1.0
    if tensor > 1 and not recomputing:
      split = memory.activations(gpt, 1, kind=job.activations, tensor=tensor)
      part = split / memory.activations(gpt, 1)
    return examples * each * part

  return Workload(
    f"{name}: {sum(sizes):,} parameters in {layers} layers, counted",
    *(sum(sizes), layers, max(sizes), flops, flops / 3, activations, border),
    gpt=gpt,
    dense=tuple(d._replace(rows=d.rows // examples) for d in dense),
  )


# What each strategy costs.


class _Planner(NamedTuple):
  work: Workload
  cluster: Cluster
  job: Job

  def divided(self, data: int) -> int | None:
    """Examples of a step in each of `data` parts, if it can be divided."""
    return None if self.job.batch % data else self.job.batch // data

  def microbatches(self, examples: int) -> list[int]:
    if self.job.microbatch is not None:
      one = self.job.microbatch
      return [] if examples % one else [one]
    return _divisors(examples)

  def compute(self, devices: int) -> float:
    """Mean seconds of a device's part of a step."""
    work, job = self.work, self.job
    again = work.again if job.activations == "full" else 0.0
    return job.batch * (work.flops + again) / (devices * self.cluster.flops)

  def slowest(self, devices: int, compute: float) -> float:
    """Seconds that all wait for the slowest of them."""
    factor = costs.expected_slowest(devices, variation=self.job.variation)
    return (factor - 1) * compute

  def best(self, made: Iterator[Strategy]) -> Strategy | None:
    """The fastest that fits, or the smallest; larger microbatches if equal."""

    def order(one):
      cost = one.seconds if one.fits else one.bytes
      return not one.fits, cost, -one.microbatch

    return min(made, key=order, default=None)

  def make(
    self,
    name: str,
    *,
    data: int = 1,
    tensor: int = 1,
    stages: int = 1,
    zero: int = 0,
    versions: int = 1,
    flush: bool = True,
    reduce: Callable[[float], float] | None = None,
  ) -> Strategy | None:
    """Any synchronous strategy, and pipelines without a flush.

    Args:
      name: of the strategy.
      data: devices that hold the same part.
      tensor: devices that share a layer.
      stages: of a pipeline.
      zero: stage of ZeRO among `data`.
      versions: of the weights.
      flush: whether the pipeline waits for the end of a step.
      reduce: bytes of gradients -> seconds; None is a ring.

    Returns:
      None if the batch cannot be divided so.
    """
    examples = self.divided(data)
    if examples is None:
      return None
    return self.best(
      self._one(
        *(name, data, tensor, stages, zero, versions, flush, reduce),
        *(microbatch, examples // microbatch),
      )
      for microbatch in self.microbatches(examples)
    )

  def _one(
    self,
    name,
    data,
    tensor,
    stages,
    zero,
    versions,
    flush,
    reduce,
    micro,
    count,
  ) -> Strategy:
    work, job, cluster = self.work, self.job, self.cluster
    devices = data * tensor * stages
    # The stage with most layers sets the pace, and has the most to hold.
    uneven = math.ceil(work.layers / stages) * stages / work.layers
    state = (
      uneven
      * memory.state(
        *(work.parameters, job.optimizer, job.precision),
        zero=zero,
        data=data,
        tensor=tensor,
        stages=stages,
        versions=versions,
      ).total
    )
    numbers = memory.PRECISIONS[job.precision]
    if zero == 3:  # the layer that is at work is there as a whole
      state += work.largest * numbers.weights / tensor
    in_flight = min(stages, count) if flush else stages
    held = uneven * in_flight / stages * work.activations(micro, tensor)

    compute = uneven * self.compute(devices)
    slot = compute / count
    waiting = self.slowest(devices, compute) if flush else 0.0
    if flush:
      waiting += (stages - 1) * slot
    part = work.parameters * uneven / (tensor * stages)
    far = cluster.link(devices)
    weights, gradients = part * numbers.weights, part * numbers.gradients

    def gather(size):
      return costs.seconds(costs.ring_reduce_scatter(size, data), far)

    if zero == 0:
      sending = (
        reduce(gradients)
        if reduce
        else costs.seconds(costs.ring(gradients, data), far)
      )
    elif zero == 1:
      sending = gather(gradients) + gather(weights)
    elif zero == 2:
      sending = count * gather(gradients) + gather(weights)
    else:
      sending = count * (gather(gradients) + 2 * gather(weights))
    if job.overlap:
      sending = max(sending - _BACKWARD * compute, 0.0)
    if tensor > 1:
      stream = work.border * micro
      once = costs.seconds(costs.ring(stream, tensor), cluster.link(tensor))
      times = 6 if job.activations == "full" else 4  # a block and microbatch
      sending += count * times * math.ceil(work.gpt.depth / stages) * once
    if stages > 1:
      message = far.latency + work.border * micro / tensor / far.bandwidth
      turns = count + stages - 2 if flush else count
      sending += 2 * turns * message
    return Strategy(
      *(name, state + held <= cluster.memory, state, held, micro),
      *(compute, sending, waiting, not flush),
    )


def _data(plan: _Planner) -> Iterator[Strategy | None]:
  cluster, job, work = plan.cluster, plan.job, plan.work
  count = cluster.devices
  link = cluster.link(count)
  for kind in costs.COSTS:
    title = kind.replace("_", " ")
    options: dict[str, Any] = {}
    if kind == "parameter_server":
      options = {"shards": job.shards}
      title += f", {job.shards or count} shards"

    def reduce(size, kind=kind, options=options):
      return costs.seconds(costs.COSTS[kind](size, count, **options), link)

    yield plan.make(f"data, {title}", data=count, reduce=reduce)
  if 1 < cluster.node < count and count % cluster.node == 0:
    near = cluster.near or cluster.far

    def reduce_levels(size):
      return costs.hierarchical_seconds(
        *(size, cluster.node, count // cluster.node, near, cluster.far)
      )

    yield plan.make("data, hierarchical", data=count, reduce=reduce_levels)
  examples = plan.divided(count)
  if examples is not None and any(
    costs.prefers_factors(d.rows * examples, d.inputs, d.outputs, count)
    for d in work.dense
  ):
    grain = memory.PRECISIONS[job.precision].gradients

    def reduce_hybrid(size):
      """Poseidon: factors where they are smaller."""
      dense = {f"{d.layer}/{d.path}": (d.inputs, d.outputs) for d in work.dense}
      others = size - grain * sum(m * n for m, n in dense.values())
      rows = work.dense[0].rows * examples
      return costs.seconds(
        costs.hybrid(dense, others, rows, count, grain=grain), link
      )

    yield plan.make(
      "data, sufficient factors", data=count, reduce=reduce_hybrid
    )
  for zero in (1, 2, 3):
    yield plan.make(f"data, ZeRO-{zero}", data=count, zero=zero)


def _model(plan: _Planner) -> Iterator[Strategy | None]:
  count, work = plan.cluster.devices, plan.work
  if work.gpt is not None and work.gpt.heads % count == 0:
    yield plan.make(f"tensor {count}", tensor=count)
  if count <= work.layers:
    yield plan.make(f"pipeline {count}, 1F1B", stages=count)
    yield plan.make(
      f"pipeline {count}, PipeDream", stages=count, versions=count, flush=False
    )
    yield plan.make(
      f"pipeline {count}, 2BW", stages=count, versions=2, flush=False
    )


def _divisors(count: int) -> list[int]:
  low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
  return sorted({*low, *(count // n for n in low)})


def _hybrids(plan: _Planner) -> list[Strategy]:
  """The best of data x tensor x pipeline."""
  cluster, work, found = plan.cluster, plan.work, []
  count = cluster.devices
  for tensor, stages in itertools.product(_divisors(count), repeat=2):
    if count % (tensor * stages) or stages > work.layers:
      continue
    data = count // (tensor * stages)
    if sum(n > 1 for n in (data, tensor, stages)) < 2:
      continue
    if tensor > 1:
      if work.gpt is None or work.gpt.heads % tensor:
        continue
      if cluster.near is not None and tensor > cluster.node:
        continue
    parts = (("data", data), ("tensor", tensor), ("pipe", stages))
    name = " x ".join(f"{word} {n}" for word, n in parts if n > 1)
    both = (
      plan.make(
        f"{name}, ZeRO-1" if zero else name,
        data=data,
        tensor=tensor,
        stages=stages,
        zero=zero,
      )
      for zero in ((0, 1) if data > 1 else (0,))
    )
    made = plan.best(one for one in both if one is not None)
    found += [made] if made is not None else []
  found.sort(key=lambda one: (not one.fits, one.seconds))
  return found[:_HYBRIDS]


def _asynchronous(plan: _Planner) -> Iterator[Strategy | None]:
  work, job, cluster = plan.work, plan.job, plan.cluster
  count = cluster.devices
  shards = job.shards or count
  numbers = memory.PRECISIONS[job.precision]
  examples = plan.divided(count)
  if examples is None or count == 1:
    return
  compute = plan.compute(count)
  size = float(work.parameters * max(numbers.weights, numbers.gradients))
  speed = costs.asynchronous_throughput(
    count, compute=compute, size=size, link=cluster.link(count), shards=shards
  )
  for recipe in job.recipes:
    cure = memory.cure(recipe, count)
    at_shard = (4 + cure.total) * work.parameters / shards
    at_worker = numbers.weights + numbers.gradients + cure.worker
    state = at_shard + at_worker * work.parameters
    made = []
    for micro in plan.microbatches(examples):
      held = work.activations(micro, 1)
      fits = state + held <= cluster.memory
      late = count / speed - compute
      made.append(
        Strategy(
          *(f"asynchronous, {recipe}", fits, state, held, micro),
          *(compute, late, 0.0, True),
        )
      )
    yield plan.best(iter(made))


def find(work: Workload, cluster: Cluster, job: Job) -> list[Strategy]:
  """Returns what can be done, and what cannot for want of memory.

  Ways that the batch, the heads or the layers cannot be divided for are left
  out.
  """
  plan = _Planner(work, cluster, job)
  found = [plan.make("one device")]
  if cluster.devices > 1:
    found += [*_data(plan), *_model(plan), *_hybrids(plan)]
    found += _asynchronous(plan)
  return [one for one in found if one is not None]


def left_out(work: Workload, cluster: Cluster, job: Job) -> list[str]:
  """Returns what `find` leaves out on all devices at once, and why."""
  count, out = cluster.devices, []
  if job.batch % count:
    out.append(
      f"data: a batch of {job.batch} is not divided by {count} devices"
    )
  if work.gpt is None:
    out.append("tensor: the model is no GPT")
  elif work.gpt.heads % count:
    out.append(f"tensor: {work.gpt.heads} heads are not divided by {count}")
  if work.layers < count:
    out.append(f"pipeline: {work.layers} layers are fewer than {count} devices")
  return out


def best(found: Sequence[Strategy], *, stale: bool) -> Strategy | None:
  """Returns the fastest that fits, of the asynchronous or the others."""
  fitting = (one for one in found if one.fits and one.stale == stale)
  return min(fitting, key=lambda one: one.seconds, default=None)
