"""Checkpoints: everything comes back, sharing included, or it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asgd import algorithms, durations, orders, problems, simulator
from asgd import worker as worker_lib
from launch import checkpoints

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
WORKERS = 4


def simulate(name, events):
  """Returns (host, simulation, records, run) after some events."""
  recipe = algorithms.build(name, 0.01, WORKERS)
  host = simulator.make_host(
    recipe.server(), worker_lib.gradient_worker(PROBLEM.loss, recipe.message)
  )
  trace = orders.build(
    recipe.order, durations.homogeneous(), workers=WORKERS, messages=40
  )

  def run(simulation, end):
    return host.run(
      simulation,
      trace,
      end,
      batch=PROBLEM.batches(0, WORKERS),
      root=jax.random.key(0),
    )

  simulation, records = run(start(host), events)
  return host, simulation, records, run


def start(host):
  return host.init(PROBLEM.init(jax.random.key(0)), WORKERS)


@pytest.fixture
def folder(tmp_path):
  made = checkpoints.Checkpoints(tmp_path / "checkpoints")
  yield made
  made.close()


@pytest.mark.parametrize("name", sorted(algorithms.RECIPES))
def test_a_restored_run_goes_on_to_the_same_bits(folder, name):
  # 23 rows: tickets in flight, and a half-full inbox where messages wait.
  host, simulation, records, run = simulate(name, 23)
  folder.save(simulation, records, {"rows": [1, None]})
  saved = folder.restore(start(host))
  assert saved.simulation.event == 23
  assert saved.notes == {"rows": [1, None]}
  jax.tree.map(np.testing.assert_array_equal, saved.records, records)
  # The original goes first: a restored state must share no buffer with it.
  expected, _ = run(simulation, 60)
  actual, _ = run(saved.simulation, 60)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)
  assert checkpoints.digest(actual) == checkpoints.digest(expected)


def test_tickets_that_share_parameters_still_share_them(folder):
  host, simulation, records, _ = simulate("asgd", 5)
  before = {
    (worker, job): ticket
    for worker, tickets in enumerate(simulation.tickets)
    for job, ticket in tickets.items()
  }
  assert len({id(t.params) for t in before.values()}) < len(before)
  folder.save(simulation, records, None)
  restored = folder.restore(start(host)).simulation
  assert [list(t) for t in restored.tickets] == [
    list(t) for t in simulation.tickets
  ]
  for (worker, job), ticket in before.items():
    again = restored.tickets[worker][job]
    assert int(again.version) == int(ticket.version)
    for (other, its_job), its_ticket in before.items():
      if its_ticket.params is ticket.params:
        assert restored.tickets[other][its_job].params is again.params


def test_the_newest_of_two_is_restored_and_no_more_are_kept(folder, tmp_path):
  host, simulation, records, run = simulate("asgd", 7)
  for end in (9, 11, 13):
    simulation, part = run(simulation, end)
    records = simulator.concatenate([records, part])
    folder.save(simulation, records, end)
  assert folder.restore(start(host)).notes == 13
  steps = {p.name for p in (tmp_path / "checkpoints").iterdir()}
  assert {name for name in steps if name.isdigit()} == {"11", "13"}


def test_nothing_to_restore_is_none(folder):
  host, *_ = simulate("asgd", 5)
  assert folder.restore(start(host)) is None


def test_all_damaged_is_none_and_says_so_for_each(folder, tmp_path, capsys):
  host, simulation, records, run = simulate("asgd", 7)
  folder.save(simulation, records, None)
  simulation, part = run(simulation, 9)
  folder.save(simulation, simulator.concatenate([records, part]), None)
  for step in ("7", "9"):
    (meta,) = (tmp_path / "checkpoints" / step / "meta").glob("metadata*")
    meta.write_text(meta.read_text()[:-20])
  assert folder.restore(start(host)) is None
  said = capsys.readouterr().err.splitlines()
  assert len(said) == 2
  for line, step in zip(said, ("9", "7"), strict=True):
    assert f"checkpoints/{step} is damaged and is not used" in line
    assert (tmp_path / f"damaged-{step}").is_dir()


def test_a_digest_sees_values_dtypes_and_shapes():
  x = np.arange(6.0)
  different = [
    x,
    x.astype(np.float32),
    x.reshape(2, 3),
    np.nextafter(x, 9),
    np.zeros(6),
  ]
  digests = {checkpoints.digest({"x": jnp_or_np}) for jnp_or_np in different}
  assert len(digests) == len(different)
  with jax.enable_x64(True):
    assert checkpoints.digest([jnp.asarray(x)]) == checkpoints.digest([x])


def test_a_live_checkpoint_of_more_than_the_trace_has_is_not_used(
  tmp_path, capsys
):
  folder = checkpoints.LiveCheckpoints(tmp_path / "checkpoints")
  for rows in (5, 9):
    folder.save([({"w": np.full(3, rows)}, {"rows": rows})])
  template = [{"w": np.zeros(3)}]
  ((state, meta),) = folder.restore(template, [9])
  assert meta["rows"] == 9
  ((state, meta),) = folder.restore(template, [7])
  assert (state["w"].tolist(), meta["rows"]) == ([5] * 3, 5)
  said = capsys.readouterr().err
  assert "trace-0.csv has 7 rows, the checkpoint is of row 9" in said
  assert folder.restore(template, [4]) is None
  folder.close()
