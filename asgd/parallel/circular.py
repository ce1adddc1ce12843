"""A circular pipeline as one program: shard_map and ppermute.

All devices run the same loop. In each step a device applies its layers to what
its neighbour sent in the step before; the last sends to the first, so that with
`rounds` > 1 a microbatch goes around several times and a device holds several
chunks of layers (looped, as breadth-first schedules are). It is synchronous
(GPipe's order), every stage has the same shapes, and XLA derives the backward.
It runs where one program spans all devices, a TPU or a GPU host, and checks the
executor of `pipeline`, with which it shares no code.

References:
  Huang et al., "GPipe", NeurIPS 2019. Xu et al., "GSPMD", 2021, section 3.3.
  Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from asgd import checks
from asgd.parallel import meshes

AXIS = "stage"


def stack(trees: Sequence[Any]) -> Any:
  """Stacks the parameters of layers of one structure on a new leading axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def pipeline(
  layer: Callable[[Any, Any, jax.Array], Any],
  mesh: jax.sharding.Mesh,
  *,
  axis: str = AXIS,
  rounds: int = 1,
  remat: bool = False,
  fill: float = 0.0,
) -> Callable[..., Any]:
  """Returns a function that applies a stack of layers by a pipeline.

  Other axes of the mesh (data, tensor) are XLA's to use: what is sharded over
  them when it is passed in stays so.

  Args:
    layer: (params of one layer, x, key) -> y, of x's shape and dtype.
    mesh: with `axis`, of size S.
    axis: the stages.
    rounds: v, how often a microbatch goes around.
    remat: compute a layer's forward again in the backward, instead of keeping
      what it needs.
    fill: what slots hold before anything has come. Nothing depends on it; tests
      put NaN here.

  Returns:
    (params, x, key=None) -> y: params with leaves [L, ...] (`stack`), of which
    device s holds, in round r, those from (r S + s) L / (v S) on; x a tree with
    leaves [M, B, ...], M microbatches, and y the same, on every device. The key
    of layer l on microbatch m is fold_in(fold_in(key, m), l).

  Raises:
    ValueError: if the mesh lacks the axis, and, when it is called, if stages
      and rounds do not divide the layers, or there are fewer microbatches than
      stages although they go around several times.
  """
  stages = meshes.size(mesh, axis)
  # As jax.make_mesh makes them, axes are explicit: what is cut here would have
  # to be sharded so before.
  automatic = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
  mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, automatic)
  run = inside(layer, axis=axis, rounds=rounds, remat=remat, fill=fill)

  def leading(tree):
    return {(*np.shape(leaf), None)[0] for leaf in jax.tree.leaves(tree)}

  def call(params, x, key=None):
    layers, count = leading(params), leading(x)
    if None in layers | count or len(layers) != 1 or len(count) != 1:
      raise ValueError(
        "all parameters must have one leading axis, of layers, and all inputs"
        f" one, of microbatches; not {sorted(layers, key=str)} and"
        f" {sorted(count, key=str)}"
      )
    (layers,) = layers
    if layers % (stages * rounds):
      raise ValueError(
        f"{layers} layers cannot be divided among {stages} stages in {rounds}"
        f" rounds: use a multiple of {stages * rounds}"
      )
    each = layers // (stages * rounds)
    shape = rounds, stages, each
    chunks = jax.tree.map(lambda p: p.reshape(*shape, *p.shape[1:]), params)
    key = jax.random.key(0) if key is None else key
    spec = PartitionSpec(None, axis), PartitionSpec(), PartitionSpec()
    return jax.shard_map(
      lambda chunks, x, key: run(
        jax.tree.map(lambda p: p[:, 0], chunks), x, key
      ),
      mesh=mesh,
      in_specs=spec,
      out_specs=PartitionSpec(),
      axis_names={axis},
      check_vma=False,
    )(chunks, x, key)

  # Not before it is compiled may a program leave axes of the mesh to XLA.
  return jax.jit(call)


def inside(
  layer: Callable[[Any, Any, jax.Array], Any],
  *,
  axis: str = AXIS,
  rounds: int = 1,
  remat: bool = False,
  fill: float = 0.0,
) -> Callable[..., Any]:
  """Returns what each device does in `pipeline`, to be called in shard_map.

  There the layer may use the other axes of the mesh by itself. With check_vma
  gradients may be taken inside, too.

  Args:
    layer: as in `pipeline`, and so are all others.
    axis: of the mesh.
    rounds: v.
    remat: whether the backward computes forwards again.
    fill: what empty slots hold.

  Returns:
    (chunks, x, key=None) -> y: leaves of `chunks` are [v, L / (v S), ...],
    those that this stage holds (of [v, L / v, ...], divided over `axis`); x and
    y as in `pipeline`, the same on all stages.

  Raises:
    ValueError: for rounds that are not positive and whole; when it is called,
      for fewer microbatches than stages that go around several times.
  """
  checks.whole("rounds", rounds)
  apply = jax.checkpoint(layer) if remat else layer

  def run(chunks, x, key=None):
    stages, stage = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(x)}
    _check_microbatches(count, stages, rounds)
    key = jax.random.key(0) if key is None else key
    last = stage == stages - 1

    def step(carry, time):
      arriving, waiting, done = carry
      # What has come from the last stage waits for its next round.
      back = time - stages  # the number of what the last stage did before
      waiting = _put(
        waiting, arriving, back % count, (stage == 0) & (back >= 0)
      )
      number = time - stage
      at_work = (number >= 0) & (number < rounds * count)
      number = jnp.clip(number, 0, rounds * count - 1)
      turn, microbatch = number // count, number % count
      fresh = _pick(x, microbatch)
      entering = optax.tree.where(turn == 0, fresh, _pick(waiting, microbatch))
      h = optax.tree.where(stage == 0, entering, arriving)
      # A device without work does some that counts for nothing, on real
      # numbers: zero times what a NaN gives is NaN, in the backward too.
      h = optax.tree.where(at_work, h, fresh)
      mine = jax.random.fold_in(key, microbatch)
      h = _chunk(apply, _pick(chunks, turn), h, turn * stages + stage, mine)
      done = _put(done, h, microbatch, at_work & last & (turn == rounds - 1))
      ring = [(s, (s + 1) % stages) for s in range(stages)]
      return (jax.lax.ppermute(h, axis, ring), waiting, done), None

    def filled(leaf):
      # What will be kept differs from stage to stage, and where x does.
      axes = (axis, *meshes.varying(leaf))
      return meshes.vary(jnp.full_like(leaf, fill), axes)

    empty = jax.tree.map(lambda leaf: filled(leaf[0]), x)
    waiting, done = jax.tree.map(filled, x), jax.tree.map(filled, x)
    times = jnp.arange(rounds * count + stages - 1)
    (_, _, done), _ = jax.lax.scan(step, (empty, waiting, done), times)
    # All have the answer, as what follows (a loss) is not a matter of stages.
    mine = optax.tree.where(last, done, jax.tree.map(jnp.zeros_like, done))
    return jax.lax.psum(mine, axis)

  return run


def _chunk(apply, params, h, number, key):
  """Applies the layers of the chunk of that number, one after the other."""
  (each,) = {leaf.shape[0] for leaf in jax.tree.leaves(params)}

  def one(h, item):
    p, layer = item
    return apply(p, h, jax.random.fold_in(key, layer)), None

  layers = number * each + jnp.arange(each)
  return jax.lax.scan(one, h, (params, layers))[0]


def _pick(tree, index):
  pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return jax.tree.map(lambda leaf: pick(leaf, index), tree)


def _put(tree, value, index, when):
  """Writes a value to its place in the tree, when it is to be written."""
  value = optax.tree.where(when, value, _pick(tree, index))
  put = jax.lax.dynamic_update_index_in_dim
  return jax.tree.map(lambda leaf, new: put(leaf, new, index, 0), tree, value)


def _check_microbatches(count: int, stages: int, rounds: int) -> None:
  if rounds > 1 and count < stages:
    raise ValueError(
      f"{count} microbatches are fewer than the {stages} stages, and go"
      f" around {rounds} times: use {stages} or more, or one round"
    )
