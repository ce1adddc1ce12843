"""Every recipe goes through this table of properties."""

import inspect

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest

from asgd import algorithms, base, norms, simulator, stacking, worker
from asgd import orders as orders_lib
from asgd.orders import durations

pytestmark = pytest.mark.usefixtures("float64")

RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
NAMES = sorted(algorithms.RECIPES)
# The dimensions are all different, so that no broadcast hides a mistake.
PARAMS = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.array([0.5])}
CURVATURE = {"w": np.arange(1.0, 7).reshape(2, 3), "b": np.array([2.0])}


def gradient(params, noise):
  return jax.tree.map(lambda c, p, n: c * p + n, CURVATURE, params, noise)


def noise(job):
  rng = np.random.default_rng(job)
  return jax.tree.map(lambda p: 0.1 * rng.normal(size=p.shape), PARAMS)


def loss(params, batch, key):
  del key
  terms = jax.tree.map(
    lambda c, p, n: jnp.sum(c * p**2 / 2 + n * p),
    *({name: CURVATURE[name] for name in params}, params, batch),
  )
  return optax.tree.sum(terms), worker.Aux(())


def batch_of(recipe):
  return stacking.job_batches(lambda worker, job: noise(job), recipe.steps)


def in_turns(recipe, workers, messages, params=PARAMS):
  """Workers take turns, doing as many jobs on a ticket as they should.

  Returns the parameters at the server and the reports; a turn is compiled once.
  """
  made, worker = recipe.server(), recipe.make_worker(loss)
  batch, key = batch_of(recipe), jax.random.key(0)

  @kit.compiled_once
  def turn(state, own, ticket, batch):
    own, message, _ = worker.work(own, ticket, batch, key)
    state, report = made.receive(state, ticket, message)
    return state, own, made.send(state, ticket.worker), report

  state = made.init(jax.tree.map(jnp.asarray, params))
  tickets = [  # nothing is known yet that they could look ahead of
    base.Ticket(jnp.int32(w), state.version, state.params)
    for w in range(workers)
  ]
  owns, reports = [worker.init(state.params)] * workers, []
  for job in range(messages):
    number, w = divmod(job, workers)
    of_job = {name: batch(w, job)[name] for name in params}
    given = owns[w], tickets[w], of_job
    state, owns[w], sent, report = turn(state, *given)
    kept = tickets[w]._replace(fresh=np.bool_(False))
    fetches = (number + 1) % recipe.fetch_every == 0
    tickets[w] = sent if fetches else kept
    reports.append(report)
  return state.params, reports


def build(name, workers, learning_rate=RATE, **kwargs):
  return algorithms.build(name, learning_rate, workers, **kwargs)


def first_gradients():
  return jax.tree.map(jnp.asarray, noise(0))


READS = {
  "asgd": (),
  "ssgd": (),
  "nag_asgd": (),
  "multi_asgd": ("worker",),
  "staleness_aware": ("staleness",),
  "delay_adaptive": ("staleness",),
  "adadelay": ("staleness",),
  "dc_asgd_c": ("sent_params",),
  "dc_asgd_a": ("sent_params",),
  "gap_aware": ("sent_params",),
  "ringmaster_asgd": (),
  "rennala_sgd": (),
  "mindflayer_sgd": (),
  "dana_zero": ("worker",),
  "dana_slim": (),
  "dana_dc": ("sent_params", "worker"),
  "downpour": (),
  "model_averaging": (),
  "easgd": (),
  "slowmo": (),
  "diloco": (),
  "async_diloco": (),
  "fedasync": ("sent_params", "staleness"),
  "fedbuff": ("staleness",),
  "worker_optimizer": (),
}


def test_the_tables_name_every_recipe():
  assert sorted(READS) == NAMES
  assert sorted({*COUNTERPARTS, "easgd"}) == NAMES


@pytest.mark.parametrize(
  ("name", "argument"),
  [(name, argument) for name in READS for argument in READS[name]],
)
def test_a_missing_delay_argument_is_a_type_error_naming_it(name, argument):
  algorithm = build(name, 2).one_message()
  params = jax.tree.map(jnp.asarray, PARAMS)
  delay = base.Delay(jnp.int32(1), jnp.int32(3), params)._asdict()
  del delay[argument]
  with pytest.raises(TypeError, match=argument):
    algorithm.update(first_gradients(), algorithm.init(params), params, **delay)


# What a recipe is with one worker, as a plain loop over an optax optimizer:
# (optimizer, how far it looks ahead of its parameters).
def sgd(momentum):
  return optax.chain(
    optax.add_decayed_weights(DECAY), optax.sgd(RATE, momentum)
  )


def no_look_ahead(state, params):
  return params


def nesterov_look_ahead(state, params):
  velocity = optax.tree.get(state, "trace")
  return jax.tree.map(lambda p, v: p - RATE * (MOMENTUM * v), params, velocity)


def slim():
  # On the worker in DANA-Slim, but with one worker it is one chain.
  return optax.chain(
    optax.add_decayed_weights(DECAY), optax.sgd(RATE, MOMENTUM, nesterov=True)
  )


def adagrad():
  return optax.chain(
    optax.add_decayed_weights(DECAY),
    optax.adagrad(RATE, initial_accumulator_value=0.0, eps=0.0),
  )


def adadelay():
  # One worker has no delay: the paper's step is a schedule over t = 1, 2, ...
  return optax.chain(
    optax.add_decayed_weights(DECAY),
    optax.sgd(lambda count: 1 / (1 / RATE + jnp.sqrt(count + 1.0)), MOMENTUM),
  )


COUNTERPARTS = {
  "asgd": (sgd(MOMENTUM), no_look_ahead),
  "ssgd": (sgd(MOMENTUM), no_look_ahead),
  "nag_asgd": (sgd(MOMENTUM), nesterov_look_ahead),
  "multi_asgd": (sgd(MOMENTUM), nesterov_look_ahead),
  "staleness_aware": (sgd(MOMENTUM), no_look_ahead),
  "delay_adaptive": (sgd(MOMENTUM), no_look_ahead),
  "adadelay": (adadelay(), no_look_ahead),
  "dc_asgd_c": (sgd(MOMENTUM), no_look_ahead),
  "dc_asgd_a": (sgd(MOMENTUM), no_look_ahead),
  "gap_aware": (sgd(MOMENTUM), no_look_ahead),
  "ringmaster_asgd": (sgd(MOMENTUM), no_look_ahead),
  "rennala_sgd": (sgd(MOMENTUM), no_look_ahead),
  "mindflayer_sgd": (sgd(MOMENTUM), no_look_ahead),
  "dana_zero": (sgd(MOMENTUM), nesterov_look_ahead),
  "dana_slim": (slim(), no_look_ahead),
  # With one worker the look-ahead is the only delay there is to compensate.
  "dana_dc": (sgd(MOMENTUM), nesterov_look_ahead),
  "downpour": (adagrad(), no_look_ahead),
  "model_averaging": (sgd(MOMENTUM), no_look_ahead),
  "slowmo": (sgd(MOMENTUM), no_look_ahead),
  "diloco": (optax.adamw(RATE, weight_decay=DECAY), no_look_ahead),
  "async_diloco": (optax.adamw(RATE, weight_decay=DECAY), no_look_ahead),
  "fedasync": (sgd(0.0), no_look_ahead),
  "fedbuff": (sgd(0.0), no_look_ahead),
  "worker_optimizer": (sgd(MOMENTUM), no_look_ahead),
}
# With which options. EASGD has no counterpart: a worker and the centre are two.
PLAIN = {
  "async_diloco": {"steps": 3, "outer_rate": 1.0, "outer_momentum": 0.0},
  "dana_dc": {"strength": 0.0},
  "diloco": {"steps": 3, "outer_rate": 1.0, "outer_momentum": 0.0},
  "fedasync": {"mixing": 1.0, "steps": 3},
  "fedbuff": {"steps": 3},
  "model_averaging": {"steps": 3},
  "slowmo": {"steps": 3, "slow_momentum": 0.0, "optimizer_state": "kept"},
  "worker_optimizer": {"steps": 3},
}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_one_worker_is_the_plain_optax_counterpart(name):
  tx, look_ahead = COUNTERPARTS[name]
  kwargs = {"weight_decay": DECAY, **PLAIN.get(name, {})}
  if "momentum" in algorithms.options(name):
    kwargs["momentum"] = MOMENTUM
  recipe = build(name, 1, **kwargs)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = tx.init(params)
  for step in range(12 * recipe.steps):
    grads = gradient(look_ahead(state, params), noise(step))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  found, reports = in_turns(recipe, 1, 12)
  assert not any(report.staleness for report in reports)
  # Out and back, a displacement loses a bit or two.
  steps = recipe.steps
  kit.close(found, params, rtol=1e-14 * steps, atol=1e-16 * steps)


CHANGED = {
  "threshold": 1,
  "late": "drop",
  "every": 3,
  "stops": True,
  "budget": 2.0,
  "momentum_every": 2,
  "momentum_share": 0.25,
  "momentum": 0.5,
  "weight_decay": 0.2,
  "strength": 0.5,
  "decay": 0.5,
  "scope": "worker",
  "splits": 2,
  "divisor": "mean",
  "average": "updates",
  "look_ahead": False,
  "fetch_every": 2,
  "push_every": 1,
  "local_rate": 0.05,
  "optimizer": "adam",
  "outer_optimizer": "adam",
  "steps": 3,
  "optimizer_state": "reset",
  "slow_rate": 0.5,
  "slow_momentum": 0.25,
  "moving_rate": 0.5,
  "outer_rate": 0.5,
  "outer_momentum": 0.5,
  "mixing": 0.5,
  "discount": "polynomial",
  "grace": 2,
  "proximal": 1.0,
}
# Where an option says something only next to others; and what makes a job of
# several steps, with every part of the recipe in use.
BESIDE = {
  "delay_adaptive": {"threshold": 2},
  "async_diloco": {"steps": 2},
  "gap_aware": {"momentum": 0.0},
  "downpour": {"push_every": 2, "fetch_every": 4},
  "model_averaging": {"momentum": 0.9, "steps": 2},
  "slowmo": {"optimizer_state": "kept", "steps": 2},
  "easgd": {"momentum": 0.9, "steps": 2},
  "diloco": {"steps": 2},
  "fedasync": {"discount": "hinge", "grace": 1, "steps": 2, "proximal": 0.1},
  "fedbuff": {"decay": 1.0, "steps": 2, "every": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_recipe_has_an_effect(name):
  rate = 0.01  # all are stable here
  beside = BESIDE.get(name, {})
  turns = 4, 12, {"w": PARAMS["w"]}
  plain, _ = in_turns(build(name, 4, rate, **beside), *turns)
  for option in algorithms.options(name):
    changed = {**beside, option: CHANGED[option]}
    if option == "optimizer":
      changed.pop("momentum", None)
    other = build(name, 4, rate, **changed)
    if option in ("stops", "budget"):  # of the order alone
      assert other.order_options and not build(name, 4, rate).order_options
      continue
    other, _ = in_turns(other, *turns)
    assert norms.gap(plain, other) > 1e-6, option


@pytest.mark.parametrize("name", NAMES)
def test_a_run_in_pieces_is_the_run_in_one(name):
  recipe = build(name, 3, 0.01, **BESIDE.get(name, {}))
  kept = {"fetch_every": 2} if recipe.fetch_every > 1 else {}
  counts = dict(workers=3, messages=18, **kept)
  clock = durations.heterogeneous(seed=1)
  trace = orders_lib.build(recipe.order, clock, **counts)
  assert (trace.action == base.KEEP).any() == (name == "downpour")
  host = simulator.make_host(recipe.server(), recipe.make_worker(loss))
  data = {"batch": batch_of(recipe), "root": jax.random.key(0)}
  results, rows = [], len(trace.action)
  for ends in ([rows], range(5, rows + 5, 5)):
    simulation, parts = host.init(PARAMS, 3), []
    for end in ends:
      simulation, part = host.run(simulation, trace, end, **data)
      parts.append(part)
    records = simulator.concatenate(parts)
    results.append((simulation.server, simulation.workers, records))
  kit.same(*results)
  if recipe.max_staleness is None:  # else see test_fresh.py
    expected = orders_lib.staleness(trace, every=recipe.every)
    np.testing.assert_array_equal(records.staleness, expected)
  assert np.isfinite(records.loss).all()


def test_options_are_the_keyword_arguments():
  assert list(algorithms.options("dana_dc")) == [
    "momentum",
    "weight_decay",
    "strength",
    "optimizer",
  ]
  for recipe in algorithms.RECIPES.values():
    first = list(inspect.signature(recipe).parameters)[:2]
    assert first == ["learning_rate", "workers"]


# Two workers by hand, on one parameter: w0 sends 1, w1 sends 2, w0 sends 3.
# gamma = 0.5, eta = 0.1.
def two_workers(algorithm, gradients=((0, 1.0), (1, 2.0), (0, 3.0))):
  params = jnp.float64(0.0)
  state = algorithm.init(params)
  path, sent = [], []
  for number, value in gradients:
    updates, state = algorithm.update(
      jnp.float64(value),
      state,
      params,
      worker=jnp.int32(number),
      staleness=jnp.int32(0),
      sent_params=params,
    )
    params = params + updates
    path.append(float(params))
    sent.append(float(algorithm.send(state, params, worker=jnp.int32(0))))
  return path, sent


@pytest.mark.parametrize(
  ("name", "path", "sent"),
  [
    # v0 = 1; v1 = 2; v0 = 0.5 * 1 + 3 = 3.5; params - 0.1 * 0.5 * v0 are sent.
    ("multi_asgd", [-0.1, -0.3, -0.65], [-0.15, -0.35, -0.825]),
    # The sums of the same velocities are 1, 3, 5.5.
    ("dana_zero", [-0.1, -0.3, -0.65], [-0.15, -0.45, -0.925]),
    ("dana_dc", [-0.1, -0.3, -0.65], [-0.15, -0.45, -0.925]),
    # v = 1, 2.5, 4.25.
    ("nag_asgd", [-0.1, -0.35, -0.775], [-0.15, -0.475, -0.9875]),
  ],
)
def test_velocities_and_look_aheads_by_hand(name, path, sent):
  found = two_workers(build(name, 2, 0.1, momentum=0.5).algorithm)
  np.testing.assert_allclose(found, [path, sent], rtol=1e-14)


def test_dc_asgd_a_per_worker_has_a_mean_square_for_each_worker():
  options = dict(decay=0.5, scope="worker", strength=1.0)
  per_worker = build("dc_asgd_a", 2, 0.1, **options).one_message()
  params = jnp.float64(1.0)
  state = per_worker.init(params)
  mean_square = {0: 0.0, 1: 0.0}
  for number, g in ((0, 1.0), (1, 2.0), (0, 3.0)):
    updates, state = per_worker.update(
      jnp.float64(g),
      state,
      params,
      worker=jnp.int32(number),
      staleness=jnp.int32(1),
      sent_params=params - 0.25,
    )
    mean_square[number] = 0.5 * mean_square[number] + 0.5 * g * g
    strength = 1.0 / np.sqrt(mean_square[number] + 1e-7)
    expected = -0.1 * (g + strength * g * g * 0.25)
    np.testing.assert_allclose(updates, expected, rtol=1e-14)


def test_dana_slim_keeps_its_velocity_at_each_worker():
  recipe = build("dana_slim", 2, learning_rate=0.1, momentum=0.5)
  trace = orders_lib.fixed_delay(delay=1, messages=3)
  params = {"x": np.array(0.0)}
  gradients = {0: 1.0, 1: 2.0, 2: 3.0}

  def linear(params, batch, key):
    return params["x"] * batch, worker.Aux(())

  host = simulator.make_host(recipe.server(), recipe.make_worker(linear))
  simulation, _ = simulator.run_whole(
    *(host, params, 2, trace),
    batch=lambda worker, job: np.float64(gradients[job]),
    root=jax.random.key(0),
  )
  # u = gamma v + g after v = gamma v + g: 1.5, 3, and 0.5 * 3.5 + 3 = 4.75.
  np.testing.assert_allclose(
    simulation.server.params["x"], -0.1 * (1.5 + 3 + 4.75), rtol=1e-14
  )


def test_gap_aware_divides_each_of_two_messages_by_its_own_gap():
  recipe = build("gap_aware", 2, 0.5, momentum=0.0, splits=1)
  server = recipe.server()
  state = server.init(jnp.float64(8.0))
  old = server.send(state, jnp.int32(0))
  # Nothing has moved: 8 - 0.5 4. Then C = 2, and the stale one counts half:
  # 6 - 0.5 (4 / (1 + 2 / 2) + 4) / 2.
  for expected in (6.0, 4.5):
    tickets = old, server.send(state, jnp.int32(1))
    for ticket in tickets:
      state, report = server.receive(state, ticket, jnp.float64(4.0))
    np.testing.assert_allclose(state.params, expected, rtol=1e-7)
  assert int(state.version) == 2 and int(report.staleness) == 0


# Errors.


@pytest.mark.parametrize("workers", [0, -1, 2.0, True])
def test_workers_must_be_a_positive_whole_number(workers):
  with pytest.raises(ValueError, match="workers must be"):
    build("asgd", workers)


@pytest.mark.parametrize(
  ("name", "kwargs", "message"),
  [
    ("dana_zro", {}, "did you mean 'dana_zero'"),
    ("asgd", {"momentun": 0.9}, "did you mean 'momentum'"),
    ("asgd", {"learning_rate": 0.0}, "learning_rate must be a positive"),
    ("asgd", {"momentum": 1.0}, "momentum must be in"),
    ("dana_zero", {"momentum": -0.1}, "momentum must be in"),
    ("nag_asgd", {"momentum": 1.5}, "momentum must be in"),
    ("multi_asgd", {"momentum": 1.5}, "momentum must be in"),
    ("dana_slim", {"momentum": 1.5}, "momentum must be in"),
    ("gap_aware", {"momentum": 1.5}, "momentum must be in"),
    ("asgd", {"weight_decay": -1.0}, "weight_decay must be"),
    ("dc_asgd_c", {"strength": -1.0}, "strength"),
    ("dc_asgd_a", {"decay": 1.0}, "decay must be in"),
    ("d_psgd", {"adapt_first": "yes"}, "adapt_first must be True or False"),
    ("d2", {"lazy": 3}, "lazy must be True or False, not 3"),
    ("dc_asgd_a", {"scope": "shard"}, "scope must be"),
    ("staleness_aware", {"splits": 5}, "splits must be from 1 to the 2"),
    ("delay_adaptive", {"threshold": 0}, "threshold must be a positive whole"),
    ("delay_adaptive", {"late": "stop"}, "late must be one of scale, drop"),
    ("adadelay", {"strength": -1.0}, "strength must be 0 or more"),
    ("adadelay", {"optimizer": "adam", "momentum": 0.5}, "momentum is an opt"),
    ("ringmaster_asgd", {"threshold": 0}, "threshold must be a positive whole"),
    ("ringmaster_asgd", {"stops": 1}, "stops must be True or False, not 1"),
    ("rennala_sgd", {"every": 0}, "every must be a positive whole"),
    ("async_diloco", dict(momentum_every=0), "^momentum_every must be"),
    ("async_diloco", dict(momentum_share=0.6), "share must be from 0 to 1 / "),
    ("async_diloco", dict(outer_rate=0.0), "outer_rate must be a positive"),
    ("fedbuff", dict(every=0), "every must be a positive whole"),
    ("fedbuff", dict(decay=0.0), "decay .a. must be a positive"),
    ("fedbuff", dict(outer_rate=0.0), "outer_rate must be a positive"),
    ("gap_aware", {"splits": 3}, "splits must be from 1 to the 2"),
    (
      "gap_aware",
      {"splits": 1, "average": "updates"},
      "average 'updates' is for updates of one message",
    ),
    ("downpour", dict(push_every=0), "push_every must be"),
    ("downpour", dict(fetch_every=0), "fetch_every must be"),
    ("downpour", dict(local_rate=0.0), "local_rate must be a positive"),
    ("downpour", dict(optimizer="adem"), "'adem'; did you mean 'adam'"),
    ("model_averaging", dict(steps=0), "steps must be"),
    ("easgd", dict(steps=1.5), "steps must be"),
    ("easgd", dict(moving_rate=1.5), "moving_rate must be in"),
    ("diloco", dict(outer_rate=0.0), "outer_rate must be a positive"),
    ("diloco", dict(outer_momentum=1.0), "^outer_momentum must be in"),
    ("async_diloco", dict(outer_momentum=1.0), "^outer_momentum must be in"),
    ("fedbuff", dict(outer_momentum=1.0), "^outer_momentum must be in"),
    ("slowmo", dict(slow_momentum=1.0), "^slow_momentum must be in"),
    ("multi_asgd", dict(look_ahead="no"), "look_ahead must be True or False"),
    ("fedasync", dict(mixing=1.5), "mixing .alpha. must be in"),
    ("fedasync", dict(discount="hing"), "did you mean 'hinge'"),
    ("fedasync", dict(decay=-1.0), "decay .a. must be a positive"),
    ("fedasync", dict(discount="constant", decay=2.0), "has no decay, not 2"),
    ("fedasync", dict(grace=-1), "grace .b. must be"),
    ("fedasync", dict(discount="hinge", grace=-1), "grace .b. must be"),
    ("fedasync", dict(proximal=-1.0), "proximal strength must be"),
    ("worker_optimizer", dict(steps=0), "steps must be"),
  ],
)
def test_values_out_of_range_are_refused(name, kwargs, message):
  with pytest.raises(ValueError, match=message):
    build(name, 2, **kwargs)
