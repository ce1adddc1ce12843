"""Mixing of models: the server moves part of the way to a worker's model.

FedAsync (Xie et al. 2019) is such a rule. With a mixing weight alpha near 1 a
message nearly replaces the server's parameters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, names
from asgd.transforms.compensation import by_distance

Discount = Callable[[jax.Array], jax.Array]  # int32[] -> float[]


def constant_discount(staleness: jax.Array) -> jax.Array:
  """Every message counts the same.

    s(staleness) = 1

  Args:
    staleness: int32[], in updates.

  Returns:
    1, as float[].

  Source:
    Xie et al. 2019.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> print(transforms.constant_discount(jnp.int32(3)))
    1.0
  """
  return jnp.ones_like(staleness, dtype=float)


def polynomial_discount(decay: float = 0.5) -> Discount:
  """Weights messages by a power of the staleness.

    s(staleness) = (staleness + 1)^-a

  Args:
    decay: a, positive.

  Returns:
    A function of the staleness, int32[] -> float[].

  Source:
    Xie et al. 2019.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> print(transforms.polynomial_discount(0.5)(jnp.int32(3)))  # 1 / sqrt(4)
    0.5
  """
  checks.positive("decay (a)", decay)
  # 1.0 makes a float of the staleness: integers have no negative powers.
  return lambda staleness: (staleness + 1.0) ** -decay


def hinge_discount(decay: float = 10.0, grace: float = 4) -> Discount:
  """Weights messages less if their staleness is above a limit.

    s(staleness) = 1 / (a max(staleness - b, 0) + 1)

  Args:
    decay: a, positive.
    grace: b, 0 or more, the largest staleness with weight 1.

  Returns:
    A function of the staleness, int32[] -> float[].

  Source:
    Xie et al. 2019.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> s = transforms.hinge_discount(1.5, grace=4)
    >>> print(s(jnp.int32(4)), s(jnp.int32(6)))  # 1 / (1.5 2 + 1)
    1.0 0.25
  """
  checks.positive("decay (a)", decay)
  checks.nonnegative("grace (b)", grace)
  # One formula for both cases of the paper: max(., 0) makes s = 1 up to b.
  return lambda staleness: (
    1.0 / (decay * jnp.maximum(staleness - grace, 0.0) + 1.0)
  )


def make_discount(
  name: str, decay: float | None = None, grace: float = 4
) -> Discount:
  """Returns a discount by its name.

    s = 1,   (staleness + 1)^-a   or   1 / (a max(staleness - b, 0) + 1)

  Args:
    name: "constant", "polynomial" or "hinge", in the order of the formulas.
    decay: a, positive; None is the discount's default. "constant" has none.
    grace: b, used by "hinge".

  Returns:
    A function of the staleness, int32[] -> float[].

  Raises:
    ValueError: for an unknown name, with the nearest known one, or a value out
      of its range.

  Source:
    Xie et al. 2019.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> print(transforms.make_discount("polynomial", 1.0)(jnp.int32(3)))
    0.25
  """
  names.check("discount", name, ("constant", "polynomial", "hinge"))
  if name == "constant" and decay is not None:
    raise ValueError(f"discount 'constant' has no decay, not {decay}: drop it")
  checks.nonnegative("grace (b)", grace)
  # The two discounts have different default decays, so None is not passed on.
  options = {} if decay is None else {"decay": decay}
  if name == "polynomial":
    return polynomial_discount(**options)
  if name == "hinge":
    return hinge_discount(grace=grace, **options)
  return constant_discount


def mix_models(
  mixing: float, discount: Discount = constant_discount
) -> base.Transform:
  """Turns a worker's displacement into a step towards its model.

    x <- (1 - alpha_t) x + alpha_t x_new,   alpha_t = alpha s(staleness)

  A message is d = x_sent - x_new, so x_new = x_sent - d, whatever other
  messages the server has applied since. The update is alpha_t (x_sent - d - x).
  A worker must start each job from a new ticket.

  Args:
    mixing: alpha, in (0, 1].
    discount: s, int32[] -> float[].

  Returns:
    A transform without a state. It is the complete rule of a server; its update
    needs `params` and the extra args `staleness` and `sent_params`.

  Source:
    Xie et al. 2019, algorithm 1.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.mix_models(0.5, transforms.polynomial_discount(1.0))
    >>> sent, new, now = jnp.array([8.0, 4.0, 6.0])
    >>> update, _ = tx.update(
    ...   sent - new, tx.init(now), now,
    ...   staleness=jnp.int32(1), sent_params=sent,
    ... )
    >>> print(now + update)  # 0.75 6 + 0.25 4
    5.5
  """
  checks.portion("mixing (alpha)", mixing)

  def update_fn(
    updates, state, params=None, *, staleness, sent_params, **extra_args
  ):
    del extra_args
    rate = mixing * discount(staleness)  # alpha_t, float[]

    def mix(d, sent, current):
      # alpha_t (x_new - x), where x_new = sent - d. A rate of the leaf's dtype
      # keeps bfloat16 leaves in bfloat16.
      return rate.astype(d.dtype) * (sent - d - current)

    return jax.tree.map(mix, updates, sent_params, params), state

  return base.Transform(optax.init_empty_state, update_fn)  # type: ignore[arg-type]


def add_proximal_pull(strength: float) -> base.Transform:
  """Adds the gradient of a pull towards the sent parameters.

    g <- g + rho (x - x_sent),   of rho / 2 ||x - x_sent||^2 in the loss

  This is Option II of FedAsync. The transform is part of a worker's local
  optimizer; `local_worker` passes `sent_params`.

  Args:
    strength: rho, 0 or more.

  Returns:
    A transform without a state. Its update needs `params` and the extra arg
    `sent_params`.

  Source:
    Xie et al. 2019, algorithm 1, option II.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.add_proximal_pull(0.5)
    >>> g, sent, now = jnp.array([2.0, 8.0, 6.0])
    >>> g, _ = tx.update(g, tx.init(now), now, sent_params=sent)
    >>> print(g)  # 2 + 0.5 (6 - 8)
    1.0
  """
  checks.nonnegative("proximal strength", strength)
  # At a worker, `params` are its local x and `sent_params` its ticket's.
  return by_distance(lambda g, displacement: g + strength * displacement)
