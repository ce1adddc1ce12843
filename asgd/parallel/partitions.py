"""Model parallelism: what each machine computes and sends, of a model's shapes.

A model replica is divided among P machines, layer by layer:

  - of a vector each machine has an equal part. A dense layer's machine computes
    its part of the outputs, for which all others send it their inputs, and in
    the backward pass sends each its part of the gradient of these;
  - of an image each machine has a tile of a grid, the one most like a square. A
    locally connected layer reads pixels beyond the tile (a halo), which their
    owners send; in the backward pass gradients go back the same way;
  - a mean over the image is the sum of what the tiles come to: a machine has
    the sums of its part of the features;
  - for the softmax each sends the maximum and the sum of its logits.

Every machine reads what it needs of the input by itself. Weights belong to one
machine each, so that nothing of them is ever sent. Operations are those of the
products (2 of a product and a sum); the backward pass has twice as many, once
for weights and once for inputs, which the first layer does without.

Index letters:
  B  examples of a batch
  P  machines
  H, W, C  rows, columns and features of an image

Reference:
  Dean et al., "Large scale distributed deep networks", NIPS 2012, section 3.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from asgd import checks, models
from asgd.orders.phases import Phase
from asgd.parallel import halo

Span = tuple[int, int]  # from the first to behind the last
Sends = list[dict[int, float]]  # of each machine: receiver -> numbers


# All machines may send to all others in each phase, and a step is played
# message by message: with so many it takes half a minute.
MOST_MACHINES = 256
_LAYERS = models.Flatten, models.Dense, models.Classifier, halo.Local


class _Held(NamedTuple):
  """Which part of an example's activations each machine has."""

  counts: list[int]  # P, numbers
  shape: tuple[int, ...]  # (C,) or (H, W, C)
  rows: list[Span] = []  # P, of an image
  columns: list[Span] = []


class _Stage(NamedTuple):
  """A layer, or a part of one, in the forward pass."""

  products: list[int]  # P, of an example
  sends: Sends  # before it, by an example; of the first stage nothing
  held: _Held  # after it


def grid(machines: int) -> tuple[int, int]:
  """Returns the rows and columns of tiles, as near to each other as can be.

  Example:
    >>> grid(8), grid(81)
    ((4, 2), (9, 9))
  """
  checks.whole("machines", machines)
  columns = next(
    n for n in range(math.isqrt(machines), 0, -1) if machines % n == 0
  )
  return machines // columns, columns


def _spans(length: int, parts: int) -> list[Span]:
  """Equal parts, as near as can be; empty ones of fewer than there are."""
  cuts = [length * i // parts for i in range(parts + 1)]
  return list(zip(cuts, cuts[1:], strict=False))


def _size(span: Span) -> int:
  return max(span[1] - span[0], 0)


def _overlap(one: Span, other: Span) -> int:
  return _size((max(one[0], other[0]), min(one[1], other[1])))


def _hold(shape: tuple[int, ...], machines: int) -> _Held:
  """Divides activations of an example."""
  if len(shape) == 1:
    return _Held([_size(s) for s in _spans(shape[0], machines)], shape)
  height, width = grid(machines)
  rows = [r for r in _spans(shape[0], height) for _ in range(width)]
  columns = _spans(shape[1], width) * height
  counts = [
    _size(r) * _size(c) * shape[2] for r, c in zip(rows, columns, strict=True)
  ]
  return _Held(counts, shape, rows, columns)


def _all_to_all(held: _Held, after: _Held, *, inputs: bool) -> Sends:
  """Every machine that has numbers sends those, or else as many as they get, to
  all others that have numbers afterwards."""
  return [
    {
      to: count if inputs else wanted
      for to, wanted in enumerate(after.counts)
      if to != own and count and wanted
    }
    for own, count in enumerate(held.counts)
  ]


def _dense(held: _Held, outputs: int) -> _Stage:
  """All inputs go to every machine that has outputs."""
  after = _hold((outputs,), len(held.counts))
  products = [math.prod(held.shape) * count for count in after.counts]
  return _Stage(products, _all_to_all(held, after, inputs=True), after)


def _mean(held: _Held) -> _Stage:
  """Sums of tiles go to the machines that have the features."""
  machines = len(held.counts)
  after = _hold(held.shape[2:], machines)
  return _Stage([0] * machines, _all_to_all(held, after, inputs=False), after)


def _local(held: _Held, layer: halo.Local, shape: tuple[int, ...]) -> _Stage:
  """Pixels beyond a machine's tile come from those that have them."""
  machines, after = len(held.counts), _hold(shape, len(held.counts))
  low = (layer.kernel - 1) // 2

  def needed(span):
    first, last = span[0] * layer.stride - low, (span[1] - 1) * layer.stride
    return first, last - low + layer.kernel

  sends: Sends = [{} for _ in range(machines)]
  for to in range(machines):
    if not after.counts[to]:
      continue
    rows, columns = needed(after.rows[to]), needed(after.columns[to])
    for own in range(machines):
      pixels = _overlap(held.rows[own], rows)
      pixels *= _overlap(held.columns[own], columns)
      if own != to and pixels:
        sends[own][to] = pixels * held.shape[2]
  products = layer.kernel**2 * held.shape[2]
  return _Stage([products * count for count in after.counts], sends, after)


def _stages(layer: Any, held: _Held, shape: tuple[int, ...]) -> list[_Stage]:
  """The stages of a layer whose outputs have a shape, of an example."""
  match layer:
    case models.Dense() | models.Classifier():
      return [_dense(held, shape[0])]
    case halo.Local():
      return [_local(held, layer, shape)]
  mean = _mean(held)  # of a Head
  return [mean, _dense(mean.held, shape[0])]


def _check(layers: Any) -> None:
  """Raises ValueError for a layer that cannot be divided."""
  if not isinstance(layers, tuple):
    raise ValueError(
      f"a {type(layers).__name__} has no layers that could be divided among"
      " machines; give a tuple of layers, as asgd.models.build('mlp', 10) does"
    )
  for layer in layers:
    plain = isinstance(layer, models.Head) and layer.norm == "none"
    if not plain and not isinstance(layer, _LAYERS):
      raise ValueError(
        f"layer {type(layer).__name__} cannot be divided among machines; these"
        " can: Flatten, Dense, Classifier, Local, and Head without a norm"
      )


@functools.lru_cache(maxsize=64)  # of the layers of a model, traced once
def _shape_after(
  layer: nn.Module, x: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
  def run(x):
    return layer.init_with_output(jax.random.key(0), x, train=False)[0]

  return jax.eval_shape(run, x)


def _forward(layers, example, machines) -> Iterator[_Stage]:
  x, held = example, _hold(example.shape[1:], machines)
  for layer in layers:
    x = _shape_after(layer, x)
    if isinstance(layer, models.Flatten):
      held = _Held(held.counts, x.shape[1:])  # whoever had them has them
      continue
    for stage in _stages(layer, held, x.shape[1:]):
      held = stage.held
      yield stage


def _back(sends: Sends) -> Sends:
  """Gradients go from where activations went."""
  back: Sends = [{} for _ in sends]
  for own, messages in enumerate(sends):
    for to, numbers in messages.items():
      back[to][own] = numbers
  return back


def phases(
  layers: models.Layers,
  example: jax.ShapeDtypeStruct,
  machines: int,
  *,
  itemsize: int = 4,
) -> list[Phase]:
  """Returns the phases of a step: those of the layers, forward and backward.

  Args:
    layers: of `asgd.models`: dense ones, or locally connected ones and a head.
    example: a batch of inputs, [B, C] or [B, H, W, C]; its shape is read.
    machines: P, at most MOST_MACHINES.
    itemsize: bytes of an activation, and of its gradient.

  Returns:
    Phases for `asgd.orders.phases.step_seconds`.

  Raises:
    ValueError: for a layer that cannot be divided, too many machines, inputs of
      another shape, or outputs that are no logits.

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
  checks.whole("machines", machines, most=MOST_MACHINES)
  checks.whole("itemsize", itemsize)
  _check(layers)
  if len(example.shape) not in (2, 4):
    raise ValueError(
      f"inputs must be vectors [B, C] or images [B, H, W, C], not of shape"
      f" {tuple(example.shape)}"
    )
  stages = list(_forward(layers, example, machines))
  if not stages or len(stages[-1].held.shape) != 1:
    raise ValueError("the last layer must give logits [B, C]; add a Head")
  return _phases(stages, example.shape[0], itemsize)


def _phases(stages: Sequence[_Stage], batch: int, itemsize: int) -> list[Phase]:
  """Forward, the softmax's message, and backward."""

  def flops(stage, times):
    return [2 * times * batch * products for products in stage.products]

  def nbytes(sends: Sends) -> Sends:
    each = batch * itemsize
    return [{to: n * each for to, n in one.items()} for one in sends]

  before = [[{} for _ in stages[0].sends], *(s.sends for s in stages[1:])]
  holders = [i for i, count in enumerate(stages[-1].held.counts) if count]
  softmax: Sends = [
    {to: 2 for to in holders if to != own and own in holders}
    for own in range(len(stages[0].products))
  ]
  forward = [
    Phase(flops(stage, 1), nbytes(sends))
    for stage, sends in zip(stages, [*before[1:], softmax], strict=True)
  ]
  backward = [
    Phase(flops(stage, 2 if number else 1), nbytes(_back(before[number])))
    for number, stage in enumerate(stages)
  ]
  return forward + backward[::-1]
