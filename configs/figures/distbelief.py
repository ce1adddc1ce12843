"""Figure 4 of DistBelief: the simulated time to a test loss.

SGD with one worker; Downpour with 20 workers, at a fixed rate or with Adagrad;
Sandblaster L-BFGS; and Downpour with Adagrad and 200 workers
(Dean et al., "Large scale distributed deep networks", NIPS 2012). Trained on
handwritten digits instead of speech.

  asgd reproduce distbelief
  python -m launch.train --config=configs/figures/distbelief.py

25 cells, about 5 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

LOSS = 0.3  # the test loss to reach, a mean over the test examples
RUNS = {  # label -> title, workers, entry; slow to fast in the paper's order
  "sgd": ("SGD", 1, dict(recipe="asgd", learning_rate=0.2)),
  "downpour": (
    "Downpour, 20",
    20,  # the paper's number of replicas
    dict(recipe="downpour", optimizer="sgd", learning_rate=0.02),
  ),
  "adagrad": (
    "Downpour with Adagrad, 20",
    20,
    dict(recipe="downpour", learning_rate=0.01),
  ),
  "sandblaster": (
    "Sandblaster L-BFGS, 100",
    100,  # the paper has 2,000, but the digits make only 90 portions
    dict(recipe="sandblaster", shards=2, weight_decay=1e-4),
  ),
  "adagrad-200": (
    "Downpour with Adagrad, 200",
    200,
    # A small rate, because gradients are up to 200 updates old.
    dict(recipe="downpour", learning_rate=0.002),
  ),
}
LABELS = list(RUNS)


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  runs = {
    label: dict(entry, title=title, workers=(workers,))
    for label, (title, workers, entry) in RUNS.items()
  }
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = (1,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 16
  config.epochs = 80.0  # 7,185 messages of 16 images
  config.durations = dict(name="gamma", variation=0.2)
  # Four per epoch: "time to loss" is exact to 22 messages.
  config.evaluations = 320
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.model.hidden, config.seeds = (), (0,)
    config.epochs, config.evaluations = 2.0, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def faster(name, says, slow, fast):
  return dict(
    name=name,
    says=says,
    kind="ratio",
    # Above 1: the slow run takes longer than the fast one.
    column="time to loss",
    of=[slow],
    to=[fast],
    above=1.0,
  )


def claims():
  return [
    # The order of the paper's figure 4, pair by pair.
    faster(
      "Downpour",
      "Downpour with 20 workers is ahead of SGD",
      *("sgd", "downpour"),
    ),
    faster(
      "Adagrad",
      "Downpour with Adagrad is ahead of Downpour with a fixed rate",
      *("downpour", "adagrad"),
    ),
    faster(
      "Sandblaster",
      "Sandblaster L-BFGS is ahead of Downpour with Adagrad and 20 workers",
      *("adagrad", "sandblaster"),
    ),
    faster(
      "Adagrad, 200 workers",
      "Downpour with Adagrad and 200 workers is ahead of Sandblaster",
      *("sandblaster", "adagrad-200"),
    ),
  ]


def get_figure():
  panel = dict(
    xlabel="workers",
    series={
      title: [(workers, label)] for label, (title, workers, _) in RUNS.items()
    },
    xlog=True,
  )
  return dict(
    title="DistBelief: Downpour and Sandblaster in simulated time",
    paper=(
      "Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, figure 4:"
      " speech, up to 200 model replicas and 2,000 of Sandblaster"
    ),
    finding=(
      "Downpour is ahead of SGD by time, and Adagrad ahead of a fixed rate;"
      " whether Sandblaster is ahead of both is open."
    ),
    about=(
      "The simulated time to a test loss of 0.3, in batches of one worker;"
      " messages and the coordinator's commands take no time. 1,437 images make"
      " 90 portions, so more than 90 workers of Sandblaster would be idle."
    ),
    columns={
      "time to loss": dict(kind="until", column="test_loss", below=LOSS)
    },
    claims=claims(),
    panels=[
      dict(
        panel,
        title="time to the loss",
        column="time to loss",
        ylabel=f"time to test loss {LOSS} (batches)",
        yscale="log",
      ),
      dict(
        panel,
        title="accuracy in the end",
        column="test_accuracy",
        ylabel="accuracy (%)",
        scale=100.0,
      ),
    ],
    quick={"epochs": 40.0, "evaluations": 160},
    tuned=(
      "rates on seed 100: from 0.02 to 0.2 for SGD, from 0.005 to 0.02 for"
      " Downpour, from 0.002 to 0.01 with 200 workers"
    ),
  )
