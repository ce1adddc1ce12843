"""Protocols: which worker may start a job, and on which data.

A Dispatcher is called for each event (a worker joins, asks for work, sends a
message, leaves) and decides which jobs start. The caller passes the time, which
is drawn in a simulated order and real in a live run. Each decision is a row of
a Trace. After a crash, `Dispatcher.replay` restores the state from the rows,
except waiting messages (their senders must send them again), pauses, and the
durations of jobs. Most events cost O(log N) for N workers: `starters` keeps the
workers that may start, `arrivals` the messages that may be received.

  rules                          protocol
  Rules()                        asynchronous
  Rules(bound=s)                 stale synchronous parallel (Ho et al. 2013)
  Rules(bound=s, cache=True)     the same; a worker computes on its cached
                                 parameters, to which it adds its own updates,
                                 as long as the bound allows
  Rules(round=n)                 bulk synchronous, n messages per update
  Rules(round=n, backup=b)       n fastest of n + b (Chen et al. 2016)
  Rules(round=n, late=f)         rounds; an idle worker repeats a job that takes
                                 f times the median of the other workers, and
                                 the first result counts
  Rules(depth=2)                 fetch the next ticket while computing
  Rules(warm_start=n)            one worker alone for the first n messages (Dean
                                 et al. 2012)
  Rules(stages=((k, n),))        k workers for the first n messages, then all
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from asgd import base
from asgd.checks import flag, integer, real
from asgd.orders import stages
from asgd.orders.arrivals import Arrivals, RoundArrivals, StartedJob
from asgd.orders.lost_jobs import LostJobs
from asgd.orders.starters import Starters
from asgd.orders.trace import ENDS, NO_SEQ, Event, Ledger


class Rules(NamedTuple):
  """A protocol.

  Example:
    >>> from asgd.orders import protocol
    >>> protocol.check_rules(protocol.Rules(bound=3)).depth
    1
  """

  bound: float = math.inf  # jobs that a worker may be ahead of the slowest one
  round: int = 0  # messages of one synchronous update; 0: no rounds
  backup: int = 0  # jobs started beyond those that a round needs
  depth: int = 1  # tickets that a worker may hold at once
  fetch_every: int = 1  # jobs that a worker does on one ticket
  cache: bool = False  # keep a ticket for as long as `bound` allows it
  warm_start: int = 0  # messages of one worker, before the others start
  # (workers, messages) of each stage: `workers` workers may start jobs until
  # `messages` messages have been received.
  stages: tuple[tuple[int, int], ...] = ()
  # A job of a round is late when it takes this many times the median of the
  # other workers' latest jobs; then an idle worker repeats it.
  late: float = math.inf


# The largest depth: each open ticket needs a slot of a live run's memory.
MOST_DEPTH = 1000


def check_rules(rules: Rules) -> Rules:
  """Returns the rules; raises ValueError for values that are out of range or
  exclude one another."""
  for name, minimum in (("bound", 0), ("late", 1)):
    requirement = f"a number, {minimum} or more"
    is_allowed = functools.partial(operator.le, minimum)
    real(name, getattr(rules, name), is_allowed, requirement, finite=False)
  integer("round", rules.round, 0)
  integer("backup", rules.backup, 0)
  integer("fetch_every", rules.fetch_every)
  integer("warm_start", rules.warm_start, 0)
  integer("depth", rules.depth, most=MOST_DEPTH)
  flag("cache", rules.cache)
  if rules.backup and not rules.round:
    raise ValueError("backup workers need rounds: set the messages of a round")
  if rules.late < math.inf and (not rules.round or rules.backup):
    raise ValueError(
      f"late {rules.late:g} needs rounds without backup workers: only there can"
      " an idle worker repeat a job"
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
      f"cache keeps a ticket for as long as the bound allows, so fetch_every"
      f" {rules.fetch_every} would be ignored; use one of the two"
    )
  if rules.round and rules.warm_start:
    raise ValueError(
      f"warm_start {rules.warm_start} is for workers that do not wait for each"
      " other: a synchronous round needs all of them"
    )
  checked_stages = stages.read(rules.stages, rules.round, rules.warm_start)
  if checked_stages == rules.stages:
    return rules
  return rules._replace(stages=checked_stages)


class Grant(NamedTuple):
  """A job that was started."""

  worker: int
  seq: int  # counts the jobs of the worker index; (worker, seq) names a message
  job: int
  keep: bool  # whether the worker computes it on the ticket that it has


@dataclasses.dataclass(slots=True)
class _WorkerState:
  """The state of one worker index, except its tickets."""

  clock: int = 0  # jobs finished; `catch_up` raises it
  jobs_on_ticket: int = 0  # jobs started on the latest ticket
  slowest_at_send: int = 0  # slowest clock when the latest ticket was sent
  paused: bool = False  # the worker is about to leave: no new jobs

  def catch_up(self, slowest: int) -> None:
    """Raises the clock of a worker that starts late to the slowest clock;
    otherwise all others would wait for this worker."""
    self.clock = max(self.clock, slowest)


class Dispatcher:
  """Decides which worker starts which job; see the module.

  Args:
    rules: the protocol.
    jobs: number of jobs, each of which is received once; None: no limit.
    owned: whether jobs belong to workers (sharded data). If so, a lost job goes
      to the next incarnation of the same worker; if not, to any worker.
    log: called with each row before it takes effect.

  Raises:
    ValueError: as `check_rules`.

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
  """

  def __init__(
    self, rules: Rules, *, jobs: int | None = None, owned: bool = False,
    log: Callable[[Event], None] | None = None
  ) -> None:
    self.rules = check_rules(rules)
    self.jobs: int | None = jobs
    self._owned: bool = owned
    self._log: Callable[[Event], None] = log or (lambda row: None)
    self._states = collections.defaultdict[int, _WorkerState](_WorkerState)
    self._lost_jobs = LostJobs(owned)
    self._next_job = 0
    self._ledger: Ledger[StartedJob] = Ledger(self._open_ticket)
    self.received = 0  # messages
    self.lost = 0  # tickets, including those of rejected messages
    self._starters = Starters()
    self._admitted: set[int] = set()  # workers of the present stage
    self._arrivals = Arrivals(self._ledger)
    if rules.round:
      self._arrivals = RoundArrivals(self._ledger, rules.round, rules.late)

  def join(self, worker: int, now: float) -> int:
    """Adds a worker at a free index; returns its incarnation, from 0."""
    if worker in self._ledger.present:
      raise ValueError(
        f"worker {worker} is registered already: it must leave before its next"
        " incarnation joins"
      )
    incarnation = self._ledger.incarnations.get(worker, -1) + 1
    self._write(now, worker, NO_SEQ, incarnation, base.JOIN)
    return incarnation

  def leave(self, worker: int, now: float) -> list[int]:
    """Removes a worker. Its open jobs are lost: with `owned`, the worker's next
    incarnation repeats them, otherwise any worker. Returns their seqs."""
    if worker not in self._ledger.present:
      return []
    tickets = self.open(worker)
    for seq, ticket in tickets.items():
      self._write(now, worker, seq, ticket.job, base.LOST)
    incarnation = self._ledger.incarnations.get(worker, 0)
    self._write(now, worker, NO_SEQ, incarnation, base.LEAVE)
    return list(tickets)

  def reject(self, worker: int, seq: int, now: float) -> list[int]:
    """Refuses a message and removes its sender."""
    job = self._ledger.open[worker][seq].job
    self._write(now, worker, seq, job, base.REJECT)
    return [seq, *self.leave(worker, now)]

  def pause(self, worker: int) -> None:
    """Stops the starts of jobs at a worker that is about to leave."""
    self._states[worker].paused = True
    self._update_starters(worker)

  def arrive(self, worker: int, seq: int, now: float | None = None) -> bool:
    """Adds a message that has arrived. Returns False if it has arrived before,
    or its ticket is closed. `Rules.late` needs `now`, when the job ended."""
    key, ticket = (worker, seq), self._ledger.open[worker].get(seq)
    if ticket is None or key in self._arrivals:
      return False
    self._arrivals.add_message(key, None if now is None else now - ticket.time)
    if self.rules.round:
      self._update_starters(worker)
    return True

  def deliver(self, now: float) -> list[tuple[int, int, int]]:
    """Returns (worker, seq, job) of the messages to receive now, in order.

    The messages of a round wait for each other. Their order does not depend on
    their arrivals, and so neither does a sum over them; see
    `RoundArrivals.take_ready`.
    """
    delivered = []
    for worker, seq in self._arrivals.take_superseded():
      job = self._ledger.open[worker][seq].job
      self._write(now, worker, seq, job, base.DROP)
    while keys := self._arrivals.take_ready(self._has_jobs_left):
      for worker, seq in keys:
        job = self._ledger.open[worker][seq].job
        self._write(now, worker, seq, job, base.RECEIVE)
        delivered.append((worker, seq, job))
    return delivered

  def _has_jobs_left(self) -> bool:
    """Whether a job has yet to start."""
    return self._count_new_jobs() > 0 or bool(self._lost_jobs)

  def grants(self, now: float) -> list[Grant]:
    """Starts all jobs that may start now, and returns them. In each turn of the
    loop a worker starts at most one job."""
    grants: list[Grant] = []
    while starters := self._next_starters():
      n_earlier = len(grants)
      for worker in starters:
        job = self._choose_job(worker)
        if job is None:
          self._update_starters(worker)  # the worker is free again
          continue
        keep = self._keeps_ticket(worker)
        grants.append(self._start(now, worker, job, keep=keep))
      # With one ticket per worker, one turn is enough. Not if jobs belong to
      # workers: this turn may have chosen a worker that has no job, instead of
      # one that has lost jobs.
      all_started = self.rules.depth == 1 and not self._owned
      if len(grants) == n_earlier or all_started:
        break
    return grants + self._start_copies(now)

  def _start(self, now: float, worker: int, job: int, *, keep: bool) -> Grant:
    """Writes the row of a job that starts; returns its Grant."""
    seq = self._ledger.next_seq.get(worker, 0)
    self._write(now, worker, seq, job, base.KEEP if keep else base.SEND)
    return Grant(worker, seq, job, keep)

  def _next_starters(self) -> Sequence[int]:
    """Returns the workers that may each start one job now, sorted by index. In
    a warm start this is the first worker that is not paused, if no ticket is
    open."""
    rules, starters = self.rules, self._starters
    if self._in_warm_start:
      if self._arrivals.tickets:
        return ()
      candidates = (w for w in starters.workers if not self._states[w].paused)
      return list(itertools.islice(candidates, 1))
    # `limit` is the largest clock at which a worker may start.
    limit, max_starters = math.inf, len(starters.workers)
    if rules.round:
      max_starters = rules.round + rules.backup - self._arrivals.n_granted
    elif rules.bound < math.inf:
      limit = self.slowest() + rules.bound
    n_new_jobs = self._count_new_jobs()
    # Any worker may redo a lost job, unless jobs belong to workers.
    if not self._owned:
      n_jobs = n_new_jobs + len(self._lost_jobs)
      return starters.take(limit, min(max_starters, n_jobs))
    if n_new_jobs > 0:
      return starters.take(limit, max_starters)
    # Only workers with lost jobs have something to do.
    owners = self._lost_jobs.workers()
    owners = (w for w in owners if starters.allows(w, limit))
    return sorted(owners)[:max_starters]

  def _start_copies(self, now: float) -> list[Grant]:
    """Starts backup tasks: copies of late jobs at idle workers."""
    grants: list[Grant] = []
    for late_time, _, job in sorted(self._arrivals.find_late_jobs(now)):
      idle_worker = self._starters.first_free()
      if late_time > now or idle_worker is None:
        break
      grants.append(self._start(now, idle_worker, job, keep=False))
    return grants

  def next_late(self, before: float = math.inf) -> float:
    """Returns the next time at which a job is late and `grants` can start a
    copy of the job; infinity if no job is late before `before`."""
    if self._starters.first_free() is None:  # no worker is idle
      return math.inf
    late_jobs = self._arrivals.find_late_jobs(before)
    return min((late_time for late_time, *_ in late_jobs), default=math.inf)

  @property
  def _in_warm_start(self):
    """Whether one worker works alone, in a warm start."""
    return self.received < self.rules.warm_start

  def slowest(self) -> int:
    """The clock of the slowest worker that has a job to do; in a warm start the
    clock of the worker that computes, which is the largest."""
    if self._in_warm_start:
      return self._starters.largest_clock
    job_for_all = bool(self._lost_jobs) and not self._owned
    all_workers = self._count_new_jobs() > 0 or job_for_all
    return self._starters.slowest(all_workers=all_workers)

  def _next_start_clock(self, worker: int) -> int:
    """The worker's clock once its open jobs have ended."""
    return self._states[worker].clock + len(self._ledger.open[worker])

  def _keeps_ticket(self, worker: int) -> bool:
    """Whether the worker computes its next job on its latest ticket."""
    rules, state = self.rules, self._states[worker]
    if not state.jobs_on_ticket:
      return False
    # A cached ticket lacks the updates of the slowest worker since the ticket
    # was sent. So the bound counts from the slowest clock at that time.
    if rules.cache:
      clocks_ahead = self._next_start_clock(worker) - state.slowest_at_send
      return not self._in_warm_start and clocks_ahead <= rules.bound
    return state.jobs_on_ticket < rules.fetch_every

  def _count_new_jobs(self) -> float:
    """The number of jobs that were never started; infinity without a limit."""
    return math.inf if self.jobs is None else self.jobs - self._next_job

  def _choose_job(self, worker: int) -> int | None:
    job = self._lost_jobs.first(worker)
    if job is None and self._count_new_jobs() > 0:
      job = self._next_job
    return job

  def _update_starters(self, worker: int) -> None:
    """Updates the starters after a worker has changed."""
    is_waiting = self.rules.stages and worker not in self._admitted
    if is_waiting or worker not in self._ledger.present:
      self._starters.remove(worker)
      return
    state, tickets = self._states[worker], self._ledger.open[worker]
    n_jobs = self._arrivals.count_jobs(worker)
    is_free = not state.paused and n_jobs < self.rules.depth
    self._starters.update(
      worker,
      state.clock,
      has_job=bool(tickets) or self._lost_jobs.has_own(worker),
      start_clock=state.clock + len(tickets) if is_free else None,
    )

  def _write(
    self, now: float, worker: int, seq: int, job: int, action: int
  ) -> None:
    """Logs a row, then applies it. Times in a trace never decrease."""
    event = Event(max(now, self._ledger.time), worker, seq, job, action)
    self._log(event)
    self._apply(event)

  def replay(self, rows: Iterable[Event]) -> "Dispatcher":
    """Replays logged rows; raises TraceError."""
    for event in rows:
      self._apply(event)
    return self

  def _apply(self, event: Event) -> None:
    """Applies a row, written now or replayed, to all of the state."""
    worker, action = event.worker, event.action
    # Compute this before the worker is present: its own clock could be the
    # slowest.
    slowest = self.slowest() if action == base.JOIN else 0
    ticket = self._ledger.apply(event)
    if action in ENDS:
      self._end(event, ticket)
    elif action == base.JOIN:
      state = self._states[worker]
      state.paused, state.jobs_on_ticket = False, 0
      state.catch_up(slowest)
    self._update_starters(worker)
    if self.rules.stages and action in (base.RECEIVE, base.JOIN, base.LEAVE):
      self._update_stage(received=action == base.RECEIVE)

  def _update_stage(self, *, received: bool) -> None:
    """Admits the workers of the current stage, after a worker has joined or
    left, or a message was received."""
    rules = self.rules
    if received and not stages.ends(rules.stages, self.received):
      return
    present = self.workers
    admitted = stages.admitted(rules.stages, self.received, present)
    slowest = self.slowest()
    for worker in admitted - self._admitted:
      self._states[worker].catch_up(slowest)
    self._admitted = admitted
    for worker in present:
      self._update_starters(worker)

  def _open_ticket(
    self, event: Event, kept_ticket: StartedJob | None
  ) -> StartedJob:
    """Returns the ticket of a job that starts."""
    del kept_ticket
    job, state = event.job, self._states[event.worker]
    # If the job was lost, it is the first of the lost jobs.
    self._lost_jobs.remove(event.worker, job)
    self._next_job = max(self._next_job, job + 1)
    if event.action == base.SEND:
      state.jobs_on_ticket = 0
      if self.rules.cache:
        self._update_starters(event.worker)
        state.slowest_at_send = self.slowest()
    state.jobs_on_ticket += 1
    ticket = StartedJob(job, self._arrivals.round, event.time)
    self._arrivals.add_ticket(event)
    return ticket

  def _end(self, event: Event, ticket: Any) -> None:
    """Applies a row that closes a ticket."""
    is_lost = self._arrivals.close_ticket(event, ticket)
    if event.action == base.RECEIVE:
      state = self._states[event.worker]
      state.clock += 1
      self.received += 1
      if self.received == self.rules.warm_start:
        clock = max(state.clock, self._starters.largest_clock)
        self._end_warm_start(clock)
    elif event.action != base.DROP:
      self.lost += 1
      # The job starts again, unless a copy of it is open or was received.
      if is_lost:
        self._lost_jobs.add(event.worker, ticket.job)

  def _end_warm_start(self, clock: int) -> None:
    """Sets all clocks to the clock of the worker that was alone."""
    for state in self._states.values():
      state.clock, state.jobs_on_ticket = clock, 0
    for worker in list(self._starters.workers):
      self._update_starters(worker)

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
    """The indices of present workers, sorted."""
    return sorted(self._ledger.present)

  def open(self, worker: int) -> dict[int, StartedJob]:
    """A worker's open jobs by seq."""
    return dict(self._ledger.open[worker])
