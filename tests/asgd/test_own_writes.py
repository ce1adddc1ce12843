"""Workers that keep tickets: SSP's read-my-writes, and who may not."""

import functools

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from kit import same
from linear import quadratic

import asgd
from asgd import algorithms, base, compression, orders, simulator
from asgd import own_writes as own_lib
from asgd.experiment.engines import server_orders
from asgd.orders import durations, protocol

pytestmark = pytest.mark.usefixtures("blank_pictures")

ROOT = jax.random.key(0)
PARAMS = jnp.array([4.0, -2.0, 1.0])


def batch(worker, job):
  return np.random.default_rng((worker, job)).integers(-4, 5, 3) / 4.0


def ssp(bound, *, workers=1, messages=12, cache=True):
  clock = durations.constant(slowdown=(1, 1.5, 2.5)[:workers])
  return orders.stale_synchronous(
    clock, workers=workers, messages=messages, bound=bound, cache=cache
  )


@functools.cache  # one server: one compilation
def parts(recipe, codec):
  server, worker = recipe.server(), recipe.make_worker(quadratic)
  if codec is not None:
    server = compression.decoding(server, codec)
    worker = compression.compressed(worker, codec)
  return server, worker


def run(recipe, trace, *, workers=1, shards=0, codec=None):
  server, worker = parts(recipe, codec)
  data = {"batch": batch, "root": ROOT}
  if shards:
    states, records = simulator.run_sharded(
      *(server, worker, np.asarray(PARAMS), [trace] * shards),
      **dict(workers=workers, **data),
    )
    params = np.concatenate([np.ravel(state.params) for state in states])
    return params, records[0]
  host = simulator.make_host(server, worker)
  simulation, records = simulator.run_whole(
    host, PARAMS, workers, trace, **data
  )
  return simulation.server.params, records


def halved(update):
  return 0.5**update


def plan(run, order):
  built = kit.tiny(runs={"a": run}, order=order)
  return built.plan(built.cells[0])


OPTIMIZERS = {
  "sgd": functools.partial(asgd.asgd, 0.125),
  "momentum": functools.partial(asgd.asgd, 0.125, momentum=0.5),
  "weight decay": functools.partial(asgd.asgd, 0.125, weight_decay=0.25),
  "adam": functools.partial(asgd.asgd, 0.125, optimizer=optax.adam),
  "adagrad": functools.partial(asgd.asgd, 0.125, optimizer=optax.adagrad),
  "schedule": functools.partial(asgd.asgd, lambda t: 0.5 / (1 + t)),
  "nag": functools.partial(asgd.nag_asgd, lambda t: 0.5 / (1 + t)),
  "dana": functools.partial(asgd.dana_zero, 0.125),
  "slim": functools.partial(asgd.dana_slim, 0.125),
  "staleness": functools.partial(asgd.staleness_aware, 0.125),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ho_2013_one_worker_is_its_optimizer_at_any_bound(name):
  recipe = OPTIMIZERS[name](workers=1)
  params, _ = run(recipe, ssp(0))
  for bound in (1, 3):
    trace = ssp(bound)
    assert (trace.action == base.KEEP).any()
    again, records = run(recipe, trace)
    np.testing.assert_allclose(again, params, rtol=2e-6, atol=1e-6)
    assert records.staleness.tolist() == [0] * 12
    assert orders.staleness(trace).tolist() == [0] * 12


def test_one_worker_with_a_cache_is_plain_sgd_to_the_bit():
  # Of eighths, which float32 adds up without a rounding.
  step = jax.jit(lambda w, b: w - 0.125 * (w - b))
  w = PARAMS
  for job in range(6):
    w = step(w, batch(0, job).astype(np.float32))
  params, records = run(asgd.asgd(0.125, workers=1), ssp(3, messages=6))
  same(params, w)
  assert (records.bytes_down > 0).tolist() == [True, *[False] * 3, True, False]


@pytest.mark.parametrize("shards", [0, 2])
def test_a_worker_by_hand_that_keeps_a_ticket(shards):
  # Of two workers, 1 and 3 long, at a bound of 1: worker 0 does its second job
  # on its copy, without the message of worker 1, and its third after it.
  clock = durations.constant(slowdown=(1, 3))
  trace = orders.stale_synchronous(
    clock, workers=2, messages=4, bound=1, cache=True
  )
  assert trace.action[2:4].tolist() == [base.RECEIVE, base.KEEP]
  params, records = run(
    asgd.asgd(0.5, workers=2), trace, workers=2, shards=shards
  )
  copy = server = np.asarray(PARAMS)
  first = np.asarray(PARAMS) - batch(1, 1)
  for job in (0, 2):
    gradient = copy - batch(0, job)
    copy, server = copy - 0.5 * gradient, server - 0.5 * gradient
  server = server - 0.5 * first
  received = trace.action == base.RECEIVE
  assert trace.worker[received].tolist()[:3] == [0, 0, 1]
  gradient = server - batch(0, trace.job[received][3])
  assert trace.worker[received][3] == 0
  np.testing.assert_allclose(params, server - 0.5 * gradient, rtol=1e-6)
  assert records.staleness.tolist() == [0, 0, 2, 0]


@pytest.mark.parametrize("workers", [1, 3])
def test_asgd_on_kept_tickets_is_downpour(workers):
  # Downpour that pushes each gradient and takes the server's steps between its
  # fetches (Dean et al. 2012).
  clock = durations.constant(slowdown=(1, 1.5, 2.5)[:workers])
  trace = orders.asynchronous(
    clock, workers=workers, messages=12, fetch_every=3
  )
  downpour = asgd.downpour(
    *(0.125, workers), fetch_every=3, local_rate=0.125, optimizer=optax.sgd
  )
  expected, records = run(downpour, trace, workers=workers)
  params, others = run(asgd.asgd(0.125, workers), trace, workers=workers)
  np.testing.assert_allclose(params, expected, rtol=1e-6)
  assert records.staleness.tolist() == others.staleness.tolist()
  np.testing.assert_allclose(records.loss, others.loss, rtol=1e-6)


def test_own_writes_are_what_the_server_decodes():
  codec = compression.named("top_k", density=0.4)
  recipe = asgd.asgd(0.125, workers=1)
  params, _ = run(recipe, ssp(0), codec=codec)
  again, _ = run(recipe, ssp(3), codec=codec)
  np.testing.assert_allclose(again, params, rtol=2e-6)


def test_a_copy_that_is_fetched_anew_has_the_updates_of_others():
  # All of a cache's copies are fetched anew at bound 0.
  recipe = asgd.asgd(0.125, workers=3)
  eager = run(recipe, ssp(0, workers=3, cache=False), workers=3)
  same(run(recipe, ssp(0, workers=3), workers=3), eager)


INJECTED = optax.inject_hyperparams(optax.sgd)
DECAYED, COUNTED = (
  algorithms.Recipe(asgd.as_algorithm(optax.chain(tx, optax.sgd(1.0))))
  for tx in (
    optax.add_decayed_weights(halved),
    asgd.per_worker(optax.scale_by_schedule(halved), 2),
  )
)


@pytest.mark.parametrize(
  ("recipe", "step"),
  [
    (asgd.nag_asgd(halved, 2, momentum=0.5), 2**-5),
    # Adam's first step has the size of the rate.
    (asgd.multi_asgd(halved, 2, optimizer=optax.adam), 2**-5),
    (asgd.adadelay(halved, 2), 1 / (2**5 + 6**0.5)),
    (asgd.asgd(halved, 2, optimizer=INJECTED), 2**-5),
    (DECAYED, 1 + 2**-5 * 8),
    # The server counts the messages of each worker, and this is its first.
    (COUNTED, 1.0),
  ],
  ids=[
    *("velocity", "optimizer per worker", "adadelay", "hyperparameters"),
    *("weight decay", "schedule per worker"),
  ],
)
def test_a_fetch_sets_the_updates_that_a_rate_counts(recipe, step):
  worker = asgd.gradient_worker(lambda w, batch: w * batch)
  worker, w = own_lib.own_writes(worker, recipe.server()), jnp.float32(8.0)
  ticket = asgd.Ticket(jnp.int32(0), jnp.int32(5), w)
  state, _, _ = worker.work(worker.init(w), ticket, jnp.float32(1.0), ROOT)
  np.testing.assert_allclose(state.own.params, 8.0 - step, rtol=1e-6)


NOT_KEPT = {
  "easgd": ("each job of this worker needs a separate ticket", {"steps": 1}),
  "fedasync": ("each job of this worker needs a separate ticket", {"steps": 1}),
  "dc_asgd_a": ("parameters that a message was computed on", {}),
  "dana_dc": ("parameters that a message was computed on", {}),
  "gap_aware": ("parameters that a message was computed on", {}),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_recipe_that_cannot_keep_a_ticket_is_refused(name):
  message, options = NOT_KEPT[name]
  recipe = algorithms.build(name, 0.1, 1, **options)
  with pytest.raises(ValueError, match=message):
    run(recipe, ssp(2))
  rounds = asgd.asgd(0.1, workers=1)._replace(every=2)
  with pytest.raises(ValueError, match="this server averages several messages"):
    run(rounds, ssp(2))
  for key, order in (
    ("cache", dict(name="stale_synchronous", bound=2, cache=True)),
    ("fetch_every", dict(name="asynchronous", fetch_every=2)),
  ):
    with pytest.raises(ValueError, match=message) as caught:
      plan({"recipe": name, **options}, order)
    assert f"config.order.{key} is not for config.runs.a" in str(caught.value)


def test_fedasync_at_alpha_1_leaves_worker_and_server_at_one_model():
  # Twice on one ticket it was a worker at 2 and a server at 6: refused above.
  recipe = asgd.fedasync(0.5, 1, steps=1, mixing=1.0, discount="constant")
  host = simulator.make_host(
    recipe.server(), recipe.make_worker(lambda w, batch: 0.5 * w**2)
  )
  simulation, _ = simulator.run_whole(
    *(host, jnp.float32(8.0), 1, ssp(0, messages=2, cache=False)),
    **dict(batch=batch, root=ROOT),
  )
  assert simulation.server.params == simulation.workers[0].local == 2.0


@pytest.mark.parametrize("key", ["cache", "fetch_every"])
def test_an_order_does_not_override_the_fetches_of_downpour(key):
  orders_of = {
    "cache": dict(name="stale_synchronous", bound=2, cache=True),
    "fetch_every": dict(name="asynchronous", fetch_every=2),
  }
  for fetch_every, push_every in ((3, 1), (1, 1), (2, 2)):
    own = dict(fetch_every=fetch_every, push_every=push_every)
    with pytest.raises(ValueError, match=rf"config\.order\.{key} is .* recipe"):
      plan({"recipe": "downpour", **own}, orders_of[key])
  # Who does not say how often, does as the order does.
  assert server_orders.keeps(plan({"recipe": "downpour"}, orders_of[key]).order)


def test_a_cache_and_fetch_every_are_refused_together():
  both = dict(bound=2, cache=True, fetch_every=3)
  with pytest.raises(ValueError, match="cache keeps .* fetch_every 3 would"):
    protocol.check_rules(protocol.Rules(**both))
  with pytest.raises(ValueError, match="cache keeps .* fetch_every 3 would"):
    orders.stale_synchronous(
      durations.constant(), workers=1, messages=2, **both
    )
  with pytest.raises(ValueError, match=r"^config\.order\.cache keeps"):
    plan({"recipe": "asgd"}, dict(name="stale_synchronous", **both))


def test_rounds_of_a_live_run_obey_all_of_their_order_or_refuse_it():
  order = dict(name="stale_synchronous", bound=0)
  assert server_orders.rules(order, 2, 2) == protocol.Rules(round=2)
  for option in (dict(depth=2), dict(fetch_every=2), dict(cache=True)):
    with pytest.raises(ValueError, match="a synchronous round sends every"):
      server_orders.rules(order | option, 2, 2)


def test_own_writes_of_a_worker_are_made_once():
  recipe = asgd.asgd(0.1, workers=1)
  server, worker = recipe.server(), recipe.make_worker(quadratic)
  own = own_lib.own_writes(worker, server)
  assert own_lib.own_writes(own, server) is own
  assert own_lib.own_writes(worker, server) is own


@pytest.mark.parametrize("order", [
  dict(name="stale_synchronous", bound=3, cache=True),
  dict(name="asynchronous", fetch_every=3),
])
def test_a_live_worker_reads_its_own_writes_and_a_replay_does(order, tmp_path):
  data = np.arange(-8, 8, dtype=np.float32).reshape(16, 1) / 4
  given = quadratic, jnp.array([4.0]), data
  recipe = asgd.asgd(0.125, workers=1)
  size = dict(messages=12, batch_size=1, progress=False)
  plain = asgd.simulate(*given, recipe, **size)
  simulated = asgd.simulate(*given, recipe, **size, order=order)
  live = asgd.train_live(
    *given, recipe, **size, order=order, folder=tmp_path / "live"
  )
  for result in (simulated, live):
    np.testing.assert_allclose(result.params, plain.params, rtol=1e-6)
    assert result.records.staleness.tolist() == [0] * 12
    assert (result.records.bytes_down == 0).any()
  again = asgd.replay(tmp_path / "live", *given, recipe)
  assert again.same
