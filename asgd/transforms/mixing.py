"""Mixing of models: the server moves part of the way to a worker's model.

FedAsync (Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019,
algorithm 1) averages models, not gradients:

  x <- (1 - alpha_t) x + alpha_t x_new,   alpha_t = alpha s(staleness).

An alpha near 1 overwrites the server.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, names
from asgd.transforms.compensation import by_distance

Discount = Callable[[jax.Array], jax.Array]  # int32[] -> float[]


def constant_discount(staleness: jax.Array) -> jax.Array:
  """The discount that is none: s = 1."""
  return jnp.ones_like(staleness, dtype=float)


def polynomial_discount(decay: float = 0.5) -> Discount:
  """s = (staleness + 1)^-decay."""
  checks.positive("decay (a)", decay)
  return lambda staleness: (staleness + 1.0) ** -decay


def hinge_discount(decay: float = 10.0, grace: float = 4) -> Discount:
  """s = 1 up to a staleness of `grace`, then 1 / (decay excess + 1)."""
  checks.positive("decay (a)", decay)
  checks.nonnegative("grace (b)", grace)
  return lambda staleness: (
    1.0 / (decay * jnp.maximum(staleness - grace, 0.0) + 1.0)
  )


def make_discount(
  name: str, decay: float | None = None, grace: float = 4
) -> Discount:
  """Returns the discount "constant", "polynomial" or "hinge".

  `decay` is a, None for the discount's own default; `grace` is b, of "hinge".
  """
  options = {} if decay is None else {"decay": decay}
  makers = {
    "constant": lambda: constant_discount,
    "polynomial": lambda: polynomial_discount(**options),
    "hinge": lambda: hinge_discount(grace=grace, **options),
  }
  return names.lookup("discount", name, makers)()


def mix_models(
  mixing: float, discount: Discount = constant_discount
) -> base.Transform:
  """Turns a displacement into a step towards the worker's model.

  A message is d = x_sent - x_new, so x_new = x_sent - d whatever the server
  has become since: the update is alpha_t (x_sent - d - x). Each message has to
  start at its ticket: no worker may do two jobs on one. `mixing` is alpha, in
  (0, 1], and `discount` s. The transform is the whole of a server's rule; its
  update needs `params` and the extra args `staleness` and `sent_params`.
  """
  if not 0 < mixing <= 1:
    raise ValueError(f"mixing (alpha) must be in (0, 1], not {mixing}")

  def update_fn(
    updates, state, params=None, *, staleness, sent_params, **extra_args
  ):
    del extra_args
    rate = mixing * discount(staleness)

    def mix(d, sent, now):
      return rate.astype(d.dtype) * (sent - d - now)

    return jax.tree.map(mix, updates, sent_params, params), state

  return base.Transform(optax.init_empty_state, update_fn)


def add_proximal_pull(strength: float) -> base.Transform:
  """Adds strength * (x - x_sent): the gradient of a pull to what was sent.

  Option II of FedAsync, for the optimizer of a worker (`local_worker` passes
  it `sent_params`): the loss has rho / 2 ||x - x_sent||^2 added, rho =
  `strength`.
  """
  checks.nonnegative("proximal strength", strength)
  return by_distance(lambda g, moved: g + strength * moved)
