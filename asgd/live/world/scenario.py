"""What is run in a world, and which faults come: both follow from a seed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asgd import (
  algorithms,
  base,
  compression,
  own_writes,
  sharding,
  simulator,
  stacking,
  transforms,
)
from asgd import losses as losses_lib
from asgd.live.duty import Duty
from asgd.live.setup import Setup
from asgd.live.world.run import LADDER
from asgd.orders.protocol import Rules
from asgd.server import accept_all, max_staleness

KINDS = (
  "kill worker",  # -9
  "kill shard",
  "kill driver",  # shards and workers work on until they notice
  "kill all",  # workers, shards and driver; the same command goes on
  "stop worker",  # it stands still for a while
  "stop shard",
  "stop driver",
  "cut",  # a connection
  "cut call",  # of the driver: its answer is lost
  "lose",  # a message, or the answer to it
  "double",
  "reorder",
  "tear",  # a process is killed in the middle of a write
  "fill",  # the disk, until the same command goes on
  "jump",  # the clock
  "remove memory",  # while the run uses it, and a shard is killed
  "flip",  # a byte of the snapshot of a shard, which is killed
  "drain",  # a worker is told to leave, as by a preemption notice
  "nan",  # a message
  "spoil",  # a byte of a packed message, in its slot
)
WORKERS, JOBS = 3, 18
_SNAPSHOT = 0.3  # seconds between two, where there is no log
ROOT = jax.random.key(0)


class ServerCase(NamedTuple):
  """A run without its faults."""

  recipe: str
  rules: Rules = Rules()
  shards: int = 1
  consistent: bool = False
  clip: bool = False  # the norm of all shards: needs totals
  log: int = 8
  slowdown: tuple[float, ...] = ()  # factors on the time of workers' jobs
  # The same, of workers that compute for so long: where one that only waits
  # ends with its host, they go on.
  computing: tuple[float, ...] = ()
  kills: bool = True  # as processes; False: as threads
  owned: bool = False  # jobs belong to places
  wire: str | None = None  # dtype of what travels
  tau: float | None = None  # of the threshold of a codec; None: there is none
  # The same, of updates, of which workers rebuild the parameters.
  down: float | None = None


CASES = (
  ServerCase("asgd"),
  ServerCase("dana_zero", Rules(depth=2), log=4),
  ServerCase("dana_zero", kills=False),
  ServerCase("ssgd", Rules(round=3), slowdown=(1.0, 1.0, 3.0), kills=False),
  ServerCase("ssgd", Rules(round=2, backup=1), kills=False),
  # The third is given up, wakes, and finds that another has its place.
  ServerCase("ssgd", Rules(round=3), computing=(1.0, 1.0, 60.0), kills=False),
  ServerCase("asgd", Rules(bound=1), shards=2),
  ServerCase("asgd", Rules(depth=2), shards=2, kills=False),
  ServerCase("dana_zero", shards=2, consistent=True),
  ServerCase("asgd", shards=2, consistent=True, clip=True, log=4),
  ServerCase("ssgd", Rules(round=3), shards=2, consistent=True),
  # Of these, a worker's state goes from one message to the next.
  ServerCase("dana_slim", kills=False),
  ServerCase("dana_slim", Rules(depth=2), shards=2),
  ServerCase("easgd", shards=2, consistent=True, kills=False),
  ServerCase("downpour", Rules(fetch_every=2), shards=2, kills=False),
  ServerCase(
    *("asgd", Rules(bound=2, cache=True)),
    slowdown=(1.0, 1.0, 3.0),
    down=0.02,
  ),
  ServerCase("asgd", Rules(bound=1), owned=True, kills=False),
  ServerCase("asgd", shards=2, log=0, down=0.02),
  ServerCase("dana_zero", Rules(depth=2), log=0),
  ServerCase("asgd", Rules(depth=2), shards=2, wire="bfloat16"),
  # Of these, messages are packed, and a worker keeps a residual.
  ServerCase("dana_zero", Rules(depth=2), log=4, tau=0.05),
  ServerCase("asgd", shards=2, wire="bfloat16", tau=0.05),
  ServerCase(
    *("easgd", Rules(), 2, True), kills=False, tau=0.02, down=0.02
  ),
  ServerCase("asgd", Rules(depth=2), log=4, tau=0.05, down=0.02),
)
# Options of recipes: jobs of two batches.
_OPTIONS = {
  "easgd": {"steps": 2, "momentum": 0.9},
  "downpour": {"push_every": 2, "fetch_every": 4},
}


def loss(
  params: dict[str, jax.Array], batch: jax.Array, key: jax.Array
) -> tuple[jax.Array, losses_lib.Aux]:
  """Returns the mean square of a small network's errors."""
  del key
  hidden = jnp.tanh(batch @ params["into"])
  error = hidden @ params["out"] - batch[:, 0]
  return jnp.mean(error**2), losses_lib.Aux(())


def batch(worker: int, job: int) -> np.ndarray:
  """Returns float32[4, 3]: what a job is done on."""
  rng = np.random.Generator(np.random.PCG64((worker, job)))
  return rng.standard_normal((4, 3), np.float32)


def first_params() -> dict[str, np.ndarray]:
  """Returns the parameters before the first message."""
  rng = np.random.default_rng(0)
  return {
    "into": rng.standard_normal((3, 4), np.float32),
    "out": rng.standard_normal(4, np.float32),
  }


class Training(NamedTuple):
  """What is trained: a recipe, compiled once for all scenarios, and a case."""

  server: base.Server
  worker: base.Worker
  steps: simulator.Steps
  plan: sharding.ShardPlan | None
  params: dict[str, np.ndarray]  # before the first message
  batch: Callable[[int, int], Any]  # that of the duty, but at once
  wire: str | None  # dtype in which parameters and messages travel
  setup: Setup | None = None
  duty: Duty | None = None


@functools.cache
def _codec(tau: float) -> compression.Codec:
  return compression.named("threshold", tau=tau)


@functools.cache
def recipe(case: ServerCase) -> Training:
  """Returns the recipe of a case for a small network."""
  rules, tau, down = case.rules, case.tau, case.down
  options = _OPTIONS.get(case.recipe, {})
  made = algorithms.build(case.recipe, 0.05, WORKERS, **options)
  for norm in (0.5, 0.3) if case.clip else ():  # two totals
    clipping = sharding.clip_by_global_norm(norm)
    algorithm = transforms.precede(made.algorithm, clipping)
    made = made._replace(algorithm=algorithm)
  if down is not None:
    algorithm = compression.compressed_updates(made.algorithm, _codec(down))
    made = made._replace(algorithm=algorithm)
  made = made._replace(every=max(rules.round, 1))
  gate = max_staleness(0) if rules.backup else accept_all
  server, worker = made.server(gate=gate), made.make_worker(loss)
  params = first_params()
  plan = sharding.make_plan(params, case.shards) if case.shards > 1 else None
  if tau is not None:
    codec = _codec(tau)
    server = compression.decoding(server, codec)
    worker = compression.compressed(worker, codec, plan)
  if rules.cache:
    worker = own_writes.own_writes(worker, server, plan)
  options = {"wire": case.wire, "keeps_messages": True}
  steps = simulator.compile_steps(server, worker, **options)
  batches = stacking.job_batches(batch, made.steps)
  return Training(server, worker, steps, plan, params, batches, case.wire)


def training(case: ServerCase, pause) -> Training:
  """Returns what a case trains; `pause(job, factor)` lets the time of a job, of
  a worker that takes so many times as long, go by."""
  rules = case.rules
  keeps = rules.cache or rules.fetch_every > 1
  # Without a codec, work is the same for all numbers of shards.
  shards = case.shards if case.tau is not None else 1
  compiled = recipe(
    ServerCase(
      case.recipe,
      Rules(round=rules.round, backup=rules.backup, cache=keeps),
      shards=shards,
      clip=case.clip,
      wire=case.wire,
      tau=case.tau,
      down=case.down,
    )
  )
  if case.shards > shards:
    plan = sharding.make_plan(compiled.params, case.shards)
    compiled = compiled._replace(plan=plan)
  setup = Setup(
    *(case.rules, WORKERS, JOBS, case.shards, case.consistent),
    totals=case.clip,
    log=case.log,
    snapshot_seconds=_SNAPSHOT,
    owned=case.owned,
    ladder=LADDER,
    together=True,
  )

  def after_a_while(worker, job):
    pause(job, (case.computing[worker : worker + 1] or (1.0,))[0])
    return compiled.batch(worker, job)

  duty = Duty(
    *(compiled.steps.work, compiled.worker.init, after_a_while, ROOT),
    *(compiled.params, compiled.plan),
    consistent=case.consistent,
    depth=case.rules.depth,
    slowdown=case.slowdown,
    codec=compiled.server.codec,
    codec_down=None if case.down is None else _codec(case.down),
  )
  return compiled._replace(setup=setup, duty=duty)
