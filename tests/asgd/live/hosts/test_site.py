"""Where JAX computes in the processes of a run, without Ray."""

import types

import jax
import pytest

from asgd.live.hosts import site

NEW, OLD = site._FRACTIONS
GPU = {"platform": None, "gpus": 1.0}
PART = {"platform": None, "gpus": 0.25}  # of a GPU
NONE = {"platform": "cpu", "gpus": 0.0}


@pytest.mark.parametrize(
  ("worker", "asked", "environment", "platforms", "fraction"),
  [
    (False, GPU, {}, "cpu", None),  # shards, whatever the workers have
    (False, PART, {"JAX_PLATFORMS": "cuda"}, "cpu", None),
    (True, NONE, {}, "cpu", None),
    (True, NONE, {"JAX_PLATFORMS": "cuda"}, None, None),
    (True, GPU, {}, None, None),
    (True, PART, {}, None, "0.225"),
    (True, PART, {"JAX_PLATFORMS": "cuda"}, None, "0.225"),
    (True, PART, {NEW: "0.5"}, None, "0.5"),
    (True, PART, {OLD: "0.5"}, None, None),
  ],
)
def test_where_shards_and_workers_compute(
  monkeypatch, worker, asked, environment, platforms, fraction
):
  for name in (NEW, OLD, "JAX_PLATFORMS"):
    monkeypatch.setenv(name, environment.get(name, ""))
  updates = {}
  config = types.SimpleNamespace(update=updates.__setitem__)
  monkeypatch.setattr(jax, "config", config)
  site._choose_devices(types.SimpleNamespace(**asked), worker)
  assert updates == ({"jax_platforms": platforms} if platforms else {})
  assert site.os.environ[NEW] == (fraction or "")
