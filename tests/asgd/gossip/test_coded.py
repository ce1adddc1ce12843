"""Codecs of the messages of peers: by hand, without an error, and live."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

import asgd
from asgd import compression, gossip
from asgd.gossip import rules

RECIPES = {
  "d_psgd": {},
  "d2": {},
  "gradient_tracking": {},
  "ad_psgd": {},
  "sgp": {"overlap": 1},
  "local_d_psgd": {"steps": 2},
}


def coarse(step=4.0):
  """A codec that rounds down to multiples of `step`."""
  return compression.identity()._replace(
    encode=lambda state, tree, key: (
      jax.tree.map(lambda x: step * jnp.floor(x / step), tree),
      state,
    )
  )


@pytest.mark.parametrize("rule", [rules.average, rules.push_sum])
def test_two_peers_keep_their_mean(rule):
  """5 and 9 are sent as 4 and 8. Averages move both by half of 4. With push-sum
  a peer keeps half of its mass, and at it the rest: 6 and 10, which meet 8 and
  4."""
  server = asgd.asgd(1.0, workers=2).server()
  peer = gossip.make_peer(server, rule().coded(coarse()), slots=1)
  states, codes = [], []
  for value in (5.0, 9.0):
    state = peer.init(jnp.float32(value))
    state, code = peer.put(state, jnp.float32(0.5), jax.random.key(0))
    states.append(state)
    codes.append(code)
  weights, slots = jnp.array([0.5]), jnp.array([0])
  for state, code in zip(states, codes[::-1], strict=True):
    state = peer.mix(state, (code,), weights, slots)
    assert state.server.params == 7
    assert peer.weight(state) == 1


def test_push_sum_keeps_bfloat16_parameters():
  """Shares of 1/3 and 2/3, rounded to bfloat16, sum to more than 1."""
  peer = gossip.make_peer(
    asgd.asgd(1.0, workers=2).server(), rules.push_sum(), slots=1
  )
  weights, slots, key = jnp.array([2 / 3]), jnp.array([0]), jax.random.key(0)
  states = [peer.init({"a": jnp.bfloat16(1.0), "b": jnp.float32(1.0)})] * 2
  for _ in range(30):
    states, codes = zip(
      *(peer.put(x, jnp.float32(1 / 3), key) for x in states), strict=True
    )
    states = [
      peer.mix(x, (code,), weights, slots)
      for x, code in zip(states, codes[::-1], strict=True)
    ]
  for state in states:
    kit.close(peer.weight(state), 1.0, rtol=1e-5)
    assert state.server.params["a"] == jnp.bfloat16(1.0)
    kit.close(state.server.params["b"], 1.0, rtol=1e-5)


def test_a_tracker_keeps_the_sum_of_bfloat16_gradients():
  """Without neighbours a peer's tracker is its last gradient."""
  tx = asgd.as_algorithm(optax.sgd(0.1, momentum=0.9))
  tx = gossip.track().wrap(tx)
  gradients = jnp.asarray(kit.normal(500, 8), jnp.bfloat16)

  def step(state, g):
    updates, state = tx.update(g, state, g)
    return state, updates.astype(jnp.bfloat16)

  state, _ = jax.lax.scan(step, tx.init(gradients[0]), gradients)
  kit.close(state.tracker, gradients[-1].astype(jnp.float32), atol=1e-4)


def losses(params, batch):
  return 0.5 * jnp.sum((params - batch.mean(0)) ** 2)


def train(name, **options):
  recipe = getattr(asgd, name)(0.1, workers=4, **RECIPES[name])
  data = kit.normal(64, 3).astype(np.float32)
  return asgd.simulate(
    *(losses, np.zeros(3, np.float32), data, recipe),
    **{"messages": 24, "batch_size": 2, **options},
  )


@pytest.mark.parametrize("name", RECIPES)
def test_a_codec_without_an_error_changes_nothing(name):
  plain = train(name)
  exact = train(name, compress="identity")
  kit.close(exact.params, plain.params, rtol=1e-5, atol=1e-6)
  if name in ("d_psgd", "sgp"):  # one recipe of each rule
    # A fine codec changes the peers a little, and their mean hardly.
    fine = train(name, compress={"name": "qsgd", "levels": 127})
    assert np.abs(fine.params - plain.params).max() < 0.1
    assert np.abs(fine.records.loss - plain.records.loss).max() > 1e-5


@pytest.mark.parametrize("name", ["d_psgd", "ad_psgd"])
def test_live_peers_pack_their_messages_and_are_replayed(name, tmp_path):
  run, sent = {"a": {"recipe": name}}, []
  for compress in (None, {"name": "qsgd", "levels": 7}):
    place, result, _ = kit.train_live(
      tmp_path / str(len(sent)), runs=run, compress=compress, epochs=0.5
    )
    sent.append(result["taken_bytes"] / result["link_messages"])
    assert asgd.replay(place).same
  assert sent[1] < sent[0] / 4  # 4 bits instead of 32
