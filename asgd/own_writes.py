"""Read my writes: a worker that keeps a ticket computes on its own copy.

A client of a stale synchronous parameter server reads cached parameters with
its own updates since they were fetched (Ho et al., NIPS 2013). A server applies
a message by its own rule, which may have a momentum or a rate for each
parameter. So the worker keeps a copy of the server that receives the messages
of this worker alone:

    on a fetch:      x^i <- params
    on a message:    g = gradient(x^i);   x^i, s^i <- server's rule(x^i, s^i, g)

x^i are the copy's parameters and s^i its optimizer state. A fetch keeps s^i,
and sets the count of a schedule of learning rates to the ticket's version. If
the server looks ahead, x^i is an estimate of its parameters, from the predicted
ones in the ticket. With one worker and no look-ahead the copy always equals the
server, so gradients are never stale, however long the worker keeps a ticket.
With several workers, a momentum or a mean of squares in the copy is computed
from the worker's own messages only.

`own_writes` refuses four cases, in which the copy would differ from the server:

- each job needs a ticket that was sent for it (EASGD, FedAsync);
- an update averages several messages, some of other workers;
- a gate may drop the message;
- an update reads, or may read, the parameters that the message was computed on
  (DC-ASGD, Gap-Aware), and the server does not have the worker's copy.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, compression, optimizers, sharding
from asgd.transforms.lookahead import VelocityState
from asgd.transforms.rows import WorkerRows


class OwnState(NamedTuple):
  """State of a worker of `own_writes`."""

  inner: Any  # state of the wrapped worker
  own: base.ServerState  # the copy, which receives this worker's messages alone
  begun: jax.Array  # bool[], False until the first ticket gave it parameters


def own_writes(
  worker: base.Worker,
  server: base.Server,
  plan: sharding.ShardPlan | None = None,
) -> base.Worker:
  """Returns a worker that may keep tickets, and then reads its own writes.

  Args:
    worker: any worker; if the server has a codec, one that encodes with it.
    server: the receiver of its messages.
    plan: the shard plan, if each shard's part of a message is encoded
      separately; else None.

  Returns:
    A Worker. Its state holds a copy of the server's state. A worker that
    already has a copy (`asgd.local_worker`) is returned as it is.

  Raises:
    ValueError: for a worker or a server with jobs that need one ticket each;
      from `init` of the Worker, for an update that reads the sent parameters.

  Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NIPS 2013: read-my-writes.

  Example:
    Two jobs on a ticket with parameters 8: the second reads 8 - 0.5 * 8 = 4.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> from asgd.own_writes import own_writes
    >>> server = asgd.make_server(asgd.as_algorithm(optax.sgd(0.5)))
    >>> worker = asgd.gradient_worker(lambda w, batch: 0.5 * (w - batch) ** 2)
    >>> worker, w = own_writes(worker, server), jnp.float32(8.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), w)
    >>> state = worker.init(w)
    >>> for fresh in (True, False):
    ...   state, message, _ = worker.work(
    ...     state, ticket._replace(fresh=fresh), 0.0, jax.random.key(0)
    ...   )
    ...   print(message)
    8.0
    4.0
  """
  if worker.kept == base.OWN:
    return worker
  if worker.kept == base.NEVER:
    raise ValueError(
      "each job of this worker needs a separate ticket, because the worker"
      " sends models or pulls on the server's parameters (EASGD, FedAsync):"
      " leave cache and fetch_every out"
    )
  if not server.alone:
    raise ValueError(
      "a worker that keeps a ticket must know the effect of its messages, but"
      " this server averages several messages or may drop them by a gate: leave"
      " out cache and fetch_every, or the gate and the averaging"
    )
  return _with_copy(worker, server, plan)


@functools.lru_cache(maxsize=32)  # the same Worker is compiled only once
def _with_copy(
  worker: base.Worker, server: base.Server, plan: sharding.ShardPlan | None
) -> base.Worker:
  """Returns the Worker of `own_writes`."""

  def decode(message: Any) -> optax.Updates:
    if server.codec is None:
      return message
    parts = compression.split(plan, message)
    parts = [compression.decode(server.codec, part) for part in parts]
    return parts[0] if plan is None else sharding.join(plan, parts)

  def init(params: base.Params) -> OwnState:
    if server.reads_sent is None or server.reads_sent(params):
      raise ValueError(
        "the update reads, or may read, the parameters that a message was"
        " computed on (DC-ASGD, Gap-Aware), and the server does not know those"
        " of a worker that keeps a ticket: leave cache and fetch_every out"
      )
    zeros = optax.tree.zeros_like(params)
    return OwnState(worker.init(params), server.init(zeros), jnp.bool_(False))

  def work(
    state: OwnState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> tuple[OwnState, optax.Updates, base.Metrics]:
    # The server's state may depend on the first parameters.
    first_copy = server.init(ticket.params)
    copy = optax.tree.where(state.begun, state.own, first_copy)
    # [1] A fresh ticket replaces the copy's parameters.
    fetched_copy = _after_fetch(server, copy, ticket)
    copy = optax.tree.where(ticket.fresh, fetched_copy, copy)
    # [2] The job reads a fresh ticket's parameters, else the copy's.
    params = server.send(copy, ticket.worker).params
    params = optax.tree.where(ticket.fresh, ticket.params, params)
    ticket_read = ticket._replace(params=params)
    # [3] The wrapped worker computes its message.
    inner, message, metrics = worker.work(state.inner, ticket_read, batch, key)
    # [4] The copy receives the message as the server will decode it. The
    # message is not stale for the copy: its ticket gets the copy's version.
    copy_ticket = ticket._replace(version=copy.version, params=params)
    copy, _ = server.receive(copy, copy_ticket, decode(message))
    return OwnState(inner, copy, jnp.bool_(True)), message, metrics

  return worker._replace(init=init, work=work, kept=base.OWN)


def wrap_state(
  worker: base.Worker, state: Any, params: base.Params
) -> OwnState:
  """Wraps a worker's state into an OwnState with a copy that has no ticket yet.

  Args:
    worker: the result of `own_writes`.
    state: state of the worker that it wraps; an OwnState is returned unchanged.
    params: shapes and dtypes.
  """
  if isinstance(state, OwnState):
    return state
  return worker.init(params)._replace(inner=state)


def _after_fetch(
  server: base.Server, copy: base.ServerState, ticket: base.Ticket
) -> base.ServerState:
  """Returns the worker's copy of the server after it fetched a ticket."""
  copy = copy._replace(
    params=ticket.params,
    version=jnp.asarray(ticket.version),
    opt_state=_with_schedule_counts(copy.opt_state, ticket.version),
  )
  if server.sends_current:
    return copy
  # The ticket has predicted parameters x. Predict again from x, and subtract
  # that step: x - (send(x) - x) approximates the server's present parameters.
  ahead_params = server.send(copy, ticket.worker).params
  params = jax.tree.map(lambda x, y: x - (y - x), ticket.params, ahead_params)
  return copy._replace(params=params)


_SCHEDULE_STATES = VelocityState, optimizers.CountingState


def _with_schedule_counts(
  opt_state: optax.OptState, version: jax.Array
) -> optax.OptState:
  """Sets the counts of schedules to `version`, but not those of moments."""

  def is_schedule(node: Any) -> bool:
    # The state of a schedule of optax, also of a weight decay or of another
    # hyperparameter, has no other field; that of moments has.
    is_count = getattr(node, "_fields", None) == ("count",)
    return is_count or isinstance(node, _SCHEDULE_STATES)

  def is_leaf(node: Any) -> bool:
    return is_schedule(node) or isinstance(node, WorkerRows)

  def set_count(node: Any) -> Any:
    # The rows of workers count the messages of each worker, as the server does.
    if not is_schedule(node):
      return node
    fields = {
      name: _with_schedule_counts(value, version)
      for name, value in node._asdict().items()
    }
    return node._replace(**fields | {"count": jnp.asarray(version)})

  return jax.tree.map(set_count, opt_state, is_leaf=is_leaf)
