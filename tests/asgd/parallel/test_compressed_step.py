"""Devices in step that send less than their gradients."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import compression
from asgd.parallel import data_parallel, meshes, precision
from asgd.worker import Aux

KEY = jax.random.key(0)
DEVICES, RATE = 4, 0.5
WEIGHTS = {"w": np.float32(kit.normal(6, 5)), "b": np.zeros(5, np.float32)}


def loss(weights, batch, key):
  """Its gradient is the mean of examples, whatever the weights are."""
  del key
  total = (weights["w"] * batch["w"]).sum() + (weights["b"] * batch["b"]).sum()
  return total / len(batch["w"]), Aux(())


def batch(step=0):
  """Two examples for each of 4 devices."""
  return {
    "w": np.float32(kit.normal(8, 6, 5, seed=step)),
    "b": np.float32(kit.normal(8, 5, seed=step + 50)),
  }


def make(reducer, **options):
  mesh = meshes.make({"data": DEVICES}, jax.devices()[:DEVICES])
  return data_parallel.make_step(
    loss, optax.sgd(RATE), mesh, reducer=reducer, **options
  )


def train(made, batches):
  state = made.init(WEIGHTS)
  for each in batches:
    state, metrics = made.step(state, made.place(each), KEY)
  return state, metrics


def test_to_send_everything_is_to_send_what_was_sent_before():
  batches = [batch(i) for i in range(2)]
  plain, metrics = train(make(None, accumulate=2), batches)
  reducer = compression.average(compression.identity())
  same, told = train(make(reducer, accumulate=2), batches)
  kit.close(same.params, plain.params, rtol=1e-6, atol=1e-6)
  kit.close(told, metrics, rtol=1e-6, atol=1e-6)
  assert plain.reducer == same.reducer == ()


def test_each_device_keeps_what_it_did_not_send():
  reducer = compression.named_reducer("threshold", tau=0.5)
  state, _ = train(make(reducer), [batch(0), batch(1)])
  residual = {k: np.stack([0 * v] * DEVICES) for k, v in WEIGHTS.items()}
  weights = WEIGHTS
  for step in range(2):
    grads = {
      k: v.reshape(DEVICES, 2, *v.shape[1:]).mean(1)
      for k, v in batch(step).items()
    }
    total = jax.tree.map(np.add, residual, grads)
    sent = jax.tree.map(
      lambda x: 0.5 * np.sign(x) * (np.abs(x) > 0.5), total
    )
    residual = jax.tree.map(np.subtract, total, sent)
    weights = jax.tree.map(
      lambda w, s: w - RATE * s.mean(0), weights, sent
    )
  kit.close(state.reducer.residual, to_jax(residual), atol=1e-6)
  kit.close(state.params, to_jax(weights), atol=1e-6)
  assert state.reducer.residual["w"].sharding.spec[0] == "data"


def to_jax(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def test_a_gradient_that_is_not_finite_is_not_sent():
  """It is told, and what devices keep stays."""
  made = make(
    compression.named_reducer("top_k", density=0.2),
    loss_scale=precision.Dynamic(initial=8.0),
  )
  state, _ = train(made, [batch(0)])
  before = jax.device_get(state)
  broken = batch(1)
  broken["w"][-1] = np.inf  # of the last device
  state, metrics = made.step(state, made.place(broken), KEY)
  assert not metrics.finite
  kit.same(state.reducer, jax.tree.map(jnp.asarray, before.reducer))
  kit.same(state.params, jax.tree.map(jnp.asarray, before.params))
  assert float(state.scale.scale) == 4.0


def test_devices_draw_numbers_of_their_own():
  """Equal gradients, of which each sends other elements."""
  one = batch(0)
  same = {k: np.concatenate([v[:2]] * DEVICES) for k, v in one.items()}
  reducer = compression.named_reducer("random_k", density=0.1, scaled=False)
  state, _ = train(make(reducer), [same])
  kept = np.asarray(state.reducer.residual["w"]).reshape(DEVICES, -1)
  assert len({tuple(np.flatnonzero(row == 0)) for row in kept}) > 1


@pytest.mark.parametrize("options", [{"zero": 1}, {"form": "pmap"}])
def test_what_divides_a_gradient_takes_no_reducer(options):
  reducer = compression.named_reducer("int8")
  with pytest.raises(ValueError, match="gradients need (zero|form)="):
    make(reducer, **options)
