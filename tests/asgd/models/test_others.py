"""Models of Equinox and Haiku train as those of Flax, and as plain optax."""

import functools
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from linear import criterion

import asgd
from asgd import facade
from asgd.experiment.engines.mesh import MESH
from asgd.problems import own

pytestmark = pytest.mark.usefixtures("blank_pictures")

X = np.float32(kit.normal(48, 3))
DATA = X, np.sin(X.sum(1))
EVERY = {"batch_size": 8, "progress": False}


@functools.cache
def dana(workers=4):
  return asgd.dana_zero(0.05, workers=workers)


def simulate(loss, params, **options):
  options = {"messages": 16, **EVERY, **options}
  return asgd.simulate(loss, params, DATA, dana(), **options)


# One network in three packages, with the same initial values.


def net_of_equinox():
  return eqx.nn.MLP(3, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


class NetOfFlax(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = jnp.tanh(nn.Dense(8)(x))
    return nn.Dense(1)(x)


def net_of_haiku(x):
  return hk.nets.MLP([8, 1], activation=jnp.tanh)(x)


def loss_of_equinox(model, batch):
  return criterion(jax.vmap(model)(batch[0]), batch)


def weights(model):
  """The kernel and bias of both layers of an Equinox model."""
  return [(layer.weight.T, layer.bias) for layer in model.layers]


def in_flax(pairs):
  layers = [{"kernel": w, "bias": b} for w, b in pairs]
  return {"params": {f"Dense_{i}": layer for i, layer in enumerate(layers)}}


def in_haiku(pairs):
  layers = [{"w": w, "b": b} for w, b in pairs]
  return {f"mlp/~/linear_{i}": layer for i, layer in enumerate(layers)}


def test_a_net_trains_alike_in_equinox_haiku_and_flax():
  model = net_of_equinox()
  trained = simulate(loss_of_equinox, model).params
  assert trained.activation is model.activation
  of_flax = simulate((NetOfFlax(), criterion), in_flax(weights(model)))
  kit.close(of_flax.params, in_flax(weights(trained)), rtol=1e-6, atol=1e-7)
  for transformed in (
    hk.transform(net_of_haiku),
    hk.without_apply_rng(hk.transform(net_of_haiku)),
    hk.transform_with_state(net_of_haiku),
    tuple(hk.transform(net_of_haiku)),
  ):
    of_haiku = simulate((transformed, criterion), in_haiku(weights(model)))
    params = of_haiku.params
    params = params[0] if isinstance(params, tuple) else params
    kit.close(params, in_haiku(weights(trained)), rtol=1e-6, atol=1e-7)


def test_one_worker_with_a_model_of_equinox_is_a_loop_of_optax():
  model, tx = net_of_equinox(), optax.adam(0.01)
  batches = [(X[i : i + 8], DATA[1][i : i + 8]) for i in range(0, 48, 8)]
  found = asgd.simulate(
    *(loss_of_equinox, model, batches, tx),
    workers=1,
    messages=12,
    progress=False,
  )
  state = tx.init(eqx.filter(model, eqx.is_inexact_array))
  for job in range(12):
    gradient = eqx.filter_grad(loss_of_equinox)(model, batches[job % 6])
    update, state = tx.update(gradient, state)
    model = eqx.apply_updates(model, update)
  kit.close(weights(found.params), weights(model), rtol=1e-6, atol=1e-7)


class Scaled(eqx.Module):
  """A model with constants: an array of integers, a number and a function."""

  line: eqx.nn.Linear
  order: jax.Array
  rate: float
  last: object

  def __call__(self, x):
    return self.last(self.rate * self.line(x[self.order]))


def scaled(key=None, rate=2.0, last=jnp.tanh, order=(2, 0, 1)):
  key = jax.random.key(1) if key is None else key
  line = eqx.nn.Linear(3, 1, key=key)
  return Scaled(line, np.asarray(order), rate, last)


def test_constants_of_a_model_stay_and_are_recorded(tmp_path):
  made = simulate(loss_of_equinox, scaled, folder=tmp_path)
  assert made.params.rate == 2.0 and made.params.last is jnp.tanh
  np.testing.assert_array_equal(made.params.order, (2, 0, 1))
  # A function of a key, and a result that is read.
  read = simulate(loss_of_equinox, scaled, folder=tmp_path)
  kit.same(read.params.line.weight, made.params.line.weight)
  for change in ({"rate": 3.0}, {"last": jnp.sin}, {"order": (0, 1, 2)}):
    other = functools.partial(scaled, **change)
    given = scaled(jax.random.key(1))
    changed = other(jax.random.key(1))
    simulate(loss_of_equinox, given, folder=tmp_path / str(change))
    with pytest.raises(ValueError, match="choose another folder"):
      simulate(loss_of_equinox, changed, folder=tmp_path / str(change))


class Jitter(eqx.Module):
  line: eqx.nn.Linear
  seed: jax.Array

  def __call__(self, x):
    return self.line(x)


test_a_model_that_cannot_be_trained_is_one_line = kit.refuses(
  [
    (
      lambda key: Jitter(eqx.nn.Linear(3, 1, key=key), key),
      "made from the key",
    ),
    (Jitter(None, jnp.arange(3)), "without an array of floats"),
  ],
  lambda params: simulate(loss_of_equinox, params),
)


@pytest.mark.slow
def test_a_model_of_equinox_trains_live_and_is_replayed(tmp_path):
  given = loss_of_equinox, net_of_equinox(), DATA, dana(2)
  live = asgd.train_live(*given, messages=16, folder=tmp_path, **EVERY)
  again = asgd.replay(tmp_path, *given)
  assert again.same
  kit.same(weights(again.params), weights(live.params))


def test_a_model_of_equinox_trains_on_a_mesh_as_in_a_simulation():
  given = loss_of_equinox, net_of_equinox(), DATA, asgd.asgd(0.05, workers=1)
  options = facade.RunOptions(messages=12, workers=1, progress=False)
  mesh = facade.train(
    own.Objects(*given, batch_size=8),
    ("mesh", MESH),
    {"mesh": {"axes": {"data": 2}}},
    options,
    quantum=(1, "updates"),
  )
  simulated = asgd.simulate(*given, messages=12, **EVERY)
  pair = weights(mesh.params), weights(simulated.params)
  kit.close(*pair, rtol=1e-5, atol=1e-6)


# Haiku: rng and state.


def with_state(x, is_training):
  x = hk.Linear(8)(x)
  x = hk.BatchNorm(True, True, 0.9)(x, is_training)
  return hk.Linear(1)(jnp.tanh(x))


def test_a_state_of_haiku_is_that_of_a_plain_loop():
  net = hk.transform_with_state(with_state)
  params, state = net.init(jax.random.key(0), X[:1], True)
  batches = [(X[i : i + 8], DATA[1][i : i + 8]) for i in range(0, 48, 8)]

  def evaluate(variables):
    output, _ = net.apply(*variables, None, X, is_training=False)
    return float(criterion(output, DATA))

  found = asgd.simulate(
    *((net, criterion), (params, state), batches),
    asgd.asgd(0.05, workers=1),
    messages=12,
    progress=False,
    evaluate=evaluate,
  )

  def value(params, state, batch):
    output, state = net.apply(params, state, None, batch[0], True)
    return criterion(output, batch), state

  for job in range(12):
    gradient, state = jax.grad(value, has_aux=True)(
      params, state, batches[job % 6]
    )
    params = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)
  kit.close(found.params, (params, state), rtol=1e-5, atol=1e-6)
  counter = found.params[1]["batch_norm/~/mean_ema"]["counter"]
  assert (counter, counter.dtype) == (12, np.int32)
  expected = evaluate((params, state))
  assert found.evaluations[-1]["value"] == pytest.approx(expected, rel=1e-4)


def test_dropout_of_haiku_draws_from_the_key_of_the_job():
  def dropped(x, is_training):
    if is_training:
      x = hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.Linear(1)(x)

  net = hk.transform(dropped)
  params = net.init(jax.random.key(0), X[:1], False)

  def loss(params, batch, key):
    _, of_model = jax.random.split(key)  # as `problems.whole_loss`
    output = net.apply(params, of_model, batch[0], is_training=True)
    return criterion(output, batch)

  found = simulate((net, criterion), params).params
  kit.close(found, simulate(loss, params).params, rtol=1e-6)
  still = lambda params, batch: criterion(  # noqa: E731
    net.apply(params, None, batch[0], is_training=False), batch
  )
  assert not np.allclose(found["linear"]["w"], simulate(
    still, params
  ).params["linear"]["w"])


NET = hk.transform_with_state(with_state)
MISTAKES = {
  "state left out": (
    NET,
    lambda key: NET.init(key, X[:1], True)[0],
    r"give params=\(params, state\)",
  ),
  "no state of init": (
    (lambda key: {"w": jnp.ones(3)}, lambda params, state, x: (x, state)),
    None,
    r"init must return \(params, state\)",
  ),
  "no state of apply": (
    (NET.init, lambda params, state, rng, x: x),
    None,
    r"must return \(output, state\)",
  ),
  "one argument": (
    (NET.init, lambda params: params),
    None,
    "apply takes 1 arguments, but needs 2",
  ),
  "rng alone": (
    (NET.init, lambda params, rng: params),
    None,
    "apply takes 2 arguments, but needs 3",
  ),
  "an unknown one": (
    (NET.init, lambda params, rng, x, mask: x),
    None,
    "apply needs an argument 'mask'",
  ),
  "init of three": (
    (lambda key, x, y: {}, lambda params, x: x),
    None,
    re.escape("init takes (key, x, y); write init(key) or init(key, x)"),
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_functions_of_other_forms_are_one_line(name):
  model, params, words = MISTAKES[name]
  with pytest.raises(ValueError, match=words) as caught:
    simulate((model, criterion), params)
  assert "\n" not in str(caught.value)
