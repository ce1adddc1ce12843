"""Live runs on a Ray cluster of several nodes, which this machine plays."""

import json
import sys

import kit
import pytest

from asgd.base import RECEIVE
from asgd.experiment import live_files, ray_runtime, storage
from asgd.live import ray_internals

pytestmark = [
  *(pytest.mark.slow, pytest.mark.process),
  pytest.mark.usefixtures("no_pictures"),
  # Ray starts programs, which do not go on as this process.
  pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning"),
]

AHEAD = 1e6  # seconds, of the clock of the second node
MODULE = f'''
import os
import time

import optax

import asgd
from asgd.live import faults, spans

if os.environ.get("FAR"):  # a machine of its own
  ours = time.monotonic
  time.monotonic = lambda: ours() + {AHEAD}
  spans.SpanWriter = faults.append_fault = None  # it has not the run's folder


def careful(learning_rate, workers, *, strength=0.04):
  del workers
  return asgd.Recipe(
    asgd.as_algorithm(optax.adam(learning_rate)),
    at_server=asgd.delay_compensation(strength),
  )
'''
CONFIG = '''
import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.model = dict(name="mlp", hidden=(8,))
  config.runs = dict(own=dict(recipe="far_module:careful"))
  config.engine = "ray"
  config.workers = (2,)
  config.batch_size = 16
  config.examples = 384
  config.learning_rate = 0.01
  config.evaluations = 2
  config.curvature_checks = 0
  config.allocation = dict(batch_size="speed", jobs=1)
  # Of the second node alone, which comes while it is waited for.
  config.live = dict(resources=dict(far=1), cluster_seconds=120.0, spans=True)
  return config
'''


def test_workers_of_another_node_that_comes_late(tmp_path, monkeypatch):
  pytest.importorskip("ray")
  from ray import cluster_utils
  from ray.autoscaler import sdk

  (tmp_path / "far_module.py").write_text(MODULE)
  (tmp_path / "config.py").write_text(CONFIG)
  out = tmp_path / "out"
  node = dict(num_cpus=1, include_dashboard=False)
  with ray_internals.without_unused_processes():
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node)

  def grow(bundles):
    assert bundles == 2 * [{"far": 1}]
    with ray_internals.without_unused_processes():
      cluster.add_node(
        num_cpus=1, resources={"far": 2}, env_vars={"FAR": "1"}
      )

  monkeypatch.setattr(sys, "path", [*sys.path])
  monkeypatch.setattr(sdk, "request_resources", grow)
  monkeypatch.setenv("RAY_ADDRESS", cluster.address)
  try:
    kit.call(
      *("train", "--allow_network", f"--config={tmp_path / 'config.py'}"),
      *(f"--workdir={out}", "--fault=slow:1:2:0.01"),
      f"--profile={tmp_path / 'trace'}",
      status=0,
    )
  finally:
    ray_runtime.stop()
    cluster.shutdown()
  cell = out / "cells" / "own-n2-s0"
  result = storage.read_sealed(cell / "result.json")
  assert result["took_part"] == 2
  sizes = storage.read_sealed(cell / "allocation.json")["batch_sizes"]
  assert sum(sizes) == 32  # of processes that were timed where they ran
  modules = json.loads((cell / "cell.json").read_text())["modules"]
  assert modules["far_module"]["top"] == str(tmp_path / "far_module.py")
  told = live_files.read(cell)
  assert (cell / "faults.csv").read_text() == "1,2,slow,0.01\n"
  jobs = {e.key: e.time for e in told.journals[0] if e.action == RECEIVE}
  for name in ("fetch", "compute", "push"):
    assert live_files.spans_by_job(told.spans, name).keys() == jobs.keys()
  for worker, mine in told.spans.items():  # by the clock of the journal
    for span in mine:
      assert abs(span.end - jobs[worker, span.seq]) < AHEAD / 2
  assert list(tmp_path.glob("trace/plugins/profile/*/*.xplane.pb"))
  monkeypatch.delitem(sys.modules, "far_module")
  replayed = kit.call("replay", cell, status=0)
  assert "the same parameters as the run, to the bit" in replayed.stdout
