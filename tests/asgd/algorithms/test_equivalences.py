"""Things that must agree: algorithms with algorithms, orders with orders."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, orders, problems, simulator
from asgd import server as server_lib
from asgd import worker as worker_lib
from asgd.orders import durations

pytestmark = pytest.mark.usefixtures("float64")

RATE, MOMENTUM, WORKERS = 0.01, 0.9, 4
CURVATURE = np.linspace(1, 5, 7)
PROBLEM = problems.quadratic(CURVATURE, noise=0.3)


build = cache(algorithms.build)


@cache
def host_of(recipe, loss, gate=server_lib.accept_all):
  worker = worker_lib.gradient_worker(loss, recipe.at_worker)
  return simulator.make_host(recipe.server(gate=gate), worker)


def run(recipe, trace, workers=WORKERS, end=None, problem=PROBLEM, **options):
  """Replays a trace, up to a row if it has an end."""
  host = host_of(recipe, problem.loss, **options)
  simulation = host.init(problem.init(jax.random.key(0)), workers)
  data = {"batch": problem.batches(0, workers), "root": jax.random.key(0)}
  return host.run(simulation, trace, end or len(trace.action), **data)


def gamma_trace(messages=60, workers=WORKERS):
  return orders.asynchronous(
    durations.homogeneous(seed=3), workers=workers, messages=messages
  )


close = partial(kit.close, atol=1e-13)


def test_dana_slim_holds_the_look_ahead_of_dana_zero():
  trace = gamma_trace()
  for end in simulator.end_of_message(trace)[[10, 59]]:
    zero_recipe = build("dana_zero", RATE, WORKERS)
    zero, zero_records = run(zero_recipe, trace, end=end)
    slim_recipe = build("dana_slim", RATE, WORKERS)
    slim, slim_records = run(slim_recipe, trace, end=end)
    look_ahead = zero_recipe.server().send(zero.server, jnp.int32(0)).params
    close(slim.server.params, look_ahead, atol=1e-14)
  np.testing.assert_allclose(slim_records.loss, zero_records.loss, rtol=1e-5)
  # But measured between its own parameters, Slim's gap is larger.
  assert slim_records.gap.mean() > 1.5 * zero_records.gap.mean()


def ftpipe_gap_aware(gradient, start, *, rate, weight_decay, messages):
  """Gap-Aware over SGD without momentum, as pipe/pipeline/gap_aware of FTPipe
  has it, for workers that take turns."""
  params, average = start, np.zeros_like(start)
  sent = [start] * WORKERS
  for job in range(messages):
    g, at = gradient(sent[job % WORKERS], job), sent[job % WORKERS]
    average = 0.999 * average + 0.001 * g * g  # of g as it arrived, and first
    size = rate * (np.sqrt(average / (1 - 0.999 ** (job + 1))) + 1e-8)
    penalty = 1 + np.abs(params - at) / size
    params = params - rate * (g + weight_decay * params) / penalty
    sent[job % WORKERS] = params
  return params


@pytest.mark.parametrize(
  "options",
  [
    {"momentum": 0.0},
    {"momentum": 0.0, "weight_decay": 0.05},
    {"optimizer": optax.sgd},
  ],
  ids=lambda options: ", ".join(options),
)
def test_gap_aware_without_momentum_is_that_of_ftpipe(options):
  start, rate, messages = np.linspace(-1, 1, 7), 0.05, 60

  def gradient(params, job):
    return CURVATURE * (params - 2) + 0.3 * kit.normal(7, seed=job)

  found = {}
  for average in (None, "gradients", "updates"):
    made = build("gap_aware", rate, WORKERS, average=average, **options)
    server = made.server()
    receive = jax.jit(server.receive)
    state = server.init(jnp.asarray(start))
    sent = [server.send(state, jnp.int32(i)) for i in range(WORKERS)]
    for job in range(messages):
      at = sent[job % WORKERS]
      state, _ = receive(state, at, gradient(np.asarray(at.params), job))
      sent[job % WORKERS] = server.send(state, jnp.int32(job % WORKERS))
    found[average] = state.params
  decay = options.get("weight_decay", 0.0)
  expected = ftpipe_gap_aware(
    gradient, start, rate=rate, weight_decay=decay, messages=messages
  )
  close(found[None], expected)
  close(found["gradients"], expected)
  # The average of penalised updates, the default before, is another algorithm.
  assert np.abs(found["updates"] - expected).max() > 0.1


def test_dana_zero_is_multi_asgd_but_for_what_it_sends():
  # The same gradients give the same server.
  zero = build("dana_zero", RATE, 2).algorithm
  multi = build("multi_asgd", RATE, 2).algorithm
  params = jnp.zeros(3)
  states = [zero.init(params), multi.init(params)]
  paths = [params, params]
  for job in range(12):
    g = jnp.asarray(np.random.default_rng(job).normal(size=3))
    delay = base.Delay(jnp.int32(job % 2), jnp.int32(1), params)
    for i, algorithm in enumerate((zero, multi)):
      updates, states[i] = algorithm.update(
        g, states[i], paths[i], **delay._asdict()
      )
      paths[i] = paths[i] + updates
    close(*paths)


def test_bulk_synchronous_order_is_large_batch_sgd():
  recipe = build("ssgd", RATE, WORKERS, momentum=MOMENTUM)
  trace = orders.bulk_synchronous(
    durations.homogeneous(seed=5), workers=WORKERS, messages=10 * WORKERS
  )
  assert (np.diff(trace.job[trace.action == base.RECEIVE]) < 0).any()
  data = np.random.default_rng(0).normal(size=(10, WORKERS, 8, 7))

  def least_squares(params, batch, key):
    return jnp.mean((batch @ params - 1) ** 2), worker_lib.Aux(())

  simulation, records = simulator.run_whole(
    *(host_of(recipe, least_squares), jnp.ones(7), WORKERS, trace),
    batch=lambda worker, job: data.reshape(-1, 8, 7)[job],
    root=jax.random.key(0),
  )
  tx = optax.sgd(RATE, MOMENTUM)
  params = jnp.ones(7)
  state = tx.init(params)
  gradient = jax.jit(jax.grad(least_squares, has_aux=True))
  for batch in data.reshape(10, WORKERS * 8, 7):
    grads, _ = gradient(params, batch, None)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  close(simulation.server.params, params, atol=1e-14)
  assert int(simulation.server.version) == 10
  assert not records.staleness.any()


def test_soft_synchronization_with_one_split_is_rudra_with_no_barrier():
  # Staleness-aware with splits = 1 averages N messages, each divided by its
  # own staleness.
  recipe = build("staleness_aware", RATE, WORKERS, splits=1)
  assert recipe.every == WORKERS
  trace = gamma_trace(messages=2 * WORKERS)
  problem = problems.quadratic(np.ones(1))
  simulation, records = run(recipe, trace, problem=problem)
  assert int(simulation.server.version) == 2
  params, messages = 1.0, []
  sent = dict.fromkeys(range(WORKERS), 1.0)
  for w, action in zip(trace.worker, trace.action, strict=True):
    if action == base.SEND:
      sent[int(w)] = params
    else:
      staleness = records.staleness[len(messages)]
      messages.append(sent[int(w)] / max(staleness, 1))
      if len(messages) % WORKERS == 0:
        params -= RATE * np.mean(messages[-WORKERS:])
  np.testing.assert_allclose(simulation.server.params, [params], rtol=1e-14)


@pytest.mark.parametrize(
  ("divisor", "path"),
  [("own", [0.5, 0.25, 0.0]), ("mean", [0.75, 0.5625, 0.3125]),
   ("none", [0.5, 0.25, -0.25])],
)
def test_divisors_of_softsync_by_hand(divisor, path):
  # A gradient is the parameter sent: 1, then the first update's, then 1, which
  # is two updates old. Of two workers and c = 1 the mean staleness is n = 2.
  server = build("staleness_aware", 0.5, 2, divisor=divisor).server()
  state, found = server.init(jnp.float64(1.0)), []
  late = server.send(state, jnp.int32(1))
  for worker in (0, 0, 1):
    ticket = late if worker else server.send(state, jnp.int32(0))
    state, _ = server.receive(state, ticket, ticket.params)
    found.append(float(state.params))
  np.testing.assert_allclose(found, path, rtol=1e-14)


def test_fixed_delay_is_the_textbook_recursion():
  delay, messages = 3, 20
  problem = problems.quadratic(np.array([2.0]))
  trace = orders.fixed_delay(delay=delay, messages=messages)
  recipe = build("asgd", 0.1, delay + 1)
  simulation, _ = run(recipe, trace, delay + 1, problem=problem)
  path = [1.0]
  for t in range(messages):
    path.append(path[t] - 0.1 * 2.0 * path[max(t - delay, 0)])
  np.testing.assert_allclose(simulation.server.params, path[-1:], rtol=1e-13)


def test_gaps_come_in_the_order_of_the_papers():
  # NAG-ASGD >> Multi-ASGD > DANA-Zero ~ ASGD (Hakimi et al. 2019, figure 2),
  # at the learning rate and size of a noisy quadratic that all survive.
  problem = problems.quadratic(np.linspace(0.5, 1.5, 50), noise=1.0)
  gaps = {}
  trace = gamma_trace(messages=240, workers=8)
  for name in ("asgd", "dana_zero", "multi_asgd", "nag_asgd"):
    _, records = run(build(name, 0.005, 8), trace, 8, problem=problem)
    gaps[name] = records.gap[60:].mean()
  assert gaps["asgd"] < gaps["dana_zero"] < gaps["multi_asgd"]
  assert gaps["multi_asgd"] < gaps["nag_asgd"]
  assert gaps["dana_zero"] < 1.6 * gaps["asgd"]
  assert gaps["nag_asgd"] > 3 * gaps["asgd"]


def test_gate_and_version_count_accepted_messages_only():
  recipe, gate = build("asgd", RATE, WORKERS), server_lib.max_staleness(2)
  simulation, records = run(recipe, gamma_trace(), gate=gate)
  assert 0 < records.accepted.sum() < len(records.accepted)
  np.testing.assert_array_equal(records.accepted, records.staleness <= 2)
  assert int(simulation.server.version) == records.accepted.sum()
  assert (records.update_norm[~records.accepted] == 0).all()
