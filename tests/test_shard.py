"""A shard, fed with frames by hand: what it says, and that it comes back."""

import collections
import functools
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgd import (
  algorithms,
  base,
  orders,
  problems,
  sharding,
  simulator,
  transforms,
)
from asgd import server as server_lib
from asgd import worker as worker_lib
from asgd.dispatch import Rules
from asgd.runtimes import protocol
from asgd.runtimes import shard as shard_lib
from asgd.runtimes.deadlines import Ladder
from asgd.runtimes.memory import MESSAGES, PARAMS, Damaged, LocalMemory
from asgd.runtimes.protocol import Frame
from asgd.runtimes.shard import Setup, Shard
from asgd.runtimes.threads import ListJournal, ListSink
from asgd.simulator import host

quick = settings(deadline=None, derandomize=True, max_examples=60)

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
PARAMS_AT_FIRST = np.ones(5, np.float32)
ROOT = jax.random.key(0)
BATCH = PROBLEM.batches(0, 3)
WORKERS = 3


@functools.cache
def kit(name, every=1, drop_late=False, clip=None):
  """What a run needs of an algorithm; compiled once for all tests."""
  recipe = algorithms.build(name, 0.02, WORKERS)._replace(every=every)
  if clip:
    algorithm = transforms.precede(
      recipe.algorithm, sharding.clip_by_global_norm(clip)
    )
    recipe = recipe._replace(algorithm=algorithm)
  gate = server_lib.max_staleness(0) if drop_late else server_lib.accept_all
  server = recipe.server(gate=gate)
  worker = worker_lib.gradient_worker(PROBLEM.loss, recipe.message)
  steps = simulator.compile_steps(server, worker)
  return server, worker, steps, simulator.make_host(server, worker)


@pytest.fixture(autouse=True, scope="module")
def compile_once():
  """Replays by hundreds, of a few servers."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(host, "compile_steps", functools.cache(host.compile_steps))
    yield


class Killed(Exception):
  """Ends a shard as kill -9 would."""


class Memory(LocalMemory):
  """Memory whose snapshots could be written to disk, and whose slots can be
  guarded: what is written there must be what lies there."""

  guarded = ()  # slots of parameters
  damaged = False  # the snapshot

  def load(self, like):
    if self.damaged:
      raise Damaged("snapshot.json is damaged")
    return super().load(like)

  def save(self, tree, meta):
    super().save(tree, json.loads(json.dumps(meta)))

  def write(self, kind, slot, tree):
    if kind == PARAMS and slot in self.guarded:
      assert bits(tree) == bits(self.read(kind, slot))
    super().write(kind, slot, tree)


class Journal(ListJournal):
  """A journal that can kill its shard, at an entry or just before it."""

  def __init__(self):
    super().__init__()
    self.kill_at = None  # entries
    self.too_early = False  # it was obeyed and is not in the journal
    self.watch = lambda count: None  # called after each entry
    self.known = set()  # (worker, seq, action)

  def append(self, entry):
    last = len(self.entries()) + 1 == self.kill_at
    if last:
      self.kill_at = None
    if last and self.too_early:
      raise Killed
    super().append(entry)
    self.known.add((entry.worker, entry.seq, entry.action))
    self.watch(len(self.entries()))
    if last:
      raise Killed


class Bench:
  """Shards and hand-worked workers; every frame goes where it is told to, one
  at a time, and `now` is set by hand."""

  def __init__(self, setup, name="asgd", **kit_options):
    self.setup, self.now = setup, 0.0
    self.server, self.worker, self.steps, self.host = kit(name, **kit_options)
    count = range(setup.shards)
    self.plan = None
    self.parts = [PARAMS_AT_FIRST]
    if setup.shards > 1:
      self.plan = sharding.plan(PARAMS_AT_FIRST, setup.shards)
      self.parts = sharding.split(self.plan, PARAMS_AT_FIRST)
    self.memories = [Memory(shard_lib.sizes(setup)) for _ in count]
    self.journals = [Journal() for _ in count]
    self.sinks = [ListSink() for _ in count]
    self.post = collections.deque()  # calls to be made
    self.shards: list[Shard | None] = [None for _ in count]
    self.hands = {}  # by worker
    for index in count:
      self.start_shard(index)

  @property
  def lead(self):
    return self.shards[0]

  def start_shard(self, index, **kwargs):
    state = simulator.start(self.server, self.parts[index])
    self.shards[index] = Shard(
      *(index, self.setup, self.steps, state, self.memories[index]),
      *(self.journals[index], self.sinks[index]),
      **dict(now=self.now, **kwargs),
    )
    if self.setup.consistent:
      for follower in range(1, self.setup.shards):
        if index in (0, follower) and self.shards[follower] and self.lead:
          self.follow(follower)

  def follow(self, index):
    lead, follower = self.lead, self.shards[index]

    def to_lead(frame):
      self.post.append(lambda: self.tell(lead, frame, to_follower))

    def to_follower(frame):
      # What a follower hears is in the lead's journal.
      assert frame.version < len(self.journals[0].entries())
      self.post.append(lambda: self.tell(follower, frame, to_lead))

    follower.follow(to_lead)

  def tell(self, shard, frame, way):
    self.call(shard, lambda: shard.handle(frame, way, self.now))

  def call(self, shard, what):
    if shard is None or shard not in self.shards:
      return  # it has died
    try:
      what()
    except Killed:
      self.shards[shard.index] = None

  def settle(self):
    """Delivers what is on its way, and what follows from it."""
    while self.post:
      self.post.popleft()()

  def tick(self, now):
    self.now = now
    for shard in self.shards:
      self.call(shard, lambda shard=shard: shard.tick(now))
    self.settle()

  def mend(self):
    """Puts other shards in the place of the dead; all connect anew."""
    dead = [i for i, shard in enumerate(self.shards) if shard is None]
    for index in dead:
      self.start_shard(index)
    for index in dead:
      for hand in self.hands.values():
        hand.reconnect(index)
    self.settle()

  def join(self, *workers):
    """Somebody new takes each place."""
    for worker in workers or range(self.setup.workers):
      self.hands[worker] = Hand(self, worker)
      self.hands[worker].hello()
    hands = [self.hands[worker] for worker in workers or self.hands]
    return hands if len(hands) > 1 else hands[0]

  def finish(self):
    """Does all that is left to do."""
    for _ in range(20 * self.setup.jobs):
      self.mend()
      if self.lead.stopped and not any(shard.busy for shard in self.shards):
        return
      for worker in range(self.setup.workers):
        hand = self.hands.get(worker)
        if hand is None or hand.out:
          self.join(worker)
          hand = self.hands[worker]
        hand.again()
        while hand.ready() and not hand.out:
          hand.push()
    raise AssertionError("it does not come to an end")

  def trace(self, index=0):
    return shard_lib.entries_to_trace(self.journals[index].entries())

  def rows(self, index=0, start=0):
    """The journal as "action worker:job"."""
    return [
      f"{base.ACTIONS[entry.action]} {entry.worker}:{entry.job}"
      for entry in self.journals[index].entries()[start:]
    ]

  def replay(self):
    """Returns what the engine makes of the traces: states, records."""
    common = dict(batch=BATCH, root=ROOT)
    traces = [self.trace(index) for index in range(self.setup.shards)]
    for trace in traces:
      orders.check(trace, depth=99)
    if self.plan is None:
      simulation, records = self.host.run(
        self.host.init(PARAMS_AT_FIRST, WORKERS),
        *(traces[0], len(traces[0].time)),
        **common,
      )
      return [simulation.server], [records]
    seqs = [
      np.array([entry.seq for entry in journal.entries()])
      for journal in self.journals
    ]
    totals = [
      [entry.totals for entry in journal.entries()] for journal in self.journals
    ]
    return simulator.run_sharded(
      *(self.server, self.worker, PARAMS_AT_FIRST, traces, seqs),
      totals=totals if self.setup.totals else None,
      **dict(workers=WORKERS, **common),
    )

  def check_replay(self, *, some=False):
    """The traces, replayed, lead to the same bits. Some of the records may have
    been lost with a shard that had no log."""
    states, records = self.replay()
    for shard, sink, state, expected in zip(
      self.shards, self.sinks, states, records, strict=True
    ):
      assert bits(shard.state) == bits(state)
      shard.flush()
      held = sink.records()
      if some:
        kept = np.isin(expected.job, held.job)
        expected = base.Records(*(column[kept] for column in expected))
      for column, other in zip(held, expected, strict=True):
        np.testing.assert_array_equal(column, other)

  def check_once(self, index=0):
    """Each job was received, once."""
    trace = self.trace(index)
    jobs = trace.job[trace.action == base.RECEIVE]
    assert sorted(jobs.tolist()) == list(range(self.setup.jobs))


class Hand:
  """A worker that does what it is told to, and no more."""

  def __init__(self, bench, worker):
    self.bench, self.worker = bench, worker
    self.ways = [self._way(shard) for shard in range(bench.setup.shards)]
    self.heard = []  # (shard, Frame)
    self.out = True  # has no place
    self._reset()

  def _reset(self):
    self.holder = -1
    self.tickets = {}  # seq -> {shard: Frame}
    self.unacked = [{} for _ in self.ways]  # seq -> Frame

  def _way(self, shard):
    journal = self.bench.journals[shard]

    def way(frame):
      # What a worker hears is in the journal.
      allowed = {
        protocol.TICKET: (base.SEND, base.KEEP),
        protocol.ACK: (base.RECEIVE, base.LOST, base.REJECT),
      }.get(frame.kind, ())
      keys = {(frame.worker, frame.seq, action) for action in allowed}
      assert keys & journal.known or not keys
      self.bench.post.append(lambda: self._hear(shard, frame, way))

    return way

  def _hear(self, shard, frame, way):
    if way is not self.ways[shard]:
      return  # of a connection that broke
    self.heard.append((shard, frame))
    if frame.kind == protocol.WELCOME and shard == 0:
      if frame.job != self.holder:
        self._reset()
        self.holder, self.out = frame.job, False
        for other in range(1, len(self.ways)):
          self.tell(other, Frame(protocol.HELLO, self.worker, job=frame.job))
    elif frame.kind == protocol.TICKET:
      if not any(frame.seq in frames for frames in self.unacked):
        parts = self.tickets.setdefault(frame.seq, {})
        parts[shard] = frame
        if shard == 0:
          self.fetch(frame.seq)
    elif frame.kind == protocol.ACK:
      self.unacked[shard].pop(frame.seq, None)
    elif frame.kind == protocol.EXPEL:
      self._reset()
      self.out = True

  def listen(self):
    """What was heard since the last time, as text."""
    self.bench.settle()
    heard, self.heard = self.heard, []
    return [self._text(frame) for _, frame in heard]

  @staticmethod
  def _text(frame):
    name = protocol.KINDS[frame.kind]
    if frame.kind == protocol.TICKET:
      kept = " kept" if frame.flag else ""
      return f"ticket {frame.seq}: job {frame.job}{kept} v{frame.version}"
    if frame.kind == protocol.ACK:
      return f"ack {frame.seq}"
    if frame.kind == protocol.WELCOME:
      return f"welcome {frame.job}"
    return f"{name} {frame.flag}" if frame.flag else name

  def tell(self, shard, frame):
    bench = self.bench
    bench.tell(bench.shards[shard], frame, self.ways[shard])

  def say(self, kind, **fields):
    """Says something to the lead."""
    self.tell(0, Frame(kind, self.worker, **fields))
    self.bench.settle()

  def hello(self, holder=-1):
    self.say(protocol.HELLO, job=holder)

  def fetch(self, seq):
    setup, parts = self.bench.setup, self.tickets[seq]
    for shard in range(1, setup.shards):
      if not setup.consistent and shard not in parts:
        frame = Frame(protocol.FETCH, self.worker, seq, parts[0].job)
        self.tell(shard, frame._replace(flag=parts[0].flag))

  def reconnect(self, shard):
    """Opens a new connection and says again what was not answered."""
    self.ways[shard] = self._way(shard)
    if not self.out:
      self._repeat(shard)

  def again(self):
    """Says again, on the same connections, what was not answered."""
    for shard in range(len(self.ways)):
      if not self.out:
        self._repeat(shard)
    self.bench.settle()

  def _repeat(self, shard):
    self.tell(shard, Frame(protocol.HELLO, self.worker, job=self.holder))
    if shard:
      for seq, parts in list(self.tickets.items()):
        if 0 in parts:
          self.fetch(seq)
    for frame in list(self.unacked[shard].values()):
      self.tell(shard, frame)

  def bye(self):
    """Leaves."""
    for shard in range(len(self.ways)):
      self.tell(shard, Frame(protocol.BYE, self.worker))
    self.out = True
    self.bench.settle()

  def vanish(self):
    """Its connections break."""
    for shard, way in zip(self.bench.shards, self.ways, strict=True):
      if shard and shard.peer(self.worker) is way:
        self.bench.call(
          shard,
          lambda shard=shard: shard.gone(self.worker, self.bench.now),
        )
    self.ways = [None for _ in self.ways]
    self.out = True
    del self.bench.hands[self.worker]
    self.bench.settle()

  def ready(self):
    """The seqs of the jobs it could do."""
    return sorted(
      seq for seq, parts in self.tickets.items() if len(parts) == len(self.ways)
    )

  def work(self, seq):
    """Does a job and puts the message where it belongs; returns its PUSHes."""
    bench, frames = self.bench, self.tickets.pop(seq)
    parts = [
      memory.read(PARAMS, frames[shard].params)
      for shard, memory in enumerate(bench.memories)
    ]
    params = (
      parts[0] if bench.plan is None else sharding.join(bench.plan, parts)
    )
    first = frames[0]
    ticket = base.Ticket(
      *(np.int32(self.worker), np.int32(first.version), params),
      np.bool_(not first.flag),
    )
    _, message, metrics = bench.steps.work(
      *(bench.worker.init(PARAMS_AT_FIRST), ticket),
      *(BATCH(self.worker, first.job), ROOT, np.int32(first.job)),
    )
    message = jax.device_get(message)
    split = [message]
    if bench.plan is not None:
      split = sharding.split(bench.plan, message)
    for shard, memory in enumerate(bench.memories):
      memory.write(MESSAGES, frames[shard].message, split[shard])
    return [
      Frame(
        *(protocol.PUSH, self.worker, seq, first.job),
        **dict(flag=1, message=frame.message, value=float(metrics.loss)),
      )
      for _, frame in sorted(frames.items())
    ]

  def push(self, seq=None, *, finite=True, lost=False, only=None):
    """Does a job, its oldest by default, and hands it in: to the lead last."""
    frames = self.work(self.ready()[0] if seq is None else seq)
    for shard in reversed(range(len(self.ways))):
      frame = frames[shard]._replace(flag=int(finite))
      self.unacked[shard][frame.seq] = frame
      if not (lost and shard == 0) and only in (None, shard):
        self.tell(shard, frame)
    self.bench.settle()
    return frames[0]


def bits(tree):
  """All bits of a tree, and how it is made."""
  leaves, structure = jax.tree.flatten(tree)
  return str(structure), [
    (np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes()) for x in leaves
  ]


def audit(shard):
  """No slot is lost, and none is used twice. Returns the free ones."""
  made = shard_lib.sizes(shard.setup)
  uses = collections.Counter(shard._pinned)
  uses.update(held.params for held in shard._tickets.values())
  uses.update(held.params for held in shard._kept.values())
  if shard._published:
    uses[shard._published[1]] += 1
  assert uses == +shard._params_use
  assert sorted([*shard._free_params, *uses]) == list(range(made.params))
  taken = [held.message for held in shard._tickets.values()]
  for slots in shard._dead_messages.values():
    taken += slots  # those who had them may still write
  assert sorted([*shard._free_messages, *shard._logged, *taken]) == list(
    range(made.messages)
  )
  return sorted(shard._free_params), sorted(shard._free_messages)


def describe(shard):
  """All that a shard must know again after a kill."""
  held = {
    (kind, key): (*held[1:], bits(held.ticket))
    for kind, table in (("open", shard._tickets), ("kept", shard._kept))
    for key, held in table.items()
  }
  return {
    "state": bits(shard.state),
    "tickets": held,
    "seqs": dict(shard._seqs),
    "rows": shard.rows,
    "received": shard.received,
  }


# What is said.


def one(jobs=9, rules=Rules(), **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, **kwargs)


def test_a_conversation():
  bench = Bench(one(jobs=4))
  first, second = bench.join(0, 1)
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0"]
  assert second.listen() == ["welcome 0", "ticket 0: job 1 v0"]
  first.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]
  second.push()
  assert second.listen() == ["ack 0", "ticket 1: job 3 v2"]
  first.push()
  assert first.listen() == ["ack 1"]
  assert not bench.lead.stopped
  second.push()
  assert second.listen() == ["ack 1", "stop"]
  assert first.listen() == ["stop"]
  assert bench.lead.stopped
  assert bench.lead.status() == {
    "received": 4,
    "rows": 10,
    "stopped": True,
    "busy": False,
    "workers": [0, 1],
    "late": [],
    "expelled": [],
    "refused": 0,
    "rollback": None,
    "kept_params": [],
  }
  third = bench.join(2)  # too late
  assert third.listen() == ["welcome 0", "stop"]
  bench.check_once()
  bench.check_replay()


def test_a_place_that_is_not_there():
  bench = Bench(one())
  for worker in (-1, WORKERS):
    hand = Hand(bench, worker)
    hand.hello()
    assert hand.listen() == ["expel"]
  assert bench.rows() == []


def test_a_ticket_that_is_kept_says_so():
  bench = Bench(one(rules=Rules(fetch_every=2)), "dana_zero")
  hand = bench.join(0)
  hand.push()
  hand.push()
  assert hand.listen() == [
    *("welcome 0", "ticket 0: job 0 v0"),
    *("ack 0", "ticket 1: job 1 kept v0"),
    *("ack 1", "ticket 2: job 2 v2"),
  ]
  bench.finish()
  bench.check_replay()


# Exactly once.


def test_a_doubled_message_counts_once():
  bench = Bench(one())
  hand = bench.join(0)
  hand.listen()
  frame = hand.push()
  state = bits(bench.lead.state)
  hand.tell(0, frame)
  hand.tell(0, frame)
  assert hand.listen() == ["ack 0", "ticket 1: job 1 v1", "ack 0", "ack 0"]
  assert bits(bench.lead.state) == state
  assert bench.lead.received == 1


def test_a_message_that_waits_is_not_taken_twice():
  bench = Bench(one(rules=Rules(round=2)), "ssgd", every=2)
  first, second = bench.join(0, 1)
  frame = first.push()
  # Neither received yet, nor lost. What is said first counts.
  first.tell(0, frame)
  first.tell(0, frame._replace(flag=0))
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0"]
  second.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]
  assert bench.lead.received == 2


def test_a_message_of_an_expelled_holder_is_not_taken():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  frames = first.work(0)
  bench.lead.gone(0, 1.0)
  first.listen()
  first.tell(0, frames[0])
  assert first.listen() == ["expel"]
  new = bench.join(0)
  first.tell(0, frames[0])
  assert first.listen() == ["expel 1"]  # another has its place
  assert bench.lead.received == 0
  assert new.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  second.listen()
  bench.finish()
  bench.check_once()


def test_a_message_of_somebody_else_is_not_taken():
  bench = Bench(one())
  first, _ = bench.join(0, 1)
  frame = first.work(0)[0]
  stranger = Hand(bench, 0)
  stranger.tell(0, frame)
  assert stranger.listen() == ["expel 1"]
  assert bench.lead.received == 0


# Coming back, and taking a place.


def test_who_comes_back_gets_its_tickets_again():
  bench = Bench(one(rules=Rules(depth=2)))
  hand = bench.join(0)
  frames = [frame for _, frame in hand.heard if frame.kind == protocol.TICKET]
  assert len(frames) == 2
  hand.heard.clear()
  hand.reconnect(0)
  bench.settle()
  assert [frame for _, frame in hand.heard[1:]] == frames  # the same slots
  assert hand.listen()[0] == "welcome 0"
  assert bench.rows() == ["join 0:0", "send 0:0", "send 0:1"]
  bench.finish()
  bench.check_replay()


def test_a_ticket_whose_message_is_there_is_not_sent_again():
  bench = Bench(one(rules=Rules(round=2)), "ssgd", every=2)
  first, second = bench.join(0, 1)
  first.push()
  first.listen()
  first.reconnect(0)
  assert first.listen() == ["welcome 0"]
  second.push()
  assert first.listen() == ["ack 0", "ticket 1: job 2 v1"]


def test_somebody_new_takes_the_place():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  first.listen()
  new = bench.join(0)
  assert first.listen() == ["expel 1"]
  assert new.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  assert bench.rows(start=4) == [
    "lost 0:0",
    "leave 0:0",
    "join 0:1",
    "send 0:0",
  ]
  assert second.listen() == ["welcome 0", "ticket 0: job 1 v0"]


def test_a_first_hello_said_twice_is_one():
  """A worker that has to wait long for an answer, as its shard compiles, says
  everything again, and is not its own successor."""
  bench = Bench(one())
  hand = Hand(bench, 0)
  hand.tell(0, Frame(protocol.HELLO, 0, job=-1))
  hand.tell(0, Frame(protocol.HELLO, 0, job=-1))
  heard = hand.listen()
  assert "expel 1" not in heard
  assert heard[:2] == ["welcome 0", "ticket 0: job 0 v0"]
  assert bench.rows() == ["join 0:0", "send 0:0"]


def test_a_holder_from_before_is_told_to_go():
  bench = Bench(one())
  first = bench.join(0)
  bench.lead.gone(0, 1.0)
  first.listen()
  first.hello(holder=0)
  assert first.listen() == ["expel"]  # it may join as somebody new
  first.hello()
  assert first.listen() == ["welcome 1", "ticket 1: job 0 v0"]
  other = Hand(bench, 0)
  other.hello(holder=0)
  assert other.listen() == ["expel 1"]  # it may not
  first.push()
  assert first.listen() == ["ack 1", "ticket 2: job 1 v1"]


def test_a_message_that_is_not_finite_costs_the_place():
  bench = Bench(one(rules=Rules(depth=2), jobs=6))
  first, second = bench.join(0, 1)
  first.listen()
  first.push(finite=False)
  assert first.listen() == ["expel"]
  assert bench.lead.refused == 1
  assert bench.lead.workers == [1]
  assert bench.rows(start=6) == ["reject 0:0", "lost 0:1", "leave 0:0"]
  second.push()  # gets the job that was refused
  assert bench.rows(start=9) == ["receive 1:2", "send 1:0"]
  assert bench.lead.refused == 0  # in a row
  first.hello()
  assert first.listen() == [
    *("welcome 1", "ticket 2: job 1 v1", "ticket 3: job 4 v1"),
  ]
  bench.finish()
  bench.check_once()
  bench.check_replay()


def test_who_drains_gets_nothing_new_and_leaves():
  bench = Bench(one())
  first, second = bench.join(0, 1)
  first.say(protocol.DRAIN)
  first.push()
  assert first.listen() == ["welcome 0", "ticket 0: job 0 v0", "ack 0"]
  first.say(protocol.BYE)
  assert bench.lead.workers == [1]
  assert bench.rows(start=4) == ["receive 0:0", "leave 0:0"]
  second.push()
  assert bench.lead.received == 2


def test_what_a_lost_worker_had_is_done_by_others():
  bench = Bench(one(rules=Rules(bound=0)))
  first, second = bench.join(0, 1)
  second.push()
  second.listen()
  first.vanish()
  assert second.listen() == ["ticket 1: job 0 v1"]
  assert bench.rows(start=5) == ["lost 0:0", "leave 0:0", "send 1:0"]


# Deadlines: the clock is the test's.


def test_a_worker_that_hangs_is_late_and_then_dead():
  bench = Bench(one(ladder=Ladder(start=10.0), rules=Rules(bound=0)))
  first, second = bench.join(0, 1)
  bench.now = 1.0
  second.push()
  second.listen()
  for now, late in ((9.0, set()), (10.0, set()), (10.5, {0}), (30.0, {0})):
    bench.tick(now)
    assert bench.lead.late == late
    assert bench.lead.expelled == []
  bench.tick(30.5)
  assert bench.lead.late == set()
  assert bench.lead.expelled == [0]
  assert first.listen()[-1] == "expel"
  assert second.listen() == ["ticket 1: job 0 v1"]
  trace = bench.trace()
  assert bench.rows(start=5) == ["lost 0:0", "leave 0:0", "send 1:0"]
  assert trace.time[5:].tolist() == [30.5] * 3
  assert bench.lead.status()["expelled"] == [0]
  assert bench.lead.status()["expelled"] == []  # it is told once


def test_the_ladder_is_that_of_the_jobs_that_ended():
  ladder = Ladder(k=10.0, floor=2.0, start=100.0)
  bench = Bench(one(jobs=20, ladder=ladder))
  first, second = bench.join(0, 1)
  for now in (1.0, 2.0, 3.0, 4.0, 5.0):
    bench.now = now
    second.push()
  # Five jobs of one second: T = 3 medians, dead after 9.
  for now, late, expelled in (
    *((3.0, set(), []), (3.1, {0}, []), (8.0, {0}, [])),
    (9.1, {1}, [0]),  # worker 1's ticket is of 5.0
  ):
    bench.tick(now)
    assert (bench.lead.late, bench.lead.expelled) == (late, expelled)
  assert first.listen()[-1] == "expel"


def test_who_waits_for_others_is_not_late():
  setup = one(ladder=Ladder(start=10.0), rules=Rules(round=2))
  bench = Bench(setup, "ssgd", every=2)
  first, _ = bench.join(0, 1)
  first.push()
  bench.tick(15.0)
  assert bench.lead.late == {1}
  bench.tick(31.0)
  assert bench.lead.expelled == [1]


def test_who_is_there_waits_for_the_others():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  bench.tick(9.0)
  assert first.listen() + second.listen() == 2 * ["welcome 0"]
  third = bench.join(2)
  for job, hand in enumerate((first, second, third)):
    assert hand.listen()[-1] == f"ticket 0: job {job} v0"
  bench.lead.gone(2, 9.5)  # once it has begun, nobody waits
  first.push()
  assert first.listen()[-1].startswith("ticket 1: job ")


def test_nobody_waits_for_ever_for_who_does_not_come():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  for now, tickets in ((9.9, 0), (10.0, 1), (12.0, 0)):
    bench.tick(now)
    for hand in (first, second):
      assert sum("ticket" in said for said in hand.listen()) == tickets


def test_a_shard_that_comes_back_waits_for_nobody():
  bench = Bench(one(together=True, ladder=Ladder(start=10.0)))
  first, *_ = bench.join(0, 1, 2)
  bench.shards[0] = None
  bench.mend()
  first.push()
  assert first.listen()[-1].startswith("ticket 1: job ")


def test_of_two_tickets_one_is_worked_on_at_a_time():
  bench = Bench(one(ladder=Ladder(start=10.0), rules=Rules(depth=2)))
  bench.join(0)
  bench.tick(19.0)
  assert bench.lead.late == set()
  bench.tick(21.0)
  assert bench.lead.late == {0}
  bench.tick(59.0)
  assert bench.lead.expelled == []
  bench.tick(61.0)
  assert bench.lead.expelled == [0]


def test_who_does_not_come_back_to_a_new_shard_is_given_up():
  bench = Bench(one(ladder=Ladder(start=10.0)))
  first, second = bench.join(0, 1)
  bench.now = 5.0
  bench.start_shard(0)
  second.reconnect(0)
  bench.settle()
  bench.tick(6.0)
  bench.tick(14.0)
  second.push()
  bench.tick(35.5)
  assert bench.lead.expelled == [0]
  assert bench.lead.workers == [1]
  del bench.hands[0]
  bench.finish()
  bench.check_once()
  bench.check_replay()


# Messages of the dead.


def test_a_message_that_is_written_too_late_spoils_no_other():
  """A worker that was taken for dead may still be alive and write where it was
  told to write. Nothing that counts may lie there."""
  bench = Bench(one(jobs=6, log=6))
  zombie, other = bench.join(0, 1)
  frames = dict(zombie.tickets)
  bench.lead.expel(0, 1.0)
  other.push()
  other.push()  # the job that the dead one had
  state = bits(bench.lead.state)
  zombie.tickets = frames
  zombie.work(0)
  bench.start_shard(0)
  assert bits(bench.lead.state) == state


# Recovery.


OPS = (
  *(["push"] * 10 + ["lost", "again", "nan", "vanish", "come", "double"]),
  *("tick", "drain", "rush"),
)


def act(bench, op, number):
  """One thing happens to a bench."""
  bench.now += 0.5
  present = [hand for _, hand in sorted(bench.hands.items()) if not hand.out]
  able = [hand for hand in present if hand.ready()]
  hand = present[number % len(present)] if present else None
  if op == "come" or hand is None:
    bench.join(number % WORKERS)
  elif op in ("push", "lost", "nan", "double"):
    if not able:
      for hand in present:
        hand.again()
      return
    hand = able[number % len(able)]
    frame = hand.push(lost=op == "lost", finite=op != "nan")
    if op == "double":
      hand.tell(0, frame)
      bench.settle()
  elif op == "rush":  # one that is much faster than all others
    for _ in range(number % 12):
      if not hand.out and hand.ready():
        hand.push()
  elif op == "again":
    hand.again()
  elif op == "vanish":
    hand.vanish()
  elif op == "drain":
    hand.say(protocol.DRAIN)
    if hand.ready():
      hand.push()
    hand.bye()
  elif op == "tick":
    bench.tick(bench.now)


def play(bench, seed, steps=30, ops=OPS):
  """Everything happens once in `len(ops)` steps, in an order that the seed
  draws, to whom it draws. Yields after each thing that happened."""
  rng = np.random.default_rng(seed)
  bench.join()
  yield
  for step in range(steps):
    if step % len(ops) == 0:
      order = rng.permutation(len(ops))
    act(bench, ops[order[step % len(ops)]], int(rng.integers(100)))
    yield


KINDS = {
  "asynchronous": (Rules(), "dana_zero", {}),
  "cache": (Rules(bound=1, cache=True), "dana_zero", {}),
  "depth": (Rules(depth=2), "dc_asgd_a", {}),
  "fetch_every": (Rules(fetch_every=2), "asgd", {}),
  "round": (
    *(Rules(round=2, backup=1), "ssgd"),
    dict(every=2, drop_late=True),
  ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_by_hand_is_replayed_to_the_same_bits(kind):
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=24, rules=rules, log=3), name, **options)
  for _ in play(bench, seed=1):
    audit(bench.lead)
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay()


def holders_of(entries):
  """Who holds which place, as rows say."""
  holders = {}
  for entry in entries:
    if entry.action == base.JOIN:
      holders[entry.worker] = entry.job
    elif entry.action == base.LEAVE:
      del holders[entry.worker]
  return holders


def open_slots(entries):
  """Slots of the parameters of tickets that are open."""
  slots = {}
  for entry in entries:
    key = entry.worker, entry.seq
    if entry.action in (base.SEND, base.KEEP):
      slots[key] = entry.params
    else:
      slots.pop(key, None)
  return set(slots.values())


@pytest.mark.parametrize("too_early", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_killed_at_any_entry_is_as_it_was(kind, too_early):
  """Killed when an entry was written and before anybody heard of it, or when
  it was obeyed and not written yet."""
  rules, name, options = KINDS[kind]
  setup = one(jobs=24, rules=rules, log=3)

  bench = Bench(setup, name, **options)
  was = [(describe(bench.lead), audit(bench.lead))]
  bench.journals[0].watch = lambda count: was.append(
    (describe(bench.lead), audit(bench.lead))
  )
  for _ in play(bench, seed=2, steps=20):
    pass
  entries, rows = bench.journals[0].entries(), bench.rows()
  assert {base.LOST, base.REJECT, base.LEAVE} < {e.action for e in entries}

  for kill_at in range(1, len(entries) + 1):
    bench = Bench(setup, name, **options)
    journal = bench.journals[0]
    journal.kill_at, journal.too_early = kill_at, too_early
    for _ in play(bench, seed=2, steps=20):
      if bench.lead is None:
        break
    assert bench.lead is None
    written = journal.entries()
    assert written == entries[: kill_at - too_early]
    # Workers go on meanwhile, and read what they were sent.
    bench.memories[0].guarded = open_slots(written)
    bench.start_shard(0)
    bench.memories[0].guarded = ()
    # Somebody who was leaving has left.
    recovered = bench.journals[0].entries()
    assert bench.rows() == rows[: len(recovered)]
    assert recovered == written or written[-1].action in (
      base.LOST,
      base.REJECT,
    )
    state, free = was[len(recovered)]
    assert describe(bench.lead) == state
    # A snapshot may have been made for the entry that was not written. Of a
    # message that had come it is not known that it had: its slot rests.
    params, messages = audit(bench.lead)
    assert too_early or params == free[0]
    assert too_early or set(messages) <= set(free[1])
    holders = holders_of(recovered)
    assert bench.lead.workers == sorted(holders)
    for worker, hand in bench.hands.items():
      hand.listen()
      hand.reconnect(0)
      if not hand.out and worker in holders:
        assert hand.listen()[0] == f"welcome {holders[worker]}"
    bench.finish()
    audit(bench.lead)
    bench.check_once()
    bench.check_replay()
    assert journal.entries()[: len(written)] == written


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_log_a_shard_goes_back_to_its_last_snapshot(kind):
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=30, rules=rules, log=0), name, **options)
  saved, row = bits(bench.lead.state), 0  # none so far: where it began
  for step, _ in enumerate(play(bench, seed=3, steps=40)):
    if step in (12, 27):
      bench.lead.snapshot()
      saved, row = bits(bench.lead.state), bench.lead.rows
    if step in (8, 20, 25, 38):
      before = describe(bench.lead)
      assert before["state"] != saved
      bench.start_shard(0)
      audit(bench.lead)
      assert bench.rows()[-1] == f"rollback 0:{row}"
      after = describe(bench.lead)
      assert after == {**before, "state": saved, "rows": before["rows"] + 1}
      for hand in bench.hands.values():
        hand.reconnect(0)
      bench.settle()
  assert step == 40
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay(some=True)


def test_a_shard_that_lost_nothing_does_not_say_so():
  bench = Bench(one(log=0))
  hand = bench.join(0)
  hand.push()
  bench.lead.snapshot()
  bench.join(1)
  state, rows = bits(bench.lead.state), bench.rows()
  bench.start_shard(0)
  assert bits(bench.lead.state) == state
  assert bench.rows() == rows
  assert rows == [
    *("join 0:0", "send 0:0", "receive 0:0", "send 0:1", "join 1:0", "send 1:2")
  ]


def test_without_a_log_a_snapshot_is_made_now_and_then():
  bench = Bench(one(log=0, snapshot_seconds=10.0, ladder=Ladder(start=99.0)))
  hand = bench.join(0)
  hand.push()
  bench.tick(9.0)
  assert bench.memories[0].load(None) is None
  bench.tick(10.5)
  state = bits(bench.lead.state)
  assert bits(bench.memories[0].load(None)[0]) == state
  hand.push()
  bench.tick(20.0)
  assert bits(bench.memories[0].load(None)[0]) == state
  bench.tick(21.0)
  assert bits(bench.memories[0].load(None)[0]) == bits(bench.lead.state)


def test_with_a_log_a_snapshot_is_made_when_it_is_full():
  bench = Bench(one(jobs=9, log=3))
  hand = bench.join(0)
  saved = []
  for _ in range(8):
    hand.push()
    snapshot = bench.memories[0].load(None)
    saved.append(snapshot and snapshot[1]["received"])
  # Before the ticket that follows on the third, sixth, ... message.
  assert saved == [None, None, 3, 3, 3, 6, 6, 6]


def test_records_that_were_flushed_are_not_made_twice():
  bench = Bench(one(log=8))
  hand = bench.join(0)
  for _ in range(3):
    hand.push()
  bench.tick(1.0)  # flushes them
  assert bench.sinks[0].records().job.tolist() == [0, 1, 2]
  bench.start_shard(0)
  bench.finish()
  bench.check_replay()


def test_parameters_are_kept_for_evaluations():
  bench = Bench(one(jobs=6, log=2, keep_params_at=(2, 5)))
  hand = bench.join(0)
  states = []
  while hand.ready():
    hand.push()
    states.append(np.array(bench.lead.params))
  kept = bench.lead.kept_params
  assert sorted(kept) == bench.lead.status()["kept_params"] == [2, 5]
  for received, params in kept.items():
    np.testing.assert_array_equal(params, states[received - 1])


@pytest.mark.parametrize("log", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_outlives_the_memory(kind, log):
  """Everybody is dead, and the memory is gone: what is left is the journal and
  an image of the state."""
  rules, name, options = KINDS[kind]
  bench = Bench(one(jobs=24, rules=rules, log=log), name, **options)
  image, saved, row = None, bits(bench.lead.state), 0
  for step, _ in enumerate(play(bench, seed=4, steps=24)):
    if step == 12:
      image = bench.lead.image()
      saved, row = bits(bench.lead.state), bench.lead.rows
    if step in (8, 20):
      bench.memories[0] = Memory(shard_lib.sizes(bench.setup))
      bench.memories[0].fresh = True
      bench.hands.clear()
      entries = len(bench.journals[0].entries())
      was_open = sorted((w, held.job) for (w, _), held in tickets_of(bench))
      bench.start_shard(0, image=image, resumed=True)
      audit(bench.lead)
      assert bits(bench.lead.state) == saved
      rows = bench.rows(start=entries)
      assert rows[0] == f"rollback 0:{row}"
      lost = [text for text in rows if text.startswith("lost")]
      assert sorted(lost) == sorted(f"lost {w}:{job}" for w, job in was_open)
      assert bench.lead.workers == bench.lead.dispatcher.workers == []
      assert not bench.lead.busy
      bench.memories[0].fresh = False
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay(some=True)


# What was changed or cut short by others.


def lose_everything(bench, **kwargs):
  """Everybody dies; what is given is what is left."""
  bench.hands.clear()
  bench.start_shard(0, resumed=True, **kwargs)
  bench.settle()
  audit(bench.lead)


def forget_memory(bench):
  bench.memories[0] = Memory(shard_lib.sizes(bench.setup))
  bench.memories[0].fresh = True


@pytest.mark.parametrize("log", [0, 4])
@pytest.mark.parametrize("resumed", [False, True])
def test_without_its_snapshot_a_shard_goes_back_to_the_checkpoint(log, resumed):
  bench = Bench(one(jobs=24, log=log), "dana_zero")
  play_on = play(bench, seed=4, steps=24)
  for step, _ in enumerate(play_on):
    if step == 8:
      image, saved = bench.lead.image(), bits(bench.lead.state)
      row, received = bench.lead.rows, bench.lead.received
    if step == 16:
      bench.lead.snapshot()
      before = bench.lead.received
      bench.memories[0].damaged = True
      if resumed:
        bench.hands.clear()
      bench.start_shard(0, image=image, resumed=resumed)
      audit(bench.lead)
      assert bits(bench.lead.state) == saved
      assert f"rollback 0:{row}" in bench.rows()
      back = bench.lead.status()["rollback"]
      assert back[:3] == (row, received, before - received)
      assert back.why == "snapshot.json is damaged"
      bench.memories[0].damaged = False
      # It has saved where it is: to be killed again costs nothing more.
      bench.start_shard(0, image=image)
      audit(bench.lead)
      assert bits(bench.lead.state) == saved
      assert sum("rollback" in text for text in bench.rows()) == 1
      for hand in bench.hands.values():
        hand.reconnect(0)
      bench.settle()
  bench.finish()
  bench.check_once()
  bench.check_replay(some=True)


def test_killed_again_after_a_rollback_it_does_not_begin_anew():
  bench = Bench(one(jobs=12, log=8))
  hand = bench.join(0)
  hand.push()
  image, saved = bench.lead.image(), bits(bench.lead.state)
  hand.push()
  forget_memory(bench)
  lose_everything(bench, image=image)
  bench.memories[0].fresh = False
  assert bits(bench.lead.state) == saved
  for before in (True, False):  # it has saved that, or was killed before
    if before:
      bench.memories[0].forget()
    lose_everything(bench, image=image)
    assert bits(bench.lead.state) == saved
  bench.finish()
  bench.check_once()
  bench.check_replay(some=True)


def test_a_trace_that_was_cut_short_goes_back_to_the_checkpoint():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  hand.push()
  image, saved = bench.lead.image(), bits(bench.lead.state)
  for _ in range(6):
    hand.push()
  rows = bench.lead.rows
  del bench.journals[0]._entries[7:]
  with pytest.raises(ValueError, match="has 7 rows, the snapshot is of"):
    bench.start_shard(0, image=image)  # workers live, and know better
  lose_everything(bench, image=image)
  assert bits(bench.lead.state) == saved
  why = bench.lead.status()["rollback"].why
  assert why.startswith("journal has 7 rows, the snapshot is of row")
  assert bench.lead.rows < rows
  bench.finish()
  bench.check_once()
  bench.check_replay(some=True)


def test_a_trace_shorter_than_the_checkpoint_is_refused():
  bench = Bench(one(jobs=12))
  hand = bench.join(0)
  hand.push()
  hand.push()
  image = bench.lead.image()
  del bench.journals[0]._entries[3:]
  forget_memory(bench)
  message = f"journal has 3 rows, the checkpoint is of row {image[1]['rows']}"
  with pytest.raises(ValueError, match=message):
    lose_everything(bench, image=image)


def test_records_that_are_gone_are_missed():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  for _ in range(7):
    hand.push()
  bench.sinks[0].truncate(2)
  with pytest.raises(ValueError, match="records has 2 records where"):
    lose_everything(bench)


def change(bench, row, **fields):
  entries = bench.journals[0]._entries
  entries[row] = entries[row]._replace(**fields)


def test_a_row_that_was_changed_is_no_riddle():
  bench = Bench(one(jobs=12, log=3))
  hand = bench.join(0)
  for _ in range(7):
    hand.push()
  saved = bench.memories[0].load(None)[1]["rows"]
  whole = bench.journals[0].entries()
  last = max(i for i, e in enumerate(whole) if e.action == base.RECEIVE)
  early = next(i for i, e in enumerate(whole) if e.action == base.RECEIVE)
  assert early < saved < last
  for row, fields in (
    (last, dict(seq=999)),
    (last, dict(worker=1)),
    (last + 1, dict(message=99)),
    (early, dict(worker=1)),
    (early, dict(action=base.LOST)),
  ):
    change(bench, row, **fields)
    with pytest.raises(ValueError, match="^journal (cannot be obeyed|is not)"):
      lose_everything(bench)
    bench.journals[0]._entries[:] = whole
  lose_everything(bench)
  bench.finish()
  bench.check_replay()


def tickets_of(bench):
  return bench.lead._tickets.items()


# Followers that obey the lead.


def team(jobs=9, rules=Rules(), shards=2, **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, shards=shards, consistent=True, **kwargs)


def said(entries):
  """What all shards must agree on, of their journals."""
  return [(*e.event, e.seq, e.version, e.totals) for e in entries]


def check_team(bench):
  """All obeyed the same rows; together they are one server."""
  first, *others = (journal.entries() for journal in bench.journals)
  for entries in others:
    assert said(entries) == said(first)
  for index, shard in enumerate(bench.shards):
    audit(shard)
    bench.check_once(index)
  bench.check_replay()
  whole, _ = bench.host.run(
    bench.host.init(PARAMS_AT_FIRST, WORKERS),
    *(bench.trace(), len(first)),
    **dict(batch=BATCH, root=ROOT),
  )
  parts = [shard.state for shard in bench.shards]
  joined = sharding.join(bench.plan, [state.params for state in parts])
  if bench.setup.totals:  # of parts: rounded otherwise than that of the whole
    np.testing.assert_allclose(joined, whole.server.params, rtol=1e-5)
    assert all(
      len(e.totals) == (e.action == base.RECEIVE)
      for e in bench.journals[0].entries()
    )
  else:
    assert bits(joined) == bits(whole.server.params)
  assert {int(state.version) for state in parts} == {int(whole.server.version)}


TEAMS = {
  **KINDS,
  "norm": (Rules(), "dana_zero", dict(clip=1.0)),
  "norm_depth": (Rules(depth=2), "dc_asgd_a", dict(clip=1.0)),
}


@pytest.mark.parametrize(
  ("kind", "shards"),
  [*((kind, 2) for kind in TEAMS), ("cache", 3), ("norm", 3)],
)
def test_followers_do_what_the_lead_does(kind, shards):
  rules, name, options = TEAMS[kind]
  setup = team(24, rules, shards, log=3, totals="clip" in options)
  bench = Bench(setup, name, **options)
  for _ in play(bench, seed=5):
    pass
  bench.finish()
  check_team(bench)


def test_a_message_counts_when_every_shard_has_its_part():
  bench = Bench(team(shards=3))
  hand = bench.join(0)
  hand.push(only=0)
  assert [shard.received for shard in bench.shards] == [0, 0, 0]
  for shard, received in ((2, 0), (1, 1)):
    hand.tell(shard, hand.unacked[shard][0])
    bench.settle()
    assert [other.received for other in bench.shards] == [received] * 3
  # And if the lead is the last to have it.
  frames = hand.work(1)
  for shard, received in ((1, 1), (2, 1), (0, 2)):
    hand.tell(shard, frames[shard])
    bench.settle()
    assert [other.received for other in bench.shards] == [received] * 3


def test_what_is_prepared_twice_counts_once():
  bench = Bench(team(shards=3))
  hand = bench.join(0)
  frames = hand.work(0)
  for shard in (0, 1, 1):
    hand.tell(shard, frames[shard])
    bench.settle()
  bench.follow(1)  # tells all that it has once more
  bench.settle()
  assert bench.lead.received == 0
  hand.tell(2, frames[2])
  bench.settle()
  assert bench.lead.received == 1


def test_a_message_that_one_shard_missed_is_said_again():
  bench = Bench(team(shards=2))
  hand = bench.join(0)
  hand.push(only=1)
  assert bench.lead.received == 0
  hand.again()
  assert bench.lead.received == bench.shards[1].received == 1
  bench.finish()
  check_team(bench)


def test_a_follower_that_asks_twice_obeys_once():
  """As it comes back while the lead does: both open the way between them."""
  bench = Bench(team(shards=2))
  bench.join(0)
  bench.hands[0].push()
  bench.shards[1] = None
  bench.join(1)  # which it does not hear of
  bench.start_shard(1)
  bench.follow(1)
  bench.settle()
  assert said(bench.journals[1].entries()) == said(bench.journals[0].entries())
  bench.finish()
  check_team(bench)


def test_a_message_that_is_not_finite_is_refused_by_all():
  bench = Bench(team(jobs=6, rules=Rules(depth=2)))
  hand = bench.join(0)
  hand.push(finite=False)
  for index in (0, 1):
    assert bench.rows(index, start=3) == [
      *("reject 0:0", "lost 0:1", "leave 0:0"),
    ]
  bench.finish()
  check_team(bench)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["cache", "depth", "round", "norm_depth"])
def test_one_of_a_team_may_be_killed_at_any_entry(kind, index):
  rules, name, options = TEAMS[kind]
  setup = team(12, rules, log=3, totals="clip" in options)
  bench = Bench(setup, name, **options)
  for _ in play(bench, seed=6, steps=16):
    pass
  bench.finish()
  entries = bench.journals[index].entries()
  for kill_at in range(1, len(entries) + 1):
    bench = Bench(setup, name, **options)
    bench.journals[index].kill_at = kill_at
    for _ in play(bench, seed=6, steps=16):
      bench.mend()
    bench.finish()
    assert bench.journals[index].kill_at is None
    check_team(bench)


# Followers with an order of their own.


def crew(jobs=9, rules=Rules(), shards=2, **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, shards=shards, **kwargs)


CALM = tuple(op for op in OPS if op != "lost")


@pytest.mark.parametrize(
  ("kind", "shards"), [("asynchronous", 2), ("fetch_every", 2), ("cache", 3)]
)
def test_shards_of_their_own_mind_replay_to_the_same_bits(kind, shards):
  rules, name, options = KINDS[kind]
  bench = Bench(crew(24, rules, shards, log=3), name, **options)
  for _ in play(bench, seed=7, ops=CALM):
    pass
  bench.finish()
  for index, shard in enumerate(bench.shards):
    audit(shard)
    bench.check_once(index)
  bench.check_replay()


def test_a_follower_takes_messages_in_the_order_in_which_they_come():
  bench = Bench(crew())
  first, second = bench.join(0, 1)
  for shard, order in ((1, (first, second)), (0, (second, first))):
    for hand in order:
      if shard:
        hand.push(only=1)
      else:
        hand.tell(0, hand.unacked[0][0])
  bench.settle()
  received = [
    [text for text in bench.rows(index) if text.startswith("receive")]
    for index in (0, 1)
  ]
  assert received == [
    ["receive 1:1", "receive 0:0"],
    ["receive 0:0", "receive 1:1"],
  ]
  bench.finish()
  bench.check_replay()


@pytest.mark.parametrize("log", [0, 3])
@pytest.mark.parametrize("index", [0, 1])
def test_a_shard_of_its_own_mind_may_be_killed_at_any_entry(index, log):
  setup = crew(12, log=log)
  bench = Bench(setup, "dana_zero")
  for _ in play(bench, seed=8, steps=16, ops=CALM):
    pass
  bench.finish()
  entries = bench.journals[index].entries()
  for kill_at in range(1, len(entries) + 1):
    bench = Bench(setup, "dana_zero")
    bench.journals[index].kill_at = kill_at
    for _ in play(bench, seed=8, steps=16, ops=CALM):
      bench.mend()
    bench.finish()
    assert bench.journals[index].kill_at is None
    for other, shard in enumerate(bench.shards):
      audit(shard)
      bench.check_once(other)
    bench.check_replay(some=not log)


def test_a_follower_says_who_leaves():
  bench = Bench(crew())
  hand = bench.join(0)
  hand.vanish()
  bench.join(0)
  bench.hands[0].push()
  bench.hands[0].say(protocol.DRAIN)
  bench.hands[0].push()
  bench.hands[0].bye()
  for index in (0, 1):
    leaves = [text for text in bench.rows(index) if "leave" in text]
    assert leaves == ["leave 0:0", "leave 0:1"]


def test_a_message_that_only_a_follower_received_is_replayed():
  """Its worker died before the lead had it: the lead lost the job, which is
  done again, and the follower receives it twice."""
  bench = Bench(crew(jobs=4))
  first, second = bench.join(0, 1)
  first.push(only=1)
  assert bench.rows(1)[-1] == "receive 0:0"
  first.vanish()
  assert bench.rows(0)[-2:] == ["lost 0:0", "leave 0:0"]
  bench.finish()
  bench.check_once()
  bench.check_replay()


def test_what_a_refused_worker_hands_in_is_not_received():
  """With two tickets, a worker hands in the second before it hears that the
  first was refused."""
  bench = Bench(crew(jobs=6, rules=Rules(depth=2)))
  hand = bench.join(0)
  first, second = hand.work(0), hand.work(1)
  for shard in (1, 0):
    hand.tell(shard, first[shard]._replace(flag=0))
  for shard in (1, 0):
    hand.tell(shard, second[shard])
  bench.settle()
  assert bench.rows(0)[-3:] == ["reject 0:0", "lost 0:1", "leave 0:0"]
  bench.finish()
  for index in (0, 1):
    bench.check_once(index)
  bench.check_replay()


def test_a_holder_from_before_does_not_drive_out_its_successor():
  for setup in (crew(), team()):
    bench = Bench(setup)
    zombie = bench.join(0)
    bench.lead.expel(0, 1.0)
    holder = bench.join(0)
    holder.listen()
    zombie.ways[1] = zombie._way(1)  # it was cut off, and connects anew
    zombie.tell(1, Frame(protocol.HELLO, 0, job=0))
    assert not any("expel" in text for text in holder.listen())
    assert zombie.listen()[-1] == "expel 1"
    bench.finish()
    bench.check_once(1)
    bench.check_replay()


# Slots.


def test_the_dead_of_a_round_do_not_use_up_the_slots():
  bench = Bench(one(jobs=16, rules=Rules(round=8), log=0), "ssgd", every=8)
  for worker in (0, 1, 2, 0, 1):
    hand = bench.join(worker)
    for _ in range(7):
      hand.push()
    assert bench.lead.received == 0
    audit(bench.lead)
    hand.vanish()
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay()


def test_a_message_that_is_lost_on_its_way_takes_no_more_than_its_slot():
  bench = Bench(one(jobs=40, rules=Rules(depth=2), log=2))
  first, _ = bench.join(0, 1)
  first.push(lost=True)
  for _ in range(30):
    if first.ready():
      first.push()
    audit(bench.lead)
  assert len(bench.lead.dispatcher.open(0)) == 2
  bench.finish()
  bench.check_once()
  bench.check_replay()


@st.composite
def runs(draw):
  """Any setup, and anything that may happen."""
  if draw(st.booleans()):
    rules = Rules(round=draw(st.integers(1, 4)), backup=draw(st.integers(0, 2)))
  else:
    bound = draw(st.sampled_from([0, 1, 2, float("inf")]))
    rules = Rules(
      **dict(bound=bound, cache=bound < 9 and draw(st.booleans())),
      depth=draw(st.integers(1, 3)),
      fetch_every=draw(st.integers(1, 3)),
    )
  setup = Setup(
    *(rules, WORKERS, draw(st.integers(1, 20))),
    log=draw(st.integers(0, 5)),
    owned=draw(st.booleans()) and rules.bound == float("inf"),
  )
  ops = st.tuples(st.sampled_from([*OPS, "kill"]), st.integers(0, 99))
  return setup, draw(st.lists(ops, max_size=40))


@quick
@given(runs())
def test_slots_never_run_out_and_none_is_lost(run):
  setup, ops = run
  bench = Bench(setup, "dana_zero")  # each ticket has a slot of its own
  killed = False
  bench.join()
  for op, number in ops:
    if op == "kill":
      killed = True
      bench.shards[0] = None
      bench.mend()
    else:
      act(bench, op, number)
    audit(bench.lead)
    if bench.lead.stopped:
      break
  bench.finish()
  audit(bench.lead)
  bench.check_once()
  bench.check_replay(some=killed and not setup.log)
