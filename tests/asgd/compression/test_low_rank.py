"""PowerSGD and 1-bit Adam beside transcriptions of their papers in NumPy; DeMo
by its cosines."""

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

import asgd
from asgd import compression

pytestmark = pytest.mark.usefixtures("float64")

KEY = jax.random.key(0)
WORKERS, RANK = 3, 2


def both(codec, state, tree):
  """The code, what is decoded of it, and the state."""

  def run(state, tree):
    code, state = codec.encode(state, tree, KEY)
    return code, codec.decode(code), state

  return jax.jit(run)(state, tree)


def gram_schmidt(p):
  p = p.copy()
  for i in range(p.shape[1]):
    for j in range(i):
      p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
    p[:, i] /= np.linalg.norm(p[:, i])
  return p


def power_sgd(grads, errors, q):
  """Algorithms 1 and 2, of the matrices [m, n] of all workers."""
  matrices = [g + e for g, e in zip(grads, errors, strict=True)]
  p = gram_schmidt(np.mean([m @ q for m in matrices], 0))
  q = np.mean([m.T @ p for m in matrices], 0)
  mean = p @ q.T
  return mean, [m - mean for m in matrices], q


def gradients(step):
  """Of each worker: a kernel [2, 4, 7], as a matrix [7, 8], and a vector."""
  return {
    "kernel": kit.normal(WORKERS, 2, 4, 7, seed=step),
    "vector": kit.normal(WORKERS, 5, seed=step + 100),
  }


def first_q(state):
  return np.asarray(state.inner[0])  # "kernel" is the first leaf


def matrix(kernel):
  return kernel.reshape(8, 7).T


def test_a_worker_is_that_of_the_paper_alone():
  codec = compression.named("powersgd", rank=RANK)
  encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
  one = jax.tree.map(lambda x: x[0], gradients(0))
  state = codec.init(one)
  q, errors = first_q(state), [np.zeros((7, 8))]
  for step in range(4):
    one = jax.tree.map(lambda x: x[0], gradients(step))
    code, state = encode(state, one, KEY)
    sent = decode(code)
    wanted, errors, q = power_sgd([matrix(one["kernel"])], errors, q)
    kit.close(matrix(sent["kernel"]), jnp.asarray(wanted), atol=1e-10)
    kit.close(
      matrix(state.residual["kernel"]), jnp.asarray(errors[0]), atol=1e-10
    )
    kit.same(sent["vector"], jnp.asarray(one["vector"]))
  assert [x.shape for x in code["kernel"].code] == [(7, RANK), (8, RANK)]


def test_devices_in_step_are_the_workers_of_the_paper():
  reducer = compression.powersgd_reducer(RANK)
  state = jax.vmap(reducer.init)(gradients(0))
  q, errors = first_q(state)[0], [np.zeros((7, 8))] * WORKERS
  step = jax.jit(
    jax.vmap(
      lambda state, g: reducer.reduce(state, g, KEY, "data"), axis_name="data"
    )
  )
  for i in range(4):
    grads = gradients(i)
    out, state = step(state, grads)
    kernels = [matrix(g) for g in grads["kernel"]]
    wanted, errors, q = power_sgd(kernels, errors, q)
    for worker in range(WORKERS):  # all have the same mean
      kit.close(
        matrix(out["kernel"][worker]), jnp.asarray(wanted), atol=1e-10
      )
      kit.close(
        matrix(state.residual["kernel"][worker]),
        jnp.asarray(errors[worker]),
        atol=1e-10,
      )
    kit.close(out["vector"][0], jnp.asarray(grads["vector"].mean(0)))


def test_a_matrix_of_zeros_does_not_end_the_iterations():
  codec = compression.named("powersgd", rank=1)
  x = np.outer([1.0, 2.0, -1.0], [3.0, 0.0, 1.0, 1.0])
  _, _, state = both(codec, codec.init(x), 0 * x)
  for _ in range(3):
    _, _, state = both(codec, state, x)
  assert float(jnp.abs(state.residual).max()) < 1e-9


def test_what_would_not_become_smaller_is_sent_whole():
  codec = compression.powersgd(rank=2)
  tree = {"small": np.ones((4, 4)), "large": np.ones((4, 5))}
  state = codec.init(tree)
  code, _ = codec.encode(state, tree, KEY)
  assert code["small"].code.shape == (16,)  # 2 (4 + 4) is 4 x 4
  assert [x.shape for x in code["large"].code] == [(5, 2), (4, 2)]


def onebit_adam(grads, state, t, warm_up, b1, b2, eps):
  """Algorithm 1 with bias corrections, of vectors of all workers."""
  m, v, errors, server = state

  def signs(x):
    return np.sqrt(np.mean(x**2)) * np.where(x >= 0, 1.0, -1.0)

  if t <= warm_up:
    g = np.mean(grads, 0)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
  else:
    totals = [
      b1 * m + (1 - b1) * g + e for g, e in zip(grads, errors, strict=True)
    ]
    errors = [x - signs(x) for x in totals]
    total = np.mean([signs(x) for x in totals], 0) + server
    m = signs(total)
    server = total - m
  root = np.sqrt(v / (1 - b2 ** min(t, warm_up))) + eps
  update = np.where(v > 0, m / (1 - b1**t) / root, 0.0)
  return update, (m, v, errors, server)


def test_onebit_adam_is_adam_and_then_that_of_the_paper():
  options = dict(b1=0.8, b2=0.9, eps=1e-6)
  warm_up, steps = 3, 7
  reducer = compression.onebit_adam(warm_up, **options)
  grads = kit.normal(steps, 2, 6)
  grads[:, :, 3] = 0.0  # an element without a variance never moves
  state = jax.vmap(reducer.init)(grads[0])
  step = jax.jit(
    jax.vmap(lambda s, g: reducer.reduce(s, g, KEY, "data"), axis_name="data")
  )
  adam = optax.scale_by_adam(**options)
  adam_state, zero = adam.init(grads[0, 0]), np.zeros(6)
  reference = zero, zero, [zero, zero], zero
  for t in range(1, steps + 1):
    update, state = step(state, grads[t - 1])
    wanted, reference = onebit_adam(
      grads[t - 1], reference, t, warm_up, *options.values()
    )
    for worker in range(2):
      np.testing.assert_allclose(update[worker], wanted, rtol=1e-5)
      np.testing.assert_allclose(  # a size of signs is in float32
        state.residual[worker], reference[2][worker], atol=1e-7
      )
    if t <= warm_up:
      mean = grads[t - 1].mean(0)
      like_adam, adam_state = adam.update(mean, adam_state)
      np.testing.assert_allclose(update[0], like_adam, atol=1e-12)
  assert np.abs(state.residual[0]).max() > 0
  assert not np.asarray(update)[:, 3].any()


def cosines(x):
  """The orthonormal DCT-II of a matrix, by its definition."""

  def basis(length):
    n, k = np.meshgrid(np.arange(length), np.arange(length))
    rows = np.cos(np.pi * (n + 0.5) * k / length) * np.sqrt(2 / length)
    rows[0] /= np.sqrt(2)
    return rows

  return basis(x.shape[0]) @ x @ basis(x.shape[1]).T


def test_demo_sends_the_strongest_cosines_of_each_chunk():
  """6 x 10 elements in chunks of 3 x 2: the largest divisors up to 4."""
  codec = compression.demo(2, chunk=4, decay=0.5)
  x = kit.normal(6, 10)
  code, sent, state = both(codec, codec.init(x), x)
  values = np.asarray(code.code.values).reshape(2, 5, 3, 2)
  for i in range(2):
    for j in range(5):
      chunk = cosines(x[3 * i : 3 * i + 3, 2 * j : 2 * j + 2])
      kept = np.abs(chunk) >= np.sort(np.abs(chunk), axis=None)[-2]
      kit.close(values[i, j], np.where(kept, chunk, 0.0), atol=1e-12)
  assert float(jnp.sum(sent**2)) == pytest.approx((values**2).sum())
  kit.close(state.residual, jnp.asarray(x) - sent)
  # The momentum decays before a gradient is added, not when it is sent.
  _, later, _ = both(codec, state, x)
  other = compression.demo(2, chunk=4, decay=0.0)
  _, same, _ = both(other, other.init(x), x + 0.5 * state.residual)
  kit.close(later, same)


def test_all_cosines_are_all_of_a_message():
  codec = compression.demo(64 * 64)
  tree = {"w": kit.normal(2, 3, 70), "b": kit.normal(13), "gain": np.float64(2)}
  _, sent, _ = both(codec, codec.init(tree), tree)
  kit.close(sent, jax.tree.map(jnp.asarray, tree), atol=1e-12)


def test_a_server_takes_the_sign_of_what_workers_sent():
  recipe = asgd.ssgd(0.25, 2, optimizer=optax.sign_sgd)
  server, codec = recipe.server(), compression.demo(1, decay=0.9)
  state = server.init(jnp.zeros(4))
  ticket = server.send(state, jnp.int32(0))
  for gradient in ([3.0, 3, 3, 3], [-2.0, -2, -2, -2]):
    x = np.array(gradient)
    _, message, _ = both(codec, codec.init(x), x)
    state, _ = server.receive(state, ticket, message)
  np.testing.assert_array_equal(state.params, [-0.25] * 4)
