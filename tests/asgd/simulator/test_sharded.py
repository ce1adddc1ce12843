"""A server in shards, obeyed as far as is asked for."""

import jax
import numpy as np

from asgd import algorithms, base, problems, simulator
from asgd import worker as worker_lib
from asgd.orders import durations, shards
from asgd.orders.protocol import Rules

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
COUNTS = {"workers": 3, "messages": 20}
ROOT = jax.random.key(0)
DATA = {"batch": PROBLEM.batches(0, 3), "root": ROOT}


def build(delays=None):
  """Returns (server, worker, params, traces)."""
  recipe = algorithms.build("nag_asgd", 0.02, 3)
  worker = worker_lib.gradient_worker(PROBLEM.loss, recipe.at_worker)
  clock = durations.homogeneous()
  traces = shards.out_of_step(
    *(Rules(fetch_every=2), clock, delays), **COUNTS, shards=2
  )
  return recipe.server(), worker, PROBLEM.init(ROOT), traces


def test_shards_in_step_are_one_server():
  server, worker, params, traces = build()
  run = simulator.Sharded(server, worker, params, traces, workers=3, **DATA)
  host = simulator.make_host(server, worker)
  for messages in (7, 20):
    run.until(messages)
    rows = simulator.end_of_message(traces[0])[messages - 1]
    simulation, records = host.run(
      *(host.init(params, 3), traces[0], int(rows)), **DATA
    )
    np.testing.assert_allclose(run.params, simulation.server.params, rtol=1e-6)
    for part in run.records():
      np.testing.assert_array_equal(part.staleness, records.staleness)
      np.testing.assert_allclose(part.loss, records.loss, rtol=1e-5)


def test_a_run_goes_on_where_it_was_packed():
  made = build(durations.heterogeneous(0.6, seed=2))
  runs = [
    simulator.Sharded(*made, workers=3, **DATA) for _ in range(2)
  ]
  runs[0].until(9)
  tree, notes = runs[0].pack()
  template = runs[1].pack_template(notes)
  assert jax.tree.structure(tree) == jax.tree.structure(template)
  runs[1].unpack(jax.tree.map(np.array, tree), notes)
  ends = [sum(t.action == base.RECEIVE) for t in made[3]]
  assert ends == [20, 20]
  for run in runs:
    run.until()
  np.testing.assert_array_equal(runs[0].params, runs[1].params)
  for one, other in zip(runs[0].records(), runs[1].records(), strict=True):
    np.testing.assert_array_equal(one.loss[-len(other.loss) :], other.loss)
