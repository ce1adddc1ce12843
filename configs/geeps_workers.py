"""Workers of a parameter server, each with room for only a part of the model.

A GPT on Python's reference, asynchronous SGD with two workers (Cui et al.,
"GeePS: scalable deep learning on distributed GPUs with a GPU-specialized
parameter server", EuroSys 2016). The parameters are 4.9 MB. A job that evicts
nothing needs 13.2 MB on the device: parameters, gradients, and values for the
backward. In two runs the device holds 8 MB or 3 MB, and the host the rest.

  python -m launch.train --config=configs/geeps_workers.py
  python -m launch.train --config=configs/geeps_workers.py \
      --config.engine=threads

In simulated time all runs end with the same loss, up to rounding. Columns, in
MB for 320 jobs: fetched from and written to the host, and a device's peak:

            fetched  written  held
  8 MB        3,540    2,760   7.7
  3 MB        4,850    3,560   3.0
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=32)
  config.model = dict(name="gpt", depth=6, width=128, heads=4)
  # All runs are the same training; only the memory on the devices differs.
  run = dict(recipe="asgd", momentum=0.9)
  config.runs = dict(
    whole=dict(run, title="no limit"),
    eight=dict(run, title="8 MB", memory=dict(device_megabytes=8.0)),
    three=dict(run, title="3 MB", memory=dict(device_megabytes=3.0)),
  )
  config.workers = (2,)
  config.batch_size = 2
  config.examples = 2 * 320
  config.learning_rate = 0.02
  config.evaluations = 2
  config.curvature_checks = 0
  if arg == "tiny":
    config.data.context, config.evaluation_examples = 8, 4
    config.model = dict(name="gpt", depth=2, width=8, heads=2)
    config.runs.eight.memory.device_megabytes = 0.05
    config.runs.three.memory.device_megabytes = 0.03
    config.batch_size, config.examples, config.evaluations = 2, 16, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
