"""Read my writes: a worker that keeps a ticket computes on a copy of its own.

A client of a stale synchronous parameter server reads cached parameters and
its own updates since they were fetched (Ho et al., NIPS 2013). A server applies
a message by its own rule, which may have a momentum or a rate for each
parameter. So the worker's copy is that of a server which receives the messages
of this worker alone:

    fetched:   x^i <- params;   else it stays
    message:   g = gradient(x^i);   x^i, s^i <- server's rule(x^i, s^i, g)

With one worker this is the server's own sequence, whatever the rule: there is
no staleness at any bound. With several, a momentum or a mean of squares in the
copy is of the worker's own messages. It is kept when the copy is fetched anew,
and a schedule of learning rates counts on from the ticket's version.

What a worker cannot know is refused: what others add to an update of several
messages, what a gate drops, and an update that depends on the parameters that
the message was computed on (DC-ASGD, Gap-Aware), as the server does not have
the worker's copy.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, compression, sharding
from asgd.transforms.lookahead import VelocityState


class OwnState(NamedTuple):
  """State of a worker of `own_writes`."""

  inner: Any  # the worker's
  own: base.ServerState  # of a server with this worker's messages alone
  begun: jax.Array  # bool[], False until the first ticket gave it parameters


@functools.lru_cache(maxsize=32)  # one Worker: one compilation
def own_writes(
  worker: base.Worker,
  server: base.Server,
  plan: sharding.ShardPlan | None = None,
) -> base.Worker:
  """Returns a worker that may keep tickets, and then reads its own writes.

  Args:
    worker: any; with its codec, if the server has one.
    server: that gets its messages.
    plan: of a server in shards whose messages are coded for each; None: not.

  Returns:
    A Worker, whose state holds a copy of the server's. One that has a copy of
    its own already (`asgd.local_worker`) is returned as it is.

  Raises:
    ValueError: for a worker or a server whose jobs cannot share a ticket; of
      the Worker's `init`, for an update that reads what was sent.

  Source:
    Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NIPS 2013: read-my-writes.

  Example:
    Two jobs on the ticket of 8: the second is computed on 8 - 0.5 8.

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
      "the messages of this worker are models or pulls on the server's, of"
      " which each starts at a ticket that was sent for it (EASGD, FedAsync):"
      " leave cache out, and fetch_every too"
    )
  if not server.alone:
    raise ValueError(
      "a worker that keeps a ticket must know what its messages do, and here"
      " an update is of several messages, or a gate may drop them: leave cache"
      " and fetch_every out, or the gate and the averaging"
    )

  def decoded(message: Any) -> optax.Updates:
    if server.codec is None:
      return message
    parts = compression.split(plan, message)
    parts = [compression.decode(server.codec, part) for part in parts]
    return parts[0] if plan is None else sharding.join(plan, parts)

  def init(params: base.Params) -> OwnState:
    if server.reads_sent is None or server.reads_sent(params):
      raise ValueError(
        "the update depends on the parameters that a message was computed on,"
        " and of a worker that keeps a ticket the server does not know them"
        " (DC-ASGD, Gap-Aware): leave cache out, and fetch_every too"
      )
    zeros = optax.tree.zeros_like(params)
    return OwnState(worker.init(params), server.init(zeros), jnp.bool_(False))

  def work(
    state: OwnState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> tuple[OwnState, optax.Updates, base.Metrics]:
    # Its state may depend on the first parameters.
    first = server.init(ticket.params)
    own = optax.tree.where(state.begun, state.own, first)
    own = optax.tree.where(ticket.fresh, _fetched(server, own, ticket), own)
    params = server.send(own, ticket.worker).params
    params = optax.tree.where(ticket.fresh, ticket.params, params)
    read = ticket._replace(params=params)
    inner, message, metrics = worker.work(state.inner, read, batch, key)
    # It is not stale to itself.
    mine = ticket._replace(version=own.version, params=params)
    own, _ = server.receive(own, mine, decoded(message))
    return OwnState(inner, own, jnp.bool_(True)), message, metrics

  return base.Worker(init, work, base.OWN)


def adopted(worker: base.Worker, state: Any, params: base.Params) -> OwnState:
  """Returns the state of a worker of `own_writes` from that of the worker that
  it was made of, before its first ticket; as it is if it is one already.

  Args:
    worker: of `own_writes`.
    state: of either.
    params: shapes and dtypes.
  """
  if isinstance(state, OwnState):
    return state
  return worker.init(params)._replace(inner=state)


def _fetched(
  server: base.Server, own: base.ServerState, ticket: base.Ticket
) -> base.ServerState:
  """The worker's own server, at the parameters of a ticket."""
  own = own._replace(
    params=ticket.params,
    version=jnp.asarray(ticket.version),
    opt_state=_counted(own.opt_state, ticket.version),
  )
  if server.sends_current:
    return own
  # The ticket looks ahead; the server is as far behind it.
  ahead = server.send(own, ticket.worker).params
  params = jax.tree.map(lambda x, y: x - (y - x), ticket.params, ahead)
  return own._replace(params=params)


_OF_SCHEDULES = optax.ScaleByScheduleState, VelocityState


def _counted(opt_state: optax.OptState, version: jax.Array) -> optax.OptState:
  """Sets counts of schedules to the server's; those of moments stay."""

  def of_schedule(node: Any) -> bool:
    return isinstance(node, _OF_SCHEDULES)

  def count(node: Any) -> Any:
    if not of_schedule(node):
      return node
    values = {k: _counted(v, version) for k, v in node._asdict().items()}
    return node._replace(**values | {"count": jnp.asarray(version)})

  return jax.tree.map(count, opt_state, is_leaf=of_schedule)
