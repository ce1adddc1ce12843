"""k-means on a parameter server: centres as rows, digits, 4 workers.

The table has a row for each cluster of handwritten digits: the sum and the
number of its examples. 4 simulated workers add to the rows, and read centres
that are up to 3 clocks old. The result equals that of one worker, and that of
scikit-learn's MiniBatchKMeans with the same initial centres.

  python -m launch.train --config=configs/k_means.py
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  # As many clusters as digits.
  config.problem = dict(name="asgd.problems.clustering:k_means", clusters=10)
  config.runs = dict(
    one=dict(
      recipe="table",
      consistency="bulk_synchronous",
      title="one worker",
      workers=(1,),
    ),
    ssp=dict(recipe="table", consistency="ssp", bound=3, title="SSP 3"),
    essp=dict(recipe="table", consistency="essp", bound=3, title="ESSP 3"),
  )
  config.workers = (4,)
  config.seeds = (0, 1, 2)
  config.batch_size = 64  # a clock is one batch
  config.epochs = 10.0
  config.evaluations = 10
  config.curvature_checks = 0
  if arg == "tiny":
    config.problem.clusters, config.workers, config.seeds = 3, (2,), (0,)
    config.epochs, config.evaluations = 0.2, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
