"""Values that figures compute beside their claims, and the cells they train."""

import itertools
import runpy

import kit
import numpy as np
import pytest
from pipeline_experiments import ENGINES

from asgd import base, orders
from asgd.figures import reproduce

FIGURES = kit.ROOT / "configs" / "figures"
WORKERS = 8


def file_of(name):
  """Returns what a figure's file defines."""
  return runpy.run_path(str(FIGURES / f"{name}.py"))


def test_failures_and_filters_have_the_cells_of_their_docstrings():
  for name, count in (("failures", 250), ("filters", 50)):
    task = reproduce.load(FIGURES / f"{name}.py", ENGINES)
    seeds = len(task.resolved.config["seeds"])
    assert seeds * sum(map(len, task.counts.values())) == count
    assert f"\n{count} cells" in file_of(name)["__doc__"]
    quick = reproduce.load(FIGURES / f"{name}.py", ENGINES, quick=True)
    assert len(quick.counts) <= len(task.counts)


@pytest.mark.parametrize("quick", [False, True])
def test_a_loss_is_never_reached_in_no_fewer_epochs_than_a_run_has(quick):
  task = reproduce.load(FIGURES / "asgd_parity.py", ENGINES, quick=quick)
  epochs = task.resolved.config["epochs"]
  assert task.figure.columns["never from"]["above"] >= epochs


def test_the_claim_of_a_filter_leaves_out_what_key_caching_saves():
  task = reproduce.load(FIGURES / "filters.py", ENGINES)
  runs = task.resolved.config["runs"]
  for claim in task.figure.claims:
    if claim.name == "significantly modified":
      of, to = (runs[claim.data[key]] for key in ("of", "to"))
      assert of.get("key_caching", True) == to.get("key_caching", True)


def failing(mtbf, seed):
  """Returns durations of the failures figure, without variation."""
  return orders.durations.failing(
    variation=1e-4, mtbf=float(mtbf), mttr=10.0, seed=seed
  )


@pytest.mark.parametrize("mtbf", [20, 50, 200])
def test_throughput_of_asgd_is_that_of_workers_that_begin_again(mtbf):
  figure = file_of("failures")
  messages = 200_000
  trace = orders.asynchronous(
    failing(mtbf, 1), workers=WORKERS, messages=messages
  )
  speed = messages / (WORKERS * trace.time[-1])
  expected = figure["asynchronous_throughput"](mtbf)
  assert speed == pytest.approx(expected, rel=0.01)
  # The batches that are begun again are 1 / (2 MTBF) of all.
  expected = figure["availability"](mtbf)
  assert speed == pytest.approx(expected, rel=0.7 / mtbf + 0.01)


@pytest.mark.parametrize("mtbf", [20, 50, 200])
def test_a_round_of_ssgd_waits_for_the_last_replacement(mtbf):
  figure = file_of("failures")
  rounds = 20_000
  trace = orders.bulk_synchronous(
    failing(mtbf, 2), workers=WORKERS, messages=rounds * WORKERS
  )
  received = trace.time[trace.action == base.RECEIVE]
  stall = received[-1] / rounds - 1
  assert stall == pytest.approx(figure["stall"](mtbf), rel=0.05)


def test_replacements_of_several_rounds_overlap_under_averaging():
  """Workers that wait after ten batches lose less of their time."""
  clock = failing(50, 3)

  def jobs(worker):
    times = clock.stream(worker)
    while True:
      yield sum(itertools.islice(times, 10))

  ten = orders.durations.of_stream(jobs)
  spans = [
    orders.bulk_synchronous(
      each, workers=WORKERS, messages=count * WORKERS
    ).time[-1]
    for each, count in ((clock, 5000), (ten, 500))
  ]
  assert spans[1] < 0.9 * spans[0]


def test_ftpipe_trains_each_pipe_on_each_partition():
  figure = file_of("ftpipe")
  config = figure["get_config"]()
  assert len(config.runs) * len(config.seeds) == 30
  assert "\n30 cells" in figure["__doc__"]
  mixed = {k for k, run in config.runs.items() if "partition" in run}
  assert mixed == {f"mixed-{pipe}" for pipe in figure["PIPES"]}
  # The published hours fall in the claimed order.
  assert (np.diff(list(figure["HOURS"].values())) < 0).all()
