"""Live tables of keyed rows: 4 workers and 2 shards, each a process of Ray.

Matrix factorisation by SSP and ESSP, on generated ratings. Workers pull the
rows of their batches from the shards that own them, and push to them. The
second command kills worker 1 at its 100th job:

  python -m launch.train --config=configs/matrix_factorisation_live.py
  python -m launch.train --config=configs/matrix_factorisation_live.py \
    --config.only=ssp --fault=kill:1:100

A shard may be killed, too (kill -9, or asgd chaos): its successor recovers the
same state to the bit. The runs end at the R^2 of matrix_factorisation.py (98.6
to 98.8 %).
"""

import ml_collections


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.factorisation:matrix_factorisation", rank=4
  )
  # The settings of matrix_factorisation.py, on two shards.
  tables = dict(recipe="table", clock_every=2, shards=2)
  runs = dict(
    ssp=dict(tables, consistency="ssp", bound=3, title="SSP 3"),
    essp=dict(tables, consistency="essp", bound=3, title="ESSP 3"),
  )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.engine = "ray"
  config.workers = (4,)
  config.seeds = (0,)
  config.batch_size = 200
  config.epochs = 40.0
  config.learning_rate = 8.0  # as in matrix_factorisation.py
  config.evaluations = 5
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.workers, config.epochs, config.evaluations = (2,), 1.0, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()
