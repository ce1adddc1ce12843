"""Stages in processes compute what they do in one, to the bit."""

import contextlib
import functools
import os
import queue
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit import same
from pipeline_experiments import build_pipelines, train_pipelines

from asgd import algorithms, models
from asgd.experiment.machine import Machine
from asgd.pipeline import analyze, executor, schedules
from asgd.pipeline import engine as engine_lib
from asgd.pipeline import stage as stage_lib
from asgd.pipeline.lanes import PipelineError, Stop
from asgd.pipeline.state import PipelineState

ray = pytest.importorskip("ray")

from asgd.pipeline import processes  # noqa: E402

pytestmark = pytest.mark.process

COUNT = 12  # microbatches
LATE = 2 * COUNT + 5  # in the third pass through a table
LAYERS = models.mlp(5, hidden=(8, 6, 7))


@pytest.fixture(autouse=True, scope="module")
def cluster(ray_session):
  with jax.enable_x64(True):
    yield


# What runs in the processes, which import this module.


def drawn_examples(microbatch):
  rng = np.random.default_rng(microbatch)
  return rng.standard_normal((4, 3, 3, 1)), rng.integers(0, 5, 4)


@functools.cache
def noisy_stage_fn(first, last):
  def fn(params, x, extra):
    data, key = extra
    x = data[0] if first == 0 else x
    y, _ = models.apply(LAYERS[first:last], params, x, train=True, first=first)
    y = y * jax.random.bernoulli(key, 0.9, y.shape)
    if last < len(LAYERS):
      return y, ()
    losses = optax.softmax_cross_entropy_with_integer_labels(y, data[1])
    return losses.mean(), ()

  return fn


def executor_arguments(table, recipe, weights, recompute, mistake=None):
  """Arguments of an executor; of stages of two layers, or one."""
  x, _ = drawn_examples(0)
  params = models.init(LAYERS, jax.random.key(0), x)
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
  cuts = [0, *range(len(LAYERS) + 1 - table.stages, len(LAYERS) + 1)]
  workers = analyze.in_flight(table, weights or "stash")
  built = [algorithms.build(recipe, 0.1, int(count)) for count in workers]
  parts = [
    stage_lib.Part(
      noisy_stage_fn(a, b), params[a:b], rules.server(), rules.at_worker
    )
    for a, b, rules in zip(cuts, cuts[1:], built, strict=False)
  ]

  def extra(stage, microbatch):
    if mistake is not None and (stage, microbatch) == (1, LATE):
      mistake()
    ends = stage in (0, table.stages - 1)
    key = jax.random.fold_in(jax.random.key(1), microbatch)
    return (drawn_examples(microbatch) if ends else ()), key

  return {
    "schedule": table,
    "parts": parts,
    "extra": extra,
    "weights": weights,
    "recompute": recompute,
  }


def raise_it():
  raise OSError("no such file")


def stand_still():
  os.kill(os.getpid(), signal.SIGSTOP)


# Here.


def in_processes(count, *args):
  built = processes.Processes(
    functools.partial(executor_arguments, *args), args[0], count
  )
  return contextlib.closing(built)


def same_states(found, wanted):
  assert found[:2] == wanted[:2]
  for field in PipelineState._fields[2:]:
    a, b = getattr(found, field), getattr(wanted, field)
    same(*(jax.tree.map(as_numbers, side) for side in (a, b)))


def as_numbers(x):
  if isinstance(x, int):
    return x
  keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if keys else x)


# Table, recipe, weights, recomputation; what goes wrong in the third pass, and
# what is said of it.
CASES = {
  # A process that has both replicas of a stage, and one that has half of the
  # other stage, with its server elsewhere.
  "replicas": (
    *(schedules.pipedream(2, COUNT, replicas=(1, 2)), "dana_zero", "stash"),
    *(False, raise_it, PipelineError),
    "F of stage 1, microbatch 5 .* OSError: no such file",
  ),
  "recomputing": (
    *(schedules.ftpipe([0, 1, 0], COUNT), "dana_slim", "latest", True),
    *(stand_still, processes.ProcessDied),
    "the process of devices .*1 has sent no heartbeat for 3 s",
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_processes_do_what_threads_do_and_either_goes_on_from_the_other(
  name, monkeypatch
):
  """The driver raises the failure of a task, and of a silent process."""
  *args, kind, said = CASES[name]
  table = args[0]
  engine = executor.Executor(**executor_arguments(*args))
  wanted = engine.run(engine.start())
  middle = table.slots // 2
  with in_processes(2, *args) as there:
    first = there.run(there.start(), middle)
    held = there.fetch(first.state)
    second = there.run(first.state)
    same(there.params(second.state), engine.params(wanted.state))
    assert {**first.losses, **second.losses} == {
      m: np.asarray(loss) for m, loss in wanted.losses.items()
    }
    for stage, rows in enumerate(wanted.records):
      both = [result.records[stage] for result in (first, second)]
      same(np.concatenate([r.staleness for r in both]), rows.staleness)
      same(np.concatenate([r.gap for r in both]), rows.gap)
    # Threads have the same state at that slot, and resume from the fetched one.
    cut = engine.run(engine.start(), middle).state
    same_states(held, cut)
    end = engine.run(engine.place(held)).state
    same(engine.params(end), engine.params(wanted.state))
    # Processes resume from a state of threads, and make another pass.
    there_end = there.run(there.place(cut)).state
    again = there.run(there.next_pass(there_end)).state
    end = engine.run(engine.next_pass(end)).state
    same(there.params(again), engine.params(end))
    with pytest.raises(
      ValueError, match="is no longer in the processes, which keep"
    ):
      there.run(there_end)
    # A failure is raised, and nothing hangs.
    third = there.next_pass(again)
    monkeypatch.setattr(processes, "_HEARTBEAT_TIMEOUT", 3.0)
    with pytest.raises(kind, match=said):
      there.run(third)
    with pytest.raises(PipelineError, match="start new ones"):
      there.start()


def test_what_cannot_be_taken_ends_the_run_that_waits_for_it():
  class Engine:
    """Waits for a lane to be told to stop."""

    devices, inboxes = {0: jax.devices()[0]}, {0: queue.SimpleQueue()}

    def run(self, state, until):
      assert self.inboxes[0].get(timeout=60) is Stop

  process = processes._StageProcess([0], None)
  process._executor = Engine()
  with pytest.raises(TypeError):
    process.put(0, "x", object())
  with pytest.raises(PipelineError, match="for device 0 was not stored"):
    process.run(1)


def test_what_cannot_start_says_why():
  with pytest.raises(
    PipelineError, match="ValueError: unknown algorithm 'magic'"
  ):
    in_processes(1, schedules.gpipe(2, 2), "magic", None, False)
  with pytest.raises(
    ValueError, match="count=3: the 2 devices of .* need 1 to 2 processes"
  ):
    in_processes(3, schedules.gpipe(2, 2), "asgd", None, False)


CONFIG = {
  "model": {"name": "mlp", "hidden": [8, 6]},
  "engine": "pipeline",
  "pipeline": {"microbatches": 4},
  "batch_size": 8,
  "examples": 480,
  "learning_rate": 0.025,
  "evaluations": 3,
  "evaluation_examples": 50,
  "curvature_checks": 0,
  "checkpoint_seconds": 0,
  "compress": "bf16",  # what the stages send
  "runs": {"pipedream": {"schedule": "pipedream", "recipe": "dana_zero"}},
}


class Bar:
  """Kills a process of the first engine when it has made some updates."""

  def __init__(self, engines):
    self.engines, self.updates, self.lines = engines, 0, []

  def update(self, *args):
    self.updates += 1
    if self.updates == 3 and self.engines:
      ray.kill(self.engines[0]._actors[1])

  def skip(self, messages):
    pass

  def line(self, text):
    self.lines.append(text)

  def finish(self, *args):
    pass


def test_a_killed_process_is_replaced_and_no_bit_differs(tmp_path, monkeypatch):
  exp = build_pipelines(config=CONFIG)
  (expected,) = train_pipelines(exp, tmp_path / "threads", bar=Bar([]))
  bar = Bar(engines := [])
  original = engine_lib._make_processes

  def remember(*args):
    engines.append(original(*args))
    return engines[-1]

  monkeypatch.setattr(engine_lib, "_make_processes", remember)
  machine = Machine(processes=2)  # uses what `cluster` started
  (result,) = train_pipelines(exp, tmp_path / "ray", bar=bar, machine=machine)
  assert len(engines) == 2
  assert "the process of devices 1 has died; resuming from" in bar.lines[0]
  for key in (
    *("params_sha256", "messages", "updates", "train_loss", "test_loss"),
    *("stage_staleness", "gap_mean"),
  ):
    assert result[key] == expected[key]
