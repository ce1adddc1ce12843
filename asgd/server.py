"""The server: where messages become updates and staleness is measured.

`make_server` turns an Algorithm into three pure functions. They are the whole
interface between algorithms and runtimes: the simulator, a live parameter
server and a pipeline stage differ only in the order in which they call `send`
and `receive`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks, norms

Gate = Callable[[base.Delay, optax.Updates], jax.Array]  # -> bool[]
# The state after a message; and float32[], the RMS of the parameters' change.
_Accepted = tuple[base.ServerState, jax.Array]


def accept_all(delay: base.Delay, message: optax.Updates) -> jax.Array:
  """The gate that drops nothing: returns True, as bool[]."""
  del delay, message
  return jnp.asarray(True)


def max_staleness(bound: int, gate: Gate = accept_all) -> Gate:
  """A gate that drops messages staler than a bound (a hard cap).

    accept if staleness <= bound

  Ringmaster ASGD with threshold R accepts a staleness below R, which is
  `max_staleness(R - 1)` (`asgd.ringmaster_asgd`).

  Args:
    bound: 0 or more, in updates.
    gate: a second gate, which a message has to pass as well.

  Returns:
    A gate, (delay, message) -> bool[].

  Raises:
    ValueError: for a negative bound.

  Source:
    Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: the first asynchronous SGD
    with optimal time complexity", ICML 2025, arXiv:2501.16168.

  Example:
    A dropped message changes nothing, not even the version.

    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd.server import max_staleness
    >>> server = asgd.asgd(0.5, workers=3).server(gate=max_staleness(1))
    >>> state = server.init(jnp.float32(8.0))
    >>> for ticket in [server.send(state, jnp.int32(i)) for i in range(3)]:
    ...   state, report = server.receive(state, ticket, jnp.float32(4.0))
    ...   print(report.staleness, report.accepted, state.params)
    0 True 6.0
    1 True 4.0
    2 False 4.0
  """
  checks.nonnegative("bound", bound)

  def accept_fresh(delay: base.Delay, message: optax.Updates) -> jax.Array:
    is_fresh = delay.staleness <= bound
    return is_fresh if gate is accept_all else is_fresh & gate(delay, message)

  return accept_fresh


def finite(delay: base.Delay, message: optax.Updates) -> jax.Array:
  """A gate that drops messages holding a NaN or an infinity.

  Args:
    delay: the delay of the message; not used.
    message: any tree of float arrays.

  Returns:
    bool[].

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.server import finite
    >>> print(finite(None, [jnp.zeros(3), jnp.array([1.0, jnp.nan])]))
    False
  """
  del delay
  return all_finite(message)


def all_finite(tree: Any) -> jax.Array:
  """Returns whether a tree holds no NaN and no infinity, bool[].

  Args:
    tree: a tree of arrays; those of integers or bools count as finite.
  """
  leaves = jax.tree.leaves(tree)
  floats = (x for x in leaves if jnp.result_type(x).kind not in "iub")
  leaf_is_finite = [jnp.isfinite(x).all() for x in floats]
  return jnp.stack(leaf_is_finite).all() if leaf_is_finite else jnp.array(True)


def pushed(gate: Gate = accept_all) -> Gate:
  """A gate that drops messages of zeros, from jobs that pushed nothing.

  A worker that accrues gradients over several jobs (`asgd.worker.local_worker`)
  sends zeros for each job but the last. These zeros are no update.

  Args:
    gate: a second gate, which a message has to pass as well.

  Returns:
    A gate, (delay, message) -> bool[].

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd.server import pushed
    >>> for message in ([0.0, 0.0], [0.0, -1.0]):
    ...   print(pushed()(None, jnp.array(message)))
    False
    True
  """

  def accept_nonzero(delay: base.Delay, message: optax.Updates) -> jax.Array:
    is_nonzero = norms.has_nonzero(base.weights_of(message))
    return is_nonzero & gate(delay, message)

  return accept_nonzero


class PendingUpdate(NamedTuple):
  """Messages that wait for an update."""

  count: jax.Array  # type: ignore[assignment]  # int32[], below `every`
  total: Any  # their sum, like a message; None when every == 1
  oldest: Any  # Ticket of the stalest; None when every == 1
  message_state: optax.OptState  # of the `at_server` transform


def gather(
  total: optax.Updates,
  oldest: base.Ticket,
  message: optax.Updates,
  ticket: base.Ticket,
  *,
  first: Any = False,
  add: Callable[..., optax.Updates] = optax.tree.add,
) -> tuple[optax.Updates, base.Ticket]:
  """Adds a message to the sum of an update.

  Args:
    total: the sum of the messages before.
    oldest: the ticket of the stalest message in `total`; the update gets its
      Delay.
    message: like `total`.
    ticket: the ticket of the message.
    first: bool[], whether the message is the first one; then `oldest` is not
      read.
    add: adds two trees; another function may donate the first one's buffers.

  Returns:
    The sum, and the ticket of the stalest message. Outside of a compiled
    program that is one of the two given tickets: no parameters are copied.
  """
  total = add(total, message)
  numbers = first, ticket.version, oldest.version
  if not any(isinstance(x, jax.core.Tracer) for x in numbers):
    if ticket is oldest:  # do not fetch the versions from the device
      return total, ticket
    is_older = first or int(ticket.version) < int(oldest.version)
    return total, ticket if is_older else oldest
  is_older = first | (ticket.version < oldest.version)
  return total, optax.tree.where(is_older, ticket, oldest)


def mean(total: optax.Updates, count: int) -> optax.Updates:
  """Returns the mean of messages, which is the message of one update.

  Args:
    total: the sum of the messages.
    count: the number of messages.
  """
  average: optax.Updates = jax.tree.map(lambda x: x / count, total)
  return average


def make_server(
  algorithm: base.Algorithm,
  *,
  every: int = 1,
  gate: Gate = accept_all,
  at_server: optax.GradientTransformation | None = None,
  workers: int | None = None,
) -> base.Server:
  """Builds the server of an algorithm.

    staleness = version now - version of the ticket
    params <- params + algorithm(mean of `every` accepted messages)

  Args:
    algorithm: turns a message into an update of the parameters.
    every: accepted messages averaged into one update; the number of workers
      gives synchronous SGD under a bulk synchronous order, any other number is
      n-softsync (Zhang et al. 2016). The update gets the Delay of the stalest.
    gate: decides which messages count. A dropped message changes nothing, not
      even the version.
    at_server: a transform that scales each message by its own Delay before
      it is averaged, such as `scale_by_staleness`.
    workers: how many workers the algorithm was built for, if it keeps a state
      for each; runtimes refuse more.

  Returns:
    A Server: three pure functions, which may be compiled.

  Raises:
    ValueError: for an `every` that is no positive integer; from `init` of the
      Server, for parameters of an integer type.

  Example:
    Any optax optimizer, on means of two messages.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> server = asgd.make_server(asgd.as_algorithm(optax.sgd(0.5)), every=2)
    >>> state = server.init(jnp.float32(8.0))
    >>> ticket = server.send(state, jnp.int32(0))
    >>> for message in (4.0, 2.0):
    ...   state, report = server.receive(state, ticket, jnp.float32(message))
    ...   print(state.params, state.version)  # 8 - 0.5 (4 + 2) / 2
    8.0 0
    6.5 1
  """
  checks.integer("every", every)
  scale = optax.with_extra_args_support(at_server or optax.identity())
  accept = _make_accept(algorithm, every, scale)

  def init(params: base.Params) -> base.ServerState:
    params = jax.tree.map(jnp.asarray, params)
    _check_weights(base.weights_of(params))
    total = oldest = None
    version = jnp.zeros([], jnp.int32)
    if every > 1:
      total = jax.tree.map(jnp.zeros_like, params)
      oldest = base.Ticket(version, version, params, jnp.bool_(True))
    # `at_server` transforms get weights only; statistics are not scaled.
    message_state = scale.init(base.weights_of(params))
    inbox = PendingUpdate(version, total, oldest, message_state)
    return base.ServerState(params, algorithm.init(params), version, inbox)

  def send(state: base.ServerState, worker: jax.Array) -> base.Ticket:
    params = algorithm.send(state.opt_state, state.params, worker=worker)
    return base.Ticket(worker, state.version, params)

  def drop(
    state: base.ServerState, ticket: base.Ticket, message: optax.Updates
  ) -> _Accepted:
    del ticket, message
    return state, jnp.float32(0.0)

  def receive(
    state: base.ServerState, ticket: base.Ticket, message: optax.Updates
  ) -> tuple[base.ServerState, base.Report]:
    delay = _delay(state, ticket)
    # Measure against the ticket before the update changes the parameters.
    distance = norms.gap(state.params, ticket.params)
    message_norm = norms.rms(base.weights_of(message))
    is_accepted = gate(delay, message)
    # Without a gate there is nothing to decide: no `cond` is compiled.
    if gate is accept_all:
      state, update_norm = accept(state, ticket, message)
    else:
      state, update_norm = jax.lax.cond(
        is_accepted, accept, drop, state, ticket, message
      )
    report = base.Report(
      delay.staleness, distance, is_accepted, message_norm, update_norm
    )
    return state, report

  return base.Server(
    *(init, send, receive),
    sends_current=algorithm.send is base.send_current,
    workers=workers,
    alone=every == 1 and gate is accept_all,
    reads_sent=functools.partial(_reads_sent, algorithm, scale),
  )


def _reads_sent(
  algorithm: base.Algorithm, scale: base.Transform, params: base.Params
) -> bool:
  """Whether an update depends on the parameters that were sent."""
  leaves, structure = jax.tree.flatten(params)
  shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
  return _update_reads_sent(algorithm, scale, structure, shapes)


@functools.lru_cache(maxsize=64)  # called at each start of a worker
def _update_reads_sent(
  algorithm: base.Algorithm,
  scale: base.Transform,
  structure: jax.tree_util.PyTreeDef,
  shapes: tuple[tuple[tuple[int, ...], Any], ...],
) -> bool:
  """Returns `_reads_sent` for parameters of the given shapes.

  It traces one update: an input of the program that no equation uses is not
  read."""

  def update(params: base.Params, sent: base.Params) -> None:
    zero, weights = jnp.zeros([], jnp.int32), base.weights_of(params)
    delay = base.Delay(zero, zero, sent)
    weights_delay = delay._replace(sent_params=base.weights_of(sent))
    message, _ = scale.update(
      weights, scale.init(weights), weights, **weights_delay._asdict()
    )
    message = base.with_weights(params, message)
    state = algorithm.init(params)
    algorithm.update(message, state, params, **delay._asdict())

  zeros = [np.zeros(shape, dtype) for shape, dtype in shapes]
  params = jax.tree.unflatten(structure, zeros)
  # The second half of the inputs are the sent parameters.
  program = jax.make_jaxpr(update)(params, params).jaxpr
  sent = program.invars[len(program.invars) // 2 :]
  return any(x is y for eqn in program.eqns for x in eqn.invars for y in sent)


def _check_weights(weights: base.Params) -> None:
  """Raises ValueError for a leaf of integers, which cannot be trained."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      name = jax.tree_util.keystr(path)
      raise ValueError(
        f"the parameter {name or 'itself'} is of {leaf.dtype}, which cannot be"
        " trained; make it float32, or keep it out of the parameters"
      )


def _apply(
  algorithm: base.Algorithm, state: base.ServerState, message: optax.Updates,
  delay: base.Delay,
) -> _Accepted:
  """Updates the parameters with one message, or a mean of several."""
  updates, opt_state = algorithm.update(
    message, state.opt_state, state.params, **delay._asdict()
  )
  params = optax.apply_updates(state.params, updates)
  # Not the norm of `updates`: XLA would store that tree for the norm alone.
  norm = norms.gap(params, state.params)
  state = state._replace(
    params=params, opt_state=opt_state, version=state.version + 1
  )
  return state, norm


def _make_accept(
  algorithm: base.Algorithm, every: int, scale: base.Transform
) -> Callable[[base.ServerState, base.Ticket, optax.Updates], _Accepted]:
  """Returns (state, ticket, message) -> (the state after an accepted message,
  the RMS of the parameters' change)."""

  apply = functools.partial(_apply, algorithm)

  def enqueue(
    state: base.ServerState, message: optax.Updates, ticket: base.Ticket
  ) -> _Accepted:
    """Adds one message; applies the average of every `every` messages."""
    inbox = state.inbox
    # `total` and `oldest` of an empty inbox hold zeros, or the last update's
    # ticket.
    first = inbox.count == 0
    total, oldest = gather(
      inbox.total, inbox.oldest, message, ticket, first=first
    )
    count = inbox.count + 1

    def flush(state: base.ServerState) -> _Accepted:
      state, norm = apply(state, mean(total, every), _delay(state, oldest))
      empty_inbox = inbox._replace(
        count=jnp.zeros_like(count),
        total=jax.tree.map(jnp.zeros_like, total),
        oldest=oldest,
      )
      return state._replace(inbox=empty_inbox), norm

    def keep_waiting(state: base.ServerState) -> _Accepted:
      longer_inbox = inbox._replace(count=count, total=total, oldest=oldest)
      return state._replace(inbox=longer_inbox), jnp.float32(0.0)

    result: _Accepted = jax.lax.cond(count == every, flush, keep_waiting, state)
    return result

  def accept(
    state: base.ServerState, ticket: base.Ticket, message: optax.Updates
  ) -> _Accepted:
    delay = _delay(state, ticket)
    weights_delay = delay._replace(sent_params=base.weights_of(ticket.params))
    weights, message_state = scale.update(
      base.weights_of(message),
      state.inbox.message_state,
      base.weights_of(state.params),
      **weights_delay._asdict(),
    )
    message = base.with_weights(message, weights)
    inbox = state.inbox._replace(message_state=message_state)
    state = state._replace(inbox=inbox)
    if every > 1:
      return enqueue(state, message, ticket)
    return apply(state, message, delay)

  return accept


def _delay(state: base.ServerState, ticket: base.Ticket) -> base.Delay:
  """Returns how late a message on a ticket is."""
  # After a rollback the server's version may be less than a ticket's.
  staleness = jnp.maximum(state.version - ticket.version, 0)
  return base.Delay(ticket.worker, staleness, ticket.params)
