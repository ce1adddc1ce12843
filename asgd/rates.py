"""Learning rates over the server's updates, as numbers or as schedules."""

import collections
import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.schedules

from asgd import checks, hoisting, names


def at(rate: optax.ScalarOrSchedule, count: jax.Array) -> jax.Array:
  """Returns the learning rate, float[], after `count` updates, int32[].

  Example:
    >>> from asgd import rates
    >>> print(rates.at(0.5, 3), rates.at(lambda count: 0.5**count, 3))
    0.5 0.125
  """
  return jnp.asarray(rate(count) if callable(rate) else rate)


def check(name: str, rate: optax.ScalarOrSchedule) -> None:
  """Raises ValueError unless a number is positive and finite; a schedule
  passes."""
  if not callable(rate):
    checks.positive(name, rate)


def after_warmup(
  schedule: optax.Schedule, peak: float, *, warmup: int, start: float
) -> optax.Schedule:
  """Puts a linear warm-up before a schedule.

    eta(t) = start + (peak - start) t / warmup,   t < warmup
    eta(t) = schedule(t - warmup),                t >= warmup

  Args:
    schedule: a schedule that counts from the end of the warm-up.
    peak: the learning rate at the end of the warm-up.
    warmup: its length in updates; 0 for none.
    start: the learning rate of update 0.

  Returns:
    A schedule update -> learning rate.

  Example:
    >>> from asgd import rates
    >>> rate = rates.after_warmup(lambda t: 0.5**t, 1.0, warmup=2, start=0.5)
    >>> [float(rate(update)) for update in range(5)]
    [0.5, 0.75, 1.0, 0.5, 0.25]
  """
  if not warmup:
    return schedule

  def rise(count):
    """As `optax.linear_schedule(start, peak, warmup)`."""
    missing = 1 - jnp.clip(count, 0, warmup) / warmup
    # `start` depends on the number of workers: cells that differ in it share a
    # program.
    return hoisting.constant(start - peak) * missing + peak

  # join_schedules restarts the count of `schedule` at the boundary.
  return optax.join_schedules([rise, schedule], [warmup])


def warmup_steps(
  peak: float,
  *,
  warmup: int = 0,
  start: float = 0.0,
  boundaries: Sequence[int] = (),
  factor: float = 0.1,
) -> optax.ScalarOrSchedule:
  """Linear warm-up from `start` to `peak`, then drops at given updates.

  Args:
    peak: the learning rate after the warm-up.
    warmup: its length in updates; 0 for none.
    start: the learning rate of update 0; the DANA papers use peak / workers.
    boundaries: at each of these updates the rate is multiplied by `factor`;
      none of them is inside the warm-up.

  Returns:
    A schedule update -> learning rate, or `peak` itself if it never changes.

  Raises:
    ValueError: for a value out of its range, or a drop inside the warm-up.

  Example:
    >>> from asgd import rates
    >>> rate = rates.warmup_steps(
    ...   1.0, warmup=2, start=0.5, boundaries=(3, 4), factor=0.5
    ... )
    >>> [float(rate(update)) for update in range(6)]
    [0.5, 0.75, 1.0, 0.5, 0.25, 0.25]
  """
  checks.positive("learning_rate", peak)
  if warmup < 0 or not 0 <= start <= peak:
    raise ValueError(
      f"warm-up must take 0 or more updates, not {warmup}, and start between 0"
      f" and the peak {peak}, not at {start}"
    )
  if boundaries:
    checks.positive("decay factor", factor)
  if any(boundary < warmup for boundary in boundaries):
    raise ValueError(
      f"the learning rate drops at updates {tuple(boundaries)}, inside the"
      f" warm-up of {warmup}: move the drops behind it, or shorten it"
    )
  if not warmup and not boundaries:
    return peak
  # `drops` counts from the end of the warm-up, as `after_warmup` expects.
  counts = collections.Counter(map(int, boundaries))
  # A boundary that is given twice multiplies the rate by factor^2.
  drops = optax.piecewise_constant_schedule(
    peak, {step - warmup: factor**count for step, count in counts.items()}
  )
  return after_warmup(drops, peak, warmup=warmup, start=start)


STEPS = "steps"  # the name of `warmup_steps` among schedules
_PREFIXES_OF_COMBINERS = "join", "inject"  # they take other schedules
_LENGTHS = "decay_steps", "transition_steps", "warmup_steps", "transition_begin"
_PEAKS = "peak_value", "init_value", "value"


@functools.cache
def known() -> Mapping[str, Callable[..., optax.Schedule]]:
  """Returns optax's schedules by their names, without "_schedule".

  Example:
    >>> from asgd import rates
    >>> "cosine_decay" in rates.known()
    True
  """
  schedules = {
    name.removesuffix("_schedule"): maker
    for name, maker in vars(optax.schedules).items()
    if name.endswith(("_schedule", "_decay"))
    and not name.startswith(_PREFIXES_OF_COMBINERS)
    if isinstance(maker, types.FunctionType)
  }
  return types.MappingProxyType(schedules)


def arguments(name: str) -> list[str]:
  """Returns the argument names of a schedule of `known`, or of MODULE:FUNCTION.
  Raises ValueError for an unknown name, with the nearest known one.

  Example:
    >>> from asgd import rates
    >>> rates.arguments("linear")[:2]
    ['init_value', 'end_value']
  """
  maker = names.resolve("schedule", name, known())
  return list(inspect.signature(maker).parameters)


def named(
  name: str,
  peak: float,
  *,
  updates: int,
  unit: float = 1.0,
  options: Mapping[str, Any] | None = None,
) -> optax.Schedule:
  """Returns a schedule over updates, made by optax or by a user's function.

  Args:
    name: a name of `known`, or MODULE:FUNCTION of a function that takes some of
      the arguments of optax's schedules.
    peak: the learning rate. It is the schedule's peak_value, or else its
      init_value or value.
    updates: the schedule's length (its decay_steps or transition_steps) unless
      `options` give one.
    unit: updates in one unit of the options. It scales decay_steps,
      transition_steps, warmup_steps, transition_begin and the keys of
      boundaries_and_scales.
    options: further arguments.

  Returns:
    A schedule update -> learning rate.

  Raises:
    ValueError: for an unknown or missing argument, and for a function that
      does not return a schedule.

  Example:
    >>> from asgd import rates
    >>> rate = rates.named("cosine_decay", 0.1, updates=100)
    >>> [round(float(rate(update)), 3) for update in (0, 50, 100)]
    [0.1, 0.05, 0.0]
  """
  maker = names.resolve("schedule", name, known())
  parameters = inspect.signature(maker).parameters
  arguments = dict(options or {})
  # Options may count in epochs; optax counts in updates.
  for key in _LENGTHS:
    if key in arguments:
      checks.nonnegative(key, arguments[key])
      arguments[key] = _updates(key, arguments[key] * unit)
  if isinstance(arguments.get("boundaries_and_scales"), Mapping):
    arguments["boundaries_and_scales"] = {
      _updates("boundaries_and_scales", float(position) * unit): factor
      for position, factor in arguments["boundaries_and_scales"].items()
    }
  # optax has three names for the peak; a schedule takes one of them.
  peak_names = [key for key in _PEAKS if key in parameters][:1]
  arguments = {**dict.fromkeys(peak_names, peak), **arguments}
  # A warm-up starts at 0, and a decay ends there. A default of the schedule
  # stays: 0 would be the limit of a rate that grows.
  for key in ("init_value", "end_value"):
    if key in parameters and parameters[key].default is inspect.Parameter.empty:
      arguments.setdefault(key, 0.0)
  # By default an optax schedule decays until the last update.
  for key in ("decay_steps", "transition_steps"):
    if key in parameters:
      arguments.setdefault(key, updates)
  schedule = names.call("schedule", name, maker, arguments)
  if not callable(schedule):
    raise ValueError(
      f"schedule {name!r} must return a function of an update, not"
      f" {checks.shown(schedule)}"
    )
  return schedule


def _updates(key: str, count: float) -> int:
  """Returns a count of updates as an integer; ValueError beyond int32."""
  if not math.isfinite(count) or count > 2**31 - 1:
    raise ValueError(f"{key} is {count:.3g} updates, more than 2^31 - 1")
  return round(count)


def scale_by_sent_rate(
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
  """Scales by minus the learning rate at the ticket's version.

    u <- -eta(version) u

  It is for the local optimizer of a worker (`asgd.worker.local_worker`). A
  schedule counts the server's updates; a worker knows that count from its
  ticket.

  Args:
    learning_rate: eta, a number, or a schedule over the server's updates.

  Returns:
    A transform without a state. For a schedule, its update needs the extra arg
    `version`, int32[].

  Source:
    none: with one rate for all updates it is SGD's.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.scale_by_sent_rate(lambda version: 0.5**version)
    >>> u, _ = tx.update(jnp.float32(8.0), tx.init(None), version=jnp.int32(2))
    >>> print(u)  # -0.5^2 8
    -2.0
  """
  if not callable(learning_rate):
    scale = optax.scale_by_learning_rate(learning_rate)
    return optax.with_extra_args_support(scale)

  def update_fn(updates, state, params=None, *, version, **extra_args):
    del params, extra_args
    # The server's count at the time of the send is the ticket's version.
    rate = at(learning_rate, version)
    return jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates), state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )
