"""ResNet-20 on CIFAR-10 in pipelines of four stages, cut where time says.

  python -m launch.train_pipeline --config=configs/pipeline_cifar10.py

640 microbatches of 16 images for every run. Test loss and accuracy in percent
on 2,000 images, on the lossy archive `cifar10_jpeg.tar.xz`:

                         loss   acc.  stale    activations MiB
  1F1B, rate 0.02        2.003  26.1  0 0 0 0  39
  PipeDream (stash)      1.884  30.8  3 2 1 0  39
  FTPipe, stale          1.900  30.0  3 2 1 0  39
  PipeDream, Gap-Aware   1.882  30.7  3 2 1 0  39
  PipeDream, predicted   1.844  33.6  3 2 1 0  39

One seed, a fifth of an epoch, 5 minutes on two cores: this shows that it runs
and learns, and little more. 1F1B makes 80 updates where PipeDream makes 640,
and does not learn at rates of 0.1 and more, so early. Another machine measures
other layers, cuts elsewhere, and gives the asynchronous runs other numbers.
`configs/pipeline_cifar10.py:smoke` makes two updates.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="cifar10", augment=True)
  config.model = dict(name="resnet20", norm="group")
  config.stages = 4
  config.cuts = "time"
  config.microbatch_size = 16
  config.microbatches = 8
  config.updates = 80
  config.seeds = (0,)
  config.learning_rate = 0.4  # of 8 microbatches: PipeDream takes an eighth
  config.schedule = dict(warmup_updates=8, decay_updates=(64,))
  sgd = dict(recipe="asgd", momentum=0.9, weight_decay=1e-4)
  runs = dict(
    one_f_one_b=dict(
      schedule="one_f_one_b", learning_rate=0.02, title="1F1B", **sgd
    ),
    pipedream=dict(schedule="pipedream", title="PipeDream (stash)", **sgd),
    stale=dict(
      schedule="ftpipe", weights="latest", title="FTPipe, stale", **sgd
    ),
    gap_aware=dict(
      schedule="pipedream", recipe="gap_aware", title="PipeDream, Gap-Aware"
    ),
    predict=dict(
      schedule="pipedream", predict=True, title="PipeDream, predicted", **sgd
    ),
  )
  # In this order in tables, not in that of the alphabet.
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.only = ()
  config.evaluations = 8
  config.evaluation_examples = 2000
  config.checkpoint_seconds = 60.0
  config.on_nan = "record"
  if arg == "smoke":
    config.microbatch_size, config.microbatches, config.updates = 4, 2, 2
    config.evaluations, config.evaluation_examples = 1, 100
    config.schedule = dict(warmup_updates=0, decay_updates=())
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: smoke")
  return config.lock()
