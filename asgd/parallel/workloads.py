"""Workloads: parameters, operations and bytes of a model, for
`asgd.parallel.strategies`. They are computed by the formulas of a GPT, or
counted in any problem that is made of layers."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from asgd import base, models, problems
from asgd.models import transformer
from asgd.parallel import hlo, memory, step_checks, wait_free

RECIPES = ("asgd", "dc_asgd_a", "gap_aware", "dana_zero", "dana_dc")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_HEADS = (128, 64, 8)  # features of a head, the preferred number first


class Workload(NamedTuple):
  """The parameters, operations and bytes of a model."""

  name: str
  parameters: int
  layers: int  # number of layers; a pipeline may cut between two of them
  largest: int  # parameters of the largest layer
  flops: float  # operations for an example, forward and backward
  recompute_flops: float  # operations for an example in a second forward
  # (examples, tensor) -> bytes of all activations
  activations: Callable[[int, int], float]
  boundary_bytes: float  # bytes of an example between two layers, the largest
  gpt: memory.Gpt | None = None  # only a GPT can be tensor parallel
  # The dense layers; their `rows` are those of one example.
  dense: tuple[wait_free.DenseGradient, ...] = ()


class TrainingOptions(NamedTuple):
  """Options of a training, which hold for all strategies."""

  batch: int  # examples of a step, on all devices together
  microbatch: int | None = None  # examples; None: the fastest that fits
  optimizer: str = "adam"
  precision: str = "mixed"
  activations: str = "plain"
  variation: float = 0.1
  overlap: bool = False
  shards: int | None = None  # shards of a server; None: one on each device
  recipes: tuple[str, ...] = RECIPES


def count_of(text: str) -> float:
  """Reads a number of parameters, such as 1.5e9, 350M or 1.5B. Raises
  ValueError for another text, and for a number that is not from 1 to 1e18.

  Example:
    >>> count_of("1.5B"), count_of("350m")
    (1500000000.0, 350000000.0)
  """
  text = text.strip()
  unit = _UNITS.get(text[-1:].upper())
  with contextlib.suppress(ValueError):
    value = float(text[:-1]) * unit if unit else float(text)
    if 1 <= value <= 1e18:
      return value
  raise ValueError(
    "the number of parameters must be from 1 to 1e18, such as 1.5e9, 350M or"
    f" 1.5B, not {text!r}"
  )


def guess_gpt(parameters: float, **sizes: int | None) -> memory.Gpt:
  """Returns the sizes of a GPT with about `parameters` parameters in its
  blocks. `sizes` are fields of `memory.Gpt`, or None. Raises ValueError if the
  blocks have less than half, or more than twice, as many parameters."""
  given = {name: value for name, value in sizes.items() if value is not None}
  context = given.get("context", 2048)
  vocabulary = given.get("vocabulary", 51200)  # as in Megatron's papers
  depth, width = given.get("depth"), given.get("width")
  # Blocks have 12 L C^2 parameters. If neither size is given, C = 128 L, about
  # the proportion of published models.
  if depth is None and width is None:
    depth = max(round((parameters / (12 * 128**2)) ** (1 / 3)), 1)
  if width is None:
    assert depth is not None  # one of the two was given, or depth is guessed
    exact = math.sqrt(parameters / (12 * depth))
    # A multiple of the number of heads, or of a head's features, so that there
    # are 4 heads or more.
    head_features = next((n for n in _HEADS if exact >= 4 * n), 1)
    step = given.get("heads", head_features)
    width = max(round(exact / step), 1) * step
  if depth is None:
    depth = max(round(parameters / (12 * width**2)), 1)
  heads = next((width // n for n in _HEADS if width % n == 0), 1)
  heads = given.get("heads", heads)
  gpt = memory.check_gpt(memory.Gpt(depth, width, heads, context, vocabulary))
  blocks = 12 * depth * width**2
  # Sizes that were given may contradict the number of parameters.
  if given.keys() & {"depth", "width", "heads"} and not (
    parameters / 2 <= blocks <= 2 * parameters
  ):
    raise ValueError(
      f"{parameters:g} parameters, a depth of {depth} and a width of {width}"
      f" ({heads} heads) do not agree: their blocks have {blocks:.3g}"
      " parameters; leave one out, or change it"
    )
  return gpt


def of_gpt(
  gpt: memory.Gpt, parameters: int, options: TrainingOptions
) -> Workload:
  """Returns the workload of a GPT, by the formulas of `memory`."""
  itemsize = memory.PRECISIONS[options.precision].weights
  plain = memory.gpt_flops(gpt, 1)

  def activations(examples: int, tensor: int) -> float:
    block = memory.activations(
      gpt, examples, kind=options.activations, tensor=tensor, itemsize=itemsize
    )
    return gpt.depth * block

  # Parameters of the blocks, and of the embeddings of tokens and positions;
  # biases are few.
  computed = 12 * gpt.depth * gpt.width**2
  computed += (gpt.vocabulary + gpt.context) * gpt.width
  return Workload(
    f"GPT of {parameters:,} parameters, as asked ({computed / 1e9:.3g} x 10^9"
    f" with the embeddings of these sizes): {gpt.depth} blocks of {gpt.width},"
    f" {gpt.heads} heads, {gpt.context} positions, {gpt.vocabulary} tokens",
    parameters=parameters,
    layers=gpt.depth,
    largest=parameters // gpt.depth,
    flops=plain,
    recompute_flops=memory.gpt_flops(gpt, 1, recompute=True) - plain,
    activations=activations,
    boundary_bytes=float(gpt.context * gpt.width * itemsize),
    gpt=gpt,
  )


def find_gpt(
  layers: models.Layers | models.Model, tokens: jax.ShapeDtypeStruct
) -> memory.Gpt | None:
  """Returns the sizes of a GPT on tokens int[B, T]; None for other layers."""
  if not isinstance(layers, tuple):
    return None
  blocks = [layer for layer in layers if isinstance(layer, transformer.Block)]
  first, last = layers[0], layers[-1]
  if not blocks or not isinstance(first, transformer.Embed):
    return None
  return memory.Gpt(
    depth=len(blocks),
    width=first.width,
    heads=blocks[0].heads,
    context=tokens.shape[1],
    vocabulary=getattr(last, "vocabulary", first.vocabulary),
  )


def products(
  loss: Callable[..., Any], params: Any, batch: Any, examples: int
) -> int:
  """Returns the additions and multiplications of the matrix products and
  convolutions of a loss and its gradient. They are counted in the program for
  the first `examples` examples of a batch: XLA's own count has all operations
  in it, and the body of a loop once."""
  first = jax.tree.map(
    lambda x: x.update(shape=(examples, *x.shape[1:])), batch
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  gradient = jax.jit(jax.grad(loss, has_aux=True))
  # Lower, but do not compile: a compiled program has the same products.
  lowered = gradient.lower(
    *jax.tree.map(lambda x: x.update(sharding=None), (params, first, key))
  )
  return hlo.read(lowered.as_text(dialect="hlo")).flops


def of_problem(
  problem: problems.Problem, name: str, options: TrainingOptions
) -> Workload:
  """Returns the workload of a problem, counted in its traced programs."""
  pieces = problem.pieces
  if pieces is None:
    raise ValueError(
      f"{name} has no layers that could be counted: plans are for models of"
      " layers; give the size of one instead of the config, as --params=1e9"
    )
  key = jax.random.key(0)
  params = jax.eval_shape(problem.init, key)
  batch = problem.batches(0, 1)(0, 0)
  examples = len(jax.tree.leaves(batch)[0])
  # [1] Operations, counted in the program of the whole batch.
  shapes = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, batch))
  flops = products(problem.loss, params, shapes, examples) / examples
  # [2] Bytes that JAX keeps for the backward, and bytes after each layer.
  residuals, boundaries = _activations(pieces, params, batch, key)
  # [3] Layers, and whether tensor parallel strategies apply.
  weights: Any = base.weights_of(params)
  sizes = [models.count(layer) for layer in weights]
  tokens = jax.eval_shape(
    lambda b, k: pieces.prepare(b, k, jax.numpy.float32), batch, key
  )
  dense = wait_free.choose(pieces, params, batch, 2)  # for two devices or more
  layers = sum(size > 0 for size in sizes)
  recomputes = options.activations == "full"
  example_bytes = (sum(boundaries) if recomputes else residuals) / examples
  gpt = find_gpt(step_checks.layers_of(pieces), tokens)

  def activations(examples: int, tensor: int) -> float:
    if tensor == 1 or recomputes:
      return examples * example_bytes
    # The counted bytes of one device, divided by the same ratio as the bytes of
    # the formula.
    assert gpt is not None
    split = memory.activations(gpt, 1, kind=options.activations, tensor=tensor)
    return examples * example_bytes * (split / memory.activations(gpt, 1))

  return Workload(
    f"{name}: {sum(sizes):,} parameters in {layers} layers, counted",
    parameters=sum(sizes),
    layers=layers,
    largest=max(sizes),
    flops=flops,
    recompute_flops=flops / 3,  # a forward is a third of forward and backward
    activations=activations,
    # The output of the last layer is not sent.
    boundary_bytes=max(boundaries[: len(sizes) - 1], default=boundaries[-1])
    / examples,
    gpt=gpt,
    dense=tuple(d._replace(rows=d.rows // examples) for d in dense),
  )


def _activations(
  pieces: problems.Pieces, params: Any, batch: base.Batch, key: jax.Array
) -> tuple[int, list[int]]:
  """Returns (bytes kept for the backward of a batch, bytes of each layer's
  output)."""
  boundaries: list[int] = []

  def forward(params, batch, key):
    weights: Any = base.weights_of(params)
    x = pieces.prepare(batch, key, problems.dtype_of(weights))
    for i, layer in enumerate(step_checks.layers_of(pieces)):
      x, _ = wait_free.apply_layer(layer, weights[i], params, i, x, key)
      boundaries.append(memory.bytes_of(x))
    return pieces.criterion(x, batch)

  return memory.residual_bytes(forward, params, batch, key), boundaries
