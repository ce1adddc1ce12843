"""Live runs in processes: each is what its traces say, whoever is killed."""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest

from asgd import algorithms, base, compression, orders, sharding, simulator
from asgd import worker as worker_lib
from asgd.live import processes
from asgd.live.deadlines import Ladder
from asgd.live.duty import Duty
from asgd.live.faults import Fault
from asgd.live.hosts.site import Site
from asgd.live.journal import journal_path, read_journal
from asgd.live.links.base import Disconnected
from asgd.live.records import read_records, records_path
from asgd.live.server.cluster import ServerCluster
from asgd.live.setup import Setup
from asgd.orders.protocol import Rules
from asgd.orders.trace import from_events

ray = pytest.importorskip("ray")
pytestmark = [
  *(pytest.mark.process, pytest.mark.slow),
]

LONG = 300.0  # seconds; nothing here takes as long, on a busy machine too
WORKERS = 2
PATIENT = Ladder(floor=LONG)  # for those who are held up on purpose
ROOT = jax.random.key(0)


# What runs in the processes, which import this module.


def first_params():
  keys = jax.random.split(ROOT)
  return jax.device_get(
    {
      "into": jax.random.normal(keys[0], (6, 8)),
      "bias": jnp.zeros(8),
      "out": jax.random.normal(keys[1], (8,)),
      "scale": jnp.float32(1.0),
    }
  )


def loss(params, batch, key):
  del key
  hidden = jnp.tanh(batch @ params["into"] + params["bias"])
  error = hidden @ params["out"] * params["scale"] - batch[:, 0]
  return jnp.mean(error**2), worker_lib.Aux(())


def make_recipe(name):
  return algorithms.build(name.partition("+")[0], 0.002, WORKERS)


def codec_of(name, way=1):
  """A codec of RECIPE+CODEC or RECIPE+CODEC+CODEC: that of messages, or with 2
  that of updates."""
  codecs = name.split("+")
  return compression.named(codecs[way]) if len(codecs) > way else None


def make_server(name):
  recipe, codec, down = make_recipe(name), codec_of(name), codec_of(name, 2)
  if down:
    algorithm = compression.compressed_updates(recipe.algorithm, down)
    recipe = recipe._replace(algorithm=algorithm)
  server = recipe.server()
  return compression.decoding(server, codec) if codec else server


def make_worker(name, plan=None):
  worker, codec = make_recipe(name).make_worker(loss), codec_of(name)
  return compression.compressed(worker, codec, plan) if codec else worker


def batch(folder, held, worker, job):
  """Holds those up who start a job from `held` on, until the gate is open."""
  while held <= job and not (Path(folder) / "open").exists():
    time.sleep(0.01)
  rng = np.random.default_rng((worker, job))
  return rng.standard_normal((4, 6)).astype(np.float32)


def make_duty(name, setup, batch):
  params, plan = first_params(), None
  if setup.shards > 1:
    plan = sharding.make_plan(params, setup.shards)
  worker = make_worker(name, plan)
  return Duty(
    *(simulator.compile_work(worker), worker.init, batch, ROOT, params, plan),
    consistent=setup.consistent,
    depth=setup.rules.depth,
    codec=codec_of(name),
    codec_down=codec_of(name, 2),
  )


def fail(text):
  raise ValueError(text)


# What the kernel knows.


def children():
  """Returns the processes that this one has started, and those they have."""
  parents = {}
  for path in Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      text = path.read_text()
      fields = text[text.rindex(")") + 1 :].split()
      if fields[0] not in "ZX":
        parents[int(path.parent.name)] = int(fields[1])
  found, new = set(), {os.getpid()}
  while new:
    new = {pid for pid, parent in parents.items() if parent in new} - found
    found |= new
  return found


def listening(pids):
  """Returns the addresses where processes listen, as the kernel writes them."""
  inodes = set()
  for pid in pids:
    for path in Path(f"/proc/{pid}/fd").glob("*"):
      with contextlib.suppress(OSError):
        inodes.add(os.readlink(path).removeprefix("socket:[").rstrip("]"))
  rows = [
    line.split()
    for name in ("tcp", "tcp6")
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
  ]
  return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


# Runs.

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def session():
  """Ray, as engine `ray` starts it, and what is left when it has ended."""
  from asgd.experiment import ray_runtime  # actors do without it

  before = children()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    ray_runtime.start(None, allow_network=False)
  yield
  mine = children() - before
  ray_runtime.stop()
  kit.until(lambda: not mine & children(), f"the end of {mine & children()}")
  assert not list(Path("/dev/shm").glob(f"asgd-test-{os.getpid()}-*"))


class Live:
  """A run."""

  def __init__(self, folder, name, rules, jobs, held=None, **options):
    compress = options.pop("compress", None)
    sockets = options.pop("sockets", True)
    workers = options.pop("workers", WORKERS)
    ours = {"faults", "refill", "resources", "make_server", "make_duty"}
    given = {key: options.pop(key) for key in ours & set(options)}
    self.folder, self.name, self.compress = folder, name, compress
    setup = {"ladder": PATIENT, **options}
    self.setup = Setup(rules, workers, jobs, **setup)
    self.site = Site(
      self.setup,
      str(folder),
      f"/dev/shm/asgd-test-{os.getpid()}-{next(NUMBERS)}",
      time.monotonic(),
      compress=compress,
      sockets=sockets,
    )
    self.held = jobs if held is None else held
    self.batch = functools.partial(batch, str(folder), self.held)
    duty = functools.partial(make_duty, name, self.setup, self.batch)
    self.news = []
    # These import Ray.
    from asgd.live.hosts.actors import ActorHosts
    from asgd.live.server.makers import ServerMakers

    parts, plan = [first_params()], None
    if self.setup.shards > 1:
      plan = sharding.make_plan(first_params(), self.setup.shards)
      parts = sharding.split(plan, first_params())
    hosts = ActorHosts(self.site, resources=given.pop("resources", None))
    makers = ServerMakers(
      hosts.site,
      given.pop("make_server", functools.partial(make_server, name)),
      parts,
      faults=given.pop("faults", ()),
    )
    duty = given.pop("make_duty", duty)
    self.cluster = ServerCluster(
      *(self.setup, plan, hosts, makers, duty), **given
    )

  def remove_memory(self):
    shutil.rmtree(self.site.memory, ignore_errors=True)

  def pids(self):
    return processes.pids(self.site.memory)

  def look(self):
    self.news += self.cluster.check()

  def status(self):
    return kit.until(self.cluster.status, "an answer", self.look)

  def wait_for(self, condition, what):
    """Waits for a condition on the lead's status."""
    kit.until(lambda: condition(self.status()[0]), what, self.look)

  def wait_for_gate(self):
    """Until all before the gate is received, and everybody stands there. Who
    has more than one ticket may stand there before it handed in the others."""
    ahead = self.setup.workers * (self.setup.rules.depth - 1)

    def there(lead):
      everybody = len(lead["workers"]) == self.setup.workers
      return everybody and self.held - lead["received"] <= ahead

    self.wait_for(there, "everybody at the gate")

  def open(self):
    (self.folder / "open").touch()

  def finish(self):
    self.open()
    cluster = self.cluster
    kit.until(
      lambda: cluster.status() and cluster.finished, "the end", self.look
    )

  def events(self, index=0):
    return read_journal(journal_path(self.folder, index))

  def rows(self, action, index=0):
    return [event for event in self.events(index) if event.action == action]

  def replay(self):
    """Returns the parameters, and the records of each shard."""
    plan = None
    if self.setup.shards > 1:
      plan = sharding.make_plan(first_params(), self.setup.shards)
    server, worker = make_server(self.name), make_worker(self.name, plan)
    common = dict(batch=self.batch, root=ROOT)
    journals = [self.events(index) for index in range(self.setup.shards)]
    traces = [from_events(events) for events in journals]
    for trace in traces:
      orders.check(trace, depth=99)
    if len(traces) == 1:
      host = simulator.make_host(server, worker, wire=self.compress)
      simulation = host.init(first_params(), WORKERS)
      simulation, records = host.run(
        simulation, traces[0], len(traces[0].time), **common
      )
      return simulation.server.params, [records]
    replayed = simulator.run_sharded(
      *(server, worker, first_params(), traces),
      **dict(workers=WORKERS, wire=self.compress, **common),
    )
    plan = sharding.make_plan(first_params(), len(traces))
    parts = [jax.device_get(state.params) for state in replayed.states]
    return sharding.join(plan, parts), replayed.records

  def check(self):
    """Every job was received once, and the replay has the same bits."""
    for index in range(self.setup.shards):
      jobs = [event.job for event in self.rows(base.RECEIVE, index)]
      assert sorted(jobs) == list(range(self.setup.jobs))
    params, records = self.replay()
    live = self.cluster.params()
    assert jax.tree.structure(live) == jax.tree.structure(params)
    for a, b in zip(*map(jax.tree.leaves, (live, params)), strict=True):
      np.testing.assert_array_equal(a, b)
    for index, expected in enumerate(records):
      held = read_records(records_path(self.folder, index))
      if not self.setup.log:  # some are lost with the updates
        kept = np.isin(expected.job, held.job)
        expected = base.Records(*(column[kept] for column in expected))
      for a, b in zip(held, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def live(session, tmp_path):
  """Makes runs, which are closed at the end, whatever happens."""
  with contextlib.ExitStack() as stack:

    def make(*args, **kwargs):
      run = Live(tmp_path, *args, **kwargs)
      stack.callback(run.remove_memory)
      stack.callback(run.cluster.close)
      return run

    yield make


@pytest.mark.parametrize(
  ("name", "workers", "shards", "options"),
  [
    ("dana_zero", 2, 1, {}),
    ("dana_zero", 1, 1, {"sockets": False}),  # as on several machines
    ("nag_asgd", 1, 2, {}),
    ("dana_zero", 1, 2, {"consistent": True}),
    ("asgd+onebit+onebit", 1, 2, {"sockets": False}),
  ],
  ids=["one", "one-far", "two", "two-consistent", "two-far-packed"],
)
def test_a_worker_and_all_shards_are_killed(
  live, name, workers, shards, options
):
  run = live(
    *(name, Rules(), 20, 10),
    **dict(workers=workers, shards=shards, log=4, **options),
  )
  run.cluster.start()
  run.wait_for_gate()
  before, last = run.pids(), workers - 1
  assert sorted(before["worker"]) == list(range(workers))
  assert sorted(before["shard"]) == list(range(shards))
  for pid in (before["worker"][last], *before["shard"].values()):
    os.kill(pid, signal.SIGKILL)
  dead = {"worker": 1, "shard": shards}
  kit.until(lambda: run.cluster.replaced == dead, "their replacement", run.look)
  run.wait_for(lambda lead: len(lead["workers"]) == workers, "all workers")
  run.finish()
  run.check()
  assert run.cluster.replaced == dead
  assert sorted(run.news) == [
    *(f"shard {index} died; another takes over" for index in range(shards)),
    f"worker {last} died; another takes its place",
  ]
  after = run.pids()
  assert after["shard"].keys() == before["shard"].keys()
  assert not set(after["shard"].values()) & set(before["shard"].values())
  assert [event.worker for event in run.rows(base.LOST)] == [last]
  joined = [(event.worker, event.job) for event in run.rows(base.JOIN)]
  first = [(worker, 0) for worker in range(workers)]
  assert sorted(joined) == [*first, (last, 1)]
  assert not run.rows(base.ROLLBACK)
  assert len(run.rows(base.RECEIVE)) == 20


def test_without_a_log_a_shard_goes_back_and_says_so(live):
  run = live(
    *("dana_zero", Rules(), 20, 10),
    **dict(workers=1, log=0, snapshot_seconds=LONG),
  )
  run.cluster.start()
  run.wait_for_gate()
  os.kill(run.pids()["shard"][0], signal.SIGKILL)
  run.wait_for(
    lambda lead: run.cluster.replaced["shard"] == 1, "its replacement"
  )
  run.finish()
  run.check()
  (rollback,) = run.rows(base.ROLLBACK)
  assert rollback.job == 0  # there was no snapshot: 10 updates are lost
  assert len(run.rows(base.RECEIVE)) == 20


@pytest.fixture(scope="module")
def at_the_gate(session, tmp_path_factory):
  """A run that stands at the gate, with two tickets a worker."""
  run = Live(
    tmp_path_factory.mktemp("gate"),
    *("dana_zero", Rules(depth=2), 30, 10),
    compress="bfloat16",
  )
  try:
    run.cluster.start()
    run.wait_for_gate()
    yield run
  finally:
    run.cluster.close()
    run.remove_memory()


def test_nobody_listens_beyond_this_machine(at_the_gate):
  mine = children()
  pids = at_the_gate.pids()
  assert set(pids["worker"].values()) | set(pids["shard"].values()) <= mine
  found = listening(mine)
  assert found  # of Ray
  loopback = ("0100007F:", "00000000000000000000000001000000:")
  mapped = "0000000000000000FFFF00000100007F:"
  assert [x for x in found if not x.startswith((*loopback, mapped))] == []


def test_who_is_asked_to_leave_finishes_what_it_has(at_the_gate):
  run = at_the_gate
  os.kill(run.pids()["worker"][1], signal.SIGTERM)
  # Its replacement is not to come too late.
  kit.until(lambda: (run.open(), len(run.rows(base.LEAVE)))[1], "its leaving")
  run.finish()
  run.check()
  assert [event.worker for event in run.rows(base.LEAVE)][:1] == [1]
  assert not run.rows(base.LOST)
  # The run may be over before the actor is; if not, another takes its place.
  assert run.cluster.replaced["worker"] == len(run.news) <= 1


def test_faults_on_purpose_are_all_injected_and_survived(live):
  faults = [
    Fault(0, 3, "double"),
    Fault(0, 6, "nan"),
    Fault(0, 12, "hang"),
    Fault(1, 4, "lose"),
    Fault(1, 8, "reorder"),
    Fault(1, 14, "kill"),
  ]
  run = live(
    *("dana_slim", Rules(bound=3), 80, 1),
    **dict(faults=faults, ladder=Ladder(floor=2.0, start=20.0), log=4),
  )
  run.cluster.start()
  run.wait_for_gate()
  run.finish()
  run.check()
  written = (run.folder / "faults.csv").read_text().splitlines()
  assert sorted(written) == sorted(",".join(map(str, f)) for f in faults)
  (refused,) = run.rows(base.REJECT)
  assert (refused.worker, refused.seq) == (0, 6)
  lost = {(event.worker, event.seq) for event in run.rows(base.LOST)}
  assert {(0, 12), (1, 14)} <= lost
  assert "worker 1 died; another takes its place" in run.news


@pytest.mark.parametrize(
  ("broken", "says"),
  [
    ("make_server", "shard 0 cannot start: no such algorithm"),
    ("make_duty", "worker 0 failed: no such algorithm"),
  ],
)
def test_what_cannot_start_is_one_error_that_names_it(live, broken, says):
  maker = functools.partial(fail, "no such algorithm")
  run = live("asgd", Rules(), 10, workers=1, **{broken: maker})
  run.cluster.start()
  with pytest.raises(ValueError, match=rf"^{says}$"):
    kit.until(lambda: False, "an error", run.look)


def fail_from_now_on(shard):
  def tick(now):
    raise ValueError("no space left")

  shard.tick = tick


def test_nobody_waits_for_a_shard_that_failed_as_it_served(live):
  run = live("asgd", Rules(), 20, 10, workers=1, shards=2)
  run.cluster.start()
  run.wait_for_gate()
  run.cluster._ask(fail_from_now_on)
  with pytest.raises(Disconnected):
    kit.until(lambda: run.cluster.images() and None, "an end of the answers")
  with pytest.raises(Disconnected):
    run.cluster.params()
  with pytest.raises(ValueError, match="^shard [01] failed: no space left$"):
    kit.until(lambda: False, "an error", run.look)


def test_what_ray_cannot_give_is_refused(live):
  with pytest.raises(ValueError, match="2000 GPU, and it has"):
    live("asgd", Rules(), 10, resources={"num_gpus": 1000})


# Without Ray.


def test_what_a_killed_driver_left_is_ended(tmp_path):
  script = (
    "import sys, time; from asgd.live import processes;"
    " processes.write_pid(sys.argv[1], 'worker', 3); print(flush=True);"
    " time.sleep(60)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", script, str(tmp_path)],
    cwd=Path(__file__).parents[3],
    stdout=subprocess.PIPE,
  )
  try:
    assert process.stdout.readline()
    assert processes.pids(tmp_path) == {"worker": {3: process.pid}}
    # Somebody else has the number now.
    (tmp_path / "shard-0.pid").write_text(f"{os.getpid()} 0")
    processes.end_all(tmp_path)
    assert process.wait(LONG) == -signal.SIGKILL
  finally:
    process.kill()
    process.communicate()
  assert processes.pids(tmp_path) == {}
  shutil.rmtree(tmp_path)
  assert processes.pids(tmp_path) == {}
