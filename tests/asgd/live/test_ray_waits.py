"""Who waits for Ray hears when Ray has died."""

import types

import pytest

from asgd.experiment import signals
from asgd.live import ray_waits

pytest.importorskip("ray")


def has_died(monkeypatch, *kinds):
  from ray._private import worker

  dead = [(kind, None) for kind in kinds]
  node = types.SimpleNamespace(dead_processes=lambda: dead)
  monkeypatch.setattr(worker, "_global_node", node)


@pytest.mark.parametrize(
  ("kind", "name"), [("raylet", "raylet"), ("gcs_server", "GCS")]
)
def test_it_is_told_with_the_remedy(monkeypatch, kind, name):
  ray_waits.check()
  has_died(monkeypatch, "log_monitor", kind)
  with pytest.raises(ray_waits.RayDied, match=rf"process \({name}\)") as told:
    ray_waits.wait([])
  assert signals.RERUN in str(told.value)
  assert ray_waits.dead_processes() == [name]


def test_what_it_can_do_without_is_not_missed(monkeypatch):
  has_died(monkeypatch, "log_monitor", "reaper")
  ray_waits.check()
  assert ray_waits.wait([]) == ([], [])
