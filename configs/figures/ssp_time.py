"""Matrix factorisation under SSP and ESSP, with messages that take time.

The runs of `ssp` over a network, with workers of varying durations: square loss
against simulated time. After Dai, Kumar, Wei, Ho, Gibson and Xing,
"High-Performance Distributed ML at Scale through Parameter Server Consistency
Models", AAAI 2015, arXiv 1410.8043. A pull takes two latencies, each a quarter
of a batch, and so does a push. Rows that ESSP's server sends travel while
workers compute.

  asgd reproduce ssp_time
  python -m launch.train --config=configs/figures/ssp_time.py

70 cells, 6 minutes on two cores; --quick under 3 minutes.
"""

import ml_collections

BOUNDS = 0, 2, 3, 5, 10  # s, clocks, as in `ssp`
EAGER = 0, 10
RATES = {"stable": 1.5, "edge": 8.0}
# Test losses to reach; predicting the mean rating has 1.04.
LEVELS = {"stable": 0.8, "edge": 0.2}
# Latency in mean batch times; port in bytes per mean batch time.
NETWORK = dict(latency=0.25, port=4e5)


def get_config(arg=None):
  config = ml_collections.ConfigDict()
  config.problem = dict(
    name="asgd.problems.factorisation:matrix_factorisation", rank=4
  )
  runs = {}
  for side, rate in RATES.items():
    for which, bounds in (("ssp", BOUNDS), ("essp", EAGER)):
      for bound in bounds:
        runs[f"{which}{bound}-{side}"] = dict(
          recipe="table",
          clock_every=2,
          learning_rate=rate,
          consistency=which,
          bound=bound,
          title=f"{which.upper()} {bound}, {side}",
        )
  config.runs = ml_collections.ConfigDict(runs, sort_keys=False)
  config.network = NETWORK
  config.workers = (8,)
  config.seeds = (0, 1, 2, 3, 4)
  config.batch_size = 200
  config.epochs = 12.0
  # More variation than in `ssp`: waiting must cost something.
  config.durations = dict(name="gamma", variation=0.4)
  config.evaluations = 36
  config.curvature_checks = 0
  config.on_nan = "record"
  if arg == "tiny":
    config.workers, config.seeds, config.epochs = (2,), (0,), 1.0
    config.evaluations = 1
    ends = [f"{which}{bound}" for which in ("ssp", "essp") for bound in EAGER]
    config.only = [f"{end}-{side}" for end in ends for side in RATES]
  elif arg:
    raise ValueError(f"unknown variant {arg!r}; known: tiny")
  return config.lock()


def labels(which, side, bounds):
  return [f"{which}{bound}-{side}" for bound in bounds]


def ahead(name, says, slow, fast, side):
  return dict(
    name=name,
    says=says,
    kind="ordering",
    order="falls",
    column=f"time to {LEVELS[side]}",
    runs=[f"{slow}-{side}", f"{fast}-{side}"],  # infinite if it is not reached
  )


def claims():
  return [
    ahead(
      "SSP 3 is ahead of SSP 0, stable",
      "by time a bound of 3 is better than waiting for all, at the stable rate",
      *("ssp0", "ssp3", "stable"),
    ),
    ahead(
      "SSP 10 is behind SSP 3, stable",
      "the larger bound needs so many more clocks that it is later",
      *("ssp10", "ssp3", "stable"),
    ),
    ahead(
      "ESSP 10 is ahead of SSP 3, stable",
      "at the stable rate ESSP at s = 10 is ahead of the best bound of SSP",
      *("ssp3", "essp10", "stable"),
    ),
    ahead(
      "ESSP 10 is ahead of ESSP 0, stable",
      "ESSP gains by not waiting, and loses nothing",
      *("essp0", "essp10", "stable"),
    ),
    ahead(
      "ESSP 0 is ahead of SSP 0, stable",
      "at s = 0, too, pushed rows save a worker its pulls",
      *("ssp0", "essp0", "stable"),
    ),
    *edge_claims(),
    *message_claims(),
  ]


def edge_claims():
  return [
    ahead(
      "ESSP 10 is ahead of SSP 0, edge",
      "at the edge ESSP at s = 10 is ahead of SSP 0",
      *("ssp0", "essp10", "edge"),
    ),
    ahead(
      "ESSP 10 is ahead of SSP 3, edge",
      "at the edge ESSP at s = 10 is ahead of SSP 3",
      *("ssp3", "essp10", "edge"),
    ),
    dict(
      name="SSP worsens with s, edge",
      says="less waiting does not pay: the time rises from s = 0 to 3 to 10",
      kind="ordering",
      order="rises",
      column=f"time to {LEVELS['edge']}",
      runs=labels("ssp", "edge", (0, 3, 10)),
    ),
    dict(
      name="SSP 10 does not get there, edge",
      says="at the edge SSP at s = 10 diverges by time, too",
      kind="bound",
      column="diverged",
      of=labels("ssp", "edge", (10,)),
      above=0.5,  # "diverged" is 0 or 1
    ),
  ]


def message_claims():
  return [
    dict(
      name="time of a run",
      says="a run takes less time with s = 3 than with 0, and ESSP even less",
      kind="ordering",
      order="falls",
      column="simulated_time",
      runs=labels("ssp", "stable", (0, 3)) + labels("essp", "stable", (10,)),
    ),
    dict(
      name="bytes",
      says="ESSP at s = 10 sends over 1.5 times the bytes of SSP at s = 0",
      kind="ratio",
      column="bytes_down",
      of=labels("essp", "stable", (10,)),
      to=labels("ssp", "stable", (0,)),
      above=1.5,  # ESSP sends all rows, needed or not
    ),
  ]


def series(side):
  return {
    "SSP": [(s, f"ssp{s}-{side}") for s in BOUNDS],
    "ESSP": [(s, f"essp{s}-{side}") for s in EAGER],
  }


def curves(side):
  return {
    f"{which.upper()} {s}": [(0, f"{which}{s}-{side}")]
    for which, bounds in (("ssp", BOUNDS), ("essp", EAGER))
    for s in bounds
  }


def panels():
  time_label = "time (mean batches)"
  loss_panels = [
    dict(
      title=f"square loss by time, rate {rate:g} ({side})",
      column="test_loss",
      along="time",
      xlabel=time_label,
      ylabel="mean squared test error",
      series=curves(side),
      yscale="log",
      # Without this limit diverging runs would hide all others.
      ylim=(0.01, 3.0) if side == "edge" else None,
    )
    for side, rate in RATES.items()
  ]
  loss_panels += [
    dict(
      title=f"time to a test error of {LEVELS[side]} ({side})",
      column=f"time to {LEVELS[side]}",
      xlabel="bound s (clocks)",
      ylabel=time_label,
      series=series(side),
    )
    for side in RATES
  ]
  return [
    *loss_panels,
    dict(
      title="time of a run (stable)",
      column="simulated_time",
      xlabel="bound s (clocks)",
      ylabel=time_label,
      series=series("stable"),
    ),
    dict(
      title="bytes from the server (stable)",
      column="bytes_down",
      xlabel="bound s (clocks)",
      ylabel="MB",
      scale=1e-6,
      series=series("stable"),
    ),
  ]


def get_figure():
  return dict(
    title="SSP and ESSP by time",
    paper=(
      "Dai, Kumar, Wei, Ho, Gibson, Xing: High-Performance Distributed ML at"
      " Scale through Parameter Server Consistency Models, AAAI 2015, arXiv"
      " 1410.8043"
    ),
    finding=(
      "By time a bound of 3 is the best for SSP; ESSP is ahead of it, but sends"
      " twice the bytes."
    ),
    about=(
      "Square loss of test ratings against simulated time, in mean batches, on"
      " generated ratings (the paper has Netflix). 8 workers have varying batch"
      " times (gamma, V = 0.4). The latency of the network is a quarter of a"
      " batch: a pull takes half a batch, and so does a push. With SSP rows"
      " become too old one by one, so most jobs pull some of them for any s;"
      " with ESSP the server pushes them."
    ),
    columns={
      # The first evaluation below the level.
      f"time to {level}": dict(kind="until", column="test_loss", below=level)
      for level in LEVELS.values()
    },
    claims=claims(),
    panels=panels(),
    quick={
      "only": [
        *labels("ssp", "stable", (0, 3, 10)),
        *labels("essp", "stable", EAGER),
        *labels("ssp", "edge", (0, 3, 10)),
        *labels("essp", "edge", (10,)),
      ]
    },
    tuned=(
      "latency and bandwidth on seed 100: one of four networks, in which round"
      " trips cost more than bytes"
    ),
  )
