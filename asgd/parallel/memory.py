"""Memory of training: bytes of parameters, optimizer and activations.

Training with Adam in mixed precision needs 16 bytes per parameter: 2 for the
weight and 2 for the gradient in bfloat16, and 4 each for a float32 copy and two
moments. So 1.5 billion parameters need 24 GB of 10^9 bytes. The formulas
estimate the bytes from sizes alone; `bytes_of` and `optimizer_bytes` count them
for given arrays.

Index letters:
  N  devices that share states (ZeRO)
  B  sequences of a microbatch (b of the papers)
  T  positions (s)
  C  features (h)
  A  heads (a)
  L  blocks (l)
  V  tokens of the vocabulary

References:
  Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
  parameter models", SC 2020.
  Korthikanti et al., "Reducing activation recomputation in large transformer
  models", MLSys 2023: activations.
  Narayanan et al., "Efficient large-scale language model training on GPU
  clusters using Megatron-LM", SC 2021: parameters and operations of a GPT.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import algorithms, checks, internals, losses, names

GB = 10**9


class Bytes(NamedTuple):
  """Bytes of training."""

  weights: float  # as the forward reads them
  gradients: float
  master: float  # a copy of the weights in more precision
  optimizer: float  # moments
  stash: float = 0.0  # further versions of the weights

  @property
  def total(self) -> float:
    """The sum of all fields."""
    return sum(self)


class Precision(NamedTuple):
  """Bytes of one number, by its kind."""

  weights: int
  gradients: int
  master: int  # 0: the weights are the only copy
  moments: int


PRECISIONS = {
  "float32": Precision(4, 4, 0, 4),
  # bfloat16 weights and gradients, all else float32 (ZeRO's 16 with Adam).
  "mixed": Precision(2, 2, 4, 4),
  # As "mixed", with gradients added up in float32 (Megatron's 18 with Adam).
  "mixed_main_gradients": Precision(2, 4, 4, 4),
  # float32 weights and gradients, and a bfloat16 copy to compute with, which a
  # loss makes by a cast. The copy counts as the weights.
  "cast": Precision(2, 4, 4, 4),
  "bfloat16": Precision(2, 2, 0, 2),
}

# Moments of each parameter; Adafactor's rows and columns are negligible.
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adafactor": 0}

ZERO_STAGES = (0, 1, 2, 3)


def state(
  parameters: float = 1,
  optimizer: str = "adam",
  precision: str = "mixed",
  *,
  zero: int = 0,
  data: int = 1,
  tensor: int = 1,
  stages: int = 1,
  versions: int = 1,
) -> Bytes:
  """Returns the bytes on one device, without activations. Raises ValueError for
  an unknown name, and for a number out of range.

  Parameters are split evenly over tensor x stages. N `data` parallel devices
  divide arrays by `zero`: 0 no arrays, 1 the optimizer's state and the master
  copy, 2 also gradients, 3 also weights. A pipeline keeps `versions` versions
  of the weights.

  Example:
    >>> [state(zero=z, data=4).total for z in ZERO_STAGES]
    [16.0, 7.0, 5.5, 4.0]
    >>> [round(state(p).total, 2) for p in (0.32, 1.5, 17.2, 175)]
    [5.12, 24.0, 275.2, 2800.0]
  """
  checks.nonnegative("parameters", parameters)
  moments = names.lookup("optimizer", optimizer, OPTIMIZERS)
  sizes = names.lookup("precision", precision, PRECISIONS)
  if zero not in ZERO_STAGES or isinstance(zero, bool):
    raise ValueError(f"zero must be one of {ZERO_STAGES}, not {zero!r}")
  counts = {"data": data, "tensor": tensor, "stages": stages}
  for name, count in {**counts, "versions": versions}.items():
    checks.integer(name, count)
  device_parameters = parameters / (tensor * stages)

  def share(bytes_, stage):
    """Returns the bytes of one kind of number, which ZeRO divides from `stage`
    on."""
    number_bytes = bytes_ / data if zero >= stage else float(bytes_)
    return device_parameters * number_bytes

  return Bytes(
    share(sizes.weights, 3),
    share(sizes.gradients, 2),
    share(sizes.master, 1),
    share(moments * sizes.moments, 1),
    share((versions - 1) * sizes.weights, 3),
  )


def bytes_of(tree: Any) -> int:
  """Returns the bytes of arrays, or of their shapes."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def optimizer_bytes(tx: optax.GradientTransformation, params: Any) -> int:
  """Returns the bytes of an optimizer's state, given parameters or shapes."""
  return bytes_of(jax.eval_shape(tx.init, params))


class RecipeBytes(NamedTuple):
  """Memory of a recipe against staleness, in bytes per parameter."""

  server: float  # state of the algorithm, beside the parameters
  tickets: float  # copies of the parameters that each worker was sent
  worker: float  # state of one worker, beside parameters and gradient

  @property
  def total(self) -> float:
    """Bytes at the server, beside the parameters."""
    return self.server + self.tickets


_SAMPLE = 1 << 16  # parameters on which a recipe is measured


def recipe_bytes(recipe: str, workers: int, **options: Any) -> RecipeBytes:
  """Counts the float32 memory of a recipe of `asgd.algorithms`.

  Tickets count if the recipe's update reads them (compensation, the gap); a
  server that reports gaps keeps tickets for every recipe. Arguments and errors
  are as in `algorithms.build`.

  Example:
    >>> recipe_bytes("dana_zero", 8)  # 8 velocities, a pending one, their sum
    RecipeBytes(server=40.0, tickets=0.0, worker=0.0)
    >>> recipe_bytes("dc_asgd_c", 8).tickets
    32.0
  """
  rule = algorithms.build(recipe, 0.1, workers, **options)
  params: Any = jax.ShapeDtypeStruct((_SAMPLE,), jnp.float32)
  # [1] The server's state, of shapes alone: nothing is allocated.
  algorithm = rule.one_message()
  state = jax.eval_shape(algorithm.init, params)
  server_bytes = bytes_of(state)
  if rule.every > 1:  # the server has the sum of the messages of an update
    server_bytes += bytes_of(params)
  # [2] Tickets: float32 parameters of each worker.
  reads_sent = rule.server().reads_sent
  assert reads_sent is not None
  tickets = 4.0 * workers if reads_sent(params) else 0.0
  # [3] A worker's state. Its loss is never called, only `init`.
  worker_bytes = 0
  if rule.at_worker is not None:
    worker_bytes = optimizer_bytes(rule.at_worker, params)
  elif rule.worker is not None:
    zero_loss = jnp.float32(0), losses.Aux(())
    worker = rule.make_worker(lambda params, batch, key: zero_loss)
    worker_bytes = bytes_of(jax.eval_shape(worker.init, params))
  # Round down to whole bytes per parameter, which leaves out counters.
  server, worker_state = (
    float(size // _SAMPLE) for size in (server_bytes, worker_bytes)
  )
  return RecipeBytes(server, tickets, worker_state)


class Gpt(NamedTuple):
  """The sizes of a GPT."""

  depth: int  # L
  width: int  # C
  heads: int  # A
  context: int  # T
  vocabulary: int  # V


def check_gpt(gpt: Gpt) -> Gpt:
  """Returns the sizes; raises ValueError for impossible sizes."""
  for name, value in gpt._asdict().items():
    checks.integer(name, value)
  if gpt.width % gpt.heads:
    raise ValueError(
      f"heads must divide the width: {gpt.heads} does not divide {gpt.width}"
    )
  return gpt


def gpt_flops(gpt: Gpt, sequences: int, *, recompute: bool = False) -> int:
  """Returns the additions and multiplications of a forward and a backward.

  72 B T L C^2 (1 + T / (6 C) + V / (12 L C)), or, if the forward of all blocks
  is computed again (`recompute`), 96 B T L C^2 (1 + T / (6 C) + V / (16 L C)).
  """
  depth, width, _, context, vocabulary = gpt
  # The forward of a position in a block: a multiplication and an addition for
  # each of 12 C^2 weights, and 2 T C operations each for the scores and for
  # their product with the values.
  block = 24 * width**2 + 4 * context * width
  # A backward counts twice: gradients of inputs, and gradients of weights.
  passes = 4 if recompute else 3
  position = passes * depth * block + 3 * 2 * width * vocabulary
  return sequences * context * position


def step_flops(
  gpt: Gpt,
  sequences: int,
  microbatches: int = 1,
  rounds: int = 1,
  *,
  tensor: int = 1,
  stages: int = 1,
  recompute: bool = False,
) -> int:
  """Returns the additions and multiplications of the matrix products of one
  device in a step.

  These are the operations of `gpt_flops` divided by the devices, and the
  surplus of a circular pipeline: it drops the results of S - 1 of its v M + S -
  1 turns, and each stage computes all logits. The vocabulary is rounded up to a
  multiple of `tensor`.

  Args:
    gpt: sizes of the model.
    sequences: sequences of a replica, which `microbatches` divide.
    microbatches: M of a pipeline.
    rounds: v, how often a microbatch passes through the stages.
    tensor: devices that share each matrix.
    stages: S of a pipeline.
    recompute: whether the forward of blocks is computed again.

  Example:
    >>> gpt = Gpt(4, 64, 8, context=64, vocabulary=100)
    >>> step_flops(gpt, 8) == gpt_flops(gpt, 8)
    True
    >>> round(step_flops(gpt, 8, 4, stages=2) / gpt_flops(gpt, 8), 3)  # not 0.5
    0.635
  """
  depth, width, _, context, vocabulary = gpt
  tokens = -(-vocabulary // tensor) * tensor
  turns = microbatches * rounds + stages - 1 if stages > 1 else microbatches
  blocks = depth // (stages * rounds) if stages > 1 else depth
  block = 24 * width**2 + 4 * context * width
  positions = context * sequences // microbatches * turns
  logits = 2 * width * tokens * context * sequences
  # The last product of a block (4 C x C) is not computed again: the backward
  # reads only its inputs.
  recomputed = block - 8 * width**2 if recompute else 0
  return (blocks * (3 * block + recomputed) * positions + 3 * logits) // tensor


def loop_activations(
  gpt: Gpt,
  sequences: int,
  *,
  tensor: int = 1,
  sequence: bool = False,
  itemsize: int = 2,
) -> float:
  """Returns the bytes that a block without dropout keeps in a loop. There XLA
  keeps all arrays that JAX keeps for a backward; with a = `itemsize` and t =
  `tensor`:

    T B C (24 + 2 a + (28 a + 2 a A T / C) / t)

  The norms compute in float32: six times the stream. The devices divide four
  arrays of the size of the stream (queries, keys, values and outputs), six
  arrays of hidden features and two of scores. With `sequence` they divide all
  arrays.
  """
  _, width, heads, context, _ = check_gpt(gpt)
  # Bytes for a number of the stream: `whole` are complete on each device (the
  # norms in float32, and two inputs), and `split` are divided over "tensor".
  whole, split = 24 + 2 * itemsize, 28.0 * itemsize
  split += 2 * itemsize * heads * context / width
  if sequence:
    whole, split = 0, whole + split
  return context * sequences * width * (whole + split / tensor)


class GptStream(NamedTuple):
  """How a GPT uses the axes "tensor" and "pipe"."""

  gpt: Gpt
  sequences: int  # B
  sequence: bool = False
  microbatches: int = 1
  rounds: int = 1
  recompute: bool = False


def step_temporary(
  stream: GptStream,
  *,
  parameters: int,
  stages: int,
  tensor: int = 1,
  itemsize: int = 2,
  zero: int = 0,
) -> float:
  """Returns the temporary bytes of a step on one device, without its state.

  Without a pipeline the peak is at one of two times:

  - the end of the forward: activations of all blocks, weights in the dtype of
    the computation, and logits. Of `activations` only the part that devices
    divide counts: XLA computes the other arrays again where they are read;
  - the end of the backward: all gradients, in float32.

  A circular pipeline is a loop. It has the activations of all turns and once
  more those of the current turn, and gradients in float32. With several rounds
  each turn keeps its weights. At the end of a step ZeRO 1 and 2 have gradients
  and new weights, both whole.

  `parameters` is the number of parameters on the device; the other arguments
  are as in `step_flops` and `loop_activations`. The formula was fitted to
  programs of libtpu 0.0.42.
  """
  gpt, sequences, sequence, microbatches, rounds, recompute = stream
  cast_nbytes = itemsize if itemsize < 4 else 0  # bytes of a cast weight
  # [1] Logits in float32, and weights in the dtype of the computation.
  total = 4 * sequences * gpt.context * gpt.vocabulary / tensor
  total += parameters * cast_nbytes
  # The end of a step: gradients, and with ZeRO 1 and 2 new weights.
  at_end = parameters * (cast_nbytes + (8 if zero in (1, 2) else 4))
  # [2] Without a pipeline: all blocks at the end of the forward, or all
  # gradients and one block at the end of the backward.
  if stages == 1:
    inputs = gpt.context * sequences * gpt.width * itemsize
    block = inputs * (12 + gpt.heads * gpt.context / gpt.width) / tensor
    return max(total + gpt.depth * block, at_end, 4 * parameters + block)
  # [3] A pipeline: the arrays that the loop keeps for each turn, and for one
  # turn more.
  turns = microbatches * rounds + stages - 1
  blocks = gpt.depth // (stages * rounds)
  micro = sequences // microbatches
  block = loop_activations(
    gpt, micro, tensor=tensor, sequence=sequence, itemsize=itemsize
  )
  if recompute:  # inputs of blocks, and all of one block
    n_parts = tensor if sequence else 1
    inputs = micro * gpt.context * gpt.width * itemsize
    total += (turns + 1) * blocks * inputs / n_parts + block
  else:
    total += (turns + 1) * blocks * block
  total += 4 * parameters  # gradients in float32
  # With several rounds the loop chooses the weights of a turn, and keeps them.
  if rounds > 1:
    total += turns * blocks * 12 * gpt.width**2 / tensor * itemsize
  return max(total, at_end)


ACTIVATIONS: dict[str, str] = {
  "plain": "everything is kept",
  "sequence": "tensor and sequence parallel: everything is split",
  "full": "the input of each block, and its forward is computed again",
}


def activations(
  gpt: Gpt,
  sequences: int,
  *,
  kind: str = "plain",
  tensor: int = 1,
  itemsize: int = 2,
) -> float:
  """Returns the bytes of activations that a block keeps for its backward on one
  device, with 16-bit numbers and masks of dropout of one byte:

    plain     T B C (34 + 5 A T / C) on one device; on t tensor parallel devices
              T B C (10 + 24 / t + 5 A T / (C t))
    sequence  (T B C / t) (34 + 5 A T / C)
    full      2 T B C

  `sequences` is B, and `itemsize` the bytes of an activation: 4 doubles the
  bytes of all arrays but the masks. Raises ValueError for another `kind`, and
  for impossible sizes.

  Example:
    >>> gpt3 = Gpt(96, 12288, 96, context=2048, vocabulary=51200)
    >>> activations(gpt3, 1) / 2**20  # MiB of a block
    2736.0
  """
  names.lookup("kind of activations", kind, ACTIVATIONS)
  checks.integer("tensor", tensor)
  checks.integer("sequences", sequences, 0)
  checks.integer("itemsize", itemsize)
  _, width, heads, context, _ = check_gpt(gpt)
  stream = context * sequences * width
  if kind == "full":
    return float(itemsize * stream)
  # The 34 of the paper's formula: `whole` bytes are complete on each device
  # (norms, inputs, two masks), `split` bytes are divided by columns or heads.
  whole, split = 4 * itemsize + 2, 12 * itemsize
  # The softmax's output before and after dropout, and the mask of dropout.
  scores = (2 * itemsize + 1) * heads * context / width
  if kind == "sequence":
    return stream * (whole + split + scores) / tensor
  return stream * (whole + (split + scores) / tensor)


def residual_bytes(
  forward: Callable[..., Any], params: Any, *inputs: Any
) -> int:
  """Returns the bytes that JAX keeps of a forward for its backward, without the
  parameters. XLA may keep fewer: it fuses operations and computes cheap ones
  again. `forward`, (params, *inputs) -> y, is traced and not run, so shapes may
  stand for arrays."""

  def run(params, *inputs):
    return jax.vjp(lambda p: forward(p, *inputs), params)

  program, (y, _) = jax.make_jaxpr(run, return_shape=True)(params, *inputs)
  weights = set(program.jaxpr.invars[: len(jax.tree.leaves(params))])
  # The outputs after y are the arrays that the backward function keeps. A set,
  # as an array that two operations need is kept once.
  residuals = {
    variable
    for variable in program.jaxpr.outvars[len(jax.tree.leaves(y)) :]
    if not isinstance(variable, internals.Literal)
  }
  return bytes_of([v.aval for v in residuals - weights])
