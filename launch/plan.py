"""Says how a model can be trained on some devices, and what each way costs.

  python -m launch.plan --params=1.5e9 --devices=64 --bandwidth=25 --memory=16
  python -m launch.plan --params=175B --devices=1024 --bandwidth=25 \\
    --node=8 --node_bandwidth=300 --flops=140 --out=plan.png
  python -m launch.plan --config=configs/pipeline_gpt.py --devices=8 \\
    --bandwidth=1

prints a table of strategies: whether a device's memory holds its part, and
what a step takes in seconds: computing, sending, and waiting (for the slowest
worker, or in a pipeline's bubble). Of --params alone a GPT of that size is
assumed, 128 times as wide as deep, unless --depth, --width and others say more.
A config of launch.simulate or launch.train_pipeline is read, its model built
and counted: parameters, operations, what is kept for the backward.

What is assumed:

  - times are those of `asgd.parallel.costs`, each device having one link of
    --bandwidth to all others; inside of a node of --node devices, one of
    --node_bandwidth. Without --overlap nothing is sent while computing;
  - bytes are those of `asgd.parallel.memory`. Layers are alike: a pipeline's
    stages differ by the layers that cannot be divided evenly;
  - each strategy takes the microbatch that is fastest of those that fit (or
    --microbatch). The batch is of all devices together;
  - ZeRO-2 scatters gradients, and ZeRO-3 gathers weights twice, for each
    microbatch;
  - an asynchronous step is as many messages as there are workers. Parameters
    and what a recipe keeps against staleness are in float32, on shards at the
    workers;
  - batch times vary by --variation around their mean: a synchronous step takes
    the expected maximum.

Sizes are 10^9 bytes (GB); bandwidths 10^9 bytes a second, each way.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from asgd import algorithms, base, models, names, problems, transformer
from asgd.parallel import costs, memory, wait_free
from launch import cli, experiment, outputs, pipeline_experiment

_GB = memory.GB
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_RECIPES = ("asgd", "dc_asgd_a", "gap_aware", "dana_zero", "dana_dc")
_PICTURES = (".png", ".svg", ".pdf")
_MOST_DEVICES, _MOST_BATCH = 1 << 20, 1 << 30
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
  recipes: tuple[str, ...] = _RECIPES


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
    _positive(name, value)
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
  if (
    "depth" in known
    and "width" in known
    and not (parameters / 2 <= blocks <= 2 * parameters)
  ):
    raise ValueError(
      f"--params={parameters:g} and --depth={depth} --width={width} do not"
      f" agree: their blocks have {blocks:.3g} parameters; leave one out"
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


def strategies(work: Workload, cluster: Cluster, job: Job) -> list[Strategy]:
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
  """Returns what `strategies` leaves out on all devices at once, and why."""
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


# What is said.


def _seconds(value: float) -> str:
  return f"{value:.3g}" if value else "0"


def tabulate(found: Sequence[Strategy]) -> str:
  """Returns a table with a row for each strategy."""
  rows = [
    [
      one.name,
      "yes" if one.fits else "no",
      f"{one.bytes / _GB:.3g}",
      f"{one.state / _GB:.3g}",
      f"{one.activations / _GB:.3g}",
      f"{one.microbatch}",
      *map(_seconds, (one.compute, one.communication, one.waiting)),
      _seconds(one.seconds),
    ]
    for one in found
  ]
  head = ["strategy", "fits", "GB", "state", "activations", "microbatch"]
  head += ["compute", "send", "wait", "s/step"]
  return outputs.format_table(head, rows)


def bars(found: Sequence[Strategy], limit: float, columns: int = 100) -> str:
  """Returns the table's numbers as bars, of the same scale for all.

  Memory is a bar up to twice the limit, `|`; time is `#` computing, `=` sending
  and `.` waiting.
  """
  name = max(len(one.name) for one in found)
  width = max((columns - name - 6) // 2, 10)
  longest = max((one.seconds for one in found if one.fits), default=0.0)
  longest = longest or max(one.seconds for one in found)
  lines = [
    " ".join(
      [
        "".ljust(name),
        f"memory, | is {limit / _GB:g} GB".ljust(width),
        " " + f"# compute = send . wait, to {longest:.3g} s",
      ]
    ).rstrip()
  ]
  for one in found:
    filled = min(round(one.bytes / (2 * limit) * width), width)
    space = ["#" if i < filled else " " for i in range(width)]
    space[width // 2] = "|"
    if one.bytes > 2 * limit:
      space[-1] = ">"
    ends = itertools.accumulate((one.compute, one.communication, one.waiting))
    ends = [round(end / longest * width) if longest else 0 for end in ends]
    time = ""
    for mark, end in zip("#=.", ends, strict=True):
      time += mark * (min(end, width) - len(time))
    if ends[-1] > width:
      time = time[:-1] + ">"
    mark = "  " if one.fits else " x"
    lines.append(
      f"{one.name.ljust(name)}{mark} {''.join(space)} {time}".rstrip()
    )
  return "\n".join(lines) + "\n"


def draw(
  found: Sequence[Strategy], limit: float, path: Path, heading: str
) -> None:
  """Draws memory and time of each strategy.

  Raises:
    ImportError: without matplotlib, which is in the extra `viz`.
  """
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot as plt

  names_ = [one.name for one in found]
  figure, (left, right) = plt.subplots(
    *(1, 2),
    figsize=(13, 1.5 + 0.3 * len(found)),
    layout="constrained",
    sharey=True,
  )
  panels = (
    (left, _GB, ("state", "activations"), "GB a device"),
    (right, 1.0, ("compute", "communication", "waiting"), "seconds a step"),
  )
  for axis, unit, parts, label in panels:
    start = [0.0] * len(found)
    for i, part in enumerate(parts):
      values = [getattr(one, part) / unit for one in found]
      colors = [
        (*plt.get_cmap("tab10")(i)[:3], 1.0 if one.fits else 0.35)
        for one in found
      ]
      axis.barh(names_, values, left=start, color=colors)
      axis.barh([names_[0]], [0], color=plt.get_cmap("tab10")(i), label=part)
      start = [a + b for a, b in zip(start, values, strict=True)]
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right")
  left.axvline(limit / _GB, color="black", ls="--", lw=1)
  left.set_xlim(0, 2 * limit / _GB)
  times = [one.seconds for one in found if one.fits]
  if times:
    right.set_xlim(0, 1.05 * max(times))
  left.invert_yaxis()
  figure.suptitle(f"{heading}\npale: does not fit", fontsize=10)
  figure.savefig(path, dpi=110)
  plt.close(figure)


# What is asked for.


def size(text: str, flag: str = "params") -> float:
  """Returns a number: 1.5e9, 350M, 1.5B.

  Raises:
    ValueError: for what is none, or not positive.
  """
  text = text.strip()
  unit = _UNITS.get(text[-1:].upper())
  try:
    value = float(text[:-1]) * unit if unit else float(text)
  except ValueError:
    value = math.nan
  if not 0 < value <= 1e18:
    raise ValueError(
      f"--{flag} must be a positive number such as 1.5e9, 350M or 1.5B, not"
      f" {text!r}"
    )
  return value


def _read(config, data_dir):
  """Builds a config's problem: (problem, its name, examples of a step)."""
  overrides = cli.overrides()
  plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
  if "runs" in plain:
    plain = pipeline_experiment.override(config, overrides)
    built = pipeline_experiment.build(plain, data_dir=data_dir)
    batch = built.config["microbatch_size"] * built.config["microbatches"]
  else:
    built = experiment.build(
      experiment.override(config, overrides), data_dir=data_dir
    )
    batch = built.config["batch_size"] * max(
      cell.workers for cell in built.cells
    )
  name = f"{built.config['model']['name']} on {built.dataset.name}"
  return built.problem, name, batch


def _positive(flag, value, most=math.inf, *, or_zero=False):
  known = 0 < value <= most or (or_zero and value == 0)
  if not known or math.isinf(value):
    least = "0 or more" if or_zero else "positive"
    limit = "" if math.isinf(most) else f" and at most {most:g}"
    raise ValueError(f"--{flag} must be {least}{limit}, not {value!r}")
  return value


def _cluster(given) -> Cluster:
  devices = _positive("devices", given["devices"], _MOST_DEVICES)
  bandwidth = _positive("bandwidth", given["bandwidth"])
  latency = _positive("latency", given["latency"], or_zero=True) * 1e-6
  node, near = given["node"], given["node_bandwidth"]
  _positive("node", node, _MOST_DEVICES)
  if near is not None and node == 1:
    raise ValueError("--node_bandwidth needs --node, the devices of a node")
  if near is not None:
    near = costs.link(_positive("node_bandwidth", near) * 1e9, latency)
  if node < devices and devices % node:
    raise ValueError(
      f"--node={node} does not divide --devices={devices}: use whole nodes"
    )
  return Cluster(
    devices,
    _positive("memory", given["memory"]) * _GB,
    _positive("flops", given["flops"]) * 1e12,
    costs.link(bandwidth * 1e9, latency),
    node,
    near,
  )


def _job(given, batch: int) -> Job:
  names.lookup("optimizer", given["optimizer"], memory.OPTIMIZERS)
  names.lookup("precision", given["precision"], memory.PRECISIONS)
  names.lookup("kind of activations", given["activations"], memory.ACTIVATIONS)
  for recipe in given["recipes"]:
    names.lookup("recipe", recipe, algorithms.RECIPES)
  micro = given["microbatch"]
  if micro is not None:
    _positive("microbatch", micro, _MOST_BATCH)
    if batch % micro:
      raise ValueError(
        f"--microbatch={micro} does not divide the batch of {batch} examples"
      )
  shards = given["shards"]
  if shards is not None:
    _positive("shards", shards, given["devices"])
  variation = _positive("variation", given["variation"], 3, or_zero=True)
  return Job(
    *(batch, micro, given["optimizer"], given["precision"]),
    *(given["activations"], variation, given["overlap"], shards),
    tuple(given["recipes"]),
  )


_SIZES = memory.Gpt._fields


def _workload(given) -> tuple[Workload, Job]:
  config, params = given["config"], given["params"]
  if (config is None) == (params is None):
    raise ValueError(
      "which model? give --params=1.5e9 (a GPT of that size) or"
      " --config=FILE.py, and not both"
    )
  sizes = {name: given[name] for name in _SIZES}
  if config is not None:
    for name, value in sizes.items():
      if value is not None:
        raise ValueError(f"the config says what --{name} does; drop it")
    problem, name, batch = _read(config, given["data_dir"])
  else:
    parameters = size(params)
    gpt = guess_gpt(parameters, **sizes)
    batch = 8 * given["devices"]
  if given["batch"] is not None:
    batch = _positive("batch", given["batch"], _MOST_BATCH)
  job = _job(given, batch)
  if config is not None:
    return of_problem(problem, name, job), job
  return of_gpt(gpt, round(parameters), job), job


def main(**given: Any) -> None:
  """Prints the plan that the flags ask for; `_define` says what each is."""
  given = {**DEFAULTS, **given}
  out = None if given["out"] is None else Path(given["out"])
  if out is not None and out.suffix not in _PICTURES:
    raise ValueError(
      f"--out={out} must end in {', '.join(_PICTURES)}, as it is a picture"
    )
  if out is not None and not out.parent.is_dir():
    raise ValueError(f"--out={out}: there is no folder {out.parent}")
  for flag in ("devices", "bandwidth"):
    if given[flag] is None:
      raise ValueError(f"give --{flag}, as in --devices=64 --bandwidth=25")
  cluster = _cluster(given)
  work, job = _workload(given)
  found = strategies(work, cluster, job)
  if not found:
    raise ValueError(
      f"no strategy divides a batch of {job.batch} examples: give another"
      " --batch or --microbatch"
    )
  heading = (
    f"{work.name}\n{cluster.devices} devices of {cluster.memory / _GB:g} GB and"
    f" {cluster.flops / 1e12:g} TFLOP/s, links of"
    f" {cluster.far.bandwidth / 1e9:g} GB/s; batch {job.batch},"
    f" {job.optimizer}, {job.precision}"
  )
  print(heading, end="\n\n")
  print(tabulate(found))
  if not any(one.fits for one in found):
    least = min(found, key=lambda one: one.bytes)
    print(
      f"nothing fits: the least is {least.bytes / _GB:.3g} GB a device, by"
      f" {least.name}; use more devices, a smaller --microbatch or"
      " --activations=full"
    )
  for stale, title in (
    (False, "best"),
    (True, "best of those that do not wait"),
  ):
    chosen = best(found, stale=stale)
    if chosen is not None:
      print(
        f"{title}: {chosen.name}, {chosen.bytes / _GB:.3g} GB a device and"
        f" {chosen.seconds:.3g} s a step"
      )
  for line in left_out(work, cluster, job):
    print(f"not on all devices: {line}")
  columns = shutil.get_terminal_size((120, 24)).columns
  print("\n" + bars(found, cluster.memory, columns))
  if out is not None:
    try:
      draw(found, cluster.memory, out, heading)
    except ImportError as error:
      raise ValueError(
        f"--out needs matplotlib ({error}): pip install 'asgd[viz]'"
      ) from error
    print(f"picture  {out}")


DEFAULTS: dict[str, Any] = {
  **dict(params=None, config=None, data_dir=None, devices=None),
  **dict(bandwidth=None, latency=5.0, node=1, node_bandwidth=None),
  **dict(memory=80.0, flops=100.0, batch=None, microbatch=None),
  **dict(optimizer="adam", precision="mixed", activations="plain"),
  **dict(
    variation=0.1, overlap=False, shards=None, recipes=list(_RECIPES), out=None
  ),
  **dict.fromkeys(_SIZES),
}
_HELP = {
  "params": "Parameters: 1.5e9, 350M, 1.5B.",
  "data_dir": "Where the config's data is.",
  "devices": "How many.",
  "bandwidth": "GB/s of a device's link, each way.",
  "latency": "Microseconds of a message.",
  "node": "Devices of a node, which have links of --node_bandwidth.",
  "node_bandwidth": "GB/s inside of a node.",
  "memory": "GB of a device.",
  "flops": "TFLOP/s that a device reaches (not its peak).",
  "batch": "Examples of a step, of all devices. Default: the config's, or 8 a"
  " device.",
  "microbatch": "Examples that a device takes at once. Default: the best.",
  "optimizer": f"One of {', '.join(memory.OPTIMIZERS)}.",
  "precision": f"One of {', '.join(memory.PRECISIONS)}.",
  "activations": f"One of {', '.join(memory.ACTIVATIONS)} (recomputing).",
  "variation": "Coefficient of variation of batch times.",
  "overlap": "Reduce gradients behind the backward (wait-free).",
  "shards": "Of the parameter server. Default: all devices.",
  "recipes": "Against staleness, of asynchronous training.",
  "out": "Picture to write: FILE.png, .svg or .pdf.",
  "depth": "Blocks of the GPT.",
  "width": "Features of its stream.",
  "heads": "Of its attention.",
  "context": "Positions of a sequence (2048).",
  "vocabulary": "Tokens (51200).",
}
_INTEGERS = ("devices", "node", "batch", "microbatch", "shards", *_SIZES)


def _define():
  """Defines the flags; returns a function that calls `main` with them."""
  holders = {"config": cli.define_config()}
  for name, text in _HELP.items():
    define = flags.DEFINE_string
    if name in _INTEGERS:
      define = flags.DEFINE_integer
    elif isinstance(DEFAULTS[name], bool):
      define = flags.DEFINE_bool
    elif isinstance(DEFAULTS[name], float) or name.endswith("bandwidth"):
      define = flags.DEFINE_float
    elif name == "recipes":
      define = flags.DEFINE_list
    holders[name] = define(name, DEFAULTS[name], text)
  return lambda: main(**{name: f.value for name, f in holders.items()})


if __name__ == "__main__":
  cli.run(_define())
