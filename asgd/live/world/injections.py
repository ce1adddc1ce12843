"""Faults of a world: which come to a run follows from a seed.

Some happen at once; others are armed, and happen to the next write, call,
frame or message that they can happen to.
"""

import collections
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

_MOST_FAULTS = 6
_STEPS = 4000  # fault points in which faults come, at most
_FEW_KINDS = 0.5  # probability that only some kinds of faults come
_LATE = 0.2  # probability of one after one of the last jobs has begun
_SOON, _NEAR = 0.4, 100  # probability of a next one within so many steps


class Injection(NamedTuple):
  """A fault of a world."""

  job: int  # that has begun; 0: none needs to
  step: int  # of the scheduler, since then
  kind: str  # one of a menu's kinds
  which: float  # of those that there are, a fraction
  seconds: float  # of a stop or a jump


class Menu(NamedTuple):
  """From what the scenarios of a protocol are drawn."""

  cases: Sequence[Any]  # runs without faults
  kinds: Sequence[str]  # of faults
  workers: int
  jobs: int


class Scenario(NamedTuple):
  """A run with its faults; of a seed."""

  seed: int
  case: Any
  faults: tuple[Injection, ...]

  def describe(self, keep: Sequence[int]) -> str:
    """Returns some of the faults, a line each."""
    lines = [f"seed {self.seed}: {self.case}"]
    for index in keep:
      fault = self.faults[index]
      since = f" after job {fault.job} has begun" if fault.job else ""
      lines.append(
        f"  fault {index}: {fault.kind} at step {fault.step}{since}"
        f" (which {fault.which:.2f}, {fault.seconds:g} s)"
      )
    return "\n".join(lines)


def draw(seed: int, menu: Menu) -> Scenario:
  """Returns the scenario of a seed."""
  rng = random.Random(seed)
  case, kinds = rng.choice(menu.cases), menu.kinds
  if rng.random() < _FEW_KINDS:
    kinds = rng.sample(menu.kinds, rng.randint(1, 4))
  faults: list[Injection] = []
  for _ in range(rng.randint(0, _MOST_FAULTS)):
    job, step = 0, int(_STEPS ** rng.uniform(0.4, 1.0))
    if rng.random() < _LATE:  # when what is lost may be found out too late
      job, step = menu.jobs - rng.randint(1, menu.workers), int(
        _STEPS ** rng.random()
      )
    elif faults and rng.random() < _SOON:  # before the last is got over
      job = faults[-1].job
      step = faults[-1].step + int(_NEAR ** rng.random())
    kind, which = rng.choice(kinds), rng.random()
    seconds = rng.choice((0.05, 0.5, 2.0, 8.0))
    faults.append(Injection(job, step, kind, which, seconds))
  return Scenario(seed, case, tuple(sorted(faults)))


class Faults:
  """The faults that are armed, and counts of those that have happened."""

  def __init__(self) -> None:
    self._armed: dict[str, collections.deque[Injection]] = (
      collections.defaultdict(collections.deque)
    )
    self.injected = collections.Counter[str]()  # by kind
    self.parties = collections.Counter[tuple[str, str]]()  # (kind, party)

  def arm(self, fault: Injection) -> None:
    """Lets a fault happen to the next that it can happen to."""
    self._armed[fault.kind].append(fault)

  def next(self, kind: str) -> Injection | None:
    """Returns the first of a kind that is armed."""
    armed = self._armed.get(kind)
    return armed[0] if armed else None

  def take(self, kind: str, party: str) -> Injection | None:
    """Returns the first of a kind that is armed, which happens to a party
    now."""
    fault = self.next(kind)
    if fault is not None:
      self._armed[kind].popleft()
      self.happened(kind, party)
    return fault

  def happened(self, kind: str, party: str) -> None:
    """Counts a fault. The party is a process ("call beside shard 0"), or a part
    of the world."""
    self.injected[kind] += 1
    party = party.removeprefix("call beside ")
    self.parties[kind, party.partition(" ")[0]] += 1
