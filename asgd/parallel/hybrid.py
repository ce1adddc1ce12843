"""Hybrid meshes: replicas of a model that each have several devices.

A mesh names its axes, and each name says what its devices share:

  data    examples: replicas, `asgd.parallel.data_parallel`
  tensor  the matrices of a GPT: `asgd.parallel.tensor`
  pipe    the blocks of a GPT: `asgd.parallel.circular`
  rows    the images of a ResNet: `asgd.parallel.halo`
  columns the images of a ResNet, beside rows or alone

A MeshModel is a loss for use inside shard_map, the placement of parameters, and
functions from whole parameters and back. On any mesh the step gives the numbers
that `data_parallel.make_step` gives on one device for each replica. So any mesh
can load the checkpoint of another mesh.

References:
  Narayanan et al., "Efficient large-scale language model training on GPU
  clusters using Megatron-LM", SC 2021, section 3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from asgd import base, checks, models, problems
from asgd import losses as losses_lib
from asgd.models import transformer
from asgd.parallel import (
  circular,
  data_parallel,
  halo,
  meshes,
  step_checks,
  tensor,
  zero,
)


class MeshModel(NamedTuple):
  """A model for a mesh; by default each device has the whole model."""

  loss: losses_lib.Loss  # inside shard_map; the mean over a replica's examples
  specs: zero.Specs = zero.replicated  # divide the trained parameters
  # Whole parameters -> trained parameters, and back.
  split: Callable[[optax.Params], optax.Params] = lambda params: params
  join: Callable[[optax.Params], optax.Params] = lambda params: params


def language(
  layers: models.Layers,
  mesh: Mesh,
  *,
  sequence: bool = False,
  microbatches: int = 1,
  rounds: int = 1,
  recompute: bool = False,
) -> MeshModel:
  """Makes a GPT for the axes "tensor" and "pipe", as far as the mesh has them.

  The loss is the loss of `problems.language`, of windows int[B, T + 1]. Dropout
  draws the numbers of one device, except in a pipeline, where blocks have other
  keys.

  Args:
    layers: the layers of `transformer.gpt`.
    mesh: a mesh with any of these axes.
    sequence: whether to split the stream by positions (`asgd.parallel.tensor`).
    microbatches: number of parts into which a pipeline cuts a replica's
      examples.
    rounds: how often a microbatch passes through the stages.
    recompute: whether a pipeline keeps only the input of each block, and the
      backward computes the block again.

  Raises:
    ValueError: as `tensor.parallel_layers`; for other layers, for blocks that
      the stages do not divide, and for `sequence` without the axis "tensor".
      The loss raises it for examples that are no multiple of the microbatches.
  """
  vocabulary, depth = _check_gpt(layers)
  # The functions below apply both divisions, one or none.
  is_split = meshes.TENSOR in mesh.shape
  is_pipelined = meshes.PIPE in mesh.shape
  if sequence and not is_split:
    raise ValueError(
      f"sequence=True is for a mesh with the axis {meshes.TENSOR!r}, and this"
      f" one has {tuple(mesh.axis_names)}"
    )
  if is_split:
    layers = tensor.parallel_layers(layers, mesh, sequence=sequence)
  if is_pipelined:
    checks.integer("microbatches", microbatches)
    checks.integer("rounds", rounds)
    n_chunks = mesh.shape[meshes.PIPE] * rounds
    if depth % n_chunks:
      raise ValueError(
        f"{depth} blocks cannot be divided among {mesh.shape[meshes.PIPE]}"
        f" stages in {rounds} rounds: use a multiple of {n_chunks} blocks"
      )

  def loss(params, batch, key):
    _, key = jax.random.split(key)  # as problems.whole_loss
    tokens, labels = batch[:, :-1], batch[:, 1:]
    if is_pipelined:
      options = microbatches, rounds, recompute
      logits = _pipelined_logits(layers, params, tokens, key, *options)
    else:
      logits, _ = models.apply(layers, params, tokens, train=True, key=key)
    if is_split:
      losses = tensor.cross_entropy(logits, labels, vocabulary=vocabulary)
    else:
      logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), losses_lib.Aux(())

  # Whole parameters -> padded vocabulary -> stacked blocks; `join` goes back.
  def split(params):
    params = tensor.pad(params, mesh.shape.get(meshes.TENSOR, 1))
    return _stack(params, rounds) if is_pipelined else params

  def join(params):
    params = _unstack(params, depth) if is_pipelined else params
    return tensor.unpad(params, vocabulary)

  def specs(params):
    specs = (tensor.partition if is_split else zero.replicated)(params)
    if not is_pipelined:
      return specs
    first, stages, last = specs  # stacked: the second axis, of blocks
    return first, jax.tree.map(lambda s: P(None, meshes.PIPE, *s), stages), last

  return MeshModel(loss, specs, split, join)


def _check_gpt(layers: models.Layers) -> tuple[int, int]:
  """Returns (tokens of the vocabulary, blocks) of a GPT's layers."""
  # A stage applies one block module with the parameters of each of its blocks:
  # all blocks must be equal.
  if len(layers) > 2 and len(set(layers[1:-1])) == 1:
    first_layer, *blocks, last_layer = layers
    # No subclasses: these are parallel forms, and would be divided twice.
    if type(first_layer) is transformer.Embed and (
      type(last_layer) is transformer.Unembed
    ):
      return last_layer.vocabulary, len(blocks)
  raise ValueError(
    "only the layers of transformer.gpt can be divided over the axes 'tensor'"
    f" and 'pipe', not {[type(layer).__name__ for layer in layers]}"
  )


def _pipelined_logits(
  layers: models.Layers,
  params: tuple[Any, Any, Any],
  tokens: jax.Array,
  key: jax.Array,
  microbatches: int,
  rounds: int,
  recompute: bool,
) -> jax.Array:
  """Returns the logits of a GPT in a pipeline of its blocks, int[B, T] ->
  float[B, T, V]; `params` are the result of `_stack`."""
  first, stages, last = params
  # Every stage computes the embedding and the logits of the whole batch, as all
  # devices run one program.
  x, _ = models.apply(layers[:1], (first,), tokens, train=True, key=key)
  if len(x) % microbatches:
    raise ValueError(
      f"{len(x)} examples of a replica cannot be cut into {microbatches}"
      " microbatches: use a multiple"
    )

  def block(params, x, key):
    return layers[1].apply(
      {"params": params}, x, train=True, rngs={"dropout": key}
    )

  if recompute:
    block = jax.checkpoint(block)
  pieces = x.reshape(microbatches, -1, *x.shape[1:])
  y = circular.pipeline(block, rounds=rounds)(stages, pieces, key)
  y = y.reshape(x.shape)
  # `first`: the layer's number in the model, from which its key is made.
  return models.apply(layers[-1:], (last,), y, first=len(layers) - 1)[0]


def _stack(params: Any, rounds: int) -> tuple[Any, Any, Any]:
  """Returns (embed, block, ..., block, unembed) as (embed, blocks [v, L / v,
  ...], unembed)."""
  first, *blocks, last = params
  stages = jax.tree.map(
    lambda *xs: jnp.stack(xs).reshape(rounds, -1, *xs[0].shape), *blocks
  )
  return first, stages, last


def _unstack(params: tuple[Any, Any, Any], count: int) -> tuple[Any, ...]:
  """Returns the parameters that `_stack` got, of `count` blocks."""
  first, stages, last = params
  flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), stages)
  blocks = [jax.tree.map(lambda x, i=i: x[i], flat) for i in range(count)]
  return first, *blocks, last


def images(pieces: problems.Pieces, mesh: Mesh) -> MeshModel:
  """Makes a ResNet, or a locally connected model, for the axes "rows" and
  "columns", as far as the mesh has them.

  Every device prepares the whole images of its replica, as augmentation moves
  pixels, and computes on its tile. Raises ValueError for layers that
  `halo.check` refuses. The loss raises it for rows or columns that an axis does
  not divide, in any image inside the model.
  """
  layers = step_checks.layers_of(pieces)
  halo.check(layers)

  def loss(params, batch, key):
    # The keys of problems.whole_loss, so that a mesh draws the same numbers.
    prepare_key, model_key = jax.random.split(key)
    dtype = problems.dtype_of(params)
    x = halo.tile(pieces.prepare(batch, prepare_key, dtype))
    logits, _ = halo.apply(layers, params, x, train=True, key=model_key)
    return pieces.criterion(logits, batch), losses_lib.Aux(())

  return MeshModel(loss, lambda p: halo.partition(p, tuple(mesh.axis_names)))


def mesh_model(
  problem: problems.Problem, mesh: Mesh, **options: Any
) -> MeshModel:
  """Makes the model of a problem for a mesh. The axes "rows" and "columns" need
  a model of images, "tensor" and "pipe" a GPT, "data" alone any model.

  The options are the options of `language`. Raises ValueError for axes that
  exclude one another, for a problem without pieces, and as `language` and
  `images` do.
  """
  axes = set(mesh.axis_names) - {meshes.DATA}
  # A model is a GPT or a model of images, so their axes exclude one another.
  if not (axes <= {meshes.TENSOR, meshes.PIPE} or axes <= {*halo.AXES}):
    raise ValueError(
      "the axes of a mesh are data, and tensor and pipe, or rows and columns;"
      f" not {tuple(mesh.axis_names)}"
    )
  if not axes:
    return MeshModel(problem.loss)
  if problem.pieces is None:
    raise ValueError(
      f"this problem has no layers to divide over {sorted(axes)}; use the axis"
      " 'data' alone"
    )
  if axes <= {*halo.AXES}:
    return images(problem.pieces, mesh)
  return language(step_checks.layers_of(problem.pieces), mesh, **options)


def make_step(
  model: MeshModel,
  tx: optax.GradientTransformation | base.Algorithm,
  mesh: Mesh,
  **options: Any,
) -> data_parallel.Step:
  """Makes the step of a MeshModel, from and to whole parameters.

  The options and errors are as in `data_parallel.make_step`. `mesh` is the mesh
  for which the model was made, with the axis "data".
  """
  step = data_parallel.make_step(
    model.loss, tx, mesh, specs=model.specs, **options
  )
  split, join = jax.jit(model.split), jax.jit(model.join)

  def init(params):
    if meshes.are_shapes(params):
      return step.init(jax.eval_shape(model.split, params))
    return step.init(split(params))

  return step._replace(
    init=init,
    params=lambda state: join(step.params(state)),
  )
