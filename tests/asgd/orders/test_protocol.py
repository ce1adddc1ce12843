"""The dispatcher: who may start what, row by row and whatever happens."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import base, orders
from asgd.orders import protocol
from asgd.orders.protocol import Dispatcher, Grant, Rules
from asgd.orders.trace import from_events

quick = settings(deadline=None, derandomize=True, max_examples=100)

STARTS = base.SEND, base.KEEP
DEATHS = base.LOST, base.REJECT


class Run:
  """A dispatcher and what it has decided."""

  def __init__(self, *args, workers=0, **kwargs):
    self.rows = []
    self._shown = 0
    self.it = Dispatcher(*args, log=self.rows.append, **kwargs)
    for worker in range(workers):
      self.it.join(worker, 0.0)
    self.new()

  def new(self):
    """The rows since the last call, as "action worker:job"."""
    rows, self._shown = self.rows[self._shown :], len(self.rows)
    return [f"{base.ACTIONS[a]} {w}:{job}" for _, w, _, job, a, *_ in rows]

  def go(self, now=0.0):
    self.it.deliver(now)
    self.it.grants(now)
    return self.new()

  def arrive(self, *messages):
    """Messages come, each for the first time unless a text before it says why
    not."""
    expected = True
    for message in messages:
      if isinstance(message, str):
        expected = False
      else:
        assert self.it.arrive(*message) == expected
        expected = True

  def end(self, worker, seq, now=0.0):
    """A message comes; what follows."""
    assert self.it.arrive(worker, seq)
    return self.go(now)


# The protocols, by hand.


# What a dispatcher does at the start, and when messages (worker, seq) come, or
# a worker does something. A text says why the message after it is refused.
BY_HAND = {
  "asynchronous workers never wait": (Rules(), {}, [
    ("start", "send 0:0, send 1:1"),
    ("start", ""),
    ((0, 0), "receive 0:0, send 0:2"),
    ((0, 1), "receive 0:2, send 0:3"),
    ((1, 0), "receive 1:1, send 1:4"),
    ([(0, 2), (1, 1)], "receive 0:3, receive 1:4, send 0:5, send 1:6"),
  ]),
  "messages go in the order of their arrival": (Rules(), {"workers": 3}, [
    ("start", "send 0:0, send 1:1, send 2:2"),
    (
      [(2, 0), (0, 0), (1, 0)],
      "receive 2:2, receive 0:0, receive 1:1, send 0:3, send 1:4, send 2:5",
    ),
  ]),
  "a bound makes the fast wait for the slowest": (Rules(bound=1), {}, [
    ("start", "send 0:0, send 1:1"),
    ((0, 0), "receive 0:0, send 0:2"),  # one ahead
    ((0, 1), "receive 0:2"),  # two would be too many
    ((1, 0), "receive 1:1, send 0:3, send 1:4"),
  ]),
  "bound 0 is bulk synchronous": (Rules(bound=0), {}, [
    ("start", "send 0:0, send 1:1"),
    ((1, 0), "receive 1:1"),
    ((0, 0), "receive 0:0, send 0:2, send 1:3"),
  ]),
  "a cache is read while the bound allows it": (
    Rules(bound=1, cache=True), {}, [
      ("start", "send 0:0, send 1:1"),  # what all have had by clock 0
      ((0, 0), "receive 0:0, keep 0:2"),  # 0's clock is 1
      ((0, 1), "receive 0:2"),  # 0's clock is 2, 1's is 0
      ((1, 0), "receive 1:1, send 0:3, keep 1:4"),  # 2, 1
      ((0, 2), "receive 0:3"),  # 3, 1
      ((1, 1), "receive 1:4, send 0:5, send 1:6"),  # 3, 2
      ((1, 2), "receive 1:6, keep 1:7"),  # 3, 3
      # 4, 3: worker 0's copy is of clock 2, two behind.
      ((0, 3), "receive 0:5, send 0:8"),
    ],
  ),
  "depth counts in the age of a cache": (
    Rules(bound=1, cache=True, depth=2), {}, [
      ("start", "send 0:0, send 1:1, keep 0:2, keep 1:3"),
      ((0, 0), "receive 0:0"),
      # What 0 starts now is for its clock 2, and its copy is of clock 0.
      ((1, 0), "receive 1:1, send 0:4, send 1:5"),
    ],
  ),
  "a warm start is one worker alone": (
    Rules(warm_start=2, bound=0, depth=2), {"workers": 3}, [
      ("start", "send 0:0"),
      ((0, 0), "receive 0:0, send 0:1"),
      # All clocks are 2 now, so that no bound holds worker 0.
      ((0, 1), "receive 0:1, send 0:2, send 1:3, send 2:4"),
    ],
  ),
  "stages begin with few workers, and newcomers at the slowest clock": (
    Rules(stages=((1, 2), (2, 4)), bound=1), {"workers": 3}, [
      ("start", "send 0:0"),
      ((0, 0), "receive 0:0, send 0:1"),
      # Clocks are 2, and 2 of worker 1, which joins the second stage.
      ((0, 1), "receive 0:1, send 0:2, send 1:3"),
      ((0, 2), "receive 0:2, send 0:4"),
      ((1, 0), "receive 1:3, send 1:5, send 2:6"),
    ],
  ),
  "a stage goes on with another worker": (
    Rules(stages=((1, 2),)), {}, [
      ("start", "send 0:0"),
      ("leave 0", "lost 0:0, leave 0:0, send 1:0"),
      ("join 0", "join 0:1, send 0:1"),  # the first by index
      ((1, 0), "receive 1:0"),
      ((0, 1), "receive 0:1, send 0:2, send 1:3"),
    ],
  ),
  "depth 2 hands out the next ticket early": (Rules(depth=2), {}, [
    ("start", "send 0:0, send 1:1, send 0:2, send 1:3"),
    ((0, 0), "receive 0:0, send 0:4"),
    ((1, 0), "receive 1:1, send 1:5"),
  ]),
  "depth counts in the bound": (Rules(depth=2, bound=1), {}, [
    ("start", "send 0:0, send 1:1, send 0:2, send 1:3"),
    ((0, 0), "receive 0:0"),  # its next would be its clock 2
    ((1, 0), "receive 1:1, send 0:4, send 1:5"),
  ]),
  "depth 2 with bound 0": (Rules(depth=2, bound=0), {}, [
    ("start", "send 0:0, send 1:1"),
  ]),
  "messages of a worker go in the order of its jobs": (
    Rules(depth=2), {"workers": 1, "jobs": 2}, [
      ("start", "send 0:0, send 0:1"),
      ((0, 1), ""),  # the first comes later: its frame was lost
      ((0, 0), "receive 0:0, receive 0:1"),
    ],
  ),
  "a worker holds no more tickets": (Rules(depth=2), {"workers": 1}, [
    ("start", "send 0:0, send 0:1"),
    ((0, 1), ""),  # the first is on its way
    ((0, 0), "receive 0:0, receive 0:1, send 0:2, send 0:3"),
  ]),
  "a round starts backups and receives the first together": (
    Rules(round=2, backup=1), {"workers": 4}, [
      ("start", "send 0:0, send 1:1, send 2:2"),  # 3 is not needed
      ((2, 0), ""),
      # In the order of the jobs; 1 is still at its first job.
      ((0, 0), "receive 0:0, receive 2:2, send 0:3, send 2:4, send 3:5"),
      ((1, 0), "receive 1:1"),  # too late for its round
      ((3, 0), ""),
      ((2, 1), "receive 2:4, receive 3:5, send 1:6, send 2:7, send 3:8"),
    ],
  ),
  "one worker makes a whole round": (Rules(round=3), {"workers": 1}, [
    ("start", "send 0:0"),
    ((0, 0), "send 0:1"),
    ((0, 1), "send 0:2"),
    ((0, 2), "receive 0:0, receive 0:1, receive 0:2, send 0:3"),
  ]),
  "the last round may be smaller": (Rules(round=2), {"jobs": 3}, [
    ("start", "send 0:0, send 1:1"),
    ((0, 0), ""),
    ((1, 0), "receive 0:0, receive 1:1, send 0:2"),
    ((0, 1), "receive 0:2"),
  ]),
  "the last round waits for jobs that may still come": (
    Rules(round=2), {"workers": 3, "jobs": 4}, [
      ("start", "send 0:0, send 1:1"),
      ((0, 0), ""),
      ((1, 0), "receive 0:0, receive 1:1, send 0:2, send 1:3"),
      ((0, 1), ""),
      ("leave 1", "lost 1:3, leave 1:0, send 0:3"),
      ((0, 2), "receive 0:2, receive 0:3"),
    ],
  ),
  "a cache belongs to the holder": (
    Rules(bound=3, cache=True), {"workers": 1}, [
      ("start", "send 0:0"),
      ((0, 0), "receive 0:0, keep 0:1"),
      ("leave 0", "lost 0:1, leave 0:0"),
      ("join 0", "join 0:1, send 0:1"),
    ],
  ),
  "lost jobs are given out first, the oldest before others": (
    Rules(), {"workers": 4}, [
      ("start", "send 0:0, send 1:1, send 2:2, send 3:3"),
      ("leave 2", "lost 2:2, leave 2:0"),
      ("leave 0", "lost 0:0, leave 0:0"),
      ((3, 0), "receive 3:3, send 3:0"),
      ((1, 0), "receive 1:1, send 1:2"),
      ((1, 1), "receive 1:2, send 1:4"),
    ],
  ),
  "an owned job waits for the next holder": (
    Rules(), {"owned": True, "jobs": 4}, [
      ("start", "send 0:0, send 1:1"),
      ("leave 0", "lost 0:0, leave 0:0"),
      ((1, 0), "receive 1:1, send 1:2"),
      ((1, 1), "receive 1:2, send 1:3"),
      ((1, 2), "receive 1:3"),
      ("join 0", "join 0:1, send 0:0"),
      ((0, 1), "receive 0:0"),
    ],
  ),
  "a death in a round is made up for": (Rules(round=2), {}, [
    ("start", "send 0:0, send 1:1"),
    ((1, 0), ""),
    ("leave 0", "lost 0:0, leave 0:0, send 1:0"),
    # In the order of its worker's jobs, the later job first.
    ((1, 1), "receive 1:1, receive 1:0, send 1:2"),
  ]),
  "a round needs no more for the death of a late one": (
    Rules(round=1, backup=1), {"workers": 4}, [
      ("start", "send 0:0, send 1:1"),
      ((0, 0), "receive 0:0, send 0:2, send 2:3"),
      ("leave 1", "lost 1:1, leave 1:0"),  # both jobs of it are under way
      ((2, 0), "receive 2:3, send 2:1, send 3:4"),
    ],
  ),
  "a warm start goes on with another worker": (
    Rules(warm_start=2, bound=3, cache=True), {}, [
      ("start", "send 0:0"),
      ("leave 0", "lost 0:0, leave 0:0, send 1:0"),
      ("join 0", "join 0:1"),  # worker 1 is at it, and nobody else before
      ((1, 0), "receive 1:0, send 0:1"),
      ((0, 1), "receive 0:1, send 0:2, send 1:3"),
    ],
  ),
  "what all came before anybody looked is cut by job": (
    Rules(round=2, backup=1), {"workers": 3}, [
      ("start", "send 0:0, send 1:1, send 2:2"),
      (
        [(2, 0), (1, 0), (0, 0)],
        "receive 0:0, receive 1:1, receive 2:2, send 0:3, send 1:4, send 2:5",
      ),
    ],
  ),
  "a message arrives once": (Rules(), {"workers": 1}, [
    ("start", "send 0:0"),
    ([(0, 0), "doubled on the way", (0, 0)], "receive 0:0, send 0:1"),
    (["its answer was lost", (0, 0)], ""),
  ]),
  "a message of nobody does not arrive": (Rules(), {"workers": 1}, [
    ("start", "send 0:0"),
    (["not started yet", (0, 1)], ""),
    (["no such place", (7, 0)], ""),
  ]),
  "a refused message costs its sender the place": (
    Rules(depth=2), {"workers": 1}, [
      ("start", "send 0:0, send 0:1"),
      ("reject 0 1", "reject 0:1, lost 0:0, leave 0:0"),
    ],
  ),
  "jobs of the dead are lost in their order": (Rules(depth=3), {"workers": 1}, [
    ("start", "send 0:0, send 0:1, send 0:2"),
    ("leave 0", "lost 0:0, lost 0:1, lost 0:2, leave 0:0"),
  ]),
  "leaving twice is leaving once": (Rules(), {"workers": 1}, [
    ("leave 0", "leave 0:0"),
    ("leave 0", ""),
    ("leave 5", ""),
  ]),
  "who has nothing left to do holds nobody back": (
    Rules(bound=0), {"owned": True, "jobs": 2, "workers": 1}, [
      ("start", "send 0:0"),
      ((0, 0), "receive 0:0, send 0:1"),
      ("leave 0", "lost 0:1, leave 0:0"),
      ("join 1", "join 1:0"),  # its clock is 0; the job left is not its own
      ("join 0", "join 0:1, send 0:1"),  # its clock is 1
      ((0, 2), "receive 0:1"),
    ],
  ),
  "nothing new for a worker about to leave": (Rules(), {}, [
    ("start", "send 0:0, send 1:1"),
    ("pause 0", ""),
    ((0, 0), "receive 0:0"),
    ("leave 0", "leave 0:0"),
    ("join 0", "join 0:1, send 0:2"),  # its successor is as any other
  ]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_protocol_by_hand(name):
  rules, options, events = BY_HAND[name]
  run = Run(rules, **{"workers": 2, **options})
  for event, rows in events:
    if not isinstance(event, str):
      run.arrive(*([event] if isinstance(event, tuple) else event))
    else:
      action, *numbers = event.split(" ")
      now = () if action == "pause" else (0.0,)
      if numbers:
        getattr(run.it, action)(*map(int, numbers), *now)
    assert ", ".join(run.go()) == rows
  assert run.it.finished == ("jobs" in options)
  actions = [row.action for row in run.rows]
  assert run.it.received == actions.count(base.RECEIVE)
  assert run.it.lost == sum(map(actions.count, DEATHS))


def test_the_slowest_is_one_of_those_that_are_there():
  run = Run(Rules(bound=1), workers=2)
  run.go()
  run.end(0, 0)
  assert run.end(0, 1) == ["receive 0:2"]  # waits for worker 1
  assert run.it.leave(1, 0.0) == [0]
  assert run.new() == ["lost 1:1", "leave 1:0"]
  assert run.go() == ["send 0:1"]
  # A new one starts where the slowest is, or nobody could go on.
  assert run.it.join(1, 0.0) == 1
  assert run.new() == ["join 1:1"]
  assert run.it.slowest() == 2
  assert run.go() == ["send 1:3"]


def test_a_ticket_is_kept_for_so_many_jobs():
  run = Run(Rules(fetch_every=3), workers=1)
  assert run.go() == ["send 0:0"]
  assert run.end(0, 0) == ["receive 0:0", "keep 0:1"]
  assert run.end(0, 1) == ["receive 0:1", "keep 0:2"]
  assert run.end(0, 2) == ["receive 0:2", "send 0:3"]
  assert run.it.grants(0.0) == []
  run.it.arrive(0, 3)
  run.it.deliver(0.0)
  assert run.it.grants(0.0) == [Grant(worker=0, seq=4, job=4, keep=True)]


def test_a_stage_is_restored_with_its_workers():
  run = Run(Rules(stages=[[1, 1], [2, 9]], bound=3), workers=3)
  run.go()
  run.end(0, 0)
  again = Dispatcher(run.it.rules).replay(run.rows)
  assert again.rules.stages == ((1, 1), (2, 9))
  assert again.workers == run.it.workers == [0, 1, 2]
  for it in (again, run.it):
    assert it.slowest() == 1
    assert [grant.worker for grant in it.grants(0.0)] == []
    assert it.arrive(1, 0)
    it.deliver(0.0)
    assert [grant.worker for grant in it.grants(0.0)] == [1]


def test_a_warm_start_is_restored_with_its_clocks():
  run = Run(Rules(warm_start=2, bound=3, cache=True), workers=2)
  run.go()
  run.end(0, 0)
  run.end(0, 1)
  again = Dispatcher(run.it.rules).replay(run.rows)
  assert [again.slowest(), again.received] == [run.it.slowest(), 2] == [2, 2]


@quick
@given(
  st.integers(1, 4),
  st.integers(0, 2),
  st.lists(st.integers(0, 100), min_size=20, max_size=20),
)
def test_rounds_do_not_depend_on_the_order_of_arrival(n, backup, choices):
  """Whoever is first: a round is received in the order of its jobs, when it is
  complete, and what is too late for its round at once."""
  run = Run(Rules(round=n, backup=backup), workers=n + backup)
  started = {}  # (worker, seq) -> (job, round)
  number, came = 0, []
  for choice in choices:
    for grant in run.it.grants(0.0):
      started[grant.worker, grant.seq] = grant.job, number
    key = sorted(started)[choice % len(started)]
    job, its_round = started.pop(key)
    assert run.it.arrive(*key)
    delivered = [job for _, _, job in run.it.deliver(0.0)]
    if its_round < number:
      assert delivered == [job]
      continue
    came.append(job)
    assert delivered == (sorted(came) if len(came) == n else [])
    if delivered:
      number, came = number + 1, []
  assert run.it.received >= len(choices) - n


# Once, and only once.


def test_a_message_of_the_dead_does_not_arrive():
  run = Run(Rules(depth=2), workers=2)
  run.go()
  assert run.it.arrive(0, 1)
  assert run.it.leave(0, 0.0) == [0, 1]
  assert not run.it.arrive(0, 0)
  assert not run.it.arrive(0, 1)
  run.new()
  assert run.it.deliver(0.0) == []  # nor what had arrived and not been received
  run.it.join(0, 0.0)
  run.go()
  # Seqs go on where the place left off, so old names mean nothing.
  assert list(run.it.open(0)) == [2, 3]
  assert not run.it.arrive(0, 1)


# Deaths.


def test_a_place_has_one_holder():
  run = Run(Rules())
  assert run.it.join(3, 0.0) == 0
  with pytest.raises(ValueError, match="worker 3 is registered already"):
    run.it.join(3, 0.0)
  run.it.leave(3, 0.0)
  assert run.it.join(3, 0.0) == 1
  assert run.new() == ["join 3:0", "leave 3:0", "join 3:1"]


def test_time_does_not_go_back():
  run = Run(Rules(), workers=2)
  run.it.grants(5.0)
  run.it.arrive(0, 0)
  run.it.deliver(3.0)
  assert [time for time, *_ in run.rows] == [0.0, 0.0, 5.0, 5.0, 5.0]


def test_a_decision_is_logged_before_it_is_taken():
  seen = []

  def log(row):
    seen.append((base.ACTIONS[row.action], it.rows, it.received, it.workers))

  it = Dispatcher(Rules(), log=log)
  it.join(0, 0.0)
  it.grants(0.0)
  it.arrive(0, 0)
  it.deliver(0.0)
  assert seen == [
    ("join", 0, 0, []),
    ("send", 1, 0, [0]),
    ("receive", 2, 0, [0]),
  ]
  assert it.received == 1


# Whatever happens.


@st.composite
def any_rules(draw):
  if draw(st.booleans()):
    return Rules(round=draw(st.integers(1, 4)), backup=draw(st.integers(0, 2)))
  bound = draw(st.sampled_from([0, 1, 2, 3.5, math.inf]))
  cache = bound < math.inf and draw(st.booleans())
  return Rules(
    bound=bound,
    cache=cache,
    depth=draw(st.integers(1, 3)),
    fetch_every=1 if cache else draw(st.integers(1, 3)),
  )


HAPPENINGS = st.lists(
  st.tuples(
    st.sampled_from(["arrive"] * 4 + ["join", "join", "leave", "reject"]),
    st.integers(0, 100),
  ),
  max_size=40,
)


class Chaos:
  """Makes things happen to a dispatcher and checks it after each of them."""

  def __init__(self, rules, jobs, owned):
    self.rules, self.jobs, self.owned = rules, jobs, owned
    self.rows = []
    self.it = Dispatcher(rules, jobs=jobs, owned=owned, log=self.rows.append)
    self.arrived = []  # (worker, seq), not delivered
    self.now = 0.0

  def working(self):
    """The tickets that workers have and did not answer, (worker, seq)."""
    return [
      (worker, seq)
      for worker in self.it.workers
      for seq in self.it.open(worker)
      if (worker, seq) not in self.arrived
    ]

  def happen(self, kind, number):
    if kind == "join":
      absent = sorted(set(range(4)) - set(self.it.workers))
      if absent:
        self.it.join(absent[number % len(absent)], self.now)
      return
    if kind == "leave":
      if self.it.workers:
        worker = self.it.workers[number % len(self.it.workers)]
        self.it.leave(worker, self.now)
        self.arrived = [key for key in self.arrived if key[0] != worker]
      return
    working = self.working()
    if not working:
      return
    worker, seq = working[number % len(working)]
    if kind == "arrive":
      assert self.it.arrive(worker, seq)
      self.arrived.append((worker, seq))
    else:
      self.it.reject(worker, seq, self.now)
      self.arrived = [key for key in self.arrived if key[0] != worker]

  def decide(self):
    """Lets it act; one that knows only the rows would act the same."""
    self.now += 1.0
    rows = []
    again = Dispatcher(
      self.rules, jobs=self.jobs, owned=self.owned, log=rows.append
    ).replay(list(self.rows))
    for key in self.arrived:
      assert again.arrive(*key)
    before = len(self.rows)
    delivered = self.it.deliver(self.now)
    grants = self.it.grants(self.now)
    assert again.deliver(self.now) == delivered
    assert again.grants(self.now) == grants
    assert rows == self.rows[before:]
    assert (again.received, again.lost) == (self.it.received, self.it.lost)
    assert [(w, job) for w, _, job in delivered] == [
      (w, job) for _, w, _, job, action, *_ in rows if action == base.RECEIVE
    ]
    self.arrived = [
      key
      for key in self.arrived
      if key not in {(worker, seq) for worker, seq, _ in delivered}
    ]
    # Somebody is at work, or there is nobody, or nothing left to do. An owned
    # job may have to wait for its owner.
    if self.it.workers and not self.it.finished and not self.owned:
      assert self.working()

  def finish(self):
    for worker in range(4 if self.owned else 1):
      if worker not in self.it.workers:
        self.it.join(worker, self.now)
    self.decide()
    while not self.it.finished:
      assert self.working()
      self.happen("arrive", 0)
      self.decide()


def check_rows(rows, rules, jobs, owned):
  """That rows obey their rules, by a model that shares no code."""
  trace = from_events(rows)
  orders.check(trace, depth=jobs)
  received = trace.job[trace.action == base.RECEIVE]
  assert sorted(received.tolist()) == list(range(jobs))

  clock, open_jobs, holders = {}, {}, {}
  lost = {}  # owner or None -> jobs to be given out again
  fresh = 0
  for _, worker, _, job, action, *_ in rows:
    if action == base.JOIN:
      assert job == holders.get(worker, 0)
      holders[worker] = job + 1
      slowest = min((clock[w] for w in open_jobs), default=0)
      clock[worker] = max(clock.get(worker, 0), slowest)
      open_jobs[worker] = []
    elif action == base.LEAVE:
      assert job == holders[worker] - 1
      assert open_jobs.pop(worker) == []
    elif action in STARTS:
      if not rules.round:
        ahead = clock[worker] + len(open_jobs[worker])
        assert ahead - min(clock[w] for w in open_jobs) <= rules.bound
      again = lost.get(worker if owned else None, [])
      assert job == (min(again) if again else fresh)
      if again:
        again.remove(job)
      else:
        fresh += 1
      open_jobs[worker].append(job)
    else:
      open_jobs[worker].remove(job)
      if action == base.RECEIVE:
        clock[worker] += 1
      else:
        lost.setdefault(worker if owned else None, []).append(job)


@quick
@given(any_rules(), st.integers(1, 25), st.booleans(), HAPPENINGS)
def test_every_job_is_received_once_whatever_happens(
  rules, jobs, owned, happenings
):
  chaos = Chaos(rules, jobs, owned)
  for kind, number in [("join", 0), ("join", 0), *happenings]:
    if chaos.it.finished:
      break
    chaos.happen(kind, number)
    chaos.decide()
  chaos.finish()
  check_rows(chaos.rows, rules, jobs, owned)


@quick
@given(any_rules(), HAPPENINGS)
def test_what_happens_between_two_decisions_may_be_much(rules, happenings):
  """Frames that came together are acted on together."""
  chaos = Chaos(rules, 12, owned=False)
  chaos.happen("join", 0)
  chaos.decide()
  for index, (kind, number) in enumerate(happenings):
    if chaos.it.finished:
      break
    chaos.happen(kind, number)
    if index % 5 == 4:
      chaos.decide()
  chaos.finish()
  check_rows(chaos.rows, rules, 12, owned=False)


# Rules that cannot be obeyed.


@pytest.mark.parametrize(
  ("rules", "why"),
  [
    (Rules(bound=-1), "bound must be a number, 0 or more, not -1"),
    (Rules(bound=math.nan), "bound must be a number, 0 or more, not nan"),
    (Rules(bound=None), "bound must be a number, 0 or more, not None"),
    (Rules(bound="1"), "bound must be a number, 0 or more, not '1'"),
    (Rules(bound=True), "bound must be a number, 0 or more, not True"),
    (Rules(round=-1), "round must be a whole number, 0 or more, not -1"),
    (Rules(round=2.0), "round must be a whole number, 0 or more, not 2.0"),
    (Rules(round=2, backup=-1), "backup must be a whole number, 0 or more"),
    (Rules(bound=[1]), "bound must be a number, 0 or more, not [1]"),
    (Rules(depth=0), "depth must be a positive whole number, not 0"),
    (Rules(depth=True), "depth must be a positive whole number, not True"),
    (Rules(depth=1001), "depth must be at most 1000, not 1001"),
    (Rules(bound=1, cache=1), "cache must be True or False, not 1"),
    (Rules(bound=1, cache="no"), "cache must be True or False, not 'no'"),
    (Rules(fetch_every=0), "fetch_every must be a positive whole number"),
    (Rules(warm_start=-1), "warm_start must be a whole number, 0 or more"),
    (Rules(round=2, warm_start=3), "warm_start 3 is for workers that do not"),
    (Rules(stages=((1, 2), (1, 3))), "stages must have more workers and mess"),
    (Rules(stages=((2, 3), (3, 3))), "stages must have more workers and mess"),
    (Rules(stages=(1, 2)), "stages must be pairs (workers, messages), as ((1"),
    (Rules(stages=((0, 2),)), "a number of stages must be a positive whole"),
    (Rules(stages=((1, 2),), round=2), "stages are for workers that do not"),
    (Rules(stages=((1, 2),), warm_start=1), "stages are for workers that do"),
    (Rules(backup=1), "backup workers need rounds"),
    (Rules(cache=True), "a cache needs a finite bound"),
    (Rules(round=2, depth=2), "a synchronous round sends every worker"),
    (Rules(round=2, fetch_every=2), "a synchronous round sends every worker"),
    (Rules(round=2, bound=1, cache=True), "a synchronous round sends every"),
  ],
)
def test_rules_that_cannot_be_obeyed_are_refused(rules, why):
  for refuse in (protocol.check_rules, Dispatcher):
    with pytest.raises(ValueError) as error:
      refuse(rules)
    assert str(error.value).startswith(why)


def test_rules_that_can_be_obeyed_are_returned():
  for rules in (Rules(), Rules(bound=1, cache=True), Rules(round=3, backup=2)):
    assert protocol.check_rules(rules) is rules
