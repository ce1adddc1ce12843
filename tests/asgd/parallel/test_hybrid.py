"""Any mesh trains as one device does: the same losses, the same parameters."""

import functools

import jax
import kit
import numpy as np
import optax
import pytest

from asgd import data as images_lib
from asgd import models, problems
from asgd.models import transformer
from asgd.parallel import data_parallel, halo, hybrid, meshes
from asgd.problems.problem import classification_loss, cross_entropy

KEY = jax.random.key(3)
STEPS = 2
LAYERS = transformer.gpt(11, depth=2, width=8, heads=4, context=8)


pytestmark = pytest.mark.usefixtures("float64")


def windows(step):
  return np.random.default_rng(step).integers(0, 11, (8, 9), dtype=np.int32)


def language_problem():
  return of_pieces(
    problems.Pieces(
      LAYERS,
      lambda batch, key, dtype: batch[:, :-1],
      lambda logits, batch: cross_entropy(logits, batch[:, 1:]).mean(),
    )
  )


def image_problem(layers):
  def prepare(batch, key, dtype):
    return images_lib.augment(batch[0].astype(dtype), key)

  return of_pieces(problems.Pieces(layers, prepare, classification_loss))


def of_pieces(pieces):
  loss = problems.whole_loss(pieces)
  return problems.Problem(None, loss, None, None, None, 1, pieces)


def take_steps(made, params, batches):
  """Returns the losses and the parameters."""
  state, losses = made.init(params), []
  for step in range(STEPS):
    key = jax.random.fold_in(KEY, step)
    state, metrics = made.step(state, made.place(batches(step)), key)
    losses.append(float(metrics.loss))
  return losses, jax.device_get(made.params(state))


def train_on(problem, shape, params, batches, model_options=None, **options):
  mesh = meshes.make(shape)
  model = hybrid.mesh_model(problem, mesh, **(model_options or {}))
  tx = optax.sgd(0.1, momentum=0.9)
  made = hybrid.make_step(model, tx, mesh, clip_norm=0.5, **options)
  return take_steps(made, params, batches)


@functools.cache
def gpt_on_one_device():
  with jax.enable_x64(True):
    params = kit.parameters(LAYERS, windows(0)[:, :-1])
    return params, train_on(language_problem(), {"data": 1}, params, windows)


PIPE = dict(microbatches=2)
MESHES = [
  ({"tensor": 2, "data": 4}, {"sequence": True}, {"zero": 1}),
  ({"data": 2, "tensor": 2, "pipe": 2}, PIPE, {"zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "model_options", "options"),
  MESHES,
  ids=[" x ".join(f"{k} {v}" for k, v in m[0].items()) for m in MESHES],
)
def test_a_gpt_on_any_mesh(shape, model_options, options):
  params, wanted = gpt_on_one_device()
  problem = language_problem()
  found = train_on(problem, shape, params, windows, model_options, **options)
  kit.close(found, wanted, rtol=1e-10, atol=1e-10)
  assert wanted[0][-1] != wanted[0][0]


# A ResNet, with a locally connected layer whose kernels are divided by rows.
IMAGE_LAYERS = (
  models.Stem(4, "group", 2),
  models.BasicBlock(8, 2, groups=2),
  halo.Local(4),
  models.Head(3),
)


def pictures(step):
  return kit.normal(8, 8, 8, 3, seed=step), np.arange(8) % 3


@pytest.mark.slow
def test_images_on_any_mesh():
  """With augmentation, which is the same for the same number of pieces: 2."""
  problem = image_problem(IMAGE_LAYERS)
  params = kit.parameters(IMAGE_LAYERS, pictures(0)[0])
  wanted = train_on(problem, {"data": 2}, params, pictures)
  tiles = {"data": 2, "rows": 2, "columns": 2}
  found = train_on(problem, tiles, params, pictures, zero=2)
  kit.close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_device_keeps_its_part_of_each_axis():
  mesh = meshes.make({"data": 2, "tensor": 2, "pipe": 2})
  model = hybrid.language(LAYERS, mesh, **PIPE)
  made = hybrid.make_step(model, optax.adam(0.1), mesh, zero=1)
  state = made.init(gpt_on_one_device()[0])
  up = state.params[1]["up"]["kernel"]  # [1, 2, 8, 32]
  assert up.addressable_shards[0].data.shape == (1, 1, 8, 16)
  moment = state.opt_state[0].mu[1]["up"]["kernel"]
  assert moment.addressable_shards[0].data.shape == (1, 1, 4, 16)
  tokens = state.params[0]["tokens"]  # padded to 12 rows
  assert tokens.addressable_shards[0].data.shape == (6, 8)


def test_which_device_holds_which_block():
  layers = transformer.gpt(11, depth=8, width=4, heads=2, context=8)
  params = kit.parameters(layers, windows(0)[:, :-1])
  mesh = meshes.make({"data": 1, "pipe": 2})
  model = hybrid.language(layers, mesh, **PIPE, rounds=2)
  split = jax.jit(model.split)(params)
  bias = split[1]["norm_mlp"]["bias"]  # [2, 4, 4]
  spec = model.specs(split)[1]["norm_mlp"]["bias"]
  bias = meshes.place(bias, mesh, spec)
  numbers = [
    [int(b[0] == p["norm_mlp"]["bias"][0]) for p in params[1:-1]].index(1)
    for shard in bias.addressable_shards
    for b in shard.data.reshape(-1, 4)
  ]
  assert numbers == [0, 1, 4, 5] + [2, 3, 6, 7]
  kit.same(jax.jit(model.join)(split), params)


def model_on(shape, *, problem=None, **options):
  return hybrid.mesh_model(
    problem or language_problem(), meshes.make(shape), **options
  )


OF_A_MODEL = [
  (dict(data=2, rows=2, tensor=2),
   {}, r"and pipe, or rows and columns; not \('data', 'rows', 'tensor'\)"),
  (dict(data=2, tensor=2),
   {"problem": problems.quadratic([1.0])},
   "no layers to divide over .'tensor'."),
  (dict(data=2, tensor=2),
   {"problem": image_problem(IMAGE_LAYERS)},
   "only the layers of transformer.gpt can be divided"),
  (dict(data=2, rows=2), {}, "a Embed cannot be split into tiles"),
  (dict(data=1, tensor=8),
   {}, "4 heads cannot be divided among the 8 devices"),
  (dict(data=2, pipe=4), PIPE, "2 blocks cannot be divided among 4 stages"),
  (dict(data=2, pipe=2),
   {"sequence": True, **PIPE},
   "sequence=True is for a mesh with the axis 'tensor'"),
]
MISTAKES = {
  "microbatches": (
    lambda: train_on(
      *(language_problem(), {"data": 8, "pipe": 1}),
      *(gpt_on_one_device()[0], windows, PIPE),
    ),
    "1 examples of a replica cannot be cut into 2 microbatches"),
  "data": (
    lambda: data_parallel.make_step(
      *(language_problem().loss, optax.sgd(1.0), meshes.make({"tensor": 2}))
    ),
    "none named 'data'"),
}


test_a_mistake_is_told = kit.refuses(MISTAKES)
test_a_model_is_refused = kit.refuses(
  [((shape, options), words) for shape, options, words in OF_A_MODEL],
  lambda case: model_on(case[0], **case[1]),
)
