"""A recurrent model under staleness: an LSTM, character by character.

Sequential SGD, synchronous SGD, ASGD and DANA on the Python language reference,
which is part of Python: an LSTM of 64 features (Hochreiter and Schmidhuber
1997), 32 characters of context, 640 gradients of 8 windows. Durations follow
the homogeneous gamma model of the DANA paper (Hakimi et al. 2019).

  python -m launch.train --config=configs/lstm.py
  asgd plan --config=lstm --devices=8 --bandwidth=1

Test accuracy of the next character in percent, mean and standard deviation of
three seeds (DANA-Zero: two). It takes 1.5 minutes on two cores:

  SGD, one worker     51.1 ± 0.9
  DANA-Zero, 8        48.9 ± 0.4
  ASGD, 8             47.2 ± 0.8
  SSGD, 8             40.6 ± 0.6

All runs have 640 gradients; SSGD makes 80 updates of them. Its rate is that of
SGD and ASGD, not tuned for larger batches.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=32)
  config.model = dict(name="lstm", width=64)
  config.runs = dict(
    sgd=dict(recipe="asgd", title="SGD (1 worker)", workers=(1,)),
    asgd=dict(recipe="asgd", title="ASGD"),
    dana_zero=dict(
      recipe="dana_zero", title="DANA-Zero", learning_rate=0.1
    ),
    ssgd=dict(recipe="ssgd", title="SSGD"),
  )
  config.workers = (8,)
  config.seeds = (0, 1, 2)
  config.batch_size = 8
  config.examples = 8 * 640
  config.learning_rate = 1.0
  config.clip_norm = 1.0
  config.learning_rate_schedule = dict(warmup_examples=8 * 64)
  config.evaluations = 4
  config.evaluation_examples = 512
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.data.context, config.evaluation_examples = 8, 4
    config.model = dict(name="lstm", width=8)
    config.workers, config.seeds, config.batch_size = (2,), (0,), 2
    config.examples, config.evaluations = 32, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
