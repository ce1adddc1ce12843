"""Matrix factorisation under SSP and ESSP by time, where messages take some.

The runs of `ssp` over a network: square loss against simulated time, after Dai,
Kumar, Wei, Ho, Gibson and Xing, "High-Performance Distributed ML at Scale
through Parameter Server Consistency Models", AAAI 2015, arXiv 1410.8043. A pull
takes two latencies, and so does a push; rows that ESSP's server sends are on
their way while workers compute.

  asgd reproduce ssp_time
  python -m launch.train --config=configs/figures/ssp_time.py

70 cells, 5 minutes on two cores; --quick in two minutes.
"""

import ml_collections

BOUNDS = 0, 2, 3, 5, 10
EAGER = 0, 10
RATES = {"stable": 1.5, "edge": 8.0}
NETWORK = dict(latency=0.25, port=4e5, service=0.01)


def get_config():
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.factorisation:matrix_factorisation", rank=4
  )
  runs = {}
  for side, rate in RATES.items():
    for which, bounds in (("ssp", BOUNDS), ("essp", EAGER)):
      for bound in bounds:
        runs[f"{which}{bound}-{side}"] = dict(
          recipe="table",
          clock_every=2,
          learning_rate=rate,
          consistency=which,
          bound=bound,
          title=f"{which.upper()} {bound}, {side}",
        )
  config.runs = runs
  config.network = NETWORK
  config.workers = (8,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 200
  config.epochs = 16.0
  config.durations = dict(name="gamma", variation=0.1)
  config.evaluations = 40
  config.curvature_checks = 0
  config.on_nan = "record"
  return config.lock()
