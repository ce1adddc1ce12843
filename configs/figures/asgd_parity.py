"""ASGD against one worker: epochs to the same loss, and staleness.

Asynchronous SGD with 1 to 64 workers uses the rate and the batch size of one
worker, without momentum and with 0.9, on a cluster of equal machines (gamma
model, V = 0.1) and one of unequal ones (V_mach = 0.6). Staleness, its
distribution and the fraction of slow batches are compared with closed forms
(`claims_of_staleness`). After Hakimi, Barkai, Gabel and Schuster, "Taming
Momentum in a Distributed Asynchronous Environment", arXiv 1907.11612.

  asgd reproduce asgd_parity
  python -m launch.train --config=configs/figures/asgd_parity.py

140 cells; --quick, on handwritten digits, under 3 minutes on two cores.
"""

import ml_collections

WORKERS = 1, 2, 4, 8, 16, 32, 64
MOST = WORKERS[-1]
CLUSTERS = {"equal": "homogeneous", "unequal": "heterogeneous"}
RATES = {0.0: 0.05, 0.9: 0.005}  # momentum -> learning rate; one effective rate
# Every number of workers is measured by the epochs to this loss.
LOSS = 0.42  # test loss that one worker reaches after a sixth of the epochs
# Coefficients of variation: of a machine's batch times, and of the machines'
# means. Both are those of the paper and of `asgd.orders.durations`.
V, V_MACHINE = 0.1, 0.6
PI, E = 3.141592653589793, 2.718281828459045  # the config imports no math
EPOCHS = 6.0
TO_LOSS = f"epochs to {LOSS}"


def label(momentum, cluster):
  return ("momentum" if momentum else "plain") + f"-{cluster}"


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.data = dict(name="fashion")
  config.model = dict(name="mlp", hidden=(64,))
  runs = {}
  for momentum, rate in RATES.items():
    for cluster, durations in CLUSTERS.items():
      title = f"momentum {momentum:g}, {cluster} machines"
      runs[label(momentum, cluster)] = dict(
        recipe="asgd",
        momentum=momentum,
        learning_rate=rate,  # tuned on one worker, so both clusters use it
        durations=dict(name=durations),
        title=title,
      )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.workers = WORKERS
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 64
  config.epochs = EPOCHS
  # Eight per epoch: "epochs to" is a multiple of 1/8.
  config.evaluations = 48
  config.evaluation_examples = 2000
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.data.name, config.model.hidden = "digits", ()
    config.workers, config.seeds, config.batch_size = (2, 4), (0,), 16
    config.epochs, config.evaluations = 0.1, 1
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def deviation_equal(count):
  """Returns the standard deviation of staleness on `count` equal machines.

  While a worker computes a batch of duration T, every other worker sends 0, 1
  or 2 messages: a stationary renewal process with periods D sends none with
  probability E max(D - T, 0), two with E max(T - D, 0). So, given T, their
  number has variance E|D - T| - V^2, where E|D - T| = 2 V / sqrt(pi).
  """
  others = count - 1
  # Given T the workers are independent, so their variances add up. T is the
  # same for all of them, so the deviations that it causes add up.
  variance_given_t = others * (2 * V / PI**0.5 - V**2)
  return (variance_given_t + (others * V) ** 2) ** 0.5


# The density of staleness on unequal machines. A machine's mean batch time p is
# Gamma(a, 1 / a), a = 1 / V_mach^2; its messages have staleness N p E[1 / p].
# Fast machines send more messages: over messages p is Gamma(a - 1, 1 / a). Then
# staleness / N is Gamma(a - 1, 1 / b) with b = a - 1: its mean is 1 and its
# variance 1 / b.
SHAPE = 1 / V_MACHINE**2 - 1
GAMMA_OF_SHAPE = 0.9256731453766787  # the gamma function at SHAPE


def density_equal(x):
  """Returns a normal density with mean and deviation of equal machines."""
  deviation = deviation_equal(MOST)
  z = (x - (MOST - 1)) / deviation  # distance from the mean, in deviations
  return E ** (-z * z / 2) / (deviation * (2 * PI) ** 0.5)


def density_unequal(x):
  """Returns the density of staleness on 64 unequal machines."""
  # Staleness / N is Gamma(a - 1, 1 / b), so the density is divided by N.
  scaled = x * SHAPE / MOST
  return (
    scaled ** (SHAPE - 1) * E**-scaled * SHAPE / MOST / GAMMA_OF_SHAPE
  )


def cells(momentum, cluster, counts=WORKERS):
  return [f"{label(momentum, cluster)}@{count}" for count in counts]


def claims_of_loss():
  for momentum in RATES:
    for cluster in CLUSTERS:
      where = f"momentum {momentum:g}, {cluster} machines"
      yield dict(
        name=f"more epochs, {where}",
        says=f"the epochs to a loss of {LOSS} grow from 1 to 8 to 64 workers",
        kind="ordering",
        order="rises",
        column=TO_LOSS,
        runs=cells(momentum, cluster, (1, 8, MOST)),
      )
  # few, never: workers with which one worker's rate works, or never trains.
  for momentum, few, never in ((0.0, 4, 32), (0.9, 2, 32)):
    for cluster in CLUSTERS:
      where = f"momentum {momentum:g}, {cluster} machines"
      yield dict(
        name=f"parity of few, {where}",
        says=f"{few} workers need at most a quarter more epochs than one",
        kind="ratio",
        statistic="sign",
        column=TO_LOSS,
        of=cells(momentum, cluster, (few,)),
        to=cells(momentum, cluster, (1,)),
        below=1.25,
      )
      yield dict(
        name=f"never, {where}",
        says=f"{never} workers, or already fewer, never reach the loss",
        kind="bound",
        statistic="sign",
        column="never from",
        of=[label(momentum, cluster)],
        below=never + 0.5,  # between two numbers of workers
      )


# Explanation of a verdict, from the numbers of the full run.
SLOW_NOTE = (
  "25.5 %: the speeds of 64 machines are drawn once a seed, so that five"
  " clusters give 14 to 31 %."
)


def claims_of_staleness():
  plain = {cluster: label(0.0, cluster) for cluster in CLUSTERS}
  for cluster, run in plain.items():
    for count in (8, MOST):
      yield dict(
        name=f"mean staleness, {count} {cluster} machines",
        says=f"mean staleness is N - 1 = {count - 1}, within 5 %",
        kind="bound",
        column="staleness_mean",
        of=[f"{run}@{count}"],
        # 5 %: the first messages have less staleness.
        above=0.95 * (count - 1),
        below=1.05 * (count - 1),
      )
  for count in (8, MOST):
    expected = deviation_equal(count)
    yield dict(
      name=f"deviation of staleness, {count} equal machines",
      says=f"it is {expected:.2f} in the second half of a run, within 15 %",
      kind="bound",
      column="deviation",
      of=[f"{plain['equal']}@{count}"],
      above=0.85 * expected,
      below=1.15 * expected,
    )
  spread = MOST / SHAPE**0.5
  yield dict(
    name=f"deviation of staleness, {MOST} unequal machines",
    says=f"it is {spread:.0f} in the second half of a run, within a quarter",
    kind="bound",
    column="deviation",
    of=[f"{plain['unequal']}@{MOST}"],
    above=0.75 * spread,
    below=1.25 * spread,
  )
  # expected: P(T > 1.25) for gamma times with mean 1.
  for cluster, expected, margin in (
    ("equal", 0.0094, 0.002),
    ("unequal", 0.279, 0.05),
  ):
    yield dict(
      name=f"slow batches, {cluster}",
      says=f"{expected:.2%} of batches take over 1.25 mean times",
      kind="bound",
      column="slow batches",
      of=[f"{plain[cluster]}@{MOST}"],
      above=expected - margin,
      below=expected + margin,
      note=SLOW_NOTE if cluster == "unequal" else "",
    )


def closed_forms():
  """Returns the curves of the density of staleness, one for each cluster."""
  return [
    dict(
      title="closed form",
      source="a normal density, and a gamma density (see the config)",
      of=cluster,
      # The density per update, in percent.
      points=[(x, 100 * density(x)) for x in range(2, 260, 2)],
      line="-",
      marker="",
    )
    for cluster, density in (
      ("equal", density_equal),
      ("unequal", density_unequal),
    )
  ]


def panels():
  series = {
    f"momentum {momentum:g}, {cluster}": [
      (count, f"{label(momentum, cluster)}@{count}") for count in WORKERS
    ]
    for momentum in RATES
    for cluster in CLUSTERS
  }
  # Panels against the number of workers share their x axis.
  by_workers = dict(xlabel="workers", xlog=True, series=series)
  plain = {
    cluster: series[f"momentum 0, {cluster}"] for cluster in CLUSTERS
  }
  return [
    dict(
      by_workers,
      title=f"epochs to a test loss of {LOSS}",
      column=TO_LOSS,
      ylabel="epochs",
    ),
    dict(
      by_workers,
      title="test loss at the end",
      column="test_loss",
      ylabel="nats",
      yscale="log",
    ),
    dict(
      by_workers,
      series=plain,
      title="mean staleness",
      column="staleness_mean",
      ylabel="updates",
      published=[
        dict(
          title="N - 1",
          source="closed form",
          points=[(count, count - 1) for count in WORKERS],
          line=":",
          marker="",
        )
      ],
    ),
    dict(
      title=f"staleness of messages, {MOST} workers",
      column="staleness.csv",
      xlabel="updates",
      ylabel="share of messages (%)",
      scale=100.0,  # percent
      series={
        cluster: [(0, f"{label(0.0, cluster)}@{MOST}")] for cluster in CLUSTERS
      },
      published=closed_forms(),
    ),
  ]


def get_figure():
  return dict(
    title="ASGD beside one worker",
    paper=(
      "Hakimi, Barkai, Gabel, Schuster: Taming Momentum in a Distributed"
      " Asynchronous Environment, arXiv 1907.11612: clusters, slow batches"
    ),
    finding=(
      "ASGD needs more epochs the more workers it has; with momentum, 32"
      " workers never reach the loss; how many workers cost nothing is open."
    ),
    about=(
      "Epochs of all workers together until the test loss is that of one worker"
      " after a sixth of the run, with the same rate and batch."
    ),
    columns={
      TO_LOSS: dict(
        # The first evaluation below the loss; infinite if a run has none.
        kind="until", column="test_loss", below=LOSS, along="epoch"
      ),
      # Above the epochs of any size: the loss is never reached.
      "never from": dict(kind="first", column=TO_LOSS, above=1000.0),
      "deviation": dict(kind="deviation", column="staleness", since=0.5),
      # Durations are in mean batch times.
      "slow batches": dict(kind="share", column="duration", above=1.25),
    },
    claims=[*claims_of_loss(), *claims_of_staleness()],
    panels=panels(),
    quick={
      "data.name": "digits",
      "batch_size": 16,
      "epochs": 30.0,
      "seeds": (0, 1, 2, 3, 4),
    },
    tuned=(
      "the rate on seeds 100 and 101 with one worker: of 0.05, 0.1, 0.2 and 0.4"
      " (a tenth with momentum) the one with the least loss after 12 epochs, or"
      " as good as it; with 0.1, 16 workers no longer trained (seed 100)"
    ),
  )
