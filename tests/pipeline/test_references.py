"""Numbers that tests of other people's pipelines hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit import same

import asgd
from asgd import base
from asgd.pipeline import analyze
from asgd.pipeline import table as table_lib
from asgd.pipeline.executor import Executor
from asgd.pipeline.stage import Part

BATCHES = 12
ROWS, WIDTH, FEATURES, SIZE = 10, 4, 3, 8  # SIZE examples in a batch


@functools.cache
def batches():
  """BATCHES of (keys int32[SIZE, 2], features, labels)."""
  rng = np.random.default_rng(0)
  keys = rng.integers(0, ROWS, (BATCHES, SIZE, 2), np.int32)
  features = rng.standard_normal((BATCHES, SIZE, FEATURES), np.float32)
  labels = rng.integers(0, 2, (BATCHES, SIZE)).astype(np.float32)
  return list(zip(keys, features, labels, strict=True))


@functools.cache
def first_params():
  rng = np.random.default_rng(1)
  shapes = {"in": (2 * WIDTH + FEATURES, 6), "out": (6,)}
  dense = {
    name: rng.standard_normal(shape, np.float32) / 2
    for name, shape in shapes.items()
  }
  return rng.standard_normal((ROWS, WIDTH), np.float32), dense


def sparse_forward(table, keys):
  return table[keys].reshape(len(keys), -1)


def dense_forward(dense, rows, features, labels):
  hidden = jnp.tanh(jnp.concatenate([rows, features], 1) @ dense["in"])
  prediction = hidden @ dense["out"]
  losses = optax.sigmoid_binary_cross_entropy(prediction, labels)
  return losses.mean(), prediction


SPARSE, DENSE = optax.sgd(0.5), optax.adam(0.05)


@jax.jit
def dense_step(dense, rows, features, labels):
  gradient = jax.value_and_grad(dense_forward, (0, 1), has_aux=True)
  (_, prediction), gradients = gradient(dense, rows, features, labels)
  return prediction, *gradients


@jax.jit
def sparse_gradient(table, keys, gradient):
  return jax.vjp(lambda table: sparse_forward(table, keys), table)[1](gradient)


@functools.partial(jax.jit, static_argnums=0)
def apply(tx, params, state, gradient):
  updates, state = tx.update(gradient, state, params)
  return optax.apply_updates(params, updates), state


def reference_loop(start, stashes):
  """Until batch `start` all is in step. From there on, the rows of the next
  batch are looked up before the update of this one, and if gradients are
  stashed, the dense layers are updated by those of the batch before.

  Returns:
    The predictions, and the parameters at the end.
  """
  table, dense = first_params()
  sparse_state, dense_state = SPARSE.init(table), DENSE.init(dense)
  predictions, stashed = [], None
  rows = sparse_forward(table, batches()[0][0])
  for t, (keys, features, labels) in enumerate(batches()):
    prediction, of_dense, of_rows = dense_step(dense, rows, features, labels)
    predictions.append(prediction)
    is_late, follows = t >= start, batches()[t + 1 :]
    if is_late and follows:
      rows = sparse_forward(table, follows[0][0])
    (of_table,) = sparse_gradient(table, keys, of_rows)
    table, sparse_state = apply(SPARSE, table, sparse_state, of_table)
    if is_late and stashes:
      of_dense, stashed = stashed, of_dense
    if of_dense is not None:
      dense, dense_state = apply(DENSE, dense, dense_state, of_dense)
    if not is_late:
      rows = sparse_forward(table, follows[0][0])
  return predictions, (table, dense)


def semi_synchronous(start):
  """The embeddings on a device, the dense layers on another: all in step until
  batch `start`, and 1F1B from there on."""
  steps = range(BATCHES)
  embeddings = [(action, 0, t) for t in steps[:start] for action in "FB"]
  embeddings.append(("F", 0, start))
  for t in steps[start:-1]:
    embeddings += [("F", 0, t + 1), ("B", 0, t)]
  embeddings.append(("B", 0, BATCHES - 1))
  dense = [(action, 1, t) for t in steps for action in "FB"]
  name = "semi-synchronous"
  return table_lib.lay_out(name, [embeddings, dense], every=1, flush=False)


@pytest.mark.parametrize("stashes", [False, True])
@pytest.mark.parametrize("start", [0, 6])
def test_torchrec_semi_synchronous_pipeline(start, stashes):
  """torchrec `test_train_pipelines`, EmbeddingTrainPipelineTest: predictions
  are those of its loop, to the bit. Its stash of dense gradients is vertical
  sync here: both parts are an update late."""
  schedule, seen = semi_synchronous(start), {}
  weights = "vertical" if stashes else "stash"
  stale = analyze.staleness(schedule, weights).forward
  late = [0] * (start + 1) + [1] * (BATCHES - start - 1)
  assert stale.tolist() == [late, late if stashes else [0] * BATCHES]

  def embed(table, x, extra):
    del x
    return sparse_forward(table, extra), ()

  def predict(dense, rows, extra):
    t, features, labels = extra
    loss, prediction = dense_forward(dense, rows, features, labels)
    jax.debug.callback(lambda t, y: seen.update({int(t): y}), t, prediction)
    return loss, ()

  def extra(stage, t):
    keys, features, labels = batches()[t]
    return (np.int32(t), features, labels) if stage else keys

  parts = [
    Part(fn, params, asgd.make_server(base.as_algorithm(tx)))
    for fn, params, tx in zip(
      (embed, predict), first_params(), (SPARSE, DENSE), strict=True
    )
  ]
  engine = Executor(schedule, parts, extra, weights=weights)
  params = engine.params(engine.run(engine.start()).state)
  jax.effects_barrier()
  predictions, expected = reference_loop(start, stashes)
  same([seen[t] for t in range(BATCHES)], predictions)
  same(params[0], expected[0])
  if not stashes:  # a gradient is left in the loop's stash
    same(params[1], expected[1])
