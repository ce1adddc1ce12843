"""Live runs in threads: each is what its trace says, to the last bit."""

import contextlib
import copy
import functools
import math
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from kit import bits, close, until

from asgd import (
  algorithms,
  base,
  orders,
  own_writes,
  problems,
  sharding,
  simulator,
  stacking,
)
from asgd import server as server_lib
from asgd.live import frames
from asgd.live.faults import Fault
from asgd.live.frames import Frame
from asgd.live.hosts.site import Site
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.journal import FileJournal, journal_path, read_journal
from asgd.live.links.base import Disconnected
from asgd.live.links.sockets import SocketLink
from asgd.live.records import read_records, records_path
from asgd.live.server.cluster import ServerCluster
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.spans import read_spans, spans_path
from asgd.live.worker_spec import WorkerSpec
from asgd.orders.protocol import Rules
from asgd.orders.trace import from_events

WORKERS, JOBS = 3, 39
ROOT = jax.random.key(0)
PROBLEM = problems.quadratic(np.linspace(1, 3, 5), noise=0.1)
LONG = 300.0  # seconds; nothing here takes as long, on a busy machine too


class Kit:
  """An algorithm with all that a run of it needs."""

  def __init__(self, name, every=None, drop_late=False, **options):
    recipe = algorithms.build(name, 0.02, WORKERS, **options)
    if every:
      recipe = recipe._replace(every=every)
    gate = server_lib.max_staleness(0) if drop_late else server_lib.accept_all
    self.server = recipe.server(gate=gate)
    self.worker = recipe.make_worker(PROBLEM.loss)
    self.params = PROBLEM.init(ROOT)
    self.batch = stacking.job_batches(
      PROBLEM.batches(0, WORKERS), recipe.steps
    )

  @functools.cached_property
  def keeping(self):
    """The same, of workers that keep tickets."""
    other = copy.copy(self)
    other.worker = own_writes.own_writes(self.worker, self.server)
    for name in ("steps", "host"):
      vars(other).pop(name, None)
    return other

  @functools.cached_property
  def steps(self):
    # As in every live run: a message's array is the memory of its slot.
    return simulator.compile_steps(
      self.server, self.worker, keeps_messages=True
    )

  @functools.cached_property
  def host(self):
    return simulator.make_host(self.server, self.worker, keeps_messages=True)


@functools.cache
def kit(name, **options):
  return Kit(name, **options)


def drive(cluster):
  """Watches over a cluster until its run is finished."""
  end = time.monotonic() + LONG
  while not (cluster.status() and cluster.finished):
    cluster.check()
    assert time.monotonic() < end, "the run did not finish"
    time.sleep(0.01)


class Gate:
  """Batches; those that `held` tells of are held back until it is opened."""

  def __init__(self, batch, held):
    self._batch, self._held = batch, held
    self._open = threading.Event()
    self.waiting = []  # (worker, job)

  def __call__(self, worker, job):
    if not self._open.is_set() and self._held(worker, job):
      self.waiting.append((worker, job))
      assert self._open.wait(LONG)
    return self._batch(worker, job)

  def wait_for(self, count):
    until(lambda: len(self.waiting) >= count, f"{count} workers at the gate")

  def open(self):
    self._open.set()


class Live:
  """A run."""

  def __init__(
    self,
    kit,
    rules,
    jobs,
    setup,
    batch,
    overlap=False,
    refill=True,
    **options,
  ):
    if rules.cache or rules.fetch_every > 1:
      kit = kit.keeping
    self.kit = kit
    self.setup = Setup(rules, WORKERS, jobs, **setup)
    parts, self.plan = [kit.params], None
    if self.setup.shards > 1:
      self.plan = sharding.make_plan(kit.params, self.setup.shards)
      parts = sharding.split(self.plan, kit.params)
    self.spec = WorkerSpec(
      *(kit.steps.work, kit.worker.init, batch, ROOT, kit.params, self.plan),
      **dict(consistent=self.setup.consistent, depth=rules.depth),
      overlap=overlap,
    )
    self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
    path, began = str(self.folder), time.monotonic()
    self.site = Site(
      *(self.setup, path, path, began), spans=True, patience=0.2
    )
    self.makers = ServerMakers(
      *(self.site, lambda: kit.server, parts),
      steps=kit.steps,
      **options,
    )
    self.hosts, self.closing = ThreadHosts(began=began), contextlib.ExitStack()
    self.cluster = ServerCluster(
      *(self.setup, self.plan, self.hosts, self.makers, lambda: self.spec),
      refill=refill,
    )

  def start_shards(self):
    for index in range(self.setup.shards):
      self.cluster._start_shard(index)
    self.wait_for_shards()

  def server(self, index):
    """The server of a shard, None until it is made."""
    party = self.hosts._hosts["shard", index]._object
    return party and party.server

  def servers(self):
    return [self.server(index) for index in range(self.setup.shards)]

  def wait_for_shards(self):
    until(lambda: all(self.servers()), "a start of all shards")

  def link(self):
    """A worker's way to all shards, closed with the run."""
    shards = range(self.setup.shards)
    link = SocketLink([self.site.socket(index) for index in shards])
    self.closing.callback(link.close)
    return link

  @property
  def injected(self):
    """The faults that happened, in their order."""
    path = self.folder / "faults.csv"
    rows = path.read_text().split() if path.exists() else ()
    parts = [row.split(",") for row in rows]
    return [Fault(int(w), int(s), kind, float(t)) for w, s, kind, t in parts]

  @property
  def spans(self):
    """(worker, Span)"""
    paths = [spans_path(self.folder, worker) for worker in range(WORKERS)]
    there = [(w, path) for w, path in enumerate(paths) if path.exists()]
    return [(w, span) for w, path in there for span in read_spans(path)]

  def worker(self, index):
    return self.cluster._supervisor.parties["worker"][index]

  def kill_shard(self, index):
    """Kills a shard, and puts another in its place."""
    self.hosts.kill("shard", index)
    told = f"shard {index} died; another takes over"
    assert told in self.cluster.check()

  @property
  def lead(self):
    server = self.server(0)
    return server and server.shard

  @property
  def server_state(self):
    return self.lead.state.server

  def states(self):
    return [server.shard.state.server for server in self.servers()]

  def events(self, index=0):
    return read_journal(journal_path(self.folder, index))

  def trace(self, index=0):
    return from_events(self.events(index))

  def count(self, action):
    return int((self.trace().action == action).sum())

  def replay(self):
    """Returns states and records of each shard, as the engine has them."""
    common = dict(batch=self.kit.batch, root=ROOT)
    traces = [self.trace(index) for index in range(self.setup.shards)]
    for trace in traces:
      orders.check(trace, depth=99)
    if self.plan is None:
      host, end = self.kit.host, len(traces[0].time)
      simulation = host.init(self.kit.params, WORKERS)
      simulation, records = host.run(simulation, traces[0], end, **common)
      return [simulation.server], [records]
    return simulator.run_sharded(
      *(self.kit.server, self.kit.worker, self.kit.params, traces),
      **dict(workers=WORKERS, **common),
    )

  def check(self):
    """Every job was received once, and the replay has the same bits. Of shards
    with an order of their own, the others may have received what the lead lost
    with a worker, or lost what it received."""
    lost = set()
    for index in range(self.setup.shards):
      trace = self.trace(index)
      jobs = trace.job[trace.action == base.RECEIVE]
      lost |= set(trace.job[trace.action == base.LOST].tolist())
      exempt = lost if index and not self.setup.consistent else set()
      assert sorted(job for job in jobs.tolist() if job not in exempt) == [
        job for job in range(self.setup.jobs) if job not in exempt
      ]
    states, records = self.replay()
    for live, state in zip(self.states(), states, strict=True):
      assert bits(live) == bits(state)
    for index, expected in enumerate(records):
      held = read_records(records_path(self.folder, index))
      for column, other in zip(held, expected, strict=True):
        np.testing.assert_array_equal(column, other)
    return records


@contextlib.contextmanager
def live(
  kit,
  rules=Rules(),  # noqa: B008
  jobs=JOBS,
  *,
  setup=None,
  held=None,
  start=True,
  batch=None,
  **options,
):
  """A run that is closed at the end, whatever happens."""
  batch = batch or kit.batch
  gate = Gate(batch, held) if held else None
  run = Live(kit, rules, jobs, setup or {}, gate or batch, **options)
  run.gate = gate
  try:
    if start:
      run.cluster.start()
      run.wait_for_shards()
    yield run
  finally:
    if gate:
      gate.open()
    run.closing.close()
    run.cluster.close()


def finished(kit, *args, **kwargs):
  """A run that went through. All are there when it begins, so that everybody
  has some of its jobs."""
  with live(kit, *args, held=lambda worker, job: True, **kwargs) as run:
    run.gate.wait_for(WORKERS)
    run.gate.open()
    drive(run.cluster)
  return run


# A live run is what its trace says.


@pytest.mark.parametrize(
  ("name", "options", "rules"),
  [
    ("dana_zero", {}, Rules()),
    ("dana_slim", {}, Rules(depth=3)),  # workers in three threads
    ("dana_zero", {}, Rules(bound=0)),
    ("dana_slim", {}, Rules(bound=1, cache=True, depth=2)),
    ("dc_asgd_a", {}, Rules(depth=3)),
    ("dana_slim", {}, Rules(fetch_every=3)),
    ("downpour", dict(push_every=2, fetch_every=6), Rules(fetch_every=3)),
    ("downpour", dict(push_every=3, fetch_every=2), Rules(fetch_every=2)),
    ("easgd", dict(steps=2), Rules(depth=2)),
    ("ssgd", {}, Rules(round=3)),
    ("ssgd", dict(every=2, drop_late=True), Rules(round=2, backup=1)),
  ],
)
def test_a_live_run_replays_to_the_same_bits(name, options, rules):
  overlap = name == "dana_slim" and rules.depth == 3
  run = finished(kit(name, **options), rules, overlap=overlap)
  (records,) = run.check()
  trace = run.trace()
  if not rules.round:  # where who has handed in may do another
    orders.check(trace, depth=rules.depth)
  assert run.lead.state.messages.count == JOBS
  keeps = run.count(base.KEEP)
  assert keeps if rules.cache or rules.fetch_every > 1 else not keeps
  # Nothing went wrong, so nobody was lost.
  assert run.count(base.LOST) == run.count(base.REJECT) == 0
  assert run.cluster.replaced == {"worker": 0, "shard": 0}
  assert (np.diff(trace.time) >= 0).all()
  if not (options or rules.round):  # each message is an update
    assert records.staleness.tolist() == orders.staleness(trace).tolist()


def test_a_live_warm_start_is_one_worker_alone():
  rules, held = Rules(warm_start=4, bound=2), lambda worker, job: job >= 1
  with live(kit("dana_zero"), rules, start=False, held=held) as run:
    run.start_shards()
    run.cluster.add_worker(0)
    run.gate.wait_for(1)
    # Of those who are there when it is free, the first goes on.
    for worker in (1, 2):
      run.cluster.add_worker(worker)
    until(lambda: run.lead.workers == [0, 1, 2], "that all join")
    run.gate.open()
    drive(run.cluster)
  (records,) = run.check()
  assert records.staleness[:4].tolist() == [0] * 4
  assert len(set(records.worker[:4].tolist())) == 1
  trace = run.trace()
  starts = trace.action == base.SEND
  (alone, *_) = np.flatnonzero(np.cumsum(trace.action == base.RECEIVE) == 4)
  assert len(set(trace.worker[:alone][starts[:alone]].tolist())) == 1
  assert starts.sum() == JOBS


def test_a_late_job_is_another_workers_too():
  slow, rest = threading.Event(), threading.Event()

  def batch(worker, job):
    if job >= 6:
      assert rest.wait(LONG)
    elif worker == 2:
      assert slow.wait(LONG)
    return kit("ssgd").batch(worker, job)

  rules = Rules(round=WORKERS, late=2.0)
  with live(kit("ssgd"), rules, batch=batch) as run:
    messages = run.lead.state.messages
    until(lambda: messages.count >= 3, "a round without worker 2")
    slow.set()
    until(lambda: run.count(base.DROP), "that worker 2 comes too late")
    rest.set()
    drive(run.cluster)
  run.check()
  started, first = orders.count_backups(run.trace())
  assert started >= first >= 1
  assert run.count(base.LOST) == run.count(base.REJECT) == 0


def test_spans_tell_what_a_worker_did():
  run = finished(kit("asgd"), jobs=9)
  by_seq = {}
  for worker, span in run.spans:
    assert span.start <= span.end
    by_seq.setdefault((worker, span.seq, span.job), []).append(span.name)
  assert sorted(job for _, _, job in by_seq) == list(range(9))
  assert all(v == ["fetch", "compute", "push"] for v in by_seq.values())


def test_workers_take_turns_on_the_devices_of_their_process():
  devices, places = tuple(jax.local_devices()[1:3]), set()
  made = kit("asgd")

  def work(state, ticket, *rest):
    state, message, metrics = made.steps.work(state, ticket, *rest)
    worker = int(ticket.worker)
    places.update((worker, place) for place in metrics.loss.devices())
    return state, message, metrics

  with live(made, jobs=9, start=False) as run:
    run.spec = run.spec._replace(work=work, devices=devices)
    run.spec.warm_up_all(WORKERS)
    assert places == {(0, devices[0]), (1, devices[1])}  # compiled for each
    run.cluster.start()
    drive(run.cluster)
  run.check()
  assert places <= {(w, devices[w % 2]) for w in range(WORKERS)}


def test_one_worker_is_plain_optax():
  with live(kit("asgd", momentum=0.9), jobs=12, start=False) as run:
    run.start_shards()
    run.cluster.add_worker(0)
    drive(run.cluster)
  (records,) = run.check()
  assert not records.staleness.any()
  grad = jax.jit(jax.value_and_grad(lambda p, b: PROBLEM.loss(p, b, None)[0]))
  tx = optax.sgd(0.02, momentum=0.9)
  params = run.kit.params
  state = tx.init(params)
  for job in range(12):
    loss, grads = grad(params, run.kit.batch(0, job))
    np.testing.assert_allclose(records.loss[job], loss, rtol=1e-6)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_allclose(run.server_state.params, params, rtol=1e-6)


# Rounds.


@pytest.fixture
def float64():
  # In all threads, where `jax.enable_x64` would be in one.
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def any_worker(worker, job):
  """Data that do not depend on who works on them."""
  del worker
  return PROBLEM.batches(0, 1)(0, job).astype(np.float64)


def mean_gradient_descent(rounds):
  """Plain optax, on the mean gradient of each round, in the order of jobs."""
  grad = jax.jit(jax.grad(lambda p, b: PROBLEM.loss(p, b, None)[0]))
  tx = optax.sgd(0.02, momentum=0.9)
  params = PROBLEM.init(ROOT)
  state = tx.init(params)
  for jobs in rounds:
    grads = [grad(params, any_worker(0, job)) for job in jobs]
    updates, state = tx.update(sum(grads) / len(grads), state, params)
    params = optax.apply_updates(params, updates)
  return params


DEATHS = [Fault(0, 2, "kill"), Fault(1, 4, "nan"), Fault(2, 6, "kill")]
SLOW = [Fault(0, 1, "slow", 0.05), Fault(2, 2, "slow", 0.1)]


@pytest.mark.parametrize("faults", [SLOW, DEATHS], ids=["slow", "dies"])
def test_rounds_are_plain_optax_whoever_is_slow_or_dies(float64, faults):
  kit = Kit("ssgd", momentum=0.9)
  kit.batch = any_worker
  run = finished(kit, Rules(round=3), faults=faults)
  assert sorted(run.injected) == sorted(faults)
  run.check()
  # A round has the jobs of its numbers, as a lost one is done again at once.
  expected = mean_gradient_descent(np.arange(JOBS).reshape(-1, 3).tolist())
  assert run.server_state.params.dtype == np.float64
  close(run.server_state.params, expected)


def test_rounds_with_a_backup_drop_who_is_late(float64):
  kit = Kit("ssgd", momentum=0.9, every=2, drop_late=True)
  kit.batch = any_worker
  rules = Rules(round=2, backup=1)
  run = finished(kit, rules, faults=[Fault(0, 1, "slow", 0.1)])
  (records,) = run.check()
  assert (records.accepted == (records.staleness == 0)).all()
  assert not records.accepted.all()
  taken = records.job[records.accepted]
  whole = taken[: len(taken) // 2 * 2].reshape(-1, 2)
  assert (np.diff(whole, axis=1) > 0).all()  # in the order of the jobs
  expected = mean_gradient_descent(whole.tolist())
  close(run.server_state.params, expected)


# Faults.


@pytest.mark.parametrize(
  ("name", "rules", "setup"),
  [
    ("dana_zero", Rules(bound=2, depth=2), {}),
    ("ssgd", Rules(round=3), {}),
    ("dana_slim", Rules(bound=2), dict(shards=3)),
    ("dana_slim", Rules(bound=2), dict(shards=3, consistent=True)),
  ],
)
def test_a_run_with_faults_comes_to_its_end(name, rules, setup):
  faults = [
    *(Fault(0, 3, "kill"), Fault(1, 4, "nan"), Fault(2, 2, "lose")),
    *(Fault(2, 5, "double"), Fault(0, 5, "slow", 0.1), Fault(1, 2, "reorder")),
    *(Fault(1, 8, "kill"), Fault(2, 7, "lose")),
  ]
  run = finished(kit(name), rules, setup=setup, faults=faults)
  assert sorted(run.injected) == sorted(faults)
  run.check()
  if setup.get("consistent"):
    check_whole(run)
  assert run.count(base.REJECT) >= 1
  assert run.cluster.replaced["worker"] >= 2


def test_what_a_worker_raises_is_raised_and_names_the_worker():
  def batch(worker, job):
    if job == 7:
      raise OSError("the disk is gone")
    return PROBLEM.batches(0, WORKERS)(worker, job)

  with live(kit("asgd"), batch=batch) as run:
    with pytest.raises(OSError, match="the disk is gone") as error:
      drive(run.cluster)
    who = [e.worker for e in run.events() if e.job == 7]
    assert error.value.__notes__ == [f"in worker {who[0]}"]


def test_what_a_shard_raises_is_raised(monkeypatch):
  append = FileJournal.append

  def append_nine(journal, event):
    if len(journal.events()) == 9:
      raise OSError("no space left")
    append(journal, event)

  monkeypatch.setattr(FileJournal, "append", append_nine)
  with (
    live(kit("asgd")) as run,
    pytest.raises(OSError, match="no space left"),
  ):
    drive(run.cluster)


# Coming and going.


@pytest.mark.parametrize("refill", [False, True])
def test_a_worker_that_drained_may_be_replaced(refill):
  options = dict(jobs=300, refill=refill, start=False)
  with live(kit("asgd"), Rules(bound=0), **options) as run:
    run.start_shards()
    for worker in range(WORKERS):
      run.cluster.add_worker(worker)
    party = run.worker(2)
    assert party.is_ready or party.make_call.result() is None
    assert party.host.drain()
    assert party.run.result() == "left"
    told = "; another takes its place" if refill else ""
    assert run.cluster.check() == [f"worker 2 left{told}"]
    drive(run.cluster)
  run.check()
  assert run.cluster.replaced["worker"] == refill


def test_those_who_end_with_the_run_are_not_replaced():
  with live(kit("dana_slim"), jobs=9) as run:
    calls = [run.worker(worker).run for worker in range(WORKERS)]
    assert [call.result() for call in calls] == ["stopped"] * WORKERS
    assert run.cluster.check() == []
    drive(run.cluster)
  run.check()
  assert run.cluster.replaced["worker"] == 0


# Shards.


def check_whole(run):
  """Shards that obey one order are together what one server is."""
  kit = run.kit
  trace = run.trace()
  simulation, _ = kit.host.run(
    kit.host.init(kit.params, WORKERS),
    *(trace, len(trace.time)),
    **dict(batch=kit.batch, root=ROOT),
  )
  joined = sharding.join(run.plan, [state.params for state in run.states()])
  assert bits(joined) == bits(simulation.server.params)
  rows = [event[:5] for event in run.events(0)]
  for index in range(1, run.setup.shards):
    followed = [event[:5] for event in run.events(index)]
    assert followed == rows[: len(followed)]
    # A follower may end before it is sent that workers left at the end.
    assert {action for *_, action in rows[len(followed) :]} <= {base.LEAVE}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shards", "name", "rules", "consistent"),
  [
    (3, "dana_zero", Rules(bound=2, cache=True), False),
    (3, "dana_zero", Rules(bound=2, cache=True), True),
    (2, "dana_slim", Rules(depth=2), False),
    (2, "dana_slim", Rules(depth=2), True),
  ],
)
def test_a_server_in_shards_replays_to_the_same_bits(
  shards, name, rules, consistent
):
  setup = dict(shards=shards, consistent=consistent)
  run = finished(kit(name), rules, setup=setup)
  run.check()
  if consistent:
    check_whole(run)


def test_tickets_come_in_their_order_when_a_shard_was_replaced():
  """What the dead one had said is not heard after what the new one says."""
  with live(kit("asgd"), Rules(depth=2), start=False) as run:
    run.start_shards()
    link = run.link()
    assert link.connect(0)
    link.send(0, Frame(frames.HELLO, 0, job=-1))
    _, frame = link.receive(LONG)
    assert frame == Frame(frames.WELCOME, 0, job=0)
    until(lambda: len(run.events()) == 3, "two tickets")
    run.kill_shard(0)
    with pytest.raises(Disconnected):
      while link.receive(LONG):
        pass
    until(lambda: link.connect(0), "a connection")
    link.send(0, Frame(frames.HELLO, 0, job=0))
    heard = [link.receive(LONG)[1] for _ in range(3)]
    kinds = [(frame.kind, frame.seq) for frame in heard]
    assert kinds == [
      *((frames.WELCOME, 0), (frames.TICKET, 0), (frames.TICKET, 1)),
    ]


def test_what_other_shards_say_is_heard_though_one_is_dead():
  setup = dict(shards=2, consistent=True)
  with live(kit("dana_slim"), setup=setup, start=False) as run:
    run.start_shards()
    link = run.link()
    assert all(link.connect(shard) for shard in range(2))
    link.send(0, Frame(frames.HELLO, 0, job=-1))
    for kind in (frames.WELCOME, frames.TICKET):
      shard, frame = link.receive(LONG)
      assert (shard, frame.kind) == (0, kind)
    link.send(1, Frame(frames.HELLO, 0, job=0))
    follower = run.server(1).shard
    until(lambda: follower.role.connections, "a welcome")
    run.kill_shard(0)
    with pytest.raises(Disconnected):
      link.receive(LONG)
    until(lambda: link.connect(0), "a connection")
    welcome, ticket = link.receive(1.0), link.receive(1.0)
    assert welcome == (1, Frame(frames.WELCOME, 0, job=0))
    assert ticket is not None
    assert (ticket[0], ticket[1].kind) == (1, frames.TICKET)


# What a run hands out.


def test_parameters_are_kept_for_evaluations():
  at = (5, 20, JOBS)
  with live(kit("dana_zero"), setup=dict(keep_params_at=at)) as run:
    drive(run.cluster)
    kept = [run.cluster.params(received) for received in at]
    last = run.cluster.params()
  trace, host = run.trace(), run.kit.host
  for received, params in zip(at, kept, strict=True):
    end = int(simulator.end_of_message(trace)[received - 1])
    simulation, _ = host.run(
      host.init(run.kit.params, WORKERS),
      *(trace, end),
      **dict(batch=run.kit.batch, root=ROOT),
    )
    assert bits(params) == bits(simulation.server.params)
  assert bits(last) == bits(kept[-1])
  assert math.isfinite(float(np.sum(last)))
