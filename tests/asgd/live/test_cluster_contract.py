"""What every live run keeps to, whatever its protocol, on threads and on Ray:
each party is killed once, and the run comes to what its files say, to the bit.
"""

import collections
import contextlib
import math
import os
import signal
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import gates
import kit
import numpy as np
import pytest

from asgd import base
from asgd.experiment import (
  audit,
  chaos,
  live_memory,
  loop,
  protocol,
  ray_runtime,
  replay,
)
from asgd.experiment.engines import live_hosts
from asgd.experiment.machine import Machine
from asgd.experiment.progress import Silent
from asgd.live import processes
from asgd.live.cluster import Cluster
from asgd.live.faults import Fault
from asgd.live.hosts import actors, threads
from asgd.live.hosts.site import Site
from asgd.live.links import throttled_hosts
from asgd.live.setup import Setup
from asgd.orders.protocol import Rules
from asgd.orders.trace import follow

KILL, TERM = signal.SIGKILL, signal.SIGTERM


def killed(*parties):
  return [(KILL, kind, index) for kind, index in parties]


WORKERS = ("worker", 0), ("worker", 1)
SHARDS = ("shard", 0), ("shard", 1)


class Case(NamedTuple):
  """A tiny run of a protocol, and what is done to its parties."""

  run: dict[str, Any]
  # Job -> what is done, all at once, when all workers that come to that job
  # wait with theirs.
  gates: dict[int, list[tuple[int, str, int]]]
  config: dict[str, Any] = {}
  missed: int = 0  # messages of rounds that went on without a peer


CASES = {
  "server": Case(
    {"recipe": "dana_zero"},
    # It finishes its job, and another takes its place.
    {8: [(TERM, "worker", 1)], 24: killed(*WORKERS, *SHARDS)},
    {"server": {"shards": 2, "log": 4}},
  ),
  "far": Case(  # as on another machine; packed messages, both ways
    {"recipe": "asgd", "compress": "onebit", "compress_down": "onebit"},
    {8: killed(("worker", 0), ("shard", 0))},
    {"workers": (1,)},
  ),
  # If both peers were killed at once, nobody would know the parameters.
  "rounds": Case(
    {"recipe": "threshold_sharing", "codec": "top_k", "momentum": 0.5},
    {8: killed(("peer", 1)), 24: killed(("peer", 0))},
    missed=2,
  ),
  "pairs": Case(
    {"recipe": "ad_psgd"},
    {8: killed(("peer", 1), ("counter", 0)), 24: killed(("peer", 0))},
  ),
  "tables": Case(
    kit.TINY_TABLE,
    {8: killed(*WORKERS, *SHARDS)},
  ),
  "batches": Case(
    dict(
      recipe="sandblaster",
      **dict(portions=8, push_every=2, shards=2),
      failures=[(0.0, "coordinator", 0)],
    ),
    {4: killed(*WORKERS, *SHARDS)},
  ),
}
CONFIG = {
  **kit.TINY_RATINGS,
  "checkpoint_seconds": 1e6,  # for one, all would have to rest
  # Of those that wait at a gate none is taken for hung.
  "live": {"late_seconds": 300.0, "start_seconds": 300.0},
}


class Run:
  """A cell, which may be a case's."""

  def __init__(self, folder, engine, run=None, **config):
    problem = dict(name="gates:ratings", **config.pop("problem", {}))
    run = run or {"recipe": "dana_zero"}
    config |= {"problem": problem, "engine": engine, "runs": {"run": run}}
    self.experiment = kit.build(CONFIG, **config)
    (self.cell,) = self.experiment.cells
    self.plan = self.experiment.plan(self.cell)
    self.folder, self.place = folder, folder / "cells" / self.cell.name
    folder.mkdir(exist_ok=True)

  def train(self, faults=(), **options):
    machine = Machine(grace_seconds=60.0, faults=faults)
    return loop.train(
      *(self.experiment, self.cell, self.folder),
      **dict(bar=Silent(), machine=machine, **options),
    )

  def rows(self):
    """The rows so far, of the lead or of all workers."""
    return protocol.of(self.plan.run).live.rows(self.place)

  def only(self, action):
    return [row for row in self.rows() if row.action == action]

  def left(self):
    """The workers that left before the last message, one for each time."""
    rows = self.rows()
    while rows[-1].action != base.RECEIVE:
      rows.pop()
    return sorted(row.worker for row in rows if row.action == base.LEAVE)

  def check(self, failures=None):
    """It is what its files say, after what was done to its processes; unless
    that is given, nothing explains who died."""
    found = list(audit.findings(self.plan, self.place, failures or ()))
    wrong = {finding.check for finding in found if not finding.passed}
    assert wrong <= ({"deaths"} if failures is None else set()), found
    checks = {finding.check for finding in found}
    assert "replay" in checks
    if "records" not in checks:
      replayed = replay.replay(self.place)
      with np.load(self.place / "records.npz") as records:
        for name, column in replayed.records._asdict().items():
          np.testing.assert_array_equal(records[name], column, name)


class Gates:
  """Does what a case says to a run that waits at its gates; as a signal that
  never comes.

  A gate is opened at once, unless a peer was killed: the next one joins while
  the others rest, so the gate is opened when the driver waits for that."""

  def __init__(self, case, run, monkeypatch):
    self._run, self._gates = run, dict(case.gates)
    self._hosts, self._closed = [], None  # threads; a gate
    self.failures = []
    rest = Cluster.wait_for_rest

    def open_and_rest(cluster, at_rest, seconds=math.inf):
      self._open()
      return rest(cluster, at_rest, seconds)

    monkeypatch.setattr(Cluster, "wait_for_rest", open_and_rest)
    monkeypatch.setattr(throttled_hosts, "ThreadHosts", self._make_hosts)

  def _make_hosts(self, **options):
    self._hosts.append(threads.ThreadHosts(**options))
    return self._hosts[0]

  def _open(self):
    if self._closed is not None:
      gates.opened(self._run.folder, self._closed).touch()
      self._closed = None

  @property
  def received(self):
    """Looks at the run; no signal was received."""
    gate = next(iter(self._gates), None)
    workers = self._run.plan.workers
    if gate is not None and gates.waiting(self._run.folder, gate) == workers:
      self._closed, parties = gate, self._gates.pop(gate)
      for party in parties:
        self._hit(*party)
      if not any(kind == "peer" for _, kind, _ in parties):
        self._open()
    return 0

  def _hit(self, number, kind, index):
    rows = self._run.rows()
    if not self._hosts:
      pids = processes.live_pids(
        live_memory.read_running(self._run.place).memory
      )
      assert listening() == []
      os.kill(pids[kind][index], number)
    elif number == TERM:
      assert self._hosts[0]._hosts[kind, index].drain()
    else:
      self._hosts[0].kill(kind, index)
    if kind in ("worker", "peer"):
      how = "term" if number == TERM else "worker"
      incarnation = index, follow(rows).incarnations.get(index, -1)
      self.failures.append(
        audit.Failure(how, "run", index, (incarnation,), len(rows), len(rows))
      )


def listening():
  """Returns the addresses where processes listen for other machines."""
  inodes = set()
  for pid in processes.descendants():
    for path in Path(f"/proc/{pid}/fd").glob("*"):
      with contextlib.suppress(OSError):
        inodes.add(os.readlink(path).removeprefix("socket:[").rstrip("]"))
  rows = [
    line.split()
    for name in ("tcp", "tcp6")
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
  ]
  found = [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
  assert found  # of Ray
  loopback = ("0100007F:", "00000000000000000000000001000000:")
  mapped = "0000000000000000FFFF00000100007F:"
  return [x for x in found if not x.startswith((*loopback, mapped))]


def running():
  """Returns the processes that this one has started, as (number, since)."""
  found = set()
  for pid in processes.descendants():
    with contextlib.suppress(OSError):
      found.add((pid, processes.process_stat(pid)[1]))
  return found


def open_files(folder):
  """Returns the files of a folder that this process has open."""
  found = []
  for path in Path("/proc/self/fd").iterdir():
    with contextlib.suppress(OSError):
      found.append(os.readlink(path))
  return [path for path in found if path.startswith(f"{folder}/")]


@pytest.fixture(scope="module")
def ray():
  """Ray, as engine `ray` starts it; nothing is left when it has ended."""
  pytest.importorskip("ray")
  before = running()
  ray_runtime.start()
  yield
  mine = running() - before
  ray_runtime.stop()
  assert chaos.wait_for_end(mine) == []


ON_RAY = [pytest.mark.process, pytest.mark.slow]
RUNS = [
  *(("threads", name) for name in CASES if name != "far"),
  *(pytest.param("ray", name, marks=ON_RAY) for name in CASES),
]


@pytest.mark.parametrize(("engine", "name"), RUNS)
def test_each_party_is_killed_once_and_the_run_replays(
  tmp_path, monkeypatch, request, engine, name
):
  if engine == "ray":
    request.getfixturevalue("ray")
  if name == "far":
    site = live_hosts.site
    monkeypatch.setattr(
      live_hosts, "site", lambda *args: site(*args)._replace(sockets=False)
    )
  case = CASES[name]
  problem = dict(folder=str(tmp_path / "run"), gates=[*case.gates])
  run = Run(tmp_path / "run", engine, case.run, problem=problem, **case.config)
  gates_of_run = Gates(case, run, monkeypatch)
  result = run.train(signals=gates_of_run)
  done = [party for parties in case.gates.values() for party in parties]
  replaced = collections.Counter(kind for _, kind, _ in done)
  assert result["replaced"] == replaced
  workers = [index for _, kind, index in done if kind in ("worker", "peer")]
  assert run.left() == sorted(workers)
  assert open_files(tmp_path) == []
  missed = result.get("missed", 0)
  assert missed == case.missed
  assert result["messages"] + missed == run.plan.messages
  assert len(run.only(base.RECEIVE)) == result["messages"]
  run.check(gates_of_run.failures)
  if name == "batches":
    still = Run(tmp_path / "still", "simulate", case.run)
    still.train()
    assert kit.iterates(run.place) == kit.iterates(still.place)


# Ray.


@pytest.mark.process
@pytest.mark.slow
def test_faults_on_purpose_are_all_injected_and_survived(ray, tmp_path):
  faults = [
    Fault(0, 3, "double"),
    Fault(0, 5, "nan"),
    Fault(1, 4, "lose"),
    Fault(1, 8, "reorder"),
    Fault(1, 12, "kill"),
  ]
  run = Run(
    *(tmp_path, "ray"),
    order={"name": "stale_synchronous", "bound": 3},
    epochs=4.0,
    learning_rate=0.05,
  )
  run.train(faults)
  run.check()
  written = (run.place / "faults.csv").read_text().splitlines()
  assert sorted(written) == sorted(",".join(map(str, f)) for f in faults)
  (refused,) = run.only(base.REJECT)
  assert (refused.worker, refused.seq) == (0, 5)
  lost = {(row.worker, row.seq) for row in run.only(base.LOST)}
  assert lost == {(1, 12)}


MISTAKES = {
  "party": (
    {"problem": {"driver": os.getpid()}},
    r"^(shard|worker) [01] (cannot start|failed): config\.problem: no such rat",
  ),
  "resources": ({"live": {"worker_gpus": 1000.0}}, "2000 GPU, and it has"),
}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_start_is_one_error(ray, tmp_path, name):
  config, says = MISTAKES[name]
  with pytest.raises(ValueError, match=says):
    Run(tmp_path, "ray", **config).train()


class Count:
  """The object of a host: counts its calls."""

  def __init__(self, inside):
    self.calls = 0

  def add(self):
    self.calls += 1
    return self.calls


class Eager:
  """Ray, in which an actor is called 60 times when it is created, before its
  driver can make its object."""

  def __init__(self, ray):
    self.calls, self._ray = [], ray

  def __getattr__(self, name):
    return getattr(self._ray, name)

  def remote(self, **options):
    def make_class(cls):
      self._actor_class = self._ray.remote(**options)(cls)
      return self

    return make_class

  def options(self, **options):
    create = self._actor_class.options(**options).remote

    def create_and_call(*args):
      actor = create(*args)
      self.calls += [actor.call.remote("add", ()) for _ in range(60)]
      return actor

    return types.SimpleNamespace(remote=create_and_call)


@pytest.mark.process
@pytest.mark.slow
def test_calls_of_a_host_that_starts_do_not_stop_it_from_starting(
  ray, tmp_path
):
  setup = Setup(Rules(), workers=2, jobs=1)
  site = Site(setup, str(tmp_path), str(tmp_path / "memory"), time.monotonic())
  hosts = actors.ActorHosts(site)
  hosts._ray = eager = Eager(hosts._ray)
  hosts.start("shard", 0, Count)
  made = hosts.make_call("shard", 0)
  assert hosts.wait([made], 300.0) == [made]
  counts = [eager.get(call) for call in eager.calls]
  assert sorted(counts) == list(range(1, 61))
  hosts.close()
