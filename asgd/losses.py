"""Losses: the functions that workers differentiate, in one common form.

A user's loss may take a key or not, and return a scalar alone or with a second
value. `as_loss` turns it into (params, batch, key) -> (value, Aux).
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks


class Aux(NamedTuple):
  """The second value that a loss returns."""

  stats: Any  # statistics of this batch, like `Variables.stats`; () if none


Loss = Callable[
  [optax.Params, base.Batch, jax.Array], tuple[jax.Array, Aux]
]  # (params, batch, key) -> (float[], Aux)


class LossError(ValueError):
  """A loss has the wrong arguments or the wrong return value."""


_KEY_NAMES = "key", "rng"  # an optional third argument gets a key by these
_FORMS = "(params, batch) or (params, batch, key)"


def _takes_key(loss: Callable[..., Any]) -> bool:
  """Whether to pass a key to a loss. Raises LossError for wrong arguments."""
  if not callable(loss):
    raise LossError(
      f"the loss must be a function {_FORMS}, not {checks.shown(loss)}"
    )
  try:
    parameters = inspect.signature(loss).parameters.values()
  except (TypeError, ValueError):  # a builtin has no signature
    return False
  Parameter, empty = inspect.Parameter, inspect.Parameter.empty
  by_position = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
  positional = [p for p in parameters if p.kind in by_position]
  required = [p for p in positional if p.default is empty]
  has_star_args = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
  needs_keyword = any(
    p.kind is Parameter.KEYWORD_ONLY and p.default is empty for p in parameters
  )
  has_too_few = len(positional) < 2 and not has_star_args
  if len(required) > 3 or needs_keyword or has_too_few:
    arguments = ", ".join(map(str, parameters)) or "nothing"
    raise LossError(
      f"the loss must be a function {_FORMS}; it takes ({arguments}). Bind"
      " other arguments with functools.partial"
    )
  # An optional third argument gets a key only if its name says so.
  has_optional_key = len(positional) > 2 and positional[2].name in _KEY_NAMES
  return len(required) == 3 or has_optional_key


def as_loss(loss: Callable[..., Any]) -> Loss:
  """Returns a user's loss in the form that workers call.

  Args:
    loss: (params, batch) or (params, batch, key) -> a float[], or (float[],
      aux). If the parameters are `Variables`, aux is the batch's statistics, or
      an `Aux`. Otherwise an aux that is no `Aux` is dropped.

  Returns:
    (params, batch, key) -> (float[], Aux).

  Raises:
    LossError: if the function has other arguments. When the result is called:
      if the value is not a float[], or the statistics have another structure.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from asgd import losses
    >>> loss = losses.as_loss(lambda params, batch: (params * batch).sum())
    >>> value, aux = loss(jnp.ones(2), jnp.ones(2), jax.random.key(0))
    >>> print(value, aux)
    2.0 Aux(stats=())
  """
  takes_key = _takes_key(loss)

  def loss_with_aux(
    params: base.Params, batch: base.Batch, key: jax.Array
  ) -> tuple[jax.Array, Aux]:
    result = loss(params, batch, key) if takes_key else loss(params, batch)
    # A result that is no pair is the value alone.
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    value, aux = result if is_pair else (result, Aux(()))
    _check_value(value)
    if isinstance(params, base.Variables):
      stats = aux.stats if isinstance(aux, Aux) else aux
      _check_stats(stats, params.stats)
      return value, Aux(stats)
    return value, aux if isinstance(aux, Aux) else Aux(())

  return loss_with_aux


def _check_value(value: Any) -> None:
  """Raises LossError unless a loss's value is a float scalar."""
  if not hasattr(value, "dtype") and not isinstance(value, float):
    raise LossError(
      "the loss must return a scalar, or (scalar, aux), not"
      f" {checks.shown(value)}"
    )
  if jnp.shape(value):
    raise LossError(
      f"the loss must be a scalar, not an array of shape {jnp.shape(value)}:"
      " return its mean over the examples"
    )
  if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
    raise LossError(
      f"the loss must be a float, not {jnp.result_type(value)}: it cannot be"
      " differentiated"
    )


def _check_stats(stats: Any, expected: Any) -> None:
  """Raises LossError unless `stats` has the structure and shapes of `expected`,
  the statistics of the parameters."""
  def shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]

  if shapes(stats) != shapes(expected):
    raise LossError(
      "the parameters are asgd.Variables, so the loss must return (value,"
      " stats), the batch's own statistics in the structure and shapes of"
      " Variables.stats"
    )
