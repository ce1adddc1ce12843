"""Any optimizer under any cure: equalities with optax and closed forms."""

import functools
import itertools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import optax.contrib
import pytest

import asgd
from asgd import (
  algorithms,
  optimizers,
  orders,
  simulator,
  stacking,
  transforms,
  worker,
)

pytestmark = pytest.mark.usefixtures("float64")

PARAMS = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.array([0.5])}
SCHEDULE = optax.piecewise_constant_schedule(0.1, {5: 0.5, 9: 0.5})


def loss(params, batch, key):
  del key
  terms = jax.tree.map(
    lambda p, n: jnp.sum((p - n) ** 2 * (1 + p**2)), params, batch
  )
  return optax.tree.sum(terms), worker.Aux(())


def batch(worker, job):
  rng = np.random.default_rng((worker, job))
  return jax.tree.map(lambda p: rng.normal(size=p.shape), PARAMS)


def run(recipe, trace):
  workers = orders.check(trace)
  host = simulator.make_host(recipe.server(), recipe.make_worker(loss))
  simulation, records = host.run(
    host.init(PARAMS, workers),
    trace,
    len(trace.action),
    batch=stacking.job_batches(batch, recipe.steps),
    root=jax.random.key(0),
  )
  return simulation.server.params, records


close = functools.partial(kit.close, rtol=1e-9, atol=0)


def of_partial(maker, **options):
  """An optimizer of which nothing is known but what it does."""
  return lambda learning_rate: maker(learning_rate, **options)


@functools.cache
def plain(made, rate, steps):
  """Parameters after an ordinary optax loop of one worker."""
  tx = MADE[made](rate)

  @jax.jit
  def step(params, state, batch):
    grads = jax.grad(lambda p: loss(p, batch, None)[0])(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.asarray, PARAMS)
  state = tx.init(params)
  for job in range(steps):
    params, state = step(params, state, batch(0, job))
  return params


MADE = {
  "adamw": functools.partial(optax.adamw, b2=0.95),
  "muon": optax.contrib.muon,
  "lion": optax.lion,
  "adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=2),
}
# What sends the parameters as they are, and so is plain for one worker.
FRESH = ("asgd", "ssgd", "staleness_aware", "dc_asgd_c", "dc_asgd_a")
FRESH += ("gap_aware", "delay_adaptive", "ringmaster_asgd", "rennala_sgd")


# Each recipe, and each optimizer: in it, and in Gap-Aware around it.
@pytest.mark.parametrize(
  ("name", "made"),
  [
    *((name, "adamw") for name in FRESH),
    *itertools.product(("asgd", "gap_aware"), [*MADE][1:]),
  ],
)
def test_one_worker_is_the_plain_optimizer(name, made):
  trace = orders.fixed_delay(delay=0, messages=12)
  recipe = algorithms.build(name, SCHEDULE, 1, optimizer=MADE[made])
  params, _ = run(recipe, trace)
  close(params, plain(made, SCHEDULE, 12))


@pytest.mark.parametrize(
  ("name", "made"),
  [
    *(("model_averaging", "adamw"), ("model_averaging", "muon")),
    *(("fedasync", "adamw"), ("diloco", "muon"), ("worker_optimizer", "adamw")),
  ],
)
def test_local_steps_are_the_plain_optimizers(name, made):
  # One job of all steps: the server takes over where the worker ends.
  plainly = {
    "fedasync": dict(mixing=1.0),
    "diloco": dict(outer_optimizer=optax.sgd, outer_rate=1.0),
  }
  recipe = algorithms.build(
    *(name, 0.1, 1), steps=4, optimizer=MADE[made], **plainly.get(name, {})
  )
  params, _ = run(recipe, orders.fixed_delay(delay=0, messages=1))
  close(params, plain(made, 0.1, 4))


# Of SGD with momentum the look-ahead is known: rolling out is the same.
@pytest.mark.parametrize("name", ["nag_asgd", "multi_asgd", "dana_zero"])
def test_rolling_an_optimizer_out_is_the_closed_form_of_momentum(name):
  trace = orders.fixed_delay(delay=2, messages=18)
  rolled = algorithms.build(
    *(name, 0.02, 3), optimizer=of_partial(optax.sgd, momentum=0.9)
  )
  known = algorithms.build(name, 0.02, 3, momentum=0.9)
  close(run(rolled, trace)[0], run(known, trace)[0])
  named = algorithms.build(
    name, 0.02, 3, optimizer={"name": "sgd", "momentum": 0.9}
  )
  close(run(named, trace)[0], run(known, trace)[0], rtol=0)


def test_slim_keeps_any_optimizer_as_it_keeps_momentum():
  trace = orders.fixed_delay(delay=2, messages=18)
  rolled = algorithms.build(
    "dana_slim", 0.02, 3, optimizer=of_partial(optax.sgd, momentum=0.9)
  )
  known = algorithms.build("dana_slim", 0.02, 3, momentum=0.9)
  close(run(rolled, trace)[0], run(known, trace)[0])


# Of what does not read the parameters: slim's part is made at older ones.
@pytest.mark.parametrize(
  "optimizer", [optax.adam, functools.partial(optax.lion, weight_decay=0.0)]
)
def test_slim_is_at_the_look_ahead_of_dana_zero(optimizer):
  # The parameters of the one are what the other sends.
  trace = orders.fixed_delay(delay=2, messages=9)
  zero = algorithms.build("dana_zero", 0.02, 3, optimizer=optimizer)
  slim = algorithms.build("dana_slim", 0.02, 3, optimizer=optimizer)
  server = zero.server()
  host = simulator.make_host(server, zero.make_worker(loss))
  simulation, _ = host.run(
    host.init(PARAMS, 3),
    trace,
    len(trace.action),
    batch=batch,
    root=jax.random.key(0),
  )
  sent = server.send(simulation.server, jnp.int32(0)).params
  close(run(slim, trace)[0], sent)


def test_schedules_count_the_servers_updates_for_every_state():
  # Three workers in turn: a state of its own sees every third update only.
  trace = orders.fixed_delay(delay=2, messages=18)
  rolled = algorithms.build(
    "multi_asgd", SCHEDULE, 3, look_ahead=False, optimizer=of_partial(optax.sgd)
  )
  known = algorithms.build("asgd", SCHEDULE, 3)
  close(run(rolled, trace)[0], run(known, trace)[0])


def test_the_rate_of_a_version():
  optimizer = of_partial(optax.adamw)
  tx = optimizers.at_version(optimizer, SCHEDULE)
  own = optimizer(SCHEDULE)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state, other = tx.init(params), own.init(params)
  for version in range(12):
    updates, state = tx.update(
      params, state, params, version=jnp.int32(version)
    )
    expected, other = own.update(params, other, params)
    close(updates, expected)


def test_gap_awareness_reads_the_size_of_what_an_optimizer_made():
  made = functools.partial(
    transforms.gap_aware, average="updates", decay=0.0, eps=0.0
  )
  tx = made(optax.sign_sgd(0.1), 0.1)
  params = jnp.array([1.0, 1.0])
  state = tx.init(params)
  _, state = tx.update(params, state, params, sent_params=params)
  # Typical updates are 0.1 here; a message that is 0.3 late counts a quarter.
  counts = optax.chain(optax.sgd(1.0))
  tx = made(counts, 0.1)
  late = params - jnp.array([0.0, 0.3])
  updates, _ = tx.update(
    params, state._replace(inner=counts.init(params)), params, sent_params=late
  )
  np.testing.assert_allclose(updates, [-1.0, -0.25], rtol=1e-12)


def test_gap_awareness_of_what_is_not_sgd_reads_updates_by_default():
  def clipped(rate):
    return optax.chain(optax.clip(0.5), optax.sgd(rate))

  found = []
  for average in (None, "updates", "gradients"):
    recipe = algorithms.build(
      "gap_aware", 0.1, 2, optimizer=clipped, average=average
    )
    server = recipe.server()
    state = server.init(jnp.float64(1.0))
    for ticket in [server.send(state, jnp.int32(i)) for i in range(2)]:
      state, _ = server.receive(state, ticket, jnp.float64(0.75))
    found.append(state.params)
  # C = 0.1 0.5 of updates, so the second gradient is divided by 1 + 0.05 / C.
  np.testing.assert_allclose(found[:2], 1 - 0.05 - 0.0375, rtol=1e-6)
  assert found[2] < found[0]


def test_compensation_is_per_message_and_before_clipping():
  # Two messages an update: each is compensated around its own ticket.
  recipe = algorithms.build("dc_asgd_c", 1.0, 2, strength=1.0)
  server = recipe._replace(every=2).server()
  state = server.init(jnp.float64(2.0))
  ticket = server.send(state, jnp.int32(0))
  tickets = [
    ticket._replace(params=jnp.float64(1.0)),
    ticket._replace(params=jnp.float64(2.0)),
  ]
  for one in tickets:
    state, _ = server.receive(state, one, jnp.float64(0.5))
  # 0.5 + 0.25 (2 - 1), and 0.5; their mean.
  np.testing.assert_allclose(state.params, 2.0 - (0.75 + 0.5) / 2)


def test_momentum_is_read_off_plain_sgd_only():
  partial = functools.partial
  assert optimizers.momentum_of(optax.sgd) == 0
  assert optimizers.momentum_of(partial(optax.sgd, momentum=0.5)) == 0.5
  assert optimizers.momentum_of(optimizers.named("sgd")) == 0
  nesterov = partial(optax.sgd, momentum=0.5, nesterov=True)
  assert optimizers.momentum_of(nesterov) is None
  assert optimizers.momentum_of(partial(optax.sgd, 0.1)) is None
  assert optimizers.momentum_of(optax.adam) is None
  assert optimizers.momentum_of(of_partial(optax.sgd)) is None


test_a_wrong_optimizer_is_refused = kit.refuses(
  [
    ("adamm", "unknown optimizer 'adamm'; did you mean 'adam'"),
    ({"b2": 0.9}, "must be a name, or a dict of a name and"),
    ({"name": "adam", "b3": 1}, "'adam' takes no argument 'b3'; known: b1"),
    ({"name": "adam", "learning_rate": 1}, "set config.learning_rate"),
    ("no_such_module:make", "no_such_module cannot be imported"),
    ("optax:adamm", "optax has no 'adamm'; did you mean 'adam'"),
    ("optax:__version__", "not a Python function"),
    ("optax:", "write MODULE:FUNCTION"),
    ("momo", "unknown optimizer 'momo'"),
  ],
  optimizers.named,
)


def test_an_optimizer_that_needs_more_than_gradients_is_refused():
  with pytest.raises(ValueError, match="an update cannot be made .*value"):
    optimizers.check(lambda rate: optax.lbfgs(rate))
  optimizers.check(optimizers.named({"name": "adamw", "b2": 0.95}))


@pytest.mark.parametrize("make", [asgd.asgd, asgd.table])
def test_an_option_of_an_optimizer_is_refused_by_the_recipe(make):
  with pytest.raises(ValueError, match="an update cannot be made"):
    make(0.1, workers=2, optimizer={"name": "adam", "b1": "x"})


@pytest.mark.parametrize("name", sorted(algorithms.RECIPES))
def test_what_an_optimizer_has_of_its_own_is_not_given_twice(name):
  option = "outer_momentum" if name == "diloco" else "momentum"
  if option not in algorithms.options(name):
    return
  optimizer = "outer_optimizer" if name == "diloco" else "optimizer"
  words = f"{option} is an option of the recipe's built-in SGD"
  with pytest.raises(ValueError, match=words):
    algorithms.build(name, 0.1, 2, **{option: 0.123, optimizer: "adam"})
