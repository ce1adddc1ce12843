"""Messages as codes: the worker that encodes, and the server that decodes.

The worker encodes in the last step of a job, and the server decodes before
anything else: algorithms, gates and norms get decoded messages. Each of several
shards gets a code of its part of the message.

Index letters used in shape comments:
  S  shards of a server
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, sharding
from asgd.compression import packing
from asgd.compression.codec import Code, Codec
from asgd.norms import rms
from asgd.server import all_finite

_CODEC = 0x636F6465  # folded into the key of a job, for the codec's draws


def codec_key(key: jax.Array) -> jax.Array:
  """Returns the key of a codec's draws for a message. It differs from `key`,
  the key of a job, because the loss has used the bits of that key."""
  return jax.random.fold_in(key, _CODEC)


class Coded(NamedTuple):
  """A message, or a shard's part of one, in the form that is sent."""

  code: Code  # of the weights
  stats: Any  # statistics of BatchNorm, not encoded; None: the model has none
  residual: Any  # float32[], RMS of the sender's residual; 0 without one


class Parts(NamedTuple):
  """A message for a server in shards."""

  parts: tuple[Coded, ...]  # S


class CompressedState(NamedTuple):
  """State of `compressed`."""

  inner: Any  # state of the wrapped worker
  codecs: tuple[Any, ...]  # S states of the codec; one without a plan


def compressed(
  worker: base.Worker, codec: Codec, plan: sharding.ShardPlan | None = None
) -> base.Worker:
  """Passes a worker's message through a codec, as the last step of a job.

  Random numbers follow from the key of the job, so a replay draws the same. If
  the message is not finite, it is not encoded: the codec's state stays
  unchanged, and the reported loss is NaN. The same holds if the code is not
  finite, because a number is too large for the codec's dtype.

  Args:
    worker: any.
    codec: any; the worker has its state, such as the residual.
    plan: the shards of the server, each of which gets a code; None: one code.

  Returns:
    A Worker. Its message is a `Coded`, or `Parts` with a plan. Its server must
    decode the message (`decoding`).

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd import compression
    >>> codec = compression.identity()
    >>> worker = asgd.gradient_worker(lambda w, batch: 0.5 * (w - batch) ** 2)
    >>> worker, w = compression.compressed(worker, codec), jnp.float32(8.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), w)
    >>> _, message, _ = worker.work(
    ...   worker.init(w), ticket, jnp.float32(2.0), jax.random.key(0)
    ... )
    >>> print(compression.decode(codec, message), message.residual)
    6.0 0.0
  """

  def split_message(tree: base.Params) -> list[Any]:
    return [tree] if plan is None else sharding.split(plan, tree)

  def init(params: base.Params) -> CompressedState:
    states = (
      codec.init(base.weights_of(part)) for part in split_message(params)
    )
    return CompressedState(worker.init(params), tuple(states))

  def work(state, ticket, batch, key):
    # [1] The job, with its message uncompressed.
    inner, message, metrics = worker.work(state.inner, ticket, batch, key)
    is_finite = all_finite((message, metrics.loss))
    # [2] A code for each shard.
    key = codec_key(key)
    parts, states = [], []
    for s, part in enumerate(split_message(message)):
      # The codec is always called; its result is dropped if not finite.
      weights = jax.tree.map(
        lambda x: jnp.where(is_finite, x, 0), base.weights_of(part)
      )
      code, codec_state = codec.encode(
        state.codecs[s], weights, jax.random.fold_in(key, s)
      )
      stats = part.stats if isinstance(part, base.Variables) else None
      parts.append(Coded(code, stats, residual_norm(codec_state)))
      states.append(codec_state)
    # [3] A narrow dtype may overflow although the message is finite.
    is_finite &= all_finite([(part.code, part.residual) for part in parts])
    # A dropped message must not enter the residual.
    codecs = optax.tree.where(is_finite, tuple(states), state.codecs)
    # [4] A loss of NaN makes the runtime reject the message.
    metrics = metrics._replace(loss=jnp.where(is_finite, metrics.loss, jnp.nan))
    sent_message = parts[0] if plan is None else Parts(tuple(parts))
    return CompressedState(inner, codecs), sent_message, metrics

  return worker._replace(init=init, work=work)


def residual_norm(state: Any) -> jax.Array:
  """Returns the RMS of the residuals that codecs keep to send later.

  Args:
    state: the state of codecs; all fields named `residual` count, such as that
      of `error_feedback`.

  Returns:
    float32[], in the unit of a message; 0 if there is none.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> state = compression.Residual(jnp.array([3.0, -3.0]), ())
    >>> print(compression.residual_norm(state))
    3.0
  """
  return rms(_residuals(state))


def _residuals(state: Any) -> list[Any]:
  """Returns all `residual` fields in a state, also nested ones."""
  residuals = []
  for node in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "residual")):
    if hasattr(node, "residual"):
      residuals.append(node.residual)
      # Its other fields, as a plain tuple, which has no `residual`.
      residuals += _residuals(tuple(node._replace(residual=())))
  return residuals


def decode(codec: Codec, message: Coded) -> optax.Updates:
  """Decodes a `Coded`: a message, or a shard's part of it."""
  weights = codec.decode(message.code)
  if message.stats is None:
    return weights
  return base.Variables(weights, message.stats)


def decoding(server: base.Server, codec: Codec) -> base.Server:
  """Returns a server that receives codes. Runtimes decode them before
  `receive`, in the same compiled program."""
  return server._replace(codec=codec)


def split(plan: sharding.ShardPlan | None, message: Any) -> list[Any]:
  """Returns each shard's part of a message; without a plan, the message alone.
  A message of `compressed` must have been made with the same plan."""
  if plan is None:
    return [message]
  if isinstance(message, Parts):
    return list(message.parts)
  return sharding.split(plan, message)


def shapes(codec: Codec, params: base.Params) -> Coded:
  """Returns shapes and dtypes of the messages to a shard with these parameters
  (shapes and dtypes are enough). Raises the codec's ValueError for parameters
  that it cannot encode."""
  structs = jax.tree.map(sharding.shape_of, params)
  # Leaves and structure can be hashed, for the cache; the tree cannot.
  leaves, structure = jax.tree.flatten(base.weights_of(structs))
  has_x64 = jax.config.jax_enable_x64  # type: ignore[attr-defined]
  code = _code_shapes(codec, tuple(leaves), structure, has_x64)
  stats = structs.stats if isinstance(structs, base.Variables) else None
  return Coded(code, stats, jax.ShapeDtypeStruct((), np.float32))


@functools.lru_cache(maxsize=64)
def _code_shapes(
  codec: Codec,
  leaves: tuple[jax.ShapeDtypeStruct, ...],
  structure: Any,
  has_x64: bool,
) -> Code:
  """Traces a codec once for weights of some shapes. `has_x64`, whether 64-bit
  types are enabled, is only part of the cache's key."""
  del has_x64

  def encode(weights):
    key = jax.random.key(0)
    return codec.encode(codec.init(weights), weights, key)[0]

  return jax.eval_shape(encode, jax.tree.unflatten(structure, leaves))


def blank(codec: Codec | None, params: base.Params) -> Any:
  """Returns a message of zeros (NumPy arrays), an example to compile with. If
  there is no codec, it is like the parameters."""
  like = params if codec is None else shapes(codec, params)
  return jax.tree.map(lambda x: np.zeros(np.shape(x), x.dtype), like)


def layout(codec: Codec | None, params: base.Params) -> Any:
  """Returns the `CodeLayout` of messages in slots and packets; without a codec,
  the parameters themselves."""
  return params if codec is None else packing.layout(shapes(codec, params))
