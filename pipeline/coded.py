"""Stages that exchange encoded activations, and their encoded gradients.

  stage k    y -> encode --code--> decode -> x    stage k + 1
            gy <- decode <--code-- encode <- gx

Between decoding and encoding a stage computes as it does without a codec, so a
table, its delays and its updates stay the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from asgd import compression
from asgd.server import all_finite
from asgd.stages import Stage, floating


def _wire(
  codec: compression.Codec, shapes: list[Any]
) -> tuple[Callable[[list[Any]], list[Any]], Callable[[list[Any]], list[Any]]]:
  """Returns (arrays of these shapes -> arrays of their code, the inverse)."""
  if not shapes:  # the first stage's input
    return list, list

  def code_of(leaves: list[Any]) -> Any:
    # The seed follows from the values: all processes then make the same code.
    total = sum(jnp.sum(x, dtype=jnp.float32) for x in leaves)
    seed = jax.lax.bitcast_convert_type(total, jnp.int32)
    key = jax.random.fold_in(jax.random.key(0), seed)
    # Messages are of different examples, so there is no residual to add.
    return codec.encode(codec.init(leaves), leaves, key)[0]

  # Entries between stages are plain arrays, which checkpoints store.
  structure = jax.tree.structure(jax.eval_shape(code_of, shapes))

  def encode(leaves: list[Any]) -> list[Any]:
    # A code of NaN or infinity may be finite: the next stage gets a flag, too.
    is_finite = all_finite(leaves)
    finite = [jnp.where(is_finite, x, 0) for x in leaves]
    return [is_finite, *jax.tree.leaves(code_of(finite))]

  def decode(arrays: list[Any]) -> list[Any]:
    is_finite, *code = arrays
    floats = codec.decode(jax.tree.unflatten(structure, code))
    return [jnp.where(is_finite, x, jnp.nan) for x in floats]

  return encode, decode


def with_codec(
  stage: Stage, codec: compression.Codec, x: Any, *, last: bool
) -> Stage:
  """Returns a stage that exchanges codes with the stages beside it.

  Args:
    stage: the stage; the result has its `y`, the shapes of the decoded output.
    codec: a codec of `asgd.compression`, without a residual.
    x: shapes of the stage's decoded input; () for the first stage.
    last: whether y is the loss, which no stage receives.
  """
  encode_gx, decode_x = _wire(codec, floating(x))
  encode_y, decode_gy = _wire(codec, [] if last else floating(stage.y))
  leaves, structure = jax.tree.flatten(x)
  are_floats = [bool(floating([leaf])) for leaf in leaves]

  def decode_input(coded_input):
    if not leaves:  # the first stage's input
      return coded_input
    code, other_leaves = coded_input
    floats, other_leaves = iter(decode_x(code)), iter(other_leaves)
    values = [
      next(floats if is_float else other_leaves) for is_float in are_floats
    ]
    return jax.tree.unflatten(structure, values)

  def forward(params, coded_input, extra):
    y, *rest = stage.forward(params, decode_input(coded_input), extra)
    if last:
      return y, *rest
    other_leaves = [leaf for leaf in jax.tree.leaves(y) if not floating([leaf])]
    return [encode_y(floating(y)), other_leaves], *rest

  def residuals(params, coded_input, extra):
    return stage.residuals(params, decode_input(coded_input), extra)

  def backward(params, stage_residuals, gy):
    gradient, gx = stage.backward(params, stage_residuals, decode_gy(gy))
    return gradient, encode_gx(gx)

  def recompute(params, coded_input, extra, gy):
    arguments = params, decode_input(coded_input), extra, decode_gy(gy)
    gradient, gx = stage.recompute(*arguments)
    return gradient, encode_gx(gx)

  def input_gradient(params, stage_residuals, gy):
    gx, half = stage.input(params, stage_residuals, decode_gy(gy))
    return encode_gx(gx), half

  functions = map(
    jax.jit, (forward, residuals, backward, recompute, input_gradient)
  )
  return Stage(*functions, *stage[5:])
