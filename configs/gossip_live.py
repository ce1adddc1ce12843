"""Live peers: threads or Ray processes that exchange messages, no server.

Handwritten digits, 4 peers, each an actor of Ray. In the run `dense` a peer
sends each update in full to all peers. In the run `threshold` it sends about
one element in a thousand, as tau or -tau, and the others in later messages. The
second command kills peer 1 after 200 jobs; a new actor replaces it:

  python -m launch.train --config=configs/gossip_live.py --config.only=dense
  python -m launch.train --config=configs/gossip_live.py \
    --config.only=threshold --fault=kill:1:200
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(256, 256))
  # About one element in a thousand of an update is larger than tau.
  codec = dict(name="threshold", tau=0.025)
  runs = dict(
    dense=dict(recipe="threshold_sharing", title="dense sharing"),
    threshold=dict(
      recipe="threshold_sharing", title="threshold sharing", codec=codec
    ),
  )
  for run in runs.values():
    run["momentum"] = 0.9
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.engine = "ray"  # a process for each peer
  config.workers = (4,)
  config.seeds = (0, 1, 2)
  config.batch_size = 16
  config.epochs = 60.0
  config.learning_rate = 0.05
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(45.0,))
  config.evaluations = 5
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.seeds = (8,), (0,)
    config.epochs, config.evaluations = 0.2, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
