"""Cases of a parameter server in a simulated world, and kinds of faults."""

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
from asgd.live.setup import Setup
from asgd.live.worker_spec import WorkerSpec
from asgd.live.world.run import LADDER
from asgd.orders.protocol import Rules
from asgd.server import accept_all, max_staleness

KINDS = (
  "kill worker",  # as by `kill -9`
  "kill shard",
  "kill driver",  # shards and workers continue until they notice
  "kill all",  # workers, shards and driver; the same command resumes
  "stop worker",  # for a while, then the process continues
  "stop shard",
  "stop driver",
  "cut",  # breaks a connection
  "cut call",  # a call of the driver: its answer is lost
  "lose",  # drops a frame with a message, or its acknowledgement
  "double",  # sends a frame twice
  "reorder",  # sends a frame after the next one
  "tear",  # kills a process in the middle of a write
  "fill",  # fills the disk until the next command
  "jump",  # moves the clock
  "remove memory",  # during the run; a shard is killed too
  "flip",  # changes a byte of a shard's snapshot; the shard is killed
  "drain",  # asks a worker to leave, as a preemption notice does
  "nan",  # makes a message not finite
  "spoil",  # changes a byte of a packed message in its slot
)
WORKERS, JOBS = 3, 18
_SNAPSHOT = 0.3  # seconds between two snapshots, in cases without a log
ROOT = jax.random.key(0)


class ServerCase(NamedTuple):
  """A run without its faults."""

  recipe: str
  rules: Rules = Rules()
  shards: int = 1
  consistent: bool = False
  clip: bool = False  # by the norm over all shards, which needs totals
  log: int = 8  # messages that a shard stores for its successor; 0: none
  # Factors on the time of each worker's jobs. With `slowdown` the worker waits
  # in the longer time, so it ends when its host ends. With `computing` the
  # worker computes, and a thread continues after its host was given up.
  slowdown: tuple[float, ...] = ()
  computing: tuple[float, ...] = ()
  kills: bool = True  # hosts are processes; False: threads
  owned: bool = False  # each job belongs to one worker index
  wire: str | None = None  # dtype of sent parameters and messages
  tau: float | None = None  # threshold of the messages' codec; None: no codec
  # Threshold of the codec of updates, which workers get instead of parameters.
  down: float | None = None


CASES = (
  ServerCase("asgd"),
  ServerCase("dana_zero", Rules(depth=2), log=4),
  ServerCase("dana_zero", kills=False),
  ServerCase("ssgd", Rules(round=3), slowdown=(1.0, 1.0, 3.0), kills=False),
  ServerCase("ssgd", Rules(round=2, backup=1), kills=False),
  # Worker 2 is given up while it computes, and then finds its successor.
  ServerCase("ssgd", Rules(round=3), computing=(1.0, 1.0, 60.0), kills=False),
  ServerCase("asgd", Rules(bound=1), shards=2),
  ServerCase("asgd", Rules(depth=2), shards=2, kills=False),
  ServerCase("dana_zero", shards=2, consistent=True),
  ServerCase("asgd", shards=2, consistent=True, clip=True, log=4),
  ServerCase("ssgd", Rules(round=3), shards=2, consistent=True),
  # Workers with a state from message to message.
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
  # Packed messages: a worker has the codec's residual as state.
  ServerCase("dana_zero", Rules(depth=2), log=4, tau=0.05),
  ServerCase("asgd", shards=2, wire="bfloat16", tau=0.05),
  ServerCase(
    *("easgd", Rules(), 2, True), kills=False, tau=0.02, down=0.02
  ),
  ServerCase("asgd", Rules(depth=2), log=4, tau=0.05, down=0.02),
)
# Options that give recipes jobs of two batches.
_OPTIONS: dict[str, dict[str, Any]] = {
  "easgd": {"steps": 2, "momentum": 0.9},
  "downpour": {"push_every": 2, "fetch_every": 4},
}


def loss(
  params: Any, batch: jax.Array, key: jax.Array
) -> tuple[jax.Array, losses_lib.Aux]:
  """Returns the mean squared error of a small network with the parameters
  `first_params`."""
  del key
  hidden = jnp.tanh(batch @ params["into"])
  error = hidden @ params["out"] - batch[:, 0]
  return jnp.mean(error**2), losses_lib.Aux(())


@functools.cache
def batch(worker: int, job: int) -> np.ndarray:
  """Returns float32[4, 3], read-only: the batch of a worker's job."""
  rng = np.random.Generator(np.random.PCG64((worker, job)))
  examples = rng.standard_normal((4, 3), np.float32)
  examples.flags.writeable = False
  return examples


def first_params() -> dict[str, np.ndarray]:
  """Returns the parameters before the first message."""
  rng = np.random.default_rng(0)
  return {
    "into": rng.standard_normal((3, 4), np.float32),
    "out": rng.standard_normal(4, np.float32),
  }


class CompiledRecipe(NamedTuple):
  """A recipe for a small network, compiled once for all scenarios."""

  server: base.Server
  worker: base.Worker
  steps: simulator.Steps
  plan: sharding.ShardPlan | None  # None: one shard
  params: dict[str, np.ndarray]  # before the first message
  batch: Callable[[int, int], Any]  # (worker, job) -> batches of a job
  wire: str | None  # dtype in which parameters and messages travel


class Training(NamedTuple):
  """A compiled recipe (its fields), with the settings of a case."""

  server: base.Server
  worker: base.Worker
  steps: simulator.Steps
  plan: sharding.ShardPlan | None
  params: dict[str, np.ndarray]
  batch: Callable[[int, int], Any]  # as that of `spec`, but without a pause
  wire: str | None
  setup: Setup
  spec: WorkerSpec


@functools.cache
def _codec(tau: float) -> compression.Codec:
  return compression.named("threshold", tau=tau)


@functools.cache
def compile_recipe(case: ServerCase) -> CompiledRecipe:
  """Returns the recipe of a case for a small network."""
  rules, tau, down = case.rules, case.tau, case.down
  options = _OPTIONS.get(case.recipe, {})
  recipe = algorithms.build(case.recipe, 0.05, WORKERS, **options)
  # [1] The algorithm at the server.
  for norm in (0.5, 0.3) if case.clip else ():  # each needs one total
    clipping = sharding.clip_by_global_norm(norm)
    algorithm = transforms.precede(recipe.algorithm, clipping)
    recipe = recipe._replace(algorithm=algorithm)
  if down is not None:
    algorithm = compression.compressed_updates(recipe.algorithm, _codec(down))
    recipe = recipe._replace(algorithm=algorithm)
  recipe = recipe._replace(every=max(rules.round, 1))
  # [2] Server and worker, with a codec of messages between them.
  gate = max_staleness(0) if rules.backup else accept_all
  server, worker = recipe.server(gate=gate), recipe.make_worker(loss)
  params = first_params()
  plan = sharding.make_plan(params, case.shards) if case.shards > 1 else None
  if tau is not None:
    codec = _codec(tau)
    server = compression.decoding(server, codec)
    worker = compression.compressed(worker, codec, plan)
  if rules.cache:  # after the codec: a worker applies what the server decodes
    worker = own_writes.own_writes(worker, server, plan)
  # [3] The compiled functions. A run starts servers and workers often.
  server = server._replace(init=jax.jit(server.init))
  worker = worker._replace(init=jax.jit(worker.init))
  steps = simulator.compile_steps(
    server, worker, wire=case.wire, keeps_messages=True
  )
  batches = stacking.job_batches(batch, recipe.steps)
  return CompiledRecipe(
    server, worker, steps, plan, params, batches, case.wire
  )


def training(
  case: ServerCase, pause: Callable[[int, float], None]
) -> Training:
  """Returns the training of a case. `pause(job, factor)` waits as long as a job
  takes; `factor` is the slowdown of its worker."""
  rules = case.rules
  keeps_tickets = rules.cache or rules.fetch_every > 1
  # The compiled steps do not depend on the fields that are left out here, and
  # without a codec not on the number of shards. So several cases share them.
  shards = case.shards if case.tau is not None else 1
  compiled = compile_recipe(
    ServerCase(
      case.recipe,
      Rules(round=rules.round, backup=rules.backup, cache=keeps_tickets),
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
  work = compiled.steps.work
  assert work is not None
  setup = Setup(
    *(case.rules, WORKERS, JOBS, case.shards, case.consistent),
    totals=case.clip,
    log=case.log,
    snapshot_seconds=_SNAPSHOT,
    owned=case.owned,
    ladder=LADDER,
    together=True,
  )

  def batch_after_pause(worker: int, job: int) -> Any:
    pause(job, case.computing[worker] if case.computing else 1.0)
    return compiled.batch(worker, job)

  spec = WorkerSpec(
    *(work, compiled.worker.init, batch_after_pause, ROOT),
    *(compiled.params, compiled.plan),
    consistent=case.consistent,
    depth=case.rules.depth,
    slowdown=case.slowdown,
    codec=compiled.server.codec,
    codec_down=None if case.down is None else _codec(case.down),
  )
  return Training(*compiled, setup, spec)
