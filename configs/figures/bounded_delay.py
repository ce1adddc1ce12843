"""Sparse logistic regression: time that a bounded delay saves, and its cost.

Four workers compute delayed block proximal steps on generated examples (1,600
with 20 of 1,000 features). A worker may be up to tau clocks ahead of the first
incomplete step. Simulated durations have a coefficient of variation of 0.5.

  asgd reproduce bounded_delay
  python -m launch.train --config=configs/figures/bounded_delay.py

60 cells, 5 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

DELAYS = 0, 1, 2, 4, 8, 16  # tau in clocks
# At 1.5 all delays train; at 3.0 only short ones do (`tuned` below).
RATES = {"stable": 1.5, "edge": 3.0}
OBJECTIVE = 0.4  # to reach; scikit-learn's solver ends at 0.382
TIME, END = "time to objective", "objective in the end"


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.sparse_logistic:sparse_logistic_regression", l1=0.002
  )
  config.runs = ml_collections.ConfigDict(
    {
      f"tau{tau}-{side}": dict(
        recipe="table",
        consistency="delay_bounded",
        bound=tau,
        shards=2,  # each has half of the features
        learning_rate=rate,
        title=f"delay {tau}, {side}",
      )
      for side, rate in RATES.items()
      for tau in DELAYS
    },
    sort_keys=False,
  )
  config.workers = (4,)
  config.seeds = (0, 1, 2, 3, 4)
  # A quarter of the examples: the four workers' batches are one pass.
  config.batch_size = 400
  config.epochs = 200.0  # 200 clocks of four workers
  config.durations = dict(name="gamma", variation=0.5)
  config.evaluations = 100  # every second clock
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.workers, config.seeds, config.epochs = (2,), (0,), 1.0
    config.evaluations = 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def claims():
  return [
    dict(
      name="a delay wins time",
      says="at tau = 8 the objective is reached 1.2 times sooner than at 0",
      kind="ratio",
      column=TIME,
      of="tau0-stable",
      to="tau8-stable",
      above=1.2,
    ),
    dict(
      name="about 8 is enough",
      says="tau = 16 saves less than another twentieth",
      kind="ratio",
      column=TIME,
      of="tau8-stable",
      to="tau16-stable",
      below=1.05,
    ),
    dict(
      name="no worse",
      says="after as many steps the objective is the same as without a delay",
      kind="difference",
      column=END,
      of=["tau8-stable", "tau16-stable"],
      to="tau0-stable",
      above=-0.005,  # of an objective of 0.38
      below=0.005,
    ),
    dict(
      name="at the edge a delay costs",
      says="at twice the rate the objective rises with the delay",
      kind="ordering",
      order="rises",
      column=END,
      runs=["tau0-edge", "tau2-edge", "tau16-edge"],
    ),
  ]


def series():
  return {
    f"rate {rate:g}": [(tau, f"tau{tau}-{side}") for tau in DELAYS]
    for side, rate in RATES.items()
  }


def get_figure():
  panel = dict(xlabel="delay tau (clocks)", series=series())
  return dict(
    title="Sparse logistic regression with a bounded delay",
    paper=(
      "Li, Andersen, Smola, Yu: Communication Efficient Distributed Machine"
      " Learning with the Parameter Server, NIPS 2014: delayed block proximal"
      " gradient, on data of advertisements"
    ),
    finding=(
      "A delay of 8 reaches the objective 1.5 times sooner, at no cost in"
      " steps; whether longer delays are useless is open."
    ),
    about=(
      "Simulated time until the objective is 0.4, and the objective after 200"
      " epochs. A block of features is updated by every fourth job: with a"
      " short delay the missing updates concern other blocks."
    ),
    columns={
      TIME: dict(kind="until", column="objective", below=OBJECTIVE),
      END: dict(kind="last", column="objective"),
    },
    claims=claims(),
    panels=[
      dict(panel, title="time", column=TIME, ylabel=f"time to {OBJECTIVE}"),
      dict(
        panel,
        title="objective after 200 epochs",
        column=END,
        ylabel="objective",
      ),
      dict(
        panel,
        title="time of 200 epochs",
        column="simulated_time",
        ylabel="mean batch times",
      ),
    ],
    quick={
      "only": [f"tau{tau}-{side}" for side in RATES for tau in (0, 2, 8, 16)]
    },
    tuned=(
      "both rates on seed 100, from 0.4 to 8: one at which all delays train,"
      " and one at which long delays do not"
    ),
  )
