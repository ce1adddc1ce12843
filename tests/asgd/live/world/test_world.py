"""Live runs in a simulated world: whatever is done to them, they come to what
their traces say; and what was wrong once would be found again."""

import collections

import pytest

from asgd.live import wire
from asgd.live.links.sockets import ShardServer
from asgd.live.slots import SharedMemory
from asgd.live.worker import Lease, WorkerLoop
from asgd.live.world import explore, scenario
from asgd.live.world.scheduler import Scheduler, Stuck

SEEDS = 200


@pytest.fixture(scope="module", autouse=True)
def quickly(quick_compilation):
  """What is compiled is compiled quickly."""


def test_seeds_come_to_what_their_traces_say():
  injected = collections.Counter()
  for outcome in explore.run_seeds(range(SEEDS)):
    assert not outcome.error, explore.explain(outcome)
    injected.update(outcome.injected)
  assert set(injected) == set(scenario.KINDS)  # each of them came


def test_a_seed_is_the_same_run_again():
  first, again = (explore.run_seed(11) for _ in range(2))
  assert first == again
  assert first.steps > 100


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


# What was wrong once; each was found at the seed given when its cure was taken
# out.


def forgets_that_it_was_revoked(patch):
  """A worker that was given up while it waits writes to a slot of another's."""

  def write_anyway(self, write):
    write()
    return True

  patch.setattr(Lease, "use", write_anyway)


def forgets_calls_when_it_fails(patch):
  """The driver waits for a shard whose serving has failed."""
  patch.setattr(ShardServer, "_refuse_calls", lambda self: None)


def reads_whatever_a_slot_holds(patch):
  """Memory that is removed under a run is taken for what was written there."""

  def read(self, kind, slot, stamp):
    return wire.read(self._layouts[kind], self._slots[kind][slot])

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


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (forgets_that_it_was_revoked, "refused without a reason"),
    (forgets_calls_when_it_fails, "does not answer"),
    (reads_whatever_a_slot_holds, "the replay has the same bits"),
    (tells_the_lead_first, "what the lead received"),
  ],
)
def test_an_old_fault_is_found_again(fault, message, monkeypatch):
  fault(monkeypatch)
  outcomes = explore.run_seeds(range(2 * SEEDS))
  assert any(message in outcome.error for outcome in outcomes)
