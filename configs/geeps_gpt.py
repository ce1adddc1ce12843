"""A GPT with weights that do not fit into its device's memory.

One device runs all eight stages. Of weights, momentum and gradient sums (3.8
MB) the device holds 2 MB or 1 MB, and the host's memory the rest (Cui et al.,
"GeePS: scalable deep learning on distributed GPUs with a GPU-specialized
parameter server", EuroSys 2016).

  python -m launch.train --config=configs/geeps_gpt.py

40 updates of 8 microbatches. Columns, in MB: bytes that instructions use, bytes
fetched from the host's memory and written back to it, and the device's peak:

                      needed  fetched  written  held
  all on the device                             3.8
  2 MB                 1,268      103      101  2.0
  1 MB                 1,268      126      101  1.0

With the schedule `breadth_first`, a batch fetches the weights of a stage once
or twice, however many microbatches it has. All runs end with bit-equal
parameters, after 16 to 17 s of training.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=64)
  config.model = dict(name="gpt", depth=6, width=64, heads=4)
  config.engine = "pipeline"
  # All runs are the same training; only the memory on the device differs.
  run = dict(recipe="ssgd", momentum=0.9)
  config.runs = dict(
    whole=dict(run, title="all on the device"),
    two=dict(run, title="2 MB", device_megabytes=2.0),
    one=dict(run, title="1 MB", device_megabytes=1.0),
  )
  config.pipeline = dict(
    # 8 chunks: eight stages on one device. A stage runs all microbatches before
    # the next stage starts.
    schedule="breadth_first", stages=8, chunks=8, microbatches=8
  )
  config.batch_size = 4
  config.examples = 4 * 320  # 40 updates of 8 microbatches of 4
  config.learning_rate = 0.05
  config.evaluations = 2
  config.curvature_checks = 0
  if arg == "tiny":
    config.data.context, config.evaluation_examples = 8, 4
    config.model = dict(name="gpt", depth=2, width=8, heads=2)
    config.pipeline.update(stages=4, chunks=4, microbatches=2)
    # Less than the tiny model needs, as in the full size.
    config.runs.two.device_megabytes = 0.03
    config.runs.one.device_megabytes = 0.02
    config.batch_size, config.examples, config.evaluations = 2, 8, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
