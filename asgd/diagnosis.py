"""Diagnosis: is this learning rate stable at this staleness?

On a quadratic of curvature lambda, SGD with a fixed delay tau is stable while
eta lambda < 2 sin(pi / (4 tau + 2)) (the lemma behind PipeMare, Yang et al.
2021). Momentum lowers the bound about tenfold as soon as tau is 1; algorithms
against staleness raise it. So the bound of a recipe is measured: the recipe
runs on the scalar quadratic along a given trace of sends and receipts. Power
iteration estimates the curvature of the real loss (its sharpness, the largest
eigenvalue of the Hessian).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks
from asgd import losses as losses_lib
from asgd import worker as worker_lib
from asgd.algorithms import Recipe


def make_sharpness(
  loss: losses_lib.Loss, batch: base.Batch, *, iterations: int = 8
) -> Callable[[optax.Params], float]:
  """Builds a function that estimates the largest Hessian eigenvalue of a loss.

  The host drives power iteration, one compiled step at a time, because XLA is
  slow with convolutions inside loops on CPU. Each call of the loss gets the
  same random key. Each of the `iterations` costs about three gradients.

  Returns:
    params -> the Rayleigh quotient after the last product, which is at most the
    eigenvalue. Only weights are varied. Not finite if the loss is not.
  """
  checks.integer("iterations", iterations)
  key = jax.random.key(0)

  @jax.jit
  def step(params, direction, shift):
    value_and_gradient = jax.value_and_grad(
      lambda w: loss(base.with_weights(params, w), batch, key)[0]
    )
    norm = optax.tree.norm(direction)
    # A flat loss has a product of 0, and a sharpness of 0.
    direction = optax.tree.scale(1 / jnp.where(norm == 0, 1, norm), direction)
    (value, _), (_, product) = jax.jvp(
      value_and_gradient, (base.weights_of(params),), (direction,)
    )
    quotient = optax.tree.vdot(direction, product)
    quotient = jnp.where(jnp.isfinite(value), quotient, jnp.nan)
    return optax.tree.add_scale(product, shift, direction), quotient

  def iterate(params, shift):
    direction = _random_direction(key, base.weights_of(params))
    for _ in range(iterations):
      direction, quotient = step(params, direction, shift)
    return float(quotient)

  def sharpness(params):
    quotient = iterate(params, 0.0)
    if quotient < 0:
      # The eigenvalue of largest magnitude is negative: shift all above 0.
      quotient = iterate(params, -quotient)
    return quotient

  return sharpness


_MAX_DRAWN = 2**20  # most numbers that one program draws


def _random_direction(key: jax.Array, weights: optax.Params) -> optax.Params:
  """Returns `optax.tree.random_like(key, weights)`.

  XLA compiles that function for each shape, half a second each. So here one
  program draws a row per leaf, all of equal length, if these rows together are
  small. The numbers are the same: a number that threefry draws depends on its
  index alone."""
  leaves = jax.tree.leaves(weights)
  drawn_count = len(leaves) * max((x.size for x in leaves), default=0)
  are_float32 = all(x.dtype == jnp.float32 for x in leaves)
  # Without partitionable threefry, a number depends on the shape, too.
  is_partitionable = jax.config.jax_threefry_partitionable
  if 0 < drawn_count <= _MAX_DRAWN and are_float32 and is_partitionable:
    return _draw_rows(key, weights)
  return optax.tree.random_like(key, weights)


@jax.jit
def _draw_rows(key: jax.Array, weights: optax.Params) -> optax.Params:
  """Draws a row of the longest leaf's length for each leaf, and cuts it."""
  leaves, structure = jax.tree.flatten(weights)
  longest = max(leaf.size for leaf in leaves)
  draw_row = jax.vmap(lambda leaf_key: jax.random.normal(leaf_key, (longest,)))
  rows = draw_row(jax.random.split(key, len(leaves)))
  pairs = zip(rows, leaves, strict=True)
  drawn_leaves = [row[: leaf.size].reshape(leaf.shape) for row, leaf in pairs]
  return structure.unflatten(drawn_leaves)


def curvature_limit(
  recipe: Recipe, trace: base.Trace, *, learning_rate: float, points: int = 48
) -> float:
  """Finds the largest curvature at which a recipe is stable along a trace.

  The recipe runs on f(w) = lambda w^2 / 2, for `points` values of lambda from
  1e-4 / learning_rate to 4 / learning_rate. Neighbours have the same ratio,
  1.25 for 48 points. A value is stable if w shrinks from the second to the last
  quarter of the trace.

  Args:
    recipe: built with that constant learning rate.
    trace: the sends and receipts, with ten messages per worker or more.
    learning_rate: positive.
    points: number of values of lambda.

  Returns:
    The last stable lambda before the first unstable one, less than the true
    limit by up to one step of the grid; 0.0 if not even the smallest is stable.
  """
  workers = int(trace.worker.max()) + 1
  server = recipe.server()
  worker = worker_lib.gradient_worker(
    lambda w, c, key: (0.5 * c * w**2, losses_lib.Aux(())), recipe.at_worker
  )
  curvatures = np.geomspace(1e-4, 4, points) / learning_rate
  # Powers of two, so that traces of similar length share a program.
  slot_count = max(32, 1 << (workers - 1).bit_length())
  length = max(4096, 1 << (len(trace.worker) - 1).bit_length())
  # A stopped job changes nothing, and neither does a dropped message.
  rows = np.isin(trace.action, (base.SEND, base.RECEIVE))
  columns = [
    np.pad(np.asarray(x[rows], np.int32), (0, length - rows.sum()))
    for x in (trace.worker, trace.action)
  ]
  # A program that runs for some hundredths of a second, and compiles in two
  # thirds of the time without optimisation.
  growths = jax.jit(
    functools.partial(_growths, server, worker, slot_count),
    compiler_options={"xla_backend_optimization_level": 0},
  )
  growth = growths(
    *columns, np.int32(rows.sum()), curvatures.astype(np.float32)
  )
  is_unstable = ~(np.asarray(growth) < 0)  # NaN counts as growth
  first_unstable = int(np.argmax(is_unstable)) if is_unstable.any() else points
  return float(curvatures[first_unstable - 1]) if first_unstable else 0.0


_START = 1e-3  # initial w, small enough that all rules are linear at it


def _growths(
  server: base.Server, worker: base.Worker, slot_count: int,
  workers: jax.Array, actions: jax.Array, count: jax.Array,
  curvatures: jax.Array,
) -> jax.Array:
  """Returns float[P], log(|w| in the trace's last quarter / in its second).

  Args:
    server, worker: those of the recipe.
    slot_count: workers that the program has memory for, N or more.
    workers, actions: int32[L], the rows of the trace, of which the first
      `count` are used.
    curvatures: float[P].
  """
  state = server.init(jnp.float32(_START))
  slot = worker.init(state.params), server.send(state, jnp.int32(0))

  # Every value has an axis of curvatures from the start. JAX traces a loop in
  # `jax.vmap` three times to find out which values have one.
  def broadcast(tree, *shape):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, shape + x.shape), tree)

  points, key = len(curvatures), jax.random.key(0)
  start = broadcast(state, points), broadcast(slot, slot_count, points)
  start += (jnp.zeros((len(workers), points)),)

  def receive(state, worker_state, ticket, curvature):
    next_state, message, _ = worker.work(worker_state, ticket, curvature, key)
    return server.receive(state, ticket, message)[0], (next_state, ticket)

  def event(index, carry):
    (state, slots, magnitudes), worker_index = carry, workers[index]
    worker_state, ticket = jax.tree.map(lambda x: x[worker_index], slots)

    def send():
      tickets = jax.vmap(server.send, (0, None))(state, worker_index)
      return state, (worker_state, tickets)

    def receive_row():
      return jax.vmap(receive)(state, worker_state, ticket, curvatures)

    is_send = actions[index] == base.SEND
    state, slot = jax.lax.cond(is_send, send, receive_row)
    slots = jax.tree.map(lambda x, y: x.at[worker_index].set(y), slots, slot)
    magnitudes = magnitudes.at[index].set(jnp.abs(state.params))
    return state, slots, magnitudes

  _, _, magnitudes = jax.lax.fori_loop(0, count, event, start)
  magnitudes = jnp.where(jnp.isfinite(magnitudes), magnitudes, jnp.inf)
  index, quarter = jnp.arange(len(magnitudes))[:, None], count // 4
  in_second = (quarter <= index) & (index < 2 * quarter)
  in_last = (count - quarter <= index) & (index < count)
  early_peak, late_peak = (
    jnp.where(x, magnitudes, 0).max(0) for x in (in_second, in_last)
  )
  growth = jnp.log(late_peak) - jnp.log(early_peak)
  # A |w| that has shrunk to rounding errors shrinks no further: stable.
  has_shrunk = late_peak < 1e-4 * magnitudes.max(0)
  growth = jnp.where(has_shrunk, -jnp.inf, growth)
  # A nonlinear rule may end in a large cycle, which does not grow: unstable.
  return jnp.where(late_peak > 100 * _START, jnp.inf, growth)
