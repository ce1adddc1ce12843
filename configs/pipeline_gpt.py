"""A GPT on Python's language reference, in every kind of pipeline.

  python -m launch.train --config=configs/pipeline_gpt.py

317,000 parameters, 64 characters of context, four CPU devices. Each run has 640
microbatches of 4 windows. Columns: test loss (nats; 4.6 at first), accuracy of
characters in percent, staleness of each stage, weight versions of the first
stage, activations of the fullest device in MiB, and the bubble in percent as
predicted from measured durations:

                               loss   acc.  stale    versions  MiB   bubble
  GPipe                        2.603  36.5  0 0 0 0  1         44.2  39
  1F1B                         2.603  36.5  0 0 0 0  1         16.6  35
  interleaved, 8 stages        2.603  36.5  0 ...    1         24.9  25
  ZB-H1                        2.603  36.5  0 0 0 0  1         22.1  27
  PipeDream (stash)            2.465  37.4  3 2 1 0  4         16.6  20
  PipeDream-2BW, momentum 0.5  2.827  32.8  1 1 1 1  2         16.6  24
  PipeDream-2BW, predicted     2.763  34.5  1 1 1 1  2         16.6  20
  FTPipe                       2.477  37.3  3 2 1 0  1          3.1  24
  FTPipe, activations kept     2.463  38.1  3 2 1 0  1         16.6  24
  PipeDream, Gap-Aware         2.462  38.1  3 2 1 0  4         16.6  25
  PipeDream, DC-ASGD           2.460  38.4  3 2 1 0  4         16.6  21
  PipeDream, predicted         2.426  38.5  3 2 1 0  4         16.6  26

One seed, 5 minutes (2 of them training) on two cores that other programs used,
too. PipeDream makes eight updates per update of GPipe. Two cores do the work of
four devices, so the runs' seconds do not show which schedule is faster, and
measured bubbles are larger than predicted ones. Synchronous schedules clip by
the norm over all stages, so they all train alike. An asynchronous stage clips
by the norm of the gradient of that stage.
"""

import ml_collections


def _runs():
  sgd = dict(recipe="asgd", momentum=0.9)
  pipedream = dict(sgd, schedule="pipedream")
  gap_aware = dict(schedule="pipedream", recipe="gap_aware")
  two_bw = dict(sgd, schedule="pipedream_2bw", every=4)
  ftpipe = dict(sgd, schedule="ftpipe")
  # With momentum 0.9, 2BW diverges at these rates unless it predicts weights:
  # its delay of one update of 4 microbatches is longer than PipeDream's.
  slow = dict(momentum=0.5, learning_rate=0.05)
  predicted = dict(predict=True, learning_rate=0.025)
  return dict(
    gpipe=dict(sgd, schedule="gpipe", title="GPipe"),
    one_f_one_b=dict(sgd, schedule="one_f_one_b", title="1F1B"),
    # Eight stages on the same four devices.
    interleaved=dict(
      sgd, schedule="interleaved", stages=8, chunks=2, title="interleaved"
    ),
    zb_h1=dict(sgd, schedule="zb_h1", title="ZB-H1"),
    pipedream=dict(pipedream, title="PipeDream (stash)"),
    pipedream_2bw=dict(two_bw, title="PipeDream-2BW, momentum 0.5", **slow),
    predict_2bw=dict(two_bw, title="PipeDream-2BW, predicted", **predicted),
    ftpipe=dict(ftpipe, title="FTPipe"),
    stale=dict(ftpipe, recompute=False, title="FTPipe, activations kept"),
    gap_aware=dict(gap_aware, title="PipeDream, Gap-Aware"),
    dc=dict(pipedream, recipe="dc_asgd_a", title="PipeDream, DC-ASGD"),
    predict=dict(pipedream, predict=True, title="PipeDream, predicted"),
  )


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=64)
  config.model = dict(name="gpt", depth=6, width=64, heads=4)
  config.engine = "pipeline"
  config.pipeline = dict(stages=4, cuts="parameters", microbatches=8)
  config.batch_size = 4  # per microbatch
  config.examples = 2560  # 80 updates of 8 microbatches
  config.learning_rate = 0.05  # per microbatch; GPipe's update has 8 x that
  config.clip_norm = 1.0
  rate_schedule = dict(warmup_examples=256, decay_examples=(2048,))
  config.learning_rate_schedule = rate_schedule
  config.runs = ml_collections.ConfigDict(_runs(), sort_keys=False)  # in order
  config.curvature_checks = 0
  config.evaluation_examples = 64
  config.on_nan = "record"
  if arg == "tiny":
    # XLA compiles an MLP in a fraction of the time of a GPT.
    config.data = dict(name="digits")
    config.model = dict(name="mlp", hidden=(8, 8, 8))
    del config.evaluation_examples
    config.pipeline = dict(stages=2, cuts="parameters", microbatches=4)
    config.runs.interleaved.stages = 4  # the tiny model has few layers
    config.batch_size, config.examples, config.evaluations = 8, 64, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
