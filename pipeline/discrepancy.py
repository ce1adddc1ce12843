"""PipeMare's cures for weights that change between forward and backward.

The weights of a forward are tau updates older than those of its backward. At
first, T1 divides the learning rate of a stage, by more for a longer tau. T2
extrapolates the weights of the backward back to those of the forward. Neither
stores a second version of the weights; T2 stores a velocity of their size.

References:
  Yang et al., "PipeMare: asynchronous pipeline parallel DNN training", MLSys
    2021, arXiv:1910.05124.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, rates
from asgd.pipeline import prediction


class Cure(NamedTuple):
  """The numbers of T1 and T2 for one stage."""

  delay: float  # tau = (2 (P - i) + 1) / N, in updates
  updates: int  # K of T1
  decay: float  # D of T2


def cures(
  stages: int, every: int, updates: int, decay: float = 0.135
) -> list[Cure]:
  """Returns the cures of stages 1 to P, tau_i = (2 (P - i) + 1) / N.

  Args:
    stages: P.
    every: N, microbatches of an update.
    updates: K, positive.
    decay: D, in (0, 1).

  Raises:
    ValueError: for a value out of its range.

  Example:
    >>> [cure.delay for cure in cures(3, every=2, updates=8)]
    [2.5, 1.5, 0.5]
  """
  checks.integer("anneal", updates, most=2**31 - 1)
  checks.integer("every", every)
  if not 0 < decay < 1:
    raise ValueError(f"decay must be between 0 and 1, not {decay!r}")
  # Stages are numbered from 1 in the paper: P - i is the distance to the last.
  delays = ((2 * distance + 1) / every for distance in reversed(range(stages)))
  return [Cure(delay, updates, decay) for delay in delays]


def reschedule(
  learning_rate: optax.ScalarOrSchedule, cure: Cure
) -> optax.Schedule:
  """Returns T1, the learning rate of a stage.

    alpha_k / max(tau, 1)^p_k,   p_k = 1 - min(k / K, 1)

  The paper has no maximum: here a delay below one update raises no rate.
  `learning_rate` is alpha, or a schedule over the server's updates.

  Example:
    >>> rate = reschedule(0.5, Cure(delay=4.0, updates=2, decay=0.135))
    >>> [float(rate(k)) for k in range(3)]
    [0.125, 0.25, 0.5]
  """
  tau = max(cure.delay, 1.0)

  def schedule(count):
    power = 1.0 - jnp.minimum(count / cure.updates, 1.0)
    return rates.at(learning_rate, count) / tau**power

  return schedule


class WeightVelocityState(NamedTuple):
  """State of `follow`."""

  inner: optax.OptState  # of the algorithm
  weight_velocity: optax.Params  # like params, delta


def follow(algorithm: base.Algorithm, cure: Cure) -> base.Algorithm:
  """Returns an algorithm that follows the velocity of the weights, for T2.

    delta <- gamma delta + (1 - gamma) (w_{t+1} - w_t),   gamma = D^(1 / tau)

  The updates of the algorithm stay as they are.

  Example:
    >>> cure = Cure(delay=2.0, updates=1, decay=0.25)
    >>> algorithm = follow(base.as_algorithm(optax.sgd(1.0)), cure)
    >>> state = algorithm.init(jnp.float32(0.0))
    >>> for gradient in (4.0, 2.0):  # gamma is 1 / 2
    ...   _, state = algorithm.update(jnp.float32(gradient), state)
    ...   print(state.weight_velocity)
    -2.0
    -2.0
  """
  # After tau updates the share D of a velocity remains: gamma^tau = D.
  gamma = cure.decay ** (1 / cure.delay)

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return WeightVelocityState(algorithm.init(params), zeros)

  def update(updates, state, params=None, **extra_args):
    velocity_before = state.weight_velocity
    updates, inner = algorithm.update(
      updates, state.inner, params, **extra_args
    )
    # `updates` is w_{t+1} - w_t.
    velocity = optax.tree.update_moment(updates, velocity_before, gamma, 1)
    return updates, WeightVelocityState(inner, velocity)

  def send(opt_state, params, *, worker):
    return algorithm.send(opt_state.inner, params, worker=worker)

  return base.Algorithm(init, update, send)


@functools.lru_cache(maxsize=256)
def extrapolate(cure: Cure) -> Callable[[base.ServerState], Any]:
  """Returns T2 for `stage.Part.correct`: state -> w_t - tau delta_t. The part's
  server needs an algorithm of `follow`."""

  @jax.jit
  def correct(state):
    weights = base.weights_of(state.params)
    velocity = optax.tree.get(state.opt_state, "weight_velocity")
    at_forward = prediction.step_along(weights, velocity, cure.delay)
    return base.with_weights(state.params, at_forward)

  return correct
