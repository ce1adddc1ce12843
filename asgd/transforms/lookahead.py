"""Look-ahead: sends predicted parameters instead of the current ones.

A worker's gradient arrives after messages of other workers have moved the
parameters. With momentum, the velocities already contain most of that move when
the server sends the ticket, so the server can predict the move. A look-ahead is
therefore a *send* rule: it turns a transform into an Algorithm, and is applied
last, to the complete transform.

`lookahead` works for any optimizer: it runs the optimizer on zero gradients,
one for each expected message. `velocity_lookahead` is the fast form for
momentum: it subtracts a multiple of a velocity. For DANA this velocity is a
running sum over workers (`dana_momentum`). The two forms agree while the
learning rate is constant. With a schedule they differ: `lookahead` also
advances the schedule at each predicted step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks, rates, running_sums
from asgd.transforms import rows as rows_lib


def lookahead(
  tx: optax.GradientTransformation,
  workers: Callable[[jax.Array], jax.Array],
) -> base.Algorithm:
  """Sends the parameters to which the optimizer would move on zero gradients.

    for j in workers(i): params <- params + tx(0, worker=j);   send params

  The server's parameters and optimizer do not change. With momentum and one
  worker this is Nesterov's look-ahead. With a velocity for each worker, and one
  predicted message of each worker, this is DANA's look-ahead.

  Args:
    tx: the complete optimizer, learning rate included.
    workers: int32[] -> int32[K]. Takes the receiver of the ticket and returns
      the senders of the messages to predict, in order. A send costs K
      updates.

  Returns:
    An Algorithm: `tx` with another send rule.

  Source:
    Hakimi et al. 2019 for momentum; this library for other optimizers.

  Example:
    Momentum rolled forward twice: v = 4 becomes 2, then 1.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> tx = optax.sgd(0.5, momentum=0.5)
    >>> algorithm = asgd.lookahead(tx, lambda worker: jnp.array([0, 1]))
    >>> now = jnp.float32(8.0)
    >>> update, state = algorithm.update(4.0, algorithm.init(now), now)
    >>> now += update
    >>> ahead = algorithm.send(state, now, worker=jnp.int32(0))
    >>> print(now, ahead)  # 8 - 0.5 4, 6 - 0.5 2 - 0.5 1
    6.0 4.5
  """
  tx = optax.with_extra_args_support(tx)

  def send(opt_state, params, *, worker):
    zeros = optax.tree.zeros_like(params)

    def step(carry, sender):
      params, opt_state = carry
      # The predicted message has staleness 0: the Delay's `sent_params` are the
      # parameters of this step.
      delay = base.Delay(sender, jnp.zeros([], jnp.int32), params)
      updates, opt_state = tx.update(
        zeros, opt_state, params, **delay._asdict()
      )
      return (optax.apply_updates(params, updates), opt_state), None

    # A scan, as K may be large; each step is one predicted message.
    senders = jnp.asarray(workers(worker), jnp.int32)
    # Drop the state after the scan: sending does not change the server's state.
    (params, _), _ = jax.lax.scan(step, (params, opt_state), senders)
    return params

  return base.as_algorithm(tx, send)


class SlimState(NamedTuple):
  """State of `slim`."""

  inner: optax.OptState  # of the optimizer
  ahead: optax.Updates  # like params, update of `inner` on a zero gradient


def slim(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """DANA-Slim for any optimizer: a worker sends the change of its look-ahead.

    u = tx(g);   a = tx(0) after u;   message = a_before - u - a

  DANA-Zero sends the look-ahead, over the optimizers of all workers j,

    initial params + sum_j (U_j + a_j)

  Each worker has the complete optimizer and gives it the worker's gradients.
  U_j is the sum of the updates of worker j so far, and a_j is the update that a
  zero gradient would give next. A gradient of worker j moves the look-ahead by
  u + a - a_before. The message is the negative of this move, and the server
  subtracts the message: SGD with learning rate 1. So the server's parameters
  are the look-ahead. For momentum the message is eta (gamma v + g).

  Args:
    optimizer: the complete optimizer, learning rate included.

  Returns:
    A transform for a worker's gradients, such as the `at_worker` of a Recipe.

  Source:
    Hakimi et al. 2019 for momentum; this library for other optimizers.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import transforms
    >>> tx = transforms.slim(optax.sgd(0.5, momentum=0.5))
    >>> state = tx.init(jnp.float32(0.0))
    >>> for g in (4.0, 2.0):  # v = 4, then 0.5 4 + 2 = 4
    ...   message, state = tx.update(jnp.float32(g), state)
    ...   print(message)  # 0.5 (0.5 4 + 4), 0.5 (0.5 4 + 2)
    3.0
    2.0
  """
  tx = optax.with_extra_args_support(optimizer)

  def init_fn(params):
    return SlimState(tx.init(params), optax.tree.zeros_like(params))

  def update_fn(updates, state, params=None, **extra_args):
    # [1] u, and the state after it.
    update, inner = tx.update(updates, state.inner, params, **extra_args)
    # [2] a: the update that a zero gradient would give next. The state after a
    # is dropped.
    zeros = optax.tree.zeros_like(updates)
    zero_update, _ = tx.update(zeros, inner, params, **extra_args)
    # [3] This worker's part of the look-ahead moves by u + a - a_before; the
    # server subtracts the message, so the signs are reversed.
    message = jax.tree.map(
      lambda before, u, after: (before - u - after).astype(before.dtype),
      state.ahead,
      update,
      zero_update,
    )
    # A scheduled rate is wider than the narrowest parameters.
    ahead = optax.tree.cast_like(zero_update, state.ahead)
    return message, SlimState(inner, ahead)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class VelocityState(NamedTuple):
  """State of `velocity_lookahead`."""

  count: jax.Array  # type: ignore[assignment] # int32[], updates made
  momentum: optax.OptState  # of the momentum transform
  rate: optax.OptState  # of the scaling by the learning rate


def velocity_lookahead(
  momentum: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  velocity: Callable[[optax.OptState, jax.Array], optax.Updates],
) -> base.Algorithm:
  """Sends params - eta velocity, with eta of the next update.

    params <- params - eta momentum(g);   send params - eta velocity

  Args:
    momentum: turns gradients into velocities that do not contain the learning
      rate, like `optax.trace`.
    learning_rate: eta, a number, or a schedule over updates.
    velocity: (state of `momentum`, worker int32[]) -> the velocity to
      subtract, like the parameters.

  Returns:
    An Algorithm.

  Source:
    Hakimi et al. 2019 (NAG-ASGD, DANA-Zero).

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from asgd import transforms
    >>> algorithm = transforms.velocity_lookahead(
    ...   optax.trace(0.5), 0.5, lambda state, worker: 0.5 * state.trace
    ... )
    >>> now = jnp.float32(8.0)
    >>> update, state = algorithm.update(4.0, algorithm.init(now), now)
    >>> now += update
    >>> ahead = algorithm.send(state, now, worker=jnp.int32(0))
    >>> print(now, ahead)  # v = 4; 8 - 0.5 4, 6 - 0.5 0.5 4
    6.0 5.0
  """
  momentum = optax.with_extra_args_support(momentum)
  # Multiplies by -eta. With a schedule, `rate` has a separate count of updates,
  # which equals `count`.
  scale = optax.scale_by_learning_rate(learning_rate)

  def init(params):
    count = jnp.zeros([], jnp.int32)
    return VelocityState(count, momentum.init(params), scale.init(params))

  def update(updates, state, params=None, **extra_args):
    updates, momentum_state = momentum.update(
      updates, state.momentum, params, **extra_args
    )
    updates, rate = scale.update(updates, state.rate, params)
    return updates, VelocityState(state.count + 1, momentum_state, rate)

  def send(opt_state, params, *, worker):
    # eta of the next update: `count` updates have been made.
    rate = rates.at(learning_rate, opt_state.count)
    velocities = velocity(opt_state.momentum, worker)
    # A float32 rate would widen bfloat16 parameters.
    return jax.tree.map(
      lambda p, v: (p - rate * v).astype(p.dtype), params, velocities
    )

  return base.Algorithm(init, update, send)


class PrecedeState(NamedTuple):
  """State of `precede`."""

  first: optax.OptState  # of the preceding transforms
  then: optax.OptState  # of the algorithm


def precede(
  algorithm: base.Algorithm, *transforms: optax.GradientTransformation
) -> base.Algorithm:
  """Applies transforms to gradients before an Algorithm; keeps its send rule.

    params <- params + algorithm(last(... first(g)))

  `optax.chain` would drop the Algorithm's send rule.

  Args:
    algorithm: any. Its send rule reads the state of `algorithm` alone, so a
      look-ahead predicts messages to which no transform was applied.
    *transforms: applied to the gradient, the first one first. A transform that
      takes extra args gets the Delay.

  Returns:
    An Algorithm; without transforms, `algorithm` itself.

  Source:
    none.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> algorithm = asgd.as_algorithm(optax.sgd(0.5))
    >>> algorithm = asgd.precede(algorithm, optax.clip(2.0))
    >>> now = jnp.float32(8.0)
    >>> print(algorithm.update(4.0, algorithm.init(now), now)[0])  # -0.5 2
    -1.0
  """
  if not transforms:
    return algorithm
  # optax.chain passes the Delay to those transforms that take extra args.
  preceding = optax.chain(*transforms)

  def init(params):
    return PrecedeState(preceding.init(params), algorithm.init(params))

  def update(updates, state, params=None, **extra_args):
    updates, first_state = preceding.update(
      updates, state.first, params, **extra_args
    )
    updates, algorithm_state = algorithm.update(
      updates, state.then, params, **extra_args
    )
    return updates, PrecedeState(first_state, algorithm_state)

  def send(opt_state, params, *, worker):
    # The send rule reads the algorithm's state, never `state.first`.
    return algorithm.send(opt_state.then, params, worker=worker)

  # Other code asks whether the send rule is `send_current`.
  if algorithm.send is base.send_current:
    return base.Algorithm(init, update)
  return base.Algorithm(init, update, send)


class DanaMomentumState(NamedTuple):
  """State of `dana_momentum`."""

  velocity: rows_lib.WorkerRows  # row i is v^i, the velocity of worker i
  total: optax.Updates  # v^0 = the sum of all v^i, float32[...] or wider


def dana_momentum(workers: int, decay: float) -> base.Transform:
  """A momentum for each worker, and their running sum.

    v^i <- gamma v^i + g
    v^0 <- v^0 + (v^i new - v^i old),   so that v^0 = sum_j v^j

  The updates equal those of `per_worker(optax.trace(decay), N)`. The state also
  has the sum of all velocities, at a cost that does not grow with N.

  Args:
    workers: N.
    decay: gamma, in [0, 1).

  Returns:
    A transform. The `update` function requires the extra arg `worker`, int32[],
    and returns v^i. The `total` of the state is v^0.

  Source:
    Hakimi et al. 2019, DANA-Zero.

  Example:
    >>> import jax.numpy as jnp
    >>> from asgd import transforms
    >>> tx = transforms.dana_momentum(workers=2, decay=0.5)
    >>> state = tx.init(jnp.float32(0.0))
    >>> for worker, g in ((0, 4.0), (1, 8.0), (0, 2.0)):
    ...   v, state = tx.update(
    ...     jnp.float32(g), state, worker=jnp.int32(worker)
    ...   )
    ...   print(v, state.total)  # v^0: 4, 4 + 8, 12 + (4 - 4)
    4.0 4.0
    8.0 12.0
    4.0 12.0
  """
  checks.integer("workers", workers)
  checks.fraction("momentum", decay)

  def init_fn(params):
    # All velocities are 0, so the first look-ahead equals the parameters.
    zeros = optax.tree.zeros_like(params)
    rows = rows_lib.make_rows(zeros, workers)
    return DanaMomentumState(rows, running_sums.zeros(params))

  def update_fn(updates, state, params=None, *, worker, **extra_args):
    del params, extra_args
    velocity_before, rows = rows_lib.read(state.velocity, worker)
    # [1] v^i <- gamma v^i + g
    velocity_after = jax.tree.map(
      lambda v, g: decay * v + g, velocity_before, updates
    )
    # [2] v^0 <- v^0 + (v^i new - v^i old). Adding the change costs one row; a
    # sum over workers would cost N.
    total = running_sums.change(state.total, velocity_after, velocity_before)
    velocity = rows_lib.write(rows, worker, velocity_after)
    return velocity_after, DanaMomentumState(velocity, total)

  return base.Transform(init_fn, update_fn)  # type: ignore[arg-type]
