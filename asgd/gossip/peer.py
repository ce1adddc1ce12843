"""The contract of gossip: peers that train without a server.

A peer is a worker beside a server of its own: it sends itself a ticket, works
on it and receives the message, by the same `Worker` and `Server` as elsewhere.
What is new is how parameters of others come in. A `Peer` is pure functions of
one peer's state; a simulator calls them for all peers, a program over a mesh
on each device, and a live runtime in each process.

Rows of a trace
---------------
Peers have the actions SEND, RECEIVE, LOST, REJECT, JOIN and LEAVE of a worker,
which all concern the peer's own server, and these, each obeyed by one peer:

  action  worker     seq              job        what the peer does
  put     sender     of the message   round k    state, code = put(state, W_k[i,
                                                 i], message_key(root, i, seq))
  take    receiver   of the message   sender j   notes the code for its next mix
  mix     peer       -1               round k    state = mix(state, codes, W,
                                                 slots) of what it has taken
  lend    lender     of the message   other      state, loan = lend(state, slot)
  adopt   receiver   of the message   lender     state = adopt(state, loan,
                                                 slot, first)

`seq` of put and lend rows counts the messages of a place, 0, 1, 2, ..., whoever
holds it; (sender, seq) names a message. A message is taken at most once by each
receiver, and those of one sender in their order. The weight of a message is
W_k[receiver, sender] of the round k in which it was put (`Gossip.weight`); if
peers put in every tau-th round only (`Gossip.every`), k counts these.

A message that never comes needs no row: under `average` and `choco` its weight
stays with the receiver, so that weights of neighbours that left are normalised
again by themselves.

What a live runtime does, so that a run replays to the same bits
----------------------------------------------------------------
1. It calls the compiled functions of `asgd.simulator.compile_peer`, each by
   itself, in the order of its peer's rows; between rows it changes nothing.
2. Each peer writes its rows in its own journal, before anybody can see what the
   row did: `put` before the code leaves the process, `take` before `mix`.
   Rows of different peers need no common order: `orders.merge` finds one in
   which each `take` follows its `put`, and any such order gives the same bits.
3. It takes a message when it mixes it, not when it arrives. A message of a
   later round waits, and is not journaled, until the peer is in that round.
4. The codes of a mix are in the order of their `take` rows. Sums depend on it.
5. It draws nothing but from `message_key` and `worker.job_key`; batches are a
   function of (worker, job).
6. What travels is the code as `put` returned it; if a wire packs it, unpacking
   gives back all its bits.
7. Pairs (AD-PSGD): both peers put, take and mix, and neither has another row
   between its put and its mix. So of two that meet one must be free to answer:
   either a lock that each holds for its three rows, or peers of two kinds,
   those that ask and those that answer (`topologies.two_colours`).
8. A peer that dies leaves: LOST for its open job, LEAVE, written by whoever
   sees it, in the journal of that place. A newcomer in its place is JOIN, which
   is `init` of the first parameters, and one `adopt` of what each neighbour
   lends it, before all else; of the first it has the parameters, of all what
   the rule knows of them. If `rule.introduces`, it then lends to each of them,
   who adopt it before they take anything that it puts.
9. Under `share` all peers apply the same messages: a newcomer takes of each
   neighbour those that its first lender had not taken, and no others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base

# Keys of messages are apart from those of jobs, which count from 0.
_MESSAGES = 0x6D657373


class PeerState(NamedTuple):
  """The whole state of a peer."""

  server: base.ServerState  # its parameters, its optimizer, its own updates
  mixes: jax.Array  # int32[], changes of the parameters by those of others
  own: Any  # what the rule keeps


class Job(NamedTuple):
  """What a peer works on: the ticket that it sent itself."""

  ticket: base.Ticket  # its version counts the peer's own updates
  mixes: jax.Array  # int32[], the state's at that time


def nothing_kept(state: PeerState) -> jax.Array:
  """Returns 0: without a codec all is told.

  Args:
    state: not looked at.
  """
  del state
  return jnp.zeros([], jnp.float32)


class Rule(NamedTuple):
  """How parameters of others come into a peer; see `asgd.gossip.rules`.

  `slots` is the largest number of neighbours that a peer has; `keep` is the
  weight that a peer gives itself in the round, W[i, i].
  """

  # (parameters, slots) -> what the rule keeps
  init: Callable[[base.Params, int], Any]
  # (state, keep, key) -> (state, code)
  put: Callable[[PeerState, jax.Array, jax.Array], tuple[PeerState, Any]]
  # (state, codes, weights float[k], slots int32[k]) -> state
  mix: Callable[[PeerState, Sequence[Any], jax.Array, jax.Array], PeerState]
  # What is around the algorithm of the peer's own server.
  wrap: Callable[[base.Algorithm], base.Algorithm] = lambda algorithm: algorithm
  # state -> float[], by which a peer counts in the mean over peers
  weight: Callable[[PeerState], jax.Array] = lambda state: jnp.ones([])
  # (state, parameters after the peer's own update) -> the same, as they count
  step: Callable[[PeerState, base.Params], base.Params] = (
    lambda state, params: params
  )
  # (state, slot of the newcomer) -> (state, what it is lent beside parameters)
  lend: Callable[[PeerState, jax.Array], tuple[PeerState, Any]] = (
    lambda state, slot: (state, ())
  )
  # (state, parameters lent, that, slot of the lender, first) -> state; `first`,
  # bool[], is whether the peer is a newcomer that has adopted nothing yet
  adopt: Callable[
    [PeerState, base.Params, Any, jax.Array, jax.Array], PeerState
  ] = lambda state, params, loan, slot, first: with_params(
    state, optax.tree.where(first, params, state.server.params)
  )
  # state -> float32[], RMS of what the peer has not told yet, by its codec
  residual: Callable[[PeerState], jax.Array] = nothing_kept
  introduces: bool = False  # a newcomer's neighbours adopt what it lends them
  refers: bool = False  # put computes nothing: what it returns was there
  columns: bool = False  # keeps the mean by columns of W that sum to 1: what a
  # peer gives away it has no more; else by rows, and W is symmetric


class Peer(NamedTuple):
  """A peer, as pure functions of its state; all may be compiled."""

  init: Callable[[base.Params], PeerState]
  # (state, worker) -> Job
  send: Callable[[PeerState, jax.Array], Job]
  # (state, job, what the worker made of it) -> (state, Report); the staleness
  # is how often the peer mixed while the job was done
  receive: Callable[
    [PeerState, Job, optax.Updates], tuple[PeerState, base.Report]
  ]
  # (state, keep, key) -> (state, code)
  put: Callable[[PeerState, jax.Array, jax.Array], tuple[PeerState, Any]]
  # (state, codes, weights float[k], slots int32[k]) -> state, for k codes
  mix: Callable[[PeerState, Sequence[Any], jax.Array, jax.Array], PeerState]
  # state -> float[]: the mean over peers counts each by it
  weight: Callable[[PeerState], jax.Array]
  # (state, slot of the newcomer) -> (state, loan)
  lend: Callable[[PeerState, jax.Array], tuple[PeerState, Any]]
  # (state of `init`, loan, slot of the lender, first) -> state
  adopt: Callable[[PeerState, Any, jax.Array, jax.Array], PeerState]
  # Whether send and put compute nothing, and need not be compiled.
  sends_current: bool = False
  refers: bool = False
  # state -> float32[], RMS of what the peer has not told yet, by its codec
  residual: Callable[[PeerState], jax.Array] = nothing_kept


def message_key(root: jax.Array, worker: Any, seq: Any) -> jax.Array:
  """The key of what is random in a message's code.

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
  mine = jax.random.fold_in(jax.random.fold_in(root, _MESSAGES), worker)
  return jax.random.fold_in(mine, seq)


def with_params(state: PeerState, params: base.Params) -> PeerState:
  """Returns the state of a peer with other parameters."""
  return state._replace(server=state.server._replace(params=params))


def make_peer(server: base.Server, rule: Rule, slots: int) -> Peer:
  """Builds a peer of its own server and a rule.

  Args:
    server: what a peer does with the messages of its own jobs; of an algorithm
      that went through `rule.wrap`.
    rule: how parameters of others come in.
    slots: the largest number of neighbours of a peer (`Topology.slots`).

  Example:
    Two peers take a step each and then the mean of their parameters.

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
    own = rule.init(state.params, slots)
    return PeerState(state, jnp.zeros([], jnp.int32), own)

  def send(state, worker):
    return Job(server.send(state.server, worker), state.mixes)

  def receive(state, job, message):
    # The server counts staleness in its own updates, of which there are none
    # during a job.
    since = state.mixes - job.mixes
    ticket = job.ticket._replace(version=state.server.version - since)
    after, report = server.receive(state.server, ticket, message)
    after = after._replace(params=rule.step(state, after.params))
    return state._replace(server=after), report

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
    *(server.sends_current, rule.refers, rule.residual),
  )
