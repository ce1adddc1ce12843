"""A circular pipeline as one program: shard_map and ppermute.

All devices run the same loop. In each step a device applies its layers to the
microbatch that its neighbour sent in the step before; the last device sends to
the first. With `rounds` > 1 a microbatch passes several times and a device
holds several chunks of layers (looped, as breadth-first schedules are). It is
synchronous (GPipe's order), all stages have the same shapes, and XLA derives
the backward. It needs one program over all devices, as on a TPU or a GPU host.

References:
  Huang et al., "GPipe", NeurIPS 2019. Xu et al., "GSPMD", 2021, section 3.3.
  Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from asgd import checks
from asgd.parallel import meshes

_AXIS = meshes.PIPE
_EMPTY = 0.0  # in unused slots; no result depends on it

Apply = Callable[[Any, jax.Array, jax.Array], jax.Array]  # params, x, key -> y


def pipeline(layer: Apply, *, rounds: int = 1) -> Apply:
  """Returns a function that applies a stack of L layers by a pipeline.

  It is for use inside shard_map, on the axis "pipe" of S stages; the layer may
  use the other axes of the mesh. With check_vma gradients may be taken inside.

  Args:
    layer: (params of one layer, x, key) -> y, of x's shape and dtype. Given
      `jax.checkpoint(layer)`, the backward computes each forward again.
    rounds: v, how often a microbatch passes through the stages.

  Returns:
    (chunks, x, key) -> y: leaves of `chunks` are [v, L / (v S), ...], this
    stage's part of [v, L / v, ...]; x and y [M, B, ...], M microbatches, the
    same on all stages. The key of layer l on microbatch m is
    fold_in(fold_in(key, m), l).

  Raises:
    ValueError: for rounds that are not positive and whole; by the function, if
      fewer microbatches than stages go around several times.
  """
  checks.whole("rounds", rounds)

  def run(chunks, x, key):
    stages, stage = jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    count = x.shape[0]
    if rounds > 1 and count < stages:
      raise ValueError(
        f"{count} microbatches are fewer than the {stages} stages, and go"
        f" around {rounds} times: use {stages} or more, or one round"
      )
    is_last = stage == stages - 1
    ring = [(s, (s + 1) % stages) for s in range(stages)]
    # With one round all turns have the same weights: chosen outside of the
    # loop, they are kept for the backward once, not for each turn.
    first_chunk = jax.tree.map(lambda leaf: leaf[0], chunks)

    def step(carry, time):
      # The neighbour's last output; [M, ...], inputs of the next round (used at
      # stage 0) and final outputs (used at the last stage).
      arriving, waiting, done = carry
      # [1] At stage 0 outputs of the last stage wait for their next round.
      returned = time - stages  # number of the last stage's previous output
      begins = (stage == 0) & (returned >= 0)
      waiting = _put(waiting, arriving, returned % count, begins)
      # [2] This stage's pass: number r M + m is round r of microbatch m. Stage
      # s begins s steps after stage 0.
      number = time - stage
      at_work = (number >= 0) & (number < rounds * count)
      number = jnp.clip(number, 0, rounds * count - 1)
      turn, microbatch = number // count, number % count
      # [3] Its input.
      fresh = x[microbatch]
      entering = jnp.where(turn == 0, fresh, waiting[microbatch])
      h = jnp.where(stage == 0, entering, arriving)
      # A device without work computes on real numbers and drops the result:
      # zero times NaN would be NaN, in the backward too.
      h = jnp.where(at_work, h, fresh)
      # [4] Apply the layers of this turn, with a key of the microbatch.
      microbatch_key = jax.random.fold_in(key, microbatch)
      chunk = first_chunk
      if rounds > 1:
        chunk = jax.tree.map(lambda leaf: leaf[turn], chunks)
      h = _apply_chunk(layer, chunk, h, turn * stages + stage, microbatch_key)
      # [5] Keep a final output; send every output on.
      done = _put(done, h, microbatch, at_work & is_last & (turn == rounds - 1))
      return (jax.lax.ppermute(h, _AXIS, ring), waiting, done), None

    def empty(array):
      # The carry varies over stages, and where x does.
      axes = (_AXIS, *meshes.varying(array))
      return meshes.vary(jnp.full_like(array, _EMPTY), axes)

    # v M passes of a stage; the last stage begins S - 1 steps late.
    times = jnp.arange(rounds * count + stages - 1)
    begin = empty(x[0]), empty(x), empty(x)
    (_, _, done), _ = jax.lax.scan(step, begin, times)
    # All stages return the result, which the loss needs.
    return jax.lax.psum(jnp.where(is_last, done, jnp.zeros_like(done)), _AXIS)

  return run


def _apply_chunk(
  layer: Apply, params: Any, h: jax.Array, number: jax.Array, key: jax.Array
) -> jax.Array:
  """Applies the layers of chunk `number` one after the other."""
  (depth,) = {leaf.shape[0] for leaf in jax.tree.leaves(params)}

  def apply_layer(h, item):
    layer_params, index = item
    return layer(layer_params, h, jax.random.fold_in(key, index)), None

  # Indices in the whole stack, as the layers' keys use them.
  indices = number * depth + jnp.arange(depth)
  return jax.lax.scan(apply_layer, h, (params, indices))[0]


def _put(
  array: jax.Array, value: jax.Array, index: jax.Array, when: jax.Array
) -> jax.Array:
  """Returns the array with row `index` replaced if `when`, bool[]."""
  # A `where` over one row, not over the array: the scan writes it in place.
  value = jnp.where(when, value, array[index])
  return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)
