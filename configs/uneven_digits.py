"""One worker of two takes three times as long: it gets a third of the work.

Bulk synchronous SGD on handwritten digits, with batches of the same size for
both workers, and with batch sizes by the speed that is measured at the start of
a run. A round has the same examples in both runs. So both have the same loss
after the same number of rounds, and the table shows their times.

  python -m launch.train --config=configs/uneven_digits.py

trains with threads. --config.engine=ray uses processes of Ray, and
--config.engine=simulate uses durations of 1 and 3 units.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(512, 512))
  config.runs = dict(
    equal=dict(recipe="ssgd", title="equal work"),
    speed=dict(
      recipe="ssgd",
      title="work by speed",
      allocation=dict(batch_size="speed", jobs=16),  # 16 jobs are timed first
    ),
  )
  config.engine = "threads"
  config.workers = (2,)
  config.seeds = (0, 1, 2)
  config.batch_size = 512
  config.epochs = 250.0
  config.learning_rate = 0.02  # an update is the mean over both workers
  config.learning_rate_schedule = dict(warmup_epochs=5.0)
  # For --config.engine=simulate.
  config.durations = dict(name="constant", slowdown=(1, 3))
  # Long deadlines, or the slow worker would count as dead.
  config.live = dict(slowdown=(1, 3), late_seconds=20.0)
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.batch_size, config.seeds = (8,), 16, (0,)
    config.runs.speed.allocation.jobs = 2
    config.epochs, config.evaluations = 0.5, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
