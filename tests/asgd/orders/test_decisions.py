"""A dispatcher decides as one that asks every worker at every event would."""

import math
import random
import statistics

import pytest

from asgd import base
from asgd.orders.protocol import Dispatcher, Rules
from asgd.orders.starters import Starters
from asgd.orders.trace import NO_SEQ, STARTS


class AskingDispatcher(Dispatcher):
  """Decides by the rules as they are written, from tickets, clocks and counts:
  it looks at each worker and at each message that waits, at each event."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.came, self.took, self.done = {}, {}, set()

  def arrive(self, worker, seq, now=None):
    fresh = super().arrive(worker, seq, now)
    if fresh:
      self.came[worker, seq] = None
      if now is not None:
        self.took[worker] = now - self._ledger.open[worker][seq].time
    return fresh

  def _apply(self, event):
    super()._apply(event)
    if event.seq != NO_SEQ and event.action not in STARTS:
      self.came.pop(event.key, None)
    if event.action == base.RECEIVE:
      self.done.add(event.job)

  def tickets(self, worker):
    return self._ledger.open[worker]

  def doing(self):
    """The open tickets of each job that is not done."""
    jobs = {}
    for worker in self.workers:
      for seq, ticket in self.tickets(worker).items():
        if ticket.job not in self.done:
          jobs.setdefault(ticket.job, []).append((worker, seq))
    return jobs

  def deliver(self, now):
    jobs, out = set(), []
    for worker, seq in list(self.came):
      job = self.tickets(worker)[seq].job
      if job in self.done or job in jobs:
        self._write(now, worker, seq, job, base.DROP)
      jobs.add(job)
    while ready := self.receivable():
      for worker, seq in ready:
        job = self.tickets(worker)[seq].job
        self._write(now, worker, seq, job, base.RECEIVE)
        out.append((worker, seq, job))
    return out

  def receivable(self):
    if not self.rules.round:
      return [key for key in self.came if key[1] == min(self.tickets(key[0]))]
    late, current = [], []
    for worker in {worker for worker, _ in self.came}:
      last = 0
      for seq, ticket in self.tickets(worker).items():
        if (worker, seq) not in self.came:
          break
        last = max(last, ticket.job)
        kind = current if ticket.round == self._arrivals.round else late
        kind.append((last, worker, seq))
    missing = self.rules.round - self._arrivals._received
    more_to_come = (
      self.jobs is None
      or self._next_job < self.jobs
      or len(self._lost_jobs)
      or any(not {*keys} & {*self.came} for keys in self.doing().values())
    )
    chosen = sorted(late)
    if len(current) >= missing or not more_to_come:
      chosen += sorted(current)[:missing]
    return [(worker, seq) for _, worker, seq in chosen]

  def grants(self, now):
    out = []
    while True:
      before, slowest = len(out), self.slowest()
      starters = sorted(self._ledger.present)
      if self._in_warm_start:
        busy = [worker for worker in starters if self.tickets(worker)]
        free = [w for w in starters if not self._states[w].paused]
        starters = (busy or free)[:1]
      for worker in starters:
        job = self._choose_job(worker)
        if job is not None and self.may_start(worker, slowest):
          keep = self._keeps_ticket(worker)
          out.append(self._start(now, worker, job, keep=keep))
      if len(out) == before:
        break
    for due, job in self.late():
      if due <= now and (idle := self.idle()):
        out.append(self._start(now, idle[0], job, keep=False))
    return out

  def may_start(self, worker, slowest):
    rules, tickets = self.rules, self.tickets(worker)
    busy, depth = len(tickets), 1 if self._in_warm_start else rules.depth
    if rules.round:
      busy = sum((worker, seq) not in self.came for seq in tickets)
    if busy >= depth or self._states[worker].paused:
      return False
    if rules.round:
      return self._arrivals.n_granted < rules.round + rules.backup
    return self._next_start_clock(worker) - slowest <= rules.bound

  def slowest(self):
    if self._in_warm_start:
      return max((p.clock for p in self._states.values()), default=0)
    return min(
      (
        self._states[worker].clock
        for worker in self._ledger.present
        if self.tickets(worker) or self._choose_job(worker) is not None
      ),
      default=0,
    )

  def idle(self):
    if self._arrivals.n_granted < self.rules.round:
      return []
    return [
      worker
      for worker in sorted(self._ledger.present)
      if not self._states[worker].paused
      and all((worker, seq) in self.came for seq in self.tickets(worker))
    ]

  def late(self):
    """When each job that one worker alone does is late, in the order of due
    time and worker."""
    out = []
    for job, keys in self.doing().items() if self.rules.late < math.inf else ():
      (worker, seq), *others = keys
      ticket = self.tickets(worker)[seq]
      peers = [took for peer, took in self.took.items() if peer != worker]
      mine = ticket.round == self._arrivals.round and peers
      if mine and not others and (worker, seq) not in self.came:
        due = ticket.time + self.rules.late * statistics.median(peers)
        out.append((due, worker, job))
    return [(due, job) for due, _, job in sorted(out)]

  def next_late(self, before=math.inf):
    dues = [due for due, _ in self.late()] if self.idle() else []
    return min(dues, default=math.inf)


def any_rules(rng):
  kind = rng.choice(["free", "bound", "warm", "backup", "late"])
  if kind == "backup":
    return Rules(round=rng.randint(1, 5), backup=rng.randint(0, 3))
  if kind == "late":
    return Rules(round=rng.randint(1, 5), late=rng.choice([1, 1.5, 3]))
  free = kind == "free"
  bound = math.inf if free else rng.choice([0, 1, 2, 3.5, math.inf])
  cache = bound < math.inf and rng.random() < 0.4
  return Rules(
    bound=bound,
    cache=cache,
    depth=rng.choice([1, 1, 2, 3]),
    fetch_every=1 if cache else rng.choice([1, 1, 2, 3]),
    warm_start=rng.randint(1, 6) if kind == "warm" else 0,
  )


class Drive:
  """Two dispatchers, to which the same happens at random."""

  def __init__(self, seed):
    self.rng = rng = random.Random(seed)
    jobs = rng.choice([None, rng.randint(1, 60), rng.randint(20, 200)])
    self.given = dict(jobs=jobs, owned=rng.random() < 0.3)
    self.rules, self.places = any_rules(rng), rng.randint(1, 8)
    self.rows = [], []
    self.pair = [
      make(self.rules, **self.given, log=rows.append)
      for make, rows in zip(
        (Dispatcher, AskingDispatcher), self.rows, strict=True
      )
    ]
    self.ends = rng.choice([0, 0.02, 0.1])  # chance that a worker leaves
    self.decides = rng.choice([0.2, 1.0])  # chance of a decision at an event
    self.now = 0.0
    for worker in range(self.places):
      if rng.random() < 0.8:
        self.both("join", worker, 0.0)

  def both(self, name, *args):
    one, two = (getattr(each, name)(*args) for each in self.pair)
    assert one == two
    return one

  def step(self):
    rng, it = self.rng, self.pair[0]
    self.now += rng.choice([0, 0, 0.25, 1, rng.random()])
    open_tickets = [(w, seq) for w in it.workers for seq in it.open(w)]
    chance = rng.random()
    if chance < self.ends:
      what = rng.choice(["leave", "leave", "reject", "pause"])
      if what == "pause":
        self.both(what, rng.randrange(self.places))
      elif what == "leave":
        self.both(what, rng.randrange(self.places), self.now)
      elif open_tickets:
        self.both(what, *rng.choice(open_tickets), self.now)
    elif chance < 2.5 * self.ends:
      absent = sorted({*range(self.places)} - {*it.workers})
      if absent:
        self.both("join", rng.choice(absent), self.now)
    elif open_tickets:
      worker, seq = rng.choice(open_tickets)
      if rng.random() < 0.8:  # most frames come in their order
        seq = min(it.open(worker))
      now = self.now if rng.random() < 0.7 else None
      self.both("arrive", worker, seq, now)
    if rng.random() < self.decides:
      self.both("deliver", self.now)
      self.both("grants", self.now)
      self.both("next_late")
    if rng.random() < 0.01:
      self.restart()
    self.both("slowest")
    assert self.rows[0] == self.rows[1]

  def restart(self):
    """The first one fails, and another is made of its rows."""
    came = list(self.pair[1].came)
    paused = [w for w, p in self.pair[1]._states.items() if p.paused]
    self.pair = [
      type(it)(self.rules, **self.given, log=rows.append).replay([*rows])
      for it, rows in zip(self.pair, self.rows, strict=True)
    ]
    for key in came:
      self.both("arrive", *key)
    for worker in paused:
      if worker in self.pair[0].workers:
        self.both("pause", worker)


@pytest.mark.parametrize("part", range(4))
def test_it_decides_as_one_that_asks_everybody(part):
  rows = 0
  for seed in range(30 * part, 30 * (part + 1)):
    drive = Drive(seed)
    for _ in range(drive.rng.choice([30, 100, 200])):
      drive.step()
    rows += len(drive.rows[0])
  assert rows > 1000


def count_updates(workers, monkeypatch):
  """How often the starters update a worker for a message."""
  updates, update = [], Starters.update
  it = Dispatcher(Rules(bound=1))
  for worker in range(workers):
    it.join(worker, 0.0)
  granted, messages = it.grants(0.0), 4 * workers
  with monkeypatch.context() as patch:
    patch.setattr(
      *(Starters, "update"),
      lambda self, worker, *args, **kwargs: (
        updates.append(worker),
        update(self, worker, *args, **kwargs),
      ),
    )
    for turn in range(messages):
      grant = granted.pop(0)
      assert it.arrive(grant.worker, grant.seq)
      it.deliver(float(turn))
      granted += it.grants(float(turn))
  return len(updates) / messages


def test_a_message_updates_as_many_workers_of_64_as_of_4(monkeypatch):
  few, many = (count_updates(workers, monkeypatch) for workers in (4, 64))
  assert 1 <= many <= 1.1 * few
