"""Live runs in a simulated world: with any faults their results agree with
their traces, and a fault of the runtime that was fixed would be found again."""

import collections
import functools
import inspect
import itertools
import math
import re

import pytest
import world_mutants

from asgd import server
from asgd.live.incarnation import Lease
from asgd.live.journal import journal_path
from asgd.live.links.sockets import ShardServer
from asgd.live.slots import SharedMemory
from asgd.live.worker import WorkerLoop
from asgd.live.world import (
  explore,
  injections,
  peer_run,
  run,
  scenario,
  table_run,
)
from asgd.live.world.scheduler import Scheduler, Stuck
from asgd.orders.protocol import Rules
from asgd.orders.starters import Starters

# The last seeds of each list have rare events.
SEEDS = {
  "server": [*range(120), 13711, 112397, 129403, 134492],
  "tables": [*range(60), 89, 204, 100287, 109821],
  "sandblaster": [*range(62), 4745, 52733],
  "gossip": [*range(60), 63, 204, 8671],
}


# Kind of fault -> protocol -> the processes or parts of the world that it
# reaches. Gossip sends its messages as calls, the server as frames, so the same
# kind reaches other processes.
OF_CALLS = {"tables": "worker shard", "sandblaster": "worker shard"}
ALL = ["server", "tables", "sandblaster", "gossip"]
OF_WORKERS = dict.fromkeys(ALL[:3], "worker")
OF_SHARDS = dict.fromkeys(ALL[:3], "shard")
REACHES = {
  "kill worker": OF_WORKERS,
  "kill shard": OF_SHARDS,
  "kill peer": {"gossip": "peer"},
  "kill counter": {"gossip": "counter"},
  "kill driver": dict.fromkeys(ALL, "driver"),
  "kill all": dict.fromkeys(ALL, "all"),
  "stop worker": OF_WORKERS,
  "stop shard": OF_SHARDS,
  "stop peer": {"gossip": "peer"},
  "stop driver": dict.fromkeys(ALL, "driver"),
  "cut": {"server": "connection", **OF_CALLS, "gossip": "peer"},
  "cut call": {"server": "worker"},
  "lose": {"server": "worker"},
  "drop": {**OF_CALLS, "gossip": "peer"},
  "delay": {**OF_CALLS, "gossip": "peer"},
  "double": {
    "server": "worker shard", "tables": "shard",
    "sandblaster": "shard", "gossip": "peer",
  },
  "reorder": {"server": "worker shard", **dict.fromkeys(ALL[1:3], "shard")},
  "tear": {
    "server": "shard", "tables": "worker shard driver",
    "sandblaster": "shard driver", "gossip": "peer driver",
  },
  "fill": dict.fromkeys(ALL, "disk"),
  "jump": dict.fromkeys(ALL, "clock"),
  "flip": {
    "server": "shard", "tables": "worker shard",
    "sandblaster": "shard", "gossip": "peer",
  },
  "nan": dict.fromkeys(ALL, "worker"),
  "remove memory": dict.fromkeys(("server", "sandblaster"), "memory"),
  "drain": {"server": "worker"},
  "spoil": {"server": "message"},
  "term": {"gossip": "driver"},
}


@pytest.mark.parametrize("protocol", explore.PROTOCOLS)
def test_results_of_seeds_agree_with_their_traces(protocol):
  parties = collections.Counter()
  for outcome in explore.run_seeds(SEEDS[protocol], protocol=protocol):
    assert not outcome.error, explore.explain(outcome, protocol=protocol)
    parties.update(outcome.parties)
  reached = {
    (kind, party)
    for kind, parties_of in REACHES.items()
    for party in parties_of.get(protocol, "").split()
  }
  kinds = explore.PROTOCOLS[protocol].menu().kinds
  assert {kind for kind, _ in reached} == set(kinds)
  assert reached <= set(parties)


def test_peers_that_add_arrivals_stay_equal_under_any_faults(tmp_path):
  """The case of the seeds, but in threads, which no seed draws."""
  case = peer_run.CASES[-1]
  assert case.recipe == "async_threshold_sharing"
  for seed in range(8):
    scene = explore.scenario_of(seed, "gossip")
    scene = scene._replace(case=case._replace(kills=False))
    folder = tmp_path / str(seed)
    folder.mkdir()
    kept = range(len(scene.faults))
    outcome = peer_run.PeersRun(scene, folder).run(kept)
    assert not outcome.error, (scene.describe(kept), outcome)


def test_no_worker_is_lost_while_a_shard_stands_still(tmp_path):
  """Workers that wait for the shard do not hang."""
  case = next(case for case in table_run.CASES if not case.refill)
  stop = injections.Injection(0, 64, "stop shard", 0.4, 8.0)
  scene = injections.Scenario(102, case, (stop,))
  outcome = table_run.TablesRun(scene, tmp_path).run([0])
  assert not outcome.error
  assert outcome.parties == {("stop shard", "shard"): 1}
  for worker in range(table_run.WORKERS):
    assert "leave" not in journal_path(tmp_path, worker).read_text()


@pytest.mark.parametrize("protocol", explore.PROTOCOLS)
def test_a_seed_repeats_its_run_to_the_bit(protocol, tmp_path):
  """The bytes of all written files are equal."""
  scene = explore.scenario_of(11, protocol)
  runs, folders = [], (tmp_path / "first", tmp_path / "again")
  for folder in folders:
    folder.mkdir()
    scene_run = explore.PROTOCOLS[protocol](scene, folder)
    runs.append(scene_run.run(range(len(scene.faults))))
  assert runs[0] == runs[1]
  assert runs[0].steps > 100
  first, again = (
    {
      path.relative_to(folder): path.read_bytes()
      for path in folder.rglob("*")
      if path.is_file()
    }
    for folder in folders
  )
  assert first == again


def test_a_seed_that_fails_is_explained(monkeypatch):
  """The text has the fewest faults, and the first difference to a run without
  one of them."""
  world_mutants.NO_MESSAGE(monkeypatch)
  seed = world_mutants.NO_MESSAGE.seed
  outcome = explore.run_seed(seed, protocol="tables")
  text = explore.explain(outcome, protocol="tables")
  first, *faults, error, title, turn, row, again = text.splitlines()
  assert first.startswith(f"seed {seed}: TableCase(")
  assert [line.partition(":")[0] for line in faults] == [
    f"  fault {index}" for index in (1, 2, 4)
  ]
  assert "every job is received once" in error
  assert title.endswith("the run passes; first differences:")
  assert turn.startswith("    turns of processes, line ")
  assert re.match(r"    (trace|shard)-\d.csv, line \d+: .*; ", row)
  command = f"asgd chaos --simulate=1 --seed={seed} --faults=1,2,4"
  assert again.startswith(f"  repeat: {command}")


def test_processes_that_wait_for_each_other_are_found():
  scheduler = Scheduler(0)
  scheduler.start("one", lambda: scheduler.wait(lambda: False, None))
  with pytest.raises(Stuck, match="all wait for each other: one"):
    scheduler.run(lambda: False, 10.0, 1000)
  scheduler.close()
  scheduler.start("two", lambda: scheduler.sleep(100.0))
  with pytest.raises(Stuck, match="still running after 10 s"):
    scheduler.run(lambda: False, 10.0, 1000)
  scheduler.close()


def test_two_shards_that_refuse_a_message_expel_its_worker_once(monkeypatch):
  """A worker that is expelled twice leaves its new incarnation number without
  knowing of it, and then writes to a slot of another incarnation."""
  cases = [c for c in scenario.CASES if c.shards == 2 and not c.consistent]
  monkeypatch.setattr(scenario, "CASES", cases)
  monkeypatch.setattr(scenario, "KINDS", ("nan",) * 4)
  for outcome in explore.run_seeds(range(60)):
    assert not outcome.error, explore.explain(outcome)


def test_a_memory_without_its_slots_is_not_opened_twice(monkeypatch):
  """Otherwise each repetition of the command, which is the remedy, fails."""
  case = scenario.ServerCase(
    "dana_zero", Rules(bound=2, cache=True), shards=2, consistent=True
  )
  kinds = tuple(kind for kind in scenario.KINDS if kind != "kill driver")
  monkeypatch.setattr(scenario, "KINDS", kinds)
  monkeypatch.setattr(scenario, "CASES", (case,) * 3)
  outcome = explore.run_seed(214)
  assert "does not hold what was written there" in outcome.refused[1]
  assert not outcome.error


# Faults of the runtime that were fixed. Each is found at the given seed when
# its fix is taken out.


def uses_a_revoked_lease(patch):
  """A worker that was replaced while it waited writes to another's slot."""

  def write_anyway(self, write):
    write()
    return True

  patch.setattr(Lease, "use", write_anyway)
  slow = [case for case in scenario.CASES if case.computing]
  patch.setattr(scenario, "CASES", slow)


def leaves_calls_open_when_it_fails(patch):
  """The driver waits for a shard that has failed."""
  patch.setattr(ShardServer, "_refuse_calls", lambda self: None)
  patch.setattr(scenario, "KINDS", ("fill",) * 4)


def reads_a_slot_without_its_stamp(patch):
  """A slot of memory that was removed during the run is read as valid."""

  def read(self, kind, slot, stamp):
    return original(self, kind, slot, self.stamp(kind, slot))

  original = SharedMemory.read
  patch.setattr(SharedMemory, "read", read)
  init = SharedMemory.__init__

  def remembers_nothing(self, *args, **options):
    init(self, *args, **options)
    self.is_new = False

  patch.setattr(SharedMemory, "__init__", remembers_nothing)


def sends_to_the_lead_first(patch):
  """A message that the lead has received is lost with another shard."""

  def push(self, shard, frame):
    if shard and frame.seq not in self._incarnation.pushes_for_lead:
      original(self, 0, frame._replace(message=-1))
    original(self, shard, frame)

  original = WorkerLoop._push
  patch.setattr(WorkerLoop, "_push", push)
  cases = [c for c in scenario.CASES if c.shards == 2 and not c.consistent]
  patch.setattr(scenario, "CASES", cases)


# Faults in code that live runs and replays share, or that no replay notices.


def counts_one_update_less(patch):
  """The measured staleness of messages is too small."""

  def less(state, ticket):
    delay = original(state, ticket)
    return delay._replace(staleness=abs(delay.staleness - 1))

  original = server._delay
  patch.setattr(server, "_delay", less)
  recompiled = functools.cache(scenario.compile_recipe.__wrapped__)
  patch.setattr(scenario, "compile_recipe", recompiled)


def waits_for_no_worker(patch):
  """Workers run further ahead of the slowest than the bound allows."""

  def take(self, limit, most):
    return original(self, math.inf, most)

  original = Starters.take
  patch.setattr(Starters, "take", take)
  bound = [case for case in scenario.CASES if case.rules.bound < math.inf]
  patch.setattr(scenario, "CASES", bound)


def keeps_the_state_of_another_incarnation(patch):
  """A new incarnation of a worker keeps the state of the one before."""

  def begin(self, job):
    original(self, job)
    states[id(self)] = self._incarnation.transform_state

  def welcome(self, shard, frame):
    handle(self, shard, frame)
    incarnation = self._incarnation
    if incarnation.transform_state is not None and not incarnation.started_seqs:
      incarnation.transform_state = states.get(
        id(self), incarnation.transform_state
      )

  states = {}
  original, handle = WorkerLoop._begin, WorkerLoop._handle
  patch.setattr(WorkerLoop, "_begin", begin)
  patch.setattr(WorkerLoop, "_handle", welcome)
  stateful = [case for case in scenario.CASES if case.recipe == "dana_slim"]
  patch.setattr(scenario, "CASES", stateful)


@pytest.mark.parametrize(
  ("fault", "seed", "message"),
  [
    (uses_a_revoked_lease, 60, "no slot is leaked, or used twice"),
    (leaves_calls_open_when_it_fails, 151, "does not answer"),
    (reads_a_slot_without_its_stamp, 11, "no slot is read without its stamp"),
    (sends_to_the_lead_first, 18, "what the lead received"),
    (counts_one_update_less, 0, "records agree with the trace"),
    (waits_for_no_worker, 0, "ahead of the slowest"),
    (keeps_the_state_of_another_incarnation, 3, "the replay has the same bits"),
  ],
)
def test_an_old_fault_is_found_again(fault, seed, message, monkeypatch):
  fault(monkeypatch)
  seeds = range(240)  # starting at the seed that finds the fault
  outcomes = itertools.chain(
    explore.run_seeds(seeds[seed:]), explore.run_seeds(seeds[:seed])
  )
  assert any(message in outcome.error for outcome in outcomes)


@pytest.mark.parametrize(
  ("protocol", "mutant"),
  [
    (protocol, mutant)
    for protocol, mutants in world_mutants.FOUND.items()
    for mutant in mutants
  ],
  ids=lambda value: getattr(value, "name", None),
)
def test_a_fix_that_is_taken_out_is_found(protocol, mutant, monkeypatch):
  monkeypatch.setattr(run, "_TURNS", 20_000)  # for a run that never ends
  monkeypatch.setattr(run, "_SECONDS", 60.0)
  if mutant.name in world_mutants.SELDOM:
    module = inspect.getmodule(explore.PROTOCOLS[protocol])
    monkeypatch.setattr(module, "KINDS", world_mutants.KINDS[protocol])
  mutant(monkeypatch)
  assert explore.run_seed(mutant.seed, protocol=protocol).error
