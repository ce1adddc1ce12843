"""The worker: everything between receiving a ticket and sending a message.

A gradient worker sends one gradient for each ticket. Other workers run a local
optimizer on the several batches of a job. Their message is the displacement of
the parameters (parameter averaging, DiLoCo, FedAsync), the sum of the gradients
(Downpour), or a pull on the server's parameters (EASGD).

Index letters used in shape comments:
  H  steps of a job, each on one batch
  B  examples of a batch
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from asgd import base, checks
from asgd.losses import Aux as Aux  # for users' losses
from asgd.losses import Loss, as_loss

_State = TypeVar("_State")
_Work = tuple[_State, optax.Updates, base.Metrics]


class WorkerState(NamedTuple):
  """State of `gradient_worker`."""

  at_worker: optax.OptState  # of the transform: momentum, residual, ...


def job_key(root: jax.Array, worker: jax.Array, job: jax.Array) -> jax.Array:
  """Returns the random key of one job.

  It is a function of (seed, worker, job) only, so that no order of events and
  no restart can change it.

  Args:
    root: the key of the seed, which is not consumed.
    worker: int32[].
    job: int32[].

  Returns:
    A key, which the job's loss consumes.

  Example:
    >>> import jax
    >>> from asgd import worker
    >>> root = jax.random.key(0)
    >>> keys = [worker.job_key(root, i, job=5) for i in (0, 1, 0)]
    >>> bool(keys[0] == keys[1]), bool(keys[0] == keys[2])
    (False, True)
  """
  return jax.random.fold_in(jax.random.fold_in(root, worker), job)


def gradient_worker(
  loss: Loss, at_worker: optax.GradientTransformation | None = None
) -> base.Worker:
  """A worker that sends one gradient per message, passed through a transform.

      message = at_worker(grad loss(sent params, batch))

  Args:
    loss: differentiated with respect to the (weights of the) parameters; in any
      form that `as_loss` accepts.
    at_worker: a transform with a state, such as DANA-Slim's momentum. Its
      update gets the sent parameters as `params` and as the extra arg
      `sent_params`, and the ticket's `version`, int32[].

  Returns:
    A Worker. Its message has the structure of the parameters; the `stats` of a
    message of type `Variables` are those of the batch.

  Raises:
    LossError: see `as_loss`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> worker = asgd.gradient_worker(lambda w, batch: 0.5 * (w - batch) ** 2)
    >>> w = jnp.float32(8.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), w)
    >>> state, message, metrics = worker.work(
    ...   worker.init(w), ticket, jnp.float32(2.0), jax.random.key(0)
    ... )
    >>> print(message, metrics.loss)  # 8 - 2, (8 - 2)^2 / 2
    6.0 18.0
  """
  loss_fn = as_loss(loss)
  transform = optax.with_extra_args_support(at_worker or optax.identity())

  def init(params: base.Params) -> WorkerState:
    return WorkerState(transform.init(base.weights_of(params)))

  def work(
    state: WorkerState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Work[WorkerState]:
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (value, aux), grads = gradient(ticket.params, batch, key)
    weights = base.weights_of(ticket.params)
    extra = {"version": ticket.version, "sent_params": weights}
    message, transform_state = transform.update(
      base.weights_of(grads), state.at_worker, weights, **extra
    )
    message = _message(ticket, message, aux.stats)
    return WorkerState(transform_state), message, base.Metrics(value)

  return base.Worker(init, work)


class Uneven(NamedTuple):
  """The batches of a job, if their number differs between workers."""

  batches: Any  # [H, B, ...], H that of this worker


def weighted(worker: base.Worker, batch_size: int) -> base.Worker:
  """Scales each message of a worker by its number of examples.

      message <- B / batch_size message,   B the examples of its batches

  If `batch_size` is the average over workers, the mean over workers is then the
  mean over examples. Statistics of BatchNorm are not scaled.

  Args:
    worker: any.
    batch_size: a message of this many examples per batch has weight 1.

  Returns:
    A Worker. ValueError for a size that is no positive integer.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import asgd
    >>> from asgd.worker import weighted
    >>> worker = asgd.gradient_worker(lambda w, batch: (w * batch).mean())
    >>> worker, w = weighted(worker, batch_size=4), jnp.float32(8.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), w)
    >>> _, message, _ = worker.work(
    ...   worker.init(w), ticket, jnp.array([1.0, 3.0]), jax.random.key(0)
    ... )
    >>> print(message)  # 2 / 4 of the mean, 2
    1.0
  """
  checks.integer("batch_size", batch_size)

  def work(
    state: Any, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Work[Any]:
    state, message, metrics = worker.work(state, ticket, batch, key)
    is_uneven = isinstance(batch, Uneven)
    leaf = jax.tree.leaves(batch)[0]
    weight = leaf.shape[int(is_uneven)] / batch_size
    weights = jax.tree.map(lambda x: weight * x, base.weights_of(message))
    return state, base.with_weights(message, weights), metrics

  return worker._replace(work=work)


class _Sums(NamedTuple):
  """Sums over the steps of a job."""

  loss: jax.Array  # float[]
  stats: Any  # BatchNorm's statistics of the batches; () if none
  gradient: Any  # like weights; None unless it is the message


class _Carry(NamedTuple):
  """The state of a job after some of its steps."""

  weights: base.Params
  opt_state: optax.OptState
  sums: Any  # _Sums; None before the first step


# (weights, opt_state, ticket, batch, key) -> the state after one step, or all H
_Step = Callable[
  [base.Params, optax.OptState, base.Ticket, base.Batch, jax.Array], _Carry
]


# Jobs of up to this many steps are unrolled. XLA's CPU backend runs a
# convolution inside a loop 18 (small CNN, 80 against 4.4 ms per step) to 25
# times (ResNet-20, 780 against 31 ms) slower than outside. Each unrolled step
# compiles in 0.06 (MLP) to 0.7 s (ResNet-20): DiLoCo's 500 would take minutes.
_MAX_UNROLLED = 32


def _all_steps(
  step: _Step,
  steps_so_far: _Carry,
  ticket: base.Ticket,
  batch: base.Batch,
  key: jax.Array,
  steps: int,
) -> _Carry:
  """Takes all steps of a job; sums loss, statistics and gradient over them."""

  def add_step(carry: _Carry, xs: tuple[Any, Any]) -> tuple[_Carry, None]:
    h, step_batch = xs
    step_key = jax.random.fold_in(key, h)
    after = step(
      carry.weights, carry.opt_state, ticket, step_batch, step_key
    )
    if carry.sums is not None:
      sums = jax.tree.map(jnp.add, carry.sums, after.sums)
      after = after._replace(sums=sums)
    return after, None

  if steps <= _MAX_UNROLLED:
    for h in range(steps):
      # Step h uses batch h of the job.
      part = jax.tree.map(lambda x, h=h: x[h], batch)
      steps_so_far, _ = add_step(steps_so_far, (h, part))
    return steps_so_far
  # A scan needs a complete carry before the first step: sums of zeros.
  first_batch = jax.tree.map(lambda x: x[0], batch)
  weights, opt_state, _ = steps_so_far
  shapes = jax.eval_shape(step, weights, opt_state, ticket, first_batch, key)
  steps_so_far = steps_so_far._replace(sums=optax.tree.zeros_like(shapes.sums))
  return jax.lax.scan(add_step, steps_so_far, (jnp.arange(steps), batch))[0]


def _make_local_steps(
  loss: Loss, tx: base.Transform, steps: int, *, sum_gradients: bool
) -> _Step:
  """Returns a function that takes all steps of a job. Its loss and statistics
  are means over the steps, its gradient is a sum."""
  gradient = jax.value_and_grad(as_loss(loss), has_aux=True)

  def step(
    weights: base.Params,
    opt_state: optax.OptState,
    ticket: base.Ticket,
    batch: base.Batch,
    key: jax.Array,
  ) -> _Carry:
    model = base.without_state(ticket.params)
    params = base.with_weights(model, weights)
    (value, aux), grads = gradient(params, batch, key)
    grads = base.weights_of(grads)
    sent = base.weights_of(ticket.params)
    updates, opt_state = tx.update(
      grads, opt_state, weights, version=ticket.version, sent_params=sent
    )
    weights = optax.apply_updates(weights, updates)
    gradient_sum = grads if sum_gradients else None
    return _Carry(weights, opt_state, _Sums(value, aux.stats, gradient_sum))

  def local_steps(
    weights: base.Params,
    opt_state: optax.OptState,
    ticket: base.Ticket,
    batch: base.Batch,
    key: jax.Array,
  ) -> _Carry:
    count = steps
    if isinstance(batch, Uneven):
      batch = batch.batches
      count = jax.tree.leaves(batch)[0].shape[0]
    elif steps == 1:
      # Use the same key and operations as a gradient worker.
      return step(weights, opt_state, ticket, batch, key)
    for leaf in jax.tree.leaves(batch):
      if jnp.shape(leaf)[:1] != (count,):
        raise ValueError(
          f"a job of {count} steps needs {count} batches stacked on a leading"
          f" axis, not an array of shape {jnp.shape(leaf)}; make it with"
          " asgd.stacking.job_batches"
        )
    start = _Carry(weights, opt_state, None)
    end = _all_steps(step, start, ticket, batch, key, count)
    total = end.sums
    mean, stats = jax.tree.map(lambda x: x / count, (total.loss, total.stats))
    return end._replace(sums=_Sums(mean, stats, total.gradient))

  return local_steps


def _message(ticket: base.Ticket, weights: base.Params, stats: Any) -> Any:
  """Returns a message in the structure of the parameters that were sent."""
  if isinstance(ticket.params, base.Variables):
    return base.Variables(weights, stats)
  return weights


class LocalState(NamedTuple):
  """State of `local_worker`."""

  inner: optax.OptState  # of the local optimizer; () unless it is kept
  local: optax.Params  # like weights, the worker's after its last job
  accrued: Any = ()  # like weights, unsent gradients; () if each job pushes
  jobs: Any = ()  # int32[], jobs summed in `accrued`


MESSAGES = ("displacement", "gradients")
KEPT, RESET, AVERAGED = STATES = "kept", "reset", "averaged"


def local_worker(
  loss: Loss,
  tx: optax.GradientTransformation,
  *,
  steps: int,
  message: str,
  optimizer_state: str = KEPT,
  push_every: int = 1,
) -> base.Worker:
  """A worker that takes `steps` local optimizer steps between messages.

  A job starts from the ticket's parameters if the ticket is fresh. If the
  worker keeps an earlier ticket, the job starts from the end of the last job:
  Downpour between two fetches, the read-my-writes of SSP. Step h draws from
  fold_in(key, h), and from the key itself if H is 1.

  Args:
    loss: differentiated with respect to the (weights of the) parameters; in
      any form that `as_loss` accepts.
    tx: the local optimizer, learning rate included. Its update gets the extra
      args `version` (int32[], the ticket's) and `sent_params`. Its init may
      depend on shapes only, unless the state is reset.
    steps: H, batches in a job, as `asgd.stacking.job_batches` stacks them.
    message: "displacement" or "gradients". A displacement is the start minus
      the end of the job: an outer gradient in DiLoCo's sign, and SGD with
      learning rate 1 at the server moves the parameters to the end. "gradients"
      is the sum of the job's gradients: Downpour's `accrued` without the
      learning rate, which the server multiplies in once.
    optimizer_state: the state of `tx` that a job begins with: "kept" from the
      last job, "reset", or "averaged" over the messages of the last update;
      parameters and messages then carry the state (`base.carry`).
    push_every: number of jobs with gradients summed into one message: the
      last job sends it, the others send zeros (`asgd.server.pushed`). A fetch
      in between replaces the worker's parameters, not the accrued gradients.
  Returns:
    A Worker. Its message has the structure of the parameters. The loss, and the
    statistics in a message of `Variables`, are means over the batches, each
    computed at the parameters of its step.

  Raises:
    ValueError: for steps or jobs that are not a positive integer, an unknown
      message, displacements of several jobs and, when `work` is traced, a job
      with a different number of batches.
    LossError: see `as_loss`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> worker = asgd.local_worker(
    ...   lambda params, batch: 0.5 * (params - batch) ** 2,
    ...   optax.sgd(0.5), steps=2, message="displacement",
    ... )
    >>> params = jnp.float32(4.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), params)
    >>> _, message, metrics = worker.work(
    ...   worker.init(params), ticket, jnp.zeros(2), jax.random.key(0)
    ... )
    >>> print(message, metrics.loss)  # 4 -> 2 -> 1; (8 + 2) / 2
    3.0 5.0
  """
  checks.integer("steps", steps)
  checks.one_of("message", message, MESSAGES)
  checks.one_of("optimizer_state", optimizer_state, STATES)
  averages = optimizer_state == AVERAGED
  tx = optax.with_extra_args_support(tx)
  sum_gradients = message == "gradients"
  checks.integer("push_every", push_every)
  if push_every > 1 and not sum_gradients:
    raise ValueError(
      f"push_every must be 1 for displacements, not {push_every}: only"
      " gradients are summed over jobs; use message='gradients'"
    )
  local_steps = _make_local_steps(loss, tx, steps, sum_gradients=sum_gradients)

  def init(params: base.Params) -> LocalState:
    weights = base.weights_of(params)
    inner = tx.init(weights) if optimizer_state == KEPT else ()
    zeros = optax.tree.zeros_like(weights)
    if push_every == 1:
      return LocalState(inner, zeros)
    return LocalState(inner, zeros, zeros, jnp.int32(0))

  def work(
    state: LocalState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Work[LocalState]:
    sent = base.weights_of(ticket.params)
    # With a kept ticket the job starts where the last one ended.
    start = optax.tree.where(ticket.fresh, sent, state.local)
    inner = state.inner if optimizer_state == KEPT else tx.init(start)
    if averages:
      inner = base.state_of(ticket.params)
    end, inner, sums = local_steps(start, inner, ticket, batch, key)
    content = sums.gradient if sum_gradients else optax.tree.sub(start, end)
    stats = base.StatsWithState(sums.stats, inner) if averages else sums.stats
    inner, accrued, jobs = inner if optimizer_state == KEPT else (), (), ()
    # Send the sum with the last of `push_every` jobs, zeros with the others.
    if push_every > 1:
      jobs = (state.jobs + 1) % push_every
      total = optax.tree.add(state.accrued, content)
      zeros = optax.tree.zeros_like(content)
      content = optax.tree.where(jobs == 0, total, zeros)
      accrued = optax.tree.where(jobs == 0, zeros, total)
    state = LocalState(inner, end, accrued, jobs)
    return state, _message(ticket, content, stats), base.Metrics(sums.loss)

  return base.Worker(init, work, base.OWN)


class ElasticState(NamedTuple):
  """State of `elastic_worker`."""

  inner: optax.OptState  # of the local optimizer
  local: optax.Params  # like weights, x^i
  started: jax.Array  # bool[], False until the first ticket has set x^i


def elastic_worker(
  loss: Loss, tx: optax.GradientTransformation, *, steps: int, alpha: float
) -> base.Worker:
  """A worker with separate parameters, tied to the server's by a spring.

      H steps of tx on x^i;   d = alpha (x^i - x~);   x^i <- x^i - d
      message = -d, for a server of SGD with learning rate 1:   x~ <- x~ + d

  It is the worker of asynchronous EASGD; with Nesterov's momentum in `tx`, of
  EAMSGD. x^i starts at the worker's first ticket, and later tickets do not
  replace x^i; the centre x~ is the server's parameters.

  It differs from the paper in two points:
  - In the paper a worker reads and moves the centre at once. Here x~ in d is
    the ticket's, as old as the job; this age is recorded as staleness.
  - In the paper the step after an exchange takes its gradient at x^i before the
    exchange; here, at x^i after it.

  Args:
    loss: differentiated with respect to the (weights of the) parameters; in
      any form that `as_loss` accepts.
    tx: the local optimizer, learning rate included, as in `local_worker`. With
      `nesterov`, the x^i of `optax.sgd` is the paper's look-ahead x^i + delta
      v.
    steps: H, batches in a job, as `asgd.stacking.job_batches` stacks them; tau
      in the paper.
    alpha: in (0, 1]. An exchange moves each side by this part of the distance.

  Returns:
    A Worker. Its message has the structure of the parameters.

  Raises:
    ValueError: for a value out of its range and, when `work` is traced, a job
      with a different number of batches.
    LossError: see `as_loss`.

  Source:
    Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS
    2015, arXiv:1412.6651, algorithms 1 (EASGD) and 2 (EAMSGD).

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import asgd
    >>> worker = asgd.elastic_worker(
    ...   lambda x, batch: x * batch, optax.sgd(0.5), steps=1, alpha=0.25
    ... )
    >>> centre = jnp.float32(8.0)
    >>> ticket = asgd.Ticket(jnp.int32(0), jnp.int32(0), centre)
    >>> state, message, _ = worker.work(
    ...   worker.init(centre), ticket, jnp.float32(8.0), jax.random.key(0)
    ... )
    >>> print(state.local, message)  # x = 4, d = 0.25 (4 - 8); 4 - d, -d
    5.0 1.0
  """
  checks.integer("steps", steps)
  checks.portion("alpha", alpha, ": beyond 1 an exchange overshoots")
  tx = optax.with_extra_args_support(tx)
  local_steps = _make_local_steps(loss, tx, steps, sum_gradients=False)

  def init(params: base.Params) -> ElasticState:
    weights = base.weights_of(params)
    zeros = optax.tree.zeros_like(weights)
    return ElasticState(tx.init(weights), zeros, jnp.bool_(False))

  def work(
    state: ElasticState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Work[ElasticState]:
    centre = base.weights_of(ticket.params)
    start = optax.tree.where(state.started, state.local, centre)
    end, inner, sums = local_steps(start, state.inner, ticket, batch, key)
    # The same pull moves both sides: x^i here, the centre by the message.
    pull = jax.tree.map(lambda x, c: alpha * (c - x), end, centre)  # -d
    state = ElasticState(inner, optax.tree.add(end, pull), jnp.bool_(True))
    return state, _message(ticket, pull, sums.stats), base.Metrics(sums.loss)

  return base.Worker(init, work, base.NEVER)
