"""PowerSGD and 1-bit Adam beside transcriptions of their papers in NumPy; DeMo
by its cosines."""

import functools

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


@functools.partial(jax.jit, static_argnums=0)
def both(codec, state, tree):
  """The code, what is decoded of it, and the state."""
  code, state = codec.encode(state, tree, KEY)
  return code, codec.decode(code), state


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
  one = jax.tree.map(lambda x: x[0], gradients(0))
  state = codec.init(one)
  q, errors = first_q(state), [np.zeros((7, 8))]
  for step in range(4):
    one = jax.tree.map(lambda x: x[0], gradients(step))
    code, sent, state = both(codec, state, one)
    wanted, errors, q = power_sgd([matrix(one["kernel"])], errors, q)
    kit.close(matrix(sent["kernel"]), jnp.asarray(wanted), atol=1e-10)
    kit.close(
      matrix(state.residual["kernel"]), jnp.asarray(errors[0]), atol=1e-10
    )
    kit.same(sent["vector"], jnp.asarray(one["vector"]))
  assert [x.shape for x in code["kernel"].code] == [(7, RANK), (8, RANK)]


def in_step(reducer):
  """A step of all devices: (states, tree=gradients)."""
  reduce = functools.partial(reducer.reduce, key=KEY, axis="data")
  return jax.jit(jax.vmap(reduce, axis_name="data"))


def test_devices_in_step_are_the_workers_of_the_paper():
  reducer = compression.powersgd_reducer(RANK)
  state = jax.vmap(reducer.init)(gradients(0))
  q, errors = first_q(state)[0], [np.zeros((7, 8))] * WORKERS
  step = in_step(reducer)
  for i in range(4):
    grads = gradients(i)
    out, state = step(state, tree=grads)
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


def test_vogels_2019_input_is_average_plus_residual():
  """The authors' test_error_feedback_mechanism, in float64, at rank 2."""
  reducer = compression.powersgd_reducer(RANK)
  state, step = jax.vmap(reducer.init)(gradients(0)), in_step(reducer)
  for i in range(3):
    given = gradients(i)["kernel"] + state.residual["kernel"]
    out, state = step(state, tree=gradients(i))
    kit.close(out["kernel"] + state.residual["kernel"], given)
    assert float(jnp.abs(state.residual["kernel"]).max()) > 0.1


@pytest.mark.parametrize("rate, low_rank", [(2.0, True), (2.01, False)])
def test_vogels_2019_compresses_from_the_minimum_rate_on(rate, low_rank):
  """6 x 12 elements are 2 (6 + 12) of factors of rank 2: half as many."""
  reducer = compression.powersgd_reducer(2, minimum_rate=rate)
  g = kit.normal(WORKERS, 12, 6)
  state = jax.vmap(reducer.init)(g)
  out, state = in_step(reducer)(state, tree=g)
  exact = np.allclose(out[0], g.mean(0), atol=1e-12)
  assert exact != low_rank
  assert bool(state.residual.any()) == low_rank


def test_vogels_2019_compresses_nothing_in_the_first_steps():
  """The authors' test_no_compression_in_the_beginning; then it is as new."""
  reducer = compression.powersgd_reducer(RANK, start=2)
  state, step = jax.vmap(reducer.init)(gradients(0)), in_step(reducer)
  new = state
  for i in range(2):
    out, state = step(state, tree=gradients(i))
    mean = jax.tree.map(lambda x: jnp.asarray(x.mean(0)), gradients(i))
    kit.close(jax.tree.map(lambda x: x[0], out), mean)
    kit.same(state._replace(count=new.count), new)
  other = compression.powersgd_reducer(RANK)
  new, other_step = jax.vmap(other.init)(gradients(0)), in_step(other)
  for i in range(2, 4):
    out, state = step(state, tree=gradients(i))
    same, new = other_step(new, tree=gradients(i))
    kit.close(out, same)
    kit.close(state.residual, new.residual)


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
  code, _ = jax.eval_shape(
    lambda tree: codec.encode(codec.init(tree), tree, KEY), tree
  )
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
  step = in_step(reducer)
  adam = optax.scale_by_adam(**options)
  adam_state, zero = adam.init(grads[0, 0]), np.zeros(6)
  reference = zero, zero, [zero, zero], zero
  for t in range(1, steps + 1):
    update, state = step(state, tree=grads[t - 1])
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


def adam_norms(grads, b2):
  """||v_t||_1 with its bias correction, of all steps from 1 on."""
  v, norms = 0.0, []
  for t, g in enumerate(grads, 1):
    v = b2 * v + (1 - b2) * g.mean(0) ** 2
    norms.append(v.sum() / (1 - b2**t))
  return norms


@pytest.mark.parametrize(
  "scales, ends",
  [
    ([1.0] * 8, 5),  # it stands still: at once, when D steps are over
    ([2.0] * 3 + [1.0] * 18, 19),  # it falls first
    ([0.0] * 6 + [1.0] * 6, 11),  # there was none
  ],
  ids=["still", "falls", "zero"],
)
def test_tang_2021_ends_the_warm_up_where_v_stands_still(scales, ends):
  options = dict(b1=0.5, b2=0.75, eps=1e-6)  # D is 4
  one = kit.normal(2, 6)
  grads = [scale * one for scale in scales]
  norms = adam_norms(grads, options["b2"])
  met = [
    t + 1 for t in range(4, len(norms)) if norms[t] >= 0.96 * norms[t - 4] > 0
  ]
  assert met[0] == ends
  outs, states = [], []
  for warm_up in (None, ends):
    reducer = compression.onebit_adam(warm_up, **options)
    state = jax.vmap(reducer.init)(one)
    step, out = in_step(reducer), []
    for g in grads:
      update, state = step(state, tree=g)
      out.append(update)
    outs.append(out)
    states.append(state._replace(norms=()))
  kit.same(*outs)
  kit.same(*states)
  assert states[0].frozen.all() and (states[0].warm == ends).all()


def test_deepspeed_onebit_sends_plus_for_0_and_the_norm_by_the_root_of_n():
  reducer = compression.onebit_adam(1, b1=0.0)
  g = np.array([[3.0, 0.0, -4.0, 0.0]])
  state = jax.vmap(reducer.init)(g)
  step = in_step(reducer)
  _, state = step(state, tree=g)
  _, state = step(state, tree=g)  # the norm is 5, and n is 4
  kit.close(state.mu, jnp.array([[2.5, 2.5, -2.5, 2.5]]))
  kit.close(state.residual, jnp.array([[0.5, -2.5, -1.5, -2.5]]))
  kit.close(state.server, jnp.zeros((1, 4)))


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
