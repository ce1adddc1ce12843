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

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from asgd import checks
from asgd.parallel import meshes

_AXIS = meshes.PIPE
_EMPTY = 0.0  # in slots before anything has come; no result depends on it

Layer = Callable[[Any, Any, jax.Array], Any]  # (params, x, key) -> y, as x


def stack(trees: Sequence[Any]) -> Any:
  """Stacks the parameters of layers of one structure on a new leading axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def pipeline(
  layer: Layer, mesh: jax.sharding.Mesh, *, rounds: int = 1
) -> Callable[..., Any]:
  """Returns a function that applies a stack of layers by a pipeline.

  Other axes of the mesh (data, tensor) are XLA's to use: what is sharded over
  them when it is passed in stays so.

  Args:
    layer: (params of one layer, x, key) -> y, of x's shape and dtype. Given
      `jax.checkpoint(layer)`, the backward computes each forward again.
    mesh: with the axis "pipe", of S stages.
    rounds: v, how often a microbatch goes around.

  Returns:
    (params, x, key=None) -> y: params with leaves [L, ...] (`stack`), of which
    device s holds, in round r, those from (r S + s) L / (v S) on; x a tree with
    leaves [M, B, ...], M microbatches, and y the same, on every device. The key
    of layer l on microbatch m is fold_in(fold_in(key, m), l).

  Raises:
    ValueError: for an axis that the mesh lacks, or rounds that are not positive
      and whole; when it is called, if stages and rounds do not divide the
      layers, or fewer microbatches than stages go around several times.
  """
  stages = meshes.size(mesh, _AXIS)
  # As jax.make_mesh makes them, axes are explicit: what is cut here would have
  # to be sharded so before.
  automatic = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
  mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, automatic)
  run = inside(layer, rounds=rounds)

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
    chunks = jax.tree.map(lambda p: p.reshape(rounds, -1, *p.shape[1:]), params)
    return jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(P(None, _AXIS), P(), P()),
      out_specs=P(),
      axis_names={_AXIS},
      check_vma=False,
    )(chunks, x, jax.random.key(0) if key is None else key)

  # Not before it is compiled may a program leave axes of the mesh to XLA.
  return jax.jit(call)


def inside(layer: Layer, *, rounds: int = 1) -> Callable[..., Any]:
  """Returns what each device does in `pipeline`, to be called in shard_map.

  There the layer may use the other axes of the mesh by itself. With check_vma
  gradients may be taken inside, too. Arguments and errors are as in `pipeline`.

  Returns:
    (chunks, x, key) -> y: leaves of `chunks` are [v, L / (v S), ...], those
    that this stage holds (of [v, L / v, ...], divided over the axis "pipe"); x
    and y as in `pipeline`, the same on all stages.
  """
  checks.whole("rounds", rounds)

  def run(chunks, x, key):
    stages, stage = jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    (count,) = {leaf.shape[0] for leaf in jax.tree.leaves(x)}
    if rounds > 1 and count < stages:
      raise ValueError(
        f"{count} microbatches are fewer than the {stages} stages, and go"
        f" around {rounds} times: use {stages} or more, or one round"
      )
    last = stage == stages - 1
    ring = [(s, (s + 1) % stages) for s in range(stages)]

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
      h = _chunk(layer, _pick(chunks, turn), h, turn * stages + stage, mine)
      done = _put(done, h, microbatch, at_work & last & (turn == rounds - 1))
      return (jax.lax.ppermute(h, _AXIS, ring), waiting, done), None

    def filled(leaf):
      # What will be kept differs from stage to stage, and where x does.
      axes = (_AXIS, *meshes.varying(leaf))
      return meshes.vary(jnp.full_like(leaf, _EMPTY), axes)

    empty = jax.tree.map(lambda leaf: filled(leaf[0]), x)
    waiting, done = jax.tree.map(filled, x), jax.tree.map(filled, x)
    times = jnp.arange(rounds * count + stages - 1)
    (_, _, done), _ = jax.lax.scan(step, (empty, waiting, done), times)
    # All have the answer, as what follows (a loss) is not a matter of stages.
    mine = optax.tree.where(last, done, jax.tree.map(jnp.zeros_like, done))
    return jax.lax.psum(mine, _AXIS)

  return run


def _chunk(layer, params, h, number, key):
  """Applies the layers of the chunk of that number, one after the other."""
  (each,) = {leaf.shape[0] for leaf in jax.tree.leaves(params)}

  def one(h, item):
    own, index = item
    return layer(own, h, jax.random.fold_in(key, index)), None

  return jax.lax.scan(one, h, (params, number * each + jnp.arange(each)))[0]


def _pick(tree, index):
  return jax.tree.map(lambda leaf: leaf[index], tree)


def _put(tree, value, index, when):
  """Writes a value to its place in the tree, when it is to be written."""
  value = optax.tree.where(when, value, _pick(tree, index))
  put = jax.lax.dynamic_update_index_in_dim
  return jax.tree.map(lambda leaf, new: put(leaf, new, index, 0), tree, value)
