"""What a live cell's cluster is made with: devices, and what Ray is asked."""

import os
import types

import jax
import pytest

from asgd import experiment
from asgd.experiment.engines import live_clusters
from asgd.experiment.machine import Machine
from asgd.live.hosts import actors
from asgd.live.hosts.site import Site


def prepared(folder, engine, **settings):
  """A cell, ready for a cluster to be made of it."""
  config = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": (4,)},
    "runs": {"asgd": {"recipe": "asgd"}},
    "engine": engine,
    "workers": (2,),
    "examples": 128,
    "live": settings,
  }
  made = experiment.build(config, engines=experiment.ENGINES)
  (cell,) = made.cells
  plan = made.plan(cell)
  return live_clusters.prepare(plan, cell, folder, folder, [4])


@pytest.mark.parametrize(
  ("kinds", "settings", "shared"),
  [
    (["gpu", "gpu"], {}, 2),
    (["gpu"], {}, 0),
    (["cpu", "cpu"], {}, 0),  # the same cores
    (["gpu", "gpu"], {"devices": 2}, 0),  # all are each worker's
  ],
)
def test_threads_share_the_accelerators_of_their_process(
  monkeypatch, tmp_path, kinds, settings, shared
):
  live = prepared(tmp_path, "threads", **settings)
  devices = [types.SimpleNamespace(platform=kind) for kind in kinds]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  assert live_clusters.local_devices(live) == tuple(devices)[:shared]


@pytest.mark.parametrize(
  ("settings", "site"),
  [
    ({}, ("cpu", 0.0)),
    ({"resources": {"fast": 1}, "worker_cpus": 2}, ("cpu", 0.0)),
    ({"worker_gpus": 0.25}, (None, 0.25)),
    ({"resources": {"TPU": 4}}, (None, 0.0)),
    ({"accelerator": "TPU-V4"}, (None, 0.0)),
  ],
)
def test_workers_use_the_accelerators_that_they_reserve(
  monkeypatch, tmp_path, settings, site
):
  pytest.importorskip("ray")
  made = []

  def hosts(site, **options):
    made.append(site)
    return types.SimpleNamespace(site=site)

  monkeypatch.setattr(actors, "ActorHosts", hosts)
  machine = Machine(profile="trace")
  monkeypatch.setattr(machine, "share", lambda value: value)
  live = prepared(tmp_path, "ray", **settings)
  live_clusters.ray_cluster(None, live, machine, None, False, 0.0)
  (given,) = made
  assert isinstance(given, Site)
  assert (given.platform, given.gpus) == site
  assert given.profile == f"{os.getcwd()}/trace"
