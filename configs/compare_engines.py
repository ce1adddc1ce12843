"""One problem on every engine: one table, one figure.

Handwritten digits and an MLP of four layers. Each run gets the same 7,680
examples: sequential SGD, asynchronous SGD with four workers (simulated, in
threads, and in processes of Ray), a PipeDream pipeline of four stages, and
a mesh of eight devices. All have momentum 0.9, and the same learning
rate for a gradient of 16 examples.

  python -m launch.train --config=configs/compare_engines.py

Test accuracy in percent, one seed, in 2 min 20 s on two cores: SGD 96.7, ASGD
simulated 94.2, DANA simulated 94.7, in threads 95.8 and in Ray 96.4 (these
two vary with the machine's speed), PipeDream 96.1, eight devices 96.9.
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64, 64))
  asgd = dict(recipe="asgd", momentum=0.9)
  dana = dict(recipe="dana_zero", momentum=0.9)
  stages = dict(engine="pipeline", schedule="pipedream", stages=4)
  # Eight replicas with 2 examples each.
  devices = dict(engine="mesh", axes=dict(data=8))
  optimizer = dict(name="sgd", momentum=0.9)
  runs = dict(
    sgd=dict(asgd, engine="simulate", title="SGD, one worker", workers=1),
    asgd=dict(asgd, engine="simulate", title="ASGD, simulated"),
    dana=dict(dana, engine="simulate", title="DANA, simulated"),
    threads=dict(dana, engine="threads", title="DANA, threads"),
    ray=dict(dana, engine="ray", title="DANA, Ray processes"),
    pipeline=dict(asgd, title="PipeDream, 4 stages", **stages),
    mesh=dict(devices, optimizer=optimizer, title="8 devices in step"),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)  # this order
  config.workers = (4,)
  config.batch_size = 16
  config.examples = 7680  # 480 gradients
  config.learning_rate = 0.01
  config.learning_rate_schedule = dict(warmup_examples=768)  # 10 % of the run
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.workers = (8,), (2,)
    config.runs.pipeline.stages = 2
    config.examples, config.evaluations = 256, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
