"""Mixed precision: dtypes of a step, and a loss scale that adapts.

float16 has 5 bits of exponent: gradients below 6e-8 become 0. So a step
multiplies the loss by a scale before it differentiates, and divides the
gradient by the scale. A gradient that is not finite changes no parameters, and
halves the scale; many finite gradients double it. bfloat16 needs no scale.

Reference:
  Micikevicius et al., "Mixed precision training", ICLR 2018, sections 3.1, 3.2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asgd import checks, names


class Policy(NamedTuple):
  """Dtypes of floating point numbers; None leaves them as they are."""

  param: Any = None  # parameters and the optimizer's state
  compute: Any = None  # the evaluation and differentiation of the loss
  reduce: Any = None  # the sum of gradients over pieces and devices


POLICIES = {
  "unchanged": Policy(),
  "float32": Policy(jnp.float32, jnp.float32, jnp.float32),
  "bfloat16": Policy(jnp.float32, jnp.bfloat16, jnp.float32),
  "float16": Policy(jnp.float32, jnp.float16, jnp.float32),
}


def policy(policy_or_name: str | Policy) -> Policy:
  """Returns a Policy, given a Policy or its name. Raises ValueError for other
  arguments, and for a dtype that is not of floating point."""
  if isinstance(policy_or_name, str):
    return names.lookup("precision", policy_or_name, POLICIES)
  if not isinstance(policy_or_name, Policy):
    raise ValueError(
      f"policy must be a Policy or a name, not {policy_or_name!r}"
    )
  for field, dtype in policy_or_name._asdict().items():
    try:
      is_valid = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:  # the value is no dtype
      is_valid = False
    if not is_valid:
      raise ValueError(
        f"the dtype {field} of a policy must be of floating point, not"
        f" {getattr(dtype, '__name__', dtype)}"
      )
  return policy_or_name


def cast(tree: Any, dtype: Any) -> Any:
  """Casts the floating point leaves of a tree; dtype None casts nothing."""

  def cast_leaf(x):
    # Labels and tokens stay integers, keys stay keys.
    is_floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return x.astype(dtype) if is_floating else x

  return tree if dtype is None else jax.tree.map(cast_leaf, tree)


class LossScale(NamedTuple):
  """A loss scale at one step."""

  scale: jax.Array  # float32[]
  finite: jax.Array  # int32[], finite gradients since the scale changed


class Dynamic(NamedTuple):
  """The rule by which a loss scale changes."""

  initial: float = 2.0**15
  factor: float = 2.0  # the scale is multiplied or divided by this factor
  interval: int = 2000  # finite gradients in a row after which the scale grows
  least: float = 1.0
  most: float = 2.0**24  # with a larger scale float16 gradients overflow


def check_dynamic(rule: Dynamic) -> None:
  """Raises ValueError for a rule with numbers out of range."""
  if not isinstance(rule, Dynamic):
    raise ValueError(f"a loss scale must be a Dynamic, not {rule!r}")
  float32 = jnp.finfo(jnp.float32)
  smallest, largest = float(float32.smallest_normal), float(float32.max)
  kind = f"a positive number of float32, from {smallest:.2g} to {largest:.2g}"
  for field in ("initial", "factor", "least", "most"):
    # The scale is in float32, in which other numbers are 0 or infinite.
    name, value = f"{field} of a loss scale", getattr(rule, field)
    checks.real(name, value, lambda x: smallest <= x <= largest, kind)
  if rule.factor <= 1:
    raise ValueError(
      f"factor of a loss scale must be more than 1, not {rule.factor!r}"
    )
  if not rule.least <= rule.initial <= rule.most:
    raise ValueError(
      f"a loss scale cannot start at {rule.initial!r}, outside of its bounds"
      f" {rule.least!r} and {rule.most!r}"
    )
  if type(rule.interval) is not int or not 1 <= rule.interval < 2**31:
    raise ValueError(
      "interval of a loss scale must be a positive whole number of steps, below"
      f" 2^31, not {rule.interval!r}"
    )


def start(rule: Dynamic) -> LossScale:
  """Returns the scale of the first step."""
  return LossScale(jnp.float32(rule.initial), jnp.int32(0))


def adjust(rule: Dynamic, state: LossScale, finite: jax.Array) -> LossScale:
  """Returns the scale after a gradient that was computed with `state`.
  `finite`, bool[], is whether all numbers of the gradient are finite.

  Example:
    >>> rule = Dynamic(initial=8.0, interval=1)
    >>> float(adjust(rule, start(rule), jnp.array(False)).scale)
    4.0
    >>> float(adjust(rule, start(rule), jnp.array(True)).scale)
    16.0
  """
  count = state.finite + 1
  is_raised = count >= rule.interval
  raised_scale = jnp.where(is_raised, state.scale * rule.factor, state.scale)
  scale = jnp.where(finite, raised_scale, state.scale / rule.factor)
  scale = jnp.clip(scale, rule.least, rule.most)
  # Both changes of the scale start the count again.
  return LossScale(scale, jnp.where(finite & ~is_raised, count, 0))
