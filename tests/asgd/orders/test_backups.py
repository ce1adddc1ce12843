"""Backup tasks: what is late in a round is done twice, and counts once."""

import jax
import kit
import numpy as np
import pytest

from asgd import algorithms, base, orders, problems, simulator
from asgd import worker as worker_lib
from asgd.orders import durations
from asgd.orders.protocol import Dispatcher, Rules


def given(*times):
  """Durations: of each worker its times, and then 1."""
  return durations.Durations(lambda worker: iter([*times[worker], *[1.0] * 99]))


def test_a_worker_that_is_late_is_missed_in_the_next_round():
  clock = given([1], [1], [4])
  trace = orders.backup_tasks(clock, workers=3, messages=6, late=2)
  assert kit.steps(trace)[1:] == [
    "2.0  send 0:2",  # a backup task of worker 2's
    "3.0  receive 0:0  receive 1:1  receive 0:2  send 0:3  send 1:4",
    "4.0  drop 2:2  send 2:5",
    "5.0  receive 0:3  receive 1:4  receive 2:5",
  ]
  assert orders.count_backups(trace) == (1, 1)


def test_the_backup_task_is_dropped_if_it_comes_second():
  clock = given([1, 5], [1], [2.5])
  trace = orders.backup_tasks(clock, workers=3, messages=3, late=2)
  assert kit.steps(trace)[1:] == [
    "2.0  send 0:2",
    "2.5  receive 0:0  receive 1:1  receive 2:2",
  ]
  assert orders.count_backups(trace) == (1, 0)


@pytest.mark.parametrize("late", [1.0, 2.5])
def test_every_job_is_received_once_and_in_its_round(late):
  clock = durations.gamma(variation=0.9, seed=3)
  trace = orders.backup_tasks(clock, workers=4, messages=80, late=late)
  orders.check(trace, depth=99)
  jobs = trace.job[trace.action == base.RECEIVE].reshape(20, 4)
  jobs = np.sort(jobs)  # a worker's own are received in their order
  np.testing.assert_array_equal(jobs, np.arange(80).reshape(20, 4))
  started, first = orders.count_backups(trace)
  dropped = (trace.action == base.DROP).sum()
  assert started >= dropped > 0  # some are still at it at the end
  assert 0 < first <= started
  whole = orders.bulk_synchronous(clock, workers=4, messages=80)
  assert trace.time[-1] < whole.time[-1]


def test_a_run_with_backup_tasks_is_the_synchronous_run():
  problem = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
  recipe = algorithms.build("ssgd", 0.1, 3)
  worker = worker_lib.gradient_worker(problem.loss, recipe.at_worker)
  host = simulator.make_host(recipe.server(), worker)
  clock = durations.gamma(variation=0.9, seed=1)
  of_job = problem.batches(0, 1)
  ends = []
  for trace in (
    orders.bulk_synchronous(clock, workers=3, messages=24),
    orders.backup_tasks(clock, workers=3, messages=24, late=1.5),
  ):
    simulation, records = simulator.run_whole(
      *(host, problem.init(jax.random.key(0)), 3, trace),
      batch=lambda worker, job: of_job(0, job),
      root=jax.random.key(0),
    )
    assert records.staleness.max() == 0
    assert len(records.loss) == 24
    ends.append(np.asarray(simulation.server.params))
  # Messages of a round may be added up in another order.
  np.testing.assert_allclose(*ends, rtol=1e-6)
  assert orders.count_backups(trace)[0] > 0


class Round:
  """A round of three, of which workers 0 and 1 have ended theirs at 1."""

  def __init__(self):
    self.rows = []
    self.it = Dispatcher(Rules(round=3, late=2), jobs=3, log=self.rows.append)
    for worker in range(3):
      self.it.join(worker, 0.0)
    self.it.grants(0.0)
    for worker in range(2):
      assert self.it.arrive(worker, 0, 1.0)
      assert self.it.deliver(1.0) == []

  def new(self):
    rows, self.rows[:] = list(self.rows), []
    return [f"{base.ACTIONS[e.action]} {e.worker}:{e.job}" for e in rows]


def test_a_job_is_handed_out_again_when_it_is_late():
  run = Round()
  assert run.it.next_late() == 2.0
  assert run.it.grants(1.9) == []
  run.new()
  assert [g[:3] for g in run.it.grants(2.0)] == [(0, 1, 2)]
  assert run.it.grants(9.0) == []  # two are enough
  assert run.it.next_late() == np.inf
  assert run.new() == ["send 0:2"]


def test_a_job_of_two_workers_is_not_lost_with_one_of_them():
  run = Round()
  run.it.grants(2.0)
  run.new()
  run.it.leave(2, 3.0)
  assert run.it.grants(3.0) == []
  assert run.new() == ["lost 2:2", "leave 2:0"]
  assert run.it.arrive(0, 1, 3.0)
  assert len(run.it.deliver(3.0)) == 3
  assert run.it.finished


def test_of_two_results_in_one_round_the_first_counts():
  run = Round()
  run.it.grants(2.0)
  run.new()
  assert run.it.arrive(2, 0, 3.0)
  assert run.it.arrive(0, 1, 3.0)
  assert run.it.deliver(3.0) == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]
  assert run.new()[0] == "drop 0:2"
  assert Dispatcher(run.it.rules, jobs=3).lost == 0


def test_late_is_a_factor_of_rounds():
  counts = {"workers": 2, "messages": 4}
  for late, why in ((0.5, "late must be a number, 1 or more"), ("2", "'2'")):
    with pytest.raises(ValueError, match=why):
      orders.backup_tasks(durations.constant(), **counts, late=late)
  with pytest.raises(ValueError, match="late 2 needs rounds without"):
    Dispatcher(Rules(late=2))
