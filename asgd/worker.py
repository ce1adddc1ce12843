"""The worker: everything between receiving a ticket and sending a message."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from asgd import base


class Aux(NamedTuple):
  """What a loss returns beside its value."""

  stats: Any  # the batch's own statistics, as `Variables.stats`; () if none


Loss = Callable[
  [optax.Params, base.Batch, jax.Array], tuple[jax.Array, Aux]
]  # (params, batch, key) -> (float[], Aux)


class WorkerState(NamedTuple):
  """What a worker keeps from one message to the next."""

  message: optax.OptState  # of the message transform: momentum, residual, ...


def job_key(root: jax.Array, worker: jax.Array, job: jax.Array) -> jax.Array:
  """The key of one piece of work: a function of (seed, worker, job) only, so
  that no order of events and no restart can change it. Consumes nothing."""
  return jax.random.fold_in(jax.random.fold_in(root, worker), job)


def gradient_worker(
  loss: Loss, message: optax.GradientTransformation | None = None
) -> base.Worker:
  """A worker whose message is one gradient, passed through `message`.

  Args:
    loss: differentiated with respect to the (weights of the) parameters.
    message: a transform that runs on the worker, with a state of its own, on
      the parameters it was sent: DANA-Slim's momentum, for one.

  Returns:
    A Worker; its message has the structure of the parameters. If those are
    `Variables`, the message's `stats` are the batch's own statistics.
  """
  transform = optax.with_extra_args_support(message or optax.identity())

  def init(params):
    return WorkerState(transform.init(base.weights_of(params)))

  def work(state, ticket, batch, key):
    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, aux), grads = gradient(ticket.params, batch, key)
    weights = base.weights_of(ticket.params)
    out, message_state = transform.update(
      base.weights_of(grads), state.message, weights
    )
    if isinstance(ticket.params, base.Variables):
      out = base.Variables(out, aux.stats)
    return WorkerState(message_state), out, base.Metrics(value)

  return base.Worker(init, work)
