"""The chunk and rounds engines agree with the host engine, wherever a run is
cut."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asgd import (
  algorithms,
  base,
  compression,
  orders,
  problems,
  simulator,
  stacking,
)
from asgd import server as server_lib
from asgd.orders import durations
from asgd.simulator import chunk, rounds, tickets

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
ROOT = jax.random.key(0)
WORKERS, MESSAGES = 4, 48
WIRE = 64  # bytes of five parameters as they are
DATA = {"batch": PROBLEM.batches(0, WORKERS), "root": ROOT}

bulk = orders.bulk_synchronous


def order_of(maker, seed=1, messages=MESSAGES, **options):
  clock = durations.homogeneous(seed=seed)
  return maker(clock, workers=WORKERS, messages=messages, **options)


# Recipe, order and its options; each needs something that the others do not.
CASES = {
  "one version shared": ("ssgd", bulk, {}),
  "sends that look ahead together": ("dana_zero", bulk, {}),
  "sends that look ahead": ("dana_zero", orders.asynchronous, {}),
  "reads what was sent": ("dc_asgd_a", orders.asynchronous, {"depth": 2}),
  "tickets that are kept": (
    *("asgd", orders.stale_synchronous),
    {"bound": 2, "cache": True},
  ),
  "workers with a state": ("downpour", orders.asynchronous, {}),
  "a warm start": ("nag_asgd", orders.asynchronous, {"warm_start": 9}),
  "tasks that are dropped": ("ssgd", orders.backup_tasks, {"late": 1.1}),
}


@functools.cache
def engines_of(name, other=simulator.make_chunk, **server):
  recipe = algorithms.build(name, 0.01, WORKERS)
  worker = recipe.make_worker(PROBLEM.loss)
  parts = recipe.server(**server), worker
  return simulator.make_host(*parts), other(*parts)


def cut(engine, trace, ends, between=None):
  """Replays up to each of some rows, as resumed runs do."""
  state, parts = engine.init(PROBLEM.init(ROOT), WORKERS), []
  for end in ends:
    state, part = (between or engine).run(state, trace, end, **DATA)
    parts.append(part)
  return state, simulator.concatenate(parts)


def same(one, other, dtype=np.float32):
  """Whether two runs agree: to the bit in float32, as XLA compiles them here,
  except for norms of messages, which it adds up in another order."""
  exact = dict(rtol=0, atol=0) if dtype == np.float32 else dict(rtol=1e-12)
  (state, records), (state2, records2) = one, other
  for field, x, y in zip(records._fields, records, records2, strict=True):
    norm = field == "message_norm" or dtype != np.float32
    close = dict(rtol=1e-5) if norm and x.dtype == np.float32 else exact
    np.testing.assert_allclose(y, x, err_msg=field, **close)
  chex.assert_trees_all_close(state.server, state2.server, **exact)
  assert state.event == state2.event
  for held, held2 in zip(state.tickets, state2.tickets, strict=True):
    assert held.keys() == held2.keys()
    chex.assert_trees_all_close(held, held2, **exact)
  chex.assert_trees_all_close(state.workers, state2.workers, **exact)


@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_the_host_engine(case, monkeypatch):
  monkeypatch.setattr(chunk, "_MAX_MESSAGES", 16)  # several calls
  name, maker, options = CASES[case]
  trace = order_of(maker, **options)
  host, many = engines_of(name)
  whole = cut(host, trace, [len(trace.time)])
  same(whole, cut(many, trace, [len(trace.time)]))
  # At a message, between sends, and from one engine to the other.
  middle = int(simulator.end_of_message(trace)[17])
  ends = [5, middle, middle + 1, len(trace.time)]
  same(cut(host, trace, ends[:3]), cut(many, trace, ends[:3]))
  same(whole, cut(many, trace, ends))
  same(whole, cut(many, trace, ends, between=host))
  same(whole, cut(host, trace, ends, between=many))


def test_norms_of_large_leaves_agree_wherever_a_run_is_cut():
  problem = problems.quadratic(np.linspace(1, 3, 40_000), noise=0.1)
  recipe = algorithms.build("dana_zero", 0.01, WORKERS)
  parts = recipe.server(), recipe.make_worker(problem.loss)
  trace = order_of(orders.asynchronous, messages=12)
  data = {"batch": problem.batches(0, WORKERS), "root": ROOT}

  def run(engine, *ends):
    state, records = engine.init(problem.init(ROOT), WORKERS), []
    for end in ends:
      state, part = engine.run(state, trace, end, **data)
      records.append(part)
    return state, simulator.concatenate(records)

  rows, middle = len(trace.time), int(simulator.end_of_message(trace)[5])
  many = simulator.make_chunk(*parts)
  state, records = whole = run(many, rows)
  resumed, same_records = run(many, middle, rows)
  chex.assert_trees_all_equal(state.server, resumed.server)
  chex.assert_trees_all_equal(records, same_records)
  same(run(simulator.make_host(*parts), rows), whole)
  assert (records.gap > 0).any()


def test_a_worker_that_is_replaced_starts_anew():
  host, many = engines_of("dana_slim")  # its workers have momentum
  rows = list(orders.trace.events(order_of(orders.asynchronous)))
  place = next(
    i for i in range(40, len(rows)) if rows[i].action == base.RECEIVE
  )
  row = rows[place]._replace(seq=orders.trace.NO_SEQ, job=1)
  leave, join = (row._replace(action=x) for x in (base.LEAVE, base.JOIN))
  rows[place + 1 : place + 1] = [leave, join]
  trace = orders.trace.from_events(rows)
  ends = [len(rows)]
  with_state = cut(many, trace, ends)
  same(cut(host, trace, ends), with_state)
  kept, _ = cut(many, order_of(orders.asynchronous), [len(rows) - 2])
  assert (kept.server.params != with_state[0].server.params).any()


@pytest.mark.parametrize(
  "server",
  [dict(gate=server_lib.max_staleness(2)), dict(every=3)],
  ids=["a gate", "several messages"],
)
def test_a_gate_and_an_inbox_agree_in_float64(server):
  with jax.enable_x64(True):
    problem = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
    params = jnp.asarray(np.ones(5), jnp.float64)
    data = {"batch": problem.batches(0, WORKERS), "root": ROOT}
    trace = order_of(orders.asynchronous)
    recipe = algorithms.build("asgd", 0.01, WORKERS)
    recipe = recipe._replace(every=server.pop("every", recipe.every))
    parts = recipe.server(**server), recipe.make_worker(problem.loss)
    one, other = (
      simulator.run_whole(make(*parts), params, WORKERS, trace, **data)
      for make in (simulator.make_host, simulator.make_chunk)
    )
    same(one, other, np.float64)


def test_codes_have_the_same_bytes_and_residuals():
  trace = order_of(orders.asynchronous)
  recipe = algorithms.build("asgd", 0.01, WORKERS)
  codec = compression.named("top_k", density=0.4)
  worker = compression.compressed(recipe.make_worker(PROBLEM.loss), codec)
  parts = compression.decoding(recipe.server(), codec), worker
  one, other = (
    cut(make(*parts), trace, [len(trace.time)])
    for make in (simulator.make_host, simulator.make_chunk)
  )
  same(one, other)
  assert (one[1].bytes_up < WIRE).all()
  assert one[1].residual_norm.any()


# Orders, options that are drawn for each, and a recipe for it.
ROUNDS = {
  "bulk_synchronous": ("ssgd", {}),
  "asynchronous": ("dc_asgd_a", {"depth": [1, 2, 3]}),
  "stale_synchronous": ("dana_slim", {"bound": [0, 1, 3]}),
  "stale_synchronous, cache": ("asgd", {"bound": [1, 2], "cache": [True]}),
  "backup_workers": ("ssgd", {"backup": [1]}),
  "backup_tasks": ("ssgd", {"late": [1.1, 1.5]}),
  "fixed_delay": ("dana_zero", {}),
  "with_stops": ("dana_slim", {"stop_after": [2, 4], "budget": [1.3]}),
  "asynchronous, gated": ("rennala_sgd", {}),
  "asynchronous, warm start": ("nag_asgd", {"warm_start": [5, 9]}),
  "bulk_synchronous, looking ahead": ("dana_zero", {}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_agree_in_float64_on_drawn_orders(name, seed, monkeypatch):
  monkeypatch.setattr(chunk, "_MAX_MESSAGES", 16)  # several calls
  monkeypatch.setattr(rounds, "_MAX_LANES", (64, 3)[seed])
  rng = np.random.default_rng(seed)
  recipe, options = ROUNDS[name]
  options = {key: rng.choice(x).item() for key, x in options.items()}
  trace = orders.build(
    name.split(",")[0],
    durations.heterogeneous(seed=seed),
    **dict(workers=WORKERS, messages=MESSAGES, **options),
  )
  end = len(trace.time)
  cuts = sorted(rng.choice(np.arange(1, end), 3, replace=False).tolist())
  with jax.enable_x64(True):
    data = DATA | {"root": jax.random.key(0)}
    one, other = engines_of(recipe, simulator.make_rounds)

    def run(engine, ends):
      params = jnp.asarray(np.ones(5), jnp.float64)
      state, parts = engine.init(params, WORKERS), []
      for stop in ends:
        state, part = engine.run(state, trace, stop, **data)
        parts.append(part)
      return state, simulator.concatenate(parts)

    whole = run(one, [end])
    same(whole, run(other, [end]), np.float64)
    same(whole, run(other, [*cuts, end]), np.float64)


def test_rounds_are_close_in_float32():
  trace = order_of(bulk)
  host, many = engines_of("ssgd", simulator.make_rounds)
  one, other = (cut(x, trace, [len(trace.time)]) for x in (host, many))
  chex.assert_trees_all_close(one[0].server, other[0].server, rtol=1e-5)
  again = cut(many, trace, [5, 31, len(trace.time)])
  same(other, again)  # to the bit


@pytest.mark.parametrize("seed", range(4))
def test_no_job_of_a_round_depends_on_another(seed):
  trace = order_of(orders.stale_synchronous, seed=seed, bound=2, depth=2)
  plan = tickets.plan_tickets(trace, shared=True)
  worker = trace.worker[plan.row]
  found = rounds.find_rounds(plan, worker, stateful=True, max_lanes=3)
  assert found.lanes <= 3
  events = enumerate(orders.trace.events(trace))
  rows = {e.key: i for i, e in events if e.action == base.SEND}
  ends = [*found.starts[1:], MESSAGES]
  for start, end in zip(found.starts.tolist(), ends, strict=True):
    assert len(set(worker[start:end].tolist())) == end - start <= 3
    for i in range(start, end):
      row = plan.row[i]
      begun = rows[trace.worker[row], trace.seq[row]]
      assert begun < plan.row[start]


def test_the_rounds_program_is_compiled_from_shapes_alone():
  recipe = algorithms.build("dana_slim", 0.01, WORKERS)
  parts = recipe.server(), recipe.make_worker(PROBLEM.loss)
  shapes = jax.eval_shape(PROBLEM.init, ROOT)
  for shared in (True, False):
    function, arguments = rounds.abstract_call(
      *(*parts, shapes, PROBLEM.batches(0, 1)(0, 0)),
      **dict(workers=WORKERS, messages=16, lanes=4, shared=shared),
    )
    compiled = function.lower(*arguments).compile()
    assert compiled.out_info[1].integers.shape == (20, 3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shared", [False, True])
def test_no_row_is_given_away_while_its_ticket_is_open(seed, shared):
  """Reads each ticket from its row in the order of the trace."""
  rng = np.random.default_rng(seed)
  trace = order_of(
    orders.stale_synchronous,
    seed=seed,
    bound=int(rng.integers(0, 4)),
    depth=int(rng.integers(1, 4)),
  )
  plan = tickets.plan_tickets(trace, shared=shared)
  rows, version, opened = {}, 0, {}
  columns = plan.slot, plan.earlier_jobs, plan.sent_slot
  following = list(zip(*columns, strict=True))
  for worker, slot in zip(*plan.sends[0][::-1], strict=True):
    rows[slot] = 0 if shared else (worker, 0)
  for row in orders.trace.events(trace):
    if row.action == base.SEND:
      opened[row.key] = version if shared else (row.worker, version)
      continue
    slot, earlier_jobs, sent_slot = following[version]
    assert earlier_jobs == 0 and rows[slot] == opened.pop(row.key)
    version += 1
    sends = plan.sends.get(version)
    sent = [(sent_slot, None)] if sends is None else zip(*sends, strict=True)
    for slot, worker in sent:
      if worker is None and version <= len(plan.sent_worker):
        worker = plan.sent_worker[version - 1]
      rows[slot] = version if shared else (worker, version)
  assert plan.slots <= MESSAGES


def test_rows_are_as_many_as_versions_in_flight():
  """A synchronous round has one version in flight, an asynchronous order as
  many as workers."""
  for maker, shared, count in (
    (bulk, True, 1),
    (bulk, False, WORKERS),
    (orders.asynchronous, True, WORKERS),
  ):
    plan = tickets.plan_tickets(order_of(maker), shared=shared)
    assert plan.slots <= count


def test_small_models_have_the_same_rows_whatever_their_order():
  """So cells of a sweep over workers share a compiled program."""
  few, many = (
    tickets.plan_tickets(
      orders.fixed_delay(delay=delay, messages=200), shared=True
    )
    for delay in (1, 99)
  )
  assert (few.slots, many.slots) == (2, 100)
  rows = [tickets.row_count(p, np.zeros(5)) for p in (few, many)]
  assert rows == [33, 101]
  assert tickets.row_count(few, np.zeros(2**20)) == 3  # 8 MB a row


def test_what_one_engine_alone_replays_is_named():
  _, many = engines_of("asgd")
  trace = order_of(orders.asynchronous)
  back = trace._replace(action=trace.action.copy(), job=trace.job.copy())
  back.action[9], back.job[9] = base.ROLLBACK, 3
  with pytest.raises(simulator.NotCompiled, match="rolls back"):
    many.follow(many.init(PROBLEM.init(ROOT), WORKERS), back, **DATA)
  wrong = trace._replace(action=trace.action.copy())
  wrong.action[0] = base.RECEIVE
  with pytest.raises(orders.trace.TraceError, match="was not sent"):
    many.follow(many.init(PROBLEM.init(ROOT), WORKERS), wrong, **DATA)


def choice_of(loss=PROBLEM.loss, messages=10_000, asked="auto", **more):
  optimizer = more.pop("optimizer", None)
  recipe = algorithms.build("asgd", 0.01, WORKERS, optimizer=optimizer)
  batch = more.pop("batch", PROBLEM.batches(0, 1)(0, 0))
  even = more.pop("even", True)
  jobs = simulator.JobShapes(PROBLEM.init(ROOT), batch, messages, even)
  parts = recipe.server(), recipe.make_worker(loss)
  trace = more.pop("trace", None)
  if trace is None:
    trace = order_of(orders.asynchronous)
  return simulator.choose(*parts, trace, jobs, asked=asked)


def widening(rate):
  """An optimizer with a state of bfloat16 that is float32 after an update."""
  return optax.GradientTransformation(
    lambda params: optax.tree.cast(params, jnp.bfloat16),
    lambda g, state, params=None: (g, optax.tree.add(g, state)),
  )


def test_an_engine_is_chosen_and_says_why():
  def convolved(params, batch, key):
    image = jnp.ones((1, 1, 8)) * params.sum()
    out = jax.lax.conv_general_dilated(image, image, (1,), "SAME")
    return out.sum(), PROBLEM.loss(params, batch, key)[1]

  assert str(choice_of()) == "chunk: many messages in one program"
  assert str(choice_of(messages=10)).startswith("host: 10 messages are fewer")
  assert str(choice_of(messages=10, asked="chunk")) == "chunk: as asked"
  assert str(choice_of(asked="host")) == "host: as asked"
  assert str(choice_of(asked="rounds")) == "rounds: as asked"
  clock = durations.homogeneous()
  trace = bulk(clock, workers=64, messages=256)
  assert str(choice_of(trace=trace)) == (
    "rounds: 64 gradients at the same parameters are computed together"
  )
  assert str(choice_of(convolved)).startswith("host: convolutions are slow")
  assert str(choice_of(even=False)) == "host: batches of jobs differ in size"
  with pytest.raises(ValueError, match="cannot simulate this: batches of jobs"):
    choice_of(even=False, asked="chunk")
  with pytest.raises(ValueError, match="'rounds' cannot simulate this"):
    choice_of(even=False, asked="rounds")
  text = "the first message changes dtypes of the optimizer's state"
  assert str(choice_of(optimizer=widening)) == f"host: {text}"
  with pytest.raises(ValueError, match=f"cannot simulate this: {text}; use"):
    choice_of(optimizer=widening, asked="chunk")
  known = "one of auto, host, chunk, rounds, not 'fast'"
  with pytest.raises(ValueError, match=known):
    choice_of(asked="fast")


def test_a_batch_of_another_shape_is_named():
  def batches(worker, job):
    return {"x": np.zeros(3 - job // 2)}

  text = r"job 2 has the shapes .*\(2,\).*\(3,\).*simulator.engine=host"
  for each in batches, stacking.NamedBatches(batches):
    with pytest.raises(ValueError, match=text):
      stacking.of_jobs(each, [0, 1, 0], [0, 1, 2])
