"""Sparse logistic regression with L1 on a parameter server, with bounded delay.

4 simulated workers compute gradients of blocks of features on their examples,
and the server takes proximal steps. A worker may be at most tau steps ahead of
the server. All runs end at the objective of scikit-learn's solver, with
the same weights at 0. Examples are generated (1,600 with 20 of 1,000 features).
The variant `breast_cancer` uses data of scikit-learn (asgd[sklearn]), as 3,121
binary features: each value's bin, and pairs of bins. `sst2` uses the words of
SST-2 in --data_dir.

The objectives of scikit-learn, BSP and delay 2 are 0.3823, 0.383 and 0.384 at
the end; for breast cancer 0.2413, 0.2417 and 0.2425, after 1,200 clocks.

  python -m launch.train --config=configs/sparse_logistic.py
  python -m launch.train --config=configs/sparse_logistic.py:breast_cancer
"""

import ml_collections

VARIANTS = {
  "breast_cancer": dict(
    problem=dict(examples="breast_cancer", l1=0.005),
    runs=dict(bsp=dict(learning_rate=8.0)),
    batch_size=114,  # all examples, by 4 workers
    epochs=1200.0,
    learning_rate=4.0,
  ),
  "sst2": dict(problem=dict(examples="sst2", l1=0.0005), batch_size=16837),
  "tiny": dict(workers=(2,), epochs=4.0, evaluations=1),
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  # Weight of the penalty: the larger, the more weights are 0.
  config.problem = dict(
    name="asgd.problems.sparse_logistic:sparse_logistic_regression", l1=0.002
  )
  # Two shards: each has a half of the features.
  delayed = dict(recipe="table", consistency="delay_bounded", shards=2)
  config.runs = dict(
    # Twice the rate of delay 2, see configs/figures/bounded_delay.py.
    bsp=dict(
      recipe="table",
      consistency="bulk_synchronous",
      title="BSP",
      learning_rate=3.0,
    ),
    tau2=dict(delayed, bound=2, title="delay 2"),
    kkt=dict(
      delayed,
      bound=2,
      # Workers send no gradient that leaves a weight at 0.
      filters=(dict(name="kkt", slack=0.001),),
      title="delay 2, KKT filter",
    ),
  )
  config.workers = (4,)
  config.seeds = (0,)
  config.batch_size = 400  # a quarter of the examples for each of 4 workers
  config.epochs = 400.0
  config.learning_rate = 1.5
  config.evaluations = 10
  config.curvature_checks = 0
  if arg is not None:
    if arg not in VARIANTS:
      raise ValueError(f"unknown variant {arg!r}; known: {', '.join(VARIANTS)}")
    config.update(VARIANTS[arg])
  return config.lock()
