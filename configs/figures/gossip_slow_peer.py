"""One slow peer of eight: which algorithms wait for it.

All-reduce SGD waits for all peers. D-PSGD on a ring waits for neighbours, which
wait for theirs: in the end all wait for the slowest peer. AD-PSGD waits for no
peer. One of eight peers is up to ten times slower, in simulated time (constant
durations), on handwritten digits. A run ends after 20 epochs, counted over all
peers.

  python -m launch.reproduce gossip_slow_peer
  python -m launch.train --config=configs/figures/gossip_slow_peer.py

45 cells, about 4 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

SLOWDOWNS = 1, 3, 10  # of one peer; 1: none is slow
LOSS = 0.2  # the training loss to reach; columns of kind `reach` smooth it
MESSAGES = 1437 // 16 * 20 // 8 * 8  # in 20 epochs, a multiple of eight
RECIPES = {
  "allreduce": dict(recipe="ssgd"),
  "dpsgd": dict(recipe="d_psgd", topology="ring"),
  "adpsgd": dict(recipe="ad_psgd", topology="ring"),
}
TITLES = {
  "allreduce": "all-reduce",
  "dpsgd": "D-PSGD, ring",
  "adpsgd": "AD-PSGD, ring",
}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(64, 64))
  runs = {}
  for slow in SLOWDOWNS:
    for label, recipe in RECIPES.items():
      runs[f"{label}-{slow}"] = dict(
        recipe,
        title=f"{TITLES[label]}, {slow}",
        momentum=0.9,
        # The last of eight peers.
        durations=dict(name="constant", slowdown=(1,) * 7 + (slow,)),
      )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = (8,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 16
  config.epochs = 20.0
  config.learning_rate = 0.02
  config.learning_rate_schedule = dict(warmup_epochs=1.0, decay_epochs=(14.0,))
  config.evaluations = 2
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.seeds = (), (0,)
    config.epochs, config.evaluations = 0.2, 1
    config.learning_rate_schedule = dict()
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def cells(label, slowdowns=SLOWDOWNS):
  return [f"{label}-{slow}" for slow in slowdowns]


def ratio(name, says, of, to, **bounds):
  column = bounds.pop("column", "simulated_time")
  return dict(
    name=name, says=says, kind="ratio", column=column, of=of, to=to, **bounds
  )


def claims():
  return [
    ratio(
      *("all-reduce follows", "a peer ten times slower: ten times the time"),
      *("allreduce-10", "allreduce-1"),
      # Rounds take as long as the slowest peer.
      above=9.5,
      below=10.5,
    ),
    ratio(
      "rounds follow",
      "waiting for neighbours alone does not help against one that stays slow",
      *("dpsgd-10", "dpsgd-1"),
      above=9.0,
      below=10.5,
    ),
    ratio(
      "pairs barely move",
      "AD-PSGD with a peer ten times slower takes under 1.2 times as long",
      *("adpsgd-10", "adpsgd-1"),
      # Seven of eight peers continue: 8 / 7.1 times as long.
      below=1.2,
    ),
    ratio(
      "to the loss",
      f"with that peer AD-PSGD reaches a training loss of {LOSS} over five"
      " times sooner than all-reduce",
      *("allreduce-10", "adpsgd-10"),
      column="time to loss",
      above=5.0,
    ),
    dict(
      name="equal per epoch",
      says=(
        "after as many epochs all are within 2 points of all-reduce, however"
        " slow the one peer"
      ),
      kind="difference",
      column="test_accuracy",
      of=[*cells("dpsgd"), *cells("adpsgd")],
      to="allreduce-1",
      above=-0.02,
      below=0.02,
    ),
    dict(
      name="staleness",
      says="the slower the slow peer, the larger the largest staleness",
      kind="monotone",
      order="rises",
      column="staleness_max",  # in mixes
      runs=cells("adpsgd"),
    ),
  ]


def panel(title, column, ylabel, **options):
  return dict(
    title=title,
    column=column,
    xlabel="slowdown of one peer of eight",
    ylabel=ylabel,
    series={
      TITLES[label]: [(slow, f"{label}-{slow}") for slow in SLOWDOWNS]
      for label in RECIPES
    },
    xlog=True,
    **options,
  )


def get_figure():
  computed = [
    dict(
      title="computed: 8 / (7 + 1 / s)",
      source="computed: seven peers of rate 1 and one of rate 1 / s",
      # Batches of one peer in 20 epochs.
      points=[(s, MESSAGES / (7 + 1 / s)) for s in SLOWDOWNS],
      of=TITLES["adpsgd"],
      line="--",
      marker="",
    )
  ]
  return dict(
    title="A slow peer: all-reduce, neighbours and pairs",
    paper=(
      "Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic"
      " Gradient Descent, ICML 2018, arXiv 1710.06952; the sweep over one"
      " peer's slowdown, on digits, is ours"
    ),
    finding=(
      "A peer ten times slower makes rounds ten times slower, but AD-PSGD only"
      " 1.13 times."
    ),
    about=(
      "Eight workers, one of them up to ten times slower, in simulated time"
      " (constant durations, messages take none): the time that 20 epochs take,"
      " the time to a training loss of 0.2, and the test accuracy of the mean"
      " model after 20 epochs."
    ),
    columns={"time to loss": dict(kind="reach", loss=LOSS)},
    claims=claims(),
    panels=[
      panel(
        "20 epochs", "simulated_time", "time (batches)", yscale="log",
        published=computed,
      ),
      panel("to the loss", "time to loss", f"time to loss {LOSS}",
        yscale="log"),
      panel("accuracy", "test_accuracy", "accuracy (%)", scale=100),
      panel("staleness", "staleness_max", "largest staleness (mixes)"),
    ],
    quick={
      # Without the slowdown of 3. Not fewer epochs: the computed times are
      # those of 20.
      "only": [name for label in RECIPES for name in cells(label, (1, 10))],
    },
    tuned="nothing: rates and epochs are those of configs/gossip_digits.py",
  )
