"""Live runs whose messages are packed codes, in threads: each is what its trace
says, whoever is killed and whatever is damaged."""

import contextlib
import time

import coding
import numpy as np
import pytest
from kit import bits

import asgd
from asgd import base, compression, sharding, simulator, wire
from asgd.live.deadlines import Ladder
from asgd.live.faults import Fault
from asgd.live.hosts.site import Site
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.journal import journal_path, read_journal
from asgd.live.records import read_records, records_path
from asgd.live.server import cluster as clusters
from asgd.live.server.makers import ServerMakers
from asgd.live.setup import Setup
from asgd.live.slots import MESSAGES, UPDATES
from asgd.live.worker_spec import WorkerSpec
from asgd.orders.protocol import Rules
from asgd.orders.trace import from_events

WORKERS, JOBS = 2, 24
LONG = 120.0  # seconds; nothing here takes as long, on a busy machine too


def threshold():
  return compression.named("threshold", tau=0.002)


PARAMS = {name: np.zeros((4, 6), np.float32) for name in "abc"}


class TellingSite(Site):
  """A site whose memories tell what is written to them."""

  told = staticmethod(lambda index, memory, kind, slot, tree, stamp: None)

  def open_memory(self, index, *like):
    memory = super().open_memory(index, *like)
    write = memory.write

    def write_and_tell(*args):
      write(*args)
      self.told(index, memory, *args)

    memory.write = write_and_tell
    return memory


class Run:
  """A run of gradient workers in threads, with files and memory as a real one
  has them."""

  def __init__(
    self, folder, codec, params, *, down=None, faults=(), log=8, **setup
  ):
    self.params, self.folder = params, folder
    self.setup = Setup(
      Rules(), WORKERS, JOBS, ladder=Ladder(floor=LONG), together=True,
      log=log, **setup,
    )
    shards, plan = self.setup.shards, None
    if shards > 1:
      plan = sharding.make_plan(params, shards)
    recipe = asgd.asgd(0.05, workers=WORKERS)
    if down:
      algorithm = compression.compressed_updates(recipe.algorithm, down)
      recipe = recipe._replace(algorithm=algorithm)
    self.plan, self.server = plan, compression.decoding(recipe.server(), codec)
    self.worker = compression.compressed(
      recipe.make_worker(coding.loss), codec, plan
    )
    steps = simulator.compile_steps(
      self.server, self.worker, keeps_messages=True
    )
    spec = WorkerSpec(
      *(steps.work, self.worker.init, coding.batch, coding.ROOT, params, plan),
      consistent=self.setup.consistent,
      codec=codec,
      codec_down=down,
    )
    parts = [params] if plan is None else sharding.split(plan, params)
    self.news = []
    spec.warm_up_all(WORKERS)
    began = time.monotonic()
    self.site = TellingSite(
      *(self.setup, str(folder), str(folder), began), patience=0.2
    )
    self.makers = ServerMakers(
      *(self.site, lambda: self.server, parts),
      steps=steps,
      faults=faults,
    )
    self.hosts = ThreadHosts(began=began)
    self.cluster = clusters.ServerCluster(
      self.setup, plan, self.hosts, self.makers, lambda: spec
    )

  def drive(self):
    end = time.monotonic() + LONG
    self.cluster.start()
    while True:
      status = self.cluster.status()
      self.news += [line for each in status or () for line in each["news"]]
      if self.cluster.finished:
        return
      self.cluster.check()
      assert time.monotonic() < end, "the run did not finish"
      time.sleep(0.01)

  def journal(self, index):
    return read_journal(journal_path(self.folder, index))

  @property
  def events(self):
    return self.journal(0)

  def shard(self, index):
    return self.hosts._hosts["shard", index]._object.server.shard

  def flush(self, index):
    party = self.hosts._hosts["shard", index]._object
    party.ask(lambda shard: shard.state.messages.flush()).result()

  def check(self):
    """Every job was received once, and the replay has the same bits."""
    shards = range(self.setup.shards)
    traces = [from_events(self.journal(index)) for index in shards]
    live = [self.shard(index).state.server for index in shards]
    data = dict(batch=coding.batch, root=coding.ROOT)
    if self.plan is None:
      host = simulator.make_host(
        self.server, self.worker, keeps_messages=True
      )
      simulation, record = simulator.run_whole(
        host, self.params, WORKERS, traces[0], **data
      )
      states, records = [simulation.server], [record]
    else:
      states, records = simulator.run_sharded(
        *(self.server, self.worker, self.params, traces),
        **dict(workers=WORKERS, plan=self.plan, **data),
      )
    jobs = traces[0].job[traces[0].action == base.RECEIVE]
    assert sorted(jobs.tolist()) == list(range(JOBS))
    assert list(map(bits, live)) == list(map(bits, states))
    for index, expected in enumerate(records):
      self.flush(index)
      there = read_records(records_path(self.folder, index))
      for column, other in zip(there, expected, strict=True):
        np.testing.assert_array_equal(column, other)
    return records


@contextlib.contextmanager
def live(folder, codec=None, params=None, **options):
  run = Run(folder, codec or threshold(), params or PARAMS, **options)
  try:
    yield run
  finally:
    run.cluster.close()


def test_every_codec_replays_to_the_same_bits_in_both_directions(tmp_path):
  codec = coding.every_codec()
  with live(tmp_path, codec, coding.PARAMS, down=codec) as run:
    run.drive()
    (records,) = run.check()
  assert len(set(records.bytes_up)) > 1  # as long as they need to be
  dense = wire.layout(coding.PARAMS).nbytes
  for worker in range(WORKERS):
    down = records.bytes_down[records.worker == worker]
    assert down[0] == dense and down.max() <= dense  # to one that is new
  # A ticket is two updates in the mean, however workers take turns.
  assert records.bytes_down.min() < 0.7 * dense


@pytest.mark.parametrize("consistent", [False, True])
def test_each_shard_has_packets_of_its_own(tmp_path, consistent):
  with live(tmp_path, shards=2, consistent=consistent) as run:
    run.drive()
    records = run.check()
  assert all(0 < part.bytes_up.max() < 256 for part in records)


def test_what_a_killed_worker_had_kept_is_lost_and_said(tmp_path):
  with live(tmp_path, faults=[Fault(1, 4, "kill")]) as run:
    run.drive()
    (records,) = run.check()
    events = run.events
  leave = next(e for e in events if e.action == base.LEAVE)
  before = [
    e.job for e in events[: events.index(leave)]
    if (e.action, e.worker) == (base.RECEIVE, 1)
  ]
  last = np.flatnonzero((records.worker == 1) & (records.job == before[-1]))
  lost = records.residual_norm[last][0]
  assert lost > 0
  assert run.news == [
    "worker 1 has left, and the residual that its codec had kept to send later"
    f" is lost (RMS {lost:.3g})"
  ]
  # The next incarnation of worker 1, if it got a job, began without a residual.
  after = records.residual_norm[records.worker == 1][len(before) :]
  assert (after[:1] < lost).all()


@pytest.mark.parametrize(("shards", "index"), [(1, 0), (2, 1)])
def test_a_damaged_packet_is_refused_and_its_job_done_again(
  tmp_path, shards, index
):
  with live(tmp_path, shards=shards, consistent=shards > 1) as run:
    spoilt = []

    def damage(shard, memory, kind, slot, *rest):
      if (shard, kind) == (index, MESSAGES) and not spoilt:
        spoilt.append(slot)
        memory._slots[MESSAGES][slot][30] ^= 1

    run.site.told = damage
    run.drive()
    run.check()
    actions = [event.action for event in run.events]
  assert actions.count(base.REJECT) == 1
  refused = [line for line in run.news if "is refused" in line]
  assert len(refused) == 1
  assert "damaged: its CRC-32 differs" in refused[0]
  assert "\n" not in refused[0]


# Downward: workers are sent packed updates.


def updates_of(run):
  """Bytes of tickets that are updates, by (worker, seq), as they were written
  to slots."""
  written = {}

  def count(shard, memory, kind, slot, tree, stamp):
    if kind == UPDATES and stamp >> 40:  # or they lie beside a snapshot
      nbytes = memory.content_nbytes(kind, slot)
      written[(stamp >> 40) - 1, stamp & 2**40 - 1] = nbytes

  run.site.told = count
  return written


def test_bytes_down_are_those_in_slots_and_who_is_new_gets_the_parameters(
  tmp_path,
):
  faults = [Fault(1, 4, "kill")]
  with live(tmp_path, down=threshold(), faults=faults) as run:
    written = updates_of(run)
    run.drive()
    (records,) = run.check()
    events = run.events
  dense = wire.layout(PARAMS).nbytes
  expected, joined = [], set()
  for event in events:
    if event.action == base.JOIN:
      joined.add(event.worker)
    elif event.action == base.SEND and event.worker in joined:
      joined.remove(event.worker)
      assert event.key not in written
    elif event.action == base.RECEIVE:
      expected.append(written.get(event.key, dense))
  assert records.bytes_down.tolist() == expected
  assert max(written.values()) < dense


def test_damaged_updates_are_refused_and_their_worker_begins_anew(tmp_path):
  with live(tmp_path, down=threshold()) as run:
    spoilt = []

    def damage(shard, memory, kind, slot, tree, stamp):
      if kind == UPDATES and len(tree) and not spoilt:
        spoilt.append(slot)
        memory._slots[UPDATES][slot][30] ^= 1

    run.site.told = damage
    run.drive()
    run.check()
    actions = [event.action for event in run.events]
  assert actions.count(base.LOST) == 1
  cannot = [line for line in run.news if "cannot read the updates" in line]
  assert len(cannot) == 1
  assert cannot[0].endswith("it restarts with the complete parameters")
