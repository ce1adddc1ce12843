"""A worker with room for a part of the model sends the same message, and holds
as many bytes as are counted by hand."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from flax import linen as nn

import asgd
from asgd import compression, device_memory, models, problems, simulator
from asgd import layer_worker as lib
from asgd.device_memory import DeviceMemory, DeviceTraffic


class Noisy(nn.Module):
  """A dense layer with BatchNorm and dropout."""

  @nn.compact
  def __call__(self, x, *, train: bool):
    x = nn.BatchNorm(not train, momentum=0.0)(nn.Dense(5)(x))
    return nn.Dropout(0.3, deterministic=not train)(nn.relu(x))


class Linear(nn.Module):
  """float[B, C] -> float[B, 2], without a bias."""

  @nn.compact
  def __call__(self, x, *, train: bool):
    return nn.Dense(2, use_bias=False)(x)


class Shift(nn.Module):
  """float[B, C] + float[C]: its backward needs no residuals."""

  @nn.compact
  def __call__(self, x, *, train: bool):
    return x + self.param("b", nn.initializers.ones, x.shape[-1:])


def pieces_of(layers):
  """The model's mean cross-entropy; a batch is (examples, labels)."""
  return problems.Pieces(
    layers, lambda batch, key, dtype: batch[0], lambda y, batch:
    problems.problem.cross_entropy(y, batch[1]).mean()
  )


MODELS = {
  "an MLP, whose first layer has no weights": lambda: (
    models.mlp(3, hidden=(6, 5)), kit.normal(4, 2, 2, 1)
  ),
  "BatchNorm, dropout, a last layer without weights": lambda: (
    (Noisy(), Noisy(), Linear(), models.Flatten()), kit.normal(4, 3)
  ),
  "a layer without residuals": lambda: (
    (Linear(), Shift(), Linear(), Linear()), kit.normal(4, 3)
  ),
  "GPT, dropout": lambda: (
    models.build(
      "gpt", 5, depth=1, width=8, heads=2, context=6, dropout=0.3
    ),
    np.arange(18, dtype=np.int32).reshape(3, 6) % 5,
  ),
}


def messages(name, *rooms):
  """Yields the results of work of a plain worker, and of workers with so many
  times the least room."""
  layers, x = MODELS[name]()
  labels = np.zeros(x.shape[: 2 if x.dtype == np.int32 else 1], np.int32)
  pieces, batch = pieces_of(layers), (x, labels)
  params = kit.parameters(layers, x)
  least = lib.plan_job(pieces, params, batch).least
  workers = [asgd.gradient_worker(problems.whole_loss(pieces))]
  workers += [lib.layer_worker(pieces, int(room * least)) for room in rooms]
  for worker in workers:
    ticket = asgd.Ticket(jnp.int32(1), jnp.int32(0), params)
    work = simulator.compile_work(worker)
    yield work(
      worker.init(params), ticket, batch, jax.random.key(3), np.int32(7)
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_message_is_that_of_a_plain_worker(name, float64):
  plain, *parts = messages(name, 1, 1.4, 100)
  for part in parts:
    assert jax.tree.structure(part) == jax.tree.structure(plain)
    kit.close(part, plain)


def test_the_message_in_float32():
  plain, part = messages("GPT, dropout", 1)
  kit.close(part, plain, atol=1e-6)


# Weights of 3 x 2 (24 bytes) and 2 x 2 (16), a batch of 4 x 3 (48). The
# residuals of a layer are its input. The loss is the sum of the outputs.
SUM = problems.Pieces(
  (Linear(), Linear()),
  lambda batch, key, dtype: batch,
  lambda y, batch: y.sum(),
)
BATCH = np.arange(12, dtype=np.float32).reshape(4, 3)


@functools.cache
def linear_params():
  """Parameters of SUM in the host's memory."""
  params = kit.parameters(SUM.layers, BATCH)
  return jax.tree.map(lambda x: np.asarray(x, np.float32), params)


@pytest.mark.parametrize(
  ("room", "traffic"),
  [
    # All stays. Read once: both weights, the batch, and the loss's gradient of
    # 1 (4 bytes), 92 in all; sent: gradients (40) and the loss (4). The second
    # forward is the largest: 24 + 48 of the first layer, 48 of the batch, 16 +
    # 32 + 32 of the second layer, the loss, and the prefetched 4. Blocks read:
    # 72 + 96 by the forwards, 52 + 104 by the backwards.
    (1000, DeviceTraffic(92, 44, 324, 208)),
    # The first forward alone: 24 + 48, and it makes 48 + 32. The second evicts
    # the first weights, which are read again, and the 48 bytes of residuals,
    # which are written and read again.
    (152, DeviceTraffic(92 + 24 + 48, 44 + 48, 324, 152)),
  ],
)
def test_bytes_by_hand(room, traffic, monkeypatch):
  assert lib.plan_job(SUM, linear_params(), BATCH).least == 152
  live, memories, keep = [], [], DeviceMemory.keep

  def held():
    """Bytes of all arrays of JAX outside of the host's memory."""
    return sum(
      x.nbytes
      for x in jax.live_arrays()
      if x.sharding.memory_kind != device_memory.HOST
    )

  def measured_keep(self, block, tree):
    live.append(held())  # when an instruction has made all of its blocks
    memories.append(self)
    keep(self, block, tree)

  monkeypatch.setattr(DeviceMemory, "keep", measured_keep)
  worker = lib.layer_worker(SUM, room)
  ticket = asgd.Ticket(np.int32(0), np.int32(0), linear_params())
  key = jax.block_until_ready(jax.random.key(0))
  before = held()
  _, message, _ = worker.work(worker.init(None), ticket, BATCH, key)
  assert memories[-1].traffic == traffic
  assert lib.plan_job(SUM, linear_params(), BATCH).traffic(room) == traffic
  # JAX may give an input back as the residual: an array less than is counted.
  assert traffic.peak - 48 <= max(live) - before <= traffic.peak <= room
  plain = jax.grad(lambda w: (BATCH @ w[0] @ w[1]).sum())(
    [layer["Dense_0"]["kernel"] for layer in linear_params()]
  )
  kit.close([layer["Dense_0"]["kernel"] for layer in message], plain, atol=1e-4)


def test_a_codec_leaves_the_job_in_several_programs():
  worker, codec = lib.layer_worker(SUM, 152), compression.identity()
  ticket = asgd.Ticket(np.int32(0), np.int32(0), linear_params())
  results = []
  for each in (worker, compression.compressed(worker, codec)):
    work = simulator.compile_work(each)
    state = each.init(linear_params())
    results.append(work(state, ticket, BATCH, jax.random.key(3), np.int32(7)))
  (_, message, _), (_, coded, _) = results
  kit.same(compression.decode(codec, coded), message)


def test_a_room_below_the_least_is_refused():
  worker = lib.layer_worker(SUM, 151)
  ticket = asgd.Ticket(np.int32(0), np.int32(0), linear_params())
  with pytest.raises(ValueError, match=r"give at least 0.000152 MB"):
    worker.work(worker.init(None), ticket, BATCH, jax.random.key(0))
  with pytest.raises(ValueError, match="room"):
    lib.layer_worker(SUM, 0)
