"""Trains the same layers in two pipelines: with and without a flush.

GPipe waits for all microbatches of a batch, and computes the same result as one
device. PipeDream never waits, and its first stage computes with older weights.
"""

import flax.linen as nn
import numpy as np

import asgd
from asgd import pipeline

x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
data = x, np.sin(x.sum(1))
layers = nn.Dense(32), nn.tanh, nn.Dense(32), nn.tanh, nn.Dense(1)


def criterion(output, batch):
  return ((output[:, 0] - batch[1]) ** 2).mean()


for schedule in ("gpipe", "pipedream"):
  result = pipeline.train(
    *(layers, criterion, data, asgd.asgd(0.02, workers=1, momentum=0.9)),
    messages=400,
    batch_size=16,
    stages=2,
    microbatches=4,
    schedule=schedule,
    progress=False,
  )
  loss = result.records.loss
  print(f"{schedule:10} loss {loss[:50].mean():.3f} -> {loss[-50:].mean():.3f}")
