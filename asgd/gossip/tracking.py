"""Gradient tracking: each peer's estimate of the mean gradient of all peers."""

from typing import Any, NamedTuple

import optax

from asgd import base, running_sums
from asgd.gossip.peer import Rule
from asgd.gossip.rules import add_weighted, decode_messages, encode_message


class Tracking(NamedTuple):
  """State of an algorithm that steps along tracked gradients."""

  inner: optax.OptState
  # y_i, including the mixes after the last step; float32[...] or wider
  tracker: optax.Updates
  gradient: optax.Updates  # g_i of the last step


def _step_along_tracker(algorithm: base.Algorithm) -> base.Algorithm:
  """Returns the algorithm that steps along y_i instead of the gradient."""

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return Tracking(algorithm.init(params), running_sums.zeros(params), zeros)

  def update(message, state, params=None, **extra):
    # Adding g_i - g_i(before) to y_i keeps sum_i y_i = sum_i g_i.
    tracker = running_sums.change(state.tracker, message, state.gradient)
    direction = optax.tree.cast_like(tracker, message)
    updates, inner = algorithm.update(direction, state.inner, params, **extra)
    return updates, Tracking(inner, tracker, message)

  return base.Algorithm(init, update)


def track(codec: Any = None) -> Rule:
  """Mixes parameters and estimates of the mean gradient with the same weights.

      y_i <- y_i + g_i - g_i(before);   x_i takes a step along y_i
      m_j = (x_j, y_j);   (x_i, y_i) <- (x_i, y_i) + sum_j W_ij (m_j - m_i)

  The sum is over the neighbours j with a message that arrived. If (x_i, y_i)
  has not changed since peer i put m_i, the mix is sum_j W_ij m_j, where W_ii is
  1 minus the other weights. g_i(before) is g_i of the peer's last job. y_i and
  g_i(before) start at 0. If the columns of W sum to 1, sum_i y_i equals
  sum_i g_i. A message has twice the size of the parameters in float32. If a
  peer fails, its y_i is lost, and the sums are no longer equal.

  Args:
    codec: the codec of both parts of a message, as in `rules.average`, so that
      the sums stay equal.

  Source:
    Pu, Nedic, "Distributed stochastic gradient tracking methods", Mathematical
    Programming 187, 2021, arXiv:1805.11454.
  """

  def put(state, keep, key):
    del keep
    message = state.server.params, state.server.opt_state.tracker
    code, own_message = encode_message(codec, message, key)
    return state._replace(rule_state=own_message), code

  def mix(state, codes, weights, slots):
    del slots
    server = state.server
    # One message has parameters and tracker, so both get the same weights.
    own_values = server.params, server.opt_state.tracker
    messages = decode_messages(codec, codes)
    differences = [optax.tree.sub(m, state.rule_state) for m in messages]
    mixed: Any = add_weighted(own_values, differences, weights)
    params, tracker = mixed
    tracking = server.opt_state._replace(tracker=tracker)
    server = server._replace(params=params, opt_state=tracking)
    return state._replace(server=server)

  def init(params, slots):
    del slots
    return params, running_sums.zeros(params)

  has_no_codec, coded = codec is None, track if codec is None else None
  return Rule(
    *(init, put, mix),
    wrap=_step_along_tracker,
    is_reference=has_no_codec,
    coded=coded,
  )
