"""A protocol of a user's own: one model walks from worker to worker.

There is no server. The worker that has the model computes a gradient on a batch
of its own, takes a step, and sends the model on to the next one (a random walk
on a ring; Johansson et al., SIAM J. Optimization 20(3), 2009). So nothing is
ever stale, and one worker works at a time.

In real time the driver lends the model to a worker of a thread for each step,
and gets it back; so a worker that dies loses a step, and no model.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from asgd import base, names
from asgd.experiment import checkpoint, engines
from asgd.experiment.engines import (
  learning_rates,
  live,
  live_engine,
  outcomes,
  server_results,
)
from asgd.experiment.engines.simulated import SimulatedEngine
from asgd.experiment.protocol import Protocol, Recomputed, Refusal, Runner
from asgd.experiment.protocols import sandblaster, server
from asgd.live import faults
from asgd.live.cluster import Cluster
from asgd.live.hosts.base import WORKER
from asgd.live.records import read_records, records_path
from asgd.live.sandblaster.run_log import LiveRunLog
from asgd.live.supervisor import Supervisor, answer_of
from asgd.orders.trace import NO_SEQ, Event, follow
from asgd.simulator import concatenate


class Settings(NamedTuple):
  """A step, and how many batches a worker takes before it sends it on."""

  learning_rate: float
  stay: int = 1


def walk(learning_rate, workers, *, stay: int = 1) -> Settings:
  """One model that walks around a ring of workers."""
  del workers
  if type(stay) is not int or stay < 1:
    raise ValueError(f"stay must be a whole number from 1, not {stay!r}")
  return Settings(learning_rate, stay)


@dataclasses.dataclass(frozen=True, eq=False)
class WalkPlan(outcomes.OutcomePlan):
  """What the cells of a run share."""

  run: Any
  workers: int
  problem: Any
  settings: Settings
  messages: int
  learning_rate: float
  schedule: float
  batches: int = 1
  curvature_limit: float = math.nan


def plan(experiment, run, workers) -> WalkPlan:
  problem, rate = experiment.problem_of(run), run.config["learning_rate"]
  given = {"learning_rate": rate, "workers": workers, **run.options}
  settings = names.call("recipe", run.recipe, walk, given)
  messages = round(learning_rates.budget_batches(run, problem))
  return WalkPlan(run, workers, problem, settings, messages, rate, rate)


class Steps:
  """The steps of a cell, wherever they are computed."""

  def __init__(self, plan, seed):
    self.plan = plan
    init_key, self._root = jax.random.split(jax.random.key(seed))
    self.params = jax.device_get(plan.problem.init(init_key))  # the first
    self._batch = plan.problem.batches(seed, plan.workers)

  def worker(self, job):
    """Who does a job."""
    return job // self.plan.settings.stay % self.plan.workers

  def step(self, params, job):
    """Returns (parameters, columns of a record from its loss on)."""
    plan, batch = self.plan, self._batch(self.worker(job), job)
    key = jax.random.fold_in(self._root, job)
    (loss, _), gradient = plan.gradient(params, batch, key)
    step = jax.tree.map(lambda g: -plan.learning_rate * g, gradient)
    params = jax.tree.map(lambda x, s: x + s, params, step)
    norms = [
      math.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(tree)))
      for tree in (gradient, step)
    ]
    moved = job // plan.settings.stay != (job + 1) // plan.settings.stay
    nbytes = moved * sum(x.nbytes for x in jax.tree.leaves(params))
    return jax.device_get(params), (
      *(float(loss), True, *norms, nbytes, nbytes, 0.0),
    )


class WalkEngine(SimulatedEngine):
  """A cell of a walk, in simulated time."""

  def _make_simulation(self, seed, params, root, restore):
    plan = self._plan
    self._steps = Steps(plan, seed)
    self._times = [plan.durations(seed).stream(i) for i in range(plan.workers)]
    self._params, self._now = self._steps.params, 0.0
    self._record_parts = [concatenate([])]

    def unpack(saved):
      records = checkpoint.any_shapes(self._record_parts[0])
      return saved.tree({"params": self._params, "records": records})

    restored = restore(unpack)
    if restored is not None:
      self._params = restored["params"]
      self._record_parts = [base.Records(*restored["records"])]
      for worker in self._record_parts[0].worker.tolist():
        self._now += next(self._times[worker])
    return len(self._record_parts[0].loss)

  def _run(self, end):
    rows = []
    for job in range(self.done, end):
      worker = self._steps.worker(job)
      self._params, rest = self._steps.step(self._params, job)
      self._now += next(self._times[worker])
      rows.append((job + 1, self._now, worker, job, 0, 0.0, *rest))
    columns = zip(*rows, strict=True)
    like = self._record_parts[0]
    part = base.Records(
      *(np.array(c, x.dtype) for c, x in zip(columns, like, strict=True))
    )
    self._record_parts.append(part)
    return part

  def snapshot(self):
    clock = {"time": self._now}
    return engines.Snapshot(self._params, self.done, self.done, clock)

  def columns(self):
    return {**columns(self.records()), "simulated_time": self._now}

  def save(self):
    tree = {"params": self._params, "records": self.records()}
    return self.done, tree, {}


def columns(records):
  messages, hops = len(records.loss), int((records.bytes_up > 0).sum())
  row = {"order": "walk", "messages": messages, "updates": messages}
  return {**row, **server_results.summary(records), "hops": hops}


class WalkWorker:
  """A worker in its host."""

  def __init__(self, make_plan, seed, index, script, inside):
    self._steps, self._index = Steps(make_plan(), seed), index
    self._script = script(inside)

  def step(self, params, job, seq):
    self._script.apply_to_job(self._index, seq)
    return self._steps.step(params, job)


class WalkCluster(Cluster):
  """The workers of a walk, and the model between two steps."""

  def __init__(self, steps, params, book, supervisor, make):
    self.params, self._steps, self._book = params, steps, book
    super().__init__(supervisor)
    self._make = make
    self._call, self._paused = None, False
    self._clock = supervisor.hosts.clock
    self._seqs = follow(book.rows).next_seq

  @property
  def finished(self):
    return len(self._book.messages) == self._steps.plan.messages

  def start(self):
    for worker in range(self._steps.plan.workers):
      self._supervisor.start(WORKER, worker, self._make(worker))

  def check(self, received):
    self._supervisor.count_received(received)
    while not self.finished and not (self._paused and self._call is None):
      if not self._advance():
        break
    return self._supervisor.take_news()

  def _advance(self):
    """Starts a step, or ends it; returns whether it has ended."""
    job = len(self._book.messages)
    worker = self._steps.worker(job)
    party = self._supervisor.parties[WORKER][worker]
    if self._call is None:
      row = self._write(worker, job, base.SEND)
      self._call = party.host.call("step", self.params, job, row.seq)
      party.job_start = row.time
    if not self._at_rest(live_engine.LOOK_SECONDS):
      self._supervisor.end_overdue(party)
      return False
    answer, self._call = answer_of(self._call), None
    row = self._write(worker, job, base.RECEIVE if answer else base.LOST)
    self._seqs[worker] = row.seq + 1
    if answer:
      self._supervisor.add_job(party, row.time - party.job_start)
      self.params, rest = answer[0]
      self._book.receive(job + 1, row.time, worker, job, 0, 0.0, *rest)
    else:
      self._replace(party)
    return True

  def _at_rest(self, seconds):
    if self._call is not None:
      self._supervisor.hosts.wait([self._call], seconds)
    return self._call is None or self._call.done()

  def _replace(self, party):
    supervisor, worker = self._supervisor, party.index
    supervisor.drop(party)
    supervisor.count_exit(WORKER, worker, "died")
    supervisor.news.append(f"worker {worker} died; another takes its place")
    leaves = [e.worker for e in self._book.rows if e.action == base.LEAVE]
    life = leaves.count(worker)
    self._write(worker, life, base.LEAVE)
    supervisor.start(WORKER, worker, self._make(worker))
    self._write(worker, life + 1, base.JOIN)

  def _write(self, worker, job, action):
    of_job = action not in (base.JOIN, base.LEAVE)
    seq = self._seqs.get(worker, 0) if of_job else NO_SEQ
    row = Event(self._clock(), worker, seq, job, action)
    self._book.write(row)
    return row

  def pause(self, seconds=math.inf):
    self._paused = True
    return self.wait_for_rest(
      lambda: self.check(0) is not None and self._call is None, seconds
    )

  def resume(self):
    self._paused = False


class LiveWalkEngine(live_engine.LiveEngine):
  """A cell of a walk, in real time; the driver writes its only journal."""

  _writers = range(1)

  def _unpack(self, saved):
    first = Steps(self._plan, self._context.cell.seed).params
    return saved.tree({"params": first})["params"], saved.notes["lengths"]

  def _open_files(self, saved, *, begun):
    self._steps = Steps(self._plan, self._context.cell.seed)
    self._book = LiveRunLog(self._folder, saved and saved[1])
    if begun:
      self._report_resumed(saved, 0)
    return len(self._book.messages)

  def _make_cluster(self, live, hosts, saved):
    def make(worker):
      script = functools.partial(
        faults.script_of, self._context.machine.faults, live.folder
      )
      return functools.partial(
        WalkWorker, hosts.make_plan, live.cell.seed, worker, script
      )

    counts = {WORKER: self._plan.workers}
    supervisor = Supervisor(hosts.hosts, counts, live.setup.ladder)
    params = saved[0] if saved else self._steps.params
    cluster = WalkCluster(self._steps, params, self._book, supervisor, make)
    return cluster, cluster.start

  def _read(self):
    return self._book.records(self._received)

  def records(self):
    return self._book.records()

  def _snapshot_at(self, until):
    self.done = min(self._received, until)
    if self.done == until:
      time = self.records().time
      clock = {"seconds": float(time[until - 1]) - self._first_ticket}
      params = self.cluster.params
      self._snapshot = engines.Snapshot(params, until, until, clock)

  def summary(self, start, end):
    return server_results.summary(self._records_between(start, end))

  def columns(self):
    records = self.records()
    seconds = float(records.time[-1]) - self._first_ticket
    row = {"seconds": seconds, "replaced": self._replaced()}
    return {**columns(records), **row}

  def _pack(self):
    tree, notes = {"params": self.cluster.params}, {}
    notes["lengths"] = list(self._book.lengths)
    return len(self._book.rows), tree, notes


def _replay(plan, cell, folder, description):
  steps = Steps(plan, cell.seed)
  params, records = steps.params, read_records(records_path(folder, 0))
  for job in range(len(records.loss)):
    params, _ = steps.step(params, job)
  trace = server.PROTOCOL.live.trace(folder, description)
  return Recomputed(trace, records, params)


def describe(result) -> str:
  time = result.get("simulated_time", result.get("seconds"))
  return f"{result['hops']} hops, time {time:.4g}"


IN_REAL_TIME = live.runners(LiveWalkEngine, plan=plan, describe=describe)
WALK = Protocol(
  name="walk",
  participants="a model that walks",
  recipes={"walk": walk},
  runners={
    "simulate": Runner(plan, WalkEngine, describe),
    "threads": IN_REAL_TIME["threads"],
  },
  live=sandblaster.PROTOCOL.live._replace(replay=_replay),
  refusals=(
    Refusal("gate", "nothing is ever stale"),
    Refusal("compress", "it sends models"),
  ),
  columns=(engines.Column("hops", "hops"),),
  column="hops",
)
