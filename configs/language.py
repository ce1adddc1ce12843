"""The comparison of configs/digits.py on text: a small GPT on characters.

Sequential SGD, synchronous SGD, ASGD, NAG-ASGD, DC-ASGD, Gap-Aware and DANA on
the Python language reference, which is part of Python: 23,000 parameters, 32
characters of context, 1,280 gradients of 8 windows. Durations follow the
homogeneous gamma model of the DANA paper (Hakimi et al. 2019).

  python -m launch.train --config=configs/language.py

Test loss in nats (4.6 at first), mean and standard deviation of three seeds. It
takes three minutes on two cores, half of them for compilation:

               4 workers     8 workers     16 workers
  SSGD         2.22 ± 0.01   2.32 ± 0.01   2.57 ± 0.03
  DANA-Zero    2.26 ± 0.01   2.37 ± 0.01   2.63 ± 0.02
  DC-ASGD      2.42 ± 0.00   2.49 ± 0.00   2.63 ± 0.01
  ASGD         2.43 ± 0.01   2.50 ± 0.00   2.70 ± 0.01
  Gap-Aware    2.43 ± 0.00   2.56 ± 0.01   2.73 ± 0.03
  NAG-ASGD     2.51 ± 0.01   2.59 ± 0.00   2.73 ± 0.01
  one worker   2.19 ± 0.00

All runs have 1,280 gradients, which are few for a GPT: with 16 workers,
staleness or larger batches cost more than the shorter time gains. The text, and
so the numbers, change a little with Python's version.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=32)
  config.model = dict(name="gpt", depth=1, width=32, heads=2)
  # The rate of each run is the best of three or four (in factors of two) with
  # 16 workers on seed 100.
  config.runs = dict(
    sgd=dict(
      recipe="nag_asgd", title="SGD (1 worker)", workers=(1,),
      learning_rate=0.05,
    ),
    asgd=dict(recipe="asgd", title="ASGD", learning_rate=0.05),
    nag_asgd=dict(recipe="nag_asgd", title="NAG-ASGD", learning_rate=0.0025),
    dc_asgd=dict(recipe="dc_asgd_a", title="DC-ASGD", learning_rate=0.05),
    gap_aware=dict(recipe="gap_aware", title="Gap-Aware", learning_rate=0.02),
    dana_zero=dict(recipe="dana_zero", title="DANA-Zero", learning_rate=0.02),
    ssgd=dict(recipe="ssgd", title="SSGD", momentum=0.9, learning_rate=0.4),
  )
  config.workers = (4, 8, 16)
  config.seeds = (0, 1, 2)
  config.batch_size = 8
  config.examples = 8 * 1280
  config.clip_norm = 1.0
  rate_schedule = dict(warmup_examples=8 * 64, decay_examples=(8 * 960,))
  config.learning_rate_schedule = rate_schedule
  config.evaluations = 8
  config.evaluation_examples = 512
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    # XLA compiles an MLP in a fraction of the time of a GPT.
    config.data, config.model = dict(name="digits"), dict(name="mlp", hidden=())
    del config.evaluation_examples
    config.workers, config.seeds, config.batch_size = (2,), (0,), 16
    config.examples, config.evaluations = 256, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
