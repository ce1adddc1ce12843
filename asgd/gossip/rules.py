"""Rules: how messages of other peers change a peer's parameters.

In the equations x_i are the parameters of peer i, W_ij is the weight that peer
i gives a message of peer j, and m_j is the message that j put in the round.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, compression
from asgd.gossip.peer import PeerState, Rule, with_params
from asgd.gossip.topology import (
  Topology,
  check_constant,
  second_eigenvalue,
  smallest_eigenvalue,
)
from asgd.norms import rms


def add_weighted(
  total: base.Params, trees: Sequence[base.Params], weights: jax.Array
) -> base.Params:
  """Returns total + sum_k weights[k] trees[k], in the order of the trees."""
  # A loop, not one stacked sum: the order of additions fixes the bits.
  for k, tree in enumerate(trees):
    total = jax.tree.map(
      lambda t, x, w=weights[k]: t + w.astype(t.dtype) * x, total, tree
    )
  return total


def encode_message(codec: Any, tree: Any, key: jax.Array) -> tuple[Any, Any]:
  """Returns (code of a message, message as receivers decode it); without a
  codec both are the message."""
  if codec is None:
    return tree, tree
  # Messages are models, not sums, so no residual is added to later messages.
  code, _ = codec.encode(codec.init(tree), tree, key)
  return code, codec.decode(code)


def decode_messages(codec: Any, codes: Sequence[Any]) -> Sequence[Any]:
  """Returns the messages of some codes."""
  return codes if codec is None else [codec.decode(code) for code in codes]


def average(codec: Any = None) -> Rule:
  """Weighted means of parameters, as in D-PSGD and AD-PSGD.

      m_j = x_j;   x_i <- x_i + sum_j W_ij (m_j - m_i)

  The sum is over the neighbours j with a message that arrived. If x_i has not
  changed since it was put, this is sum_j W_ij x_j, where W_ii is 1 minus the
  other weights. A gradient that was applied since then stays in x_i in full.
  With a symmetric W the mean over peers does not change if two neighbours
  always take each other's messages.

  With a codec m_j = decode(encode(x_j)), for the sender as well. So the codec's
  error does not change the mean, but the distance between peers cannot fall
  below that error.

  Args:
    codec: a codec of `asgd.compression`, without a memory; None sends x_j.

  Source:
    Lian et al., "Can decentralized algorithms outperform centralized
    algorithms?", NeurIPS 2017, arXiv:1705.09056. With a codec: Carli, Fagnani,
    Frasca, Zampieri, "Gossip consensus algorithms via quantized communication",
    Automatica 46, 2010.
  """

  def put(state, keep, key):
    del keep
    code, own_message = encode_message(codec, state.server.params, key)
    return state._replace(rule_state=own_message), code

  def mix(state, codes, weights, slots):
    del slots
    own_message = state.rule_state
    # Differences to the peer's own message, not to its present parameters: a
    # gradient applied since then must not be averaged away.
    messages = decode_messages(codec, codes)
    differences = [optax.tree.sub(m, own_message) for m in messages]
    params = add_weighted(state.server.params, differences, weights)
    return with_params(state, params)

  has_no_codec = codec is None
  return Rule(
    *(lambda params, slots: params, put, mix),
    is_reference=has_no_codec,
    coded=average if has_no_codec else None,
  )


def _scale_update(state: PeerState, params: base.Params) -> base.Params:
  """Scales a peer's own update for `push_sum`: an update u of x = w z changes z
  by u / w."""
  mass, old_weights = state.rule_state, base.weights_of(state.server.params)
  scaled = jax.tree.map(
    lambda a, b: b + (a - b) / mass.astype(b.dtype),
    *(base.weights_of(params), old_weights),
  )
  # With weight 1 the parameters are used as they are, without rounding.
  weights = optax.tree.where(mass == 1, base.weights_of(params), scaled)
  return base.with_weights(params, weights)


def _add_unsent_part(
  state: PeerState, sent_params: base.Params, mass: jax.Array
) -> PeerState:
  """Adds to z what the receivers of the decoded z^ lack; the peer keeps
  `mass`."""
  # (1 - W_jj) / W_jj; a peer that gives all its mass away keeps nothing.
  given_share = jnp.where(mass > 0, state.rule_state / mass - 1, 0)

  def add(z: jax.Array, received: jax.Array) -> jax.Array:
    return z + given_share.astype(z.dtype) * (z - received)

  return with_params(state, jax.tree.map(add, state.server.params, sent_params))


def push_sum(codec: Any = None) -> Rule:
  """Push-sum: peers give parts of their mass away, along a directed graph.

      m_j = (z_j, w_j);   w_j <- W_jj w_j   when it is put
      w_i' = w_i + sum_j W_ij w_j
      z_i <- (w_i z_i + sum_j W_ij w_j z_j) / w_i';   w_i <- w_i'

  Columns of W sum to 1: W_ij is the part of j's mass that goes to i. In the
  paper a peer stores x_i = w_i z_i. Here it stores z_i, on which gradients are
  computed. The peer's own update u is an update of x_i: z_i <- z_i + u / w_i.
  The sums of w and of w z, over peers and messages in transit, stay constant on
  any graph, in any order, and with any delay.

  With a codec a message has z^_j = decode(encode(z_j)) and the exact w_j. What
  receivers lack stays at the sender, so that the sums stay constant:

      z_j <- z_j + (1 / W_jj - 1) (z_j - z^_j)   when it is put

  Args:
    codec: a codec of `asgd.compression`, without a memory; None sends z_j.

  Source:
    Assran et al., "Stochastic gradient push for distributed deep learning",
    ICML 2019, arXiv:1811.10792, algorithm 1. Kempe, Dobra, Gehrke, "Gossip-
    based computation of aggregate information", FOCS 2003.
  """

  def init(params, slots):
    del slots
    # Masses in bfloat16 would not sum to a constant.
    return jnp.ones([], jnp.result_type(jnp.float32, *jax.tree.leaves(params)))

  def put(state, keep, key):
    code, sent_params = encode_message(codec, state.server.params, key)
    mass = state.rule_state
    message, mass = (code, mass), keep.astype(mass.dtype) * mass
    if codec is not None:
      state = _add_unsent_part(state, sent_params, mass)
    return state._replace(rule_state=mass), message

  def mix(state, codes, weights, slots):
    del slots
    # The received masses, and the peer's new mass.
    parts = [weights[k] * code[1] for k, code in enumerate(codes)]
    messages = decode_messages(codec, [code[0] for code in codes])
    total = mass = state.rule_state
    for part in parts:
      total = total + part.astype(total.dtype)
    # The mean of all z, weighted by mass. Only the mean is rounded: shares in
    # bfloat16 would not sum to 1.
    old_params = state.server.params
    params = jax.tree.map(lambda z: (mass / total) * z, old_params)
    shares = jnp.stack([part / total for part in parts]) if parts else weights
    params = add_weighted(params, messages, shares)
    params = optax.tree.cast_like(params, old_params)
    return with_params(state, params)._replace(rule_state=total)

  def lend(state, slot):
    del slot
    # The newcomer's mass is taken from its lenders: the total stays the same.
    half_mass = state.rule_state / 2
    return state._replace(rule_state=half_mass), half_mass

  def adopt(state, params, loan, slot, first):
    del slot
    old_mass = jnp.where(first, 0, state.rule_state)  # a newcomer has no mass
    total = old_mass + loan

    def mean(z, lent):
      return ((old_mass * z + loan * lent) / total).astype(z.dtype)

    new_params = jax.tree.map(mean, state.server.params, params)
    return with_params(state, new_params)._replace(rule_state=total)

  return Rule(
    init,
    put,
    mix,
    weight=lambda state: state.rule_state,
    step=_scale_update,
    lend=lend,
    adopt=adopt,
    columns=True,
    coded=push_sum if codec is None else None,
  )


class Choco(NamedTuple):
  """State of `choco`."""

  codec: Any  # state of the codec
  public: base.Params  # x^_i, this peer's parameters at its neighbours
  copies: base.Params  # x^_j of each neighbour, [slots, ...]


def choco(codec: Any, gamma: float) -> Rule:
  """CHOCO: peers mix their public parameters, and send compressed differences.

      q_i = codec(x_i - x^_i);   x^_i <- x^_i + q_i,   at i and its neighbours
      x_i <- x_i + gamma sum_j W_ij (x^_j - x^_i)

  A peer keeps a copy x^_j for each of its neighbours. All copies start as the
  common first parameters, which need not be sent. A copy is correct only if the
  peer takes every message of that neighbour, so the topology must be the same
  in all rounds. With the identity codec x^_i is the x_i that was put, and with
  gamma = 1 this is `average`.

  Args:
    codec: a codec of `asgd.compression`; the part that it does not send stays
      in x_i - x^_i, so it needs no error feedback.
    gamma: the consensus step, in (0, 1]; the coarser the codec, the smaller it
      must be. See `proved_gamma`.

  Raises:
    ValueError: for a gamma out of its range.

  Source:
    Koloskova, Stich, Jaggi, "Decentralized stochastic optimization and gossip
    algorithms with compressed communication", ICML 2019, arXiv:1902.00340,
    algorithm 2.
  """
  checks.portion("gamma", gamma, ": beyond 1 peers step past each other")

  def init(params, slots):
    copies = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (slots, *jnp.shape(x))), params
    )
    return Choco(codec.init(params), params, copies)

  def put(state, keep, key):
    del keep
    rule_state = state.rule_state
    # x - its public copy: what the neighbours do not know yet.
    difference = optax.tree.sub(state.server.params, rule_state.public)
    code, codec_state = codec.encode(rule_state.codec, difference, key)
    # The sender updates its public parameters exactly as its neighbours will.
    public = optax.tree.add(rule_state.public, codec.decode(code))
    return state._replace(
      rule_state=Choco(codec_state, public, rule_state.copies)
    ), code

  def mix(state, codes, weights, slots):
    rule_state, differences = state.rule_state, []
    copies = rule_state.copies
    for k, code in enumerate(codes):
      difference = codec.decode(code)
      copies = jax.tree.map(
        lambda c, q, slot=slots[k]: c.at[slot].add(q), copies, difference
      )
      differences.append(
        jax.tree.map(
          lambda c, x, slot=slots[k]: c[slot] - x, copies, rule_state.public
        )
      )
    params = add_weighted(state.server.params, differences, gamma * weights)
    return with_params(state, params)._replace(
      rule_state=rule_state._replace(copies=copies)
    )

  def adopt(state, params, loan, slot, first):
    copies = jax.tree.map(
      lambda c, x: c.at[slot].set(x), state.rule_state.copies, loan
    )
    # A newcomer lends its complete parameters, so they are all public.
    params, public = optax.tree.where(
      first, (params, params), (state.server.params, state.rule_state.public)
    )
    rule_state = state.rule_state._replace(public=public, copies=copies)
    return with_params(state, params)._replace(rule_state=rule_state)

  def residual(state):
    difference = optax.tree.sub(state.server.params, state.rule_state.public)
    return rms(base.weights_of(difference))

  return Rule(
    *(init, put, mix),
    lend=lambda state, slot: (state, state.rule_state.public),
    adopt=adopt,
    residual=residual,
    introduces=True,
  )


def proved_gamma(topology: Topology, delta: float) -> float:
  """Returns the consensus step for which CHOCO is proved to converge.

    gamma = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2
                           - 8 rho delta)
    rho = 1 - |lambda_2|,   beta = ||I - W||_2

  This step is far below the best one. On a ring of 8 peers that send 1 % of the
  elements it is 3.5e-5, with which peers hardly influence each other, while 0.1
  converges.

  Args:
    topology: the topology of symmetric weights W, the same in all rounds.
    delta: the delta of the codec, in (0, 1]; see `compression.Codec`.

  Raises:
    ValueError: for any other topology, or a delta out of its range.

  Source:
    Koloskova, Stich, Jaggi, ICML 2019, arXiv:1902.00340, theorem 2.

  Example:
    >>> from asgd.gossip import rules, topologies
    >>> f"{rules.proved_gamma(topologies.full(8), 1.0):.4f}"  # 1 / 15
    '0.0667'
  """
  check_constant("proved_gamma", topology, symmetric=True)
  if not 0 < delta <= 1:
    raise ValueError(f"delta must be in (0, 1], not {checks.shown(delta)}")
  rho = 1 - second_eigenvalue(topology)
  beta_square = (1 - smallest_eigenvalue(topology)) ** 2
  other_terms = 4 * beta_square + 2 * rho * beta_square - 8 * rho * delta
  return rho**2 * delta / (16 * rho + rho**2 + other_terms)


class Pending(NamedTuple):
  """State of an algorithm that leaves its updates to `share`."""

  inner: optax.OptState
  update: optax.Updates  # like parameters, not yet put


def _store_updates(algorithm: base.Algorithm) -> base.Algorithm:
  """Makes an algorithm store its updates, for `share` to put them."""

  def init(params):
    zeros = optax.tree.zeros_like(params)
    return Pending(algorithm.init(params), zeros)

  def update(message, state, params=None, **extra):
    updates, inner = algorithm.update(message, state.inner, params, **extra)
    # The server applies zeros; the update is applied when the peer mixes.
    zeros = optax.tree.zeros_like(updates)
    return zeros, Pending(inner, optax.tree.add(state.update, updates))

  return base.Algorithm(init, update)


class Share(NamedTuple):
  """State of `share`."""

  codec: Any  # state of the codec, with its residual
  total: optax.Updates  # the peer's own part of the next mix, as it was put


def share(codec: Any) -> Rule:
  """Every peer applies every message: Strom's threshold sharing, as in DL4J.

      q_i = codec(u_i);   x_i <- x_i + sum_j W_ij q_j,   j = i included

  u_i is the update that the peer's optimizer computed from its gradient. All
  peers start from the same parameters and receive the same messages, so their
  parameters stay equal except for rounding. W_ij = 1 / n is the mean: with the
  identity codec and no momentum this is all-reduce SGD. W_ij = 1 adds the
  messages: a peer may then mix each of them separately, in any order.

  Args:
    codec: a codec of `asgd.compression`; a biased one, such as a threshold,
      with its error feedback.

  Source:
    Strom, "Scalable distributed DNN training using commodity GPU cloud
    computing", Interspeech 2015, which encodes gradients; DL4J encodes updates,
    as here.
  """

  def init(params, slots):
    del slots
    zeros = optax.tree.zeros_like(params)
    return Share(codec.init(params), zeros)

  def put(state, keep, key):
    pending = state.server.opt_state
    share = state.rule_state
    code, codec_state = codec.encode(share.codec, pending.update, key)
    # The peer applies its own code, not its exact update, as all others do.
    total = add_weighted(share.total, [codec.decode(code)], jnp.stack([keep]))
    zeros = optax.tree.zeros_like(pending.update)
    server = state.server._replace(opt_state=pending._replace(update=zeros))
    share = Share(codec_state, total)
    return state._replace(server=server, rule_state=share), code

  def mix(state, codes, weights, slots):
    del slots
    updates = [codec.decode(code) for code in codes]
    total = add_weighted(state.rule_state.total, updates, weights)
    params = optax.tree.add(state.server.params, total)
    zeros = optax.tree.zeros_like(total)
    return with_params(state, params)._replace(
      rule_state=state.rule_state._replace(total=zeros)
    )

  def residual(state):
    return compression.residual_norm(state.rule_state.codec)

  return Rule(init, put, mix, wrap=_store_updates, residual=residual)
