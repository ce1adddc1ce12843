"""Data of a caller whose loader refills one buffer: each batch is kept."""

import functools
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import kit
import numpy as np
import optax
import pytest
from flax import linen as nn
from linear import squares

import asgd
from asgd import pipeline
from asgd.experiment import problem as problem_lib
from asgd.problems import streams

SIZE = 256  # JAX reads arrays of this size in place


def values(job):
  """Returns the batch of a job, in new arrays."""
  x = np.random.default_rng(job).normal(size=(SIZE, SIZE)).astype(np.float32)
  return x, x.sum(1)


class Refilled:
  """A loader that writes each batch into the same arrays."""

  def __init__(self, worker=0):
    self.arrays, self.job = tuple(map(np.empty_like, values(0))), 0
    del worker

  def __len__(self):
    return 16

  def __getitem__(self, job):
    for array, new in zip(self.arrays, values(job), strict=True):
      array[...] = new
    return self.arrays

  def batch(self, worker, job):
    del worker
    return self[job]

  def as_jax(self, worker, job):
    """As a caller returns them who converts the arrays of a loader."""
    return jax.tree.map(jnp.asarray, self.batch(worker, job))


class Iterator(Refilled):
  """Has no length and no index, and each batch is the next one."""

  __len__ = __getitem__ = None

  def __iter__(self):
    return self

  def __next__(self):
    self.job += 1
    return Refilled.__getitem__(self, self.job - 1)


FORMS = {
  "a list": Refilled(),
  "a function": Refilled().batch,
  "a function of arrays of JAX": Refilled().as_jax,
  "iterators": lambda worker: Iterator(worker),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_stays_when_its_loader_refills_it(form):
  stream = streams.read_data(FORMS[form])
  kit.same(stream.first, values(0))
  batches = stream.batches(0, 1)
  drawn = [batches(0, job) for job in range(3)]
  kit.same(drawn, [values(job) for job in range(3)])


@pytest.mark.parametrize("form", ["a list", "a function"])
def test_threads_take_turns_to_read_batches(form):
  met = threading.Event()  # two threads are in the loader

  class Slow(Refilled):
    inside = 0

    def __getitem__(self, job):
      self.inside += 1
      if self.inside == 2:
        met.set()
      if threading.current_thread() is not threading.main_thread():
        met.wait(0.1)
      super().__getitem__(job)
      self.inside -= 1
      return self.arrays

  loader = Slow()
  data = loader if form == "a list" else loader.batch
  batches = streams.read_data(data).batches(0, 1)
  with futures.ThreadPoolExecutor(2) as pool:
    drawn = [pool.submit(batches, 0, job) for job in range(2)]
    kit.same([each.result() for each in drawn], [values(0), values(1)])
  assert not met.is_set()


def test_examples_of_a_loader_are_stacked_as_they_were():
  stream = streams.read_data(Refilled(), 4)
  kit.same(stream.first[1], np.stack([values(row)[1] for row in range(4)]))


def test_batches_of_a_configured_problem_stay():
  loader = Refilled()
  problem = asgd.problems.quadratic(np.ones(4))
  copied = problem_lib.with_copied_batches(
    problem._replace(
      batches=lambda seed, workers: loader.batch,
      rebatch=lambda size: problem._replace(batches=lambda *_: loader.batch),
    )
  )
  for each in (copied, copied.with_batch_size(8)):
    batches = each.batches(0, 1)
    first = batches(0, 0)
    batches(0, 1)
    kit.same(first, values(0))


def train(function, data, recipe, **options):
  params = np.zeros(SIZE, np.float32)
  options = {"messages": 24, "progress": False, **options}
  return function(squares, params, data, recipe, **options).params


ENGINES = {
  "simulate": (asgd.simulate, asgd.asgd(1e-4, workers=4)),
  "peers": (asgd.simulate, asgd.d_psgd(1e-4, workers=4)),
  "tables": (asgd.simulate, asgd.table(1e-4, workers=2)),
  "threads": (asgd.train_live, asgd.asgd(1e-4, workers=1)),
  "a mesh": (
    functools.partial(asgd.train_mesh, axes={"data": 1}),
    optax.sgd(1e-4),
  ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_on_a_refilled_batch_as_on_a_new_one(engine):
  function, recipe = ENGINES[engine]
  expected = train(function, lambda worker, job: values(job), recipe)
  kit.same(train(function, Refilled().batch, recipe), expected)


def test_a_pipeline_trains_on_a_refilled_batch_as_on_a_new_one():
  def trained(data):
    layers = nn.Dense(4), nn.Dense(1)
    return pipeline.train(
      *(layers, lambda y, batch: ((y[:, 0] - batch[1]) ** 2).mean(), data),
      asgd.asgd(1e-4, workers=1),
      messages=16,
      progress=False,
    ).params

  kit.same(trained(Refilled().batch), trained(lambda worker, job: values(job)))
