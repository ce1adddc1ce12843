"""The worker: everything between receiving a ticket and sending a message.

A gradient worker sends one gradient for each ticket. The others work locally: a
job is several batches, on which the worker runs an optimizer of its own, and
its message is the displacement (parameter averaging, DiLoCo, FedAsync), the sum
of the gradients (Downpour) or a pull on the server's parameters (EASGD).

Index letters used in shape comments:
  H  steps of a job, each on one batch
  B  examples of a batch
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from asgd import base, checks


class Aux(NamedTuple):
  """What a loss returns beside its value."""

  stats: Any  # the batch's own statistics, as `Variables.stats`; () if none


Loss = Callable[
  [optax.Params, base.Batch, jax.Array], tuple[jax.Array, Aux]
]  # (params, batch, key) -> (float[], Aux)


class LossError(ValueError):
  """A loss takes or returns something else than losses do."""


_State = TypeVar("_State")
_Worked = tuple[_State, optax.Updates, base.Metrics]
Batches = Callable[[int, int], base.Batch]  # (worker, job) -> NumPy arrays
_KEYS = "key", "rng"  # what a third argument that is optional may be called
_FORMS = "(params, batch) or (params, batch, key)"


def _takes_key(loss: Callable[..., Any]) -> bool:
  """Whether a loss is to be given a key; LossError for other arguments."""
  if not callable(loss):
    raise LossError(
      f"the loss must be a function {_FORMS}, not {checks.shown(loss)}"
    )
  try:
    parameters = inspect.signature(loss).parameters.values()
  except (TypeError, ValueError):  # of a builtin
    return False
  kind, empty = inspect.Parameter, inspect.Parameter.empty
  place = kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD
  own = [each for each in parameters if each.kind in place]
  needed = [each for each in own if each.default is empty]
  rest = any(each.kind is kind.VAR_POSITIONAL for each in parameters)
  named = any(
    each.kind is kind.KEYWORD_ONLY and each.default is empty
    for each in parameters
  )
  if len(needed) > 3 or named or (len(own) < 2 and not rest):
    found = ", ".join(map(str, parameters)) or "nothing"
    raise LossError(
      f"the loss must be a function {_FORMS}; it takes ({found}). Bind other"
      " arguments with functools.partial"
    )
  return len(needed) == 3 or (len(own) > 2 and own[2].name in _KEYS)


def as_loss(loss: Callable[..., Any]) -> Loss:
  """Returns a loss in the one form that workers call, (params, batch, key) ->
  (value, Aux), from any of a user's.

  It may take a key or not, and return a scalar or (scalar, aux). Of parameters
  that are `Variables`, aux is the batch's own statistics; of others whatever a
  loss says beside its value is dropped. LossError is raised for a function of
  other arguments, and when it is traced for a value that is no scalar.

  Example:
    >>> loss = as_loss(lambda params, batch: (params * batch).sum())
    >>> value, aux = loss(jnp.ones(2), jnp.ones(2), jax.random.key(0))
    >>> print(value, aux)
    2.0 Aux(stats=())
  """
  takes_key = _takes_key(loss)

  def adapted(
    params: base.Params, batch: base.Batch, key: jax.Array
  ) -> tuple[jax.Array, Aux]:
    out = loss(params, batch, key) if takes_key else loss(params, batch)
    pair = isinstance(out, (tuple, list)) and len(out) == 2
    value, aux = out if pair else (out, Aux(()))
    _check_value(value)
    if isinstance(params, base.Variables):
      stats = aux.stats if isinstance(aux, Aux) else aux
      _check_stats(stats, params.stats)
      return value, Aux(stats)
    return value, aux if isinstance(aux, Aux) else Aux(())

  return adapted


def _check_value(value: Any) -> None:
  if not hasattr(value, "dtype") and not isinstance(value, float):
    raise LossError(
      "the loss must return a scalar, or (scalar, aux), not"
      f" {checks.shown(value)}"
    )
  if jnp.shape(value):
    raise LossError(
      f"the loss must be a scalar, not an array of shape {jnp.shape(value)}:"
      " return its mean, losses.mean()"
    )
  if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
    raise LossError(
      f"the loss must be a float, not {jnp.result_type(value)}: it cannot be"
      " differentiated"
    )


def _check_stats(stats: Any, like: Any) -> None:
  def shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]

  if shapes(stats) != shapes(like):
    raise LossError(
      "the parameters are asgd.Variables, so the loss must return (value,"
      " stats), the batch's own statistics in the structure and shapes of"
      " Variables.stats"
    )


class WorkerState(NamedTuple):
  """State of `gradient_worker`."""

  at_worker: optax.OptState  # of the transform: momentum, residual, ...


def job_key(root: jax.Array, worker: jax.Array, job: jax.Array) -> jax.Array:
  """The key of one piece of work: a function of (seed, worker, job) only, so
  that no order of events and no restart can change it. Consumes nothing."""
  return jax.random.fold_in(jax.random.fold_in(root, worker), job)


def gradient_worker(
  loss: Loss, at_worker: optax.GradientTransformation | None = None
) -> base.Worker:
  """A worker whose message is one gradient, passed through `at_worker`; the
  loss is of any form that `as_loss` takes.

  The transform has a state of its own and sees the parameters that were sent,
  also as the extra arg `sent_params`, beside `version`, int32[], the ticket's:
  DANA-Slim's momentum, for one. The message has the structure of the
  parameters; if those are `Variables`, its `stats` are the batch's own.
  """
  adapted = as_loss(loss)
  transform = optax.with_extra_args_support(at_worker or optax.identity())

  def init(params: base.Params) -> WorkerState:
    return WorkerState(transform.init(base.weights_of(params)))

  def work(
    state: WorkerState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Worked[WorkerState]:
    gradient = jax.value_and_grad(adapted, has_aux=True)
    (value, aux), grads = gradient(ticket.params, batch, key)
    weights = base.weights_of(ticket.params)
    out, after = transform.update(
      base.weights_of(grads),
      state.at_worker,
      weights,
      version=ticket.version,
      sent_params=weights,
    )
    out = _message(ticket, out, aux.stats)
    return WorkerState(after), out, base.Metrics(value)

  return base.Worker(init, work)


def stack(batches: Sequence[Any]) -> Any:
  """Stacks trees of NumPy arrays, at least one, on a new leading axis."""
  return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def job_batches(batches: Batches, steps: int) -> Batches:
  """Makes jobs of H = `steps` batches, 1 or more, out of jobs of one.

  `batches` is (worker, job) -> NumPy arrays, as of `Problem.batches`, and so is
  the result: its job j is the jobs j H, ..., j H + H - 1, stacked on a new
  leading axis, [H, B, ...]. With one step it is `batches` itself.
  """
  checks.whole("steps", steps)
  if steps == 1:
    return batches

  def batch(worker: int, job: int) -> base.Batch:
    return stack([batches(worker, job * steps + h) for h in range(steps)])

  return batch


class Uneven(NamedTuple):
  """A job of as many batches as this worker takes, not as all take."""

  batches: Any  # [H, B, ...], H of this worker


def weighted(worker: base.Worker, batch_size: int) -> base.Worker:
  """Has each message of a worker count as the examples that it is of.

  A message of batches of B examples is multiplied by B / `batch_size`, so that
  the mean over workers is the mean over examples if `batch_size` is that of a
  worker on average. What several batches add up to counts them already.
  Statistics of BatchNorm stay those of the batch.
  """
  checks.whole("batch_size", batch_size)

  def work(
    state: Any, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Worked[Any]:
    state, message, metrics = worker.work(state, ticket, batch, key)
    several = isinstance(batch, Uneven)
    leaf = jax.tree.leaves(batch)[0]
    weight = leaf.shape[int(several)] / batch_size
    weights = jax.tree.map(lambda x: weight * x, base.weights_of(message))
    return state, base.with_weights(message, weights), metrics

  return base.Worker(worker.init, work)


class _Sums(NamedTuple):
  """Sums over the steps of a job."""

  loss: jax.Array  # float[]
  stats: Any  # the batch's own statistics; () if none
  gradient: Any  # like weights; None unless it is the message


class _Stepped(NamedTuple):
  """What is left of a job after some of its steps."""

  weights: base.Params
  opt_state: optax.OptState
  sums: Any  # _Sums; None before the first step


# (weights, opt_state, ticket, batch, key) -> the same after a step, or after H
_Step = Callable[
  [base.Params, optax.OptState, base.Ticket, base.Batch, jax.Array], _Stepped
]


# Up to so many steps are unrolled. XLA's CPU backend runs a convolution inside
# a loop 18 (small CNN, 80 against 4.4 ms a step) to 25 times (ResNet-20, 780
# against 31 ms) slower than outside. Compiling one more copy of a step takes
# 0.06 s (MLP), 0.1 s (CNN) or 0.7 s (ResNet-20), which one or two jobs save
# again. DiLoCo's 500 steps, unrolled, would compile for minutes.
_UNROLLED = 32


def _make_step(
  loss: Loss, tx: base.Transform, *, sum_gradients: bool
) -> _Step:
  """Returns one step of a job; the gradient is kept if it is to be summed."""
  gradient = jax.value_and_grad(as_loss(loss), has_aux=True)

  def step(
    weights: base.Params,
    opt_state: optax.OptState,
    ticket: base.Ticket,
    batch: base.Batch,
    key: jax.Array,
  ) -> _Stepped:
    params = base.with_weights(ticket.params, weights)
    (value, aux), grads = gradient(params, batch, key)
    grads = base.weights_of(grads)
    sent = base.weights_of(ticket.params)
    updates, opt_state = tx.update(
      grads, opt_state, weights, version=ticket.version, sent_params=sent
    )
    weights = optax.apply_updates(weights, updates)
    gradient_sum = grads if sum_gradients else None
    return _Stepped(weights, opt_state, _Sums(value, aux.stats, gradient_sum))

  return step


def _all_steps(
  step: _Step,
  begun: _Stepped,
  ticket: base.Ticket,
  batch: base.Batch,
  key: jax.Array,
  steps: int,
) -> _Stepped:
  """Takes all steps of a job; loss, statistics and gradient are sums."""

  def add_step(carry: _Stepped, xs: tuple[Any, Any]) -> tuple[_Stepped, None]:
    h, part = xs
    after = step(
      carry.weights, carry.opt_state, ticket, part, jax.random.fold_in(key, h)
    )
    if carry.sums is not None:
      sums = jax.tree.map(jnp.add, carry.sums, after.sums)
      after = after._replace(sums=sums)
    return after, None

  if steps <= _UNROLLED:
    for h in range(steps):
      part = jax.tree.map(lambda x, h=h: x[h], batch)
      begun, _ = add_step(begun, (h, part))
    return begun
  first = jax.tree.map(lambda x: x[0], batch)
  weights, opt_state, _ = begun
  shapes = jax.eval_shape(step, weights, opt_state, ticket, first, key)
  begun = begun._replace(sums=optax.tree.zeros_like(shapes.sums))
  return jax.lax.scan(add_step, begun, (jnp.arange(steps), batch))[0]


def _make_local_steps(
  loss: Loss, tx: base.Transform, steps: int, *, sum_gradients: bool
) -> _Step:
  """Returns the steps of a job: loss and statistics are means over them, the
  gradient is a sum."""
  step = _make_step(loss, tx, sum_gradients=sum_gradients)

  def local_steps(
    weights: base.Params,
    opt_state: optax.OptState,
    ticket: base.Ticket,
    batch: base.Batch,
    key: jax.Array,
  ) -> _Stepped:
    count = steps
    if isinstance(batch, Uneven):
      batch = batch.batches
      count = jax.tree.leaves(batch)[0].shape[0]
    elif steps == 1:
      # The same key and the same operations as a gradient worker's.
      return step(weights, opt_state, ticket, batch, key)
    for leaf in jax.tree.leaves(batch):
      if jnp.shape(leaf)[:1] != (count,):
        raise ValueError(
          f"a job of {count} steps is as many batches, stacked on a leading"
          f" axis, not an array of shape {jnp.shape(leaf)}; make it with"
          " asgd.worker.job_batches"
        )
    begun = _Stepped(weights, opt_state, None)
    done = _all_steps(step, begun, ticket, batch, key, count)
    total = done.sums
    mean, stats = jax.tree.map(lambda x: x / count, (total.loss, total.stats))
    return done._replace(sums=_Sums(mean, stats, total.gradient))

  return local_steps


def _message(
  ticket: base.Ticket, weights: base.Params, stats: Any
) -> base.Params:
  """Returns a message in the structure of the parameters that were sent."""
  if isinstance(ticket.params, base.Variables):
    return base.Variables(weights, stats)
  return weights


class LocalState(NamedTuple):
  """State of `local_worker`."""

  inner: optax.OptState  # of the local optimizer; () if it starts anew
  local: optax.Params  # like weights, where the worker stopped


MESSAGES = ("displacement", "gradients")


def local_worker(
  loss: Loss,
  tx: optax.GradientTransformation,
  *,
  steps: int,
  message: str,
  keep_state: bool = True,
) -> base.Worker:
  """A worker that takes `steps` optimizer steps of its own between messages.

  It starts from the ticket's parameters if the ticket is fresh. If it keeps an
  earlier ticket it goes on from where it stopped: Downpour between two fetches,
  the read-my-writes of SSP. Step h draws from fold_in(key, h), and from the key
  itself if H is 1.

  Args:
    loss: differentiated with respect to the (weights of the) parameters; in
      any form that `as_loss` takes.
    tx: the local optimizer, learning rate included. Its update is told, as
      extra args, `version` (int32[], the ticket's) and `sent_params`. Unless
      `keep_state=False`, its init reads shapes only.
    steps: H, batches in a job, as `job_batches` stacks them.
    message: "displacement", start minus end of the job: an outer gradient (in
      DiLoCo's sign), which SGD with learning rate 1 at the server turns into
      the end. Or "gradients", their sum on the way: Downpour's `accrued`
      without the learning rate, which the server multiplies in, once.
    keep_state: of `tx`, from job to job; otherwise each starts with a new one.

  The message has the structure of the parameters. The loss and the statistics
  in a message of `Variables` are means over the batches, each where the worker
  was by then.

  Example:
    >>> import jax.numpy as jnp
    >>> def loss(params, batch, key):
    ...   return 0.5 * (params - batch) ** 2, Aux(())
    >>> worker = local_worker(
    ...   loss, optax.sgd(0.5), steps=2, message="displacement"
    ... )
    >>> params = jnp.float32(4.0)
    >>> ticket = base.Ticket(jnp.int32(0), jnp.int32(0), params)
    >>> _, message, metrics = worker.work(
    ...   worker.init(params), ticket, jnp.zeros(2), jax.random.key(0)
    ... )
    >>> print(message, metrics.loss)  # 4 -> 2 -> 1; (8 + 2) / 2
    3.0 5.0
  """
  checks.whole("steps", steps)
  checks.one_of("message", message, MESSAGES)
  tx = optax.with_extra_args_support(tx)
  sum_gradients = message == "gradients"
  local_steps = _make_local_steps(loss, tx, steps, sum_gradients=sum_gradients)

  def init(params: base.Params) -> LocalState:
    weights = base.weights_of(params)
    inner = tx.init(weights) if keep_state else ()
    return LocalState(inner, optax.tree.zeros_like(weights))

  def work(
    state: LocalState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Worked[LocalState]:
    sent = base.weights_of(ticket.params)
    start = optax.tree.where(ticket.fresh, sent, state.local)
    inner = state.inner if keep_state else tx.init(start)
    end, inner, sums = local_steps(start, inner, ticket, batch, key)
    out = sums.gradient if sum_gradients else optax.tree.sub(start, end)
    state = LocalState(inner if keep_state else (), end)
    return state, _message(ticket, out, sums.stats), base.Metrics(sums.loss)

  return base.Worker(init, work)


class ElasticState(NamedTuple):
  """State of `elastic_worker`."""

  inner: optax.OptState  # of the local optimizer
  local: optax.Params  # like weights, x^i
  started: jax.Array  # bool[], False until the first ticket gave it x^i


def elastic_worker(
  loss: Loss, tx: optax.GradientTransformation, *, steps: int, alpha: float
) -> base.Worker:
  """A worker with parameters of its own, tied to the server's by a spring.

  Asynchronous EASGD (Zhang, Choromanska, LeCun, "Deep learning with Elastic
  Averaging SGD", NIPS 2015, algorithm 1); with Nesterov's momentum in `tx`,
  EAMSGD (algorithm 2). A job is H steps on x^i, which is the worker's for good
  and starts as its first ticket, and then an exchange with the centre x~, the
  server's parameters:

    d = alpha (x^i - x~);   x^i <- x^i - d;   x~ <- x~ + d.

  The message is -d, a gradient for a server of SGD with learning rate 1.

  It differs from the paper in two points. There a worker reads and moves the
  centre at once; here x~ in d is the ticket's, as old as the job, an age that
  is recorded as staleness. And there the step that follows an exchange takes
  its gradient where x^i was before it; here, where x^i is.

  The arguments are those of `local_worker`; `steps` is tau of the paper, and
  alpha in (0, 1]. `optax.sgd` with `nesterov` has the paper's look-ahead,
  x^i + delta v, for its x^i.
  """
  checks.whole("steps", steps)
  if not 0 < alpha <= 1:
    raise ValueError(
      f"alpha must be in (0, 1], not {alpha}: beyond 1 an exchange overshoots"
    )
  tx = optax.with_extra_args_support(tx)
  local_steps = _make_local_steps(loss, tx, steps, sum_gradients=False)

  def init(params: base.Params) -> ElasticState:
    weights = base.weights_of(params)
    zeros = optax.tree.zeros_like(weights)
    return ElasticState(tx.init(weights), zeros, jnp.bool_(False))

  def work(
    state: ElasticState, ticket: base.Ticket, batch: base.Batch, key: jax.Array
  ) -> _Worked[ElasticState]:
    centre = base.weights_of(ticket.params)
    start = optax.tree.where(state.started, state.local, centre)
    end, inner, sums = local_steps(start, state.inner, ticket, batch, key)
    pull = jax.tree.map(lambda x, c: alpha * (c - x), end, centre)  # -d
    state = ElasticState(inner, optax.tree.add(end, pull), jnp.bool_(True))
    return state, _message(ticket, pull, sums.stats), base.Metrics(sums.loss)

  return base.Worker(init, work)
