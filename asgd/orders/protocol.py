"""Which worker may start when, and on which data: protocols without a clock.

A Dispatcher is called for each event (a worker joins, asks for work, hands in a
message, leaves) and decides which jobs start. Each decision is a row of a
Trace, and only the rows and the waiting messages are its state:
`Dispatcher.obey` restores it from a recorded trace after a crash. Orders are
made by driving it with drawn durations, live runs by driving it with real ones.

  rules                          protocol
  Rules()                        asynchronous
  Rules(bound=s)                 stale synchronous parallel (Ho et al. 2013)
  Rules(bound=s, cache=True)     the same, reading from the worker's cache, with
                                 its own writes, while the bound allows it
  Rules(round=n)                 bulk synchronous, n messages an update
  Rules(round=n, backup=b)       n fastest of n + b (Chen et al. 2016)
  Rules(round=n, late=f)         the same, and a job that takes f times as long
                                 as those of its worker's peers is handed to an
                                 idle worker, too; the first result counts
  Rules(depth=2)                 fetch the next ticket while computing
  Rules(warm_start=n)            one worker alone for the first n messages (Dean
                                 et al. 2012)
"""

import collections
import dataclasses
import functools
import heapq
import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

from asgd import base
from asgd.checks import flag, real, whole
from asgd.orders.backups import Copies
from asgd.orders.trace import ENDS, NO_SEQ, Event, Ledger


class Rules(NamedTuple):
  """A protocol.

  Example:
    >>> from asgd.orders import protocol
    >>> protocol.check_rules(protocol.Rules(bound=3)).depth
    1
  """

  bound: float = math.inf  # jobs a worker may be ahead of the slowest
  round: int = 0  # messages of one synchronous update; 0: no rounds
  backup: int = 0  # jobs started beyond those that a round needs
  depth: int = 1  # tickets that a worker may hold at once
  fetch_every: int = 1  # jobs that a worker does on one ticket
  cache: bool = False  # keep a ticket for as long as `bound` allows it
  warm_start: int = 0  # messages of one worker, before the others start
  # Times of its worker's peers, their median, after which a job of a round is
  # another worker's, too.
  late: float = math.inf


# Each ticket that may be open is a slot of a live run's memory.
MOST_DEPTH = 1000


def check_rules(rules: Rules) -> Rules:
  """Returns the rules; raises ValueError for values that do not fit."""
  for name, least in (("bound", 0), ("late", 1)):
    kind = f"a number, {least} or more"
    holds = functools.partial(operator.le, least)
    real(name, getattr(rules, name), holds, kind, finite=False)
  whole("round", rules.round, 0)
  whole("backup", rules.backup, 0)
  whole("fetch_every", rules.fetch_every)
  whole("warm_start", rules.warm_start, 0)
  whole("depth", rules.depth, most=MOST_DEPTH)
  flag("cache", rules.cache)
  if rules.backup and not rules.round:
    raise ValueError("backup workers need rounds: set the messages of a round")
  if rules.late < math.inf and (not rules.round or rules.backup):
    raise ValueError(
      f"late {rules.late:g} is for the jobs of rounds without backup workers:"
      " no worker is idle otherwise"
    )
  if rules.round and (rules.depth > 1 or rules.cache or rules.fetch_every > 1):
    raise ValueError(
      "a synchronous round sends every worker the new parameters: use depth=1,"
      " fetch_every=1 and no cache"
    )
  if rules.cache and rules.bound == math.inf:
    raise ValueError("a cache needs a finite bound, or it is never refreshed")
  if rules.cache and rules.fetch_every > 1:
    raise ValueError(
      f"cache keeps a ticket for as long as the bound allows, and fetch_every"
      f" {rules.fetch_every} would not be kept; use one of the two"
    )
  if rules.round and rules.warm_start:
    raise ValueError(
      f"warm_start {rules.warm_start} is for workers that do not wait for each"
      " other: a synchronous round needs all of them"
    )
  return rules


class Grant(NamedTuple):
  """A job that may start now."""

  worker: int
  seq: int  # counts the worker's place's jobs; (worker, seq) names a message
  job: int
  keep: bool  # on the ticket it holds already


class StartedJob(NamedTuple):
  """A job that was started and has not ended."""

  job: int
  round: int  # in which it was started
  time: float  # when


@dataclasses.dataclass
class _Place:
  """The state of one worker index, beside its tickets."""

  finished: int = 0  # the worker's clock
  on_ticket: int = 0  # jobs started on the latest ticket
  slowest: int = 0  # the slowest clock when that was sent
  paused: bool = False  # the worker is about to leave: no new jobs


class Dispatcher:
  """Decides which worker starts which job; see the module.

  Args:
    rules: the protocol.
    jobs: how many there are, each to be received once; None is no end.
    owned: jobs belong to workers (sharded data): a lost job goes to the next
      incarnation of the same worker, not to any worker.
    log: called with each row before it takes effect.

  Raises:
    ValueError: for rules that do not fit.

  Example:
    Bulk synchronous: no worker starts again before all have ended.

    >>> from asgd.orders import protocol
    >>> dispatcher = protocol.Dispatcher(protocol.Rules(bound=0))
    >>> for worker in range(2):
    ...   _ = dispatcher.join(worker, now=0.0)
    >>> [grant.job for grant in dispatcher.grants(now=0.0)]
    [0, 1]
    >>> dispatcher.arrive(worker=0, seq=0), dispatcher.deliver(now=1.0)
    (True, [(0, 0, 0)])
    >>> dispatcher.grants(now=1.0)
    []
    >>> dispatcher.arrive(worker=1, seq=0), dispatcher.deliver(now=2.0)
    (True, [(1, 0, 1)])
    >>> [grant.job for grant in dispatcher.grants(now=2.0)]
    [2, 3]
  """

  def __init__(self, rules: Rules, *, jobs=None, owned=False, log=None):
    self.rules = check_rules(rules)
    self.jobs: int | None = jobs
    self._owned: bool = owned
    self._log: Callable[[Event], None] = log or (lambda row: None)
    self._places: dict[int, _Place] = collections.defaultdict(_Place)
    self._again: dict[int, list[int]] = collections.defaultdict(list)
    self._arrived: dict[tuple[int, int], None] = {}  # in their order
    self._next_job = 0
    self._ledger: Ledger[StartedJob] = Ledger(self._open)
    self.received = 0  # jobs
    self.lost = 0  # tickets, rejected ones among them
    self._round = self._granted = self._in_round = 0
    self._copies = Copies()

  def join(self, worker: int, now: float) -> int:
    """Adds a worker at a free index; returns how many were there before."""
    if worker in self._ledger.present:
      raise ValueError(f"the place of worker {worker} is taken")
    holder = self._ledger.holders.get(worker, -1) + 1
    self._write(now, worker, NO_SEQ, holder, base.JOIN)
    return holder

  def leave(self, worker: int, now: float) -> list[int]:
    """Removes a worker, whose open jobs go to others; returns their seqs."""
    if worker not in self._ledger.present:
      return []
    tickets = self.open(worker)
    for seq, ticket in tickets.items():
      self._write(now, worker, seq, ticket.job, base.LOST)
    holder = self._ledger.holders.get(worker, 0)
    self._write(now, worker, NO_SEQ, holder, base.LEAVE)
    return list(tickets)

  def reject(self, worker: int, seq: int, now: float) -> list[int]:
    """Refuses a message and removes its sender."""
    job = self._ledger.open[worker][seq].job
    self._write(now, worker, seq, job, base.REJECT)
    return [seq, *self.leave(worker, now)]

  def pause(self, worker: int) -> None:
    """Starts nothing new at a worker that is about to leave."""
    self._places[worker].paused = True

  def arrive(
    self, worker: int, seq: int, now: float | None = None
  ) -> bool:
    """Takes a message; False if its ticket is closed (a duplicate, or late).
    The time is that of the job for `Rules.late`."""
    key, ticket = (worker, seq), self._ledger.open[worker].get(seq)
    if ticket is None or key in self._arrived:
      return False
    self._arrived[key] = None
    if now is not None:
      self._copies.took[worker] = now - ticket.time
    return True

  def deliver(self, now: float) -> list[tuple[int, int, int]]:
    """Returns the (worker, seq, job) for the server now, in order. Messages of
    a round wait for each other and go in the order of the jobs, so that a sum
    over them does not depend on which came first."""
    out = []
    arrived = {(w, s): self._ledger.open[w][s].job for w, s in self._arrived}
    for worker, seq in self._copies.beaten(arrived):
      self._write(now, worker, seq, arrived[worker, seq], base.DROP)
    while ready := self._ready():
      for worker, seq in ready:
        job = self._ledger.open[worker][seq].job
        self._write(now, worker, seq, job, base.RECEIVE)
        out.append((worker, seq, job))
    return out

  def _ready(self):
    """Returns the (worker, seq) that may go now, each after the worker's
    earlier ones; those of a round by the worker's largest job so far."""
    if not self.rules.round:  # in the order of their arrival
      return [
        (worker, seq)
        for worker, seq in self._arrived
        if seq == next(iter(self._ledger.open[worker]))
      ]
    late, current = [], []
    for worker in {worker for worker, _ in self._arrived}:
      last = 0
      for seq, ticket in self._ledger.open[worker].items():
        if (worker, seq) not in self._arrived:
          break
        last = max(last, ticket.job)
        kind = current if ticket.round == self._round else late
        kind.append((last, worker, seq))
    missing = self.rules.round - self._in_round
    chosen = sorted(late)  # dropped by the server: their round is over
    more_to_come = (
      self.jobs is None
      or self._next_job < self.jobs
      or any(self._again.values())
      or self._copies.awaited(self._arrived)
    )
    if len(current) >= missing or not more_to_come:
      chosen += sorted(current)[:missing]
    return [(worker, seq) for _, worker, seq in chosen]

  def grants(self, now: float) -> list[Grant]:
    """Starts all jobs that may start now, in rounds over the workers."""
    out = []
    while True:
      before = len(out)
      slowest = self.slowest() if self.rules.bound < math.inf else 0
      for worker in self._starters():
        job = self._take_job(worker)
        if job is None or not self._may_start(worker, slowest):
          continue
        keep = self._keeps(worker)
        seq = self._ledger.next_seq.get(worker, 0)
        self._write(now, worker, seq, job, base.KEEP if keep else base.SEND)
        out.append(Grant(worker, seq, job, keep))
      if len(out) == before:
        return out + self._hand_out_late(now)

  def _hand_out_late(self, now):
    """Starts late jobs at idle workers, too."""
    out: list[Grant] = []
    for due, worker, job in sorted(self._to_be_late()):
      idle = [other for other in self._idle() if other != worker]
      if due > now or not idle:
        break
      seq = self._ledger.next_seq.get(idle[0], 0)
      self._write(now, idle[0], seq, job, base.SEND)
      out.append(Grant(idle[0], seq, job, keep=False))
    return out

  def next_late(self) -> float:
    """Returns when `grants` can start another job because one is late by then,
    or infinity."""
    idle = self._idle()
    return min(
      (due for due, worker, _ in self._to_be_late() if {*idle} - {worker}),
      default=math.inf,
    )

  def _idle(self):
    """Workers that have ended all their jobs, and get no others."""
    if self.rules.late == math.inf or self._granted < self.rules.round:
      return []
    return [
      worker
      for worker in self.workers
      if not self._places[worker].paused
      and all((worker, seq) in self._arrived for seq in self.open(worker))
    ]

  def _to_be_late(self):
    """Yields (when it is late, worker, job) of the jobs of this round that one
    worker alone does."""
    if self.rules.late == math.inf:
      return
    for worker, seq in self._copies.single(self._arrived):
      ticket, usual = self._ledger.open[worker][seq], self._copies.usual(worker)
      if ticket.round == self._round and usual is not None:
        yield ticket.time + self.rules.late * usual, worker, ticket.job

  @property
  def _alone(self):
    """Whether one worker works alone, in a warm start."""
    return self.received < self.rules.warm_start

  def _starters(self):
    """Workers that may start a job: all, or the one of a warm start, which is
    the one that has begun, or the first."""
    if not self._alone:
      return self.workers
    busy = [worker for worker in self.workers if self._ledger.open[worker]]
    free = [w for w in self.workers if not self._places[w].paused]
    return (busy or free)[:1]

  def slowest(self) -> int:
    """The clock of the slowest worker that has a job to do; in a warm start, of
    the one that works."""
    if self._alone:
      return max((p.finished for p in self._places.values()), default=0)
    clocks = (
      self._places[worker].finished
      for worker in self._ledger.present
      if self._ledger.open[worker] or self._take_job(worker) is not None
    )
    return min(clocks, default=0)

  def _may_start(self, worker, slowest):
    rules, tickets = self.rules, self._ledger.open[worker]
    busy = len(tickets)
    if rules.round:  # a message that waits for its round does not count
      busy = sum((worker, seq) not in self._arrived for seq in tickets)
    depth = 1 if self._alone else rules.depth
    if busy >= depth or self._places[worker].paused:
      return False
    if rules.round:
      return self._granted < rules.round + rules.backup
    return self._clock(worker) - slowest <= rules.bound

  def _clock(self, worker):
    """The worker's clock when its open jobs will have ended."""
    return self._places[worker].finished + len(self._ledger.open[worker])

  def _keeps(self, worker):
    rules, place = self.rules, self._places[worker]
    if not place.on_ticket:
      return False
    if rules.cache:
      ahead = self._clock(worker) - place.slowest
      return not self._alone and ahead <= rules.bound
    return place.on_ticket < rules.fetch_every

  def _lost_jobs(self, worker):
    # A heap of those that the worker may do again.
    return self._again[worker if self._owned else 0]

  def _take_job(self, worker):
    if lost := self._lost_jobs(worker):
      return lost[0]
    all_started = self.jobs is not None and self._next_job >= self.jobs
    return None if all_started else self._next_job

  def _write(self, now, worker, seq, job, action):
    event = Event(max(now, self._ledger.time), worker, seq, job, action)
    self._log(event)
    self._obey(event)

  def obey(self, rows: Iterable[Event]) -> "Dispatcher":
    """Replays logged rows; raises TraceError."""
    for event in rows:
      self._obey(event)
    return self

  def _obey(self, event):
    worker, action = event.worker, event.action
    slowest = self.slowest() if action == base.JOIN else 0
    ticket = self._ledger.obey(event)
    if action in ENDS:
      self._end(event, ticket)
    elif action == base.JOIN:
      place = self._places[worker]
      place.paused, place.on_ticket = False, 0
      place.finished = max(place.finished, slowest)

  def _open(self, event, kept):
    """The ticket of a job that starts."""
    del kept
    job, place = event.job, self._places[event.worker]
    lost = self._lost_jobs(event.worker)
    if lost and lost[0] == job:
      heapq.heappop(lost)
    self._next_job = max(self._next_job, job + 1)
    if event.action == base.SEND:
      place.on_ticket, place.slowest = 0, self.slowest()
    place.on_ticket += 1
    self._granted += self._copies.start(job, event.key)
    return StartedJob(job, self._round, event.time)

  def _end(self, event, ticket):
    current = ticket.round == self._round
    counts = event.action == base.RECEIVE
    lost = self._copies.end(ticket.job, event.key, counts=counts)
    self._arrived.pop(event.key, None)
    if event.action == base.DROP:
      return
    if counts:
      self._places[event.worker].finished += 1
      self.received += 1
      if self.received == self.rules.warm_start:  # all clocks are the worker's
        most = max(place.finished for place in self._places.values())
        for place in self._places.values():
          place.finished, place.on_ticket = most, 0
      self._in_round += current
      if self._in_round == self.rules.round:
        self._round += 1
        self._granted = self._in_round = 0
      return
    self.lost += 1
    if not lost:
      return  # another worker does it, or has done it
    self._granted -= current
    heapq.heappush(self._lost_jobs(event.worker), ticket.job)

  @property
  def rows(self) -> int:
    """Decisions so far: rows of the trace."""
    return self._ledger.rows

  @property
  def finished(self) -> bool:
    """Whether every job was received."""
    return self.jobs is not None and self.received >= self.jobs

  @property
  def workers(self) -> list[int]:
    """The indices of present workers."""
    return sorted(self._ledger.present)

  def open(self, worker: int) -> dict[int, StartedJob]:
    """A worker's open jobs by seq."""
    return dict(self._ledger.open[worker])
