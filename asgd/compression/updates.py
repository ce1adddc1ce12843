"""The server's updates as codes, from which workers rebuild its parameters.

The server applies decoded updates; an update that its codec cannot encode is
applied unchanged. With `error_feedback` the server adds the part that the codec
left out of an update to the next one. Workers do the same with messages, so
both directions are compressed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base
from asgd.compression.codec import Codec, zeros
from asgd.compression.messages import Coded, residual_norm, shapes
from asgd.server import all_finite

_SEED = 0x646F776E  # seed of the random numbers of a server's codec


class CompressedUpdates(NamedTuple):
  """State of `compressed_updates`."""

  inner: optax.OptState  # state of the algorithm
  codec: Any  # state of the codec, such as the residual
  # The last update, in the form that is sent; zeros before the first. Its
  # `residual` (an RMS) is NaN if workers cannot rebuild the update.
  coded: Coded
  count: jax.Array  # type: ignore[assignment] # int32[], updates so far


def compressed_updates(
  algorithm: base.Algorithm, codec: Codec
) -> base.Algorithm:
  """Encodes the updates of an algorithm, and applies the decoded ones.

      code, residual = codec(algorithm(message), residual)
      params <- params + decode(code)

  With `compression.compressed` workers, both directions are compressed. An
  update that is not finite, or has a code that is not, is applied without the
  codec; then the server must send the parameters to the workers.

  Args:
    algorithm: any without look-ahead: workers cannot rebuild predicted
      parameters from updates.
    codec: any; its state is part of the server's.

  Returns:
    An Algorithm. Its state holds the code of the last update (`last_update`).

  Raises:
    ValueError: for an algorithm that looks ahead.

  Source:
    Tang et al., "DoubleSqueeze: parallel stochastic gradient descent with
    double-pass error-compensated compression", ICML 2019, arXiv:1905.05957.

  Example:
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd import compression
    >>> codec = compression.identity()
    >>> algorithm = asgd.asgd(0.5, workers=1).algorithm
    >>> algorithm = compression.compressed_updates(algorithm, codec)
    >>> server = asgd.make_server(algorithm)
    >>> state = server.init(jnp.float32(8.0))
    >>> ticket = server.send(state, jnp.int32(0))
    >>> state, _ = server.receive(state, ticket, jnp.float32(4.0))
    >>> print(state.params, compression.last_update(state.opt_state).code)
    6.0 -2.0
  """
  if algorithm.send is not base.send_current:
    raise ValueError(
      "an algorithm that looks ahead sends parameters that workers cannot"
      " rebuild from updates: compress only the workers' messages, not the"
      " server's updates"
    )

  def init(params: base.Params) -> CompressedUpdates:
    weights = base.weights_of(params)
    # The state has a code's shapes from the start, so that nothing recompiles.
    coded = zeros(shapes(codec, weights))
    count = jnp.zeros([], jnp.int32)
    inner = algorithm.init(params)
    return CompressedUpdates(inner, codec.init(weights), coded, count)

  def update(message, state, params, **extra):
    updates, inner = algorithm.update(message, state.inner, params, **extra)
    weights = base.weights_of(updates)
    is_finite = all_finite(weights)
    # Codecs need finite numbers, even for a code that is not used.
    finite = jax.tree.map(lambda x: jnp.where(is_finite, x, 0), weights)
    # The draws follow from the count, so a restored server repeats them.
    key = jax.random.fold_in(jax.random.key(_SEED), state.count)
    code, codec_state = codec.encode(state.codec, finite, key)
    is_finite &= all_finite(code)
    # NaN marks an update that workers cannot rebuild.
    residual_rms = jnp.where(is_finite, residual_norm(codec_state), jnp.nan)
    coded = Coded(code, None, residual_rms)
    # Apply the decoded update, if there is one: workers rebuild exactly this.
    weights = optax.tree.where(is_finite, _decoded(codec, code), weights)
    codec_state = optax.tree.where(is_finite, codec_state, state.codec)
    state = CompressedUpdates(inner, codec_state, coded, state.count + 1)
    return base.with_weights(updates, weights), state

  return base.Algorithm(init, update)


def _decoded(codec: Codec, code: Any) -> optax.Updates:
  """Decodes behind a barrier, so that server and workers round alike."""
  return jax.lax.optimization_barrier(codec.decode(code))


def rebuild(codec: Codec, params: base.Params, code: Any) -> base.Params:
  """Returns a worker's parameters after one more update, bit-equal to the
  server's.

  Args:
    codec: the codec of `compressed_updates`.
    params: the worker's parameters before the update. Statistics of BatchNorm
      do not change here: they are sent next to the codes.
    code: the encoded update, `last_update(...).code`.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.identity()
    >>> print(compression.rebuild(codec, jnp.float32(8.0), jnp.float32(-2.0)))
    6.0
  """
  weights = base.weights_of(params)
  weights = optax.apply_updates(weights, _decoded(codec, code))
  return base.with_weights(params, weights)


def last_update(opt_state: optax.OptState) -> Coded | None:
  """Returns the last update of `compressed_updates` from a server's state; None
  for other algorithms.

  The update is encoded, as it is sent, and without BatchNorm statistics, which
  are sent next to it.
  """
  nodes = jax.tree.leaves(
    opt_state, is_leaf=lambda x: isinstance(x, CompressedUpdates)
  )
  for node in nodes:
    if isinstance(node, CompressedUpdates):
      return node.coded
  return None
