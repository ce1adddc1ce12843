"""The contract of gossip: peers that train without a server.

A peer consists of a worker and a server: it sends itself a ticket, works on it
and receives the message, by the same `Worker` and `Server` as elsewhere. In
addition it mixes parameters of other peers into its own. A `Peer` is pure
functions of one peer's state; a simulator calls them for all peers, a program
over a mesh on each device, and a live runtime in each process.

Rows of a trace
---------------
Peers have the actions SEND, RECEIVE, LOST, REJECT, JOIN and LEAVE of a worker,
which concern the peer's own server, and these, each applied by one peer:

  action  worker     seq              job        the peer's step
  put     sender     of the message   round k    state, code = put(state, W_k[i,
                                                 i], message_key(root, i, seq))
  take    receiver   of the message   sender j   keeps the code for its next mix
  mix     peer       -1               round k    state = mix(state, codes, W,
                                                 slots) of the taken messages
  lend    lender     of the message   other      state, loan = lend(state, slot)
  adopt   receiver   of the message   lender     state = adopt(state, loan,
                                                 slot, first)

`seq` of put and lend rows counts the messages of a peer index, 0, 1, 2, ...,
over its incarnations; (sender, seq) identifies a message. Each receiver takes a
message at most once, and takes the messages of one sender in their order. The
weight of a message is W_k[receiver, sender] of the round k in which it was put
(`Gossip.weight`). If peers put in every tau-th round only (`Gossip.every`), k
counts these rounds.

A message that never arrives needs no row: under `average` and `choco` its
weight stays with the receiver, so the weights still sum to 1 when neighbours
have left.

`asgd.live.gossip` has the rules by which a live run replays to the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base

# Separates the keys of messages from those of jobs, which count from 0.
_SALT = 0x6D657373


class PeerState(NamedTuple):
  """The complete state of a peer."""

  server: base.ServerState  # parameters, optimizer, count of own updates
  mixes: jax.Array  # int32[], count of mixes with messages of other peers
  rule_state: Any  # made by `Rule.init`


class Job(NamedTuple):
  """A peer's job: the ticket that the peer sent itself."""

  ticket: base.Ticket  # its version counts the peer's own updates
  mixes: jax.Array  # int32[], of the state when the ticket was sent


def no_residual(state: PeerState) -> jax.Array:
  """Returns 0: a rule without a codec sends everything.

  Args:
    state: not read.
  """
  del state
  return jnp.zeros([], jnp.float32)


class Rule(NamedTuple):
  """How messages of other peers change a peer; see `asgd.gossip.rules`.

  `slots` is the largest number of neighbours of a peer. `keep` is W[i, i], the
  weight that a peer gives itself in the round.
  """

  # (parameters, slots) -> state of the rule
  init: Callable[[base.Params, int], Any]
  # (state, keep, key) -> (state, code)
  put: Callable[[PeerState, jax.Array, jax.Array], tuple[PeerState, Any]]
  # (state, codes, weights float[k], slots int32[k]) -> state
  mix: Callable[[PeerState, Sequence[Any], jax.Array, jax.Array], PeerState]
  # Wraps the algorithm of the peer's own server.
  wrap: Callable[[base.Algorithm], base.Algorithm] = lambda algorithm: algorithm
  # state -> float[], the weight of the peer in the mean over peers
  weight: Callable[[PeerState], jax.Array] = lambda state: jnp.ones([])
  # (state, parameters after the peer's own update) -> new parameters
  step: Callable[[PeerState, base.Params], base.Params] = (
    lambda state, params: params
  )
  # (state, slot of the newcomer) -> (state, loan beside the parameters)
  lend: Callable[[PeerState, jax.Array], tuple[PeerState, Any]] = (
    lambda state, slot: (state, ())
  )
  # (state, parameters lent, loan, slot of the lender, first) -> state. `first`,
  # bool[], is whether the peer is a newcomer that has adopted no loan yet.
  adopt: Callable[
    [PeerState, base.Params, Any, jax.Array, jax.Array], PeerState
  ] = lambda state, params, loan, slot, first: with_params(
    state, optax.tree.where(first, params, state.server.params)
  )
  # state -> float32[], RMS of the update that the codec has not sent yet
  residual: Callable[[PeerState], jax.Array] = no_residual
  introduces: bool = False  # whether a newcomer's neighbours adopt its loans
  is_reference: bool = False  # whether put only returns arrays of the state
  # codec of `asgd.compression` -> the rule with encoded messages; None: the
  # rule has a codec already
  coded: Callable[[Any], Any] | None = None
  # Whether the rule keeps the mean over peers if the columns of W sum to 1: a
  # peer gives parts of its mass away. Otherwise W must be symmetric.
  columns: bool = False


class Peer(NamedTuple):
  """A peer as pure functions of its state, all of which can be compiled."""

  init: Callable[[base.Params], PeerState]
  # (state, worker) -> Job
  send: Callable[[PeerState, jax.Array], Job]
  # (state, job, message of the worker) -> (state, Report); the staleness counts
  # the peer's mixes during the job.
  receive: Callable[
    [PeerState, Job, optax.Updates], tuple[PeerState, base.Report]
  ]
  # (state, keep, key) -> (state, code)
  put: Callable[[PeerState, jax.Array, jax.Array], tuple[PeerState, Any]]
  # (state, codes, weights float[k], slots int32[k]) -> state, for k codes
  mix: Callable[[PeerState, Sequence[Any], jax.Array, jax.Array], PeerState]
  # state -> float[], the weight of the peer in the mean over peers
  weight: Callable[[PeerState], jax.Array]
  # (state, slot of the newcomer) -> (state, loan)
  lend: Callable[[PeerState, jax.Array], tuple[PeerState, Any]]
  # (state of `init`, loan, slot of the lender, first) -> state
  adopt: Callable[[PeerState, Any, jax.Array, jax.Array], PeerState]
  # Whether send, and whether put, only return arrays of the state, so that they
  # need not be compiled.
  sends_current: bool = False
  is_reference: bool = False
  # state -> float32[], RMS of the update that the codec has not sent yet
  residual: Callable[[PeerState], jax.Array] = no_residual


def message_key(root: jax.Array, worker: Any, seq: Any) -> jax.Array:
  """Returns the key for the random numbers of a message's code.

  Args:
    root: the key of the seed, which is not consumed.
    worker: int32[], the sender.
    seq: int32[], of the message.

  Returns:
    A key, which the codec consumes.

  Example:
    >>> import jax
    >>> from asgd import gossip, worker
    >>> root = jax.random.key(0)
    >>> bool(gossip.message_key(root, 0, 5) == worker.job_key(root, 0, 5))
    False
  """
  sender_key = jax.random.fold_in(jax.random.fold_in(root, _SALT), worker)
  return jax.random.fold_in(sender_key, seq)


def with_params(state: PeerState, params: base.Params) -> PeerState:
  """Returns the state of a peer with other parameters."""
  return state._replace(server=state.server._replace(params=params))


def make_peer(server: base.Server, rule: Rule, slots: int) -> Peer:
  """Builds a peer from its server and a rule.

  Args:
    server: applies the messages of the peer's own jobs; its algorithm must have
      been wrapped by `rule.wrap`.
    rule: how messages of other peers change the peer.
    slots: the largest number of neighbours of a peer (`Topology.slots`).

  Example:
    Two peers take a step each, and then the mean of their parameters.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> from asgd import gossip
    >>> server = asgd.make_server(asgd.as_algorithm(optax.sgd(0.5)))
    >>> peer = gossip.make_peer(server, gossip.rules.average(), slots=1)
    >>> key, states, codes = jax.random.key(0), [], []
    >>> for worker, gradient in enumerate([4.0, 8.0]):
    ...   state = peer.init(jnp.float32(8.0))
    ...   job = peer.send(state, jnp.int32(worker))
    ...   state, _ = peer.receive(state, job, jnp.float32(gradient))
    ...   state, code = peer.put(state, jnp.float32(0.5), key)
    ...   states.append(state)
    ...   codes.append(code)
    >>> weights, slots = jnp.array([0.5]), jnp.array([0])
    >>> for state, code in zip(states, codes[::-1]):
    ...   print(peer.mix(state, (code,), weights, slots).server.params)
    5.0
    5.0
  """

  def init(params):
    state = server.init(params)
    rule_state = rule.init(state.params, slots)
    return PeerState(state, jnp.zeros([], jnp.int32), rule_state)

  def send(state, worker):
    return Job(server.send(state.server, worker), state.mixes)

  def receive(state, job, message):
    # The server measures staleness in its own updates, and there are none
    # during a job. Make it report the mixes instead: move the ticket's version
    # back by their number.
    mixes_during_job = state.mixes - job.mixes
    ticket = job.ticket._replace(
      version=state.server.version - mixes_during_job
    )
    new_state, report = server.receive(state.server, ticket, message)
    new_state = new_state._replace(params=rule.step(state, new_state.params))
    return state._replace(server=new_state), report

  def mix(state, codes, weights, slots):
    state = rule.mix(state, codes, weights, slots)
    return state._replace(mixes=state.mixes + 1)

  def lend(state, slot):
    state, loan = rule.lend(state, slot)
    return state, (state.server.params, loan)

  def adopt(state, loan, slot, first):
    params, loan = loan
    return rule.adopt(state, params, loan, slot, first)

  return Peer(
    *(init, send, receive, rule.put, mix, rule.weight, lend, adopt),
    *(server.sends_current, rule.is_reference, rule.residual),
  )
