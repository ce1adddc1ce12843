"""Faults of a simulated world, drawn from a seed.

Some faults are injected at once. Others are armed: they apply to the next
write, call, frame or message of a matching kind.
"""

import collections
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

_MAX_FAULTS = 6
_MAX_STEP = 4000  # the largest step at which a fault is injected
_FEW_KINDS = 0.5  # probability that a scenario has a few kinds of faults only
_LATE = 0.2  # probability that a fault waits for one of the last jobs
# Probability that a fault follows the one before within _SOON_STEPS steps.
_SOON, _SOON_STEPS = 0.4, 100


class Injection(NamedTuple):
  """A fault of a world."""

  job: int  # the fault waits until this job has begun; 0: it does not wait
  step: int  # of the scheduler, counted from the beginning of that job
  kind: str  # one of a menu's kinds
  target: float  # in [0, 1): selects a process, connection or file
  seconds: float  # length of a stop or a jump


class Menu(NamedTuple):
  """The cases and faults that a protocol's scenarios are drawn from."""

  cases: Sequence[Any]  # runs without faults
  kinds: Sequence[str]  # of faults
  workers: int
  jobs: int


class Scenario(NamedTuple):
  """A run with its faults, drawn from a seed."""

  seed: int
  case: Any
  faults: tuple[Injection, ...]

  def describe(self, keep: Sequence[int]) -> str:
    """Returns the case, and a line for each fault with an index in `keep`."""
    lines = [f"seed {self.seed}: {self.case}"]
    for index in keep:
      fault = self.faults[index]
      condition = f" after job {fault.job} has begun" if fault.job else ""
      lines.append(
        f"  fault {index}: {fault.kind} at step {fault.step}{condition}"
        f" (target {fault.target:.2f}, {fault.seconds:g} s)"
      )
    return "\n".join(lines)


def draw(seed: int, menu: Menu) -> Scenario:
  """Returns the scenario of a seed."""
  # After a change in the number or order of the draws below, each seed would
  # give another scenario.
  rng = random.Random(seed)
  case, kinds = rng.choice(menu.cases), menu.kinds
  if rng.random() < _FEW_KINDS:
    kinds = rng.sample(menu.kinds, rng.randint(1, 4))
  faults: list[Injection] = []
  for _ in range(rng.randint(0, _MAX_FAULTS)):
    # Uniform in log(step): the start of a run is short and has many phases.
    job, step = 0, int(_MAX_STEP ** rng.uniform(0.4, 1.0))
    # Two times at which recovery is difficult: near the end, when a loss may
    # be noticed too late, and before the run has recovered from a fault.
    if rng.random() < _LATE:
      job = menu.jobs - rng.randint(1, menu.workers)
      step = int(_MAX_STEP ** rng.random())
    elif faults and rng.random() < _SOON:
      job = faults[-1].job
      step = faults[-1].step + int(_SOON_STEPS ** rng.random())
    kind, target = rng.choice(kinds), rng.random()
    seconds = rng.choice((0.05, 0.5, 2.0, 8.0))
    faults.append(Injection(job, step, kind, target, seconds))
  return Scenario(seed, case, tuple(sorted(faults)))


class Faults:
  """The armed faults, and counts of the injected ones."""

  def __init__(self) -> None:
    self._armed: dict[str, collections.deque[Injection]] = (
      collections.defaultdict(collections.deque)
    )
    self.injected = collections.Counter[str]()  # by kind
    self.parties = collections.Counter[tuple[str, str]]()  # (kind, party)

  def arm(self, fault: Injection) -> None:
    """Stores a fault for the next operation of a matching kind."""
    self._armed[fault.kind].append(fault)

  def first_armed(self, kind: str) -> Injection | None:
    """Returns the first armed fault of a kind, which stays armed."""
    armed = self._armed.get(kind)
    return armed[0] if armed else None

  def take(self, kind: str, party: str) -> Injection | None:
    """Returns the first armed fault of a kind, and counts it as injected into
    a party."""
    fault = self.first_armed(kind)
    if fault is not None:
      self._armed[kind].popleft()
      self.count(kind, party)
    return fault

  def count(self, kind: str, party: str) -> None:
    """Counts an injected fault. The party is the name of a process ("shard 0",
    "call beside shard 0") or of a part of the world ("disk")."""
    self.injected[kind] += 1
    # A fault of a helper is one of its host; the index does not matter.
    party = party.removeprefix("call beside ")
    self.parties[kind, party.partition(" ")[0]] += 1
