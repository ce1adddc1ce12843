"""A pipeline computes what it says: the monolith, or its closed recursion."""

import functools
import itertools
import threading

import jax
import kit
import numpy as np
import optax
import pytest
from kit import close, same
from pipeline_kit import gpipe, one_f_one_b

import asgd
from asgd import algorithms, base, models, orders, sharding, simulator
from asgd import stages as stage_lib
from asgd import worker as worker_lib
from asgd.pipeline import analyze, discrepancy, schedules
from asgd.pipeline import table as table_lib
from asgd.pipeline.executor import Executor
from asgd.pipeline.lanes import PipelineError
from asgd.pipeline.stage import Part

# Four stages of the same shapes, whose servers share their programs.
LAYERS = models.mlp(6, hidden=(6, 6, 6))
STAGES = 4
COUNT = 12  # microbatches at hand
RATE = 0.1


pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def numbers():
  """Returns x [COUNT, 4, 3, 2, 1], labels, and the parameters."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((COUNT, 4, 3, 2, 1))
  params = kit.parameters(LAYERS, x[0])
  return x, rng.integers(0, 6, (COUNT, 4)), params


def cuts(stages):
  """Where the layers are cut; unevenly, in fewer than four stages."""
  return [0, *range(2, stages + 1), len(LAYERS)]


def entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean()


@functools.cache
def cut_stage_fn(first, last):
  def fn(params, x, extra):
    if first == 0:
      x, *extra = extra
      extra = extra[0] if extra else ()
    y, _ = models.apply(LAYERS[first:last], params, x, train=True, first=first)
    return (entropy(y, extra), ()) if last == len(LAYERS) else (y, ())

  return fn


def extra(stages, stage, microbatch):
  x, labels, _ = numbers()
  if stage == 0:  # and the last, if there is only one
    both = x[microbatch], labels[microbatch]
    return both if stages == 1 else both[:1]
  return labels[microbatch] if stage == stages - 1 else ()


def whole_loss(params, x, labels):
  logits, _ = models.apply(LAYERS, params, x, train=True)
  return entropy(logits, labels)


def batch_loss(params, batch, key):
  del key
  return whole_loss(params, *batch), worker_lib.Aux(())


@functools.cache
def compiled():
  return jax.jit(jax.value_and_grad(whole_loss))


def loss_and_gradient(params, microbatch):
  x, labels, _ = numbers()
  made = compiled()(params, x[microbatch], labels[microbatch])
  return jax.device_get(made)  # what follows is NumPy's


def gradient_of(params, microbatch):
  return loss_and_gradient(params, microbatch)[1]


@functools.cache
def recipe(name, workers=1):
  return algorithms.build(name, RATE, workers)


@functools.cache
def server(name, workers=1):
  return recipe(name, workers).server()


def parts(stages, name="asgd", workers=1):
  params = numbers()[2]
  at = cuts(stages)
  return [
    Part(
      *(cut_stage_fn(first, last), params[first:last], server(name, workers)),
      recipe(name, workers).at_worker,
    )
    for first, last in zip(at, at[1:], strict=False)
  ]


def executor_of(table, stages=STAGES, *, made=None, given=None, **options):
  """Returns an executor of the table, of other parts or extras if given, on two
  devices in turn, for which a program is compiled."""
  given = functools.partial(extra, stages) if given is None else given
  two = itertools.cycle(jax.devices()[:2])
  devices = options.pop("devices", list(itertools.islice(two, table.devices)))
  return Executor(
    table, made or parts(stages), given, devices=devices, **options
  )


def whole_of(engine, state):
  """Returns the parameters of all layers."""
  return sum(map(tuple, engine.params(state)), ())


def vee(microbatches):
  """Four stages on two devices, there and back."""
  orders = [
    [
      (action, stage, m)
      for action, stage in (("F", d), ("F", 3 - d), ("B", 3 - d), ("B", d))
      for m in range(microbatches)
    ]
    for d in range(2)
  ]
  return table_lib.lay_out("V", orders, every=microbatches, flush=True)


def both_ways(microbatches):
  """Two replicas of each of two stages, on each other's devices."""
  half = microbatches // 2
  orders = []
  for d in range(2):
    order = []
    for action in "FB":
      for m in range(half):
        order += [(action, d, m), (action, 1 - d, half + m)]
    orders.append(order)
  return table_lib.lay_out("both ways", orders, every=microbatches, flush=True)


def run_table(
  table, stages=STAGES, *, name="asgd", workers=1, stops=(), **options
):
  """Returns the whole parameters, the losses and the records."""
  made = parts(stages, name, workers)
  run_ = executor_of(table, stages, made=made, **options)
  state, losses, seen = run_.start(), {}, []
  for stop in (*stops, None):
    result = run_.run(state, stop)
    state = result.state
    losses.update(result.losses)
    seen.append(result.records)
  records = [
    simulator.concatenate(list(rows)) for rows in zip(*seen, strict=True)
  ]
  losses = {m: float(v) for m, v in losses.items()}
  return whole_of(run_, state), losses, records


def descend(params, gradients):
  mean = jax.tree.map(lambda *g: sum(g) / len(g), *gradients)
  return jax.tree.map(lambda p, g: p - RATE * g, params, mean)


def descend_whole(microbatches, every):
  params = numbers()[2]
  for first in range(0, microbatches, every):
    batch = range(first, first + every)
    params = descend(params, [gradient_of(params, m) for m in batch])
  return params


def mixed_versions(history, versions):
  """Stage by stage, parameters of different versions."""
  at = cuts(len(versions))
  return sum(
    (
      tuple(history[v][first:last])
      for v, first, last in zip(versions, at, at[1:], strict=False)
    ),
    (),
  )


# Synchronous.

TABLES = {
  "GPipe": gpipe(STAGES, 8),
  "GPipe, two batches": gpipe(STAGES, 8, batches=2),
  "1F1B": one_f_one_b(STAGES, 8),
  "1F1B, I and W": one_f_one_b(STAGES, 8, backward="IW"),
  "fewer microbatches than stages": one_f_one_b(STAGES, 2),
  "several stages on a device": vee(6),
  "two directions": both_ways(8),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_a_synchronous_pipeline_is_the_monolith(name, recompute):
  table = TABLES[name]
  found, losses, _ = run_table(table, table.stages, recompute=recompute)
  close(found, descend_whole(table.microbatches, table.every))
  params = numbers()[2]
  for m in range(table.every):  # of the first batch
    wanted, _ = loss_and_gradient(params, m)
    np.testing.assert_allclose(losses[m], wanted, atol=1e-12)


CLIP = 0.05  # less than the norms


@functools.cache
def clipping():
  tx = optax.chain(sharding.clip_by_global_norm(CLIP), optax.sgd(RATE))
  return asgd.make_server(base.as_algorithm(tx))


@pytest.mark.parametrize(
  "name", ["1F1B, I and W", "several stages on a device"]
)
def test_norms_are_of_all_stages_if_updates_are_together(name):
  table = TABLES[name]
  made = [part._replace(server=clipping()) for part in parts(STAGES)]
  run_ = executor_of(table, made=made, together=True)
  params = numbers()[2]
  gradients = [gradient_of(params, m) for m in range(table.microbatches)]
  mean = jax.tree.map(lambda *g: sum(g) / len(g), *gradients)
  assert optax.tree.norm(mean) > 2 * CLIP
  clipped, _ = optax.clip_by_global_norm(CLIP).update(mean, ())
  wanted = jax.tree.map(lambda p, g: p - RATE * g, params, clipped)
  state = run_.start()
  for slot in (*range(1, table.slots), None):  # cut anywhere
    state = run_.run(state, slot).state
  close(whole_of(run_, state), wanted)


def test_a_table_is_obeyed_again_with_the_microbatches_that_follow():
  run_ = executor_of(gpipe(STAGES, 4))
  state, losses = run_.start(), {}
  for _ in range(3):
    result = run_.run(state)
    state = run_.next_pass(result.state)
    losses.update(result.losses)
  close(whole_of(run_, state), descend_whole(12, 4))
  assert sorted(losses) == list(range(12))


# Asynchronous: the closed recursions.


def recursion(microbatches, staleness):
  """w(t+1) = w(t) - eta grad f(w_1(t - tau_1), ..., w_n(t - tau_n))."""
  history = [numbers()[2]]
  for t in range(microbatches):
    versions = [max(t - tau, 0) for tau in staleness]
    grad = gradient_of(mixed_versions(history, versions), t)
    history.append(descend(history[-1], [grad]))
  return history[-1]


def test_pipedream_is_its_recursion():
  table = one_f_one_b(STAGES, COUNT, every=1, flush=False)
  found, _, records = run_table(table)
  close(found, recursion(COUNT, [3, 2, 1, 0]))
  read = analyze.staleness(table).forward
  for stage, rows in enumerate(records):
    np.testing.assert_array_equal(rows.staleness, read[stage])
    assert (rows.gap[rows.staleness == 0] == 0).all()


def test_vertical_sync_reads_the_version_of_the_first_stage():
  table = one_f_one_b(STAGES, COUNT, every=1, flush=False)
  found, _, _ = run_table(table, weights="vertical")
  close(found, recursion(COUNT, [3, 3, 3, 3]))


def test_2bw_is_its_recursion():
  """w(t+1) = w(t) - eta grad f(w(t-1))."""
  table = one_f_one_b(STAGES, COUNT, every=4, flush=False)
  found, _, _ = run_table(table, weights="2bw")
  history = [numbers()[2]]
  for t in range(COUNT // 4):
    read = history[max(t - 1, 0)]
    gradients = [gradient_of(read, m) for m in range(4 * t, 4 * t + 4)]
    history.append(descend(history[-1], gradients))
  close(found, history[-1])


def test_stale_weights_are_those_of_now_on_the_way_back():
  """Two stages. The first one's forward is one update older than its backward;
  with recomputation all of its backward is of now, and only what it gave to the
  second was old."""
  first, second = (jax.jit(part.fn) for part in parts(2))
  x, labels, params = numbers()
  at = cuts(2)
  stage = stage_lib.compile_stage(first, params[: at[1]], (), (x[0],))

  @jax.jit
  def backward(fn_params, gy, x):
    _, back = jax.vjp(lambda p: first(p, (), (x,))[0], fn_params)
    return back(gy)[0]

  @jax.jit
  def both(v, y, labels):
    return jax.grad(lambda v, y: second(v, y, labels)[0], (0, 1))(v, y)

  def by_hand(recompute):
    w, v = params[: at[1]], params[at[1] :]
    before = w
    for t in range(COUNT):
      y, _, kept = stage.forward(before, (), (x[t],))
      dv, dy = both(v, y, labels[t])
      if recompute:
        dw = backward(w, dy, x[t])
      else:  # old activations, weights of now
        dw, _ = stage.backward(w, kept, [dy])
      before = w if t else params[: at[1]]
      w = descend(w, [dw])
      v = descend(v, [dv])
    return w + v

  table = one_f_one_b(2, COUNT, every=1, flush=False)
  for recompute in (False, True, (True, False)):  # FTPipe spares the last
    found, _, _ = run_table(table, 2, weights="latest", recompute=recompute)
    close(found, by_hand(bool(recompute)))
  assert analyze.staleness(table, "latest").backward.max() == 0


def test_recomputation_with_a_stash_changes_no_bit():
  table = one_f_one_b(STAGES, COUNT, every=1, flush=False)
  found = run_table(table)[0]
  for recompute in (True, [True, False, False, True]):
    same(found, run_table(table, recompute=recompute)[0])


@pytest.mark.parametrize("weights", ["stash", "2bw", "vertical"])
def test_the_simulator_imposes_the_same_delays_without_a_pipeline(weights):
  every = 4 if weights == "2bw" else 1
  table = one_f_one_b(STAGES, COUNT, every=every, flush=False)
  x, labels, params = numbers()
  at = cuts(STAGES)
  owners = [
    stage
    for stage, (first, last) in enumerate(zip(at, at[1:], strict=False))
    for _ in jax.tree.leaves(params[first:last])
  ]
  leaves = jax.tree.leaves(params)
  held = np.arange(STAGES + 1) > np.array(owners)[:, None]
  plan = sharding.ShardPlan(
    STAGES,
    tuple(x.shape for x in leaves),
    tuple(tuple(len(x) * row) for x, row in zip(leaves, held, strict=True)),
  )

  rules = algorithms.build("asgd", RATE, 1)._replace(every=every)
  simulated = simulator.run_sharded(
    *(rules.server(), worker_lib.gradient_worker(batch_loss), params),
    analyze.traces(table, weights),
    workers=1,
    batch=lambda w, job: (x[job], labels[job]),
    root=jax.random.key(0),
    plan=plan,
  )
  whole = sharding.join(plan, [state.params for state in simulated.states])
  found, _, records = run_table(table, weights=weights)
  close(found, whole, atol=1e-15)
  for stage, rows in enumerate(simulated.records):
    updates = rows.staleness[every - 1 :: every]
    np.testing.assert_array_equal(updates, records[stage].staleness)


# What keeps something for each worker, or reads how old a gradient is.
CURES = (
  *("nag_asgd", "multi_asgd", "dana_zero", "dana_slim", "dana_dc"),
  *("dc_asgd_a", "gap_aware"),
)
# Of the recipes that leave nothing to workers.
PLAIN_WORKER = worker_lib.gradient_worker(batch_loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURES)
def test_a_cure_is_that_of_as_many_workers_as_updates_in_flight(name):
  """With vertical sync every stage has 4 updates in flight, which is the round
  robin of 4 workers on one server."""
  table = one_f_one_b(STAGES, COUNT, every=1, flush=False)
  assert analyze.in_flight(table, "vertical").tolist() == [4] * 4
  x, labels, params = numbers()
  trace = orders.fixed_delay(delay=3, messages=COUNT)
  worker = PLAIN_WORKER
  if recipe(name, 4).at_worker is not None:
    worker = recipe(name, 4).make_worker(batch_loss)
  host = simulator.make_host(server(name, 4), worker)
  simulation, _ = host.run(
    *(host.init(params, 4), trace, len(trace.job)),
    batch=lambda w, job: (x[job], labels[job]),
    root=jax.random.key(0),
  )
  options = {"name": name, "workers": 4, "weights": "vertical"}
  found, _, records = run_table(table, **options)
  close(found, simulation.server.params, atol=1e-12)
  assert records[0].staleness[-1] == 3
  if server(name, 4).workers == 4:
    assert records[0].worker.tolist() == [0, 1, 2, 3] * 3
  again, _, _ = run_table(table, stops=range(1, table.slots, 3), **options)
  same(again, found)


def test_look_ahead_is_not_what_a_backward_of_another_version_reads():
  """With the newest weights, and recomputation, a gradient is that of the
  server's weights, and only what a stage gave to the next one looked ahead."""
  first, second = (jax.jit(part.fn) for part in parts(2))
  x, labels, params = numbers()
  at = cuts(2)
  w, v = params[: at[1]], params[at[1] :]
  tx = optax.trace(0.9)
  w_state, v_state, sent, w_sent = tx.init(w), tx.init(v), v, [w]

  @jax.jit
  def backward(w, gy, x):
    return jax.vjp(lambda p: first(p, (), (x,))[0], w)[1](gy)[0]

  def move(params, velocity, rate):
    return jax.tree.map(lambda p, u: p - rate * u, params, velocity)

  def loss(v, y, labels):
    return second(v, y, labels)[0]

  for t in range(COUNT):
    y = first(w_sent[max(t - 1, 0)], (), (x[t],))[0]
    dv, dy = jax.grad(loss, (0, 1))(sent, y, labels[t])
    fresh = w_sent[0] if t == 0 else w
    step, w_state = tx.update(backward(fresh, dy, x[t]), w_state)
    w = move(w, step, RATE)
    w_sent.append(move(w, w_state.trace, 0.9 * RATE))
    step, v_state = tx.update(dv, v_state)
    v = move(v, step, RATE)
    sent = move(v, v_state.trace, 0.9 * RATE)
  table = one_f_one_b(2, COUNT, every=1, flush=False)
  options = {"name": "nag_asgd", "weights": "latest", "recompute": True}
  found, _, _ = run_table(table, 2, **options)
  close(found, w + v)


def test_pipemare_is_its_equations():
  """T1 and T2 with K = 5 and D = 1 / 4: tau is 3 at the first stage of two, 1
  at the second, which is what `pipemare` makes of the forwards, too."""
  cures = discrepancy.cures(2, every=1, updates=5, decay=0.25)
  x, labels, params = numbers()
  halves = params[: cuts(2)[1]], params[cuts(2)[1] :]
  made = [
    part._replace(
      server=asgd.make_server(
        discrepancy.follow(
          base.as_algorithm(optax.sgd(discrepancy.reschedule(RATE, cure))), cure
        )
      ),
      correct=discrepancy.extrapolate(cure),
    )
    for part, cure in zip(parts(2), cures, strict=True)
  ]
  given = functools.partial(extra, 2)
  run_ = executor_of(
    schedules.pipemare(2, COUNT), 2, made=made, weights="latest"
  )
  found = run_.params(run_.run(run_.start()).state)

  def compiled_stage(stage, x):
    fn, weights = made[stage].fn, halves[stage]
    return stage_lib.compile_stage(fn, weights, x, given(stage, 0))

  first = compiled_stage(0, ())
  stages = first, compiled_stage(1, first.y)
  history = [list(halves)]
  deltas = [optax.tree.zeros_like(half) for half in halves]
  for t in range(COUNT):
    kept, y = [], ()
    for s, tau in enumerate((3, 1)):
      y, _, residuals = stages[s].forward(
        history[max(t - tau, 0)][s], y, given(s, t)
      )
      kept.append(residuals)
    new, gy = [None, None], [np.ones(())]
    for s, tau in ((1, 1), (0, 3)):
      now = history[-1][s]
      old = jax.tree.map(lambda w, d, tau=tau: w - tau * d, now, deltas[s])
      gradient, gy = stages[s].backward(old, kept[s], gy)
      rate = RATE / tau ** (1 - min(t / 5, 1))
      new[s] = jax.tree.map(lambda w, g, a=rate: w - a * g, now, gradient)
      gamma = 0.25 ** (1 / tau)
      deltas[s] = jax.tree.map(
        lambda d, w, v, g=gamma: g * d + (1 - g) * (w - v),
        *(deltas[s], new[s], now),
      )
    history.append(new)
  found, wanted = (list(map(tuple, each)) for each in (found, history[-1]))
  close(found, wanted, atol=1e-8)  # optax counts updates in float32


# Stopping, going on, failing.


WHOLE = one_f_one_b(STAGES, 8, every=1, flush=False, backward="IW")
CUT = {
  "stash": (WHOLE, {}),
  "recomputing": (WHOLE, {"weights": "latest", "recompute": True}),
  "vertical": (WHOLE, {"weights": "vertical"}),
  "state at workers": (WHOLE, {"name": "dana_slim"}),
  # Weights for a replica are on their way, too.
  "replicas": (schedules.pipedream(2, 12, replicas=(2, 1)), {}),
}


@pytest.mark.parametrize("case", CUT)
def test_a_run_can_be_cut_before_any_slot(case):
  table, options = CUT[case]
  whole, losses, _ = run_table(table, table.stages, **options)
  stops = range(1, table.slots)
  found, others, _ = run_table(table, table.stages, stops=stops, **options)
  same(found, whole)
  assert losses == others


def test_what_is_on_its_way_is_plain_arrays():
  """So that a checkpoint can hold it."""
  run_ = executor_of(WHOLE)
  middle = run_.run(run_.start(), 9).state
  assert {"w", "x", "g", "kept"} <= {kind for kind, *_ in middle.entries}
  there = jax.device_get(middle)
  back = jax.tree.map(lambda x: x, there)
  end = run_.run(run_.place(back)).state
  same(whole_of(run_, end), run_table(WHOLE)[0])


def test_a_stage_that_raises_is_named_and_nothing_hangs():
  def failing(stage, microbatch):
    if (stage, microbatch) == (0, 5):
      raise OSError("no such file")
    return extra(STAGES, stage, microbatch)

  table = one_f_one_b(STAGES, 8, every=1, flush=False)
  run_ = executor_of(table, given=failing)
  before = threading.active_count()
  with pytest.raises(
    PipelineError, match="F of stage 0, microbatch 5 .* OSError: no such file"
  ):
    run_.run(run_.start())
  assert threading.active_count() == before


def test_own_actions_are_called():
  called = []
  order = [("F", 0, 0), ("B", 0, 0), ("tidy", -1, -1)]
  table = table_lib.lay_out("own", [order], every=1, flush=True)
  run_table(table, 1, own={"tidy": called.append})
  assert called == [0]
  with pytest.raises(ValueError, match=r"actions \['tidy'\]"):
    run_table(table, 1)


def test_own_actions_may_be_of_a_stage():
  """Which does not make their device one of the stage's."""
  rows = [(0, 0, 0, 0, "F"), (1, 1, 0, 0, "K"), (2, 0, 0, 0, "B")]
  table = table_lib.make("own", rows, every=1, flush=True)
  called = []
  found, _, _ = run_table(table, 1, own={"K": called.append})
  assert called == [1]
  close(found, descend_whole(1, 1))


def without(state, kind):
  """Returns a state without the entries of a kind, of which it has some."""
  left = {key: v for key, v in state.entries.items() if key[0] != kind}
  assert len(left) < len(state.entries)
  return state._replace(entries=left)


def test_a_state_must_be_one_of_the_table():
  """Or its lanes would wait for what never comes."""
  table = schedules.pipedream(2, 4)
  run_ = executor_of(table, 2)
  middle = run_.run(run_.start(), 5).state
  there = jax.device_get(middle)
  for until in (3, -1, table.slots + 1, 5.0, "5", True):
    with pytest.raises(ValueError, match=r"at slot 5 can stop before slots 5"):
      run_.run(middle, until)
  for kind in ("w", "kept", "x"):
    for call in (run_.run, run_.place):
      with pytest.raises(ValueError, match=rf"has .'{kind}', .* not whole"):
        call(without(there, kind))
  with pytest.raises(ValueError, match="1 stages, and pipedream has 2"):
    run_.run(there._replace(servers=there.servers[:1]))
  table = gpipe(2, 4)
  slim = executor_of(table, 2, made=parts(2, "dana_slim"), together=True)
  there = jax.device_get(slim.run(slim.start(), table.slots - 1).state)
  assert ("m", 1, 3) in there.entries
  for kind in ("sum", "at_worker", "m"):
    with pytest.raises(ValueError, match=rf"has .'{kind}', .* not whole"):
      slim.place(without(there, kind))
  slim.run(slim.place(there))
  first = run_.start()
  run_.run(first)
  with pytest.raises(ValueError, match="was consumed by a run"):
    run_.run(first)
  other = executor_of(table, 2)
  with pytest.raises(ValueError, match="has no .'at_worker', 0, 0., "):
    other.run(other.place(there))


def test_spans_tell_what_was_done_when():
  ticks = iter(range(10**6))
  table = one_f_one_b(2, 4)
  run_ = executor_of(table, 2, clock=lambda: float(next(ticks)))
  spans = run_.run(run_.start()).spans
  updates = [span for span in spans if span.action == "update"]
  assert sorted((u.stage, u.microbatch) for u in updates) == [
    (stage, m) for stage in range(2) for m in range(4)
  ]
  assert all(update.device == update.stage for update in updates)
  spans = [span for span in spans if span.action != "update"]
  assert len(spans) == len(table.tasks)
  for device in range(2):
    mine = [span for span in spans if span.device == device]
    order = [(s.stage, s.microbatch, s.action) for s in mine]
    tasks = [t for t in table.tasks if t.device == device]
    assert order == [(t.stage, t.microbatch, t.action) for t in tasks]
    assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))


ASYNCHRONOUS = one_f_one_b(4, 8, every=1, flush=False)
UPDATES_OF_ONES_OWN = table_lib.lay_out(
  "own",
  [[("F", 0, 0), ("B", 0, 0), ("update", -1, -1)]],
  every=1,
  flush=True,
)


def rounded(params, x, extra):
  return params.astype(int), ()


def product(params, x, extra):
  return params[0] * params[1], ()


def single(fn, params):
  """A pipeline of a single stage."""
  return executor_of(gpipe(1, 2), 1, made=[Part(fn, params, server("asgd"))])


MISTAKES = {
  "parts": (lambda: executor_of(gpipe(3, 4)),
    "3 stages and parts has 4: pass one part for each stage"),
  "workers": (lambda: run_table(ASYNCHRONOUS, name="dana_zero", workers=3),
    "stage 0 has 4 updates in flight, and its algorithm was built for 3"),
  "recompute": (lambda: run_table(gpipe(4, 4), recompute=[True, False]),
    r"recompute must be a bool, or one for each of 4 stages, not \[True, F"),
  "devices": (lambda: run_table(gpipe(4, 4), devices=jax.devices()[:2]),
    "needs 4 devices, and devices has 2"),
  "weights": (lambda: run_table(gpipe(4, 4), weights="newest"),
    "weights must be one of latest, stash, 2bw, vertical, not 'newest'"),
  "2bw": (
    lambda: run_table(one_f_one_b(4, 8, every=2, flush=False), weights="2bw"),
    "needs more microbatches in an update",
  ),
  "loss": (lambda: executor_of(gpipe(1, 2), made=parts(4)[:1]),
    "last stage must return its loss"),
  "whole loss": (lambda: single(rounded, np.ones(())),
    r"must return its loss, float\[\], not int64\[\]"),
  "whole parameters": (lambda: single(product, (np.ones(()), np.int32(1))),
    "stage 0 has parameters of dtype int32, which have no gradient"),
  "update": (lambda: run_table(UPDATES_OF_ONES_OWN, 1, own={"update": print}),
    "actions 'update', the executor's name for updates: rename them"),
  "together": (lambda: run_table(ASYNCHRONOUS, together=True),
    "their updates cannot be made together"),
  "next pass": (
    lambda: (lambda e: e.next_pass(e.start()))(executor_of(gpipe(4, 4))),
    "run it to its end first"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
