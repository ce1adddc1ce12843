"""Training without a server: peers on a graph, against all-reduce.

Handwritten digits, 8 peers. All-reduce SGD waits for all peers, D-PSGD (on a
ring and on the exponential graph) for neighbours, AD-PSGD for no peer. SGP
sends to one peer per round. Three runs send less: local SGD, CHOCO-SGD with 1 %
of the elements, and threshold sharing of updates.

  python -m launch.train --config=configs/gossip_digits.py

Columns: test accuracy of the mean model in percent (mean and standard deviation
of three seeds), simulated time, MB per link. It takes 75 seconds on two cores:

                       accuracy      time   MB/link
  all-reduce           95.7 ± 0.4    254
  D-PSGD, ring         95.6 ± 0.3    224    8.0
  D-PSGD, exponential  95.7 ± 0.2    224    8.0
  SGP                  95.7 ± 0.2    241    2.7
  AD-PSGD, ring        95.7 ± 0.2    222    8.0
  CHOCO-SGD, ring      95.9 ± 0.2    246    0.11
  threshold sharing    95.4 ± 0.4    254    0.16
  local SGD, ring      95.7 ± 0.2    231    2.0
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  runs = dict(
    allreduce=dict(recipe="ssgd", title="all-reduce"),
    ring=dict(recipe="d_psgd", title="D-PSGD, ring"),
    exponential=dict(
      recipe="d_psgd", topology="exponential", title="D-PSGD, exponential"
    ),
    sgp=dict(recipe="sgp", title="SGP"),
    ad_psgd=dict(recipe="ad_psgd", title="AD-PSGD, ring"),
    choco=dict(
      recipe="choco_sgd",
      title="CHOCO-SGD, ring",
      codec=dict(name="top_k", density=0.01),  # 1 % of the elements
      gamma=0.1,  # step towards the average of the estimates
    ),
    sharing=dict(
      recipe="threshold_sharing",
      title="threshold sharing",
      # tau applies to updates, which are gradients times the learning rate.
      codec=dict(name="threshold", tau=0.003),
    ),
    # Four gradients between two exchanges.
    local=dict(recipe="local_d_psgd", title="local SGD, ring", steps=4),
  )
  for run in runs.values():
    run["momentum"] = 0.9
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = (8,)
  config.seeds = (0, 1, 2)
  config.batch_size = 16
  config.epochs = 20.0
  config.learning_rate = 0.02
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(14.0,))
  config.evaluations = 5
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.workers, config.seeds = (), (4,), (0,)
    config.epochs, config.evaluations = 0.2, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
