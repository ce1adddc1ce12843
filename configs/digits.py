"""Handwritten digits: what staleness costs, and what algorithms do about it.

Sequential SGD, synchronous SGD, ASGD, NAG-ASGD, DC-ASGD, Gap-Aware and DANA on
handwritten digits (UCI, 1,437 images). Durations follow the homogeneous gamma
model of the DANA paper (Hakimi et al. 2019).

  python -m launch.train --config=configs/digits.py

Test accuracy in percent, mean and standard deviation of three seeds. It takes
50 seconds on two cores, or 25 once its programs are compiled:

               8 workers     16 workers    32 workers
  DANA-Zero    96.0 ± 0.3    96.5 ± 0.2    96.4 ± 1.0
  DC-ASGD      95.6 ± 0.6    95.6 ± 0.2    94.6 ± 0.9
  NAG-ASGD     97.4 ± 0.6    95.6 ± 1.1    16.9 ± 11.4  (two of three diverge)
  Gap-Aware    94.2 ± 0.7    93.1 ± 1.0    90.6 ± 1.3
  ASGD         92.6 ± 1.4    92.6 ± 1.4    92.4 ± 1.5
  SSGD         97.4 ± 0.4    96.2 ± 0.4    96.2 ± 0.4
  one worker   97.0 ± 0.4
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  config.runs = dict(
    sgd=dict(recipe="nag_asgd", title="SGD (1 worker)", workers=(1,)),
    asgd=dict(recipe="asgd", title="ASGD"),
    nag_asgd=dict(recipe="nag_asgd", title="NAG-ASGD"),
    # DC-ASGD has no momentum, so its rate is larger.
    dc_asgd=dict(recipe="dc_asgd_a", title="DC-ASGD", learning_rate=0.02),
    gap_aware=dict(recipe="gap_aware", title="Gap-Aware"),
    dana_zero=dict(recipe="dana_zero", title="DANA-Zero"),
    # The synchronous baseline. Of 0.02, 0.04, 0.08 and 0.16 this rate is the
    # best on seeds 100 and 101, at each number of workers.
    ssgd=dict(recipe="ssgd", title="SSGD", momentum=0.9, learning_rate=0.16),
  )
  config.workers = (8, 16, 32)
  config.seeds = (0, 1, 2)
  config.batch_size = 16
  config.epochs = 20.0
  config.learning_rate = 0.005
  # 1,437 images in batches of 16 make 90 gradients per epoch.
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(14.0,))
  config.evaluations = 15
  config.checkpoint_seconds = 10.0
  # NAG-ASGD diverges with 32 workers, which is a result.
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.workers, config.seeds = (8,), (2,), (0,)
    config.epochs, config.evaluations, config.curvature_checks = 0.1, 1, 0
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
