"""Compressed messages: bytes and accuracy, with and without a residual.

Asynchronous SGD with momentum on handwritten digits. Four workers send
gradients through a codec: Strom's threshold (Interspeech 2015), the largest
hundredth of each leaf, signs (Seide et al. 2014), and 4-bit numbers of QSGD
(Alistarh et al. 2017). One run is synchronous, with signs in both directions.

  python -m launch.train --config=configs/compressed_digits.py
  python -m launch.train --config=configs/compressed_digits.py \
      --config.engine=threads --config.only=dense,threshold

Columns: accuracy in percent (mean and standard deviation of three seeds), and
how many times fewer bytes than dense messages. Two minutes on one core:

  dense                        96.7 ± 0.0     1
  threshold                    96.8 ± 0.2    43
  threshold, no residual       94.1 ± 1.5    48
  top 1 %                      96.1 ± 1.0    73
  1 bit                        96.6 ± 0.7    16
  QSGD                         96.4 ± 0.6    22
  1 bit both ways, in rounds   96.1 ± 0.3    16, and down 15
"""

import ml_collections

# tau: the magnitude of every sent element; smaller ones stay in the residual.
THRESHOLD = dict(name="threshold", tau=0.02)


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  momentum_sgd = dict(recipe="asgd", momentum=0.9)
  runs = dict(
    dense=dict(**momentum_sgd, title="dense"),
    threshold=dict(**momentum_sgd, title="threshold", compress=THRESHOLD),
    no_residual=dict(
      **momentum_sgd,
      title="threshold, no residual",
      compress=dict(**THRESHOLD, error_feedback=False),
    ),
    top_k=dict(  # of each leaf
      **momentum_sgd, title="top 1 %", compress=dict(name="top_k", density=0.01)
    ),
    onebit=dict(**momentum_sgd, title="1 bit", compress="onebit"),
    qsgd=dict(
      # Seven magnitudes and a sign are 4 bits.
      **momentum_sgd, title="QSGD", compress=dict(name="qsgd", levels=7)
    ),
    rounds=dict(
      recipe="ssgd",
      momentum=0.9,
      title="1 bit both ways, in rounds",
      compress="onebit",
      compress_down="onebit",
      # An update is the mean of four messages, so its rate is 4 x 0.005.
      learning_rate=0.02,
    ),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)  # this order
  config.workers = (4,)
  config.seeds = (0, 1, 2)
  config.batch_size = 16
  config.epochs = 15.0
  config.learning_rate = 0.005  # momentum 0.9 makes its effective rate 0.05
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(10.0,))
  config.evaluations = 15
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.workers, config.seeds = (), (2,), (0,)
    config.epochs, config.evaluations = 0.1, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
