"""Trains your own Flax model live with four threads, and replays the run.

The threads decide the order of messages, so the order differs in every run. The
replay follows the recorded order, and gives the same bits.
"""

import tempfile

import flax.linen as nn
import numpy as np
import optax

import asgd


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))


def criterion(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch[1]
  ).mean()


dataset = asgd.data.load("digits")
x = np.asarray(dataset.train_images).reshape(len(dataset.train_images), -1)
data = x, np.asarray(dataset.train_labels)
recipe = asgd.dana_zero(2e-3, workers=4, optimizer=optax.adam)
with tempfile.TemporaryDirectory() as folder:
  given = (Net(), criterion), None, data, recipe
  result = asgd.train_live(
    *given, messages=400, batch_size=32, folder=folder, progress=False
  )
  print("loss", result.records.loss[:20].mean(), "->", end=" ")
  print(result.records.loss[-20:].mean())
  print("mean staleness", result.records.staleness.mean())
  print("replay has the same bits:", asgd.replay(folder, *given).same)
