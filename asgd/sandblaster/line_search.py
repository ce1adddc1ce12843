"""The line search: which step to try next, given the results so far.

It is optax's zoom line search (strong Wolfe conditions; Nocedal and Wright,
"Numerical optimization", algorithms 3.5 and 3.6). Only the public transform is
called, on one number, the step a, with the function

  phi(a) = f(x + a d),   phi'(a) = g(x + a d) . d

The transform's calls of phi are answered from a table of tried steps. For a
step that is not in the table the answer is -inf with slope 0, which meets both
conditions. So the search stops there and returns that step, which is the one to
try next. The state of a search is its table: plain data, from which it can
resume.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import checks, names

DEFAULTS: Mapping[str, Any] = {"max_linesearch_steps": 20}  # as optax.lbfgs
_FIXED = "initial_guess_strategy", "verbose"  # options that users cannot set
_OPTIONAL = "max_learning_rate", "approx_dec_rtol"  # may be None
_FRACTIONS = "slope_rtol", "curv_rtol"  # c1 and c2 of the Wolfe conditions


class Tried(NamedTuple):
  """A step that was tried, with its result."""

  step: float  # a
  value: float  # phi(a); NaN or inf where phi is not defined
  slope: float  # phi'(a)


class Advice(NamedTuple):
  """The next step of a search."""

  step: float  # to try, or to take if `done` and `found`
  done: bool  # whether the search has ended
  found: bool = False  # whether `step` decreases the function enough


def options_of(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
  """Returns the options of a line search, completed by defaults.

  Args:
    arguments: arguments of `optax.scale_by_zoom_linesearch`, except
      `initial_guess_strategy` (which is "one") and `verbose`.

  Raises:
    ValueError: for an unknown option, or one out of its range.

  Example:
    >>> dict(options_of({"curv_rtol": 0.5}))
    {'max_linesearch_steps': 20, 'curv_rtol': 0.5}
  """
  if not isinstance(arguments, Mapping):
    raise ValueError(
      "line_search must be a dict of arguments of"
      f" optax.scale_by_zoom_linesearch, not {checks.shown(arguments)}"
    )
  maker, options = optax.scale_by_zoom_linesearch, {**DEFAULTS, **arguments}
  for name in _FIXED:
    if name in options:
      raise ValueError(f"line_search.{name} cannot be set; drop it")
  names.check_arguments("line_search", "zoom", maker, options)
  with checks.section_errors("line_search", options):
    for name, value in options.items():
      if name == "max_linesearch_steps":
        options[name] = checks.integer(name, value, most=1000)
      elif value is not None or name not in _OPTIONAL:
        _check(name, value)
        options[name] = float(value)
  return tuple(options.items())


def _check(name: str, value: Any) -> None:
  """Raises ValueError for an option out of its range."""
  if name in _FRACTIONS:
    checks.fraction(name, value)
    return
  if name == "max_learning_rate":
    checks.positive(name, value)
  checks.nonnegative(name, value)
  if name == "increase_factor" and value <= 1:
    raise ValueError(
      f"increase_factor must be more than 1, not {checks.shown(value)}: the"
      " search multiplies steps by it until one is long enough"
    )


def _column_of(step, table):
  """Returns the column of a step in the table, or the first free column."""
  n_filled = jnp.sum(~jnp.isnan(table[0]))
  is_equal = table[0] == step
  return jnp.where(is_equal.any(), jnp.argmax(is_equal), n_filled)


@functools.lru_cache(maxsize=8)
def _program(options: tuple[tuple[str, Any], ...]) -> Any:
  """Returns the compiled search: (value, slope, table) -> (step, value there,
  error of the decrease)."""
  search = optax.scale_by_zoom_linesearch(
    **dict(options), initial_guess_strategy="one"
  )

  @jax.custom_jvp
  def phi(step, table):
    return table[1][_column_of(step, table)]

  @phi.defjvp
  def _(primals, tangents):
    step, table = primals
    slope = table[2][_column_of(step, table)]
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
  """Returns the CPU; None, which stands for the default device, if
  JAX_PLATFORMS excludes the CPU."""
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
    tried: results at the steps that were advised before, in order.
    options: from `options_of`.

  Returns:
    The Advice. It depends on the arguments alone: the search runs in float64,
    on the CPU if there is one, regardless of JAX's defaults.

  Source:
    Nocedal and Wright, "Numerical optimization", algorithms 3.5 and 3.6;
    Hager and Zhang, "Algorithm 851: CG_DESCENT", 2006, equations 23 and 26.

  Example:
    For phi(a) = (a - 20)^2 steps are doubled until the slope is small enough.

    >>> tried, advice = [], advise(400.0, -40.0)
    >>> while not advice.done:
    ...   a = advice.step
    ...   tried.append(Tried(a, (a - 20) ** 2, 2 * (a - 20)))
    ...   advice = advise(400.0, -40.0, tried)
    >>> [each.step for each in tried], advice.step, advice.found
    ([1.0, 2.0], 2.0, True)
  """
  max_steps = dict(options)["max_linesearch_steps"]
  # Columns are (step, phi, phi'), NaN where free. One column more than steps,
  # for the step that the search asks for.
  table = np.full((3, max_steps + 1), np.nan)
  for i, (step, phi, step_slope) in enumerate(tried):
    # -inf marks the step that the search asks for, so a real -inf becomes NaN.
    table[:, i] = step, phi if phi > -np.inf else np.nan, step_slope
  table[1:, len(tried)] = -np.inf, 0.0
  with jax.enable_x64(True), jax.default_device(_cpu()):
    numbers = map(np.float64, (value, slope))
    step, reached_value, error = map(float, _program(options)(*numbers, table))
  if reached_value == -np.inf:  # the search stopped at the marked step
    return Advice(step, done=False)
  last_step = tried[-1].step if tried else 0.0
  # A step other than the last tried one was kept because it decreases phi.
  return Advice(step, True, step > 0 and (step != last_step or error <= 0))
