"""Who may start when, and on which data: the protocol, without a clock.

A Dispatcher is told what happens (a worker joins, asks for work, hands in a
message, is gone) and says what may start. It writes down each decision as a row
of a Trace and knows nothing that the rows do not say, but for who is waiting:
`Dispatcher.obey` gives it back from a recorded trace after a crash. Orders are
made by driving it with drawn durations, live runs by driving it with real ones.

  rules                          protocol
  Rules()                        asynchronous
  Rules(bound=s)                 stale synchronous parallel (Ho et al. 2013)
  Rules(bound=s, cache=True)     the same, reading from the worker's cache while
                                 the bound allows it
  Rules(round=n)                 bulk synchronous, n messages an update
  Rules(round=n, backup=b)       n fastest of n + b (Chen et al. 2016)
  Rules(depth=2)                 fetch the next ticket while computing
"""

import heapq
import math
import numbers
from collections.abc import Callable, Iterable
from typing import NamedTuple

from asgd import base

Event = tuple[float, int, int, int]  # time, worker, job, action: a Trace's row


class Rules(NamedTuple):
  """A protocol."""

  bound: float = math.inf  # jobs a worker may be ahead of the slowest
  round: int = 0  # messages of one synchronous update; 0: no rounds
  backup: int = 0  # jobs started beyond those that a round needs
  depth: int = 1  # tickets that a worker may hold at once
  fetch_every: int = 1  # jobs that a worker does on one ticket
  cache: bool = False  # keep a ticket for as long as `bound` allows it


# Each ticket that may be open is a slot of a live run's memory.
MOST_DEPTH = 1000


def check_rules(rules: Rules) -> Rules:
  """Returns rules that can be obeyed.

  Raises:
    ValueError: naming what is wrong.
  """
  bound = rules.bound
  known = isinstance(bound, numbers.Real) and not isinstance(bound, bool)
  if not known or not bound >= 0:
    raise ValueError(f"bound must be a number, 0 or more, not {bound!r}")
  for name, least, most in (
    ("round", 0, math.inf),
    ("backup", 0, math.inf),
    ("depth", 1, MOST_DEPTH),
    ("fetch_every", 1, math.inf),
  ):
    value = getattr(rules, name)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
      to = "" if most == math.inf else f" to {most}"
      raise ValueError(
        f"{name} must be a whole number from {least}{to}, not {value!r}"
      )
  if not isinstance(rules.cache, bool):
    raise ValueError(f"cache must be True or False, not {rules.cache!r}")
  if rules.backup and not rules.round:
    raise ValueError("backup workers need rounds: set the messages of a round")
  if rules.cache and rules.bound == math.inf:
    raise ValueError("a cache needs a finite bound, or it is never refreshed")
  if rules.round and (rules.depth > 1 or rules.cache or rules.fetch_every > 1):
    raise ValueError(
      "a synchronous round sends every worker the new parameters: use depth=1,"
      " fetch_every=1 and no cache"
    )
  return rules


class Grant(NamedTuple):
  """A job that may start now."""

  worker: int
  seq: int  # counts the worker's place's jobs; (worker, seq) names a message
  job: int
  keep: bool  # on the ticket it holds already


class Open(NamedTuple):
  """A job that was started and has not ended."""

  job: int
  round: int  # in which it was started
  time: float  # when


class _Place:
  """What is known of one worker's place."""

  def __init__(self):
    self.holders = 0  # JOINs so far
    self.present = False
    self.seq = 0  # jobs started so far
    self.open: dict[int, Open] = {}  # by seq, oldest first
    self.finished = 0  # the worker's clock
    self.on_ticket = 0  # jobs started on the latest ticket
    self.slowest = 0  # the slowest clock when that was sent
    self.paused = False  # it is about to leave: nothing new for it


class Dispatcher:
  """Decides who starts what; see the module."""

  def __init__(
    self,
    rules: Rules,
    *,
    jobs: int | None = None,
    owned: bool = False,
    log: Callable[[Event], None] | None = None,
  ):
    """Starts with nobody there.

    Args:
      rules: the protocol.
      jobs: how many there are, each to be received once; None is no end.
      owned: jobs belong to workers (sharded data): a job that was lost goes to
        the next holder of the same place, not to anybody.
      log: called with each row before it takes effect.

    Raises:
      ValueError: for rules that cannot be obeyed.
    """
    self.rules = check_rules(rules)
    self.jobs = jobs
    self._owned = owned
    self._log = log or (lambda row: None)
    self._places: dict[int, _Place] = {}
    self._again: dict[int, list[int]] = {}  # lost jobs: heaps, by owner or 0
    self._arrived: dict[tuple[int, int], None] = {}  # in their order
    self._next_job = 0
    self._time = -math.inf
    self.rows = 0
    self.received = 0  # jobs
    self.lost = 0  # tickets that died, rejected ones among them
    self._round = self._granted = self._in_round = 0

  # What happens.

  def join(self, worker: int, now: float) -> int:
    """Somebody new takes a place; returns how many held it before.

    Raises:
      ValueError: if the place is taken.
    """
    place = self._places.get(worker)
    if place is not None and place.present:
      raise ValueError(f"the place of worker {worker} is taken")
    holders = place.holders if place else 0
    self._write(now, worker, holders, base.JOIN)
    return holders

  def leave(self, worker: int, now: float) -> list[int]:
    """The holder of a place is gone; its open jobs go to others.

    Returns:
      The seqs of the tickets that died.
    """
    place = self._places.get(worker)
    if place is None or not place.present:
      return []
    dead = list(place.open)
    for seq in dead:
      self._write(now, worker, place.open[seq].job, base.LOST)
    self._write(now, worker, max(place.holders - 1, 0), base.LEAVE)
    return dead

  def reject(self, worker: int, seq: int, now: float) -> list[int]:
    """A message is refused at the door, and with it its sender: what it works
    on may be as bad. Returns the seqs of all tickets that died."""
    place = self._places[worker]
    self._write(now, worker, place.open[seq].job, base.REJECT)
    return [seq, *self.leave(worker, now)]

  def pause(self, worker: int) -> None:
    """Starts nothing new at a worker that is about to leave."""
    self._places[worker].paused = True

  def arrive(self, worker: int, seq: int) -> bool:
    """A message has come. False if its ticket is closed: a duplicate, or one
    from a worker that was taken for dead."""
    place = self._places.get(worker)
    if place is None or seq not in place.open or (worker, seq) in self._arrived:
      return False
    self._arrived[worker, seq] = None
    return True

  # What follows.

  def deliver(self, now: float) -> list[tuple[int, int, int]]:
    """Returns the (worker, seq, job) to be given to the server now, in order.

    Messages of a worker go in the order of its jobs. Those of a round wait for
    each other and go in the order of the jobs, so that a sum over them does not
    depend on who was first.
    """
    out = []
    while True:
      ready = self._ready()
      if not ready:
        return out
      for worker, seq in ready:
        job = self._places[worker].open[seq].job
        del self._arrived[worker, seq]
        self._write(now, worker, job, base.RECEIVE)
        out.append((worker, seq, job))

  def _ready(self):
    """Returns arrived messages that may go now: all whose worker's earlier
    ones have arrived, by (largest job so far, worker, seq)."""
    if not self.rules.round:  # in the order of their arrival
      return [
        (worker, seq)
        for worker, seq in self._arrived
        if seq == next(iter(self._places[worker].open))
      ]
    late, current = [], []
    for worker in {worker for worker, _ in self._arrived}:
      last = 0
      for seq, ticket in self._places[worker].open.items():
        if (worker, seq) not in self._arrived:
          break
        last = max(last, ticket.job)
        kind = current if ticket.round == self._round else late
        kind.append((last, worker, seq))
    missing = self.rules.round - self._in_round
    chosen = sorted(late)  # dropped by the server: their round is over
    if len(current) >= missing or (current and not self._more_to_come()):
      chosen += sorted(current)[:missing]
    return [(worker, seq) for _, worker, seq in chosen]

  def _more_to_come(self):
    """Whether any job is left to be done or handed in."""
    if (
      self.jobs is None
      or self._next_job < self.jobs
      or any(self._again.values())
    ):
      return True
    opened = sum(len(place.open) for place in self._places.values())
    return opened > len(self._arrived)

  def grants(self, now: float) -> list[Grant]:
    """Returns what may start now, in rounds over the workers; it is started."""
    out = []
    while True:
      before = len(out)
      slowest = self.slowest() if self.rules.bound < math.inf else 0
      for worker in self.workers:
        if not self._may_start(worker, slowest):
          continue
        job = self._take_job(worker)
        if job is None:
          continue
        place = self._places[worker]
        keep = self._keeps(place)
        self._write(now, worker, job, base.KEEP if keep else base.SEND)
        out.append(Grant(worker, place.seq - 1, job, keep))
      if len(out) == before:
        return out

  def slowest(self) -> int:
    """The clock of the slowest worker that is there and has something to do."""
    return min(
      (
        place.finished
        for worker, place in self._places.items()
        if place.present and (place.open or self._take_job(worker) is not None)
      ),
      default=0,
    )

  def _may_start(self, worker, slowest):
    rules, place = self.rules, self._places[worker]
    busy = len(place.open)
    if rules.round:  # what has come waits for its round, not its worker
      busy = sum((worker, seq) not in self._arrived for seq in place.open)
    if busy >= rules.depth or place.paused:
      return False
    if rules.round:
      return self._granted < rules.round + rules.backup
    return place.finished + len(place.open) - slowest <= rules.bound

  def _keeps(self, place):
    rules = self.rules
    if not place.on_ticket:
      return False
    if rules.cache:
      return place.finished + len(place.open) - place.slowest <= rules.bound
    return place.on_ticket < rules.fetch_every

  def _take_job(self, worker):
    again = self._again.get(worker if self._owned else 0)
    if again:
      return again[0]
    if self.jobs is not None and self._next_job >= self.jobs:
      return None
    return self._next_job

  # Its state, as a function of the rows.

  def _write(self, now, worker, job, action):
    row = (max(now, self._time), worker, job, action)
    self._log(row)
    self._obey(row)

  def obey(self, rows: Iterable[Event]) -> "Dispatcher":
    """Takes over what was decided before, row by row; nothing is logged."""
    for row in rows:
      self._obey(row)
    return self

  def _obey(self, row):
    time, worker, job, action = row
    self._time = time
    self.rows += 1
    place = self._places.setdefault(worker, _Place())
    if action in (base.SEND, base.KEEP):
      self._start(place, worker, job, action)
    elif action in (base.RECEIVE, base.LOST, base.REJECT):
      self._end(place, worker, job, action)
    elif action == base.JOIN:
      others = self.slowest()
      place.present, place.paused, place.on_ticket = True, False, 0
      place.holders += 1
      place.finished = max(place.finished, others)
    elif action == base.LEAVE:
      place.present = False

  def _start(self, place, worker, job, action):
    owner = worker if self._owned else 0
    again = self._again.get(owner)
    if again and again[0] == job:
      heapq.heappop(again)
    self._next_job = max(self._next_job, job + 1)
    place.present = True
    if action == base.SEND:
      place.on_ticket, place.slowest = 0, self.slowest()
    place.on_ticket += 1
    place.open[place.seq] = Open(job, self._round, self._time)
    place.seq += 1
    self._granted += 1

  def _end(self, place, worker, job, action):
    seq = next(s for s, ticket in place.open.items() if ticket.job == job)
    ticket = place.open.pop(seq)
    current = ticket.round == self._round
    if action == base.RECEIVE:
      place.finished += 1
      self.received += 1
      self._in_round += current
      if self._in_round == self.rules.round:
        self._round += 1
        self._granted = self._in_round = 0
      return
    self.lost += 1
    self._granted -= current
    self._arrived.pop((worker, seq), None)
    owner = worker if self._owned else 0
    heapq.heappush(self._again.setdefault(owner, []), job)

  # What others may know.

  @property
  def finished(self) -> bool:
    """Whether every job was received."""
    return self.jobs is not None and self.received >= self.jobs

  @property
  def workers(self) -> list[int]:
    """The places that are held."""
    return sorted(w for w, p in self._places.items() if p.present)

  def open(self, worker: int) -> dict[int, Open]:
    """The jobs that a worker has started and not ended, by seq."""
    place = self._places.get(worker)
    return dict(place.open) if place else {}
