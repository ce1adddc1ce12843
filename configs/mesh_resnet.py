"""A ResNet on small images; a mesh divides examples and rows of images.

  python -m launch.train --config=configs/mesh_resnet.py

ResNet-20 with GroupNorm on 8 x 8 digits, 160 updates of 64 images by SGD with
momentum, on eight devices: four replicas of two devices, each with half of
every image's rows. No more than two: the last layers have 2 rows. CIFAR-10
(--config.data.name=cifar10 --config.data.augment=True) can be divided over 8.

                                         train loss  test loss  accuracy %
  float32  data:4,rows:2 (the default)   0.0057      0.0776     97.5
           data:8                        0.0060      0.0861     96.9
  float64  data:4,rows:2                 0.0056      0.0839     96.9
           data:8                        0.0056      0.0839     96.9

Rounding errors grow as this network learns. With
--config.mesh.precision=float64 they stay below the printed digits. One seed, a
minute each on two cores.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="resnet20", norm="group")
  config.runs = dict(resnet=dict(title="ResNet-20"))
  config.engine = "mesh"
  config.mesh = dict(
    axes=dict(data=4, rows=2),  # half of the rows of an image
  )
  config.batch_size = 64
  config.examples = 10240  # 160 updates
  config.optimizer = dict(name="sgd", momentum=0.9, nesterov=True)
  config.learning_rate = 0.02
  # Warm-up in the first quarter of the run; a tenth of the rate in the last.
  rate_schedule = dict(warmup_examples=2560, decay_examples=(7680,))
  config.learning_rate_schedule = rate_schedule
  config.clip_norm = 1.0
  config.curvature_checks = 0
  config.evaluations = 8
  if arg == "tiny":
    config.model = dict(name="asgd.models:resnet", depth=8, norm="group")
    config.batch_size, config.examples, config.evaluations = 8, 16, 1
    config.evaluation_examples = 50
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
