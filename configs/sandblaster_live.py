"""Sandblaster L-BFGS live: 4 workers and 2 shards, each a process of Ray.

The same training twice, on handwritten digits (UCI): the run `whole` has no
failures; in the run `killed`, a worker and a shard are killed. The losses of
each iteration (iterates.csv of a cell) are equal to the bit in both runs, and
on the engine `simulate`:

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
      # (seconds after the start, kind, index)
      # The times are the driver's, so each run is killed at another message.
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
