"""Shards fed with frames by hand, by workers that do what they are told."""

import collections
import functools
import json

import jax
import live_stores
import numpy as np
from kit import bits

from asgd import (
  algorithms,
  base,
  orders,
  own_writes,
  problems,
  sharding,
  simulator,
  transforms,
)
from asgd import server as server_lib
from asgd import worker as worker_lib
from asgd.live import frames
from asgd.live.frames import Frame
from asgd.live.setup import Setup, slot_counts
from asgd.live.shard import Shard, ShardStorage
from asgd.live.slots import MESSAGES, PARAMS, DamagedSnapshot, message_stamp
from asgd.orders.protocol import Rules
from asgd.orders.trace import from_events

PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
PARAMS_AT_FIRST = np.ones(5, np.float32)
ROOT = jax.random.key(0)
BATCH = functools.cache(PROBLEM.batches(0, 3))
WORKERS = 3
FRAMES = {
  kind: name.lower()
  for name, kind in vars(frames).items()
  if isinstance(kind, int) and kind <= frames.TOTAL
}


@functools.cache
def kit(name, every=1, drop_late=False, clip=None, keeps=False):
  """What a run needs of an algorithm; compiled once for all tests."""
  recipe = algorithms.build(name, 0.02, WORKERS)._replace(every=every)
  if clip:
    algorithm = transforms.precede(
      recipe.algorithm, sharding.clip_by_global_norm(clip)
    )
    recipe = recipe._replace(algorithm=algorithm)
  gate = server_lib.max_staleness(0) if drop_late else server_lib.accept_all
  server = with_jitted_init(recipe.server(gate=gate))
  worker = worker_lib.gradient_worker(PROBLEM.loss, recipe.at_worker)
  if keeps:
    worker = own_writes.own_writes(worker, server)
  worker = with_jitted_init(worker)
  steps = simulator.compile_steps(server, worker)
  return server, worker, steps, simulator.make_host(server, worker)


def with_jitted_init(side):
  """A server or a worker, of which a test makes many."""
  return side._replace(init=jax.jit(side.init))


class Killed(Exception):
  """Ends a shard as kill -9 would."""


class Memory(live_stores.Memory):
  """Memory whose snapshots could be written to disk, and whose slots can be
  guarded: what is written there must be what lies there."""

  guarded = ()  # slots of parameters
  damaged = False  # the snapshot

  def load(self):
    if self.damaged:
      raise DamagedSnapshot("the snapshot is damaged")
    return super().load()

  def save(self, tree, meta):
    super().save(tree, json.loads(json.dumps(meta)))

  def write(self, kind, slot, tree, stamp):
    if kind == PARAMS and slot in self.guarded:
      assert bits(tree) == bits(self.read(kind, slot, stamp))
    super().write(kind, slot, tree, stamp)


class DeadlyJournal(live_stores.Journal):
  """A journal that can kill its shard, at a row or just before it."""

  def __init__(self):
    super().__init__()
    self.kill_at = None  # rows
    self.too_early = False  # it was obeyed and is not in the journal
    self.watch = lambda count: None  # called after each row
    self.known = set()  # (worker, seq, action)

  def append(self, event):
    last = len(self.events()) + 1 == self.kill_at
    if last:
      self.kill_at = None
    if last and self.too_early:
      raise Killed
    super().append(event)
    self.known.add((*event.key, event.action))
    self.watch(len(self.events()))
    if last:
      raise Killed


class Bench:
  """Shards and hand-worked workers; every frame goes where it is told to, one
  at a time, and `now` is set by hand."""

  def __init__(self, setup, name="asgd", **kit_options):
    self.setup, self.now = setup, 0.0
    keeps = setup.rules.cache or setup.rules.fetch_every > 1
    self.server, self.worker, self.steps, self.host = kit(
      name, keeps=keeps, **kit_options
    )
    count = range(setup.shards)
    self.plan = None
    self.parts = [PARAMS_AT_FIRST]
    if setup.shards > 1:
      self.plan = sharding.make_plan(PARAMS_AT_FIRST, setup.shards)
      self.parts = sharding.split(self.plan, PARAMS_AT_FIRST)
    self.memories = [Memory() for _ in count]
    self.journals = [DeadlyJournal() for _ in count]
    self.sinks = [live_stores.Sink() for _ in count]
    self.post = collections.deque()  # calls to be made
    self.shards: list[Shard | None] = [None for _ in count]
    self.hands = {}  # by worker
    for index in count:
      self.start_shard(index)

  @property
  def lead(self):
    return self.shards[0]

  @property
  def server_state(self):
    """The lead's, as it is."""
    return self.lead.state.server

  @property
  def received(self):
    """The messages that each shard has received."""
    return [shard and shard.state.messages.count for shard in self.shards]

  def start_shard(self, index, image=None, **kwargs):
    state = simulator.start(self.server, self.parts[index])
    store = ShardStorage(
      *(self.memories[index], self.journals[index], self.sinks[index], image)
    )
    self.shards[index] = Shard(
      *(index, self.setup, self.steps, state, store),
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
      assert frame.version < len(self.journals[0].events())
      self.post.append(lambda: self.tell(follower, frame, to_lead))

    follower.role.follow(to_lead)

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
      busy = any(shard.state.tickets for shard in self.shards)
      if self.lead.stopped and not busy:
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

  def complete(self, *, some=False):
    """Does all that is left to do, and checks the run; see `check_replay`."""
    self.finish()
    audit(self.lead)
    self.check_once()
    self.check_replay(some=some)

  def trace(self, index=0):
    return from_events(self.journals[index].events())

  def rows(self, index=0, start=0):
    """The journal as "action worker:job"."""
    return [
      f"{base.ACTIONS[event.action]} {event.worker}:{event.job}"
      for event in self.journals[index].events()[start:]
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
    totals = [
      [event.totals for event in journal.events()] for journal in self.journals
    ]
    return simulator.run_sharded(
      *(self.server, self.worker, PARAMS_AT_FIRST, traces),
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
      assert bits(shard.state.server) == bits(state)
      shard.state.messages.flush()
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
    self.state = self.bench.worker.init(PARAMS_AT_FIRST)
    self.tickets = {}  # seq -> {shard: Frame}
    self.unacked = [{} for _ in self.ways]  # seq -> Frame

  def _way(self, shard):
    journal = self.bench.journals[shard]

    def way(frame):
      # What a worker hears is in the journal.
      allowed = {
        frames.TICKET: (base.SEND, base.KEEP),
        frames.ACK: (base.RECEIVE, base.LOST, base.REJECT),
      }.get(frame.kind, ())
      keys = {(frame.worker, frame.seq, action) for action in allowed}
      assert keys & journal.known or not keys
      self.bench.post.append(lambda: self._hear(shard, frame, way))

    return way

  def _hear(self, shard, frame, way):
    if way is not self.ways[shard]:
      return  # of a connection that broke
    self.heard.append((shard, frame))
    if frame.kind == frames.WELCOME and shard == 0:
      if frame.job != self.holder:
        self._reset()
        self.holder, self.out = frame.job, False
        for other in range(1, len(self.ways)):
          self.tell(other, Frame(frames.HELLO, self.worker, job=frame.job))
    elif frame.kind == frames.TICKET:
      if not any(frame.seq in pushes for pushes in self.unacked):
        parts = self.tickets.setdefault(frame.seq, {})
        parts[shard] = frame
        if shard == 0:
          self.fetch(frame.seq)
    elif frame.kind == frames.ACK:
      self.unacked[shard].pop(frame.seq, None)
    elif frame.kind == frames.EXPEL:
      self._reset()
      self.out = True

  def listen(self):
    """What was heard since the last time, as text."""
    self.bench.settle()
    heard, self.heard = self.heard, []
    return [self._text(frame) for _, frame in heard]

  @staticmethod
  def _text(frame):
    name = FRAMES[frame.kind]
    if frame.kind == frames.TICKET:
      kept = " kept" if frame.flag else ""
      return f"ticket {frame.seq}: job {frame.job}{kept} v{frame.version}"
    if frame.kind == frames.ACK:
      return f"ack {frame.seq}"
    if frame.kind == frames.WELCOME:
      return f"welcome {frame.job}"
    return f"{name} {frame.flag}" if frame.flag else name

  def tell(self, shard, frame):
    bench = self.bench
    bench.tell(bench.shards[shard], frame, self.ways[shard])

  def send(self, kind, **fields):
    """Says something to the lead."""
    self.tell(0, Frame(kind, self.worker, **fields))
    self.bench.settle()

  def hello(self, holder=-1, restarts=0):
    self.send(frames.HELLO, seq=restarts, job=holder)

  def fetch(self, seq):
    setup, parts = self.bench.setup, self.tickets[seq]
    for shard in range(1, setup.shards):
      if not setup.consistent and shard not in parts:
        frame = Frame(frames.FETCH, self.worker, seq, parts[0].job)
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
    self.tell(shard, Frame(frames.HELLO, self.worker, job=self.holder))
    if shard:
      for seq, parts in list(self.tickets.items()):
        if 0 in parts:
          self.fetch(seq)
    for frame in list(self.unacked[shard].values()):
      self.tell(shard, frame)

  def bye(self):
    """Leaves."""
    for shard in range(len(self.ways)):
      self.tell(shard, Frame(frames.BYE, self.worker))
    self.out = True
    self.bench.settle()

  def vanish(self):
    """Its connections break."""
    for shard, way in zip(self.bench.shards, self.ways, strict=True):
      self.bench.call(
        shard,
        lambda shard=shard, way=way: shard.disconnect(
          self.worker, self.bench.now, way
        ),
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
    bench, tickets = self.bench, self.tickets.pop(seq)
    parts = [
      memory.read(PARAMS, tickets[shard].params, int(tickets[shard].value))
      for shard, memory in enumerate(bench.memories)
    ]
    params = (
      parts[0] if bench.plan is None else sharding.join(bench.plan, parts)
    )
    first = tickets[0]
    ticket = base.Ticket(
      *(np.int32(self.worker), np.int32(first.version), params),
      np.bool_(not first.flag),
    )
    self.state, message, metrics = bench.steps.work(
      *(self.state, ticket),
      *(BATCH(self.worker, first.job), ROOT, np.int32(first.job)),
    )
    message = jax.device_get(message)
    split = [message]
    if bench.plan is not None:
      split = sharding.split(bench.plan, message)
    stamp = message_stamp(self.worker, seq)
    for shard, memory in enumerate(bench.memories):
      memory.write(MESSAGES, tickets[shard].message, split[shard], stamp)
    return [
      Frame(
        *(frames.PUSH, self.worker, seq, first.job),
        **dict(flag=1, message=frame.message, value=float(metrics.loss)),
      )
      for _, frame in sorted(tickets.items())
    ]

  def push(self, seq=None, *, finite=True, lost=False, only=None):
    """Does a job, its oldest by default, and hands it in: to the lead last."""
    pushes = self.work(self.ready()[0] if seq is None else seq)
    for shard in reversed(range(len(self.ways))):
      frame = pushes[shard]._replace(flag=int(finite))
      self.unacked[shard][frame.seq] = frame
      if not (lost and shard == 0) and only in (None, shard):
        self.tell(shard, frame)
    self.bench.settle()
    return pushes[0]


def audit(shard):
  """No slot is lost, and none is used twice. Returns the free ones."""
  counts, state = slot_counts(shard.setup), shard.state
  slots = state.slots
  uses = collections.Counter(slots.snapshot_slots)
  uses.update(opened.params_slot for opened in state.tickets.values())
  uses.update(
    opened.params_slot for opened in state.reusable_tickets.values()
  )
  if slots.published:
    uses[slots.published[1]] += 1
  assert uses == +slots.uses
  assert sorted([*slots.free_params, *uses]) == list(range(counts.params))
  taken = [opened.message_slot for opened in state.tickets.values()]
  for messages in slots.lost_slots.values():
    taken += messages  # the workers that had them may still write
  assert sorted([*slots.free_messages, *slots.log_slots, *taken]) == list(
    range(counts.messages)
  )
  return sorted(slots.free_params), sorted(slots.free_messages)


def describe(shard):
  """All that a shard must know again after a kill."""
  state = shard.state
  tickets = {
    (kind, key): (*opened[1:], bits(opened.ticket))
    for kind, table in (
      *(("open", state.tickets), ("kept", state.reusable_tickets)),
    )
    for key, opened in table.items()
  }
  return {
    "state": bits(shard.state.server),
    "tickets": tickets,
    "seqs": dict(state.started_jobs),
    "rows": shard.state.rows,
    "received": shard.state.messages.count,
  }


def one(jobs=9, rules=Rules(), **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, **kwargs)


def team(jobs=9, rules=Rules(), shards=2, **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, shards=shards, consistent=True, **kwargs)


def crew(jobs=9, rules=Rules(), shards=2, **kwargs):  # noqa: B008
  return Setup(rules, WORKERS, jobs, shards=shards, **kwargs)


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
    hand.send(frames.DRAIN)
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
