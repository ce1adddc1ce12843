"""One worker of four takes three times as long: the cost of waiting for it.

Asynchronous and bulk synchronous SGD, live, on handwritten digits. Batches are
so large that computing is nearly all of the work.

  python -m launch.compare --config=configs/straggler_digits.py

The command trains both with real workers (threads, or Ray processes with
--engine=ray) and measures them. It prints when each reached a loss, next to
simulations with the measured durations.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(512, 512))
  config.runs = dict(
    asgd=dict(recipe="asgd", title="asynchronous"),
    # An update is the mean of four messages, so its rate is 4 x 0.005.
    ssgd=dict(recipe="ssgd", title="bulk synchronous", learning_rate=0.02),
  )
  config.engine = "threads"
  config.workers = (4,)
  config.batch_size = 512  # far more work than a message
  config.epochs = 250.0
  config.learning_rate = 0.005
  config.learning_rate_schedule = dict(warmup_epochs=5.0)
  # late_seconds: otherwise the slow worker would count as failed. spans: the
  # simulations need the measured time of each job.
  config.live = dict(slowdown=(1, 1, 1, 3), late_seconds=20.0, spans=True)
  config.evaluations = 1  # at the end: an evaluation takes the workers' cores
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.batch_size, config.epochs = (), 16, 0.2
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
