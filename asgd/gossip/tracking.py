"""Gradient tracking: each peer's estimate of the mean gradient of all peers."""

from typing import Any, NamedTuple

import jax
import optax

from asgd import base
from asgd.gossip.peer import Rule
from asgd.gossip.rules import add_weighted


class Tracking(NamedTuple):
  """State of an algorithm whose steps follow tracked gradients."""

  inner: optax.OptState
  tracker: optax.Updates  # y_i, mixed since its last step
  gradient: optax.Updates  # g_i of the last step


def _track(algorithm: base.Algorithm) -> base.Algorithm:
  """Makes an algorithm step along y_i instead of the gradient."""

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return Tracking(algorithm.init(params), zeros, zeros)

  def update(message, state, params=None, **extra):
    # The change of the own gradient keeps the sum of all y equal to that of g.
    tracker = jax.tree.map(
      lambda y, g, before: y + (g - before),
      *(state.tracker, message, state.gradient),
    )
    updates, inner = algorithm.update(tracker, state.inner, params, **extra)
    return updates, Tracking(inner, tracker, message)

  return base.Algorithm(init, update)


def track() -> Rule:
  """Mixes parameters, and with them the estimates of the mean gradient.

      y_i <- y_i + g_i - g_i',   ' of the last round; then a step along y_i
      m_j = (x_j, y_j);   x_i <- sum_j W_ij x_j;   y_i <- sum_j W_ij y_j

  y_i starts at 0, as does g_i'. If the columns of W sum to 1, the sum of all
  y_i stays that of all g_i. A message has twice the size of the parameters. If
  a peer fails, its y_i is lost, and with it this equality.

  Source:
    Pu, Nedic, "Distributed stochastic gradient tracking methods", Mathematical
    Programming 187, 2021, arXiv:1805.11454.
  """

  def put(state, keep, key):
    del keep, key
    code = state.server.params, state.server.opt_state.tracker
    return state._replace(own=code), code

  def mix(state, codes, weights, slots):
    del slots
    server = state.server
    # Parameters and tracker are mixed with the same weights, as one message.
    current = server.params, server.opt_state.tracker
    differences = [optax.tree.sub(code, state.own) for code in codes]
    mixed: Any = add_weighted(current, differences, weights)
    params, tracker = mixed
    tracking = server.opt_state._replace(tracker=tracker)
    server = server._replace(params=params, opt_state=tracking)
    return state._replace(server=server)

  def init(params, slots):
    del slots
    return params, optax.tree.zeros_like(params)

  return Rule(init, put, mix, wrap=_track, refers=True)
