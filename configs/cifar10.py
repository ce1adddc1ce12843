"""The settings of the DANA paper: ResNet-20 on CIFAR-10 (Hakimi et al. 2019).

Batch size 128 per worker, learning rate 0.1 for any number of workers, momentum
0.9, weight decay 1e-4, 160 epochs over all workers together. After 5 epochs of
warm-up from 0.1 / N the rate is 0.1; epochs 80 and 120 divide it by 10. Gamma
durations, five seeds. The model has GroupNorm; the paper's has BatchNorm, with
statistics that its simulator shares between all workers.
`--config.model.norm=batch` gives BatchNorm; workers send its statistics, and
the server averages them.

  python -m launch.train --config=configs/cifar10.py

Expected: DANA-Zero and ASGD have nearly equal gaps, and NAG-ASGD a far larger
one. NAG-ASGD collapses at 16 to 20 workers. The accuracy of
DANA-DC and DANA-Zero stays above that of Multi-ASGD, which stays above that of
NAG-ASGD. The run has 2 million updates of ResNet-20 and needs an accelerator.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="cifar10", augment=True)
  config.model = dict(name="resnet20", norm="group")
  decay = dict(weight_decay=1e-4)
  config.runs = dict(
    # The baseline without staleness, for every number of workers.
    sgd=dict(recipe="nag_asgd", title="SGD (1 worker)", workers=(1,), **decay),
    ssgd=dict(recipe="ssgd", title="SSGD", momentum=0.9, **decay),
    asgd=dict(recipe="asgd", title="ASGD", **decay),
    nag_asgd=dict(recipe="nag_asgd", title="NAG-ASGD", **decay),
    multi_asgd=dict(recipe="multi_asgd", title="Multi-ASGD", **decay),
    # As in the DANA paper: with momentum, and a constant lambda of 2.
    dc_asgd=dict(
      recipe="dc_asgd_c", title="DC-ASGD", momentum=0.9, strength=2.0, **decay
    ),
    gap_aware=dict(recipe="gap_aware", title="Gap-Aware", **decay),
    dana_slim=dict(recipe="dana_slim", title="DANA-Slim", **decay),
    dana_zero=dict(recipe="dana_zero", title="DANA-Zero", **decay),
    dana_dc=dict(recipe="dana_dc", title="DANA-DC", **decay),
  )
  config.workers = (4, 8, 12, 16, 20, 24, 32)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 128  # per worker, as in the paper
  config.epochs = 160.0  # over all workers together
  config.learning_rate = 0.1  # of one worker; warm-up begins at 0.1 / N
  config.learning_rate_schedule = dict(
    warmup_epochs=5.0, decay_epochs=(80.0, 120.0)
  )
  config.evaluations = 40
  config.curvature_checks = 8
  config.checkpoint_seconds = 120.0
  # NAG-ASGD is expected to diverge with many workers: that is a result.
  config.on_nan = "record"
  if arg == "tiny":
    config.model = dict(name="mlp", hidden=())
    config.workers, config.seeds, config.batch_size = (2,), (0,), 8
    config.examples, config.evaluations, config.curvature_checks = 64, 1, 0
    config.evaluation_examples = 32
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
