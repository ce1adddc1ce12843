"""The line search: which step to try next, given what was found so far.

It is optax's zoom line search (strong Wolfe conditions; Nocedal and Wright,
"Numerical optimization", algorithms 3.5 and 3.6), of which only the public
transform is called: on one number, the step a, with the function

  phi(a) = f(x + a d),   phi'(a) = g(x + a d) . d

Its answers are looked up in a table. A step that is not in the table yet is
answered with -inf and slope 0, which meets both conditions: so the search ends
there, and returns the very step that it asks for. A search is its table, which
is plain data, and goes on from it anywhere.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import checks, names

# Of optax.lbfgs.
DEFAULTS: Mapping[str, Any] = {"max_linesearch_steps": 20}
_NOT = "initial_guess_strategy", "verbose"
_OR_NONE = "max_learning_rate", "approx_dec_rtol"
_FRACTIONS = "slope_rtol", "curv_rtol"  # c1 and c2 of the Wolfe conditions


class Tried(NamedTuple):
  """A step that was tried."""

  step: float  # a
  value: float  # phi(a); NaN or inf where it is not defined
  slope: float  # phi'(a)


class Advice(NamedTuple):
  """What comes next."""

  step: float  # to try; or, at the end, to take
  done: bool  # it is to be taken, if it was found
  found: bool = False  # it decreases the function enough


def options_of(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
  """Returns the options of a line search, with its defaults.

  Args:
    given: arguments of `optax.scale_by_zoom_linesearch`, but
      `initial_guess_strategy` (it is "one") and `verbose`.

  Raises:
    ValueError: for an unknown option, or one out of its range.

  Example:
    >>> dict(options_of({"curv_rtol": 0.5}))
    {'max_linesearch_steps': 20, 'curv_rtol': 0.5}
  """
  if not isinstance(given, Mapping):
    raise ValueError(
      "line_search must be a dict of arguments of"
      f" optax.scale_by_zoom_linesearch, not {checks.shown(given)}"
    )
  maker, options = optax.scale_by_zoom_linesearch, {**DEFAULTS, **given}
  for name in _NOT:
    if name in options:
      raise ValueError(f"line_search.{name} cannot be set; drop it")
  names.check_arguments("line_search", "zoom", maker, options)
  with checks.below("line_search", options):
    for name, value in options.items():
      if name == "max_linesearch_steps":
        options[name] = checks.whole(name, value, most=1000)
      elif value is not None or name not in _OR_NONE:
        _check(name, value)
        options[name] = float(value)
  return tuple(options.items())


def _check(name, value):
  if name in _FRACTIONS:
    checks.fraction(name, value)
    return
  if name == "max_learning_rate":
    checks.positive(name, value)
  checks.nonnegative(name, value)
  if name == "increase_factor" and value <= 1:
    raise ValueError(
      f"increase_factor must be more than 1, not {checks.shown(value)}: steps"
      " are multiplied by it until one is long enough"
    )


def _index(step, table):
  """The row of a step, or the one after all that are filled."""
  filled = jnp.sum(~jnp.isnan(table[0]))
  same = table[0] == step
  return jnp.where(same.any(), jnp.argmax(same), filled)


@functools.lru_cache(maxsize=8)
def _program(options: tuple[tuple[str, Any], ...]) -> Any:
  """Returns the search as a function of value, slope and table."""
  search = optax.scale_by_zoom_linesearch(
    **dict(options), initial_guess_strategy="one"
  )

  @jax.custom_jvp
  def phi(step, table):
    return table[1][_index(step, table)]

  @phi.defjvp
  def _(primals, tangents):
    step, table = primals
    slope = table[2][_index(step, table)]
    return phi(step, table), slope * tangents[0]

  def value_fn(step, table):
    return phi(step, table)

  def run(value, slope, table):
    zero, one = jnp.zeros(()), jnp.ones(())
    step, state = search.update(
      *(one, search.init(zero), zero),
      value=value,
      grad=slope,
      value_fn=value_fn,
      table=table,
    )
    return step, state.value, state.info.decrease_error

  return jax.jit(run)


@functools.cache
def _cpu() -> jax.Device | None:
  """The CPU; None where JAX_PLATFORMS leaves it out: the default device."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None


def advise(
  value: float,
  slope: float,
  tried: Sequence[Tried] = (),
  options: tuple[tuple[str, Any], ...] = tuple(DEFAULTS.items()),
) -> Advice:
  """Returns the step to try next, or to take.

  Args:
    value: phi(0).
    slope: phi'(0), negative.
    tried: what was found at the steps that were advised before, in order.
    options: of `options_of`.

  Returns:
    The Advice. It is a function of the arguments, in float64 on the CPU, if
    there is one, whatever JAX's defaults are.

  Source:
    Nocedal and Wright, "Numerical optimization", algorithms 3.5 and 3.6;
    Hager and Zhang, "Algorithm 851: CG_DESCENT", 2006, equations 23 and 26.

  Example:
    Of phi(a) = (a - 20)^2, steps are doubled until the slope is small enough.

    >>> tried, advice = [], advise(400.0, -40.0)
    >>> while not advice.done:
    ...   a = advice.step
    ...   tried.append(Tried(a, (a - 20) ** 2, 2 * (a - 20)))
    ...   advice = advise(400.0, -40.0, tried)
    >>> [each.step for each in tried], advice.step, advice.found
    ([1.0, 2.0], 2.0, True)
  """
  most = dict(options)["max_linesearch_steps"]
  # NaN is no step; one row more, for the step that is asked for.
  table = np.full((3, most + 1), np.nan)
  for i, (step, found, its_slope) in enumerate(tried):
    # -inf means that it is asked for, and is no decrease to believe in.
    table[:, i] = step, found if found > -np.inf else np.nan, its_slope
  table[1:, len(tried)] = -np.inf, 0.0
  with jax.enable_x64(True), jax.default_device(_cpu()):
    numbers = map(np.float64, (value, slope))
    step, reached, error = map(float, _program(options)(*numbers, table))
  if reached == -np.inf:
    return Advice(step, done=False)
  last = tried[-1].step if tried else 0.0
  # A step that is taken though it was not the last is known to decrease.
  return Advice(step, True, step > 0 and (step != last or error <= 0))
