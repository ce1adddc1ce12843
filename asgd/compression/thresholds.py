"""Threshold encoding: elements above tau are sent, as exactly +-tau.

Strom's codec has one tau for the complete run. Deeplearning4j's adapts it, so
that each message has about the requested number of elements. Both treat all
leaves together: there is one tau, and one density.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import NEEDED, Code, Codec, Symbols

_BITMAP_DENSITY = 1 / 16  # above this density Deeplearning4j sends a bitmap
_MIN_TAU, _MAX_TAU = float(np.finfo(np.float32).tiny), 1e37  # bounds of a tau

_Adapt = Callable[[jax.Array, jax.Array], jax.Array]


class ThresholdState(NamedTuple):
  """State of `threshold` and `adaptive_threshold`."""

  count: jax.Array  # type: ignore[assignment] # int32[], messages encoded
  tau: jax.Array  # float32[], of the last message
  # float32[], sent / all elements of the last message; NaN: not counted
  density: jax.Array


def threshold(
  tau: float, *, residual_clip: float | None = None, clip_every: int = 5
) -> Codec:
  """Strom's threshold: an element above tau is sent as tau, below -tau as -tau.

    sent_i = tau if r_i > tau, -tau if r_i < -tau, else 0
    r <- r - sent,   r <- r + g before the next message

  A message contains at most one tau per element, however large the sum is. The
  rest stays in the residual r, which `error_feedback` keeps.

  Args:
    tau: above 0, in the unit of a message.
    residual_clip: in units of tau, at least 1. Every `clip_every` messages the
      residual is clipped to this size, and the excess is lost. None: never.
    clip_every: messages between two clippings.

  Returns:
    A Codec, of one tau for all leaves. It needs error feedback.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Strom, "Scalable distributed DNN training using commodity GPU cloud
    computing", Interspeech 2015.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec, x = compression.threshold(0.5), jnp.array([2.0, -0.75, 0.25])
    >>> code, _ = codec.encode(codec.init(x), x, jax.random.key(0))
    >>> print(code.code.symbols, codec.decode(code))
    [ 1 -1  0] [ 0.5 -0.5  0. ]
  """
  _check_arguments(tau, residual_clip, clip_every)
  return _make_codec(tau, None, residual_clip, clip_every)


def adaptive_threshold(
  tau: float = 1e-4,
  *,
  least: float = 1e-4,
  most: float = 1e-2,
  decay: float = 0.5 ** (1 / 20),
  residual_clip: float | None = 5.0,
  clip_every: int = 5,
) -> Codec:
  """Deeplearning4j's threshold: tau follows the density of messages.

    d = min(1/16, density of the last message)
    tau <- decay tau   if d < least
    tau <- tau / decay   if d > most
    sent and residual: see `threshold`
    r <- min(max(r, -5 tau), 5 tau)   after every fifth message

  d is at most 1/16 because Deeplearning4j sends denser messages as bitmaps,
  and does not count the elements of a bitmap. Here all messages have their
  smallest packed form. Deeplearning4j encodes the updates of an updater (Adam,
  say), and averages tau over workers after each epoch; here each worker keeps a
  separate tau.

  Args:
    tau: the threshold of the first message, above 0, in the unit of a message.
    least: density below which tau falls, in (0, 1].
    most: density above which tau grows, in (0, 1].
    decay: in (0, 1).
    residual_clip: see `threshold`; Deeplearning4j's default is 5.
    clip_every: messages between two clippings.

  Returns:
    A Codec, of one tau for all leaves. It needs error feedback.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Eclipse Deeplearning4j, AdaptiveThresholdAlgorithm and
    ResidualClippingPostProcessor, 2019.

  Example:
    Half of the first message was sent, so tau grows.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> codec = compression.adaptive_threshold(1.0, most=0.05, decay=0.5)
    >>> x, key = jnp.array([4.0, 0.0]), jax.random.key(0)
    >>> code, state = codec.encode(codec.init(x), x, key)
    >>> code, state = codec.encode(state, x, key)
    >>> print(codec.decode(code))  # 1 / 0.5
    [2. 0.]
  """
  _check_arguments(tau, residual_clip, clip_every)
  for name, value in (("least", least), ("most", most)):
    checks.portion(name, value, ": a density")
  if least > most:
    raise ValueError(f"least {least} is above most {most}: exchange them")
  checks.fraction("decay", decay)
  checks.positive("decay", decay)

  def adapt(tau: jax.Array, density: jax.Array) -> jax.Array:
    # Deeplearning4j's class comment has the two directions exchanged; this
    # follows its code: too few elements, so tau falls.
    density = jnp.where(density > _BITMAP_DENSITY, _BITMAP_DENSITY, density)
    next_tau = jnp.where(density < least, tau * decay, tau)
    next_tau = jnp.where(density > most, tau / decay, next_tau)
    return jnp.clip(next_tau, _MIN_TAU, _MAX_TAU)

  return _make_codec(tau, adapt, residual_clip, clip_every)


def _check_arguments(
  tau: float, residual_clip: float | None, clip_every: int
) -> None:
  """Raises ValueError for a value out of its range."""
  checks.positive("tau", tau)
  kind = f"from {_MIN_TAU:.2g} to {_MAX_TAU:.2g}, because it is sent in float32"
  checks.real("tau", tau, lambda x: _MIN_TAU <= x <= _MAX_TAU, kind)
  if residual_clip is not None:
    remedy = ": it is in units of tau"
    checks.real(
      "residual_clip", residual_clip, lambda x: x >= 1, "at least 1", remedy
    )
  checks.integer("clip_every", clip_every)


def _make_codec(
  first_tau: float,
  adapt: _Adapt | None,
  residual_clip: float | None,
  clip_every: int,
) -> Codec:
  """Makes the codec. `adapt` returns the next tau for tau and density of the
  last message; None: tau is constant, and densities are not counted."""

  def init(like: base.Params) -> ThresholdState:
    leaves.check(like)
    return ThresholdState(
      jnp.int32(0), jnp.float32(first_tau), jnp.float32(jnp.nan)
    )

  def encode(state, tree, key):
    del key
    tau = state.tau
    # The first message has no predecessor to adapt to.
    if adapt is not None:
      tau = jnp.where(state.count > 0, adapt(tau, state.density), tau)

    def encode_leaf(x: jax.Array) -> leaves.Leaf:
      flat = leaves.wide(x).reshape(-1)
      level = tau.astype(flat.dtype)
      is_above, is_below = flat > level, flat < -level
      # 1 above tau, -1 below -tau, otherwise 0.
      symbols = is_above.astype(jnp.int8) - is_below.astype(jnp.int8)
      return leaves.as_leaf(Symbols(symbols, tau[None], 1), x)

    code = jax.tree.map(encode_leaf, tree)
    density = state.density if adapt is None else _density(code, tree)
    return code, ThresholdState(state.count + 1, tau, density)

  def limit(state: ThresholdState, residual: optax.Updates) -> optax.Updates:
    assert residual_clip is not None  # otherwise the codec has no limit
    # Between two clippings the bound is infinite.
    is_due = state.count % clip_every == 0
    bound = jnp.where(is_due, residual_clip * state.tau, jnp.inf)

    def clip_leaf(x: jax.Array) -> jax.Array:
      most = bound.astype(x.dtype)
      return jnp.clip(x, -most, most)

    return jax.tree.map(clip_leaf, residual)

  return Codec(
    init,
    encode,
    functools.partial(leaves.decode_all, leaves.scaled),
    feedback=NEEDED,
    limit=None if residual_clip is None else limit,
  )


def _density(code: Code, tree: optax.Updates) -> jax.Array:
  """Returns the share of a message's elements that is sent, float32[]."""
  n_sent = jnp.float32(0)
  for leaf in leaves.leaves_of(code):
    n_sent += jnp.count_nonzero(leaf.code.symbols).astype(jnp.float32)
  return n_sent / max(sum(x.size for x in jax.tree.leaves(tree)), 1)
