"""Sandblaster L-BFGS and stochastic gradients, on the same simulated cluster.

Batch training by a coordinator without parameters (Dean et al. 2012), and
asynchronous and synchronous SGD, on handwritten digits (UCI). All have 8
workers, one of which is three times as slow.

  python -m launch.train --config=configs/sandblaster_digits.py

Mean and standard deviation of three seeds, in a minute of one core; the time is
in batches of a fast worker:

               accuracy %   test loss    time
  Sandblaster  97.1 ± 0.8   0.090         728   50 iterations
  ASGD         97.0 ± 0.3   0.086         728   5,340 updates
  SSGD         97.3 ± 0.2   0.082        2001   667 updates

SSGD waits for the slow worker at every update. Sandblaster sends portions, and
backup copies of the last portions, to idle workers. But an iteration takes a
pass over the data; in that time ASGD makes a hundred updates.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  config.runs = dict(
    # A pass has 89 portions of 16 images, and a job 2 portions: a fast worker
    # computes about six jobs per pass.
    lbfgs=dict(
      recipe="sandblaster",
      title="Sandblaster L-BFGS",
      push_every=2,
      shards=2,
      weight_decay=1e-3,
    ),
    asgd=dict(recipe="asgd", title="ASGD"),
    # An update is the mean of 8 messages.
    ssgd=dict(recipe="ssgd", title="SSGD", learning_rate=0.2),
  )
  config.workers = (8,)
  config.seeds = (0, 1, 2)
  config.batch_size = 16
  config.epochs = 60.0
  config.learning_rate = 0.02
  config.durations = dict(  # 1: the time of a batch on a fast worker
    name="constant", mean=1.0, slowdown=(1, 1, 1, 1, 1, 1, 1, 3)
  )
  config.evaluations = 20
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.seeds = (8,), (0,)
    config.epochs, config.evaluations = 3.0, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
