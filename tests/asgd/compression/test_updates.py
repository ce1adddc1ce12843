"""Updates as codes: what workers could rebuild parameters of."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

import asgd
from asgd import compression

CODEC = compression.named("threshold", tau=0.5)


def test_parameters_change_by_decoded_updates_alone():
  recipe = asgd.asgd(1.0, workers=1, momentum=0.9)
  algorithm = compression.compressed_updates(recipe.algorithm, CODEC)
  server = asgd.make_server(algorithm)
  w = {"w": jnp.zeros(3)}
  state = server.init(w)
  rebuilt = w
  for message in ([0.3, 1.0, -4.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0]):
    ticket = server.send(state, jnp.int32(0))
    state, _ = server.receive(state, ticket, {"w": jnp.array(message)})
    code = compression.last_update(state.opt_state).code
    rebuilt = jax.tree.map(jnp.add, rebuilt, CODEC.decode(code))
    kit.same(rebuilt, state.params)
  assert set(np.abs(np.asarray(state.params["w"]))) <= {0.0, 0.5, 1.0, 1.5}


def test_without_a_codec_there_is_no_code():
  state = asgd.asgd(1.0, workers=1).server().init(jnp.float32(1.0))
  assert compression.last_update(state.opt_state) is None


def test_an_update_that_is_not_finite_goes_through():
  algorithm = asgd.as_algorithm(optax.sgd(1.0))
  algorithm = compression.compressed_updates(algorithm, CODEC)
  w = jnp.zeros(2)
  state = algorithm.init(w)
  updates, after = algorithm.update(jnp.array([jnp.nan, 1.0]), state, w)
  np.testing.assert_array_equal(updates, [np.nan, -1.0])
  kit.same(after.codec, state.codec)




def test_what_looks_ahead_is_refused():
  recipe = asgd.dana_zero(0.1, workers=2)
  with pytest.raises(ValueError, match="looks ahead sends parameters that"):
    compression.compressed_updates(recipe.algorithm, CODEC)
