"""The largest stable rate of SGD with a fixed delay: 2 sin(pi / (4 tau + 2)).

The loss is f(w) = sum_i c_i w_i^2 / 2 with largest curvature 1; every gradient
is tau updates old: w_{t+1} = w_t - eta grad f(w_{t - tau}). The iteration
converges for eta below the edge and diverges above (Yang et al., "PipeMare:
Asynchronous Pipeline Parallel DNN Training", MLSys 2021, arXiv 1910.05124, the
lemma on a fixed delay). With heavy-ball momentum 0.9 the edge is ten times
lower.

  asgd reproduce delayed_edge
  python -m launch.train --config=configs/figures/delayed_edge.py

90 cells, 3 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

DELAYS = 1, 2, 4, 8, 16, 32  # tau, updates
SIDES = {"below": 0.98, "above": 1.02}  # rate / edge
# Edges with heavy-ball momentum 0.9, from the roots of its polynomial.
MOMENTUM = {1: 0.1, 8: 0.01394, 32: 0.00406}
# Edges with momentum are computed less exactly, so the distance is 3 %.
MOMENTUM_SIDES = {"below": 0.97, "above": 1.03}
PAPER = (
  "Yang, Zhang, Li, Re, Aberger, De Sa: PipeMare: Asynchronous Pipeline"
  " Parallel DNN Training, MLSys 2021, arXiv 1910.05124"
)


def edge(delay):
  # sin(pi x / 2) is the imaginary part of i^x: the config imports no math.
  return 2 * (1j ** (1 / (2 * delay + 1))).imag


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.analytic:quadratic", dimensions=16, least=0.05
  )
  runs = {}
  for delay in DELAYS:
    for side, factor in SIDES.items():
      runs[f"t{delay}-{side}"] = dict(
        recipe="asgd",
        title=f"tau {delay}, 2 % {side}",
        # tau + 1 workers that take turns have a fixed delay of tau.
        workers=(delay + 1,),
        learning_rate=factor * edge(delay),
      )
  for delay, limit in MOMENTUM.items():
    for side, factor in MOMENTUM_SIDES.items():
      runs[f"m{delay}-{side}"] = dict(
        recipe="asgd",
        momentum=0.9,
        title=f"momentum 0.9, tau {delay}, 3 % {side}",
        workers=(delay + 1,),
        learning_rate=factor * limit,
      )
  config.runs = runs
  config.order = dict(name="fixed_delay")
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 1  # the gradient of the quadratic has no noise
  config.examples = 2000  # updates
  config.evaluations = 8
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.seeds, config.examples, config.evaluations = (0,), 40, 1
    ends = [f"{kind}{delay}" for kind in "tm" for delay in (1, 32)]
    config.only = [f"{end}-{side}" for end in ends for side in SIDES]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def labels(prefix, delays, side):
  return [f"{prefix}{delay}-{side}" for delay in delays]


def bounds(prefix, delays, *, falls, grows, name=""):
  """Returns claims: the loss falls below the edge, and grows above it."""
  # Medians: above the edge the growth may be infinite.
  common = dict(kind="bound", column="growth", statistic="sign")
  return [
    dict(
      name=f"{name}converges below",
      says=falls,
      of=labels(prefix, delays, "below"),
      below=0.0,
      **common,
    ),
    dict(
      name=f"{name}diverges above",
      says=grows,
      of=labels(prefix, delays, "above"),
      above=0.0,
      **common,
    ),
  ]


def claims():
  sides = bounds(
    "t",
    DELAYS,
    falls="2 % below the edge the loss falls, at each delay",
    grows="2 % above the edge the loss grows, at each delay",
  )
  edges = [
    dict(
      name=f"edge at delay {delay}",
      says=(
        "the rate at which the loss stays equal is within 0.5 % of 2 sin(pi /"
        f" {4 * delay + 2})"
      ),
      kind="threshold",
      column="growth",
      statistic="t",
      # The x of a cell is its factor of the edge.
      runs=[(f"t{delay}-{side}", factor) for side, factor in SIDES.items()],
      level=0.0,  # no growth: between the two rates
      above=0.995,
      below=1.005,
    )
    for delay in DELAYS
  ]
  momentum = bounds(
    "m",
    MOMENTUM,
    falls="heavy ball at momentum 0.9 converges 3 % below its own edge",
    grows="heavy ball at momentum 0.9 diverges 3 % above its own edge",
    name="momentum ",
  )
  return sides + edges + momentum


def panels():
  formula = dict(
    title="2 sin(pi / (4 tau + 2))",
    source=PAPER + ", the lemma on a fixed delay",
    points=[(delay, edge(delay)) for delay in DELAYS],
    line="-",
  )
  roots = dict(
    title="momentum 0.9: roots of the polynomial",
    source="computed: the largest rate with all roots inside the unit circle",
    points=list(MOMENTUM.items()),
    line="--",
  )

  def series(title, prefix, delays, side):
    return {title: [(d, f"{prefix}{d}-{side}") for d in delays]}

  both = {
    **series("2 % below", "t", DELAYS, "below"),
    **series("2 % above", "t", DELAYS, "above"),
    **series("momentum 0.9, 3 % below", "m", MOMENTUM, "below"),
    **series("momentum 0.9, 3 % above", "m", MOMENTUM, "above"),
  }
  return [
    dict(
      title="rates that were run",
      column="learning_rate",
      xlabel="delay tau (updates)",
      ylabel="rate x curvature",
      series=both,
      published=[formula, roots],
      xlog=True,
      yscale="log",
    ),
    dict(
      title="growth in the second half",
      column="growth",
      xlabel="delay tau (updates)",
      ylabel="ln (last loss / loss half-way)",
      series=both,
      xlog=True,
      yscale="symlog",
    ),
  ]


def get_figure():
  return dict(
    title="The stability edge of delayed SGD",
    paper=PAPER,
    finding=(
      "SGD with a delay diverges at the rate that theory gives, within 0.5 %."
    ),
    about=(
      "Gradient descent on a quadratic whose gradients are a fixed number of"
      " updates old is stable up to a rate of 2 sin(pi / (4 tau + 2)) over the"
      " largest curvature. The runs have rates just below and just above this"
      " edge; the seeds differ in the random starting point only."
    ),
    # ln(last loss / loss half-way)
    columns=dict(growth=dict(kind="change", column="train_loss", since=0.5)),
    claims=claims(),
    panels=panels(),
    quick=dict(
      # 400 updates are enough for the short delays.
      only=labels("t", (1, 4), "below") + labels("t", (1, 4), "above"),
      examples=400,
    ),
    tuned="nothing",
  )
