"""Live runs in a simulated world: whatever is done to them, they come to what
their traces say; and what was wrong once would be found again."""

import collections
import functools
import inspect
import itertools
import math
import re

import pytest
import world_mutants

from asgd import server
from asgd.live.links.sockets import ShardServer
from asgd.live.slots import SharedMemory
from asgd.live.worker import Lease, WorkerLoop
from asgd.live.world import explore, run, scenario, table_run
from asgd.live.world.scheduler import Scheduler, Stuck
from asgd.orders.protocol import Rules
from asgd.orders.starters import Starters

# The last ones have what seldom happens.
SEEDS = {
  "server": [*range(120), 13711],
  "tables": [*range(60), 89, 204],
  "sandblaster": [*range(62), 4745, 52733],
  "gossip": [*range(60), 63, 204, 8671],
}


# Kind of fault -> what it reaches, by protocol: processes, or parts of the
# world. Messages of gossip are lost and arrive in another order as its calls
# are made; the server's are frames, and calls can be cut.
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


@pytest.mark.parametrize("room", explore.ROOMS)
def test_seeds_come_to_what_their_traces_say(room):
  parties = collections.Counter()
  for outcome in explore.run_seeds(SEEDS[room], room=room):
    assert not outcome.error, explore.explain(outcome, room=room)
    parties.update(outcome.parties)
  reached = {
    (kind, party)
    for kind, rooms in REACHES.items()
    for party in rooms.get(room, "").split()
  }
  assert {kind for kind, _ in reached} == set(explore.ROOMS[room].menu().kinds)
  assert reached <= set(parties)


@pytest.mark.parametrize("room", explore.ROOMS)
def test_a_seed_is_the_same_run_again(room, tmp_path):
  """To the bytes of all files that it writes."""
  drawn = explore.drawn(11, room)
  runs, folders = [], (tmp_path / "first", tmp_path / "again")
  for folder in folders:
    folder.mkdir()
    scene = explore.ROOMS[room](drawn, folder)
    runs.append(scene.run(range(len(drawn.faults))))
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
  """By as few faults as it fails with, and the first difference to the run
  without one of them."""
  monkeypatch.setattr(table_run, "KINDS", world_mutants.KINDS["tables"])
  world_mutants.NO_MESSAGE(monkeypatch)
  outcome = explore.run_seed(1, room="tables")
  text = explore.explain(outcome, room="tables")
  first, fault, error, title, turn, row, again = text.splitlines()
  assert first.startswith("seed 1: TableCase(")
  assert fault.startswith("  fault ")
  assert "every job is received once" in error
  assert title.endswith("it does not fail; first differences:")
  assert turn.startswith("    turns of processes, line ")
  assert re.match(r"    (trace|shard)-\d.csv, line \d+: .*; ", row)
  assert again.startswith("  again: asgd chaos --simulate=1 --seed=1 --faults=")


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
  """Or it left the place that the lead had given it, without knowing that it
  had it, and then wrote to a slot of that place, which was another's."""
  cases = [c for c in scenario.CASES if c.shards == 2 and not c.consistent]
  monkeypatch.setattr(scenario, "CASES", cases)
  monkeypatch.setattr(scenario, "KINDS", ("nan",) * 4)
  for outcome in explore.run_seeds(range(60)):
    assert not outcome.error, explore.explain(outcome)


def test_a_memory_without_its_slots_is_not_opened_twice(monkeypatch):
  """Or the same command, which is the remedy, is refused again and again."""
  case = scenario.ServerCase(
    "dana_zero", Rules(bound=2, cache=True), shards=2, consistent=True
  )
  kinds = tuple(kind for kind in scenario.KINDS if kind != "kill driver")
  monkeypatch.setattr(scenario, "KINDS", kinds)
  monkeypatch.setattr(scenario, "CASES", (case,) * 3)
  outcome = explore.run_seed(214)
  assert "does not hold what was written there" in outcome.refused[1]
  assert not outcome.error


# What was wrong once; each was found at the seed given when its cure was taken
# out.


def forgets_that_it_was_revoked(patch):
  """A worker that was given up while it waits writes to a slot of another's."""

  def write_anyway(self, write):
    write()
    return True

  patch.setattr(Lease, "use", write_anyway)
  slow = [case for case in scenario.CASES if case.computing]
  patch.setattr(scenario, "CASES", slow)


def forgets_calls_when_it_fails(patch):
  """The driver waits for a shard whose serving has failed."""
  patch.setattr(ShardServer, "_refuse_calls", lambda self: None)
  patch.setattr(scenario, "KINDS", ("fill",) * 4)


def reads_whatever_a_slot_holds(patch):
  """Memory that is removed under a run is taken for what was written there."""

  def read(self, kind, slot, stamp):
    return original(self, kind, slot, self.stamp(kind, slot))

  original = SharedMemory.read
  patch.setattr(SharedMemory, "read", read)
  init = SharedMemory.__init__

  def remembers_nothing(self, *args, **options):
    init(self, *args, **options)
    self.fresh = False

  patch.setattr(SharedMemory, "__init__", remembers_nothing)


def tells_the_lead_first(patch):
  """A message that the lead has received is lost with another shard."""

  def push(self, shard, frame):
    if shard and frame.seq not in self._tenure.for_lead:
      original(self, 0, frame._replace(message=-1))
    original(self, shard, frame)

  original = WorkerLoop._push
  patch.setattr(WorkerLoop, "_push", push)
  cases = [c for c in scenario.CASES if c.shards == 2 and not c.consistent]
  patch.setattr(scenario, "CASES", cases)


# What live runs and replays share, or what no replay sees.


def counts_one_update_less(patch):
  """The staleness of messages is less than it is."""

  def less(state, ticket):
    delay = original(state, ticket)
    return delay._replace(staleness=abs(delay.staleness - 1))

  original = server._delay
  patch.setattr(server, "_delay", less)
  anew = functools.cache(scenario.recipe.__wrapped__)
  patch.setattr(scenario, "recipe", anew)


def waits_for_nobody(patch):
  """Workers come further ahead of the slowest than the bound allows."""

  def take(self, limit, most):
    return original(self, math.inf, most)

  original = Starters.take
  patch.setattr(Starters, "take", take)
  bound = [case for case in scenario.CASES if case.rules.bound < math.inf]
  patch.setattr(scenario, "CASES", bound)


def goes_on_with_the_state_of_another(patch):
  """A new holder of a place keeps the state of the one before."""

  def begin(self, job):
    original(self, job)
    states[id(self)] = self._tenure.state

  def welcome(self, shard, frame):
    handle(self, shard, frame)
    if self._tenure.state is not None and not self._tenure.started:
      self._tenure.state = states.get(id(self), self._tenure.state)

  states = {}
  original, handle = WorkerLoop._begin, WorkerLoop._handle
  patch.setattr(WorkerLoop, "_begin", begin)
  patch.setattr(WorkerLoop, "_handle", welcome)
  stateful = [case for case in scenario.CASES if case.recipe == "dana_slim"]
  patch.setattr(scenario, "CASES", stateful)


@pytest.mark.parametrize(
  ("fault", "seed", "message"),
  [
    (forgets_that_it_was_revoked, 60, "no slot is leaked, or used twice"),
    (forgets_calls_when_it_fails, 151, "does not answer"),
    (reads_whatever_a_slot_holds, 11, "no slot is read without its stamp"),
    (tells_the_lead_first, 18, "what the lead received"),
    (counts_one_update_less, 0, "records tell what the trace says"),
    (waits_for_nobody, 0, "ahead of the slowest"),
    (goes_on_with_the_state_of_another, 3, "the replay has the same bits"),
  ],
)
def test_an_old_fault_is_found_again(fault, seed, message, monkeypatch):
  fault(monkeypatch)
  seeds = range(240)  # from the first one that finds it
  outcomes = itertools.chain(
    explore.run_seeds(seeds[seed:]), explore.run_seeds(seeds[:seed])
  )
  assert any(message in outcome.error for outcome in outcomes)


@pytest.mark.parametrize(
  ("room", "mutant"),
  [
    (room, mutant)
    for room, mutants in world_mutants.FOUND.items()
    for mutant in mutants
  ],
  ids=lambda value: getattr(value, "name", None),
)
def test_a_mending_that_is_taken_out_is_found(room, mutant, monkeypatch):
  monkeypatch.setattr(run, "_TURNS", 20_000)  # of a run that has no end
  monkeypatch.setattr(run, "_SECONDS", 60.0)
  if mutant.name in world_mutants.SELDOM:
    module = inspect.getmodule(explore.ROOMS[room])
    monkeypatch.setattr(module, "KINDS", world_mutants.KINDS[room])
  mutant(monkeypatch)
  assert explore.run_seed(mutant.seed, room=room).error
