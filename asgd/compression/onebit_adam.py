"""1-bit Adam: signs of a momentum, divided by a variance that is frozen.

Adam's variance cannot be computed from signs of gradients. So Adam first runs
uncompressed. Then its variance is frozen, and only the momentum, which is
linear in gradients, is exchanged, as signs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import zeros
from asgd.compression.reducers import MOST_STEPS, Reducer
from asgd.compression.signs import scale_of

_STEADY_RATIO = 0.96  # v counts as steady when its norm ratio reaches this
_MAX_NORMS = 10**6  # largest number of norms in a state


class OnebitAdamState(NamedTuple):
  """State of `onebit_adam`, of one device."""

  count: jax.Array  # type: ignore[assignment] # int32[], steps
  warm: jax.Array  # int32[], steps of the warm-up so far
  frozen: jax.Array  # bool[], whether the warm-up has ended
  # float32[D], of v at the last D steps, by step modulo D; D = 0 with `warm_up`
  norms: jax.Array
  mu: optax.Updates  # m, the same on all devices
  nu: optax.Updates  # v, the same on all devices; frozen after the warm-up
  residual: optax.Updates  # the part that this device's signs left out
  server: optax.Updates  # part that the mean's signs left out, the same on all


def onebit_adam(
  warm_up: int | None = None,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
) -> Reducer:
  """1-bit Adam: Adam's update, from compressed momenta after a warm-up.

    for T steps, Adam:
      g <- mean_w g_w;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    then, with v constant:
      m_w <- b1 m + (1 - b1) g_w
      c_w = C(m_w + e_w);   e_w <- m_w + e_w - c_w            at each worker
      m <- C(mean_w c_w + e);   e <- mean_w c_w + e - m       at the server
    update = m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, T))) + eps)
    C(x) = sign(x) ||x||_2 / sqrt(L)  for each leaf of L elements; sign(0) = +1

  w is a device and t the step. e_w and e are what the signs left out so far.
  T is `warm_up`, or else the first step t > D with

    ||v_t||_1 >= 0.96 ||v_{t-D}||_1,   D = 1 / (1 - b2),   over all leaves

  Both norms are bias-corrected. Without the correction the rule would hold at
  step D + 1 already, because v is still growing from 0. The rule does not look
  at the learning rate. If the rate has a warm-up, it must end before T.

  The reducer returns Adam's update without the learning rate, not a gradient.
  So the optimizer after it must be SGD without a momentum. An element
  with v = 0 after the warm-up does not move: its sign would be divided by eps
  alone. (The paper leaves out the bias corrections; without them a short
  warm-up would freeze a v that is much too small.)

  There is no server process: each device computes the server's line from the
  same numbers. Checkpoints hold both residuals e, so a resumed run
  computes the same as a run without a stop. (DeepSpeed resets them to 0.)

  Args:
    warm_up: T, steps of uncompressed Adam, 1 or more; None: the rule determines
      T.
    b1: decay of m, in [0, 1).
    b2: decay of v, in [0, 1).
    eps: added to the root of v.

  Returns:
    A Reducer for data parallel training. There is no Codec for servers: all
    devices must share the momentum, and asynchronous workers have none.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Tang et al., "1-bit Adam: communication efficient large-scale training with
    Adam's convergence speed", ICML 2021, arXiv:2102.02888, algorithm 1 and its
    rule for the length of the warm-up; the scale of the signs is that of the
    authors' code.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import compression
    >>> reducer = compression.onebit_adam(warm_up=1, b1=0.5)
    >>> g, key = jnp.array([[2.0, -1.0], [4.0, -5.0]]), jax.random.key(0)
    >>> step = jax.vmap(  # of two devices
    ...   lambda s, g: reducer.reduce(s, g, key, "data"), axis_name="data"
    ... )
    >>> update, state = step(jax.vmap(reducer.init)(g), g)
    >>> print(jnp.round(update[0], 3), state.mu[0])  # of the mean, [3, -3]
    [ 1. -1.] [ 1.5 -1.5]
    >>> update, state = step(state, jnp.zeros((2, 2)))  # 0.5 m, as signs
    >>> print(state.mu[0])
    [ 0.75 -0.75]
  """
  if warm_up is not None:
    checks.integer("warm_up", warm_up, most=MOST_STEPS)
  checks.fraction("b1", b1)
  checks.fraction("b2", b2)
  checks.positive("eps", eps)
  window = 0 if warm_up else round(1 / (1 - b2))
  if window > _MAX_NORMS:
    raise ValueError(
      f"b2 {b2} needs the norms of v over {window} steps, more than"
      f" {_MAX_NORMS}: give warm_up, a number of steps"
    )

  def init(params_like: base.Params) -> OnebitAdamState:
    leaves.check(params_like)
    return OnebitAdamState(
      *(jnp.int32(0), jnp.int32(0), jnp.bool_(False)),
      jnp.zeros(window, jnp.float32),
      *(zeros(params_like) for _ in range(4)),
    )

  def warm_up_step(state, gradients, axis):
    """Returns the state after a step of Adam's moments, on exact means."""
    g = jax.lax.pmean(gradients, axis)
    mu = optax.tree.update_moment(g, state.mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(g, state.nu, b2, 2)
    state = state._replace(mu=mu, nu=nu, warm=state.count)
    if warm_up:
      return state._replace(frozen=state.count >= warm_up)
    return _end_warm_up(state, b2)

  def compressed_step(state, gradients, axis):
    """Returns the state after a step of m from signs, with v constant."""
    # [1] c_w: each worker compresses its momentum m_w, with its residual e_w.
    local_mu = optax.tree.update_moment(gradients, state.mu, b1, 1)
    with_residual = optax.tree.add(local_mu, state.residual)
    signs = jax.tree.map(_compress, with_residual)
    residual = optax.tree.sub(with_residual, signs)
    # [2] m: the mean of c_w is compressed again, with the server's residual e.
    mean = jax.lax.pmean(signs, axis)
    mean_with_residual = optax.tree.add(mean, state.server)
    mu = jax.tree.map(_compress, mean_with_residual)
    server = optax.tree.sub(mean_with_residual, mu)
    return state._replace(mu=mu, residual=residual, server=server)

  def reduce(state, tree, key, axis):
    del key
    state = state._replace(count=state.count + 1)
    # `frozen` is the same on all devices, so all take the same branch, and
    # their collectives match.
    state = jax.lax.cond(
      state.frozen,
      lambda: compressed_step(state, tree, axis),
      lambda: warm_up_step(state, tree, axis),
    )
    return _update(state, b1, b2, eps), state

  return Reducer(init, reduce)


def _update(
  state: OnebitAdamState, b1: float, b2: float, eps: float
) -> optax.Updates:
  """Returns Adam's update, with 0 for elements with v = 0."""
  # m averages t gradients, v only the min(t, T) gradients of the warm-up.
  m_hat = optax.tree.bias_correction(state.mu, b1, state.count)
  v_hat = optax.tree.bias_correction(state.nu, b2, state.warm)

  def adam(m: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0.0).astype(m.dtype)

  return jax.tree.map(adam, m_hat, v_hat)


def _end_warm_up(state: OnebitAdamState, b2: float) -> OnebitAdamState:
  """Sets `frozen` if the norm of v is at least 0.96 times that of D steps
  before, and stores the norm."""
  # v has no negative elements: its sum is ||v||_1.
  norm = optax.tree.sum(jax.tree.map(leaves.float32, state.nu))
  norm = optax.tree.bias_correction(norm, b2, state.count)
  window = state.norms.size
  # A ring buffer: this position still has the norm of D steps before.
  position = state.count % window
  norm_before = state.norms[position]
  has_ended = (state.count > window) & (norm_before > 0)
  has_ended &= norm >= _STEADY_RATIO * norm_before
  norms = state.norms.at[position].set(norm)
  return state._replace(frozen=has_ended, norms=norms)


def _compress(x: jax.Array) -> Any:
  """Returns C of a leaf: sign(x) times ||x||_2 / sqrt(L)."""
  if not x.size:
    return x
  magnitude = scale_of(leaves.float32(x).reshape(-1), "rms")
  magnitude = leaves.narrow(magnitude, x.dtype)
  # The sign of 0 is +, so that a sign is one bit.
  return jnp.where(x >= 0, magnitude, -magnitude)
