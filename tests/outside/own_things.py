"""A user's own module, outside the package: models, data and problems, right
and wrong. Tests copy it to a folder of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from asgd import problems
from asgd.data import text
from asgd.worker import Aux


def mlp(classes, width=8):
  """In plain JAX."""

  def init(key, x):
    first, second = jax.random.split(key)
    inputs = x[0].size
    return {
      "in": jax.random.normal(first, (inputs, width)) / inputs**0.5,
      "out": jax.random.normal(second, (width, classes)) / width**0.5,
    }

  def apply(params, x):
    hidden = jax.nn.relu(x.reshape(len(x), -1) @ params["in"])
    return hidden @ params["out"]

  return init, apply


class Cnn(nn.Module):
  classes: int
  momentum: float
  dropout: float = 0.0

  @nn.compact
  def __call__(self, x, train):
    x = nn.Conv(4, (3, 3), (2, 2))(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(x)
    x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
    return nn.Dense(self.classes)(x.mean((1, 2)))


def cnn(classes, momentum=0.9, dropout=0.0):
  return Cnn(classes, momentum, dropout)


class Nnx(nnx.Module):
  def __init__(self, classes, dropout, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), 2, rngs=rngs)
    self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
    self.drop = nnx.Dropout(dropout, rngs=rngs)
    self.out = nnx.Linear(4, classes, rngs=rngs)

  def __call__(self, x):
    x = self.drop(nnx.relu(self.norm(self.conv(x))))
    return self.out(x.mean((1, 2)))


def nnx_cnn(classes, *, rngs, dropout=0.0):
  return Nnx(classes, dropout, rngs)


class Gpt(nn.Module):
  classes: int
  context: int
  width: int = 8

  @nn.compact
  def __call__(self, tokens, deterministic=True):
    x = nn.Embed(self.classes, self.width)(tokens)
    x = x + self.param(
      "places", nn.initializers.normal(0.02), (self.context, self.width)
    )
    mask = nn.make_causal_mask(tokens)
    h = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(2)(h, mask=mask)
    x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
    x = nn.Dropout(0.1, deterministic=deterministic)(x)
    return nn.Dense(self.classes)(x)


def gpt(classes, context, width=8):
  return Gpt(classes, context, width)


def words(tokens, size=20):
  return text.from_string("to be or not to be, " * 60, tokenizer=tokens)


def lengths(string):
  return [len(word) for word in string.split()]


lengths.size = 9


def numbers(examples=64, outputs=1):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(examples, 5))
  y = x[:, 0] if outputs == 1 else x[:, :outputs]
  return {"train_x": x, "train_y": y, "test_x": x, "test_y": y}


def signs(examples=64):
  x = np.random.default_rng(0).normal(size=(examples, 5))
  return x, (x[:, 0] > 0).astype(int), x[:16], (x[:16, 0] > 0).astype(int)


class Norm(nn.Module):
  momentum: float

  @nn.compact
  def __call__(self, x, train):
    x = x.reshape(len(x), -1)
    return nn.BatchNorm(not train, momentum=self.momentum)(x)


class Out(nn.Module):
  classes: int

  @nn.compact
  def __call__(self, x, train):
    return nn.Dense(self.classes)(x)


def layers(classes, momentum=0.9):
  return Norm(momentum), Out(classes)


def sigmoid(classes):
  return 3


def keeps(classes):
  return nn.Sequential([nn.BatchNorm(use_running_average=False)])


def mixed(classes):
  return Mixed(classes)


class Mixed(nn.Module):
  classes: int

  @nn.compact
  def __call__(self, x, train):
    for momentum in (0.5, 0.9):
      norm = nn.BatchNorm(use_running_average=not train, momentum=momentum)
      x = norm(x)
    return nn.Dense(self.classes)(x.reshape(len(x), -1))


def asks(classes):
  return (lambda key: {}), (lambda params, x, mask: x)


def seven(classes):
  return (lambda key: jnp.ones((64, 7))), (
    lambda params, x: x.reshape(len(x), -1) @ params
  )


def stumbles(classes):
  raise RuntimeError("no such luck")


def streams():
  return (x for x in "ab"), [0, 1], [[1.0]], [0]


def uneven():
  return np.zeros((4, 2)), [0, 1, 0], np.zeros((4, 2)), [0, 1, 0, 1]


def one_array():
  return np.zeros((4, 2))


def outside():
  return dict(
    train_x=np.zeros((40, 2)),
    train_y=[3] * 40,
    test_x=np.zeros((4, 2)),
    test_y=[0] * 4,
    classes=3,
  )


def scalar(batch_size):
  problem = fit(batch_size)
  return problem._replace(loss=lambda *args: problem.loss(*args)[0])


def failing(batch_size):
  return fit(batch_size)._replace(loss=lambda params, *_: params["v"])


def moving(batch_size):
  rng = np.random.default_rng(0)

  def batches(seed, workers):
    return lambda worker, job: rng.normal(1, 0.1, (batch_size, 3))

  return fit(batch_size)._replace(batches=batches)


def other_tables(batch_size):
  keyed = problems.Keyed(lambda batch: {"v": np.arange(3)}, lambda *_: None)
  return fit(batch_size)._replace(keyed=keyed)


def no_size():
  return fit(4)


def fit(batch_size, size=3):
  def loss(params, batch, key):
    return ((params["w"] - batch) ** 2).mean(), Aux(())

  def batches(seed, workers):
    def batch(worker, job):
      rng = np.random.default_rng((seed, worker, job))
      return rng.normal(1, 0.1, (batch_size, size)).astype(np.float32)

    return batch

  return problems.Problem(
    init=lambda key: {"w": jnp.zeros(size)},
    loss=loss,
    evaluate=lambda params: ((params["w"] - 1) ** 2).mean(),
    batches=batches,
    probe=batches(0, 1)(0, 0),
    batches_per_epoch=10,
  )
