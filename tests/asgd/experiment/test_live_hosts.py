"""The devices of a live cell: what threads share, and what Ray is asked."""

import os
import types

import jax
import kit
import pytest

from asgd.experiment.engines import live_clusters, live_hosts


def prepared(folder, engine, **settings):
  """A cell, ready for its hosts to be made."""
  config = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": (4,)},
    "runs": {"asgd": {"recipe": "asgd"}},
    "engine": engine,
    "workers": (2,),
    "examples": 128,
    "live": settings,
  }
  made = kit.build(config)
  (cell,) = made.cells
  plan = made.plan(cell)
  setup = live_clusters.prepare(plan, 0, [4]).setup
  return live_hosts.LiveCell(
    *(plan, cell, made.dataset, setup, folder, folder, 0.0)
  )


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
  assert live_clusters.local_devices(live.plan) == tuple(devices)[:shared]


@pytest.mark.parametrize(
  ("settings", "reserved"),
  [
    ({}, ("cpu", 0.0)),
    ({"resources": {"fast": 1}, "worker_cpus": 2}, ("cpu", 0.0)),
    ({"worker_gpus": 0.25}, (None, 0.25)),
    ({"resources": {"TPU": 4}}, (None, 0.0)),
    ({"accelerator": "TPU-V4"}, (None, 0.0)),
  ],
)
def test_workers_use_the_accelerators_that_they_reserve(
  tmp_path, settings, reserved
):
  live = prepared(tmp_path, "ray", **settings)
  site = live_hosts.site(live, "trace")
  assert (site.platform, site.gpus) == reserved
  assert site.profile == f"{os.getcwd()}/trace"
