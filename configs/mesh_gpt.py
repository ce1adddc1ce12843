"""A small GPT on Python's language reference, on any mesh.

  python -m launch.train --config=configs/mesh_gpt.py

217,000 parameters, 64 characters of context, 200 updates of 32 windows by AdamW
(ZeRO 1), on eight devices. All meshes have equal results: a train loss of
2.4195 nats over the last 20 updates (4.6 at first), a test loss of 2.1540, and
a test accuracy of 42.2 %. Losses of single updates differ by at most 3e-5.
Meshes differ in the MiB of parameters and optimizer state on each device:

  --config.mesh.axes=data:8                    1.03
  --config.mesh.axes=data:2,tensor:2,pipe:2    0.47  (the default)
  --config.mesh.axes=data:2,tensor:4           0.45
  --config.mesh.axes=tensor:8                  0.37

One seed; each takes a minute. Two cores do the work of eight devices, so the
runs' seconds do not show which mesh is faster.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="pydoc", context=64)
  config.model = dict(name="gpt", depth=4, width=64, heads=8)
  config.runs = dict(gpt=dict(title="GPT, AdamW"))
  config.engine = "mesh"
  config.mesh = dict(
    # Two replicas of two pipeline stages; each stage is divided over 2 devices.
    axes=dict(data=2, tensor=2, pipe=2),
    zero=1,  # the optimizer's state is divided over replicas
  )
  config.batch_size = 32
  config.examples = 6400  # 200 updates
  # b2 averages over 20 updates; the usual 0.999 would average over 1,000.
  config.optimizer = dict(name="adamw", b2=0.95, weight_decay=0.1)
  config.learning_rate = 3e-3
  rate_schedule = dict(warmup_examples=640, decay_examples=(5120,))
  config.learning_rate_schedule = rate_schedule
  config.clip_norm = 1.0
  config.curvature_checks = 0
  config.evaluation_examples = 64
  if arg == "tiny":
    config.data = dict(name="pydoc", context=8)
    config.model = dict(name="gpt", depth=2, width=16, heads=8)
    config.batch_size, config.examples, config.evaluations = 16, 64, 2
    config.evaluation_examples = 16
    config.learning_rate_schedule = dict(warmup_examples=32)
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
