"""ResNet-20 on CIFAR-10 in pipelines of four stages, cut by measured time.

  python -m launch.train --config=configs/pipeline_cifar10.py

Each run has 640 microbatches of 16 images. Test loss and accuracy in percent on
2,000 images, from the lossy archive `cifar10_jpeg.tar.xz`:

                         loss   acc.  stale    activations MiB
  1F1B, rate 0.02        2.003  26.1  0 0 0 0  39
  PipeDream (stash)      1.884  30.8  3 2 1 0  39
  FTPipe, stale          1.900  30.0  3 2 1 0  39
  PipeDream, Gap-Aware   1.882  30.7  3 2 1 0  39
  PipeDream, predicted   1.844  33.6  3 2 1 0  39

One seed, a fifth of an epoch, 5 minutes on two cores: the table shows only that
the runs work and learn. 1F1B makes 80 updates, PipeDream 640. In 80 updates
1F1B does not learn at rates of 0.1 and more. "FTPipe, stale" stores its
activations; FTPipe itself recomputes them with the newest weights. Other
machines measure other layer times, cut the model elsewhere, and so have other
numbers in asynchronous runs.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="cifar10", augment=True)
  config.model = dict(name="resnet20", norm="group")
  config.engine = "pipeline"
  # Stages of equal measured time.
  config.pipeline = dict(stages=4, cuts="time", microbatches=8)
  config.batch_size = 16  # per microbatch
  config.examples = 10240  # 80 updates of 8 microbatches
  config.learning_rate = 0.05  # per microbatch
  rate_schedule = dict(warmup_examples=1024, decay_examples=(8192,))
  config.learning_rate_schedule = rate_schedule
  sgd = dict(recipe="asgd", momentum=0.9, weight_decay=1e-4)
  pipedream = dict(sgd, schedule="pipedream")
  gap_aware = dict(schedule="pipedream", recipe="gap_aware")
  # 1F1B multiplies the rate by its 8 microbatches, to 0.02.
  slow = dict(sgd, learning_rate=0.0025)
  runs = dict(
    one_f_one_b=dict(slow, schedule="one_f_one_b", title="1F1B"),
    pipedream=dict(pipedream, title="PipeDream (stash)"),
    # FTPipe itself recomputes; here the activations are stored.
    stale=dict(sgd, schedule="ftpipe", recompute=False, title="FTPipe, stale"),
    gap_aware=dict(gap_aware, title="PipeDream, Gap-Aware"),
    predict=dict(pipedream, predict=True, title="PipeDream, predicted"),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)  # in order
  config.curvature_checks = 0
  config.evaluations = 8
  config.evaluation_examples = 2000
  config.checkpoint_seconds = 60.0
  config.on_nan = "record"
  if arg == "tiny":
    config.model = dict(name="cnn", features=(2,), hidden=8)
    config.pipeline = dict(stages=2, cuts="time", microbatches=2)
    config.batch_size, config.examples = 4, 16
    config.evaluations, config.evaluation_examples = 1, 32
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
