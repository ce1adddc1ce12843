"""Workers that take steps of their own between two messages."""

from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, orders, simulator, stacking, transforms
from asgd import worker as worker_lib
from asgd.algorithms import local_work
from asgd.algorithms.sgd import sgd
from asgd.orders import durations

pytestmark = pytest.mark.usefixtures("float64")

KEY = jax.random.key(0)
SEND, RECEIVE, KEEP = base.SEND, base.RECEIVE, base.KEEP
NAMES = (
  *("downpour", "model_averaging", "slowmo", "easgd", "diloco", "async_diloco"),
  *("fedasync", "fedbuff", "worker_optimizer"),
)
SHORT = {  # jobs of three steps, and every part of the recipe in use
  "downpour": dict(push_every=3, fetch_every=6),
  "model_averaging": dict(steps=3, momentum=0.9),
  "slowmo": dict(steps=3),
  "easgd": dict(steps=3, momentum=0.9),
  "diloco": dict(steps=3),
  "async_diloco": dict(steps=3),
  "fedasync": dict(steps=3, proximal=0.1),
  "fedbuff": dict(steps=3),
  "worker_optimizer": dict(steps=3, momentum=0.9),
}


def quadratic(params, batch, key):
  """Half the square distance to the batch, a number: the gradient is w - b."""
  del key
  return 0.5 * jnp.sum((params - batch) ** 2), worker_lib.Aux(())


def trace_of(*rows):
  """A trace from (worker, job, action)."""
  trace = kit.trace(
    *(f"{row},{w},{j},{base.ACTIONS[a]}" for row, (w, j, a) in enumerate(rows))
  )
  orders.check(trace)
  return trace


def run(recipe, trace, batches, params, workers=1, loss=quadratic):
  """Replays a whole trace; `batches` are of the steps by their numbers, or a
  number that all steps pull to."""
  host = simulator.make_host(recipe.server(), recipe.make_worker(loss))

  if recipe.carried:
    params = base.carry(params, recipe.carried(params))

  def batch(worker, job):
    return np.full(1, batches) if np.ndim(batches) == 0 else batches[job]

  return simulator.run_whole(
    *(host, params, workers, trace),
    batch=stacking.job_batches(batch, recipe.steps),
    root=KEY,
  )


def ticket(params, version=0, *, fresh=True):
  return base.Ticket(jnp.int32(0), jnp.int32(version), params, np.bool_(fresh))


def work(worker, params, batch, state=None, **options):
  """A job from parameters: (the worker's state, its message, metrics)."""
  state = worker.init(params) if state is None else state
  return worker.work(state, ticket(params, **options), batch, KEY)


def local(tx, steps, message="displacement", loss=quadratic, **options):
  return worker_lib.local_worker(
    loss, tx, steps=steps, message=message, **options
  )


def one_after_the_other(messages):
  return orders.fixed_delay(delay=0, messages=messages)


close = partial(kit.close, rtol=1e-13, atol=1e-15)


# Jobs of several batches.


def test_a_job_is_as_many_consecutive_batches():
  one = lambda worker, job: (np.full((4, 2), job), np.full(4, worker))  # noqa: E731
  x, y = stacking.job_batches(one, 3)(7, 2)
  assert x.shape == (3, 4, 2)
  assert y.shape == (3, 4)
  np.testing.assert_array_equal(x[:, 0, 0], [6, 7, 8])
  assert (y == 7).all()
  assert stacking.job_batches(one, 1) is one


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_must_be_a_positive_whole_number(steps):
  tx = optax.sgd(0.1)
  for make in (
    lambda: stacking.job_batches(None, steps),
    lambda: worker_lib.elastic_worker(quadratic, tx, steps=steps, alpha=0.1),
    lambda: local(tx, steps, "gradients"),
  ):
    with pytest.raises(ValueError, match="steps must be a positive whole"):
      make()


def test_what_is_wrong_with_a_local_worker_is_named():
  tx = optax.sgd(0.1)
  with pytest.raises(ValueError, match="displacement.*not 'gradient'"):
    local(tx, 1, "gradient")
  with pytest.raises(ValueError, match="must be 1 for displacements, not 2"):
    local(tx, 1, push_every=2)
  for alpha in (0.0, 1.5, float("nan")):
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
      worker_lib.elastic_worker(quadratic, tx, steps=1, alpha=alpha)


@pytest.mark.parametrize("batch", [jnp.zeros(2), jnp.zeros(())])
def test_a_job_of_the_wrong_length_is_refused(batch):
  worker = local(optax.sgd(0.1), 3, "gradients")
  with pytest.raises(ValueError, match="a job of 3 steps needs 3 batches"):
    work(worker, jnp.zeros(2), batch)


# Many steps are the optimizer's.


def features(seed, batches, size=8):
  """Batches of a least-squares problem: float64[batches, size, 3 + 1]."""
  return np.random.default_rng(seed).normal(size=(batches, size, 4))


def least_squares(params, batch, key):
  del key
  residual = batch[:, :3] @ params["w"] + params["b"] - batch[:, 3]
  return 0.5 * jnp.mean(residual**2), worker_lib.Aux(())


LINE = {"w": np.array([1.0, -2.0, 0.5]), "b": np.array(0.25)}


def optimize(tx, params, batches):
  """A plain optax loop; returns parameters and losses."""

  @jax.jit
  def step(params, state, batch):
    grad = jax.value_and_grad(least_squares, has_aux=True)
    (value, _), grads = grad(params, batch, None)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = jax.tree.map(jnp.asarray, params)
  state, losses = tx.init(params), []
  for batch in batches:
    params, state, value = step(params, state, batch)
    losses.append(float(value))
  return params, losses


@pytest.mark.parametrize("steps", [1, 5, worker_lib._MAX_UNROLLED + 3])
def test_one_worker_is_a_plain_run_of_its_optimizer(steps):
  batches = features(0, 4 * steps)
  tx = optax.adamw(0.05, weight_decay=0.1)
  expected, losses = optimize(tx, LINE, batches)
  recipe = local_work.displacement_recipe(sgd(1.0), tx, steps)
  trace = one_after_the_other(4)
  simulation, records = run(recipe, trace, batches, LINE, loss=least_squares)
  close(simulation.server.params, expected, rtol=1e-11)
  # The loss of a job is the mean over its steps, each where it was by then.
  close(records.loss, np.reshape(losses, (4, steps)).mean(1), rtol=1e-6)


@pytest.mark.parametrize("message", worker_lib.MESSAGES)
def test_a_loop_takes_the_steps_of_an_unrolled_one(message, monkeypatch):
  def loss(params, batch, key):
    value, _ = least_squares(params, batch, None)
    noise = jax.random.normal(key, (3,))
    return value + noise @ params["w"], worker_lib.Aux(batch.mean(0))

  start = base.Variables(jax.tree.map(jnp.asarray, LINE), jnp.zeros(4))

  def variables_loss(params, batch, key):
    return loss(params.weights, batch, key)

  results = []
  for most in (3, 2):
    monkeypatch.setattr(worker_lib, "_MAX_UNROLLED", most)
    worker = local(optax.sgd(0.1, 0.9), 3, message, variables_loss)
    given = worker.init(start), ticket(start), features(1, 3), KEY
    assert ("scan" in str(jax.make_jaxpr(worker.work)(*given))) == (most < 3)
    results.append(jax.jit(worker.work)(*given))
  close(*results)


def test_each_step_has_its_own_key_and_one_step_has_the_jobs():
  def loss(params, batch, key):
    return params * (batch + jax.random.normal(key)), worker_lib.Aux(())

  for steps in (1, 3):
    worker = local(optax.sgd(0.1), steps, "gradients", loss)
    keys = [KEY]
    if steps > 1:
      keys = [jax.random.fold_in(KEY, h) for h in range(steps)]
    batch = jnp.zeros(()) if steps == 1 else jnp.zeros(steps)
    _, message, _ = work(worker, jnp.float64(1.0), batch)
    close(message, sum(jax.random.normal(key) for key in keys))


def test_statistics_are_the_mean_over_the_batches():
  def loss(params, batch, key):
    del key
    value = jnp.sum(params.weights * batch) + params.stats["mean"]
    return value, worker_lib.Aux({"mean": batch.mean()})

  start = base.Variables(jnp.array([1.0, 2.0]), {"mean": jnp.float64(9.0)})
  batch = jnp.array([[1.0, 3.0], [5.0, 7.0]])
  tx = optax.sgd(0.5)
  elastic = worker_lib.elastic_worker(loss, tx, steps=2, alpha=1.0)
  for worker in (local(tx, 2, loss=loss), elastic):
    state, message, metrics = work(worker, start, batch)
    # The weights go by 0.5 (1 + 5) and 0.5 (3 + 7).
    close(message, base.Variables(np.array([3.0, 5.0]), {"mean": 4.0}))
    # 1 + 6 + 9, and 0.5 * 5 + 0.5 * 7 + 9.
    close(metrics.loss, (16.0 + 15.0) / 2)
    assert not isinstance(state.local, base.Variables)


# Tickets that are kept, and state that is.


def test_a_worker_goes_on_from_where_it_stopped_on_a_ticket_it_keeps():
  worker = local(optax.sgd(0.5), 2)
  params, zeros = jnp.array([4.0]), jnp.zeros((2, 1))
  state, message, _ = work(worker, params, zeros)
  close(message, np.array([3.0]))  # 4 -> 2 -> 1
  kept, message, _ = work(worker, params, zeros, state, fresh=False)
  close(message, np.array([0.75]))  # 1 -> 1/2 -> 1/4, not counted twice
  close(kept.local, np.array([0.25]))
  _, message, _ = work(worker, params, zeros, kept)
  close(message, np.array([3.0]))  # fetched again


@pytest.mark.parametrize("optimizer_state", ["kept", "reset"])
def test_the_local_momentum_is_kept_or_starts_anew(optimizer_state):
  worker = local(optax.sgd(0.5, 0.5), 1, optimizer_state=optimizer_state)
  params, zeros = jnp.array([4.0]), jnp.zeros(1)
  state, message, _ = work(worker, params, zeros)
  close(message, np.array([2.0]))
  _, message, _ = work(worker, params, zeros, state)
  # v = 4, then 0.5 * 4 + 4 if it is kept.
  close(message, np.array([3.0 if optimizer_state == "kept" else 2.0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_starts_without_looking_at_values(name):
  worker = algorithms.build(name, 0.1, 2, **SHORT[name]).make_worker(quadratic)
  like = jnp.linspace(0, 1, 4)
  made = worker.init(like)
  kit.same(made, worker.init(jnp.full(4, jnp.nan)))
  shapes = jax.eval_shape(worker.init, jax.ShapeDtypeStruct((4,), like.dtype))
  jax.tree.map(same_type, made, shapes)


def same_type(x, y):
  assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_fresh_and_kept_tickets_are_one_program(name):
  worker = algorithms.build(name, 0.1, 2, **SHORT[name]).make_worker(quadratic)
  work = simulator.compile_work(worker)
  params = jnp.ones(2)
  state, before = worker.init(params), None
  for job, fresh in enumerate((True, False, True)):
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    state, message, _ = work(
      state, ticket(params, fresh=fresh), jnp.zeros((3, 2)), KEY, np.int32(job)
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    same_type(message, params)
  assert work._cache_size() == 1


def test_a_schedule_counts_the_updates_of_the_server():
  schedule = optax.piecewise_constant_schedule(0.5, {3: 0.5})
  recipe = algorithms.build("model_averaging", schedule, 1, steps=2)
  worker = recipe.make_worker(quadratic)
  params, zeros = jnp.array([4.0]), jnp.zeros((2, 1))
  for version, expected in ((0, 3.0), (2, 3.0), (3, 4 - 4 * 0.75**2)):
    _, message, _ = work(worker, params, zeros, version=version)
    close(message, np.array([expected]))
  with pytest.raises(TypeError, match="version"):
    transforms.scale_by_sent_rate(schedule).update(params, optax.EmptyState())


# The recipes.


@pytest.mark.parametrize("optimizer_state", worker_lib.STATES)
def test_model_averaging_is_local_sgd_by_hand(optimizer_state):
  rate, momentum, decay, workers, steps, rounds = 0.1, 0.9, 0.01, 3, 4, 5
  options = dict(momentum=momentum, weight_decay=decay, steps=steps)
  recipe = algorithms.build(
    "model_averaging",
    *(rate, workers),
    optimizer_state=optimizer_state,
    **options,
  )
  counts = dict(workers=workers, messages=rounds * workers)
  trace = orders.build(recipe.order, durations.homogeneous(), **counts)
  batches = features(2, rounds * workers * steps)
  simulation, records = run(
    recipe, trace, batches, LINE, workers, least_squares
  )
  sends = trace.action == SEND
  jobs = zip(trace.worker[sends], trace.job[sends], strict=True)
  w = np.array([*LINE["w"], LINE["b"]])
  velocities = np.zeros((workers, 4))
  jobs = np.array(list(jobs)).reshape(rounds, workers, 2)
  for of_round in jobs:
    ends = []
    for i, job in of_round:
      own = w.copy()
      v = np.zeros(4) if optimizer_state == "reset" else velocities[i]
      for batch in batches[job * steps : (job + 1) * steps]:
        x = np.append(batch[:, :3], np.ones((len(batch), 1)), axis=1)
        g = x.T @ (x @ own - batch[:, 3]) / len(batch) + decay * own
        v = momentum * v + g
        own = own - rate * v
      velocities[i] = v
      ends.append(own)
    w = np.mean(ends, axis=0)
    if optimizer_state == "averaged":
      velocities[:] = velocities.mean(axis=0)
  got = base.weights_of(simulation.server.params)
  close(np.array([*got["w"], got["b"]]), w, rtol=1e-12)
  assert int(simulation.server.version) == rounds
  assert not records.staleness.any()


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_averaged_states_of_one_step_are_synchronous_sgd(optimizer):
  """Momentum is linear in the gradient; of Adam, the count is an integer."""
  batches = features(3, 4 * 6)
  counts = dict(workers=4, messages=24)
  trace = orders.bulk_synchronous(durations.homogeneous(), **counts)
  own = dict(optimizer=optimizer) if optimizer else dict(momentum=0.9)
  averaging = algorithms.build(
    "model_averaging", 0.1, 4, steps=1, optimizer_state="averaged", **own
  )
  simulation, _ = run(averaging, trace, batches, LINE, 4, least_squares)
  found = simulation.server.params
  if optimizer:
    assert int(optax.tree.get(found.stats.state, "count")) == 6
    return
  plain = algorithms.build("ssgd", 0.1, 4, **own)
  other, _ = run(plain, trace, batches, LINE, 4, least_squares)
  close(base.without_state(found), other.server.params)


def test_parameters_without_a_state_are_refused():
  worker = local(optax.sgd(0.5, 0.5), 1, optimizer_state="averaged")
  with pytest.raises(ValueError, match="the parameters carry none"):
    work(worker, jnp.ones(1), jnp.zeros(1))


def test_averaged_states_and_slow_momentum_by_hand():
  """Two workers, then one event of the next round; rate 0.5, momentum 0.5."""
  options = dict(momentum=0.5, steps=1, optimizer_state="averaged")
  recipe = algorithms.build("slowmo", 0.5, 2, **options)
  rows = ((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (1, 1, RECEIVE))
  rows += ((0, 2, SEND), (1, 3, SEND), (0, 2, RECEIVE), (1, 3, RECEIVE))
  targets = np.array([0.0, 4.0, 0.0, 0.0])[:, None]
  simulation, _ = run(recipe, trace_of(*rows), targets, np.array([8.0]), 2)
  # v = 8 and 4, so 4 and 6: u = (8 - 5) / 0.5 = 6, x = 8 - 0.5 6 = 5, v = 6.
  # Then v = 0.5 6 + 5 = 8 of both, to 1: u = 0.5 6 + 4 / 0.5 = 11, x = -0.5.
  found = simulation.server.params
  np.testing.assert_array_equal(found.weights, [-0.5])
  assert float(optax.tree.get(found.stats.state, "trace")[0]) == 8.0


def test_model_averaging_of_one_step_is_synchronous_sgd():
  batches = features(3, 4 * 6)
  trace = orders.bulk_synchronous(
    durations.homogeneous(), workers=4, messages=24
  )
  plain = algorithms.build("ssgd", 0.1, 4)
  averaging = algorithms.build("model_averaging", 0.1, 4, steps=1)
  one, other = (
    run(recipe, trace, batches, LINE, 4, least_squares)[0].server.params
    for recipe in (plain, averaging)
  )
  close(one, other)


def test_easgd_by_hand():
  # alpha = 0.5 / 2, rate 0.5, two steps; batches b pull to b: x <- (x + b) / 2.
  recipe = algorithms.build("easgd", 0.5, 2, steps=2, moving_rate=0.5)
  trace = trace_of(
    *((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (0, 2, SEND)),
    *((1, 1, RECEIVE), (1, 3, SEND), (0, 2, RECEIVE), (1, 3, RECEIVE)),
  )
  targets = np.repeat([0.0, 4.0, 0.0, 8.0], 2)[:, None]  # of jobs 0 to 3
  simulation, records = run(recipe, trace, targets, np.array([16.0]), 2)
  # Worker 0: 16 -> 8 -> 4; d = (4 - 16) / 4 = -3; x0 = 7, centre 13.
  # Worker 1: 16 -> 10 -> 7; d = (7 - 16) / 4 = -2.25, from the centre that it
  #   was sent; x1 = 9.25, centre 10.75.
  # Worker 0, sent 13: 7 -> 3.5 -> 1.75; d = (1.75 - 13) / 4 = -2.8125;
  #   x0 = 4.5625, centre 7.9375.
  # Worker 1, sent 10.75: 9.25 -> 8.625 -> 8.3125; d = -0.609375;
  #   x1 = 8.921875, centre 7.328125.
  np.testing.assert_array_equal(simulation.server.params, [7.328125])
  np.testing.assert_array_equal(simulation.workers[0].local, [4.5625])
  np.testing.assert_array_equal(simulation.workers[1].local, [8.921875])
  np.testing.assert_array_equal(records.staleness, [0, 1, 1, 1])
  np.testing.assert_array_equal(
    records.update_norm, np.float32([3, 2.25, 2.8125, 0.609375])
  )


def test_eamsgd_takes_the_steps_of_nesterov():
  recipe = algorithms.build("easgd", 0.1, 1, steps=3, momentum=0.5)
  simulation, _ = run(recipe, one_after_the_other(2), 0.0, np.array([1.0]))
  x, v, centre = 1.0, 0.0, 1.0
  for _ in range(2):
    for _ in range(3):
      v = 0.5 * v + x
      x = x - 0.1 * (x + 0.5 * v)
    d = 0.9 * (x - centre)
    x, centre = x - d, centre + d
  close(simulation.server.params, np.array([centre]))
  close(simulation.workers[0].local, np.array([x]))


# Two workers that push every two batches and fetch every four: worker 0 does
# jobs 0 and 2 on its first ticket, worker 1 jobs 1 and 4. Every batch pulls to
# 0, so a local step at rate 0.25 takes x to 3/4 x.
DOWNPOUR = (
  *((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (0, 2, KEEP)),
  *((1, 1, RECEIVE), (1, 4, KEEP), (0, 2, RECEIVE), (0, 3, SEND)),
  *((0, 3, RECEIVE), (1, 4, RECEIVE)),
)


def downpour(optimizer, rate, **kwargs):
  counts = dict(fetch_every=4, push_every=2)
  recipe = algorithms.build(
    "downpour", rate, 2, optimizer=optimizer, **counts, **kwargs
  )
  assert recipe.fetch_every == 2
  return run(recipe, trace_of(*DOWNPOUR), 0.0, np.array([256.0]), 2)


def test_downpour_with_sgd_by_hand():
  # The local rate is the server's, 1/4.
  simulation, records = downpour("sgd", 0.25)
  # Jobs 0 and 1: 256 -> 192, gradients 256 + 192 = 448; the server goes by 112
  # each: 256, 144, 32. Job 2 goes on at 144: gradients 144 + 108 = 252, by 63,
  # to -31. Job 3 is on a ticket of -31: -31 - 23.25 = -54.25, by -13.5625, to
  # -17.4375. Job 4, as job 2, by 63.
  np.testing.assert_array_equal(simulation.server.params, [-80.4375])
  # A kept ticket has the update of the worker's job before.
  np.testing.assert_array_equal(records.staleness, [0, 1, 1, 0, 3])
  np.testing.assert_array_equal(
    records.message_norm, np.float32([448, 448, 252, 54.25, 252])
  )
  assert float(simulation.workers[1].local[0]) == 81.0  # 256 (3/4)^4
  # And of the loss, where the worker was.
  assert records.loss[2] == (144**2 + 108**2) / 4


def test_downpour_with_adagrad_by_hand():
  # The learning rate is in neither message nor accumulator; the local rate is
  # its own.
  simulation, records = downpour(None, 8.0, local_rate=0.25)
  np.testing.assert_array_equal(
    records.message_norm[:3], np.float32([448, 448, 252])
  )
  x, squares = 256.0, 0.0
  for number, gradient in enumerate((448.0, 448.0, 252.0, None, 252.0)):
    if gradient is None:  # job 3, sent the parameters of now
      gradient = 1.75 * x
    squares += gradient**2
    x -= 8.0 * gradient / np.sqrt(squares)
    if number == 0:
      assert x == 248.0  # the first update is the learning rate itself
  close(simulation.server.params, np.array([x]))


def test_downpour_that_fetches_between_pushes_by_hand():
  recipe = algorithms.build(
    "downpour", 0.25, 1, fetch_every=2, push_every=3, optimizer="sgd"
  )
  assert (recipe.steps, recipe.fetch_every, recipe.push_every) == (1, 2, 3)
  trace = orders.asynchronous(
    durations.constant(), workers=1, messages=6, fetch_every=2
  )
  simulation, records = run(recipe, trace, 0.0, np.array([256.0]))
  # Fetched 256: gradients 256 and 192. Fetched again, 256, and pushed: 256 +
  # 192 + 256 = 704, by 176 to 80. On the same ticket, 192; fetched 80: 80 and
  # 60, pushed: 332, by 83.
  np.testing.assert_array_equal(simulation.server.params, [-3.0])
  np.testing.assert_array_equal(
    records.message_norm, np.float32([0, 0, 704, 0, 0, 332])
  )
  np.testing.assert_array_equal(records.loss * 2, [
    256**2, 192**2, 256**2, 192**2, 80**2, 60**2,
  ])
  assert records.update.tolist() == [0, 0, 1, 1, 1, 2]
  assert records.accepted.tolist() == [False, False, True] * 2
  assert records.bytes_up.tolist() == [0, 0, 64] * 2  # a layout's
  assert records.bytes_down.tolist() == [64, 0] * 3
  assert records.staleness.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(("optimizer", "end"), [(None, 81), ("sgd", 0)])
def test_the_local_rate_of_downpour_is_a_tenth_of_adagrads(optimizer, end):
  recipe = algorithms.build(
    "downpour", 1.0, 2, push_every=2, optimizer=optimizer
  )
  worker = recipe.make_worker(quadratic)
  state, _, _ = work(worker, jnp.array([100.0]), jnp.zeros((2, 1)))
  close(state.local, np.array([end]))


def test_downpour_decays_the_weights_once_for_each_gradient_of_a_push():
  tx = algorithms.build(
    "downpour", 0.5, 2, push_every=3, weight_decay=0.1, optimizer="sgd"
  ).algorithm
  params = jnp.array([10.0])
  updates, _ = tx.update(jnp.array([1.0]), tx.init(params), params)
  close(updates, np.array([-0.5 * (1.0 + 3 * 0.1 * 10.0)]))


def test_downpour_of_one_batch_is_asgd_and_no_gradient_is_no_step():
  trace = orders.asynchronous(durations.homogeneous(), workers=3, messages=30)
  batches, options = features(4, 40), dict(weight_decay=0.1)
  one, other = (
    run(recipe, trace, batches, LINE, 3, least_squares)[0].server.params
    for recipe in (
      algorithms.build("asgd", 0.1, 3, **options),
      algorithms.build("downpour", 0.1, 3, optimizer="sgd", **options),
    )
  )
  kit.same(one, other)
  tx = algorithms.build("downpour", 0.5, 1).algorithm
  params = jnp.array([1.0, 1.0, 1.0])
  updates, _ = tx.update(jnp.array([0.0, 1e-12, -7.0]), tx.init(params), params)
  close(updates, np.array([0.0, -0.5, 0.5]))


def test_diloco_with_a_plain_outer_step_is_its_inner_optimizer():
  batches = features(5, 4 * 6)
  options = dict(outer_rate=1.0, outer_momentum=0.0, weight_decay=0.2)
  recipe = algorithms.build("diloco", 0.05, 1, steps=6, **options)
  expected, _ = optimize(optax.adamw(0.05, weight_decay=0.2), LINE, batches)
  trace = one_after_the_other(4)
  simulation, _ = run(recipe, trace, batches, LINE, loss=least_squares)
  close(simulation.server.params, expected, rtol=1e-12)


def test_diloco_steps_along_the_mean_with_nesterov_outside():
  # An inner state starts at zero, so Adam's first step is its rate times the
  # sign: the workers come 0.5 down from 4 (to 0) and 0.5 up (to 8).
  batches = np.array([[0.0], [8.0], [0.0], [0.0]])
  recipe = algorithms.build("diloco", 0.5, 2, steps=1, weight_decay=0.0)
  trace = orders.bulk_synchronous(durations.constant(), workers=2, messages=4)
  simulation, records = run(recipe, trace, batches, np.array([4.0]), 2)
  # The second round's displacement m, from Adam's states of two steps.
  moments = []
  for first in (4.0, -4.0):
    m = (0.9 * 0.1 * first + 0.1 * 4.0) / (1 - 0.9**2)
    v = (0.999 * 0.001 * 16 + 0.001 * 16) / (1 - 0.999**2)
    moments.append(0.5 * m / np.sqrt(v))
  mean = np.mean(moments)
  # Round one averages to nothing; round two: v = mean, 0.7 (mean + 0.9 v).
  close(simulation.server.params, np.array([4.0 - 0.7 * 1.9 * mean]), rtol=1e-7)
  assert records.update_norm[1] < 1e-7


def test_fedasync_by_hand():
  # One step at rate 0.5 to the batch: x_new = (x_sent + b) / 2.
  options = dict(mixing=0.5, discount="polynomial", decay=1.0)
  recipe = algorithms.build("fedasync", 0.5, 2, steps=1, **options)
  trace = trace_of(
    *((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (0, 2, SEND)),
    *((1, 1, RECEIVE), (0, 2, RECEIVE)),
  )
  simulation, records = run(recipe, trace, 0.0, np.array([16.0]), 2)
  # 8, fresh: (16 + 8) / 2 = 12. Then 8, one late: alpha 1/4: 9 + 2 = 11. Then
  # 6, made of 12, one late: 8.25 + 1.5.
  np.testing.assert_array_equal(simulation.server.params, [9.75])
  np.testing.assert_array_equal(records.staleness, [0, 1, 1])


# Workers 0 and 1 start at the same parameters; worker 0 sends twice.
INTERLEAVED = (
  *((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (0, 2, SEND)),
  *((1, 1, RECEIVE), (1, 3, SEND), (0, 2, RECEIVE)),
)


def path_of(recipe, rows, start=16.0):
  """The parameters after each message, with all steps pulled to 0."""
  ends = [i + 1 for i, row in enumerate(rows) if row[2] == RECEIVE]
  found = [
    run(recipe, trace_of(*rows[:end]), 0.0, np.array([start]), 2)[0]
    for end in ends
  ]
  return [float(simulation.server.params[0]) for simulation in found]


def test_fedbuff_by_hand():
  # A step at rate 0.5 sends x_sent / 2; a buffer has two messages.
  options = dict(steps=1, every=2, decay=1.0)
  recipe = algorithms.build("fedbuff", 0.5, 2, **options)
  rows = (*INTERLEAVED, (1, 3, RECEIVE))
  # (8 + 8) / 2. Then worker 0's 8, made of 16 and one update late, counts half,
  # and worker 1's 4, made of 8, in full: (4 + 4) / 2.
  assert path_of(recipe, rows) == [16.0, 8.0, 8.0, 4.0]
  # The first velocity is 8, of which half is subtracted. So worker 1's message
  # is 6, and the second velocity is 0.5 * 8 + (4 + 6) / 2.
  outer = dict(outer_rate=0.5, outer_momentum=0.5)
  recipe = algorithms.build("fedbuff", 0.5, 2, **options, **outer)
  assert path_of(recipe, rows) == [16.0, 12.0, 12.0, 7.5]


def test_asynchronous_diloco_by_hand():
  options = dict(steps=1, optimizer=optax.sgd)
  options |= dict(outer_rate=0.5, outer_momentum=0.5)
  recipe = algorithms.build("async_diloco", 0.5, 2, **options)
  # 16 - 0.5 8 / 2; then v = (8 + 8) / 2 and 14 - 0.5 (0.5 8 + 8 / 2). Worker
  # 0's second message is made of 14: 10 - 0.5 7 / 2.
  assert path_of(recipe, INTERLEAVED) == [14.0, 10.0, 8.25]
  # With c = 1/4 the second update has (1 - 2/4 + 1/4) mu v, the third mu v / 4.
  recipe = algorithms.build(
    "async_diloco", 0.5, 2, **options, momentum_share=0.25
  )
  assert path_of(recipe, INTERLEAVED) == [14.0, 10.5, 8.25]


@pytest.mark.parametrize("share", [0.0, 0.2, 1 / 3])
def test_delayed_nesterov_of_a_round_is_diloco(share):
  outer = dict(outer_rate=0.5, outer_momentum=0.75)
  rounds = algorithms.build("diloco", 0.1, 3, **outer)
  alone = algorithms.build(
    "async_diloco", 0.1, 3, **outer, momentum_share=share
  )
  servers = rounds.server(), alone.server()
  states = [server.init(jnp.array([1.0, -2.0])) for server in servers]
  for number in range(4):
    displacements = jnp.array(features(number, 3, 1)[:, 0, :2])
    for i, server in enumerate(servers):
      sent = server.send(states[i], jnp.int32(0))
      for displacement in displacements:
        states[i], _ = server.receive(states[i], sent, displacement)
    velocity = optax.tree.get(states[1].opt_state, "velocity")
    close(velocity, optax.tree.get(states[0].opt_state, "trace"))
    # With a share the first updates of a round use the last round's velocity.
    same = np.allclose(states[1].params, states[0].params, rtol=1e-13)
    assert same == (share == 0.0)


def test_updates_of_workers_are_added_by_hand():
  # The gradient is w - b with b = 0, gamma and eta are 0.5.
  recipe = algorithms.build("worker_optimizer", 0.5, 2, momentum=0.5)
  trace = trace_of(
    *((0, 0, SEND), (1, 1, SEND), (0, 0, RECEIVE), (0, 2, SEND)),
    *((1, 1, RECEIVE), (0, 2, RECEIVE)),
  )
  simulation, records = run(recipe, trace, 0.0, np.array([16.0]), 2)
  # -0.5 16: 8. Worker 1, at 16 too: 0. Worker 0, at 8, with v = 0.5 16 + 8:
  # -0.5 16.
  np.testing.assert_array_equal(simulation.server.params, [-8.0])
  np.testing.assert_array_equal(records.staleness, [0, 1, 1])
  np.testing.assert_array_equal(records.update_norm, [8, 8, 8])


@pytest.mark.parametrize("steps", [1, 2])
def test_updates_without_momentum_are_asynchronous_sgd(steps):
  # Two steps of one job are those of two jobs, if no other worker is between.
  batches = kit.normal(12, 3)
  found, expected = (
    run(
      algorithms.build(name, 0.1, 1, **options),
      one_after_the_other(12 // options.get("steps", 1)),
      batches,
      np.zeros(3),
    )[0].server.params
    for name, options in (("worker_optimizer", {"steps": steps}), ("asgd", {}))
  )
  close(found, expected)


def test_fedasync_overwrites_when_nothing_of_the_server_is_kept():
  batches = features(6, 15)
  recipe = algorithms.build(
    "fedasync", 0.1, 1, steps=3, mixing=1.0, discount="constant"
  )
  trace = one_after_the_other(5)
  simulation, _ = run(recipe, trace, batches, LINE, loss=least_squares)
  expected, _ = optimize(optax.sgd(0.1), LINE, batches)
  close(simulation.server.params, expected)
  # However late: what the worker has is what the server gets.
  tx = transforms.mix_models(1.0)
  sent, end, now = jnp.array([5.0]), jnp.array([2.0]), jnp.array([-3.0])
  update, _ = tx.update(
    sent - end, tx.init(now), now, staleness=jnp.int32(9), sent_params=sent
  )
  np.testing.assert_array_equal(now + update, end)


def test_discounts_of_fedasync():
  late = jnp.arange(8)
  close(transforms.constant_discount(late), np.ones(8))
  close(transforms.polynomial_discount(0.5)(late), (np.arange(8) + 1.0) ** -0.5)
  close(
    transforms.hinge_discount(10.0, 4)(late),
    np.array([1, 1, 1, 1, 1, 1 / 11, 1 / 21, 1 / 31]),
  )


def test_the_proximal_pull_is_towards_what_was_sent():
  recipe = algorithms.build("fedasync", 0.25, 1, steps=2, proximal=2.0)
  worker = recipe.make_worker(quadratic)
  _, message, _ = work(worker, jnp.array([16.0]), jnp.zeros((2, 1)))
  # 16 -> 12, then 12 - 0.25 (12 + 2 (12 - 16)) = 11.
  close(message, np.array([5.0]))


# What a recipe may not say.


def test_a_recipe_that_contradicts_itself_is_refused():
  plain = algorithms.build("dana_slim", 0.1, 2)
  with pytest.raises(ValueError, match="one batch per job, not steps=3"):
    plain._replace(steps=3).make_worker(quadratic)
  local = algorithms.build("easgd", 0.1, 2)
  with pytest.raises(ValueError, match="would ignore its `at_worker`"):
    local._replace(at_worker=optax.trace(0.9)).make_worker(quadratic)
