"""Many devices take the step of one, whatever each of them keeps."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from asgd import base, models, optimizers, problems
from asgd.parallel import data_parallel, meshes, precision
from asgd.problems.problem import classification_loss
from asgd.worker import Aux

EXAMPLES, STEPS = 16, 3
KEY = jax.random.key(7)


pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures("float64"),
]


def weights():
  """Leaves that 8 devices divide, in either dimension, and some that not."""
  return {
    "first": kit.normal(6, 16, seed=1) / 2,
    "second": kit.normal(16, 3, seed=2) / 2,
    "bias": kit.normal(3, seed=3),
    "gain": np.float64(0.7),
  }


def network(params, x, keep):
  h = jnp.tanh(x @ params["first"]) * keep
  return (h @ params["second"] + params["bias"]) * params["gain"]


def loss(params, batch, key):
  """With dropout."""
  x, y = batch
  keep = jax.random.bernoulli(key, 0.5, (len(x), 16)) * 2.0
  error = network(params, x, keep.astype(x.dtype)) - y
  return jnp.mean(jnp.sum(error**2, axis=-1)), Aux(())


def batch(step=0):
  return kit.normal(EXAMPLES, 6, seed=10 + step), kit.normal(
    EXAMPLES, 3, seed=step
  )


def assert_near(found, wanted, tolerance=1e-12):
  kit.close(found, wanted, rtol=tolerance, atol=tolerance)


def take_steps(made, params=None, batches=batch):
  """Returns the parameters after some steps, and what they told."""
  state = made.init(weights() if params is None else params)
  told = []
  for step in range(STEPS):
    key = jax.random.fold_in(KEY, step)
    state, metrics = made.step(state, made.place(batches(step)), key)
    told.append(metrics)
  return made.params(state), told


def data_mesh(devices):
  return meshes.make({"data": devices})


@functools.cache
def one_device(name):
  """Eight pieces, written with nothing of the module."""
  tx, clip_norm, params = TRANSFORMS[name](), CLIP, weights()
  with jax.enable_x64(True):
    state = tx.init(params)
    told = []

    def mean_loss(params, x, y, key):
      def piece(i):
        return loss(params, (x[i], y[i]), jax.random.fold_in(key, i))[0]

      return jax.vmap(piece)(jnp.arange(8)).mean()

    @jax.jit
    def one_step(params, state, batch, key):
      x, y = (a.reshape(8, 2, -1) for a in batch)
      value, grads = jax.value_and_grad(mean_loss)(params, x, y, key)
      norm = optax.tree.norm(grads)
      factor = jnp.minimum(1.0, clip_norm / norm)
      grads = jax.tree.map(lambda g: g * factor, grads)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, (value, norm)

    for step in range(STEPS):
      key = jax.random.fold_in(KEY, step)
      params, state, metrics = one_step(params, state, batch(step), key)
      told.append(metrics)
    return params, told


CLIP = 3.0  # of gradients with norms from 3 to 8: it clips
TRANSFORMS = {
  "adamw": lambda: optax.adamw(0.01, mask=lambda p: jax.tree.map(jnp.ndim, p)),
  # With means over rows and columns, and norms of whole leaves.
  "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
}

# devices, pieces on each, ZeRO, form
WAYS = [
  *((8, 1, zero, "shard_map") for zero in (0, 1)),
  *((4, 2, zero, "shard_map") for zero in (2, 3)),
  *((1, 8, 0, "shard_map"), (4, 2, 0, "pmap")),
]
CASES = [("adamw", *way) for way in WAYS]
CASES.append(("adafactor", 8, 1, 3, "shard_map"))


@pytest.mark.parametrize(
  ("name", "devices", "accumulate", "zero", "form"), CASES, ids=str
)
def test_it_is_the_step_of_one_device(name, devices, accumulate, zero, form):
  made = data_parallel.make_step(
    *(loss, TRANSFORMS[name](), data_mesh(devices)),
    **dict(accumulate=accumulate, zero=zero, form=form, clip_norm=CLIP),
  )
  given = jax.tree.map(jnp.asarray, weights())
  if zero > 1:  # a layer without a bias, first, and a number that is no array
    given = {"absent": None, **given, "gain": 0.7}
  params, told = take_steps(made, given)
  assert params.pop("absent", None) is given.pop("absent", None) is None
  assert_near(given, weights())  # it was copied, not donated
  wanted, wanted_told = one_device(name)
  assert_near(params, wanted)
  assert_near([(m.loss, m.norm) for m in told], wanted_told)
  assert max(m.norm for m in told) > CLIP
  # Python's number has a weak type, which the second step's has not.
  assert form == "pmap" or made.step._cache_size() == 1 + (zero > 1)


def bytes_on_a_device(tree):
  """Of leaves with axes: every device has all counts and schedules."""
  device = jax.devices()[0]
  return sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(tree)
    for shard in leaf.addressable_shards
    if shard.device == device and leaf.ndim
  )


def without_dropout(params, batch, key):
  del key
  x, y = batch
  return jnp.mean((network(params, x, 1.0) - y) ** 2), Aux(())


def test_a_line_search_is_that_of_one_device():
  """It evaluates the loss of the whole batch, on all devices."""
  made = data_parallel.make_step(
    without_dropout, optimizers.lbfgs(), data_mesh(2), searches=True
  )
  params, told = take_steps(made)
  tx, wanted = optax.lbfgs(), weights()

  @jax.jit
  def one_step(wanted, state, batch):
    def function(w):
      return without_dropout(w, batch, KEY)[0]

    value, grad = jax.value_and_grad(function)(wanted)
    updates, state = tx.update(
      grad, state, wanted, value=value, grad=grad, value_fn=function
    )
    return optax.apply_updates(wanted, updates), state, value

  state = jax.jit(tx.init)(wanted)
  for step in range(STEPS):
    wanted, state, value = one_step(wanted, state, batch(step))
    np.testing.assert_allclose(told[step].loss, value, rtol=1e-12)
  assert_near(params, wanted, 1e-10)


def test_what_a_device_keeps():
  params = weights() | {"bias": kit.normal(8)}
  whole = sum(x.nbytes for x in params.values() if np.ndim(x))
  for zero in range(4):
    made = data_parallel.make_step(
      loss, optax.adam(0.1), data_mesh(8), zero=zero
    )
    state = made.init(params)
    held = bytes_on_a_device(state.params), bytes_on_a_device(state.opt_state)
    assert held == (
      whole // 8 if zero == 3 else whole,
      2 * (whole // 8 if zero else whole),
    )


def collectives(made, params):
  """Counts collectives over arrays in the program of the devices."""
  state = made.init(params)
  program = jax.make_jaxpr(made.step)(state, batch(), KEY)
  found = {}
  for eqn in kit.equations(program.jaxpr):
    name = eqn.primitive.name
    if name in ("psum", "psum_invariant", "all_gather", "reduce_scatter"):
      count = sum(bool(v.aval.shape) for v in eqn.invars)
      found[name] = found.get(name, 0) + count
  return {name: count for name, count in found.items() if count}


def test_what_is_sent():
  """Three leaves have axes; 8 devices divide two of them."""
  for zero, wanted in enumerate(
    (
      {"psum": 3},
      {"psum": 1, "reduce_scatter": 2},
      {"psum": 1, "reduce_scatter": 2},
      # In the backward, what it reads again: not what is next to the data.
      {"psum": 1, "reduce_scatter": 2, "all_gather": 3},
    )
  ):
    made = data_parallel.make_step(
      loss, optax.sgd(0.1), data_mesh(8), zero=zero
    )
    assert collectives(made, weights()) == wanted


class Normalised(nn.Module):
  """Logits, normalised by the statistics of the batch."""

  @nn.compact
  def __call__(self, x, train):
    norm = nn.BatchNorm(use_running_average=not train, momentum=0.0)
    return norm(nn.Dense(3)(x))


def test_statistics_of_a_batch_norm_are_those_of_the_pieces():
  layers = (Normalised(),)
  batch = kit.normal(8, 4), np.arange(8) % 3

  pieces = problems.Pieces(
    layers, lambda b, key, dtype: b[0], classification_loss
  )
  model_loss = problems.whole_loss(pieces)
  params = jax.eval_shape(lambda: models.init(layers, KEY, batch[0]))
  params = jax.tree.map(
    lambda p: kit.normal(*p.shape, seed=p.size) ** 2, params
  )
  made = data_parallel.make_step(
    model_loss, optax.sgd(0.1), data_mesh(4), zero=3
  )
  found, _ = take_steps(made, params, lambda step: batch)
  one, x = params, batch[0].reshape(4, 2, 4)
  gradient = jax.jit(jax.value_and_grad(model_loss, has_aux=True))
  for _ in range(STEPS):
    each = [
      gradient(one, (x[i], batch[1].reshape(4, 2)[i]), KEY) for i in range(4)
    ]
    mean = [
      jax.tree.map(lambda *g: sum(g) / 4, *trees)
      for trees in (
        [grads.weights for _, grads in each],
        [aux.stats for (_, aux), _ in each],
      )
    ]
    one = base.Variables(
      jax.tree.map(lambda p, g: p - 0.1 * g, one.weights, mean[0]),
      jax.tree.map(lambda s, m: 0.9 * s + 0.1 * m, one.stats, mean[1]),
    )
  assert_near(found, one)


def plain(params, batch, key):
  """Without dropout, so that any number of pieces gives the same."""
  del key
  x, y = batch
  error = network(params, x, 1.0) - y
  return jnp.mean(jnp.sum(error**2, axis=-1)), Aux(())


def test_half_precision_is_near_and_kept_in_whole():
  params = jax.tree.map(np.float32, weights())
  tx = optax.sgd(0.02, momentum=0.9)
  exact, _ = take_steps(
    data_parallel.make_step(plain, tx, data_mesh(1)), params
  )
  for name, zero in (("bfloat16", 0), ("float16", 3)):
    made = data_parallel.make_step(
      plain, tx, data_mesh(8), policy=name, zero=zero
    )
    found, told = take_steps(made, params)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert told[0].loss.dtype == jnp.float32
    assert_near(found, exact, 0.05)
    assert (np.asarray(found["first"]) != np.asarray(exact["first"])).any()


def test_a_scale_falls_at_an_overflow_and_grows_after_finite_steps():
  rule = precision.Dynamic(initial=2.0**15, interval=2)
  params = jax.tree.map(np.float32, weights())
  made = data_parallel.make_step(
    *(plain, optax.adam(0.01), data_mesh(4)),
    **dict(policy="float16", loss_scale=rule, zero=1),
  )
  state = made.init(params)
  seen = []
  for step in range(6):
    x, y = batch(step)
    if step == 3:
      y = y * 1e4  # squares beyond float16
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = made.step(state, made.place((x, y)), KEY)
    same = jax.tree.map(
      np.array_equal, before, jax.device_get((state.params, state.opt_state))
    )
    assert all(jax.tree.leaves(same)) == (not metrics.finite)
    seen.append((bool(metrics.finite), float(state.scale.scale)))
  assert not seen[3][0]
  wanted, good = rule.initial, 0
  for finite, scale in seen:
    good = good + 1 if finite else 0
    wanted = wanted if finite else wanted / 2
    if good == 2:
      wanted, good = wanted * 2, 0
    assert scale == wanted
  assert int(state.count) == 6


def test_a_scale_changes_no_number_that_it_can_hold():
  tx = optax.sgd(0.1)
  rule = precision.Dynamic(initial=1024.0)
  found = [
    take_steps(
      data_parallel.make_step(plain, tx, data_mesh(4), loss_scale=scale)
    )[0]
    for scale in (None, rule)
  ]
  assert_near(*found, tolerance=0)  # a power of two


def test_small_gradients_survive_in_half_precision():
  """The scale is what keeps them (section 3.2 of the paper)."""

  def small(params, batch, key):
    del key
    x, y = batch
    return jnp.mean((x @ params) * y), Aux(())

  def moved(scale, rate=1e8, policy="float16", dtype=np.float32, x=1e-4):
    made = data_parallel.make_step(
      *(small, optax.sgd(rate), data_mesh(2)),
      **dict(policy=policy, loss_scale=scale),
    )
    state = made.init(np.zeros(3, dtype))
    batch = np.full((4, 3), x, dtype), np.full(4, x, dtype)
    state, _ = made.step(state, batch, KEY)
    return made.params(state)

  assert not moved(None).any()
  assert_near(moved(precision.Dynamic()), -np.ones(3), 1e-2)
  # All in float16, which cannot hold the scale times two devices, 2^16.
  half = moved(precision.Dynamic(), 1e4, "unchanged", np.float16, 1e-2)
  assert_near(half, -np.ones(3), 1e-2)


def test_a_batch_is_divided_over_the_axis_of_data():
  grid = meshes.make({"data": 4, "tensor": 2})
  x = kit.normal(8, 3)
  placed = meshes.place_batch({"x": x}, grid)["x"]
  assert placed.sharding.spec == PartitionSpec("data")
  assert_near(placed, x)


def make_step(axes=None, **options):
  mesh = meshes.make({"data": 4} if axes is None else axes)
  return data_parallel.make_step(loss, optax.sgd(0.1), mesh, **options)


def take_step(batch, **options):
  made = make_step(**options)
  made.step(made.init(weights()), batch, KEY)


TWO_AXES = {"data": 2, "rows": 2}
OF_A_SCALE = [
  (dict(factor=1.0), "factor of a loss scale must be more than 1, not 1.0"),
  (dict(initial=0.5), "cannot start at 0.5, outside of its bounds 1.0"),
  (dict(initial=1e300, most=1e301),
   "initial of a loss scale must be a positive number of float32"),
  (dict(interval=True), "interval of a loss scale must be.*not True"),
]
OF_A_STEP = [
  *((dict(loss_scale=precision.Dynamic(**d)), m) for d, m in OF_A_SCALE),
  (dict(loss_scale=2.0), "a loss scale must be a Dynamic, not 2.0"),
  (dict(axes={"batch": 2}),
   r"the mesh has axes \('batch',\) and none named 'data'"),
  (dict(accumulate=0), "accumulate must be.*not 0"),
  (dict(clip_norm=-1.0), "clip_norm must be.*not -1.0"),
  (dict(zero=4), "zero must be 0, 1, 2 or 3, not 4"),
  (dict(form="pmab"), "unknown form 'pmab'; did you.*'pmap'"),
  (dict(policy="float61"), "unknown precision 'float61'"),
  (dict(policy=precision.Policy(param=jnp.int32)),
   "the dtype param of a policy must be of floating point, not int32"),
  (dict(policy=precision.Policy(compute="float61")),
   "the dtype compute of a policy must be of floating point, not float61"),
  (dict(searches=True, zero=1),
   "searches along a line .lbfgs. needs zero=0, not 1"),
  (dict(searches=True, axes=TWO_AXES),
   r"a mesh of the axis 'data' alone, not of \('data', 'rows'\)"),
  (dict(form="pmap", zero=1),
   r"the form 'pmap' \(use 'shard_map'\) needs zero=0, not 1"),
  (dict(form="pmap", axes=TWO_AXES),
   r"of the axis 'data' alone, not of \('data', 'rows'\)"),
]
OF_A_MESH = [
  ({"data": 8, "tensor": 3},
   r"data 8 x tensor 3 needs 24 devices and there are 8;.*"
   r"jax.config.update\('jax_num_cpu_devices', 24\)"),
  ({"data": 0}, "axis 'data' must be.*not 0"),
  ({}, "a mesh needs an axis"),
  ({"data": -1, "rows": -1},
   r"only one axis can have all remaining devices, not \['data', 'rows'\]"),
  ({"data": -1, "rows": 3}, "8 devices cannot be divided by 3"),
]
OF_ARRAYS = {
  "array": (
    lambda: meshes.place(
      {"w": kit.normal(3, 2)}, data_mesh(2), PartitionSpec("data")
    ),
    r"\['w'\] of shape \(3, 2\) cannot be divided .* over the mesh data 2"),
  "axes": (lambda: meshes.place_batch({"x": kit.normal()}, data_mesh(2)),
    r"\['x'\] of shape \(\) cannot be divided .* over the mesh data 2"),
  "batch": (
    lambda: take_step((kit.normal(12, 6), kit.normal(12, 3)), accumulate=2),
    "a batch of 12 examples cannot be divided into 8 pieces"),
  "no batch": (lambda: take_step((kit.normal(8, 6), np.float64(1))),
    "one leading axis, of examples"),
}


test_a_step_is_refused = kit.refuses(OF_A_STEP, lambda how: make_step(**how))
test_a_mesh_is_refused = kit.refuses(OF_A_MESH, meshes.make)
test_arrays_are_refused = kit.refuses(OF_ARRAYS)
