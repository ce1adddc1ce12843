"""Live tables in threads: no update is lost when workers and shards are killed,
and a replay of the traces gives the same bits."""

import functools
import time

import numpy as np
import powers_kit
import pytest
from powers_kit import JOBS, ROWS, WORKERS, first, keys, whole

from asgd import base, tables
from asgd.live.deadlines import Ladder
from asgd.live.failures import ShardsDie
from asgd.live.faults import Script
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.journal import read_journal
from asgd.live.tables import cluster as cluster_lib
from asgd.live.tables import files
from asgd.live.tables.job_journal import JobJournal
from asgd.live.tables.shard import ShardHost
from asgd.live.tables.worker import WorkerHost
from asgd.orders.trace import Event
from asgd.tables import division as division_lib
from asgd.tables import replay
from asgd.tables.requests import ClockMessage
from asgd.tables.shard import TableShard
from asgd.tables.worker import TableWorker

SHARDS = 2
SSP = dict(consistency="ssp", bound=1)


class Run:
  """A cluster of threads, and functions to call when a job is computed."""

  def __init__(self, folder, model, do=None, **options):
    self.folder, self.do = folder, dict(do or {})
    self.hot = options.pop("hot", ROWS)
    self.settings = tables.table(1.0, WORKERS, clock_every=2, **model)
    self.division = division_lib.divide(first(), SHARDS)
    self.hosts = ThreadHosts(began=time.monotonic())
    options = {"ladder": Ladder(), "refill": True, **options}
    self.cluster = cluster_lib.TableCluster(
      self.hosts,
      cluster_lib.Makers(self.shard, self.worker),
      folder,
      shards=SHARDS,
      workers=WORKERS,
      **options,
    )

  def gradient(self, rows, job, keys, *_):
    if job in self.do:  # once
      self.do.pop(job)(self)
    return powers_kit.gradient(rows, job)

  @property
  def work(self):
    mine = functools.partial(keys, hot=self.hot)
    return tables.Work(lambda worker, job: job, mine, self.gradient)

  def shard(self, index, image):
    def make():
      server = self.division.server(index, first(), self.settings, WORKERS)
      return TableShard(index, server)

    return lambda inside: self.shard_host(
      inside, make, self.folder, self.folder, index, clock_every=2,
      image=image,
    )

  shard_host = ShardHost

  def worker(self, index, shards, image):
    def make(incarnation, work):
      return TableWorker(
        *(index, incarnation, self.settings, self.division, work),
        workers=WORKERS,
        jobs=JOBS,
      )

    def start(inside):
      return WorkerHost(
        *(inside, make, self.work),
        JobJournal(
          *(inside, self.folder, index),
          resumes=image is not None,
          memory=self.folder,
        ),
        shards=shards,
        script=Script((), kill=inside.kill, wait=inside.wait),
        image=image,
      )

    return start

  def cuts(self):
    """Returns the cuts of each move, from the trace of the first shard."""
    rows = read_journal(files.order_path(self.folder, 0))
    cuts_of = self.division.cuts_of
    return [cuts_of(row.totals) for row in rows if row.action == base.MOVE]

  def records(self):
    return files.FILES.read_all(self.folder, WORKERS)

  def train(self):
    self.cluster.start()
    return self.finish()

  def finish(self):
    news = []
    while not self.cluster.finished:
      news += self.cluster.check(len(self.records().loss))
      time.sleep(0.002)
    self.tables = self.division.join(self.cluster.rows())
    self.news = news
    return self

  def check_replay(self):
    """Asserts that a replay of traces gives the same tables and records."""
    again = replay.replay(
      *(self.settings, first(), self.division, self.work),
      files.read_orders(self.folder, SHARDS, WORKERS),
      jobs=JOBS,
    )
    for name, rows in self.tables.items():
      assert rows.tobytes() == again.tables[name].tobytes()
    parts = [files.columns(rows) for rows in again.records]
    pairs = zip(files.join_by_time(parts), self.records(), strict=True)
    for mine, theirs in pairs:
      np.testing.assert_array_equal(mine, theirs)
    files.read_trace(self.folder, WORKERS)


@pytest.fixture
def run_of(tmp_path):
  runs = []

  def make(*args, **options):
    runs.append(Run(tmp_path, *args, **options))
    return runs[-1]

  yield make
  for run in runs:
    run.cluster.close()


def check_whole(run):
  for name, rows in whole(hot=run.hot).items():
    np.testing.assert_array_equal(run.tables[name], rows)


def kill(kind, index):
  return lambda run: run.hosts.kill(kind, index)


@pytest.mark.parametrize(
  "model",
  [
    dict(consistency="bulk_synchronous"),
    SSP,
    dict(consistency="essp", bound=1),
    dict(consistency="managed", bound=2, budget=2),
    dict(consistency="managed", bound=2, budget=2, bandwidth=1e4),
    dict(consistency="value_bounded", threshold=3.0),
    dict(consistency="asynchronous"),
  ],
  ids=lambda model: model["consistency"],
)
def test_a_shard_and_a_worker_die_and_nothing_is_lost(run_of, model):
  at = {7: kill("shard", 1), 10: kill("shard", 0), 11: kill("worker", 2)}
  run = run_of(model, at).train()
  assert run.cluster.replaced == {"worker": 1, "shard": 2}
  assert any("worker 2 died and is replaced" in line for line in run.news)
  check_whole(run)
  run.check_replay()
  bound = model.get("bound", 99)
  assert run.records().staleness.max() <= bound


def test_a_run_that_begins_again_begins_without_what_shards_kept(run_of):
  one = run_of(SSP, {7: kill("shard", 1)}).train()  # which made an image
  one.cluster.close()
  for path in [*one.folder.glob("*.csv"), *one.folder.glob("*.bin")]:
    path.unlink()
  two = run_of(SSP).train()
  check_whole(two)
  two.check_replay()


def test_nobody_waits_for_one_who_is_not_replaced(run_of):
  run = run_of(SSP, {4: kill("worker", 1)}, refill=False).train()
  done = set(run.records().job.tolist())
  # No shard has received a message of the worker's first clock.
  assert done == {j for j in range(WORKERS * JOBS) if j % WORKERS != 1}
  for name, rows in whole(done).items():
    np.testing.assert_array_equal(run.tables[name], rows)
  run.check_replay()


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("dies", [False, True])
def test_a_run_at_rest_goes_on_from_images(run_of, moves, dies):
  """`dies`: a shard dies after it has removed the memory of the first run, and
  before it has stored the image."""
  left = [dies]

  class Dying(ShardHost):
    def _remove_memory(self):
      super()._remove_memory()
      if self._folder.name == "shard-1" and left[0]:
        left[0] = False
        self._inside.kill()

  model = dict(consistency="essp", bound=1, rebalance_every=moves)
  one = run_of(model)
  one.cluster.start()
  while len(one.cuts()) < moves:
    one.cluster.check(0)
    time.sleep(0.002)
  assert one.cluster.pause()
  done = len(one.records().loss)
  assert done % 2 == 0  # all have ended the same clock
  images = one.cluster.images()
  one.cluster.close()
  two = run_of(model)
  two.shard_host = Dying
  two.cluster.start(images)
  two.finish()
  assert len(two.cuts()) == 2 * moves
  check_whole(two)
  two.check_replay()


def kill_before(run, at):
  """Kills hosts just before the driver asks shards something: `at` is
  (method, shard or None for all) -> (kind, index)."""
  ask, at = run.cluster._ask, dict(at)

  def first_kill(method, *args, among=None):
    if dead := at.pop((method, among and among[0]), None):
      run.hosts.kill(*dead)
    return ask(method, *args, among=among)

  run.cluster._ask = first_kill


@pytest.mark.parametrize(
  ("model", "at"),
  [
    (dict(consistency="bulk_synchronous"), {}),
    (SSP, {("load", None): ("shard", 1), ("give", None): ("shard", 0)}),
    (dict(consistency="essp", bound=1), {("move", 1): ("shard", 0)}),
    # Kill a shard that has not received its rows, and a worker that rests.
    (
      dict(consistency="managed", bound=2, budget=2),
      {("move", 0): ("shard", 1), ("move", 1): ("worker", 1)},
    ),
  ],
  ids=["no one", "before", "after", "between"],
)
def test_ranges_move_and_who_dies_comes_back_with_them(run_of, model, at):
  # After the first move kill a shard and a worker while workers resume.
  do = {6: kill("shard", 1), 8: kill("worker", 2)}
  run = run_of({**model, "rebalance_every": 1}, do, hot=4)
  kill_before(run, at)
  run.train()
  assert run.division.ranges["v"].cuts == (0, 3, 7)
  first, second = run.cuts()
  assert first["v"] == second["v"] == [0, 2, 7]  # rows 0 to 3 are hot
  died = [kind for kind, _ in at.values()]
  assert run.cluster.replaced == {
    kind: 1 + died.count(kind) for kind in ("worker", "shard")
  }
  check_whole(run)
  run.check_replay()


def test_ranges_move_without_one_who_is_not_replaced(run_of):
  do = {4: kill("worker", 1)}
  run = run_of({**SSP, "rebalance_every": 2}, do, hot=4, refill=False).train()
  assert len(run.cuts()) == 1
  done = set(run.records().job.tolist())
  for name, rows in whole(done, hot=4).items():
    np.testing.assert_array_equal(run.tables[name], rows)
  run.check_replay()


def test_one_who_died_before_it_joined_has_no_rows(run_of):
  run = run_of(SSP, refill=False)
  start = run.worker

  def worker(index, shards, image):
    make = start(index, shards, image)
    return make if index else lambda inside: inside.kill()

  run.worker = worker
  run.cluster._makers = cluster_lib.Makers(run.shard, worker)
  run.train()
  assert "worker 0 died; the run continues without it" in run.news
  run.check_replay()


def dying(run, times):
  """Kills the first hosts of shard 1 while they are made."""
  left = [True] * times

  def make(inside, make, run_folder, memory, index, **options):
    if index == 1 and left:
      left.pop()
      inside.kill()
    return ShardHost(inside, make, run_folder, memory, index, **options)

  run.shard_host = make


def test_a_shard_that_dies_as_it_comes_back_comes_back_again(run_of):
  run = run_of(SSP, {7: lambda run: (dying(run, 2), kill("shard", 1)(run))})
  dying(run, 1)
  run.train()
  assert run.cluster.replaced == {"worker": 0, "shard": 4}
  check_whole(run)
  run.check_replay()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_shard_that_dies_as_it_removes_a_worker_removes_it_once(
  run_of, shard
):
  left = [shard]

  class Dying(ShardHost):
    def leave(self, worker):
      super().leave(worker)
      if self._folder.name == f"shard-{shard}" and left:
        left.pop()
        self._inside.kill()

  run = run_of(SSP, {4: kill("worker", 1)}, refill=False)
  run.shard_host = Dying
  run.train()
  assert run.cluster.replaced == {"worker": 0, "shard": 1}
  run.check_replay()


def test_a_shard_that_dies_over_and_over_ends_the_run(run_of):
  run = run_of(SSP)
  dying(run, 100)
  with pytest.raises(ShardsDie, match="shards ended 11 times before a mess"):
    run.train()


def test_an_image_that_was_changed_is_refused(tmp_path):
  files.write_image(tmp_path, b"image", 3)
  assert files.read_image(tmp_path) == (3, b"image")
  path = tmp_path / "snapshots"
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match="snapshots is not what the run wrote"):
    files.read_image(tmp_path)


def test_a_message_that_was_changed_is_none(tmp_path):
  row = Event(0.5, 1, 2, 3, base.SEND)
  message = ClockMessage(1, 2, [{}], [])
  files.LastMessage(tmp_path, 1, 0).write(row, message)
  after = files.LastMessage(tmp_path, 1, 1)
  assert after.read([row]) == (row, message)
  (path,) = tmp_path.glob("*.message")
  data = path.read_bytes()
  for changed in (data[:-1], b"", b"\n", b"x" + data):
    path.write_bytes(changed)
    assert after.read([row]) is None


def test_tasks_of_a_table_in_a_host():
  hosts = ThreadHosts(began=time.monotonic())
  host = hosts.start("shard", 0, lambda inside: tables.Table(np.zeros((4, 1))))
  tasks = tables.Tasks(host.call, delay=1)
  for key in (0, 1, 2):
    tasks.push([key], np.ones((1, 1)))
  rows = tasks.pull([0, 1, 2, 3], after=[2])
  assert tasks.result(rows).tolist() == [[1.0], [1.0], [1.0], [0.0]]
  hosts.close()
