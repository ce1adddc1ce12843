"""Statistics of BatchNorm: averaged in, in the order of arrival, and touched by
nothing else that happens to weights."""

from functools import partial

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, data, models, problems
from asgd.server import finite, make_server, max_staleness
from asgd.transforms import own_statistics
from asgd.worker import Aux, gradient_worker

KEY = jax.random.key(0)


def variables(weights, mean, var):
  stats = {"mean": jnp.float32(mean), "var": jnp.float32(var)}
  return base.Variables(jnp.asarray(weights, jnp.float32), stats)


close = partial(kit.close, rtol=1e-5, atol=1e-6)


def averaged(stats, messages, decay):
  """The definition: stats <- decay stats + (1 - decay) of each message."""
  for message in messages:
    stats = jax.tree.map(
      lambda old, new: decay * old + (1 - decay) * new, stats, message
    )
  return stats


START = variables([1.0, 2.0], mean=0, var=1)

# What two workers send, and who: their own statistics, weights' gradients.
MESSAGES = (
  (1, variables([0.5, -1.0], mean=8, var=5)),
  (0, variables([1.0, 3.0], mean=-4, var=7)),
  (0, variables([-2.0, 0.5], mean=2, var=0)),
  (1, variables([1.5, 1.5], mean=6, var=2)),
)


def deliver(server, params, messages=MESSAGES):
  """Both workers hold a ticket, and get another when a message is received.

  Returns the server's state, the reports and the tickets still open.
  """
  state = server.init(params)
  tickets = {w: server.send(state, jnp.int32(w)) for w in (0, 1)}
  reports = []
  for worker, message in messages:
    state, report = server.receive(state, tickets[worker], message)
    tickets[worker] = server.send(state, jnp.int32(worker))
    reports.append(report)
  return state, reports, tickets


# By hand: decay 1/2 halves exactly.


def test_statistics_are_averaged_in_the_order_of_arrival():
  server = algorithms.asgd(0.1, 2).server(statistics_decay=0.5)
  means, vars_ = [], []
  for count in range(1, 5):
    state, _, _ = deliver(server, START, MESSAGES[:count])
    means.append(float(state.params.stats["mean"]))
    vars_.append(float(state.params.stats["var"]))
  assert means == [4, 0, 1, 3.5]
  assert vars_ == [3, 5, 2.5, 2.25]


def test_an_update_on_two_messages_averages_in_their_mean():
  server = algorithms.ssgd(0.5, 2).server(statistics_decay=0.5)
  state, _, _ = deliver(server, START, MESSAGES[:1])
  kit.same(state.params, START)  # it waits

  # The mean message holds 2, 6 and (0.75, 1).
  state, _, _ = deliver(server, START, MESSAGES[:2])
  kit.same(state.params, variables([0.625, 1.5], mean=1, var=3.5))

  # And then 4, 1 and (-0.25, 1).
  state, _, _ = deliver(server, START)
  kit.same(state.params, variables([0.75, 1.0], mean=2.5, var=2.25))


def test_decay_zero_keeps_the_last_statistics():
  server = algorithms.asgd(0.1, 2).server(statistics_decay=0.0)
  state, _, _ = deliver(server, START)
  kit.same(state.params.stats, MESSAGES[-1][1].stats)


def test_dropped_messages_leave_the_statistics_alone():
  server = algorithms.asgd(0.1, 2).server(
    gate=max_staleness(0), statistics_decay=0.5
  )
  state, reports, _ = deliver(server, START)
  # The others come one update after the message before them.
  assert [bool(report.accepted) for report in reports] == [1, 0, 1, 0]
  kept = [message.stats for _, message in MESSAGES[::2]]
  close(state.params.stats, averaged(START.stats, kept, 0.5))


def test_statistics_that_are_not_finite_close_the_gate():
  server = algorithms.asgd(0.1, 2).server(gate=finite)
  bad = variables([1.0, 1.0], mean=np.nan, var=1)
  state, (report,), _ = deliver(server, START, [(0, bad)])
  assert not report.accepted
  kit.same(state.params, START)


# Whatever happens to the weights.

RECIPES = {
  name: algorithms.build(name, 0.1, 2, weight_decay=0.01)
  for name in algorithms.RECIPES
}
RECIPES["dc_asgd_a of workers"] = algorithms.build(
  "dc_asgd_a", 0.1, 2, momentum=0.9, scope="worker"
)
RECIPES["softsync"] = algorithms.build(
  "staleness_aware", 0.1, 2, momentum=0.9, splits=1
)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_statistics_and_weights_do_not_touch_each_other(recipe):
  server = recipe.server(statistics_decay=0.75)
  state, reports, tickets = deliver(server, START)
  accepted = zip(MESSAGES, reports, strict=True)
  stats = [message.stats for (_, message), told in accepted if told.accepted]
  if recipe.every == 2:
    # One that was accepted without a second waits in the inbox.
    pairs = zip(stats[::2], stats[1::2], strict=False)
    stats = [jax.tree.map(lambda x, y: (x + y) / 2, *pair) for pair in pairs]
  expected = averaged(START.stats, stats, 0.75)
  close(state.params.stats, expected)
  # The last message came from worker 1, so its ticket is of the last state.
  kit.same(tickets[1].params.stats, state.params.stats)

  # Bare parameters pass through, as if there were no rule for statistics.
  bare = [(worker, message.weights) for worker, message in MESSAGES]
  options = dict(every=recipe.every, at_server=recipe.at_server)
  if recipe.max_staleness is not None:
    options["gate"] = max_staleness(recipe.max_staleness)
  plain = deliver(server, START.weights, bare)
  kit.same(
    plain,
    deliver(make_server(recipe.algorithm, **options), START.weights, bare),
  )
  kit.same(state.params.weights, plain[0].params)
  kit.same(state.opt_state, plain[0].opt_state)
  kit.same(reports, plain[1])  # staleness, gap and norms among them
  for worker in tickets:
    kit.same(tickets[worker].params.weights, plain[2][worker].params)


def test_a_ticket_holds_weights_looked_ahead_and_statistics_as_they_are():
  server = algorithms.dana_zero(0.1, 2, momentum=0.5).server(
    statistics_decay=0.5
  )
  state, _, tickets = deliver(server, START, MESSAGES[:1])
  # The only velocity is the gradient (0.5, -1): one step of 0.1 was made, and
  # half of one is expected.
  close(state.params, variables([0.95, 2.1], mean=4, var=3))
  close(tickets[1].params, variables([0.925, 2.15], mean=4, var=3))


def test_an_algorithm_that_does_not_look_ahead_still_does_not():
  for name in ("asgd", "dana_slim"):
    recipe = RECIPES[name]
    assert recipe.server().sends_current
    assert own_statistics(recipe.algorithm).send is base.send_current
  assert not RECIPES["dana_zero"].server().sends_current


def test_gap_and_norms_are_of_the_weights():
  server = algorithms.asgd(1.0, 2).server(statistics_decay=0.5)
  first = (0, variables([3.0, 4.0], mean=100, var=100))
  second = (1, variables([0.0, 1.0], mean=-100, var=100))
  _, (report, late), _ = deliver(server, START, [first, second])
  assert report.gap == 0
  # RMS over two weights: sqrt((9 + 16) / 2) and sqrt(1 / 2).
  np.testing.assert_allclose(report.message_norm, 5 / np.sqrt(2), rtol=1e-6)
  np.testing.assert_allclose(report.update_norm, 5 / np.sqrt(2), rtol=1e-6)
  np.testing.assert_allclose(late.gap, 5 / np.sqrt(2), rtol=1e-6)
  np.testing.assert_allclose(late.message_norm, 1 / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("decay", [-0.1, 1.0, np.nan])
def test_decay_must_keep_some_but_not_all(decay):
  words = rf"decay must be in \[0, 1\), not {decay}"
  with pytest.raises(ValueError, match=words):
    own_statistics(base.as_algorithm(optax.sgd(0.1)), decay)


# With workers.


def test_a_message_holds_the_gradient_and_the_statistics_of_its_batch():
  def loss(params, batch, key):
    del key
    value = jnp.sum(batch * params.weights) + jnp.sum(params.stats["mean"])
    return value, Aux({"mean": batch.mean(), "var": batch.var()})

  momentum = optax.trace(0.5)
  worker = gradient_worker(loss, momentum)
  state = worker.init(START)
  ticket = base.Ticket(jnp.int32(0), jnp.int32(0), START)
  state, message, metrics = worker.work(
    state, ticket, jnp.array([1.0, 3.0]), KEY
  )
  kit.same(message, variables([1.0, 3.0], mean=2, var=1))
  assert metrics.loss == 7
  # The worker's momentum is of the weights: statistics are the new batch's.
  state, message, _ = worker.work(state, ticket, jnp.array([2.0, 2.0]), KEY)
  kit.same(message, variables([2.5, 3.5], mean=2, var=0))


LAYERS = (models.Stem(2, "batch"), models.Head(10))


@jax.jit
def batch_statistics(params, pixels):
  return models.apply(LAYERS, params, pixels, train=True)[1]


@pytest.mark.parametrize("name", ["dana_zero", "dana_slim", "ssgd"])
def test_two_workers_train_a_network_with_batch_norm(name):
  digits = data.load("digits")
  problem = problems.classification(digits, LAYERS, batch_size=8)
  recipe = algorithms.build(name, 0.1, 2, momentum=0.9)
  server = recipe.server(statistics_decay=0.75)
  worker = gradient_worker(problem.loss, recipe.at_worker)
  work, batches = jax.jit(worker.work), problem.batches(0, 2)
  send, receive = jax.jit(server.send), jax.jit(server.receive)
  state = server.init(problem.init(KEY))
  start = state.params
  tickets = [send(state, jnp.int32(w)) for w in (0, 1)]
  workers = [worker.init(start) for _ in (0, 1)]
  seen = []
  for job, w in enumerate([0, 1, 1, 0]):
    batch = batches(w, job)
    pixels = (np.float32(batch[0]) - digits.mean) / digits.std
    seen.append(batch_statistics(tickets[w].params, pixels))
    workers[w], message, _ = work(workers[w], tickets[w], batch, KEY)
    close(message.stats, seen[-1])
    state, _ = receive(state, tickets[w], message)
    tickets[w] = send(state, jnp.int32(w))
    kit.same(tickets[w].params.stats, state.params.stats)

  if recipe.every == 2:
    seen = [
      jax.tree.map(lambda x, y: (x + y) / 2, *seen[i : i + 2]) for i in (0, 2)
    ]
  close(state.params.stats, averaged(start.stats, seen, 0.75))
