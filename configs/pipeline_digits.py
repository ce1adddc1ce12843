"""Pipelines in a minute: an MLP on handwritten digits, four stages.

  python -m launch.train --config=configs/pipeline_digits.py

Each run has 480 microbatches of 8 images: 60 updates of a synchronous schedule,
480 of PipeDream. Test loss and accuracy in percent, mean of three seeds (the
synchronous schedules agree in all printed digits):

                           loss   accuracy  staleness of stages
  GPipe, 1F1B, ZB-H1, -V   0.256  92.3      0 0 0 0
  PipeDream (stash)        0.208  93.2      3 2 1 0
  PipeDream-2BW            0.209  92.8      1 1 1 1
  stale                    0.375  89.5      6 4 2 0
  PipeDream, Gap-Aware     0.210  92.9      3 2 1 0
  PipeDream, predicted     0.122  96.1      3 2 1 0

All 27 cells took 77 seconds of CPU time, or 108 seconds on two busy cores.
Starting a task of so small a model takes as long as the task, so the runs'
seconds do not show which schedule is faster.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64, 64))
  config.engine = "pipeline"
  # Stages with equal numbers of parameters.
  config.pipeline = dict(stages=4, cuts="parameters", microbatches=8)
  config.batch_size = 8  # per microbatch
  config.examples = 3840  # 60 updates of 8 microbatches
  config.seeds = (0, 1, 2)
  config.learning_rate = 0.0125  # per microbatch; GPipe's update has 8 x that
  config.learning_rate_schedule = dict(warmup_examples=320)
  # Every asynchronous schedule applies a gradient of one microbatch.
  sgd = dict(recipe="asgd", momentum=0.9)
  pipedream = dict(sgd, schedule="pipedream")
  gap_aware = dict(schedule="pipedream", recipe="gap_aware")
  # An update has 4 microbatches.
  two_bw = dict(sgd, schedule="pipedream_2bw", every=4, learning_rate=0.005)
  runs = dict(
    gpipe=dict(sgd, schedule="gpipe", title="GPipe"),
    one_f_one_b=dict(sgd, schedule="one_f_one_b", title="1F1B"),
    zb_h1=dict(sgd, schedule="zb_h1", title="ZB-H1"),
    zb_v=dict(sgd, schedule="zb_v", title="ZB-V, two devices"),
    pipedream=dict(pipedream, title="PipeDream (stash)"),
    pipedream_2bw=dict(two_bw, title="PipeDream-2BW"),
    stale=dict(sgd, schedule="stale", title="stale"),
    gap_aware=dict(gap_aware, title="PipeDream, Gap-Aware"),
    predict=dict(pipedream, predict=True, title="PipeDream, predicted"),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)  # in order
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.seeds = (8, 8, 8), (0,)
    config.pipeline.stages, config.runs.zb_v.stages = 2, 4
    config.examples, config.evaluations = 128, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
