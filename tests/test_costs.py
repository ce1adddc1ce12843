"""Costs and memory by formula agree with what is drawn, counted and published.

That collectives move what their formulas say is in test_collectives.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asgd import durations, models, transformer
from asgd.parallel import costs, memory


def test_collectives_by_their_formulas():
  size, n = 9600, 8
  assert costs.ring(size, n) == (14, 2 * 7 / 8 * size, 2 * 7 / 8 * size)
  assert costs.ring_reduce_scatter(size, n) == (7, 7 / 8 * size, 7 / 8 * size)
  assert costs.bidirectional_ring(size, n).bytes == 7 / 8 * size
  assert costs.recursive_doubling(size, n) == (3, 3 * size, 3 * size)
  assert costs.halving_doubling(size, n) == (6, 1.75 * size, 1.75 * size)
  assert costs.tree(size, n) == (6, 6 * size, 3 * size)
  # Six devices are four, and two that lend their part.
  assert costs.recursive_doubling(size, 6) == (4, 4 * size, 3 * size)
  near, far = costs.hierarchical(size, 4, 2)
  assert near.bytes == 2 * 3 / 4 * size
  assert far.bytes == 2 * 1 / 2 * size / 4
  for name, cost in costs.COSTS.items():
    assert cost(size, 1) == costs.FREE, name
  # Chunks hold whole elements: 10 of 4 bytes in 4 chunks of 3.
  assert costs.ring(40, 4, grain=4).bytes == 6 * 12


def test_a_parameter_server_beside_its_workers_and_elsewhere():
  size, n = 9600, 8
  # With a shard on each worker it is a ring's traffic.
  assert costs.parameter_server(size, n) == costs.ring(size, n)
  one = costs.parameter_server(size, n, shards=1)
  assert one == (14, 14 * size, 7 * size)
  apart = costs.parameter_server(size, n, shards=2, colocated=False)
  assert apart.bytes == 2 * n * size / 2  # the server's link
  many = costs.parameter_server(size, n, shards=16, colocated=False)
  assert many.bytes == 2 * size  # a worker's


def test_seconds_are_latency_and_bytes():
  link = costs.link(100.0, 0.5)
  assert costs.seconds(costs.Cost(3, 400, 0), link) == 3 * 0.5 + 4
  small, large = 8, 8 << 20
  link = costs.link(1e9, 1e-5)

  def fastest(size):
    return min(
      ("ring", "recursive_doubling"),
      key=lambda name: costs.seconds(costs.COSTS[name](size, 64), link),
    )

  assert fastest(small) == "recursive_doubling"
  assert fastest(large) == "ring"
  far = costs.link(1e8, 1e-5)
  flat = costs.seconds(costs.ring(large, 64), far)
  assert costs.hierarchical_seconds(large, 8, 8, link, far) < flat / 4


def test_poseidons_table_and_rule():
  # Per-worker batch of 32 rows, a layer of 4096 x 4096 (the paper's example).
  table = costs.poseidon(32, 4096, 4096, 8)
  assert table["server"] == 2 * 4096**2 * 14 / 8
  assert table["factors"] == 2 * 32 * 7 * 8192
  assert table["adam"] == 7 * (4096**2 + 32 * 8192)
  for workers, inputs, outputs in itertools.product((2, 9, 64), (64,), (96,)):
    bound = 2 * inputs * outputs / (workers * (inputs + outputs))
    most = math.floor(bound)
    if most:
      assert costs.prefers_factors(most, inputs, outputs, workers)
    assert not costs.prefers_factors(most + 1, inputs, outputs, workers)
  # Of a model: the large layer goes as factors, all else by the ring.
  cost = costs.hybrid({"a": (512, 512), "b": (8, 8)}, 160, 16, 4)
  assert cost == costs.add(
    costs.ring(160 + 256, 4), costs.factors(16, 512, 512, 4)
  )


# Waiting.


def drawn(workers, steps=4000, *, seed=3, **options):
  """Times of batches: float[steps, workers]."""
  made = durations.gamma(seed=seed, **options)
  return np.stack(
    [
      np.fromiter(itertools.islice(made.stream(worker), steps), float)
      for worker in range(workers)
    ],
    axis=1,
  )


@pytest.mark.parametrize("variation", [0.1, 0.7])
def test_the_slowest_is_that_of_drawn_durations(variation):
  times = np.sort(drawn(8, variation=variation), axis=1)
  for wait_for in (1, 6, 8):
    found = times[:, wait_for - 1]
    error = found.std() / len(found) ** 0.5
    wanted = costs.expected_slowest(8, variation=variation, wait_for=wait_for)
    assert abs(found.mean() - wanted) < 4 * error


def test_machines_that_differ():
  # Clusters of 4 machines; a batch of each.
  times = drawn(8000, 1, machine_variation=0.6).reshape(-1, 4).max(1)
  wanted = costs.expected_slowest(4, machine_variation=0.6)
  assert abs(times.mean() - wanted) < 4 * times.std() / len(times) ** 0.5
  assert wanted > 1.4 * costs.expected_slowest(4)


def test_the_slowest_by_hand():
  # V = 1 is the exponential: the harmonic numbers.
  for workers in (2, 5):
    harmonic = sum(1 / i for i in range(1, workers + 1))
    found = costs.expected_slowest(workers, mean=3.0, variation=1.0)
    assert found == pytest.approx(3 * harmonic, rel=1e-9)
  # The second of five: 1/5 + 1/4.
  found = costs.expected_slowest(5, variation=1.0, wait_for=2)
  assert found == pytest.approx(0.45, rel=1e-9)
  assert costs.expected_slowest(9, mean=2.0, variation=0) == 2.0


def test_a_synchronous_step_hides_what_it_can():
  slowest = costs.expected_slowest(4, mean=3.0)

  def step(communication, overlap):
    return costs.synchronous_step(
      4, communication=communication, compute=3.0, overlap=overlap
    )

  assert step(1.0, 0.0) == slowest + 1
  assert step(1.0, 2 / 3) == slowest
  assert step(2.5, 2 / 3) == slowest + 0.5


def test_asynchronous_workers_wait_for_links_only():
  assert costs.asynchronous_throughput(8, compute=0.5) == 16
  # 100 bytes there and back at 1000 bytes a second, and 2 messages of 0.05 s.
  link = costs.link(1000.0, 0.05)
  apart = dict(compute=0.5, size=100, shards=1, colocated=False, link=link)
  assert costs.asynchronous_throughput(2, **apart) == pytest.approx(2 / 0.8)
  # One link carries 10 messages a second, each way.
  assert costs.asynchronous_throughput(99, **apart) == 10
  # With shards on all workers, a device sends 2 (N - 1) / N S for N messages.
  found = costs.asynchronous_throughput(4, compute=1e-9, size=100, link=link)
  cycle = 1e-9 + 6 * (0.05 + 25 / 1000)
  assert found == pytest.approx(min(4 / cycle, 4 * 1000 / 150))
  # Those of unequal machines are more, by 1 / (1 - V_m^2).
  found = costs.asynchronous_throughput(8, compute=0.5, machine_variation=0.6)
  assert found == pytest.approx(16 / (1 - 0.36), rel=1e-6)


# Memory.


def test_the_published_sizes():
  each = memory.per_parameter("adam", "mixed")
  assert each == (2, 2, 4, 8, 0)
  for billions, gigabytes in (
    *((0.32, 5.12), (1.5, 24), (17.2, 275.2), (175, 2800)),
  ):
    total = memory.state(billions * 1e9).total
    assert total / memory.GB == pytest.approx(gigabytes, rel=1e-12)


def test_bytes_of_a_parameter():
  def total(*args, **kwargs):
    return memory.per_parameter(*args, **kwargs).total

  assert total("adam", "float32") == 16
  assert total("momentum", "float32") == 12
  assert total("adafactor", "float32") == 8
  assert total("adam", "mixed_main_gradients") == 18
  n = 8
  found = [total(zero=zero, devices=n) for zero in memory.ZERO_STAGES]
  assert found == [16, 4 + 12 / n, 2 + 14 / n, 16 / n]
  assert total(versions=4) == 16 + 2 * 3
  assert total("adam", "float32", versions=4) == 16 + 4 * 3
  split = memory.state(1e9, data=4, tensor=2, stages=5, zero=1, versions=2)
  assert split.total == 1e8 * (4 + 12 / 4 + 2)


def shapes(layers, x):
  return jax.eval_shape(
    lambda key: models.init(layers, key, x), jax.random.key(0)
  )


def gpt(depth=3, width=16, heads=2, context=8, vocabulary=11):
  layers = transformer.gpt(
    vocabulary, depth=depth, width=width, heads=heads, context=context
  )
  sizes = memory.Gpt(depth, width, heads, context, vocabulary)
  return layers, sizes, shapes(layers, jnp.zeros((1, context), jnp.int32))


@pytest.mark.parametrize(
  ("name", "tx"),
  [
    ("sgd", optax.sgd(0.1)),
    ("momentum", optax.sgd(0.1, momentum=0.9)),
    ("adagrad", optax.adagrad(0.1)),
    ("adam", optax.adam(0.1)),
  ],
)
def test_optimizers_hold_what_the_table_says(name, tx):
  _, _, params = gpt()
  found = memory.optimizer_bytes(tx, params)
  wanted = memory.per_parameter(name, "float32").optimizer
  counter = 4 if name == "adam" else 0
  assert found == wanted * models.count(params) + counter


def test_adafactor_is_nothing_beside_a_large_matrix():
  params = {"w": jax.ShapeDtypeStruct((4096, 2048), jnp.float32)}
  held = memory.optimizer_bytes(optax.adafactor(0.1), params)
  assert held < 0.01 * memory.bytes_of(params)


def test_cures_hold_what_their_papers_say():
  n = 8
  nothing = memory.cure("asgd", n)
  assert nothing == (0, 0, 0)
  # A copy of what each worker was sent.
  assert memory.cure("dc_asgd_c", n) == (0, 4 * n, 0)
  assert memory.cure("dc_asgd_a", n) == (4, 4 * n, 0)  # and a mean square
  assert memory.cure("dc_asgd_a", n, scope="worker").server >= 4 * n
  assert memory.cure("gap_aware", n).tickets == 4 * n
  # A velocity of each worker, their sum, and at most one on its way.
  dana = memory.cure("dana_zero", n)
  assert 4 * n + 4 <= dana.server <= 4 * n + 8 and not dana.tickets
  assert memory.cure("dana_zero", 2 * n).server - dana.server == 4 * n
  assert memory.cure("dana_dc", n).total == dana.server + 4 * n
  # DANA-Slim leaves it to the workers.
  assert memory.cure("dana_slim", n) == (0, 0, 4)
  assert memory.cure("ssgd", n).server == 4  # the sum of who has come


def test_a_gpt_has_as_many_parameters_as_its_formula_says():
  _, sizes, params = gpt()
  # This one has a last norm, and does not share its embedding with its logits.
  wanted = memory.gpt_parameters(sizes) + 2 * 16 + 11 * 16
  assert models.count(params) == wanted
  depth, h, s, v = 3, 16, 8, 11
  blocks = 12 * depth * h**2
  formula = blocks * (1 + 13 / (12 * h) + (v + s) / (12 * depth * h))
  assert memory.gpt_parameters(sizes) == pytest.approx(formula, rel=1e-12)


def test_operations_of_a_gpt():
  sizes = memory.Gpt(3, 16, 2, 8, 11)
  b, s, h, v = 5, 8, 16, 11
  lh = 3 * h
  again = 96 * b * s * lh * h * (1 + s / (6 * h) + v / (16 * lh))
  once = 72 * b * s * lh * h * (1 + s / (6 * h) + v / (12 * lh))
  assert memory.gpt_flops(sizes, b, recompute=True) == pytest.approx(again)
  assert memory.gpt_flops(sizes, b) == pytest.approx(once)


def test_products_of_a_gpt_are_those_operations():
  layers, sizes, params = gpt(depth=1)
  tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

  def loss(params, tokens):
    return models.apply(layers, params, tokens)[0].sum()

  made = jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr
  found = 0
  for eqn in made.eqns:
    if eqn.primitive.name == "dot_general":
      ((contracted, _), _) = eqn.params["dimension_numbers"]
      left = eqn.invars[0].aval.shape
      summed = math.prod(left[i] for i in contracted)
      found += 2 * summed * math.prod(eqn.outvars[0].aval.shape)
  assert found == memory.gpt_flops(sizes, 2)


def test_activations_of_a_block():
  sizes = memory.Gpt(24, 1024, 16, 512, 50000)
  b, s, h, a, t = 3, 512, 1024, 16, 4

  def found(*args, **kwargs):
    return memory.activations(sizes, b, *args, **kwargs)

  assert found() == s * b * h * (34 + 5 * a * s / h)
  split = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
  assert found(tensor=t) == split
  assert found(kind="sequence", tensor=t) == found() / t
  assert found(kind="full") == 2 * s * b * h
  # Numbers of 4 bytes, masks of one.
  masks = 2 + a * s / h
  assert found(itemsize=4) == 2 * found() - s * b * h * masks


def test_what_jax_keeps_by_hand():
  # tanh keeps a function of its output, x @ w keeps x; w is counted apart.
  def forward(w, x):
    return jnp.tanh(x @ w)

  w = jax.ShapeDtypeStruct((5, 7), jnp.float32)
  x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  kept, out = memory.kept(forward, w, x)
  assert out == 3 * 7 * 4
  assert 3 * (5 + 7) * 4 <= kept <= 3 * (5 + 2 * 7) * 4


MISTAKES = {
  "bandwidth": (lambda: costs.link(0), "bandwidth must be positive"),
  "latency": (lambda: costs.link(1, -1), "latency must be 0 or more"),
  "devices": (lambda: costs.ring(8, 0), "devices must be a positive whole"),
  "bytes": (lambda: costs.ring(-1, 2), "bytes must be 0 or more"),
  "shards": (
    lambda: costs.parameter_server(8, 2, shards=3),
    "3 shards do not fit on 2 workers",
  ),
  "wait_for": (
    lambda: costs.expected_slowest(2, wait_for=3),
    "wait_for 3 of 2 workers",
  ),
  "variation": (
    lambda: costs.expected_slowest(2, variation=-0.1),
    "variation must be from 0 to 3",
  ),
  "machines": (
    lambda: costs.asynchronous_throughput(2, compute=1, machine_variation=1),
    "machine_variation must be from 0 to below 1",
  ),
  "optimizer": (
    lambda: memory.per_parameter("adm"),
    "unknown optimizer 'adm'; did you mean 'adam'",
  ),
  "precision": (
    lambda: memory.per_parameter(precision="fp8"),
    "unknown precision 'fp8'",
  ),
  "zero": (lambda: memory.per_parameter(zero=4), "zero must be one of"),
  "heads": (
    lambda: memory.activations(memory.Gpt(1, 10, 3, 1, 1), 1),
    "heads must divide the width: 3 does not divide 10",
  ),
  "kind": (
    lambda: memory.activations(memory.Gpt(1, 8, 1, 1, 1), 1, kind="fill"),
    "did you mean 'full'",
  ),
  "recipe": (lambda: memory.cure("dana", 4), "unknown (recipe|algorithm)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
  call, message = MISTAKES[name]
  with pytest.raises(ValueError, match=message):
    call()
