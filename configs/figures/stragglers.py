"""One slow worker of four: the cost of waiting for it, and of not waiting.

Synchronous SGD takes the mean of one gradient from every worker; asynchronous
SGD applies each gradient on arrival. One of four workers is up to ten times
slower. The figure shows the time until the training loss is 0.2 on handwritten
digits, in simulated time (constant durations) and live (threads, real time).

  asgd reproduce stragglers
  python -m launch.train --config=configs/figures/stragglers.py

80 cells, about 15 minutes on two cores; --quick under 3 minutes. Live runs of
one seed alternate between synchronous and asynchronous, every second seed in
the opposite order, so other load on the machine affects both equally.
"""

import ml_collections

SLOWDOWNS = 1, 2, 3, 5, 10
LIVE = 1, 3, 10  # slowdowns of live runs, which take real time
LOSS = 0.2  # the training loss to reach
RATE = 0.01  # per gradient; a synchronous update is the mean of four
RECIPES = {"async": ("asgd", RATE), "sync": ("ssgd", 4 * RATE)}
TITLES = {"async": "asynchronous", "sync": "synchronous"}


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="digits")
  config.model = dict(name="mlp", hidden=(512, 512))
  runs = {}
  for slow in SLOWDOWNS:
    for label, (recipe, rate) in RECIPES.items():
      runs[f"{label}-{slow}"] = dict(
        recipe=recipe,
        title=f"{TITLES[label]}, simulated, {slow}",
        learning_rate=rate,
        # Durations are in jobs of a fast worker.
        durations=dict(name="constant", slowdown=(1, 1, 1, slow)),
      )
  for slow in LIVE:
    for label, (recipe, rate) in RECIPES.items():
      runs[f"live-{label}-{slow}"] = dict(
        engine="threads",
        recipe=recipe,
        title=f"{TITLES[label]}, live, {slow}",
        learning_rate=rate,
        slowdown=(1, 1, 1, slow),  # live workers sleep to be slow
      )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)  # this order
  config.workers = (4,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 256  # large, so that a live job is mostly computing
  config.examples = 256 * 320  # 320 gradients
  # Otherwise the slow worker would count as failed.
  config.live = dict(late_seconds=20.0)
  config.evaluations = 1  # at the end: an evaluation takes the workers' cores
  config.curvature_checks = 0
  if arg == "tiny":
    config.model.hidden, config.seeds = (), (0,)
    config.batch_size, config.examples = 16, 16 * 8
    kinds = [f"{kind}{label}" for kind in ("", "live-") for label in RECIPES]
    config.only = [f"{kind}-{slow}" for kind in kinds for slow in (1, 10)]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def cells(label, slowdowns):
  return [f"{label}-{slow}" for slow in slowdowns]


# Explanations of verdicts, from the numbers of the full run.
NOTES = {
  "not waiting, simulated": (
    "1.31; the workers' rates give 4 / 3.1 = 1.29."
  ),
  "ten times slower, simulated": (
    "7.6; the workers' rates give 10 x 3.1 / 4 = 7.75."
  ),
  "equal workers, simulated": (
    "With constant durations the gradients of all four arrive at the same time,"
    " and both algorithms reach the loss in the same round."
  ),
  "not waiting, live": (
    "0.75: a slow worker sleeps for most of the time, and leaves the two cores"
    " to the other three."
  ),
  "ten times slower, live": (
    "4.3, less than simulated, because four workers share two cores with other"
    " programs; the interval over five seeds is wide."
  ),
  "equal workers, live": (
    "No difference is visible; the interval is wide because other programs used"
    " the cores."
  ),
}


def time_claims(where, prefix, slowdowns):
  # prefix of labels: "live-" for live runs, "" for simulated ones.
  sync, asynchronous = cells(f"{prefix}sync", slowdowns), f"{prefix}async"
  return [
    dict(
      name=f"waiting, {where}",
      says="the slower the one worker, the later synchronous SGD",
      kind="monotone",
      order="rises",
      column="time to loss",
      runs=sync,
    ),
    dict(
      name=f"not waiting, {where}",
      says=(
        "with a worker ten times slower asynchronous SGD takes less than half"
        " as long again"
      ),
      kind="ratio",
      column="time to loss",
      of=f"{asynchronous}-10",
      to=f"{asynchronous}-1",
      below=1.5,
    ),
    dict(
      name=f"ten times slower, {where}",
      says="with that worker synchronous SGD takes over three times as long",
      kind="ratio",
      column="time to loss",
      of=f"{prefix}sync-10",
      to=f"{asynchronous}-10",
      above=3.0,
    ),
    dict(
      name=f"equal workers, {where}",
      says="without a slow worker their times differ by less than a quarter",
      kind="ratio",
      column="time to loss",
      of=f"{prefix}sync-1",
      to=f"{asynchronous}-1",
      # A quarter either way.
      above=0.8,
      below=1.25,
    ),
  ]


def panel(title, column, ylabel, prefix, slowdowns, published=()):
  return dict(
    title=title,
    column=column,
    xlabel="slowdown of one worker of four",
    ylabel=ylabel,
    series={
      TITLES[label]: [(s, f"{prefix}{label}-{s}") for s in slowdowns]
      for label in RECIPES
    },
    published=list(published),
    xlog=True,
    yscale="log",
  )


# Gradients per time of a fast worker's job.
def expected():
  source = "computed: three workers of rate 1 and one of rate 1 / s"
  rates = {
    "async": ("asynchronous: 3 + 1 / s", [(s, 3 + 1 / s) for s in SLOWDOWNS]),
    "sync": ("synchronous: 4 / s", [(s, 4 / s) for s in SLOWDOWNS]),
  }
  return [
    dict(
      title=title,
      source=source,
      points=points,
      of=TITLES[label],
      line="--",
      marker="",
    )
    for label, (title, points) in rates.items()
  ]


def get_figure():
  return dict(
    title="A straggler: synchronous and asynchronous SGD",
    paper=(
      "Zheng et al., Asynchronous Stochastic Gradient Descent with Delay"
      " Compensation, ICML 2017, arXiv 1609.08326, compares both by the clock;"
      " the sweep over one worker's slowdown is ours"
    ),
    finding=(
      "With a worker ten times slower SSGD takes over 7 times as long as ASGD"
      " in simulated time; live, five seeds on shared cores leave the claim"
      " open."
    ),
    about=(
      "Time until the training loss is 0.2 with four workers, one of them up to"
      " ten times slower: simulated, in job times of a fast worker, and live,"
      " in seconds, with threads on two cores that other programs used, too."
      " Live synchronous and asynchronous runs took turns."
    ),
    columns={
      "time to loss": dict(kind="reach", loss=LOSS),
      "rate": dict(kind="quotient", of="messages", by="simulated_time"),
      "live rate": dict(kind="quotient", of="messages", by="seconds"),
    },
    claims=[
      *time_claims("simulated", "", SLOWDOWNS),
      *time_claims("live", "live-", LIVE),
    ],
    notes=NOTES,
    panels=[
      panel(
        "simulated", "time to loss", f"time to loss {LOSS}", "", SLOWDOWNS
      ),
      panel(
        "simulated, gradients",
        *("rate", "gradients a job time", "", SLOWDOWNS, expected()),
      ),
      panel(
        "live", "time to loss", f"seconds to loss {LOSS}", "live-", LIVE
      ),
      panel("live, gradients", "live rate", "gradients/s", "live-", LIVE),
    ],
    quick={
      "only": [
        *cells("async", (1, 10)),
        *cells("sync", (1, 10)),
        *cells("live-async", (1, 10)),
        *cells("live-sync", (1, 10)),
      ],
      "batch_size": 64,
      "examples": 64 * 320,
    },
    tuned=(
      "rate and loss on seeds 100 and 101, simulated at slowdown 10: of 0.01,"
      " 0.02 and 0.04 the rate 0.01, which reaches a loss of 0.2 after two"
      " thirds of the run; a synchronous update, the mean of four gradients,"
      " has four times the rate, untuned"
    ),
    turns=True,  # live runs alternate, see `asgd.figures.figure_file`
  )
