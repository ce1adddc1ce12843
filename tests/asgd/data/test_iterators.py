"""Iterators as data: each worker reads its own, and a resumed run continues."""

import functools
import itertools
import json

import grain
import jax
import jax.numpy as jnp
import kit
import numpy as np
import pytest
from linear import DATA, PARAMS, interrupted, squares

import asgd
from asgd import facade
from asgd.data import iterators
from asgd.experiment.engines.mesh import MESH
from asgd.experiment.machine import Machine
from asgd.live.faults import Fault
from asgd.problems import own, streams

pytestmark = pytest.mark.usefixtures("blank_pictures")

QUIET = {"progress": False}


def batch_of(worker, index):
  """Batch `index` of a worker's iterator."""
  rows = np.random.default_rng((worker, index)).integers(48, size=8)
  return DATA[0][rows], DATA[1][rows]


class Position:
  """An iterator with a position, as those of grain."""

  def __init__(self, worker):
    self.worker, self.index = worker, 0

  def __iter__(self):
    return self

  def __next__(self):
    self.index += 1
    return batch_of(self.worker, self.index - 1)

  def get_state(self):
    return {"index": self.index}

  def set_state(self, state):
    self.index = state["index"]


class Streaming:
  """An iterable with a position, as `datasets.IterableDataset` in batches: each
  pass starts at the restored position."""

  with_format = None

  def __init__(self, worker, batches=5):
    self.worker, self.batches, self.index, self.start = worker, batches, 0, 0

  def __iter__(self):
    for index in range(self.start, self.batches):
      self.index = index + 1
      x, y = batch_of(self.worker, index)
      yield {"x": x, "y": y}

  def state_dict(self):
    return {"index": self.index, "epoch": 0}

  def load_state_dict(self, state):
    self.start = state["index"]


class Loader:
  """An iterable without a position or an index, as torch's DataLoader, whose
  batches are lists."""

  def __init__(self, worker, batches=5):
    self.worker, self.batches = worker, batches

  def __len__(self):
    return self.batches

  def __iter__(self):
    return (list(batch_of(self.worker, i)) for i in range(self.batches))


def of_grain(worker):
  """The real package: drawn, repeated and batched."""
  examples = grain.MapDataset.source([*zip(*DATA, strict=True)])
  batches = examples.seed(worker).shuffle().repeat().batch(8)
  # By default grain reads 500 batches ahead, with 16 threads, of each iterator.
  few = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  return batches.to_iter_dataset(few)


def loss_of_dict(w, batch):
  return squares(w, (batch["x"], batch["y"]))


@functools.cache
def recipe(workers=3, name="dana_zero"):
  return getattr(asgd, name)(0.02, workers=workers)


def simulate(data, loss=squares, recipe=recipe, **options):
  options = {"messages": 30, **QUIET, **options}
  return asgd.simulate(loss, PARAMS, data, recipe(), **options)


def as_function(trace, of=batch_of, steps=1):
  """Returns the batches that iterators give in an order, as a function."""
  index = {}
  count = dict.fromkeys(range(3), 0)
  received = trace.action == asgd.base.RECEIVE
  for worker, job in zip(trace.worker[received], trace.job[received],
                         strict=True):
    for step in range(steps):
      index[int(worker), int(job) * steps + step] = count[worker]
      count[worker] += 1
  # Jobs that are checked before the run.
  return lambda worker, job: of(worker, index.get((worker, job), 0))


@pytest.mark.parametrize("engine", ["host", "chunk"])
def test_each_worker_reads_its_own_iterator_in_the_order_of_its_jobs(engine):
  options = {"simulator": {"engine": engine}}
  found = simulate(Position, **options)
  expected = simulate(as_function(found.trace), **options)
  kit.same(found.params, expected.params)
  kit.same(found.records, expected.records)
  kit.same(simulate(lambda w: map(batch_of, itertools.repeat(w),
    itertools.count()), **options).params, found.params)


def test_local_steps_read_several_batches_for_a_job():
  local = functools.partial(
    asgd.model_averaging, 0.02, workers=3, steps=2
  )
  found = simulate(Position, recipe=local, messages=12)
  expected = simulate(
    as_function(found.trace, steps=2), recipe=local, messages=12
  )
  kit.same(found.params, expected.params)


@pytest.mark.parametrize("kind", [Streaming, Loader])
def test_an_iterable_starts_again_at_its_end(kind):
  given = loss_of_dict if kind is Streaming else squares
  found = simulate(kind, given)
  passes = as_function(found.trace, lambda w, i: batch_of(w, i % 5))
  kit.same(found.params, simulate(passes).params)


SIZES = {"messages": 30, "every": 6, "checkpoint_seconds": 0}


@pytest.mark.parametrize(
  ("kind", "engine"),
  [
    (Position, "host"),
    (Position, "chunk"),
    (Streaming, "chunk"),
    (of_grain, "host"),
  ],
)
def test_a_resumed_simulation_is_an_uninterrupted_one(kind, engine, tmp_path):
  given = loss_of_dict if kind is Streaming else squares
  train = functools.partial(
    simulate, kind, given, simulator={"engine": engine}, **SIZES
  )
  result = interrupted(train, tmp_path)
  whole = train()
  kit.same(result.params, whole.params)
  kit.same(result.records, whole.records)


def test_a_resumed_mesh_is_an_uninterrupted_one(tmp_path):
  def train(evaluate=None, folder=None):
    given = own.Objects(
      *(squares, PARAMS, Position, recipe(1, "asgd")),
      evaluate=evaluate,
    )
    sizes = {"messages": 12, "workers": 1, "every": 4, **QUIET}
    options = facade.RunOptions(**sizes, folder=folder, evaluate=evaluate)
    config = {"mesh": {"axes": {"data": 1}}, "checkpoint_seconds": 0}
    return facade.train(
      given, ("mesh", MESH), config, options, quantum=(1, "updates")
    )

  result, whole = interrupted(train, tmp_path), train()
  kit.same(result.params, whole.params)
  batches = [batch_of(0, i) for i in range(12)]
  plain = jnp.zeros(3)
  for batch in batches:
    plain -= 0.02 * jax.grad(squares)(plain, batch)
  kit.close(result.params, plain, rtol=1e-5, atol=1e-6)


class Logged(Position):
  """Notes each batch in a list that all threads share."""

  log = []  # noqa: RUF012

  def __next__(self):
    self.log.append((self.worker, self.index))
    return super().__next__()


def check_each_once(log, workers, most):
  """Checks that each worker's batches were read in order, each once."""
  for worker in range(workers):
    indices = [index for w, index in log if w == worker]
    assert indices == [*range(len(indices))] and len(indices) <= most


def test_a_live_run_reads_each_batch_once_also_if_resumed(tmp_path):
  log = Logged.log
  args = squares, PARAMS, Logged
  train = functools.partial(
    asgd.train_live, *args, recipe(2), messages=30, every=6,
    checkpoint_seconds=0, **QUIET,
  )
  # Reading the arguments opens iterators of worker 0, too.
  log.clear()
  own.Objects(*args, recipe(2))
  opening = len(log)
  log.clear()
  result = interrupted(train, tmp_path)
  assert len(result.records.loss) == 30
  kept = [
    json.loads(path.read_bytes())["drawn"]
    for path in sorted(tmp_path.rglob("iterator-*.json"))
  ]
  # Each of the two calls reads the arguments, too.
  assert 30 <= sum(kept) == len(log) - 2 * opening
  with pytest.raises(ValueError, match="which a replay cannot rewind"):
    asgd.replay(tmp_path, *args, recipe(2))


def test_a_replaced_worker_continues_its_iterator(tmp_path):
  log = Logged.log
  given = squares, PARAMS, Logged, recipe(2)
  log.clear()
  own.Objects(*given)
  opening = len(log)
  log.clear()
  machine = Machine(faults=[Fault(1, 3, "kill")])
  result = asgd.train_live(*given, messages=30, machine=machine, **QUIET)
  joined = result.trace.worker[result.trace.action == asgd.base.JOIN]
  assert 1 in joined
  check_each_once(log[opening:], 2, 40)


def test_without_a_state_a_run_cannot_resume(tmp_path):
  train = functools.partial(simulate, Loader, **SIZES)
  with pytest.raises(ValueError, match="cannot be restored, so the run cannot"):
    interrupted(train, tmp_path / "simulated")
  live = functools.partial(
    asgd.train_live, squares, PARAMS, Loader, recipe(2),
    messages=30, every=6, checkpoint_seconds=0, **QUIET,
  )
  whole = live(folder=tmp_path / "whole")
  assert len(whole.records.loss) == 30
  read = live(folder=tmp_path / "whole")  # it has finished
  kit.same(read.params, whole.params)


# States, and mistakes.


@pytest.mark.parametrize(
  "state",
  [
    None,
    {"a": [1, 2.5, True], "b": (2**100, "text"), "c": {}},
    b"\x00\xff",
    np.arange(6, dtype=np.int16).reshape(2, 3),
    {"bytes": 1},
  ],
)
def test_a_state_is_the_same_after_json(state):
  text = json.dumps(iterators._encode_state(state))
  back = iterators._decode_state(json.loads(text))
  assert type(back) is type(state)
  np.testing.assert_equal(back, state)


class Stateless:
  """Has a state that cannot be saved."""

  def __init__(self, worker):
    self.position = Position(worker)

  def __iter__(self):
    return self

  def __next__(self):
    return next(self.position)

  def get_state(self):
    return {"lock": object()}

  def set_state(self, state):
    raise AssertionError


def one(worker):
  return iter([batch_of(worker, 0)])


def ragged(worker):
  yield batch_of(worker, 0)
  yield tuple(x[:5] for x in batch_of(worker, 1))


def wider(worker):
  yield batch_of(worker, 0)
  yield tuple(x.astype(np.float64) for x in batch_of(worker, 1))


SHARED = Position(0)
MISTAKES = {
  "a list": (lambda worker: [batch_of(worker, 0)], "give it as data, without"),
  "a number": (lambda worker: 3, r"data\(0\) returned 3, which is no iterator"),
  "it fails": (lambda worker: 1 / 0, r"data\(0\) fails \(ZeroDivision"),
  "an early end": (one, "ended after 1 batches, but the run needs more"),
  "nothing": (lambda worker: iter(()), "ended after 0 batches"),
  "another shape": (ragged, "batch 1 of the iterator of worker . is"
    r" \(float32\[5, 3\].*drop_last=True"),
  "another dtype": (wider, r"is \(float64\[8, 3\], .* but the first batch"),
  "one for all": (lambda worker: SHARED, "the same Position twice"),
  "lists": (
    lambda worker: itertools.repeat({"x": [1, 2], "y": [0, 1]}),
    r"\['x'\]\[0\] is 1, but a batch holds arrays.*with_format",
  ),
  "texts": (
    lambda worker: itertools.repeat({"x": np.array(["a"])}), "dtype <U1"
  ),
  "two arguments": (
    lambda worker, job: iter([batch_of(worker, job)]),
    "takes the worker alone",
  ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(name):
  data, words = MISTAKES[name]
  with pytest.raises(ValueError, match=words) as caught:
    simulate(data)
  assert "\n" not in str(caught.value)


REFUSED = {
  "batch_size": ({"batch_size": 8}, "decide the size themselves"),
  "allocation": (
    {"allocation": {"batch_size": "speed"}}, "whose size cannot change"
  ),
  "peers": ({"recipe": lambda: asgd.d_psgd(0.02, workers=3)}, "this recipe"),
  "delays": ({"server": {"shards": 2, "delays": "gamma"}}, "shards"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_without_an_order_of_jobs_are_refused(name):
  options, words = REFUSED[name]
  with pytest.raises(ValueError, match=words):
    simulate(Position, **options)


def test_a_state_that_cannot_be_saved_is_one_line(tmp_path):
  train = functools.partial(simulate, Stateless, **SIZES)
  # Before the first step, and not by the first checkpoint.
  with pytest.raises(ValueError, match="cannot be saved .*holds <object"):
    train(folder=tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_an_iterable_alone_is_refused_with_the_function_that_makes_it():
  with pytest.raises(ValueError, match=r"data=lambda worker: iter\(...\)"):
    streams.read_data(Loader(0))
