"""A circular pipeline as one program: shard_map and ppermute.

All devices run the same loop. In each step a device applies its layers to the
microbatch that its neighbour sent in the step before; the last device sends to
the first. With `rounds` > 1 a microbatch passes several times and a device
holds several chunks of layers (looped, as breadth-first schedules are). The
pipeline is synchronous (GPipe's order), all stages have the same shapes, and
XLA derives the backward. One program runs on all devices, as on a TPU or a GPU
host.

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

  Call the function inside shard_map, on the axis "pipe" of S stages; the layer
  may use the other axes of the mesh. With check_vma gradients may be taken
  inside shard_map.

  Args:
    layer: (params of one layer, x, key) -> y, of x's shape and dtype. Given
      `jax.checkpoint(layer)`, the backward computes each forward again.
    rounds: v, how often a microbatch passes through the stages.

  Returns:
    (chunks, x, key) -> y: leaves of `chunks` are [v, L / (v S), ...], this
    stage's part of [v, L / v, ...]; x and y are M microbatches [M, B, ...], the
    same on all stages. The key of layer l on microbatch m is
    fold_in(fold_in(key, m), l).

  Raises:
    ValueError: for rounds that are not positive and whole; from the returned
      function, if `rounds` > 1 and there are fewer microbatches than stages.
  """
  checks.integer("rounds", rounds)

  def run(chunks, x, key):
    stages, stage = jax.lax.axis_size(_AXIS), jax.lax.axis_index(_AXIS)
    n_microbatches = x.shape[0]
    if rounds > 1 and n_microbatches < stages:
      raise ValueError(
        f"{n_microbatches} microbatches are fewer than the {stages} stages, and"
        f" go around {rounds} times: use {stages} or more, or one round"
      )
    is_last = stage == stages - 1
    ring = [(s, (s + 1) % stages) for s in range(stages)]
    # With one round all steps use the same weights. As they are read outside of
    # the loop, the backward keeps one copy of them, not one for each step.
    first_chunk = jax.tree.map(lambda leaf: leaf[0], chunks)

    def step(carry, time):
      # `received` is the neighbour's last output. `round_inputs` are the inputs
      # of the next round, [M, ...], which stage 0 uses; `outputs` are the final
      # outputs, [M, ...], which the last stage uses.
      received, round_inputs, outputs = carry
      # [1] Stage 0 stores an output of the last stage for the next round.
      returned = time - stages  # number of the last stage's previous output
      is_returned = (stage == 0) & (returned >= 0)
      row = returned % n_microbatches
      round_inputs = _put(round_inputs, received, row, is_returned)
      # [2] The number of this stage's pass: r M + m is round r of microbatch m.
      # Stage s begins s steps after stage 0.
      pass_index = time - stage
      has_work = (pass_index >= 0) & (pass_index < rounds * n_microbatches)
      pass_index = jnp.clip(pass_index, 0, rounds * n_microbatches - 1)
      r, microbatch = pass_index // n_microbatches, pass_index % n_microbatches
      # [3] Its input.
      new_input = x[microbatch]
      stage_0_input = jnp.where(r == 0, new_input, round_inputs[microbatch])
      h = jnp.where(stage == 0, stage_0_input, received)
      # A device without work computes on an input, not on the empty slots, and
      # drops the result: zero times NaN would be NaN, also in the backward.
      h = jnp.where(has_work, h, new_input)
      # [4] Apply the layers of this round, with a key of the microbatch.
      microbatch_key = jax.random.fold_in(key, microbatch)
      chunk = first_chunk
      if rounds > 1:
        chunk = jax.tree.map(lambda leaf: leaf[r], chunks)
      h = _apply_chunk(layer, chunk, h, r * stages + stage, microbatch_key)
      # [5] Keep a final output; send every output on.
      is_final = has_work & is_last & (r == rounds - 1)
      outputs = _put(outputs, h, microbatch, is_final)
      return (jax.lax.ppermute(h, _AXIS, ring), round_inputs, outputs), None

    # v M passes of a stage; the last stage begins S - 1 steps late.
    times = jnp.arange(rounds * n_microbatches + stages - 1)
    initial_carry = _empty_like(x[0]), _empty_like(x), _empty_like(x)
    (_, _, outputs), _ = jax.lax.scan(step, initial_carry, times)
    # All stages return the result, which the loss needs.
    return jax.lax.psum(
      jnp.where(is_last, outputs, jnp.zeros_like(outputs)), _AXIS
    )

  return run


def _empty_like(array: jax.Array) -> jax.Array:
  """Returns empty slots of the carry, of an array's shape and dtype."""
  # The carry varies over stages, and over the axes over which x varies.
  axes = (_AXIS, *meshes.varying(array))
  return meshes.vary(jnp.full_like(array, _EMPTY), axes)


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
  array: jax.Array, value: jax.Array, index: jax.Array, is_replaced: jax.Array
) -> jax.Array:
  """Returns the array; if `is_replaced`, bool[], with `value` as row `index`.
  """
  # A `where` over one row, not over the array: the scan writes it in place.
  value = jnp.where(is_replaced, value, array[index])
  return jax.lax.dynamic_update_index_in_dim(array, value, index, 0)
