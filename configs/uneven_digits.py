"""One worker of two takes three times as long: it gets a third of the work.

Bulk synchronous SGD on handwritten digits: in the run `equal` both workers have
the same batch size, in the run `speed` a batch size by their speed, which is
measured at the start. A round has the same examples in both runs, so both have
the same loss after the same number of rounds. The table shows their times.

  python -m launch.train --config=configs/uneven_digits.py

The command trains with threads. --config.engine=ray uses Ray processes, and
--config.engine=simulate durations of 1 and 3 units.
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
  # late_seconds: otherwise the slow worker would count as failed.
  config.live = dict(slowdown=(1, 3), late_seconds=20.0)
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.batch_size, config.seeds = (), 16, (0,)
    config.runs.speed.allocation.jobs = 2
    config.epochs, config.evaluations = 0.5, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
