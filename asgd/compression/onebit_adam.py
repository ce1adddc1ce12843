"""1-bit Adam: signs of a momentum, over a variance that stands still.

The signs of gradients cannot be divided by an Adam that follows them. So Adam
runs uncompressed at first; then its variance is frozen, and only the momentum,
which is linear in gradients, is exchanged, as signs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks
from asgd.compression import leaves
from asgd.compression.codec import zeros
from asgd.compression.reducers import Reducer
from asgd.compression.signs import scale_of


class OnebitAdamState(NamedTuple):
  """State of `onebit_adam`, of one device."""

  count: jax.Array  # int32[], steps
  mu: optax.Updates  # m, the same on all devices
  nu: optax.Updates  # v, the same on all devices; frozen after the warm-up
  residual: optax.Updates  # of this device: what its signs left out
  server: optax.Updates  # what the signs of the mean left out, the same on all


def onebit_adam(
  warm_up: int,
  *,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
) -> Reducer:
  """1-bit Adam: Adam's update, of compressed momenta after a warm-up.

    for `warm_up` steps, Adam:
      g <- mean_w g_w;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    then, with v as it was:
      m_w <- b1 m + (1 - b1) g_w
      c_w = C(m_w + e_w);   e_w <- m_w + e_w - c_w            at each worker
      m <- C(mean_w c_w + e);   e <- mean_w c_w + e - m       at the server
    update = m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, warm_up))) + eps)
    C(x) = ||x||_2 / sqrt(L) sign(x), by leaf; the sign of 0 is +

  What it returns in the place of a gradient is Adam's update before the
  learning rate, so the optimizer behind it is SGD without a momentum. Where v
  is 0 after the warm-up nothing moves: a sign would be divided by eps alone.
  (The paper leaves out the bias corrections; without them a short warm-up would
  freeze a v that is much too small.)

  Every device does what the server would do, as they all have the same numbers.

  Args:
    warm_up: steps of uncompressed Adam, 1 or more: until v hardly changes.
    b1: decay of m, in [0, 1).
    b2: decay of v, in [0, 1).
    eps: added to the root of v.

  Returns:
    A Reducer for data parallel training. An asynchronous server has no momentum
    that all workers share, so there is no codec of it.

  Raises:
    ValueError: for a value out of its range.

  Source:
    Tang et al., "1-bit Adam: communication efficient large-scale training with
    Adam's convergence speed", ICML 2021, arXiv:2102.02888, algorithm 1; C as in
    the authors' code.

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
  checks.whole("warm_up", warm_up)
  checks.fraction("b1", b1)
  checks.fraction("b2", b2)
  checks.positive("eps", eps)

  def init(like: base.Params) -> OnebitAdamState:
    leaves.check(like)
    return OnebitAdamState(jnp.int32(0), *(zeros(like) for _ in range(4)))

  def warm(state, tree, axis):
    g = jax.lax.pmean(tree, axis)
    mu = optax.tree.update_moment(g, state.mu, b1, 1)
    nu = optax.tree.update_moment_per_elem_norm(g, state.nu, b2, 2)
    return state._replace(mu=mu, nu=nu)

  def compressed(state, tree, axis):
    own = optax.tree.update_moment(tree, state.mu, b1, 1)
    total = optax.tree.add(own, state.residual)
    sent = jax.tree.map(_signs, total)
    residual = optax.tree.sub(total, sent)
    total = optax.tree.add(jax.lax.pmean(sent, axis), state.server)
    mu = jax.tree.map(_signs, total)
    server = optax.tree.sub(total, mu)
    return state._replace(mu=mu, residual=residual, server=server)

  def reduce(
    state: OnebitAdamState, tree: optax.Updates, key: jax.Array, axis: str
  ) -> tuple[optax.Updates, OnebitAdamState]:
    del key
    count = state.count + 1
    state = jax.lax.cond(
      count <= warm_up,
      lambda: warm(state, tree, axis),
      lambda: compressed(state, tree, axis),
    )
    first = optax.tree.bias_correction(state.mu, b1, count)
    second = optax.tree.bias_correction(
      state.nu, b2, jnp.minimum(count, warm_up)
    )

    def update(m: jax.Array, v: jax.Array) -> jax.Array:
      return jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0.0).astype(m.dtype)

    out = jax.tree.map(update, first, second)
    return out, state._replace(count=count)

  return Reducer(init, reduce)


def _signs(x: jax.Array) -> Any:
  """C of a leaf."""
  if not x.size:
    return x
  size = scale_of(leaves.float32(x).reshape(-1), "rms")
  size = leaves.narrow(size, x.dtype)
  return jnp.where(x >= 0, size, -size)
