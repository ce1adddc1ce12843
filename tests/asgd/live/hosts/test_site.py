"""Where JAX computes in the processes of a run, without Ray."""

import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from asgd import algorithms, compression
from asgd.live.hosts import site

NEW, OLD = site._FRACTION_VARIABLES
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


@pytest.mark.parametrize(
  ("recipe", "shape", "codec", "one"),
  [
    ("asgd", (site.UNDIVIDED,), None, True),
    ("asgd", (site.UNDIVIDED + 1,), None, False),
    ("dana_zero", (site.UNDIVIDED // 4,), None, True),
    ("dana_zero", (site.UNDIVIDED,), None, False),  # a row for each worker
    ("asgd", (8,), "int8", False),
  ],
)
def test_a_small_program_has_one_thread(recipe, shape, codec, one):
  before = dict(os.environ)
  server = algorithms.build(recipe, 0.1, 4).server()
  if codec:
    server = server._replace(codec=compression.named(name=codec))
  params = {"w": np.zeros(shape, np.float32)}
  assert site.receive_in_one_thread(server, params) == one
  assert dict(os.environ) == before  # of processes that are started next


def test_an_init_that_reads_numbers_keeps_all_threads():
  server = algorithms.build("asgd", 0.1, 4).server()
  reads = server._replace(init=lambda params: float(params["w"].sum()))
  params = {"w": np.zeros(3, np.float32)}
  assert not site.receive_in_one_thread(reads, params)


_SUMS = """
import hashlib, sys
import jax, jax.numpy as jnp, numpy as np
rng, most = np.random.default_rng(0), int(sys.argv[1])
sums = jax.jit(lambda a: (a.sum(), (a * a).sum(), a.sum(0), a.sum(-1)))
found = hashlib.sha256()
for shape in (most,), (most // 4, 4), (16, most // 16), (181, 181):
  for x in sums(rng.standard_normal(shape, np.float32)):
    found.update(np.asarray(x).tobytes())
print(found.hexdigest())
"""


@pytest.mark.process
def test_sums_of_undivided_arrays_have_the_same_bits_in_any_pool():
  command = [sys.executable, "-c", _SUMS, str(site.UNDIVIDED)]
  found = {
    subprocess.run(
      command,
      env=os.environ | {"PJRT_NPROC": threads},
      capture_output=True,
      check=True,
    ).stdout
    for threads in ("1", "8")
  }
  assert len(found) == 1


_POOL = """
import sys
from pathlib import Path
import jax, numpy as np
from asgd import algorithms
from asgd.live.hosts import site
server = algorithms.build("asgd", 0.1, 4).server()
params = {"w": np.zeros(int(sys.argv[1]), np.float32)}
site.receive_in_one_thread(server, params)
jax.block_until_ready(jax.jit(lambda x: x + 1)(params["w"]))
names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.process
def test_the_pool_of_a_process_with_a_small_program_has_one_thread():
  found = []
  for size in (site.UNDIVIDED, site.UNDIVIDED + 1):
    command = [sys.executable, "-c", _POOL, str(size)]
    out = subprocess.run(
      command,
      env=os.environ | {"PJRT_NPROC": "3"},
      capture_output=True,
      check=True,
      text=True,
    )
    found.append(int(out.stdout))
  assert found == [1, 3]
