"""How far the batch of synchronous SGD can grow: epochs to an accuracy.

1 to 128 workers have batches of 32: an update has 32 to 4,096 examples. The
rate is constant, or grows with the square root of the batch, or linearly, or
linearly after a warm-up of one epoch. The figure also has the gradient noise
scale. After Goyal et al., "Accurate, large minibatch SGD: training ImageNet in
1 hour", arXiv 1706.02677 (linear rate; warm-up from the rate of one worker),
Krizhevsky, "One weird trick", arXiv 1404.5997 (square root), and McCandlish,
Kaplan, Amodei et al., "An empirical model of large-batch training", arXiv
1812.06162 (noise scale).

  asgd reproduce batch_limit
  python -m launch.train --config=configs/figures/batch_limit.py

85 cells; --quick, on handwritten digits, under 3 minutes on two cores.
"""

import ml_collections

BATCH = 32  # examples per worker
WORKERS = 1, 4, 16, 64, 128
LEAST, MOST = WORKERS[0], WORKERS[-1]
RATE = 0.01  # of one worker
RULES = {  # label -> title, power of the batch
  "constant": ("constant rate", 0.0),
  "root": ("square root", 0.5),
  "linear": ("linear", 1.0),
  "warm": ("linear, warm-up", 1.0),
}
ACCURACY = 0.85
TO_ACCURACY = f"epochs to {ACCURACY:.0%}"
FLAT, EDGE = 16, 64  # workers: as good as one; where a warm-up should help
NOISE = "noise scale"


def label(rule, count):
  """Returns the label of a run; all rules share the run of one worker."""
  return "one" if count == LEAST else f"{rule}-{count}"


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="fashion")
  config.model = dict(name="mlp", hidden=(64,))
  runs = dict(
    one=dict(recipe="ssgd", workers=(LEAST,), title=f"batch {BATCH}")
  )
  for rule, (title, power) in RULES.items():
    for count in WORKERS[1:]:
      entry = dict(
        recipe="ssgd",
        learning_rate=RATE * count**power,
        workers=(count,),
        title=f"batch {BATCH * count:,}, {title}",
      )
      if rule == "warm":
        # From the rate of one worker, which is the peak divided by `count`.
        entry["learning_rate_schedule"] = dict(warmup_epochs=1.0)
      runs[label(rule, count)] = entry
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = BATCH
  config.learning_rate = RATE
  config.epochs = 8.0
  config.evaluations = 64  # eight per epoch
  config.evaluation_examples = 2000
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.data.name, config.model.hidden = "digits", ()
    config.seeds, config.examples, config.evaluations = (0,), 512, 1
    config.learning_rate = 0.01
    config.only = ["one", *(label(rule, 4) for rule in RULES), "constant-16"]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def cells(rule, counts=WORKERS):
  return [label(rule, count) for count in counts]


def ratio(name, says, of, to, **bounds):
  return dict(
    name=name,
    says=says,
    kind="ratio",
    statistic="sign",  # medians: infinite if the accuracy is never reached
    column=TO_ACCURACY,
    of=of,
    to=to,
    **bounds,
  )


def claims():
  flat, most = BATCH * FLAT, BATCH * MOST
  yield ratio(
    "flat at first",
    f"up to {flat} examples the linear rate takes at most a quarter more epochs"
    " than a batch of 32",
    cells("linear", (4, FLAT)),
    ["one"],
    below=1.25,
  )
  yield ratio(
    "then rising",
    f"at {most:,} examples it takes over twice the epochs, or never arrives",
    cells("linear", (MOST,)),
    ["one"],
    above=2.0,
  )
  yield ratio(
    "constant rate",
    f"at {flat} examples the constant rate takes over twice as many as the"
    " linear one",
    cells("constant", (FLAT,)),
    cells("linear", (FLAT,)),
    above=2.0,
  )
  yield dict(
    name="square root between",
    says=f"at {flat} examples the square root lies between the two",
    kind="ordering",
    order="falls",
    column=TO_ACCURACY,
    runs=[label(rule, FLAT) for rule in ("constant", "root", "linear")],
  )
  yield ratio(
    "warm-up extends it",
    f"at {BATCH * EDGE:,} examples the linear rate with a warm-up needs fewer"
    " epochs than without",
    cells("warm", (EDGE,)),
    cells("linear", (EDGE,)),
    below=1.0,
  )
  yield ratio(
    "warm-up costs nothing",
    f"at {flat} examples the warm-up needs at most a fifth more epochs",
    cells("warm", (FLAT,)),
    cells("linear", (FLAT,)),
    below=1.2,
  )
  yield dict(
    name="noise scale predicts the limit",
    says=(
      f"the linear rate comes to take twice the epochs between {flat} and"
      f" {BATCH * EDGE:,} examples; the noise scale lies between a quarter of"
      " the one and four times the other"
    ),
    kind="bound",
    column=NOISE,
    of=cells("constant", (FLAT,)),
    above=flat / 4,
    below=4.0 * BATCH * EDGE,
  )


def panels():
  series = {
    title: [(BATCH * count, label(rule, count)) for count in WORKERS]
    for rule, (title, _) in RULES.items()
  }
  by_batch = dict(xlabel="examples in an update", xlog=True, series=series)
  source = (
    "Goyal et al. 2017: no loss of accuracy up to 8,192 images, 32 times the"
    " smallest batch, with the linear rate and a warm-up"
  )
  return [
    dict(
      by_batch,
      title=f"epochs to an accuracy of {ACCURACY:.0%}",
      column=TO_ACCURACY,
      ylabel="epochs",
    ),
    dict(
      by_batch,
      title="accuracy less that of a batch of 32",
      column="test_accuracy",
      ylabel="points (%)",
      scale=100.0,
      minus="one",
      published=[
        dict(
          title="warm-up, published",
          source=source,
          # No loss up to 32 times the smallest batch.
          points=[(BATCH, 0), (32 * BATCH, 0)],
          of=RULES["warm"][0],
        )
      ],
      ylim=(-80, 10),
    ),
    dict(
      title="gradient noise scale, constant rate",
      column=NOISE,
      xlabel="examples in an update",
      ylabel="examples",
      xlog=True,
      yscale="log",
      series={
        "second half of the run": [
          (BATCH * count, label("constant", count)) for count in WORKERS[1:]
        ]
      },
    ),
  ]


def get_figure():
  return dict(
    title="How far the batch can grow",
    paper=(
      "Goyal et al.: Accurate, large minibatch SGD, arXiv 1706.02677;"
      " McCandlish, Kaplan, Amodei et al.: An empirical model of large-batch"
      " training, arXiv 1812.06162"
    ),
    finding=(
      "With the linear rate the epochs double between 512 and 2,048 examples,"
      " and the noise scale is 3,750; that a warm-up extends this is open."
    ),
    about=(
      "Synchronous SGD without momentum; each worker has a batch of 32, and the"
      " batch grows with the workers. There are eight evaluations per epoch;"
      " epochs are counted to the first that has the accuracy."
    ),
    columns={
      TO_ACCURACY: dict(
        kind="until", column="test_accuracy", above=ACCURACY, along="epoch"
      ),
      NOISE: dict(kind="noise_scale", since=0.5),
    },
    claims=list(claims()),
    panels=panels(),
    quick={
      "data.name": "digits",
      "epochs": 60.0,
      "learning_rate": 0.02,
    },
    tuned=(
      "the rate of one worker on seeds 100 and 101, without momentum: 0.05 and"
      " 0.1 trained one worker, and 0.02 (seed 100) as well as 0.05; with 0.02"
      " the linear rate was already twice as slow at 512 examples, so that half"
      " of it was taken. The claims' bounds were set before the run"
    ),
  )
