"""Workers whose messages are codes: codecs with each kind of worker."""

import coding
import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

import asgd
from asgd import base, compression, orders, sharding, simulator, stacking
from asgd.compression import packing
from asgd.worker import gradient_worker

W = jnp.float32(8.0)
TICKET = asgd.Ticket(jnp.int32(0), jnp.int32(0), W)
# Codecs that differ in kind: sparse, with errors of its own, drawn, of low
# rank, of fewer bits.
FIVE = "top_k", "dgc", "qsgd", "powersgd", "bf16"
# Of a worker: its recipe, its steps, and the codecs of its leaves.
KINDS = {
  "gradients": (asgd.asgd(0.5, workers=2), 1, coding.PARAMS),
  "local steps": (asgd.model_averaging(0.5, workers=2, steps=2), 2, FIVE),
  "elastic": (asgd.easgd(0.5, workers=2, steps=2), 2, FIVE),
}


def simulate(server, worker, params, messages, steps=1, workers=2):
  trace = orders.build("asynchronous",
    durations=orders.durations.build("homogeneous"),
    workers=workers, messages=messages)
  host = simulator.make_host(server, worker, keeps_messages=True)
  batch = stacking.job_batches(coding.batch, steps)
  return simulator.run_whole(
    host, params, workers, trace, batch=batch, root=coding.ROOT
  )


@pytest.mark.parametrize("kind", KINDS)
def test_codecs_train_with_every_kind_of_worker(kind):
  recipe, steps, names = KINDS[kind]
  params = {name: coding.PARAMS[name] for name in names}
  codec, worker = coding.every_codec(), recipe.make_worker(coding.loss)
  server = compression.decoding(recipe.server(), codec)
  worker = compression.compressed(worker, codec)
  _, records = simulate(server, worker, params, 40, steps)
  assert records.loss[-1] < 0.8 * records.loss[0]
  least = packing.layout(compression.shapes(codec, params)).most
  assert (records.bytes_up <= least).all() and (records.bytes_up > 100).all()
  assert (records.residual_norm[2:] > 0).all()


def test_the_identity_is_the_dense_run_to_the_bit():
  recipe, codec = asgd.dana_slim(0.5, workers=2), compression.identity()
  params = {"w": np.ones((4, 6), np.float32)}
  worker = recipe.make_worker(coding.loss)
  dense, expected = simulate(recipe.server(), worker, params, 12)
  server = compression.decoding(recipe.server(), codec)
  worker = compression.compressed(worker, codec)
  coded, records = simulate(server, worker, params, 12)
  kit.same(coded.server, dense.server)
  for name in set(base.Records._fields) - {"bytes_up"}:
    # Means in the records may be added up in another order.
    np.testing.assert_allclose(
      *(getattr(records, name), getattr(expected, name)), rtol=1e-6
    )
  # A header and the norm of the residual, and no gaps between leaves.
  assert set(expected.bytes_up) == {128}
  assert set(records.bytes_up) == {4 * 24 + 24 + 4}


def test_what_is_sent_and_kept_is_what_was_computed():
  codec = compression.named("threshold", tau=2.0)
  worker = compression.compressed(
    gradient_worker(lambda w, x: 0.5 * (w - x) ** 2), codec
  )
  state = worker.init(W)
  _, message, metrics = worker.work(state, TICKET, W - 3, coding.ROOT)
  assert compression.decode(codec, message) == 2
  assert message.residual == 1  # 3 - 2
  assert metrics.loss == 4.5


@pytest.mark.parametrize("x", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_is_not_encoded(x):
  codec = compression.named("fp16", error_feedback=True)
  worker = compression.compressed(gradient_worker(lambda w, x: w * x), codec)
  state, *_ = worker.work(worker.init(W), TICKET, 1.0 + 2**-12, coding.ROOT)
  assert compression.residual_norm(state.codecs) == 2**-12
  after, message, metrics = worker.work(
    state, TICKET, jnp.float32(x), coding.ROOT
  )
  if np.isnan(metrics.loss):
    kit.same(after.codecs, state.codecs)
  else:  # the codec saturates
    assert np.isfinite(message.residual)


def test_each_shard_has_a_code_of_its_own():
  params = base.Variables(
    {"a": np.zeros((4, 3), np.float32), "b": np.zeros(2, np.float32)},
    {"mean": np.zeros(2, np.float32)},
  )
  plan = sharding.make_plan(params, 2)
  codec = compression.named("top_k", density=0.5)

  def loss(p, x, key):
    del key
    value = (p.weights["a"] * x).sum() + p.weights["b"].sum()
    return value, asgd.worker.Aux({"mean": p.stats["mean"] + 1})

  worker = compression.compressed(gradient_worker(loss), codec, plan)
  ticket = TICKET._replace(params=params)
  x = np.arange(12, dtype=np.float32).reshape(4, 3)
  work = jax.jit(worker.work)
  _, message, _ = work(worker.init(params), ticket, x, coding.ROOT)
  parts = compression.split(plan, message)
  assert len(parts) == 2
  decoded = [
    jax.device_get(compression.decode(codec, part)) for part in parts
  ]
  whole = sharding.join(plan, decoded)
  np.testing.assert_array_equal(whole.stats["mean"], [1, 1])
  for part, mine in zip(sharding.split(plan, params), parts, strict=True):
    like = compression.shapes(codec, part)
    kit.same(
      jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like),
      jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), mine),
    )
    layout = compression.layout(codec, part)
    message = jax.tree.map(np.asarray, mine)
    kit.same(packing.unpack(layout, packing.pack(layout, message)), message)


def test_norms_of_residuals_are_of_all_that_is_kept():
  state = {
    "a": compression.codec.Residual(jnp.array([3.0]), jnp.ones(9)),
    "b": (compression.codec.Residual(jnp.array([4.0]), ()), 7),
  }
  assert compression.residual_norm(state) == np.float32(12.5**0.5)
  assert compression.residual_norm(()) == 0
