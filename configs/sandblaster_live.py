"""Sandblaster L-BFGS live: 4 workers and 2 shards, each a process of Ray.

Two runs of the same training, on handwritten digits (UCI): `whole` has no
failures; in `killed`, a worker and a shard are killed. Both runs, and the
engine `simulate`, have the same losses to the bit in each iteration
(iterates.csv of a cell):

  python -m launch.train --config=configs/sandblaster_live.py
  python -m launch.train --config=configs/sandblaster_live.py \
    --config.engine=threads
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  batch = dict(  # a job has 4 portions of 16 images
    recipe="sandblaster", push_every=4, shards=2, weight_decay=1e-3
  )
  runs = dict(
    whole=dict(title="Sandblaster L-BFGS", **batch),
    killed=dict(
      title="with a worker and a shard killed",
      # (seconds after the start, kind, index). A time falls on a different
      # message each time that the command runs.
      failures=((1.0, "worker", 1), (2.0, "shard", 1)),
      **batch,
    ),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.engine = "ray"
  config.workers = (4,)
  config.seeds = (0,)
  config.batch_size = 16
  config.epochs = 30.0  # passes over the data
  config.evaluations = 5
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden = (8,)
    config.epochs, config.evaluations = 3.0, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
