"""The host engine: references, donation, records, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asgd import algorithms, base, orders, problems, simulator
from asgd import worker as worker_lib
from asgd.losses import as_loss
from asgd.orders import durations
from asgd.simulator import steps

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)


ROOT = jax.random.key(0)
BATCH, START = PROBLEM.batches(0, 3), PROBLEM.init(ROOT)


def host_of(name="asgd", workers=3, rate=0.01):
  recipe = algorithms.build(name, rate, workers)
  worker = worker_lib.gradient_worker(PROBLEM.loss, recipe.at_worker)
  return simulator.make_host(recipe.server(), worker)


def make():
  host = host_of()
  trace = orders.asynchronous(
    durations.homogeneous(), workers=3, messages=12
  )

  def run(simulation, end, batch=BATCH):
    return host.run(simulation, trace, end, batch=batch, root=ROOT)

  return trace, host.init(START, 3), run


def test_a_warm_start_is_plain_sgd_to_the_bit():
  host, warm = host_of(rate=0.1), 5
  trace = orders.stale_synchronous(
    durations.homogeneous(),
    **dict(workers=3, messages=12, bound=4, depth=2, warm_start=warm),
  )
  batch, root, params = BATCH, ROOT, START
  start = int(simulator.end_of_message(trace)[warm - 1])
  simulation, records = host.run(
    host.init(params, 3), trace, start, batch=batch, root=root
  )
  assert records.staleness.tolist() == [0] * warm
  assert records.worker.tolist() == [0] * warm

  tx = optax.sgd(0.1)
  state = tx.init(params)

  @jax.jit
  def step(params, state, batch, key):
    grads = jax.grad(lambda p: as_loss(PROBLEM.loss)(p, batch, key)[0])(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for job in range(warm):
    key = worker_lib.job_key(root, 0, job)
    params, state = step(params, state, batch(0, job), key)
  np.testing.assert_array_equal(simulation.server.params, params)
  # The others, and it, go on from there.
  kept = simulation.server.params
  starts = np.flatnonzero(trace.action[start:] == base.RECEIVE)[0]
  simulation, _ = host.run(
    simulation, trace, start + int(starts), batch=batch, root=root
  )
  assert {w for w, held in enumerate(simulation.tickets) if held} == {0, 1, 2}
  for held in simulation.tickets:
    for ticket in held.values():
      assert ticket.params is kept


def test_tickets_that_do_not_look_ahead_are_references():
  _, start, run = make()
  simulation, records = run(start, 3)  # the three first sends
  assert not len(records.loss)
  for held in simulation.tickets:
    (ticket,) = held.values()
    assert ticket.params is simulation.server.params


def test_open_tickets_survive_the_updates_made_since():
  _, start, run = make()
  initial = np.array(start.server.params)
  simulation, _ = run(start, 4)  # three sends and one receive
  held = [t for tickets in simulation.tickets for t in tickets.values()]
  assert len(held) == 2
  for ticket in held:
    np.testing.assert_array_equal(ticket.params, initial)
  assert (np.asarray(simulation.server.params) != initial).all()


@pytest.mark.parametrize("name", ["asgd", "dana_zero"])
def test_a_simulation_is_consumed_but_its_initial_parameters_are_not(name):
  host, data = host_of(name, 2), dict(batch=PROBLEM.batches(0, 2), root=ROOT)
  params = PROBLEM.init(ROOT)
  trace = orders.fixed_delay(delay=1, messages=4)
  for _ in range(2):  # the second run starts from the same array
    host.run(host.init(params, 2), trace, len(trace.action), **data)
  np.testing.assert_array_equal(params, np.ones(5))


def test_each_row_of_the_records_is_one_receive_of_the_trace():
  trace, start, run = make()
  _, records = run(start, len(trace.action))
  rows = trace.action == 1
  np.testing.assert_array_equal(records.time, trace.time[rows])
  np.testing.assert_array_equal(records.worker, trace.worker[rows])
  np.testing.assert_array_equal(records.job, trace.job[rows])
  np.testing.assert_array_equal(records.update, np.arange(12) + 1)
  assert records.accepted.all()
  for column in records:
    assert column.shape == (12,)


def test_the_batch_of_a_message_is_that_of_its_worker_and_job():
  trace, start, run = make()
  asked = []

  def batch(worker, job):
    asked.append((worker, job))
    return BATCH(worker, job)

  run(start, len(trace.action), batch)
  rows = trace.action == 1
  expected = zip(
    trace.worker[rows].tolist(), trace.job[rows].tolist(), strict=True
  )
  assert asked == list(expected)


def test_the_loss_on_record_is_that_at_the_parameters_sent():
  _, start, run = make()
  _, records = run(start, 4)  # three sends and one receive
  worker, job = int(records.worker[0]), int(records.job[0])
  expected, _ = PROBLEM.loss(
    jnp.ones(5), jnp.asarray(BATCH(worker, job)), None
  )
  np.testing.assert_allclose(records.loss, [expected], rtol=1e-6)


def test_keys_are_functions_of_worker_and_job():
  root = jax.random.key(7)
  seen = {
    tuple(jax.random.key_data(worker_lib.job_key(root, w, j)).tolist())
    for w in range(4)
    for j in range(5)
  }
  assert len(seen) == 20
  again = worker_lib.job_key(root, 2, 3)
  assert tuple(jax.random.key_data(again).tolist()) in seen


def test_a_worker_that_is_not_there_is_named():
  host, trace = host_of(workers=2), orders.fixed_delay(delay=2, messages=4)
  with pytest.raises(ValueError, match="a worker 2, the simulation only 2"):
    host.run(host.init(START, 2), trace, 4, batch=None, root=ROOT)


def test_a_receive_without_a_send_is_named():
  trace, start, run = make()
  first = int(np.flatnonzero(trace.action == 1)[0])
  skipped = start._replace(event=first)
  words = r"trace row 3 \(.*\): that job was not sent to the worker"
  with pytest.raises(ValueError, match=words):
    run(skipped, first + 1)


def test_more_workers_than_the_algorithm_was_built_for_are_refused():
  with pytest.raises(ValueError, match="built for 2 workers, the simulation"):
    host_of("dana_zero", 2).init(START, 3)


def test_a_run_and_its_replay_have_the_same_compiled_functions():
  recipe = algorithms.build("dana_zero", 0.01, 3)
  server, worker = recipe.server(), recipe.make_worker(PROBLEM.loss)
  shard = steps.compile_steps(server, None, keeps_messages=True)
  run = steps.compile_steps(server, worker)
  replay = steps.compile_steps(
    server, worker, group=steps.ALONE, keeps_messages=True, wire=None
  )
  assert shard.send is run.send is replay.send
  assert shard.stage is run.stage is replay.stage
  assert run.work is replay.work
  other = steps.compile_steps(server, worker, wire="bfloat16")
  assert other.send is not run.send and other.work is run.work


def test_many_leaves_are_warned_of(monkeypatch):
  server = algorithms.build("asgd", 0.01, 2).server()
  monkeypatch.setattr(steps, "_MANY_LEAVES", 3)
  simulator.start(server, [np.ones(2)] * 3)
  message = "the parameters have 4 leaves, .* more than 3: stack those"
  with pytest.warns(UserWarning, match=message):
    simulator.start(server, [np.ones(2)] * 4)


@pytest.mark.parametrize("name", ["dana_zero", "easgd", "ssgd"])
def test_a_first_state_holds_no_array_twice_and_none_of_the_caller(name):
  """`receive` donates a part of the state."""
  params = {"w": jnp.ones(3), "b": jnp.ones(2)}
  state = simulator.start(algorithms.build(name, 0.01, 2).server(), params)
  arrays = jax.tree.leaves((state, params))
  assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)


def test_an_array_that_an_optimizer_holds_is_not_donated():
  rates = jnp.array([0.5, 0.25])

  def optimizer(learning_rate):
    del learning_rate

    def update(updates, state, params=None):
      return jax.tree.map(lambda g: -state[0] * g, updates), state

    return optax.GradientTransformation(lambda params: rates, update)

  server = algorithms.asgd(0.1, workers=2, optimizer=optimizer).server()
  host = simulator.make_host(server, worker_lib.gradient_worker(PROBLEM.loss))
  trace = orders.fixed_delay(delay=1, messages=3)

  def train():
    simulation = host.init(START, 2)
    end = len(trace.time)
    return host.run(simulation, trace, end, batch=BATCH, root=ROOT)[0].server

  first, second = train(), train()
  np.testing.assert_array_equal(first.params, second.params)
  np.testing.assert_array_equal(rates, [0.5, 0.25])


def test_cuts_are_after_each_receive():
  trace = orders.fixed_delay(delay=1, messages=3)
  # send send | receive send | receive send | receive
  np.testing.assert_array_equal(simulator.end_of_message(trace), [3, 5, 7])


def test_concatenating_nothing_gives_empty_records():
  records = simulator.concatenate([])
  assert all(column.shape == (0,) for column in records)
