"""Live peers in processes: each run is what its journals say, whoever dies."""

import functools
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from kit import bits

import asgd
from asgd import base, problems, simulator
from asgd.live.deadlines import Ladder
from asgd.live.faults import Fault
from asgd.live.gossip import files, frames
from asgd.live.gossip.cluster import PeerCluster, PeerMaker
from asgd.live.gossip.peer_rows import PeerDuty
from asgd.live.hosts.actors import ActorHosts
from asgd.live.hosts.site import Site
from asgd.live.setup import Setup
from asgd.orders.protocol import Rules

ray = pytest.importorskip("ray")
pytestmark = [
  *(pytest.mark.process, pytest.mark.slow),
]

LONG = 300.0  # seconds; nothing here takes as long, on a busy machine too
PEERS, ROUNDS, HELD = 2, 12, 8
ROOT = jax.random.key(0)


# What runs in the processes, which import this module.


def make_recipe():
  return asgd.choco_sgd(0.05, PEERS, codec="top_k", gamma=0.5)


def hold(folder, batch, worker, job):
  """Holds those up who start a late job, until the gate is open."""
  while job >= HELD * PEERS and not (Path(folder) / "open").exists():
    time.sleep(0.01)
  return batch(worker, job)


def make_duty(folder):
  problem = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
  recipe, params = make_recipe(), jax.device_get(problem.init(ROOT))
  peer = recipe.peer()
  wire = frames.packed_wire(peer, params)
  batch = functools.partial(hold, folder, problem.batches(0, PEERS))
  worker = recipe.make_worker(problem.loss)
  return PeerDuty(recipe.gossip, peer, worker, params, batch, ROOT, wire)


@pytest.fixture(autouse=True)
def session():
  """Ray, as engine `ray` starts it."""
  from asgd.experiment import ray_runtime  # actors do without it

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    ray_runtime.start(None, allow_network=False)
  yield
  ray_runtime.stop()


def until(condition, what):
  end = time.monotonic() + LONG
  while not condition():
    assert time.monotonic() < end, f"{what} did not happen"
    time.sleep(0.02)


def test_a_killed_peer_joins_again_and_the_run_replays(tmp_path):
  ladder = Ladder(floor=LONG)  # nobody is late who is held up
  setup = Setup(Rules(), PEERS, PEERS * ROUNDS, ladder=ladder)
  memory = f"/dev/shm/asgd-test-{os.getpid()}-peers"
  site = Site(setup, str(tmp_path), memory, time.monotonic())
  recipe, news = make_recipe(), []
  make = functools.partial(make_duty, str(tmp_path))
  faults = (Fault(1, 2, "kill"),)
  cluster = PeerCluster(
    recipe.gossip,
    ActorHosts(site),
    PeerMaker(make, tmp_path, 0, faults, warm_up=True),
    messages=setup.jobs,
    ladder=ladder,
    refill=True,
  )

  def records():
    parts = [files.read_peer_records(tmp_path, i) for i in range(PEERS)]
    return files.by_time(parts)

  def look(done):
    news.extend(cluster.check(len(records().loss)))
    return done()

  try:
    cluster.start()
    until(lambda: look(lambda: news), "the death")
    (tmp_path / "open").touch()
    until(lambda: look(lambda: cluster.finished), "the end")
    views = cluster.views()
  finally:
    cluster.close()
    for path in Path(memory).glob("*"):
      path.unlink()
    Path(memory).rmdir()
  said = "peer 1 died; the others go on, another takes its place; what its "
  assert news[0].startswith(said + "codec had kept back is lost")

  duty, trace = make_duty(str(tmp_path)), files.read_trace(tmp_path, PEERS)
  peers = simulator.Peers(*duty[:4], trace, batch=duty.batch, root=ROOT)
  replayed = peers.run(len(trace.time))
  assert sorted(views) == peers.present
  for i, view in views.items():
    assert bits(view.params) == bits(peers.states[i].server.params)
  assert bits(records()) == bits(simulator.PeerRecords(*replayed))
  assert (trace.action == base.LEAVE).sum() == 1
