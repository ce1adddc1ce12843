"""The cost of staleness for a small CNN on Fashion-MNIST.

The comparison of configs/digits.py on 60,000 larger images. --data_dir or
Debian's package dataset-fashion-mnist provides the data; without them they are
downloaded.

  python -m launch.train --config=configs/fashion.py

Test accuracy in percent after two epochs, mean and standard deviation of three
seeds, in 12 minutes on two cores:

               8 workers     16 workers
  DANA-Zero    87.3 ± 0.3    84.4 ± 0.6
  DC-ASGD      84.6 ± 0.3    82.7 ± 0.1
  NAG-ASGD     85.5 ± 0.1    56.2 ± 40.0  (one seed of three diverges)
  Gap-Aware    82.9 ± 0.6    78.8 ± 1.7
  ASGD         81.6 ± 0.7    79.8 ± 1.0
  one worker   88.3 ± 0.3
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="fashion")
  config.model = dict(name="cnn", features=(16, 32), hidden=64)
  config.runs = dict(
    sgd=dict(recipe="nag_asgd", title="SGD (1 worker)", workers=(1,)),
    asgd=dict(recipe="asgd", title="ASGD"),
    nag_asgd=dict(recipe="nag_asgd", title="NAG-ASGD"),
    # DC-ASGD has no momentum, so its rate is larger.
    dc_asgd=dict(recipe="dc_asgd_a", title="DC-ASGD", learning_rate=0.016),
    gap_aware=dict(recipe="gap_aware", title="Gap-Aware"),
    dana_zero=dict(recipe="dana_zero", title="DANA-Zero"),
  )
  config.workers = (8, 16)
  config.seeds = (0, 1, 2)
  config.batch_size = 64
  config.epochs = 2.0  # 1,874 gradients of 64 images
  config.learning_rate = 0.004
  config.learning_rate_schedule = dict(warmup_epochs=0.2, decay_epochs=(1.5,))
  config.evaluations = 8
  config.curvature_checks = 3
  # NAG-ASGD diverges with 16 workers, which is a result.
  config.on_nan = "record"
  if arg == "tiny":
    config.model = dict(name="cnn", features=(2,), hidden=8)
    config.workers, config.seeds, config.batch_size = (2,), (0,), 16
    config.examples, config.evaluations, config.curvature_checks = 128, 1, 0
    config.evaluation_examples = 32
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
