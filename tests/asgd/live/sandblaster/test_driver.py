"""The driver of a live run, in threads: exits of processes change no
iterate."""

import threading
import time

import jax
import kit
import numpy as np
import pytest

from asgd import base, orders
from asgd.live.deadlines import Ladder
from asgd.live.failures import WorkersDie
from asgd.live.faults import Fault
from asgd.live.hosts.threads import ThreadHosts
from asgd.live.sandblaster import worker
from asgd.live.sandblaster.driver import Driver, HostMakers, Options, SavedRun
from asgd.live.sandblaster.run_log import LiveRunLog, last_time
from asgd.orders.trace import from_events
from asgd.sandblaster import PlannedKill, Settings, recompute
from asgd.sandblaster.run_log import Lengths

PORTIONS = 6
DATA = kit.normal(PORTIONS, 5, 4).astype(np.float32)
PARAMS = {
  "v": kit.normal(3, seed=2).astype(np.float32),
  "w": kit.normal(4, 3, seed=3).astype(np.float32),
}
SETTINGS = Settings(portions=PORTIONS, push_every=2, shards=2, history=4)


@jax.jit
def gradient(params, x):
  def loss(params):
    guess = jax.numpy.tanh(x @ params["w"]) @ params["v"]
    return ((guess - x[:, 0]) ** 2).mean()

  return jax.value_and_grad(loss)(params)


def work(params, portion):
  return gradient(params, DATA[portion])


def batch(worker, portion):
  return DATA[portion]


class Run:
  """A run in a folder, with one driver after the other."""

  def __init__(self, folder, faults=(), **settings):
    self.folder, self.faults = folder, faults
    self.settings = SETTINGS._replace(**settings)
    self.notes = None
    self.passed = 0.0  # seconds, beside those of the clock
    self.makers = HostMakers
    self.before_start = lambda index: None  # of a worker

  def make_worker(self, index):
    task = worker.PortionTask(
      *(self.settings, PARAMS, batch),
      lambda batches: lambda params, p: gradient(params, batches(0, p)),
      cache_size=3,
    )
    mine = [fault for fault in self.faults if fault.worker == index]

    def make_task():
      self.before_start(index)
      return task

    return lambda inside: worker.LiveWorker(
      inside, index, make_task, faults=mine
    )

  def note(self, notes):
    self.notes = notes

  def drive(self, saved=None, **options):
    lengths = Lengths(*saved.notes["lengths"]) if saved else None
    run_log = LiveRunLog(self.folder, lengths)
    began = time.monotonic() - last_time(run_log.rows)
    hosts = ThreadHosts(began=began)
    clock = hosts.clock
    hosts.clock = lambda: clock() + self.passed
    driver = Driver(
      *(self.settings, PARAMS),
      self.makers(hosts, self.folder, self.make_worker),
      run_log,
      workers=3,
      options=Options(Ladder(floor=60.0, start=60.0), **options),
      saved=saved,
      save_notes=self.note,
    )
    try:
      driver.start()
      yield driver
    finally:
      hosts.close()


def finish(driver, until=40):
  while driver.advance(until, 60.0) < until and not driver.ended:
    pass


def check(driver, deaths=0):
  """Asserts that the result equals that of its jobs recomputed in this
  process."""
  records = driver.run_log.records()
  again = recompute(
    driver._settings, PARAMS, work, set(records.job.tolist())
  )
  assert again.state == driver.state
  kit.same(again.params, driver.params())
  jobs = records.job[records.accepted].tolist()
  assert len(set(jobs)) == len(jobs)  # each counts once
  trace = from_events(driver.run_log.rows)
  assert orders.check(trace) == 3
  assert (trace.action == base.LEAVE).sum() == deaths
  times = [each.time for each in driver.run_log.iterates]
  assert times == sorted(times)
  assert [each.iteration for each in driver.run_log.iterates] == list(
    range(driver.state.iteration + 1)
  )


def test_it_comes_to_what_its_jobs_come_to(tmp_path):
  for driver in Run(tmp_path).drive():
    finish(driver)
    assert driver.received == 40
    check(driver)
    assert driver.replaced == {"worker": 0, "shard": 0}


def test_workers_do_not_hang_while_a_shard_comes_back(tmp_path):
  run = Run(tmp_path, failures=(PlannedKill(0.0, "shard", 1),))

  class Slow(HostMakers):
    def shard(self, *args):
      def make(inside):
        run.passed += 0.0 if args[-1] else 1000.0  # unless from an image
        return plain(inside)

      plain = super().shard(*args)
      return make

  run.makers = Slow
  for driver in run.drive():
    finish(driver)
    assert run.passed == 1000.0
    check(driver)
    assert driver.replaced == {"worker": 0, "shard": 1}


def test_a_driver_that_is_stopped_while_workers_start_ends_none(
  tmp_path, monkeypatch
):
  run, looks = Run(tmp_path), []
  handle_events = Driver._handle_events
  may_start = threading.Event()
  run.before_start = lambda index: may_start.wait()

  def look(self, *args):
    handle_events(self, *args)
    looks.append(args)
    if len(looks) == 1:
      run.passed += 1000.0
    if len(looks) == 3:
      may_start.set()

  monkeypatch.setattr(Driver, "_handle_events", look)
  for driver in run.drive():
    finish(driver)
    check(driver)
    assert driver.replaced == {"worker": 0, "shard": 0}


@pytest.mark.parametrize("how", ["memory", "image"])
def test_another_driver_goes_on_to_the_same_bits(tmp_path, how):
  run, saved, rows = Run(tmp_path), None, 0
  for until in (4, 11, 23, 40):
    for driver in run.drive(saved):
      assert len(driver.run_log.rows) >= rows
      finish(driver, until)
      if how == "image":
        saved = driver.save()
      else:  # as if the process was killed
        saved = SavedRun(run.notes, None)
      rows = saved.notes["lengths"][0]
      last = driver.state, driver.params()
      records = driver.run_log.records()
  again = recompute(SETTINGS, PARAMS, work, set(records.job.tolist()))
  assert last[0] == again.state
  kit.same(last[1], again.params)
  log = LiveRunLog(tmp_path, Lengths(rows, 0, 0))
  assert orders.check(from_events(log.rows))


def test_a_checkpoint_is_of_use_after_a_driver_that_resumed_from_memory(
  tmp_path,
):
  """The earlier driver cut the files back to the lengths of the checkpoint."""
  run = Run(tmp_path)
  for driver in run.drive():
    finish(driver, 8)
    saved = driver.save()
  for driver in run.drive(SavedRun(run.notes, None)):
    finish(driver, 10)
    check(driver, deaths=3)
  for driver in run.drive(saved):
    assert driver.received == 8
    finish(driver)
    jobs = set(driver.run_log.records().job.tolist())
    assert recompute(SETTINGS, PARAMS, work, jobs).state == driver.state
    assert orders.check(from_events(driver.run_log.rows)) == 3


def test_without_anybody_left_it_says_so(tmp_path):
  faults = [Fault(worker, 0, "kill") for worker in range(3)]
  for driver in Run(tmp_path, faults).drive(refill=False):
    with pytest.raises(WorkersDie, match="config.live.refill=True"):
      finish(driver)


def test_what_a_job_raises_ends_the_run(tmp_path, monkeypatch):
  def broken(worker, portion):
    if portion:
      raise ValueError("no such portion")
    return DATA[portion]

  monkeypatch.setitem(globals(), "batch", broken)
  for driver in Run(tmp_path).drive():
    with pytest.raises(ValueError, match="no such portion"):
      finish(driver)
