"""Model parallelism: products and messages of each machine, from shapes alone.

A model replica is divided among P machines, layer by layer:

  - each machine has an equal part of a vector. For a dense layer all machines
    send their inputs to every machine that computes a part of the outputs; in
    the backward pass the gradients of these inputs return;
  - each machine has a tile of an image; the grid of tiles is as square as
    possible. A locally connected layer reads pixels beyond the tile (a halo):
    the machines that have these pixels send them, and in the backward pass
    their gradients return;
  - a mean over the image adds up the sums of the tiles; each feature is added
    up at one machine;
  - for the softmax each machine sends the maximum and the sum of its logits.

Every machine reads its part of the input itself, and a weight belongs to one
machine, so inputs and weights are not sent. Operations are 2 for a product and
its addition. The backward pass has twice the operations of the forward pass,
once for the gradients of weights and once for the gradients of inputs; the
first layer needs no gradients of inputs.

Index letters:
  B  examples of a batch
  P  machines
  H, W, C  rows, columns and features of an image

Reference:
  Dean et al., "Large scale distributed deep networks", NIPS 2012, section 3.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from asgd import checks, models
from asgd.orders.phases import Phase
from asgd.parallel import halo

Span = tuple[int, int]  # [first, end)
Sends = list[dict[int, float]]  # by sender: receiver -> count of numbers

# A step is simulated message by message, from all machines to all. With this
# number of machines it takes half a minute.
MOST_MACHINES = 256
_LAYERS = models.Flatten, models.Dense, models.Classifier, halo.Local


class _Activations(NamedTuple):
  """The part of an example's activations that each machine has."""

  counts: list[int]  # P, count of numbers
  shape: tuple[int, ...]  # (C,) or (H, W, C)
  rows: list[Span] = []  # P, each machine's rows of an image
  columns: list[Span] = []  # P, each machine's columns of an image


class _Stage(NamedTuple):
  """A layer, or a part of one, in the forward pass."""

  products: list[int]  # P, products for an example
  # Numbers sent for an example before the stage; none before the first stage.
  sends: Sends
  activations: _Activations  # outputs of the stage


def grid(machines: int) -> tuple[int, int]:
  """Returns the numbers of rows and columns of tiles, as equal as possible.

  Example:
    >>> grid(8), grid(81)
    ((4, 2), (9, 9))
  """
  checks.integer("machines", machines)
  # The largest divisor up to the square root; with a prime number of machines
  # there is one column.
  columns = next(
    n for n in range(math.isqrt(machines), 0, -1) if machines % n == 0
  )
  return machines // columns, columns


def _spans(length: int, parts: int) -> list[Span]:
  """Cuts a length into nearly equal parts; some may be empty."""
  cuts = [length * i // parts for i in range(parts + 1)]
  return list(itertools.pairwise(cuts))


def _overlap(span: Span, other: Span) -> int:
  return max(min(span[1], other[1]) - max(span[0], other[0]), 0)


def _divide(shape: tuple[int, ...], machines: int) -> _Activations:
  """Divides the activations of an example among machines."""
  if len(shape) == 1:
    return _Activations([b - a for a, b in _spans(shape[0], machines)], shape)
  # Tiles in row-major order: machine m has row m // width of the grid.
  height, width = grid(machines)
  rows = [r for r in _spans(shape[0], height) for _ in range(width)]
  columns = _spans(shape[1], width) * height
  counts = [
    (bottom - top) * (right - left) * shape[2]
    for (top, bottom), (left, right) in zip(rows, columns, strict=True)
  ]
  return _Activations(counts, shape, rows, columns)


def _vector_stage(
  before: _Activations, outputs: int, *, mean: bool = False
) -> _Stage:
  """Returns the stage of a dense layer, or of a mean over the image. For a
  dense layer each machine sends all its inputs to every other machine with
  outputs; for a mean it sends a sum for each feature of the other machine."""
  machines = len(before.counts)
  after = _divide((outputs,), machines)
  sends: Sends = [
    {
      receiver: features if mean else count
      for receiver, features in enumerate(after.counts)
      if receiver != sender and count and features
    }
    for sender, count in enumerate(before.counts)
  ]
  # A mean has no products.
  inputs = 0 if mean else math.prod(before.shape)
  return _Stage([inputs * count for count in after.counts], sends, after)


def _local_stage(
  before: _Activations, layer: halo.Local, shape: tuple[int, ...]
) -> _Stage:
  """Returns the stage of a locally connected layer: other machines send the
  pixels beyond a tile."""
  machines = len(before.counts)
  after = _divide(shape, machines)
  low = (layer.kernel - 1) // 2  # as the padding of `halo.Local`

  def input_span(span):
    """Returns the span of inputs that a span of outputs reads. No machine has
    the pixels of it that are beyond the image."""
    first, last = span[0] * layer.stride - low, (span[1] - 1) * layer.stride
    return first, last - low + layer.kernel

  sends: Sends = [{} for _ in range(machines)]
  for receiver in range(machines):
    if not after.counts[receiver]:
      continue
    rows = input_span(after.rows[receiver])
    columns = input_span(after.columns[receiver])
    for sender in range(machines):
      pixels = _overlap(before.rows[sender], rows)
      pixels *= _overlap(before.columns[sender], columns)
      if sender != receiver and pixels:
        sends[sender][receiver] = pixels * before.shape[2]
  products = layer.kernel**2 * before.shape[2]
  return _Stage([products * count for count in after.counts], sends, after)


def _check(layers: Any) -> None:
  """Raises ValueError for a layer that cannot be divided."""
  # A Model is a NamedTuple: of functions, not of layers.
  if isinstance(layers, models.Model) or not isinstance(layers, tuple):
    raise ValueError(
      f"a {type(layers).__name__} has no layers that could be divided among"
      " machines; give a tuple of layers, as asgd.models.build('mlp', 10) does"
    )
  for layer in layers:
    is_plain_head = isinstance(layer, models.Head) and layer.norm == "none"
    if not is_plain_head and not isinstance(layer, _LAYERS):
      raise ValueError(
        f"layer {type(layer).__name__} cannot be divided among machines; these"
        " can: Flatten, Dense, Classifier, Local, and Head without a norm"
      )


@functools.lru_cache(maxsize=64)  # traces each layer of a model once
def _shape_after(
  layer: nn.Module, x: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
  """Returns the shape of a layer's outputs for inputs of the shape `x`."""

  def run(x):
    return layer.init_with_output(jax.random.key(0), x, train=False)[0]

  return jax.eval_shape(run, x)


def _forward(
  layers: models.Layers, example: jax.ShapeDtypeStruct, machines: int
) -> list[_Stage]:
  """Returns the stages of the forward pass, in order."""
  x, activations = example, _divide(example.shape[1:], machines)
  stages: list[_Stage] = []
  for layer in layers:
    x = _shape_after(layer, x)
    shape = x.shape[1:]
    # To flatten a tile, a machine sends nothing.
    if isinstance(layer, models.Flatten):
      activations = _Activations(activations.counts, shape)
      continue
    if isinstance(layer, halo.Local):
      stages.append(_local_stage(activations, layer, shape))
    else:
      # A head is a mean over the image, then a dense layer.
      if isinstance(layer, models.Head):
        features = activations.shape[2]
        stages.append(_vector_stage(activations, features, mean=True))
        activations = stages[-1].activations
      stages.append(_vector_stage(activations, shape[0]))
    activations = stages[-1].activations
  return stages


def phases(
  layers: models.Layers,
  example: jax.ShapeDtypeStruct,
  machines: int,
  *,
  itemsize: int = 4,
) -> list[Phase]:
  """Returns the phases of a step: the layers, forward and then backward.

  Args:
    layers: dense layers of `asgd.models`, or locally connected layers and a
      head.
    example: a batch of inputs, [B, C] or [B, H, W, C]; its shape is read.
    machines: P, at most MOST_MACHINES.
    itemsize: bytes of an activation, and of its gradient.

  Returns:
    Phases for `asgd.orders.phases.step_seconds`.

  Raises:
    ValueError: for a layer that cannot be divided, for too many machines, for
      inputs that are neither vectors nor images, and for outputs that are no
      logits.

  Example:
    Two machines, each with 2 of 4 hidden units and 1 of 2 logits.

    >>> from asgd import models
    >>> layers = models.build("mlp", 2, hidden=(4,))
    >>> one = jax.ShapeDtypeStruct((1, 3), "float32")
    >>> for phase in phases(layers, one, 2):
    ...   print(phase.flops, phase.sends)
    [12, 12] [{1: 8}, {0: 8}]
    [8, 8] [{1: 8}, {0: 8}]
    [16, 16] [{1: 8}, {0: 8}]
    [12, 12] [{}, {}]
  """
  checks.integer("machines", machines, most=MOST_MACHINES)
  checks.integer("itemsize", itemsize)
  _check(layers)
  if len(example.shape) not in (2, 4):
    raise ValueError(
      f"inputs must be vectors [B, C] or images [B, H, W, C], not of shape"
      f" {tuple(example.shape)}"
    )
  stages = _forward(layers, example, machines)
  if not stages or len(stages[-1].activations.shape) != 1:
    raise ValueError("the last layer must give logits [B, C]; add a Head")
  return _phases(stages, example.shape[0], itemsize)


def _phases(stages: Sequence[_Stage], batch: int, itemsize: int) -> list[Phase]:
  """Returns the phases of the forward and of the backward. A phase computes,
  then sends the numbers that the next phase needs; the last phase of the
  forward sends the numbers of the softmax."""
  machines = range(len(stages[0].products))

  def phase(stage: _Stage, times: int, sends: Sends) -> Phase:
    flops = [2 * times * batch * products for products in stage.products]
    number_bytes = batch * itemsize  # one number for each example
    sent = [{to: n * number_bytes for to, n in s.items()} for s in sends]
    return Phase(flops, sent)

  def reverse(sends: Sends) -> Sends:
    """Returns the sends of gradients: from the receivers of activations back to
    the senders."""
    return [
      {to: s[machine] for to, s in enumerate(sends) if machine in s}
      for machine in machines
    ]

  # The maximum and the sum of the logits of each machine that has any.
  counts = stages[-1].activations.counts
  with_logits = [i for i, count in enumerate(counts) if count]
  softmax: Sends = [
    {to: 2 for to in with_logits if to != machine and machine in with_logits}
    for machine in machines
  ]
  first, *others = stages
  # Stage i sends the numbers that stage i + 1 reads; the last stage sends the
  # numbers of the softmax.
  after = [*(stage.sends for stage in others), softmax]
  forward = [
    phase(stage, 1, sends) for stage, sends in zip(stages, after, strict=True)
  ]
  # Gradients of weights and of inputs; the first stage needs no gradients of
  # inputs.
  backward = [phase(stage, 2, reverse(stage.sends)) for stage in others[::-1]]
  return [*forward, *backward, phase(first, 1, [{} for _ in machines])]
